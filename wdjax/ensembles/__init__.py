"""Ensembles: several searches in sequence, each on the survivors of the earlier ones.

Each file is one ensemble. `question` holds what all its searches share (model, samples, key and
checkpoint) and gives each search random keys of its own; `cascade` runs a list of attacks, and
`autoattack`, `a3` and `fast` choose that list; `star` looks for the nearest
flips with the schedules of `walks`. Open `cascade` first.
"""

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
