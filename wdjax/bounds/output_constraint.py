r"""Bounds of ReLUs' operands at the points of leaves where a function of the outputs is at most 0.

Only such points matter to a proof that the function is positive: a leaf without any is verified.
There an operand z is at least ``z + g f`` for every ``g >= 0``, and linear bounds bound that from
below over the whole leaf; ``g`` is optimised together with the slopes and the multipliers of the
leaf's signs. Tighter operands tighten the function's own bound, and that bound the operands again.

Source: Kotha et al. [kotha2023].
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from wdjax import distinct, xla_cpu
from wdjax.bounds import crown, margins, passes, slopes
from wdjax.bounds.coefficients import Coefficients, Rows, Whole
from wdjax.bounds.domain import Array
from wdjax.bounds.leaves import (
    Leaves,
    RegionProblem,
    RootBounds,
    flat_of,
    inside,
    maps_of,
    rectified,
    rows_of,
)
from wdjax.bounds.region import Norm
from wdjax.bounds.slopes import Slopes
from wdjax.core import Classifier
from wdjax.precision import highest
from wdjax.xla_cpu import rounding, summed

_RATE, _STEPS = 0.12, 20
_UNIT = 0.5
"""Unit of ``g`` and of the multipliers, times the operand's range over the absolute bound of the
function. With a larger unit Adam's steps are too long."""
_LINES, _WEIGHT = 0, 1
"""Keys of the variables: slopes and multipliers ``[2, R, N]``, and ``g``, ``[2, R]``."""


@functools.partial(distinct.jit, static_argnames="norm")
def tightened(
    model: Classifier,
    problem: RegionProblem,
    known: RootBounds,
    leaves: Leaves,
    wanted: Array,
    *,
    norm: Norm,
) -> tuple[Array, Array]:
    """Lower and upper ends ``[L, N]`` of the operands of ``leaves``; one round tightens those that
    are ``wanted``, ``[L, N]``.

    They hold at the points of each leaf where its function is at most 0. If a lower end is above
    its upper one, there is no such point.

    Cost: about 60 backward passes through the whole net for each end of a wanted operand whose
    sign is open.
    """
    with highest():
        net = margins.network(model, problem.center)
        wide = margins.wide(problem.region(norm, len(leaves.row))).prepared()
        ends = inside(leaves.signs, leaves.lower, leaves.upper, known)
        state = crown.bounds(net, wide, known=ends)
        lower, upper = (
            rows_of({place: getattr(state.values[place], side) for place in known.lower})
            for side in ("lower", "upper")
        )
        constrained = _Constrained(state, problem, known, leaves, lower, upper)
        open_ = wanted & (lower < 0) & (upper > 0)
        width = passes.chunk(state, 2)
        found = xla_cpu.by_turns(open_, width, constrained.lowest, (2,), lower.dtype)
        lost = jnp.stack([jnp.zeros((), bool), *net.lost]).any()
        low, high = jnp.moveaxis(jnp.where(lost, -jnp.inf, found).reshape(*lower.shape, 2), -1, 0)
        # NaN counts as no bound.
        return jnp.fmax(lower, low), jnp.fmin(upper, -high)


class _Constrained:
    """Lower bounds of single operands where the functions of their leaves are at most 0."""

    def __init__(
        self,
        state: passes.Pass,
        problem: RegionProblem,
        known: RootBounds,
        leaves: Leaves,
        lower: Array,
        upper: Array,
    ) -> None:
        self.state, self.known, self.operands = state, known, rectified(state)
        (self.last,) = state.network.graph.outputs
        self.signs = leaves.signs.astype(lower.dtype)
        self.usual = jnp.where(self.signs == 0, upper > -lower, False).astype(lower.dtype)
        self.a, self.rest, self.b = (part[leaves.row] for part in problem.rows)
        value = state.values[self.last]
        self.size = jnp.maximum(jnp.abs(value.lower), jnp.abs(value.upper))[:, 0]
        whole = {self.last: Whole(self.a[None, :, None])}
        depth = passes.backward(state, whole, Rows(jnp.arange(len(lower))))[0] - self.b
        unit = _UNIT * (upper - lower) / (jnp.abs(depth)[:, None] + 1e-3)
        self.unit = jnp.where(jnp.isfinite(unit), unit, 0.0)

    def lowest(self, entries: Sequence[Array]) -> Array:
        """``[R, 2]`` lower bounds of ``R`` operands and of their negatives, by the best lines.

        ``entries``: the leaf and the operand of each, ``[R]``.
        """
        leaf, entry = entries
        hot = jax.nn.one_hot(entry, self.signs.shape[1], dtype=self.signs.dtype)
        pair, unit = jnp.stack([hot, -hot]), self.unit[leaf, entry]
        begun = {_LINES: jnp.stack([self.usual[leaf]] * 2), _WEIGHT: jnp.zeros_like(pair[..., 0])}
        most: dict[int, Array | float]
        most = {_LINES: jnp.where(self.signs[leaf] == 0, 1.0, jnp.inf), _WEIGHT: jnp.inf}
        worst = slopes.BestSlopes(jnp.full_like(pair[..., 0], -jnp.inf), begun)
        low = functools.partial(self._low, leaf, pair, unit)
        return slopes.maximised(low, worst, most, _STEPS, _RATE).low.T

    def _low(self, leaf: Array, pair: Array, unit: Array, chosen: Slopes) -> Array:
        """Lower bounds ``[2, R]`` of linear functions of the operands in ``leaf``, ``[R]``.

        ``pair``, ``[2, R, N]``, are their coefficients.
        """
        signs, weight = self.signs[leaf], unit * chosen[_WEIGHT]
        paying = jnp.where(signs == 0, 0.0, unit[:, None] * chosen[_LINES])
        below = jnp.where(signs == 0, chosen[_LINES], (signs > 0).astype(signs.dtype))
        coefficients: dict[int, Coefficients]
        coefficients = {self.last: Whole((weight[..., None] * self.a[leaf])[:, :, None])}
        for place, a in self._maps(pair - paying * signs).items():
            coefficients[place] = Whole(a)
        lines = self._maps(below)
        given = {out: lines[place] for out, place in self.operands.items()}
        found = passes.backward(self.state, coefficients, Rows(leaf), slopes=given)
        paid = summed(paying * flat_of(self.known.slack))
        found = found - (1 + rounding(pair.shape[-1], pair.dtype)) * paid
        return self._charged(found, leaf, weight)

    def _charged(self, low: Array, leaf: Array, weight: Array) -> Array:
        """Bounds ``[2, R]`` less ``weight b``, and less the rounding of its terms."""
        facts, count = jnp.finfo(low.dtype), self.a.shape[1] + 4
        unit, flushed = 4 * float(facts.eps) * count, 4 * float(facts.tiny) * count
        a, rest, b = jnp.abs(self.a[leaf]), self.rest[leaf], self.b[leaf]
        terms = jnp.where((a == 0) & (rest == 0), 0.0, (rest + unit * a) * self.size[leaf])
        inexact = summed(terms[None])
        loss = (1 + unit) * weight * inexact
        return low - weight * b - loss - unit * (jnp.abs(low) + weight * jnp.abs(b)) - flushed

    def _maps(self, rows: Array) -> dict[int, Array]:
        """``[2, R, N]`` as maps ``[2, R, *shape]`` by place."""
        flat = maps_of(rows.reshape(-1, rows.shape[-1]), self.known.lower)
        return {place: m.reshape(*rows.shape[:2], *m.shape[1:]) for place, m in flat.items()}
