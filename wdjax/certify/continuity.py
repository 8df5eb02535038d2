"""Which programs jump: rounding, signs, booleans made numbers, selections whose cases disagree."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from wdjax import validate
from wdjax.certify.graph import Graph, Node, dependent, flatten

_JUMPS = {"floor", "ceil", "round", "sign", "rem", "argmax", "argmin", "cond", "while", "nextafter"}
_COMPARISONS = {"lt", "le", "gt", "ge"}
_WHOLE = {"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "expand_dims", "copy"}
_ELEMENTWISE = {
    "add", "sub", "mul", "div", "neg", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic",
    "erf", "erfc", "max", "min", "abs", "integer_pow", "square", "sqrt", "rsqrt", "select_n",
    "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "pow", "clamp", "sin", "cos", "atan",
}  # fmt: skip
_PROBES = (-3.0, -0.7, 0.0, 0.3, 1.1, 40.0)


def jumps(closed: ClosedJaxpr) -> set[str]:
    """Names of the primitives by which a program may be discontinuous in its input.

    A selection by a comparison of ``a`` with ``b`` is continuous if its cases, computed entry by
    entry from ``a``, ``b`` and known numbers, agree wherever ``a = b``. Numbers are known outside
    of a trace; what cannot be decided counts as a jump.

    >>> jumps(jax.make_jaxpr(lambda x: jnp.where(x > 0, x, 0.1 * x))(1.0))
    set()
    >>> sorted(jumps(jax.make_jaxpr(lambda x: jnp.where(x > 0.5, 1.0, 0.0))(1.0)))
    ['select_n']
    """
    graph = flatten(closed)
    makers = {place: node for node in graph.nodes for place in node.outputs}
    found, moved = set(), set(graph.inputs)
    for node, moves in dependent(graph):
        if not any(moves):
            continue
        moved.update(node.outputs)
        source: Any = node.eqn.invars[0].aval
        target: Any = node.eqn.outvars[0].aval
        if node.name in _JUMPS:
            found.add(node.name)
        elif node.name == "convert_element_type":
            floats = [jnp.issubdtype(a.dtype, jnp.floating) for a in (source, target)]
            if floats != [True, True] and target.dtype != source.dtype:
                found.add(node.name)
        elif node.name == "select_n" and moves[0] and not _agree(graph, node, makers, moved):
            found.add(node.name)
    return found


def _agree(graph: Graph, node: Node, makers: dict[int, Node], moved: set[int]) -> bool:
    """Whether the cases of a selection agree where its comparison is decided."""
    predicate = makers.get(node.inputs[0])
    while predicate is not None and predicate.name in {*_WHOLE, "not"}:
        predicate = makers.get(predicate.inputs[0])
    if predicate is None:
        return False
    left, right = predicate.inputs[0], predicate.inputs[-1]
    if predicate.name in ("eq", "ne") and left == right:
        return True  # The test for NaN.
    if predicate.name == "is_finite":
        return True
    if predicate.name not in _COMPARISONS:
        return False
    if {left, right} == set(node.inputs[1:]):
        return True
    try:
        return all(_meet(graph, node, makers, (left, right), moved, probe) for probe in _PROBES)
    except _UnknownError:
        return False


class _UnknownError(Exception):
    """A number that is not known, or an operation that mixes entries."""


def _meet(
    graph: Graph,
    node: Node,
    makers: dict[int, Node],
    compared: tuple[int, int],
    moved: set[int],
    probe: float,
) -> bool:
    free = [place for place in compared if place in moved]
    known: dict[int, Any] = {}
    with jax.ensure_compile_time_eval():
        if len(free) == 1:
            (fixed,) = set(compared) - set(free)
            value = _value(graph, fixed, makers, known, moved)
        else:
            value = jnp.asarray(probe, jnp.float32)
        avals = {place: graph.avals[place] for place in free}
        known.update(
            {i: jnp.broadcast_to(value, a.shape).astype(a.dtype) for i, a in avals.items()}
        )
        cases = [_value(graph, place, makers, known, moved) for place in node.inputs[1:]]
        first, second = (np.asarray(case, float) for case in cases)
    return bool(np.allclose(first, second, rtol=1e-6, atol=1e-6 * (1e-30 + np.abs(first).max())))


def _value(
    graph: Graph, place: int, makers: dict[int, Node], known: dict[int, Any], moved: set[int]
) -> Any:
    """A value from known ones; an input-dependent one only entry by entry."""
    if place in known:
        return known[place]
    if place in graph.constants:
        value = graph.constants[place]
        if validate.traced(value):
            raise _UnknownError
        return value
    node = makers.get(place)
    if node is None or (place in moved and node.name not in _ELEMENTWISE | _WHOLE):
        raise _UnknownError
    args: Sequence[Any] = [_value(graph, i, makers, known, moved) for i in node.inputs]
    out = node.eqn.primitive.bind(*args, **node.eqn.params)
    values = list(out) if node.eqn.primitive.multiple_results else [out]
    known.update(zip(node.outputs, values))
    return known[place]
