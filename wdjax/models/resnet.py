"""ResNet: kuangliu's for 32x32 images, and torchvision's with its ImageNet or a CIFAR stem."""

import jax
from flax import nnx

from wdjax.models.layers import (
    BatchNorm,
    Conv,
    Group,
    Linear,
    Net,
    average_pool,
    classes_of,
    common,
    extent,
    first_max_pool,
    identity,
    numbered,
    stage,
)

_PLANES = (64, 128, 256, 512)


def _projection(inputs, outputs, stride, *, rngs):
    """A 1x1 convolution with BatchNorm for a shortcut; None if it keeps size and channels."""
    if stride == 1 and inputs == outputs:
        return None
    return Group.numbered(
        [Conv(inputs, outputs, 1, stride, rngs=rngs), BatchNorm(outputs, rngs=rngs)]
    )


class _Basic(nnx.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut."""

    def __init__(self, inputs, outputs, stride, planes, skip, *, rngs):
        self.conv1 = Conv(inputs, planes, 3, stride, 1, rngs=rngs)
        self.bn1 = BatchNorm(planes, rngs=rngs)
        self.conv2 = Conv(planes, outputs, 3, 1, 1, rngs=rngs)
        self.bn2 = BatchNorm(outputs, rngs=rngs)
        _add_skip(self, skip, _projection(inputs, outputs, stride, rngs=rngs))

    def __call__(self, x):
        out = jax.nn.relu(self.bn1(self.conv1(x)))
        return jax.nn.relu(self.bn2(self.conv2(out)) + _skip(self, x))


class _Bottleneck(nnx.Module):
    """A 1x1, a 3x3 and a 1x1 convolution with BatchNorm, and a shortcut."""

    def __init__(self, inputs, outputs, stride, planes, skip, *, rngs):
        self.conv1 = Conv(inputs, planes, 1, rngs=rngs)
        self.bn1 = BatchNorm(planes, rngs=rngs)
        self.conv2 = Conv(planes, planes, 3, stride, 1, rngs=rngs)
        self.bn2 = BatchNorm(planes, rngs=rngs)
        self.conv3 = Conv(planes, outputs, 1, rngs=rngs)
        self.bn3 = BatchNorm(outputs, rngs=rngs)
        _add_skip(self, skip, _projection(inputs, outputs, stride, rngs=rngs))

    def __call__(self, x):
        out = jax.nn.relu(self.bn1(self.conv1(x)))
        out = jax.nn.relu(self.bn2(self.conv2(out)))
        return jax.nn.relu(self.bn3(self.conv3(out)) + _skip(self, x))


def _add_skip(block, name, projection):
    """Stores a block's projection under the name that its state dict uses; None is not stored."""
    block.skip = name
    if projection is not None:
        setattr(block, name, projection)


def _skip(block, x):
    """The block's shortcut of ``x``: the projection, or ``x`` itself without one."""
    return getattr(block, block.skip)(x) if hasattr(block, block.skip) else x


def _stages(module, blocks, bottleneck, inner, skip, *, rngs):
    """Gives a net its four stages, ``layer1`` to ``layer4``; returns the number of output channels.

    ``blocks`` are the four numbers of blocks; ``inner`` the width of a bottleneck in the first
    stage, 64 being the usual one; ``skip`` the name of a block's projection in state dicts.
    """
    inputs = 64
    block = _Bottleneck if bottleneck else _Basic
    for i, (planes, count) in enumerate(zip(_PLANES, blocks)):
        outputs = planes * 4 if bottleneck else planes
        sizes = inputs, outputs, 2 if i else 1, count, planes * inner // 64
        setattr(module, f"layer{i + 1}", stage(block, *sizes, skip, rngs=rngs))
        inputs = outputs
    return inputs


def basic_stage(inputs, outputs, stride, count, *, rngs):
    """A stage of ``count`` basic blocks, of which the first has the stride."""
    return stage(_Basic, inputs, outputs, stride, count, outputs, "shortcut", rngs=rngs)


class ResNet(Net):
    """kuangliu's ResNet for 32x32 images: 3x3 stem, no max-pool.

    Args:
      blocks: blocks a stage, four numbers.
      bottleneck: whether blocks are bottlenecks (ResNet-50) or basic (ResNet-18, 34).
      classes: number of logits.
      normalize: a function applied to the images first.
      rngs: random keys for the parameters; None for an abstract module.
    """

    def __init__(
        self, blocks=(2, 2, 2, 2), bottleneck=False, classes=10, normalize=identity, *, rngs=None
    ):
        self.normalize = normalize
        self.conv1 = Conv(3, 64, 3, 1, 1, rngs=rngs)
        self.bn1 = BatchNorm(64, rngs=rngs)
        width = _stages(self, blocks, bottleneck, 64, "shortcut", rngs=rngs)
        self.linear = Linear(width, classes, rngs=rngs)

    def features(self, x):
        x = jax.nn.relu(self.bn1(self.conv1(self.normalize(x))))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return average_pool(x)

    def classify(self, features):
        return self.linear(features)

    @staticmethod
    def sizes(shapes):
        """The size arguments, read off the shapes of a state dict."""
        return {"blocks": _blocks(shapes), "classes": classes_of(shapes, "linear")}


def _blocks(shapes):
    """The numbers of blocks in the four stages, by the names of a state dict."""
    return tuple(numbered(shapes, f"layer{stage}.") for stage in range(1, 5))


class TorchvisionResNet(Net):
    """torchvision's ResNet (v1.5: the stride is on the 3x3 convolution).

    Args:
      blocks: blocks a stage, four numbers.
      bottleneck: whether blocks are bottlenecks (ResNet-50) or basic (ResNet-18, 34).
      inner: ``width_per_group``; 128 for WideResNet-50-2.
      classes: number of logits.
      normalize: a function applied to the images first.
      stem: "imagenet" (7x7 stride 2 and a max-pool) or "cifar" (3x3 stride 1, no max-pool).
      rngs: random keys for the parameters; None for an abstract module.
    """

    def __init__(
        self,
        blocks=(2, 2, 2, 2),
        bottleneck=False,
        inner=64,
        classes=1000,
        normalize=identity,
        stem="imagenet",
        *,
        rngs=None,
    ):
        if stem not in ("imagenet", "cifar"):
            raise ValueError(f"stem must be 'imagenet' or 'cifar', got {stem!r}.")
        self.normalize, self.stem = normalize, stem
        size, stride, padding = (7, 2, 3) if stem == "imagenet" else (3, 1, 1)
        self.conv1 = Conv(3, 64, size, stride, padding, rngs=rngs)
        self.bn1 = BatchNorm(64, rngs=rngs)
        width = _stages(self, blocks, bottleneck, inner, "downsample", rngs=rngs)
        self.fc = Linear(width, classes, rngs=rngs)

    def features(self, x):
        x = jax.nn.relu(self.bn1(self.conv1(self.normalize(x))))
        if self.stem == "imagenet":
            x = first_max_pool(x, 3, 2, 1)
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return average_pool(x)

    def classify(self, features):
        return self.fc(features)

    @staticmethod
    def sizes(shapes):
        """The size arguments, read off the shapes of a state dict."""
        bottleneck = any(name.startswith("layer1.0.conv3") for name in shapes)
        inner = [
            extent(shapes, [f"layer{s}.0.bn2.{leaf}"]) // 2 ** (s - 1)
            for s in range(1, 5)
            for leaf in ("weight", "bias")
        ]
        return {
            "blocks": _blocks(shapes),
            "bottleneck": bottleneck,
            "inner": common(inner) if bottleneck else 64,
            "classes": classes_of(shapes, "fc"),
            "stem": "cifar" if shapes.get("conv1.weight", ())[2:] == (3, 3) else "imagenet",
        }
