"""Games with points that were computed before: by AutoAttack, Carlini and Wagner, or elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
import wdjax.transductive as games
from wdjax import Lp, Model, attacks, ensembles, parallel

EPS, KEY = 0.1, jax.random.key(0)
WEIGHTS = np.array([[1.0, -1.0], [0.5, -0.5], [-0.25, 0.25]], np.float32)
"""Of a linear model of two classes: a sample's distance to the boundary is known."""


@pytest.fixture(scope="module")
def inputs():
    x = np.random.default_rng(0).uniform(0.3, 0.7, (8, 3)).astype(np.float32)
    middle = np.median(x @ WEIGHTS[:, 0])
    model = Model(lambda w, x: x @ w - jnp.array([middle, -middle]), jnp.asarray(WEIGHTS))
    return games.Fixed(model), x, np.asarray(model(x)).argmax(1), np.abs(x @ WEIGHTS[:, 0] - middle)


def played(inputs, attack, eps=EPS, **how):
    defense, x, y, _ = inputs
    return games.play(defense, attack, x, y, memory=(), eps=eps, key=KEY, draws=1, **how)


@pytest.mark.parametrize("name", ["autoattack", "cw"])
def test_searches_break_what_lies_within_their_radius(inputs, name):
    """The model is linear, so that the distance of every sample is a norm of its weights away."""
    found = {
        "autoattack": (games.transfer(ensembles.autoattack), 1, np.inf),
        "cw": (games.transfer(attacks.CarliniWagner(Lp(2))), 2, 2),
    }
    attack, dual, norm = found[name]
    far = inputs[3] / np.linalg.norm(WEIGHTS[:, 0], dual)
    eps = float(np.mean(np.sort(far)[3:5]))
    report = played(inputs, attack, eps=eps)
    assert report.correct[0].tolist() == (far > eps).tolist()
    moved = np.linalg.norm(report.x_adv - inputs[1], norm, axis=1)
    assert np.all(moved[far > eps] == 0), "what survives is submitted as it is"
    assert np.all(moved <= eps * 1.000001)


def test_points_belong_to_their_inputs_in_any_order(inputs):
    """Also where the attacker sorts inputs by label, and in rounds."""
    _, x, y, _ = inputs
    points = np.clip(x + np.linspace(-EPS, EPS, 24).reshape(8, 3), 0, 1).astype(np.float32)
    pooled = {"size": 2, "order": "labels", "pool": 8}
    for how in ({}, pooled, pooled | {"mesh": parallel.data_mesh(jax.devices()[:2])}):
        report = played(inputs, games.given(points), **how)
        np.testing.assert_array_equal(report.x_adv, points[report.index])
        right = np.asarray(inputs[0].model(points)).argmax(1) == y
        np.testing.assert_array_equal(report.correct[0], right[report.index])


def test_functions_may_return_points(inputs):
    attack = games.transfer(lambda model, x, y, *, eps, key, ball: jnp.clip(x + eps, *ball.box))
    report = played(inputs, attack)
    np.testing.assert_allclose(report.x_adv, inputs[1] + EPS, rtol=1e-6)


def test_bad_points_are_refused(inputs):
    x = inputs[1]
    with pytest.raises(ValueError, match="outside of their ball"):
        played(inputs, games.given(np.clip(x + 2 * EPS, 0, 1)))
    with pytest.raises(
        ValueError, match=r"points must have the shape of x, \[8, 3\], got \[7, 3\]"
    ):
        played(inputs, games.given(x[:7]))
    for search in ("pgd", attacks.PGD):
        with pytest.raises(ValueError, match="inner must be an attack or a function"):
            games.transfer(search)
    with pytest.raises(ValueError, match="ball is for functions"):
        games.transfer(attacks.CarliniWagner(), Lp(2))


def test_a_search_that_met_nan_is_no_result(inputs):
    """Its samples would be submitted as they are, and count as robust."""
    spoilt = Model(lambda w, x: jnp.sqrt(0.0 * (x @ w)) + x @ w, jnp.asarray(WEIGHTS))

    def search(model, x, y, *, eps, key, ball):
        return wdjax.search(attacks.PGD(ball, steps=1), spoilt, x, y, eps=eps, diagnose=False)

    with pytest.raises(ValueError, match=r"not finite at \d samples"):
        played(inputs, games.transfer(search))


def test_a_game_with_other_points_is_another_game(inputs, tmp_path):
    x = inputs[1]
    played(inputs, games.given(x), checkpoint=tmp_path / "game")
    with pytest.raises(ValueError, match="belongs to"):
        played(inputs, games.given(x + EPS / 2), checkpoint=tmp_path / "game")
