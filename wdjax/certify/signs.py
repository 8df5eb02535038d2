r"""Proofs that linear functions of the outputs are positive, by splits by the signs of ReLUs.

A region is split by the signs of ReLUs until every leaf is verified or the time is over. No leaf
is ever dropped: a function's bound is the least over its leaves, closed (verified) or open, and so
valid at any time. Leaves without a ReLU left to split are bounded again, by more steps, once all
others are closed.

Source: Bunel et al. [bunel2020], Wang et al. [wang2021].
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from wdjax import xla_cpu
from wdjax.bounds import leaves
from wdjax.bounds.region import Norm
from wdjax.certify.recorded import SplitRecord
from wdjax.core import Classifier

Numbers = npt.NDArray[Any]

_WIDTH = 32
"""Number of leaves that are bounded at once, on a CPU."""
_STEPS, _TRIES = 12, 3
"""Most ascent steps on a leaf's multipliers; number of splits that are tried for it."""
_AGAIN, _GAIN = 3, 0.01
"""Leaves without a ReLU left are bounded again at most so often in a row, while no bound rises by
more than this share of itself."""
MEMORY = 2**29
"""Bytes for all open leaves; beyond it the search ends."""
Check = Callable[[Numbers], Any]
"""Takes points ``[L, *shape]`` of a region; returns what shows that one violates, or None."""


class _Leaf(NamedTuple):
    """An open leaf, one entry of :class:`leaves.Leaves`, ordered by its bound.

    The leaf with the least bound is split first.
    """

    low: float
    number: int
    row: int
    signs: Numbers
    multipliers: Numbers
    lower: Numbers
    upper: Numbers
    node: Any = None
    """The leaf in a proof."""


class Searched(NamedTuple):
    """What a search over signs found."""

    low: Numbers
    """``[R]`` lower bounds of all functions."""
    ended: str
    """One of ``branch.ENDS``."""
    leaves: int
    witness: Any
    """What the check returned, or None."""
    entry: int | None = None
    """The neuron that was split first."""
    pace: float = 0.0
    """Seconds a leaf in the fastest turn; slower turns may include compilation."""


def width() -> int:
    """Number of leaves that are bounded at once on the default device."""
    return xla_cpu.at_once(_WIDTH)


class SignSearch(NamedTuple):
    """What stays fixed during a search over signs."""

    model: Classifier
    problem: leaves.RegionProblem
    norm: Norm
    root: leaves.RootBounds
    check: Check
    record: SplitRecord | None = None
    """Of a proof that is written: a leaf then counts as closed only if the checker agrees."""

    def run(self, frontier: "Frontier", until: float, most: float = math.inf) -> Searched:
        """Splits leaves until all are closed or a violation is found, or until the frontier has
        bounded ``most`` leaves in all, or time or memory is used up.

        A later call goes on; a new frontier gets at least one turn.
        """
        wide, pace = width(), math.inf
        while frontier.goes_on() and (not frontier.turns or time.monotonic() < until):
            if frontier.bounded >= most:
                break
            began, batch = time.monotonic(), frontier.take(wide)
            tries = min(_TRIES, batch.signs.shape[1])
            found = jax.device_get(
                leaves.bounds(
                    self.model, self.problem, self.root, batch,
                    norm=self.norm, steps=_STEPS, tries=tries,
                )
            )  # fmt: skip
            open_ = ~(found.low > 0)
            witness = self.check(found.points[open_]) if np.any(open_) else None
            frontier.split(found)
            pace = min(pace, (time.monotonic() - began) / wide)
            if witness is not None:
                return Searched(frontier.low(), "flipped", frontier.bounded, witness)
        return Searched(
            frontier.low(), frontier.end(), frontier.bounded, None, frontier.entry, pace
        )


class Frontier:
    """All open leaves, and for each function the least bound of its closed leaves."""

    def __init__(
        self, low: Numbers, begun: leaves.Leaves, record: SplitRecord | None = None
    ) -> None:
        self.begun, self.turns, self.bounded, self.record = low, 0, 0, record
        self.entry: int | None = None
        self.closed = dict.fromkeys(np.asarray(begun.row).tolist(), math.inf)
        self.open: list[_Leaf] = []
        self.taken: list[_Leaf] = []
        self.stuck: list[_Leaf] = []
        """Leaves without a ReLU left to split."""
        self.idle = 0
        """How often the stuck leaves were bounded again since a leaf gained."""
        self.crowded = False
        """Whether the open leaves have taken up half of the memory, so that the youngest ones were
        split in place of those with the least bounds."""
        self.numbers = itertools.count()
        for row, *rest in zip(*jax.device_get(begun)):
            node = None if record is None else record.begin(int(row))
            known = float(low[row]) if record is None else min(float(low[row]), 0.0)
            signs, multipliers, lower, upper = rest
            self.add(_Leaf(known, 0, int(row), signs, multipliers, lower, upper, node))
        own = begun.signs, begun.multipliers  # A child shares its parent's ends.
        self.most = MEMORY // sum(part[0].nbytes for part in own)

    def goes_on(self) -> bool:
        if not self.open and self.stuck and self.idle < _AGAIN:
            self.idle += 1
            for leaf in self.stuck:
                heapq.heappush(self.open, leaf)
            self.stuck = []
        return bool(self.open) and len(self.open) + len(self.stuck) < self.most

    def close(self, row: int) -> None:
        """Stops work on a function that another search has proved to be above 0."""
        self.closed[row] = min(self.closed[row], 0.0)
        self.open = [leaf for leaf in self.open if leaf.row != row]
        self.stuck = [leaf for leaf in self.stuck if leaf.row != row]
        heapq.heapify(self.open)

    def end(self) -> str:
        """Why the search ended, one of ``branch.ENDS``."""
        if self.stuck and not self.open:
            return "nothing to split"
        if not self.open:
            return "closed"
        return "memory" if len(self.open) + len(self.stuck) >= self.most else "time"

    def add(self, leaf: _Leaf) -> None:
        if leaf.low > 0:
            self.closed[leaf.row] = min(self.closed[leaf.row], leaf.low)
        else:
            heapq.heappush(self.open, leaf._replace(number=next(self.numbers)))

    def take(self, width: int) -> leaves.Leaves:
        """Removes ``width`` leaves; the first is repeated to fill up.

        Those with the least bounds, while the open leaves take up less than half of the memory;
        then the youngest ones, of which few are open at a time.
        """
        self.turns += 1
        many = 2 * len(self.open) >= self.most
        self.crowded |= many
        if many:
            self.open.sort(key=lambda leaf: leaf.number)
            self.taken = self.open[-width:]
            del self.open[-width:]
            heapq.heapify(self.open)
        else:
            self.taken = [heapq.heappop(self.open) for _ in range(min(width, len(self.open)))]
        self.bounded += len(self.taken)
        rows = self.taken + self.taken[:1] * (width - len(self.taken))
        return leaves.Leaves(
            np.array([leaf.row for leaf in rows], np.int32),  # type: ignore[arg-type]
            np.stack([leaf.signs for leaf in rows]),  # type: ignore[arg-type]
            *(np.stack(part) for part in zip(*(leaf[4:7] for leaf in rows))),  # type: ignore[arg-type]
        )

    def split(self, found: Any) -> None:
        """Splits each taken leaf by the sign of its best neuron, or of several neurons while there
        are too few leaves for a batch. ``found``, a :class:`leaves.LeafBounds`, is of the taken
        leaves.
        """
        room, born = len(found.low) // (len(self.taken) + len(self.open)), list[_Leaf]()
        bounded = [
            leaf._replace(low=max(leaf.low, float(low)), multipliers=multipliers)
            for leaf, low, multipliers in zip(self.taken, found.low, found.multipliers)
        ]
        for place, leaf in enumerate(self._agreed(bounded)):
            before = self.taken[place].low
            entries = [int(c) for c in found.choices[place] if c < len(leaf.signs)]
            if leaf.low > before + _GAIN * abs(before):
                self.idle = 0
            if leaf.low > 0:
                self.add(leaf)
            elif not entries:
                self.stuck.append(leaf)
            else:
                self.entry = entries[0] if self.entry is None else self.entry
                entries = entries[: max(room.bit_length() - 1, 1)]
                born += _children(leaf, entries, found.children[place], self.record)
        for child in self._agreed(born):
            self.add(child)
        self.taken = []

    def _agreed(self, some: list[_Leaf]) -> list[_Leaf]:
        """The leaves; one that the proof's checker does not close gets the bound 0, and stays
        open."""
        claimed = [place for place, leaf in enumerate(some) if leaf.low > 0]
        if self.record is not None and claimed:
            done = self.record.closed_leaves([some[place] for place in claimed])
            for place in itertools.compress(claimed, ~done):
                some[place] = some[place]._replace(low=0.0)
        return some

    def low(self) -> Numbers:
        """Lower bounds ``[R]`` of all functions."""
        least = dict(self.closed)
        for leaf in (*self.open, *self.taken, *self.stuck):
            least[leaf.row] = min(least[leaf.row], leaf.low)
        found = self.begun.copy()
        for row, low in least.items():
            found[row] = max(found[row], low)
        return found


def _children(
    leaf: _Leaf, entries: list[int], children: Numbers, record: SplitRecord | None
) -> Iterator[_Leaf]:
    """Yields the ``2^E`` children of a leaf, one for each combination of signs of ``E`` neurons.

    ``entries`` are the neurons' indices. ``children``, ``[C, 2]`` with ``C >= E``, has in row k the
    lower bounds of both halves (negative, positive) if ``entries[k]`` alone splits the leaf. A
    child lies in one half of each row: its bound is the largest of theirs and of the leaf's.
    """
    nodes = [leaf.node]
    for entry in entries:
        both = ((None, None) if record is None else record.split(node, entry) for node in nodes)
        nodes = list(itertools.chain(*both))
    for node, pick in zip(nodes, itertools.product((0, 1), repeat=len(entries))):
        signs, multipliers = leaf.signs.copy(), leaf.multipliers.copy()
        signs[entries], multipliers[entries] = 2 * np.array(pick) - 1, 0.0
        low = max(leaf.low, *(float(children[k, side]) for k, side in enumerate(pick)))
        yield leaf._replace(low=low, signs=signs, multipliers=multipliers, node=node)
