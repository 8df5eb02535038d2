"""PyTorch state dicts to modules: matches names, shapes and layouts strictly, with a report."""

import collections
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from wdjax.core import Model
from wdjax.files.state_pickle import shown
from wdjax.models import layers
from wdjax.models.functional import functional

_SHOWN = 8
_LONGEST = 200


class Slot(NamedTuple):
    """Where a PyTorch tensor goes: its PyTorch shape, path in ``params``, and conversion."""

    shape: tuple[int, ...]
    path: tuple[str, ...]
    turn: Callable[[np.ndarray], np.ndarray]
    trained: bool
    """Whether it is a parameter, not a statistic."""


def _same(tensor):
    """A tensor of the same layout here and in PyTorch."""
    return tensor


def _matrix(tensor):
    """A linear layer's weight, ``[outputs, inputs]`` in PyTorch, as ``[inputs, outputs]``."""
    return tensor.T


def _kernel(tensor):
    """A convolution's weight, OIHW in PyTorch, as HWIO."""
    return tensor.transpose(2, 3, 1, 0)


def _flat_matrix(image):
    """Returns the conversion of the weight of a linear layer on a flattened image.

    ``image`` is its (height, width, channels); PyTorch flattens it as CHW, this package as HWC.
    """
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
    """Yields (PyTorch name, :class:`Slot`) of all variables of a module and the modules in it.

    ``names`` and ``path`` are the module's names in PyTorch and here. ``torch_names`` of a module
    renames its parts.
    """
    renamed = getattr(module, "torch_names", {})
    for name, value in vars(module).items():
        if isinstance(value, nnx.Module):
            yield from _walk(value, (*names, renamed.get(name, name)), (*path, name))
        elif isinstance(value, nnx.Variable):
            torch_name, shape, turn = _leaf(module, name, tuple(value.shape))
            slot = Slot(shape, (*path, name), turn, isinstance(value, nnx.Param))
            yield ".".join((*names, torch_name)), slot


def _leaf(module, name, shape):
    """PyTorch's name and shape of a module's variable, and the conversion of its layout."""
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
    """Constants that a state dict may contain and the module computes: name -> expected value.

    It must contain them if the module has ``stores_buffers``.
    """
    found = {}
    if hasattr(module, "buffers"):
        found = {".".join((*names, name)): value for name, value in module.buffers().items()}
    for name, value in vars(module).items():
        if isinstance(value, nnx.Module):
            found |= buffers(value, (*names, name))
    return found


class Line(NamedTuple):
    """One tensor of a :class:`ConversionReport`."""

    name: str
    shape: tuple[int, ...]
    fate: str


class ConversionReport(NamedTuple):
    """The use of every tensor of a file; ``print`` it."""

    source: str
    architecture: dict[str, Any]
    """``family``, ``options`` and ``normalize`` for :func:`wdjax.models.zoo.build`."""
    lines: tuple[Line, ...]
    parameters: int
    """Number of trained numbers, without BatchNorm's statistics."""
    notes: tuple[str, ...] = ()

    def __str__(self):
        width = max((len(line.name) for line in self.lines), default=0)
        shapes = [str(list(line.shape)) for line in self.lines]
        middle = max(map(len, shapes), default=0)
        used = sum(line.fate.startswith("->") for line in self.lines)
        options = ", ".join(f"{k}={v}" for k, v in self.architecture["options"].items())
        rows = [
            f"{self.source}: {self.architecture['family']}({options}), {used} tensors used "
            f"({self.parameters:,} parameters), {len(self.lines) - used} ignored"
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
    report: Any
    """A :class:`ConversionReport`, or the :class:`wdjax.models.imported.GraphReport` of a graph."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """One sample's shape, ``[*shape]``; known for graphs only."""
        return self.report.input_shape


def keep(name):
    """The default for ``ignore``: no tensor may be left out."""
    return None


def from_state_dict(
    module: nnx.Module,
    tensors: Mapping[str, np.ndarray],
    *,
    cast: bool = False,
    source: str = "state dict",
    ignore: Callable[[str], str | None] = keep,
    architecture: dict[str, Any] | None = None,
    notes: tuple[str, ...] = (),
) -> Converted:
    """Fills a module with the tensors of a PyTorch state dict, all of them and exactly.

    Args:
      module: the architecture, preferably abstract (``rngs=None``).
      tensors: name -> array, by the names of the PyTorch module.
      cast: whether to convert float16, bfloat16 and float64 to float32, as ``load_state_dict``.
      source: name of the tensors' origin, for messages.
      ignore: returns the reason why a tensor of that name may be left out, or None. BatchNorm's
        ``num_batches_tracked`` always may.
      architecture: for the report.
      notes: for the report.

    Returns:
      The model and its report.

    Raises:
      ValueError: a tensor is missing, unknown, of another shape or a dtype other than float32,
        holds NaN or infinity, is a negative variance, or contradicts a constant of the
        architecture; the message names the tensors. Nothing is loaded then.

    Cost: one copy of every tensor.
    """
    wanted = slots(module)
    tensors, casts = cast_to_float32(tensors) if cast else (tensors, [])
    lines, faults = _fates(module, wanted, tensors, ignore)
    kind = type(module).__name__
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
        branch: Any = params
        for parent in parents:
            branch = branch[parent]
        turned = slot.turn(tensors[name])
        # JAX may share a contiguous array's memory; it copies any other.
        branch[leaf] = jax.device_put(turned.copy() if turned.flags.c_contiguous else turned)
    architecture = architecture or {"family": kind, "options": {}, "normalize": ""}
    count = sum(math.prod(slot.shape) for slot in wanted.values() if slot.trained)
    report = ConversionReport(source, architecture, tuple(lines), count, (*notes, *casts))
    return Converted(Model(model.func, params), report)


def _fates(module, wanted, tensors, ignore) -> tuple[list[Line], list[str]]:
    """Compares a file's tensors with those that the module needs, by name, shape, dtype and values.

    ``wanted`` has a :class:`Slot` for each PyTorch name that the module needs; ``ignore`` returns
    the reason to leave a tensor out, or None. Returns a report line for each tensor of the file
    that is used, ignored or a known constant, and a sentence for each problem: mismatched, missing
    or unknown tensors. Nothing may be loaded unless there are no problems.
    """
    constants = buffers(module)
    lines, faults, unknown = [], [], []
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        counter = leaf == "num_batches_tracked" and f"{layer}.running_mean" in wanted
        reason = "a counter" if counter else ignore(name)
        if name in wanted:
            slot = wanted[name]
            faults += faults_of(name, tensor, slot.shape, variance=slot.path[-1] == "var")
            lines.append(Line(name, tensor.shape, "-> " + "/".join(slot.path)))
        elif reason:
            lines.append(Line(name, tensor.shape, f"ignored: {reason}"))
        elif name in constants:
            if tensor.dtype != constants[name].dtype:
                faults.append(f"{name} has dtype {tensor.dtype}, not {constants[name].dtype}")
            elif not np.array_equal(tensor, constants[name]):
                faults.append(f"{name} differs from what the architecture computes")
            lines.append(Line(name, tensor.shape, "checked: a constant"))
        else:
            unknown.append(name)
    stored = [*wanted, *constants] if getattr(module, "stores_buffers", False) else wanted
    missing = [name for name in stored if name not in tensors]
    if missing:
        faults.insert(0, f"missing {some(missing)}")
    if unknown:
        faults.insert(0, f"unknown {some(unknown)}")
    return lines, faults


def some(names):
    """The first few of many names, as text."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(shown, names[:_SHOWN])) + more


_CASTS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float64)))


def cast_to_float32(
    tensors: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The tensors with float16, bfloat16 and float64 as float32, and a note on the casts."""
    found = {name: tensor for name, tensor in tensors.items() if tensor.dtype in _CASTS}
    if not found:
        return dict(tensors), []
    kinds = ", ".join(sorted({str(tensor.dtype) for tensor in found.values()}))
    with np.errstate(over="ignore"):  # Overflow gives infinities, which are reported later.
        cast = {name: tensor.astype(np.float32) for name, tensor in found.items()}
    return {**tensors, **cast}, [f"{len(found)} tensors of {kinds} were cast to float32"]


def faults_of(name, tensor, shape, *, variance=False) -> list[str]:
    """What is wrong with a tensor's shape, dtype or values, in sentences that name it."""
    if tensor.shape != shape:
        return [f"{name} has shape {list(tensor.shape)}, expected {list(shape)}"]
    if tensor.dtype in _CASTS:
        return [
            f"{name} has dtype {tensor.dtype}, expected float32; cast=True converts it, or "
            "python -m wdjax convert --cast"
        ]
    if tensor.dtype != np.float32:
        return [f"{name} has dtype {tensor.dtype}, expected float32"]
    if not np.isfinite(tensor).all():
        return [f"{name} holds NaN or infinity"]
    if variance and tensor.size and tensor.min() < 0:
        return [f"{name} is a variance and holds {tensor.min():.3g}"]
    return []


CONTAINERS = ("state_dict", "net", "model_state_dict", "model", "state_dict_ema", "model_ema")


def state_dict(
    content,
    containers: tuple[str, ...] = CONTAINERS,
    prefixes: tuple[str, ...] = ("module.",),
) -> dict[str, np.ndarray]:
    """The flat state dict inside a checkpoint, without prefixes that wrappers add.

    Args:
      content: the value returned by :func:`wdjax.files.torch_file.read`.
      containers: keys under which to look; the first one present is used.
      prefixes: removed from the names once each, in this order.

    Returns:
      name -> array.

    Raises:
      ValueError: no state dict, other values among its tensors, two tensors of one name, or an
        impossible name (too long, or with control characters).

    >>> list(state_dict({"epoch": 3, "state_dict": [{"module.fc.bias": np.zeros(2)}]}))
    ['fc.bias']
    """
    if isinstance(content, (list, tuple)) and len(content) == 1:
        return state_dict(content[0], containers, prefixes)
    if not isinstance(content, Mapping):
        raise ValueError(
            f"expected a state dict, got {type(content).__name__}; look at what "
            "wdjax.files.torch_file.read returns and pass the part that holds the tensors."
        )
    for key in containers:
        if isinstance(content.get(key), (Mapping, list, tuple)):
            return state_dict(content[key], containers, prefixes)
    others = [str(key) for key, value in content.items() if not isinstance(value, np.ndarray)]
    if others or not content:
        raise ValueError(
            f"no state dict found: besides tensors the checkpoint holds "
            f"{some(others) or 'nothing'}; known containers are {', '.join(containers)}."
        )
    names = [_strip(str(name), prefixes) for name in content]
    odd = [name for name in names if len(name) > _LONGEST or not name.isprintable()]
    if odd:
        raise ValueError(f"these are no names of tensors: {some(odd)}.")
    twice = [name for name, count in collections.Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"without the prefixes {prefixes}, names occur twice: {some(twice)}.")
    return dict(zip(names, content.values()))


def _strip(name, prefixes):
    """The name without the prefixes, each removed once, in order."""
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name
