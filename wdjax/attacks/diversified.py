"""Random starts that diversify the outputs, then margin ascent: one round of A3."""

import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import distinct, losses, norms
from wdjax.attacks import ascent
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim

_SHORT = 10
"""Lengths of ascents of at most so many steps fall towards 0.1 radii, of longer ones to 0.001."""


class State(NamedTuple):
    x: Array
    weights: Array | None
    """``[n, K]``: the random weights of the outputs in the first phase."""
    taken: Array
    """Steps of the margin ascent."""
    fallen: Array
    best: ascent.Best


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Diversified:
    r"""Ascends a random weighting of the outputs from a random point, then the margin.

    The start is uniform in the cube of half-width ``eps``, clipped to the box but not to the ball,
    which for norms 1 and 2 it may be far outside of. ``probes`` steps of length ``eps`` ascend
    ``sum_k w_k z_k``; then ``steps`` steps, whose lengths fall from ``eps`` along a cosine, ascend
    the margin.

    The weights are uniform in ``[-1, 1]``, with two exceptions: the label's weight is uniform in
    ``K / 10 [-down, up]``, and the class whose logit at the sample has rank ``rank`` gets the
    weight ``K / 10 push`` if ``push`` is positive.

    Args:
      ball: norm and box.
      probes: steps on the weighted outputs; with 0 the ascent begins at the sample, or at
        ``start``.
      steps: steps on the margin; with 0 the point after the probes is returned.
      until: how many of ``steps`` are taken, so that one program serves several numbers of steps;
        all by default; may be traced.
      down, up: range of the label's weight; may be traced.
      rank: 0 for the class of largest logit; may be traced.
      push: weight of that class; may be traced.

    Returns the first misclassified iterate, or else the one of largest criterion; with ``steps=0``
    the first misclassified or else the last.

    Raises:
      ValueError: a count below 0, both counts 0, a model without logits.

    Cost: 1 forward and 1 backward pass a step, and 1 forward.

    Source: Liu et al. [liu2022], Section 3; the outputs' diversification is [tashiro2020].

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> wdjax.search(Diversified(), model, x, y, eps=0.2, key=jax.random.key(0)).success.tolist()
    [True, False]
    """

    budget: ClassVar[Literal["sample"]] = "sample"

    ball: Lp = setting(Lp())
    probes: int = setting(7)
    steps: int = setting(8)
    until: float | Array | None = None
    down: float | Array = 1.0
    up: float | Array = 1.0
    rank: float | Array = 0
    push: float | Array = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "probes", validate.check_count("probes", self.probes, 0))
        least = 1 if self.probes == 0 else 0
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps, least))

    @property
    def random(self) -> bool:
        return self.probes > 0

    @property
    def stages(self) -> tuple[Stage, ...]:
        probe = (Stage(self._probe, self.probes, self.finished),) if self.probes else ()
        if not self.steps:
            return probe
        return (*probe, Stage(self._climb, self.steps, self._over), Stage(self._compare, 1))

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        ascent.need_logits("Diversified", samples.out)
        x, n = samples.x, len(samples.y)
        point, weights = (x if start is None else start), None
        if keys is not None:
            weights = self._weights(samples, keys)
            cube = Lp(math.inf, None)
            noise = jax.vmap(lambda key: cube.noise(key, x.shape[1:], x.dtype))(keys)
            point = self.ball.clip(point + norms.spread(samples.radius, x) * noise)
        elif start is not None:
            point = self.ball.project(start, x, samples.radius)
        none = jnp.zeros(n, jnp.int32)
        low = jnp.full(n, -jnp.inf, x.dtype)
        return State(point, weights, none, none > 0, ascent.Best(x, low))

    def lean(self, keys: Array) -> Array:
        """``[n]``: the labels' weights that these keys give, in units of ``K / 10``."""

        def draw(key: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(key, 1), ())

        return jax.vmap(draw)(keys) * (self.up + self.down) - self.down

    def _weights(self, samples: Samples, keys: Array) -> Array:
        """``[n, K]``: the random weights of the outputs whose weighted sum the first phase ascends.

        They are uniform in [-1, 1], except the label's (:meth:`lean`) and, if ``push`` is positive,
        that of the class with the ``rank``-th largest clean logit (0 is the largest).
        """
        out, scale = samples.out, samples.out.shape[-1] / 10

        def draw(key: Array) -> Array:
            key = jax.random.fold_in(key, 2)
            return jax.random.uniform(key, out.shape[1:], out.dtype, -1.0, 1.0)

        ranks = jnp.argsort(jnp.argsort(-out, axis=1, stable=True), axis=1)
        pushed = (ranks == jnp.asarray(self.rank, ranks.dtype)) & (self.push > 0)
        free = jnp.where(pushed, scale * self.push, jax.vmap(draw)(keys))
        label_weight = (scale * self.lean(keys)).astype(out.dtype)[:, None]
        return jnp.where(jax.nn.one_hot(samples.y, out.shape[1], dtype=bool), label_weight, free)

    def _probe(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step of the first phase: length eps, up the weighted sum of the outputs."""
        weights = state.weights
        assert weights is not None

        def follow(out: Array, y: Array) -> Array:
            return jnp.sum(out * weights, axis=1)

        seen = ascent.slope(victim, state.x, samples.y, follow)
        info = ascent.note(victim, samples.y, seen)
        return self._move(samples, state, seen, info, samples.radius), info

    def _climb(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step of the second phase, up the margin, with a length that falls along a cosine.

        Lengths fall from eps towards 0.1 eps (at most 10 steps) or 0.001 eps (more), which the step
        after the next one would reach. Samples with a flip, or whose steps are used up, stay.
        """
        seen = ascent.slope(victim, state.x, samples.y, losses.margin)
        info = ascent.note(victim, samples.y, seen)
        length = self._length()
        end = jnp.where(length <= _SHORT, 0.1, 0.001)
        wave = (1 + jnp.cos(math.pi * state.taken.astype(samples.x.dtype) / (length + 1))) / 2
        size = samples.radius * (end + (1 - end) * wave)
        moved = self._move(samples, state, seen, info, size.astype(state.x.dtype))
        moved = moved._replace(taken=state.taken + 1)
        return ascent.hold(self._over(state), state, moved), info

    def _move(
        self, samples: Samples, state: State, seen: ascent.Slope, info: Info, size: Array
    ) -> State:
        """Records the present point, then steps along the gradient and projects on the ball.

        ``seen`` is the gradient at the point, ``info`` its criterion, ``size`` ``[n]`` the step's
        length. Samples with a flip stay.
        """
        told, fallen = self._look(samples, state, seen.out, info)
        ahead = self.ball.ascend(self.ball.clip(state.x), seen.gradient, size)
        ahead = self.ball.project(ahead, samples.x, samples.radius)
        return told._replace(x=jnp.where(norms.spread(fallen, ahead), state.x, ahead))

    def _look(self, samples: Samples, state: State, out: PyTree, info: Info) -> tuple[State, Array]:
        """Updates the best point with the present one, unless it lies outside the ball.

        ``out`` are the outputs at the present point. Returns the state and, ``[n]``, whether the
        sample has been misclassified at any point so far.
        """
        # For norms 1 and 2 the start may be outside the ball, where a flip does not count.
        inside = self.ball.cost(samples.x, state.x) <= samples.radius * (1 + 1e-6)
        value = jnp.where(inside, info.value.astype(state.best.value.dtype), -jnp.inf)
        best = ascent.keep_best(state.best, state.x, value, out)
        assert best is not None
        fallen = state.fallen | (best.value > 0)
        return state._replace(best=best, fallen=fallen), fallen

    def _compare(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """The last stage: one forward pass at the last point, which may become the best one."""
        out, info = ascent.judge(victim, state.x, samples.y)
        return self._look(samples, state, out, info)[0], info

    def _length(self) -> float | Array:
        """The number of steps of the margin ascent: ``until``, if given, at most ``steps``."""
        return self.steps if self.until is None else jnp.minimum(self.until, self.steps)

    def _over(self, state: State) -> Array:
        """``[n]``: whether the sample is misclassified or its margin ascent has used its steps."""
        return state.fallen | (state.taken.astype(state.x.dtype) >= self._length())

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        if self.steps:
            return state.best.x, None
        return jnp.where(norms.spread(state.fallen, state.x), state.best.x, state.x), None

    def finished(self, state: State) -> Array:
        return state.fallen
