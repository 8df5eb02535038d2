"""Nets that no two inputs' outputs differ in more than the inputs do, in l2: 1-Lipschitz ones.

Every layer is: affine maps whose kernels are rescaled until their norm is at most 1 (AOL), absolute
values, and images whose pixels are regrouped. A margin then falls by at most ``sqrt(2)`` times the
distance moved.

Source: Prach and Lampert [prach2022].
"""

import itertools
import math

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn.initializers import orthogonal

from wdjax.models.conv import conv
from wdjax.models.functional import functional
from wdjax.models.layers import Conv, Linear, Net, parameter

_LEAST = 1e-12
"""Squared size of a channel's kernel below which it is not enlarged, for finite gradients."""


def contracted(kernel):
    """A kernel of spectral norm at most 1, for a convolution of stride 1 with zeros around images.

    Row ``i`` of the convolution as a matrix ``A`` is divided by the root of ``sum_j |A A^T|_ij``,
    the same for all pixels of a channel; columns likewise, if there are fewer inputs.

    Args:
      kernel: ``[k, k, inputs, outputs]``.
    """
    few = kernel.swapaxes(2, 3) if kernel.shape[2] > kernel.shape[3] else kernel
    gram = conv(jnp.moveaxis(few, 2, 0), few.swapaxes(2, 3), 1, len(kernel) - 1)
    size = jnp.sum(jnp.abs(gram), axis=(1, 2, 3))
    few = few * lax.rsqrt(jnp.maximum(size, _LEAST))[:, None]
    return few.swapaxes(2, 3) if kernel.shape[2] > kernel.shape[3] else few


class AOLLinear(Linear):
    """``x @ contracted(kernel) + bias``; begins with an orthogonal kernel."""

    def __init__(self, inputs, outputs, *, rngs=None):
        self.kernel = parameter(rngs, (inputs, outputs), orthogonal())
        self.bias = parameter(rngs, (outputs,))

    def __call__(self, x):
        return x @ contracted(self.kernel[...][None, None])[0, 0] + self.bias[...]


class AOLConv(Conv):
    """A convolution by ``contracted(kernel)``, of odd size, that keeps the image's sides; begins
    with an orthogonal map of each pixel."""

    def __init__(self, inputs, outputs, size=3, *, rngs=None):
        super().__init__(inputs, outputs, size, 1, size // 2, rngs=rngs)
        self.kernel = parameter(rngs, (size, size, inputs, outputs), _of_each_pixel)
        self.bias = parameter(rngs, (outputs,))

    def __call__(self, x):
        x = conv(x, contracted(self.kernel[...]), self.stride, self.padding)
        return x + self.bias[...]


def _of_each_pixel(key, shape, dtype):
    """An initial kernel ``[k, k, inputs, outputs]``, orthogonal in its middle and 0 elsewhere."""
    middle = orthogonal()(key, shape[2:], dtype)
    return jnp.zeros(shape, dtype).at[shape[0] // 2, shape[1] // 2].set(middle)


def halved(x):
    """Images ``[n, h / 2, w / 2, 4 c]`` of the 2x2 pixels of ``[n, h, w, c]``."""
    n, h, w, c = x.shape
    x = x.reshape(n, h // 2, 2, w // 2, 2, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, h // 2, w // 2, 4 * c)


class LipschitzNet(Net):
    """``halve, conv1, abs, halve, conv2, abs, ..., flatten, fc1, abs, fc2, ...``, 1-Lipschitz."""

    def __init__(self, shape, classes=10, channels=(), hidden=(), *, rngs=None):
        *sides, width = shape
        if channels and (len(sides) != 2 or any(n % 2 ** len(channels) for n in sides)):
            raise ValueError(
                f"{len(channels)} convolutions halve the sides of images [height, width, channels] "
                f"as often, got shape {list(shape)}."
            )
        for i, outputs in enumerate(channels):
            setattr(self, f"conv{i + 1}", AOLConv(4 * width, outputs, rngs=rngs))
            sides, width = [n // 2 for n in sides], outputs
        sizes = (math.prod(sides) * width, *hidden, classes)
        for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            setattr(self, f"fc{i + 1}", AOLLinear(inputs, outputs, rngs=rngs))
        self.convs, self.depth = len(channels), len(sizes) - 1

    def features(self, x):
        for i in range(self.convs):
            x = jnp.abs(getattr(self, f"conv{i + 1}")(halved(x)))
        x = x.reshape(len(x), -1)
        for i in range(1, self.depth):
            x = jnp.abs(getattr(self, f"fc{i}")(x))
        return x

    def classify(self, features):
        return getattr(self, f"fc{self.depth}")(features)


def lipschitz_net(shape, *, key, classes=10, channels=(), hidden=(64,)):
    """A net with random weights that is 1-Lipschitz in l2, whatever its parameters are.

    :func:`wdjax.lipschitz.global_radius` certifies it, by one forward pass a sample;
    :class:`wdjax.lipschitz.LipschitzTraining` with ``constant=2**0.5`` trains it.

    Args:
      shape: ``(height, width, channels)`` of images, or ``(inputs,)``.
      key: a typed ``jax.random.key``.
      classes: number of logits.
      channels: of the convolutions, each of which follows a halving of the image's sides.
      hidden: widths of the hidden dense layers.

    Returns:
      A ``Model`` with params ``{"conv1": {"kernel", "bias"}, ..., "fc1": ...}``.

    Raises:
      ValueError: images whose sides cannot be halved as often as there are convolutions.

    Cost: a forward pass, and the Gram matrix of each kernel.

    Differs: absolute values instead of MaxMin, which is one between two rotations; the shorter side
      of a kernel is rescaled, not always the inputs'.

    Source: Prach and Lampert [prach2022].

    >>> import jax
    >>> model = lipschitz_net((8, 8, 1), key=jax.random.key(0), channels=(4,))
    >>> x, z = (jax.random.uniform(jax.random.key(i), (1, 8, 8, 1)) for i in (1, 2))
    >>> bool(jnp.linalg.norm(model(x) - model(z)) <= jnp.linalg.norm((x - z).reshape(-1)))
    True
    """
    net = LipschitzNet(tuple(shape), classes, tuple(channels), tuple(hidden), rngs=nnx.Rngs(key))
    return functional(net)
