"""Ensembles: several searches in sequence, each on the samples that survived the earlier ones.

Model, samples, key and checkpoint go in; every search gets a number, from which its random key and
its checkpoint's name follow; the best point of every sample is kept in one
:class:`~wdjax.core.Found`.

Helpers, which are no ensembles: `question` holds the arguments that all searches of an ensemble
share, and derives key and name (`cascade` and `a3` derive their own); `cascade` runs any list of
attacks, each on the survivors; `second_look` ends an ensemble as a single search ends; `walks` is
the schedule of `star`.

Lists of attacks: `autoattack` is AutoAttack, `a3` Adaptive Auto Attack and A3-WDA, `fast` a cheap
cascade with a limit of passes. Wrappers of one attack: `bisect` makes a minimum-norm attack of an
attack with a radius; `mixed` searches in bfloat16; `smoothed` attacks a smoothed classifier; `rand`
attacks a model with random keys, and judges points by draws that no attack has seen. `star` is the
strongest minimum-norm search, WDA*.

Open `cascade` first. To add an ensemble: a file here that collects its arguments by `question`; its
name in ``__all__``; for the command line rows in ``wdjax/cli/attack_table.py``.
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
