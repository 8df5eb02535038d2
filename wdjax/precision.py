"""Contexts that fix the precision of computations for proofs, whatever JAX's settings are."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """A context in which JAX computes in float64."""
    # In jax 0.7 it is in ``jax.experimental``.
    home: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    with home.enable_x64(True), promoted():
        yield


@contextlib.contextmanager
def highest() -> Iterator[None]:
    """A context with matrix products of the highest precision."""
    with jax.default_matmul_precision("highest"), promoted():
        yield


@contextlib.contextmanager
def promoted() -> Iterator[None]:
    """A context with JAX's usual promotion of types and ranks, which jaxpr interpreters need."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def widened(tree: Any) -> Any:
    """The pytree with its floats in float64; to be called inside :func:`float64`."""

    def leaf(t: Any) -> Any:
        real = hasattr(t, "dtype") and jnp.issubdtype(t.dtype, jnp.floating)
        return jnp.asarray(t, jnp.float64) if real else t

    return jax.tree.map(leaf, tree)
