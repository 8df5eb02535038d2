"""Float64 where numbers have to be proved, whatever JAX is set to."""

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
    with home.enable_x64(True):
        yield


def widened(tree: Any) -> Any:
    """The same pytree with its floats in float64, inside :func:`float64`."""

    def leaf(t: Any) -> Any:
        real = hasattr(t, "dtype") and jnp.issubdtype(t.dtype, jnp.floating)
        return jnp.asarray(t, jnp.float64) if real else t

    return jax.tree.map(leaf, tree)
