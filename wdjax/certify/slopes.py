r"""Slopes of a row's own: every lower bound maximised over its lower lines (alpha-CROWN).

Where a rectifier is open, any slope in [0, 1] through the origin lies below it, so that each step's
bound is sound and the best of them is kept. Rows share nothing, which makes their slopes
independent even where they bound the same neurons of one sample.

Source: Xu et al. [xu2021]; here each row has slopes of its own, also of intermediate bounds.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from wdjax.certify import crown
from wdjax.certify.coefficients import Coefficients, Rows
from wdjax.certify.domain import Array

_RATE, _DECAY = 0.25, 0.95
_MEANS = (0.9, 0.999)

Slopes = dict[int, Array]


def optimised(
    state: crown.Pass, coefficients: Mapping[int, Coefficients], rows: Rows, steps: int
) -> Array:
    """Lower bounds as of :func:`crown.backward`, ``[G, R]``, the best of Adam's steps.

    Cost: ``steps`` times three backward passes, and one.
    """
    seen: dict[int, tuple[Array, Array]] = {}
    usual = crown.backward(state, coefficients, rows, record=seen)
    if not seen:
        return usual
    # The first step has the usual slopes: of the pass above no more is computed than these.
    worst = jnp.full_like(usual, -jnp.inf)
    begun = {place: own for place, (own, _) in seen.items()}

    def height(slopes: Slopes) -> tuple[Array, Array]:
        low = crown.backward(state, coefficients, rows, slopes=slopes)
        return jnp.sum(jnp.where(jnp.isfinite(low), low, 0.0)), low

    def step(i: Array, carry: tuple[Slopes, Moments, Array]) -> tuple[Slopes, Moments, Array]:
        slopes, moments, best = carry
        (_, low), slope = jax.value_and_grad(height, has_aux=True)(slopes)
        slopes, moments = climbed(i, slopes, moments, slope, _RATE * _DECAY**i)
        slopes = jax.tree.map(lambda s: jnp.clip(s, 0.0, 1.0), slopes)
        return slopes, moments, jnp.maximum(best, low)

    slopes, _, best = lax.fori_loop(0, steps, step, (begun, Moments.blank(begun), worst))
    return jnp.maximum(best, height(slopes)[1])


class Moments(NamedTuple):
    """What Adam keeps."""

    first: Slopes
    second: Slopes

    @classmethod
    def blank(cls, like: Slopes) -> "Moments":
        zeros = jax.tree.map(jnp.zeros_like, like)
        return cls(zeros, zeros)


def climbed(
    i: Array, now: Slopes, moments: Moments, slope: Slopes, rate: Array
) -> tuple[Slopes, Moments]:
    """Adam's step number ``i`` upwards, from 0; none where it is not finite."""
    a, b = _MEANS
    first = jax.tree.map(lambda m, g: a * m + (1 - a) * g, moments.first, slope)
    second = jax.tree.map(lambda v, g: b * v + (1 - b) * g**2, moments.second, slope)

    def moved(s: Array, m: Array, v: Array) -> Array:
        size = jnp.sqrt(v / (1 - b ** (i + 1)))
        new = s + rate / (1 - a ** (i + 1)) * m / (size + 1e-12)
        return jnp.where(jnp.isfinite(new), new, s)

    return jax.tree.map(moved, now, first, second), Moments(first, second)
