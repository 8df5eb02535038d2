"""Transport plans: repaired to be feasible, shrunk to a budget, measured."""

from typing import NamedTuple

import jax.numpy as jnp

from wdjax import loops
from wdjax.checks.forward_mode import forward_only
from wdjax.core import Array
from wdjax.image.stencil import Stencil

_SWEEPS = 200
"""Maximum number of rounds that return excess inflow; mostly 5 to 16 suffice."""
_TURNS = 60
"""Iterations of the entropic transport to a given point."""
_FULL = 1e-6
"""How far a pixel may exceed the box before rounding clips it, as a share of the box's width."""
_INSTEAD = (
    "another attack, such as attacks.APGD, or image.entropic_distance for gradients of the distance"
)
"""What has gradients; in forward mode those of the linear oracle may be NaN."""


class Space(NamedTuple):
    """The geometry of transport: window, ground cost and capacity of a pixel."""

    stencil: Stencil
    power: float
    """Power of the Euclidean distance in the cost."""
    high: float
    """The largest value of a pixel."""


def stay(space: Space, x: Array) -> Array:
    """The plan ``[n, C, O, L]`` in which all mass ``x`` ``[n, C, L]`` stays."""
    plan = jnp.zeros((*x.shape[:-1], space.stencil.offsets, space.stencil.length), x.dtype)
    return plan.at[:, :, space.stencil.center].set(x)


def moved(space: Space, plan: Array, weights: Array) -> Array:
    """``[n]``: a plan's cost in mass times distance; ``weights`` ``[n, C]`` of channels."""
    costs = jnp.asarray(space.stencil.costs(space.power), plan.dtype)
    return jnp.einsum("nco,o,nc->n", jnp.sum(plan, axis=3), costs, weights, precision="highest")


def blend(plan: Array, x: Array, share: Array, center: int) -> Array:
    """The mixture of a plan, weight ``share`` ``[n]``, and of the plan in which all mass stays."""
    plan = plan * share[:, None, None, None]
    return plan.at[:, :, center].add((1 - share)[:, None, None] * x)


def exact_rows(space: Space, plan: Array, x: Array) -> Array:
    """Makes rows sum to ``x``: missing mass stays in place, excess is scaled down."""
    total = jnp.sum(plan, axis=2)
    plan = plan * _share(x, total, total > x)[:, :, None]
    missing = jnp.maximum(x - jnp.sum(plan, axis=2), 0.0)
    return plan.at[:, :, space.stencil.center].add(missing)


def uncrowd(space: Space, plan: Array, x: Array) -> Array:
    """Returns the excess of overfull pixels to its senders, which only lowers costs.

    The inflow of an overfull pixel is scaled down to its capacity; the returned mass may overfill
    its senders in turn, so this is repeated. A sample that needs more than 200 rounds is mixed with
    the plan in which all mass stays.
    """
    stencil, center = space.stencil, space.stencil.center
    ceiling = space.high * (1 + _FULL)

    def overfull(received: Array) -> Array:
        return jnp.any(received > ceiling, axis=(1, 2))

    def go_on(carried: tuple[Array, Array, Array]) -> Array:
        _, received, turns = carried
        return jnp.any(overfull(received)) & (turns < _SWEEPS)

    def sweep(carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        plan, received, turns = carried
        crowded = overfull(received)[:, None, None]
        home = plan[:, :, center]
        inflow = received - home
        room = jnp.maximum(space.high - home, 0.0)
        plan = stencil.scale(plan, _share(room, inflow, crowded & (inflow > room)))
        away = jnp.sum(plan, axis=2) - plan[:, :, center]
        home = jnp.where(crowded, jnp.maximum(x - away, 0.0), home)
        plan = plan.at[:, :, center].set(home)
        return plan, stencil.receive(plan), turns + 1

    start = (plan, stencil.receive(plan), jnp.zeros((), jnp.int32))
    plan, received, _ = loops.while_loop(go_on, sweep, start)
    share = jnp.min(_share(ceiling - x, received - x, received > ceiling), axis=(1, 2))
    plan = blend(plan, x, share, center)
    return forward_only(plan, _INSTEAD, "the steps of attacks over transport plans")


def within(space: Space, plan: Array, x: Array, weights: Array, budget: Array) -> Array:
    """Mixes a plan with staying so that its cost is at most ``budget`` ``[n]``."""
    cost = moved(space, plan, weights)
    return blend(plan, x, _share(budget, cost, cost > budget), space.stencil.center)


def _share(allowed: Array, wanted: Array, over: Array) -> Array:
    """``allowed / wanted`` where ``over``, else 1; tiny ``wanted`` give no infinite derivatives."""
    return jnp.where(over, allowed / jnp.where(over, wanted, 1.0), 1.0)


def repair(space: Space, plan: Array, x: Array, weights: Array, budget: Array) -> Array:
    """Makes a plan feasible: rows exact, no pixel overfull, the cost within ``budget``."""
    return contain(space, exact_rows(space, plan, x), x, weights, budget)


def contain(space: Space, plan: Array, x: Array, weights: Array, budget: Array) -> Array:
    """:func:`repair` for a plan whose rows sum to ``x`` up to rounding."""
    return within(space, uncrowd(space, plan, x), x, weights, budget)


def towards(space: Space, x: Array, z: Array, temperature: float = 0.1) -> Array:
    """An entropic plan ``[n, C, O, L]`` that moves ``x`` close to ``z``, both ``[n, C, L]``.

    Rows are exact; columns are as close as the window allows, and the temperature, in units of the
    distance between neighbouring pixels.
    """
    stencil = space.stencil
    costs = jnp.asarray(stencil.costs(space.power), x.dtype)
    near = jnp.exp(-costs / temperature)[:, None] * jnp.asarray(stencil.valid(), x.dtype)
    kernel = jnp.broadcast_to(near, (*x.shape[:2], *near.shape))
    least = jnp.finfo(x.dtype).tiny

    def turn(_: int, arrive: Array) -> Array:
        leave = x / jnp.maximum(stencil.send(kernel, arrive), least)
        received = stencil.receive(kernel, leave)
        arrive = jnp.where(z > 0, z / jnp.maximum(received, least), 0.0)
        return jnp.clip(arrive, 1e-18, 1e18)

    arrive = loops.fori_loop(0, _TURNS, turn, jnp.ones_like(x))
    leave = x / jnp.maximum(stencil.send(kernel, arrive), least)
    return stencil.scale(kernel, arrive) * leave[:, :, None]


def result(space: Space, plan: Array) -> Array:
    """The masses ``[n, C, L]`` after a plan, clipped to the box."""
    return jnp.clip(space.stencil.receive(plan), 0.0, space.high)
