"""Interprets pickles of state dicts: ``pickletools`` parses them, and nothing is executed.

A small stack machine implements the opcodes that state dicts use. Objects that a pickle would
build are opaque, immutable handles here; :mod:`wdjax.files.torch_file` turns handles into arrays,
after the last opcode. Sizes are checked before memory is allocated.
"""

import dataclasses
import math
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from typing import IO, Any, NoReturn, TypeGuard

import ml_dtypes
import numpy as np

MAX_BYTES = 1 << 24
"""Size of one pickle; the tensors' data are stored elsewhere."""
MAX_STRING = 1 << 20
MAX_OPCODES = 250_000
MAX_CONTAINERS = 1 << 16
"""Number of lists and dicts; each of them slows Python's garbage collector."""
MAX_DEPTH = 64
MAX_RANK = 32
MAX_BITS = 80  # The magic number, the largest in a valid file, has 77 bits.

STORAGES: dict[str, np.dtype] = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
    "ComplexFloatStorage": np.dtype(np.complex64),
    "ComplexDoubleStorage": np.dtype(np.complex128),
}
_NAMES = {opcode.code: opcode.name for opcode in pickletools.opcodes}
_SCALARS = {"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"}


class BrokenError(Exception):
    """The bytes are not what ``torch.save`` writes: truncated or corrupt."""


class RefusedError(Exception):
    """The bytes are well formed but ask for something that is not allowed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Global:
    """A global that a pickle names; it is never imported."""

    module: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """Part of a storage: its key, type and number of elements, and the part in question."""

    key: str
    kind: str
    """A key of :data:`STORAGES`."""
    count: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a strided view of a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bits: frozenset[str] = frozenset()
    """``conj`` and ``neg`` if the stored elements have yet to be conjugated or negated."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScalarType:
    """A NumPy scalar type."""

    code: str


@dataclasses.dataclass(frozen=True, slots=True)
class Scalar:
    """A NumPy scalar as its type and bytes."""

    code: str
    content: bytes


def shown(text: str) -> str:
    """Text of an untrusted file for a message: shortened, and without control characters.

    >>> shown("conv1.weight"), shown("a\\x1b[2J")
    ('conv1.weight', 'a\\\\x1b[2J')
    """
    clipped = text if len(text) <= 100 else text[:97] + "..."
    return clipped if clipped.isprintable() else ascii(clipped)[1:-1]


def load(file: IO[bytes]) -> tuple[Any, dict[str, Storage]]:
    """Interprets one pickle.

    Args:
      file: positioned at the pickle's first byte; afterwards behind its last byte.

    Returns:
      The value, with handles for tensors and NumPy scalars; and the storages by key.

    Raises:
      BrokenError: truncated, corrupt or larger than any state dict's pickle.
      RefusedError: it names a global or an opcode that state dicts do not use.
    """
    machine = _Machine()
    operations = pickletools.genops(_Bounded(file))  # type: ignore[arg-type]
    for _ in range(MAX_OPCODES):
        try:
            opcode, argument, _ = next(operations)
        except ValueError as error:
            raise BrokenError(shown(str(error))) from None
        if opcode.name == "STOP":
            return machine.result()
        machine.step(opcode.name, argument)
    raise BrokenError(f"its pickle has more than {MAX_OPCODES} opcodes")


class _Bounded:
    """A file whose single reads and total are bounded."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._left, self._last = file, MAX_BYTES, b""

    def _spend(self, content: bytes) -> bytes:
        """Counts the bytes read, and raises beyond ``MAX_BYTES``; returns them."""
        self._left -= len(content)
        if self._left < 0:
            raise BrokenError(f"its pickle has more than {MAX_BYTES} bytes")
        return content

    def read(self, count: int) -> bytes:
        if count > MAX_STRING:
            raise BrokenError(f"its pickle has a string of {count} bytes")
        self._last = self._spend(self._file.read(count))
        return self._last

    def readline(self) -> bytes:
        """The rest of a line; among the known opcodes only GLOBAL reads lines."""
        if self._last != b"c":
            _refuse_opcode(_NAMES[self._last.decode("latin-1")])
        line = self._file.readline(MAX_STRING + 1)
        if len(line) > MAX_STRING:
            raise BrokenError(f"its pickle has a line of more than {MAX_STRING} bytes")
        if b"\\" in line:
            raise BrokenError("its pickle names a global with a backslash")
        return self._spend(line)


class _Machine:
    """The stack machine: runs a pickle's opcodes on values and handles, within all limits.

    ``_below`` are the stacks under the marks that are open; ``_claimed`` the bytes of all tensors.
    """

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, Storage] = {}
        self._claimed = 0
        self._containers = 0

    def step(self, name: str, argument: Any) -> None:
        operation = _OPERATIONS.get(name)
        if operation is None:
            _refuse_opcode(name)
        operation(self, argument)

    def result(self) -> tuple[Any, dict[str, Storage]]:
        value = self.pop()
        if self._stack or self._below:
            raise BrokenError("its pickle leaves values behind")
        stored = sum(s.count * STORAGES[s.kind].itemsize for s in self._storages.values())
        if self._claimed > 4 * stored + (1 << 24):
            raise BrokenError(f"its tensors claim {self._claimed} bytes of {stored} stored ones")
        return value, self._storages

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def contain(self, container: Any) -> None:
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise BrokenError(f"its pickle has more than {MAX_CONTAINERS} containers")
        self.push(container)

    def pop(self) -> Any:
        if not self._stack:
            raise BrokenError("its pickle takes from an empty stack")
        return self._stack.pop()

    def top(self, kind: type | tuple[type, ...], what: str) -> Any:
        if not self._stack or type(self._stack[-1]) not in (
            kind if isinstance(kind, tuple) else (kind,)
        ):
            found = type(self._stack[-1]).__name__ if self._stack else "nothing"
            raise BrokenError(f"its pickle would {what} {found}")
        return self._stack[-1]

    def mark(self, _: Any) -> None:
        if len(self._below) >= MAX_DEPTH:
            raise BrokenError(f"its pickle has more than {MAX_DEPTH} open marks")
        self._below.append(self._stack)
        self._stack = []

    def marked(self) -> list[Any]:
        if not self._below:
            raise BrokenError("its pickle misses a mark")
        values, self._stack = self._stack, self._below.pop()
        return values

    def put(self, index: int | None) -> None:
        slot = len(self._memo) if index is None else index
        if slot >= MAX_OPCODES:
            raise BrokenError(f"its pickle uses the memo's place {slot}")
        if not self._stack:
            raise BrokenError("its pickle remembers nothing")
        self._memo[slot] = self._stack[-1]

    def get(self, index: int) -> None:
        if index not in self._memo:
            raise BrokenError(f"its pickle recalls the memo's empty place {index}")
        self.push(self._memo[index])

    def integer(self, value: int) -> None:
        if value.bit_length() > MAX_BITS:
            raise BrokenError(f"its pickle has a number of {value.bit_length()} bits")
        self.push(value)

    def old_string(self, value: str) -> None:
        """A Python 2 string, which ``pickletools`` decodes as latin-1."""
        try:
            self.push(value.encode("latin-1").decode("utf-8"))
        except UnicodeDecodeError:
            raise BrokenError("its pickle has a string that is no UTF-8") from None

    def tuple_of(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def items(self, values: list[Any]) -> None:
        target = self.top((dict, OrderedDict), "set items of")
        if len(values) % 2:
            raise BrokenError("its pickle sets a key without a value")
        for key, value in zip(values[::2], values[1::2]):
            _set(target, key, value)

    def append(self, values: list[Any]) -> None:
        self.top(list, "append to").extend(values)

    def name(self, module: str, name: str) -> None:
        known = (module, name) in _CALLS or (module in ("torch", "torch.cuda") and name in STORAGES)
        if not known:
            _refuse(module, name)
        self.push(Global(module, name))

    def stack_name(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise BrokenError("its pickle names a global by something else than strings")
        self.name(module, name)

    def reduce(self, _: Any) -> None:
        arguments, function = self.pop(), self.pop()
        call = _CALLS.get((function.module, function.name)) if type(function) is Global else None
        if call is None or type(arguments) is not tuple:
            raise BrokenError(f"its pickle would call {_kind(function)} on {_kind(arguments)}")
        value = call(arguments)
        if type(value) is Tensor and call is not _parameter:
            size = STORAGES[value.storage.kind].itemsize
            self._claimed += math.prod(value.shape) * size
        if type(value) is OrderedDict:
            self.contain(value)
        else:
            self.push(value)

    def build(self, _: Any) -> None:
        """Sets an object's state: an ordered dict's is dropped, a NumPy type's is checked."""
        state = self.pop()
        target = self.top((OrderedDict, ScalarType), "set the state of")
        if type(target) is OrderedDict and type(state) not in (dict, OrderedDict):
            raise BrokenError(f"its pickle would make {_kind(state)} the state of a dict")
        if type(target) is ScalarType and not _native(state):
            raise BrokenError("its pickle changes the byte order or size of a NumPy type")

    def storage(self, _: Any) -> None:
        found = _storage(self.pop())
        known = self._storages.setdefault(found.key, found)
        if (known.kind, known.count) != (found.kind, found.count):
            raise BrokenError(f"storage {shown(found.key)} is described twice, differently")
        self.push(found)


def _refuse_opcode(name: str) -> NoReturn:
    """Raises for an opcode that state dicts do not use."""
    raise RefusedError(f"refused: the pickle has the opcode {name}, no state dict's.")


def _kind(value: Any) -> str:
    """What a value of the pickle is, for messages: a global's full name, or the type's."""
    return f"{value.module}.{value.name}" if type(value) is Global else type(value).__name__


def _refuse(module: str, name: str) -> NoReturn:
    """Raises for a global that is not allowed, with advice on how to save the file instead."""
    advice = "save only the state dict, or remove that object from the checkpoint"
    if module.startswith(("torch.nn", "__torch__", "torchvision", "models", "timm")):
        advice = "the file holds a whole module; save module.state_dict() instead"
    elif name.startswith("_rebuild"):
        advice = "save tensors that are dense, of common dtypes, and without attributes"
    raise RefusedError(
        f"refused: the pickle asks for the global {shown(f'{module}.{name}')}; {advice}."
    )


def _set(target: dict[Any, Any], key: Any, value: Any) -> None:
    """Sets an item of a dict; refuses keys other than strings, numbers, booleans and None."""
    plain = type(key) in (str, float, bool) or key is None
    if not plain and not (type(key) is int and abs(key) < 1 << 62):
        raise RefusedError(
            f"refused: the pickle has a dict key of type {_kind(key)}; save only the state dict."
        )
    target[key] = value


def _counts(values: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether the values are sizes: a short tuple of non-negative integers."""
    return (
        type(values) is tuple
        and len(values) <= MAX_RANK
        and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
    )


def _storage(pid: Any) -> Storage:
    """The storage of a persistent id ``("storage", type, key, location, count[, view])``.

    Raises if the type is unknown, a size is not a number, or the view leaves the storage.
    """
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        raise BrokenError("its pickle has a persistent object that is no storage")
    _, kind, key, _, count, *view = pid
    if type(kind) is not Global or kind.name not in STORAGES:
        raise BrokenError(f"its pickle has a storage of type {_kind(kind)}")
    if type(key) not in (str, int) or not _counts((count,)):
        raise BrokenError("its pickle has a storage without key or size")
    start, length = 0, count
    if view and view[0] is not None:
        part = view[0][1:] if type(view[0]) is tuple and len(view[0]) == 3 else None
        if not _counts(part) or sum(part) > count:
            raise BrokenError(f"its pickle has a view that leaves storage {shown(str(key))}")
        start, length = part
    return Storage(str(key), kind.name, count, start, length)


def _tensor(arguments: tuple[Any, ...]) -> Tensor:
    """A tensor from the four arguments storage, offset, size and strides.

    Raises if they are not sizes, or if an element would lie beyond the storage.
    """
    if len(arguments) != 4 or type(arguments[0]) is not Storage:
        raise BrokenError(f"its pickle has a tensor of {len(arguments)} arguments or no storage")
    storage, offset, shape, strides = arguments
    if not (_counts((offset,)) and _counts(shape) and _counts(strides)):
        raise BrokenError("its pickle has a tensor with a bad offset, size or strides")
    where = f"a tensor of size {list(shape)} and strides {list(strides)}"
    if len(shape) != len(strides) or math.prod(max(n, 1) for n in shape) >= 1 << 56:
        raise BrokenError(f"its pickle has {where}")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides))
    if math.prod(shape) and last >= storage.length:
        raise BrokenError(f"{where} reaches past its {storage.length} stored elements")
    return Tensor(storage, offset, shape, strides)


def _tensor_v2(arguments: tuple[Any, ...]) -> Tensor:
    """A tensor from the arguments of ``_rebuild_tensor_v2``, with its conj and neg bits.

    The arguments are storage, offset, size, strides, requires_grad, hooks and, perhaps, bits;
    requires_grad and hooks are dropped. Bits that the dtype cannot have are refused.
    """
    if not 6 <= len(arguments) <= 7 or type(arguments[4]) is not bool:
        raise BrokenError(f"its pickle has a tensor of {len(arguments)} arguments or odd ones")
    tensor, bits = _tensor(arguments[:4]), (*arguments, None)[6]
    dtype, given = STORAGES[tensor.storage.kind], {} if bits is None else bits
    if type(given) not in (dict, OrderedDict) or not all(
        value is True and dtype.kind in _BITS.get(name, "") for name, value in given.items()
    ):
        raise RefusedError(f"refused: a tensor of {dtype} has bits that are not its; clone() it.")
    return dataclasses.replace(tensor, bits=frozenset(given))


_BITS = {"conj": "c", "neg": "fciuV"}
"""The bits of tensors, and the kinds of dtypes that may have them; V is bfloat16."""


def _parameter(arguments: tuple[Any, ...]) -> Tensor:
    """The tensor of a parameter; requires_grad, hooks and attributes are dropped.

    Attributes that would change the tensor's values when set are refused.
    """
    if not 3 <= len(arguments) <= 4 or type(arguments[0]) is not Tensor:
        raise BrokenError(f"its pickle has a parameter of {len(arguments)} arguments or no tensor")
    state = (*arguments, None)[3]
    for part in state if type(state) is tuple else (state,):
        if type(part) in (dict, OrderedDict) and not part.keys().isdisjoint(_CONTENT):
            raise RefusedError(f"refused: a parameter's attributes hold one of {_CONTENT}.")
    return arguments[0]


_CONTENT = ("data", "real", "imag")
"""Attributes that change a tensor's values when they are set."""


def _size(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """The sizes of a ``torch.Size``, a tuple of integers."""
    sizes = arguments[0] if len(arguments) == 1 else None
    sizes = tuple(sizes) if type(sizes) is list else sizes
    if not _counts(sizes):
        raise BrokenError("its pickle has a torch.Size of something else than sizes")
    return sizes


def _ordered(arguments: tuple[Any, ...]) -> OrderedDict[Any, Any]:
    """An ordered dict: empty, or, in files from Python 2, of a list of pairs."""
    pairs = arguments[0] if len(arguments) == 1 else []
    if len(arguments) > 1 or type(pairs) is not list:
        raise BrokenError("its pickle has an ordered dict of something else than pairs")
    made: OrderedDict[Any, Any] = OrderedDict()
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise BrokenError("its pickle has an ordered dict of something else than pairs")
        _set(made, *pair)
    return made


def _scalar_type(arguments: tuple[Any, ...]) -> ScalarType:
    """A NumPy scalar type by its code, such as ``f4``; others are refused."""
    code = arguments[0] if arguments else None
    if type(code) is not str or code not in _SCALARS:
        known = shown(code) if type(code) is str else _kind(code)
        raise RefusedError(f"refused: the pickle asks for the NumPy dtype {known!r}.")
    return ScalarType(code)


def _native(state: Any) -> bool:
    """Whether a NumPy type's state leaves it unchanged: version 3, not big-endian, no fields."""
    if type(state) is not tuple or len(state) != 8 or any(type(v) is tuple for v in state):
        return False
    return state[:1] == (3,) and state[1] in ("<", "|", "=") and state[2:] == (
        None, None, None, -1, -1, 0,
    )  # fmt: skip


def _scalar(arguments: tuple[Any, ...]) -> Scalar:
    """A NumPy scalar from its type and bytes, whose number must fit the type."""
    kind, content = arguments if len(arguments) == 2 else (None, None)
    if type(kind) is not ScalarType or type(content) is not bytes:
        raise BrokenError("its pickle has a NumPy number without type or bytes")
    if len(content) != int(kind.code[1]):
        raise BrokenError(f"its pickle has a {kind.code} of {len(content)} bytes")
    return Scalar(kind.code, content)


def _encode(arguments: tuple[Any, ...]) -> bytes:
    """The bytes that pickle protocol 2 writes as a latin-1 string."""
    text, codec = arguments if len(arguments) == 2 else (None, None)
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise RefusedError("refused: the pickle encodes something else than bytes.")
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise BrokenError("its pickle has bytes beyond 255") from None


_CALLS: dict[tuple[str, str], Callable[[tuple[Any, ...]], Any]] = {
    ("collections", "OrderedDict"): _ordered,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch", "Size"): _size,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy", "dtype"): _scalar_type,
    ("_codecs", "encode"): _encode,
}

_Operation = Callable[[_Machine, Any], None]
_OPERATIONS: dict[str, _Operation] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": _Machine.mark,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.contain({}),
    "EMPTY_LIST": lambda machine, _: machine.contain([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.marked())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "SETITEM": lambda machine, _: machine.items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.items(machine.marked()),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.marked()),
    "GLOBAL": lambda machine, names: machine.name(*names.split(" ", 1)),
    "STACK_GLOBAL": _Machine.stack_name,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.storage,
    "MEMOIZE": lambda machine, _: machine.put(None),
    "BINSTRING": _Machine.old_string,
    "SHORT_BINSTRING": _Machine.old_string,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4"), _Machine.integer),
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINFLOAT", "BINBYTES",
         "SHORT_BINBYTES", "BINBYTES8"),
        _Machine.push,
    ),
}  # fmt: skip
