"""Local folders of Hugging Face's image classifiers, by the published names of their tensors."""

import json
import math
import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wdjax.files import torch_file
from wdjax.files.state_pickle import shown
from wdjax.models import zoo
from wdjax.models.layers import classes_of
from wdjax.models.pytorch import Converted, cast_to_float32, from_state_dict

_LONGEST = 1 << 22
"""Bytes of a settings file; the names of 21,841 classes take half of that."""


class HuggingFaceFamily(NamedTuple):
    """How a type of model becomes one of :data:`wdjax.models.zoo.FAMILIES`."""

    family: str
    options: dict[str, str]
    """The constructor's options by the names of the settings."""
    fixed: dict[str, Any]
    """Settings that must have one value, which is also that of those left out; or a list of them.
    """
    names: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]
    """Parts of tensors' names and what they become, in this order."""


def load_huggingface(folder: str | PathLike[str], *, cast: bool = False) -> Converted:
    """Loads an image classifier that Hugging Face's ``save_pretrained`` wrote.

    Types: ViT, ResNet, ConvNeXt and Swin, of the settings that published models have. The mean and
    standard deviation of the preprocessor become part of the model; cropping and resizing do not.

    Args:
      folder: with ``config.json``, ``model.safetensors`` and ``preprocessor_config.json``.
      cast: whether to convert float16, bfloat16 and float64 to float32.

    Returns:
      ``Converted(model, report)``; images are ``[n, side, side, 3]`` in [0, 1].

    Raises:
      ValueError: another type, settings that the architecture here does not have, an unreadable
        file, or tensors that do not match exactly.
      FileNotFoundError: one of the three files is absent.

    >>> model, report = load_huggingface("vit-base-patch16-224")  # doctest: +SKIP
    """
    path = Path(folder)
    settings = _settings(path / "config.json")
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise ValueError(
            f"{path}: model_type is {shown(str(kind))!r}; known are {', '.join(TYPES)}. Export "
            "another model by PyTorch: convert.from_torch."
        )
    entry = TYPES[kind]
    _check_fixed(path, entry.fixed, settings)
    normalize = _normalization(path / "preprocessor_config.json")
    weights = path / "model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(
            f"there is no {weights}; save the model again by save_pretrained, in one file."
        )
    tensors, casts = _renamed(path, entry, torch_file.read(weights)), list[str]()
    if cast:
        tensors, casts = cast_to_float32(tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    head = {"vit": "head", "torchvision_resnet": "fc"}.get(entry.family, "head.fc")
    chosen: dict[str, Any] = {
        option: settings[name] for option, name in entry.options.items() if name in settings
    }
    if kind == "resnet":
        chosen["bottleneck"] = settings.get("layer_type") != "basic"
    if "epsilon" in entry.options:
        chosen["epsilon"] = settings.get("layer_norm_eps", 1e-12)
    try:
        chosen = zoo.options_of(entry.family, chosen | {"classes": classes_of(shapes, head)})
        module = zoo.build(entry.family, chosen, normalize)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    architecture = {"family": entry.family, "options": chosen, "normalize": normalize}
    return from_state_dict(
        module,
        tensors,
        source=str(path),
        ignore=_ignored,
        architecture=architecture,
        notes=(f"normalised by {normalize or 'nothing'}, from preprocessor_config.json", *casts),
    )


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; name a folder that save_pretrained wrote.")
    if path.stat().st_size > _LONGEST:
        raise ValueError(f"{path} has more than {_LONGEST} bytes.")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {shown(str(error))}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no settings by name.")
    return content


def _check_fixed(path: Path, fixed: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, wanted in fixed.items():
        choices = wanted if isinstance(wanted, tuple) else (wanted,)
        value = settings.get(name, choices[0])
        if (type(value) is bool and bool not in map(type, choices)) or value not in choices:
            raise ValueError(
                f"{path}: {name} is {shown(repr(value))}, expected "
                f"{' or '.join(map(repr, choices))}; export the model by PyTorch: "
                "convert.from_torch."
            )


def _normalization(path: Path) -> str:
    """The preprocessor's mean and standard deviation, as :func:`zoo.normalization` takes them."""
    settings = _settings(path)
    factor = settings.get("rescale_factor", 1 / 255)
    number = isinstance(factor, float | int)
    if settings.get("do_rescale", True) and not (number and math.isclose(factor, 1 / 255)):
        raise ValueError(f"{path}: rescale_factor is {shown(repr(factor))}, expected 1 / 255.")
    if not settings.get("do_normalize", True):
        return ""
    parts = settings.get("image_mean"), settings.get("image_std")
    for name, part in zip(("image_mean", "image_std"), parts):
        fine = isinstance(part, list) and len(part) == 3
        if not fine or not all(isinstance(n, float | int) for n in part or ()):
            raise ValueError(f"{path}: {name} is {shown(repr(part))}, expected three numbers.")
    text = " / ".join(" ".join(repr(float(n)) for n in part or ()) for part in parts)
    zoo.normalization(text)
    return text


def _renamed(path: Path, entry: HuggingFaceFamily, content: Any) -> dict[str, np.ndarray]:
    """The tensors by the names of the architecture here; query, key and value are joined."""
    tensors = dict[str, np.ndarray]()
    for name, tensor in content.items():
        new = name
        for part, other in entry.names:
            new = re.sub(part, other, new)
        if new in tensors:
            raise ValueError(f"{path}: two tensors would be called {shown(new)!r}.")
        tensors[new] = tensor
    for name in [name for name in tensors if ".query." in name]:
        three = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        arrays = [tensors.get(part) for part in three]
        if any(array is None or array.ndim not in (1, 2) for array in arrays):
            raise ValueError(f"{path}: {shown(name)} has no key or value beside it.")
        if len({(array.shape, array.dtype) for array in arrays if array is not None}) > 1:
            raise ValueError(f"{path}: {shown(name)} has another shape than key or value.")
        tensors[name.replace(".query.", ".qkv.")] = np.concatenate(
            [tensors.pop(part) for part in three]
        )
    return tensors


def _ignored(name: str) -> str | None:
    return "recomputed" if name.endswith(".relative_position_index") else None


def _one_later(match: re.Match[str]) -> str:
    return f"layers.{int(match[1]) + 1}.downsample"


_TOKENS = (
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(?:attention|self)\.", ".attn."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
)
"""Of a block of a Transformer."""

TYPES: dict[str, HuggingFaceFamily] = {
    "vit": HuggingFaceFamily(
        "vit",
        {
            "width": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads",
            "side": "image_size", "patch": "patch_size", "epsilon": "layer_norm_eps",
        },
        {"hidden_act": "gelu", "qkv_bias": True, "num_channels": 3},
        (
            (r"^vit\.embeddings\.cls_token$", "cls_token"),
            (r"^vit\.embeddings\.position_embeddings$", "pos_embed"),
            (r"^vit\.embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
            (r"^vit\.encoder\.layer\.", "blocks."),
            (r"^vit\.layernorm\.", "norm."),
            (r"^classifier\.", "head."),
            *_TOKENS,
        ),
    ),
    "resnet": HuggingFaceFamily(
        "torchvision_resnet",
        {"blocks": "depths"},
        {
            "hidden_act": "relu", "downsample_in_first_stage": False, "embedding_size": 64,
            "downsample_in_bottleneck": False, "num_channels": 3,
            "layer_type": ("bottleneck", "basic"),
            "hidden_sizes": ([256, 512, 1024, 2048], [64, 128, 256, 512]),
        },
        (
            (r"^resnet\.embedder\.embedder\.convolution\.", "conv1."),
            (r"^resnet\.embedder\.embedder\.normalization\.", "bn1."),
            (r"^resnet\.encoder\.stages\.0\.layers\.", "layer1."),
            (r"^resnet\.encoder\.stages\.1\.layers\.", "layer2."),
            (r"^resnet\.encoder\.stages\.2\.layers\.", "layer3."),
            (r"^resnet\.encoder\.stages\.3\.layers\.", "layer4."),
            (r"\.shortcut\.convolution\.", ".downsample.0."),
            (r"\.shortcut\.normalization\.", ".downsample.1."),
            (r"\.layer\.0\.convolution\.", ".conv1."),
            (r"\.layer\.0\.normalization\.", ".bn1."),
            (r"\.layer\.1\.convolution\.", ".conv2."),
            (r"\.layer\.1\.normalization\.", ".bn2."),
            (r"\.layer\.2\.convolution\.", ".conv3."),
            (r"\.layer\.2\.normalization\.", ".bn3."),
            (r"^classifier\.1\.", "fc."),
        ),
    ),
    "convnext": HuggingFaceFamily(
        "convnext",
        {"depths": "depths", "dims": "hidden_sizes", "epsilon": "layer_norm_eps"},
        {"hidden_act": "gelu", "patch_size": 4, "num_channels": 3},
        (
            (r"^convnext\.embeddings\.patch_embeddings\.", "stem.0."),
            (r"^convnext\.embeddings\.layernorm\.", "stem.1."),
            (r"^convnext\.encoder\.stages\.", "stages."),
            (r"\.downsampling_layer\.", ".downsample."),
            (r"\.layers\.(\d+)\.dwconv\.", r".blocks.\1.conv_dw."),
            (r"\.layers\.(\d+)\.layernorm\.", r".blocks.\1.norm."),
            (r"\.layers\.(\d+)\.pwconv(\d)\.", r".blocks.\1.mlp.fc\2."),
            (r"\.layers\.(\d+)\.layer_scale_parameter$", r".blocks.\1.gamma"),
            (r"^convnext\.layernorm\.", "head.norm."),
            (r"^classifier\.", "head.fc."),
        ),
    ),
    "swin": HuggingFaceFamily(
        "swin",
        {"width": "embed_dim", "depths": "depths", "heads": "num_heads", "window": "window_size"},
        {
            "hidden_act": "gelu", "patch_size": 4, "num_channels": 3, "image_size": 224,
            "qkv_bias": True, "use_absolute_embeddings": False, "layer_norm_eps": 1e-5,
            "mlp_ratio": 4.0,
        },
        (
            (r"^swin\.embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
            (r"^swin\.embeddings\.norm\.", "patch_embed.norm."),
            (r"^swin\.encoder\.layers\.(\d+)\.downsample", _one_later),
            (r"^swin\.encoder\.layers\.", "layers."),
            (r"^swin\.layernorm\.", "norm."),
            (r"^classifier\.", "head.fc."),
            *_TOKENS,
        ),
    ),
}  # fmt: skip
"""By ``model_type``."""
