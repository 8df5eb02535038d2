"""The attack of Carlini and Wagner: distance plus a weighted margin, descended by Adam."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from wdjax import distinct, norms
from wdjax.attacks import ascent, nearest
from wdjax.attacks.ascent import setting
from wdjax.attacks.nearest import Nearest
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim

_INSIDE = 1 - 1e-6
"""Scales samples away from the edge of the box, where arctanh is infinite."""


class State(NamedTuple):
    w: Array
    """``[n, *shape]``: the point before the tanh that keeps it in the box."""
    home: Array
    moments: Any
    """Adam's moments, per sample."""
    weight: Array
    low: Array
    high: Array
    """``low`` and ``high`` bracket the smallest weight of the margin that gives a flip."""
    flipped: Array
    """Whether the present round had a flip."""
    best: Nearest


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class CarliniWagner(nearest.NearestAttack):
    r"""Carlini and Wagner's l2 attack: Adam on ``||delta||_2^2 + c max(z_y - max_j z_j + k, 0)``.

    The point is ``(tanh(w) + 1) / 2`` of the box's width, so that it cannot leave the box. After
    every round the weight c is bisected: if the round had a flip, c becomes the mean of itself and
    the largest weight without a flip; otherwise the mean of itself and the smallest weight with a
    flip, or 10 c if there is none yet.

    Args:
      steps: Adam steps of each round.
      rounds: the number of weights tried.
      step_size: Adam's.
      weight: c of the first round, multiplied by ``width^2 / |margin of the sample|``, of the
        box's width.
      confidence: k, in logits; with 0 the margin term ends at the boundary.

    Raises:
      ValueError: another norm, a count below 1.

    Cost: 1 forward and 1 backward pass a step, 1 more forward a round.

    Differs: a round never ends early, and the last iterate of each is tested. The first weight is
    divided by the sample's margin, where the paper uses one number for all nets: c has the units of
    a squared distance over a margin, and a first weight that is orders of magnitude off leaves no
    rounds to bisect in.

    Source: Carlini and Wagner [carlini2017], section VI-A.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: 9 * x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = wdjax.search(CarliniWagner(rounds=3, step_size=0.05), model, x, y)
    >>> [round(float(d), 2) for d in found.cost]
    [0.14, 0.57]
    """

    ball: Lp = setting(Lp(2))
    steps: int = setting(100)
    rounds: int = setting(9)
    step_size: float | Array = 0.01
    weight: float | Array = 0.5
    confidence: float | Array = 0.0

    def __post_init__(self) -> None:
        for name in ("steps", "rounds"):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name)))
        nearest.check_norms("Carlini and Wagner", self.ball, (2,))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage(self._descend, self.steps), Stage(self._weigh, 1)) * self.rounds

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x = samples.x
        w = self._unbounded(x if start is None else self.ball.clip(start))
        zero = jnp.zeros(len(x), x.dtype)
        weight = zero + self.weight
        best = nearest.nearest_before(victim, samples)
        moments = jax.vmap(optax.scale_by_adam().init)(w)
        return State(w, w, moments, weight, zero, zero + jnp.inf, zero > 0, best)

    def _unbounded(self, x: Array) -> Array:
        """``[n, *shape]``: the w of points ``x``, by arctanh; ``x`` itself if there is no box."""
        if self.ball.box is None:
            return x
        low, high = self.ball.box
        return jnp.arctanh(_INSIDE * (2 * (x - low) / (high - low) - 1))

    def _bounded(self, w: Array) -> Array:
        """``[n, *shape]``: the points of variables ``w``, by tanh; ``w`` itself without a box."""
        if self.ball.box is None:
            return w
        low, high = self.ball.box
        return jnp.clip(low + (high - low) * (jnp.tanh(w) + 1) / 2, low, high)

    def _descend(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One Adam step of ``w`` up the weighted criterion less the squared l2 distance.

        The weight is divided by the absolute criterion of the clean sample. The criterion has no
        gradient where it exceeds ``confidence`` by more than rounding. The present point is kept if
        it is the nearest flip.
        """
        x, back = jax.vjp(self._bounded, state.w)
        seen = ascent.slope(victim, x, samples.y, victim.criterion)
        info = ascent.note(victim, samples.y, seen)
        reading = ascent.read(victim.criterion, samples, seen.out)
        clean = jnp.abs(victim.criterion(samples.out, samples.y)).astype(x.dtype)
        weight = state.weight * self.ball.width**2 / jnp.where(clean > 0, clean, 1.0)
        lacking = jnp.where(reading.beyond < self.confidence, weight, 0.0)
        pull = 2 * (samples.x - x)
        (gradient,) = back(pull + norms.spread(lacking, x) * seen.gradient)
        state = self._keep(victim, samples, state, x, seen.out)
        update, moments = ascent.adam(gradient, state.moments)
        return state._replace(w=state.w + self.step_size * update, moments=moments), info

    def _keep(self, victim: Victim, samples: Samples, state: State, x: Array, out: PyTree) -> State:
        """The state that keeps those points ``x``, with outputs ``out``, that are nearest flips."""
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, x, out)
        flipped = state.flipped | nearest.flips(victim, samples, out)
        return state._replace(best=best, flipped=flipped)

    def _weigh(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """Ends a round: tests its last point, bisects the weight, returns to the first point.

        A round with a flip lowers ``high``, one without raises ``low``; until a round has flipped,
        the weight is multiplied by 10. Adam's moments begin again at zero.
        """
        x = self._bounded(state.w)
        out, info = ascent.judge(victim, x, samples.y)
        state = self._keep(victim, samples, state, x, out)
        low = jnp.where(state.flipped, state.low, state.weight)
        high = jnp.where(state.flipped, state.weight, state.high)
        bounded = jnp.isfinite(high)
        weight = jnp.where(bounded, (low + jnp.where(bounded, high, 0.0)) / 2, 10 * state.weight)
        again = state._replace(w=state.home, weight=weight, low=low, high=high)
        moments = jax.tree.map(jnp.zeros_like, state.moments)
        return again._replace(moments=moments, flipped=jnp.zeros_like(state.flipped)), info
