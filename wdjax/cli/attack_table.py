"""The attacks of the command line, one in each row.

A row makes an :class:`~wdjax.core.Attack` from a ball and settings, or is a function
``(model, x, y, *, eps, order, key, ball, **options) -> Found``.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from wdjax import attacks, ensembles, losses
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.cli import attack_words
from wdjax.core import Attack, Found
from wdjax.ensembles.autoattack import members
from wdjax.ensembles.fast import LEAST
from wdjax.ensembles.walks import schedule
from wdjax.report import summary

Search = Callable[..., Found]


def apgd_ce(ball: Lp, **settings: Any) -> Attack:
    """Auto-PGD on the cross-entropy."""
    return attacks.APGD(ball, **settings)


def apgd_dlr(ball: Lp, **settings: Any) -> Attack:
    """Auto-PGD on the difference of logits ratio; with fewer than three classes, on the margin."""
    return attacks.APGD(ball, loss=losses.dlr_or_margin, **settings)


def apgd_t(ball: Lp, targets: int = 9, **settings: Any) -> Attack:
    """Auto-PGD towards each of the nine likeliest other classes."""
    return attacks.APGD(ball, targets=validate.check_count("targets", targets), **settings)


def fab_t(ball: Lp, targets: int = 9, **settings: Any) -> Attack:
    """Fast adaptive boundary attack towards each of the nine likeliest other classes."""
    return attacks.FAB(ball, targets=validate.check_count("targets", targets), **settings)


def autoattack(*asked: Any, order: float, **options: Any) -> Found:
    """AutoAttack, standard version: Auto-PGD, targeted Auto-PGD, targeted FAB, Square."""
    del order
    return ensembles.autoattack(*asked, **options)


def a3(*asked: Any, order: float, **options: Any) -> Found:
    """A3, adaptive auto attack: diversified starts on the samples that are easiest to break."""
    del order
    return ensembles.a3(*asked, **options)


def a3_wda(*asked: Any, order: float, **options: Any) -> Found:
    """A3 with the ascents of the Wasserstein distributional attack."""
    del order
    return ensembles.a3_wda(*asked, **options)


def fast(*asked: Any, order: float, **options: Any) -> Found:
    """A cheap cascade: short searches on survivors, at most 150 passes each way an image."""
    del order
    return ensembles.fast(*asked, **options).found


def wda_star(*asked: Any, **options: Any) -> Found:
    """The nearest flips of a schedule of walks, which WDA* spends by a knapsack."""
    return ensembles.wda_star(*asked, **options)


ATTACKS: dict[str, Callable[..., Attack]] = {
    "fgsm": attacks.fgsm,
    "pgd": attacks.PGD,
    "apgd-ce": apgd_ce,
    "apgd-dlr": apgd_dlr,
    "apgd-t": apgd_t,
    "fab": attacks.FAB,
    "fab-t": fab_t,
    "square": attacks.Square,
    "deepfool": attacks.DeepFool,
    "cw": attacks.CarliniWagner,
    "ddn": attacks.DDN,
    "fmn": attacks.FMN,
    "pdpgd": attacks.PDPGD,
    "alma": attacks.ALMA,
    "tr": attacks.TrustRegion,
    "sigma-zero": attacks.SigmaZero,
    "wfgsm": attacks.wfgsm,
    "wpgd": attacks.WPGD,
    "wda": attacks.WDA,
    "wda++": attacks.WDAPlusPlus,
}
"""Attacks by name, made from a ball and settings; ``--help`` prints the first paragraph of their
docstrings."""

BOUNDED: dict[str, Search] = {
    "autoattack": autoattack,
    "fast": fast,
    "a3": a3,
    "a3-wda": a3_wda,
}
"""Ensembles within a radius."""

NEAREST: dict[str, Search] = {"wda-star": wda_star}
"""Ensembles for the nearest flips."""

SEARCHES = BOUNDED | NEAREST
METHODS: dict[str, Callable[..., Any]] = {**ATTACKS, **SEARCHES}
"""All attacks and ensembles by name."""

_ELSEWHERE = (
    "model", "x", "y", "ball", "eps", "order", "key", "start", "only", "finisher", "checkpoint",
    "report", "axis", "diagnose",
)  # fmt: skip
"""Parameters that other options set, or that cannot be written on a command line."""
_NAMED = ("loss", "targets", "rank", "candidates")
"""Settings that ``apgd-ce`` and ``apgd-dlr`` fix."""

_DECLARED: dict[str, tuple[tuple[Callable[..., Any], ...], tuple[str, ...]]] = {
    "apgd-ce": ((attacks.APGD,), _NAMED),
    "apgd-dlr": ((attacks.APGD,), _NAMED),
    "apgd-t": ((attacks.APGD,), ("loss",)),
    "fab-t": ((attacks.FAB,), ()),
    "autoattack": ((ensembles.autoattack,), ()),
    "fast": ((ensembles.fast,), ()),
    "a3": ((ensembles.a3,), ()),
    "a3-wda": ((ensembles.a3, ensembles.a3_wda), ()),
    "wda-star": ((ensembles.wda_star,), ()),
}
"""Functions that declare a row's settings if the row does not, and settings that are fixed."""


@functools.cache
def settings_of(name: str) -> dict[str, Any]:
    """The settings that an attack takes on the command line, and their types."""
    functions, without = _DECLARED.get(name, ((METHODS[name],), ()))
    return attack_words.declared(*functions, without=(*_ELSEWHERE, *without))


_MOST_STEPS = 10**9
"""Maximum number of steps of one search: counters have 32 bits."""


def make(name: str, ball: Lp, settings: attack_words.Settings) -> Attack:
    """An attack, with its settings checked as a search would check them."""
    try:
        attack = ATTACKS[name](ball, **settings)
        steps = sum(stage.length for stage in attack.stages)
        if steps > _MOST_STEPS:
            raise ValueError(f"{steps} steps are more than {_MOST_STEPS}; set fewer.")
        arguments.check(attack=attack)
        validate.settle(attack, np.dtype(np.float32))
    except ValueError as error:
        raise ValueError(f"{attack_words.label(name, settings)}: {error}") from error
    return attack


def _enough(ball: Lp, passes: int = LEAST) -> None:
    """Raises if ``passes`` are fewer than the ensemble ``fast`` needs."""
    if passes < LEAST:
        raise ValueError(f"passes must be at least {LEAST}, got {passes}.")


_CHECKS: dict[str, Callable[..., Any]] = {
    "autoattack": members,
    "fast": _enough,
    "a3-wda": lambda ball, passes=0, rivals=None: attacks.WDA(ball, rivals=rivals),
    "wda-star": lambda ball, passes=400, most=None, tolerance=0: schedule(ball, passes, most),
}


def check(name: str, ball: Lp, settings: attack_words.Settings) -> None:
    """Raises, before any work, for settings that the attack would refuse.

    Raises:
      ValueError: such a setting, or a norm that the attack does not support.
    """
    if name in ATTACKS:
        make(name, ball, settings)
        return
    try:
        arguments.check(ball=ball)
        _CHECKS.get(name, lambda ball, **settings: None)(ball, **settings)
    except ValueError as error:
        raise ValueError(f"{attack_words.label(name, settings)}: {error}") from error


def described(name: str, ball: Lp, settings: attack_words.Settings) -> dict[str, Any]:
    """All settings of an attack that the command line can set, with their values."""
    if name in ATTACKS:
        said = summary.settings(ATTACKS[name](ball, **settings))
        return {key: value for key, value in said.items() if key not in _ELSEWHERE}
    functions, _ = _DECLARED[name]
    given = {
        key: settings.get(key, parameter.default)
        for function in functions
        for key, parameter in inspect.signature(function).parameters.items()
        if key in settings_of(name)
    }
    return {key: summary.setting(value) for key, value in given.items()}


RIVALS: dict[str, Callable[[int | None], Any]] = {
    "wda": lambda count: attacks.WDA(rivals=count),
    "wda++": lambda count: attacks.WDAPlusPlus(rivals=count),
    "a3-wda": lambda count: attacks.WDA(rivals=count),
}
"""Attacks that choose among rivals, and functions that make the attack which knows how many."""


class Column(NamedTuple):
    """An attack, and the order and kappa with which its points are spent."""

    name: str
    order: float
    kappa: float | None = None
    settings: attack_words.Settings = {}  # noqa: RUF012  Nobody writes to it.

    @property
    def label(self) -> str:
        """The name in results: ``omega_1:wda(kappa=2)``."""
        split = "" if self.kappa is None else f"(kappa={self.kappa:g})"
        return f"omega_{self.order:g}:{self.name}{split}"


TABLE_1 = (
    Column("wda", 1, 2.0),
    Column("wda++", 1),
    Column("wpgd", 2),
    Column("wda", 2, 2.0),
    Column("wda++", 2),
    Column("apgd-ce", math.inf),
    Column("apgd-dlr", math.inf),
    Column("wda", math.inf),
    Column("autoattack", math.inf),
    Column("a3", math.inf),
    Column("a3-wda", math.inf),
)
"""The columns of Table 1 of Le et al., for ``table1``."""
