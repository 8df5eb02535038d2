"""Interval rules for comparisons, selections and the gradient of max pooling.

A comparison that the box does not decide is open (may be true or false), and a selection by it is
the hull of both cases, which contains Clarke's generalised gradient of the selection.
"""

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from wdjax import loops
from wdjax.bounds import whole
from wdjax.bounds.affine_rules import additive, bind, windows
from wdjax.bounds.domain import (
    Array,
    Elementwise,
    Interval,
    Location,
    Reduced,
    Rule,
    Ternary,
    Value,
    constant_of,
    ends,
    fresh,
    gamma,
    is_exact,
    stretch,
)


def inequality(flip: bool) -> Rule:
    """The rule for ``<`` and ``<=``, and for ``>`` and ``>=`` if ``flip``.

    Where equality of floats is possible the result is open, for Clarke's gradient of a selection
    by it; integers are compared exactly.
    """

    def rule(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Ternary:
        if any(isinstance(a, Ternary) for a in args):
            raise ValueError(
                "booleans that depend on the input are compared by == and != only; use & and |."
            )
        (la, ua), (lb, ub) = (ends(a) for a in (args[::-1] if flip else args))
        if not whole.counts(eqn):
            return Ternary(ua < lb, ~(la > ub))
        if eqn.primitive.name.startswith(("le", "ge")):
            return Ternary(ua <= lb, la <= ub)
        return Ternary(ua < lb, la < ub)

    return rule


def equal(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Ternary:
    """The rule for ``==``: never surely true, since ties are kinks, except in three cases.

    These are a value compared with itself (a test for NaN), an entry with its maximum, and
    integers.
    """
    left, right = args
    if left is right:
        lower, upper = ends(left)
        return Ternary((lower > -jnp.inf) | (upper < jnp.inf), jnp.ones(lower.shape, bool))
    for value, top in ((left, right), (right, left)):
        decided = _attains(value, top)
        if decided is not None:
            return decided
    (la, ua), (lb, ub) = ends(left), ends(right)
    if la.dtype == bool:
        return Ternary((la & lb) | ~(ua | ub), ~((la & ~ub) | (lb & ~ua)))
    meet = (la <= ub) & (lb <= ua)
    same = meet & (la == ub) & (lb == ua) if whole.counts(eqn) else jnp.zeros_like(meet)
    return Ternary(same, meet)


def _attains(value: Value, top: Value) -> Ternary | None:
    """Which entries of ``value`` attain ``top``, its maximum or minimum, if it is known to be that.

    The result are open booleans of the shape of ``value``; None if ``top`` is no maximum of it.
    """
    if not isinstance(value, Interval) or not isinstance(top, Interval) or top.origin is None:
        return None
    lower, upper = ends(value)
    origin = top.origin
    if isinstance(origin, Elementwise) and any(operand is value for operand in origin.operands):
        others = [operand for operand in origin.operands if operand is not value]
        if not others:
            return Ternary(jnp.ones(lower.shape, bool), jnp.ones(lower.shape, bool))
        low, high = ends(others[0])
        return Ternary(lower > high, upper >= low)
    if isinstance(origin, Reduced) and origin.operand is value:
        axes = origin.axes
        if origin.name == "reduce_min":
            lower, upper = -upper, -lower
        first = jnp.max(upper, axis=axes, keepdims=True)
        is_first = upper == first
        lone = is_first & (jnp.sum(is_first, axis=axes, keepdims=True) == 1)
        second = jnp.max(jnp.where(is_first, -jnp.inf, upper), axis=axes, keepdims=True)
        rival = jnp.where(lone, second, first)
        attained = lower > rival
        return Ternary(attained, upper >= jnp.max(lower, axis=axes, keepdims=True), Location(axes))
    return None


def finite(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Ternary:
    """The rule for ``is_finite``: surely true where both ends are finite, else open."""
    lower, upper = ends(args[0])
    sure = jnp.isfinite(lower) & jnp.isfinite(upper)
    return Ternary(sure, jnp.ones_like(sure))


def unequal(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Ternary:
    same = equal(eqn, args, norm)
    return Ternary(~same.upper, ~same.lower)


def logical(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Ternary:
    """The rule for boolean operations (not, and, or, xor) on open booleans."""
    if any(isinstance(a, Interval) for a in args):
        raise ValueError(f"the primitive {eqn.primitive.name!r} is certified on booleans only.")
    name = eqn.primitive.name
    if name == "not":
        lower, upper = ends(args[0])
        return Ternary(~upper, ~lower)
    (la, ua), (lb, ub) = (ends(a) for a in args)
    if name == "xor":
        return Ternary((la & ~ub) | (lb & ~ua), (ua & ~lb) | (ub & ~la))
    return Ternary(bind(eqn, [la, lb]), bind(eqn, [ua, ub]))


def select(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Value | list[Value]:
    """The rule for ``select_n``: the hull of both cases where the predicate is open."""
    pick, *cases = args
    if is_exact(pick):
        pick = whole.declared(eqn, args, 0)
        return additive(range(1, len(args)))(eqn, [pick, *cases], norm)
    if isinstance(pick, Interval):
        return _switch(pick, cases, norm)
    assert isinstance(pick, Ternary)
    (l0, u0), (l1, u1) = (ends(case) for case in cases)
    if l0.dtype == bool:
        # (pick & one) | (~pick & zero), and both agree wherever pick is open.
        lower = jnp.where(pick.lower, l1, jnp.where(pick.upper, l0 & l1, l0))
        return Ternary(lower, jnp.where(pick.lower, u1, jnp.where(pick.upper, u0 | u1, u0)))
    surely, maybe = (jnp.broadcast_to(end, l0.shape) for end in (pick.lower, pick.upper))
    lower = jnp.where(surely, l1, jnp.where(maybe, jnp.minimum(l0, l1), l0))
    upper = jnp.where(surely, u1, jnp.where(maybe, jnp.maximum(u0, u1), u0))
    return fresh(lower, upper, _piecewise(cases, norm))


def _switch(pick: Interval, cases: Sequence[Value], norm: float | None) -> Interval:
    """The hull of the cases that an uncertain integer may choose; unbounded for one beyond them."""
    if any(ends(case).lower.dtype == bool for case in cases):
        raise ValueError(
            "'select_n' by an integer that depends on the input is certified for numbers only, not "
            "for booleans."
        )
    first, last = ends(pick)
    able = [(first <= k) & (k <= last) for k in range(len(cases))]
    sides = zip(*map(ends, cases))
    low, high = (
        functools.reduce(take, [jnp.where(on, end, blank) for on, end in zip(able, side)])
        for side, take, blank in zip(sides, (jnp.minimum, jnp.maximum), (jnp.inf, -jnp.inf))
    )
    far = (first < 0) | (last > len(cases) - 1)
    constant = stretch([pick, *cases], jnp.inf, norm)
    return fresh(jnp.where(far, -jnp.inf, low), jnp.where(far, jnp.inf, high), constant)


def _piecewise(cases: Sequence[Value], norm: float | None) -> Array | None:
    """The Lipschitz constant of a continuous selection between two functions, entry by entry.

    It is the l_``norm`` of the two constants; None without ``norm``.
    """
    if norm is None:
        return None
    zero, one = (constant_of(case, norm) for case in cases)
    if norm == math.inf:
        return jnp.maximum(zero, one)
    return zero + one if norm == 1 else jnp.sqrt(zero**2 + one**2) * (1 + gamma(4, zero.dtype))


def unpool(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Value | list[Value]:
    """The gradient of max pooling: a window's cotangent goes wherever its maximum may be.

    ``args`` are the cotangents, one a window, and the pooled array; the result has the latter's
    shape.
    """
    source, operand = args
    if not isinstance(operand, Interval):
        return additive([0], lambda e: math.prod(e.params["window_dimensions"]))(eqn, args, norm)
    (lower, upper), (low_g, high_g) = ends(operand), ends(source)
    views = windows(eqn, low_g.shape)
    lows, highs = (jnp.stack([see(end, -jnp.inf) for see in views]) for end in (lower, upper))
    best = jnp.max(lows, axis=0)
    low, high = jnp.zeros_like(lower), jnp.zeros_like(lower)
    for index, see in enumerate(views):
        rivals = jnp.delete(highs, index, axis=0, assume_unique_indices=True)
        surely = lows[index] > jnp.max(rivals, axis=0, initial=-jnp.inf)
        maybe = highs[index] >= best
        _, back = loops.linear_pullback(functools.partial(see, blank=0.0), low, best, low_g)
        low += back(jnp.where(surely, low_g, jnp.where(maybe, jnp.minimum(low_g, 0.0), 0.0)))
        high += back(jnp.where(surely, high_g, jnp.where(maybe, jnp.maximum(high_g, 0.0), 0.0)))
    # Overlapping windows add up; every partial sum is at most the sum of the magnitudes.
    sizes = zip(eqn.params["window_dimensions"], eqn.params["window_strides"])
    overlap = math.prod(-(-size // stride) for size, stride in sizes)
    slack = jnp.zeros((), lower.dtype)
    if overlap > 1:
        size = jnp.maximum(jnp.max(jnp.abs(low_g)), jnp.max(jnp.abs(high_g)))
        slack = gamma(overlap, lower.dtype) * overlap * size
    return fresh(low - slack, high + slack, stretch(args, jnp.inf, norm))
