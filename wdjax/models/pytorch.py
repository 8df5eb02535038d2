"""The PyTorch names, shapes and layouts of a module's parameters."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from flax import nnx

from wdjax.models import layers


class Slot(NamedTuple):
    """Where a PyTorch tensor goes: its shape there, its path in ``params``, and the way between."""

    shape: tuple[int, ...]
    path: tuple[str, ...]
    turn: Callable[[np.ndarray], np.ndarray]
    trained: bool
    """Whether it is a parameter rather than a statistic."""


def _same(tensor):
    return tensor


def _matrix(tensor):
    return tensor.T


def _kernel(tensor):
    return tensor.transpose(2, 3, 1, 0)


def _flat_matrix(image):
    height, width, channels = image

    def turn(tensor):
        split = tensor.reshape(len(tensor), channels, height, width)
        return split.transpose(2, 3, 1, 0).reshape(math.prod(image), len(tensor))

    return turn


_STATISTICS = {"mean": "running_mean", "var": "running_var"}


def slots(module: nnx.Module) -> dict[str, Slot]:
    """Where each tensor of a PyTorch state dict goes.

    Args:
      module: an architecture of :mod:`wdjax.models`, abstract (``rngs=None``) or not.

    Returns:
      A dict of PyTorch name -> :class:`Slot`, in the module's order.

    >>> from wdjax.models import MLP
    >>> {name: slot.shape for name, slot in slots(MLP((4, 3))).items()}
    {'fc1.weight': (3, 4), 'fc1.bias': (3,)}
    """
    return dict(_walk(module, (), ()))


def _walk(module, names, path) -> Iterable[tuple[str, Slot]]:
    renamed = getattr(module, "torch_names", {})
    for name, value in vars(module).items():
        if isinstance(value, nnx.Module):
            yield from _walk(value, (*names, renamed.get(name, name)), (*path, name))
        elif isinstance(value, nnx.Variable):
            torch_name, shape, turn = _leaf(module, name, tuple(value.shape))
            slot = Slot(shape, (*path, name), turn, isinstance(value, nnx.Param))
            yield ".".join((*names, torch_name)), slot


def _leaf(module, name, shape):
    if isinstance(module, layers.Linear) and name == "kernel":
        flat = isinstance(module, layers.FlatLinear)
        return "weight", shape[::-1], _flat_matrix(module.image) if flat else _matrix
    if isinstance(module, layers.Conv) and name == "kernel":
        return "weight", (shape[3], shape[2], shape[0], shape[1]), _kernel
    if isinstance(module, (layers.BatchNorm, layers.MeanSparse)) and name in _STATISTICS:
        return _STATISTICS[name], shape, _same
    if isinstance(module, (layers.BatchNorm, layers.LayerNorm)) and name == "scale":
        return "weight", shape, _same
    return name, shape, _same


def buffers(module: nnx.Module, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Constants that a state dict may hold and that the module computes: name -> expected value."""
    found = {}
    if hasattr(module, "buffers"):
        found = {".".join((*names, name)): value for name, value in module.buffers().items()}
    for name, value in vars(module).items():
        if isinstance(value, nnx.Module):
            found |= buffers(value, (*names, name))
    return found
