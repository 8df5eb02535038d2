"""Ensembles: attacks one after the other, each on what the others have left standing."""

from wdjax.ensembles.a3 import a3, a3_wda
from wdjax.ensembles.autoattack import autoattack
from wdjax.ensembles.cascade import cascade
from wdjax.ensembles.rand import draws, rand

__all__ = ["a3", "a3_wda", "autoattack", "cascade", "draws", "rand"]
