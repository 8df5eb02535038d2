"""``python -m wdjax image-attack``: attacks that move mass between pixels."""

import argparse
import dataclasses
import functools
import io
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import image, norms, remarks
from wdjax.checks import arguments
from wdjax.cli import attack_words, options, shards, subject
from wdjax.cli.console import Console
from wdjax.core import Attack, Classifier, Found, Progress
from wdjax.engine import batching, driver, tasks
from wdjax.report import summary

_EXAMPLES = """examples:
  python -m wdjax image-attack --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --k 5,10,20,50,100,200 --samples 100
  python -m wdjax image-attack --arch resnet2b --weights cifar10.pth --data cifar10.npz \\
      --k 20 --channels separate --radii radii.npz --points points.npz --json -"""


ATTACKS: dict[str, Callable[..., Attack]] = {
    "sinkhorn": image.SinkhornPGD,
    "frank-wolfe": image.FrankWolfe,
}
"""Single attacks by name; one that looks for the least radius is run once for every k."""

MOVES: dict[str, Callable[[Any], Any]] = {
    **{
        f"translation {n} %": functools.partial(image.translate, share=n / 100) for n in (5, 10, 20)
    },
    **{f"rotation {n}": functools.partial(image.rotate, degrees=float(n)) for n in (5, 10, 20)},
    **{f"blur {n}": functools.partial(image.gaussian_blur, kernel=n) for n in (3, 5, 7)},
}
"""The natural perturbations of Hu et al., Table 4."""
_MEASURED = 20
"""Images whose exact distance from their perturbation is computed, at up to a second each."""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "image-attack",
        parents=[common],
        help="attack a model by moving mass between pixels; a table, or JSON out",
        description="Attacks in the image-Wasserstein ball: mass is kept, pixels stay in [0, 1], "
        "and a transport plan proves what every point costs. A radius of k is eps = k / pixels.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subject.declare_samples(subject.declare(parser, "what is attacked"))
    how = parser.add_argument_group("how")
    how.add_argument(
        "--k",
        type=options.Numbers(options.PIXELS),
        default="5,10,20,50,100,200",
        metavar="LIST",
        help="radii in pixels that move by one pixel if all were white (default %(default)s)",
    )
    how.add_argument(
        "--window",
        type=_window,
        default="5",
        help="mass moves in so many pixels squared, odd, or full (%(default)s)",
    )
    how.add_argument(
        "--power", type=options.POWER, default=1.0, help="of distances in the cost (%(default)s)"
    )
    how.add_argument(
        "--channels",
        choices=("shared", "separate"),
        default="shared",
        help="normalise all channels together, or each apart (default %(default)s)",
    )
    how.add_argument(
        "--attack",
        default="union",
        metavar="NAME",
        help="union of all attacks here (default), or one of them, with settings in parentheses "
        f"where wanted, such as sinkhorn(step_size=0.06): {', '.join(ATTACKS)}",
    )
    how.add_argument(
        "--batch-size", type=options.BATCH, metavar="B", help="samples on the device at once"
    )
    subject.declare_devices(how)
    shards.declare(how)
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
        help="look for the least radii too, which count at every k, and save radius (inf where "
        "none was found, 0 where misclassified), k, correct and x_adv",
    )
    out.add_argument(
        "--natural",
        action="store_true",
        help="also the accuracy on translated, rotated and blurred images, and how far they are",
    )
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Attacks and writes; says at once what each radius leaves."""
    ks, window = sorted(parsed.k), None if parsed.window == "full" else int(parsed.window)
    ball = image.ImageWasserstein(window, parsed.power, parsed.channels)
    check(parsed)
    attack = _single(parsed, ball)
    work, samples = shards.sharded_work(parsed)
    model, x, y = samples
    if window is not None and window >= 2 * max(x.shape[1:3]) - 1:  # All of the image is inside.
        ball = dataclasses.replace(ball, window=None)
        attack = _single(parsed, ball)
    pixels = math.prod(ball.space(x.shape[1:]).stencil[:2])
    warned = subject.cautions(console, arguments.too_far(ball, x.shape[1:], max(ks) / pixels))
    how: dict[str, Any] = {"ball": ball, "batch_size": work.batch(model, x)}
    how["mesh"] = subject.mesh(parsed)
    found: dict[float, Found] = {}
    parts: list[tasks.Done[Found]] = []
    sought = attack is not None and attack.budget == "none"
    for k in [] if sought else ks:
        with console.search(f"k {k:g}") as tick:
            search = functools.partial(_attack, attack, model, x, y, k / pixels, found, how, tick)
            done = work.rows(f"k {k:g}", search)
        found[k] = done.value
        parts.append(done)
        console.say(f"k {k:g}: {_robust(found[k]):.2%} robust")
    least = None
    if sought or parsed.radii is not None:
        with console.search("radii") as tick:
            nearer = functools.partial(_least, attack if sought else None, model, x, y, how, tick)
            least = work.rows("radii", nearer)
    if sought and least is not None and work.shard is None:
        found = {k: _inside(least.value, x, k / pixels) for k in ks}
    natural = None
    if parsed.natural:
        natural = work.whole("natural", lambda task: _natural(model, np.asarray(x), y), console.say)
    if work.shard is not None:
        return work.write(console)
    warned += subject.cautions(console, *work.left_out)
    others: dict[Path, bytes] = {}
    content = _content(parsed, samples, float(np.mean(found[ks[0]].correct)))
    content |= work.coverage | {"remarks": warned}
    nearest = functools.reduce(driver.best_of, found.values())
    if natural is not None:
        content["natural"] = natural.value
    each = parts if least is None or not sought else [least] * len(ks)
    if least is not None:
        nearest = driver.best_of(least.value, nearest)
        file, said = _radii(nearest, pixels)
        others |= {} if parsed.radii is None else {parsed.radii: file}
        content["radii"] = said | subject.spent([least])
        middle = "none" if said["median_k"] is None else f"{said['median_k']:.4g}"
        console.say(f"radii: median k {middle}, {said['not_found']} not found")
    nearest = jax.device_get(nearest)
    for k, done in zip(ks, each):
        folded = jax.device_get(driver.within(found[k], nearest, k / pixels))
        row = {"k": k, "eps": k / pixels, **_measured(folded, x, ball.high)}
        row["flips_of_other_searches"] = int(np.sum(folded.success & ~found[k].success))
        row |= subject.spent([done]) | remarks.spent(found[k])
        row["remarks"] = remarks.of(row)
        content["budgets"].append(row)
        _say(console, f"k {k:g}", row)
        found[k] = folded
    if parsed.points is not None:
        others[parsed.points] = _points(x, y, found)
    content |= work.spent
    subject.write(console, parsed.json, content, others, lambda: table(content))
    return 0


def check(parsed: argparse.Namespace) -> None:
    """Raises, before any work, for a bad attack and paths that cannot be written."""
    _single(parsed, image.ImageWasserstein())
    subject.check_paths(parsed, parsed.points, parsed.radii)
    shards.check(parsed)


def table(content: dict[str, Any]) -> Iterator[list[Any]]:
    """The rows that are printed without ``--json``."""
    yield ["k", "eps", "accuracy", "seconds"]
    yield ["none", None, content["clean_accuracy"], None]
    for row in content["budgets"]:
        yield [f"{row['k']:g}", row["eps"], row["attacked_accuracy"], row["seconds"]]
    for name, moved in content.get("natural", {}).items():
        yield [name, None, moved["accuracy"], None]


def _say(console: Console, label: str, row: dict[str, Any]) -> None:
    """Prints what other searches added at one radius, and warns of all doubts about the result."""
    if more := row["flips_of_other_searches"]:
        left = f"{row['attacked_accuracy']:.2%} robust"
        console.say(f"{label}: {left} with {more} flips that searches in other radii found")
    for remark in row["remarks"]:
        console.warn(f"  CAREFUL, {label}: {remark}")


def _content(parsed: argparse.Namespace, samples: subject.Subject, clean: float) -> dict[str, Any]:
    """The content of the JSON, except budgets and radii."""
    return {
        **subject.described(parsed, "image-attack", samples),
        "window": parsed.window,
        "power": parsed.power,
        "channels": parsed.channels,
        "attack": parsed.attack,
        "clean_accuracy": clean,
        "budgets": [],
    }


def _window(text: str) -> str:
    """Checks ``--window``: a whole number of pixels, or ``full``; returns it as text."""
    return text if text == "full" else str(options.WINDOW(text))


def _single(parsed: argparse.Namespace, ball: image.ImageWasserstein) -> Any:
    """The attack of ``--attack``; None for the union of all.

    Raises a ValueError for another name and for settings that it does not take.
    """
    words = attack_words.read("--attack", parsed.attack)
    if words == [attack_words.Word("union")]:
        return None
    if len(words) != 1 or words[0].name not in ATTACKS:
        raise ValueError(
            f"--attack knows union, {', '.join(ATTACKS)}; got {options.shown(parsed.attack)}."
        )
    make = ATTACKS[words[0].name]
    settings = attack_words.typed(words[0], attack_words.declared(make, without=("ball",)))
    attack = make(ball, **settings)
    if attack.budget == "none" and parsed.radii is not None:
        raise ValueError(f"--radii would be ignored: {parsed.attack} looks for them itself.")
    return attack


def _natural(model: Classifier, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """By perturbation: the accuracy on perturbed images, and how far these are on average.

    ``w1`` is the mean exact distance of the first images, with masses made equal, in pixel widths
    as ``eps``; null if one of them became black, and of colours whose shares of the mass changed.
    """
    size = batching.default(batching.traced(model, x))
    pieces = [slice(one, one + size) for one in range(0, len(x), size)]
    found = {}
    for name, move in MOVES.items():
        moved = np.concatenate([np.asarray(move(x[piece])) for piece in pieces])
        logits = np.concatenate([np.asarray(model(jnp.asarray(moved[piece]))) for piece in pieces])
        far = np.sqrt(np.sum((np.asarray(moved, np.float64) - x) ** 2, axis=(1, 2, 3)))
        apart = image.image_wasserstein_distance(x[:_MEASURED], moved[:_MEASURED])
        found[name] = {
            "accuracy": float(np.mean(logits.argmax(-1) == y)),
            "l2": float(far.mean()),
            "w1": summary.number(float(apart.mean())),
        }
    return found


def _inside(least: Found, x: np.ndarray, eps: float) -> Found:
    """Of the nearest flips those within ``eps``; the sample itself where there is none."""
    near = least.success & (least.cost <= eps)
    x_adv = jnp.where(norms.spread(near, least.x_adv), least.x_adv, x)
    cost = jnp.where(near, least.cost, 0)
    return jax.device_get(dataclasses.replace(least, x_adv=x_adv, cost=cost, success=near))


def _attack(
    attack: Any,
    model: Classifier,
    x: np.ndarray,
    y: np.ndarray,
    eps: float,
    before: Mapping[float, Found],
    how: dict[str, Any],
    tick: Callable[[Progress], None],
    rows: np.ndarray,
    task: tasks.Task,
) -> Found:
    """Attacks within ``eps`` those of the samples ``rows`` that survived all smaller radii.

    The union of all attacks is used if ``attack`` is None.

    ``before`` has the results at smaller radii, whose flips are inside this radius too and are
    kept. The plans are dropped, since costs have been measured.
    """
    known = [*before.values()][-1] if before else None
    left = None if known is None else np.asarray(known.correct & ~known.success)
    settings = how | {"eps": eps, "only": left, "index": rows} | _kept(task, tick, attack)
    found = _light(_searched(attack, image.image_wasserstein, model, x[rows], y[rows], settings))
    return found if known is None else jax.device_get(driver.best_of(known, found))


def _searched(
    attack: Any,
    union: Callable[..., Found],
    model: Classifier,
    x: np.ndarray,
    y: np.ndarray,
    how: dict[str, Any],
) -> Found:
    """What one attack finds, or the union if it is None."""
    if attack is None:
        return union(model, x, y, **how)
    rest = {name: value for name, value in how.items() if name != "ball"}
    return driver.search(attack, model, x, y, **rest)


def _kept(task: tasks.Task, tick: Callable[[Progress], None], attack: Any) -> dict[str, Any]:
    """Options of a search: its checkpoint in the task's folder, and the progress bar."""
    return task.saving(parts=attack is None) | {"callback": task.heard(tick)}


def _light(found: Found) -> Found:
    """The result without its plans, which are not needed after costs are measured."""
    return jax.device_get(dataclasses.replace(found, proof=None))


def _robust(found: Found) -> float:
    """The share of samples that are classified correctly and have no flip."""
    return float(np.mean(found.correct & ~found.success))


def _measured(found: Found, x: np.ndarray, high: float) -> dict[str, float]:
    """Measurements of the points themselves, in float64."""
    before, after = (np.asarray(part, np.float64) for part in (x, found.x_adv))
    mass = before.sum(axis=(1, 2, 3))
    drift = np.abs(after.sum(axis=(1, 2, 3)) - mass) / np.where(mass > 0, mass, 1.0)
    return {
        "attacked_accuracy": _robust(found),
        "max_cost": float(np.max(found.cost)),
        "max_mass_error": float(drift.max()),
        "max_box_excess": max(0.0, float(-after.min()), float(after.max() - high)),
    }


def _least(
    attack: Any,
    model: Classifier,
    x: np.ndarray,
    y: np.ndarray,
    how: dict[str, Any],
    tick: Callable[[Progress], None],
    rows: np.ndarray,
    task: tasks.Task,
) -> Found:
    """The nearest flips of the samples ``rows``, without their plans."""
    settings = how | {"index": rows} | _kept(task, tick, attack)
    return _light(_searched(attack, image.minimum_radius, model, x[rows], y[rows], settings))


def _radii(found: Found, pixels: int) -> tuple[bytes, dict[str, Any]]:
    """The content of the ``--radii`` file (npz, ``[n]`` arrays), and its summary for the JSON."""
    radius = np.where(found.success, found.cost, np.inf)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, radius=radius, k=radius * pixels, correct=found.correct, x_adv=found.x_adv
    )
    said = {
        "median_k": summary.number(float(np.median(radius) * pixels)),
        "mean_radius": summary.number(float(np.mean(radius))),
        "not_found": int(np.isinf(radius).sum()),
    }
    return buffer.getvalue(), said


def _points(x: np.ndarray, y: np.ndarray, results: dict[float, Found]) -> bytes:
    """The content of the ``--points`` file, an npz archive.

    For every radius k the arrays ``kK/x_adv``, ``success`` and ``cost``; and as ``x`` the nearest
    flip of all radii for each sample (the sample itself if there is none), with ``y``.
    """
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
