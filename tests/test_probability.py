"""Probabilities of failure: counts, intervals, sequential decisions, rare events."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import Lp, Model, metrics, models, nppr, parallel
from wdjax.nppr import noise, probable
from wdjax.nppr.estimate import Estimate, bootstrap

NET = models.mlp((16, 8, 3), key=jax.random.key(2))
KEY = jax.random.key(0)


def half(w, x):
    """Loses where the first number falls below w."""
    first = x.reshape(len(x), -1)[:, 0]
    return jnp.stack([first - w, w - first], axis=1)


def samples(n=12):
    x = jax.random.uniform(jax.random.key(1), (n, 4, 4, 1))
    return x, jnp.argmax(NET(x), axis=-1)


def test_shares_are_those_of_the_closed_form():
    model = Model(half, jnp.asarray(0.5))
    x, y = jnp.array([[0.55, 0.5], [0.59, 0.5], [0.4, 0.5]]), jnp.zeros(3, jnp.int32)
    how = {"key": KEY, "draws": 20_000}
    found = nppr.estimate(model, noise.Uniform(0.1), x, y, **how)
    np.testing.assert_array_equal(found.correct, [True, True, False])
    np.testing.assert_allclose(found.per_input, [0.75, 0.95], atol=0.01)
    low, high = found.pooled()
    assert low < 0.85 < high < low + 0.01
    from scipy import stats

    normal = stats.norm()
    clipped = nppr.estimate(model, noise.ClippedGaussian(0.1), x, y, **how).per_input
    np.testing.assert_allclose(clipped, normal.cdf([0.5, 0.9]), atol=0.01)
    inside = normal.cdf(1) - normal.cdf(-1)
    truncated = nppr.estimate(model, noise.TruncatedGaussian(0.1), x, y, **how).per_input
    np.testing.assert_allclose(
        truncated, (normal.cdf([0.5, 0.9]) - normal.cdf(-1)) / inside, atol=0.01
    )


def shift(key, x, y):
    return jnp.full_like(x, 3.0) * jax.random.normal(key)


@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_every_copy_is_in_the_ball_and_the_box(norm):
    x, y = samples()
    ball, eps = Lp(norm), {1: 2.0, 2: 0.8, math.inf: 0.2}[norm]
    kinds = [noise.Uniform(eps, ball), noise.ClippedGaussian(eps, ball)]
    kinds.append(noise.Custom(jax.tree_util.Partial(shift), eps, ball))
    for own in kinds:
        moved = nppr.points(own, KEY, x, y, 20)
        cost = ball.cost(jnp.repeat(x, 20, axis=0), moved.reshape(-1, 4, 4, 1))
        assert 0 < cost.min() <= cost.max() <= jnp.float32(eps)
    with pytest.raises(ValueError, match="a pytree"):
        noise.Custom(shift, eps)
    if norm != math.inf:
        with pytest.raises(ValueError, match="linf"):
            noise.TruncatedGaussian(eps, ball)


def test_neither_batches_nor_devices_nor_company_change_a_count():
    x, y = samples()
    how = {"key": KEY, "draws": 70}
    whole = nppr.estimate(NET, noise.Uniform(0.6), x, y, **how)
    small = nppr.estimate(NET, noise.Uniform(0.6), x, y, batch_size=64, **how)
    part = nppr.estimate(NET, noise.Uniform(0.6), x[5:], y[5:], index=np.arange(5, 12), **how)
    np.testing.assert_array_equal(whole.survived, small.survived)
    np.testing.assert_array_equal(whole.survived[5:], part.survived)
    assert 0 < whole.value < 1
    mesh = parallel.data_mesh()
    split = nppr.estimate(NET, noise.Uniform(0.6), x, y, mesh=mesh, **how)
    np.testing.assert_array_equal(whole.survived, split.survived)
    alone = nppr.probabilistic_accuracy(NET, noise.Uniform(0.6), x, y, key=KEY, draws=200)
    shared = nppr.probabilistic_accuracy(
        NET, noise.Uniform(0.6), x, y, key=KEY, draws=200, mesh=mesh
    )
    jax.tree.map(np.testing.assert_array_equal, alone, shared)


def faulty(w, x):
    logits = half(w, x)
    return jnp.where(x[:, :1] < 0.45, jnp.nan, logits)


def test_copies_that_are_not_finite_have_not_survived():
    model, x = Model(faulty, jnp.asarray(0.1)), jnp.array([[0.5, 0.5]])
    found = nppr.estimate(model, noise.Uniform(0.1), x, jnp.array([0]), key=KEY, draws=320)
    assert found.faults[0] + found.survived[0] == 320
    assert 0.2 < found.faults[0] / 320 < 0.3
    with pytest.raises(ValueError, match="nothing is left"):
        nppr.estimate(model, noise.Uniform(0.1), x, jnp.array([1]), key=KEY)
    with pytest.raises(ValueError, match="not finite"):
        nppr.estimate(model, noise.Uniform(0.1), x - 0.2, jnp.array([0]), key=KEY)


def test_intervals_cover_as_often_as_they_say():
    random = np.random.default_rng(0)
    shares = random.beta(4, 1, size=(1000, 200))  # A new set of inputs each time; mean 0.8.
    survived = random.binomial(500, shares)
    held = [
        low <= 0.8 <= high
        for low, high in (
            bootstrap(one / 500, 0.95, 400, seed) for seed, one in enumerate(survived)
        )
    ]
    assert 0.93 <= np.mean(held) <= 0.97
    # For the same inputs, of one share: Clopper and Pearson's.
    counts = random.binomial(20_000, 0.8, 1000)
    low, high = metrics.clopper_pearson(counts, 20_000)
    assert 0.93 <= np.mean((low <= 0.8) & (high >= 0.8)) <= 0.97
    alike = Estimate(np.array([True, True, False]), np.array([400, 410, 0]), 500, np.zeros(3, int))
    low, high = alike.pooled()
    assert low < alike.value == 0.81 < high
    assert alike.of_inputs().lower.shape == (2,)


@pytest.mark.parametrize("risk", [0.09, 0.1, 0.11])
def test_the_sequential_test_errs_no_more_than_its_level(risk):
    random, alpha, rho = np.random.default_rng(0), 0.05, 0.1
    lost = np.cumsum(random.random((2000, 6400)) < risk, axis=1)
    wrong, open_ = np.zeros(2000, bool), np.ones(2000, bool)
    for made in range(32, 6401, 32):
        sure, weak = probable.decided(made - lost[:, made - 1], made, [rho], alpha)
        bad = weak[0] if risk <= rho else sure[0]
        wrong |= open_ & bad
        open_ &= ~(sure[0] | weak[0])
    assert wrong.mean() <= alpha
    if risk != rho:
        assert open_.mean() < 0.9  # It does decide.


def test_probabilistic_accuracy_is_that_of_the_closed_form():
    model = Model(half, jnp.asarray(0.5))
    x = jnp.stack([jnp.array([0.4, 0.51, 0.57, 0.585, 0.595, 0.7]), jnp.full(6, 0.5)], axis=1)
    y = jnp.zeros(6, jnp.int32)
    found = nppr.probabilistic_accuracy(model, noise.Uniform(0.1), x, y, key=KEY)
    assert found.rho == (0.1, 0.05, 0.01)
    risks = np.array([0, 0.45, 0.15, 0.075, 0.025, 0.0])
    for rho, sure, weak in zip(found.rho, found.robust, found.fragile):
        np.testing.assert_array_equal(sure[1:], risks[1:] <= rho)
        np.testing.assert_array_equal(weak[1:], risks[1:] > rho)
        assert not sure[0]
        assert not weak[0]
    np.testing.assert_allclose(found.lower, [0.6, 0.4, 0.2])
    np.testing.assert_allclose(found.upper, found.lower)
    assert found.draws[0] == 0 < found.draws[-1] < 1000
    short = nppr.probabilistic_accuracy(model, noise.Uniform(0.1), x, y, key=KEY, draws=32)
    assert short.undecided.any()
    assert np.all(short.lower < short.upper)
    with pytest.raises(ValueError, match="rho"):
        nppr.probabilistic_accuracy(model, noise.Uniform(0.1), x, y, key=KEY, rho=1.5)


def test_the_fields_of_prbench():
    x, y = samples()
    found = nppr.prbench(NET, x, y, key=KEY, radii=(0.03, 0.6), train=(x, y), rho=(0.1,))
    assert list(found) == [
        "acc",
        "PR(0.03)",
        "GE_PR(0.03)",
        "PR(0.60)",
        "GE_PR(0.60)",
        "ProbAcc(0.10)",
    ]
    assert found["PR(0.60)"]["value"] < found["PR(0.03)"]["value"]
    low, high = found["GE_PR(0.60)"]["interval"]
    assert low < found["GE_PR(0.60)"]["value"] == 0 < high


def line(w, x):
    return jnp.stack([x @ w, jnp.zeros(len(x))], axis=1)


def exact(shift):
    """P(u_1 + u_2 < -shift) of two uniform numbers in [-1, 1]."""
    return (2 - shift) ** 2 / 8


@pytest.mark.parametrize("shift", [1.95, 1.995])
def test_rare_failures_of_a_corner(shift):
    model = Model(line, jnp.array([1.0, 1.0, 0.0]))
    x = jnp.array([shift * 0.2 - 0.1, 0.1, 0.5])
    own, truth = noise.Uniform(0.2, Lp(math.inf, (-1.0, 1.0))), exact(shift)
    weighed = nppr.importance(model, own, x, 0, key=KEY, draws=2000)
    assert weighed.found
    assert weighed.value == pytest.approx(truth, rel=0.2)
    split = nppr.splitting(model, own, x, 0, key=KEY, particles=500)
    assert split.found
    assert split.value == pytest.approx(truth, rel=0.35)
    low, high = weighed.interval(0.999)
    assert low < truth < high
    plain = truth * (1 - truth) / 2000
    assert np.var(weighed.runs, ddof=1) < plain / (10 if shift < 1.99 else 100)


def test_intervals_of_rare_failures_cover():
    model, own = Model(line, jnp.array([1.0, 1.0])), noise.Uniform(0.2, Lp(math.inf, (-1.0, 1.0)))
    x, truth = jnp.array([0.29, 0.1]), exact(1.95)
    held = 0
    for seed in range(100):
        found = nppr.importance(model, own, x, 0, key=jax.random.key(seed), draws=500)
        low, high = found.interval()
        held += low <= truth <= high
    assert held >= 90


def test_what_never_fails_is_not_called_impossible():
    model, own = Model(line, jnp.array([1.0, 1.0])), noise.Uniform(0.1)
    x = jnp.array([0.5, 0.5])
    for method, size in ((nppr.importance, "draws"), (nppr.splitting, "particles")):
        found = method(model, own, x, 0, key=KEY, runs=2, **{size: 100})
        assert not found.found
        assert found.interval() == (0.0, 1.0)
    with pytest.raises(ValueError, match="misclassified"):
        nppr.importance(model, own, x, 1, key=KEY)
    with pytest.raises(ValueError, match="rare events are for"):
        nppr.importance(model, noise.Uniform(0.1, Lp(2)), x, 0, key=KEY)


def test_collapse_to_a_point_is_seen():
    x, y = samples()
    wide = nppr.spread_within(noise.Uniform(0.1), x, y, key=KEY, draws=200)
    assert np.all(np.abs(wide.within - 3**-0.5) < 0.03)
    same = noise.Custom(jax.tree_util.Partial(lambda key, x, y: jnp.full_like(x, 0.1)), 0.1)
    point = nppr.spread_within(same, x, y, key=KEY)
    assert np.all(point.within == 0)
    assert point.saturated == 1.0


def test_the_loss_is_differentiable_in_the_model():
    x, y = samples()

    def value(model):
        return nppr.expected_loss(model, noise.Uniform(0.2), x, y, key=KEY)

    slope = jax.grad(value)(NET).args[0]["fc2"]["bias"]
    for place in range(3):
        moved = [jax.tree.map(jnp.asarray, NET.args[0]) for _ in range(2)]
        for params, size in zip(moved, (-1e-2, 1e-2)):
            params["fc2"] = params["fc2"] | {"bias": params["fc2"]["bias"].at[place].add(size)}
        ends = [float(value(Model(NET.func, params))) for params in moved]
        assert (ends[1] - ends[0]) / 2e-2 == pytest.approx(float(slope[place]), rel=0.02, abs=1e-3)
