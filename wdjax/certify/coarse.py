r"""Cheap bounds of whole positions of a map, which tell what needs no better ones.

Parallel lines, ``s z + low`` and ``s z + up``, let one row of coefficients bound a function from
both sides; all channels of a position look at the same windows; and rows go back only to what the
first affine map computes, whose intervals are exact: most of their cost lies before it.

Source: parallel lines as of Weng et al. [weng2018], who bound everything by them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax.certify import crown
from wdjax.certify.coefficients import (
    Coefficients,
    Rows,
    Window,
    flat,
    framed,
    rounding,
    seen,
    summed,
    total,
)
from wdjax.certify.domain import Array
from wdjax.certify.relax import Lines
from wdjax.certify.terms import Sum
from wdjax.certify.transposition import transposed

_DEPTH = 3
"""Values between that are not affine: of fewer little is saved, and of more too little decided."""
_WIDTH = 128
"""Functions that go back at once on a CPU."""


class Strip(NamedTuple):
    """Parallel lines of a value, and the place of its operand."""

    operand: int
    maps: Array
    """Framed center, radius and slope."""


class Way(NamedTuple):
    """From a place to where a row ends, whose affine part is known."""

    end: int
    maps: Array
    """Framed center and radius."""
    strips: dict[int, Strip]


def refine(state: crown.Pass, place: int, needed: Array) -> None:
    """Bounds all channels of a map's positions where any is ``needed``, if that is worth it."""
    value = state.values[place]
    shape = value.lower.shape[1:]
    way = _way(state, place) if len(shape) == 4 and shape[0] == 1 else None
    if way is None:
        return
    channels = shape[-1]
    most = _WIDTH if jax.default_backend() == "cpu" else 16 * _WIDTH
    width = max(min(most // channels, crown.chunk(state, channels)), 1)
    own = jnp.eye(channels, dtype=value.lower.dtype)[:, None, None, None, :]

    def turn(these: Array, places: Sequence[Array], sides: Array) -> Array:
        sample, _, row, column = places
        a = Window(jnp.repeat(own, len(these), axis=1), (1, 1), (0, 0), shape)
        found = _bound(state, place, a, Rows(sample, (row, column)), way)
        found = jnp.where(jnp.isnan(found), -jnp.inf, found).transpose(0, 2, 1)
        return sides.at[:, these].max(found, mode="drop")

    sides = jnp.stack([side.reshape(-1, channels) for side in (value.lower, -value.upper)])
    sides = crown.by_turns(jnp.any(needed, axis=-1, keepdims=True), width, turn, sides)
    low, high = sides.reshape(2, *value.lower.shape)
    state.values[place] = value._replace(lower=low, upper=-high)


def _way(state: crown.Pass, place: int) -> Way | None:
    net, found = state.network, {place}
    strips: dict[int, Strip] = {}
    for node in reversed(net.graph.nodes):
        for out in found.intersection(node.outputs):
            value = state.values[out]
            if found == {out} and out in net.affine and out in state.charges and value.mixes < 2:
                way = Way(out, framed(*_middle(*_part(state, out))), strips)
                return way if len(strips) == _DEPTH else None
            found.remove(out)
            if out in net.affine:
                found.update(part.place for part in net.affine[out].parts)
            elif out in state.lines:
                strip = _strip(state, state.lines[out], node.inputs)
                if strip is None:
                    return None
                strips[out] = strip
                found.add(strip.operand)
    return None


def _strip(state: crown.Pass, lines: Lines, inputs: tuple[int, ...]) -> Strip | None:
    """Parallel lines: the upper one, and the lower one turned about the ends of what it is over."""
    if len(lines.views) != 1 or lines.views[0].view is not None:
        return None
    (view,) = lines.views
    lower, upper = _part(state, inputs[view.operand])
    unit = 2 * rounding(lower[0].size, lower.dtype)
    turned = view.low - view.up
    drop = jnp.minimum(turned * lower, turned * upper)
    drop = drop - unit * jnp.abs(turned) * jnp.maximum(jnp.abs(lower), jnp.abs(upper))
    low = lines.low + jnp.where(turned == 0, 0.0, drop)
    if lines.free is not None:
        low = jnp.where(lines.free, view.up * lines.shift, low)
    return Strip(inputs[view.operand], framed(*_middle(low, lines.up), view.up))


def _part(state: crown.Pass, place: int) -> tuple[Array, Array]:
    """Ends of a value's affine part."""
    value, (offset, error) = state.values[place], state.gathered(place)
    unit = 4 * float(jnp.finfo(value.lower.dtype).eps)
    lower = value.lower - offset - error - unit * jnp.abs(value.lower)
    return lower, value.upper - offset + error + unit * jnp.abs(value.upper)


def _bound(state: crown.Pass, place: int, start: Coefficients, rows: Rows, way: Way) -> Array:
    """Lower bounds ``[2, G, R]`` of functions, and of their negatives."""
    net, found = state.network, {place: start}
    zero = jnp.zeros(start.a.shape[:2], start.a.dtype)
    middle, reach = Sum(zero, zero), zero

    def add(a: Coefficients, center: Array, radius: Array) -> None:
        nonlocal middle, reach
        own = flat(a)
        middle = middle.plus(summed(own * center))
        reach = reach + summed(jnp.abs(own) * radius)

    def charge(place: int, a: Coefficients) -> None:
        if place in state.charges:
            add(a, *seen(state.charges[place], rows, a))

    charge(place, start)
    for node in reversed(net.graph.nodes):
        for place in [out for out in node.outputs if out in found]:
            a = found.pop(place)
            backs: list[tuple[int, Coefficients]] = []
            if place == way.end:
                add(a, *seen(way.maps, rows, a))
            elif place in net.affine:
                backs = transposed(net.affine[place], a, rows)
                for part, back in backs:
                    charge(part, back)
            elif place in way.strips:
                strip = way.strips[place]
                *ends, slope = seen(strip.maps, rows, a)
                add(a, *ends)
                back = a._replace(a=a.a * slope.reshape(a.a.shape[1:]))
                if isinstance(back, Window):
                    back = back._replace(clean=True)
                backs = [(strip.operand, back)]
            else:
                add(a, *_middle(*seen(state.boxes[place], rows, a)))
            for operand, new in backs:
                found[operand] = total(found[operand], new, rows) if operand in found else new
    sides = jnp.stack([middle.value, -middle.value])
    return Sum(sides - reach, middle.size + reach, middle.terms).low()


def _middle(lower: Array, upper: Array) -> tuple[Array, Array]:
    """Center and radius of all between two ends."""
    center = 0.5 * lower + 0.5 * upper
    radius = jnp.maximum(upper - center, center - lower)
    unit = 2 * rounding(lower[0].size, lower.dtype)
    return center, radius + unit * (jnp.abs(center) + radius)
