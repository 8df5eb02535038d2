r"""Linear relaxations (lines) of nonlinear primitives, one rule for each.

A rule bounds ``f`` between ``sum_v low_v . view_v(operand) + low`` and ``sum_v up_v . view_v + up``
on a box of operands; a view is a fixed linear map such as the identity or one position of a pooling
window. Slopes are free: each intercept is the extreme of ``f(z) - slope z`` on the box, which is
attained at an end, a kink, or where the derivative is the slope, so that a bad slope costs
tightness and never soundness. This needs a slope to be one number wherever it is used
(:func:`wdjax.xla_cpu.single`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from wdjax import loops, norms
from wdjax.bounds import record
from wdjax.bounds.affine_rules import windows
from wdjax.bounds.domain import Array, Linear, tiny
from wdjax.bounds.record import Ends, Lines, Relaxation, View
from wdjax.xla_cpu import single


def _rounding(eqn: JaxprEqn, *sizes: Array) -> Array:
    """The error of a result and of intercepts that are computed from terms of these magnitudes."""
    unit = record.trusted(eqn, sizes[0].dtype) * float(jnp.finfo(sizes[0].dtype).eps)
    total = sum(jnp.abs(size) for size in sizes)
    return jnp.asarray(unit * total + 4 * float(jnp.finfo(sizes[0].dtype).tiny))


def _level(eqn: JaxprEqn, size: Array, *turned: Array) -> Array:
    """The error of a result of magnitude ``size``, and of intercepts ``f(z) - slope z`` that are
    largest over a few ``z`` for any slope; ``turned`` are the slopes times the largest ``|z|``."""
    unit = 4 * float(jnp.finfo(size.dtype).eps)
    return _rounding(eqn, size) + unit * sum(map(jnp.abs, turned))


def _ratio(rise: Array, width: Array) -> Array:
    """``rise / width``, constant where the width is so small that its derivative would overflow.

    So it is at dead neurons, whose bounds are those of rounding alone.
    """
    narrow = width < math.sqrt(jnp.finfo(width.dtype).tiny)
    rise, width = (jnp.where(narrow, lax.stop_gradient(t), t) for t in (rise, width))
    return rise / width


def rectifier(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines | None:
    """Lines of ``max(z, c)`` and ``min(z, c) = -max(-z, -c)``: ReLU and one-sided clipping.

    The upper line is the chord; the lower one is the tighter of the two pieces. Where both operands
    depend on the input, :func:`_larger`.
    """
    if all(moves):
        return _larger(eqn, *args)
    moving, least = moves.index(True), eqn.primitive.name == "min"
    (lower, upper), level = args[moving], args[1 - moving]
    if least:
        lower, upper, level = -upper, -lower, -level
    unstable = (lower < level) & (upper > level)
    low = jnp.where(unstable, upper - level > level - lower, lower >= level).astype(lower.dtype)
    below = jnp.where(low > 0, 0.0, level)
    width = jnp.where(unstable, upper - lower, 1.0)
    slope = jnp.where(unstable, jnp.clip(_ratio(upper - level, width), 0.0, 1.0), low)
    slope, low = single(slope, low)
    at_lower, at_upper = level - slope * lower, upper - slope * upper
    above = jnp.maximum(at_lower, at_upper) + _rounding(
        eqn, level + 0 * lower, slope * upper, upper
    )
    above = jnp.where(unstable, above, below)
    if least:
        return Lines((View(moving, slope, low),), -above, -below, unstable)
    return Lines((View(moving, low, slope),), below, above, unstable, unstable & (level == 0))


def _larger(eqn: JaxprEqn, first: Ends, second: Ends) -> Lines:
    """Lines of ``max(a, b) = b + max(a - b, 0)`` and of ``min(a, b) = -max(-a, -b)``.

    Above, the chord of ``max(d, 0)`` over the ends of ``d = a - b``; below, the operand with the
    larger middle.
    """
    least = eqn.primitive.name == "min"
    if least:
        first, second = ((-upper, -lower) for lower, upper in (first, second))
    low, high = first[0] - second[1], first[1] - second[0]
    unstable = (low < 0) & (high > 0)
    below = jnp.where(unstable, low + high >= 0, low >= 0).astype(low.dtype)
    width = jnp.where(unstable, high - low, 1.0)
    slope = jnp.where(unstable, jnp.clip(_ratio(high, width), 0.0, 1.0), below)
    slope, below = single(slope, below)
    sizes = [jnp.maximum(jnp.abs(lower), jnp.abs(upper)) for lower, upper in (first, second)]
    above = jnp.where(unstable, -slope * low, 0.0) + _rounding(eqn, *sizes)
    slopes = (below, slope), (1 - below, 1 - slope)
    if least:
        views = (View(i, up, low) for i, (low, up) in enumerate(slopes))
        return Lines((*views,), -above, 0 * above, unstable)
    return Lines((*(View(i, *pair) for i, pair in enumerate(slopes)),), 0 * above, above, unstable)


def product(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines | None:
    """Lines of ``x y``: on each side the mean of McCormick's two planes."""
    if not all(moves):
        return None
    (lx, ux), (ly, uy) = args
    x_slope, y_slope = single(0.5 * (ly + uy), 0.5 * (lx + ux))
    sizes = [jnp.maximum(jnp.abs(a), jnp.abs(b)) for a, b in args]
    slack = _rounding(eqn, sizes[0] * sizes[1])
    low = -0.5 * (lx * ly + ux * uy) - slack
    up = -0.5 * (lx * uy + ux * ly) + slack
    return Lines((View(0, x_slope, x_slope), View(1, y_slope, y_slope)), low, up)


def power(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines | None:
    """Lines of even powers, and of negative powers on intervals without 0; None for other powers.

    An odd negative power below 0 is the mirror image of that above 0.
    """
    exponent = eqn.params["y"] if eqn.primitive.name == "integer_pow" else 2
    if exponent == 1 or (exponent > 0 and exponent % 2):
        return None
    lower, upper = args[0]
    flip = (upper < 0) & (exponent % 2 == 1)
    ends = jnp.where(flip, -upper, lower), jnp.where(flip, -lower, upper)
    found = _convex(eqn, lambda z: z**exponent, lambda z: exponent * z ** (exponent - 1), ends)
    (view,), below, above = found[:3]
    low, up = jnp.where(flip, view.up, view.low), jnp.where(flip, view.low, view.up)
    below, above = jnp.where(flip, -above, below), jnp.where(flip, -below, above)
    if exponent < 0:
        outside = (lower > 0) | (upper < 0)
        below, above = (jnp.where(outside, line, jnp.nan) for line in (below, above))
    return Lines((View(0, low, up),), below, above)


def convex(f: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Relaxation:
    return lambda eqn, args, moves: _convex(eqn, f, slope, args[0])


def concave(f: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Relaxation:
    def rule(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines | None:
        found = _convex(eqn, lambda z: -f(z), lambda z: -slope(z), args[0])
        ((view,), below, above) = found[:3]
        return Lines((View(0, -view.up, -view.low),), -above, -below)

    return rule


def _convex(
    eqn: JaxprEqn, f: Callable[[Array], Array], slope: Callable[[Array], Array], ends: Ends
) -> Lines:
    """Lines of a convex function: above the chord, below the tangent at the midpoint."""
    lower, upper = ends
    middle = 0.5 * lower + 0.5 * upper
    width = jnp.where(upper > lower, upper - lower, 1.0)
    up = jnp.where(upper > lower, _ratio(f(upper) - f(lower), width), slope(middle))
    up, low = single(up, slope(middle))
    reach = jnp.maximum(jnp.abs(lower), jnp.abs(upper))
    size = jnp.maximum(jnp.abs(f(lower)), jnp.abs(f(upper)))
    # A slope below the smallest float is lost.
    slack = _rounding(eqn, size, up * reach, low * reach) + tiny(reach.dtype) * reach
    above = jnp.maximum(f(lower) - up * lower, f(upper) - up * upper) + slack
    below = f(middle) - low * middle - slack
    real = jnp.isfinite(f(lower)) & jnp.isfinite(f(upper))
    below, above = (jnp.where(real, line, jnp.nan) for line in (below, above))
    return Lines((View(0, low, up),), below, above)


def sigmoid(
    f: Callable[[Array], Array], slope: Callable[[Array], Array], inverse: Callable[[Array], Array]
) -> Relaxation:
    """A rule for S-shaped functions: convex below 0, concave above, odd up to a constant.

    The derivative is ``slope``; it equals ``s`` at ``inverse(s) >= 0`` and at ``-inverse(s)``.
    """

    def rule(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines | None:
        lower, upper = args[0]
        width = jnp.where(upper > lower, upper - lower, 1.0)
        chord = jnp.where(upper > lower, _ratio(f(upper) - f(lower), width), slope(lower))
        # The line below f on [lower, upper] is as steep as the one above f on [-upper, -lower].
        mirrored = jnp.stack([lower, -upper]), jnp.stack([upper, -lower])
        up, low = single(*_tangent(f, slope, *mirrored, chord))
        turned = functools.partial(_extremes, eqn, f, slope, inverse)
        below, above = turned(low, lower, upper)[0], turned(up, lower, upper)[1]
        return Lines((View(0, low, up),), below, above, turned=turned)

    return rule


def _extremes(
    eqn: JaxprEqn,
    f: Callable[[Array], Array],
    slope: Callable[[Array], Array],
    inverse: Callable[[Array], Array],
    line: Array,
    lower: Array,
    upper: Array,
) -> Ends:
    """The least and largest ``f(z) - line z`` of an S-shaped ``f`` on an interval, rounded
    outwards."""
    # The derivative of f(z) - line z at the turn is 0.
    turn = lax.stop_gradient(inverse(jnp.clip(line, 0.0, slope(jnp.zeros_like(line)))))
    points = (lower, upper, jnp.clip(turn, lower, upper), jnp.clip(-turn, lower, upper))
    heights = [f(z) - line * z for z in points]
    reach = jnp.maximum(jnp.abs(lower), jnp.abs(upper))
    size = jnp.maximum(1.0, jnp.maximum(jnp.abs(f(lower)), jnp.abs(f(upper))))
    slack = _level(eqn, size, line * reach)
    low, up = (functools.reduce(pick, heights) for pick in (jnp.minimum, jnp.maximum))
    return low - slack, up + slack


def _tangent(
    f: Callable[[Array], Array],
    slope: Callable[[Array], Array],
    lower: Array,
    upper: Array,
    chord: Array,
) -> Array:
    """The slope of the line above an S-shaped ``f`` that is lowest at the middle of the interval.

    The ends, the ``chord``'s slope and the result have an entry for each interval. The line
    supports the concave hull there, which is ``f`` from the point on whose tangent goes through the
    lower end, and that tangent before it; the chord if there is no such point.
    """
    begin = jnp.maximum(lower, 0.0)
    # The tangent point of an odd function is at most -lower.
    low, high = begin, jnp.maximum(jnp.minimum(upper, jnp.abs(lower)), begin)
    start = f(lower)

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        point = 0.5 * low + 0.5 * high
        above = start + slope(point) * (point - lower) >= f(point)
        return jnp.where(above, point, low), jnp.where(above, high, point)

    low, high = loops.fori_loop(0, 12, halve, (low, high))
    tangent = slope(jnp.maximum(low, 0.5 * lower + 0.5 * upper))
    convex = (upper <= 0) | ((lower < 0) & (slope(upper) >= chord))
    return jnp.where(convex, chord, tangent)


def wave(f: Callable[[Array], Array], peak: float) -> Relaxation:
    """A rule for sine and cosine, with maxima at ``2 pi (peak + k)``: the lines that are tightest
    at the midpoint."""

    def rule(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines | None:
        ends = args[0]
        up, above = _crest(eqn, f, peak, ends)
        low, below = _crest(eqn, lambda z: -f(z), peak + 0.5, ends)
        return Lines((View(0, -low, up),), -below, above)

    return rule


_FARTHEST = 2.0**10
"""Arguments of sines beyond this magnitude get the lines 1 and -1: floats are too coarse there."""


def _crest(
    eqn: JaxprEqn, f: Callable[[Array], Array], peak: float, ends: Ends
) -> tuple[Array, Array]:
    """Slope and intercept of the line above a sine ``f`` that is lowest at the interval's midpoint.

    Both are ``[B, *shape]``, as each of the ``ends`` is: an entry for each interval. For a slope
    ``s`` the intercept is the largest ``f(z) - s z``: at an end, or the first or last of the points
    ``acos(s) + 2 pi (peak + k) - pi / 2`` inside, where the derivative is ``s``. The line's height
    at the middle is convex in ``s``: where its highest point lies to the right of the middle, a
    larger ``s`` is better.
    """
    lower, upper = ends
    middle, turn = 0.5 * lower + 0.5 * upper, 2 * math.pi
    unit = 8 * float(jnp.finfo(lower.dtype).eps)
    reach = jnp.maximum(jnp.abs(lower), jnp.abs(upper))
    wide = ~(reach <= _FARTHEST)

    def highest(s: Array) -> tuple[Array, Array]:
        """Where ``f(z) - s z`` is largest, and how large."""
        begun = jnp.arccos(s) + turn * (peak - 0.25)
        first = jnp.ceil((lower - begun) / turn - unit * (1 + reach))
        last = jnp.floor((upper - begun) / turn + unit * (1 + reach))
        points = [lower, upper]
        points += [jnp.clip(lax.stop_gradient(begun + turn * k), *ends) for k in (first, last)]
        heights = [f(z) - s * z for z in points]
        top = functools.reduce(jnp.maximum, heights)
        return functools.reduce(
            lambda best, at: jnp.where(at[1] == top, at[0], best), zip(points, heights), middle
        ), top

    steepest = jnp.ones_like(middle)

    def halved(_: int, between: Ends) -> Ends:
        slope = 0.5 * between[0] + 0.5 * between[1]
        right = highest(slope)[0] > middle
        return jnp.where(right, slope, between[0]), jnp.where(right, between[1], slope)

    low, high = loops.fori_loop(0, 20, halved, (-steepest, steepest))
    (slope,) = single(lax.stop_gradient(jnp.where(wide, 0.0, 0.5 * low + 0.5 * high)))
    # Near the tangent point, a point at distance d lies lower by at most d^2.
    size = jnp.minimum(jnp.maximum(jnp.abs(f(lower)), jnp.abs(f(upper))) + upper - lower, 1.0)
    slack = _level(eqn, size, slope * reach) + (unit * turn * (1 + reach)) ** 2
    return slope, jnp.where(wide, 1.0, highest(slope)[1] + slack)


def pooled(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines | None:
    """Lines of max pooling: below, the entry with the largest lower end; above, the same entry if
    it surely is the maximum, else the largest upper end."""
    if max(eqn.params["base_dilation"]) > 1:
        return None
    outs: Any = eqn.outvars[0].aval
    views = windows(eqn, outs.shape)
    return _largest(
        args[0], [[functools.partial(see, blank=b) for b in (0.0, -jnp.inf)] for see in views]
    )


def reduced(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines | None:
    """Lines of a maximum over axes, as those of max pooling; None for more than 64 entries."""
    axes = tuple(eqn.params["axes"])
    shape = args[0][0].shape[1:]

    def view(index: tuple[int, ...]) -> Linear:
        where = dict(zip(axes, index))
        return lambda t: t[tuple(where.get(i, slice(None)) for i in range(t.ndim))]

    offsets = list(itertools.product(*(range(shape[axis]) for axis in axes)))
    if len(offsets) > 64:
        return None
    return _largest(args[0], [(view(p), view(p)) for p in offsets])


def mirrored(rule: Relaxation) -> Relaxation:
    """The rule for a minimum from that for a maximum: ``min(z) = -max(-z)``."""

    def turned(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines | None:
        (lower, upper), *others = args
        found = rule(eqn, [(-upper, -lower), *others], moves)
        if found is None:
            return None
        views = tuple(view._replace(low=view.up, up=view.low) for view in found.views)
        return Lines(views, -found.up, -found.low)

    return turned


def _largest(ends: Ends, views: Sequence[Sequence[Linear]]) -> Lines:
    """Lines of the maximum of several views of an operand.

    A view is a pair: linear (padding by 0) and for bounds (padding by -inf).
    """
    lower, upper = ends
    lows, highs = (jnp.stack([jax.vmap(see)(end) for _, see in views]) for end in (lower, upper))
    best = jnp.argmax(lows, axis=0)
    first = jnp.max(lows, axis=0)
    top = norms.largest(highs, 0)
    lines = []
    is_best = [best == i for i in range(len(views))]
    rivals = jnp.max(jnp.stack([jnp.where(b, -jnp.inf, h) for b, h in zip(is_best, highs)]), axis=0)
    sure = first >= rivals
    for (see, _), chosen in zip(views, is_best):
        low = chosen.astype(lower.dtype)
        lines.append(View(0, low, jnp.where(sure, low, 0.0), see, lower.shape[1:]))
    zero = jnp.zeros_like(first)
    return Lines(tuple(lines), zero, jnp.where(sure, zero, top))
