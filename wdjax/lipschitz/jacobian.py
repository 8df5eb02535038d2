r"""Bounds of rows of a Jacobian, ``c^T W D_H W_H ... D_1 W_1``, for all slopes D in intervals.

Two enclosures are propagated backwards, and the smaller bound counts. Intervals bound every entry
by itself. A zonotope keeps linear dependencies between entries: a neuron with an open slope (an
interval of positive length) adds one generator, whose coefficient is the entry's largest magnitude
times half of the slope's range.
"""

import jax
import jax.numpy as jnp

from wdjax import norms
from wdjax.lipschitz.chain import Chain
from wdjax.lipschitz.neurons import Slopes

ROUNDING = 1e-9
"""Bounds are enlarged by this fraction, far above the rounding of float64 sums."""


def interval(net: Chain, slopes: Slopes, rows: jax.Array, norm: float) -> jax.Array:
    """Bounds ``[R]`` of the dual norms of rows ``[R, K]`` times the Jacobian, by intervals."""
    center = rows @ net.weights[-1]
    radius = jnp.zeros_like(center)
    for weight, (low, high) in reversed(list(zip(net.weights[:-1], slopes))):
        ends = jnp.stack([(center + s * radius) * t for s in (-1, 1) for t in (low, high)])
        least, most = jnp.min(ends, axis=0), jnp.max(ends, axis=0)
        center, radius = 0.5 * (least + most), 0.5 * (most - least)
        center, radius = center @ weight, radius @ jnp.abs(weight)
    return _sizes(jnp.abs(center) + radius, norm)


def zonotope(
    net: Chain, slopes: Slopes, rows: jax.Array, norm: float, open_: tuple[int, ...]
) -> jax.Array:
    """The same bounds ``[R]`` by zonotopes; each layer has at most ``open_`` open slopes."""
    return jax.lax.map(lambda row: row_zonotope(net, slopes, row, norm, open_)[0], rows)


def row_zonotope(
    net: Chain, slopes: Slopes, row: jax.Array, norm: float, open_: tuple[int, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The bound of one row ``[K]``, and each slope's contribution to it, ``[m_h]`` a layer."""
    center = row @ net.weights[-1]
    generators = jnp.zeros((0, len(center)), center.dtype)
    added: list[tuple[int, jax.Array]] = []
    layers = list(enumerate(zip(net.weights[:-1], slopes, open_)))
    for turn, (weight, (low, high), room) in reversed(layers[1:]):
        center, generators, new = _spread(center, generators, low, high)
        these = jnp.nonzero(new > 0, size=room, fill_value=0)[0]
        amount = jnp.where(jnp.arange(room) < jnp.sum(new > 0), new[these], 0.0)
        generators = jnp.concatenate([generators @ weight, amount[:, None] * weight[these]])
        center = center @ weight
        added.append((turn, these))
    if not layers:
        return _sizes(jnp.abs(center)[None], norm)[0], ()
    _, (weight, (low, high), _) = layers[0]
    center, generators, new = _spread(center, generators, low, high)
    center, generators = center @ weight, generators @ weight
    size = jnp.abs(center) + jnp.sum(jnp.abs(generators), axis=0) + new @ jnp.abs(weight)
    lengths = norms.lp_norm(generators, norms.dual(norm))
    scores = [new * norms.lp_norm(weight, norms.dual(norm))]
    start = 0
    for turn, these in added:
        group = lengths[start : start + len(these)]
        scores.insert(1, jnp.zeros(len(slopes[turn][0]), group.dtype).at[these].add(group))
        start += len(these)
    found = _sizes(size[None], norm)[0]
    if norm == 2:
        apart = norms.lp_norm(center[None], 2)[0] + sum(jnp.sum(group) for group in scores)
        found = jnp.fmin(found, apart * (1 + ROUNDING))
    return found, tuple(scores)


def _spread(
    center: jax.Array, generators: jax.Array, low: jax.Array, high: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A zonotope times diagonal derivatives in ``[low, high]``, ``[m]``.

    Returns its centre ``[m]``, its generators ``[G, m]``, and for every entry the new generator's
    size ``[m]``: the largest magnitude times half of the derivative's range.
    """
    reach = jnp.abs(center) + jnp.sum(jnp.abs(generators), axis=0)
    middle, half = 0.5 * (low + high), 0.5 * (high - low)
    return center * middle, generators * middle, half * reach


def _sizes(rows: jax.Array, norm: float) -> jax.Array:
    """Dual norms ``[R]`` of rows ``[R, n]``, rounded up; inf where an entry is not finite."""
    found = norms.lp_norm(rows, norms.dual(norm)) * (1 + ROUNDING)
    return jnp.where(jnp.all(jnp.isfinite(rows), axis=-1), found, jnp.inf)
