"""Networks that Chen et al. adapt: LeNet, ResNet-20 and 32, those of DANN."""

import jax
import jax.numpy as jnp
from flax import nnx

from wdjax.models.functional import functional
from wdjax.models.layers import (
    BatchNorm,
    Conv,
    FlatLinear,
    Group,
    Linear,
    Net,
    average_pool,
    max_pool,
    stage,
)
from wdjax.models.resnet import ResNet, basic_stage


class LeNet(Net):
    """Two 5x5 convolutions with max-pools and three linear layers; images ``[n, 28, 28, 1]``."""

    def __init__(self, classes=10, *, rngs=None):
        self.conv1 = Conv(1, 6, 5, 1, 2, bias=True, rngs=rngs)
        self.conv2 = Conv(6, 16, 5, bias=True, rngs=rngs)
        self.fc1 = FlatLinear(5, 5, 16, 120, rngs=rngs)
        self.fc2 = Linear(120, 84, rngs=rngs)
        self.fc3 = Linear(84, classes, rngs=rngs)

    def features(self, x):
        x = max_pool(jax.nn.relu(self.conv1(x)), 2)
        x = max_pool(jax.nn.relu(self.conv2(x)), 2)
        return jax.nn.relu(self.fc2(jax.nn.relu(self.fc1(x))))

    def classify(self, features):
        return self.fc3(features)


class _PaddedBlock(nnx.Module):
    """Two 3x3 convolutions with BatchNorm; the shortcut has no weights, new channels are 0."""

    def __init__(self, inputs, outputs, stride, *, rngs):
        self.stride, self.more = stride, outputs - inputs
        self.conv1 = Conv(inputs, outputs, 3, stride, 1, rngs=rngs)
        self.bn1 = BatchNorm(outputs, rngs=rngs)
        self.conv2 = Conv(outputs, outputs, 3, 1, 1, rngs=rngs)
        self.bn2 = BatchNorm(outputs, rngs=rngs)

    def __call__(self, x):
        skip = x[:, :: self.stride, :: self.stride]
        skip = jnp.pad(skip, ((0, 0), (0, 0), (0, 0), (0, self.more)))
        out = jax.nn.relu(self.bn1(self.conv1(x)))
        return jax.nn.relu(self.bn2(self.conv2(out)) + skip)


class CifarResNet(Net):
    """He et al.'s ResNet for CIFAR-10: three stages of 16, 32 and 64 channels (ResNet-20 to 110).

    Args:
      depth: number of layers, ``6 n + 2``.
      classes: number of logits.
      rngs: random keys for the parameters; None for an abstract module.

    Raises:
      ValueError: another depth.

    >>> net = network(CifarResNet, depth=8)(key=jax.random.key(0))
    >>> net(jnp.zeros((1, 32, 32, 3))).shape
    (1, 10)
    """

    def __init__(self, depth=20, classes=10, *, rngs=None):
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"depth must be 6 n + 2, such as 20 or 32, got {depth}.")
        count = (depth - 2) // 6
        self.conv1 = Conv(3, 16, 3, 1, 1, rngs=rngs)
        self.bn1 = BatchNorm(16, rngs=rngs)
        self.layer1 = stage(_PaddedBlock, 16, 16, 1, count, rngs=rngs)
        self.layer2 = stage(_PaddedBlock, 16, 32, 2, count, rngs=rngs)
        self.layer3 = stage(_PaddedBlock, 32, 64, 2, count, rngs=rngs)
        self.linear = Linear(64, classes, rngs=rngs)

    def features(self, x):
        x = jax.nn.relu(self.bn1(self.conv1(x)))
        return average_pool(self.layer3(self.layer2(self.layer1(x))))

    def classify(self, features):
        return self.linear(features)


class _Convolved(nnx.Module):
    """A 3x3 convolution that keeps 128 channels, with BatchNorm where wanted, and ReLU."""

    def __init__(self, norm, *, rngs):
        self.conv = Conv(128, 128, 3, 1, 1, bias=True, rngs=rngs)
        if norm:
            self.bn = BatchNorm(128, rngs=rngs)

    def __call__(self, x):
        x = self.conv(x)
        return jax.nn.relu(self.bn(x) if hasattr(self, "bn") else x)


class DANNNet(Net):
    """DANN's net for ``[n, 28, 28, 1]``: the features are the encoder's maps ``[n, 4, 4, 128]``."""

    def __init__(self, classes=10, *, rngs=None):
        self.conv1 = Conv(1, 64, 5, bias=True, rngs=rngs)
        self.bn1 = BatchNorm(64, rngs=rngs)
        self.conv2 = Conv(64, 128, 5, bias=True, rngs=rngs)
        self.bn2 = BatchNorm(128, rngs=rngs)
        self.encoder = Group.numbered([_Convolved(True, rngs=rngs) for _ in range(2)])
        self.predictor = Group.numbered([_Convolved(True, rngs=rngs) for _ in range(3)])
        self.fc1 = FlatLinear(4, 4, 128, 256, rngs=rngs)
        self.bn3 = BatchNorm(256, rngs=rngs)
        self.fc2 = Linear(256, classes, rngs=rngs)

    def features(self, x):
        x = jax.nn.relu(max_pool(self.bn1(self.conv1(x)), 2))
        x = jax.nn.relu(max_pool(self.bn2(self.conv2(x)), 2))
        return self.encoder(x)

    def classify(self, features):
        return self.fc2(jax.nn.relu(self.bn3(self.fc1(self.predictor(features)))))


class DANNJudge(Net):
    """The discriminator of :class:`DANNNet`'s features."""

    def __init__(self, *, rngs=None):
        self.layers = Group.numbered([_Convolved(False, rngs=rngs) for _ in range(5)])
        self.fc1 = FlatLinear(4, 4, 128, 256, rngs=rngs)
        self.fc2 = Linear(256, 2, rngs=rngs)

    def features(self, x):
        return jax.nn.relu(self.fc1(self.layers(x)))

    def classify(self, features):
        return self.fc2(features)


class EarlyResNet(ResNet):
    """ResNet-18 whose features are the maps ``[n, 8, 8, 256]`` of the third stage, for DANN."""

    def features(self, x):
        x = jax.nn.relu(self.bn1(self.conv1(self.normalize(x))))
        return self.layer3(self.layer2(self.layer1(x)))

    def classify(self, features):
        return self.linear(average_pool(self.layer4(features)))


class ResNetJudge(Net):
    """The discriminator of :class:`EarlyResNet`'s features."""

    def __init__(self, *, rngs=None):
        self.layer4 = basic_stage(256, 512, 2, 2, rngs=rngs)
        self.linear = Linear(512, 2, rngs=rngs)

    def features(self, x):
        return average_pool(self.layer4(x))

    def classify(self, features):
        return self.linear(features)


def network(module, **settings):
    """A function ``network(key=key)`` that makes a model of a module class, with random weights.

    Args:
      module: a Flax NNX class that takes ``rngs``.
      **settings: its other arguments.

    >>> network(LeNet)(key=jax.random.key(0))(jnp.zeros((1, 28, 28, 1))).shape
    (1, 10)
    """

    def made(*, key):
        return functional(module(**settings, rngs=nnx.Rngs(key)))

    return made
