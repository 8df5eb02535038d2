"""Writes down proofs while a search finds them: a part of a box is closed only if `checker` agrees.

So whatever the search's own bounds are, what is saved is accepted. Where the checker does not agree
the search goes on, and splits the part.
"""

import hashlib
import io
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from wdjax.files import atomic, vnnlib_file
from wdjax.proofs import checker
from wdjax.proofs.checker import AT_ONCE, CUT, FORMAT, Path_, ProofCase
from wdjax.proofs.real_net import RealNet

_FLOAT = float(np.finfo(np.float32).max) / 2
_LEAST = 1e-12
"""A bound that the checker finds in another batch of leaves may differ in the last bits."""


class _Node:
    """A part of a box: a leaf with its numbers, or split at ``number`` into two nodes."""

    def __init__(self, path: Path_) -> None:
        self.path, self.halves = path, list["_Node"]()
        self.numbers: tuple[Any, Any, Any] | None = None

    def split(self, number: int, value: float) -> list["_Node"]:
        """The lower and the upper half."""
        self.halves = [_Node((*self.path, (number, value, side))) for side in (-1, 1)]
        return self.halves


class CaseRecord:
    """The trees that prove one case of a property."""

    def __init__(self, case: ProofCase) -> None:
        self.case, self.inputs = case, case.net.inputs
        self.trees: list[tuple[int, _Node]] = []
        self.point: Any = None
        self.begin(np.zeros(0, int), np.zeros((0, 2, case.net.neurons)))

    def begin(self, neurons: Any, slopes: Any) -> None:
        """Bounds all neurons over the whole box, some, ``[M]``, by slopes ``[M, 2, neurons]``."""
        near = np.clip(slopes, -1, 1).astype(np.float16).astype(float)
        self.inner = neurons, near
        self.case.begin(*self.inner)

    def tree(self, member: int = -1) -> _Node:
        """The root of a new tree, for one member of the property or, -1, for all.

        One for all replaces those before it.
        """
        root = _Node(())
        self.trees = [*self.trees, (member, root)] if member >= 0 else [(member, root)]
        return root

    def cut(self, nodes: Sequence[_Node]) -> tuple[list[_Node], Any, Any]:
        """What is left of boxes without what has no violation: nodes, and ends ``[L, N]``."""
        found, ends = list[_Node](), list[Any]()
        for begin in range(0, len(nodes), AT_ONCE):
            some = nodes[begin : begin + AT_ONCE]
            low, high = (
                np.nextafter(np.clip(end, -_FLOAT, _FLOAT).astype(np.float32), np.float32(way))
                for end, way in zip(self.case.hull([node.path for node in some]), (-np.inf, np.inf))
            )
            for node, *pair in zip(some, low, high):
                ends.append(np.stack(pair))
                node.halves = [_Node((*node.path, (CUT, ends[-1], 0)))]
                found += node.halves
        kept = np.stack(ends, axis=1)
        return found, kept[0], kept[1]

    def closed(
        self,
        nodes: Sequence[_Node],
        weights: Any,
        slopes: Any = None,
        betas: Any = None,
        member: Any = None,
    ) -> Any:
        """``[L]`` booleans: which nodes the checker closes with these numbers; those are kept.

        Args:
          nodes: ``L`` of them.
          weights: ``[L, R]``, at least 0, of the rows of the case; columns beyond R are ignored,
            missing ones are 0.
          slopes: ``[L, neurons]`` of curves; below 0 for the usual ones.
          betas: ``[L, neurons]`` numbers ``b`` of neurons ``z``: ``b z`` less its maximum in the
            leaf is added.
          member: ``[L]``: which member is proved of each node; by default all are.
        """
        count, rows_, size = len(nodes), len(self.case.b), self.case.net.neurons
        low, high = self.case.known or np.zeros((2, 1, 0))
        weights = np.pad(weights, ((0, 0), (0, rows_)))[:, :rows_]
        slopes = np.full((count, size), -1.0) if slopes is None else slopes
        betas = np.zeros((count, size)) if betas is None else betas
        done = np.zeros(len(nodes), bool)
        every = np.arange(len(self.case.member))[None]
        members = np.repeat(every, count, axis=0) if member is None else member[:, None]
        stable = self.case.net.rectified & ((low[0] >= 0) | (high[0] <= 0))
        slopes = np.where((slopes < 0) | stable, -1.0, np.minimum(slopes, 1.0))
        slopes = slopes.astype(np.float16).astype(float)
        weights, betas = (np.asarray(part, np.float32).astype(float) for part in (weights, betas))
        for begin in range(0, len(nodes), AT_ONCE):
            some = range(begin, min(begin + AT_ONCE, len(nodes)))
            rows, paths = slice(begin, begin + len(some)), [nodes[i].path for i in some]
            low = self.case.least(paths, members[rows], weights[rows], slopes[rows], betas[rows])
            for i, bound in zip(some, low):
                done[i] = np.all(bound > _LEAST)
                if done[i]:
                    numbers = slopes[i].astype(np.float16), betas[i].astype(np.float32)
                    nodes[i].numbers = weights[i], *numbers
        return done


class Proof:
    """The proof of a verdict on a net, ``.onnx``, and a property, ``.vnnlib``.

    ``cases`` has a record for each box of the property, in the order of the file;
    :func:`wdjax.certify.property` takes one as ``proof=``, and fills it.

    Args:
      onnx: the file of the net, of affine maps, rectifiers, sigmoids and hyperbolic tangents.
      vnnlib: the file of the property.

    Raises:
      ValueError: the net has other nodes, or a file is damaged.
      OSError: a file cannot be read.

    Source: this library's own; docs/proofs.md has the format.

    >>> proof = Proof("net.onnx", "property.vnnlib")  # doctest: +SKIP
    >>> property(model, lower, upper, spec, proof=proof.cases[0]).status  # doctest: +SKIP
    'holds'
    >>> proof.save("proof.npz")  # doctest: +SKIP
    """

    def __init__(self, onnx: str | PathLike[str], vnnlib: str | PathLike[str]) -> None:
        self.files = {"model": Path(onnx), "property": Path(vnnlib)}
        self.net = RealNet(onnx)
        self.cases = [CaseRecord(ProofCase(self.net, *c)) for c in vnnlib_file.read(vnnlib)]

    def save(self, path: str | PathLike[str]) -> int:
        """Checks the proof, and writes it; returns the file's size in bytes.

        Raises:
          ValueError: not all cases are proved, and none has a point; the checker does not accept
            it, as a point whose output is forbidden by rounding only; or the file cannot be
            written.
        """
        content = {name: _digest(file) for name, file in self.files.items()}
        content["format"] = np.array(FORMAT)
        points = [number for number, record in enumerate(self.cases) if record.point is not None]
        if points:
            content |= {"case": np.array(points[0]), "point": self.cases[points[0]].point}
        else:
            content |= self._trees()
        file = io.BytesIO()
        np.savez_compressed(file, **content)
        checker.check(file.getvalue(), *self.files.values())
        atomic.check_writable(path)
        atomic.write(path, file.getvalue())
        return file.tell()

    def _trees(self) -> dict[str, Any]:
        """The arrays of a proof that nothing is violated."""
        trees, split, at, leaves, cuts = [], list[int](), list[float](), list[Any](), list[Any]()
        for number, record in enumerate(self.cases):
            for member, root in record.trees:
                begin, todo = len(split), [root]
                while todo:
                    node = todo.pop()
                    todo += node.halves[::-1]
                    where = node.halves[0].path[-1] if node.halves else (-1, 0.0, 0)
                    split.append(where[0])
                    at.append(0.0 if where[0] == CUT else where[1])
                    cuts += [where[1]] if where[0] == CUT else []
                    if not node.halves:
                        leaves.append(node.numbers)
                trees.append((number, member, len(split) - begin))
        if not trees or any(leaf is None for leaf in leaves):
            raise ValueError("the search has no proof to save: not all parts are closed.")
        rows = max(len(record.case.b) for record in self.cases)
        weights = [np.pad(leaf[0], (0, rows - len(leaf[0]))) for leaf in leaves]
        slopes, betas = (np.stack([leaf[k] for leaf in leaves]) for k in (1, 2))
        inner = [record.inner for record in self.cases]
        inner_slopes = np.concatenate([slopes for _, slopes in inner]).astype(np.float16)
        told = np.any(slopes >= 0, axis=0) | np.any(betas != 0, axis=0)
        columns = np.flatnonzero(told | np.any(inner_slopes >= 0, (0, 1)))
        keys = [(number, neuron) for number, (neurons, _) in enumerate(inner) for neuron in neurons]
        return {
            "trees": np.array(trees, np.int32),
            "split": np.array(split, np.int32),
            "at": np.array(at),
            "cuts": np.array(cuts, np.float32).reshape(-1, 2, self.net.inputs),
            "weights": np.stack(weights).astype(np.float32),
            "neurons": columns.astype(np.int32),
            "slopes": slopes[:, columns],
            "betas": betas[:, columns],
            "inner": np.array(keys, np.int32).reshape(-1, 2),
            "inner_slopes": inner_slopes[..., columns],
        }


def _digest(path: Path) -> Any:
    return np.frombuffer(hashlib.sha256(path.read_bytes()).digest(), np.uint8)
