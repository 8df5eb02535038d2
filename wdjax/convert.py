"""PyTorch checkpoints to models: strict, with a report of every tensor, or not at all."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wdjax import checkpoint
from wdjax.core import Model
from wdjax.models import layers, small
from wdjax.models.functional import functional

_SHOWN = 8


class Slot(NamedTuple):
    """Where a PyTorch tensor goes: its shape there, its path in ``params``, and the way between."""

    shape: tuple[int, ...]
    path: tuple[str, ...]
    turn: Callable[[np.ndarray], np.ndarray]


class Line(NamedTuple):
    """One tensor of a :class:`Report`."""

    name: str
    shape: tuple[int, ...]
    fate: str


class Report(NamedTuple):
    """What became of every tensor of a file; ``print`` it."""

    source: str
    architecture: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Numbers in the tensors that were used."""
        return sum(int(np.prod(line.shape)) for line in self.lines if line.fate.startswith("->"))

    def __str__(self):
        width = max((len(line.name) for line in self.lines), default=0)
        shapes = [str(list(line.shape)) for line in self.lines]
        middle = max(map(len, shapes), default=0)
        used = sum(line.fate.startswith("->") for line in self.lines)
        rows = [
            f"{self.source}: {self.architecture}, {used} tensors used "
            f"({self.parameters:,} numbers), {len(self.lines) - used} ignored"
        ]
        rows += [f"note: {note}" for note in self.notes]
        rows += [
            f"  {line.name:<{width}}  {shape:<{middle}}  {line.fate}"
            for line, shape in zip(self.lines, shapes)
        ]
        return "\n".join(rows)


class Converted(NamedTuple):
    """A model and the report of its conversion."""

    model: Model
    report: Report


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
        return split.transpose(2, 3, 1, 0).reshape(-1, len(tensor))

    return turn


_NORM = {"scale": "weight", "mean": "running_mean", "var": "running_var"}


def slots(module: nnx.Module) -> dict[str, Slot]:
    """The PyTorch names and shapes of a module's parameters.

    Args:
      module: an architecture of :mod:`wdjax.models`, abstract (``rngs=None``) or not.

    Returns:
      A dict of PyTorch name -> :class:`Slot`, in the module's order.

    >>> from wdjax.models import MLP
    >>> {name: slot.shape for name, slot in slots(MLP((4, 3))).items()}
    {'fc1.weight': (3, 4), 'fc1.bias': (3,)}
    """
    return dict(_walk(module, ()))


def _walk(module, path) -> Iterable[tuple[str, Slot]]:
    for name, value in vars(module).items():
        if isinstance(value, nnx.Module):
            yield from _walk(value, (*path, name))
        elif isinstance(value, nnx.Variable):
            torch_name, shape, turn = _torch_leaf(module, name, tuple(value.shape))
            yield ".".join((*path, torch_name)), Slot(shape, (*path, name), turn)


def _torch_leaf(module, name, shape):
    if isinstance(module, layers.FlatLinear) and name == "kernel":
        return "weight", shape[::-1], _flat_matrix(module.image)
    if isinstance(module, layers.Linear) and name == "kernel":
        return "weight", shape[::-1], _matrix
    if isinstance(module, layers.Conv) and name == "kernel":
        return "weight", (shape[3], shape[2], shape[0], shape[1]), _kernel
    if isinstance(module, (layers.BatchNorm, layers.LayerNorm)):
        return _NORM.get(name, name), shape, _same
    return name, shape, _same


def from_state_dict(
    module: nnx.Module,
    tensors: Mapping[str, np.ndarray],
    *,
    source: str = "state dict",
    ignore: Callable[[str], str | None] = lambda name: None,
    notes: tuple[str, ...] = (),
) -> Converted:
    """Fills a module with the tensors of a PyTorch state dict; all of them, exactly.

    Args:
      module: the architecture, best abstract (``rngs=None``).
      tensors: name -> array, with the names of the PyTorch module that it mirrors.
      source: what to call the tensors in messages.
      ignore: the reason why a tensor of that name may be left out, or None.
        ``num_batches_tracked`` always may.
      notes: to put into the report.

    Returns:
      The model and its report.

    Raises:
      ValueError: a tensor is missing, unknown, of another shape or dtype than float32, or holds a
        NaN or an infinity; the message names the tensors. Nothing is loaded then.

    Cost: one copy of every tensor.
    """
    wanted = slots(module)
    lines, faults, unknown = [], [], []
    for name, tensor in tensors.items():
        reason = "a counter" if name.endswith("num_batches_tracked") else ignore(name)
        if name in wanted:
            faults += _faults(name, tensor, wanted[name].shape)
            lines.append(Line(name, tensor.shape, "-> " + "/".join(wanted[name].path)))
        elif reason:
            lines.append(Line(name, tensor.shape, f"ignored: {reason}"))
        else:
            unknown.append(name)
    missing = [name for name in wanted if name not in tensors]
    kind = type(module).__name__
    if missing:
        faults.insert(0, f"missing {_some(missing)}")
    if unknown:
        faults.insert(0, f"unknown {_some(unknown)}")
    if faults:
        raise ValueError(
            f"{source} does not fit {kind}: {'; '.join(faults[:_SHOWN])}"
            f"{f'; and {len(faults) - _SHOWN} faults more' if len(faults) > _SHOWN else ''}. "
            "Nothing was loaded; check the architecture's options and the file."
        )
    model = functional(module)
    params = jax.tree.map(lambda leaf: leaf, model.args[0])
    for name, slot in wanted.items():
        *parents, leaf = slot.path
        place: Any = params
        for parent in parents:
            place = place[parent]
        place[leaf] = jnp.array(slot.turn(tensors[name]))
    return Converted(Model(model.func, params), Report(source, kind, tuple(lines), tuple(notes)))


def _some(names):
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _faults(name, tensor, shape):
    if tensor.shape != shape:
        return [f"{name} has shape {list(tensor.shape)}, expected {list(shape)}"]
    if tensor.dtype != np.float32:
        return [f"{name} has dtype {tensor.dtype}, expected float32"]
    if not np.isfinite(tensor).all():
        return [f"{name} holds NaN or infinity"]
    return []


_CONTAINERS = ("state_dict", "net", "model", "model_state_dict", "state_dict_ema", "model_ema")


def state_dict(content, containers: tuple[str, ...] = _CONTAINERS) -> dict[str, np.ndarray]:
    """The one flat state dict inside a checkpoint, without the prefixes that wrappers add.

    Args:
      content: what :func:`wdjax.checkpoint.read` returned.
      containers: keys to look under, the first present one wins.

    Returns:
      name -> array.

    Raises:
      ValueError: the checkpoint holds no state dict, or other things between its tensors.

    >>> list(state_dict({"epoch": 3, "state_dict": [{"module.fc.bias": np.zeros(2)}]}))
    ['fc.bias']
    """
    if isinstance(content, (list, tuple)) and len(content) == 1:
        return state_dict(content[0], containers)
    if not isinstance(content, Mapping):
        raise ValueError(
            f"expected a state dict, got {type(content).__name__}; look at what "
            "wdjax.checkpoint.read returns and pass the part that holds the tensors."
        )
    for key in containers:
        if isinstance(content.get(key), (Mapping, list, tuple)):
            return state_dict(content[key], containers)
    others = [str(key) for key, value in content.items() if not isinstance(value, np.ndarray)]
    if others or not content:
        raise ValueError(
            f"no state dict found: besides tensors the checkpoint holds "
            f"{_some(others) or 'nothing'}; known containers are {', '.join(containers)}."
        )
    return {strip(key, ("module.",)): value for key, value in content.items()}


def strip(name: str, prefixes: tuple[str, ...]) -> str:
    """Removes each prefix once, in order."""
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name


def _natural(name):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _mlp(tensors, **options):
    names = sorted((n for n in tensors if n.endswith(".weight")), key=_natural)
    if not names or any(tensors[name].ndim != 2 for name in names):
        raise ValueError(
            f"an mlp has matrices only, the file holds {_some(list(tensors)) or 'nothing'}."
        )
    sizes = (tensors[names[0]].shape[1], *(len(tensors[name]) for name in names))
    layer = {name.removesuffix(".weight"): f"fc{i + 1}" for i, name in enumerate(names)}
    return small.MLP(tuple(options.pop("sizes", sizes)), **options), layer


def _wong_mnist(tensors, **options):
    return small.WongMNIST(**options), {"0": "conv1", "2": "conv2", "5": "fc1", "7": "fc2"}


def _trades_smallcnn(tensors, **options):
    parts = {f"feature_extractor.conv{i}": f"conv{i}" for i in range(1, 5)}
    return small.TradesSmallCNN(**options), parts | {
        f"classifier.fc{i}": f"fc{i}" for i in range(1, 4)
    }


def _resnet2b(tensors, **options):
    return small.ResNet2b(**options), {}


ARCHITECTURES: dict[str, Callable] = {
    "mlp": _mlp,
    "wong_mnist": _wong_mnist,
    "trades_smallcnn": _trades_smallcnn,
    "resnet2b": _resnet2b,
}


def load(path, arch: str, **options) -> Converted:
    """Loads a PyTorch checkpoint of a small architecture.

    Args:
      path: the file, zip or legacy; the state dict may be nested and its names prefixed.
      arch: one of :data:`ARCHITECTURES`.
      **options: the architecture's constructor arguments, such as ``sizes`` or ``mean``.

    Returns:
      ``Converted(model, report)``.

    Raises:
      ValueError: unknown architecture, unreadable file, or tensors that do not fit exactly.

    >>> model, report = load("mnist_linf_robust.pth", "wong_mnist")  # doctest: +SKIP
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {arch!r}; known are {', '.join(ARCHITECTURES)}.")
    tensors = state_dict(checkpoint.read(path))
    module, names = ARCHITECTURES[arch](tensors, **options)
    renamed = {}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        renamed[f"{names.get(layer, layer)}.{leaf}"] = tensor
    return from_state_dict(module, renamed, source=str(path))


def check_parity(model: Callable, x, logits, *, tolerance: float = 2e-5) -> float:
    """Compares a converted model with logits that PyTorch gave for the same images.

    Args:
      model: from this module.
      x: ``[n, height, width, c]`` images in [0, 1]; note NHWC.
      logits: ``[n, K]`` reference values.
      tolerance: largest ``max |error| / max |logit|`` that passes.

    Returns:
      The relative error.

    Raises:
      ValueError: the error is above the tolerance or not finite, or the shapes differ.
    """
    ours, logits = np.asarray(jax.jit(model)(jnp.asarray(x))), np.asarray(logits)
    if ours.shape != logits.shape:
        raise ValueError(f"the model gives {ours.shape}, the reference has {logits.shape}.")
    error = float(np.max(np.abs(ours - logits)) / np.max(np.abs(logits)))
    if not error <= tolerance:
        raise ValueError(
            f"parity failed: relative error {error:.2g} above {tolerance:.2g}; the architecture's "
            "options (normalisation, activation, epsilon) differ from the reference's."
        )
    return error
