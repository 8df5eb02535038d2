"""Architectures in Flax NNX, used only to build :data:`wdjax.Model` values."""

from wdjax.models.functional import features, functional
from wdjax.models.small import (
    MLP,
    ResNet2b,
    TradesSmallCNN,
    WongMNIST,
    mlp,
    resnet2b,
    trades_smallcnn,
    wong_mnist,
)

__all__ = [
    "MLP",
    "ResNet2b",
    "TradesSmallCNN",
    "WongMNIST",
    "features",
    "functional",
    "mlp",
    "resnet2b",
    "trades_smallcnn",
    "wong_mnist",
]
