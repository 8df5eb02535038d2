r"""alpha-CROWN: every lower bound maximised over the lower slopes of unstable ReLUs.

Any line through the origin with slope in [0, 1] lies below a ReLU, so each step's bound is sound,
and the best is kept. Each row has its own slopes, even for the same neurons of the same sample.

Source: Xu et al. [xu2021]; here each row has slopes of its own, also of intermediate bounds.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from wdjax import loops, norms
from wdjax.bounds import passes
from wdjax.bounds.coefficients import Coefficients, Rows
from wdjax.bounds.domain import Array

_RATE, _DECAY = 0.25, 0.95
STEEPEST = 4.0
"""Largest factor of the usual slopes of S-shaped functions."""
_MEANS = (0.9, 0.999)

Slopes = dict[int, Array]


def optimised(
    state: passes.Pass, coefficients: Mapping[int, Coefficients], rows: Rows, steps: int
) -> Array:
    """Lower bounds ``[G, R]`` as of :func:`passes.backward`, the best over ``steps`` steps of Adam.

    Cost: ``3 steps + 1`` backward passes.
    """
    return best(state, coefficients, rows, steps).low


def best(
    state: passes.Pass,
    coefficients: Mapping[int, Coefficients],
    rows: Rows,
    steps: int,
    begun: Slopes | None = None,
) -> "BestSlopes":
    """:func:`optimised`, with the slopes; they are dense if the first ones, ``begun``, are."""
    seen: dict[int, tuple[Array, Array]] = {}
    usual = passes.backward(state, coefficients, rows, record=seen)
    if not seen:
        return BestSlopes(usual, {})

    def low(slopes: Slopes) -> Array:
        return passes.backward(state, coefficients, rows, slopes=slopes)

    # The first step uses the default slopes; unused results of the pass above are not computed.
    begun = begun or {place: first for place, (first, _) in seen.items()}
    worst = BestSlopes(jnp.full_like(usual, -jnp.inf), begun)
    most = {i: 1.0 if state.lines[i].turned is None else STEEPEST for i in begun}
    return maximised(low, worst, most, steps, _RATE)


class BestSlopes(NamedTuple):
    """The highest bounds so far, and the slopes that gave them."""

    low: Array
    slopes: Slopes

    def or_else(self, low: Array, slopes: Slopes) -> "BestSlopes":
        gain = low > self.low
        kept = {i: jnp.where(norms.spread(gain, s), s, self.slopes[i]) for i, s in slopes.items()}
        return BestSlopes(jnp.where(gain, low, self.low), kept)


_Climb: TypeAlias = tuple[Array, Slopes, optax.OptState, BestSlopes, Array, Array]

_LOOK = 3
"""Number of steps after which their gain is looked at."""


def maximised(
    low: Callable[[Slopes], Array],
    begun: BestSlopes,
    most: Mapping[int, Array | float],
    steps: int,
    rate: float,
    until: float = jnp.inf,
    patience: float = 0.0,
    least: Mapping[int, float] | None = None,
) -> BestSlopes:
    """The best of Adam's steps between ``least`` and ``most``, until all are above a level.

    Args:
      low: maps slopes to bounds of any shape, each of which depends on its own slopes only.
      begun: bounds to improve on, and the first slopes.
      most: upper limits of the slopes, by place.
      steps: maximum number of steps.
      rate: Adam's first step size; it decays geometrically.
      until: stops early once all bounds exceed this.
      patience: stops early where three steps raised the bounds below ``until`` by less than this
        share of their distance from it, summed; 0 for never.
      least: lower limits of the slopes, by place; 0 for those that are not named.

    A slope whose step is not finite stays as it is.
    """
    ascent = optax.adam(optax.exponential_decay(-rate, 1, _DECAY), *_MEANS, eps=1e-12)

    def height(slopes: Slopes) -> tuple[Array, Array]:
        found = low(slopes)
        return jnp.sum(jnp.where(jnp.isfinite(found), found, 0.0)), found

    def moved(place: int, now: Array, change: Array) -> Array:
        new = now + change
        end = (least or {}).get(place, 0.0)
        return jnp.clip(jnp.where(jnp.isfinite(new), new, now), end, most[place])

    def step(carry: _Climb) -> _Climb:
        i, now, memory, best, mark, rises = carry
        (_, found), slope = jax.value_and_grad(height, has_aux=True)(now)
        best = best.or_else(found, now)
        changes, memory = ascent.update(slope, memory)
        now = {place: moved(place, value, changes[place]) for place, value in now.items()}
        if patience:
            gap = jnp.maximum(until - best.low, 0.0)
            short = jnp.sum(jnp.where(jnp.isfinite(best.low), gap, 0.0))
            look = (i + 1) % _LOOK == 0
            rises = jnp.where(look, mark - short > patience * mark, rises)
            mark = jnp.where(look, short, mark)
        return i + 1, now, memory, best, mark, rises

    def goes_on(carry: _Climb) -> Array:
        return (carry[0] < steps) & jnp.any(carry[3].low <= until) & carry[-1]

    far = jnp.sum(jnp.zeros_like(begun.low)) + jnp.finfo(begun.low.dtype).max
    climb = jnp.zeros((), jnp.int32), begun.slopes, ascent.init(begun.slopes), begun, far, far > 0
    _, now, _, best, _, _ = loops.while_loop(goes_on, step, climb)
    return best.or_else(low(now), now)
