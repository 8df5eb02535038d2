"""Gradients of certificates are those of the numbers they return: against finite differences."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import Model, certify

RNG = np.random.default_rng(0)
IMAGES = ("NHWC", "HWIO", "NHWC")


def dense(p, x):
    for w, b in p[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ p[-1][0] + p[-1][1]


def maps(p, x):
    for k, step in zip(p[:2], (1, 2)):
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, k, (step,) * 2, "SAME", None, None, IMAGES))
    return x.reshape(len(x), -1) @ p[2]


def weights(*shape):
    return jnp.asarray(RNG.normal(size=shape) * 1.5 / math.sqrt(math.prod(shape[:-1])))


def nets():
    """An MLP and a conv net, in float64, that have neurons which open and classes within reach."""
    layers = [(weights(a, b), weights(b) * 0.2) for a, b in ((6, 12), (12, 12), (12, 3))]
    return {
        "mlp": (dense, layers, (6,)),
        "conv": (maps, [weights(3, 3, 1, 2), weights(3, 3, 2, 2), weights(8, 3)], (4, 4, 1)),
    }


@pytest.fixture(autouse=True)
def _doubles():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        yield


def directional(fn, given, width):
    """The derivative along a random direction: by reverse mode, and by central differences."""
    along = jax.tree.map(lambda t: jnp.asarray(RNG.normal(size=jnp.shape(t))), given)
    ahead, behind = (
        jax.tree.map(lambda t, d, s=s: t + s * d, given, along) for s in (width, -width)
    )
    slopes = jax.tree.leaves(jax.jit(jax.grad(fn))(given))
    reverse = sum(jnp.vdot(a, b) for a, b in zip(slopes, jax.tree.leaves(along)))
    return reverse, (fn(ahead) - fn(behind)) / (2 * width)


def problem(name):
    apply, p, shape = nets()[name]
    x = jnp.asarray(RNG.uniform(0.3, 0.7, (3, *shape)))
    return apply, p, x, jnp.argmax(apply(p, x), axis=-1)


@pytest.mark.parametrize(
    ("name", "norm", "eps"), [("mlp", 1, 0.3), ("mlp", math.inf, 0.05), ("conv", 2, 0.2)]
)
def test_margins_change_as_their_gradient_says(name, norm, eps):
    apply, p, x, y = problem(name)

    @jax.jit
    def low(given):
        p, x, eps = given
        found = certify.margin_bounds(Model(apply, p), x, y, norm=norm, eps=eps)
        return jnp.sum(jnp.where(jnp.isfinite(found), found, 0.0))

    reverse, measured = directional(low, (p, x, jnp.asarray(eps)), 1e-6)
    # The multiplier of an l1 or l2 ball is a number near the best one, held fixed.
    np.testing.assert_allclose(reverse, measured, rtol=1e-6 if norm == math.inf else 1e-2)


@pytest.mark.parametrize("function", [jax.nn.silu, jax.nn.softplus])
def test_margins_of_fused_functions_change_as_their_gradient_says(function):
    """The slopes of their lines change too: held fixed, these were a fifth and a quarter off."""

    def apply(p, x):
        return function(x @ p[0] + p[1]) @ p[2]

    p = [weights(3, 4), weights(4), weights(4, 3)]
    x = jnp.asarray(RNG.uniform(0.3, 0.7, (2, 3)))
    y = jnp.argmax(apply(p, x), axis=-1)

    @jax.jit
    def low(given):
        p, x, eps = given
        found = certify.margin_bounds(Model(apply, p), x, y, norm=math.inf, eps=eps)
        return jnp.sum(jnp.where(jnp.isfinite(found), found, 0.0))

    np.testing.assert_allclose(*directional(low, (p, x, jnp.asarray(0.1)), 1e-6), rtol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_radii_change_as_their_gradient_says(name):
    apply, p, x, y = problem(name)

    @jax.jit
    def total(given):
        p, x = given
        return jnp.sum(certify.radius(Model(apply, p), x, y, norm=math.inf, steps=25))

    assert 0.02 < total((p, x)) < jnp.inf
    reverse, measured = directional(total, (p, x), 1e-5)
    np.testing.assert_allclose(reverse, measured, rtol=1e-3)


@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_degenerate_nets_have_finite_gradients(norm):
    """Dead neurons, ties, a sample at a corner, radius 0, nothing certified and all certified."""
    x = jnp.array([[0.0, 1.0], [0.5, 0.5]])
    inner = jnp.array([[1.0, 0.0, -1.0], [1.0, 0.0, -1.0]])
    outer = jnp.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])

    @jax.jit
    @jax.grad
    def margins(given, y):
        p, x, eps = given
        low = certify.margin_bounds(Model(dense, p), x, y, norm=norm, eps=eps)
        return jnp.take_along_axis(low, 1 - y[:, None], axis=1)[0, 0]

    @jax.jit
    @jax.grad
    def radii(given, y):
        found = certify.radius(Model(dense, given[0]), given[1], y, norm=norm, steps=2)
        return jnp.sum(jnp.where(jnp.isfinite(found), found, 0.0))

    @jax.jit
    @jax.grad
    def trained(given, y):
        p, x, eps = given
        low = certify.trainable_bounds(Model(dense, p), x, y, norm=norm, eps=eps, backward=0.5)
        return jnp.take_along_axis(low, 1 - y[:, None], axis=1)[0, 0]

    for scale, eps, label in itertools.product((0.0, 1.0), (0.0, 0.1, 3.0), (0, 1)):
        p = [(inner, jnp.zeros(3)), (scale * outer, jnp.array([0.1, 0.0]))]
        given = (p, x, jnp.asarray(eps))
        for slopes in (margins, radii, trained):
            for leaf in jax.tree.leaves(slopes(given, jnp.full(2, label))):
                assert np.isfinite(leaf).all(), (scale, eps, label)


SMOOTH = ["tanh", "logistic", "erf", "atan", "asinh", "log1p", "sin", "silu", "softplus"]


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_have_finite_gradients(name):
    """Also where the operand does not vary, is 0, or is far out."""
    x, y = jnp.array([[0.0, 1.0], [0.5, 0.5]]), jnp.array([0, 1])

    def apply(p, x):
        return getattr(jax.lax, name, getattr(jax.nn, name, None))(x @ p[0]) @ p[1]

    @jax.jit
    @jax.grad
    def margins(given):
        p, eps = given
        low = certify.margin_bounds(Model(apply, p), x, y, norm=math.inf, eps=eps)
        return jnp.sum(jnp.where(jnp.isfinite(low), low, 0.0))

    for scale, eps in itertools.product((0.0, 1.0, 1e4), (0.0, 0.1)):
        p = scale * jnp.array([[1.0, 0.0, 0.5], [1.0, 0.0, 0.0]]), jnp.eye(3)[:, :2]
        for leaf in jax.tree.leaves(margins((p, jnp.asarray(eps)))):
            assert np.isfinite(leaf).all(), (scale, eps)


@pytest.mark.parametrize("method", ["interval", "crown", "alpha", "auto"])
def test_samples_whose_type_a_model_leaves_are_refused_in_words(method):
    p = weights(2, 4), weights(4, 2)
    x, y, how = jnp.full((2, 2), 0.5), jnp.array([0, 1]), {"norm": math.inf, "eps": 0.05}

    def apply(p, x):
        return jax.nn.relu(x @ p[0]) @ p[1]

    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), p)
    low = certify.margin_bounds(Model(apply, narrow), x, y, method=method, **how)
    assert low.dtype == jnp.float64
    with pytest.raises(ValueError, match=r"pass x.astype\(np.float64\)"):
        certify.margin_bounds(Model(apply, p), x.astype(jnp.float32), y, method=method, **how)
