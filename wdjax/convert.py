"""PyTorch checkpoints to models: strict, with a report of every tensor, or not at all."""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import checkpoint
from wdjax.core import Model
from wdjax.models import zoo
from wdjax.models.functional import functional
from wdjax.models.pytorch import (
    CONTAINERS,
    Converted,
    Line,
    Report,
    faults_of,
    from_state_dict,
    keep,
    slots,
    state_dict,
)

Tensors = dict[str, np.ndarray]
"""The tensors of a state dict by their names."""

_Shapes = dict[str, tuple[int, ...]]

_TIMM = ("state_dict_ema", "model_ema", "state_dict", "model")


__all__ = [
    "Converted",
    "Line",
    "Report",
    "add_arguments",
    "check_parity",
    "from_state_dict",
    "load",
    "load_robustbench",
    "main",
    "restore",
    "save",
    "slots",
    "state_dict",
]


def _natural(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _mlp_layers(tensors: Tensors) -> dict[str, str]:
    names = sorted((n for n in tensors if n.endswith(".weight")), key=_natural)
    return {name.removesuffix(".weight"): f"fc{i + 1}" for i, name in enumerate(names)}


_LAYERS: dict[str, Callable[[Tensors], dict[str, str]]] = {
    "mlp": _mlp_layers,
    "wong_mnist": lambda _: {"0": "conv1", "2": "conv2", "5": "fc1", "7": "fc2"},
    "trades_smallcnn": lambda _: {
        **{f"feature_extractor.conv{i}": f"conv{i}" for i in range(1, 5)},
        **{f"classifier.fc{i}": f"fc{i}" for i in range(1, 4)},
    },
}
"""The names that published files of the small nets give to the layers."""


def _rename(tensors: Tensors, layers: Mapping[str, str]) -> Tensors:
    def new(name: str) -> str:
        layer, _, leaf = name.rpartition(".")
        return f"{layers.get(layer, layer)}.{leaf}" if layer else name

    return {new(name): tensor for name, tensor in tensors.items()}


def load(path: str | PathLike[str], arch: str, *, normalize: str = "", **options: Any) -> Converted:
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
    if arch not in zoo.FAMILIES:
        raise ValueError(f"unknown architecture {arch!r}; known are {', '.join(zoo.FAMILIES)}.")
    tensors = state_dict(checkpoint.read(path), prefixes=("module.", "model."))
    if arch in _LAYERS:
        tensors = _rename(tensors, _LAYERS[arch](tensors))
    return _fit(path, tensors, arch, {}, normalize, options)


def _fit(
    path: str | PathLike[str],
    tensors: Tensors,
    family: str,
    published: dict[str, Any],
    normalize: str,
    options: dict[str, Any],
    ignore: Callable[[str], str | None] = keep,
    notes: Sequence[str] = (),
) -> Converted:
    """Builds the family with the sizes of the file where the published ones do not fit."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    fixed = {name: value for name, value in published.items() if name == "classes"}
    read_off: Callable[[_Shapes], dict[str, Any]] = getattr(
        zoo.FAMILIES[family], "sizes", lambda shapes: {}
    )
    if family == "vit" and "heads" not in options:
        width = read_off(shapes)["width"]
        if width != published.get("width"):
            raise ValueError(
                f"{path}: its tokens have {width} features, unlike a published model, and a state "
                "dict does not tell the number of attention heads; pass heads=..."
            )
    best, fault = None, None
    readers: list[Callable[[_Shapes], dict[str, Any]]] = [read_off]
    if published:
        readers.insert(0, lambda shapes: {})
    for sizes in readers:
        try:
            chosen = published | sizes(shapes) | fixed | options
            module = zoo.build(family, chosen, normalize)
        except (ValueError, ArithmeticError, LookupError) as error:
            fault = error
            continue
        wanted = {name: slot.shape for name, slot in slots(module).items()}
        misfits = sum(shapes.get(name) != shape for name, shape in wanted.items())
        misfits += sum(name not in wanted for name in shapes)
        if best is None or misfits < best[0]:
            best = misfits, module, chosen
    if best is None:
        raise ValueError(f"{path}: no {family} has tensors like these: {fault}") from fault
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


def load_robustbench(
    name: str, dataset: str, threat: str, path: str | PathLike[str], **options: Any
) -> Converted:
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
    file = Path(path)
    if file.is_dir():
        file = file / dataset / threat / f"{name}.pt"
    if not file.is_file():
        raise FileNotFoundError(_advice(file, entry))
    first = ("last",) if "last" in entry.file else ()
    containers = _TIMM if "timm" in entry.file else first + CONTAINERS
    tensors = state_dict(checkpoint.read(file), containers, ("module.", "model."))
    normalize, notes = entry.normalize, list[str]()
    if any(flag.startswith("mu_sigma") for flag in entry.file):
        normalize, notes = _from_file(file, entry, tensors)
    if entry.family == "swin" and entry.options["layout"] == "timm":
        tensors = _new_swin(tensors)

    def ignore(key: str) -> str | None:
        constant = key in ("normalize.mean", "normalize.std")
        if constant and dataset == "imagenet" and entry.normalize:
            return "RobustBench takes the constants from its code"
        if key.startswith("sub_block1.") and entry.family == "wide_resnet":
            return "a block that never runs"
        if key.startswith("model_preact_hl1.") and {"aliases", "mu_sigma?"} & {*entry.file}:
            return "a second name of other tensors"
        if key.endswith((".flag_update_statistics", ".batch_num")) and "sparse" in entry.options:
            return "used in training only"
        if key.endswith((".relative_position_index", ".attn_mask")) and entry.family == "swin":
            return "recomputed, as timm does" if entry.options["layout"] == "timm" else None
        return None

    return _fit(
        file, tensors, entry.family, entry.options, normalize, options, ignore, tuple(notes)
    )


def _advice(path: Path, entry: zoo.Entry) -> str:
    get = (
        f"{path} does not exist and nothing is downloaded here. Get it with robustbench: "
        f"load_model({entry.name!r}, dataset={entry.dataset!r}, threat_model={entry.threat!r}) "
    )
    if {"timm", "torchvision"} & {*entry.file}:
        return get + (
            "leaves the file in PyTorch's cache, ~/.cache/torch/hub/checkpoints; pass that file, "
            f"or copy it to {entry.dataset}/{entry.threat}/{entry.name}.pt of a models folder."
        )
    return get + (
        f"saves models/{entry.dataset}/{entry.threat}/{entry.name}.pt; pass that file or the "
        "models folder."
    )


def _from_file(path: Path, entry: zoo.Entry, tensors: Tensors) -> tuple[str, list[str]]:
    """The normalisation with ``mu`` and ``sigma`` of the file, which are taken out of it."""
    published = zoo.normalization(entry.normalize)
    if "mu_sigma?" in entry.file and "mu" not in tensors and "sigma" not in tensors:
        return entry.normalize, ["mu and sigma are not in the file; RobustBench's constants serve"]
    values, notes = [], []
    for key, default in (("mu", published.mean), ("sigma", published.std)):
        tensor = tensors.pop(key, None)
        if tensor is None:
            raise ValueError(f"{path}: missing {key}, which this model takes from its file.")
        faults = faults_of(key, tensor, (1, len(default), 1, 1))
        if not faults and key == "sigma" and not (tensor > 0).all():
            faults = ["sigma is not positive"]
        if faults:
            raise ValueError(f"{path}: {faults[0]}. Nothing was loaded.")
        notes.append(f"{key} = {tensor.ravel().tolist()} comes from the file")
        values.append(tensor.ravel().tolist())
    return " / ".join(" ".join(map(repr, map(float, part))) for part in values), notes


def _new_swin(tensors: Tensors) -> Tensors:
    """Files of older timm versions number the downsampling one lower and have no ``head.fc``."""
    if not any(name.startswith("layers.0.downsample.") for name in tensors):
        return tensors

    def new(name: str) -> str:
        if name.startswith("head."):
            return "head.fc." + name.removeprefix("head.")
        return re.sub(r"^layers\.(\d+)\.downsample", _one_later, name)

    return {new(name): tensor for name, tensor in tensors.items()}


def _one_later(match: re.Match[str]) -> str:
    return f"layers.{int(match[1]) + 1}.downsample"


def check_parity(
    model: Callable[[jax.Array], jax.Array],
    x: npt.ArrayLike,
    logits: npt.ArrayLike,
    *,
    tolerance: float = 2e-5,
) -> float:
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
    ours, reference = np.asarray(jax.jit(model)(jnp.asarray(x))), np.asarray(logits)
    if ours.shape != reference.shape:
        raise ValueError(f"the model gives {ours.shape}, the reference has {reference.shape}.")
    error = float(np.max(np.abs(ours - reference)) / np.max(np.abs(reference)))
    if not error <= tolerance:
        raise ValueError(
            f"parity failed: relative error {error:.2g} above {tolerance:.2g}; the architecture's "
            "options (normalisation, activation, epsilon) differ from the reference's."
        )
    return error


def save(converted: Converted, path: str | PathLike[str]) -> None:
    """Saves a converted model, for :func:`restore`.

    Args:
      converted: from :func:`load` or :func:`load_robustbench`.
      path: a file that ends in ``.safetensors``, or a new folder for Orbax.

    Raises:
      ValueError: the folder exists.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    params, facts = converted.model.args[0], json.dumps(converted.report.architecture)
    if path.suffix == ".safetensors":
        leaves = jax.tree_util.tree_leaves_with_path(params)
        flat = {"/".join(key.key for key in keys): np.asarray(leaf) for keys, leaf in leaves}
        checkpoint.write_safetensors(path, flat, {"wdjax": facts})
        return
    if path.exists():
        raise ValueError(f"{path} exists; name a new folder, or a file ending in .safetensors.")
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as writer:
        writer.save(path / "params", params)
    (path / "architecture.json").write_text(facts)


def restore(path: str | PathLike[str]) -> Model:
    """Loads what :func:`save` wrote.

    Args:
      path: the ``.safetensors`` file or the Orbax folder.

    Returns:
      The model.

    Raises:
      ValueError: the file or folder does not come from :func:`save`.
    """
    path = Path(path).absolute()
    tensors: dict[str, np.ndarray] = {}
    if path.is_dir() and (path / "architecture.json").is_file():
        facts = (path / "architecture.json").read_text()
    elif path.is_file():
        tensors, metadata = checkpoint.read_safetensors(path)
        facts = metadata.get("wdjax", "")
    else:
        facts = ""
    if not facts:
        raise ValueError(f"{path} was not written by wdjax.convert.save.")
    architecture = json.loads(facts)
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in architecture["options"].items()
    }
    model = functional(zoo.build(architecture["family"], options, architecture["normalize"]))
    abstract = model.args[0]
    if path.is_dir():
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as reader:
            return Model(model.func, reader.restore(path / "params", abstract))

    def fill(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = "/".join(key.key for key in keys)
        if name not in tensors or tensors[name].shape != leaf.shape:
            raise ValueError(f"{path}: {name} is missing or not of shape {list(leaf.shape)}.")
        return jnp.array(tensors[name])

    return Model(model.func, jax.tree_util.tree_map_with_path(fill, abstract))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``python -m wdjax convert`` for :func:`main`."""
    parser.add_argument("weights", help="the PyTorch checkpoint, or RobustBench's models folder")
    parser.add_argument("--name", help="the model's name in RobustBench")
    parser.add_argument("--dataset", choices=tuple(zoo.CLASSES), default="cifar10")
    parser.add_argument("--threat", choices=("Linf", "L2", "corruptions"), default="Linf")
    parser.add_argument("--arch", choices=tuple(zoo.FAMILIES), help="instead of --name")
    parser.add_argument(
        "--normalize", default="", help="with --arch: imagenet, 'm m m / s s s', ..."
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a constructor argument as JSON, such as heads=6 or blocks=[2,2,2,2]; repeatable",
    )
    parser.add_argument("--out", help="a file ending in .safetensors, or a new folder for Orbax")


def main(arguments: argparse.Namespace) -> int:
    """Converts, prints the report and saves; the exit code."""
    if (arguments.name is None) == (arguments.arch is None):
        raise ValueError("pass either --name (a RobustBench model) or --arch.")
    options = {}
    for text in arguments.option:
        name, _, value = text.partition("=")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        options[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    if arguments.name is not None:
        converted = load_robustbench(
            arguments.name, arguments.dataset, arguments.threat, arguments.weights, **options
        )
    else:
        converted = load(
            arguments.weights, arguments.arch, normalize=arguments.normalize, **options
        )
    print(converted.report)
    if arguments.out:
        save(converted, arguments.out)
        print(f"saved {arguments.out}")
    return 0
