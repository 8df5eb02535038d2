"""The constrained Sinkhorn projection in logarithms, stable in float32 for any lambda and step."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from wdjax import loops
from wdjax.core import Array
from wdjax.image import plans
from wdjax.image.prices import (
    NOTHING,
    ImageProblem,
    Spent,
    find_price,
    log_levels,
    log_receive,
    log_spent,
    log_whole,
)

_SHIFTS, _LEAP = 2, 20.0
"""Newton steps for the columns' mass, and the bound on one step."""


_CLOSE = 0.1
"""Over-relaxation begins once the columns miss at most this share of the mass."""


class Duals(NamedTuple):
    """The dual variables, also a warm start."""

    column: Array
    """``[n, C, L]``: beta, the multipliers of the columns."""
    price: Array
    """``[n]``: psi, the multiplier of the cost."""


class Projection(NamedTuple):
    """The result of a projection."""

    plan: Array
    """``[n, C, O, L]``: exact rows, within the budget; its columns equal ``z`` at convergence."""
    z: Array
    """``[n, C, L]``: the primal solution of equation 10."""
    duals: Duals
    rounds: Array
    """``[n]``: number of iterations."""
    missed: Array
    """``[n]``: ``sum |columns - z|``, as a share of the mass."""


def log_omega(t: Array) -> Array:
    r"""``log W(exp(t))``, the root y of ``y + exp(y) = t``, for any t.

    Lambert's W of an exponential is Wright's omega; its logarithm never overflows.

    Source: the column step of Hu et al. [hu2020], equation 9.

    >>> y = log_omega(jnp.array([-50.0, 1.0, 1e4]))
    >>> [round(float(v)) for v in jnp.exp(y)]
    [0, 1, 9991]
    """
    large = jnp.maximum(t, 2.0)
    y = jnp.where(t < 1.5, t - jnp.exp(jnp.minimum(t, 0.0)) / 2, jnp.log(large - jnp.log(large)))
    for _ in range(4):
        grown = jnp.exp(y)
        y = y - (y + grown - t) / (1 + grown)
    return y


def no_duals(task: ImageProblem) -> Duals:
    """The dual variables of a cold start."""
    return Duals(jnp.zeros_like(task.x), jnp.ones(len(task.x), task.x.dtype))


def project(
    task: ImageProblem,
    w: Array,
    lam: Array | float,
    duals: Duals,
    *,
    iterations: int,
    tolerance: Array | float = 1e-3,
    relax: Array | float = 1.5,
    capped: bool = True,
    unrolled: bool = False,
) -> Projection:
    r"""The image near ``w`` in the ball and the box: equation 7, solved in the dual.

    ``min lam / 2 |w - z|^2 + sum pi log pi`` over plans ``pi`` with rows x, columns ``z <= r`` and
    cost within the budget, all in units of the image's mass. Blocks of dual variables are maximised
    in turn: the rows together with the price of cost, exactly, since offsets have few distinct
    lengths; the columns together with the caps, where ``z = min(r, W(e^t) / lam)``.

    Args:
      task: the ball of every sample.
      w: ``[n, C, L]``, the point to project, such as a gradient step.
      lam: weight of the fit; a large one is close to the Euclidean projection, and slow.
      duals: warm start; those of the last projection save iterations.
      iterations: maximum number of iterations.
      tolerance: a sample is done once ``missed`` is smaller.
      relax: over-relaxation of the column step, in [1, 2).
      capped: with False the problem without caps, equation 6.
      unrolled: take all iterations, in a differentiable loop.

    Returns:
      A :class:`Projection`. Its plan is within the budget, and so proves the cost of its columns;
      these may be overfull by up to ``missed``, and need :func:`~wdjax.image.plans.repair`.

    Cost: 50 exponentials a pixel and iteration for a window of 5.

    Differs: Algorithm 1 of the paper tests ``phi < 0`` after making phi at least 0, and has its
      branches swapped; its ``beta_1`` contains phi, which is 0 there. The price of cost is solved
      for, instead of one Newton step, and so is a constant of the rows that gives ``z`` the mass of
      x. Pixels without mass are masked instead of set to 1e-15.

    Source: Hu et al. [hu2020], equations 7 to 10 and Appendix A.3.
    """
    mass = jnp.sum(task.x, axis=(1, 2))
    dual = _dual(task, w, lam, mass, capped, unrolled)
    duals, rounds, gap = _ascend(
        lambda now: _turn(dual, now, relax), duals, iterations, tolerance, unrolled
    )
    row, price = _fit_rows(dual, duals, 12)
    _, log_z = _fit_columns(dual, row, price)
    plan = _plan(dual.unit, duals.column, price, dual.cells) * mass[:, None, None, None]
    z = jnp.where(dual.cells, jnp.exp(log_z), 0.0) * mass[:, None, None]
    return Projection(plan, z, Duals(duals.column, price), rounds, gap)


class _Dual(NamedTuple):
    """The constants of a dual problem, in units of each image's mass."""

    unit: ImageProblem
    w: Array
    """``[n, C, L]``: the point to project."""
    lam: Array
    """``[n, 1, 1]``"""
    full: Array
    """``[n, 1, 1]``: the logarithm of a pixel's capacity."""
    log_x: Array
    """``[n, C, L]``"""
    cells: Array
    """``[1, 1, L]``: which entries are pixels."""
    capped: bool
    unrolled: bool


def _dual(
    task: ImageProblem, w: Array, lam: Array | float, mass: Array, capped: bool, unrolled: bool
) -> _Dual:
    """The problem of :func:`project` for images of mass ``[n]``, divided by it."""
    share = 1 / jnp.where(mass > 0, mass, 1.0)
    unit = ImageProblem(
        task.space, task.x * share[:, None, None], task.weights, task.budget * share
    )
    w = w * share[:, None, None]
    full = jnp.log(task.space.high * share)[:, None, None]
    lam = jnp.broadcast_to(jnp.asarray(lam, w.dtype), mass.shape)[:, None, None]
    stencil = task.space.stencil
    cells = jnp.asarray(stencil.valid()[stencil.center])[None, None]
    log_x = jnp.where(unit.x > 0, jnp.log(jnp.where(unit.x > 0, unit.x, 1.0)), NOTHING)
    return _Dual(unit, w, lam, full, log_x, cells, capped, unrolled)


def _fit_rows(dual: _Dual, duals: Duals, steps: int) -> tuple[Array, Array]:
    """alpha with the sign of equation 8, ``[n, C, L]``, and the price ``[n]``."""
    unit, space = dual.unit, dual.unit.space
    sums = log_levels(space.stencil, jnp.where(dual.cells, duals.column, NOTHING), space.power)

    def spend(price: Array) -> Spent:
        return log_spent(unit, sums, price)

    price = find_price(unit, spend, duals.price, steps, unrolled=dual.unrolled)
    whole = log_whole(unit, sums, price)
    return jnp.where(dual.log_x > NOTHING, dual.log_x - whole, NOTHING), price


def _fit_columns(dual: _Dual, row: Array, price: Array) -> tuple[Array, Array]:
    """beta and ``log z``, ``[n, C, L]``, with a constant added to rows so that masses agree."""
    space, lam = dual.unit.space, dual.lam
    arriving = log_receive(space.stencil, row, price[:, None] * dual.unit.weights, space.power)

    def fit(shift: Array) -> Array:
        log_z = log_omega(jnp.log(lam) + lam * dual.w + arriving + shift) - jnp.log(lam)
        return jnp.minimum(log_z, dual.full) if dual.capped else log_z

    shift = _shift(dual, fit)
    log_z = fit(shift)
    return log_z - arriving - shift, log_z


def _turn(dual: _Dual, duals: Duals, relax: Array | float) -> tuple[Duals, Array]:
    """One iteration over both blocks: the new duals, and what the columns missed ``[n]``."""
    row, price = _fit_rows(dual, duals, 2)
    column, log_z = _fit_columns(dual, row, price)
    # Compare the mass under the new rows and old columns with the mass required.
    shifted = log_z - column
    put = jnp.exp(shifted + duals.column)
    gap = jnp.sum(jnp.where(dual.cells, jnp.abs(put - jnp.exp(log_z)), 0.0), axis=(1, 2))
    size = jnp.where(gap < _CLOSE, relax, 1.0)[:, None, None]  # May diverge far away.
    moved = duals.column + size * (column - duals.column)
    return Duals(jnp.where(dual.cells, moved, 0.0), price), gap


def _shift(dual: _Dual, fit: Callable[[Array], Array]) -> Array:
    """The constant ``[n, C, 1]`` to add to the rows so that ``z`` has the mass of ``x``.

    It is one more block of the dual; without it, the mass would converge last. ``fit`` gives
    ``log z`` ``[n, C, L]`` for a constant.
    """
    mass = jnp.sum(dual.unit.x, axis=2)
    shift = jnp.zeros((*mass.shape, 1), mass.dtype)
    for _ in range(_SHIFTS):
        log_z = fit(shift)
        z = jnp.where(dual.cells, jnp.exp(log_z), 0.0)
        rate = 1 / (1 + dual.lam * z)
        free = log_z < dual.full if dual.capped else True
        total = jnp.sum(z, axis=2)
        slope = jnp.sum(jnp.where(free, z * rate, 0.0), axis=2)
        # On logarithms, so that steps from far below do not overshoot.
        ratio = jnp.log(jnp.maximum(mass, 1e-20) / jnp.maximum(total, 1e-20))
        step = ratio * total / jnp.maximum(slope, 1e-6 * total + 1e-20)
        step = jnp.where(mass > 0, jnp.clip(step, -_LEAP, _LEAP), 0.0)
        shift = shift + step[..., None]
    return shift


def _ascend(
    turn: Callable[[Duals], tuple[Duals, Array]],
    duals: Duals,
    iterations: int,
    tolerance: Array | float,
    unrolled: bool,
) -> tuple[Duals, Array, Array]:
    """Iterates ``turn``, which maps duals to (duals, gap), until every sample has converged.

    The gap, ``[n]``, is the share of mass by which columns miss their target; a sample within the
    tolerance keeps its duals. ``unrolled`` makes all iterations, so that reverse-mode gradients
    exist. Returns the duals, the iterations ``[n]`` and the last gap ``[n]`` of each sample.
    """

    class Ascent(NamedTuple):
        duals: Duals
        gap: Array
        rounds: Array
        number: Array

    def step(at: Ascent) -> Ascent:
        going = at.gap > tolerance
        duals, gap = turn(at.duals)
        kept = Duals(
            jnp.where(going[:, None, None], duals.column, at.duals.column),
            jnp.where(going, duals.price, at.duals.price),
        )
        gap = jnp.where(going, jnp.where(jnp.isnan(gap), jnp.inf, gap), at.gap)
        return Ascent(kept, gap, at.rounds + going.astype(jnp.int32), at.number + 1)

    def go_on(at: Ascent) -> Array:
        return (at.number < iterations) & jnp.any(at.gap > tolerance)

    none = jnp.zeros(len(duals.price), jnp.int32)
    begun = Ascent(duals, jnp.full(len(none), jnp.inf, duals.price.dtype), none, jnp.zeros((), int))
    if unrolled:
        last = loops.fori_loop(0, iterations, lambda _, at: step(at), begun)
    else:
        last = loops.while_loop(go_on, step, begun)
    return last.duals, last.rounds, last.gap


def _plan(task: ImageProblem, column: Array, price: Array, cells: Array) -> Array:
    """``[n, C, O, L]``: the plan of given duals in which every pixel sends exactly its mass.

    ``column`` ``[n, C, L]`` are the columns' multipliers, ``price`` ``[n]`` that of the cost;
    ``cells`` is not used.
    """
    stencil = task.space.stencil
    costs = jnp.asarray(stencil.costs(task.space.power), column.dtype)
    dear = price[:, None, None] * task.weights[:, :, None] * costs[None, None]
    valid = jnp.asarray(stencil.valid())[None, None]
    scores = jnp.where(valid, stencil.of_targets(column) - dear[..., None], -jnp.inf)
    best = jnp.max(jnp.where(valid, scores, NOTHING), axis=2, keepdims=True)
    grown = jnp.where(valid, jnp.exp(jnp.where(valid, scores - best, 0.0)), 0.0)
    total = jnp.sum(grown, axis=2)
    each = task.x / jnp.where(total > 0, total, 1.0)
    return plans.exact_rows(task.space, grown * each[:, :, None], task.x)
