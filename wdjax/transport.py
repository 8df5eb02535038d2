r"""Discrete adversarial distributions (equation 11): budget, coupling cost and exact W_p."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import core


def allocate(distance, eps, order):
    r"""Spends a transport budget where a flip is cheapest: the allocation of WDA++.

    Solves ``max sum_i w_i`` over ``w`` in ``[0, 1]^n`` subject to ``mean_i w_i d_i^p <= eps^p``, a
    fractional knapsack, by its greedy optimum. The weight is ``1 / kappa_i``.

    Args:
      distance: ``[n]`` costs of flipping each sample, in the units of ``x``: 0 where it is
        misclassified already, inf where no flip is known.
      eps: the budget, at least 0; ``[m]`` for many budgets at once.
      order: p, a number of at least 1 or inf.

    Returns:
      ``[n]`` (``[m, n]``) weights. Distance 0 gets 1, also when ``eps`` is 0; inf gets 0. At most
      one sample gets a fraction, and of equal distances the first is served first. Order inf gives
      1 where ``d_i <= eps``.

    Raises:
      ValueError: ``distance`` is not a vector of numbers that are at least 0, ``eps`` is negative
        or not finite, or ``order`` is below 1.

    Cost: a sort, ``O(n log n)`` a budget. The spending exceeds ``eps^p`` by float rounding at most
      (below 1e-6 of it in float32), because distances are measured in units of ``eps``.

    Differs: Algorithm 2 as written subtracts ``0 * inf`` from the budget at the first unflipped
      sample and divides by 0 at a misclassified one; here both follow the stated conventions.

    Source: Le et al., Algorithm 2 and Appendix E.

    >>> allocate(jnp.array([0.4, 0.0, jnp.inf, 0.1]), 0.05, 1).tolist()
    [0.25, 1.0, 0.0, 1.0]
    """
    _check_order(order)
    if not core.traced(distance) and not np.all(np.asarray(distance) >= 0):
        raise ValueError("distance must be at least 0 (inf where no flip is known), without NaN.")
    if not core.traced(eps) and not np.all(np.isfinite(eps) & (np.asarray(eps) >= 0)):
        raise ValueError(f"eps must be finite and at least 0, got {eps}.")
    distance, eps = jnp.asarray(distance, float), jnp.asarray(eps, float)
    if distance.ndim != 1 or eps.ndim > 1:
        raise ValueError(
            f"distance must be [n] and eps a number or [m], got shapes {list(distance.shape)} and "
            f"{list(eps.shape)}; use vmap for more."
        )
    one = functools.partial(_allocate, order=order)
    return one(distance, eps) if eps.ndim == 0 else jax.vmap(one, (None, 0))(distance, eps)


def _allocate(distance, eps, order):
    if order == math.inf:
        return ((distance <= eps) & jnp.isfinite(distance)).astype(distance.dtype)
    budgets = distance / jnp.where(eps > 0, eps, 1.0)
    price = jnp.where((distance > 0) & (eps == 0), jnp.inf, budgets**order)
    price = jnp.where(jnp.isfinite(price), price, jnp.inf)
    cheapest = jnp.argsort(price, stable=True)
    price = price[cheapest]
    affordable = jnp.isfinite(price)
    paid = jnp.cumsum(jnp.where(affordable, price, 0.0))
    left = len(distance) - jnp.concatenate([jnp.zeros(1, paid.dtype), paid[:-1]])
    share = left / jnp.where(affordable & (price > 0), price, 1.0)
    weight = jnp.where(price > 0, jnp.clip(share, 0.0, 1.0), 1.0)
    return jnp.zeros_like(distance).at[cheapest].set(jnp.where(affordable, weight, 0.0))


def _check_order(order):
    if not (isinstance(order, (int, float)) and order >= 1):
        raise ValueError(f"order must be a number of at least 1, or inf, got {order!r}.")
    return order
