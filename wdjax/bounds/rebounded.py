r"""Bounds of functions of the outputs in subdomains, where all ReLUs' operands are bounded anew.

A subdomain is the set of points of a region where the operands of some ReLUs have given signs, like
a leaf of :mod:`wdjax.bounds.leaves`. The sign of an early operand narrows the operands of all later
layers: with these bounded anew, a few splits may narrow a deep net's outputs to a hundredth of
their range.

Source: Henriksen and Lomuscio [henriksen2020]; here the bounds are those of Zhang et al.
[zhang2018].
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax.bounds import crown, leaves, linear_outputs, margins
from wdjax.bounds.domain import Array
from wdjax.bounds.leaves import RegionProblem, RootBounds, maps_of, rectified, rows_of
from wdjax.bounds.linear_outputs import Objectives
from wdjax.bounds.region import Norm
from wdjax.core import Classifier
from wdjax.precision import highest


class Subdomains(NamedTuple):
    """``C`` parts of one region, over the ``N`` operands of its ReLUs."""

    signs: Array
    """``[C, N]`` of -1, 0 and 1; 0 where the neuron is not split."""
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
    """``[C]``: the operand to split: in the first layer that has one, that which loosens the bounds
    most; N where none is left."""
    points: Array
    """``[C, *shape]``: for norm inf the inputs that minimise the linear bound of the function with
    the least bound; else the centre."""


@functools.partial(jax.jit, static_argnames="norm")
def bounds(
    model: Classifier,
    problem: RegionProblem,
    known: RootBounds,
    these: Subdomains,
    rows: Array,
    *,
    norm: Norm,
) -> SubdomainBounds:
    """Bounds of the functions ``rows``, ``[R]``, of a problem in each of the subdomains.

    Cost: one backward pass for each unstable operand, from its layer, and one for each function.
    """
    count = len(these.signs)
    with highest():
        ball = problem.region(norm, count)
        ends = leaves.inside(these.signs, these.lower, these.upper, known)
        state = margins.prepare(model, ball, "crown", ends)
        functions = Objectives(*(part[rows] for part in problem.rows))
        found = linear_outputs.of(state, functions, "crown")
        lower, upper = (
            rows_of({place: getattr(state.values[place], side) for place in known.lower})
            for side in ("lower", "upper")
        )
        low = jnp.where(jnp.any(lower > upper, axis=1, keepdims=True), jnp.inf, found.low)
        lost = jnp.stack([jnp.zeros((), bool), *state.network.lost]).any()
        low = jnp.where(lost, -jnp.inf, low)
        entry = _first(state, known, these.signs, functions, low)
        worst = jnp.argmin(low, axis=1)[:, None, None]
        toward = jnp.take_along_axis(found.a, worst, axis=1).reshape(ball.center.shape)
        points = jnp.where(toward > 0, ball.lower, ball.upper)
        points = jnp.where((toward == 0) | (norm != math.inf), ball.center, points)
    return SubdomainBounds(low, lower, upper, entry, points)


def _first(
    state: crown.Pass, known: RootBounds, signs: Array, functions: Objectives, low: Array
) -> Array:
    """``[C]``: the operand to split, as in :class:`SubdomainBounds`.

    It is the one whose ReLU's upper line loosens the open bounds most, in sum over the functions;
    open are the entries of ``low``, ``[C, R]``, of at most 0.
    """
    taken = maps_of(signs.astype(low.dtype), known.lower)
    record: dict[int, tuple[Array, Array]] = {}
    dense = {  # Dense slopes make the recorded coefficients of feature maps dense, too.
        out: jnp.broadcast_to(state.lines[out].views[0].low, (low.shape[1], *taken[place].shape))
        for out, place in rectified(state).items()
    }
    linear_outputs.linear(state, functions, dense, record)
    split = {place: jnp.zeros(m.shape, bool) for place, m in taken.items()}
    loosened = {place: jnp.zeros(m.shape, low.dtype) for place, m in taken.items()}
    for out, place in rectified(state).items():
        lines, value = state.lines[out], state.values[place]
        assert lines.free is not None
        split[place] = lines.free & (taken[place] == 0)
        if out in record:
            a = record[out][1]
            a = jnp.where((low.T <= 0).reshape(*low.T.shape, *(1,) * (a.ndim - 2)), a, 0.0)
            loosened[place] += jnp.minimum(a, 0.0).sum(axis=0) * lines.views[0].up * value.lower
    depths = {place: jnp.full((1, *m.shape[1:]), k) for k, (place, m) in enumerate(taken.items())}
    open_ = rows_of(split)
    depth = jnp.where(open_, rows_of(depths), len(depths))
    first = open_ & (depth == depth.min(axis=1, keepdims=True))
    worth = jnp.where(first, jnp.maximum(rows_of(loosened), 0.0), -1.0)
    return jnp.where(open_.any(axis=1), jnp.argmax(worth, axis=1), signs.shape[1])
