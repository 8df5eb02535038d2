"""Attacks: frozen pytree dataclasses for :func:`wdjax.search` and :func:`wdjax.run`."""

from wdjax.attacks.apgd import APGD
from wdjax.attacks.diversified import Diversified
from wdjax.attacks.fab import FAB
from wdjax.attacks.pgd import PGD, fgsm
from wdjax.attacks.points import Points
from wdjax.attacks.square import Square
from wdjax.attacks.wda import WDA
from wdjax.attacks.wda_plus_plus import WDAPlusPlus
from wdjax.attacks.wpgd import WPGD, wfgsm

__all__ = [
    "APGD",
    "FAB",
    "PGD",
    "WDA",
    "WPGD",
    "Diversified",
    "Points",
    "Square",
    "WDAPlusPlus",
    "fgsm",
    "wfgsm",
]
