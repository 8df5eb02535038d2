"""Layers of all architectures: NHWC, float32, BatchNorm with stored statistics.

A layer made with ``rngs=None`` is abstract: its parameters are shapes only, which take no memory
and are all that a converter needs.
"""

import collections
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from wdjax.models.conv import conv
from wdjax.tracing import analysed


def parameter(rngs, shape, init=None, kind=nnx.Param):
    """A variable from ``init(key, shape)``, zeros without ``init``, a shape if ``rngs`` is None."""
    if rngs is None:
        return kind(jax.ShapeDtypeStruct(shape, jnp.float32))
    return kind(jnp.zeros(shape) if init is None else init(rngs.params(), shape, jnp.float32))


def uniform(fan_in):
    """PyTorch's default initialisation: uniform in ``+-1 / sqrt(fan_in)``."""
    if fan_in < 1:
        raise ValueError("these sizes leave a layer without inputs.")
    bound = 1 / math.sqrt(fan_in)
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


ones = jax.nn.initializers.ones


def beside(v, x):
    """A vector over channels with the rank of ``x``, since JAX may not promote ranks."""
    return jnp.expand_dims(v, tuple(range(x.ndim - v.ndim)))


class Group(nnx.Module):
    """Layers by name, as attributes; a number is a name, too."""

    def __init__(self, **layers):
        for name, layer in layers.items():
            setattr(self, name, layer)

    @classmethod
    def numbered(cls, layers):
        return cls(**{str(i): layer for i, layer in enumerate(layers)})

    def __getitem__(self, name):
        return getattr(self, str(name))

    def __len__(self):
        return sum(isinstance(value, nnx.Module) for value in vars(self).values())

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __call__(self, x):
        for layer in self:
            x = layer(x)
        return x


def stage(block, inputs, outputs, stride, count, *more, rngs):
    """``count`` blocks in a row: ``block(inputs, outputs, stride, *more)``, from the second on with
    ``outputs`` channels in and stride 1."""
    sizes = [(inputs, stride), *[(outputs, 1)] * (count - 1)]
    return Group.numbered([block(size, outputs, by, *more, rngs=rngs) for size, by in sizes])


class Net(nnx.Module):
    """A classifier in two parts: ``features`` of images, and ``classify``, the logits of these."""

    def __call__(self, x):
        return self.classify(self.features(x))


class Linear(nnx.Module):
    """``x @ kernel + bias``."""

    def __init__(self, inputs, outputs, bias=True, *, rngs=None):
        init = uniform(inputs)
        self.kernel = parameter(rngs, (inputs, outputs), init)
        if bias:
            self.bias = parameter(rngs, (outputs,), init)

    def __call__(self, x):
        x = x @ self.kernel[...]
        return x + beside(self.bias[...], x) if hasattr(self, "bias") else x


class FlatLinear(Linear):
    """A linear layer of a flattened image; stores its shape, since PyTorch flattens as CHW."""

    def __init__(self, height, width, channels, outputs, *, rngs=None):
        super().__init__(height * width * channels, outputs, rngs=rngs)
        self.image = (height, width, channels)

    def __call__(self, x):
        return super().__call__(x.reshape(len(x), -1))


class Conv(nnx.Module):
    """A convolution with explicit padding: a number, or ``((top, bottom), (left, right))``."""

    def __init__(
        self, inputs, outputs, size, stride=1, padding=0, bias=False, groups=1, *, rngs=None
    ):
        init = uniform(size * size * inputs // groups)
        self.kernel = parameter(rngs, (size, size, inputs // groups, outputs), init)
        if bias:
            self.bias = parameter(rngs, (outputs,), init)
        self.stride, self.padding, self.groups = stride, padding, groups

    def __call__(self, x):
        x = conv(x, self.kernel[...], self.stride, self.padding, self.groups)
        return x + beside(self.bias[...], x) if hasattr(self, "bias") else x


class BatchNorm(nnx.Module):
    """Batch normalisation with stored statistics, as at test time.

    With ``of_batch`` set, the mean and the (biased) variance of the batch are used instead, as
    in PyTorch's training; see :func:`wdjax.models.batch_statistics`. With ``momentum`` set too, the
    stored statistics move by that share towards the batch's, with its unbiased variance, as in
    PyTorch; see :func:`wdjax.models.training_pass`.
    """

    def __init__(self, features, epsilon=1e-5, *, rngs=None):
        self.scale = parameter(rngs, (features,), ones)
        self.bias = parameter(rngs, (features,))
        self.mean = parameter(rngs, (features,), kind=nnx.BatchStat)
        self.var = parameter(rngs, (features,), ones, kind=nnx.BatchStat)
        self.epsilon, self.of_batch, self.momentum = epsilon, False, None

    def __call__(self, x):
        if self.of_batch:
            axes = tuple(range(x.ndim - 1))
            mean = jnp.mean(x, axis=axes)
            centred = x - beside(mean, x)
            var = jnp.mean(centred**2, axis=axes)
            if self.momentum is not None:
                self._move(mean, var, x.size // x.shape[-1])
            scale = self.scale[...] * lax.rsqrt(var + self.epsilon)
            return centred * beside(scale, x) + beside(self.bias[...], x)
        scale = self.scale[...] * lax.rsqrt(self.var[...] + self.epsilon)
        return x * beside(scale, x) + beside(self.bias[...] - self.mean[...] * scale, x)

    def _move(self, mean, var, count):
        """Moves the running mean and variance by ``momentum`` towards the batch's.

        ``count`` is the number of values of a channel, for the unbiased variance. No gradient
        passes.
        """

        def towards(old, new):
            return lax.stop_gradient(old + self.momentum * (new - old))

        self.mean = nnx.BatchStat(towards(self.mean[...], mean))
        self.var = nnx.BatchStat(towards(self.var[...], var * count / max(count - 1, 1)))


class LayerNorm(nnx.Module):
    """Layer normalisation over the channels (the last axis)."""

    def __init__(self, features, epsilon, *, rngs=None):
        self.scale = parameter(rngs, (features,), ones)
        self.bias = parameter(rngs, (features,))
        self.epsilon = epsilon

    def __call__(self, x):
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        var = jnp.mean(centred**2, axis=-1, keepdims=True)
        unit = centred * lax.rsqrt(var + self.epsilon)
        return unit * beside(self.scale[...], x) + beside(self.bias[...], x)


class Normalize(nnx.Module):
    """``(x - mean) / std`` per channel, with constants that are not parameters."""

    def __init__(self, mean, std):
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))

    def __call__(self, x):
        mean, std = (jnp.asarray(part, x.dtype) for part in (self.mean, self.std))
        return (x - beside(mean, x)) / beside(std, x)


class MeanSparse(nnx.Module):
    """Replaces values within ``threshold`` standard deviations of the channel's mean by the mean.

    Its gradient is 0 there. Source: Amini et al. (2024), MeanSparse.
    """

    def __init__(self, features, *, rngs=None):
        self.mean = parameter(rngs, (features,), kind=nnx.Variable)
        self.var = parameter(rngs, (features,), ones, kind=nnx.Variable)
        self.threshold = parameter(rngs, (), kind=nnx.Variable)

    def __call__(self, x):
        mean = beside(self.mean[...], x)
        band = beside(self.threshold[...] * jnp.sqrt(self.var[...]), x)
        return jnp.where(jnp.abs(x - mean) < band, mean, x)


def identity(x):
    """No normalisation."""
    return x


def check_side(x, side):
    """Raises unless images are as large as tokens' positions are for: patches leave a rest out."""
    if x.shape[1:3] != (side, side):
        raise ValueError(f"the model takes images of {side} x {side}, got {list(x.shape)}.")


def standardize(x):
    """Each image minus its mean, over its unbiased standard deviation (at least 1 / sqrt(size)).

    A constant image has the gradient of the lower bound, not NaN. Source: Ding et al. (2020), MMA.
    """
    size = math.prod(x.shape[1:])
    centred = x - jnp.mean(x, axis=(1, 2, 3), keepdims=True)
    var = jnp.sum(centred**2, axis=(1, 2, 3), keepdims=True) / (size - 1)
    std = jnp.sqrt(jnp.where(var > 1 / size, var, 1.0))
    return centred / jnp.where(var > 1 / size, std, 1 / math.sqrt(size))


def gelu(x):
    """The exact GELU, ``x Phi(x)``."""
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


def max_pool(x, size):
    """Maximum over squares that do not overlap; in programs that are analysed by a reshape, which
    has tight bounds.

    The gradient of ``jnp.max`` divides by the number of entries equal to the maximum. That is 0
    where a compiler computes them twice, with other roundings, so that it is NaN.
    """
    if not analysed():
        return first_max_pool(x, size, size, 0)
    n, height, width, channels = x.shape
    x = x[:, : height // size * size, : width // size * size]
    x = x.reshape(n, height // size, size, width // size, size, channels)
    return jnp.max(x, axis=(2, 4))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def first_max(x, axes, keepdims):
    """``jnp.max`` along a tuple of axes, with the gradient of :func:`first_max_pool`."""
    return jnp.max(x, axis=axes, keepdims=keepdims)


@first_max.defjvp
def _(axes, keepdims, values, changes):
    (x,), (change,) = values, changes
    positions = tuple(axis % x.ndim for axis in axes)
    order = (*(axis for axis in range(x.ndim) if axis not in positions), *positions)
    kept = [x.shape[axis] for axis in order[: x.ndim - len(positions)]]
    x, change = (array.transpose(order).reshape(*kept, -1) for array in (x, change))
    first = jnp.arange(x.shape[-1]) == jnp.argmax(x, axis=-1, keepdims=True)
    out, moved = jnp.max(x, axis=-1), jnp.sum(jnp.where(first, change, 0), axis=-1)
    if keepdims:
        out, moved = (jnp.expand_dims(array, positions) for array in (out, moved))
    return out, moved


def first_max_pool(x, size, stride, padding):
    """PyTorch's max-pool: for ties the gradient goes to the first value in reading order."""
    pads = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    x = jnp.pad(x, pads, constant_values=-jnp.inf) if padding else x
    rows, cols = ((n - size) // stride for n in x.shape[1:3])
    best = None
    for i in range(size):
        for j in range(size):
            tap = x[:, i : i + stride * rows + 1 : stride, j : j + stride * cols + 1 : stride]
            best = tap if best is None else jnp.where(tap > best, tap, best)
    return best


def average_pool(x):
    """Mean over the image axes."""
    return jnp.mean(x, axis=(1, 2))


def common(values):
    """The most frequent value, so that a single wrong tensor of a file does not matter; or 0."""
    found = collections.Counter(value for value in values if value)
    return found.most_common(1)[0][0] if found else 0


def extent(shapes, names, axis=0):
    """The most frequent length of the named tensors along an axis; 0 if none has that axis."""
    found = [shapes.get(name, ()) for name in names]
    return common(shape[axis] for shape in found if len(shape) > axis)


def classes_of(shapes, layer):
    """The number of a linear layer's outputs, by its bias and its weight."""
    return extent(shapes, (f"{layer}.bias", f"{layer}.weight"))


def numbered(names, prefix):
    """The number of layers with a prefix, numbered from 0 without gaps."""
    found = {name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix)}
    return next(count for count in itertools.count() if str(count) not in found)
