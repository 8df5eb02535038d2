"""Attacks: frozen pytree dataclasses for :func:`wdjax.search` and :func:`wdjax.run`.

An attack consists of ``init``, which makes the state of a batch, ``stages``, each of which has a
step, and ``point``, which returns the points found; :mod:`wdjax.engine` takes the steps and
measures the points. First-order attacks share `ascent` (gradients cleaned of NaN, the best of
several candidate steps, the margin that rounding requires) and `gradient_attack`; minimum-norm
attacks share `nearest`,
`hyperplane` and `linearised`; targets come from `rivals`. Every other file is one attack. Open
`pgd` first, then `gradient_attack` for one of your own.
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
    "Square",
    "TrustRegion",
    "WDAPlusPlus",
    "Walk",
    "fgsm",
    "wfgsm",
]
