"""Sequential linear programming (SLP): shorter flips, by the boundary linearised at the nearest."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from wdjax import distinct, norms
from wdjax.attacks import ascent, hyperplane, nearest
from wdjax.attacks.ascent import setting
from wdjax.attacks.nearest import Nearest
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, Samples, Stage, Victim

_SHORTER, _LONGER = 0.3, 2.0
"""Change of the tried share of the way after a point that is no nearer flip, and after one that
is."""


class State(NamedTuple):
    x: Array
    """Where the boundary was linearised last: the nearest flip if there is one."""
    goal: Array
    """The sample's nearest point on that linearised boundary, and a little beyond."""
    share: Array
    """``[n]``: the share of the way from ``x`` to ``goal`` that is tried next."""
    best: Nearest


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class SLP(nearest.NearestAttack):
    r"""Sequential linear programming with a line search: shortens flips that are known.

    With ``P`` the projection of the sample on the boundary that is linearised at the nearest flip
    z, inside the box (:mod:`wdjax.attacks.hyperplane`; for norms 1 and inf a linear program), the
    next point tried is

        z + t (x + (1 + overshoot) (P - x) - z),

    with t = 1 at first. A nearer flip is the next z, and t doubles, up to 1; after any other point
    t becomes .3 of itself. For a linear model of two classes the first point tried is the nearest
    flip, in any norm.

    It is a search to end with: begin at flips of another attack (``start=``). From samples that are
    no flips it follows linearised boundaries without the line search, and may circle.

    Args:
      ball: norm and box.
      steps: points tried, and the start.
      overshoot: how far past the linearised boundary to go, as a share of the way from the sample.

    Raises:
      ValueError: norm 0, fewer than one step.

    Cost: 1 forward and 1 backward pass a step, 1 more forward; the projection of norm 1 is a
    bisection.

    Source: the projection is that of [fab2020], equations 4 to 7; sequences of linear programs are
    a standard method, the line search is this library's own.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0], [0.5, 0.0]]))
    >>> x, y = jnp.array([[0.6, 0.4, 0.5]]), jnp.array([0])
    >>> start = jnp.array([[0.0, 1.0, 0.0]])
    >>> found = wdjax.search(SLP(Lp(1), steps=2), model, x, y, start=start)
    >>> round(float(found.cost[0]), 3)
    0.325
    """

    ball: Lp = setting(Lp(1))
    steps: int = setting(20)
    overshoot: float | Array = 1e-3

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))
        nearest.check_norms("SLP", self.ball, (1, 2, jnp.inf))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(self._step, self.steps), Stage(self._end, 1)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x = samples.x if start is None else self.ball.clip(start)
        return State(
            x, x, jnp.ones_like(samples.y, x.dtype), nearest.nearest_before(victim, samples)
        )

    def _step(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """Tests the point on the way to the goal, and linearises the boundary there."""
        home, norm, tried = samples.x, self.ball.norm, self._iterate(samples, state)
        seen = ascent.slope(victim, tried, samples.y, victim.criterion)
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, tried, seen.out)
        value = ascent.read(victim.criterion, samples, seen.out).beyond
        back = jnp.sum((seen.gradient * (home - tried)).reshape(len(home), -1), axis=1)
        onto = hyperplane.project(home, seen.gradient, value + back, norm, self.ball.box)
        goal = self.ball.clip(home + (1 + self.overshoot) * (onto - home))
        nearer = best.cost < state.best.cost
        share = state.share * jnp.where(nearer, _LONGER, _SHORTER)
        share = jnp.where(best.known, jnp.minimum(share, 1.0), 1.0)
        old, new = (state.x, state.goal), (tried, goal)
        x, goal = nearest.keep(old, new, best.known & ~nearer)
        return State(x, goal, share, best), ascent.note(victim, samples.y, seen)

    def _iterate(self, samples: Samples, state: State) -> Array:
        share = norms.spread(state.share, state.x)
        return self.ball.clip(state.x + share * (state.goal - state.x))
