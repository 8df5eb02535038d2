r"""A program as affine maps between nonlinear equations.

The interval rule of an equation tells whether it is affine in its input-dependent operands. Affine
maps compose; a value that enters a nonlinear equation or leaves the program is *charged*: the
offset and the rounding error of its affine part are kept there, so that a backward pass adds each
of them once.

Rounding: the error bounds the rounding of both the float program and the backward pass:
``u ((k + 2) + (k' + 6)) m`` with ``k`` products added up forwards, ``k'`` backwards, and
``m = |W| |h| + |b|`` along the affine part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import norms
from wdjax.bounds import affine_rules, interval, record
from wdjax.bounds.domain import (
    Array,
    Interval,
    Linear,
    Ternary,
    ends,
    fitted,
    fresh,
    is_exact,
    tiny,
)
from wdjax.bounds.graph import Graph, Node, dependent
from wdjax.bounds.primitives import TABLE
from wdjax.bounds.record import Ends

_LARGEST = 2.0**50
"""Larger values count as unbounded, since even a coefficient that underflowed would matter there.
For smaller values :func:`flushed` bounds the loss by underflow."""
_VIEWS = 2**10
"""Largest number of linear terms that lines have for one operand, such as a pooling window's."""


class Part(NamedTuple):
    """One operand's linear map in an affine value, and the map with absolute coefficients."""

    place: int
    apply: Linear
    absolute: Linear


class Affine(NamedTuple):
    """``offset + sum_i apply_i(operand_i)``."""

    node: Node
    parts: tuple[Part, ...]
    offset: Array
    error: float
    """Rounding relative to the magnitude."""
    short: float
    """Loss by underflow in a dtype shorter than float32."""
    exact: tuple[Any, ...]
    """The operands that do not depend on the input, None for the others."""
    rounded: Linear | None = None
    """As that of :func:`affine_rules.affine`."""

    @property
    def record(self) -> record.Record:
        return record.of(self.node.name)


@dataclass(eq=False)
class Network:
    """The values of a program: constant, affine or nonlinear in others; the keys are places."""

    graph: Graph
    exact: dict[int, Any]
    """Values that do not depend on the input."""
    affine: dict[int, Affine] = field(default_factory=dict)
    others: dict[int, Node] = field(default_factory=dict)
    """The nonlinear equations, by output."""
    charged: set[int] = field(default_factory=set)
    """Operands of nonlinear equations, and the outputs."""
    lost: list[Array] = field(default_factory=list)
    """Scalar booleans: whether a product of constants under- or overflowed."""

    @property
    def source(self) -> int:
        return self.graph.inputs[0]

    @property
    def short(self) -> list[Any]:
        """The float types of fewer than 32 bits in which it computes what depends on the input."""
        dtypes = (self.graph.avals[place].dtype for place in (*self.affine, *self.others))
        return [dtype for dtype in dtypes if affine_rules.is_narrow(dtype)]

    def layers(self) -> list[list[Node]]:
        """The equations that depend on the input, by how many nonlinear ones lie before them.

        A layer's nonlinear equations, such as a cell's gates, depend on none of one another.
        """
        depth, layers = {self.source: 0}, dict[int, list[Node]]()
        for node in self.graph.nodes:
            out = node.outputs[0]
            if out in self.affine or out in self.others:
                at = max(depth.get(place, 0) for place in node.inputs)
                layers.setdefault(at, []).append(node)
                depth.update(dict.fromkeys(node.outputs, at + (out in self.others)))
        return [layers[at] for at in sorted(layers)]


def build(graph: Graph) -> Network:
    """Sorts the equations of a program with one input into constant, affine and nonlinear."""
    network = Network(graph, dict(graph.constants))
    for node, moves in dependent(graph):
        args = [network.exact.get(place) for place in node.inputs]
        if not any(moves):
            outs = affine_rules.evaluate(node.eqn, [jnp.asarray(a) for a in args])
            network.exact.update(zip(node.outputs, outs))
            network.lost.extend(_lost(node, args, outs))
            continue
        found = _affine(node, moves, args)
        if found is None:
            network.others.update(dict.fromkeys(node.outputs, node))
            network.charged.update(i for i, moved in zip(node.inputs, moves) if moved)
        else:
            network.affine.update(zip(node.outputs, found))
    network.charged.update(graph.outputs)
    return network


def _lost(node: Node, args: Sequence[Any], outs: Sequence[Array]) -> list[Array]:
    """Whether a product of constants under- or overflowed: a list of one scalar boolean.

    The list is empty for equations that do not multiply. ``outs`` are the results of ``args``.
    """
    out = outs[0]
    known = TABLE.get(node.name)
    multiplies = known is not None and (known.scales or node.name == "integer_pow")
    if not multiplies or not jnp.issubdtype(out.dtype, jnp.floating):
        return []
    low = jnp.finfo(out.dtype).tiny / jnp.finfo(out.dtype).eps
    sizes = [jnp.abs(jnp.asarray(a)) for a in args]
    alive = math.prod([(s > 0) & jnp.isfinite(s) for s in sizes], start=jnp.asarray(True))
    return [jnp.any(alive & ~((jnp.abs(out) >= low) & jnp.isfinite(out)))]


def _affine(node: Node, moves: Sequence[bool], args: Sequence[Any]) -> list[Affine] | None:
    """The affine map of each output of an equation; None if it is not affine.

    ``moves`` flags the operands that depend on the input, ``args`` holds the others. The equation's
    interval rule is run on dummy intervals: for an affine rule the result is a linear image of
    them.
    """
    rules = TABLE.get(node.name)
    avals: list[Any] = [atom.aval for atom in node.eqn.invars]
    if rules is None or any(
        not jnp.issubdtype(a.dtype, jnp.floating) for a, moved in zip(avals, moves) if moved
    ):
        return None
    dummies: dict[int, Interval] = {}
    operands: list[Any] = []
    for place, moved, aval, arg in zip(node.inputs, moves, avals, args):
        if not moved:
            operands.append(interval.lifted(jnp.asarray(arg)))
            continue
        dtype = jnp.float32 if affine_rules.is_narrow(aval.dtype) else aval.dtype
        if place not in dummies:
            zero = jnp.zeros(aval.shape, dtype)
            dummies[place] = fresh(zero, zero)
        operands.append(dummies[place])
    out = rules.interval(node.eqn, operands, None)
    roots = {root: place for place, dummy in dummies.items() for root in dummy.terms}
    found = []
    for value in out if isinstance(out, list) else [out]:
        if not isinstance(value, Interval) or not set(value.terms) <= set(roots):
            return None
        parts = tuple(Part(roots[r], c.apply, c.absolute) for r, c in value.terms.items())
        known = tuple(a if is_exact(a) else None for a in operands)
        error = _error(node, value, max(value.roundings - 1, 0))
        left = node.name == "conv_general_dilated" and moves[0]
        rounded = affine_rules.by_winograd(node.eqn, operands[1]) if left else None
        found.append(Affine(node, parts, value.center, *error, known, rounded))
    return found


def _error(node: Node, value: Interval, terms: int) -> tuple[float, float]:
    """Bounds of the rounding of an affine map and of its transposition: (relative, absolute).

    The relative error is in units of the magnitude ``m``; the absolute one is the loss by underflow
    in dtypes shorter than float32. ``terms`` is the number of products added up to one entry.
    """
    eqn, dtype, rules = node.eqn, value.center.dtype, record.of(node.name)
    assert rules.affine is not None
    declared: Any = eqn.outvars[0].aval
    unit = 0.5 * float(jnp.finfo(dtype).eps)
    total = 1.01 * unit * (terms + rules.affine(eqn) + 8)
    moved = rules.once and not (rules.elementwise or rules.sums)
    if moved or not affine_rules.is_narrow(declared.dtype):
        return total, 0.0
    rounds = terms + 1 if rules.sums else 1
    total += 1.01 * rounds * float(jnp.finfo(declared.dtype).eps)
    return total, rounds * tiny(declared.dtype)


class Bounded(NamedTuple):
    """Bounds ``[B, *shape]`` of a value, and the offset and error of its affine part since the last
    charged value."""

    lower: Array
    upper: Array
    size: Array
    """``m``, an upper bound of the magnitude."""
    error: Array
    offset: Array
    """``[*shape]``, the same for all samples."""
    mixes: int = 0
    """How many operations since the input added up entries; intervals are exact up to one."""
    alone: bool = False
    """Whether each entry depends on one entry of an operand that was bounded before: its interval
    is exact between the ends of that one, so that lines gain nothing."""


def charged_value(lower: Array, upper: Array, mixes: int) -> Bounded:
    """A charged value with these ends ``[B, *shape]``: its offset and error are 0."""
    size = jnp.maximum(jnp.abs(lower), jnp.abs(upper))
    return Bounded(lower, upper, size, jnp.zeros_like(size), jnp.zeros_like(size[0]), mixes)


def forward(affine: Affine, values: dict[int, Bounded], charged: set[int]) -> Bounded:
    """Bounds ``[B, *shape]`` of an affine map's result by interval arithmetic."""
    declared: Any = affine.node.eqn.outvars[0].aval
    rules = affine.record
    sums = affine_rules.is_narrow(declared.dtype) and rules.sums
    lowest, peak = tiny(affine.offset.dtype), jnp.abs(affine.offset)[None]
    center, radius = affine.offset[None], jnp.zeros((), affine.offset.dtype)
    offset, size, error = affine.offset, jnp.abs(affine.offset)[None], radius
    wide = size
    for place, apply, absolute in affine.parts:
        value = values[place]
        if place in charged:
            value = charged_value(value.lower, value.upper, value.mixes)
        middle = 0.5 * value.lower + 0.5 * value.upper
        middle = jnp.where(jnp.isfinite(middle), middle, 0.0)
        half = jnp.maximum(value.upper - middle, middle - value.lower)
        center = center + jax.vmap(apply)(middle)
        radius = radius + jax.vmap(absolute)(half)
        moved = rules.once and not rules.scales  # Nothing can underflow.
        kept = value.size if moved else _limited(value.size, value.size)
        size = size + jax.vmap(absolute)(kept)
        wide = size if affine.rounded is None else wide + jax.vmap(affine.rounded)(kept)
        error = error + jax.vmap(absolute)(value.error)
        offset = offset + apply(value.offset)
        if sums:  # A partial sum may overflow.
            largest = jnp.maximum(jnp.abs(value.lower), jnp.abs(value.upper))
            peak = peak + jax.vmap(absolute)(largest)
    # Each product may underflow.
    fine = affine.error * wide + lowest * max(affine.offset.size, 64) + affine.short
    radius = _open(radius + 2 * fine)
    lower, upper = fitted(center - radius, center + radius, declared.dtype, _open(peak + fine))
    size = jnp.where(jnp.isfinite(lower) & jnp.isfinite(upper), size, jnp.inf)
    adds = not rules.once or rules.sums or len(affine.parts) > 1
    mixes = adds + max(values[part.place].mixes for part in affine.parts)
    error = _limited(_open(error + fine), size)
    alone = not adds and values[affine.parts[0].place].alone
    return Bounded(lower, upper, _open(size), error, offset, mixes, alone)


def nonlinear(
    network: Network, node: Node, values: dict[int, Bounded], known: Ends | None = None
) -> list[Ends]:
    """Ends ``[B, *shape]`` of each output of a nonlinear equation by its interval rule.

    ``known`` are other ends of the first output, of which the tighter ones are taken.
    """
    places = [place for place in dict.fromkeys(node.inputs) if place in values]
    pairs = [values[place][:2] for place in places]

    def one(operands: list[Ends], known: Ends | None) -> list[Ends]:
        moved = [Ternary(*pair) if pair[0].dtype == bool else fresh(*pair) for pair in operands]
        made: dict[int, Any] = dict(zip(places, moved))
        args = [made[p] if p in made else jnp.asarray(network.exact[p]) for p in node.inputs]
        outs = [ends(out) for out in interval.apply(node.eqn, args)]
        if known is not None:
            ((lower, upper),) = outs
            outs = [norms.Bounds(jnp.fmax(lower, known[0]), jnp.fmin(upper, known[1]))]
        lost = interval.may_be_nan(node.eqn, args)
        return [interval.opened(out, lost) for out in outs]

    return jax.vmap(one)(pairs, known)


def _limited(error: Array, size: Array) -> Array:
    """The error, infinite where the value's ``size`` is too large or unbounded."""
    return jnp.where(size <= _LARGEST, error, jnp.inf)


def flushed(network: Network) -> float:
    """Bound of a linear function's loss by coefficients that underflow on the way back."""
    count = sum(
        (affine.offset.size + 1) * math.prod(network.graph.avals[part.place].shape)
        for affine in network.affine.values()
        for part in affine.parts
    )
    count += sum(
        _VIEWS * math.prod(network.graph.avals[place].shape)
        for node in network.others.values()
        for place in node.inputs
        if place in network.graph.avals
    )
    return count * _LARGEST * tiny(network.graph.avals[network.source].dtype)


def _open(size: Array) -> Array:
    """The array with inf instead of NaN."""
    return jnp.where(jnp.isnan(size), jnp.inf, size)
