"""Lower bounds of all margins of a batch of samples, by intervals or backward linear bounds."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from wdjax import xla_cpu
from wdjax.attacks.ascent import all_rivals
from wdjax.bounds import coarse, crown, first_layer, passes, scans, slopes
from wdjax.bounds.coefficients import Coefficients, Rows, Whole
from wdjax.bounds.domain import Array
from wdjax.bounds.explicit import explicit
from wdjax.bounds.fused import fuse
from wdjax.bounds.graph import flatten
from wdjax.bounds.moved_mass import moves_mass
from wdjax.bounds.network import Network, build
from wdjax.bounds.region import Region
from wdjax.core import Classifier
from wdjax.tracing import plain

_ALL = 2**26
"""Largest number of coefficients with which the margins of all samples go back at once."""

Method = Literal["interval", "crown", "sdp-crown", "auto", "alpha", "bab"]
METHODS: tuple[Method, ...] = get_args(Method)
"""From the cheapest to the tightest: intervals; CROWN; in l2 CROWN that relaxes the rectifiers of a
layer together; CROWN, with optimised slopes for undecided margins; with optimised slopes for
unstable neurons too; branch and bound, which starts from the latter and works on the host, sample
by sample, within a time limit."""


def lower(model: Classifier, region: Region, y: Array, method: Method) -> Array:
    """``[B, K]`` lower bounds of ``z_y - z_j`` over each region, inf at ``j = y``."""
    state = prepare(model, region, method, rolled=method in ROLLED)
    return of(state, model, region, y, method)


def of(
    state: passes.Pass,
    model: Classifier,
    region: Region,
    y: Array,
    method: Method,
    every: bool = False,
) -> Array:
    """``[B, K]`` lower bounds of the margins, from the bounds of all values before the logits.

    Slopes are optimised only for samples that are classified correctly and not yet verified; for
    misclassified ones too if ``every``.
    """
    place = state.network.graph.outputs[0]
    (classes,) = state.network.graph.avals[place].shape[1:]
    if place in state.network.exact:  # Logits that do not depend on the input.
        logits = jnp.broadcast_to(state.network.exact[place], (len(y), classes))
        low = jnp.take_along_axis(logits, y[:, None], axis=1) - logits
    else:
        value = state.values[place]
        label = jnp.take_along_axis(value.lower[:, 0], y[:, None], axis=1)
        low = label - value.upper[:, 0]
        low = low - 8 * float(jnp.finfo(low.dtype).eps) * (jnp.abs(label) + value.size[:, 0])
        # Logits of a shorter dtype: linear bounds are in that of the input.
        low = low.astype(jnp.promote_types(low.dtype, region.center.dtype))
        for turn, bound in enumerate(_BOUNDS[method]):
            right = True if every else jnp.argmax(model(region.center), axis=-1) == y
            open_ = right & jnp.any((low <= 0) & (jnp.arange(classes) != y[:, None]), axis=1)
            needed = open_ if turn else jnp.ones_like(open_)
            at_once = low.size * passes.widest(state) <= _ALL
            if bound is merged and at_once:  # A loop takes long to compile.
                all_ = jnp.broadcast_to(jnp.arange(classes), low.shape)
                found = merged(state, contrasts(state.network, y, all_), each(y))
                low = jnp.maximum(low, found.T)
            else:
                low = _rows(state, y, low, needed, bound)
    for lost in state.network.lost:
        low = jnp.where(lost, -jnp.inf, low)
    low = jnp.where(jnp.isnan(low) | jnp.isnan(region.eps)[:, None], -jnp.inf, low)
    return jnp.where(jnp.arange(classes) == y[:, None], jnp.inf, low)


def prepare(
    model: Classifier,
    region: Region,
    method: Method,
    known: Mapping[int, tuple[Array, Array]] | None = None,
    rolled: bool = False,
) -> passes.Pass:
    """The bounds of every value that the model computes, up to its logits; ``known`` as in
    :func:`crown.bounds`, ``rolled`` as in :func:`network`."""
    coupling = method == "sdp-crown"
    if coupling and (moves_mass(region.norm) or region.norm != 2):
        raise ValueError('method="sdp-crown" needs norm 2, whose balls it uses; take "crown".')
    net = network(model, region.center, rolled=rolled)
    ball = wide(region).prepared()
    return crown.bounds(net, ball, _INSIDE[method], known, coupling=coupling)


def network(model: Classifier, x: Array, fused: bool = True, rolled: bool = False) -> Network:
    """The model's program for one sample, scalar activations as single nodes if ``fused``.

    Loops of known length too if ``rolled``, where :mod:`wdjax.bounds.scans` can bound all of them.
    """
    sample = jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    with plain():
        closed = jax.make_jaxpr(model)(sample)
    graph = explicit(flatten(closed, rolled))
    net = build(fuse(graph) if fused else graph)
    return net if not rolled or scans.fits(net) else network(model, x, fused)


def wide(region: Region) -> Region:
    """The regions with a second axis of length 1, the batch axis of the one-sample program."""
    return region._replace(
        center=region.center[:, None],
        lower=region.lower[:, None],
        upper=region.upper[:, None],
        scale=None if region.scale is None else region.scale[:, None],
    )


def merged(state: passes.Pass, coefficients: Mapping[int, Coefficients], rows: Rows) -> Array:
    """Lower bounds ``[G, R]`` by the affine maps behind the last nonlinear functions alone, over
    the intervals of these functions' values; of an affine model, over its region.

    Source: Gowal et al. [gowal2018], who merge the last layer with the margin.
    """
    return passes.backward(dataclasses.replace(state, lines={}, scans={}), coefficients, rows)


_CROWN = coarse.refine, functools.partial(crown.refine, bound=passes.backward)
_SLOPES = functools.partial(crown.refine, bound=functools.partial(slopes.optimised, steps=5))
_INSIDE: dict[Method, Sequence[crown.Refinement]] = {
    "interval": (first_layer.refine,),
    "crown": _CROWN,
    "sdp-crown": _CROWN,
    "auto": _CROWN,
    "alpha": (*_CROWN, _SLOPES),
}
"""For each method, how the bounds of unstable neurons are tightened, one after another."""
ROLLED: tuple[Method, ...] = "crown", "auto", "alpha"
"""Methods that bound the steps of a loop by one body; others write the steps out."""
_BOUNDS: dict[Method, Sequence[passes.Bound]] = {
    "interval": (merged,),
    "crown": (passes.backward,),
    "sdp-crown": (passes.backward,),
    "auto": (passes.backward, functools.partial(slopes.optimised, steps=20)),
    "alpha": (passes.backward, functools.partial(slopes.optimised, steps=20)),
}
"""For each method, how margins are bounded, one after another; from the second on only undecided
ones."""


def contrasts(net: Network, y: Array, rivals: Array) -> dict[int, Coefficients]:
    """Coefficients of ``z_y - z_j`` at the logits, for ``R`` labels and their rivals ``[R, G]``."""
    (place,) = net.graph.outputs
    classes, dtype = net.graph.avals[place].shape[1], net.graph.avals[net.source].dtype
    label, rival = (jax.nn.one_hot(labels, classes, dtype=dtype) for labels in (y, rivals.T))
    return {place: Whole((label - rival)[:, :, None])}


def each(y: Array) -> Rows:
    """One row for each of the samples with labels ``y``."""
    return Rows(jnp.arange(len(y)), each=True)


def _rows(state: passes.Pass, y: Array, low: Array, needed: Array, bound: passes.Bound) -> Array:
    """The margins' bounds ``low``, ``[B, K]``, tightened by ``bound`` for the samples ``needed``.

    ``needed`` is ``[B]``; a bound that is looser than ``low`` is not used.
    """
    rivals = all_rivals(low, y)

    def margins(places: Sequence[Array]) -> Array:
        rows = places[0]
        return bound(state, contrasts(state.network, y[rows], rivals[rows]), Rows(rows)).T

    width = passes.chunk(state, rivals.shape[1])
    found = xla_cpu.by_turns(needed, width, margins, rivals.shape[1:], low.dtype)
    # Linear bounds may be looser than intervals: keep the tighter ones.
    better = jnp.maximum(jnp.take_along_axis(low, rivals, axis=1), found)
    return low.at[jnp.arange(len(y))[:, None], rivals].set(better)
