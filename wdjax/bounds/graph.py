"""A program as a flat list of equations: calls and known branches inlined, loops of known length
unrolled."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from wdjax import program
from wdjax.bounds.affine_rules import evaluate
from wdjax.bounds.rewritten import rewritten, settled
from wdjax.checks import validate

CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
}  # fmt: skip
IDENTITIES = {
    "stop_gradient", "optimization_barrier", "sharding_constraint", "copy", "copy_p", "name",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Node:
    """One equation; its values are numbered by *places*."""

    eqn: JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


@dataclass(eq=False)
class Graph:
    """The equations of a program in order, its inputs, outputs and constants."""

    nodes: list[Node] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    constants: dict[int, Any] = field(default_factory=dict)
    avals: dict[int, Any] = field(default_factory=dict)
    """Shapes and dtypes of the inputs and of what equations return."""
    size: int = 0
    rolled: bool = False
    """Whether scans of floats stay single equations."""

    def new(self) -> int:
        self.size += 1
        return self.size - 1

    def constant(self, value: Any) -> int:
        place = self.new()
        self.constants[place] = value
        return place


def flatten(closed: ClosedJaxpr, rolled: bool = False) -> Graph:
    """The flat program of a jaxpr, without the equations that no output needs.

    Loops whose length is unknown stay as they are, and with ``rolled`` scans of floats too.

    >>> graph = flatten(jax.make_jaxpr(jax.jit(lambda x: jnp.sin(jnp.cos(x))))(1.0))
    >>> [node.name for node in graph.nodes]
    ['cos', 'sin']
    """
    graph = Graph(rolled=rolled)
    graph.inputs = tuple(graph.new() for _ in closed.jaxpr.invars)
    graph.avals.update({place: var.aval for place, var in zip(graph.inputs, closed.jaxpr.invars)})
    graph.outputs = tuple(_inline(graph, closed.jaxpr, closed.consts, graph.inputs))
    return alive(graph)


def alive(graph: Graph) -> Graph:
    """The program without the equations that no output needs."""
    used, kept = set(graph.outputs), []
    for node in reversed(graph.nodes):
        if used.intersection(node.outputs):
            used.update(node.inputs)
            kept.append(node)
    graph.nodes = kept[::-1]
    return graph


def _inline(graph: Graph, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[int]) -> list[int]:
    """Appends the equations of a jaxpr to the graph, calls and loops expanded.

    ``args`` are the places of the jaxpr's inputs; returns the places of its outputs.
    """
    places: dict[Any, int] = dict(zip(jaxpr.invars, args))
    places.update({var: graph.constant(value) for var, value in zip(jaxpr.constvars, consts)})

    def read(atom: Any) -> int:
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            with jax.ensure_compile_time_eval():
                return graph.constant(jnp.asarray(atom.val, aval.dtype))
        return places[atom]

    for eqn in jaxpr.eqns:
        inputs = tuple(read(atom) for atom in eqn.invars)
        name = eqn.primitive.name
        outputs: Sequence[int]
        if name in IDENTITIES:
            outputs = inputs
        elif name in CALLS:
            inner: Any = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
            body, body_consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            outputs = _inline(graph, body, body_consts, inputs)
        elif name == "scan" and not (graph.rolled and _stays(eqn)):
            outputs = _unroll(graph, eqn, inputs)
        elif name in _DECIDED and (decided := _DECIDED[name](graph, eqn, inputs)) is not None:
            outputs = decided
        elif all(0 in aval.shape for aval in map(_aval, eqn.outvars)):
            outputs = [_empty(graph, aval) for aval in map(_aval, eqn.outvars)]
        else:
            outputs = tuple(graph.new() for _ in eqn.outvars)
            graph.nodes.append(Node(settled(eqn), inputs, tuple(outputs)))
            graph.avals.update({place: var.aval for place, var in zip(outputs, eqn.outvars)})
            avals = [*map(_aval, eqn.invars)]
            known = [graph.constants.get(place) for place in inputs]
            written = rewritten(eqn, known)  # The equation stays for results not rewritten.
            outputs = tuple(
                place if fn is None else add(graph, fn, avals, inputs)
                for place, fn in zip(outputs, written)
            )
        places.update(zip(eqn.outvars, outputs))
    return [read(atom) for atom in jaxpr.outvars]


_TURNS = 2**12
"""Most turns of a loop that are written out."""


def _branch(graph: Graph, eqn: JaxprEqn, inputs: tuple[int, ...]) -> list[int] | None:
    """The outputs of the branch of a ``cond`` that constants choose; None if the input chooses."""
    chosen = _known(graph, inputs[0])
    if chosen is None:
        return None
    branches = eqn.params["branches"]
    branch = branches[min(max(int(chosen), 0), len(branches) - 1)]
    return _inline(graph, branch.jaxpr, branch.consts, inputs[1:])


def _turns(graph: Graph, eqn: JaxprEqn, inputs: tuple[int, ...]) -> list[int] | None:
    """The last carry of a ``while`` whose conditions are known, with its turns one after another;
    None if a condition depends on the input."""
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    fixed, body_consts, carry = (
        inputs[:first],
        inputs[first : first + second],
        [*inputs[first + second :]],
    )
    for _ in range(_TURNS):
        (test,) = _inline(graph, condition.jaxpr, condition.consts, [*fixed, *carry])
        going = _known(graph, test)
        if going is None:
            return None
        if not going:
            return carry
        carry = _inline(graph, body.jaxpr, body.consts, [*body_consts, *carry])
    raise ValueError(
        f"the model holds a loop ('while') of more than {_TURNS} turns, which cannot be certified; "
        "stop it earlier."
    )


def _known(graph: Graph, place: int) -> Any:
    """The value at a place, computed from constants, which are kept; None where it depends on the
    input or on what is traced."""
    makers = {out: node for node in graph.nodes for out in node.outputs}

    def read(place: int) -> Any:
        if place not in graph.constants:
            node = makers.get(place)
            if node is None:
                return None
            args: list[Any] = [read(each) for each in node.inputs]
            if any(arg is None for arg in args):
                return None
            graph.constants.update(zip(node.outputs, evaluate(node.eqn, args)))
        value = graph.constants[place]
        return None if validate.traced(value) else value

    with jax.ensure_compile_time_eval():
        return read(place)


_DECIDED = {"cond": _branch, "while": _turns}
"""Control flow that is written out where constants decide it."""


def _aval(var: Any) -> Any:
    """``var.aval``, untyped, because its declared type has no shape."""
    return var.aval


def _empty(graph: Graph, aval: Any) -> int:
    """The place of a constant array without entries."""
    with jax.ensure_compile_time_eval():
        return graph.constant(jnp.zeros(aval.shape, aval.dtype))


FULL = jnp.float32, jnp.float64
_SHORT = 2
"""Number of steps up to which a scan is always written out."""


def _stays(eqn: JaxprEqn) -> bool:
    """Whether a scan's carries and results are floats of full length, and its steps many."""
    avals = [*map(_aval, eqn.outvars)]
    full = all(aval.dtype in FULL and aval.size for aval in avals)
    return full and eqn.params["length"] > _SHORT


def _unroll(graph: Graph, eqn: JaxprEqn, inputs: tuple[int, ...]) -> list[int]:
    """Appends the steps of a ``scan`` one after another; the places of its outputs.

    These are the final carries, then the outputs of all steps, stacked along axis 0.
    """
    params = eqn.params
    (consts, carries), length = program.scan_counts(eqn), params["length"]
    fixed, carry = inputs[:consts], list(inputs[consts : consts + carries])
    series, body = inputs[consts + carries :], params["jaxpr"]
    avals: list[Any] = [atom.aval for atom in eqn.invars[consts + carries :]]
    emitted: list[list[int]] = []
    for i in reversed(range(length)) if params["reverse"] else range(length):

        def pick(t: jax.Array, i: int = i) -> jax.Array:
            return lax.index_in_dim(t, i, keepdims=False)

        rows = [add(graph, pick, [aval], [place]) for aval, place in zip(avals, series)]
        out = _inline(graph, body.jaxpr, body.consts, [*fixed, *carry, *rows])
        carry = out[:carries]
        emitted.append(out[carries:])
    if params["reverse"]:
        emitted.reverse()
    shapes: list[Any] = [var.aval for var in eqn.outvars[carries:]]
    for place, aval in enumerate(shapes):
        row = jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype)
        column = [out[place] for out in emitted]
        stacked = 0 not in aval.shape
        carry.append(
            add(graph, lambda *ts: jnp.stack(ts), [row] * length, column)
            if stacked
            else _empty(graph, aval)
        )
    return carry


def add(
    graph: Graph, fn: Callable[..., jax.Array], avals: Sequence[Any], args: Sequence[int]
) -> int:
    """Appends the equations of ``fn`` and returns the place of its result."""
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    return _inline(graph, closed.jaxpr, closed.consts, args)[0]


def dependent(graph: Graph) -> Iterator[tuple[Node, tuple[bool, ...]]]:
    """Yields every equation with a flag for each operand: whether it depends on the input."""
    moved = set(graph.inputs)
    for node in graph.nodes:
        moves = tuple(place in moved for place in node.inputs)
        if any(moves):
            moved.update(node.outputs)
        yield node, moves
