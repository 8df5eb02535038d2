"""Hugging Face's folders: recorded logits of its own code, that code where it is installed, and
what is refused."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from wdjax import convert
from wdjax.cli import own_model

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
PREPROCESSOR = {"image_mean": MEAN, "image_std": STD, "rescale_factor": 1 / 255}


def layer(name, outputs, *inputs, bias=True):
    return {f"{name}.weight": (outputs, *inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def block(name, self, width):
    """A block of a Transformer, whose attention calls its first part ``self``."""
    parts = [layer(f"{name}.attention.{self}.{part}", width, width) for part in
             ("query", "key", "value")]  # fmt: skip
    parts += [layer(f"{name}.layernorm_{place}", width) for place in ("before", "after")]
    parts += [layer(f"{name}.attention.output.dense", width, width)]
    parts += [layer(f"{name}.intermediate.dense", 4 * width, width)]
    return joined(*parts, layer(f"{name}.output.dense", width, 4 * width))


def joined(*parts):
    return {name: shape for part in parts for name, shape in part.items()}


def normed(name, outputs, *inputs):
    """A convolution of a ResNet and its BatchNorm."""
    statistics = {f"{name}.normalization.running_{part}": (outputs,) for part in ("mean", "var")}
    return joined(
        layer(f"{name}.convolution", outputs, *inputs, bias=False),
        layer(f"{name}.normalization", outputs),
        statistics,
    )


def vit():
    first = {
        "vit.embeddings.cls_token": (1, 1, 16),
        "vit.embeddings.position_embeddings": (1, 5, 16),
    }
    patches = layer("vit.embeddings.patch_embeddings.projection", 16, 3, 8, 8)
    blocks = [block(f"vit.encoder.layer.{i}", "attention", 16) for i in range(2)]
    return joined(first, patches, *blocks, layer("vit.layernorm", 16), layer("classifier", 5, 16))


def swin():
    stem = layer("swin.embeddings.patch_embeddings.projection", 4, 3, 4, 4)
    parts = [stem, layer("swin.embeddings.norm", 4)]
    for stage, depth in enumerate((2, 1, 1, 1)):
        width, name = 4 * 2**stage, f"swin.encoder.layers.{stage}"
        for i in range(depth):
            parts.append(block(f"{name}.blocks.{i}", "self", width))
            table = f"{name}.blocks.{i}.attention.self.relative_position_bias_table"
            parts.append({table: (169, 2**stage)})
        if stage < 3:
            down = layer(f"{name}.downsample.reduction", 2 * width, 4 * width, bias=False)
            parts += [down, layer(f"{name}.downsample.norm", 4 * width)]
    return joined(*parts, layer("swin.layernorm", 32), layer("classifier", 5, 32))


def convnext():
    parts = [layer("convnext.embeddings.patch_embeddings", 4, 3, 4, 4)]
    parts += [layer("convnext.embeddings.layernorm", 4)]
    for stage, width in enumerate((4, 6, 8, 10)):
        name = f"convnext.encoder.stages.{stage}"
        if stage:
            down = f"{name}.downsampling_layer"
            parts += [layer(f"{down}.0", width - 2), layer(f"{down}.1", width, width - 2, 2, 2)]
        inner = f"{name}.layers.0"
        parts += [layer(f"{inner}.dwconv", width, 1, 7, 7), layer(f"{inner}.layernorm", width)]
        parts += [layer(f"{inner}.pwconv1", 4 * width, width)]
        parts += [layer(f"{inner}.pwconv2", width, 4 * width)]
        parts += [{f"{inner}.layer_scale_parameter": (width,)}]
    return joined(*parts, layer("convnext.layernorm", 10), layer("classifier", 5, 10))


def resnet():
    parts, before = [normed("resnet.embedder.embedder", 64, 3, 7, 7)], 64
    for stage, width in enumerate((64, 128, 256, 512)):
        name = f"resnet.encoder.stages.{stage}.layers.0"
        parts += [normed(f"{name}.layer.0", width, before, 3, 3)]
        parts += [normed(f"{name}.layer.1", width, width, 3, 3)]
        parts += [normed(f"{name}.shortcut", width, before, 1, 1)] if stage else []
        before = width
    return joined(*parts, layer("classifier.1", 5, 512))


TYPES = {
    "vit": (
        vit,
        {
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
            "patch_size": 8, "intermediate_size": 64,
        },
        16,
    ),
    "swin": (swin, {"embed_dim": 4, "depths": [2, 1, 1, 1], "num_heads": [1, 2, 4, 8]}, 224),
    "convnext": (convnext, {"depths": [1, 1, 1, 1], "hidden_sizes": [4, 6, 8, 10]}, 64),
    "resnet": (
        resnet,
        {"depths": [1, 1, 1, 1], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"},
        64,
    ),
}  # fmt: skip
RECORDED = {
    "vit": (
        (1.56159, -0.41795, -1.73517, -0.65143, 0.92353),
        (1.38319, -0.49388, -1.58759, -0.51558, 0.83111),
    ),
    "swin": (
        (-0.13504, 0.05705, 0.01857, -1.19663, 0.51970),
        (-0.12228, 0.04390, 0.02995, -1.20436, 0.52250),
    ),
    "convnext": (
        (0.40842, -0.34926, -0.93505, -1.06140, -0.66651),
        (0.38706, -0.38121, -0.96185, -1.06986, -0.65247),
    ),
    "resnet": (
        (-24.83182, -0.39829, 24.16683, 13.93458, -16.12234),
        (-24.63751, -1.63553, 23.26883, 14.66107, -14.81114),
    ),
}
"""Logits that transformers 5.24.0 gives for :func:`pictures`."""


def numbers(name, shape):
    """Tensors that need no file: sines of their entries' places."""
    size = int(np.prod(shape))
    wave = np.sin(np.arange(size) * (0.7 + 0.001 * (len(name) % 17)) + len(name))
    wave = wave.reshape(shape).astype(np.float32)
    if name.endswith("running_var"):
        return 1 + 0.5 * wave
    plain = len(shape) == 1 and name.endswith(("weight", "scale_parameter"))
    return 1 + 0.2 * wave if plain else wave / np.sqrt(max(size // shape[0], 4)).astype(np.float32)


def pictures(side):
    """One of quick and one of slow waves."""
    places = np.arange(side * side * 3).reshape(1, side, side, 3)
    waves = np.sin(np.reshape([0.37, 0.011], (2, 1, 1, 1)) * places)
    return (0.5 + 0.5 * waves).astype(np.float32)


def folder_of(path, kind, settings=None, preprocessor=None, tensors=None):
    shapes, own, _ = TYPES[kind]
    path.mkdir(exist_ok=True)
    config = {"model_type": kind, **own, **(settings or {})}
    (path / "config.json").write_text(json.dumps(config))
    said = PREPROCESSOR | (preprocessor or {})
    (path / "preprocessor_config.json").write_text(json.dumps(said))
    found = {name: numbers(name, shape) for name, shape in shapes().items()} | (tensors or {})
    save_file({name: value for name, value in found.items() if value is not None},
              path / "model.safetensors")  # fmt: skip
    return path


@pytest.mark.parametrize("kind", TYPES)
def test_recorded_logits(tmp_path, kind):
    model, report = convert.load_huggingface(folder_of(tmp_path / kind, kind))
    ours = np.asarray(jax.jit(lambda model, x: model(x))(model, pictures(TYPES[kind][2])))
    theirs = np.asarray(RECORDED[kind])
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
    assert np.ptp(theirs, axis=0).max() > 1e-3  # They depend on the images.
    assert report.architecture["normalize"] == "0.4 0.5 0.6 / 0.2 0.25 0.3"


@pytest.mark.parametrize("kind", TYPES)
def test_its_own_code(tmp_path, kind):
    transformers = pytest.importorskip("transformers", reason="the reference is transformers")
    torch = pytest.importorskip("torch", reason="transformers computes by PyTorch")
    folder = folder_of(tmp_path / kind, kind, {"num_labels": 5})
    theirs = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    theirs.save_pretrained(folder)  # All settings, by names of now.
    x = pictures(TYPES[kind][2])
    images = torch.from_numpy(((x - np.float32(MEAN)) / np.float32(STD)).transpose(0, 3, 1, 2))
    with torch.no_grad():
        wanted = theirs(pixel_values=images).logits.numpy()
    ours = np.asarray(convert.load_huggingface(folder).model(x))
    np.testing.assert_allclose(ours, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.fast
def test_a_folder_is_a_model_of_the_command_line(tmp_path):
    folder = folder_of(tmp_path / "vit", "vit")
    x = pictures(16)
    model = own_model.load(str(folder), None, x)
    np.testing.assert_array_equal(model(x), convert.load_huggingface(folder).model(x))
    half = {name: numbers(name, shape).astype(np.float16) for name, shape in vit().items()}
    folder_of(tmp_path / "vit", "vit", tensors=half)
    np.testing.assert_allclose(own_model.load(str(folder), None, x)(x), model(x), atol=0.05)
    with pytest.raises(ValueError, match="cast=True"):
        convert.load_huggingface(folder)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "shape"), [("vit", (20, 20)), ("vit", (8, 32)), ("swin", (226, 226))]
)
def test_images_of_another_size_are_refused(tmp_path, kind, shape):
    """Their patches are as many, but do not reach the border, or lie elsewhere."""
    model = convert.load_huggingface(folder_of(tmp_path / kind, kind)).model
    side = TYPES[kind][2]
    with pytest.raises(ValueError, match=f"takes images of {side} x {side}, got"):
        model(np.zeros((2, *shape, 3), np.float32))


KEY = "vit.encoder.layer.0.attention.attention.key.weight"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"settings": {"model_type": "bert"}}, "known are vit, resnet, convnext, swin"),
        ({"settings": {"model_type": ["vit"]}}, "known are vit"),
        ({"settings": {"hidden_act": "relu"}}, "hidden_act is 'relu', expected 'gelu'"),
        ({"settings": {"qkv_bias": False}}, "qkv_bias is False, expected True"),
        ({"settings": {"hidden_size": 10**9}}, "width must be from 1 to"),
        ({"settings": {"hidden_size": "16"}}, "width must be a whole number"),
        ({"settings": {"num_attention_heads": 3}}, "no multiple of 3 heads"),
        ({"settings": {"patch_size": 7}}, "do not tile"),
        ({"settings": {"layer_norm_eps": -1.0}}, "epsilon must be between 0 and 1"),
        ({"settings": {"num_hidden_layers": 3}}, "missing blocks.2"),
        ({"preprocessor": {"rescale_factor": 1.0}}, "rescale_factor is 1.0, expected 1 / 255"),
        ({"preprocessor": {"image_std": [0.5]}}, "image_std is .*expected three numbers"),
        ({"preprocessor": {"image_std": [0, 1, 1]}}, "positive std"),
        ({"preprocessor": {"image_mean": [float("nan")] * 3}}, "normalisation .* is unknown"),
        ({"tensors": {KEY: None}}, "has no key or value beside it"),
        ({"tensors": {KEY: np.ones((16, 4), np.float32)}}, "another shape than key or value"),
        ({"tensors": {KEY: np.full((16, 16), np.nan, np.float32)}}, "holds NaN or infinity"),
        ({"tensors": {"vit.pooler.dense.bias": np.ones(16, np.float32)}}, "unknown vit.pooler"),
        ({"tensors": {"head.bias": np.ones(5, np.float32)}}, "two tensors would be called"),
    ],
)
def test_what_is_refused(tmp_path, changed, said):
    with pytest.raises(ValueError, match=said):
        convert.load_huggingface(folder_of(tmp_path / "vit", "vit", **changed))


@pytest.mark.fast
@pytest.mark.parametrize("content", ["", "[" * 10**5, "[]", '{"model_type": "vit"', "\xff", "3"])
def test_settings_that_are_none(tmp_path, content):
    folder = folder_of(tmp_path / "vit", "vit")
    (folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json"):
        convert.load_huggingface(folder)


@pytest.mark.fast
@pytest.mark.parametrize("gone", ["config.json", "preprocessor_config.json", "model.safetensors"])
def test_a_file_that_is_absent_is_named(tmp_path, gone):
    folder = folder_of(tmp_path / "vit", "vit")
    (folder / gone).unlink()
    with pytest.raises(FileNotFoundError, match=gone):
        convert.load_huggingface(folder)
