"""Objectives of attacks on many models: a loss of each, reduced to one number a sample."""

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
    """The logits of a model that may also return a score.

    Args:
      out: logits ``[n, K]``, or a pair of logits and scores.

    Source: this library's own.

    >>> logits_of((jnp.ones((1, 2)), jnp.zeros(1))).shape
    (1, 2)
    """
    return out[0] if isinstance(out, tuple) else out


@dataclasses.dataclass(frozen=True)
class Objective:
    r"""A loss over the models of a bank, ``[n]``: both criterion and loss of a space attack.

    With ``l_j`` the loss at model j, ``"mean"`` is ``1/m sum_j l_j`` (GMSA-AVG); ``"min"`` is the
    ``min_j l_j`` of every sample (GMSA-MIN), with the gradient of the first minimiser;
    ``"softmin"`` is the smooth ``-t log mean_j exp(-l_j / t)`` between the two; ``"last"`` is the
    loss of the newest model (FPA). For samples with a target class the loss is the margin to that
    class.

    Args:
      loss: ``(out, y) -> [n]`` of one model, to be increased.
      reduce: how the models' losses are combined.
      temperature: t of ``"softmin"``, in units of the loss.

    Raises:
      ValueError: another reduction, a temperature that is not positive.

    Differs: the paper's minimum is over batch means; the minimum for every sample is that of the
      authors' code, and the stronger attack.

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
            index = jnp.argmin(jnp.where(asked, values, jnp.inf), axis=0)
        else:
            index = len(asked) - 1 - jnp.argmax(asked[::-1], axis=0)
        return jnp.take_along_axis(values, index[None], axis=0)[0]

    def _softmin(self, values: Array, asked: Array) -> Array:
        """``[n]``: the smooth minimum of values ``[capacity, n]`` over the models that were run."""
        heights = jnp.where(asked, -values / self.temperature, -jnp.inf)
        count = jnp.maximum(jnp.sum(asked, axis=0), 1).astype(heights.dtype)
        return -self.temperature * (jax.nn.logsumexp(heights, axis=0) - jnp.log(count))

    def each(self, said: Answers, y: Array) -> Array:
        """``[capacity, n]``: the loss at every model; meaningless for models that were not run."""

        def one(out: PyTree) -> Array:
            aimed = losses.targeted_margin(logits_of(out), y, jnp.maximum(said.rival, 0))
            return jnp.where(said.rival >= 0, aimed, self.loss(out, y))

        return jax.vmap(one, in_axes=1)(said.out)


@dataclasses.dataclass(frozen=True)
class Ceaseless:
    """A monotone transform of an objective that is always negative, so that a search never stops.

    A cross-entropy is positive at every point: used as a criterion, it would at once end searches
    that stop at a flip.

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
    """1 where an objective is positive, else 0, so that a search keeps its first flip.

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

    The attack on DENT chooses among its fourteen runs by it.

    Args:
      logits: ``[n, K]``
      y: ``[n]`` labels.

    Source: Chen et al. [chen2022], A.3.

    >>> round(float(confidence(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), jnp.array([0]))[0]), 4)
    0.3
    """
    return jnp.exp(losses.margin(jax.nn.log_softmax(logits), y) + _own(logits, y))


def _own(logits: Array, y: Array) -> Array:
    """``[n]``: the log-probability of the label."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=-1)[:, 0]


def unnoticed(out: PyTree, y: Array) -> Array:
    r"""Rejection-aware loss: wrong *and* accepted, ``min(z_rival - z_y, cap) - softplus(score)``.

    The margin is capped at ``cap = 2``, so that points that are surely wrong become more similar to
    the training data instead; ``-softplus(score)`` is the log-probability of acceptance by a
    detector whose log-odds of rejection are ``score``.

    Args:
      out: ``(logits [n, K], score [n])``.
      y: ``[n]``.

    Source: Chen et al. [chen2022], A.6.

    >>> out = jnp.array([[0.0, 5.0]]), jnp.array([-20.0])
    >>> round(float(unnoticed(out, jnp.array([0]))[0]), 4)
    2.0
    """
    logits, score = out
    return jnp.minimum(losses.margin(logits, y), _CAP) - jax.nn.softplus(score)


_CAP = 2.0
"""The margin, in logits, at which a point is surely wrong."""


def unaware(out: PyTree, y: Array) -> Array:
    """Cross-entropy of a model's logits; ignores a score.

    Args:
      out: logits ``[n, K]``, or a pair of logits and scores.
      y: ``[n]`` labels.

    Source: this library's own.

    >>> float(unaware((jnp.zeros((1, 4)), jnp.ones(1)), jnp.array([2]))[0])
    1.3862...
    """
    return losses.cross_entropy(logits_of(out), y)


def margin(out: PyTree, y: Array) -> Array:
    """The margin of a model's logits; ignores a score.

    Args:
      out: logits ``[n, K]``, or a pair of logits and scores.
      y: ``[n]`` labels.

    Source: this library's own.

    >>> margin(jnp.array([[1.0, 3.0]]), jnp.array([0])).tolist()
    [2.0]
    """
    return losses.margin(logits_of(out), y)
