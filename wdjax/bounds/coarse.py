r"""Cheap bounds of all channels at a position of a feature map, to skip neurons that are stable.

Parallel lines, ``s z + low`` and ``s z + up``, let one row of coefficients bound a function from
both sides; all channels of a position share their windows; and rows go back only as far as the
first affine map's output, whose intervals are exact: most of the cost would lie before it.

Source: parallel lines as of Weng et al. [weng2018], who bound everything by them.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from wdjax import xla_cpu
from wdjax.bounds import crown, passes
from wdjax.bounds.coefficients import Rows, Window
from wdjax.bounds.domain import Array
from wdjax.bounds.record import Lines
from wdjax.xla_cpu import framed, rounding

_DEPTH = 3
"""Number of nonlinear layers on the way back at which these bounds are used: fewer save little
time, and with more the bounds decide too few neurons."""


def refine(state: passes.Pass, needed: Mapping[int, Array]) -> None:
    """Bounds all channels of a map's positions where any is ``needed``, ``[B, *shape]`` by place.

    Does nothing where :func:`_short` finds that it is not worth it.
    """
    for place, some in needed.items():
        _refine(state, place, some)


def _refine(state: passes.Pass, place: int, needed: Array) -> None:
    value = state.values[place]
    shape = value.lower.shape[1:]
    short = _short(state, place) if crown.is_map(shape) else None
    if short is None:
        return
    channels = shape[-1]
    width = min(xla_cpu.positions_at_once(channels), passes.chunk(state, channels))
    identity = jnp.eye(channels, dtype=value.lower.dtype)[:, None, None, None, :]

    def find(index: Sequence[Array]) -> Array:
        sample, _, row, column = index
        a = Window(jnp.repeat(identity, len(sample), axis=1), (1, 1), (0, 0), shape)
        found = passes.backward(short, {place: a}, Rows(sample, (row, column)), mirrored=True)
        return found.transpose(0, 2, 1)

    crown.improve(state, {place: jnp.any(needed, axis=-1, keepdims=True)}, width, find)


def _short(state: passes.Pass, place: int) -> passes.Pass | None:
    """A pass that stops at the output of the first affine map, with parallel lines after it.

    That output is treated as a box. None unless exactly ``_DEPTH`` elementwise nonlinear values lie
    between it and ``place``.
    """
    net, found = state.network, {place}
    lines: dict[int, Lines] = {}
    for node in reversed(net.graph.nodes):
        for out in found.intersection(node.outputs):
            value = state.values[out]
            if found == {out} and out in net.affine and out in state.charges and value.mixes < 2:
                boxes = {**state.boxes, out: framed(*_part(state, out))}
                short = dataclasses.replace(state, lines=lines, boxes=boxes)
                return short if len(lines) == _DEPTH else None
            found.remove(out)
            if out in net.affine:
                found.update(part.place for part in net.affine[out].parts)
            elif out in state.lines:
                (view, *more), usual = state.lines[out].views, state.lines[out]
                if more or view.view is not None:
                    return None
                operand = node.inputs[view.operand]
                lines[out] = _parallel(usual, *_part(state, operand))
                found.add(operand)
    return None


def _parallel(lines: Lines, lower: Array, upper: Array) -> Lines:
    """Lines whose lower line has the upper line's slope, so that one pass bounds both sides.

    The lower intercept falls until the line is sound on ``[lower, upper]``, the range
    ``[B, *shape]`` of the operand's linear part, which is the operand less its offset and rounding
    error (:func:`_part`). Where any lower slope is sound (``lines.free``) the lower line's
    intercept is the slope times ``lines.shift``.
    """
    (view,) = lines.views
    unit = 2 * rounding(lower[0].size, lower.dtype)
    turned = view.low - view.up
    drop = jnp.minimum(turned * lower, turned * upper)
    drop = drop - unit * jnp.abs(turned) * jnp.maximum(jnp.abs(lower), jnp.abs(upper))
    low = lines.low + jnp.where(turned == 0, 0.0, drop)
    if lines.free is not None:
        low = jnp.where(lines.free, view.up * lines.shift, low)
    maps = (framed(low - unit * jnp.abs(low), lines.up, view.up, view.up),)
    return lines._replace(maps=maps, around=None)


def _part(state: passes.Pass, place: int) -> tuple[Array, Array]:
    """The ends ``[B, *shape]`` of a value's linear part: less its offset and rounding error."""
    value, (offset, error) = state.values[place], state.gathered(place)
    unit = 2 * rounding(offset[0].size, offset.dtype)
    lower, upper = value.lower - offset - error, value.upper - offset + error
    lower = lower - unit * (jnp.abs(lower) + jnp.abs(offset))
    return lower, upper + unit * (jnp.abs(upper) + jnp.abs(offset))
