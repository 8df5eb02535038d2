"""What minimum-norm attacks share: the nearest flip so far, and how far the boundary may be."""

import math
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from wdjax import norms
from wdjax.attacks import ascent
from wdjax.balls import Lp
from wdjax.core import Array, PyTree, Samples, Victim


class Nearest(NamedTuple):
    """The nearest flip so far, per sample."""

    x: Array
    """``[n, *shape]``; while there is none, the last flip within rounding, or the sample."""
    cost: Array
    """``[n]``, inf while there is none."""

    @property
    def known(self) -> Array:
        """``[n]``: whether there is one."""
        return jnp.isfinite(self.cost)


def nearest_before(victim: Victim, samples: Samples) -> Nearest:
    """What is known before the first step: samples that have fallen already cost nothing."""
    fallen = victim.criterion(samples.out, samples.y) > 0
    return Nearest(samples.x, jnp.where(fallen, 0.0, jnp.inf).astype(samples.x.dtype))


def keep_nearest(
    nearest: Nearest, ball: Lp, victim: Victim, samples: Samples, x: Array, out: PyTree
) -> Nearest:
    """The nearer of :class:`Nearest` and the points ``x``, where these are flips that last.

    While none is known, a flip within rounding stands in, at cost inf: it is measured in the end.
    """
    cost, read = ball.cost(samples.x, x), ascent.read(victim.criterion, samples, out)
    flipped = (read.value > 0) & norms.finite(out)
    nearer = flipped & read.lasts & (cost < nearest.cost)
    kept = nearer | (flipped & ~nearest.known)
    return Nearest(
        jnp.where(norms.spread(kept, x), x, nearest.x), jnp.where(nearer, cost, nearest.cost)
    )


Points = TypeVar("Points", bound=tuple[Array, ...])


def keep(old: Points, new: Points, kept: Array) -> Points:
    """``old`` in the rows ``[n]`` that are kept, ``new`` in the others."""
    return jax.tree.map(lambda one, other: jnp.where(norms.spread(kept, one), one, other), old, new)


def flips(victim: Victim, samples: Samples, out: PyTree) -> Array:
    """Whether the criterion holds by more than rounding, ``[n]``."""
    return ascent.read(victim.criterion, samples, out).lasts & norms.finite(out)


def plane_distance(value: Array, gradient: Array, norm: float) -> Array:
    """How far the boundary is if the criterion is linear: ``|value| / ||gradient||_s``, ``[n]``.

    0 where there is no gradient or no value to tell from.
    """
    steep = norms.lp_norm(gradient, norms.dual(norm))
    known = (steep > 0) & jnp.isfinite(value) & jnp.isfinite(steep)
    return jnp.where(known, jnp.abs(value) / jnp.where(known, steep, 1.0), 0.0)


def direction(gradient: Array, norm: float) -> Array:
    """The sign of a gradient for norm inf, its l2 unit vector for norms 1 and 2.

    The dual maximiser of l1 would move one coordinate; a projection on the ball afterwards shares
    the step out better.
    """
    return norms.dual_maximizer(gradient, math.inf if norm == math.inf else 2)


def cosine(start: Array | float, end: Array | float, step: Array, steps: int) -> Array:
    """Half a period of a cosine from ``start`` at step 0 to ``end`` at ``steps``."""
    done = jnp.asarray(step, jnp.result_type(start)) / steps
    return end + (start - end) * (1 + jnp.cos(math.pi * done)) / 2


def far_start(ball: Lp, center: Array, keys: Array | None) -> Array:
    """Random points of the box.

    A coordinate moves by up to the box's width, by up to 1 where there is no box, and is clipped.
    """
    assert keys is not None
    low, high = (0.0, 1.0) if ball.box is None else ball.box
    anywhere = Lp(math.inf, None)
    noise = jax.vmap(lambda key: anywhere.noise(key, center.shape[1:], center.dtype))(keys)
    return ball.clip(center + (high - low) * noise)


def check_norms(name: str, ball: Lp, allowed: tuple[float, ...]) -> None:
    """Refuses norms for which an attack is not defined."""
    if ball.norm not in allowed:
        words = " or ".join(f"{norm:g}" for norm in allowed)
        raise ValueError(
            f"{name}'s norm must be {words}, got {ball.norm:g}; Walk, FMN and PDPGD take all norms."
        )
