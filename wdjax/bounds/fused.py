r"""Fuses the equations of a scalar activation such as GELU into one node.

Lines of the whole function (:mod:`wdjax.bounds.activation`) are tighter than the composed lines of
its parts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import loops
from wdjax.bounds import affine_rules
from wdjax.bounds.activation import primitive
from wdjax.bounds.continuity import jumps
from wdjax.bounds.domain import Array
from wdjax.bounds.graph import Graph, Node, alive, dependent
from wdjax.bounds.primitives import TABLE
from wdjax.checks import validate


class _Cone(NamedTuple):
    """The equations that compute a value entry by entry from the value at ``root``."""

    root: int
    nodes: tuple[Node, ...]


def fuse(graph: Graph) -> Graph:
    """The same program, with one node for each scalar function of the entries of one value.

    Single equations with their own lines are not fused, and neither are functions that may be
    discontinuous, that compare rounded numbers, or whose constants are traced or not scalar.

    >>> from wdjax.bounds.graph import flatten
    >>> def program(x):
    ...     return jax.nn.silu(2 * x).sum() + jax.nn.relu(x).sum()
    >>> [node.name for node in fuse(flatten(jax.make_jaxpr(program)(jnp.ones(3)))).nodes]
    ['elementwise', 'reduce_sum', 'max', 'reduce_sum', 'add']
    """
    numbers: dict[int, Any] = {}
    cones: dict[int, _Cone] = {}
    read: dict[int, list[int]] = {place: [-1] for place in graph.outputs}
    for place, value in graph.constants.items():
        _learn(numbers, place, value)
    for node, moves in dependent(graph):
        for place in node.inputs:
            read.setdefault(place, []).append(node.outputs[0])
        if any(moves):
            cone = _cone(graph, node, moves, cones, numbers)
            cones.update({} if cone is None else {node.outputs[0]: cone})
        elif all(place in numbers for place in node.inputs):
            avals: list[Any] = [atom.aval for atom in node.eqn.invars]
            with jax.ensure_compile_time_eval():
                args = [jnp.full(a.shape, numbers[i]) for i, a in zip(node.inputs, avals)]
                for place, value in zip(node.outputs, affine_rules.evaluate(node.eqn, args)):
                    _learn(numbers, place, value)
    nodes = []
    for node in graph.nodes:
        cone = cones.get(node.outputs[0])
        inside = cone is not None and all(
            user in cones and cones[user].root == cone.root for user in read[node.outputs[0]]
        )
        nodes.append(node if cone is None or inside else _made(graph, node, cone, numbers))
    graph.nodes = nodes
    return alive(graph)


def _learn(numbers: dict[int, Any], place: int, value: Any) -> None:
    """Stores the value in ``numbers`` if all its entries are equal."""
    if not validate.traced(value) and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
        entries = np.asarray(value).reshape(-1)
        if entries.size and np.all(entries == entries[0]):
            numbers[place] = entries[0]


def _cone(
    graph: Graph,
    node: Node,
    moves: tuple[bool, ...],
    cones: dict[int, _Cone],
    numbers: dict[int, Any],
) -> _Cone | None:
    """The equations from a root value to ``node``, if they are a scalar function of its entries.

    ``moves`` flags the operands that depend on the input; ``cones`` are those found before, and
    ``numbers`` the constants whose entries are all equal, by place. None if ``node`` is not
    entrywise in a single input-dependent value.
    """
    known = TABLE.get(node.name)
    if known is None or not known.fuses:
        return None
    moving = {place for place, moved in zip(node.inputs, moves) if moved}
    before = [cones[place] for place in moving if place in cones]
    roots = {cone.root for cone in before} | {place for place in moving if place not in cones}
    out, root = graph.avals[node.outputs[0]], min(roots)
    operand = graph.avals[root]
    fits = out.shape == operand.shape and operand.dtype in (jnp.float32, jnp.float64)
    if len(roots) > 1 or not fits or not moving | numbers.keys() >= {*node.inputs}:
        return None
    nodes = dict.fromkeys(part for cone in before for part in cone.nodes)
    return _Cone(root, (*nodes, node))


def _made(graph: Graph, node: Node, cone: _Cone, numbers: dict[int, Any]) -> Node:
    """One ``elementwise`` node for a whole cone of equations that ends in ``node``.

    Returns ``node`` itself where fusing would not tighten the bounds or would not be sound.
    """
    out, operand = graph.avals[node.outputs[0]], graph.avals[cone.root]
    inside = {cone.root, *(part.outputs[0] for part in cone.nodes)}
    bends = [bend for part in cone.nodes if (bend := _bend(part, inside))]
    bent = [TABLE[bend] for bend in bends if bend in TABLE and TABLE[bend].lines is not None]
    # Homogeneous functions (maxima, abs) are piecewise linear: fusing them would gain nothing.
    if len(bent) == len(bends) and (len(bends) < 2 or all(rules.homogeneous for rules in bent)):
        return node
    # Both sides of a comparison must be free of rounding.
    compared = [part.inputs for part in cone.nodes if TABLE[part.name].compares]
    exact = all(inside & {*pair} == {cone.root} or pair[0] == pair[-1] for pair in compared)

    def function(z: Array) -> Array:
        values: dict[int, Any] = {**numbers, cone.root: z}
        for each in cone.nodes:
            args = [values[place] for place in each.inputs]
            values[each.outputs[0]] = each.eqn.primitive.bind(
                *loops.alike(*args), **each.eqn.params
            )
        return values[node.outputs[0]]

    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), operand.dtype))
    if not exact or out.dtype != operand.dtype or jumps(closed):
        return node
    whole = jax.make_jaxpr(functools.partial(primitive.bind, jaxpr=closed))(operand)
    return Node(whole.eqns[0], (cone.root,), node.outputs)


def _bend(node: Node, inside: set[int]) -> str:
    """The name of an equation's nonlinearity in the values ``inside`` a cone; "" if affine."""
    if node.name == "integer_pow" and node.eqn.params["y"] > 0 and node.eqn.params["y"] % 2:
        return "odd power"
    moves = [place in inside for place in node.inputs]
    rules = TABLE[node.name]
    straight = rules.compares or (rules.diagonal and not rules.scales)
    straight |= (node.name == "mul" and not all(moves)) or (node.name == "div" and not moves[1])
    return "" if straight else node.name
