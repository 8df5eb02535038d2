r"""Intervals that contain the slope (derivative) of every neuron's activation on a region."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from wdjax.bounds import continuity, domain, interval, network, passes
from wdjax.bounds.fused import fuse
from wdjax.bounds.graph import flatten
from wdjax.lipschitz.chain import Chain, curve_of

Slopes = tuple[tuple[jax.Array, jax.Array], ...]
"""For each hidden layer the least and the largest slope of every entry, ``[..., m_h]``."""

_CELLS = 48
"""Number of cells into which an operand's interval is divided."""
_ACTIVATIONS: tuple[tuple[Callable[[jax.Array], jax.Array], float, float], ...] = (
    (functools.partial(jax.nn.gelu, approximate=False), -0.128905, 1.128905),
    (functools.partial(jax.nn.gelu, approximate=True), -0.128994, 1.128994),
    (jax.nn.silu, -0.099840, 1.099840),
    (jax.nn.softplus, 0.0, 1.0),
    (jax.nn.sigmoid, 0.0, 0.25),
    (jnp.tanh, 0.0, 1.0),
    (jax.nn.elu, 0.0, 1.0),
    (jax.nn.leaky_relu, 0.01, 1.0),
)
"""Activations with the least and the largest derivative over all of space."""


def slopes(net: Chain, state: passes.Pass) -> Slopes:
    """Slopes ``[B, m_h]`` over a batch of regions, from the bounds of the activations' operands."""
    found = []
    for place, kept, curve in zip(net.places, net.kept, net.curves):
        value = state.values[place]
        lower, upper = (end.reshape(len(end), -1) for end in (value.lower, value.upper))
        ones = jnp.ones((len(lower), kept), lower.dtype)
        low, high = of_operand(curve, lower, upper)
        found.append((jnp.hstack([ones, low]), jnp.hstack([ones, high])))
    return tuple(found)


def anywhere(net: Chain, dtype: jnp.dtype) -> Slopes:
    """Slopes ``[m_h]`` over all of space."""
    found = []
    for bias, kept, curve in zip(net.biases, net.kept, net.curves):
        ends = (
            jnp.full(len(bias) - kept, -jnp.inf, dtype),
            jnp.full(len(bias) - kept, jnp.inf, dtype),
        )
        low, high = of_operand(curve, *ends)
        ones = jnp.ones(kept, dtype)
        found.append((jnp.concatenate([ones, low]), jnp.concatenate([ones, high])))
    return tuple(found)


def of_operand(
    curve: ClosedJaxpr | None, lower: jax.Array, upper: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The least and the largest derivative of an activation for operands in ``[lower, upper]``."""
    if curve is None:
        return (lower >= 0).astype(lower.dtype), (~(upper <= 0)).astype(lower.dtype)
    pairs = lower.reshape(-1), upper.reshape(-1)
    low, high = jax.vmap(lambda a, b: _derivative(curve, a, b))(*pairs)
    least, most = _known(lower.dtype == jnp.float64).get(_expression(curve), (-jnp.inf, jnp.inf))
    low, high = jnp.maximum(low, least), jnp.minimum(high, most)
    return low.reshape(lower.shape), high.reshape(lower.shape)


@functools.cache
def _known(double: bool) -> dict[str, tuple[float, float]]:
    """The least and largest derivative of well-known activations, by their :func:`_expression`."""
    sample = jax.ShapeDtypeStruct((1, 2), jnp.float64 if double else jnp.float32)
    found = {}
    for function, low, high in _ACTIVATIONS:
        net = network.build(fuse(flatten(jax.make_jaxpr(function)(sample))))
        curve = curve_of(net, net.others[net.graph.outputs[0]])
        assert curve is not None
        found[_expression(curve)] = low, high
    return found


def _expression(curve: ClosedJaxpr) -> str:
    """A scalar program as one text, which does not depend on the order of its equations."""
    words: dict[Any, str] = {curve.jaxpr.invars[0]: "z"}
    words.update({var: repr(float(t)) for var, t in zip(curve.jaxpr.constvars, curve.consts)})
    for eqn in curve.jaxpr.eqns:
        args = [str(a.val) if isinstance(a, Literal) else words[a] for a in eqn.invars]
        settings = sorted(f"{key}={value}" for key, value in eqn.params.items())
        words[eqn.outvars[0]] = f"{eqn.primitive.name}{settings}({', '.join(args)})"
    return words[curve.jaxpr.outvars[0]]


def _derivative(
    curve: ClosedJaxpr, lower: jax.Array, upper: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The least and the largest derivative, ``[]`` each, between two scalars, from cells.

    The interval is divided into cells. On each the derivative is bounded by interval arithmetic
    and, if it is continuous, also by its value in the middle and the second derivative. Unbounded
    intervals, and results that are NaN, give -inf and inf.
    """

    def function(z: jax.Array) -> jax.Array:
        return jnp.asarray(jaxpr_as_fun(curve)(z.astype(curve.in_avals[0].dtype))[0])

    first = jax.make_jaxpr(jax.grad(function))(lower)
    steady = not continuity.jumps(first)
    second = jax.make_jaxpr(jax.grad(jax.grad(function)))(lower) if steady else None

    def cell(k: jax.Array) -> tuple[jax.Array, jax.Array]:
        low = lower + (upper - lower) * (k / _CELLS)
        high = jnp.where(k == _CELLS - 1, upper, lower + (upper - lower) * ((k + 1) / _CELLS))
        least, most = interval.over(first, low, high)
        if second is not None:
            middle = 0.5 * low + 0.5 * high
            half = jnp.maximum(high - middle, middle - low)
            at, bend = interval.over(first, middle, middle), interval.over(second, low, high)
            swing = half * jnp.maximum(jnp.abs(bend[0]), jnp.abs(bend[1]))
            least, most = jnp.fmax(least, at[0] - swing), jnp.fmin(most, at[1] + swing)
        return least, most

    least, most = jax.vmap(cell)(jnp.arange(_CELLS))
    low, high = jnp.min(least), jnp.max(most)
    # An unbounded interval cannot be divided into cells.
    bounded = jnp.isfinite(lower) & jnp.isfinite(upper)
    # Where a NaN is tested for, the function may jump; its derivative does not show it.
    bounded &= ~interval.may_test_nan(flatten(curve), domain.fresh(lower, upper))
    open_ = ~bounded | jnp.isnan(low) | jnp.isnan(high)
    return jnp.where(open_, -jnp.inf, low), jnp.where(open_, jnp.inf, high)
