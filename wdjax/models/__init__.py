"""Architectures in Flax NNX, and PyTorch weights for them; the results are :data:`wdjax.Model`
values.

`functional` splits a module into a pure function and its parameters; `learning` tells parameters
from other state, and trains. `zoo` lists the architectures, each of which has a file and is built
from `layers` and `conv`, and in ``zoo.csv`` the published models. `one_lipschitz` has nets that are
1-Lipschitz by their layers. `convert` loads PyTorch weights into one of them: it renames the layers
of files that use other names, then `pytorch` matches names, shapes and layouts. `imported` makes
models of ONNX files and PyTorch modules, whose operators are in :mod:`wdjax.models.graphs`. `saved`
keeps models on disk. Open `functional` first, or `convert` for weights.
"""

from wdjax.models.adaptive import (
    CifarResNet,
    DANNJudge,
    DANNNet,
    EarlyResNet,
    LeNet,
    ResNetJudge,
    network,
)
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
from wdjax.models.one_lipschitz import AOLConv, AOLLinear, LipschitzNet, lipschitz_net
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
    "AOLConv",
    "AOLLinear",
    "CifarResNet",
    "ConvNeXt",
    "DANNJudge",
    "DANNNet",
    "DMPreActResNet",
    "DMWideResNet",
    "EarlyResNet",
    "LeNet",
    "LipschitzNet",
    "NormCNN",
    "NormMLP",
    "PreActResNet",
    "ResNet",
    "ResNet2b",
    "ResNetJudge",
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
    "lipschitz_net",
    "mlp",
    "network",
    "norm_cnn",
    "norm_mlp",
    "parameters",
    "resnet2b",
    "split_affine",
    "trades_smallcnn",
    "training_pass",
    "wong_mnist",
]
