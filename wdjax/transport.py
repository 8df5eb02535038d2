r"""Discrete adversarial distributions (equation 11): budget, coupling cost and exact W_p."""

import functools
import math
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from wdjax import distinct, exact_transport, losses, metrics, norms, parallel, sparse
from wdjax.checks import arguments
from wdjax.checks.forward_mode import host_only
from wdjax.checks.validate import check_number, check_order, traced
from wdjax.core import Array, Found, Result
from wdjax.parallel import AnyArray

_Either = TypeVar("_Either", jax.Array, np.ndarray)
_Float64 = npt.NDArray[np.float64]


def allocate(distance: ArrayLike, eps: ArrayLike, order: float) -> jax.Array:
    r"""Spends a transport budget where a flip is cheapest: the allocation of WDA++.

    Solves ``max sum_i w_i`` over ``w`` in ``[0, 1]^n`` subject to ``mean_i w_i d_i^p <= eps^p``, a
    fractional knapsack, by its greedy optimum. The weight is ``1 / kappa_i``.

    Args:
      distance: ``[n]`` costs of flipping each sample, in the units of ``x``: 0 where it is
        misclassified already, inf where no flip is known.
      eps: the budget, at least 0; ``[m]`` for many budgets at once.
      order: p, a number of at least 1 or inf.

    Returns:
      ``[n]`` (``[m, n]``) weights. Distance 0 gets 1, even if ``eps`` is 0; inf gets 0. At most one
      sample gets a fraction, and equal distances are served in their order. For order inf the
      weight is 1 where ``d_i <= eps``.

    Raises:
      ValueError: ``distance`` is not a vector of numbers that are at least 0, ``eps`` is negative
        or not finite, or ``order`` is below 1.

    Cost: a sort, ``O(n log n)`` a budget. The spending exceeds ``eps^p`` by float rounding at most
      (below 1e-6 of it in float32), because distances are measured in units of ``eps``.

    Differs: Algorithm 2 as written subtracts ``0 * inf`` from the budget at the first unflipped
      sample and divides by 0 at a misclassified one; here both follow the stated conventions.

    Source: Le et al. [le2025], Algorithm 2 and Appendix E.

    >>> allocate(jnp.array([0.4, 0.0, jnp.inf, 0.1]), 0.05, 1).tolist()
    [0.25, 1.0, 0.0, 1.0]
    """
    order = check_order(order)
    if not traced(distance) and not np.all(np.asarray(distance) >= 0):
        raise ValueError("distance must be at least 0 (inf where no flip is known), without NaN.")
    if not traced(eps) and not np.all(np.isfinite(eps) & (np.asarray(eps) >= 0)):
        raise ValueError(f"eps must be finite and at least 0, got {eps}.")
    distance, eps = jnp.asarray(distance, float), jnp.asarray(eps, float)
    if distance.ndim != 1 or eps.ndim > 1:
        raise ValueError(
            f"distance must be [n] and eps a number or [m], got shapes {list(distance.shape)} and "
            f"{list(eps.shape)}; use vmap for more."
        )
    one = functools.partial(_allocate, jnp, order=order)
    return one(distance, eps) if eps.ndim == 0 else jax.vmap(one, (None, 0))(distance, eps)


def _allocate(xp: ModuleType, distance: _Either, eps: Any, order: float) -> _Either:
    """``[n]``: the share of each sample's mass that moves, the cheapest flips first.

    ``distance`` ``[n]`` are the flips' distances, inf where no flip is known; the last sample that
    is paid for may move in part. ``xp`` is NumPy or ``jax.numpy``.
    """
    if order == math.inf:
        return ((distance <= eps) & xp.isfinite(distance)).astype(distance.dtype)
    reachable = xp.isfinite(distance) & ((distance == 0) | (eps > 0))
    # Masked before the division too: its gradient would be 0 times infinity.
    budgets = xp.where(reachable, distance, 0.0) / xp.where(eps > 0, eps, 1.0)
    price = xp.where(reachable, budgets**order, xp.inf)
    ranking = xp.argsort(price, stable=True)
    price = price[ranking]
    affordable = xp.isfinite(price)
    paid = xp.cumsum(xp.where(affordable, price, 0.0))
    left = len(distance) - xp.concatenate([xp.zeros(1, paid.dtype), paid[:-1]])
    share = left / xp.where(affordable & (price > 0), price, 1.0)
    weight = xp.where(price > 0, xp.clip(share, 0.0, 1.0), 1.0)
    return xp.where(affordable, weight, 0.0)[xp.argsort(ranking)]


BEYOND = 1e-6
"""How much farther than ``eps``, relative to it, a search within ``eps`` may measure its points."""

_UNITS = "of 255 grey levels in [0, 1] eight are 8/255"


def spend(found: Found, *, eps: Any, order: float = 1, kappa: Any = None) -> Result:
    r"""Turns points into an adversarial distribution of equation 11 that costs at most ``eps``.

    With ``kappa``, every sample sends ``1 / kappa`` of its mass to its point, which may be
    ``kappa^(1/p) eps`` far (WDA; ``kappa = 1`` is a point-wise attack). Without it the budget is
    spent where flips are cheapest, by the knapsack of :func:`allocate` (WDA++). One search serves
    every order and, if it was not bound to a radius, every budget.

    Args:
      found: from :func:`wdjax.search`. A search within a radius has not looked for flips beyond it;
        a warning says where the budget could pay for such flips.
      eps: the budget, at least 0, in the units of ``x``; may be traced.
      order: Wasserstein order p, at least 1 or inf.
      kappa: at least 1, may be traced, or None for the knapsack.

    Returns:
      A :class:`~wdjax.core.Result`. Inside a trace, invalid arguments give weights of NaN, and so
      an accuracy of NaN.

    Raises:
      ValueError: no result of a search, ``kappa`` below 1, ``eps`` negative, or points that would
        cost more than the budget.

    Cost: a sort.

    Source: Le et al. [le2025], equation 11, Corollary C.2, Algorithm 2.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.8, 0.2]]), jnp.array([0, 0])
    >>> found = wdjax.search(wdjax.attacks.WDAPlusPlus(), model, x, y)
    >>> [round(float(w), 2) for w in spend(found, eps=0.1).weight]
    [1.0, 0.33]
    """
    arguments.check(eps=eps)
    if not hasattr(found, "cost"):
        inside = "; pass its .found" if hasattr(found, "found") else ""
        raise ValueError(
            f"spend takes what wdjax.search returned, got {type(found).__name__}{inside}."
        )
    order = check_order(order)
    eps = check_number("eps", eps)
    kappa = None if kappa is None else check_number("kappa", kappa, 1.0)
    facts = found.cost, found.correct, found.success
    if found.limit is not None and not traced(found.limit, eps):
        arguments.warn(arguments.beyond(float(np.max(np.asarray(found.limit))), eps, _UNITS))
    if traced(found, eps, kappa):
        weight = _weigh_traced(*facts, jnp.asarray(eps, found.cost.dtype), kappa, order)
    else:
        cost, correct, success = map(np.asarray, facts)
        weight = _weigh_known(cost, correct, success, float(eps), kappa, order)
        arguments.warn(_unsearched(found, np.asarray(weight), float(eps), kappa, order))
    return Result(**{f.name: getattr(found, f.name) for f in fields(Found)}, weight=weight)


@functools.partial(distinct.jit, static_argnums=5)
def _weigh_traced(
    cost: Array, correct: Array, success: Array, eps: Array, kappa: Any, order: float
) -> jax.Array:
    """``[n]``: the weights of :func:`spend` inside a trace, from ``[n]`` leaves of its search.

    ``eps`` is a number, ``kappa`` a number or None for the knapsack. What the host refuses gives
    NaN: in all weights for a bad ``eps`` or ``kappa`` or an exceeded budget, in a single weight
    where the sample's cost is not finite.
    """
    valid = jnp.isfinite(eps) & (eps >= 0)
    if kappa is None:
        weight = _allocate(jnp, _prices(jnp, cost, correct, success), _reach(eps, order), order)
    else:
        kappa = jnp.asarray(kappa, cost.dtype)
        weight = jnp.broadcast_to(1 / kappa, cost.shape)
        spent = _power_mean(jnp, cost, weight, order)
        valid &= jnp.isfinite(kappa) & (kappa >= 1) & (spent <= eps * (1 + 1e-5))
    return jnp.where(valid & jnp.isfinite(cost), weight.astype(cost.dtype), jnp.nan)


def _weigh_known(
    cost: np.ndarray, correct: np.ndarray, success: np.ndarray, eps: float, kappa: Any, order: float
) -> jax.Array:
    """``[n]``: the weights of :func:`spend`, computed by NumPy, so that nothing is compiled."""
    if kappa is None:
        with np.errstate(over="ignore"):
            price = _prices(np, _float64(cost), correct, success)
            weight = _allocate(np, price, _reach(eps, order), order)
    else:
        weight = np.full(len(cost), 1 / float(kappa))
    # An infinite cost makes the spending NaN, which is refused.
    weight = np.where(np.isfinite(cost), weight, np.nan).astype(cost.dtype)
    _refuse_overspending(cost, weight, eps, order)
    return jax.device_put(weight)


def _unsearched(found: Found, weight: AnyArray, eps: float, kappa: Any, order: float) -> str | None:
    """A warning if the budget could pay for flips that the search did not look for, else None.

    ``weight`` is ``[n]``, one number for each sample of ``found``. With ``kappa`` or at order inf
    the budget reaches every sample within ``kappa^(1/p) eps``, else wherever some of it is left.
    Flips at the edge of the search's radius, and beyond what the budget reaches, are what attacks
    find that use the whole radius.
    """
    if found.radius is None:
        return None
    radius = np.asarray(found.radius)
    searched = np.asarray(found.correct) & np.isfinite(radius)
    missed = searched & ~np.asarray(found.success)
    if kappa is None and order != math.inf:
        missed &= _power_mean(np, _float64(found.cost), _float64(weight), order) < eps * (1 - 1e-5)
    else:
        reach = eps * float(1 if kappa is None else kappa) ** (1 / order)
        cost = np.asarray(found.cost)
        far = searched & ~missed & (cost > reach * (1 + 1e-5)) & (cost > 0.99 * radius)
        if far.any():
            return (
                f"{far.sum()} of {len(far)} samples have a flip at the edge of this search, "
                f"{radius[far].max():g}, which eps={eps:g} does not reach, and it may have "
                "overlooked nearer ones: the accuracy may be too high. Search within this eps."
            )
        missed &= radius < reach * (1 - 1e-5)
    if not missed.any():
        return None
    return (
        f"{missed.sum()} of {len(missed)} samples have no flip within {radius[missed].max():g}, "
        f"where this search ended, and eps={eps:g} could pay for flips beyond: the accuracy may be "
        "too high. Search with a minimum-norm attack such as WDAPlusPlus, or within a larger eps."
    )


def _reach(eps: Any, order: float) -> Any:
    """The budget of :func:`spend`: of order inf with the rounding of a search within ``eps``.

    Twice, since the search compares in the samples' own floats.
    """
    return eps * (1 + 2 * BEYOND) if order == math.inf else eps


def _prices(xp: ModuleType, cost: _Either, correct: _Either, success: _Either) -> _Either:
    """``[n]``: the distance at which each flip is bought; inf where there is none.

    For a sample that is misclassified at the start a move is worth its price only if it costs
    nothing.
    """
    bought = xp.where(correct, success, cost == 0)
    return xp.where(bought, xp.nan_to_num(cost), xp.inf)


def _refuse_overspending(cost: AnyArray, weight: AnyArray, eps: Any, order: float) -> None:
    """Raises if moving shares ``weight`` ``[n]`` as far as ``cost`` ``[n]`` exceeds ``eps``.

    What is spent is ``(mean weight cost^p)^(1/p)``, Corollary C.2 of the paper, in float64; it may
    exceed the budget ``eps`` by 1e-5 of it.
    """
    spent = _power_mean(np, _float64(cost), _float64(weight), order)
    if not spent <= float(eps) * (1 + 1e-5):
        raise ValueError(
            f"these points cost {spent:g} when they all move, more than the budget {eps:g}: search "
            "within a radius, give an attack that spends an average the same order, such as "
            "WPGD(order=2), or leave kappa out of spend to move the cheapest flips only."
        )


class Moved(Protocol):
    """The part of a result that defines its distribution."""

    @property
    def x_adv(self) -> AnyArray:
        """``[n, *shape]``"""
        ...

    @property
    def weight(self) -> AnyArray:
        """``[n]`` in ``[0, 1]``"""
        ...


class AdversarialDistribution(NamedTuple):
    r"""The paper's equation 11: atoms at clean and at adversarial points, with unchanged labels.

    ``1/N sum_i (1 - w_i) delta(x_i, y_i) + w_i delta(x_adv_i, y_i)`` with ``w_i = 1 / kappa_i``.

    Source: Le et al. [le2025], equation 11.

    >>> x, y = jnp.array([[0.0], [1.0]]), jnp.array([0, 1])
    >>> moved = AdversarialDistribution(x, jnp.array([[0.5], [0.75]]), y, jnp.array([1.0, 0.5]))
    >>> moved.coupling_cost(norm=jnp.inf, order=1)
    0.3125
    >>> wasserstein(moved, norm=jnp.inf, order=1)
    0.3125
    """

    x: AnyArray
    """``[n, *shape]``"""
    x_adv: AnyArray
    """``[n, *shape]``"""
    y: AnyArray
    """``[n]`` integers"""
    weight: AnyArray
    """``[n]`` in ``[0, 1]``"""

    @classmethod
    def from_result(cls, x: AnyArray, y: AnyArray, result: Moved) -> "AdversarialDistribution":
        """The distribution that :func:`wdjax.run` found for samples ``x`` with labels ``y``."""
        return cls(x, result.x_adv, y, result.weight)

    def accuracy(
        self, model: Callable[[jax.Array], jax.Array], *, batch_size: int | None = None
    ) -> jax.Array:
        """Mass of correctly classified atoms, by :func:`wdjax.metrics.correct`.

        Source: Le et al. [le2025], Appendix E.
        """
        return self.expected_loss(model, _correct, batch_size=batch_size)

    def expected_loss(
        self,
        model: Callable[[jax.Array], jax.Array],
        loss: losses.Loss = losses.cross_entropy,
        *,
        batch_size: int | None = None,
    ) -> jax.Array:
        """The mean of ``loss(logits, y)`` under the distribution.

        Differentiable in the parameters of the model, the points and the weights.

        Args:
          model: ``[n, *shape] -> [n, K]``, a pytree callable.
          loss: per-sample, such as those of :mod:`wdjax.losses`.
          batch_size: samples on the device at once; all by default.

        Cost: two forward passes a sample.
        """
        _check_distribution(self)
        clean = _evaluate(loss, model, self.x, self.y, batch_size)
        moved = _evaluate(loss, model, self.x_adv, self.y, batch_size)
        # An atom without mass adds nothing, even if its loss is infinite.
        weight = jnp.asarray(self.weight)
        kept = jnp.where((weight < 1) | jnp.isfinite(clean), (1 - weight) * clean, 0.0)
        return jnp.mean(kept + jnp.where((weight > 0) | jnp.isfinite(moved), weight * moved, 0.0))

    def coupling_cost(self, norm: float, order: float) -> float | jax.Array:
        r"""``(mean_i w_i ||x_adv_i - x_i||_r^p)^(1/p)``: an upper bound on W_p.

        A Python float, computed in float64 on the host, unless inside a trace. For order inf, the
        largest distance that any mass moves. Norm 0 counts coordinates.

        Source: Le et al. [le2025], Corollary C.2.
        """
        norms.check_norm(norm, 0)
        order = check_order(order)
        _check_distribution(self)
        if traced(self):
            moved = jnp.asarray(self.x_adv) - self.x
            moved = norms.lp_norm(moved, norm) if norm else sparse.count(moved, 0 * moved)
            return _power_mean(jnp, moved, jnp.asarray(self.weight), order)
        distance = _distances(self.x, self.x_adv, norm)
        return float(_power_mean(np, distance, _float64(self.weight), order))


def _power_mean(xp: ModuleType, distance: _Either, weight: _Either, order: float) -> _Either:
    """``(mean weight distance^p)^(1/p)``, the coupling cost, of distances and weights ``[n]``.

    For p = inf the largest distance that moves. ``xp`` is NumPy or ``jax.numpy``.
    """
    distance = xp.where(weight > 0, distance, 0.0)
    longest = xp.max(distance)
    if order == math.inf:
        return longest
    scale = xp.where(longest > 0, longest, 1.0)
    return scale * xp.mean(weight * (distance / scale) ** order) ** (1 / order)


def _correct(logits: jax.Array, y: jax.Array) -> jax.Array:
    """``[n]``: 1 where the logits' largest class is the label, else 0, as a loss."""
    return metrics.correct(logits, y).astype(logits.dtype)


@functools.partial(distinct.jit, static_argnums=0)
def _batch_loss(
    loss: losses.Loss, model: Callable[[jax.Array], jax.Array], x: jax.Array, y: jax.Array
) -> jax.Array:
    """``[n]``: the loss of a batch."""
    return loss(model(x), y)


def _evaluate(
    loss: losses.Loss,
    model: Callable[[jax.Array], jax.Array],
    points: AnyArray,
    labels: AnyArray,
    batch_size: int | None,
) -> jax.Array:
    """``[n]``: the loss at the points, in batches padded to one size."""
    n = len(labels)
    size = n if batch_size is None else min(batch_size, n)
    if size < 1:
        raise ValueError(f"batch_size must be a positive integer or None, got {batch_size!r}.")
    x, y = jnp.asarray(points), jnp.asarray(labels)
    parts = [
        _batch_loss(
            loss, model, *parallel.pad((x[start : start + size], y[start : start + size]), size)
        )
        for start in range(0, n, size)
    ]
    return jnp.concatenate(parts)[:n]


def _float64(x: ArrayLike) -> _Float64:
    """An array of float64 on the host."""
    return np.asarray(x, np.float64)


def _distances(x: AnyArray, x_adv: AnyArray, norm: float, size: int = 256) -> _Float64:
    """``[n]`` distances of pairs, in float64, computed in blocks to bound the memory."""
    parts = []
    for start in range(0, len(x), size):
        block = slice(start, start + size)
        gap = (_float64(x_adv[block]) - _float64(x[block])).reshape(len(x[block]), -1)
        parts.append(np.linalg.norm(gap, ord=norm, axis=1))
    return np.concatenate(parts)


def _check_distribution(distribution: AdversarialDistribution) -> None:
    """Checks the shapes of a distribution and, outside traces, that its numbers are valid."""
    x, x_adv, y, weight = distribution
    n = jnp.shape(x)[:1]
    if jnp.shape(x_adv) != jnp.shape(x) or jnp.shape(y) != n or jnp.shape(weight) != n or n == (0,):
        raise ValueError(
            "an adversarial distribution needs x and x_adv [n, *shape], y [n] and weight [n] with "
            f"n >= 1, got shapes {[list(jnp.shape(leaf)) for leaf in distribution]}."
        )
    if not jnp.issubdtype(jnp.result_type(y), jnp.integer):
        raise ValueError(f"y must be integer labels, got {jnp.result_type(y)}.")
    if traced(distribution):
        return
    if not np.all((np.asarray(weight) >= 0) & (np.asarray(weight) <= 1)):
        raise ValueError("weight must lie in [0, 1]: the share of a sample's mass that moves.")
    if not (np.all(np.isfinite(x)) and np.all(np.isfinite(x_adv))):
        raise ValueError("x and x_adv must be finite.")


_NOTHING = 1e-12
"""Mass that rounding may leave, in units of one sample's."""


def wasserstein(distribution: AdversarialDistribution, norm: float, order: float) -> float:
    r"""The exact ``W_p`` between an adversarial distribution and its clean samples.

    The ground cost is ``d = ||x' - x||_r + inf 1{y' != y}``, so there is a separate problem for
    each label. Equal atoms are merged; for order 1 the mass that both sides share stays in place.
    If all masses are multiples of one unit (every ``kappa`` an integer) it is an assignment
    problem, solved by ``scipy.optimize.linear_sum_assignment``; else a linear program, solved by
    HiGHS on a growing set of edges until the dual prices prove that none is missing. For order inf
    the least distance that admits a plan is searched for.

    Args:
      distribution: with concrete arrays.
      norm: r, one of 1, 2 and inf, or 0 to count coordinates.
      order: p, a number of at least 1 or inf.

    Returns:
      ``W_p`` in the units of ``x``, at most :meth:`AdversarialDistribution.coupling_cost` up to
      rounding. Everything is float64; a float32 weight ``1 / kappa`` is read as that fraction.

    Raises:
      ValueError: bad shapes, weights outside ``[0, 1]``, points that are not finite, or a trace.

    Cost: on the host; for ``m`` samples of a label ``O(m^2 d)`` distances and ``O((kappa m)^3)``.

    Differs: the paper bounds W_p by the coupling that moves each sample to its own adversarial
      point (Corollary C.2); this is the minimum over all couplings.

    Source: Le et al. [le2025], section 2 and Corollary C.2.

    >>> x, y = jnp.array([[0.0], [1.0]]), jnp.array([0, 0])
    >>> swapped = AdversarialDistribution(x, x[::-1], y, jnp.ones(2))
    >>> swapped.coupling_cost(norm=2, order=1), wasserstein(swapped, norm=2, order=1)
    (1.0, 0.0)
    """
    norms.check_norm(norm, 0)
    order = check_order(order)
    twin = "the method coupling_cost, which can be traced and differentiated"
    host_only("wasserstein", twin, distribution)
    _check_distribution(distribution)
    n = len(distribution.y)
    x, x_adv = (_float64(points).reshape(n, -1) for points in distribution[:2])
    y, weight = np.asarray(distribution.y), _float64(distribution.weight)
    blocks = [
        _block_cost(x[of_class], x_adv[of_class], weight[of_class], norm, order)
        for of_class in (y == label for label in np.unique(y[weight > 0]))
    ]
    scale = max((longest for longest, _ in blocks), default=0.0)
    if scale == 0 or order == math.inf:
        return scale
    total = sum(cost * (longest / scale) ** order for longest, cost in blocks)
    return float(scale * (total / n) ** (1 / order))


def _block_cost(
    x: _Float64, x_adv: _Float64, weight: _Float64, norm: float, order: float
) -> tuple[float, float]:
    """The transport cost of one label's samples, as ``(scale, cost in units of scale^p)``.

    ``x``, ``x_adv`` are ``[m, d]``, ``weight`` ``[m]``; mass is in units of one sample's. For order
    inf the scale is the distance itself.
    """
    from scipy.spatial.distance import cdist

    points, index = np.unique(np.concatenate([x, x_adv]), axis=0, return_inverse=True)
    stayed, moved = np.split(index.reshape(-1), 2)
    count = len(points)
    demand = np.bincount(stayed, minlength=count).astype(float)
    supply = _float64(np.bincount(stayed, 1 - weight, count) + np.bincount(moved, weight, count))
    if order == 1:
        shared = np.minimum(supply, demand)
        supply, demand = supply - shared, demand - shared
    sources, sinks = supply > _NOTHING, demand > _NOTHING
    if not sources.any():
        return 0.0, 0.0
    name = {0: "hamming", 1: "cityblock", 2: "euclidean", math.inf: "chebyshev"}[norm]
    gap = cdist(points[sources], points[sinks], name)
    gap *= points.shape[1] if norm == 0 else 1  # Of which hamming is the share.
    supply, demand = supply[sources], demand[sinks]
    if order == math.inf:
        reach = _distances(x[weight > 0], x_adv[weight > 0], norm).max()
        return exact_transport.bottleneck(gap, supply, demand, reach), 1.0
    longest = float(gap.max())
    if longest == 0:
        return 0.0, 0.0
    return longest, exact_transport.least_cost((gap / longest) ** order, supply, demand)
