r"""Branch and bound over signs, part by part where the whole region is not closed soon.

In each part the ReLUs' pre-activations are bounded anew, at the points where the function is at
most 0: without any such point the function is positive. Then the leaves of the part are searched
for a moment; a part that they do not close is halved by the sign of the ReLU that loosens it most.

Source: Wang et al. [wang2021]; the bounds of parts, Kotha et al. [kotha2023].
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax.bounds import leaves, output_constraint
from wdjax.bounds.leaves import Leaves
from wdjax.bounds.region import Norm
from wdjax.certify.recorded import SignRecord
from wdjax.certify.signs import Check, Frontier, Searched, SignSearch
from wdjax.core import Classifier

Numbers = npt.NDArray[Any]

_FIRST = 0.05
"""Share of the time in which the whole region is searched at once."""
_ROUNDS, _GAIN = 8, 0.05
"""Most rounds that bound the operands of a part; the least share of an operand's range that a round
takes away for the next one to bound it again, which halves the time."""
_FEW = 128
"""Number of leaves after which a part is halved."""
_DEAR = 0.1
"""Parts are searched if a round for two of them takes at most this share of the time: an end of an
operand takes no longer than a leaf."""
PROVED = float(np.finfo(np.float32).tiny)
"""The bound of what is proved in parts: above 0, and no more is known, since their bounds hold only
where the function is at most 0."""


class _Part(NamedTuple):
    """A part of the region for one function."""

    low: float
    """The function's lower bound, at most 0."""
    leaf: Leaves
    """The part as one leaf, without the axis of leaves."""

    @property
    def empty(self) -> bool:
        """Whether the function is at most 0 nowhere."""
        return bool(np.any(self.leaf.lower > self.leaf.upper))

    def halves(self, entry: int) -> Iterator["_Part"]:
        """Both halves by the sign of an operand."""
        for sign in (-1, 1):
            signs: Any = np.array(self.leaf.signs)
            signs[entry] = sign
            yield self._replace(leaf=self.leaf._replace(signs=signs))


def search(
    model: Classifier,
    problem: leaves.RegionProblem,
    norm: Norm,
    root: leaves.RootBounds,
    rows: Numbers,
    low: Numbers,
    until: float,
    check: Check,
    record: SignRecord | None = None,
) -> Searched:
    """Closes the functions ``rows`` of a problem, with bounds ``low``, ``[R]``, known before.

    Takes at least one turn, then more until ``time.monotonic()`` reads ``until``. A ``record`` of a
    proof has leaves of the whole region only, since its checker knows no bounds of parts.
    """
    if not rows.size or not root.lower or not np.all(np.isfinite(low[rows])):
        return Searched(low, "nothing to split" if rows.size else "closed", 0, None)
    now = time.monotonic()
    left, begun = max(until - now, 0.0), root.begin(jnp.asarray(rows))
    searched = SignSearch(model, problem, norm, root, check, record)
    whole = Frontier(low, begun, record)
    found = searched.run(whole, until if record is not None else now + _FIRST * left)
    if record is not None or found.ended != "time" or not left:
        return found
    ends = 2 * np.sum((np.asarray(begun.lower[0]) < 0) & (np.asarray(begun.upper[0]) > 0))
    if 2 * ends * found.pace > _DEAR * left:
        return searched.run(whole, until)
    return _InTurn(searched, whole, rows, found, until).run(_FIRST * left)


class _InTurn:
    """The search of parts, one function after another, and of the whole region, in turn."""

    def __init__(
        self, searched: SignSearch, whole: Frontier, rows: Numbers, known: Searched, until: float
    ) -> None:
        self.searched, self.whole, self.rows, self.until = searched, whole, rows, until
        self.low, self.witness = known.low, None
        nearest = sorted(rows[known.low[rows] <= 0], key=lambda row: -known.low[row])
        self.parts = [_PartSearch(searched, int(row), known.low) for row in nearest]
        self.todo = list(self.parts)

    def run(self, seconds: float) -> Searched:
        """Searches parts for so long, then the whole region, then each for twice as long."""
        while self._goes_on():
            end = min(time.monotonic() + seconds, self.until)
            while self.todo and time.monotonic() < end and self.witness is None:
                self._searched_parts(end)
            if self.whole.open and self._goes_on():
                end = min(time.monotonic() + seconds, self.until)
                self._take(self.searched.run(self.whole, end))
                self.todo = [part for part in self.todo if not self.low[part.row] > 0]
            seconds *= 2
        count = self.whole.bounded + sum(part.bounded for part in self.parts)
        return Searched(self.low, self._end(), count, self.witness)

    def _goes_on(self) -> bool:
        open_ = np.any(self.low[self.rows] <= 0) and (self.todo or self.whole.goes_on())
        return bool(open_) and self.witness is None and time.monotonic() < self.until

    def _end(self) -> str:
        if self.witness is not None:
            return "flipped"
        if np.all(self.low[self.rows] > 0):
            return "closed"
        return "time" if time.monotonic() >= self.until else self.whole.end()

    def _searched_parts(self, end: float) -> None:
        """Goes on with the parts of the first function that is left."""
        part = self.todo[0]
        found = part.run(end)
        self._take(found)
        if found.ended == "closed":
            self.whole.close(part.row)
        if found.ended != "time":
            self.todo.pop(0)

    def _take(self, found: Searched) -> None:
        self.low = np.maximum(self.low, found.low)
        self.witness = found.witness


class _PartSearch:
    """The search for one function, the row ``row``; every part that is not closed is in ``open``
    or ``stuck``."""

    def __init__(self, searched: SignSearch, row: int, low: Numbers) -> None:
        self.searched, self.row, self.low, self.bounded = searched, row, low, 0
        begun: Any = jax.device_get(searched.root.begin(jnp.asarray([row])))
        self.open = [_Part(float(low[row]), Leaves(*(entries[0] for entries in begun)))]
        self.stuck: list[_Part] = []

    def run(self, until: float) -> Searched:
        """Closes parts, the last first, until all are closed or the time is over."""
        if not self.bounded and time.monotonic() < until:
            self.open = self._bounded_anew(self.open, until)
        while self.open:
            if time.monotonic() >= until:
                return self._outcome("time")
            part = self.open[-1]
            if part.empty:
                self.open.pop()
                continue
            found = self._leaves(part, until)
            self.bounded += found.leaves
            if found.witness is not None:
                return self._outcome("flipped", found.witness)
            self.open.pop()
            part = part._replace(low=float(found.low[self.row]))
            if found.ended == "closed":
                continue
            if found.entry is None:
                self.stuck.append(part)
            else:
                self.open += self._bounded_anew(list(part.halves(found.entry)), until)
        return self._outcome("nothing to split" if self.stuck else "closed")

    def _leaves(self, part: _Part, until: float) -> Searched:
        """A short search of the leaves of a part."""
        low = self.low.copy()
        low[self.row] = part.low
        alone = jax.tree.map(lambda entries: entries[None], part.leaf)
        return self.searched.run(Frontier(low, alone), until, _FEW)

    def _bounded_anew(self, parts: Sequence[_Part], until: float) -> list[_Part]:
        """Up to two parts with tighter ends of their operands."""
        given = self.searched
        both = [*parts, *parts[:1]][:2]  # One program for one and for two.
        found = jax.tree.map(lambda *entries: np.stack(entries), *(part.leaf for part in both))
        wanted = np.ones(found.lower.shape, bool)
        for _ in range(_ROUNDS):
            lower, upper = jax.device_get(
                output_constraint.tightened(
                    given.model, given.problem, given.root, found, wanted, norm=given.norm
                )
            )
            wanted = upper - lower < (1 - _GAIN) * (found.upper - found.lower)
            wanted &= np.all(lower <= upper, axis=1, keepdims=True)
            found = found._replace(lower=lower, upper=upper)
            if not np.any(wanted) or time.monotonic() >= until:
                break
        usual = np.where(found.signs == 0, found.upper > -found.lower, False)
        found = found._replace(multipliers=usual.astype(found.multipliers.dtype))
        return [
            part._replace(leaf=jax.tree.map(lambda entries, k=k: entries[k], found))
            for k, part in enumerate(parts)
        ]

    def _outcome(self, ended: str, witness: Any = None) -> Searched:
        """The bounds, with that of the row: the least over its parts."""
        low = self.low.copy()
        least = min([PROVED, *(part.low for part in (*self.open, *self.stuck))])
        low[self.row] = max(low[self.row], least)
        return Searched(low, ended, self.bounded, witness)
