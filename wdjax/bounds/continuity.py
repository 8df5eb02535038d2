"""Finds what may make a program discontinuous: rounding, ``sign``, casts of booleans to numbers,
selections whose two cases differ where the comparison is an equality."""

import math
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
_ULPS, _NEAR = 4, 1e-6
"""Relative difference of floats that counts as rounding: units of their dtype, and the most."""


def jumps(closed: ClosedJaxpr) -> set[str]:
    """Names of the primitives by which a program may be discontinuous in its input.

    A selection by a comparison of ``a`` with ``b`` is continuous if its cases, computed entry by
    entry from ``a``, ``b`` and constants, agree wherever ``a = b``: if they are the same expression
    then, or if both are affine, or ``b`` is constant, by their values. A selection that cannot be
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
        if not _aligned(program, node, (left, right)):
            return False
        forms: dict[Any, int] = {}
        seen = dict.fromkeys((left, right), -1)
        one, two = (_form(program, place, seen, forms) for place in node.inputs[1:])
        if one == two:
            return True
        # A few numbers decide about affine cases; so does the constant that is compared with.
        affine = all(_is_affine(program, place, {left, right}) for place in node.inputs[1:])
        if {left, right} <= program.moved and not affine:
            return False
        return all(_meet(program, node, (left, right), probe) for probe in _PROBES)
    except _UnknownError:
        return False


def _aligned(program: _Program, node: Node, compared: tuple[int, int]) -> bool:
    """Whether each entry of both cases comes from that entry of the compared values that decides
    on it, and no other; raises :class:`_UnknownError` as :func:`_value` does."""
    entries: dict[int, np.ndarray | None] = {}
    for place in {*compared} & program.moved:
        shape = program.graph.avals[place].shape
        entries[place] = np.arange(math.prod(shape)).reshape(shape)

    def origin(place: int) -> np.ndarray | None:
        """The number of the entry that each entry comes from; None for constants."""
        if place in entries or place not in program.moved:
            return entries.get(place)
        maker = program.makers.get(place)
        if maker is None or not _entrywise(maker.name):
            raise _UnknownError
        first, *others = [t for t in map(origin, maker.inputs) if t is not None]
        if _kept(maker.name) and maker.name != "convert_element_type":
            if others or len(maker.inputs) > 1:
                raise _UnknownError
            with jax.ensure_compile_time_eval():
                first = np.asarray(evaluate(maker.eqn, [jnp.asarray(first)])[0])
        elif any(np.any(first != other) for other in others):
            raise _UnknownError
        return entries.setdefault(place, np.broadcast_to(first, program.graph.avals[place].shape))

    deciding, *cases = (origin(place) for place in node.inputs)
    assert deciding is not None
    return all(
        case is None or np.array_equal(case, np.broadcast_to(deciding, case.shape))
        for case in cases
    )


def _form(program: _Program, place: int, seen: dict[int, int], forms: dict[Any, int]) -> int:
    """The number of the expression of the value at ``place``: equal expressions have equal numbers.

    ``seen`` has the numbers by place, one for both compared values, and ``forms`` by expression;
    both are added to. Raises :class:`_UnknownError` as :func:`_value` does.
    """
    if place in seen:
        return seen[place]
    form: tuple[Any, ...]
    if place in program.graph.constants:
        value = program.graph.constants[place]
        if validate.traced(value):
            raise _UnknownError
        form = str(jnp.result_type(value)), np.shape(value), np.asarray(value).tobytes()
    else:
        node = program.makers.get(place)
        if node is None or (place in program.moved and not _entrywise(node.name)):
            raise _UnknownError
        parts = tuple(_form(program, i, seen, forms) for i in node.inputs)
        form = node.name, str(node.eqn.params), node.outputs.index(place), parts
    return seen.setdefault(place, forms.setdefault(form, len(forms)))


def _is_affine(program: _Program, place: int, known: set[int]) -> bool:
    """Whether the value at ``place`` is affine in the values in ``known``, by its equations.

    If it is, it is added to these.
    """
    if place in known or place not in program.moved:
        return True
    node = program.makers[place]
    rules, moves = TABLE[node.name], [i in program.moved for i in node.inputs]
    if rules.affine is None or (rules.scales and sum(moves) > 1):
        return False
    bends = {"select_n": moves[0], "div": moves[-1]}
    if bends.get(node.name, False) or not all(_is_affine(program, i, known) for i in node.inputs):
        return False
    known.add(place)
    return True


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
        at, beside = dict(known), dict(known)
        for place, aval in avals.items():
            at[place] = jnp.broadcast_to(value, aval.shape).astype(aval.dtype)
            beside[place] = (at[place] * (1 + _rounding(aval.dtype))).astype(aval.dtype)
        cases, moved = (
            [np.asarray(_value(program, place, given), float) for place in node.inputs[1:]]
            for given in (at, beside)
        )
    # Entry by entry: a gap that a change of the compared value by its rounding makes is none.
    with np.errstate(invalid="ignore"):  # Infinite cases excuse no gap.
        slack = np.max([np.abs(one - other) for one, other in zip(moved, cases)], axis=0)
    slack = np.where(np.isfinite(slack), slack, 0.0)
    result: Any = node.eqn.outvars[0].aval
    return bool(np.all(np.isclose(cases[0], cases[1], rtol=_rounding(result.dtype), atol=slack)))


def _rounding(dtype: Any) -> float:
    """Relative difference of two numbers of ``dtype`` that counts as rounding."""
    floats = jnp.issubdtype(dtype, jnp.floating)
    return min(_ULPS * float(jnp.finfo(dtype).eps), _NEAR) if floats else 0.0


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
