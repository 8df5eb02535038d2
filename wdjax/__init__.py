"""How robust is a classifier, from below and from above: attacks and certificates in JAX."""

from wdjax import attacks, certify, losses, metrics, models, norms, parallel, transport
from wdjax.core import Attack, Info, Model, Progress, Result, Stage
from wdjax.driver import run

__version__ = "0.1.0"

__all__ = [
    "Attack",
    "Info",
    "Model",
    "Progress",
    "Result",
    "Stage",
    "attacks",
    "certify",
    "losses",
    "metrics",
    "models",
    "norms",
    "parallel",
    "run",
    "transport",
]
