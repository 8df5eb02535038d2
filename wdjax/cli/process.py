"""The process of a command: signals, streams, a cache of compiled programs."""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import jax

from wdjax.cli.console import write

TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT

_WORTH = 0.0
"""Seconds of compilation below which a program is not cached."""


_AGAIN = 1.0
"""Seconds after which a signal that did not end the command is sent again."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """A context in which SIGTERM unwinds the stack like Ctrl-C, so that nothing is left half done.

    A signal may arrive while Python runs code whose exceptions are dropped, such as a garbage
    collector's callback or an attribute looked up by C code; it is then sent again until it takes
    effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread receives signals.
        return
    given: list[tuple[signal.Signals, float]] = []
    ended = threading.Event()

    def leave(number: int, frame: FrameType | None) -> None:
        given.append((signal.Signals(number), time.monotonic()))
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(TERMINATED)

    def insist() -> None:
        while not ended.wait(_AGAIN / 5):
            if given and time.monotonic() - given[-1][1] > _AGAIN:
                _interrupt(given[-1][0])

    def dropped(lost: "sys.UnraisableHookArgs") -> None:
        if not given:
            unraisable(lost)

    # If Ctrl-C was ignored when the process began, as in a shell's background, it stays ignored.
    minds = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    numbers = (signal.SIGINT, signal.SIGTERM) if minds else (signal.SIGTERM,)
    before = {number: signal.signal(number, leave) for number in numbers}
    unraisable, sys.unraisablehook = sys.unraisablehook, dropped
    threading.Thread(target=insist, daemon=True).start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = unraisable
        ended.set()


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """A context in which Ctrl-C and SIGTERM are not heard: for a farewell that takes its time."""
    hears = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if hears else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: signal.Signals) -> None:
    """Sends the main thread a signal, even while it waits."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(number)


def cache_folder() -> Path | None:
    """The user's cache folder, or None for a user without a home."""
    named = {"win32": "LOCALAPPDATA", "darwin": ""}.get(sys.platform, "XDG_CACHE_HOME")
    usual = {"win32": "AppData/Local", "darwin": "Library/Caches"}.get(sys.platform, ".cache")
    base = os.environ.get(named) or os.path.expanduser(f"~/{usual}")
    # Without a home the tilde stays.
    return None if base.startswith("~") else Path(base) / "wdjax" / "programs"


@contextlib.contextmanager
def compilation_cache(wanted: bool) -> Iterator[None]:
    """A context in which compiled programs are cached on disk, for the command's next run.

    A cache folder that is set already, as by ``JAX_COMPILATION_CACHE_DIR``, is used.

    Args:
      wanted: with False nothing is read from or written to a cache.
    """
    folder = cache_folder()
    settings = {
        "jax_enable_compilation_cache": wanted,
        "jax_compilation_cache_dir": None if folder is None else str(folder),
        "jax_persistent_cache_min_compile_time_secs": _WORTH,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    if wanted and (folder is None or before["jax_compilation_cache_dir"] is not None):
        yield
        return
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def silence_lost_streams() -> None:
    """Redirects broken streams to nowhere, so that the interpreter's last flush cannot fail."""
    for stream in (sys.stdout, sys.stderr):
        if write(stream, "") is not None:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


_COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class Clock:
    """Measures what is spent from now on: wall-clock and CPU seconds, and JAX's compile seconds."""

    def __init__(self) -> None:
        self._compiling = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def __call__(self) -> dict[str, float]:
        return {
            "seconds": time.perf_counter(),
            "cpu_seconds": time.process_time(),
            "compile_seconds": self._compiling,
        }

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Adds the duration of an event of JAX's, if it is one of compilation."""
        if event in _COMPILING:
            self._compiling += duration_secs
