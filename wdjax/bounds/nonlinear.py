"""Interval rules for entrywise functions and for maxima: each result is a new root."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from wdjax.bounds import record, whole
from wdjax.bounds.affine_rules import bilinear, bind, is_narrow, known_indices, product
from wdjax.bounds.domain import (
    Array,
    Elementwise,
    Interval,
    Origin,
    Reduced,
    Rule,
    Value,
    corners,
    ends,
    fitted,
    fresh,
    is_exact,
    opened,
    stretch,
    tiny,
    widen,
)

Slope = Callable[[Array, Array], Array]
"""``(lower, upper)`` to the largest derivative of each entry between them."""


def monotone(
    slope: Slope | float = 1.0,
    exact: bool = False,
    falling: bool = False,
    origin: Callable[[JaxprEqn, Sequence[Value]], Origin] | None = None,
) -> Rule:
    """A rule for functions that grow in every operand, or fall if ``falling``.

    ``slope`` bounds the derivative, everywhere or from an operand's ends; ``exact`` functions do
    not round; ``origin`` is what the result remembers of its operands.
    """

    def rule(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
        lower, upper = (bind(eqn, side) for side in zip(*map(ends, args)))
        if falling:
            lower, upper = upper, lower
        # An operand that may be outside of the domain: the value may be NaN.
        outside = jnp.isnan(lower) | jnp.isnan(upper)
        lower, upper = jnp.where(outside, -jnp.inf, lower), jnp.where(outside, jnp.inf, upper)
        if not exact:
            # A small negative number may have become -0.
            signed = (lower < 0) | (jnp.signbit(lower) & (ends(args[0]).lower < 0))
            lower, upper = opened(lower, upper, signed, record.trusted(eqn, lower.dtype))
        steepest = jnp.max(slope(*ends(args[0]))) if callable(slope) else slope
        known = None if origin is None else origin(eqn, args)
        return fresh(lower, upper, stretch(args, steepest, norm), known)

    return rule


def elementwise(eqn: JaxprEqn, args: Sequence[Value]) -> Elementwise:
    """The origin of an elementwise maximum."""
    return Elementwise(args)


def reduced(eqn: JaxprEqn, args: Sequence[Value]) -> Reduced:
    """The origin of a maximum along axes."""
    return Reduced(eqn.primitive.name, args[0], tuple(eqn.params["axes"]))


def pooled(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Value | list[Value]:
    """The rule for max pooling; an entry lies in at most ``ceil(window gcd(stride, dilation) /
    stride)`` windows along an axis, which gives the Lipschitz constant."""
    params = eqn.params
    windows = zip(params["window_dimensions"], params["window_strides"])
    seen = math.prod(
        -(-size // (stride // math.gcd(stride, apart)))
        for (size, stride), apart in zip(windows, params["window_dilation"])
    )
    root = 1.0 if norm is None else 1.0 / norm
    return monotone(seen**root, exact=True)(eqn, args, norm)


def absolute(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    lower, upper = ends(args[0])
    smallest = jnp.maximum(jnp.maximum(lower, -upper), 0.0)
    return fresh(smallest, jnp.maximum(-lower, upper), stretch(args, 1.0, norm))


def even(slope: Slope) -> Rule:
    """A rule for even functions that grow in ``|z|``; ``slope`` is given the ends of ``|z|``."""

    def rule(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
        sizes = ends(absolute(eqn, args, None))
        low, high = (bind(eqn, [end]) for end in sizes)
        low, high = opened(low, high, low < 0, record.trusted(eqn, low.dtype))
        return fresh(low, high, stretch(args, jnp.max(slope(*sizes)), norm))

    return rule


def power(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    exponent = eqn.params["y"] if eqn.primitive.name == "integer_pow" else 2
    (lower, upper), count = ends(args[0]), abs(exponent)
    one, two = lower**count, upper**count
    if count % 2 == 0:
        least = jnp.where((lower <= 0) & (upper >= 0), 0.0, jnp.minimum(one, two))
        one, two = least, jnp.maximum(one, two)
    size = jnp.maximum(jnp.abs(lower), jnp.abs(upper))
    steepest = jnp.max(exponent * size ** (exponent - 1)) if exponent > 0 else 0.0
    wrong = record.trusted(eqn, lower.dtype)
    one, two = opened(one, two, (lower < 0) & (count % 2 == 1), wrong)
    if exponent >= 0:
        return fresh(one, two, stretch(args, steepest, norm))
    inside, (one, two) = _inverse(one, two)
    low, high = jnp.where(inside, one, -jnp.inf), jnp.where(inside, two, jnp.inf)
    return fresh(low, high, stretch(args, jnp.inf, norm))


def one_minus_square(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    lower, upper = ends(args[0])
    size = jnp.maximum(jnp.abs(lower), jnp.abs(upper))
    least = jnp.where((lower <= 0) & (upper >= 0), 0.0, jnp.minimum(jnp.abs(lower), jnp.abs(upper)))
    one, two = ((1 - far) * (1 + far) for far in (size, least))
    low, high = opened(one, two, one < 0, record.trusted(eqn, lower.dtype))
    return fresh(low, high, stretch(args, 2 * jnp.max(size), norm))


def _inverse(lower: Array, upper: Array) -> tuple[Array, tuple[Array, Array]]:
    """Where 0 is not in ``[lower, upper]``, and the ends of the reciprocal there."""
    inside = (lower > 0) | (upper < 0)
    low, high = jnp.where(inside, lower, 1.0), jnp.where(inside, upper, 1.0)
    return inside, opened(1 / high, 1 / low, low < 0, 2)


def real_power(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``pow``: extremes of ``exp(y log x)`` are at the corners of the box of ``x`` and
    ``y``; unbounded where the base may be negative, or 0 with a negative exponent."""
    base, exponent = (ends(arg) for arg in args)
    corners_ = [bind(eqn, [x, y]) for x, y in itertools.product(base, exponent)]
    one, two = (functools.reduce(pick, corners_) for pick in (jnp.minimum, jnp.maximum))
    least, most = opened(one, two, one < 0, record.trusted(eqn, one.dtype))
    valid = (base.lower > 0) | ((base.lower == 0) & (exponent.lower >= 0))
    return fresh(
        jnp.where(valid, least, -jnp.inf),
        jnp.where(valid, most, jnp.inf),
        stretch(args, jnp.inf, norm),
    )


def angle(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``atan2``: extremes are at the corners of a box that does not meet the half-line
    ``y = 0, x <= 0``, where the angle jumps."""
    y, x = (ends(arg) for arg in args)
    corners_ = [bind(eqn, [side, other]) for side, other in itertools.product(y, x)]
    low, high = (functools.reduce(pick, corners_) for pick in (jnp.minimum, jnp.maximum))
    crosses = (x.lower <= 0) & (y.lower <= 0) & (y.upper >= 0)
    pi = jnp.where(jnp.isnan(low), jnp.nan, math.pi)
    low, high = jnp.where(crosses, -pi, low), jnp.where(crosses, pi, high)
    low, high = opened(low, high, low < 0, record.trusted(eqn, low.dtype))
    return fresh(low, high, stretch(args, jnp.inf, norm))


def remainder(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``rem``, which is exact and has the sign of the dividend.

    An interval shorter than a known divisor holds at most one jump, downwards: there is none if the
    upper end's remainder is the larger. Integers too large for float32 are rounded here, so that
    their remainder is unknown.
    """
    (lower, upper), (least, most) = (ends(arg) for arg in args)
    one, two = bind(eqn, [lower, least]), bind(eqn, [upper, least])
    size = jnp.maximum(jnp.abs(least), jnp.abs(most))
    near = (upper - lower) * (1 + 8 * float(jnp.finfo(lower.dtype).eps)) < size
    steady = near & (least == most) & (one <= two)
    low = jnp.where(lower >= 0, 0.0, jnp.maximum(lower, -size))
    high = jnp.where(upper <= 0, 0.0, jnp.minimum(upper, size))
    low, high = jnp.where(steady, one, low), jnp.where(steady, two, high)
    known = jnp.isfinite(lower) & jnp.isfinite(upper) & ((least > 0) | (most < 0))
    if whole.counts(eqn):
        known &= functools.reduce(jnp.logical_and, map(whole.is_kept, (lower, upper, least, most)))
    low, high = jnp.where(known, low, -jnp.inf), jnp.where(known, high, jnp.inf)
    return fresh(low, high, stretch(args, jnp.inf, norm))


def tangent(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``tan``, which grows between its poles ``pi (1/2 + k)``; unbounded over one."""
    lower, upper = ends(args[0])
    wrong = record.trusted(eqn, lower.dtype)
    low, high = opened(bind(eqn, [lower]), bind(eqn, [upper]), jnp.asarray(True), wrong)
    pole = _meets(2 * lower, 2 * upper, 0.5)
    steep = jnp.where(jnp.any(pole), jnp.inf, 1.001 * (1 + jnp.max(jnp.maximum(low**2, high**2))))
    return fresh(
        jnp.where(pole, -jnp.inf, low),
        jnp.where(pole, jnp.inf, high),
        stretch(args, steep, norm),
    )


_LOWEST, _DEEPEST = 1.4616321449683623, -0.12148629053584961
"""Where ``lgamma`` is lowest above 0, and how low."""


def log_gamma(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``lgamma`` above 0; unbounded elsewhere.

    Its error is relative to its magnitude plus 1.
    """
    lower, upper = ends(args[0])
    one, two = (bind(eqn, [end]) for end in (lower, upper))
    turns = (lower < _LOWEST) & (upper > _LOWEST)
    low = jnp.where(turns, _DEEPEST, jnp.minimum(one, two))
    steep = jnp.max(jnp.maximum(*(jnp.abs(lax.digamma(end)) for end in (lower, upper))))
    return _above_zero(eqn, args, low, jnp.maximum(one, two), steep, norm)


def digamma(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``digamma`` above 0, where it grows; unbounded elsewhere.

    Its error is relative to its magnitude plus 1.
    """
    lower, upper = ends(args[0])
    one, two = (bind(eqn, [end]) for end in (lower, upper))
    steep = jnp.max(1 / lower + 1 / lower**2)  # At least the trigamma function.
    return _above_zero(eqn, args, one, two, steep, norm)


def _above_zero(
    eqn: JaxprEqn, args: Sequence[Value], low: Array, high: Array, steep: Array, norm: float | None
) -> Interval:
    """The value between ``low`` and ``high``, widened by its error; unbounded at and below 0."""
    inside = ends(args[0]).lower > 0
    unit = record.trusted(eqn, low.dtype) * float(jnp.finfo(low.dtype).eps)
    slack = unit * (jnp.maximum(jnp.abs(low), jnp.abs(high)) + 1)
    return fresh(
        jnp.where(inside, low - slack, -jnp.inf),
        jnp.where(inside, high + slack, jnp.inf),
        stretch(args, jnp.where(jnp.all(inside), 1.001 * steep, jnp.inf), norm),
    )


def scattered_extreme(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``scatter-max`` and ``scatter-min``: each entry goes to one index or to none."""
    base, indices, entries = (*ends(args[0]),), known_indices(eqn, args), (*ends(args[2]),)
    low, high = (bind(eqn, [one, indices, two]) for one, two in zip(base, entries))
    return fresh(low, high, stretch(args, 1.0, norm))


def soft_maxima(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``cumlogsumexp``, in any order of summation.

    The error of a step is relative to the largest entry. Errors add up but do not grow, since no
    step has a derivative above 1.
    """
    lower, upper = ends(args[0])
    steps = lower.shape[eqn.params["axis"]]
    size = jnp.max(jnp.maximum(jnp.abs(lower), jnp.abs(upper)), initial=0.0) + math.log(steps) + 1
    unit = record.trusted(eqn, lower.dtype) * float(jnp.finfo(lower.dtype).eps)
    declared: Any = eqn.outvars[0].aval
    if is_narrow(declared.dtype):
        unit = record.trusted(eqn, declared.dtype) * float(jnp.finfo(declared.dtype).eps)
    low, high = (bind(eqn, [end]) for end in (lower, upper))
    slack = steps * unit * size
    return fresh(low - slack, high + slack, stretch(args, jnp.inf, norm))


def multiplied(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``reduce_prod``."""
    lower, upper = ends(args[0])
    axes = tuple(eqn.params["axes"])
    last = [i for i in range(lower.ndim) if i not in axes]
    shape = [lower.shape[i] for i in last]
    pair = [end.transpose([*axes, *last]).reshape(-1, *shape) for end in (lower, upper)]
    one = jnp.ones(shape, lower.dtype)
    low, high = _running(eqn, *pair)[-1] if len(pair[0]) else (one, one)
    return fresh(low, high, stretch(args, jnp.inf, norm))


def multiplied_on(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``cumprod``."""
    axis, step = eqn.params["axis"], -1 if eqn.params["reverse"] else 1
    lower, upper = (jnp.moveaxis(end, axis, 0)[::step] for end in ends(args[0]))
    sides = (jnp.stack(side)[::step] for side in zip(*_running(eqn, lower, upper)))
    low, high = (jnp.moveaxis(side, 0, axis) for side in sides)
    return fresh(low, high, stretch(args, jnp.inf, norm))


def _running(eqn: JaxprEqn, lower: Array, upper: Array) -> list[tuple[Array, Array]]:
    """Ends of all running products along axis 0, rounded as in any order of multiplication.

    Underflows are included; unbounded where the product of some of the entries may overflow.
    """
    declared: Any = eqn.outvars[0].aval
    count, units = len(lower), jnp.finfo(declared.dtype).eps / jnp.finfo(lower.dtype).eps
    total, found = (jnp.ones_like(lower[0]),) * 2, []
    peak = total[0]
    for pair in zip(lower, upper):
        total = corners(total, pair)
        peak = peak * jnp.maximum(jnp.maximum(*map(jnp.abs, pair)), 1.0)
        low, high = widen(*total, 4 * count * float(units))
        lost = count * tiny(declared.dtype) * peak
        found.append(fitted(low - lost, high + lost, declared.dtype, peak))
    return found


def sign(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``sign``: ``[-1, 1]`` where 0 is possible, as for the derivative of ``abs``."""
    lower, upper = ends(args[0])
    low, high = jnp.where(lower > 0, 1.0, -1.0), jnp.where(upper < 0, -1.0, 1.0)
    return fresh(low.astype(lower.dtype), high.astype(lower.dtype), stretch(args, jnp.inf, norm))


def wave(peak: float) -> Rule:
    """A rule for a sine whose maxima are at ``2 pi (peak + k)``: its extremes between the ends."""

    def rule(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
        lower, upper = ends(args[0])
        one, two = (bind(eqn, [end]) for end in (lower, upper))
        least, most = opened(
            jnp.minimum(one, two),
            jnp.maximum(one, two),
            jnp.asarray(True),
            record.trusted(eqn, lower.dtype),
        )
        low = jnp.where(_meets(lower, upper, peak + 0.5), -1.0, jnp.maximum(least, -1.0))
        high = jnp.where(_meets(lower, upper, peak), 1.0, jnp.minimum(most, 1.0))
        return fresh(low, high, stretch(args, 1.0, norm))

    return rule


def _meets(lower: Array, upper: Array, turn: float) -> Array:
    """Whether ``2 pi (turn + k)`` lies between the ends for some integer ``k``; true in doubt."""
    first, last = (end / (2 * math.pi) - turn for end in (lower, upper))
    unit = 8 * float(jnp.finfo(lower.dtype).eps)
    first, last = first - unit * (1 + jnp.abs(first)), last + unit * (1 + jnp.abs(last))
    return jnp.ceil(first) <= jnp.floor(last)


def quotient(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Value | list[Value]:
    """The rule for ``div``, which rounds integers towards zero."""
    left, right = args
    if is_exact(right):
        found = bilinear(lambda _: 1)(eqn, args, norm)
    else:
        found = product(left, _reciprocal(right, norm), norm)
    if not whole.counts(eqn):
        return found
    assert isinstance(found, Interval)
    low, high = map(jnp.trunc, ends(found))
    return fresh(low, high, stretch(args, jnp.inf, norm))


def _reciprocal(value: Value, norm: float | None) -> Interval:
    """``1 / value``, unbounded where ``value`` may be 0."""
    inside, (low, high) = _inverse(*ends(value))
    size = jnp.maximum(jnp.abs(low), jnp.abs(high))
    steepest = jnp.where(jnp.all(inside), jnp.max(size) ** 2, jnp.inf)
    return fresh(
        jnp.where(inside, low, -jnp.inf),
        jnp.where(inside, high, jnp.inf),
        stretch([value], steepest, norm),
    )
