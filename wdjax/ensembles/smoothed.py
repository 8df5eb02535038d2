"""Attacks on a smoothed classifier: found under fixed noise, confirmed under fresh noise."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import losses, norms, smoothing
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, Attack, Found
from wdjax.engine import diagnosis, driver
from wdjax.precision import full_precision
from wdjax.smoothing import binomial
from wdjax.smoothing.grid import Noise

STRETCH = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5, 3.2, 4.0)
"""Multiples of the distance of a flip at which the smoothed classifier is tested."""


@full_precision
def smoothed(
    attack: Attack,
    model: Callable[[Array], Array],
    x: AnyArray,
    y: AnyArray,
    *,
    noise: Noise,
    key: Array,
    eps: Any = None,
    count: int = 32,
    votes: int = 2000,
    alpha: float = 0.001,
    stretch: Sequence[float] = STRETCH,
    batch_size: int | None = None,
    diagnose: bool = True,
    **options: Any,
) -> Found:
    r"""Looks for points at which a *smoothed* classifier returns another class, and tests them.

    The attack sees :func:`wdjax.smoothing.soft`, the mean over ``count`` fixed noise samples. A
    point counts if fresh noise shows, at level ``1 - alpha`` for each sample, that another class
    than the label is the most probable. Near its boundary a smoothed classifier's classes cannot be
    told apart by votes, so points farther along the same line are tried too. Where ``soft`` already
    misclassifies a sample and the votes do not, the attack goes on beyond its margin there. Within
    a radius proved by :func:`wdjax.smoothing.certify` for the same model and noise, flips occur
    only by chance.

    Args:
      attack: from :mod:`wdjax.attacks`, such as :class:`~wdjax.attacks.DDN`.
      model: a pytree callable ``[n, *shape] -> [n, K]``, not smoothed.
      x: ``[n, *shape]``
      y: ``[n]``
      noise: of :mod:`wdjax.smoothing.noise`.
      key: a typed ``jax.random.key``.
      eps: the radius, if the attack needs one; it also binds the points farther along the line.
      count: noise samples over which a gradient is averaged.
      votes: fresh votes for every point that is tested.
      alpha: for each sample, the probability of a false flip.
      stretch: increasing multiples of the perturbation; only 1 where a ball needs proofs.
      batch_size: copies at once when votes are counted; the search chooses its own.
      diagnose: as for :func:`wdjax.search`; what the second look finds is confirmed by votes too.
      **options: of :func:`wdjax.search`, but no ``criterion``: a flip is what the votes show.

    Returns:
      A :class:`~wdjax.core.Found`: ``success`` marks confirmed flips; ``margin`` is the share of
      votes of the best rival less that of the label; ``correct`` is False where the test assigns
      the sample itself to another class. A pass is one of ``soft``: ``count`` of the model.

    Raises:
      ValueError: factors that do not increase from 1, a ``criterion``, and what the search refuses.

    Cost: ``count`` times that of the attack, and up to ``votes`` forward passes for each multiple;
      one more search of the samples that only ``soft`` misclassifies.

    Source: Salman et al. [salman2019]; Athalye et al. [athalye2018].

    >>> import wdjax
    >>> from wdjax.smoothing.noise import Gaussian
    >>> model = wdjax.Model(lambda w, x: 20 * x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4]]), jnp.array([0])  # .141 from a flip
    >>> how = {"noise": Gaussian(0.25), "key": jax.random.key(0)}
    >>> found = smoothed(wdjax.attacks.DDN(wdjax.Lp(2)), model, x, y, **how)
    >>> bool(found.success[0]), bool(0.14 < found.cost[0] < 0.2)
    (True, True)
    """
    arguments.check("eps", attack=attack, model=model, x=x, y=y, noise=noise, eps=eps, key=key)
    twin = "wdjax.search on smoothing.soft, which can be traced"
    host_only("ensembles.smoothed", twin, attack, model, x, y, noise, eps, key)
    validate.refuse_criterion("smoothed", options, "a flip is what the votes show")
    factors = _factors(stretch)
    soft_key, search, ask = jax.random.split(key, 3)
    level = _level(alpha, votes, len(factors) + 1)
    stand_in = smoothing.soft(model, x, noise=noise, key=soft_key, count=count)
    how = {"noise": noise, "n": votes, "batch_size": batch_size, "index": options.get("index")}
    test = _VoteTest(model, np.asarray(y), ask, level, how)
    x = jnp.asarray(x)
    itself = test(0, x, None)

    def searched(attack: Attack, *, eps: Any, **options: Any) -> tuple[Found, np.ndarray]:
        """What was found and confirmed, with margins of ``soft``; and those of the votes."""
        given: dict[str, Any] = {"eps": eps, "diagnose": False} | options
        found = driver.search(attack, stand_in, x, y, **given)
        only = ~np.asarray(found.correct) & ~itself.fallen & _asked(options, len(x))
        only &= np.isfinite(found.margin)  # One that is not would hide all others.
        if only.any():
            found = _beyond(found, attack, stand_in, x, y, only, given)
        limit = np.inf if eps is None else np.asarray(eps) * (1 + 1e-6)
        best = _confirmed(attack, test, itself, x, found, factors, limit)
        told = dataclasses.replace(
            found,
            x_adv=jnp.asarray(best.x_adv, x.dtype),
            cost=jnp.asarray(best.cost, x.dtype),
            correct=jnp.asarray(~itself.fallen),
            success=jnp.asarray(best.success),
            fault=found.fault | jnp.asarray(best.faults > 0),
        )
        return told, best.margin

    found, margin = searched(attack, eps=eps, key=search, **options)
    if diagnose:
        kept = {name: options[name] for name in _LOOK if name in options}
        nobody = np.zeros(len(x), bool)
        unmoved, _ = searched(attack, eps=eps, key=search, only=nobody, **kept)

        def again(look: Attack, *, eps: Any, **options: Any) -> Found:
            return searched(look, eps=eps, **kept, **options)[0]

        clean = np.asarray(unmoved.margin)
        found = diagnosis.diagnose(found, attack, clean, x, eps, again, "smoothed")
    return dataclasses.replace(found, margin=jnp.asarray(margin, x.dtype))


_LOOK = "mask", "index", "mesh"
"""Options of the search that hold for the second look."""


def _asked(options: dict[str, Any], n: int) -> np.ndarray:
    """``[n]``: the samples that the option ``only`` leaves to the attack."""
    only = options.get("only")
    return np.ones(n, bool) if only is None else np.asarray(only, bool)


def _beyond(
    found: Found,
    attack: Attack,
    stand_in: Callable[[Array], Array],
    x: Array,
    y: AnyArray,
    only: np.ndarray,
    options: dict[str, Any],
) -> Found:
    """``found``, with other points for the samples ``only``, ``[n]``, which ``stand_in``
    misclassifies: points where a rival of the label leads by more than at any of these samples."""
    least = float(np.max(np.asarray(found.margin)[only]))
    past = jax.tree_util.Partial(_past, least)
    own: dict[str, Any] = {"only": only, "criterion": past}
    if options.get("checkpoint") is not None:
        kept = Path(options["checkpoint"])
        own["checkpoint"] = kept.with_name(f"beyond-{kept.name}")
    more = driver.search(attack, stand_in, x, y, **options | own)
    more = dataclasses.replace(more, margin=more.margin + least)
    return dataclasses.replace(driver.joined(found, more, jnp.asarray(only)), history=found.history)


def _past(least: Array, out: Array, y: Array) -> Array:
    """The criterion that a rival leads the label by more than ``least``."""
    return losses.decision_margin(out, y) - least


def _factors(stretch: Sequence[float]) -> list[float]:
    factors = [float(factor) for factor in stretch]
    if not factors or factors[0] != 1 or any(np.diff(factors) <= 0):
        raise ValueError(f"stretch must increase from 1, got {stretch!r}.")
    return factors


def _level(alpha: float, votes: int, tests: int) -> float:
    """The level of each of a sample's tests; warns if no votes can show a majority at it."""
    level = binomial.check_level(alpha) / tests
    if binomial.rank_test(validate.check_count("votes", votes), 0) > level:
        arguments.warn(
            f"no point can be confirmed: {votes} votes at a level of {level:.2g} show no majority "
            "even if all agree; raise votes."
        )
    return level


class _Votes(NamedTuple):
    """What fresh votes say about one point of every sample: ``[n]`` leaves."""

    fallen: np.ndarray
    """Whether another class than the label is shown to be the most probable."""
    margin: np.ndarray
    """The share of votes of the best rival less that of the label."""
    faults: np.ndarray
    """The number of votes that were not finite."""


class _VoteTest(NamedTuple):
    """A test of points of a smoothed classifier, under fresh noise for each number."""

    model: Callable[[Array], Array]
    labels: np.ndarray
    """``[n]``"""
    key: Array
    level: float
    how: dict[str, Any]
    """Arguments of :func:`wdjax.smoothing.tally`."""

    def __call__(self, number: int, points: Array, only: Any) -> _Votes:
        """Votes on points ``[n, *shape]``; of samples outside ``only`` ``[n]`` none are counted."""
        fresh = jax.random.fold_in(self.key, number)
        counts = smoothing.tally(self.model, points, key=fresh, only=only, **self.how)
        said = smoothing.decide(counts, self.level)
        fallen = (said != self.labels) & (said != smoothing.ABSTAIN)
        return _Votes(fallen, _margin(counts, self.labels, self.how["n"]), counts[:, -1])


class _Best(NamedTuple):
    """The best tested point of every sample: ``[n, ...]`` leaves."""

    x_adv: np.ndarray
    cost: np.ndarray
    success: np.ndarray
    margin: np.ndarray
    faults: np.ndarray


def _confirmed(
    attack: Attack,
    test: _VoteTest,
    itself: _Votes,
    x: Array,
    found: Found,
    factors: list[float],
    limit: Any,
) -> _Best:
    """Tests points farther and farther along the line from ``x`` to the attack's points.

    ``x`` is ``[n, *shape]`` and ``itself`` the votes on it. A sample is tested until a point falls;
    points that cost more than ``limit`` are not. Where a ball needs a proof, only the attack's own
    points have one.
    """
    best = _Best(np.array(x), np.zeros(len(x)), itself.fallen.copy(), itself.margin, itself.faults)
    for number, factor in enumerate(factors if found.proof is None else [1.0], 1):
        points = _along(attack, x, found.x_adv, factor)
        price = np.asarray(attack.ball.cost(x, points, found.proof), np.float64)
        only = ~best.success & np.isfinite(price) & (price <= limit) & (price > 0)
        if not only.any():
            continue
        votes = test(number, points, only)
        better = only & (votes.fallen | (votes.margin > best.margin))
        best = _Best(
            np.where(norms.spread(jnp.asarray(better), x), points, best.x_adv),
            np.where(better, price, best.cost),
            best.success | (only & votes.fallen),
            np.where(better, votes.margin, best.margin),
            best.faults + votes.faults,
        )
    return best


def _along(attack: Attack, x: Array, x_adv: Array, factor: float) -> Array:
    """``[n, *shape]``: ``x + factor (x_adv - x)``, clipped to the box; ``x_adv`` at factor 1."""
    if factor == 1:
        return x_adv
    points = x + factor * (x_adv - x)
    box = attack.ball.box
    return points if box is None else jnp.clip(points, *box)


def _margin(counts: np.ndarray, y: np.ndarray, votes: int) -> np.ndarray:
    """``[n]``: the share of votes of the best rival less that of the label."""
    rows = np.arange(len(y))
    rivals = counts[:, :-1].copy()
    rivals[rows, y] = -1
    return (rivals.max(axis=1) - counts[rows, y]) / votes
