"""Rectifiers relaxed together in l2 balls, against NumPy's SVD, the paper's formula and attacks."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import optimize

from wdjax import Model, attacks, certify, run
from wdjax.bounds import coupled, margins, region, spectral
from wdjax.models import convert
from wdjax.precision import highest


def largest(matrix):
    return np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)[0]


def test_norms_of_matrices_are_bounded_tightly():
    rng = np.random.default_rng(0)
    shapes = [(1, 1), (1, 9), (9, 1), (5, 8), (40, 60), (100, 30)]
    found = [rng.normal(size=shape) for shape in shapes for _ in range(10)]
    found += [np.outer(rng.normal(size=20), rng.normal(size=30)), np.linalg.qr(found[-1])[0]]
    found += [np.eye(50), 1e-25 * found[30], 1e25 * found[30], np.diag([1.0] + [0.999] * 30)]
    for matrix in found:
        matrix = np.asarray(matrix, np.float32)
        bound = float(spectral.of_matrix(jnp.asarray(matrix)))
        assert largest(matrix) <= bound <= 1.03 * largest(matrix)
    assert spectral.of_matrix(jnp.zeros((3, 4))) == 0


@pytest.mark.parametrize("stride", [1, 2])
def test_norms_of_convolutions_are_bounded(stride):
    """Of the whole matrix, whatever padding and size; nearly attained on large images."""
    rng = np.random.default_rng(stride)
    for taps, pads in [((3, 3), 1), ((2, 4), 0), ((1, 1), 0), ((5, 3), 2), ((4, 4), 1)]:
        kernel = jnp.asarray(rng.normal(size=(*taps, 2, 3)), jnp.float32)
        kernel = jnp.abs(kernel) if taps == (5, 3) else kernel

        def conv(x, kernel=kernel, pads=pads):
            dims = ("NHWC", "HWIO", "NHWC")
            pad = ((pads, pads),) * 2
            return lax.conv_general_dilated(x, kernel, (stride,) * 2, pad, dimension_numbers=dims)

        net = margins.network(conv, jnp.zeros((1, 14, 14, 2)))
        (affine,) = net.affine.values()
        bound = float(spectral.norm(affine, affine.parts[0], (1, 14, 14, 2)))
        basis = jnp.eye(14 * 14 * 2).reshape(-1, 1, 14, 14, 2)
        exact = largest(np.asarray(jax.vmap(conv)(basis)).reshape(len(basis), -1))
        assert exact <= bound <= 1.2 * exact


def highest_intercept(c, g, k, r):
    """The largest h of the paper, over its multiplier, in float64."""

    def below(logarithm):
        m = np.exp(logarithm)
        phi = np.minimum(np.minimum(c - g - m * k, g + m * k), 0)
        return 0.5 * (m * (r**2 - k @ k) + phi @ phi / m)

    return -optimize.minimize_scalar(below, bounds=(-12, 12), method="bounded").fun


gain = jax.jit(coupled.gain)


def gained(lower, upper, k, r, c, g):
    """CROWN's intercept, and the one with the ball, of one layer of at most 20 neurons."""
    chord = np.where(upper > lower, -upper * lower / (upper - lower), 0.0)
    rows = np.zeros((6, 20), np.float32)
    rows[:, : len(k)] = lower, upper, k, chord, c, g
    maps, (c32, g32) = jnp.asarray(rows[:4, None]), jnp.asarray(rows[4:, None, None])
    more = float(gain(maps, jnp.float32([r]), c32, g32)[0, 0])
    plain = np.minimum(c, 0) @ chord
    return plain, plain + more


def layer(rng, n, reach):
    """An unstable layer: a ball, and a box that need not contain it; CROWN's coefficients."""
    k, r = rng.normal(size=n), rng.choice([0.5, 1.0, 4.0])
    lower = np.minimum(k - reach * r * rng.uniform(0.05, 1, n), -0.01)
    upper = np.maximum(k + reach * r * rng.uniform(0.05, 1, n), 0.01)
    k = np.clip(k, lower, upper)
    c = rng.normal(size=n) * rng.choice([0.1, 1, 10])
    g = np.where(c > 0, c * rng.choice([0.0, 1.0, 0.3], size=n), c * upper / (upper - lower))
    return [np.float64(np.float32(t)) for t in (lower, upper, k, r, c, g)]


def test_no_point_of_ball_and_box_is_below_the_intercept():
    rng, raised = np.random.default_rng(1), 0
    for _ in range(300):
        n = rng.integers(1, 4)
        lower, upper, k, r, c, g = layer(rng, n, 1.5)
        plain, found = gained(lower, upper, k, r, c, g)
        step = rng.normal(size=(4000, n))
        step *= (rng.uniform(0, 1, (4000, 1)) ** 0.3) / np.linalg.norm(step, axis=1, keepdims=True)
        z = np.clip(k + r * step, lower, upper)  # The centre is in the box: still in the ball.
        rounded = 1e-6 * np.abs(c) @ (upper - lower)  # Of g, in the upper lines.
        assert np.min(np.maximum(z, 0) @ c - z @ g) >= found - rounded
        raised += found > plain + 1e-3 * np.abs(c).max()
    assert raised > 60


def test_the_intercept_is_at_least_the_papers():
    """Both are lower bounds; with a box the ball's own is the looser one."""
    rng = np.random.default_rng(2)
    for wide in (1.0, 30.0):
        for _ in range(100):
            lower, upper, k, r, c, g = layer(rng, 20, 1.0)
            if wide > 1:
                lower, upper = -np.full(20, wide), np.full(20, wide)
                g = np.where(c > 0, g, 0.5 * c)
            paper = highest_intercept(c, g, k, r)
            _, found = gained(lower, upper, k, r, c, g)
            slack = 0.02 * np.abs(paper) + 1e-3 * np.linalg.norm(c) * r
            assert found >= paper - slack
            if wide > 1:
                assert found <= paper + slack


def test_centres_outside_of_the_box_move_into_it():
    """As in a leaf of branch and bound, where a rectifier is 0 that is positive at the image."""
    held = coupled.Sphere(jnp.array([[1.0, -2.0, 0.5]]), jnp.array([3.0]))
    box = jnp.array([[-1.0, -1.0, -1.0]]), jnp.array([[-0.1, 1.0, 1.0]])
    operands, rectifiers = coupled.rectified(held, *box, jnp.array([[False, True, True]]))
    np.testing.assert_array_equal(rectifiers.center, [[0.0, 0.0, 0.5]])
    np.testing.assert_array_equal(rectifiers.moves, [[0.0, 1.0, 1.0]])
    np.testing.assert_array_equal(operands.center, [[0.0, -1.0, 0.5]])


def summed(w, x):
    return jnp.stack([3.0 - jnp.sum(jax.nn.relu(x @ w), axis=1), jnp.zeros(len(x))], axis=1)


def test_the_root_of_the_number_of_neurons_is_gained():
    """``sum max(x, 0)`` is at most ``r sqrt(n)`` around 0; CROWN has ``r (n + sqrt(n)) / 2``."""
    n, r = 64, 0.25
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(n, n)))[0]
    for w, loss in ((np.eye(n), 1.03), (turn, 1.12)):
        model = Model(summed, jnp.asarray(w, jnp.float32))
        how = {"norm": 2, "eps": r, "box": None}
        x, y = np.zeros((1, n), np.float32), np.zeros(1, int)
        low = float(certify.margin_bounds(model, x, y, method="sdp-crown", **how)[0, 1])
        assert 3 - loss * r * math.sqrt(n) <= low <= 3 - r * math.sqrt(n)


def dense(p, x):
    for w in p[:-1]:
        x = jax.nn.relu(x @ w + 0.1)
    return x @ p[-1]


def normalised(p, x):
    return dense(p, (x - 0.3) / 0.4)


def convolved(p, x):
    x = x[:, :25].reshape(-1, 5, 5, 1)
    kernel = p[0][:9, :3].reshape(3, 3, 1, 3)
    dims = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=dims)
    x = jax.nn.relu(x).reshape(len(x), -1)[:, :20]
    skip = x + jax.nn.relu(x @ p[1][:, :20])
    return jax.nn.relu(skip @ p[1][:, :20]) @ p[-1][:20]


def nets(rng, apply):
    sizes = [30, 24, 24, 24, 4]
    weights = [
        rng.normal(size=(a if i == 0 else max(a, 20), b)) * rng.choice([0.8, 1.6]) / math.sqrt(a)
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    ]
    if apply is convolved:
        weights[1] = rng.normal(size=(20, 24)) / 4
    return Model(apply, [jnp.asarray(w, jnp.float32) for w in weights])


def lowest(model, x, y, eps, scale):
    """``[n, K]``: the least margins that gradient steps on the sphere find."""

    @jax.jit
    def margins_at(x):
        out = model(x)
        return jnp.take_along_axis(out, jnp.asarray(y)[:, None], axis=1) - out

    found, eps = [], eps[:, None] * (1 - 1e-6)
    for rival in range(4):
        fall = jax.jit(jax.grad(lambda x, rival=rival: jnp.sum(margins_at(x)[:, rival])))
        point, least = x, margins_at(x)[:, rival]
        for size in np.geomspace(1, 0.02, 25):
            pull = np.asarray(fall(point)) * scale
            pull /= np.linalg.norm(pull, axis=1, keepdims=True) + 1e-30
            step = (point - x) / scale - size * eps * pull
            far = np.linalg.norm(step, axis=1, keepdims=True)
            step *= np.minimum(1, eps / np.maximum(far, 1e-30))
            point = np.clip(x + scale * step, 0, 1).astype(np.float32)
            least = np.minimum(least, margins_at(point)[:, rival])
        found.append(least)
    return np.stack(found, axis=1)


@pytest.mark.parametrize("apply", [dense, normalised, convolved])
def test_attacks_stay_above_bounds_that_the_ball_raises(apply):
    """600 balls, some of which scale entries; without the ball no bound is higher."""
    rng, raised, n = np.random.default_rng(3), 0, 50

    @jax.jit
    def both(model, x, eps, scale, y):
        with highest():
            place = region.ball(x, eps, 2, (0.0, 1.0), scale)
            state = margins.prepare(model, place, "sdp-crown")
            lines = {i: line._replace(around=None) for i, line in state.lines.items()}
            alone = dataclasses.replace(state, lines=lines)
            return [margins.of(s, model, place, y, "crown") for s in (state, alone)]

    for _ in range(4):
        model = nets(rng, apply)
        x = rng.uniform(size=(n, 30)).astype(np.float32)
        y = np.asarray(jnp.argmax(model(x), axis=1))
        eps = rng.choice([0.0, 0.05, 0.2, 0.5], size=n).astype(np.float32)
        scale = np.where(rng.random((n, 1)) < 0.3, rng.uniform(0.1, 1, (n, 30)), 1).astype(
            np.float32
        )
        own = y[:, None] == np.arange(4)
        low, alone = (np.asarray(t) for t in both(model, x, eps, scale, y))
        assert np.all(low >= alone), "in every bit: a ball that gains nothing costs nothing"
        raised += np.sum(low.min(1) > alone.min(1) + 1e-3)
        assert np.all(lowest(model, x, y, eps, scale) >= np.where(own, -np.inf, low))
    assert raised > 20


def test_other_norms_are_refused():
    model, x = Model(lambda w, x: jax.nn.relu(x @ w), jnp.eye(2)), jnp.array([[0.9, 0.1]])
    for norm in (1, math.inf):
        with pytest.raises(ValueError, match="needs norm 2"):
            certify.certified(model, x, jnp.zeros(1, int), norm=norm, eps=0.1, method="sdp-crown")


@pytest.mark.parametrize(
    ("weights", "eps", "before", "count"),
    [("mnist_fc_3layer", 0.4, 70, 73), ("mnist_6_100_nat", 0.3, 58, 67)],
)
def test_what_is_certified_of_published_nets_survives_attacks(shared, weights, eps, before, count):
    """``before``: what CROWN certified without the ball."""
    model = convert.load(shared / f"data/weights/{weights}.pth", "mlp").model
    images = np.load(shared / "data/mnist_test_0_500.npz")
    x, y = (images["x"][:100] / 255).astype(np.float32).reshape(100, -1), images["y"][:100]
    how = {"norm": 2, "eps": eps, "batch_size": 100, "method": "sdp-crown"}
    held = np.asarray(certify.certified(model, x, y, **how))
    assert held.sum() >= count - 1 > before
    found = run(attacks.DDN(steps=100), model, x, y, eps=eps)
    assert not np.any(held & ~np.asarray(found.correct))
    assert np.all(np.asarray(found.cost)[held & np.asarray(found.success)] > eps)
