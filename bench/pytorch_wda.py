"""The peer of `bench/attacks.py`: Algorithm 1 in plain batched PyTorch, and its networks."""

import itertools
from collections import OrderedDict

import torch
from torch import nn


def wda(model, x, y, *, eps, step_size, classes=10, probe=10, steps=20):
    """WDA with kappa = 1 in the l_inf ball and the box: last iterate of a batch ``[n, ...]``.

    One forward pass serves the gradients of all rivals; candidates are evaluated rival by rival.
    """
    n, rows, start, rival = len(y), torch.arange(len(y)), x, None
    for iteration in range(steps):
        point = x.detach().requires_grad_()
        logits = model(point)
        offsets = range(1, classes) if iteration < probe else [None]
        best_margin, best_x, best_rival = torch.full((n,), -torch.inf), x, y
        for offset in offsets:
            towards = rival if offset is None else (y + offset) % classes
            gap = (logits[rows, towards] - logits[rows, y]).sum()
            (gradient,) = torch.autograd.grad(gap, point, retain_graph=True)
            moved = x + step_size * gradient.sign()
            moved = torch.minimum(torch.maximum(moved, start - eps), start + eps).clamp(0, 1)
            with torch.no_grad():
                after = model(moved)
            margin = after[rows, towards] - after[rows, y]
            better = margin > best_margin
            best_margin = torch.where(better, margin, best_margin)
            best_x = torch.where(better[(...,) + (None,) * (x.ndim - 1)], moved, best_x)
            best_rival = torch.where(better, towards, best_rival)
        x, rival = best_x, best_rival
    return x


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Sequential(*[nn.Conv2d(inputs, outputs, 1, stride)] * changes)

    def forward(self, x):
        return torch.relu(self.conv2(torch.relu(self.conv1(x))) + self.shortcut(x))


class ResNet2b(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 2, 1)
        self.layer1 = nn.Sequential(Block(8, 16, 2), Block(16, 16, 1))
        self.linear1, self.linear2 = nn.Linear(1024, 100), nn.Linear(100, 10)
        self.mean = torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
        self.std = torch.tensor([0.2471, 0.2435, 0.2616])[:, None, None]

    def forward(self, x):
        x = self.layer1(torch.relu(self.conv1((x - self.mean) / self.std)))
        return self.linear2(torch.relu(self.linear1(x.flatten(1))))


def wong_mnist():
    return nn.Sequential(
        *[nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU()],
        *[nn.Flatten(), nn.Linear(1568, 100), nn.ReLU(), nn.Linear(100, 10)],
    )


def trades_smallcnn():
    return nn.Sequential(
        *[nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Flatten(), nn.Linear(1024, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()],
        nn.Linear(200, 10),
    )


def mlp(*sizes):
    layers = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def load(module, path):
    """The module with the tensors of a checkpoint, in their order, and no gradients for them."""
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    while not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        tensors = next(value for value in tensors.values() if isinstance(value, (dict, list)))
        tensors = tensors[0] if isinstance(tensors, list) else tensors
    module.load_state_dict(OrderedDict(zip(module.state_dict(), tensors.values())))
    return module.eval().requires_grad_(False)
