"""ONNX files as plain nodes and arrays: everything is bounded, and nothing in a file is run.

Before the `onnx` package parses a file, its messages are counted, since a message of two bytes
becomes an object of a hundred; a tensor may not claim what the file does not store.
"""

import math
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from wdjax.files.state_pickle import MAX_RANK, BrokenError, RefusedError, shown

MAX_FIELDS = 1 << 20
"""Number of fields of all messages; each is an object in memory."""
MAX_PACKED = 1 << 24
"""Bytes of packed integers, each of which may grow eightfold."""
MAX_NESTING = 24
MAX_NODES = 6000
"""A few thousand are the most of usual classifiers; each takes the compiler milliseconds."""
_DEFAULT = ("", "ai.onnx")
_GZIP = b"\x1f\x8b"
"""How a compressed file begins, and no message of ONNX."""


class OnnxNode(NamedTuple):
    """One operation: ``outputs = operator(inputs; attributes)``; "" is an input that is absent."""

    operator: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    """Numbers, strings, arrays, and tuples of numbers or strings."""

    def __str__(self) -> str:
        label = self.name or next(filter(None, self.outputs), "")
        return f"node {shown(label)!r} ({shown(self.operator)})"


class OnnxValue(NamedTuple):
    """A declared input or output; an axis is a number, or a name where its length is free."""

    name: str
    dtype: np.dtype
    shape: tuple[int | str, ...]


class OnnxGraph(NamedTuple):
    """A file's content; nodes are sorted, so that each follows those whose results it uses."""

    nodes: tuple[OnnxNode, ...]
    tensors: dict[str, np.ndarray]
    inputs: tuple[OnnxValue, ...]
    """Without those that have a tensor as default."""
    outputs: tuple[str, ...]
    opset: int
    producer: str


def read(path: str | PathLike[str]) -> OnnxGraph:
    """Reads an ONNX file.

    Args:
      path: the file; tensors stored in other files must lie beside it.

    Returns:
      Its nodes, tensors, inputs and outputs.

    Raises:
      ValueError: the file is truncated or corrupt, is no ONNX model, contains loops, branches,
        functions or types that no classifier needs, or points to data elsewhere.
      FileNotFoundError: no such file.
      ImportError: the ``onnx`` package is absent.

    Cost: one pass over the file; memory is a small multiple of its size.

    >>> read("net.onnx").opset  # doctest: +SKIP
    17
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # Opening a pipe would block.
        raise ValueError(f"{path} is a folder, a pipe or a device; pass a file.")
    content = path.read_bytes()
    if content[:2] == _GZIP:
        raise ValueError(f"{path} is compressed; unpack it with gunzip.")
    try:
        _count(memoryview(content))
        return _graph(_parsed(content), path.parent)
    except RefusedError as error:
        raise ValueError(f"{path}: {error}") from None
    except BrokenError as error:
        raise ValueError(f"{path} is truncated, corrupt or no ONNX model ({error}).") from error


_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 8: "pair", 14: "pair", 20: "training", 25: "function"},
    "graph": {
        1: "node", 5: "tensor", 11: "value", 12: "value", 13: "value", 14: "quantised",
        15: "sparse", 16: "pair",
    },
    "node": {5: "attribute", 9: "pair", 10: "device"},
    "attribute": {
        5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 14: "type", 15: "type", 22: "sparse",
        23: "sparse",
    },
    "tensor": {3: "pair", 13: "pair", 16: "pair"},
    "value": {2: "type", 4: "pair"},
    "type": {1: "array", 4: "sequence", 5: "sequence", 8: "array", 9: "sequence"},
    "sequence": {1: "type", 2: "type"},
    "array": {2: "shape"},
    "shape": {1: "pair"},
    "pair": {},
    "quantised": {2: "pair"},
    "sparse": {1: "tensor", 2: "tensor"},
    "training": {1: "graph", 2: "graph", 3: "pair", 4: "pair"},
    "function": {7: "node", 9: "pair", 11: "attribute", 12: "value", 14: "pair"},
    "device": {2: "pair"},
}  # fmt: skip
"""The fields of ONNX's messages that are messages themselves, by the numbers of ``onnx.proto``."""

_TEXTS = {
    "model": {2}, "node": {1, 2, 3, 4, 7}, "attribute": {1}, "tensor": {8}, "value": {1},
    "pair": {1, 2},
}  # fmt: skip
"""The fields that are names, which protobuf hands over as bytes if they are no UTF-8."""

_PACKED = {("tensor", 1), ("tensor", 5), ("tensor", 7), ("tensor", 11), ("attribute", 8)}


class _Counter:
    """What is left to be used up."""

    def __init__(self) -> None:
        self.fields, self.packed = MAX_FIELDS, MAX_PACKED


def _count(content: memoryview) -> None:
    """Walks through the messages without storing any; raises if there is too much."""
    _walk(content, "model", _Counter(), 0)


def _walk(content: memoryview, kind: str, left: _Counter, depth: int) -> None:
    """Checks the wire format of a message of type ``kind`` before the parser allocates anything.

    Counts fields, packed integers and nesting, of which ``left`` is what the whole file may still
    have. Only messages that this library reads are entered (``_MESSAGES``).
    """
    if depth > MAX_NESTING:
        raise BrokenError(f"messages are nested deeper than {MAX_NESTING}")
    inner, at, end = _MESSAGES[kind], 0, len(content)
    while at < end:
        left.fields -= 1
        if left.fields < 0:
            raise BrokenError(f"it has more than {MAX_FIELDS} fields")
        tag, at = _varint(content, at)
        field, wire = tag >> 3, tag & 7
        if wire == 2:
            length, at = _varint(content, at)
            if length > end - at:
                raise BrokenError("a field is longer than what encloses it")
            if field in inner:
                _walk(content[at : at + length], inner[field], left, depth + 1)
            elif (kind, field) in _PACKED:
                left.packed -= length
                if left.packed < 0:
                    raise BrokenError(f"it has more than {MAX_PACKED} bytes of packed integers")
            elif field in _TEXTS.get(kind, ()):
                _check_text(content[at : at + length])
            at += length
        elif wire == 0:
            _, at = _varint(content, at)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise BrokenError(f"a field has the wire type {wire}")
    if at != end:
        raise BrokenError("a number is cut short")


def _check_text(content: memoryview) -> None:
    try:
        str(content, "utf-8")
    except UnicodeDecodeError as error:
        raise BrokenError(f"a name is no text: {error.reason}") from None


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(content) or shift > 63:
            raise BrokenError("a number is cut short")
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _parsed(content: bytes) -> Any:
    try:
        import onnx
    except ImportError as error:
        raise ImportError("ONNX files need the onnx package: pip install 'wdjax[onnx]'.") from error
    from google.protobuf.message import DecodeError

    try:
        model = onnx.ModelProto.FromString(content)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BrokenError(shown(str(error))) from None
    if not model.HasField("graph"):
        raise BrokenError("it holds no graph")
    return model


def _graph(model: Any, folder: Path) -> OnnxGraph:
    """The graph of a parsed file with arrays for its tensors; refuses what cannot be followed.

    ``folder`` is where tensors outside of the file may be. Names are checked, so that later code
    may look them up: each is given once, before it is used.
    """
    versions = {entry.domain: entry.version for entry in model.opset_import}
    opset = next((versions[name] for name in _DEFAULT if name in versions), None)
    if opset is None:
        raise BrokenError("it names no version of the operators")
    if model.functions:
        raise RefusedError(
            "it defines functions of its own; inline them first with onnx.inliner."
            "inline_local_functions."
        )
    graph = model.graph
    if len(graph.node) > MAX_NODES:
        raise RefusedError(
            f"it has {len(graph.node)} nodes, more than {MAX_NODES}; simplify it first, or export "
            "recurrent layers as LSTM and GRU instead of step by step."
        )
    if graph.sparse_initializer:
        raise RefusedError("sparse tensors are not supported; store them as dense ones.")
    tensors = dict[str, np.ndarray]()
    for tensor in graph.initializer:
        if tensor.name in tensors or not tensor.name:
            raise BrokenError(f"two tensors are called {shown(tensor.name)!r}")
        tensors[tensor.name] = _array(tensor, folder)
    inputs = [_value(value) for value in graph.input if value.name not in tensors]
    nodes = tuple(_node(node, folder) for node in graph.node)
    _check_names(nodes, tensors, [value.name for value in inputs])
    outputs = tuple(value.name for value in graph.output)
    known = {name for node in nodes for name in node.outputs} | {*tensors}
    known |= {value.name for value in inputs}
    for name in outputs:
        if name not in known:
            raise BrokenError(f"no node gives the output {shown(name)!r}")
    return OnnxGraph(nodes, tensors, tuple(inputs), outputs, opset, shown(model.producer_name))


def _check_names(
    nodes: tuple[OnnxNode, ...], tensors: dict[str, np.ndarray], inputs: list[str]
) -> None:
    known = {*tensors, *inputs}
    if len(known) < len(tensors) + len(inputs):
        raise BrokenError("two inputs have one name")
    for node in nodes:
        for name in node.inputs:
            if name and name not in known:
                raise BrokenError(
                    f"{node} uses {shown(name)!r}, which no tensor, input or earlier node gives"
                )
        for name in filter(None, node.outputs):
            if name in known:
                raise BrokenError(f"{node} gives {shown(name)!r}, a name that is taken")
            known.add(name)


def _value(value: Any) -> OnnxValue:
    if not value.type.HasField("tensor_type"):
        raise RefusedError(f"the input {shown(value.name)!r} is no array.")
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        raise RefusedError(f"the input {shown(value.name)!r} has no declared shape; export one.")
    shape = tuple(
        axis.dim_value if axis.WhichOneof("value") == "dim_value" else shown(axis.dim_param)
        for axis in kind.shape.dim
    )
    if any(isinstance(axis, int) and axis < 0 for axis in shape) or len(shape) > MAX_RANK:
        raise BrokenError(f"the input {shown(value.name)!r} has the shape {list(shape[:MAX_RANK])}")
    return OnnxValue(value.name, _dtype(kind.elem_type, value.name), shape)


def _node(node: Any, folder: Path) -> OnnxNode:
    domain = "" if node.domain in _DEFAULT else node.domain + "."
    empty = OnnxNode(domain + node.op_type, node.name, (*node.input,), (*node.output,), {})
    attributes = dict[str, Any]()
    for attribute in node.attribute:
        if attribute.name in attributes:
            raise BrokenError(f"{empty} has two attributes {shown(attribute.name)!r}")
        attributes[attribute.name] = _attribute(attribute, empty, folder)
    return empty._replace(attributes=attributes)


_FIELDS = {1: "f", 2: "i", 3: "s", 4: "t", 6: "floats", 7: "ints", 8: "strings"}
"""The field of an attribute that holds its value, by the attribute's type."""


def _attribute(attribute: Any, node: OnnxNode, folder: Path) -> Any:
    if attribute.type not in _FIELDS:
        raise RefusedError(
            f"{node} has the attribute {shown(attribute.name)!r}, which holds a graph or a type: "
            "loops and branches are not supported. Export the model without them, for fixed shapes."
        )
    value = getattr(attribute, _FIELDS[attribute.type])
    if attribute.type == 4:
        return _array(value, folder)
    if attribute.type in (3, 8):
        texts = [value] if attribute.type == 3 else value
        decoded = tuple(text.decode("utf-8", "replace") for text in texts)
        return decoded[0] if attribute.type == 3 else decoded
    return tuple(value) if attribute.type in (6, 7) else value


_DTYPES: dict[int, tuple[type, str]] = {
    1: (np.float32, "float_data"),
    2: (np.uint8, "int32_data"),
    3: (np.int8, "int32_data"),
    4: (np.uint16, "int32_data"),
    5: (np.int16, "int32_data"),
    6: (np.int32, "int32_data"),
    7: (np.int64, "int64_data"),
    9: (np.bool_, "int32_data"),
    10: (np.float16, "int32_data"),
    11: (np.float64, "double_data"),
    12: (np.uint32, "uint64_data"),
    13: (np.uint64, "uint64_data"),
    16: (ml_dtypes.bfloat16, "int32_data"),
}
"""Types that can be read, and the field for values that are not stored as bytes."""


def _dtype(number: int, name: str) -> np.dtype:
    if number not in _DTYPES:
        raise RefusedError(
            f"{shown(name)!r} has the type {number} of onnx.TensorProto.DataType (text, complex or "
            "packed numbers), which is not supported."
        )
    return np.dtype(_DTYPES[number][0])


def _array(tensor: Any, folder: Path) -> np.ndarray:
    """A tensor, read-only; its size is checked before anything of that size is made."""
    dtype, shape = _dtype(tensor.data_type, tensor.name), tuple(tensor.dims)
    if any(size < 0 for size in shape) or len(shape) > MAX_RANK:
        raise BrokenError(f"{shown(tensor.name)!r} has the shape {list(shape[:MAX_RANK])}")
    count = math.prod(shape)
    typed = getattr(tensor, _DTYPES[tensor.data_type][1])
    if tensor.data_location == 1:
        content = _external(tensor, folder, count * dtype.itemsize)
    elif tensor.HasField("raw_data"):
        content = tensor.raw_data
    elif len(typed) == count:
        if dtype.itemsize == 2 and dtype.kind not in "iu":  # The bits of short floats.
            return _frozen(np.array(typed, np.int64).astype(np.uint16).view(dtype).reshape(shape))
        return _frozen(np.array(typed).astype(dtype).reshape(shape))
    else:
        raise BrokenError(f"{shown(tensor.name)!r} has {len(typed)} numbers for {list(shape)}")
    if len(content) != count * dtype.itemsize:
        raise BrokenError(
            f"{shown(tensor.name)!r} has {len(content)} bytes for {list(shape)} of {dtype}"
        )
    return _frozen(np.frombuffer(content, dtype.newbyteorder("<")).astype(dtype).reshape(shape))


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _external(tensor: Any, folder: Path, size: int) -> bytes:
    """The bytes of a tensor that another file stores, which must lie beside the model."""
    facts = {entry.key: entry.value for entry in tensor.external_data}
    path = facts.get("location", "")
    parts = PurePosixPath(path).parts
    windows = PureWindowsPath(path)
    if not parts or ".." in parts or path.startswith("/") or windows.drive or "\\" in path:
        raise RefusedError(
            f"{shown(tensor.name)!r} is stored in {shown(path)!r}; data must lie beside the file."
        )
    file = folder / path
    if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
        raise RefusedError(
            f"{shown(tensor.name)!r} is stored in {shown(path)!r}, which is no file beside the "
            "model, or a link out of its folder."
        )
    try:
        offset = int(facts.get("offset", 0))
        length = int(facts.get("length", size))
    except ValueError:
        raise BrokenError(f"{shown(tensor.name)!r} has no place in {shown(path)!r}") from None
    if length != size or offset < 0 or offset + length > file.stat().st_size:
        raise BrokenError(
            f"{shown(tensor.name)!r} needs {size} bytes; {shown(path)!r} stores {length} from "
            f"{offset} of {file.stat().st_size}"
        )
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(length)
