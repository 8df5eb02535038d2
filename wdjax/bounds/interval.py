r"""Interval arithmetic on the program of any JAX function: sound bounds of what it can return.

The program is ``jax.make_jaxpr`` of the function, so a model needs no list of layers, and the
program of a *gradient* is bounded by the same code: ``select(z > 0, g, 0)`` with ``z`` of either
sign becomes the hull of ``g`` and 0, which is the interval Jacobian of FastLip and of Clarke.
This file walks through the program; the rules are in :mod:`wdjax.bounds.primitives`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.typing import ArrayLike

from wdjax import norms
from wdjax.bounds import affine_rules, record, whole
from wdjax.bounds.domain import (
    Array,
    Interval,
    Value,
    box,
    constant_of,
    ends,
    fitted,
    fresh,
    gamma,
    is_exact,
    largest_size,
    tiny,
)
from wdjax.bounds.graph import Graph, flatten
from wdjax.checks import validate


def bound(
    fn: Callable[[Array], Any],
    lower: ArrayLike,
    upper: ArrayLike,
    *,
    ball: tuple[ArrayLike, ArrayLike, float] | None = None,
) -> norms.Bounds:
    """Bounds on every output of ``fn`` over the box ``[lower, upper]``.

    Args:
      fn: a JAX function of one float array. Its program may hold affine operations, maxima,
        pooling, comparisons, selections, products, and the usual elementary functions; nested
        ``jit`` and custom derivatives are looked into, loops of known length unrolled.
      lower: floats of any shape, may be ``-inf``.
      upper: floats of the same shape, may be ``inf``.
      ball: None, or ``(centre, radius, norm)`` with norm 1 or 2: the inputs are also in this ball
        (its norm over the whole array); inf is allowed too.

    Returns:
      ``Bounds(lower, upper)`` with the structure of ``fn``'s output.

    Raises:
      ValueError: an operation that has no rule is applied to an input-dependent value.

    Cost: about three evaluations of ``fn``; with a ball, its first affine layer is applied to every
      basis vector.

    Source: Gowal et al. [gowal2018], for programs instead of layers.

    >>> low, high = bound(lambda x: jnp.maximum(x[0] - x[1], 0.0), jnp.zeros(2), jnp.ones(2))
    >>> float(low), round(float(high), 4)
    (0.0, 1.0)
    """
    lower, upper = check_ends(lower, upper)
    if not validate.traced(lower, upper) and not _ordered(lower, upper):
        raise ValueError("lower must be at most upper everywhere, without NaN; swap the ends.")
    if ball is not None:
        lower, upper, ball = _within(lower, upper, *ball)
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(lower)
    outputs = interpret(closed, [box(lower, upper, ball)])
    leaves = jax.tree.structure(shape)
    pairs = [ends(value) for value in outputs]
    lowers = [_opened(pair.lower, -math.inf) for pair in pairs]
    uppers = [_opened(pair.upper, math.inf) for pair in pairs]
    return norms.Bounds(jax.tree.unflatten(leaves, lowers), jax.tree.unflatten(leaves, uppers))


def _opened(end: Array, blank: float) -> Array:
    """The end of an interval, with ``blank`` (-inf or inf) in place of NaN, which means unknown."""
    real = jnp.issubdtype(end.dtype, jnp.floating)
    return jnp.where(jnp.isnan(end), jnp.asarray(blank, end.dtype), end) if real else end


def _ordered(lower: ArrayLike, upper: ArrayLike) -> bool:
    """Whether ``lower <= upper``; in NumPy, since in jit JAX operations on constants are traced."""
    return bool(np.all(np.asarray(lower) <= np.asarray(upper)))


def check_ends(lower: ArrayLike, upper: ArrayLike) -> tuple[Array, Array]:
    """The ends of a box as float arrays of one shape, or a ValueError."""
    lower, upper = jnp.asarray(lower), jnp.asarray(upper)
    fits = (lower.shape, lower.dtype) == (upper.shape, upper.dtype)
    if not fits or not jnp.issubdtype(lower.dtype, jnp.floating):
        raise ValueError(
            "lower and upper must be floats of one shape, the ends of one sample's box, got "
            f"{lower.dtype}{list(lower.shape)} and {upper.dtype}{list(upper.shape)}."
        )
    return lower, upper


def _within(
    lower: Array, upper: Array, center: ArrayLike, radius: ArrayLike, norm: float
) -> tuple[Array, Array, tuple[Array, Array, float] | None]:
    """The box cut by the bounding box of a ball, and the ball (None for l_inf, which is a box).

    Raises for a radius below 0, a centre of another shape, and a ball outside the box.
    """
    norm = norms.check_norm(norm)
    center, radius = jnp.asarray(center, lower.dtype), jnp.asarray(radius, lower.dtype)
    known = not validate.traced(center, radius)
    if center.shape != lower.shape or radius.ndim or (known and not _ordered(0.0, radius)):
        raise ValueError(
            f"ball must be a centre of shape {list(lower.shape)}, a radius of at least 0 and a "
            f"norm; got {list(center.shape)}, {radius!r} and {norm!r}."
        )
    reach = radius + 4 * float(jnp.finfo(lower.dtype).eps) * (radius + jnp.abs(center))
    lower, upper = jnp.maximum(lower, center - reach), jnp.minimum(upper, center + reach)
    if known and not validate.traced(lower) and not _ordered(lower, upper):
        raise ValueError("the ball and the box [lower, upper] do not meet.")
    return lower, upper, None if norm == math.inf else (center, radius, norm)


def interpret(closed: ClosedJaxpr, args: Sequence[Value], norm: float | None = None) -> list[Value]:
    """Runs a closed jaxpr on exact arrays and intervals.

    Results of exact operands are computed exactly.
    """
    graph, values = walk(closed, args, norm)
    return [values[place] for place in graph.outputs]


def walk(
    closed: ClosedJaxpr, args: Sequence[Value], norm: float | None = None
) -> tuple[Graph, dict[int, Value]]:
    """The flat program, and the value at each of its places."""
    graph = flatten(closed)
    values: dict[int, Value] = dict(graph.constants)
    values.update(zip(graph.inputs, args))
    for node in graph.nodes:
        operands = [values[place] for place in node.inputs]
        values.update(zip(node.outputs, apply(node.eqn, operands, norm)))
    return graph, values


def over(program: ClosedJaxpr, lower: Array, upper: Array) -> norms.Bounds:
    """Bounds of the one output of a program whose one input lies in ``[lower, upper]``.

    Unbounded where a value on the way may be NaN: functions of it would hide that.
    """
    graph, values = walk(program, [fresh(lower, upper)])
    lost: dict[int, Array] = {}
    for node in graph.nodes:
        # Selections may not choose the NaN.
        before = [lost[i] for i in node.inputs if i in lost] if node.name != "select_n" else []
        for place in node.outputs:
            value = values[place]
            if isinstance(value, Interval):
                low, high = ends(value)
                here = (low == -jnp.inf) & (high == jnp.inf)
                fit = [t if t.shape == here.shape else jnp.any(t) for t in before]
                lost[place] = functools.reduce(jnp.logical_or, fit, here)
    low, high = ends(values[graph.outputs[0]])
    nan = lost.get(graph.outputs[0], jnp.zeros((), bool))
    return norms.Bounds(jnp.where(nan, -jnp.inf, low), jnp.where(nan, jnp.inf, high))


def apply(eqn: JaxprEqn, args: Sequence[Value], norm: float | None = None) -> list[Value]:
    """The results of one equation by its interval rule.

    Values of dtypes shorter than float32 are kept in float32, widened by the dtype's rounding.
    """
    exact = [a for a in args if is_exact(a)]
    if len(exact) == len(args):
        return [*affine_rules.evaluate(eqn, exact)]
    rules = record.of(eqn.primitive.name)
    known = [lifted(a) if is_exact(a) else a for a in args]
    out = rules.interval(eqn, whole.beside(eqn, known, rules.operands), norm)
    outs = out if isinstance(out, list) else [out]
    avals: list[Any] = [var.aval for var in eqn.outvars]
    return [
        _rounded(whole.rounded(value, aval.dtype, norm), eqn, aval.dtype, norm)
        for value, aval in zip(outs, avals)
    ]


def lifted(value: Array) -> Array:
    """A known array in at least float32."""
    narrow = jnp.issubdtype(value.dtype, jnp.floating) and affine_rules.is_narrow(value.dtype)
    return value.astype(jnp.float32) if narrow else value


def entrywise(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
    """The rule for ``elementwise``, the fused scalar function of :mod:`wdjax.bounds.fused`."""
    lower, upper = ends(args[0])
    one = functools.partial(over, eqn.params["jaxpr"])
    low, high = jax.vmap(one)(lower.reshape(-1), upper.reshape(-1))
    return fresh(low.reshape(lower.shape), high.reshape(lower.shape))


def slack_of(eqn: JaxprEqn, dtype: Any, size: Array) -> Array:
    """The rounding error of results of magnitude ``size`` in a short dtype; 0 from float32 on."""
    if not affine_rules.is_narrow(dtype):
        return jnp.zeros_like(size)
    return 1.01 * record.trusted(eqn, dtype) * float(jnp.finfo(dtype).eps) * size + tiny(dtype)


def _rounded(value: Value, eqn: JaxprEqn, dtype: Any, norm: float | None) -> Value:
    """The value widened by the rounding of a dtype shorter than float32; others as they are."""
    if not isinstance(value, Interval) or not affine_rules.is_narrow(dtype):
        return value
    (lower, upper), peak = ends(value), jnp.zeros((), value.center.dtype)
    slack = slack_of(eqn, dtype, largest_size(value))
    if record.of(eqn.primitive.name).sums:
        slack += gamma(value.roundings, dtype) * value.magnitude
        peak = value.magnitude + slack
    lower, upper = fitted(lower - slack, upper + slack, dtype, peak)
    constant = None if norm is None else constant_of(value, norm)
    return fresh(lower, upper, constant, value.origin)
