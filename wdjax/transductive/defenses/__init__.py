"""Defences that learn at test time, one in each file.

A defence is a frozen dataclass with the protocol of :mod:`wdjax.transductive.defense`. ``prepare``
makes its memory from training data, ``begin`` its state before the first round. In a round
``adapt`` takes inputs and a private key and gives the parameters that ``predict`` classifies them
with, and ``between`` makes the state of the next round.

`rmc` trains on an input's neighbours, `dent` adapts scales and shifts for each sample, `dann`
trains a new model for each set of inputs, `tadv` by adversarial training; `purify` moves the
inputs, `urejectron` rejects some; `fixed` is no defence, to compare with.

Open `fixed` first, then `rmc`. :mod:`wdjax.transductive` says how to add one.
"""

from wdjax.transductive.defenses.dann import DANN
from wdjax.transductive.defenses.dent import DENT
from wdjax.transductive.defenses.fixed import Fixed
from wdjax.transductive.defenses.purify import Purify
from wdjax.transductive.defenses.rmc import RMC
from wdjax.transductive.defenses.tadv import TADV
from wdjax.transductive.defenses.urejectron import URejectron

__all__ = ["DANN", "DENT", "RMC", "TADV", "Fixed", "Purify", "URejectron"]
