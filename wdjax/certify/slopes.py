r"""Slopes of a row's own: every lower bound maximised over its lower lines (alpha-CROWN).

Where a rectifier is open, any slope in [0, 1] through the origin lies below it, so that each step's
bound is sound and the best of them is kept. Rows share nothing, which makes their slopes
independent even where they bound the same neurons of one sample.

Source: Xu et al. [xu2021]; here each row has slopes of its own, also of intermediate bounds.
"""

from collections.abc import Mapping

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

    Cost: ``steps`` times three backward passes.
    """
    begun: Slopes = {}
    best = crown.backward(state, coefficients, rows, record=begun)
    if not begun:
        return best

    def height(slopes: Slopes) -> tuple[Array, Array]:
        low = crown.backward(state, coefficients, rows, slopes=slopes)
        return jnp.sum(jnp.where(jnp.isfinite(low), low, 0.0)), low

    def step(
        i: Array, carry: tuple[Slopes, Slopes, Slopes, Array]
    ) -> tuple[Slopes, Slopes, Slopes, Array]:
        slopes, first, second, best = carry
        (_, low), slope = jax.value_and_grad(height, has_aux=True)(slopes)
        a, b = _MEANS
        first = jax.tree.map(lambda m, g: a * m + (1 - a) * g, first, slope)
        second = jax.tree.map(lambda v, g: b * v + (1 - b) * g**2, second, slope)
        rate = _RATE * _DECAY**i / (1 - a ** (i + 1))

        def moved(s: Array, m: Array, v: Array) -> Array:
            size = jnp.sqrt(v / (1 - b ** (i + 1)))
            new = s + rate * m / (size + 1e-12)
            return jnp.clip(jnp.where(jnp.isfinite(new), new, s), 0.0, 1.0)

        return jax.tree.map(moved, slopes, first, second), first, second, jnp.maximum(best, low)

    zeros = jax.tree.map(jnp.zeros_like, begun)
    slopes, _, _, best = lax.fori_loop(0, steps, step, (begun, zeros, zeros, best))
    return jnp.maximum(best, height(slopes)[1])
