"""W-PGD and W-FGSM: ascent under one budget shared by the whole data set (Bai et al.)."""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import distinct, losses, norms
from wdjax.attacks import ascent
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, Samples, Stage, Victim

_REACH = 4.0
"""For order 1, the mean of the step lengths before projection on mean 1; the best on two nets."""
_INSIDE = 1 - 1e-6
"""Share of the budget used, so that rounding cannot exceed it."""


class State(NamedTuple):
    x: Array
    slope: Array
    """``[n, *shape]``, the gradient at ``x``."""
    seen: Array
    """The points at which ``slope`` and ``value`` were computed."""
    value: Array
    """``[n]``: the criterion at ``seen``; -inf where an output was not finite."""
    best: Array
    """The iterate, ``[n, *shape]``, with the most flips so far."""
    flips: Array
    """``[n]``: that number of flips, the same in every row."""
    total: Array
    """``[n]``: the sum of the criterion, which decides between iterates of equally many flips."""


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class WPGD:
    r"""Projected ascent in the Wasserstein ball: all samples move, and one budget binds their mean.

    With ``s, q`` conjugate to the norm r and the order p, every sample moves by ``ratio eps /
    steps`` times

        a_i M_r(g_i),    a_i = |g_i|_s^{q - 1} / (mean_j |g_j|_s^q)^{1/p},

    the steepest ascent with ``(mean_i |h_i|_r^p)^{1/p} = 1``. Then, if the data set costs ``c >
    eps``, every sample's distance shrinks by the factor ``eps / c``; for order inf every sample is
    projected on its own ball. The iterate with the most flips is returned.

    For order 1 the steepest ascent would move a single sample. Instead the ``a_i`` are the
    Euclidean projection of ``4 |g_i|_s / mean_j |g_j|_s`` on mean 1, so that samples of large
    gradients share the step.

    Args:
      ball: norm and box.
      order: p of the budget, at least 1 or inf; spend it with the same order: ``wdjax.run(...,
        order=p)``.
      steps: gradient steps.
      loss: ``(out, y) -> [n]``, to be increased. The authors recommend the default, whose gradient
        is 0 once a sample is misclassified; with cross-entropy most of the budget goes to samples
        that are misclassified already.
      ratio: total length of all steps, in units of the budget; may be traced.
      axis: inside ``jax.shard_map`` or ``jax.pmap``, the name of the mesh's axis that the samples
        are split over: the budget is then one of all shards together.

    Raises:
      ValueError: fewer than one step, an order below 1.

    Cost: ``steps`` backward and ``steps + 1`` forward passes a sample; memory for five data sets.

    The mean is over the attacked samples. With ``skip_misclassified=False`` these are all samples,
    as in the authors' code, and under the default loss the misclassified leave their budget to the
    others. If samples have different radii, the smallest is the budget.

    Differs: order 1 is not in the authors' code, which for order inf and norm 2 also rescales
      points inside the ball to its surface. Flips of an iterate are counted from the forward pass
      of its gradient.

    Source: Bai et al. [bai2023], equation 14 and Section 5.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> result = wdjax.run(WPGD(order=2), model, x, y, eps=0.12, order=2)
    >>> result.success.tolist()
    [True, False]
    """

    budget: ClassVar[Literal["data"]] = "data"
    random: ClassVar[bool] = False

    ball: Lp = setting(Lp())
    order: float = setting(2)
    steps: int = setting(50)
    loss: Callable[..., Array] = setting(losses.rectified_dlr)
    ratio: float | Array = 1.875
    axis: str | None = setting(None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", validate.check_order(self.order))
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage(self._climb, self.steps, couple=self._share),
            Stage(self._compare, 1, couple=self._choose),
        )

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        x = samples.x if start is None else self.ball.clip(start)
        low = jnp.full(len(x), -jnp.inf, x.dtype)
        none = jnp.full(len(x), -1, jnp.int32)
        return State(x, jnp.zeros_like(x), x, low, samples.x, none, low)

    def _climb(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One gradient of the loss at every point; :meth:`_share` then makes the move."""
        seen = ascent.slope(victim, state.x, samples.y, self.loss)
        info = ascent.note(victim, samples.y, seen)
        return self._told(state, info)._replace(slope=seen.gradient), info

    def _compare(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """The last stage: one forward pass at the last points."""
        info = ascent.judge(victim, state.x, samples.y)[1]
        return self._told(state, info), info

    def _told(self, state: State, info: Info) -> State:
        """The state with the points just evaluated and their criterion, -inf after a fault."""
        value = jnp.where(info.fault, -jnp.inf, info.value.astype(state.value.dtype))
        return state._replace(seen=state.x, value=value)

    def _share(self, samples: Samples, state: State, chosen: Array) -> State:
        """Moves all samples by their shares of the step, then shrinks the moves into the budget.

        ``chosen`` ``[n]`` excludes padding rows from all sums. For order inf every move is
        projected on the ball of radius eps; otherwise all moves are scaled by one factor, to a
        power mean of at most eps.
        """
        state, eps = self._choose(samples, state, chosen), jnp.min(self._all(samples.radius))
        steep = jnp.where(chosen, norms.lp_norm(state.slope, norms.dual(self.ball.norm)), 0.0)
        shares = self._own(_sizes(self._all(steep), self._all(chosen), self.order), len(steep))
        size = self.ratio * eps / self.steps * shares
        x = self.ball.ascend(state.x, state.slope, size)
        length = jnp.where(chosen, norms.lp_norm(x - samples.x, self.ball.norm), 0.0)
        if self.order == math.inf:
            limit = jnp.full_like(length, eps)
        else:
            spent = _mean(self._all(length), self._all(chosen), self.order)
            limit = length * jnp.minimum(1.0, eps / jnp.where(spent > 0, spent, 1.0)) * _INSIDE
        return state._replace(x=self.ball.project(x, samples.x, limit))

    def _choose(self, samples: Samples, state: State, chosen: Array) -> State:
        """Keeps the evaluated points as best iterate if more samples are flipped.

        Between iterates of equally many flips the sum of the criterion decides; iterates over the
        budget never count. Sums are over the ``chosen`` ``[n]`` rows.
        """
        flips = jnp.sum(self._all((state.value > 0) & chosen), dtype=jnp.int32)
        total = jnp.sum(self._all(jnp.where(chosen & jnp.isfinite(state.value), state.value, 0.0)))
        length = self._all(norms.lp_norm(state.seen - samples.x, self.ball.norm))
        spent = _mean(length, self._all(chosen), self.order)
        fits = spent <= jnp.min(self._all(samples.radius))
        better = (flips > state.flips) | ((flips == state.flips) & (total > state.total))
        better = jnp.broadcast_to(better & fits, state.flips.shape)
        return state._replace(
            best=jnp.where(norms.spread(better, state.best), state.seen, state.best),
            flips=jnp.where(better, flips, state.flips),
            total=jnp.where(better, total, state.total),
        )

    def _all(self, rows: Array) -> Array:
        """The rows ``[n]`` of all shards, one after another."""
        return rows if self.axis is None else jax.lax.all_gather(rows, self.axis, tiled=True)

    def _own(self, rows: Array, n: int) -> Array:
        """This shard's ``n`` of the rows of all shards."""
        if self.axis is None:
            return rows
        return jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(self.axis) * n, n)

    def point(self, samples: Samples, state: State) -> tuple[Array, None]:
        return state.best, None

    def finished(self, state: State) -> Array:
        return jnp.zeros(len(state.x), bool)


def _mean(length: Array, chosen: Array, order: float) -> Array:
    """``(mean length^p)^{1/p}`` over the ``chosen`` samples; the maximum for p = inf.

    ``length`` and ``chosen`` are ``[n]``; large powers do not overflow; the result is 0 if no
    sample is chosen.
    """
    length = jnp.where(chosen, length, 0.0)
    most = jnp.max(length)
    if order == math.inf:
        return most
    powers = jnp.sum((length / jnp.where(most > 0, most, 1.0)) ** order)
    return most * (powers / jnp.maximum(jnp.sum(chosen, dtype=length.dtype), 1)) ** (1 / order)


def _sizes(steep: Array, chosen: Array, order: float) -> Array:
    """``[n]``: the samples' shares of a step; their power mean of the order is 1.

    Samples of zero gradient have share 0, but for order inf, where all shares are 1. ``steep``
    ``[n]`` are the gradients' dual norms, 0 for rows not ``chosen``.
    """
    if order == math.inf:
        return jnp.ones_like(steep)
    if order == 1:
        mean, count = _mean(steep, chosen, 1), jnp.sum(chosen).astype(steep.dtype)
        wish = _REACH * steep / jnp.where(mean > 0, mean, 1.0)
        return norms.project(wish[None], jnp.zeros_like(wish)[None], count, 1)[0]
    most = jnp.max(steep)
    size = (steep / jnp.where(most > 0, most, 1.0)) ** (1 / (order - 1))
    spent = _mean(size, chosen, order)
    return size / jnp.where(spent > 0, spent, 1.0)


def wfgsm(
    ball: Lp = Lp(),
    order: float = 2,
    loss: Callable[..., Array] = losses.rectified_dlr,
    axis: str | None = None,
) -> WPGD:
    """The one-step form of :class:`WPGD`; the step is as long as the budget.

    Args:
      ball: norm and box.
      order: p of the budget.
      loss: ``(out, y) -> [n]``, to be increased.
      axis: as in :class:`WPGD`.

    Cost: 1 backward and 2 forward passes a sample.

    Source: Bai et al. [bai2023], W-FGSM.

    >>> wfgsm().steps
    1
    """
    return WPGD(ball, order, steps=1, loss=loss, ratio=1.0, axis=axis)
