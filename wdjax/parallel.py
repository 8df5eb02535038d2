"""Data parallelism: pads a batch, splits it over a mesh, gathers the results.

A mesh may span the devices of many processes (``jax.distributed``). Each process then makes the
same calls with the same arguments, every decision on the host is taken by all of them alike, and
every result is whole on each.
"""

import contextlib
import math
import pickle
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

__all__ = ["data_mesh", "gather", "joined", "pad", "padded_size", "replicate", "shard"]

AXIS = "batch"
_CHUNK = 2**26
"""The maximum number of bytes of one process that are exchanged at once."""

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


def mesh_size(mesh: Mesh | None) -> int:
    """The number of devices of a mesh.

    Args:
      mesh: of :func:`data_mesh`, or None for one device.

    Raises:
      ValueError: anything else.

    >>> mesh_size(None)
    1
    """
    if mesh is None:
        return 1
    if not isinstance(mesh, Mesh) or mesh.axis_names != (AXIS,):
        raise ValueError(f"mesh must be of wdjax.parallel.data_mesh(devices), got {mesh!r}.")
    return int(mesh.size)


def padded_size(n: int, mesh: Mesh | None) -> int:
    """The smallest multiple of the mesh's size that is at least ``n``.

    Args:
      n: number of rows.
      mesh: of :func:`data_mesh`, or None for one device.

    >>> padded_size(5, None)
    5
    """
    count = mesh_size(mesh)
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
    """Copies every array to every device of the mesh; one that is split over devices stays so.

    Args:
      tree: a pytree of arrays, and of numbers, which stay what they are.
      mesh: of :func:`data_mesh`, or None for one device.

    Raises:
      ValueError: the mesh's processes were given different values.

    >>> replicate(jnp.arange(2), data_mesh(jax.devices()[:1])).tolist()
    [0, 1]
    """
    if mesh is None:
        return tree
    check_same(tree, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def copy(leaf: Any) -> Any:
        now = getattr(leaf, "sharding", everywhere)
        split = now.device_set == everywhere.device_set and not now.is_fully_replicated
        return placed(leaf, everywhere) if hasattr(leaf, "dtype") and not split else leaf

    return jax.tree.map(copy, tree)


def shard(tree: Tree, mesh: Mesh | None) -> Tree:
    """Splits the first axis of every leaf over the mesh.

    Args:
      tree: a pytree of arrays ``[n, ...]``, n a multiple of the mesh's size. Inside a trace they
        stay what they are, and the compiler splits what is computed of them.
      mesh: of :func:`data_mesh`, or None for one device.

    >>> shard(jnp.arange(2), data_mesh(jax.devices()[:1])).tolist()
    [0, 1]
    """
    return tree if mesh is None else placed(tree, NamedSharding(mesh, PartitionSpec(AXIS)))


def check_divides(name: str, count: int, mesh: Mesh | None) -> None:
    """Raises if a number of rows cannot be split evenly over a mesh.

    Args:
      name: what the rows are, for the error.
      count: their number.
      mesh: of :func:`data_mesh`, or None for one device.

    >>> check_divides("batch_size", 8, None)
    """
    devices = mesh_size(mesh)
    if count % devices:
        raise ValueError(
            f"{name} must be a multiple of the {devices} devices of the mesh, got {count}."
        )


def each(
    worker: Callable[[jax.Device], Callable[[int], Tree]], count: int, mesh: Mesh | None
) -> list[Tree]:
    """Does the items 0 to ``count - 1``, each on one device: for work that the host directs.

    A thread for each device takes one item after another, so that every item's programs are those
    of a single device. Processes share the items, and each gets all results.

    Args:
      worker: ``device -> (item -> result)``, called once a device. Where the mesh spans processes
        a result holds NumPy arrays.
      count: the number of items, at least 1.
      mesh: of :func:`data_mesh`, or None to do them here, on the default device.

    Returns:
      The results, in order.

    >>> each(lambda device: lambda item: item**2, 3, None)
    [0, 1, 4]
    """
    if mesh is None:
        return list(map(worker(jax.devices()[0]), range(count)))
    total, rank = (jax.process_count(), jax.process_index()) if spans(mesh) else (1, 0)
    items = np.array_split(np.arange(count), total)[rank].tolist()
    queue, taking = iter(items), threading.Lock()
    results: dict[int, Tree] = {}

    def work(device: jax.Device) -> None:
        with jax.default_device(device):
            do = worker(device)
            while True:
                with taking:
                    item = next(queue, None)
                if item is None:
                    return
                results[item] = do(item)

    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    with futures.ThreadPoolExecutor(len(here)) as threads:
        list(threads.map(work, here[: len(items)]))  # Raises what a thread raised.
    if total > 1:
        content = np.frombuffer(pickle.dumps(results), np.uint8)
        ends = np.cumsum(joined(np.array([len(content)])))[:-1]
        for part in np.split(joined(content), ends):
            results |= pickle.loads(part.tobytes())
    return [results[item] for item in range(count)]


def placed(tree: Tree, sharding: Sharding) -> Tree:
    """The leaves by a sharding; one over many processes takes them from each.

    Args:
      tree: a pytree of arrays, on every process the same; inside a trace the compiler is told.
      sharding: of every leaf.

    >>> placed(jnp.arange(2), jax.sharding.SingleDeviceSharding(jax.devices()[0])).tolist()
    [0, 1]
    """

    def put(leaf: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(leaf, sharding)
        if sharding.is_fully_addressable or _is_remote(leaf):
            return jax.device_put(leaf, sharding)
        leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        if _is_key(leaf):
            data = put(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        rows = np.asarray(leaf)
        return jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)

    return jax.tree.map(put, tree)


@contextlib.contextmanager
def telling_of_lost_processes() -> Iterator[None]:
    """A context, or a decorator, in which the end of another process of a mesh is told plainly.

    Raises:
      RuntimeError: in place of what JAX says of a connection that broke.

    >>> with telling_of_lost_processes():  # One process has no other that could end.
    ...     raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: connection reset")
    Traceback (most recent call last):
    ...
    jax.errors.JaxRuntimeError: UNKNOWN: Gloo AllGather failed: connection reset
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        broken = re.search("Gloo|NCCL|UNAVAILABLE|coordination service", str(error))
        if jax.process_count() == 1 or not broken:
            raise
        raise RuntimeError(
            "another process of this mesh has ended, and this one cannot go on alone. Begin all of "
            "them again; with a checkpoint they go on from its last round."
        ) from error


@telling_of_lost_processes()
def check_same(tree: Any, mesh: Mesh | None) -> None:
    """Raises if the processes of a mesh were given different values.

    Args:
      tree: a pytree of arrays on this process.
      mesh: of :func:`data_mesh`, or None for one device.

    >>> check_same(jnp.arange(2), None)
    """
    if not spans(mesh):
        return
    digest = 0
    for leaf in jax.tree.leaves(tree):
        if not _is_remote(leaf):
            rows = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
            digest = zlib.crc32(f"{rows.dtype}{rows.shape}".encode() + rows.tobytes(), digest)
    if len({*multihost_utils.process_allgather(np.uint32(digest)).tolist()}) > 1:
        raise ValueError(
            "the processes of this mesh were given different arguments; each must give the same: "
            "the same model, and of samples those of all (wdjax.parallel.joined)."
        )


@telling_of_lost_processes()
def joined(tree: Tree) -> Tree:
    """The rows of every process, one process after another, on each of them.

    For data of which each process has read its own part. What takes a mesh over many processes
    wants the same samples on each.

    Args:
      tree: a pytree of arrays ``[n, ...]`` on the host; n may differ from process to process.

    Returns:
      NumPy arrays ``[n_0 + n_1 + ..., ...]``; in a single process, those that were given.

    Cost: the memory of all rows on every host.

    >>> joined(np.arange(2)).tolist()
    [0, 1]
    """
    if jax.process_count() == 1:
        return tree

    def join(leaf: Any) -> np.ndarray:
        rows = np.ascontiguousarray(leaf)
        wide = math.prod(rows.shape[1:])  # Not -1: a process may have no rows.
        raw = rows.reshape(len(rows), wide).view(np.uint8)  # Bytes: 64 bits would become 32.
        counts = multihost_utils.process_allgather(np.int32(len(raw)))
        step = max(1, _CHUNK // max(1, raw.shape[1]))
        parts: list[list[np.ndarray]] = [[] for _ in counts]
        for first in range(0, int(counts.max()), step):
            size = min(step, int(counts.max()) - first)
            block = raw[first : first + size]
            padded = np.pad(block, ((0, size - len(block)), (0, 0)))
            for part, found, count in zip(parts, multihost_utils.process_allgather(padded), counts):
                part.append(found[: max(0, count - first)])
        whole = np.concatenate([block for part in parts for block in part])
        return whole.view(rows.dtype).reshape(-1, *rows.shape[1:])

    return jax.tree.map(join, tree)


def _is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_remote(leaf: Any) -> bool:
    """Whether a leaf is an array of which other processes hold a part."""
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return concrete and not leaf.is_fully_addressable


def spans(mesh: Mesh | None) -> bool:
    """Whether a mesh has devices of other processes.

    Args:
      mesh: of :func:`data_mesh`, or None for one device.

    >>> spans(None)
    False
    """
    return mesh_size(mesh) > 1 and mesh is not None and bool(mesh.is_multi_process)


@telling_of_lost_processes()
def local(tree: Tree) -> Tree:
    """The tree with every leaf readable: one that is spread over processes becomes a NumPy array.

    Args:
      tree: a pytree of arrays.

    >>> local(jnp.arange(2)).tolist()
    [0, 1]
    """

    def read(leaf: Any) -> Any:
        if not _is_remote(leaf):
            return leaf
        if _is_key(leaf):
            data = read(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(read, tree)


def any_remote(tree: Any) -> bool:
    """Whether a leaf of the tree is spread over processes.

    Args:
      tree: a pytree of arrays.

    >>> any_remote(jnp.arange(2))
    False
    """
    return any(map(_is_remote, jax.tree.leaves(tree)))


def by_first(work: Callable[[], Any], together: bool) -> None:
    """Does what only one process may do, such as writing, on process 0; all wait for its end.

    Args:
      work: what to do.
      together: False to do it here: this process works alone.

    Raises:
      ValueError: on the other processes, if it failed on process 0, which raises its own error.

    >>> by_first(lambda: print("written"), together=False)
    written
    """
    failure: BaseException | None = None
    if not together or jax.process_index() == 0:
        try:
            work()
        except BaseException as error:
            failure = error
    (failed,) = agreed(failure is not None, together=together)
    if failure is not None:
        raise failure
    if failed:
        raise ValueError("process 0 failed to keep the state of all; its own error says why.")


@telling_of_lost_processes()
def agreed(*said: Any, together: bool) -> list[bool]:
    """For each truth value, whether a process says so: the same answer on all, which all ask for.

    Args:
      *said: truth values.
      together: False if this process works alone.

    >>> agreed(True, None, together=False)
    [True, False]
    """
    here = [bool(one) for one in said]
    return multihost_utils.process_allgather(np.array(here)).any(0).tolist() if together else here


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

    def copy(leaf: Any) -> Any:
        if _is_key(leaf):
            data = copy(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return jnp.asarray(np.asarray(leaf))

    return jax.tree.map(copy, local(tree))
