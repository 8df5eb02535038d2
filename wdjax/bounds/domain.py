r"""The values of interval arithmetic: affine images of boxes, and booleans that may be open.

A value is kept as an affine image of independent boxes, its *roots*, as long as the program is
affine; a nonlinear operation makes a new root. An affine operation ``T`` maps centre and radius to
``T c`` and ``|T| r``. If a value is small, or its root is an l_1 or l_2 ball, the rows of the
composed map are computed, whose norms give tighter bounds than the single operations.

Rounding: every operation widens its result by a bound on the rounding of floats, ``gamma_k |T|
(|c| + r)`` for sums of ``k`` terms in any order, so the interval contains both the exact result
on the given parameters *and* the result of the float program, for every input in the box. The
errors of elementary functions are in the records of :mod:`wdjax.bounds.record`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike, DTypeLike

from wdjax import loops, norms

Array = jax.Array
Linear = Callable[[Array], Array]

_PULLED = 256
"""Largest size of a value that is bounded by the rows of its composed affine map; also the number
of rows that are pulled back at once."""


@dataclass(eq=False)
class Root:
    """A box ``center -+ half``, perhaps cut by an l_r ball, whose points are independent."""

    center: Array
    half: Array
    ball: tuple[Array, Array, float] | None = None
    """``(ball's centre - center, radius, r)``."""
    constant: Array | None = None
    """Lipschitz constant of the root as a function of the program's input, l_r to l_r."""


@dataclass(eq=False)
class LinearMap:
    """A linear map of a root's deviation, and the map of absolute values that dominates it."""

    apply: Linear
    absolute: Linear


class Elementwise(NamedTuple):
    """An origin: the maximum of two operands."""

    operands: Sequence["Value"]


class Reduced(NamedTuple):
    """An origin: the ``reduce_max`` or ``reduce_min`` of one operand."""

    name: str
    operand: "Value"
    axes: tuple[int, ...]


class Location(NamedTuple):
    """An origin: the mask of the entries (at least one) that attain the maximum along axes."""

    axes: tuple[int, ...]


Origin: TypeAlias = Elementwise | Reduced | Location


@dataclass(eq=False)
class Interval:
    """Reals in ``center -+ radius``: an affine image of roots."""

    center: Array
    radius: Array
    magnitude: Array
    """``|T| |root| + |offset|``, what rounding errors are relative to."""
    terms: dict[Root, LinearMap]
    mixes: int = 0
    """How many affine operations since the roots added up several entries of a root."""
    roundings: int = 0
    """Number of roundings since the roots along the longest path."""
    origin: Origin | None = None
    """The operands of a maximum, so that its comparison with them is decided exactly."""
    known: norms.Bounds | None = field(default=None, repr=False)
    """Cache of :func:`ends`."""


@dataclass(eq=False)
class Ternary:
    """Booleans that are true where ``lower``, false where not ``upper``, undecided elsewhere."""

    lower: Array
    upper: Array
    origin: Origin | None = None


Value: TypeAlias = Interval | Ternary | Array
Rule = Callable[[JaxprEqn, Sequence[Value], float | None], Value | list[Value]]
"""``(equation, operands, norm)``: the result of a primitive when at least one operand depends on
the input; with Lipschitz constants in ``norm`` unless it is None."""


def box(
    lower: Array,
    upper: Array,
    ball: tuple[ArrayLike, ArrayLike, float] | None = None,
    constant: Array | None = None,
) -> Interval:
    """The input of a program: a box, cut by an l_1 or l_2 ball."""
    value = fresh(lower, upper, constant)
    if ball is not None:
        center, radius, norm = ball
        (root,) = value.terms
        root.ball = (jnp.asarray(center) - root.center, jnp.asarray(radius, lower.dtype), norm)
    return value


def gamma(terms: float, dtype: DTypeLike) -> float:
    """Relative error of a sum of ``terms`` products, doubled: once for the centre's own rounding,
    once for the model's."""
    return 1.01 * (terms + 4) * float(jnp.finfo(dtype).eps)


def tiny(dtype: DTypeLike) -> float:
    return float(jnp.finfo(dtype).tiny)


def fresh(
    lower: Array, upper: Array, constant: Array | None = None, origin: Origin | None = None
) -> Interval:
    """A new root with these ends; a NaN becomes -inf in ``lower`` and inf in ``upper``."""
    lower = jnp.where(jnp.isnan(lower), -jnp.inf, lower)
    upper = jnp.where(jnp.isnan(upper), jnp.inf, upper)
    middle = 0.5 * lower + 0.5 * upper
    finite = jnp.isfinite(middle)
    center = jnp.where(finite, middle, 0.0)
    half = jnp.maximum(upper - center, center - lower) * (1 + gamma(0, lower.dtype))
    half = jnp.where(finite, half, jnp.inf)
    root = Root(center, half, constant=constant)
    chain = LinearMap(lambda t: t, lambda t: t)
    known = norms.Bounds(lower, upper)
    return Interval(center, half, jnp.abs(center) + half, {root: chain}, origin=origin, known=known)


def ends(value: Value) -> norms.Bounds:
    """Lower and upper ends of an interval, a ternary or an exact array."""
    if isinstance(value, Ternary):
        return norms.Bounds(value.lower, value.upper)
    if not isinstance(value, Interval):
        return norms.Bounds(value, value)
    if value.known is None:
        slack = gamma(0, value.center.dtype) * (jnp.abs(value.center) + value.radius)
        lower, upper = value.center - value.radius - slack, value.center + value.radius + slack
        for center, radius in _refined(value):
            lower = jnp.fmax(lower, center - radius)
            upper = jnp.fmin(upper, center + radius)
        value.known = norms.Bounds(lower, upper)
    return value.known


# Rows of the composed affine map.


def _refined(value: Interval) -> list[tuple[Array, Array]]:
    """Further ``(centre, radius)`` pairs that contain the value, from its composed maps' rows.

    They may be tighter if the value's map is composed of several, or a root is an l1 or l2 ball. A
    large value has them only if its one root is a ball.
    """
    balls = [root for root in value.terms if root.ball is not None]
    if value.center.size <= _PULLED and (balls or value.mixes > 1):
        return [_from_rows(value, root) for root in (None, *balls)]
    return [_from_rows(value, root) for root in balls if len(value.terms) == 1]


def _from_rows(value: Interval, cut: Root | None) -> tuple[Array, Array]:
    """``(centre, radius)`` of a value, both of its shape, from the rows of its composed maps.

    A row's norm is taken over the ball of the root ``cut``, if given, and over the box of each
    other root. Rounding is included.
    """
    center, radius = value.center, _rounding(value)
    for root, chain in value.terms.items():
        if root is cut and root.ball is not None:
            offset, eps, norm = root.ball
            slack = gamma(2 * value.roundings + root.half.size, center.dtype)
            size = _row_norms(chain.apply, root, norms.dual(norm))
            # A composed map rounds relative to its map of absolute values.
            composed = value.mixes > 1
            whole = _row_norms(chain.absolute, root, norms.dual(norm)) if composed else size
            center = center + chain.apply(offset)
            radius = radius + eps * (size + slack * whole)
        else:
            reach = _row_norms(chain.apply, root, 1, root.half)
            radius = radius + reach * (1 + gamma(root.half.size, reach.dtype))
    return center, jnp.where(jnp.isnan(radius), jnp.inf, radius)


def _rounding(value: Interval) -> Array:
    """A bound of all roundings since the roots, for bounds by composed maps."""
    return 2 * gamma(2 * value.roundings, value.center.dtype) * value.magnitude


def _row_norms(linear: Linear, root: Root, norm: float, scale: ArrayLike = 1.0) -> Array:
    """The l_``norm`` of ``scale`` times each row of a linear map, of the map's output shape."""
    out, pull = loops.linear_pullback(linear, jnp.zeros_like(root.half), root.half)

    def one(entry: Array) -> Array:
        hot = jax.nn.one_hot(entry, out.size, dtype=out.dtype).reshape(out.shape)
        return norms.lp_norm((pull(hot) * scale)[None], norm)[0]

    return lax.map(one, jnp.arange(out.size), batch_size=_PULLED).reshape(out.shape)


def matrix(chain: Linear, root: Root, shape: tuple[int, ...]) -> Array:
    """The matrix of a linear map as ``[outputs, inputs]``, pulled back from its outputs."""
    out, pull = loops.linear_pullback(chain, jnp.zeros_like(root.half), root.half)
    basis = jnp.eye(math.prod(shape), dtype=out.dtype).reshape(-1, *shape)
    return jax.vmap(pull)(basis).reshape(basis.shape[0], -1)


def is_exact(value: Value) -> TypeGuard[Array]:
    return not isinstance(value, Interval | Ternary)


def largest_size(value: Value) -> Array:
    return jnp.maximum(*map(jnp.abs, ends(value)))


# Lipschitz constants, l_r to l_r, from the input to a value.


def constant_of(value: Value, norm: float) -> Array:
    """A Lipschitz constant of a value as a function of the input, both in the l_r norm."""
    if not isinstance(value, Interval):
        return jnp.zeros(())
    slack = 1 + gamma(value.magnitude.size + 2 * value.roundings, value.center.dtype)
    parts = [
        slack
        * _operator_norm(chain, root, value, norm)
        * (jnp.inf if root.constant is None else root.constant)
        for root, chain in value.terms.items()
    ]
    return functools.reduce(jnp.add, parts)


_MATERIALISED = 2**22
"""Largest number of entries of a matrix whose spectral norm is computed."""


def _operator_norm(chain: LinearMap, root: Root, value: Interval, norm: float) -> Array:
    """The operator norm, l_r to l_r, of a root's linear map in a value, rounded up; a scalar.

    The map takes arrays of the root's shape to arrays of the value's. For r = 2 the bound by row
    and column sums is improved by the matrix itself, if it is small.
    """
    ones = jnp.ones(root.half.shape, root.half.dtype)
    row_sums, pull = loops.linear_pullback(chain.absolute, ones, root.half)
    row_sum = norms.largest(row_sums.reshape(-1))
    column_sum = norms.largest(pull(jnp.ones_like(row_sums)).reshape(-1))
    if norm == math.inf:
        return row_sum
    if norm == 1:
        return column_sum
    size = jnp.sqrt(row_sum * column_sum)
    small = min(ones.size, row_sums.size) <= 1024 and ones.size * row_sums.size <= _MATERIALISED
    if value.mixes and small:
        upper = norms.operator_norm(matrix(chain.apply, root, row_sums.shape), 2).upper
        # A composed map rounds relative to its map of absolute values, whose norm size bounds.
        composed = gamma(2 * value.roundings, size.dtype) * size if value.mixes > 1 else 0.0
        size = jnp.fmin(size, upper + composed)
    return size


def stretch(args: Sequence[Value], factor: ArrayLike, norm: float | None) -> Array | None:
    """The Lipschitz constant of a nonlinear function: ``factor`` times the sum of its operands'
    constants; None without a norm."""
    if norm is None:
        return None
    total = functools.reduce(jnp.add, (constant_of(a, norm) for a in args))
    scaled = total * factor
    return jnp.where(jnp.isnan(scaled), jnp.inf, scaled)


def corners(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Ends of the entrywise product of two intervals, given by their ends.

    An infinite end stands for an overflow; ``0 * inf`` is NaN, that is, unbounded.
    """
    products = [x * y for x, y in itertools.product(a, b)]
    lower, upper = widen(
        functools.reduce(jnp.minimum, products), functools.reduce(jnp.maximum, products), 2
    )
    lost = tiny(lower.dtype) * (_nonzero(a) & _nonzero(b))
    return lower - lost, upper + lost


def _nonzero(ends: tuple[Array, Array]) -> Array:
    """Entrywise, whether an interval ``(lower, upper)`` has any point but 0."""
    return (ends[0] != 0) | (ends[1] != 0)


def fitted(
    lower: Array, upper: Array, dtype: DTypeLike, peak: Array | float = 0.0
) -> tuple[Array, Array]:
    """Makes ends infinite where a value, or a partial sum up to ``peak``, may overflow the dtype.

    Both ends, since an overflow is inf in some dtypes and NaN in others.
    """
    info = jnp.finfo(dtype)
    fits = (lower >= float(info.min)) & (upper <= float(info.max)) & (peak <= float(info.max))
    return jnp.where(fits, lower, -jnp.inf), jnp.where(fits, upper, jnp.inf)


def widen(lower: Array, upper: Array, ulps: float) -> tuple[Array, Array]:
    """Widens an interval by ``ulps`` times eps, relatively; 0 stays 0, overflows become infinite.

    It multiplies, since adding the tiny unit of a small number might underflow.
    """
    unit = ulps * float(jnp.finfo(lower.dtype).eps)
    less, more = 1 - unit, 1 + unit
    low = lower * jnp.where(lower > 0, less, more)
    high = upper * jnp.where(upper > 0, more, less)
    return jnp.where(lower < jnp.inf, low, -jnp.inf), jnp.where(upper > -jnp.inf, high, jnp.inf)


def opened(lower: Array, upper: Array, signed: Array, ulps: float) -> tuple[Array, Array]:
    """Like :func:`widen`, and also by twice the smallest float, for underflows.

    Functions may lose one themselves and one in their argument's half. Where ``signed`` is false,
    the result is not negative, and the lower end is not lowered below 0. GPUs keep numbers below
    the smallest normal one, to few digits.
    """
    lower, upper = widen(lower, upper, ulps)
    lost = 2 * tiny(lower.dtype)
    less = lower - lost
    positive = jnp.where(lower > 0, jnp.maximum(less, 0), lower)
    return jnp.where(signed, less, positive), upper + lost
