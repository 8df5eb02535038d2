"""Rewrites primitives such as ``top_k`` in terms of others that have interval rules, and says what
others leave open."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from wdjax.checks import validate

Written = Callable[..., jax.Array]
"""A function of an equation's operands that returns one of its results."""


def rewritten(eqn: JaxprEqn, known: Sequence[Any]) -> Sequence[Written | None]:
    """For each result of an equation, an equal function of its operands; None if not rewritten.

    ``known`` holds the operands that are constants, None for the others.

    >>> closed = jax.make_jaxpr(lambda x: lax.top_k(x, 2)[0])(jnp.ones(3))
    >>> rewritten(closed.eqns[0], [None])[0](jnp.array([3.0, 1.0, 2.0])).tolist()
    [3.0, 2.0]
    """
    if eqn.primitive.name == "top_k":
        return _largest(eqn)
    rule = _WRITTEN.get(eqn.primitive.name)
    found = None if rule is None else rule(eqn, known[-1])
    return [found, *[None] * (len(eqn.outvars) - 1)]


def _largest(eqn: JaxprEqn) -> Sequence[Written]:
    """The values of ``top_k`` by sorting, and their places by sorting these with them.

    Of equal values the first comes first, as a stable sort of the negatives has them.
    """
    k, (operand,) = eqn.params["k"], [var.aval for var in eqn.invars]
    axis = eqn.params.get("axis", -1) % len(operand.shape)  # type: ignore[attr-defined]

    def values(x: jax.Array) -> jax.Array:
        return lax.slice_in_dim(jnp.flip(lax.sort(x, dimension=axis), axis), 0, k, axis=axis)

    def places(x: jax.Array) -> jax.Array:
        positions = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        order = lax.sort([-x, positions], dimension=axis, is_stable=True, num_keys=1)[1]
        return lax.slice_in_dim(order, 0, k, axis=axis)

    return values, places


_COMBINED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "add": lax.add, "add_any": lax.add, "max": lax.max, "min": lax.min,
}  # fmt: skip
_NEUTRAL = {"add": 0.0, "add_any": 0.0, "max": -jnp.inf, "min": jnp.inf}


def _combined(eqn: JaxprEqn, start: Any) -> str | None:
    """The name of the primitive by which a reduction of floats combines two entries.

    None unless it is a maximum, a minimum, or a sum from 0. From another initial value sums are not
    defined: a GPU adds it once for each partial sum, and a CPU once more for each entry of padding.
    """
    closed: Any = eqn.params["jaxpr"]
    inner = getattr(closed, "jaxpr", closed)
    floats = all(jnp.issubdtype(var.aval.dtype, jnp.floating) for var in inner.invars)
    plain = len(inner.eqns) == 1 and floats and len(eqn.invars) == 2
    if not plain or {*inner.eqns[0].invars} != {*inner.invars}:
        return None
    name = inner.eqns[0].primitive.name
    if name not in _COMBINED:
        return None
    zero = start is not None and not validate.traced(start) and not np.any(np.asarray(start))
    return name if zero or name in ("max", "min") else None


def _windowed(eqn: JaxprEqn, start: Any) -> Written | None:
    """A ``reduce_window`` as a plain window sum or maximum, then one operation with the initial
    value ``start``; None if it cannot be written so."""
    name, params = _combined(eqn, start), eqn.params
    if name is None:
        return None

    def windows(x: jax.Array, start: jax.Array) -> jax.Array:
        found = lax.reduce_window(
            x,
            x.dtype.type(_NEUTRAL[name]),
            _COMBINED[name],
            params["window_dimensions"],
            params["window_strides"],
            params["padding"],
            base_dilation=params["base_dilation"],
            window_dilation=params["window_dilation"],
        )
        return _COMBINED[name](found, jnp.broadcast_to(start, found.shape))

    return windows


def _reduced(eqn: JaxprEqn, start: Any) -> Written | None:
    """A ``reduce`` as a plain reduction, then one operation with the initial value ``start``; None
    if it cannot be written so."""
    name, axes = _combined(eqn, start), tuple(eqn.params.get("dimensions", ()))
    if name is None:
        return None

    def reduced(x: jax.Array, start: jax.Array) -> jax.Array:
        found = lax.reduce(x, x.dtype.type(_NEUTRAL[name]), _COMBINED[name], axes)
        return _COMBINED[name](found, jnp.broadcast_to(start, found.shape))

    return reduced


def settled(eqn: JaxprEqn) -> JaxprEqn:
    """The equation, with what XLA does where an index lies outside of the array.

    ``x[:, 9]`` of 4 columns reads the last one, and a scatter drops what it cannot place. JAX says
    only that the indices are promised to be inside, and its derivatives rely on that: the one of
    ``x[:, [0, 9]]`` in ``x[:, 3]`` is 0.

    >>> closed = jax.make_jaxpr(lambda x: x[jnp.array([0, 9])])(jnp.ones(4))
    >>> [gather] = [eqn for eqn in closed.eqns if eqn.primitive.name == "gather"]
    >>> settled(gather).params["mode"] == lax.GatherScatterMode.CLIP
    True
    """
    if eqn.params.get("mode") != lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        return eqn
    modes = lax.GatherScatterMode
    mode = modes.CLIP if eqn.primitive.name == "gather" else modes.FILL_OR_DROP
    return eqn.replace(params={**eqn.params, "mode": mode})


def _filled(eqn: JaxprEqn, _: Any) -> Written | None:
    """A ``gather`` that fills in a number where an index lies outside, as one that fills in 0, so
    that it is linear, and a choice; None for any other, and for NaN, whose bounds are infinite."""
    params = eqn.params
    aval: Any = eqn.outvars[0].aval
    value = _usual(aval.dtype) if params["fill_value"] is None else params["fill_value"]
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    if not fills or value == 0 or value != value:
        return None

    def filled(x: jax.Array, places: jax.Array) -> jax.Array:
        found, inside = (
            eqn.primitive.bind(t, places, **{**params, "fill_value": 0})
            for t in (x, jnp.ones(x.shape, jnp.int32))
        )
        return jnp.where(inside > 0, found, jnp.asarray(value, aval.dtype))

    return filled


def _usual(dtype: Any) -> Any:
    """What JAX fills in by default."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    info = jnp.iinfo(dtype)
    return info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max


_WRITTEN = {"reduce_window": _windowed, "reduce": _reduced, "gather": _filled}
REFUSED = {
    "reduce_window": (
        "windows ('reduce_window') are bounded for sums, maxima and minima of floats, and sums "
        "only from the initial value 0, since platforms differ in how often they add another; "
        "write a product of windows as one of strided slices, and add the initial value "
        "afterwards."
    ),
    "reduce": (
        "reductions ('reduce') are bounded for sums, maxima and minima of floats, and sums only "
        "from the initial value 0, since platforms differ in how often they add another; add it "
        "afterwards, write a product as jnp.prod, and another function as one of slices."
    ),
}
"""Why an equation of the primitive was not rewritten, and what to write instead."""
