"""Saving is all or nothing, restoring is as strict as converting."""

import json
import random
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from wdjax import convert, models, persist, torch_file
from wdjax.models import zoo

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import kills

fast = pytest.mark.fast
ARCHITECTURE = {"family": "mlp", "options": {"sizes": (4, 5, 3)}, "normalize": ""}
PLACES = ["model.safetensors", "model"]


def mlp(seed=0):
    return models.mlp((4, 5, 3), key=jax.random.key(seed))


def same(first, second):
    for ours, theirs in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(
            np.asarray(ours).reshape(-1).view("u1"), np.asarray(theirs).reshape(-1).view("u1")
        )


@fast
@pytest.mark.parametrize("place", PLACES)
def test_a_model_survives_bit_for_bit(tmp_path, place):
    for seed in (0, 1):  # Replaces its predecessor.
        persist.save_model(tmp_path / place, mlp(seed), ARCHITECTURE)
    restored = persist.load_model(tmp_path / place)
    same(restored, mlp(1))
    assert restored.func == mlp().func
    assert [path.name for path in tmp_path.iterdir()] == [place]
    content = persist.manifest(tmp_path / place)
    assert content["settings"]["architecture"]["options"] == {"sizes": [4, 5, 3]}
    assert content["leaves"]["fc1.bias"]["shape"] == [5]
    assert content["versions"]["jax"] == jax.__version__


@fast
@pytest.mark.parametrize("place", PLACES)
def test_any_tree_and_its_settings(tmp_path, place):
    tree = {
        "key": jax.random.key(3),
        "half": jnp.linspace(-3, 3, 7).astype(jnp.bfloat16),
        "turned": jnp.arange(6.0).reshape(2, 3).T,
        "scalar": np.float32(2.5),
        "flags": [jnp.array([True, False]), jnp.zeros((0, 3))],
    }
    persist.save(tmp_path / place, tree, {"eps": 0.1})
    assert persist.exists(tmp_path / place)
    assert persist.manifest(tmp_path / place)["settings"] == {"eps": 0.1}
    found = persist.restore(tmp_path / place, tree)
    assert jax.random.uniform(found["key"]) == jax.random.uniform(tree["key"])
    same({**found, "key": 0 * found["scalar"]}, {**tree, "key": 0 * jnp.asarray(tree["scalar"])})
    with pytest.raises(ValueError, match=r"scalar is float32.*expected int32"):
        persist.restore(tmp_path / place, {**tree, "scalar": jnp.asarray(2)})
    with pytest.raises(ValueError, match="it has key besides"):
        persist.restore(tmp_path / place, {n: leaf for n, leaf in tree.items() if n != "key"})
    with pytest.raises(ValueError, match="of no model"):
        persist.load_model(tmp_path / place)


def tampered(path, change):
    """A copy of a saved model's file whose manifest and tensors were changed, checksums too."""
    tensors, metadata = torch_file.read_safetensors(path), torch_file.read_metadata(path)
    manifest, tensors = json.loads(metadata["wdjax"]), {n: v.copy() for n, v in tensors.items()}
    change(manifest, tensors)
    leaves = {name: persist._facts(tensor) for name, tensor in tensors.items()}
    if manifest.get("leaves") != "stale":
        manifest["leaves"] = leaves
    else:
        manifest["leaves"] = json.loads(metadata["wdjax"])["leaves"]
    path.write_bytes(safetensors.numpy.save(tensors, {"wdjax": json.dumps(manifest)}))


def architecture(**changes):
    return lambda manifest, _: manifest["settings"]["architecture"].update(changes)


def tensor(name, change):
    return lambda _, tensors: tensors.update({name: change(tensors[name])})


def stale(manifest, tensors):
    manifest["leaves"] = "stale"
    tensors["fc1.bias"][2] += 1


FAULTS = [
    (tensor("fc1.bias", lambda v: v * np.nan), "fc1.bias holds NaN"),
    (tensor("fc1.bias", lambda v: v.astype("f8")), "fc1.bias is float64.*expected float32"),
    (tensor("fc1.kernel", np.transpose), r"fc1.kernel is float32\[5, 4\], expected"),
    (lambda _, t: t.update(extra=np.zeros(2, "f4")), "it has extra besides"),
    (lambda _, t: t.pop("fc2.bias"), "it has no fc2.bias"),
    (stale, "fc1.bias fails its checksum"),
    (architecture(family="vgg99"), "unknown architecture 'vgg99'"),
    (architecture(family=["mlp"]), "an architecture has family"),
    (architecture(options={"sizes": [4, 2000000000, 3]}), "sizes must be from 1 to"),
    (architecture(options={"sizes": [4, 5.0, 3]}), "sizes must be whole numbers"),
    (architecture(options={"sizes": [4] * 2000}), "sizes must be from 1"),
    (architecture(options={}), "mlp needs sizes"),
    (architecture(options={"rngs": 3}), "does not take these options: rngs"),
    (architecture(family="wide_resnet", options={"depth": 10, "width": 0}), "width must be"),
    (architecture(normalize="2x-1"), "takes images as they are"),
    (lambda m, _: m.update(schema="else/1"), "not written by this version"),
    (lambda m, _: m["settings"].pop("architecture"), "of no model"),
]


@fast
@pytest.mark.parametrize(("change", "message"), FAULTS)
def test_loading_is_as_strict_as_converting(tmp_path, change, message):
    path = tmp_path / "model.safetensors"
    persist.save_model(path, mlp(), ARCHITECTURE)
    tampered(path, change)
    with pytest.raises(ValueError, match=message):
        persist.load_model(path)


@fast
def test_negative_variances_are_neither_saved_nor_loaded(tmp_path):
    options = {"depth": 10, "width": 1}
    module = zoo.build("wide_resnet", options)
    ones = {name: np.ones(slot.shape, "f4") for name, slot in convert.slots(module).items()}
    net = convert.from_state_dict(module, ones).model
    facts, path = {"family": "wide_resnet", "options": options}, tmp_path / "net.safetensors"
    persist.save_model(path, net, facts)
    tampered(path, tensor("bn1.var", lambda v: v - 2))
    with pytest.raises(ValueError, match=r"bn1\.var is a variance and holds -1"):
        persist.load_model(path)
    net.args[0]["bn1"]["var"] -= 2.0
    with pytest.raises(ValueError, match=r"bn1\.var is a variance"):
        persist.save_model(path, net, facts)


@fast
def test_what_is_no_checkpoint(tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(safetensors.numpy.save({"w": np.ones(2, np.float32)}))
    assert torch_file.read_safetensors(other)["w"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="was not written by"):
        persist.load_model(other)
    other.write_bytes(other.read_bytes()[:-3])
    with pytest.raises(ValueError, match="truncated"):
        persist.load_model(other)
    with pytest.raises(ValueError, match="not a checkpoint"):
        persist.load_model(tmp_path / "absent")
    deep = {"wdjax": "[" * 100_000}
    other.write_bytes(safetensors.numpy.save({"w": np.ones(2, np.float32)}, deep))
    with pytest.raises(ValueError, match="damaged"):
        persist.load_model(other)
    (tmp_path / "thesis").write_text("precious")
    with pytest.raises(ValueError, match="not a checkpoint; choose another"):
        persist.save(tmp_path / "thesis", {"w": jnp.ones(2)})
    assert (tmp_path / "thesis").read_text() == "precious"
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        persist.check_writable(tmp_path / "x.safetensors")


@fast
def test_only_the_architecture_s_own_model_is_saved(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="WongMNIST"):
        persist.save_model(path, models.wong_mnist(key=jax.random.key(0)), ARCHITECTURE)
    with pytest.raises(ValueError, match=r"fc1\.kernel is float32\[4, 6\]"):
        persist.save_model(path, models.mlp((4, 6, 3), key=jax.random.key(0)), ARCHITECTURE)
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, mlp())
    with pytest.raises(ValueError, match="holds NaN"):
        persist.save_model(path, broken, ARCHITECTURE)
    with pytest.raises(ValueError, match="settings must be JSON"):
        persist.save(path, {"w": jnp.ones(2)}, {"attack": object()})
    assert list(tmp_path.iterdir()) == []


@fast
def test_a_failure_leaves_the_older_file_and_nothing_else(tmp_path):
    path = tmp_path / "note.txt"
    path.write_text("old")
    (tmp_path / ".note.txt.999999999.new").write_text("of a process that was killed")

    def fail():
        with persist.replacing(path) as new:
            new.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["note.txt"]


@fast
@pytest.mark.parametrize("name", ["hendrycks", "liu_convnextb"])
def test_every_flipped_byte_is_found(shared, tmp_path, name):
    facts = json.loads((shared / "fixtures/zoo/manifest.json").read_text())[name]
    where = facts["name"], facts["dataset"], facts["threat"]
    made = convert.load_robustbench(
        *where, shared / "fixtures/zoo" / facts["files"][0], any_size=True
    )
    path, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    persist.save_model(path, made.model, made.report.architecture)
    content = path.read_bytes()
    for place in rng.integers(0, len(content), 12):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"checksum|damaged|NaN|corrupt|truncated|something"):
            persist.load_model(path)


def test_a_killed_process_leaves_whole_files(tmp_path):
    expected, dice = kills.source().model, random.Random(1)
    for _ in range(2):
        said = kills.one(tmp_path, dice.uniform(0, 0.5))
        assert kills.check(tmp_path, said, expected) >= 1
