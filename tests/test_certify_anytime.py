"""`certify.verify(method="auto", seconds=)` against grids, single methods, attacks and kills."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import Lp, Model, attacks, certify, image, losses, search
from wdjax.bounds.region import Domain
from wdjax.certify import anytime


def layered(layers, x):
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def net(seed, sizes=(2, 8, 8, 3)):
    rng = np.random.default_rng(seed)
    layers = []
    for rows, columns in itertools.pairwise(sizes):
        weight = rng.normal(size=(rows, columns)) * 2 / math.sqrt(rows)
        layers.append((jnp.array(weight, jnp.float32), jnp.array(rng.normal(size=columns) / 4)))
    return Model(layered, layers)


def samples(model, n=40, size=2, wrong=3):
    """Points and the model's own labels, of which the first ``wrong`` are changed."""
    x = np.random.default_rng(5).uniform(0.1, 0.9, size=(n, size)).astype(np.float32)
    y = np.array(model(jnp.array(x)).argmax(axis=-1))
    y[:wrong] = (y[:wrong] + 1) % 3
    return x, y


@pytest.mark.parametrize("norm", [math.inf, 2, 1])
def test_everything_is_decided_and_the_rung_is_named(norm):
    model = net(0)
    x, y = samples(model)
    eps = 0.12
    how = {"norm": norm, "eps": eps, "steps": 0}
    found = certify.verify(model, x, y, method="auto", seconds=60.0, **how)
    crown = certify.verify(model, x, y, method="crown", **how)
    alone = certify.verify(model, x, y, method="bab", seconds=10.0, **how)
    assert np.all(found.verified | found.falsified)
    assert not np.any(found.verified & found.falsified)
    assert np.all(found.verified >= crown.verified)
    np.testing.assert_array_equal(found.verified, alone.verified)
    assert "" not in found.decided
    assert {"interval", "attack"} <= set(found.decided)
    assert norm != math.inf or "crown" in found.decided
    assert set(np.array(found.decided)[found.falsified]) <= {"attack", "bab"}
    # What is falsified is so: the point lies in ball and box, and another class wins there.
    point = np.asarray(found.counterexamples)
    far = np.linalg.norm(np.float64(point) - x, norm, axis=1)
    assert np.all(far <= eps * (1 + 1e-6))
    assert np.all((point >= 0) & (point <= 1))
    wins = np.asarray(model(jnp.array(point)).argmax(axis=-1))
    np.testing.assert_array_equal(wins != y, found.falsified)
    attack = attacks.PGD(Lp(norm), steps=50, restarts=3, loss=losses.margin)
    flipped = search(attack, model, x, y, eps=eps, key=jax.random.key(0), diagnose=False).success
    assert not np.any(np.asarray(flipped) & found.verified)


def test_a_moment_is_enough_for_crown():
    model = net(1, (6, 30, 30, 3))
    x, y = samples(model, size=6)
    how = {"norm": math.inf, "eps": 0.05, "steps": 0}
    short = certify.verify(model, x, y, method="auto", seconds=1e-6, batch_size=16, **how)
    crown = certify.verify(model, x, y, method="crown", **how)
    np.testing.assert_array_equal(short.verified, crown.verified)
    open_ = ~short.verified
    assert {short.decided[i] for i in np.flatnonzero(open_)} == {""}
    assert {short.ended[i] for i in np.flatnonzero(open_)} == {"time"}
    assert set(np.array(short.decided)[~open_]) <= {"interval", "crown"}
    assert 0 < open_.sum() < len(x)
    np.testing.assert_array_equal(short.falsified, ~short.correct)
    wide = certify.verify(model, x, y, method="auto", **how)
    assert wide.decided == ()


def test_radii_are_searched_besides():
    model = net(0)
    x, y = samples(model, n=12)
    how = {"norm": math.inf, "eps": 0.1}
    found = certify.verify(model, x, y, method="auto", seconds=30.0, steps=4, **how)
    plain = certify.verify(model, x, y, method="auto", steps=4, **how)
    assert np.all(found.radius >= plain.radius)
    np.testing.assert_array_equal(found.radius >= np.float32(0.1), found.verified)


@pytest.mark.parametrize("after", [1, 3, 5])
def test_it_goes_on_where_it_was_killed(tmp_path, after):
    model = net(0)
    x, y = samples(model)
    how = {"norm": math.inf, "eps": 0.12, "steps": 2, "seconds": 60.0, "batch_size": 16}
    whole = certify.verify(model, x, y, method="auto", **how)
    place = {"checkpoint": tmp_path / "work", "every": 0.0}
    heard = []

    def stop(progress):
        heard.append(progress)
        if len(heard) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        certify.verify(model, x, y, method="auto", callback=stop, **how, **place)
    again = certify.verify(model, x, y, method="auto", **how, **place)
    np.testing.assert_array_equal(again.verified, whole.verified)
    np.testing.assert_array_equal(again.falsified, whole.falsified)
    np.testing.assert_array_equal(again.radius, whole.radius)
    assert again.decided == whole.decided
    with pytest.raises(ValueError, match="something else"):
        certify.verify(model, x, y, method="auto", **how | {"seconds": None}, **place)


def test_rungs_follow_the_ball():
    model = Model(lambda w, x: x.reshape(len(x), -1) @ w, jnp.ones((16, 3)) * jnp.arange(3.0))
    x = jnp.full((2, 4, 4, 1), 0.5)
    y = jnp.array([2, 2])
    ball = image.ImageWasserstein(window=None)
    found = certify.verify(model, x, y, norm=ball, eps=0.01, method="auto", seconds=5.0, steps=0)
    assert set(found.decided) <= set(rungs(ball))
    assert "sdp-crown" not in rungs(ball)
    assert "sdp-crown" in rungs(2)


def rungs(norm):
    empty = (None,) * 5
    return anytime.Climb(*empty, Domain(norm, (0.0, 1.0)), 1, 1.0, None).rungs


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_time_is_above_0(seconds):
    model = net(0)
    x, y = samples(model, n=2, wrong=0)
    with pytest.raises(ValueError, match="seconds must be a number above 0"):
        certify.verify(model, x, y, norm=math.inf, eps=0.1, method="auto", seconds=seconds)
