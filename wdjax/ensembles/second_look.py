"""The second look and the warning of a single search, at the end of an ensemble."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from wdjax.attacks import MarginPGD
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import AnyArray, Array, Attack, Found, PyTree
from wdjax.engine import diagnosis, driver
from wdjax.precision import full_precision

_LOOK = "criterion", "mask", "index", "batch_size", "mesh"
"""Options of the searches that hold for the second look."""


def with_second_look(ensemble: Callable[..., Found]) -> Callable[..., Found]:
    """Gives an ensemble the option ``diagnose``: at its end, the second look of a margin ascent.

    The ensemble must call its own searches with ``diagnose=False``. It runs in full precision.
    """

    @functools.wraps(ensemble)
    def told(
        model: Callable[[Array], PyTree],
        x: AnyArray,
        y: AnyArray,
        *,
        eps: Any,
        key: Array,
        ball: Lp = Lp(),
        diagnose: bool = True,
        **options: Any,
    ) -> Found:
        found = ensemble(model, x, y, eps=eps, key=key, ball=ball, **options)
        if not diagnose or validate.traced(found):
            return found
        task, only = (model, x, y), options.get("only")
        look = MarginPGD(ball)
        return looked_again(ensemble.__name__, found, look, task, eps, key, only, options)

    return full_precision(told)


def looked_again(
    name: str,
    found: Found,
    attack: Attack,
    task: tuple[Callable[[Array], PyTree], AnyArray, AnyArray],
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
