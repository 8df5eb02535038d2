"""ONNX files against onnxruntime: whole nets, single operators, and what is refused."""

import csv
import itertools

import hostile_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import convert
from wdjax.checks import independence
from wdjax.models import layers

onnx = pytest.importorskip("onnx", reason="ONNX files need the onnx package")
onnxruntime = pytest.importorskip("onnxruntime", reason="the reference is onnxruntime")


def gap(ours, theirs):
    """The largest difference, relative to the largest output."""
    return np.max(np.abs(np.asarray(ours) - theirs)) / np.max(np.abs(theirs))


def runtime(path, samples):
    """Outputs of onnxruntime, one sample after another: ``[n, ...]`` in the file's layout."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return np.concatenate([session.run(None, {name: sample[None]})[0] for sample in samples])


def competition(shared):
    """The files of the verification competition."""
    folder = shared / "data" / "vnn"
    with (folder / "instances.csv").open() as file:
        rows = list(csv.DictReader(file))
    return sorted({folder / row["benchmark"] / row["onnx"] for row in rows})


def test_nets_of_the_competition(shared):
    """All of them give what onnxruntime gives, to 2e-5 on 100 inputs, in both layouts.

    Both compute in float32: on some processors they differ by 1e-5 at most, on others by 1.1e-5.
    """
    found = competition(shared)
    assert len(found) == 35
    rng = np.random.default_rng(0)
    for path in found:
        for layout in ("NCHW", "NHWC"):
            converted = convert.load_onnx(path, layout=layout)
            shape = converted.report.file_shape[1:]
            x = rng.uniform(size=(100, *shape)).astype(np.float32)
            ours = x.transpose(0, 2, 3, 1) if layout == "NHWC" and x.ndim == 4 else x
            assert ours.shape[1:] == converted.input_shape
            assert gap(jax.jit(converted.model)(ours), runtime(path, x)) <= 2e-5, path
            proved = independence.proof(converted.model, ours.shape[1:], jnp.dtype(jnp.float32))
            assert proved.alone, path
            assert proved.alike, path
            assert converted.report.parity <= 1e-5


def written(path, nodes, tensors=(), shape=("n", 4)):
    """A file of nodes ``(operator, inputs, outputs, attributes)`` from x to y."""
    make = onnx.helper
    given = [onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in dict(tensors).items()]
    graph = make.make_graph(
        [make.make_node(one[0], one[1].split(), one[2].split(), **dict(one[3:])) for one in nodes],
        "net",
        [make.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [make.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        given,
    )
    versions = [make.make_opsetid("", 20)]
    return make.make_model(graph, opset_imports=versions, ir_version=9)


def changed(model, change):
    change(model)
    return model


def outside(place):
    """The weights of a product, said to be stored elsewhere."""

    def change(model):
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = 1
        tensor.external_data.add(key="location", value=place)

    return change


def series(operator, count, **attributes):
    names = ["x", *(f"a{i}" for i in range(1, count)), "y"]
    twice = operator == "Concat"
    return [
        (operator, f"{one} {one}" if twice else one, other, *attributes.items())
        for one, other in itertools.pairwise(names)
    ]


W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
PRODUCT = [("MatMul", "x w", "y")]
AXES, ONE = np.asarray([1]), np.asarray([0])


class Nested:
    """Graphs within attributes within nodes within graphs, a thousand times."""

    def __init__(self, path):
        self.content = b""

    def SerializeToString(self):  # noqa: N802  As protobuf calls it.
        for number in (1, 6, 5) * 1000 + (1, 7):
            self.content = bytes([8 * number + 2]) + varint(len(self.content)) + self.content
        return self.content


def varint(value):
    """A length, as protobuf writes it."""
    digits = []
    while value > 127:
        digits.append(value % 128 + 128)
        value //= 128
    return bytes([*digits, value])


HOSTILE = {
    "a cycle": (lambda p: written(p, [("Add", "x b", "a"), ("Relu", "a", "b"), ("Relu", "b", "y")]),
                "no tensor, input or earlier node gives"),
    "its own input": (lambda p: written(p, [("Add", "x y", "y")]), "earlier node gives"),
    "a missing tensor": (lambda p: written(p, PRODUCT), "no tensor, input or earlier node gives"),
    "no such output": (lambda p: written(p, [("Relu", "x", "z")]), "no node gives the output"),
    "a name twice": (lambda p: written(p, [("Relu", "x", "y"), ("Tanh", "x", "y")]), "is taken"),
    "two tensors of one name": (
        lambda p: changed(written(p, PRODUCT, {"w": W}), lambda m: m.graph.initializer.append(
            m.graph.initializer[0])), "two tensors are called"),
    "NaN": (lambda p: written(p, PRODUCT, {"w": W * np.nan}), "holds NaN or infinity"),
    "infinity": (lambda p: written(p, PRODUCT, {"w": W / 0}), "holds NaN or infinity"),
    "giant tensor": (lambda p: changed(written(p, PRODUCT, {"w": W}),
        lambda m: m.graph.initializer[0].dims.__setitem__(0, 1 << 40)), "bytes for"),
    "negative size": (lambda p: changed(written(p, PRODUCT, {"w": W}),
        lambda m: m.graph.initializer[0].dims.__setitem__(0, -4)), "has the shape"),
    "a folder above": (lambda p: changed(written(p, PRODUCT, {"w": W}), outside("../secret")),
        "must lie beside the file"),
    "an absolute path": (lambda p: changed(written(p, PRODUCT, {"w": W}), outside("/etc/passwd")),
        "must lie beside the file"),
    "a file that is absent": (lambda p: changed(written(p, PRODUCT, {"w": W}), outside("gone")),
        "no file beside"),
    "deep nesting": (Nested, "nested deeper"),
    "many nodes": (lambda p: written(p, series("Relu", 7000)), "more than 6000"),
    "doubling": (lambda p: written(p, series("Concat", 40, axis=1)), "more than"),
    "a giant input": (lambda p: written(p, [("Relu", "x", "y")], shape=("n", 1 << 20, 1 << 20)),
        "sizes must be usual ones"),
    "an input without shape": (lambda p: written(p, [("Relu", "x", "y")], shape=None),
        "no declared shape"),
    "a giant expansion": (lambda p: written(p, [("Expand", "x s", "y")],
        {"s": np.asarray([1 << 30, 1, 4])}), "more than"),
    "a giant constant": (lambda p: written(p, [("ConstantOfShape", "s", "c"), ("Add", "x c", "y")],
        {"s": np.asarray([1 << 40])}), "more than"),
    "a giant range": (lambda p: written(p, [("Range", "a b c", "r"), ("Gather", "x r", "y")],
        {"a": np.int64(0), "b": np.int64(1 << 50), "c": np.int64(1)}), "more than"),
    "giant pads": (lambda p: written(p, [("Pad", "x s", "y")],
        {"s": np.asarray([0, 1 << 40, 0, 0])}), "more than"),
    "giant windows": (lambda p: written(p, [("Unsqueeze", "x a", "u"), ("MaxPool", "u", "v",
        ("kernel_shape", [10**6]), ("pads", [10**6 - 1] * 2)), ("Flatten", "v", "y")],
        {"a": AXES}), "windows .* have more than"),
    "a giant sum of products": (lambda p: written(p, [("Einsum", "x x x x", "z",
        ("equation", "ab,ac,ad,ae->abcde")), ("Flatten", "z", "y")], shape=("n", 200)),
        "more than"),
    "samples that mix": (lambda p: written(p, [("ReduceMean", "x a", "m"), ("Sub", "x m", "y")],
        {"a": ONE}), "depends on the rest of its batch"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_refused_soon(tmp_path, what):
    make, said = HOSTILE[what]
    path = tmp_path / "net.onnx"
    with np.errstate(divide="ignore", invalid="ignore"):
        path.write_bytes(make(path).SerializeToString())
    cost = hostile_files.attempt(convert.load_onnx, path)
    assert cost["kind"] == "ValueError", cost
    assert cost["seconds"] < 20, cost
    assert cost["mb"] < 1000, cost
    with pytest.raises(ValueError, match=said):
        convert.load_onnx(path)


def test_every_truncation_is_refused(tmp_path):
    content = written(tmp_path, PRODUCT, {"w": W}).SerializeToString()
    path = tmp_path / "net.onnx"
    for end in range(0, len(content), 3):
        path.write_bytes(content[:end])
        with pytest.raises(ValueError):  # noqa: PT011  Many sentences, each with the path.
            convert.load_onnx(path)


def test_of_equal_entries_the_first_one_gets_the_gradient(tmp_path):
    """As in PyTorch; the gradient of a maximum never divides by how many there are."""
    x = jnp.asarray([[1.0, 3, 2, 3]])
    path = tmp_path / "net.onnx"
    for name, sign in (("ReduceMax", 1), ("ReduceMin", -1)):
        path.write_bytes(written(path, [(name, "x a", "y")], {"a": AXES}).SerializeToString())
        model = convert.load_onnx(path).model
        slope = jax.grad(lambda x, model=model: model(x).sum())(sign * x)
        np.testing.assert_array_equal(slope, [[0, 1, 0, 0]])
    image = jnp.asarray([[1.0, 3, 0], [3, 2, 0], [9, 9, 9]])[None, :, :, None]
    slope = jax.grad(lambda x: layers.max_pool(x, 2).sum())(image)
    np.testing.assert_array_equal(slope[0, :, :, 0], [[0, 1, 0], [0, 0, 0], [0, 0, 0]])
    nodes = [("MaxPool", "x", "v", ("kernel_shape", [2, 2]), ("strides", [2, 2])),
             ("Flatten", "v", "y")]  # fmt: skip
    path.write_bytes(written(path, nodes, shape=("n", 1, 3, 3)).SerializeToString())
    model = convert.load_onnx(path).model
    np.testing.assert_array_equal(jax.grad(lambda x: model(x).sum())(image), slope)
