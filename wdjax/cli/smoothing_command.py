"""``python -m wdjax certify --method smoothing``: what votes of noisy copies prove."""

import argparse
import io
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from wdjax import smoothing
from wdjax.cli import options, shards, subject
from wdjax.cli.console import Console
from wdjax.core import Classifier, Progress
from wdjax.engine import tasks
from wdjax.report.rounded import AtLeast
from wdjax.smoothing import looks, noise

METHOD = "smoothing"

IMAGES = "w1"
"""What is not a norm: mass that moves between the pixels of an image."""

Added: TypeAlias = noise.Gaussian | noise.Laplace | noise.Uniform | noise.Flow

NOISES: dict[str, dict[str, type[Added]]] = {
    "l2": {"gaussian": noise.Gaussian},
    "l1": {"laplace": noise.Laplace, "uniform": noise.Uniform},
    IMAGES: {"flow": noise.Flow},
}
_DEFAULTS: dict[str, Any] = {"n0": 100, "votes": 100_000, "alpha": 0.001, "seed": 0}
_OWN = ("sigma", "noise", "test", *_DEFAULTS)


def declare(group: Any) -> None:
    """Adds the options of this method; None if they are not given."""
    group.add_argument(
        "--sigma", type=options.DEVIATION, metavar="S", help="standard deviation of the noise"
    )
    group.add_argument(
        "--noise",
        choices=[name for fitting in NOISES.values() for name in fitting],
        help="gaussian for --norm l2, laplace or uniform for l1, flow for w1 (default: the first "
        "for the norm)",
    )
    group.add_argument(
        "--n0",
        type=options.VOTES,
        metavar="N0",
        help=f"votes that choose a class (default {_DEFAULTS['n0']})",
    )
    group.add_argument(
        "--votes",
        type=options.VOTES,
        metavar="N",
        help=f"votes that bound its probability, at most (default {_DEFAULTS['votes']})",
    )
    group.add_argument(
        "--alpha",
        type=options.LEVEL,
        metavar="A",
        help=f"chance that a radius is wrong, a sample (default {_DEFAULTS['alpha']})",
    )
    group.add_argument(
        "--test",
        choices=looks.TESTS,
        help="sequential stops as soon as eps is decided, the others take all votes for radii as "
        "large as these show (default sequential)",
    )
    group.add_argument(
        "--seed",
        type=options.SEED,
        help=f"of the noise (default {_DEFAULTS['seed']})",
        metavar="SEED",
    )


def check(parsed: argparse.Namespace) -> None:
    """Raises, before any work, for options that do not go together."""
    given = [name for name in _OWN if getattr(parsed, name) is not None]
    if parsed.method != METHOD:
        if given:
            raise ValueError(f"--{given[0]} would be ignored: it is for --method {METHOD}.")
        return
    if parsed.sigma is None:
        raise ValueError(f"--method {METHOD} needs the noise's standard deviation: --sigma S.")
    _noise(parsed)


def run(
    parsed: argparse.Namespace,
    work: shards.ShardedWork,
    samples: subject.Subject,
    console: Console,
) -> int:
    """Certifies and writes, then says how many samples are verified."""
    model, x, y = samples
    settings = {name: getattr(parsed, name) for name in _OWN}
    settings = {
        name: _DEFAULTS.get(name) if value is None else value for name, value in settings.items()
    }
    settings["test"] = settings["test"] or "sequential"
    settings["noise"] = _noise(parsed)
    how = {
        "noise": settings["noise"],
        "n": settings["votes"],
        "alpha": settings["alpha"],
        "test": settings["test"],
    }
    warned = subject.cautions(console, *smoothing.cautions(x[work.own], eps=parsed.eps, **how))
    with console.search("votes") as tick:

        def certify(rows: np.ndarray, task: tasks.Task) -> smoothing.SmoothedCertificate:
            return _certify(parsed, settings, how, model, x, y, rows, task, tick)

        done = work.rows("votes", certify)
    if work.shard is not None:
        return work.write(console)
    found = done.value
    content = (
        _content(parsed, samples, settings, found)
        | work.coverage
        | subject.spent([done])
        | {"remarks": warned}
    )
    if content["faults"]:
        warned.append(f"{content['faults']} votes had logits that are not finite")
    others = {parsed.radii: None if parsed.radii is None else _archive(found, parsed.eps)}
    subject.write(console, parsed.json, content, others, lambda: table(content))
    console.say(
        f"{content['verified']} of {len(y)} verified within {parsed.eps:g} by "
        f"{content['votes_per_sample']:.0f} votes each, {content['abstained']} abstained"
    )
    if content["faults"]:
        console.warn(f"  CAREFUL: {warned[-1]}")
    return 0


def table(content: dict[str, Any]) -> Iterator[list[Any]]:
    """The rows that are printed without ``--json``."""
    yield ["smoothed classifier", "accuracy"]
    yield ["clean", content["clean_accuracy"]]
    for ball, value in content["certified_accuracy"].items():
        yield [f"certified, {ball.capitalize()}", AtLeast(value)]


def _certify(
    parsed: argparse.Namespace,
    settings: dict[str, Any],
    how: dict[str, Any],
    model: Classifier,
    x: np.ndarray,
    y: np.ndarray,
    rows: np.ndarray,
    task: tasks.Task,
    tick: Callable[[Progress], None],
) -> smoothing.SmoothedCertificate:
    """Certifies the samples ``rows`` by votes, and saves its progress under ``task``.

    ``settings`` are all options of this method, with their defaults; ``how`` are those that
    :func:`smoothing.cautions` takes as well: noise, number of votes, level and test. ``tick`` hears
    of the progress.
    """
    return smoothing.certify(
        model,
        x[rows],
        y[rows],
        **how,
        index=rows,
        mesh=subject.mesh(parsed),
        key=jax.random.key(settings["seed"]),
        eps=parsed.eps if settings["test"] == "sequential" else None,
        n0=settings["n0"],
        batch_size=subject.batch(parsed, len(rows) * (settings["n0"] + settings["votes"])),
        callback=task.heard(tick),
        **task.saving(),
    )


def _content(
    parsed: argparse.Namespace,
    samples: subject.Subject,
    settings: dict[str, Any],
    found: smoothing.SmoothedCertificate,
) -> dict[str, Any]:
    """The JSON's content: verified and abstained samples, certified accuracies, votes."""
    return {
        **subject.described(parsed, "certify", samples),
        "method": METHOD,
        "claim": f"smoothed classifier, each radius at level {1 - settings['alpha']:g}",
        "noise": type(settings["noise"]).__name__.lower(),
        **{name: settings[name] for name in ("sigma", *_DEFAULTS, "test")},
        "clean_accuracy": float(np.mean(found.correct)),
        "abstained": int(np.sum(found.abstained)),
        "verified": int(np.sum(_verified(found, parsed.eps))),
        "average_radius": found.average_radius,
        "certified_accuracy": {
            f"omega_{name}": float(found.accuracy(parsed.eps, order))
            for name, order in options.ORDERS.items()
        },
        "votes_per_sample": float(np.mean(found.votes)),
        "faults": int(np.sum(found.faults)),
    }


def _noise(parsed: argparse.Namespace) -> Added:
    """The noise of ``--noise`` and ``--sigma``, by default the first that fits the norm.

    Raises if the noise has no radii in the norm.
    """
    fitting = NOISES.get(parsed.norm, {})
    name = parsed.noise or next(iter(fitting), None)
    if name not in fitting:
        raise ValueError(
            f"votes have radii in {', '.join(NOISES)}; for --norm {parsed.norm} the noise can be "
            f"{', '.join(fitting) or 'none'}, got {parsed.noise or 'none'}."
        )
    return fitting[name](parsed.sigma)


def _verified(found: smoothing.SmoothedCertificate, eps: float) -> np.ndarray:
    """``[n]``: whether the label is returned within ``eps``; a radius may be 0 for want of it."""
    return np.asarray(found.correct & (found.radius >= eps))


def _archive(found: smoothing.SmoothedCertificate, eps: float) -> bytes:
    """The content of the ``--radii`` file, an npz archive of ``[n]`` arrays."""
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        radius=found.radius,
        verified=_verified(found, eps),
        correct=found.correct,
        prediction=found.prediction,
        lower=found.lower,
        votes=found.votes,
    )
    return buffer.getvalue()
