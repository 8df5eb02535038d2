"""Types of options, and the help on attacks."""

import argparse
import dataclasses
import math
import re
import textwrap
from typing import Any

from wdjax.report import summary

ORDERS = {"1": 1.0, "2": 2.0, "inf": math.inf}

_WHOLE = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf|nan", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of numbers, as the type of an option.

    >>> Range(0, 1e6)("8/255") == 8 / 255, Range(1, 9, whole=True)("3")
    (True, 3)
    """

    low: float
    high: float
    whole: bool = False

    def __call__(self, text: str) -> Any:
        """The number, plain ASCII only: Python's own parsers accept more."""
        value = _whole(text) if self.whole else _real(text)
        if not self.low <= value <= self.high:
            kind = "a whole number of" if self.whole else "finite and"
            raise argparse.ArgumentTypeError(
                f"must be {kind} at least {self.low:.10g}, and at most {self.high:.10g}, got "
                f"{shown(text)}"
            )
        return value


def _whole(text: str) -> float:
    """A whole number in plain digits; inf with its sign if it has too many."""
    if not _WHOLE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {shown(text)}")
    return int(text) if len(text) < 20 else math.copysign(math.inf, float(text[:20]))


def _real(text: str) -> float:
    """A decimal number, or a fraction of two such as ``8/255``."""
    parts = text.split("/")
    below = float(parts[1]) if len(parts) == 2 and _REAL.fullmatch(parts[1]) else 1.0
    if len(parts) > 2 or not all(map(_REAL.fullmatch, parts)) or below == 0:
        raise argparse.ArgumentTypeError(
            f"must be a number such as 0.03 or 8/255, got {shown(text)}"
        )
    return float(parts[0]) / below


def shown(text: str) -> str:
    """A user's text for a message, escaped and shortened."""
    return ascii(text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)")


# Ranges of all numbers of all commands: far wider than needed, and far within what the work can
# take (float32 for reals, 32 bits for seeds and counters, memory for sizes).
SEED = Range(0, 2**31 - 9, whole=True)  # Commands use a few consecutive seeds.
SAMPLES = Range(1, 2**31 - 1, whole=True)
BATCH = Range(1, 2**20, whole=True)
DRAWS = Range(1, 10**7, whole=True)
VOTES = Range(1, 10**9, whole=True)
STEPS = Range(1, 10**6, whole=True)
SEARCHES = Range(1, 1000, whole=True)
KEYS = Range(1, 1000, whole=True)
RIVALS = Range(1, 10**6, whole=True)
COMPONENTS = Range(1, 100, whole=True)
LATENT = Range(1, 1024, whole=True)
WINDOW = Range(1, 9999, whole=True)
BUDGET = Range(0, 1e6)
KAPPA = Range(1, 1e6)
PIXELS = Range(1e-6, 1e9)
POWER = Range(1, 100)
DEVIATION = Range(1e-6, 1e6)
LEVEL = Range(1e-12, 1 - 1e-12)
SECONDS = Range(1e-3, 1e9)
PAUSE = Range(0, 1e9)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A list of different numbers, such as ``5,10,20``, as the type of an option.

    >>> Numbers(SEED)("0,1")
    [0, 1]
    """

    kind: Range

    def __call__(self, text: str) -> list[Any]:
        kind = "whole numbers" if self.kind.whole else "numbers"
        expected = f"must be {kind} such as 1,2,5, each once"
        try:
            found = [self.kind(word) for word in words(text)]
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{expected}, and each {error}") from None
        if not found or len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{expected}, got {shown(text)}")
        return found


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of several parts of the work: part ``number`` of ``count``, from 1.

    >>> str(Shard.of("2/5"))
    '2/5'
    """

    number: int
    count: int

    @classmethod
    def of(cls, text: str) -> "Shard":
        """The type of ``--shard``."""
        parts = text.split("/")
        if len(parts) != 2 or not all(re.fullmatch("[0-9]{1,6}", part) for part in parts):
            raise argparse.ArgumentTypeError(f"must be I/N such as 2/5, got {shown(text)}")
        number, count = map(int, parts)
        if not 1 <= number <= count:
            raise argparse.ArgumentTypeError(
                f"must be I/N with I from 1 to N, the number of parts, got {shown(text)}"
            )
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def rows(self, n: int) -> range:
        """Its rows of ``n``; those of all parts differ by at most one in number."""
        return range(n * (self.number - 1) // self.count, n * self.number // self.count)


_DEVICES = Range(1, 10**6, whole=True)


def devices(text: str) -> int | None:
    """The type of ``--devices``: a number, or None for ``all``."""
    return None if text == "all" else int(_DEVICES(text))


def words(text: str) -> list[str]:
    """The words of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def glossary(table: dict[str, Any]) -> str:
    """The names of a table, each with the first paragraph of its docstring."""
    width = max(map(len, table)) + 4
    return "\n".join(
        textwrap.fill(
            summary.plain(summary.explained(value)),
            width=88,
            initial_indent=f"  {name}".ljust(width),
            subsequent_indent=" " * width,
        )
        for name, value in table.items()
    )
