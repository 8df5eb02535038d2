r"""From a latent vector to an input: a linear map to a small image, bicubic interpolation, a ball.

The first two are linear, so that their product is one matrix, computed once a step.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from wdjax import norms
from wdjax.balls import Lp
from wdjax.core import Array

Upsample = Literal["none", "fixed", "learnable"]
UPSAMPLE: tuple[Upsample, ...] = ("none", "fixed", "learnable")


def small_shape(shape: tuple[int, ...], side: int | None) -> tuple[int, ...]:
    """The shape of the small image: half the sides, but at least 8; vectors keep their shape.

    >>> small_shape((28, 28, 1), None), small_shape((28, 28, 3), 7), small_shape((8, 8, 1), None)
    ((14, 14, 1), (7, 7, 3), (8, 8, 1))
    """
    if len(shape) != 3:
        return shape
    height, width = (side, side) if side else tuple(max(8, s // 2) for s in shape[:2])
    return (min(height, shape[0]), min(width, shape[1]), shape[2])


def orthogonal(tall: Array, latent: int) -> Array:
    """``[L, size]``: a map with orthogonal rows or columns; it keeps variances if L < size.

    Args:
      tall: ``[max(L, size), min(L, size)]`` random numbers.
      latent: L.

    >>> w = orthogonal(jax.random.normal(jax.random.key(0), (5, 3)), 3)
    >>> bool(jnp.allclose(w @ w.T, jnp.eye(3) * 5 / 3, atol=1e-5))
    True
    """
    q = jnp.linalg.qr(tall)[0]
    size = tall.shape[1] if len(tall) == latent else len(tall)
    rows = q if len(tall) == latent else q.T
    return rows * math.sqrt(max(1.0, size / latent))


def interpolated(linear: Array, small: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    r"""Interpolates the rows of a linear map, which are small images, to full size.

    Bicubic by Keys's kernel with a = -1/2.

    Args:
      linear: ``[L, prod(small)]``.
      small: shape of the small image.
      shape: shape of an input.

    Returns:
      ``[L, prod(shape)]``.

    Source: Wang et al. [wang2025], equations 44 and 45; Keys [keys1981].

    >>> interpolated(jnp.ones((2, 4)), (2, 2, 1), (4, 4, 1)).round(4).min().tolist()
    1.0
    """
    if small == shape:
        return linear
    images = linear.reshape(-1, *small)
    full = jax.image.resize(images, (len(images), *shape), "cubic", antialias=False)
    return full.reshape(len(images), -1)


def into_ball(v: Array, eps: ArrayLike, norm: float) -> Array:
    r"""``g_B``: maps vectors to perturbations of norm at most ``eps``; differentiable.

    linf: ``eps tanh(v)``. l2 and l1: along ``v``, ``eps tanh(s) v / ||v||_r``, where ``s`` is the
      root
    mean square or the mean absolute value of the entries.

    Args:
      v: ``[..., d]``.
      eps: radius, a number.
      norm: 1, 2 or inf.

    Returns:
      ``[..., d]``, inside up to rounding.

    Differs: the paper has linf alone (equation 46).

    Source: Wang et al. [wang2025], equation 46.

    >>> [round(v, 3) for v in into_ball(jnp.array([30.0, -40.0]), 0.5, 2).tolist()]
    [0.3, -0.4]
    """
    if norms.check_norm(norm) == math.inf:
        return jnp.asarray(eps * jnp.tanh(v))
    size = v.shape[-1]
    if norm == 1:
        length = jnp.mean(jnp.abs(v), axis=-1, keepdims=True)
        return jnp.asarray(eps * v * _tanh_ratio(length) / size)
    square = jnp.mean(v**2, axis=-1, keepdims=True)
    length = jnp.sqrt(jnp.where(square > 0, square, 1.0))
    return jnp.asarray(eps * v * jnp.where(square > 0, _tanh_ratio(length), 1.0) / np.sqrt(size))


def _tanh_ratio(s: Array) -> Array:
    """``tanh(s) / s``, and 1 where s is at most 1e-4."""
    some = s > 1e-4
    return jnp.where(some, jnp.tanh(s) / jnp.where(some, s, 1.0), 1.0)


def placed(x: Array, delta: Array, eps: ArrayLike, ball: Lp) -> Array:
    """``x + delta``, rounded into the ball and clipped to the box.

    Args:
      x: ``[n, *shape]`` in the box.
      delta: ``[n, M, *shape]``.
      eps: radius, a number.
      ball: norm and box.

    Returns:
      ``[n, M, *shape]`` points of the ball and the box.

    >>> placed(jnp.array([[0.95]]), jnp.full((1, 1, 1), 0.125), 0.125, Lp()).tolist()
    [[[1.0]]]
    """
    radius = jnp.asarray(eps, x.dtype)

    def one(moved: Array) -> Array:
        return norms.retract(x + moved, x, radius, ball.norm, ball.box)

    return jax.vmap(one, in_axes=1, out_axes=1)(delta)
