"""Arithmetic on the ends of intervals, rounded outward."""

import functools
import itertools

import jax.numpy as jnp
from jax.typing import DTypeLike

from wdjax.bounds.domain import Array, tiny


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


def fitted(
    lower: Array, upper: Array, dtype: DTypeLike, peak: Array | float = 0.0
) -> tuple[Array, Array]:
    """Open where an end, or a sum on the way of size ``peak``, is beyond what a dtype holds.

    On both sides: what is too large is infinite in some dtypes and NaN in others.
    """
    info = jnp.finfo(dtype)
    fits = (lower >= float(info.min)) & (upper <= float(info.max)) & (peak <= float(info.max))
    return jnp.where(fits, lower, -jnp.inf), jnp.where(fits, upper, jnp.inf)


def widen(lower: Array, upper: Array, ulps: float) -> tuple[Array, Array]:
    """Outward by a few units in the last place; 0 stays 0, and what overflowed is open.

    By factors: the units of a small number may be below the smallest float, and lost.
    """
    unit = ulps * float(jnp.finfo(lower.dtype).eps)
    less, more = 1 - unit, 1 + unit
    low = lower * jnp.where(lower > 0, less, more)
    high = upper * jnp.where(upper > 0, more, less)
    return jnp.where(lower < jnp.inf, low, -jnp.inf), jnp.where(upper > -jnp.inf, high, jnp.inf)


def opened(lower: Array, upper: Array, signed: Array, ulps: float) -> tuple[Array, Array]:
    """Outward also by what is lost below the smallest float; where not ``signed``, not below 0."""
    lower, upper = widen(lower, upper, ulps)
    lost = tiny(lower.dtype)
    return jnp.where(signed, lower - lost, lower), upper + lost
