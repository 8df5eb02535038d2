"""Random small ONNX graphs: the net that proofs are about is onnxruntime's, or it is refused."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from wdjax.proofs.real_net import RealNet  # noqa: E402

SHAPES = [(1, 6), (1, 2, 3), (1, 1, 2, 3), (1, 2, 2, 3), (1, 6, 1), (1, 1, 6)]


class Graph:
    """Random nodes in a chain; a wrong guess of a shape makes a file that nothing runs."""

    def __init__(self, rng):
        self.rng, self.nodes, self.arrays = rng, [], []
        self.shape = self.given = SHAPES[rng.integers(len(SHAPES))]
        self.value, self.before = "x", {}
        kinds = (
            self.flatten, self.squeeze, self.unsqueeze, self.reshape, self.constant, self.product,
            self.convolution, self.normalisation, self.sum, self.relu,
        )  # fmt: skip
        for _ in range(rng.integers(2, 6)):
            kinds[rng.integers(len(kinds))]()
        self.node("Flatten", [], axis=1)

    def array(self, values):
        self.arrays.append(numpy_helper.from_array(values, f"c{len(self.arrays)}"))
        return f"c{len(self.arrays) - 1}"

    def weights(self, *shape):
        return self.array(self.rng.normal(size=shape).astype(np.float32))

    def node(self, kind, more, first=False, **how):
        out = f"v{len(self.nodes)}"
        given = [*more, self.value] if first else [self.value, *more]
        self.nodes.append(helper.make_node(kind, given, [out], **how))
        self.value = out

    def flatten(self):
        axis = int(self.rng.integers(-1, len(self.shape) + 1))
        self.node("Flatten", [], axis=axis)
        end = axis if axis >= 0 else len(self.shape) + axis
        self.shape = tuple(int(np.prod(part)) for part in (self.shape[:end], self.shape[end:]))

    def squeeze(self):
        ones = [axis for axis, size in enumerate(self.shape) if size == 1]
        some = [axis for axis in ones if self.rng.random() < 0.5]
        if some:
            self.node("Squeeze", [self.array(np.array(some))])
            self.shape = tuple(np.squeeze(np.zeros(self.shape), tuple(some)).shape)

    def unsqueeze(self):
        axis = int(self.rng.integers(-1, len(self.shape) + 1))
        self.node("Unsqueeze", [self.array(np.array([axis]))])
        self.shape = tuple(np.expand_dims(np.zeros(self.shape), axis).shape)

    def reshape(self):
        sizes = [d for d in self.shape if d > 1] + [1] * int(self.rng.integers(3))
        target = [sizes[i] for i in self.rng.permutation(len(sizes))] or [1]
        self.shape = tuple(target)
        if self.rng.random() < 0.5:
            target[self.rng.integers(len(target))] = -1
        if self.rng.random() < 0.3:
            target[0] = 0
        self.node("Reshape", [self.array(np.array(target))])

    def constant(self):
        kept = [d if self.rng.random() < 0.7 else 1 for d in self.shape]
        kept = kept[int(self.rng.integers(len(kept) + 1)) :]
        kept = [1, *kept] if self.rng.random() < 0.1 else kept
        kind = ("Add", "Sub", "Mul")[self.rng.integers(3)]
        self.node(kind, [self.weights(*kept)], first=bool(self.rng.random() < 0.3))

    def product(self):
        sizes = [self.shape[-1], self.shape[0], int(np.prod(self.shape))]
        size, columns = sizes[self.rng.integers(3)], int(self.rng.integers(1, 4))
        if self.rng.random() < 0.3:
            self.node("Gemm", [self.weights(size, columns), self.weights(columns)])
            self.shape = (self.shape[0], columns)
        elif self.rng.random() < 0.5:
            self.node("MatMul", [self.weights(size, columns)])
            self.shape = (*self.shape[:-1], columns)
        else:
            size = self.shape[-2] if len(self.shape) > 1 else size
            self.node("MatMul", [self.weights(columns, size)], first=True)
            self.shape = (*self.shape[:-2], columns, *self.shape[-1:])

    def convolution(self):
        channels = self.shape[1] if len(self.shape) == 4 else 1
        pads = [int(v) for v in self.rng.integers(0, 2, 4)]
        strides = [int(v) for v in self.rng.integers(1, 4, 2)]
        kernel = [int(v) for v in self.rng.integers(1, 4, 2)]
        self.node("Conv", [self.weights(2, channels, *kernel)], pads=pads, strides=strides)
        sizes = zip(self.shape[2:], pads[:2], pads[2:], kernel, strides)
        self.shape = (
            *self.shape[:1],
            2,
            *(max((d + p + q - k) // s + 1, 1) for d, p, q, k, s in sizes),
        )

    def normalisation(self):
        channels = self.shape[1] if len(self.shape) > 1 else 1
        more = [self.weights(channels) for _ in range(3)]
        spread = self.array(self.rng.uniform(0.5, 2, channels).astype(np.float32))
        self.node("BatchNormalization", [*more, spread])

    def sum(self):
        known = [value for value, shape in self.before.items() if self.rng.random() < 0.7]
        if known:
            self.node(("Add", "Sub")[self.rng.integers(2)], known[-1:])

    def relu(self):
        self.before[self.value] = self.shape
        self.node("Relu", [])

    def save(self, path):
        ends = (("x", self.given), (self.value, [None, None]))
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, d) for name, d in ends]
        graph = helper.make_graph(self.nodes, "net", infos[:1], infos[1:], self.arrays)
        opset = [helper.make_opsetid("", 13)]
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def computed(net, x):
    """The output of the net that proofs are about, ``[n, K]``."""
    values = {net.source: x}
    for op in net.operations:
        given = [values[name] for name in op.ins]
        if op.kind == "affine":
            values[op.out] = op.map.forward(given[0]) + op.bias
        elif op.kind == "sum":
            values[op.out] = given[0] + op.sign * given[1]
        else:
            assert op.kind == "Relu"
            values[op.out] = np.maximum(given[0], 0)
    return values[net.output]


def test_a_net_is_read_as_onnxruntime_runs_it_or_refused(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "net.onnx"
    quiet, counts = onnxruntime.SessionOptions(), {"equal": 0, "refused": 0, "no net": 0}
    quiet.log_severity_level = 4
    for trial in range(1500):
        Graph(rng).save(path)
        try:
            session = onnxruntime.InferenceSession(str(path), quiet)
            shape = session.get_inputs()[0].shape
            points = rng.normal(size=(3, *shape)).astype(np.float32)
            expected = [session.run(None, {"x": point})[0] for point in points]
        except Exception:  # Its errors have no common base.
            counts["no net"] += 1
            continue
        try:
            net = RealNet(path)
        except ValueError:
            counts["refused"] += 1
            continue
        found = computed(net, points.reshape(3, -1).astype(float))
        assert found.shape == (3, net.size(net.output)), trial
        assert net.shapes[session.get_outputs()[0].name] == expected[0].shape, trial
        flat = np.stack([one.reshape(-1) for one in expected])
        np.testing.assert_allclose(found, flat, rtol=1e-3, atol=1e-3, err_msg=f"trial {trial}")
        counts["equal"] += 1
    assert counts["equal"] > 300, counts
    assert counts["refused"] > 30, counts
