"""Attacks in a row, each on the survivors of those before it."""

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Attack, Found, PyTree
from wdjax.engine import driver
from wdjax.engine.diagnosis import diagnosed


@diagnosed
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
    **options: Any,
) -> Found:
    """Attacks what every member has left standing with the next one.

    Samples that are misclassified already are not attacked; those that have fallen leave. Member
    number i gets the key ``fold_in(key, i)``, so that equal members are restarts.

    Args:
      members: name -> attack, in order; each of a budget a sample.
      model: see :func:`wdjax.search`.
      x: ``[n, *shape]``
      y: ``[n]``
      eps: the radius, as there.
      key: a typed ``jax.random.key``.
      only: ``[n]`` booleans, the samples to attack.
      checkpoint: a folder, in which every member has one of its own. Interrupted at any moment and
        asked again, the cascade goes on from there to the same numbers, to the bit.
      report: called with a name and what has been found so far, after every member; a true value
        ends the cascade.
      **options: of :func:`wdjax.search`; ``callback`` sees the rounds of every member.

    Returns:
      A :class:`~wdjax.core.Found`: the best of every sample. Passes add up.

    Raises:
      ValueError: no members, one whose budget is not a sample's, and what the search refuses.

    Cost: that of the members on their survivors, and two forward passes a sample and member.

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
                f"members must be bound to a radius a sample, but the budget of {name} is "
                f"{attack.budget!r}; use FAB(bounded=True), or spend what it finds on its own."
            )
    found, left = None, only
    for number, (name, attack) in enumerate(members.items()):
        file = f"{number:02d}-{name}.safetensors"
        own = driver.search(
            attack, model, x, y, eps=eps, key=jax.random.fold_in(key, number), only=left,
            checkpoint=None if checkpoint is None else Path(checkpoint) / file, diagnose=False,
            **options,
        )  # fmt: skip
        found = own if found is None else driver.best(found, own)
        left = survivors(found, only)
        if report is not None and report(name, found):
            break
        if not validate.traced(left) and not left.any():
            break
    assert found is not None
    return found


def survivors(found: Found, only: Any = None) -> Any:
    """``[n]``: who is classified correctly still; on the host, but inside a trace."""
    left = found.correct & ~found.success
    if only is not None:
        left = left & only
    return left if validate.traced(left) else np.asarray(left)
