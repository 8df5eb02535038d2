"""Adaptive Auto Attack (A3) and its Wasserstein form, A3-WDA."""

import math
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax.attacks import WDA, Diversified
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import SEARCH_TWIN, host_only
from wdjax.core import AnyArray, Array, Attack, Found, PyTree
from wdjax.engine import driver
from wdjax.ensembles.cascade import survivors
from wdjax.ensembles.second_look import with_second_look

_LEAST = 100
"""Minimum number of samples that a round attacks, if so many survive."""


class Round(NamedTuple):
    """One round: steps of the start, steps of the ascent, and which survivors take part."""

    probes: int
    steps: int
    share: float
    """Share of the survivors that is attacked, those of largest margin: the nearest to a flip."""
    restarts: int


ROUNDS = (
    Round(0, 8, 1.0, 1),
    Round(7, 15, 1.0, 1),
    Round(7, 32, 1.0, 1),
    Round(7, 32, 0.7, 1),
    Round(7, 37, 0.6, 1),
    Round(7, 37, 0.5, 1),
    Round(7, 42, 0.4, 1),
    Round(7, 47, 0.3, 1),
    Round(7, 52, 0.2, 1),
    Round(7, 57, 0.1, 1),
    Round(7, 57, 0.1, 4),
    Round(7, 62, 0.065, 4),
    Round(7, 67, 0.03, 50),
)
"""The authors' thirteen rounds, in the mode for models that do not mask their gradients."""
_LONGEST = max(turn.steps for turn in ROUNDS)
_FIRST, _FINAL = 1, 10
"""The round whose flips decide the label weights, and the first round with the final weights."""


@with_second_look
def a3(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    eps: Any,
    key: Array,
    ball: Lp = Lp(),
    passes: float = 1000,
    finisher: Attack | None = None,
    only: Any = None,
    checkpoint: str | PathLike[str] | None = None,
    report: Callable[[str, Found], Any] | None = None,
    **options: Any,
) -> Found:
    """Adaptive Auto Attack: rounds of diversified starts and margin ascents on the survivors.

    Thirteen rounds of growing length, the last ones with restarts. From round 3 on only the
    survivors of largest margin so far are attacked, but at least 100. Starts weight the label's
    output up or down, as most starts that succeeded in round 1 did, and push one other class up,
    of a rank that changes from start to start.

    Args:
      model: a pytree callable, ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]``
      y: ``[n]``
      eps: the radius, a number or ``[n]``.
      key: a typed ``jax.random.key``.
      ball: norm and box.
      passes: the attack ends once the backward passes reach this mean over the samples.
      finisher: an attack that replaces the margin ascents; it begins at the same starts.
      only: ``[n]`` booleans, the samples to attack.
      checkpoint: a folder; a call that was interrupted resumes from it, with equal results.
      report: called with a name and what has been found so far, after every search; a true value
        ends the attack.
      **options: of :func:`wdjax.search`, but no ``criterion``, which starts and losses would not
        follow. With ``only`` no second look is taken.

    Returns:
      A :class:`~wdjax.core.Found`: the best point of every sample.

    Raises:
      ValueError: a ``criterion``, what the search refuses, and a call inside a trace, since the
        host chooses the rounds.

    Cost: at most ``passes`` backward passes a sample on average, plus one more search.

    Differs: the length of an ascent is the one that the authors' rule almost always gives, steps
      and probes together, and ``passes`` is a limit. The mode for masked gradients and the random
      corners of round 1 are left out. Of the statistics of round 1 only the sign of the label's
      weight is used; the class of the chosen rank is always pushed up. Each sample draws its own
      random numbers. For norms 1 and 2 a start outside the ball counts once it is projected.

    Source: Liu et al. [liu2022]; constants of the authors' code.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.65, 0.35]]), jnp.array([0, 0])
    >>> a3(model, x, y, eps=0.2, key=jax.random.key(0)).success.tolist()
    [True, True]
    """
    arguments.check(model=model, x=x, y=y, eps=eps, key=key, ball=ball)
    validate.refuse_criterion("a3", options)
    host_only("a3", SEARCH_TWIN, model, x, y, eps, key, only)
    passes = float(validate.check_number("passes", passes))
    folder, number, down, found = Path(checkpoint or "."), 0, True, None
    for turn in range(len(ROUNDS)):
        for _ in range(ROUNDS[turn].restarts):
            chosen = _chosen(found, only, ROUNDS[turn].share)
            if found is not None and (not chosen.any() or _spent(found) >= passes):
                break
            attack, draw = _attack(ball, turn, number, down), jax.random.fold_in(key, number)
            result = _ask(
                attack, finisher, model, x, y, eps=eps, key=draw, only=chosen,
                checkpoint=None if checkpoint is None else folder / f"{number:03d}.safetensors",
                diagnose=False, **options,
            )  # fmt: skip
            if turn == _FIRST:
                down = _leans_down(attack, result, draw, options.get("index"))
            found, number = result if found is None else driver.best_of(found, result), number + 1
            if report is not None and report(f"round {turn}", found):
                return found
    assert found is not None
    return found


@with_second_look
def a3_wda(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    eps: Any,
    key: Array,
    ball: Lp = Lp(),
    rivals: int | None = None,
    **options: Any,
) -> Found:
    """A3-WDA: :func:`a3` whose ascents are those of the Wasserstein distributional attack.

    The paper says in one line that WDA replaces PGD. Here rounds, starts and the choice of samples
    are A3's; every ascent is WDA with the paper's settings (20 steps, 10 of them probing) from the
    start of the round, and its best iterate counts.

    Args:
      model, x, y, eps, key, ball: as in :func:`a3`.
      rivals: maximum number of classes that WDA tries; by default WDA's own choice.
      **options: of :func:`a3`.

    Returns:
      A :class:`~wdjax.core.Found`.

    Raises:
      ValueError: as :func:`a3`.

    Cost: as :func:`a3`; one search takes up to ``10 + 10 rivals`` backward passes and the probes.

    Source: Le et al. [le2025], Section 5.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.65, 0.35]]), jnp.array([0, 0])
    >>> a3_wda(model, x, y, eps=0.2, key=jax.random.key(0)).success.tolist()
    [True, True]
    """
    arguments.check(model=model, x=x, y=y, eps=eps, key=key, ball=ball)
    finisher = WDA(ball, rivals=rivals, iterate="best")
    return a3(
        model, x, y, eps=eps, key=key, ball=ball, finisher=finisher, diagnose=False, **options
    )


def _ask(
    attack: Diversified,
    finisher: Attack | None,
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    only: Any,
    checkpoint: Path | None,
    **options: Any,
) -> Found:
    """One search of the samples ``only`` ``[n]``, by the attack or by the finisher.

    A finisher begins at the points of a search for starts, if the round has probes; each of the two
    searches has its own checkpoint.
    """
    if finisher is None:
        return driver.search(attack, model, x, y, only=only, checkpoint=checkpoint, **options)
    if not attack.probes:
        return driver.search(finisher, model, x, y, only=only, checkpoint=checkpoint, **options)
    first, second = (
        None if checkpoint is None else checkpoint.with_stem(f"{checkpoint.stem}-{part}")
        for part in ("start", "ascent")
    )
    attack = replace(attack, steps=0, until=None)
    begun = driver.search(attack, model, x, y, only=only, checkpoint=first, **options)
    left = survivors(begun, only)
    ended = driver.search(
        finisher, model, x, y, start=begun.x_adv, only=left, checkpoint=second, **options
    )
    return driver.best_of(begun, ended)


def _attack(ball: Lp, turn: int, number: int, down: bool) -> Diversified:
    """The attack of the round with index ``turn`` in :data:`ROUNDS`.

    ``number`` is how many searches came before; it varies the class that the start is pushed to.
    With ``down`` the starts of the middle rounds mostly lower the label's logit, else they mostly
    raise it. All rounds but the first have ``_LONGEST`` steps and the same static settings, so that
    they share one compiled program.
    """
    if not ROUNDS[turn].probes:
        return Diversified(ball, probes=0, steps=ROUNDS[turn].steps)
    attack = Diversified(
        ball, probes=ROUNDS[turn].probes, steps=_LONGEST, until=float(ROUNDS[turn].steps)
    )
    if turn <= _FIRST:
        return attack
    if turn >= _FINAL:
        return replace(attack, down=0.8, up=0.1, push=0.8, rank=1.0 + number % 4)
    low, high = (0.5, 0.1) if down else (0.1, 0.5)
    return replace(attack, down=low, up=high, push=0.8, rank=1.0 + number % 9)


def _leans_down(attack: Diversified, result: Found, key: Array, index: Any) -> bool:
    """Whether the label weights of the starts that succeeded in round 1 were mostly negative.

    True if their mean is at most 0, or no start succeeded. ``index`` are the samples' numbers in a
    larger data set, which determine their keys; None means 0, 1, ... The label weights are drawn
    again from ``key``.
    """
    fallen = np.flatnonzero(np.asarray(result.success & result.correct))
    chosen = fallen if index is None else np.asarray(index)[fallen]
    if not len(chosen):
        return True
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(chosen)
    return float(jnp.mean(attack.lean(keys))) <= 0


def _chosen(found: Found | None, only: Any, share: float) -> Any:
    """``[n]`` booleans: the samples that a round attacks.

    They are the ``share`` of the survivors whose criterion is largest, so nearest to a flip, but at
    least ``_LEAST``, or all if fewer survive. ``only`` ``[n]``, if given, restricts the survivors;
    before the first search (``found`` is None) it is the answer itself.
    """
    if found is None:
        return only
    left = survivors(found, only)
    count = max(_LEAST, math.ceil(share * left.sum()))
    order = np.argsort(np.where(left, -np.asarray(found.margin), np.inf), kind="stable")
    chosen = np.zeros_like(left)
    chosen[order[:count]] = True
    return chosen & left


def _spent(found: Found) -> float:
    """The mean number of backward passes of a sample."""
    return float(jnp.mean(found.gradients))
