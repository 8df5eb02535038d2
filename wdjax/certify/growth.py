r"""The growth-profile bound of the expected loss over a Wasserstein ball.

The profile ``psi_i(t)`` of sample i bounds its loss within the distance t. It says more than a
Lipschitz constant: losses are bounded on a bounded domain, and near the data they rise slowly.
Distributions of ``Omega_p(eps)`` move the mass of sample i to distances t with
``mean t^p <= eps^p``, so that the expected loss is at most the dual value, for every ``lam >= 0``,

    lam eps^p + mean_i max_t (psi_i(t) - lam t^p).

Its minimum over ``lam`` is the bound by the profiles' concave majorants as functions of ``t^p``.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import losses
from wdjax.balls import Lp
from wdjax.bounds.margins import Method
from wdjax.bounds.region import Box
from wdjax.certify import asymptote, wdro
from wdjax.checks import arguments
from wdjax.core import Classifier
from wdjax.parallel import AnyArray
from wdjax.precision import full_precision

Numbers = npt.NDArray[np.float64]

_RADII, _RATIO = 120, 1.2
"""Default radii: the largest number of them, and the least ratio of neighbours while fewer."""
_LEVELS = 200
"""Number of multipliers ``lam`` in a grid."""


class Profile(NamedTuple):
    """Upper bounds of each sample's loss by distance: continuous functions in ``R`` pieces.

    Piece k begins at ``start``, rises from ``low`` to ``high`` with slope ``constant`` until
    ``end``, and is flat until the next piece; these arrays are ``[n, R]``. Beyond the last radius
    an unbounded domain has the bound ``far``.
    """

    start: Numbers
    end: Numbers
    low: Numbers
    high: Numbers
    constant: float
    last: float
    """The last radius; inf if the domain is bounded, where no distance is beyond."""
    far: tuple[Numbers, Numbers]
    """``(offset, slope)``, ``[n]`` each: at distances ``t >= last`` a bound is offset + slope t."""


@full_precision
def growth_bound(
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
    radii: npt.ArrayLike | None = None,
    method: Method = "auto",
    batch_size: int = 64,
) -> Numbers:
    r"""An upper bound of the expected loss over ``Omega_order(eps)``, at most ``E_N + L eps``.

    (Each of these two bounds is rounded upwards by itself.) The domain is the box, or all of space.
    A sample's profile combines bounds of its loss within each radius with the Lipschitz constant.
    The last radius covers a box. In all of space the profile continues beyond it with the constant
    as slope, or with a bound of the slope at infinity for programs of affine maps, ReLUs and
    maxima. For order inf the bound is that of :func:`wdro_bound`.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, continuous where its program selects.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      eps: budget, a number or an array of them, in the units of ``x``.
      order: p, a number at least 1, or inf.
      loss: ``losses.cross_entropy`` or ``losses.margin``.
      box: ``(low, high)``, or None for all of space.
      constant: a valid Lipschitz constant of the loss over the domain, inf if none is known;
        computed by default.
      radii: increasing positive distances; by default at most 121, from a fiftieth of the least
        budget to the diameter of the box or a hundred times the largest budget.
      method: how margins are bounded, as in :func:`certify.margin_bounds`.
      batch_size: number of samples at once.

    Returns:
      Bounds in the shape of ``eps``, float64.

    Raises:
      ValueError: another loss, a bad order, budgets, radii or constant, bad samples, or a trace.

    Cost: one Lipschitz constant, and one :func:`certify.margin_bounds` a radius.

    Source: the dual of the fractional knapsack of Le et al. [le2025], Corollary C.2, with bounds in
    place of distances.

    >>> import jax.numpy as jnp
    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.75, 0.25]]), jnp.array([0])
    >>> how = {"norm": jnp.inf, "order": 1, "loss": losses.margin}
    >>> growth_bound(model, x, y, eps=[0.25, 2.0], **how).round(2).tolist()  # the box ends at 1
    [0.0, 1.0]
    """
    arguments.check(model=model, x=x, y=y, eps=eps, ball=Lp(norm, box))
    how: dict[str, Any] = {"norm": norm, "box": box, "method": method, "batch_size": batch_size}
    asked = wdro.ask(model, x, y, eps, order, loss, constant, how)
    budgets, most = asked.budgets, Lp(norm, box).diameter(x.shape[1:])
    grid = _grid(radii, budgets, most)
    if asked.order == math.inf:
        return wdro.straight(asked)
    levels = np.stack([asked.within(float(t)) for t in (0.0, *grid)], axis=1)
    profile = _joined(grid, levels, asked.constant)
    if most == math.inf:
        profile = _endless(profile, model, asked, float(grid[-1]))
    found = [_dual(profile, float(e), asked.order) for e in budgets.ravel()]
    return np.reshape(found, budgets.shape)


def _endless(profile: Profile, model: Classifier, asked: wdro.Asked, last: float) -> Profile:
    """The profile with ``far``, a linear bound of each sample's loss beyond the radius ``last``."""
    labels, index = np.unique(np.asarray(asked.y), return_inverse=True)
    (_, classes) = jax.eval_shape(model, asked.x[:1]).shape
    end = jnp.asarray(last, asked.x.dtype)
    steep = asymptote.slopes(model, asked.x, jnp.asarray(labels), end, asked.norm, "auto")
    far = wdro.beyond(asked.loss, np.asarray(steep, float)[index], classes)
    return profile._replace(last=last, far=far)


def _grid(radii: npt.ArrayLike | None, budgets: Numbers, most: float) -> Numbers:
    """``[R]``: the radii of the profiles, those given (checked) or default ones.

    Both end at ``most``, the domain's diameter, if that is finite. Default radii grow geometrically
    from a fiftieth of the least positive budget.
    """
    if radii is None:
        positive = budgets[budgets > 0]
        least = 0.02 * float(np.min(positive, initial=math.inf))
        last = most if math.isfinite(most) else 100 * float(np.max(positive, initial=0.0))
        if not 0 < least < last:
            return np.array([last if last > 0 else 1.0])
        count = math.ceil(math.log(last / least) / math.log(_RATIO))
        return np.geomspace(least, last, min(count, _RADII) + 1)
    grid = np.asarray(radii, float)
    rising = np.isfinite(grid) & (np.diff(grid, prepend=0.0) > 0) if grid.ndim == 1 else False
    if not grid.size or not np.all(rising):
        raise ValueError(f"radii must be increasing, finite and positive, [R], got {radii!r}.")
    return np.append(grid[grid < most], most) if math.isfinite(most) else grid


def _joined(grid: Numbers, levels: Numbers, constant: float) -> Profile:
    """The profiles from bounds ``levels`` ``[n, R + 1]`` of the losses within 0 and each radius.

    Bounds are lowered until they rise with the radius, and by no more than ``constant`` (a
    Lipschitz constant, or inf) per unit of distance.
    """
    levels = np.minimum.accumulate(levels[:, ::-1], axis=1)[:, ::-1]
    slope = constant * (1 + wdro.ROUNDING)
    start = np.concatenate([[0.0], grid[:-1]])
    value = levels[:, 0]
    parts = []
    for begin, stop, level in zip(start, grid, levels[:, 1:].T):
        rise = slope * (stop - begin) if slope else 0.0
        reached = np.minimum(level, value + rise)
        step = (reached - value) / slope if 0 < slope < math.inf else np.zeros_like(value)
        end = begin + np.nan_to_num(step, nan=0.0) * (1 - wdro.ROUNDING)
        parts.append((end, value, reached))
        value = reached
    end, low, high = (np.stack(part, axis=1) for part in zip(*parts))
    none = np.zeros(len(levels))
    return Profile(np.broadcast_to(start, end.shape), end, low, high, slope, math.inf, (none, none))


def _dual(profile: Profile, eps: float, order: float) -> float:
    """The least dual value for one budget ``eps``, over a grid of multipliers.

    The grid is refined twice. Every value is a sound bound of the expected loss. The result is at
    most the Lipschitz bound.
    """
    if eps == 0:
        return float(np.mean(profile.low[:, 0]))
    clean = float(np.mean(profile.low[:, 0]))
    best = clean + profile.constant * eps if profile.constant else clean
    # In units of the budget, so that no power overflows.
    scaled = profile._replace(
        start=profile.start / eps,
        end=profile.end / eps,
        constant=profile.constant * eps,
        last=profile.last / eps,
        far=(profile.far[0], profile.far[1] * eps),
    )
    rise = np.clip(np.max(profile.high, initial=1.0) - np.min(profile.low), 1e-9, 1e30)
    last = float(np.max(scaled.end, initial=1.0)) ** order
    levels = rise * np.geomspace(1e-4 / max(last, 1.0), 1e8, _LEVELS)
    for _ in range(3):
        values = [_value(scaled, level, order) for level in levels]
        index = int(np.argmin(values))
        best = min(best, values[index])
        near = levels[max(index - 1, 0)], levels[min(index + 1, len(levels) - 1)]
        levels = np.geomspace(*near, _LEVELS)
    for level in (scaled.constant, float(np.max(scaled.far[1]))):
        if 0 < level < math.inf:
            best = min(best, _value(scaled, level, order))
    return float(best + wdro.ROUNDING * abs(best))


def _value(profile: Profile, level: float, order: float) -> float:
    """The dual value ``lam + mean_i max_t (psi_i(t) - lam t^p)`` at the multiplier ``level``.

    The profile's distances are in units of the budget. The maximum is taken over the ends of all
    pieces and the stationary points within them, and beyond the last radius over :func:`_behind`.
    """
    slope, end = profile.constant, profile.end
    at = [profile.low - level * profile.start**order, profile.high - level * end**order]
    if order > 1 and slope < math.inf:
        inner = np.clip(_turn(np.asarray(slope), level, order), profile.start, end)
        at.append(profile.low + slope * (inner - profile.start) - level * inner**order)
    most = np.max(np.stack(at), axis=(0, 2))
    if profile.last < math.inf:
        last, (base, steep) = profile.last, profile.far
        behind = _behind(base, steep, last, level, order)
        if slope < math.inf:
            on = profile.high[:, -1] - slope * last
            behind = np.minimum(behind, _behind(on, np.full_like(on, slope), last, level, order))
        most = np.maximum(most, behind)
    return float(level + np.mean(most))


def _turn(slope: Numbers, level: float, order: float) -> Numbers:
    """The ``t`` at which ``slope t - level t^order`` is largest, for ``order > 1``."""
    return np.asarray((np.maximum(slope, 0.0) / (level * order)) ** (1 / (order - 1)))


def _behind(base: Numbers, slope: Numbers, last: float, level: float, order: float) -> Numbers:
    """``[n]``: ``max_{t >= last} base + slope t - level t^order``; inf where it is unbounded."""
    if order == 1:
        far = np.where(slope <= level, last, math.inf)
    else:
        far = np.maximum(_turn(slope, level, order), last)
    finite = np.where(np.isfinite(far), far, last)
    return np.where(np.isfinite(far), base + slope * finite - level * finite**order, math.inf)
