"""What a command says and shows while it works: results, warnings, bars.

A stream that cannot be written to, a full disk or a pipe whose reader has gone, never ends the
work: it is remembered, and the exit code tells once all files are written.
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

from wdjax.core import Progress
from wdjax.report.audit import Step

UNPRINTED = 4
"""The exit code where standard output could not be written."""
PIPE_CLOSED = 141
"""The same where its reader has gone: that of a program which SIGPIPE ended."""

_COUNT = "{desc}: {n_fmt}/{total_fmt} [{elapsed}] {postfix}"
"""Steps of different lengths have no rate."""


class Console:
    """Where words go: errors and warnings always to stderr.

    Args:
      quiet: say nothing but warnings and errors.
      data: standard output is the result's alone, and everything else goes to stderr.
    """

    def __init__(self, quiet: bool = False, data: bool = False) -> None:
        self.quiet, self._data = quiet, data
        self._failed: Exception | None = None

    def say(self, text: str) -> None:
        """News or a result for a reader."""
        if not self.quiet:
            (self._err if self._data else self.result)(f"{text}\n")

    def warn(self, text: str) -> None:
        """What a reader must know before believing a result."""
        self._err(f"{text}\n")

    def result(self, text: str) -> None:
        """To standard output, as it is."""
        if self._failed is None:
            self._failed = write(sys.stdout, text)

    def code(self, code: int) -> int:
        """The exit code of a command that ended with ``code``, by what became of its words."""
        if self._failed is None:
            return code
        if getattr(self._failed, "errno", None) == errno.EPIPE:
            return code or PIPE_CLOSED
        self.warn(f"wdjax: standard output cannot be written: {self._failed}")
        return code or UNPRINTED

    def _err(self, text: str) -> None:
        """Where this fails, there is nowhere left to say so."""
        write(sys.stderr, text)

    @contextmanager
    def steps(self, name: str) -> Iterator[Callable[[Step], None]]:
        """A bar of an audit's steps, and what moves it. Nothing is drawn in a pipe."""
        with tqdm(disable=self._hidden, desc=name, bar_format=_COUNT) as bar:
            bar.set_postfix_str("training")

            def show(step: Step) -> None:
                bar.total = step.total
                bar.set_postfix_str(step.words)
                bar.update(step.number - bar.n)

            yield show
            bar.update((bar.total or 0) - bar.n)

    @contextmanager
    def search(self, name: str) -> Iterator[Callable[[Progress], None]]:
        """A bar of a search's steps, and what moves it.

        Its rate is the mean since the first round, which spends its time on compilation.
        """
        with tqdm(disable=self._hidden, unit="step", desc=name, smoothing=0) as bar:
            began = False

            def tick(progress: Progress) -> None:
                nonlocal began
                bar.total = progress.total
                bar.update(progress.taken - bar.n)
                if not began:
                    bar.initial, began = bar.n, True
                    bar.start_t = time.time()

            yield tick

    @property
    def _hidden(self) -> bool | None:
        """None: hidden where stderr is no terminal."""
        return True if self.quiet or sys.stderr is None else None


def write(stream: TextIO | None, text: str) -> Exception | None:
    """Writes a text now, with escapes for what the stream cannot encode; returns what failed."""
    if stream is None:  # Closed before the process began.
        return OSError(errno.EBADF, os.strerror(errno.EBADF)) if text else None
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError) as error:  # ValueError: a stream that was closed.
        return error
    return None
