"""PyTorch checkpoints to models: strict, with a report of every tensor, or not at all."""

import collections
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wdjax import checkpoint
from wdjax.core import Model
from wdjax.models import zoo
from wdjax.models.functional import functional
from wdjax.models.pytorch import buffers, slots

_SHOWN = 8


class Line(NamedTuple):
    """One tensor of a :class:`Report`."""

    name: str
    shape: tuple[int, ...]
    fate: str


class Report(NamedTuple):
    """What became of every tensor of a file; ``print`` it."""

    source: str
    architecture: dict[str, Any]
    """``family``, ``options`` and ``normalize`` for :func:`wdjax.models.zoo.build`."""
    lines: tuple[Line, ...]
    parameters: int
    """Numbers that training set, BatchNorm's statistics not among them."""
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
    report: Report


def _keep(name):
    return None


def from_state_dict(
    module: nnx.Module,
    tensors: Mapping[str, np.ndarray],
    *,
    source: str = "state dict",
    ignore: Callable[[str], str | None] = _keep,
    architecture: dict[str, Any] | None = None,
    notes: tuple[str, ...] = (),
) -> Converted:
    """Fills a module with the tensors of a PyTorch state dict; all of them, exactly.

    Args:
      module: the architecture, best abstract (``rngs=None``).
      tensors: name -> array, with the names of the PyTorch module that it mirrors.
      source: what to call the tensors in messages.
      ignore: the reason why a tensor of that name may be left out, or None.
        ``num_batches_tracked`` always may.
      architecture: for the report.
      notes: for the report.

    Returns:
      The model and its report.

    Raises:
      ValueError: a tensor is missing, unknown, of another shape or dtype than float32, holds a NaN
        or an infinity, or contradicts a constant of the architecture; the message names the
        tensors. Nothing is loaded then.

    Cost: one copy of every tensor.
    """
    wanted, constants = slots(module), buffers(module)
    lines, faults, unknown = [], [], []
    for name, tensor in tensors.items():
        reason = "a counter" if name.endswith("num_batches_tracked") else ignore(name)
        if name in wanted:
            faults += _faults(name, tensor, wanted[name].shape)
            lines.append(Line(name, tensor.shape, "-> " + "/".join(wanted[name].path)))
        elif reason:
            lines.append(Line(name, tensor.shape, f"ignored: {reason}"))
        elif name in constants:
            if not np.array_equal(tensor, constants[name]):
                faults.append(f"{name} differs from what the architecture computes")
            lines.append(Line(name, tensor.shape, "checked: a constant"))
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
    architecture = architecture or {"family": kind, "options": {}, "normalize": ""}
    count = sum(math.prod(slot.shape) for slot in wanted.values() if slot.trained)
    report = Report(source, architecture, tuple(lines), count, tuple(notes))
    return Converted(Model(model.func, params), report)


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


_CONTAINERS = ("state_dict", "net", "model_state_dict", "model", "state_dict_ema", "model_ema")
_TIMM = ("state_dict_ema", "model_ema", "state_dict", "model")


def state_dict(
    content,
    containers: tuple[str, ...] = _CONTAINERS,
    prefixes: tuple[str, ...] = ("module.",),
) -> dict[str, np.ndarray]:
    """The one flat state dict inside a checkpoint, without the prefixes that wrappers add.

    Args:
      content: what :func:`wdjax.checkpoint.read` returned.
      containers: keys to look under, the first present one wins.
      prefixes: taken off the names once each, in this order.

    Returns:
      name -> array.

    Raises:
      ValueError: the checkpoint holds no state dict, other things between its tensors, or two
        tensors of one name.

    >>> list(state_dict({"epoch": 3, "state_dict": [{"module.fc.bias": np.zeros(2)}]}))
    ['fc.bias']
    """
    if isinstance(content, (list, tuple)) and len(content) == 1:
        return state_dict(content[0], containers, prefixes)
    if not isinstance(content, Mapping):
        raise ValueError(
            f"expected a state dict, got {type(content).__name__}; look at what "
            "wdjax.checkpoint.read returns and pass the part that holds the tensors."
        )
    for key in containers:
        if isinstance(content.get(key), (Mapping, list, tuple)):
            return state_dict(content[key], containers, prefixes)
    others = [str(key) for key, value in content.items() if not isinstance(value, np.ndarray)]
    if others or not content:
        raise ValueError(
            f"no state dict found: besides tensors the checkpoint holds "
            f"{_some(others) or 'nothing'}; known containers are {', '.join(containers)}."
        )
    names = [_strip(str(name), prefixes) for name in content]
    twice = [name for name, count in collections.Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"without the prefixes {prefixes}, names occur twice: {_some(twice)}.")
    return dict(zip(names, content.values()))


def _strip(name, prefixes):
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name


def _natural(name):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _mlp_layers(tensors):
    names = sorted((n for n in tensors if n.endswith(".weight")), key=_natural)
    return {name.removesuffix(".weight"): f"fc{i + 1}" for i, name in enumerate(names)}


_LAYERS: dict[str, Callable[[Mapping], dict[str, str]]] = {
    "mlp": _mlp_layers,
    "wong_mnist": lambda _: {"0": "conv1", "2": "conv2", "5": "fc1", "7": "fc2"},
    "trades_smallcnn": lambda _: {
        **{f"feature_extractor.conv{i}": f"conv{i}" for i in range(1, 5)},
        **{f"classifier.fc{i}": f"fc{i}" for i in range(1, 4)},
    },
}
"""The names that published files of the small nets give to the layers."""


def _rename(tensors, layers):
    def new(name):
        layer, _, leaf = name.rpartition(".")
        return f"{layers.get(layer, layer)}.{leaf}" if layer else name

    return {new(name): tensor for name, tensor in tensors.items()}


def load(path, arch: str, *, normalize: str = "", **options) -> Converted:
    """Loads a PyTorch checkpoint of a known architecture.

    Args:
      path: the file, zip or legacy; the state dict may be nested and its names prefixed.
      arch: one of :data:`wdjax.models.zoo.FAMILIES`.
      normalize: what happens to the images first, see :func:`wdjax.models.zoo.normalization`; ""
        means none (for ``resnet2b`` the constants of CIFAR-10).
      **options: the architecture's constructor arguments. Sizes are read off the file where they
        are not given.

    Returns:
      ``Converted(model, report)``.

    Raises:
      ValueError: unknown architecture, unreadable file, or tensors that do not fit exactly.

    >>> model, report = load("mnist_linf_robust.pth", "wong_mnist")  # doctest: +SKIP
    """
    zoo.build(arch, dict(options), normalize) if arch not in zoo.FAMILIES else None
    tensors = state_dict(checkpoint.read(path))
    if arch in _LAYERS:
        tensors = _rename(tensors, _LAYERS[arch](tensors))
    return _fit(path, tensors, arch, {}, normalize, options)


def _fit(path, tensors, family, published, normalize, options, ignore=_keep, notes=()):
    """Builds the family with the sizes of the file where the published ones do not fit."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    fixed = {name: value for name, value in published.items() if name == "classes"}
    sizes = getattr(zoo.FAMILIES[family], "sizes", lambda shapes: {})(shapes)
    candidates = [published | options] if published else []
    candidates.append(published | sizes | fixed | options)
    best = None
    for chosen in candidates:
        try:
            module = zoo.build(family, chosen, normalize)
        except (ValueError, ZeroDivisionError) as error:
            if best is None and chosen is candidates[-1]:
                raise ValueError(f"{path}: no {family} has tensors like these: {error}") from None
            continue
        wanted = {name: slot.shape for name, slot in slots(module).items()}
        misfits = sum(shapes.get(name) != shape for name, shape in wanted.items())
        misfits += sum(name not in wanted for name in shapes)
        if best is None or misfits < best[0]:
            best = misfits, module, chosen
    _, module, chosen = best
    differ = [
        f"{name} is {chosen[name]} in the file, {value} in the published model"
        for name, value in published.items()
        if chosen[name] != value
    ]
    architecture = {"family": family, "options": chosen, "normalize": normalize}
    return from_state_dict(
        module,
        tensors,
        source=str(path),
        ignore=ignore,
        architecture=architecture,
        notes=(*notes, *differ),
    )


def load_robustbench(name: str, dataset: str, threat: str, path, **options) -> Converted:
    """Loads a checkpoint of a RobustBench model.

    Whatever RobustBench's loader accepts for the entry is accepted, and nothing that it would load
    only in part. Sizes that differ from the published model's are taken from the file and noted in
    the report; the number of classes is the data set's.

    Args:
      name: the model's name in RobustBench, such as ``"Carmon2019Unlabeled"``.
      dataset: "cifar10", "cifar100" or "imagenet".
      threat: "Linf", "L2" or "corruptions".
      path: the file, or RobustBench's model folder. Nothing is downloaded.
      **options: constructor arguments that override the table's, such as ``heads`` of a ``vit``.

    Returns:
      ``Converted(model, report)``; images are ``[n, side, side, 3]`` in [0, 1].

    Raises:
      ValueError: no such entry, unreadable file, or tensors that do not fit exactly.
      FileNotFoundError: no file there; the message says where to get it.

    >>> load_robustbench("Carmon2019Unlabeled", "cifar10", "Linf", "models")  # doctest: +SKIP
    """
    entry = zoo.entry(name, dataset, threat)
    path = Path(path)
    if path.is_dir():
        path = path / dataset / threat / f"{name}.pt"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist and nothing is downloaded here. Get it with robustbench: "
            f"load_model({name!r}, dataset={dataset!r}, threat_model={threat!r}) "
            f"saves models/{dataset}/{threat}/{name}.pt, and pass that file or the models folder."
        )
    first = ("last",) if "last" in entry.file else ()
    containers = _TIMM if "timm" in entry.file else first + _CONTAINERS
    tensors = state_dict(checkpoint.read(path), containers, ("module.", "model."))
    normalize, notes = entry.normalize, []
    if any(flag.startswith("mu_sigma") for flag in entry.file):
        normalize, notes = _from_file(path, entry, tensors)
    if entry.family == "swin" and entry.options["layout"] == "timm":
        tensors = _new_swin(tensors)

    def ignore(key):
        if key.startswith("normalize.") and dataset == "imagenet":
            return "RobustBench takes the constants from its code"
        if key.startswith("sub_block1.") and entry.family == "wide_resnet":
            return "a block that never runs"
        if key.startswith("model_preact_hl1.") and "aliases" in entry.file:
            return "a second name of other tensors"
        if key.endswith((".flag_update_statistics", ".batch_num")) and "sparse" in entry.options:
            return "used in training only"
        if key.endswith((".relative_position_index", ".attn_mask")) and entry.family == "swin":
            return "recomputed, as timm does" if entry.options["layout"] == "timm" else None
        return None

    return _fit(
        path, tensors, entry.family, entry.options, normalize, options, ignore, tuple(notes)
    )


def _from_file(path, entry, tensors):
    """The normalisation with ``mu`` and ``sigma`` of the file, which are taken out of it."""
    published = zoo.normalization(entry.normalize)
    values, notes = [], []
    for key, default in (("mu", published.mean), ("sigma", published.std)):
        tensor = tensors.pop(key, None)
        if tensor is None:
            if "mu_sigma" in entry.file:
                raise ValueError(f"{path}: missing {key}, which this model takes from its file.")
            notes.append(f"{key} is not in the file; RobustBench's constant {default} is used")
            values.append(default)
            continue
        faults = _faults(key, tensor, (1, len(default), 1, 1))
        if not faults and key == "sigma" and not (tensor > 0).all():
            faults = ["sigma is not positive"]
        if faults:
            raise ValueError(f"{path}: {faults[0]}. Nothing was loaded.")
        notes.append(f"{key} = {tensor.ravel().tolist()} comes from the file")
        values.append(tensor.ravel().tolist())
    return " / ".join(" ".join(map(repr, map(float, part))) for part in values), notes


def _new_swin(tensors):
    """Files of older timm versions number the downsampling one lower and have no ``head.fc``."""
    if any(name.startswith("head.fc.") for name in tensors):
        return tensors

    def new(name):
        if name.startswith("head."):
            return "head.fc." + name.removeprefix("head.")
        return re.sub(r"^layers\.(\d+)\.downsample", _one_later, name)

    return {new(name): tensor for name, tensor in tensors.items()}


def _one_later(match):
    return f"layers.{int(match[1]) + 1}.downsample"


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
