"""The model and samples that commands work on, and where their results go."""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from wdjax import data, identity, norms, parallel
from wdjax.checks import purity, validate
from wdjax.cli import options, own_model, printed, process
from wdjax.cli.console import Console
from wdjax.core import Classifier
from wdjax.engine import tasks
from wdjax.files import atomic
from wdjax.models import convert
from wdjax.report import summary

_EVERY = 60.0
_ELSEWHERE = {"json", "points", "plot", "radii", "out", "checkpoint", "every", "quiet", "cache"}
_ELSEWHERE |= {
    "weights",
    "data",
    "train",
    "batch_size",
    "command",
    "compare",
    "said",
    "parts",
    "shard",
    "devices",
    "jobs",
}
"""Options that do not change a result, or whose content is compared instead of their names."""
_BY_MEANING = {"model", "arch"}
"""Options that are named if a checkpoint belongs to other work, but compared by the program and the
numbers that they stand for."""


def declare(parser: argparse.ArgumentParser, title: str, required: bool = True) -> Any:
    """Adds the options for model and samples; returns their group."""
    what = parser.add_argument_group(title, own_model.WARNING)
    which = what.add_mutually_exclusive_group(required=required)
    which.add_argument("--model", metavar="MODEL", help=own_model.HELP)
    which.add_argument("--arch", help="an architecture of wdjax, such as mlp, wong_mnist, resnet2b")
    what.add_argument(
        "--weights", type=Path, metavar="FILE", help="the checkpoint, for --arch or for BUILD"
    )
    what.add_argument(
        "--data",
        required=required,
        type=Path,
        metavar="FILE.npz",
        help="x [n, height, width, channels], uint8 or floats in [0, 1], and labels y [n]; or a "
        "folder of x.npy and y.npy, or one that Hugging Face's datasets saved",
    )
    return what


def declare_samples(group: Any) -> None:
    """Adds the option for the number of samples."""
    group.add_argument(
        "--samples", type=options.SAMPLES, metavar="N", help="the first N; all if left"
    )


def declare_budget(group: Any, *more: str) -> None:
    """Adds the options for norm and budget; ``more`` names norms besides l1, l2 and linf."""
    choices = [*sorted(norms.NAMES), *more]
    group.add_argument("--norm", required=True, choices=choices, help="of a move")
    group.add_argument(
        "--eps", required=True, type=options.BUDGET, help="the budget, such as 0.1 or 8/255"
    )


def declare_devices(group: Any) -> None:
    """Adds the option for the devices that batches are split over."""
    group.add_argument(
        "--devices",
        type=options.devices,
        default=0,
        metavar="N",
        help="split batches over the first N devices, or all of them for all (default: all "
        "accelerators; on a CPU, one device)",
    )


def mesh(parsed: argparse.Namespace, rows: int = 0) -> Mesh | None:
    """The mesh of ``--devices``, of at most so many as divide ``rows``; None for one device."""
    here = jax.devices()
    wanted: int | None = parsed.devices
    if getattr(parsed, "parts", None) is not None:
        wanted = 0  # Their machine may have had others.
    if wanted == 0:
        wanted = 1 if here[0].platform == "cpu" else len(here)
    count = len(here) if wanted is None else wanted
    if count > len(here):
        raise ValueError(f"--devices {count}: there are {len(here)}.")
    count = next(fewer for fewer in range(count, 0, -1) if rows % fewer == 0)
    return None if count == 1 else parallel.data_mesh(here[:count])


def declare_out(parser: argparse.ArgumentParser) -> Any:
    """Adds the options for output, JSON first; returns their group."""
    group = parser.add_argument_group("what is written")
    group.add_argument(
        "--json",
        metavar="OUT",
        help="write the result to a file as JSON, or to stdout for -; if left, it is printed as a "
        "table",
    )
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


def check_paths(parsed: argparse.Namespace, *paths: Path | None) -> None:
    """Raises, before any work, if an output or the checkpoint could not be written."""
    json = getattr(parsed, "json", "-")
    for path in (*paths, None if json == "-" else json):
        if path is not None:
            if str(path) == "-":
                raise ValueError("only --json writes to stdout for -; name a file instead.")
            atomic.check_writable(path)
    plot = getattr(parsed, "plot", None)
    if plot is not None and plot.suffix.lower() != ".png" and (plot.is_file() or not plot.exists()):
        raise ValueError(f"--plot draws a PNG: name a file that ends in .png, got {plot}.")
    if parsed.checkpoint is not None:
        tasks.check_writable(parsed.checkpoint)
    elif parsed.every is not None:
        raise ValueError(f"--every {parsed.every:g} would be ignored: it is for --checkpoint DIR.")


class Subject(NamedTuple):
    """A model, if it is about one, and its samples."""

    model: Any
    x: Any
    """``[n, *shape]``, an array; in a part of some commands a :class:`wdjax.data.Unread`."""
    y: np.ndarray


def load(parsed: argparse.Namespace, unread: bool = False) -> Subject:
    """The model, and samples with labels, which fit each other; they may stay on the disk."""
    if parsed.arch is not None and parsed.weights is None:
        raise ValueError(f"--arch {parsed.arch} needs the checkpoint: --weights FILE.")
    x, y = (data.opened if unread else data.load)(parsed.data, parsed.samples)
    if parsed.arch is None:
        model = own_model.load(parsed.model, parsed.weights, x[:1])
    else:
        model = convert.load(parsed.weights, parsed.arch).model
    _check_shape(model, x, parsed.data)
    purity.check(model, x[:1])  # Functions of the package leave it to the user's own calls.
    return Subject(model, x, y)


def _check_shape(model: Classifier, x: Any, path: Path) -> None:
    """Raises if the model does not accept the samples; says how they would have to be turned."""
    try:
        validate.shapes_of(model, x)
    except ValueError as error:
        for how, shape in _turned(x.shape):
            if _accepts(model, shape):
                raise ValueError(
                    f"{path}: x has the shape {list(x.shape)}, the model takes {list(shape)}: "
                    f"save {how} instead."
                ) from None
        raise ValueError(f"{path}: {' '.join(str(error).split())[:400]}") from error


def _turned(shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Other shapes for samples of this shape, and how they are made."""
    n, *rest = shape
    if len(rest) == 3:
        yield "x.transpose(0, 2, 3, 1)", (n, rest[1], rest[2], rest[0])
        yield "x.transpose(0, 3, 1, 2)", (n, rest[2], rest[0], rest[1])
    size = math.prod(rest)
    if len(rest) > 1:
        yield "x[..., None]", (*shape, 1)
        yield "x.reshape(len(x), -1)", (n, size)
        return
    for channels in (1, 3):
        side = math.isqrt(size // channels)
        if side * side * channels == size:
            image = (side, side, channels)
            yield f"x.reshape(len(x), {', '.join(map(str, image))})", (n, *image)


def _accepts(model: Classifier, shape: tuple[int, ...]) -> bool:
    try:
        validate.shapes_of(model, np.empty(shape, np.float32))
    except ValueError:
        return False
    return True


def command_tasks(
    parsed: argparse.Namespace, *trees: Any, model: Classifier | None = None
) -> tasks.Tasks:
    """The command's tasks, kept in ``--checkpoint``.

    Args:
      parsed: the options.
      *trees: what else the results depend on: samples ``x`` first, where there is a model.
      model: enters the identity by its program and numbers.
    """
    words = settings(parsed)
    if getattr(parsed, "shard", None) is not None:
        words["shard"] = str(parsed.shard)
    mark = b""
    if parsed.checkpoint is not None:
        known = {name: v for name, v in words.items() if name not in _BY_MEANING}
        model_parts = (
            () if model is None else (model, identity.program(_forward, model, trees[0][:1]))
        )
        mark = identity.digest(known, *model_parts, *trees)
    return tasks.Tasks(
        parsed.checkpoint,
        every=_EVERY if parsed.every is None else parsed.every,
        identity=mark,
        about=words,
        clock=process.Clock(),
    )


def settings(parsed: argparse.Namespace) -> dict[str, Any]:
    """The options that a result depends on, by name, with the versions of packages."""
    words = {name: value for name, value in vars(parsed).items() if name not in _ELSEWHERE}
    words["command"] = parsed.command.__module__.rpartition(".")[2].removesuffix("_command")
    return words | {"versions": summary.versions()}


def compared(parsed: argparse.Namespace) -> dict[str, Any]:
    """The same but for the model, which :func:`fingerprint` compares by what it computes."""
    return {name: v for name, v in settings(parsed).items() if name not in _BY_MEANING}


def fingerprint(model: Classifier | None, x: Any) -> str:
    """A digest of a model's program and numbers."""
    if model is None:
        return ""
    return identity.digest(model, identity.program(_forward, model, x[:1])).hex()


def _forward(model: Classifier, x: jax.Array) -> Any:
    return model(x)


def batch(parsed: argparse.Namespace, most: int) -> int | None:
    """``--batch-size``, but at most ``most``, since more would be padding."""
    return None if parsed.batch_size is None else min(parsed.batch_size, most)


def cautions(console: Console, *texts: str | None) -> list[str]:
    """Prints warnings about the settings, and returns them for the JSON's ``remarks``."""
    said = [text for text in texts if text is not None]
    for text in said:
        console.warn(f"  CAREFUL: {text}")
    return said


def described(parsed: argparse.Namespace, command: str, samples: Subject) -> dict[str, Any]:
    """The common content of every JSON."""
    ball = {name: getattr(parsed, name) for name in ("norm", "eps") if hasattr(parsed, name)}
    return {
        **summary.head(command),
        "model": parsed.arch or parsed.model,
        "weights": None if parsed.weights is None else parsed.weights.name,
        "data": parsed.data.name,
        "data_sha256": summary.sha256(samples.x, samples.y),
        "n": len(samples.y),
        **ball,
    }


def write(
    console: Console,
    json: str | Path | None,
    content: Mapping[str, Any],
    others: Mapping[Path, bytes | str | None] = {},
    table: Callable[[], Iterable[Iterable[Any]]] | None = None,
) -> None:
    """Writes all files of a command or none, the JSON last, so that it implies the others.

    The JSON goes to a file, or to standard output for -; without a place for it, ``table`` is
    printed, rows of titles and cells, and the remarks.
    """
    files = {
        path: whole for path, whole in others.items() if path is not None and whole is not None
    }
    text = summary.dumps(content)
    if json is not None and json != "-":
        files[Path(json)] = text
    atomic.write_all(files)
    if json == "-":
        console.result(text)
    elif json is None and table is not None:
        console.say("\n".join([printed.table(table()), *printed.remarks(content)]))


def total(done: Iterable[tasks.Done[Any]], clock: str = "seconds") -> float:
    """What several tasks spent in total."""
    return math.fsum(one.spent[clock] for one in done)


def spent(done: Iterable[tasks.Done[Any]]) -> dict[str, float]:
    """The seconds of several tasks, and how many of them were compilation."""
    done = [*done]
    seconds = total(done)
    return {"seconds": seconds, "compile_seconds": min(total(done, "compile_seconds"), seconds)}
