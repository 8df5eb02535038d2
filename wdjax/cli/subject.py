"""What commands work on, a converted checkpoint and samples, and where their JSON goes."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from wdjax import convert, data, files, norms, report
from wdjax.cli import options
from wdjax.cli.console import Console
from wdjax.core import Model


def declare(parser: argparse.ArgumentParser, title: str) -> None:
    """The options that say which model, and on what."""
    what = parser.add_argument_group(title)
    what.add_argument("--arch", required=True, help="such as mlp, wong_mnist, resnet2b")
    what.add_argument("--weights", required=True, type=Path, metavar="FILE", help="the checkpoint")
    what.add_argument(
        "--data",
        required=True,
        type=Path,
        metavar="FILE.npz",
        help="x [n, height, width, channels], uint8 or floats in [0, 1], and labels y [n]",
    )
    what.add_argument(
        "--samples", type=options.positive, metavar="N", help="the first N; all if left"
    )


def declare_budget(group: Any, *more: str) -> None:
    """The options that say how far; ``more`` names further norms than l_r."""
    choices = [*sorted(norms.NAMES), *more]
    group.add_argument("--norm", required=True, choices=choices, help="of a move")
    group.add_argument(
        "--eps", required=True, type=options.number, help="the budget, such as 0.1 or 8/255"
    )


def declare_out(parser: argparse.ArgumentParser) -> Any:
    """The group of what is written, the JSON first."""
    group = parser.add_argument_group("what is written")
    group.add_argument("--json", required=True, metavar="OUT", help="a file, or - for stdout")
    return group


def check_writable(json: str, *paths: Path | None) -> None:
    """Refuses before the work what could not be written after it."""
    for path in (*paths, None if json == "-" else json):
        if path is not None:
            files.check_writable(path)


def load(parsed: argparse.Namespace) -> tuple[Model, np.ndarray, np.ndarray]:
    """The model, its samples and their labels."""
    model = convert.load(parsed.weights, parsed.arch).model
    samples = data.load_npz(parsed.data)
    x, y = samples if parsed.samples is None else samples.take(parsed.samples)
    return model, x, y


def cautions(console: Console, *texts: str | None) -> list[str]:
    """Warns of what is said of the settings, and returns it for the JSON."""
    said = [text for text in texts if text is not None]
    for text in said:
        console.warn(f"  CAREFUL: {text}")
    return said


def described(parsed: argparse.Namespace, schema: str, samples: int) -> dict[str, Any]:
    """What every JSON begins with."""
    return {
        "schema": schema,
        "versions": report.versions(),
        "arch": parsed.arch,
        "weights": parsed.weights.name,
        "data": parsed.data.name,
        "samples": samples,
        "norm": parsed.norm,
        "eps": parsed.eps,
    }


def write(json: str, content: dict[str, Any]) -> None:
    """To a file, or to stdout for -."""
    if json == "-":
        sys.stdout.write(report.dumps(content))
        sys.stdout.flush()
    else:
        files.write(json, report.dumps(content))
