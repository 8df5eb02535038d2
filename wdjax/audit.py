r"""The sandwich: certificates from below, attacks from above, and the check that they agree.

    certified(eps)  <=  true robust accuracy in the ball of radius eps  <=  attacked(eps)

for the point-wise ball (Omega_inf) and the Wasserstein balls Omega_2 and Omega_1, which contain it;
and the same for the expected loss, with the sides exchanged.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from wdjax import attacks, certify, driver, losses, metrics, norms, transport, validate
from wdjax.core import Result
from wdjax.transport import AdversarialDistribution

ORDERS = (math.inf, 2, 1)
"""From the smallest ball to the largest: what holds an attack once holds it ever after."""

_WALK = 0.25
"""WDA++'s step as a share of the largest budget: twenty of them reach five times that budget."""

_ROUNDING = 1e-5


class Entry(NamedTuple):
    """One attack at one budget."""

    name: str
    order: float
    eps: float
    accuracy: float
    """Of the adversarial distribution, as the attack reported it."""
    loss: float
    """Expected cross-entropy under it."""
    spent: float
    """Exact W_p between it and the data."""
    result: Result


class Invariant(NamedTuple):
    """A statement that must hold, and by how much it does."""

    name: str
    holds: bool
    slack: float
    """The smallest distance from violation that was seen; negative if it fails."""


class Sandwich(NamedTuple):
    """Everything that was measured of one model, over ``radii`` ``[m]``."""

    norm: float
    radii: np.ndarray
    clean: np.ndarray
    """``[n]``: classified correctly."""
    clean_loss: float
    entries: tuple[Entry, ...]
    radius: np.ndarray
    """``[n]``: certified radii."""
    certified: dict[float, np.ndarray]
    """Per order, ``[m]``: lower bounds of the accuracy."""
    loss_bound: dict[float, np.ndarray]
    """Per order, ``[m]``: upper bounds of the expected loss."""
    lipschitz: float
    invariants: tuple[Invariant, ...]

    def attacked(self, order) -> np.ndarray:
        """``[m]``: the least accuracy that any attack within ``Omega_order`` reached."""
        return self._best(order, "accuracy", min)

    def attacked_loss(self, order) -> np.ndarray:
        """``[m]``: the largest expected loss that any attack within ``Omega_order`` reached."""
        return self._best(order, "loss", max)

    def curve(self, name, order) -> np.ndarray:
        """``[m]``: the accuracy under one attack."""
        found = [e.accuracy for e in self.entries if e.name == name and e.order == order]
        return np.array(found)

    def _best(self, order, field, choose):
        return np.array(
            [
                choose(
                    getattr(entry, field)
                    for entry in self.entries
                    if entry.eps == eps and entry.order >= order
                )
                for eps in self.radii
            ]
        )


def sandwich(
    model,
    x,
    y,
    *,
    radii: Sequence[float],
    norm=math.inf,
    key,
    batch_size: int | None = None,
    progress: Callable[[str], Any] = lambda step: None,
) -> Sandwich:
    r"""Measures a model's robustness from above and from below over a range of budgets.

    Args:
      model: ``[n, *shape] -> [n, K]``, continuous, of primitives that :mod:`wdjax.certify` knows.
      x: ``[n, *shape]`` floats in ``[0, 1]``.
      y: ``[n]`` integer labels.
      radii: increasing budgets, in the units of ``x``.
      norm: ground norm r: 1, 2 or inf.
      key: a typed ``jax.random.key`` for the random start of PGD.
      batch_size: samples on the device at once.
      progress: called with a few words before every step of the work.

    Returns:
      A :class:`Sandwich`. Its invariants are measured, not raised: look at ``holds``.

    Raises:
      ValueError: bad samples or radii.

    Cost: per radius PGD (40 steps) and three WDA; one WDA++ and one set of certified radii in all.

    >>> import jax
    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.625, 0.375], [0.875, 0.125]]), jnp.array([0, 0])
    >>> found = sandwich(model, x, y, radii=[0.0625, 0.25], key=jax.random.key(0))
    >>> found.attacked(math.inf).tolist(), found.certified[math.inf].tolist()
    ([1.0, 0.5], [1.0, 0.5])
    >>> all(invariant.holds for invariant in found.invariants)
    True
    """
    budgets = np.asarray(radii, float)
    if budgets.ndim != 1 or not budgets.size or np.any(np.diff(budgets) <= 0) or budgets[0] < 0:
        raise ValueError(f"radii must increase from at least 0, got {budgets.tolist()}.")
    x, y = validate.check_samples(model, x, y)
    progress("clean")
    clean_losses = _losses(model, x, y)
    clean = np.asarray(jnp.argmax(model(x), axis=-1) == y)
    runs = list(_attack(model, x, y, budgets, norm, key, batch_size, progress))
    entries = []
    for name, order, eps, result in runs:
        progress(f"W_p of {name}, {eps:g}")
        distribution = AdversarialDistribution.from_result(x, y, result)
        weight = np.asarray(result.weight, float)
        moved = np.asarray(_losses(model, result.x_adv, y), float)
        entries.append(
            Entry(
                name=name,
                order=order,
                eps=eps,
                accuracy=float(result.accuracy),
                loss=float(np.mean((1 - weight) * clean_losses + weight * moved)),
                spent=transport.wasserstein(distribution, norm, order),
                result=result,
            )
        )
    progress("certified radii")
    radius = np.asarray(certify.radius(model, x, y, norm=norm), float)
    progress("WDRO bounds")
    constant = certify.lipschitz_constant(model, x, y, norm=norm)
    bound = functools.partial(
        certify.wdro_bound, model, x, y, norm=norm, eps=budgets, constant=constant
    )
    found = Sandwich(
        norm=norm,
        radii=budgets,
        clean=clean,
        clean_loss=float(np.mean(clean_losses)),
        entries=tuple(entries),
        radius=radius,
        certified={p: certify.certified_accuracy(radius, budgets, p) for p in ORDERS},
        loss_bound={p: bound(order=p) for p in ORDERS},
        lipschitz=constant,
        invariants=(),
    )
    progress("invariants")
    return found._replace(invariants=tuple(_invariants(found, model, x, y)))


def _losses(model, x, y):
    return np.asarray(losses.cross_entropy(model(x), y), float)


def _attack(model, x, y, radii, norm, key, batch_size, progress):
    """Yields ``(name, order, eps, result)`` for every attack and budget."""
    go = functools.partial(driver.run, model=model, x=x, y=y, key=key, batch_size=batch_size)
    pgd = attacks.pgd(norm=norm, random_start=True)
    pointwise = attacks.wda(norm=norm, order=math.inf)
    mixed = {p: attacks.wda(norm=norm, order=p) for p in (2, 1)}
    for eps in radii.tolist():
        progress(f"pgd, {eps:g}")
        yield "pgd", math.inf, eps, go(pgd, eps=eps, skip_misclassified=False)
        progress(f"wda, {eps:g}")
        yield "wda kappa=1", math.inf, eps, go(pointwise, eps=eps)
        for order, attack in mixed.items():
            progress(f"wda kappa=2, {eps:g}")
            yield "wda kappa=2", order, eps, go(attack, eps=eps, kappa=2.0)
    progress("wda++")
    # The distances do not depend on the budget: one walk serves all of them, and both orders.
    walked = go(
        attacks.wda_plus_plus(norm=norm), eps=radii[-1], step_size=_WALK * max(radii[-1], 1e-6)
    )
    distance = jnp.where(walked.success, walked.cost, jnp.inf)
    for order in (2, 1):
        weights = transport.allocate(distance, jnp.asarray(radii, distance.dtype), order)
        for eps, weight in zip(radii.tolist(), weights):
            yield "wda++", order, eps, walked._replace(weight=weight)


def _invariants(found: Sandwich, model, x, y):
    for order in ORDERS:
        ball = f"Omega_{order:g}"
        gap = found.attacked(order) - found.certified[order]
        yield _at_least(f"attacked accuracy >= certified accuracy in {ball}", gap, 1e-6)
        gap = found.loss_bound[order] - found.attacked_loss(order)
        yield _at_least(f"attacked loss <= certified loss in {ball}", gap, _ROUNDING)
    beyond = []
    for entry in found.entries:
        broken = np.asarray(entry.result.success) & found.clean
        beyond.append(np.asarray(entry.result.cost, float)[broken] - found.radius[broken])
    yield _at_least("no flip inside a certified ball", np.concatenate(beyond), 1e-6)
    left = [entry.eps * (1 + _ROUNDING) - entry.spent for entry in found.entries]
    yield _at_least("exact W_p <= eps (1 + 1e-5)", left, 0.0)
    points = {id(entry.result.x_adv): entry.result.x_adv for entry in found.entries}
    inside = [min(float(p.min()), 1 - float(p.max())) for p in points.values()]
    yield _at_least("adversarial points finite and in the box", inside, 0.0)
    wrong = []
    for entry in found.entries:
        distribution = AdversarialDistribution.from_result(x, y, entry.result)
        again = distribution.accuracy(model, batch_size=64)
        wrong.append(-abs(float(again) - entry.accuracy))
    yield _at_least("accuracy recomputed from the stored points", wrong, 1e-6)


def _at_least(name, slack, tolerance):
    slack = np.asarray(slack, float)
    worst = float(slack.min()) if slack.size else math.inf
    return Invariant(name, bool(worst >= -tolerance), worst)


def interval(found: Sandwich) -> tuple[float, float]:
    """The 95 % Clopper-Pearson interval of the clean accuracy."""
    bounds = metrics.clopper_pearson(int(found.clean.sum()), found.clean.size)
    return float(bounds.lower), float(bounds.upper)


def norm_name(norm) -> str:
    """``"linf"`` and its kin."""
    return next(name for name, value in norms.NAMES.items() if value == norm)
