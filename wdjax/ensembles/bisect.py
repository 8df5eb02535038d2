"""A minimum-norm attack made of a fixed-budget attack, by bisection of its radius."""

from collections.abc import Callable
from os import PathLike
from typing import Any

import jax.numpy as jnp
import numpy as np

from wdjax import norms
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Attack, Found, PyTree
from wdjax.engine import driver
from wdjax.engine.diagnosis import diagnosed
from wdjax.ensembles.question import question


@diagnosed
def bisect(
    attack: Attack,
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    eps: Any,
    key: Array | None = None,
    rounds: int = 10,
    checkpoint: str | PathLike[str] | None = None,
    **options: Any,
) -> Found:
    r"""The nearest flips that a fixed-budget attack finds, by a search over its radius.

    Every sample has its own bracket: the upper end is the distance of its nearest flip, mostly less
    than the radius of that search; the lower end is the largest radius without a flip. The next
    radius is the middle, or twice the last one until there is a flip. Each search begins at the
    nearest flip, projected on the smaller ball, or at the last point if there is none.

    Args:
      attack: an attack with a radius for each sample, such as :class:`~wdjax.attacks.PGD`.
      model: as for :func:`wdjax.search`.
      x: ``[n, *shape]``
      y: ``[n]``
      eps: the first radius, a number or ``[n]``, above 0.
      key: a typed ``jax.random.key``, if the attack is random.
      rounds: the number of searches.
      checkpoint: a folder; a call that was interrupted resumes from it, bit for bit.
      **options: ``criterion``, ``index``, ``batch_size``, ``mesh``, ``callback`` of
        :func:`wdjax.search`.

    Returns:
      A :class:`~wdjax.core.Found`: ``cost`` is the distance, where ``success`` is True.

    Raises:
      ValueError: an attack without a radius, ``eps`` of 0, fewer than one round, a call inside a
        trace, or what :func:`wdjax.search` refuses.

    Cost: that of the attack, ``rounds`` times.

    Source: AttackBench [cina2025] bisects fixed-budget attacks, without warm starts.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = bisect(wdjax.attacks.PGD(steps=5), model, x, y, eps=0.15)
    >>> [round(float(d), 2) for d in found.cost]
    [0.1, 0.4]
    """
    arguments.check("key", attack=attack, model=model, x=x, y=y, eps=eps, key=key)
    if attack.budget != "sample":
        raise ValueError(
            f"bisect takes attacks with a radius for each sample; {type(attack).__name__} has none."
        )
    ask = question("bisect", model, x, y, key, checkpoint, options, random=attack.random)
    rounds = validate.check_count("rounds", rounds)
    n = len(ask.y)
    radius = np.broadcast_to(np.asarray(validate.check_radii(eps, n), np.float32), n)
    if not np.all(radius > 0):
        raise ValueError(f"eps must be above 0 to begin a bisection, got {eps!r}.")
    found = ask.search(0, attack, eps=radius)
    start, low, high = found.x_adv, np.zeros(n, np.float32), np.full(n, np.inf, np.float32)
    last = found
    for number in range(1, rounds):
        flipped = np.asarray(last.success)
        high = np.where(flipped, np.minimum(high, np.asarray(last.cost)), high)
        low = np.where(flipped, low, np.maximum(low, radius))
        middle = (low + np.where(np.isfinite(high), high, 0.0)) / 2
        radius = np.where(np.isfinite(high), middle, 2 * radius).astype(np.float32)
        last = ask.search(number, attack, eps=radius, start=start)
        found = driver.best_of(found, last)
        nearest = norms.spread(found.success, start)
        start = jnp.where(nearest, found.x_adv, last.x_adv)
    return found
