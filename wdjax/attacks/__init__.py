"""Attacks: every factory returns a :class:`wdjax.Attack` for :func:`wdjax.run`."""

from wdjax.attacks.distributional import distributional
from wdjax.attacks.pgd import fgsm, pgd
from wdjax.attacks.wda import wda
from wdjax.attacks.wda_plus_plus import wda_plus_plus

__all__ = ["distributional", "fgsm", "pgd", "wda", "wda_plus_plus"]
