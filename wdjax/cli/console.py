"""What a command says and shows while it works: results, warnings, bars."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tqdm import tqdm

from wdjax.audit import Step
from wdjax.core import Progress

_COUNT = "{desc}: {n_fmt}/{total_fmt} [{elapsed}] {postfix}"
"""Steps of different lengths have no rate."""


class Console(NamedTuple):
    """Where words go: errors and warnings always to stderr."""

    quiet: bool
    """Say nothing but warnings and errors."""
    data: bool = False
    """Standard output is the result's alone, and everything else goes to stderr."""

    def say(self, text: str) -> None:
        """A result for a reader."""
        if not self.quiet:
            print(text, file=sys.stderr if self.data else sys.stdout, flush=True)

    def warn(self, text: str) -> None:
        """What a reader must know before believing a result."""
        print(text, file=sys.stderr, flush=True)

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
        return True if self.quiet else None
