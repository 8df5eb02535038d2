"""Rounds: nothing is lost, nothing is computed twice, cycles end early."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_search import attack_class

import wdjax
from wdjax import Lp, attacks, models, norms
from wdjax.attacks.ascent import setting
from wdjax.core import Info, Stage
from wdjax.engine import batching, rounds
from wdjax.xla_cpu import on_cpu

fast = pytest.mark.fast

N = 23
index = jnp.arange(N, dtype=jnp.float32)[:, None] / N
zeros = jnp.zeros(N, jnp.int32)
table = wdjax.Model(
    lambda rows, x: rows[jnp.round(x[:, 0] * N).astype(int)],
    jnp.tile(jnp.array([1.0, 0.0]), (N, 1)),
)


class Count(NamedTuple):
    count: jax.Array


@attack_class
class Walk:
    """A state machine on integers: it counts, and sample i turns into a 2-cycle at ``turns[i]``."""

    budget, random, ball = "none", False, Lp(box=None)
    lengths: tuple = setting((5,))
    turns: tuple = setting((99,) * N)
    cycles: bool = setting(True)
    until: int | None = setting(None)

    @property
    def stages(self):
        done = None if self.until is None else lambda state: state.count >= self.until
        return tuple(Stage(self.step, k, done, cycles=self.cycles) for k in self.lengths)

    def init(self, victim, samples, start, keys):
        return Count(jnp.zeros(len(samples.y), jnp.int32))

    def step(self, victim, samples, state):
        turn = jnp.array(self.turns)[jnp.round(samples.x[:, 0] * N).astype(int)]
        count = jnp.where(state.count <= turn, state.count + 1, state.count - 1)
        if self.until is not None:
            count = jnp.where(state.count >= self.until, state.count, count)
        one = jnp.ones(len(count), jnp.int32)
        value = state.count.astype(jnp.float32)
        return Count(count), Info(value, one, one, 0 * one, one < 0)

    def point(self, samples, state):
        return samples.x, None

    def finished(self, state):
        return state.count % 2 == 0


def path(turn, steps):
    """The same machine, one sample and one step at a time."""
    counts = [0]
    for _ in range(steps):
        counts.append(counts[-1] + 1 if counts[-1] <= turn else counts[-1] - 1)
    return counts


@pytest.fixture(params=[1, 4, 10])
def chunk(request, monkeypatch):
    """Steps in one program: short stages take them singly on a CPU, long ones ten at a time."""
    monkeypatch.setattr(rounds, "_chunk", lambda stage: min(request.param, stage.length))
    return request.param


@fast
@pytest.mark.parametrize("batch_size", [1, 5, 23, 64])
@pytest.mark.parametrize("steps", [1, 7, 41])
def test_every_sample_takes_its_own_steps(chunk, batch_size, steps):
    turns = tuple(np.random.default_rng(steps).integers(0, 30, N).tolist())
    attack = Walk((steps,), turns)
    found = wdjax.search(attack, table, index, zeros, batch_size=batch_size, history=True)
    paths = np.array([path(turn, steps) for turn in turns])
    np.testing.assert_array_equal(found.done, paths[:, -1] % 2 == 0)
    if chunk == 1:  # A cycle through turn and turn + 1 is seen two steps after it begins.
        np.testing.assert_array_equal(found.gradients, np.minimum(steps, np.array(turns) + 2))
    taken = np.asarray(found.history.gradients) > 0
    np.testing.assert_array_equal(taken.sum(0), found.gradients)
    np.testing.assert_array_equal(found.history.value.T[taken.T], paths[:, :-1][taken.T])


@fast
def test_stages_follow_each_other(chunk):
    turns = tuple(np.random.default_rng(0).integers(0, 4, N).tolist())
    both = wdjax.search(Walk((6, 5), turns), table, index, zeros, batch_size=4)
    np.testing.assert_array_equal(both.done, [path(turn, 11)[-1] % 2 == 0 for turn in turns])
    until = wdjax.search(
        Walk((3, 7), cycles=False, until=4), table, index, zeros, batch_size=4, history=True
    )
    assert until.done.all()
    spent = np.asarray(until.history.gradients).sum(0)
    np.testing.assert_array_equal(spent, 4 if chunk == 1 else spent[0])
    np.testing.assert_array_equal(
        until.history.value[-1], until.history.value[4 if chunk == 1 else -1]
    )


@fast
def test_one_program_serves_every_length_of_chunk(monkeypatch):
    monkeypatch.setattr(rounds, "_chunk", lambda stage: min(10, stage.length))
    before = rounds._steps.programs()
    wdjax.search(Walk((37,), cycles=False), table, index, zeros, batch_size=8)
    assert rounds._steps.programs() == before + 1


@fast
def test_a_long_search_ends_in_small_batches(monkeypatch):
    sizes = []
    whole = rounds._batches

    def note(plan, active, length=0):
        made = whole(plan, active, length)
        sizes.append([index.shape[1] for index, _ in made])
        return made

    monkeypatch.setattr(rounds, "_batches", note)
    monkeypatch.setattr(rounds, "_chunk", lambda stage: 1)
    turns = tuple([200] * 17 + [3] * 6)
    light = wdjax.search(Walk((60,), turns), table, index, zeros, batch_size=16)
    assert sizes[0] == [16, 16]
    sizes.clear()
    monkeypatch.setattr(rounds, "_LONG", 0)  # As if the model were a large net.
    found = wdjax.search(Walk((60,), turns), table, index, zeros, batch_size=16)
    np.testing.assert_array_equal(found.x_adv, light.x_adv)
    assert sizes[0] == [16, 4, 4]
    assert [16, 4] in sizes
    np.testing.assert_array_equal(found.gradients, [60] * 17 + [5] * 6)


@fast
def test_a_change_of_sign_of_zero_is_a_change():
    @attack_class
    class Sign(Walk):
        def init(self, victim, samples, start, keys):
            return Count(jnp.zeros(len(samples.y)))

        def step(self, victim, samples, state):
            one = jnp.ones(len(samples.y), jnp.int32)
            value = jnp.signbit(state.count).astype(jnp.float32)
            return Count(-jnp.abs(state.count)), Info(value, one, one, 0 * one, one < 0)

    found = wdjax.search(Sign(), table, index, zeros, history=True)
    np.testing.assert_array_equal(found.history.value[:, 0], [0, 1, 1, 1, 1])


@fast
def test_fixed_points_and_cycles_do_not_change_an_attack():
    """WDA on a linear model runs into corners of the box: few passes, and the same points."""
    weights = jnp.array(np.random.default_rng(1).normal(size=(6, 3)), jnp.float32)
    linear = wdjax.Model(lambda w, x: x @ w, weights)
    points = jnp.array(np.random.default_rng(2).uniform(size=(40, 6)), jnp.float32)
    labels = jnp.argmax(linear(points), axis=-1)
    attack = attacks.WDA(steps=30, probe=20)
    hosted = wdjax.run(attack, linear, points, labels, eps=0.05, batch_size=7)
    whole = jax.jit(lambda x: wdjax.run(attack, linear, x, labels, eps=0.05))(points)
    np.testing.assert_allclose(hosted.x_adv, whole.x_adv, atol=1e-6)
    assert int(whole.gradients.min()) == 20 * 2 + 10
    most = 20 if on_cpu() else int(whole.gradients.min())  # Elsewhere a program has more steps.
    assert int(hosted.gradients.max()) < most


@fast
def test_memory_does_not_grow_with_steps():
    """Totals are kept, histories are not: the state of a long search is a few rows a sample."""
    attack = Walk((5000,), cycles=False)
    shapes = {}

    def note(progress):
        shapes[progress.taken] = sum(leaf.nbytes for leaf in jax.live_arrays())
        return len(shapes) == 40

    wdjax.search(attack, table, index, zeros, callback=note)
    sizes = list(shapes.values())
    assert max(sizes[5:]) <= sizes[5] + 4096


@fast
def test_leaves_without_entries_are_finite():
    leaves = {"none": jnp.zeros((3, 0)), "some": jnp.array([[1.0], [jnp.nan], [2.0]])}
    assert norms.finite(leaves).tolist() == [True, False, True]


@fast
def test_attacks_share_what_does_not_depend_on_them():
    """The model's own programs are compiled for the first attack only."""
    x, y = jnp.linspace(0.1, 0.9, 19)[:, None] * jnp.ones((1, 3)), jnp.zeros(19, jnp.int32)
    model = wdjax.Model(lambda w, x: jnp.tanh(x) @ w, jnp.ones((3, 2)))
    wdjax.search(attacks.PGD(steps=2), model, x, y, eps=0.01)
    before = rounds._evaluate.programs()
    wdjax.search(attacks.WDA(), model, x, y, eps=0.01)
    wdjax.search(attacks.WDAPlusPlus(), model, x, y)
    assert rounds._evaluate.programs() == before


def compiled(monitored):
    """How many programs a call compiles."""
    programs, over = [], False

    def note(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration" and not over:
            programs.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    monitored()
    over = True
    return len(programs)


NUMBERS = {
    "a radius": (attacks.PGD(Lp(2), steps=3, random_start=True), dict(eps=0.1)),
    "mass": (attacks.WDAPlusPlus(Lp(2), steps=3, rivals=2), dict(eps=0.1, order=2)),
    "half in a batch": (attacks.PGD(steps=3), dict(eps=0.1, batch_size=25)),
}


@fast
@pytest.mark.parametrize("name", NUMBERS)
def test_no_program_is_compiled_for_a_number_of_samples(name):
    """Numbers of samples whose batches have the same shapes share all programs, and agree."""
    attack, how = NUMBERS[name]
    rows = np.random.default_rng(4).uniform(size=(50, 5)).astype(np.float32)
    net = wdjax.Model(lambda w, x: jnp.tanh(3 * x) @ w, jnp.asarray(rows[:5, :4] - 0.5))
    classes = np.asarray(jnp.argmax(net(rows), axis=-1))

    def ask(n):
        result = wdjax.run(
            attack, net, rows[:n], classes[:n], key=jax.random.key(0), index=np.arange(n), **how
        )
        assert 0 <= float(result.accuracy) <= 1
        return jax.tree.map(np.asarray, result)

    whole = ask(50)
    for n in (41, 43, 49):
        results = []
        assert compiled(lambda n=n, results=results: results.append(ask(n))) == 0
        if attack.budget == "sample":
            np.testing.assert_array_equal(results[0].x_adv, whole.x_adv[:n])
            np.testing.assert_array_equal(results[0].margin, whole.margin[:n])


@fast
@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 22, 37, 96, 128, 1024])
def test_batches_idle_little(most):
    sizes = {}
    for share in range(1, 1200):
        size = batching.even(share, most)
        assert size <= most
        idle = -(-share // size) * size - share
        assert idle <= max(1, 0.29 * share), (share, size)
        sizes.setdefault(size, []).append(share)
    assert len(sizes) <= 1 + 10 * np.log10(10 * most)
    for round_number in (10, 20, 50, 100, 200, 500, 1000):
        size = batching.even(round_number, most)
        assert -(-round_number // size) * size <= 1.03 * round_number


def test_stages_and_walks_of_any_length_share_programs():
    """Rounds of Carlini and Wagner's attack are two programs; walks that differ in numbers, too."""
    net = models.mlp((3, 5), key=jax.random.key(3))
    x = jax.random.uniform(jax.random.key(4), (7, 3))
    y = jnp.argmax(net(x), -1)
    before = rounds._steps.programs()
    wdjax.search(attacks.CarliniWagner(Lp(2), steps=9, rounds=4), net, x, y)
    assert rounds._steps.programs() == before + 2
    key, eps = jax.random.key(0), np.full(len(y), 0.1, np.float32)
    walks = [
        attacks.Walk(steps=12, targets=1),
        attacks.Walk(steps=4, targets=2, haste=1.0),
        attacks.Walk(steps=30, far=True, targets=3, width=1.5, shrink=0.2),
    ]
    wdjax.search(walks[0], net, x, y, eps=eps)
    before = rounds._steps.programs()
    for walk in walks[1:]:
        wdjax.search(walk, net, x, y, eps=eps, key=key if walk.far else None)
    assert rounds._steps.programs() == before


def test_a_class_that_inherits_from_walk_keeps_its_steps():
    """They are not those of the walk that all walks share."""

    @attack_class
    class Still(attacks.Walk):
        def _walk(self, victim, samples, state):
            moved, info = super()._walk(victim, samples, state)
            return moved._replace(x=state.x, best=state.best), info

    x, y = jnp.full((2, 1), 0.4), jnp.zeros(2, jnp.int32)
    net = wdjax.Model(lambda w, x: (x - 0.5) * w, jnp.array([-1.0, 1.0]))
    assert wdjax.search(attacks.Walk(), net, x, y).success.all()
    assert not wdjax.search(Still(), net, x, y, diagnose=False).success.any()
