"""Operators on neighbourhoods of pixels: pooling, padding, resizing."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from wdjax.models.graphs.laid import Laid, bounded, channels_last, straight
from wdjax.models.graphs.products import geometry
from wdjax.models.graphs.signature import IGNORED, REQUIRED, Operator
from wdjax.models.layers import first_max
from wdjax.tracing import analysed

MAX_WORK = 1 << 30
"""Entries of all windows of a pooling; a file may ask for more by a few numbers."""


def _pooling(call, x):
    """The image with channels last, and window, strides, dilations and pads of all its axes.

    With ``ceil_mode`` a last window may reach beyond the padded image, but not begin there; these
    pads come fifth.
    """
    kernel = call["kernel_shape"]
    if x.ndim != len(kernel) + 2:
        raise ValueError(f"its window {list(kernel)} does not fit {list(x.shape)}")
    images = jnp.asarray(x.to(channels_last(x.ndim)))
    shape = images.shape[1:-1]
    strides, dilations, pads = geometry(call, shape, kernel)
    beyond, work = [], images.size * math.prod(kernel)
    for size, k, s, d, (low, high) in zip(shape, kernel, strides, dilations, pads):
        room = size + low + high - (k - 1) * d - 1
        if room < 0:
            raise ValueError(f"its window {list(kernel)} is larger than {list(shape)}")
        count = -(-room // s) if call["ceil_mode"] else room // s
        if count * s >= size + low:
            count -= 1
        beyond.append(max(count * s - room, 0))
        work = work * (count + 1) // size
    if work > MAX_WORK * len(images):
        raise ValueError(f"its windows {list(kernel)} have more than {MAX_WORK} entries a sample")
    bounded([size + sum(pad) for size, pad in zip(shape, pads)])
    around = ((0, 0), *pads, (0, 0))
    return images, (1, *kernel, 1), (1, *strides, 1), (1, *dilations, 1), around, beyond


def _max_pool(call, x):
    if call.outputs > 1:
        raise ValueError("it also gives the places of maxima, which have no derivative")
    images, window, strides, dilations, pads, beyond = _pooling(call, x)
    ends = ((0, 0), *((low, high + more) for (low, high), more in zip(pads[1:-1], beyond)), (0, 0))
    return Laid(maximum(images, window, strides, dilations, ends), channels_last(x.ndim))


def maximum(images, window, strides, dilations, pads):
    """Maxima over windows: in programs that are analysed one operation, which has tight bounds, by
    a reshape if windows do not overlap; or else one entry of the window after another, whose
    gradient is fast on a CPU. Of equal entries the first gets the gradient, as in PyTorch."""
    whole = window == strides and not any(map(any, pads)) and max(dilations) == 1
    if whole and analysed():
        return jnp.max(_blocks(images, window), axis=tuple(range(2, 2 * images.ndim - 2, 2)))
    if analysed() or math.prod(window) > 49:
        return lax.reduce_window(
            images, -jnp.inf, lax.max, window, strides, pads, window_dilation=dilations
        )
    images = jnp.pad(images, pads, constant_values=-jnp.inf) if any(map(any, pads)) else images
    best = None
    for tap in _taps(images, window, strides, dilations):
        best = tap if best is None else jnp.where(tap > best, tap, best)
    return best


def _blocks(images, window):
    """``[n, H, W, c]`` as ``[n, H / k, k, W / k, k, c]``, without what is left at the end."""
    counts = [size // k for size, k in zip(images.shape, window)]
    images = images[tuple(slice(0, count * k) for count, k in zip(counts, window))]
    pairs = list(zip(counts[1:-1], window[1:-1]))
    return images.reshape(counts[0], *itertools.chain(*pairs), counts[-1])


def _taps(images, window, strides, dilations):
    """For each position in the window, the entries that all windows have there."""
    reach = [(k - 1) * d for k, d in zip(window, dilations)]
    last = [(size - r - 1) // s * s for size, r, s in zip(images.shape, reach, strides)]
    for position in itertools.product(*map(range, window)):
        first = [i * d for i, d in zip(position, dilations)]
        ends = [f + end + 1 for f, end in zip(first, last)]
        yield lax.slice(images, first, ends, strides)


def _average_pool(call, x):
    """Means over windows: pads count with ``count_include_pad``, what ``ceil_mode`` adds never."""
    images, window, strides, dilations, pads, beyond = _pooling(call, x)
    order = channels_last(x.ndim)
    whole = window == strides and not any(map(any, pads)) and not any(beyond)
    if whole and max(dilations) == 1:
        return Laid(jnp.mean(_blocks(images, window), tuple(range(2, 2 * x.ndim - 2, 2))), order)
    ends = ((0, 0), *((low, high + more) for (low, high), more in zip(pads[1:-1], beyond)), (0, 0))
    total = functools.partial(
        lax.reduce_window, init_value=0.0, computation=lax.add, window_dimensions=window,
        window_strides=strides, window_dilation=dilations,
    )  # fmt: skip
    counted = np.ones((1, *images.shape[1:-1], 1), np.float32)
    if call["count_include_pad"]:
        counted = np.pad(counted, pads, constant_values=1)
    rest = [(low, high) for low, high in zip((0,) * x.ndim, (0, *beyond, 0))]
    counted = np.pad(counted, rest if call["count_include_pad"] else ends)
    with jax.ensure_compile_time_eval():
        counts = np.asarray(total(jnp.asarray(counted), padding=((0, 0),) * x.ndim))
    return Laid(total(images, padding=ends) / jnp.asarray(counts, images.dtype), order)


def _lp_pool(call, x):
    images, window, strides, dilations, pads, beyond = _pooling(call, x)
    p = call["p"]
    ends = ((0, 0), *((low, high + more) for (low, high), more in zip(pads[1:-1], beyond)), (0, 0))
    total = lax.reduce_window(
        jnp.abs(images) ** p, 0.0, lax.add, window, strides, ends, window_dilation=dilations
    )
    return Laid(total ** (1 / p), channels_last(x.ndim))


def _global(function):
    def run(call, x):
        if x.ndim < 3:
            raise ValueError(f"it takes images, got {list(x.shape)}")
        positions = tuple(x.order.index(axis) for axis in range(2, x.ndim))
        return Laid(function(jnp.asarray(x.array), axis=positions, keepdims=True), x.order)

    return Operator(run=run)


def _pad(call, x, pads=None, value=None, axes=None):
    """Pads of all low ends, then of all high ends of the ``axes``; negative ones remove entries.

    ``axes`` are those of the file; ``x`` may lie in another order, which ``position`` tells.
    """
    pads = call["pads"] if pads is None else call.numbers(pads, "pads")
    chosen = range(x.ndim) if axes is None else call.numbers(axes, "axes")
    fill = call["value"] if value is None else call.known(value, "value").item()
    if pads is None or len(pads) != 2 * len(chosen):
        raise ValueError(f"it has {0 if pads is None else len(pads)} pads")
    widths = [(0, 0)] * x.ndim
    for k, axis in enumerate(chosen):
        widths[x.position(axis)] = (pads[k], pads[k + len(chosen)])
    bounded([size + sum(width) for size, width in zip(x.array.shape, widths)])
    if any(size + low + high < 0 for size, (low, high) in zip(x.array.shape, widths)):
        raise ValueError("it removes more than there is")
    mode, names = call["mode"], {"constant", "reflect", "edge", "wrap"}
    least = min(itertools.chain(*widths), default=0)
    if mode not in names or (least < 0 and mode != "constant"):
        raise ValueError(f"its mode is {mode[:20]!r}, or its pads are negative")
    if x.static:
        wide = [(max(low, 0), max(high, 0)) for low, high in widths]
        options = {"constant_values": fill} if mode == "constant" else {}
        return straight(_cropped(np.pad(x.array, wide, mode, **options), widths))
    if mode != "constant":
        return Laid(jnp.pad(x.array, widths, mode), x.order)
    config = [(low, high, 0) for low, high in widths]
    return Laid(lax.pad(x.array, jnp.asarray(fill, x.array.dtype), config), x.order)


def _cropped(array, widths):
    return array[
        tuple(
            slice(max(-low, 0), size - max(-high, 0))
            for size, (low, high) in zip(array.shape, widths)
        )
    ]


def _resize(call, x, roi=None, scales=None, sizes=None):
    """Nearest or linear interpolation along the axes that ``scales`` or ``sizes`` name.

    Collects ``(factor, new size)`` for each axis of ``x``, None for axes that stay.
    """
    if roi is not None and scales is None and sizes is None and call.opset < 11:
        roi, scales = None, roi  # The second input of version 10.
    if (
        call["mode"] not in ("nearest", "linear")
        or call["antialias"]
        or call["extrapolation_value"]
    ):
        raise ValueError(f"its mode is {call['mode'][:20]!r}, or it smooths or extrapolates")
    if call["coordinate_transformation_mode"] == "tf_crop_and_resize":
        raise ValueError("it crops, which is not supported")
    axes = range(x.ndim) if call["axes"] is None else call["axes"]
    given = [None] * x.ndim
    if scales is not None and call.known(scales, "scales").size:
        factors = [np.float32(s) for s in call.known(scales, "scales").ravel()]
        new = [_scaled(x.shape[x.axis(axis)], s) for axis, s in zip(axes, factors)]
    else:
        new = list(call.numbers(sizes, "sizes"))
        if call["keep_aspect_ratio_policy"] != "stretch":
            raise ValueError("it keeps the ratio of sides, which is not supported")
        factors = [size / x.shape[x.axis(axis)] for axis, size in zip(axes, new)]
    if not len(axes) == len(factors) == len(new) or min(factors, default=1) <= 0:
        raise ValueError(f"its scales {factors} do not fit {list(x.shape)}")
    for axis, factor, size in zip(axes, factors, new):
        given[x.axis(axis)] = (factor, size)
    return _resized(call, x, given)


def _upsample(call, x, scales=None):
    """The older form of Resize."""
    factors = call["scales"] if scales is None else call.known(scales, "scales").ravel().tolist()
    if len(factors) != x.ndim:
        raise ValueError(f"its scales {list(factors)} do not fit {list(x.shape)}")
    given = [(np.float32(f), _scaled(n, np.float32(f))) for f, n in zip(factors, x.shape)]
    return _resized(call, x, given)


def _scaled(n, factor):
    """The length of ``n`` pixels times a factor: in float32 as exporters mean it, where 5 x 1.4
    is 7, and not in higher precision, where it is less."""
    return math.floor(np.float32(n) * factor)


def _resized(call, x, given):
    """``given`` holds the factor and the new length of each axis, or None."""
    bounded([n if pair is None else pair[1] for n, pair in zip(x.shape, given)])
    array = jnp.asarray(x.array)
    for axis, pair in enumerate(given):
        if pair is None or (pair[1] == x.shape[axis] and pair[0] == 1):
            continue
        coordinates = _coordinates(call, x.shape[axis], *pair)
        position = x.order.index(axis)
        if call["mode"] == "nearest":
            array = _nearest(call, array, coordinates, position)
        else:
            weights = jnp.asarray(_weights(coordinates, x.shape[axis]), array.dtype)
            array = jnp.moveaxis(jnp.tensordot(array, weights, ((position,), (1,))), -1, position)
    return Laid(array, x.order)


def _coordinates(call, old, factor, new):
    """Where each new pixel lies among the old ones.

    The nearest of a scale given in float32 is found in float32, as onnxruntime does: 3 / 0.6 is 5
    there, and 4.9999998 in higher precision.
    """
    coarse = call["mode"] == "nearest" and isinstance(factor, np.float32)
    factor = factor if coarse else float(factor)
    at = np.arange(new, dtype=np.float32 if coarse else np.float64)
    mode = call["coordinate_transformation_mode"]
    if mode == "asymmetric":
        return at / factor
    if mode == "align_corners":
        return at * (old - 1) / (new - 1) if new > 1 else at * 0
    if mode == "pytorch_half_pixel" and new == 1:
        return at * 0
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (at + 0.5) / factor - 0.5
    if mode == "half_pixel_symmetric":
        return old / 2 * (1 - new / (factor * old)) + (at + 0.5) / factor - 0.5
    raise ValueError(f"its coordinate_transformation_mode is {mode[:30]!r}")


def _nearest(call, array, coordinates, axis):
    rounds: dict[str, Any] = {
        "round_prefer_floor": lambda t: np.ceil(t - 0.5),
        "round_prefer_ceil": lambda t: np.floor(t + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    if call["nearest_mode"] not in rounds:
        raise ValueError(f"its nearest_mode is {call['nearest_mode'][:30]!r}")
    old = array.shape[axis]
    at = np.clip(rounds[call["nearest_mode"]](coordinates), 0, old - 1).astype(np.int64)
    times = len(at) // old
    if len(at) == old * times and np.array_equal(at, np.repeat(np.arange(old), times)):
        shape = array.shape
        wide = jnp.broadcast_to(
            jnp.expand_dims(array, axis + 1), (*shape[: axis + 1], times, *shape[axis + 1 :])
        )
        return wide.reshape(*shape[:axis], old * times, *shape[axis + 1 :])
    return jnp.take(array, jnp.asarray(at, jnp.int32), axis=axis, mode="clip")


def _weights(coordinates, old):
    """``[new, old]``: linear interpolation as a matrix."""
    coordinates = np.clip(coordinates, 0, old - 1)
    below = np.minimum(np.floor(coordinates).astype(int), max(old - 2, 0))
    matrix = np.zeros((len(coordinates), old), np.float64)
    rows = np.arange(len(coordinates))
    matrix[rows, below] += 1 - (coordinates - below)
    matrix[rows, np.minimum(below + 1, old - 1)] += coordinates - below
    return matrix


def _reduced_axes(call, x, given):
    axes = call["axes"] if given is None else call.numbers(given, "axes")
    if not axes:
        axes = () if call["noop_with_empty_axes"] else range(x.ndim)
    return sorted({x.axis(axis) for axis in axes})


def _reduction(function, folded=None):
    """An operator that sums up or compares along axes."""

    def run(call, x, axes=None):
        gone = _reduced_axes(call, x, axes)
        positions = tuple(x.order.index(axis) for axis in gone)
        keep = bool(call["keepdims"])
        order = x.order if keep else x.without(gone)
        if x.static and folded is not None:
            return straight(np.asarray(folded(x.array, axis=positions, keepdims=keep)))
        return Laid(function(jnp.asarray(x.array), axis=positions, keepdims=keep), order)

    attributes = {"axes": None, "keepdims": 1, "noop_with_empty_axes": 0}
    return Operator(run=run, inputs=(1, 2), attributes=attributes, static=(1,))


def _largest(x, axis, keepdims):
    return first_max(x, axis, keepdims)


def _least(x, axis, keepdims):
    return -first_max(-x, axis, keepdims)


def _l1(x, **axes):
    return jnp.sum(jnp.abs(x), **axes)


def _l2(x, **axes):
    return jnp.sqrt(jnp.sum(x * x, **axes))


def _square(x, **axes):
    return jnp.sum(x * x, **axes)


def _log_sum(x, **axes):
    return jnp.log(jnp.sum(x, **axes))


_POOL = {
    "auto_pad": "NOTSET", "strides": None, "dilations": None, "pads": None, "ceil_mode": 0,
    "kernel_shape": REQUIRED,
}  # fmt: skip
_RESIZE = {
    "mode": "nearest", "antialias": 0, "axes": None, "extrapolation_value": 0.0,
    "coordinate_transformation_mode": {7: "asymmetric", 11: "half_pixel"},
    "nearest_mode": {7: "floor", 11: "round_prefer_floor"}, "cubic_coeff_a": IGNORED,
    "exclude_outside": IGNORED, "keep_aspect_ratio_policy": "stretch",
}  # fmt: skip
_UPSAMPLE = {
    "mode": "nearest", "scales": None, "coordinate_transformation_mode": "asymmetric",
    "nearest_mode": "floor",
}  # fmt: skip

OPERATORS: dict[str, Operator] = {
    "MaxPool": Operator(run=_max_pool, attributes={**_POOL, "storage_order": IGNORED}),
    "AveragePool": Operator(run=_average_pool, attributes={**_POOL, "count_include_pad": 0}),
    "LpPool": Operator(run=_lp_pool, attributes={**_POOL, "p": 2}),
    "GlobalAveragePool": _global(jnp.mean),
    "GlobalMaxPool": _global(_largest),
    "Pad": Operator(
        run=_pad,
        inputs=(1, 4),
        attributes={"mode": "constant", "pads": None, "value": 0.0},
        static=(1, 2, 3),
    ),
    "Resize": Operator(
        run=_resize, inputs=(1, 4), attributes=_RESIZE, since=10, static=(1, 2, 3)
    ),
    "Upsample": Operator(
        run=_upsample, inputs=(1, 2), attributes=_UPSAMPLE, until=9, static=(1,)
    ),
    "ReduceMean": _reduction(jnp.mean),
    "ReduceSum": _reduction(jnp.sum, np.sum),
    "ReduceMax": _reduction(_largest, np.max),
    "ReduceMin": _reduction(_least, np.min),
    "ReduceProd": _reduction(jnp.prod, np.prod),
    "ReduceL1": _reduction(_l1),
    "ReduceL2": _reduction(_l2),
    "ReduceSumSquare": _reduction(_square),
    "ReduceLogSum": _reduction(_log_sum),
    "ReduceLogSumExp": _reduction(jax.nn.logsumexp),
}  # fmt: skip
