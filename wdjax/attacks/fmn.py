"""Fast minimum-norm attack (FMN)."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from wdjax import distinct, norms
from wdjax.attacks import ascent, nearest
from wdjax.attacks.ascent import setting
from wdjax.attacks.nearest import Nearest
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, Samples, Stage, Victim

_PAST = 1e-4
"""How far past the linearised boundary to aim, as a share of the distance; a linear model's points
would otherwise end on the boundary."""


class State(NamedTuple):
    x: Array
    radius: Array
    """inf before the first step."""
    taken: Array
    best: Nearest


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class FMN(nearest.NearestAttack):
    r"""Fast minimum-norm attack: l2-normalised steps in a ball that follows the boundary.

    Until there is a flip the radius is ``||delta|| + |margin| / ||g||_s``, the distance to the
    linearised boundary. Afterwards it shrinks by ``shrink`` at a flip, to at most the distance of
    the nearest flip, and grows by ``shrink`` at other points. Step and ``shrink`` fall along a
    cosine.

    Args:
      ball: norm and box.
      steps: gradient steps.
      step_size: l2 length of the first step, whatever the norm, in the units of ``x``; it falls to
        a hundredth. By default the width of the box.
      shrink: relative change of the radius at the first step; falls to 0.001.

    Raises:
      ValueError: fewer than one step.

    Cost: 1 forward and 1 backward pass a step, 1 more forward.

    Differs: the last iterate is tested too, and the first estimate of the distance is enlarged by a
    ten-thousandth, without which linear models never flip. :class:`~wdjax.attacks.Walk` is
    stronger on every net we tried.

    Source: Pintor et al. [pintor2021], Algorithm 1.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = wdjax.search(FMN(), model, x, y)
    >>> [round(float(d), 2) for d in found.cost]
    [0.1, 0.4]
    """

    ball: Lp = setting(Lp())
    steps: int = setting(100)
    step_size: float | Array | None = None
    shrink: float | Array = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(self._descend, self.steps), Stage(self._end, 1)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x = samples.x
        point = x if start is None else self.ball.clip(start)
        unknown = jnp.full(len(x), jnp.inf, x.dtype)
        none = jnp.zeros(len(x), jnp.int32)
        return State(point, unknown, none, nearest.nearest_before(victim, samples))

    def _descend(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step: updates the radius, moves along the gradient, projects on the ball.

        The new radius, ``[n]``, shrinks at a flip and grows elsewhere; before the first flip it is
        the distance to the linearised boundary. The criterion is read with its slack, so that
        points end where rounding cannot turn them back.
        """
        x, norm = state.x, self.ball.norm
        seen = ascent.slope(victim, x, samples.y, victim.criterion)
        info = ascent.note(victim, samples.y, seen)
        known = state.best.known
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, x, seen.out)
        first = self.ball.width if self.step_size is None else self.step_size
        size = nearest.cosine(first, 0.01 * first, state.taken, self.steps)
        share = nearest.cosine(self.shrink, 0.001, state.taken, self.steps)
        value = ascent.read(victim.criterion, samples, seen.out).beyond
        gap = nearest.plane_distance(value, seen.gradient, norm)
        estimate = (norms.lp_norm(x - samples.x, norm) + gap) * (1 + _PAST)
        smaller = jnp.minimum(state.radius * (1 - share), best.cost)
        larger = jnp.where(known, state.radius * (1 + share), estimate)
        radius = jnp.where(value > 0, smaller, larger)
        radius = jnp.where(jnp.isfinite(radius), radius, estimate)
        moved = x + norms.spread(size, x) * nearest.direction(seen.gradient, 2)
        moved = self.ball.project(moved, samples.x, radius)
        return State(moved, radius, state.taken + 1, best), info
