"""Searches in which some coordinates are held fixed: every attack, no point outside of the mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_contract import ATTACKS, EPS, NORMS, key, make, model, norms_of, x, y

import wdjax
from wdjax import Lp, attacks, ensembles

PATCH = np.zeros((2, 3, 1), bool)
PATCH[:, 1:] = True
RAGGED = np.arange(12).reshape(2, 3, 2) % 5 != 2
CASES = [(name, norms_of(name)[i % len(norms_of(name))]) for i, name in enumerate(ATTACKS)]
assert {norm for _, norm in CASES} >= set(NORMS)


@pytest.mark.parametrize(("name", "norm"), CASES, ids=[f"{a}, l{b}" for a, b in CASES])
def test_no_attack_moves_what_is_held(name, norm):
    attack = make(name, norm)
    mask = RAGGED if CASES.index((name, norm)) % 2 else PATCH
    eps = 2 * EPS[norm]
    found = wdjax.search(attack, model, x, y, eps=eps, key=key, mask=mask, diagnose=False)
    held = ~np.broadcast_to(mask, x.shape[1:])
    np.testing.assert_array_equal(np.asarray(found.x_adv)[:, held], np.asarray(x)[:, held])
    assert found.success[np.asarray(found.correct)].any()
    wrong = np.argmax(model(found.x_adv), -1) != np.asarray(y)
    np.testing.assert_array_equal(found.success, wrong)
    np.testing.assert_allclose(found.cost, attack.ball.cost(x, found.x_adv), atol=1e-6)
    if attack.budget == "sample":
        assert (np.asarray(found.cost) <= eps * (1 + 1e-4)).all()


def linear(seed=0, classes=3, shape=(2, 3, 2)):
    keys = jax.random.split(jax.random.key(seed), 2)
    weights = jax.random.normal(keys[0], (12, classes))
    net = wdjax.Model(lambda w, x: x.reshape(len(x), -1) @ w, weights)
    points = jax.random.uniform(keys[1], (10, *shape))
    return net, points, jnp.argmax(net(points), axis=-1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mask", [PATCH, RAGGED], ids=["patch", "ragged"])
def test_distances_are_those_of_the_free_coordinates(norm, mask):
    """In closed form: of the hyperplanes between classes, restricted to these coordinates."""
    net, points, labels = linear()
    free = np.broadcast_to(mask, points.shape[1:]).reshape(-1)
    weights, logits = np.asarray(net.args[0], float)[free], np.asarray(net(points), float)
    true = np.full(len(labels), np.inf)
    for i, label in enumerate(np.asarray(labels)):
        for rival in set(range(3)) - {int(label)}:
            gap = logits[i, label] - logits[i, rival]
            steep = np.linalg.norm(
                weights[:, rival] - weights[:, label], {1: np.inf, 2: 2, np.inf: 1}[norm]
            )
            true[i] = min(true[i], gap / steep)
    attack = attacks.Walk(Lp(norm, None), steps=40)
    found = wdjax.search(attack, net, points, labels, eps=float(true.max()), mask=mask)
    assert found.success.all()
    np.testing.assert_allclose(found.cost, true, rtol=0.02)


def test_a_patch_is_an_image_of_its_own():
    """The same search as of a model that was written for the patch, squares and all."""
    rest = x[0]
    whole = jnp.broadcast_to(rest, x.shape).at[:, :, 1:].set(x[:, :, 1:])
    labels = jnp.argmax(model(whole), -1)
    small = wdjax.Model(
        lambda p, z: model(jnp.broadcast_to(rest, (len(z), 2, 3, 2)).at[:, :, 1:].set(z)), 0.0
    )
    attack = attacks.Square(Lp(), queries=30)
    how = dict(eps=0.15, key=key, diagnose=False)
    one = wdjax.search(attack, model, whole, labels, mask=PATCH, **how)
    two = wdjax.search(attack, small, whole[:, :, 1:], labels, **how)
    assert 0 < one.success.sum() < len(x)
    np.testing.assert_array_equal(one.success, two.success)
    np.testing.assert_allclose(one.x_adv[:, :, 1:], two.x_adv, atol=1e-6)


def test_a_mask_in_batches_in_a_trace_and_from_a_checkpoint(tmp_path):
    attack, how = attacks.APGD(Lp(2), steps=6), dict(eps=0.4, key=key, mask=RAGGED, diagnose=False)
    found = wdjax.search(attack, model, x, y, **how)
    batches = wdjax.search(attack, model, x, y, batch_size=5, **how)
    traced = jax.jit(lambda x: wdjax.search(attack, model, x, y, **how))(x)
    for other in (batches, traced):
        np.testing.assert_array_equal(found.success, other.success)
        np.testing.assert_allclose(found.x_adv, other.x_adv, atol=2e-5)
    again = dict(how, checkpoint=tmp_path / "search", every=0)
    wdjax.search(attack, model, x, y, callback=lambda _: True, **again)
    np.testing.assert_array_equal(wdjax.search(attack, model, x, y, **again).x_adv, found.x_adv)
    with pytest.raises(ValueError, match="other settings"):
        wdjax.search(attack, model, x, y, **dict(again, mask=np.roll(RAGGED, 1)))


def test_a_mask_of_a_pytree():
    halves = {"a": x[:, :1], "b": x[:, 1:]}
    joint = wdjax.Model(lambda p, x: model(jnp.concatenate([x["a"], x["b"]], axis=1)), 0.0)
    mask = {"a": np.ones((1, 3, 2), bool), "b": np.zeros((1, 3, 2), bool)}
    found = wdjax.search(attacks.PGD(), joint, halves, y, eps=0.3, mask=mask)
    assert found.success.any()
    np.testing.assert_array_equal(found.x_adv["b"], halves["b"])
    assert np.any(np.asarray(found.x_adv["a"]) != np.asarray(halves["a"]))


ENSEMBLES = {
    "autoattack": lambda: ensembles.autoattack(model, x, y, eps=0.1, key=key, mask=PATCH),
    "fast": lambda: ensembles.fast(model, x, y, eps=0.1, key=key, passes=60, mask=PATCH).found,
    "wda_star": lambda: ensembles.wda_star(model, x, y, key=key, passes=130, mask=PATCH),
    "bisect": lambda: ensembles.bisect(attacks.MarginPGD(), model, x, y, eps=0.1, mask=PATCH),
}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_ensembles_keep_to_the_mask(name):
    found = ENSEMBLES[name]()
    assert found.success[np.asarray(found.correct)].any()
    np.testing.assert_array_equal(found.x_adv[:, :, 0], x[:, :, 0])


def test_a_second_look_keeps_to_the_mask():
    """Flips outside of the mask are not overlooked ones."""
    edge = wdjax.Model(
        lambda w, x: jnp.stack([w + 0.5 - jnp.round(x[:, 0, 0, 0]), 0 * w + 0 * x[:, 0, 0, 0]], 1),
        0.0,
    )
    inputs = 0.8 * x
    label = jnp.argmax(edge(inputs), -1)
    with pytest.warns(UserWarning, match="zero"):
        found = wdjax.search(attacks.PGD(), edge, inputs, label, eps=0.9, mask=PATCH)
    assert found.overlooked is None or not np.any(found.overlooked)
    with pytest.warns(UserWarning, match="zero"):
        found = wdjax.search(attacks.PGD(), edge, inputs, label, eps=0.9, mask=~PATCH)
    assert np.any(found.overlooked)


def test_changes_in_norm_0_under_a_mask():
    ball = Lp(0, pixels=True)
    found = wdjax.search(attacks.SigmaZero(ball, steps=60), model, x, y, mask=PATCH)
    assert found.success[np.asarray(found.correct)].any()
    changed = np.asarray(found.x_adv != x).any(-1)
    assert not changed[:, :, 0].any()
    np.testing.assert_array_equal(found.cost, changed.reshape(len(x), -1).sum(1))


def test_given_points_are_cut_to_the_mask():
    found = wdjax.search(attacks.Points(), model, x, y, eps=1.0, start=1 - x, mask=PATCH)
    moved = np.asarray(found.cost) > 0
    assert moved.any()
    np.testing.assert_allclose(found.x_adv[moved][:, :, 1:], 1 - x[moved][:, :, 1:], rtol=1e-6)
    np.testing.assert_array_equal(found.x_adv[:, :, 0], x[:, :, 0])


BAD = {
    "nothing": dict(mask=np.zeros((2, 3, 2), bool), match="allows no coordinate"),
    "numbers": dict(mask=np.ones((2, 3, 2)), match="must be booleans.*float64"),
    "of samples": dict(mask=np.ones((24, 2, 3, 2), bool), match="broadcast to a sample"),
    "another shape": dict(mask=np.ones((3, 3, 2), bool), match="broadcast to a sample"),
    "half a pixel": dict(
        mask=RAGGED, attack=attacks.SigmaZero(Lp(0, pixels=True)), match="whole pixels"
    ),
    "another ball": dict(
        mask=PATCH, attack=wdjax.image.FrankWolfe(wdjax.image.ImageWasserstein(window=3)),
        match="needs the ball wdjax.Lp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_masks_are_refused(case):
    attack = case.get("attack", attacks.PGD())
    with pytest.raises(ValueError, match=case["match"]):
        wdjax.search(attack, model, x, y, eps=0.1, mask=case["mask"])


def test_a_traced_mask_is_refused():
    with pytest.raises(ValueError, match="known before the trace"):
        jax.jit(lambda m: wdjax.search(attacks.PGD(), model, x, y, eps=0.1, mask=m).cost)(PATCH)
