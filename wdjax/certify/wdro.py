r"""Certificates for distributions: bounds over the Wasserstein ball Omega_p of equation 3."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import losses, norms
from wdjax.balls import Lp
from wdjax.bounds import margins
from wdjax.bounds.region import Box
from wdjax.certify import pointwise
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import TWIN, host_only
from wdjax.core import Classifier
from wdjax.lipschitz import margin
from wdjax.parallel import AnyArray
from wdjax.precision import full_precision

Numbers = npt.NDArray[np.float64]


@full_precision
def wdro_bound(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: float,
    eps: npt.ArrayLike,
    order: float,
    loss: losses.Loss = losses.cross_entropy,
    box: Box = (0.0, 1.0),
    constant: float | None = None,
    batch_size: int = 64,
) -> Numbers:
    r"""An upper bound of the expected loss over all distributions in ``Omega_order(eps)``.

    It is ``E_N[loss] + L eps``, equations 4 and 8, where ``L`` is the largest Lipschitz constant of
    a margin of a present label over the whole domain. It holds for every order p >= 1, since
    ``W_1 <= W_p``. For order inf no mass moves further than ``eps``, so the mean of the loss's
    bounds over the samples' balls holds too and is taken if smaller.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, continuous where its program selects.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      eps: budget, a number or an array of them, in the units of ``x``.
      order: p, a number at least 1, or inf.
      loss: ``losses.cross_entropy`` or ``losses.margin``.
      box: ``(low, high)``, or None for all of space.
      constant: a valid Lipschitz constant of the loss over the box, if known; computed otherwise.
      batch_size: samples at once.

    Returns:
      Bounds in the shape of ``eps``, float64.

    Raises:
      ValueError: another loss (the true DLR is not Lipschitz), a bad order, a negative constant,
        bad samples, or a trace.

    Cost: one Lipschitz constant, and for order inf one :func:`certify.margin_bounds` a budget.

    Differs: the paper's ``L`` counts all labels and is at least as large; see
    :func:`certify.margin_lipschitz`.

    Source: Le et al. [le2025], equations 4 and 8.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.75, 0.25]]), jnp.array([0])
    >>> float(wdro_bound(model, x, y, norm=jnp.inf, eps=0.25, order=1, loss=losses.margin).round(3))
    0.0
    """
    arguments.check(model=model, x=x, y=y, eps=eps, ball=Lp(norm, box))
    how: dict[str, Any] = {"norm": norm, "box": box, "batch_size": batch_size}
    return straight(ask(model, x, y, eps, order, loss, constant, how))


class Asked(NamedTuple):
    """The checked arguments of a bound of an expected loss."""

    x: jax.Array
    y: jax.Array
    norm: float
    loss: losses.Loss
    budgets: Numbers
    order: float
    constant: float
    within: Callable[[float], Numbers]
    """Maps a radius to upper bounds ``[n]`` of the loss within it."""


def ask(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    eps: npt.ArrayLike,
    order: float,
    loss: losses.Loss,
    constant: float | None,
    how: dict[str, Any],
) -> Asked:
    """Checks the arguments of :func:`wdro_bound` and computes the constant if it is None.

    ``x`` is ``[n, *shape]``, ``y`` ``[n]``; ``how`` holds further arguments of
    :func:`margin_bounds`.
    """
    values_of, norm, box = of_margins(loss), norms.check_norm(how["norm"]), how["box"]
    order = validate.check_order(order)
    host_only("the bound of a loss", TWIN, model, x, y, eps)
    budgets = check_budgets(eps)
    if constant is not None and not constant >= 0:
        raise ValueError(f"constant must be at least 0, got {constant!r}.")
    x, y = validate.check_samples(model, x, y, box)

    def within(radius: float) -> Numbers:
        low = pointwise.margin_bounds(model, x, y, eps=radius, **how)
        values = values_of(np.asarray(low, float))
        return values + ROUNDING * np.abs(values)

    if constant is None:
        constant = lipschitz_constant(model, x, y, norm=norm, box=box)
    return Asked(x, y, norm, loss, budgets, order, float(constant), within)


def straight(asked: Asked) -> Numbers:
    """The bounds of :func:`wdro_bound`, shaped like the budgets."""
    budgets = asked.budgets
    cost = np.where(budgets == 0, 0.0, asked.constant * np.where(budgets == 0, 1.0, budgets))
    bound = np.mean(asked.within(0.0)) + cost * (1 + ROUNDING)
    if asked.order == math.inf:
        local = [float(np.mean(asked.within(float(e)))) for e in budgets.ravel()]
        bound = np.minimum(bound, np.reshape(local, budgets.shape))
    return np.asarray(bound)


@full_precision
def lipschitz_constant(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: float,
    box: Box = (0.0, 1.0),
) -> float:
    """The ``L`` of :func:`wdro_bound`: the largest Lipschitz constant of a present label's margin.

    Rivals are left out if their logit is more than 50 below two others everywhere in the box, by
    intervals, such as masked classes. Other rivals count even if they never win, and so do all
    without a box.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` floats; only their shape matters.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      box: ``(low, high)``, or None for all of space.

    Returns:
      A float; inf if the model computes in a shorter type than float32, since its rounding is far
      from the exact function, to which constants apply.

    Raises:
      ValueError: as :func:`margin_lipschitz`, or a trace.

    Source: Le et al. [le2025], equation 6, by interval Jacobians.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> round(lipschitz_constant(model, jnp.zeros((1, 2)), jnp.array([0]), norm=jnp.inf), 3)
    2.0
    """
    arguments.check(model=model, x=x, y=y)
    validate.shapes_of(model, x)
    twins = "certify.margin_lipschitz, or lipschitz.trainable_lipschitz for gradients"
    host_only("lipschitz_constant", twins, model, y)
    if _is_short(model, x):
        return math.inf
    ends = (-math.inf, math.inf) if box is None else box
    lower, upper = (jnp.full(x.shape[1:], end, x.dtype) for end in ends)
    labels = np.unique(np.asarray(y))
    sizes = margin.margin_lipschitz(model, lower, upper, norm=norm, labels=labels)
    found = np.asarray(sizes, float)
    low, up = (np.asarray(end, float) for end in margin.logits(model, lower, upper))
    # At least one of the two others is a rival too: the margin loss never attains its maximum at
    # the hidden class, whose weight in the cross-entropy's gradient is at most exp(-FAR).
    hidden = np.sum(low[:, None] > up + _FAR, axis=0) >= 2
    most = np.max(np.where(hidden, 0.0, found))
    return float(most + math.exp(-_FAR) * np.sum(np.max(found, axis=0)[hidden]))


def _is_short(model: Classifier, x: AnyArray) -> bool:
    """Whether the model computes in floats of fewer than 32 bits for samples ``[n, *shape]``."""
    found = list[Any]()

    def look(model: Classifier) -> None:
        found.extend(margins.network(model, jnp.asarray(x)).short)

    jax.eval_shape(look, model)
    return bool(found)


_FAR = 50.0
"""How far a class's logit must be below two others everywhere for the class to be left out."""


def certified_accuracy(radius: npt.ArrayLike, eps: npt.ArrayLike, order: float) -> Numbers:
    r"""A lower bound of the accuracy under every distribution in ``Omega_order(eps)``.

    Sound because moving mass is the only way to harm: a distribution of ``Omega_p`` has an optimal
    coupling with the data that keeps labels (changing one costs infinitely much). Mass of sample i
    that moves at most its certified radius ``R_i`` stays correct, so an error of mass ``w_i / n``
    there costs at least ``w_i R_i^p / n``. The adversary's total is at most ``eps^p``; the largest
    error is the fractional knapsack ``max { mean(w) : mean(w R^p) <= eps^p, 0 <= w <= 1 }``, which
    takes the cheapest samples first. For order inf, all samples with ``R_i < eps`` count as errors:
    the point-wise certified accuracy ``mean 1{correct_i and R_i >= eps}``.

    Args:
      radius: ``[n]`` certified radii in the units of ``eps``; they must be 0 for samples that are
        misclassified or not certified: pass ``jnp.where(correct, radius, 0)`` otherwise.
      eps: budget, a number or an array of them.
      order: p, a number at least 1, or inf.

    Returns:
      Accuracies in the shape of ``eps``, float64, rounded down; for budget 0 and order inf they are
      shares of the samples, rounded to the nearest float.

    Raises:
      ValueError: negative or NaN radii or budgets, a bad order, or a trace.

    Cost: a sort on the host.

    Source: [definitions]; over ``Omega_p`` Le et al. [le2025], Algorithm 2, applied to certified
      radii.

    >>> certified_accuracy([0.0, 1.0, 2.0, 4.0], [0.0, 0.5], 1).round(3).tolist()
    [0.75, 0.375]
    """
    arguments.check(eps=eps)
    host_only("certified_accuracy", "the radii themselves, of certify.radius", radius, eps)
    radii = np.sort(np.asarray(radius, float).ravel())
    if radii.size == 0 or not bool(np.all(radii >= 0)):
        raise ValueError("radius must hold at least one number, none negative or NaN.")
    order = validate.check_order(order)
    budgets = check_budgets(eps)
    if order == math.inf:
        held = (radii >= budgets[..., None]) & (radii > 0)
        return np.asarray(np.mean(held, axis=-1))
    # In units of the budget, so that no power overflows; a sample of radius inf is never lost.
    accuracy = [_unbought(radii, float(e), order) for e in budgets.ravel()]
    return np.maximum(np.reshape(accuracy, budgets.shape) - ROUNDING * (budgets > 0), 0.0)


def _unbought(radius: Numbers, eps: float, order: float) -> float:
    """The share of samples that stay correct, if one budget buys flips at the certified radii.

    ``radius`` ``[n]`` is sorted; the cheapest samples are bought first, the last one in part.
    """
    if eps == 0:
        return float(np.mean(radius > 0))
    cost = (np.minimum(radius / eps, 1e300 ** (1 / order)) ** order) * (1 - ROUNDING)
    spent = np.cumsum(cost)
    whole = int(np.searchsorted(spent, radius.size, side="right"))
    if whole == radius.size:
        return 0.0
    left = radius.size - (spent[whole - 1] if whole else 0.0)
    return (radius.size - whole - min(left / cost[whole], 1.0)) / radius.size


ROUNDING = 1e-9
"""Budgets and results are widened by this fraction, far above the rounding of float64 sums."""


def _cross_entropy(low: Numbers) -> Numbers:
    """Upper bounds ``[n]`` of ``log(1 + sum_j exp(z_j - z_y))``, from bounds of ``z_y - z_j``."""
    return np.logaddexp(0.0, np.logaddexp.reduce(-low, axis=-1))


def _margin(low: Numbers) -> Numbers:
    """``[n]``: upper bounds of the margin loss, from lower bounds ``[n, K]`` of the margins."""
    return np.max(-low, axis=-1)


_LOSSES: dict[losses.Loss, Callable[[Numbers], Numbers]] = {
    losses.cross_entropy: _cross_entropy,
    losses.margin: _margin,
}


def of_margins(loss: losses.Loss) -> Callable[[npt.NDArray[Any]], Numbers]:
    """The function from lower bounds of margins, ``[n, K]``, to upper bounds of a loss, ``[n]``."""
    found = _LOSSES.get(loss)
    if found is None:
        raise ValueError(
            "loss must be losses.cross_entropy or losses.margin: no Lipschitz certificate holds "
            f"for {getattr(loss, '__name__', loss)!r}."
        )
    return found


def beyond(loss: losses.Loss, slope: npt.NDArray[Any], classes: int) -> tuple[Numbers, Numbers]:
    """``(offset, slope)``, ``[n]`` each, of a linear bound of a loss by distance, if the margin
    loss is at most ``slope`` times the distance."""
    if loss is losses.margin:
        return np.zeros(len(slope)), slope
    return np.full(len(slope), math.log(classes)), np.maximum(slope, 0.0)


def check_budgets(eps: npt.ArrayLike) -> Numbers:
    """Checks that budgets are finite and not negative; returns them as float64."""
    budgets = np.asarray(eps, float)
    if not bool(np.all(budgets >= 0) and np.all(np.isfinite(budgets))):
        raise ValueError(f"eps must be finite and at least 0, got {budgets!r}.")
    return budgets
