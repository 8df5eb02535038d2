r"""Backward linear bounds (CROWN) on a network: lower bounds of linear functions of its values.

Coefficients go back from the bounded functions to the input: through affine maps by transposition,
elsewhere through the upper line where a coefficient is negative and the lower line where it is
positive. At the input the linear function is minimised over ball and box.

Source: Zhang et al. [zhang2018].
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax.numpy as jnp

from wdjax import xla_cpu
from wdjax.bounds import coupled, network
from wdjax.bounds.coefficients import (
    Coefficients,
    Rows,
    Whole,
    Window,
    flat,
    plain,
    seen,
    through,
    total,
    whole,
)
from wdjax.bounds.domain import Array, Linear
from wdjax.bounds.network import Affine, Bounded, Network, Part
from wdjax.bounds.record import Lines, Turned
from wdjax.bounds.region import Region
from wdjax.xla_cpu import framed, rounding, summed, unframed


@dataclass(eq=False)
class Pass:
    """Bounds of every value of a network over a batch of regions; filled in program order.

    The keys are places in the graph.
    """

    network: Network
    region: Region
    values: dict[int, Bounded] = field(default_factory=dict)
    lines: dict[int, Lines] = field(default_factory=dict)
    charges: dict[int, Array] = field(default_factory=dict)
    """Offsets and rounding errors of affine parts, framed, ``[2, B, *shape]``."""
    boxes: dict[int, Array] = field(default_factory=dict)
    """Ends of the outputs of nonlinear equations, framed, ``[2, B, *shape]``."""
    spheres: dict[int, coupled.Sphere] = field(default_factory=dict)
    """L2 balls that contain the values, if the regions are such balls."""
    known: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)
    """Ends ``[B, *shape]`` of operands of nonlinear equations that are given from outside."""
    scans: dict[int, "Rolled"] = field(default_factory=dict)
    """Loops that are not written out, by their first output."""
    leave: "Leave | None" = None
    """In a step of such a loop: lower bounds ``[G, R]`` of functions of the step's inputs."""
    outside: int = 0
    """In such a step: the largest number of entries of a value outside."""
    refined: set[int] = field(default_factory=set)
    """Places whose entries all were tightened: for another equation it would give the same."""

    def gathered(self, place: int) -> tuple[Array, Array]:
        """The offset of a value's affine part and its rounding error, ``[B, *shape]`` each."""
        if place not in self.charges:
            return (jnp.zeros_like(self.values[place].lower),) * 2
        offset, error = unframed(self.charges[place])
        return offset, error


class Rolled(Protocol):
    """A loop in a pass, :class:`wdjax.bounds.scans.Scan`."""

    flushed: float
    """Bound of what all its steps lose by underflow."""

    def back(
        self,
        sum_: "Sum",
        outs: Mapping[int, Coefficients],
        rows: Rows,
        slopes: "Slopes | None",
        record: "Record | None",
    ) -> tuple["Sum", dict[int, Coefficients]]:
        """Sends coefficients of the results, by their number, back to the operands, by place.

        ``slopes`` and ``record`` are those of its steps."""
        ...


STEEPEST = 4.0
"""Largest factor of the usual slopes of lines that may be turned, as of S-shaped functions."""
OUTSIDE = -1
"""The key of slopes of lines outside, for functions of a loop's step."""

Slopes: TypeAlias = Mapping[int, Any]
"""Lower slopes ``[G, R, ...]`` of each row, by the output of their ReLU; factors of the usual
slopes where lines may be ``turned``. Those of a loop's steps, ``[G, R, T, ...]``, are a mapping
too, by the loop's first output."""
Record: TypeAlias = dict[int, Any]
"""A :class:`Free` for each of the slopes that may be chosen, in mappings as in :data:`Slopes`."""
Leave: TypeAlias = Callable[
    ["Sum", Mapping[int, Coefficients], Rows, Slopes | None, Record | None], Array
]


class Free(NamedTuple):
    """Slopes that may be chosen."""

    slopes: Array
    """``[G, R, ...]``: those that are used by default."""
    most: Array
    """Their upper limit, as many axes of length 1 (but T, that of a loop's steps)."""
    coefficients: Array
    """``[G, R, ...]``: what meets their lines."""


Bound = Callable[[Pass, Mapping[int, Coefficients], Rows], Array]
"""Lower bounds ``[G, R]`` of sums of linear functions of values, such as :func:`backward`."""


def widened(lower: Array, upper: Array) -> tuple[Array, Array]:
    """Ends ``[B, *shape]`` with room for the rounding of coefficients that meet them."""
    unit = rounding(lower[0].size, lower.dtype)
    return lower - unit * jnp.abs(lower), upper + unit * jnp.abs(upper)


def chunk(state: Pass, group: int) -> int:
    """How many rows of ``group`` functions to send back at once."""
    return xla_cpu.rows_at_once(group, widest(state))


def widest(state: Pass) -> int:
    """The largest number of entries of a value that coefficients may pass."""
    return max(state.outside, *(math.prod(v.lower.shape[1:]) for v in state.values.values()))


def backward(
    state: Pass,
    coefficients: Mapping[int, Coefficients],
    rows: Rows,
    slopes: Slopes | None = None,
    record: Record | None = None,
    mirrored: bool = False,
    arrived: dict[int, Coefficients] | None = None,
    begun: "Sum | None" = None,
) -> Array:
    """Lower bounds ``[G, R]`` of sums of linear functions of values.

    Args:
      state: the values' bounds and lines.
      coefficients: of the bounded functions, by the place of the value.
      rows: the ``R`` rows.
      slopes: shaped like the coefficients that meet them, or dense; None for those of
        ``state.lines``.
      record: filled with what slopes may be chosen.
      mirrored: also bounds the negatives, ``[2, G, R]``; the lines must be parallel.
      arrived: filled with the coefficients at nonlinear values that have lines, and at the input,
        by place.
      begun: a sum to which the bounds are added; by default 0.
    """
    if begun is None:
        first = next(iter(coefficients.values())).a
        zero = jnp.zeros((*(2,) * mirrored, *first.shape[:2]), first.dtype)
        begun = Sum(zero, zero)
    sum_, found = sent(state, coefficients, rows, begun, slopes, record, arrived)
    if state.leave is not None:
        seen = None if record is None else record.setdefault(OUTSIDE, {})
        return state.leave(sum_, found, rows, (slopes or {}).get(OUTSIDE), seen)
    net = state.network
    if net.source in found:
        a, least = found[net.source], functools.partial(state.region.least, rows=rows)
        if arrived is not None:
            arrived[net.source] = a
        sum_ = sum_.plus(jnp.stack([least(a), least(a._replace(a=-a.a))]) if mirrored else least(a))
    lost = network.flushed(net) + sum(scan.flushed for scan in state.scans.values())
    return sum_.low(lost)


def sent(
    state: Pass,
    coefficients: Mapping[int, Coefficients],
    rows: Rows,
    sum_: "Sum",
    slopes: Slopes | None = None,
    record: Record | None = None,
    arrived: dict[int, Coefficients] | None = None,
) -> tuple["Sum", dict[int, Coefficients]]:
    """Sends coefficients back to the inputs, as :func:`backward`; by the input's place."""
    net, found = state.network, dict(coefficients)

    def send(place: int, new: Coefficients) -> None:
        found[place] = total(found[place], new, rows) if place in found else new

    def charge(place: int, a: Coefficients) -> None:
        nonlocal sum_
        if place in state.charges:
            sum_ = _charged(sum_, state.charges[place], a, rows)

    for place, a in coefficients.items():
        charge(place, a)
    for node in reversed(net.graph.nodes):
        first = node.outputs[0]
        if first in state.scans:
            outs = {k: found.pop(i) for k, i in enumerate(node.outputs) if i in found}
            if outs:
                steps = None if record is None else record.setdefault(first, {})
                given = (slopes or {}).get(first)
                sum_, entered = state.scans[first].back(sum_, outs, rows, given, steps)
                for part, back in entered.items():
                    charge(part, back)
                    send(part, back)
            continue
        for place in node.outputs:
            if place not in found:
                continue
            a = found.pop(place)
            if place in state.lines:
                lines, chosen = state.lines[place], (slopes or {}).get(place)
                if chosen is not None and chosen.ndim != a.a.ndim:
                    a = whole(a, rows)  # The slopes are dense.
                if arrived is not None:
                    arrived[place] = a
                if record is not None and (free := _free(lines, a, rows)):
                    record[place] = free
                sum_, backs = _relaxed(sum_, lines, a, rows, chosen)
                for operand, back in backs:
                    send(node.inputs[operand], back)
            elif place in state.boxes:
                flat_a, box = flat(a), seen(state.boxes[place], rows, a)[:, None]
                sum_ = sum_.between(flat_a, *jnp.where(flat_a == 0, 0.0, box))  # Avoids 0 * inf.
            else:
                for part, back in transposed(net.affine[place], a, rows):
                    charge(part, back)
                    send(part, back)
    return sum_, found


def _free(lines: Lines, a: Coefficients, rows: Rows) -> Free | None:
    """The slopes that may be chosen for these coefficients."""
    steepest = jnp.full((1,) * a.a.ndim, STEEPEST if lines.turned else 1.0, a.a.dtype)
    if lines.turned is not None:
        return Free(jnp.ones_like(a.a), steepest, a.a)
    if lines.free is not None:
        usual = seen(lines.maps[0], rows, a)[2]
        return Free(jnp.broadcast_to(usual.reshape(a.a.shape[1:]), a.a.shape), steepest, a.a)
    return None


def transposed(affine: Affine, a: Coefficients, rows: Rows) -> list[tuple[int, Coefficients]]:
    """Sends coefficients ``a`` of an affine value back: the place and coefficients of each operand.

    Convolutions keep patches, entrywise maps keep the form of ``a``, all others make it dense.
    """
    conv = plain(affine.node.eqn, affine.exact)
    if conv is not None and len(affine.parts) == 1:
        return [(affine.parts[0].place, through(a, conv, rows))]
    avals: list[Any] = [atom.aval for atom in affine.node.eqn.invars]
    shapes = {place: aval.shape for place, aval in zip(affine.node.inputs, avals)}
    if affine.record.diagonal and {shapes[p.place] for p in affine.parts} == {affine.offset.shape}:
        return [(part.place, _scaled(affine, part, a, rows)) for part in affine.parts]
    full = whole(a, rows)
    return [(part.place, full.behind(part.apply, shapes[part.place])) for part in affine.parts]


def _scaled(affine: Affine, part: Part, a: Coefficients, rows: Rows) -> Coefficients:
    """The coefficients of one operand of an affine equation that scales each entry of it.

    Multiplies ``a`` by the factors, which are ``part`` applied to ones; by a single number where
    all entries have the same factor.
    """
    factor = part.apply(jnp.ones(affine.offset.shape, affine.offset.dtype))
    known = [jnp.ndim(v) for v in affine.exact if v is not None]
    if not affine.record.scales or known == [0]:
        return a._replace(a=a.a * factor.reshape(-1)[0])
    (factors,) = seen(framed(factor[None]), rows.of_all(), a)
    return a._replace(a=a.a * factors.reshape(a.a.shape[1:]))


class Sum(NamedTuple):
    """A running sum and the sum of its terms' magnitudes, from which its rounding is bounded.

    Both are ``[G, R]``, one entry a function, or ``[2, G, R]`` with the negated functions second.
    """

    value: Array
    size: Array
    terms: int = 0

    def plus(self, term: Array) -> "Sum":
        return Sum(self.value + term, self.size + jnp.abs(term), self.terms + 1)

    def raised(self, last: Array) -> "Sum":
        """Raises the last term by numbers of at least 0.

        Its rounding needs no room of its own: :meth:`low` has twice that of all terms.
        """
        return self._replace(value=self.value + last, size=self.size + last)

    def least(self, of: Linear, a: Array) -> "Sum":
        """Adds ``of``, a minimum, for the coefficients ``a``, ``[G, R, N]``, and for ``-a``
        where negated functions are bounded too."""
        both = self.value.ndim == a.ndim
        return self.plus(jnp.stack([of(a), of(-a)]) if both else of(a))

    def between(self, a: Array, low: Array, up: Array) -> "Sum":
        """Adds the minimum of ``own . z`` over ``low <= z <= up``, all ``[G, R, N]``."""

        def least(a: Array) -> Array:
            return summed(jnp.maximum(a, 0.0) * low + jnp.minimum(a, 0.0) * up)

        return self.least(least, a)

    def low(self, flushed: float) -> Array:
        """The sum, less its rounding and ``flushed``, the bound of the loss by underflow."""
        unit = (self.terms + 16) * float(jnp.finfo(self.value.dtype).eps)
        return jnp.where(
            jnp.isfinite(self.size), self.value - (unit * self.size + flushed), -jnp.inf
        )


def _charged(sum_: Sum, charges: Array, a: Coefficients, rows: Rows) -> Sum:
    """Adds to the sum the minimum of ``a . (offset +- error)`` of an affine value.

    ``charges`` ``[2, B, *shape]`` are offset and rounding error, framed.
    """
    offset, error = seen(charges, rows, a)

    def least(coefficients: Array) -> Array:
        # Faster on CPUs than Sum.between. Where an error is infinite all lines are constant, so a
        # coefficient of 0 there is exact and did not underflow.
        return summed(
            coefficients * offset - jnp.where(coefficients == 0, 0.0, jnp.abs(coefficients) * error)
        )

    return sum_.least(least, flat(a))


def _relaxed(
    sum_: Sum, lines: Lines, a: Coefficients, rows: Rows, slope: Array | None
) -> tuple[Sum, list[tuple[int, Coefficients]]]:
    """Sends coefficients ``a`` of a nonlinear value through its lines.

    Adds the intercepts to ``sum_`` and returns it with ``(operand number, its coefficients)``;
    ``slope``, ``[G, R, ...]``, replaces the lower slopes where these are free, and multiplies those
    that are used where lines may be turned.
    """
    if any(view.view is not None for view in lines.views):
        a = whole(a, rows)
    coefficients = flat(a)
    positive, negative = jnp.maximum(coefficients, 0.0), jnp.minimum(coefficients, 0.0)
    low, up, *slopes = seen(lines.maps[0], rows, a)
    if slope is not None and lines.free is not None:
        (free, shift), slope = seen(lines.maps[1], rows, a), slope.reshape(coefficients.shape)
        low = jnp.where(free > 0, slope * shift, low)
        slopes[0] = jnp.where(free > 0, slope, slopes[0])
    if slope is not None and lines.turned is not None:
        given = seen(lines.maps[1], rows, a)
        steep = jnp.where(coefficients > 0, slopes[0], slopes[1]) * slope.reshape(
            coefficients.shape
        )
        ends, good = _turned(lines.turned, steep, given), given[-1] > 0
        good = good & jnp.isfinite(ends[0]) & jnp.isfinite(ends[1])
        low, up = (jnp.where(good, *pair) for pair in zip(ends, (low, up)))
        slopes = [jnp.where(good, steep, usual) for usual in slopes]
    sum_ = sum_.between(coefficients, low, up)
    if lines.around is not None:
        operand = positive * slopes[0] + negative * slopes[1]
        reach = jnp.broadcast_to(lines.reach, len(lines.around[0]))[rows.sample]
        more = coupled.gain(seen(lines.around, rows, a), reach, coefficients, operand)
        sum_ = sum_.raised(more)
    backs = []
    for view, below, above in zip(lines.views, slopes[::2], slopes[1::2]):
        back = (positive * below + negative * above).reshape(a.a.shape)
        sent: Coefficients = a._replace(a=back)
        if isinstance(sent, Window):
            sent = sent._replace(clean=True)  # Outside of the map all slopes are 0.
        if view.view is not None:
            sent = Whole(back).behind(view.view, view.shape)
        backs.append((view.operand, sent))
    return sum_, backs


def _turned(rule: Turned, slope: Array, maps: Array) -> tuple[Array, Array]:
    """The intercepts of lines with these slopes over the operand's linear part, as :func:`_over`
    has them; ``maps`` are what it framed."""
    lower, upper, offset, error, slack, unit, _ = maps
    ends = []
    for constant, down in zip(rule(slope, lower, upper), (-1, 1)):
        constant = constant + down * (slack + unit * jnp.abs(constant))
        loss = jnp.where(slope == 0, 0.0, jnp.abs(slope) * error)
        ends.append(constant + slope * offset + down * loss)
    return ends[0], ends[1]
