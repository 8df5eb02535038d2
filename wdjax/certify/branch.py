r"""Branch and bound over the signs of ReLUs' pre-activations, for linear functions of the outputs.

A region is split by the signs of ReLUs until every leaf is verified or the time is over. No leaf
is ever dropped: a function's bound is the least over its leaves, closed (verified) or open, and so
valid at any time. Leaves without a ReLU left to split are bounded again, by more steps, once all
others are closed.

Source: Bunel et al. [bunel2020], Wang et al. [wang2021].
"""

import functools
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

from wdjax import losses, xla_cpu
from wdjax.attacks import PGD
from wdjax.balls import Lp
from wdjax.bounds import leaves, region
from wdjax.bounds.moved_mass import moves_mass
from wdjax.bounds.region import Domain, Norm
from wdjax.certify.recorded import SignRecord
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
    node: Any = None
    """The leaf in a proof."""


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
    return xla_cpu.at_once(_WIDTH)


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

    Takes at least one turn, then more until ``time.monotonic()`` reads ``until``. With a ``record``
    of a proof leaves are closed where its checker agrees.
    """
    if not rows.size or not root.lower or not np.all(np.isfinite(low[rows])):
        return Searched(low, "nothing to split" if rows.size else "closed", 0, None)
    frontier = _Frontier(low, rows, root.begin(jnp.asarray(rows)), record)
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
    """Closes the open margins of single samples of one model, norm and box."""

    def __init__(self, model: Classifier, domain: Domain, seconds: float) -> None:
        self.model, self.domain, self.seconds = model, domain, seconds
        self.compiled = False

    def close(
        self,
        x: jax.Array,
        y: jax.Array,
        eps: float,
        low: npt.ArrayLike,
        scale: jax.Array | None = None,
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Tightens bounds ``low``, ``[n, K]``, of the margins of ``x``, ``[n, *shape]``, within
        ``eps``, in units of ``scale``, ``[n, *shape]``.

        Returns the bounds, ``[n]`` indices in ENDS, and points ``[n, *shape]``: a misclassified one
        within ``eps`` where one was found, else the sample. Samples with one keep their bounds.
        """
        found, points = np.array(low), np.array(x)
        ended = np.zeros(len(found), np.int32)
        for i, row in enumerate(found):
            part = None if scale is None else scale[i : i + 1]
            ball = _Ball(self.domain, x[i : i + 1], eps, part)
            if np.all(row > 0):
                continue
            broken = self._broken(ball, y[i : i + 1])
            if broken is not None:
                points[i], how = broken
            else:
                if not self.compiled:
                    self._close(ball, y[i : i + 1], row, 0.0)
                    self.compiled = True
                found[i], how, point = self._close(ball, y[i : i + 1], row, self.seconds)
                points[i] = points[i] if point is None else point
            ended[i] = ENDS.index(how)
        return found, ended, points

    def broken(
        self, x: jax.Array, y: jax.Array, eps: float, scale: jax.Array | None = None
    ) -> tuple[Numbers, str] | None:
        """A misclassified point within ``eps`` of ``x``, ``[1, *shape]``, by a short attack, and
        one of ENDS; None without one. ``scale`` as in :meth:`close`."""
        return self._broken(_Ball(self.domain, x, eps, scale), y)

    def _broken(self, ball: "_Ball", y: jax.Array) -> tuple[Numbers, str] | None:
        """A misclassified point of one sample's ball by a short attack, and how it came."""
        if int(jnp.argmax(self.model(ball.x), axis=-1)[0]) != int(y[0]):
            return np.asarray(ball.x[0]), "misclassified"
        flip = self._flip(ball, y, ball.attacked(self.model, y))
        return None if flip is None else (flip, "flipped")

    def _flip(self, ball: "_Ball", y: jax.Array, points: Numbers) -> Numbers | None:
        """The first of ``points``, ``[L, *shape]``, moved into the ball, that is misclassified by
        the model itself; None without one."""
        inside = ball.inside(points)
        filled = np.concatenate([inside, np.repeat(inside[:1], width() - len(inside), axis=0)])
        out = np.asarray(independence.outputs(self.model, filled))
        label, near = int(y[0]), ball.contains(inside)
        for i in np.flatnonzero(near & (np.argmax(out, axis=1)[: len(inside)] != label)):
            alone = np.asarray(independence.outputs(self.model, inside[i : i + 1]))
            if np.all(np.isfinite(alone)) and int(np.argmax(alone[0])) != label:
                return np.asarray(inside[i])
        return None

    def _close(
        self, ball: "_Ball", y: jax.Array, low: Numbers, seconds: float
    ) -> tuple[Numbers, str, Numbers | None]:
        """:meth:`close` for one ball with bounds ``[K]``: the bounds, how it ended, and a
        misclassified point or None."""
        until = time.monotonic() + seconds
        norm, box = self.domain
        problem = leaves.of_sample(ball.x, y, ball.radius, norm, box, len(low), ball.scale)
        root = leaves.root(self.model, problem, norm)
        low = np.where(np.arange(len(low)) == int(y[0]), low, np.maximum(low, np.asarray(root.low)))
        rows = np.flatnonzero(low <= 0)
        check = functools.partial(self._flip, ball, y)
        found = search(self.model, problem, norm, root, rows, low, until, check)
        return found.low, found.ended, found.witness


class _Ball(NamedTuple):
    """The ball of one sample ``x``, ``[1, *shape]``, in units of ``scale``, ``[1, *shape]``."""

    domain: Domain
    x: jax.Array
    eps: float
    scale: jax.Array | None

    @property
    def radius(self) -> jax.Array:
        return jnp.full(1, self.eps, self.x.dtype)

    def _frame(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """The sample, how far each entry may move, and the ends of the box, ``[1, *shape]``, in
        float64."""
        x = np.asarray(self.x, float)
        scale = np.ones_like(x) if self.scale is None else np.asarray(self.scale, float)
        low, high = (np.asarray(end, float) for end in region.ends(self.domain.box, self.x))
        return x, scale, low, high

    def attacked(self, model: Classifier, y: jax.Array) -> Numbers:
        """What projected gradient steps reach, ``[1, *shape]``; where mass moves, the sample."""
        norm, box = self.domain
        if moves_mass(norm):
            return np.asarray(self.x)
        how: dict[str, Any] = {"eps": self.radius[0], "diagnose": False}
        if self.scale is None and not isinstance((box or (0.0,))[0], tuple):
            usual = PGD(Lp(norm, box), steps=40, loss=losses.margin)  # type: ignore[arg-type]
            return np.asarray(driver.run(usual, model, self.x, y, **how).x_adv)
        attack = PGD(Lp(norm, None), steps=40, loss=losses.margin)
        _, scale, low, high = (jnp.asarray(t, self.x.dtype) for t in self._frame())
        moved = jax.tree_util.Partial(_moved, model, self.x, scale, low, high)
        zero = jnp.zeros_like(self.x)
        found = driver.run(attack, moved, zero, y, **how).x_adv
        return np.asarray(_placed(self.x, scale, low, high, found))

    def inside(self, points: Numbers) -> Numbers:
        """Points ``[L, *shape]`` cut by the box, and by the ball if it is one of linf."""
        x, scale, low, high = self._frame()
        reach = self.eps * scale if self.domain.norm == math.inf else np.inf
        low, high = np.maximum(low, x - reach), np.minimum(high, x + reach)
        wide = np.clip(points, low, high)
        near = wide.astype(points.dtype)
        past = (near < low) | (near > high)
        toward = np.asarray(self.x, points.dtype)
        return np.where(past, np.nextafter(near, toward), near)

    def contains(self, points: Numbers) -> npt.NDArray[np.bool_]:
        """``[L]``: which points lie in the ball and in the box; where mass moves, the sample."""
        x, scale, low, high = self._frame()
        move = (points - x).reshape(len(points), -1)
        if moves_mass(self.domain.norm):
            return np.all(move == 0, axis=1)
        widths = np.broadcast_to(scale, x.shape).reshape(1, -1)
        still = np.all((move == 0) | (widths > 0), axis=1)
        far = np.linalg.norm(move / np.where(widths > 0, widths, 1.0), self.domain.norm, axis=1)
        boxed = np.all(((points >= low) & (points <= high)).reshape(len(points), -1), axis=1)
        return np.asarray(still & boxed & (far <= self.eps))


def _placed(x: jax.Array, scale: jax.Array, low: jax.Array, high: jax.Array, u: jax.Array) -> Any:
    """Moves ``u`` in units of ``scale`` as inputs of the box, ``[n, *shape]``."""
    return jnp.clip(x + scale * u, low, high)


def _moved(
    model: Classifier, x: jax.Array, scale: jax.Array, low: jax.Array, high: jax.Array, u: jax.Array
) -> Any:
    """The model's logits of :func:`_placed`."""
    return model(_placed(x, scale, low, high, u))


class _Frontier:
    """All open leaves, and for each function the least bound of its closed leaves."""

    def __init__(
        self, low: Numbers, rows: Numbers, begun: leaves.Leaves, record: SignRecord | None = None
    ) -> None:
        self.begun, self.turns, self.bounded, self.record = low, 0, 0, record
        self.closed = dict.fromkeys(rows.tolist(), math.inf)
        self.open: list[_Leaf] = []
        self.taken: list[_Leaf] = []
        self.stuck: list[_Leaf] = []
        """Leaves without a ReLU left to split."""
        self.idle = 0
        """How often the stuck leaves were bounded again since a leaf gained."""
        self.numbers = itertools.count()
        for row, signs, multipliers in zip(*jax.device_get(begun)):
            node = None if record is None else record.begin(int(row))
            known = float(low[row]) if record is None else min(float(low[row]), 0.0)
            self.add(_Leaf(known, 0, int(row), signs, multipliers, node))
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
        room, parts = len(found.low) // (len(self.taken) + len(self.open)), list[_Leaf]()
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
                entries = entries[: max(room.bit_length() - 1, 1)]
                parts += _parts(leaf, entries, found.children[place], self.record)
        for part in self._agreed(parts):
            self.add(part)
        self.taken = []

    def _agreed(self, some: list[_Leaf]) -> list[_Leaf]:
        """Leaves, those that a proof's checker does not close with bounds of at most 0."""
        claimed = [place for place, leaf in enumerate(some) if leaf.low > 0]
        if self.record is not None and claimed:
            done = self.record.closed([some[place] for place in claimed])
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


def _parts(
    leaf: _Leaf, entries: list[int], children: Numbers, record: SignRecord | None
) -> Iterator[_Leaf]:
    """Yields the ``2^E`` parts of a leaf, one for each combination of signs of ``E`` neurons.

    ``entries`` are the neurons' indices. ``children``, ``[C, 2]`` with ``C >= E``, has in row k the
    lower bounds of both halves (negative, positive) if ``entries[k]`` alone splits the leaf. A part
    lies in one half of each row: its bound is the largest of theirs and of the leaf's.
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
