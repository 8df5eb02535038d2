"""Natural perturbations of images, to compare with those in a Wasserstein ball."""

import math

import jax
import jax.numpy as jnp

from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array

_SIGMA = 0.3, 1.0, 0.8
"""OpenCV's standard deviation of a filter of k pixels: ``0.3 ((k - 1) / 2 - 1) + 0.8``."""


def translate(x: AnyArray, share: float, angle: float = 0.0) -> Array:
    """Images shifted by a share of their width; uncovered pixels are black.

    Args:
      x: ``[n, height, width, channels]``
      share: shift as a share of the width.
      angle: direction of the shift in degrees, counter-clockwise from the right.

    Returns:
      ``[n, height, width, channels]``, interpolated linearly. What leaves the image is lost, with
      its mass.

    Raises:
      ValueError: ``x`` is no array of floats.

    Source: Hu et al. [hu2020], Tables 4 and 6.

    >>> translate(jnp.eye(4)[None, :, :, None], 0.25)[0, :, :, 0].tolist()[0]
    [0.0, 1.0, 0.0, 0.0]
    """
    arguments.check(x=x)
    x = _images(x)
    reach, turn = share * x.shape[2], math.radians(angle)
    rows, columns = _grid(x)
    return _sample(x, rows + reach * math.sin(turn), columns - reach * math.cos(turn))


def rotate(x: AnyArray, degrees: float) -> Array:
    """Images rotated about their centre, counter-clockwise; uncovered pixels are black.

    Args:
      x: ``[n, height, width, channels]``
      degrees: angle of the rotation.

    Returns:
      ``[n, height, width, channels]``, interpolated linearly.

    Raises:
      ValueError: ``x`` is no array of floats.

    Source: Hu et al. [hu2020], Tables 4 and 6.

    >>> rotate(jnp.arange(4.0).reshape(1, 2, 2, 1), 90)[0, :, :, 0].astype(int).tolist()
    [[1, 3], [0, 2]]
    """
    arguments.check(x=x)
    x = _images(x)
    turn, (rows, columns) = math.radians(degrees), _grid(x)
    middle = [(size - 1) / 2 for size in x.shape[1:3]]
    down, right = rows - middle[0], columns - middle[1]
    back = math.cos(turn) * down + math.sin(turn) * right
    across = math.cos(turn) * right - math.sin(turn) * down
    return _sample(x, back + middle[0], across + middle[1])


def gaussian_blur(x: AnyArray, kernel: int) -> Array:
    """Images filtered by a Gaussian of ``kernel x kernel`` pixels; borders are repeated.

    Args:
      x: ``[n, height, width, channels]``
      kernel: odd width of the filter; its standard deviation is OpenCV's,
        ``0.3 ((kernel - 1) / 2 - 1) + 0.8`` pixels.

    Returns:
      ``[n, height, width, channels]``

    Raises:
      ValueError: ``x`` is no array of floats, or ``kernel`` is even or below 1.

    Source: Hu et al. [hu2020], Tables 4 and 6, who do not name the standard deviation.

    >>> x = jnp.zeros((1, 5, 5, 1)).at[0, 2, 2].set(1.0)
    >>> [round(float(v), 3) for v in gaussian_blur(x, 3)[0, 2, :, 0]]
    [0.0, 0.125, 0.272, 0.125, 0.0]
    """
    arguments.check(x=x)
    x, reach = _images(x), validate.check_count("kernel", kernel) // 2
    if kernel % 2 == 0:
        raise ValueError(f"kernel must be odd, such as 5, got {kernel}.")
    slope, offset, least = _SIGMA
    sigma = slope * (reach - offset) + least
    bell = jnp.exp(-(jnp.arange(-reach, reach + 1.0) ** 2) / (2 * sigma**2)).astype(x.dtype)
    bell = bell / jnp.sum(bell)
    for axis in (1, 2):
        room = [(reach, reach) if k == axis else (0, 0) for k in range(4)]
        padded = jnp.pad(x, room, mode="edge")
        parts = [
            bell[k] * jax.lax.slice_in_dim(padded, k, k + x.shape[axis], axis=axis)
            for k in range(kernel)
        ]
        x = jnp.sum(jnp.stack(parts), axis=0)
    return x


def dim(x: AnyArray, factor: float) -> Array:
    """Images at ``1 / factor`` of their brightness: their distance is 0 if masses are normalised.

    This is why the ball fixes the mass: :func:`~wdjax.image.image_wasserstein_distance` is 0 here,
    but :class:`~wdjax.image.ImageWasserstein` does not contain the darker image.

    Args:
      x: ``[n, height, width, channels]``
      factor: above 0.

    Raises:
      ValueError: ``x`` is no array of floats, or ``factor`` is not above 0.

    Source: Hu et al. [hu2020], Section 3.

    >>> dim(jnp.ones((1, 1, 1, 1)), 4).item()
    0.25
    """
    arguments.check(x=x)
    if not factor > 0:
        raise ValueError(f"factor must be above 0, got {factor!r}.")
    return _images(x) / factor


def _images(x: AnyArray) -> Array:
    """The images as an array ``[n, height, width, channels]``; raises for other shapes."""
    x = jnp.asarray(x)
    if x.ndim != 4:
        raise ValueError(f"images must be [n, height, width, channels], got {list(x.shape)}.")
    return x


def _grid(x: Array) -> tuple[Array, Array]:
    """The row and the column of every pixel, ``[height, width]`` each, as floats."""
    sides = (jnp.arange(size, dtype=x.dtype) for size in x.shape[1:3])
    rows, columns = jnp.meshgrid(*sides, indexing="ij")
    return rows, columns


def _sample(x: Array, rows: Array, columns: Array) -> Array:
    """``[n, H, W, C]``: the images at fractional ``rows`` and ``columns`` ``[H, W]``, 0 outside.

    Values between pixels are interpolated linearly; all images are sampled at the same points.
    """

    def one(plane: Array) -> Array:
        return jax.scipy.ndimage.map_coordinates(plane, [rows, columns], order=1, cval=0.0)

    planes = jnp.moveaxis(x, -1, 1)
    return jnp.moveaxis(jax.vmap(jax.vmap(one))(planes), 1, -1)
