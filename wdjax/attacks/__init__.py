"""Attacks: searches for adversarial points, one attack a file.

An attack is a frozen dataclass that holds only its settings. ``init`` makes the state of a batch
from its samples, ``stages`` has each a step and the number of times it is taken, and ``point``
reads the points found off the state. :mod:`wdjax.engine` takes the steps and measures the points.
Steps and projections are those of the ball: ``ball.ascend`` and ``ball.project`` of
:mod:`wdjax.balls`, whose geometry is in :mod:`wdjax.norms`.

In a ball: `pgd` (and FGSM), `apgd` (with `phases`), `margin_pgd`, `diversified`, `square`, `wda`;
for one budget of the whole data set `wpgd`. Minimum-norm: `fab`, `fmn`, `deepfool`, `ddn`, `alma`,
`carlini_wagner`, `pdpgd`, `trust_region`, `walk`, `wda_plus_plus`, `slp` (shortens known flips),
`sigma_zero` (counts changed coordinates). `points` only measures given points. Helpers:
`gradient_attack` (the base class), `ascent` (cleaned gradients, the best of several steps, slack
for rounding), `nearest` (the nearest flip), `linearised` and `hyperplane` (class boundaries),
`rivals` (target classes).

Open `pgd` first. To add an attack: a file here, most easily a subclass of ``GradientAttack``; its
name in ``__all__`` here; a row in ``wdjax/cli/attack_table.py`` for the command line; a row in the
table of ``tests/test_contract.py``, which runs :func:`wdjax.testing.check_attack` on it.
"""

from wdjax.attacks.alma import ALMA
from wdjax.attacks.apgd import APGD
from wdjax.attacks.carlini_wagner import CarliniWagner
from wdjax.attacks.ddn import DDN
from wdjax.attacks.deepfool import DeepFool
from wdjax.attacks.diversified import Diversified
from wdjax.attacks.fab import FAB
from wdjax.attacks.fmn import FMN
from wdjax.attacks.gradient_attack import GradientAttack
from wdjax.attacks.margin_pgd import MarginPGD
from wdjax.attacks.pdpgd import PDPGD
from wdjax.attacks.pgd import PGD, fgsm
from wdjax.attacks.points import Points
from wdjax.attacks.sigma_zero import SigmaZero
from wdjax.attacks.slp import SLP
from wdjax.attacks.square import Square
from wdjax.attacks.trust_region import TrustRegion
from wdjax.attacks.walk import Walk
from wdjax.attacks.wda import WDA
from wdjax.attacks.wda_plus_plus import WDAPlusPlus
from wdjax.attacks.wpgd import WPGD, wfgsm

__all__ = [
    "ALMA",
    "APGD",
    "DDN",
    "FAB",
    "FMN",
    "PDPGD",
    "PGD",
    "SLP",
    "WDA",
    "WPGD",
    "CarliniWagner",
    "DeepFool",
    "Diversified",
    "GradientAttack",
    "MarginPGD",
    "Points",
    "SigmaZero",
    "Square",
    "TrustRegion",
    "WDAPlusPlus",
    "Walk",
    "fgsm",
    "wfgsm",
]
