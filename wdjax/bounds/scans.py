"""Linear bounds through a loop of known length, by one compiled body for all its steps.

A step bounds its values from those of the step before and keeps its lines, stacked along a first
axis of length T. Coefficients go back through the lines of one step after another. Where a step's
own operands are tightened they go back through its own lines first, then through those of all
steps before it, and then on to the input.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from wdjax import loops, program
from wdjax.bounds import network, passes
from wdjax.bounds.coefficients import Coefficients, Rows, Whole, whole
from wdjax.bounds.domain import Array
from wdjax.bounds.explicit import explicit
from wdjax.bounds.fused import fuse
from wdjax.bounds.graph import FULL, Graph, Node, dependent, flatten
from wdjax.bounds.network import Network
from wdjax.bounds.passes import Pass, Record, Slopes, Sum
from wdjax.bounds.record import Ends, Lines
from wdjax.xla_cpu import framed

Run: TypeAlias = Callable[[Pass], None]
"""Fills a pass whose inputs are bounded, such as :func:`wdjax.bounds.crown.run`."""


class _Step(NamedTuple):
    """What the way back through a step needs, by place; stacked: of all steps."""

    maps: dict[int, tuple[Array, ...]]
    charges: dict[int, Array]
    boxes: dict[int, Array]
    known: dict[int, Array]
    """The carries that do not depend on the program's input, as they enter the step."""


class _Body:
    """A loop's body as a graph, and what its inputs are: constants, carries and series."""

    def __init__(self, eqn: JaxprEqn, moving: Sequence[bool]) -> None:
        """``moving``: which operands of the loop depend on the program's input."""
        consts, carries = program.scan_counts(eqn)
        flat = flatten(eqn.params["jaxpr"])
        self.inputs = flat.inputs
        self.carries = flat.inputs[consts : consts + carries]
        self.series = flat.inputs[consts + carries :]
        given = {place for place, moves in zip(flat.inputs, moving) if moves}
        self.moving = _moved(flat, given, self.carries)
        """Inputs that depend on the program's input, in any step."""
        graph = dataclasses.replace(flat, inputs=(*sorted(self.moving),))
        self.graph = fuse(explicit(graph))

    def network(self, known: Mapping[int, Any]) -> Network:
        """The body's program, whose other inputs are ``known``."""
        constants = {**self.graph.constants, **known}
        return network.build(dataclasses.replace(self.graph, constants=constants))


def _moved(graph: Graph, moving: set[int], carries: Sequence[int]) -> set[int]:
    """``moving`` inputs of a body, and the carries that depend on them after any step."""
    while True:
        moved = set(moving)
        for node, moves in dependent(dataclasses.replace(graph, inputs=(*moving,))):
            moved.update(node.outputs if any(moves) else ())
        more = {place for place, out in zip(carries, graph.outputs) if out in moved}
        if more <= moving:
            return moving
        moving = moving | more


class Scan:
    """A loop in a pass over a program: what :attr:`Pass.scans` holds."""

    def __init__(self, state: Pass, node: Node) -> None:
        """``state`` has bounds of the loop's operands."""
        self.state = state
        self.body = _Body(node.eqn, [place in state.values for place in node.inputs])
        self.operands, self.outputs = dict(zip(self.body.inputs, node.inputs)), node.outputs
        self.length, self.reverse = node.eqn.params["length"], node.eqn.params["reverse"]
        self.carries = [place for place in self.body.carries if place in self.body.moving]
        self.lines: dict[int, Lines] = {}
        """Those of any step, without arrays."""
        self.flushed = 0.0
        """As :func:`network.flushed`, of all steps."""

    def forward(self, run: Run, plain: Run) -> list[Ends]:
        """Ends ``[B, *shape]`` of the loop's results; ``plain`` fills a pass by intervals."""
        body, outputs = self.body, self.body.graph.outputs
        first = {place: self._outer_ends(place) for place in self.carries}
        begun = {
            place: jnp.asarray(self.state.network.exact[self.operands[place]])
            for place in body.carries
            if place not in self.body.moving
        }

        def step(
            ends: dict[int, Ends], known: dict[int, Array], at: Array, stacked: _Step | None
        ) -> tuple[Any, Any, _Step, Array]:
            inner = self._entered(ends, known, at, stacked)
            (plain if stacked is None else run)(inner)
            self.flushed = self.length * network.flushed(inner.network)
            self.lines = {place: _bare(lines) for place, lines in inner.lines.items()}
            maps = {place: lines.maps for place, lines in inner.lines.items()}
            outs = [self._ends(inner, place) for place in outputs]
            following = {
                place: jnp.asarray(inner.network.exact[out])
                for place, out in zip(body.carries, outputs)
                if place in known
            }
            lost = jnp.stack([jnp.zeros((), bool), *inner.network.lost]).any()
            return outs, following, _Step(maps, inner.charges, inner.boxes, known), lost

        # The first steps look up lines that are not there yet, which must have their shapes.
        zero = jnp.zeros((), int)
        _, _, like, _ = jax.eval_shape(
            lambda ends, known: step(ends, known, zero, None), first, begun
        )
        empty = jax.tree.map(lambda t: jnp.zeros((self.length, *t.shape), t.dtype), like)

        def turn(now: tuple[Any, Any, _Step], at: Array) -> tuple[Any, Any]:
            ends, known, stacked = now
            outs, known, mine, lost = step(ends, known, at, stacked)
            stacked = jax.tree.map(lambda all_, new: all_.at[at].set(new), stacked, mine)
            ends = {place: out for place, out in zip(body.carries, outs) if place in ends}
            return (ends, known, stacked), (outs[len(body.carries) :], lost)

        (last, known, self.stacked), (rows, lost) = loops.scan(
            turn, (first, begun, empty), jnp.arange(self.length), reverse=self.reverse
        )
        self.state.network.lost.append(jnp.any(lost))
        last |= {place: self._all(value) for place, value in known.items()}
        emitted: list[Any] = [tuple(jnp.moveaxis(end, 0, 1) for end in ends) for ends in rows]
        return [*(last[place] for place in body.carries), *emitted]

    def _entered(
        self, ends: Mapping[int, Ends], known: Mapping[int, Array], at: Array, stacked: _Step | None
    ) -> Pass:
        """The pass of a step, with the bounds of its inputs only."""
        inner = Pass(self._network(at, known), self.state.region)
        inner.outside = passes.widest(self.state)
        for place in inner.network.graph.inputs:
            lower, upper = ends[place] if place in ends else self._outer_ends(place)
            if place in self.body.series:
                lower, upper = lower[:, at], upper[:, at]
            inner.values[place] = network.charged_value(lower, upper, 2)
        if stacked is not None:
            inner.leave = functools.partial(self._leave, stacked=stacked, until=at)
        return inner

    def _network(self, at: Array, known: Mapping[int, Array]) -> Network:
        """The program of a step, which has these known carries."""
        given = dict(known)
        for place, operand in self.operands.items():
            if place not in self.body.moving and place not in self.body.carries:
                value = jnp.asarray(self.state.network.exact[operand])
                given[place] = value[at] if place in self.body.series else value
        return self.body.network(given)

    def _outer_ends(self, place: int) -> Ends:
        """Those of the operand that enters the body at a place."""
        operand = self.operands[place]
        if operand in self.state.values:
            return self.state.values[operand][:2]
        return self._all(self.state.network.exact[operand])

    def _ends(self, inner: Pass, place: int) -> Ends:
        if place in inner.values:
            return inner.values[place][:2]
        return self._all(inner.network.exact[place])

    def _all(self, value: Any) -> Ends:
        value = jnp.asarray(value)
        return (jnp.broadcast_to(value, (len(self.state.region.lower), *value.shape)),) * 2

    def back(
        self,
        sum_: Sum,
        outs: Mapping[int, Coefficients],
        rows: Rows,
        slopes: Slopes | None,
        record: Record | None,
    ) -> tuple[Sum, dict[int, Coefficients]]:
        """As :meth:`passes.Rolled.back`."""
        found, emitted = dict[int, Coefficients](), dict[int, Array]()
        for k, a in outs.items():
            if k >= len(self.body.carries):
                emitted[k] = whole(a, rows).a
            elif self.body.carries[k] in self.body.moving:
                found[self.body.carries[k]] = a
            else:  # A known number, which each sample has.
                value = self.state.values[self.outputs[k]].lower[:1]
                value = value.reshape(-1)
                sum_ = sum_.between(whole(a, rows).a.reshape(*a.a.shape[:2], -1), value, value)
        return self._through(sum_, found, emitted, rows, self.stacked, None, slopes, record)

    def _leave(
        self,
        sum_: Sum,
        found: Mapping[int, Coefficients],
        rows: Rows,
        slopes: Slopes | None,
        record: Record | None,
        stacked: _Step,
        until: Array,
    ) -> Array:
        """Bounds functions of which the coefficients of a step's inputs are left."""
        first = self.outputs[0]
        seen = None if record is None else record.setdefault(first, {})
        before = (slopes or {}).get(first)
        sum_, backs = self._through(sum_, found, {}, rows, stacked, until, before, seen)
        return passes.backward(self.state, backs, rows, slopes, record, begun=sum_)

    def _through(
        self,
        sum_: Sum,
        found: Mapping[int, Coefficients],
        emitted: Mapping[int, Array],
        rows: Rows,
        stacked: _Step,
        until: Array | None,
        slopes: Slopes | None,
        record: Record | None,
    ) -> tuple[Sum, dict[int, Coefficients]]:
        """Sends coefficients of a step's inputs back through all steps before the step ``until``;
        None for all steps, with those that ``emitted`` results have, ``[G, R, T, *shape]``."""
        pair, dtype, avals = sum_.value.shape, sum_.value.dtype, self.body.graph.avals
        held: dict[int, Array] = {}
        for place in self.body.graph.inputs:
            a = jnp.zeros((*pair, *avals[place].shape), dtype)
            a = whole(found[place], rows).a if place in found else a
            if place in self.body.series:
                none = jnp.zeros((*pair, self.length, *avals[place].shape), dtype)
                a = none if until is None else none.at[:, :, until].set(a)
            held[place] = a
        terms = 0

        def one(now: tuple[Any, Array, Array], at: Array) -> tuple[Any, Record | None]:
            nonlocal terms
            held, value, size = now
            free: Record | None = None if record is None else {}
            chosen = {place: slope[:, :, at] for place, slope in (slopes or {}).items()}
            inner, part = self._kept(stacked, at), Sum(value, size)
            ends = dict(zip(self.body.carries, self.body.graph.outputs))
            given = [(ends[place], held[place]) for place in self.carries]
            given += [(self.body.graph.outputs[k], a[:, :, at]) for k, a in emitted.items()]
            part, outs = _known_apart(part, inner, given)
            left: dict[int, Coefficients] = {}
            if outs:
                part, left = passes.sent(inner, outs, rows, part, chosen, free)
            terms = part.terms
            following = {}
            for place, a in held.items():
                new = whole(left[place], rows).a if place in left else None
                if place in self.carries:
                    following[place] = jnp.zeros_like(a) if new is None else new
                elif new is None:
                    following[place] = a
                else:
                    series = place in self.body.series
                    following[place] = a.at[:, :, at].set(new) if series else a + new
            return (following, part.value, part.size), free

        def turn(now: Any, at: Array) -> tuple[Any, Record | None]:
            if until is None:
                return one(now, at)
            _, like = jax.eval_shape(one, now, at)
            none = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), like)
            before = at > until if self.reverse else at < until
            return loops.cond(before, one, lambda now, at: (now, none), now, at)

        start, every = (held, sum_.value, sum_.size), jnp.arange(self.length)
        (held, *both), seen = loops.scan(turn, start, every, reverse=not self.reverse)
        if record is not None:
            record.update(jax.tree.map(lambda t: jnp.moveaxis(t, 0, 2), seen))
        sum_ = Sum(both[0], both[1], sum_.terms + self.length * terms)
        entered = ((self.operands[place], a) for place, a in held.items())
        return _known_apart(sum_, self.state, entered)

    def _kept(self, stacked: _Step, at: Array) -> Pass:
        """The pass of a step that was bounded before, for the way back."""
        mine: _Step = jax.tree.map(lambda t: t[at], stacked)
        lines = {place: self.lines[place]._replace(maps=maps) for place, maps in mine.maps.items()}
        net = self._network(at, mine.known)
        return Pass(net, self.state.region, lines=lines, charges=mine.charges, boxes=mine.boxes)


def _known_apart(
    sum_: Sum, state: Pass, given: Iterable[tuple[int, Array]]
) -> tuple[Sum, dict[int, Coefficients]]:
    """Coefficients ``[G, R, *shape]`` by place, added up; what known values add goes to the sum."""
    found: dict[int, Coefficients] = {}
    for place, a in given:
        if place in state.network.exact:
            value = jnp.asarray(state.network.exact[place]).reshape(-1)
            sum_ = sum_.between(a.reshape(*a.shape[:2], -1), value, value)
        else:
            found[place] = Whole(found[place].a + a if place in found else a)
    return sum_, found


def _bare(lines: Lines) -> Lines:
    """The lines' structure, which all steps share."""
    none = jnp.zeros(())
    views = tuple(view._replace(low=none, up=none) for view in lines.views)
    free = None if lines.free is None else none
    return Lines(views, none, none, free=free, turned=lines.turned)


def fits(net: Network) -> bool:
    """Whether only floats of full length enter the program's loops, but for what is known."""
    avals = [
        net.graph.avals[place]
        for node in net.others.values()
        if node.name == "scan"
        for place in node.inputs
        if place not in net.exact
    ]
    return all(aval.dtype in FULL for aval in avals)


def forward(state: Pass, node: Node, run: Run, plain: Run) -> None:
    """Bounds of a loop's results; their lines go to ``state.scans``."""
    scan = state.scans[node.outputs[0]] = Scan(state, node)
    for place, ends in zip(node.outputs, scan.forward(run, plain)):
        state.values[place] = network.charged_value(ends[0], ends[1], 2)
        state.boxes[place] = framed(*passes.widened(*ends))
