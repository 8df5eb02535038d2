r"""Branch and bound over the signs of ReLUs' pre-activations, for the margins of one sample.

A region is split by the signs of ReLUs until every leaf is verified or the time is over. No leaf
is ever dropped: a margin's bound is the least over its leaves, closed (verified) or open, and so
valid at any time.

Source: Bunel et al. [bunel2020], Wang et al. [wang2021].
"""

import heapq
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import losses
from wdjax.attacks import PGD
from wdjax.balls import Lp
from wdjax.bounds import leaves
from wdjax.bounds.region import Box
from wdjax.core import Classifier
from wdjax.engine import driver

Numbers = npt.NDArray[Any]

ENDS = "not searched", "closed", "time", "memory", "nothing to split"
"""How the search for a sample ended. "not searched": the sample was verified already, or is
misclassified or flipped. "closed": all leaves are verified. "time", "memory": it ran out of these.
"nothing to split": a leaf that is not verified has no ReLU left to split."""

_WIDTH = 32
"""Number of leaves that are bounded at once, on a CPU."""
_STEPS, _TRIES = 3, 3
"""Ascent steps on a leaf's multipliers; number of splits that are tried for it."""
_BYTES = 2**29
"""Memory for all open leaves; beyond it the search ends."""


class _Leaf(NamedTuple):
    """An open leaf, ordered by its bound: the least is split first."""

    low: float
    number: int
    rival: int
    signs: Numbers
    multipliers: Numbers


class BranchAndBound:
    """Closes the open margins of single samples of one model, norm and box."""

    def __init__(self, model: Classifier, norm: float, box: Box, seconds: float) -> None:
        self.model, self.norm, self.box, self.seconds = model, norm, box, seconds
        self.attack = PGD(Lp(norm, box), steps=40, loss=losses.margin)
        self.width = _WIDTH if jax.default_backend() == "cpu" else 16 * _WIDTH
        self.compiled = False

    def close(
        self, x: jax.Array, y: jax.Array, eps: float, low: npt.ArrayLike
    ) -> tuple[Numbers, Numbers]:
        """Tightens bounds ``low``, ``[n, K]``, of the margins of ``x``, ``[n, *shape]``, within
        ``eps``.

        Returns the bounds, and ``[n]`` indices in ENDS. Samples that are misclassified, or flipped
        by a short attack, keep their bounds.
        """
        found = np.array(low)
        ended = np.zeros(len(found), np.int32)
        for i, row in enumerate(found):
            xi, yi, radius = x[i : i + 1], y[i : i + 1], jnp.full(1, eps, x.dtype)
            if np.all(row > 0) or self._broken(xi, yi, radius):
                continue
            if not self.compiled:
                self._close(xi, yi, radius, row, 0.0)
                self.compiled = True
            found[i], how = self._close(xi, yi, radius, row, self.seconds)
            ended[i] = ENDS.index(how)
        return found, ended

    def _broken(self, x: jax.Array, y: jax.Array, eps: jax.Array) -> bool:
        """Whether the sample is misclassified, or PGD flips it within ``eps``."""
        if int(jnp.argmax(self.model(x), axis=-1)[0]) != int(y[0]):
            return True
        found = driver.run(self.attack, self.model, x, y, eps=eps[0], diagnose=False)
        return bool(found.success[0])

    def _close(
        self, x: jax.Array, y: jax.Array, eps: jax.Array, low: Numbers, seconds: float
    ) -> tuple[Numbers, str]:
        """Branch and bound for one sample ``[1, *shape]``.

        Returns lower bounds ``[K]`` of its margins, and how it ended, one of :data:`ENDS`. ``low``
        ``[K]`` are the bounds before the search. It makes at least one iteration, then more until
        ``seconds`` are over; margins whose bound is not finite cannot be tightened.
        """
        began = time.monotonic()
        root = leaves.root(self.model, x, y, eps, self.norm, self.box)
        low = np.maximum(low, np.asarray(root.low))
        rivals = np.flatnonzero(low <= 0)
        if not rivals.size or not root.lower or not np.all(np.isfinite(low[rivals])):
            return low, "nothing to split" if rivals.size else "closed"
        frontier = _Frontier(low, rivals, root.begin(jnp.asarray(rivals)))
        while frontier.goes_on() and (not frontier.turns or time.monotonic() - began < seconds):
            batch = frontier.take(self.width)
            tries = min(_TRIES, batch.signs.shape[1])
            how = (self.norm, self.box, _STEPS, tries)
            found = leaves.bounds(self.model, x, y, eps, root, batch, *how)
            frontier.split(jax.device_get(found))
        return frontier.low(), frontier.end()


class _Frontier:
    """The leaves of one sample's search, open or stuck, and the bounds of the verified ones.

    A leaf belongs to one rival, and bounds that margin on the part of the ball where some ReLUs
    have given signs.
    """

    def __init__(self, low: Numbers, rivals: Numbers, begun: leaves.Leaves) -> None:
        self.begun, self.turns = low, 0
        self.closed = dict.fromkeys(rivals.tolist(), math.inf)
        self.open: list[_Leaf] = []
        self.taken: list[_Leaf] = []
        self.stuck: list[_Leaf] = []
        """Leaves without a ReLU left to split."""
        self.numbers = itertools.count()
        for rival, signs, multipliers in zip(*jax.device_get(begun)):
            self.add(_Leaf(float(low[rival]), 0, int(rival), signs, multipliers))
        self.most = _BYTES // sum(a[0].nbytes for a in begun)

    def goes_on(self) -> bool:
        return bool(self.open) and not self.stuck and len(self.open) < self.most

    def end(self) -> str:
        """Why the search ended, one of ENDS."""
        if self.goes_on():
            return "time"
        if self.stuck:
            return "nothing to split"
        return "memory" if self.open else "closed"

    def add(self, leaf: _Leaf) -> None:
        if leaf.low > 0:
            self.closed[leaf.rival] = min(self.closed[leaf.rival], leaf.low)
        else:
            heapq.heappush(self.open, leaf._replace(number=next(self.numbers)))

    def take(self, width: int) -> leaves.Leaves:
        """Removes the ``width`` leaves with the least bounds; the first is repeated to fill up."""
        self.turns += 1
        self.taken = [heapq.heappop(self.open) for _ in range(min(width, len(self.open)))]
        rows = self.taken + self.taken[:1] * (width - len(self.taken))
        return leaves.Leaves(
            np.array([leaf.rival for leaf in rows], np.int32),  # type: ignore[arg-type]
            np.stack([leaf.signs for leaf in rows]),  # type: ignore[arg-type]
            np.stack([leaf.multipliers for leaf in rows]),  # type: ignore[arg-type]
        )

    def split(self, found: Any) -> None:
        """Splits each taken leaf by the sign of its best neuron, or of several neurons while there
        are too few leaves for a batch. ``found``, a :class:`leaves.LeafBounds`, is of the taken
        leaves.
        """
        room = len(found.low) // (len(self.taken) + len(self.open))
        for row, leaf in enumerate(self.taken):
            leaf = leaf._replace(
                low=max(leaf.low, float(found.low[row])), multipliers=found.multipliers[row]
            )
            entries = [int(c) for c in found.choices[row] if c < len(leaf.signs)]
            if leaf.low > 0:
                self.add(leaf)
            elif not entries:
                self.stuck.append(leaf)
            else:
                depth = min(max(room.bit_length() - 1, 1), len(entries))
                for half in _halves(leaf, entries[:depth], found.children[row]):
                    self.add(half)
        self.taken = []

    def low(self) -> Numbers:
        """Lower bounds ``[K]`` of all margins."""
        least = dict(self.closed)
        for leaf in (*self.open, *self.taken, *self.stuck):
            least[leaf.rival] = min(least[leaf.rival], leaf.low)
        found = self.begun.copy()
        for rival, low in least.items():
            found[rival] = max(found[rival], low)
        return found


def _halves(leaf: _Leaf, entries: list[int], children: Numbers) -> Iterator[_Leaf]:
    """Yields a leaf for each combination of signs of the neurons ``entries``.

    ``children``, ``[C, 2]``, are bounds of the two halves of a split by each entry alone (negative,
    positive); the best of them and of the parent's is the new leaf's bound.
    """
    for pick in itertools.product((0, 1), repeat=len(entries)):
        signs, multipliers = leaf.signs.copy(), leaf.multipliers.copy()
        signs[entries], multipliers[entries] = 2 * np.array(pick) - 1, 0.0
        low = max(leaf.low, *(float(children[k, side]) for k, side in enumerate(pick)))
        yield leaf._replace(low=low, signs=signs, multipliers=multipliers)
