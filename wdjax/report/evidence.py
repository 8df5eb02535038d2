"""The measurements of an audit, and invariants that hold for every model.

All functions here compute from stored points and numbers; none searches.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdjax import certify, metrics, norms, transport
from wdjax.balls import Lp
from wdjax.core import Attack, Result

Numbers = npt.NDArray[np.float64]

ORDERS = (math.inf, 2, 1)
"""From the smallest ball to the largest: an attack in one ball is also an attack in the next."""

_ROUNDING = 1e-5
_FLIP = 1e-6


class Entry(NamedTuple):
    """The results of one attack at one budget."""

    name: str
    order: float
    eps: float
    kappa: float | None
    accuracy: float
    """Accuracy under the adversarial distribution, as reported by the attack."""
    recomputed: float
    """The same, by another evaluation of the stored points."""
    loss: float
    """Expected cross-entropy under the distribution."""
    spent: float
    """Exact W_p between the distribution and the data."""
    result: Result
    """The points, on the host."""

    @property
    def faults(self) -> npt.NDArray[np.int_]:
        """Indices of samples with an output or gradient that was not finite."""
        return np.flatnonzero(self.result.fault)

    @property
    def vanished(self) -> float:
        """Share of gradients that were zero; above one half, robustness may be overstated."""
        return float(np.sum(self.result.zeros) / max(np.sum(self.result.gradients), 1))

    @property
    def distance(self) -> Numbers:
        """``[n]``: distance of the flip found; 0 for a misclassified sample, inf for none."""
        flip = np.where(self.result.success, self.result.cost, np.inf)
        return np.where(self.result.correct, flip, 0.0).astype(float)


class Invariant(NamedTuple):
    """A statement that must hold, and its slack."""

    name: str
    holds: bool
    slack: float
    """The smallest distance from violation over all cases; negative if it is violated."""
    detail: str = ""
    """What violates it, and where."""


class Sandwich(NamedTuple):
    """All measurements of one model, over ``eps_list`` ``[m]``."""

    ball: Lp
    eps_list: Numbers
    correct: npt.NDArray[np.bool_]
    """``[n]``: whether the sample is classified correctly."""
    clean_loss: float
    entries: tuple[Entry, ...]
    certificates: dict[str, Numbers]
    """By name, ``[n]`` certified radii."""
    loss_bounds: dict[str, dict[float, Numbers]]
    """By name and order, ``[m]`` upper bounds of the expected loss."""
    lipschitz: float | None
    """The Lipschitz constant of the loss in the default bound."""
    attacks: dict[str, Attack]
    """By name, the attack with its settings."""
    invariants: tuple[Invariant, ...]
    refused_certificates: Mapping[str, str] = MappingProxyType({})
    """By name, why a default certificate does not apply to the model."""
    refused_bounds: Mapping[str, str] = MappingProxyType({})
    """By name, why a default loss bound does not apply."""

    @property
    def passed(self) -> bool:
        """Whether every invariant holds."""
        return all(invariant.holds for invariant in self.invariants)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the attacks, in their order."""
        return tuple(dict.fromkeys(entry.name for entry in self.entries))

    @property
    def radius(self) -> Numbers:
        """``[n]``: the largest certified radius of all certificates."""
        return functools.reduce(np.maximum, self.certificates.values(), np.zeros(self.correct.size))

    def curve(self, name: str, order: float) -> Numbers:
        """``[m]``: the accuracy under one attack; ``[0]`` if it was not run in this ball."""
        found = [e.accuracy for e in self.entries if e.name == name and e.order == order]
        return np.array(found)

    def attacked(self, order: float) -> Numbers:
        """``[m]``: the least accuracy reached in the ball ``Omega_order``, by a single attack or by
        spending the budget on the nearest flips of all attacks and second looks."""
        clean = float(np.mean(self.correct))
        single = self._best(order, lambda entry: entry.accuracy, min, clean)
        if not self.entries:
            return single
        flip = self.within()
        bought = np.array([transport.allocate(flip, eps, order) for eps in self.eps_list], float)
        return np.minimum(single, np.mean(1 - bought, axis=1))

    def attacked_loss(self, order: float) -> Numbers:
        """``[m]``: the largest expected loss that an attack reached in the ball ``Omega_order``."""
        return self._best(order, lambda entry: entry.loss, max, self.clean_loss)

    def certified(self, order: float, name: str | None = None) -> Numbers:
        """``[m]``: lower bounds of the accuracy, by one certificate or the best for each sample."""
        radius = self.radius if name is None else self.certificates[name]
        return np.asarray(certify.certified_accuracy(radius, self.eps_list, order))

    def certified_loss(self, order: float) -> Numbers:
        """``[m]``: the least upper bound of the expected loss; inf without bounds."""
        bounds = (bound[order] for bound in self.loss_bounds.values())
        return functools.reduce(np.minimum, bounds, np.full(self.eps_list.size, np.inf))

    def nearest(self, name: str | None = None) -> tuple[Numbers, np.ndarray]:
        """The nearest misclassified points of all attacks, or of the one with this name.

        Returns:
          ``[n]`` distances, 0 for a misclassified sample and inf where no flip is known; and the
          points ``[n, *shape]``, meaningless where no flip is known.

        Raises:
          ValueError: the audit made no such attack.
        """
        made = [entry for entry in self.entries if name in (None, entry.name)]
        if not made:
            raise ValueError("this audit made no such attack, so that no flip is known.")
        best, points = made[0].distance, np.array(made[0].result.x_adv)
        for entry in made[1:]:
            closer = entry.distance < best
            best = np.where(closer, entry.distance, best)
            points[closer] = np.asarray(entry.result.x_adv)[closer]
        return best, points

    def within(self) -> Numbers:
        """``[n]``: distances within which a flip is known, by an attack or by a second look.

        A second look (:attr:`~wdjax.core.Found.overlooked`) keeps no points: its flips are
        somewhere within the radius that it searched. 0 for a misclassified sample, inf for none.
        """
        known = self.nearest()[0]
        for entry in self.entries:
            seen, radius, limit = (
                getattr(entry.result, name) for name in ("overlooked", "radius", "limit")
            )
            if seen is not None and radius is not None and limit is not None:
                reach = np.minimum(np.asarray(radius, float), np.asarray(limit, float))
                known = np.minimum(known, np.where(seen, reach, np.inf))
        return known

    def _best(
        self,
        order: float,
        value: Callable[[Entry], float],
        choose: Callable[[Iterable[float]], float],
        clean: float,
    ) -> Numbers:
        """``[m]``: the best ``value`` at each radius, over the entries in ``Omega_order``.

        An entry counts if its order is at least ``order``, since its ball is then contained.
        ``choose`` is min or max; ``clean``, the value of the unmoved data, which lie in every ball,
        takes part.
        """
        inner = [entry for entry in self.entries if entry.order >= order]
        return np.array(
            [choose([clean, *(value(e) for e in inner if e.eps == eps)]) for eps in self.eps_list]
        )


def ball_name(order: float) -> str:
    """The ball's name in reports.

    >>> [ball_name(order) for order in ORDERS]
    ['Omega_inf', 'Omega_2', 'Omega_1']
    """
    return f"Omega_{order:g}"


def norm_name(norm: float) -> str:
    """The norm's name, such as ``"linf"``."""
    return next(name for name, value in norms.NAMES.items() if value == norm)


def invariants(found: Sandwich) -> Iterator[Invariant]:
    """The invariants with their slacks, in the order of the page."""
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
    """The invariant that all ``slack`` are at least ``-tolerance``; it holds if there are none."""
    slack = np.asarray(slack, float)
    worst = float(slack.min()) + 0.0 if slack.size else math.inf  # Never -0.0.
    return Invariant(name, bool(worst >= -tolerance), worst, detail)


def _no_flip_inside(found: Sandwich) -> Invariant:
    """The invariant that no misclassified point lies inside a certified ball.

    A misclassified sample counts as a point at distance 0, which a positive certified radius
    violates. The detail names the certificates that are wrong, and where they are worst.
    """
    name, gaps, liars = "no flip inside a certified ball", [np.zeros(0)], []
    flip = np.where(found.correct, np.inf, 0.0)
    if found.entries:
        flip = np.minimum(flip, found.within())
    for certificate, radius in found.certificates.items():
        # A misclassified sample with a certified radius of 0 violates nothing.
        told = np.flatnonzero(np.isfinite(flip) & (found.correct | (radius > 0)))
        gap = flip[told] - radius[told]
        if np.any(gap < -_FLIP):
            liars.append(f"{certificate}, worst at index {told[np.argmin(gap)]}")
        gaps.append(gap)
    return _at_least(name, np.concatenate(gaps), _FLIP, "; ".join(liars))


def _room(points: np.ndarray, box: tuple[float, float] | None) -> float:
    """The smallest distance of a coordinate from the box's ends, negative outside.

    -inf for points that are not finite, else inf without a box.
    """
    if not np.all(np.isfinite(points)):
        return -math.inf
    if box is None:
        return math.inf
    return min(float(points.min()) - box[0], box[1] - float(points.max()))


def _no_fault(found: Sandwich) -> Invariant:
    """The invariant that no attack met a fault: an output or gradient that was not finite.

    The detail says for how many samples, and names the attacks.
    """
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
