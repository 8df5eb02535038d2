"""Convolution as PyTorch defines it, computed the way the device at hand is fast at."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

_NHWC = ("NHWC", "HWIO", "NHWC")
_LANES = 32
_WINOGRAD_CHANNELS = 96
_WINOGRAD_PIXELS = 512


def conv(x, kernel, stride=1, padding=0, groups=1):
    """Cross-correlation of NHWC images with an HWIO kernel.

    An accelerator gets ``lax.conv_general_dilated``. On the CPU, while tracing for it, some shapes
    are arranged differently where that is faster inside whole networks (``bench/conv.py``). The
    value, the value of which a gradient is wanted, and the tangent, whose transpose is the
    backward pass, are arranged independently:

    * 1x1 kernels, and kernels as large as their stride, are matrix products;
    * one input channel: the value is a multiply-add for each tap if strided or depthwise, the
      backward pass one matrix product with the k*k patches;
    * few output channels leave a vector unit idle: several neighbours in a row are computed at
      once, as further channels of a wider kernel; likewise the few input channels backwards;
    * no padding: XLA's fast path needs some, so a column is added and taken off;
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
    pads = ((padding, padding),) * 2 if isinstance(padding, int) else tuple(map(tuple, padding))
    if jax.default_backend() != "cpu":
        return _lax(x, kernel, stride, pads, groups)
    height, width, channels, outputs = kernel.shape
    if channels == 1 and groups == outputs > 1:
        return _tap_by_tap(x, kernel, stride, pads)
    if groups != 1:
        return _lax(x, kernel, stride, pads, groups)
    if height == width == 1 and not any(map(any, pads)):
        return x[:, ::stride, ::stride] @ kernel[0, 0]
    if height == width == stride and not any(map(any, pads)):
        return _tiles(x, stride) @ kernel.reshape(-1, outputs)
    return _arranged(x, kernel, stride, pads)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _arranged(x, kernel, stride, pads):
    return _value(x, kernel, stride, pads, _lax)


@functools.partial(_arranged.defjvp, symbolic_zeros=True)
def _arranged_jvp(stride, pads, primals, tangents):
    x, kernel = primals
    dx, dkernel = tangents
    value = _value(x, kernel, stride, pads, _lax_padded)
    tangent = jnp.zeros_like(value)
    if not isinstance(dx, SymbolicZero):
        tangent = _tangent(dx, kernel, stride, pads)
    if not isinstance(dkernel, SymbolicZero):
        tangent += _lax(x, dkernel, stride, pads)
    return value, tangent


def _value(x, kernel, stride, pads, otherwise):
    channels, outputs = kernel.shape[2:]
    if _winograd_pays(x, kernel, stride, pads):
        return _winograd(x, kernel, pads)
    if channels == 1:
        arranged = _tap_by_tap if stride > 1 else otherwise
    else:
        arranged = _abreast if outputs <= _LANES // 2 else otherwise
    return arranged(x, kernel, stride, pads)


def _tangent(dx, kernel, stride, pads):
    """The convolution again, so arranged that its transpose is fast."""
    height, width, channels, _ = kernel.shape
    if channels == 1:
        patches = jnp.concatenate(_taps(dx, kernel.shape, stride, pads), axis=-1)
        return patches @ kernel.reshape(height * width, -1)
    if _winograd_pays(dx, kernel, stride, pads):
        return _winograd(dx, kernel, pads)
    if stride > 1 or channels > _LANES // 2:
        return _lax(dx, kernel, stride, pads)
    mirrored = kernel[::-1, ::-1].swapaxes(2, 3)
    (top, bottom), (left, right) = pads
    pads_back = (height - 1 - top, height - 1 - bottom), (width - 1 - left, width - 1 - right)
    backward = functools.partial(_abreast, kernel=mirrored, stride=1, pads=pads_back)
    value = jax.eval_shape(lambda dx: _lax(dx, kernel, stride, pads), dx)
    return jax.linear_transpose(backward, value)(dx)[0]


def _lax(x, kernel, stride, pads, groups=1):
    return _dilated(x, kernel, (stride, stride), pads, groups)


def _dilated(x, kernel, strides, pads, groups=1):
    return lax.conv_general_dilated(
        x, kernel, strides, pads, dimension_numbers=_NHWC, feature_group_count=groups
    )


def _lax_padded(x, kernel, stride, pads):
    """With a column to spare where there is no padding."""
    if any(map(any, pads)) or stride > 1:
        return _lax(x, kernel, stride, pads)
    return _lax(x, kernel, stride, ((0, 0), (0, 1)))[:, :, :-1]


def _abreast(x, kernel, stride, pads):
    """Neighbours in a row side by side: channels of a wider kernel that takes longer strides."""
    height, width, channels, outputs = kernel.shape
    left, right = pads[1]
    columns = (x.shape[2] + left + right - width) // stride + 1
    count = max(t for t in range(1, _LANES // outputs + 1) if columns % t == 0)
    if count == 1 or columns < 1:
        return _lax(x, kernel, stride, pads)
    reach = stride * (count - 1)
    shifted = [
        jnp.pad(kernel, ((0, 0), (stride * i, reach - stride * i), (0, 0), (0, 0)))
        for i in range(count)
    ]
    wide = jnp.stack(shifted, axis=3).reshape(height, width + reach, channels, count * outputs)
    right = stride * (columns - count) + wide.shape[1] - x.shape[2] - left
    whole = (0, -channels % 4 if channels < 4 else 0)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), whole))
    wide = jnp.pad(wide, ((0, 0), (0, 0), whole, (0, 0)))
    out = _dilated(x, wide, (stride, stride * count), (pads[0], (left, right)))
    return out.reshape(*out.shape[:2], columns, outputs)


def _tap_by_tap(x, kernel, stride, pads):
    """One multiply-add an entry of the kernel, for one input channel a group."""
    taps = _taps(x, kernel.shape, stride, pads)
    return sum(tap * weights for tap, weights in zip(taps, kernel.reshape(len(taps), -1)))


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


def _winograd_pays(x, kernel, stride, pads):
    height, width, channels, outputs = kernel.shape
    if (height, width, stride) != (3, 3, 1) or min(channels, outputs) < _WINOGRAD_CHANNELS:
        return False
    even = (x.shape[2] + sum(pads[1])) % 2 == 0
    return even and len(x) * x.shape[1] * x.shape[2] >= _WINOGRAD_PIXELS


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
