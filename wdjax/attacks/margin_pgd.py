"""A short gradient ascent on the margin, with steps that fall along a cosine."""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp

from wdjax import distinct, norms
from wdjax.attacks import ascent, nearest
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim


class State(NamedTuple):
    x: Array
    taken: Array
    best: ascent.Best
    flipped: Array


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarginPGD:
    r"""Projected gradient ascent on the criterion with large steps: a cheap first attack.

    ``x <- P(x + a_t eps M(grad criterion))`` with ``a_t`` from ``step_size`` down to a hundredth of
    it along half a cosine, and M the sign (inf) or the l2 unit vector. A sample is finished once a
    point flips beyond rounding.

    Args:
      ball: norm and box.
      steps: gradient steps.
      far: start at a uniformly random point of the box instead of at the sample; the first step
        projects it on the ball. Finds flips where gradients at the sample are tiny. Makes a key
        necessary.
      step_size: in units of ``eps``, at the first step.

    Raises:
      ValueError: fewer than one step.

    Cost: 1 forward and 1 backward pass a step until the flip, 1 forward at the end.

    Source: this library's own; the cosine is that of Liu et al. [liu2022], the margin Carlini and
    Wagner's [carlini2017].

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.8, 0.2]]), jnp.array([0, 0])
    >>> found = wdjax.search(MarginPGD(), model, x, y, eps=0.2)
    >>> found.success.tolist(), found.gradients.tolist()
    ([True, False], [2, 8])
    """

    budget: ClassVar[Literal["sample"]] = "sample"

    ball: Lp = setting(Lp())
    steps: int = setting(8)
    far: bool = setting(False)
    step_size: float | Array = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))

    @property
    def random(self) -> bool:
        return self.far

    @property
    def shared(self) -> tuple["MarginPGD", "MarginPGD"]:
        """Itself, and one without ``far``, which concerns the beginning only."""
        return self, dataclasses.replace(self, far=False)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(self._ascend, self.steps, self.finished), Stage(self._end, 1, self.finished)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x = samples.x if start is None else self.ball.clip(start)
        if self.far:
            x = nearest.far_start(self.ball, x, keys)
        elif start is not None:
            x = self.ball.project(x, samples.x, samples.radius)
        unknown = jnp.full(len(x), -jnp.inf, x.dtype)
        none = jnp.zeros(len(x), jnp.int32)
        return State(x, none, ascent.Best(samples.x, unknown), jnp.zeros(len(x), bool))

    def _ascend(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One projected step up the criterion, of a length that falls along a cosine."""
        seen = ascent.slope(victim, state.x, samples.y, victim.criterion)
        info = ascent.note(victim, samples.y, seen)
        best, flipped = self._judge(victim, samples, state, seen.out)
        size = nearest.cosine(self.step_size, 0.01 * self.step_size, state.taken, self.steps)
        step = norms.spread(size * samples.radius, state.x)
        moved = state.x + step * nearest.direction(seen.gradient, self.ball.norm)
        moved = self.ball.project(moved, samples.x, samples.radius)
        return State(moved, state.taken + 1, best, flipped), info

    def _end(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """The last stage: one forward pass at the last point, which may become the best one."""
        out, info = ascent.judge(victim, state.x, samples.y)
        best, flipped = self._judge(victim, samples, state, out)
        return state._replace(best=best, flipped=flipped), info

    def _judge(
        self, victim: Victim, samples: Samples, state: State, out: PyTree
    ) -> tuple[ascent.Best, Array]:
        """Compares the present points, with outputs ``out``, with the best ones inside the ball.

        Returns the best points and, ``[n]``, whether the sample has a flip beyond rounding by now.
        The best point of a sample does not change after its first flip.
        """
        inside = self.ball.cost(samples.x, state.x) <= samples.radius * (1 + 1e-6)
        value = jnp.where(inside, victim.criterion(out, samples.y), -jnp.inf)
        best = ascent.keep_best(state.best, state.x, value, out)
        assert best is not None
        flips = inside & nearest.flips(victim, samples, out)
        # A sample is finished at its first flip, which is kept.
        return nearest.keep(state.best, best, state.flipped), state.flipped | flips

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        return state.best.x, None

    def finished(self, state: State) -> Array:
        return state.flipped
