r"""alpha-CROWN: every lower bound maximised over the lower slopes of unstable ReLUs.

Any line through the origin with slope in [0, 1] lies below a ReLU, so each step's bound is sound,
and the best is kept. Each row has its own slopes, even for the same neurons of the same sample.

Source: Xu et al. [xu2021]; here each row has slopes of its own, also of intermediate bounds.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from wdjax import loops, norms
from wdjax.bounds import passes
from wdjax.bounds.coefficients import Coefficients, Rows
from wdjax.bounds.domain import Array

_RATE, _DECAY = 0.25, 0.95
_MEANS = (0.9, 0.999)

Slopes = dict[int, Any]
"""Arrays ``[..., *shape]`` for bounds ``[...]``, in mappings as in :data:`passes.Slopes`."""


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
    seen: passes.Record = {}
    usual = passes.backward(state, coefficients, rows, record=seen)
    if not jax.tree.leaves(seen):
        return BestSlopes(usual, {})

    def low(slopes: Slopes) -> Array:
        return passes.backward(state, coefficients, rows, slopes=slopes)

    # The first step uses the default slopes; unused results of the pass above are not computed.
    defaults, most = (_each(field, seen) for field in ("slopes", "most"))
    begun = begun or defaults
    most = {i: most.get(i, 1.0) for i in begun}  # What meets no coefficient does not matter.
    worst = BestSlopes(jnp.full_like(usual, -jnp.inf), begun)
    return maximised(low, worst, most, steps, _RATE)


class BestSlopes(NamedTuple):
    """The highest bounds so far, and the slopes that gave them."""

    low: Array
    slopes: Slopes

    def or_else(self, low: Array, slopes: Slopes) -> "BestSlopes":
        gain = low > self.low

        def kept(new: Array, old: Array) -> Array:
            return jnp.where(norms.spread(gain, new), new, old)

        return BestSlopes(jnp.where(gain, low, self.low), jax.tree.map(kept, slopes, self.slopes))


def _each(field: str, seen: passes.Record) -> Slopes:
    """One field of each :class:`passes.Free`."""
    return jax.tree.map(
        lambda free: getattr(free, field), seen, is_leaf=lambda one: isinstance(one, passes.Free)
    )


_Climb: TypeAlias = tuple[Array, Slopes, optax.OptState, BestSlopes, Array, Array]

_LOOK = 3
"""Number of steps after which their gain is looked at."""


def maximised(low: Callable[[Slopes], Array], *args: Any, **how: Any) -> BestSlopes:
    """:func:`climbed`, and the bounds by the last slopes."""
    best, last = climbed(low, *args, **how)
    return best.or_else(low(last), last)


def climbed(
    low: Callable[[Slopes], Array],
    begun: BestSlopes,
    most: Slopes,
    steps: int | Array,
    rate: float,
    until: float = jnp.inf,
    patience: float = 0.0,
    least: Slopes | None = None,
) -> tuple[BestSlopes, Slopes]:
    """The best of Adam's steps between ``least`` and ``most``, until all are above a level; and the
    slopes after the last step, whose bounds are not among them.

    Args:
      low: maps slopes to bounds of any shape, each of which depends on its own slopes only.
      begun: bounds to improve on, and the first slopes.
      most: upper limits of the slopes, arrays or numbers.
      steps: maximum number of steps.
      rate: Adam's first step size; it decays geometrically.
      until: stops early once all bounds exceed this.
      patience: stops early where three steps raised the bounds below ``until`` by less than this
        share of their distance from it, summed; 0 for never.
      least: lower limits of the slopes; 0 by default.

    A slope whose step is not finite stays as it is.
    """
    least = jax.tree.map(lambda _: 0.0, most) if least is None else least
    ascent = optax.adam(optax.exponential_decay(-rate, 1, _DECAY), *_MEANS, eps=1e-12)

    def height(slopes: Slopes) -> tuple[Array, Array]:
        found = low(slopes)
        return jnp.sum(jnp.where(jnp.isfinite(found), found, 0.0)), found

    def moved(now: Array, change: Array, low: Array | float, high: Array | float) -> Array:
        new = now + change
        return jnp.clip(jnp.where(jnp.isfinite(new), new, now), low, high)

    def step(carry: _Climb) -> _Climb:
        i, now, memory, best, mark, rises = carry
        (_, found), slope = jax.value_and_grad(height, has_aux=True)(now)
        best = best.or_else(found, now)
        changes, memory = ascent.update(slope, memory)
        now = jax.tree.map(moved, now, changes, least, most)
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
    return best, now
