"""Linear minimisation over the ball: the best plan if the loss were linear."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax import loops
from wdjax.core import Array
from wdjax.image import plans, prices
from wdjax.image.prices import NOTHING, ImageProblem, Spent, find_price

_FLOOR = -60.0
"""Log-weights, relative to the largest of their sender, below which a flow is 0."""
_FEW, _MANY = 2, 30
"""Maximum number of Newton steps for the price of distance: between sweeps, and otherwise."""
_ROUGH = 0.1
"""Relative error of the cost at the first price, if sweeps change it afterwards."""


class Prices(NamedTuple):
    """The dual variables of a linear minimisation, a warm start: ``[n, ...]`` leaves."""

    distance: Array
    """``[n]``: the price of distance, in units of the temperature."""
    room: Array
    """``[n, C, L]``: logarithms of the pixels' discounts, at most 0; 0 if a pixel is not full."""


def no_prices(x: Array) -> Prices:
    """Prices for a cold start."""
    return Prices(jnp.ones(len(x), x.dtype), jnp.zeros_like(x))


def vertex(
    task: ImageProblem,
    gradient: Array,
    temperature: Array | float,
    known: Prices,
    sweeps: int,
    relax: Array | float = 2.0,
) -> tuple[Array, Prices]:
    """The plan of largest gain plus ``temperature`` times entropy, within budget and capacities.

    ``plan = x softmax((gradient - price c - caps) / temperature)`` row by row. Every sweep updates
    the caps (prices of pixels that receive more than their capacity), and then the price of
    distance. The returned plan keeps budget and capacities exactly, and its rows up to rounding.

    Sweeps multiply weights computed once, at the first price of distance and the given caps, so
    that they need no exponentials of plans.

    Args:
      task: the ball of every sample.
      gradient: ``[n, C, L]``, of the loss to be raised; its largest entry is about 1.
      temperature: weight of the entropy, in units of the gradient.
      known: prices to start from.
      sweeps: with 0 the repair empties overfull pixels.
      relax: over-relaxation of the caps.
    """
    space, x, stencil = task.space, task.x, task.space.stencil
    scaled = gradient / temperature
    top = 2.0 / jnp.asarray(temperature, x.dtype) + 2 * abs(_FLOOR)
    room = known.room if sweeps else jnp.zeros_like(known.room)
    rough = _ROUGH if sweeps else prices.EXACT
    price = _first_price(task, scaled + room, known.distance, top, rough)
    weights = _weights(task, scaled + room, price)
    if sweeps == 0:
        plan = _rows(task, weights)
        return plans.contain(space, plan, x, task.weights, task.budget), Prices(price, room)
    at = _sweeping(task, weights, room, price, top)
    begun = jnp.zeros_like(price), jnp.zeros_like(room)
    change, drop = loops.fori_loop(0, sweeps, lambda _, now: _sweep(at, relax, *now), begun)
    discount, each, change = _settle(at, change, drop, _MANY)
    plan = stencil.scale(weights * _dear(at, change)[..., None], discount) * each[:, :, None]
    plan = plans.contain(space, plan, x, task.weights, task.budget)
    return plan, Prices(price + change, jnp.clip(room + drop, 2 * _FLOOR, 0.0))


def _first_price(
    task: ImageProblem, targets: Array, guess: Array, top: Array, exact: float
) -> Array:
    """The price of distance ``[n]`` under fixed caps, to a relative error of the cost ``exact``.

    ``targets`` ``[n, C, L]`` are the logarithms of what mass is worth in each pixel.
    """
    stencil, power = task.space.stencil, task.space.power
    cells = jnp.asarray(stencil.valid()[stencil.center])[None, None]
    sums = prices.log_levels(stencil, jnp.where(cells, targets, NOTHING), power)

    def spend(price: Array) -> Spent:
        return prices.log_spent(task, sums, price)

    return find_price(task, spend, guess, _MANY, top, exact=exact)


class _Sweeping(NamedTuple):
    """The constants of all sweeps; prices and caps are changes of the first ones."""

    task: ImageProblem
    weights: Array
    """``[n, C, O, L]``, at the first price of distance and the given caps."""
    room: Array
    """``[n, C, L]``: the given caps."""
    lowest: Array
    """``[n]``: the least change of the price."""
    top: Array
    """The largest price."""
    levels: Array
    """``[D]``: the distinct costs."""
    members: Array
    """``[O]``: the index of each offset's cost among them."""


def _sweeping(
    task: ImageProblem, weights: Array, room: Array, price: Array, top: Array
) -> _Sweeping:
    """A negative change of the price ``[n]`` is bounded by the range of floats."""
    levels, members = task.space.stencil.classes(task.space.power)
    dearest = float(levels[-1]) * jnp.max(task.weights, axis=1)
    lowest = -jnp.minimum(price, abs(_FLOOR) / jnp.maximum(dearest, 1e-6))
    costs = jnp.asarray(levels, task.x.dtype)
    return _Sweeping(task, weights, room, lowest, top, costs, jnp.asarray(members))


def _dear(at: _Sweeping, change: Array) -> Array:
    """``[n, C, O]``: the factors of all weights by a change ``[n]`` of the price of distance."""
    far = -change[:, None, None] * at.task.weights[:, :, None] * at.levels[None, None]
    return jnp.exp(far)[:, :, at.members]


def _settle(at: _Sweeping, change: Array, drop: Array, steps: int) -> tuple[Array, Array, Array]:
    """Discounts and the senders' row factors ``[n, C, L]``, and the change of price ``[n]``.

    ``drop`` ``[n, C, L]`` is the change of the caps for which they are computed.
    """
    task, discount = at.task, jnp.exp(drop)
    held = task.space.stencil.levels(at.weights, discount, task.space.power)

    def spend(up: Array) -> Spent:
        return _spent(task, held, at.levels, up + at.lowest)[1]

    moved = find_price(task, spend, change - at.lowest, steps, at.top)
    return discount, _spent(task, held, at.levels, moved + at.lowest)[0], moved + at.lowest


def _sweep(at: _Sweeping, relax: Array | float, change: Array, drop: Array) -> tuple[Array, Array]:
    """One update of the change of price ``[n]`` and then of the caps ``[n, C, L]``."""
    space = at.task.space
    discount, each, change = _settle(at, change, drop, _FEW)
    received = discount * space.stencil.receive(at.weights, each, _dear(at, change))
    over = jnp.log(jnp.maximum(received, 1e-20) / space.high)
    drop = jnp.clip(drop - relax * over, _FLOOR, -at.room)
    cells = jnp.asarray(space.stencil.valid()[space.stencil.center])[None, None]
    return change, jnp.where(cells, drop, 0.0)


def _weights(task: ImageProblem, targets: Array, price: Array) -> Array:
    """``[n, C, O, L]``: unnormalised plan weights ``exp(target - price cost)`` of every sender.

    ``targets`` ``[n, C, L]`` are values of mass in the receiving pixels, in units of the
    temperature; ``price`` ``[n]`` is that of distance. Weights are relative to each sender's
    largest and 0 below ``exp(_FLOOR)``, except the weight of staying, which keeps at least that.
    """
    stencil = task.space.stencil
    costs = jnp.asarray(stencil.costs(task.space.power), targets.dtype)
    dear = price[:, None, None] * task.weights[:, :, None] * costs[None, None]
    valid = jnp.asarray(stencil.valid())[None, None]
    scores = stencil.of_targets(targets) - dear[..., None]
    best = jnp.max(jnp.where(valid, scores, -jnp.inf), axis=2, keepdims=True)
    best = jax.lax.stop_gradient(best)  # Rows are scaled to their sums: it changes no derivative.
    scores = scores - jnp.where(jnp.isfinite(best), best, 0.0)
    kept = jnp.where(valid & (scores > _FLOOR), jnp.exp(jnp.maximum(scores, _FLOOR)), 0.0)
    # A sender with better targets keeps some weight of staying, which a higher price may need.
    home = jnp.maximum(kept[:, :, stencil.center], jnp.exp(jnp.asarray(_FLOOR, targets.dtype)))
    home = jnp.where(valid[:, :, stencil.center], home, 0.0)
    return kept.at[:, :, stencil.center].set(home)


def _rows(task: ImageProblem, weights: Array) -> Array:
    """``[n, C, O, L]``: the plan proportional to the weights in which every pixel sends ``x``."""
    total = jnp.sum(weights, axis=2)
    return weights * (task.x / jnp.where(total > 0, total, 1.0))[:, :, None]


def _spent(task: ImageProblem, sums: Array, levels: Array, price: Array) -> tuple[Array, Spent]:
    """The senders' row factors ``[n, C, L]``, and the plan's cost at a price of distance.

    ``sums`` ``[n, C, D, L]`` are weights summed over a sender's targets of equal cost; ``levels``
    ``[D]`` are those costs; ``price`` ``[n]`` may be negative, since it is a change of price. A row
    factor times the weights is what the pixel sends.
    """
    dear = jnp.exp(-price[:, None, None] * task.weights[:, :, None] * levels[None, None])
    none = jnp.zeros_like(task.x)

    def add(offset: Array, totals: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        whole, first, second = totals
        held, level = sums[:, :, offset] * dear[:, :, offset, None], levels[offset]
        return whole + held, first + level * held, second + level**2 * held

    whole, first, second = loops.fori_loop(0, len(levels), add, (none, none, none))
    each = task.x * prices.inverse(whole)
    return each, prices.spent(task, whole, first, second)
