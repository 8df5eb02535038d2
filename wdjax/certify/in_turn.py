r"""Branch and bound by three searches in turn, since none is the fastest everywhere.

Leaves of the whole region cost least, and suffice where the bounds are nearly above 0. Subdomains
by the signs of the first layers close deep nets; they are split at the operands of other functions
than ReLU, too. Parts, bounded only where the function is at most 0, close wide nets.

Source: Wang et al. [wang2021], Henriksen and Lomuscio [henriksen2020], Kotha et al. [kotha2023].
"""

import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax.bounds import leaves
from wdjax.bounds.region import Norm
from wdjax.certify.parts import PartSearch
from wdjax.certify.recorded import SplitRecord
from wdjax.certify.signs import Check, Frontier, Searched, SignSearch, width
from wdjax.certify.subdomains import SubdomainSearch
from wdjax.core import Classifier

Numbers = npt.NDArray[Any]

_SMALL, _SOONER = 2**11, 0.2
"""Maximum number of operands with which subdomains are searched first, and for how long, as a share
of the time of their first step, which compiles. Where they suffice, the program of leaves, which
takes twice as long to compile, is not needed."""
_LONGER = 0.5
"""For how long leaves are split within CROWN's bounds after a step that compiled, as a share of its
time: optimised slopes would take as long to compile."""
_FIRST = 0.02
"""Share of the time for the first turn of each search; every later one is twice as long."""
_DEAR = 0.1
"""A search takes turns only if its first step should take at most this share of the time."""
_TURNS, _LEAST = 3, 0.01
"""The search of subdomains ends if, from that turn on, it has closed less of the region."""
_DEEP = 32
"""It ends after any turn if it has bounded so many batches without closing one subdomain: it
splits the youngest first, so that these are as many splits deep."""
_SURE = 0.1
"""A search that has closed at least this share of the region is expected to close the rest at the
same pace. It gets that time at once if it is left: in turns, the others would take as much again.
"""
_HALF = 0.5
"""The search of the whole region waits while another one closes parts of it, once its open leaves
fill half of the memory and a turn has left more than this share of its bounds' distance from 0."""
_MOST = 2**26
"""Subdomains are searched only if one batch has at most so many coefficients: one for each open
function, subdomain and operand."""
_COPIES = 8
"""Numbers for each of these coefficients where multipliers are optimised, with Adam's moments."""
_PASSES = 40
"""About how many backward passes a leaf of the whole region takes; gives the time of one pass."""
_ROOT = 16
"""About how many times the bounds of a subdomain the bounds of the root cost."""


class _Search(Protocol):
    """One of the searches; it goes on where it was."""

    @property
    def share(self) -> float:
        """What it has closed of the region, if every split is a halving; 0 if it does not know."""

    def run(self, until: float) -> Searched: ...

    def close(self, row: int) -> None:
        """Stops work on a function that another search has proved to be above 0."""


class _Whole:
    """The search of leaves of the whole region."""

    share = 0.0

    def __init__(self, given: SignSearch, frontier: Frontier) -> None:
        self.given, self.frontier, self.stalls = given, frontier, False

    def run(self, until: float) -> Searched:
        before = _gap(self.frontier.low())
        found = self.given.run(self.frontier, until)
        self.stalls = self.frontier.crowded and _gap(found.low) > _HALF * before
        return found

    def close(self, row: int) -> None:
        self.frontier.close(row)


class _Parts:
    """The searches of parts, one function after another, those with the highest bounds first."""

    def __init__(self, given: SignSearch, rows: Numbers, low: Numbers) -> None:
        self.low, self.bounded = low, 0
        nearest = sorted(rows, key=lambda row: -low[row])
        self.todo = [PartSearch(given, int(row), low) for row in nearest]
        self.count = len(self.todo)

    @property
    def share(self) -> float:
        """That of all functions; the search of one goes through the same region."""
        done = self.count - len(self.todo)
        return (done + (self.todo[0].share if self.todo else 0.0)) / self.count

    def run(self, until: float) -> Searched:
        ended = "closed"
        while self.todo:
            part = self.todo[0]
            before = part.bounded
            found = part.run(until)
            self.bounded += part.bounded - before
            self.low = np.maximum(self.low, found.low)
            if found.ended in ("time", "flipped"):
                return found._replace(low=self.low, leaves=self.bounded)
            ended = ended if found.ended == "closed" else found.ended
            self.todo.pop(0)
        return Searched(self.low, ended, self.bounded, None)

    def close(self, row: int) -> None:
        self.todo = [part for part in self.todo if part.row != row]


def search(
    model: Classifier,
    problem: leaves.RegionProblem,
    norm: Norm,
    root: leaves.RootBounds,
    rows: Numbers,
    low: Numbers,
    until: float,
    check: Check,
    record: SplitRecord | None = None,
) -> Searched:
    """Closes the functions ``rows`` of a problem, with bounds ``low``, ``[R]``, known before.

    Takes at least one turn, then more until ``time.monotonic()`` reads ``until``. With the
    ``record`` of a proof only leaves of the whole region are searched: its checker knows no bounds
    of parts.
    """
    splits = root.lower or root.others[0]
    if not rows.size or not splits or not np.all(np.isfinite(low[rows])):
        return Searched(low, "nothing to split" if rows.size else "closed", 0, None)
    given = SignSearch(model, problem, norm, root, check, record)
    if record is not None and root.others[0]:
        return _recorded(given, rows, low, until)
    if not root.lower:
        return _subdomains_alone(given, rows, low, until)
    begun = root.begin(jnp.asarray(rows))
    if record is not None:
        return given.run(Frontier(low, begun, record), until)
    left, early, before = max(until - time.monotonic(), 0.0), None, 0
    if left and _subdomains_first(root, rows):
        early = SubdomainSearch(given, rows, low)
        sooner = _shortly(early, until)
        if sooner.ended in ("closed", "flipped"):
            return sooner
        if time.monotonic() >= until:
            return sooner._replace(ended="time")
        low, before = sooner.low, sooner.leaves
    frontier = Frontier(low, begun)
    found = given.run(frontier, time.monotonic() + _FIRST * left)
    if found.ended == "time" and left and frontier.turns == 1:  # That turn compiled: take another.
        found = given.run(frontier, until, frontier.bounded + 1)
    open_ = rows[found.low[rows] <= 0]
    if found.ended == "nothing to split" and root.others[0]:
        more = _subdomains_alone(given, open_, found.low, until)
        return more._replace(leaves=before + found.leaves + more.leaves)
    if found.ended != "time" or not left:
        return found._replace(leaves=before + found.leaves)
    ends = 2 * int(np.sum((np.asarray(begun.lower[0]) < 0) & (np.asarray(begun.upper[0]) > 0)))
    searches: list[_Search] = [_Whole(given, frontier)]
    if 2 * ends * found.pace <= _DEAR * left:
        searches.insert(0, _Parts(given, open_, found.low))
    cost = ends * width() / _PASSES
    if early is not None:
        for row in np.setdiff1d(rows, open_):
            early.close(int(row))
    elif cost * found.pace <= _DEAR * left and _fits(root, open_):
        early = SubdomainSearch(given, open_, found.low)
    if early is not None:
        searches.insert(0, early)
    return _in_turn(searches, rows, found, until, _FIRST * left)


def first_turn(given: SignSearch, rows: Numbers, low: Numbers, until: float) -> Searched:
    """The first search of :func:`search` for a short time: subdomains, or leaves of the whole
    region for the time of one turn.

    Does nothing without a ReLU.
    """
    left, root = until - time.monotonic(), given.root
    known = bool(root.lower) and np.all(np.isfinite(low[rows]))
    if left <= 0 or not known:
        return Searched(low, "nothing to split", 0, None)
    if _subdomains_first(root, rows):
        return _shortly(SubdomainSearch(given, rows, low), until)
    frontier, began = Frontier(low, root.begin(jnp.asarray(rows))), time.monotonic()
    found = given.run(frontier, began + _FIRST * left)
    if found.ended == "time" and frontier.turns == 1:  # That turn compiled.
        now = time.monotonic()
        found = given.run(frontier, min(now + _LONGER * (now - began), until))
    return found


def _subdomains_first(root: leaves.RootBounds, rows: Numbers) -> bool:
    return _operands(root) <= _SMALL and _fits(root, rows)


def _shortly(early: SubdomainSearch, until: float) -> Searched:
    """One step of a new search, and then a share of the time that it took."""
    began = time.monotonic()
    found = early.run(began)
    if found.ended != "time":
        return found
    now = time.monotonic()
    return early.run(min(now + _SOONER * (now - began), until))


def _subdomains_alone(given: SignSearch, rows: Numbers, low: Numbers, until: float) -> Searched:
    """The search of subdomains, unless one step would take too much of the time.

    Without any time left a first step compiles its program for later searches.
    """
    began, left = time.monotonic(), until - time.monotonic()
    jax.block_until_ready(leaves.root(given.model, given.problem, given.norm))
    step = (time.monotonic() - began) * width() / _ROOT
    if (left > 0 and step > _DEAR * left) or not _fits(given.root, rows):
        return Searched(low, "nothing to split", 0, None)
    return SubdomainSearch(given, rows, low).run(until)


def _recorded(given: SignSearch, rows: Numbers, low: Numbers, until: float) -> Searched:
    """The search of subdomains for a proof, one function after another."""
    count = 0
    for row in rows:
        found = SubdomainSearch(given, np.array([row]), low).run(until)
        low, count = found.low, count + found.leaves
        if found.ended != "closed":
            return found._replace(leaves=count)
    return Searched(low, "closed", count, None)


def _fits(root: leaves.RootBounds, rows: Numbers) -> bool:
    """Whether the search of subdomains may have its coefficients of the functions ``rows``."""
    copies = _COPIES if root.others[0] else 1
    return len(rows) * width() * _operands(root) * copies <= _MOST


def _operands(root: leaves.RootBounds) -> int:
    """The number of operands that may be split."""
    return sum(end.size for end in root.of_all().lower.values())


def _in_turn(
    searches: list[_Search], rows: Numbers, known: Searched, until: float, seconds: float
) -> Searched:
    """Gives each search so many ``seconds``, then twice as many, and so on; more to one that is
    expected to end in the time that is left.

    The last search is that of the whole region; ``known`` is what it has found.
    """
    low, counts, ended = known.low, dict.fromkeys(searches, 0), known.ended
    counts[searches[-1]] = known.leaves
    left, turn, spent = list(searches), 0, dict.fromkeys(searches, 0.0)
    while left and np.any(low[rows] <= 0) and time.monotonic() < until:
        turn += 1
        for one in list(left):
            if _waits(one, left):
                continue
            began = time.monotonic()
            rest = spent[one] * (1 / one.share - 1) if one.share >= _SURE else 0.0
            turn_ends = began + (max(seconds, rest) if rest <= until - began else seconds)
            found = one.run(min(turn_ends, until))
            if turn == 1 and one is not searches[-1] and found.ended == "time":  # So did this.
                found = one.run(min(time.monotonic() + seconds, until))
            spent[one] += time.monotonic() - began
            counts[one] = found.leaves
            closed = (low <= 0) & (found.low > 0)
            low = np.maximum(low, found.low)
            if found.witness is not None:
                return Searched(low, "flipped", sum(counts.values()), found.witness)
            for other in searches:
                for row in np.flatnonzero(closed):
                    other.close(int(row))
            if one is searches[-1]:
                ended = found.ended
            if found.ended != "time" or (len(left) > 1 and _closes_nothing(one, turn)):
                left.remove(one)
            if not np.any(low[rows] <= 0) or time.monotonic() >= until:
                break
        seconds *= 2
    if not np.any(low[rows] <= 0):
        ended = "closed"
    elif time.monotonic() >= until:
        ended = "time"
    return Searched(low, ended, sum(counts.values()), None)


def _gap(low: Numbers) -> float:
    """How far the bounds are below 0, summed."""
    return -float(np.sum(np.minimum(low, 0.0)))


def _waits(one: _Search, left: list[_Search]) -> bool:
    """Whether it is the search of the whole region, gains little, and another one closes parts."""
    return isinstance(one, _Whole) and one.stalls and any(other.share > 0 for other in left)


def _closes_nothing(one: _Search, turn: int) -> bool:
    """Whether it is the search of subdomains, and has closed too little of the region by now."""
    if not isinstance(one, SubdomainSearch):
        return False
    none = one.share == 0 and one.bounded >= _DEEP * width()
    return none or (turn >= _TURNS and one.share < _LEAST)
