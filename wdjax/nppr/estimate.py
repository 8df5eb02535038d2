r"""Probabilistic robustness: the share of perturbed copies that are still classified correctly.

The same estimator serves every distribution: with a fixed one it gives PR, with a fitted one NPPR.
Both are relative to the inputs that are classified correctly without perturbation, like robust
accuracy divided by clean accuracy.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from wdjax import distinct, losses, metrics
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, Classifier
from wdjax.metrics import ConfidenceInterval
from wdjax.nppr import counting
from wdjax.nppr.counting import TWIN, Counts, Perturbation
from wdjax.nppr.fitted import Fitted
from wdjax.precision import full_precision


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The counts, on the host."""

    correct: npt.NDArray[np.bool_]
    """``[n]``: whether the unperturbed input is classified correctly; only these inputs count."""
    survived: Counts
    """``[n]``: copies classified correctly; 0 where the input itself is not."""
    draws: int
    """The number of copies of each input."""
    faults: Counts
    """``[n]``: copies whose logits were not finite; they did not survive."""

    @property
    def per_input(self) -> npt.NDArray[np.float64]:
        """``[m]``: the share of survivors of each correctly classified input."""
        return self.survived[self.correct] / self.draws

    @property
    def value(self) -> float:
        """Global robustness: the mean over the correct inputs."""
        return float(np.mean(self.per_input))

    def pooled(self, confidence: float = 0.95) -> ConfidenceInterval:
        """Clopper-Pearson interval of the mean over all copies: for *these* inputs only.

        It remains valid if the shares differ between inputs, since their sum then varies less than
        that of equal shares [hoeffding1956]; except for a single survivor or a single failure, for
        which Markov's bound is used.
        """
        total, won = int(np.sum(self.correct)) * self.draws, int(np.sum(self.survived))
        low, high = metrics.clopper_pearson(won, total, confidence)
        single = (1 - confidence) / 2 / total
        return ConfidenceInterval(
            np.asarray(single if won == 1 else low),
            np.asarray(1 - single if won == total - 1 else high),
        )

    def of_inputs(self, confidence: float = 0.95) -> ConfidenceInterval:
        """Clopper-Pearson intervals of the correctly classified inputs, ``[m]``."""
        return metrics.clopper_pearson(self.survived[self.correct], self.draws, confidence)

    def population(self, confidence: float = 0.95) -> ConfidenceInterval:
        """Interval of :func:`wdjax.metrics.mean_interval` over inputs: for their population.

        A bootstrap over inputs would be shorter, but invalid where failures are rare: if one input
        in fifty is fragile, a sample of 50 contains none a third of the time.
        """
        return metrics.mean_interval(self.per_input, confidence)


@full_precision
def estimate(
    model: Classifier,
    perturbation: Perturbation,
    x: AnyArray,
    y: AnyArray,
    *,
    key: Array,
    draws: int = 1000,
    index: AnyArray | None = None,
    batch_size: int | None = None,
    mesh: Mesh | None = None,
) -> Estimate:
    r"""Counts, for every correctly classified input, the perturbed copies that remain so.

    With a :class:`~wdjax.nppr.Fitted` distribution on held-out inputs this is NPPR; with one of
    :mod:`wdjax.nppr.distributions` it is PR. Samples are drawn from the distribution itself and
    clipped to the box.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]`` that treats each sample independently.
      perturbation: the distribution.
      x: ``[n, *shape]`` in the box.
      y: ``[n]`` labels.
      key: a typed ``jax.random.key``.
      draws: M, the number of copies of each input.
      index: ``[n]`` integers, the inputs' numbers in a larger data set.
      batch_size: copies on all devices at once.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; inputs are split over it.

    Returns:
      An :class:`Estimate`.

    Raises:
      ValueError: bad samples, no correctly classified input, a model whose outputs depend on other
        samples of the batch, a call inside a trace: counts have no gradients; use
        :func:`expected_loss`.

    Warns:
      UserWarning: a fitted distribution sees labels, and no sample of its fit had some of these.

    Cost: ``draws`` forward passes for each input, rounded up to a multiple of 20.

    Differs: inputs that are misclassified without perturbation do not count. The paper's equation 2
      includes them, but its shares exceed its clean accuracies, so its code cannot.

    Source: Wang et al. [wang2025], definitions 2 to 4.

    >>> from wdjax import Model
    >>> from wdjax.nppr import distributions
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1], [0.4, 0.6]]), jnp.array([0, 0, 0])
    >>> found = estimate(model, distributions.UniformBall(0.2), x, y, key=jax.random.key(0))
    >>> found.correct.tolist(), [round(float(p), 1) for p in found.per_input]
    ([True, True, False], [0.9, 1.0])
    """
    arguments.check(perturbation=perturbation, model=model, x=x, y=y, key=key)
    host_only("nppr.estimate", TWIN, model, perturbation, x, y, key)
    x, y, right = correct_inputs(model, perturbation, x, y)
    arguments.warn(unfitted(perturbation, y[right]))
    asked = counting.poll(model, perturbation, x, y, key, index, batch_size, mesh)
    rows = np.flatnonzero(right)
    tally = counting.count(asked, rows, 0, validate.check_count("draws", draws))
    return Estimate(right, zero_elsewhere(tally.survived, rows, len(right)), draws,
                    zero_elsewhere(tally.faults, rows, len(right)))  # fmt: skip


def correct_inputs(
    model: Classifier, perturbation: Perturbation, x: AnyArray, y: AnyArray
) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """Checks samples and tells which are classified correctly, ``[n]``; raises if none is."""
    x, y = validate.check_samples(model, x, y, perturbation.ball.box)
    right, finite = map(np.asarray, _judged(counting.outputs(model, x), y))
    if not finite:
        raise ValueError("the model's logits are not finite for a sample as it is.")
    if not right.any():
        raise ValueError("no sample is classified correctly: nothing is left to be robust.")
    return x, y, right


def unfitted(perturbation: Perturbation, y: Array) -> str | None:
    """The remark of :meth:`Fitted.unfitted`; None for other distributions."""
    return perturbation.unfitted(y) if isinstance(perturbation, Fitted) else None


@distinct.jit
def _judged(logits: Array, y: Array) -> tuple[Array, Array]:
    """``[n]``: whether the label's logit is largest; and whether all logits are finite."""
    return losses.decision_margin(logits, y) <= 0, jnp.all(jnp.isfinite(logits))


def zero_elsewhere(values: Counts, rows: npt.NDArray[np.int64], n: int) -> Counts:
    """``[n]``: the values in the given rows, 0 elsewhere."""
    whole = np.zeros(n, np.int64)
    whole[rows] = values
    return whole


class Spread(NamedTuple):
    """How much a distribution varies within one input."""

    within: npt.NDArray[np.float64]
    """``[n]``: standard deviation of an entry of ``delta / eps`` over an input's samples, averaged
    over entries; 0.577 for uniform linf noise, near 0 if the distribution is a single point, that
    is an attack."""
    saturated: float
    """Share of entries of ``delta / eps`` whose absolute value exceeds 0.95."""


def spread_within(
    perturbation: Perturbation, x: AnyArray, y: AnyArray, *, key: Array, draws: int = 64
) -> Spread:
    """Measures whether a distribution has collapsed to single points.

    Args:
      perturbation: the distribution.
      x: ``[n, *shape]`` in the box; perturbations are taken before they are clipped to it.
      y: ``[n]`` labels.
      key: a typed ``jax.random.key``.
      draws: samples of each input.

    Returns:
      A :class:`Spread`.

    Raises:
      ValueError: a bad distribution, samples or key.

    Source: this library's own.

    >>> from wdjax.nppr import distributions
    >>> how = {"key": jax.random.key(0), "draws": 500}
    >>> ball, x, y = distributions.UniformBall(0.1), jnp.ones((1, 3)) / 2, jnp.array([0])
    >>> one = spread_within(ball, x, y, **how)
    >>> round(float(one.within[0]), 1), round(one.saturated, 1)
    (0.6, 0.1)
    """
    arguments.check(perturbation=perturbation, x=x, y=y, key=key)
    host_only("spread_within", "nppr.points, which can be traced", perturbation, x, y, key)
    keys = jax.random.split(key, len(x))
    within, saturated = _spread_of(perturbation, jnp.asarray(x), jnp.asarray(y), keys, draws)
    return Spread(np.asarray(within, float), float(jnp.mean(saturated)))


@functools.partial(distinct.jit, static_argnums=4)
def _spread_of(
    perturbation: Perturbation, x: Array, y: Array, keys: Array, draws: int
) -> tuple[Array, Array]:
    """``[n]`` each: standard deviation and saturated share of ``delta / eps`` for every input.

    The deviation is that over ``draws`` samples of one input, averaged over entries; saturated are
    entries beyond 0.95. Inputs are treated one after another, to bound the memory.
    """

    def one(row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        x, y, key = (leaf[None] for leaf in row)
        delta = perturbation.deltas(key, perturbation.context(x, y), x, draws)
        radius = jnp.asarray(perturbation.eps, x.dtype)
        unit = delta[0].reshape(draws, -1) / jnp.where(radius > 0, radius, 1.0)
        return jnp.mean(jnp.std(unit, axis=0)), jnp.mean(jnp.abs(unit) > 0.95)

    return jax.lax.map(one, (x, y, keys))


@full_precision
def expected_loss(
    model: Callable[[Array], Array],
    perturbation: Perturbation,
    x: Array,
    y: Array,
    *,
    key: Array,
    draws: int = 16,
    loss: losses.Loss = losses.cross_entropy,
) -> Array:
    """Mean loss over perturbed copies, differentiable in the model and in the distribution.

    A smooth substitute for robustness, for training. Runs inside ``jit`` and ``grad``. The
    component of the mixture is drawn as a hard choice, so that proportions get no gradient.

    Args:
      model, perturbation, x, y, key, draws: as in :func:`estimate`.
      loss: per-sample, ``(logits, y) -> [n]``.

    Returns:
      A number.

    Raises:
      ValueError: a bad distribution, model, samples or key.

    Source: Wang et al. [wang2025].

    >>> from wdjax import Model
    >>> from wdjax.nppr import distributions
    >>> model = Model(lambda w, x: x @ w, jnp.eye(2))
    >>> x, y, key = jnp.array([[0.6, 0.4]]), jnp.array([0]), jax.random.key(0)
    >>> ball = distributions.UniformBall(0.1)
    >>> own = jax.grad(lambda m: expected_loss(m, ball, x, y, key=key))(model)
    >>> bool(own.args[0][0, 0] < 0)
    True
    """
    arguments.check(perturbation=perturbation, model=model, x=x, y=y, key=key)
    validate.shapes_of(model, x)
    moved = counting.points(perturbation, key, x, y, draws)
    logits = model(moved.reshape(-1, *x.shape[1:]))
    return jnp.mean(loss(logits, jnp.repeat(y, draws)))
