"""In what precision the library computes, whatever JAX's settings are."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

P = ParamSpec("P")
T = TypeVar("T")


def full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that measures a model: its matrix products are those of float32.

    By default accelerators round what they multiply: GPUs to TF32, TPUs to bfloat16. That is
    another model than the one certified. On an H100 up to 44 % of the nearest flips of a model in
    TF32 were not flips in float32. What the user set as ``jax_default_matmul_precision`` is kept.

    >>> seen = []
    >>> def note(w, x):
    ...     seen.append(jax.config.jax_default_matmul_precision)
    ...     return x @ w
    >>> with jax.default_matmul_precision("tensorfloat32"):
    ...     _ = full_precision(note)(jnp.eye(2), jnp.ones((1, 2)))
    >>> _ = full_precision(note)(jnp.eye(2), jnp.ones((1, 2)))
    >>> seen
    ['tensorfloat32', 'highest']
    """
    return _unless_set("highest", function)


def training_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that trains: matrix products are JAX's default ones on the device.

    Those of the attacks that it calls, too, which by themselves run in full precision. What the
    user set as ``jax_default_matmul_precision`` is kept.
    """
    return _unless_set("default", function)


def _unless_set(precision: str, function: Callable[P, T]) -> Callable[P, T]:
    """The function in a precision of matrix products, unless the user set another."""

    @functools.wraps(function)
    def run(*given: P.args, **options: P.kwargs) -> T:
        config: Any = jax.config
        if config.jax_default_matmul_precision is not None:
            return function(*given, **options)
        with jax.default_matmul_precision(precision):
            return function(*given, **options)

    return run


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
    """The pytree with its floats in float64; to be called inside :func:`float64`.

    On the host where values are known: XLA would flush denormal numbers to 0.
    """

    def leaf(t: Any) -> Any:
        if not (hasattr(t, "dtype") and jnp.issubdtype(t.dtype, jnp.floating)):
            return t
        known = not isinstance(t, jax.core.Tracer)
        return jnp.asarray(np.asarray(t).astype(np.float64) if known else t, jnp.float64)

    return jax.tree.map(leaf, tree)
