r"""How fast a loss can grow far from the data, for piecewise linear networks.

Let a program consist of affine maps, maxima, absolute values and selections by sign. Its value at
``t w`` divided by ``t > 0`` is the value at ``w`` of the same program with every constant divided
by ``t``: again such a program, with the input ``(w, 1/t)``. Its margins over ``||w|| <= 1`` and
``1/t <= 1/T`` bound the slope at every distance of at least T. This is tighter than a Lipschitz
constant of the whole space, since far from the data biases do not matter and only some sign
patterns of neurons occur.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from wdjax import distinct, norms
from wdjax.bounds import affine_rules, margins
from wdjax.bounds.domain import Array
from wdjax.bounds.margins import Method
from wdjax.bounds.network import Network
from wdjax.bounds.primitives import TABLE
from wdjax.bounds.region import Region
from wdjax.checks import validate
from wdjax.core import Classifier
from wdjax.precision import highest


@functools.partial(distinct.jit, static_argnums=(4, 5))
def slopes(
    model: Classifier, x: Array, labels: Array, last: Array, norm: float, method: Method
) -> Array:
    """Upper bounds ``[L]`` of ``(max_j z_j - z_y) / t`` for the labels ``y``, ``[L]``.

    They hold at every distance ``t >= last`` from any of the samples ``x``, ``[n, *shape]``; inf if
    the program is not homogeneous at infinity.
    """
    count, size = len(labels), math.prod(x.shape[1:])
    net = margins.network(model, x, fused=False)
    if not _homogeneous(net):
        return jnp.full(count, jnp.inf)
    farthest = jnp.max(norms.lp_norm(x, norm))
    reach = (1 + farthest / last) * (1 + 1e-4)
    least = (1 + 1e-4) / last
    center = jnp.zeros((count, size + 1), x.dtype).at[:, -1].set(0.5 * least)
    ends = jnp.full((count, size + 1), reach).at[:, -1].set(least)
    lower = (-ends).at[:, -1].set(0.0)
    region = Region(center, lower, ends, jnp.full(count, reach + least), norm)
    apart = _apart(net, x.shape[1:])
    with highest():
        state = margins.prepare(apart, region, method)
        low = margins.of(state, apart, region, labels, method, every=True)
    steep = -jnp.min(low, axis=1)
    for lost in net.lost:
        steep = jnp.where(lost, jnp.inf, steep)
    return steep + 1e-6 * jnp.abs(steep)


def _homogeneous(net: Network) -> bool:
    """Whether a program consists of affine maps and homogeneous functions (such as ReLU) only.

    All its values must have one floating dtype. Only such programs can be divided by ``t``.
    """
    dtypes = {net.graph.avals[place].dtype for node in net.graph.nodes for place in node.outputs}
    dtypes -= {jnp.dtype(bool)}
    for node in net.others.values():
        known = [jnp.asarray(net.exact[place]) for place in node.inputs if place in net.exact]
        rules = TABLE.get(node.name)
        if rules is None or not rules.homogeneous or not {value.dtype for value in known} <= dtypes:
            return False
    return len(dtypes) == 1


def _apart(net: Network, shape: tuple[int, ...]) -> Callable[[Array], Array]:
    """The program divided by ``t``: maps ``(w, 1/t)``, ``[1, d + 1]``, to logits ``[1, K]``.

    ``shape`` is that of a sample. Every constant of the program is multiplied by the last input.
    """

    def apply(v: Array) -> Array:
        near = v[:, -1].reshape(())
        values = {net.source: v[:, :-1].reshape(1, *shape)}
        if (out := net.graph.outputs[0]) in net.exact:  # Logits that do not depend on the input.
            return near * jnp.asarray(net.exact[out])
        for node in net.graph.nodes:
            for place in node.outputs:
                affine = net.affine.get(place)
                if affine is not None:
                    parts = [part.apply(values[part.place]) for part in affine.parts]
                    values[place] = near * affine.offset + sum(parts)
            if node.outputs[0] in net.others:
                entrywise = TABLE[node.name].elementwise
                whole = net.graph.avals[node.outputs[0]].shape if entrywise else None
                args = [
                    values[place] if place in values else _divided(net.exact[place], near, whole)
                    for place in node.inputs
                ]
                values.update(zip(node.outputs, affine_rules.evaluate(node.eqn, args)))
        return values[net.graph.outputs[0]]

    return apply


def _divided(value: Any, near: Array, whole: tuple[int, ...] | None) -> Array:
    """A constant times ``1/t``; a zero stays a constant, so that a ReLU is recognised as one.

    Others are no constants any more, and bounds of an entrywise function ask for operands of its
    own shape ``whole`` then: a literal such as that of ``maximum(x, 0.7)`` has none.
    """
    if not validate.traced(value) and not np.any(np.asarray(value)):
        return jnp.asarray(value)
    divided = near * jnp.asarray(value)
    return divided if whole is None else jnp.broadcast_to(divided, whole)
