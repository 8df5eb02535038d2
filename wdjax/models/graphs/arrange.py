"""Operators that move, repeat, select or count entries; also what computes shapes."""

import math

import jax.numpy as jnp
import numpy as np

from wdjax.models.graphs.entrywise import MANY, float32
from wdjax.models.graphs.laid import Laid, bounded, reshaped, space, straight, transposed
from wdjax.models.graphs.signature import IGNORED, REQUIRED, Operator


def _axes(call, given, what="axes"):
    """The axes of a node, an attribute in old versions and an input in new ones; or None."""
    if given is not None:
        return call.numbers(given, what)
    return call[what]


def _shape(call, x):
    shape = x.shape
    start, end = call["start"], call["end"]
    return straight(np.asarray(shape[start : len(shape) if end is None else end], np.int64))


def _reshape(call, x, target):
    """The file's shape; one for a fixed number of samples is scaled to the number now."""
    shape = list(call.numbers(target, "shape"))
    for axis, size in enumerate(shape):
        if size == 0 and not call["allowzero"]:
            if axis >= x.ndim:
                raise ValueError(f"it keeps the axis {axis} of {x.ndim}")
            shape[axis] = x.shape[axis]
        elif size < -1:
            raise ValueError(f"it reshapes to {shape}")
    fixed, n = call.fixed, call.samples
    if fixed and n != fixed and not x.static and shape and x.ndim and x.shape[0] % n == 0:
        whole = math.prod(x.shape)
        if -1 in shape:
            shape[0] = n if shape[0] == fixed else shape[0]
        elif math.prod(shape) * n == whole * fixed and shape[0] % fixed == 0:
            shape[0] = shape[0] // fixed * n
    if shape.count(-1) > 1:
        raise ValueError(f"it reshapes to {shape}")
    if -1 in shape:
        rest = -math.prod(shape)
        if not rest or math.prod(x.shape) % rest:
            raise ValueError(f"it reshapes {list(x.shape)} to {shape}")
        shape[shape.index(-1)] = math.prod(x.shape) // rest
    return reshaped(x, shape)


def _flatten(call, x):
    axis = call["axis"]
    axis = axis if axis == x.ndim else x.axis(axis)
    return reshaped(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def _transpose(call, x):
    perm = call["perm"]
    return transposed(x, tuple(range(x.ndim))[::-1] if perm is None else perm)


def _squeeze(call, x, axes=None):
    axes = _axes(call, axes)
    chosen = {x.axis(axis) for axis in axes} if axes is not None else None
    gone = [k for k, size in enumerate(x.shape) if size == 1] if chosen is None else sorted(chosen)
    if any(x.shape[axis] != 1 for axis in gone):
        raise ValueError(f"it removes the axes {gone} of {list(x.shape)}")
    positions = tuple(x.order.index(axis) for axis in gone)
    return Laid(space(x).squeeze(x.array, axis=positions), x.without(gone))


def _unsqueeze(call, x, axes=None):
    axes, ndim = _axes(call, axes), None
    if axes is None:
        raise ValueError("its axes are missing")
    ndim = x.ndim + len(axes)
    new = sorted({axis % ndim if -ndim <= axis < ndim else ndim for axis in axes})
    if len(new) < len(axes) or ndim in new:
        raise ValueError(f"it adds the axes {list(axes)} to an array with {x.ndim}")
    old = [axis for axis in range(ndim) if axis not in new]
    order = [old[axis] for axis in x.order]
    for axis in new:  # Beside the axis that precedes it in the file.
        order.insert(order.index(axis - 1) + 1 if axis else 0, axis)
    sizes = dict(zip(old, x.shape))
    return Laid(x.array.reshape([sizes.get(axis, 1) for axis in order]), tuple(order))


def _slice(call, x, starts=None, ends=None, axes=None, steps=None):
    starts, ends = _axes(call, starts, "starts"), _axes(call, ends, "ends")
    axes = _axes(call, axes)
    axes = range(len(starts)) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else call.numbers(steps, "steps")
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise ValueError("its starts, ends, axes and steps do not fit together")
    parts = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps):
        size, position = x.shape[x.axis(axis)], x.position(axis)
        if step < 0 and end < -size:
            parts[position] = slice(start, None, step)
        else:
            parts[position] = slice(start, end, step)
    return Laid(x.array[tuple(parts)], x.order)


def _split(call, x, sizes=None):
    position, size = x.position(call["axis"]), x.shape[x.axis(call["axis"])]
    parts = call.numbers(sizes, "split") if sizes is not None else call["split"]
    if parts is None:
        count = call["num_outputs"] or call.outputs
        each = -(-size // count)
        parts = [each] * (count - 1) + [size - each * (count - 1)]
    if sum(parts) != size or min(parts, default=0) < 0:
        raise ValueError(f"it splits {size} entries into {list(parts)}")
    ends = np.cumsum(parts)[:-1].tolist()
    return tuple(Laid(part, x.order) for part in space(x).split(x.array, ends, axis=position))


def _concat(call, *values):
    leader = max(values, key=lambda value: (not value.static, value.array.size))
    if any(value.ndim != leader.ndim for value in values):
        raise ValueError("it joins arrays with different numbers of axes")
    xp = space(*values)
    arrays = [xp.asarray(value.to(leader.order)) for value in values]
    bounded((sum(array.size for array in arrays),))
    return Laid(xp.concatenate(arrays, axis=leader.position(call["axis"])), leader.order)


def _gather(call, x, indices):
    """Entries at known indices: a slice for one, or indices that follow each other."""
    axis, position = x.axis(call["axis"]), x.position(call["axis"])
    size = x.shape[axis]
    at = np.asarray(call.known(indices, "indices"))
    if at.dtype.kind not in "iu" or (at.size and not (-size <= at.min() and at.max() < size)):
        raise ValueError(f"its indices are not integers within {size} entries")
    at = at.astype(np.int64) % max(size, 1)
    bounded((x.array.size // max(size, 1) * at.size,))
    xp = space(x)
    if at.ndim == 0:
        first = int(at)
        part = x.array[(slice(None),) * position + (slice(first, first + 1),)]
        return Laid(xp.squeeze(part, axis=position), x.without([axis]))
    if at.size and np.array_equal(at.ravel(), np.arange(at.flat[0], at.flat[0] + at.size)):
        first = int(at.flat[0])  # PyTorch exports a change of strides as such indices.
        part = x.array[(slice(None),) * position + (slice(first, first + at.size),)]
        return reshaped(Laid(part, x.order), (*x.shape[:axis], *at.shape, *x.shape[axis + 1 :]))
    if at.ndim == 1:
        return Laid(_taken(xp, x.array, at, position), x.order)
    return straight(_taken(xp, x.plain(), at, axis))


def _taken(xp, array, at, axis):
    if xp is np:
        return np.take(array, at, axis=axis)
    return jnp.take(array, jnp.asarray(at, jnp.int32), axis=axis, mode="clip")


def _expand(call, x, target):
    shape = list(call.numbers(target, "shape"))
    ndim = max(x.ndim, len(shape))
    wide = x.raised(ndim)
    shape = bounded(np.broadcast_shapes(wide.shape, (1,) * (ndim - len(shape)) + tuple(shape)))
    array = space(x).broadcast_to(wide.array, [shape[axis] for axis in wide.order])
    return Laid(array, wide.order)


def _tile(call, x, repeats):
    repeats = call.numbers(repeats, "repeats")
    if len(repeats) != x.ndim or min(repeats, default=0) < 0:
        raise ValueError(f"it repeats {list(x.shape)} by {list(repeats)}")
    bounded([size * count for size, count in zip(x.shape, repeats)])
    return Laid(space(x).tile(x.array, [repeats[axis] for axis in x.order]), x.order)


def _filled(call, shape):
    value = call["value"]
    value = np.zeros(1, np.float32) if value is None else float32(value)
    if value.size != 1:
        raise ValueError("its value must be one number")
    return straight(np.full(bounded(call.numbers(shape, "shape")), value.item(), value.dtype))


def _range(call, start, limit, delta):
    first, last, step = (call.known(part, "limits").item() for part in (start, limit, delta))
    if step == 0 or not all(map(math.isfinite, (first, last, step))):
        raise ValueError("its step is 0, or a limit is not finite")
    bounded((max(math.ceil((last - first) / step), 0),))
    return straight(np.arange(first, last, step).astype(start.array.dtype))


def _trilu(call, x, diagonal=None):
    k = 0 if diagonal is None else int(call.numbers(diagonal, "diagonal")[0])
    xp = space(x)
    return straight((xp.triu if call["upper"] else xp.tril)(x.plain(), k))


def _one_hot(call, indices, depth, values):
    count = int(call.known(depth, "depth").item())
    at, (off, on) = call.known(indices, "indices"), call.known(values, "values").tolist()
    bounded((at.size * max(count, 1),))
    at = at.astype(np.int64)
    hot = np.where(at < 0, at + count, at)[..., None] == np.arange(count)
    axis = call["axis"] % (at.ndim + 1)
    return straight(np.moveaxis(np.where(hot, on, off).astype(values.array.dtype), -1, axis))


def _nonzero(call, x):
    return straight(np.stack(np.nonzero(call.known(x, "input"))).astype(np.int64))


def _scatter_nd(call, data, indices, updates):
    """Entries replaced at known indices."""
    at = np.asarray(call.known(indices, "indices")).astype(np.int64)
    if call["reduction"] != "none" or not at.ndim or at.shape[-1] > data.ndim:
        raise ValueError("it adds or multiplies, or its indices do not fit")
    sizes = data.shape[: at.shape[-1]]
    if at.size and not all(-n <= at[..., k].min() and at[..., k].max() < n
                           for k, n in enumerate(sizes)):  # fmt: skip
        raise ValueError(f"its indices are not within {list(sizes)}")
    positions = tuple(at[..., k] for k in range(at.shape[-1]))
    if data.static and updates.static:
        array = data.array.copy()
        array[positions] = updates.array
        return straight(array)
    return straight(jnp.asarray(data.plain()).at[positions].set(jnp.asarray(updates.plain())))


def _gather_nd(call, x, indices):
    """Entries at known indices, with no axes in common."""
    at = np.asarray(call.known(indices, "indices")).astype(np.int64)
    if call["batch_dims"] or not at.ndim or at.shape[-1] > x.ndim:
        raise ValueError("it has axes in common with its indices, or they do not fit")
    sizes = x.shape[: at.shape[-1]]
    if at.size and not all(-n <= at[..., k].min() and at[..., k].max() < n
                           for k, n in enumerate(sizes)):  # fmt: skip
        raise ValueError(f"its indices are not within {list(sizes)}")
    bounded(at.shape[:-1] + x.shape[at.shape[-1] :])
    return straight(x.plain()[tuple(at[..., k] for k in range(at.shape[-1]))])


def _to_space(call, x):
    """Channels become blocks of pixels: ``[n, C, H, W]`` to ``[n, C / b b, H b, W b]``."""
    b, (n, c, h, w) = call["blocksize"], x.shape
    if b < 1 or c % (b * b):
        raise ValueError(f"{c} channels are no blocks of {b} x {b}")
    if call["mode"] == "CRD":
        blocks = transposed(reshaped(x, (n, c // b**2, b, b, h, w)), (0, 1, 4, 2, 5, 3))
    else:
        blocks = transposed(reshaped(x, (n, b, b, c // b**2, h, w)), (0, 3, 4, 1, 5, 2))
    return reshaped(blocks, (n, c // b**2, h * b, w * b))


def _to_depth(call, x):
    """Blocks of pixels become channels, the inverse of :func:`_to_space`."""
    b, (n, c, h, w) = call["blocksize"], x.shape
    if b < 1 or h % b or w % b:
        raise ValueError(f"{h} x {w} pixels are no blocks of {b} x {b}")
    blocks = transposed(reshaped(x, (n, c, h // b, b, w // b, b)), (0, 3, 5, 1, 2, 4))
    return reshaped(blocks, (n, c * b * b, h // b, w // b))


def _constant(call):
    found = [value for value in call.attributes.values() if value is not None]
    if len(found) != 1:
        raise ValueError("it holds no value, or several")
    value = found[0]
    if isinstance(value, np.ndarray):
        return straight(float32(value))
    numbers = np.asarray(value)
    return straight(numbers.astype(np.float32) if numbers.dtype.kind == "f" else numbers)


def _dropout(call, x, ratio=None, training=None):
    if training is not None and np.any(call.known(training, "training mode")):
        raise ValueError(
            "it is in its training form, in which an output depends on chance; call module.eval() "
            "and export again"
        )
    return x


def _first(call, x, *others):
    return x


def refused(reason):
    """An operator that cannot be part of a classifier's logits."""

    def run(call, *values):
        raise ValueError(reason)

    return Operator(run=run, inputs=(0, 1 << 16), attributes=_Any())


class _Any(dict):
    """The attributes of an operator that is refused anyway."""

    def __contains__(self, name):
        return True


_CLASS = (
    "it gives a place, which has no derivative; export the model up to its logits, and let the "
    "library choose the class"
)
_BLOCKS = {"blocksize": REQUIRED}
_NO_AXES = {"axes": {7: None}}
_VALUES = {
    "value": None, "value_float": None, "value_floats": None, "value_int": None,
    "value_ints": None,
}  # fmt: skip

OPERATORS: dict[str, Operator] = {
    "Shape": Operator(run=_shape, attributes={"start": 0, "end": None}),
    "Size": Operator(run=lambda call, x: straight(np.asarray(math.prod(x.shape), np.int64))),
    "Reshape": Operator(run=_reshape, inputs=(2, 2), attributes={"allowzero": 0}, static=(1,)),
    "Flatten": Operator(run=_flatten, attributes={"axis": 1}),
    "Transpose": Operator(run=_transpose, attributes={"perm": None}),
    "Squeeze": Operator(run=_squeeze, inputs=(1, 2), attributes=_NO_AXES, static=(1,)),
    "Unsqueeze": Operator(run=_unsqueeze, inputs=(1, 2), attributes=_NO_AXES, static=(1,)),
    "Slice": Operator(
        run=_slice,
        inputs=(1, 5),
        attributes={"starts": None, "ends": None, "axes": None},
        static=(1, 2, 3, 4),
    ),
    "Split": Operator(
        run=_split,
        inputs=(1, 2),
        attributes={"axis": 0, "split": None, "num_outputs": None},
        static=(1,),
    ),
    "Concat": Operator(run=_concat, inputs=MANY, attributes={"axis": REQUIRED}),
    "Gather": Operator(run=_gather, inputs=(2, 2), attributes={"axis": 0}, static=(1,)),
    "GatherND": Operator(run=_gather_nd, inputs=(2, 2), attributes={"batch_dims": 0}, static=(1,)),
    "ScatterND": Operator(
        run=_scatter_nd, inputs=(3, 3), attributes={"reduction": "none"}, static=(1,)
    ),
    "Expand": Operator(run=_expand, inputs=(2, 2), static=(1,)),
    "Tile": Operator(run=_tile, inputs=(2, 2), static=(1,)),
    "ConstantOfShape": Operator(run=_filled, attributes={"value": None}, static=(0,)),
    "Range": Operator(run=_range, inputs=(3, 3), static=(0, 1, 2)),
    "Trilu": Operator(run=_trilu, inputs=(1, 2), attributes={"upper": 1}, static=(1,)),
    "OneHot": Operator(run=_one_hot, inputs=(3, 3), attributes={"axis": -1}, static=(0, 1, 2)),
    "NonZero": Operator(run=_nonzero, static=(0,)),
    "DepthToSpace": Operator(run=_to_space, attributes={**_BLOCKS, "mode": "DCR"}),
    "SpaceToDepth": Operator(run=_to_depth, attributes=_BLOCKS),
    "Constant": Operator(run=_constant, inputs=(0, 0), attributes=_VALUES),
    "Identity": Operator(run=_first),
    "Dropout": Operator(
        run=_dropout,
        inputs=(1, 3),
        attributes={"ratio": IGNORED, "seed": IGNORED},
        static=(1, 2),
    ),
    "ArgMax": refused(_CLASS),
    "ArgMin": refused(_CLASS),
    "Hardmax": refused(_CLASS),
    "TopK": refused(_CLASS),
    "If": refused("branches are not supported; export the model for fixed shapes, without them"),
    "Loop": refused("loops are not supported; export the model for fixed shapes, unrolled"),
    "Scan": refused("loops are not supported; export the model for fixed shapes, unrolled"),
    "RandomNormalLike": refused("it is random; export the model in its inference form"),
    "RandomUniformLike": refused("it is random; export the model in its inference form"),
}
