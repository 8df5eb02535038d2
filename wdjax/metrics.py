r"""Robustness metrics: accuracies, success rates, distances, robustness curves, intervals.

The functions take per-sample facts ``[n]`` and return means, so they apply to a
:class:`wdjax.Result` and to other attacks' results alike. All but the intervals run under ``jit``
and ``vmap``. The certified accuracy is :func:`wdjax.certify.certified_accuracy`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from wdjax.checks.validate import traced
from wdjax.core import Found


def correct(logits: jax.Array, y: ArrayLike) -> jax.Array:
    """Whether each sample is classified correctly by ``argmax``, which takes the first of a tie.

    A sample with an output that is NaN is not.

    Args:
      logits: ``[n, K]`` floats.
      y: ``[n]`` integer labels.

    Returns:
      ``[n]`` booleans.

    Raises:
      ValueError: other shapes, or labels that are not integers.

    Source: [definitions]

    >>> correct(jnp.array([[2.0, 1.0], [1.0, 1.0]]), jnp.array([0, 1])).tolist()
    [True, False]
    """
    logits, y = jnp.asarray(logits), jnp.asarray(y)
    if logits.ndim != 2 or y.shape != logits.shape[:1] or not jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(
            "logits must be [n, K] and labels [n] integers, got shapes "
            f"{list(logits.shape)} and {list(y.shape)}, {y.dtype}; use vmap for more."
        )
    return (jnp.argmax(logits, axis=-1) == y) & ~jnp.any(jnp.isnan(logits), axis=-1)


def accuracy(logits: jax.Array, y: ArrayLike) -> jax.Array:
    """The share of samples that are classified correctly.

    Args:
      logits: ``[n, K]`` floats, at clean or at adversarial points.
      y: ``[n]`` integer labels.

    Returns:
      A number in ``[0, 1]``.

    Source: [definitions]

    >>> float(accuracy(jnp.eye(4), jnp.array([0, 1, 2, 0])))
    0.75
    """
    return jnp.mean(correct(logits, y))


def attack_success_rate(success: ArrayLike, correct: ArrayLike | None = None) -> jax.Array:
    r"""The share of samples that are misclassified at their adversarial points.

    Args:
      success: ``[n]`` booleans: misclassified after the attack (``Result.success``).
      correct: ``[n]`` booleans: classified correctly before it (``Result.correct``). Where given,
        the rate is among those samples only, as many papers report it; NaN if there are none.

    Returns:
      A number in ``[0, 1]``. Without ``correct`` it is 1 minus the accuracy after the attack, if
      no sample is invalid: a search inside of a trace, which cannot raise, gives these no success.

    Source: Robustness Definitions [definitions], "Attack Success Rate".

    >>> success, before = jnp.array([True, True, False]), jnp.array([False, True, True])
    >>> float(attack_success_rate(success)), float(attack_success_rate(success, before))
    (0.666..., 0.5)
    """
    success = jnp.asarray(success, bool)
    before = jnp.ones_like(success) if correct is None else jnp.asarray(correct, bool)
    _check_same(success, before, "success", "correct")
    return _mean_where(success, before)


def targeted_attack_success_rate(logits: jax.Array, target: ArrayLike) -> jax.Array:
    r"""The share of samples that the attack moved into its target class.

    Args:
      logits: ``[n, K]`` floats at the adversarial points.
      target: ``[n]`` integer labels.

    Returns:
      A number in ``[0, 1]``.

    Source: Robustness Definitions [definitions], "For targeted attacks".

    >>> float(targeted_attack_success_rate(jnp.eye(3), jnp.array([0, 2, 2])))
    0.666...
    """
    return accuracy(logits, target)


def robust_accuracy(correct: ArrayLike, success: ArrayLike) -> jax.Array:
    """The share of samples that are classified correctly before *and* after the attack.

    The point-wise worst case: a sample counts only if no attack broke it.

    Args:
      correct: ``[n]`` booleans: classified correctly before the attack (``Result.correct``).
      success: ``[n]`` or ``[attacks, n]`` booleans: misclassified after it.

    Returns:
      A number in ``[0, 1]``, an upper bound on the true robust accuracy.

    Source: Robustness Definitions [definitions], "Robust Accuracy".

    >>> float(robust_accuracy(jnp.array([True, True, False]), jnp.array([False, True, False])))
    0.333...
    """
    correct, success = jnp.asarray(correct, bool), jnp.asarray(success, bool)
    _check_same(correct, success[0] if success.ndim == 2 else success, "correct", "success")
    broken = jnp.any(success, axis=0) if success.ndim == 2 else success
    return jnp.mean(correct & ~broken)


def mean_distance(distance: ArrayLike, success: ArrayLike) -> jax.Array:
    """The mean perturbation of the successful attacks; NaN if there are none.

    Args:
      distance: ``[n]`` norms of the perturbations.
      success: ``[n]`` booleans: misclassified after the attack.

    Source: Robustness Definitions [definitions], "Perturbation Magnitude Metrics".

    >>> float(mean_distance(jnp.array([1.0, 2.0, jnp.inf]), jnp.array([True, True, False])))
    1.5
    """
    distance, success = jnp.asarray(distance), jnp.asarray(success, bool)
    _check_same(distance, success, "distance", "success")
    return _mean_where(distance, success)


def median_distance(distance: ArrayLike, success: ArrayLike) -> jax.Array:
    """The median perturbation of the successful attacks; NaN if there are none.

    Args:
      distance: ``[n]``, in the units of ``x``.
      success: ``[n]`` booleans, the samples that count.

    Source: [definitions]

    >>> distance = jnp.array([1.0, 2.0, 9.0, 0.0])
    >>> float(median_distance(distance, jnp.array([True, True, True, False])))
    2.0
    """
    distance, success = jnp.asarray(distance), jnp.asarray(success, bool)
    _check_same(distance, success, "distance", "success")
    return jnp.nanmedian(jnp.where(success, distance, jnp.nan))


class MinimumPerturbation(NamedTuple):
    """A summary of minimal adversarial distances; NaN where no flip is known."""

    found: jax.Array
    """The share of samples with a finite distance."""
    mean: jax.Array
    """Of the finite distances; so are the next three."""
    median: jax.Array
    least: jax.Array
    largest: jax.Array
    median_of_all: jax.Array
    """The median of all distances, inf included: half of the samples are broken within it."""


def minimum_perturbation(distance: ArrayLike) -> MinimumPerturbation:
    r"""Summarises the smallest perturbations ``eps*(x_i)`` that a minimum-norm attack found.

    Args:
      distance: ``[n]`` distances: 0 where misclassified already, inf where no flip is known.

    Raises:
      ValueError: no distances, or ones that are negative or NaN; in a trace NaN gives NaN.

    Source: Robustness Definitions [definitions], "Minimum Adversarial Perturbation".

    >>> summary = minimum_perturbation(jnp.array([0.0, 0.5, 1.0, jnp.inf]))
    >>> float(summary.found), float(summary.mean), float(summary.median_of_all)
    (0.75, 0.5, 0.75)
    """
    distance = _check_distances(distance)
    found = jnp.isfinite(distance)
    ranked = jnp.sort(distance)
    some = jnp.any(found)
    middle = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    return MinimumPerturbation(
        found=jnp.mean(found),
        mean=_mean_where(distance, found),
        median=median_distance(distance, found),
        least=jnp.where(some, jnp.min(distance, initial=jnp.inf, where=found), jnp.nan),
        largest=jnp.where(some, jnp.max(distance, initial=0.0, where=found), jnp.nan),
        median_of_all=(middle[0] + middle[1]) / 2,
    )


class RobustnessCurve(NamedTuple):
    """Accuracy against the budget."""

    eps: jax.Array
    """``[m]``, increasing."""
    accuracy: jax.Array
    """``[m]``"""

    @property
    def area(self) -> jax.Array:
        """The area under the curve from the first to the last ``eps``, by trapezoids."""
        return jnp.trapezoid(self.accuracy, self.eps)


def robustness_curve(distance: ArrayLike, eps: ArrayLike) -> RobustnessCurve:
    r"""The robustness curve of minimal distances: ``mean 1{d_i > eps}`` at every ``eps``.

    Args:
      distance: ``[n]`` distances at which each sample is misclassified: 0 if it is already, inf if
        no flip is known.
      eps: ``[m]`` increasing budgets.

    Returns:
      A :class:`RobustnessCurve`, non-increasing.

    Raises:
      ValueError: ``eps`` does not increase; no distances, or ones that are negative or NaN. In a
        trace NaN gives NaN.

    Cost: ``O((n + m) log n)``.

    Source: Robustness Definitions [definitions], "Robustness Curves".

    >>> curve = robustness_curve(jnp.array([0.0, 1.0, 2.0, 3.0]), jnp.arange(4.0))
    >>> curve.accuracy.tolist(), float(curve.area)
    ([0.75, 0.5, 0.25, 0.0], 1.125)
    """
    distance, eps = jnp.sort(_check_distances(distance)), _check_increasing(eps)
    broken = jnp.searchsorted(distance, eps, side="right")
    unknown = jnp.isnan(distance[-1])  # NaN is sorted last.
    return RobustnessCurve(eps, jnp.where(unknown, jnp.nan, 1 - broken / len(distance)))


def measured_curve(
    accuracy_at: Callable[[jax.Array], ArrayLike], eps: ArrayLike
) -> RobustnessCurve:
    """The curve of a function ``eps -> accuracy``, called once for every budget.

    The function may loop on the host, as :func:`wdjax.run` does. If it is traceable,
    ``RobustnessCurve(eps, jax.vmap(accuracy_at)(eps))`` is a single program instead.

    Args:
      accuracy_at: ``eps -> accuracy``, numbers.
      eps: ``[m]`` increasing budgets.

    Returns:
      A :class:`RobustnessCurve`.

    Raises:
      ValueError: ``eps`` does not increase.

    Source: [definitions]

    >>> measured_curve(lambda eps: 1 - eps, jnp.array([0.0, 0.5])).accuracy.tolist()
    [1.0, 0.5]
    """
    eps = _check_increasing(eps)
    return RobustnessCurve(eps, jnp.stack([jnp.asarray(accuracy_at(budget)) for budget in eps]))


def step_area(distance: ArrayLike, limit: ArrayLike) -> jax.Array:
    r"""The exact area under the robustness curve of minimal distances on ``[0, limit]``.

    The curve is a staircase: ``integral_0^limit mean 1{d_i > t} dt = mean min(d_i, limit)``.

    Args:
      distance: ``[n]`` distances, inf where no flip is known.
      limit: the last budget, finite.

    Returns:
      The area in the units of ``distance``; divided by ``limit`` it is the mean robust accuracy.

    Source: [definitions]

    >>> float(step_area(jnp.array([0.0, 1.0, jnp.inf]), 2.0))
    1.0
    """
    return jnp.mean(jnp.minimum(_check_distances(distance), limit))


def flip_distance(found: Found) -> jax.Array:
    """The distances of a minimum-norm search, for the curves of this module.

    Args:
      found: from :func:`wdjax.search` with a minimum-norm attack.

    Returns:
      ``[n]``: 0 where misclassified already, inf where no flip is known, NaN where the sample is
      invalid, in a search inside of a trace. One search thus gives the whole curve,
      ``robustness_curve(flip_distance(found), eps)``.

    Source: this library's own.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.4, 0.6]]), jnp.array([0, 0])
    >>> found = wdjax.search(wdjax.attacks.Walk(), model, x, y)
    >>> [round(float(d), 3) for d in flip_distance(found)]
    [0.1, 0.0]
    """
    known = jnp.where(found.success, jnp.where(found.correct, found.cost, 0.0), jnp.inf)
    return jnp.where(jnp.isnan(found.cost), jnp.nan, known)


def envelope(*distances: ArrayLike) -> jax.Array:
    """The nearest flip of several attacks, per sample.

    Args:
      *distances: ``[n]`` each, inf where no flip is known.

    Returns:
      ``[n]`` upper bounds on the true distances.

    Raises:
      ValueError: distances of different shapes.

    Source: Cinà et al. (2025), AttackBench.

    >>> envelope(jnp.array([1.0, jnp.inf]), jnp.array([2.0, 3.0])).tolist()
    [1.0, 3.0]
    """
    if not distances or any(jnp.shape(one) != jnp.shape(distances[0]) for one in distances):
        raise ValueError(
            "envelope takes distances [n] of the same samples, got shapes "
            f"{list(map(jnp.shape, distances))}."
        )
    return jnp.min(jnp.stack([jnp.asarray(one) for one in distances]), axis=0)


def optimality(distance: ArrayLike, best: ArrayLike, limit: ArrayLike | None = None) -> jax.Array:
    r"""How close an attack comes to the nearest flips known: 1 if it finds all, 0 if none.

    ``1 - (A - A*) / (clean d_max - A*)``, where A is the area under the attack's robustness curve
    up to ``d_max``, A* that of the envelope, and ``clean`` the clean accuracy, so that an attack
    that finds nothing gets 0. An attack that beats the envelope gets more than 1.

    Args:
      distance: ``[n]`` of the attack: 0 where misclassified already, inf where no flip is known.
      best: ``[n]`` of the envelope.
      limit: ``d_max``, by default the largest finite distance of the envelope.

    Returns:
      A number; NaN if the envelope has no flip of a correct sample within the limit.

    Source: Cinà et al. (2025), AttackBench, equation 5.

    >>> best = jnp.array([0.0, 1.0, 2.0])
    >>> float(optimality(best, best)), float(optimality(jnp.array([0.0, jnp.inf, jnp.inf]), best))
    (1.0, 0.0)
    >>> round(float(optimality(jnp.array([0.0, 1.5, 2.0]), best)), 4)
    0.5
    """
    distance, best = jnp.asarray(distance), jnp.asarray(best)
    _check_same(distance, best, "distance", "best")
    if limit is None:
        limit = jnp.max(best, initial=0.0, where=jnp.isfinite(best))
    least = step_area(best, limit)
    most = jnp.mean(best > 0) * limit
    room = most - least
    lost = step_area(distance, limit) - least
    return jnp.where(room > 0, 1 - lost / jnp.where(room > 0, room, 1.0), jnp.nan)


class ConfidenceInterval(NamedTuple):
    """Ends between which the true probability lies with the stated confidence."""

    lower: npt.NDArray[np.float64]
    upper: npt.NDArray[np.float64]


def clopper_pearson(
    successes: npt.ArrayLike, n: npt.ArrayLike, confidence: float = 0.95
) -> ConfidenceInterval:
    r"""The exact two-sided binomial interval of a share ``successes / n``.

    It covers the true probability with at least the stated confidence, for every ``n``. It holds
    for counts of independent samples, hence for clean, point-wise robust and certified accuracies;
    a fractional weight of an adversarial distribution is not a count.

    Args:
      successes: integers in ``0 .. n``, any shape.
      n: positive integers, broadcast against ``successes``.
      confidence: in ``(0, 1)``, shared equally by the two sides.

    Returns:
      A :class:`ConfidenceInterval` of float64 NumPy arrays; lower is 0 for no success and upper is
      1 for no failure.

    Raises:
      ValueError: counts that are not integers or out of range, or a bad confidence.

    Source: Clopper and Pearson [clopper1934].

    >>> interval = clopper_pearson(0, 100)
    >>> float(interval.lower), round(float(interval.upper), 4)
    (0.0, 0.0362)
    """
    from scipy import special

    successes, n = np.broadcast_arrays(np.asarray(successes), np.asarray(n))
    integers = all(np.issubdtype(count.dtype, np.integer) for count in (successes, n))
    if not integers or np.any(n < 1) or np.any((successes < 0) | (successes > n)):
        raise ValueError(
            f"successes must be integers between 0 and n >= 1, got {successes!r} of {n!r}."
        )
    tail = (1 - _check_confidence(confidence)) / 2
    failures = n - successes
    lower = special.betaincinv(np.maximum(successes, 1), failures + 1, tail)
    upper = special.betainccinv(successes + 1, np.maximum(failures, 1), tail)
    return ConfidenceInterval(
        np.where(successes == 0, 0.0, lower), np.where(failures == 0, 1.0, upper)
    )


def mean_interval(
    values: npt.ArrayLike, confidence: float = 0.95, span: tuple[float, float] = (0.0, 1.0)
) -> ConfidenceInterval:
    r"""An interval for the mean of bounded numbers, valid for every sample size.

    For independent draws ``x_i`` in ``[0, 1]`` with mean at most m, ``prod_i (1 + b (x_i - m))``
    has an expectation of at most 1 for every stake ``0 <= b <= 1 / m``, and so has a mixture over
    stakes. By Markov's inequality it reaches ``1 / alpha`` with probability at most ``alpha``: the
    lower end is the least m at which it does not. The upper end is that of ``1 - x_i``. No
    assumption is made on the distribution, so equal values have an interval, too: n ones about ``[1
    - 5 / n, 1]``.

    Args:
      values: ``[n]`` numbers in the span, independent and identically distributed.
      confidence: in ``(0, 1)``, shared equally by the two sides.
      span: the smallest and the largest possible value, not those observed.

    Returns:
      A :class:`ConfidenceInterval`. For counts, whose values are 0 and 1, use
      :func:`clopper_pearson`, which is tighter.

    Raises:
      ValueError: no values, values outside the span, or a bad confidence.

    Differs: the stakes are a fixed mixture, in powers of 2 upwards from what values of the largest
      variance require, where the paper learns them from previous values; so the order of values
      does not matter, but intervals are up to a fifth wider where variances are large.

    Source: Waudby-Smith and Ramdas [waudbysmith2024].

    >>> interval = mean_interval(np.repeat([1.0, 0.5], [49, 1]))
    >>> round(float(interval.lower), 3), float(interval.upper)
    (0.911, 1.0)
    """
    low, high = span
    x = np.asarray(values, float)
    if x.ndim != 1 or not len(x) or not low < high or not np.all((x >= low) & (x <= high)):
        raise ValueError(
            f"values must be [n] numbers in the span [{low:g}, {high:g}], at least one, got "
            f"{values!r}."
        )
    tail = (1 - _check_confidence(confidence)) / 2
    unit, count = np.unique((x - low) / (high - low), return_counts=True)
    least, most = _least_mean(unit, count, tail), 1 - _least_mean(1 - unit, count, tail)
    ends = low + (high - low) * np.array([least, most])
    return ConfidenceInterval(*np.clip(ends, low, high))


_STAKED = 0.98
"""Maximum share of the wealth that a bet may lose in the worst case."""
_NEAR = 1e-9
"""Accuracy of the interval's ends, on the safe side."""


def _least_mean(x: npt.NDArray[Any], count: npt.NDArray[Any], alpha: float) -> float:
    """The least mean in [0, 1] that the data do not refute at level ``alpha``.

    ``count [m]`` draws had the values ``x [m]`` in [0, 1]. A mean is refuted if bets against it
    would have made ``1 / alpha`` of the stake; several bets of fixed sizes are mixed.
    """
    from scipy import optimize

    n = count.sum()
    powers = np.arange(4 + math.ceil(math.log2(n)))
    stakes = math.sqrt(-8 * math.log(alpha) / n) * 2.0**powers
    shares = 2.0 ** (-powers / 2)
    log = np.log(shares / shares.sum() * alpha)

    def beyond(m: float) -> float:
        bets = np.minimum(stakes, _STAKED / m)
        wealth = np.log1p(bets[:, None] * (x - m)) @ count
        return float(np.logaddexp.reduce(wealth + log))

    mean = float(x @ count / n)
    if mean <= _NEAR or beyond(_NEAR) < 0:
        return 0.0
    return max(0.0, optimize.brentq(beyond, _NEAR, mean, xtol=_NEAR) - 2 * _NEAR)


def _check_confidence(confidence: float) -> float:
    """Raises unless a confidence is in (0, 1)."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}.")
    return confidence


def _mean_where(values: jax.Array, chosen: jax.Array) -> jax.Array:
    """The mean of ``values`` where ``chosen``; NaN if that is nowhere."""
    count = jnp.sum(chosen)
    total = jnp.sum(jnp.where(chosen, values, 0.0))
    return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)


def _check_same(first: jax.Array, second: jax.Array, first_name: str, second_name: str) -> None:
    """Raises unless both arrays are ``[n]``; the names are for the message."""
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(
            f"{first_name} and {second_name} must both be [n], got shapes {list(first.shape)} and "
            f"{list(second.shape)}; use vmap for more."
        )


def _check_distances(distance: ArrayLike) -> jax.Array:
    """``[n]`` as an array; raises if it is empty, and outside traces for NaN or below 0."""
    found = jnp.asarray(distance)
    if found.ndim != 1 or len(found) == 0:
        raise ValueError(f"distances must be [n], n at least 1, got shape {list(found.shape)}.")
    if not traced(found) and not np.all(np.asarray(found) >= 0):
        wrong = int(np.argmin(np.asarray(found) >= 0))
        raise ValueError(
            f"distances must be at least 0, or inf for no flip, got {found[wrong]} at {wrong}."
        )
    return found


def _check_increasing(eps: ArrayLike) -> jax.Array:
    """The budgets ``[m]`` as an array; raises outside traces unless they increase."""
    if not traced(eps) and (np.ndim(eps) != 1 or not np.all(np.diff(eps) > 0)):
        raise ValueError(f"eps must be [m] increasing budgets, got {eps}.")
    return jnp.asarray(eps, float)
