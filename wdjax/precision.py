"""How numbers that have to be proved are computed, whatever JAX is set to."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Float64 within."""
    # Which jax 0.7 has among its experiments.
    home: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    with home.enable_x64(True), promoted():
        yield


@contextlib.contextmanager
def highest() -> Iterator[None]:
    """Matrix products of the highest precision within."""
    with jax.default_matmul_precision("highest"), promoted():
        yield


@contextlib.contextmanager
def promoted() -> Iterator[None]:
    """JAX's usual promotion of types and ranks within: interpreters of programs rely on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def widened(tree: Any) -> Any:
    """The same pytree with its floats in float64, inside :func:`float64`."""

    def leaf(t: Any) -> Any:
        real = hasattr(t, "dtype") and jnp.issubdtype(t.dtype, jnp.floating)
        return jnp.asarray(t, jnp.float64) if real else t

    return jax.tree.map(leaf, tree)
