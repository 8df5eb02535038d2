"""Budget allocation, coupling cost and exact Wasserstein distances against independent solvers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from wdjax.transport import allocate

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


@fast
@given(
    st.lists(st.floats(0, 1e3, width=32) | st.just(np.inf), min_size=1, max_size=20),
    st.floats(0, 100, width=32),
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
