"""Untrusted zip archives: sizes that they claim are checked before memory is allocated."""

import io
import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from wdjax.files.state_pickle import MAX_RANK, BrokenError, RefusedError, shown

Entries = dict[str, zipfile.ZipInfo]

_MAX_DIRECTORY = 1 << 22
_MAX_RATIO = 100
"""Largest ratio of size to compressed size, for entries larger than :data:`_SMALL`."""
_SMALL = 1 << 26
_FOLDER = 0x10
"""The attribute of folders; PyTorch reads uninitialised memory for such an entry."""

_FAULTS = (
    zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError,
    ValueError, OverflowError, OSError,
)  # fmt: skip
"""Exceptions that ``zipfile`` raises for damaged archives."""


def opened(file: BinaryIO, size: int) -> tuple[zipfile.ZipFile, Entries]:
    """Opens an archive of ``size`` bytes; returns it and its entries by name.

    Raises:
      BrokenError: truncated, corrupt, with two entries of one name, or with too large a directory.
    """
    _check_directory(file, size)
    try:
        archive = zipfile.ZipFile(file)
    except _FAULTS as error:
        what = shown(str(error))
        raise BrokenError(f"the zip directory at its end is broken: {what}") from None
    entries = {entry.filename: entry for entry in archive.infolist()}
    if len(entries) != len(archive.infolist()):
        raise BrokenError("two entries of the zip archive have one name")
    return archive, entries


def _check_directory(file: BinaryIO, size: int) -> None:
    """Raises if a zip file's directory is missing or claims more than ``_MAX_DIRECTORY`` bytes.

    ``size`` is that of the file. The directory is read as a whole later, so its size is checked
    first.
    """
    tail = min(size, (1 << 16) + 22 + 76)
    file.seek(size - tail)
    end = file.read(tail)
    offset = end.rfind(b"PK\x05\x06")
    if offset < 0 or len(end) < offset + 22:
        raise BrokenError("the zip directory at its end is missing")
    (length,) = struct.unpack_from("<L", end, offset + 12)
    if offset >= 76 and end[offset - 76 : offset - 72] == b"PK\x06\x06":  # zip64's.
        (length,) = struct.unpack_from("<Q", end, offset - 36)
    if length > _MAX_DIRECTORY:
        raise BrokenError(f"its zip directory claims {length} bytes")
    file.seek(0)


def content(
    archive: zipfile.ZipFile, entries: Entries, name: str, limit: int, *, deflated: bool = False
) -> bytes:
    """The bytes of an entry; its checksum is verified.

    Args:
      archive: from :func:`opened`.
      entries: its entries.
      name: name of the entry.
      limit: maximum number of bytes in the file.
      deflated: whether it may be compressed, at a plausible ratio.

    Raises:
      BrokenError: no such entry, too large a claim, or damage.
      RefusedError: it is encrypted, or compressed by another method.
    """
    entry = _plausible(entries, name, limit, deflated)
    try:
        with archive.open(entry) as stream:
            # Expands no more than this length; one byte at least, to verify an empty entry, too.
            found = stream.read(max(entry.file_size, 1))
    except _FAULTS as error:
        raise BrokenError(f"{shown(name)}: {shown(str(error))}") from None
    if len(found) != entry.file_size:
        raise BrokenError(f"{shown(name)} is cut short")
    return found


def _plausible(entries: Entries, name: str, limit: int, deflated: bool) -> zipfile.ZipInfo:
    """The entry of a name; raises as :func:`content` for what the directory claims of it."""
    entry = entries.get(name)
    if entry is None or entry.external_attr & _FOLDER:
        raise BrokenError(f"the zip archive holds no {shown(name)}")
    kinds = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED)
    if entry.compress_type not in kinds or entry.flag_bits & 1:
        raise RefusedError(
            f"refused: the entry {shown(name)} is compressed or encrypted in a way that is not "
            "read; save the file anew, without."
        )
    least, most = 0, max(_SMALL, _MAX_RATIO * entry.compress_size)
    if entry.compress_type == zipfile.ZIP_STORED:
        least = most = entry.compress_size
    if not least <= entry.file_size <= most or entry.compress_size > limit:
        raise BrokenError(
            f"the entry {shown(name)} claims {entry.file_size} bytes, stored as "
            f"{entry.compress_size}, of at most {limit}"
        )
    return entry


def arrays(file: BinaryIO, size: int) -> dict[str, np.ndarray]:
    """All arrays of an npz archive of ``size`` bytes, by name; raises as :func:`content`."""
    zipped, entries = opened(file, size)
    with zipped:
        found = {name: content(zipped, entries, name, size, deflated=True) for name in entries}
    return {name.removesuffix(".npy"): array(held, name) for name, held in found.items()}


def array(content: bytes, name: str) -> np.ndarray:
    """A read-only array from the bytes of an ``npy`` file; raises unless it holds plain numbers.

    ``name`` is for messages. The size that the header claims must be that of the content.
    """
    shape, dtype, order, start = _header(content[:_MAX_HEADER], len(content), name)
    flat = np.frombuffer(content, dtype, math.prod(shape), start)
    return flat.reshape(shape, order=order)


def _header(
    begin: bytes, size: int, name: str
) -> tuple[tuple[int, ...], np.dtype, Literal["C", "F"], int]:
    """Shape, dtype, order and the offset of the first number of an ``npy`` file of ``size`` bytes.

    Raises as :func:`array`; ``begin`` are its first bytes.
    """
    head = io.BytesIO(begin)
    try:
        read = _HEADERS[np.lib.format.read_magic(head)]
        shape, turned, dtype = read(head, max_header_size=_MAX_HEADER)
    except Exception as error:  # NumPy evaluates the header as Python, which fails in many ways.
        raise BrokenError(f"{name}.npy has a header that is none: {shown(str(error))}") from None
    if dtype.kind not in "fiu":
        raise RefusedError(f"{name}.npy holds {shown(str(dtype))}, which are no plain numbers")
    sizes = len(shape) <= MAX_RANK and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or math.prod(shape) * dtype.itemsize != size - head.tell():
        claim = shown(f"{dtype}{list(shape)}")
        raise BrokenError(f"{name}.npy claims {claim} and holds {size} bytes")
    return shape, dtype, "F" if turned else "C", head.tell()


def mapped(path: Path, name: str, start: int = 0, size: int | None = None) -> np.ndarray:
    """The array of an ``npy`` file, whose numbers stay on the disk until they are looked at.

    Args:
      path: the file, or an archive that holds it as it is.
      name: for messages.
      start: the offset of its first byte in ``path``.
      size: its number of bytes, by default those of all of ``path``.

    Raises:
      BrokenError, RefusedError: as :func:`array`.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        file.seek(start)
        shape, dtype, order, offset = _header(file.read(min(size, _MAX_HEADER)), size, name)
    if not math.prod(shape):
        return np.empty(shape, dtype)
    try:
        return np.atleast_1d(np.memmap(path, dtype, "r", start + offset, shape, order))
    except (OSError, OverflowError, ValueError) as error:
        raise BrokenError(f"{name}.npy cannot be mapped: {shown(str(error))}") from None


class Deflated:
    """Rows of a compressed array, read by slices: what comes before them is decompressed, not kept.

    Args:
      path: the archive.
      entries: its entries.
      name: of the array's.

    Raises:
      BrokenError, RefusedError: as :func:`content` and :func:`array`.
    """

    def __init__(self, path: Path, entries: Entries, name: str) -> None:
        self._path, self._name = path, name
        self._entry = _plausible(entries, f"{name}.npy", path.stat().st_size, True)
        begin = self._read(0, min(_MAX_HEADER, self._entry.file_size))
        self._shape, self._dtype, order, self._start = _header(begin, self._entry.file_size, name)
        if order == "F" and len(self._shape) > 1:
            raise RefusedError(
                f"{name}.npy is compressed, and not in C order, so that its rows cannot be read "
                "alone; save np.ascontiguousarray of it"
            )

    def __len__(self) -> int:
        return self._shape[0] if self._shape else 0

    def __getitem__(self, rows: slice) -> np.ndarray:
        some = range(len(self))[rows]
        shape = len(some), *self._shape[1:]
        step = math.prod(self._shape[1:]) * self._dtype.itemsize
        held = self._read(self._start + some.start * step, len(some) * step)
        return np.ndarray(shape, self._dtype, held)

    def _read(self, start: int, size: int) -> bytes:
        try:
            with zipfile.ZipFile(self._path) as archive, archive.open(self._entry) as stream:
                stream.seek(start)
                found = stream.read(size)
        except _FAULTS as error:
            raise BrokenError(f"{self._name}.npy: {shown(str(error))}") from None
        if len(found) != size:
            raise BrokenError(f"{self._name}.npy is cut short")
        return found


def on_disk(path: Path, file: BinaryIO, name: str) -> np.ndarray | Deflated:
    """The array of an entry of an npz archive, whose rows are read by slices.

    What is stored as it is gets mapped; its checksum, which is one of the whole, is not verified.

    Args:
      path: the archive.
      file: the same, opened.
      name: of the array.

    Raises:
      BrokenError, RefusedError: as :func:`content` and :func:`array`.
    """
    zipped, entries = opened(file, os.fstat(file.fileno()).st_size)
    with zipped:
        entry = _plausible(entries, f"{name}.npy", path.stat().st_size, True)
        if entry.compress_type != zipfile.ZIP_STORED:
            return Deflated(path, entries, name)
        try:
            zipped.open(entry).close()  # Its own header is that of the directory.
        except _FAULTS as error:
            raise BrokenError(f"{name}.npy: {shown(str(error))}") from None
        file.seek(entry.header_offset + 26)
        lengths = struct.unpack("<HH", file.read(4))
    return mapped(path, name, entry.header_offset + 30 + sum(lengths), entry.file_size)


_MAX_HEADER = 1 << 12
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # Unlike 2.0 it may have Unicode field names.
}
