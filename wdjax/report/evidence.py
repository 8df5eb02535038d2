"""What an audit measured, and the statements that must hold of it whatever the model.

Everything here is a function of stored points and numbers: nothing is searched for.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdjax import certify, metrics, norms, transport
from wdjax.balls import Lp
from wdjax.core import Attack, Result

Numbers = npt.NDArray[np.float64]

ORDERS = (math.inf, 2, 1)
"""From the smallest ball to the largest: what holds an attack once holds it ever after."""

_ROUNDING = 1e-5
_FLIP = 1e-6


class Entry(NamedTuple):
    """One attack at one budget."""

    name: str
    order: float
    eps: float
    kappa: float | None
    accuracy: float
    """Of the adversarial distribution, by what the attack reported."""
    recomputed: float
    """The same by another evaluation of the stored points."""
    loss: float
    """Expected cross-entropy under it."""
    spent: float
    """Exact W_p between it and the data."""
    result: Result
    """On the host."""

    @property
    def faults(self) -> npt.NDArray[np.int_]:
        """Samples for which an output or a gradient was not finite."""
        return np.flatnonzero(self.result.fault)

    @property
    def vanished(self) -> float:
        """The share of gradients that were zero: above one half, robustness may be overstated."""
        return float(np.sum(self.result.zeros) / max(np.sum(self.result.gradients), 1))

    @property
    def distance(self) -> Numbers:
        """``[n]``: how far the misclassified point known is; 0 for the sample, inf for none."""
        flip = np.where(self.result.success, self.result.cost, np.inf)
        return np.where(self.result.correct, flip, 0.0).astype(float)


class Invariant(NamedTuple):
    """A statement that must hold, and by how much it does."""

    name: str
    holds: bool
    slack: float
    """The smallest distance from violation that was seen; negative if it fails."""
    detail: str = ""
    """Who breaks it, and where."""


class Sandwich(NamedTuple):
    """Everything that was measured of one model, over ``radii`` ``[m]``."""

    ball: Lp
    radii: Numbers
    correct: npt.NDArray[np.bool_]
    """``[n]``: classified correctly."""
    clean_loss: float
    entries: tuple[Entry, ...]
    certificates: dict[str, Numbers]
    """Per name, ``[n]``: certified radii."""
    loss_bounds: dict[str, dict[float, Numbers]]
    """Per name and order, ``[m]``: upper bounds of the expected loss."""
    lipschitz: float | None
    """The constant of the loss in the default bound."""
    attacks: dict[str, Attack]
    """Per name, the attack with its settings."""
    invariants: tuple[Invariant, ...]

    @property
    def passed(self) -> bool:
        """Whether every invariant holds."""
        return all(invariant.holds for invariant in self.invariants)

    @property
    def names(self) -> tuple[str, ...]:
        """The attacks, in their order."""
        return tuple(dict.fromkeys(entry.name for entry in self.entries))

    @property
    def radius(self) -> Numbers:
        """``[n]``: the largest radius that any certificate gives."""
        return functools.reduce(np.maximum, self.certificates.values(), np.zeros(self.correct.size))

    def curve(self, name: str, order: float) -> Numbers:
        """``[m]``: the accuracy under one attack; ``[0]`` where it was not tried."""
        found = [e.accuracy for e in self.entries if e.name == name and e.order == order]
        return np.array(found)

    def attacked(self, order: float) -> Numbers:
        """``[m]``: the least accuracy that any attack within ``Omega_order`` reached, or that the
        nearest flips of all attacks at all budgets allow."""
        clean = float(np.mean(self.correct))
        single = self._best(order, lambda entry: entry.accuracy, min, clean)
        if not self.entries:
            return single
        flip, _ = self.nearest()
        bought = np.array([transport.allocate(flip, eps, order) for eps in self.radii], float)
        return np.minimum(single, np.mean(1 - bought, axis=1))

    def attacked_loss(self, order: float) -> Numbers:
        """``[m]``: the largest expected loss that any attack within ``Omega_order`` reached."""
        return self._best(order, lambda entry: entry.loss, max, self.clean_loss)

    def certified(self, order: float, name: str | None = None) -> Numbers:
        """``[m]``: lower bounds of the accuracy, by one certificate or by all of them together."""
        radius = self.radius if name is None else self.certificates[name]
        return np.asarray(certify.certified_accuracy(radius, self.radii, order))

    def certified_loss(self, order: float) -> Numbers:
        """``[m]``: the least upper bound of the expected loss; inf without any."""
        bounds = (bound[order] for bound in self.loss_bounds.values())
        return functools.reduce(np.minimum, bounds, np.full(self.radii.size, np.inf))

    def nearest(self) -> tuple[Numbers, np.ndarray]:
        """The nearest misclassified points that any attack found.

        Returns:
          ``[n]`` distances, 0 for a misclassified sample and inf where no flip is known, and the
          points ``[n, *shape]``, of no meaning where no flip is known.

        Raises:
          ValueError: no attack was made.
        """
        if not self.entries:
            raise ValueError("this audit made no attack, so that no flip is known.")
        best, points = self.entries[0].distance, np.array(self.entries[0].result.x_adv)
        for entry in self.entries[1:]:
            closer = entry.distance < best
            best = np.where(closer, entry.distance, best)
            points[closer] = np.asarray(entry.result.x_adv)[closer]
        return best, points

    def _best(
        self,
        order: float,
        value: Callable[[Entry], float],
        choose: Callable[[Iterable[float]], float],
        clean: float,
    ) -> Numbers:
        """The data itself is in every ball."""
        inner = [entry for entry in self.entries if entry.order >= order]
        return np.array(
            [choose([clean, *(value(e) for e in inner if e.eps == eps)]) for eps in self.radii]
        )


def ball_name(order: float) -> str:
    """A ball's name in reports.

    >>> [ball_name(order) for order in ORDERS]
    ['Omega_inf', 'Omega_2', 'Omega_1']
    """
    return f"Omega_{order:g}"


def norm_name(norm: float) -> str:
    """``"linf"`` and its kin."""
    return next(name for name, value in norms.NAMES.items() if value == norm)


def invariants(found: Sandwich) -> Iterator[Invariant]:
    """The statements, each with its slack, in the order of the page."""
    for order in ORDERS:
        ball = ball_name(order)
        gap = found.attacked(order) - found.certified(order)
        yield _at_least(f"attacked accuracy >= certified accuracy in {ball}", gap, 1e-6)
        gap = found.certified_loss(order) - found.attacked_loss(order)
        yield _at_least(f"attacked loss <= certified loss in {ball}", gap, _ROUNDING)
    yield _no_flip_inside(found)
    left = [entry.eps * (1 + _ROUNDING) - entry.spent for entry in found.entries]
    yield _at_least("exact W_p <= eps (1 + 1e-5)", left, 0.0)
    inside = [_room(np.asarray(entry.result.x_adv), found.ball.box) for entry in found.entries]
    yield _at_least("adversarial points finite and in the box", inside, 0.0)
    wrong = [-abs(entry.recomputed - entry.accuracy) for entry in found.entries]
    yield _at_least("accuracy recomputed from the stored points", wrong, 1e-6)
    yield _no_fault(found)


def _at_least(name: str, slack: npt.ArrayLike, tolerance: float, detail: str = "") -> Invariant:
    slack = np.asarray(slack, float)
    worst = float(slack.min()) + 0.0 if slack.size else math.inf  # Never -0.0.
    return Invariant(name, bool(worst >= -tolerance), worst, detail)


def _no_flip_inside(found: Sandwich) -> Invariant:
    """Nothing misclassified, the samples themselves included, lies inside a certified ball."""
    name, gaps, liars = "no flip inside a certified ball", [np.zeros(0)], []
    flip = np.where(found.correct, np.inf, 0.0)
    if found.entries:
        flip = np.minimum(flip, found.nearest()[0])
    for certificate, radius in found.certificates.items():
        # A misclassified sample without a radius says nothing.
        told = np.flatnonzero(np.isfinite(flip) & (found.correct | (radius > 0)))
        gap = flip[told] - radius[told]
        if np.any(gap < -_FLIP):
            liars.append(f"{certificate}, worst at index {told[np.argmin(gap)]}")
        gaps.append(gap)
    return _at_least(name, np.concatenate(gaps), _FLIP, "; ".join(liars))


def _room(points: np.ndarray, box: tuple[float, float] | None) -> float:
    if not np.all(np.isfinite(points)):
        return -math.inf
    if box is None:
        return math.inf
    return min(float(points.min()) - box[0], box[1] - float(points.max()))


def _no_fault(found: Sandwich) -> Invariant:
    """A sample with a fault may be less robust than it looks."""
    name = "no fault met by any attack"
    met = [entry for entry in found.entries if entry.faults.size]
    if not met:
        return Invariant(name, True, 0.0)
    samples = np.unique(np.concatenate([entry.faults for entry in met]))
    who = ", ".join(dict.fromkeys(entry.name for entry in met))
    detail = (
        f"an output or a gradient was not finite for {samples.size} of {found.correct.size} "
        f"samples, first at index {samples[0]} ({who})"
    )
    return Invariant(name, False, -float(samples.size), detail)


def interval(found: Sandwich) -> tuple[float, float]:
    """The 95 % Clopper-Pearson interval of the clean accuracy."""
    bounds = metrics.clopper_pearson(int(found.correct.sum()), found.correct.size)
    return float(bounds.lower), float(bounds.upper)
