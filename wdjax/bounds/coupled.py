r"""Rectifiers whose operands lie in an l2 ball, relaxed together (SDP-CROWN).

The operand ``z`` of a layer lies in its box ``l <= z <= u`` and in a ball ``|z - k| <= r``, that
of the input times the norms of the maps between, since rectifiers are 1-Lipschitz. For
coefficients ``c``, and ``g`` of the operand that CROWN's lines give, and any ``m >= 0``

    c . max(z, 0) - g . z >= sum_i min_{z_i} (c_i max(z_i, 0) - g_i z_i + m (z_i - k_i)^2 / 2)
                             - m r^2 / 2,

as the terms with ``m`` are at most 0 together in the ball; each minimum, over ``[l_i, u_i]``, is
that of one of two parabolas. The right hand side is concave in ``m``; at ``m = 0`` it is CROWN's
intercept, and without the box it is [chiu2025]'s, as tight as a semidefinite program.

Source: Chiu et al. [chiu2025]; here within the box too, so that it is never below CROWN's with the
same slopes. Inner bounds that are tighter choose other slopes, so that in the end a bound may be a
thousandth lower.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from wdjax import loops, norms
from wdjax.bounds import spectral
from wdjax.bounds.domain import Array, gamma, tiny
from wdjax.bounds.network import Affine, Part
from wdjax.bounds.region import Region
from wdjax.xla_cpu import framed, rounding, summed

_ROWS = 256
_ENTRIES = 2**25
"""Largest number of rows of matrices, and of entries of a batch of them, of which the parts that
move get norms of their own."""
_TURNS = 6
_OCTAVES = 8
"""The multiplier is sought in so many octaves."""


class Origin(NamedTuple):
    """The value from which a matrix leads to another one without rounding: the input or the last
    rectifiers', perhaps scaled and reshaped."""

    radius: Array
    """``[B]``: that of the value's ball."""
    moves: Array
    """``[B, N]`` or ``[1, N]``: which of its entries are not constant, as 0 and 1."""
    matrix: Array
    """``[N, M]``"""


class Sphere(NamedTuple):
    """An l2 ball that contains a value, for each sample."""

    center: Array
    """``[B, *shape]``"""
    radius: Array
    """``[B]``"""
    error: Array | None = None
    """``[B, *shape]``: the rounding of the value that is in the radius, if it is charged."""
    moves: Array | None = None
    """``[B, *shape]`` or ``[1, *shape]`` of a value that may be an origin, else None."""
    origin: Origin | None = None


def of_region(region: Region) -> Sphere:
    """The ball of an l2 region."""
    radius = region.eps
    if region.scale is not None:
        radius = radius * norms.largest(region.scale.reshape(len(radius), -1))
    ball = Sphere(region.center, radius * (1 + gamma(4, radius.dtype)))
    moves = jnp.ones_like(region.center[:1])
    return within(ball, region.lower, region.upper)._replace(moves=moves)


def of_box(lower: Array, upper: Array) -> Sphere:
    """The ball around a box with ends ``[B, *shape]``."""
    middle = 0.5 * lower + 0.5 * upper
    nothing = jnp.full(len(lower), jnp.inf, middle.dtype)
    return within(Sphere(jnp.where(jnp.isfinite(middle), middle, 0.0), nothing), lower, upper)


def within(sphere: Sphere, lower: Array, upper: Array) -> Sphere:
    """The ball with its radius cut to the farthest point of a box."""
    far = jnp.maximum(upper - sphere.center, sphere.center - lower)
    length = jnp.where(jnp.isfinite(sphere.radius), sphere.radius, jnp.inf)
    return sphere._replace(radius=jnp.fmin(length, _length(far)))


def _length(rows: Array) -> Array:
    """``[B]``: upper bounds of the lengths of rows; infinite where they are not finite."""
    found = norms.lp_norm(rows, 2) * (1 + gamma(rows[0].size, rows.dtype))
    return jnp.where(jnp.isfinite(found), found, jnp.inf)


def through(
    affine: Affine, spheres: dict[int, Sphere], error: Array | None, charged: set[int]
) -> Sphere:
    """The ball of an affine map's value; ``error`` ``[B, *shape]`` is given where it is charged."""
    center, radius = affine.offset[None], jnp.zeros((), affine.offset.dtype)
    for part in affine.parts:
        held = spheres[part.place]
        center = center + jax.vmap(part.apply)(held.center)
        radius = radius + spectral.norm(affine, part, held.center.shape[1:]) * held.radius
    if error is not None:
        radius = radius + _rounded(error)
    found = Sphere(center, radius * (1 + gamma(8, radius.dtype)), error)
    if len(affine.parts) > 1:
        return found
    (part,), single = affine.parts, affine.record.once and not affine.record.sums
    held = spheres[part.place]
    if held.moves is not None and single and error is None:
        return found._replace(moves=(jax.vmap(part.absolute)(held.moves) > 0).astype(center.dtype))
    if held.moves is not None and not single:
        return found._replace(origin=_origin(part, held, affine.offset.size))
    if (
        held.origin is not None
        and single
        and not affine.record.scales
        and part.place not in charged
    ):
        rows = held.origin.matrix.reshape(-1, *held.center.shape[1:])
        matrix = jax.vmap(part.apply)(rows).reshape(len(rows), -1)
        return found._replace(origin=held.origin._replace(matrix=matrix))
    return found


def _rounded(error: Array) -> Array:
    """``[B]``: how far apart the rounding of the centre and of the value may put them."""
    return 2 * _length(error)


def _origin(part: Part, held: Sphere, size: int) -> Origin | None:
    """What a matrix is applied to; None for matrices that would take too long."""
    assert held.moves is not None
    moves = held.moves.reshape(len(held.moves), -1)
    if size > _ROWS or moves.size * size > _ENTRIES:
        return None
    basis = jnp.eye(moves.shape[1], dtype=moves.dtype).reshape(-1, *held.center.shape[1:])
    return Origin(held.radius, moves, jax.vmap(part.apply)(basis).reshape(len(basis), -1))


def rectified(held: Sphere, lower: Array, upper: Array, used: Array) -> tuple[Sphere, Sphere]:
    """The balls of those operands of rectifiers that are ``used``, and of the rectifiers.

    The operands are in ``held`` and between ``lower`` and ``upper``. Where a matrix leads to them,
    it counts without the columns that do not move, and without the rows of operands that are not
    used, or never positive. The centre moves into the box, which leaves it no farther from any
    point there: outside, as in a leaf, rectifiers that are constant would differ from its own.
    """
    alive = upper > 0
    radii = _of_rows(held, jnp.stack([used, alive]))
    center = jnp.minimum(jnp.maximum(held.center, lower), upper)
    here = [jnp.where(used, t, 0.0) for t in (center, lower, upper)]
    after = [jnp.maximum(t, 0.0) for t in (center, lower, upper)]
    operands, rectifiers = (
        within(Sphere(center, radius), *ends)
        for radius, (center, *ends) in zip(radii, (here, after))
    )
    return operands, rectifiers._replace(moves=alive.astype(lower.dtype))


def _of_rows(held: Sphere, kept: Array) -> Array:
    """``[K, B]``: the radii of the entries ``kept``, booleans ``[K, B, *shape]``."""
    if held.origin is None:
        return jnp.broadcast_to(held.radius, (len(kept), *held.radius.shape))
    radius, moves, matrix = held.origin
    matrix, length = spectral.scaled(matrix)
    rows = jnp.swapaxes(matrix * moves[..., None], -1, -2)
    mask = kept.reshape(*kept.shape[:2], -1).astype(matrix.dtype)
    gram = (rows @ jnp.swapaxes(rows, -1, -2)) * mask[..., None] * mask[..., None, :]
    radius = radius * length * spectral.of_gram(gram, gamma(len(matrix), matrix.dtype))
    if held.error is not None:
        radius = radius + jax.vmap(_rounded)(jnp.where(kept, held.error, 0.0))
    return jnp.fmin(held.radius, radius * (1 + gamma(8, matrix.dtype)))


def maps(ball: Sphere, lower: Array, upper: Array, chord: Array, used: Array) -> Array:
    """What :func:`gain` needs of rectifiers, ``[B, *shape]`` each, framed: the ends of the operand,
    the ball's centre, and the intercept of the upper line; 0 for those that are not ``used``."""
    return framed(*(jnp.where(used, t, 0.0) for t in (lower, upper, ball.center, chord)))


def gain(seen: Array, reach: Array, c: Array, g: Array) -> Array:
    """By how much the ball raises the intercepts of CROWN together, ``[G, R]``, at least 0.

    Args:
      seen: the :func:`maps`, ``[4, R, N]``.
      reach: the ball's radius, ``[R]``.
      c: coefficients of the rectifiers, ``[G, R, N]``.
      g: those of their operands.
    """
    used = seen[0] < 0
    c, g = jnp.where(used, c, 0.0), jnp.where(used, g, 0.0)
    real = jnp.isfinite(reach) & (reach > 0)
    reach = jnp.where(real, reach, 1.0)
    m = _multiplier(*lax.stop_gradient((seen, reach, c, g)))
    _, value, size = _minima(m, seen, c, g)
    least = jnp.minimum(c, 0.0) * seen[3]
    unit = rounding(c.shape[-1], c.dtype) + 32 * float(jnp.finfo(c.dtype).eps)
    spent = 0.5 * (1 + unit) * m * reach**2 + c.shape[-1] * tiny(c.dtype)
    raised = summed(value - least - unit * (size + jnp.abs(least))) - spent
    return jnp.where(real & (raised > 0), raised, 0.0)


def _multiplier(seen: Array, reach: Array, c: Array, g: Array) -> Array:
    """``[G, R]``: multipliers for which the minimisers are about as far away as the ball allows."""
    steep = jnp.sqrt(jnp.sum(jnp.maximum(jnp.abs(c - g), jnp.abs(g)) ** 2, axis=-1))
    top = jnp.log2(jnp.where(steep > 0, steep, 1.0) / reach)  # Beyond it they are nearer.

    def halved(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        step = _minima(jnp.exp2(middle), seen, c, g)[0]
        far = jnp.sum(step**2, axis=-1) > reach**2
        return jnp.where(far, middle, low), jnp.where(far, high, middle)

    low, high = loops.fori_loop(0, _TURNS, halved, (top - _OCTAVES, top))
    return jnp.exp2(0.5 * (low + high))


def _minima(m: Array, seen: Array, c: Array, g: Array) -> tuple[Array, Array, Array]:
    """For every neuron, ``[G, R, N]``, the minimiser less the centre, the minimum, and the size of
    its terms.

    A step that is off by rounding is off in second order.
    """
    lower, upper, center, _ = seen
    m, found = m[..., None], []
    for slope, low, high in ((c - g, 0.0, upper), (-g, lower, 0.0)):
        step = jnp.clip(-slope / m, low - center, high - center)
        bent = 0.5 * m * step**2
        size = jnp.abs(slope) * (jnp.abs(center) + jnp.abs(step)) + bent
        found.append((step, slope * center + slope * step + bent, size))
    right, left = found
    first = right[1] < left[1]
    step, value, size = (jnp.where(first, *pair) for pair in zip(right, left))
    return step, value, size
