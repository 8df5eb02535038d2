"""What can be asked: five kinds of attack in a few lines each, and how a search is carried."""

import dataclasses
import functools
import math
import os
import signal
import subprocess
import sys
import textwrap

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import Lp, attacks, losses, parallel
from wdjax.attacks import ascent
from wdjax.attacks.ascent import setting
from wdjax.core import Stage

fast = pytest.mark.fast


def attack_class(cls):
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def apply(params, x):
    hidden = jnp.tanh(x.reshape(len(x), -1) @ params["w1"] + params["b1"])
    return hidden @ params["w2"]


def make_params(seed, size=6, classes=3):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "w1": jax.random.normal(keys[0], (size, 12)),
        "b1": 0.3 * jax.random.normal(keys[1], (12,)),
        "w2": jax.random.normal(keys[2], (12, classes)),
    }


params = make_params(0)
model = wdjax.Model(apply, params)
x = jax.random.uniform(jax.random.key(1), (30, 6))
y = jnp.argmax(model(x), axis=-1).at[::7].add(1) % 3


# 1. A budget that couples all samples: W-PGD (Bai et al. 2023) for W_2 and l2, on ReDLR's cousin.


@attack_class
class WPGD:
    """Steps along all gradients at once, scaled so that the data set moves by one budget."""

    budget, random = "data", False
    ball: Lp = setting(Lp(2))
    steps: int = setting(12)

    @property
    def stages(self):
        return (Stage(self.climb, self.steps, couple=self.share),)

    def init(self, victim, samples, start, keys):
        return {"delta": jnp.zeros_like(samples.x), "slope": jnp.zeros_like(samples.x)}

    def climb(self, victim, samples, state):
        seen = ascent.slope(victim, samples.x + state["delta"], samples.y, losses.margin)
        return state | {"slope": seen.gradient}, ascent.note(victim, samples.y, seen)

    def share(self, samples, state, chosen):
        def size(rows):
            squares = jnp.where(chosen, jnp.sum(rows**2, axis=1), 0.0)
            return jnp.sqrt(jnp.sum(squares) / jnp.sum(chosen))

        eps = samples.eps[0]
        slope = jnp.where(chosen[:, None], state["slope"], 0.0)
        delta = state["delta"] + 1.875 * eps / self.steps * slope / (size(slope) + 1e-12)
        delta *= jnp.minimum(1.0, eps / (size(delta) + 1e-12))
        delta = self.ball.clip(samples.x + delta) - samples.x
        return {"delta": delta, "slope": slope}

    def point(self, samples, state):
        return samples.x + state["delta"], None

    def finished(self, state):
        return jnp.zeros(len(state["delta"]), bool)


@fast
def test_a_budget_may_couple_all_samples():
    eps = 0.1
    run = functools.partial(wdjax.run, WPGD(), model, x, y, eps=eps, order=2)
    whole = run(batch_size=30)
    share = float(jnp.mean(whole.correct))
    spent = math.sqrt(float(jnp.mean(whole.cost**2)))
    assert 0.9 * eps * math.sqrt(share) < spent <= eps
    # The mean binds, the single point does not: some go further than eps, some less.
    assert float(whole.cost.max()) > 1.2 * eps
    assert float(whole.accuracy) < share
    for options in ({"batch_size": 7}, {"mesh": parallel.data_mesh()}):
        other = run(**options)
        np.testing.assert_allclose(other.x_adv, whole.x_adv, atol=1e-6)
    traced = jax.jit(lambda x: wdjax.run(WPGD(), model, x, y, eps=eps, order=2))(x)
    np.testing.assert_allclose(traced.x_adv, whole.x_adv, atol=1e-6)
    with pytest.raises(ValueError, match="more than the budget"):
        wdjax.spend(whole, eps=eps / 2, order=2, kappa=1)


# 2. A ball whose cost is not a norm, and is proven by what the attack hands over.


@dataclasses.dataclass(frozen=True)
class Earth:
    """Mass moved between pixels of a line, at the cost of the plan that is handed over."""

    box = (0.0, 1.0)

    def cost(self, x, x_adv, proof=None):
        if proof is None:
            return jnp.where(jnp.all(x == x_adv, axis=1), 0.0, jnp.inf)
        places = jnp.arange(x.shape[1])
        gap = jnp.abs(places[:, None] - places)
        sound = jnp.all(proof >= 0, axis=(1, 2)) & jnp.all((x_adv >= 0) & (x_adv <= 1), axis=1)
        sound &= jnp.all(jnp.abs(proof.sum(2) - x) <= 1e-5, axis=1)
        sound &= jnp.all(jnp.abs(proof.sum(1) - x_adv) <= 1e-5, axis=1)
        return jnp.where(sound, jnp.sum(proof * gap, axis=(1, 2)), jnp.inf)


@attack_class
class Shift:
    """Moves as much mass as allowed from the pixel of least gradient to that of largest."""

    budget, random = "sample", False
    ball: Earth = setting(Earth())
    lie: bool = setting(False)

    @property
    def stages(self):
        return (Stage(self.move, 1),)

    def init(self, victim, samples, start, keys):
        return jax.vmap(jnp.diag)(samples.x)

    def move(self, victim, samples, plan):
        seen = ascent.slope(victim, samples.x, samples.y, losses.margin)
        rows, source = jnp.arange(len(samples.y)), jnp.argmin(seen.gradient, axis=1)
        sink = jnp.argmax(seen.gradient, axis=1)
        gap = jnp.maximum(jnp.abs(source - sink), 1)
        room = jnp.minimum(samples.x[rows, source], 1 - samples.x[rows, sink])
        amount = jnp.where(source == sink, 0.0, jnp.minimum(room, 0.999 * samples.eps / gap))
        plan = plan.at[rows, source, source].add(-amount).at[rows, source, sink].add(amount)
        return plan, ascent.note(victim, samples.y, seen)

    def point(self, samples, plan):
        proof = jax.vmap(jnp.diag)(samples.x) if self.lie else plan
        return plan.sum(1), proof

    def finished(self, plan):
        return jnp.zeros(len(plan), bool)


@fast
def test_a_ball_may_have_its_own_cost_and_want_a_proof():
    result = wdjax.run(Shift(), model, x, y, eps=0.8, batch_size=7)
    moved = np.asarray(result.cost) > 0
    assert moved.sum() > 10
    assert float(result.cost.max()) <= 0.8
    np.testing.assert_allclose(result.x_adv.sum(1), x.sum(1), rtol=1e-5)
    again = Earth().cost(x, result.x_adv, result.proof)
    np.testing.assert_allclose(again[moved], result.cost[moved])
    assert float(result.accuracy) < float(result.correct.mean())
    traced = jax.jit(lambda x: wdjax.run(Shift(), model, x, y, eps=0.8))(x)
    np.testing.assert_allclose(traced.x_adv, result.x_adv, atol=1e-6)
    lying = wdjax.run(Shift(lie=True), model, x, y, eps=0.8)
    np.testing.assert_array_equal(lying.x_adv, x)
    assert float(lying.accuracy) == float(lying.correct.mean())


# 3. Victims that are not logits [n, K].


def all_models(out, y):
    """A bank ``[n, M, K]`` has fallen when every model has."""
    return jnp.min(jax.vmap(losses.margin, (1, None))(out, y), axis=0)


def accepted_error(out, y):
    """A rejecting model has fallen when it errs and does not reject."""
    logits, reject = out
    return jnp.minimum(losses.margin(logits, y), -reject)


def bank(stacked, x):
    return jax.vmap(apply, (0, None), 1)(stacked, x)


def rejecting(params, x):
    logits = apply(params, x)
    best = jax.lax.top_k(jax.nn.softmax(logits), 2)[0]
    return logits, 0.1 - (best[:, 0] - best[:, 1])


@fast
def test_a_victim_may_be_a_bank_or_may_refuse():
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(make_params, range(3)))
    # Labels that all three agree on somewhere: those of the mean model.
    labels = jnp.argmax(bank(stacked, x).mean(1), -1)
    criterion = all_models
    found = wdjax.search(
        attacks.PGD(Lp(2), steps=20, loss=criterion), wdjax.Model(bank, stacked), x, labels,
        eps=0.8, criterion=criterion,
    )  # fmt: skip
    each = np.stack([np.argmax(apply(make_params(i), found.x_adv), -1) for i in range(3)])
    fallen = (each != np.asarray(labels)).all(axis=0)
    np.testing.assert_array_equal(found.success, fallen)
    assert fallen.sum() > np.asarray(~found.correct).sum()
    refuser = wdjax.Model(rejecting, params)
    found = wdjax.search(
        attacks.PGD(Lp(2), steps=20, loss=accepted_error), refuser, x, y,
        eps=0.5, criterion=accepted_error, batch_size=8,
    )  # fmt: skip
    logits, reject = refuser(found.x_adv)
    errs = (np.argmax(logits, -1) != np.asarray(y)) & (np.asarray(reject) < 0)
    np.testing.assert_array_equal(found.success, errs)
    assert (found.success & found.correct).any()
    with pytest.raises(ValueError, match="WDA follows single classes"):
        wdjax.search(attacks.WDA(), refuser, x, y, eps=0.5, criterion=accepted_error)
    with pytest.raises(ValueError, match="one a sample"):
        wdjax.search(attacks.PGD(), refuser, x, y, eps=0.5, criterion=lambda out, y: out[0])
    with pytest.raises(ValueError, match="must return logits"):
        wdjax.search(attacks.PGD(), refuser, x, y, eps=0.5)


@fast
def test_a_targeted_attack_is_another_criterion():
    def reached(out, target):
        return -losses.margin(out, target)

    target = (jnp.argmax(model(x), -1) + 1) % 3
    found = wdjax.search(
        attacks.PGD(Lp(2), steps=30, loss=reached), model, x, target, eps=1.0, criterion=reached
    )
    assert found.correct.all()
    np.testing.assert_array_equal(found.success, jnp.argmax(model(found.x_adv), -1) == target)
    assert found.success.mean() > 0.5


# 4. A minimum-norm attack, which needs no eps.


@attack_class
class Newton:
    """DeepFool's step to the linearised boundary, repeated until it is crossed."""

    budget, random = "none", False
    ball: Lp = setting(Lp(2, box=None))
    steps: int = setting(10)

    @property
    def stages(self):
        return (Stage(self.step, self.steps, done=self.finished),)

    def init(self, victim, samples, start, keys):
        return samples.x, victim.criterion(samples.out, samples.y) > 0

    def step(self, victim, samples, state):
        x, done = state
        seen = ascent.slope(victim, x, samples.y, losses.margin)
        info = ascent.note(victim, samples.y, seen)
        length = jnp.sum(seen.gradient**2, axis=1)
        move = -(info.value / length)[:, None] * seen.gradient * (1 + 1e-5)
        x = jnp.where(done[:, None], x, x + move)
        return (x, done | (victim.criterion(victim.model(x), samples.y) > 0)), info

    def point(self, samples, state):
        return state[0], None

    def finished(self, state):
        return state[1]


@fast
def test_a_minimum_norm_attack_needs_no_eps():
    weights = jax.random.normal(jax.random.key(4), (6, 3))
    linear = wdjax.Model(lambda w, x: x @ w, weights)
    labels = jnp.argmax(linear(x), -1)
    found = wdjax.search(Newton(), linear, x, labels)
    assert found.success.all()
    assert found.done.all()
    logits, w = np.asarray(linear(x), float), np.asarray(weights, float)
    gaps = logits[np.arange(30), labels][:, None] - logits
    width = np.linalg.norm(w[:, np.asarray(labels)][:, :, None] - w[:, None], axis=0)
    distance = np.where(width > 0, gaps / np.where(width > 0, width, 1), np.inf).min(axis=1)
    # The largest margin is not always the nearest class: never nearer than the truth.
    assert (np.asarray(found.cost) >= distance * (1 - 1e-4)).all()
    assert np.median(found.cost / distance) < 1.001
    # One search serves every budget and order.
    for order in (1, 2, math.inf):
        curve = [float(wdjax.spend(found, eps=e, order=order).accuracy) for e in (0, 0.05, 0.1, 9)]
        assert curve == sorted(curve, reverse=True)
        assert (curve[0], curve[-1]) == (1.0, 0.0)
    with pytest.raises(ValueError, match="cheapest flips"):
        wdjax.spend(found, eps=1e-3, kappa=1)


# 5. Killed and resumed: the contract does it after every round; here with real signals.

_KILLED = """
    import jax, sys, time, os
    import wdjax
    sys.path.insert(0, {here!r})
    import test_search as t
    attack = wdjax.attacks.WDA(steps=6, probe=3)
    def slow(progress):
        print(progress.taken, flush=True)
        time.sleep(0.3)
    wdjax.search(attack, t.model, t.x, t.y, eps=0.1, callback=slow, checkpoint={folder!r},
                 every={every})
"""


@pytest.mark.parametrize(
    ("number", "code", "every"),
    [(signal.SIGINT, None, 1e9), (signal.SIGTERM, 143, 1e9), (signal.SIGKILL, -9, 0)],
)
def test_a_signal_loses_nothing(tmp_path, number, code, every):
    folder = tmp_path / "search"
    script = textwrap.dedent(_KILLED).format(
        here=os.path.dirname(__file__), folder=str(folder), every=every
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    lines = [child.stdout.readline() for _ in range(2)]
    child.send_signal(number)
    assert child.wait(60) != 0
    if code is not None:
        assert child.returncode == code
    attack, seen = attacks.WDA(steps=6, probe=3), []
    resume = functools.partial(wdjax.search, attack, model, x, y, eps=0.1)
    found = resume(checkpoint=folder, callback=seen.append)
    chex.assert_trees_all_equal(found, resume())
    assert seen[0].taken > int(lines[0]), "it began anew"


# The rest of the front door.


@fast
def test_only_some_samples_from_given_starts():
    attack = attacks.PGD(Lp(2), steps=4, random_start=True)
    ask = functools.partial(wdjax.search, attack, model, x, y, eps=0.3, key=jax.random.key(3))
    whole, mask = ask(), np.arange(30) % 3 == 0
    part = ask(only=mask)
    for own, other in zip(jax.tree.leaves(part), jax.tree.leaves(whole)):
        np.testing.assert_array_equal(np.asarray(own)[mask], np.asarray(other)[mask])
    np.testing.assert_array_equal(part.x_adv[~mask], x[~mask])
    assert not part.gradients[~mask].any()
    assert not part.done[~mask & np.asarray(part.correct)].any()
    # A share of a larger set keeps the randomness of that set.
    tail = wdjax.search(
        attack, model, x[20:], y[20:], eps=0.3, key=jax.random.key(3), index=np.arange(20, 30)
    )
    np.testing.assert_allclose(tail.x_adv, whole.x_adv[20:], atol=1e-6)
    # Handed on, the points of one search are where the next begins.
    still = attacks.PGD(Lp(2), steps=1, step_size=0.0, iterate="last")
    resumed = wdjax.search(still, model, x, y, eps=0.3, start=whole.x_adv)
    np.testing.assert_allclose(resumed.x_adv, whole.x_adv, atol=1e-6)
    np.testing.assert_array_equal(resumed.success, whole.success)
    inside = jax.jit(
        lambda start, only: wdjax.search(still, model, x, y, eps=0.3, start=start, only=only)
    )(whole.x_adv, mask)
    np.testing.assert_allclose(inside.x_adv[mask], resumed.x_adv[mask], atol=1e-6)
    np.testing.assert_array_equal(inside.x_adv[~mask], x[~mask])
    # A radius of its own for every sample.
    radii = np.linspace(0.0, 0.4, 30)
    own = wdjax.search(attacks.PGD(Lp(2), steps=4), model, x, y, eps=radii)
    assert (np.asarray(own.cost) <= radii * (1 + 1e-5)).all()
    assert (np.asarray(own.cost)[radii > 0.1] > 0.05)[np.asarray(own.correct)[radii > 0.1]].all()


@fast
def test_walks_go_on_from_where_others_ended():
    far = wdjax.search(attacks.PGD(Lp(2), steps=10), model, x, y, eps=1.0)
    started = wdjax.search(attacks.WDAPlusPlus(Lp(2)), model, x, y, start=far.x_adv)
    flips = np.asarray(far.success & far.correct)
    assert flips.any()
    assert started.success[flips].all()
    assert (np.asarray(started.cost)[flips] <= np.asarray(far.cost)[flips] + 1e-6).all()


@fast
def test_best_takes_the_better_per_sample():
    ask = functools.partial(wdjax.search, attacks.PGD(Lp(2), steps=6), model, x, y)
    near, far = ask(eps=0.2), ask(eps=0.5)
    both = wdjax.best_of(near, far)
    np.testing.assert_array_equal(both.success, near.success | far.success)
    np.testing.assert_array_equal(both.passes, near.passes + far.passes)
    own = np.asarray(both.success)
    least = np.minimum(
        np.where(near.success, near.cost, np.inf), np.where(far.success, far.cost, np.inf)
    )
    np.testing.assert_array_equal(np.asarray(both.cost)[own], least[own])
    np.testing.assert_array_equal(both.margin[~own], np.maximum(near.margin, far.margin)[~own])


# Gradients that mean something: F3.


@fast
@pytest.mark.parametrize("order", [1, 2])
def test_accuracy_is_differentiable_in_the_budget(order):
    def accuracy(eps):
        return wdjax.run(attacks.WDAPlusPlus(Lp(2)), model, x, y, eps=eps, order=order).accuracy

    inside = jax.jit(accuracy)
    # With steps of their own the distances do not change with eps, so differences are meant well.
    fixed = jax.jit(
        lambda eps: (
            wdjax.run(
                attacks.WDAPlusPlus(Lp(2), step_size=0.02), model, x, y, eps=eps, order=order
            ).accuracy
        )
    )
    slopes = []
    for eps in (0.03, 0.061, 0.1):
        difference = (fixed(eps + 1e-4) - fixed(eps - 1e-4)) / 2e-4
        gradient = jax.grad(fixed)(eps)
        np.testing.assert_allclose(gradient, difference, rtol=0.02)
        slopes.append(float(jax.grad(inside)(eps)))
    assert all(slope < -0.5 for slope in slopes), slopes


@fast
def test_the_attacked_loss_is_differentiable_in_the_parameters():
    """Where the attack maximises, its points may be held fixed (Danskin)."""
    weights = jax.random.normal(jax.random.key(4), (6, 2))
    labels = jnp.argmax(x @ weights, -1)
    attack = attacks.PGD(Lp(box=None), steps=3)

    def attacked(weights):
        linear = wdjax.Model(lambda w, x: x @ w, weights)
        result = wdjax.run(attack, linear, x, labels, eps=0.1, skip_misclassified=False)
        fixed = wdjax.transport.AdversarialDistribution.from_result(
            x, labels, jax.lax.stop_gradient(result)
        )
        return fixed.expected_loss(linear)

    gradient = jax.jit(jax.grad(attacked))(weights)
    for place in np.ndindex(weights.shape):
        step = jnp.zeros_like(weights).at[place].set(1e-2)
        difference = (attacked(weights + step) - attacked(weights - step)) / 2e-2
        np.testing.assert_allclose(gradient[place], difference, atol=2e-3)


@pytest.mark.fast
@pytest.mark.parametrize("eps", [0.05, 8 / 255])
def test_a_search_within_a_radius_is_spent_whole_at_that_radius(eps):
    weights = jax.random.normal(jax.random.key(0), (16, 4))
    model = wdjax.Model(lambda w, x: x @ w, weights)
    x = jax.random.uniform(jax.random.key(1), (200, 16))
    y = np.asarray(model(x).argmax(1))
    found = wdjax.search(attacks.PGD(steps=3), model, x, y, eps=eps)
    assert 20 < found.success.sum() < 180
    assert np.any(np.asarray(found.cost, float) > eps)  # By rounding: what was lost before.
    left = np.mean(~np.asarray(found.success))
    assert float(wdjax.spend(found, eps=eps, order=np.inf).accuracy) == pytest.approx(left)
    traced = jax.jit(lambda eps: wdjax.spend(found, eps=eps, order=np.inf).accuracy)
    assert float(traced(eps)) == pytest.approx(left)
    assert float(wdjax.spend(found, eps=eps * 0.999, order=np.inf).accuracy) > left + 0.05
