"""Output of a command: results, warnings, progress bars.

A stream that cannot be written to (a full disk, a closed pipe) never ends the work: the failure
is remembered, and sets the exit code once all files are written.
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from wdjax.core import Progress
from wdjax.report.audit import Step

UNPRINTED = 4
"""The exit code if standard output could not be written."""
PIPE_CLOSED = 141
"""The exit code if the reader of standard output has gone, as after SIGPIPE."""

_COUNT = "{desc}: {n_fmt}/{total_fmt} [{elapsed}] {postfix}"
"""The bar's format, without a rate, since steps differ in length."""
LINE_SECONDS = 60.0
"""Seconds between two lines of progress in a log."""


class Console:
    """A command's streams; errors and warnings always go to stderr.

    Args:
      quiet: print warnings and errors only.
      data: standard output is for the result alone; everything else goes to stderr.
    """

    def __init__(self, quiet: bool = False, data: bool = False) -> None:
        self.quiet, self._data = quiet, data
        self._failed: Exception | None = None

    def say(self, text: str) -> None:
        """Prints news or a result for a reader."""
        if not self.quiet:
            (self._err if self._data else self.result)(f"{text}\n")

    def warn(self, text: str) -> None:
        """Prints what a reader must know before believing a result."""
        self._err(f"{text}\n")

    def result(self, text: str) -> None:
        """Writes to standard output, unchanged."""
        if self._failed is None:
            self._failed = write(sys.stdout, text)

    def code(self, code: int) -> int:
        """The exit code of a command that ended with ``code``, or of a failure to print."""
        if self._failed is None:
            return code
        if getattr(self._failed, "errno", None) == errno.EPIPE:
            return code or PIPE_CLOSED
        self.warn(f"wdjax: standard output cannot be written: {self._failed}")
        return code or UNPRINTED

    def _err(self, text: str) -> None:
        """Writes to stderr; a failure cannot be reported anywhere."""
        write(sys.stderr, text)

    @contextmanager
    def steps(self, name: str, first: str) -> Iterator[Callable[[Step], None]]:
        """A bar of an audit's steps, begun by ``first``, and the function that moves it."""
        with self._bar(desc=name, bar_format=_COUNT) as bar:
            at_once = not getattr(bar, "delay", 0)
            bar.set_postfix_str(first, refresh=at_once)

            def show(step: Step) -> None:
                bar.total = step.total
                bar.set_postfix_str(step.words, refresh=at_once)
                bar.update(step.number - bar.n)

            yield show
            bar.update((bar.total or 0) - bar.n)

    @contextmanager
    def search(self, name: str) -> Iterator[Callable[[Progress], None]]:
        """A bar of a search's steps, and the function that moves it.

        Its rate is the mean since the end of the first round, which includes compilation.
        """
        with self._bar(unit="step", desc=name, smoothing=0) as bar:
            began = False

            def tick(progress: Progress) -> None:
                nonlocal began
                bar.total = progress.total
                began &= progress.taken >= bar.n  # Else it is the next search of several.
                bar.update(progress.taken - bar.n)
                if not began:
                    bar.initial, began = bar.n, True
                    bar.start_t = time.time()

            yield tick

    def _bar(self, **options: Any) -> tqdm:
        """A progress bar; a line a minute where stderr is a file or a pipe."""
        if self.quiet or sys.stderr is None or getattr(sys.stderr, "closed", False):
            return tqdm(disable=True, **options)
        if getattr(sys.stderr, "isatty", bool)():
            return tqdm(**options)
        seldom = dict.fromkeys(("delay", "mininterval", "maxinterval"), LINE_SECONDS)
        return tqdm(file=_Lines(self), **seldom, **options)


class _Lines:
    """A stream that prints what a bar draws over its last state as a line of its own."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, drawn: str) -> None:
        if text := drawn.strip():
            self._console.warn(text)

    def flush(self) -> None:
        """Lines are flushed as they are written."""


def write(stream: TextIO | None, text: str) -> Exception | None:
    """Writes and flushes a text, with escapes where needed; returns the error, if any."""
    if stream is None:  # Closed before the process began.
        return OSError(errno.EBADF, os.strerror(errno.EBADF)) if text else None
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError) as error:  # ValueError: a stream that was closed.
        return error
    return None
