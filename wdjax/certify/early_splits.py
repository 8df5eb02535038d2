r"""Branch and bound over the signs of ReLUs, first layers first, with all bounds made anew.

One search bounds all functions at once, by linear bounds whose slopes are not optimised: in a
subdomain where the signs of the first layers are known, the operands of all later layers are
narrow. For deep nets this is orders of magnitude faster than splits of the neurons that loosen the
functions' bounds most.

Source: Henriksen and Lomuscio [henriksen2020].
"""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax.bounds import rebounded
from wdjax.bounds.rebounded import Subdomains
from wdjax.certify.signs import MEMORY, Searched, SignSearch, width

Numbers = npt.NDArray[Any]


class _Subdomain(NamedTuple):
    low: Numbers
    """``[R]`` lower bounds of the functions."""
    signs: Numbers
    lower: Numbers
    upper: Numbers
    """``[N]``: signs and ends of the operands, as in :class:`rebounded.Subdomains`."""
    entry: int | None
    """The operand to split; None if none is left, and before the subdomain is bounded."""

    def halves(self) -> list["_Subdomain"]:
        found = []
        for sign in (-1, 1):
            signs = self.signs.copy()
            signs[self.entry] = sign
            found.append(self._replace(signs=signs))
        return found


class EarlySplits:
    """Proves that the functions ``rows`` of a problem, with known bounds ``low``, are above 0.

    Every subdomain in which one of them is open is in ``open`` or, without a ReLU to split, in
    ``stuck``.
    """

    def __init__(self, given: SignSearch, rows: Numbers, low: Numbers) -> None:
        self.given, self.rows, self.before, self.bounded = given, rows, low, 0
        some = np.resize(rows, 1 << (len(rows) - 1).bit_length())  # A power of two: few programs.
        self.asked = jnp.asarray(some)
        begun: Any = jax.device_get(given.root.begin(self.asked[:1]))
        whole = _Subdomain(low[rows], begun.signs[0], begun.lower[0], begun.upper[0], None)
        self.open, self.stuck = [whole], list[_Subdomain]()
        self.wanted = np.ones(len(rows), bool)
        self.closed, self.share = np.full(len(rows), np.inf), 0.0
        """For each function the least bound over closed subdomains; their share of the region, if
        every split counts as a halving."""
        self.most = MEMORY // sum(part.nbytes for part in whole[1:4])

    def close(self, row: int) -> None:
        """Stops work on a function that another search has proved to be above 0."""
        self.wanted &= self.rows != row
        left, self.open, self.stuck = self.open + self.stuck, [], []
        for one in left:
            self._keep(one)

    def run(self, until: float) -> Searched:
        """Splits subdomains, the last first, until all are closed or the time is over."""
        while self.open:
            if time.monotonic() >= until:
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
        return [half for one in taken for half in one.halves()]

    def _bound(self, some: list[_Subdomain]) -> Any:
        """Bounds subdomains and keeps those that stay open; returns what the check did, or None."""
        given, wide = self.given, width()
        rows = some + some[:1] * (-len(some) % wide)
        witness, bounded = None, list[_Subdomain]()
        for start in range(0, len(rows), wide):
            parts = zip(*(one[1:4] for one in rows[start : start + wide]))
            these = Subdomains(*(jnp.asarray(np.stack(part)) for part in parts))
            found = jax.device_get(
                rebounded.bounds(
                    given.model, given.problem, given.root, these, self.asked, norm=given.norm
                )
            )
            for one, low, lower, upper, entry in zip(some[start:], *found[:4]):
                low = np.maximum(one.low, low[: len(self.rows)])
                left = None if entry == len(one.signs) else int(entry)
                bounded.append(_Subdomain(low, one.signs, lower, upper, left))
            open_ = [k for k, one in enumerate(bounded[start:]) if not self._closes(one)]
            witness = given.check(found.points[open_]) if open_ and witness is None else witness
        self.bounded += len(some)
        for one in bounded:
            self._keep(one)
        return witness

    def _keep(self, one: _Subdomain) -> None:
        if not self._closes(one):
            (self.stuck if one.entry is None and self.bounded else self.open).append(one)
            return
        self.closed = np.minimum(self.closed, one.low)
        self.share += 0.5 ** np.count_nonzero(one.signs)

    def _closes(self, one: _Subdomain) -> bool:
        """Whether no wanted function is open in a subdomain, which then counts as closed."""
        return bool(np.all(one.low[self.wanted] > 0))

    def _outcome(self, ended: str, witness: Any = None) -> Searched:
        """The bounds: for each function the least over all subdomains."""
        left = [one.low for one in (*self.open, *self.stuck)]
        low = self.before.copy()
        low[self.rows] = np.maximum(low[self.rows], np.min([self.closed, *left], axis=0))
        return Searched(low, ended, self.bounded, witness)
