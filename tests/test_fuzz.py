"""Files made by chance: each is read as others read it, or refused by a ValueError, soon.

Every reader gets a share of the seconds in ``WDJAX_FUZZ`` (40 by default) and goes
through the same files in the same order as far as that reaches.
"""

import io
import json
import os
import re
import shutil
import struct
import time
import zipfile

import hostile_files
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from wdjax import data, models
from wdjax.files import onnx_file, persist, torch_file, vnnlib_file
from wdjax.models import convert

SECONDS = min(float(os.environ.get("WDJAX_FUZZ", 40)), 1000)
SHARES = {
    "npz": 0.1, "safetensors": 0.1, "manifest": 0.15, "folder": 0.15, "torch": 0.25, "onnx": 0.08,
    "net": 0.08, "vnnlib": 0.04,
}  # fmt: skip
LEAST = 20
"""Files of each reader, however slow the machine."""

NUMBERS = [0, 1, 7, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1]


def turns(reader):
    """Random numbers' generators, one a file, while the reader's time lasts."""
    until = time.monotonic() + SECONDS * SHARES[reader]
    seed = 0
    while seed < LEAST or time.monotonic() < until:
        yield np.random.default_rng([len(reader), seed])
        seed += 1


class Tally:
    """What became of the files of a reader."""

    def __init__(self):
        self.read, self.refused = 0, 0

    def attempt(self, read, *arguments):
        """What was read, or None where it was refused as it should be."""
        kept = []
        cost = hostile_files.attempt(lambda: kept.append(read(*arguments)))
        which = f"attempt {self.read + self.refused} of this reader: {cost}"
        assert cost["kind"] in ("loaded", "ValueError"), which
        assert cost["seconds"] < 3, which
        assert cost["mb"] < 300, which
        assert len(cost["said"]) < 1500, which
        assert cost["said"].replace("\n", "").isprintable(), which
        self.read += bool(kept)
        self.refused += not kept
        return kept[0] if kept else None


def mutated(content, rng):
    """The same bytes but for a few changes."""
    content = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(len(content) + 1))
        kind = rng.integers(8)
        if kind == 0:
            del content[place:]
        elif kind == 1:
            del content[place : place + int(rng.integers(1, 40))]
        elif kind == 2:
            content[place:place] = rng.bytes(int(rng.integers(1, 40)))
        elif kind == 3:
            content[place:place] = content[place : place + int(rng.integers(1, 200))]
        elif kind == 4:
            form = str(rng.choice(["<H", "<L", "<Q"]))
            number = int(rng.choice(np.array(NUMBERS, object))) % (1 << 8 * struct.calcsize(form))
            content[place : place + struct.calcsize(form)] = struct.pack(form, number)
        elif kind == 5 and (digits := [*re.finditer(rb"\d+", bytes(content))]):
            found = digits[rng.integers(len(digits))]
            number = rng.choice(np.array([*NUMBERS, -1, "9" * 300, "1e9", "0.5", "NaN"], object))
            content[found.start() : found.end()] = str(number).encode()
        elif place < len(content):
            content[place] ^= 1 << rng.integers(8)
    return bytes(content)


def directory(content, rng):
    """A zip archive in one of whose records a field is another."""
    records = {b"PK\x01\x02": (4, 46), b"PK\x03\x04": (4, 30), b"PK\x05\x06": (4, 22)}
    signature = list(records)[rng.integers(3)]
    places = [found.start() for found in re.finditer(re.escape(signature), content)]
    if not places:
        return content
    start = places[rng.integers(len(places))] + int(rng.integers(*records[signature]))
    form = str(rng.choice(["<B", "<H", "<L"]))
    number = int(rng.choice(np.array(NUMBERS, object))) % (1 << 8 * struct.calcsize(form))
    changed = bytearray(content)
    changed[start : start + struct.calcsize(form)] = struct.pack(form, number)
    return bytes(changed)


def rezipped(content, rng, names=r".*"):
    """A zip archive one of whose entries was changed before it was packed, with its checksum."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        entries = [entry for entry in old.infolist() if re.search(names, entry.filename)]
        chosen = entries[rng.integers(len(entries))]
        for entry in old.infolist():
            inner = old.read(entry)
            new.writestr(entry, mutated(inner, rng) if entry is chosen else inner)
    return file.getvalue()


def same(ours, theirs):
    """Equal arrays, where not a number equals itself."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(ours, theirs)


def samples(rng):
    """An archive of samples that is as it should be."""
    n = int(rng.integers(1, 5))
    shape = (n, *map(int, rng.integers(1, 4, rng.integers(1, 4))))
    x = (rng.random(shape) * 255).astype(np.uint8)
    kind = str(rng.choice(["u1", "<f2", "<f4", ">f8"]))
    x = x if kind == "u1" else (x / 255).astype(kind)
    y = rng.integers(0, 9, n).astype(str(rng.choice(["u1", "<i4", ">i8"])))
    file = io.BytesIO()
    save = np.savez if rng.integers(2) else np.savez_compressed
    save(file, x=np.asfortranarray(x) if rng.integers(2) else x, y=y, other=np.ones(2))
    return file.getvalue()


def test_archives_of_samples(tmp_path):
    """As NumPy reads them, but for what is no samples."""
    path, tally = tmp_path / "d.npz", Tally()
    for rng in turns("npz"):
        good = samples(rng)
        change = [mutated, directory, rezipped, lambda content, rng: content][rng.integers(4)]
        path.write_bytes(change(good, rng))
        found = tally.attempt(data.load_npz, path)
        if found is not None:
            with np.load(path, allow_pickle=False) as archive:
                again = data.as_dataset(archive["x"], archive["y"])
            same(found.x, again.x)
            same(found.y, again.y)
    assert tally.read >= LEAST / 5
    assert tally.refused >= LEAST / 5


KINDS = ["f8", "f4", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "bfloat16"]


def tensors(rng):
    """Arrays of many dtypes and shapes by their names."""
    found = {}
    for number in range(rng.integers(1, 5)):
        shape = tuple(map(int, rng.integers(0, 4, rng.integers(0, 4))))
        kind = str(rng.choice(KINDS))
        dtype = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
        found[f"layer{number}.w"] = rng.integers(0, 100, shape).astype(dtype)
    return found


def header_changed(content, rng):
    """A safetensors file with one value of its header replaced, and the length made right."""
    length = int.from_bytes(content[:8], "little")
    header = tampered(json.loads(content[8 : 8 + length]), rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


JUNK = [
    None, True, 0, -1, 1.5, 1e300, 1 << 40, 1 << 70, "", "F32", "float32", "a\x1b[2J", "n" * 5000,
    [], {}, [[]], [2, 3], [1 << 40, 1 << 40], {"dtype": "F32"}, {"shape": [2]},
]  # fmt: skip


def tampered(value, rng):
    """JSON in which one value, wherever it is, was replaced, added or removed."""
    places = []

    def walk(inner):
        for key in inner if isinstance(inner, dict) else range(len(inner)):
            places.append((inner, key))
            if isinstance(inner[key], dict | list):
                walk(inner[key])

    walk(value)
    if not places:
        return JUNK[rng.integers(len(JUNK))]
    inner, key = places[rng.integers(len(places))]
    junk = JUNK[rng.integers(len(JUNK))]
    kind = rng.integers(4)
    if kind == 0:
        del inner[key]
    elif kind == 1 and isinstance(inner, dict):
        inner["a" * int(rng.integers(1, 9))] = junk
    elif kind == 2 and type(inner[key]) in (int, float):
        inner[key] += int(rng.choice([-1, 1, 8, 1 << 33]))
    else:
        inner[key] = junk
    return value


def test_safetensors(tmp_path):
    """As PyTorch reads them."""
    load = pytest.importorskip("safetensors.torch").load
    path, tally = tmp_path / "m.safetensors", Tally()
    for rng in turns("safetensors"):
        good = safetensors.numpy.save(tensors(rng), {"made": "by chance"})
        change = [mutated, header_changed, lambda content, rng: content][rng.integers(3)]
        path.write_bytes(change(good, rng))
        tally.attempt(torch_file.read_metadata, path)
        found = tally.attempt(torch_file.read_safetensors, path)
        if found is not None:
            theirs = load(path.read_bytes())
            assert found.keys() == theirs.keys()
            for name, tensor in theirs.items():
                same(found[name], numpy_of(tensor))
    assert tally.read >= LEAST / 5
    assert tally.refused >= LEAST / 5


def numpy_of(tensor):
    """A tensor of PyTorch as an array."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


ARCHITECTURE = {"family": "mlp", "options": {"sizes": (3, 2, 2)}, "normalize": ""}


def checkpoint(path):
    """A model, saved."""
    model = models.mlp((3, 2, 2), key=jax.random.key(0))
    persist.save_model(path, model, ARCHITECTURE)
    return model


def equal(found, model):
    assert found.func == model.func
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        same(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("place", ["model.safetensors", "model"])
def test_manifests(tmp_path, place):
    """Whatever is there instead, a checkpoint is the model that was saved, or refused.

    Only a manifest that was made anew, with its checksum, may describe another model.
    """
    path, tally = tmp_path / place, Tally()
    model = checkpoint(path)
    manifest = path if path.is_file() else path / "manifest.json"
    whole = manifest.read_bytes()
    head = int.from_bytes(whole[:8], "little") + 8 if path.is_file() else len(whole)
    for rng in turns("manifest"):
        kind, content = rng.integers(3), whole
        if kind == 0:
            content = mutated(whole[:head], rng) + whole[head:]
        elif kind == 1 and path.is_file():
            content = header_changed(whole, rng)
        elif kind == 1:
            content = json.dumps(tampered(json.loads(whole), rng)).encode()
        elif kind == 2:
            place = rng.integers(head)
            content = bytearray(whole)
            content[place] ^= 1 << rng.integers(8)
        manifest.write_bytes(content)
        found = tally.attempt(persist.load_model, path)
        if found is not None:
            equal(found, model)
        tally.attempt(persist.manifest, path)
    assert tally.refused >= LEAST / 5


def test_folders_of_orbax(tmp_path):
    """Any of their files."""
    tally, tree = Tally(), {"w": np.arange(60, dtype=np.float32).reshape(5, 12)}
    persist.save(tmp_path / "whole", tree)
    files = sorted(path for path in (tmp_path / "whole").rglob("*") if path.is_file())
    for number, rng in enumerate(turns("folder")):
        # A copy each, since TensorStore remembers what it read from a path.
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", copy)
        chosen = copy / files[rng.integers(len(files))].relative_to(tmp_path / "whole")
        content = chosen.read_bytes()
        if rng.integers(2) and content.startswith(b"{"):
            chosen.write_text(json.dumps(tampered(json.loads(content), rng)))
        else:
            chosen.write_bytes(mutated(content, rng))
        found = tally.attempt(persist.restore, copy, tree)
        if found is not None:
            same(found["w"], tree["w"])
        shutil.rmtree(copy)
    assert tally.refused >= LEAST / 5


def views(torch, rng):
    """A few tensors that share a storage, with any strides and bits."""
    kinds = (
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128"
    )
    dtype = getattr(torch, str(rng.choice(kinds.split())))
    count = int(rng.integers(1, 40))
    values = torch.from_numpy(rng.integers(1, 90, count))
    base = values.to(dtype) * (1 + 2j) if dtype.is_complex else values.to(dtype)
    found, part = [], rng.integers(2)  # A storage is saved under one type.
    for _ in range(rng.integers(1, 4)):
        shape = tuple(map(int, rng.integers(0, 5, rng.integers(0, 4))))
        steps = tuple(map(int, rng.integers(0, 6, len(shape))))
        last = sum((size - 1) * step for size, step in zip(shape, steps) if size)
        if 0 not in shape and last >= count:
            continue
        offset = int(rng.integers(count - max(last, 0))) if 0 not in shape else 0
        view = base.as_strided(shape, steps, offset)
        if dtype.is_complex:
            view = view.conj() if rng.integers(2) else view
            view = view.imag if part else view
        if dtype != torch.bool and rng.integers(2):
            view = torch._neg_view(view)
        if rng.integers(4) == 0:
            view = torch.nn.Parameter(view, requires_grad=False)
        found.append(view)
    return found


def tree(torch, rng, depth=0):
    """Nested containers of tensors and plain values."""
    kind = rng.integers(8 if depth < 3 else 4)
    if kind < 3:
        return views(torch, rng)
    if kind == 3:
        plain = [None, True, 3, -(1 << 62), 2.5, "text", b"bytes", "é", torch.Size([2, 3])]
        return plain[rng.integers(len(plain))]
    inner = [tree(torch, rng, depth + 1) for _ in range(rng.integers(0, 4))]
    if kind == 4:
        return tuple(inner)
    return inner if kind == 5 else {f"part{n}": value for n, value in enumerate(inner)}


def agree(torch, ours, theirs):
    """What this reader and PyTorch found is the same."""
    if isinstance(theirs, torch.Tensor):
        theirs = numpy_of(theirs)
        same(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            agree(torch, ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        for one, other in zip(ours, theirs, strict=True):
            agree(torch, one, other)
    else:
        assert ours == theirs or (ours != ours and theirs != theirs)


@pytest.mark.filterwarnings("ignore")
def test_files_of_pytorch(tmp_path):
    """As PyTorch reads them, wherever both do, and always where PyTorch wrote them."""
    torch = pytest.importorskip("torch", reason="the reader is compared with torch.load")
    path, tally = tmp_path / "m.pt", Tally()
    for rng in turns("torch"):
        zipped, value = bool(rng.integers(4)), {"first": tree(torch, rng)}
        protocol = int(rng.choice([2, 2, 2, 3, 4, 5]))
        torch.save(
            value, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol
        )  # fmt: skip
        agree(torch, torch_file.read(path), value)
        if protocol == 2:  # The only one that PyTorch reads so.
            agree(torch, torch_file.read(path), torch.load(path, weights_only=True))
        content, kind = path.read_bytes(), rng.integers(4)
        if kind and zipped:
            change = [rezipped, directory, mutated][kind - 1]
            content = change(content, rng)
        elif kind:
            content = mutated(content, rng)
        path.write_bytes(content)
        found = tally.attempt(torch_file.read, path)
        if found is None:
            continue
        try:
            theirs = torch.load(path, weights_only=True)
        except Exception:  # PyTorch's reader raises whatever it meets.
            continue
        agree(torch, found, theirs)
    assert tally.read >= LEAST / 5
    assert tally.refused >= LEAST / 5


def small_net(onnx):
    """A classifier of images ``[n, 1, 2, 3]``, as a message of the onnx package."""
    weights = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)
    make, tensor = onnx.helper, onnx.numpy_helper.from_array
    nodes = [
        make.make_node("Flatten", ["x"], ["flat"], axis=1),
        make.make_node("Gemm", ["flat", "w", "b"], ["h"], alpha=0.5, transB=0),
        make.make_node("LeakyRelu", ["h"], ["y"], alpha=0.2),
    ]
    ends = [
        make.make_tensor_value_info(name, 1, shape)
        for name, shape in (("x", ["n", 1, 2, 3]), ("y", ["n", 4]))
    ]
    held = [tensor(weights, "w"), tensor(weights[0], "b")]
    graph = make.make_graph(nodes, "net", ends[:1], ends[1:], held)
    return make.make_model(graph, opset_imports=[make.make_opsetid("", 17)])


def test_onnx_files(tmp_path):
    """As the onnx package reads them, but for what no classifier needs."""
    onnx = pytest.importorskip("onnx", reason="ONNX files need the onnx package")
    path, tally = tmp_path / "net.onnx", Tally()
    good = small_net(onnx).SerializeToString()
    for rng in turns("onnx"):
        content = mutated(good, rng)
        path.write_bytes(content)
        found = tally.attempt(onnx_file.read, path)
        if found is not None:
            again = onnx.ModelProto.FromString(content)
            assert found.outputs == tuple(value.name for value in again.graph.output)
            for one in again.graph.initializer:
                same(found.tensors[one.name], onnx.numpy_helper.to_array(one))
    assert tally.read
    assert tally.refused


def rewired(net, rng):
    """A classifier one of whose nodes, tensors or ends is another."""
    graph = net.graph
    names = ["x", "flat", "h", "y", "w", "b", "", "nothing"]
    node = graph.node[rng.integers(len(graph.node))]
    held = graph.initializer[rng.integers(len(graph.initializer))]
    sizes = [-1, 0, 1, 2, 3, 4, 6, 1 << 31, 1 << 62]
    kind = rng.integers(7)
    if kind == 0:
        node.input[rng.integers(len(node.input))] = str(rng.choice(names))
    elif kind == 1:
        node.output[0] = str(rng.choice(names))
    elif kind == 2:
        node.op_type = str(rng.choice(["Relu", "Softmax", "Loop", "Add", "Dropout", "Conv", "No"]))
    elif kind == 3:
        held.dims[rng.integers(len(held.dims))] = int(rng.choice(sizes))
    elif kind == 4:
        held.raw_data = rng.choice([np.nan, np.inf, 1e38], 24).astype(np.float32).tobytes()
    elif kind == 5 and node.attribute:
        node.attribute[0].i, node.attribute[0].f = int(rng.choice(sizes)), float(rng.normal())
    else:
        end = (graph.input, graph.output)[rng.integers(2)][0].type.tensor_type
        end.shape.dim[rng.integers(2)].dim_value = int(rng.choice(sizes))
    return net


@pytest.mark.filterwarnings("ignore")
def test_nets_of_onnx(tmp_path):
    """What is converted has the outputs of onnxruntime, which :func:`load_onnx` compares."""
    onnx = pytest.importorskip("onnx", reason="ONNX files need the onnx package")
    path, tally = tmp_path / "net.onnx", Tally()
    plain = small_net(onnx).SerializeToString()
    for rng in turns("net"):
        content = rewired(onnx.ModelProto.FromString(plain), rng).SerializeToString()
        path.write_bytes(mutated(content, rng) if rng.random() < 0.3 else content)
        found = tally.attempt(convert.load_onnx, path)
        if found is not None:
            y = np.asarray(found.model(np.zeros((2, *found.input_shape), np.float32)))
            assert y.shape[0] == 2
    assert tally.read
    assert tally.refused


PROPERTY = """(declare-const X_0 Real) (declare-const X_1 Real) (declare-const Y_0 Real)
(declare-const Y_1 Real) (assert (<= X_0 1)) (assert (>= X_0 -1e0)) ; a box
(assert (or (and (<= X_1 0.5) (>= X_1 0)) (and (<= X_1 -2.5) (>= X_1 (- 3)))))
(assert (or (<= (+ (* 2 Y_0) 0.5) Y_1) (>= Y_1 3.0)))"""
QUERY = """(vnnlib-version <2.0>) (declare-network f (declare-input X float32 [2])
(declare-output Y float32 [2])) (assert (and (<= X[0] 1.0) (>= X[0] -1.0))) ; a box
(assert (or (and (<= X[1] 0.5) (>= X[1] 0.0)) (and (<= X[1] -2.5) (>= X[1] -3.0))))
(assert (or (<= (+ (* 2.0 Y[0]) 0.5) Y[1]) (>= Y[1] 3.0)))"""


@pytest.mark.parametrize("good", [PROPERTY, QUERY])
def test_properties_of_vnnlib(tmp_path, good):
    """What is read is boxes that are not empty, with inequalities of finite numbers."""
    path, tally = tmp_path / "p.vnnlib", Tally()
    words = re.findall(r"[()]|[^\s()]+|\s+", good)
    for rng in turns("vnnlib"):
        content = good.encode()
        if rng.random() < 0.6:
            changed = list(words)
            for _ in range(rng.integers(1, 3)):
                changed[rng.integers(len(words))] = words[rng.integers(len(words))]
            content = "".join(changed).encode()
        path.write_bytes(mutated(content, rng) if rng.random() < 0.5 else content)
        for case in tally.attempt(vnnlib_file.read, path) or ():
            assert np.all(case.lower <= case.upper)
            assert np.all(np.isfinite([case.lower, case.upper]))
            assert all(np.all(np.isfinite(a)) and np.all(np.isfinite(b)) for a, b in case.members)
    assert tally.read
    assert tally.refused
