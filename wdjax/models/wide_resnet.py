"""WideResNet as defined by TRADES and most of RobustBench; names are those of its state dicts."""

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
    identity,
    numbered,
    stage,
)


class _Block(nnx.Module):
    """Two 3x3 convolutions, each after BatchNorm and ReLU, with a shortcut."""

    def __init__(self, inputs, outputs, stride, *, rngs):
        self.bn1 = BatchNorm(inputs, rngs=rngs)
        self.conv1 = Conv(inputs, outputs, 3, stride, 1, rngs=rngs)
        self.bn2 = BatchNorm(outputs, rngs=rngs)
        self.conv2 = Conv(outputs, outputs, 3, 1, 1, rngs=rngs)
        if inputs != outputs:
            self.convShortcut = Conv(inputs, outputs, 1, stride, rngs=rngs)

    def __call__(self, x):
        active = jax.nn.relu(self.bn1(x))
        out = self.conv2(jax.nn.relu(self.bn2(self.conv1(active))))
        # Where the width changes, the shortcut sees the activated input.
        return out + (self.convShortcut(active) if hasattr(self, "convShortcut") else x)


class WideResNet(Net):
    """WRN-depth-width with ReLU on 32x32 images.

    Args:
      depth: ``6 n + 4`` for n blocks a group.
      width: widening factor.
      classes: number of logits.
      normalize: a function applied to the images first.
      rngs: random keys for the parameters; None for an abstract module.
    """

    def __init__(self, depth=28, width=10, classes=10, normalize=identity, *, rngs=None):
        if (depth - 4) % 6 or depth < 10:
            raise ValueError(f"depth must be 6 n + 4 with n from 1 on, got {depth}.")
        blocks = (depth - 4) // 6
        self.normalize = normalize
        self.conv1 = Conv(3, 16, 3, 1, 1, rngs=rngs)
        inputs = 16
        for group in (1, 2, 3):
            outputs = 16 * width * 2 ** (group - 1)
            row = stage(_Block, inputs, outputs, 2 if group > 1 else 1, blocks, rngs=rngs)
            setattr(self, f"block{group}", Group(layer=row))
            inputs = outputs
        self.bn1 = BatchNorm(inputs, rngs=rngs)
        self.fc = Linear(inputs, classes, rngs=rngs)

    def features(self, x):
        x = self.conv1(self.normalize(x))
        for group in (self.block1, self.block2, self.block3):
            x = group.layer(x)
        return average_pool(jax.nn.relu(self.bn1(x)))

    def classify(self, features):
        return self.fc(features)

    @staticmethod
    def sizes(shapes):
        """The size arguments, read off the shapes of a state dict."""
        blocks = numbered(shapes, "block1.layer.")
        widths = [
            extent(shapes, [f"block{g}.layer.{i}.bn2.bias"]) // (8 * 2**g)
            for g in (1, 2, 3)
            for i in range(blocks)
        ]
        return {
            "depth": blocks and 6 * blocks + 4,
            "width": common(widths),
            "classes": classes_of(shapes, "fc"),
        }
