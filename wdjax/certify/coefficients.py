r"""Coefficients of many linear functions at one place of a program, whole or in windows.

``G`` functions of each of ``R`` rows: a row belongs to one sample and, in windows, to one position
of a map, and touches only ``[S p + o, S p + o + h)`` of an earlier map. Windows go back through a
convolution in full size, ``h -> (h - 1) s + k``, and never depend on the map's size.
"""

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from wdjax.certify.domain import Array

Pair = tuple[int, int]


class Rows(NamedTuple):
    """``[R]`` rows: of which sample, and at which position of the map that they start from."""

    sample: Array
    position: tuple[Array, Array] | None = None

    def of_all(self) -> "Rows":
        """The same rows of a map that all samples share."""
        return self._replace(sample=jnp.zeros_like(self.sample))


class Whole(NamedTuple):
    """``[G, R, *shape]``."""

    a: Array


class Window(NamedTuple):
    """``[G, R, h, w, c]`` from ``stride p + offset`` on, in a map ``[1, height, width, c]``."""

    a: Array
    stride: Pair
    offset: Pair
    shape: tuple[int, ...]


Coefficients: TypeAlias = Whole | Window


def seen(maps: Array, rows: Rows, like: Coefficients) -> Array:
    """What a map ``[B, *shape]`` holds where the coefficients are, ``[R, ...]``.

    Outside of the map, where coefficients are 0, some other entry of it.
    """
    if isinstance(like, Whole):
        return maps[rows.sample]
    top, left = (
        jnp.clip(start[:, None] + jnp.arange(size), 0, limit - 1)
        for start, size, limit in zip(_starts(rows, like), like.a.shape[2:4], maps.shape[2:4])
    )
    return maps[rows.sample[:, None, None], 0, top[:, :, None], left[:, None, :]]


def _starts(rows: Rows, window: Window) -> tuple[Array, Array]:
    assert rows.position is not None
    first, second = (s * p + o for s, p, o in zip(window.stride, rows.position, window.offset))
    return first, second


def whole(coefficients: Coefficients, rows: Rows) -> Whole:
    """Windows in whole maps."""
    if isinstance(coefficients, Whole):
        return coefficients
    a, (_, height, width, _) = coefficients.a, coefficients.shape
    padded = jnp.pad(a, ((0, 0), (0, 0), (height, height), (width, width), (0, 0)))
    starts = [
        jnp.clip(n - s, 0, n + h)
        for s, n, h in zip(_starts(rows, coefficients), (height, width), a.shape[2:4])
    ]

    def cut(row: Array, top: Array, left: Array) -> Array:
        size = (len(a), height, width, a.shape[-1])
        zero = jnp.zeros_like(top)
        return lax.dynamic_slice(row, (zero, top, left, zero), size)

    out = jax.vmap(cut, in_axes=(1, 0, 0), out_axes=1)(padded, *starts)
    return Whole(out[:, :, None])


def inside(coefficients: Window, rows: Rows) -> Array:
    """``[R, h, w, 1]``: which positions of the windows lie in the map."""
    masks = []
    for start, size, limit in zip(
        _starts(rows, coefficients), coefficients.a.shape[2:4], coefficients.shape[1:3]
    ):
        places = start[:, None] + jnp.arange(size)
        masks.append((places >= 0) & (places < limit))
    return (masks[0][:, :, None] & masks[1][:, None, :])[..., None]


def total(left: Coefficients, right: Coefficients, rows: Rows) -> Coefficients:
    """The sum; unequal windows are padded to their union."""
    if isinstance(left, Whole) or isinstance(right, Whole) or left.stride != right.stride:
        return Whole(whole(left, rows).a + whole(right, rows).a)
    first = tuple(min(a, b) for a, b in zip(left.offset, right.offset))
    ends = [
        max(a + n, b + m)
        for a, n, b, m in zip(left.offset, left.a.shape[2:4], right.offset, right.a.shape[2:4])
    ]

    def grown(window: Window) -> Array:
        pads = [
            (o - f, e - o - n)
            for o, f, e, n in zip(window.offset, first, ends, window.a.shape[2:4])
        ]
        return jnp.pad(window.a, ((0, 0), (0, 0), *pads, (0, 0)))

    return left._replace(a=grown(left) + grown(right), offset=(first[0], first[1]))


class Kernel(NamedTuple):
    """A convolution NHWC by HWIO without dilation or groups."""

    kernel: Array
    strides: Pair
    padding: tuple[Pair, Pair]
    shape: tuple[int, ...]
    """Of the image that it takes, ``[1, height, width, c]``."""


def plain(eqn: Any, exact: tuple[Any, ...]) -> Kernel | None:
    """The convolution of an equation if it is such a one and its kernel is known."""
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


def through(coefficients: Coefficients, conv: Kernel, rows: Rows) -> Coefficients:
    """Back through a convolution; in windows that stay smaller than the map."""
    height, width = conv.kernel.shape[:2]
    if isinstance(coefficients, Window):
        sizes = [
            (n - 1) * s + k
            for n, s, k in zip(coefficients.a.shape[2:4], conv.strides, (height, width))
        ]
        if sizes[0] * sizes[1] < conv.shape[1] * conv.shape[2]:
            return _windowed(coefficients, conv, rows)
        coefficients = whole(coefficients, rows)
    a = coefficients.a
    out = _pulled(a.reshape(-1, *a.shape[3:]), conv.kernel, conv.strides)
    # The image is what lies behind the padding; strides may leave some of it unseen.
    crops = [
        (-low, n + low - m, 0)
        for n, m, (low, _) in zip(conv.shape[1:3], out.shape[1:3], conv.padding)
    ]
    out = lax.pad(out, jnp.zeros((), out.dtype), [(0, 0, 0), *crops, (0, 0, 0)])
    return Whole(out.reshape(*a.shape[:2], 1, *out.shape[1:]))


def _windowed(window: Window, conv: Kernel, rows: Rows) -> Window:
    a = window.a
    out = _pulled(a.reshape(-1, *a.shape[2:]), conv.kernel, conv.strides)
    stride = tuple(s * t for s, t in zip(window.stride, conv.strides))
    offset = tuple(o * t - p[0] for o, t, p in zip(window.offset, conv.strides, conv.padding))
    new = Window(
        out.reshape(*a.shape[:2], *out.shape[1:]),
        (stride[0], stride[1]),
        (offset[0], offset[1]),
        conv.shape,
    )
    return new._replace(a=jnp.where(inside(new, rows), new.a, 0.0))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _pulled(a: Array, kernel: Array, strides: Pair) -> Array:
    """The transposed convolution in full, ``n -> (n - 1) s + k``, as the CPU runs it fast.

    A stride makes it a convolution of stride 1 to ``s s c`` channels, which are then spread out.
    """
    height, width, channels, outputs = kernel.shape
    count, rows, columns, _ = a.shape
    if rows == columns == 1:
        flat = a.reshape(count, outputs) @ kernel.reshape(-1, outputs).T
        return flat.reshape(count, height, width, channels)
    (s, t), tall, wide = strides, -(-height // strides[0]), -(-width // strides[1])
    kernel = jnp.pad(kernel, ((0, tall * s - height), (0, wide * t - width), (0, 0), (0, 0)))
    split = kernel.reshape(tall, s, wide, t, channels, outputs).transpose(0, 2, 5, 1, 3, 4)
    mirrored = split.reshape(tall, wide, outputs, -1)[::-1, ::-1]
    out = _correlated(a, mirrored, (1, 1), ((tall - 1,) * 2, (wide - 1,) * 2))
    high, broad = out.shape[1:3]
    out = out.reshape(count, high, broad, s, t, channels).transpose(0, 1, 3, 2, 4, 5)
    out = out.reshape(count, high * s, broad * t, channels)
    return out[:, : (rows - 1) * s + height, : (columns - 1) * t + width]


@functools.partial(_pulled.defjvp, symbolic_zeros=True)
def _pulled_jvp(
    strides: Pair, primals: tuple[Array, Array], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    """In the coefficients as the transpose of the convolution itself; in the kernel as it comes."""
    a, kernel = primals
    out = _pulled(a, kernel, strides)
    change = jnp.zeros_like(out)
    if not isinstance(tangents[0], SymbolicZero):
        none = ((0, 0), (0, 0))
        image = jax.linear_transpose(lambda t: _correlated(t, kernel, strides, none), out)
        change += image(tangents[0])[0]
    if not isinstance(tangents[1], SymbolicZero):
        change += _pulled(a, tangents[1], strides)
    return out, change


def _correlated(x: Array, kernel: Array, strides: Pair, padding: tuple[Pair, Pair]) -> Array:
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=lax.Precision.HIGHEST,
    )


def summed(terms: Array) -> Array:
    """``[G, R, ...] -> [G, R]`` in two stages, each of about the root of all terms."""
    flat = terms.reshape(*terms.shape[:2], -1)
    count = flat.shape[-1]
    width = max(math.isqrt(count), 1)
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, -count % width)))
    rows = jnp.sum(flat.reshape(*flat.shape[:2], -1, width), axis=-1)
    return jnp.sum(lax.optimization_barrier(rows), axis=-1)


def rounding(count: int, dtype: Any) -> float:
    """Relative to the sum of magnitudes, of :func:`summed`."""
    return 1.01 * (2 * math.isqrt(count) + 8) * float(jnp.finfo(dtype).eps)
