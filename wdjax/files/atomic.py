"""Atomic file replacement, and locks: a file is the old or the whole new one at any moment.

A lock on a file tells whether the process that holds it is alive, since the system releases the
lock when that process ends: on this machine, and on others that share a disk with locks.
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
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path

_CLIP = 50
"""Number of characters of a name kept in the temporary name; names have at most 255 bytes."""

_HELD: contextvars.ContextVar[frozenset[tuple[int, Path]]] = contextvars.ContextVar(
    "_HELD", default=frozenset()
)
"""Paths locked by this task, with the process id, since a fork copies the variable."""


def check_writable(path: str | PathLike[str]) -> None:
    """Raises, before any work is done, if :func:`write` could not write the file.

    Missing folders are created; an existing file is left as it is.

    Raises:
      ValueError: the path is a folder, or a place that cannot be written.
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
    """Writes a file whole or not at all, by :func:`replacing`.

    Args:
      path: the file; a device or a pipe is written directly.
      content: bytes, or text to be encoded as UTF-8.
    """
    write_all({Path(path): content})


def write_all(files: Mapping[Path, bytes | str]) -> None:
    """Writes several files whole: where one cannot be written, none is replaced.

    All are written before the first is replaced; the last one is replaced last.

    Args:
      files: contents by path, each as in :func:`write`.
    """
    with contextlib.ExitStack() as stack:  # It leaves the file that was entered last first.
        for path, content in reversed([*files.items()]):
            data = content.encode() if isinstance(content, str) else content
            new = path if _special(path) else stack.enter_context(replacing(path))
            with _naming(path):  # Else the error would name the file that was entered first.
                new.write_bytes(data)


@contextlib.contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """A new file in the same folder that replaces ``path`` when the block ends.

    After an exception or the end of the process, ``path`` is unchanged. Partial files of processes
    that have ended are removed. Links are followed.

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
    with _naming(path), _opened(new, wait=True) as (number, _):
        yield new
        os.fsync(number)
        new.replace(path)


@contextlib.contextmanager
def exclusive(path: str | PathLike[str]) -> Iterator[None]:
    """Locks ``path`` against other processes and threads until the block ends.

    The lock is a file beside it, ``.NAME.lock``, that names its holder. A killed process
    may leave that file, but no lock.

    Raises:
      ValueError: it is locked already; the message names process and host.
    """
    path = resolved(path)
    lock = path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as stack:
        try:
            number, locked = _unless_in_use(lock, stack)
        except BlockingIOError as error:
            raise ValueError(
                f"{path} is in use by {error}; wait for it to end, or choose another place."
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
        with _naming(path):
            os.truncate(number, 0)
            owner = f"process {os.getpid()} on {socket.gethostname()} since {since}"
            os.write(number, owner.encode())
        stack.callback(_HELD.reset, _HELD.set(_HELD.get() | {(os.getpid(), path)}))
        yield


def held(path: str | PathLike[str]) -> bool:
    """Whether this task is inside :func:`exclusive` of ``path``."""
    return (os.getpid(), resolved(path)) in _HELD.get()


def resolved(path: str | PathLike[str]) -> Path:
    """The absolute path without links."""
    return Path(os.path.realpath(path))


def _special(path: Path) -> bool:
    """Whether the path is a pipe or a device, such as ``/dev/null``, and must not be replaced."""
    return path.exists() and not path.is_file()


def _partial(path: Path) -> Path:
    """A unique temporary path in the same folder, since a rename cannot cross disks."""
    return path.with_name(f".{path.name[:_CLIP]}.{secrets.token_hex(8)}.part")


def _sweep(path: Path) -> None:
    """Removes partial files that killed writers of ``path`` left; those in use stay."""
    pattern = f".{glob.escape(path.name[:_CLIP])}.{'[0-9a-f]' * 16}.part"
    for left in path.parent.glob(pattern):
        with contextlib.suppress(OSError):  # In use, gone already, or another user's.
            number = os.open(left, os.O_RDWR)
            try:
                if _lock(number) and _is(number, left):  # Else it is a new file.
                    left.unlink()
            finally:
                os.close(number)


@contextlib.contextmanager
def _opened(path: Path, wait: bool = False) -> Iterator[tuple[int, bool]]:
    """Opens a file, created if missing, locks it, and removes it at the end unless it was renamed.

    Yields its descriptor, and whether it is locked (False if the disk has no locks). Without
    ``wait`` a file that another process has locked raises a BlockingIOError.
    """
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = _lock(number, wait)
            if not _is(number, path):
                continue  # Another process removed it before the lock was taken.
            try:
                yield number, locked
            finally:
                if _is(number, path):
                    path.unlink()
            return
        finally:
            os.close(number)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A context whose OSErrors name a file: that of a full disk says nothing of where it is."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def _lock(number: int, wait: bool = False) -> bool:
    """Locks an open file until it is closed; returns False if its disk or system has no locks.

    Without ``wait`` a file that another process has locked raises a BlockingIOError.
    """
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
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


def _unless_in_use(lock: Path, stack: contextlib.ExitStack) -> tuple[int, bool]:
    """Enters :func:`_opened` on the stack, or raises a BlockingIOError that names the holder.

    A holder writes its name just after it has locked the file, and may end at any moment: while the
    file names no holder, for at most a second, the lock is tried again.
    """
    since = time.monotonic()
    while True:
        try:
            return stack.enter_context(_opened(lock))
        except BlockingIOError:
            holder = _holder(lock)
            if holder or time.monotonic() - since > 1:
                raise BlockingIOError(holder or "another process") from None
        time.sleep(0.001)


def _holder(lock: Path) -> str:
    """Who holds a lock, in words: the text of the lock file, empty if there is none."""
    try:
        text = lock.read_text(errors="replace")[:200]
    except OSError:
        return ""
    return text if text.isprintable() else ""
