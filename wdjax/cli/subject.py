"""The model and samples that commands work on, and where their results go."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wdjax import data, norms
from wdjax.cli import options, process
from wdjax.cli.console import Console
from wdjax.core import Model
from wdjax.engine import identity, tasks
from wdjax.files import atomic
from wdjax.models import convert
from wdjax.report import summary

_EVERY = 60.0
_ELSEWHERE = {"json", "points", "plot", "radii", "out", "checkpoint", "every", "quiet", "cache"}
_ELSEWHERE |= {"weights", "data", "batch_size", "command"}
"""Options that do not change a result, or whose content is compared instead of their names."""


def declare(parser: argparse.ArgumentParser, title: str) -> None:
    """Adds the options for model and samples."""
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
        "--samples", type=options.SAMPLES, metavar="N", help="the first N; all if left"
    )


def declare_budget(group: Any, *more: str) -> None:
    """Adds the options for norm and budget; ``more`` names norms besides l1, l2 and linf."""
    choices = [*sorted(norms.NAMES), *more]
    group.add_argument("--norm", required=True, choices=choices, help="of a move")
    group.add_argument(
        "--eps", required=True, type=options.BUDGET, help="the budget, such as 0.1 or 8/255"
    )


def declare_out(parser: argparse.ArgumentParser) -> Any:
    """Adds the options for output, JSON first; returns their group."""
    group = parser.add_argument_group("what is written")
    group.add_argument("--json", required=True, metavar="OUT", help="a file, or - for stdout")
    declare_checkpoint(group)
    return group


def declare_checkpoint(group: Any) -> None:
    """Adds the options for checkpoints."""
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="a folder for checkpoints: interrupted or killed at any moment and run again, "
        "the same command continues to an equal result",
    )
    group.add_argument(
        "--every",
        type=options.PAUSE,
        metavar="S",
        help=f"least seconds between two savings (default {_EVERY:g})",
    )


def check_places(parsed: argparse.Namespace, *paths: Path | None) -> None:
    """Raises, before any work, if an output or the checkpoint could not be written."""
    json = getattr(parsed, "json", "-")
    for path in (*paths, None if json == "-" else json):
        if path is not None:
            atomic.check_writable(path)
    if parsed.checkpoint is not None:
        tasks.check_writable(parsed.checkpoint)
    elif parsed.every is not None:
        raise ValueError(f"--every {parsed.every:g} would be ignored: it is for --checkpoint DIR.")


def begin(parsed: argparse.Namespace, *trees: Any) -> tasks.Tasks:
    """The command's tasks, kept in ``--checkpoint``; ``trees`` enter its identity."""
    words = {name: value for name, value in vars(parsed).items() if name not in _ELSEWHERE}
    words["command"] = parsed.command.__module__.rpartition(".")[2].removesuffix("_command")
    words["versions"] = summary.versions()
    mark = b"" if parsed.checkpoint is None else identity.digest(words, *trees)
    return tasks.Tasks(
        parsed.checkpoint,
        every=_EVERY if parsed.every is None else parsed.every,
        identity=mark,
        about=words,
        clock=process.Clock(),
    )


def load(parsed: argparse.Namespace) -> tuple[Model, np.ndarray, np.ndarray]:
    """The model, and samples with labels."""
    model = convert.load(parsed.weights, parsed.arch).model
    samples = data.load_npz(parsed.data)
    x, y = samples if parsed.samples is None else samples.take(parsed.samples)
    return model, x, y


def batch(parsed: argparse.Namespace, most: int) -> int | None:
    """``--batch-size``, but at most ``most``, since more would be padding."""
    return None if parsed.batch_size is None else min(parsed.batch_size, most)


def cautions(console: Console, *texts: str | None) -> list[str]:
    """Prints warnings about the settings, and returns them for the JSON."""
    said = [text for text in texts if text is not None]
    for text in said:
        console.warn(f"  CAREFUL: {text}")
    return said


def described(parsed: argparse.Namespace, schema: str, samples: int) -> dict[str, Any]:
    """The common content of every JSON."""
    return {
        "schema": schema,
        "versions": summary.versions(),
        "arch": parsed.arch,
        "weights": parsed.weights.name,
        "data": parsed.data.name,
        "samples": samples,
        "norm": parsed.norm,
        "eps": parsed.eps,
    }


def write(
    console: Console,
    json: str | Path,
    content: Mapping[str, Any],
    others: Mapping[Path, bytes | str | None] = {},
) -> None:
    """Writes all files of a command whole, the JSON last, so that it implies the others.

    The JSON goes to a file, or to standard output for -.
    """
    for path, whole in others.items():
        if path is not None and whole is not None:
            atomic.write(path, whole)
    text = summary.dumps(content)
    if json == "-":
        console.result(text)
    else:
        atomic.write(json, text)


def total(done: list[tasks.Done[Any]], clock: str = "seconds") -> float:
    """What several tasks spent in total."""
    return math.fsum(one.spent[clock] for one in done)
