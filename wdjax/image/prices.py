"""The price of distance at which the budget is spent, computed in logarithms."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax import distinct, loops
from wdjax.core import Array
from wdjax.image.plans import Space
from wdjax.image.stencil import Stencil

NOTHING = -1e9
"""The logarithm of zero mass: finite, so that differences are finite."""
EXACT = 1e-5
"""Relative error of the cost at which a price is accepted."""


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class ImageProblem:
    """The balls over which is minimised, one for each sample."""

    space: Space = dataclasses.field(metadata={"static": True})
    x: Array
    """``[n, C, L]``"""
    weights: Array
    """``[n, C]``: weights of the channels in the cost."""
    budget: Array
    """``[n]``: the budget, in mass times distance."""


class Spent(NamedTuple):
    """The cost at a price of distance, and its derivative."""

    cost: Array
    """``[n]``"""
    slope: Array
    """``[n]``: the derivative of the cost in the price, at most 0."""


def log_levels(stencil: Stencil, targets: Array, power: float) -> Array:
    """``[n, C, D, L]``: log-sums over a sender's targets, by classes of equal cost."""
    padded, shifts = _pad(stencil, targets), jnp.asarray(stencil.shifts())
    levels, members = stencil.classes(power)
    level_of = jnp.asarray(members)
    shape = (*targets.shape[:-1], len(levels), stencil.length)

    def look(offset: Array) -> Array:
        start = stencil.margin + shifts[offset]
        return jax.lax.dynamic_slice_in_dim(padded, start, stencil.length, -1)

    def highest(offset: Array, best: Array) -> Array:
        known = jax.lax.dynamic_index_in_dim(best, level_of[offset], 2, keepdims=False)
        known = jnp.maximum(known, look(offset))
        return jax.lax.dynamic_update_index_in_dim(best, known, level_of[offset], 2)

    best = jnp.full(shape, NOTHING, padded.dtype)
    best = loops.fori_loop(0, stencil.offsets, highest, best)
    best = jax.lax.stop_gradient(best)

    def add(offset: Array, total: Array) -> Array:
        top = jax.lax.dynamic_index_in_dim(best, level_of[offset], 2, keepdims=False)
        known = jax.lax.dynamic_index_in_dim(total, level_of[offset], 2, keepdims=False)
        known = known + jnp.exp(look(offset) - top)
        return jax.lax.dynamic_update_index_in_dim(total, known, level_of[offset], 2)

    total = loops.fori_loop(0, stencil.offsets, add, jnp.zeros(shape, padded.dtype))
    return best + jnp.log(total)


def log_receive(stencil: Stencil, row: Array, price: Array, power: float) -> Array:
    """``[n, C, L]``: ``log sum_i exp(row_i - price c_ij)`` for every target j; price ``[n, C]``."""
    padded, shifts = _pad(stencil, row), jnp.asarray(stencil.shifts())
    costs = jnp.asarray(stencil.costs(power), row.dtype)

    def look(offset: Array) -> Array:  # By symmetry of offsets, the senders.
        start = stencil.margin + shifts[offset]
        part = jax.lax.dynamic_slice_in_dim(padded, start, stencil.length, -1)
        return part - price[..., None] * costs[offset]

    def highest(offset: Array, best: Array) -> Array:
        return jnp.maximum(best, look(offset))

    best = jnp.full_like(row, 2 * NOTHING)
    best = jax.lax.stop_gradient(loops.fori_loop(0, stencil.offsets, highest, best))

    def add(offset: Array, total: Array) -> Array:
        return total + jnp.exp(look(offset) - best)

    return best + jnp.log(loops.fori_loop(0, stencil.offsets, add, jnp.zeros_like(row)))


def _pad(stencil: Stencil, flat: Array) -> Array:
    """``[..., margin + L + margin]``: logarithms with those of zero mass before and after."""
    room = [(0, 0)] * (flat.ndim - 1) + [(stencil.margin, stencil.margin)]
    return jnp.pad(flat, room, constant_values=NOTHING)


def log_whole(task: ImageProblem, sums: Array, price: Array) -> Array:
    """``[n, C, L]``: log-normalisers of rows, from log-sums ``[n, C, D, L]`` by equal cost."""
    levels = jnp.asarray(task.space.stencil.classes(task.space.power)[0], sums.dtype)
    dear = price[:, None, None] * task.weights[:, :, None] * levels[None, None]
    # The class of cost 0 holds a finite entry, so that no row is empty.
    return jax.nn.logsumexp(sums - dear[..., None], axis=2)


def log_spent(task: ImageProblem, sums: Array, price: Array) -> Spent:
    """Cost and derivative at a price, from log-sums ``[n, C, D, L]`` by equal cost."""
    levels = jnp.asarray(task.space.stencil.classes(task.space.power)[0], sums.dtype)
    dear = price[:, None, None] * task.weights[:, :, None] * levels[None, None]

    def highest(offset: Array, best: Array) -> Array:
        return jnp.maximum(best, sums[:, :, offset] - dear[:, :, offset, None])

    best = jnp.full_like(task.x, 2 * NOTHING)
    best = jax.lax.stop_gradient(loops.fori_loop(0, len(levels), highest, best))

    def add(offset: Array, totals: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        whole, first, second = totals
        held = jnp.exp(sums[:, :, offset] - dear[:, :, offset, None] - best)
        level = levels[offset]
        return whole + held, first + level * held, second + level**2 * held

    none = jnp.zeros_like(task.x)
    whole, first, second = loops.fori_loop(0, len(levels), add, (none, none, none))
    return spent(task, whole, first, second)


def spent(task: ImageProblem, whole: Array, first: Array, second: Array) -> Spent:
    """Cost and derivative from the rows' unnormalised moments of the cost, ``[n, C, L]``."""
    share = inverse(whole)
    mean, weights = first * share, task.weights[:, :, None]
    cost = jnp.sum(mean * task.x * weights, axis=(1, 2))
    slope = jnp.sum((mean**2 - second * share) * task.x * weights**2, axis=(1, 2))
    return Spent(cost, slope)


def inverse(whole: Array) -> Array:
    """``1 / whole``, at most the inverse of the least normal float.

    The derivative ``-1 / whole^2`` would overflow; here ``1 / whole`` multiplies the tangent first.
    """
    size = jax.lax.stop_gradient(1 / jnp.maximum(whole, jnp.finfo(whole.dtype).tiny))
    one = whole * size
    return size / jnp.where(one > 0.5, one, 1.0)


class _Hunt(NamedTuple):
    price: Array
    low: Array
    high: Array
    ratio: Array
    """``[n]``: logarithm of the cost over the budget."""
    turn: Array


def find_price(
    task: ImageProblem,
    spend: Callable[[Array], Spent],
    price: Array,
    steps: int,
    top: Array | float = 1e5,
    exact: float = EXACT,
    unrolled: bool = False,
) -> Array:
    """The price ``[n]`` of distance at which the budget is spent; 0 if the free plan is within it.

    Newton's method inside a bracket ``[0, top]``, from the guess ``price``, until the cost equals
    the budget up to the relative error ``exact``; with ``unrolled`` the loop is differentiable.
    """

    def step(hunt: _Hunt) -> _Hunt:
        price, low, high, _, turn = hunt
        now = spend(price)
        over = now.cost > task.budget
        low, high = jnp.where(over, price, low), jnp.where(over, high, price)
        # Costs fall about exponentially in the price, so Newton's method works on logarithms.
        ratio = jnp.log(jnp.maximum(now.cost, 1e-20) / jnp.maximum(task.budget, 1e-20))
        aim = price - ratio * now.cost / jnp.minimum(now.slope, -1e-20)
        inside = (aim >= low) & (aim <= high) & (now.cost > 1e-6 * task.budget)
        aim = jnp.where(inside & (turn % 4 < 3), aim, (low + high) / 2)
        return _Hunt(jnp.where(jnp.abs(ratio) < exact, price, aim), low, high, ratio, turn + 1)

    def go_on(hunt: _Hunt) -> Array:
        open_ends = (hunt.high - hunt.low) > 1e-6 * hunt.high
        return (hunt.turn < steps) & jnp.any((jnp.abs(hunt.ratio) >= exact) & open_ends)

    low = jnp.zeros_like(price)
    high = jnp.broadcast_to(jnp.asarray(top, price.dtype), price.shape)
    begun = _Hunt(price, low, high, jnp.full_like(price, jnp.inf), jnp.zeros((), jnp.int32))
    if unrolled:
        last = loops.fori_loop(0, steps, lambda _, hunt: step(hunt), begun)
    else:
        last = loops.while_loop(go_on, step, begun)
    return jnp.where(spend(low).cost <= task.budget, 0.0, last.price)
