"""Auto-PGD: ascent with momentum and a step size that is halved when progress stalls."""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

from wdjax import distinct, loops, losses, norms
from wdjax.attacks import ascent, linearised
from wdjax.attacks.ascent import setting
from wdjax.attacks.phases import PhaseSchedule, check_widths, random_start, schedule
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, Samples, Stage, Victim

_MOMENTUM = 0.75
"""Weight of the new step; the rest is the weight of the previous one."""
_WIDTHS = {1: (10.0, 5.0, 2.0, 1.0), 2: (1.0,), math.inf: (1.0,)}
"""Radii of a run's phases in units of eps, by norm."""


class State(NamedTuple):
    x: Array
    before: Array
    """The iterate before ``x``, for the momentum."""
    peak: Array
    """The iterate of largest loss in this phase; ``height`` is its loss, ``slope`` its gradient."""
    height: Array
    slope: Array
    loss: Array
    """The loss at the previous iterate."""
    known: Array
    """``height`` at the last checkpoint of the schedule."""
    rises: Array
    """Number of steps since then that increased the loss."""
    cut: Array
    """Whether the step size was halved at the last checkpoint."""
    size: Array
    """The step size, as a share of the radius."""
    taken: Array
    """Steps taken, over all runs."""
    targets: Array | None
    """``[n, T]``, target classes."""
    keys: Array
    best: ascent.Best


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class APGD:
    r"""Auto-PGD: projected ascent with momentum whose step halves when progress stalls.

    With ``z = P(x_k + eta M_r(g_k))`` the iterates are ``x_{k+1} = P(x_k + a (z - x_k) + (1 - a)
    (x_k - x_{k-1}))``, with ``a = 3/4`` except for the first step, where it is 1. At checkpoints
    (22, 41, 57, 70, 80, 87, 93, 99 of 100 steps) ``eta`` is halved and the search returns to its
    best point if at most 3/4 of the steps since the last checkpoint increased the loss, or if the
    best loss has not grown since then and ``eta`` was not halved there.

    Args:
      ball: norm and box.
      steps: gradient steps of one run.
      loss: ``(out, y) -> [n]``, to be increased; with ``targets``, ``(out, y, target) -> [n]``. By
        default cross-entropy, with ``targets`` the targeted DLR.
      targets: 0 for an untargeted attack; else the number of target classes, at most ``K - 1``,
        each attacked in a run of its own.
      rank: the order of the targets: ``"logit"``, the largest logit at the sample first;
        ``"ratio"``, the smallest ``(z_y - z_j) / |grad (z_y - z_j)|_s`` first, among ``candidates``
        classes.
      candidates: the number of classes of largest logit that are compared for ``rank="ratio"``.
      restarts: runs, for each target; every one begins at a random point, or the first at
        ``start``.
      stop: stop attacking a sample once it is misclassified. With False its loss is raised further.
      widths: radii of a run's phases in ``eps``; the last must be 1 and takes 40 % of the steps.
        Each phase begins at the point of largest loss of the previous one. By default ``(10, 5, 2,
        1)`` for norm 1, else ``(1,)``.
      share: the first ``eta``, in radii; by default 1 for norm 1, else 2; may be traced.

    Returns the iterate of largest criterion within ``eps`` over all runs.

    Raises:
      ValueError: bad counts, another rank, widths below 1; with ``targets``, no logits.

    Cost: a run takes ``steps + 1`` forward and backward passes a sample; ``rank="ratio"`` costs 1
    forward and ``candidates`` backward passes in addition.

    Differs: the authors' code compares the first loss with 0 rather than with the loss at the
      start, and at the first checkpoint does not treat an unchanged best loss as a stall. Its
      random points lie on the sphere; ours are uniform in the ball, except for norm 1. For norm 1
      it has phases of 3, 2 and 1 eps and sign steps in the largest gradient coordinates; our step
      is shared among all coordinates. For norm 2 ``P`` projects on the ball and then clips to the
      box. With few classes DLR is replaced by the margin.

    Source: Croce and Hein [croce2020], Algorithm 1; phases: [mindthebox2021], section 3.2; the
    ratio is MALT's [melamed2024].

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = wdjax.search(APGD(steps=10), model, x, y, eps=0.2, key=jax.random.key(0))
    >>> found.success.tolist()
    [True, False]
    """

    budget: ClassVar[Literal["sample"]] = "sample"
    random: ClassVar[bool] = True

    ball: Lp = setting(Lp())
    steps: int = setting(100)
    loss: Callable[..., Array] | None = setting(None)
    targets: int = setting(0)
    rank: str = setting("logit")
    candidates: int = setting(100)
    restarts: int = setting(1)
    stop: bool = setting(True)
    widths: tuple[float, ...] | None = setting(None)
    share: float | Array | None = None

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("targets", 0), ("candidates", 1), ("restarts", 1)):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name), least))
        validate.check_choice("rank", self.rank, ("logit", "ratio"))
        object.__setattr__(self, "widths", check_widths(self.widths))

    @property
    def stages(self) -> tuple[Stage, ...]:
        climb = Stage(self._climb, self.restarts * max(1, self.targets) * self._run, self._over)
        rank = (Stage(self._rank, 1),) if self.targets and self.rank == "ratio" else ()
        return (*rank, climb)

    @property
    def _run(self) -> int:
        """The number of steps of a run: one for each evaluated point, the start included."""
        return self.steps + 1

    @property
    def _schedule(self) -> PhaseSchedule:
        """The phases and checkpoints of one run."""
        return schedule(self.steps, self.widths or _WIDTHS[self.ball.norm])

    def _radius(self, samples: Samples, taken: Array) -> Array:
        """``[n]``: the radius at step number ``taken`` ``[n]``: eps times the phase's width."""
        width = jnp.asarray(self._schedule.width, samples.x.dtype)[taken % self._run]
        return width * samples.radius

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        assert keys is not None
        x, n, targets = samples.x, len(samples.y), None
        if self.targets:
            ascent.need_logits("APGD with targets", samples.out)
            targets = ascent.top_rivals(samples.out, samples.y, self.targets)
        none, low = jnp.zeros(n, jnp.int32), jnp.full(n, -jnp.inf, x.dtype)
        if start is None:
            point = self._start(samples, keys, none)
        else:
            point = self.ball.project(start, x, self._radius(samples, none))
        # The first step of each run overwrites every field but x, keys and targets.
        return State(
            x=point, before=point, peak=point, height=low, slope=jnp.zeros_like(x), loss=low,
            known=low, rises=none, cut=none > 0, size=jnp.zeros_like(low), taken=none,
            targets=targets, keys=keys, best=ascent.Best(point, low),
        )  # fmt: skip

    def _start(self, samples: Samples, keys: Array, taken: Array) -> Array:
        """``[n, *shape]``: random points of the ball in which a run begins."""
        keys = jax.vmap(jax.random.fold_in)(keys, taken // self._run)
        return random_start(self.ball, samples.x, self._radius(samples, taken), keys)

    def _rank(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """The first stage if ``rank`` is "ratio": replaces the target classes by the nearest ones.

        Nearest are the classes whose linearised boundaries are nearest to the sample, among the
        ``candidates`` classes of largest logit.
        """
        assert state.targets is not None
        targets, info = linearised.nearest_rivals(
            victim, samples, self.ball.norm, state.targets.shape[1], self.candidates
        )
        return state._replace(targets=targets), info

    def _objective(self, state: State) -> Callable[[Array, Array], Array]:
        """The loss to ascend, ``(out, y) -> [n]``; with targets, towards each sample's target.

        The target changes from run to run, so that every sample tries its targets in turn.
        """
        if state.targets is None:
            return self.loss or losses.cross_entropy
        loss, run = self.loss or losses.targeted_dlr_or_margin, state.taken // self._run
        number = run[:, None] % state.targets.shape[1]
        target = jnp.take_along_axis(state.targets, number, axis=1)[:, 0]
        return lambda out, y: loss(out, y, target)

    def _climb(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One APGD step of every sample: evaluates ``x [n, *shape]``, then moves it.

        The step size is halved where progress stalled, and the iterate returns to the best one of
        the phase. Where the next step begins a run, the next iterate is a random point; where it
        begins a phase within a run, the best iterate projected on that phase's smaller ball.
        Iterates outside the ball of radius eps, which occur if phases are wider, never become the
        attack's result.
        """
        objective = self._objective(state)
        seen = ascent.slope(victim, state.x, samples.y, objective)
        info = ascent.note(victim, samples.y, seen)
        value = info.value
        if self._schedule.width[0] > 1:
            inside = self.ball.cost(samples.x, state.x) <= samples.radius * (1 + 1e-6)
            value = jnp.where(inside, value, -jnp.inf)
        best = cast(ascent.Best, ascent.keep_best(state.best, state.x, value, seen.out))
        loss = objective(seen.out, samples.y).astype(state.loss.dtype)
        loss = jnp.where(jnp.isfinite(loss), loss, -jnp.inf)
        judged, halve = self._judge(state, loss, seen.gradient)
        back = norms.spread(halve, state.x)
        x = jnp.where(back, judged.peak, state.x)
        moved = self._move(samples, state, x, jnp.where(back, judged.slope, seen.gradient), judged)
        taken = state.taken + 1
        begins = jnp.asarray(self._schedule.first)[taken % self._run]

        def renew() -> Array:
            point = self._start(samples, state.keys, taken)
            within = self.ball.project(judged.peak, samples.x, self._radius(samples, taken))
            point = jnp.where(norms.spread(taken % self._run == 0, x), point, within)
            return jnp.where(norms.spread(begins, x), point, moved)

        after = loops.cond(jnp.any(begins), renew, lambda: moved)
        judged = judged._replace(x=after, before=x, taken=taken, best=best)
        return ascent.hold(self._over(state), state, judged), info

    def _judge(self, state: State, loss: Array, gradient: Array) -> tuple[State, Array]:
        """Updates the phase's best iterate; halves the step size at checkpoints without progress.

        Args:
          state: with ``x`` ``[n, *shape]``, the present iterate.
          loss: ``[n]`` at ``x``, -inf where not finite.
          gradient: ``[n, *shape]`` at ``x``.

        Returns:
          The state with updated best iterate, counters and step size, and ``[n]`` booleans: whether
          the step size was halved, so that the iterate returns to the best one.
        """
        x, step, plan = state.x, state.taken % self._run, self._schedule
        first, window = jnp.asarray(plan.first)[step], jnp.asarray(plan.window)[step]
        higher = first | (loss > state.height)
        peak = jnp.where(norms.spread(higher, x), x, state.peak)
        slope = jnp.where(norms.spread(higher, x), gradient, state.slope)
        height, known = jnp.where(higher, loss, state.height), jnp.where(first, loss, state.known)
        rises = jnp.where(first, 0, state.rises + (loss > state.loss).astype(jnp.int32))
        due, cut = window > 0, state.cut & ~first
        halve = due & ((4 * rises <= 3 * window) | (~cut & (height <= known)))
        share = (1.0 if self.ball.norm == 1 else 2.0) if self.share is None else self.share
        size = jnp.where(first, jnp.asarray(share, x.dtype), state.size)
        judged = state._replace(
            peak=peak,
            height=height,
            slope=slope,
            loss=loss,
            known=jnp.where(due, height, known),
            rises=jnp.where(due, 0, rises),
            cut=jnp.where(due, halve, cut),
            size=jnp.where(halve, size / 2, size),
        )
        return judged, halve

    def _move(
        self, samples: Samples, state: State, x: Array, gradient: Array, judged: State
    ) -> Array:
        """``[n, *shape]``: the next iterate: a gradient step from ``x`` plus momentum.

        ``gradient`` is that at ``x``; ``judged`` has the step sizes as shares of the radius. The
        first step of a phase has no momentum. The result is in the present phase's ball.
        """
        first = jnp.asarray(self._schedule.first)[state.taken % self._run]
        radius = self._radius(samples, state.taken)
        ahead = self.ball.ascend(x, gradient, judged.size * radius)
        ahead, first = self.ball.project(ahead, samples.x, radius), norms.spread(first, x)
        swing = x + _MOMENTUM * (ahead - x) + (1 - _MOMENTUM) * (x - state.before)
        return self.ball.project(jnp.where(first, ahead, swing), samples.x, radius)

    def _over(self, state: State) -> Array:
        """``[n]``: whether all runs are completed or, with ``stop``, a flip has been found."""
        aims = 1 if state.targets is None else state.targets.shape[1]
        return self.finished(state) | (state.taken >= self.restarts * aims * self._run)

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        return state.best.x, None

    def finished(self, state: State) -> Array:
        return (state.best.value > 0) & self.stop
