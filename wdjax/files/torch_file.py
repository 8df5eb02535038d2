"""PyTorch checkpoint files without PyTorch: zip, legacy and safetensors; no code is executed."""

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import ml_dtypes
import numpy as np

from wdjax.files import archive, state_pickle
from wdjax.files.state_pickle import (
    MAX_BYTES,
    MAX_DEPTH,
    STORAGES,
    BrokenError,
    RefusedError,
    Scalar,
    Tensor,
    shown,
)

Read = TypeVar("Read")

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001

_OTHERS = (
    (
        b"version https://git-lfs.github.com",
        "a git-lfs pointer; run 'git lfs pull'",
    ),
    (b"\x93NUMPY", "a NumPy array (.npy)"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, such as Keras writes"),
    (b"\x89PNG", "a PNG image"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"BZh", "a bzip2 archive; unpack it first"),
    (b"\xfd7zXZ\x00", "an xz archive; unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstandard archive; unpack it first"),
    (b"Rar!", "a RAR archive; unpack it first"),
    (b"GGUF", "a GGUF file"),
    (b"{", "a JSON file"),
    (b"PK\x05\x06", "an empty zip archive"),
)
_HTML = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<body")

SAFE: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{f"I{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    "BOOL": np.dtype(np.bool_),
}
"""The dtypes of safetensors files that can be read."""


def read(path: str | PathLike[str]) -> Any:
    """Reads a checkpoint as nested containers of NumPy arrays.

    The format is recognised by the first bytes: the zip archive and the legacy sequence of pickles
    that ``torch.save`` has written since 2017, and safetensors. Nothing in the file is executed:
    :mod:`wdjax.files.state_pickle` interprets pickles of containers, numbers and tensors, and
    refuses every other global by name. Device tags such as ``cuda:0`` are ignored; strides, offsets
    and shared storages are kept; conjugate and negative bits are applied.

    Args:
      path: the checkpoint file.

    Returns:
      The saved value, usually a (nested) dict of name -> array, bit for bit as
      ``torch.load(path, weights_only=True)`` reads it. Arrays are read-only; bfloat16 is the dtype
      of ``ml_dtypes``.

    Raises:
      ValueError: the file is truncated or corrupt, is no PyTorch checkpoint (the message says what
        it is), or needs a global other than those of tensors and containers.
      FileNotFoundError: no such file.

    Cost: one pass over the file; memory is the size of its tensors.

    >>> read("model.pt")["state_dict"]["fc.weight"].shape  # doctest: +SKIP
    (10, 512)
    """
    with _file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(512)
        file.seek(0)
        try:
            return _reader(start)(file, size)
        except RefusedError as error:
            raise ValueError(f"{path}: {error}") from None
        except BrokenError as error:
            raise ValueError(
                f"{path} is truncated, corrupt or no PyTorch checkpoint ({error}); fetch it again."
            ) from error


def read_safetensors(path: str | PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a safetensors file.

    Args:
      path: the file.

    Returns:
      name -> read-only array.

    Raises:
      ValueError: the file is truncated, corrupt or no safetensors file.
      FileNotFoundError: no such file.
    """
    return _opened(path, _safetensors)


def read_metadata(path: str | PathLike[str]) -> dict[str, str]:
    """The metadata of a safetensors file, strings by name.

    Args:
      path: the file.

    Raises:
      ValueError: the file is truncated, corrupt or no safetensors file.
      FileNotFoundError: no such file.
    """
    return _opened(path, _metadata)


def _file(path: str | PathLike[str]) -> BinaryIO:
    """The file, opened for reading; raises for folders, and for pipes, which would block."""
    path = Path(path)
    if path.exists() and not path.is_file():  # Opening a pipe would block.
        raise ValueError(f"{path} is a folder, a pipe or a device; pass a file.")
    return path.open("rb")


def _opened(path: str | PathLike[str], read: Callable[[BinaryIO, int], Read]) -> Read:
    """``read(file, size)`` of a safetensors file; errors become ValueErrors with the path."""
    with _file(path) as file:
        try:
            return read(file, os.fstat(file.fileno()).st_size)
        except BrokenError as error:
            raise ValueError(f"{path} is truncated or no safetensors file ({error}).") from error


_Reader = Callable[[BinaryIO, int], Any]


def _reader(start: bytes) -> _Reader:
    """Chooses the function that reads a file by ``start``, its first bytes.

    Raises for files of other known kinds, with a message that says what they are.
    """
    if start.startswith(b"PK\x03\x04"):
        return _read_zip
    if start.startswith(b"\x80"):
        return _read_legacy
    if start[8:9] == b"{":
        return _safetensors
    if not start:
        raise BrokenError("the file is empty")
    if start.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_HTML):
        raise RefusedError(
            "no PyTorch checkpoint but a web page, such as an error or login page that was saved "
            "in its place; open the address in a browser."
        )
    if start[257:262] == b"ustar":
        raise RefusedError(
            "no PyTorch checkpoint but a tar archive; unpack it first. torch.save wrote tar files "
            "before 2017: load and save those with PyTorch."
        )
    for magic, name in _OTHERS:
        if start.startswith(magic):
            raise RefusedError(f"no PyTorch checkpoint but {name}.")
    raise BrokenError(f"it begins with {start[:8]!r}")


def _read_zip(file: BinaryIO, size: int) -> Any:
    """Reads a zip file of ``torch.save``: the pickle ``data.pkl``, and a member for each storage.

    Returns nested containers of arrays. Raises if a storage's member is not of the size that the
    pickle claims, or if the file is big-endian.
    """
    opened, entries = archive.opened(file, size)
    with opened:
        pickles = [name for name in entries if name.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            npz = any(name.endswith(".npy") for name in entries)
            what = "NumPy's .npz archive" if npz else "a zip archive that holds no data.pkl"
            raise RefusedError(f"no PyTorch checkpoint but {what}.")
        root = pickles[0].removesuffix("data.pkl")

        def entry(name: str, limit: int) -> bytes:
            return archive.content(opened, entries, root + name, limit)

        if root + "byteorder" in entries and entry("byteorder", 16) != b"little":
            raise RefusedError("saved on a big-endian machine, which is not supported.")
        value, storages = state_pickle.load(io.BytesIO(entry("data.pkl", MAX_BYTES)))
        contents = {}
        for key, storage in storages.items():
            content = entry(f"data/{key}", size)
            if len(content) != storage.count * STORAGES[storage.kind].itemsize:
                raise BrokenError(
                    f"storage {shown(key)} has {len(content)} bytes for {storage.count} elements "
                    f"of {STORAGES[storage.kind]}"
                )
            contents[key] = content
    return _Resolver(contents).resolve(value)


def _read_legacy(file: BinaryIO, size: int) -> Any:
    """Reads a legacy file of ``torch.save``: five pickles, then the storages' data.

    The pickles are magic number, protocol, system, value, and the storages' keys in the order of
    their data. Returns nested containers of arrays.
    """

    def header() -> Any:
        value, storages = state_pickle.load(file)
        if storages:
            raise BrokenError("a tensor in the header")
        return value

    if header() != _MAGIC:
        raise BrokenError("a pickle, but torch.save's magic number is missing")
    if header() != _PROTOCOL:
        raise BrokenError("unknown protocol version")
    system = header()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise RefusedError("saved on a big-endian machine, which is not supported.")
    # The storages' data follow the pickles; tensors are views of them.
    value, storages = state_pickle.load(file)
    keys = header()
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages):
        raise BrokenError("the list of storages does not match the tensors")
    left = size - file.tell()
    contents = {}
    for key in map(str, keys):
        length = storages[key].count * STORAGES[storages[key].kind].itemsize
        left -= 8 + length
        if left < 0 or file.read(8) != storages[key].count.to_bytes(8, "little"):
            raise BrokenError(f"storage {shown(key)} is cut short")
        contents[key] = file.read(length)
    return _Resolver(contents).resolve(value)


class _Resolver:
    """Replaces handles by arrays, each container once; a container must not contain itself."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._contents = contents
        self._done: dict[int, tuple[Any, int]] = {}
        self._open: set[int] = set()

    def resolve(self, value: Any) -> Any:
        return self._resolved(value)[0]

    def _resolved(self, value: Any) -> tuple[Any, int]:
        """A value with all handles in it replaced by arrays, and its depth of nesting."""
        if isinstance(value, Tensor):
            if id(value) not in self._done:
                self._done[id(value)] = self._array(value), 0
            return self._done[id(value)]
        if isinstance(value, Scalar):
            return np.frombuffer(value.content, np.dtype(value.code).newbyteorder("<"))[0], 0
        if isinstance(value, (dict, list, tuple)):
            return self._container(value)
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value, 0
        raise BrokenError(f"its pickle leaves a {type(value).__name__} by itself")

    def _container(self, value: Any) -> tuple[Any, int]:
        """A container with its children resolved, and its depth of nesting.

        A shared container is resolved once. Raises if it contains itself or is nested deeper than
        ``MAX_DEPTH``.
        """
        known = id(value)
        if known in self._done:
            return self._done[known]
        if known in self._open:
            raise BrokenError("a container in its pickle holds itself")
        if len(self._open) >= MAX_DEPTH:
            raise BrokenError(f"containers in its pickle are nested deeper than {MAX_DEPTH}")
        self._open.add(known)
        pairs = [self._resolved(child) for child in _children(value)]
        self._open.remove(known)
        depth = 1 + max((below for _, below in pairs), default=0)
        if depth > MAX_DEPTH:
            raise BrokenError(f"containers in its pickle are nested deeper than {MAX_DEPTH}")
        resolved = [child for child, _ in pairs]
        whole: Any = resolved
        if isinstance(value, dict):
            whole = dict(zip(value, resolved))
        elif isinstance(value, tuple):
            whole = tuple(resolved)
        self._done[known] = whole, depth
        return whole, depth

    def _array(self, tensor: Tensor) -> np.ndarray:
        """The array of a tensor handle: a read-only strided view of its storage's bytes.

        Tensors with a conj or neg bit, and empty ones, are new arrays.
        """
        dtype, shape = STORAGES[tensor.storage.kind], tensor.shape
        if 0 in shape:
            return np.empty(shape, dtype)
        steps = tuple(
            step * dtype.itemsize if n > 1 else dtype.itemsize
            for n, step in zip(shape, tensor.strides)
        )
        first = (tensor.storage.start + tensor.offset) * dtype.itemsize
        array = np.ndarray(shape, dtype, self._contents[tensor.storage.key], first, steps)
        for bit in tensor.bits:
            array = np.asarray(_BITS[bit](array))
            array.flags.writeable = False
        return array


_BITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"conj": np.conj, "neg": np.negative}
"""The order of conj and neg does not matter."""


def _children(value: dict[Any, Any] | OrderedDict[Any, Any] | list[Any]) -> Iterable[Any]:
    """The values of a dict, or the items of a list or tuple."""
    return value.values() if isinstance(value, dict) else value


def _check_header(file: BinaryIO, size: int) -> None:
    """Raises if a safetensors file claims a header beyond its size or ``MAX_BYTES``."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, MAX_BYTES):
        raise BrokenError(f"its safetensors header claims {length} bytes")
    file.seek(0)


def _metadata(file: BinaryIO, size: int) -> dict[str, str]:
    """The metadata of a safetensors file, strings by name; an empty dict without."""
    import safetensors

    _check_header(file, size)
    try:
        with safetensors.safe_open(file.name, framework="np") as opened:
            return opened.metadata() or {}
    except safetensors.SafetensorError as error:
        raise BrokenError(shown(str(error))) from None


def _safetensors(file: BinaryIO, size: int) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as read-only arrays by name; refuses unknown dtypes."""
    import safetensors

    _check_header(file, size)
    try:
        found = safetensors.deserialize(file.read())
    except safetensors.SafetensorError as error:
        raise BrokenError(shown(str(error))) from None
    tensors = {}
    for name, facts in found:
        if facts["dtype"] not in SAFE:
            raise BrokenError(f"{shown(name)} has the dtype {facts['dtype']}")
        dtype, shape = SAFE[facts["dtype"]], tuple(facts["shape"])
        if len(shape) > state_pickle.MAX_RANK:
            raise BrokenError(f"{shown(name)} has {len(shape)} axes")
        tensors[name] = np.ndarray(shape, dtype, facts["data"])
        tensors[name].flags.writeable = False
    return tensors
