r"""Lower bounds of linear functions ``c . y - b`` of a program's outputs over boxes of inputs."""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import distinct
from wdjax.bounds import margins, passes, slopes
from wdjax.bounds.coefficients import Coefficients, Rows, Whole, whole
from wdjax.bounds.domain import Array
from wdjax.bounds.margins import Method
from wdjax.bounds.region import Region
from wdjax.core import Classifier
from wdjax.precision import highest
from wdjax.xla_cpu import rounding, summed


class Objectives(NamedTuple):
    """``R`` functions of ``K`` outputs, in the dtype of the program."""

    a: Array
    """``[R, K]``"""
    rest: Array
    """``[R, K]``: how far each coefficient is from the given number, rounded up."""
    b: Array
    """``[R]``, rounded up."""


def objectives(a: npt.ArrayLike, b: npt.ArrayLike, dtype: Any) -> Objectives:
    """Rows ``[R, K]`` and ``[R]`` of float64 numbers, rounded so that bounds of them are sound."""
    wide, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    near = wide.astype(dtype)
    with np.errstate(over="ignore"):
        gap = np.abs(wide - near.astype(np.float64))
    rest = np.where(gap > 0, np.nextafter(gap.astype(dtype), np.inf, dtype=dtype), 0).astype(dtype)
    up = right.astype(dtype)
    up = np.where(up < right, np.nextafter(up, np.inf, dtype=dtype), up).astype(dtype)
    return Objectives(jnp.asarray(near), jnp.asarray(rest), jnp.asarray(up))


def boxes(lower: Array, upper: Array) -> Region:
    """The regions ``lower <= x <= upper``, ``[B, *shape]`` each."""
    nothing = jnp.zeros(len(lower), lower.dtype)
    return Region(0.5 * lower + 0.5 * upper, lower, upper, nothing, math.inf)


class InputBounds(NamedTuple):
    """Linear bounds of ``R`` functions over ``B`` boxes, in the inputs."""

    low: Array
    """``[B, R]`` lower bounds over the box."""
    a: Array
    """``[B, R, N]``: coefficients of a linear function of the inputs below each of these."""
    linear: Array
    """``[B, R]``: the least value of that linear function; other bounds may be higher."""


@functools.partial(distinct.jit, static_argnames="method")
def lower(
    model: Classifier, rows: Objectives, low: Array, high: Array, method: Method
) -> InputBounds:
    """Lower bounds of every row over every box ``low <= x <= high``, ``[B, *shape]``."""
    with highest():
        region = boxes(low, high)
        state = margins.prepare(model, region, method, rolled=method in margins.ROLLED)
        found = of(state, rows, method)
    return found


def of(
    state: passes.Pass,
    rows: Objectives,
    method: Method,
    arrived: dict[int, Coefficients] | None = None,
) -> InputBounds:
    """:func:`lower` from the bounds of all values before the outputs.

    ``arrived`` is filled by the pass of linear bounds, as in :func:`passes.backward`.
    """
    count, size = len(state.region.eps), math.prod(state.region.lower.shape[2:])
    flat = jnp.zeros((count, len(rows.b), size), rows.a.dtype)
    net = state.network
    (place,) = net.graph.outputs
    if place in net.exact:  # Outputs that do not depend on the input.
        sure = jnp.broadcast_to(net.exact[place].reshape(-1), (count, rows.a.shape[1]))
        low = least = _between(rows, sure, sure)
    else:
        value = state.values[place]
        low = least = _between(rows, value.lower[:, 0], value.upper[:, 0])
        if method != "interval":
            least, flat = _linear(state, rows, {} if arrived is None else arrived)
            low = jnp.maximum(low, least)
        if method == "alpha":
            better = slopes.optimised(state, sent(rows, place, count), _all(count), steps=20)
            low = jnp.maximum(low, charged(rows, better.T, value))
    lost = jnp.stack([jnp.zeros((), bool), *net.lost]).any()
    low, least = (jnp.where(lost | jnp.isnan(t), -jnp.inf, t) for t in (low, least))
    return InputBounds(low, flat, least)


def _all(count: int) -> Rows:
    return Rows(jnp.arange(count))


def sent(rows: Objectives, place: int, count: int) -> dict[int, Coefficients]:
    a = rows.a[:, None, None]
    return {place: Whole(jnp.broadcast_to(a, (len(rows.b), count, *a.shape[2:])))}


def _linear(
    state: passes.Pass, rows: Objectives, arrived: dict[int, Coefficients]
) -> tuple[Array, Array]:
    """CROWN's bounds ``[B, R]``, and their coefficients ``[B, R, N]`` of the inputs.

    The coefficients are 0 if none reaches the inputs, as with slopes of ReLU nets. ``arrived`` is
    filled as by :func:`passes.backward`.
    """
    count, net = len(state.region.eps), state.network
    (place,) = net.graph.outputs
    low = passes.backward(state, sent(rows, place, count), _all(count), arrived=arrived)
    shape = len(rows.b), count, math.prod(state.region.lower.shape[2:])
    a = jnp.zeros(shape, low.dtype)
    if net.source in arrived:
        a = whole(arrived[net.source], _all(count)).a.reshape(shape)
    return charged(rows, low.T, state.values[place]), a.transpose(1, 0, 2)


def charged(rows: Objectives, low: Array, value: Any) -> Array:
    """Bounds ``[B, R]`` of ``c . y``, less ``b`` and the rounding of both."""
    size = jnp.maximum(jnp.abs(value.lower), jnp.abs(value.upper))[:, 0, None]
    loss = summed(jnp.where(rows.rest == 0, 0.0, rows.rest * size))
    count, facts = rows.a.shape[1] + 2, jnp.finfo(low.dtype)
    unit, flushed = 4 * float(facts.eps) * count, 4 * float(facts.tiny) * count
    return low - rows.b - (1 + unit) * loss - unit * (jnp.abs(low) + jnp.abs(rows.b)) - flushed


def _between(rows: Objectives, lower: Array, upper: Array) -> Array:
    """Bounds ``[B, R]`` of ``c . y - b`` from ends ``[B, K]`` of the outputs."""
    a, size = rows.a, jnp.maximum(jnp.abs(lower), jnp.abs(upper))[:, None]
    end = jnp.where(a > 0, lower[:, None], upper[:, None])
    terms = jnp.where(a == 0, 0.0, a * end)
    rest = jnp.where(rows.rest == 0, 0.0, rows.rest * size)
    unit = rounding(a.shape[1], a.dtype) + 8 * float(jnp.finfo(a.dtype).eps)
    large = summed(jnp.abs(terms)) + summed(rest) + jnp.abs(rows.b)
    flushed = 4 * float(jnp.finfo(a.dtype).tiny) * (a.shape[1] + 2)
    return summed(terms) - (1 + unit) * summed(rest) - rows.b - unit * large - flushed
