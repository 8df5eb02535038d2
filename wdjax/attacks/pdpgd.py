"""Primal-dual proximal gradient descent (PDPGD)."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from wdjax import distinct, loops, norms
from wdjax.attacks import ascent, nearest
from wdjax.attacks.ascent import setting
from wdjax.attacks.nearest import Nearest
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, Samples, Stage, Victim

_INNER = 5
"""Iterations of the proximal operator in Adam's metric."""
_KEPT = 0.9
"""Decay of the running mean of the multipliers' share."""
_USUAL = 500
"""The number of steps for which ``dual_step`` is meant; shorter runs enlarge it."""
_DECAY, _FLOOR = 0.999, 1e-8
"""Decay and floor of Adam's second moments."""
_PRIMAL_END, _DUAL_END = 0.01, 0.1
"""Last step sizes, primal and dual, as shares of the first."""
_SHARP = 5.0
"""Margins are divided by this fraction of the sample's margin before the softplus."""
_EXTREME = math.log(1e6)
"""Bound of the absolute logarithm of the multipliers' ratio."""


class State(NamedTuple):
    x: Array
    moments: Any
    """Adam's moments, per sample."""
    steep: Array
    """``[n]``: largest coordinate of the first gradient, the unit of ``ratio``; 0 before it."""
    multiplier: Array
    """``[n]``: ``log(l_2 / l_1)``, of the margin's multiplier over the norm's."""
    share: Array
    """``[n]``: running mean of ``l_1 / (l_1 + l_2)``."""
    taken: Array
    best: Nearest


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class PDPGD(nearest.NearestAttack):
    r"""Primal-dual proximal gradient descent: Adam on the margin, a proximal map for the norm.

    The Lagrangian ``l_1 ||delta||_r + l_2 softplus(-margin)`` is a game over ``l`` in the simplex.
    The primal player takes an Adam step along the margin, weighted by the softplus's slope, and
    then the proximal map of ``l_1 / l_2`` times the norm, in Adam's metric and in the box. The dual
    player divides ``l_2 / l_1`` by ``exp(dual_step)`` if the point is a flip and multiplies it
    otherwise. The primal step size falls geometrically, the dual one linearly.

    Args:
      ball: norm and box.
      steps: gradient steps.
      step_size: Adam's first step size, in the units of ``x``; falls to a hundredth. By default a
        tenth of the box's width.
      dual_step: change of the multipliers' logarithm in a step, for 500 steps; larger for shorter
        runs, and falling to a tenth.
      ratio: ``l_1 / l_2`` at the first step, in units of the gradient's largest coordinate there.

    Raises:
      ValueError: fewer than one step.

    Cost: 1 forward and 1 backward pass a step, 1 more forward; 5 proximal maps a step.

    Differs: runs shorter than the authors' 500 steps, which would end before the multipliers
    balance, enlarge the dual step by ``500 / steps``, for norms 1 and 2 by its square root. Margins
    are measured in fifths of the sample's own margin, multipliers in units of its first gradient,
    so that the scale of logits does not matter. The last iterate is tested.

    Source: Matyasko and Chau [matyasko2021], Algorithm 1; the metric is that of [melchior2019].

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = wdjax.search(PDPGD(), model, x, y)
    >>> [round(float(d), 2) for d in found.cost]
    [0.1, 0.4]
    """

    ball: Lp = setting(Lp())
    steps: int = setting(500)
    step_size: float | Array | None = None
    dual_step: float | Array = 0.1
    ratio: float | Array = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(self._descend, self.steps), Stage(self._end, 1)

    @property
    def _haste(self) -> float:
        """The factor of the dual step in runs of fewer than ``_USUAL`` steps; 1 in others."""
        power = 1.0 if self.ball.norm == math.inf else 0.5
        return max(1.0, _USUAL / self.steps) ** power

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x = samples.x if start is None else self.ball.clip(start)
        moments = jax.vmap(optax.scale_by_adam().init)(x)
        multiplier = jnp.zeros(len(x), x.dtype) - jnp.log(jnp.asarray(self.ratio, x.dtype))
        none = jnp.zeros(len(x), jnp.int32)
        best = nearest.nearest_before(victim, samples)
        share = jax.nn.sigmoid(-multiplier)
        return State(x, moments, jnp.zeros_like(share), multiplier, share, none, best)

    def _descend(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One primal step (Adam, then the proximal map) and one dual step, for each sample.

        The multipliers' log ratio, ``[n]``, falls where the present point is a flip and rises
        elsewhere; primal and dual step sizes fall over the run. The present point is kept if it is
        the nearest flip.
        """
        x = state.x
        seen = ascent.slope(victim, x, samples.y, victim.criterion)
        info = ascent.note(victim, samples.y, seen)
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, x, seen.out)
        gone = state.taken / self.steps
        first = 0.1 * self.ball.width if self.step_size is None else self.step_size
        size = first * _PRIMAL_END**gone
        pace = self.dual_step * self._haste * (1 - (1 - _DUAL_END) * gone)
        slope = jax.nn.sigmoid(-info.value / self._unit(victim, samples))
        gradient = norms.spread(jnp.where(jnp.isfinite(slope), slope, 0.0), x) * seen.gradient
        update, moments = ascent.adam(gradient, state.moments)
        delta = self.ball.clip(x + norms.spread(size, x) * update) - samples.x
        # Adam's estimate of the gradients' size: the metric of the proximal map.
        past = 1 - _DECAY ** moments.count.astype(x.dtype)
        metric = jnp.sqrt(moments.nu / norms.spread(past, x)) + _FLOOR
        largest = jnp.max(jnp.abs(gradient).reshape(len(x), -1), axis=-1)
        steep = jnp.where(state.steep > 0, state.steep, largest)
        ratio = steep * state.share / jnp.maximum(1 - state.share, _FLOOR)
        moved = self._proximal(samples.x, delta, size * ratio, metric)
        multiplier = state.multiplier + jnp.where(info.value > 0, -pace, pace)
        multiplier = jnp.clip(multiplier, -_EXTREME, _EXTREME)
        share = _KEPT * state.share + (1 - _KEPT) * jax.nn.sigmoid(-multiplier)
        return State(moved, moments, steep, multiplier, share, state.taken + 1, best), info

    def _unit(self, victim: Victim, samples: Samples) -> Array:
        """``[n]``: the margin that counts as 1: a fifth of the sample's own, or 1 if that is 0."""
        clean = jnp.abs(victim.criterion(samples.out, samples.y)) / _SHARP
        return jnp.where(clean > 0, clean, 1.0)

    def _proximal(self, x: Array, z: Array, weight: Array, metric: Array) -> Array:
        """``x + argmin_u weight ||u||_r + sum metric (u - z)^2 / 2`` in the box, approximately.

        Args:
          x: ``[n, *shape]``, the samples.
          z: ``[n, *shape]``, the perturbation before the proximal map.
          weight: ``[n]``, the norm's weight.
          metric: ``[n, *shape]``, positive weights of the coordinates.

        Returns:
          ``[n, *shape]`` points after ``_INNER`` proximal gradient steps.
        """
        largest = jnp.max(metric.reshape(len(z), -1), axis=-1)
        share = metric / norms.spread(largest, z)

        def step(_: int, u: Array) -> Array:
            u = plain_proximal(u - share * (u - z), weight / largest, self.ball.norm)
            return self.ball.clip(x + u) - x

        return x + loops.fori_loop(0, _INNER, step, z)


def plain_proximal(z: Array, weight: Array, norm: float) -> Array:
    """``argmin weight ||u||_r + ||u - z||_2^2 / 2``, per sample.

    Args:
      z: ``[n, *shape]``
      weight: ``[n]``, at least 0.
      norm: r, one of 1, 2 and inf.

    >>> plain_proximal(jnp.array([[3.0, -1.5]]), jnp.array([1.0]), 1).tolist()
    [[2.0, -0.5]]
    >>> plain_proximal(jnp.array([[3.0, -1.0]]), jnp.array([1.0]), jnp.inf)[0].round(4).tolist()
    [2.0, -1.0]
    """
    if norm == 1:
        return jnp.sign(z) * jnp.maximum(jnp.abs(z) - norms.spread(weight, z), 0.0)
    if norm == 2:
        length = norms.lp_norm(z, 2)
        kept = jnp.maximum(1 - weight / jnp.where(length > 0, length, 1.0), 0.0)
        return norms.spread(kept, z) * z
    # Moreau: z less its projection on the dual ball.
    return z - norms.project(z, jnp.zeros_like(z), weight, 1)
