r"""Upper bounds of the l2 norms of affine maps, sound against rounding.

Matrices by Gram iteration: with ``G = A A^T``, ``|A|^2 = |G|`` and again ``|G|^2 = |G G^T|``; after
``t`` steps the Frobenius norm is at most ``n^(1 / 2^(t + 1))`` times too large. A convolution of
stride 1 is a part of the one on an endless image, whose norm is the largest of its symbol, the
matrices ``F(s) = sum_k K_k exp(i k s)`` of the channels. Along each axis ``|u^* F(s) v|`` is the
absolute value of a trigonometric polynomial of degree ``(taps - 1) / 2``, and so at most
``1 / cos(pi (taps - 1) / (2 N))`` times its largest value at ``N`` equidistant angles (M. Riesz). A
strided convolution has stride 1 on blocks of the image.

Source: Delattre et al. [delattre2024]; here with rounding, and for convolutions at few angles.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from wdjax import loops, norms
from wdjax.bounds.coefficients import Kernel, blocks, plain
from wdjax.bounds.domain import Array, gamma
from wdjax.bounds.network import Affine, Part

_STEPS = 6
_ENTRIES = 2**24
"""Largest number of entries of a matrix that is written out."""
_ANGLES = 8
"""Number of angles along an axis for each tap but the first."""


def norm(affine: Affine, part: Part, shape: tuple[int, ...]) -> Array:
    """An upper bound of the l2 norm of one part of an affine map, whose operand has ``shape``.

    It is at most the root of the largest sum of a row times the largest sum of a column, which is
    the norm itself where no entries are added up.
    """
    out, ones = affine.offset, jnp.ones(shape, affine.offset.dtype)
    heights, pull = loops.linear_pullback(part.absolute, ones, out)
    length = _root(jnp.max(heights) * jnp.max(pull(jnp.ones_like(heights))))
    if affine.record.once and not affine.record.sums:
        return length * (1 + gamma(4, out.dtype))
    rough = length * (1 + 2 * gamma(ones.size + out.size, out.dtype))
    kernel = plain(affine.node.eqn, affine.exact)
    if kernel is not None:
        return jnp.minimum(rough, of_kernel(kernel))
    if ones.size * out.size > _ENTRIES:
        return rough
    basis = jnp.eye(ones.size, dtype=out.dtype).reshape(-1, *shape)
    matrix = jax.vmap(part.apply)(basis).reshape(ones.size, -1)
    return jnp.minimum(rough, of_matrix(matrix))


def of_matrix(matrix: Array) -> Array:
    """``[...]``: upper bounds of the largest singular values of matrices ``[..., n, m]``."""
    if matrix.shape[-2] > matrix.shape[-1]:
        matrix = jnp.swapaxes(matrix, -1, -2)
    matrix, length = scaled(matrix)
    gram = matrix @ jnp.swapaxes(matrix, -1, -2)
    return length * of_gram(gram, gamma(matrix.shape[-1], matrix.dtype))


def scaled(matrix: Array) -> tuple[Array, Array]:
    """Matrices of Frobenius norm about 1, and the factors ``[...]`` that were taken out."""
    axes = (-2, -1)
    top = lax.stop_gradient(jnp.max(jnp.abs(matrix), axis=axes, keepdims=True))
    matrix = matrix / jnp.where(top > 0, top, 1.0)  # No square under- or overflows.
    length = _root(jnp.sum(matrix**2, axis=axes, keepdims=True))
    matrix = matrix / jnp.where(length > 0, length, 1.0)
    return matrix, (top * length)[..., 0, 0] * (1 + gamma(4, matrix.dtype))


def of_gram(gram: Array, lost: float) -> Array:
    """``[...]``: upper bounds of ``|A|``, of ``A A^T`` ``[..., n, n]`` that is off by ``lost``."""
    size, dtype = gram.shape[-1], gram.dtype
    unit = float(jnp.finfo(dtype).eps)

    def scale(gram: Array) -> tuple[Array, Array]:
        length = _root(jnp.sum(gram**2, axis=(-2, -1)))
        return gram / jnp.where(length > 0, length, 1.0)[..., None, None], length

    def step(gram: Array, _: None) -> tuple[Array, Array]:
        return scale(gram @ jnp.swapaxes(gram, -1, -2))

    gram, first = scale(gram)
    _, lengths = loops.scan(step, gram, length=_STEPS)
    found = jnp.full_like(first, 1 + gamma(size**2, dtype))
    for length in lengths[::-1]:
        found = _root(length * (found + 2 * unit) + gamma(size, dtype)) * (1 + 4 * unit)
    return _root(first * (found + 2 * unit) + lost) * (1 + 4 * unit)


def of_kernel(conv: Kernel) -> Array:
    """An upper bound of a convolution's norm, whatever its padding and the image's size."""
    kernel = blocks(conv)[0]
    taps = kernel.shape[:2]
    counts = [max(_ANGLES * (size - 1), 1) for size in taps]
    turns = [
        2 * math.pi / count * np.outer(np.arange(count), np.arange(size))
        for count, size in zip(counts, taps)
    ]
    turns[0] = turns[0][: counts[0] // 2 + 1]  # The other matrices are conjugate to these.
    phases = turns[0][:, None, :, None] + turns[1][None, :, None, :]
    parts = [jnp.asarray(f(phases), kernel.dtype).reshape(-1, *taps) for f in (np.cos, np.sin)]
    real, imaginary = (jnp.einsum("fhw,hwio->foi", part, kernel) for part in parts)
    rows = [[real, -imaginary], [imaginary, real]]
    symbol = jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)
    most = norms.largest(of_matrix(symbol))
    lost = gamma(2 * math.prod(taps), kernel.dtype) * jnp.sum(jnp.abs(kernel), axis=(0, 1))
    between = math.prod(math.cos(math.pi * (n - 1) / (2 * m)) for n, m in zip(taps, counts))
    rest = 2 * norms.lp_norm(lost.reshape(1, -1), 2)[0]
    return (most + rest) * (1 + 1e-6) / between


def _root(square: Array) -> Array:
    """The square root, whose derivative at 0 is 0."""
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
