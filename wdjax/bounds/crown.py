r"""Bounds of all values of a network: intervals, and tighter ones where lines depend on them.

The operands of a nonlinear function are bounded by a backward pass (:mod:`wdjax.bounds.passes`) if
its lines depend on these bounds and intervals leave neurons unstable: all operands of a layer at
once (:meth:`Network.layers`).

Source: Zhang et al. [zhang2018].
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wdjax import xla_cpu
from wdjax.bounds import coupled, interval, network, scans
from wdjax.bounds.coefficients import Coefficients, Rows, Whole, Window
from wdjax.bounds.domain import Array
from wdjax.bounds.graph import Node
from wdjax.bounds.network import Bounded, Network
from wdjax.bounds.passes import Bound, Pass, chunk, widened
from wdjax.bounds.primitives import TABLE
from wdjax.bounds.record import Lines
from wdjax.bounds.region import Region
from wdjax.xla_cpu import framed, rounding

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
    run(state, tighten, coupling)
    return state


def run(state: Pass, tighten: Sequence[Refinement], coupling: bool = False) -> None:
    """Bounds of all values behind the inputs."""
    net = state.network
    for layer in net.layers():
        for node in layer:
            for place in node.outputs:
                if place in net.affine:
                    _forward(state, place, coupling)
        _relax(state, [node for node in layer if node.outputs[0] in net.others], tighten)


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
        if node.name == "scan":
            fill, plain = (functools.partial(run, tighten=how) for how in (tighten, ()))
            scans.forward(state, node, fill, plain)
        else:
            _bend(state, node, line)


def _loose(state: Pass, node: Node, lines: Lines | None) -> dict[int, Array]:
    """Where tighter bounds of its operands would improve an equation's lines, by place."""
    found = dict[int, Array]()
    if lines is None:
        return found
    for view in lines.views:
        place = node.inputs[view.operand]
        value = state.values[place]
        mixed = value.mixes > 1 or (value.mixes and state.region.norm != math.inf)
        if mixed and not value.alone and place not in state.refined:
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
        # Else XLA writes a chain of functions anew for each use: four sines compile for minutes.
        lower, upper = xla_cpu.single(lower, upper)
        scalar = lines is not None and len(lines.views) == 1 and lines.views[0].view is None
        state.values[place] = network.charged_value(lower, upper, 2)._replace(alone=scalar)
        box = widened(lower, upper)
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
        interval.lifted(jnp.asarray(state.network.exact[place]))
        if v is None
        else xla_cpu.single(v.lower, v.upper)
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
