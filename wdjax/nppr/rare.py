r"""Rare failures of one input: what is asked, in normal space, and what is answered.

Splitting and importance sampling work on normal vectors u: a fixed distribution is a map of them
(for uniform linf noise ``delta = eps (2 Phi(u) - 1)``), so that the box's clipping belongs to the
event, and weights have no Jacobians. Neither knows its own error well from one run; intervals come
from repeats.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import losses, validate
from wdjax.core import AnyArray, Array
from wdjax.metrics import ConfidenceInterval
from wdjax.nppr import noise
from wdjax.nppr import upsample as up
from wdjax.nppr.counting import Classifier


class Rare(NamedTuple):
    """A small probability, by several independent runs."""

    runs: npt.NDArray[np.float64]
    """``[R]`` estimates, each unbiased or nearly so."""
    evaluations: int
    """Forward passes of all runs, without ``fit``."""
    fit: int
    """Forward and backward passes that found the proposal, once for all runs."""
    faults: int
    """Points whose logits were not finite; they count as failures."""
    found: bool
    """Whether failures were seen in every run; if not, the value is too low or unknown."""

    @property
    def value(self) -> float:
        """The mean of the runs."""
        return float(np.mean(self.runs))

    @property
    def error(self) -> float:
        """Its standard error."""
        return float(np.std(self.runs, ddof=1) / math.sqrt(len(self.runs)))

    def interval(self, confidence: float = 0.95) -> ConfidenceInterval:
        """Student's interval over the runs, cut at 0; up to 1 where no failure was found."""
        from scipy import stats

        if not self.found:
            return ConfidenceInterval(np.asarray(0.0), np.asarray(1.0))
        half = stats.t.ppf((1 + confidence) / 2, len(self.runs) - 1) * self.error
        return ConfidenceInterval(
            np.asarray(max(self.value - half, 0.0)), np.asarray(min(self.value + half, 1.0))
        )


def from_normal(perturbation: noise.Fixed, u: Array) -> Array:
    """Perturbations of normal vectors ``[n, d]``, distributed as the perturbation says.

    >>> from_normal(noise.Uniform(0.5), jnp.array([[0.0, 9.0]])).tolist()
    [[0.0, 0.5]]
    """
    eps, ball = perturbation.eps, perturbation.ball
    if isinstance(perturbation, noise.Uniform) and ball.norm == math.inf:
        return eps * jax.lax.erf(u / math.sqrt(2))
    if isinstance(perturbation, noise.ClippedGaussian) and ball.norm == math.inf:
        return eps * jnp.clip(perturbation.sigma * u, -1.0, 1.0)
    if isinstance(perturbation, noise.TruncatedGaussian):
        end = jax.scipy.special.ndtr(1 / jnp.asarray(perturbation.sigma, u.dtype))
        level = (1 - end) + jax.scipy.special.ndtr(u) * (2 * end - 1)
        inside = perturbation.sigma * jax.scipy.special.ndtri(level)
        return eps * jnp.clip(inside, -1.0, 1.0)
    raise ValueError(
        "rare events are for uniform, clipped and truncated Gaussian noise in the linf ball, got "
        f"{type(perturbation).__name__} with norm {ball.norm!r}."
    )


class Question(NamedTuple):
    """One input, and what disturbs it; a pytree."""

    model: Classifier
    perturbation: noise.Fixed
    x: Array
    """``[1, *shape]``"""
    y: Array
    """``[1]``"""

    def logits(self, u: Array) -> Array:
        """``[m, K]`` at normal vectors ``[m, d]``."""
        delta = from_normal(self.perturbation, u).reshape(1, -1, *self.x.shape[1:])
        points = up.placed(self.x, delta, self.perturbation.eps, self.perturbation.ball)
        return self.model(points[0])

    def score(self, u: Array) -> tuple[Array, Array]:
        """``[m]``: the margin of the failure, positive where there is one, and faults."""
        logits = self.logits(u)
        fine = jnp.all(jnp.isfinite(logits), axis=-1)
        margin = losses.decision_margin(logits, jnp.broadcast_to(self.y, len(u)))
        return jnp.where(fine, margin, jnp.finfo(u.dtype).max), ~fine


def ask(
    model: Classifier, perturbation: noise.Fixed, x: AnyArray, y: AnyArray | int
) -> tuple[Question, int]:
    """Checks an input, which must be classified correctly; returns the dimension too."""
    validate.check_number("eps", perturbation.eps)
    x, labels = jnp.asarray(x)[None], np.asarray(y).reshape(1)
    x, own = validate.check_samples(model, x, labels, perturbation.ball.box)
    question = Question(model, perturbation, x, own)
    size = math.prod(x.shape[1:])
    score, fault = question.score(jnp.zeros((1, size), x.dtype))
    if bool(fault[0]):
        raise ValueError("the model's logits are not finite for the input as it is.")
    if not bool(score[0] <= 0):
        raise ValueError("the input is misclassified as it is: its failure is not rare.")
    return question, size
