r"""Gaussian mixtures in a latent space: soft samples for training, hard ones for evaluation.

The leading axis of a mixture's leaves is that of the inputs, or 1 if all inputs share the leaf.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import distinct
from wdjax.core import Array
from wdjax.xla_cpu import drawn


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mixture:
    r"""``sum_k pi_k N(mu_k, F_k F_k^T)`` for every input.

    Args:
      logits: ``[n or 1, K]``, whose softmax is the proportions ``pi``.
      mean: ``[n or 1, K, L]``
      factor: ``[n or 1, K, L, L]`` lower triangular (Cholesky) factors with a positive diagonal,
        or ``[n or 1, K, L]``, the standard deviations of a diagonal covariance.

    Source: Wang et al. [wang2025], equations 12 and 13.

    >>> one = Mixture(jnp.zeros((1, 2)), jnp.zeros((1, 2, 3)), jnp.ones((1, 2, 3)))
    >>> one.proportions.tolist()
    [[0.5, 0.5]]
    """

    logits: Array
    mean: Array
    factor: Array

    @property
    def proportions(self) -> Array:
        """``pi``, ``[n or 1, K]``."""
        return jax.nn.softmax(self.logits, axis=-1)

    @property
    def diagonal(self) -> bool:
        """Whether covariances are diagonal."""
        return self.factor.ndim == self.mean.ndim

    @property
    def inputs(self) -> int:
        """The number of inputs with a mixture of their own; 1 if it is shared."""
        return max(len(self.logits), len(self.mean), len(self.factor))


def soft(key: Array, mixture: Mixture, inputs: int, draws: int, tau: Array | float) -> Array:
    r"""Samples that are differentiable in all parameters: Gumbel-softmax.

    ``sum_k z_k (mu_k + F_k xi_k)`` with ``z = softmax((log pi + g) / tau)``, Gumbel noise g and
    normal ``xi_k``. As tau falls to 0 their distribution becomes the mixture; for other tau the
    covariance is smaller, since the sum of ``z_k^2`` is less than 1.

    Args:
      key: a typed ``jax.random.key``.
      mixture: of ``inputs`` inputs, or a shared one.
      inputs: n.
      draws: M, samples an input.
      tau: temperature above 0.

    Returns:
      ``[n, M, L]``.

    Cost: ``n M K L^2`` multiplications, ``n M K (L + 1)`` random numbers.

    Source: Wang et al. [wang2025], equations 48 to 50; Jang et al. [jang2017].

    >>> one = Mixture(jnp.array([[0.0, -30.0]]), jnp.ones((1, 2, 3)), jnp.full((1, 2, 3), 1e-4))
    >>> soft(jax.random.key(0), one, 2, 5, 0.1).round(2).min().tolist()
    1.0
    """
    pick, noise = jax.random.split(key)
    shape = (inputs, draws, mixture.logits.shape[-1])
    gumbel = drawn(jax.random.gumbel, pick, shape, mixture.mean.dtype)
    z = jax.nn.softmax((jax.nn.log_softmax(mixture.logits)[:, None] + gumbel) / tau, axis=-1)
    every = (*z.shape, mixture.mean.shape[-1])
    xi = drawn(jax.random.normal, noise, every, mixture.mean.dtype)
    return _combined(mixture, z, z[..., None] * xi)


def hard(key: Array, mixture: Mixture, inputs: int, draws: int) -> Array:
    r"""Samples of the mixture itself: a categorical choice, then a normal vector.

    Args:
      key, mixture, inputs, draws: as in :func:`soft`.

    Returns:
      ``[n, M, L]``.

    Cost: ``n M K L^2`` multiplications, ``n M (K + L)`` random numbers.

    Source: Wang et al. [wang2025], equations 12, 13 and 47.

    >>> one = Mixture(jnp.zeros((1, 2)), jnp.array([[[-9.0], [9.0]]]), jnp.ones((1, 2, 1)))
    >>> sorted(set(jnp.sign(hard(jax.random.key(0), one, 1, 40)).ravel().tolist()))
    [-1.0, 1.0]
    """
    pick, noise = jax.random.split(key)
    count = mixture.logits.shape[-1]
    chosen = jax.random.categorical(pick, mixture.logits[:, None], shape=(inputs, draws))
    z = jax.nn.one_hot(chosen, count, dtype=mixture.mean.dtype)
    shape = (inputs, draws, mixture.mean.shape[-1])
    xi = drawn(jax.random.normal, noise, shape, mixture.mean.dtype)
    return _combined(mixture, z, z[..., None] * xi[:, :, None])


def _combined(mixture: Mixture, z: Array, xi: Array) -> Array:
    """``[n, M, L]``: ``sum_k (z_k mu_k + F_k xi_k)`` for weights ``z`` ``[n, M, K]``.

    The vectors ``xi`` ``[n, M, K, L]`` are multiplied by ``z`` already.
    """
    return _weighted(mixture.mean, z) + _scattered(mixture, xi)


def _weighted(mean: Array, z: Array) -> Array:
    """``[n, M, L]``: ``sum_k z_k mu_k`` for weights ``[n, M, K]`` and means ``[n or 1, K, L]``."""
    return z @ mean[0] if len(mean) == 1 else jnp.einsum("nmk,nkl->nml", z, mean)


def _scattered(mixture: Mixture, xi: Array) -> Array:
    """``[n, M, L]``: ``sum_k F_k xi_k`` for vectors ``xi`` ``[n, M, K, L]``.

    Factors are ``[n or 1, K, L, L]``, or ``[n or 1, K, L]`` if diagonal.
    """
    factor = mixture.factor
    if mixture.diagonal:
        return jnp.einsum(
            "nmkl,nkl->nml", xi, jnp.broadcast_to(factor, (len(xi), *factor.shape[1:]))
        )
    # One matrix product over components and columns together: [M, K L] with [K L, L].
    columns = jnp.moveaxis(factor, -2, -1).reshape(len(factor), -1, factor.shape[-1])
    rows = xi.reshape(*xi.shape[:2], -1)
    return rows @ columns[0] if len(factor) == 1 else rows @ columns


def log_density(mixture: Mixture, points: Array) -> Array:
    r"""``log sum_k pi_k N(u; mu_k, F_k F_k^T)`` in the latent space.

    Args:
      mixture: of n inputs, or a shared one.
      points: ``[n, M, L]``.

    Returns:
      ``[n, M]`` in nats.

    Cost: ``n M K L^2``.

    Source: Wang et al. [wang2025], equations 12 and 13.

    >>> one = Mixture(jnp.zeros((1, 1)), jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)))
    >>> round(float(log_density(one, jnp.zeros((1, 1, 1)))[0, 0]), 4)
    -0.9189
    """
    inputs, size = len(points), points.shape[-1]
    logits, mean, factor = (
        jnp.broadcast_to(leaf, (inputs, *leaf.shape[1:]))
        for leaf in (mixture.logits, mixture.mean, mixture.factor)
    )
    offset = points[:, None] - mean[:, :, None]
    if mixture.diagonal:
        scaled, scale = offset / factor[:, :, None], factor
    else:
        scale = jnp.diagonal(factor, axis1=-2, axis2=-1)
        solved = jax.lax.linalg.triangular_solve(
            factor, jnp.swapaxes(offset, -1, -2), left_side=True, lower=True
        )
        scaled = jnp.swapaxes(solved, -1, -2)
    each = -0.5 * jnp.sum(scaled**2, axis=-1) - jnp.sum(jnp.log(scale), axis=-1)[..., None]
    each = each - size / 2 * np.log(2 * np.pi) + jax.nn.log_softmax(logits)[..., None]
    return jax.nn.logsumexp(each, axis=1)


def entropy_ratio(proportions: Array) -> Array:
    r"""``H(pi) / log K``: 1 for equal proportions, 0 for a single component.

    Args:
      proportions: ``[..., K]``, which sum to 1.

    Returns:
      ``[...]`` in ``[0, 1]``; 1 for ``K = 1``.

    Source: Wang et al. [wang2025], equation 51.

    >>> entropy_ratio(jnp.array([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [1.0, 0.0]
    """
    count = proportions.shape[-1]
    if count == 1:
        return jnp.ones(proportions.shape[:-1], proportions.dtype)
    return jnp.sum(jax.scipy.special.entr(proportions), axis=-1) / np.log(count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def triangular(packed: Array, size: int) -> Array:
    """Lower triangular matrices from their entries in row order.

    Args:
      packed: ``[..., L (L + 1) / 2]``.
      size: L.

    Returns:
      ``[..., L, L]``.

    >>> triangular(jnp.arange(1.0, 4.0), 2).tolist()
    [[1.0, 0.0], [2.0, 3.0]]
    """
    indices = np.zeros((size, size), np.int32)
    indices[np.tril_indices(size)] = np.arange(packed_size(size))
    return jnp.where(np.tri(size, dtype=bool), packed[..., indices], 0.0)


def _forward(packed: Array, size: int) -> tuple[Array, None]:
    """The forward pass of :func:`triangular`; its gradient needs no stored values (None)."""
    return triangular(packed, size), None


def _backward(size: int, _: None, gradient: Array) -> tuple[Array]:
    """The gradient of the gather, as a gather: on a CPU a scatter takes ten times as long."""
    indices = np.ravel_multi_index(np.tril_indices(size), (size, size))
    return (gradient.reshape(*gradient.shape[:-2], -1)[..., indices],)


triangular.defvjp(_forward, _backward)


def packed_size(size: int) -> int:
    """The number of entries that :func:`triangular` takes.

    >>> packed_size(2), packed_size(3)
    (3, 6)
    """
    return size * (size + 1) // 2
