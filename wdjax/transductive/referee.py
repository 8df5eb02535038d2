"""What a game comes to: accuracies over several private keys, beside those on clean inputs."""

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import metrics
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array
from wdjax.transductive.defense import Defense

REJECTIONS = 0.05
"""The share of clean inputs that a rejecting defence may refuse, where nothing else is said."""


class Share(NamedTuple):
    """A share of the samples and its interval of 95 %."""

    value: float
    low: float
    high: float


def share(hits: npt.ArrayLike) -> Share:
    r"""The mean of ``[draws, n]`` facts, with the chance of samples and of keys in its interval.

    Of samples for any n: by Clopper and Pearson for a single draw, else by
    :func:`wdjax.metrics.mean_interval` of each sample's share of the draws. Of keys by Student's t
    over the draws' accuracies; both add in squares. So the interval holds for all samples under
    *these* keys whatever they are, and for all keys where accuracies vary about normally. It knows
    nothing of keys that are rarer than one in ``draws`` and under which a defence falls; of a
    single draw, nothing of keys at all.

    >>> share([[True, True, False, True]]).value
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
        spread = float(facts.mean(axis=1).std(ddof=1))
        keys = float(stats.t.ppf(0.975, draws - 1)) * spread / draws**0.5
    below, above = np.hypot(mean - low, keys), np.hypot(high - mean, keys)
    return Share(mean, max(0.0, mean - float(below)), min(1.0, mean + float(above)))


class Rejection(NamedTuple):
    """What a rejecting defence does at one threshold: shares of all draws and samples."""

    threshold: float
    err: float
    """Of all attacked inputs, accepted and wrong: the paper's equation 1."""
    err_accepted: float
    """The same of the accepted ones, as the authors' code has it; 0 if there are none."""
    rejected: float
    """Of the clean inputs."""
    rejected_attacked: float
    """Of the attacked ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GameReport:
    """A game that was played: ``[n]`` leaves in the order in which the inputs were submitted."""

    index: np.ndarray
    """``[n]``: which samples these are."""
    y: np.ndarray
    x_adv: np.ndarray
    """``[n, *shape]``: what was submitted, inside ball and box."""
    cost: np.ndarray
    """``[n]``: of moving the samples there, measured."""
    correct: np.ndarray
    """``[draws, n]``: whether the defender is right about what was submitted; the first draw is
    the one that the game goes on with."""
    correct_clean: np.ndarray
    """``[draws, n]``: the same of a game in which clean inputs are submitted, by the same keys."""
    static: np.ndarray
    """``[n]``: whether the model before any adaptation is right about what was submitted."""
    static_clean: np.ndarray
    fault: np.ndarray
    """``[n]``: whether an output or a gradient was not finite anywhere; never counted as right."""
    simulated: np.ndarray
    """``[rounds, iterations]``: the share of errors of the attacker's simulations."""
    raised: np.ndarray
    """``[rounds, iterations]``: the mean of the attack's objective on its bank."""
    chosen: np.ndarray
    """``[rounds]``: the iteration whose set was submitted; -1 for the clean set of a fallback."""
    gradients: np.ndarray
    """``[rounds]``: backward passes through the bank, a sample."""
    score: np.ndarray | None = None
    """``[draws, n]``: of a rejecting defence, large where it would refuse."""
    score_clean: np.ndarray | None = None
    """``[draws, n]``: the same of the clean inputs, beside the attacked ones where they were."""

    @property
    def one_shot(self) -> Share:
        """The accuracy under one private key: the mean over the draws."""
        return share(self.correct)

    @property
    def one_shot_clean(self) -> Share:
        return share(self.correct_clean)

    @property
    def worst_of(self) -> Share:
        """Samples that are right in every draw. It falls with the draws on clean inputs too."""
        return share(np.all(self.correct, axis=0, keepdims=True))

    @property
    def worst_of_clean(self) -> Share:
        return share(np.all(self.correct_clean, axis=0, keepdims=True))

    @property
    def majority(self) -> Share:
        """Samples that are right in more than half of the draws."""
        return share(_most(self.correct)[None])

    @property
    def majority_clean(self) -> Share:
        return share(_most(self.correct_clean)[None])

    @property
    def static_accuracy(self) -> Share:
        """Of the model before adaptation, on what was submitted."""
        return share(self.static[None])

    @property
    def static_clean_accuracy(self) -> Share:
        return share(self.static_clean[None])

    def rejection(self, threshold: float) -> Rejection:
        """What a rejecting defence does at a threshold of its score.

        Raises:
          ValueError: the defence does not reject.
        """
        score, clean = self._scores()
        accepted = score <= threshold
        wrong = ~self.correct & accepted
        kept = int(accepted.sum())
        return Rejection(
            float(threshold),
            float(wrong.mean()),
            float(wrong.sum() / kept) if kept else 0.0,
            float((clean > threshold).mean()),
            float((~accepted).mean()),
        )

    def operating_point(self, budget: float = REJECTIONS) -> Rejection:
        """The least threshold at which at most ``budget`` of the clean inputs are refused.

        Raises:
          ValueError: the defence does not reject; a budget outside ``[0, 1]``.
        """
        if not 0 <= budget <= 1:
            raise ValueError(f"budget must lie in [0, 1], got {budget!r}.")
        _, clean = self._scores()
        return self.rejection(threshold_for(clean.ravel(), budget))

    def rejection_curve(self) -> list[Rejection]:
        """All operating points, from refusing every clean input to none."""
        _, clean = self._scores()
        ends = np.unique(np.concatenate([[-np.inf], clean.ravel()]))
        return [self.rejection(float(threshold)) for threshold in ends]

    def _scores(self) -> tuple[np.ndarray, np.ndarray]:
        if self.score is None or self.score_clean is None:
            raise ValueError("this defence does not reject, so there is no threshold to choose.")
        return self.score, self.score_clean


def threshold_for(clean: np.ndarray, budget: float) -> float:
    """The least score above which at most a share ``budget`` of the clean scores lies.

    >>> threshold_for(np.arange(10.0), 0.2)
    7.0
    """
    ordered = np.sort(clean)
    allowed = int(np.floor(budget * len(ordered) + 1e-9))
    return float(ordered[len(ordered) - 1 - allowed]) if allowed < len(ordered) else -np.inf


def _most(facts: np.ndarray) -> np.ndarray:
    return 2 * facts.sum(axis=0) > len(facts)


def worst(reports: dict[str, GameReport]) -> tuple[str, GameReport]:
    """The attack whose sets leave the least one-shot accuracy: the union over attacks.

    Of a defence that rejects, the attack with the most errors at its operating point. Points of
    several sets are not mixed: a defence adapts to a set as a whole, so that the mixture would be
    one that nobody has played.

    Raises:
      ValueError: no report.
    """
    if not reports:
        raise ValueError("there is no report to choose from.")

    def left(name: str) -> float:
        found = reports[name]
        return found.one_shot.value if found.score is None else -found.operating_point().err

    name = min(reports, key=left)
    return name, reports[name]


def cost_multiple(
    defense: Defense, memory: Any, x: AnyArray, *, key: Array, repeats: int = 3
) -> float:
    """Seconds of adaptation and prediction, in seconds of the static model's prediction.

    Args:
      defense: whose.
      memory: what it knows.
      x: ``[n, *shape]``, one round.
      key: for the adaptation.
      repeats: of both, after a first one that compiles; the least counts.
    """
    arguments.check(x=x, key=key)
    repeats = validate.check_count("repeats", repeats)
    state, inputs = defense.begin(memory), jnp.asarray(x)
    base = defense.base(memory, state, len(inputs))
    whole = jax.jit(_adapted_prediction)
    plain = jax.jit(_prediction)
    most = _least(repeats, lambda: whole(defense, memory, state, inputs, key))
    least = _least(repeats, lambda: plain(defense, memory, base, inputs))
    return most / least


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
