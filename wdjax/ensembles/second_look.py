"""The second look and the warning of a single search, at the end of an ensemble."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from wdjax.attacks import MarginPGD
from wdjax.checks import validate
from wdjax.core import Array, Attack, Found
from wdjax.engine import diagnosis, driver
from wdjax.precision import full_precision

_TASK = "model", "x", "y", "eps", "key", "ball"
"""Arguments that every ensemble with a second look must have."""
_LOOK = "criterion", "mask", "index", "batch_size", "mesh"
"""Options of the searches that hold for the second look."""


def with_second_look(ensemble: Callable[..., Found]) -> Callable[..., Found]:
    """Gives an ensemble the option ``diagnose``: at its end, the second look of a margin ascent.

    The ensemble must call its own searches with ``diagnose=False``. It runs in full precision.
    """

    signature = inspect.signature(ensemble)

    @functools.wraps(ensemble)
    def told(*given: Any, diagnose: bool = True, **options: Any) -> Found:
        found = ensemble(*given, **options)
        if not diagnose or validate.traced(found):
            return found
        asked = signature.bind(*given, **options)
        asked.apply_defaults()
        *task, eps, key, ball = (asked.arguments[name] for name in _TASK)
        name, only = ensemble.__name__, options.get("only")
        return looked_again(name, found, MarginPGD(ball), (*task,), eps, key, only, options)

    return full_precision(told)


def looked_again(
    name: str,
    found: Found,
    attack: Attack,
    task: tuple[Any, ...],
    eps: Any,
    key: Array,
    only: Any,
    options: Mapping[str, Any],
) -> Found:
    """What an ensemble found, with the second look and the warning of one search by ``attack``.

    ``task`` is the model, the samples and their labels. Samples that ``only`` ``[n]`` leaves out
    are not looked at, so with it no look is taken. ``options`` are those of the searches.
    """
    if only is not None:
        diagnosis.warn(name, found)
        return found
    how = {option: options[option] for option in _LOOK if option in options}
    return driver.looked_again(found, attack, *task, eps=eps, key=key, name=name, **how)
