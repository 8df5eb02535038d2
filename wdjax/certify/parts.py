r"""Branch and bound over signs, part by part where the whole region is not closed soon.

In each part the ReLUs' pre-activations are bounded anew, at the points where the function is at
most 0: without any such point the function is positive. Then leaves of the part are searched until
128 of them are bounded; a part that they do not close is halved by the sign of the ReLU that
loosens it most.

Source: Wang et al. [wang2021]; the bounds of parts, Kotha et al. [kotha2023].
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax.bounds import output_constraint
from wdjax.bounds.leaves import Leaves
from wdjax.certify.signs import Frontier, Searched, SignSearch

Numbers = npt.NDArray[Any]

_ROUNDS, _GAIN = 8, 0.05
"""The operands of a part are bounded in at most so many rounds. A round bounds only those whose
range the last one shortened by more than this share, which halves the time."""
_FEW = 128
"""Number of leaves after which a part is halved."""
PROVED = float(np.finfo(np.float32).tiny)
"""The bound of a function that is proved in parts: just above 0. Bounds of parts say no more, since
they hold only where the function is at most 0."""


class _Part(NamedTuple):
    """A part of the region for one function."""

    low: float
    """The function's lower bound, at most 0."""
    leaf: Leaves
    """The part as one leaf, without the axis of leaves."""
    depth: int = 0
    """Number of splits that made it."""

    @property
    def empty(self) -> bool:
        """Whether the ends show that the function is at most 0 nowhere in the part."""
        return bool(np.any(self.leaf.lower > self.leaf.upper))

    def halves(self, entry: int) -> Iterator["_Part"]:
        """Both halves by the sign of an operand."""
        for sign in (-1, 1):
            signs: Any = np.array(self.leaf.signs)
            signs[entry] = sign
            yield self._replace(leaf=self.leaf._replace(signs=signs), depth=self.depth + 1)


class PartSearch:
    """Proves that one function, the row ``row``, is above 0.

    Every part that is not closed is in ``open`` or ``stuck``.
    """

    def __init__(self, searched: SignSearch, row: int, low: Numbers) -> None:
        self.searched, self.row, self.low, self.bounded = searched, row, low, 0
        begun: Any = jax.device_get(searched.root.begin(jnp.asarray([row])))
        self.open = [_Part(float(low[row]), Leaves(*(entries[0] for entries in begun)))]
        self.stuck: list[_Part] = []
        self.share = 0.0
        """What closed parts take of the region, if every split is a halving."""

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
                self.share += 0.5**part.depth
                continue
            found = self._leaves(part, until)
            self.bounded += found.leaves
            if found.witness is not None:
                return self._outcome("flipped", found.witness)
            self.open.pop()
            part = part._replace(low=float(found.low[self.row]))
            if found.ended == "closed":
                self.share += 0.5**part.depth
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
        """The known bounds, with that of the row raised to the least over its parts."""
        low = self.low.copy()
        least = min([PROVED, *(part.low for part in (*self.open, *self.stuck))])
        low[self.row] = max(low[self.row], least)
        return Searched(low, ended, self.bounded, witness)
