"""How many samples go through a model at once."""

from collections.abc import Callable

import jax
from jax.extend.core import ClosedJaxpr

from wdjax import program
from wdjax.core import AnyArray, Array, PyTree

_CACHED = 3 * 2**15
"""On a CPU, numbers in the largest array of a batch at most: it should stay in the cache."""
_FEW = 16
"""Samples in a default batch on a CPU at least. From the program of so many its needs are read, in
which arrays that belong to no sample, kernels say, count for little."""
_SHARE = 0.5
"""Of an accelerator's free memory, what a batch may take."""
_LARGEST = 1024
"""Samples in a default batch at most."""
_SIZES = (100, 125, 160, 200, 250, 320, 400, 500, 640, 800)
"""Samples in a batch, over powers of ten and rounded up: programs for all numbers of samples are
few, and numbers that people choose leave nothing idle (Renard's series R10)."""
_SMALL = 0.4
"""Of the largest batch, what others are at least."""


def traced(model: Callable[[Array], PyTree], x: AnyArray) -> ClosedJaxpr:
    """The model's program for a few samples like ``x``, ``[n, *shape]``."""
    some = jax.ShapeDtypeStruct((_FEW, *x.shape[1:]), x.dtype)
    return program.outputs.trace(model, some).jaxpr


def default(jaxpr: ClosedJaxpr) -> int:
    """Samples in a batch of gradients, from :func:`traced`: a gradient keeps what it computes."""
    if jax.default_backend() == "cpu":
        return min(max(_FEW * _CACHED // max(1, program.widest(jaxpr)), _FEW), 128)
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 2**33) - stats.get("bytes_in_use", 0)
    size = _FEW * int(_SHARE * free) // (4 * max(1, program.live(jaxpr)))
    return 2 ** (min(max(size, 1), _LARGEST).bit_length() - 1)


def even(count: int, most: int) -> int:
    """The size of batches, ``most`` or a little less, that idles least for ``count`` samples.

    For fewer of them, the least size that holds them all.

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
