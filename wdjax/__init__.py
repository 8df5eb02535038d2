"""How robust is a classifier, from below and from above: attacks and certificates in JAX."""

from wdjax import (
    attacks,
    audit,
    certify,
    convert,
    data,
    ensembles,
    image,
    lipschitz,
    losses,
    metrics,
    models,
    norms,
    nppr,
    parallel,
    training,
    transport,
)
from wdjax.balls import Lp
from wdjax.core import (
    Attack,
    Ball,
    Criterion,
    Found,
    Info,
    Model,
    Progress,
    Result,
    Samples,
    Stage,
    Victim,
)
from wdjax.driver import best, run, search
from wdjax.transport import spend

__version__ = "0.2.0"

__all__ = [
    "Attack",
    "Ball",
    "Criterion",
    "Found",
    "Info",
    "Lp",
    "Model",
    "Progress",
    "Result",
    "Samples",
    "Stage",
    "Victim",
    "attacks",
    "audit",
    "best",
    "certify",
    "convert",
    "data",
    "ensembles",
    "image",
    "lipschitz",
    "losses",
    "metrics",
    "models",
    "norms",
    "nppr",
    "parallel",
    "run",
    "search",
    "spend",
    "training",
    "transport",
]
