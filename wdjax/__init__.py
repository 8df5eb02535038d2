"""How robust is a classifier, from below and from above: attacks and certificates in JAX."""

from wdjax import losses, norms
from wdjax.core import Attack, Info, Model, Progress, Result, Stage, run

__version__ = "0.1.0"

__all__ = [
    "Attack",
    "Info",
    "Model",
    "Progress",
    "Result",
    "Stage",
    "losses",
    "norms",
    "run",
]
