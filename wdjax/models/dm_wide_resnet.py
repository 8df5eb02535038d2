"""DeepMind's WideResNet (SiLU, asymmetric padding), and MeanSparse's variant of it."""

import jax
from flax import nnx

from wdjax.models.layers import (
    BatchNorm,
    Conv,
    Group,
    Linear,
    MeanSparse,
    Net,
    average_pool,
    classes_of,
    common,
    extent,
    identity,
    numbered,
    stage,
)


def strided(inputs, outputs, stride, *, rngs):
    """A 3x3 convolution; at stride 2 it pads at the bottom and the right only."""
    padding = 1 if stride == 1 else ((0, 1), (0, 1))
    return Conv(inputs, outputs, 3, stride, padding, rngs=rngs)


class _Block(nnx.Module):
    """Two 3x3 convolutions, each after BatchNorm and SiLU, and a shortcut."""

    def __init__(self, inputs, outputs, stride, sparse, *, rngs):
        self.batchnorm_0 = BatchNorm(inputs, rngs=rngs)
        self.conv_0 = strided(inputs, outputs, stride, rngs=rngs)
        self.batchnorm_1 = BatchNorm(outputs, rngs=rngs)
        self.conv_1 = Conv(outputs, outputs, 3, 1, 1, rngs=rngs)
        if inputs != outputs:
            self.shortcut = Conv(inputs, outputs, 1, stride, rngs=rngs)
        if sparse:
            self.meansparse_0 = MeanSparse(inputs, rngs=rngs)
            self.meansparse_1 = MeanSparse(outputs, rngs=rngs)
            self.meansparse_2 = MeanSparse(outputs, rngs=rngs)

    def __call__(self, x):
        sparse = hasattr(self, "meansparse_0")
        active = self.batchnorm_0(x)
        active = jax.nn.silu(self.meansparse_0(active) if sparse else active)
        out = self.batchnorm_1(self.conv_0(active))
        out = self.conv_1(jax.nn.silu(self.meansparse_1(out) if sparse else out))
        out = out + (self.shortcut(active) if hasattr(self, "shortcut") else x)
        return self.meansparse_2(out) if sparse else out


class DMWideResNet(Net):
    """WRN-depth-width with SiLU on 32x32 images.

    Args:
      depth: ``6 n + 4`` for n blocks a group.
      width: widening factor.
      classes: number of logits.
      normalize: a function applied to the images first.
      sparse: whether to add MeanSparse layers.
      rngs: random keys for the parameters; None for an abstract module.
    """

    def __init__(
        self, depth=28, width=10, classes=10, normalize=identity, sparse=False, *, rngs=None
    ):
        if (depth - 4) % 6 or depth < 10:
            raise ValueError(f"depth must be 6 n + 4 with n from 1 on, got {depth}.")
        blocks = (depth - 4) // 6
        self.normalize = normalize
        self.init_conv = Conv(3, 16, 3, 1, 1, rngs=rngs)
        groups, inputs = [], 16
        for group in range(3):
            outputs = 16 * width * 2**group
            stride = 2 if group else 1
            row = stage(_Block, inputs, outputs, stride, blocks, sparse, rngs=rngs)
            groups.append(Group(block=row))
            inputs = outputs
        self.layer = Group.numbered(groups)
        self.batchnorm = BatchNorm(inputs, rngs=rngs)
        if sparse:
            self.meansparse_end = MeanSparse(inputs, rngs=rngs)
        self.logits = Linear(inputs, classes, rngs=rngs)

    def features(self, x):
        x = self.init_conv(self.normalize(x))
        for group in self.layer:
            x = group.block(x)
        x = self.batchnorm(x)
        if hasattr(self, "meansparse_end"):
            x = self.meansparse_end(x)
        return average_pool(jax.nn.silu(x))

    def classify(self, features):
        return self.logits(features)

    @staticmethod
    def sizes(shapes):
        """The size arguments, read off the shapes of a state dict."""
        blocks = numbered(shapes, "layer.0.block.")
        widths = [
            extent(shapes, [f"layer.{g}.block.{i}.batchnorm_1.bias"]) // (16 * 2**g)
            for g in range(3)
            for i in range(blocks)
        ]
        return {
            "depth": blocks and 6 * blocks + 4,
            "width": common(widths),
            "classes": classes_of(shapes, "logits"),
        }
