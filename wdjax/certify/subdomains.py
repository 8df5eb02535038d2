r"""Branch and bound over the operands of nonlinear functions, with all bounds made anew.

One search bounds all functions at once, by linear bounds whose slopes are not optimised. ReLU nets
are split by the signs of the first layers: where these are known, the operands of all later layers
are narrow, and for deep nets this is orders of magnitude faster than splits of the neurons that
loosen the functions' bounds most. In other nets the operand that loosens them most is split.

Source: Henriksen and Lomuscio [henriksen2020]; other functions than ReLU, Shi et al. [shi2025].
"""

import itertools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax.bounds import leaves, rebounded
from wdjax.bounds.rebounded import Subdomains
from wdjax.certify.recorded import SplitRecord
from wdjax.certify.signs import MEMORY, Searched, SignSearch, width

Numbers = npt.NDArray[Any]


class _Subdomain(NamedTuple):
    low: Numbers
    """``[R]`` lower bounds of the functions."""
    lower: Numbers
    upper: Numbers
    """``[N]``: ends of the operands, as in :class:`rebounded.Subdomains`."""
    entry: int | None = None
    """The operand to split; None if none is left, and before the subdomain is bounded."""
    point: float = 0.0
    """Where to split it."""
    depth: int = 0
    """Number of splits that made it."""
    node: Any = None
    """The subdomain in a proof."""

    def halves(self, slack: Numbers, record: SplitRecord | None = None) -> list["_Subdomain"]:
        """Both sides of the split. They overlap by ``slack``, ``[N]``, twice what the operand may
        differ by between float programs."""
        lower, upper = self.lower.copy(), self.upper.copy()
        upper[self.entry] = min(upper[self.entry], self.point + slack[self.entry])
        lower[self.entry] = max(lower[self.entry], self.point - slack[self.entry])
        below, above = self._replace(upper=upper), self._replace(lower=lower)
        nodes = (None, None)
        if record is not None and self.entry is not None:
            nodes = record.split(self.node, self.entry, self.point)
        return [
            half._replace(depth=self.depth + 1, node=node)
            for half, node in zip((below, above), nodes)
        ]


class SubdomainSearch:
    """Proves that the functions ``rows`` of a problem, with known bounds ``low``, are above 0.

    Every subdomain in which one of them is open is in ``open`` or, without an operand to split, in
    ``stuck``. With the ``given`` record of a proof there is one function.
    """

    def __init__(self, given: SignSearch, rows: Numbers, low: Numbers) -> None:
        self.given, self.rows, self.before, self.bounded = given, rows, low, 0
        some = np.resize(rows, 1 << (len(rows) - 1).bit_length())  # A power of two: few programs.
        self.asked = jnp.asarray(some)
        known: Any = given.root.of_all()
        lower, upper, self.slack = (
            np.asarray(leaves.flat_of(maps))[0] for maps in (known.lower, known.upper, known.slack)
        )
        whole = _Subdomain(low[rows], lower, upper)
        if given.record is not None:
            (row,) = rows
            whole = whole._replace(
                low=np.minimum(low[rows], 0.0), node=given.record.begin(int(row))
            )
        self.open, self.stuck = [whole], list[_Subdomain]()
        self.wanted = np.ones(len(rows), bool)
        self.closed, self.share = np.full(len(rows), np.inf), 0.0
        """For each function the least bound over closed subdomains; their share of the region, if
        every split counts as a halving."""
        self.most = MEMORY // (lower.nbytes + upper.nbytes)

    def close(self, row: int) -> None:
        """Stops work on a function that another search has proved to be above 0."""
        self.wanted &= self.rows != row
        left, self.open, self.stuck = self.open + self.stuck, [], []
        for one in left:
            self._keep(one)

    def run(self, until: float) -> Searched:
        """Splits subdomains, the last first, until all are closed or the time is over.

        A new search bounds the whole region at least.
        """
        while self.open:
            if self.bounded and time.monotonic() >= until:
                return self._outcome("time")
            if len(self.open) + len(self.stuck) > self.most:
                return self._outcome("memory")
            witness = self._bound(self._taken())
            if witness is not None:
                return self._outcome("flipped", witness)
        return self._outcome("nothing to split" if self.stuck else "closed")

    def _taken(self) -> list[_Subdomain]:
        """Removes the next subdomains and returns their halves; at first the whole region."""
        if not self.bounded:
            return [self.open.pop()]
        count = min(max(width() // 2, 1), len(self.open))
        taken, self.open = self.open[-count:], self.open[:-count]
        return [half for one in taken for half in one.halves(self.slack, self.given.record)]

    def _bound(self, some: list[_Subdomain]) -> Any:
        """Bounds subdomains and keeps those that stay open; returns what the check did, or None."""
        given, wide = self.given, width()
        rows = some + some[:1] * (-len(some) % wide)
        witness, bounded = None, list[_Subdomain]()
        for start in range(0, len(rows), wide):
            parts = zip(*(one[1:3] for one in rows[start : start + wide]))
            these = Subdomains(*(jnp.asarray(np.stack(part)) for part in parts))
            found = jax.device_get(
                rebounded.bounds(
                    given.model, given.problem, given.root, these, self.asked,
                    norm=given.norm, told=given.record is not None,
                )
            )  # fmt: skip
            for one, low, lower, upper, entry, point in zip(some[start:], *found[:5]):
                low = np.maximum(one.low, low[: len(self.rows)])
                left = None if entry == len(lower) else int(entry)
                bounded.append(
                    one._replace(low=low, lower=lower, upper=upper, entry=left, point=point)
                )
            if given.record is not None:
                bounded[start:] = self._agreed(bounded[start:], found)
            open_ = [k for k, one in enumerate(bounded[start:]) if not self._closes(one)]
            witness = given.check(found.points[open_]) if open_ and witness is None else witness
        self.bounded += len(some)
        for one in bounded:
            self._keep(one)
        return witness

    def _agreed(self, some: list[_Subdomain], found: rebounded.SubdomainBounds) -> list[_Subdomain]:
        """The subdomains; one that the proof's checker does not close gets the bound 0."""
        record, claimed = self.given.record, [k for k, one in enumerate(some) if self._closes(one)]
        if record is None or not claimed:
            return some
        told = (np.asarray(part)[claimed, 0] for part in (found.slopes, found.multipliers))
        rows = np.repeat(self.rows, len(claimed))
        done = record.closed([some[k].node for k in claimed], rows, *told)
        for k in itertools.compress(claimed, ~done):
            some[k] = some[k]._replace(low=np.minimum(some[k].low, 0.0))
        return some

    def _keep(self, one: _Subdomain) -> None:
        if not self._closes(one):
            (self.stuck if one.entry is None and self.bounded else self.open).append(one)
            return
        self.closed = np.minimum(self.closed, one.low)
        self.share += 0.5**one.depth

    def _closes(self, one: _Subdomain) -> bool:
        """Whether no wanted function is open in a subdomain, which then counts as closed."""
        return bool(np.all(one.low[self.wanted] > 0))

    def _outcome(self, ended: str, witness: Any = None) -> Searched:
        """The bounds: for each function the least over all subdomains."""
        left = [one.low for one in (*self.open, *self.stuck)]
        low = self.before.copy()
        low[self.rows] = np.maximum(low[self.rows], np.min([self.closed, *left], axis=0))
        return Searched(low, ended, self.bounded, witness)
