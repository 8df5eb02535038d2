"""Attacks: frozen pytree dataclasses for :func:`wdjax.search` and :func:`wdjax.run`."""

from wdjax.attacks.pgd import PGD, fgsm
from wdjax.attacks.wda import WDA
from wdjax.attacks.wda_plus_plus import WDAPlusPlus

__all__ = ["PGD", "WDA", "WDAPlusPlus", "fgsm"]
