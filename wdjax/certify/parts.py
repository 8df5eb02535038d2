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
from wdjax.certify.signs import Check, Searched, SignSearch
from wdjax.core import Classifier

Numbers = npt.NDArray[Any]

_FIRST = 0.05
"""Share of the time in which the whole region is searched at once."""
_ROUNDS, _FEW = 4, 128
"""Rounds that bound the operands of a part; number of leaves after which it is halved."""
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
    searched, begun = SignSearch(model, problem, norm, root, check, record), time.monotonic()
    whole, left = root.begin(jnp.asarray(rows)), max(until - begun, 0.0)
    if record is not None:
        return searched.run(whole, low, until)
    found = searched.run(whole, low, begun + _FIRST * left)
    if found.ended != "time" or left == 0:
        return found
    ends = 2 * np.sum((np.asarray(whole.lower[0]) < 0) & (np.asarray(whole.upper[0]) > 0))
    rows = rows[found.low[rows] <= 0]
    if 2 * ends * found.pace > _DEAR * left:
        return searched.run(root.begin(jnp.asarray(rows)), found.low, until)
    return _by_parts(searched, rows, found, until)


def _by_parts(searched: SignSearch, rows: Numbers, known: Searched, until: float) -> Searched:
    """Closes the functions ``rows`` that a first search left open, the nearest to it first."""
    low, count, ended = known.low, known.leaves, "closed"
    for row in sorted(rows, key=lambda row: -low[row]):
        found = _PartSearch(searched, int(row), low, until).run()
        low, count = found.low, count + found.leaves
        if found.witness is not None:
            return found._replace(leaves=count)
        ended = found.ended if ended == "closed" else ended
    return Searched(low, ended, count, None)


class _PartSearch:
    """The search for one function, the row ``row``; every part that is not closed is in ``open``
    or ``stuck``."""

    def __init__(self, searched: SignSearch, row: int, low: Numbers, until: float) -> None:
        self.searched, self.row, self.low, self.until = searched, row, low, until
        self.bounded = 0
        begun: Any = jax.device_get(searched.root.begin(jnp.asarray([row])))
        self.open = [_Part(float(low[row]), Leaves(*(entries[0] for entries in begun)))]
        self.stuck: list[_Part] = []

    def run(self) -> Searched:
        """Closes parts, the last first, until all are closed or the time is over."""
        if time.monotonic() < self.until:
            self.open = self._bounded_anew(self.open)
        while self.open:
            if time.monotonic() >= self.until:
                return self._outcome("time")
            part = self.open[-1]
            if part.empty:
                self.open.pop()
                continue
            found = self._leaves(part)
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
                self.open += self._bounded_anew(list(part.halves(found.entry)))
        return self._outcome("nothing to split" if self.stuck else "closed")

    def _leaves(self, part: _Part) -> Searched:
        """A short search of the leaves of a part."""
        low = self.low.copy()
        low[self.row] = part.low
        alone = jax.tree.map(lambda entries: entries[None], part.leaf)
        return self.searched.run(alone, low, self.until, _FEW)

    def _bounded_anew(self, parts: Sequence[_Part]) -> list[_Part]:
        """Up to two parts with tighter ends of their operands."""
        given = self.searched
        both = [*parts, *parts[:1]][:2]  # One program for one and for two.
        found = jax.tree.map(lambda *entries: np.stack(entries), *(part.leaf for part in both))
        for _ in range(_ROUNDS):
            lower, upper = jax.device_get(
                output_constraint.tightened(
                    given.model, given.problem, given.root, found, norm=given.norm
                )
            )
            found = found._replace(lower=lower, upper=upper)
            if np.all(np.any(lower > upper, axis=1)) or time.monotonic() >= self.until:
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
