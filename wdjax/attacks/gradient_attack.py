"""The base class of gradient attacks inside a ball: a new attack defines one step."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import distinct, loops, losses, norms
from wdjax.attacks import ascent
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim


class State(NamedTuple):
    x: Array
    memory: PyTree
    best: ascent.Best | None
    keys: Array | None = None
    """Keys for the random starts of further runs; None for one run."""
    taken: Array | None = None
    """Steps taken, over all runs; None for one run."""


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientAttack:
    r"""Iterated gradient ascent on a loss; a subclass defines the step.

    A subclass is a frozen dataclass registered with ``jax.tree_util.register_dataclass``. It
    defines :meth:`step`, and :meth:`memory` if its steps carry a state (momentum, averages). The
    points that a step returns are projected on the ball and the box. ``docs/own_attack.md`` has an
    example.

    Args:
      ball: norm and box.
      steps: gradient steps of a run.
      loss: ``(out, y) -> [n]``, to be increased; see :mod:`wdjax.losses`.
      random_start: start uniformly in the ball instead of at the sample; makes a key necessary.
      iterate: ``"best"`` returns the iterate of largest criterion, ``"last"`` the last one.
      restarts: number of runs; all but the first start uniformly in the ball, which makes a key
        necessary, and the best iterate of all runs is returned.

    Raises:
      ValueError: fewer than one step or run, another iterate, restarts without ``"best"``.

    Cost: per step 1 forward and 1 backward pass a sample; 1 more forward for ``"best"``, and 1
      forward and 1 backward for every further run.

    Source: this library's own.

    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass(frozen=True)
    ... class SignSteps(GradientAttack):
    ...     def step(self, samples, x, gradient, memory):
    ...         return x + norms.spread(samples.radius / 4, x) * jnp.sign(gradient), memory
    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> wdjax.search(SignSteps(steps=5), model, x, y, eps=0.2).success.tolist()
    [True, False]
    """

    budget: ClassVar[Literal["sample"]] = "sample"
    cycles: ClassVar[bool] = False
    """Whether iterates may alternate between two points; see :class:`~wdjax.core.Stage`."""

    ball: Lp = setting(Lp())
    steps: int = setting(40)
    loss: Callable[[PyTree, Array], Array] = setting(losses.cross_entropy)
    random_start: bool = setting(False)
    iterate: str = setting("best")
    restarts: int = setting(1)

    def step(
        self, samples: Samples, x: Array, gradient: Array, memory: PyTree
    ) -> tuple[Array, PyTree]:
        """One step, of every sample independently: the next points and the next memory.

        Args:
          samples: what is attacked; ``samples.x`` ``[n, *shape]``, ``samples.radius`` ``[n]``.
          x: ``[n, *shape]``, the present points.
          gradient: ``[n, *shape]``, of the loss there, 0 in coordinates where it was not finite.
          memory: returned by the previous step, or by :meth:`memory` before the first.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no step: define "
            "step(self, samples, x, gradient, memory) -> (x, memory)."
        )

    def memory(self, samples: Samples) -> PyTree:
        """The memory before a run's first step: a pytree of ``[n, ...]`` leaves, or None."""
        return None

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
        # The step between two runs evaluates the last point of the first of them.
        steps = self.restarts * (self.steps + 1) - 1
        return (Stage(self._ascend, steps, cycles=self.cycles and self.restarts == 1), *last)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        point = samples.x if start is None else start
        if self.random_start:
            point = self._scattered(samples, point, keys)
        elif start is not None:
            point = self.ball.project(point, samples.x, samples.radius)
        best = ascent.no_best(point, self.iterate == "best")
        state = State(point, self.memory(samples), best)
        if self.restarts == 1:
            return state
        return state._replace(keys=keys, taken=jnp.zeros(len(point), jnp.int32))

    def _scattered(self, samples: Samples, around: Array, keys: Array | None) -> Array:
        """``[n, *shape]``: random points at most eps from ``around``, projected on the ball."""
        x = samples.x
        noise = jax.vmap(lambda key: self.ball.noise(key, x.shape[1:], x.dtype))(keys)
        moved = around + norms.spread(samples.radius, x) * noise
        return self.ball.project(moved, x, samples.radius)

    def _ascend(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One iteration: gradient of the loss, the subclass's ``step``, projection on the ball.

        The point before the step may become the best one. Samples that have completed a run of
        ``steps`` begin the next one.
        """
        seen = ascent.slope(victim, state.x, samples.y, self.loss)
        info = ascent.note(victim, samples.y, seen)
        moved, memory = self.step(samples, state.x, seen.gradient, state.memory)
        moved = self.ball.project(moved, samples.x, samples.radius)
        best = ascent.keep_best(state.best, state.x, info.value, seen.out)
        return self._restarted(samples, state._replace(x=moved, memory=memory, best=best)), info

    def _restarted(self, samples: Samples, state: State) -> State:
        """Begins the next run, at random points of the ball, for samples that completed one.

        A run takes ``steps + 1`` steps, since the last one only evaluates its last point. The
        subclass's memory begins again too. With one run only, the state is returned as it is.
        """
        if state.keys is None or state.taken is None:
            return state
        before, taken = state.keys, state.taken + 1
        over = taken % (self.steps + 1) == 0

        def renew() -> tuple[Array, PyTree]:
            keys = jax.vmap(jax.random.fold_in)(before, taken)
            fresh = self._scattered(samples, samples.x, keys), self.memory(samples)
            return ascent.hold(~over, (state.x, state.memory), fresh)

        kept = state.x, state.memory
        x, memory = loops.cond(jnp.any(over), renew, lambda: kept)
        return state._replace(x=x, memory=memory, taken=taken)

    def _compare(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """The last stage if the best iterate counts: tests the last point, moves to the best."""
        out, info = ascent.judge(victim, state.x, samples.y)
        best = ascent.keep_best(state.best, state.x, info.value, out)
        assert best is not None
        return state._replace(x=best.x, best=best), info

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        return state.x, None

    def finished(self, state: State) -> Array:
        return jnp.zeros(len(state.x), bool)
