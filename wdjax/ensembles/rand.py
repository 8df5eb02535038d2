"""Randomised models: expectation over transformation, judged by draws that no attack has seen.

A random model has typed ``jax.random.key`` s among its pytree's leaves. Several draws at once are a
bank of models, with outputs ``[n, M, K]``.
"""

import dataclasses
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from wdjax import losses
from wdjax.attacks import APGD, Points
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Found, Model, PyTree
from wdjax.engine import driver
from wdjax.engine.diagnosis import diagnosed
from wdjax.ensembles.cascade import cascade


def draws(model: Callable[[Array], PyTree], key: Array, count: int) -> Model:
    """A random model under several keys: a bank ``[n, count, K]``.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]`` with typed keys among its leaves; all
        samples may share the noise or have their own, but it must not depend on other samples.
      key: a typed ``jax.random.key``; all keys of the model are replaced by ones derived from it.
      count: the number of draws.

    Raises:
      ValueError: a model without keys, fewer than one draw.

    Cost: ``count`` passes of the model, in one program.

    Source: Athalye et al. [athalye2018].

    >>> def noisy(params, x):
    ...     return x + jax.random.normal(params["key"], x.shape[1:])
    >>> bank = draws(Model(noisy, {"key": jax.random.key(0)}), jax.random.key(1), 5)
    >>> bank(jnp.zeros((2, 3))).shape
    (2, 5, 3)
    """
    arguments.check(model=model, key=key)
    count = validate.check_count("count", count)
    leaves, structure = jax.tree.flatten(model)
    indices = [i for i, leaf in enumerate(leaves) if _is_key(leaf)]
    if not indices:
        raise ValueError(
            "the model has no key among its leaves, so nothing in it is random: pass its key as a "
            "parameter, or attack it as it is."
        )
    for number, i in enumerate(indices):
        leaves[i] = jax.random.split(jax.random.fold_in(key, number), (count, *leaves[i].shape))
    return Model(_bank, jax.tree.unflatten(structure, leaves))


def _is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _bank(model: Callable[[Array], PyTree], x: Array) -> PyTree:
    """The outputs ``[n, M, ...]`` of a model whose keys ``[M]`` are M independent draws."""
    leaves, structure = jax.tree.flatten(model)
    indices = [i for i, leaf in enumerate(leaves) if _is_key(leaf)]

    def one(keys: list[Array]) -> PyTree:
        changed = list(leaves)
        for i, key in zip(indices, keys):
            changed[i] = key
        return jax.tree.unflatten(structure, changed)(x)

    return jax.vmap(one, out_axes=1)([leaves[i] for i in indices])


@dataclasses.dataclass(frozen=True)
class Expected:
    """The mean of a loss over the draws of a bank; its gradient is that of EOT.

    Args:
      loss: ``([n, K], [n]) -> [n]``.

    Source: Athalye et al. [athalye2018].

    >>> Expected(losses.margin)(jnp.array([[[0.0, 1.0], [3.0, 0.0]]]), jnp.array([0])).tolist()
    [-1.0]
    """

    loss: Callable[[Array, Array], Array]

    def __call__(self, out: Array, y: Array) -> Array:
        return jnp.mean(jax.vmap(self.loss, (1, None))(out, y), axis=0)


def majority(out: Array, y: Array) -> Array:
    """The criterion that more than half of the draws misclassify: their margins' lower median.

    >>> out = jnp.array([[[0.0, 1.0], [0.0, 2.0], [3.0, 0.0]]])
    >>> majority(out, jnp.array([0])).tolist()
    [1.0]
    """
    margins = jnp.sort(jax.vmap(losses.decision_margin, (1, None))(out, y), axis=0)
    return margins[(len(margins) - 1) // 2]


@diagnosed
def rand(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    eps: Any,
    key: Array,
    ball: Lp = Lp(),
    count: int = 20,
    judges: int = 101,
    restarts: int = 1,
    checkpoint: str | PathLike[str] | None = None,
    **options: Any,
) -> Found:
    """AutoAttack ``rand``: APGD on expected cross-entropy and DLR against a random model.

    The attacks see the model under ``count`` keys. For each sample the best of their points is
    chosen under ``judges`` other keys, and then measured under ``judges`` further keys that had no
    part in the choice, so that more draws, restarts or attacks cannot inflate the success rate.

    Args:
      model: see :func:`draws`.
      x: ``[n, *shape]``
      y: ``[n]``
      eps: the radius, a number or ``[n]``.
      key: a typed ``jax.random.key``; all draws come from it.
      ball: norm and box.
      count: draws over which a gradient is averaged.
      judges: draws that measure a point; an odd number has no ties.
      restarts: of every attack.
      checkpoint: a folder; a call that was interrupted resumes from it, with equal results.
      **options: of :func:`wdjax.search`, but no ``criterion``: it is the majority of draws.

    Returns:
      A :class:`~wdjax.core.Found`, in which a sample is correct, or broken, if most judges say so.
      A pass is one of the bank: ``count`` or ``judges`` passes of the model.

    Raises:
      ValueError: a model without keys, a ``criterion``, and what the search refuses.

    Cost: ``count`` times that of the two attacks, and six times ``judges`` forward passes a sample.

    Differs: the authors draw anew at every gradient and judge a point by one evaluation, so that
      one lucky draw of many counts; here the draws are fixed during a search.

    Source: Croce and Hein [croce2020], AutoAttack ``rand``.

    >>> def noisy(params, x):
    ...     return x @ params["w"] + 0.1 * jax.random.normal(params["key"], (2,))
    >>> w = jnp.array([[1.0, -1.0], [-1.0, 1.0]])
    >>> model = Model(noisy, {"w": w, "key": jax.random.key(0)})
    >>> x, y = jnp.array([[0.6, 0.4], [0.95, 0.05]]), jnp.array([0, 0])
    >>> rand(model, x, y, eps=0.2, key=jax.random.key(1)).success.tolist()
    [True, False]
    """
    arguments.check(model=model, x=x, y=y, eps=eps, key=key, ball=ball)
    validate.refuse_criterion("rand", options, "a sample is broken if most draws say so")
    # Draws that misclassify a sample say little of the final ones, which may not.
    unskipped = options | {"skip_misclassified": False}
    seen, ranking, final, search_key = jax.random.split(key, 4)
    path = None if checkpoint is None else Path(checkpoint)
    members = {
        "apgd-ce": APGD(ball, loss=Expected(losses.cross_entropy), restarts=restarts, stop=False),
        "apgd-dlr": APGD(ball, loss=Expected(losses.dlr_or_margin), restarts=restarts, stop=False),
    }
    bank = draws(model, seen, count)
    found = [
        cascade(
            {name: attack}, bank, x, y, eps=eps, key=jax.random.fold_in(search_key, number),
            criterion=majority, checkpoint=None if path is None else path / name,
            diagnose=False, **unskipped,
        )
        for number, (name, attack) in enumerate(members.items())
    ]  # fmt: skip

    def judged(points: Found, key: Array, how: dict[str, Any]) -> Found:
        return driver.search(
            Points(ball), draws(model, key, judges), x, y, eps=eps, start=points.x_adv,
            criterion=majority, diagnose=False, **how,
        )  # fmt: skip

    ranked = [judged(points, ranking, unskipped) for points in found]
    last = judged(driver.best_of(*ranked), final, options)
    return _with_costs(last, [*found, *ranked, last])


def _with_costs(last: Found, every: list[Found]) -> Found:
    """The last search, with the faults and the passes of all searches of the same samples."""
    return dataclasses.replace(
        last,
        fault=jnp.stack([one.fault for one in every]).any(axis=0),
        done=jnp.zeros_like(last.done),
        zeros=jnp.stack([one.zeros for one in every]).sum(axis=0),
        gradients=jnp.stack([one.gradients for one in every]).sum(axis=0),
        forwards=jnp.stack([one.forwards for one in every]).sum(axis=0),
    )
