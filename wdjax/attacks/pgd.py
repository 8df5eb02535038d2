"""Projected gradient descent and its one-step form, FGSM."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import losses, norms
from wdjax.attacks import ascent
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim


class State(NamedTuple):
    x: Array
    best: ascent.Best | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PGD:
    r"""Projected gradient ascent: steps that raise a loss, each pulled back into the ball.

    The iteration is ``x <- P(x + step_size * M_r(grad loss))``, with a loss per sample.

    Args:
      ball: norm and box.
      steps: gradient steps.
      loss: ``(out, y) -> [n]``, to be increased; see :mod:`wdjax.losses`.
      random_start: start uniformly in the ball instead of at the sample; makes a key necessary.
      iterate: ``"best"`` returns the iterate of largest criterion, ``"last"`` the last one.
      step_size: may be traced; by default ``2.5 eps / steps``, for norm 1 ``eps / 4``, and
        ``eps`` for one step.

    Raises:
      ValueError: fewer than one step, another iterate.

    Cost: per step 1 forward and 1 backward pass a sample; 1 more forward for ``"best"``.

    Differs: for norm 2 feasibility by clipping the ball's projection to the box, as all
      implementations do; that is not the Euclidean projection on the intersection.

    Source: Madry et al. [madry2018]; the projection is equation 2 of Le et al. [le2025].

    >>> PGD(Lp(2), steps=5) == PGD(Lp(2), steps=5)  # equal settings share one compiled program
    True
    """

    budget: ClassVar[Literal["sample"]] = "sample"

    ball: Lp = setting(Lp())
    steps: int = setting(40)
    loss: Callable[[PyTree, Array], Array] = setting(losses.cross_entropy)
    random_start: bool = setting(False)
    iterate: str = setting("best")
    step_size: float | Array | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))
        validate.check_choice("iterate", self.iterate, ("best", "last"))

    @property
    def random(self) -> bool:
        return self.random_start

    @property
    def stages(self) -> tuple[Stage, ...]:
        last = (Stage(self._compare, 1),) if self.iterate == "best" else ()
        return (Stage(self._ascend, self.steps, cycles=True), *last)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x, eps = samples.x, samples.radius
        point = x if start is None else start
        if self.random_start:
            noise = jax.vmap(lambda key: self.ball.noise(key, x.shape[1:], x.dtype))(keys)
            point = point + norms.spread(eps, x) * noise
        if point is not x:
            point = self.ball.project(point, x, eps)
        return State(point, ascent.no_best(point, self.iterate == "best"))

    def _ascend(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        eps, size = samples.radius, self.step_size
        if size is None:
            share = 1 / 4 if self.ball.norm == 1 else 2.5 / self.steps
            size = share * eps if self.steps > 1 else eps
        seen = ascent.slope(victim, state.x, samples.y, self.loss)
        info = ascent.note(victim, samples.y, seen)
        moved = self.ball.ascend(state.x, seen.gradient, size)
        moved = self.ball.project(moved, samples.x, eps)
        return State(moved, ascent.keep_best(state.best, state.x, info.value, seen.out)), info

    def _compare(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        out, info = ascent.judge(victim, state.x, samples.y)
        best = ascent.keep_best(state.best, state.x, info.value, out)
        assert best is not None
        return State(best.x, best), info

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        return state.x, None

    def finished(self, state: State) -> Array:
        return jnp.zeros(len(state.x), bool)


def fgsm(ball: Lp = Lp(), loss: Callable[[PyTree, Array], Array] = losses.cross_entropy) -> PGD:
    """The fast gradient (sign) method: :class:`PGD` with one step of length ``eps``.

    Args:
      ball: norm and box.
      loss: ``(out, y) -> [n]``, to be increased.

    Cost: 1 forward and 1 backward pass a sample.

    Source: Goodfellow et al. [goodfellow2015].

    >>> fgsm().steps
    1
    """
    return PGD(ball, steps=1, loss=loss, iterate="last")
