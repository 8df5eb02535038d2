"""Counts the classes that a model gives to noisy samples.

A vote is a pair of a sample and a number, which determine its noise, so that neither batches nor
devices change it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from wdjax import distinct, identity, parallel
from wdjax.core import Array
from wdjax.engine import batching
from wdjax.precision import float64
from wdjax.smoothing.grid import Noise, quantized, scale_of_each

_AHEAD = 8
"""Number of batches that are sent to the device before waiting for the first."""


class VotePoll(NamedTuple):
    """Whom to ask, and about what."""

    model: Callable[[Array], Array]
    noise: Noise
    x: Array
    """``[n, *shape]``, replicated on every device."""
    scales: Array
    """``[n]`` scales of the noise; computed once, since that would take half of a vote's time."""
    sample_index: Array
    """``[n]`` indices of the samples in a larger data set."""
    key: Array
    classes: int
    size: int
    """Number of votes in a batch."""
    mesh: Mesh | None


def poll(
    model: Callable[[Array], Array],
    noise: Noise,
    x: Array,
    index: Any,
    key: Array,
    classes: int,
    size: int,
    mesh: Mesh | None,
) -> VotePoll:
    """The :class:`VotePoll` of checked arguments, with arrays replicated on the mesh's devices.

    ``index`` None numbers the samples 0, 1, ... Raises on a TPU, whose float64 is not exact enough.
    """
    size = parallel.padded_size(size, mesh)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    if device.platform == "tpu":
        raise ValueError(
            "a TPU's float64 is not exact enough for certificates; smooth on a CPU or a GPU."
        )
    indices = jnp.arange(len(x)) if index is None else jnp.asarray(index)
    if len(indices) != len(x):
        raise ValueError(f"index must have one row a sample, {len(x)}, got {len(indices)}.")
    with float64():
        fixed = model, x, distinct.jit(scale_of_each)(noise, x), indices, key
        model, x, each, indices, key = parallel.replicate(fixed, mesh)
    return VotePoll(model, noise, x, each, indices, key, classes, size, mesh)


def at_once(asked: VotePoll) -> int:
    """Votes to be asked for in one call of :func:`count`."""
    return asked.size * _AHEAD


def count(asked: VotePoll, rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """``[n, K + 1]`` counts of the votes ``numbers`` on the samples ``rows``, both ``[m]``.

    The last column counts votes whose logits are not finite.
    """

    def at_once(size: int) -> np.ndarray:
        return _count(asked._replace(size=size), rows, numbers)

    unit = parallel.mesh_size(asked.mesh)
    return batching.halving(at_once, asked.size, asked.mesh, unit)


def _count(asked: VotePoll, rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The ``[n, K + 1]`` of :func:`count`, in batches of ``asked.size`` of the ``m`` votes."""
    sent = []
    for first in range(0, len(rows), asked.size):
        part = slice(first, first + asked.size)
        pairs = np.stack([rows[part], numbers[part]]).astype(np.int32)
        padded = np.pad(pairs, ((0, 0), (0, asked.size - pairs.shape[1])), mode="edge")
        sent.append(_vote(asked.model, _draw(asked, padded))[0])
    said = np.concatenate([np.asarray(batch) for batch in parallel.local(sent)])[: len(rows)]
    width = asked.classes + 1
    total = np.bincount(rows * width + said, minlength=len(asked.x) * width)
    return total.reshape(len(asked.x), width)


def programs(asked: VotePoll) -> list[ClosedJaxpr]:
    """The traced programs of a vote: of its noise and of the model on a noisy sample."""
    fixed = asked.key, asked.x, asked.scales, asked.sample_index
    noisy = functools.partial(_noisy, asked.noise, asked.noise.step, fixed)
    with float64():
        drawn = identity.program(noisy, *np.zeros((2, 1), np.int32))
    return [drawn, identity.program(_vote, asked.model, asked.x[:1])]


def uniforms(asked: VotePoll, number: int) -> np.ndarray:
    """``[n]`` random numbers of the samples in ``[0, 1)``, by a number that no vote has."""

    def one(row_index: Array) -> Array:
        vote_key = jax.random.fold_in(jax.random.fold_in(asked.key, row_index), number)
        return jax.random.uniform(vote_key)

    return np.asarray(parallel.local(distinct.jit(jax.vmap(one))(asked.sample_index)))


def _draw(asked: VotePoll, pairs: np.ndarray) -> Array:
    """``[m, *shape]``: the noisy samples of pairs ``[2, m]`` of a row and a vote number."""
    rows, numbers = parallel.shard(tuple(pairs), asked.mesh)
    fixed = asked.key, asked.x, asked.scales, asked.sample_index
    with float64():
        return _noisy(asked.noise, asked.noise.step, fixed, rows, numbers)


@functools.partial(distinct.jit, static_argnums=1)
def _noisy(
    noise: Noise, step: float, fixed: tuple[Array, ...], rows: Array, numbers: Array
) -> Array:
    """``[m, *shape]``: noisy samples on the grid, one for each pair of a row and a vote number.

    ``fixed`` are the key, the samples, the scales of the noise, and the samples' numbers in the
    data set. The noise of a pair depends on the key, the sample's number and the vote's number
    only.
    """
    key, x, scales, index = fixed

    def one(row: Array, number: Array) -> Array:
        vote_key = jax.random.fold_in(jax.random.fold_in(key, index[row]), number)
        return quantized(noise, step, vote_key, x[row], scales[row])

    return jax.vmap(one)(rows, numbers)


@distinct.jit
def _vote(model: Callable[[Array], Array], x: Array) -> tuple[Array, Array]:
    """Classes ``[m]`` of noisy samples, K where a logit is not finite; and the logits."""
    logits = model(x)
    fine = jnp.all(jnp.isfinite(logits), axis=-1)
    said = jnp.where(fine, jnp.argmax(logits, axis=-1), logits.shape[-1])
    return said.astype(jnp.int32), logits
