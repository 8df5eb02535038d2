"""The number and order of target classes; the order is MALT's."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax import losses
from wdjax.attacks import ascent
from wdjax.attacks.nearest import plane_distance
from wdjax.core import Array, Info, Victim

_TOP = {10: 5, 100: 10}
_MOST = 20


def top(classes: int) -> int:
    """The paper's ``topK`` by the number of classes: 5 up to ten of them (CIFAR-10), 10 up to a
    hundred (CIFAR-100), and 20 beyond (ImageNet).

    >>> [top(classes) for classes in (3, 10, 11, 100, 1000)]
    [2, 5, 10, 10, 20]
    """
    usual = next((count for most, count in _TOP.items() if classes <= most), _MOST)
    return min(usual, classes - 1)


class Ranking(NamedTuple):
    """Classes other than the label, nearest first."""

    classes: Array
    """``[n, m]``"""
    distance: Array
    """``[n, m]``: distances of their boundaries if the model is linear."""


def rank(
    victim: Victim, x: Array, y: Array, norm: float, among: int, count: int
) -> tuple[Ranking, Info]:
    r"""Ranks classes by the distance of their boundaries in the linearised model.

    The distance is ``(z_y - z_j) / ||grad (z_y - z_j)||_s`` (MALT, mesoscopic almost-linearity):
    the class of largest logit is often not the nearest.

    Args:
      victim: its model gives logits ``[n, K]``.
      x: ``[n, *shape]``
      y: ``[n]``
      norm: r, in which distances are measured.
      among: the number of classes compared, those of largest logit.
      count: how many of them are returned.

    Returns:
      The ``min(count, among, K - 1)`` nearest, and the step's Info: one forward and ``among``
      backward passes.

    Source: Melamed et al. [melamed2024].

    >>> from wdjax.losses import decision_margin
    >>> model = lambda x: x @ jnp.array([[1.0, 0.0, -9.0], [0.0, 0.5, 9.0]])
    >>> x, y = jnp.array([[0.9, 0.1]]), jnp.array([0])
    >>> ranking, _ = rank(Victim(model, decision_margin), x, y, 2, among=2, count=2)
    >>> ranking.classes.tolist(), model(x).argmax().item()
    ([[2, 1]], 0)
    """
    logits, pullback = jax.vjp(victim.model, x)
    classes = ascent.top_rivals(logits, y, among)
    distances, zeros, fault = [], jnp.zeros(len(y), jnp.int32), jnp.zeros(len(y), bool)
    for rival in classes.T:
        towards = jax.nn.one_hot(rival, logits.shape[-1]) - jax.nn.one_hot(y, logits.shape[-1])
        seen = ascent.look(pullback(towards.astype(logits.dtype))[0], logits)
        gap = losses.targeted_margin(logits, y, rival).astype(x.dtype)
        # A class without gradient comes last.
        far = jnp.where(seen.zero, jnp.inf, plane_distance(gap, seen.gradient, norm))
        distances.append(far)
        zeros, fault = zeros + seen.zero.astype(jnp.int32), fault | seen.fault
    distance = jnp.stack(distances, axis=1)
    order = jnp.argsort(distance, axis=1, stable=True)[:, :count]
    one = jnp.ones(len(y), jnp.int32)
    value = victim.criterion(logits, y)
    info = Info(value, len(classes.T) * one, one, zeros, fault | ~jnp.isfinite(value))
    taken = (jnp.take_along_axis(leaf, order, axis=1) for leaf in (classes, distance))
    return Ranking(*taken), info
