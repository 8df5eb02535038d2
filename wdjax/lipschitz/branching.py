r"""Branch and bound on activation masks: local Lipschitz constants of ReLU nets.

A set of masks is bounded by a zonotope and split at the neuron that contributes most to the bound.
The bound of a single mask is its Jacobian's norm; it counts if the mask's cell meets the region,
which a linear program decides. The constant is exact if no set is left when time is over, and an
upper bound otherwise.
"""

import functools
import heapq
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import distinct
from wdjax.lipschitz import cells, jacobian
from wdjax.lipschitz.cells import Polyhedron
from wdjax.lipschitz.chain import Chain
from wdjax.lipschitz.neurons import Slopes
from wdjax.precision import float64

Numbers = npt.NDArray[np.float64]

_BATCH = 64
_CLOSED = 1e-9
"""Relative gap between the bound and the largest found norm at which the search ends."""
_OUTSIDE = -1e-7
"""A cell whose distance to the region is less than this counts as touching it."""


class BoxRegion(NamedTuple):
    """Ends of a box that holds every point of a region; infinite for all of space."""

    lower: Numbers
    upper: Numbers


@dataclass
class MaskSearch:
    """The sets of masks that are left for one row of the Jacobian."""

    net: Chain
    slopes: Slopes
    region: BoxRegion
    row: Numbers
    norm: float
    open: tuple[int, ...]
    """How many slopes may be open in each layer."""
    bound: float
    """An upper bound of the constant from another method."""
    left: list[tuple[float, int, bytes]] = field(default_factory=list)
    """A heap of ``(-bound, number, signs)``."""
    found: float = 0.0
    """The largest norm of a single mask whose cell meets the region (or could not be excluded)."""
    count: int = 0
    met: bool = False
    """Whether any single mask's cell was found to meet the region."""

    def run(self, seconds: float) -> float:
        """The constant, or an upper bound of it if ``seconds`` are over first."""
        start = time.monotonic()
        width = sum(low.shape[-1] for low, _ in self.slopes)
        self._add(np.zeros((1, width), np.int8), np.array([self.bound]))
        while self.left and -self.left[0][0] > self.found * (1 + _CLOSED):
            if time.monotonic() - start > seconds:
                break
            self._turn()
        if not (self.left or self.met):  # Some cell must meet the region: distrust the search.
            return self.bound
        most = -self.left[0][0] if self.left else 0.0
        return min(max(most, self.found), self.bound)

    def _turn(self) -> None:
        """One iteration: takes the sets with the largest bounds, and splits each at one neuron.

        At most half a batch is taken. Both halves return to the heap with their own bounds; a set
        of a single mask is decided by :meth:`_leaf` instead; sets that cannot exceed the largest
        norm found are dropped.
        """
        taken = [heapq.heappop(self.left) for _ in range(min(_BATCH // 2, len(self.left)))]
        signs = np.stack([np.frombuffer(entry[2], np.int8) for entry in taken])
        limits = np.array([-entry[0] for entry in taken])
        real = limits > self.found * (1 + _CLOSED)
        signs, limits = signs[real], limits[real]
        _, choices = self._measured(signs)
        halves = []
        for these, limit, choice in zip(signs, limits, choices):
            if choice < 0:
                self._leaf(these, limit)
                continue
            for sign in (1, -1):
                half = these.copy()
                half[choice] = sign
                halves.append((half, limit))
        if halves:
            self._add(np.stack([h for h, _ in halves]), np.array([t for _, t in halves]))

    def _add(self, signs: npt.NDArray[np.int8], limits: Numbers) -> None:
        """Puts sets of masks ``signs`` ``[B, neurons]`` on the heap, each with an upper bound.

        The bound is the smaller one of the set's own and of ``limits`` ``[B]``, its parent's.
        """
        sizes, _ = self._measured(signs)
        for mask, size, limit in zip(signs, sizes, limits):
            self.count += 1
            heapq.heappush(self.left, (-min(float(size), float(limit)), self.count, mask.tobytes()))

    def _measured(self, signs: npt.NDArray[np.int8]) -> tuple[Numbers, npt.NDArray[np.int_]]:
        """:func:`_measure` of at most ``_BATCH`` sets of masks, padded to ``_BATCH``."""
        padded = np.zeros((_BATCH, signs.shape[1]), np.int8)
        padded[: len(signs)] = signs
        with float64():
            found = _measure(self.net, self.slopes, padded, self.row, self.norm, self.open)
        sizes, choices = (np.asarray(t)[: len(signs)] for t in found)
        return sizes, choices

    def _leaf(self, signs: npt.NDArray[np.int8], limit: float) -> None:
        """Decides a single mask whose Jacobian's row has the norm ``limit``.

        The norm counts if the mask's cell meets the region, which a linear program decides; it is
        skipped if the norm would not raise the largest one found.
        """
        if limit <= self.found:
            self.met = True
            return
        low = np.concatenate([np.asarray(t) for t, _ in self.slopes])
        on = np.where(signs == 0, low > 0, signs > 0)
        starts = np.cumsum([0, *(len(bias) for bias in self.net.biases[:-1])])
        blocks = [
            on[start + kept : start + len(bias)]
            for start, kept, bias in zip(starts, self.net.kept, self.net.biases)
        ]
        shape = cells.polyhedron(self.net, np.concatenate(blocks))
        if _room(shape, self.region) > _OUTSIDE:
            self.met, self.found = True, limit


def _room(shape: Polyhedron, region: BoxRegion) -> float:
    """How far inside a cell a point of the region can be; negative if cell and region are apart.

    The largest distance to the cell's faces, at most 1, by a linear program over the region's box.
    """
    from scipy.optimize import linprog

    n = shape.normals.shape[1]
    if not len(shape.levels):
        return 1.0
    rows = np.hstack([shape.normals, np.ones((len(shape.levels), 1))])
    ends = zip(
        [None if end == -np.inf else end for end in region.lower],
        [None if end == np.inf else end for end in region.upper],
    )
    goal = np.append(np.zeros(n), -1.0)
    found = linprog(goal, rows, shape.levels, bounds=[*ends, (None, 1.0)], method="highs")
    if found.status != 0:
        raise RuntimeError(f"HiGHS could not decide whether a cell is met: {found.message}")
    return float(found.x[n])


@functools.partial(distinct.jit, static_argnums=(4, 5))
def _measure(
    net: Chain,
    slopes: Slopes,
    signs: jax.Array,
    row: jax.Array,
    norm: float,
    open_: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Upper bounds ``[B]`` of sets of masks by zonotopes, and the neuron to split next, ``[B]``.

    ``signs``, ``[B, neurons]``, are 1 (on), -1 (off) or 0 (as in ``slopes``). The neuron is the one
    that contributes most to the bound, -1 for sets of a single mask. ``open_`` is the largest
    number of undecided neurons in each layer.
    """

    def one(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        given, start = [], 0
        for low, high in slopes:
            part = mask[start : start + low.shape[-1]]
            start += low.shape[-1]
            given.append((jnp.where(part > 0, 1.0, low), jnp.where(part < 0, 0.0, high)))
        found, scores = jacobian.row_zonotope(net, tuple(given), row, norm, open_)
        # Open slopes without influence on the bound are split last.
        left = jnp.concatenate([high - low for low, high in given])
        score = jnp.concatenate(scores) + 1e-300
        choice = jnp.argmax(jnp.where(left > 0, score, -1.0))
        return found, jnp.where(jnp.any(left > 0), choice, -1)

    return jax.vmap(one)(signs)
