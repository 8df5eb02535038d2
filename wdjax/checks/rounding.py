"""Whether a model rounds what it computes from its samples, of which gradients say nothing.

A value either does not depend on the samples, or moves with them, or is constant between steps, as
comparisons and integers are. A number that is constant between steps is a mask as long as it
chooses or multiplies what moves, as in ``x * (x > 0)``; as a summand or an output it is a step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from wdjax import program
from wdjax.checks import independence
from wdjax.core import AnyArray, Array, PyTree

_STEPS = {"round", "floor", "ceil", "argmax", "argmin", "rem"}
"""Primitives that are constant between steps, or jump, where their operand moves."""
_MASKED = {"mul", "div", "dot_general", "select_n", "while"}
"""Primitives to which a constant between steps may be a mask of what moves."""
_MOVES = ""
"""What is known of a value that moves with the samples. Of one that does not depend on them it is
None; of one that is constant between steps, the name of the primitive that made it so."""

Known = str | None


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
    >>> found(Model(lambda _, x: x + jnp.where(x > 0.5, 1.0, 0.0), None), jnp.zeros((5, 4)))
    'gt'
    >>> found(Model(lambda _, x: x + jnp.floor(jnp.arange(4) / 2), None), jnp.zeros((5, 4)))
    >>> found(Model(lambda _, x: x * (x > 0.5), None), jnp.zeros((5, 4)))
    """
    closed = independence.traced(model, x.shape[1:], jnp.result_type(x), independence.ROWS)
    parameters, steps = len(closed.jaxpr.invars) - 1, list[str]()
    outs = _walk(closed, [None] * parameters + [_MOVES], steps)
    floats = [_is_float(var) for var in closed.jaxpr.outvars]
    steps += [out for out, real in zip(outs, floats) if out and real]
    return steps[0] if steps else None


def _walk(closed: ClosedJaxpr | Jaxpr, given: Sequence[Known], steps: list[str]) -> list[Known]:
    """What is known of a program's results, from what is known of its inputs; appends to steps.

    A step inside a loop over samples has the shape of one sample, so it is dependence that counts.
    """
    jaxpr: Any = getattr(closed, "jaxpr", closed)
    known = dict(zip(jaxpr.invars, given))

    def read(atom: Any) -> Known:
        return None if isinstance(atom, Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if any(operand is not None for operand in operands):
            known.update(zip(eqn.outvars, _follow(eqn, operands, steps)))
    return [read(atom) for atom in jaxpr.outvars]


def _follow(eqn: JaxprEqn, operands: list[Known], steps: list[str]) -> list[Known]:
    """What is known of an equation's results, from what is known of its operands."""
    bodies = program.bodies(eqn)
    if bodies:
        return _through(eqn, bodies, operands, steps)
    name = str(eqn.primitive.name)
    moves = _MOVES in operands
    flat = [one for one, var in zip(operands, eqn.invars) if one and _is_float(var)]
    if moves and flat and name not in _MASKED:
        steps.append(flat[0])
    if operands[0] == _MOVES and _is_step(eqn):
        steps.append(name)
    made = name if moves else next(one for one in operands if one)
    constant = not moves or name == "sign"
    return [made if constant or not _is_float(var) else _MOVES for var in eqn.outvars]


def _through(
    eqn: JaxprEqn, bodies: Sequence[Any], operands: list[Known], steps: list[str]
) -> list[Known]:
    """What is known of the results of a call, a loop or a branch, whose programs are walked."""
    outs: list[Known] = [None] * len(eqn.outvars)
    for body in bodies:
        inputs: list[Any] = getattr(body, "jaxpr", body).invars
        given = operands[len(operands) - len(inputs) :]
        if eqn.primitive.name == "scan":
            given = _carried(eqn, body, given)
        elif eqn.primitive.name == "while" or len(given) != len(inputs):
            given = [_MOVES] * len(inputs)
        inner = _walk(body, given, steps)
        same = len(inner) == len(outs) and eqn.primitive.name != "while"
        outs = [_joined(*pair) for pair in zip(outs, inner)] if same else [_MOVES] * len(outs)
    if eqn.primitive.name == "cond" and operands[0] is not None:
        outs = [operands[0] if out is None else out for out in outs]
    return outs


def _carried(eqn: JaxprEqn, body: ClosedJaxpr | Jaxpr, given: list[Known]) -> list[Known]:
    """What is known of the inputs of a scan's body in any iteration."""
    consts, carries = program.scan_counts(eqn)
    while True:
        outs, carried = _walk(body, given, []), given[consts : consts + carries]
        after = [_joined(*pair) for pair in zip(carried, outs)]
        if after == carried:
            return given
        given = [*given[:consts], *after, *given[consts + carries :]]


def _joined(one: Known, other: Known) -> Known:
    """What is known of a value that is one or the other."""
    if one is None or other is None:
        return other if one is None else one
    return _MOVES if _MOVES in (one, other) else one


def _is_step(eqn: JaxprEqn) -> bool:
    """Whether an equation rounds floats: to other floats, or to integers."""
    before, after = (_kind(values) for values in (eqn.invars, eqn.outvars))
    if not jnp.issubdtype(before, jnp.floating):
        return False
    name = eqn.primitive.name
    integers = name == "convert_element_type" and jnp.issubdtype(after, jnp.integer)
    return name in _STEPS or integers


def _is_float(var: Any) -> bool:
    """Whether a variable's entries are no integers, booleans or keys."""
    return bool(jnp.issubdtype(_kind([var]), jnp.inexact))


def _kind(values: Sequence[Any]) -> Any:
    """The dtype of the first value; bool if there is none, or if it has no dtype."""
    return getattr(values[0].aval, "dtype", bool) if values else bool
