r"""Rare failures of one input: the problem in normal space, and the estimate.

Splitting and importance sampling work on normal vectors u, of which a perturbation is a function
(for uniform linf noise ``delta = eps (2 Phi(u) - 1)``), so that clipping to the box is part of the
event and weights have no Jacobians. A single run of either cannot estimate its own error well;
intervals come from independent runs.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import distinct, losses
from wdjax.checks import validate
from wdjax.core import AnyArray, Array, Classifier
from wdjax.metrics import ConfidenceInterval
from wdjax.nppr import distributions
from wdjax.nppr import upsample as up
from wdjax.nppr.counting import default_batch

_APART = 0.99
"""Confidence of the two intervals that must overlap if two methods agree."""
_VAGUE = 10
"""An interval whose ends differ by more than this factor is too wide to compare."""


class Rare(NamedTuple):
    """A small probability, estimated by several independent runs."""

    runs: npt.NDArray[np.float64]
    """``[R]`` estimates, each unbiased."""
    evaluations: int
    """Forward passes of all runs, not counting ``fit``."""
    fit: int
    """Passes of the preparation, once for all runs: forward passes of a splitting's pilot, or
    forward and backward passes of the search for a proposal."""
    faults: int
    """Points of the runs whose logits were not finite; they count as failures."""
    found: bool
    """Whether every run saw failures; if not, the value is too low or unknown."""
    check: "Rare | None" = None
    """The same probability by splitting, if importance sampling was checked by it."""

    @property
    def value(self) -> float:
        """The mean of the runs."""
        return float(np.mean(self.runs))

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return float(np.std(self.runs, ddof=1) / math.sqrt(len(self.runs)))

    @property
    def agrees(self) -> bool | None:
        """Whether the 99 % intervals of both methods overlap; None if there is no check, or an
        interval is too wide to compare."""
        if self.check is None or not (self.found and self.check.found):
            return None
        (low, high), (least, most) = (one._spread(_APART) for one in (self, self.check))
        if low > most or least > high:
            return False
        return True if high <= _VAGUE * low and most <= _VAGUE * least else None

    @property
    def remark(self) -> str:
        """What speaks against the value, in words; empty if nothing does."""
        if not self.found:
            return "not every run met a failure: the value is too low or unknown"
        if self._alike:
            return "all runs gave the same number, which says nothing of its error: take more draws"
        if self.check is None or self.agrees:
            return ""
        if not self.check.found:
            return "not every run of splitting met a failure: nothing confirms the value"
        both = f"importance sampling says {self.value:.2g} and splitting {self.check.value:.2g}"
        if self.agrees is None:
            return f"{both}, but runs differ so much that neither confirms the other"
        return f"{both}, further apart than chance allows: failures may have been missed"

    def interval(self, confidence: float = 0.95) -> ConfidenceInterval:
        """Cox's interval over the runs, for the mean of log-normal numbers.

        It covers failures that the runs can see: a region that all of them miss does not add to
        their spread. It is [0, 1] if a run saw no failure, or if all runs gave the same number,
        which says nothing of its error, and covers both methods' intervals if they disagree.

        Source: Olsson [olsson2005], with Student's quantiles and one run less, since runs are only
          approximately log-normal.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}.")
        if not self.found or self._alike:
            return ConfidenceInterval(np.asarray(0.0), np.asarray(1.0))
        low, high = self._spread(confidence)
        if self.check is not None and self.agrees is False:
            least, most = self.check._spread(confidence)
            low, high = min(low, least), max(high, most)
        return ConfidenceInterval(np.asarray(low), np.asarray(high))

    @property
    def _alike(self) -> bool:
        """Whether all runs gave the same number."""
        return bool(np.ptp(self.runs) == 0)

    def _spread(self, confidence: float) -> tuple[float, float]:
        """The ends of Cox's interval, at a confidence, from the logarithms of the runs' estimates.

        The estimates must be positive. The interval is widened to include their mean, and ends at
        1.
        """
        from scipy import stats

        logs, others = np.log(self.runs), len(self.runs) - 1
        square = float(np.var(logs, ddof=1))
        error = math.sqrt((square + square**2 / 2) / others)
        half = stats.t.ppf((1 + confidence) / 2, others) * error
        low, high = np.exp(np.mean(logs) + square / 2 + np.array([-half, half]))
        return min(float(low), self.value), min(max(float(high), self.value), 1.0)


def from_normal(perturbation: distributions.Fixed, u: Array) -> Array:
    """The perturbations ``[n, d]`` that normal vectors ``[n, d]`` are mapped to.

    >>> from_normal(distributions.UniformBall(0.5), jnp.array([[0.0, 9.0]])).tolist()
    [[0.0, 0.5]]
    """
    eps, ball = perturbation.eps, perturbation.ball
    if isinstance(perturbation, distributions.UniformBall) and ball.norm == math.inf:
        return eps * jax.lax.erf(u / math.sqrt(2))
    if isinstance(perturbation, distributions.ClippedGaussian) and ball.norm == math.inf:
        return eps * jnp.clip(perturbation.sigma * u, -1.0, 1.0)
    if isinstance(perturbation, distributions.TruncatedGaussian):
        # Computed in the lower half, where floats resolve small probabilities, and mirrored.
        outside = jax.scipy.special.ndtr(-1 / jnp.asarray(perturbation.sigma, u.dtype))
        level = outside + jax.scipy.special.ndtr(-jnp.abs(u)) * (1 - 2 * outside)
        inside = -jnp.sign(u) * perturbation.sigma * jax.scipy.special.ndtri(level)
        return eps * jnp.clip(inside, -1.0, 1.0)
    raise ValueError(
        "rare events are for uniform, clipped and truncated Gaussian noise in the linf ball, got "
        f"{type(perturbation).__name__} with norm {ball.norm!r}."
    )


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class RareEvent:
    """One input and the distribution of its perturbations; a pytree."""

    model: Classifier
    perturbation: distributions.Fixed
    x: Array
    """``[1, *shape]``"""
    y: Array
    """``[1]``"""
    batch: int = dataclasses.field(metadata={"static": True})
    """Maximum number of points in a batch."""

    @property
    def size(self) -> int:
        """d, the dimension of the normal vectors."""
        return math.prod(self.x.shape[1:])

    def logits(self, u: Array) -> Array:
        """Logits ``[m, K]`` at normal vectors ``[m, d]``."""
        delta = from_normal(self.perturbation, u).reshape(1, -1, *self.x.shape[1:])
        points = up.placed(self.x, delta, self.perturbation.eps, self.perturbation.ball)
        return self.model(points[0])

    def score(self, u: Array) -> tuple[Array, Array]:
        """``[m]`` each: the margin, positive at a failure, and whether logits were not finite."""
        if len(u) <= self.batch:
            return self._score(u)
        parts = -(-len(u) // self.batch)
        rows = jnp.pad(u, ((0, parts * self.batch - len(u)), (0, 0)), mode="edge")
        split = jax.lax.map(self._score, rows.reshape(parts, self.batch, -1))
        score, fault = (part.reshape(-1)[: len(u)] for part in split)
        return score, fault

    def _score(self, u: Array) -> tuple[Array, Array]:
        """:meth:`score` in one batch. Points whose logits are not finite get the largest float."""
        logits = self.logits(u)
        fine = jnp.all(jnp.isfinite(logits), axis=-1)
        margin = losses.decision_margin(logits, jnp.broadcast_to(self.y, len(u)))
        return jnp.where(fine, margin, jnp.finfo(u.dtype).max), ~fine


def ask(
    model: Classifier,
    perturbation: distributions.Fixed,
    x: AnyArray,
    y: AnyArray | int,
    key: Array,
    batch_size: int | None = None,
) -> RareEvent:
    """Checks the input ``[*shape]``, which must be classified correctly."""
    validate.check_number("eps", perturbation.eps)
    x, labels = jnp.asarray(x)[None], np.asarray(y).reshape(1)
    x, label = validate.check_samples(model, x, labels, perturbation.ball.box)
    batch = default_batch(model, x) if batch_size is None else batch_size
    question = RareEvent(model, perturbation, x, label, validate.check_count("batch_size", batch))
    score, fault = question.score(jnp.zeros((1, question.size), x.dtype))
    if bool(fault[0]):
        raise ValueError("the model's logits are not finite for the input as it is.")
    if not bool(score[0] <= 0):
        raise ValueError("the input is misclassified as it is: its failure is not rare.")
    return question
