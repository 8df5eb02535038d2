"""Pre-activation ResNet-18: kuangliu's with its three block variants, and DeepMind's."""

import jax
from flax import nnx

from wdjax.models.dm_wide_resnet import strided
from wdjax.models.layers import (
    BatchNorm,
    Conv,
    Group,
    Linear,
    Net,
    average_pool,
    classes_of,
    identity,
    numbered,
    stage,
)

_PLANES = (64, 128, 256, 512)


class _Block(nnx.Module):
    """Two 3x3 convolutions, each after BatchNorm and ReLU, with a shortcut."""

    def __init__(self, inputs, outputs, stride, activated, *, rngs):
        self.bn1 = BatchNorm(inputs, rngs=rngs)
        self.conv1 = Conv(inputs, outputs, 3, stride, 1, rngs=rngs)
        self.bn2 = BatchNorm(outputs, rngs=rngs)
        self.conv2 = Conv(outputs, outputs, 3, 1, 1, rngs=rngs)
        if stride != 1 or inputs != outputs:
            self.shortcut = Group.numbered([Conv(inputs, outputs, 1, stride, rngs=rngs)])
        self.activated = activated

    def __call__(self, x):
        active = jax.nn.relu(self.bn1(x))
        skip = x
        if hasattr(self, "shortcut"):
            skip = self.shortcut(active if self.activated else x)
        return self.conv2(jax.nn.relu(self.bn2(self.conv1(active)))) + skip


class PreActResNet(Net):
    """kuangliu's pre-activation ResNet for 32x32 images.

    Args:
      blocks: blocks a stage, four numbers.
      classes: number of logits.
      normalize: a function applied to the images first.
      activated_shortcut: whether the inputs of 1x1 shortcuts are activated (``PreActBlockV2``, and
        ``PreActBlock`` with ``out_shortcut``).
      final_norm: whether BatchNorm and ReLU precede the pool (``bn_before_fc``).
      rngs: random keys for the parameters; None for an abstract module.
    """

    def __init__(
        self,
        blocks=(2, 2, 2, 2),
        classes=10,
        normalize=identity,
        activated_shortcut=False,
        final_norm=False,
        *,
        rngs=None,
    ):
        self.normalize = normalize
        self.conv1 = Conv(3, 64, 3, 1, 1, rngs=rngs)
        inputs = 64
        for i, (planes, count) in enumerate(zip(_PLANES, blocks)):
            stride = 2 if i else 1
            row = stage(_Block, inputs, planes, stride, count, activated_shortcut, rngs=rngs)
            setattr(self, f"layer{i + 1}", row)
            inputs = planes
        if final_norm:
            self.bn = BatchNorm(inputs, rngs=rngs)
        self.linear = Linear(inputs, classes, rngs=rngs)

    def features(self, x):
        x = self.conv1(self.normalize(x))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        if hasattr(self, "bn"):
            x = jax.nn.relu(self.bn(x))
        return average_pool(x)

    def classify(self, features):
        return self.linear(features)

    @staticmethod
    def sizes(shapes):
        """The size arguments, read off the shapes of a state dict."""
        return {
            "blocks": tuple(numbered(shapes, f"layer{s}.") for s in range(1, 5)),
            "classes": classes_of(shapes, "linear"),
        }


class _DMBlock(nnx.Module):
    """Two 3x3 convolutions, each after BatchNorm and SiLU, with a 3x3 shortcut of the raw input."""

    def __init__(self, inputs, outputs, stride, *, rngs):
        self.batchnorm_0 = BatchNorm(inputs, rngs=rngs)
        self.conv_2d_1 = strided(inputs, outputs, stride, rngs=rngs)
        self.batchnorm_1 = BatchNorm(outputs, rngs=rngs)
        self.conv_2d_2 = Conv(outputs, outputs, 3, 1, 1, rngs=rngs)
        if stride != 1 or inputs != outputs:
            self.shortcut = strided(inputs, outputs, stride, rngs=rngs)

    def __call__(self, x):
        out = self.conv_2d_1(jax.nn.silu(self.batchnorm_0(x)))
        out = self.conv_2d_2(jax.nn.silu(self.batchnorm_1(out)))
        return out + (self.shortcut(x) if hasattr(self, "shortcut") else x)


class DMPreActResNet(Net):
    """DeepMind's pre-activation ResNet-18 with SiLU, and 3x3 shortcuts of the raw input.

    Args:
      blocks: blocks a stage, four numbers.
      classes: number of logits.
      normalize: a function applied to the images first.
      rngs: random keys for the parameters; None for an abstract module.
    """

    def __init__(self, blocks=(2, 2, 2, 2), classes=10, normalize=identity, *, rngs=None):
        self.normalize = normalize
        self.conv_2d = Conv(3, 64, 3, 1, 1, rngs=rngs)
        inputs = 64
        for i, (planes, count) in enumerate(zip(_PLANES, blocks)):
            row = stage(_DMBlock, inputs, planes, 2 if i else 1, count, rngs=rngs)
            setattr(self, f"layer_{i}", row)
            inputs = planes
        self.batchnorm = BatchNorm(inputs, rngs=rngs)
        self.logits = Linear(inputs, classes, rngs=rngs)

    def features(self, x):
        x = self.conv_2d(self.normalize(x))
        for layer in (self.layer_0, self.layer_1, self.layer_2, self.layer_3):
            x = layer(x)
        return average_pool(jax.nn.silu(self.batchnorm(x)))

    def classify(self, features):
        return self.logits(features)

    @staticmethod
    def sizes(shapes):
        """The size arguments, read off the shapes of a state dict."""
        return {
            "blocks": tuple(numbered(shapes, f"layer_{s}.") for s in range(4)),
            "classes": classes_of(shapes, "logits"),
        }
