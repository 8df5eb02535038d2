"""The model linearised at a point: the distance to every rival's boundary, and the nearest."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax import losses, norms, program
from wdjax.attacks import ascent
from wdjax.core import Array, Info, Samples, Victim


class Plane(NamedTuple):
    """The linearised boundary ``gap + <normal, z - x> = 0`` towards one class: ``[n, ...]``."""

    gap: Array
    """``[n]``: ``z_rival - z_y`` at x, less the slack for rounding. Without it steps would converge
    to points that rounding could turn back."""
    normal: Array
    """``[n, *shape]``, the gradient of ``gap``."""
    distance: Array
    """``[n]``: ``|gap|`` over the dual norm of the gradient; inf where that is 0."""


def planes(
    victim: Victim, samples: Samples, x: Array, rivals: Array, norm: float
) -> tuple[Plane, Array, Info]:
    """Linearises the boundary towards every rival and keeps the nearest.

    Args:
      victim: its model gives logits ``[n, K]``.
      samples: with the labels ``y`` ``[n]``.
      x: ``[n, *shape]`` points.
      rivals: ``[n, m]`` classes.
      norm: r, in which distances are measured.

    Returns:
      The nearest :class:`Plane`, the distances to all, ``[n, m]``, and the step's Info.

    Cost: 1 forward and m backward passes; memory for two gradients.
    """
    logits, pullback = jax.vjp(victim.model, x)
    y = samples.y
    steepness = norms.dual(norm)

    def towards(best: Plane, rival: Array) -> tuple[Plane, tuple[Array, Array, Array]]:
        ends = jax.nn.one_hot(jnp.stack([rival, y]), logits.shape[-1], dtype=logits.dtype)
        seen = ascent.look(pullback(ends[0] - ends[1])[0], logits)
        margin = functools.partial(losses.targeted_margin, target=rival)
        gap = ascent.read(margin, samples, logits).beyond.astype(x.dtype)
        steep = norms.lp_norm(seen.gradient, steepness)
        distance = jnp.where(steep > 0, jnp.abs(gap) / jnp.where(steep > 0, steep, 1.0), jnp.inf)
        plane, nearer = Plane(gap, seen.gradient, distance), distance < best.distance
        kept = [jnp.where(norms.spread(nearer, new), new, old) for new, old in zip(plane, best)]
        return Plane(*kept), (distance, seen.zero, seen.fault)

    nowhere = jnp.full(len(y), jnp.inf, x.dtype)
    plane = Plane(-nowhere, jnp.zeros_like(x), nowhere)
    plane, (distances, zeros, faults) = program.scan(towards, plane, rivals.T)
    one, value = jnp.ones(len(y), jnp.int32), victim.criterion(logits, y)
    fault = faults.any(axis=0) | ~jnp.isfinite(value)
    info = Info(value, len(distances) * one, one, zeros.sum(axis=0, dtype=jnp.int32), fault)
    return plane, distances.T, info


def nearest_rivals(
    victim: Victim, samples: Samples, norm: float, count: int, candidates: int
) -> tuple[Array, Info]:
    r"""The classes whose linearised boundaries are nearest to the samples, nearest first.

    Args:
      victim: its model gives logits ``[n, K]``.
      samples: the points to linearise at.
      norm: r, in which distances are measured.
      count: the number of classes returned.
      candidates: the number of classes compared, those of largest logit; others are appended after
        them.

    Returns:
      ``[n, min(count, K - 1)]`` classes, and the step's Info.

    Cost: 1 forward and ``min(candidates, K - 1)`` backward passes.

    Source: arXiv 2407.02240 (MALT).
    """
    rivals = ascent.top_rivals(samples.out, samples.y, max(count, candidates))
    _, distance, info = planes(victim, samples, samples.x, rivals[:, :candidates], norm)
    order = jnp.argsort(distance, axis=1, stable=True)
    ranked = jnp.take_along_axis(rivals, order, axis=1)
    return jnp.concatenate([ranked, rivals[:, candidates:]], axis=1)[:, :count], info
