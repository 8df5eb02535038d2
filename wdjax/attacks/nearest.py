"""What minimum-norm attacks share: the nearest flip so far and the distance to the boundary."""

import math
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from wdjax import norms
from wdjax.attacks import ascent
from wdjax.balls import Lp
from wdjax.core import Array, Info, PyTree, Samples, Victim


class Nearest(NamedTuple):
    """The nearest flip so far, per sample."""

    x: Array
    """``[n, *shape]``; without a flip, the last point that flips within rounding, or the sample."""
    cost: Array
    """``[n]``, inf until there is a flip."""

    @property
    def known(self) -> Array:
        """``[n]``: whether there is a flip."""
        return jnp.isfinite(self.cost)


class NearestAttack:
    """What minimum-norm attacks share whose state holds the nearest flip so far, as ``best``."""

    budget: ClassVar[Literal["none"]] = "none"
    random: ClassVar[bool] = False

    ball: Lp

    def _iterate(self, samples: Samples, state: Any) -> Array:
        """The points ``[n, *shape]`` that the last step led to."""
        return state.x

    def _end(self, victim: Victim, samples: Samples, state: Any) -> tuple[Any, Info]:
        """A last stage without a gradient, in which these points are tested."""
        x = self._iterate(samples, state)
        out, info = ascent.judge(victim, x, samples.y)
        best = keep_nearest(state.best, self.ball, victim, samples, x, out)
        return state._replace(best=best), info

    def point(self, samples: Samples, state: Any) -> tuple[Array, None]:
        return state.best.x, None

    def finished(self, state: Any) -> Array:
        return state.best.known


def nearest_before(victim: Victim, samples: Samples) -> Nearest:
    """The state before the first step: samples misclassified already have cost 0, others inf."""
    fallen = victim.criterion(samples.out, samples.y) > 0
    return Nearest(samples.x, jnp.where(fallen, 0.0, jnp.inf).astype(samples.x.dtype))


def keep_nearest(
    nearest: Nearest, ball: Lp, victim: Victim, samples: Samples, x: Array, out: PyTree
) -> Nearest:
    """Updates :class:`Nearest` with those points ``x`` that are nearer flips beyond rounding.

    Until there is such a flip, a point that flips within rounding is stored, at cost inf; the final
    measurement decides whether it counts.
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
    """``old`` in the rows where ``kept`` ``[n]`` is True, ``new`` in the others."""
    return jax.tree.map(lambda one, other: jnp.where(norms.spread(kept, one), one, other), old, new)


def flips(victim: Victim, samples: Samples, out: PyTree) -> Array:
    """Whether the criterion holds by more than rounding, ``[n]``."""
    return ascent.read(victim.criterion, samples, out).lasts & norms.finite(out)


def plane_distance(value: Array, gradient: Array, norm: float) -> Array:
    """Distance to the boundary if the criterion is linear: ``|value| / ||gradient||_s``, ``[n]``.

    0 where the gradient is zero, or it or the value is not finite.
    """
    steep = norms.lp_norm(gradient, norms.dual(norm))
    known = (steep > 0) & jnp.isfinite(value) & jnp.isfinite(steep)
    return jnp.where(known, jnp.abs(value) / jnp.where(known, steep, 1.0), 0.0)


def direction(gradient: Array, norm: float) -> Array:
    """The sign of a gradient for norm inf, its l2 unit vector for norms 1 and 2.

    For norm 1 the dual maximiser would move one coordinate only; an l2 step followed by projection
    on the l1 ball works better.
    """
    return norms.dual_maximizer(gradient, math.inf if norm == math.inf else 2)


def cosine(start: Array | float, end: Array | float, step: Array, steps: int) -> Array:
    """Half a period of a cosine, from ``start`` at step 0 to ``end`` at step ``steps``."""
    done = jnp.asarray(step, jnp.result_type(start)) / steps
    return end + (start - end) * (1 + jnp.cos(math.pi * done)) / 2


def far_start(ball: Lp, center: Array, keys: Array | None) -> Array:
    """Random points of the box, ``[n, *shape]``, that are around ``center``.

    A uniform move of up to the box's width (1 without a box) in each coordinate, then clipped.
    """
    assert keys is not None
    low, high = (0.0, 1.0) if ball.box is None else ball.box
    anywhere = Lp(math.inf, None)
    noise = jax.vmap(lambda key: anywhere.noise(key, center.shape[1:], center.dtype))(keys)
    return ball.clip(center + (high - low) * noise)


def check_norms(name: str, ball: Lp, allowed: tuple[float, ...]) -> None:
    """Raises if the ball's norm is not among those for which the attack is defined."""
    if ball.norm not in allowed:
        words = " or ".join(f"{norm:g}" for norm in allowed)
        raise ValueError(
            f"{name}'s norm must be {words}, got {ball.norm:g}; Walk, FMN and PDPGD take all norms."
        )
