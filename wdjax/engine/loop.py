"""The loop behind everything that can be resumed: searches, trainings, games.

The state is a pytree, and an iteration (a turn) a pure function of it; between iterations the loop
reports, stops early, saves and resumes.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from os import PathLike
from types import FrameType, TracebackType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from wdjax import parallel
from wdjax.files import atomic, persist
from wdjax.identity import words

State = TypeVar("State")

CHUNK = 10
"""Maximum number of a search's steps in one program, so that the host seldom waits."""


@parallel.telling_of_lost_processes()
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
    mesh: Mesh | None = None,
) -> State:
    """Takes turns until the state is finished.

    Args:
      state: a pytree; with a checkpoint, of arrays and numbers.
      turn: ``state -> state``.
      finished: whether no turn is left.
      report: called with the state after every turn; if it returns a true value the loop ends.
      checkpoint: a folder. If it holds a state of the same identity, the loop resumes from it. It
        is written at intervals, at the end, and on Ctrl-C or SIGTERM, which then take effect after
        the current turn. Until the loop ends no other process or thread may use the folder.
      every: minimum number of seconds between two writings; 0 to write after every turn.
      identity: what the state belongs to, from :func:`wdjax.identity.digest`.
      about: the settings by name, stored in the manifest to say which of them differ.
      mesh: over which the work is split. If it spans processes, all of them must take this loop;
        they end together, and process 0 alone writes.

    Returns:
      The last state.

    Raises:
      ValueError: a checkpoint of another structure or identity, which is left as it is; or one that
        another process or thread is using.
      RuntimeError: another process of the mesh has ended.
      KeyboardInterrupt, SystemExit: after a signal, once the state is saved.

    >>> carry(0, lambda n: n + 1, lambda n: n == 3)
    3
    """
    together = parallel.spans(mesh)
    if checkpoint is None:
        # A signal ends all processes; jax.distributed would ignore SIGTERM in one of them.
        with _Signals() if together else contextlib.nullcontext(_Signals()) as signals:
            while not finished(state):
                state = turn(state)
                if _ends(report is not None and report(state), signals, together):
                    break
        return state
    mark = np.frombuffer(identity.ljust(32, b"\0"), np.uint8)
    settings = {name: words(value) for name, value in (about or {}).items()}
    settings["jax"] = jax.__version__
    if together and not str(checkpoint).endswith(".safetensors"):
        raise ValueError(
            f"many processes keep their state in one file: end {checkpoint} in .safetensors."
        )

    def save() -> None:
        whole = parallel.local((mark, state))
        parallel.by_first(lambda: persist.save(checkpoint, whole, settings), together)

    with contextlib.ExitStack() as held:

        def claim() -> None:
            persist.check_writable(checkpoint, state)
            held.enter_context(atomic.exclusive(checkpoint))

        parallel.by_first(claim, together)
        there = persist.exists(checkpoint)
        kept, missing = parallel.agreed(there, not there, together=together)
        if kept and missing:
            raise ValueError(f"not all processes see {checkpoint}; keep it on a disk they share.")
        if kept:
            state = _resume(checkpoint, state, mark, settings)
        saved, due = time.monotonic(), False
        with _Signals() as signals:
            while not finished(state):
                state = turn(state)
                (due,) = parallel.agreed(time.monotonic() - saved >= every, together=together)
                if due:
                    save()
                    saved = time.monotonic()
                try:
                    stop = report is not None and report(state)
                except BaseException:
                    if not together:  # The other processes do not know of the error.
                        save()
                    raise
                if _ends(stop, signals, together):
                    break
            if not due:
                save()
    return state


def _ends(stop: Any, signals: "_Signals", together: bool) -> bool:
    """Whether the loop ends after a turn: some process wants it to ``stop``, or got a signal."""
    stop, told = parallel.agreed(stop, signals.caught is not None, together=together)
    if told and signals.caught is None:
        signals.caught = signal.SIGTERM
    return stop or told


def _resume(
    checkpoint: str | PathLike[str], like: State, mark: np.ndarray, settings: dict[str, str]
) -> State:
    """The state kept in a checkpoint, in the form of ``like``; raises if it is another's.

    ``mark`` is the identity's digest. The error names the ``settings`` that differ.
    """
    kept = persist.manifest(checkpoint)["settings"]
    changes = [
        f"{name} was {kept[name]} and is {now}"
        for name, now in settings.items()
        if kept.get(name, now) != now
    ]
    try:
        found, state = persist.restore(checkpoint, (mark, parallel.local(like)))
    except ValueError as error:
        raise ValueError("; ".join([str(error), *changes])) from error
    if not np.array_equal(found, mark):
        what = f" ({', '.join(changes)})" if changes else ""
        raise ValueError(
            f"the checkpoint {checkpoint} belongs to other settings, samples or parameters{what}; "
            "choose another folder, or remove it to start again."
        )
    if not parallel.any_remote(like):
        return state
    return jax.tree.map(
        lambda new, old: parallel.placed(new, old.sharding) if parallel.any_remote(old) else new,
        state,
        like,
    )


class _Signals:
    """Delays SIGINT and SIGTERM until the block ends; in the main thread only."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def _catch(self, number: int, frame: FrameType | None) -> None:
        """Remembers a signal, which is raised again when the block ends."""
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
