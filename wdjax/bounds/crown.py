r"""Backward linear bounds (CROWN) on a network: lower bounds of linear functions of its values.

Coefficients go back from the bounded functions to the input: through affine maps by transposition,
elsewhere through the upper line where a coefficient is negative and the lower line where it is
positive. At the input the linear function is minimised over ball and box. The operands of a
nonlinear function are bounded before, if its lines depend on these bounds and intervals leave
neurons unstable: all operands of a layer at once (:meth:`Network.layers`).

Source: Zhang et al. [zhang2018].
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import xla_cpu
from wdjax.bounds import coupled, interval, network
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
from wdjax.bounds.graph import Node
from wdjax.bounds.network import Affine, Bounded, Network, Part
from wdjax.bounds.primitives import TABLE
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
    refined: set[int] = field(default_factory=set)
    """Places whose entries all were tightened: for another equation it would give the same."""

    def gathered(self, place: int) -> tuple[Array, Array]:
        """The offset of a value's affine part and its rounding error, ``[B, *shape]`` each."""
        if place not in self.charges:
            return (jnp.zeros_like(self.values[place].lower),) * 2
        offset, error = unframed(self.charges[place])
        return offset, error


Bound = Callable[[Pass, Mapping[int, Coefficients], Rows], Array]
"""Lower bounds ``[G, R]`` of sums of linear functions of values, such as :func:`backward`."""
Refinement = Callable[[Pass, Mapping[int, Array]], None]
"""``(pass, needed)``: tightens the bounds of values, by place, where ``needed``, booleans
``[B, *shape]`` each, are true; such as :func:`refine`."""


def bounds(
    net: Network,
    region: Region,
    tighten: Sequence[Refinement] = (),
    known: Mapping[int, tuple[Array, Array]] | None = None,
    coupling: bool = False,
) -> Pass:
    """Bounds of every value of a program, ``[B, *shape]``: intervals, then ``tighten`` in turn.

    ``known`` are given ends ``[B, *shape]`` of operands of nonlinear equations, by place. With
    ``coupling`` the rectifiers of a layer are relaxed together (:mod:`wdjax.bounds.coupled`), in an
    l2 region.
    """
    state = Pass(net, region, known=known or {})
    state.values[net.source] = network.charged_value(region.lower, region.upper, 0)
    if coupling:
        state.spheres[net.source] = coupled.of_region(region)
    for layer in net.layers():
        for node in layer:
            for place in node.outputs:
                if place in net.affine:
                    _forward(state, place, coupling)
        _relax(state, [node for node in layer if node.outputs[0] in net.others], tighten)
    return state


def _forward(state: Pass, place: int, coupling: bool) -> None:
    """Bounds of an affine value, what it is charged with, and the ball that contains it."""
    net, affine = state.network, state.network.affine[place]
    value = network.forward(affine, state.values, net.charged)
    state.values[place] = value
    if place in net.charged:
        unit = rounding(value.offset.size, value.offset.dtype)
        error = (1 + unit) * value.error + unit * jnp.abs(value.offset)
        state.charges[place] = framed(value.offset[None], error)
    if coupling:
        lost = state.gathered(place)[1] if place in net.charged else None
        state.spheres[place] = coupled.through(affine, state.spheres, lost, net.charged)


def _relax(state: Pass, nodes: Sequence[Node], tighten: Sequence[Refinement]) -> None:
    """Bounds and lines of the outputs of a layer's nonlinear equations, and before these tighter
    bounds of their operands where the lines depend on them (unstable neurons, ``[B, *shape]``)."""
    for place in state.known.keys() & {place for node in nodes for place in node.inputs}:
        value, (lower, upper) = state.values[place], state.known[place]
        state.values[place] = value._replace(
            lower=jnp.maximum(value.lower, lower), upper=jnp.minimum(value.upper, upper)
        )
    lines = [_lines(state, node) for node in nodes]
    whole = set[int]()
    for tighter in tighten:
        needed, before = dict[int, Array](), dict(state.values)
        for node, line in zip(nodes, lines):
            for place, some in _loose(state, node, line).items():
                needed[place] = needed[place] | some if place in needed else some
                if line is not None and line.open is None:
                    whole.add(place)
        if needed:
            tighter(state, needed)
        changed = {place for place in needed if state.values[place] is not before[place]}
        lines = [
            _lines(state, node) if changed.intersection(node.inputs) else line
            for node, line in zip(nodes, lines)
        ]
    state.refined |= whole
    for node, line in zip(nodes, lines):
        _bend(state, node, line)


def _loose(state: Pass, node: Node, lines: Lines | None) -> dict[int, Array]:
    """Where tighter bounds of its operands would improve an equation's lines, by place."""
    found = {}
    for view in lines.views if lines is not None else ():
        place = node.inputs[view.operand]
        value = state.values[place]
        mixed = value.mixes > 1 or (value.mixes and state.region.norm != math.inf)
        if mixed and not value.alone and place not in state.refined:
            assert lines is not None
            found[place] = value.upper > value.lower if lines.open is None else lines.open
    return found


def _bend(state: Pass, node: Node, lines: Lines | None) -> None:
    """Bounds and lines of a nonlinear equation's outputs."""
    net = state.network
    outs = network.nonlinear(net, node, state.values, None if lines is None else lines.ends)
    for place, (lower, upper) in zip(node.outputs, outs):
        if lower.dtype == bool:
            state.values[place] = Bounded(lower, upper, lower, lower, lower)
            continue
        scalar = lines is not None and len(lines.views) == 1 and lines.views[0].view is None
        state.values[place] = network.charged_value(lower, upper, 2)._replace(alone=scalar)
        unit = rounding(lower[0].size, lower.dtype)
        box = lower - unit * jnp.abs(lower), upper + unit * jnp.abs(upper)
        state.boxes[place] = framed(*box)
        if lines is not None:
            lines = _coupled(state, lines, place, node)
            state.lines[place] = _over(state, lines, *box, node)
        elif state.spheres:
            state.spheres[place] = coupled.of_box(lower, upper)


def _coupled(state: Pass, lines: Lines, place: int, node: Node) -> Lines:
    """The lines with the l2 ball that contains their operand; sets the ball of their value."""
    if not state.spheres:
        return lines
    (lower, upper), operand = state.values[place][:2], node.inputs[lines.views[0].operand]
    if lines.free is None:
        state.spheres[place] = coupled.of_box(lower, upper)
        return lines
    used, ends = lines.free & jnp.isfinite(lines.up), state.values[operand][:2]
    held, state.spheres[place] = coupled.rectified(state.spheres[operand], *ends, used)
    maps = coupled.maps(held, *ends, lines.up, used)
    return lines._replace(around=maps, reach=held.radius)


def _lines(state: Pass, node: Node) -> Lines | None:
    """The lines of one equation over its operands' bounds; None if its primitive has none."""
    values = [state.values.get(place) for place in node.inputs]
    rules = TABLE.get(node.name)
    if rules is None or rules.lines is None:
        return None
    if any(v is not None and v.lower.dtype == bool for v in values):
        return None
    args: list[Any] = [
        interval.lifted(jnp.asarray(state.network.exact[place])) if v is None else v[:2]
        for place, v in zip(node.inputs, values)
    ]
    return rules.lines(node.eqn, args, [v is not None for v in values])


def _over(state: Pass, lines: Lines, lower: Array, upper: Array, node: Node) -> Lines:
    """Lines over the operands' linear parts: offsets and errors move into the intercepts.

    An operand is its linear part, plus an offset, plus at most an error. The rounding of dtypes
    shorter than float32 is added too. ``lines`` have entries ``[B, *shape]``; ``lower`` and
    ``upper`` are interval bounds of the output of ``node``. Where a line is not finite it becomes
    the constant ``lower`` or ``upper``. The roundings made here fit into what :func:`rounding`
    allows.
    """
    declared: Any = node.eqn.outvars[0].aval
    slack = interval.slack_of(node.eqn, declared.dtype, jnp.maximum(jnp.abs(lower), jnp.abs(upper)))
    unit = rounding(lower[0].size, lower.dtype)
    ends, slopes, goods = [], [], []
    for side, level, down in (("low", lower, -1), ("up", upper, 1)):
        constant, steep = getattr(lines, side), [getattr(view, side) for view in lines.views]
        constant = constant + down * (slack + unit * jnp.abs(constant))
        for view, slope in zip(lines.views, steep):
            offset, error = state.gathered(node.inputs[view.operand])
            if view.view is not None:
                offset, error = (jax.vmap(view.view)(t) for t in (offset, error))
            error = jnp.where(slope == 0, 0.0, jnp.abs(slope) * error)
            constant = constant + slope * offset + down * error
        good = functools.reduce(jnp.logical_and, map(jnp.isfinite, [level, constant, *steep]))
        goods.append(good)
        ends.append(jnp.where(good, constant, level))
        slopes.append([jnp.where(good, slope, 0.0) for slope in steep])
    views = tuple(view._replace(low=low, up=up) for view, low, up in zip(lines.views, *slopes))
    maps = [framed(*ends, *itertools.chain(*zip(*slopes)))]
    lines = lines._replace(views=views, low=ends[0], up=ends[1])
    if lines.free is not None:  # Only max(z, 0) has free slopes, and it rounds nothing.
        free, (offset, error) = lines.free & goods[0], state.gathered(node.inputs[views[0].operand])
        shift = jnp.where(free, offset - error, 0.0)
        maps.append(framed(free.astype(shift.dtype), shift))
        lines = lines._replace(free=free, shift=shift)
    if lines.turned is not None:
        operand = node.inputs[views[0].operand]
        good = (goods[0] & goods[1]).astype(lower.dtype)
        charge = (jnp.broadcast_to(t, good.shape) for t in (slack, jnp.asarray(unit, lower.dtype)))
        maps.append(framed(*state.values[operand][:2], *state.gathered(operand), *charge, good))
    return lines._replace(maps=tuple(maps))


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


def refine(state: Pass, needed: Mapping[int, Array], bound: Bound) -> None:
    """Tightens bounds of values by ``bound`` where ``needed``, booleans ``[B, *shape]`` by place.

    All values but feature maps in one loop, since its body takes long to compile.
    """
    maps = {place for place, some in needed.items() if is_map(some.shape[1:])}
    vectors = needed.keys() - maps
    for places in [*([place] for place in sorted(maps)), *([sorted(vectors)] if vectors else [])]:
        find = functools.partial(_entries, state, places, bound)
        improve(state, {place: needed[place] for place in places}, chunk(state, 2), find)


def is_map(shape: Sequence[int]) -> bool:
    """Whether a value of one sample is a feature map, ``[1, height, width, channels]``."""
    return len(shape) == 4 and shape[0] == 1


def improve(
    state: Pass,
    needed: Mapping[int, Array],
    width: int,
    find: Callable[[Sequence[Array]], Array],
) -> None:
    """Tightens values' bounds by ``find`` where ``needed``, ``width`` entries at a time.

    ``find`` gets the :func:`numbers` of ``R`` entries of ``needed``, of several values in a row,
    and returns lower bounds of these and of their negatives, ``[2, R, ...]``. Where the last axis
    of a feature map's ``needed`` has length 1, an entry stands for all channels.
    """
    values = [state.values[place] for place in needed]
    (some, *more), (value, *_) = needed.values(), values
    if more:
        flat = [part.reshape(len(part), -1) for part in needed.values()]
        some = jnp.concatenate(flat, axis=1)
    each = value.lower.size // some.size
    rest = (each,) if each > 1 else ()

    def sides(places: Sequence[Array]) -> Array:
        found = jnp.moveaxis(find(places).reshape(2, -1, *rest), 0, 1)
        return jnp.where(jnp.isfinite(found), found, -jnp.inf)

    found = xla_cpu.by_turns(some, width, sides, (2, *rest), value.lower.dtype)
    found = jnp.moveaxis(found, 1, 0).reshape(2, len(some), -1)
    for place, value, (low, high) in zip(needed, values, _split(found, values)):
        state.values[place] = value._replace(
            lower=jnp.maximum(value.lower, low), upper=jnp.minimum(value.upper, -high)
        )


def _split(flat: Array, values: Sequence[Bounded]) -> list[Array]:
    """``[K, B, N]``, entries of several values in a row, as ``[K, B, *shape]`` each."""
    ends = itertools.accumulate(value.lower[0].size for value in values)
    parts = jnp.split(flat, [*ends][:-1], axis=2)
    return [part.reshape(-1, *value.lower.shape) for part, value in zip(parts, values)]


def _entries(state: Pass, values: Sequence[int], bound: Bound, places: Sequence[Array]) -> Array:
    """``[2, R]``: lower bounds of single entries of ``values``, and of their negatives.

    ``places`` are the samples and positions of the R entries, as :func:`numbers` returns them; the
    entries of several values are counted in a row.
    """
    sample, entry, *position = places
    signs = jnp.array([1.0, -1.0], state.region.lower.dtype)
    shapes = [state.values[place].lower.shape[1:] for place in values]
    a: dict[int, Coefficients] = {}
    if position:
        ((*_, channels),) = shapes
        hot = jax.nn.one_hot(entry, channels, dtype=signs.dtype)
        hot = signs[:, None, None, None, None] * hot[:, None, None]
        a[values[0]] = Window(hot, (1, 1), (0, 0), shapes[0])
        return bound(state, a, Rows(sample, (position[0], position[1])))
    for place, shape in zip(values, shapes):
        size = math.prod(shape)
        hot = jax.nn.one_hot(entry, size, dtype=signs.dtype)  # 0 for another value's entries.
        a[place] = Whole(signs.reshape(2, *(1,) * (len(shape) + 1)) * hot.reshape(-1, *shape))
        entry = entry - size
    return bound(state, a, Rows(sample))


def chunk(state: Pass, group: int) -> int:
    """How many rows of ``group`` functions to send back at once."""
    return xla_cpu.rows_at_once(group, widest(state))


def widest(state: Pass) -> int:
    """The largest number of entries of a value."""
    return max(math.prod(v.lower.shape[1:]) for v in state.values.values())


def backward(
    state: Pass,
    coefficients: Mapping[int, Coefficients],
    rows: Rows,
    slopes: Mapping[int, Array] | None = None,
    record: dict[int, tuple[Array, Array]] | None = None,
    mirrored: bool = False,
    arrived: dict[int, Coefficients] | None = None,
) -> Array:
    """Lower bounds ``[G, R]`` of sums of linear functions of values.

    Args:
      state: the values' bounds and lines.
      coefficients: of the bounded functions, by the place of the value.
      rows: the ``R`` rows.
      slopes: lower slopes ``[G, R, ...]`` of each row, by the output of their ReLU, shaped like its
        coefficients or dense; of lines that may be ``turned``, factors of the usual slopes; None
        for those of ``state.lines``.
      record: filled with ``(default slopes, coefficients)`` of each ReLU whose slopes are free, and
        ``(ones, coefficients)`` where lines may be turned.
      mirrored: also bounds the negatives, ``[2, G, R]``; the lines must be parallel.
      arrived: filled with the coefficients at nonlinear values that have lines, and at the input,
        by place.
    """
    net, found = state.network, dict(coefficients)
    first = next(iter(found.values())).a
    zero = jnp.zeros((*(2,) * mirrored, *first.shape[:2]), first.dtype)
    sum_ = Sum(zero, zero)

    def send(place: int, new: Coefficients) -> None:
        found[place] = total(found[place], new, rows) if place in found else new

    def charge(place: int, a: Coefficients) -> None:
        nonlocal sum_
        if place in state.charges:
            sum_ = _charged(sum_, state.charges[place], a, rows)

    for place, a in coefficients.items():
        charge(place, a)
    for node in reversed(net.graph.nodes):
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
                if record is not None and lines.turned is not None:
                    record[place] = jnp.ones_like(a.a), a.a
                if record is not None and lines.free is not None:
                    usual = seen(lines.maps[0], rows, a)[2]
                    record[place] = jnp.broadcast_to(usual.reshape(a.a.shape[1:]), a.a.shape), a.a
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
    if net.source in found:
        a, least = found[net.source], functools.partial(state.region.least, rows=rows)
        if arrived is not None:
            arrived[net.source] = a
        sum_ = sum_.plus(jnp.stack([least(a), least(a._replace(a=-a.a))]) if mirrored else least(a))
    return sum_.low(network.flushed(net))


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
