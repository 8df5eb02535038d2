"""Results of a game: accuracies over private keys, on attacked and on clean inputs."""

import dataclasses
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import distinct, metrics, remarks
from wdjax.checks import arguments, independence, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, Model
from wdjax.precision import full_precision
from wdjax.transductive.defense import Defense
from wdjax.transductive.state import GameRecord

REJECTIONS = 0.05
"""The default share of clean inputs that a rejecting defence may reject."""


class Share(NamedTuple):
    """A share of the samples and its 95 % interval."""

    value: float
    low: float
    high: float


def share_with_interval(hits: npt.ArrayLike) -> Share:
    r"""The mean of ``[draws, n]`` booleans, with an interval for randomness of samples and keys.

    For the samples: Clopper-Pearson for a single draw, else :func:`wdjax.metrics.mean_interval` of
    each sample's share of draws. For the keys: Student's t over the draws' accuracies. The two add
    in squares. The interval thus holds for all samples under *these* keys without assumptions, and
    for all keys if accuracies are about normal. It cannot include keys rarer than one in ``draws``
    under which a defence fails; with a single draw it does not include the keys at all.

    Args:
      hits: ``[draws, n]`` booleans.

    Source: Clopper and Pearson [clopper1934]; Waudby-Smith and Ramdas [waudbysmith2024].

    >>> share_with_interval([[True, True, False, True]]).value
    0.75
    """
    from scipy import stats

    facts = np.asarray(hits, float)
    draws, n = facts.shape
    mean, keys = float(facts.mean()), 0.0
    if draws == 1:
        low, high = metrics.clopper_pearson(int(facts.sum()), n)
    else:
        low, high = metrics.mean_interval(facts.mean(axis=0))
        deviation = float(facts.mean(axis=1).std(ddof=1))
        keys = float(stats.t.ppf(0.975, draws - 1)) * deviation / draws**0.5
    below, above = np.hypot(mean - low, keys), np.hypot(high - mean, keys)
    return Share(mean, max(0.0, mean - float(below)), min(1.0, mean + float(above)))


class Rejection(NamedTuple):
    """Rates of a rejecting defence at one threshold, over all draws and samples."""

    threshold: float
    err: float
    """Share of the attacked inputs that are accepted and wrong: the paper's equation 1."""
    err_accepted: float
    """Share of the accepted attacked inputs that are wrong (authors' code); NaN without any."""
    rejected: float
    """Share of the clean inputs that are rejected."""
    rejected_attacked: float
    """Share of the attacked inputs that are rejected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GameReport:
    """The result of a game: ``[n]`` leaves in the order in which the inputs were submitted."""

    index: np.ndarray
    """``[n]``: indices of the samples."""
    y: np.ndarray
    x_adv: np.ndarray
    """``[n, *shape]``: the submitted points, inside ball and box."""
    cost: np.ndarray
    """``[n]``: measured costs of moving the samples there."""
    correct: np.ndarray
    """``[draws, n]``: whether the defender classifies the submitted points correctly; the state
    of the first draw is carried to the next round."""
    correct_clean: np.ndarray
    """``[draws, n]``: the same in a game with clean inputs and the same keys."""
    static: np.ndarray
    """``[n]``: whether the model before adaptation classifies the submitted points correctly."""
    static_clean: np.ndarray
    fault: np.ndarray
    """``[n]``: whether an output or a gradient was not finite. Such an output is never counted as
    correct; a point that was submitted since no gradient led farther may be."""
    simulated: np.ndarray
    """``[rounds, iterations]``: the error rate of the attacker's simulations."""
    raised: np.ndarray
    """``[rounds, iterations]``: the mean objective of the attack on its bank."""
    chosen: np.ndarray
    """``[rounds]``: the iteration whose set was submitted; -1 if the clean set was."""
    gradients: np.ndarray
    """``[rounds]``: backward passes through the bank, for each sample."""
    zeros: np.ndarray
    """``[rounds]``: how many of these were zero in every coordinate."""
    score: np.ndarray | None = None
    """``[draws, n]``: scores of a rejecting defence, large where it would reject."""
    score_clean: np.ndarray | None = None
    """``[draws, n]``: scores of the clean inputs, in the same batch if they were in company."""

    @property
    def one_shot(self) -> Share:
        """The accuracy under one private key: the mean over the draws."""
        return share_with_interval(self.correct)

    @property
    def one_shot_clean(self) -> Share:
        return share_with_interval(self.correct_clean)

    @property
    def worst_of(self) -> Share:
        """Share of samples correct in every draw; more draws lower it, on clean inputs too."""
        return share_with_interval(np.all(self.correct, axis=0, keepdims=True))

    @property
    def worst_of_clean(self) -> Share:
        return share_with_interval(np.all(self.correct_clean, axis=0, keepdims=True))

    @property
    def majority(self) -> Share:
        """Share of samples that are correct in more than half of the draws."""
        return share_with_interval(_most(self.correct)[None])

    @property
    def majority_clean(self) -> Share:
        return share_with_interval(_most(self.correct_clean)[None])

    @property
    def static_accuracy(self) -> Share:
        """The accuracy of the model before adaptation, on the submitted points."""
        return share_with_interval(self.static[None])

    @property
    def static_clean_accuracy(self) -> Share:
        return share_with_interval(self.static_clean[None])

    @property
    def remarks(self) -> list[str]:
        """What a reader must know before believing the accuracies."""
        return remarks_on(self.fault, self.zeros.sum(), self.gradients.sum())

    def rejection(self, threshold: float) -> Rejection:
        """The rates of a rejecting defence at a threshold of its score.

        A score that is NaN accepts an attacked input and rejects a clean one.

        Raises:
          ValueError: the defence does not reject.
        """
        score, clean = self._scores()
        accepted = ~(score > threshold)
        wrong = ~self.correct & accepted
        kept = int(accepted.sum())
        return Rejection(
            float(threshold),
            float(wrong.mean()),
            float(wrong.sum() / kept) if kept else math.nan,
            float((~(clean <= threshold)).mean()),
            float((~accepted).mean()),
        )

    def operating_point(self, budget: float = REJECTIONS) -> Rejection:
        """The rates at the least threshold that rejects at most ``budget`` of the clean inputs.

        Raises:
          ValueError: the defence does not reject; a budget outside ``[0, 1]``.
        """
        if not 0 <= budget <= 1:
            raise ValueError(f"budget must lie in [0, 1], got {budget!r}.")
        _, clean = self._scores()
        return self.rejection(threshold_for(clean.ravel(), budget))

    def rejection_curve(self) -> list[Rejection]:
        """All operating points, from rejecting every clean input to rejecting none."""
        _, clean = self._scores()
        ends = np.unique(np.concatenate([[-np.inf], clean.ravel()]))
        return [self.rejection(float(threshold)) for threshold in ends]

    def _scores(self) -> tuple[np.ndarray, np.ndarray]:
        if self.score is None or self.score_clean is None:
            raise ValueError("this defence does not reject, so there is no threshold to choose.")
        return self.score, self.score_clean


def remarks_on(fault: npt.ArrayLike, zeros: float, gradients: float) -> list[str]:
    """Remarks on inputs ``[n]`` that met a fault, and on the share of gradients that were zero."""
    faults, share = np.flatnonzero(fault), float(zeros) / max(float(gradients), 1.0)
    first = int(faults[0]) if len(faults) else None
    return remarks.of({"faults": len(faults), "first_fault": first, "zero_gradients": share})


def reported(record: GameRecord, index: np.ndarray, y: np.ndarray, rejects: bool) -> GameReport:
    """The report of a whole record: its rounds, one after the other, ``index`` and ``y`` ``[n]``.

    Scores are left out unless the defence rejects.
    """
    flat: dict[str, Any] = {}
    for name, leaf in record._asdict().items():
        leaf = np.asarray(leaf)
        if name in ("correct", "correct_clean", "score", "score_clean"):  # [rounds, draws, size]
            flat[name] = np.moveaxis(leaf, 1, 0).reshape(leaf.shape[1], -1)
        elif name in ("x_adv", "cost", "static", "static_clean", "fault"):  # [rounds, size, ...]
            flat[name] = leaf.reshape(-1, *leaf.shape[2:])
        else:
            flat[name] = leaf
    if not rejects:
        flat["score"] = flat["score_clean"] = None
    return GameReport(index=index, y=y, **flat)


def threshold_for(clean: np.ndarray, budget: float) -> float:
    """The least score above which at most the share ``budget`` of the clean scores lies.

    >>> threshold_for(np.arange(10.0), 0.2)
    7.0
    """
    ordered = np.sort(clean)
    allowed = int(np.floor(budget * len(ordered) + 1e-9))
    return float(ordered[len(ordered) - 1 - allowed]) if allowed < len(ordered) else -np.inf


def _most(facts: np.ndarray) -> np.ndarray:
    return 2 * facts.sum(axis=0) > len(facts)


def worst(reports: dict[str, GameReport]) -> tuple[str, GameReport]:
    """The attack that leaves the lowest one-shot accuracy, by name.

    For a defence that rejects, the attack with the largest error at its operating point. Points of
    several attacks are not combined: the defence adapts to a set as a whole, and has not adapted to
    the combined one.

    Args:
      reports: of one defence, by the attack's name.

    Raises:
      ValueError: no report.

    Source: this library's own.
    """
    if not reports:
        raise ValueError("there is no report to choose from.")

    def left(name: str) -> float:
        found = reports[name]
        return found.one_shot.value if found.score is None else -found.operating_point().err

    name = min(reports, key=left)
    return name, reports[name]


@full_precision
def cost_multiple(
    defense: Defense, memory: Any, x: AnyArray, *, key: Array, repeats: int = 3
) -> float:
    """Time of adaptation and prediction, in multiples of the static model's prediction.

    The static model is the defence's ``model``, where it has one, else what it predicts by before
    any adaptation.

    Args:
      defense: the defence.
      memory: its memory.
      x: ``[n, *shape]``, one round.
      key: for the adaptation.
      repeats: timings of both, after one that compiles; the shortest counts.

    Raises:
      ValueError: bad samples or key, or ``repeats`` below 1.

    Source: Croce et al. [croce2022].
    """
    arguments.check(x=x, key=key)
    twins = "the methods adapt and predict of the defense, which can be traced"
    host_only("cost_multiple", twins, defense, memory, x, key)
    repeats = validate.check_count("repeats", repeats)
    state, inputs = defense.begin(memory), jnp.asarray(x)
    base, static = defense.base(memory, state, len(inputs)), getattr(defense, "model", None)
    whole = distinct.jit(_adapted_prediction)
    plain = distinct.jit(_prediction)
    most = _least(repeats, lambda: whole(defense, memory, state, inputs, key))
    if isinstance(static, Model):
        return most / _least(repeats, lambda: independence.outputs(static, inputs))
    return most / _least(repeats, lambda: plain(defense, memory, base, inputs))


def _adapted_prediction(defense: Defense, memory: Any, state: Any, x: Array, key: Array) -> Any:
    adapted, _ = defense.adapt(key, memory, state, x)
    return defense.predict(memory, adapted, x)


def _prediction(defense: Defense, memory: Any, adapted: Any, x: Array) -> Any:
    return defense.predict(memory, adapted, x)


def _least(repeats: int, work: Any) -> float:
    jax.block_until_ready(work())
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - began)
    return min(seconds)
