"""Attacks in sequence, each on the survivors of the previous ones."""

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Attack, Found, PyTree
from wdjax.engine import driver
from wdjax.ensembles.second_look import looked_again
from wdjax.precision import full_precision


@full_precision
def cascade(
    members: Mapping[str, Attack],
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    eps: Any,
    key: Array,
    only: Any = None,
    checkpoint: str | PathLike[str] | None = None,
    report: Callable[[str, Found], Any] | None = None,
    diagnose: bool = True,
    **options: Any,
) -> Found:
    """Runs attacks in order, each on the survivors of the previous ones.

    Samples that are misclassified at the start are not attacked. Attack number i gets the key
    ``fold_in(key, i)``, so that equal attacks act as restarts.

    Args:
      members: name -> attack, in order; each with a radius for each sample.
      model: see :func:`wdjax.search`.
      x: ``[n, *shape]``
      y: ``[n]``
      eps: the radius, as for :func:`wdjax.search`.
      key: a typed ``jax.random.key``.
      only: ``[n]`` booleans, the samples to attack.
      checkpoint: a folder, in which every attack has a folder of its own. A call that was
        interrupted resumes from it, bit for bit.
      report: called with the attack's name and what has been found so far, after every attack; if
        it returns a true value the cascade ends.
      diagnose: as for :func:`wdjax.search`, once at the end; samples that ``only`` leaves out are
        not looked at, so with it no second look is taken.
      **options: of :func:`wdjax.search`; ``callback`` is called in the rounds of every attack.

    Returns:
      A :class:`~wdjax.core.Found`: the best point of every sample. Passes add up.

    Raises:
      ValueError: no attacks, one whose budget is not a radius a sample, and what the search
        refuses.

    Cost: that of the attacks on their survivors, plus two forward passes a sample and attack.

    Source: Croce and Hein [croce2020], for any attacks.

    >>> import jax.numpy as jnp
    >>> from wdjax import Model, attacks
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> members = {"fgsm": attacks.fgsm(), "square": attacks.Square(queries=9)}
    >>> found = cascade(members, model, x, y, eps=0.2, key=jax.random.key(0))
    >>> found.success.tolist(), found.gradients.tolist()
    ([True, False], [1, 1])
    """
    if not members:
        raise ValueError("members is empty: pass at least one attack.")
    arguments.check(model=model, x=x, y=y, eps=eps, key=key, attack=next(iter(members.values())))
    for name, attack in members.items():
        arguments.check(attack=attack)
        if attack.budget != "sample":
            raise ValueError(
                f"members need a radius for each sample, but the budget of {name} is "
                f"{attack.budget!r}; use FAB(bounded=True), or run and spend it separately."
            )
    found, left = None, only
    for number, (name, attack) in enumerate(members.items()):
        file = f"{number:02d}-{name}.safetensors"
        result = driver.search(
            attack, model, x, y, eps=eps, key=jax.random.fold_in(key, number), only=left,
            checkpoint=None if checkpoint is None else Path(checkpoint) / file, diagnose=False,
            **options,
        )  # fmt: skip
        found = result if found is None else driver.best_of(found, result)
        left = survivors(found, only)
        if report is not None and report(name, found):
            break
        if not validate.traced(left) and not left.any():
            break
    assert found is not None
    if not diagnose or validate.traced(found):
        return found
    return looked_again("cascade", found, attack, (model, x, y), eps, key, only, options)


def survivors(found: Found, only: Any = None) -> Any:
    """``[n]``: which samples are still classified correctly; a NumPy array outside traces."""
    left = found.correct & ~found.success
    if only is not None:
        left = left & only
    return left if validate.traced(left) else np.asarray(left)
