"""Finds what may make a program discontinuous: rounding, ``sign``, casts of booleans to numbers,
selections whose two cases differ where the comparison is an equality."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from wdjax.bounds.affine_rules import evaluate
from wdjax.bounds.graph import Graph, Node, dependent, flatten
from wdjax.bounds.primitives import TABLE
from wdjax.checks import validate

_PROBES = (-3.0, -0.7, 0.0, 0.3, 1.1, 40.0)


def jumps(closed: ClosedJaxpr) -> set[str]:
    """Names of the primitives by which a program may be discontinuous in its input.

    A selection by a comparison of ``a`` with ``b`` is continuous if its cases, computed entry by
    entry from ``a``, ``b`` and constants, agree wherever ``a = b``. A selection that cannot be
    decided (for example because its constants are traced) counts as a jump, and so does a primitive
    without a record.

    >>> jumps(jax.make_jaxpr(lambda x: jnp.where(x > 0, x, 0.1 * x))(1.0))
    set()
    >>> sorted(jumps(jax.make_jaxpr(lambda x: jnp.where(x > 0.5, 1.0, 0.0))(1.0)))
    ['select_n']
    """
    graph = flatten(closed)
    found, moved = set(), set(graph.inputs)
    program = _Program(graph, {i: node for node in graph.nodes for i in node.outputs}, moved)
    for node, moves in dependent(graph):
        if not any(moves):
            continue
        moved.update(node.outputs)
        source: Any = node.eqn.invars[0].aval
        target: Any = node.eqn.outvars[0].aval
        known = TABLE.get(node.name)
        if known is None or known.jumps(node.eqn):
            found.add(node.name)
        elif node.name == "convert_element_type":
            floats = [jnp.issubdtype(a.dtype, jnp.floating) for a in (source, target)]
            if floats != [True, True] and target.dtype != source.dtype:
                found.add(node.name)
        elif node.name == "select_n" and moves[0] and not _agree(program, node):
            found.add(node.name)
    return found


class _Program(NamedTuple):
    """The equation that computes each value, and the values that depend on the input."""

    graph: Graph
    makers: dict[int, Node]
    moved: set[int]


def _agree(program: _Program, node: Node) -> bool:
    """Whether a selection is continuous where its comparison switches: both cases are equal there.

    ``node`` is a ``select_n``. Tried at a few numbers, or decided by form (such as ``max`` written
    as a selection); False in doubt.
    """
    predicate = program.makers.get(node.inputs[0])
    while predicate is not None and (predicate.name == "not" or _kept(predicate.name)):
        predicate = program.makers.get(predicate.inputs[0])
    if predicate is None:
        return False
    left, right, name = predicate.inputs[0], predicate.inputs[-1], predicate.name
    compared = name in TABLE and TABLE[name].compares and name not in ("eq", "ne")
    if compared and {left, right} == set(node.inputs[1:]):
        return True
    if not compared:  # Tests for numbers that are infinite or NaN.
        return name == "is_finite" or (name in ("eq", "ne") and left == right)
    try:
        return all(_meet(program, node, (left, right), probe) for probe in _PROBES)
    except _UnknownError:
        return False


def _kept(name: str) -> bool:
    """Whether a primitive only reshapes, repeats or converts entries."""
    return name in TABLE and TABLE[name].keeps_order


def _entrywise(name: str) -> bool:
    """Whether a primitive acts entry by entry, or only moves entries in order."""
    return name in TABLE and (TABLE[name].elementwise or TABLE[name].keeps_order)


class _UnknownError(Exception):
    """A constant is traced, or an operation mixes entries."""


def _meet(program: _Program, node: Node, compared: tuple[int, int], probe: float) -> bool:
    """Whether both cases of a selection are equal, up to rounding, if the compared values are.

    ``compared`` are the places of both sides of the comparison. If one is constant, the other is
    set to it; otherwise both are set to ``probe``.
    """
    free = [place for place in compared if place in program.moved]
    known: dict[int, Any] = {}
    with jax.ensure_compile_time_eval():
        if len(free) == 1:
            (fixed,) = set(compared) - set(free)
            value = _value(program, fixed, known)
        else:
            value = jnp.asarray(probe, jnp.float32)
        avals = {place: program.graph.avals[place] for place in free}
        known.update(
            {i: jnp.broadcast_to(value, a.shape).astype(a.dtype) for i, a in avals.items()}
        )
        cases = [_value(program, place, known) for place in node.inputs[1:]]
        first, second = (np.asarray(case, float) for case in cases)
    return bool(np.allclose(first, second, rtol=1e-6, atol=1e-6 * (1e-30 + np.abs(first).max())))


def _value(program: _Program, place: int, known: dict[int, Any]) -> Any:
    """The value at ``place`` if the values in ``known``, by place, are as given there.

    It is computed from these and from constants, and added to ``known`` with all that it needed.
    Raises :class:`_UnknownError` where it needs a traced constant, another input of the program, or
    an input-dependent value that an operation such as a sum makes of several entries.
    """
    if place in known:
        return known[place]
    if place in program.graph.constants:
        value = program.graph.constants[place]
        if validate.traced(value):
            raise _UnknownError
        return value
    node = program.makers.get(place)
    if node is None or (place in program.moved and not _entrywise(node.name)):
        raise _UnknownError
    args: Sequence[Any] = [_value(program, i, known) for i in node.inputs]
    known.update(zip(node.outputs, evaluate(node.eqn, args)))
    return known[place]
