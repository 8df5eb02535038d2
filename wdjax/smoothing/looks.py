"""The schedule of votes: first those that choose classes, then those of the (sequential) test."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from wdjax.certify import wdro
from wdjax.checks import arguments, validate
from wdjax.core import Progress
from wdjax.smoothing import binomial, votes
from wdjax.smoothing.grid import Noise

Numbers: TypeAlias = npt.NDArray[Any]
Test: TypeAlias = Literal["clopper-pearson", "randomized", "sequential"]

TESTS: tuple[Test, ...] = ("clopper-pearson", "randomized", "sequential")
ABSTAIN = -1
"""The prediction where the votes do not decide on a class."""

_FIRST, _GROWTH = 32, 1.15
"""Largest number of votes before the first look of a sequential test, and the ratio of looks."""
_UP = 2.0**-50
"""Rounding error of a level, by which it is raised."""


class SmoothedCertificate(NamedTuple):
    """What is certified for samples, arrays ``[n]``, each sample at level ``1 - alpha``."""

    prediction: Numbers
    """Classes of the smoothed classifier, or :data:`ABSTAIN`."""
    correct: Numbers
    """Whether the prediction is the label."""
    lower: Numbers
    """Lower bounds of the probability of the chosen class (the label if ``n0`` is 0)."""
    radius: Numbers
    """Radii within which the smoothed classifier returns the label; 0 where it is not predicted."""
    votes: Numbers
    """Number of votes (passes of the model), including those that chose the class."""
    faults: Numbers
    """Number of votes whose logits were not finite; they count for no class."""
    alpha: float

    @property
    def abstained(self) -> Numbers:
        """Where the votes do not decide on a class."""
        return np.asarray(self.prediction == ABSTAIN)

    @property
    def average_radius(self) -> float:
        """The average certified radius, over all samples.

        Source: Zhai et al. [zhai2020].
        """
        return float(np.mean(self.radius))

    def accuracy(self, eps: npt.ArrayLike, order: float, alpha: float | None = None) -> Numbers:
        r"""A lower bound, at ``1 - alpha``, of the smoothed accuracy over ``Omega_order(eps)``.

        Each radius is wrong with probability at most ``alpha``, independently of the others, so at
        level ``1 - alpha`` at most m are, the quantile of ``Bin(n, alpha)``. The bound is
        :func:`wdjax.certify.certified_accuracy` with the m largest radii set to 0, the worst case
        of m wrong radii.

        Args:
          eps: budget, a number or an array of them, in the units of the radii.
          order: p, a number at least 1, or inf.
          alpha: error probability of this bound; by default that of the radii.

        Returns:
          Accuracies in the shape of ``eps``, float64.
        """
        from scipy import stats

        level = binomial.check_level(self.alpha if alpha is None else alpha)
        wrong = int(stats.binom.ppf(1 - level, len(self.radius), self.alpha))
        if wrong >= len(self.radius):
            arguments.warn(
                f"no accuracy can be certified: of {len(self.radius)} radii, each wrong with "
                f"probability {self.alpha:g}, all may be at alpha={level:g}; certify more samples "
                "or take a smaller alpha."
            )
        radii = np.sort(self.radius)
        radii[len(radii) - wrong :] = 0.0
        return wdro.certified_accuracy(radii, eps, order)


class LookPlan(NamedTuple):
    """What is asked of every sample."""

    levels: npt.NDArray[np.float64]
    """``[E + 1]`` probabilities to be certified or refuted, the first 1/2."""
    radii: npt.NDArray[np.float64]
    """``[E + 1]`` radii that these levels certify, the first 0."""
    radius: Callable[[npt.ArrayLike], npt.NDArray[np.float64]]
    """The noise's radius of a probability."""
    n0: int
    looks: tuple[int, ...]
    """Numbers of votes after which bounds are computed."""
    alpha: float
    test: Test


def plan(
    eps: npt.ArrayLike | None, noise: Noise, n0: int, n: int, alpha: float, test: Test | None
) -> LookPlan:
    """Checks the arguments and makes a :class:`LookPlan`; None chooses the test by ``eps``.

    ``eps`` are the radii of a sequential test, which ends once each is certified or refuted.
    """
    test = test or ("clopper-pearson" if eps is None else "sequential")
    validate.check_choice("test", test, TESTS)
    if (eps is None) == (test == "sequential"):
        raise ValueError(
            "a sequential test ends when radii are decided, and other tests take no radii: pass "
            f"eps=radii with test='sequential', or neither; got eps={eps!r}, test={test!r}."
        )
    level = binomial.check_level(alpha)
    if alpha > 0.5:
        raise ValueError(f"alpha must be at most 1/2, got {alpha!r}.")
    n0, n = validate.check_count("n0", n0, 0), validate.check_count("n", n)
    radii = np.append(0.0, np.ravel(np.asarray([] if eps is None else eps, float)))
    looks = [n]
    while test == "sequential" and looks[0] > _FIRST:
        looks.insert(0, int(looks[0] / _GROWTH))
    levels = noise.level(radii) + _UP
    return LookPlan(levels, radii, noise.radius, n0, tuple(looks), level, test)


def outlook(plan: LookPlan, noise: Noise, error: Numbers, eps: npt.ArrayLike | None) -> str | None:
    """What no votes could certify, in words: every radius, or some of those asked for.

    Args:
      plan: the test.
      noise: the noise of the plan.
      error: ``[n]``, by how much probabilities are lowered for rounding.
      eps: the requested radii, whether or not the plan has them.
    """
    n, alpha = plan.looks[-1], plan.alpha
    won = np.array([n])
    bounds: dict[Test, Callable[[], Numbers]] = {
        "clopper-pearson": lambda: binomial.lower(won, n, alpha),
        "randomized": lambda: binomial.randomized_lower(won, n, alpha, 0.01),
        "sequential": lambda: binomial.sequential_lower(won, n, n, alpha),
    }
    alike = float(bounds[plan.test]()[0])
    most, votes = alike - float(np.min(error)), f"{n} votes at alpha={alpha:g}"
    votes += ", by 99 in 100 draws of the test's own," * (plan.test == "randomized")
    if alike <= plan.levels[0]:
        return f"nothing can be certified: {votes} show no majority even if all agree; raise n."
    if most <= plan.levels[0]:
        return (
            f"nothing can be certified under {noise!r}: so small a noise is lost in the rounding "
            "of inputs, which alone may change a vote with a probability of up to "
            f"{min(float(np.min(error)), 1.0):.3g}; raise sigma, to the size of the radius wanted."
        )
    radii = np.ravel(np.asarray([] if eps is None else eps, float))
    beyond = radii[noise.level(radii) + _UP >= most]
    if not beyond.size:
        return None
    return (
        f"eps={beyond.min():g} cannot be certified under {noise!r}: {votes} that all agree show "
        f"the radius {float(plan.radius(most)):.4g}; raise sigma or n."
    )


class Work(NamedTuple):
    """The votes on all samples, as a loop over a state that can be saved in checkpoints."""

    asked: votes.VotePoll
    plan: LookPlan
    y: npt.NDArray[np.int32]
    error: npt.NDArray[np.float64]

    @property
    def ends(self) -> tuple[int, ...]:
        """The numbers of votes at which the parts end: the choice of classes, then each look."""
        n0 = self.plan.n0
        return (*([n0] if n0 else []), *(n0 + look for look in self.plan.looks))

    def begin(self) -> dict[str, Any]:
        """The first state; arrays ``[n]`` but for the counters ``part`` and ``taken``, ``counts``
        ``[n, K + 1]`` and ``lower`` as of :func:`_bits`."""
        n, width = len(self.y), self.asked.classes + 1
        return {
            "part": np.int32(0),
            "taken": np.int32(0),
            "active": np.ones(n, bool),
            "counts": np.zeros((n, width), np.int32),
            "chosen": self.y.astype(np.int32),
            "lower": _bits(np.zeros(n)),
            "votes": np.zeros(n, np.int32),
            "faults": np.zeros(n, np.int32),
        }

    def finished(self, state: dict[str, Any]) -> bool:
        return int(state["part"]) >= len(self.ends) or not np.any(state["active"])

    def turn(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state after some batches of votes; :meth:`_close` is called at the end of a part."""
        state = {name: np.array(value) for name, value in state.items()}
        part, taken = int(state["part"]), int(state["taken"])
        first = self.ends[part - 1] if part else 0
        each, active = self.ends[part] - first, np.flatnonzero(state["active"])
        most = min(taken + votes.at_once(self.asked), each * len(active))
        pairs = np.arange(taken, most)
        rows = active[pairs // each]
        counts = votes.count(self.asked, rows, first + pairs % each)
        state["counts"] += counts.astype(np.int32)
        state["faults"] += counts[:, -1].astype(np.int32)
        state["votes"] += counts.sum(axis=1).astype(np.int32)
        state["taken"] = np.int32(most)
        if most == each * len(active):
            self._close(state, part)
            state["part"], state["taken"] = np.int32(part + 1), np.int32(0)
        return state

    def _close(self, state: dict[str, Any], part: int) -> None:
        """Uses the votes of a finished part; changes ``state``.

        If ``n0`` is not 0, the votes of the first part choose each sample's class. Those of every
        other part raise the lower bounds of its probability; in a sequential test, samples for
        which every level is certified or refuted become inactive and get no more votes.
        """
        plan, active, counts = self.plan, state["active"], state["counts"]
        if plan.n0 and part == 0:
            state["chosen"] = np.argmax(counts[:, :-1], axis=1).astype(np.int32)
            state["counts"] = np.zeros_like(counts)
            return
        made = self.ends[part] - plan.n0
        won = np.take_along_axis(counts, state["chosen"][:, None], axis=1)[active, 0]
        bound = np.maximum(self._bound(won, made, active) - self.error[active], 0.0)
        lower = _floats(state["lower"])
        lower[active] = np.maximum(lower[active], bound)
        state["lower"] = _bits(lower)
        if plan.test == "sequential":
            upper = 1 - binomial.sequence_lower(made - won, made, plan.alpha)
            # The final bound if all remaining votes were for the class.
            most = plan.looks[-1]
            within = self._bound(won + most - made, most, active) - self.error[active]
            refuted = np.minimum(upper, within)[:, None] <= plan.levels
            certified = lower[active][:, None] > plan.levels
            state["active"][active] = ~(certified | refuted).all(axis=1)

    def _bound(self, won: Numbers, made: int, active: Numbers) -> npt.NDArray[np.float64]:
        """``[m]``: lower bounds of the chosen class's probability, for the ``m`` active samples.

        ``won`` ``[m]`` of the ``made`` votes were for that class; ``active`` ``[n]`` are booleans.
        The bounds hold at level ``1 - alpha`` by the plan's test.
        """
        plan = self.plan
        if plan.test == "sequential":
            return binomial.sequential_lower(won, made, plan.looks[-1], plan.alpha)
        if plan.test == "clopper-pearson":
            return binomial.lower(won, made, plan.alpha)
        # Random floats are rounded up to the end of their cell, which is the safe side.
        drawn = votes.uniforms(self.asked, plan.n0 + made)[active].astype(float) + 2.0**-23
        return binomial.randomized_lower(won, made, plan.alpha, np.minimum(drawn, 1.0))

    def progress(self, state: dict[str, Any]) -> Progress:
        left = np.flatnonzero(state["active"]) if not self.finished(state) else np.empty(0, int)
        taken = int(np.sum(state["votes"]))
        total = taken + (self.ends[-1] * len(left) - int(np.sum(state["votes"][left])))
        return Progress(taken, total, left)

    def result(self, state: dict[str, Any]) -> SmoothedCertificate:
        plan = self.plan
        lower, chosen = _floats(state["lower"]), np.array(state["chosen"])
        prediction = np.where(lower > 0.5, chosen, ABSTAIN).astype(np.int32)
        held = np.where(lower[:, None] > plan.levels, plan.radii, 0.0).max(axis=1)
        correct = prediction == self.y
        radius = np.where(correct, np.maximum(plan.radius(lower), held), 0.0)
        made, faults = np.array(state["votes"]), np.array(state["faults"])
        return SmoothedCertificate(prediction, correct, lower, radius, made, faults, plan.alpha)


def _bits(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
    """float64 numbers ``[n]`` as int32 ``[n, 2]``, bit for bit, for a checkpoint.

    With 64 bits disabled a checkpoint would round them to float32, and perhaps up.
    """
    return np.ascontiguousarray(numbers).view(np.int32).reshape(-1, 2)


def _floats(bits: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """float64 numbers ``[n]`` from int32 ``[n, 2]``, the inverse of :func:`_bits`."""
    return np.array(bits, np.int32, order="C").view(np.float64)[:, 0]
