"""VGG-16 with or without BatchNorm, with torchvision's three linear layers or CIFAR's one."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from wdjax.models.layers import (
    BatchNorm,
    Conv,
    FlatLinear,
    Group,
    Linear,
    Net,
    classes_of,
    extent,
    first_max_pool,
    identity,
)

_PLANES = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def _adaptive_average(size, out):
    """``[out, size]``: the matrix of PyTorch's adaptive average pool along one axis."""
    matrix = np.zeros((out, size), np.float32)
    for i in range(out):
        window = slice(i * size // out, math.ceil((i + 1) * size / out))
        matrix[i, window] = 1 / (window.stop - window.start)
    return matrix


def adaptive_average_pool(x, out):
    """PyTorch's ``AdaptiveAvgPool2d((out, out))`` of NHWC images."""
    if x.shape[1:3] == (out, out):
        return x
    rows, cols = _adaptive_average(x.shape[1], out), _adaptive_average(x.shape[2], out)
    return jnp.einsum("ih,jw,nhwc->nijc", rows, cols, x)


class VGG16(Net):
    """VGG-16.

    Args:
      classes: number of logits.
      batch_norm: whether a BatchNorm follows every convolution.
      head: "imagenet" (pool to 7x7, three linear layers) or "cifar" (one linear layer on the 1x1
        image that 32x32 inputs leave).
      hidden: width of the linear layers of the "imagenet" head.
      planes: channels of the first convolution; the others follow in proportion.
      normalize: a function applied to the images first.
      rngs: random keys for the parameters; None for an abstract module.
    """

    def __init__(
        self,
        classes=1000,
        batch_norm=False,
        head="imagenet",
        hidden=4096,
        planes=64,
        normalize=identity,
        *,
        rngs=None,
    ):
        if head not in ("imagenet", "cifar"):
            raise ValueError(f"head must be 'imagenet' or 'cifar', got {head!r}.")
        self.normalize = normalize
        plan, layers, inputs, index = [], {}, 3, 0
        for width in _PLANES:
            if not width:
                plan.append("pool")
                index += 1
                continue
            outputs = width * planes // 64
            layers[str(index)] = Conv(inputs, outputs, 3, 1, 1, bias=True, rngs=rngs)
            plan.append(str(index))
            if batch_norm:
                layers[str(index + 1)] = BatchNorm(outputs, rngs=rngs)
                plan.append(str(index + 1))
            plan.append("relu")
            index += 3 if batch_norm else 2
            inputs = outputs
        self.plan = tuple(plan)
        self.convolutions = Group(**layers)
        if head == "cifar":
            self.classifier = Linear(inputs, classes, rngs=rngs)
        else:
            self.classifier = Group(
                **{
                    "0": FlatLinear(7, 7, inputs, hidden, rngs=rngs),
                    "3": Linear(hidden, hidden, rngs=rngs),
                    "6": Linear(hidden, classes, rngs=rngs),
                }
            )

    def features(self, x):
        x = self.normalize(x)
        for step in self.plan:
            if step == "pool":
                x = first_max_pool(x, 2, 2, 0)
            else:
                x = jax.nn.relu(x) if step == "relu" else self.convolutions[step](x)
        if isinstance(self.classifier, Linear):
            return x.reshape(len(x), -1)
        x = jax.nn.relu(self.classifier[0](adaptive_average_pool(x, 7)))
        return jax.nn.relu(self.classifier[3](x))

    def classify(self, features):
        last = self.classifier if isinstance(self.classifier, Linear) else self.classifier[6]
        return last(features)

    torch_names: ClassVar = {"convolutions": "features"}

    @staticmethod
    def sizes(shapes):
        """The size arguments, read off the shapes of a state dict."""
        cifar = "classifier.weight" in shapes or "classifier.bias" in shapes
        last = "classifier" if cifar else "classifier.6"
        return {
            "classes": classes_of(shapes, last),
            "batch_norm": any("running_mean" in name for name in shapes),
            "head": "cifar" if cifar else "imagenet",
            "hidden": 4096 if cifar else extent(shapes, ("classifier.0.bias", "classifier.3.bias")),
            "planes": classes_of(shapes, "features.0"),
        }
