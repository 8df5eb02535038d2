"""``jax.lax``'s loops and branches, usable inside ``jax.shard_map``.

Inside ``jax.shard_map`` a type says over which axes of the mesh an array varies, and a loop whose
state begins as constants but comes to depend on the sharded samples is refused. Here the initial
state, or the result of each branch, is made to vary as what the loop makes of it. Outside of
``shard_map`` these are the functions of ``jax.lax``.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

State = TypeVar("State")
Tree = TypeVar("Tree")


def sharded() -> bool:
    """Whether we are inside ``jax.shard_map``, or a ``jax.pmap`` that is built on it.

    >>> sharded()
    False
    """
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varying(tree: Tree, *like: Any) -> Tree:
    """The tree, its values unchanged, typed to vary over every mesh axis over which another varies.

    Args:
      tree: a pytree of arrays.
      *like: pytrees of arrays, random keys or numbers.

    >>> varying({"a": jnp.ones(2)}, jnp.zeros(3))["a"].tolist()
    [1.0, 1.0]
    """
    if not sharded():
        return tree
    marks = [_mark(leaf) for leaf in jax.tree.leaves((tree, like)) if jnp.size(leaf)]
    if not marks:
        return tree
    mark = functools.reduce(jnp.logical_or, marks)
    # Both sides are the same, so XLA drops the selection; ``mark`` only lends it its type.
    return jax.tree.map(lambda leaf: jnp.where(mark, leaf, leaf), tree)


def _mark(leaf: Any) -> jax.Array:
    """A boolean that varies over the mesh axes over which the array varies."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    first = jax.lax.stop_gradient(leaf.ravel()[0])
    return first != first


def alike(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, each typed to vary over every mesh axis over which one of them varies.

    >>> [a.tolist() for a in alike(jnp.ones(1), jnp.zeros(1))]
    [[1.0], [0.0]]
    """
    return arrays if len(arrays) < 2 else tuple(varying(list(arrays)))


def linear_pullback(
    linear: Callable[[jax.Array], jax.Array], at: jax.Array, *rows: Any
) -> tuple[jax.Array, Callable[[Any], Any]]:
    """A linear function's value at a point, and its transpose, which takes ``rows``.

    Args:
      linear: ``array -> array``.
      at: the point, whatever its values.
      *rows: arrays of which the transpose will be taken, under ``vmap`` or not.

    >>> out, pull = linear_pullback(lambda t: 3 * t, jnp.zeros(2))
    >>> pull(jnp.ones(2)).tolist()
    [3.0, 3.0]
    """
    out, pull = jax.vjp(linear, varying(at, *rows))
    return out, lambda row: pull(varying(row, out))[0]


def scan(
    step: Callable[[State, Any], tuple[State, Any]],
    state: State,
    rows: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[State, Any]:
    """``jax.lax.scan``; its arguments.

    >>> scan(lambda total, row: (total + row, total), 0, jnp.arange(4))[0].tolist()
    6
    """
    if sharded() and (length or jax.tree.leaves(rows)):
        one = jax.tree.map(lambda leaf: leaf[0], rows)
        state = varying(state, step(state, one)[0])
    return jax.lax.scan(step, state, rows, length=length, reverse=reverse, unroll=unroll)


def fori_loop(low: Any, high: Any, step: Callable[[Any, State], State], state: State) -> State:
    """``jax.lax.fori_loop``; its arguments.

    >>> fori_loop(0, 3, lambda i, total: total + i, 0).tolist()
    3
    """
    if sharded():
        state = varying(state, step(jnp.asarray(low), state))
    return jax.lax.fori_loop(low, high, step, state)


def while_loop(
    goes_on: Callable[[State], Any], step: Callable[[State], State], state: State
) -> State:
    """``jax.lax.while_loop``; its arguments.

    >>> while_loop(lambda n: n < 10, lambda n: 2 * n, 1).tolist()
    16
    """
    if sharded():
        state = varying(state, step(state))
    return jax.lax.while_loop(goes_on, step, state)


def cond(where: Any, one: Callable[..., Tree], other: Callable[..., Tree], *given: Any) -> Tree:
    """``jax.lax.cond``; its arguments.

    >>> cond(True, jnp.sin, jnp.cos, 0.0).tolist()
    0.0
    """
    if not sharded():
        return jax.lax.cond(where, one, other, *given)
    both = one(*given), other(*given)
    branches = [lambda *args, f=f: varying(f(*args), both) for f in (one, other)]
    return jax.lax.cond(where, *branches, *given)
