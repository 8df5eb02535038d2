"""Ensembles: no weaker than their members, the same when interrupted, honest with random models."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_search import model, params, x, y

import wdjax
from wdjax import Lp, Model, attacks, data, ensembles, losses, norms
from wdjax.ensembles.autoattack import members
from wdjax.ensembles.rand import Expected, draws, majority
from wdjax.models import convert

fast = pytest.mark.fast
KEY = jax.random.key(3)
MEMBERS = {
    "apgd-ce": attacks.APGD(Lp(2), steps=1),
    "apgd-t": attacks.APGD(Lp(2), steps=3, targets=2),
    "fab-t": attacks.FAB(Lp(2), steps=3, targets=2, bounded=True),
    "square": attacks.Square(Lp(2), queries=15),
}
ask = functools.partial(ensembles.cascade, MEMBERS, model, x, y, eps=0.12, key=KEY)


@fast
def test_a_cascade_is_at_least_its_members():
    seen = {}
    whole = ask(report=lambda name, found: seen.update({name: found}) and None)
    assert list(seen) == list(MEMBERS)
    for number, (name, attack) in enumerate(MEMBERS.items()):
        alone = wdjax.search(attack, model, x, y, eps=0.12, key=jax.random.fold_in(KEY, number))
        # What stood was attacked exactly as it is alone.
        assert (np.asarray(whole.success) >= np.asarray(alone.success)).all()
        assert (np.asarray(seen[name].success) >= np.asarray(alone.success)).all()
    standing = [int((found.correct & ~found.success).sum()) for found in seen.values()]
    assert standing == sorted(standing, reverse=True)
    assert 0 < standing[-1] < standing[0] < int(whole.correct.sum())
    assert float(whole.cost.max()) <= 0.12 * (1 + 1e-6)
    wrong = np.argmax(model(whole.x_adv), -1) != np.asarray(y)
    np.testing.assert_array_equal(wrong, whole.success)
    fallen = np.asarray(seen["apgd-ce"].success & whole.correct)
    np.testing.assert_array_equal(whole.gradients[fallen], seen["apgd-ce"].gradients[fallen])
    # Only some, and early ends.
    some = np.arange(30) % 2 == 0
    part = ask(only=some)
    np.testing.assert_array_equal(part.success[some], whole.success[some])
    np.testing.assert_array_equal(part.x_adv[~some], x[~some])
    first = ask(report=lambda name, found: True)
    np.testing.assert_array_equal(first.gradients, seen["apgd-ce"].gradients)


def test_a_cascade_works_inside_jit():
    some = {name: MEMBERS[name] for name in ("apgd-ce", "square")}
    inside = jax.jit(lambda eps: ensembles.cascade(some, model, x, y, eps=eps, key=KEY).success)(
        0.12
    )
    outside = ensembles.cascade(some, model, x, y, eps=0.12, key=KEY)
    np.testing.assert_array_equal(inside, outside.success)


class KilledError(Exception):
    pass


@pytest.mark.parametrize("name", ["cascade", "a3"])
def test_killed_at_random_moments_and_resumed(name, tmp_path):
    """Ten kills anywhere change nothing, to the bit."""
    call = ask
    if name == "a3":
        call = functools.partial(
            ensembles.a3, model, x, y, eps=0.12, key=KEY, ball=Lp(2), passes=60
        )
    rounds = []
    whole = call(callback=lambda progress: rounds.append(1) and None)
    rng, kills, fuse = np.random.default_rng(0), 0, [0]

    def kill(progress):
        fuse[0] -= 1
        if fuse[0] == 0:
            raise KilledError

    for _ in range(11):
        fuse[0] = int(rng.integers(1, 2 + len(rounds) // 6)) if kills < 10 else 0
        try:
            found = call(checkpoint=tmp_path / name, callback=kill, every=1e9)
        except KilledError:
            kills += 1
            continue
        break
    assert kills >= 5
    chex.assert_trees_all_equal(found, whole)


@fast
def test_autoattacks_members():
    standard, plus = members(), members(version="plus")
    assert list(standard) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert list(plus) == ["apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"]
    assert plus["apgd-dlr"].restarts == plus["fab"].restarts == 5
    assert standard["apgd-t"].targets == standard["fab-t"].targets == 9
    assert standard["square"].queries == 5000
    with pytest.raises(ValueError, match="version"):
        members(version="best")


def test_autoattack_comes_home_from_afar_in_l2(shared):
    """Around the samples of this net gradients are masked: from inside eps most seem robust."""
    net = convert.load(shared / "data/weights/mnist_linf_robust.pth", "wong_mnist").model
    images, labels = data.load_npz(shared / "data/mnist_test_0_500.npz").take(20)
    ours = members(Lp(2))["apgd-ce"]
    left = []
    for attack in (ours, attacks.APGD(Lp(2), steps=ours.steps)):
        found = wdjax.search(attack, net, images, labels, eps=2.0, key=KEY)
        cost = np.asarray(norms.lp_norm(found.x_adv - images, 2))
        assert (cost <= 2.0 * (1 + 1e-6)).all(), "phases begin outside, points are inside"
        wrong = np.argmax(net(found.x_adv), -1) != labels
        np.testing.assert_array_equal(wrong, found.success)
        left.append(20 - int(found.success.sum()))
    assert left[0] <= 3
    assert left[1] >= 6
    assert members(Lp())["apgd-ce"] == attacks.APGD(Lp())


@fast
def test_bad_questions_are_refused():
    with pytest.raises(ValueError, match="empty"):
        ensembles.cascade({}, model, x, y, eps=0.1, key=KEY)
    with pytest.raises(ValueError, match=r"bounded=True"):
        ensembles.cascade({"fab": attacks.FAB()}, model, x, y, eps=0.1, key=KEY)
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: ensembles.a3(model, x, y, eps=0.1, key=KEY))(x)
    with pytest.raises(ValueError, match="nothing in it is random"):
        draws(model, KEY, 3)


def noisy(params, x):
    return jnp.tanh(x @ params["w"]) + params["size"] * jax.random.normal(params["key"], (3,))


@fast
def test_more_tries_never_raise_a_success_that_is_not_there():
    """Noise decides, points cannot matter: every try of one draw in three would be a success."""
    weights = {"w": jnp.zeros((6, 3)), "size": 1.0, "key": jax.random.key(9)}
    tilted = Model(lambda p, x: noisy(p, x) + jnp.array([0.6, 0.0, 0.0]), weights)
    labels = np.zeros(30, int)
    for restarts in (1, 3):
        found = ensembles.rand(
            tilted, x, labels, eps=0.1, key=KEY, count=3, judges=51, restarts=restarts, ball=Lp(2)
        )
        np.testing.assert_array_equal(found.success, ~found.correct)
        # The draws of the search are not those of the verdict.
        assert len(np.unique(np.asarray(found.margin))) == 1


@fast
def test_samples_that_the_seen_draws_lose_are_attacked():
    """Near 1/2 the few draws of a search misclassify what the judges do not."""
    weights = {"w": jnp.array([[1.0, -1.0], [-1.0, 1.0]]), "key": KEY}

    def shaken(p, x):
        return (x + 0.3 * jax.random.normal(p["key"], x.shape[1:])) @ p["w"]

    gap = np.linspace(0.02, 0.12, 20)
    near = jnp.asarray(np.stack([0.5 + gap / 2, 0.5 - gap / 2], axis=1), jnp.float32)
    labels = np.zeros(20, int)
    key = jax.random.key(1)
    seen = draws(Model(shaken, weights), jax.random.split(key, 4)[0], 20)
    lost = np.asarray(majority(seen(near), labels) > 0)
    found = ensembles.rand(Model(shaken, weights), near, labels, eps=0.4, key=key)
    # At the ball's corner a draw is right with a probability of at most .06.
    assert lost.any()
    assert found.correct.sum() > 10
    assert found.success.all()
    with pytest.raises(ValueError, match="does not take criterion"):
        ensembles.rand(
            Model(shaken, weights), near, labels, eps=0.4, key=KEY, criterion=losses.margin
        )


@fast
def test_what_bfloat16_does_not_flip_is_attacked_in_float32():
    """Distances of flips that bfloat16 cannot tell from 0."""
    gap = np.linspace(0.0004, 0.02, 40)
    near = jnp.asarray(np.stack([0.7 + gap / 2, 0.7 - gap / 2], axis=1), jnp.float32)
    plain = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    found, lost = ensembles.mixed(attacks.DeepFool(), plain, near, np.zeros(40, int))
    assert found.success.all()
    assert not lost.all()
    assert np.all((found.cost > 0.99 * gap / 2) & (found.cost < 1.3 * gap / 2))
    assert np.isinf(found.radius).all()


@fast
def test_draws_are_independent_and_expectations_are_means():
    bank = draws(Model(noisy, {"w": params["w1"][:, :3], "size": 1.0, "key": KEY}), KEY, 400)
    out = bank(x)
    assert out.shape == (30, 400, 3)
    noise = np.asarray(out - jnp.tanh(x @ params["w1"][:, :3])[:, None])
    np.testing.assert_allclose(noise.mean(axis=1), 0, atol=0.2)
    np.testing.assert_allclose(noise.std(axis=1), 1, atol=0.15)
    each = np.stack([losses.margin(out[:, i], y) for i in range(400)])
    np.testing.assert_allclose(Expected(losses.margin)(out, y), each.mean(0), rtol=1e-4)
    decisions = np.argmax(out[:, :51], -1) != np.asarray(y)[:, None]
    np.testing.assert_array_equal(majority(out[:, :51], y) > 0, decisions.mean(1) > 0.5)
