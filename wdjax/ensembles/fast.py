"""A cheap cascade for a fixed budget: attacks that break most samples a pass come first."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from wdjax.attacks import ascent
from wdjax.attacks.margin_pgd import MarginPGD
from wdjax.attacks.walk import Walk
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Attack, Found, PyTree
from wdjax.engine import driver
from wdjax.ensembles.question import Question, question
from wdjax.ensembles.walks import Kind, distances
from wdjax.precision import full_precision

_RESTARTS = 30
_CHEAP = 2.0
"""Passes a sample that a further restart may cost although the last one broke no sample."""
LEAST = 12
"""Minimum number of passes a sample."""
_PATIENCE = 12
"""Number of consecutive walks without a flip after which the cascade ends: a round of walks."""


class Leg(NamedTuple):
    """The state after one search of a cascade: means over the samples."""

    name: str
    accuracy: float
    forwards: float
    gradients: float


class Account(NamedTuple):
    """What an ensemble found, and the accuracy and passes after each of its searches."""

    found: Found
    legs: tuple[Leg, ...]

    @property
    def reached(self) -> Leg:
        """The first leg with the final accuracy: later searches broke no sample."""
        return next(leg for leg in self.legs if leg.accuracy <= self.legs[-1].accuracy)


@full_precision
def fast(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    eps: Any,
    key: Array | None = None,
    ball: Lp = Lp(),
    passes: int = 150,
    diagnose: bool = True,
    checkpoint: str | PathLike[str] | None = None,
    **options: Any,
) -> Account:
    r"""Robust accuracy within a radius, with a few percent of AutoAttack's passes.

    Each search attacks the survivors only, and a sample leaves at its first flip. First come 8
    steps of margin PGD from the sample, then 8 from a random point of the box, repeated while they
    break samples or cost almost nothing. Then come minimum-norm walks, which follow the boundary
    where an ascent stays inside, and whose distances tell which samples are nearly broken: two of
    13 steps for all survivors; more from the best points and from random corners for the half, the
    quarter and the eighth with the nearest flips; small steps from the best points of the nearest
    eighth; and 20 steps to each of three classes for the nearest quarter. This is repeated until
    the passes are spent or a round of walks broke no sample. A flip farther than ``eps`` does not
    count.

    Args:
      model: as for :func:`wdjax.search`; its output must be logits.
      x: ``[n, *shape]``
      y: ``[n]``
      eps: radius, a number or ``[n]``.
      key: a typed ``jax.random.key``.
      ball: norm and box.
      passes: maximum mean number of backward passes, and of forward passes, a sample: a search that
        could exceed it is not begun.
      diagnose: as for :func:`wdjax.search`, once at the end; beyond ``passes``.
      checkpoint: a folder; a call that was interrupted resumes from it, bit for bit.
      **options: ``criterion``, ``index``, ``batch_size``, ``mesh``, ``callback`` of
        :func:`wdjax.search`.

    Returns:
      A :class:`Account`: :class:`~wdjax.core.Found`, and the accuracy and passes after every
      search.

    Raises:
      ValueError: no key, fewer passes than the first search takes, a call inside a trace, or what
        :func:`wdjax.search` refuses.

    Cost: at most ``passes`` forward and backward passes a sample on average, less for models that
    are broken early.

    Source: this library's own.

    >>> import jax, wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jax.numpy.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jax.numpy.array([[0.6, 0.4], [0.8, 0.2]]), jax.numpy.array([0, 0])
    >>> account = fast(model, x, y, eps=0.2, key=jax.random.key(0))
    >>> account.found.success.tolist(), account.reached.gradients
    ([True, False], 5.0)
    """
    arguments.check(model=model, x=x, y=y, eps=eps, key=key, ball=ball)
    ask = question("fast", model, x, y, key, checkpoint, options)
    ascent.need_logits("fast", validate.shapes_of(model, ask.x))
    radii = validate.check_radii(eps, len(ask.y))
    if validate.check_count("passes", passes) < LEAST:
        raise ValueError(f"fast needs at least {LEAST} passes an image to begin, got {passes}.")
    found = ask.search(0, MarginPGD(ball), eps=radii)
    legs = [_leg("8 steps", found)]

    def go_on(name: str, attack: Attack, steps: int) -> bool:
        """Makes one more search of the survivors; tells whether it broke any."""
        nonlocal found
        left = np.asarray(found.correct & ~found.success)
        cost = steps * left.mean() + 2
        if not left.any() or max(legs[-1].forwards, legs[-1].gradients) + cost > passes:
            return False
        found = driver.best_of(found, ask.search(len(legs), attack, eps=radii, only=left))
        legs.append(_leg(name, found))
        return legs[-1].accuracy < legs[-2].accuracy

    for _ in range(_RESTARTS):
        broke = go_on("8 steps, random start", MarginPGD(ball, far=True), 9)
        if not broke and 8 * np.mean(found.correct & ~found.success) > _CHEAP:
            break
    account = _hunt(ask, ball, found, radii, legs, passes)
    if not diagnose:
        return account
    return account._replace(found=ask.looked_again("fast", account.found, MarginPGD(ball), radii))


def _hunt(
    ask: Question, ball: Lp, found: Found, radii: Array, legs: list[Leg], passes: int
) -> Account:
    """Walks (minimum-norm searches) on shares of the survivors, those with the nearest flips first.

    ``radii`` ``[n]`` are the samples' eps; a Leg is appended to ``legs`` for every walk. Ends when
    no sample survives, when the next walk would exceed ``passes`` (a mean over all samples), or
    when ``_PATIENCE`` walks in a row broke no sample.
    """
    nearest: Found | None = None
    distance, idle = np.full(len(ask.y), np.inf), 0
    for kind, share in itertools.cycle(_rounds(ball)):
        left = np.asarray(found.correct & ~found.success)
        order = np.lexsort((-np.asarray(found.margin), distance, ~left))
        only = np.zeros(len(left), bool)
        only[order[: int(np.ceil(share * left.sum()))]] = True
        spent = max(legs[-1].forwards, legs[-1].gradients)
        affordable = spent + kind.passes / 2 * only.mean() + 2 <= passes
        if not left.any() or not affordable or idle >= _PATIENCE:
            break
        seen = kind.follow(ask, len(legs), nearest, only)
        nearest = seen if nearest is None else driver.best_of(nearest, seen)
        distance = distances(nearest)
        found = driver.within(found, seen, radii)
        legs.append(_leg(f"walk, the nearest {share:.3g}", found))
        idle = 0 if legs[-1].accuracy < legs[-2].accuracy else idle + 1
    return Account(found, tuple(legs))


def _rounds(ball: Lp) -> list[tuple[Kind, float]]:
    """The walks of one round, in order, each with the share of the survivors that takes it.

    A survivor's flip is often a few percent farther than the radius. Small steps from the best
    points of the nearest survivors cost little and bring the most of these inside.
    """
    brief = Kind(Walk(ball, steps=13, far=True, haste=1.0), "sample")
    held = Walk(ball, steps=25, far=True, haste=0.5, step_size=1.1, shrink=0.25, width=1.3)
    again = Kind(Walk(ball, steps=20), "best")
    small = Kind(Walk(ball, steps=12, step_size=0.1, shrink=0.1), "best")
    aimed = Kind(Walk(ball, steps=20, targets=3), "sample")
    around = Kind(held, "around")
    nearer = [(around, 0.25), (around, 0.125), (small, 0.125)]
    first = [(brief, 1.0), (Kind(replace(held, steps=13), "around"), 1.0), (again, 0.25)]
    return [*first, (small, 0.125), (around, 0.5), *nearer, (aimed, 0.25), *nearer]


def _leg(name: str, found: Found) -> Leg:
    """The :class:`Leg` of an ensemble's result: accuracy and passes, as means over the samples."""
    standing = found.correct & ~found.success
    means = (float(np.mean(row)) for row in (standing, found.forwards, found.gradients))
    return Leg(name, *means)
