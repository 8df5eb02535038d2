"""What a search may have missed, and a second look at the samples that it left standing.

Where gradients are zero an attack learns nothing, and where a margin never rises its loss tells it
nothing: the model looks robust because the attack is blind. Some 60 passes that need neither the
attack's loss nor, in part, gradients show how much a better attack would find.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from wdjax.attacks import MarginPGD, Square
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Attack, Found

_SHARE = 0.5
"""Of gradients that are zero, or of standing samples whose margin never rose, that make blind."""
_MOST = 100
"""Samples that are looked at again at most."""
_QUERIES = 30
"""Of the random search, after twice eight steps of margin ascent."""


P = ParamSpec("P")
T = TypeVar("T")


class RobustnessWarning(UserWarning):
    """A measured accuracy may overstate the robustness of the model."""


def diagnose(
    found: Found, attack: Attack, clean: np.ndarray, eps: Any, again: Callable[..., Found]
) -> Found:
    """Warns of what makes a result doubtful, after a second look where the attack was blind.

    Args:
      found: what the attack found.
      attack: of which a warning speaks.
      clean: ``[n]``, the criterion at the samples.
      eps: the radius of the search, or None.
      again: ``(attack, eps=, only=, key=) -> Found``, another search of the same samples.

    Returns:
      ``found``, with ``overlooked`` where there was a second look.
    """
    if isinstance(attack.ball, Lp) and _is_blind(found, attack, clean):
        farthest = attack.ball.diameter(found.x_adv.shape[1:])
        radius = np.asarray(farthest if attack.budget == "none" else eps)
        if np.all(np.isfinite(radius)) and np.any(radius > 0):
            found = replace(found, overlooked=_overlooked(found, attack.ball, radius, again))
    warn(type(attack).__name__, found)
    return found


def diagnosed(ensemble: Callable[P, T]) -> Callable[P, T]:
    """Gives an ensemble the option ``diagnose``: one warning of what all its searches found.

    The searches themselves are to be made without.
    """

    @functools.wraps(ensemble)
    def told(*given: P.args, **options: P.kwargs) -> T:
        wanted = options.pop("diagnose", True)
        answer = ensemble(*given, **options)
        if wanted:
            found: Any = getattr(answer, "found", answer)
            if not validate.traced(found):
                warn(ensemble.__name__, found)
        return answer

    return told


def warn(name: str, found: Found) -> None:
    """One warning to the caller of the library with all remarks on a result, if there are any."""
    if said := found.remarks:
        warnings.warn(f"{name}: {'; '.join(said)}.", RobustnessWarning, stacklevel=_outside())


def _standing(found: Found) -> np.ndarray:
    return np.asarray(found.correct) & ~np.asarray(found.success)


def _is_blind(found: Found, attack: Attack, clean: np.ndarray) -> bool:
    """Whether gradients told nothing about most of the samples that stand."""
    gradients, zeros = np.asarray(found.gradients), np.asarray(found.zeros)
    left = _standing(found) & (gradients > 0)
    if not left.any():
        return False
    if zeros[left].sum() > _SHARE * gradients[left].sum():
        return True
    stuck = np.asarray(found.margin)[left] <= clean[left]
    return attack.budget != "none" and bool(stuck.mean() > _SHARE)


def _overlooked(found: Found, ball: Lp, radius: Any, again: Callable[..., Found]) -> np.ndarray:
    """``[n]``: samples that stand, and that margin ascent or random search breaks."""
    standing = np.flatnonzero(_standing(found))
    count = min(len(standing), _MOST)
    left = np.zeros(len(found.correct), bool)
    left[standing[np.linspace(0, len(standing) - 1, count).astype(int)]] = True
    broken = np.zeros_like(left)
    looks = MarginPGD(ball), MarginPGD(ball, far=True), Square(ball, queries=_QUERIES)
    for number, look in enumerate(looks):
        if left.any():
            seen = again(look, eps=radius, only=left, key=jax.random.key(number))
            broken |= np.asarray(seen.success) & left
            left &= ~broken
    return broken


def _outside() -> int:
    """The ``stacklevel`` of the first frame that is not the library's."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "wdjax":
        frame, level = frame.f_back, level + 1
    return level
