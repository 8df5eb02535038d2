"""Files that are whole or absent, whenever the process ends."""

import os
from os import PathLike
from pathlib import Path


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
    partial = _partial(path)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}; choose another place."
        ) from error


def write(path: str | PathLike[str], content: bytes | str) -> None:
    """Writes a file whole or not at all: under a name of its own first, then renamed.

    Args:
      path: the file; one that is there already stays whole until it is replaced. A link is
        followed, and a device is written to as it is.
      content: bytes, or text to be encoded as UTF-8.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    if _special(path):
        path.write_bytes(data)
        return
    partial = _partial(path)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path.resolve())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _special(path: Path) -> bool:
    """A pipe or a device, such as ``/dev/null``: nothing that a rename should replace."""
    return path.exists() and not path.is_file()


def _partial(path: Path) -> Path:
    """Beside the file, since a rename must not cross disks; of this process alone."""
    path = path.resolve()
    return path.with_name(f".{path.name}.{os.getpid()}.part")
