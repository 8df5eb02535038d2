"""Data parallelism: pads a batch, splits it over a mesh, gathers the results."""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "batch"

AnyArray = jax.Array | np.ndarray
"""An array on a device or on the host."""

Tree = TypeVar("Tree")
"""Any pytree of arrays; the result has its structure."""


def data_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-axis mesh over the given devices (all by default) for data parallelism.

    Args:
      devices: a sequence of JAX devices.

    Returns:
      A mesh with the single axis ``"batch"``, to pass to :func:`wdjax.run`.

    >>> data_mesh(jax.devices()[:1]).axis_names
    ('batch',)
    """
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError("a mesh needs at least one device, got none.")
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def padded_size(n: int, mesh: Mesh | None) -> int:
    """The smallest multiple of the mesh's size that is at least ``n``."""
    count = 1 if mesh is None else mesh.size
    return -(-n // count) * count


def pad(tree: Tree, size: int) -> Tree:
    """Pads every leaf to ``size`` rows by repeating the last."""

    def extend(leaf: jax.Array) -> jax.Array:
        missing = size - leaf.shape[0]
        return jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)]) if missing else leaf

    return jax.tree.map(extend, tree)


def replicate(tree: Tree, mesh: Mesh | None) -> Tree:
    """Copies every leaf to every device of the mesh."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def shard(tree: Tree, mesh: Mesh | None) -> Tree:
    """Splits the first axis of every leaf over the mesh."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec(AXIS)))


def gather(tree: Tree, mesh: Mesh | None) -> Tree:
    """Copies every leaf whole to the default device."""
    if mesh is None:
        return tree
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), tree)
