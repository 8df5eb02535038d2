r"""Forms of the same mathematics that XLA's CPU compiler runs or compiles fast.

* A fusion recomputes inputs from other fusions for every entry of its result, even through
  ``optimization_barrier``. So what many rows need is computed outside of loops (:func:`by_turns`),
  and maps have a frame of zeros (:func:`framed`) instead of a mask.
* Reductions of short rows and gathers by several indices are not vectorised: sums add slices
  (:func:`summed`), and gathers have one index (:func:`gathered`).
* Convolutions are fast in the layout NHWC by HWIO only, and are not converted to it inside loops
  (:func:`transposed_conv`, :mod:`wdjax.models.conv`); with few output channels a product of larger
  matrices is twice as fast.
* Random numbers are drawn as a vector (:func:`drawn`).
* Before jaxlib 0.11 the emitter of fusions may be chosen (:data:`OLDER_EMITTER`).
* Each fusion takes some 20 ms to compile, products and convolutions next to nothing.

A form of one function alone, the same on all devices, stays in that function, which says why:
:func:`wdjax.norms.any_entry`, :func:`wdjax.smoothing.flow.divergence`.

``bench/certificates.py`` and ``bench/conv.py`` measure what these forms save.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from wdjax import loops

Pair = tuple[int, int]

LANES = 32
"""Output channels that fill the vector units in a convolution."""
FILLED = 4
"""Input channels below which convolutions are padded."""
WINOGRAD_CHANNELS, WINOGRAD_PIXELS = 96, 512
"""Channels in and out, and pixels of a batch, from which a 3x3 convolution is run by Winograd's
algorithm; bounds charge its rounding from as many channels."""
_ROWS = 64
"""Number of rows that go back at once: what fits a CPU's cache, half of it for wide rows."""
_CACHED = 2**12
"""Largest number of coefficients of a row that is not wide."""
_NUMBERS = 2**22
"""A 16th of the number of coefficients that all these rows together may have at one value."""
_WIDTH = 128
"""Number of linear functions that go back at once where these share their windows."""
_PARTS = 2**20
"""Number of numbers that :func:`_by_rows` may write on its way, so that they stay in the cache."""
_UNLIKELY = 1.2345678e-30
"""If its first array begins with this number, :func:`_held` forgets all: ends are -inf and inf,
slopes not finite, so that lines are constant, and coefficients -inf, so that bounds are -inf or
NaN."""
_FOLD = 16
"""Number of terms that one stage of :func:`summed` adds up."""

OLDER_EMITTER: dict[str, bool] | None = (
    {"xla_cpu_use_fusion_emitters": False}
    if tuple(map(int, jaxlib.__version__.split(".")[:2])) < (0, 11)
    else None
)
"""Options of ``jax.jit`` for a program with long chains of entrywise operations that end in a
:func:`framed` map. The usual emitter of fusions computes shared parts of such chains again for each
use: 32 leaves of a residual net took .9 s, and .3 s with the older emitter, which jaxlib 0.11
lacks. Leaves of a small dense net take .009 s with it instead of .007 s, and other programs of
bounds run up to 1.7 times as long."""


def on_cpu() -> bool:
    """Whether JAX runs on a CPU by default: asked wherever a form or a size is for CPUs only."""
    return jax.default_backend() == "cpu"


def at_once(count: int) -> int:
    """``count``, the number of rows that suit a CPU's cache; 16 times as many on accelerators."""
    return count if on_cpu() else 16 * count


def rows_at_once(group: int, most: int) -> int:
    """How many rows of ``group`` linear functions of up to ``most`` entries go back at once."""
    wide = on_cpu() and group * most > _CACHED
    rows = _ROWS // 2 if wide else at_once(_ROWS)
    return max(min(rows, 16 * _NUMBERS // (group * most)), 1)


def positions_at_once(channels: int) -> int:
    """How many positions, each with a linear function a channel, go back at once."""
    return max(at_once(_WIDTH) // channels, 1)


def drawn(draw: Callable[..., Array], key: Array, shape: Sequence[int], *options: Any) -> Array:
    """``draw(key, shape, *options)`` for a function of ``jax.random``; the numbers are the same.

    The number of an entry depends on its place in the flat array. With several axes its place is
    computed anew for every round of the generator: each axis after the second takes .3 s more to
    compile, and rows of three numbers take up to five times as long to draw.

    >>> key = jax.random.key(0)
    >>> flat = drawn(jax.random.uniform, key, (2, 3, 2), jnp.float32, -1.0, 1.0)
    >>> bool(jnp.all(flat == jax.random.uniform(key, (2, 3, 2), jnp.float32, -1.0, 1.0)))
    True
    """
    return draw(key, (math.prod(shape),), *options).reshape(shape)


def by_turns(
    needed: Array,
    width: int,
    find: Callable[[Sequence[Array]], Array],
    rest: tuple[int, ...],
    dtype: Any,
) -> Array:
    """Lower bounds ``[N, *rest]`` of the ``N`` entries of ``needed``, -inf where it is False.

    ``find`` gets the :func:`numbers` of ``width`` entries at a time, and returns ``[width, *rest]``
    in ``dtype``. The loop has a fixed length, which reverse mode needs; turns in which nothing is
    needed are skipped. The gradient recomputes each turn instead of storing it.
    """
    samples, *shape = needed.shape
    width = min(width, needed.size)
    # A sort takes as long as jnp.nonzero, and a sixth of its time to compile.
    order = jnp.where(needed.reshape(-1), jnp.arange(needed.size), needed.size)
    order = jnp.pad(order, (0, -needed.size % width), constant_values=needed.size)
    index = jnp.sort(order, stable=False)

    @jax.checkpoint
    def turn(_: None, these: tuple[Array, ...]) -> tuple[None, Array]:
        nothing = jnp.full((width, *rest), -jnp.inf, dtype)
        first, *places = these
        found = loops.cond(first[0] < needed.size, find, lambda _: nothing, places)
        return None, found

    turns = [each.reshape(-1, width) for each in (index, *numbers(index, shape, samples))]
    found = loops.scan(turn, None, tuple(turns))[1].reshape(-1, *rest)
    return jnp.full((needed.size, *rest), -jnp.inf, dtype).at[index].set(found, mode="drop")


def numbers(index: Array, shape: Sequence[int], samples: int) -> tuple[Array, ...]:
    """Unravels flat indices ``[R]`` of a batch ``[B, *shape]``.

    Returns ``(sample, entry)``, or ``(sample, channel, row, column)`` for a feature map.
    """
    found = []
    for size in shape[:0:-1] if len(shape) == 4 and shape[0] == 1 else [math.prod(shape)]:
        above = lax.div(index, jnp.full_like(index, size))
        found.append(index - size * above)
        index = above
    return jnp.minimum(index, samples - 1), found[0], *found[:0:-1]


@jax.custom_jvp
def single(*arrays: Array) -> tuple[Array, ...]:
    """Slopes, or the lower and upper ends of intervals, held in memory: all uses get one number.

    A fusion computes what it needs anew, and its roundings are its own: two copies of a slope over
    a narrow interval differ by a percent, and a line with the slope of one and the intercept of the
    other bounds nothing. No fusion reaches into the branches of a condition; this one is False.
    """
    return _held(*arrays)


@single.defjvp
def _single_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Any, Any]:
    return single(*primals), tangents


@jax.custom_batching.custom_vmap
def _held(*arrays: Array) -> tuple[Array, ...]:
    """Under ``vmap`` a condition for all, since one for each would be a choice of entries."""
    if not arrays[0].size:
        return arrays
    never = arrays[0].reshape(-1)[0].astype(jnp.float32) == _UNLIKELY
    return loops.cond(never, _forgotten, lambda *given: given, *arrays)


@_held.def_vmap
def _held_in_batches(_: int, batched: Any, *arrays: Array) -> tuple[Any, Any]:
    return _held(*arrays), tuple(batched)


def _forgotten(low: Array, *high: Array) -> tuple[Array, ...]:
    return jnp.full_like(low, -jnp.inf), *(jnp.full_like(each, jnp.inf) for each in high)


def framed(*values: Array) -> Array:
    """Stacks ``K`` arrays ``[B, *shape]`` to ``[K, B, *shape]`` for :func:`coefficients.seen`.

    Feature maps ``[1, height, width, c]`` are padded by a frame of zeros.
    """
    maps = jnp.stack(jnp.broadcast_arrays(*values))
    if maps.ndim != 6 or maps.shape[2] != 1:
        return maps
    return jnp.pad(maps, ((0, 0), (0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))


def unframed(maps: Array) -> Array:
    return maps[:, :, :, 1:-1, 1:-1] if maps.ndim == 6 and maps.shape[2] == 1 else maps


def gathered(maps: Array, spots: Array) -> Array:
    """Entries ``[K, R, ...]`` of ``K`` tables ``[K, N, c]`` at ``spots``, ``[R, S]``.

    By one flat index into one table; several indices, or with K innermost, are slow. Indices that
    have no sign are not compared with 0 once more for each entry.
    """
    kinds, count = maps.shape[:2]
    table = maps.reshape(-1, *maps.shape[2:])
    spots = spots + np.arange(kinds)[:, None, None] * count
    return table.at[spots.astype(jnp.uint32)].get(mode="promise_in_bounds")


@jax.custom_jvp
def summed(terms: Array) -> Array:
    """Sums ``[G, R, ...]`` to ``[G, R]`` in stages of 16 terms, which keeps rounding small.

    A stage adds slices, which CPUs vectorise.
    """
    flat = terms.reshape(*terms.shape[:2], -1)
    while flat.shape[-1] > _FOLD:
        width = -(-flat.shape[-1] // _FOLD)
        parts = [flat[..., start : start + width] for start in range(0, flat.shape[-1], width)]
        parts[-1] = jnp.pad(parts[-1], ((0, 0), (0, 0), (0, width - parts[-1].shape[-1])))
        flat = functools.reduce(jnp.add, parts)
    return jnp.sum(flat, axis=-1)


@summed.defjvp
def _summed_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (terms,), (change,) = primals, tangents
    return summed(terms), jnp.sum(change, axis=tuple(range(2, change.ndim)))


def rounding(count: int, dtype: Any) -> float:
    """The rounding error of :func:`summed` on ``count`` terms, relative to their magnitudes' sum.

    A term is rounded at most 15 times in a stage; the bound also leaves room for one more stage.
    It is twice as large as needed, because patches may have more entries than the map of size
    ``count`` (those beyond it are 0).
    """
    stages = 0
    while count > _FOLD:
        stages, count = stages + 1, -(-count // _FOLD)
    return 1.01 * (_FOLD * (stages + 1) + 8) * float(jnp.finfo(dtype).eps)


@jax.custom_jvp
def transposed_conv(a: Array, kernel: Array) -> Array:
    """The full transposed convolution, size ``n`` to ``n - 1 + k``, in a form that CPUs run fast.

    ``a`` is ``[count, rows, columns, outputs]``, the kernel ``[h, w, c, outputs]``.
    """
    height, width, channels, outputs = kernel.shape
    count, rows, columns, _ = a.shape
    if rows == columns == 1:
        flat = a.reshape(count, outputs) @ kernel.reshape(-1, outputs).T
        return flat.reshape(count, height, width, channels)
    broad = columns + width - 1
    size = count * rows * broad * (width * outputs + height * channels)
    if on_cpu() and channels <= LANES // 2 and size <= _PARTS:
        return _by_rows(a, kernel)
    return _mirrored(a, kernel)


def _mirrored(a: Array, kernel: Array) -> Array:
    """:func:`transposed_conv` by XLA's convolution."""
    height, width = kernel.shape[:2]
    mirrored = kernel.transpose(0, 1, 3, 2)[::-1, ::-1]
    return correlated(a, mirrored, (1, 1), ((height - 1,) * 2, (width - 1,) * 2))


def _by_rows(a: Array, kernel: Array) -> Array:
    """:func:`transposed_conv`: one product with all rows of the kernel, whose results are shifted.

    Where there are few channels, XLA's convolution is a product with few columns, which fills a
    third of the vector units or less; this one has ``height`` times as many. The sum is held, since
    what comes next would shift and add anew for each of its entries.
    """
    height, width, channels, outputs = kernel.shape
    count, rows, columns, _ = a.shape
    padded = jnp.pad(a, ((0, 0), (0, 0), (width - 1,) * 2, (0, 0)))
    broad = columns + width - 1
    patches = jnp.concatenate([padded[:, :, j : j + broad] for j in range(width)], axis=-1)
    taps = kernel[:, ::-1].transpose(1, 3, 0, 2).reshape(width * outputs, height * channels)
    parts = jnp.matmul(patches, taps, precision=lax.Precision.HIGHEST)
    parts = parts.reshape(count, rows, broad, height, channels)
    shifted = (
        jnp.pad(parts[:, :, :, i], ((0, 0), (i, height - 1 - i), (0, 0), (0, 0)))
        for i in range(height)
    )
    return _held(functools.reduce(jnp.add, shifted))[0]


@functools.partial(transposed_conv.defjvp, symbolic_zeros=True)
def _transposed_conv_jvp(
    primals: tuple[Array, Array], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    """The tangent in ``a`` as the transpose of a convolution, the one in the kernel as usual."""
    a, kernel = primals
    out = transposed_conv(a, kernel)
    change = jnp.zeros_like(out)
    if not isinstance(tangents[0], SymbolicZero):
        none = ((0, 0), (0, 0))
        image = jax.linear_transpose(lambda t: correlated(t, kernel, (1, 1), none), out)
        change += image(tangents[0])[0]
    if not isinstance(tangents[1], SymbolicZero):
        change += _mirrored(a, tangents[1])
    return out, change


def correlated(x: Array, kernel: Array, strides: Pair, padding: tuple[Pair, Pair]) -> Array:
    """A convolution in the layout that is fast on CPUs, NHWC by HWIO, at the highest precision."""
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=lax.Precision.HIGHEST,
    )
