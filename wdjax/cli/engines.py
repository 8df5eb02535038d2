"""Where ``python -m wdjax run`` has its command lines done: by this machine, or by a cluster."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wdjax.cli import process

CLUSTERS = ("local", "slurm")

_FAREWELL = 20.0
"""Seconds in which a process that was told to end may write its state; then it is killed."""

_TIED = """
import os, threading
threading.Thread(target=lambda: os.read(0, 1) or os._exit(143), daemon=True).start()
from wdjax.__main__ import main
main()
"""
"""``python -m wdjax`` that ends when its standard input does: with the process that began it."""


class Child:
    """A command line in a process of its own, which does not outlive this one."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _TIED, *words],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def done(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def fault(self) -> str:
        """How it ended, in words; empty if well."""
        code = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        return f"signal {-code}" if code < 0 else f"exit code {code}" if code else ""

    def stop(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def commanded(words: Sequence[str], log: Path) -> str:
    """Does a command line, as on a node of a cluster; returns its :meth:`Child.fault`."""
    return Child(words, log).fault()


class Submitted:
    """The same on a cluster."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def done(self) -> bool:
        return bool(self._job.done())

    def fault(self) -> str:
        error = self._job.exception()
        if error is not None:
            return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return str(self._job.result()[0])

    def stop(self) -> None:
        self._job.cancel()

    kill = stop


Running = Child | Submitted
Engine = Callable[[Sequence[str], Path], Running]
"""``(words, log) -> running``: begins a command line, whose output goes to a file."""


def cluster(name: str, folder: Path, settings: Mapping[str, Any]) -> Engine:
    """The engine of a cluster, by submitit: a job that is preempted or timed out is put back.

    Args:
      name: one of ``CLUSTERS``.
      folder: of submitit's own files, which all machines see.
      settings: of ``submitit.AutoExecutor.update_parameters``.
    """
    try:
        import submitit
    except ImportError:
        raise ValueError(
            f"--cluster {name} needs the extra [cluster]: pip install 'wdjax[cluster]'."
        ) from None
    try:
        executor = submitit.AutoExecutor(folder=folder / "%j", cluster=name)
        executor.update_parameters(**settings)
    except (AssertionError, NameError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"--cluster {name}: {' '.join(str(error).split())[:300]}") from error

    def submit(words: Sequence[str], log: Path) -> Running:
        work = submitit.helpers.FunctionSequence()  # It can be put back into the queue.
        work.add(commanded, list(words), log)
        return Submitted(executor.submit(work))

    return submit


def stop(running: Iterable[Running]) -> None:
    """Ends what still runs: told first, and killed if it takes long."""
    left = [one for one in running if not one.done()]
    if not left:
        return
    with process.deaf():
        for one in left:
            with contextlib.suppress(OSError):
                one.stop()
        until = time.monotonic() + _FAREWELL
        while time.monotonic() < until and not all(one.done() for one in left):
            time.sleep(0.05)
        for one in left:
            if not one.done():
                one.kill()
