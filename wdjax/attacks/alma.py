"""Augmented Lagrangian method for adversarial attacks (ALMA)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax import distinct, losses, norms
from wdjax.attacks import ascent, nearest
from wdjax.attacks.ascent import setting
from wdjax.attacks.nearest import Nearest
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim

_EVERY = 10
"""Number of steps between two adjustments of the penalty parameter."""
_BETTER = 0.95
"""The penalty grows unless the constraint fell to this share of its value since the last check."""
_GROWTH = 1.2
"""The factor by which the penalty parameter then grows."""
_MEAN = 0.9
"""Decay of two running means: the multiplier and the momentum."""
_SQUARES = 0.99
"""Decay of the running mean of squared gradients."""
_LEAST, _MOST = 1e-6, 1e12
"""Bounds of the multiplier."""


class State(NamedTuple):
    delta: Array
    momentum: Array
    squares: Array
    rate: Array
    """The first learning rate; inf before the first gradient."""
    mu: Array
    """Multiplier."""
    rho: Array
    """Penalty parameter."""
    before: Array
    """The constraint at the last check of the penalty."""
    flipped: Array
    """Whether a point has flipped since the last check."""
    taken: Array
    found: Array
    """The step of the first flip; the number of all steps until there is one."""
    best: Nearest


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class ALMA(nearest.NearestAttack):
    r"""ALMA: the distance plus an augmented Lagrangian of the constraint "misclassified".

    Descends ``||delta||_r + P(c, rho, mu)`` for ``c = -dlr(x + delta) <= 0`` with the penalty

        P = mu c + mu rho c^2 + rho^2 c^3 / 6   (c >= 0),   mu c / (1 - rho c)   (c < 0),

    RMSprop, whose mean of squares begins at 1, and momentum. ``mu`` follows a running mean of
    ``dP/dc``; ``rho`` grows by the factor 1.2 if in ten steps there was no flip and c fell by less
    than 5 %. The learning rate is chosen so that the first step changes the distance by ``first``;
    after the first flip it falls exponentially, to a hundredth.

    Args:
      ball: norm 1 or 2, and the box.
      steps: gradient steps.
      loss: ``(out, y) -> [n]`` that is positive at flips; by default DLR for three classes and
        more, the margin for two.
      first: change of the distance by the first step, in the units of ``x``; by default 0.5 for
        norm 1 and 0.1 for norm 2, in widths of the box.

    Raises:
      ValueError: norm inf, fewer than one step.

    Cost: 1 forward and 1 backward pass a step, 1 more forward.

    Differs: of the authors' distances, norms 1 and 2 only. If the first gradient is zero or not
    finite, the learning rate is set at the first usable one.

    Source: Rony et al. [rony2021], Algorithm 2 and section 4.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = wdjax.search(ALMA(Lp(2), steps=400), model, x, y)
    >>> [round(float(d), 2) for d in found.cost]
    [0.14, 0.57]
    """

    ball: Lp = setting(Lp(2))
    steps: int = setting(1000)
    loss: Callable[[PyTree, Array], Array] | None = setting(None)
    first: float | Array | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))
        nearest.check_norms("ALMA", self.ball, (1, 2))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(self._descend, self.steps), Stage(self._end, 1)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x = samples.x
        if self.loss is None:
            ascent.need_logits("ALMA", samples.out)
        delta = jnp.zeros_like(x) if start is None else self.ball.clip(start) - x
        zero = jnp.zeros(len(x), x.dtype)
        best = nearest.nearest_before(victim, samples)
        flat, one, far = jnp.zeros_like(x), zero + 1, zero + jnp.inf
        none = zero.astype(jnp.int32)
        last = none + self.steps
        return State(delta, flat, flat + 1, far, one, one, far, zero > 0, none, last, best)

    def _constraint(self, out: PyTree, y: Array) -> Array:
        """``[n]``: the constraint ``c``, at most 0 where the sample is misclassified.

        It is minus the attack's ``loss``; by default minus the DLR loss, or for two classes minus
        the margin.
        """
        if self.loss is not None:
            return -validate.check_each("loss", self.loss(out, y), len(y))
        return -(losses.dlr(out, y) if out.shape[-1] > 2 else losses.margin(out, y))

    def _descend(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step of RMSprop with momentum on the distance plus the penalty of the constraint.

        All arrays are per sample: points ``[n, *shape]``, constraint, rate and multipliers ``[n]``.
        The learning rate falls from the first flip on. The present point is kept if it is the
        nearest flip.
        """
        x = samples.x + state.delta
        seen = ascent.slope(victim, x, samples.y, self._constraint)
        info = ascent.note(victim, samples.y, seen)
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, x, seen.out)
        constraint = jnp.nan_to_num(self._constraint(seen.out, samples.y), nan=1.0).astype(x.dtype)
        state = self._weigh(state._replace(best=best), constraint, info.value > 0)
        away = jax.grad(lambda delta: jnp.sum(norms.lp_norm(delta, self.ball.norm)))(state.delta)
        slope = self.ball.width * _penalty_slope(constraint, state.rho, state.mu)
        gradient = away + norms.spread(slope, x) * seen.gradient
        squares = _SQUARES * state.squares + (1 - _SQUARES) * gradient**2
        scaled = gradient / (jnp.sqrt(squares) + 1e-8)
        rate = jnp.where(jnp.isfinite(state.rate), state.rate, self._first_rate(scaled))
        momentum = _MEAN * state.momentum + (1 - _MEAN) * scaled
        found = jnp.where(best.known, jnp.minimum(state.found, state.taken), state.found)
        since = (state.taken - found).clip(0).astype(x.dtype)
        fall = 0.01 ** (since / jnp.maximum(self.steps - found, 1).astype(x.dtype))
        pace = jnp.where(jnp.isfinite(rate), rate, 0.0) * fall
        delta = self.ball.clip(x - norms.spread(pace, x) * momentum) - samples.x
        moved = state._replace(delta=delta, momentum=momentum, squares=squares, rate=rate)
        return moved._replace(taken=state.taken + 1, found=found), info

    def _first_rate(self, direction: Array) -> Array:
        """``[n]``: the learning rate that gives the first step the length ``first``.

        ``direction``, ``[n, *shape]``, is the first scaled gradient. The rate is inf (not yet
        known) where that gradient is zero.
        """
        first = self.first
        if first is None:
            first = (0.5 if self.ball.norm == 1 else 0.1) * self.ball.width
        length = norms.lp_norm((1 - _MEAN) * direction, self.ball.norm)
        return jnp.where(length > 0, first / jnp.where(length > 0, length, 1.0), jnp.inf)

    def _weigh(self, state: State, constraint: Array, fallen: Array) -> State:
        """The state with the next penalty parameter ``rho`` and multiplier ``mu``, both ``[n]``.

        Every ``_EVERY`` steps ``rho`` grows where no point has flipped since the last check and the
        ``constraint`` ``[n]`` has not fallen enough. ``mu`` is a running mean of the penalty's
        slope, unchanged in the first step. ``fallen`` ``[n]`` says whether the present point is a
        flip.
        """
        look = (state.taken + 1) % _EVERY == 0
        flipped = state.flipped | fallen
        stuck = look & ~flipped & (constraint > _BETTER * state.before)
        rho = jnp.where(stuck, _GROWTH * state.rho, state.rho)
        slope = _penalty_slope(constraint, rho, state.mu)
        mu = jnp.clip(_MEAN * state.mu + (1 - _MEAN) * slope, _LEAST, _MOST)
        return state._replace(
            mu=jnp.where(state.taken > 0, mu, state.mu),
            rho=rho,
            before=jnp.where(look, constraint, state.before),
            flipped=flipped & ~look,
        )

    def _iterate(self, samples: Samples, state: State) -> Array:
        return samples.x + state.delta


def _penalty(c: Array, rho: Array, mu: Array) -> Array:
    """``[n]``: the penalty ``P(c, rho, mu)`` of :class:`ALMA` for constraints ``c`` ``[n]``.

    Where ``c < 0`` (misclassified) the denominator uses ``max(rho, 1)``, so that it stays at least
    1.
    """
    above = jnp.maximum(c, 0.0)
    below = jnp.minimum(c, 0.0)
    cubic = mu * above + mu * rho * above**2 + rho**2 * above**3 / 6
    return jnp.where(c >= 0, cubic, mu * below / (1 - jnp.maximum(rho, 1.0) * below))


def _penalty_slope(c: Array, rho: Array, mu: Array) -> Array:
    """``[n]``: the derivative of :func:`_penalty` with respect to ``c``."""
    return jax.grad(lambda c: jnp.sum(_penalty(c, rho, mu)))(c)
