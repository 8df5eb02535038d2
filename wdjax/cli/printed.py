"""Results as tables of plain text, for commands without ``--json``."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def table(rows: Iterable[Iterable[Any]]) -> str:
    """Rows of cells in columns as wide as they need, the first row being titles.

    >>> print(table([["attack", "accuracy"], ["pgd", 0.25], ["none", None]]))
    attack  accuracy
    pgd         0.25
    none           -
    """
    words = [[cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*words)]
    lines = []
    for first, *rest in words:
        cells = [first.ljust(widths[0]), *(w.rjust(n) for w, n in zip(rest, widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def cell(value: Any) -> str:
    """A number with four digits, a word as it is, an interval in brackets.

    >>> cell(1 / 3), cell([0.25, 0.5]), cell(7)
    ('0.3333', '[0.25, 0.5]', '7')
    """
    if value is None:
        return "-"
    if isinstance(value, list):
        return f"[{', '.join(map(cell, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def remarks(content: Any) -> Iterator[str]:
    """Every remark of a result, with the names of what it is about.

    >>> list(remarks({"remarks": ["far"], "attacks": {"pgd": {"remarks": ["zero gradients"]}}}))
    ['CAREFUL: far', 'CAREFUL, pgd: zero gradients']
    """
    for label, remark in noted(content):
        yield f"CAREFUL{f', {label}' if label else ''}: {remark}"


def noted(content: Any, label: str = "") -> Iterator[tuple[str, str]]:
    """Every remark of a result, after the name of what it is about."""
    if isinstance(content, list):
        for part in content:
            yield from noted(part, label)
    if not isinstance(content, Mapping):
        return
    label = " ".join(content.get("job", [label]))
    yield from ((label, remark) for remark in content.get("remarks", ()))
    for name, part in content.items():
        if isinstance(part, Mapping | list):
            yield from noted(part, str(name))
