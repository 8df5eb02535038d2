"""The strongest minimum-norm search: walks from many starts, on the samples where they pay."""

from collections.abc import Callable
from os import PathLike
from typing import Any

import jax.numpy as jnp
import numpy as np

from wdjax import transport
from wdjax.attacks.points import Points
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Found, PyTree
from wdjax.engine import driver
from wdjax.engine.diagnosis import diagnosed
from wdjax.ensembles.question import Question, question
from wdjax.ensembles.walks import Kind, schedule

_HOPE = 0.2
"""Relative gain in distance expected of the first walk after the opening."""
_SOME = 6
"""One sample in so many is a trial sample; there are none where these would be fewer."""
_TRIAL = 0.25
"""Share of the keen samples that take a kind of walk on its first trial."""
_STAKE = 0.03
"""Maximum share of all passes that such a first trial may cost."""
_KEEN = 0.5
"""A sample is keen, and walked again, if its expected gain is at least this share of the mean."""


@diagnosed
def wda_star(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    key: Array | None = None,
    ball: Lp = Lp(),
    eps: float | None = None,
    order: float = 1,
    passes: int = 400,
    tolerance: float = 1e-4,
    start: AnyArray | None = None,
    checkpoint: str | PathLike[str] | None = None,
    **options: Any,
) -> Found:
    r"""The nearest flips found by a schedule of walks, refined where that pays.

    Pass the result to :func:`wdjax.spend`: the knapsack over these distances is WDA*, the attack of
    Wasserstein order p. Which start finds the nearest flips differs from model to model. Trial
    samples therefore decide which kind of :class:`~wdjax.attacks.Walk` comes first, from a random
    point of the box or towards the nearest class; for norm 1 it is a short
    :class:`~wdjax.attacks.PDPGD`, followed by a walk from its points and one from the sample. Then
    the kind of walk with the largest measured gain a pass goes next, also from around the sample
    and from the best point, on those samples only whose expected gain counts. With a budget ``eps``
    a distance d that is shortened by the share r gains what the knapsack pays for it,

        min(d_i, d*)^p - min((1 - r_i) d_i, d*)^p,

    where d* is the distance of the last flip bought, and r_i the share expected from the sample's
    latest walks. Flips so far away that the budget cannot buy them gain nothing.

    Args:
      model: as for :func:`wdjax.search`; its output must be logits.
      x: ``[n, *shape]``
      y: ``[n]``
      key: a typed ``jax.random.key``.
      ball: norm and box.
      eps: the budget for which the flips will be spent; None to value all distances alike, as for
        curves over many radii.
      order: the Wasserstein order p for which they will be spent.
      passes: maximum mean number of forward and backward passes a sample.
      tolerance: the search ends once the mean relative gain expected of another walk is smaller.
      start: ``[n, *shape]`` points that may be flips already, such as those of WDA++: they are
        measured, and kept unless a nearer flip is found. The passes of their search do not count.
      checkpoint: a folder; a call that was interrupted resumes from it, bit for bit.
      **options: ``criterion``, ``index``, ``batch_size``, ``mesh``, ``callback`` of
        :func:`wdjax.search`.

    Returns:
      A :class:`~wdjax.core.Found`: ``cost`` is the distance, where ``success`` is True.

    Raises:
      ValueError: no key, fewer passes than the opening takes, a call inside a trace, or what
        :func:`wdjax.search` refuses.

    Cost: ``passes`` a sample on average, plus one forward pass a walk for samples not walked; about
    ten compiled programs.

    Source: this library's own, on Le et al. [le2025], Algorithm 2; the ranking of classes is that
    of [melamed2024].

    >>> import jax, wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jax.numpy.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jax.numpy.array([[0.6, 0.4], [0.9, 0.1]]), jax.numpy.array([0, 0])
    >>> found = wda_star(model, x, y, key=jax.random.key(0), passes=120)
    >>> [round(float(d), 2) for d in found.cost]
    [0.1, 0.4]
    """
    arguments.check("eps", model=model, x=x, y=y, eps=eps, key=key, ball=ball)
    ask = question("wda_star", model, x, y, key, checkpoint, options)
    eps = None if eps is None else float(validate.check_number("eps", eps))
    order = validate.check_order(order)
    rivals, always, more = schedule(ball, validate.check_count("passes", passes))
    found, number = _open(ask, rivals), len(rivals) + 1
    if start is not None:
        samples = jnp.asarray(ask.x)
        reach = ball.cost(samples, jnp.asarray(validate.check_like("start", start, samples)))
        reach = jnp.where(jnp.isfinite(reach), 1.01 * reach, 0.0)  # Slack for rounding.
        found = driver.best_of(found, ask.search(number, Points(ball), eps=reach, start=start))
        number += 1
    hope = np.full(len(found.cost), _HOPE)
    for kind in always:
        found = driver.best_of(found, _follow(ask, number, kind, found, np.ones(len(hope), bool)))
        number += 1
    yields = dict.fromkeys(more, np.inf)
    while True:
        worth = _worth(found, hope, eps, order)
        if worth.sum() <= tolerance * _worth(found, np.ones_like(hope), eps, order).sum():
            return found
        left = passes - float(np.mean(found.passes))
        payable = [kind for kind in yields if kind.passes <= left * len(hope)]
        if not payable:
            return found
        kind = max(payable, key=lambda kind: yields[kind] / kind.passes)
        share = min(_TRIAL, _STAKE * passes / kind.passes) if np.isinf(yields[kind]) else 1.0
        only = _chosen(worth, kind, left, share)
        if not only.any():
            return found
        joined = driver.best_of(found, _follow(ask, number, kind, found, only))
        gain = _gain(found, joined)
        yields[kind] = _worth(found, gain, eps, order)[only].sum() / worth[only].sum()
        hope = np.where(only, (hope + gain) / 2, hope)
        found, number = joined, number + 1


def _gain(before: Found, after: Found) -> np.ndarray:
    """``[n]``: the share by which each distance became shorter between two results.

    A first flip counts as a gain of 1, and a distance of 0 cannot gain.
    """
    one, other = _distance(before), _distance(after)
    known = np.isfinite(one) & (one > 0)
    return np.where(
        known, 1 - other / np.where(known, one, 1.0), np.isinf(one) & np.isfinite(other)
    )


def _open(ask: Question, firsts: list[Kind]) -> Found:
    """The opening: the first search of every sample.

    All ``firsts`` are tried on every sixth sample (the trial samples), and the kind with the
    shortest distances in sum (at most twice the longest finite one counts) is used on the others.
    With one kind, or fewer than 36 samples, the first kind is used on all.
    """
    n = len(ask.y)
    if len(firsts) == 1 or n < _SOME * _SOME:
        return _follow(ask, 0, firsts[0], None, np.ones(n, bool))
    pilot = np.arange(n) % _SOME == 0
    tried: list[Found] = []
    for number, kind in enumerate(firsts):
        tried.append(_follow(ask, number, kind, tried[0] if tried else None, pilot))
    found = driver.best_of(*tried)
    lengths = np.array([_distance(one)[pilot] for one in tried])
    farthest = lengths.max(initial=0.0, where=np.isfinite(lengths))
    kind = firsts[int(np.argmin(np.minimum(lengths, 2 * farthest).sum(axis=1)))]
    return driver.best_of(found, _follow(ask, len(firsts), kind, found, ~pilot))


def _follow(ask: Question, number: int, kind: Kind, found: Found | None, only: np.ndarray) -> Found:
    """Search ``number`` of the ensemble, on the samples of ``only``, where the kind says it starts.

    Kind "best" starts at the nearest flips of ``found``; kind "around" starts near the sample, at
    the scale of those flips' distances; otherwise, or if ``found`` is None, the search starts at
    the sample.
    """
    scale = _scale(found) if found is not None and kind.start == "around" else None
    start = found.x_adv if found is not None and kind.start == "best" else None
    return ask.search(number, kind.attack, eps=scale, start=start, only=only)


def _scale(found: Found) -> np.ndarray:
    """``[n]``: the distance of each sample's nearest flip; without one the median, or 0."""
    distance = _distance(found)
    known = distance[np.isfinite(distance) & (distance > 0)]
    typical = float(np.median(known)) if len(known) else 0.0
    return np.where(np.isfinite(distance), distance, typical).astype(found.cost.dtype)


def _distance(found: Found) -> np.ndarray:
    """``[n]``: distances of the nearest flips in float64, inf where there is none."""
    return np.where(found.success, np.asarray(found.cost, np.float64), np.inf)


def _worth(found: Found, gain: np.ndarray, eps: float | None, order: float) -> np.ndarray:
    """``[n]``: how much is gained if each distance becomes shorter by the share ``gain`` ``[n]``.

    With a budget ``eps`` the gain is in powers of distance ``d^p``, and a distance counts at most
    as much as the longest one that the budget pays for, since longer ones do not change the
    attacked accuracy. Without a budget it is in distance. A sample without a flip counts as if its
    flip were at the largest distance found.
    """
    distance = _distance(found)
    known = distance[np.isfinite(distance)]
    farthest = known.max(initial=0.0) or 1.0
    power, price = 1.0, np.inf
    if eps is not None:
        weight = np.asarray(transport.allocate(distance, eps, order))
        bought = distance[(weight > 0) & np.isfinite(distance)]
        whole = bool(np.all(weight == 1))
        power = order if np.isfinite(order) else 1.0
        price = np.inf if whole else bought.max(initial=0.0)
        if not np.isfinite(order):
            price = eps
    distance = np.minimum(distance, farthest)
    return np.minimum(distance, price) ** power - np.minimum((1 - gain) * distance, price) ** power


def _chosen(worth: np.ndarray, kind: Kind, left: float, share: float) -> np.ndarray:
    """``[n]`` booleans: the samples of a further search, those with the largest expected gain.

    Among the keen samples (gain ``worth`` of at least half the mean) it takes the given ``share``,
    but no more than ``left``, the passes left per sample of the whole set, can pay for.
    """
    keen = (worth > 0) & (worth >= _KEEN * worth.mean())
    payable = max(0, int(left * len(worth) / kind.passes))
    ranking = np.argsort(-worth, kind="stable")
    count = min(payable, int(np.ceil(share * keen.sum())))
    only = np.zeros(len(worth), bool)
    only[ranking[:count]] = True
    return only & keen
