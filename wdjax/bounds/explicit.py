"""Splits equations that broadcast and combine, or multiply and sum, into one equation for each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from wdjax import loops
from wdjax.bounds.graph import Graph, Node, add, dependent
from wdjax.bounds.primitives import TABLE


def explicit(graph: Graph) -> Graph:
    """The same program with only entrywise products of input-dependent values.

    >>> from wdjax.bounds.graph import flatten
    >>> closed = jax.make_jaxpr(lambda x: x @ x.T)(jnp.ones((3, 3)))
    >>> [node.name for node in explicit(flatten(closed)).nodes][-2:]
    ['mul', 'reduce_sum']
    """
    nodes, graph.nodes = list(dependent(graph)), []
    for node, moves in nodes:
        avals: list[Any] = [atom.aval for atom in node.eqn.invars]
        out: Any = node.eqn.outvars[0].aval
        parts: Callable[..., jax.Array] | None = None
        if node.name == "dot_general" and all(moves):
            parts = _contraction(node.eqn)
        elif node.name == "div" and moves[1] and jnp.issubdtype(out.dtype, jnp.floating):
            parts = _repetition(node.eqn, by_inverse=True)
        elif _repeats(node.name, avals, out):
            parts = _repetition(node.eqn)
        if parts is None:
            graph.nodes.append(node)
            continue
        place = add(graph, parts, avals, node.inputs)
        graph.nodes[-1] = _renamed(graph.nodes[-1], place, node)
    return graph


def _repeats(name: str, avals: list[Any], out: Any) -> bool:
    """Whether an elementwise equation broadcasts an operand implicitly."""
    known = TABLE.get(name)
    two = known is not None and known.elementwise and len(avals) == 2
    return two and any(aval.shape not in ((), out.shape) for aval in avals)


def _renamed(last: Node, place: int, node: Node) -> Node:
    """``last``, which computes the value at ``place``, with the outputs of ``node`` as its own."""
    if last.outputs != (place,):
        raise ValueError(f"{node.name!r} was not written out as expected; report this program.")
    return replace(last, outputs=node.outputs)


def _repetition(eqn: JaxprEqn, by_inverse: bool = False) -> Callable[..., jax.Array]:
    """The equation after explicit broadcasts; a quotient as a product if ``by_inverse``."""
    out: Any = eqn.outvars[0].aval

    def combine(*args: jax.Array) -> jax.Array:
        wide = [a if a.shape in ((), out.shape) else jnp.broadcast_to(a, out.shape) for a in args]
        if by_inverse:
            return wide[0] * wide[1] ** -1
        return jnp.asarray(eqn.primitive.bind(*loops.alike(*wide), **eqn.params))

    return combine


def _contraction(eqn: JaxprEqn) -> Callable[..., jax.Array]:
    """A ``dot_general`` written as entrywise products and a sum over the last axes.

    The products are ``[*batch, *rows, *columns, *summed]``. Operands, products and sums have the
    result's dtype: a shorter one than the operands' is charged for each of them.
    """
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    declared: Any = eqn.outvars[0].aval

    def arranged(t: jax.Array, batch: Any, summed: Any) -> tuple[jax.Array, list[int]]:
        free = [axis for axis in range(t.ndim) if axis not in (*batch, *summed)]
        return t.transpose([*batch, *free, *summed]), [t.shape[axis] for axis in free]

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        (a, rows), (b, columns) = arranged(a, left_batch, left), arranged(b, right_batch, right)
        batch, summed = a.shape[: len(left_batch)], a.shape[a.ndim - len(left) :]
        ones = [1] * len(columns)
        a = a.reshape(*batch, *rows, *ones, *summed)
        b = b.reshape(*batch, *[1] * len(rows), *columns, *summed)
        wide = (*batch, *rows, *columns, *summed)
        one, two = (jnp.broadcast_to(t, wide).astype(declared.dtype) for t in (a, b))
        return lax.reduce_sum(one * two, tuple(range(len(wide) - len(summed), len(wide))))

    return product
