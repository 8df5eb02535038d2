r"""Checks proofs of verdicts on ONNX nets, sharing no code with the bounds that found them.

The claim is about the function of real numbers that the file's weights define. "unsat": no point of
the property's boxes has a forbidden output. "sat": the proof's point has one. A proof is a tree of
splits with numbers, of which *any* choice gives a valid bound; the bounds are computed here, in
float64 with every rounding charged. docs/proofs.md has the format and the mathematics.
"""

import hashlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wdjax.files import archive, vnnlib_file
from wdjax.files.state_pickle import BrokenError, RefusedError
from wdjax.proofs import curves
from wdjax.proofs.real_net import UNIT, Operation, RealNet, gamma

FORMAT = 2
_ROUNDS = 4
AT_ONCE, _ENTRIES = 64, 1 << 23
"""Leaves, and coefficients, that are handled at once."""
_TINY, _HUGE = 1e-200, 1e100
"""More than what underflow may cost where all values are at most ``_HUGE``."""
_UNREADABLE = BrokenError, RefusedError, ImportError, MemoryError
Ends = tuple[Any, Any]
CUT = -2
Path_ = tuple[tuple[int, Any, int], ...]
"""A part of a box: ``(number, value, side)`` of each split, an input or ``inputs +`` a neuron,
where it is split, and which half, -1 the lower one. Or ``(CUT, ends, 0)``, ``ends`` ``[2, N]``:
what is left of the box where all else has no violation."""


class RefusedProofError(ValueError):
    """Why a proof is not accepted."""


def _need(fact: Any, why: str) -> None:
    if not fact:
        raise RefusedProofError(why)


@dataclass
class LeafEnds:
    """Ends ``[L, n]`` of values over ``L`` leaves, what affine values are charged, and the usual
    slopes of curves."""

    ends: dict[str, Ends]
    charge: dict[str, Any] = field(default_factory=dict)
    usual: dict[int, Ends] = field(default_factory=dict)
    empty: Any = False

    def most(self, name: str) -> Any:
        return np.maximum(*map(np.abs, self.ends[name]))

    def cut(self, name: str, *ends: Ends) -> None:
        """Cuts a value's ends by others; where none are left the leaf is empty, and all is true."""
        for down, up in ends:
            low, high = np.maximum(self.ends[name][0], down), np.minimum(self.ends[name][1], up)
            self.empty = self.empty | np.any(low > high, axis=1)
            self.ends[name] = low, np.maximum(low, high)


def _forward(net: RealNet, box: Ends, given: Sequence[Ends], inner: Any) -> LeafEnds:
    """Ends of all values over the points of ``box``, ``[L, N]``, whose neurons are between each of
    the ends ``given``, ``[L or 1, neurons]``.

    With ``inner`` open neurons are bounded by linear functions of the input too: it has, for each
    curve, the row ``[n]`` of each neuron in a table ``[M, 2, neurons]`` of slopes for its two ends.
    """
    found = LeafEnds({net.source: box})
    parts = [(net.split(low), net.split(high)) for low, high in filter(None, given)]
    for op in net.operations:
        (low, high), size = found.ends[op.ins[0]], found.most(op.ins[0])
        if op.kind == "affine":
            mid, absolute = 0.5 * low + 0.5 * high, op.map.absolute()
            far = np.maximum(high - mid, mid - low) * (1 + 4 * UNIT)
            rate, reach = 2 * gamma(op.map.terms), absolute.forward(size)
            loss = (rate + op.relative) * reach + rate * np.abs(op.bias) + op.loose
            far = (absolute.forward(far) + loss) * (1 + 1e-9) + _TINY
            value, found.charge[op.out] = op.map.forward(mid) + op.bias, loss
            low, high = np.nextafter(value - far, -np.inf), np.nextafter(value + far, np.inf)
        elif op.kind == "sum":
            down, up = found.ends[op.ins[1]]
            down, up = (down, up) if op.sign > 0 else (-up, -down)
            low, high = np.nextafter(low + down, -np.inf), np.nextafter(high + up, np.inf)
        else:
            found.cut(op.ins[0], *((low[op.turn], high[op.turn]) for low, high in parts))
            if inner is not None:
                found.cut(op.ins[0], _refined(net, found, op, *inner[op.turn]))
            found.usual[op.turn] = curves.usual(op.kind, *found.ends[op.ins[0]])
            low, high = curves.values(op.kind, *found.ends[op.ins[0]])
        _need(np.all(np.maximum(-low, high) < _HUGE), f"{op.out} may be beyond {_HUGE}")
        found.ends[op.out] = low, high
    return found


def _refined(net: RealNet, found: LeafEnds, op: Operation, row: Any, table: Any) -> Ends:
    """Ends of a curve's operand: of entries that are open, by linear functions of the input."""
    name = op.ins[0]
    low, high = (end.copy() for end in found.ends[name])
    unstable = (low < 0) & (high > 0) if op.kind == "Relu" else low < high
    open_ = np.flatnonzero(np.any(unstable, axis=0))
    each = max(1, _ENTRIES // (len(low) * max(map(net.size, net.shapes))))
    for some in (open_[i : i + each] for i in range(0, len(open_), each)):
        hot = np.zeros((1, len(some), low.shape[1]))
        hot[0, np.arange(len(some)), some] = 1.0
        down, up = (
            _lower(net, found, name, sign * hot, table[None, row[some], side])
            for side, sign in enumerate((1.0, -1.0))
        )
        cut = unstable[:, some]  # Other leaves of the batch must not change what a leaf has.
        low[:, some] = np.where(cut, np.maximum(low[:, some], down), low[:, some])
        high[:, some] = np.where(cut, np.minimum(high[:, some], -up), high[:, some])
    return low, high


def _lower(
    net: RealNet,
    found: LeafEnds,
    name: str,
    a: Any,
    slopes: Any,
    betas: Any = None,
    begin: Ends = (0.0, 0.0),
    planes: list[Ends] | None = None,
) -> Any:
    """Lower bounds ``[L, R]`` of ``a . value + begin[0]``, for ``a`` ``[L or 1, R, n]``.

    ``slopes``, ``[L or 1, R or 1, neurons]``: as of :func:`curves.lines`. ``betas``, ``[L,
    neurons]``: multipliers of neurons. A coefficient that was rounded by ``d`` is charged with
    ``d`` times the largest size of what it multiplies.
    ``begin``: a constant, and what is charged for it. ``planes`` gets ``(c, d)``, ``[L, R, N]`` and
    ``[L, R]``: for inputs ``x`` of the box ``c . x + d`` is at most that sum.
    """
    a = np.broadcast_to(a, (len(found.ends[name][0]), *a.shape[1:]))
    send, (total, charge) = {name: a}, (part + np.zeros(a.shape[:2]) for part in begin)

    def dot(a: Any, b: Any) -> Any:
        b = b if np.ndim(b) == 3 else np.atleast_2d(b)[:, None]
        return np.einsum("lrn,lrn->lr", a, np.broadcast_to(b, a.shape))

    def plus(a: Any, b: Any) -> None:
        nonlocal total, charge
        size = dot(np.abs(a), np.abs(b))
        charge = charge + gamma(b.shape[-1]) * size + 2 * UNIT * (np.abs(total) + size)
        total = total + dot(a, b)

    def sent(name: str, a: Any) -> None:
        nonlocal charge
        if name in send:
            a = a + send[name]
            charge = charge + 2 * UNIT * dot(np.abs(a), found.most(name))
        send[name] = a

    for op in reversed(net.operations):
        if op.out not in send:
            continue
        a = send.pop(op.out)
        if op.kind == "affine":
            charge = charge + dot(np.abs(a), found.charge[op.out])
            plus(a, op.bias)
            sent(op.ins[0], op.map.back(a))
        elif op.kind == "sum":
            sent(op.ins[0], a)
            sent(op.ins[1], op.sign * a)
        else:
            ends, given = found.ends[op.ins[0]], net.split(slopes)[op.turn]
            under, below, over, above = curves.lines(op.kind, ends, found.usual[op.turn], given)
            positive, negative, size = np.maximum(a, 0.0), np.minimum(a, 0.0), np.abs(a)
            back = positive * under + negative * over
            plus(negative, above)
            if below is not None:
                plus(positive, below)
            if betas is not None:  # b z <= max(b low, b high)
                b = net.split(betas)[op.turn][:, None]
                back, size = back + b, size + np.abs(b)
                for part, end in zip((np.minimum(b, 0.0), np.maximum(b, 0.0)), ends):
                    plus(part, -end)
            charge = charge + 4 * UNIT * dot(size, found.most(op.ins[0]))
            sent(op.ins[0], back)
    if planes is not None:
        level = np.nextafter(total - (charge * (1 + 1e-6) + _TINY), -np.inf)
        planes.append((send.get(net.source, np.zeros((*total.shape, net.inputs))), level))
    if net.source in send:
        low, high = found.ends[net.source]
        plus(np.maximum(send[net.source], 0.0), low)
        plus(np.minimum(send[net.source], 0.0), high)
    value = np.nextafter(total - (charge * (1 + 1e-6) + _TINY), -np.inf)
    return np.where(np.isfinite(charge) & np.isfinite(value), value, -np.inf)


class ProofCase:
    """One box of inputs and what is forbidden there: all rows ``a y - b`` of a member at most 0."""

    def __init__(self, net: RealNet, lower: Any, upper: Any, members: Sequence[Any]) -> None:
        _need(len(lower) == net.inputs, "the property has another number of inputs than the net")
        # The reader takes the floats nearest to decimals.
        self.net, self.box = net, (np.nextafter(lower, -np.inf), np.nextafter(upper, np.inf))
        self.a, self.b = (np.concatenate([np.asarray(m[i]) for m in members]) for i in (0, 1))
        _need(self.a.shape[1] == net.size(net.output), "the property has other outputs")
        each = np.repeat(np.arange(len(members)), [len(b) for _, b in members])
        self.member = each == np.arange(len(members))[:, None]
        self.usual = np.full((1, 2, net.neurons), -1.0)
        self.known: Any = ()
        """Ends ``[1, neurons]`` over the whole box."""

    def begin(self, neurons: Any, slopes: Any) -> None:
        """Bounds operands over the whole box, for all leaves; those of ``neurons``, ``[M]``, by
        ``slopes``, ``[M, 2, neurons]``."""
        row = np.full(self.net.neurons, len(slopes))
        row[neurons] = np.arange(len(slopes))
        table = np.concatenate([slopes, self.usual])
        inner = [(rows, table) for rows in self.net.split(row)]
        found = _forward(self.net, tuple(end[None] for end in self.box), (), inner)
        known = [found.ends[op.ins[0]] for op in self.net.curves]
        self.known = tuple(np.concatenate(end, axis=1) for end in zip(*known))

    def least(
        self, leaves: Sequence[Path_], members: Any, weights: Any, slopes: Any, betas: Any
    ) -> Any:
        """``[L, m]`` lower bounds over leaves of ``weights . (a y - b)`` over the rows of members.

        ``members``: ``[L or 1, m]``. ``weights``: ``[L, R]``. ``slopes``, ``betas``: ``[L,
        neurons]``.
        """
        found, rows = self._over(leaves), self.member[members] * weights[:, None]
        start = rows @ self.a, slopes[:, None], betas
        value = _lower(self.net, found, self.net.output, *start, self._rest(found, rows))
        return np.where(found.empty[:, None], 1.0, value)

    def _rest(self, found: LeafEnds, weights: Any) -> Ends:
        """``- weights . b``, and what is charged for it and for ``weights . a``."""
        size = (weights @ np.abs(self.a)) @ found.most(self.net.output)[:, :, None]
        rate = 2 * gamma(weights.shape[-1])
        return -(weights @ self.b), rate * (size[..., 0] + weights @ np.abs(self.b))

    def hull(self, leaves: Sequence[Path_]) -> Ends:
        """Ends ``[L, N]`` of boxes that contain all violations in parts of the box.

        A violation has all rows of a member at most 0, and so has the linear function below each,
        whose least value is at a corner: this bounds how far from the corner it can be.
        """
        found = self._over(leaves)
        planes: list[Ends] = []
        begin, usual = self._rest(found, np.eye(len(self.b))[None]), self.usual[:, :1]
        _lower(self.net, found, self.net.output, self.a[None], usual, None, begin, planes)
        ((a, level),), ends = planes, found.ends[self.net.source]
        good = np.isfinite(level) & np.all(np.isfinite(a), axis=-1)
        a = np.where(good[..., None], a, 0.0)
        size = (np.abs(a) @ found.most(self.net.source)[:, :, None])[..., 0]
        level = level - 2 * gamma(self.net.inputs) * (size + np.abs(level)) - _TINY
        level = np.where(good, level, -np.inf)
        hulls = []
        for mine in self.member:
            steep, low, high = a[:, mine], *ends
            for _ in range(_ROUNDS):
                corner = np.where(steep > 0, low[:, None], high[:, None])
                least = np.sum(steep * corner, axis=-1) + level[:, mine]
                far = np.full(steep.shape, np.inf)
                room = np.broadcast_to(np.maximum(-least, 0.0)[..., None], far.shape)
                np.divide(room, np.abs(steep), out=far, where=steep != 0)
                far = far * (1 + 8 * UNIT) + _TINY
                up = np.nextafter(np.where(steep > 0, corner + far, np.inf), np.inf)
                down = np.nextafter(np.where(steep < 0, corner - far, -np.inf), -np.inf)
                low, high = np.maximum(low, down.max(axis=1)), np.minimum(high, up.min(axis=1))
            none = np.any(low > high, axis=1) | np.any(least > 0, axis=1) | found.empty
            none = none[:, None]
            hulls.append((np.where(none, np.inf, low), np.where(none, -np.inf, high)))
        return tuple(pick(end, axis=0) for pick, end in zip((np.min, np.max), zip(*hulls)))

    def _over(self, leaves: Sequence[Path_]) -> LeafEnds:
        """The ends of all values over leaves."""
        net, count = self.net, len(leaves)
        low, high = (np.repeat(end[None], count, axis=0) for end in self.box)
        down, up = (np.full((count, net.neurons), end) for end in (-np.inf, np.inf))
        for leaf, path in enumerate(leaves):
            for number, value, side in path:
                neuron = number - net.inputs
                if number == CUT:
                    low[leaf] = np.maximum(low[leaf], value[0])
                    high[leaf] = np.minimum(high[leaf], value[1])
                    continue
                at, *ends = (neuron, down, up) if neuron >= 0 else (number, low, high)
                pick, end = (np.maximum, ends[0]) if side > 0 else (np.minimum, ends[1])
                end[leaf, at] = pick(end[leaf, at], value)
        smooth = {net.inputs + n for n in np.flatnonzero(~net.rectified)}
        again = any(n < net.inputs or n in smooth for path in leaves for n, _, _ in path)
        usual = [(np.zeros(n, int), self.usual) for n in np.diff(net.starts)] if again else None
        box = low, np.maximum(low, high)
        found = _forward(net, box, (self.known, (down, up)), usual)
        found.empty = found.empty | np.any(low > high, axis=1)
        return found

    def violated(self, point: Any) -> bool:
        """Whether the output is forbidden at a point ``[N]``, once it is moved into the box."""
        # The box's ends are between the floats around the ones that were read.
        low, high = (np.nextafter(end, way) for end, way in zip(self.box, (np.inf, -np.inf)))
        down = np.maximum(np.minimum(point, np.nextafter(high, -np.inf)), self.box[0])
        up = np.maximum(np.minimum(point, self.box[1]), np.nextafter(low, np.inf))
        net, found = self.net, _forward(self.net, (down[None], up[None]), (), None)
        begin = self.b, 2 * gamma(1) * (np.abs(self.a) @ found.most(net.output)[0] + abs(self.b))
        least = _lower(net, found, net.output, -self.a[None], self.usual[:, :1], begin=begin)
        return bool(np.any(np.all((least[0] >= 0) | ~self.member, axis=1)))


def parts(split: Any, at: Any, cuts: Iterator[Any]) -> Iterator[tuple[Path_, Any]]:
    """The leaves of a tree whose nodes come each before its lower and then its upper half, with
    None; and the parts that are cut, with what is left of them."""
    todo: list[Path_] = [()]
    for number, value in zip(split.tolist(), at.tolist()):
        _need(todo, "a tree has more nodes than parts")
        path = todo.pop()
        if number < 0:
            ends = next(cuts, None) if number == CUT else None
            todo += [] if ends is None else [(*path, (CUT, ends, 0))]
            yield path, ends
        else:
            todo += [(*path, (number, value, 1)), (*path, (number, value, -1))]
    _need(not todo, "a tree ends before all parts of the box are proved")


def check(proof: Any, model: Any, vnnlib: Any) -> dict[str, Any]:
    """What a proof, a file or its bytes, shows of a net, ``.onnx``, and a property, ``.vnnlib``.

    Raises:
      RefusedProofError: the proof does not show it.
      OSError: a file cannot be read.
    """
    try:
        content = proof if isinstance(proof, bytes) else Path(proof).read_bytes()
        data = archive.arrays(io.BytesIO(content), len(content))
        _need("format" in data, "it has no array named 'format', as proofs have")
        _need(int(data["format"]) == FORMAT, f"the format is not {FORMAT}")
        for name, path in (("model", model), ("property", vnnlib)):
            digest = hashlib.sha256(Path(path).read_bytes()).digest()
            _need(data[name].tobytes() == digest, f"it is about another {name}")
        net = RealNet(model)
        cases = [ProofCase(net, *case) for case in vnnlib_file.read(vnnlib)]
        if "point" not in data:
            return {"result": "unsat", "leaves": _holds(net, cases, data)}
        point = np.asarray(data["point"], np.float64)
        _need(point.shape == (net.inputs,) and np.all(np.isfinite(point)), "the point is none")
        _need(cases[int(data["case"])].violated(point), "the point is not shown to be forbidden")
        return {"result": "sat", "leaves": 0}
    except (ArithmeticError, LookupError, TypeError, ValueError, *_UNREADABLE) as error:
        raise RefusedProofError(str(error) or type(error).__name__) from None


def _holds(net: RealNet, cases: list[ProofCase], data: dict[str, Any]) -> int:
    """Checks that trees prove all members of all cases; the number of leaves."""
    for name, most in (("weights", np.inf), ("betas", np.inf), ("slopes", 1), ("inner_slopes", 1)):
        a = data[name] = np.asarray(data[name], np.float64)
        good = (a >= 0) & (a <= most) | (name == "betas") | (a == -1) & (most == 1)
        _need(np.all(np.isfinite(a) & good), f"{name} out of range")
    trees, inner, split, at = data["trees"], data["inner"], data["split"], data["at"]
    sizes, columns = trees[:, 2], data["neurons"]
    for of, end in ((columns, net.neurons), (inner[:, 1], net.neurons), (trees[:, 0], len(cases))):
        _need(np.all((of >= 0) & (of < end)), "a number of a neuron or a case is none")
    _need(np.all(np.isfinite(at)) and np.all(split < net.inputs + net.neurons), "no such split")
    _need(np.all(sizes > 0) and len(split) == len(at) == np.sum(sizes), "nodes without a tree")

    def for_all(some: Any, rest: float = -1.0) -> Any:
        full = np.full((*some.shape[:-1], net.neurons), rest)
        full[..., columns] = some
        return full

    for number, case in enumerate(cases):
        mine = inner[:, 0] == number
        case.begin(inner[mine, 1], for_all(data["inner_slopes"][mine]))
    open_ = [set(range(len(case.member))) for case in cases]
    leaf, cuts = 0, iter(np.asarray(data["cuts"], np.float64))
    for (number, member, size), end in zip(trees, np.cumsum(sizes)):
        case, nodes = cases[number], slice(end - size, end)
        members = list(range(len(case.member))) if member < 0 else [int(member)]
        found = parts(split[nodes], at[nodes], cuts)
        while batch := list(itertools.islice(found, AT_ONCE)):
            if cut := [path for path, ends in batch if ends is not None]:
                _need(member < 0, "a box is cut for one member")
                low, high = case.hull(cut)
                kept = np.stack([ends for _, ends in batch if ends is not None], axis=1)
                _need(np.all((kept[0] <= low) & (kept[1] >= high)), "a box is cut too much")
            some = [path for path, ends in batch if ends is None]
            rows = slice(leaf, leaf + len(some))
            weights, betas = data["weights"][rows, : len(case.b)], for_all(data["betas"][rows], 0.0)
            low = case.least(some, [members], weights, for_all(data["slopes"][rows]), betas)
            _need(np.all(low > 0), f"a bound of leaf {leaf} or one that follows is not above 0")
            leaf += len(some)
        open_[number] -= set(members)
    numbers = (len(data[name]) for name in ("weights", "slopes", "betas"))
    _need(set(numbers) == {leaf}, "numbers without a leaf")
    _need(not any(open_), "not all that is forbidden is shown to be impossible")
    return leaf
