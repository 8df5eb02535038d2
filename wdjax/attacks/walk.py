"""The walk: along the boundary, back towards the sample."""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import losses, norms
from wdjax.attacks import ascent, nearest, rivals
from wdjax.attacks.ascent import setting
from wdjax.attacks.nearest import Nearest
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim

_RANKED = 5
"""Classes that are compared to find the targets."""
_BEYOND = 0.05
"""How far beyond the linearised boundary a step aims, as a share of the distance to it."""
_LEAST = 0.125
"""Of the radius' largest growth, the least in a hasty walk, and before the first flip."""


class State(NamedTuple):
    x: Array
    home: Array
    """Where each walk begins."""
    rivals: Array | None
    """``[n, targets]``, None without targets."""
    reach: Array
    """Radius of the ball that the walk is in; inf before its first step."""
    taken: Array
    """Steps of this walk."""
    best: Nearest
    limit: Array
    """Flips count within this distance only."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    r"""A minimum-norm attack that walks along the boundary back towards the sample.

    Every step goes along the gradient of the margin, ``step_size`` times the current radius long,
    and is projected on the ball of that radius and on the box. The radius follows the boundary: it
    becomes the distance at which the margin would be 0 if it were linear; once a flip is known it
    changes by a share of ``shrink`` at most and never exceeds the nearest one. Step and share fall
    along a cosine. Where a walk starts decides what it finds: small gradients at the sample need
    ``far``, models with many near classes need ``targets``; ``wdjax.search(..., start=points)``
    begins anywhere, and :func:`wdjax.best` joins several walks.

    Args:
      ball: norm and box.
      steps: gradient steps of one walk; below 12 it gets nowhere.
      far: start at a uniformly random point of the box; where there is an ``eps`` above 0, the
        first step leads into the ball of radius ``width * eps``, mostly to one of its corners.
        Makes a key necessary.
      targets: walk to each of that many classes, nearest first (:func:`wdjax.attacks.rivals.rank`),
        instead of to the largest.
      within: look for a flip within ``eps`` only: a sample that has one is done, and farther ones
        do not count. Makes a fixed-budget attack of it.
      step_size: in units of the current radius, at the first step.
      shrink: the radius' largest relative change, at the first step.
      haste: 0 lets the radius follow the linearised margin; 1 shrinks it by ``shrink`` after every
        flip, from the flip's distance, and grows it after every other step. Neither is better
        everywhere.
      width: radius after a far start, in units of ``eps``: a little more than the distance of a
        known flip to find a nearer one.

    ``cost`` in the result is the distance, and ``success`` tells where it is one at all.

    Raises:
      ValueError: a count below its least, targets for a model without logits.

    Cost: 1 forward and 1 backward pass a step, 1 more forward a walk; for targets 1 forward and
    ``min(5, K - 1)`` backward passes more.

    Differs: from FMN in steps that are relative to the radius in every norm, in a radius that
    follows the linearised margin where that is near, in the box, and in the test of the last
    iterate.

    Source: this library's own; the radius that shrinks on flips and grows otherwise is that of
    [rony2019], the first estimate and the projection those of [pintor2021], equation 5.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = wdjax.search(Walk(steps=30), model, x, y)
    >>> [round(float(d), 2) for d in found.cost]
    [0.1, 0.4]
    """

    ball: Lp = setting(Lp())
    steps: int = setting(40)
    far: bool = setting(False)
    targets: int = setting(0)
    within: bool = setting(False)
    step_size: float | Array = 1.0
    shrink: float | Array = 0.4
    haste: float | Array = 0.0
    width: float | Array = 2.0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("targets", 0)):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name), least))

    @property
    def budget(self) -> Literal["sample", "none"]:
        return "sample" if self.within else "none"

    @property
    def random(self) -> bool:
        return self.far

    @property
    def stages(self) -> tuple[Stage, ...]:
        done = self._near if self.within else None
        if not self.targets:
            return Stage(self._walk, self.steps, done), Stage(self._end, 1, done)
        walks: list[Stage] = []
        for place in range(self.targets):
            walks.append(Stage(functools.partial(self._walk, place=place), self.steps, done))
            walks.append(Stage(self._end, 1, done))
        return Stage(self._rank, 1, done), *walks

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x, y = samples.x, samples.y
        if self.targets:
            ascent.need_logits("Walk with targets", samples.out)
        home = x if start is None else self.ball.clip(start)
        if self.far:
            home = nearest.far_start(self.ball, home, keys)
        classes = jnp.repeat(y[:, None], self.targets, axis=1) if self.targets else None
        unknown = jnp.full(len(y), jnp.inf, x.dtype)
        none = jnp.zeros(len(y), jnp.int32)
        best = nearest.nearest_before(victim, samples)
        limit = samples.radius if self.within else unknown
        return State(home, home, classes, unknown, none, best, limit)

    def _rank(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        among = max(_RANKED, self.targets)
        ranking, info = rivals.rank(
            victim, samples.x, samples.y, self.ball.norm, among, self.targets
        )
        # With fewer classes than targets, the last is tried again.
        missing = self.targets - ranking.classes.shape[1]
        classes = jnp.pad(ranking.classes, ((0, 0), (0, missing)), mode="edge")
        return state._replace(rivals=classes), info

    def _walk(
        self, victim: Victim, samples: Samples, state: State, place: int | None = None
    ) -> tuple[State, Info]:
        x, y, norm = state.x, samples.y, self.ball.norm

        def objective(out: PyTree, y: Array) -> Array:
            if place is None or state.rivals is None:
                return victim.criterion(out, y)
            return losses.targeted_margin(out, y, state.rivals[:, place])

        seen = ascent.slope(victim, x, y, objective)
        info = ascent.note(victim, y, seen)
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, x, seen.out)
        fallen = ascent.read(victim.criterion, samples, seen.out).beyond > 0
        value = ascent.read(objective, samples, seen.out).beyond
        size = nearest.cosine(self.step_size, 0.01 * self.step_size, state.taken, self.steps)
        share = nearest.cosine(self.shrink, 0.001, state.taken, self.steps)
        gap = nearest.plane_distance(value, seen.gradient, norm)
        distance = norms.lp_norm(x - samples.x, norm)
        bound = jnp.where(best.known, state.reach, jnp.inf)
        reach = self._follow(bound, distance, gap, fallen, share)
        # Corners and the box keep steps from gaining what the linear model says; without a flip to
        # come back from, the radius grows all the same.
        stuck = jnp.isfinite(state.reach) & ~best.known
        reach = jnp.where(stuck, jnp.maximum(reach, (1 + _LEAST * share) * state.reach), reach)
        reach = jnp.minimum(jnp.minimum(reach, best.cost), self._first(samples, state))
        step = norms.spread(size * reach, x) * nearest.direction(seen.gradient, norm)
        moved = self.ball.project(x + step, samples.x, reach)
        best = self._settled(state, best)
        return state._replace(x=moved, reach=reach, taken=state.taken + 1, best=best), info

    def _first(self, samples: Samples, state: State) -> Array:
        """The largest radius after a far start, ``[n]``; inf at all later steps."""
        if not self.far or samples.eps is None:
            return jnp.full_like(state.reach, jnp.inf)
        scale = jax.lax.stop_gradient(samples.eps)
        binding = (state.taken == 0) & (scale > 0)
        return jnp.where(binding, self.width * scale, jnp.inf)

    def _follow(
        self, reach: Array, distance: Array, gap: Array, fallen: Array, share: Array
    ) -> Array:
        """The next radius, from the last one and the distance to the linearised boundary.

        A last radius of inf binds nothing.
        """
        # A little beyond the boundary on either side, or the points would end on it. Where a flip
        # is flat nothing tells how near the boundary is, and the radius shrinks as it may.
        gap = jnp.where(fallen & (gap == 0), distance, gap)
        linear = distance + jnp.where(fallen, _BEYOND - 1, _BEYOND + 1) * gap
        base = jnp.where(fallen, reach + self.haste * (distance - reach), reach)
        low = base * (1 + jnp.where(fallen, -1, _LEAST * self.haste + self.haste - 1) * share)
        high = base * (1 + jnp.where(fallen, -self.haste, 1) * share)
        first = jnp.where(fallen, jnp.maximum(linear, distance * (1 - share)), linear)
        return jnp.where(jnp.isfinite(reach), jnp.clip(linear, low, high), first)

    def _end(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """Tests the last point and goes back to the start of the next walk."""
        out, info = ascent.judge(victim, state.x, samples.y)
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, state.x, out)
        best = self._settled(state, best)
        unknown = jnp.full_like(state.reach, jnp.inf)
        again = state._replace(x=state.home, reach=unknown, best=best)
        return again._replace(taken=jnp.zeros_like(state.taken)), info

    def _settled(self, state: State, best: Nearest) -> Nearest:
        """The first flip within the limit stays, where the attack ends with it."""
        return nearest.keep(state.best, best, self._near(state)) if self.within else best

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        return state.best.x, None

    def finished(self, state: State) -> Array:
        return self._near(state)

    def _near(self, state: State) -> Array:
        return state.best.known & (state.best.cost <= state.limit)
