"""Attacks of one's own: the example of the docs, and some that break the contract."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import Lp, attacks, norms, testing

PAGE = Path(__file__).parents[1] / "docs" / "own_attack.md"
CODE = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


@pytest.fixture(scope="module")
def example():
    """The class that the page defines."""
    names = {"__name__": "own"}
    exec(compile(CODE.partition("testing.check_attack")[0], "docs/own_attack.md", "exec"), names)
    return names["MIFGSM"]


def test_the_example_is_short_and_public():
    lines = [line for line in CODE.splitlines() if line.strip()]
    assert len(lines[: next(i for i, line in enumerate(lines) if "check_attack" in line)]) <= 15
    assert not re.search(r"[. ]_[a-z]", CODE)


def momentum(gradient, x, y, eps, steps, decay):
    """Dong et al. (2018), Algorithm 1, in NumPy: all iterates."""
    now, velocity, seen = np.array(x, np.float64), np.zeros(x.shape), [np.array(x)]
    for _ in range(steps):
        slope = np.asarray(gradient(jnp.asarray(now, jnp.float32), y), np.float64)
        size = np.abs(slope).reshape(len(x), -1).sum(axis=1).reshape(-1, 1, 1, 1)
        velocity = decay * velocity + slope / size
        now = now + eps / steps * np.sign(velocity)
        now = np.clip(np.clip(now, x - eps, x + eps), 0, 1)
        seen.append(now)
    return seen


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_the_example_takes_the_steps_of_its_paper(example, decay):
    case = testing._case(attacks.fgsm(), None, (2, 3, 2), 16, {})
    y, eps = jnp.argmax(case.model(case.x), -1), 0.05

    def loss(x, y):
        chance = jax.nn.log_softmax(case.model(x))
        return -jnp.sum(jnp.take_along_axis(chance, y[:, None], 1))

    iterates = momentum(jax.grad(loss), np.asarray(case.x), y, eps, 6, decay)
    attack = example(steps=6, decay=decay, iterate="last")
    found = wdjax.search(attack, case.model, case.x, y, eps=eps)
    np.testing.assert_allclose(found.x_adv, iterates[-1], atol=1e-6)
    best = wdjax.search(example(steps=6, decay=decay), case.model, case.x, y, eps=eps)
    margins = [case.model(jnp.asarray(one, jnp.float32)) for one in iterates]
    margins = [wdjax.losses.decision_margin(one, y) for one in margins]
    np.testing.assert_allclose(best.margin, np.max(margins, axis=0), atol=1e-5)


def test_the_example_keeps_the_contract(example):
    testing.check_attack(example(steps=4, restarts=2), kappa=2.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Planted(attacks.GradientAttack):
    """Sign steps, and what breaks them."""

    def step(self, samples, x, gradient, memory):
        return x + norms.spread(samples.radius / 2, x) * jnp.sign(gradient), memory


class Leaves(Planted):
    def point(self, samples, state):
        return jnp.clip(samples.x + 2 * (state.x - samples.x), 0, 1), None


class LeavesTheBox(Planted):
    def point(self, samples, state):
        return state.x - 1, None


class ReadsOthers(Planted):
    def step(self, samples, x, gradient, memory):
        return super().step(samples, x, gradient - gradient.mean(axis=0), memory)


class KnowsItsPlace(Planted):
    def step(self, samples, x, gradient, memory):
        turn = (-1.0) ** jnp.arange(len(x))
        return super().step(samples, x, gradient * norms.spread(turn, x), memory)


class ReturnsNaN(Planted):
    def point(self, samples, state):
        return state.x.at[0].set(jnp.nan), None


class IgnoresTheKey(Planted):
    random = True


class DrawsByItself(Planted):
    def init(self, victim, samples, start, keys):
        noise = np.random.default_rng().uniform(-0.01, 0.01, samples.x.shape)
        return super().init(victim, samples, samples.x + noise.astype(np.float32), keys)


class NoPytree:
    def __init__(self, x):
        self.x = x


class StateIsNoPytree(Planted):
    def init(self, victim, samples, start, keys):
        return NoPytree(samples.x)


class OneNumberForAll(Planted):
    def memory(self, samples):
        return jnp.zeros(())


class SaysDone(Planted):
    def finished(self, state):
        return jnp.ones(len(state.x), bool)


class HidesZeros(Planted):
    def _ascend(self, victim, samples, state):
        state, info = super()._ascend(victim, samples, state)
        return state, info._replace(zeros=jnp.zeros_like(info.zeros))


class HidesFaults(Planted):
    def _ascend(self, victim, samples, state):
        state, info = super()._ascend(victim, samples, state)
        return state, info._replace(fault=jnp.zeros_like(info.fault))


class Decides(Planted):
    def step(self, samples, x, gradient, memory):
        return (x, memory) if float(gradient.sum()) > 0 else super().step(samples, x, gradient, x)


class ThreeClasses(Planted):
    def init(self, victim, samples, start, keys):
        assert samples.out.shape[1] > 2, "three classes, please"
        return super().init(victim, samples, start, keys)


class OneIsNone(Planted):
    def step(self, samples, x, gradient, memory):
        turn = 1.0 if len(x) > 1 else -1.0
        return super().step(samples, x, turn * gradient, memory)


class Miscounts(Planted):
    def _ascend(self, victim, samples, state):
        state, info = super()._ascend(victim, samples, state)
        return state, info._replace(fault=jnp.ones_like(info.fault))


class CountsItsCalls(Planted):
    calls = itertools.count()

    def step(self, samples, x, gradient, memory):
        def share():
            return np.float32(next(self.calls) % 7 / 7)

        share = jax.pure_callback(share, jax.ShapeDtypeStruct((), jnp.float32))
        return super().step(samples, x, gradient, memory)[0] * share, memory


class LoopsOverConstants(Planted):
    def step(self, samples, x, gradient, memory):
        nothing = jnp.zeros(gradient.shape, gradient.dtype)
        total = jax.lax.fori_loop(0, 2, lambda _, total: total + gradient, nothing)
        return super().step(samples, x, total, memory)


class DividesByTheRadius(Planted):
    def point(self, samples, state):
        radius = norms.spread(samples.radius, state.x)
        return samples.x + (state.x - samples.x) / radius * radius, None


@functools.cache
def registered(kind):
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(kind))


BROKEN = [
    (Leaves, "ball", "away, in a ball of radius"),
    (LeavesTheBox, "ball", "outside the box"),
    (ReturnsNaN, "ball", "1 of 24 points are not finite"),
    (ReadsOthers, "company", "x_adv|success"),
    (KnowsItsPlace, "company", "x_adv|success"),
    (IgnoresTheKey, "key", "another key changes nothing"),
    (DrawsByItself, "key", "the same key gave another search"),
    (StateIsNoPytree, "protocol", "not an array"),
    (OneNumberForAll, "protocol", "a row a sample"),
    (SaysDone, "zero gradients", "nothing could be learnt"),
    (HidesZeros, "zero gradients", "not counted"),
    (HidesFaults, "faults", "not marked as a fault"),
    (Miscounts, "measured", "faults on a model that has none"),
    (Decides, "jit", "Tracer|Concretization"),
    (Decides, "vmap", "Tracer|Concretization"),
    (LoopsOverConstants, "shards", "carry|varying"),
    (ThreeClasses, "two classes", "three classes, please"),
    (DividesByTheRadius, "no budget", "24 of 24 points are not finite"),
    (CountsItsCalls, "resumed", "Arrays"),
    (OneIsNone, "one sample", "x_adv|Not equal|Arrays"),
]


@pytest.mark.parametrize(("broken", "clause", "said"), BROKEN, ids=lambda one: str(one))
def test_an_attack_that_breaks_a_clause_is_told_which(broken, clause, said):
    attack = registered(broken)(Lp(), steps=3)
    with pytest.raises(AssertionError, match=f"breaks the clause '{clause}'(.|\\n)*({said})"):
        testing.check_attack(attack, clauses=(clause,))


def test_every_clause_is_broken_by_one():
    assert {clause for _, clause, _ in BROKEN} == {*testing.CLAUSES}


def test_what_the_planted_attacks_are_made_of_breaks_nothing():
    testing.check_attack(Planted(steps=3))


def test_clauses_have_names():
    with pytest.raises(ValueError, match=r"clauses must be some of protocol, ball.*\['bal'\]"):
        testing.check_attack(attacks.fgsm(), clauses=("bal",))
    with pytest.raises(AssertionError, match=r"'protocol'.*got the class PGD"):
        testing.check_attack(attacks.PGD, clauses=("protocol",))
