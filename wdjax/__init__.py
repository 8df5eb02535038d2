"""How robust is a classifier, from below and from above: attacks and certificates in JAX.

Rooms are imported when they are first asked for, so that ``import wdjax`` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wdjax import (
        attacks,
        certify,
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
        smoothing,
        testing,
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
    from wdjax.engine.driver import best_of, run, search
    from wdjax.models import convert
    from wdjax.report import audit
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
    "best_of",
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
    "smoothing",
    "spend",
    "testing",
    "training",
    "transductive",
    "transport",
]

_HOMES = {
    "Lp": "balls",
    "audit": "report",
    "best_of": "engine.driver",
    "convert": "models",
    "run": "engine.driver",
    "search": "engine.driver",
    "spend": "transport",
}
"""Where a public name lives that is no room; types live in ``core``."""


_MODULES = {"audit", "convert"}


def _found(name: str) -> Any:
    """A public name, class or room that has not been imported yet; the module's ``__getattr__``.

    Imports it, keeps it as an attribute, and raises an AttributeError for unknown names.
    """
    if name in __all__ and (name in _HOMES or name[0].isupper()):
        home = f"wdjax.{_HOMES.get(name, 'core')}"
        value = (
            import_module(f"{home}.{name}")
            if name in _MODULES
            else getattr(import_module(home), name)
        )
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
    return sorted(__all__)
