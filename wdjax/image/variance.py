"""The total variance of a plan: how much the moves of its mass differ."""

import jax.numpy as jnp

from wdjax.core import Array
from wdjax.image.ball import TransportPlan
from wdjax.image.stencil import Stencil


def total_variance(plan: TransportPlan) -> Array:
    r"""``[n]``: the variance of the mass's displacements, in squared pixels.

    ``sum_ij p_ij |j - i|^2 - |sum_ij p_ij (j - i)|^2`` for the plan's shares p of the mass: 0 for a
    translation of any length, and small for natural changes of images.

    Args:
      plan: the proof of an image attack, ``plan.mass`` ``[n, H, W, C, k, k]``.

    Returns:
      ``[n]``, 0 for an image without mass.

    Source: Hu et al. [hu2020], A.5.

    >>> stay, right = jnp.zeros((2, 1, 2, 1, 3, 3)).at[:, 0, 0, 0, 1, 1:].set(0.5)
    >>> both = TransportPlan(jnp.stack([stay, right.at[0, 0, 0, 1, 1].set(0.0)]))
    >>> total_variance(both).tolist()
    [0.25, 0.0]
    """
    window = plan.mass.shape[-1]
    stencil = Stencil(plan.mass.shape[1], plan.mass.shape[2], window)
    sent = jnp.sum(plan.mass, axis=(1, 2, 3)).reshape(-1, window**2)
    whole = jnp.sum(sent, axis=1, keepdims=True)
    moves, far = jnp.asarray(stencil.moves(), sent.dtype), jnp.asarray(stencil.costs(2.0))
    share = sent / jnp.where(whole > 0, whole, 1.0)
    mean = jnp.matmul(share, moves, precision="highest")
    return jnp.matmul(share, far.astype(sent.dtype), precision="highest") - jnp.sum(mean**2, axis=1)


def slope(stencil: Stencil, plan: Array) -> Array:
    """``[n, O]``: derivative of :func:`total_variance` in the share of the mass over each offset.

    Args:
      stencil: of the plan.
      plan: ``[n, C, O, L]``
    """
    sent = jnp.sum(plan, axis=(1, 3))
    whole = jnp.sum(sent, axis=1, keepdims=True)
    moves, far = jnp.asarray(stencil.moves(), plan.dtype), jnp.asarray(stencil.costs(2.0))
    share = sent / jnp.where(whole > 0, whole, 1.0)
    mean = jnp.matmul(share, moves, precision="highest")
    return far.astype(plan.dtype)[None] - 2 * jnp.matmul(mean, moves.T, precision="highest")
