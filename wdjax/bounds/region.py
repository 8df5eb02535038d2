"""The set of perturbed inputs, a ball cut by a box, and minima of linear functions over it.

The ball is that of a norm, or one in which mass moves between pixels (`moved_mass`).
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from wdjax import norms
from wdjax.balls import Lp
from wdjax.bounds import moved_mass
from wdjax.bounds.coefficients import Coefficients, Rows, Window, cleaned, flat, seen, whole
from wdjax.bounds.domain import Array
from wdjax.xla_cpu import framed, rounding, summed

Box = tuple[float, float] | None
Norm = float | moved_mass.MassBall
"""1, 2 or inf, or a ball in which mass moves."""
AnyBall = Lp | moved_mass.MassBall

_EXCESS = 2e-5
"""Fraction by which certified balls are enlarged, so that a point whose distance rounds to at most
``eps`` lies in the certified ball."""
_TURNS = 4
"""Fixed-point steps of the multiplier; any number of them is sound."""


class Region(NamedTuple):
    """A batch of balls, each cut by its box ``[lower, upper]``, ``[B, *shape]``."""

    center: Array
    lower: Array
    upper: Array
    eps: Array
    norm: Norm
    maps: Array | moved_mass.Supply | None = None

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
        return self._replace(maps=framed(self.center, down * (1 + unit), up * (1 + unit)))

    def least(self, coefficients: Coefficients, rows: Rows) -> Array:
        """Minima ``[G, R]``, rounded down, of linear functions over the rows' regions."""
        if isinstance(self.maps, moved_mass.Supply):
            return self._of_images(coefficients, rows)
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
        fall = _capped_one(size, cap, eps) if self.norm == 1 else _capped_two(size, cap, eps)
        return summed(a * center - unit * size * jnp.abs(center)) - (1 + unit) * fall

    def _of_images(self, coefficients: Coefficients, rows: Rows) -> Array:
        """:meth:`least` where mass moves between pixels, into and out of every patch."""
        assert isinstance(self.maps, moved_mass.Supply)
        assert moved_mass.moves_mass(self.norm)
        a = whole(coefficients, rows).a
        shape = self.center.shape[-3:]
        mass, weights, budget, x = (t[rows.sample] for t in (*self.maps, self.center))
        held = moved_mass.Supply(mass, weights, budget)
        a = a.reshape(*a.shape[:2], *shape)
        return moved_mass.least(a, x.reshape(-1, *shape), held, self.norm.power)


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
    low, high = lax.fori_loop(0, 12, halved, ends)
    duals = [
        level * eps + summed(jnp.maximum(size - level[..., None], 0.0) * cap)
        for level in (low, high)
    ]
    most = jnp.max(size, axis=-1) * eps
    return functools.reduce(jnp.minimum, [*duals, most])


def _capped_two(size: Array, cap: Array, eps: Array) -> Array:
    """``[G, R]``: upper bounds of ``max { a . d : 0 <= d <= cap, ||d||_2 <= eps }``.

    The dual at an approximate multiplier; arguments as for :func:`_capped_one`.
    """
    top = jnp.max(size, axis=-1)
    scale = jnp.where(top > 0, top, 1.0)
    a = size / scale[..., None]
    length = jnp.sqrt(jnp.sum(a**2, axis=-1))
    # Any multiplier gives a bound, so that the one that is found counts as a constant.
    fixed, most, reach = lax.stop_gradient((a, cap, eps))

    def nearer(_: int, level: Array) -> Array:
        free = fixed < level[..., None] * most
        spent = jnp.sum(jnp.where(free, 0.0, most) ** 2, axis=-1)
        own = jnp.sum(jnp.where(free, fixed, 0.0) ** 2, axis=-1)
        own = jnp.sqrt(own / jnp.maximum(reach**2 - spent, 1e-12 * reach**2))
        return jnp.where((own > 0) & jnp.isfinite(own), own, level)

    begun = lax.stop_gradient(length) / jnp.where(reach > 0, reach, 1.0)
    level = lax.fori_loop(0, _TURNS, nearer, begun)
    wide = jnp.where(level > 0, level, 1.0)[..., None]
    move = jnp.minimum(a / wide, cap)
    dual = 0.5 * wide[..., 0] * eps**2 + summed(move * (a - 0.5 * wide * move))
    dual = jnp.where(level > 0, dual, jnp.inf)
    straight = jnp.sqrt(jnp.where(top > 0, summed(a**2), 1.0)) * eps  # The root of 0 has no slope.
    least = jnp.minimum(jnp.minimum(dual, straight), summed(a * cap))
    return jnp.where(top > 0, scale * least * (1 + 8 * float(jnp.finfo(a.dtype).eps)), 0.0)


def ball_of(norm: Norm, box: Box) -> AnyBall:
    """The ball that a certificate is for; where mass moves, it moves anywhere, whatever the window.

    Raises:
      ValueError: another norm, or a box that is not the ball's.
    """
    if isinstance(norm, str):
        raise ValueError(f"norm must be 1, 2, inf or an image.ImageWasserstein(), got {norm!r}.")
    if not moved_mass.moves_mass(norm):
        return Lp(norm, box)  # type: ignore[arg-type]
    if box is None or tuple(box) != norm.box:
        raise ValueError(f"images of {norm!r} lie in box={norm.box}, got box={box!r}; pass that.")
    anywhere: moved_mass.MassBall = dataclasses.replace(norm, window=None)  # type: ignore[type-var]
    return anywhere


def norm_of(ball: AnyBall) -> Norm:
    """What a region calls its norm: a number, or the ball itself."""
    return ball.norm if isinstance(ball, Lp) else ball


def ball(x: Array, eps: Array, norm: Norm, box: Box) -> Region:
    """The region of each sample: its ball, and the smallest box around it cut by the domain.

    Nothing can be raised inside a trace: where a radius is negative or NaN, or a center outside the
    box, the radius becomes NaN, for which nothing is certified.
    """
    low, high = (-math.inf, math.inf) if box is None else box
    real = jnp.all(((x >= low) & (x <= high)).reshape(len(x), -1), axis=1) & (eps >= 0)
    eps = jnp.where(real, eps * (1 + _EXCESS), jnp.nan)
    if moved_mass.moves_mass(norm):
        wide = moved_mass.reach(moved_mass.supply(x, eps, norm))[:, None, None]
    else:
        norms.check_norm(norm)  # type: ignore[arg-type]
        wide = norms.spread(eps, x)
    unit = 4 * float(jnp.finfo(x.dtype).eps)
    reach = wide + jnp.where(wide == 0, 0.0, unit * jnp.abs(x))
    lower, upper = x - reach, x + reach
    if box is not None:
        lower, upper = jnp.maximum(lower, box[0]), jnp.minimum(upper, box[1])
    return Region(x, lower, upper, eps, norm)
