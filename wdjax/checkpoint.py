"""PyTorch checkpoint files without PyTorch: zip and legacy pickles, read and never run."""

import collections
import io
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001

_STORAGES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
    "ComplexFloatStorage": np.complex64,
    "ComplexDoubleStorage": np.complex128,
}
_SCALARS = {"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"}

_CORRUPT = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
    RecursionError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    io.UnsupportedOperation,
)


def read(path: str | PathLike[str]) -> Any:
    """Reads a PyTorch checkpoint as nested containers of NumPy arrays.

    Both formats that ``torch.save`` has written since 2017 are read: the zip archive and the legacy
    sequence of pickles. Nothing in the file is executed: the unpickler knows containers, numbers
    and tensors, and refuses every other global by its name. Device tags such as ``cuda:0`` are
    ignored; strides, offsets and shared storages are kept.

    Args:
      path: the checkpoint file.

    Returns:
      What was saved, usually a (nested) dict of name -> array, bit for bit as
      ``torch.load(path, weights_only=True)`` reads it. bfloat16 has the dtype of ``ml_dtypes``.

    Raises:
      ValueError: the file is truncated or corrupt, no PyTorch checkpoint, or needs a global other
        than those of tensors and containers; the message names the fault.
      FileNotFoundError: there is no such file.

    Cost: one pass over the file; memory is the size of its tensors.

    >>> read("model.pt")["state_dict"]["fc.weight"].shape  # doctest: +SKIP
    (10, 512)
    """
    path = Path(path)
    with path.open("rb") as file:
        try:
            if file.read(4) == b"PK\x03\x04":
                return _read_zip(file)
            file.seek(0)
            return _read_legacy(file, path.stat().st_size)
        except _RefusedError as error:
            raise ValueError(f"{path}: {error}") from None
        except _CORRUPT as error:
            fault = str(error) or type(error).__name__
            raise ValueError(
                f"{path} is truncated, corrupt or no PyTorch checkpoint ({fault}); fetch it again."
            ) from error


class _RefusedError(Exception):
    """A fault whose message needs no more context than the path."""


class _Storage(NamedTuple):
    data: np.ndarray


def _refuse(module: str, name: str) -> NoReturn:
    whole = module.startswith(("torch.nn", "__torch__", "torchvision", "models", "timm"))
    advice = (
        "the file holds a whole module; save module.state_dict() instead"
        if whole
        else "save only the state dict, or remove that object from the checkpoint"
    )
    raise _RefusedError(f"refused: the pickle asks for the global {module}.{name}; {advice}.")


class _Callable:
    """Stands in for a global, so that a pickle cannot reach or alter the real one."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class _Dtype:
    """The NumPy dtypes of scalars, built as pickles build them: a code, then the byte order."""

    __slots__ = ("dtype",)

    def __init__(self, code: str, *_: Any) -> None:
        if code not in _SCALARS:
            raise _RefusedError(f"refused: the pickle asks for the NumPy dtype {code!r}.")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


def _rebuild_tensor(
    storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> np.ndarray:
    data = storage.data
    if min((offset, *size, *stride), default=0) < 0 or len(size) != len(stride):
        raise ValueError(f"a tensor has offset {offset}, size {size} and strides {stride}")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride))
    if math.prod(size) and last >= data.size:
        raise ValueError(f"a tensor of size {size} reaches past its {data.size} stored elements")
    steps = tuple(step * data.itemsize for step in stride)
    if not math.prod(size):
        return np.empty(size, data.dtype)
    return np.ndarray(size, data.dtype, data, offset * data.itemsize, steps)


def _parameter(data: np.ndarray, *_: Any) -> np.ndarray:
    return data


def _scalar(dtype: _Dtype, content: bytes) -> np.generic:
    return np.frombuffer(content, dtype.dtype, count=1)[0]


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8"):
        raise _RefusedError(f"refused: the pickle asks for the codec {encoding!r}.")
    return text.encode(encoding)


_GLOBALS: dict[tuple[str, str], Callable] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch", "Size"): lambda size=(): tuple(size),
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


_Find = Callable[[np.dtype, str, int, tuple[Any, ...] | None], _Storage]
"""The storage of a dtype, a key and a count, and where in another one it lies."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], storage: _Find) -> None:
        super().__init__(file, encoding="utf-8")
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module in ("torch", "torch.cuda") and name in _STORAGES:
            return np.dtype(_STORAGES[name])
        if (module, name) in _GLOBALS:
            return _Callable(_GLOBALS[module, name])
        _refuse(module, name)

    def persistent_load(self, pid: Any) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise ValueError(f"unknown persistent object {pid!r}")
        _, dtype, key, _, count, *view = pid
        if not isinstance(dtype, np.dtype):
            raise ValueError(f"storage {key} has the unknown type {dtype!r}")
        return self._storage(dtype, str(key), int(count), view[0] if view else None)


def _read_zip(file: IO[bytes]) -> Any:
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise ValueError(f"the zip directory at the end is missing: {error}") from error
    with archive:
        names = set(archive.namelist())
        pickles = [name for name in names if name.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            raise _RefusedError("a zip file, but no PyTorch checkpoint: it holds no data.pkl.")
        root = pickles[0].removesuffix("data.pkl")
        if root + "byteorder" in names and archive.read(root + "byteorder") != b"little":
            raise _RefusedError("saved on a big-endian machine, which is not supported.")
        stored: dict[str, np.ndarray] = {}

        def storage(
            dtype: np.dtype, key: str, count: int, view: tuple[Any, ...] | None
        ) -> _Storage:
            if key not in stored:
                stored[key] = np.frombuffer(archive.read(f"{root}data/{key}"), np.uint8)
            content = stored[key]
            if len(content) < count * dtype.itemsize:
                raise ValueError(f"storage {key} has {len(content)} bytes for {count} {dtype}")
            return _Storage(content[: count * dtype.itemsize].view(dtype))

        return _Unpickler(io.BytesIO(archive.read(pickles[0])), storage).load()


def _no_storage(*_: Any) -> NoReturn:
    raise ValueError("a tensor in the header")


def _read_legacy(file: io.BufferedReader, size: int) -> Any:
    def header() -> Any:
        return _Unpickler(file, _no_storage).load()

    if header() != _MAGIC:
        raise ValueError("the magic number is missing")
    if header() != _PROTOCOL:
        raise ValueError("unknown protocol version")
    if not header().get("little_endian", True):
        raise _RefusedError("saved on a big-endian machine, which is not supported.")
    stored: dict[str, np.ndarray] = {}

    def storage(dtype: np.dtype, key: str, count: int, view: tuple[Any, ...] | None) -> _Storage:
        if count < 0 or count * dtype.itemsize > size:
            raise ValueError(f"storage {key} claims {count} {dtype} in a file of {size} bytes")
        data = stored.setdefault(key, np.empty(count, dtype))
        if data.dtype != dtype or data.size != count:
            raise ValueError(f"storage {key} is described twice, differently")
        if view is not None:
            _, start, length = view
            data = data[start : start + length]
        return _Storage(data)

    # Tensors are views of storages whose bytes follow behind the pickle.
    result = _Unpickler(file, storage).load()
    keys = header()
    if set(map(str, keys)) != set(stored):
        raise ValueError("the list of storages does not match the tensors")
    for key in map(str, keys):
        (count,) = struct.unpack("<q", file.read(8))
        data = stored[key]
        if count != data.size or file.readinto(data.view(np.uint8).data) != data.nbytes:
            raise ValueError(f"storage {key} is cut short")
    return result


_SAFE = {
    "F32": np.float32,
    "F64": np.float64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def write_safetensors(
    path: str | PathLike[str], tensors: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Writes arrays as a safetensors file: the length of a JSON header, the header, the bytes.

    Args:
      path: the file; it is replaced.
      tensors: name -> array.
      metadata: strings to keep beside them.

    Raises:
      ValueError: a dtype that the format does not have.
    """
    codes = {np.dtype(dtype): code for code, dtype in _SAFE.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in codes:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which safetensors lacks.")
        span = [offset, offset + tensor.nbytes]
        header[name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        offset = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def read_safetensors(
    path: str | PathLike[str],
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Reads a safetensors file.

    Args:
      path: the file.

    Returns:
      name -> array, and the metadata.

    Raises:
      ValueError: the file is truncated, corrupt or no safetensors file.
    """
    content = np.fromfile(path, np.uint8)
    try:
        (length,) = struct.unpack("<Q", content[:8].tobytes())
        header = json.loads(content[8 : 8 + length].tobytes())
        metadata = header.pop("__metadata__", {})
        data = content[8 + length :]
        tensors = {}
        for name, facts in header.items():
            start, stop = facts["data_offsets"]
            if not 0 <= start <= stop <= data.size:
                raise ValueError(f"{name} reaches past the end")
            flat = np.frombuffer(data[start:stop].tobytes(), _SAFE[facts["dtype"]])
            tensors[name] = flat.reshape(facts["shape"])
    except _CORRUPT as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}).") from error
    return tensors, metadata
