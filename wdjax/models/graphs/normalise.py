"""Operators that normalise: by stored statistics, by those of a sample, and softmax."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from wdjax.models.graphs.laid import Laid, reshaped, straight
from wdjax.models.graphs.signature import IGNORED, REQUIRED, Operator

_TRAINING = (
    "it is in its training form, in which a sample's output depends on its batch; call "
    "module.eval() and export again"
)


def _along(vector, x, axis):
    """A vector of the file as an array that fits ``x``, along one axis."""
    size = x.shape[axis]
    if vector.shape != (size,):
        raise ValueError(f"it has {list(vector.shape)} numbers for {size} channels")
    shape = [1] * x.ndim
    shape[x.order.index(axis)] = size
    return jnp.asarray(vector.array).reshape(shape)


def _positions(x, axes):
    return tuple(x.order.index(axis) for axis in axes)


def _batch_norm(call, x, scale, bias, mean, var):
    if call["training_mode"] or call.outputs > 1 or x.ndim < 2:
        raise ValueError(_TRAINING)
    if not call["spatial"]:
        raise ValueError("its statistics are not those of channels, which is not supported")
    scale, bias, mean, var = (_along(part, x, 1) for part in (scale, bias, mean, var))
    factor = scale * lax.rsqrt(var + call["epsilon"])
    return Laid(jnp.asarray(x.array) * factor + (bias - mean * factor), x.order)


def _centred(array, positions, epsilon):
    """The array minus its mean, over its standard deviation along some axes."""
    centred = array - jnp.mean(array, axis=positions, keepdims=True)
    var = jnp.mean(centred**2, axis=positions, keepdims=True)
    return centred * lax.rsqrt(var + epsilon)


def _fitting(part, x):
    """A scale or bias, in the order of ``x``."""
    return jnp.asarray(part.raised(x.ndim).to(x.order))


def _layer_norm(call, x, scale, bias=None):
    if call.outputs > 1:
        raise ValueError("it also gives its statistics, which is not supported")
    axes = range(x.axis(call["axis"]), x.ndim)
    unit = _centred(jnp.asarray(x.array), _positions(x, axes), call["epsilon"])
    out = unit * _fitting(scale, x)
    return Laid(out if bias is None else out + _fitting(bias, x), x.order)


def _rms_norm(call, x, scale):
    positions = _positions(x, range(x.axis(call["axis"]), x.ndim))
    array = jnp.asarray(x.array)
    size = jnp.mean(array**2, axis=positions, keepdims=True)
    return Laid(array * lax.rsqrt(size + call["epsilon"]) * _fitting(scale, x), x.order)


def _instance_norm(call, x, scale, bias):
    unit = _centred(jnp.asarray(x.array), _positions(x, range(2, x.ndim)), call["epsilon"])
    return Laid(unit * _along(scale, x, 1) + _along(bias, x, 1), x.order)


def _group_norm(call, x, scale, bias):
    """Scale and bias of version 18 belong to groups, those of version 21 to channels."""
    n, channels, *sides = x.shape
    groups = call["num_groups"]
    if groups < 1 or channels % groups:
        raise ValueError(f"it has {groups} groups of {channels} channels")
    grouped = reshaped(x, (n, groups, channels // groups, *sides))
    positions = _positions(grouped, range(2, grouped.ndim))
    unit = Laid(_centred(jnp.asarray(grouped.array), positions, call["epsilon"]), grouped.order)
    if call.opset < 21:
        unit = Laid(unit.array * _along(scale, unit, 1) + _along(bias, unit, 1), grouped.order)
        return reshaped(unit, x.shape)
    out = reshaped(unit, x.shape)
    return Laid(out.array * _along(scale, out, 1) + _along(bias, out, 1), out.order)


def _lp_norm(call, x):
    array, position = jnp.asarray(x.array), x.position(call["axis"])
    if call["p"] == 1:
        size = jnp.sum(jnp.abs(array), axis=position, keepdims=True)
    elif call["p"] == 2:
        size = jnp.sqrt(jnp.sum(array**2, axis=position, keepdims=True))
    else:
        raise ValueError(f"its p is {call['p']}, expected 1 or 2")
    return Laid(array / size, x.order)


def _local_response(call, x):
    """Each channel over a power of the sum of squares of its neighbours."""
    array, position, size = jnp.asarray(x.array), x.position(1), call["size"]
    window = [1] * x.ndim
    window[position] = size
    pads = [(0, 0)] * x.ndim
    pads[position] = ((size - 1) // 2, size - 1 - (size - 1) // 2)
    total = lax.reduce_window(array**2, 0.0, lax.add, window, (1,) * x.ndim, pads)
    return Laid(array / (call["bias"] + call["alpha"] / size * total) ** call["beta"], x.order)


def _softmax(function):
    """Before version 13 it takes all axes from the given one on together."""

    def run(call, x):
        axis = x.axis(call["axis"])
        if call.opset >= 13 or axis == x.ndim - 1:
            return Laid(function(jnp.asarray(x.array), axis=x.order.index(axis)), x.order)
        rows = (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
        out = function(jnp.asarray(reshaped(x, rows).plain()), axis=-1)
        return reshaped(straight(out), x.shape)

    return Operator(run=run, attributes={"axis": {7: 1, 13: -1}})


_BATCH = {
    "epsilon": 1e-5, "momentum": IGNORED, "training_mode": 0, "spatial": 1,
}  # fmt: skip

OPERATORS: dict[str, Operator] = {
    "BatchNormalization": Operator(run=_batch_norm, inputs=(5, 5), attributes=_BATCH),
    "LayerNormalization": Operator(
        run=_layer_norm,
        inputs=(2, 3),
        attributes={"axis": -1, "epsilon": 1e-5, "stash_type": IGNORED},
    ),
    "RMSNormalization": Operator(
        run=_rms_norm,
        inputs=(2, 2),
        attributes={"axis": -1, "epsilon": 1e-5, "stash_type": IGNORED},
        since=23,
    ),
    "InstanceNormalization": Operator(
        run=_instance_norm, inputs=(3, 3), attributes={"epsilon": 1e-5}
    ),
    "GroupNormalization": Operator(
        run=_group_norm,
        inputs=(3, 3),
        attributes={"num_groups": REQUIRED, "epsilon": 1e-5, "stash_type": IGNORED},
        since=18,
    ),
    "LpNormalization": Operator(run=_lp_norm, attributes={"axis": -1, "p": 2}),
    "LRN": Operator(
        run=_local_response,
        attributes={"size": REQUIRED, "alpha": 1e-4, "beta": 0.75, "bias": 1.0},
    ),
    "Softmax": _softmax(jax.nn.softmax),
    "LogSoftmax": _softmax(jax.nn.log_softmax),
}
