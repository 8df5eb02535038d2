"""The set of perturbed inputs, a ball cut by a box, and minima of linear functions over it.

The ball is that of a norm, or one in which mass moves between pixels (`moved_mass`).
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from wdjax import loops, norms
from wdjax.bounds import moved_mass
from wdjax.bounds.coefficients import Coefficients, Rows, Window, cleaned, flat, seen, whole
from wdjax.bounds.domain import Array, tiny
from wdjax.checks.validate import EntryBox
from wdjax.core import AnyArray
from wdjax.xla_cpu import framed, rounding, summed

Box = tuple[float, float] | None
Norm = Any
"""1, 2 or inf, or a :class:`moved_mass.MassBall`."""

_EXCESS = 2e-5
"""Fraction by which certified balls are enlarged, so that a point whose distance rounds to at most
``eps`` lies in the certified ball."""
_FAR = 1024.0
"""How far along a linear function's descent a point lies, in radii of the ball, whose projection on
the ball and the box is about the function's minimiser there."""
_TURNS = 4
"""Fixed-point steps of the multiplier; any number of them is sound."""


class Domain(NamedTuple):
    """The norm of balls and the box that cuts them; hashable."""

    norm: Norm
    box: EntryBox

    def diameter(self, shape: tuple[int, ...], scale: Array | None = None) -> Any:
        """The largest distance of two inputs of the box, ``[n]`` by their scales ``[n, *shape]``.

        Distances are in units of the scale; infinite without a box, and 0 where nothing moves.
        """
        if moved_mass.moves_mass(self.norm):
            return self.norm.diameter(shape)
        low, high = (np.asarray(end, float) for end in self.box or (-math.inf, math.inf))
        far = np.broadcast_to((high - low).reshape(shape if (high - low).ndim else ()), shape)
        if scale is None:
            return float(np.linalg.norm(far.reshape(-1), self.norm))
        wide = jnp.where(scale > 0, far / jnp.where(scale > 0, scale, 1.0), 0.0)
        endless = norms.any_entry([jnp.isinf(wide)])
        length = norms.lp_norm(jnp.where(jnp.isinf(wide), 0.0, wide), self.norm)
        return jnp.where(endless, jnp.inf, length)


class Region(NamedTuple):
    """A batch of balls, each cut by its box ``[lower, upper]``, ``[B, *shape]``.

    With ``scale`` a ball is ``||(x - center) / scale|| <= eps``; entries of scale 0 do not move.
    """

    center: Array
    lower: Array
    upper: Array
    eps: Array
    norm: Norm
    maps: Array | moved_mass.Supply | None = None
    scale: Array | None = None
    """``[B, *shape]``, used for l1 and l2: lower and upper are those of the ball in linf."""

    def prepared(self) -> "Region":
        """The same region with ``maps``, which :meth:`least` needs, computed once."""
        unit = rounding(self.center[0].size, self.center.dtype)
        if moved_mass.moves_mass(self.norm):
            image = self.center.reshape(-1, *self.center.shape[-3:])
            return self._replace(maps=moved_mass.supply(image, self.eps, self.norm))
        if self.norm == math.inf:
            middle = 0.5 * self.lower + 0.5 * self.upper
            half = jnp.maximum(self.upper - middle, middle - self.lower)
            return self._replace(maps=framed(middle, half + unit * (jnp.abs(middle) + half)))
        down, up = self.center - self.lower, self.upper - self.center
        scale = [] if self.scale is None else [self.scale]
        for width in scale:
            wide = jnp.where(width > 0, width, jnp.inf)
            down, up = down / wide, up / wide
        return self._replace(maps=framed(self.center, down * (1 + unit), up * (1 + unit), *scale))

    def least(self, coefficients: Coefficients, rows: Rows) -> Array:
        """Minima ``[G, R]``, rounded down, of linear functions over the rows' regions."""
        if isinstance(self.maps, moved_mass.Supply):
            return self._of_images(self.maps, coefficients, rows)
        if self.norm != math.inf and isinstance(coefficients, Window):
            coefficients = cleaned(coefficients, rows)
        a = flat(coefficients)
        assert self.maps is not None
        center, *ends = seen(self.maps, rows, coefficients)
        if self.norm == math.inf:
            return summed(a * center - jnp.abs(a) * ends[0])
        unit = rounding(self.center[0].size, a.dtype)
        size = jnp.abs(a)
        cap = jnp.asarray(jnp.where(a > 0, ends[0], ends[1]))
        eps = self.eps[rows.sample][None]
        along = size * ends[2] if len(ends) > 2 else size
        fall = _capped_one(along, cap, eps) if self.norm == 1 else _capped_two(along, cap, eps)
        if len(ends) > 2:  # Products with the scale are rounded, and may underflow.
            fall = (1 + unit) * fall + tiny(a.dtype) * a.shape[-1] * eps
        return summed(a * center - unit * size * jnp.abs(center)) - (1 + unit) * fall

    def lowest(self, a: Array) -> Array:
        """``[B, *shape]``: points of the regions where linear functions are least, or nearly so.

        ``a``, ``[B, *shape]``, are the coefficients; an entry whose coefficient is 0 stays at the
        center, as all do where mass moves.
        """
        if moved_mass.moves_mass(self.norm):
            return self.center
        if self.norm == math.inf:
            return jnp.where(a == 0, self.center, jnp.where(a > 0, self.lower, self.upper))
        scale = jnp.ones_like(self.center) if self.scale is None else self.scale
        wide = jnp.where(scale > 0, scale, 1.0)
        box = (self.lower - self.center) / wide, (self.upper - self.center) / wide
        far = -norms.spread(_FAR * self.eps, a) * norms.unit(a * scale, math.inf)
        low, high, far = (t.reshape(len(t), -1) for t in (*box, far))
        radius = (1 - 2 * _EXCESS) * self.eps
        moved = norms.project_in_box(far, jnp.zeros_like(far), radius, self.norm, (low, high))
        return self.center + scale * moved.reshape(self.center.shape)

    def _of_images(self, held: moved_mass.Supply, coefficients: Coefficients, rows: Rows) -> Array:
        """:meth:`least` where mass moves between pixels, into and out of every patch."""
        a, shape = whole(coefficients, rows).a, self.center.shape[-3:]
        supplies = moved_mass.Supply(*(part[rows.sample] for part in held))
        x = self.center[rows.sample].reshape(-1, *shape)
        return moved_mass.least(a.reshape(*a.shape[:2], *shape), x, supplies, self.norm.power)


def _capped_one(size: Array, cap: Array, eps: Array) -> Array:
    """``[G, R]``: upper bounds of ``max { a . d : 0 <= d <= cap, sum d <= eps }``.

    ``size`` ``[G, R, N]`` are the ``a >= 0``, ``cap`` alike, ``eps`` ``[1, R]``. The bound is that
    of the linear program's dual, which holds for any multiplier; a few bisection steps find a good
    one.
    """
    fixed = lax.stop_gradient(size)

    def halved(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        level = 0.5 * (low + high)
        spent = jnp.sum(jnp.where(fixed > level[..., None], cap, 0.0), axis=-1)
        return jnp.where(spent > eps, level, low), jnp.where(spent > eps, high, level)

    ends = jnp.zeros(size.shape[:2], size.dtype), jnp.max(fixed, axis=-1)
    low, high = loops.fori_loop(0, 12, halved, ends)
    duals = [
        level * eps + summed(jnp.maximum(size - level[..., None], 0.0) * cap)
        for level in (low, high)
    ]
    most = norms.largest(size) * eps
    return functools.reduce(jnp.minimum, [*duals, most])


def _capped_two(size: Array, cap: Array, eps: Array) -> Array:
    """``[G, R]``: upper bounds of ``max { a . d : 0 <= d <= cap, ||d||_2 <= eps }``.

    The dual at an approximate multiplier; arguments as for :func:`_capped_one`.
    """
    top = norms.largest(size)
    scale = jnp.where(top > 0, top, 1.0)
    a = size / scale[..., None]
    length = jnp.sqrt(jnp.sum(a**2, axis=-1))
    # Any multiplier gives a bound, so that the one that is found counts as a constant.
    fixed, most, reach = lax.stop_gradient((a, cap, eps))

    def nearer(_: int, level: Array) -> Array:
        free = fixed < level[..., None] * most
        spent = jnp.sum(jnp.where(free, 0.0, most) ** 2, axis=-1)
        better = jnp.sum(jnp.where(free, fixed, 0.0) ** 2, axis=-1)
        better = jnp.sqrt(better / jnp.maximum(reach**2 - spent, 1e-12 * reach**2))
        return jnp.where((better > 0) & jnp.isfinite(better), better, level)

    begun = lax.stop_gradient(length) / jnp.where(reach > 0, reach, 1.0)
    level = loops.fori_loop(0, _TURNS, nearer, begun)
    wide = jnp.where(level > 0, level, 1.0)[..., None]
    move = jnp.minimum(a / wide, cap)
    dual = 0.5 * wide[..., 0] * eps**2 + summed(move * (a - 0.5 * wide * move))
    dual = jnp.where(level > 0, dual, jnp.inf)
    straight = jnp.sqrt(jnp.where(top > 0, summed(a**2), 1.0)) * eps  # The root of 0 has no slope.
    least = jnp.minimum(jnp.minimum(dual, straight), summed(a * cap))
    return jnp.where(top > 0, scale * least * (1 + 8 * float(jnp.finfo(a.dtype).eps)), 0.0)


def ends(box: EntryBox, x: AnyArray) -> tuple[Any, Any]:
    """The ends of a box, to be compared with samples ``[n, *shape]``; infinite for no box."""
    low, high = (-math.inf, math.inf) if box is None else box
    return tuple(  # type: ignore[return-value]
        np.asarray(end, x.dtype).reshape(x.shape[1:] if isinstance(end, tuple) else ())
        for end in (low, high)
    )


def ball(x: Array, eps: Array, norm: Norm, box: EntryBox, scale: Array | None = None) -> Region:
    """The region of each sample: its ball, and the smallest box around it cut by the domain.

    ``eps`` is ``[n]``; with ``scale``, ``[n, *shape]``, an entry moves by at most its product with
    ``eps``, and exactly not where that is 0.

    Nothing can be raised inside a trace: where a radius is negative or NaN, or a center outside the
    box, the radius becomes NaN, for which nothing is certified.
    """
    moves = moved_mass.moves_mass(norm)
    if not moves:
        norms.check_norm(norm)
    unit = 4 * float(jnp.finfo(x.dtype).eps)
    low, high = ends(box, x)
    real = jnp.all(((x >= low) & (x <= high)).reshape(len(x), -1), axis=1) & (eps >= 0)
    if scale is not None:
        real &= jnp.all((scale >= 0).reshape(len(x), -1), axis=1)
    eps = jnp.where(real, eps * (1 + _EXCESS), jnp.nan)
    wide = norms.spread(eps, x)
    if moves:
        wide = moved_mass.reach(moved_mass.supply(x, eps, norm))[:, None, None]
    if scale is not None:
        least = jnp.where((wide > 0) & (scale > 0), tiny(x.dtype), 0.0)
        wide = jnp.maximum(wide * scale * (1 + unit), least)
    reach = wide + jnp.where(wide == 0, 0.0, unit * jnp.abs(x))
    lower, upper = x - reach, x + reach
    if box is not None:
        lower, upper = jnp.maximum(lower, low), jnp.minimum(upper, high)
    return Region(x, lower, upper, eps, norm, scale=None if norm == math.inf else scale)
