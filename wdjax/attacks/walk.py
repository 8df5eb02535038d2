"""A minimum-norm attack that walks along the boundary towards the sample."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from wdjax import distinct, losses, norms
from wdjax.attacks import ascent, nearest, rivals
from wdjax.attacks.ascent import setting
from wdjax.attacks.nearest import Nearest
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Criterion, Info, PyTree, Samples, Stage, Victim

_RANKED = 5
"""The number of classes compared to rank the targets."""
_COLUMNS = 3
"""The least number of targets that a state has room for."""
_BEYOND = 0.05
"""How far beyond the linearised boundary a step aims, as a share of the distance to it."""
_LEAST = 0.125
"""The radius' least growth, as a share of its largest, in a hasty walk and until the first flip."""


class State(NamedTuple):
    x: Array
    home: Array
    """The start of each walk, ``[n, *shape]``."""
    rivals: Array | None
    """``[n, columns]``: the classes to walk to, the label for none; None if no walk has one."""
    walk: Array
    """``[n]``: the number of the present walk, which is the column of its target."""
    first: Array
    """``[n]``: the largest radius of a walk's first step."""
    reach: Array
    """The walk's current radius, ``[n]``; inf before its first step."""
    taken: Array
    """Steps of the current walk."""
    best: Nearest
    limit: Array
    """Flips at a larger distance than this do not count."""


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    r"""A minimum-norm attack that walks along the boundary back towards the sample.

    Every step goes along the gradient of the margin, ``step_size`` times the current radius long,
    and is projected on the ball of that radius and on the box. The radius becomes the distance at
    which the margin would be 0 if it were linear; once there is a flip, it changes by at most the
    share ``shrink`` and never exceeds the distance of the nearest flip. Step and share fall along a
    cosine. The start decides what a walk finds: small gradients at the sample need ``far``, models
    with many near classes need ``targets``; ``wdjax.search(..., start=points)`` begins anywhere,
    and :func:`wdjax.best_of` combines several walks.

    Args:
      ball: norm and box.
      steps: gradient steps of one walk; fewer than 12 are too few.
      far: start at a uniformly random point of the box; where ``eps`` is given and positive, the
        first step projects on the ball of radius ``width * eps``, mostly on one of its corners.
        Makes a key necessary.
      targets: number of classes to walk to, each in a walk of its own, nearest first
        (:func:`wdjax.attacks.rivals.rank`); with 0 one walk ascends the criterion.
      within: look only for flips within ``eps`` and stop at the first: a fixed-budget attack.
      step_size: in units of the current radius, at the first step.
      shrink: the radius' largest relative change, at the first step.
      haste: with 0 the radius follows the linearised margin; with 1 it shrinks by ``shrink`` after
        every flip, from the flip's distance, and grows after every other step. Neither is better
        everywhere.
      width: radius after a far start, in units of ``eps``; it should be a little more than the
        distance of a known flip.

    ``cost`` in the result is the distance; it is meaningful where ``success`` is True.

    Raises:
      ValueError: a count below its least, targets for a model without logits.

    Cost: 1 forward and 1 backward pass a step, 1 more forward a walk; for targets 1 forward and
    ``min(5, K - 1)`` backward passes more.

    Differs: from FMN in step sizes relative to the radius in every norm, in a radius that follows
    the linearised margin near the boundary, in the box, and in the test of the last iterate.

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
        ranking = Stage(self._rank, 1 if self.targets else 0, done)
        walk = Stage(self._walk, self.steps, done), Stage(self._end, 1, done)
        return ranking, *walk * max(1, self.targets)

    @property
    def shared(self) -> tuple["Walk", "Walk"]:
        """Of :class:`~wdjax.core.Attack`: one program begins, and one walks, all walks alike.

        A class of another's that inherits from this one has steps of its own.
        """
        if type(self) is not Walk:
            return self, self
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        one = SharedWalk(**given | {"targets": self._columns})
        return one, dataclasses.replace(one, far=False)

    @property
    def _columns(self) -> int:
        """How many targets a state has room for: as many for one target as for a few."""
        return max(_COLUMNS, self.targets)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x, y = samples.x, samples.y
        home = x if start is None else self.ball.clip(start)
        if self.far:
            home = nearest.far_start(self.ball, home, keys)
        aims = self.targets and ascent.are_logits(samples.out)
        classes = jnp.repeat(y[:, None], self._columns, axis=1) if aims else None
        unknown = jnp.full(len(y), jnp.inf, x.dtype)
        none = jnp.zeros(len(y), jnp.int32)
        best = nearest.nearest_before(victim, samples)
        limit = samples.radius if self.within else unknown
        first = unknown
        if self.far and samples.eps is not None:
            scale = jax.lax.stop_gradient(samples.eps).astype(x.dtype)
            first = jnp.where(scale > 0, self.width * scale, unknown)
        return State(home, home, classes, none, first, unknown, none, best, limit)

    def _rank(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """The first stage with targets: chooses each sample's nearest target classes."""
        ascent.need_logits("Walk with targets", samples.out)
        among = max(_RANKED, self._columns)
        ranking, info = rivals.rank(
            victim, samples.x, samples.y, self.ball.norm, among, self._columns
        )
        # With fewer classes than targets, the last class is repeated.
        missing = self._columns - ranking.classes.shape[1]
        classes = jnp.pad(ranking.classes, ((0, 0), (0, missing)), mode="edge")
        return state._replace(rivals=classes), info

    def _walk(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step of a walk, towards its target or, without targets, up the criterion.

        The step's length is ``step_size`` times the new radius, and the point is projected on the
        ball of that radius. Before the first flip, a radius that does not grow by itself is made to
        grow. The present point is kept if it is the nearest flip.
        """
        x, y, norm = state.x, samples.y, self.ball.norm
        target = y
        if state.rivals is not None:
            target = jnp.take_along_axis(state.rivals, state.walk[:, None], axis=1)[:, 0]
        towards = functools.partial(losses.targeted_margin, target=target)

        def objective(out: PyTree, y: Array) -> Array:
            if state.rivals is None:
                return victim.criterion(out, y)
            return _either(target != y, towards, victim.criterion, out, y)

        seen = ascent.slope(victim, x, y, objective)
        info = ascent.note(victim, y, seen)
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, x, seen.out)
        value = ascent.read(victim.criterion, samples, seen.out).beyond
        fallen = value > 0
        if state.rivals is not None:
            aimed = ascent.read(towards, samples, seen.out).beyond.astype(value.dtype)
            value = jnp.where(target != y, aimed, value)
        size = nearest.cosine(self.step_size, 0.01 * self.step_size, state.taken, self.steps)
        share = nearest.cosine(self.shrink, 0.001, state.taken, self.steps)
        gap = nearest.plane_distance(value, seen.gradient, norm)
        distance = norms.lp_norm(x - samples.x, norm)
        bound = jnp.where(best.known, state.reach, jnp.inf)
        reach = self._follow(bound, distance, gap, fallen, share)
        # At corners and in the box a step gains less than the linear model predicts; until there
        # is a flip, the radius grows all the same.
        stuck = jnp.isfinite(state.reach) & ~best.known
        reach = jnp.where(stuck, jnp.maximum(reach, (1 + _LEAST * share) * state.reach), reach)
        reach = jnp.minimum(reach, jnp.minimum(best.cost, self.ball.diameter(x.shape[1:])))
        reach = jnp.where(state.taken == 0, jnp.minimum(reach, state.first), reach)
        step = norms.spread(size * reach, x) * nearest.direction(seen.gradient, norm)
        moved = self.ball.project(x + step, samples.x, reach)
        best = self._settled(state, best)
        return state._replace(x=moved, reach=reach, taken=state.taken + 1, best=best), info

    def _follow(
        self, reach: Array, distance: Array, gap: Array, fallen: Array, share: Array
    ) -> Array:
        """``[n]``: the next radius, the distance at which the linearised margin would be zero.

        Args:
          reach: ``[n]``, the last radius, of which the next differs by at most a share; inf before
            the first flip, where it may take any value.
          distance: ``[n]``, from the sample to the present point.
          gap: ``[n]``, from the present point to the linearised boundary.
          fallen: ``[n]``, whether the present point is a flip.
          share: the largest relative change.
        """
        # Aim a little beyond the boundary, from either side, or points would end on it. At a flip
        # with zero gradient the distance is unknown, and the radius shrinks as far as it may.
        gap = jnp.where(fallen & (gap == 0), distance, gap)
        linear = distance + jnp.where(fallen, _BEYOND - 1, _BEYOND + 1) * gap
        base = jnp.where(fallen, reach + self.haste * (distance - reach), reach)
        low = base * (1 + jnp.where(fallen, -1, _LEAST * self.haste + self.haste - 1) * share)
        high = base * (1 + jnp.where(fallen, -self.haste, 1) * share)
        first = jnp.where(fallen, jnp.maximum(linear, distance * (1 - share)), linear)
        return jnp.where(jnp.isfinite(reach), jnp.clip(linear, low, high), first)

    def _end(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """Ends a walk: tests its last point, and returns to the start for the next walk."""
        out, info = ascent.judge(victim, state.x, samples.y)
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, state.x, out)
        best = self._settled(state, best)
        unknown = jnp.full_like(state.reach, jnp.inf)
        again = state._replace(x=state.home, reach=unknown, best=best)
        return again._replace(walk=state.walk + 1, taken=jnp.zeros_like(state.taken)), info

    def _settled(self, state: State, best: Nearest) -> Nearest:
        """``best``; with ``within``, the old flip where it is inside the limit already."""
        return nearest.keep(state.best, best, self._near(state)) if self.within else best

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        return state.best.x, None

    def finished(self, state: State) -> Array:
        return self._near(state)

    def _near(self, state: State) -> Array:
        """``[n]``: whether there is a flip at a distance of at most the limit."""
        return state.best.known & (state.best.cost <= state.limit)


def _either(which: Array, one: Criterion, other: Criterion, out: Array, y: Array) -> Array:
    """``[n]``: for its gradient alone, that of ``one`` or, where not ``which``, that of ``other``.

    A choice between both criteria would have NaN gradients where the one that is not chosen has an
    infinite slope.
    """

    def slope(criterion: Criterion) -> Array:
        value, pullback = jax.vjp(lambda out: criterion(out, y), out)
        return cast(Array, pullback(jnp.ones_like(value))[0])

    chosen = jnp.where(which[:, None], slope(one), slope(other))
    return jnp.sum(lax.stop_gradient(chosen) * out, axis=-1)


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedWalk(Walk):
    """A walk whose number of steps is a leaf, so that walks of any length share its programs."""

    steps: Any = 40

    def __post_init__(self) -> None:
        """Nothing: its settings are those of a walk, which checked them."""
