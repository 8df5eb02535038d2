"""Files that are whole or absent, whenever the process ends, and what one task has to itself.

Whether the process that made a file is alive is told by a lock on it, which the system takes away
when that process ends: on this machine, and on others that share a disk with locks.
"""

import contextlib
import contextvars
import errno
import glob
import os
import secrets
import socket
import time
import warnings
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

_CLIP = 50
"""Characters of a name that a temporary one begins with: names have at most 255 bytes."""

_HELD: contextvars.ContextVar[frozenset[tuple[int, Path]]] = contextvars.ContextVar(
    "_HELD", default=frozenset()
)
"""What this task has to itself, and in which process, since a fork copies it."""


def check_writable(path: str | PathLike[str]) -> None:
    """Refuses, before any work is done, a file that :func:`write` could not write.

    Folders on the way are made; a file that is there already is left as it is.

    Raises:
      ValueError: a folder of that name, or a place where nothing can be written.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file.")
    if _special(path):
        return
    partial = _partial(resolved(path))
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}; choose another place."
        ) from error


def write(path: str | PathLike[str], content: bytes | str) -> None:
    """Writes a file whole or not at all, as :func:`replacing` does.

    Args:
      path: the file; a device or a pipe is written to as it is.
      content: bytes, or text to be encoded as UTF-8.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    if _special(path):
        path.write_bytes(data)
        return
    with replacing(path) as new:
        new.write_bytes(data)


@contextlib.contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """A new file in the same folder that takes the place of ``path`` when the block ends.

    An exception, or the end of the process, leaves what was at ``path`` as it was. What processes
    that have ended left half written is removed. Links are followed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "note.txt") as new:
    ...         _ = new.write_text("whole")
    ...     [file.name for file in Path(folder).iterdir()]
    ['note.txt']
    """
    path = resolved(path)
    _sweep(path)
    new = _partial(path)
    with _opened(new, wait=True) as (number, _):
        yield new
        os.fsync(number)
        new.replace(path)


@contextlib.contextmanager
def exclusive(path: str | PathLike[str]) -> Iterator[None]:
    """Within it no other process or thread has ``path`` to itself.

    The lock is a file beside it, ``.NAME.lock``, that says who holds it. It ends with the process,
    so that one that was killed is no obstacle.

    Raises:
      ValueError: another has it; the message tells the process and the host.
    """
    path = resolved(path)
    lock = path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as stack:
        try:
            number, locked = stack.enter_context(_opened(lock))
        except BlockingIOError:
            raise ValueError(
                f"{path} is in use by {_holder(lock)}; wait for it to end, or choose another place."
            ) from None
        except OSError as error:
            raise ValueError(f"{path} cannot be locked: {error}; choose another place.") from error
        if not locked:
            warnings.warn(
                f"the disk of {path} has no locks: let no other process use it.",
                RuntimeWarning,
                stacklevel=3,
            )
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.truncate(number, 0)
        os.write(number, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())
        stack.callback(_HELD.reset, _HELD.set(_HELD.get() | {(os.getpid(), path)}))
        yield


def held(path: str | PathLike[str]) -> bool:
    """Whether this task is within :func:`exclusive` of ``path``."""
    return (os.getpid(), resolved(path)) in _HELD.get()


def resolved(path: str | PathLike[str]) -> Path:
    """The absolute path without links."""
    return Path(os.path.realpath(path))


def _special(path: Path) -> bool:
    """A pipe or a device, such as ``/dev/null``: nothing that a rename should replace."""
    return path.exists() and not path.is_file()


def _partial(path: Path) -> Path:
    """Beside the file, since a rename must not cross disks; under a name that nobody else has."""
    return path.with_name(f".{path.name[:_CLIP]}.{secrets.token_hex(8)}.part")


def _sweep(path: Path) -> None:
    """Removes what writers of ``path`` left half written when they were killed."""
    pattern = f".{glob.escape(path.name[:_CLIP])}.{'[0-9a-f]' * 16}.part"
    for left in path.parent.glob(pattern):
        with contextlib.suppress(OSError):  # In use, gone by now, or another user's.
            number = os.open(left, os.O_RDWR)
            try:
                if _lock(number):
                    left.unlink()
            finally:
                os.close(number)


@contextlib.contextmanager
def _opened(path: Path, wait: bool = False) -> Iterator[tuple[int, bool]]:
    """A file that is made where it lacks, and removed at the end, unless it was renamed.

    Yields its descriptor, and whether it is locked.
    """
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = _lock(number, wait)
            if not _is(number, path):
                continue  # Removed in between by whoever had it locked.
            try:
                yield number, locked
            finally:
                if _is(number, path):
                    path.unlink()
            return
        finally:
            os.close(number)


def _lock(number: int, wait: bool = False) -> bool:
    """Locks an open file until it is closed; whether its disk has locks at all."""
    try:
        import fcntl

        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except ImportError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _is(number: int, path: Path) -> bool:
    """Whether an open file still has the name."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


def _holder(lock: Path) -> str:
    try:
        text = lock.read_text(errors="replace")[:200]
    except OSError:
        text = ""
    return text if text and text.isprintable() else "another process"
