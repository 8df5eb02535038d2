"""Makes models of PyTorch checkpoints, PyTorch modules and ONNX files: whole, with a report; and of
functions that JAX cannot trace."""

import argparse
import functools
import itertools
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
from flax import nnx

from wdjax import distinct
from wdjax.files import persist, torch_file
from wdjax.files.state_pickle import shown
from wdjax.models import saved, zoo
from wdjax.models.huggingface import load_huggingface
from wdjax.models.imported import GraphReport, from_torch, load_onnx
from wdjax.models.opaque import opaque, opaque_torch
from wdjax.models.pytorch import (
    CONTAINERS,
    ConversionReport,
    Converted,
    Line,
    cast_to_float32,
    faults_of,
    from_state_dict,
    slots,
    state_dict,
)

Tensors = dict[str, np.ndarray]
"""The tensors of a state dict by name."""

_Shapes = dict[str, tuple[int, ...]]

_TIMM = ("state_dict_ema", "model_ema", "state_dict", "model")


__all__ = [
    "ConversionReport",
    "Converted",
    "GraphReport",
    "Line",
    "add_arguments",
    "check_parity",
    "from_state_dict",
    "from_torch",
    "load",
    "load_huggingface",
    "load_onnx",
    "load_robustbench",
    "main",
    "opaque",
    "opaque_torch",
    "slots",
    "state_dict",
]


def _natural(name: str) -> list[int | str]:
    """A sort key by which ``fc10`` comes after ``fc2``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _mlp_layers(tensors: Tensors) -> dict[str, str]:
    """Names ``fc1``, ``fc2``, ... for the layers of a file with matrices only.

    Their order is that of the numbers in their names, or that of the file. Raises if the two differ
    and the shapes allow both.
    """
    filed = [name for name in tensors if name.endswith(".weight")]
    numbered = sorted(filed, key=_natural)

    def fits(names: list[str]) -> bool:
        shapes = [tensors[name].shape for name in names]
        return all(one[0] == other[-1] for one, other in itertools.pairwise(shapes))

    if filed != numbered and fits(filed) and fits(numbered):
        first, second = (", ".join(n.removesuffix(".weight") for n in o) for o in (filed, numbered))
        raise ValueError(
            f"the order of the layers is unknown: {first} as in the file, or {second} by name; "
            "rename them to fc1, fc2, ... in the order in which they are applied."
        )
    names = filed if fits(filed) and not fits(numbered) else numbered
    return {name.removesuffix(".weight"): f"fc{i + 1}" for i, name in enumerate(names)}


_LAYERS: dict[str, Callable[[Tensors], dict[str, str]]] = {
    "mlp": _mlp_layers,
    "wong_mnist": lambda _: {"0": "conv1", "2": "conv2", "5": "fc1", "7": "fc2"},
    "trades_smallcnn": lambda _: {
        **{f"feature_extractor.conv{i}": f"conv{i}" for i in range(1, 5)},
        **{f"classifier.fc{i}": f"fc{i}" for i in range(1, 4)},
    },
}
"""Layer names in published files of the small nets, and those here."""


def _rename(tensors: Tensors, layers: Mapping[str, str]) -> Tensors:
    """The tensors with their layers renamed by ``layers``; raises if two would have one name."""

    def new(name: str) -> str:
        layer, _, leaf = name.rpartition(".")
        return f"{layers.get(layer, layer)}.{leaf}" if layer else name

    renamed = {new(name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        raise ValueError("the file names layers in two ways; two tensors would get one name.")
    return renamed


def load(
    path: str | PathLike[str],
    arch: str,
    *,
    normalize: str = "",
    cast: bool = False,
    **options: Any,
) -> Converted:
    """Loads a PyTorch or safetensors checkpoint of a known architecture.

    Args:
      path: the file, zip, legacy or safetensors; the state dict may be nested and its names
        prefixed.
      arch: one of :data:`wdjax.models.zoo.FAMILIES`.
      normalize: applied to the images first, see :func:`wdjax.models.zoo.normalization`; "" is none
        (for ``resnet2b`` the constants of CIFAR-10).
      cast: whether to convert float16, bfloat16 and float64 to float32.
      **options: the architecture's constructor arguments. Sizes that are not given are read off
        the file.

    Returns:
      ``Converted(model, report)``.

    Raises:
      ValueError: unknown architecture or option, unreadable file, or tensors that do not match
        exactly.

    >>> model, report = load("mnist_linf_robust.pth", "wong_mnist")  # doctest: +SKIP
    """
    given = zoo.options_of(arch, options)
    tensors = state_dict(torch_file.read(path), prefixes=("module.", "model."))
    if arch in _LAYERS:
        tensors = _rename(tensors, _LAYERS[arch](tensors))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    _check_heads(path, arch, {}, given, shapes)
    built, fault = _candidates(arch, [_sizes(arch, shapes) | given], normalize)
    if not built:
        raise ValueError(f"{path}: no {arch} has tensors like these: {fault}") from fault
    module, chosen = built[0]
    architecture = {"family": arch, "options": chosen, "normalize": normalize}
    return from_state_dict(module, tensors, cast=cast, source=str(path), architecture=architecture)


def _sizes(family: str, shapes: _Shapes) -> dict[str, Any]:
    """The options of an architecture that the file's shapes determine, by name.

    ``shapes`` are those of all tensors by name. Sizes that could not be read, which are 0, are left
    out.
    """
    read_off: Callable[[_Shapes], dict[str, Any]] = getattr(
        zoo.FAMILIES[family], "sizes", lambda shapes: {}
    )
    return {
        name: value
        for name, value in read_off(shapes).items()
        if value is None or isinstance(value, bool | str) or np.all(value)
    }


def _check_heads(
    path: str | PathLike[str],
    family: str,
    published: Mapping[str, Any],
    given: Mapping[str, Any],
    shapes: _Shapes,
) -> None:
    """Raises for a Vision Transformer whose number of heads is unknown.

    Shapes do not tell it, so it must be ``given`` unless the width is that of the ``published``
    model.
    """
    if family != "vit" or "heads" in given:
        return
    width = _sizes(family, shapes).get("width")
    if width and width != published.get("width"):
        raise ValueError(
            f"{path}: its tokens have {width} features, unlike a published model, and a state "
            "dict does not tell the number of attention heads; pass heads=..."
        )


_Built = tuple[nnx.Module, dict[str, Any]]


def _candidates(
    family: str, proposals: Sequence[dict[str, Any]], normalize: str
) -> tuple[list[_Built], ValueError | None]:
    """The modules that can be built from the proposed options, each with all its options.

    Also returns the error of the last proposal that could not be built, or None. Modules are
    abstract: they have shapes and no numbers.
    """
    built, fault = list[_Built](), None
    for proposal in proposals:
        try:
            chosen = zoo.options_of(family, proposal)
            built.append((zoo.build(family, chosen, normalize), chosen))
        except ValueError as error:
            fault = error
    return built, fault


def _lacking(module: nnx.Module, shapes: _Shapes) -> list[str]:
    """Names of the module's tensors that the file lacks or has in another shape."""
    return [name for name, slot in slots(module).items() if shapes.get(name) != slot.shape]


def _misfits(module: nnx.Module, shapes: _Shapes) -> list[str]:
    """Names of tensors that only the module or only the file has, or that differ in shape."""
    wanted = slots(module)
    return _lacking(module, shapes) + [name for name in shapes if name not in wanted]


def load_robustbench(
    name: str,
    dataset: str,
    threat: str,
    path: str | PathLike[str],
    *,
    any_size: bool = False,
    cast: bool = False,
    **options: Any,
) -> Converted:
    """Loads a checkpoint of a RobustBench model.

    Accepts what RobustBench's loader accepts for the entry, except what that would load only in
    part. A file of another size than the published model is refused, unless the sizes are given or
    ``any_size`` is True; the number of classes is the data set's.

    Args:
      name: the model's name in RobustBench, such as ``"Carmon2019Unlabeled"``.
      dataset: "cifar10", "cifar100" or "imagenet".
      threat: "Linf", "L2" or "corruptions".
      path: the file, or RobustBench's model folder. Nothing is downloaded.
      any_size: whether to take sizes that differ from the published model's from the file; the
        report notes them.
      cast: whether to convert float16, bfloat16 and float64 to float32, as RobustBench's loader.
      **options: constructor arguments that override the table's, such as ``width`` or the ``heads``
        of a ``vit``.

    Returns:
      ``Converted(model, report)``; images are ``[n, side, side, 3]`` in [0, 1].

    Raises:
      ValueError: no such entry or option, unreadable file, or tensors that do not match exactly.
      FileNotFoundError: no such file; the message says where to get it.

    >>> load_robustbench("Carmon2019Unlabeled", "cifar10", "Linf", "models")  # doctest: +SKIP
    """
    entry = zoo.entry(name, dataset, threat)
    given = zoo.options_of(entry.family, options)
    file = Path(path)
    if file.is_dir():
        file = file / dataset / threat / f"{name}.pt"
    if not file.is_file():
        raise FileNotFoundError(_advice(file, entry))
    first = ("last",) if "last" in entry.file else ()
    containers = _TIMM if "timm" in entry.file else first + CONTAINERS
    tensors = state_dict(torch_file.read(file), containers, ("module.", "model."))
    normalize, notes = entry.normalize, list[str]()
    if any(flag.startswith("mu_sigma") for flag in entry.file):
        normalize, notes = _from_file(file, entry, tensors, cast)
    if entry.family == "swin" and entry.options["layout"] == "timm":
        tensors = _new_swin(tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    module, chosen = _of_entry(file, entry, given, any_size, normalize, shapes)
    notes += [
        f"{option} is {chosen[option]}, in the published model {value}"
        for option, value in entry.options.items()
        if chosen[option] != value
    ]
    return from_state_dict(
        module,
        tensors,
        cast=cast,
        source=str(file),
        ignore=functools.partial(_ignored, entry),
        architecture={"family": entry.family, "options": chosen, "normalize": normalize},
        notes=tuple(notes),
    )


def _of_entry(
    path: Path,
    entry: zoo.PublishedModel,
    given: dict[str, Any],
    any_size: bool,
    normalize: str,
    shapes: _Shapes,
) -> _Built:
    """The module for a file of a published model, and its options.

    The published options count if the file has all tensors that they need. Otherwise the options
    are read off the file's ``shapes`` (by tensor name), which is an error unless ``any_size``
    allows it. ``given`` options override all others.
    """
    _check_heads(path, entry.family, entry.options, given, shapes)
    published = entry.options | given
    built, fault = _candidates(entry.family, [published], normalize)
    if built and not _lacking(built[0][0], shapes):
        return built[0]
    read = published | _sizes(entry.family, shapes) | {"classes": published["classes"]} | given
    others, other_fault = _candidates(entry.family, [read], normalize)
    built, fault = built + others, fault or other_fault
    if not built:
        raise ValueError(f"{path}: no {entry.family} has tensors like these: {fault}") from fault
    module, chosen = min(built, key=lambda pair: len(_misfits(pair[0], shapes)))
    published = zoo.defaults(entry.family) | published
    differ = {name: value for name, value in chosen.items() if published[name] != value}
    if differ and not any_size:
        wrong = _misfits(built[0][0], shapes)[0] if len(built) > 1 else next(iter(shapes))
        sizes = ", ".join(
            f"{name} is {value}, not {published[name]}" for name, value in differ.items()
        )
        arguments = ", ".join(f"{name}={value}" for name, value in differ.items())
        raise ValueError(
            f"{path} is no {entry.name}: {sizes} (see {shown(wrong)}). Nothing was loaded; if "
            f"these sizes are meant, pass {arguments}, or any_size=True (--any-size)."
        )
    return module, chosen


def _ignored(entry: zoo.PublishedModel, key: str) -> str | None:
    """The reason why RobustBench's loader ignores the tensor ``key``, or None if it is used."""
    constant = key in ("normalize.mean", "normalize.std")
    if constant and entry.dataset == "imagenet" and entry.normalize:
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


def _advice(path: Path, entry: zoo.PublishedModel) -> str:
    """The message for a missing file: how to get it by RobustBench, and where it would lie."""
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


def _from_file(
    path: Path, entry: zoo.PublishedModel, tensors: Tensors, cast: bool
) -> tuple[str, list[str]]:
    """The normalisation by a file's ``mu`` and ``sigma``, which are removed from ``tensors``.

    Returns it as a description for :func:`wdjax.models.zoo.normalization`, and notes for the
    report. Raises if they are missing (unless the table says that they may be), malformed or not
    positive.
    """
    published = zoo.normalization(entry.normalize)
    if "mu_sigma?" in entry.file and "mu" not in tensors and "sigma" not in tensors:
        return entry.normalize, ["mu and sigma are not in the file; RobustBench's constants serve"]
    values, notes = [], []
    for key, default in (("mu", published.mean), ("sigma", published.std)):
        tensor = tensors.pop(key, None)
        if tensor is None:
            raise ValueError(f"{path}: missing {key}, which this model takes from its file.")
        tensor = cast_to_float32({key: tensor})[0][key] if cast else tensor
        faults = faults_of(key, tensor, (1, len(default), 1, 1))
        if not faults and key == "sigma" and not (tensor > 0).all():
            faults = ["sigma is not positive"]
        if faults:
            raise ValueError(f"{path}: {faults[0]}. Nothing was loaded.")
        notes.append(f"{key} = {tensor.ravel().tolist()} comes from the file")
        values.append(tensor.ravel().tolist())
    return " / ".join(" ".join(map(repr, map(float, part))) for part in values), notes


def _new_swin(tensors: Tensors) -> Tensors:
    """The tensors by the names of newer timm: downsampling one stage later, ``head.fc``."""
    if not any(name.startswith("layers.0.downsample.") for name in tensors):
        return tensors

    def new(name: str) -> str:
        if name.startswith("head."):
            return "head.fc." + name.removeprefix("head.")
        return re.sub(r"^layers\.(\d+)\.downsample", _one_later, name)

    return {new(name): tensor for name, tensor in tensors.items()}


def _one_later(match: re.Match[str]) -> str:
    """The matched name with its stage's number increased by 1."""
    return f"layers.{int(match[1]) + 1}.downsample"


def check_parity(
    model: Callable[[jax.Array], jax.Array],
    x: npt.ArrayLike,
    logits: npt.ArrayLike,
    *,
    tolerance: float = 2e-5,
) -> float:
    """Compares a converted model's logits with PyTorch's for the same images.

    Args:
      model: from this module.
      x: ``[n, height, width, c]`` images in [0, 1]; note NHWC.
      logits: ``[n, K]``, PyTorch's.
      tolerance: maximum of ``max |error| / max |logit|``.

    Returns:
      The relative error.

    Raises:
      ValueError: the error is above the tolerance or not finite, or the shapes differ.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, 2 * jnp.eye(2))
    >>> check_parity(model, np.ones((1, 2)), np.full((1, 2), 2.0))
    0.0
    """
    ours, reference = np.asarray(_forward(model, jnp.asarray(x))), np.asarray(logits)
    if ours.shape != reference.shape:
        raise ValueError(f"the model gives {ours.shape}, the reference has {reference.shape}.")
    error = float(np.max(np.abs(ours - reference)) / np.max(np.abs(reference)))
    if not error <= tolerance:
        raise ValueError(
            f"parity failed: relative error {error:.2g} above {tolerance:.2g}; the architecture's "
            "options (normalisation, activation, epsilon) differ from the reference's."
        )
    return error


@distinct.jit
def _forward(model: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """The model's outputs at ``x``; its weights are an argument, not constants when compiled."""
    return model(x)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m wdjax convert``, for :func:`main`."""
    parser.add_argument("weights", help="the PyTorch checkpoint, or RobustBench's models folder")
    parser.add_argument("--name", help="the model's name in RobustBench")
    parser.add_argument("--dataset", choices=tuple(zoo.CLASSES), default="cifar10")
    parser.add_argument("--threat", choices=("Linf", "L2", "corruptions"), default="Linf")
    parser.add_argument("--arch", choices=tuple(zoo.FAMILIES), help="instead of --name")
    parser.add_argument("--normalize", help="with --arch: imagenet, 'm m m / s s s', ...")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a constructor argument as JSON, such as heads=6 or blocks=[2,2,2,2]; repeatable",
    )
    parser.add_argument(
        "--any-size", action="store_true", help="with --name: take sizes from the file"
    )
    parser.add_argument(
        "--cast", action="store_true", help="convert float16, bfloat16 and float64 to float32"
    )
    parser.add_argument("--out", help="a file ending in .safetensors, or a new folder for Orbax")


def main(arguments: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Converts, saves and reports; returns the exit code."""
    if (arguments.name is None) == (arguments.arch is None):
        raise ValueError("pass either --name (a RobustBench model) or --arch.")
    options = dict(map(_parsed, arguments.option))
    if arguments.out:
        persist.check_writable(arguments.out)
    if arguments.name is not None:
        if arguments.normalize is not None:
            raise ValueError(
                "--normalize goes with --arch; with --name the normalization is known."
            )
        entry = zoo.entry(arguments.name, arguments.dataset, arguments.threat)
        converted = load_robustbench(
            entry.name,
            entry.dataset,
            entry.threat,
            arguments.weights,
            any_size=arguments.any_size,
            cast=arguments.cast,
            **zoo.options_of(entry.family, options),
        )
    else:
        if arguments.any_size:
            raise ValueError("--any-size goes with --name; with --arch sizes come from the file.")
        converted = load(
            arguments.weights,
            arguments.arch,
            normalize=arguments.normalize or "",
            cast=arguments.cast,
            **zoo.options_of(arguments.arch, options),
        )
    if arguments.out:
        saved.save_model(arguments.out, converted.model, converted.report.architecture)
    say(str(converted.report))
    if arguments.out:
        say(f"saved {arguments.out}")
    return 0


def _parsed(text: str) -> tuple[str, Any]:
    """An ``--option`` as name and value, which is JSON or, if it is not, plain text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or name in ("normalize", "cast", "any_size", "rngs"):
        raise ValueError(
            f"--option takes NAME=VALUE of the architecture's arguments, got {text!r}."
        )
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
    except (ValueError, RecursionError) as error:  # Too large a number, or too deep a nesting.
        raise ValueError(f"--option {name}: its value cannot be read: {error}.") from error
