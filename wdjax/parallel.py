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

    Raises:
      ValueError: an empty sequence of devices.

    >>> data_mesh(jax.devices()[:1]).axis_names
    ('batch',)
    """
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError("a mesh needs at least one device, got none.")
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def padded_size(n: int, mesh: Mesh | None) -> int:
    """The smallest multiple of the mesh's size that is at least ``n``.

    Args:
      n: number of rows.
      mesh: of :func:`data_mesh`, or None for one device.

    >>> padded_size(5, None)
    5
    """
    count = 1 if mesh is None else mesh.size
    return -(-n // count) * count


def pad(tree: Tree, size: int) -> Tree:
    """Pads every leaf to ``size`` rows by repeating the last.

    Args:
      tree: a pytree of arrays ``[n, ...]``.
      size: at least n.

    >>> pad(jnp.arange(2), 4).tolist()
    [0, 1, 1, 1]
    """

    def extend(leaf: jax.Array) -> jax.Array:
        missing = size - leaf.shape[0]
        return jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)]) if missing else leaf

    return jax.tree.map(extend, tree)


def replicate(tree: Tree, mesh: Mesh | None) -> Tree:
    """Copies every leaf to every device of the mesh.

    Args:
      tree: a pytree of arrays.
      mesh: of :func:`data_mesh`, or None for one device.

    >>> replicate(jnp.arange(2), data_mesh(jax.devices()[:1])).tolist()
    [0, 1]
    """
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def shard(tree: Tree, mesh: Mesh | None) -> Tree:
    """Splits the first axis of every leaf over the mesh.

    Args:
      tree: a pytree of arrays ``[n, ...]``, n a multiple of the mesh's size.
      mesh: of :func:`data_mesh`, or None for one device.

    >>> shard(jnp.arange(2), data_mesh(jax.devices()[:1])).tolist()
    [0, 1]
    """
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec(AXIS)))


def gather(tree: Tree, mesh: Mesh | None) -> Tree:
    """Copies every leaf whole to the default device.

    Args:
      tree: a pytree of arrays.
      mesh: of :func:`data_mesh`, or None for one device.

    >>> gather(shard(jnp.arange(2), data_mesh(jax.devices()[:1])), None).tolist()
    [0, 1]
    """
    if mesh is None:
        return tree
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), tree)
