"""Errors for functions that cannot be traced or have no reverse-mode gradient, naming another."""

from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call

from wdjax.checks import validate
from wdjax.core import Array, PyTree

TRACES = "which can be traced and differentiated"
TWIN = f"certify.trainable_bounds, {TRACES}"
LIPSCHITZ_TWIN = f"lipschitz.trainable_lipschitz, {TRACES}"
SEARCH_TWIN = "wdjax.search with one of its attacks, which can be traced"
FORWARD = "forward mode (jax.jvp, jax.jacfwd)"


def host_only(name: str, instead: str, *trees: PyTree) -> None:
    """Raises a ValueError inside a trace; it names the alternative ``instead``."""
    if validate.traced(*trees) or validate.staged():
        raise ValueError(
            f"{name} works on the host, outside of jit, vmap and grad: call it there, or take "
            f"{instead}."
        )


def forward_only(value: Array, instead: str, name: str = "these bounds") -> Array:
    """The identity on ``value``, of any shape, whose reverse-mode gradient is a ValueError.

    For results of loops of unknown length, which JAX differentiates in forward mode only. The error
    says that ``name`` have no gradient, and names the alternative ``instead``.
    """

    def refuse(_: Any, change: Array) -> Array:
        raise ValueError(
            f"{name} have no gradient in reverse mode, since their loops have no fixed length; "
            f"take {instead}."
        )

    def on(change: Array) -> Array:
        try:
            return linear_call(lambda _, t: t, refuse, (), change)
        except NotImplementedError:  # A linear call has no vmap rule: apply it to the whole batch.
            return batched(change)

    @custom_vmap
    def batched(change: Array) -> Array:
        return change

    @batched.def_vmap
    def _(_: int, moved: list[bool], change: Array) -> tuple[Array, bool]:
        return on(change), moved[0]

    @jax.custom_jvp
    def same(value: Array) -> Array:
        return value

    @same.defjvp
    def _(values: tuple[Array], changes: tuple[Array]) -> tuple[Array, Array]:
        return values[0], on(changes[0])

    return same(value)
