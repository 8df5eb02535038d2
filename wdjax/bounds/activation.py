r"""Linear bounds of a scalar activation function, from cells that cover its operand's interval.

On a cell around ``c`` a continuous ``f`` lies in ``f(c) + D (z - c)``, where ``D`` bounds its
derivative on the cell; this bounds ``f(z) - s z`` for any slope ``s``. Of a few candidate slopes
the one is taken whose line is closest to ``f`` at the interval's midpoint, which is its mean
height.

Rounding: the cells bound the exact function; the error of its float program, from a running error
analysis over the whole interval (one equation after the other), is added.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive

from wdjax import loops
from wdjax.bounds import interval, record
from wdjax.bounds.domain import Array, Interval, Value, ends, fresh, largest_size, tiny
from wdjax.bounds.graph import Graph, flatten
from wdjax.bounds.primitives.functions import function
from wdjax.bounds.record import ONCE, Ends, Lines, View
from wdjax.xla_cpu import single

_HALF = 12
"""Number of cells on each side of 0, where the pieces of most activations meet."""
_POINTS = (0, 3, 6, 9, 12, 13, 16, 19, 22, 25)
"""Cells at whose beginnings the function is evaluated to find its hulls; the last is the end."""

primitive = Primitive("elementwise")
"""Applies its parameter ``jaxpr``, a scalar function, to every entry of the operand."""
primitive.def_abstract_eval(lambda operand, *, jaxpr: operand)


def lines(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines:
    """The relaxation of an ``elementwise`` equation; the operand's ends are ``[B, *shape]``."""
    program = eqn.params["jaxpr"]
    shape = args[0][0].shape
    lower, upper = (end.reshape(-1) for end in args[0])
    found = jax.vmap(lambda low, high: _lines(program, low, high))(lower, upper)
    low, up, below, above, least, most = (t.reshape(shape) for t in found)
    return Lines((View(0, low, up),), below, above, ends=(least, most))


def _lines(program: ClosedJaxpr, lower: Array, upper: Array) -> tuple[Array, ...]:
    """Lines of a scalar function between the scalars ``lower`` and ``upper``.

    Returns six scalars: the lower and upper slope, the lower and upper intercept, and the lower and
    upper bound of the function itself (the intercepts for slope 0).
    """
    value = functools.partial(_run, flatten(program))
    slope = jax.make_jaxpr(jax.grad(value))(lower)
    middle = 0.5 * lower + 0.5 * upper
    cuts = jnp.append(jax.vmap(lambda k: _cut(lower, upper, k))(jnp.array(_POINTS)), middle)
    heights, steep = jax.vmap(jax.value_and_grad(value))(cuts)
    tops = jnp.stack([heights[:-1], -heights[:-1]])
    above, below = jax.vmap(lambda tops: _hull(cuts[:-1], tops, middle))(tops)
    tangents = steep[0], steep[-1], steep[-2]
    slopes = jnp.stack([0 * lower, above, -below, *tangents])
    (slopes,) = single(jnp.where(jnp.isfinite(slopes), slopes, 0.0))

    def cell(found: Ends, k: Array) -> tuple[Ends, None]:
        one, two = _cut(lower, upper, k), _cut(lower, upper, k + 1)
        low, high = jnp.minimum(one, two), jnp.maximum(one, two)
        center = 0.5 * low + 0.5 * high
        half = jnp.maximum(high - center, center - low)
        at, steep = interval.over(program, center, center), interval.over(slope, low, high)
        swing = half * jnp.maximum(jnp.abs(steep[0] - slopes), jnp.abs(steep[1] - slopes))
        unit = record.LEAST * float(jnp.finfo(lower.dtype).eps)
        size = jnp.maximum(jnp.abs(at[0]), jnp.abs(at[1])) + jnp.abs(slopes * center)
        swing = swing + unit * (swing + size)
        below, above = at[0] - slopes * center - swing, at[1] - slopes * center + swing
        return (jnp.minimum(found[0], below), jnp.maximum(found[1], above)), None

    start = jnp.full_like(slopes, jnp.inf), jnp.full_like(slopes, -jnp.inf)
    (below, above), _ = loops.scan(cell, start, jnp.arange(2 * _HALF + 1))
    # A test for NaN is the only discontinuity of a program that is fused.
    lost = interval.may_test_nan(flatten(program), fresh(lower, upper))
    error = jnp.where(lost, jnp.inf, _deviation(program, lower, upper))
    below, above = below - error, above + error
    low, up = jnp.argmax(below + slopes * middle), jnp.argmin(above + slopes * middle)
    return slopes[low], slopes[up], below[low], above[up], below[0], above[0]


def _run(graph: Graph, z: Array) -> Array:
    """Runs a scalar program, with a derivative of tanh that intervals bound well."""
    values = {**graph.constants, graph.inputs[0]: z}
    for node in graph.nodes:
        args = [values[place] for place in node.inputs]
        result = (
            _tanh(*args)
            if node.name == "tanh"
            else node.eqn.primitive.bind(*loops.alike(*args), **node.eqn.params)
        )
        values[node.outputs[0]] = result
    return jnp.asarray(values[graph.outputs[0]])


@jax.custom_jvp
def _tanh(z: Array) -> Array:
    return jnp.tanh(z)


@_tanh.defjvp
def _tanh_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """JAX adds ``(1 - h) h`` to ``1 - h``, whose intervals lose that both have the same ``h``."""
    (z,), (change,) = primals, tangents
    h = jnp.tanh(z)
    return h, change * ((1 - h) * (1 + h))


def _hull(at: Array, heights: Array, middle: Array) -> Array:
    """The slope at ``middle``, a scalar, of the concave hull of points ``(at, heights)``, ``[P]``.

    Its edge there is the chord across the middle that is highest at the middle. Chords so short
    that their derivatives overflow count as fixed.
    """
    left, right = at[:, None], at[None]
    rise, run = heights[None] - heights[:, None], right - left
    short = jnp.abs(run) < jnp.sqrt(jnp.finfo(at.dtype).tiny)
    fixed = lax.stop_gradient(rise / run)
    slopes = jnp.where(short, fixed, jnp.where(short, 0.0, rise) / jnp.where(short, 1.0, run))
    level = heights[:, None] + slopes * (middle - left)
    across = (left < middle) & (middle < right) & ~jnp.isnan(level)
    return jnp.take(slopes, jnp.argmax(jnp.where(across, level, -jnp.inf)))


def _cut(lower: Array, upper: Array, k: Array) -> Array:
    """Where cell ``k`` begins; if 0 is in the interval, the middle cell is ``[-tiny, tiny]``."""
    least, count = tiny(lower.dtype), 2 * _HALF + 1
    right = k > _HALF
    start, stop = jnp.where(right, least, lower), jnp.where(right, upper, -least)
    share = jnp.where(right, k - _HALF - 1, k) / _HALF
    near = 0.5 * share * jnp.where(right, 1 + share, 3 - share)  # Narrower towards 0.
    split = jnp.where(share == 1, stop, start + near * (stop - start))
    even = jnp.where(k == count, upper, lower + k / count * (upper - lower))
    return jnp.where((lower < -least) & (upper > least), split, even)


def _deviation(program: ClosedJaxpr, lower: Array, upper: Array) -> Array:
    """A bound of a scalar program's rounding error, inf if unknown.

    A scalar, as are the ends ``lower`` and ``upper`` between which it holds. An equation passes on
    each operand's error times its largest derivative and adds its own rounding.
    """
    graph = flatten(program)
    values: dict[int, Value] = {**graph.constants, graph.inputs[0]: fresh(lower, upper)}
    errors: dict[int, Array] = {}
    for node in graph.nodes:
        args, name = [values[place] for place in node.inputs], node.name
        (out,) = interval.apply(node.eqn, args)
        values[node.outputs[0]] = out
        if not isinstance(out, Interval):
            continue
        parts = [
            errors[place] * _steep(node.eqn, args, k)
            for k, place in enumerate(node.inputs)
            if place in errors
        ]
        either = jnp.maximum if name == "select_n" else jnp.add
        error = functools.reduce(either, parts, jnp.zeros_like(lower))
        if not record.of(name).exact:
            wrong = record.trusted(node.eqn, lower.dtype) * float(jnp.finfo(lower.dtype).eps)
            error = error + wrong * largest_size(out) + 2 * tiny(lower.dtype)
        errors[node.outputs[0]] = error
    worst = errors.get(graph.outputs[0], jnp.zeros_like(lower))
    return jnp.where(jnp.isnan(worst), jnp.inf, worst)


def _steep(eqn: JaxprEqn, args: Sequence[Value], k: int) -> Array:
    """The largest magnitude of an equation's derivative in operand ``k``."""

    def function(*zs: Array) -> Array:
        return jnp.asarray(eqn.primitive.bind(*loops.alike(*zs), **eqn.params))

    derivative = jax.make_jaxpr(jax.grad(function, argnums=k))(*(ends(a).lower for a in args))
    return largest_size(interval.interpret(derivative, args)[0])


record.add(function(primitive.name, interval.entrywise, ONCE, lines, fuses=False))
