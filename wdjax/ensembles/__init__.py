"""Several searches of the same samples: survivors only, starts handed on."""

from wdjax.ensembles.bisect import bisect
from wdjax.ensembles.fast import Cascade, Leg, fast
from wdjax.ensembles.star import wda_star

__all__ = [
    "Cascade",
    "Leg",
    "bisect",
    "fast",
    "wda_star",
]
