"""The zoo's table, its families against PyTorch, and the files that its loader must understand."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wdjax import models
from wdjax.checks import rounding
from wdjax.models import convert, zoo
from wdjax.models.functional import functional
from wdjax.models.pytorch import buffers, slots

FIXTURES = (
    "hendrycks",
    "wang28_linf",
    "cui_c100",
    "liu_convnextb",
    "mimir_swinl",
    "modas",
    "rice_c100",
)


def relative(ours, theirs):
    """Error of each image over the largest entry of the reference."""
    error = np.abs(np.asarray(ours) - theirs).reshape(len(theirs), -1).max(axis=1)
    return error / np.abs(theirs).reshape(len(theirs), -1).max(axis=1)


def gradient(model, x, y, scale=1.0):
    def loss(x, model):
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(model(x) / scale, y))

    return jax.jit(jax.grad(loss))(x, model)


@pytest.mark.fast
@pytest.mark.parametrize("name", FIXTURES)
def test_fixture_matches_pytorch(shared, name):
    folder = shared / "fixtures/zoo"
    facts = json.loads((folder / "manifest.json").read_text())[name]
    reference = np.load(folder / f"refs/{name}.npz")
    x = np.load(folder / f"refs/inputs_{facts['input']}.npz")["x"].transpose(0, 2, 3, 1)
    where = facts["name"], facts["dataset"], facts["threat"]
    model, report = convert.load_robustbench(*where, folder / facts["files"][0], any_size=True)
    assert report.parameters == facts["params"]
    convert.check_parity(model, x, reference["logits"], tolerance=facts["tol_rel"])
    theirs = reference["grad"].transpose(0, 2, 3, 1)
    ours = gradient(model, jnp.asarray(x), jnp.asarray(reference["labels"]))
    assert np.median(relative(ours, theirs)) < 4e-4


def call(model, x):
    return model(x)


def distinct():
    """One entry for each architecture in the table."""
    found = {}
    for entry in zoo.entries():
        found.setdefault((entry.family, str(entry.options), entry.normalize), entry)
    return [pytest.param(entry, id=f"{entry.name}-{entry.dataset}") for entry in found.values()]


def count(module, prefix=""):
    return sum(
        math.prod(slot.shape)
        for name, slot in slots(module).items()
        if slot.trained and name.startswith(prefix)
    )


@pytest.mark.parametrize("entry", distinct())
def test_every_entry_builds_abstractly(entry):
    model = functional(zoo.build(entry.family, entry.options, entry.normalize))
    x = jax.ShapeDtypeStruct((2, entry.input, entry.input, 3), jnp.float32)
    assert jax.eval_shape(call, model, x).shape == (2, zoo.CLASSES[entry.dataset])
    features = jax.eval_shape(call, models.features(model), x)
    assert features.shape[0] == 2
    assert len(features.shape) == 2


@pytest.mark.parametrize("family", sorted({entry.family for entry in zoo.entries()}))
def test_no_architecture_rounds(family):
    entry = next(entry for entry in zoo.entries() if entry.family == family)
    model = functional(zoo.build(entry.family, entry.options, entry.normalize))
    x = jax.ShapeDtypeStruct((2, entry.input, entry.input, 3), jnp.float32)
    assert rounding.found(model, x) is None


@pytest.mark.fast
def test_parameter_counts_are_the_published_ones():
    counted = {}
    for entry in zoo.entries():
        key = entry.family, str(entry.options)
        if key not in counted:
            module = zoo.build(entry.family, entry.options)
            counted[key] = count(module), count(module, "block1.")
        total, idle = counted[key]
        total += idle if "sub_block1" in entry.file else 0
        assert abs(total / 1e6 - entry.millions) <= 0.0501, entry


@pytest.mark.fast
def test_names_and_shapes_are_those_of_the_state_dicts(shared):
    layouts = json.loads((shared / "reference/layouts.json").read_text())
    checked = 0
    for key, layout in layouts.items():
        dataset, threat, name = layout["zoo"]
        rows = [
            e for e in zoo.entries() if (e.dataset, e.threat, e.name) == (dataset, threat, name)
        ]
        if not rows:
            continue
        (entry,) = rows
        stored = {
            name.removeprefix("model."): tuple(shape)
            for name, shape in layout["module_state"].items()
            if not name.startswith(("normalize.", "sub_block1."))
            and not name.endswith(("num_batches_tracked", "flag_update_statistics", "batch_num"))
        }
        if entry.file and entry.file[-1].startswith("mu_sigma"):
            assert stored.pop("mu") == stored.pop("sigma") == (1, 3, 1, 1)
        options = entry.options
        if not key.endswith("_full"):
            options = options | type_of(entry).sizes(stored)
        if entry.family == "vit":
            options = options | {"heads": 1}
        module = zoo.build(entry.family, options)
        constants = {name: value.shape for name, value in buffers(module).items()}
        wanted = {name: slot.shape for name, slot in slots(module).items()}
        if entry.options.get("layout") == "microsoft":
            wanted |= constants
        assert stored == wanted, key
        checked += 1
    assert checked == 38


@pytest.mark.fast
@pytest.mark.parametrize("key", ["r18_tv", "r18_cifar", "r50_tv", "wrn50_2"])
def test_nppr_resnets_have_the_layout(shared, key):
    check_nppr(shared, f"nppr_{key}", "torchvision_resnet")


@pytest.mark.fast
@pytest.mark.parametrize("key", ["vgg16_tv", "vgg16bn_tv", "vgg16_cifar"])
def test_nppr_vggs_have_the_layout(shared, key):
    check_nppr(shared, f"nppr_{key}", "vgg16")


def check_nppr(shared, key, family):
    layouts = json.loads((shared / "reference/layouts.json").read_text())
    stored = {
        name: tuple(shape)
        for name, shape in layouts[key]["module_state"].items()
        if not name.endswith("num_batches_tracked")
    }
    module = zoo.build(family, zoo.FAMILIES[family].sizes(stored))
    assert stored == {name: slot.shape for name, slot in slots(module).items()}


def type_of(entry):
    return zoo.FAMILIES[entry.family]


C10 = ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
C100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SMALL = {"depth": 10, "width": 2}
TINY = (1, 1, 1, 1)
SWIN = {"width": 16, "depths": (2, 2, 2, 1), "heads": (1, 2, 4, 8)}
DIMS = {"depths": TINY, "dims": (16, 24, 32, 48)}

# name, data set, threat, sizes, normalisation, arguments of the reference, layout of the file
CASES = [
    ("Carmon2019Unlabeled", "cifar10", "Linf", SMALL, None, {}, "sub_block1"),
    ("Standard", "cifar10", "L2", {"depth": 10, "width": 1}, None, {}, "legacy"),
    ("Ding2020MMA", "cifar10", "L2", SMALL, "standardize", {}, "nested"),
    ("Rony2019Decoupling", "cifar10", "L2", SMALL, ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)), {}, "mu"),
    ("Chen2020Efficient", "cifar100", "Linf", SMALL, C100, {}, "mu"),
    ("Wang2023Better_WRN-28-10", "cifar10", "L2", SMALL, C10, {}, "module"),
    ("Rebuffi2021Fixing_28_10_cutmix_ddpm", "cifar100", "Linf", SMALL, C100, {}, "model"),
    ("Amini2024MeanSparse_S-WRN-94-16", "cifar10", "Linf", SMALL, C10, {}, "sparse"),
    ("Rade2021Helper_R18_ddpm", "cifar100", "Linf", {"blocks": TINY}, C100, {}, "nested"),
    (
        "Andriushchenko2020Understanding",
        "cifar10",
        "Linf",
        {"blocks": TINY},
        None,
        {"activated_shortcut": False},
        "last",
    ),
    (
        "Wong2020Fast",
        "cifar10",
        "Linf",
        {"blocks": TINY},
        C10,
        {"activated_shortcut": False},
        "no mu",
    ),
    (
        "Kireev2021Effectiveness_RLAT",
        "cifar10",
        "corruptions",
        {"blocks": TINY},
        C10,
        {"activated_shortcut": True},
        "last mu",
    ),
    (
        "Engstrom2019Robustness",
        "cifar10",
        "L2",
        {"blocks": TINY},
        ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)),
        {},
        "mu",
    ),
    ("Sehwag2021Proxy_R18", "cifar10", "L2", {"blocks": TINY}, None, {}, "cuda"),
    ("Salman2020Do_R18", "imagenet", "Linf", {"blocks": TINY}, IMAGENET, {}, "normalize"),
    ("Chen2024Data_WRN_50_2", "imagenet", "Linf", {"blocks": TINY}, None, {}, "plain"),
    ("Singh2023Revisiting_ConvNeXt-T-ConvStem", "imagenet", "Linf", DIMS, None, {}, "plain"),
    ("Singh2023Revisiting_ConvNeXt-L-ConvStem", "imagenet", "Linf", DIMS, None, {}, "module"),
    ("Liu2023Comprehensive_ConvNeXt-L", "imagenet", "Linf", DIMS, IMAGENET, {}, "normalize"),
    (
        "Singh2023Revisiting_ViT-B-ConvStem",
        "imagenet",
        "Linf",
        {"width": 32, "depth": 2, "heads": 2, "planes": 2},
        None,
        {"heads": 2},
        "plain",
    ),
    (
        "Mo2022When_ViT-B",
        "imagenet",
        "Linf",
        {"width": 32, "depth": 2, "heads": 2},
        IMAGENET,
        {"heads": 2},
        "normalize",
    ),
    (
        "Tian2022Deeper_DeiT-S",
        "imagenet",
        "corruptions",
        {"width": 32, "depth": 2, "heads": 4},
        IMAGENET,
        {"heads": 4},
        "ema",
    ),
    (
        "Liu2023Comprehensive_Swin-B",
        "imagenet",
        "Linf",
        SWIN,
        IMAGENET,
        {"window": 7, "layout": "timm"},
        "normalize",
    ),
    (
        "Mo2022When_Swin-B",
        "imagenet",
        "Linf",
        SWIN,
        IMAGENET,
        {"window": 7, "layout": "timm"},
        "old swin",
    ),
    (
        "Xu2024MIMIR_Swin-B",
        "imagenet",
        "Linf",
        SWIN,
        None,
        {"window": 7, "layout": "microsoft"},
        "buffers",
    ),
    (
        "Amini2024MeanSparse_Swin-L",
        "imagenet",
        "Linf",
        SWIN,
        IMAGENET,
        {"window": 7, "layout": "timm"},
        "sparse",
    ),
]


def random_state(module, seed=0):
    """Random weights whose BatchNorm statistics and gains show every mistake in a port."""
    rng = np.random.default_rng(seed)
    state = {}
    for name, slot in slots(module).items():
        shape, leaf = slot.shape, name.rpartition(".")[2]
        if leaf == "running_var":
            value = np.where(rng.random(shape) < 0.15, 1e-4, rng.uniform(0.3, 1.3, shape))
        elif leaf == "threshold":
            value = np.array(0.1)
        elif len(shape) < 2:
            value = rng.uniform(0.3, 0.8, shape) * (1 if leaf in ("weight", "gamma") else 0.1)
        else:
            value = rng.normal(size=shape) / math.sqrt(math.prod(shape[1:]))
        state[name] = value.astype(np.float32)
    return state


def write(torch, path, state, module, layout, constants):
    """Writes a state dict as RobustBench's files of that layout hold it; its tensors as well."""
    tensors = {name: torch.tensor(value) for name, value in state.items()}
    saved = dict(tensors)
    saved |= {
        f"{n[:-12]}num_batches_tracked": torch.tensor(7)
        for n in state
        if n.endswith("running_mean")
    }
    if "mu" in layout and layout != "no mu":
        saved["mu"], saved["sigma"] = (torch.tensor(c).view(1, 3, 1, 1) for c in constants)
    if layout == "sub_block1":
        saved |= {"sub_" + n: t for n, t in tensors.items() if n.startswith("block1.")}
    if layout == "sparse":
        names = [n.removesuffix("threshold") for n in state if n.endswith("threshold")]
        saved |= {n + "flag_update_statistics": torch.tensor(False) for n in names}
        saved |= {n + "batch_num": torch.tensor(3.0) for n in names}
    if layout == "normalize":
        saved = {"model." + n: t for n, t in saved.items()}
        saved |= {f"normalize.{n}": torch.full((1, 3, 1, 1), 0.3) for n in ("mean", "std")}
    if layout == "buffers":
        saved |= {name: torch.tensor(value) for name, value in buffers(module).items()}
    if layout == "old swin":
        saved = {old_swin(n): t for n, t in saved.items()}
        saved["layers.0.blocks.1.attn_mask"] = torch.zeros(64, 49, 49)
        saved["layers.0.blocks.1.attn.relative_position_index"] = torch.zeros(49, 49).long()
    if layout in ("module", "model", "normalize", "sub_block1"):
        prefix = "model." if layout == "model" else "module."
        saved = {prefix + n: t for n, t in saved.items()}
    if layout in ("nested", "normalize"):
        saved = {"epoch": 3, "best": 0.5, "state_dict": saved}
    if layout.startswith("last"):
        saved = {"best": {n: t * 0 for n, t in saved.items()}, "last": saved}
    if layout == "ema":
        saved = {"state_dict": {n: t * 0 for n, t in saved.items()}, "state_dict_ema": saved}
    torch.save(saved, path, _use_new_zipfile_serialization=layout not in ("legacy", "cuda"))
    if layout == "cuda":
        content = path.read_bytes()
        path.write_bytes(content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"))
    return tensors


def old_swin(name):
    part = name.split(".")
    if part[0] == "layers" and part[2] == "downsample":
        part[1] = str(int(part[1]) - 1)
    return ".".join(part).replace("head.fc.", "head.")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_family_matches_an_independent_pytorch(shared, tmp_path, case):
    torch = pytest.importorskip("torch", reason="the reference implementation is PyTorch")
    import torch_reference

    name, dataset, threat, sizes, constants, extra, layout = case
    entry = zoo.entry(name, dataset, threat)
    module = zoo.build(entry.family, entry.options | sizes)
    path = tmp_path / f"{name}.pt"
    state = write(torch, path, random_state(module), module, layout, constants)
    options = {"heads": sizes["heads"]} if entry.family == "vit" else {}
    model, _ = convert.load_robustbench(name, dataset, threat, path, any_size=True, **options)

    # Values at the edge of MeanSparse's band fall to either side by rounding: it takes more images.
    count = 7 if "sparse" in entry.options else 3
    images = np.load(shared / f"fixtures/zoo/refs/inputs_{min(entry.input, 224)}.npz")["x"][:count]
    if entry.family == "torchvision_resnet":
        images = images[:, :, 60:157, 60:157]

    def reference(x):
        if constants == "standardize":
            x = torch_reference.standardize(x)
        elif constants:
            mean, std = (torch.tensor(c).view(1, 3, 1, 1) for c in constants)
            x = (x - mean) / std
        return getattr(torch_reference, entry.family)(state, x, **extra)

    compare(torch, model, reference, images, sparse="sparse" in entry.options)


def compare(torch, model, reference, images, sparse=False):
    """Checks logits and input gradients by the rule of the fixtures.

    A ReLU at the edge may fall to either side by rounding, so one gradient of three may be off.
    """
    labels = np.arange(len(images))
    x = torch.tensor(images, requires_grad=True)
    logits = reference(x)
    scale = float(logits.detach().abs().max())  # Random weights would saturate the softmax.
    loss = torch.nn.functional.cross_entropy(logits / scale, torch.tensor(labels), reduction="sum")
    loss.backward()
    theirs, slope = logits.detach().numpy(), x.grad.numpy().transpose(0, 2, 3, 1)

    nhwc = jnp.asarray(images.transpose(0, 2, 3, 1))
    if sparse:
        ours = np.asarray(jax.jit(call)(model, nhwc))
        errors = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max()
        assert np.median(errors) < 1e-4
        assert errors.max() < 2e-2
    else:
        convert.check_parity(model, nhwc, theirs)
        assert np.median(relative(gradient(model, nhwc, jnp.asarray(labels), scale), slope)) < 4e-4


NPPR = [
    ("torchvision_resnet", {"blocks": TINY, "classes": 10}, 32),
    ("torchvision_resnet", {"blocks": TINY, "classes": 10, "stem": "cifar"}, 32),
    ("torchvision_resnet", {"blocks": TINY, "bottleneck": True, "classes": 20}, 64),
    (
        "torchvision_resnet",
        {"blocks": TINY, "bottleneck": True, "inner": 128, "classes": 10, "stem": "cifar"},
        16,
    ),
    ("vgg16", {"hidden": 24, "planes": 8, "classes": 20}, 64),
    ("vgg16", {"hidden": 24, "planes": 8, "classes": 10, "batch_norm": True}, 224),
    ("vgg16", {"head": "cifar", "planes": 8, "classes": 10, "batch_norm": True}, 32),
]


@pytest.mark.parametrize(("family", "options", "side"), NPPR)
def test_resnets_and_vggs_without_a_zoo_entry(shared, tmp_path, family, options, side):
    torch = pytest.importorskip("torch", reason="the reference implementation is PyTorch")
    import torch_reference

    module = zoo.build(family, options)
    path = tmp_path / "model.pt"
    state = write(torch, path, random_state(module), module, "nested", None)
    model, report = convert.load(path, family, normalize="imagenet")
    assert report.architecture["options"].items() >= options.items()

    def reference(x):
        mean, std = (torch.tensor(c).view(1, 3, 1, 1) for c in IMAGENET)
        return getattr(torch_reference, family)(state, (x - mean) / std)

    images = np.load(shared / f"fixtures/zoo/refs/inputs_{max(side, 32) // 224 * 192 + 32}.npz")
    images = images["x"][:3] if side in (32, 224) else np.tile(images["x"][:3], 2)[..., :side]
    images = images if images.shape[2] == side else np.tile(images, (1, 1, 2, 1))[:, :, :side]
    compare(torch, model, reference, np.ascontiguousarray(images))


@pytest.mark.fast
def test_a_constant_image_has_a_finite_standardised_gradient():
    model = functional(zoo.build("wide_resnet", {"depth": 10, "width": 1}, "per_image"))
    assert jax.eval_shape(call, model, jax.ShapeDtypeStruct((1, 32, 32, 3), "float32")).shape == (
        1,
        10,
    )
    grad = jax.grad(lambda x: jnp.sum(zoo.normalization("per_image")(x) ** 2))
    assert bool(jnp.all(jnp.isfinite(grad(jnp.full((1, 32, 32, 3), 0.5)))))


TABLE = """cifar10 Linf Bartoldson2024Adversarial_WRN-94-16
cifar10 Linf Bartoldson2024Adversarial_WRN-82-8
cifar10 Linf Cui2023Decoupled_WRN-28-10
cifar10 Linf Wang2023Better_WRN-70-16
cifar10 Linf Wang2023Better_WRN-28-10
cifar10 Linf Xu2023Exploring_WRN-28-10
cifar10 L2 Wang2023Better_WRN-70-16
cifar10 L2 Wang2023Better_WRN-28-10
cifar100 Linf Cui2023Decoupled_WRN-28-10
cifar100 Linf Wang2023Better_WRN-28-10
cifar10 Linf Sehwag2021Proxy_R18
cifar10 L2 Sehwag2021Proxy_R18
cifar10 L2 Sehwag2021Proxy
cifar10 L2 Ding2020MMA
cifar10 L2 Rony2019Decoupling
cifar100 Linf Addepalli2022Efficient_RN18
imagenet Linf Xu2024MIMIR_Swin-L
imagenet Linf Amini2024MeanSparse_Swin-L
imagenet Linf Liu2023Comprehensive_ConvNeXt-B
imagenet Linf Singh2023Revisiting_ConvNeXt-S-ConvStem
cifar10 Linf Wu2020Adversarial_extra
cifar10 Linf Carmon2019Unlabeled
cifar10 Linf Sehwag2020Hydra
cifar10 Linf Wang2020Improving
cifar10 Linf Hendrycks2019Using
cifar10 Linf Wong2020Fast
cifar10 Linf Ding2020MMA"""


@pytest.mark.fast
def test_the_models_of_the_papers_are_there():
    """The twenty of WDA's Table 1 and the seven of DENT."""
    for line in TABLE.splitlines():
        dataset, threat, name = line.split()
        assert zoo.entry(name, dataset, threat).clean > 50
    assert len(zoo.entries()) == 168


def test_heads_of_a_vit_of_another_width_must_be_given(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    module = zoo.build("vit", {"width": 32, "depth": 1, "heads": 2})
    path = tmp_path / "vit.pt"
    torch.save({k: torch.tensor(v) for k, v in random_state(module).items()}, path)
    with pytest.raises(ValueError, match="pass heads="):
        convert.load_robustbench("Mo2022When_ViT-B", "imagenet", "Linf", path)
