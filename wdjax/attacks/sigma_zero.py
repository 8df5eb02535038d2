"""Sigma-zero: flips of few changed coordinates, by descent on a smooth count of them."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from wdjax import distinct, norms, sparse
from wdjax.attacks import ascent, nearest
from wdjax.attacks.ascent import setting
from wdjax.attacks.nearest import Nearest
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim


class State(NamedTuple):
    x: Array
    threshold: Array
    """Changes below it are undone; in widths of the box."""
    moments: PyTree
    """Of Adam."""
    taken: Array
    best: Nearest


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class SigmaZero(nearest.NearestAttack):
    r"""Sigma-zero: Adam on the margin and a smooth count of changes; small changes are undone.

    Ascends the criterion until the point is a flip, and always descends the smooth count

        1 / m sum_i delta_i^2 / (delta_i^2 + sigma),

    over the m coordinates (with ``Lp(0, pixels=True)`` the pixels, of which ``delta_i`` is the
    length). The gradient is scaled to largest entry 1, Adam makes the step, of a size that falls
    along a cosine, and changes below a threshold are set to 0. The threshold rises by ``pace``
    times the step size after a flip and falls by it after other points.

    Args:
      ball: norm 0, and the box.
      steps: gradient steps.
      step_size: of the first step, in widths of the box, like all lengths here; it falls to a
        tenth.
      sigma: changes whose square is far below it count as none.
      threshold: the first threshold.
      pace: change of the threshold, as a share of the step size.

    Raises:
      ValueError: another norm, fewer than one step.

    Cost: 1 forward and 1 backward pass a step, 1 more forward; memory for two moments of Adam.

    Differs: the gradient of the criterion has largest entry 1 before the count is added, so that
    the scale of the logits does not matter. Pixels can be counted. The last iterate is tested too.

    Source: Cina et al. [sigmazero2025], Algorithm 1.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.9, 0.1], [0.6, 0.1, 0.2]]), jnp.array([0, 0])
    >>> wdjax.search(SigmaZero(steps=100), model, x, y).cost.tolist()
    [2.0, 1.0]
    """

    sparse: ClassVar[bool] = True

    ball: Lp = setting(Lp(0))
    steps: int = setting(1000)
    step_size: float | Array = 1.0
    sigma: float | Array = 1e-3
    threshold: float | Array = 0.3
    pace: float | Array = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))
        nearest.check_norms("SigmaZero", self.ball, (0,))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(self._descend, self.steps), Stage(self._end, 1)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x = samples.x
        point = x if start is None else self.ball.clip(start)
        threshold = jnp.full(len(x), self.threshold, x.dtype)
        none = jnp.zeros(len(x), jnp.int32)
        moments = jax.vmap(optax.scale_by_adam().init)(x)
        return State(point, threshold, moments, none, nearest.nearest_before(victim, samples))

    def _descend(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step: Adam on criterion and count, then small changes are undone.

        The criterion is read with its slack, so that a point counts as a flip, and the threshold,
        ``[n]``, rises, where rounding cannot turn it back.
        """
        x, home, pixels = state.x, samples.x, self.ball.pixels
        width = self.ball.width
        seen = ascent.slope(victim, x, samples.y, victim.criterion)
        info = ascent.note(victim, samples.y, seen)
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, x, seen.out)
        flipped = ascent.read(victim.criterion, samples, seen.out).beyond > 0
        size = nearest.cosine(self.step_size, 0.1 * self.step_size, state.taken, self.steps)
        threshold = state.threshold + self.pace * size * jnp.where(flipped, 1.0, -1.0)
        threshold = jnp.clip(threshold, 0.0, 1.0)
        away = norms.unit(seen.gradient, math.inf)
        gradient = self._few((x - home) / width) - jnp.where(norms.spread(flipped, x), 0.0, away)
        step, moments = ascent.adam(norms.unit(gradient, math.inf), state.moments)
        moved = self.ball.clip(x - norms.spread(width * size, x) * step)
        length = jnp.sqrt(sparse.each((moved - home) ** 2, pixels))
        large = sparse.broadcastable(length >= width * threshold[:, None], x, pixels)
        moved = jnp.where(large, moved, home)
        return State(moved, threshold, moments, state.taken + 1, best), info

    def _few(self, delta: Array) -> Array:
        """The gradient ``[n, *shape]`` of the smooth count of changes ``delta``."""
        square = sparse.each(delta**2, self.ball.pixels)
        slope = 2 * self.sigma / (square.shape[1] * (square + self.sigma) ** 2)
        return delta * sparse.broadcastable(slope, delta, self.ball.pixels)
