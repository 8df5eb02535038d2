"""A bank: stacked parameters of many models, used as one victim."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from wdjax import loops
from wdjax.checks import validate
from wdjax.core import Array, Model, PyTree
from wdjax.transductive.defense import Defense


class Bank(NamedTuple):
    """The models of a bank: a pytree of fixed shapes, so that a new model compiles nothing."""

    models: PyTree
    """Adapted parameters, ``[capacity, ...]`` leaves."""
    filled: Array
    """The number of models; later rows are empty."""


class Answers(NamedTuple):
    """The outputs of a bank's models: ``[n, ...]`` leaves, the argument of an objective."""

    out: PyTree
    """``[n, capacity, ...]`` leaves: every model's output, zeros for models that were not run."""
    asked: Array
    """``[n, capacity]``: whether the model was run."""
    rival: Array
    """``[n]``: the target class, or -1 for an untargeted attack."""


def empty_bank(like: PyTree, capacity: int) -> Bank:
    """An empty bank for ``capacity`` models.

    Args:
      like: the parameters of one model, as arrays or ``ShapeDtypeStruct``.
      capacity: at least 1.

    Raises:
      ValueError: ``capacity`` below 1.

    Source: this library's own.

    >>> bank = add_model(empty_bank({"w": jnp.ones(2)}, 3), {"w": jnp.array([1.0, 2.0])})
    >>> bank.models["w"].shape, int(bank.filled)
    ((3, 2), 1)
    """
    room = validate.check_count("capacity", capacity)
    rows = jax.tree.map(lambda leaf: jnp.zeros((room, *leaf.shape), leaf.dtype), like)
    return Bank(rows, jnp.zeros((), jnp.int32))


def add_model(bank: Bank, adapted: PyTree) -> Bank:
    """The bank with one more model.

    Args:
      bank: with room for it.
      adapted: the parameters of one model, as in :func:`empty_bank`.

    Raises:
      ValueError: the bank is full. Inside a trace nothing can be raised: there the models of a bank
        that overflows become NaN.

    Source: this library's own.

    >>> int(add_model(empty_bank({"w": jnp.ones(2)}, 3), {"w": jnp.zeros(2)}).filled)
    1
    """
    capacity = len(jax.tree.leaves(bank.models)[0])
    if not validate.traced(bank) and int(bank.filled) >= capacity:
        raise ValueError(f"the bank is full: it has room for {capacity} models.")
    full = bank.filled >= capacity

    def put(rows: Array, row: Array) -> Array:
        placed = rows.at[bank.filled].set(row, mode="drop")
        return (
            jnp.where(full, jnp.nan, placed) if jnp.issubdtype(rows.dtype, jnp.floating) else placed
        )

    return Bank(jax.tree.map(put, bank.models, adapted), bank.filled + 1)


def victim(
    defense: Defense,
    memory: PyTree,
    bank: Bank,
    *,
    first: Array | int = 0,
    rival: Array | None = None,
) -> Model:
    r"""The models of a bank as one model that any attack of :mod:`wdjax.attacks` takes.

    ``out = victim(x)`` is an :class:`Answers`, with each model's outputs. Only the models ``first
    .. filled - 1`` run, one after another, in a loop of dynamic length: more models cost time, but
    neither memory nor a compilation. A gradient runs each model a second time, one after another,
    and sums.

    Args:
      defense: the defence that the models belong to.
      memory: its memory.
      bank: the models.
      first: the first model that runs.
      rival: ``[n]`` target classes for the objective, -1 for untargeted.

    Returns:
      A ``Model``, differentiable in reverse mode with respect to its inputs only.

    Cost: with ``m`` models in use, ``m`` forward passes; a gradient takes ``2 m`` forward and ``m``
      backward passes, with the memory of one and the outputs of all.

    Source: Chen et al. [chen2022], A.1.3, where models are attacked one by one to save memory.

    >>> from wdjax.transductive import Fixed
    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.eye(2))
    >>> bank = add_model(empty_bank(model, 3), model)
    >>> answers = victim(Fixed(model), (), bank)(jnp.array([[1.0, 2.0]]))
    >>> answers.out[0].tolist(), answers.asked[0].tolist()
    ([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]], [True, False, False])
    """
    held = {"defense": defense, "memory": memory, "bank": bank, "first": jnp.asarray(first)}
    return Model(_answers, held | {"rival": rival})


def _answers(params: dict[str, Any], x: Array) -> Answers:
    """The outputs at ``x`` of a bank's models from number ``first`` on."""
    bank, n = params["bank"], len(x)
    shared = params["defense"], params["memory"], bank, params["first"]
    out = _all(shared, x)
    indices = jnp.arange(len(jax.tree.leaves(bank.models)[0]))
    asked = (indices >= params["first"]) & (indices < bank.filled)
    rival = jnp.full(n, -1) if params["rival"] is None else params["rival"]
    return Answers(out, jnp.broadcast_to(asked, (n, len(indices))), rival)


def _one(shared: PyTree, number: Array | int, x: Array) -> PyTree:
    """The outputs of model ``number`` of the bank."""
    defense, memory, bank, _ = shared
    adapted = jax.tree.map(lambda rows: rows[number], bank.models)
    return defense.predict(memory, adapted, x)


@jax.custom_vjp
def _all(shared: PyTree, x: Array) -> PyTree:
    """The outputs of all models, ``[n, capacity, ...]`` leaves; zeros for those not run."""
    *_, bank, first = shared
    capacity = len(jax.tree.leaves(bank.models)[0])
    shapes = jax.eval_shape(functools.partial(_one, shared, 0), x)
    rows = jax.tree.map(lambda leaf: jnp.zeros((capacity, *leaf.shape), leaf.dtype), shapes)

    def ask(number: Array, rows: PyTree) -> PyTree:
        said = _one(shared, number, x)
        return jax.tree.map(lambda row, new: row.at[number].set(new), rows, said)

    rows = loops.fori_loop(first, bank.filled, ask, rows)
    return jax.tree.map(lambda row: jnp.moveaxis(row, 0, 1), rows)


def _forward(shared: PyTree, x: Any) -> tuple[PyTree, PyTree]:
    """The forward pass of :func:`_all`; raises if anything but ``x`` is differentiated."""
    moving = [leaf.perturbed for leaf in jax.tree.leaves(shared, is_leaf=_is_primal)]
    if any(moving):
        raise ValueError(
            "a bank can be differentiated by its inputs only; for the gradient of a single model "
            "by its parameters, call that model."
        )
    shared, x = jax.tree.map(lambda leaf: leaf.value, (shared, x), is_leaf=_is_primal)
    return _all(shared, x), (shared, x)


def _is_primal(leaf: Any) -> bool:
    """Whether ``leaf`` is a JAX wrapper that holds a value and whether it is differentiated.

    A ``custom_vjp`` with symbolic zeros gets its arguments in such wrappers.
    """
    return isinstance(leaf, CustomVJPPrimal)


def _backward(kept: PyTree, pull: PyTree) -> tuple[None, Array]:
    """The gradient with respect to ``x``: the sum over the models, one after another."""
    shared, x = kept
    *_, bank, first = shared

    def add(number: Array, total: Array) -> Array:
        said, back = jax.vjp(functools.partial(_one, shared, number), x)
        cotangent = jax.tree.map(lambda rows, now: _cotangent(rows, number, now), pull, said)
        return total + back(cotangent)[0]

    return None, loops.fori_loop(first, bank.filled, add, jnp.zeros_like(x))


def _cotangent(rows: Any, number: Array, now: Array) -> Any:
    """One model's part of the cotangent ``rows``; zeros like ``now`` if there is none."""
    if not jnp.issubdtype(now.dtype, jnp.inexact):
        return np.zeros(now.shape, jax.dtypes.float0)
    if isinstance(rows, SymbolicZero):
        return jnp.zeros_like(now)
    return rows[:, number].astype(now.dtype)


_all.defvjp(_forward, _backward, symbolic_zeros=True)
