"""Work that consists of tasks, each done once: a killed run continues where it stopped.

The result of a finished task is kept in a file of its own, with the time it took; the current task
saves its state beside it, mostly by :func:`wdjax.engine.loop.carry`.
"""

import contextlib
import dataclasses
import glob
import json
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from wdjax.engine import loop
from wdjax.files import atomic, persist

T = TypeVar("T")
Spent = dict[str, float]

_MARK = "tasks.safetensors"


def seconds() -> Spent:
    """The default clock of a task: seconds."""
    return {"seconds": time.perf_counter()}


class Done(NamedTuple, Generic[T]):
    """The result of a task, and what it spent."""

    value: T
    spent: Spent
    """Differences of the clock, summed over all processes that worked on the task; for a killed
    process, up to its last note."""


class Task:
    """A task in progress: where its state is kept and what it has spent."""

    def __init__(self, stem: Path | None, every: float, clock: Callable[[], Spent]) -> None:
        self._state = None if stem is None else stem.with_name(f"{stem.name}.safetensors")
        self._parts = None if stem is None else stem.with_name(f"{stem.name}.parts")
        self._every = every
        self._note = None if stem is None else stem.with_name(f"{stem.name}.spent.json")
        self._clock, self._before = clock, self._noted()
        self._began, self._written = clock(), time.monotonic()

    def saving(self, parts: bool = False) -> dict[str, Any]:
        """Options that make a search, a training or another loop save its state in this task.

        Args:
          parts: True for work that writes several files into a folder, as ensembles do.
        """
        return {"checkpoint": self._parts if parts else self._state, "every": self._every}

    def begin(self) -> None:
        """Starts the clock again: earlier time was not spent on this task alone."""
        self._began = self._clock()

    @property
    def spent(self) -> Spent:
        """What all processes have spent so far."""
        now = self._clock()
        return {k: self._before.get(k, 0.0) + now[k] - began for k, began in self._began.items()}

    def heard(self, callback: Callable[[T], Any]) -> Callable[[T], Any]:
        """A callback that also notes, at intervals, what has been spent."""

        def hear(progress: T) -> Any:
            if time.monotonic() - self._written >= self._every:
                self.note()
            return callback(progress)

        return hear

    def note(self) -> None:
        """Writes what was spent to a file, for the process that resumes the task."""
        if self._note is not None:
            atomic.write(self._note, json.dumps(self.spent))
            self._written = time.monotonic()

    def drop(self) -> None:
        """Removes the state of a finished task, and the partial notes of killed processes."""
        for path in (self._state, self._note):
            if path is not None:
                path.unlink(missing_ok=True)
        if self._note is not None:
            for left in self._note.parent.glob(f".{glob.escape(self._note.name[:40])}*.part"):
                left.unlink(missing_ok=True)
        if self._parts is not None:
            shutil.rmtree(self._parts, ignore_errors=True)

    def _noted(self) -> Spent:
        """What killed processes spent on this task, by their last note."""
        if self._note is None or not self._note.exists():
            return {}
        try:
            noted = json.loads(self._note.read_bytes())
            return {str(name): float(value) for name, value in noted.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._note} is damaged: {error}; remove it.") from error


class Tasks:
    """The tasks of one command, in a folder that belongs to it alone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = Tasks(folder).do("sum", lambda task: {"sum": np.arange(3.0).sum()})
    ...     again = Tasks(folder).do("sum", lambda task: 1 / 0)  # Done once.
    >>> first == again, again.value
    (True, {'sum': 3.0})
    """

    def __init__(
        self,
        folder: str | PathLike[str] | None,
        *,
        every: float = 60.0,
        identity: bytes = b"",
        about: Mapping[str, Any] | None = None,
        clock: Callable[[], Spent] = seconds,
    ) -> None:
        """Creates the folder, or resumes the work in it.

        Args:
          folder: where results and states are kept; None to keep nothing.
          every: minimum number of seconds between two writings of a task's state.
          identity: what the work belongs to, from :func:`wdjax.identity.digest`.
          about: its settings by name, to say which of them differ.
          clock: returns counters by name; their differences are what a task spent.

        Raises:
          ValueError: a folder of other content, or of work of another identity; it is left as it
            is.
        """
        self._folder = None if folder is None else Path(folder).absolute()
        self._every, self._clock = every, clock
        if self._folder is not None:
            check_writable(self._folder)
            # A loop of no turns, saved: resuming it compares identities and names changed settings.
            loop.carry(
                np.int32(0),
                lambda turn: turn,
                lambda turn: True,
                checkpoint=self._folder / _MARK,
                identity=identity,
                about=about,
            )

    def do(self, name: str, work: Callable[[Task], T], *types: type) -> Done[T]:
        """Does a task, or reads its result if it was done before.

        Args:
          name: unique among the tasks, and the same in every run.
          work: the task. It returns numbers, strings, None, arrays, bytes, and lists and
            dictionaries of these with string keys; tuples come back as lists.
          *types: dataclasses and named tuples that the result may contain.
        """
        stem = self._stem(name)
        if stem is None:
            task = Task(None, self._every, self._clock)
            return Done(work(task), task.spent)
        result = _result(stem)
        task = Task(stem, self._every, self._clock)
        if not result.exists():
            try:
                done = Done(work(task), task.spent)
            except BaseException:
                with contextlib.suppress(OSError):  # The error that ended the task matters more.
                    task.note()
                raise
            keep(result, done)
        task.drop()
        return kept(result, types)

    def has(self, name: str) -> bool:
        """Whether the task's result is kept already."""
        stem = self._stem(name)
        return stem is not None and _result(stem).exists()

    def _stem(self, name: str) -> Path | None:
        """The path, without suffix, of a task's files; None if nothing is kept."""
        if self._folder is None:
            return None
        plain = re.sub(r"[^A-Za-z0-9=+_-]+", "-", name)[:60]
        if plain != name or not name:  # A checksum distinguishes names that are cleaned alike.
            plain = f"{plain}.{zlib.crc32(name.encode()):x}"
        return self._folder / plain


def _result(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.done.safetensors")


def check_writable(folder: str | PathLike[str]) -> None:
    """Raises, before any work is done, if :class:`Tasks` could not use the folder."""
    folder = Path(folder).absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder for the checkpoint.")
    mark = folder / _MARK
    if folder.is_dir() and not mark.exists() and any(_lasting(folder)):
        raise ValueError(f"{folder} exists and is not a checkpoint; choose another folder.")
    atomic.check_writable(mark)


def _lasting(folder: Path) -> Iterator[Path]:
    """The folder's entries, except temporary files of killed processes."""
    return (path for path in folder.iterdir() if not path.name.startswith("."))


def keep(path: Path, done: Done[Any], settings: Mapping[str, Any] | None = None) -> None:
    """Saves the result of a task and what it spent as one file, with ``settings`` in its manifest.

    The file is written whole or not at all; every part of it has a checksum.
    """
    arrays: list[np.ndarray] = []
    value = _plain(done.value, arrays)
    text = json.dumps({"value": value, "spent": done.spent}).encode()
    # Stored as bytes: the file format lacks some dtypes and limits the manifest's length.
    parts = [np.frombuffer(part, np.uint8) for part in (text, *(a.tobytes() for a in arrays))]
    leaves = {f"part {index}": part for index, part in enumerate(parts)}
    persist.save(path, leaves, settings)


def kept(path: Path, types: tuple[type, ...]) -> Done[Any]:
    """The result of a finished task, read from its file; raises a ValueError if that is damaged.

    ``types`` are the NamedTuples and dataclasses that the result may contain.
    """
    manifest = persist.manifest(path)
    try:
        sizes = {name: tuple(facts["shape"]) for name, facts in manifest["leaves"].items()}
        # Arrays on the host that take no memory: what is kept is read without an accelerator.
        like = {name: np.broadcast_to(np.uint8(0), size) for name, size in sizes.items()}
        leaves = persist.restore(path, like)
        text, *arrays = (np.asarray(leaves[f"part {index}"]) for index in range(len(leaves)))
        content = json.loads(text.tobytes())
        value = _built(content["value"], arrays, {kind.__name__: kind for kind in types})
        return Done(value, content["spent"])
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; remove it to begin again.") from error


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """A task's result as JSON with tagged lists, such as ``["array", 0, dtype, shape]``.

    Its arrays are appended to ``arrays``. Raises a TypeError for types that cannot be stored.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8)
        return ["bytes", *_plain(value, arrays)[1:]]
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise TypeError(f"a task's result must have str keys, got {list(value)!r}.")
        return {name: _plain(part, arrays) for name, part in value.items()}
    if dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [type(value).__name__, _plain(parts, arrays)]
    if hasattr(value, "_asdict"):
        return [type(value).__name__, _plain(value._asdict(), arrays)]
    if isinstance(value, list | tuple):
        return ["list", *(_plain(part, arrays) for part in value)]
    if not hasattr(value, "dtype"):
        raise TypeError(f"a task cannot return {value!r}.")
    arrays.append(np.asarray(value))
    return ["array", len(arrays) - 1, arrays[-1].dtype.name, list(arrays[-1].shape)]


def _built(value: Any, arrays: list[np.ndarray], types: Mapping[str, type]) -> Any:
    """The value that :func:`_plain` converted to JSON and ``arrays``; ``types`` by their names."""
    if isinstance(value, dict):
        return {name: _built(part, arrays, types) for name, part in value.items()}
    if not isinstance(value, list):
        return value
    tag, *parts = value
    if tag == "list":
        return [_built(part, arrays, types) for part in parts]
    if tag in types:
        return types[tag](**_built(parts[0], arrays, types))
    index, dtype, shape = parts
    content = arrays[index]
    return content.tobytes() if tag == "bytes" else content.view(dtype).reshape(shape)
