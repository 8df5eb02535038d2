"""Numbers that cannot be traced or have no gradient in reverse mode, and which say what has."""

from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call

from wdjax.checks import validate
from wdjax.core import Array, PyTree

TWIN = "certify.trainable_bounds, which can be traced and differentiated"


def host_only(name: str, instead: str, *trees: PyTree) -> None:
    """A ValueError inside a trace, which says what to take instead."""
    if validate.traced(*trees) or validate.staged():
        raise ValueError(
            f"{name} works on the host, outside of jit, vmap and grad: call it there, or take "
            f"{instead}."
        )


def forward_only(value: Array, instead: str) -> Array:
    """The same number; a gradient in reverse mode is a ValueError that says what to take instead.

    Their programs have loops of unknown length, of which JAX has derivatives in forward mode only.
    """

    def refuse(_: Any, change: Array) -> Array:
        raise ValueError(
            "these bounds have no gradient in reverse mode, since their loops have no fixed "
            f"length; take {instead}, or forward mode (jax.jvp, jax.jacfwd)."
        )

    def on(change: Array) -> Array:
        try:
            return linear_call(lambda _, t: t, refuse, (), change)
        except NotImplementedError:  # Linear calls have no rule for batches: of all at once.
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
