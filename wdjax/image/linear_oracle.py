"""Linear minimisation over the ball: where mass should go if the loss were linear."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax.core import Array
from wdjax.image import plans, prices
from wdjax.image.prices import NOTHING, ImageProblem, Spent, find_price

_FLOOR = -60.0
"""Logarithms of weights, against the largest of their sender, that count as nothing."""
_FEW, _MANY = 2, 30
"""Steps to the price of distance at most: between sweeps, and otherwise."""
_ROUGH = 0.1
"""Relative error of what the first price spends, where sweeps move it anyway."""


class Prices(NamedTuple):
    """The dual of a linear minimisation, from which the next one begins: ``[n, ...]`` leaves."""

    distance: Array
    """``[n]``: the price of cost, in units of the temperature."""
    room: Array
    """``[n, C, L]``: logarithms of a pixel's discount, at most 0; 0 where it is not full."""


def no_prices(x: Array) -> Prices:
    """Everything is free."""
    return Prices(jnp.ones(len(x), x.dtype), jnp.zeros_like(x))


def vertex(
    task: ImageProblem,
    gradient: Array,
    temperature: Array | float,
    known: Prices,
    sweeps: int,
    relax: Array | float = 2.0,
) -> tuple[Array, Prices]:
    """The plan of largest gain plus ``temperature`` times entropy; with sweeps, within the caps.

    ``plan = x softmax((gradient - price c - caps) / temperature)`` row by row. Every sweep sets the
    caps' prices of pixels that receive more than they hold, and the price of distance after it. The
    plan returned keeps budget and capacities exactly, and its rows but for rounding.

    Sweeps multiply weights that were computed once, at the price of distance for the caps' prices
    that are known, so that they need no exponentials of plans.

    Args:
      task: the ball of every sample.
      gradient: ``[n, C, L]``, of the loss to be raised, its largest entry about 1.
      temperature: of the entropy, in units of the gradient.
      known: prices to begin at.
      sweeps: 0 leaves full pixels to the repair.
      relax: over-relaxation of the caps' prices.
    """
    space, x, stencil = task.space, task.x, task.space.stencil
    scaled, cells = gradient / temperature, jnp.asarray(stencil.valid()[stencil.center])[None, None]
    top = 2.0 / jnp.asarray(temperature, x.dtype) + 2 * abs(_FLOOR)
    room = known.room if sweeps else jnp.zeros_like(known.room)
    sums = prices.log_levels(stencil, jnp.where(cells, scaled + room, NOTHING), space.power)
    price = find_price(
        task,
        lambda price: prices.log_spent(task, sums, price),
        known.distance,
        _MANY,
        top,
        exact=_ROUGH if sweeps else prices.EXACT,
    )
    weights = _weights(task, scaled + room, price)
    if sweeps == 0:
        plan = _rows(task, weights)
        return plans.contain(space, plan, x, task.weights, task.budget), Prices(price, room)
    levels = jnp.asarray(stencil.classes(space.power)[0], x.dtype)
    members = jnp.asarray(stencil.classes(space.power)[1])
    # Prices of distance are now changes, negative ones no further than floats go.
    dearest = float(stencil.classes(space.power)[0][-1]) * jnp.max(task.weights, axis=1)
    lowest = -jnp.minimum(price, abs(_FLOOR) / jnp.maximum(dearest, 1e-6))

    def dear(change: Array) -> Array:
        far = -change[:, None, None] * task.weights[:, :, None] * levels[None, None]
        return jnp.exp(far)[:, :, members]

    def settle(change: Array, drop: Array, steps: int) -> tuple[Array, Array, Array]:
        """Discounts, senders' factors and the price's change, for caps' prices changed by drop."""
        discount = jnp.exp(drop)
        held = stencil.levels(weights, discount, space.power)
        moved = find_price(
            task,
            lambda up: _spent(task, held, levels, up + lowest)[1],
            change - lowest,
            steps,
            top,
        )
        return discount, _spent(task, held, levels, moved + lowest)[0], moved + lowest

    def sweep(_: int, carried: tuple[Array, Array]) -> tuple[Array, Array]:
        discount, each, change = settle(*carried, _FEW)
        received = discount * stencil.receive(weights, each, dear(change))
        over = jnp.log(jnp.maximum(received, 1e-20) / space.high)
        drop = jnp.clip(carried[1] - relax * over, _FLOOR, -room)
        return change, jnp.where(cells, drop, 0.0)

    change, drop = jax.lax.fori_loop(
        0, sweeps, sweep, (jnp.zeros_like(price), jnp.zeros_like(room))
    )
    discount, each, change = settle(change, drop, _MANY)
    plan = stencil.scale(weights * dear(change)[..., None], discount) * each[:, :, None]
    plan = plans.contain(space, plan, x, task.weights, task.budget)
    return plan, Prices(price + change, jnp.clip(room + drop, 2 * _FLOOR, 0.0))


def _weights(task: ImageProblem, targets: Array, price: Array) -> Array:
    """``exp(targets - price c)`` ``[n, C, O, L]``, against the largest of every sender."""
    stencil = task.space.stencil
    costs = jnp.asarray(stencil.costs(task.space.power), targets.dtype)
    dear = price[:, None, None] * task.weights[:, :, None] * costs[None, None]
    valid = jnp.asarray(stencil.valid())[None, None]
    scores = stencil.spread(targets) - dear[..., None]
    best = jnp.max(jnp.where(valid, scores, -jnp.inf), axis=2, keepdims=True)
    scores = scores - jnp.where(jnp.isfinite(best), best, 0.0)
    kept = jnp.where(valid & (scores > _FLOOR), jnp.exp(jnp.maximum(scores, _FLOOR)), 0.0)
    # Whoever has somewhere better to go may still stay, as a dearer price can make him.
    home = jnp.maximum(kept[:, :, stencil.center], jnp.exp(jnp.asarray(_FLOOR, targets.dtype)))
    home = jnp.where(valid[:, :, stencil.center], home, 0.0)
    return kept.at[:, :, stencil.center].set(home)


def _rows(task: ImageProblem, weights: Array) -> Array:
    """Weights as a plan, whose rows sum to ``x``."""
    total = jnp.sum(weights, axis=2)
    return weights * (task.x / jnp.where(total > 0, total, 1.0))[:, :, None]


def _spent(task: ImageProblem, sums: Array, levels: Array, price: Array) -> tuple[Array, Spent]:
    """Factors of the senders' rows ``[n, C, L]``, and what is spent at a price of distance, from
    the sums ``[n, C, D, L]`` of equal costs."""
    dear = jnp.exp(-price[:, None, None] * task.weights[:, :, None] * levels[None, None])
    none = jnp.zeros_like(task.x)

    def add(place: Array, totals: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        whole, first, second = totals
        held, level = sums[:, :, place] * dear[:, :, place, None], levels[place]
        return whole + held, first + level * held, second + level**2 * held

    whole, first, second = jax.lax.fori_loop(0, len(levels), add, (none, none, none))
    each = task.x / jnp.maximum(whole, jnp.finfo(whole.dtype).tiny)
    return each, prices.spent(task, whole, first, second)
