"""Attacks: searches for adversarial points, one attack a file.

An attack is a frozen dataclass that holds only its settings. It has ``init`` (samples to the state
of a batch), ``stages`` (each a step and the number of times that it is taken) and ``point`` (state
to the points found). :mod:`wdjax.engine` takes the steps and measures the points.

Helpers, which are no attacks: `gradient_attack` is the base class of gradient ascents in a ball;
`ascent` has cleaned gradients, the likeliest target classes (``top_rivals``), the best of several
steps and the slack (how far rounding may move the criterion); `nearest` keeps the nearest flip of
minimum-norm attacks; `linearised` finds linearised class boundaries and `hyperplane` projects on
them; `rivals` says how many target classes WDA tries, and ranks them by distance for `walk` and
`trust_region`; `phases` plans the steps of `apgd`: radii, and the steps at which `apgd` decides
whether to halve its step size.

Attacks in a ball: `pgd` (and FGSM), `apgd`, `margin_pgd`, `diversified`, `square`, `wda`. One
budget for the whole data set: `wpgd`. Minimum-norm attacks: `fab`, `fmn`, `deepfool`, `ddn`,
`alma`, `carlini_wagner`, `pdpgd`, `trust_region`, `walk` and `wda_plus_plus`; `sigma_zero` counts
changed coordinates. `points` only measures given points.

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
