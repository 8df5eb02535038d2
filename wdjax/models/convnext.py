"""ConvNeXt in timm's layout, with its patch stem or the convolutional stems of Singh et al."""

from flax import nnx

from wdjax.models.layers import (
    Conv,
    Group,
    LayerNorm,
    Linear,
    Net,
    average_pool,
    beside,
    classes_of,
    extent,
    gelu,
    identity,
    numbered,
    parameter,
)

_EPSILON = 1e-6


class Mlp(nnx.Module):
    """``fc2(gelu(fc1(x)))`` on the last axis."""

    def __init__(self, features, hidden, *, rngs):
        self.fc1 = Linear(features, hidden, rngs=rngs)
        self.fc2 = Linear(hidden, features, rngs=rngs)

    def __call__(self, x):
        return self.fc2(gelu(self.fc1(x)))


class _Block(nnx.Module):
    """A 7x7 depthwise convolution and an MLP, scaled by channel and added to the input."""

    def __init__(self, features, *, rngs):
        self.gamma = parameter(rngs, (features,))
        self.conv_dw = Conv(features, features, 7, 1, 3, True, features, rngs=rngs)
        self.norm = LayerNorm(features, _EPSILON, rngs=rngs)
        self.mlp = Mlp(features, 4 * features, rngs=rngs)

    def __call__(self, x):
        return self.mlp(self.norm(self.conv_dw(x))) * beside(self.gamma[...], x) + x


class ConvStem(nnx.Module):
    """3x3 convolutions, each followed by LayerNorm and GELU; then an optional 1x1 convolution.

    Args:
      widths: output channels of the convolutions.
      strides: their strides.
      project: width of the 1x1 convolution, or None.
      rngs: random keys for the parameters; None for an abstract module.

    Source: Singh et al. (2023), Revisiting Adversarial Training for ImageNet.
    """

    def __init__(self, widths, strides, project=None, *, rngs=None):
        layers, inputs = {}, 3
        for i, (width, stride) in enumerate(zip(widths, strides)):
            layers[str(3 * i)] = Conv(inputs, width, 3, stride, 1, True, rngs=rngs)
            layers[str(3 * i + 1)] = LayerNorm(width, _EPSILON, rngs=rngs)
            inputs = width
        if project is not None:
            layers[str(3 * len(widths))] = Conv(inputs, project, 1, bias=True, rngs=rngs)
        self.count = len(widths)
        self.stem = Group(**layers)

    def __call__(self, x):
        for i in range(self.count):
            x = gelu(self.stem[3 * i + 1](self.stem[3 * i](x)))
        last = str(3 * self.count)
        return self.stem[last](x) if hasattr(self.stem, last) else x


class ConvNeXt(Net):
    """ConvNeXt.

    Args:
      depths: blocks a stage, four numbers.
      dims: channels a stage, four numbers.
      classes: number of logits.
      stem: "patch" (4x4 stride 4 and LayerNorm), "conv1" (two 3x3 stride 2) or "conv3" (a third
        3x3 stride 1).
      epsilon: of the last LayerNorm; that of the others is 1e-6.
      normalize: a function applied to the images first.
      rngs: random keys for the parameters; None for an abstract module.
    """

    def __init__(
        self,
        depths=(3, 3, 27, 3),
        dims=(128, 256, 512, 1024),
        classes=1000,
        stem="patch",
        epsilon=_EPSILON,
        normalize=identity,
        *,
        rngs=None,
    ):
        if stem not in ("patch", "conv1", "conv3"):
            raise ValueError(f"stem must be 'patch', 'conv1' or 'conv3', got {stem!r}.")
        self.normalize = normalize
        first = dims[0]
        if stem == "patch":
            patch = Conv(3, first, 4, 4, bias=True, rngs=rngs)
            self.stem = Group.numbered([patch, LayerNorm(first, _EPSILON, rngs=rngs)])
        elif stem == "conv1":
            self.stem = ConvStem((first // 2, first), (2, 2), rngs=rngs)
        else:
            self.stem = ConvStem((first // 2, first * 3 // 4, first), (2, 2, 1), rngs=rngs)
        stages = []
        for stage, (depth, dim) in enumerate(zip(depths, dims)):
            layers = {}
            if stage:
                before = dims[stage - 1]
                layers["downsample"] = Group.numbered(
                    [
                        LayerNorm(before, _EPSILON, rngs=rngs),
                        Conv(before, dim, 2, 2, bias=True, rngs=rngs),
                    ]
                )
            blocks = [_Block(dim, rngs=rngs) for _ in range(depth)]
            stages.append(Group(blocks=Group.numbered(blocks), **layers))
        self.stages = Group.numbered(stages)
        self.head = Group(
            norm=LayerNorm(dims[-1], epsilon, rngs=rngs),
            fc=Linear(dims[-1], classes, rngs=rngs),
        )

    def features(self, x):
        x = self.stem(self.normalize(x))
        for stage in self.stages:
            if hasattr(stage, "downsample"):
                x = stage.downsample(x)
            x = stage.blocks(x)
        return self.head.norm(average_pool(x))

    def classify(self, features):
        return self.head.fc(features)

    @staticmethod
    def sizes(shapes):
        """The size arguments, read off the shapes of a state dict."""
        depths = tuple(numbered(shapes, f"stages.{s}.blocks.") for s in range(4))
        dims = tuple(
            extent(
                shapes,
                [
                    f"stages.{s}.blocks.{i}.{leaf}"
                    for i in range(depths[s])
                    for leaf in ("gamma", "norm.bias", "conv_dw.bias")
                ],
            )
            for s in range(4)
        )
        stem = "patch"
        if any(name.startswith("stem.stem.") for name in shapes):
            stem = "conv3" if any(name.startswith("stem.stem.6.") for name in shapes) else "conv1"
        classes = classes_of(shapes, "head.fc")
        return {"depths": depths, "dims": dims, "classes": classes, "stem": stem}
