"""Probabilities of failure: counts, intervals, sequential decisions, rare events."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import Lp, Model, models, nppr, parallel
from wdjax.nppr import counting, distributions, probable
from wdjax.nppr.rare import Rare

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
    found = nppr.estimate(model, distributions.UniformBall(0.1), x, y, **how)
    np.testing.assert_array_equal(found.correct, [True, True, False])
    np.testing.assert_allclose(found.per_input, [0.75, 0.95], atol=0.01)
    low, high = found.pooled()
    assert low < 0.85 < high < low + 0.01
    from scipy import stats

    normal = stats.norm()
    clipped = nppr.estimate(model, distributions.ClippedGaussian(0.1), x, y, **how).per_input
    np.testing.assert_allclose(clipped, normal.cdf([0.5, 0.9]), atol=0.01)
    inside = normal.cdf(1) - normal.cdf(-1)
    truncated = nppr.estimate(model, distributions.TruncatedGaussian(0.1), x, y, **how).per_input
    np.testing.assert_allclose(
        truncated, (normal.cdf([0.5, 0.9]) - normal.cdf(-1)) / inside, atol=0.01
    )


def shift(key, x, y):
    return jnp.full_like(x, 3.0) * jax.random.normal(key)


@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_every_copy_is_in_the_ball_and_the_box(norm):
    x, y = samples()
    ball, eps = Lp(norm), {1: 2.0, 2: 0.8, math.inf: 0.2}[norm]
    kinds = [distributions.UniformBall(eps, ball), distributions.ClippedGaussian(eps, ball)]
    kinds.append(distributions.Custom(jax.tree_util.Partial(shift), eps, ball))
    for own in kinds:
        moved = nppr.points(own, KEY, x, y, 20)
        cost = ball.cost(jnp.repeat(x, 20, axis=0), moved.reshape(-1, 4, 4, 1))
        assert 0 < cost.min() <= cost.max() <= jnp.float32(eps)
    with pytest.raises(ValueError, match="a pytree"):
        distributions.Custom(shift, eps)
    if norm != math.inf:
        with pytest.raises(ValueError, match="linf"):
            distributions.TruncatedGaussian(eps, ball)


def test_neither_batches_nor_devices_nor_company_change_a_count():
    x, y = samples()
    how = {"key": KEY, "draws": 70}
    whole = nppr.estimate(NET, distributions.UniformBall(0.6), x, y, **how)
    small = nppr.estimate(NET, distributions.UniformBall(0.6), x, y, batch_size=64, **how)
    part = nppr.estimate(
        NET, distributions.UniformBall(0.6), x[5:], y[5:], index=np.arange(5, 12), **how
    )
    np.testing.assert_array_equal(whole.survived, small.survived)
    np.testing.assert_array_equal(whole.survived[5:], part.survived)
    assert 0 < whole.value < 1
    mesh = parallel.data_mesh()
    split = nppr.estimate(NET, distributions.UniformBall(0.6), x, y, mesh=mesh, **how)
    np.testing.assert_array_equal(whole.survived, split.survived)
    alone = nppr.probabilistic_accuracy(
        NET, distributions.UniformBall(0.6), x, y, key=KEY, draws=200
    )
    shared = nppr.probabilistic_accuracy(
        NET, distributions.UniformBall(0.6), x, y, key=KEY, draws=200, mesh=mesh
    )
    jax.tree.map(np.testing.assert_array_equal, alone, shared)


def faulty(w, x):
    logits = half(w, x)
    return jnp.where(x[:, :1] < 0.45, jnp.nan, logits)


def test_copies_that_are_not_finite_have_not_survived():
    model, x = Model(faulty, jnp.asarray(0.1)), jnp.array([[0.5, 0.5]])
    found = nppr.estimate(
        model, distributions.UniformBall(0.1), x, jnp.array([0]), key=KEY, draws=320
    )
    assert found.faults[0] + found.survived[0] == 320
    assert 0.2 < found.faults[0] / 320 < 0.3
    with pytest.raises(ValueError, match="nothing is left"):
        nppr.estimate(model, distributions.UniformBall(0.1), x, jnp.array([1]), key=KEY)
    with pytest.raises(ValueError, match="not finite"):
        nppr.estimate(model, distributions.UniformBall(0.1), x - 0.2, jnp.array([0]), key=KEY)


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


def test_a_decision_stands(monkeypatch):
    """After 79 of 80 copies a risk of at most .1 is sure; it is not after 116 of 120."""
    seen = []

    def count(poll, rows, done, step):
        """All copies survive but one, and then eleven in twelve."""
        seen.append(done + step)
        lost = 1 if done < 80 <= done + step else round(step / 12) if done >= 80 else 0
        return counting.Tally(np.full(len(rows), step - lost), np.zeros(len(rows), np.int64))

    monkeypatch.setattr(probable.counting, "count", count)
    found = probable._decide_all(None, np.arange(2), np.array([0.1, 0.01]), 0.05, 400)
    assert found.robust[0].all()
    assert not found.fragile[0].any()
    assert not found.robust[1].any()
    assert 80 in seen
    assert 120 in seen


def test_probabilistic_accuracy_is_that_of_the_closed_form():
    model = Model(half, jnp.asarray(0.5))
    x = jnp.stack([jnp.array([0.4, 0.51, 0.57, 0.585, 0.595, 0.7]), jnp.full(6, 0.5)], axis=1)
    y = jnp.zeros(6, jnp.int32)
    found = nppr.probabilistic_accuracy(model, distributions.UniformBall(0.1), x, y, key=KEY)
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
    short = nppr.probabilistic_accuracy(
        model, distributions.UniformBall(0.1), x, y, key=KEY, draws=32
    )
    assert short.undecided.any()
    assert np.all(short.lower < short.upper)
    with pytest.raises(ValueError, match="rho"):
        nppr.probabilistic_accuracy(model, distributions.UniformBall(0.1), x, y, key=KEY, rho=1.5)


def test_the_fields_of_prbench():
    x, y = samples()
    found = nppr.prbench(NET, x, y, key=KEY, eps_list=(0.03, 0.6), train=(x, y), rho=(0.1,))
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
    own, truth = distributions.UniformBall(0.2, Lp(math.inf, (-1.0, 1.0))), exact(shift)
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


def gaussian(w, b):
    """Fails where an affine function of normal noise is large; u is the point in units of .1."""
    return Model(beyond, (jnp.asarray(w, jnp.float32), jnp.asarray(0.1 * np.asarray(b))))


def beyond(params, x):
    w, b = params
    return jnp.stack([jnp.zeros(len(x)), jnp.max(x @ w - b, axis=1)], axis=1)


NORMAL = distributions.ClippedGaussian(1.0, Lp(box=None), 0.1)


def test_splitting_is_unbiased_with_few_particles():
    """Levels that a run chooses for itself say 1.6 here."""
    from scipy import stats

    found = nppr.splitting(
        gaussian(np.eye(2)[:, :1], [3.7]), NORMAL, jnp.zeros(2), 0, key=KEY, particles=50, runs=600
    )
    ratio = found.runs / stats.norm.sf(3.7)
    error = np.std(ratio) / 600**0.5
    assert error < 0.05
    assert abs(ratio.mean() - 1) < 3 * error


def test_runs_that_agree_by_chance_say_nothing_of_their_error():
    """Few particles take few values: two runs are often equal, and were an interval of no width."""
    model = Model(lambda w, x: jnp.stack([0.5 - x[:, 0], x[:, 0] - 0.5], -1), None)
    own, missed, alike = distributions.UniformBall(0.2, Lp(box=None)), 0, 0
    for seed in range(40):
        found = nppr.splitting(
            model, own, jnp.array([0.46]), 0, key=jax.random.key(seed), particles=10, runs=2
        )
        low, high = found.interval(0.95)
        missed += not low <= 0.4 <= high
        alike += "same number" in found.remark
        assert high > low
    assert alike > 0
    assert missed <= 5


def test_names_of_fields_keep_numbers_apart():
    model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    x, y = jnp.array([[0.9, 0.1], [0.505, 0.495]]), jnp.array([0, 0])
    how = {"eps_list": (1 / 255, 2 / 255), "rho": (0.001, 0.002)}
    found = nppr.prbench(model, x, y, key=KEY, **how)
    names = {"PR(0.00392157)", "PR(0.00784314)", "ProbAcc(0.001)", "ProbAcc(0.002)"}
    assert set(found) == {"acc"} | names
    with pytest.raises(ValueError, match="eps_list has a number twice"):
        nppr.prbench(model, x, y, key=KEY, eps_list=(0.1, 0.1))


def cross(params, x):
    """Both sides of a slab."""
    w, b = params
    return jnp.stack([jnp.zeros(len(x)), jnp.abs(x @ w + 1e-3) - b], axis=1)


def rounded(w, x):
    """Has no slopes."""
    return jnp.stack([jnp.zeros(len(x)), jnp.round(20 * jnp.abs(x @ w)) / 20 - 0.42], axis=1)


def outside(radius, x):
    """Of a ball: failures in every direction."""
    return jnp.stack([jnp.zeros(len(x)), jnp.sum(x**2, axis=1) - radius**2], axis=1)


def inside(radius, x):
    """Of a small ball far away."""
    square = jnp.sum((x - jnp.array([0.5, 0.0])) ** 2, axis=1)
    return jnp.stack([jnp.zeros(len(x)), radius - jnp.sqrt(square)], axis=1)


def several():
    """Models, dimensions and probabilities: one region, many, no slopes, all directions."""
    from scipy import stats

    axis, tail = jnp.eye(8)[0], stats.norm.sf
    axes = np.concatenate([np.eye(6), -np.eye(6)], axis=1)
    yield "one", gaussian(np.eye(3)[:, :1], [4.5]), 3, tail(4.5)
    yield "two sides", Model(cross, (axis, 0.45)), 8, tail(4.49) + tail(4.51)
    yield "twelve", gaussian(axes, np.full(12, 4.2)), 6, 1 - (1 - 2 * tail(4.2)) ** 6
    yield "uneven", gaussian(axes[:, :2], [4.0, 4.6]), 6, 1 - (1 - tail(4.0)) * (1 - tail(4.6))
    yield "no slopes", Model(rounded, axis), 8, 2 * tail(4.25)
    yield "small ball", Model(inside, jnp.asarray(0.1)), 2, stats.ncx2.cdf(1, 2, 25)
    yield "disc", Model(outside, jnp.asarray(0.1 * stats.chi2.isf(1e-5, 2) ** 0.5)), 2, 1e-5
    yield "sphere", Model(outside, jnp.asarray(0.1 * stats.chi2.isf(1e-5, 40) ** 0.5)), 40, 1e-5


REGIONS = {name: rest for name, *rest in several()}


@pytest.mark.parametrize("name", REGIONS)
def test_failures_in_many_places_are_found_or_the_result_says_so(name):
    model, d, truth = REGIONS[name]
    found = nppr.importance(model, NORMAL, jnp.zeros(d), 0, key=KEY, draws=500)
    low, high = found.interval(0.999)
    assert low <= truth <= high
    if name == "sphere":  # Some fifty directions of all.
        assert not found.agrees
        assert found.remark
        assert f"splitting {found.check.value:.2g}" in found.remark
        found = found.check
    else:
        assert found.agrees
        assert not found.remark
    assert found.value == pytest.approx(truth, rel=0.5 if name == "sphere" else 0.15)


def test_two_methods_that_disagree_are_marked_and_both_inside_the_interval():
    runs = np.exp(np.linspace(-0.3, 0.3, 10))
    check = nppr.Rare(3e-5 * runs, 0, 0, 0, True)
    near, apart, vague = (
        nppr.Rare(own, 0, 0, 0, True, check)
        for own in (2.8e-5 * runs, 1e-5 * runs, runs**40 * 1e-7)
    )
    assert (near.agrees, apart.agrees, vague.agrees) == (True, False, None)
    assert not near.remark
    assert "1e-05 and splitting 3.1e-05, further apart than chance allows" in apart.remark
    assert "neither confirms the other" in vague.remark
    low, high = apart.interval()
    assert low < 1e-5 < 3e-5 < high
    assert apart._replace(check=None).interval().upper < 2e-5


def test_a_check_that_met_no_failure_confirms_nothing():
    """Splitting gives up at 1e-12; importance sampling does not."""
    from scipy import stats

    model = gaussian(np.eye(2)[:, :1], [8.0])
    found = nppr.importance(model, NORMAL, jnp.zeros(2), 0, key=KEY)
    assert found.value == pytest.approx(stats.norm.sf(8.0), rel=0.1)
    assert found.agrees is None
    assert "nothing confirms" in found.remark
    alone = nppr.importance(model, NORMAL, jnp.zeros(2), 0, key=KEY, check=0)
    assert alone.check is None
    assert not alone.remark


def test_rare_failures_do_not_depend_on_the_batch_but_on_the_key():
    model, d, _ = REGIONS["twelve"]
    small = {"key": KEY, "runs": 3}
    for method, how in ((nppr.splitting, {"particles": 50}), (nppr.importance, {"draws": 100})):
        whole, again, parts, other = (
            method(model, NORMAL, jnp.zeros(d), 0, **small | how | more)
            for more in ({}, {}, {"batch_size": 7}, {"key": jax.random.key(1)})
        )
        np.testing.assert_array_equal(whole.runs, again.runs)
        np.testing.assert_array_equal(whole.runs, parts.runs)
        assert np.all(whole.runs != other.runs)
        assert (whole.evaluations, whole.fit) == (parts.evaluations, parts.fit)


def test_passes_are_counted():
    seen = []

    def counted(w, x):
        jax.debug.callback(lambda rows: seen.append(len(rows)), x[:, 0])
        return beyond(w, x)

    model = Model(counted, gaussian(np.eye(2)[:, :1], [3.0]).args[0])
    own = {"key": KEY, "runs": 3, "batch_size": 1000}

    def passes(method, **how):
        counts = []
        for repeats in (3, 4):
            jax.effects_barrier()
            seen.clear()
            found = method(model, NORMAL, jnp.zeros(2), 0, **own | {"runs": repeats} | how)
            jax.effects_barrier()
            counts.append((sum(seen), found))
        return counts

    (few, first), (more, last) = passes(nppr.splitting, particles=20)
    assert more - few == last.evaluations - first.evaluations + last.fit - first.fit
    # Those of the gate, which tries programs with a callback: ten batches of 16, and more.
    assert 0 <= few - first.evaluations - first.fit < 300
    (few, first), (more, last) = passes(nppr.importance, draws=30, check=0)
    assert more - few == last.evaluations - first.evaluations == 30
    assert 0 <= few - first.evaluations - first.fit < 300


def test_normal_vectors_become_the_noise_that_they_say():
    """Far out, too, where a float's 1 - p has no digits left."""
    from scipy import stats

    from wdjax.nppr.rare import from_normal

    u = np.linspace(-6, 6, 41)
    for sigma in (0.2, 0.3, 1.0):
        own = from_normal(
            distributions.TruncatedGaussian(2.0, sigma=sigma), jnp.asarray(u)[:, None]
        )[:, 0]
        truth = stats.truncnorm(-1 / sigma, 1 / sigma)
        lower = np.where(u < 0, truth.ppf(stats.norm.cdf(u)), truth.isf(stats.norm.sf(u)))
        np.testing.assert_allclose(own, 2 * sigma * lower, rtol=2e-5, atol=1e-6)


def test_what_counts_on_the_host_names_what_can_be_differentiated():
    x, y = samples()
    own, one = distributions.UniformBall(0.1), (x[0], y[0])

    def each(model):
        yield lambda: nppr.estimate(model, own, x, y, key=KEY).value
        yield lambda: nppr.probabilistic_accuracy(model, own, x, y, key=KEY).lower[0]
        yield lambda: nppr.importance(model, own, *one, key=KEY).value
        yield lambda: nppr.splitting(model, own, *one, key=KEY).value

    for place in range(4):
        for change in (jax.grad, jax.jit):
            with pytest.raises(ValueError, match=r"expected_loss.* differentiated"):
                change(lambda model: [*each(model)][place]())(NET)  # noqa: B023
        many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), NET)
        with pytest.raises(ValueError, match="outside of jit, vmap"):
            jax.vmap(lambda model: [*each(model)][place]())(many)  # noqa: B023


def test_what_never_fails_is_not_called_impossible():
    model, own = Model(line, jnp.array([1.0, 1.0])), distributions.UniformBall(0.1)
    x = jnp.array([0.5, 0.5])
    for method, size in ((nppr.importance, "draws"), (nppr.splitting, "particles")):
        found = method(model, own, x, 0, key=KEY, runs=2, **{size: 100})
        assert not found.found
        assert found.interval() == (0.0, 1.0)
        assert "too low or unknown" in found.remark
    with pytest.raises(ValueError, match="misclassified"):
        nppr.importance(model, own, x, 1, key=KEY)
    with pytest.raises(ValueError, match="rare events are for"):
        nppr.importance(model, distributions.UniformBall(0.1, Lp(2)), x, 0, key=KEY)


def test_collapse_to_a_point_is_seen():
    x, y = samples()
    wide = nppr.spread_within(distributions.UniformBall(0.1), x, y, key=KEY, draws=200)
    assert np.all(np.abs(wide.within - 3**-0.5) < 0.03)
    same = distributions.Custom(jax.tree_util.Partial(lambda key, x, y: jnp.full_like(x, 0.1)), 0.1)
    point = nppr.spread_within(same, x, y, key=KEY)
    assert np.all(point.within == 0)
    assert point.saturated == 1.0


def test_the_loss_is_differentiable_in_the_model():
    x, y = samples()

    def value(model):
        return nppr.expected_loss(model, distributions.UniformBall(0.2), x, y, key=KEY)

    slope = jax.grad(value)(NET).args[0]["fc2"]["bias"]
    for place in range(3):
        moved = [jax.tree.map(jnp.asarray, NET.args[0]) for _ in range(2)]
        for params, size in zip(moved, (-1e-2, 1e-2)):
            params["fc2"] = params["fc2"] | {"bias": params["fc2"]["bias"].at[place].add(size)}
        ends = [float(value(Model(NET.func, params))) for params in moved]
        assert (ends[1] - ends[0]) / 2e-2 == pytest.approx(float(slope[place]), rel=0.02, abs=1e-3)


RATIOS = np.array([1.0, 2.0, 30.0, 1e3, 1e6])


def worst(risks):
    """The closed form ``[R, n]``."""
    return np.clip(1 - RATIOS[:, None] * np.asarray(risks), 0, 1)


def test_the_worst_survival_of_counts_is_that_of_the_closed_form():
    risks = np.array([0.4, 0.05, 0.002, 0.0, 0.0])
    x = jnp.stack([0.5 + 0.2 * (1 - 2 * jnp.asarray([*risks, 0.9])), jnp.full(6, 0.5)], axis=1)
    model, own = Model(half, jnp.asarray(0.5)), distributions.UniformBall(0.2)
    found = nppr.estimate(model, own, x, np.zeros(6, int), key=KEY, draws=2000)
    curve = nppr.bounded_ratio(found, RATIOS)
    np.testing.assert_array_equal(curve.per_input[0], found.per_input)
    assert curve.value[0] == found.value
    np.testing.assert_array_equal(curve.per_input, worst(1 - found.per_input))
    low, high = curve.of_inputs(0.9999)
    assert np.all((low <= worst(risks)) & (worst(risks) <= high))
    for low, high in (curve.of_inputs(), curve.pooled(), curve.population()):
        assert np.all((low >= 0) & (low <= high) & (high <= 1))
        assert np.all(np.diff(low, axis=0) <= 1e-12)
        assert np.all(np.diff(high, axis=0) <= 1e-12)
    low, high = curve.pooled()
    assert np.all((low <= curve.value) & (curve.value <= high))
    usual = found.pooled(0.975)  # Half of the level is for the inputs' own intervals.
    np.testing.assert_allclose([low[0], high[0]], [float(end) for end in usual], atol=1e-9)
    assert "lost none of 2000 copies" in curve.remark
    assert nppr.bounded_ratio(found, 10).remark == ""
    alone = [nppr.bounded_ratio(found, ratio).value[0] for ratio in RATIOS]
    np.testing.assert_array_equal(alone, curve.value)


def test_no_distribution_of_bounded_ratio_does_worse_and_one_does_as_bad():
    """By a linear program over the densities on 40 cells of equal mass, of which some fail."""
    from scipy import optimize

    for failing, ratio in ((0, 5.0), (3, 1.0), (3, 7.0), (3, 20.0), (40, 2.0)):
        cost = -1.0 / 40 * (np.arange(40) < failing)
        bounds = [(0, ratio)] * 40
        found = optimize.linprog(cost, A_eq=np.full((1, 40), 1 / 40), b_eq=[1.0], bounds=bounds)
        assert 1 + found.fun == pytest.approx(max(0, 1 - ratio * failing / 40), abs=1e-9)


@pytest.mark.parametrize("risk", [1e-2, 1e-4, 1e-7])
def test_the_worst_survival_of_rare_failures_is_that_of_the_closed_form(risk):
    from scipy import stats

    model, how = gaussian(np.eye(2)[:, :1], [stats.norm.isf(risk)]), {"key": KEY}
    weighed = nppr.importance(model, NORMAL, jnp.zeros(2), 0, **how)
    split = nppr.splitting(model, NORMAL, jnp.zeros(2), 0, particles=300, **how)
    curve = nppr.bounded_ratio([weighed, split], RATIOS)
    low, high = curve.of_inputs(0.999)
    truth = worst([risk, risk])
    assert np.all((low <= truth) & (truth <= high))
    assert curve.remark == ""
    assert np.all(np.diff(curve.per_input, axis=0) <= 0)
    ends = curve.pooled()
    assert np.all((ends.lower <= truth[:, 0]) & (truth[:, 0] <= ends.upper))
    assert np.all(ends.upper - ends.lower < 0.9)


def test_what_is_not_known_is_not_called_robust():
    """NaN logits are failures; a search without a failure, and few copies, prove nothing."""
    x, own = jnp.array([[0.5, 0.5]]), distributions.UniformBall(0.1)
    how = {"key": KEY, "draws": 320}
    found = nppr.estimate(Model(faulty, jnp.asarray(0.1)), own, x, np.zeros(1, int), **how)
    assert found.faults[0] == 320 - found.survived[0] > 0
    curve = nppr.bounded_ratio(found, RATIOS)
    np.testing.assert_array_equal(curve.per_input, worst(found.faults / 320))
    unmet = Rare(np.zeros(5), 100, 0, 0, False)
    curve = nppr.bounded_ratio(unmet, RATIOS)
    low, high = curve.of_inputs()
    assert np.all(low == 0)
    assert np.all(high == 1)
    assert "unknown" in curve.remark
    assert curve.population().lower[0] == 0


def test_what_the_bounded_ratio_refuses_and_draws():
    rare = Rare(1e-3 * np.array([0.99, 1.0, 1.0, 1.0, 1.01]), 100, 0, 0, True)
    for bad in (0.5, [1, 1], [2, 1], [], [[1.0]], np.nan, np.inf):
        with pytest.raises(ValueError, match="increasing numbers, at least 1"):
            nppr.bounded_ratio(rare, bad)
    for bad in ([], [rare, 1e-3]):
        with pytest.raises(ValueError, match=r"nppr\.importance"):
            nppr.bounded_ratio(bad)
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda ratio: nppr.bounded_ratio(rare, ratio).value)(2.0)
    with pytest.raises(ValueError, match="confidence"):
        nppr.bounded_ratio(rare).pooled(1.0)
    curves = {"uniform": nppr.bounded_ratio(rare)}
    (axis,) = nppr.pictures.between(curves, {"NPPR": 0.9, "AR": 0.7}).axes
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == ["uniform", "PR, uniform", "NPPR", "AR"]
    assert axis.get_lines()[0].get_ydata()[0] == pytest.approx(0.999)
