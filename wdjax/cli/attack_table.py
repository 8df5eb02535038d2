"""The attacks that the command line knows: a new one is one row.

A row makes an :class:`~wdjax.core.Attack` for a ball, or is a search of its own,
``(model, x, y, *, eps, order, key, ball, **options) -> Found``.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from wdjax import attacks, ensembles, losses
from wdjax.balls import Lp
from wdjax.core import Attack, Found

Search = Callable[..., Found]


def apgd_ce(ball: Lp) -> Attack:
    """Auto-PGD on the cross-entropy."""
    return attacks.APGD(ball)


def apgd_dlr(ball: Lp) -> Attack:
    """Auto-PGD on the difference of logits ratio; with fewer than three classes, on the margin."""
    return attacks.APGD(ball, loss=losses.dlr_or_margin)


def apgd_t(ball: Lp) -> Attack:
    """Auto-PGD towards each of the nine likeliest other classes."""
    return attacks.APGD(ball, targets=9)


def fab_t(ball: Lp) -> Attack:
    """Fast adaptive boundary attack towards each of the nine likeliest other classes."""
    return attacks.FAB(ball, targets=9)


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
    """WDA*: the knapsack over the nearest flips of a schedule of walks."""
    return ensembles.wda_star(*asked, **options)


ATTACKS: dict[str, Callable[[Lp], Attack]] = {
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
    "wfgsm": attacks.wfgsm,
    "wpgd": attacks.WPGD,
    "wda": attacks.WDA,
    "wda++": attacks.WDAPlusPlus,
}
"""What ``--attacks`` calls it, and what makes it for a ball. ``--help`` prints the first paragraph
of the docstring."""

BOUNDED: dict[str, Search] = {
    "autoattack": autoattack,
    "fast": fast,
    "a3": a3,
    "a3-wda": a3_wda,
}
"""Searches within a radius."""

NEAREST: dict[str, Search] = {"wda-star": wda_star}
"""Searches for the nearest flips."""

SEARCHES = BOUNDED | NEAREST
METHODS: dict[str, Callable[..., Any]] = {**ATTACKS, **SEARCHES}
"""Every name."""


RIVALS: dict[str, Callable[[int | None], Any]] = {
    "wda": lambda count: attacks.WDA(rivals=count),
    "wda++": lambda count: attacks.WDAPlusPlus(rivals=count),
    "a3-wda": lambda count: attacks.WDA(rivals=count),
}
"""Those that choose among rivals, and who says of how many."""


class Column(NamedTuple):
    """An attack, and what its points are spent in."""

    name: str
    order: float
    kappa: float | None = None

    @property
    def label(self) -> str:
        """What results call it: ``omega_1:wda(kappa=2)``."""
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
"""What ``table1`` stands for: the columns of Table 1 of Le et al."""
