"""``python -m wdjax image-attack``: how far mass must move in the images of a checkpoint."""

import argparse
import io
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wdjax import arguments, driver, files, image, remarks, report
from wdjax.cli import options, process, subject
from wdjax.cli.console import Console
from wdjax.core import Found, Model

SCHEMA = "wdjax.image-attack/1"

_EXAMPLES = """examples:
  python -m wdjax image-attack --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --k 5,10,20,50,100,200 --samples 100 --json result.json
  python -m wdjax image-attack --arch resnet2b --weights cifar10.pth --data cifar10.npz \\
      --k 20 --channels separate --radii radii.npz --points points.npz --json -"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "image-attack",
        parents=[common],
        help="attack a PyTorch checkpoint by moving mass between pixels; JSON out",
        description="Attacks in the image-Wasserstein ball: mass is kept, pixels stay in [0, 1], "
        "and a transport plan proves what every point costs. A radius of k is eps = k / pixels.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subject.declare(parser, "what is attacked")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--k",
        default="5,10,20,50,100,200",
        metavar="LIST",
        help="radii in pixels that move by one pixel if all were white (default %(default)s)",
    )
    how.add_argument(
        "--window",
        default="5",
        help="mass moves in so many pixels squared, odd, or full (%(default)s)",
    )
    how.add_argument(
        "--power", type=options.number, default=1.0, help="of distances in the cost (%(default)s)"
    )
    how.add_argument(
        "--channels",
        choices=("shared", "separate"),
        default="shared",
        help="normalise all channels together, or each apart (default %(default)s)",
    )
    how.add_argument(
        "--batch-size", type=options.positive, metavar="B", help="samples on the device at once"
    )
    out = subject.declare_out(parser)
    out.add_argument(
        "--points",
        type=Path,
        metavar="FILE.npz",
        help="save of every k kK/x_adv, kK/success and kK/cost, and as x and y the nearest flips",
    )
    out.add_argument(
        "--radii",
        type=Path,
        metavar="FILE.npz",
        help="look for the least radii too, and save radius (inf where none was found, 0 where "
        "misclassified), k, correct and x_adv",
    )
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Attacks, prints, then writes."""
    ks, ball = _radii(parsed.k), _ball(parsed)
    subject.check_writable(parsed.json, parsed.points, parsed.radii)
    model, x, y = subject.load(parsed)
    pixels = math.prod(ball.space(x.shape[1:]).stencil[:2])
    far = arguments.too_far(ball, x.shape[1:], max(ks) / pixels)
    warned = subject.cautions(console, far)
    results: dict[float, Found] = {}
    measured, found, spent = [], None, process.Compiling()
    for k in ks:
        began, compiled = time.perf_counter(), spent.seconds
        found = _attack(
            model, x, y, k / pixels, ball, parsed.batch_size, found, console, f"k {k:g}"
        )
        compiled = spent.seconds - compiled
        seconds = (time.perf_counter() - began - compiled) / len(y)
        results[k] = jax.device_get(found)
        row = {"k": k, "eps": k / pixels, **_measured(results[k], x, k / pixels, ball.high)}
        row |= {"seconds_per_image": seconds, "compile_seconds": compiled}
        measured.append(row | remarks.spent(results[k]))
        console.say(f"k {k:g}: {row['robust_accuracy']:.2f} % robust")
        for remark in remarks.of(measured[-1]):
            console.warn(f"  CAREFUL, k {k:g}: {remark}")
    assert found is not None
    content = _content(parsed, len(y), float(100 * np.mean(found.correct)), measured)
    content["warnings"] = warned
    if parsed.radii is not None:
        content["radii"] = _least(parsed, model, x, y, ball, pixels, found, spent, console)
    subject.write(parsed.json, content)
    if parsed.points is not None:
        files.write(parsed.points, _points(x, y, results))
    return 0


def _content(
    parsed: argparse.Namespace, samples: int, clean: float, measured: list[dict[str, Any]]
) -> dict[str, Any]:
    """What is written as JSON, but for the radii."""
    return {
        "schema": SCHEMA,
        "versions": report.versions(),
        "arch": parsed.arch,
        "weights": parsed.weights.name,
        "data": parsed.data.name,
        "samples": samples,
        "window": parsed.window,
        "power": parsed.power,
        "channels": parsed.channels,
        "clean_accuracy": clean,
        "results": measured,
    }


def _radii(text: str) -> list[float]:
    """``--k``: from small to large, each once."""
    try:
        ks = sorted({options.number(word) for word in text.split(",") if word.strip()})
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--k {error}") from error
    if not ks or not all(0 < k < math.inf for k in ks):
        raise ValueError(f"--k must be numbers above 0 such as 5,10,20, got {text!r}.")
    return ks


def _ball(parsed: argparse.Namespace) -> image.ImageWasserstein:
    if parsed.window == "full":
        window = None
    elif parsed.window.isdigit():
        window = int(parsed.window)
    else:
        raise ValueError(f"--window must be an odd number or full, got {parsed.window!r}.")
    return image.ImageWasserstein(window, parsed.power, parsed.channels)


def _attack(
    model: Model,
    x: np.ndarray,
    y: np.ndarray,
    eps: float,
    ball: image.ImageWasserstein,
    size: int | None,
    before: Found | None,
    console: Console,
    label: str,
) -> Found:
    """Who survives ``eps``; what a smaller radius broke is inside this one."""
    left = None if before is None else np.asarray(before.correct & ~before.success)
    if before is not None and left is not None and not left.any():
        return before
    with console.search(label) as tick:
        found = image.image_wasserstein(
            model, x, y, eps=eps, ball=ball, only=left, batch_size=size, callback=tick
        )
    return found if before is None else driver.best(before, found)


def _measured(found: Found, x: np.ndarray, eps: float, high: float) -> dict[str, float]:
    """Of the points themselves, in float64."""
    before, after = (np.asarray(part, np.float64) for part in (x, found.x_adv))
    mass = before.sum(axis=(1, 2, 3))
    drift = np.abs(after.sum(axis=(1, 2, 3)) - mass) / np.where(mass > 0, mass, 1.0)
    return {
        "robust_accuracy": float(100 * np.mean(found.correct & ~found.success)),
        "max_cost_over_eps": float(np.max(found.cost) / eps),
        "max_mass_error": float(drift.max()),
        "max_box_excess": max(0.0, float(-after.min()), float(after.max() - high)),
    }


def _least(
    parsed: argparse.Namespace,
    model: Model,
    x: np.ndarray,
    y: np.ndarray,
    ball: image.ImageWasserstein,
    pixels: int,
    known: Found,
    spent: process.Compiling,
    console: Console,
) -> dict[str, Any]:
    """The least radii, and what is said of them."""
    began, compiled = time.perf_counter(), spent.seconds
    with console.search("radii") as tick:
        own = image.minimum_radius(
            model, x, y, ball=ball, batch_size=parsed.batch_size, callback=tick
        )
    compiled = spent.seconds - compiled
    seconds = (time.perf_counter() - began - compiled) / len(y)
    found = jax.device_get(driver.best(own, known))
    radius = np.where(found.success, found.cost, np.inf)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, radius=radius, k=radius * pixels, correct=found.correct, x_adv=found.x_adv
    )
    files.write(parsed.radii, buffer.getvalue())
    middle = float(np.median(radius) * pixels)
    console.say(f"radii: median k {middle:.2f}, {int(np.isinf(radius).sum())} not found")
    return {
        "median_k": report.number(middle),
        "not_found": int(np.isinf(radius).sum()),
        "seconds_per_image": seconds,
        "compile_seconds": compiled,
    }


def _points(x: np.ndarray, y: np.ndarray, results: dict[float, Found]) -> bytes:
    """The archive of ``--points``."""
    arrays: dict[str, Any] = {"y": y}
    nearest, distance = np.array(x), np.full(len(y), np.inf)
    for k, found in results.items():
        for field in ("x_adv", "success", "cost"):
            arrays[f"k{k:g}/{field}"] = getattr(found, field)
        closer = found.correct & found.success & (found.cost < distance)
        nearest[closer], distance[closer] = found.x_adv[closer], found.cost[closer]
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=nearest, **arrays)
    return buffer.getvalue()
