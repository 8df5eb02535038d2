"""Interval bounds where the norm enters at the first layer and the last one joins the margin."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from wdjax import Model, certify
from wdjax.bounds import margins, region

RNG = np.random.default_rng(0)
NORMS = (1, 2, math.inf)


def nearest(size, cap, eps):
    """The point of ``[0, cap]`` in the l2 ball that is farthest along ``size``."""
    if np.linalg.norm(cap) <= eps:
        return cap
    level = scipy.optimize.brentq(
        lambda level: np.linalg.norm(np.minimum(size / level, cap)) - eps, 1e-9, 1e9, xtol=1e-15
    )
    return np.minimum(size / level, cap)


def exact_margins(weights, offset, x, y, norm, eps, box):
    """Of a linear model: by HiGHS for l1 and linf, for l2 by its optimality conditions."""
    out = np.full((len(x), weights.shape[1]), np.inf)
    for i, j in np.ndindex(*out.shape):
        if j == y[i]:
            continue
        a, b = weights[:, y[i]] - weights[:, j], offset[y[i]] - offset[j]
        low, high = (-np.inf, np.inf) if box is None else box
        down, up = np.minimum(x[i] - low, eps), np.minimum(high - x[i], eps)
        cap = np.where(a > 0, down, up)
        size = np.abs(a)
        if norm == math.inf:
            fall = size @ cap
        elif norm == 1:
            fall = -scipy.optimize.linprog(
                -size, A_ub=np.ones((1, len(a))), b_ub=[eps], bounds=list(zip(0 * cap, cap))
            ).fun
        else:
            fall = size @ nearest(size, cap, eps)
        out[i, j] = a @ x[i] + b - fall
    return out


@pytest.mark.fast
@pytest.mark.parametrize("box", [(0.0, 1.0), None])
@pytest.mark.parametrize("norm", NORMS)
def test_interval_bounds_of_linear_models_are_exact(norm, box):
    """Also behind other affine layers, and those of training."""
    first, second = RNG.normal(size=(7, 5)), RNG.normal(size=(5, 4))
    offset = RNG.normal(size=4)

    def apply(p, x):
        return ((x - 0.4) / 0.3) @ p[0] @ p[1] + p[2]

    parameters = tuple(jnp.asarray(t, jnp.float32) for t in (first, second, offset))
    model = Model(apply, parameters)
    x = np.clip(RNG.uniform(-0.2, 1.2, (6, 7)), 0, 1)
    y = np.asarray(model(jnp.asarray(x, jnp.float32))).argmax(axis=1)
    whole = first @ second / 0.3
    shift = offset - 0.4 * whole.sum(axis=0)
    for eps in (0.02, 0.2):
        true = exact_margins(whole, shift, x, y, norm, eps, box)
        how = {"norm": norm, "eps": eps, "box": box}
        given = (model, jnp.asarray(x, jnp.float32), jnp.asarray(y))
        for low in (
            certify.margin_bounds(*given, method="interval", **how),
            certify.trainable_bounds(*given, **how),
        ):
            rivals = np.isfinite(true)
            loss = true[rivals] - np.asarray(low)[rivals]
            clean = exact_margins(whole, shift, x, y, norm, 0, box)[rivals]
            share = loss / (clean - true[rivals])
            assert np.all(share >= -1e-6)
            # Rounding, and the multiplier of a ball, a number near the best one.
            assert np.all(share < 5e-3)


def test_last_layer_is_merged_with_the_margin():
    model = Model(lambda w, x: x @ w, jnp.array([[2.0, 1.0], [1.0, 2.0]]))
    x, y = jnp.array([[0.8, 0.2]]), jnp.array([0])
    low = certify.margin_bounds(model, x, y, norm=math.inf, eps=0.1, method="interval")
    np.testing.assert_allclose(low[0, 1], 0.4, atol=1e-4)


def conv(x, k, stride, pads="SAME"):
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, k, (stride,) * 2, pads, dimension_numbers=names)


KERNEL = RNG.normal(size=(3, 3, 2, 4)).astype(np.float32)
DENSE = RNG.normal(size=(72, 6)).astype(np.float32)
POSITIONS = RNG.normal(size=(6, 6, 2)).astype(np.float32)
BETWEEN = RNG.normal(size=(6, 6, 4)).astype(np.float32)
SCALE = RNG.normal(size=4).astype(np.float32)
FIRST = {
    "dense": lambda x: x.reshape(len(x), -1) @ DENSE + 0.3,
    "conv": lambda x: conv((x - 0.4) / jnp.array([0.3, 2.0]), KERNEL, 1),
    "strided": lambda x: conv(x, KERNEL, 2) * SCALE + 1,
    "valid": lambda x: conv(x, KERNEL, 2, "VALID") - SCALE,
    "of positions": lambda x: conv(x * POSITIONS, KERNEL, 1),
    "between": lambda x: conv(conv(x, KERNEL, 1) * BETWEEN, KERNEL[:, :, :1].repeat(4, 2), 1),
    "two": lambda x: conv(conv(x, KERNEL, 1), KERNEL[:, :, :1].repeat(4, 2), 1),
    "branches": lambda x: x.reshape(len(x), -1) @ DENSE + x[:, :3, 0, 0].repeat(2, axis=1),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", FIRST)
def test_neurons_of_the_first_layer_lie_between_their_bounds(name, norm):
    """Against the exact range of each, from its row: by the dual norm, where no box cuts it."""
    first = FIRST[name]
    x = np.clip(RNG.uniform(-0.5, 1.5, (3, 6, 6, 2)), 0, 1).astype(np.float32)
    x[0] = RNG.uniform(0.4, 0.6, (6, 6, 2))
    eps = 0.3
    size = first(x[:1]).size

    def last(x):
        return jax.nn.relu(first(x)).reshape(len(x), -1) @ np.ones((size, 2), np.float32)

    @functools.partial(jax.jit, static_argnums=1)
    def ends(x, box):
        ball = region.ball(x, jnp.full(len(x), eps), norm, box)
        state = margins.prepare(Model(lambda _, x: last(x), ()), ball, "interval")
        place = next(n for n in state.network.graph.nodes if n.name == "max").inputs[0]
        value = state.values[place]
        return value.lower.reshape(len(x), -1), value.upper.reshape(len(x), -1)

    rows = np.asarray(jax.jacobian(lambda x: first(x[None])[0].reshape(-1))(jnp.asarray(x[0])))
    rows = rows.reshape(size, -1).astype(float)
    middle = np.asarray(first(x), float).reshape(len(x), -1)
    reach = eps * np.linalg.norm(rows, ord={1: np.inf, 2: 2, math.inf: 1}[norm], axis=1)
    low, high = (np.asarray(t, float) for t in ends(jnp.asarray(x), None))
    assert np.all((low <= middle - reach) & (high >= middle + reach))
    if name in ("dense", "valid") or (name in ("conv", "strided") and norm != 1):
        np.testing.assert_allclose(low, middle - reach, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(high, middle + reach, rtol=2e-3, atol=2e-3)
    low, high = (np.asarray(t, float) for t in ends(jnp.asarray(x), (0.0, 1.0)))
    flat = x.reshape(len(x), -1).astype(float)
    for sign, end in ((-1, low), (1, high)):
        # The point of the box farthest along a row: within the ball after it is shrunk.
        move = np.clip(flat[:, None] + sign * 10 * eps * np.sign(rows), 0, 1) - flat[:, None]
        weight = np.abs(rows)[None] ** (1 if norm == 2 else 0)
        move = move * weight / weight.max(axis=-1, keepdims=True)
        length = np.linalg.norm(move, ord={1: 1, 2: 2, math.inf: np.inf}[norm], axis=-1)
        move *= np.minimum(1, eps / length)[..., None]
        found = middle + np.sum(rows * move, axis=-1)
        assert np.all(sign * (end - found) >= -1e-5)


def test_a_sample_in_a_corner_moves_half_its_coordinates():
    """The l2 norm of the coordinates that may move, for both signs of the weights."""
    weights = np.array([[3.0, -3.0], [-4.0, 4.0]], np.float32)
    x, y = jnp.zeros((1, 2)), jnp.array([0])
    model = Model(lambda w, x: jax.nn.relu(x @ w + 2.0), weights)
    low = certify.margin_bounds(model, x, y, norm=2, eps=0.1, method="interval")
    np.testing.assert_allclose(low[0, 1], (2 - 0.4) - (2 + 0.4), atol=1e-4)


@pytest.mark.parametrize("norm", [1, 2])
def test_short_samples_are_bounded_with_64_bits_enabled(norm):
    """A float32 model's coefficients stay float32, and so do its bounds."""
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        w = jnp.array([[1.0, -1.0], [0.0, 2.0]], jnp.float32)
        x, y = jnp.array([[0.8, 0.1]], jnp.float32), jnp.array([0])
        model = Model(lambda w, x: jnp.maximum(x @ w, 0.0) @ w, w)
        how = {"norm": norm, "eps": 0.1, "method": "interval"}
        low = certify.margin_bounds(model, x, y, **how)
    assert low.dtype == jnp.float32
    low = float(low[0, 1])
    assert low == pytest.approx(float(certify.margin_bounds(model, x, y, **how)[0, 1]), rel=1e-6)
