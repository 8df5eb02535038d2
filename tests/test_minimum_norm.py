"""Minimum-norm attacks against closed forms and brute force; `test_step_by_step` has the rest."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import wdjax
from wdjax import Lp, attacks, ensembles, losses, metrics, norms, transport
from wdjax.attacks import alma, nearest, pdpgd, rivals
from wdjax.core import Samples, Victim
from wdjax.ensembles import star

FREE = {norm: Lp(norm, None) for norm in (1, 2, np.inf)}
EXACT = {
    "walk": lambda ball: attacks.Walk(ball, steps=40),
    "walk hasty": lambda ball: attacks.Walk(ball, steps=60, haste=1.0),
    "walk far": lambda ball: attacks.Walk(ball, steps=60, far=True),
    "walk targets": lambda ball: attacks.Walk(ball, steps=30, targets=2),
    "ddn": lambda ball: attacks.DDN(ball, steps=200, radius=0.3),
    "fmn": lambda ball: attacks.FMN(ball, steps=300),
    "deepfool": lambda ball: attacks.DeepFool(ball, overshoot=0.0),
    "cw": lambda ball: attacks.CarliniWagner(ball, steps=200, rounds=6),
    "pdpgd": lambda ball: attacks.PDPGD(ball, steps=500),
    "alma": lambda ball: attacks.ALMA(ball, steps=600),
    "tr": lambda ball: attacks.TrustRegion(ball, steps=200, overshoot=1e-3),
    "slp": lambda ball: attacks.SLP(ball),
}
# How far beyond the true distance each may end, as a share of it.
SLACK = {"ddn": 0.1, "fmn": 0.03, "cw": 0.05, "pdpgd": 0.1, "alma": 0.1}
SOME = {"ddn": (2,), "cw": (2,), "alma": (1, 2), "tr": (2, np.inf)}


def linear(seed=0, classes=4, size=6):
    keys = jax.random.split(jax.random.key(seed), 3)
    weights = jax.random.normal(keys[0], (size, classes))
    model = wdjax.Model(lambda w, x: 3 * x @ w, weights)
    x = jax.random.uniform(keys[1], (12, size))
    return model, x, jnp.argmax(model(x), axis=-1)


def exact(model, x, y, norm):
    """The distance to the nearest of the boundaries of a linear model, by the dual norm."""
    weights, logits = 3 * np.asarray(model.args[0], float), np.asarray(model(x), float)
    order = {1: np.inf, 2: 2, np.inf: 1}[norm]
    distance = np.full(len(y), np.inf)
    for i, label in enumerate(np.asarray(y)):
        for rival in set(range(weights.shape[1])) - {int(label)}:
            steep = np.linalg.norm(weights[:, rival] - weights[:, label], order)
            distance[i] = min(distance[i], (logits[i, label] - logits[i, rival]) / steep)
    return distance


@pytest.mark.parametrize(
    ("name", "norm"),
    [(name, norm) for name in EXACT for norm in SOME.get(name, (1, 2, np.inf))],
)
def test_linear_models_have_known_distances(name, norm):
    # From afar a walk may end at the boundary of another class; between two there is one.
    model, x, y = linear(classes=2 if name == "walk far" else 4)
    true = exact(model, x, y, norm)
    scale = float(true.max())
    found = wdjax.search(EXACT[name](FREE[norm]), model, x, y, eps=scale, key=jax.random.key(0))
    assert found.success.all()
    cost = np.asarray(found.cost)
    assert (cost >= true * (1 - 1e-5)).all(), "nearer than the boundary"
    # Sparse and corner optima take an iterative attack some way; targets miss no class here.
    slack = SLACK.get(name, 0.01) * (3 if norm == 1 else 1)
    assert (cost <= true * (1 + slack) + 1e-3 * scale).mean() >= 0.9


def test_the_ranking_is_the_linear_distance():
    model, x, y = linear(classes=6)
    victim = Victim(model, losses.decision_margin)
    for norm in (1, 2, np.inf):
        ranking, info = rivals.rank(victim, x, y, norm, among=5, count=5)
        np.testing.assert_allclose(ranking.distance[:, 0], exact(model, x, y, norm), rtol=1e-5)
        assert (np.diff(ranking.distance, axis=1) >= 0).all()
        assert (ranking.classes != y[:, None]).all()
        assert (info.gradients == 5).all()


@pytest.mark.parametrize("norm", [1, 2, np.inf])
def test_proximal_maps_minimise(norm):
    z = np.array([0.7, -0.2, 0.05])
    for weight in (0.0, 0.1, 0.6, 2.0):

        def goal(u, weight=weight):
            return weight * np.linalg.norm(u, norm) + np.sum((u - z) ** 2) / 2

        mapped = pdpgd.plain_proximal(jnp.asarray(z[None]), jnp.array([weight]), norm)[0]
        best = min(
            (optimize.minimize(goal, start, method="Nelder-Mead") for start in (z, 0 * z, z / 2)),
            key=lambda run: run.fun,
        )
        assert goal(np.asarray(mapped, float)) <= best.fun + 1e-6


def test_the_penalty_of_alma():
    """Smooth at 0, where its slope is the multiplier, and convex and increasing."""
    c = jnp.linspace(-2, 2, 401)
    for rho, mu in itertools.product((1.0, 3.0), (0.1, 2.0)):
        one = jnp.ones_like(c)
        value = np.asarray(alma._penalty(c, rho * one, mu * one), float)
        rise = np.diff(value) / np.diff(c)
        assert (rise > 0).all()
        assert (np.diff(rise) >= -1e-3 * rise.max()).all()
        assert abs(value[200]) < 1e-6
        assert rise[199] == pytest.approx(mu, rel=0.1)
        assert rise[200] == pytest.approx(mu, rel=0.1)


def curved(seed=0, n=20):
    keys = jax.random.split(jax.random.key(seed), 3)
    weights = jax.random.normal(keys[0], (8, 24)), jax.random.normal(keys[1], (24, 4))
    model = wdjax.Model(lambda w, x: jnp.tanh(2 * x @ w[0]) @ w[1], weights)
    x = jax.random.uniform(keys[2], (n, 8))
    y = jnp.argmax(model(x), -1)
    return model, x, jnp.where(jnp.arange(n) % 7 == 6, (y + 1) % 4, y)


@pytest.mark.parametrize("norm", [1, np.inf])
def test_wda_star_beats_its_rivals(norm):
    model, x, y = curved()
    found = ensembles.wda_star(model, x, y, key=jax.random.key(1), ball=Lp(norm), passes=300)
    plain = wdjax.search(attacks.WDAPlusPlus(Lp(norm)), model, x, y)
    assert found.success.all()
    np.testing.assert_array_equal(np.asarray(found.cost)[~np.asarray(found.correct)], 0)
    np.testing.assert_array_equal(found.success, jnp.argmax(model(found.x_adv), -1) != y)
    np.testing.assert_allclose(found.cost, norms.lp_norm(found.x_adv - x, norm), rtol=1e-5)
    for eps, order in itertools.product((0.02, 0.1), (1, 2)):
        ours, theirs = (wdjax.spend(one, eps=eps, order=order) for one in (found, plain))
        assert float(ours.accuracy) <= float(theirs.accuracy) + 1e-3
    assert float(found.passes.mean()) <= 310


def test_wda_star_keeps_each_sample_within_a_given_number_of_passes():
    model, x, y = curved()
    how = {"key": jax.random.key(1), "passes": 130}
    free = ensembles.wda_star(model, x, y, **how)
    kept = ensembles.wda_star(model, x, y, **how, most=150)
    others = 12  # Samples that a walk leaves out take a forward pass.
    assert float(jnp.max(free.passes)) > 150 + others
    assert float(jnp.max(kept.passes)) <= 150 + others
    assert kept.success.all()
    with pytest.raises(ValueError, match="most must be at least passes=130"):
        ensembles.wda_star(model, x, y, **how, most=100)


@pytest.mark.parametrize(("norm", "n"), [(2, 5), (np.inf, 40)])
def test_wda_star_loses_hardly_a_sample_to_its_rivals_at_equal_passes(norm, n):
    """At most three in a hundred are farther by more than 1 %, and none by 5 %."""
    model, x, y = curved(n=n)
    ball, backward = Lp(norm), 150
    rivals = [attacks.WDAPlusPlus(ball), attacks.FMN(ball, steps=backward)]
    rivals += [attacks.PDPGD(ball, steps=backward), attacks.Walk(ball, steps=backward)]
    rivals += [attacks.DDN(ball, steps=backward)] if norm == 2 else []
    least = np.min([np.asarray(_flips(wdjax.search(a, model, x, y))) for a in rivals], axis=0)
    found = ensembles.wda_star(model, x, y, key=jax.random.key(1), ball=ball, passes=2 * backward)
    assert float(found.gradients.mean()) <= backward
    ours = np.asarray(_flips(found))
    assert np.all(ours <= 1.05 * least)
    assert (ours > 1.01 * least).sum() <= 0.03 * n


def _flips(found):
    return wdjax.metrics.flip_distance(found)


@pytest.mark.parametrize("n", [1, 5, 7, 12, 30, 36, 100])
def test_trials_are_made_and_paid_for_at_any_number_of_samples(n):
    for passes in (70, 100, 200, 400):
        firsts = star.schedule(Lp(2), passes).firsts
        trial, costs = star._trial(n, firsts, passes), [kind.passes for kind in firsts]
        assert trial.any()
        if not trial.all():
            spent = sum(costs) * trial.mean() + max(costs) * (1 - trial.mean())
            assert spent <= passes
        if passes == 400 or n >= 36:
            assert trial.sum() >= min(n, 6)


@pytest.mark.parametrize("norm", [1, 2, np.inf])
def test_few_samples_take_the_same_walks_whatever_comes_with_them(norm):
    """From 150 to 300 passes they cost what is given."""
    for passes in (150, 181, 199, 299) if norm != 1 else (150, 181, 199):
        plan = star.schedule(Lp(norm), passes, few=True)
        for other in ("near", "far"):
            taken = [kind for kind in (*plan.firsts, *plan.always) if kind.where != other]
            assert passes - 8 < sum(kind.passes for kind in taken) <= passes
    model, x, y = curved(n=9)
    how = {"key": jax.random.key(0), "ball": Lp(norm), "passes": 160}
    alone = [
        float(ensembles.wda_star(model, x[i : i + 1], y[i : i + 1], index=[i], **how).cost[0])
        for i in range(3)
    ]
    together = ensembles.wda_star(model, x, y, **how)
    assert together.success.all()
    np.testing.assert_allclose(together.cost[:3], alone, rtol=0.02)


def test_wda_star_looks_from_the_sample_where_the_far_walk_missed_a_flip():
    """A narrow gap beside the samples, that only a search from them sees."""
    model, x, y = curved(n=9)
    look = star.schedule(Lp(2), 200).look
    ask = star.question("wda_star", model, x, y, jax.random.key(0), None, {})
    far = wdjax.search(attacks.Walk(Lp(2), steps=1, far=True), model, x, y, key=jax.random.key(0))
    nobody = np.zeros(len(y), bool)
    record = star.Standing(ask, 1, far, nobody, nobody, np.full(len(y), 0.2), {}, np.inf)
    after = star._compare(record, look, star.Spending(200, 1e-4, None, 1))
    missed = np.asarray(far.correct & (far.cost > 0))
    assert missed.any()
    assert np.all(np.asarray(after.found.cost)[missed] < np.asarray(far.cost)[missed])
    assert after.looked[missed].all()


@pytest.mark.parametrize(("norm", "passes"), [(2, 400), (np.inf, 200)])
def test_the_mean_of_the_passes_is_kept(norm, passes):
    """But for one forward pass a search of the samples that it leaves out."""
    model, x, y = curved(n=40)
    masked = wdjax.Model(lambda model, x: model(x + 0.3 * jnp.sin(40 * x)), model)
    for victim in (model, masked):
        y = jnp.argmax(victim(x), -1)
        found = ensembles.wda_star(
            victim, x, y, key=jax.random.key(1), ball=Lp(norm), passes=passes
        )
        assert float(found.passes.mean()) <= passes + 4
        assert found.success.all()


def test_wda_star_never_leaves_a_flip_that_it_is_given():
    model, x, y = curved()
    known = wdjax.search(attacks.WDAPlusPlus(Lp(2)), model, x, y)
    points = known.x_adv.at[0].set(2.0).at[1].set(x[1])  # Outside of the box, and no flip.
    found = ensembles.wda_star(
        model, x, y, key=jax.random.key(1), ball=Lp(2), passes=21, start=points
    )
    kept, closer = np.asarray(found.cost)[2:], np.asarray(known.cost)[2:]
    assert np.all(kept <= closer * (1 + 1e-6))
    assert np.any(kept < closer * 0.99)
    np.testing.assert_array_equal(found.success, jnp.argmax(model(found.x_adv), -1) != y)
    assert np.all((found.x_adv >= 0) & (found.x_adv <= 1))
    with pytest.raises(ValueError, match="start must have the shape of x"):
        ensembles.wda_star(model, x, y, key=jax.random.key(1), passes=21, start=points[:3])


@pytest.mark.parametrize("norm", [2, np.inf])
def test_a_walk_leaves_the_corner_of_the_box(norm):
    """Most pixels black, many classes: steps gain less than the linear model says."""
    keys = jax.random.split(jax.random.key(0), 5)
    first, second, last = (
        jax.random.normal(key, shape) / math.sqrt(shape[0] / 2)
        for key, shape in zip(keys, [(64, 64), (64, 64), (64, 10)])
    )
    model = wdjax.Model(
        lambda w, x: jax.nn.relu(jax.nn.relu(x @ w[0]) @ w[1]) @ w[2], (first, second, last)
    )
    x = jax.random.uniform(keys[3], (20, 64))
    x = jnp.where(jax.random.bernoulli(keys[4], 0.8, x.shape), 0.0, x)
    y = jnp.argmax(model(x), -1)
    found = wdjax.search(attacks.Walk(Lp(norm), steps=30), model, x, y)
    near = wdjax.search(attacks.DeepFool(Lp(norm)), model, x, y)
    assert found.success.all()
    assert float(jnp.mean(found.cost)) <= 1.05 * float(jnp.mean(near.cost))


# In bfloat16 a trust region shrinks for ever where the logits do not move.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(["fab", "deepfool", "fmn", "pdpgd", "walk"], ["float64", "bfloat16"]),
        ("tr", "float64"),
    ],
)
def test_logits_of_other_precision_than_the_samples_hide_no_flip(name, dtype):
    attack = {"fab": attacks.FAB(Lp()), "fmn": attacks.FMN(Lp())}.get(name) or EXACT[name](Lp())
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        weights = jax.random.normal(jax.random.key(0), (6, 4), jnp.float64)
        model = wdjax.Model(lambda w, x: (3 * jnp.tanh(x @ w)).astype(dtype), weights)
        x = jax.random.uniform(jax.random.key(1), (12, 6), jnp.float32)
        found = wdjax.search(attack, model, x, jnp.argmax(model(x), -1), key=jax.random.key(2))
    assert found.cost.dtype == jnp.float32
    assert found.success.mean() > 0.9
    assert 0.2 < float(jnp.median(found.cost)) < 0.5


def test_passes_go_where_the_budget_reaches():
    """Far flips that nobody will buy are not polished."""
    distance = np.array([0.0, 0.1, 0.2, 0.5, 5.0])
    found = wdjax.core.Found(
        x_adv=jnp.zeros((5, 1)), proof=None, cost=jnp.asarray(distance),
        correct=jnp.asarray(distance > 0), success=jnp.ones(5, bool), margin=jnp.ones(5),
        done=jnp.ones(5, bool), fault=jnp.zeros(5, bool), zeros=jnp.zeros(5, int),
        gradients=jnp.zeros(5, int), forwards=jnp.zeros(5, int),
    )  # fmt: skip
    gain = np.full(5, 0.01)
    for order, eps in ((1, 0.1), (2, 0.2)):
        worth = star._worth(found, gain, eps, order)
        accuracy = 1 - transport.allocate(distance, eps, order).mean()
        assert worth[0] == 0
        assert worth[4] == 0
        price = np.max(distance[np.asarray(transport.allocate(distance, eps, order)) > 0])
        for i in (1, 2):
            nearer = distance.copy()
            nearer[i] *= 0.99
            better = 1 - transport.allocate(nearer, eps, order).mean()
            share = float(accuracy - better) * 5
            assert share == pytest.approx(worth[i] / price**order, rel=0.05, abs=2e-6)
    np.testing.assert_allclose(star._worth(found, gain, None, 1), 0.01 * distance)


SHORT = {
    "ddn": attacks.DDN(steps=8, radius=0.2),
    "fmn": attacks.FMN(Lp(2), steps=8),
    "deepfool": attacks.DeepFool(Lp(2), steps=5),
    "cw": attacks.CarliniWagner(steps=5, rounds=2, step_size=0.2),
    "pdpgd": attacks.PDPGD(Lp(2), steps=8),
    "alma": attacks.ALMA(steps=12),
    "tr": attacks.TrustRegion(Lp(2), steps=8, radius=0.05),
    "walk": attacks.Walk(Lp(2), steps=8),
    "slp": attacks.SLP(steps=8),
    "sigma-zero": attacks.SigmaZero(steps=20),
}


@pytest.mark.parametrize("name", SHORT)
def test_nothing_goes_unsaid(name):
    """Measured at the stored points; the same inside jit; no fault and no flat gradient hidden."""
    attack, (model, x, y) = SHORT[name], curved(n=14)
    found = wdjax.search(attack, model, x, y)
    inside = jax.jit(lambda x: wdjax.search(attack, model, x, y))(x)
    np.testing.assert_array_equal(found.success, inside.success)
    np.testing.assert_allclose(found.cost, inside.cost, atol=2e-4)
    np.testing.assert_array_equal(found.success, jnp.argmax(model(found.x_adv), -1) != y)
    moved = np.asarray(found.x_adv - x).reshape(len(x), -1)
    far = np.linalg.norm(moved, attack.ball.norm, axis=1)
    np.testing.assert_allclose(found.cost, far, rtol=1e-5)
    assert float(found.x_adv.min()) >= 0
    assert float(found.x_adv.max()) <= 1
    assert found.success[np.asarray(found.correct)].any()
    assert not found.fault.any()

    def cliff(w, x):
        """Flat, and NaN but for the samples."""
        here = jnp.abs(x[:, None] - w[None]).max(axis=-1).min(axis=-1) == 0
        return jnp.where(here[:, None], jnp.array([2.0, 1.0, 0.0]), jnp.nan)

    def flat(w, x):
        return jnp.broadcast_to(w, (len(x), 3))

    labels = jnp.zeros(len(x), int)
    level = wdjax.Model(flat, jnp.array([2.0, 1.0, 0.0]))
    still = wdjax.search(attack, level, x, labels)
    assert not still.success.any()
    assert not still.done.any()
    np.testing.assert_array_equal(still.zeros, still.gradients)
    assert (still.gradients > 0).all()
    moved = x[::-1]
    bad = wdjax.search(attack, wdjax.Model(cliff, x), x, labels, start=0.5 * x + 0.5 * moved)
    assert bad.fault.all()
    assert not bad.success.any()
    assert not bad.done.any()


class KilledError(Exception):
    pass


@pytest.mark.parametrize("name", ["wda_star", "fast", "bisect"])
def test_ensembles_resume_to_the_same_bits(name, tmp_path):
    model, x, y = curved(n=12)
    common = dict(key=jax.random.key(3), ball=Lp(2))
    ask = {
        "wda_star": lambda **more: ensembles.wda_star(model, x, y, passes=130, **common, **more),
        "fast": lambda **more: ensembles.fast(model, x, y, eps=0.15, **common, **more).found,
        "bisect": lambda **more: ensembles.bisect(
            attacks.PGD(Lp(2), steps=3, random_start=True), model, x, y, eps=0.1, rounds=4,
            key=jax.random.key(3), **more,
        ),
    }[name]  # fmt: skip
    whole, turns = ask(), itertools.count()
    deaths = {5, 18, 40}

    def kill(progress):
        if next(turns) in deaths:
            raise KilledError

    for _ in range(len(deaths) + 1):
        try:
            found = ask(checkpoint=tmp_path / name, callback=kill)
        except KilledError:
            continue
        break
    for field in ("x_adv", "cost", "success", "margin", "gradients", "forwards"):
        np.testing.assert_array_equal(getattr(whole, field), getattr(found, field))


def test_fast_tells_when_its_accuracy_stood():
    model, x, y = curved(n=30)
    account = ensembles.fast(model, x, y, eps=0.2, key=jax.random.key(0), ball=Lp(2))
    standing = np.asarray(account.found.correct & ~account.found.success)
    assert account.legs[-1].accuracy == pytest.approx(standing.mean())
    assert account.reached.accuracy == account.legs[-1].accuracy
    accuracies = [leg.accuracy for leg in account.legs]
    assert accuracies == sorted(accuracies, reverse=True)
    assert (np.asarray(account.found.cost) <= 0.2 * (1 + 1e-6)).all()
    assert max(account.legs[-1].gradients, account.legs[-1].forwards) <= 150
    few = ensembles.fast(model, x, y, eps=0.2, key=jax.random.key(0), ball=Lp(2), passes=12)
    assert max(few.legs[-1].gradients, few.legs[-1].forwards) <= 12
    with pytest.raises(ValueError, match="key"):
        ensembles.fast(model, x, y, eps=0.2)
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: ensembles.fast(model, x, y, eps=0.2, key=jax.random.key(0)))(x)


def test_fast_sees_through_flat_gradients():
    """Margins that saturate at the samples: only a start elsewhere has a gradient."""

    def apply(w, x):
        score = jnp.clip(10 * (x.mean(axis=-1) - 0.45), -1, 1)
        return jnp.stack([score, -score], axis=-1)

    model = wdjax.Model(apply, jnp.zeros(()))
    x, y = jnp.full((6, 8), 0.6), jnp.zeros(6, int)
    assert not wdjax.search(attacks.PGD(), model, x, y, eps=0.3).success.any()
    account = ensembles.fast(model, x, y, eps=0.3, key=jax.random.key(0))
    assert account.found.success.all()
    # Of twelve keys, two leave a sample whose every start was flat.
    star_found = ensembles.wda_star(model, x, y, key=jax.random.key(0), passes=400)
    np.testing.assert_allclose(star_found.cost, 0.15, rtol=0.02)
    sparse = ensembles.wda_star(model, x, y, key=jax.random.key(1), ball=Lp(1), passes=200)
    assert sparse.success.any()  # By far starts; there is one a sample, which may be flat.
    np.testing.assert_allclose(sparse.cost[sparse.success], 1.2, rtol=0.02)


@pytest.mark.parametrize("passes", [200, 250, 299])
def test_for_norm_1_and_few_passes_samples_share_no_passes(passes):
    """What they share is one decision, which is the same for these and for one of them."""
    model, x, y = curved(n=9)
    how = {"key": jax.random.key(1), "ball": Lp(1), "passes": passes}
    found = ensembles.wda_star(model, x, y, **how)
    assert found.success.all()
    assert float(jnp.max(found.passes)) <= passes
    one = ensembles.wda_star(model, x[4:5], y[4:5], **how, index=np.array([4]))
    np.testing.assert_allclose(one.cost, found.cost[4:5], rtol=1e-5)


@pytest.mark.parametrize("norm", [1, 2, np.inf])
def test_bisection_finds_linear_distances(norm):
    model, x, y = linear()
    true = exact(model, x, y, norm)
    attack = attacks.PGD(FREE[norm], steps=20, loss=losses.margin)
    found = ensembles.bisect(attack, model, x, y, eps=0.3 * float(true.max()), rounds=12)
    assert found.success.all()
    cost = np.asarray(found.cost)
    assert (cost >= true * (1 - 1e-5)).all()
    assert (cost <= true * 1.02 + 1e-3 * true.max()).mean() >= 0.9
    with pytest.raises(ValueError, match="has none"):
        ensembles.bisect(attacks.Walk(), model, x, y, eps=0.1)
    with pytest.raises(ValueError, match="above 0"):
        ensembles.bisect(attack, model, x, y, eps=0.0)


def test_optimality_is_a_ratio_of_areas():
    generator = np.random.default_rng(0)
    best = generator.uniform(0.1, 1, 30) * (np.arange(30) % 5 > 0)
    distance = best * generator.uniform(1, 3, 30)
    distance[7] = np.inf
    grid = np.linspace(0, best.max(), 200_001)
    area, least = (
        np.trapezoid((row[:, None] > grid[:-1:20]).mean(0), grid[:-1:20])
        for row in (distance, best)
    )
    wanted = 1 - (area - least) / ((best > 0).mean() * best.max() - least)
    assert float(metrics.optimality(distance, best)) == pytest.approx(wanted, abs=1e-3)
    lost = np.where(best > 0, np.inf, 0)
    assert float(metrics.optimality(lost, best)) == pytest.approx(0, abs=1e-6)
    assert np.isnan(metrics.optimality(np.zeros(3), np.zeros(3)))
    np.testing.assert_array_equal(metrics.envelope(distance, best), best.astype(np.float32))
    with pytest.raises(ValueError, match="same samples"):
        metrics.envelope(distance, best[:3])


def test_a_flip_within_rounding_is_none():
    logits = jnp.array([[1000.0, 1000.0 + 6e-4], [1000.0, 1001.0]])
    samples = Samples(None, jnp.array([0, 0]), None, logits)
    assert nearest.flips(Victim(None, losses.margin), samples, logits).tolist() == [False, True]


def test_the_walk_with_few_classes_and_odd_starts():
    model, x, y = linear(classes=2)
    true = exact(model, x, y, 2)
    found = wdjax.search(attacks.Walk(FREE[2], steps=40, targets=3), model, x, y)
    np.testing.assert_allclose(found.cost, true, rtol=0.01)
    again = wdjax.search(attacks.Walk(FREE[2], steps=40), model, x, y, start=found.x_adv)
    assert (again.cost <= found.cost * 1.01).all()
    none = wdjax.search(
        attacks.Walk(FREE[2], far=True), model, x, y, eps=0.0, key=jax.random.key(0)
    )
    np.testing.assert_allclose(none.cost, true, rtol=0.01)


@pytest.mark.parametrize("targets", [0, 2])
def test_a_walk_with_a_checkpoint_is_the_walk(targets, tmp_path):
    model, x, y = linear(classes=3)
    walk = attacks.Walk(FREE[2], steps=12, targets=targets)
    alone = wdjax.search(walk, model, x, y)
    for _ in range(2):
        kept = wdjax.search(walk, model, x, y, checkpoint=tmp_path / "walk.safetensors")
        np.testing.assert_array_equal(kept.x_adv, alone.x_adv)


def test_victims_without_logits_can_be_walked_but_not_ranked():
    one = wdjax.Model(lambda w, x: (x @ w)[:, 0], jnp.ones((4, 1)))

    def above(out, y):
        return out - 3.0

    x, y = jnp.full((3, 4), 0.5), jnp.zeros(3, int)
    found = wdjax.search(attacks.Walk(steps=30), one, x, y, criterion=above)
    np.testing.assert_allclose(found.cost, 0.25, rtol=0.01)
    with pytest.raises(ValueError, match="needs logits"):
        wdjax.search(attacks.Walk(targets=1), one, x, y, criterion=above)


def test_walks_to_classes_do_not_follow_a_criterion_of_infinite_slope():
    def root(out, y):
        return jnp.sqrt(jnp.maximum(losses.decision_margin(out, y), 0.0))

    w = jnp.array([[1.0, 0.0, -1.0], [0.0, 1.0, 0.5]])
    model, x, y = wdjax.Model(lambda w, x: x @ w, w), jnp.array([[0.7, 0.3]] * 5), jnp.zeros(5, int)
    how = {"criterion": root, "diagnose": False}
    found = wdjax.search(attacks.Walk(FREE[2], steps=40, targets=2), model, x, y, **how)
    np.testing.assert_allclose(found.cost, 0.4 / 2**0.5, rtol=0.01)
    assert not np.any(found.fault)


def test_norms_that_an_attack_does_not_know_are_refused():
    for make in (
        lambda: attacks.DDN(Lp()),
        lambda: attacks.CarliniWagner(Lp(1)),
        lambda: attacks.ALMA(Lp()),
        lambda: attacks.TrustRegion(Lp(1)),
        lambda: attacks.SLP(Lp(0)),
        lambda: attacks.SigmaZero(Lp(1)),
    ):
        with pytest.raises(ValueError, match="norm must be"):
            make()
    samples = Samples(jnp.zeros((1, 2)), jnp.zeros(1, int), None, jnp.zeros((1, 2)))
    with pytest.raises(ValueError, match="radius"):
        samples.radius  # noqa: B018


@pytest.mark.parametrize("norm", [1, 2, np.inf])
def test_a_far_walk_begins_at_the_scale_it_is_given(norm):
    """The start is anywhere; an eps leads the first step into ``width * eps``, 0 nowhere."""
    model, x, y = curved(n=6)
    walk = attacks.Walk(Lp(norm), steps=1, far=True, width=1.5)
    first = next(stage for stage in walk.stages if stage.length)
    victim = Victim(model, wdjax.losses.margin)
    keys = jax.random.split(jax.random.key(0), 6)
    distances = {}
    for eps in (None, 0.0, 0.01):
        radii = None if eps is None else jnp.full(6, eps)
        samples = Samples(x, y, radii, model(x))
        begun = walk.init(victim, samples, None, keys)
        moved, _ = first.step(victim, samples, begun)
        distances[eps] = np.asarray(walk.ball.cost(x, moved.x))
    assert (distances[0.01] <= 0.015 * (1 + 1e-5)).all()
    assert distances[0.01].max() > 0.01
    assert distances[None].min() > 0.015
    np.testing.assert_array_equal(distances[None], distances[0.0])


def test_more_steps_of_a_walk_lose_no_flip():
    """The radius grew beyond the box before the first flip, and its steps ended in corners."""
    rng = np.random.default_rng(1)
    w = jnp.asarray(rng.normal(size=(24, 10)), jnp.float32)
    x = jnp.asarray(rng.uniform(size=(24, 24)), jnp.float32)
    model = wdjax.Model(lambda w, x: x @ w, w)
    targets = (jnp.argmax(x @ w, axis=1) + 1 + rng.integers(0, 9, 24)) % 10

    def target_led(out, y):
        return -losses.margin(out, y)

    few, many = (
        wdjax.search(attacks.Walk(steps=steps), model, x, targets, criterion=target_led)
        for steps in (40, 400)
    )
    assert np.all(few.success) & np.all(many.success)
    assert np.all(many.distance <= 1.1 * few.distance)
