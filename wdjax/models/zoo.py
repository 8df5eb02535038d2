"""A table of RobustBench's models whose architectures are here, and functions to build them.

The table is ``zoo.csv`` beside this file, one published model a row. ``robust`` is the published
AutoAttack accuracy, or for the threat "corruptions" the accuracy on corrupted images; both in
percent. ``millions`` is the number of parameters in the published file. ``file`` lists
peculiarities of the file: ``last`` (nested under that key), ``timm`` (timm's loader: averaged
weights win), ``sub_block1`` (contains a block that never runs), ``mu_sigma`` (contains the
normalisation; with ``?`` it may be missing), ``aliases`` (may contain tensors twice),
``torchvision`` (from torchvision).
"""

import csv
import functools
import importlib.resources
import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from wdjax.models.convnext import ConvNeXt
from wdjax.models.dm_wide_resnet import DMWideResNet
from wdjax.models.layers import Normalize, identity, standardize
from wdjax.models.preact_resnet import DMPreActResNet, PreActResNet
from wdjax.models.resnet import ResNet, TorchvisionResNet
from wdjax.models.small import MLP, ResNet2b, TradesSmallCNN, WongMNIST
from wdjax.models.swin import Swin
from wdjax.models.vgg import VGG16
from wdjax.models.vit import ViT
from wdjax.models.wide_resnet import WideResNet

FAMILIES: dict[str, type[nnx.Module]] = {
    "mlp": MLP,
    "wong_mnist": WongMNIST,
    "trades_smallcnn": TradesSmallCNN,
    "resnet2b": ResNet2b,
    "wide_resnet": WideResNet,
    "dm_wide_resnet": DMWideResNet,
    "resnet": ResNet,
    "preact_resnet": PreActResNet,
    "dm_preact_resnet": DMPreActResNet,
    "torchvision_resnet": TorchvisionResNet,
    "vgg16": VGG16,
    "convnext": ConvNeXt,
    "vit": ViT,
    "swin": Swin,
}
CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}

# DeepMind's constants for CIFAR-100 differ from the usual ones in the fourth digit.
_CONSTANTS = {
    "2x-1": "0.5 0.5 0.5 / 0.5 0.5 0.5",
    "dm_cifar10": "0.4914 0.4822 0.4465 / 0.2471 0.2435 0.2616",
    "dm_cifar100": "0.5071 0.4865 0.4409 / 0.2673 0.2564 0.2762",
    "imagenet": "0.485 0.456 0.406 / 0.229 0.224 0.225",
}


class PublishedModel(NamedTuple):
    """A published model."""

    dataset: str
    threat: str
    name: str
    family: str
    """A key of :data:`FAMILIES`."""
    options: dict[str, Any]
    """Arguments of the family's constructor, including the number of classes."""
    activation: str
    normalize: str
    """For :func:`normalization`."""
    file: tuple[str, ...]
    input: int
    """Side of the images on which the accuracies were measured."""
    millions: float
    clean: float
    robust: float


def _option(text):
    """An option in the table's text form ``name=value``, as name and Python value."""
    name, value = text.split("=")
    if name in ("layout", "stem"):
        return name, value
    if name in ("blocks", "depths", "dims", "heads") and "-" in value:
        return name, tuple(map(int, value.split("-")))
    return name, bool(int(value)) if name in _SWITCHES else int(value)


_SWITCHES = ("bottleneck", "activated_shortcut", "final_norm", "sparse")


@functools.cache
def entries() -> tuple[PublishedModel, ...]:
    """Every covered model, in RobustBench's order.

    >>> len(entries()), entries()[1].name, entries()[1].options
    (168, 'Carmon2019Unlabeled', {'depth': 28, 'width': 10, 'classes': 10})
    """
    text = importlib.resources.files("wdjax.models").joinpath("zoo.csv").read_text()
    return tuple(
        PublishedModel(
            **{key: row[key] for key in ("dataset", "threat", "name", "family")},
            options=dict(map(_option, row["options"].split()))
            | {"classes": CLASSES[row["dataset"]]},
            activation=row["activation"],
            normalize=row["normalize"],
            file=tuple(row["file"].split()),
            input=int(row["input"]),
            **{key: float(row[key]) for key in ("millions", "clean", "robust")},
        )
        for row in csv.DictReader(text.splitlines())
    )


def entry(name: str, dataset: str, threat: str) -> PublishedModel:
    """The table's row of a RobustBench model.

    Args:
      name: such as ``"Carmon2019Unlabeled"``.
      dataset: "cifar10", "cifar100" or "imagenet".
      threat: "Linf", "L2" or "corruptions".

    Returns:
      The row.

    Raises:
      ValueError: no such row; the message lists similar names.

    >>> entry("Wang2023Better_WRN-28-10", "cifar10", "L2").robust
    83.68
    """
    lists = {(row.dataset, row.threat) for row in entries()}
    if (dataset, threat) not in lists:
        raise ValueError(
            f"no models for {dataset!r} and {threat!r}; there are "
            + ", ".join("/".join(pair) for pair in sorted(lists))
            + "."
        )
    names = {row.name: row for row in entries() if (row.dataset, row.threat) == (dataset, threat)}
    if name in names:
        return names[name]
    author = name[:5].lower()
    close = [known for known in names if known.lower().startswith(author)] or list(names)
    raise ValueError(f"no model {name!r} for {dataset}/{threat}; there are {', '.join(close)}.")


def normalization(spec: str):
    """The normalisation that a description stands for.

    Args:
      spec: "" (none), "per_image", "2x-1", "dm_cifar10", "dm_cifar100", "imagenet", or
        ``"mean mean mean / std std std"``.

    Returns:
      A function of images.

    Raises:
      ValueError: none of these.

    >>> normalization("0.5 0.5 0.5 / 0.25 0.25 0.25").std
    (0.25, 0.25, 0.25)
    """
    if not isinstance(spec, str):
        raise ValueError(f"a normalisation is described by a string, got {spec!r}.")
    if spec in ("", "per_image"):
        return standardize if spec else identity
    try:
        mean, std = (
            tuple(map(float, part.split())) for part in _CONSTANTS.get(spec, spec).split("/")
        )
    except ValueError:
        mean = std = ()
    numbers = all(map(math.isfinite, (*mean, *std)))
    if len(mean) != len(std) or not mean or min(std) <= 0 or not numbers:
        raise ValueError(
            f"normalisation {spec!r} is unknown; use '', 'per_image', {', '.join(_CONSTANTS)} or "
            "'mean mean mean / std std std' with positive std."
        )
    return Normalize(mean, std)


_MAX_LAYERS = 200
_MAX_SIZE = 1 << 20
_COUNTS = ("depth", "depths", "blocks")  # For a tuple the sum counts.


def defaults(family: str) -> dict[str, Any]:
    """The arguments of a family's constructor with their default values.

    >>> defaults("convnext")["dims"], defaults("vit")["heads"]
    ((128, 256, 512, 1024), 12)
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown architecture {family!r}; known are {', '.join(FAMILIES)}.")
    parameters = inspect.signature(FAMILIES[family].__init__).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in ("self", "normalize", "rngs")
    }


def options_of(family: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Checks a family's options before anything is built from them.

    Args:
      family: a key of :data:`FAMILIES`.
      options: its constructor's arguments without the normalisation; lists count as tuples.

    Returns:
      The options as plain Python numbers, strings and tuples.

    Raises:
      ValueError: unknown family or option, a value of another type, or an implausible size.

    >>> options_of("wide_resnet", {"depth": 10, "width": np.int64(2)})
    {'depth': 10, 'width': 2}
    """
    known = defaults(family)
    unknown = [str(name) for name in options if name not in known]
    if unknown:
        raise ValueError(
            f"{family} does not take these options: {', '.join(unknown)}; it takes "
            f"{', '.join(known)}."
        )
    return {name: _checked(family, name, value, known[name]) for name, value in options.items()}


def _checked(family: str, name: str, value: Any, default: Any) -> Any:
    """Checks an option's value against the type of its default; returns it with Python's numbers.

    Options that are counted or numbered must be whole numbers within limits, and a tuple must have
    as many as the default; raises a ValueError that names family and option.
    """
    if isinstance(default, bool | str):
        if type(value) is not type(default):
            kind = "true or false" if isinstance(default, bool) else "a string"
            raise ValueError(f"{family}: {name} must be {kind}, got {value!r}.")
        return value
    if default is None and value is None:
        return None
    if isinstance(default, float):
        number = isinstance(value, float | int | np.floating) and not isinstance(value, bool)
        if not number or not 0 < value < 1:
            raise ValueError(f"{family}: {name} must be between 0 and 1, got {value!r}.")
        return float(value)
    several = isinstance(default, tuple) or default is inspect.Parameter.empty
    values = tuple(value) if several and isinstance(value, tuple | list) else (value,)
    wanted = len(default) if isinstance(default, tuple) else len(values)
    whole = all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in values)
    if several != isinstance(value, tuple | list) or len(values) != wanted or not whole:
        what = f"{wanted} whole numbers" if isinstance(default, tuple) else "whole numbers"
        raise ValueError(
            f"{family}: {name} must be {what if several else 'a whole number'}, got {value!r}."
        )
    limit = _MAX_LAYERS if name in _COUNTS else _MAX_SIZE
    largest = sum(values) if name in _COUNTS else max(values, default=1)
    if min(values, default=1) < 1 or largest > limit or len(values) > _MAX_LAYERS:
        raise ValueError(f"{family}: {name} must be from 1 to {limit}, got {value!r}.")
    return tuple(map(int, values)) if several else int(value)


def build(
    family: str, options: Mapping[str, Any], normalize: str = "", *, rngs: nnx.Rngs | None = None
) -> nnx.Module:
    """Builds an architecture by the name of its family.

    Args:
      family: a key of :data:`FAMILIES`.
      options: its constructor's arguments.
      normalize: for :func:`normalization`; "" leaves the constructor's default.
      rngs: random keys for the parameters; None for an abstract module.

    Returns:
      The module.

    Raises:
      ValueError: unknown family, option or normalisation, or sizes that do not fit each other.

    >>> type(build("wide_resnet", {"depth": 10, "width": 1}, "2x-1")).__name__
    'WideResNet'
    """
    chosen = options_of(family, options)
    needed = [
        name
        for name, default in defaults(family).items()
        if default is inspect.Parameter.empty and name not in chosen
    ]
    if needed:
        raise ValueError(f"{family} needs {', '.join(needed)}.")
    extra = {"normalize": normalization(normalize)} if normalize else {}
    takes = inspect.signature(FAMILIES[family].__init__).parameters
    if extra and "normalize" not in takes:
        raise ValueError(f"{family} takes images as they are; got normalize={normalize!r}.")
    return FAMILIES[family](**chosen, **extra, rngs=rngs)
