"""Games around a model of one's own: which defences adapt it, and what they need."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax

from wdjax import data, remarks
from wdjax.attacks import PGD
from wdjax.checks import validate
from wdjax.cli import options, subject
from wdjax.core import Found
from wdjax.engine import driver
from wdjax.report import summary
from wdjax.transductive import digits
from wdjax.transductive.digits import DigitsCase, DigitsData

DEFAULT = "purify"
NEEDS = {"purify": False, "dent": False, "rmc": True, "urejectron": True}
"""The defences of a given model, and whether they need training data."""
_ONLY_OWN = {"weights": "FILE", "data": "FILE.npz", "eps": "R", "train": "FILE.npz"}


class BuiltGame(NamedTuple):
    """A game that can be played."""

    case: DigitsCase
    train: data.Dataset
    inputs: data.Dataset


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds the options for a model of one's own."""
    group = subject.declare(parser, "a model of your own, which defences adapt", required=False)
    group.add_argument("--eps", type=options.BUDGET, help="the linf radius, such as 8/255")
    group.add_argument(
        "--train",
        type=Path,
        metavar="FILE.npz",
        help="training data, for rmc and urejectron, as in --data",
    )


def named(parsed: argparse.Namespace) -> bool:
    """Whether the command names a model."""
    return parsed.model is not None or parsed.arch is not None


def check(parsed: argparse.Namespace) -> None:
    """Raises for options that do not go together."""
    given = {name for name in _ONLY_OWN if getattr(parsed, name) is not None}
    if not named(parsed):
        if given:
            raise ValueError(f"--{min(given)} would be ignored: it is for --model or --arch.")
        return
    for name in ("data", "eps"):
        if name not in given:
            raise ValueError(f"a model of your own needs --{name} {_ONLY_OWN[name]}.")
    names = options.words(parsed.defense or DEFAULT)
    if other := [name for name in names if name in ("dann", "tadv")]:
        raise ValueError(
            f"--defense {other[0]} trains nets of its own; around a model there are "
            f"{', '.join(NEEDS)}."
        )
    needing = [name for name in names if NEEDS.get(name)]
    if needing and "train" not in given:
        raise ValueError(f"--defense {needing[0]} needs training data: --train FILE.npz.")
    if not needing and "train" in given:
        raise ValueError("--train would be ignored: it is for rmc and urejectron.")


def load(parsed: argparse.Namespace) -> tuple[subject.Subject, data.Dataset | None]:
    """Model and samples, and training data, which fit each other; digits without a model."""
    if not named(parsed):
        return subject.Subject(None, *data.digits().test), None
    samples = subject.load(parsed)
    if parsed.train is None:
        return samples, None
    known = data.load_npz(parsed.train)
    classes = validate.shapes_of(samples.model, samples.x).shape[-1]
    if known.x.shape[1:] != samples.x.shape[1:] or known.y.max() >= classes:
        raise ValueError(
            f"{parsed.train} has images {list(known.x.shape[1:])} of {known.y.max() + 1} classes, "
            f"and the model takes {list(samples.x.shape[1:])} of {classes}."
        )
    parsed.train_sha256 = summary.sha256(*known)
    return samples, known


def attacked_alone(samples: subject.Subject, eps: float) -> Found:
    """PGD on the model without a defence, with the second look if it met zero gradients.

    Attacks in games differentiate through adapted copies of this model, and are as blind as it is.
    """
    model, x, y = samples
    attack = PGD(steps=10)
    how: dict[str, Any] = {"eps": eps, "key": jax.random.key(0)}
    found = driver.search(attack, model, x, y, diagnose=False, **how)
    return driver.looked_again(found, attack, model, x, y, **how)


def remarks_on(alone: Found) -> list[str]:
    """What the result of :func:`attacked_alone` tells about games around the model."""
    return [f"PGD on the model alone: {text}" for text in remarks.of(remarks.spent(alone))]


def case(
    name: str,
    seed: int,
    parsed: argparse.Namespace,
    samples: subject.Subject,
    train: data.Dataset | None,
) -> BuiltGame:
    """The game of a defence: of the table of digits, or around the model of ``samples``."""
    model, x, y = samples
    if model is None:
        return BuiltGame(*digits.case(name, seed, parsed.iterations))
    # Defences without training data do not look at it, but a game's memory is made of some.
    known = data.Dataset(x[:1], y[:1]) if train is None else train
    given = DigitsData(known, jax.random.key(seed), parsed.iterations, model, parsed.eps)
    made = digits.CASES[name](given)._replace(inputs=len(y))
    return BuiltGame(made, known, data.Dataset(x, y))
