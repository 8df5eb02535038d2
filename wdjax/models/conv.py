"""Convolution as PyTorch defines it, computed the way the device at hand is fast at."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

_NHWC = ("NHWC", "HWIO", "NHWC")
_WINOGRAD_CHANNELS = 96
_WINOGRAD_PIXELS = 512


def conv(x, kernel, stride=1, padding=0, groups=1):
    """Cross-correlation of NHWC images with an HWIO kernel.

    An accelerator gets ``lax.conv_general_dilated``. On the CPU, while tracing for it, a few shapes
    are arranged differently where that is faster inside whole networks, forward and input gradient
    taken together (``bench/conv.py``):

    * 1x1 kernels, and kernels as large as their stride, are matrix products;
    * one input channel and a stride: one matrix product with the gathered k*k patches;
    * one input channel a group (depthwise): a multiply-add of a shifted image for each tap;
    * 3x3 of stride 1, at least 96 channels in and out: Winograd's F(2, 3) along the width, which
      needs two thirds of the multiplications. Its differences of inputs cancel in exact arithmetic
      but would loosen interval bounds, another reason to keep small nets out of it.

    Args:
      x: ``[n, height, width, c]``.
      kernel: ``[kh, kw, c / groups, out]``.
      stride: the same for both axes.
      padding: a number of zeros for all four sides, or ``((top, bottom), (left, right))``.
      groups: feature groups; ``c`` for a depthwise convolution.

    Returns:
      ``[n, height', width', out]``.

    >>> conv(jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 2)), stride=2, padding=1)[0, :, :, 0]
    Array([[4., 6.],
           [6., 9.]], dtype=float32)
    """
    pads = ((padding, padding),) * 2 if isinstance(padding, int) else padding
    if jax.default_backend() != "cpu":
        return _lax(x, kernel, stride, pads, groups)
    height, width, channels, outputs = kernel.shape
    unpadded = not any(map(any, pads))
    if channels == 1 and groups == outputs > 1:
        taps = _taps(x, kernel.shape, stride, pads)
        flat = kernel.reshape(height * width, outputs)
        return sum(tap * weights for tap, weights in zip(taps, flat))
    if groups != 1:
        return _lax(x, kernel, stride, pads, groups)
    if height == width == 1 and unpadded:
        return x[:, ::stride, ::stride] @ kernel[0, 0]
    if height == width == stride and unpadded:
        return _tiles(x, stride) @ kernel.reshape(-1, outputs)
    if channels == 1 and stride > 1:
        patches = jnp.concatenate(_taps(x, kernel.shape, stride, pads), axis=-1)
        return patches @ kernel.reshape(-1, outputs)
    if height == width == 3 and stride == 1 and min(channels, outputs) >= _WINOGRAD_CHANNELS:
        even = (x.shape[2] + sum(pads[1])) % 2 == 0
        if even and len(x) * x.shape[1] * x.shape[2] >= _WINOGRAD_PIXELS:
            return _winograd(x, kernel, pads)
    return _lax(x, kernel, stride, pads, 1)


def _lax(x, kernel, stride, pads, groups):
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), pads, dimension_numbers=_NHWC, feature_group_count=groups
    )


def _taps(x, shape, stride, pads):
    """For each position in the kernel, the image values that it meets."""
    height, width = shape[:2]
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    rows = stride * ((x.shape[1] - height) // stride) + 1
    cols = stride * ((x.shape[2] - width) // stride) + 1
    return [
        x[:, i : i + rows : stride, j : j + cols : stride]
        for i in range(height)
        for j in range(width)
    ]


def _tiles(x, size):
    """The image cut into squares that do not overlap, each flattened: row, column, channel."""
    n, height, width, channels = x.shape
    rows, cols = height // size, width // size
    x = x[:, : rows * size, : cols * size].reshape(n, rows, size, cols, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, rows, cols, size * size * channels)


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _winograd(x, kernel, pads):
    """3x3, stride 1: two neighbouring outputs from four products instead of six, along the width.

    Compiled even outside ``jit``: run eagerly on jax 0.7.2's CPU backend, these operations now and
    then gave wrong numbers, a race that no single one of them shows.

    Source: Lavin and Gray (2016), F(2, 3).
    """
    n, _, _, channels = x.shape
    small = x.shape[1] * x.shape[2] <= 64
    (top, bottom), sides = pads
    x = jnp.pad(x, ((0, 0), (top, bottom) if small else (0, 0), sides, (0, 0)))
    pairs = x.reshape(n, x.shape[1], x.shape[2] // 2, 2, channels)
    even, odd = pairs[:, :, :, 0], pairs[:, :, :, 1]
    first, second, third, fourth = even[:, :, :-1], odd[:, :, :-1], even[:, :, 1:], odd[:, :, 1:]
    tiles = (first - third, second + third, third - second, second - fourth)
    left, middle, right = kernel[:, :1], kernel[:, 1:2], kernel[:, 2:]
    filters = (left, (left + middle + right) / 2, (left - middle + right) / 2, right)
    if small:
        rows = x.shape[1] - 2
        products = [
            jnp.concatenate([tile[:, i : i + rows] for i in range(3)], axis=-1)
            @ weights.reshape(3 * channels, -1)
            for tile, weights in zip(tiles, filters)
        ]
    else:
        upright = ((top, bottom), (0, 0))
        products = [_lax(tile, weights, 1, upright, 1) for tile, weights in zip(tiles, filters)]
    a, b, c, d = products
    out = jnp.stack([a + b + c, b - c - d], axis=3)
    return out.reshape(n, out.shape[1], -1, out.shape[-1])
