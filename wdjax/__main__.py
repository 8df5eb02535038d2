"""``python -m wdjax``: see :mod:`wdjax.cli`."""

from wdjax.cli import process_main

if __name__ == "__main__":
    process_main()
