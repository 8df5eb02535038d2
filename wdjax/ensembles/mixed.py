"""Mixed precision: a search in bfloat16, whose flips are confirmed in the model's own precision."""

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax.attacks.points import Points
from wdjax.checks import arguments
from wdjax.core import AnyArray, Array, Attack, Found, Model, PyTree
from wdjax.engine import driver
from wdjax.engine.diagnosis import diagnosed
from wdjax.ensembles.question import question


class Mixed(NamedTuple):
    """What was found, and which flips existed in bfloat16 only."""

    found: Found
    lost: Array
    """``[n]``: misclassified in bfloat16, but not in the model's own precision."""


@diagnosed
def mixed(
    attack: Attack,
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    eps: Any = None,
    key: Array | None = None,
    checkpoint: str | PathLike[str] | None = None,
    **options: Any,
) -> Mixed:
    r"""Searches with the model in bfloat16, and measures in the model's own precision.

    Accelerators compute several times faster in bfloat16, which is exact enough for gradients; but
    a nearest flip lies so close to the boundary that half of them are not flips in float32. So
    every point is measured again by ``model``. Where a flip does not survive, or bfloat16 gave
    values that are not finite, the sample is attacked again in the model's own precision. Points
    and costs have the dtype of ``x`` throughout.

    Args:
      attack: from :mod:`wdjax.attacks`; its ball must not need proofs.
      model: as for :func:`wdjax.search`; its floating-point leaves are cast to bfloat16.
      x: ``[n, *shape]``
      y: ``[n]``
      eps: as for :func:`wdjax.search`.
      key: as for :func:`wdjax.search`.
      checkpoint: a folder; a call that was interrupted resumes from it, bit for bit.
      **options: ``criterion``, ``index``, ``batch_size``, ``mesh``, ``callback`` of
        :func:`wdjax.search`.

    Returns:
      A :class:`Mixed`; passes of both precisions add up.

    Raises:
      ValueError: a call inside a trace, a ball that needs proofs, a budget shared by samples, or
        what :func:`wdjax.search` refuses of either model, such as outputs not finite in bfloat16.

    Cost: a search in bfloat16, two forward passes, and a search of the samples whose flips were
      lost. CPUs do not gain, since they have no bfloat16 arithmetic.

    Source: this library's own.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found, lost = mixed(wdjax.attacks.PGD(steps=5), model, x, y, eps=0.2)
    >>> found.success.tolist(), lost.tolist()
    ([True, False], [False, False])
    """
    arguments.check("key", "eps", attack=attack, model=model, x=x, y=y, eps=eps, key=key)
    if attack.budget == "data":
        raise ValueError(
            f"mixed attacks some samples once more, but {type(attack).__name__} has one budget for "
            "all of them: use wdjax.search."
        )
    ask = question("mixed", model, x, y, key, checkpoint, options, random=attack.random)
    fast = ask._replace(model=lowered(model)).search(0, attack, eps=eps)
    if fast.proof is not None:
        raise ValueError(
            f"mixed measures points again, and {type(attack.ball).__name__} wants proofs of their "
            "costs: use wdjax.search."
        )
    # A minimum-norm point's cost, measured again, may be rounded up beyond the first value.
    reach = 1.01 * fast.cost if attack.budget == "none" else eps
    sure = ask.search(1, Points(attack.ball), eps=reach, start=fast.x_adv)  # type: ignore[arg-type]
    lost = fast.success & ~sure.success
    fault = fast.fault | sure.fault
    found = replace(
        sure,
        done=(sure.done | (fast.done & ~lost)) & ~fault,
        fault=fault,
        zeros=fast.zeros,
        gradients=fast.gradients,
        forwards=fast.forwards + sure.forwards,
    )
    again = np.asarray(found.correct & (lost | fast.fault))
    if not again.any():
        return Mixed(found, lost)
    more = ask.search(2, attack, eps=eps, only=again)
    return Mixed(driver.best_of(found, more), lost)


def lowered(model: Callable[[Array], PyTree]) -> Model:
    """The model with leaves and computation in bfloat16, and outputs in float32.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.

    Raises:
      ValueError: ``model`` is no callable pytree.

    Source: this library's own.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> lowered(model)(jnp.array([[0.3, 0.7]])).tolist()
    [[-0.3984375, 0.3984375]]
    """
    arguments.check(model=model)
    return Model(_call, jax.tree.map(lambda leaf: _cast(leaf, jnp.bfloat16), model))


def _call(model: Callable[[Array], PyTree], x: Array) -> PyTree:
    """The model on inputs in bfloat16, with outputs in float32."""
    return jax.tree.map(lambda out: _cast(out, jnp.float32), model(_cast(x, jnp.bfloat16)))


def _cast(leaf: Any, dtype: Any) -> Any:
    """An array of floats in the given dtype; any other leaf as it is."""
    real = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(dtype) if real else leaf
