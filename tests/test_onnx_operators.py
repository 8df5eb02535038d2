"""Every operator of the table against onnxruntime, with options, versions and layouts."""

import numpy as np
import pytest

from wdjax import convert
from wdjax.models.graphs import OPERATORS

onnx = pytest.importorskip("onnx", reason="ONNX files need the onnx package")
pytest.importorskip("onnxruntime", reason="the reference is onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

RNG = np.random.default_rng(0)
IMAGE, ROW = ("n", 4, 6, 6), ("n", 8)


def draw(shape, low=-1.0, high=1.0):
    return RNG.uniform(low, high, shape).astype(np.float32)


def ints(*numbers):
    return np.asarray(numbers, np.int64)


def file_of(path, nodes, shape, tensors, opset=21, dtype=TensorProto.FLOAT):
    """Writes a file of nodes, each ``(operator, "inputs -> outputs", attributes)``, from x to y."""
    made = []
    for operator, wiring, attributes in nodes:
        left, right = wiring.split("->")
        inputs = ["" if name == "_" else name for name in left.split()]
        made.append(helper.make_node(operator, inputs, right.split(), **attributes))
    given = [numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items()]
    graph = helper.make_graph(
        made,
        "graph",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", dtype, None)],
        given,
    )
    ir = 8 if opset < 20 else 10
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    path.write_bytes(model.SerializeToString())
    return path


CASES = {}


def case(title, operator, wiring="x -> y", shape=IMAGE, opset=21, attributes=None, **tensors):
    """A file of one operator."""
    nodes = [(operator, wiring, attributes or {})]
    CASES[f"{operator} {title}".strip()] = (nodes, shape, tensors, opset)


def chain(title, *nodes, shape=IMAGE, opset=21, **tensors):
    CASES[title] = (nodes, shape, tensors, opset)


# fmt: off
for name in ("Relu", "Neg", "Abs", "Sqrt", "Exp", "Erf", "Floor", "Ceil", "Sign", "Sigmoid",
        "Tanh", "Softplus", "Softsign", "Elu", "Selu", "Celu", "LeakyRelu", "HardSigmoid",
        "HardSwish", "Mish", "Gelu", "Identity", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh",
        "Shrink", "ThresholdedRelu", "LogSoftmax", "Softmax", "Flatten"):
    case("", name)
    case("of rows", name, shape=ROW)
for name in ("Log", "Reciprocal", "Round"):
    chain(name, ("Add", "x one -> a", {}), (name, "a -> y", {}), one=np.float32(1.3))
chain("activations of negative numbers", ("Sub", "x half -> a", {}), ("Elu", "a -> b", {"alpha":
    0.7}), ("Mul", "b three -> c", {}), ("LeakyRelu", "c -> d", {"alpha": 0.2}), ("Selu", "d -> e",
    {}), ("Celu", "e -> f", {}), ("Gelu", "f -> g", {"approximate": "tanh"}), ("HardSigmoid",
    "g -> h", {"alpha": 0.3}), ("Sub", "h half -> i", {}), ("HardSwish", "i -> y", {}),
    half=np.float32(0.5), three=np.float32(3))
for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean"):
    case("by channels", name, "x b -> y", b=draw((4, 1, 1), 0.5, 1.0))
    case("by rows", name, "b x -> y", b=draw((6,), 0.5, 1.0))
case("floats", "Mod", "x b -> y", attributes={"fmod": 1}, b=draw((4, 1, 1), 0.1, 0.4))
case("square", "Pow", "x b -> y", b=np.float32(2))
case("root", "Pow", "x b -> y", b=np.float32(0.5))
case("real", "Pow", "x b -> y", b=np.float32(1.7))
case("tensor", "Pow", "x b -> y", b=draw((4, 1, 1), 1, 3))
case("", "PRelu", "x b -> y", b=draw((4, 1, 1)))
case("of three", "Max", "x b c -> y", b=draw((4, 1, 1)), c=draw((6, 6)))
case("", "Clip", "x lo hi -> y", lo=np.float32(0.2), hi=np.float32(0.6))
case("above", "Clip", "x _ hi -> y", hi=np.float32(0.6))
case("old", "Clip", opset=9, attributes={"min": 0.2, "max": 0.6})
for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"):
    chain(name, (name, "x b -> c", {}), ("Where", "c x b -> y", {}), b=draw((6,), 0, 1))
chain("logic", ("Less", "x b -> c", {}), ("Greater", "x d -> e", {}), ("And", "c e -> f", {}),
    ("Or", "c e -> g", {}), ("Xor", "f g -> h", {}), ("Not", "h -> i", {}), ("Cast", "i -> j",
    {"to": 1}), ("CastLike", "i x -> l", {}), ("Add", "j l -> y", {}), b=draw((6,), 0, 1),
    d=draw((6,), 0, 1))
chain("IsNaN", ("IsNaN", "x -> a", {}), ("Where", "a b x -> y", {}), b=np.float32(0))
case("swish", "Swish", opset=24, attributes={"alpha": 1.5})
K3, K2 = draw((8, 4, 3, 3)), draw((8, 4, 2, 2))
case("plain", "Conv", "x w -> y", w=K3)
case("padded", "Conv", "x w b -> y", attributes={"pads": [1, 1, 1, 1]}, w=K3, b=draw(8))
case("uneven pads", "Conv", "x w -> y", attributes={"pads": [0, 2, 1, 0]}, w=K3)
case("strides", "Conv", "x w -> y", attributes={"strides": [2, 2], "pads": [1, 1, 1, 1]}, w=K3)
case("two strides", "Conv", "x w -> y", attributes={"strides": [2, 1]}, w=K3)
case("dilated", "Conv", "x w -> y", attributes={"dilations": [2, 2], "pads": [2] * 4}, w=K3)
case("two dilations", "Conv", "x w -> y", attributes={"dilations": [1, 2]}, w=K3)
case("groups", "Conv", "x w -> y", attributes={"group": 2}, w=draw((6, 2, 3, 3)))
case("depthwise", "Conv", "x w -> y", attributes={"group": 4, "pads": [1] * 4}, w=draw((4, 1, 3,
    3)) )
case("dilated groups", "Conv", "x w -> y", attributes={"group": 4, "dilations": [2, 2]}, w=draw((8,
    1, 2, 2)))
case("1x1", "Conv", "x w -> y", w=draw((5, 4, 1, 1)))
for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
    case(auto, "Conv", "x w -> y", attributes={"auto_pad": auto, "strides": [2, 2]}, w=K2)
case("rows", "Conv", "x w b -> y", ("n", 4, 9), attributes={"pads": [1, 1]}, w=draw((5, 4, 3)),
    b=draw(5))
case("dilated rows", "Conv", "x w -> y", ("n", 4, 9), attributes={"dilations": [2]}, w=draw((5, 4,
    3)))
case("volumes", "Conv", "x w -> y", ("n", 2, 4, 5, 6), attributes={"strides": [1, 2, 2]},
    w=draw((3, 2, 2, 3, 3)))
chain("Conv of a computed kernel", ("Mul", "w g -> k", {}), ("Conv", "x k -> y", {}), w=K3,
    g=draw((8, 1, 1, 1)))
case("", "ConvTranspose", "x w b -> y", w=draw((4, 5, 3, 3)), b=draw(5))
case("strides", "ConvTranspose", "x w -> y", attributes={"strides": [2, 2], "pads": [1] * 4},
    w=draw((4, 5, 3, 3)))
case("more", "ConvTranspose", "x w -> y", attributes={"strides": [2, 3], "output_padding": [1, 2],
    "pads": [1, 0, 0, 1]}, w=draw((4, 5, 3, 3)))
case("groups", "ConvTranspose", "x w -> y", attributes={"group": 2, "dilations": [2, 2]},
    w=draw((4, 3, 3, 3)))
case("target", "ConvTranspose", "x w -> y", attributes={"strides": [2, 2], "output_shape": [11,
    12]}, w=draw((4, 3, 3, 3)))
for auto in ("SAME_UPPER", "SAME_LOWER"):
    case(auto, "ConvTranspose", "x w -> y", attributes={"strides": [2, 2], "auto_pad": auto},
        w=draw((4, 3, 3, 3)))
case("rows", "ConvTranspose", "x w -> y", ("n", 4, 5), attributes={"strides": [2]}, w=draw((4, 3,
    3)) )
case("", "MatMul", "x w -> y", ROW, w=draw((8, 3)))
case("of images", "MatMul", "x w -> y", w=draw((6, 3)))
case("from the left", "MatMul", "w x -> y", w=draw((5, 6)))
case("by a vector", "MatMul", "x w -> y", ROW, w=draw(8))
case("of batches", "MatMul", "x w -> y", w=draw((4, 6, 3)))
chain("MatMul of two", ("Transpose", "x -> t", {"perm": [0, 1, 3, 2]}), ("MatMul", "x t -> y", {}))
chain("MatMul of joined axes", ("Transpose", "x -> t", {"perm": [0, 2, 3, 1]}), ("MatMul",
    "t w -> a", {}), ("Transpose", "a -> y", {"perm": [0, 3, 1, 2]}), w=draw((4, 7)))
case("", "Gemm", "x w b -> y", ROW, w=draw((8, 3)), b=draw(3))
case("options", "Gemm", "x w b -> y", ROW, attributes={"alpha": 0.5, "beta": 2.0, "transB": 1},
    w=draw((3, 8)), b=draw((1, 3)))
chain("Gemm transposed", ("Transpose", "x -> t", {}), ("Gemm", "t w -> y", {"transA": 1}),
    shape=ROW, w=draw((8, 3)))
case("", "Einsum", "x w -> y", attributes={"equation": "nchw,dc->nhwd"}, w=draw((5, 4)))
case("implicit", "Einsum", "x w -> y", attributes={"equation": "abcd, be"}, w=draw((4, 5)))
for name in ("MaxPool", "AveragePool"):
    case("", name, attributes={"kernel_shape": [2, 2], "strides": [2, 2]})
    case("overlapping", name, attributes={"kernel_shape": [3, 3], "strides": [2, 2]})
    case("padded", name, attributes={"kernel_shape": [3, 3], "pads": [1] * 4})
    case("uneven", name, attributes={"kernel_shape": [3, 2], "pads": [0, 1, 2, 0], "strides": [2,
        1]} )
    case("ceil", name, shape=("n", 2, 7, 7), attributes={"kernel_shape": [2, 2], "strides": [2, 2],
        "ceil_mode": 1})
    case("ceil padded", name, shape=("n", 2, 7, 8), attributes={"kernel_shape": [3, 3], "strides":
        [2, 2], "ceil_mode": 1, "pads": [1] * 4})
    case("same", name, attributes={"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad":
        "SAME_UPPER"})
    case("rows", name, shape=("n", 4, 9), attributes={"kernel_shape": [3], "strides": [2]})
    case("volumes", name, shape=("n", 2, 4, 4, 4), attributes={"kernel_shape": [2] * 3, "strides":
        [2] * 3})
    case("dilated", name, attributes={"kernel_shape": [2, 2], "dilations": [2, 2]})
    case("leaves a rest", name, shape=("n", 2, 7, 5), attributes={"kernel_shape": [2, 2],
        "strides": [2, 2]})
case("with pads", "AveragePool", attributes={"kernel_shape": [3, 3], "pads": [1] * 4,
    "count_include_pad": 1})
case("ceil with pads", "AveragePool", shape=("n", 2, 7, 8), attributes={"kernel_shape": [3, 3],
    "strides": [2, 2], "ceil_mode": 1, "pads": [1] * 4, "count_include_pad": 1})
case("", "LpPool", attributes={"kernel_shape": [2, 2], "strides": [2, 2]})
case("", "GlobalAveragePool")
case("", "GlobalMaxPool")
case("rows", "GlobalAveragePool", shape=("n", 4, 9))
STATISTICS = {"s": draw(4), "b": draw(4), "m": draw(4), "v": draw(4, 0.5, 1)}
case("", "BatchNormalization", "x s b m v -> y", **STATISTICS)
case("old", "BatchNormalization", "x s b m v -> y", opset=8, **STATISTICS)
chain("BatchNormalization of rows", ("Gemm", "x w -> a", {}), ("BatchNormalization",
    "a s b m v -> y", {"epsilon": 1e-3}), shape=ROW, w=draw((8, 4)), **STATISTICS)
case("", "LayerNormalization", "x s b -> y", s=draw(6), b=draw(6))
case("of several axes", "LayerNormalization", "x s b -> y", attributes={"axis": 1}, s=draw((4, 6,
    6)), b=draw((4, 6, 6)))
chain("LayerNormalization of channels", ("Transpose", "x -> t", {"perm": [0, 2, 3, 1]}),
    ("LayerNormalization", "t s -> a", {}), ("Transpose", "a -> y", {"perm": [0, 3, 1, 2]}),
    s=draw(4))
case("", "InstanceNormalization", "x s b -> y", s=draw(4), b=draw(4))
case("", "GroupNormalization", "x s b -> y", attributes={"num_groups": 2}, s=draw(4), b=draw(4))
case("of version 18", "GroupNormalization", "x s b -> y", opset=18, attributes={"num_groups": 2},
    s=draw(2), b=draw(2))
case("", "RMSNormalization", "x s -> y", opset=23, s=draw(6))
for p in (1, 2):
    case(f"of p = {p}", "LpNormalization", attributes={"axis": 1, "p": p})
case("", "LRN", attributes={"size": 3})
for axis in (1, -1):
    case(f"axis {axis}", "Softmax", attributes={"axis": axis})
    case(f"of version 11, axis {axis}", "Softmax", opset=11, attributes={"axis": axis})
    case(f"axis {axis}", "LogSoftmax", attributes={"axis": axis})
for name in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2",
        "ReduceProd", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"):
    case("of sides", name, "x a -> y", a=ints(2, 3))
    case("of channels", name, "x a -> y", attributes={"keepdims": 0}, a=ints(1))
case("old", "ReduceMean", opset=12, attributes={"axes": [1, -1], "keepdims": 0})
case("of all but none", "ReduceSum", "x a -> y", attributes={"noop_with_empty_axes": 1}, a=ints())
chain("Pad", ("Pad", "x p v -> y", {}), p=ints(0, 0, 1, 2, 0, 1, 0, 3), v=np.float32(0.3))
chain("Pad removes", ("Pad", "x p -> y", {}), p=ints(0, 0, -1, 2, 0, 0, -2, 0))
for mode in ("reflect", "edge", "wrap"):
    case(mode, "Pad", "x p -> y", attributes={"mode": mode}, p=ints(0, 0, 1, 2, 0, 0, 2, 3))
case("axes", "Pad", "x p _ a -> y", p=ints(1, 2), a=ints(-1))
case("old", "Pad", opset=9, attributes={"pads": [0, 0, 1, 1, 0, 0, 0, 1], "value": 0.5})
WIDE = np.asarray([1, 1, 2, 2], np.float32)
for mode in ("nearest", "linear"):
    for place in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel",
            "half_pixel_symmetric"):
        options = {"mode": mode, "coordinate_transformation_mode": place}
        case(f"{mode} {place}", "Resize", "x _ s -> y", attributes=options, s=np.asarray([1, 1,
            1.7, 0.6], np.float32))
        case(f"{mode} {place} to", "Resize", "x _ _ s -> y", attributes=options | {"axes": [3, 2]},
            s=ints(9, 5))
for rule in ("floor", "ceil", "round_prefer_ceil"):
    case(rule, "Resize", "x _ s -> y", attributes={"nearest_mode": rule,
        "coordinate_transformation_mode": "asymmetric"}, s=WIDE)
for place, rule in (("asymmetric", "floor"), ("half_pixel", "round_prefer_ceil")):
    for scale in (0.6, 1.4):  # 3 / 0.6 is 5, and 5 x 1.4 is 7, in float32 only.
        case(f"{place} by {scale}", "Resize", "x _ s -> y", shape=("n", 1, 10, 5), attributes={
            "coordinate_transformation_mode": place, "nearest_mode": rule}, s=np.asarray([1, 1,
            scale, 1.4], np.float32))
case("linear by 1.4", "Resize", "x _ s -> y", shape=("n", 1, 10, 5), attributes={"mode": "linear"},
    s=np.asarray([1, 1, 0.7, 1.4], np.float32))
case("by 1.4", "Upsample", "x s -> y", shape=("n", 1, 5, 5), opset=9, s=np.asarray([1, 1, 1.4,
    1.4], np.float32))
case("of axes", "Resize", "x _ s -> y", attributes={"axes": [2, 3]}, s=WIDE[2:])
case("of version 10", "Resize", "x s -> y", opset=10, s=WIDE)
case("", "Upsample", "x s -> y", opset=9, s=WIDE)
for name, options in (("DepthToSpace", {"blocksize": 2}), ("SpaceToDepth", {"blocksize": 3}),
        ("DepthToSpace", {"blocksize": 2, "mode": "CRD"})):
    case(str(options.get("mode", "")), name, attributes=options)
case("", "Reshape", "x s -> y", s=ints(0, 2, 2, -1))
case("joined sides", "Reshape", "x s -> y", s=ints(0, 0, 36))
case("split channels", "Reshape", "x s -> y", s=ints(-1, 2, 2, 6, 6))
case("of all", "Reshape", "x s -> y", s=ints(-1, 144))
case("ones", "Reshape", "x s -> y", s=ints(-1, 1, 4, 36, 1))
chain("Flatten axis -1", ("Flatten", "x -> a", {"axis": -1}), ("Reshape", "a s -> y", {}),
    s=ints(-1, 144))
chain("Flatten of parameters", ("Flatten", "w -> a", {"axis": 2}), ("MatMul", "x a -> y", {}),
    shape=ROW, w=draw((2, 4, 3)))
chain("Transpose", ("Transpose", "x -> a", {}), ("Relu", "a -> b", {}), ("Transpose", "b -> y",
    {}))
case("channels last", "Transpose", attributes={"perm": [0, 2, 3, 1]})
chain("Squeeze", ("ReduceMean", "x a -> b", {}), ("Squeeze", "b c -> y", {}), a=ints(1, 3),
    c=ints(1, -1))
chain("Squeeze old", ("ReduceMean", "x -> b", {"axes": [1]}), ("Squeeze", "b -> y", {"axes": [1]}),
    opset=11)
case("", "Unsqueeze", "x a -> y", a=ints(1, -1))
chain("Unsqueeze old", ("Unsqueeze", "x -> y", {"axes": [2, 1]}), opset=11)
case("", "Slice", "x s e a t -> y", s=ints(1, -1), e=ints(4, -100), a=ints(1, 3), t=ints(2, -2))
case("backwards", "Slice", "x s e a t -> y", s=ints(-1), e=ints(-(2**63)), a=ints(2), t=ints(-1))
case("to the end", "Slice", "x s e a -> y", s=ints(2), e=ints(2**63 - 1), a=ints(-1))
case("old", "Slice", opset=9, attributes={"starts": [1], "ends": [3], "axes": [1]})
chain("Split", ("Split", "x s -> a b", {"axis": 1}), ("Concat", "b a -> y", {"axis": 1}), s=ints(1,
    3) )
chain("Split evenly", ("Split", "x -> a b", {"axis": 3, "num_outputs": 2}), ("Sub", "b a -> y",
    {}))
chain("Split old", ("Split", "x -> a b", {"axis": 2, "split": [2, 4]}), ("ReduceMax", "b -> c",
    {"axes": [2]}), ("Mul", "a c -> y", {}), opset=11)
case("", "Concat", "x x -> y", attributes={"axis": 1})
chain("Concat of layouts", ("Conv", "x w -> a", {"pads": [1] * 4}), ("Concat", "x a -> y", {"axis":
    -3}), w=K3)
case("one", "Gather", "x i -> y", attributes={"axis": 1}, i=np.int64(2))
case("last", "Gather", "x i -> y", attributes={"axis": -1}, i=np.int64(-1))
case("some", "Gather", "x i -> y", attributes={"axis": 1}, i=ints(3, 0, 0))
case("in a row", "Gather", "x i -> y", attributes={"axis": 2}, i=ints(1, 2, 3))
case("regrouped", "Gather", "x i -> y", attributes={"axis": 2}, i=np.arange(6).reshape(3, 2))
case("table", "Gather", "x i -> y", attributes={"axis": 3}, i=np.asarray([[0, 1], [5, 2]]))
chain("Gather of parameters", ("Gather", "t i -> a", {}), ("Add", "x a -> y", {}), t=draw((9, 6)),
    i=np.asarray([[3, 8, 1, 0, 2, 2]]))
chain("GatherND", ("Flatten", "x -> a", {}), ("Transpose", "a -> b", {}), ("GatherND", "b i -> c",
    {}), ("Transpose", "c -> y", {}), i=np.asarray([[3], [7], [100]]))
chain("ScatterND", ("Transpose", "x -> a", {"perm": [1, 0, 2, 3]}), ("ScatterND", "z i c -> b",
    {}), ("Mul", "x b -> y", {}), z=draw((4, 6, 6)), i=np.asarray([[2], [0]]), c=draw((2, 6, 6)))
case("", "Expand", "x s -> y", ("n", 1, 6), s=ints(1, 4, 6))
case("", "Tile", "x r -> y", r=ints(1, 2, 1, 3))
chain("Trilu", ("Trilu", "x k -> a", {"upper": 0}), ("Trilu", "x -> b", {}), ("Add", "a b -> y",
    {}), k=np.int64(-1))
chain("shapes are computed", ("Shape", "x -> a", {}), ("Gather", "a zero -> b", {}), ("Unsqueeze",
    "b axis -> c", {}), ("Size", "x -> d", {}), ("Div", "d b -> e", {}), ("Unsqueeze",
    "e axis -> f", {}), ("Concat", "c f -> g", {"axis": 0}), ("Reshape", "x g -> y", {}),
    zero=np.int64(0), axis=ints(0))
chain("a part of a shape", ("Shape", "x -> a", {"start": 1, "end": 3}), ("ReduceProd", "a -> b",
    {}), ("Concat", "m b s -> c", {"axis": 0}), ("Reshape", "x c -> y", {}), m=ints(-1), s=ints(6))
chain("constants are computed", ("Range", "lo hi step -> a", {}), ("Cast", "a -> b", {"to": 1}),
    ("Sqrt", "b -> c", {}), ("ConstantOfShape", "s -> d", {}), ("Add", "c d -> e", {}), ("OneHot",
    "a six values -> f", {}), ("MatMul", "f e -> g", {}), ("Mul", "x g -> y", {}), lo=np.int64(1),
    hi=np.int64(7), step=np.int64(1), s=ints(1), six=np.int64(6), values=np.asarray([0, 1],
    np.float32))
chain("NonZero", ("NonZero", "m -> a", {}), ("Squeeze", "a axis -> b", {}), ("Gather", "x b -> y",
    {"axis": 1}), m=ints(0, 1, 0, 2), axis=ints(0))
chain("Mod of integers", ("Mod", "a b -> c", {}), ("Gather", "x c -> y", {"axis": 1}), a=ints(7, 5,
    3), b=ints(4, 3, 4))
chain("Constant", ("Constant", "-> a", {"value_floats": [1.0, 2, 3, 4, 5, 6]}), ("Mul", "x a -> b",
    {}), ("Constant", "-> c", {"value_float": 0.5}), ("Add", "b c -> y", {}))
chain("Dropout", ("Dropout", "x r t -> y", {}), r=np.float32(0.5), t=np.bool_(False))
chain("channels shuffled", ("Reshape", "x s -> a", {}), ("Transpose", "a -> b", {"perm": [0, 2, 1,
    3, 4]}), ("Reshape", "b t -> c", {}), ("Conv", "c w -> y", {}), s=ints(-1, 2, 2, 6, 6),
    t=ints(-1, 4, 6, 6), w=K3)
for kind, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
    for direction, count in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
        weights = {"w": draw((count, gates * 5, 8)), "r": draw((count, gates * 5, 5)), "b":
            draw((count, 2 * gates * 5))}
        options = {"hidden_size": 5, "direction": direction}
        chain(f"{kind} {direction}", ("Transpose", "x -> t", {"perm": [1, 0, 2]}), (kind,
            "t w r b -> a h", options), ("Transpose", "a -> y", {"perm": [2, 0, 1, 3]}),
            shape=("n", 4, 8), **weights)
    chain(f"{kind} state", ("Transpose", "x -> t", {"perm": [1, 0, 2]}), (kind, "t w r -> _a h",
        {"hidden_size": 5}), ("Squeeze", "h zero -> y", {}), shape=("n", 4, 8), w=draw((1, gates *
        5, 8)), r=draw((1, gates * 5, 5)), zero=ints(0))
chain("GRU of PyTorch", ("Transpose", "x -> t", {"perm": [1, 0, 2]}), ("GRU", "t w r b -> a",
    {"hidden_size": 5, "linear_before_reset": 1}), ("Transpose", "a -> y", {"perm": [2, 0, 1, 3]}),
    shape=("n", 4, 8), w=draw((1, 15, 8)), r=draw((1, 15, 5)), b=draw((1, 30)))
QKV = [("MatMul", f"x w{k} -> {k}", {}) for k in "qkv"]
WEIGHTS = {f"w{k}": draw((8, 8)) for k in "qkv"}
for causal in (0, 1):
    heads = {"q_num_heads": 2, "kv_num_heads": 2, "is_causal": causal}
    chain(f"Attention {causal}", *QKV, ("Attention", "q k v -> y", heads), shape=("n", 4, 8),
        opset=23, **WEIGHTS)
chain("Attention with a mask", *QKV, ("Attention", "q k v m -> y", {"q_num_heads": 4,
    "kv_num_heads": 4, "scale": 0.3}), shape=("n", 4, 8), opset=23, m=draw((4, 4)), **WEIGHTS)
# fmt: on

REFUSED = {
    "ArgMax",
    "ArgMin",
    "Hardmax",
    "TopK",
    "If",
    "Loop",
    "Scan",
    "RandomNormalLike",
    "RandomUniformLike",
}


def test_every_operator_is_tested():
    tried = {node[0] for nodes, *_ in CASES.values() for node in nodes}
    assert tried == set(OPERATORS) - REFUSED


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("title", CASES)
def test_an_operator_gives_what_onnxruntime_gives(tmp_path, title, layout):
    nodes, shape, tensors, opset = CASES[title]
    path = file_of(tmp_path / "net.onnx", nodes, shape, tensors, opset)
    report = convert.load_onnx(path, layout=layout).report
    assert report.parity is not None, report.notes
    assert report.parity <= 2e-6
