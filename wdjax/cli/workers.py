"""Processes that work on a list beside each other; none outlives the one that began them."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, TypeVar

T = TypeVar("T")


def mapped(
    work: Callable[[T], Any], items: Sequence[T], jobs: int, names: Sequence[str]
) -> Iterator[tuple[int, Any]]:
    """Yields ``(number, work(item))`` of all items as they are done, by ``jobs`` processes.

    Args:
      work: a module-level function; its item and result are pickled.
      items: what is worked on, begun in order.
      jobs: number of processes, at least 1.
      names: of the items, for messages.

    Raises:
      ValueError: a process died, as of too little memory.
    """
    left, crew = iter(enumerate(items)), _Crew(work, min(jobs, len(items)))
    with contextlib.closing(crew):
        for link in crew.links:
            crew.give(link, next(left, None))
        while crew.busy:
            ready: Any
            for ready in connection.wait(list(crew.busy)):
                number = crew.busy.pop(ready)
                try:
                    result = ready.recv()
                except (EOFError, OSError) as error:
                    raise ValueError(
                        f"the process that worked on {names[number]} died: too little memory? Ask "
                        "for fewer --jobs."
                    ) from error
                crew.give(ready, next(left, None))
                yield number, result


class _Crew:
    """Processes, each at the other end of a pipe."""

    def __init__(self, work: Callable[[Any], Any], count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.busy: dict[Any, int] = {}
        """The number of the item that the process at each pipe works on."""
        self.links: list[Any] = []
        self.processes: list[Any] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(work, theirs), daemon=True)
            process.start()
            theirs.close()
            self.links.append(ours)
            self.processes.append(process)

    def give(self, link: Any, item: tuple[int, Any] | None) -> None:
        if item is None:
            return
        self.busy[link] = item[0]
        with contextlib.suppress(OSError):  # A dead process is noticed when its result is awaited.
            link.send(item[1])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve(work: Callable[[Any], Any], link: Any) -> None:
    """Works on items until the pipe is closed; the parent process alone hears Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        while True:
            link.send(work(link.recv()))
    os._exit(0)
