"""Operators that multiply by matrices and kernels."""

import itertools
import math

import jax.numpy as jnp
from jax import lax

from wdjax.models.conv import conv
from wdjax.models.graphs.laid import (
    Laid,
    bounded,
    channels_last,
    reshaped,
    straight,
    transposed,
)
from wdjax.models.graphs.signature import REQUIRED, Operator

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def matmul(call, a, b):
    """``a @ b``; axes are not moved where a product of tensors does not need it."""
    if 0 in (a.ndim, b.ndim):
        raise ValueError("it multiplies a number that is no array")
    if a.ndim > 1 and a.order[-1] == a.ndim - 1 and b.ndim == 2:
        if a.shape[-1] != b.shape[0]:
            raise ValueError(f"it multiplies {list(a.shape)} by {list(b.shape)}")
        return Laid(jnp.matmul(a.array, b.plain()), a.order)
    if a.ndim == b.ndim > 2 and a.shape[:-2] == b.shape[:-2]:
        batch = _LETTERS[: a.ndim - 2]
        return _einsum((a, b), (batch + "XY", batch + "YZ"), batch + "XZ")
    return straight(jnp.matmul(a.plain(), b.plain()))


def _einsum(values, terms, out):
    """An einsum whose operands stay as they lie: their letters are moved instead."""
    for value, term in zip(values, terms):
        if value.ndim != len(term):
            raise ValueError(f"its operand {term!r} has {value.ndim} axes")
    sizes = dict(zip("".join(terms), itertools.chain(*(value.shape for value in values))))
    bounded([sizes[letter] for letter in out])
    moved = ["".join(term[axis] for axis in value.order) for value, term in zip(values, terms)]
    arrays = [jnp.asarray(value.array) for value in values]
    return straight(jnp.einsum(f"{','.join(moved)}->{out}", *arrays))


def _written(call, *values):
    equation = call["equation"].replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if "..." in equation or not set(left + out) <= {*_LETTERS, ","} or len(terms) != len(values):
        raise ValueError(f"its equation {equation[:100]!r} does not fit, or has '...'")
    if not arrow:
        out = "".join(sorted(x for x in set(left) - {","} if left.count(x) == 1))
    if not set(out) <= set(left):
        raise ValueError(f"its equation {equation[:100]!r} has an axis in its result only")
    return _einsum(values, terms, out)


def _gemm(call, a, b, c=None):
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(f"it multiplies {list(a.shape)} by {list(b.shape)}")
    a = transposed(a, (1, 0)) if call["transA"] else a
    b = transposed(b, (1, 0)) if call["transB"] else b
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"it multiplies {list(a.shape)} by {list(b.shape)}")
    out = jnp.matmul(a.plain(), b.plain())
    out = out if call["alpha"] == 1 else call["alpha"] * out
    if c is None:
        return straight(out)
    added = jnp.asarray(c.raised(2).plain())
    bounded(jnp.broadcast_shapes(added.shape, out.shape))
    return straight(out + (added if call["beta"] == 1 else call["beta"] * added))


def geometry(call, shape, kernel):
    """Strides, dilations and pads of a convolution or pooling over axes of length ``shape``.

    Returns three tuples; pads are pairs.
    """
    rank = len(kernel)
    strides = call["strides"] or (1,) * rank
    dilations = call["dilations"] or (1,) * rank
    pads = call["pads"] or (0,) * (2 * rank)
    if not len(shape) == len(strides) == len(dilations) == len(pads) / 2 == rank:
        raise ValueError(f"its kernel {list(kernel)}, strides, dilations and pads do not fit")
    if min((*strides, *dilations, *kernel), default=1) < 1 or min(pads, default=0) < 0:
        raise ValueError(f"its kernel {list(kernel)}, strides, dilations or pads are negative or 0")
    auto = call["auto_pad"]
    if auto in ("NOTSET", ""):
        return strides, dilations, tuple(zip(pads[:rank], pads[rank:]))
    if auto == "VALID":
        return strides, dilations, ((0, 0),) * rank
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        raise ValueError(f"its auto_pad is {auto[:20]!r}")
    found = []
    for size, k, s, d in zip(shape, kernel, strides, dilations):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        less, more = total // 2, total - total // 2
        found.append((less, more) if auto == "SAME_UPPER" else (more, less))
    return strides, dilations, tuple(found)


def _images(x, rank):
    if x.ndim != rank + 2 or rank not in (1, 2, 3):
        raise ValueError(f"it takes {rank} axes of places, got an array {list(x.shape)}")
    return jnp.asarray(x.to(channels_last(x.ndim)))


_KERNEL = {3: (2, 1, 0), 4: (2, 3, 1, 0), 5: (2, 3, 4, 1, 0)}
"""The order in which kernels lie: positions, inputs, outputs."""


def kernel_order(ndim):
    """The order of a convolution's kernel with so many axes, or None if it is none."""
    return _KERNEL.get(ndim)


def _conv(call, x, kernel, bias=None):
    rank = kernel.ndim - 2
    images = _images(x, rank)
    outputs, inputs, *window = kernel.shape
    groups = call["group"]
    strides, dilations, pads = geometry(call, images.shape[1:-1], window)
    if groups < 1 or inputs * groups != images.shape[-1] or outputs % groups:
        raise ValueError(
            f"its kernel {list(kernel.shape)} in {groups} groups does not fit {list(x.shape)}"
        )
    _check_window(images.shape[1:-1], window, dilations, pads)
    weights = jnp.asarray(kernel.to(_KERNEL[kernel.ndim]))
    if rank == 1:  # A row of pixels.
        row = conv if max(dilations) == 1 else None
        images, weights = images[:, None], weights[None]
        strides, dilations, pads = (1, *strides), (1, *dilations), ((0, 0), *pads)
        out = _convolved(row, images, weights, strides, dilations, pads, groups)[:, 0]
    else:
        out = _convolved(conv, images, weights, strides, dilations, pads, groups)
    return Laid(_with_bias(out, bias), channels_last(x.ndim))


def _convolved(fast, images, weights, strides, dilations, pads, groups):
    """By :func:`wdjax.models.conv` if its strides are equal and entries of the kernel adjacent."""
    if weights.ndim == 4 and len({*strides}) == 1 and max(dilations) == 1 and fast is conv:
        return conv(images, weights, strides[0], tuple(pads), groups)
    names = ("NHWC", "HWIO", "NHWC") if weights.ndim == 4 else ("NDHWC", "DHWIO", "NDHWC")
    return lax.conv_general_dilated(
        images,
        weights,
        strides,
        pads,
        rhs_dilation=dilations,
        dimension_numbers=names,
        feature_group_count=groups,
    )


def _check_window(shape, window, dilations, pads):
    for size, k, d, pad in zip(shape, window, dilations, pads):
        if size + sum(pad) < (k - 1) * d + 1:
            raise ValueError(f"its window {list(window)} is larger than {list(shape)}")
    bounded([size + sum(pad) for size, pad in zip(shape, pads)])


def _with_bias(out, bias):
    if bias is None:
        return out
    if bias.shape != out.shape[-1:]:
        raise ValueError(f"its bias {list(bias.shape)} does not fit {out.shape[-1]} channels")
    return out + jnp.asarray(bias.array).reshape((1,) * (out.ndim - 1) + (-1,))


def _conv_transpose(call, x, kernel, bias=None):
    """The gradient of a convolution: zeros between pixels, and the kernel mirrored."""
    rank = kernel.ndim - 2
    images = _images(x, rank)
    inputs, outputs, *window = kernel.shape
    groups, shape = call["group"], images.shape[1:-1]
    strides, dilations, pads = geometry(call, shape, window)
    more = call["output_padding"] or (0,) * rank
    if groups < 1 or inputs != images.shape[-1] or inputs % groups or len(more) != rank:
        raise ValueError(f"its kernel {list(kernel.shape)} does not fit {list(x.shape)}")
    wide = [(k - 1) * d for k, d in zip(window, dilations)]
    full = [(n - 1) * s + w + 1 + m for n, s, w, m in zip(shape, strides, wide, more)]
    target = call["output_shape"]
    if target is not None or call["auto_pad"].startswith("SAME"):
        target = target or [n * s for n, s in zip(shape, strides)]
        total = [max(a - b, 0) for a, b in zip(full, target)]
        upper = call["auto_pad"] == "SAME_UPPER"
        halves = [(t // 2, t - t // 2) if upper else (t - t // 2, t // 2) for t in total]
        pads = tuple(halves)
    around = [(w - low, w - high + m) for w, (low, high), m in zip(wide, pads, more)]
    bounded([n * s + w + max(m, 0) for n, s, w, m in zip(shape, strides, wide, more)])
    grouped = reshaped(kernel, (groups, inputs // groups, outputs, *window))
    positions = tuple(range(3, rank + 3))
    turned = transposed(grouped, (*positions, 1, 0, 2)).plain()
    weights = jnp.flip(jnp.asarray(turned), tuple(range(rank)))
    weights = weights.reshape(*window, inputs // groups, groups * outputs)
    letters = "DHW"[-rank:] if rank > 1 else "W"
    out = lax.conv_general_dilated(
        images,
        weights,
        (1,) * rank,
        around,
        lhs_dilation=strides,
        rhs_dilation=dilations,
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=groups,
    )
    if math.prod(out.shape) == 0:
        raise ValueError("its result is empty")
    return Laid(_with_bias(out, bias), channels_last(x.ndim))


_PLACES = {
    "auto_pad": "NOTSET", "strides": None, "dilations": None, "pads": None, "kernel_shape": None,
    "group": 1,
}  # fmt: skip

OPERATORS: dict[str, Operator] = {
    "MatMul": Operator(run=matmul, inputs=(2, 2)),
    "Gemm": Operator(
        run=_gemm,
        inputs=(2, 3),
        attributes={"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0},
    ),
    "Einsum": Operator(run=_written, inputs=(1, 8), attributes={"equation": REQUIRED}, since=12),
    "Conv": Operator(run=_conv, inputs=(2, 3), attributes=_PLACES),
    "ConvTranspose": Operator(
        run=_conv_transpose,
        inputs=(2, 3),
        attributes={**_PLACES, "output_shape": None, "output_padding": None},
    ),
}
