"""Whether a model rounds what it computes from its samples, of which gradients say nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from wdjax import program
from wdjax.checks import independence
from wdjax.core import AnyArray, Array, PyTree

_STEPS = {"round", "floor", "ceil", "argmax", "argmin"}
"""Primitives that are constant between steps, without the sign, which ``logsumexp`` computes and
leaves out."""


def found(model: Callable[[Array], PyTree], x: AnyArray) -> str | None:
    """The primitive by which a model rounds something that depends on the samples, or None.

    Such a step may have a gradient of the user's, as straight-through estimators do.

    Args:
      model: as for :func:`wdjax.search`.
      x: ``[n, *shape]`` samples, whose shape alone is looked at.

    Cost: a walk through the program that :mod:`.independence` has traced.

    >>> from wdjax import Model
    >>> found(Model(lambda _, x: jnp.round(8 * x) / 8, None), jnp.zeros((5, 4)))
    'round'
    >>> found(Model(lambda _, x: x + jnp.floor(jnp.arange(4) / 2), None), jnp.zeros((5, 4)))
    """
    closed = independence.traced(model, x.shape[1:], jnp.result_type(x), independence.ROWS)
    parameters = len(closed.jaxpr.invars) - 1
    return _walk(closed, [False] * parameters + [True])[0]


def _walk(closed: ClosedJaxpr | Jaxpr, given: Sequence[bool]) -> tuple[str | None, list[bool]]:
    """The first step, if any, and which results depend on the samples, as ``given`` inputs do.

    A step inside a loop over samples has the shape of one sample, so it is dependence that counts.
    """
    jaxpr: Any = getattr(closed, "jaxpr", closed)
    dependent = {var for var, yes in zip(jaxpr.invars, given) if yes}

    def depends(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in dependent

    for eqn in jaxpr.eqns:
        operands = [depends(atom) for atom in eqn.invars]
        if any(operands):
            step, outs = _follow(eqn, operands)
            if step is not None:
                return step, []
            dependent.update(var for var, yes in zip(eqn.outvars, outs) if yes)
    return None, [depends(atom) for atom in jaxpr.outvars]


def _follow(eqn: JaxprEqn, operands: list[bool]) -> tuple[str | None, list[bool]]:
    """The same of an equation with ``operands`` that depend on the samples, and of its bodies."""
    if operands[0] and _is_step(eqn):
        return str(eqn.primitive.name), []
    bodies, everything = program.bodies(eqn), [True] * len(eqn.outvars)
    outs = [not bodies] * len(eqn.outvars)
    for body in bodies:
        inputs: list[Any] = getattr(body, "jaxpr", body).invars
        given = operands[len(operands) - len(inputs) :]  # The first of a branch's is which.
        if eqn.primitive.name == "scan":
            given = _carried(eqn, body, given)
        elif eqn.primitive.name == "while" or len(given) != len(inputs):
            given = [True] * len(inputs)
        step, inner = _walk(body, given)
        if step is not None:
            return step, []
        same = len(inner) == len(outs) and (len(inputs) == len(operands) or not operands[0])
        outs = [one or other for one, other in zip(outs, inner)] if same else everything
    return None, outs


def _carried(eqn: JaxprEqn, body: ClosedJaxpr | Jaxpr, given: list[bool]) -> list[bool]:
    """The inputs of a scan's body that depend on the samples in any iteration."""
    consts, carries = program.scan_counts(eqn)
    while True:
        _, outs = _walk(body, given)
        carried = given[consts : consts + carries]
        after = [one or other for one, other in zip(carried, outs)] or carried
        if after == carried:
            return given
        given = [*given[:consts], *after, *given[consts + carries :]]


def _is_step(eqn: JaxprEqn) -> bool:
    """Whether an equation rounds floats: to other floats, or to integers."""
    before, after = (_kind(values) for values in (eqn.invars, eqn.outvars))
    if not jnp.issubdtype(before, jnp.floating):
        return False
    name = eqn.primitive.name
    integers = name == "convert_element_type" and jnp.issubdtype(after, jnp.integer)
    return name in _STEPS or integers


def _kind(values: Sequence[Any]) -> Any:
    """The dtype of the first value; bool if there is none, or if it has no dtype."""
    return getattr(values[0].aval, "dtype", bool) if values else bool
