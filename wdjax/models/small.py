"""Small classifiers: perceptrons and convolutional nets; three of them are published."""

import jax
from flax import nnx

from wdjax.models.functional import functional
from wdjax.models.layers import BatchNorm, Conv, FlatLinear, Group, Linear, Net, Normalize, max_pool


class MLP(Net):
    """``fc1, relu, fc2, ...`` on inputs of any shape, flattened."""

    def __init__(self, sizes, *, rngs=None):
        if len(sizes) < 2:
            raise ValueError(f"an MLP needs at least two sizes, inputs and classes, got {sizes}.")
        self.depth = len(sizes) - 1
        for i in range(self.depth):
            setattr(self, f"fc{i + 1}", Linear(sizes[i], sizes[i + 1], rngs=rngs))

    def features(self, x):
        x = x.reshape(len(x), -1)
        for i in range(1, self.depth):
            x = jax.nn.relu(getattr(self, f"fc{i}")(x))
        return x

    def classify(self, features):
        return getattr(self, f"fc{self.depth}")(features)

    @staticmethod
    def sizes(shapes):
        """The size argument, read off the shapes of a state dict."""
        depth = sum(name.endswith(".weight") for name in shapes)
        weights = [shapes.get(f"fc{i + 1}.weight", ()) for i in range(depth)]
        if not weights or any(len(shape) != 2 or 0 in shape for shape in weights):
            raise ValueError("an mlp has matrices only, of at least one row and column")
        return {"sizes": (weights[0][1], *(shape[0] for shape in weights))}


class NormMLP(Net):
    """``fc1, bn1, relu, fc2, ...``: a perceptron with BatchNorm, for adaptive defences."""

    def __init__(self, sizes, *, rngs=None):
        if len(sizes) < 3:
            raise ValueError(f"a NormMLP needs a hidden layer to normalise, got sizes {sizes}.")
        self.depth = len(sizes) - 1
        for i in range(1, self.depth):
            setattr(self, f"fc{i}", Linear(sizes[i - 1], sizes[i], rngs=rngs))
            setattr(self, f"bn{i}", BatchNorm(sizes[i], rngs=rngs))
        setattr(self, f"fc{self.depth}", Linear(sizes[-2], sizes[-1], rngs=rngs))

    def features(self, x):
        x = x.reshape(len(x), -1)
        for i in range(1, self.depth):
            x = jax.nn.relu(getattr(self, f"bn{i}")(getattr(self, f"fc{i}")(x)))
        return x

    def classify(self, features):
        return getattr(self, f"fc{self.depth}")(features)


class NormCNN(Net):
    """Two 3x3 convolutions with pools and two linear layers, BatchNorm after all but the last."""

    def __init__(self, shape, classes=10, widths=(16, 32, 64), *, rngs=None):
        height, width, channels = shape
        first, second, hidden = widths
        self.conv1 = Conv(channels, first, 3, 1, 1, rngs=rngs)
        self.bn1 = BatchNorm(first, rngs=rngs)
        self.conv2 = Conv(first, second, 3, 1, 1, rngs=rngs)
        self.bn2 = BatchNorm(second, rngs=rngs)
        self.fc1 = FlatLinear(height // 4, width // 4, second, hidden, rngs=rngs)
        self.bn3 = BatchNorm(hidden, rngs=rngs)
        self.fc2 = Linear(hidden, classes, rngs=rngs)

    def features(self, x):
        x = max_pool(jax.nn.relu(self.bn1(self.conv1(x))), 2)
        x = max_pool(jax.nn.relu(self.bn2(self.conv2(x))), 2)
        return jax.nn.relu(self.bn3(self.fc1(x)))

    def classify(self, features):
        return self.fc2(features)


class WongMNIST(Net):
    """Two 4x4 convolutions of stride 2 and two linear layers (Wong and Kolter 2018)."""

    def __init__(self, classes=10, *, rngs=None):
        self.conv1 = Conv(1, 16, 4, 2, 1, bias=True, rngs=rngs)
        self.conv2 = Conv(16, 32, 4, 2, 1, bias=True, rngs=rngs)
        self.fc1 = FlatLinear(7, 7, 32, 100, rngs=rngs)
        self.fc2 = Linear(100, classes, rngs=rngs)

    def features(self, x):
        x = jax.nn.relu(self.conv1(x))
        x = jax.nn.relu(self.conv2(x))
        return jax.nn.relu(self.fc1(x))

    def classify(self, features):
        return self.fc2(features)


class TradesSmallCNN(Net):
    """Four unpadded 3x3 convolutions, two pools, three linear layers (Zhang et al. 2019)."""

    def __init__(self, classes=10, *, rngs=None):
        self.conv1 = Conv(1, 32, 3, bias=True, rngs=rngs)
        self.conv2 = Conv(32, 32, 3, bias=True, rngs=rngs)
        self.conv3 = Conv(32, 64, 3, bias=True, rngs=rngs)
        self.conv4 = Conv(64, 64, 3, bias=True, rngs=rngs)
        self.fc1 = FlatLinear(4, 4, 64, 200, rngs=rngs)
        self.fc2 = Linear(200, 200, rngs=rngs)
        self.fc3 = Linear(200, classes, rngs=rngs)

    def features(self, x):
        x = jax.nn.relu(self.conv1(x))
        x = max_pool(jax.nn.relu(self.conv2(x)), 2)
        x = jax.nn.relu(self.conv3(x))
        x = max_pool(jax.nn.relu(self.conv4(x)), 2)
        x = jax.nn.relu(self.fc1(x))
        return jax.nn.relu(self.fc2(x))

    def classify(self, features):
        return self.fc3(features)


class _Block(nnx.Module):
    """Two 3x3 convolutions without BatchNorm, and a shortcut."""

    def __init__(self, inputs, outputs, stride, *, rngs):
        self.conv1 = Conv(inputs, outputs, 3, stride, 1, bias=True, rngs=rngs)
        self.conv2 = Conv(outputs, outputs, 3, 1, 1, bias=True, rngs=rngs)
        if stride != 1 or inputs != outputs:
            self.shortcut = Group.numbered([Conv(inputs, outputs, 1, stride, bias=True, rngs=rngs)])

    def __call__(self, x):
        skip = self.shortcut(x) if hasattr(self, "shortcut") else x
        return jax.nn.relu(self.conv2(jax.nn.relu(self.conv1(x))) + skip)


class ResNet2b(Net):
    """Two residual blocks without BatchNorm on 32x32 images (the ``resnet2b`` of VNN-COMP)."""

    def __init__(self, classes=10, normalize=None, *, rngs=None):
        cifar = Normalize((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
        self.normalize = cifar if normalize is None else normalize
        self.conv1 = Conv(3, 8, 3, 2, 1, bias=True, rngs=rngs)
        self.layer1 = Group.numbered([_Block(8, 16, 2, rngs=rngs), _Block(16, 16, 1, rngs=rngs)])
        self.linear1 = FlatLinear(8, 8, 16, 100, rngs=rngs)
        self.linear2 = Linear(100, classes, rngs=rngs)

    def features(self, x):
        x = jax.nn.relu(self.conv1(self.normalize(x)))
        return jax.nn.relu(self.linear1(self.layer1(x)))

    def classify(self, features):
        return self.linear2(features)


def mlp(sizes, *, key):
    """A ReLU multilayer perceptron with random weights.

    Args:
      sizes: ``(inputs, hidden, ..., classes)``; images are flattened.
      key: a typed ``jax.random.key``.

    Returns:
      A ``Model`` with params ``{"fc1": {"kernel", "bias"}, ...}``.

    >>> model = mlp((64, 32, 10), key=jax.random.key(0))
    >>> model(jax.numpy.ones((2, 8, 8, 1))).shape
    (2, 10)
    """
    return functional(MLP(tuple(map(int, sizes)), rngs=nnx.Rngs(key)))


def norm_mlp(sizes, *, key):
    """A ReLU multilayer perceptron with BatchNorm and random weights.

    Args:
      sizes: ``(inputs, hidden, ..., classes)``; images are flattened.
      key: a typed ``jax.random.key``.

    Returns:
      A ``Model`` with params ``{"fc1": {"kernel", "bias"}, "bn1": {"scale", ...}, ...}``.

    >>> norm_mlp((64, 32, 10), key=jax.random.key(0))(jax.numpy.ones((2, 8, 8, 1))).shape
    (2, 10)
    """
    return functional(NormMLP(tuple(map(int, sizes)), rngs=nnx.Rngs(key)))


def norm_cnn(shape, *, key, classes=10, widths=(16, 32, 64)):
    """A small convolutional net with BatchNorm and random weights.

    Args:
      shape: ``(height, width, channels)`` of the images; the sides at least 4.
      key: a typed ``jax.random.key``.
      classes: number of logits.
      widths: channels of the two convolutions and of the hidden layer.

    >>> norm_cnn((8, 8, 1), key=jax.random.key(0))(jax.numpy.ones((2, 8, 8, 1))).shape
    (2, 10)
    """
    return functional(NormCNN(tuple(shape), classes, tuple(widths), rngs=nnx.Rngs(key)))


def wong_mnist(*, key, classes=10):
    """The MNIST net of Wong and Kolter with random weights; images ``[n, 28, 28, 1]``.

    Args:
      key: a typed ``jax.random.key`` for the weights.
      classes: number of logits.

    >>> wong_mnist(key=jax.random.key(0))(jax.numpy.zeros((1, 28, 28, 1))).shape
    (1, 10)
    """
    return functional(WongMNIST(classes, rngs=nnx.Rngs(key)))


def trades_smallcnn(*, key, classes=10):
    """The MNIST net of TRADES with random weights; images ``[n, 28, 28, 1]``.

    Args:
      key: a typed ``jax.random.key`` for the weights.
      classes: number of logits.

    >>> trades_smallcnn(key=jax.random.key(0))(jax.numpy.zeros((1, 28, 28, 1))).shape
    (1, 10)
    """
    return functional(TradesSmallCNN(classes, rngs=nnx.Rngs(key)))


def resnet2b(*, key, classes=10):
    """The small CIFAR-10 residual net with random weights; images ``[n, 32, 32, 3]``.

    Args:
      key: a typed ``jax.random.key`` for the weights.
      classes: number of logits.

    >>> resnet2b(key=jax.random.key(0))(jax.numpy.zeros((1, 32, 32, 3))).shape
    (1, 10)
    """
    return functional(ResNet2b(classes, rngs=nnx.Rngs(key)))
