"""Defences that learn at test time, one in each file."""

from wdjax.transductive.defenses.dann import DANN
from wdjax.transductive.defenses.dent import DENT
from wdjax.transductive.defenses.fixed import Fixed
from wdjax.transductive.defenses.purify import Purify
from wdjax.transductive.defenses.rmc import RMC
from wdjax.transductive.defenses.tadv import TADV
from wdjax.transductive.defenses.urejectron import URejectron

__all__ = ["DANN", "DENT", "RMC", "TADV", "Fixed", "Purify", "URejectron"]
