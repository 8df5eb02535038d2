r"""Probabilistic accuracy, decided by a sequential test, and the fields of PRBench.

``ProbAcc(rho)`` is the share of inputs whose copies are misclassified with probability ``rho`` at
most. No number of copies *shows* that of an input; a test decides it at a stated level, in as few
copies as the case allows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from wdjax import metrics
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, Classifier
from wdjax.nppr import counting, distributions
from wdjax.nppr.counting import TURN, TWIN, Counts, Perturbation
from wdjax.nppr.estimate import Estimate, correct_inputs, estimate, unfitted, zero_elsewhere
from wdjax.precision import full_precision
from wdjax.smoothing import binomial

_GROWTH = 1.5
"""Factor between the numbers of copies at which the test decides."""
EPS_LIST = (0.03, 0.08, 0.10, 0.12)
"""PRBench's budgets for PR."""
RISKS = (0.10, 0.05, 0.01)
"""PRBench's risks rho for ProbAcc."""


class Decision(NamedTuple):
    """The decisions for every input and every rho."""

    rho: tuple[float, ...]
    correct: npt.NDArray[np.bool_]
    """``[n]``: whether the unperturbed input is classified correctly; only these inputs count."""
    robust: npt.NDArray[np.bool_]
    """``[R, n]``: whether the failure probability is at most rho, each at level ``1 - alpha``."""
    fragile: npt.NDArray[np.bool_]
    """``[R, n]``: whether it is more than rho, each at level ``1 - alpha``."""
    draws: Counts
    """``[n]``: copies drawn."""
    faults: Counts
    """``[n]``: copies whose logits were not finite; they count as misclassified."""
    alpha: float

    @property
    def lower(self) -> npt.NDArray[np.float64]:
        """``[R]``: ProbAcc of these inputs, if undecided inputs are all fragile."""
        return np.asarray(np.mean(self.robust[:, self.correct], axis=1))

    @property
    def upper(self) -> npt.NDArray[np.float64]:
        """``[R]``: the same, if undecided inputs are all robust."""
        return np.asarray(1 - np.mean(self.fragile[:, self.correct], axis=1))

    @property
    def undecided(self) -> npt.NDArray[np.bool_]:
        """``[R, n]``: whether the failure probability is too close to rho for ``draws`` copies."""
        return np.asarray(self.correct & ~self.robust & ~self.fragile)

    def population(self, confidence: float = 0.95) -> metrics.ConfidenceInterval:
        """``[R]`` intervals of ProbAcc for the population of inputs.

        If the share R of inputs is robust, at most ``R + alpha (1 - R)`` are decided to be robust.
        A Clopper-Pearson lower bound L of the latter gives ``R >= (L - alpha) / (1 - alpha)``; the
        upper end follows likewise from the inputs decided to be fragile.
        """
        n = int(np.sum(self.correct))
        robust, fragile = (np.sum(one, axis=1) for one in (self.robust, self.fragile))
        least, most = (
            np.maximum(metrics.clopper_pearson(one, n, confidence).lower - self.alpha, 0.0)
            / (1 - self.alpha)
            for one in (robust, fragile)
        )
        return metrics.ConfidenceInterval(least, 1 - most)


@full_precision
def probabilistic_accuracy(
    model: Classifier,
    perturbation: Perturbation,
    x: AnyArray,
    y: AnyArray,
    *,
    key: Array,
    rho: float | Sequence[float] = RISKS,
    alpha: float = 0.05,
    draws: int = 10_000,
    index: AnyArray | None = None,
    batch_size: int | None = None,
    mesh: Mesh | None = None,
) -> Decision:
    r"""Decides for each input whether it survives with probability at least ``1 - rho``.

    Two tests of :func:`wdjax.smoothing.binomial.evidence` run against each other, "at least"
    against "less", and copies are drawn until one of them has the evidence ``1 / alpha``. The
    evidence may be inspected at any time, so each decision is wrong with probability at most
    ``alpha``, whatever the input. A hundred copies without a failure only show a risk below 3 %.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]`` that treats each sample independently.
      perturbation: the distribution.
      x: ``[n, *shape]`` in the box.
      y: ``[n]`` labels.
      key: a typed ``jax.random.key``.
      rho: one or several risks in ``(0, 1)``, decided from the same copies.
      alpha: in ``(0, 1/2]``, the probability that a decision is wrong.
      draws: maximum number of copies of an input, after which it stays undecided.
      index: ``[n]`` integers, the inputs' numbers in a larger data set.
      batch_size: copies on all devices at once.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; inputs are split over it.

    Returns:
      A :class:`Decision`.

    Raises:
      ValueError: as :func:`~wdjax.nppr.estimate`, or a risk or level out of range.

    Warns:
      UserWarning: as :func:`~wdjax.nppr.estimate`, or a risk that ``draws`` copies cannot show.

    Cost: for an input that never fails about 40, 90 and 500 forward passes at rho .1, .05 and .01.

    Source: Robey et al. [robey2022] for the quantity, Robbins [robbins1970] for the test.

    >>> import jax, jax.numpy as jnp
    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.55, 0.45]]), jnp.array([0, 0])
    >>> own = distributions.UniformBall(0.2)
    >>> found = probabilistic_accuracy(model, own, x, y, key=jax.random.key(0), rho=0.1)
    >>> found.robust.tolist(), found.fragile.tolist()
    ([[True, False]], [[False, True]])
    """
    arguments.check(perturbation=perturbation, model=model, x=x, y=y, key=key)
    host_only("nppr.probabilistic_accuracy", TWIN, model, perturbation, x, y, key)
    most = validate.check_count("draws", draws)
    risks = _risks(rho, alpha, most)
    x, y, right = correct_inputs(model, perturbation, x, y)
    arguments.warn(unfitted(perturbation, y[right]))
    asked = counting.poll(model, perturbation, x, y, key, index, batch_size, mesh)
    rows, n = np.flatnonzero(right), len(right)
    test = _decide_all(asked, rows, risks, alpha, most)
    robust, fragile = (np.zeros((len(risks), n), bool) for _ in range(2))
    robust[:, rows], fragile[:, rows] = test.robust, test.fragile
    return Decision(
        rho=tuple(map(float, risks)),
        correct=right,
        robust=robust,
        fragile=fragile,
        draws=zero_elsewhere(test.draws, rows, n),
        faults=zero_elsewhere(test.faults, rows, n),
        alpha=float(alpha),
    )


def _risks(rho: float | Sequence[float], alpha: float, most: int) -> npt.NDArray[np.float64]:
    """``[R]``: the risks, checked; warns of those that ``most`` copies can never show."""
    risks = np.atleast_1d(np.asarray(rho, float))
    if risks.ndim != 1 or not np.all((risks > 0) & (risks < 1)):
        raise ValueError(f"rho must be risks between 0 and 1, got {rho!r}.")
    if binomial.check_level(alpha) > 0.5:
        raise ValueError(f"alpha must be at most 1/2, got {alpha!r}.")
    shown, _ = decided(np.array([most]), most, risks, alpha)
    if not shown.all():
        arguments.warn(
            f"no input can be shown to survive at rho={risks[~shown[:, 0]].max():g}: {most} copies "
            f"that all survive are no evidence of 1/alpha={1 / alpha:g}; raise draws."
        )
    return risks


class _Tests(NamedTuple):
    """The decisions ``[R, m]`` for m inputs, and what they took, ``[m]``."""

    robust: npt.NDArray[np.bool_]
    fragile: npt.NDArray[np.bool_]
    draws: Counts
    faults: Counts


def _decide_all(
    asked: counting.CopyPoll,
    rows: npt.NDArray[np.int_],
    risks: npt.NDArray[np.float64],
    alpha: float,
    most: int,
) -> _Tests:
    """Draws copies of the inputs ``rows`` ``[m]`` until all risks ``[R]`` are decided.

    A decision stands once it is made. Numbers of copies grow by a constant factor up to ``most``.
    """
    decisions = np.zeros((2, len(risks), len(rows)), np.bool_)
    test = _Tests(*decisions, *np.zeros((2, len(rows)), np.int64))
    won, active, done = np.zeros(len(rows), np.int64), np.arange(len(rows)), 0
    while len(active) and done < most:
        turns = max(1, int((_GROWTH - 1) * done) // TURN)
        step = min(turns * TURN, most - done)
        tally = counting.count(asked, rows[active], done, step)
        done += step
        won[active] += tally.survived
        test.faults[active] += tally.faults
        test.draws[active] = done
        sure, weak = decided(won[active], done, risks, alpha)
        robust, fragile = test.robust[:, active], test.fragile[:, active]
        test.robust[:, active] = robust | (sure & ~fragile)
        test.fragile[:, active] = fragile | (weak & ~robust)
        active = active[~np.all((test.robust | test.fragile)[:, active], axis=0)]
    return test


def decided(
    survived: npt.ArrayLike, draws: int, rho: npt.ArrayLike, alpha: float
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Whether the evidence suffices, ``[R, n]`` each: for a risk of at most ``rho``, and for more.

    >>> sure, weak = decided([100, 60, 95], 100, [0.1], 0.05)
    >>> sure.tolist(), weak.tolist()
    ([[True, False, False]], [[False, True, False]])
    """
    # Counts take few distinct values, and integrating the evidence is the expensive part.
    won, which = np.unique(survived, return_inverse=True)
    risk, enough = np.asarray(rho, float)[:, None], -np.log(alpha)
    robust = binomial.evidence(1 - risk, won, draws) >= enough
    fragile = binomial.evidence(risk, draws - won, draws) >= enough
    return (robust & ~fragile)[:, which], (fragile & ~robust)[:, which]


@full_precision
def prbench(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    key: Array,
    ball: Lp = Lp(),
    eps_list: Sequence[float] = EPS_LIST,
    rho: Sequence[float] = RISKS,
    radius: float = 0.03,
    draws: int = 100,
    alpha: float = 0.005,
    train: tuple[AnyArray, AnyArray] | None = None,
    batch_size: int | None = None,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """PRBench's measures under its names, as shares in [0, 1], with 95 % population intervals.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` in the box.
      y: ``[n]`` labels.
      key: a typed ``jax.random.key``.
      ball: norm and box.
      eps_list: budgets of PR under uniform noise.
      rho: risks of ProbAcc.
      radius: the radius of ProbAcc.
      draws: copies of each input for PR; PRBench has 100.
      alpha: level of each decision behind ProbAcc; it widens the interval.
      train: inputs and labels of the training set, for the generalisation error: PR on them less
        PR on ``x``.
      batch_size: copies on all devices at once.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; inputs are split over it.

    Returns:
      ``"acc"``; for every radius r ``"PR(r)"`` and, with ``train``, ``"GE_PR(r)"``; for every rho
      ``"ProbAcc(rho)"``. All but ``acc`` are ``{"value", "interval"}``; the value of ProbAcc counts
      the inputs decided to be robust.

    Raises:
      ValueError: bad samples, budgets, shares or key.

    Differs: ProbAcc is decided by a test instead of 100 copies. Intervals are those of
      :func:`wdjax.metrics.mean_interval` and of Clopper and Pearson, where PRBench has a bootstrap;
      the interval of a difference combines two of 97.5 %.

    Source: Zhang et al. [zhang2025].

    >>> import jax, jax.numpy as jnp
    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.505, 0.495]]), jnp.array([0, 0])
    >>> found = prbench(model, x, y, key=jax.random.key(0), eps_list=(0.03,), rho=(0.1,))
    >>> found["PR(0.03)"]["value"] < 1, found["ProbAcc(0.10)"]["value"]
    (True, 0.5)
    """
    arguments.check(model=model, x=x, y=y, key=key)
    arguments.warn(arguments.too_far(ball, np.shape(x)[1:], eps_list))
    how: dict[str, Any] = {"key": key, "batch_size": batch_size, "mesh": mesh}

    def measured(x: AnyArray, y: AnyArray, eps: float) -> Estimate:
        return estimate(model, distributions.UniformBall(eps, ball), x, y, draws=draws, **how)

    fields: dict[str, Any] = {}
    for eps, shown in zip(eps_list, _shown("eps_list", eps_list)):
        found = measured(x, y, eps)
        fields.setdefault("acc", float(np.mean(found.correct)))
        fields[f"PR({shown})"] = _field(found.value, *found.population())
        if train is not None:
            known = measured(*train, eps)
            fields[f"GE_PR({shown})"] = _field(known.value - found.value, *excess(known, found))
    decision = probabilistic_accuracy(
        model, distributions.UniformBall(radius, ball), x, y, rho=rho, alpha=alpha, **how
    )
    risks = _shown("rho", decision.rho)
    for shown, value, low, high in zip(risks, decision.lower, *decision.population()):
        fields[f"ProbAcc({shown})"] = _field(value, low, high)
    return fields


def _shown(name: str, values: Sequence[float]) -> list[str]:
    """Numbers as in the names of fields: with two decimals, or six digits where these do not do.

    Raises if two would have one name.
    """
    short = [f"{value:.2f}" for value in values]
    if not np.allclose([float(text) for text in short], values, rtol=1e-6, atol=0):
        short = [f"{value:.6g}" for value in values]
    if len(set(short)) < len(short):
        raise ValueError(f"{name} has a number twice: {', '.join(short)}; leave it out.")
    return short


def excess(known: Estimate, moved: Estimate) -> metrics.ConfidenceInterval:
    """Interval of the difference of two populations' survival: two of 97.5 % make one of 95 %."""
    (low, high), (first, last) = (one.population(0.975) for one in (moved, known))
    return metrics.ConfidenceInterval(first - high, last - low)


def _field(value: Any, low: Any, high: Any) -> dict[str, Any]:
    """A value in [0, 1] and the ends of its interval, as numbers for JSON."""
    return {"value": float(value), "interval": [float(low), float(high)]}
