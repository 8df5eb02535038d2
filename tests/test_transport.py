"""Budget allocation, coupling cost and exact Wasserstein distances against independent solvers."""

import dataclasses
import itertools
import math

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.spatial.distance import cdist

from wdjax import Lp, Model, losses, run, search
from wdjax.attacks import PGD, WDAPlusPlus
from wdjax.transport import AdversarialDistribution, allocate, spend, wasserstein

fast = pytest.mark.fast


def spent(weight, distance, order):
    weight, distance = np.asarray(weight, float), np.asarray(distance, float)
    moved = weight > 0
    return np.sum(weight[moved] * distance[moved] ** order) / len(distance)


def knapsack_value(distance, eps, order):
    """The largest total weight, by HiGHS; an infinite price is a weight fixed to 0."""
    price = np.where(np.isfinite(distance), distance, 0.0) ** order
    top = np.where(np.isfinite(distance), 1.0, 0.0)
    solution = linprog(
        -np.ones_like(price),
        A_ub=price[None] / len(price),
        b_ub=[eps**order],
        bounds=np.stack([np.zeros_like(top), top], axis=1),
    )
    return -solution.fun


@fast
@pytest.mark.parametrize("order", [1, 2, 1.5])
def test_allocation_is_the_optimum_of_the_knapsack(order):
    rng = np.random.default_rng(0)
    for trial in range(20):
        distance = rng.gamma(1.0, size=12).round(1 if trial % 2 else 6)
        distance[rng.random(12) < 0.2] = 0.0
        distance[rng.random(12) < 0.2] = np.inf
        eps = float(rng.gamma(0.7))
        weight = allocate(distance, eps, order)
        assert np.isclose(np.sum(weight), knapsack_value(distance, eps, order), rtol=1e-4)
        assert spent(weight, distance, order) <= eps**order * (1 + 1e-6)


@fast
def test_allocation_conventions():
    distance = jnp.array([0.0, jnp.inf, 0.2, 0.2, 0.0])
    assert allocate(distance, 0.0, 1).tolist() == [1, 0, 0, 0, 1]
    assert allocate(distance, 0.04, 1).tolist() == [1, 0, 1, 0, 1]  # The first of a tie is served.
    assert allocate(distance, 9.0, 2).tolist() == [1, 0, 1, 1, 1]  # The rest goes unused.
    assert allocate(distance, 0.2, jnp.inf).tolist() == [1, 0, 1, 1, 1]
    assert allocate(distance, 0.1, jnp.inf).tolist() == [1, 0, 0, 0, 1]
    assert allocate(jnp.full(3, jnp.inf), 1.0, 2).tolist() == [0, 0, 0]


@fast
@pytest.mark.parametrize("scale", [1e-25, 1e-3, 1e25])
@pytest.mark.parametrize("order", [1, 2])
def test_allocation_survives_float32_at_any_scale(scale, order):
    distance = np.random.default_rng(1).gamma(1.0, size=100_000).astype(np.float32)
    weight = np.asarray(allocate(distance * np.float32(scale), 0.5 * scale, order))
    assert np.all(np.isfinite(weight))
    share = spent(weight, distance, order) / 0.5**order
    assert share == pytest.approx(1, abs=1e-6)


@fast
def test_allocation_of_many_budgets_under_jit_and_vmap():
    distance = jnp.array([[0.1, 0.0, 0.4], [jnp.inf, 0.2, 0.3]])
    eps = jnp.linspace(0, 0.3, 4)
    many = jax.jit(jax.vmap(lambda d: allocate(d, eps, 2)))(distance)
    assert many.shape == (2, 4, 3)
    for row, single in zip(many, distance):
        for weight, budget in zip(row, eps):
            np.testing.assert_allclose(weight, allocate(single, budget, 2), rtol=1e-6)
    slope = jax.grad(lambda e: jnp.sum(allocate(distance[0], e, 1)))(0.05)
    assert slope == pytest.approx(3 / 0.4, rel=1e-5)  # The marginal sample costs .4 / 3.
    slope = jax.grad(lambda e: jnp.sum(allocate(distance[1], e, 1)))(0.05)
    assert slope == pytest.approx(3 / 0.2, rel=1e-5)  # One of the samples cannot be reached.


@fast
@given(
    st.lists(
        st.floats(0, 1e3, width=32, allow_subnormal=False) | st.just(np.inf),
        min_size=1,
        max_size=20,
    ),
    st.floats(0, 100, width=32, allow_subnormal=False),
    st.sampled_from([1, 2, 3]),
)
@settings(max_examples=60, deadline=None)
def test_allocation_never_overspends_nor_skips_a_cheaper_sample(distance, eps, order):
    size = 24  # One shape, one compilation.
    distance = np.array(distance + [np.inf] * (size - len(distance)))
    weight = np.asarray(allocate(distance, eps, order), float)
    assert np.all((weight >= 0) & (weight <= 1))
    assert spent(weight, np.float32(distance), order) <= float(eps) ** order * (1 + 1e-6)
    ranked = weight[np.argsort(np.float32(distance), kind="stable")]
    assert np.all(np.diff(ranked) <= 0)
    assert np.sum((weight > 0) & (weight < 1)) <= 1


@fast
@pytest.mark.parametrize(
    ("distance", "eps", "order", "message"),
    [
        ([0.1, np.nan], 0.1, 1, "distance"),
        ([-0.1], 0.1, 1, "distance"),
        ([[0.1]], 0.1, 1, "shapes"),
        ([0.1], -1.0, 1, "eps"),
        ([0.1], np.inf, 1, "eps"),
        ([0.1], 0.1, 0.5, "order"),
    ],
)
def test_allocation_refuses_what_it_cannot_mean(distance, eps, order, message):
    with pytest.raises(ValueError, match=message):
        allocate(np.array(distance), eps, order)


def moved(seed, n, classes, weight, shape=(3,), spread=0.4):
    """A distribution whose clouds overlap, so that the coupling of Corollary C.2 is not optimal."""
    rng = np.random.default_rng(seed)
    x = rng.random((n, *shape)).astype(np.float32)
    x_adv = (x + spread * rng.normal(size=x.shape)).astype(np.float32)
    weight = {
        "all": np.ones(n),
        "half": np.full(n, 1 / 2),
        "third": np.full(n, 1 / 3),
        "knapsack": np.where(np.arange(n) == 1, 0.37, np.arange(n) % 2),
        "any": rng.random(n),
    }[weight]
    y = rng.integers(0, classes, n)
    return AdversarialDistribution(x, x_adv, y, weight.astype(np.float32))


def ground_cost(distribution, norm):
    """All 2n atoms against the n clean ones, labels included."""
    x, x_adv, y, _ = (np.asarray(leaf, float) for leaf in distribution)
    name = {1: "cityblock", 2: "euclidean", math.inf: "chebyshev"}[norm]
    points = np.concatenate([x, x_adv]).reshape(2 * len(x), -1)
    gap = cdist(points, x.reshape(len(x), -1), name)
    return np.where(np.concatenate([y, y])[:, None] == y, gap, np.inf)


@pytest.mark.parametrize("weight", ["all", "half", "third", "knapsack", "any"])
@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("order", [1, 2])
def test_wasserstein_agrees_with_pot(weight, norm, order):
    ot = pytest.importorskip("ot")
    distribution = moved(0, 24, 3, weight)
    weights = np.asarray(distribution.weight, float)
    cost = np.minimum(ground_cost(distribution, norm), 1e3) ** order
    masses = np.concatenate([1 - weights, weights]) / 24
    expected = ot.emd2(masses, np.full(24, 1 / 24), cost) ** (1 / order)
    assert wasserstein(distribution, norm, order) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("weight", ["all", "half"])
@pytest.mark.parametrize("order", [1, 2, 3, math.inf])
def test_wasserstein_agrees_with_all_permutations(weight, order):
    n = 7 if weight == "all" else 4
    distribution = moved(1, n, 2, weight)
    cost = ground_cost(distribution, 2)
    cost = cost[n:] if weight == "all" else np.repeat(cost, 2, axis=1)
    plans = [cost[np.arange(len(cost)), p] for p in itertools.permutations(range(len(cost)))]
    if order == math.inf:
        expected = min(plan.max() for plan in plans)
    else:
        expected = min(np.mean(plan**order) ** (1 / order) for plan in plans)
    assert wasserstein(distribution, 2, order) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_bottleneck_is_the_least_distance_with_a_plan(norm):
    """Against one linear program a candidate distance, for masses that are no multiples."""
    distribution = moved(2, 8, 1, "any")
    cost, weight = ground_cost(distribution, norm), np.asarray(distribution.weight, float)
    masses = np.concatenate([1 - weight, weight, np.ones(8)])
    balance = np.concatenate([np.kron(np.eye(16), np.ones(8)), np.kron(np.ones(16), np.eye(8))])
    for level in np.unique(cost):
        bounds = [(0, None if entry <= level else 0) for entry in cost.ravel()]
        if linprog(np.zeros(cost.size), A_eq=balance, b_eq=masses, bounds=bounds).status == 0:
            break
    assert wasserstein(distribution, norm, math.inf) == pytest.approx(level, rel=1e-12)


@pytest.mark.parametrize("order", [1, 2])
def test_growing_edges_give_the_optimum_of_the_whole_program(order):
    from wdjax import exact_transport

    rng = np.random.default_rng(3)
    cost = rng.random((180, 150)) ** order
    supply, demand = rng.random(180), rng.random(150)
    demand *= supply.sum() / demand.sum()
    assert cost.size > exact_transport._DENSE
    ot = pytest.importorskip("ot")
    expected = ot.emd2(supply / supply.sum(), demand / demand.sum(), cost) * supply.sum()
    assert exact_transport.least_cost(cost, supply, demand) == pytest.approx(expected, rel=1e-9)


@given(
    st.integers(0, 10_000),
    st.sampled_from(["all", "half", "third", "knapsack", "any"]),
    st.sampled_from([1, 2, math.inf]),
    st.sampled_from([1, 1.5, 2, math.inf]),
)
@settings(max_examples=80, deadline=None)
def test_wasserstein_is_at_most_the_coupling_cost(seed, weight, norm, order):
    distribution = moved(seed, 9, 2, weight, shape=(2, 1), spread=0.3)
    distance = wasserstein(distribution, norm, order)
    assert 0 <= distance <= distribution.coupling_cost(norm, order) * (1 + 1e-6)
    if order == 1:  # Order 1 is the least of all.
        for larger in (2, math.inf):
            assert distance <= wasserstein(distribution, norm, larger) * (1 + 1e-6)


@fast
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6, 1e-9, 1e-10])
def test_distances_of_little_mass(scale):
    """On a line W_1 is the area between the distribution functions, W_inf the widest gap between
    quantiles."""
    draw = np.random.default_rng(0)
    x = draw.random((6, 1))
    x_adv, weight = x + 0.3 + draw.random((6, 1)), scale * draw.uniform(0.2, 0.9, 6)
    moved = AdversarialDistribution(x, x_adv, np.zeros(6, int), weight)
    places, mass = (
        np.concatenate([x, x, x_adv])[:, 0],
        np.concatenate([-np.ones(6), 1 - weight, weight]),
    )
    order = np.argsort(places)
    area = np.sum(np.abs(np.cumsum(mass[order])[:-1]) * np.diff(places[order])) / 6
    assert wasserstein(moved, 2, 1) == pytest.approx(area, rel=1e-5)
    start, (end, share) = np.sort(x[:, 0]), (places[6:], mass[6:])
    order, farthest, before = np.argsort(end), 0.0, 0.0
    for one in order:
        after = before + share[one]
        first, last = int(before + 1e-13), min(int(np.ceil(after - 1e-13)), 6)
        farthest = max(farthest, *np.abs(end[one] - start[first:last]))
        before = after
    assert wasserstein(moved, 2, math.inf) == pytest.approx(farthest)


@fast
def test_wasserstein_of_what_does_not_move_is_zero():
    x, y = np.ones((3, 2), np.float32), np.array([0, 1, 1])
    still = AdversarialDistribution(x, x, y, np.ones(3))
    unused = AdversarialDistribution(x, x + 1, y, np.zeros(3))
    for order in (1, 2, math.inf):
        for distribution in (still, unused):
            assert wasserstein(distribution, 2, order) == 0
            assert distribution.coupling_cost(2, order) == 0


@fast
def test_chain_is_cheaper_than_the_coupling_for_order_two_only():
    """0 -> 2 with 1 staying, or 0 -> 1 and 1 -> 2: equal for W_1, not for W_2 and W_inf."""
    x, x_adv = np.array([[0.0], [1.0]]), np.array([[2.0], [1.0]])
    distribution = AdversarialDistribution(x, x_adv, np.zeros(2, int), np.ones(2))
    assert [distribution.coupling_cost(1, p) for p in (1, 2, math.inf)] == [1, 2**0.5, 2]
    assert [wasserstein(distribution, 1, p) for p in (1, 2, math.inf)] == [1, 1, 1]


@fast
def test_accuracy_and_loss_follow_equation_11():
    model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    distribution = moved(4, 10, 2, "any", shape=(2,))
    x, x_adv, y, weight = map(jnp.asarray, distribution)
    right = [losses.margin(model(points), y) < 0 for points in (x, x_adv)]
    expected = jnp.mean((1 - weight) * right[0] + weight * right[1])
    assert distribution.accuracy(model) == pytest.approx(float(expected))
    loss = [losses.cross_entropy(model(points), y) for points in (x, x_adv)]
    expected = jnp.mean((1 - weight) * loss[0] + weight * loss[1])
    for batch_size in (None, 1, 3, 10, 99):
        found = distribution.expected_loss(model, batch_size=batch_size)
        assert found == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(ValueError, match="batch_size"):
        distribution.accuracy(model, batch_size=0)


def _tanh_mlp(params, x):
    for weight, bias in params[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = params[-1]
    return x @ weight + bias


@fast
@pytest.mark.parametrize("loss", [losses.cross_entropy, losses.margin, losses.softplus_margin])
def test_expected_loss_is_differentiable_in_the_model_and_the_weights(loss):
    """Against central differences in float64, with whole, absent and fractional weights."""
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        rng = np.random.default_rng(9)
        params = [
            (jnp.array(rng.normal(size=(a, b))), jnp.array(rng.normal(size=b)))
            for a, b in itertools.pairwise((3, 5, 4))
        ]
        x, x_adv = (jnp.array(rng.random((6, 3))) for _ in range(2))
        y, weight = jnp.arange(6) % 4, jnp.array([0.0, 1.0, 0.3, 0.8, 1.0, 0.0])

        @jax.jit
        def expected(params, weight):
            distribution = AdversarialDistribution(x, x_adv, y, weight)
            return distribution.expected_loss(Model(_tanh_mlp, params), loss)

        def checked(flat):
            return expected(*unravel(flat))

        @jax.jit
        def fixed(params):  # Nothing but the parameters is traced here.
            distribution = AdversarialDistribution(x, x_adv, y, weight)
            return distribution.expected_loss(Model(_tanh_mlp, params), loss, batch_size=4)

        flat, unravel = jax.flatten_util.ravel_pytree((params, weight))
        assert flat.dtype == np.float64
        step = 1e-6 * jnp.eye(flat.size)
        ahead, behind = (np.array([checked(flat + way * s) for s in step]) for way in (1, -1))
        slope = jax.flatten_util.ravel_pytree(jax.grad(expected, (0, 1))(params, weight))[0]
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-9)
        alone = jax.flatten_util.ravel_pytree(jax.jit(jax.grad(fixed))(params))[0]
        np.testing.assert_allclose(alone, slope[: alone.size], rtol=1e-12, atol=1e-14)


@fast
def test_atoms_without_mass_add_nothing_whatever_their_loss():
    model = Model(lambda w, x: jnp.log(x) @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    x, zero = np.full((2, 2), 0.5, np.float32), np.zeros((2, 2), np.float32)
    unused = AdversarialDistribution(x, zero, np.array([0, 1]), np.zeros(2, np.float32))
    whole = AdversarialDistribution(zero, x, np.array([0, 1]), np.ones(2, np.float32))
    for distribution in (unused, whole):
        assert distribution.expected_loss(model) == pytest.approx(math.log(2))


@fast
@pytest.mark.parametrize(
    ("attack", "norm", "order"),
    [(PGD(Lp(2), steps=3), 2, math.inf), (WDAPlusPlus(Lp(2), rivals=2), 2, 2)],
)
def test_what_an_attack_found_keeps_its_promises(attack, norm, order):
    rng = np.random.default_rng(8)
    model = Model(lambda w, x: x @ w, jnp.asarray(rng.normal(size=(4, 3)), jnp.float32))
    x = jnp.asarray(rng.random((20, 4)), jnp.float32)
    y = jnp.where(rng.random(20) < 0.8, jnp.argmax(model(x), axis=-1), 0)
    result = run(attack, model, x, y, eps=0.1, order=order)
    found = AdversarialDistribution.from_result(x, y, result)
    assert found.accuracy(model, batch_size=7) == pytest.approx(float(result.accuracy), abs=1e-6)
    assert 0 < wasserstein(found, norm, order) <= found.coupling_cost(norm, order) * (1 + 1e-9)
    assert found.coupling_cost(norm, order) <= 0.1 * (1 + 1e-5)


@fast
@pytest.mark.parametrize("order", [1, 2, math.inf])
def test_coupling_cost_is_the_same_under_jit(order):
    distribution = jax.tree.map(jnp.asarray, moved(5, 6, 2, "knapsack"))
    traced = jax.jit(lambda d: d.coupling_cost(2, order))(distribution)
    exact = distribution.coupling_cost(2, order)
    assert isinstance(exact, float)
    assert traced == pytest.approx(exact, rel=1e-6)


@fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.full(4, 1.5)}, "weight"),
        ({"weight": np.full(4, np.nan)}, "weight"),
        ({"weight": np.ones(3)}, "shapes"),
        ({"y": np.array([0, np.nan, 1, 1])}, "integer labels, got float"),
        ({"x_adv": np.ones((4, 2))}, "shapes"),
        ({"x_adv": np.full((4, 3), np.inf)}, "finite"),
    ],
)
def test_broken_distributions_are_refused(change, message):
    distribution = moved(6, 4, 2, "half")._replace(**change)
    with pytest.raises(ValueError, match=message):
        wasserstein(distribution, 2, 1)
    with pytest.raises(ValueError, match=message):
        distribution.coupling_cost(2, 1)


@fast
def test_wasserstein_refuses_traces_and_unknown_geometry():
    distribution = jax.tree.map(jnp.asarray, moved(7, 4, 2, "half"))
    with pytest.raises(ValueError, match="coupling_cost"):
        jax.jit(lambda d: wasserstein(d, 2, 1))(distribution)
    with pytest.raises(ValueError, match="norm"):
        wasserstein(distribution, 3, 1)
    with pytest.raises(ValueError, match="order"):
        wasserstein(distribution, 2, 0)


@fast
@pytest.mark.parametrize("cost", [np.inf, np.nan])
@pytest.mark.parametrize("kappa", [None, 1.0])
def test_costs_that_are_no_numbers_are_never_a_robust_sample(cost, kappa):
    """As a sample that no budget reaches, or for nothing, it would be counted."""
    model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    x, y = jnp.array([[0.6, 0.4], [0.7, 0.3]]), jnp.array([0, 0])
    found = search(PGD(steps=3), model, x, y, eps=0.3)
    broken = dataclasses.replace(found, cost=found.cost.at[0].set(cost))
    with pytest.raises(ValueError, match="cost nan"):
        spend(broken, eps=2.0, order=1, kappa=kappa)
    traced = jax.jit(lambda f: spend(f, eps=2.0, order=1, kappa=kappa).accuracy)(broken)
    assert np.isnan(traced)
