"""Coefficients of many linear functions of a value, dense (``Whole``) or as patches (``Window``).

There are ``G`` functions for each of ``R`` rows. A row belongs to one sample. In patches a row also
starts from one position ``p`` of a feature map, and its coefficients in an earlier map are nonzero
only in a patch ``[S p + o, S p + o + h)``, of stride ``S``, offset ``o`` and size ``h`` along each
axis. Sent back through a convolution with kernel size ``k`` and stride ``s``, the patch gets size
``(h - 1) s + k``, whatever the map's size, and stride ``s S``.

At the input of a convolution of stride ``s > 1`` a patch is stored in blocks of ``s`` by ``s``
entries, whose entries lie along the last axis, since CPUs run that faster.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from wdjax import loops
from wdjax.bounds.domain import Array, Linear
from wdjax.xla_cpu import Pair, gathered, transposed_conv, unframed


class Rows(NamedTuple):
    """``[R]`` rows: their sample's index, and their position in the map that they start from."""

    sample: Array
    position: tuple[Array, Array] | None = None
    each: bool = False
    """Whether there is one row for each sample, in order, so that nothing has to be gathered."""

    def of_all(self) -> "Rows":
        """The same rows, to look up an array that all samples share (a batch of 1)."""
        return self._replace(sample=jnp.zeros_like(self.sample), each=False)


class Whole(NamedTuple):
    """Dense coefficients ``[G, R, *shape]``."""

    a: Array

    def behind(self, linear: Linear, shape: tuple[int, ...]) -> "Whole":
        """The coefficients of ``linear``'s operand, which has this ``shape``."""
        out, pull = loops.linear_pullback(linear, jnp.zeros(shape, self.a.dtype), self.a)
        if out.dtype != self.a.dtype:
            raise ValueError(
                f"x is {self.a.dtype} and the model computes in {out.dtype} of it, as with weights "
                f"of that type; bounds are in one type: pass x.astype(np.{out.dtype})."
            )
        return Whole(jax.vmap(jax.vmap(pull))(self.a))


class Window(NamedTuple):
    """Patches ``[G, R, h / s, w / t, s t c]`` of a map ``[1, height, width, c]``.

    A row's patch ``[h, w]`` begins at ``stride p + offset``. At the input of a strided convolution
    it stays in blocks ``[s, t]``, which lie along the last axis. Along each axis only ``extent``
    entries after the first ``skip`` may be nonzero. If the stride is 0, the patch lies at the same
    position for all rows.
    """

    a: Array
    stride: Pair
    offset: Pair
    shape: tuple[int, ...]
    block: Pair = (1, 1)
    skip: Pair = (0, 0)
    extent: Pair = (1, 1)
    clean: bool = True
    """Whether coefficients outside of the map are 0; :func:`seen` reads 0 there in any case."""

    @property
    def size(self) -> Pair:
        return self.a.shape[2] * self.block[0], self.a.shape[3] * self.block[1]

    @property
    def fixed(self) -> bool:
        return self.stride == (0, 0)


Coefficients: TypeAlias = Whole | Window


def seen(maps: Array, rows: Rows, like: Coefficients) -> Array:
    """Gathers framed arrays at each row's coefficients ``like``: ``[K, R, N]``, 0 outside of a map.

    ``N`` is the number of coefficients of a row, in the order of :func:`flat`.
    """
    kinds, count, shape = len(maps), len(rows.sample), maps.shape[2:]
    if rows.each and isinstance(like, Whole):
        return unframed(maps).reshape(kinds, count, -1)
    spots, entries = rows.sample[:, None], math.prod(shape)
    if isinstance(like, Window):
        (s, t), (_, height, width, entries) = like.block, like.shape
        top, left = (
            jnp.clip(start[:, None] + 1 + jnp.arange(size), 0, limit + 1)
            for start, size, limit in zip(_starts(rows, like), like.size, (height, width))
        )
        top, left = top.reshape(count, -1, 1, s, 1), left.reshape(count, 1, -1, 1, t)
        spots = rows.sample.reshape(count, 1, 1, 1, 1) * (height + 2) + top
        spots = (spots * (width + 2) + left).reshape(count, -1)
    found = gathered(maps.reshape(kinds, -1, entries), spots)
    if isinstance(like, Whole):
        found = unframed(found.reshape(kinds, count, *shape))
    return found.reshape(kinds, count, -1)


def flat(coefficients: Coefficients) -> Array:
    """``[G, R, N]``, in the order of :func:`seen`."""
    return coefficients.a.reshape(*coefficients.a.shape[:2], -1)


def _starts(rows: Rows, window: Window) -> tuple[Array, Array]:
    """``[R]`` each: the first row and column of every row's patch in the map; may lie outside."""
    positions = rows.position
    if positions is None or window.fixed:
        positions = (jnp.zeros_like(rows.sample),) * 2
    first, second = (s * p + o for s, p, o in zip(window.stride, positions, window.offset))
    return first, second


def unblocked(window: Window) -> Window:
    """The same patches in blocks of one entry, cut to their ``extent``."""
    (s, t), (height, width), channels = window.block, window.size, window.shape[-1]
    a = window.a.reshape(-1, height // s, width // t, s, t, channels).transpose(0, 1, 3, 2, 4, 5)
    a = a.reshape(*window.a.shape[:2], height, width, channels)
    (top, left), (high, broad) = window.skip, window.extent
    a = a[:, :, top : top + high, left : left + broad]
    offset = window.offset[0] + top, window.offset[1] + left
    return window._replace(a=a, offset=offset, block=(1, 1), skip=(0, 0))


def cleaned(window: Window, rows: Rows) -> Window:
    """The same patches with coefficients outside of the map set to 0."""
    if window.clean:
        return window
    window, masks = unblocked(window), []
    for start, size, limit in zip(_starts(rows, window), window.size, window.shape[1:3]):
        positions = start[:, None] + jnp.arange(size)
        masks.append((positions >= 0) & (positions < limit))
    inside = masks[0][:, :, None, None] & masks[1][:, None, :, None]
    return window._replace(a=jnp.where(inside, window.a, 0.0), clean=True)


def whole(coefficients: Coefficients, rows: Rows) -> Whole:
    """The coefficients in dense form, patches put into a map of zeros."""
    if isinstance(coefficients, Whole):
        return coefficients
    window = unblocked(coefficients)
    a, (_, height, width, _) = window.a, window.shape
    padded = jnp.pad(a, ((0, 0), (0, 0), (height, height), (width, width), (0, 0)))
    starts = [
        jnp.clip(n - s, 0, n + h)
        for s, n, h in zip(_starts(rows, window), (height, width), a.shape[2:4])
    ]

    def cut(row: Array, top: Array, left: Array) -> Array:
        size = (len(a), height, width, a.shape[-1])
        zero = jnp.zeros_like(top)
        return lax.dynamic_slice(row, (zero, top, left, zero), size)

    out = jax.vmap(cut, in_axes=(1, 0, 0), out_axes=1)(padded, *starts)
    return Whole(out[:, :, None])


def total(left: Coefficients, right: Coefficients, rows: Rows) -> Coefficients:
    """The sum of two coefficients of one value, dense if one is dense or if the strides differ.

    Unequal patches are padded to their union.
    """

    if isinstance(left, Whole) or isinstance(right, Whole) or left.stride != right.stride:
        return Whole(whole(left, rows).a + whole(right, rows).a)
    shifts = [a - b for a, b in zip(left.offset, right.offset)]
    if left.block != right.block or any(n % s for n, s in zip(shifts, left.block)):
        left, right = unblocked(left), unblocked(right)
    pair = left, right
    pads, ends = [], []
    for axis, block in enumerate(left.block):
        spans = [(w.offset[axis], w.offset[axis] + w.size[axis]) for w in pair]
        first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
        pads.append([((a - first) // block, (last - b) // block) for a, b in spans])
        inner = [w.offset[axis] + w.skip[axis] for w in pair]
        stop = max(start + w.extent[axis] for start, w in zip(inner, pair))
        ends.append((first, min(inner) - first, stop - min(inner)))
    a = [jnp.pad(w.a, ((0, 0), (0, 0), *padding, (0, 0))) for w, padding in zip(pair, zip(*pads))]
    offset, skip, extent = ((high, broad) for high, broad in zip(*ends))
    return left._replace(
        a=a[0] + a[1], offset=offset, skip=skip, extent=extent, clean=left.clean and right.clean
    )


class Kernel(NamedTuple):
    """A convolution of an NHWC image by an HWIO kernel, without dilation or groups."""

    kernel: Array
    strides: Pair
    padding: tuple[Pair, Pair]
    shape: tuple[int, ...]
    """The shape of the convolved image, ``[1, height, width, c]``."""


def plain(eqn: Any, exact: tuple[Any, ...]) -> Kernel | None:
    """The equation as a :class:`Kernel`; None for other equations and for unknown kernels.

    ``exact`` holds the operands that are known, None for the others.
    """
    if eqn.primitive.name != "conv_general_dilated" or exact[1] is None:
        return None
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    images, kernels = (0, 3, 1, 2), (3, 2, 0, 1)
    if (*dims,) != (images, kernels, images) or params["feature_group_count"] != 1:
        return None
    dilations = [*params["lhs_dilation"], *params["rhs_dilation"], params["batch_group_count"]]
    shape = eqn.invars[0].aval.shape
    if max(dilations) > 1 or shape[0] != 1:
        return None
    strides, padding = params["window_strides"], params["padding"]
    return Kernel(exact[1], (*strides,), ((*padding[0],), (*padding[1],)), shape)


def through(coefficients: Coefficients, conv: Kernel, rows: Rows) -> Window:
    """The coefficients of a convolution's operand, as patches.

    Where a patch would be as large as the map, one patch that covers the map is used for all rows.
    """
    if isinstance(coefficients, Window):
        window = unblocked(cleaned(coefficients, rows))
        sizes = zip(window.extent, conv.strides, conv.kernel.shape)
        high, broad = ((n - 1) * s + k for n, s, k in sizes)
        if window.fixed or high * broad < conv.shape[1] * conv.shape[2]:
            return _windowed(window, conv)
        coefficients = whole(window, rows)
    a = coefficients.a[:, :, 0]
    extent = a.shape[2], a.shape[3]
    return _windowed(Window(a, (0, 0), (0, 0), (1, *a.shape[2:]), extent=extent), conv)


def _windowed(window: Window, conv: Kernel) -> Window:
    """Sends patches at a convolution's output back to its input; returns the patches there.

    ``window`` must be in blocks of one entry, and 0 outside of the map. The result is in blocks of
    the convolution's strides. Patches of stride 0, which lie at the same position for all rows, are
    cut to the map.
    """
    a, (kernel, skip) = window.a, blocks(conv)
    out = transposed_conv(a.reshape(-1, *a.shape[2:]), kernel)
    spans, strides = [], []
    for axis, (stride, (pad, _), over) in enumerate(zip(conv.strides, conv.padding, skip)):
        start = window.offset[axis] * stride - pad
        size = (window.extent[axis] - 1) * stride + conv.kernel.shape[axis]
        strides.append(window.stride[axis] * stride)
        first, last = start, start + size
        if window.fixed:
            first, last = max(first, 0), min(last, conv.shape[1 + axis])
        spans.append((start - over, first - start + over, last - first))
    offset, inner, extent = ((high, broad) for high, broad in zip(*spans))
    return Window(
        out.reshape(*a.shape[:2], *out.shape[1:]),
        (strides[0], strides[1]),
        offset,
        conv.shape,
        conv.strides,
        inner,
        extent,
        clean=window.fixed,
    )


def blocks(conv: Kernel) -> tuple[Array, Pair]:
    """The kernel of an equal convolution of stride 1 on blocks of the image.

    A block holds ``s`` by ``t`` pixels (the strides) as channels. Returns the kernel
    ``[ceil(h / s), ceil(w / t), s t c, outputs]``, and how many rows and columns of zeros were put
    before the old kernel. These shift it so that blocks begin at multiples of the strides in the
    unpadded image, if there is room for that.
    """
    channels, outputs = conv.kernel.shape[2:]
    counts, skip, full = [], [], []
    for size, stride, (pad, _) in zip(conv.kernel.shape, conv.strides, conv.padding):
        count, over = -(-size // stride), -pad % stride
        over = over if over + size <= count * stride else 0
        counts.append(count)
        skip.append(over)
        full.append((over, count * stride - size - over))
    (tall, wide), (s, t) = counts, conv.strides
    split = jnp.pad(conv.kernel, (*full, (0, 0), (0, 0)))
    split = split.reshape(tall, s, wide, t, channels, outputs).transpose(0, 2, 1, 3, 4, 5)
    return split.reshape(tall, wide, s * t * channels, outputs), (skip[0], skip[1])
