"""What branch and bound over neurons tells a proof, in the checker's order of neurons."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.flatten_util import ravel_pytree

from wdjax.bounds.leaves import RootBounds
from wdjax.proofs.recorder import CaseRecord

Numbers = npt.NDArray[Any]


class SplitRecord:
    """The trees of one case over its neurons, one for each member of its specification."""

    def __init__(
        self, record: CaseRecord, root: RootBounds, inner: Mapping[int, Mapping[int, Any]]
    ) -> None:
        """``inner``: slopes as of :func:`wdjax.bounds.inner_slopes.of_region`; may be empty."""
        self.record, all_ = record, root.of_all()
        orders = _orders(all_, record.case.net.starts, _known(record))
        self.order = np.concatenate(orders)
        self._bound_again(dict(zip(sorted(all_.lower), orders)), inner)
        ends = _known(record)
        wider = []
        for held, known, pick in (
            (all_.lower, ends[0], np.minimum),
            (all_.upper, ends[1], np.maximum),
        ):
            flat, unravel = ravel_pytree(held)
            there = known[self.order].astype(flat.dtype)
            wider.append(unravel(jnp.asarray(pick(np.asarray(flat), there))))
        relus, rest = (
            [{place: part[place] for place in kind} for part in wider]
            for kind in (root.lower, root.others[0])
        )
        others = rest[0], rest[1], root.others[2]
        self.root = root._replace(lower=relus[0], upper=relus[1], others=others)
        """The root's bounds, no tighter than the checker's."""

    def _bound_again(
        self, orders: Mapping[int, Numbers], inner: Mapping[int, Mapping[int, Any]]
    ) -> None:
        """Has the checker bound unstable neurons by the slopes that suit them."""
        size, neurons, slopes = self.record.case.net.neurons, [np.zeros(0, int)], []
        for place, found in inner.items():
            finite = [np.all(np.isfinite(part), axis=(1, 2)) for part in found.values()]
            some = np.flatnonzero(np.all(finite, axis=0))
            rows = np.full((len(some), 2, size), -1.0)
            for operand, part in found.items():
                rows[..., orders[operand]] = np.asarray(part)[some]
            neurons.append(orders[place][some])
            slopes.append(rows)
        if slopes:
            self.record.begin(np.concatenate(neurons), np.concatenate(slopes))

    def begin(self, row: int) -> Any:
        """The root of a tree for the member of a row."""
        return self.record.tree(int(np.argmax(self.record.case.member[:, row])))

    def split(self, node: Any, entry: int, point: float = 0.0) -> Any:
        """Both halves, an operand below and above a point."""
        return node.split(self.record.inputs + int(self.order[entry]), float(point))

    def closed(
        self, nodes: Sequence[Any], rows: Numbers, slopes: Numbers, multipliers: Numbers
    ) -> npt.NDArray[np.bool_]:
        """Which nodes the checker closes, each for the member of its row.

        ``rows`` is ``[L]``; ``slopes`` and ``multipliers``, ``[L, N]``, are as in
        :class:`rebounded.SubdomainBounds`.
        """
        case, count = self.record.case, len(nodes)
        weights = np.zeros((count, len(case.b)))
        given, paid = np.zeros((2, count, len(self.order)))
        weights[np.arange(count), rows] = 1.0
        given[:, self.order], paid[:, self.order] = slopes, multipliers
        member = np.argmax(case.member[:, rows], axis=0)
        return np.asarray(self.record.closed(nodes, weights, given, paid, member))

    def closed_leaves(self, leaves: Sequence[Any]) -> npt.NDArray[np.bool_]:
        """Which of some leaves, as :mod:`signs` has them, the checker closes too."""
        rows = np.array([leaf.row for leaf in leaves], int)
        signs = np.stack([leaf.signs for leaf in leaves])
        numbers = np.stack([leaf.multipliers for leaf in leaves])
        slopes = np.where(signs == 0, numbers, -1.0)
        return self.closed([leaf.node for leaf in leaves], rows, slopes, -signs * numbers)


def _known(record: CaseRecord) -> list[Numbers]:
    """Both ends ``[neurons]`` that the checker has of all neurons."""
    return [end[0] for end in record.case.known]


def _orders(root: RootBounds, starts: Numbers, ends: list[Numbers]) -> list[Numbers]:
    """The checker's number of each neuron, curve by curve: maps may have channels last.

    The order is that in which the two kinds of bounds differ least.
    """
    if [low.size for _, low in sorted(root.lower.items())] != np.diff(starts).tolist():
        raise ValueError("a proof is about a net whose neurons are those of its file.")
    found = []
    for place, begin in zip(sorted(root.lower), starts):
        seen = np.stack([np.asarray(side[place]).reshape(-1) for side in (root.lower, root.upper)])
        shape, usual = root.lower[place].shape, begin + np.arange(seen.shape[1])
        tries = [usual]
        if len(shape) == 4:
            tries.append(np.moveaxis(usual.reshape(shape[3], *shape[1:3]), 0, -1).reshape(-1))
        gaps = [np.sum(np.abs(seen - [end[order] for end in ends])) for order in tries]
        found.append(tries[int(np.argmin(gaps))])
    return found
