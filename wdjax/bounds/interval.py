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
    Ternary,
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
from wdjax.bounds.graph import Graph, Node, flatten
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
    graph = flatten(closed)
    values, _ = of_floats(graph, box(lower, upper, ball))
    leaves = jax.tree.structure(shape)
    pairs = [ends(values[place]) for place in graph.outputs]
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


def of_floats(graph: Graph, argument: Interval) -> tuple[dict[int, Value], dict[int, Array]]:
    """As :func:`walk` for one interval, but unbounded where a float result may be NaN.

    An input without a bound is any number, but neither inf nor NaN, and so are its affine images
    and their maxima. The second result has, by place, the boolean that such a value is without
    bound for this reason only.
    """
    values: dict[int, Value] = dict(graph.constants)
    values.update(zip(graph.inputs, [argument]))
    endless = ~jnp.all(jnp.isfinite(jnp.stack([jnp.ravel(end) for end in ends(argument)])))
    numbers = dict.fromkeys(graph.inputs, endless)
    for node in graph.nodes:
        operands = [values[place] for place in node.inputs]
        outs = apply(node.eqn, operands)
        roots = {root for one in operands if isinstance(one, Interval) for root in one.terms}
        affine = all(isinstance(out, Interval) and out.terms.keys() <= roots for out in outs)
        moving = {i for i in node.inputs if isinstance(values[i], Interval)}
        if moving and moving <= numbers.keys() and (affine or record.of(node.name).homogeneous):
            numbers.update(dict.fromkeys(node.outputs, endless))
        if roots and not affine:
            real = [numbers.get(place, False) for place in node.inputs]
            lost = may_be_nan(node.eqn, operands, real)
            outs = [
                fresh(*opened(ends(out), lost), origin=out.origin)
                if isinstance(out, Interval)
                else out
                for out in outs
            ]
        values.update(zip(node.outputs, outs))
    return values, numbers


def may_test_nan(graph: Graph, argument: Interval) -> Array:
    """A scalar boolean: whether a program may test a NaN, or inf, for being one.

    It may jump there, where a derivative does not show it.
    """
    found, tests = jnp.zeros((), bool), _nan_tests(graph)
    values, numbers = of_floats(graph, argument) if tests else ({}, {})
    for node in tests:
        value, known = values[node.inputs[0]], numbers.get(node.inputs[0], False)
        if isinstance(value, Interval):
            below, above = ~(ends(value).lower > -jnp.inf), ~(ends(value).upper < jnp.inf)
            lost = below | above if node.name == "is_finite" else below & above
            found = found | jnp.any(lost & ~jnp.asarray(known))
    return found


def _nan_tests(graph: Graph) -> list[Node]:
    """The equations that test a number for being NaN or inf."""
    return [
        node
        for node in graph.nodes
        if node.name == "is_finite" or (node.name in ("eq", "ne") and len({*node.inputs}) == 1)
    ]


def may_be_nan(
    eqn: JaxprEqn, args: Sequence[Value], real: Sequence[ArrayLike] | None = None
) -> Array:
    """Which entries of a nonlinear equation's results may be NaN since an operand may be.

    NaN passes through any function, and bounds would hide it: those of ``tanh`` are -1 and 1. A
    value may be NaN where it is unbounded on both sides, and its sine where it is on one side.
    Selections are excepted, since they may not choose the NaN.

    Args:
      eqn: the equation.
      args: its operands.
      real: booleans, which operands are numbers however wide their bounds are; none by default.

    Returns:
      Booleans of the results' shape, or one for all entries.
    """
    lost = jnp.zeros((), bool)
    for arg, known in zip(args, real or [False] * len(args)):
        if isinstance(arg, Interval) and eqn.primitive.name != "select_n":
            rules = record.of(eqn.primitive.name)
            below, above = ~(ends(arg).lower > -jnp.inf), ~(ends(arg).upper < jnp.inf)
            here = (below | above if rules.waves else below & above) & ~jnp.asarray(known)
            lost = lost | (here if rules.elementwise else jnp.any(here))
    return lost


def opened(pair: norms.Bounds, lost: Array) -> norms.Bounds:
    """The ends of a value, -inf and inf where it is ``lost``; those of booleans as they are."""
    if pair.lower.dtype == bool:
        return pair
    lower, upper = jnp.where(lost, -jnp.inf, pair.lower), jnp.where(lost, jnp.inf, pair.upper)
    return norms.Bounds(lower, upper)


def over(program: ClosedJaxpr, lower: Array, upper: Array) -> norms.Bounds:
    """Bounds of the one output of a program whose one input lies in ``[lower, upper]``.

    Unbounded where it may be NaN.
    """
    graph = flatten(program)
    if _nan_tests(graph):
        return ends(of_floats(graph, fresh(lower, upper))[0][graph.outputs[0]])
    graph, values = walk(program, [fresh(lower, upper)])
    nan = _hidden(graph, values).get(graph.outputs[0], jnp.zeros((), bool))
    return opened(ends(values[graph.outputs[0]]), nan)


def _hidden(graph: Graph, values: dict[int, Value]) -> dict[int, Array]:
    """For each place, whether its value may be NaN: a boolean of the value's shape.

    True if the value's bounds are -inf and inf, or if one of its operands may be NaN. The latter
    need not show in the bounds: those of ``tanh`` are finite even if its operand is NaN. For scalar
    programs without tests for NaN, which compare only their input: that is cheaper to compile than
    :func:`of_floats`.
    """
    lost: dict[int, Array] = {}
    for node in graph.nodes:
        before = [lost.get(place) for place in node.inputs]
        pick = values[node.inputs[0]] if node.inputs else None
        if node.name == "select_n" and isinstance(pick, Ternary):
            chosen = [pick.upper, ~pick.lower, pick.upper]
            before = [t if t is None else t & c for t, c in zip(before, chosen)]
        parts = [flag for flag in before if flag is not None]
        if isinstance(pick, Interval) and node.inputs[0] in lost and record.of(node.name).waves:
            parts.append(jnp.isinf(ends(pick).lower) | jnp.isinf(ends(pick).upper))
        for place in node.outputs:
            low, high = ends(values[place])
            if isinstance(values[place], Interval):
                own = ~(low > -jnp.inf) & ~(high < jnp.inf)
                lost[place] = functools.reduce(jnp.logical_or, parts, own)
    return lost


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
