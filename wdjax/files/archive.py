"""Untrusted zip archives: sizes that they claim are checked before memory is allocated."""

import io
import math
import struct
import zipfile
import zlib
from typing import BinaryIO

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
    place = end.rfind(b"PK\x05\x06")
    if place < 0 or len(end) < place + 22:
        raise BrokenError("the zip directory at its end is missing")
    (length,) = struct.unpack_from("<L", end, place + 12)
    if place >= 76 and end[place - 76 : place - 72] == b"PK\x06\x06":  # zip64's.
        (length,) = struct.unpack_from("<Q", end, place - 36)
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
    try:
        with archive.open(entry) as stream:
            # Expands no more than this length; one byte at least, to verify an empty entry, too.
            found = stream.read(max(entry.file_size, 1))
    except _FAULTS as error:
        raise BrokenError(f"{shown(name)}: {shown(str(error))}") from None
    if len(found) != entry.file_size:
        raise BrokenError(f"{shown(name)} is cut short")
    return found


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
    head = io.BytesIO(content[:_MAX_HEADER])
    try:
        read = _HEADERS[np.lib.format.read_magic(head)]
        shape, turned, dtype = read(head, max_header_size=_MAX_HEADER)
    except Exception as error:  # NumPy evaluates the header as Python, which fails in many ways.
        raise BrokenError(f"{name}.npy has a header that is none: {shown(str(error))}") from None
    if dtype.kind not in "fiu":
        raise RefusedError(f"{name}.npy holds {shown(str(dtype))}, which are no plain numbers")
    count = math.prod(shape)
    sizes = len(shape) <= MAX_RANK and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or count * dtype.itemsize != len(content) - head.tell():
        claim = shown(f"{dtype}{list(shape)}")
        raise BrokenError(f"{name}.npy claims {claim} and holds {len(content)} bytes")
    flat = np.frombuffer(content, dtype, count, head.tell())
    return flat.reshape(shape[::-1]).T if turned else flat.reshape(shape)


_MAX_HEADER = 1 << 12
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # Unlike 2.0 it may have Unicode field names.
}
