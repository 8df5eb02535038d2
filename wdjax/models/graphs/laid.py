"""Arrays that lie in memory in another order of axes than in the file, so that nothing is moved.

A file's image ``[n, C, H, W]`` lies as ``[n, H, W, C]`` here, with the order ``(0, 2, 3, 1)``. A
transposition of the file then changes the order only; axes are moved when a reshape needs it.
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MAX_SIZE = 1 << 26
"""Number of entries of one value; a file may ask for more by a few numbers."""


class Laid(NamedTuple):
    """A value of the graph: axis ``k`` of ``array`` is the file's axis ``order[k]``.

    Values known when the file is read, such as shapes, are NumPy arrays; all others are JAX's.
    """

    array: np.ndarray | jax.Array
    order: tuple[int, ...]

    @property
    def static(self):
        """Whether the value depends on neither samples nor parameters."""
        return isinstance(self.array, np.ndarray)

    @property
    def ndim(self):
        return len(self.order)

    @property
    def shape(self):
        """The file's shape."""
        return tuple(self.array.shape[self.order.index(axis)] for axis in range(self.ndim))

    def axis(self, axis):
        """A file's axis as a number from 0; a ValueError if there is none."""
        if not -self.ndim <= axis < self.ndim:
            raise ValueError(f"it names the axis {axis} of an array with {self.ndim}")
        return axis % self.ndim

    def position(self, axis):
        """Where a file's axis lies."""
        return self.order.index(self.axis(axis))

    def to(self, order):
        """The array with its axes in another order."""
        if self.order == order:
            return self.array
        moves = tuple(self.order.index(axis) for axis in order)
        return self.array.transpose(moves)

    def plain(self):
        """The array with its axes in the file's order."""
        return self.to(tuple(range(self.ndim)))

    def raised(self, ndim):
        """The value with further axes of length 1 in front."""
        more = ndim - self.ndim
        if not more:
            return self
        array = self.array.reshape((1,) * more + self.array.shape)
        return Laid(array, (*range(more), *(axis + more for axis in self.order)))

    def without(self, axes):
        """The order that is left when axes of the file are removed."""
        kept = [axis for axis in range(self.ndim) if axis not in axes]
        return tuple(kept.index(axis) for axis in self.order if axis in kept)


def straight(array):
    """A value that lies as in the file."""
    return Laid(array, tuple(range(array.ndim)))


def channels_last(ndim):
    """The order of images, sequences or volumes: samples, positions, channels."""
    return (0, *range(2, ndim), 1)


def bounded(shape):
    """The shape, or a ValueError if nothing of that size should be made."""
    if math.prod(shape) > MAX_SIZE:
        raise ValueError(f"its result has the shape {list(shape)}, more than {MAX_SIZE} numbers")
    return tuple(map(int, shape))


def transposed(value, perm):
    """The file's axes in another order: nothing is moved."""
    if sorted(perm) != list(range(value.ndim)):
        raise ValueError(f"its permutation {list(perm)} does not fit {value.ndim} axes")
    turned = Laid(value.array, tuple(perm.index(axis) for axis in value.order))
    return straight(turned.plain()) if value.static else turned


def reshaped(value, shape):
    """A reshape in the file's order. Axes are moved only if axes must be joined that do not lie
    beside each other in that order: splitting channels or joining rows and columns moves none."""
    shape = tuple(shape)
    if math.prod(shape) != math.prod(value.shape):
        raise ValueError(f"it reshapes {list(value.shape)} to {list(shape)}")
    if value.shape == shape:
        return value
    if value.order != tuple(range(value.ndim)):
        kept = _in_place(value, shape)
        if kept is not None:
            return kept
    return straight(value.plain().reshape(shape))


def _in_place(value, shape):
    """The reshaped value, if each group of axes that is reshaped to a group lies together."""
    if 0 in shape:
        return None
    groups = []
    for old, new in _groups(value.shape, shape):
        old = [axis for axis in old if value.shape[axis] > 1]
        positions = [value.order.index(axis) for axis in old]
        first = positions[0] if positions else math.inf
        if any(position != first + step for step, position in enumerate(positions)):
            return None
        groups.append((first, new))
    groups.sort(key=lambda group: group[0])
    order = tuple(itertools.chain.from_iterable(new for _, new in groups))
    return Laid(value.array.reshape([shape[axis] for axis in order]), order)


def _groups(old, new):
    """Pairs of ranges of axes with equally many entries, as short as possible, in order."""
    i = j = 0
    while i < len(old) or j < len(new):
        first, second = i, j
        left = right = 1
        while (i == first and j == second) or left != right:
            if i < len(old) and (left <= right or j == len(new)):
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        yield range(first, i), range(second, j)


def space(*values):
    """NumPy if all values are known when the file is read, or else ``jax.numpy``."""
    return np if all(value is None or value.static for value in values) else jnp
