"""Games around a model of one's own: which defences adapt it, and what they need."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from wdjax import data, remarks, transductive
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
_WITHOUT = ("dann", "tadv")
"""Defences that train nets of their own."""
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
        help="training data, as in --data, for rmc, urejectron, and presets of dann and tadv",
    )
    group.add_argument(
        "--preset",
        choices=[*transductive.PAPER],
        metavar="NAME",
        help="a defence and attacks with the paper's settings, on your data; dann and tadv train "
        f"the paper's nets, others adapt your model: {', '.join(transductive.PAPER)}",
    )
    group.add_argument(
        "--steps",
        type=options.STEPS,
        metavar="N",
        help="of the trainings by a preset's defence (epochs for rmc); the paper's if left",
    )


def named(parsed: argparse.Namespace) -> bool:
    """Whether the command names a model."""
    return parsed.model is not None or parsed.arch is not None


def on_own_data(parsed: argparse.Namespace) -> bool:
    """Whether the game is on data of one's own, around a model or by a preset."""
    return named(parsed) or parsed.preset is not None


def _check_preset(parsed: argparse.Namespace, given: set[str]) -> None:
    """Raises for options that do not go with a preset, and for those that it lacks."""
    kind = parsed.preset.partition("-")[0]
    given = given | ({"model"} if named(parsed) else set())
    needs = {"data"} | (set() if kind in _WITHOUT else {"model"})
    needs |= {"train"} if NEEDS.get(kind, True) else set()
    for name in ("eps", "defense"):
        if getattr(parsed, name) is not None:
            raise ValueError(f"--{name} would be ignored: {parsed.preset} has its own.")
    for name in sorted(needs - given):
        raise ValueError(f"{parsed.preset} needs --{name}.")
    for name in sorted(given - needs - ({"weights"} if "model" in needs else set())):
        raise ValueError(f"--{name} would be ignored: {parsed.preset} takes none.")


def check(parsed: argparse.Namespace) -> None:
    """Raises for options that do not go together."""
    given = {name for name in _ONLY_OWN if getattr(parsed, name) is not None}
    if parsed.preset is not None:
        _check_preset(parsed, given)
        return
    if parsed.steps is not None:
        raise ValueError("--steps would be ignored: it is for --preset.")
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
    """Model and samples, and training data, which fit each other; digits without any."""
    if not on_own_data(parsed):
        return subject.Subject(None, *data.digits().test), None
    if named(parsed):
        samples = subject.load(parsed)
    else:
        samples = subject.Subject(None, *data.load(parsed.data, parsed.samples))
    if parsed.train is None:
        return samples, None
    known = data.load(parsed.train)
    if samples.model is None:
        classes = max(int(known.y.max()), int(samples.y.max())) + 1
    else:
        classes = validate.shapes_of(samples.model, samples.x).shape[-1]
    if known.x.shape[1:] != samples.x.shape[1:] or known.y.max() >= classes:
        raise ValueError(
            f"{parsed.train} has images {list(known.x.shape[1:])} of {known.y.max() + 1} classes, "
            f"and the model takes {list(samples.x.shape[1:])} of {classes}."
        )
    parsed.train_sha256 = summary.sha256(*known)
    return samples, known


def attacked_alone(samples: subject.Subject, eps: float, mesh: Mesh | None) -> Found:
    """PGD on the model without a defence, with the second look if it met zero gradients.

    Attacks in games differentiate through adapted copies of this model, and are as blind as it is.
    """
    model, x, y = samples
    attack = PGD(steps=10)
    how: dict[str, Any] = {"eps": eps, "key": jax.random.key(0), "mesh": mesh}
    found = driver.search(attack, model, x, y, diagnose=False, **how)
    return driver.looked_again(found, attack, model, x, y, **how)


def remarks_on(alone: Found) -> list[str]:
    """What the result of :func:`attacked_alone` tells about games around the model."""
    return [f"PGD on the model alone: {text}" for text in remarks.of(remarks.spent(alone))]


def _by_preset(
    preset: transductive.Preset,
    parsed: argparse.Namespace,
    samples: subject.Subject,
    train: data.Dataset | None,
) -> BuiltGame:
    """The game of a preset, with ``--iterations`` and ``--steps`` where they are given."""
    model, x, y = samples
    known = data.Dataset(x[:1], y[:1]) if train is None else train

    def build() -> transductive.Defense:
        made: Any = preset.defense(**({} if model is None else {"model": model}))
        less: dict[str, Any] = {}
        if hasattr(made, "neighbours"):
            less["neighbours"] = min(made.neighbours, (1 + made.copies) * len(known.y))
        if parsed.steps is not None:
            less["epochs" if hasattr(made, "epochs") else "steps"] = parsed.steps
        return dataclasses.replace(made, **less)

    attacks = preset.attacks
    if parsed.iterations is not None:
        attacks = {
            name: attack
            if attack.iterations == 1
            else dataclasses.replace(attack, iterations=parsed.iterations)
            for name, attack in attacks.items()
        }
    rows = {name: digits.Row(attack) for name, attack in attacks.items()}
    made = DigitsCase(build, preset.eps, preset.size, len(y), rows)
    return BuiltGame(made, known, data.Dataset(x, y))


def case(
    name: str,
    seed: int,
    parsed: argparse.Namespace,
    samples: subject.Subject,
    train: data.Dataset | None,
) -> BuiltGame:
    """The game of a defence: of the table of digits, or around the model of ``samples``."""
    model, x, y = samples
    if name in transductive.PAPER:
        return _by_preset(transductive.PAPER[name], parsed, samples, train)
    if model is None:
        return BuiltGame(*digits.case(name, seed, parsed.iterations))
    # Defences without training data do not look at it, but a game's memory is made of some.
    known = data.Dataset(x[:1], y[:1]) if train is None else train
    given = DigitsData(known, jax.random.key(seed), parsed.iterations, model, parsed.eps)
    made = digits.CASES[name](given)._replace(inputs=len(y))
    return BuiltGame(made, known, data.Dataset(x, y))
