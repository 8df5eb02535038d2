r"""Branch and bound over the signs of ReLUs' pre-activations, for linear functions of the outputs.

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
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import losses
from wdjax.attacks import PGD
from wdjax.balls import Lp
from wdjax.bounds import leaves
from wdjax.bounds.region import AnyBall, Norm, norm_of
from wdjax.checks import independence
from wdjax.core import Classifier
from wdjax.engine import driver

Numbers = npt.NDArray[Any]

ENDS = "not searched", "closed", "time", "memory", "nothing to split", "misclassified", "flipped"
"""How the search for a sample ended. "not searched": the sample was verified already. "closed": all
leaves are verified. "time", "memory": it ran out of these. "nothing to split": a leaf that is not
verified has no ReLU left to split, and more steps do not help. "misclassified": the sample itself
is. "flipped": a point within the radius is, found by a short attack or at a leaf."""

_WIDTH = 32
"""Number of leaves that are bounded at once, on a CPU."""
_STEPS, _TRIES = 12, 3
"""Most ascent steps on a leaf's multipliers; number of splits that are tried for it."""
_AGAIN, _GAIN = 3, 0.01
"""How often in a row all leaves without a ReLU left may be bounded again without a gain of this
share of a bound."""
_BYTES = 2**29
"""Memory for all open leaves; beyond it the search ends."""

Check = Callable[[Numbers], Any]
"""Of points ``[L, *shape]`` of a region the proof that one of them is a violation, else None."""


class _Leaf(NamedTuple):
    """An open leaf, ordered by its bound: the least is split first."""

    low: float
    number: int
    row: int
    signs: Numbers
    multipliers: Numbers


class Searched(NamedTuple):
    """What a search over signs found."""

    low: Numbers
    """``[R]`` lower bounds of all functions."""
    ended: str
    """One of :data:`ENDS`."""
    leaves: int
    witness: Any
    """What the check returned, or None."""


def width() -> int:
    """Number of leaves that are bounded at once on the default device."""
    return _WIDTH if jax.default_backend() == "cpu" else 16 * _WIDTH


def search(
    model: Classifier,
    problem: leaves.RegionProblem,
    norm: Norm,
    root: leaves.RootBounds,
    rows: Numbers,
    low: Numbers,
    until: float,
    check: Check,
) -> Searched:
    """Closes the functions ``rows`` of a problem, with bounds ``low``, ``[R]``, known before.

    Takes at least one turn, then more until ``time.monotonic()`` reads ``until``.
    """
    if not rows.size or not root.lower or not np.all(np.isfinite(low[rows])):
        return Searched(low, "nothing to split" if rows.size else "closed", 0, None)
    frontier = _Frontier(low, rows, root.begin(jnp.asarray(rows)))
    wide = width()
    while frontier.goes_on() and (not frontier.turns or time.monotonic() < until):
        batch = frontier.take(wide)
        tries = min(_TRIES, batch.signs.shape[1])
        found = jax.device_get(
            leaves.bounds(model, problem, root, batch, norm=norm, steps=_STEPS, tries=tries)
        )
        open_ = ~(found.low > 0)
        witness = check(found.points[open_]) if np.any(open_) else None
        frontier.split(found)
        if witness is not None:
            return Searched(frontier.low(), "flipped", frontier.bounded, witness)
    return Searched(frontier.low(), frontier.end(), frontier.bounded, None)


class BranchAndBound:
    """Closes the open margins of single samples of one model and ball.

    Balls in which mass moves between pixels have no short attack here.
    """

    def __init__(self, model: Classifier, ball: AnyBall, seconds: float) -> None:
        self.model, self.ball, self.norm, self.seconds = model, ball, norm_of(ball), seconds
        self.attack = PGD(ball, steps=40, loss=losses.margin) if isinstance(ball, Lp) else None
        self.compiled = False

    def close(
        self, x: jax.Array, y: jax.Array, eps: float, low: npt.ArrayLike
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Tightens bounds ``low``, ``[n, K]``, of the margins of ``x``, ``[n, *shape]``, within
        ``eps``.

        Returns the bounds, ``[n]`` indices in ENDS, and points ``[n, *shape]``: a misclassified one
        within ``eps`` where one was found, else the sample. Samples with one keep their bounds.
        """
        found, points = np.array(low), np.array(x)
        ended = np.zeros(len(found), np.int32)
        for i, row in enumerate(found):
            xi, yi, radius = x[i : i + 1], y[i : i + 1], jnp.full(1, eps, x.dtype)
            if np.all(row > 0):
                continue
            broken = self._broken(xi, yi, radius)
            if broken is not None:
                points[i], how = broken
            else:
                if not self.compiled:
                    self._close(xi, yi, radius, row, 0.0)
                    self.compiled = True
                found[i], how, point = self._close(xi, yi, radius, row, self.seconds)
                points[i] = points[i] if point is None else point
            ended[i] = ENDS.index(how)
        return found, ended, points

    def _broken(self, x: jax.Array, y: jax.Array, eps: jax.Array) -> tuple[Numbers, str] | None:
        """A misclassified point of one sample's ball by a short attack, and how it came."""
        if int(jnp.argmax(self.model(x), axis=-1)[0]) != int(y[0]):
            return np.asarray(x[0]), "misclassified"
        if self.attack is None:
            return None
        found = driver.run(self.attack, self.model, x, y, eps=eps[0], diagnose=False)
        return (np.asarray(found.x_adv[0]), "flipped") if bool(found.success[0]) else None

    def _close(
        self, x: jax.Array, y: jax.Array, eps: jax.Array, low: Numbers, seconds: float
    ) -> tuple[Numbers, str, Numbers | None]:
        """:meth:`close` for one sample ``[1, *shape]`` with bounds ``[K]``: the bounds, how it
        ended, and a misclassified point or None."""
        until = time.monotonic() + seconds
        problem = leaves.of_sample(x, y, eps, self.norm, self.ball.box, len(low))
        root = leaves.root(self.model, problem, self.norm)
        low = np.where(np.arange(len(low)) == int(y[0]), low, np.maximum(low, np.asarray(root.low)))
        label = int(y[0])

        def check(points: Numbers) -> Numbers | None:
            filled = np.concatenate([points, np.repeat(points[:1], width() - len(points), axis=0)])
            out = np.asarray(independence.outputs(self.model, filled))
            for i in np.flatnonzero(np.argmax(out, axis=1) != label):
                near = self.ball.cost(x, jnp.asarray(filled[i : i + 1]), None) <= eps
                alone = np.asarray(independence.outputs(self.model, filled[i : i + 1]))
                if bool(near[0]) and int(np.argmax(alone[0])) != label:
                    return filled[i]
            return None

        rows = np.flatnonzero(low <= 0)
        found = search(self.model, problem, self.norm, root, rows, low, until, check)
        return found.low, found.ended, found.witness


class _Frontier:
    """All open leaves, and for each function the least bound of its closed leaves."""

    def __init__(self, low: Numbers, rows: Numbers, begun: leaves.Leaves) -> None:
        self.begun, self.turns, self.bounded = low, 0, 0
        self.closed = dict.fromkeys(rows.tolist(), math.inf)
        self.open: list[_Leaf] = []
        self.taken: list[_Leaf] = []
        self.stuck: list[_Leaf] = []
        """Leaves without a ReLU left to split."""
        self.idle = 0
        """How often the stuck leaves were bounded again since a leaf gained."""
        self.numbers = itertools.count()
        for row, signs, multipliers in zip(*jax.device_get(begun)):
            self.add(_Leaf(float(low[row]), 0, int(row), signs, multipliers))
        self.most = _BYTES // sum(a[0].nbytes for a in begun)

    def goes_on(self) -> bool:
        if not self.open and self.stuck and self.idle < _AGAIN:
            self.idle += 1
            for leaf in self.stuck:
                heapq.heappush(self.open, leaf)
            self.stuck = []
        return bool(self.open) and len(self.open) + len(self.stuck) < self.most

    def end(self) -> str:
        """Why the search ended, one of ENDS."""
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
        """Removes the ``width`` leaves with the least bounds; the first is repeated to fill up."""
        self.turns += 1
        self.taken = [heapq.heappop(self.open) for _ in range(min(width, len(self.open)))]
        self.bounded += len(self.taken)
        rows = self.taken + self.taken[:1] * (width - len(self.taken))
        return leaves.Leaves(
            np.array([leaf.row for leaf in rows], np.int32),  # type: ignore[arg-type]
            np.stack([leaf.signs for leaf in rows]),  # type: ignore[arg-type]
            np.stack([leaf.multipliers for leaf in rows]),  # type: ignore[arg-type]
        )

    def split(self, found: Any) -> None:
        """Splits each taken leaf by the sign of its best neuron, or of several neurons while there
        are too few leaves for a batch. ``found``, a :class:`leaves.LeafBounds`, is of the taken
        leaves.
        """
        room = len(found.low) // (len(self.taken) + len(self.open))
        for place, leaf in enumerate(self.taken):
            before = leaf.low
            leaf = leaf._replace(
                low=max(before, float(found.low[place])), multipliers=found.multipliers[place]
            )
            entries = [int(c) for c in found.choices[place] if c < len(leaf.signs)]
            if leaf.low > before + _GAIN * abs(before):
                self.idle = 0
            if leaf.low > 0:
                self.add(leaf)
            elif not entries:
                self.stuck.append(leaf)
            else:
                depth = min(max(room.bit_length() - 1, 1), len(entries))
                for part in _parts(leaf, entries[:depth], found.children[place]):
                    self.add(part)
        self.taken = []

    def low(self) -> Numbers:
        """Lower bounds ``[R]`` of all functions."""
        least = dict(self.closed)
        for leaf in (*self.open, *self.taken, *self.stuck):
            least[leaf.row] = min(least[leaf.row], leaf.low)
        found = self.begun.copy()
        for row, low in least.items():
            found[row] = max(found[row], low)
        return found


def _parts(leaf: _Leaf, entries: list[int], children: Numbers) -> Iterator[_Leaf]:
    """Yields the ``2^E`` parts of a leaf, one for each combination of signs of ``E`` neurons.

    ``entries`` are the neurons' indices. ``children``, ``[C, 2]`` with ``C >= E``, has in row k the
    lower bounds of both halves (negative, positive) if ``entries[k]`` alone splits the leaf. A part
    lies in one half of each row: its bound is the largest of theirs and of the leaf's.
    """
    for pick in itertools.product((0, 1), repeat=len(entries)):
        signs, multipliers = leaf.signs.copy(), leaf.multipliers.copy()
        signs[entries], multipliers[entries] = 2 * np.array(pick) - 1, 0.0
        low = max(leaf.low, *(float(children[k, side]) for k, side in enumerate(pick)))
        yield leaf._replace(low=low, signs=signs, multipliers=multipliers)
