r"""Minima of linear functions over images whose mass moves between pixels, by the dual.

The ball is that of :class:`wdjax.image.ImageWasserstein`, with mass that may move anywhere. Of a
linear function ``c . z`` its minimum is at least

.. math:: -\lambda b + \sum_i x_i \min_j (c_j + \lambda w d_{ij}), \qquad \lambda \ge 0,

with ``b`` the budget in mass times distance: a plan ``pi`` from x to z within the budget pays
``sum pi_ij c_j >= sum pi_ij (c_j + lambda w d_ij) - lambda b``, and the mass at i can do no better
than the best j. Any multiplier is sound, and the best one is exact but for the capacities of
pixels, which only make the ball smaller.

The minimum over j is exact within a window. Beyond it, squares of pixels are bounded by their least
coefficient at their least distance, so that no window is too small for a proof.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeGuard

import jax.numpy as jnp
import numpy as np
from jax import lax

from wdjax import loops, norms
from wdjax.bounds.domain import Array
from wdjax.xla_cpu import rounding, summed

_NEAR = 3
"""Half the window in which distances are exact."""
_TURNS = 12
"""Bisections for the multiplier; any number of them is sound."""
_LOST = 2e-6
"""Share of the mass that a point may have gained or lost by rounding, twice what the ball allows
attacks."""
_PARTS = "power", "channels", "box", "diameter"
"""By which a ball in which mass moves is told from a number."""


class MassBall(Protocol):
    """What a certificate reads of an image-Wasserstein ball; hashable."""

    @property
    def power(self) -> float: ...

    @property
    def channels(self) -> str: ...

    @property
    def box(self) -> tuple[float, float]: ...

    def diameter(self, shape: tuple[int, ...]) -> float: ...

    def cost(self, x: Array, x_adv: Array, proof: Any = None) -> Array: ...


def moves_mass(norm: Any) -> TypeGuard[MassBall]:
    """Whether a region's norm is a ball in which mass moves, not a number."""
    return not isinstance(norm, type) and all(hasattr(norm, part) for part in _PARTS)


class Supply(NamedTuple):
    """What the images of a batch hold, and what may move."""

    mass: Array
    """``[B, C]``: the mass of each channel."""
    weights: Array
    """``[B, C]``: factors of the distances in each channel, rounded down."""
    budget: Array
    """``[B]``: mass times distance, of all channels; NaN where the radius is."""


def supply(x: Array, eps: Array, ball: MassBall) -> Supply:
    """The supply of images ``[B, H, W, C]`` within ``eps`` ``[B]``."""
    mass = jnp.sum(x, axis=(1, 2))
    whole = jnp.sum(mass, axis=1)
    weights = jnp.ones_like(mass)
    if ball.channels == "separate":
        divisor = jnp.where(mass > 0, mass, 1.0)
        weights = jnp.where(mass > 0, (1 - 1e-5) * whole[:, None] / divisor, 1.0)
    return Supply(mass, weights, eps**ball.power * whole)


def reach(supply: Supply) -> Array:
    """``[B, C]``: how much a pixel may gain or lose; mass moves by one pixel at least."""
    most = jnp.minimum(supply.budget[:, None] / supply.weights, supply.mass)
    return most * (1 + 1e-5) + _LOST * jnp.sum(supply.mass, axis=1, keepdims=True)


class Levels(NamedTuple):
    """The least coefficient at each distance of every pixel, for ``min_j (a_j + price d_ij)``.

    ``parts[k]`` ``[G, R, H, W, C]`` is the least coefficient of some pixels whose distance is at
    least ``lengths[k]``; the first is the pixel itself.
    """

    parts: list[Array]
    lengths: list[float]

    @classmethod
    def of(cls, a: Array, power: float) -> "Levels":
        lengths, parts = zip(*_levels(a, power))
        return cls([*parts], [*lengths])

    def nearest(self, price: Array) -> Array:
        """``[G, R, H, W, C]``: ``min_j (a_j + price d_ij)``, or less."""
        found = self.parts[0]
        for part, length in zip(self.parts[1:], self.lengths[1:]):
            found = jnp.minimum(found, part + price * length)
        return found

    def spent(self, price: Array, mass: Array) -> Array:
        """``[G, R]``: mass times distance that is moved at a price."""
        found, far = self.parts[0], jnp.zeros_like(self.parts[0])
        for part, length in zip(self.parts[1:], self.lengths[1:]):
            value = part + price * length
            far = jnp.where(value < found, length, far)
            found = jnp.minimum(found, value)
        return jnp.sum(mass * far, axis=(2, 3, 4))


def least(a: Array, x: Array, held: Supply, power: float) -> Array:
    """``[G, R]``: lower bounds of linear functions over the balls, rounded down.

    Args:
      a: coefficients ``[G, R, H, W, C]``.
      x: ``[R, H, W, C]``
      held: the supply of each row's image.
      power: of the distances.
    """
    exact = Levels.of(a, power)
    fixed = exact._replace(parts=lax.stop_gradient(exact.parts))
    mass, price = lax.stop_gradient((x, _per_channel(held.weights)))
    budget = lax.stop_gradient(held.budget)

    def halved(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        level = 0.5 * (low + high)
        spent = fixed.spent(level[..., None, None, None] * price, mass * price)
        return jnp.where(spent > budget, level, low), jnp.where(spent > budget, high, level)

    none = jnp.zeros(a.shape[:2], a.dtype)
    ends = loops.fori_loop(0, _TURNS, halved, (none, steepest(fixed, price)))
    unit = rounding(a[0, 0].size, a.dtype)
    top = norms.largest(jnp.abs(a).reshape(*a.shape[:2], -1))
    # The best pixel at a price costs at most twice this more than another: so much is rounded.
    slack = (_LOST + 16 * float(jnp.finfo(a.dtype).eps)) * jnp.sum(held.mass, axis=1)

    def dual(level: Array) -> Array:
        gained = x * exact.nearest(level[..., None, None, None] * _per_channel(held.weights))
        size = level * held.budget + summed(jnp.abs(gained))
        return summed(gained) - level * held.budget - unit * size

    return jnp.maximum(*map(dual, ends)) - slack * top


def steepest(levels: Levels, price: Array) -> Array:
    """``[G, R]``: the largest slope ``(a_i - a_j) / (w d_ij)``, or more; at it nothing moves.

    ``price`` ``[R, 1, 1, C]`` are the factors w of the distances.
    """
    first, *others = levels.parts
    highest = jnp.zeros(first.shape[:2], first.dtype)
    for part, length in zip(others, levels.lengths[1:]):
        fall = (first - part) / (length * price)
        highest = jnp.maximum(highest, jnp.max(fall, axis=(2, 3, 4)))
    return highest


def slopes(a: Array, x: Array, ball: MassBall) -> Array:
    """``[K]``: how fast functions ``a`` ``[K, H, W, C]`` of an image x may fall, in ``eps**p``."""
    held = supply(x[None], jnp.ones(1, x.dtype), ball)
    steep = steepest(Levels.of(a[:, None], ball.power), _per_channel(held.weights))
    return held.budget * steep[:, 0]


def _per_channel(weights: Array) -> Array:
    """``[R, C]`` as ``[R, 1, 1, C]``."""
    return weights[:, None, None, :]


def _levels(a: Array, power: float) -> Iterator[tuple[float, Array]]:
    """Yields distances to a power, rounded down, and the least coefficients there."""
    most = max(a.shape[2:4]) - 1
    near = min(_NEAR, most)
    seen, steps = _around(a, near), range(-near, near + 1)
    rings: dict[int, list[Array]] = {}
    for rows, columns in itertools.product(steps, steps):
        rings.setdefault(rows**2 + columns**2, []).append(seen(rows, columns))
    box = functools.reduce(jnp.minimum, itertools.chain(*rings.values()))
    for square in sorted(rings):
        yield _below(math.sqrt(square) ** power), functools.reduce(jnp.minimum, rings[square])
    while near < most:
        step = max(1, near * 2 // 3)
        for axis in (0, 1):
            seen = _around(box, step)
            sides = [seen(*offset[:: 1 - 2 * axis]) for offset in ((step, 0), (-step, 0))]
            box = jnp.minimum(box, jnp.minimum(*sides))
        yield _below(float(near + 1) ** power), box
        near += step


def _around(a: Array, reach: int) -> Callable[[int, int], Array]:
    """``a[..., y + rows, x + columns, :]`` as a function of both, inf outside of the image."""
    height, width = a.shape[2:4]
    sides = ((0, 0), (0, 0), (reach, reach), (reach, reach), (0, 0))
    framed = jnp.pad(a, sides, constant_values=jnp.inf)

    def seen(rows: int, columns: int) -> Array:
        top, left = reach + rows, reach + columns
        return framed[:, :, top : top + height, left : left + width]

    return seen


def _below(length: float) -> float:
    """A float32 just below ``length``, or 0."""
    return float(np.nextafter(np.float32(length), np.float32(0))) if length else 0.0
