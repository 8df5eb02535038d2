"""Several searches of the same samples: survivors only, starts handed on."""

from wdjax.ensembles.star import wda_star

__all__ = ["wda_star"]
