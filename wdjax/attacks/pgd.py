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
    keys: Array | None = None
    """For the random starts of further runs,"""
    taken: Array | None = None
    """and the steps so far; None where there is one run."""


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
      restarts: runs; all but the first start uniformly in the ball, which makes a key necessary,
        and the best iterate of all of them counts.

    Raises:
      ValueError: fewer than one step or run, another iterate, restarts without ``"best"``.

    Cost: per step 1 forward and 1 backward pass a sample; 1 more forward for ``"best"``, and of
      each for every further run.

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
    restarts: int = setting(1)

    def __post_init__(self) -> None:
        for name in ("steps", "restarts"):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name)))
        validate.check_choice("iterate", self.iterate, ("best", "last"))
        if self.restarts > 1 and self.iterate != "best":
            raise ValueError(
                f"restarts must be 1 where the last iterate counts, got {self.restarts}; pass "
                'iterate="best".'
            )

    @property
    def random(self) -> bool:
        return self.random_start or self.restarts > 1

    @property
    def stages(self) -> tuple[Stage, ...]:
        last = (Stage(self._compare, 1),) if self.iterate == "best" else ()
        # The step between two runs looks at where the first one ended.
        steps = self.restarts * (self.steps + 1) - 1
        return (Stage(self._ascend, steps, cycles=self.restarts == 1), *last)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x, eps = samples.x, samples.radius
        point = x if start is None else start
        if self.random_start:
            point = self._scattered(samples, point, keys)
        elif point is not x:
            point = self.ball.project(point, x, eps)
        state = State(point, ascent.no_best(point, self.iterate == "best"))
        if self.restarts == 1:
            return state
        return state._replace(keys=keys, taken=jnp.zeros(len(x), jnp.int32))

    def _scattered(self, samples: Samples, around: Array, keys: Array | None) -> Array:
        """Points ``[n, *shape]`` drawn uniformly from the ball, here around ``around``."""
        x = samples.x
        noise = jax.vmap(lambda key: self.ball.noise(key, x.shape[1:], x.dtype))(keys)
        spread = around + norms.spread(samples.radius, x) * noise
        return self.ball.project(spread, x, samples.radius)

    def _ascend(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        eps, size = samples.radius, self.step_size
        if size is None:
            share = 1 / 4 if self.ball.norm == 1 else 2.5 / self.steps
            size = share * eps if self.steps > 1 else eps
        seen = ascent.slope(victim, state.x, samples.y, self.loss)
        info = ascent.note(victim, samples.y, seen)
        moved = self.ball.ascend(state.x, seen.gradient, size)
        moved = self.ball.project(moved, samples.x, eps)
        best = ascent.keep_best(state.best, state.x, info.value, seen.out)
        return self._restarted(samples, state._replace(x=moved, best=best)), info

    def _restarted(self, samples: Samples, state: State) -> State:
        """At the end of a run, ``steps + 1`` steps, begins another one at random points."""
        if state.keys is None or state.taken is None:
            return state
        before, taken = state.keys, state.taken + 1
        over = taken % (self.steps + 1) == 0

        def renew() -> Array:
            keys = jax.vmap(jax.random.fold_in)(before, taken)
            fresh = self._scattered(samples, samples.x, keys)
            return jnp.where(norms.spread(over, state.x), fresh, state.x)

        return state._replace(x=jax.lax.cond(jnp.any(over), renew, lambda: state.x), taken=taken)

    def _compare(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        out, info = ascent.judge(victim, state.x, samples.y)
        best = ascent.keep_best(state.best, state.x, info.value, out)
        assert best is not None
        return state._replace(x=best.x, best=best), info

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
