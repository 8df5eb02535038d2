"""Convolution as PyTorch defines it, with gradients that are fast on the CPU, also inside loops."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from wdjax import distinct
from wdjax.tracing import analysed
from wdjax.xla_cpu import FILLED, LANES, WINOGRAD_CHANNELS, WINOGRAD_PIXELS, on_cpu

Pads = tuple[tuple[int, int], tuple[int, int]]


def conv(
    x: Array, kernel: Array, stride: int = 1, padding: int | Pads = 0, groups: int = 1
) -> Array:
    """Cross-correlation of NHWC images with an HWIO kernel.

    On an accelerator this is ``lax.conv_general_dilated``. XLA's CPU compiler uses its fast layout
    for convolutions outside of loops only, so on the CPU both gradients are written out in that
    layout: the image's as a convolution with the mirrored kernel, the kernel's as a convolution
    whose channels are the images. Each of the following cases is faster by more than 10 % in whole
    networks and in loops (``bench/conv.py``):

    * 1x1 kernels, and kernels as large as their stride, are matrix products;
    * one input channel a group: a multiply-add for each entry of the kernel; for a single channel
      the image's gradient is one matrix product and one sum of shifted patches;
    * few output channels would leave vector units idle: several neighbours in a row are computed at
      once, as further channels of a wider kernel; so is the image's gradient of stride 1 for few
      channels; two or three input channels are padded to four;
    * no padding, where a gradient is taken: XLA's fast path needs some, so a column is added and
      removed;
    * 3x3 of stride 1 with at least 96 channels in and out: Winograd's F(2, 3) along the width,
      which needs two thirds of the multiplications. Its differences of inputs cancel in exact
      arithmetic but would loosen interval bounds, another reason not to use it for small nets.

    Args:
      x: ``[n, height, width, c]``.
      kernel: ``[kh, kw, c / groups, out]``.
      stride: for both axes.
      padding: zeros on all four sides, or ``((top, bottom), (left, right))``.
      groups: feature groups; ``c`` for a depthwise convolution.

    Returns:
      ``[n, height', width', out]``.

    Cost: each gradient as many multiplications as the value; forward mode is slow inside a loop.

    >>> conv(jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 2)), stride=2, padding=1)[0, :, :, 0]
    Array([[4., 6.],
           [6., 9.]], dtype=float32)
    """
    pads = ((padding, padding),) * 2 if isinstance(padding, int) else tuple(map(tuple, padding))
    empty = not x.size or any(n + sum(p) < k for n, p, k in zip(x.shape[1:], pads, kernel.shape))
    if empty or analysed() or not on_cpu():
        return _lax(x, kernel, stride, pads, groups)
    height, width, channels, outputs = kernel.shape
    if channels == 1 and groups == outputs > 1:
        return _tap_by_tap(x, kernel, stride, pads)
    if groups == 1 and height == width and height in (1, stride) and not any(map(any, pads)):
        tiles = x[:, ::stride, ::stride] if height == 1 else _tiles(x, stride)
        return tiles @ kernel.reshape(-1, outputs)
    return _conv(x, kernel, stride, pads, groups, False)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4, 5))
def _conv(x, kernel, stride, pads, groups, derived):
    """The convolution for a CPU, in the way that is fastest for its shape; see :func:`_conv_jvp`.

    ``derived`` says whether it is computed as part of a derivative.
    """
    channels, outputs = kernel.shape[2:]
    if groups == channels == 1:
        return _tap_by_tap(x, kernel, stride, pads)
    if groups == 1 and outputs <= LANES // 2:
        return _abreast(x, kernel, stride, pads)
    return _dense(x, kernel, stride, pads, groups, spare=derived)


@functools.partial(_conv.defjvp, symbolic_zeros=True)
def _conv_jvp(stride, pads, groups, derived, primals, tangents):
    """The derivative of :func:`_conv`: the transpose of its gradient, for image and kernel.

    Reverse mode transposes it back, and so gets the gradients that are written below, whose layout
    is fast inside loops.
    """
    del derived
    x, kernel = primals
    value = _conv(x, kernel, stride, pads, groups, True)
    gradients = (
        lambda out: _image_gradient(out, kernel, x.shape, stride, pads, groups),
        lambda out: _kernel_gradient(out, x, kernel.shape, stride, pads, groups),
    )
    tangent = jnp.zeros_like(value)
    for gradient, direction in zip(gradients, tangents):
        if not isinstance(direction, SymbolicZero):
            tangent += jax.linear_transpose(gradient, value)(direction)[0]
    return value, tangent


def _image_gradient(out, kernel, shape, stride, pads, groups):
    """The gradient with respect to the image, of ``shape``, from that of the outputs, ``out``.

    It is a convolution by the mirrored kernel; ``pads`` are those of the forward convolution.
    """
    height, width, channels, outputs = kernel.shape
    if groups == channels == 1:
        return _unpatched(out @ kernel.reshape(-1, outputs).T, shape, kernel.shape, stride, pads)
    mirrored = kernel[::-1, ::-1].reshape(height, width, channels, groups, -1)
    mirrored = mirrored.transpose(0, 1, 4, 3, 2).reshape(height, width, outputs // groups, -1)
    around = tuple(
        (k - 1 - low, n + low - stride * (m - 1) - 1)
        for k, n, m, (low, _) in zip(kernel.shape, shape[1:], out.shape[1:], pads)
    )
    if groups == stride == 1 and channels <= LANES // 2:
        return _abreast(out, mirrored, 1, around)
    return _dense(out, mirrored, 1, around, groups, lhs_dilation=(stride, stride))


def _kernel_gradient(out, x, shape, stride, pads, groups):
    """The gradient with respect to the kernel, of ``shape``, from that of the outputs, ``out``.

    It is a convolution in which channels play the part of images, and images that of channels.
    """
    n, rows, columns, _ = x.shape
    channels = x.reshape(n, rows, columns, groups, -1).transpose(4, 1, 2, 3, 0)
    channels = channels.reshape(-1, rows, columns, groups * n)
    around = tuple(
        (low, k + stride * (m - 1) - n - low)
        for k, n, m, (low, _) in zip(shape, x.shape[1:], out.shape[1:], pads)
    )
    kernel = out.transpose(1, 2, 0, 3)
    gradient = _dense(channels, kernel, 1, around, groups, rhs_dilation=(stride, stride))
    return gradient.transpose(1, 2, 0, 3)


def _lax(x, kernel, stride, pads, groups=1, **dilation):
    """XLA's convolution of NHWC images by an HWIO kernel."""
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride) if isinstance(stride, int) else stride,
        pads,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        **dilation,
    )


def _dense(x, kernel, stride, pads, groups, spare=True, **dilation):
    """A convolution in the way that is fastest on a CPU: XLA's, or Winograd's algorithm.

    With ``spare`` a convolution without padding gets a column of padding at the right, whose
    outputs are dropped.
    """
    if stride > 1 or any(max(factors) > 1 for factors in dilation.values()):
        return _lax(x, kernel, stride, pads, groups, **dilation)
    if groups == 1 and _winograd_pays(x, kernel, pads):
        return _winograd(x, kernel, pads)
    if any(map(any, pads)) or not spare:
        return _lax(x, kernel, stride, pads, groups)
    return _lax(x, kernel, stride, ((0, 0), (0, 1)), groups)[:, :, :-1]


def _abreast(x, kernel, stride, pads):
    """The convolution with several adjacent outputs of a row computed at once, as channels.

    The kernel is widened to hold a shifted copy for each of them, and the stride along the row
    grows by their number; this fills the CPU's vector lanes where there are few outputs. Returns
    the usual ``[n, rows, columns, outputs]``.
    """
    height, width, channels, outputs = kernel.shape
    left, right = pads[1]
    columns = (x.shape[2] + left + right - width) // stride + 1
    count = max(t for t in range(1, LANES // outputs + 1) if columns % t == 0)
    if count == 1:
        return _dense(x, kernel, stride, pads, 1)
    reach = stride * (count - 1)
    shifted = [
        jnp.pad(kernel, ((0, 0), (stride * i, reach - stride * i), (0, 0), (0, 0)))
        for i in range(count)
    ]
    wide = jnp.stack(shifted, axis=3).reshape(height, width + reach, channels, count * outputs)
    right = stride * (columns - count) + wide.shape[1] - x.shape[2] - left
    none, spare = (0, 0), (0, max(0, FILLED - channels))
    x, wide = jnp.pad(x, (none, none, none, spare)), jnp.pad(wide, (none, none, spare, none))
    out = _lax(x, wide, (stride, stride * count), (pads[0], (left, right)))
    return out.reshape(*out.shape[:2], columns, outputs)


def _tap_by_tap(x, kernel, stride, pads):
    """The convolution with one input channel a group: a multiply-add for each kernel entry."""
    taps = _taps(x, kernel.shape, stride, pads)
    return sum(tap * weights for tap, weights in zip(taps, kernel.reshape(len(taps), 1, 1, 1, -1)))


def _unpatched(patches, shape, kernel_shape, stride, pads):
    """``[n, height, width, 1]``: the sum of overlapping patches, the transpose of taking patches.

    ``patches`` is ``[n, rows, columns, h w]``, ``shape`` the image's. Pixels at equal positions in
    squares of ``stride x stride`` receive the same kernel entries, so that their sums are sums of
    shifted patches, in one loop; transposed slices would be a loop each.
    """
    n, height, width, _ = shape
    tall, wide = (-(-side // stride) for side in kernel_shape[:2])
    sides = [(0, stride * span - side) for span, side in zip((tall, wide), kernel_shape)]
    around = ((0, 0), (tall - 1, tall - 1), (wide - 1, wide - 1), *sides)
    entries = jnp.pad(patches.reshape(*patches.shape[:3], *kernel_shape[:2]), around)
    entries = entries.reshape(*entries.shape[:3], tall, stride, wide, stride)
    rows, cols = patches.shape[1] + tall - 1, patches.shape[2] + wide - 1
    squares = sum(
        entries[:, tall - 1 - i :, wide - 1 - j :, i, :, j][:, :rows, :cols]
        for i in range(tall)
        for j in range(wide)
    )
    image = squares.transpose(0, 1, 3, 2, 4).reshape(n, rows * stride, cols * stride, 1)
    borders = [
        (-low, low + size - full, 0)
        for (low, _), size, full in zip(pads, (height, width), image.shape[1:])
    ]
    return lax.pad(image, jnp.zeros((), image.dtype), ((0, 0, 0), *borders, (0, 0, 0)))


def _taps(x, shape, stride, pads):
    """``[n, rows, columns, c]`` for each entry of the kernel: the values that it multiplies."""
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
    """Cuts the image into squares that do not overlap, each flattened: row, column, channel."""
    n, height, width, channels = x.shape
    rows, cols = height // size, width // size
    x = x[:, : rows * size, : cols * size].reshape(n, rows, size, cols, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, rows, cols, size * size * channels)


def _winograd_pays(x, kernel, pads):
    """Whether Winograd's algorithm is faster: 3x3 kernels with many channels on many pixels."""
    height, width, channels, outputs = kernel.shape
    if (height, width) != (3, 3) or min(channels, outputs) < WINOGRAD_CHANNELS:
        return False
    even = (x.shape[2] + sum(pads[1])) % 2 == 0
    return even and len(x) * x.shape[1] * x.shape[2] >= WINOGRAD_PIXELS


@functools.partial(distinct.jit, static_argnums=2, inline=True)
def _winograd(x, kernel, pads):
    """A 3x3 convolution of stride 1 with fewer products, by Winograd's algorithm along the width.

    Two neighbouring outputs take four products instead of six. ``x`` is
    ``[n, height, width, channels]``, ``pads`` the padding of height and width; the padded width
    must be even.

    Compiled even outside ``jit``: run eagerly on jax 0.7.2's CPU backend, these operations
    sometimes gave wrong numbers, by a race that no single one of them shows.

    Source: Lavin and Gray (2016), F(2, 3).
    """
    upright, sides = pads
    none = (0, 0, 0)
    x = lax.pad(x, jnp.zeros((), x.dtype), (none, none, (*sides, 0), none))
    pairs = x.reshape(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3])
    even, odd = pairs[:, :, :, 0], pairs[:, :, :, 1]
    first, second, third, fourth = even[:, :, :-1], odd[:, :, :-1], even[:, :, 1:], odd[:, :, 1:]
    tiles = (first - third, second + third, third - second, second - fourth)
    left, middle, right = kernel[:, :1], kernel[:, 1:2], kernel[:, 2:]
    filters = (left, (left + middle + right) / 2, (left - middle + right) / 2, right)
    a, b, c, d = (
        _lax(tile, weights, 1, (upright, (0, 0))) for tile, weights in zip(tiles, filters)
    )
    out = jnp.stack([a + b + c, b - c - d], axis=3)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])
