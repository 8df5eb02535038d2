"""Arithmetic on the ends of intervals, rounded outward."""

import functools
import itertools

import jax.numpy as jnp
from jax.typing import DTypeLike

from wdjax.certify.domain import Array, tiny

_ULPS = 16


def corners(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Ends of a product. Infinite ends are overflows, so that ``0 * inf`` is NaN, and open."""
    products = [x * y for x, y in itertools.product(a, b)]
    lower, upper = widen(
        functools.reduce(jnp.minimum, products), functools.reduce(jnp.maximum, products), 2
    )
    lost = tiny(lower.dtype) * (_nonzero(a) & _nonzero(b))
    return lower - lost, upper + lost


def _nonzero(ends: tuple[Array, Array]) -> Array:
    return (ends[0] != 0) | (ends[1] != 0)


def fitted(lower: Array, upper: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """What is too large for a dtype is infinite."""
    most = float(jnp.finfo(dtype).max)
    lower = jnp.where(lower >= -most, lower, -jnp.inf)
    return lower, jnp.where(upper <= most, upper, jnp.inf)


def widen(lower: Array, upper: Array, ulps: int = _ULPS) -> tuple[Array, Array]:
    """Outward by a few units in the last place; 0 stays 0."""
    unit = ulps * float(jnp.finfo(lower.dtype).eps)
    return lower - unit * jnp.abs(lower), upper + unit * jnp.abs(upper)
