"""Lower bounds of all margins of a batch of samples, by intervals or backward linear bounds."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from wdjax.certify import crown
from wdjax.certify.coefficients import Rows, Whole
from wdjax.certify.domain import Array
from wdjax.certify.graph import flatten
from wdjax.certify.lipschitz import Classifier
from wdjax.certify.network import build
from wdjax.certify.region import Region
from wdjax.models.conv import plain

Method = Literal["interval", "crown"]
METHODS: tuple[Method, ...] = get_args(Method)
"""From the cheapest to the tightest."""


def lower(model: Classifier, region: Region, y: Array, method: Method) -> Array:
    """``[B, K]`` lower bounds of ``z_y - z_j`` over each region, inf at ``j = y``."""
    state = prepare(model, region, method)
    place = state.network.graph.outputs[0]
    if place in state.network.exact:  # Logits that do not depend on the input.
        logits = jnp.broadcast_to(state.network.exact[place], (len(y), *_classes(state, place)))
        low = jnp.take_along_axis(logits, y[:, None], axis=1) - logits
    else:
        low = _contrasts(state, place, y, method)
    rivals = jnp.arange(low.shape[1]) != y[:, None]
    for lost in state.network.lost:
        low = jnp.where(lost, -jnp.inf, low)
    return jnp.where(rivals, jnp.where(jnp.isnan(low), -jnp.inf, low), jnp.inf)


def prepare(model: Classifier, region: Region, method: Method) -> crown.Pass:
    """The bounds of everything that the model computes before its margins."""
    sample = jax.ShapeDtypeStruct((1, *region.center.shape[1:]), region.center.dtype)
    with plain():
        closed = jax.make_jaxpr(model)(sample)
    wide = region._replace(
        center=region.center[:, None], lower=region.lower[:, None], upper=region.upper[:, None]
    )
    return crown.bounds(build(flatten(closed)), wide.prepared(), crown=method != "interval")


def _classes(state: crown.Pass, place: int) -> tuple[int, ...]:
    aval = state.network.graph.avals[place]
    return tuple(aval.shape[1:])


def _contrasts(state: crown.Pass, place: int, y: Array, method: Method) -> Array:
    (classes,), samples = _classes(state, place), state.samples
    value = state.values[place]
    own = jnp.take_along_axis(value.lower[:, 0], y[:, None], axis=1)
    apart = own - value.upper[:, 0]
    apart -= 8 * float(jnp.finfo(apart.dtype).eps) * (jnp.abs(own) + value.size[:, 0])
    if method == "interval":
        return apart
    rivals = (y[:, None] + 1 + jnp.arange(classes - 1)) % classes
    chunk = min(crown.chunk(state, classes - 1), samples)
    count = -(-samples // chunk)
    index = jnp.minimum(jnp.arange(count * chunk), samples - 1).reshape(count, chunk)

    def some(rows: Array) -> Array:
        own = jax.nn.one_hot(y[rows], classes, dtype=value.lower.dtype)
        other = jax.nn.one_hot(rivals[rows].T, classes, dtype=value.lower.dtype)
        return crown.backward(state, {place: Whole((own - other)[:, :, None])}, Rows(rows))

    low = lax.map(some, index).transpose(0, 2, 1).reshape(count * chunk, classes - 1)[:samples]
    # Lines may lie outside of intervals: the better of both.
    return apart.at[jnp.arange(samples)[:, None], rivals].max(low)
