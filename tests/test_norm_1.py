"""Flips in norm 1: `SLP`, which shortens them, and the schedules of `wda_star`, against HiGHS."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import wdjax
from wdjax import Lp, attacks, ensembles
from wdjax.engine.diagnosis import RobustnessWarning


def linear(n, size):
    """A linear model of two classes, samples of the box, and what it says of them."""
    keys = jax.random.split(jax.random.key(3))
    model = wdjax.Model(lambda w, x: x @ w, 3 * jax.random.normal(keys[0], (size, 2)))
    x = jax.random.uniform(keys[1], (n, size))
    return model, x, jnp.argmax(model(x), axis=-1)


@pytest.mark.parametrize("norm", [1, 2, np.inf])
def test_slp_finds_the_nearest_flips_of_a_linear_model_in_the_box(norm):
    """HiGHS is the oracle in norms 1 and inf, SLSQP in norm 2."""
    model, x, y = linear(n=12, size=9)
    start = wdjax.search(attacks.Walk(Lp(norm), far=True), model, x, y, key=jax.random.key(0))
    found = wdjax.search(attacks.SLP(Lp(norm), steps=3), model, x, y, start=start.x_adv)
    assert found.success.all()
    normals = np.asarray(model.args[0], float) @ np.array([1.0, -1.0])
    for i, label in enumerate(np.asarray(y)):
        normal, home = normals * (1 - 2 * label), np.asarray(x[i], float)
        least = _linear_program(normal, home, norm) if norm != 2 else _projected(normal, home)
        assert least * (1 - 1e-5) <= found.cost[i] <= least * 1.002 + 1e-6


def _linear_program(normal, home, norm):
    """``min ||u - home||`` over the box where ``<normal, u> <= 0``."""
    n = len(home)
    eye, tops = np.eye(n), -np.eye(n) if norm == 1 else -np.ones((n, 1))
    above = np.block([[eye, tops], [-eye, tops], [normal, np.zeros(tops.shape[1])]])
    limits = np.concatenate([home, -home, [0.0]])
    bounds = [(0, 1)] * n + [(0, None)] * tops.shape[1]
    prices = np.concatenate([np.zeros(n), np.ones(tops.shape[1])])
    return optimize.linprog(prices, above, limits, bounds=bounds, method="highs").fun


def _projected(normal, home):
    side = {"type": "ineq", "fun": lambda u: -normal @ u}
    done = optimize.minimize(
        lambda u: np.sum((u - home) ** 2), home, bounds=[(0, 1)] * len(home), constraints=side,
        method="SLSQP", options={"ftol": 1e-14},
    )  # fmt: skip
    return np.sqrt(done.fun)


@pytest.mark.parametrize("passes", [70, 100, 160, 200, 400])
def test_wda_star_in_norm_1_is_exact_for_a_linear_model(passes):
    """Walks alone end 1 to 3 % too far; HiGHS tells."""
    model, x, y = linear(n=12, size=60)
    found = ensembles.wda_star(model, x, y, key=jax.random.key(0), ball=Lp(1), passes=passes)
    normals = np.asarray(model.args[0], float) @ np.array([1.0, -1.0])
    least = [_linear_program(normals * (1 - 2 * b), np.asarray(a, float), 1) for a, b in zip(x, y)]
    np.testing.assert_array_less(np.asarray(found.cost), 1.002 * np.array(least) + 1e-6)


@pytest.mark.parametrize("passes", [21, 40, 69])
def test_few_passes_in_norm_1_flip_what_walks_from_the_samples_do_not(passes):
    """At samples that are no trials the model is flat, at random points not."""

    def apply(share, x):
        seen = jnp.where(jnp.max(x, axis=1) > 0.6, x[:, 0], 0.5)
        return jnp.stack([jnp.full(len(x), 0.8), share * seen], axis=1)

    for share in (1.0, 0.0):
        net = wdjax.Model(apply, jnp.float32(share))
        level = jnp.linspace(0.65, 0.75, 40).at[1:6].set(0.4)
        x = jnp.tile(level[:, None], 30)
        found = ensembles.wda_star(
            net, x, jnp.zeros(40, int), key=jax.random.key(0), ball=Lp(1), passes=passes
        )
        assert float(found.passes.mean()) <= passes + 3
        flips = np.asarray(found.success)
        assert flips.all() if share else not flips.any()


def test_slp_keeps_flips_that_it_cannot_shorten():
    """A boundary that turns about the nearest flip; a flat model; a start that is none."""
    ring = wdjax.Model(lambda p, x: jnp.stack([0 * x[:, 0], jnp.sum(x**2, 1) - 1], 1), None)
    x, y = jnp.array([[0.2, 0.1], [0.5, 0.5]]), jnp.zeros(2, int)
    start = x / jnp.linalg.norm(x, axis=1, keepdims=True) * 1.01
    found = wdjax.search(attacks.SLP(Lp(2)), ring, x, y, start=start)
    np.testing.assert_allclose(found.cost, 1 - jnp.linalg.norm(x, axis=1), rtol=2e-3)
    flat = wdjax.Model(lambda p, x: jnp.sign(x - 0.55), None)
    start = jnp.array([[0.2, 0.9], [0.5, 0.6]])
    for begin, success in ((start, [True, True]), (None, [False, False])):
        with pytest.warns(RobustnessWarning):
            found = wdjax.search(attacks.SLP(Lp(1)), flat, x, y, start=begin)
        assert found.success.tolist() == success
    assert bool(jnp.isfinite(found.x_adv).all())
