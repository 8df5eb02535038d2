"""A small table of games: every defence on digits, with settings for minutes on a CPU.

The same cases hold around a given model, on its own data.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import data, distinct, models
from wdjax.attacks import PGD
from wdjax.checks import validate
from wdjax.core import Array, Model
from wdjax.data import Dataset
from wdjax.transductive import objectives
from wdjax.transductive.defense import Defense
from wdjax.transductive.defenses import DANN, DENT, RMC, TADV, Purify, URejectron
from wdjax.transductive.fitting import Opponent, train_classifier
from wdjax.transductive.space_attack import SpaceAttack, fpa, gmsa_avg, gmsa_min, pgd_skip, transfer

_HIDDEN = (96, 96)
_HELD = 500
"""Number of test inputs; the other 1297 images are for training."""


class Row(NamedTuple):
    """An attack, and the options of its game."""

    attack: SpaceAttack
    how: dict[str, Any] = {}  # noqa: RUF012  Nobody writes to it.


class DigitsCase(NamedTuple):
    """A defence and its games."""

    build: Callable[[], Defense]
    """Trains the models that the defence needs, and builds it."""
    eps: float
    size: int | None
    """Inputs in a round; None for all."""
    inputs: int
    rows: dict[str, Row]


class DigitsData(NamedTuple):
    """The arguments from which a case is built."""

    train: Dataset
    key: Array
    iterations: int | None
    """Iterations of the attacks; None for the case's default."""
    model: Model | None = None
    """The base model; None for one that is trained on ``train``."""
    eps: float | None = None
    """The linf radius; None for the case's default."""

    def radius(self, default: float) -> float:
        """The radius, 0 too if it is given."""
        return default if self.eps is None else self.eps


def split(seed: int) -> tuple[Dataset, Dataset]:
    """Digits in a random order: 1297 for training, 500 for the game.

    >>> train, test = split(0)
    >>> train.x.shape, test.x.shape
    ((1297, 8, 8, 1), (500, 8, 8, 1))
    """
    whole = [np.concatenate(parts) for parts in zip(*data.digits())]
    order = np.random.default_rng(seed).permutation(len(whole[1]))
    train, test = (
        Dataset(*(part[indices] for part in whole)) for indices in (order[_HELD:], order[:_HELD])
    )
    return train, test


def case(
    name: str, seed: int, iterations: int | None = None
) -> tuple[DigitsCase, Dataset, Dataset]:
    """A case of the table: ``(case, training data, inputs)``.

    Args:
      name: one of :data:`CASES`.
      seed: of the split and of the base model.
      iterations: of the attacks; by default 10, but 3 for DENT and 5 for URejectron.

    Raises:
      ValueError: another name.
    """
    validate.check_choice("name", name, tuple(CASES))
    train, test = split(seed)
    made = CASES[name](DigitsData(train, jax.random.key(seed), iterations))
    return made, train, test.take(made.inputs)


def _pgd(eps: float, steps: int = 40) -> PGD:
    """PGD with a tenth of the radius as its step, the inner attack of all games."""
    return PGD(steps=steps, step_size=eps / 10)


def _usual(inner: PGD, iterations: int, **settings: Any) -> Iterator[tuple[str, Row]]:
    """Yields name and row of the attacks of every game; ``settings`` are those of each."""
    yield "transfer", Row(transfer(inner, **settings))
    yield "fpa", Row(fpa(inner, iterations, **settings))
    yield "gmsa-avg", Row(gmsa_avg(inner, iterations, **settings))
    yield "gmsa-min", Row(gmsa_min(inner, iterations, **settings))
    # With as much computation as gmsa-avg, so that only the reduction differs.
    yield "gmsa-min-one-leg", Row(gmsa_min(inner, iterations, legs="one", **settings))


def _trained(
    given: DigitsData, network: Callable[..., Model], steps: int, eps: float = 0.0
) -> Model:
    """The base model; if it is trained here, adversarially if ``eps`` is positive."""
    if given.model is not None:
        return given.model
    foe = Opponent(PGD(steps=10, random_start=True, iterate="last"), eps) if eps else None
    first, second = jax.random.split(given.key)
    x, y = jnp.asarray(given.train.x), jnp.asarray(given.train.y)
    return _fit(network(key=first), x, y, second, steps, foe)


@functools.partial(distinct.jit, static_argnums=4)
def _fit(model: Model, x: Array, y: Array, key: Array, steps: int, foe: Opponent | None) -> Model:
    """:func:`train_classifier` as one compiled program."""
    return train_classifier(model, x, y, key=key, steps=steps, opponent=foe)


_mlp = functools.partial(models.mlp, (64, *_HIDDEN, 10))
_norm_mlp = functools.partial(models.norm_mlp, (64, *_HIDDEN, 10))
_discriminator = functools.partial(models.mlp, (_HIDDEN[-1], 96, 2))
_adversarial_mlp = functools.partial(models.mlp, (64, 128, 10))


def _rmc(given: DigitsData, robust: bool) -> DigitsCase:
    """RMC's case, with an adversarially trained base model if ``robust``."""
    eps, count = given.radius(0.15), given.iterations or 10
    copies = PGD(steps=40, step_size=eps / 10, random_start=True)
    epochs = 25 if robust else 100

    def build() -> Defense:
        model = _trained(given, _mlp, 600, eps if robust else 0.0)
        return RMC(model=model, attack=copies, eps=eps, neighbours=256, epochs=epochs)

    rows = dict(_usual(_pgd(eps), count))
    del rows["gmsa-min-one-leg"]
    rows["pgd-skip"] = Row(pgd_skip(_pgd(eps)))
    return DigitsCase(build, eps, 1, 40 if robust else 60, rows)


def rmc_standard(given: DigitsData) -> DigitsCase:
    """RMC with a base model trained on clean samples."""
    return _rmc(given, False)


def rmc_adversarial(given: DigitsData) -> DigitsCase:
    """RMC with an adversarially trained base model."""
    return _rmc(given, True)


def dent(given: DigitsData) -> DigitsCase:
    """DENT: affine parameters for each sample, by information maximisation."""
    eps = given.radius(0.1)
    how: dict[str, Any] = {
        "loss": objectives.margin,
        "judge": objectives.confidence,
        "restarts": 5,
        "rivals": 9,
    }
    rows = dict(_usual(_pgd(eps), given.iterations or 3, **how))
    rows["transfer-sorted"] = Row(transfer(_pgd(eps), **how), {"order": "labels"})
    rows["transfer-first-fall"] = Row(transfer(_pgd(eps), keep="first", **how))
    return DigitsCase(lambda: DENT(_trained(given, _norm_mlp, 600, eps)), eps, 128, 256, rows)


def dann(given: DigitsData) -> DigitsCase:
    """DANN: domain-adversarial training for each set of inputs."""
    eps = 0.15
    build = functools.partial(DANN, network=_norm_mlp, discriminator=_discriminator, steps=800)
    return DigitsCase(build, eps, None, 500, dict(_usual(_pgd(eps), given.iterations or 10)))


def tadv(given: DigitsData) -> DigitsCase:
    """TADV: adversarial training with private randomness for each set of inputs."""
    eps = 0.15
    foe = PGD(steps=10, random_start=True, iterate="last")
    build = functools.partial(TADV, network=_adversarial_mlp, attack=foe, eps=eps, steps=600)
    rows = dict(_usual(_pgd(eps), given.iterations or 10))
    rows["transfer-first-fall"] = Row(transfer(_pgd(eps), keep="first"))
    rows["seed-leaked"] = Row(fpa(_pgd(eps), 2), {"leak": "seed", "draws": 1})
    return DigitsCase(build, eps, None, 500, rows)


def urejectron(given: DigitsData) -> DigitsCase:
    """URejectron: rejects by a discriminator between training data and inputs."""
    eps, count = given.radius(0.15), given.iterations or 5
    detector = functools.partial(models.mlp, (math.prod(given.train.x.shape[1:]), *_HIDDEN, 2))
    rows = {
        "transfer": Row(transfer(_pgd(eps))),
        "joint": Row(gmsa_avg(_pgd(eps), count, loss=objectives.unnoticed)),
    }

    def build() -> Defense:
        return URejectron(model=_trained(given, _mlp, 600), discriminator=detector)

    return DigitsCase(build, eps, None, 500, rows)


def purify(given: DigitsData) -> DigitsCase:
    """Purification: inputs move to where the model is confident; attacks see through it."""
    eps = given.radius(0.1)
    rows = {
        "transfer": Row(transfer(_pgd(eps))),
        "gmsa-avg": Row(gmsa_avg(_pgd(eps), given.iterations or 2, simulations=4)),
    }

    def build() -> Defense:
        return Purify(_trained(given, _mlp, 600, eps), radius=eps, step_size=eps / 2)

    return DigitsCase(build, eps, None, 200, rows)


CASES: dict[str, Callable[[DigitsData], DigitsCase]] = {
    "rmc-standard": rmc_standard,
    "rmc-adversarial": rmc_adversarial,
    "dent": dent,
    "dann": dann,
    "tadv": tadv,
    "urejectron": urejectron,
    "purify": purify,
}
"""The functions that build the cases, by name."""
