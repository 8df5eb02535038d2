"""Certificates where mass moves between pixels: against linear programs, attacks, planted flips."""

import dataclasses
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, sparse
from test_image import distances, labelled, net, pictures

from wdjax import Lp, Model, certify, image, models
from wdjax.bounds import margins, region
from wdjax.bounds.coefficients import Rows, Whole

ANY = image.ImageWasserstein(window=None)
CASES = int(os.environ.get("WDJAX_CASES", 120))
"""Linear programs of each kind."""
KINDS = {
    "one channel": ((5, 5, 1), ANY),
    "a row": ((1, 9, 1), ANY),
    "squared": ((5, 5, 1), dataclasses.replace(ANY, power=2.0)),
    "shared": ((3, 4, 2), ANY),
    "separate": ((3, 4, 2), dataclasses.replace(ANY, channels="separate")),
    "bright": ((4, 4, 1), dataclasses.replace(ANY, high=255.0)),
}


def cases(name, count, seed=0):
    """Images from dark to full, coefficients from one pixel to all, radii over four decades."""
    (shape, ball), rng = KINDS[name], np.random.default_rng(seed)

    def some(values):
        return values * (rng.random(values.shape) < rng.choice([0.1, 0.5, 1.0], (count, 1, 1, 1)))

    x = ball.high * some(rng.uniform(0, 1.3, (count, *shape)).clip(0, 1))
    a = some(rng.normal(size=(count, *shape)) + rng.choice([0, 3], (count, 1, 1, 1)))
    eps = 10.0 ** rng.uniform(-3, 0.7, count)
    return [part.astype(np.float32) for part in (x, a, eps)]


def bounded(ball, x, a, eps):
    """What the region says of one function of each image."""
    own = margins.wide(region.ball(jnp.asarray(x), jnp.asarray(eps), ball, ball.box)).prepared()
    return own.least(Whole(jnp.asarray(a)[None, :, None]), Rows(jnp.arange(len(x)), each=True))[0]


def exact(ball, x, a, eps):
    """The least value over plans within the budget, without capacities, by HiGHS in float64."""
    height, width, channels = x.shape
    x, a = (np.moveaxis(part, -1, 0).reshape(channels, -1).astype(float) for part in (x, a))
    far, count = distances(height, width) ** ball.power, x.shape[1]
    own = x.sum(axis=1)
    apart = ball.channels == "separate"
    weights = np.where(own > 0, x.sum() / np.where(own > 0, own, 1), 1) if apart else [1] * channels
    rows = sparse.kron(sparse.eye(channels * count), np.ones((1, count)))
    found = optimize.linprog(
        np.repeat(a[:, None], count, axis=1).ravel(),
        A_ub=np.concatenate([(weight * far).ravel() for weight in weights])[None],
        b_ub=[eps**ball.power * x.sum()],
        A_eq=rows.tocsr(),
        b_eq=x.ravel(),
    )
    assert found.status == 0
    return found.fun


@pytest.mark.parametrize("name", KINDS)
def test_the_least_value_is_that_of_the_linear_program(name):
    ball, (x, a, eps) = KINDS[name][1], cases(name, CASES)
    low = np.asarray(jax.jit(lambda *of: bounded(ball, *of))(x, a, eps), float)
    truth = np.array([exact(ball, *one) for one in zip(x, a, eps.astype(float))])
    mass = x.sum(axis=(1, 2, 3)).astype(float)
    slack = 1e-9 * mass * np.abs(a).max(axis=(1, 2, 3))  # That of the linear program.
    assert np.all(low <= truth + slack)
    here = np.sum(x.astype(float) * a, axis=(1, 2, 3))
    scale = mass * np.abs(a).max(axis=(1, 2, 3))
    # What is charged for rounding, and squares of pixels for those that are far.
    assert np.quantile((truth - low) / (1e-4 * scale + here - truth + 1e-30), 0.9) < 0.1


def test_pixels_beyond_the_window_are_not_forgotten():
    """Of an image of 40 pixels in a row one is bright, and another one, anywhere, is worth -1."""
    x, a = np.zeros((39, 1, 40, 1), np.float32), np.zeros((39, 1, 40, 1), np.float32)
    x[:, 0, 0] = 1.0
    far = np.arange(1, 40)
    a[np.arange(39), 0, far] = -1.0
    for share in (0.1, 1.0):
        low = np.asarray(bounded(ANY, x, a, (share * far).astype(np.float32)))
        assert np.all(low <= -share)
        assert np.all(low[:3] >= -share - 1e-4)  # Exact where the window reaches.
        assert np.all(low >= -1.001)


def linear(w, x):
    """The second class wins where the weighted mass exceeds a half."""
    score = x.reshape(len(x), -1) @ w.ravel()
    return jnp.stack([jnp.full(len(x), 0.5), score], axis=1)


@pytest.mark.parametrize("method", ["interval", "crown", "bab"])
def test_a_planted_counterexample_is_never_certified(method):
    """Half of the mass of one pixel has to move by 2 pixels: the least radius is 1."""
    x = jnp.zeros((1, 6, 6, 1)).at[0, 2, 2].set(1.0)
    model = Model(linear, jnp.zeros((6, 6)).at[2, 4].set(1.0))
    how = {"norm": ANY, "method": method}
    y = jnp.zeros(1, jnp.int32)
    assert bool(certify.certified(model, x, y, eps=0.999, **how)[0])
    assert not bool(certify.certified(model, x, y, eps=1.001, **how)[0])
    if method == "crown":
        assert float(certify.radius(model, x, y, norm=ANY, steps=20)[0]) == pytest.approx(1, 1e-3)
        # The same with a window, and with little or no mass.
        small = dataclasses.replace(how["norm"], window=3)
        assert not bool(certify.certified(model, x, y, norm=small, eps=1.001)[0])
        assert bool(certify.certified(model, 0.4 * x, y, norm=ANY, eps=7.0)[0])
        assert bool(certify.certified(model, 0 * x, y, norm=ANY, eps=7.0)[0])


def small_net(channels=1, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    size = 4 * 4 * 3
    weights = {
        "conv": jax.random.normal(keys[0], (3, 3, channels, 3)) / 3,
        "w": jax.random.normal(keys[1], (size, 8)) / size**0.5,
        "v": jax.random.normal(keys[2], (8, 3)),
    }
    return Model(small, weights)


def small(params, x):
    dims = ("NHWC", "HWIO", "NHWC")
    seen = jax.lax.conv_general_dilated(x - 0.3, params["conv"], (1, 1), "VALID",
                                        dimension_numbers=dims)  # fmt: skip
    hidden = jax.nn.relu(jax.nn.relu(seen).reshape(len(x), -1) @ params["w"])
    return hidden @ params["v"]


def moved(ball, x, eps, rng, count=400):
    """Points of the ball: random plans to few or many pixels, as far as the budget goes."""
    height, width, channels = x.shape
    far = distances(height, width) ** ball.power
    mass = np.moveaxis(np.asarray(x, float), -1, 0).reshape(channels, -1)
    points = []
    for _ in range(count):
        plan = rng.random((channels, *far.shape)) ** rng.choice([1, 20, 200])
        plan *= mass[:, :, None] / plan.sum(axis=2, keepdims=True)
        share = min(1.0, eps**ball.power * mass.sum() / max((plan * far).sum(), 1e-30))
        z = (1 - share) * mass + share * plan.sum(axis=1)
        if z.max() <= ball.high:
            points.append(np.moveaxis(z.reshape(channels, height, width), 0, -1))
    return np.array(points, np.float32)


METHODS = ("interval", "crown", "alpha", "bab")


@pytest.mark.parametrize("channels", [1, 2])
def test_every_method_is_below_every_point_and_the_tighter_ones_are_tighter(channels):
    model, x = small_net(channels), pictures(3, channels=channels, side=6)
    y, rng, eps = jnp.argmax(model(x), axis=1), np.random.default_rng(0), 0.03
    reached, found = [], []
    for i in range(len(x)):
        z = moved(ANY, x[i], eps, rng)
        assert len(z) > 50
        logits = np.asarray(model(z))
        reached.append((logits[:, [int(y[i])]] - logits).min(axis=0))
    rivals = np.arange(3) != np.asarray(y)[:, None]
    for method in METHODS if channels == 1 else METHODS[1:2]:
        how = {"norm": ANY, "eps": eps, "method": method, "seconds": 3.0}
        low = np.asarray(certify.margin_bounds(model, x, y, **how))
        assert np.all(low[rivals] <= np.array(reached)[rivals] + 1e-5)
        found.append(low.min(axis=1))
    for loose, tight in itertools.pairwise(found[:3]):
        assert np.all(loose <= tight + 1e-4)
    assert np.any(found[-1] > 0) or channels == 2


def test_no_attack_crosses_a_certificate():
    """The sandwich: certified radii are below the nearest flips, and not by orders."""
    model, x = net(scale=3.0), pictures(12)
    y = labelled(model, x)
    found = image.minimum_radius(model, x, y, ball=ANY)
    assert found.success.sum() > 8
    radius = np.asarray(certify.radius(model, x, y, norm=ANY, method="crown"))
    flips = np.where(found.success, found.cost, np.inf)
    assert np.all(radius < flips)
    assert np.all(radius > 0)
    assert np.median(flips / radius) < 30
    told = certify.verify(model, x, y, norm=ANY, eps=float(np.median(radius)), method="crown")
    np.testing.assert_allclose(told.radius, radius, rtol=1e-5)
    np.testing.assert_array_equal(told.verified, radius >= np.median(radius))


def dense(params, x):
    return jax.nn.relu(x.reshape(len(x), -1) @ params["w"]) @ params["v"]


def dense_net():
    weights = net(side=4, classes=3).args[0]
    return Model(dense, {"w": weights["w"], "v": weights["v"]})


def test_what_is_not_a_number_is_not_certified():
    model, x = dense_net(), pictures(2, side=4)
    y = jnp.argmax(model(x), axis=1)

    @jax.jit
    def low(x, eps):
        return certify.margin_bounds(model, x, y, norm=ANY, eps=eps)

    wanted = certify.margin_bounds(model, x, y, norm=ANY, eps=0.02)
    np.testing.assert_allclose(low(x, 0.02), wanted, atol=1e-5)
    other = jnp.arange(3) != y[:, None]
    assert np.all(np.asarray(low(x, jnp.nan))[other] == -np.inf)
    assert np.all(np.asarray(low(x, -0.1))[other] == -np.inf)
    assert np.all(np.asarray(low(x - 1, 0.1))[other] == -np.inf)
    bad = low(x.at[0, 0, 0].set(jnp.nan), 0.1)
    assert np.all(np.asarray(bad)[0][np.asarray(other[0])] == -np.inf)
    # At a radius at which nothing can move the margins are those of the images.
    logits = model(x)
    clean = jnp.take_along_axis(logits, y[:, None], axis=1) - logits
    found = np.asarray(certify.margin_bounds(model, x, y, norm=ANY, eps=0.0))[other]
    np.testing.assert_allclose(found, np.asarray(clean)[other], atol=1e-3)


def test_bounds_have_gradients_in_model_images_and_radius():
    model, x = dense_net(), pictures(2, side=4)
    y = jnp.argmax(model(x), axis=1)

    def least(model, x, eps):
        low = certify.margin_bounds(model, x, y, norm=ANY, eps=eps)
        return jnp.sum(jnp.where(jnp.isfinite(low), low, 0.0))

    slopes = jax.grad(least, (0, 1, 2), allow_int=True)(model, x, 0.03)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(slopes))
    step = 1e-3
    rise = least(model, x, 0.03 + step) - least(model, x, 0.03 - step)
    assert float(slopes[2]) == pytest.approx(float(rise) / (2 * step), rel=0.05)
    assert float(slopes[2]) < 0


def test_misuse_says_what_to_do():
    model, x = small_net(), pictures(2, side=6)
    y = jnp.argmax(model(x), axis=1)
    how = {"eps": 0.1}
    with pytest.raises(ValueError, match=r"lie in box=\(0, 1.0\)|lie in box=\(0.0, 1.0\)"):
        certify.certified(model, x, y, norm=ANY, box=None, **how)
    with pytest.raises(ValueError, match="norm must be 1, 2 or inf"):
        certify.certified(model, x, y, norm=image.ImageWasserstein, **how)
    with pytest.raises(ValueError, match=r"inf or an image.ImageWasserstein\(\), got 'w1'"):
        certify.certified(model, x, y, norm="w1", **how)
    flat = models.mlp((36, 3), key=jax.random.key(0))
    for call in (certify.certified, certify.verify):
        with pytest.raises(ValueError, match="height, width, channels"):
            call(flat, x.reshape(2, 36), y, norm=ANY, **how)
    with pytest.raises(ValueError, match="height, width, channels"):
        certify.radius(flat, x.reshape(2, 36), y, norm=ANY)
    with pytest.warns(UserWarning, match="beyond"):
        certify.certified(model, x, y, norm=ANY, eps=8.0)
    assert Lp(2) != ANY
