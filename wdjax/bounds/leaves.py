r"""Bounds of linear functions of the outputs where the signs of some ReLUs' operands are given.

A leaf is the set of points of a region where the pre-activations ``z`` of the split ReLUs have the
leaf's signs ``s``. Both signs include 0, and each is relaxed to ``s z >= -w``, where ``w`` bounds
the rounding of ``z``, so that the two halves of a split cover the split leaf in floats too. In a
leaf a split ReLU is nearly affine; and ``f - b (s z + w)`` is at most ``f`` for every multiplier
``b >= 0``. The multipliers are maximised together with the slopes of the unstable neurons.

Source: Wang et al. [wang2021]; the neurons to split, De Palma et al. [depalma2021].
"""

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from wdjax import distinct, loops
from wdjax.bounds import crown, linear_outputs, margins, passes, region, slopes
from wdjax.bounds.coefficients import Coefficients, Rows, Whole, whole
from wdjax.bounds.domain import Array
from wdjax.bounds.linear_outputs import Objectives
from wdjax.bounds.margins import Method
from wdjax.bounds.network import Network
from wdjax.bounds.region import Norm, Region
from wdjax.checks.validate import EntryBox
from wdjax.core import Classifier
from wdjax.precision import highest
from wdjax.xla_cpu import OLDER_EMITTER, rounding, summed

_RATE = 0.2
_PATIENCE = 0.01
"""Steps end once three of them raise the bounds below 0, summed, by less than this share of their
distance from 0."""

_WINDOW = 16
"""Largest number of entries that a maximum may have for its operand to be split."""

Maps = dict[int, Array]
"""Arrays ``[*shape]`` or ``[L, *shape]`` by the place of a ReLU's operand."""
Ends = dict[int, tuple[Array, Array]]
"""Both ends of the operands, ``[L, *shape]``, by their places."""


class RegionProblem(NamedTuple):
    """A region, as the arrays of a :class:`Region` with a batch of 1, and functions to bound there.

    The norm is not among them, since it changes the program.
    """

    center: Array
    lower: Array
    upper: Array
    eps: Array
    rows: Objectives
    scale: Array | None = None

    def region(self, norm: Norm, count: int = 1) -> Region:
        """``count`` copies of the region."""

        def copies(t: Array) -> Array:
            return jnp.broadcast_to(t, (count, *t.shape[1:]))

        ends = copies(self.lower), copies(self.upper)
        scale = None if self.scale is None else copies(self.scale)
        return Region(copies(self.center), *ends, copies(self.eps), norm, scale=scale)


@functools.partial(distinct.jit, static_argnums=(3, 4, 5))
def of_sample(
    x: Array,
    y: Array,
    eps: Array,
    norm: Norm,
    box: EntryBox,
    classes: int,
    scale: Array | None = None,
) -> RegionProblem:
    """All margins ``z_y - z_j`` of one sample, ``x`` ``[1, *shape]``; row ``y`` is 0."""
    ball, unit = region.ball(x, eps, norm, box, scale), jnp.eye(classes, dtype=x.dtype)
    rows = Objectives(unit[y[0]] - unit, jnp.zeros_like(unit), jnp.zeros(classes, x.dtype))
    return RegionProblem(ball.center, ball.lower, ball.upper, ball.eps, rows, ball.scale)


def of_box(lower: ArrayLike, upper: ArrayLike, rows: Objectives) -> RegionProblem:
    """Functions of the outputs on one box ``[*shape]``."""
    ball = linear_outputs.boxes(jnp.asarray(lower)[None], jnp.asarray(upper)[None])
    return RegionProblem(ball.center, ball.lower, ball.upper, ball.eps, rows)


class RootBounds(NamedTuple):
    """What holds in the whole region of a problem."""

    low: Array
    """``[R]`` bounds of the functions."""
    lower: Maps
    upper: Maps
    slack: Maps
    """``w``: how far a ReLU's operand may differ between two float programs."""
    others: tuple[Maps, Maps, Maps] = ({}, {}, {})
    """The same three of the operands of other nonlinear functions that have lines."""

    def of_all(self) -> "RootBounds":
        """With the other functions' operands among those of ReLUs."""
        lower, upper, slack = self.others
        return RootBounds(self.low, self.lower | lower, self.upper | upper, self.slack | slack)

    def begin(self, row: Array) -> "Leaves":
        """One leaf for each of the functions ``row``, ``[L]``: the whole region, nothing split."""
        ends = flat_of(self.lower), flat_of(self.upper)
        lower, upper = (jnp.repeat(end, len(row), axis=0) for end in ends)
        signs = jnp.zeros(lower.shape, jnp.int8)
        return Leaves(row, signs, (upper > -lower).astype(lower.dtype), lower, upper)


class Leaves(NamedTuple):
    """``L`` subproblems of one region, over the ``N`` operands of its ReLUs."""

    row: Array
    """``[L]``: which of the problem's functions each leaf bounds."""
    signs: Array
    """``[L, N]`` of -1, 0 and 1; 0 where the neuron is not split."""
    multipliers: Array
    """``[L, N]``: lower slopes of neurons that are not split, multipliers ``b`` of the others."""
    lower: Array
    upper: Array
    """``[L, N]``: ends of the operands. They hold where the leaf's function is at most 0, and may
    fail elsewhere."""


def inside(signs: Array, lower: Array, upper: Array, known: RootBounds) -> Ends:
    """The ends ``[L, *shape]`` of the operands in the halves that ``signs`` name, by place.

    ``signs``, ``lower`` and ``upper``, ``[L, N]``, are as in :class:`Leaves`.
    """
    slack = flat_of(known.slack)
    lower = jnp.where(signs > 0, jnp.maximum(lower, -slack), lower)
    upper = jnp.where(signs < 0, jnp.minimum(upper, slack), upper)
    ends = maps_of(lower, known.lower), maps_of(upper, known.lower)
    return {place: (ends[0][place], ends[1][place]) for place in known.lower}


class LeafBounds(NamedTuple):
    """What was found of leaves."""

    low: Array
    """``[L]`` lower bounds of the leaf's function."""
    multipliers: Array
    """``[L, N]``, those that gave ``low``."""
    choices: Array
    """``[L, C]`` indices of operands to split, the best first; N where there is none."""
    children: Array
    """``[L, C, 2]`` bounds of both halves of each split, negative side first."""
    points: Array
    """``[L, *shape]``: inputs where the leaf's linear bound is about least."""


@functools.partial(distinct.jit, static_argnums=(2, 3))
def root(
    model: Classifier, problem: RegionProblem, norm: Norm, method: Method = "alpha"
) -> RootBounds:
    """Bounds of a problem's whole region."""
    with highest():
        state = margins.prepare(model, problem.region(norm), method)
        low = linear_outputs.of(state, problem.rows, method).low
        low = jnp.where(jnp.isnan(problem.eps)[:, None], -jnp.inf, low)
    relus = set(rectified(state).values())
    rest = {place for places in curved(state).values() for place in places}
    return RootBounds(low[0], *_ends(state, relus), _ends(state, rest - relus))


def _ends(state: passes.Pass, places: Iterable[int]) -> tuple[Maps, Maps, Maps]:
    """Lower and upper ends of operands in the first region, and how far floats may differ."""
    lower, upper, slack = {}, {}, {}
    for place in places:
        value = state.values[place]
        unit = 4 * float(jnp.finfo(value.lower.dtype).eps)
        size = jnp.maximum(jnp.abs(value.lower), jnp.abs(value.upper))[0]
        lower[place], upper[place] = value.lower[0], value.upper[0]
        slack[place] = 2 * state.gathered(place)[1][0] + unit * size
    return lower, upper, slack


def rectified(state: passes.Pass) -> dict[int, int]:
    """The operand's place of every ReLU that has free slopes, by the place of its output."""
    found = {}
    for node in state.network.graph.nodes:
        lines = state.lines.get(node.outputs[0])
        if lines is not None and lines.free is not None:
            found[node.outputs[0]] = node.inputs[lines.views[0].operand]
    return found


def curved(state: passes.Pass) -> dict[int, tuple[int, ...]]:
    """The operands' places of all other functions with lines, by the place of the output.

    Such as ``tanh``, products and max pooling; not of maxima of over ``_WINDOW`` entries.
    """
    found = {}
    for node in state.network.graph.nodes:
        lines = state.lines.get(node.outputs[0])
        if lines is not None and lines.free is None and len(lines.views) <= _WINDOW:
            places = dict.fromkeys(node.inputs[view.operand] for view in lines.views)
            found[node.outputs[0]] = (*places,)
    return found


def rows_of(maps: Maps) -> Array:
    """Maps ``[L, *shape]`` by place as one array ``[L, N]``."""
    return jax.vmap(lambda flat: ravel_pytree(flat)[0])(maps)


def flat_of(maps: Maps) -> Array:
    """Maps ``[*shape]`` by place as one array ``[1, N]``."""
    return rows_of({place: m[None] for place, m in maps.items()})


def maps_of(rows: Array, like: Maps) -> Maps:
    """``[L, N]`` as maps ``[L, *shape]`` by place, as in ``like``; undoes :func:`rows_of`."""
    return jax.vmap(ravel_pytree(like)[1])(rows)


@functools.partial(
    distinct.jit, static_argnames=("norm", "steps", "tries"), compiler_options=OLDER_EMITTER
)
def bounds(
    model: Classifier,
    problem: RegionProblem,
    known: RootBounds,
    leaves: Leaves,
    *,
    norm: Norm,
    steps: int,
    tries: int,
) -> LeafBounds:
    """Bounds of leaves, and of the halves of the ``tries`` best splits of each.

    Cost: up to ``steps`` ascent steps, and two backward passes for each split.
    """
    count = len(leaves.row)
    with highest():
        ball = problem.region(norm, count)
        net = margins.network(model, problem.center)
        wide = margins.wide(ball).prepared()
        rows = Objectives(*(part[leaves.row][:, None] for part in problem.rows))
        places = jnp.arange(count)

        def turn(own: _Own, number: Array) -> tuple[_Own, Array]:
            """Bounds of the leaves in turn 0, then of each half of each split."""
            first, split = number == 0, own.choices[:, (number - 1) // 2]
            sign = jnp.where(number % 2, -1, 1).astype(leaves.signs.dtype)
            half = leaves._replace(
                signs=leaves.signs.at[places, split].set(sign),
                multipliers=own.multipliers.at[places, split].set(0.0),
            )
            these = jax.tree.map(functools.partial(jnp.where, first), leaves, half)
            low, multipliers, worths, toward = _Split(net, wide, known, rows, these).best(
                maps_of(these.multipliers, known.lower), jnp.where(first, steps, 0)
            )
            found = loops.cond(
                first,
                lambda: _Own(rows_of(multipliers), *lax.top_k(worths, tries), toward),
                lambda: own,
            )
            return found, low

        none = jnp.zeros((count, tries), leaves.multipliers.dtype)
        begun = _Own(leaves.multipliers, none, none.astype(jnp.int32), jnp.zeros_like(ball.center))
        own, lows = loops.scan(turn, begun, jnp.arange(1 + 2 * tries))
        low, halves = lows[0], lows[1:].reshape(tries, 2, count)
        children = jnp.maximum(halves.transpose(2, 0, 1), low[:, None, None])
        gain = jnp.sum(jnp.minimum(children, 0.0), axis=-1)
        order = jnp.argsort(jnp.where(own.worth > 0, -gain, jnp.inf), axis=-1)
        choices = jnp.where(own.worth > 0, own.choices, own.multipliers.shape[1])
        choices = jnp.take_along_axis(choices, order, axis=-1)
        children = jnp.take_along_axis(children, order[..., None], axis=1)
    return LeafBounds(low, own.multipliers, choices, children, ball.lowest(own.toward))


class _Own(NamedTuple):
    """What is known of leaves before they are split; fields as in :class:`LeafBounds`."""

    multipliers: Array
    worth: Array
    """``[L, C]``: how much a split of the operand may gain."""
    choices: Array
    toward: Array
    """``[L, *shape]``: the linear bound's coefficients of the inputs."""


class _Split:
    """Bounds of all values over ``L`` leaves, and of the functions for given multipliers."""

    def __init__(
        self, net: Network, ball: Region, known: RootBounds, rows: Objectives, leaves: Leaves
    ) -> None:
        self.signs = maps_of(leaves.signs.astype(ball.center.dtype), known.lower)
        self.slack = known.slack
        ends = inside(leaves.signs, leaves.lower, leaves.upper, known)
        self.state = crown.bounds(net, ball, known=ends)
        self.operands = rectified(self.state)
        values = [self.state.values[place] for place in self.signs]
        empty = [(v.lower > v.upper).reshape(len(leaves.row), -1).any(axis=1) for v in values]
        self.empty = jnp.stack(empty).any(axis=0)
        self.lost = jnp.stack([jnp.zeros((), bool), *net.lost]).any()
        self.rows = rows

    def best(self, multipliers: Maps, steps: Array) -> tuple[Array, Maps, Array, Array]:
        """The best bounds ``[L]`` over steps of ascent, the multipliers that gave them, and the
        :func:`_scores` of the last ones."""
        eps = self.state.region.eps
        most = {i: jnp.where(sign == 0, 1.0, jnp.inf) for i, sign in self.signs.items()}
        worst = slopes.BestSlopes(jnp.full(len(eps), -jnp.inf, eps.dtype), multipliers)
        best, last = slopes.climbed(
            self.low, worst, most, steps, _RATE, until=0.0, patience=_PATIENCE
        )
        record: passes.Record = {}
        arrived: dict[int, Coefficients] = {}
        best = best.or_else(self.low(last, record, arrived), last)
        return best.low, best.slopes, *_scores(self, last, record, arrived)

    def low(
        self,
        multipliers: Maps,
        record: passes.Record | None = None,
        arrived: dict[int, Coefficients] | None = None,
    ) -> Array:
        """``[L]`` lower bounds of the leaves' functions; inf for an empty leaf.

        ``record`` and ``arrived`` are filled as by :func:`passes.backward`.
        """
        state, (last,) = self.state, self.state.network.graph.outputs
        coefficients: dict[int, Coefficients] = {last: Whole(self.rows.a[None])}
        eps = state.region.eps
        below, paid = {}, jnp.zeros((1, len(eps)), eps.dtype)
        for place, sign in self.signs.items():
            weight = jnp.where(sign == 0, 0.0, multipliers[place])[None]
            coefficients[place] = Whole(-weight * sign[None])
            paid = paid + summed(weight * self.slack[place])
        for out, place in self.operands.items():
            sign = self.signs[place]
            below[out] = jnp.where(sign == 0, multipliers[place], sign > 0)[None]
        rows = Rows(jnp.arange(len(eps)))
        found = passes.backward(
            state, coefficients, rows, slopes=below, record=record, arrived=arrived
        )
        unit = rounding(sum(sign[0].size for sign in self.signs.values()), paid.dtype)
        found = linear_outputs.charged(
            self.rows, (found - (1 + unit) * paid)[0][:, None], state.values[last]
        )[:, 0]
        found = jnp.where(self.empty, jnp.inf, found)
        return jnp.where(self.lost | jnp.isnan(found), -jnp.inf, found)


def _scores(
    split: _Split, multipliers: Maps, record: passes.Record, arrived: Mapping[int, Coefficients]
) -> tuple[Array, Array]:
    """``[L, N]``: how much a neuron's upper line loosens the bound, plus a tenth of the loss by its
    lower line; 0 for neurons that cannot be split. Also the bound's coefficients of the inputs,
    ``[L, *shape]``. The bound is that of ``multipliers``, whose pass filled ``record`` and
    ``arrived``."""
    found = {place: jnp.zeros_like(sign) for place, sign in split.signs.items()}
    for out, place in split.operands.items():
        if out not in record:
            continue
        a, lines = record[out].coefficients[0], split.state.lines[out]
        value = split.state.values[place]
        assert lines.free is not None
        open_ = lines.free & (split.signs[place] == 0)
        slope = multipliers[place]
        gap = jnp.maximum((1 - slope) * value.upper, -slope * value.lower)
        cost = jnp.minimum(a, 0.0) * lines.views[0].up * value.lower
        cost += 0.1 * jnp.maximum(a, 0.0) * gap
        found[place] += jnp.where(open_, cost + 1e-30, 0.0)
    center, source = split.state.region.center, split.state.network.source
    rows = Rows(jnp.arange(len(center)))
    toward = whole(arrived[source], rows).a[0] if source in arrived else jnp.zeros_like(center)
    return rows_of(found), toward.reshape(len(center), *center.shape[2:])
