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
    """The state before the first step: samples misclassified already have cost 0, others inf.

    Args:
      victim: its criterion decides.
      samples: with their labels and clean outputs.

    >>> from wdjax import losses
    >>> x = jnp.array([[0.6, 0.4], [0.1, 0.9]])
    >>> samples = Samples(x, jnp.array([0, 0]), None, x)
    >>> nearest_before(Victim(lambda x: x, losses.margin), samples).cost.tolist()
    [inf, 0.0]
    """
    fallen = victim.criterion(samples.out, samples.y) > 0
    return Nearest(samples.x, jnp.where(fallen, 0.0, jnp.inf).astype(samples.x.dtype))


def keep_nearest(
    nearest: Nearest, ball: Lp, victim: Victim, samples: Samples, x: Array, out: PyTree
) -> Nearest:
    """Updates :class:`Nearest` with those points ``x`` that are nearer flips beyond rounding.

    Until there is such a flip, a point that flips within rounding is stored, at cost inf; the final
    measurement decides whether it counts.

    Args:
      nearest: so far.
      ball: measures the cost; points it does not allow cost inf.
      victim: its criterion decides.
      samples: with their labels and clean outputs.
      x: ``[n, *shape]`` points.
      out: the model's output there.

    >>> from wdjax import losses
    >>> x, victim = jnp.array([[0.75, 0.25]]), Victim(lambda x: x, losses.margin)
    >>> samples = Samples(x, jnp.array([0]), None, x)
    >>> nearest = nearest_before(victim, samples)
    >>> for z in (jnp.array([[0.25, 0.75]]), jnp.array([[0.375, 0.5]]), jnp.array([[0.0, 1.0]])):
    ...     nearest = keep_nearest(nearest, Lp(math.inf), victim, samples, z, z)
    >>> nearest.x.tolist(), nearest.cost.tolist()
    ([[0.375, 0.5]], [0.375])
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
    """Keeps some rows of points.

    Args:
      old: a tuple of ``[n, ...]`` arrays.
      new: such a tuple.
      kept: ``[n]`` booleans.

    Returns:
      ``old`` where ``kept`` is True, else ``new``.

    >>> keep((jnp.zeros(2),), (jnp.ones(2),), jnp.array([True, False]))[0].tolist()
    [0.0, 1.0]
    """
    return jax.tree.map(lambda one, other: jnp.where(norms.spread(kept, one), one, other), old, new)


def flips(victim: Victim, samples: Samples, out: PyTree) -> Array:
    """Whether the criterion holds by more than rounding; like ``ascent.flips``, from outputs.

    Args:
      victim: its criterion decides.
      samples: with their labels and clean outputs.
      out: the model's output at the points.

    Returns:
      ``[n]`` booleans.

    >>> from wdjax import losses
    >>> x = jnp.array([[0.6, 0.4]])
    >>> victim, samples = Victim(lambda x: x, losses.margin), Samples(x, jnp.array([0]), None, x)
    >>> flips(victim, samples, x[:, ::-1]).tolist()
    [True]
    """
    return ascent.read(victim.criterion, samples, out).lasts & norms.finite(out)


def plane_distance(value: Array, gradient: Array, norm: float) -> Array:
    """The distance to the boundary if the criterion is linear: ``|value| / ||gradient||_s``.

    Args:
      value: ``[n]``, the criterion.
      gradient: ``[n, *shape]``, its gradient.
      norm: r of the distance, dual to s.

    Returns:
      ``[n]``; 0 where the gradient is zero, or it or the value is not finite.

    >>> plane_distance(jnp.array([-1.0]), jnp.array([[3.0, 4.0]]), 2).tolist()
    [0.20000000298023224]
    """
    steep = norms.lp_norm(gradient, norms.dual(norm))
    known = (steep > 0) & jnp.isfinite(value) & jnp.isfinite(steep)
    return jnp.where(known, jnp.abs(value) / jnp.where(known, steep, 1.0), 0.0)


def direction(gradient: Array, norm: float) -> Array:
    """The sign of a gradient for norm inf, its l2 unit vector for norms 1 and 2.

    For norm 1 the dual maximiser would move one coordinate only; an l2 step followed by projection
    on the l1 ball works better.

    Args:
      gradient: ``[n, *shape]``
      norm: of the ball.

    Returns:
      ``[n, *shape]``; 0 where the gradient is zero.

    >>> direction(jnp.array([[3.0, -4.0]]), math.inf).tolist()
    [[1.0, -1.0]]
    """
    return norms.dual_maximizer(gradient, math.inf if norm == math.inf else 2)


def cosine(start: Array | float, end: Array | float, step: Array, steps: int) -> Array:
    """Half a period of a cosine, from ``start`` at step 0 to ``end`` at step ``steps``.

    Args:
      start: the first value.
      end: the last value.
      step: the number of steps taken, of any shape.
      steps: the number of all steps.

    >>> jnp.round(cosine(1.0, 0.0, jnp.array([0, 5, 10]), 10), 6).tolist()
    [1.0, 0.5, 0.0]
    """
    done = jnp.asarray(step, jnp.result_type(start)) / steps
    return end + (start - end) * (1 + jnp.cos(math.pi * done)) / 2


def far_start(ball: Lp, center: Array, keys: Array | None) -> Array:
    """Random points of the box, ``[n, *shape]``, that are around ``center``.

    A uniform move of up to the box's width (1 without a box) in each coordinate, then clipped.

    Args:
      ball: has the box.
      center: ``[n, *shape]`` points.
      keys: ``[n]`` typed keys.

    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> far = far_start(Lp(2), jnp.full((3, 8), 0.5), keys)
    >>> far.shape, bool(jnp.all((far >= 0) & (far <= 1))), float(jnp.ptp(far)) > 0.5
    ((3, 8), True, True)
    """
    assert keys is not None
    low, high = (0.0, 1.0) if ball.box is None else ball.box
    anywhere = Lp(math.inf, None)
    noise = jax.vmap(lambda key: anywhere.noise(key, center.shape[1:], center.dtype))(keys)
    return ball.clip(center + (high - low) * noise)


def check_norms(name: str, ball: Lp, allowed: tuple[float, ...]) -> None:
    """Raises if a ball's norm is not among those for which an attack is defined.

    Args:
      name: of the attack, for the message.
      ball: the attack's.
      allowed: norms.

    >>> check_norms("DDN", Lp(1), (2,))
    Traceback (most recent call last):
      ...
    ValueError: DDN's norm must be 2, got 1; Walk, FMN and PDPGD take all but 0, SigmaZero takes 0.
    """
    if ball.norm not in allowed:
        words = " or ".join(f"{norm:g}" for norm in allowed)
        raise ValueError(
            f"{name}'s norm must be {words}, got {ball.norm:g}; Walk, FMN and PDPGD take all "
            "but 0, SigmaZero takes 0."
        )
