"""The strongest minimum-norm search: walks from many starts, on the samples where they pay."""

from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from wdjax import parallel, transport
from wdjax.attacks import ascent
from wdjax.attacks.points import Points
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Found, PyTree
from wdjax.engine import batching, driver
from wdjax.engine.diagnosis import diagnosed
from wdjax.ensembles.question import Question, question
from wdjax.ensembles.walks import Itinerary, Kind, distances, schedule

_HOPE = 0.2
"""Relative gain in distance expected of the first walk after the opening."""
_SOME = 6
"""One sample in six is a trial sample, and at least six are."""
_NEAR = 1.3
"""A walk follows a look from the sample if it comes within so many distances of the best flip."""
_LONG = 2.5
"""A distance is long if its ratio to the clean margin is over so many times the median ratio."""
_TRIAL = 0.25
"""Share of the keen samples that take a kind of walk on its first trial."""
_STAKE = 0.03
"""Maximum share of all passes that such a first trial may cost."""
_EASY = 0.5
"""Norm 1 is easy if the first steps flip more than this share of the correct samples."""
_MAJORITY = 0.5
"""Brief walks open if random points are better than the sample on more than this share of the trial
samples."""
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
    most: int | None = None,
    tolerance: float = 1e-4,
    start: AnyArray | None = None,
    checkpoint: str | PathLike[str] | None = None,
    **options: Any,
) -> Found:
    r"""The nearest flips found by a schedule of walks, refined where that pays.

    Pass the result to :func:`wdjax.spend`: the knapsack over these distances is WDA*, the attack of
    Wasserstein order p. Which start finds the nearest flips differs from model to model, and from
    sample to sample. Trial samples therefore decide which kind of :class:`~wdjax.attacks.Walk`
    comes first, from a random point of the box or towards the nearest class. From 150 passes on,
    but for norm 1, where random points are better on most trial samples, three or six brief walks
    from such points come first, and a longer one starts at the nearest of their flips: it ends
    nearer than one walk that is as long as all. A sample from which no walk began then gets a look:
    a walk of four steps from the sample. A longer walk from there follows if the look comes near,
    or if the best flip is far for the sample's margin. Then the kind of walk with the largest
    measured gain per pass goes next, also from around the sample and from the best point, on those
    samples only whose expected gain counts. Small steps from the best points end it.

    For norm 1, from 200 passes on, a short :class:`~wdjax.attacks.PDPGD` comes first; a long walk
    in small steps starts at its flip, or at the sample where it found none. From 200 to 449 passes
    a sample still without a flip gets a walk from a random point. If the first four steps from the
    samples flip more than half of them, walks to three classes, and then two from around the
    sample, take the place of PDPGD for all: this one decision depends on which samples come
    together, and below 300 passes nothing else does. From 450 passes on every sample takes both,
    and from 300 on what is left is shared as above. Below 70 passes the trial is between a walk
    from the sample and one from a random point; then samples without a flip get a short walk from
    such a point. :class:`~wdjax.attacks.SLP` shortens the flips at the end, from 70 passes on all
    of them; of a linear model they are then the nearest.

    Fewer than 36 samples tell little about each other. From 150 to 299 passes (norm 1: to 199) each
    takes a walk from itself and one from a random point of the box; then one to the nearest class
    if the nearer of these two flips came from the sample, else one from around it; then small steps
    from its best point. Only the passes that are left are shared.

    Otherwise samples share the passes, and trials speak for all of them: what is found for one
    depends on which others come with it, and on how many. With fewer than 36 at least six are trial
    samples (all, if there are fewer than 12) where the passes pay for that. With a budget ``eps`` a
    distance d that is shortened by the share r gains what the knapsack pays for it,

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
      most: maximum number of passes of the walks of any one sample; None for no such limit. Hard
        samples take two to five times the mean. It must be at least ``passes``.
      tolerance: the search ends once the mean relative gain expected of another walk is smaller.
      start: ``[n, *shape]`` points that may be flips already, such as those of WDA++: they are
        measured, and kept unless a nearer flip is found. The passes of their search do not count.
      checkpoint: a folder; a call that was interrupted resumes from it, bit for bit.
      **options: ``criterion``, ``index``, ``batch_size``, ``mesh``, ``callback`` of
        :func:`wdjax.search`.

    Returns:
      A :class:`~wdjax.core.Found`: ``cost`` is the distance, where ``success`` is True.

    Raises:
      ValueError: no key, fewer passes than the opening takes, ``most`` below ``passes``, a call
        inside a trace, or what :func:`wdjax.search` refuses.

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
    ascent.need_logits("wda_star", validate.shapes_of(model, ask.x))
    if options.get("batch_size") is None:
        devices = parallel.mesh_size(options.get("mesh"))
        size = batching.sizes(ask.model, ask.x, None, devices, uneven=True)[0]
        ask = ask._replace(options=options | {"batch_size": devices * size})
    eps = None if eps is None else float(validate.check_number("eps", eps))
    order = validate.check_order(order)
    most = None if most is None else validate.check_count("most", most)
    plan = schedule(ball, validate.check_count("passes", passes), most, len(ask.y) < _SOME * _SOME)
    kept = sum(kind.passes for kind in plan.last if kind.where == "all")
    terms = Spending(passes - kept, tolerance, eps, order)
    probed = None
    if plan.probe is not None and plan.easy is not None:
        probed = plan.probe.follow(ask, 0, None, np.ones(len(ask.y), bool))
        right = np.asarray(probed.correct)
        flips = right & np.asarray(probed.success)
        plan = plan.easy if flips.sum() > _EASY * right.sum() else plan
    record = _open(ask, plan, terms, np.inf if most is None else most, probed)
    if start is not None:
        record = _given(record, ball, start)
    if plan.look:
        record = _compare(record, plan.look, terms)
    known = np.asarray(record.found.success)
    for kind in plan.always:
        record = record.walked(kind, record.suits(kind))
    for kind in plan.lost:
        record = record.walked(kind, ~known)
    while (choice := _choice(record, plan.more, terms)) is not None:
        record = _learned(record, *choice, terms)
    return _ended(record, plan.last, terms._replace(passes=passes)).found


class Spending(NamedTuple):
    """How much may be spent, and for what: as for :func:`wda_star`."""

    passes: int
    tolerance: float
    eps: float | None
    order: float


class Standing(NamedTuple):
    """The state between two searches."""

    ask: Question
    number: int
    """How many searches there were."""
    found: Found
    near: np.ndarray
    """``[n]``: whether a walk from the sample itself found its nearest flip."""
    looked: np.ndarray
    """``[n]``: whether there was such a walk."""
    hope: np.ndarray
    """``[n]``: the share by which another search is expected to shorten the distance."""
    yields: dict[Kind, float]
    """The gain of each further kind, on the samples that it was last used for, as a share of what
    was expected there."""
    most: float
    """Maximum number of passes of the walks of one sample."""

    def walked(self, kind: Kind, only: np.ndarray) -> "Standing":
        """The state after search ``kind`` of the samples of ``only`` that may still take it."""
        only = only & self.affords(kind)
        result = kind.follow(self.ask, self.number, self.found, only)
        return self.after(result, only & kind.near, 1 + kind.brief)

    def affords(self, kind: Kind) -> np.ndarray:
        """``[n]``: whether the passes of such a search keep a sample within its maximum."""
        return np.asarray(self.found.passes) + kind.passes <= self.most

    def suits(self, kind: Kind) -> np.ndarray:
        """``[n]``: the samples to which a kind of ``Itinerary.always`` or ``last`` applies."""
        near, found = self.near, np.asarray(self.found.success)
        own = {"near": near, "far": ~near, "found": found, "lost": ~found}
        return own.get(kind.where, np.ones_like(near))

    def after(self, result: Found, near: np.ndarray, searches: int = 1) -> "Standing":
        """The state after more searches, which walked the samples of ``near`` from themselves."""
        nearer = distances(result) < distances(self.found)
        return self._replace(
            number=self.number + searches,
            found=driver.best_of(self.found, result),
            near=np.where(nearer, near, self.near),
            looked=self.looked | near,
        )


def _open(
    ask: Question, plan: Itinerary, terms: Spending, most: float, probed: Found | None
) -> Standing:
    """The opening: the first search of every sample, after the probe if there was one.

    A flip of the probe is kept only where the opening finds none: it is no good point to begin at.

    All ``firsts`` are tried on the trial samples, and the kind with the shortest distances in sum
    (each counts as at most twice the longest finite one) is used on the others. If the passes
    cannot pay for trials, the last kind is used on all samples. No sample takes more than ``most``
    passes. If the first kind is the best, and more than half of the trial samples have their
    nearest flip from a random point, ``several`` takes its place, for these trial samples too.
    """
    firsts = plan.firsts
    trial = _trial(len(ask.y), firsts, terms.passes)
    if trial.all() and terms.passes < sum(kind.passes for kind in firsts):
        firsts = firsts[-1:]
    number = 0 if probed is None else 1
    found = firsts[0].follow(ask, number, None, trial)
    if probed is not None:
        found = driver.joined(found, probed, jnp.asarray(probed.success & ~found.success))
    near, tried = trial & firsts[0].near, [found]
    record = Standing(ask, number + 1, found, near, near, np.full(len(trial), _HOPE), {}, most)
    for kind in firsts[1:]:
        only = trial & record.affords(kind)
        tried.append(kind.follow(ask, record.number, found, only))
        record = record.after(tried[-1], only & kind.near)
    lengths = np.array([distances(one)[trial] for one in tried])
    farthest = lengths.max(initial=0.0, where=np.isfinite(lengths))
    kind = firsts[int(np.argmin(np.minimum(lengths, 2 * farthest).sum(axis=1)))]
    distance = distances(record.found)
    right, several = distance > 0, plan.several
    far = right & ~record.near & np.isfinite(distance)
    better = kind is plan.firsts[0] and far[trial].sum() > _MAJORITY * right[trial].sum()
    if several and better and several.passes <= _left(record, terms):
        return record.walked(several, ~trial | far)
    return record if trial.all() else record.walked(kind, ~trial)


def _ended(record: Standing, kinds: list[Kind], terms: Spending) -> Standing:
    """The state after the last searches, of the samples whose distance matters.

    If the passes cannot pay for all of these, they are of those with the largest expected gain.
    """
    for kind in kinds:
        worth = _worth(record.found, record.hope, terms.eps, terms.order) * record.suits(kind)
        payable = _left(record, terms) * len(worth) / kind.passes
        record = record.walked(kind, _largest(worth, payable) & (worth > 0))
    return record


def _left(record: Standing, terms: Spending) -> float:
    """The passes that are left, per sample."""
    return terms.passes - float(np.mean(record.found.passes))


def _trial(n: int, firsts: list[Kind], passes: int) -> np.ndarray:
    """``[n]`` booleans: the trial samples; all if there is one kind, or if the passes are too few.

    One sample in six, but at least six where the passes are enough.
    """
    costs = [kind.passes for kind in firsts]
    for every in (min(_SOME, max(1, n // _SOME)), _SOME):
        trial = np.arange(n) % every == 0
        if sum(costs) * trial.mean() + max(costs) * (1 - trial.mean()) <= passes:
            break
    else:
        return np.ones(n, bool)
    return trial | (len(firsts) == 1)


def _compare(record: Standing, look: list[Kind], terms: Spending) -> Standing:
    """The state after a look from each sample, and a walk from there where the look comes near.

    This is for samples that no search has walked from, if a shorter distance matters: a far start
    may have missed a flip beside the sample. The walk follows also where the distance is long for
    the sample's margin: the look is too short to flip where gradients are tiny.
    """
    short, walk = look
    nobody = np.zeros(len(record.ask.y), bool)
    clean = short.follow(record.ask, record.number, record.found, nobody)
    record = record.after(clean, nobody)
    worth = _worth(record.found, record.hope, terms.eps, terms.order) > 0
    blind = ~record.looked & worth & record.affords(short)
    result = short.follow(record.ask, record.number, record.found, blind)
    again = blind & (distances(result) <= _NEAR * distances(record.found))
    again |= worth & _long(distances(record.found), -np.asarray(clean.margin, np.float64))
    return record.after(result, blind).walked(walk, again)


def _long(distance: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """``[n]``: whether distances are long for the margins ``gap`` of the clean samples.

    The median ratio of distance to margin says what a margin costs.
    """
    right = gap > 0
    price = distance / np.where(right, gap, 1.0)
    return right & (price > _LONG * np.median(price[right])) if right.any() else right


def _given(record: Standing, ball: Lp, start: AnyArray) -> Standing:
    """The state after points that may be flips already are kept where they are nearer."""
    samples = jnp.asarray(record.ask.x)
    reach = ball.cost(samples, jnp.asarray(validate.check_like("start", start, samples)))
    reach = jnp.where(jnp.isfinite(reach), 1.01 * reach, 0.0)  # Slack for rounding.
    result = record.ask.search(record.number, Points(ball), eps=reach, start=start)
    return record.after(result, np.zeros(len(samples), bool))


def _choice(record: Standing, kinds: list[Kind], terms: Spending) -> tuple[Kind, np.ndarray] | None:
    """The next search: the kind with the largest yield per pass, and its samples; None at the end.

    It ends when the passes are spent or the mean gain expected is below the tolerance. A kind not
    tried yet goes first, on a few samples.
    """
    worth = _worth(record.found, record.hope, terms.eps, terms.order)
    whole = _worth(record.found, np.ones_like(worth), terms.eps, terms.order)
    if worth.sum() <= terms.tolerance * whole.sum():
        return None
    left = _left(record, terms)

    def rate(kind: Kind) -> float:
        return record.yields.get(kind, np.inf) / kind.passes

    for kind in sorted(kinds, key=rate, reverse=True):
        first = min(_TRIAL, _STAKE * terms.passes / kind.passes)
        share = 1.0 if kind in record.yields else first
        open_ = record.affords(kind) & (record.near | (not kind.near))
        open_ &= ~record.near | (kind.brief == 0)
        only = _chosen(np.where(open_, worth, 0.0), kind, left, share)
        if only.any():
            return kind, only
    return None


def _learned(record: Standing, kind: Kind, only: np.ndarray, terms: Spending) -> Standing:
    """The state after one more search, and what it tells about its kind and its samples."""
    after = record.walked(kind, only)
    gain = _gain(record.found, after.found)
    had, expected = (
        _worth(record.found, share, terms.eps, terms.order)[only].sum()
        for share in (gain, record.hope)
    )
    hope = np.where(only, (record.hope + gain) / 2, record.hope)
    return after._replace(hope=hope, yields=record.yields | {kind: had / expected})


def _gain(before: Found, after: Found) -> np.ndarray:
    """``[n]``: the share by which each distance became shorter between two results.

    A first flip counts as a gain of 1, and a distance of 0 cannot gain.
    """
    one, other = distances(before), distances(after)
    known = np.isfinite(one) & (one > 0)
    return np.where(
        known, 1 - other / np.where(known, one, 1.0), np.isinf(one) & np.isfinite(other)
    )


def _worth(found: Found, gain: np.ndarray, eps: float | None, order: float) -> np.ndarray:
    """``[n]``: how much is gained if each distance becomes shorter by the share ``gain`` ``[n]``.

    With a budget ``eps`` the gain is in powers of distance ``d^p``, and a distance counts at most
    as much as the longest one that the budget pays for, since longer ones do not change the
    attacked accuracy. Without a budget it is in distance. A sample without a flip counts as if its
    flip were at the largest distance found.
    """
    distance = distances(found)
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
    payable = left * len(worth) / kind.passes
    return _largest(worth, min(payable, np.ceil(share * keen.sum()))) & keen


def _largest(worth: np.ndarray, count: float) -> np.ndarray:
    """``[n]``: which samples are the ``count`` of largest worth."""
    only = np.zeros(len(worth), bool)
    only[np.argsort(-worth, kind="stable")[: max(0, int(count))]] = True
    return only
