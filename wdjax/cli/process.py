"""What a command asks of the process it runs in: signals, and a cache of compiled programs."""

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import jax

TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT

_WORTH = 0.0
"""Programs that compile faster than so many seconds are not kept."""


_AGAIN = 0.05
"""Seconds after which a signal that was lost is given again."""


@contextmanager
def terminable() -> Iterator[None]:
    """Within it SIGTERM unwinds the stack as Ctrl-C does, so that nothing is left half done.

    Either may arrive while Python runs a callback whose exceptions it drops, such as those of the
    garbage collector; it is then given again, until it is heard.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    def dropped(lost: "sys.UnraisableHookArgs") -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            again(signal.SIGINT)
        elif isinstance(lost.exc_value, SystemExit) and lost.exc_value.code == TERMINATED:
            again(signal.SIGTERM)
        else:
            heard(lost)

    def again(number: signal.Signals) -> None:
        # Not from here: what the hook itself raises is dropped too.
        timer = threading.Timer(_AGAIN, _interrupt, (number,))
        timer.daemon = True
        timer.start()

    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread is told of signals.
        return
    before, heard = signal.signal(signal.SIGTERM, leave), sys.unraisablehook
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = heard
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: signal.Signals) -> None:
    """Gives the main thread a signal, also where it waits."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(number)


def cache_folder() -> Path:
    """The user's folder for what can be made again."""
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "wdjax" / "programs"


@contextmanager
def compilation_cache(wanted: bool) -> Iterator[None]:
    """Within it compiled programs are kept, so that a command's second run does not compile.

    A folder that is set already, as by ``JAX_COMPILATION_CACHE_DIR``, is kept to.

    Args:
      wanted: with False nothing is read or kept at all.
    """
    settings = {
        "jax_enable_compilation_cache": wanted,
        "jax_compilation_cache_dir": str(cache_folder()),
        "jax_persistent_cache_min_compile_time_secs": _WORTH,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    if wanted and before["jax_compilation_cache_dir"] is not None:
        yield
        return
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


_COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class Compiling:
    """Counts the seconds that JAX says it spends on compilation from now on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event in _COMPILING:
            self.seconds += duration_secs
