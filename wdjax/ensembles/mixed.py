"""Mixed precision: a search in bfloat16 or TF32, whose flips are confirmed in full precision."""

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
from wdjax.ensembles.question import question
from wdjax.precision import full_precision


class Mixed(NamedTuple):
    """What was found, and which flips existed in bfloat16 only."""

    found: Found
    lost: Array
    """``[n]``: misclassified in the search's precision, but not in the model's own."""


@full_precision
def mixed(
    attack: Attack,
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    eps: Any = None,
    key: Array | None = None,
    precision: str = "bfloat16",
    diagnose: bool = True,
    checkpoint: str | PathLike[str] | None = None,
    **options: Any,
) -> Mixed:
    r"""Searches with the model in a lower precision, and measures in the model's own.

    Accelerators compute several times faster in bfloat16 or TF32, which are exact enough for
    gradients; but a nearest flip lies so close to the boundary that half of them are not flips in
    float32. So every point is measured again by ``model``. Where a flip does not survive, or
    bfloat16 gave values that are not finite, the sample is attacked again in the model's own
    precision, and so it is where a minimum-norm attack found no flip. Points and costs have the
    dtype of ``x`` throughout.

    Args:
      attack: from :mod:`wdjax.attacks`; its ball must not need proofs.
      model: as for :func:`wdjax.search`; for bfloat16 its floating-point leaves are cast.
      x: ``[n, *shape]``
      y: ``[n]``
      eps: as for :func:`wdjax.search`.
      key: as for :func:`wdjax.search`.
      precision: of the search: ``"bfloat16"``, or ``"tensorfloat32"``, in which GPUs round only
        what they multiply.
      diagnose: as for :func:`wdjax.search`; the second look is in the model's own precision.
      checkpoint: a folder; a call that was interrupted resumes from it, bit for bit.
      **options: ``criterion``, ``index``, ``batch_size``, ``mesh``, ``callback`` of
        :func:`wdjax.search`.

    Returns:
      A :class:`Mixed`; passes of both precisions add up.

    Raises:
      ValueError: a call inside a trace, a ball that needs proofs, a budget shared by samples, or
        what :func:`wdjax.search` refuses of either model, such as outputs not finite in bfloat16;
        another precision.

    Cost: a search in the lower precision, two forward passes, and a search of the samples whose
      flips were lost or, by a minimum-norm attack, not found. CPUs do not gain, since they have no
      such arithmetic.

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
    fast = ask._replace(model=lowered(model, precision)).search(0, attack, eps=eps)
    if fast.proof is not None:
        raise ValueError(
            f"mixed measures points again, and {type(attack.ball).__name__} wants proofs of their "
            "costs: use wdjax.search."
        )
    # A minimum-norm point's cost, measured again, may be rounded up beyond the first value.
    nearest = attack.budget == "none"
    reach = 1.01 * fast.cost if nearest else eps
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
        radius=fast.radius,
    )
    again = np.asarray(found.correct & (lost | fast.fault | (nearest & ~fast.success)))
    if again.any():
        found = driver.best_of(found, ask.search(2, attack, eps=eps, only=again))
    return Mixed(ask.looked_again("mixed", found, attack, eps) if diagnose else found, lost)


def lowered(model: Callable[[Array], PyTree], precision: str = "bfloat16") -> Model:
    """The model in a lower precision, with outputs in float32.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      precision: ``"bfloat16"``, of leaves and computation, or ``"tensorfloat32"``, of what matrix
        products and convolutions multiply; CPUs compute those in float32 all the same.

    Raises:
      ValueError: ``model`` is no callable pytree; another precision.

    Source: this library's own.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> lowered(model)(jnp.array([[0.3, 0.7]])).tolist()
    [[-0.3984375, 0.3984375]]
    """
    arguments.check(model=model)
    if precision not in ("bfloat16", "tensorfloat32"):
        raise ValueError(f"precision must be 'bfloat16' or 'tensorfloat32', got {precision!r}.")
    if precision == "tensorfloat32":
        return Model(_in_tensorfloat32, model)
    return Model(_in_bfloat16, jax.tree.map(lambda leaf: _cast(leaf, jnp.bfloat16), model))


def _in_tensorfloat32(model: Callable[[Array], PyTree], x: Array) -> PyTree:
    with jax.default_matmul_precision("tensorfloat32"):
        return model(x)


def _in_bfloat16(model: Callable[[Array], PyTree], x: Array) -> PyTree:
    """The model on inputs in bfloat16, with outputs in float32."""
    return jax.tree.map(lambda out: _cast(out, jnp.float32), model(_cast(x, jnp.bfloat16)))


def _cast(leaf: Any, dtype: Any) -> Any:
    """An array of floats in the given dtype; any other leaf as it is."""
    real = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(dtype) if real else leaf
