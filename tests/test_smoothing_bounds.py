"""Bounds of probabilities and radii of noise, against SciPy, HiGHS, POT and exact enumeration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, sparse, stats

from wdjax.precision import float64
from wdjax.smoothing import binomial, flow, noise, votes

ALPHA = 0.05


def test_the_fixed_bound_is_scipys():
    for s, n in ((0, 10), (3, 10), (10, 10), (990, 1000), (99_990, 100_000)):
        exact = stats.binomtest(s, n, alternative="greater").proportion_ci(1 - ALPHA, "exact").low
        assert float(binomial.lower(s, n, ALPHA)) == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9, 0.97])
def test_the_randomized_bound_is_wrong_exactly_as_often_as_it_says(p):
    n, grid = 20, (np.arange(500) + 0.5) / 500
    s = np.arange(n + 1)[:, None]
    above = binomial.randomized_lower(s, n, ALPHA, grid[None]) > p
    wrong = float(np.sum(stats.binom.pmf(s[:, 0], n, p) * above.mean(axis=1)))
    assert wrong <= ALPHA + 2e-3
    assert wrong >= ALPHA - 2e-3 or p > 0.5 ** (1 / n)  # Where the cap on it counts.
    assert np.all(binomial.randomized_lower(s, n, ALPHA, grid[None]) >= binomial.lower(s, n, ALPHA))
    assert np.all(binomial.randomized_lower(s, n, ALPHA, 0.0) <= 0.5 ** (1 / n) + 1e-12)


@pytest.mark.parametrize("p", [0.3, 0.5, 0.9, 0.93])
def test_sequential_bounds_are_wrong_seldom_enough_whenever_one_looks(p):
    """The chance to be wrong at any of 120 looks, one after every draw, by enumeration."""
    most = 120
    n, s = np.arange(1, most + 1)[:, None], np.arange(most + 1)[None]
    inside = np.minimum(s, n)

    def above(alpha):
        return (binomial.evidence(p, inside, n) >= -np.log(alpha)) & (inside > p * n)

    both = above(ALPHA / 10)
    both[-1] |= binomial.lower(inside[-1], most, ALPHA * 9 / 10) > p
    for wrong in (above(ALPHA), both):
        left, lost = np.zeros(most + 1), 0.0
        left[0] = 1
        for row in wrong:
            left = (1 - p) * left + p * np.append(0.0, left[:-1])
            lost += left[row].sum()
            left[row] = 0
        assert 0 < lost <= ALPHA
    # These are the bounds that are used.
    some = np.array([5, 40, most])
    assert np.array_equal(binomial.sequence_lower(inside[some - 1], n[some - 1], ALPHA) > p,
                          above(ALPHA)[some - 1])  # fmt: skip
    used = binomial.sequential_lower(inside[-1], most, most, ALPHA) > p
    assert np.array_equal(used, both[-1])


def test_evidence_falls_in_p_where_it_is_large():
    """What the bisection of the sequential bound stands on."""
    for n in (1, 5, 40, 1000, 100_000):
        for s in {1, n // 2, n - 3, n - 1, n} - {0, -1, -2}:
            if s < 1:
                continue
            share = s / n
            ends = share * np.linspace(1e-4, 1 - 1e-9, 2000)
            p = np.unique(np.concatenate([ends, share - np.geomspace(1e-9, share * 0.999, 2000)]))
            value = binomial.evidence(p, s, n)
            large = value[1:] >= np.log(2)
            assert np.all(np.diff(value)[large] <= 1e-7)


def test_ranks_are_tested_as_scipy_does():
    for first, second in ((10, 0), (60, 40), (3, 3)):
        exact = stats.binomtest(first, first + second, 0.5).pvalue
        assert float(binomial.rank_test(first, second)) == pytest.approx(exact)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: binomial.lower(5, 4, ALPHA), "between 0 and n"),
        (lambda: binomial.lower(0.5, 4, ALPHA), "must be integers"),
        (lambda: binomial.lower(1, 4, 1.0), "alpha must lie"),
        (lambda: binomial.sequence_lower(1, 4, 0.7), "alpha must lie"),
        (lambda: binomial.randomized_lower(1, 4, ALPHA, 2.0), "uniform must lie"),
        (lambda: noise.Gaussian(0.0), "sigma must be finite and above 0"),
        (lambda: noise.Flow(0.1, cost="l2"), "cost must be"),
        (lambda: noise.Gaussian(1.0).radius(1.5), "probabilities must lie"),
        (lambda: noise.Laplace(1.0).level(-1.0), "radii must be finite"),
        (lambda: noise.Flow(0.1).error(np.ones((2, 9))), "is for images"),
        (lambda: noise.Flow(0.1).error(np.zeros((1, 4, 4, 1))), "images >= 0 that are not empty"),
    ],
)
def test_bad_numbers_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


FAMILIES = {
    "gaussian": (noise.Gaussian(0.5), stats.norm(scale=0.5)),
    "laplace": (noise.Laplace(0.5), stats.laplace(scale=0.5 / 2**0.5)),
    "uniform": (noise.Uniform(0.5), stats.uniform(-(0.75**0.5), 2 * 0.75**0.5)),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("p", [0.6, 0.9, 0.99])
def test_radii_are_those_of_the_worst_classifier(name, p):
    """The least probability, over all classifiers, a radius away: a linear program on cells."""
    own, law = FAMILIES[name]
    radius = float(own.radius(p))
    assert float(own.level(radius)) == pytest.approx(p, abs=1e-9)
    cells = np.linspace(-8, 9, 3001)
    here, there = np.diff(law.cdf(cells)), np.diff(law.cdf(cells - radius))
    least = optimize.linprog(there, A_eq=here[None], b_eq=[p], bounds=(0, 1)).fun
    assert least == pytest.approx(0.5, abs=0.005)
    assert least >= 0.5 - 1e-6  # Cells are coarser than real classifiers, which may be worse.


def test_radii_grow_from_a_half():
    for own in (*(own for own, _ in FAMILIES.values()), noise.Flow(0.01)):
        radii = own.radius([0.0, 0.5, 0.6, 0.9, 1 - 1e-9])
        assert list(radii[:2]) == [0, 0]
        assert np.all(np.diff(radii[1:]) > 0)
    ratio = noise.Flow(0.01, cost="l1").radius(0.9) / noise.Flow(0.01).radius(0.9)
    assert float(ratio) == pytest.approx(2**0.5)


@pytest.mark.fast
@pytest.mark.parametrize("name", FAMILIES)
def test_votes_see_real_noise_rounded_to_the_grid(name, key):
    own, law = FAMILIES[name]
    x = jnp.array([[0.3, 0.7]])
    asked = votes.poll(jnp.sin, own, x, None, key, 2, 40_000, None)
    pairs = np.stack([np.zeros(40_000), np.arange(40_000)]).astype(np.int32)
    z = np.asarray(votes._draw(asked, pairs), float)
    assert z.dtype == float
    steps = z / own.step
    assert np.all(steps == np.round(steps))
    for column, center in enumerate(np.asarray(x[0], float)):
        ends = np.concatenate([[-np.inf], own.step * (np.arange(-256, 384, 16) - 0.5), [np.inf]])
        expected = 40_000 * np.diff(law.cdf(ends - center))
        counted = np.histogram(z[:, column], ends)[0]
        large = expected > 5
        rare = [counted[~large].sum()], [expected[~large].sum()]
        counted = np.concatenate([counted[large], rare[0]])
        expected = np.concatenate([expected[large], rare[1]]) + 1e-9
        assert stats.chisquare(counted, expected, sum_check=False).pvalue > 1e-4
    assert abs(np.corrcoef(z.T)[0, 1]) < 0.02


@pytest.mark.fast
def test_families_never_share_a_program():
    """JAX compares dataclasses by their static fields, so these must differ."""
    structures = [jax.tree.structure(own) for own, _ in FAMILIES.values()]
    assert len({str(one) for one in structures}) == 3
    assert all(a != b for i, a in enumerate(structures) for b in structures[:i])


def test_random_numbers_are_as_exact_as_radii_assume():
    """Of ``error``: the mean deviation of float64 normals from those of exact arithmetic."""
    mpmath = pytest.importorskip("mpmath", reason="exact normal quantiles")
    u = (np.arange(400) + 0.5) / 200 - 1
    with float64():
        ours = np.asarray(jnp.sqrt(2.0) * jax.lax.erf_inv(jnp.asarray(u)))
    with mpmath.workdps(30):
        root = mpmath.sqrt(2)
        exact = [root * mpmath.erfinv(mpmath.mpf(float(value))) for value in u]
        gaps = [abs(mpmath.mpf(float(a)) - b) for a, b in zip(ours, exact)]
    assert float(sum(gaps) / len(gaps)) < 2.0**-46


def test_the_least_flow_is_the_wasserstein_distance():
    """Theorem of Levine and Feizi on a grid of 4 x 4: HiGHS on flows against POT on plans."""
    ot = pytest.importorskip("ot", reason="POT solves the transport problem")
    rng, side = np.random.default_rng(0), 4
    one, two = rng.dirichlet(np.ones(side * side), 2)
    edges = 2 * side * (side - 1)
    columns = []
    for edge in np.eye(edges):
        down = jnp.asarray(edge[: edges // 2].reshape(side - 1, side, 1))
        right = jnp.asarray(edge[edges // 2 :].reshape(side, side - 1, 1))
        columns.append(np.asarray(flow.divergence(down, right)).ravel())
    through = np.stack(columns, axis=1)
    assert np.all(through.sum(axis=0) == 0)
    signed = sparse.csr_matrix(np.hstack([through, -through]))
    least = optimize.linprog(np.ones(2 * edges), A_eq=signed, b_eq=two - one).fun
    spots = np.stack(np.meshgrid(range(side), range(side), indexing="ij"), -1).reshape(-1, 2)
    apart = spots[:, None] - spots[None]
    taxi = ot.emd2(one, two, np.abs(apart).sum(-1).astype(float))
    straight = ot.emd2(one, two, np.linalg.norm(apart, axis=-1))
    assert least == pytest.approx(taxi, abs=1e-6)
    assert straight <= taxi <= 2**0.5 * straight


def test_flow_noise_keeps_mass_and_has_its_scale(key):
    image = jnp.zeros((5, 6, 2)).at[2, 3].set(jnp.array([4.0, 1.0]))
    own = noise.Flow(0.02)
    keys = jax.random.split(key, 4000)
    moved = jax.vmap(lambda k: own.offset(k, image))(keys)
    assert np.allclose(moved.sum(axis=(1, 2)), 0, atol=1e-4)
    edges = np.array([[2, 3, 3, 3, 3, 2], *([3, 4, 4, 4, 4, 3],) * 3, [2, 3, 3, 3, 3, 2]])
    expected = 0.02 * 5 * np.sqrt(edges)[..., None]
    assert np.allclose(moved.std(axis=0), expected, rtol=0.08)
