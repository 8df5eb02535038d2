"""Warnings about a search's result, and a second look at the samples that it did not break.

Where gradients are zero, or where the loss rises but the margin never does, an attack cannot
succeed and the model looks robust only because the attack is blind. Some 60 passes of other
attacks, which use the margin itself or no gradients at all, show how much a better attack would
find. The same is asked with 300 queries where an attack's points are hardly better than random
noise: its steps are too few or too short, or its gradients mislead. And where the radius is half of
the box or more, since there nearly every sample has a flip; and for a criterion of the user's own,
which the second look follows, while the loss of many an attack does not; for cross-entropy in norm
1 or of small logits, whose gradient hardly points to the nearest class; and for a model whose
program rounds what it computes from its samples, of which gradients say nothing.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import losses, transport
from wdjax.attacks import FMN, PGD, MarginPGD, Points, SigmaZero, Square, ascent
from wdjax.balls import Lp
from wdjax.checks import rounding, validate
from wdjax.core import AnyArray, Attack, Found, PyTree
from wdjax.precision import full_precision

_SHARE = 0.5
"""An attack is blind if more than this share of its gradients is zero, or if the margin never rose
for more than this share of the samples that survived."""
_MOST = 100
"""The maximum number of samples in a second look."""
_ROUNDED = 0.03
"""The least share of the margins that is said if it is lost in the rounding of the logits."""
_SATURATED = 1e-5
"""How near to 1 the largest probability is where softmax hides its gradients."""
_MANY = 50
"""The least number of samples of which the clean accuracy is judged."""
_FEW, _SHIFTED = 5, 0.7
"""The least number of samples, and the share of them that is classified as the class beside the
label, by which labels are told not to be counted from 0."""
_QUERIES = 30, 300
"""Queries of the random search in a second look, after two margin ascents of eight steps each; and
where the attack was hardly better than noise."""
_FLAT = 0.3
"""The median margin in logits below which cross-entropy hardly tells the nearest class from others:
its gradient flees from the label, towards all of them."""
_NOISE = 2
"""An attack is hardly better than noise if it raises the median margin of the survivors by less
than so many times what noise of the same size does."""
_FAR = 0.5
"""The share of the largest distance in the box from which on a survivor is doubted."""

P = ParamSpec("P")
T = TypeVar("T")
Search = Callable[..., Found]
Criterion = Callable[[PyTree, Any], Any]


class RobustnessWarning(UserWarning):
    """A measured accuracy may overstate the robustness of the model."""


def diagnose(
    found: Found,
    attack: Attack,
    clean: np.ndarray,
    x: AnyArray,
    eps: Any,
    again: Search,
    name: str = "",
    criterion: Criterion = losses.decision_margin,
    model: Callable[[Any], PyTree] | None = None,
    started: bool = False,
) -> Found:
    """Warns of what makes a result doubtful; if the attack was blind, takes a second look first.

    Args:
      found: what the attack found.
      attack: the attack that found it, or the last of several.
      clean: ``[n]``, the criterion at the samples.
      x: ``[n, *shape]``
      eps: the radius of the search, or None.
      again: ``(attack, eps=, only=, key=, start=) -> Found``, another search of the same samples.
      name: for the warning; by default the attack's class.
      criterion: what the search asked for.
      model: what was attacked, if it is to be seen whether it rounds.
      started: whether the search began at given points.

    Returns:
      ``found``, with ``overlooked`` set if the attack was blind, or if another one breaks more and
      this one was hardly better than noise, had half of the box to search or a user's criterion, or
      the model rounds.
    """
    said = _missed(found, attack)
    if model is not None:
        said += _too_long(found, model, x)
    if started or criterion is not losses.decision_margin:
        said += _passed(found, attack, x, again)
    if isinstance(attack.ball, Lp) and _standing(found).any():
        farthest = attack.ball.diameter(found.x_adv.shape[1:])
        radius = np.asarray(farthest if attack.budget == "none" else eps)
        if np.all(np.isfinite(radius)) and np.any(radius > 0):
            own = None if criterion is losses.decision_margin else criterion
            rounds = model is not None and rounding.found(model, x) is not None
            sure = own is None and not rounds
            found, doubts = _looked_at(found, attack, clean, x, radius, again, own, sure)
            said += doubts
    warn(name or type(attack).__name__, found, *said)
    return found


def _looked_at(
    found: Found,
    attack: Attack,
    clean: np.ndarray,
    x: AnyArray,
    radius: Any,
    again: Search,
    own: Criterion | None,
    sure: bool,
) -> tuple[Found, list[str]]:
    """The result after a second look, if the attack deserves one, and what else is to be said.

    Arguments are those of :func:`diagnose`; ``radius`` is how far the search could go, ``own`` the
    criterion if it is the user's. If not ``sure``, the attack deserves one whatever it found.
    """
    ball, mine, noise, failed = attack.ball, 0.0, 0.0, list[str]()
    assert isinstance(ball, Lp)
    if attack.budget == "sample" and ball.norm != 0:
        mine, noise = _gains(found, ball, clean, np.asarray(x), radius, again)
    far = radius >= _FAR * ball.diameter(found.x_adv.shape[1:])
    blind, doubted = _is_blind(found, attack, clean), mine < _NOISE * noise
    doubted |= not sure or (attack.budget == "sample" and bool(np.all(far)))
    if blind or doubted or _flees(found, attack, ball, clean):
        broken, failed = _overlooked(found, ball, radius, _QUERIES[doubted], again, own)
        found = replace(found, overlooked=broken) if blind or broken.any() else found
    if mine >= noise:
        return found, failed
    return found, [
        *failed,
        "its points are no nearer to a mistake than random noise of the same size: "
        "take more or longer steps, and look whether gradients are those of the model",
    ]


def _gains(
    found: Found, ball: Lp, clean: np.ndarray, x: np.ndarray, radius: Any, again: Search
) -> tuple[float, float]:
    """By how much the median margin of up to 100 survivors rises by the attack, and by noise.

    ``clean`` is ``[n]``, ``x`` is ``[n, *shape]``, ``radius`` a number or ``[n]``. The noise is as
    long as ``radius`` allows: random signs, a direction, or one coordinate.
    """
    left, random = _chosen(found), np.random.default_rng(0)
    noise = random.normal(size=x.shape).astype(x.dtype).reshape(len(x), -1)
    if ball.norm == np.inf:
        noise = np.sign(noise)
    elif ball.norm == 1:
        noise *= np.abs(noise) == np.abs(noise).max(axis=1, keepdims=True)
    noise /= np.linalg.norm(noise, ball.norm, axis=1, keepdims=True)
    size = np.broadcast_to(radius, len(x)).astype(x.dtype) * (1 - 1e-5)
    points = x + (size[:, None] * noise).reshape(x.shape)
    points = points if ball.box is None else np.clip(points, *ball.box)
    noisy = again(Points(ball), eps=radius, only=left, start=points)
    rises = (np.asarray(one.margin)[left] - clean[left] for one in (found, noisy))
    mine, other = (float(np.median(rise)) for rise in rises)
    return mine, other


def _missed(found: Found, attack: Attack) -> list[str]:
    """What to say of a minimum-norm search that left samples without a flip."""
    if attack.budget != "none":
        return []
    return [
        f"{text}; unless there is none in the box, more steps, another attack or "
        "ensembles.wda_star may find one"
        for text in _unflipped(found)
    ]


def _too_long(found: Found, model: Callable[[Any], PyTree], x: AnyArray) -> list[str]:
    """What to say of distances that were found by gradients in a model that rounds."""
    free = found.radius is not None and np.all(np.isinf(np.asarray(found.radius)))
    followed = bool(np.asarray(found.gradients).any())
    rounds = rounding.found(model, x) if free and followed else None
    if rounds is None:
        return []
    return [
        f"the model rounds what it computes from its inputs ({rounds}), which gradients do not "
        "see: distances may be too long; Square within an eps takes no gradients"
    ]


def _passed(found: Found, attack: Attack, x: AnyArray, again: Search) -> list[str]:
    """What to say of nearest flips that are flips half of the way already.

    Many an attack ends at its first flip, which is far from the sample where its start is, or where
    its steps do not follow the criterion. Up to 100 flips are tried.
    """
    if attack.budget != "none" or not isinstance(attack.ball, Lp) or attack.ball.norm == 0:
        return []
    flips = np.flatnonzero(found.correct & found.success)
    if not len(flips):
        return []
    tried = np.zeros(len(found.cost), bool)
    tried[flips[np.linspace(0, len(flips) - 1, min(len(flips), _MOST)).astype(int)]] = True
    half = jnp.asarray(x) + (found.x_adv - jnp.asarray(x)) / 2
    near = again(Points(attack.ball), eps=found.cost, only=tried, start=half)
    nearer = int(np.sum(tried & np.asarray(near.success)))
    if not nearer:
        return []
    return [
        f"{nearer} of {tried.sum()} flips are flips half of the way already, so that their "
        "distances are at least twice too long: Walk may find nearer ones, mostly without start"
    ]


def _unflipped(found: Found) -> list[str]:
    """What to say of samples without a flip, if their searches had the whole box."""
    farthest = np.inf if found.limit is None else np.asarray(found.limit)
    left = _standing(found)
    if found.radius is None or not left.any():
        return []
    if np.any((np.asarray(found.radius) < farthest)[left]):
        return []
    return [f"no flip was found for {left.sum()} of {len(left)} samples, whose distance is inf"]


def diagnosed(ensemble: Callable[P, T]) -> Callable[P, T]:
    """Gives an ensemble the option ``diagnose``: a single warning about everything it found.

    The ensemble must call its own searches with ``diagnose=False``. It runs in full precision.
    """

    @functools.wraps(ensemble)
    def told(*given: P.args, **options: P.kwargs) -> T:
        wanted = options.pop("diagnose", True)
        answer = ensemble(*given, **options)
        if wanted:
            found: Any = getattr(answer, "found", answer)
            if not validate.traced(found):
                asked = inspect.signature(ensemble).bind(*given, **options).arguments
                more = [*_unflipped(found), *_too_long(found, asked["model"], asked["x"])]
                warn(ensemble.__name__, found, *more)
        return answer

    return full_precision(told)


def warn(name: str, found: Found, *more: str) -> None:
    """Issues one warning with all remarks on a result, and more, if any, at the user's call."""
    say(name, [*found.remarks, *more])


def say(name: str, remarks: Sequence[str]) -> None:
    """Issues one warning with some remarks, if there are any, at the user's call."""
    if remarks:
        warnings.warn(f"{name}: {'; '.join(remarks)}.", RobustnessWarning, stacklevel=_outside())


def warn_of_logits(out: PyTree, y: np.ndarray, clean: np.ndarray) -> None:
    """Warns of logits with which an attack, or the whole question, goes wrong.

    * Probabilities that are 1 in floats have no gradients that lead to a mistake.
    * A flip counts once it exceeds the rounding of logits, which grows with their size. Where that
      is not small beside the margins, as in logits that share a large number, distances are too
      long.
    * A clean accuracy of chance means other labels, another scale or another layout of the images.
      If most predictions are the class beside the label, labels are counted from another number.

    Args:
      out: the model's outputs at the samples; other ones than logits ``[n, K]`` are not looked at.
      y: ``[n]``, the labels.
      clean: ``[n]``, the criterion there.
    """
    leaves, right = jax.tree.leaves(out), clean < 0
    if len(leaves) != 1 or leaves[0].ndim != 2:
        return
    if not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        return
    said, logits = list[str](), np.asarray(leaves[0], np.float64)
    n, classes = logits.shape
    probable = np.all((logits >= 0) & (logits <= 1 + 1e-3))
    if probable and np.median(np.max(logits, axis=1)) > 1 - _SATURATED:
        said.append(
            "the model returns probabilities, most of which are 1 in floats, where gradients "
            "say nothing: let it return the logits before its softmax or sigmoid"
        )
    if right.any():
        # Of the two that a margin compares: a class that never wins adds no rounding to it.
        size = np.max(np.abs(np.sort(logits[right], axis=1)[:, -2:]), axis=1)
        share = float(np.median(2 * ascent.rounding(leaves[0].dtype) * size / -clean[right]))
        if share > _ROUNDED:
            said.append(
                f"logits of size {np.median(size):.1g} are rounded by {share:.0%} of the margins, "
                "and a flip must exceed that: distances are too long. Subtract what all logits "
                "share"
            )
    beside = np.where(right, 0, np.argmax(logits, axis=1) - y)
    if n >= _FEW and classes > 2 and max(np.mean(beside == 1), np.mean(beside == -1)) > _SHIFTED:
        said.append(
            f"{right.mean():.0%} of {n} samples are classified correctly, and most as the class "
            "beside their label: classes are counted from 0"
        )
    elif n >= _MANY and classes > 1 and right.mean() <= 1 / classes:
        said.append(
            f"{right.mean():.0%} of {n} samples are classified correctly, no more than by chance: "
            "look at the labels, and at the scale and layout of the images"
        )
    for text in said:
        warnings.warn(f"{text}.", RobustnessWarning, stacklevel=_outside())


def _standing(found: Found) -> np.ndarray:
    """``[n]``: the samples that are classified correctly and have no flip."""
    return np.asarray(found.correct) & ~np.asarray(found.success)


def _is_blind(found: Found, attack: Attack, clean: np.ndarray) -> bool:
    """Whether most gradients of the survivors were zero, or most of their margins never rose.

    Samples of radius 0, which cannot move, do not count. ``clean`` ``[n]`` is the criterion at the
    samples.
    """
    gradients, zeros = np.asarray(found.gradients), np.asarray(found.zeros)
    left = _standing(found) & (gradients > 0)
    if found.radius is not None:
        left &= np.asarray(found.radius) > 0
    if not left.any():
        return False
    if zeros[left].sum() > _SHARE * gradients[left].sum():
        return True
    stuck = np.asarray(found.margin)[left] <= clean[left]
    return attack.budget != "none" and bool(stuck.mean() > _SHARE)


def _flees(found: Found, attack: Attack, ball: Lp, clean: np.ndarray) -> bool:
    """Whether the attack flees from the label instead of to the nearest class.

    It does if it raises cross-entropy, of logits of which most margins are small, or in norm 1,
    where its few coordinates are the label's. ``clean`` ``[n]`` is the criterion at the samples.
    """
    loss = getattr(attack, "loss", losses.margin) or losses.cross_entropy  # None is APGD's.
    if loss is not losses.cross_entropy or getattr(attack, "targets", None):
        return False
    return ball.norm == 1 or float(np.median(-clean[_standing(found)])) < _FLAT


def _chosen(found: Found) -> np.ndarray:
    """``[n]`` booleans: up to 100 of the samples that have no flip, evenly spread."""
    standing = np.flatnonzero(_standing(found))
    count = min(len(standing), _MOST)
    left = np.zeros(len(found.correct), bool)
    left[standing[np.linspace(0, len(standing) - 1, count).astype(int)]] = True
    return left


def _overlooked(
    found: Found, ball: Lp, radius: Any, queries: int, again: Search, own: Criterion | None
) -> tuple[np.ndarray, list[str]]:
    """``[n]``: up to 100 survivors that margin ascent or random search breaks after all.

    ``again(attack, eps=, only=, key=)`` searches as before with another attack. What was attacked
    by queries alone may have no derivative, as a host callback: which looks failed, and by what
    error, is told besides. An ``own`` criterion may have kinks, where margin ascent swings between
    classes; the short steps of FMN do not.
    """
    left, by_gradients = _chosen(found), bool(np.any(np.asarray(found.gradients)))
    broken, failed = np.zeros_like(left), dict[str, None]()
    looks: list[Attack]
    loss = losses.margin if own is None else own
    looks = [MarginPGD(ball), MarginPGD(ball, far=True), Square(ball, queries=queries, loss=loss)]
    if own is not None:
        looks.append(FMN(ball, steps=50))
    if ball.norm == 0:
        signs = PGD(ball, steps=queries, loss=loss, random_start=True)
        looks = [signs, SigmaZero(ball, steps=queries)]
    for number, look in enumerate(looks):
        if left.any():
            reach = radius if look.budget == "sample" else None
            try:
                seen = again(look, eps=reach, only=left, key=jax.random.key(number))
            except (ValueError, NotImplementedError) as error:
                if own is None and (by_gradients or isinstance(look, Square)):
                    raise
                failed[f"a second look by {type(look).__name__} failed: {error}"] = None
                continue
            near = np.asarray(seen.cost) <= radius * (1 + transport.BEYOND)
            broken |= np.asarray(seen.success) & near & left
            left &= ~broken
    return broken, list(failed)


def _outside() -> int:
    """The ``stacklevel`` of the first frame outside this library."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "wdjax":
        frame, level = frame.f_back, level + 1
    return level
