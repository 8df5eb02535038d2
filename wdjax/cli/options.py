"""Types of options, and what their help says."""

import argparse
import math
import textwrap
from typing import Any

from wdjax import report

ORDERS = {"1": 1.0, "2": 2.0, "inf": math.inf}


def number(text: str) -> float:
    """A decimal number or a fraction of two.

    >>> number("8/255") == 8 / 255, number("1e-2")
    (True, 0.01)
    """
    above, slash, below = text.partition("/")
    try:
        return float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(
            f"must be a number such as 0.03 or 8/255, got {text!r}"
        ) from None


def positive(text: str) -> int:
    """A count of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def glossary(table: dict[str, Any]) -> str:
    """A table's names, each with the first paragraph of its docstring."""
    width = max(map(len, table)) + 4
    return "\n".join(
        textwrap.fill(
            report.plain(report.explained(value)),
            width=88,
            initial_indent=f"  {name}".ljust(width),
            subsequent_indent=" " * width,
        )
        for name, value in table.items()
    )
