"""The paper's settings by name, for games at full scale with networks of your own."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from wdjax import models
from wdjax.attacks import PGD
from wdjax.transductive import fitting, objectives
from wdjax.transductive.defense import Defense
from wdjax.transductive.defenses import DANN, DENT, RMC, TADV, URejectron
from wdjax.transductive.space_attack import SpaceAttack, fpa, gmsa_avg, gmsa_min, pgd_skip, transfer


class Preset(NamedTuple):
    """A published game: ``play(preset.defense(...), attack, x, y, eps=preset.eps, ...)``."""

    defense: Callable[..., Defense]
    """Those that adapt a trained model need it, ``model=``; those that train have the authors'
    networks, which ``network=`` and ``discriminator=`` replace."""
    eps: float
    size: int | None
    """Inputs in a round; None for all."""
    attacks: dict[str, SpaceAttack]


def _attacks(step: float, steps: int, iterations: int, **how: Any) -> dict[str, SpaceAttack]:
    """The paper's five attacks by name (transfer, PGD-skip, FPA, GMSA-AVG, GMSA-MIN).

    All use PGD with ``steps`` of length ``step`` inside; ``how`` are settings of each.
    """
    inner = PGD(steps=steps, step_size=step)
    return {
        "transfer": transfer(inner, **how),
        "pgd-skip": pgd_skip(inner, **how),
        "fpa": fpa(inner, iterations, **how),
        "gmsa-avg": gmsa_avg(inner, iterations, **how),
        "gmsa-min": gmsa_min(inner, iterations, **how),
    }


_PIXEL = 1 / 255
_HALF = PGD(steps=40, step_size=0.01, random_start=True, iterate="last")
_DENT = {
    "loss": objectives.margin,
    "judge": objectives.confidence,
    "restarts": 5,
    "rivals": 9,
}

PAPER: dict[str, Preset] = {
    "rmc-mnist": Preset(
        functools.partial(
            RMC,
            attack=PGD(steps=100, step_size=0.01, random_start=True),
            eps=0.3,
            copies=1,
            learning_rate=2e-4,
        ),
        0.3,
        1,
        _attacks(0.01, 100, 10),
    ),
    "rmc-cifar10": Preset(
        functools.partial(
            RMC,
            attack=PGD(steps=40, step_size=_PIXEL, random_start=True),
            eps=8 * _PIXEL,
            copies=4,
            learning_rate=2.5e-5,
        ),
        8 * _PIXEL,
        1,
        _attacks(_PIXEL, 40, 10),
    ),
    "dent-cifar10": Preset(DENT, 8 * _PIXEL, 128, _attacks(_PIXEL, 100, 3, **_DENT)),
    "dann-mnist": Preset(
        functools.partial(
            DANN,
            network=models.network(models.DANNNet),
            discriminator=models.network(models.DANNJudge),
            steps=7900,
            peak=0.1,
        ),
        0.3,
        None,
        _attacks(0.01, 200, 10),
    ),
    "dann-cifar10": Preset(
        functools.partial(
            DANN,
            network=models.network(models.EarlyResNet),
            discriminator=models.network(models.ResNetJudge),
            steps=15_600,
            size=64,
            peak=1.0,
            rule=functools.partial(fitting.falling_sgd, falls=(0.5, 0.75, 0.9), decay=1e-4),
            augment=True,
        ),
        8 * _PIXEL,
        None,
        _attacks(_PIXEL, 100, 10),
    ),
    "tadv-mnist": Preset(
        functools.partial(
            TADV,
            network=models.network(models.LeNet),
            attack=_HALF,
            eps=0.3,
            steps=43_000,
            learning_rate=1e-3,
        ),
        0.3,
        None,
        _attacks(0.01, 200, 10),
    ),
    "tadv-cifar10": Preset(
        functools.partial(
            TADV,
            network=models.network(models.CifarResNet, depth=20),
            attack=dataclasses.replace(_HALF, steps=10, step_size=2 * _PIXEL),
            eps=8 * _PIXEL,
            steps=43_000,
            rule=functools.partial(fitting.falling_sgd, falls=(100 / 110, 105 / 110), decay=5e-4),
            augment=True,
        ),
        8 * _PIXEL,
        None,
        _attacks(_PIXEL, 100, 10),
    ),
    "urejectron-gtsrb": Preset(
        functools.partial(
            URejectron,
            discriminator=models.network(models.ResNet, classes=2),
            steps=4920,
            learning_rate=1e-3,
        ),
        8 * _PIXEL,
        None,
        {"transfer": transfer(PGD(steps=40, step_size=_PIXEL))},
    ),
}
"""The settings of Appendix A of Chen et al. [chen2022]; its epochs became steps of batches of 128.

The defences' docstrings list deviations, such as dropout.
"""
