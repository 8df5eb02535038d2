"""What an attack on many models raises: a loss of each, reduced to one number a sample."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from wdjax import losses
from wdjax.checks import validate
from wdjax.core import Array, PyTree
from wdjax.transductive.bank import Answers

REDUCTIONS = ("last", "mean", "min", "softmin")

OutputLoss = Callable[[Any, Array], Array]
"""``(out, y) -> [n]`` of one model's outputs: logits, or ``(logits, score)``."""


def logits_of(out: PyTree) -> Array:
    """The logits of a model that may return a score besides."""
    return out[0] if isinstance(out, tuple) else out


@dataclasses.dataclass(frozen=True)
class Objective:
    r"""A loss over the models of a bank, ``[n]``: criterion and objective of a space attack.

    With ``l_j`` the loss at model j: ``"mean"`` is ``1/m sum_j l_j`` (GMSA-AVG), ``"min"`` the
    ``min_j l_j`` of every sample (GMSA-MIN), whose gradient is that of the first smallest, and
    ``"softmin"`` the smooth ``-t log mean_j exp(-l_j / t)`` between the two. ``"last"`` is the loss
    of the newest model (FPA). Where a sample aims at a rival the loss is the margin to it.

    Args:
      loss: ``(out, y) -> [n]`` of one model, to be increased.
      reduce: how the models' losses become one.
      temperature: t of ``"softmin"``, in units of the loss.

    Raises:
      ValueError: another reduction, a temperature that is not positive.

    Differs: the paper's minimum is over means of the batch; that of every sample is what the
      authors' code has, and the stronger attack.

    Source: Chen et al. [chen2022], equation 7 and below.

    >>> out, y = jnp.array([[[0.0, 1.0], [3.0, 0.0]]]), jnp.array([0])
    >>> said = Answers(out, jnp.ones((1, 2), bool), jnp.array([-1]))
    >>> [float(Objective(losses.margin, how)(said, y)[0]) for how in ("mean", "min", "last")]
    [-1.0, -3.0, -3.0]
    """

    loss: OutputLoss
    reduce: str = "mean"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        validate.check_choice("reduce", self.reduce, REDUCTIONS)
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number above 0, got {self.temperature!r}.")

    def __call__(self, said: Answers, y: Array) -> Array:
        values, asked = self.each(said, y), said.asked.T
        if self.reduce == "mean":
            total = jnp.sum(jnp.where(asked, values, 0.0), axis=0)
            return total / jnp.maximum(jnp.sum(asked, axis=0), 1).astype(total.dtype)
        if self.reduce == "softmin":
            return self._softmin(values, asked)
        if self.reduce == "min":
            place = jnp.argmin(jnp.where(asked, values, jnp.inf), axis=0)
        else:
            place = len(asked) - 1 - jnp.argmax(asked[::-1], axis=0)
        return jnp.take_along_axis(values, place[None], axis=0)[0]

    def _softmin(self, values: Array, asked: Array) -> Array:
        heights = jnp.where(asked, -values / self.temperature, -jnp.inf)
        count = jnp.maximum(jnp.sum(asked, axis=0), 1).astype(heights.dtype)
        return -self.temperature * (jax.nn.logsumexp(heights, axis=0) - jnp.log(count))

    def each(self, said: Answers, y: Array) -> Array:
        """``[capacity, n]``: the loss at every model; of no meaning where it was not asked."""

        def one(out: PyTree) -> Array:
            aimed = losses.targeted_margin(logits_of(out), y, jnp.maximum(said.rival, 0))
            return jnp.where(said.rival >= 0, aimed, self.loss(out, y))

        return jax.vmap(one, in_axes=1)(said.out)


@dataclasses.dataclass(frozen=True)
class Ceaseless:
    """An objective in its own order but never above 0, so that no search thinks it has won.

    A cross-entropy is above 0 at every point: taken for a criterion, it would end at once those
    searches that stop when a sample has fallen.

    >>> said = Answers(jnp.array([[[0.0, 3.0]]]), jnp.ones((1, 1), bool), jnp.array([-1]))
    >>> Ceaseless(Objective(losses.margin))(said, jnp.array([0])).tolist()
    [-0.25]
    """

    objective: Objective

    def __call__(self, said: Answers, y: Array) -> Array:
        value = self.objective(said, y)
        below = jnp.where(value >= 0, -1 / (1 + jnp.maximum(value, 0.0)), value - 1)
        return jnp.where(jnp.isfinite(value), below, jnp.nan)


@dataclasses.dataclass(frozen=True)
class FirstFall:
    """1 where an objective is above 0, else 0: keeps the first point that has fallen, not the best.

    >>> said = Answers(jnp.array([[[0.0, 1.0]]]), jnp.ones((1, 1), bool), jnp.array([-1]))
    >>> FirstFall(Objective(losses.margin))(said, jnp.array([0])).tolist()
    [1.0]
    """

    objective: Objective

    def __call__(self, said: Answers, y: Array) -> Array:
        value = self.objective(said, y)
        return jnp.where(jnp.isnan(value), value, (value > 0).astype(value.dtype))


def confidence(logits: Array, y: Array) -> Array:
    r"""The probability of the likeliest wrong class, ``max_{k != y} softmax(z)_k``.

    What the attack on DENT maximises over its fourteen runs.

    Source: Chen et al. [chen2022], A.3.

    >>> round(float(confidence(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), jnp.array([0]))[0]), 4)
    0.3
    """
    return jnp.exp(losses.margin(jax.nn.log_softmax(logits), y) + _own(logits, y))


def _own(logits: Array, y: Array) -> Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=-1)[:, 0]


def unnoticed(out: PyTree, y: Array) -> Array:
    r"""Rejection-aware loss: wrong *and* accepted, ``min(z_rival - z_y, cap) - softplus(score)``.

    The margin stops counting at ``cap = 2``, so that what is wrong for sure goes on to look like
    the training data; ``-softplus(score)`` is the log-probability that a detector whose rejection
    has the log-odds ``score`` accepts.

    Args:
      out: ``(logits [n, K], score [n])``.
      y: ``[n]``.

    >>> out = jnp.array([[0.0, 5.0]]), jnp.array([-20.0])
    >>> round(float(unnoticed(out, jnp.array([0]))[0]), 4)
    2.0
    """
    logits, score = out
    return jnp.minimum(losses.margin(logits, y), _CAP) - jax.nn.softplus(score)


_CAP = 2.0
"""Logits by which a point is wrong for sure."""


def unaware(out: PyTree, y: Array) -> Array:
    """Cross-entropy of a model's logits, blind to its score if it has one.

    >>> float(unaware((jnp.zeros((1, 4)), jnp.ones(1)), jnp.array([2]))[0])
    1.3862...
    """
    return losses.cross_entropy(logits_of(out), y)


def margin(out: PyTree, y: Array) -> Array:
    """The margin of a model's logits, blind to its score if it has one.

    >>> margin(jnp.array([[1.0, 3.0]]), jnp.array([0])).tolist()
    [2.0]
    """
    return losses.margin(logits_of(out), y)
