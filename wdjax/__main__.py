"""``python -m wdjax``, the command ``wdjax``: see :mod:`wdjax.cli`.

What is imported here takes no time, so that signals are heard before anything that does.
"""

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """The process's own :func:`wdjax.cli.main`."""
    _fill_streams()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Whoever made the process deaf to a signal, as shells do in the background, has it so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    from wdjax.cli import process_main

    process_main()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once, on a signal before the work has begun.

    There is nothing to put in order yet, and an interpreter that is taken down while a library is
    being imported may crash.
    """
    word = "interrupted" if number == signal.SIGINT else "terminated"
    try:
        os.write(2, f"wdjax: {word}\n".encode())
    finally:
        os._exit(128 + number)


def _fill_streams() -> None:
    """Opens ``/dev/null`` as stdin, stdout or stderr if the caller closed them.

    Otherwise a file of ours would get that number, and what a library writes to stderr.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


if __name__ == "__main__":
    main()
