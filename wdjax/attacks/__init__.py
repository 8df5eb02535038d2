"""Attacks: frozen pytree dataclasses for :func:`wdjax.search` and :func:`wdjax.run`."""

from wdjax.attacks.alma import ALMA
from wdjax.attacks.carlini_wagner import CarliniWagner
from wdjax.attacks.ddn import DDN
from wdjax.attacks.deepfool import DeepFool
from wdjax.attacks.fmn import FMN
from wdjax.attacks.margin_pgd import MarginPGD
from wdjax.attacks.pdpgd import PDPGD
from wdjax.attacks.pgd import PGD, fgsm
from wdjax.attacks.trust_region import TrustRegion
from wdjax.attacks.walk import Walk
from wdjax.attacks.wda import WDA
from wdjax.attacks.wda_plus_plus import WDAPlusPlus

__all__ = [
    "ALMA",
    "DDN",
    "FMN",
    "PDPGD",
    "PGD",
    "WDA",
    "CarliniWagner",
    "DeepFool",
    "MarginPGD",
    "TrustRegion",
    "WDAPlusPlus",
    "Walk",
    "fgsm",
]
