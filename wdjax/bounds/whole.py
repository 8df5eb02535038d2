"""Interval rules of integers: indices of extremes, sorting with companions, uncertain indices.

An integer that depends on the input is an interval of float32, exact below ``2**24``; what may be
larger, or may wrap around in its dtype, is unbounded. After every rule :func:`rounded` shrinks the
ends to integers, so that rounding of floats is lost again.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from wdjax import loops
from wdjax.bounds.affine_rules import additive, bind
from wdjax.bounds.domain import (
    Array,
    Interval,
    Value,
    constant_of,
    ends,
    fresh,
    is_exact,
    stretch,
)

_LARGEST = 2.0**24
"""Below this magnitude float32 holds every integer."""
_RANKED = 256
"""Most entries along an axis of which each is compared with each, to see where sorting puts it."""


def is_integer(dtype: DTypeLike) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.integer))


def _of_booleans(eqn: JaxprEqn, operand: int) -> bool:
    aval: Any = eqn.invars[operand].aval
    return bool(aval.dtype == jnp.bool_)


def counts(eqn: JaxprEqn, operand: int = 0) -> bool:
    """Whether an operand of an equation is of integers."""
    aval: Any = eqn.invars[operand].aval
    return is_integer(aval.dtype)


def is_kept(value: Array) -> Array:
    """Whether float32 holds such integers, and all that are smaller."""
    return jnp.abs(value) < _LARGEST


def beside(eqn: JaxprEqn, args: Sequence[Value], operands: Sequence[int] | None) -> list[Value]:
    """The operands with known integers as floats where they meet integers that are intervals.

    ``operands`` are the numbers of those that may depend on the input, None for all: what the
    others hold, such as indices, stays as it is.
    """
    outs: list[Any] = [var.aval for var in eqn.outvars]
    uncertain = [k for k, arg in enumerate(args) if not is_exact(arg) and counts(eqn, k)]
    if not uncertain and not any(is_integer(out.dtype) for out in outs):
        return list(args)
    moving = range(len(args)) if operands is None else operands
    return [
        arg.astype(jnp.float32) if k in moving and is_exact(arg) and counts(eqn, k) else arg
        for k, arg in enumerate(args)
    ]


def declared(eqn: JaxprEqn, args: Sequence[Value], operand: int) -> Array:
    """A known operand in its dtype again, if :func:`beside` made it a float."""
    aval: Any = eqn.invars[operand].aval
    value = args[operand]
    assert is_exact(value)
    return value.astype(aval.dtype) if is_integer(aval.dtype) else value


def rounded(value: Value, dtype: DTypeLike, norm: float | None) -> Value:
    """The integers of a dtype in an interval; unbounded where one may be too large or wrap around.

    Sums and products of integers that wrap around are right again if the result fits.
    """
    if not isinstance(value, Interval) or not is_integer(dtype):
        return value
    lower, upper = (end.astype(jnp.float32) for end in ends(value))
    info = jnp.iinfo(dtype)
    least, most = max(float(info.min), 1 - _LARGEST), min(float(info.max), _LARGEST - 1)
    fits = (lower > least - 0.5) & (upper < most + 0.5)
    low = jnp.where(fits, jnp.ceil(lower), -jnp.inf)
    high = jnp.where(fits, jnp.floor(upper), jnp.inf)
    return fresh(low, high, None if norm is None else constant_of(value, norm))


def extreme(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``argmax`` and ``argmin``: the first index that may hold the extreme, and the
    last one; of equal entries the first counts."""
    axis = eqn.params["axes"][0]
    lower, upper = (jnp.moveaxis(end, axis, -1) for end in ends(args[0]))
    if lower.dtype == bool:
        lower, upper = lower.astype(jnp.float32), upper.astype(jnp.float32)
    if eqn.primitive.name == "argmin":
        lower, upper = -upper, -lower
    best, index = jnp.max(lower, axis=-1, keepdims=True), jnp.arange(lower.shape[-1])
    first = jnp.argmax(lower, axis=-1)[..., None]
    able = (upper > best) | ((upper == best) & (index <= first))
    low = jnp.argmax(able, axis=-1)
    high = lower.shape[-1] - 1 - jnp.argmax(able[..., ::-1], axis=-1)
    constant = stretch(args, jnp.inf, norm)
    return fresh(low.astype(jnp.float32), high.astype(jnp.float32), constant)


def ordered(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Value | list[Value]:
    """The rule for ``sort``. The k-th smallest key lies between the k-th smallest ends.

    A companion's entry at an index is one of those whose key may get there: it has as many keys
    before it as are surely smaller, and as many behind it as are surely larger.
    """
    if any(_of_booleans(eqn, k) for k in range(len(args))):
        raise ValueError("'sort' is certified on numbers only; convert the booleans before it.")
    axis, (key, *others) = eqn.params["dimension"], args
    low, high = (jnp.moveaxis(end, axis, -1) for end in ends(key))
    pairs = [[jnp.moveaxis(end, axis, -1) for end in ends(other)] for other in others]
    found = [(jnp.sort(low), jnp.sort(high)), *(_companions(low, high, *pair) for pair in pairs)]
    constant = stretch(args, jnp.inf if others else 1.0, norm)
    sides = [[jnp.moveaxis(end, -1, axis) for end in pair] for pair in found]
    return [fresh(low, high, constant) for low, high in sides]


def _companions(low: Array, high: Array, least: Array, most: Array) -> tuple[Array, Array]:
    """Ends of the entries ``[..., n]`` between ``least`` and ``most`` after sorting along the last
    axis by keys between ``low`` and ``high``."""
    n = low.shape[-1]
    if n > _RANKED:
        wide = jnp.min(least, axis=-1, keepdims=True), jnp.max(most, axis=-1, keepdims=True)
        return jnp.broadcast_to(wide[0], least.shape), jnp.broadcast_to(wide[1], most.shape)
    before = jnp.sum(high[..., None, :] < low[..., :, None], axis=-1)
    behind = jnp.sum(low[..., None, :] > high[..., :, None], axis=-1)
    rank = jnp.arange(n)[:, None]
    able = (before[..., None, :] <= rank) & (rank <= n - 1 - behind[..., None, :])
    low = jnp.min(jnp.where(able, least[..., None, :], jnp.inf), axis=-1)
    return low, jnp.max(jnp.where(able, most[..., None, :], -jnp.inf), axis=-1)


def gathered(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Value | list[Value]:
    """The rule for ``gather``, affine if the indices are known.

    Where they depend on the input it returns the hull of what all indices in their interval give,
    one index after the other. Only indices into one axis are bounded, as those of ``x[i]``.
    """
    operand, indices = args
    if is_exact(indices):
        return additive([0])(eqn, [operand, declared(eqn, args, 1)], norm)
    dims, (aval, index, out) = eqn.params["dimension_numbers"], _avals(eqn)
    if aval.dtype == jnp.bool_ or len(dims.start_index_map) != 1:
        raise ValueError(
            "the primitive 'gather' with indices that depend on the input is certified for numbers "
            "and along one axis only, as in x[i] and jnp.take_along_axis."
        )
    (axis,) = dims.start_index_map
    last = aval.shape[axis] - eqn.params["slice_sizes"][axis]
    lowest, highest = (end[..., 0] for end in ends(indices))
    others = [axis for axis in range(len(out.shape)) if axis not in dims.offset_dims]

    def broadcast(t: Array) -> Array:
        """A number for each index, at every entry that the index gives."""
        return lax.broadcast_in_dim(t, out.shape, others)

    def step(hull: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], None]:
        near = (jnp.clip(lowest, 0, last) <= number) & (number <= jnp.clip(highest, 0, last))
        every = jnp.full(index.shape, number, index.dtype)
        low, high = (bind(eqn, [end, every]) for end in ends(operand))
        low = jnp.where(broadcast(near), low, jnp.inf)
        high = jnp.where(broadcast(near), high, -jnp.inf)
        return (jnp.minimum(hull[0], low), jnp.maximum(hull[1], high)), None

    dtype = ends(operand).lower.dtype
    start = jnp.full(out.shape, jnp.inf, dtype), jnp.full(out.shape, -jnp.inf, dtype)
    (low, high), _ = loops.scan(step, start, jnp.arange(last + 1))
    far = broadcast((lowest < 0) | (highest > last))
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        far = jnp.zeros_like(far)
    constant = stretch(args, jnp.inf, norm)
    return fresh(jnp.where(far, -jnp.inf, low), jnp.where(far, jnp.inf, high), constant)


def _avals(eqn: JaxprEqn) -> list[Any]:
    """Shapes and dtypes of the operands, then of the results."""
    return [var.aval for var in (*eqn.invars, *eqn.outvars)]
