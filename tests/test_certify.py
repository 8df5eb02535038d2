"""Certificates against closed forms, brute force, dense sampling and the measured anchors."""

import itertools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from jax import lax

from wdjax import Lp, Model, certify, lipschitz, losses, norms, run
from wdjax.attacks import PGD
from wdjax.bounds import continuity, domain
from wdjax.lipschitz import margin
from wdjax.models import convert

NORMS = [1, 2, math.inf]
EVERY_NORM = pytest.mark.parametrize("norm", NORMS)


def mlp(layers, x):
    x = x.reshape(len(x), -1)
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def random_mlp(seed, *sizes):
    rng = np.random.default_rng(seed)
    return Model(
        mlp,
        [
            (jnp.array(rng.normal(size=(a, b)), jnp.float32), jnp.array(rng.normal(size=b), "f"))
            for a, b in itertools.pairwise(sizes)
        ],
    )


@jax.jit
def slopes(model, points):
    """Jacobians of all ``z_j - z_y`` at points, ``[n, y, j, d]``."""
    jacobian = jax.vmap(jax.jacobian(lambda t: model(t[None])[0]))(points)
    jacobian = jacobian.reshape(*jacobian.shape[:2], -1)
    return jacobian[:, None] - jacobian[:, :, None]


def ball_points(x, eps, norm, n, seed=0, box=(0.0, 1.0)):
    """Random points of the ball cut by the box, many of them on its boundary."""
    rng = np.random.default_rng(seed)
    step = rng.normal(size=(n, x.size))
    if norm == math.inf:
        step = np.where(rng.random((n, 1)) < 0.7, np.sign(step), step)
    if norm == 1:
        step = np.where(rng.random((n, 1)) < 0.7, np.eye(x.size)[rng.integers(0, x.size, n)], step)
        step *= rng.choice([-1, 1], size=(n, 1))
    step /= np.linalg.norm(step, norm, axis=1, keepdims=True)
    step *= eps * np.where(rng.random((n, 1)) < 0.7, 1.0, rng.random((n, 1)))
    return jnp.array(np.clip(x + step.reshape(n, *x.shape), *box), jnp.float32)


@pytest.mark.fast
def test_labels_choose_rows():
    model = random_mlp(0, 3, 6, 4)
    every = certify.margin_lipschitz(model, jnp.zeros(3), jnp.ones(3), norm=2)
    some = certify.margin_lipschitz(model, jnp.zeros(3), jnp.ones(3), norm=2, labels=[2, 0])
    np.testing.assert_allclose(some, every[jnp.array([2, 0])], rtol=1e-5)
    assert every.shape == (4, 4)
    np.testing.assert_array_equal(jnp.diag(every), 0)


# Linear models, where everything is exact.


@pytest.mark.fast
@EVERY_NORM
def test_linear_models_are_certified_exactly(norm):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(6, 4)).astype(np.float32)
    model = Model(lambda w, x: x.reshape(len(x), -1) @ w, jnp.array(weight))
    x = jnp.array(rng.uniform(size=(8, 2, 3)), jnp.float32)
    y = model(x).argmax(axis=-1)
    logits = np.asarray(model(x), float)
    gaps = weight.T[np.asarray(y)][:, None] - weight.T[None]
    sizes = np.linalg.norm(gaps, norms.dual(norm), axis=-1)
    rival = np.arange(4) != np.asarray(y)[:, None]
    margins = logits[np.arange(8), y][:, None] - logits
    exact = np.min(np.where(rival, margins / np.where(rival, sizes, 1), np.inf), axis=1)

    radii = certify.radius(model, x, y, norm=norm, box=None)
    np.testing.assert_allclose(radii, exact, rtol=1e-3)
    assert np.all(radii <= exact)
    at = certify.margin_bounds(model, x, y, norm=norm, eps=0.1, box=None)
    np.testing.assert_allclose(
        np.where(rival, at, 0), np.where(rival, margins - 0.1 * sizes, 0), atol=1e-4
    )
    lower, upper = jnp.zeros((2, 3)), jnp.ones((2, 3))
    constants = certify.margin_lipschitz(model, lower, upper, norm=norm, labels=y)
    np.testing.assert_allclose(np.where(rival, constants, 0), np.where(rival, sizes, 0), rtol=1e-3)
    eps = float(np.median(exact))
    certified = certify.certified(model, x, y, norm=norm, eps=eps, box=None)
    np.testing.assert_array_equal(certified, exact > eps)


@pytest.mark.fast
@EVERY_NORM
def test_attack_and_certificate_meet_for_two_classes(norm):
    model = Model(lambda w, x: x @ w, jax.random.normal(jax.random.key(0), (5, 2)))
    x = jax.random.uniform(jax.random.key(1), (12, 5))
    y = model(x).argmax(axis=-1)
    eps = float(jnp.median(certify.radius(model, x, y, norm=norm)))
    certified = certify.certified(model, x, y, norm=norm, eps=eps * 0.999)
    attack = run(PGD(Lp(norm), steps=40), model, x, y, eps=eps * 1.001)
    assert not np.any(attack.success & certified)
    assert np.mean(attack.success | certified) >= (1.0 if norm != 1 else 0.9)


# Tiny nets against brute force: one program, many weights.


@EVERY_NORM
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), eps=st.sampled_from([0.0, 0.01, 0.1, 0.5]))
def test_certificates_survive_brute_force(norm, seed, eps):
    model = random_mlp(seed, 3, 6, 3)
    rng = np.random.default_rng(seed)
    x = jnp.array(rng.choice([rng.uniform(size=(2, 3)), rng.integers(0, 2, (2, 3))]), jnp.float32)
    y = jnp.array([0, 1])
    bounds = certify.margin_bounds(model, x, y, norm=norm, eps=eps)
    for i in range(2):
        points = ball_points(x[i], eps, norm, 500, seed)
        logits = np.asarray(model(points), float)
        margins = logits[:, y[i]][:, None] - logits
        margins[:, y[i]] = np.inf
        assert np.all(margins >= np.asarray(bounds[i]))
    constants = certify.margin_lipschitz(model, jnp.zeros(3), jnp.ones(3), norm=norm)
    points = jnp.array(rng.uniform(size=(500, 3)), jnp.float32)
    sizes = norms.lp_norm(slopes(model, points).reshape(-1, 3), norms.dual(norm))
    assert np.all(sizes.reshape(-1, 3, 3).max(axis=0) <= constants * (1 + 1e-5))


@pytest.mark.parametrize("norm", [2, math.inf])
def test_radius_is_sound_and_at_least_the_global_one(norm):
    model = random_mlp(7, 4, 8, 3)
    x = jax.random.uniform(jax.random.key(0), (12, 4))
    y = model(x).argmax(axis=-1).at[0].add(1) % 3
    radii = certify.radius(model, x, y, norm=norm)
    assert radii[0] == 0
    constants = certify.margin_lipschitz(model, jnp.zeros(4), jnp.ones(4), norm=norm)
    assert np.all(radii[1:] > 0)
    for i in range(1, 12):
        logits = model(x[i : i + 1])[0]
        rival = jnp.arange(3) != y[i]
        gap = jnp.where(rival, (logits[y[i]] - logits) / jnp.where(rival, constants[y[i]], 1), 9e9)
        assert radii[i] >= jnp.min(gap) * (1 - 1e-3)
        points = ball_points(x[i], min(float(radii[i]), 4.0), norm, 2000, i)
        assert np.all(losses.margin(model(points), jnp.full(2000, y[i])) < 0)
    inside = jnp.where(jnp.isinf(radii), 1.0, radii)
    assert np.all(certify.certified(model, x, y, norm=norm, eps=inside)[1:])


# Interval arithmetic against dense sampling, on what models are made of.


def _conv(x, kernel, stride=1):
    return lax.conv_general_dilated(
        x, kernel, (stride,) * 2, ((1, 1),) * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _pool(x, window, stride, padding):
    pads = ((0, 0), (padding,) * 2, (padding,) * 2, (0, 0))
    shape, strides = (1, window, window, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, shape, strides, pads)


def _head(p, x):
    return x.reshape(len(x), -1) @ p["head"][: x[0].size]


def max_pooled(p, x):
    return _head(p, jax.nn.relu(_conv(_pool(jax.nn.relu(_conv(x, p["in"])), 2, 2, 0), p["mid"])))


def overlapping_pools(p, x):
    return _head(p, jnp.tanh(_pool(_conv(x, p["in"]), 3, 2, 1)))


def residual(p, x):
    hidden = jax.nn.relu(_conv((x - 0.5) / 0.25, p["in"], 2))
    return _head(p, jax.nn.relu(hidden + _conv(jax.nn.relu(_conv(hidden, p["mid"])), p["mid"])))


def reduced_maxima(p, x):
    groups = _conv(x, p["in"]).reshape(len(x), 9, 4, 4)
    return _head(p, jax.nn.leaky_relu(groups.max(axis=2) - groups.min(axis=3)))


def smooth(p, x):
    hidden = jax.nn.gelu(jax.nn.silu(_conv(x, p["in"])))
    return jax.nn.log_softmax(_head(p, jax.nn.softplus(hidden) * jax.nn.sigmoid(hidden)))


def folded(p, x):
    hidden = jnp.clip(jnp.abs(_conv(x, p["in"]) - 0.1), 0.1, 0.8)[:, ::2, 1:]
    return _head(p, jax.nn.elu(jnp.concatenate([hidden, -(hidden**2)], axis=-1)))


def attention(p, x):
    tokens = x.reshape(len(x), 6, 6) @ p["q"]
    centred = tokens - tokens.mean(axis=-1, keepdims=True)
    tokens = centred * lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 0.5)
    weights = jax.nn.softmax(jnp.einsum("nqd,nkd->nqk", tokens, tokens @ p["k"]) / 3)
    return _head(p, tokens + weights @ (tokens @ p["v"]))


def parameters(seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.array(rng.normal(size=shape) / math.sqrt(math.prod(shape[:-1])), jnp.float32)

    return {
        "in": normal(3, 3, 1, 4),
        "mid": normal(3, 3, 4, 4),
        "head": normal(144, 3),
        **{name: normal(6, 6) for name in "qkv"},
    }


@pytest.mark.parametrize(
    ("apply", "norm"),
    [
        (max_pooled, 2),
        (overlapping_pools, math.inf),
        (residual, 1),
        (reduced_maxima, math.inf),
        (smooth, math.inf),
        (folded, 1),
        (attention, math.inf),
    ],
)
def test_bounds_hold_at_sampled_points(apply, norm):
    model = Model(apply, parameters())
    x = jax.random.uniform(jax.random.key(3), (6, 6, 1))
    y = model(x[None]).argmax(axis=-1)
    domain_bounds = jax.jit(
        lambda low, high, eps: margin.margins_and_slopes(
            model,
            domain.box(low, high, None if norm == math.inf else (x, eps, norm)),
            y[0],
            3,
        )
    )
    for eps in (1e-4, 0.02, 0.2):
        eps *= {1: 8.0, 2: 3.0}.get(norm, 1.0)
        points = ball_points(x, eps, norm, 300)
        reach = eps * 1.00002
        ends = jnp.maximum(x - reach, 0), jnp.minimum(x + reach, 1)
        margins, jacobian = domain_bounds(*ends, reach)
        logits = model(points)
        found = logits - logits[:, y]
        assert np.all((margins.lower <= found) & (found <= margins.upper))
        found = slopes(model, points[:80])[:, y[0]].reshape(80, 3, 6, 6, 1)
        assert np.all((jacobian.lower - 1e-6 <= found) & (found <= jacobian.upper + 1e-6))
        if apply in (residual, max_pooled):
            certified = certify.margin_bounds(model, x[None], y, norm=norm, eps=eps)[0]
            rivals = np.arange(3) != y[0]
            assert np.all((logits[:, y] - logits >= certified)[:, rivals])
        if eps < 1e-3:
            width = float(jnp.max(margins.upper - margins.lower))
            assert width < 0.3, "bounds of a tiny ball are tight"


@pytest.mark.parametrize("apply", [max_pooled, overlapping_pools])
def test_layer_products_hold_at_sampled_points(apply):
    model = Model(apply, parameters())
    lower, upper = jnp.zeros((6, 6, 1)), jnp.ones((6, 6, 1))
    points = jax.random.uniform(jax.random.key(1), (100, 6, 6, 1))
    sampled = slopes(model, points).reshape(-1, 36)
    for norm in NORMS if apply is max_pooled else [2]:
        constants = certify.layer_product(model, lower, upper, norm=norm)
        sizes = norms.lp_norm(sampled, norms.dual(norm)).reshape(-1, 3, 3).max(axis=0)
        assert np.all(sizes <= constants)
        assert np.all(np.isfinite(constants))


@pytest.mark.fast
def test_affine_programs_are_bounded_exactly():
    weight = jnp.array([[1.0, -2.0], [3.0, 1.0]])

    def fn(x):  # The two maps cancel, which step-by-step intervals would not see.
        hidden = x @ weight
        return hidden @ jnp.linalg.inv(weight) - x / 2

    low, high = certify.bound(fn, jnp.array([0.0, -1.0]), jnp.array([1.0, 1.0]))
    np.testing.assert_allclose(low, [0.0, -0.5], atol=1e-4)
    np.testing.assert_allclose(high, [0.5, 0.5], atol=1e-4)
    np.testing.assert_allclose(
        certify.bound(lambda x: x @ weight, -jnp.ones(2), jnp.ones(2), ball=(jnp.zeros(2), 1.0, 2)),
        np.outer([-1, 1], np.linalg.norm(weight, axis=0)),
        rtol=1e-4,
    )


def test_scaling_to_many_inputs_pushes_the_basis():
    weight = jax.random.normal(jax.random.key(0), (300, 290))
    x = jax.random.uniform(jax.random.key(1), (300,))
    for norm in (1, 2):
        bounds = certify.bound(
            lambda t: jax.nn.relu(t @ weight - 40), x - 0.1, x + 0.1, ball=(x, 0.1, norm)
        )
        reach = 0.1 * np.linalg.norm(weight, norms.dual(norm), axis=0)
        expected = np.maximum(np.asarray(x @ weight) - 40 + reach, 0)
        np.testing.assert_allclose(bounds.upper, expected, atol=0.02)
        assert np.all(bounds.upper >= expected - 1e-4)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("fn", "clarke"),
    [
        (jax.nn.relu, (0.0, 1.0)),
        (jnp.abs, (-1.0, 1.0)),
        (lambda t: jnp.maximum(t, -t), (-1.0, 1.0)),
        (lambda t: jnp.minimum(t, 2 * t), (1.0, 2.0)),
        (lambda t: jnp.max(jnp.stack([t, 3 * t, 0 * t])), (0.0, 3.0)),
        (lambda t: jnp.clip(t, 0.0, 1.0), (0.0, 1.0)),
        (lambda t: jax.nn.leaky_relu(t, 0.5), (0.5, 1.0)),
    ],
)
def test_slopes_at_a_kink_hold_both_sides(fn, clarke):
    model = Model(lambda _, x: jnp.stack([0 * x[:, 0], jax.vmap(fn)(x[:, 0])], axis=1), None)
    zero = jnp.zeros(1)
    bounds = jax.jit(lambda x: margin.margins_and_slopes(model, domain.box(x, x), jnp.array(0), 2))
    _, slope = bounds(zero)
    assert slope.lower[1, 0] <= clarke[0] + 1e-6
    assert slope.upper[1, 0] >= clarke[1] - 1e-6


@pytest.mark.fast
def test_custom_derivatives_and_stopped_gradients_are_looked_through():
    @jax.custom_vjp
    def masked(x):
        return 3.0 * x

    masked.defvjp(lambda x: (masked(x), None), lambda _, g: (0.0 * g,))
    for hide in (masked, lambda x: 3.0 * lax.stop_gradient(x)):
        model = Model(lambda _, x, hide=hide: hide(x) @ jnp.eye(2), None)
        constants = certify.margin_lipschitz(model, jnp.zeros(2), jnp.ones(2), norm=math.inf)
        np.testing.assert_allclose(constants[0, 1], 6.0, rtol=1e-4)


@pytest.mark.fast
@pytest.mark.parametrize("far", [1e-3, 30.0, 100.0, 1e5])
def test_selections_that_differ_far_away_only(far):
    """Their cases agree below ``far``, where two moving numbers may be equal."""

    def jumping(w, x):
        a, b = x.T
        chosen = jnp.where(a > b, a, jnp.minimum(b, far))
        return jnp.stack([chosen, 0 * chosen], 1)

    def whole(w, x):
        a, b = x.T
        chosen = jnp.where(a > b, jnp.minimum(a, far), jnp.minimum(b, far))
        return jnp.stack([chosen, 0 * chosen], 1)

    def bent(w, x):
        """Both cases agree but between 5 and 9 times ``far``, which no constant tells."""
        a, b = x.T
        hill = jax.nn.relu(b / far - 5) * jax.nn.relu(9 - b / far)
        return jnp.stack([jnp.where(a > b, a, b + hill), 0 * a], 1)

    ends = jnp.zeros(2), jnp.full(2, 40 * far)
    with pytest.raises(ValueError, match=r"select_n.*not continuous"):
        certify.margin_lipschitz(Model(bent, None), *ends, norm=math.inf)
    with pytest.raises(ValueError, match=r"select_n.*not continuous"):
        certify.margin_lipschitz(Model(jumping, None), *ends, norm=math.inf)
    constants = certify.margin_lipschitz(Model(whole, None), *ends, norm=math.inf)
    assert 1 <= float(constants[0, 1]) <= 2.001


@pytest.mark.fast
def test_long_expressions_are_compared_in_no_time():
    """Each square uses the one before twice: 2^60 leaves, written out."""

    def apply(a, b):
        one, two = a, b
        for _ in range(60):
            one, two = 0.4 * one * one, 0.4 * two * two
        return jnp.where(a > b, one, two)

    assert continuity.jumps(jax.make_jaxpr(apply)(0.0, 1.0)) == set()
    assert continuity.jumps(jax.make_jaxpr(lambda a, b: apply(a, b + 1))(0.0, 1.0)) == set()
    other = jax.make_jaxpr(lambda a, b: jnp.where(a > b, a, apply(b, b)))(0.0, 1.0)
    assert continuity.jumps(other) == {"select_n"}


@pytest.mark.fast
def test_models_that_test_for_nan_have_no_constant():
    """Where the tested value may be one; in ``log_softmax`` it cannot."""
    tests = {
        "nan": lambda w, x: jnp.where(jnp.isnan(jnp.abs(jnp.log(x - 0.5))), -1.0, x),
        "inf": lambda w, x: jnp.where(jnp.isfinite(jnp.log(x)), x, -1.0),
        "none": lambda w, x: jax.nn.log_softmax(3 * x),
    }
    for name, apply in tests.items():
        model = Model(apply, None)
        found = certify.margin_lipschitz(model, jnp.zeros(2), jnp.ones(2), norm=math.inf)[0, 1]
        assert np.isinf(found) == (name != "none")
        x, y = jnp.array([[0.9, 0.2]]), jnp.array([0])
        radius = lipschitz.global_radius(model, x, y, norm=math.inf)
        assert float(radius[0]) <= (0.1 if name == "none" else 0)


@pytest.mark.fast
def test_discontinuous_models_have_bounds_but_no_constant():
    model = Model(lambda _, x: jnp.round(4 * x) @ jnp.eye(2), None)
    with pytest.raises(ValueError, match=r"round.*not continuous"):
        certify.margin_lipschitz(model, jnp.zeros(2), jnp.ones(2), norm=2)
    x, y = jnp.array([[0.76, 0.24]]), jnp.array([0])
    bounds = certify.margin_bounds(model, x, y, norm=math.inf, eps=0.05)
    np.testing.assert_allclose(bounds[0, 1], 2.0, rtol=1e-4)
    assert not certify.certified(model, x, y, norm=math.inf, eps=0.2)[0]
    assert 0.1 < certify.radius(model, x, y, norm=math.inf)[0] <= 0.25


@pytest.mark.fast
def test_unknown_operations_are_named():
    with pytest.raises(ValueError, match="'igamma'"):
        certify.bound(lambda x: lax.igamma(x + 1, x), jnp.zeros(3), jnp.ones(3))
    bits = lambda x: lax.population_count(x.astype(int))  # noqa: E731
    with pytest.raises(ValueError, match="'population_count'"):
        certify.bound(bits, jnp.zeros(3), jnp.ones(3))
    place = certify.bound(jnp.argmax, jnp.array([0.0, 0.5, 0.0]), jnp.array([0.4, 1.0, 1.0]))
    assert (float(place.lower), float(place.upper)) == (1, 2)
    exact = certify.bound(lambda x: x + jnp.sort(jnp.array([2.0, 1.0])), jnp.zeros(2), jnp.ones(2))
    np.testing.assert_allclose(exact.lower, [1.0, 2.0], rtol=1e-5)


@pytest.mark.fast
def test_bounds_hold_what_floats_and_reals_return():
    rng = np.random.default_rng(0)
    layers = [
        (1e4 * rng.normal(size=(40, 60)), 1e4 * rng.normal(size=60)),
        (1e-4 * rng.normal(size=(60, 3)), np.zeros(3)),
    ]
    layers = [(np.float32(w), np.float32(b)) for w, b in layers]
    model = Model(mlp, jax.tree.map(jnp.array, layers))
    x = jnp.array(rng.uniform(size=40), jnp.float32)
    low, high = jax.jit(lambda t: certify.bound(lambda u: model(u[None])[0], t, t))(x)
    hidden = np.maximum(np.float64(x) @ np.float64(layers[0][0]) + layers[0][1], 0)
    exact = hidden @ np.float64(layers[1][0])
    floats = [model(x[None])[0], model(jnp.stack([x] * 7))[3]]
    for value in (exact, *floats):
        assert np.all((np.asarray(low, float) <= value) & (value <= np.asarray(high, float)))
    assert np.max(high - low) < 0.05 * np.max(np.abs(exact))


# Transformations.


@pytest.mark.fast
def test_jit_vmap_and_batches_change_nothing():
    model = random_mlp(3, 4, 8, 3)
    x = jax.random.uniform(jax.random.key(0), (9, 4))
    y = model(x).argmax(axis=-1)
    eps = jnp.array([0.0, 0.02, 0.1])

    def bounds(e, **how):
        return certify.margin_bounds(model, x, y, norm=2, eps=e, **how)

    together = jax.jit(jax.vmap(bounds))(eps)
    for e, expected in zip(eps, together):
        np.testing.assert_allclose(bounds(float(e), batch_size=4), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        certify.radius(model, x, y, norm=2, batch_size=4),
        jax.jit(lambda t: certify.radius(model, t, y, norm=2))(x),
        rtol=2e-3,
    )
    with pytest.raises(ValueError, match="eps"):
        bounds(-0.1)
    with pytest.raises(ValueError, match="batch_size"):
        bounds(0.1, batch_size=0)
    with pytest.raises(ValueError, match="one sample's box"):
        certify.margin_lipschitz(model, jnp.zeros(4), jnp.ones(3), norm=2)


# Distributions.


@pytest.mark.fast
@pytest.mark.parametrize("order", [1, 1.5, 2])
def test_certified_accuracy_is_the_linear_program(order):
    rng = np.random.default_rng(1)
    for _ in range(5):
        radius = rng.choice([0.0, np.inf, 0.2, 1.0, 3.0], size=12) * rng.uniform(0.5, 1, 12)
        radius = np.where(np.isnan(radius), 0.0, radius)
        eps = rng.uniform(0, 1.5, 3)
        found = certify.certified_accuracy(radius, eps, order)
        finite = np.minimum(radius, 1e3)
        for e, accuracy in zip(eps, found):
            program = scipy.optimize.linprog(
                -np.ones(12) / 12,
                A_ub=[finite**order / 12],
                b_ub=[e**order],
                bounds=[(0, 0 if np.isinf(r) else 1) for r in radius],
            )
            expected = 1 + program.fun
            assert expected - 1e-6 <= accuracy <= expected + 1e-9


@pytest.mark.fast
def test_certified_accuracy_at_the_ends():
    radius = [0.0, 0.1, 0.2, math.inf]
    assert certify.certified_accuracy(radius, 0.0, 1) == 0.75
    np.testing.assert_array_equal(
        certify.certified_accuracy(radius, [0.05, 0.15, 0.5], math.inf), [0.75, 0.5, 0.25]
    )
    np.testing.assert_allclose(certify.certified_accuracy(radius, 1e9, 2), 0.25)
    assert certify.certified_accuracy([1e-300], 1e300, 2) == 0
    np.testing.assert_allclose(certify.certified_accuracy([1.0], 1e-200, 2), 1.0)
    for bad in ([-1.0], [math.nan], []):
        with pytest.raises(ValueError, match="radius"):
            certify.certified_accuracy(bad, 0.1, 1)
    with pytest.raises(ValueError, match="order"):
        certify.certified_accuracy([1.0], 0.1, 0.5)
    with pytest.raises(ValueError, match="eps"):
        certify.certified_accuracy([1.0], -0.1, 1)
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda r: certify.certified_accuracy(r, 0.1, 1))(jnp.ones(2))


@pytest.mark.fast
def test_pointwise_certified_accuracy_follows_its_definition():
    """For order inf: the share that is correct with a radius of at least eps, equality included."""
    rng = np.random.default_rng(0)
    correct = rng.random(40) < 0.7
    radius = rng.choice([0.05, 0.1, 0.3, 0.7, np.inf], 40).astype(np.float32)
    eps = np.array([[0.01, 0.05, 0.1], [0.2, 0.3, 0.7]], np.float32)
    found = certify.certified_accuracy(np.where(correct, radius, 0), eps, math.inf)
    expected = [[np.mean(correct & (radius >= budget)) for budget in line] for line in eps]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert certify.certified_accuracy(radius, 0.1, math.inf).shape == ()


@pytest.mark.parametrize("norm", [1])
def test_wdro_bound_holds_on_moved_data(norm):
    model = random_mlp(5, 4, 6, 3)
    x = jax.random.uniform(jax.random.key(0), (10, 4))
    y = jnp.array([0, 1] * 5)
    constant = certify.lipschitz_constant(model, x, y, norm=norm)
    for loss in (losses.cross_entropy, losses.margin):
        clean = float(np.mean(np.asarray(loss(model(x), y), float)))
        eps = np.array([0.0, 0.05, 0.3])
        bounds = certify.wdro_bound(model, x, y, norm=norm, eps=eps, order=1, loss=loss)
        np.testing.assert_allclose(bounds, clean + constant * eps, rtol=1e-3, atol=1e-4)
        local = certify.wdro_bound(
            model, x, y, norm=norm, eps=eps, order=math.inf, loss=loss, constant=constant
        )
        assert np.all(local <= bounds)
        for e, bound, near in zip(eps, bounds, local):
            moved = jnp.stack([ball_points(x[i], e, norm, 200, i) for i in range(10)], axis=1)
            worst = jnp.stack([loss(model(points), y) for points in moved]).max(axis=0)
            assert np.mean(worst) <= near + 1e-5
            # All of the budget on one sample: Omega_1 allows it to travel ten times as far.
            single = ball_points(x[0], 10 * e, norm, 200)
            change = jnp.max(loss(model(single), y[:1].repeat(200))) - loss(model(x), y)[0]
            assert clean + float(change) / 10 <= bound + 1e-5


@pytest.mark.fast
def test_wdro_bound_refuses_losses_without_a_constant():
    model = random_mlp(5, 4, 6, 3)
    x, y = jnp.full((2, 4), 0.5), jnp.array([0, 1])
    with pytest.raises(ValueError, match="'dlr'"):
        certify.wdro_bound(model, x, y, norm=2, eps=0.1, order=1, loss=losses.dlr)


# Real weights.


def load_mlp(shared, name):
    return convert.load(shared / f"data/weights/{name}.pth", "mlp")[0]


def mnist(shared, n):
    data = np.load(shared / "data/mnist_test_0_500.npz")
    return jnp.array(data["x"][:n] / 255, jnp.float32), jnp.array(data["y"][:n])


@pytest.mark.parametrize(
    ("name", "anchors", "whole"),
    [
        ("mnist_2_20", {0.01: 22.587, 0.05: 27.807, 0.1: 33.768, 0.3: 58.91}, 59.025),
        ("mnist_fc_3layer", {0.01: 2115.8, 0.1: 3791.2}, 4116.7),
    ],
)
def test_anchors_of_interval_jacobians(shared, name, anchors, whole):
    model = load_mlp(shared, name)
    x, y = mnist(shared, 1)
    x = x.reshape(784)
    for radius, value in anchors.items():
        found = certify.interval_jacobian(
            model, x - radius, x + radius, norm=math.inf, labels=y
        ).max()
        assert value * (1 - 1e-4) <= found <= value * (1 + 5e-4)
    everywhere = jnp.full(784, jnp.inf)
    for ends in ((jnp.zeros(784), jnp.ones(784)), (-everywhere, everywhere)):
        found = certify.interval_jacobian(model, *ends, norm=math.inf).max()
        assert whole * (1 - 1e-4) <= found <= whole * (1 + 5e-4)


def test_anchors_of_layer_products(shared):
    model = load_mlp(shared, "mnist_2_20")
    lower, upper = jnp.zeros(784), jnp.ones(784)
    found = certify.layer_product(model, lower, upper, norm=math.inf).max()
    np.testing.assert_allclose(found, 113.2, rtol=1e-3)
    found = certify.margin_lipschitz(model, lower, upper, norm=2).max()
    assert 2.276 <= found <= 3.4377 * 1.005  # Sampled lower bound, op-norm product.
    # The exact constant, by branch and bound; the interval Jacobian with all masks open.
    found = certify.margin_lipschitz(model, lower, upper, norm=math.inf).max()
    assert 32.354 <= found <= 59.025 * 1.0005
