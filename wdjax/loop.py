"""One loop for everything that is carried on: searches, trainings, games.

A turn is a pure function of a pytree; between turns the loop reports, stops early, saves and
resumes.
"""

import functools
import hashlib
import re
import signal
import threading
import time
import types
from collections.abc import Callable, Mapping
from os import PathLike
from types import FrameType, TracebackType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import files, persist

State = TypeVar("State")

CHUNK = 10
"""Steps of a search in one program at most, so that the host is seldom waited for."""


def carry(
    state: State,
    turn: Callable[[State], State],
    finished: Callable[[State], bool],
    *,
    report: Callable[[State], Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
    identity: bytes = b"",
    about: Mapping[str, Any] | None = None,
) -> State:
    """Takes turns until the state is finished.

    Args:
      state: a pytree; with a checkpoint, of arrays and numbers.
      turn: ``state -> state``.
      finished: whether no turn is left.
      report: called with the state after every turn; a true value ends the loop.
      checkpoint: a folder. If it holds a state of the same identity, the loop goes on from there.
        It is written every so often, at the end, and when Ctrl-C or SIGTERM interrupts, so that
        nothing is lost; a signal then takes effect after the turn under way. Until the loop ends
        no other process or thread may go on from it.
      every: least seconds between two writings; 0 for one after every turn.
      identity: what the state belongs to, a digest of settings and data, from :func:`digest`.
      about: the settings in words, for the checkpoint's manifest and for saying what differs.

    Returns:
      The last state.

    Raises:
      ValueError: a checkpoint of another structure or identity, which is left alone; or one that
        another process or thread is at work on.
      KeyboardInterrupt, SystemExit: after a signal, once the state is saved.

    >>> carry(0, lambda n: n + 1, lambda n: n == 3)
    3
    """
    if checkpoint is None:
        while not finished(state):
            state = turn(state)
            if report is not None and report(state):
                break
        return state
    mark = np.frombuffer(identity.ljust(32, b"\0"), np.uint8)
    words = {name: described(value) for name, value in (about or {}).items()}
    persist.check_writable(checkpoint, state)
    with files.exclusive(checkpoint):
        if persist.exists(checkpoint):
            state = _resume(checkpoint, state, mark, words)
        saved, due = time.monotonic(), False
        with _Signals() as signals:
            while not finished(state) and signals.caught is None:
                state = turn(state)
                due = time.monotonic() - saved >= every
                if due:
                    persist.save(checkpoint, (mark, state), words)
                    saved = time.monotonic()
                try:
                    stop = report is not None and report(state)
                except BaseException:
                    persist.save(checkpoint, (mark, state), words)
                    raise
                if stop:
                    break
            if not due:
                persist.save(checkpoint, (mark, state), words)
    return state


def _resume(
    checkpoint: str | PathLike[str], like: State, mark: np.ndarray, words: dict[str, str]
) -> State:
    kept = persist.manifest(checkpoint)["settings"]
    changes = [
        f"{name} was {kept[name]} and is {now}"
        for name, now in words.items()
        if kept.get(name, now) != now
    ]
    try:
        found, state = persist.restore(checkpoint, (mark, like))
    except ValueError as error:
        raise ValueError("; ".join([str(error), *changes])) from error
    if not np.array_equal(found, mark):
        what = f" ({', '.join(changes)})" if changes else ""
        raise ValueError(
            f"the checkpoint {checkpoint} belongs to other settings, samples or parameters{what}; "
            "choose another folder, or remove it to begin anew."
        )
    return state


def described(value: Any) -> str:
    """A setting in words that are the same in every process.

    >>> described(carry), described(0.5)
    ('<function carry>', '0.5')
    """
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def digest(*trees: Any) -> bytes:
    """32 bytes that tell trees apart: structures, dtypes, shapes and every number.

    >>> digest(np.ones(2)) == digest(np.ones(2)), digest(np.ones(2)) == digest(np.zeros(2))
    (True, False)
    """
    known = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        known.update(f"{path} {array.dtype} {array.shape}".encode())
        known.update(array.tobytes())
    return known.digest()


def settings(value: Any) -> str:
    """What a value is, in words that are the same in every process: for :func:`digest`.

    Functions are told apart by their names, code and closures, objects by their fields. The numbers
    in arrays are left to :func:`digest`.

    >>> settings(lambda x: x + 1) == settings(lambda x: x + 2)
    False
    """
    if isinstance(value, jax.Array | np.ndarray):
        return f"array{value.shape}"
    if isinstance(value, functools.partial):
        return f"partial{settings((value.func, value.args, value.keywords))}"
    if isinstance(value, dict):
        return settings(sorted(value.items(), key=str))
    if isinstance(value, tuple | list):
        return f"({', '.join(map(settings, value))})"
    if isinstance(value, types.CodeType):
        return f"{value.co_name} {value.co_code.hex()} {settings(value.co_consts)}"
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        inner = settings((value.__code__, cells, value.__defaults__))
        return f"{value.__module__}.{value.__qualname__}{inner}"
    if isinstance(value, type) or " at 0x" not in repr(value):
        return repr(value)
    fields = getattr(value, "__dict__", {})
    return f"{type(value).__qualname__}{settings(fields)}"


class _Signals:
    """Holds SIGINT and SIGTERM back until the block ends; in the main thread only."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = number

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None and self.caught is not None:
            raise KeyboardInterrupt if self.caught == signal.SIGINT else SystemExit(143)
