"""The zoo's table, its families against PyTorch, and the files that its loader must understand."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wdjax import convert, models
from wdjax.models import zoo
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


def gradient(model, x, y):
    def loss(x):
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(model(x), y))

    return jax.jit(jax.grad(loss))(x)


@pytest.mark.fast
@pytest.mark.parametrize("name", FIXTURES)
def test_fixture_matches_pytorch(shared, name):
    folder = shared / "fixtures/zoo"
    facts = json.loads((folder / "manifest.json").read_text())[name]
    reference = np.load(folder / f"refs/{name}.npz")
    x = np.load(folder / f"refs/inputs_{facts['input']}.npz")["x"].transpose(0, 2, 3, 1)
    where = facts["name"], facts["dataset"], facts["threat"]
    model, report = convert.load_robustbench(*where, folder / facts["files"][0])
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
