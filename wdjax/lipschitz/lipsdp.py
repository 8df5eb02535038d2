r"""Bounds of a Jacobian by quadratic constraints (LipSDP), by unconstrained optimisation.

A slope in ``[a, b]`` is ``a + (b - a) t`` with ``t`` in [0, 1], and ``u = t z`` satisfies
``u (z - u) >= 0``. Let these constraints have the weights ``e^2``, let ``G`` satisfy
``z^T G^-1 z <= x^T S_0^-1 x``, and let ``N = I - e G e / 4`` be positive definite. Then the layer's
output stays in the ellipsoid of

    S = P G P + (P G e / 2 + R / e) N^-1 (P G e / 2 + R / e)^T

with ``P = diag(a)``, ``R = diag(b - a)``. Any weights give a valid bound, so Adam optimises them.
Only open slopes (``a < b``) have weights; neurons that are off are left out. The weights are scaled
so that the largest eigenvalue of ``X = e G e / 4``, bounded by ``||X^8||_F^(1/8)``, is at most a
number q < 1: then N is positive definite, and N^-1 at most ``sum_{j < J} X^j + q^J / (1 - q) I``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from wdjax import loops
from wdjax.lipschitz.chain import Chain
from wdjax.lipschitz.neurons import Slopes

_RATE = 0.3
_SLACK = 1e-9
"""Relative enlargement of all bounds, far above the rounding of float64."""
_DOUBLINGS = 8
"""``J = 2^_DOUBLINGS`` terms of the series for ``N^-1``."""


class Rooms(NamedTuple):
    """Static sizes: for each layer, the largest number of neurons with an open slope, and of those
    whose slope is not fixed to 0."""

    open: tuple[int, ...]
    alive: tuple[int, ...]


class _Layer(NamedTuple):
    """A layer without the neurons that are off: ``m`` neurons, ``o`` of them with open slopes."""

    weight: jax.Array
    """``[m, inputs]``."""
    low: jax.Array
    """``a``, ``[m]``."""
    gap: jax.Array
    """``b - a`` of the open slopes, ``[o]``."""
    open: jax.Array
    """Indices of the open slopes among the ``m`` neurons, ``[o]``."""


class Weights(NamedTuple):
    """The parameters that are optimised."""

    shape: tuple[jax.Array, ...]
    """Logarithms of the weights ``e^2`` of every layer, ``[o]``, up to a factor."""
    scale: jax.Array
    """``[H]``: logits of ``q``, the largest eigenvalue of each layer's ``X``."""
    inputs: jax.Array
    """``[n]``: logarithms of the input's diagonal metric, for r = inf."""


def bound(
    net: Chain, slopes: Slopes, rows: jax.Array, norm: float, rooms: Rooms, steps: int
) -> jax.Array:
    """Bounds ``[R]`` of the dual norms of rows ``[R, K]`` times the Jacobian, for r = 2 and inf."""

    def sizes(weights: Weights) -> jax.Array:
        total, shape = _through_all(layers, weights, norm)
        return jnp.sqrt(total * jnp.diagonal(shape.gram(rows @ last)))

    layers, last = _left(net, slopes, rooms)
    return _optimised(sizes, _first_weights(layers, rows @ last, norm), steps)


def spectral(net: Chain, slopes: Slopes, rooms: Rooms, steps: int) -> jax.Array:
    """A bound of the Jacobian's spectral norm, r = 2."""

    def size(weights: Weights) -> jax.Array:
        gram = _through_all(layers, weights, 2)[1].gram(last)
        return jnp.sqrt(jnp.linalg.eigvalsh(gram)[-1:] * (1 + _SLACK))

    layers, last = _left(net, slopes, rooms)
    return _optimised(size, _first_weights(layers, last, 2), steps)[0]


def _left(net: Chain, slopes: Slopes, rooms: Rooms) -> tuple[list[_Layer], jax.Array]:
    """The layers without the neurons that are off everywhere on the region.

    Also returns the last matrix ``[K, m]``. Sizes are static (``rooms``), so unused rows are 0.
    """
    before = jnp.arange(net.inputs)
    present = jnp.ones(net.inputs, bool)
    layers = []
    for weight, (low, high), open_, alive in zip(net.weights, slopes, rooms.open, rooms.alive):
        on = (low != 0) | (high != 0)
        these = jnp.nonzero(on, size=alive, fill_value=0)[0]
        real = jnp.arange(alive) < jnp.sum(on)
        low, gap = (jnp.where(real, t[these], 0.0) for t in (low, high - low))
        indices = jnp.nonzero(gap > 0, size=open_, fill_value=0)[0]
        used = jnp.arange(open_) < jnp.sum(gap > 0)
        live = jnp.where(real[:, None] & present, weight[these][:, before], 0.0)
        layers.append(_Layer(live, low, jnp.where(used, gap[indices], 0.0), indices))
        before, present = these, real
    return layers, jnp.where(present, net.weights[-1][:, before], 0.0)


class _Input(NamedTuple):
    """The ellipsoid of the input: ``S = diag(inverse)``, the inverse metric ``[n]``."""

    inverse: jax.Array

    def gram(self, weight: jax.Array) -> jax.Array:
        """``W S W^T``, enlarged for rounding."""
        return _enlarged((weight * self.inverse) @ weight.T)


class _Output(NamedTuple):
    """The ellipsoid ``S`` of a layer's output, in factors."""

    low: jax.Array
    before: jax.Array
    """``G``."""
    right: jax.Array
    inverse: jax.Array
    """An upper bound of ``N^-1``."""

    def gram(self, weight: jax.Array) -> jax.Array:
        """``W S W^T``, enlarged for rounding."""
        lower, shared = weight * self.low, weight @ self.right
        return _enlarged(lower @ self.before @ lower.T + shared @ self.inverse @ shared.T)


def _enlarged(gram: jax.Array) -> jax.Array:
    """A positive semidefinite matrix enlarged by more than the rounding of its computation."""
    return gram * (1 + _SLACK) + 1e-11 * jnp.trace(gram) * jnp.eye(len(gram))


def _through_all(
    layers: list[_Layer], weights: Weights, norm: float
) -> tuple[jax.Array, _Input | _Output]:
    """Sends the input's ellipsoid through the layers one by one, by :func:`_through`.

    Returns a number by which squared bounds are multiplied, the sum of the input's metric (1 for
    r = 2), and the ellipsoid of the last layer's output (of the input if there is no layer).
    """
    shape: _Input | _Output
    if norm == jnp.inf:
        metric = jnp.exp(weights.inputs)
        total, shape = jnp.sum(metric), _Input(1 / metric)
    else:
        total, shape = jnp.ones(()), _Input(jnp.ones_like(weights.inputs))
    for layer, exponents, scale in zip(layers, weights.shape, weights.scale):
        shape = _through(layer, shape.gram(layer.weight), exponents, scale)
    return total, shape


def _through(layer: _Layer, gram: jax.Array, shape: jax.Array, scale: jax.Array) -> _Output:
    """The ellipsoid of a layer's output, from ``gram``, ``[m, m]``, that of its pre-activations.

    ``shape`` ``[o]`` and ``scale`` are the layer's parameters, from :class:`Weights`; any values
    give a valid ellipsoid.
    """
    used = layer.gap > 0
    inner = gram[layer.open][:, layer.open]
    e = jnp.where(used, jnp.exp(0.5 * shape), 0.0)
    most = jax.nn.sigmoid(scale)
    e = e * 2 * jnp.sqrt(most / _above(e[:, None] * inner * e))
    right = 0.5 * layer.low[:, None] * gram[:, layer.open] * e
    right = right.at[layer.open, jnp.arange(len(e))].add(layer.gap / jnp.where(used, e, 1.0))
    x = e[:, None] * inner * e / 4
    tail = most ** (2**_DOUBLINGS) / (1 - most)
    return _Output(layer.low, gram, right, _inverse(x) + tail * (1 + _SLACK) * jnp.eye(len(e)))


@jax.custom_vjp
def _inverse(x: jax.Array) -> jax.Array:
    """``I + x + x^2 + ...``, the first ``2^_DOUBLINGS`` terms."""
    total, power = jnp.eye(len(x)) + x, x
    for _ in range(_DOUBLINGS - 1):
        power = power @ power
        total = total + total @ power
    return total


def _forwards(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The forward pass of :func:`_inverse`, which keeps its result."""
    total = _inverse(x)
    return total, total


def _backwards(total: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    """The derivative of ``(I - x)^-1``, which the sum approximates."""
    return (total @ cotangent @ total,)


_inverse.defvjp(_forwards, _backwards)


def _above(matrix: jax.Array) -> jax.Array:
    """An upper bound of the largest eigenvalue of a semidefinite matrix ``[m, m]``.

    It is at most ``m^(1/16)`` times too large.
    """
    size = jnp.trace(matrix)
    size = jnp.where(size > 0, size, 1.0)
    power = matrix / size
    for _ in range(3):
        power = power @ power
    total = jnp.sum(power**2)
    return size * jnp.where(total > 0, total, 1.0) ** (1 / 16) * (1 + _SLACK)


def _first_weights(layers: list[_Layer], rows: jax.Array, norm: float) -> Weights:
    """The first parameters of the optimisation.

    A neuron's weight is the inverse of its variance, the diagonal entry of ``G``. For r = inf the
    input's metric is the mean magnitude of the Jacobian's rows: ``rows`` ``[R, m]`` times the
    layers with derivatives in the middle of their intervals.
    """
    product = rows
    for layer in reversed(layers):
        middle = layer.low.at[layer.open].add(0.5 * layer.gap)
        product = (product * middle) @ layer.weight
    inputs = layers[0].weight.shape[1] if layers else rows.shape[1]
    size = jnp.mean(jnp.abs(product), axis=0)
    size = jnp.log(size + 1e-2 * jnp.mean(size) + 1e-30)
    weights = Weights(
        tuple(jnp.zeros(len(layer.open), rows.dtype) for layer in layers),
        jnp.full(len(layers), 1.0, rows.dtype),
        size if norm == jnp.inf else jnp.zeros(inputs, rows.dtype),
    )
    for turn, layer in enumerate(layers):
        variance = jnp.diagonal(_through_all(layers[:turn], weights, norm)[1].gram(layer.weight))[
            layer.open
        ]
        exponents = -jnp.log(jnp.where(variance > 0, variance, 1.0))
        weights = weights._replace(
            shape=(*weights.shape[:turn], exponents, *weights.shape[turn + 1 :])
        )
    return weights


def _optimised(sizes: Callable[[Weights], jax.Array], weights: Weights, steps: int) -> jax.Array:
    """``[R]``: the least value of each bound ``sizes(weights)`` over ``steps`` steps of Adam.

    Each step lowers the bound whose best value is the largest. A bound that stays NaN becomes inf.
    """

    def height(weights: Weights, best: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = sizes(weights)
        worst = jnp.argmax(best)
        return jnp.log(found[worst]), found

    adam = optax.adam(optax.cosine_decay_schedule(_RATE, max(steps, 1), 0.05))

    def step(carry: Any, _: None) -> tuple[Any, None]:
        weights, state, best = carry
        (_, found), slope = jax.value_and_grad(height, has_aux=True)(weights, best)
        best = jnp.fmin(best, found)
        slope = jax.tree.map(lambda t: jnp.where(jnp.isfinite(t), t, 0.0), slope)
        change, state = adam.update(slope, state)
        return (optax.apply_updates(weights, change), state, best), None

    start = weights, adam.init(weights), jnp.full_like(sizes(weights), jnp.inf)
    (weights, _, best), _ = loops.scan(step, start, length=steps)
    best = jnp.fmin(best, sizes(weights))
    return jnp.where(jnp.isnan(best), jnp.inf, best)
