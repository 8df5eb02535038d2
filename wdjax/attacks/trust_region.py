"""The trust region attack: the step length follows the accuracy of the linearised margin."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp

from wdjax import distinct, losses, norms
from wdjax.attacks import ascent, nearest, rivals
from wdjax.attacks.ascent import setting
from wdjax.attacks.nearest import Nearest
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim

_GOOD, _BAD = 0.9, 0.5
"""The radius grows if the margin changed by more than the first share of its prediction, and
shrinks if it changed by less than the second."""

_RADIUS = {2: 0.01, math.inf: 0.001}


class State(NamedTuple):
    x: Array
    rival: Array
    radius: Array
    value: Array
    """``[n]``: the margin to the rival at the previous point."""
    promised: Array
    """``[n]``: its change as predicted for the last step; 0 before the first."""
    best: Nearest


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrustRegion(nearest.NearestAttack):
    r"""The trust region attack, with an adaptive radius per sample.

    The rival is the class of the nearest linearised boundary at the sample. A step has the length
    ``min(radius, |f| / ||w||_s)`` along the dual maximiser of the margin's gradient, enlarged to
    cross the boundary. Where the margin then changed by more than 0.9 of the prediction, the radius
    grows by the factor ``growth``; where by less than 0.5, it shrinks. Ends at the first flip.

    Args:
      ball: norm 2 or inf, and the box.
      steps: maximum number of steps.
      rivals: the number of classes compared at the sample, those of largest logit.
      growth: factor of the radius.
      radius: the first radius, in the units of ``x``; by default 0.001 for norm inf and 0.01 for
        norm 2, in widths of the box.
      overshoot: enlarges the step to the linearised boundary by this share.

    Raises:
      ValueError: norm 1, a count below 1, a model without logits.

    Cost: 1 forward and ``min(rivals, K - 1)`` backward passes once, 1 forward and 1 backward pass a
    step until the flip, 1 more forward.

    Differs: one forward pass serves the gradient and the test of the last step; the authors take
    two.

    Source: Yao et al. [yao2019], Algorithm 1 and section 3.2.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = wdjax.search(TrustRegion(steps=60), model, x, y)
    >>> [round(float(d), 2) for d in found.cost]
    [0.1, 0.4]
    """

    ball: Lp = setting(Lp())
    steps: int = setting(100)
    rivals: int = setting(9)
    growth: float | Array = 1.2
    radius: float | Array | None = None
    overshoot: float | Array = 0.02

    def __post_init__(self) -> None:
        for name in ("steps", "rivals"):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name)))
        nearest.check_norms("TrustRegion", self.ball, (2, math.inf))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage(self._choose, 1, self.finished),
            Stage(self._step, self.steps, self.finished),
            Stage(self._end, 1, self.finished),
        )

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        ascent.need_logits("TrustRegion", samples.out)
        x = samples.x if start is None else self.ball.clip(start)
        radius = self.radius
        if radius is None:
            radius = _RADIUS[self.ball.norm] * self.ball.width
        zero = jnp.zeros(len(x), x.dtype)
        best = nearest.nearest_before(victim, samples)
        return State(x, samples.y, zero + radius, zero, zero, best)

    def _choose(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """The first stage: the rival becomes the class of the nearest linearised boundary."""
        norm = self.ball.norm
        ranking, info = rivals.rank(victim, state.x, samples.y, norm, self.rivals, 1)
        return state._replace(rival=ranking.classes[:, 0]), info

    def _step(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step towards the rival's boundary, at most as long as the radius.

        Samples with a flip stay. The radius, ``[n]``, grows where the margin changed by more than
        ``_GOOD`` of its prediction in the last step, and shrinks where by less than ``_BAD``. The
        first step has no prediction and keeps it.
        """
        x, y, norm = state.x, samples.y, self.ball.norm

        def margin(out: PyTree, y: Array) -> Array:
            return losses.targeted_margin(out, y, state.rival)

        seen = ascent.slope(victim, x, y, margin)
        info = ascent.note(victim, y, seen)
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, x, seen.out)
        value = ascent.read(margin, samples, seen.out).beyond
        value = jnp.nan_to_num(value).astype(x.dtype)
        promised = jnp.where(state.promised > 0, state.promised, 1.0)
        kept = jnp.where(state.promised > 0, (value - state.value) / promised, 1.0 - _BAD)
        grown = jnp.where(kept > _GOOD, state.radius * self.growth, state.radius)
        radius = jnp.where(kept < _BAD, state.radius / self.growth, grown)
        gap = nearest.plane_distance(value, seen.gradient, norm)
        size = jnp.minimum(radius, gap * (1 + self.overshoot))
        size = jnp.maximum(size, ascent.shortest(self.ball, x))
        moved = self.ball.clip(self.ball.ascend(x, seen.gradient, size))
        change = jnp.sum(((moved - x) * seen.gradient).reshape(len(x), -1), axis=-1)
        still = best.known
        moved = jnp.where(norms.spread(still, x), x, moved)
        return State(moved, state.rival, radius, value, change, best), info
