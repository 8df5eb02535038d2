"""Ensembles: searches one after the other, on survivors, from the points of those before."""

from wdjax.ensembles.a3 import a3, a3_wda
from wdjax.ensembles.autoattack import autoattack
from wdjax.ensembles.bisect import bisect
from wdjax.ensembles.cascade import cascade
from wdjax.ensembles.fast import Account, Leg, fast
from wdjax.ensembles.mixed import Mixed, lowered, mixed
from wdjax.ensembles.rand import draws, rand
from wdjax.ensembles.smoothed import smoothed
from wdjax.ensembles.star import wda_star

__all__ = [
    "Account",
    "Leg",
    "Mixed",
    "a3",
    "a3_wda",
    "autoattack",
    "bisect",
    "cascade",
    "draws",
    "fast",
    "lowered",
    "mixed",
    "rand",
    "smoothed",
    "wda_star",
]
