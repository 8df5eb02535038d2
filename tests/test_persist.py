"""Saving is all or nothing, restoring is as strict as converting."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import wdjax
from wdjax import attacks, models, precision
from wdjax.files import persist, torch_file
from wdjax.models import convert, zoo

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
    if manifest["crc32"] == json.loads(metadata["wdjax"])["crc32"]:
        del manifest["crc32"]  # Which would tell of every other change.
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
    (lambda m, _: m.update(crc32=1, leaves="stale"), "its manifest fails its checksum"),
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
    with pytest.raises(ValueError, match="exists and is not a checkpoint"):
        persist.save(other, {"w": jnp.ones(2)})
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


def leaves():
    """One of every kind that a tree may hold, and some that no file can: name -> leaf."""
    found = {
        "int": 5, "beyond 32 bits": 2**40, "most": 2**63 - 1, "too much": 2**63, "float": 0.1,
        "bool": True, "complex": 1 + 2j, "word": "x", "bytes": b"x", "object": object(),
        "number of NumPy": np.float64(0.1), "masked": np.ma.masked_array([1.0, 2.0], [0, 1]),
        "not a number": np.array([np.nan, -0.0, np.inf], np.float32), "empty": np.zeros((0, 3)),
        "turned": np.arange(6.0).reshape(2, 3).T, "part": np.arange(10.0)[::2],
        "key": jax.random.key(3), "other key": jax.random.key(3, impl="rbg"),
        "third key": jax.random.key(3, impl="unsafe_rbg"),
        "keys": jax.random.split(jax.random.key(0), (2, 3)),
        "no keys": jax.random.split(jax.random.key(0), 0),
        "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
        "many axes": np.ones((1,) * 31), "too many axes": np.ones((1,) * 33),
        "spread": jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(
            jax.sharding.Mesh(jax.devices("cpu"), ("d",)), jax.sharding.PartitionSpec("d"))),
    }  # fmt: skip
    kinds = "bool float128 complex64 complex128 >f4 >i8 M8[s] m8[s] U3 S3 O i4,f4"
    for kind in [*kinds.split(), *(f"{k}{n}" for k in "iuf" for n in (1, 2, 4, 8))]:
        try:
            found[f"np {kind}"] = np.arange(4).astype(kind)
        except TypeError:
            continue  # float8 of NumPy; float128 of Windows.
    short = [kind for kind in vars(ml_dtypes).values() if isinstance(kind, type)]
    for kind in {kind for kind in short if kind not in (ml_dtypes.finfo, ml_dtypes.iinfo)}:
        found[f"np {kind.__name__}"] = np.arange(4).astype(kind)
    with precision.float64():
        found["wide floats"], found["wide numbers"] = jnp.arange(3) / 3, jnp.array([2**40, -1])
        found["wide complex"] = jnp.array([1j / 3])
    return found


LEAVES = leaves()
LOST = {
    "too much", "word", "bytes", "object", "masked", "shape", "too many axes", "np float128",
    "np >f4", "np >i8", "np M8[s]", "np m8[s]", "np U3", "np S3", "np O", "np i4,f4",
}  # fmt: skip
FOLDERS = {"complex", "np complex64", "np complex128", "wide complex", "np float8_e4m3fn"}


def described(leaf):
    """Type, dtype, shape and bits of a leaf."""
    kind = "on a device" if isinstance(leaf, jax.Array) else type(leaf).__name__
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return kind, leaf.dtype, np.asarray(jax.random.key_data(leaf)).tobytes()
    array = np.asarray(leaf)
    return kind, array.dtype, array.shape, array.tobytes()


@fast
@pytest.mark.parametrize("place", PLACES)
def test_every_leaf_is_restored_exactly_or_refused_before_it_is_written(tmp_path, place):
    """What is refused leaves the older checkpoint as it was."""
    kept, refused = {"leaf": jnp.ones(3), "other": jnp.zeros(2)}, dict[str, str]()
    for number, (name, leaf) in enumerate(LEAVES.items()):
        path = tmp_path / f"{number}" / place
        tree = {"leaf": leaf, "other": jnp.zeros(2)}
        persist.save(path, kept)
        try:
            persist.save(path, tree)
        except ValueError as error:
            same(persist.restore(path, kept), kept)
            refused[name] = str(error)
            continue
        found = persist.restore(path, tree)
        assert described(found["leaf"]) == described(leaf), name
        if isinstance(leaf, jax.Array):
            assert found["leaf"].sharding == leaf.sharding, name
            like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            again = persist.restore(path, {"leaf": like, "other": jnp.zeros(2)})["leaf"]
            assert described(again) == described(leaf), name
        assert [entry.name for entry in path.parent.iterdir()] == [place]
    assert all("leaf is" in text for text in refused.values())
    odd = LEAVES.keys() & LOST
    odd |= FOLDERS if place == PLACES[0] else set()
    ordinary = LEAVES.keys() - LOST - FOLDERS - {f"np {kind}" for kind in vars(ml_dtypes)}
    assert odd <= refused.keys()
    assert not refused.keys() & (ordinary | {"np bfloat16"})


NAMES = [
    "", ".", "..", "/", "a", "a/", "a//", "a/b", "a/0", "../a", "%", "%2F", "a%2F", "0", "é",
    "a\u0301", "\0", "\n", '"', "\\", "n" * 3000, "manifest.json", "_METADATA", "d",
]  # fmt: skip


@fast
@pytest.mark.parametrize("place", PLACES)
def test_names_are_kept_apart(tmp_path, place):
    tree = {name: np.full(2, number) for number, name in enumerate(NAMES)}
    persist.save(tmp_path / place, tree)
    same(persist.restore(tmp_path / place, tree), tree)
    one, two = np.ones(2), np.zeros(2)
    for wrong, message in [
        ({"a.b": one, "a": {"b": two}}, r"two leaves are called a\.b"),
        ({"a": [one], "a.0": two}, r"two leaves are called a\.0"),
        ({"a\ud800": one}, r"a\\ud800 is not a name"),
    ]:
        with pytest.raises(ValueError, match=message):
            persist.save(tmp_path / place, wrong)
        same(persist.restore(tmp_path / place, tree), tree)
    metadata = {"__metadata__": one}
    if place == "model":
        persist.save(tmp_path / place, metadata)
        same(persist.restore(tmp_path / place, metadata), metadata)
    else:
        with pytest.raises(ValueError, match="safetensors files reserve the name __metadata__"):
            persist.save(tmp_path / place, metadata)


@fast
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tree", [{}, {"a": None}, [np.zeros((0, 2))], np.ones(2), 3])
def test_trees_of_little(tmp_path, place, tree):
    persist.save(tmp_path / place, tree)
    found = persist.restore(tmp_path / place, tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert [*map(described, jax.tree.leaves(found))] == [*map(described, jax.tree.leaves(tree))]


@fast
def test_traced_leaves_and_settings_of_two_meanings(tmp_path):
    jax.jit(lambda x: refused(tmp_path, {"x": x}, {}, "x is float32 of rank 1 without values"))(
        jnp.ones(2)
    )
    circular = {}
    circular["itself"] = circular
    deep = []
    for _ in range(100_000):
        deep = [deep]
    long = "n" * (1 << 24)
    for settings in ({1: "a", "1": "b"}, circular, {"a": deep}, {"n": 10**5000}, {"a": {1, 2}}):
        refused(tmp_path, {}, settings, "settings must be JSON")
    refused(tmp_path, {}, {"long": long}, "names and settings take")
    refused(tmp_path, {long: np.ones(2)}, {}, "names and settings take")
    assert list(tmp_path.iterdir()) == []


def refused(folder, tree, settings, message):
    for place in PLACES:
        with pytest.raises(ValueError, match=message):
            persist.save(folder / place, tree, settings)


GOOD = {"dtype": "float32", "shape": [5], "crc32": 7}
ENTRIES = [
    None, 3, "float32", [], {}, [GOOD], {**GOOD, "more": 1}, {"dtype": "float32", "shape": [5]},
    *({**GOOD, "dtype": dtype} for dtype in (None, 3, ["float32"])),
    *({**GOOD, "shape": shape} for shape in (None, 5, "5", [5.0], ["5"], [-5], [[5]], [True])),
    *({**GOOD, "crc32": crc} for crc in (None, 7.0, "7", -7, [7], True)),
]  # fmt: skip


@fast
@pytest.mark.parametrize("place", PLACES)
def test_a_manifest_that_was_changed_is_named(tmp_path, place):
    path = tmp_path / place
    tree = {"bias": np.ones(5, np.float32)}
    persist.save(path, tree)
    whole = persist.manifest(path)
    for entry in ENTRIES:
        write_manifest(path, tree, json.dumps(whole | {"leaves": {"bias": entry}}))
        with pytest.raises(ValueError, match="damaged: its manifest describes bias by"):
            persist.restore(path, tree)
    escape = {"a\x1b[2J" + "b" * 5000: GOOD, "bias": whole["leaves"]["bias"]}
    write_manifest(path, tree, json.dumps(whole | {"leaves": escape}))
    with pytest.raises(ValueError, match=r"it has a\\x1b.*besides") as told:
        persist.restore(path, tree)
    assert len(str(told.value)) < 500
    for text in ("[" * 100_000, "9" * 5000, '{"leaves": {}, "leaves": {}}', "{", "nothing"):
        write_manifest(path, tree, text)
        with pytest.raises(ValueError, match="damaged: its manifest is no JSON"):
            persist.restore(path, tree)


def write_manifest(path, tree, text):
    if path.is_dir():
        (path / "manifest.json").write_text(text)
    else:
        path.write_bytes(safetensors.numpy.save(tree, {"wdjax": text}))


@fast
def test_files_of_others_are_left_alone(tmp_path):
    theirs = tmp_path / "theirs.safetensors"
    theirs.write_bytes(safetensors.numpy.save({"w": np.ones(2, np.float32)}))
    before = theirs.read_bytes()
    with pytest.raises(ValueError, match="exists and is not a checkpoint"):
        persist.save(theirs, {"w": np.ones(2)})
    assert theirs.read_bytes() == before
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "manifest.json").write_text('{"name": "of a web application"}')
    with pytest.raises(ValueError, match="exists and is not a checkpoint"):
        persist.save(tmp_path / "page", {"w": np.ones(2)})
    assert len([*(tmp_path / "page").iterdir()]) == 1
    backup = tmp_path / "run.old"
    for folder in (tmp_path / "run", backup):
        persist.save(folder, {"w": np.ones(2)})
    persist.save(tmp_path / "run", {"w": np.zeros(2)})
    assert persist.restore(backup, {"w": np.ones(2)})["w"].tolist() == [1, 1]
    (tmp_path / "link").symlink_to("run")
    persist.save(tmp_path / "link", {"w": np.full(2, 3)})
    assert (tmp_path / "link").is_symlink()
    assert persist.restore(tmp_path / "run", {"w": np.zeros(2, int)})["w"].tolist() == [3, 3]


@fast
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", ["fsync", "rename", "replace", "mkdir", "open", "unlink"])
def test_whichever_call_fails_a_checkpoint_stays(tmp_path, monkeypatch, place, call):
    """The first, the second, ... of its kind: the older one or the newer is there, and no other."""
    plain, failed = getattr(os, call), 0
    older, newer = {"w": np.zeros(300)}, {"w": np.ones(300)}
    persist.save(tmp_path / place, older)
    for number in range(40):
        calls = []

        def failing(*arguments, calls=calls, number=number, **options):
            calls.append(arguments)
            if len(calls) == number + 1:
                raise OSError(28, "No space left on device")
            return plain(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                persist.save(tmp_path / place, newer)
            except (OSError, ValueError):
                failed += 1
        found = persist.restore(tmp_path / place, older)["w"]
        assert found.tolist() in (older["w"].tolist(), newer["w"].tolist())
        persist.save(tmp_path / place, older)
        assert [path.name for path in tmp_path.iterdir()] == [place]
        if len(calls) <= number:
            break
    assert failed or call in ("rename", "mkdir")


def together(work, count):
    """What threads that do the same raise."""
    wrong = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=guarded, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return wrong


@fast
def test_threads_save_to_folders_of_their_own(tmp_path):
    def work(number):
        for turn in range(4):
            tree = {"a": np.full(4, 10.0 * number + turn)}
            persist.save(tmp_path / str(number), tree)
            same(persist.restore(tmp_path / str(number), tree), tree)

    assert together(work, 4) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


@fast
def test_of_threads_that_save_to_one_place_one_writes_at_a_time(tmp_path):
    for place in PLACES:
        saved = []

        def work(number, place=place, saved=saved):
            for _ in range(5):
                persist.save(tmp_path / place, {"a": np.full(1000, number)})
                saved.append(number)

        wrong = together(work, 4)
        assert all("in use by process" in str(error) for error in wrong)
        found = persist.restore(tmp_path / place, {"a": np.zeros(1000, int)})["a"]
        assert found.min() == found.max()
        assert found[0] in saved
    assert {path.name for path in tmp_path.iterdir()} == set(PLACES)


FULL = """
import os, sys
import numpy as np
from wdjax.files import persist

def full(path, *arguments, make=os.mkdir, **options):
    if "orbax" in str(path):
        raise OSError(28, "No space left on device")
    return make(path, *arguments, **options)

os.mkdir = full
try:
    persist.save(sys.argv[1], {"w": np.ones(3)})
except OSError:
    print("told")
"""


def test_a_process_whose_save_failed_ends(tmp_path):
    """And does not wait for threads that wait for the folder that could not be made."""
    command = [sys.executable, "-c", FULL, tmp_path / "run"]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout
    assert said == b"told\n"


def searched(checkpoint, callback=None):
    model, x = mlp(), jax.random.uniform(jax.random.key(1), (6, 4))
    return wdjax.search(
        attacks.PGD(steps=30), model, x, jnp.argmax(model(x), 1), eps=0.1, checkpoint=checkpoint,
        callback=callback,
    )  # fmt: skip


@fast
def test_searches_in_threads_have_a_checkpoint_each(tmp_path):
    found = {}

    def work(number):
        found[number] = searched(tmp_path / str(number))

    whole = searched(None)
    assert together(work, 3) == []
    for number in range(3):
        same(found[number], whole)


SEARCH = """
import sys
sys.path.insert(0, sys.argv[1])
import test_persist

def wait(progress):
    print("ready", flush=True)
    sys.stdin.readline()

test_persist.searched(sys.argv[2], wait)
"""


def test_one_process_at_a_time_goes_on_from_a_checkpoint(tmp_path):
    """And one that was killed is no obstacle to the next."""
    command = [sys.executable, "-c", SEARCH, Path(__file__).parent, tmp_path / "run"]
    whole = searched(None)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"ready\n"
        named = f"in use by process {other.pid} on {socket.gethostname()}"
        with pytest.raises(ValueError, match=named):
            searched(tmp_path / "run")
        with pytest.raises(ValueError, match=named):
            persist.save(tmp_path / "run", {"w": np.ones(2)})
        other.kill()
    inner = []

    def again(progress):
        if not inner:
            with pytest.raises(ValueError, match="in use by process") as told:
                searched(tmp_path / "run")
            inner.append(told)

    same(searched(tmp_path / "run", again), whole)
    assert inner
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
