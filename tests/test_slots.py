"""Samples pass through slots: nothing is lost, nothing is computed twice, cycles end early."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import slots
from wdjax.core import Attack, Info, Stage

N = 23


def model_of(table):
    """Every sample is its own index in one pixel; its logits are rows of a table."""
    return wdjax.Model(lambda rows, x: rows[jnp.round(x[:, 0] * N).astype(int)], table)


x = jnp.arange(N, dtype=jnp.float32)[:, None] / N
y = jnp.zeros(N, jnp.int32)
model = model_of(jnp.tile(jnp.array([1.0, 0.0]), (N, 1)))


def walk(turns):
    """A state machine on integers: it counts, and sample i turns into a 2-cycle at ``turns[i]``."""

    def step(model, x, y, state, *, eps):
        index = jnp.round(x[:, 0] * N).astype(int)
        turn = turns[index]
        count = jnp.where(state["count"] <= turn, state["count"] + 1, state["count"] - 1)
        margin = state["count"].astype(x.dtype)
        one = jnp.ones(len(y), jnp.int32)
        return {"count": count}, Info(margin, one, one)

    return step


def attack_with(*stages):
    return Attack(
        name="walk",
        init=lambda model, x, y, logits, keys, **knobs: {"count": jnp.zeros(len(y), jnp.int32)},
        stages=stages,
        point=lambda x, state, **knobs: x,
        norm=jnp.inf,
        box=None,
        converged=lambda state: state["count"] % 2 == 0,
    )


def counts(turns, steps, start=0):
    """The same machine, one sample and one step at a time."""
    path = [start]
    for _ in range(steps):
        path.append(path[-1] + 1 if path[-1] <= turns else path[-1] - 1)
    return path


@pytest.mark.fast
@pytest.mark.parametrize("batch_size", [1, 2, 5, 8, 23, 64])
@pytest.mark.parametrize("steps", [1, 2, 7, 8])
def test_every_sample_takes_its_own_steps(batch_size, steps):
    turns = np.random.default_rng(steps).integers(0, 10, N)
    attack = attack_with(Stage(walk(jnp.asarray(turns)), steps))
    result = wdjax.run(attack, model, x, y, eps=1.0, batch_size=batch_size)
    paths = np.array([counts(turn, steps) for turn in turns])
    np.testing.assert_array_equal(result.info.margin, paths[:, :-1].T)
    np.testing.assert_array_equal(result.converged, paths[:, -1] % 2 == 0)
    # A cycle through turn and turn + 1 is seen two steps after it begins.
    np.testing.assert_array_equal(result.gradients, np.minimum(steps, turns + 2))


@pytest.mark.fast
@pytest.mark.parametrize("length", [6, 7, 12, 25])
def test_chunks_of_steps_are_one_program(length):
    turns = np.random.default_rng(length).integers(0, 20, N)
    attack = attack_with(Stage(walk(jnp.asarray(turns)), length))
    state = attack.init(model, x, y, None, None)
    samples = slots.Samples(x, y, model(x), state)
    told = []
    compiled = slots._advance._cache_size()
    found, info = slots.carry(
        attack,
        model,
        samples,
        {"eps": jnp.float32(1)},
        slots=4,
        count=N - 2,
        chunk=10,
        mesh=None,
        report=lambda settled, place, info: told.append(settled),
    )
    assert slots._advance._cache_size() == compiled + 1
    assert sum(told) == (N - 2) * length
    paths = np.array([counts(turn, length) for turn in turns])
    np.testing.assert_array_equal(info.margin[:, :-2], paths[:-2, :-1].T)
    np.testing.assert_array_equal(found.state["count"], [*paths[:-2, -1], 0, 0])


@pytest.mark.fast
def test_another_accuracy_needs_no_other_program():
    attack = attack_with(Stage(walk(jnp.full(N, 99)), 3))
    wdjax.run(attack, model, x, y, eps=1.0, batch_size=5)
    compiled = slots._advance._cache_size()
    for wrong in (1, 5, 7):
        other = jax.tree.map(lambda rows, wrong=wrong: rows.at[:wrong].multiply(-1.0), model)
        result = wdjax.run(attack, other, x, y, eps=1.0, batch_size=5)
        assert int(result.gradients.sum()) == 3 * (N - wrong)
    assert slots._advance._cache_size() == compiled


@pytest.mark.fast
def test_a_change_of_sign_of_zero_is_a_change():
    def step(model, x, y, state, *, eps):
        margin = jnp.signbit(state["zero"]).astype(x.dtype)
        one = jnp.ones(len(y), jnp.int32)
        return {"zero": -jnp.abs(state["zero"])}, Info(margin, one, one)

    def init(model, x, y, logits, keys, **knobs):
        return {"zero": jnp.zeros(len(y))}

    attack = attack_with(Stage(step, 5))._replace(
        init=init, converged=lambda state: jnp.signbit(state["zero"])
    )
    result = wdjax.run(attack, model, x, y, eps=1.0)
    np.testing.assert_array_equal(result.info.margin[:, 0], [0, 1, 1, 1, 1])
    assert result.converged.all()


@pytest.mark.fast
def test_stages_follow_each_other():
    turns = np.random.default_rng(0).integers(0, 4, N)
    up = walk(jnp.asarray(turns))
    done = Stage(walk(jnp.full(N, 99)), 5, lambda state: state["count"] >= 4)
    result = wdjax.run(attack_with(Stage(up, 6), done), model, x, y, eps=1.0, batch_size=4)
    for i, turn in enumerate(turns):
        middle = counts(turn, 6)
        rest = counts(99, 5, start=middle[-1])
        taken = sum(count < 4 for count in rest[:-1])
        np.testing.assert_array_equal(result.info.gradients[6:, i], np.arange(5) < taken)
        np.testing.assert_array_equal(result.info.margin[6 : 6 + taken, i], rest[:taken])


@pytest.mark.fast
def test_fixed_points_and_cycles_do_not_change_an_attack():
    """WDA on a linear model runs into corners of the box: few passes, and the same points."""
    weights = jnp.array(np.random.default_rng(1).normal(size=(6, 3)), jnp.float32)
    linear = wdjax.Model(lambda w, x: x @ w, weights)
    points = jnp.array(np.random.default_rng(2).uniform(size=(40, 6)), jnp.float32)
    labels = jnp.argmax(linear(points), axis=-1)
    attack = wdjax.attacks.wda(steps=30, probe=20)
    hosted = wdjax.run(attack, linear, points, labels, eps=0.05, batch_size=7)
    traced = functools.partial(wdjax.run, attack)
    whole = jax.jit(lambda x: traced(linear, x, labels, eps=0.05))(points)
    np.testing.assert_allclose(hosted.x_adv, whole.x_adv, atol=1e-6)
    assert int(whole.gradients.min()) == 20 * 2 + 10
    assert int(hosted.gradients.max()) < 20
