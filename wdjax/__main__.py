"""``python -m wdjax``: see :mod:`wdjax.cli`."""

import sys

from wdjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
