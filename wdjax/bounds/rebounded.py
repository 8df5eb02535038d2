r"""Bounds of functions of the outputs in subdomains, where all operands are bounded anew.

A subdomain is the set of points of a region where the operands of some nonlinear functions lie
between given ends: those of ReLUs mostly on one side of 0, as in a leaf of
:mod:`wdjax.bounds.leaves`. An early operand's end narrows the operands of all later layers: with
these bounded anew, a few splits may narrow a deep net's outputs to a hundredth of their range.

Source: Henriksen and Lomuscio [henriksen2020]; splits of other functions, Shi et al. [shi2025];
here the bounds are those of Zhang et al. [zhang2018].
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax import distinct
from wdjax.bounds import leaves, linear_outputs, margins, passes, slopes
from wdjax.bounds.coefficients import Coefficients, Rows, Whole, whole
from wdjax.bounds.domain import Array
from wdjax.bounds.leaves import Maps, RegionProblem, RootBounds, maps_of, rows_of
from wdjax.bounds.linear_outputs import Objectives
from wdjax.bounds.record import View
from wdjax.bounds.region import Norm
from wdjax.core import Classifier
from wdjax.precision import highest
from wdjax.xla_cpu import rounding, summed

_STEPS, _RATE, _PATIENCE = 12, 0.2, 0.01
"""Of the ascent on multipliers and slopes, as in :mod:`wdjax.bounds.leaves`."""
_WIDE = 2**-8
"""An operand is split while its range is longer than this, and than this share of its size. In
shorter ranges rounding takes more than the lines gain."""


class Subdomains(NamedTuple):
    """``C`` parts of one region, over the ``N`` operands of :meth:`RootBounds.of_all`."""

    lower: Array
    upper: Array
    """``[C, N]``: known ends of the operands."""


class SubdomainBounds(NamedTuple):
    """What was found of subdomains."""

    low: Array
    """``[C, R]`` lower bounds of the functions; inf in an empty subdomain."""
    lower: Array
    upper: Array
    """``[C, N]``: tighter ends of the operands."""
    entry: Array
    """``[C]``: the operand to split; N where none is left. In a net whose only nonlinear functions
    are ReLUs it is in the first layer that has one, and there that which loosens the bounds most;
    in other nets that which does so anywhere."""
    point: Array
    """``[C]``: where to split it: at 0 if it is a ReLU's and may have both signs, else halfway."""
    points: Array
    """``[C, *shape]``: the inputs where the linear bound of the function with the least bound is
    about least."""
    slopes: Array | None = None
    """``[C, R, N]``, if asked for: the slopes of the lines that were taken, of ReLUs of the lower
    one."""
    multipliers: Array | None = None
    """``[C, R, N]``, if asked for: of the operands' ends."""


@functools.partial(distinct.jit, static_argnames=("norm", "told"))
def bounds(
    model: Classifier,
    problem: RegionProblem,
    root: RootBounds,
    these: Subdomains,
    rows: Array,
    *,
    norm: Norm,
    told: bool = False,
) -> SubdomainBounds:
    """Bounds of the functions ``rows``, ``[R]``, of a problem in each of the subdomains.

    With ``told`` the slopes and multipliers that gave them are told, in a net that has other
    nonlinear functions than ReLU.

    Cost: one backward pass for each unstable operand, from its layer, and one for each function.
    """
    count, known = len(these.lower), root.of_all()
    with highest():
        ball = problem.region(norm, count)
        given = maps_of(these.lower, known.lower), maps_of(these.upper, known.lower)
        state = margins.prepare(
            model, ball, "crown", {place: (given[0][place], given[1][place]) for place in given[0]}
        )
        functions = Objectives(*(part[rows] for part in problem.rows))
        arrived: dict[int, Coefficients] = {}
        found = linear_outputs.of(state, functions, "crown", arrived)
        lower, upper = (
            rows_of({place: getattr(state.values[place], side) for place in known.lower})
            for side in ("lower", "upper")
        )
        low = jnp.where(jnp.any(lower > upper, axis=1, keepdims=True), jnp.inf, found.low)
        lost = jnp.stack([jnp.zeros((), bool), *state.network.lost]).any()
        low = jnp.where(lost, -jnp.inf, low)
        numbers: tuple[Array, ...] = ()
        if root.others[0]:
            paying = _Paying(state, functions, known, arrived)
            best, chosen = paying.best()
            low = jnp.maximum(low, jnp.where(jnp.isnan(best) | lost, -jnp.inf, best))
            numbers = paying.told(chosen) if told else ()
        # Who asks for the numbers may not close what they close.
        entry, point = _split(state, root, arrived, jnp.minimum(low, 0.0) if told else low)
        worst = jnp.argmin(low, axis=1)[:, None, None]
        toward = jnp.take_along_axis(found.a, worst, axis=1).reshape(ball.center.shape)
        points = ball.lowest(toward)
    return SubdomainBounds(low, lower, upper, entry, point, points, *numbers)


class _Paying:
    """Bounds of functions by multipliers of the ends of all operands, and by optimised slopes.

    Where an operand z lies in [l, u], a function f is at least ``f + b z - max(b l, b u)`` for all
    numbers b. Without these terms the lines hold where the operands are narrow, and the linear
    bound still counts inputs where they are not.
    """

    def __init__(
        self,
        state: passes.Pass,
        functions: Objectives,
        known: RootBounds,
        arrived: dict[int, Coefficients],
    ) -> None:
        self.state, self.functions, self.known = state, functions, known
        self.arrived = arrived
        self.rows = Rows(jnp.arange(len(state.region.eps)))
        (self.last,) = state.network.graph.outputs
        self.units = self._units()

    def _units(self) -> Maps:
        """Units of the multipliers, ``[R, C, *shape]``: about an operand's own coefficient, so that
        a multiplier of 1 cancels it.

        Slopes are at least the mean of their equation: a neuron that is dead in a subdomain still
        says which inputs lie there.
        """
        units: Maps = {}
        for node in self.state.network.graph.nodes:
            out = node.outputs[0]
            if out not in self.arrived or out not in self.state.lines:
                continue
            a, views = jnp.abs(whole(self.arrived[out], self.rows).a), self.state.lines[out].views
            steep = [jnp.maximum(jnp.abs(view.low), jnp.abs(view.up)) for view in views]
            steep = [jnp.where(jnp.isfinite(slope), slope, 0.0) for slope in steep]
            least = jnp.mean(jnp.stack(steep))
            for view, slope in zip(views, steep):
                place = node.inputs[view.operand]
                if place in self.known.lower:
                    unit = _at_operand(view, a * jnp.maximum(slope, least))
                    units[place] = units[place] + unit if place in units else unit
        return units

    def best(self) -> tuple[Array, Maps]:
        """``[C, R]``: the highest bounds, and the numbers that gave them, as :meth:`_low` has them;
        the coefficients of the last pass are in ``arrived``."""
        seen: passes.Record = {}
        usual = self._low({}, record=seen)
        begun = {place: jnp.zeros_like(unit) for place, unit in self.units.items()}
        most, least = dict.fromkeys(begun, jnp.inf), dict.fromkeys(begun, -jnp.inf)
        begun |= {~out: free.slopes for out, free in seen.items()}
        most |= {~out: free.most for out, free in seen.items()}
        least |= dict.fromkeys((~out for out in seen), 0.0)
        worst = slopes.BestSlopes(jnp.full_like(usual, -jnp.inf), begun)
        found = slopes.maximised(
            self._low, worst, most, _STEPS, _RATE, until=0.0, patience=_PATIENCE, least=least
        )
        self._low(found.slopes, arrived=self.arrived)
        return found.low.T, found.slopes

    def told(self, chosen: Maps) -> tuple[Array, Array]:
        """``[C, R, N]`` each of what was chosen: slopes, -1 where there is none; multipliers."""
        shape = *self.functions.a.shape[:1], len(self.rows.sample)
        paid = {i: jnp.zeros((*shape, *end.shape)) for i, end in self.known.lower.items()}
        steep = {place: blank - 1 for place, blank in paid.items()}
        for node in self.state.network.graph.nodes:
            out = node.outputs[0]
            if ~out not in chosen:
                continue
            lines, slope = self.state.lines[out], chosen[~out]
            if lines.turned is not None:
                a = whole(self.arrived[out], self.rows).a
                slope = slope * jnp.where(a > 0, lines.views[0].low, lines.views[0].up)
            steep[node.inputs[lines.views[0].operand]] = slope
        for place, unit in self.units.items():
            paid[place] = unit * chosen[place]
        flat = (jnp.moveaxis(jax.vmap(rows_of)(maps), 0, 1) for maps in (steep, paid))
        return next(flat), next(flat)

    def _low(
        self,
        chosen: Maps,
        record: passes.Record | None = None,
        arrived: dict[int, Coefficients] | None = None,
    ) -> Array:
        """``[R, C]`` bounds for multipliers by place, and slopes by ``~output``."""
        state = self.state
        coefficients = dict(linear_outputs.sent(self.functions, self.last, len(self.rows.sample)))
        paid = size = jnp.zeros((), state.region.eps.dtype)
        for place, unit in self.units.items():
            if place in chosen:
                b = unit * chosen[place]
                lower, upper = state.values[place][:2]
                cost = jnp.where(b == 0, 0.0, jnp.maximum(b * lower, b * upper))
                coefficients[place] = Whole(b)
                paid, size = paid + summed(cost), size + summed(jnp.abs(cost))
        given = {~key: slope for key, slope in chosen.items() if key < 0}
        found = passes.backward(
            state, coefficients, self.rows, slopes=given or None, record=record, arrived=arrived
        )
        count = sum(unit[0, 0].size for unit in self.units.values())
        found = found - paid - rounding(count, found.dtype) * (size + jnp.abs(found))
        return linear_outputs.charged(self.functions, found.T, state.values[self.last]).T


def _split(
    state: passes.Pass, root: RootBounds, arrived: dict[int, Coefficients], low: Array
) -> tuple[Array, Array]:
    """``[C]`` each: the operand to split and where, as in :class:`SubdomainBounds`.

    ``arrived`` are the coefficients of the bounds ``low``, ``[C, R]``; those above 0 do not count.
    """
    known, rows = root.of_all(), Rows(jnp.arange(len(low)))
    loss: Maps = {place: jnp.zeros_like(state.values[place].lower) for place in known.lower}
    signed: Maps = {place: jnp.zeros(m.shape, bool) for place, m in loss.items()}
    open_ = {place: jnp.zeros(m.shape, bool) for place, m in loss.items()}
    relus, others = leaves.rectified(state), leaves.curved(state)
    for out, places in {**{out: (place,) for out, place in relus.items()}, **others}.items():
        lines = state.lines[out]
        for place in places:
            lower, upper = state.values[place][:2]
            if out in relus:
                assert lines.free is not None
                both = jnp.minimum(-lower, upper) > known.slack[place]
                signed[place] |= lines.free & both
                open_[place] |= signed[place]
            else:
                size = jnp.maximum(jnp.abs(lower), jnp.abs(upper))
                open_[place] |= upper - lower > _WIDE * jnp.maximum(size, 1.0)
        if out in arrived:
            a = whole(arrived[out], rows).a
            a = jnp.where((low.T <= 0).reshape(*low.T.shape, *(1,) * (a.ndim - 2)), a, 0.0)
            for place in places:
                loss[place] += _loss(state, out, place, a)
    depths = {place: jnp.full((1, *m.shape[1:]), k) for k, (place, m) in enumerate(loss.items())}
    flat = rows_of(open_)
    depth = jnp.where(flat, 0 if others else rows_of(depths), len(depths))
    first = flat & (depth == depth.min(axis=1, keepdims=True))
    worth = jnp.where(first, jnp.maximum(rows_of(loss), 0.0), -1.0)
    entry = jnp.argmax(worth, axis=1)
    values = {place: state.values[place] for place in loss}
    middle = rows_of({place: 0.5 * v.lower + 0.5 * v.upper for place, v in values.items()})
    at = jnp.take_along_axis(jnp.where(rows_of(signed), 0.0, middle), entry[:, None], axis=1)
    return jnp.where(flat.any(axis=1), entry, flat.shape[1]), at[:, 0]


def _loss(state: passes.Pass, out: int, place: int, a: Array) -> Array:
    """``[C, *shape]``: how much the lines of an output loosen functions, summed over these.

    ``a``, ``[R, C, *shape]``, are the functions' coefficients of the output; ``place`` is that of
    the operand. For a ReLU the loss by the upper line; for others all of what lies between both
    lines at the middle of the operands.
    """
    lines, value = state.lines[out], state.values[place]
    if lines.free is not None:
        return jnp.minimum(a, 0.0).sum(axis=0) * lines.views[0].up * value.lower
    (node,) = (node for node in state.network.graph.nodes if out in node.outputs)
    gap, seen = lines.up - lines.low, list[View]()
    for view in lines.views:
        operand = node.inputs[view.operand]
        lower, upper = state.values[operand][:2]
        linear = 0.5 * lower + 0.5 * upper - state.gathered(operand)[0]
        gap += (view.up - view.low) * (jax.vmap(view.view)(linear) if view.view else linear)
        seen += [view] if operand == place else []
    loss = jnp.abs(a).sum(axis=0, keepdims=True) * jnp.where(jnp.isfinite(gap), gap, 0.0)
    return functools.reduce(jnp.add, (_at_operand(view, loss) for view in seen))[0]


def _at_operand(view: View, t: Array) -> Array:
    """Numbers of a function's entries, ``[R, C, *shape]``, sent to the operand's entries that these
    see, and summed there."""
    return t if view.view is None else Whole(t).behind(view.view, view.shape).a
