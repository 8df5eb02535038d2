r"""Interval arithmetic on the program of any JAX function: sound bounds of what it can return.

The program is ``jax.make_jaxpr`` of the function, so a model needs no list of layers, and the
program of a *gradient* is bounded by the same code: ``select(z > 0, g, 0)`` with ``z`` of either
sign becomes the hull of ``g`` and 0, which is the interval Jacobian of FastLip and of Clarke.
This file walks through the program and holds the table of rules, one a primitive.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from wdjax import norms
from wdjax.certify import decisions, linear, nonlinear
from wdjax.certify.domain import Array, Context, Rule, Value, box, ends, is_exact


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
        ``jit`` and custom derivatives are looked into.
      lower: floats of any shape, may be ``-inf``.
      upper: floats of the same shape, may be ``inf``.
      ball: None, or ``(centre, radius, norm)`` with norm 1 or 2: the inputs are also in this ball
        (its norm over the whole array).

    Returns:
      ``Bounds(lower, upper)`` with the structure of ``fn``'s output.

    Raises:
      ValueError: an operation that has no rule is applied to an input-dependent value.

    Cost: about three evaluations of ``fn``; with a ball, its first affine layer is applied to every
      basis vector.

    >>> low, high = bound(lambda x: jnp.maximum(x[0] - x[1], 0.0), jnp.zeros(2), jnp.ones(2))
    >>> float(low), round(float(high), 4)
    (0.0, 1.0)
    """
    lower, upper = jnp.asarray(lower), jnp.asarray(upper)
    if lower.shape != upper.shape or not jnp.issubdtype(lower.dtype, jnp.floating):
        raise ValueError(
            f"lower and upper must be floats of one shape, got {lower.dtype}{list(lower.shape)} "
            f"and {upper.dtype}{list(upper.shape)}."
        )
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(lower)
    outputs = interpret(closed, [box(lower, upper, ball)], Context())
    leaves = jax.tree.structure(shape)
    pairs = [ends(value) for value in outputs]
    lowers, uppers = ([pair[side] for pair in pairs] for side in (0, 1))
    return norms.Bounds(jax.tree.unflatten(leaves, lowers), jax.tree.unflatten(leaves, uppers))


def interpret(closed: ClosedJaxpr, args: Sequence[Value], context: Context) -> list[Value]:
    """Runs a closed jaxpr on exact arrays and intervals; what touches no interval stays exact."""
    return _interpret(closed.jaxpr, closed.consts, args, context)


def _interpret(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Value], context: Context
) -> list[Value]:
    env: dict[Var, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))

    def read(atom: Any) -> Value:
        aval: Any = atom.aval
        return jnp.asarray(atom.val, aval.dtype) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _apply(eqn, [read(v) for v in eqn.invars], context)))
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: JaxprEqn, args: Sequence[Value], context: Context) -> Sequence[Value]:
    name = eqn.primitive.name
    if name in _CALLS:
        inner: Any = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
        return _interpret(
            getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args, context
        )
    if name in _IDENTITIES:
        return args
    exact = [a for a in args if is_exact(a)]
    if len(exact) == len(args):
        return linear.evaluate(eqn, exact)
    rule = _RULES.get(name)
    if rule is None:
        raise ValueError(
            f"no interval rule for the primitive {name!r}, which the program applies to a value "
            "that depends on the input; rewrite the model without it, or certify it another way."
        )
    if name in _JUMPS:
        context.jumps.add(name)
    out = rule(eqn, args, context)
    return out if isinstance(out, list) else [out]


def _scan(eqn: JaxprEqn, args: Sequence[Value], context: Context) -> list[Value]:
    """A loop of known length, unrolled."""
    params = eqn.params
    consts, carries = params["num_consts"], params["num_carry"]
    fixed, carry = args[:consts], args[consts : consts + carries]
    series = [a for a in args[consts + carries :] if is_exact(a)]
    if len(fixed) + len(carry) + len(series) < len(args):
        raise ValueError("scan is certified over series that do not depend on the input only.")
    steps = range(params["length"])
    stacked = []
    for i in reversed(steps) if params["reverse"] else steps:
        inputs = [*fixed, *carry, *(s[i] for s in series)]
        out = _interpret(params["jaxpr"].jaxpr, params["jaxpr"].consts, inputs, context)
        carry = out[:carries]
        stacked.append(out[carries:])
    if any(not is_exact(v) for emitted in stacked for v in emitted):
        raise ValueError("scan is certified where only its carry depends on the input.")
    if params["reverse"]:
        stacked.reverse()
    return [*carry, *(jnp.stack(column) for column in zip(*stacked))]


_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
}  # fmt: skip
_IDENTITIES = {"stop_gradient", "optimization_barrier", "sharding_constraint", "copy", "copy_p"}
_JUMPS = {"floor", "ceil", "round", "sign"}


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "reshape",
            "broadcast_in_dim",
            "squeeze",
            "expand_dims",
            "transpose",
            "slice",
            "rev",
            "concatenate",
            "stack",
            "pad",
        ),
        linear.additive(),
    ),
    **dict.fromkeys(("split", "unstack"), linear.parted),
    **dict.fromkeys(("dynamic_slice", "gather"), linear.additive([0])),
    "dynamic_update_slice": linear.additive([0, 1]),
    "scatter-add": linear.additive([0, 2], linear.scattered),
    "neg": linear.additive(absolute=lambda t: t),
    **dict.fromkeys(("add", "add_any"), linear.additive(terms=lambda _: 1)),
    "sub": linear.additive(terms=lambda _: 1, absolute=jnp.add),
    "reduce_sum": linear.summation,
    "cumsum": linear.additive(terms=linear.cumulated),
    "reduce_window_sum": linear.additive(terms=linear.windowed),
    "convert_element_type": linear.convert,
    "mul": linear.bilinear(lambda _: 1),
    "div": nonlinear.quotient,
    "dot_general": linear.bilinear(linear.contracted),
    "conv_general_dilated": linear.bilinear(linear.convolved),
    "max": nonlinear.largest,
    "min": nonlinear.increasing(),
    "reduce_max": nonlinear.reduced,
    "reduce_min": nonlinear.reduced,
    "reduce_window_max": nonlinear.pooled,
    "select_and_scatter_add": decisions.unpool,
    "clamp": nonlinear.clamp,
    "abs": nonlinear.absolute,
    "integer_pow": nonlinear.power,
    "square": nonlinear.power,
    "exp": nonlinear.increasing(lambda low, high: jnp.exp(high)),
    "exp2": nonlinear.increasing(lambda low, high: jnp.exp2(high)),
    "expm1": nonlinear.increasing(lambda low, high: jnp.exp(high)),
    "log": nonlinear.increasing(lambda low, high: jnp.where(low > 0, 1 / low, jnp.inf)),
    "log1p": nonlinear.increasing(lambda low, high: jnp.where(low > -1, 1 / (1 + low), jnp.inf)),
    "sqrt": nonlinear.increasing(nonlinear.root_slope),
    "tanh": nonlinear.increasing(nonlinear.one_everywhere),
    "logistic": nonlinear.increasing(lambda low, high: jnp.full_like(low, 0.25)),
    "erf": nonlinear.increasing(lambda low, high: jnp.full_like(low, 1.1283792)),
    "atan": nonlinear.increasing(nonlinear.one_everywhere),
    "rsqrt": nonlinear.decreasing(lambda low, high: jnp.where(low > 0, 0.5 * low**-1.5, jnp.inf)),
    "erfc": nonlinear.decreasing(lambda low, high: jnp.full_like(low, 1.1283792)),
    **dict.fromkeys(("sin", "cos"), nonlinear.wave),
    **dict.fromkeys(("floor", "ceil", "round"), nonlinear.increasing(jump=True)),
    "sign": nonlinear.sign,
    **dict.fromkeys(("lt", "le"), decisions.inequality(flip=False)),
    **dict.fromkeys(("gt", "ge"), decisions.inequality(flip=True)),
    **dict.fromkeys(("eq",), decisions.equal),
    **dict.fromkeys(("ne",), decisions.unequal),
    **dict.fromkeys(("and", "or", "not", "xor"), decisions.logical),
    **dict.fromkeys(("reduce_and", "reduce_or"), linear.moved_booleans),
    "select_n": decisions.select,
    "scan": _scan,
}
