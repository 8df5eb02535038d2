"""Architectures in Flax NNX, and PyTorch weights for them; the results are :data:`wdjax.Model`
values.

A Flax module enters :func:`functional`, which splits it into a pure function and its parameters:
attacks and certificates see only that. `learning` tells a model's parameters from its other state
(averages, random keys), and takes optimiser steps on them; :mod:`wdjax.training` trains with it.

Weights: :mod:`wdjax.files.torch_file` reads a file's arrays; `convert` finds out the architecture's
options from their shapes and builds the module; `pytorch` matches names, shapes and layouts, and
reports the use of each array. `zoo` has the names of all architectures and reads ``zoo.csv``, the
table of RobustBench's models.

Architectures: `small` (perceptrons, small convolutional nets), `resnet`, `preact_resnet`,
`wide_resnet`, `dm_wide_resnet`, `vgg`, `convnext`, `vit`, `swin`, built from `layers` and `conv`
(convolutions whose gradients are fast on the CPU).

Open `functional` first, or `convert` for weights. To add an architecture: a file with an NNX module
that has ``features``, ``classify`` and ``sizes``, a row in ``FAMILIES`` of `zoo`, its name in
``__all__``; for a published model also a row in ``zoo.csv``.
"""

from wdjax.models.convnext import ConvNeXt
from wdjax.models.dm_wide_resnet import DMWideResNet
from wdjax.models.functional import (
    batch_statistics,
    features,
    functional,
    head,
    join_affine,
    split_affine,
)
from wdjax.models.learning import descend, join, parameters, training_pass
from wdjax.models.preact_resnet import DMPreActResNet, PreActResNet
from wdjax.models.resnet import ResNet, TorchvisionResNet
from wdjax.models.small import (
    MLP,
    NormCNN,
    NormMLP,
    ResNet2b,
    TradesSmallCNN,
    WongMNIST,
    mlp,
    norm_cnn,
    norm_mlp,
    resnet2b,
    trades_smallcnn,
    wong_mnist,
)
from wdjax.models.swin import Swin
from wdjax.models.vgg import VGG16
from wdjax.models.vit import ViT
from wdjax.models.wide_resnet import WideResNet

__all__ = [
    "MLP",
    "VGG16",
    "ConvNeXt",
    "DMPreActResNet",
    "DMWideResNet",
    "NormCNN",
    "NormMLP",
    "PreActResNet",
    "ResNet",
    "ResNet2b",
    "Swin",
    "TorchvisionResNet",
    "TradesSmallCNN",
    "ViT",
    "WideResNet",
    "WongMNIST",
    "batch_statistics",
    "descend",
    "features",
    "functional",
    "head",
    "join",
    "join_affine",
    "mlp",
    "norm_cnn",
    "norm_mlp",
    "parameters",
    "resnet2b",
    "split_affine",
    "trades_smallcnn",
    "training_pass",
    "wong_mnist",
]
