"""Decoupling direction and norm (DDN): a radius that shrinks on flips and grows otherwise."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from wdjax import distinct, losses, norms
from wdjax.attacks import ascent, nearest
from wdjax.attacks.ascent import setting
from wdjax.attacks.nearest import Nearest
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim


class State(NamedTuple):
    delta: Array
    radius: Array
    taken: Array
    best: Nearest


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class DDN(nearest.NearestAttack):
    r"""Decoupled direction and norm: l2 steps on a sphere whose radius follows the boundary.

    ``delta <- delta + a_t g / ||g||_2``, then ``radius <- radius (1 - shrink)`` where the last
    point is a flip and ``radius (1 + shrink)`` elsewhere, and ``delta`` is scaled to the radius and
    clipped to the box. ``a_t`` falls along a cosine.

    Args:
      ball: norm 2, and the box.
      steps: gradient steps.
      loss: ``(out, y) -> [n]``, to be increased.
      step_size: l2 length of the first step, in the units of ``x``; it falls to a hundredth. By
        default the width of the box.
      shrink: relative change of the radius in a step.
      radius: the first radius, in the units of ``x``; by default the width of the box.

    Raises:
      ValueError: another norm, fewer than one step.

    Cost: 1 forward and 1 backward pass a step, 1 more forward.

    Differs: the last iterate is tested too, and no point is rounded to 256 levels. Where the
    gradient is zero the direction stays; the authors' code draws a random one.

    Source: Rony et al. [rony2019], Algorithm 1.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = wdjax.search(DDN(), model, x, y)
    >>> [round(float(d), 2) for d in found.cost]
    [0.14, 0.57]
    """

    ball: Lp = setting(Lp(2))
    steps: int = setting(100)
    loss: Callable[[PyTree, Array], Array] = setting(losses.cross_entropy)
    step_size: float | Array | None = None
    shrink: float | Array = 0.05
    radius: float | Array | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))
        nearest.check_norms("DDN", self.ball, (2,))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(self._descend, self.steps), Stage(self._end, 1)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x = samples.x
        delta = jnp.zeros_like(x) if start is None else self.ball.clip(start) - x
        far = norms.lp_norm(delta, 2)
        first = self.ball.width if self.radius is None else self.radius
        radius = jnp.where(far > 0, far, jnp.asarray(first, x.dtype))
        none = jnp.zeros(len(x), jnp.int32)
        return State(delta, radius, none, nearest.nearest_before(victim, samples))

    def _descend(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step: moves ``delta`` along the l2 unit gradient and rescales it to the new radius.

        The radius, ``[n]``, shrinks where the present point is a flip and grows elsewhere; the
        point is kept if it is the nearest flip.
        """
        point = samples.x + state.delta
        seen = ascent.slope(victim, point, samples.y, self.loss)
        info = ascent.note(victim, samples.y, seen)
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, point, seen.out)
        first = self.ball.width if self.step_size is None else self.step_size
        size = nearest.cosine(first, 0.01 * first, state.taken, self.steps)
        unit = nearest.direction(seen.gradient, 2)
        delta = state.delta + norms.spread(size, point) * unit
        radius = state.radius * jnp.where(info.value > 0, 1 - self.shrink, 1 + self.shrink)
        length = norms.lp_norm(delta, 2)
        scale = radius / jnp.where(length > 0, length, 1.0)
        delta = self.ball.clip(samples.x + norms.spread(scale, point) * delta) - samples.x
        return State(delta, radius, state.taken + 1, best), info

    def _iterate(self, samples: Samples, state: State) -> Array:
        return samples.x + state.delta
