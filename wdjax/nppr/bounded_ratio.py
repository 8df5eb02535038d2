r"""The worst distribution of bounded density ratio: survival between PR and AR, without a fit."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wdjax import metrics
from wdjax.checks import validate
from wdjax.metrics import ConfidenceInterval
from wdjax.nppr.estimate import Estimate
from wdjax.nppr.rare import Rare

Numbers = npt.NDArray[np.float64]

RATIOS = tuple(float(ratio) for ratio in np.geomspace(1, 1e6, 25))
"""The default ratios: 1 to a million, four in a decade."""
_APART = 0.02
"""Share of the level at which the interval of a single input may fail in that of the population."""
_ROUNDING = 1e-12
"""By which a difference of sums of survivals is lowered, since it is rounded."""


@dataclasses.dataclass(frozen=True)
class BoundedRatio:
    """The worst survival of each input, by ratio, with intervals; on the host.

    The ends of all three intervals fall with the ratio.
    """

    ratio: Numbers
    """``[R]`` bounds B of the density ratio, increasing."""
    found: Estimate | tuple[Rare, ...]
    """What is known of the failure probabilities of m inputs."""

    @property
    def failure(self) -> Numbers:
        """``[m]``: the estimated failure probability of each input under the reference."""
        if isinstance(self.found, Estimate):
            return 1 - self.found.per_input
        return np.array([one.value for one in self.found])

    @property
    def per_input(self) -> Numbers:
        """``[R, m]``: the worst survival at the estimated probabilities.

        Since it is convex in the probability, whose estimates are unbiased, its expectation is at
        least the true survival. Where no failure was met it is 1 at every ratio: look at the
        intervals, and at :attr:`remark`.
        """
        return self._survival(self.failure)

    @property
    def value(self) -> Numbers:
        """``[R]``: the mean of :attr:`per_input`; at ratio 1 that is PR."""
        return np.mean(self.per_input, axis=1)

    @property
    def remark(self) -> str:
        """What speaks against the values, in words; empty if nothing does."""
        if isinstance(self.found, Estimate):
            none, draws = int(np.sum(self.failure == 0)), self.found.draws
            if not none or self.ratio[-1] * 3 <= draws:
                return ""
            return (
                f"{none} of {len(self.failure)} inputs lost none of {draws} copies: beyond a ratio "
                f"of about {draws / 3:.2g} only the upper ends say something of them"
            )
        said = [f"input {i}: {one.remark}" for i, one in enumerate(self.found) if one.remark]
        return "; ".join(said)

    def of_inputs(self, confidence: float = 0.95) -> ConfidenceInterval:
        """Intervals ``[R, m]`` of each input's survival, each valid for all ratios at once.

        They are the images of the probability's interval: Clopper-Pearson of counts, Cox's of
        :meth:`Rare.interval`.
        """
        least, most = self._probability(confidence)
        return ConfidenceInterval(self._survival(most), self._survival(least))

    def pooled(self, confidence: float = 0.95) -> ConfidenceInterval:
        """Intervals ``[R]`` of the mean over *these* inputs, valid for all ratios at once.

        Each probability lies in its interval at a level divided by the number of inputs. Of counts
        the probabilities' mean lies in that of :meth:`Estimate.pooled`, too, at half the level; the
        lower end is then the least mean survival of probabilities that satisfy both, and the upper
        end is at most 1 minus the least mean. Cox's intervals are only approximate at such levels.
        """
        size, level = len(self.failure), 1 - _checked(confidence)
        if not isinstance(self.found, Estimate):
            ends = self.of_inputs(1 - level / size)
            return ConfidenceInterval(np.mean(ends.lower, axis=1), np.mean(ends.upper, axis=1))
        least, most = self._probability(1 - level / 2 / size)
        low, high = (1 - float(end) for end in self.found.pooled(1 - level / 2)[::-1])
        at_least = self._survival(least)
        inverse = 1 / self.ratio[:, None]
        # Below 1 / B survival falls at the rate B, whichever input the probability is added to.
        room = np.sum(np.maximum(np.minimum(most, inverse) - least, 0), axis=1)
        added = np.minimum(room, max(size * high - float(np.sum(least)), 0.0))
        mean = np.mean(at_least, axis=1)
        lower = mean - self.ratio * added / size - _ROUNDING
        return ConfidenceInterval(np.clip(lower, 0, 1), np.minimum(mean, 1 - low))

    def population(self, confidence: float = 0.95) -> ConfidenceInterval:
        """Intervals ``[R]`` of the mean over the inputs' population, each for one ratio.

        :func:`wdjax.metrics.mean_interval` of the inputs' lower ends, less the probability that one
        of these is too high; and of :attr:`per_input`, whose expectation is not too low.
        """
        wrong = _APART * (1 - _checked(confidence))
        ends = self.of_inputs(1 - 2 * wrong)
        low = [float(metrics.mean_interval(row, confidence).lower) for row in ends.lower]
        high = [float(metrics.mean_interval(row, confidence).upper) for row in self.per_input]
        # The mean falls with the ratio, so that these ends are no tighter.
        lower = np.minimum.accumulate(np.maximum(np.array(low) - wrong, 0.0))
        upper = np.maximum.accumulate(np.array(high)[::-1])[::-1]
        return ConfidenceInterval(lower, upper)

    def _survival(self, failure: Numbers) -> Numbers:
        """``[R, m]``: the worst survival at failure probabilities ``[m]``."""
        return np.clip(1 - self.ratio[:, None] * failure, 0.0, 1.0)

    def _probability(self, confidence: float) -> tuple[Numbers, Numbers]:
        """``[m]`` each: the ends of the inputs' failure probabilities."""
        if isinstance(self.found, Estimate):
            low, high = self.found.of_inputs(confidence)
            return 1 - high, 1 - low
        ends = np.array([one.interval(confidence) for one in self.found], float)
        return ends[:, 0], ends[:, 1]


def bounded_ratio(
    found: Estimate | Rare | Sequence[Rare], ratio: npt.ArrayLike = RATIOS
) -> BoundedRatio:
    r"""NPPR over all distributions whose density is at most B times the reference's.

    Let p be an input's probability of failure under the reference P. Then the least survival over
    the distributions Q with ``dQ/dP <= B`` is

    .. math:: \min_{dQ/dP \le B} 1 - Q(\mathrm{failure}) = \max(0, 1 - B p).

    *Proof.* ``Q(failure)``, the integral of ``dQ/dP`` over the failures, is at most ``B p`` and at
    most 1. Both are attained: if ``B p <= 1`` by the density B on the failures and ``(1 - B p) / (1
    - p) <= B`` elsewhere, otherwise by the density ``1 / p < B`` on the failures alone.

    So the curve leads from PR at B = 1 to the share of inputs whose failures have probability 0 as
    B grows, which is AR but for failures of measure 0. Like the family of a label's own
    distributions, the worst Q may differ from input to input. No optimiser is involved: the only
    error is that of p, which the intervals bound.

    Args:
      found: the failure probabilities of inputs: an :class:`Estimate` of counts, whose correctly
        classified inputs count, or the results of :func:`splitting` or :func:`importance` of one or
        several inputs. A copy whose logits are not finite is a failure in all of them.
      ratio: B, a number or ``[R]`` increasing numbers, at least 1.

    Returns:
      A :class:`BoundedRatio`. Counts of ``draws`` copies bound an input's survival from below up to
      a ratio of about ``draws / 4``; for a million use the rare-event estimators.

    Raises:
      ValueError: a ratio below 1, ratios that do not increase, or no estimates.

    Cost: no pass of the model.

    Differs: the paper's worst case is over a learnt family, whose optimum a fit may miss.

    Source: this library's own; the bathtub principle [lieb2001], theorem 1.14. ``1 - B p`` is one
      minus the conditional value at risk, at level ``1 - 1 / B``, of the failures.

    >>> runs = np.array([0.9e-5, 1.1e-5, 1.0e-5, 1.0e-5, 1.0e-5])
    >>> curve = bounded_ratio(Rare(runs, 5000, 0, 0, True), [1, 1e3, 1e4, 1e6])
    >>> curve.value.round(3).tolist()
    [1.0, 0.99, 0.9, 0.0]
    >>> [[round(float(end), 2) for end in ends[2:, 0]] for ends in curve.of_inputs()]
    [[0.89, 0.0], [0.91, 0.0]]
    """
    if validate.traced(ratio):
        raise ValueError("bounded_ratio works on the host; call it outside jit and vmap.")
    ratios = np.atleast_1d(np.asarray(ratio, np.float64))
    rising = ratios.ndim == 1 and ratios.size and np.all(np.diff(ratios) > 0)
    if not (rising and np.all(np.isfinite(ratios)) and ratios[0] >= 1):
        raise ValueError(
            f"ratio must be a number or [R] increasing numbers, at least 1, got {ratio!r}."
        )
    if isinstance(found, Estimate):
        return BoundedRatio(ratios, found)
    several = (found,) if isinstance(found, Rare) else tuple(found)
    if not several or not all(isinstance(one, Rare) for one in several):
        raise ValueError(
            "found must be what nppr.estimate, nppr.splitting or nppr.importance returned, or a "
            f"list of the latter, got {found!r}."
        )
    return BoundedRatio(ratios, several)


def _checked(confidence: float) -> float:
    """Raises unless a confidence is in (0, 1)."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}.")
    return confidence
