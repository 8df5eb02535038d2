r"""Bounds of affine functions of the input by the dual norm, without a backward pass a neuron.

Over the ball ``a . x`` moves by at most ``eps |a|_q``, q the norm dual to the ball's. For l2 the
coordinates at a face of the box that would leave it are left out; for linf all are cut by the box.
One matrix or kernel serves all samples.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from wdjax import norms
from wdjax.bounds import crown, network, passes
from wdjax.bounds.coefficients import Coefficients, Kernel, Rows, Whole, flat, plain, whole
from wdjax.bounds.domain import Array, gamma, tiny
from wdjax.bounds.moved_mass import moves_mass
from wdjax.bounds.network import Affine
from wdjax.bounds.region import Region
from wdjax.xla_cpu import correlated


class _Chain(NamedTuple):
    """The affine maps from the input to a value, the last one first."""

    outer: list[Affine]
    """Maps of single entries, such as batch normalisation."""
    mixed: list[Affine]
    inner: list[Affine]
    """Maps of single entries, such as normalisation of the input."""


def refine(state: passes.Pass, needed: Mapping[int, Array]) -> None:
    """Tightens the bounds of values that are affine in the input, whatever is ``needed``.

    Does nothing for other values, nor for feature maps behind more than one convolution. Where mass
    moves between pixels there is no dual norm, and every ``needed`` neuron is bounded by itself.
    """
    for place, some in needed.items():
        _refine(state, place, some)


def _refine(state: passes.Pass, place: int, needed: Array) -> None:
    chain = _chain(state, place)
    if chain is not None and moves_mass(state.region.norm):
        crown.refine(state, {place: needed}, passes.backward)
        return
    a = None if chain is None else _row(chain)
    if chain is None or a is None:
        return
    value, region = state.values[place], state.region
    image = region.center
    for affine in [*chain.outer, *chain.mixed, *chain.inner][::-1]:
        image = jax.vmap(affine.parts[0].apply)(image)
    offset, error = state.gathered(place)
    shape = chain.mixed[0].offset.shape
    moves = _moves(region, _factor(chain.inner, region.center), a, shape)
    outer = _factor(chain.outer, jnp.ones((len(image), *shape), image.dtype))
    rise, fall = (jnp.abs(outer) * move for move in moves)
    rise, fall = jnp.where(outer < 0, fall, rise), jnp.where(outer < 0, rise, fall)
    unit = gamma(region.center[0].size + 16, image.dtype)
    # The image and the coefficients are rounded like the float program.
    slack = 2 * error + network.flushed(state.network) + unit * (jnp.abs(image) + jnp.abs(offset))
    low = image + offset - (1 + unit) * fall - slack
    high = image + offset + (1 + unit) * rise + slack
    state.values[place] = value._replace(
        lower=jnp.maximum(value.lower, jnp.where(jnp.isfinite(low), low, -jnp.inf)),
        upper=jnp.minimum(value.upper, jnp.where(jnp.isfinite(high), high, jnp.inf)),
    )


def _chain(state: passes.Pass, place: int) -> _Chain | None:
    """The maps from the input to a value; None if others lie between, or if nothing is mixed."""
    net, found, at = state.network, list[Affine](), place
    while at != net.source:
        affine = net.affine.get(at)
        if affine is None or len(affine.parts) != 1 or (at != place and at in state.charges):
            return None
        found.append(affine)
        at = affine.parts[0].place
    mixes = [
        i
        for i, affine_map in enumerate(found)
        if not affine_map.record.diagonal
        or net.graph.avals[affine_map.parts[0].place].shape != affine_map.offset.shape
    ]
    if not mixes:
        return None
    first, last = mixes[0], mixes[-1] + 1
    return _Chain(found[:first], found[first:last], found[last:])


def _factor(maps: list[Affine], like: Array) -> Array:
    """The product of all factors of maps of single entries, ``[B, *shape]``."""
    ones = jnp.ones_like(like)
    return functools.reduce(lambda t, affine: jax.vmap(affine.parts[0].apply)(t), maps[::-1], ones)


def _row(chain: _Chain) -> Kernel | Array | None:
    """The mixed maps: the kernel of a convolution, or a matrix ``[N, G]``, where maps are not
    feature maps; None for others."""
    (first, *more), shape = chain.mixed, chain.mixed[0].offset.shape
    if len(shape) == 4:
        return None if more else plain(first.node.eqn, first.exact)
    rows = Rows(jnp.zeros(1, jnp.int32))
    eye = jnp.eye(math.prod(shape), dtype=first.offset.dtype)  # Not float64 under 64 bits.
    a: Coefficients = Whole(eye.reshape(-1, 1, *shape))
    for affine in chain.mixed:
        ((_, a),) = passes.transposed(affine, a, rows)
    return flat(whole(a, rows))[:, 0].T


def _moves(
    region: Region, factor: Array, map_: Kernel | Array, shape: Sequence[int]
) -> tuple[Array, Array]:
    """How far ``map_(factor x)`` may rise and fall from its value at the centre, ``[B, *shape]``.

    ``factor``, ``[B, *inputs]``, multiplies the entries of inputs in the region; ``map_`` is a
    matrix ``[N, G]`` of inputs by outputs, or a convolution's kernel; ``shape`` is that of one
    sample's output.
    """
    a = map_ if isinstance(map_, jax.Array) else map_.kernel
    if region.scale is not None:
        factor = factor * region.scale
    top, most = (norms.largest(jnp.abs(t).reshape(-1)) for t in (a, factor))
    eps = region.eps.reshape(-1, *(1,) * len(shape))
    if region.norm == 1 and isinstance(map_, jax.Array) and region.scale is not None:
        widths = jnp.abs(factor).reshape(len(factor), -1, 1)
        heights = norms.largest(widths * jnp.abs(a), 1).reshape(-1, *shape)
        return (eps * (heights + tiny(a.dtype)),) * 2
    if region.norm == 1:
        heights = norms.largest(jnp.abs(a).reshape(-1, a.shape[-1]), 0)
        heights = heights.reshape(shape if a.ndim == 2 else heights.shape)
        return (eps * most * jnp.broadcast_to(heights, (len(factor), *shape)),) * 2
    top, most = (lax.stop_gradient(jnp.where(t > 0, t, 1.0)) for t in (top, most))
    up, down = region.upper - region.center, region.center - region.lower
    up, down = jnp.where(factor < 0, down, up), jnp.where(factor < 0, up, down)
    factor = jnp.abs(factor) / most
    positive, negative = jnp.maximum(a, 0.0) / top, jnp.maximum(-a, 0.0) / top
    if region.norm == 2:
        up, down = ((t > 0).astype(factor.dtype) for t in (up, down))
        factor, positive, negative = factor**2, positive**2, negative**2

    def across(maps: Array, weights: Array) -> Array:
        if isinstance(map_, jax.Array):
            return (maps.reshape(len(maps), -1) @ weights).reshape(-1, *shape)
        return correlated(maps[:, 0], weights, map_.strides, map_.padding)[:, None]

    sides = [
        across(factor * one, positive) + across(factor * two, negative)
        for one, two in ((up, down), (down, up))
    ]
    if region.norm == 2:  # Squares may underflow.
        lost = math.sqrt(2 * factor[0].size * tiny(factor.dtype))
        sides = [eps * (_root(side) + lost) for side in sides]
    return top * most * sides[0], top * most * sides[1]


def _root(square: Array) -> Array:
    """The square root, whose derivative at 0 is 0."""
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
