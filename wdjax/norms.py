r"""The l_r geometry of the papers: norms, dual maximisers (1), ball projections (2), ||J||_{r->s}.

Points come in batches ``[n, *shape]``; a norm is taken over everything but the first axis.
``norm`` is always one of 1, 2 and ``jnp.inf``.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from wdjax import distinct, loops

NORMS = (1, 2, math.inf)
NAMES = {"l1": 1, "l2": 2, "linf": math.inf}


class Bounds(NamedTuple):
    """A closed interval ``[lower, upper]`` that contains the true value."""

    lower: jax.Array
    upper: jax.Array


def check_norm(norm: float, *more: float) -> float:
    """Returns ``norm`` as a Python number; a ``ValueError`` unless it is 1, 2 or inf.

    Args:
      norm: what was given.
      *more: what else is allowed: 0.

    Raises:
      ValueError: it is not 1, 2 or inf.

    >>> check_norm(np.float32(2)), check_norm(0, 0)
    (2, 0)
    """
    for known in (*more, *NORMS):
        if np.ndim(norm) == 0 and not isinstance(norm, (str, bytes)) and norm == known:
            return known
    words = ", ".join(f"{known:g}" for known in (*more, 1, 2))
    raise ValueError(f"norm must be {words} or inf, got {norm!r}{meant(norm)}.")


def meant(norm: Any) -> str:
    """What to pass instead of a norm's name, for an error's message; empty for anything else.

    Args:
      norm: what was given.

    >>> meant("Linf"), meant("2"), meant(3)
    (': pass the number jnp.inf', ': pass the number 2', '')
    """
    number = str(norm).lower().removeprefix("l") if isinstance(norm, str) else ""
    if number not in ("0", "1", "2", "inf"):
        return ""
    return f": pass the number {'jnp.inf' if number == 'inf' else number}"


def dual(norm: float) -> float:
    """The dual exponent ``s`` with ``1/r + 1/s = 1``.

    Args:
      norm: r, one of 1, 2 and inf.

    Raises:
      ValueError: another norm.

    >>> dual(1), dual(2), dual(math.inf)
    (inf, 2, 1)
    """
    return {1: math.inf, 2: 2, math.inf: 1}[check_norm(norm)]


def _rows(x: jax.Array) -> jax.Array:
    """``[n, *shape]`` flattened to ``[n, d]``."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def finite(tree: Any) -> jax.Array:
    """``[n]``: whether all entries of all ``[n, ...]`` leaves are finite.

    Args:
      tree: a pytree of arrays ``[n, ...]``.

    >>> finite((jnp.array([1.0, jnp.inf]), jnp.zeros((2, 3)))).tolist()
    [True, False]
    """
    return ~any_entry(~jnp.isfinite(leaf) for leaf in jax.tree.leaves(tree))


def any_entry(leaves: Iterable[jax.Array]) -> jax.Array:
    """``[n]``: whether any entry of any ``[n, ...]`` boolean leaf holds.

    Computed as a maximum of int8, ten times as fast as a reduction of booleans on XLA's CPU.

    Args:
      leaves: boolean arrays ``[n, ...]``.

    >>> any_entry([jnp.array([[False, True], [False, False]])]).tolist()
    [True, False]
    """
    rows = [leaf.reshape(len(leaf), -1).astype(jnp.int8) for leaf in leaves]
    return jnp.stack([jnp.max(row, axis=1, initial=0) for row in rows]).max(axis=0) > 0


def spread(v: jax.Array, x: jax.Array) -> jax.Array:
    """Reshapes ``v``, ``[n]``, to ``[n, 1, ..., 1]`` with as many axes as ``x``, to broadcast.

    Args:
      v: ``[n]``
      x: ``[n, *shape]``

    >>> spread(jnp.ones(3), jnp.ones((3, 8, 8, 1))).shape
    (3, 1, 1, 1)
    """
    return v.reshape(v.shape + (1,) * (x.ndim - v.ndim))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def largest(x: jax.Array, axis: int = -1) -> jax.Array:
    """The maximum over an axis; the gradient is that of the first largest entry.

    The gradient of ``jnp.max`` is shared by the entries that equal the maximum. A compiler that
    computes the entries twice, rounded differently, finds none, and it is 0 / 0.

    Args:
      x: floats ``[..., m]``, or another shape with ``axis`` in it.
      axis: as of ``jnp.max``.

    >>> jax.grad(lambda x: largest(x))(jnp.array([1.0, 3.0, 3.0])).tolist()
    [0.0, 1.0, 0.0]
    """
    return jnp.max(x, axis=axis)


@largest.defjvp
def _(
    axis: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (change,) = primals, tangents
    chosen = jax.nn.one_hot(jnp.argmax(x, axis=axis), x.shape[axis], axis=axis, dtype=bool)
    return largest(x, axis), jnp.sum(jnp.where(chosen, change, 0.0), axis=axis)


def lp_norm(x: jax.Array, norm: float) -> jax.Array:
    """The l_r norm of every row, with gradient 0 (not NaN) at the origin.

    Args:
      x: ``[n, *shape]`` floats.
      norm: 1, 2 or inf.

    Returns:
      ``[n]`` norms, in the units of ``x``.

    Raises:
      ValueError: another norm.

    >>> lp_norm(jnp.array([[3.0, -4.0]]), 2).tolist()
    [5.0]
    """
    check_norm(norm)
    x = _rows(x)
    if norm != 2:
        # Not jnp.abs, whose derivative at 0 is 1.
        size = x * jnp.sign(jax.lax.stop_gradient(x))
        if norm == 1 or not size.size:
            return jnp.sum(size, axis=-1)
        return largest(size)
    # Scaled by its largest entry, so that neither tiny nor huge rows under- or overflow.
    scale = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, initial=0.0))
    scale = jnp.where(scale > 0, scale, 1.0)
    square = jnp.sum((x / scale[:, None]) ** 2, axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0) * scale


def unit(x: jax.Array, norm: float) -> jax.Array:
    """Every row divided by its l_r norm; rows of zeros stay as they are.

    Args:
      x: ``[n, *shape]`` floats.
      norm: r, one of 1, 2 and inf.

    Returns:
      ``[n, *shape]`` rows of norm 1 or 0.

    >>> unit(jnp.array([[1.0, -3.0], [0.0, 0.0]]), 1).tolist()
    [[0.25, -0.75], [0.0, 0.0]]
    """
    length = lp_norm(x, norm)
    return x / spread(jnp.where(length > 0, length, 1.0), x)


def dual_maximizer(g: jax.Array, norm: float) -> jax.Array:
    r"""The direction ``argmax { <g, h> : ||h||_r = 1 }`` of every row: ``M_r`` of equation 1.

    For a zero gradient every direction is a maximiser; the zero vector is returned, for no step.

    Args:
      g: ``[n, *shape]`` floats.
      norm: 1, 2 or inf.

    Returns:
      ``[n, *shape]`` rows of l_r norm 1 (0 where ``g`` is 0). For norm 1, only the first of the
      largest entries is nonzero; for inf, entries with gradient 0 are 0.

    Raises:
      ValueError: another norm.

    Source: Le et al. [le2025], equation 1.

    >>> dual_maximizer(jnp.array([[3.0, -4.0]]), 1).tolist()
    [[0.0, -1.0]]
    """
    check_norm(norm)
    if norm == math.inf:
        return jnp.sign(g)
    rows = _rows(g)
    if norm == 2:
        length = lp_norm(rows, 2)[:, None]
        unit = rows / jnp.where(length > 0, length, 1.0)
    else:
        top = jnp.argmax(jnp.abs(rows), axis=-1)
        unit = jax.nn.one_hot(top, rows.shape[-1], dtype=g.dtype) * jnp.sign(rows)
    return unit.reshape(g.shape)


def _interval(center: jax.Array, radius: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``center -+ radius``, rounded towards ``center`` so that no float lies outside the ball."""
    low, high = center - radius, center + radius
    low = jnp.where(center - low > radius, low + _spacing(low), low)
    high = jnp.where(high - center > radius, high - _spacing(high), high)
    return low, high


def _displace(center: jax.Array, delta: jax.Array) -> jax.Array:
    """``center + delta``, rounded towards ``center``: no coordinate moves beyond ``delta``."""
    moved = center + delta
    back = jnp.sign(center - moved) * _spacing(moved)
    too_far = jnp.abs(moved - center) > jnp.abs(delta)
    return moved + jax.lax.stop_gradient(jnp.where(too_far, back, 0.0))


def _spacing(x: jax.Array) -> jax.Array:
    """A step from ``x`` that rounds to its neighbour: 0.7 to 1.4 of the floats' spacing.

    ``jnp.nextafter`` at a quarter of the cost; both differ for subnormal numbers only.
    """
    return 0.7 * float(jnp.finfo(x.dtype).eps) * jnp.abs(jax.lax.stop_gradient(x))


def _within(delta: jax.Array, radius: jax.Array, norm: float) -> jax.Array:
    """``delta`` ``[n, *shape]``, shrunk where rounding left it outside the ball."""
    length = jax.lax.stop_gradient(lp_norm(delta, norm))
    over = length > radius * (1 - 4 * jnp.finfo(delta.dtype).eps)
    shrink = (1 - 4 * jnp.finfo(delta.dtype).eps) * radius / jnp.where(over, length, 1.0)
    shrink = jax.lax.stop_gradient(jnp.where(over, shrink, 1.0))
    return delta * spread(shrink, delta)


def project(z: jax.Array, center: jax.Array, radius: ArrayLike, norm: float) -> jax.Array:
    r"""The Euclidean projection of ``z`` on the ball ``||x - center||_r <= radius``: equation 2.

    Args:
      z: ``[n, *shape]`` floats.
      center: ``[n, *shape]`` floats.
      radius: a number or ``[n]``, at least 0; radius 0 gives ``center`` itself.
      norm: 1, 2 or inf.

    Returns:
      ``[n, *shape]`` points of the balls.

    Raises:
      ValueError: another norm.

    Cost: elementwise; for norm 1 some 30 sums over the row (a bisection).

    Source: Le et al. [le2025], equation 2.

    >>> point = project(jnp.array([[3.0, 4.0]]), jnp.zeros((1, 2)), 1.0, 2)
    >>> [round(v, 4) for v in point[0].tolist()]
    [0.6, 0.8]
    """
    check_norm(norm)
    radius = jnp.broadcast_to(jnp.asarray(radius, z.dtype), z.shape[:1])
    if norm == math.inf:
        low, high = _interval(center, spread(radius, z))
        return jnp.clip(z, low, high)
    delta = z - center
    if norm == 2:
        length = lp_norm(delta, 2)
        outside = length > radius
        scale = jnp.where(outside, radius / jnp.where(outside, length, 1.0), 1.0)
        moved = _within(delta * spread(scale, z), radius, 2)
        return jnp.where(spread(outside, z), _displace(center, moved), z)
    outside = lp_norm(delta, 1) > radius
    rows = _rows(delta)
    length = jax.vmap(_shrink_l1)(jnp.abs(rows), jnp.full_like(rows, jnp.inf), radius)
    moved = _within((jnp.sign(rows) * length).reshape(z.shape), radius, 1)
    return jnp.where(spread(outside, z), _displace(center, moved), z)


def retract(
    z: jax.Array,
    center: jax.Array,
    radius: ArrayLike,
    norm: float,
    box: tuple[float, float] | None = None,
) -> jax.Array:
    """A point of the ball and the box near ``z``: the ball's projection, then the box's.

    Always feasible when ``center`` is in the box, since clipping moves every coordinate towards
    ``center``. For norms 1 and inf it is the exact projection of :func:`project_in_box` (in l1,
    clipping afterwards would waste part of the radius). For norm 2 it is not: the exact one needs a
    sort and gains little.

    Args:
      z: ``[n, *shape]`` floats.
      center: ``[n, *shape]`` floats, inside the box.
      radius: a number or ``[n]``, at least 0.
      norm: r, one of 1, 2 and inf.
      box: ``(low, high)`` numbers, or None.

    >>> retract(jnp.array([[2.0, -1.0]]), jnp.array([[0.9, 0.5]]), 0.25, jnp.inf, (0, 1)).tolist()
    [[1.0, 0.25]]
    """
    if norm == 1 and box is not None:
        return project_in_box(z, center, radius, norm, box)
    inside = project(z, center, radius, norm)
    return inside if box is None else jnp.clip(inside, *box)


def project_in_box(
    z: jax.Array, center: jax.Array, radius: ArrayLike, norm: float, box: tuple[Any, Any]
) -> jax.Array:
    r"""The Euclidean projection of ``z`` on the intersection of a ball and a box, exactly.

    The multiplier of the ball solves a piecewise equation: quadratic (2), whose break points are
    sorted, or linear (1), which is bisected.

    Args:
      z: ``[n, *shape]`` floats.
      center: ``[n, *shape]`` floats inside the box.
      radius: a number or ``[n]``, at least 0.
      norm: 1, 2 or inf.
      box: ``(low, high)`` numbers, or arrays like ``z`` if that is ``[n, d]``.

    Returns:
      ``[n, *shape]`` points.

    Raises:
      ValueError: another norm.

    Cost: ``O(d log d)`` a row for norm 2, some 30 sums over the row for norm 1.

    >>> z, x = jnp.array([[2.0, 0.5]]), jnp.array([[0.5, 0.5]])
    >>> project_in_box(z, x, 1.0, 2, (0.0, 1.0)).tolist()
    [[1.0, 0.5]]
    """
    check_norm(norm)
    if norm == math.inf:
        return retract(z, center, radius, norm, box)
    radius = jnp.broadcast_to(jnp.asarray(radius, z.dtype), z.shape[:1])
    delta = _rows(z - center)
    room = jnp.where(delta > 0, box[1] - _rows(center), _rows(center) - box[0])
    solve = _shrink_l2 if norm == 2 else _shrink_l1
    length = jax.vmap(solve)(jnp.abs(delta), room, radius)
    moved = _displace(_rows(center), _within(jnp.sign(delta) * length, radius, norm))
    inside = (lp_norm(delta, norm) <= radius) & jnp.all(jnp.abs(delta) <= room, axis=-1)
    return jnp.where(spread(inside, z), z, jnp.clip(moved, *box).reshape(z.shape))


def _shrink_l2(size: jax.Array, room: jax.Array, radius: jax.Array) -> jax.Array:
    """``[d]``: ``min(t size, room)`` for the largest ``t <= 1`` with l2 norm at most ``radius``.

    ``size`` ``[d]`` are a sample's absolute displacements and ``room`` ``[d]`` how far each
    coordinate may move in the box; the break points of t are sorted.
    """
    at = jnp.where(size > 0, room / jnp.where(size > 0, size, 1.0), jnp.inf)
    order = jnp.argsort(at)
    at, bound, slope = at[order], room[order] ** 2, size[order] ** 2
    full = jnp.cumsum(bound) - bound
    free = jnp.cumsum(slope[::-1])[::-1]
    # On the segment that ends at break point k: t^2 free_k + full_k = radius^2.
    square = (radius**2 - full) / jnp.where(free > 0, free, 1.0)
    t = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
    ends_here = (t <= at) & (free > 0)
    t = jnp.where(jnp.any(ends_here), t[jnp.argmax(ends_here)], 1.0)
    return jnp.minimum(jnp.minimum(t, 1.0) * size, room)


@distinct.jit  # Without it, the loop would be compiled at every call outside a trace.
def _shrink_l1(size: jax.Array, room: jax.Array, radius: jax.Array) -> jax.Array:
    """``[d]``: ``clip(size - lam, 0, room)`` of sum at most ``radius``, with the least ``lam``.

    ``size`` ``[d]`` are absolute displacements, ``room`` ``[d]`` the most that each may be.
    Bisection, 50 times as fast on a CPU as a sort of the break points. It is exact to the last bit
    of the largest entry, and ends on the side where the sum is at most ``radius``; derivatives are
    those of the piecewise linear solution.
    """
    room = jnp.maximum(room, 0.0)
    fixed, limit = jax.lax.stop_gradient((size, radius))

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) / 2
        over = jnp.sum(jnp.clip(fixed - middle, 0.0, room)) > limit
        return jnp.where(over, middle, low), jnp.where(over, high, middle)

    ends = jnp.zeros_like(limit), jnp.max(fixed, initial=0.0)
    high = loops.fori_loop(0, jnp.finfo(size.dtype).nmant + 5, halve, ends)[1]
    # While the same coordinates are free, the sum is linear in lam: this gives lam's derivative.
    rest = fixed - high
    free, full = (rest > 0) & (rest < room), rest >= room
    spent = jnp.sum(jnp.where(free, size, 0.0)) + jnp.sum(jnp.where(full, room, 0.0))
    line = (spent - radius) / jnp.maximum(jnp.sum(free, dtype=size.dtype), 1)
    lam = jnp.where(jnp.any(free), line + jax.lax.stop_gradient(high - line), high)
    fits = jnp.sum(jnp.minimum(fixed, room)) <= radius
    return jnp.clip(size - jnp.where(fits, 0.0, lam), 0.0, room)


_REACH = 4.0
"""l2 length of an l1 step before its projection on the l1 ball of radius ``size``, by ``size``."""


def ascend(
    x: jax.Array,
    g: jax.Array,
    size: ArrayLike,
    norm: float,
    box: tuple[float, float] | None = None,
) -> jax.Array:
    r"""One ascent step of length ``size`` along a gradient, within the box for norm 1.

    For inf and 2 the step is ``size * M_r(g)`` of equation 1, which ignores the box. For norm 1
    that step would move a single pixel by several times the box. Instead, the step ``h`` solves

        max <g, h> - ||g||_2 ||h||_2^2 / (8 size)  subject to  ||h||_1 <= size, x + h in the box,

    which is the exact projection on ball and box of an l2 step of length ``4 size``. Without the
    quadratic term it would move one coordinate after the other to the box's end, in order of
    ``|g|``; with it, coordinates of similar gradients share the step, which is better for nonlinear
    models. ``||g||_2`` leaves out coordinates that are at the box's end up to rounding.

    Args:
      x: ``[n, *shape]`` floats, inside the box.
      g: ``[n, *shape]`` gradients. NaN entries (for 1 and 2 infinite ones, too) count as 0, and
        rows of zeros do not move.
      size: the l_r length of the step, a number or ``[n]``, at least 0. For norm 1 an upper bound,
        attained unless few coordinates have large gradients or room in the box.
      norm: r, one of 1, 2 and inf.
      box: ``(low, high)`` numbers, or None.

    Returns:
      ``[n, *shape]`` points, inside the box for norm 1 only.

    Raises:
      ValueError: another norm.

    Cost: elementwise; for norm 1 some 30 sums over the row.

    Source: Le et al. [le2025], equation 1; the l1 step is this library's own.

    >>> x, g = jnp.array([[0.5, 0.9, 0.5]]), jnp.array([[0.1, -3.0, 2.0]])
    >>> [round(v, 2) for v in ascend(x, g, 1.2, 1, (0.0, 1.0))[0].tolist()]
    [0.5, 0.0, 0.8]
    """
    check_norm(norm)
    size = jnp.broadcast_to(jnp.asarray(size, x.dtype), x.shape[:1])
    if norm == math.inf:
        return x + spread(size, x) * jnp.sign(jnp.where(jnp.isnan(g), 0.0, g))
    g = jnp.where(jnp.isfinite(g), g, 0.0)
    huge = lp_norm(g, jnp.inf) > float(jnp.finfo(g.dtype).max) ** 0.75  # Its l2 norm may overflow.
    g = jnp.where(spread(huge, g), g * float(jnp.finfo(g.dtype).max) ** -0.5, g)
    if norm == 2:
        return x + spread(size, x) * dual_maximizer(g, norm)
    if box is None:
        return project(x + spread(_REACH * size, x) * dual_maximizer(g, 2), x, size, 1)
    # With a tolerance: otherwise rounding at the box's end would change the others' steps.
    edge = 64 * float(jnp.finfo(x.dtype).eps) * (box[1] - box[0])
    stuck = ((g > 0) & (x >= box[1] - edge)) | ((g < 0) & (x <= box[0] + edge))
    h = spread(_REACH * size, x) * dual_maximizer(jnp.where(stuck, 0.0, g), 2)
    return project_in_box(x + h, x, size, 1, box)


_ENUMERATED = 16
"""Largest smaller side of a matrix whose sign vectors are enumerated."""
_CHUNK = 256
"""Number of sign vectors at once."""


def operator_norm(jacobian: jax.Array, norm: float) -> Bounds:
    r"""Bounds on ``||J||_{r -> s} = max { ||J u||_s : ||u||_r = 1 }`` with ``s`` dual to ``r``.

    Exact (lower = upper up to rounding) for r = 1, the largest entry; for r = 2, the spectral norm,
    whose upper end is enlarged by the rounding error of the Gram matrix so that it is sound; and
    for r = inf, the largest ``||J^T sigma||_1`` over sign vectors, as long as the smaller side of
    ``J`` is at most 16. The general case of r = inf is NP-hard; then the lower bound is by
    alternating sign ascent, the upper one ``min(sum_k ||J_k||_1, sqrt(K d) ||J||_2)``.

    Args:
      jacobian: ``[K, d]`` floats; ``vmap`` for more.
      norm: r, one of 1, 2 and inf.

    Returns:
      ``Bounds`` of scalars. The upper end is enlarged for float rounding.

    Raises:
      ValueError: another norm, or no matrix.

    Cost: ``O(K d)``; r = 2 ``O(min(K, d)^2 max(K, d))``; r = inf ``O(2^(min(K, d) - 1) K d)``.

    Source: Le et al. [le2025], equation 6; the sign enumeration is a standard fact.

    >>> float(operator_norm(jnp.array([[1.0, -2.0], [3.0, 4.0]]), jnp.inf).lower)
    8.0
    """
    check_norm(norm)
    if jacobian.ndim != 2:
        raise ValueError(f"jacobian must be a matrix [K, d], got shape {jacobian.shape}; use vmap.")
    if jacobian.shape[0] > jacobian.shape[1]:
        jacobian = jacobian.T  # ||J||_{r->s} = ||J^T||_{r->s} because s is dual to r.
    with jax.default_matmul_precision("highest"):
        if norm == 1:
            value = jnp.max(jnp.abs(jacobian))
            return Bounds(value, value)
        return _spectral(jacobian) if norm == 2 else _inf_to_one(jacobian)


def _slack(jacobian: jax.Array) -> float:
    """Relative rounding error of sums over the rows and columns of a matrix."""
    return 4 * (sum(jacobian.shape) + 8) * float(jnp.finfo(jacobian.dtype).eps)


def _spectral(jacobian: jax.Array) -> Bounds:
    """Bounds of the spectral norm of a matrix ``[K, d]``, ``K <= d``; rounding is included."""
    scale = jnp.max(jnp.abs(jacobian))
    unit = jacobian / jnp.where(scale > 0, scale, 1.0)
    values, vectors = jnp.linalg.eigh(unit @ unit.T)
    frobenius = jnp.sum(unit**2)
    # |fl(J J^T) - J J^T|_2 and the eigenvalue solver's error are both below this.
    error = _slack(jacobian) * frobenius
    upper = jnp.sqrt(jnp.maximum(values[-1], 0.0) + error)
    lower = jnp.linalg.norm(vectors[:, -1] @ unit) * (1 - _slack(jacobian))
    return Bounds(scale * lower, scale * upper * (1 + _slack(jacobian)))


def _inf_to_one(jacobian: jax.Array) -> Bounds:
    """Bounds of the operator norm from l_inf to l_1 of a matrix ``[K, d]``, ``K <= d``.

    For up to 16 rows the bounds differ by rounding only, since all signs of the rows are tried.
    Otherwise the lower bound is a local search's, and the upper one the better of two norms.
    """
    rows = jacobian.shape[0]
    if rows <= _ENUMERATED:
        count = 2 ** (rows - 1)
        width = min(count, _CHUNK)

        def largest(start: jax.Array) -> jax.Array:
            bits = (start + jnp.arange(width))[:, None] >> jnp.arange(rows)
            signs = (1 - 2 * (bits & 1)).astype(jacobian.dtype)
            return jnp.max(jnp.sum(jnp.abs(signs @ jacobian), axis=-1))

        value = jnp.max(jax.lax.map(largest, jnp.arange(0, count, width)))
        return Bounds(value, value * (1 + _slack(jacobian)))

    def ascend(signs: jax.Array, _: None) -> tuple[jax.Array, None]:
        inputs = jnp.sign(signs @ jacobian)
        signs = jnp.sign(inputs @ jacobian.T)
        return jnp.where(signs == 0, 1.0, signs), None

    start = jnp.concatenate([jnp.ones((1, rows)), 2 * jnp.eye(rows) - 1]).astype(jacobian.dtype)
    signs, _ = loops.scan(ascend, start, length=10)
    lower = jnp.max(jnp.sum(jnp.abs(signs @ jacobian), axis=-1))
    whole = jnp.sum(jnp.abs(jacobian))
    spectral = _spectral(jacobian).upper * math.sqrt(math.prod(jacobian.shape))
    return Bounds(lower, jnp.minimum(whole, spectral) * (1 + _slack(jacobian)))
