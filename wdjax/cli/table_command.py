"""``python -m wdjax table``: tables and figures of the source papers, on a model of one's own."""

import argparse
import contextlib
import difflib
import functools
import json
import math
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wdjax import data, identity
from wdjax.cli import job_file, options, printed, subject
from wdjax.cli.console import Console
from wdjax.cli.paper_tables import PERCENT, SEED, SHARE, TABLES, Cell, PaperTable
from wdjax.report import plots, summary

_MODEL = ("model", "arch", "weights", "data", "samples")
"""Options that every line takes which is about the model."""
_ENTRIES = {"MNIST": 28 * 28, "CIFAR": 32 * 32 * 3, "Tiny ImageNet": 64 * 64 * 3}
"""The size of an image of the papers' data sets."""

_EXAMPLES = """examples:
  python -m wdjax table --list
  python -m wdjax table le2025-table1-cifar10-linf --arch resnet18 --weights FILE --data FILE.npz \\
      --checkpoint table1 --json table1.json
  python -m wdjax table wang2025-table5 --rows "joint 7" --seeds 0,1,2 --model net.onnx \\
      --data FILE.npz
  python -m wdjax table le2025-figure6b --quick --model mynet:build --data FILE.npz \\
      --plot kappa.png"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "table",
        parents=[common],
        help="tables and figures of the source papers, on your model; beside what was published",
        description="Runs the command lines of a table of the papers that wdjax comes from, on a "
        "model and data of your own, and shows the published numbers beside yours.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of a table, see --list")
    parser.add_argument("--list", action="store_true", help="print the names and what they are")
    subject.declare_samples(subject.declare(parser, "what it is about", required=False))
    parser.add_argument(
        "--train", type=Path, metavar="FILE.npz", help="training data, for defences that need it"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--rows", metavar="TEXT", help="only the rows whose names contain this text")
    how.add_argument(
        "--seeds",
        type=options.Numbers(options.SEED),
        metavar="LIST",
        help="mean and standard deviation over these (default: as many as the paper has)",
    )
    how.add_argument(
        "--quick", action="store_true", help="toy settings: does it run, and what does it show?"
    )
    subject.declare_devices(how)
    out = subject.declare_out(parser)
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a figure of the paper")
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Runs every line of a table, and writes what its cells say."""
    if parsed.list:
        console.result("".join(f"{name}: {table.source}\n" for name, table in TABLES.items()))
        return 0
    table, cells, seeds = _asked(parsed)
    subject.check_paths(parsed, parsed.plot)
    subject.command_tasks(parsed)  # Of a checkpoint: whether it is this table's.
    lines = [*dict.fromkeys(line for cell in cells for line in _lines(cell, seeds))]
    parses = {line: job_file.parse(_words(line, table, parsed)) for line in lines}
    results: dict[str, dict[str, Any]] = {}
    with _folder(parsed) as folder:
        for number, (line, inner) in enumerate(parses.items(), 1):
            console.say(f"{number}/{len(lines)} {line}")
            results[line] = _result(line, inner, folder, parsed, console)
    content = _content(parsed, table, cells, seeds, parses, results)
    others = {} if parsed.plot is None else {parsed.plot: _drawn(table, content)}
    subject.write(console, parsed.json, content, others, lambda: rows(content))
    return 0


def rows(content: dict[str, Any]) -> Iterator[list[Any]]:
    """The rows that are printed without ``--json``: published numbers in columns or brackets.

    In columns where the table has one column for each of several models.
    """
    columns = [*dict.fromkeys(cell["column"] for cell in content["cells"])]
    beside = [*dict.fromkeys(name for cell in content["cells"] for name in cell["published"])]
    lone = len(columns) == 1
    yield ["", *columns, *(beside if lone else [])]
    for name in dict.fromkeys(cell["row"] for cell in content["cells"]):
        cells = [cell for cell in content["cells"] if cell["row"] == name]
        if lone:
            said = _said(cells[0])
            yield [name, _shown(said), *(said["published"].get(one) for one in beside)]
        else:
            yield [name, *(_bracketed(_said(cell)) for cell in cells)]


def _said(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell's numbers as the papers print them: shares in percent."""

    def one(value: float | None) -> float | None:
        return value if value is None or cell["unit"] != SHARE else PERCENT * value

    beside = {name: one(value) for name, value in cell["published"].items()}
    return {name: one(cell[name]) for name in ("measured", "deviation")} | {"published": beside}


def _shown(cell: dict[str, Any]) -> str:
    """The measured number, with its deviation over seeds."""
    deviation = "" if cell["deviation"] is None else f" ± {printed.cell(cell['deviation'])}"
    return printed.cell(cell["measured"]) + deviation


def _bracketed(cell: dict[str, Any]) -> str:
    """The measured number and, in brackets, the published one."""
    beside = "".join(f" ({printed.cell(value)})" for value in cell["published"].values())
    return _shown(cell) + beside


def _asked(parsed: argparse.Namespace) -> tuple[PaperTable, list[Cell], list[int]]:
    """The table, its cells and the seeds that were asked for.

    Raises a ValueError for another name, for options that would be ignored or are missing, and if
    no row is left.
    """
    if parsed.name not in TABLES:
        near = difflib.get_close_matches(str(parsed.name), TABLES, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ";"
        raise ValueError(f"there is no table {options.shown(str(parsed.name))}{hint} see --list.")
    table = TABLES[parsed.name]
    if parsed.plot is not None and not table.axis:
        raise ValueError(f"--plot: {parsed.name} is a table, not a figure.")
    _check_model(table, parsed)
    names = [*dict.fromkeys(cell.row for cell in table.cells)]
    left = [name for name in names if parsed.rows is None or parsed.rows in name]
    if not left:
        raise ValueError(
            f"no row of {parsed.name} contains {options.shown(parsed.rows)}; there are "
            f"{'; '.join(names)}."
        )
    if parsed.quick:
        left = left[: table.first]
    seeded = any(SEED in cell.line for cell in table.cells)
    if parsed.seeds and not seeded:
        raise ValueError(f"--seeds would be ignored: {parsed.name} has a single seed.")
    usual = [0] if parsed.quick else [*range(table.seeds)]
    return table, [cell for cell in table.cells if cell.row in left], parsed.seeds or usual


def _check_model(table: PaperTable, parsed: argparse.Namespace) -> None:
    """Raises unless exactly what the table is about is given."""
    words = {"model": "--model or --arch", "data": "--data", "train": "--train FILE.npz"}
    given = {name for name in words if getattr(parsed, name) is not None}
    given |= {"model"} if parsed.arch is not None else set()
    for name, said in words.items():
        if name in table.needs and name not in given:
            raise ValueError(f"{parsed.name} needs {said}.")
        if name in given and name not in table.needs:
            raise ValueError(f"--{name} would be ignored: {parsed.name} needs none.")


def _lines(cell: Cell, seeds: Sequence[int]) -> list[str]:
    """The command lines of a cell: one for every seed, or the only one."""
    if SEED not in cell.line:
        return [cell.line]
    return [cell.line.replace(SEED, str(seed)) for seed in seeds]


def _words(line: str, table: PaperTable, parsed: argparse.Namespace) -> list[str]:
    """The words of a command line, with the model, the data and toy settings where wanted.

    Of an option that occurs twice the later counts: the line's over the caller's, but the caller's
    number of samples over that of toy settings.
    """
    command, *words = shlex.split(_ran(line, table, parsed))
    names = (*_MODEL, "train") if command == "game" else _MODEL
    given = {name: getattr(parsed, name) for name in names}
    about = [f"--{name}={value}" for name, value in given.items() if value is not None]
    few = parsed.quick and parsed.samples is not None
    return [command, *about, *words, *([f"--samples={parsed.samples}"] if few else [])]


def _ran(line: str, table: PaperTable, parsed: argparse.Namespace) -> str:
    """A cell's command line with toy settings where wanted."""
    less = table.quick.get(line.split()[0]) if parsed.quick else None
    return f"{line} {less}" if less else line


@contextlib.contextmanager
def _folder(parsed: argparse.Namespace) -> Iterator[Path]:
    """The folder of the lines' results: the checkpoint, or one for this run only."""
    if parsed.checkpoint is not None:
        yield parsed.checkpoint
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _result(
    line: str, inner: argparse.Namespace, folder: Path, parsed: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """The JSON of a command line, which is run in this process.

    With a checkpoint the command keeps its own beside it, so that it does what is left.
    """
    mark = identity.digest(line).hex()[:16]
    inner.json, inner.said = folder / f"{mark}.json", shlex.split(line)
    inner.devices = parsed.devices
    if parsed.checkpoint is not None:
        inner.checkpoint, inner.every = folder / mark, parsed.every
    try:
        inner.command(inner, Console(quiet=True))
    except ValueError as error:
        raise ValueError(f"{line}: {error}") from error
    return json.loads(inner.json.read_text())


def _content(
    parsed: argparse.Namespace,
    table: PaperTable,
    cells: Sequence[Cell],
    seeds: Sequence[int],
    parses: dict[str, argparse.Namespace],
    results: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """The JSON: every cell measured and published, and the lines that made them."""
    published = _published(table)
    rows = []
    for cell in cells:
        lines = _lines(cell, seeds)
        values = [cell.measured(_number(results[line], cell.path)) for line in lines]
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        rows.append(
            {
                "row": cell.row,
                "column": cell.column,
                "unit": cell.unit,
                "measured": summary.number(float(np.mean(values))),
                "deviation": None if deviation is None else summary.number(deviation),
                "by_seed": [summary.number(value) for value in values],
                "published": {
                    name: numbers[cell] for name, numbers in published.items() if cell in numbers
                },
            }
        )
    first = next(iter(results.values()))
    known = ("model", "weights", "data", "data_sha256", "n")
    about = {name: first[name] for name in known if name in first}
    said = _about_others(table, parsed)
    said += dict.fromkeys(
        f"{line}: {f'{name}: ' * bool(name)}{text}"
        for line, result in results.items()
        for name, text in printed.noted(result)
    )
    said += [
        f"{line}: there are only {results[line]['n']} samples"
        for line, inner in parses.items()
        if inner.samples is not None and inner.samples > results[line]["n"]
    ]
    times = {
        name: math.fsum(result[name] for result in results.values())
        for name in ("seconds", "compile_seconds")
    }
    return {
        **summary.head("table"),
        **about,
        "table": parsed.name,
        "source": table.source,
        "differs": table.differs,
        "quick": parsed.quick,
        "seeds": [*seeds] if any(SEED in cell.line for cell in cells) else [],
        "lines": [_ran(line, table, parsed) for line in results],
        "cells": rows,
        "remarks": said,
        **times,
    }


def _about_others(table: PaperTable, parsed: argparse.Namespace) -> list[str]:
    """A remark if the samples cannot be of the data set that the published numbers are about."""
    for name, size in _ENTRIES.items():
        if parsed.data is not None and table.published and name in table.source:
            shape = data.opened(parsed.data, 1)[0][:1].shape[1:]
            if math.prod(shape) != size:
                return [
                    f"the published numbers are about {name}, whose images have {size} entries; "
                    f"these samples have the shape {shape}: do not compare them."
                ]
    return []


def _published(table: PaperTable) -> dict[str, dict[Cell, float]]:
    """The published numbers by model and cell, in its unit; without those that are not known."""
    return {
        name: {
            cell: float(word) / (PERCENT if cell.unit == SHARE else 1.0)
            for cell, word in zip(table.cells, text.split(), strict=True)
            if word != "-"
        }
        for name, text in table.published.items()
    }


def _number(result: dict[str, Any], path: str) -> float:
    """The number at a path of a result, or the difference of two; NaN where it is null."""

    def at(one: str) -> float:
        keys = one.split("/")
        found = functools.reduce(lambda part, key: part[_key(part, key)], keys, result)
        return math.nan if found is None else float(found)  # type: ignore[arg-type]

    first, *rest = map(at, path.split(" - "))
    return first - math.fsum(rest)


def _key(part: Any, key: str) -> Any:
    """A key of an object, or the index in a list."""
    return int(key) if isinstance(part, list) else key


def _drawn(table: PaperTable, content: dict[str, Any]) -> bytes:
    """The figure: a curve for each column, over the rows."""
    number = options.Range(0, math.inf)
    curves: dict[str, list[tuple[float, float]]] = {}
    for cell in content["cells"]:
        value = _said(cell)["measured"]
        value = math.nan if value is None else value
        curves.setdefault(cell["column"], []).append((number(cell["row"]), value))
    seconds = all(cell.unit == "seconds" for cell in table.cells)
    label = "seconds" if seconds else "accuracy (%)"
    return plots.png(plots.curves(curves, table.axis, label, table.source))
