"""What a command asks of the process it runs in: signals, and a cache of compiled programs."""

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


@contextmanager
def terminable() -> Iterator[None]:
    """Within it SIGTERM unwinds the stack as Ctrl-C does, so that nothing is left half done."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread is told of signals.
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
