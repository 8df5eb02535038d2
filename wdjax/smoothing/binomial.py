r"""Confidence bounds of a probability from counts, for fixed sample sizes and for stopping times.

All are one-sided, hold at level ``1 - alpha`` for every probability and sample size, and are
computed in float64 on the host.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wdjax.checks import validate

Numbers: TypeAlias = npt.NDArray[np.float64]
_BISECTIONS = 60


def lower(successes: npt.ArrayLike, n: npt.ArrayLike, alpha: float) -> Numbers:
    r"""The exact one-sided bound of Clopper and Pearson: the ``p`` with ``P_p(S >= s) = alpha``.

    Args:
      successes: integers in ``0 .. n``, any shape.
      n: number of draws, at least 0, fixed in advance.
      alpha: in ``(0, 1)``, the probability that the bound is too large.

    Returns:
      Lower bounds in the shape of the counts, 0 where there is no success.

    Source: Clopper and Pearson [clopper1934].

    >>> round(float(lower(10_000, 10_000, 0.001)), 6)
    0.999309
    """
    from scipy import special

    s, made = check_counts(successes, n, alpha)
    bound = special.betaincinv(np.maximum(s, 1), made - s + 1.0, alpha)
    return np.where(s == 0, 0.0, bound)


def randomized_lower(
    successes: npt.ArrayLike, n: npt.ArrayLike, alpha: float, uniform: npt.ArrayLike
) -> Numbers:
    r"""The ``p`` with ``P_p(S > s) + u P_p(S = s) = alpha``: too large with just this probability.

    :func:`lower` is the case ``u = 1``, and never larger. For small ``u`` the equation allows
    bounds up to 1; the result is capped at the ``p`` with ``P_p(S >= s) = 1/2``, which keeps the
    level.

    Args:
      successes: integers in ``0 .. n``, any shape.
      n: number of draws, at least 0, fixed in advance.
      alpha: in ``(0, 1/2]``, the probability that the bound is too large.
      uniform: ``u``, drawn uniformly from ``(0, 1)`` and independently of the counts.

    Returns:
      Lower bounds in the shape of the counts, 0 where there is no draw.

    Source: Stevens [stevens1950]; for smoothing Voracek [voracek2024].

    >>> float(randomized_lower(10, 10, 0.05, 0.5)) > float(lower(10, 10, 0.05))
    True
    """
    from scipy import special

    s, made = check_counts(successes, n, alpha)
    u, low = np.broadcast_arrays(np.asarray(uniform, float), lower(s, made, alpha))
    if not np.all((u >= 0) & (u <= 1)) or alpha > 0.5:
        raise ValueError(f"uniform must lie in [0, 1] and alpha in (0, 1/2], got {u!r}, {alpha!r}.")
    low, high = np.array(low), np.maximum(low, lower(s, made, 0.5))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        more = np.where(s < made, special.bdtrc(np.minimum(s, made - 1), made, middle), 0.0)
        least = np.where(s > 0, special.bdtrc(np.maximum(s - 1, 0), made, middle), 1.0)
        fits = more + u * (least - more) <= alpha
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.where(made == 0, 0.0, low)


def evidence(p: npt.ArrayLike, successes: npt.ArrayLike, n: npt.ArrayLike) -> Numbers:
    r"""The log-evidence (e-value) against "the probability is at most ``p``", at any stopping time.

    ``E_n(p) = int L_n(t) / L_n(p) dpi(t)`` with the likelihood ``L_n(t) = t^s (1 - t)^(n - s)`` and
    Jeffreys's prior on ``(p, 1)``. For ``t > p`` each ratio is a supermartingale from 1 under every
    probability up to ``p``, hence so is their mixture, and by Ville's inequality the chance that it
    *ever* reaches ``1 / alpha`` is at most ``alpha``.

    Args:
      p: in ``(0, 1)``.
      successes: integers in ``0 .. n``.
      n: number of draws so far.

    Returns:
      ``log E_n(p)``; 0 before the first draw.

    Source: Robbins [robbins1970], mixtures of likelihood ratios; the prior cut at ``p`` is this
      library's own.

    >>> float(evidence(0.5, 0, 0)), bool(evidence(0.5, 60, 60) > np.log(1000))
    (0.0, True)
    """
    from scipy import special

    q, s = np.asarray(p, float), np.asarray(successes, float)
    failed = np.asarray(n, float) - s
    a, b = s + 0.5, failed + 0.5
    with np.errstate(divide="ignore"):
        mixed = special.betaln(a, b) + np.log(special.betaincc(a, b, q))
        prior = special.betaln(0.5, 0.5) + np.log(special.betaincc(0.5, 0.5, q))
    return np.asarray(mixed - prior - special.xlogy(s, q) - special.xlog1py(failed, -q))


def sequence_lower(successes: npt.ArrayLike, n: npt.ArrayLike, alpha: float) -> Numbers:
    r"""A bound that holds for all ``n`` at once: the least ``p`` with ``E_n(p) < 1 / alpha``.

    Drawing may stop or continue after every draw, for any reason.

    Where the evidence is at least 1/alpha it decreases in ``p`` (the slope of ``log L_n`` exceeds
    the hazard rate of the prior there), so that bisection finds the bound.

    Args:
      successes: integers in ``0 .. n``, any shape.
      n: number of draws so far.
      alpha: in ``(0, 1/2]``, the probability that the bound is too large for *any* ``n``.

    Returns:
      Lower bounds in the shape of the counts, 0 where nothing is known.

    Source: Robbins [robbins1970]; for smoothing Voracek [voracek2024].

    >>> rate = [float(sequence_lower(n, n, 0.001)) for n in (10, 100, 1000)]
    >>> [round(bound, 3) for bound in rate]
    [0.449, 0.922, 0.992]
    """
    s, made = check_counts(successes, n, alpha)
    if alpha > 0.5:
        raise ValueError(f"alpha must lie in (0, 1/2], got {alpha!r}.")
    low, high = np.zeros(s.shape), np.where(made > 0, s / np.maximum(made, 1), 0.0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        inside = (middle > 0) & (middle < 1)
        against = evidence(np.where(inside, middle, 0.5), s, made) >= -np.log(alpha)
        against &= inside
        low, high = np.where(against, middle, low), np.where(against, high, middle)
    return low


def sequential_lower(
    successes: npt.ArrayLike, n: npt.ArrayLike, most: int, alpha: float
) -> Numbers:
    r"""The better of :func:`sequence_lower` at alpha/10 and, after all draws, :func:`lower`.

    So drawing can stop early, and the last bound is almost as tight as that of a fixed sample.

    Args:
      successes: integers in ``0 .. n``, any shape.
      n: number of draws so far.
      most: largest number of draws, fixed in advance.
      alpha: in ``(0, 1/2]``, the probability that a bound is too large for any ``n``.

    Returns:
      Lower bounds in the shape of the counts, 0 where nothing is known.

    >>> bool(sequential_lower(990, 1000, 1000, 0.01) > sequence_lower(990, 1000, 0.005))
    True
    """
    s, made = check_counts(successes, n, alpha)
    early = sequence_lower(s, made, alpha / 10)
    late = np.maximum(early, lower(s, made, alpha * 9 / 10))
    return np.where(made >= most, late, early)


def rank_test(first: npt.ArrayLike, second: npt.ArrayLike) -> Numbers:
    r"""The p-value of "the class counted most is not the most probable": a two-sided binomial test.

    ``min(1, 2 P(S >= n_1))`` with ``S ~ Bin(n_1 + n_2, 1/2)`` and the two largest counts
    ``n_1 >= n_2``. It is valid for any number of classes, although the counts select the two.

    Args:
      first: the largest counts, integers of any shape.
      second: the second largest counts, of the same shape.

    Source: Hung and Fithian [hung2019], as PREDICT of Cohen et al. [cohen2019] uses it.

    >>> rank_test([10, 5], [0, 5]).round(4).tolist()
    [0.002, 1.0]
    """
    from scipy import special

    most, next_most = np.asarray(first), np.asarray(second)
    tail = special.bdtrc(np.maximum(most - 1, 0), most + next_most, 0.5)
    tail = np.where(most > 0, tail, 1.0)
    return np.minimum(1.0, 2 * tail)


def check_counts(successes: npt.ArrayLike, n: npt.ArrayLike, alpha: float) -> tuple[Any, Any]:
    """Checks counts and a level; returns both counts in one shape."""
    s, made = np.broadcast_arrays(np.asarray(successes), np.asarray(n))
    integers = all(np.issubdtype(count.dtype, np.integer) for count in (s, made))
    if not integers or np.any((s < 0) | (s > made)):
        raise ValueError(f"successes must be integers between 0 and n, got {s!r} of {made!r}.")
    check_level(alpha)
    return s, made


def check_level(alpha: float) -> float:
    """Checks an error probability ``alpha``."""
    if not 0 < validate.check_number("alpha", alpha) < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha!r}.")
    return float(alpha)
