"""The growth-profile bound against moved data, closed forms and arguments that are wrong."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import Model, certify, losses
from wdjax.certify import asymptote

pytestmark = pytest.mark.fast


def rectified(params, x):
    first, bias, second = params
    return jax.nn.relu(x @ first + bias) @ second


def classifier(seed):
    rng = np.random.default_rng(seed)
    shapes = (4, 8), (8,), (8, 3)
    return Model(rectified, [jnp.array(rng.normal(size=s), jnp.float32) for s in shapes])


@pytest.mark.parametrize("loss", [losses.cross_entropy, losses.margin])
def test_no_moved_data_lose_more(loss):
    """Samples go where their loss is large, one alone or all, as far as the budget allows."""
    model, rng = classifier(0), np.random.default_rng(1)
    x = rng.uniform(size=(6, 4)).astype(np.float32)
    y = np.asarray(model(jnp.array(x)).argmax(axis=-1)).copy()
    y[0] = (y[0] + 1) % 3
    far = rng.choice([0.0, 1.0, 0.5], size=(3000, 4)).astype(np.float32)
    share = np.geomspace(0.01, 1, 12)[:, None, None]
    eps = np.array([0.0, 0.02, 0.1, 0.5])
    values, costs = [], []
    for xi, yi in zip(x, y):
        points = (xi + share * (far - xi)).astype(np.float32).reshape(-1, 4)
        values.append(np.asarray(loss(model(jnp.array(points)), np.full(len(points), yi)), float))
        costs.append(np.abs(points.astype(float) - xi).max(axis=1))
    clean = np.asarray(loss(model(jnp.array(x)), y), float)
    for order in (1, 2):
        how = {"norm": math.inf, "order": order, "loss": loss}
        grown = certify.growth_bound(model, x, y, eps=eps, **how)
        assert np.all(grown <= certify.wdro_bound(model, x, y, eps=eps, **how) + 1e-6)
        np.testing.assert_allclose(grown[0], clean.mean(), rtol=1e-3, atol=1e-3)
        assert np.all(np.diff(grown) > 0)
        for budget, bound in zip(eps, grown):
            rises = [
                np.max(np.where(cost <= reach, value, base) - base)
                for reach in (budget * 6 ** (1 / order), budget)
                for value, cost, base in zip(values, costs, clean)
            ]
            alone, together = max(rises[:6]) / 6, sum(rises[6:]) / 6
            assert clean.mean() + max(alone, together) <= bound + 1e-5
    # On a box the loss is bounded, which a constant does not see.
    far = certify.growth_bound(model, x, y, eps=1e3, **how)
    assert np.mean([np.max(value) for value in values]) - 1e-5 <= far
    assert far < certify.wdro_bound(model, x, y, eps=1e2, **how)


def test_profiles_need_no_constant():
    model, x, y = classifier(2), jnp.full((6, 4), 0.5), jnp.array([0, 1] * 3)
    how = {"norm": math.inf, "eps": [0.05, 0.2], "order": 1, "loss": losses.margin}
    radii = np.geomspace(1e-3, 2, 12)
    with_it = certify.growth_bound(model, x, y, radii=radii, **how)
    without = certify.growth_bound(model, x, y, radii=radii, constant=math.inf, **how)
    assert np.all((with_it <= without + 1e-9) & np.isfinite(without))


# (WDRO - E_N) / eps of the margin loss at these budgets in l1 over all of space, on the first five
# samples of a fixture: exact linear programs. Others are in bench/certificates.py.
BUDGETS = np.array([0.001, 0.1, 1, 5, 50])
SLOPES = np.array([1.1082, 1.1082, 1.1082, 0.9147, 0.8439])


def test_it_lies_between_the_exact_programs_and_the_constant(shared):
    net = dict(np.load(shared / "fixtures/relu/b_n2_h16_K3.npz"))
    params = [net["W1"].T, net["b1"], net["W2"].T]
    model = Model(rectified, [jnp.array(p, jnp.float32) for p in params])
    shift = jnp.array(net["b2"], jnp.float32)
    model = Model(lambda both, x: both[0](x) + both[1], (model, shift))
    x, y = jnp.array(net["X"][:5], jnp.float32), jnp.array(net["y"][:5])
    clean = float(np.mean(losses.margin(model(x), y)))
    how = {"norm": 1, "order": 1, "loss": losses.margin, "box": None, "eps": BUDGETS}
    straight = certify.wdro_bound(model, x, y, **how)
    grown = certify.growth_bound(model, x, y, radii=np.geomspace(1e-4, 1e3, 40), **how)
    exact = clean + BUDGETS * SLOPES
    assert np.all((exact - 6e-5 * BUDGETS <= grown) & (grown <= straight + 1e-6))
    assert np.median((straight - grown) / (straight - exact)) > 0.5


def test_slopes_at_infinity_are_those_of_far_points():
    rng, x, labels = np.random.default_rng(3), jnp.full((2, 4), 0.5), jnp.arange(3)
    model = classifier(3)
    steep = np.asarray(asymptote.slopes(model, x, labels, jnp.array(50.0), 1, "auto"))
    step = rng.normal(size=(4000, 4)) * (rng.random((4000, 4)) < 0.5)
    step /= np.maximum(np.abs(step).sum(axis=1, keepdims=True), 1e-9)
    for distance in (50.0, 1e3, 1e5):
        out = np.asarray(model(jnp.array(x[:1] + distance * step, jnp.float32)), float)
        for label in range(3):
            rise = np.max(np.delete(out, label, axis=1) - out[:, [label]]) / distance
            assert rise <= steep[label] * (1 + 1e-6)
            assert rise >= 0.3 * steep[label]
    smooth = Model(lambda w, x: jnp.tanh(x @ w), jnp.ones((4, 3)))
    assert np.all(np.isinf(asymptote.slopes(smooth, x, labels, jnp.array(50.0), 1, "auto")))


def test_a_literal_has_the_slopes_of_a_row_of_it():
    x, labels, last = jnp.full((2, 4), 0.5), jnp.arange(3), jnp.array(50.0)
    rng = np.random.default_rng(3)
    first, second = (jnp.array(rng.normal(size=s), jnp.float32) for s in ((4, 8), (8, 3)))
    literal = Model(lambda w, x: jnp.maximum(x @ w[0], 0.7) @ w[1], (first, second))
    bends = jnp.full(8, 0.7)
    row = Model(lambda w, x: jnp.maximum(x @ w[0], w[2]) @ w[1], (first, second, bends))
    steep, same = (asymptote.slopes(m, x, labels, last, 2, "auto") for m in (literal, row))
    np.testing.assert_allclose(steep, same, rtol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"loss": losses.dlr}, "'dlr'"),
        ({"order": 0.5}, "order"),
        ({"eps": -1.0}, "eps"),
        ({"constant": -1.0}, "constant"),
        ({"radii": [0.2, 0.1]}, "increasing"),
        ({"radii": [0.2, math.inf]}, "finite"),
    ],
)
def test_bad_arguments_are_refused(wrong, said):
    how = {"norm": 2, "eps": 0.1, "order": 1, "constant": 1.0, **wrong}
    with pytest.raises(ValueError, match=said):
        certify.growth_bound(classifier(0), jnp.full((2, 4), 0.5), jnp.array([0, 1]), **how)
