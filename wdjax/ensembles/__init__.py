"""Ensembles: several searches of the same samples, survivors only, starts handed on."""

from wdjax.ensembles.bisect import bisect
from wdjax.ensembles.fast import Account, Leg, fast
from wdjax.ensembles.star import wda_star

__all__ = [
    "Account",
    "Leg",
    "bisect",
    "fast",
    "wda_star",
]
