"""How robust is a classifier, from below and from above: attacks and certificates in JAX.

Rooms are imported when they are first asked for, so that ``import wdjax`` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        transductive,
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
    "transductive",
    "transport",
]

_HOMES = {
    "Lp": "balls",
    "best": "driver",
    "run": "driver",
    "search": "driver",
    "spend": "transport",
}
"""Where a function lives that is no room; types live in ``core``."""


def _found(name: str) -> Any:
    """What is not imported yet."""
    if name in __all__ and (name in _HOMES or name[0].isupper()):
        value = getattr(import_module(f"wdjax.{_HOMES.get(name, 'core')}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            return import_module(f"wdjax.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"wdjax.{name}":
                raise
    raise AttributeError(f"module 'wdjax' has no attribute {name!r}")


if not TYPE_CHECKING:  # Type checkers see the imports above, and what is missing.
    __getattr__ = _found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
