"""The metrics of seed 003 against their formulas, and their edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import wdjax
from wdjax import metrics

pytestmark = pytest.mark.fast

CORRECT = np.array([True, True, False, True, False])
SUCCESS = np.array([True, False, True, False, False])
DISTANCE = np.array([0.5, np.inf, 0.0, 1.5, 1.0])


def test_rates_follow_their_definitions():
    assert metrics.attack_success_rate(SUCCESS) == pytest.approx(2 / 5)
    assert metrics.attack_success_rate(SUCCESS, CORRECT) == pytest.approx(1 / 3)
    assert metrics.robust_accuracy(CORRECT, SUCCESS) == pytest.approx(2 / 5)
    assert np.isnan(metrics.attack_success_rate(SUCCESS, np.zeros(5, bool)))
    for success in (SUCCESS, CORRECT):  # ASR = 1 - accuracy after the attack.
        accuracy_after = np.mean(~success)
        assert metrics.attack_success_rate(success) == pytest.approx(1 - accuracy_after)


def test_several_attacks_count_by_their_pointwise_worst():
    both = np.stack([SUCCESS, np.array([False, True, False, False, False])])
    assert metrics.robust_accuracy(CORRECT, both) == pytest.approx(1 / 5)


def test_accuracy_takes_the_first_of_a_tie():
    logits = jnp.array([[1.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 1.0, 5.0]])
    assert metrics.correct(logits, jnp.array([1, 0, 2])).tolist() == [False, True, True]
    assert metrics.accuracy(logits, jnp.array([1, 0, 2])) == pytest.approx(2 / 3)
    assert metrics.targeted_attack_success_rate(logits, jnp.array([0, 1, 0])) == pytest.approx(
        1 / 3
    )


def test_what_is_no_number_is_not_correct():
    """``argmax`` finds the first NaN."""
    logits = jnp.array([[jnp.nan, 1.0], [1.0, jnp.nan], [jnp.nan, jnp.nan], [jnp.inf, 0.0]])
    assert metrics.correct(logits, jnp.zeros(4, int)).tolist() == [False, False, False, True]


def test_distances_are_those_of_the_successful():
    assert metrics.mean_distance(DISTANCE, SUCCESS) == pytest.approx(0.25)
    assert metrics.median_distance(DISTANCE, SUCCESS) == pytest.approx(0.25)
    assert np.isnan(metrics.mean_distance(DISTANCE, np.zeros(5, bool)))
    assert np.isnan(metrics.median_distance(DISTANCE, np.zeros(5, bool)))


def test_minimum_perturbation_statistics():
    found = metrics.minimum_perturbation(DISTANCE)
    assert [float(value) for value in found] == pytest.approx([0.8, 0.75, 0.75, 0.0, 1.5, 1.0])
    nothing = metrics.minimum_perturbation(np.full(3, np.inf))
    assert nothing.found == 0
    assert nothing.median_of_all == np.inf
    assert np.all(np.isnan([nothing.mean, nothing.median, nothing.least, nothing.largest]))


@given(st.lists(st.integers(0, 8) | st.just(np.inf), min_size=9, max_size=9))
@settings(max_examples=40, deadline=None)
def test_curve_and_areas_agree(distance):
    """Distances on a grid of 1/2 with budgets on its midpoints: trapezoids meet the steps."""
    distance = np.array(distance) / 2
    eps = np.linspace(0, 4, 9)
    curve = metrics.robustness_curve(distance, eps)
    expected = [np.mean(distance > budget) for budget in eps]
    np.testing.assert_allclose(curve.accuracy, expected, atol=1e-6)
    assert np.all(np.diff(curve.accuracy) <= 0)
    steps = metrics.step_area(distance, 4.0)
    left = np.sum(np.array(expected[:-1]) * 0.5)
    assert steps == pytest.approx(left, abs=1e-5)
    assert curve.area == pytest.approx(left - (expected[0] - expected[-1]) / 4, abs=1e-5)


def test_measured_curve_calls_once_a_budget():
    asked = []

    def accuracy_at(eps):
        asked.append(float(eps))
        return np.mean(eps < DISTANCE)

    eps = np.array([0.0, 0.5, 1.0])
    curve = metrics.measured_curve(accuracy_at, eps)
    assert asked == eps.tolist()
    np.testing.assert_allclose(curve.accuracy, metrics.robustness_curve(DISTANCE, eps).accuracy)


def test_metrics_run_under_jit_and_vmap():
    eps = jnp.array([0.1, 0.7])
    bank = jnp.stack([DISTANCE, DISTANCE + 1])

    @jax.jit
    @jax.vmap
    def summary(distance):
        success = distance < 1
        return (
            metrics.robust_accuracy(CORRECT, success),
            metrics.robustness_curve(distance, eps).area,
            metrics.minimum_perturbation(distance),
            metrics.median_distance(distance, success),
        )

    for row, distance in enumerate(bank):
        alone = metrics.minimum_perturbation(distance)
        found = jax.tree.map(lambda leaf: leaf[row], summary(bank))  # noqa: B023
        np.testing.assert_allclose(found[2], alone, rtol=1e-6)
        assert found[1] == pytest.approx(float(metrics.robustness_curve(distance, eps).area))


@pytest.mark.parametrize("n", [1, 7, 100])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
def test_intervals_are_those_of_scipys_binomial_test(n, confidence):
    successes = np.arange(n + 1)
    interval = metrics.clopper_pearson(successes, n, confidence)
    for k in {0, 1, n // 2, n}:
        expected = stats.binomtest(k, n).proportion_ci(confidence, "exact")
        assert interval.lower[k] == pytest.approx(expected.low, abs=1e-9)
        assert interval.upper[k] == pytest.approx(expected.high, abs=1e-9)
    assert interval.lower[0] == 0
    assert interval.upper[n] == 1


def test_intervals_cover():
    n, counts = 25, np.arange(26)
    interval = metrics.clopper_pearson(counts, n)
    for p in np.linspace(0.01, 0.99, 50):
        covered = (interval.lower <= p) & (p <= interval.upper)
        assert stats.binom.pmf(counts, n, p)[covered].sum() >= 0.95


def bernstein(x, alpha=0.025):
    """The width of Maurer and Pontil's empirical Bernstein interval, both sides at alpha."""
    log = np.log(2 / alpha)
    half = np.sqrt(2 * x.var(ddof=1) * log / len(x)) + 7 * log / (3 * (len(x) - 1))
    return min(1, x.mean() + half) - max(0, x.mean() - half)


@pytest.mark.parametrize("n", [20, 50, 250, 1000])
def test_intervals_of_bounded_means_are_tight(n):
    """Narrower than empirical Bernstein, and for counts not far from Clopper and Pearson."""
    rng = np.random.default_rng(n)
    for x in (
        1 - (rng.random(n) < 0.02) * rng.uniform(0.5, 1, n), rng.beta(4, 1, n), np.ones(n),
        rng.uniform(0.4, 0.6, n), np.resize([0.0, 1.0], n),
    ):  # fmt: skip
        low, high = metrics.mean_interval(x)
        assert low <= x.mean() <= high
        assert high - low < 0.9 * bernstein(x)
    exact = metrics.clopper_pearson(n // 2, n)
    assert high - low < 1.6 * (exact.upper - exact.lower)


def test_intervals_of_bounded_means_keep_what_must_not_matter():
    rng = np.random.default_rng(0)
    x = rng.beta(2, 1, 60)
    low, high = metrics.mean_interval(x)
    np.testing.assert_allclose(metrics.mean_interval(rng.permutation(x)), (low, high), atol=1e-8)
    np.testing.assert_allclose(metrics.mean_interval(1 - x), (1 - high, 1 - low), atol=1e-8)
    moved = metrics.mean_interval(3 * x - 1, span=(-1, 2))
    np.testing.assert_allclose(moved, (3 * low - 1, 3 * high - 1), atol=1e-7)
    wider = metrics.mean_interval(x, 0.99)
    assert wider.lower < low < high < wider.upper
    many = metrics.mean_interval(np.tile(x, 100))
    assert many.upper - many.lower < 0.15 * (high - low)
    # One draw tells little, and of equal draws no interval is a point.
    assert metrics.mean_interval([0.5]) == (0, 1)
    assert metrics.mean_interval(np.ones(50)).lower < 0.95
    assert metrics.mean_interval(np.zeros(50)).upper > 0.05


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.mean_interval([]), "at least one"),
        (lambda: metrics.mean_interval([0.5, 1.1]), "in the span"),
        (lambda: metrics.mean_interval([0.5, np.nan]), "in the span"),
        (lambda: metrics.mean_interval([[0.5]]), "in the span"),
        (lambda: metrics.mean_interval([0.5], 1.0), "confidence"),
        (lambda: metrics.mean_interval([0.5], span=(1.0, 1.0)), "in the span"),
        (lambda: metrics.clopper_pearson(3, 2), "successes"),
        (lambda: metrics.clopper_pearson(0.5, 2), "integers"),
        (lambda: metrics.clopper_pearson(0, 0), "n >= 1"),
        (lambda: metrics.clopper_pearson(1, 2, 95), "confidence"),
        (lambda: metrics.robust_accuracy(CORRECT, SUCCESS[:2]), "shapes"),
        (lambda: metrics.mean_distance(DISTANCE, SUCCESS[:2]), "shapes"),
        (lambda: metrics.robustness_curve(DISTANCE, np.array([1.0, 0.5])), "increasing"),
        (lambda: metrics.measured_curve(lambda eps: eps, 0.5), "increasing"),
    ],
)
def test_misuse_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


NONE = np.array([np.nan, 0.1])


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.robustness_curve(NONE, np.array([0.0, 0.2])),
        lambda: metrics.minimum_perturbation(NONE),
        lambda: metrics.step_area(NONE, 1.0),
        lambda: metrics.robustness_curve(-DISTANCE, np.array([0.0, 0.2])),
        lambda: metrics.minimum_perturbation(np.zeros(0)),
        lambda: metrics.robustness_curve(np.zeros((2, 2)), np.array([0.0, 0.2])),
        lambda: metrics.accuracy(jnp.eye(4), np.array([0, 1, 2, 0])[:, None]),
        lambda: metrics.accuracy(jnp.eye(4), np.eye(4)),
        lambda: metrics.accuracy(jnp.eye(4), np.array([0])),
        lambda: metrics.targeted_attack_success_rate(jnp.eye(3), np.array([[0], [2], [2]])),
        lambda: metrics.attack_success_rate(np.ones(3), np.ones((3, 1))),
    ],
)
def test_what_is_no_distance_or_label_is_refused(call):
    with pytest.raises(ValueError, match=r"distances|logits must be|must both be"):
        call()


def test_an_unknown_distance_is_never_robust():
    curve = jax.jit(lambda d: metrics.robustness_curve(d, jnp.array([0.0, 0.2])).accuracy)
    assert np.isnan(curve(NONE)).all()
    model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    x = np.array([[0.6, 0.4], [np.nan, 0.4], [1.5, 0.4], [0.6, 0.4]], np.float32)
    y = np.array([0, 0, 0, 9])
    search = jax.jit(lambda x, y: wdjax.search(wdjax.attacks.WDAPlusPlus(), model, x, y))
    distance = np.asarray(metrics.flip_distance(search(x, y)))
    assert np.isfinite(distance).tolist() == [True, False, False, False]
    assert np.isnan(distance[1:]).all()
