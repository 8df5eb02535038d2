"""Choice of batch sizes."""

import warnings
from collections.abc import Callable
from typing import TypeVar

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from wdjax import parallel, program
from wdjax.checks import independence, validate
from wdjax.core import AnyArray, Array, PyTree
from wdjax.xla_cpu import on_cpu

T = TypeVar("T")

_CACHED = 3 * 2**15
"""On a CPU, the maximum number of floats in a batch's largest array, so that it stays in cache."""
_FEW = 16
"""On a CPU, the minimum default batch size; also the batch for which the model is traced to count
the floats it needs. It is large enough that arrays without a batch axis, such as kernels, count
for little."""
_LEAST = 8
"""On a CPU, the minimum default batch size where some samples need far more steps than others."""
_SHARE = 0.5
"""The share of an accelerator's free memory that a batch may take."""
_LARGEST = 1024
"""The maximum default batch size."""
_SIZES = (100, 125, 160, 200, 250, 320, 400, 500, 640, 800)
"""Allowed batch sizes, up to a power of ten and rounded up (Renard's series R10): few different
sizes mean few compilations, and the round numbers that people choose need no padding."""
_SMALL = 0.4
"""The smallest batch size worth considering, as a share of the largest."""


def traced(model: Callable[[Array], PyTree], x: AnyArray) -> ClosedJaxpr:
    """The model's program, traced for ``_FEW`` samples like those of ``x [n, *shape]``."""
    some = jax.ShapeDtypeStruct((_FEW, *x.shape[1:]), x.dtype)
    return independence.outputs.trace(model, some).jaxpr


def default(jaxpr: ClosedJaxpr) -> int:
    """The default batch size, given :func:`traced`: room for all that a gradient keeps."""
    if on_cpu():
        return min(max(_FEW * _CACHED // max(1, program.widest(jaxpr)), _FEW), 128)
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 2**33) - stats.get("bytes_in_use", 0)
    size = _FEW * int(_SHARE * free) // (4 * max(1, program.live(jaxpr)))
    return 2 ** (min(max(size, 1), _LARGEST).bit_length() - 1)


def work(model: Callable[[Array], PyTree], x: AnyArray) -> float:
    """The multiplications of a model's products and convolutions for one of the samples ``x``."""
    return program.products(traced(model, x)) / _FEW


def sizes(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    batch_size: int | None,
    devices: int,
    uneven: bool = False,
) -> tuple[int, int]:
    """The samples in a batch and the padded number of all samples, both on one device.

    Args:
      model: what is run on the samples ``x``, ``[n, *shape]``.
      x: all samples.
      batch_size: samples on all devices at once, as the user asks, or None for the default.
      devices: their number.
      uneven: whether some samples need far more steps than others. On a CPU there are then three
        batches by default: fewer samples wait in theirs for its last one, which saves DeepFool and
        WDA* a quarter to a half of their time for 24 samples.
    """
    share = -(-len(x) // devices)
    if batch_size is None:
        size = default(traced(model, x))
        if uneven and on_cpu():
            size = min(size, max(_LEAST, -(-share // 3)))
        size = even(share, size)
    else:
        size = -(-validate.check_count("batch_size", batch_size) // devices)
        # What the user asks for is kept, unless there are fewer samples.
        size = even(share, size) if share < size else size
    return size, padded_count(-(-share // size)) * size


def even(count: int, most: int) -> int:
    """The allowed batch size, at most ``most``, that needs least padding for ``count`` samples.

    If ``count <= most``, it is the smallest allowed size that holds them all in one batch.

    >>> even(90, 128), even(130, 128), even(300, 128)
    (100, 80, 100)
    """
    decades = range(len(str(most)))
    sizes = {-(-step * 10**decade // 100) for decade in decades for step in _SIZES}
    sizes = {size for size in sizes if size < most} | {most}
    if count <= most:
        return min(size for size in sizes if size >= count)
    large = sorted((size for size in sizes if size >= _SMALL * most), reverse=True)
    return min(large, key=lambda size: -(-count // size) * size)


def padded_count(count: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, ... that is at least ``count``."""
    power = 1 << (count - 1).bit_length()
    return 3 * power // 4 if power >= 4 and 3 * power // 4 >= count else power


def halving(
    work: Callable[[int], T], size: int, mesh: Mesh | None, unit: int = 1, whole: int = 0
) -> T:
    """What ``work(size)`` returns; begun again with half the size when a device's memory is full.

    Args:
      work: of a number of samples at once; it must return finished arrays, and the same whatever
        the size.
      size: the number to begin with.
      mesh: over which they are split. Over several processes the error is raised, since only one
        of them may have met it.
      unit: the size stays a multiple of it.
      whole: the size stays a divisor of it.

    >>> def work(size):
    ...     if size > 3:
    ...         raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    ...     return size
    >>> with warnings.catch_warnings(record=True) as said:
    ...     warnings.simplefilter("always")
    ...     halving(work, 8, None), str(said[-1].message)
    (2, 'out of memory with 4 samples at once; goes on with 2.')
    """
    while True:
        smaller = size // 2 // unit * unit
        while smaller and whole % smaller:
            smaller -= unit
        try:
            return work(size)
        except jax.errors.JaxRuntimeError as error:
            full = "RESOURCE_EXHAUSTED" in str(error)
            if not full or not smaller or parallel.spans(mesh):
                raise
        # Outside of the handler: the error's traceback keeps the arrays that filled the memory.
        warnings.warn(
            f"out of memory with {size} samples at once; goes on with {smaller}.", stacklevel=3
        )
        size = smaller
