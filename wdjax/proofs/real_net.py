"""The net of an ONNX file as a function of real numbers: affine maps, sums and curves.

A *curve* is a rectifier, sigmoid or hyperbolic tangent, entry by entry.

The weights are taken as the file has them. Values are flat, and a reshaped value is the value
itself. What a node may be beyond that is refused, so that no net is read as another one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from wdjax.files import onnx_file

UNIT = 2.0**-53
"""Half an ulp of 1 in float64."""
CURVES = "Relu", "Sigmoid", "Tanh"
_OLDEST = 7
"""The version of ONNX since which sums and products of two shapes are NumPy's."""


def gamma(terms: int) -> float:
    """Bounds the relative rounding of a sum of so many products, added in any order."""
    return 1.01 * (terms + 4) * UNIT


def _need(fact: Any, why: str) -> None:
    if not fact:
        raise ValueError(f"proofs are not about nets with {why}")


class Dense:
    """``w h`` for flat arrays ``[..., n]``."""

    def __init__(self, w: Any) -> None:
        self.w, self.terms = w, max(w.shape)

    def forward(self, h: Any) -> Any:
        return (h.reshape(-1, h.shape[-1]) @ self.w.T).reshape(*h.shape[:-1], -1)

    def back(self, a: Any) -> Any:
        return (a.reshape(-1, a.shape[-1]) @ self.w).reshape(*a.shape[:-1], -1)

    def absolute(self) -> Any:
        return type(self)(np.abs(self.w))


class Diagonal(Dense):
    """``w h``, entry by entry."""

    def forward(self, h: Any) -> Any:
        return h * self.w

    def back(self, a: Any) -> Any:
        return a * self.w


class Convolution(Dense):
    """A convolution of ``[I, H, W]`` by a kernel ``[O, I, kh, kw]``."""

    def __init__(self, w: Any, shape: tuple[int, ...], stride: Any, pads: Any) -> None:
        self.w, self.how, self.terms = w, (shape, stride, pads), w[0, 0].size * max(w.shape[:2])
        self.padded = shape[1] + pads[0] + pads[2], shape[2] + pads[1] + pads[3]
        self.out = [(p - k) // s + 1 for p, k, s in zip(self.padded, w.shape[2:], stride)]

    def absolute(self) -> Any:
        return Convolution(np.abs(self.w), *self.how)

    def _taps(self) -> Iterator[tuple[Any, Any]]:
        for offset in np.ndindex(*self.w.shape[2:]):
            ends = (slice(p, p + s * n, s) for p, s, n in zip(offset, self.how[1], self.out))
            yield self.w[:, :, offset[0], offset[1]], (slice(None), slice(None), *ends)

    def forward(self, h: Any) -> Any:
        shape, _, (top, left, bottom, right) = self.how
        x = np.pad(h.reshape(-1, *shape), ((0, 0), (0, 0), (top, bottom), (left, right)))
        parts = (k @ x[at].reshape(len(x), shape[0], -1) for k, at in self._taps())
        return sum(parts, np.zeros(())).reshape(*h.shape[:-1], -1)

    def back(self, a: Any) -> Any:
        columns = a.reshape(-1, len(self.w), self.out[0] * self.out[1])
        (channels, high, wide), _, (top, left, _, _) = self.how
        x = np.zeros((len(columns), channels, *self.padded))
        for k, at in self._taps():
            x[at] += (k.T @ columns).reshape(len(columns), channels, *self.out)
        return x[:, :, top : top + high, left : left + wide].reshape(*a.shape[:-1], -1)


@dataclass
class Operation:
    """``affine``: ``map h + bias``, up to ``relative |map| |h| + loose``; ``sum``: ``h + sign h'``;
    or one of ``CURVES``, which is number ``turn`` of these."""

    kind: str
    shape: tuple[int, ...]
    map: Any = None
    bias: Any = 0.0
    relative: Any = 0.0
    loose: Any = 0.0
    sign: float = 1.0
    turn: int = 0
    out: str = ""
    ins: tuple[str, ...] = ()


class RealNet:
    """The operations of an ONNX file, in its order."""

    def __init__(self, path: Any) -> None:
        graph = onnx_file.read(path)
        _need(len(graph.inputs) == len(graph.outputs) == 1, "several inputs or outputs")
        (given,), dims = graph.inputs, graph.inputs[0].shape[1:]
        _need(all(isinstance(d, int) and d > 0 for d in dims), "inputs of no fixed size")
        single = [d == 1 or isinstance(d, str) for d in given.shape[:1]]
        _need(single == [True], "inputs of several rows")
        _need(graph.opset >= _OLDEST, f"operators before version {_OLDEST} of ONNX")
        self.operations: list[Operation] = []
        self.source = given.name
        self.shapes: dict[str, tuple[int, ...]] = {given.name: (1, *map(int, dims))}
        known, same = dict(graph.tensors), dict[str, str]()
        for node in graph.nodes:
            out, how = node.outputs[0], node.attributes
            if node.operator == "Constant":
                _need("value" in how, "constants that are no arrays")
                known[out] = how["value"]
                continue
            moving = [name for name in node.inputs if name not in known and name]
            fixed = [known[name] for name in node.inputs if name in known]
            _need(node.operator in _READERS and moving, f"the operator {node}")
            first = node.inputs[0] in known
            shapes = [self.shapes[name] for name in moving]
            op = _READERS[node.operator](node.operator, shapes, fixed, first, how)
            self.shapes[out] = op.shape
            if op.kind == "same":
                same[out] = same.get(moving[0], moving[0])
                continue
            op.out, op.ins = out, tuple(same.get(name, name) for name in moving)
            op.bias = np.asarray(op.bias, np.float64)
            self.operations.append(op)
        self.output = same.get(graph.outputs[0], graph.outputs[0])
        used = {self.output}
        for op in reversed(self.operations):
            used |= set(op.ins) if op.out in used else set()
        self.operations = [op for op in self.operations if op.out in used]
        self.curves = [op for op in self.operations if op.kind in CURVES]
        for turn, op in enumerate(self.curves):
            op.turn = turn
        _need(len({op.ins for op in self.curves}) == len(self.curves), "two curves of one value")
        self.starts = np.cumsum([0] + [self.size(op.out) for op in self.curves])
        self.inputs, self.neurons = self.size(self.source), int(self.starts[-1])
        rectified = np.array([op.kind == "Relu" for op in self.curves], bool)
        self.rectified = np.repeat(rectified, np.diff(self.starts))

    def size(self, name: str) -> int:
        return int(np.prod(self.shapes[name]))

    def split(self, rows: Any) -> list[Any]:
        """``[..., neurons]`` as one array for each curve."""
        return np.split(rows, self.starts[1:-1], axis=-1)


Shapes = list[tuple[int, ...]]


def _same(kind: str, shapes: Shapes, fixed: Any, first: bool, how: Any) -> Operation:
    (shape,) = shapes
    blank = np.broadcast_to(np.zeros((), bool), shape)
    axes = fixed[0].reshape(-1).tolist() if fixed else how.get("axes")
    if kind == "Reshape":
        _need(fixed and not how.get("allowzero", 0), "shapes that are no constants, or have a 0")
        blank = blank.reshape([int(d) or shape[i] for i, d in enumerate(fixed[0])])
    elif kind == "Flatten":
        blank = blank.reshape(int(np.prod(shape[: how.get("axis", 1)])), -1)
    elif kind == "Squeeze":
        blank = np.squeeze(blank, None if axes is None else tuple(axes))
    elif kind == "Unsqueeze":
        blank = np.expand_dims(blank, tuple(axes))
    return Operation("same", blank.shape)


def _curve(kind: str, shapes: Shapes, fixed: Any, first: bool, how: Any) -> Operation:
    return Operation(kind, shapes[0])


def _entrywise(kind: str, shapes: Shapes, fixed: Any, first: bool, how: Any) -> Operation:
    shape, size = shapes[0], int(np.prod(shapes[0]))
    if len(shapes) == 2:
        _need(kind in ("Add", "Sub") and shapes[0] == shapes[1], "products, or sums of two shapes")
        return Operation("sum", shape, sign=1.0 if kind == "Add" else -1.0)
    c = np.asarray(fixed[0], np.float64)
    shape = np.broadcast_shapes(c.shape, shape)
    c = np.broadcast_to(c, shape).reshape(-1)
    _need(c.size == size, "constants that enlarge a value")
    _need(kind != "Div" or (np.all(c) and not first), "divisions by 0 or by a value")
    one = np.full(size, -1.0 if kind == "Sub" and first else 1.0)
    scale = {"Mul": c, "Div": one / c if kind == "Div" else one}.get(kind, one)
    bias = {"Add": c, "Sub": c if first else -c}.get(kind, 0 * c)
    return Operation("affine", shape, Diagonal(scale), bias, 2 * UNIT * (kind == "Div"))


def _normalised(kind: str, shapes: Shapes, fixed: Any, first: bool, how: Any) -> Operation:
    _need(len(fixed) == 4 and not how.get("training_mode", 0), "statistics of a batch")
    scale, bias, mean, var = (np.asarray(f, np.float64) for f in fixed)
    _need(shapes[0][:2] == (1, *scale.shape), "channels that are not the second axis")
    scale = scale / np.sqrt(var + how.get("epsilon", 1e-5))
    loose = 24 * UNIT * (np.abs(bias) + np.abs(mean * scale))
    each = int(np.prod(shapes[0][2:]))
    scale, bias, loose = (np.repeat(f, each) for f in (scale, bias - mean * scale, loose))
    return Operation("affine", shapes[0], Diagonal(scale), bias, 16 * UNIT, loose)


def _product(kind: str, shapes: Shapes, fixed: Any, first: bool, how: Any) -> Operation:
    plain = how.get("alpha", 1) == how.get("beta", 1) == 1 and not how.get("transA", 0)
    _need(len(shapes) == 1 and fixed[0].ndim == 2, "products of values")
    _need(plain, "Gemm with alpha, beta or transA")
    _need(kind == "MatMul" or not first, "Gemm whose first operand is constant")
    w = np.asarray(fixed[0], np.float64)
    w = w if first or how.get("transB", 0) else w.T
    (shape,) = shapes
    column = (1,) if first and len(shape) > 1 else ()
    ahead = shape[: len(shape) - 1 - len(column)]
    _need(shape == (*ahead, w.shape[1], *column), "products along other axes")
    _need(np.prod(ahead) == 1 and (kind == "MatMul" or len(shape) == 2), "products of several rows")
    bias = np.broadcast_to(fixed[1] if fixed[1:] else 0.0, (1, len(w)))[0]
    return Operation("affine", (*ahead, len(w), *column), Dense(w), bias)


def _convolved(kind: str, shapes: Shapes, fixed: Any, first: bool, how: Any) -> Operation:
    usual = how.get("group", 1) == 1 and set(how.get("dilations", [1])) == {1}
    usual = usual and how.get("auto_pad", "NOTSET") == "NOTSET" and not first
    _need(usual and len(shapes) == 1 and fixed[0].ndim == 4, "such convolutions")
    w, (shape,) = np.asarray(fixed[0], np.float64), shapes
    _need(len(shape) == 4 and shape[0] == 1 and shape[1] == w.shape[1], "such convolutions")
    found = Convolution(w, shape[1:], how.get("strides", [1, 1]), how.get("pads", [0] * 4))
    bias = np.repeat(fixed[1] if fixed[1:] else np.zeros(len(w)), np.prod(found.out))
    return Operation("affine", (1, len(w), *found.out), found, bias)


_READERS: dict[str, Callable[..., Operation]] = {
    **dict.fromkeys(("Flatten", "Reshape", "Identity", "Squeeze", "Unsqueeze"), _same),
    **dict.fromkeys(CURVES, _curve),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), _entrywise),
    "BatchNormalization": _normalised,
    **dict.fromkeys(("Gemm", "MatMul"), _product),
    "Conv": _convolved,
}
"""What becomes of a node's kind, the shapes of its operands that vary, the arrays of those that are
constant, whether the first operand is constant, and the attributes."""
