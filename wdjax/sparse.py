r"""The l_0 geometry: what counts as changed, the projection on few changes, and steps towards it.

What is counted are coordinates, or pixels: all entries along the last axis of a sample ``[..., c]``
at once. A radius is a number of these; one that is not whole allows as much as the whole number
below it.
"""

import math

import jax
import jax.numpy as jnp

from wdjax import norms

Array = jax.Array


def size(shape: tuple[int, ...], pixels: bool) -> int:
    """How many coordinates or pixels a sample ``[*shape]`` has.

    >>> size((4, 4, 3), False), size((4, 4, 3), True)
    (48, 16)
    """
    return math.prod(shape[:-1] if pixels else shape)


def each(values: Array, pixels: bool) -> Array:
    """Sums ``values``, ``[n, *shape]``, to one for each coordinate or pixel: ``[n, m]``."""
    if pixels and values.ndim < 3:
        raise ValueError(
            f"pixels are counted of samples [..., c], got samples {list(values.shape[1:])} of one "
            "axis; use Lp(0) without pixels."
        )
    return values.sum(-1).reshape(len(values), -1) if pixels else values.reshape(len(values), -1)


def broadcastable(values: Array, x: Array, pixels: bool) -> Array:
    """One value for each coordinate or pixel, ``[n, m]``, reshaped to broadcast to ``x``."""
    return values.reshape(*x.shape[:-1], 1) if pixels else values.reshape(x.shape)


def count(x_adv: Array, x: Array, pixels: bool = False) -> Array:
    """The number of coordinates or pixels in which points differ from samples.

    Args:
      x_adv: ``[n, *shape]`` points.
      x: ``[n, *shape]`` samples.
      pixels: count pixels ``[..., c]``, which differ if one of their channels does.

    Returns:
      ``[n]`` whole numbers, in the dtype of ``x``.

    >>> x = jnp.zeros((1, 2, 3))
    >>> x_adv = x.at[0, 0].set(0.5)
    >>> count(x_adv, x).tolist(), count(x_adv, x, pixels=True).tolist()
    ([3.0], [1.0])
    """
    return jnp.sum(each((x_adv != x).astype(jnp.int32), pixels) > 0, axis=1).astype(x.dtype)


def largest(scores: Array, most: Array) -> Array:
    """Which entries of a row are among its largest; of equal ones the first.

    Args:
      scores: ``[n, m]``
      most: ``[n]``, how many; rounded down.

    Returns:
      ``[n, m]`` booleans, of which exactly ``min(floor(most), m)`` hold in a row.

    >>> largest(jnp.array([[1.0, 3.0, 3.0, 0.0]]), jnp.array([1.9])).tolist()
    [[False, True, False, False]]
    """
    most = jnp.clip(jnp.floor(most), 0, scores.shape[1]).astype(jnp.int32)[:, None]
    least = _ranked(scores, most)
    above, equal = scores > least, scores == least
    left = most - jnp.sum(above, axis=1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=1) <= left))


def _ranked(scores: Array, rank: Array) -> Array:
    """``[n, 1]``: the entry of each row that is the ``rank``-th largest, the largest for 0."""
    ordered = jnp.sort(scores, axis=1, descending=True)
    return jnp.take_along_axis(ordered, jnp.maximum(rank - 1, 0), axis=1)


def project(
    z: Array,
    center: Array,
    radius: Array,
    box: tuple[float, float] | None = None,
    pixels: bool = False,
) -> Array:
    r"""The nearest points of the box that differ from ``center`` in at most ``radius`` coordinates.

    With ``c`` the nearest point of the box, coordinate i that may change reduces the squared
    distance from ``z`` by ``(z_i - x_i)^2 - (z_i - c_i)^2``: the projection takes ``c`` where this
    is largest and the center elsewhere.

    Args:
      z: ``[n, *shape]`` floats.
      center: ``[n, *shape]``, inside the box.
      radius: ``[n]``, how many; rounded down.
      box: ``(low, high)``, or None.
      pixels: count pixels instead of coordinates.

    Returns:
      ``[n, *shape]`` points.

    Cost: a sort of each row.

    Source: Croce and Hein [croce2019], section 3.

    >>> z, x = jnp.array([[0.9, -3.0, 0.5]]), jnp.array([[0.0, 0.1, 0.5]])
    >>> [round(v, 2) for v in project(z, x, jnp.array([1.0]), (0.0, 1.0))[0].tolist()]
    [0.9, 0.1, 0.5]
    """
    near = z if box is None else jnp.clip(z, *box)
    gain = each((near - center) * (2 * z - center - near), pixels)
    return jnp.where(broadcastable(largest(gain, radius), z, pixels), near, center)


_REACH = 4.0
"""How far a step goes, in widths of the box; on three nets more is no better, and 1 is worse."""


def ascend(
    x: Array,
    g: Array,
    size: Array | float,
    box: tuple[float, float] | None = None,
    pixels: bool = False,
) -> Array:
    r"""A step along the gradient that moves ``size`` coordinates by far more than the box.

    ``x + 4 w g / s``, where w is the width of the box (1 without one) and s the ``size``-th largest
    entry of ``|g|``, or for pixels of the lengths of their gradients. Far outside of the box
    :func:`project` keeps the coordinates that raise a linear loss most: those of the largest
    products of gradient and room. A size below 1 moves one coordinate, by this share.

    Args:
      x: ``[n, *shape]`` points.
      g: ``[n, *shape]`` gradients; entries that are not finite count as 0, and rows of zeros do not
        move.
      size: a number or ``[n]``, at least 0; rounded up if it is above 1.
      box: ``(low, high)``, or None.
      pixels: count pixels instead of coordinates.

    Returns:
      ``[n, *shape]`` points, which may be outside of the box.

    Cost: a sort of each row.

    Differs: the authors divide by the l1 norm and multiply by a constant, which depends on the
    number of coordinates.

    Source: Croce and Hein [croce2019], section 3; the scale is this library's own.

    >>> x, g = jnp.zeros((1, 3)), jnp.array([[1.0, -4.0, 2.0]])
    >>> ascend(x, g, 2.0, (0.0, 1.0)).tolist()
    [[2.0, -8.0, 4.0]]
    """
    g = norms.unit(jnp.where(jnp.isfinite(g), g, 0.0), jnp.inf)
    size = jnp.broadcast_to(jnp.asarray(size, x.dtype), x.shape[:1])[:, None]
    steep = jnp.sqrt(each(g**2, pixels))
    rank = jnp.clip(jnp.ceil(size), 1, steep.shape[1]).astype(jnp.int32)
    scale = _ranked(steep, rank)
    width = 1.0 if box is None else box[1] - box[0]
    pace = _REACH * width * jnp.minimum(size, 1.0) / jnp.where(scale > 0, scale, 1.0)
    return x + norms.spread(pace[:, 0], x) * g
