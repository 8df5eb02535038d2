"""The l_r geometry against closed forms, convex solvers and exhaustive enumeration."""

import itertools
import math

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings

from wdjax import norms

NORMS = [1, 2, math.inf]
ORDERS = pytest.mark.parametrize("norm", NORMS)


def numbers(shape, low=-3.0, high=3.0):
    return hnp.arrays(np.float32, shape, elements=st.floats(low, high, width=32))


def solve_projection(z, center, radius, norm, box):
    """The projection in float64, by a root of the multiplier of the norm's constraint."""
    low, high = box if box is not None else (-np.inf, np.inf)
    if norm == math.inf:
        return np.clip(np.clip(z, center - radius, center + radius), low, high)

    def point(multiplier):
        """Minimises ``|p - z|^2 / 2`` plus the multiplier times the constraint, in the box."""
        if norm == 1:
            step = np.sign(z - center) * np.maximum(np.abs(z - center) - multiplier, 0)
        else:
            step = (z - center) / (1 + multiplier)
        return np.clip(center + step, low, high)

    def excess(multiplier):
        return np.linalg.norm(point(multiplier) - center, norm) - radius

    if excess(0.0) <= 0:
        return point(0.0)
    # Beyond this multiplier every step is inside.
    most = np.abs(z - center).max() if norm == 1 else np.linalg.norm(z - center) / radius
    return point(scipy.optimize.brentq(excess, 0.0, most, xtol=1e-15, rtol=1e-14))


@pytest.mark.fast
@ORDERS
def test_norm_is_numpys(norm):
    x = np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32)
    expected = np.linalg.norm(x.reshape(5, -1), norm, axis=1)
    np.testing.assert_allclose(norms.lp_norm(jnp.array(x), norm), expected, rtol=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_euclidean_norm_neither_under_nor_overflows(scale):
    x = jnp.full((1, 4), scale, jnp.float32)
    np.testing.assert_allclose(norms.lp_norm(x, 2), [2 * scale], rtol=1e-6)


@pytest.mark.fast
@ORDERS
def test_gradients_at_the_origin_are_zero(norm):
    zero = jnp.zeros((2, 3))
    assert not np.any(jax.grad(lambda x: norms.lp_norm(x, norm).sum())(zero))
    assert not np.any(norms.dual_maximizer(zero, norm))
    for project in (
        lambda z: norms.project(z, zero, 0.5, norm),
        lambda z: norms.project(z, zero, 0.0, norm),
        lambda z: norms.project_in_box(z, zero + 0.5, 0.5, norm, (0.0, 1.0)),
    ):
        assert np.all(np.isfinite(jax.jacobian(project)(zero)))


@pytest.mark.fast
@ORDERS
def test_dual_maximizer_attains_the_dual_norm(norm):
    g = jax.random.normal(jax.random.key(0), (20, 7))
    h = norms.dual_maximizer(g, norm)
    np.testing.assert_allclose(norms.lp_norm(h, norm), 1.0, rtol=1e-6)
    np.testing.assert_allclose(
        jnp.sum(g * h, axis=-1), norms.lp_norm(g, norms.dual(norm)), rtol=1e-5
    )


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
@ORDERS
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_projection_is_the_nearest_point(norm, box, data):
    z = data.draw(numbers(4, -2, 3), "z")
    center = data.draw(numbers(4, 0, 1), "center")
    radius = data.draw(st.floats(0.125, 2.0, width=32), "radius")
    expected = solve_projection(z.astype(float), center.astype(float), radius, norm, box)
    arrays = jnp.array(z)[None], jnp.array(center)[None]
    if box is None:
        found = norms.project(*arrays, radius, norm)[0]
    else:
        found = norms.project_in_box(*arrays, radius, norm, box)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # Without multipliers: no feasible point makes an acute angle with what is left.
    tried = center + radius * np.random.default_rng(0).uniform(-1, 1, (2000, 4))
    tried = tried if box is None else np.clip(tried, *box)
    tried = tried[np.linalg.norm(tried - center, norm, axis=1) <= radius]
    left, scale = z.astype(float) - found, 1 + np.abs(z).max()
    assert ((tried - np.asarray(found)) @ left).max(initial=0.0) <= 1e-5 * scale**2


@pytest.mark.fast
@ORDERS
def test_points_stay_feasible_in_many_dimensions(norm):
    key = jax.random.key(1)
    center = jax.random.uniform(key, (50, 28, 28))
    z = center + 3 * jax.random.normal(jax.random.fold_in(key, 1), center.shape)
    for radius in (1e-4, 0.03, 0.1, 5.0):
        slack = 1e-6 * radius  # What the driver allows before it takes a point for infeasible.
        ball = norms.project(z, center, radius, norm)
        assert np.all(norms.lp_norm(ball - center, norm) <= radius + slack)
        for project in (norms.project_in_box, norms.retract):
            both = project(z, center, radius, norm, (0.0, 1.0))
            assert np.all((both >= 0) & (both <= 1))
            assert np.all(norms.lp_norm(both - center, norm) <= radius + slack)


@pytest.mark.fast
@ORDERS
def test_points_inside_do_not_move_and_radius_zero_gives_the_center(norm):
    center = jax.random.uniform(jax.random.key(2), (6, 5))
    inside = jnp.clip(center + 1e-3, 0, 1)
    np.testing.assert_array_equal(norms.project(inside, center, 1.0, norm), inside)
    far = center + 2.0
    np.testing.assert_array_equal(norms.project(far, center, 0.0, norm), center)
    np.testing.assert_array_equal(norms.retract(far, center, 0.0, norm, (0, 1)), center)
    np.testing.assert_allclose(norms.project_in_box(far, center, 0.0, norm, (0, 1)), center)
    np.testing.assert_allclose(norms.project_in_box(inside, center, 1.0, norm, (0, 1)), inside)


@pytest.mark.fast
@ORDERS
def test_radius_may_differ_by_row_and_be_traced(norm):
    center = jnp.zeros((3, 4))
    z = jnp.full((3, 4), 2.0)
    radii = jnp.array([0.0, 1.0, 100.0])
    found = jax.jit(lambda r: norms.project(z, center, r, norm))(radii)
    expected = [norms.project(z[:1], center[:1], float(r), norm)[0] for r in radii]
    np.testing.assert_allclose(found, jnp.stack(expected), rtol=1e-6)


@pytest.mark.fast
def test_linf_ball_holds_every_projected_float():
    center = jax.random.uniform(jax.random.key(3), (100, 50))
    radius = np.float32(8 / 255)
    z = norms.project(center + 1.0, center, radius, math.inf)
    assert np.all(np.asarray(z) - np.asarray(center) <= radius)


def bisected(z, center, radius, box):
    """The l1 projection on ball and box by bisection of its multiplier in float64."""
    z, center = z.astype(float), center.astype(float)
    size, sign = np.abs(z - center), np.sign(z - center)
    room = np.where(sign > 0, box[1] - center, center - box[0])
    low, high = 0.0, size.max()
    for _ in range(200):
        middle = (low + high) / 2
        over = np.clip(size - middle, 0, room).sum() > radius
        low, high = (middle, high) if over else (low, middle)
    return center + sign * np.clip(size - high, 0, room)


@pytest.mark.fast
@pytest.mark.parametrize("box", [(0.0, 1.0), (-1e9, 1e9), (-4.0, 16.0)])
def test_l1_projection_is_the_float64_one_in_many_dimensions(box):
    rng = np.random.default_rng(0)
    center = rng.uniform(0, 1, (6, 300)).astype(np.float32)
    center[1:3] = rng.integers(0, 2, (2, 300))  # Corners of the unit box.
    z = (center + rng.normal(size=center.shape) * [[0.01], [1], [30], [0.1], [1], [1]]).astype(
        np.float32
    )
    z[3, 0], z[4] = 50.0, center[4] + 1  # A far outlier; all equal.
    center[5, :150], z[5, 150:] = 1.0, 0.0
    for radius in (1e-4, 0.03, 1.0, 7.0, 40.0, 1e4):
        found = np.asarray(norms.project_in_box(z, center, radius, 1, box))
        expected = np.stack([bisected(*rows, radius, box) for rows in zip(z, center)])
        # Rounding of the points themselves; the outlier's share is resolved to its own last bit.
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-6)
        length = np.abs(found.astype(float) - center).sum(axis=1)
        best = np.abs(expected - center).sum(axis=1)
        assert np.all(length <= radius * (1 + 1e-6))
        assert np.all(length >= best - 1e-4 - 1e-4 * best)
        np.testing.assert_array_equal(norms.retract(z, center, radius, 1, box), found)


@pytest.mark.fast
def test_l1_projection_has_the_derivative_of_its_active_set():
    z, center = jnp.array([[1.4, 0.6, 0.45, 0.05]]), jnp.array([[0.5, 0.5, 0.0, 0.0]])
    # Lengths .9, .1, .45, .05; room .5, .5, 1, 1; lam = .2: the first is full, the third free.
    for radius in (0.75, jnp.array([0.75])):
        found = norms.project_in_box(z, center, radius, 1, (0.0, 1.0))
        np.testing.assert_allclose(found, [[1.0, 0.5, 0.25, 0.0]], atol=1e-6)
    slope = jax.grad(lambda r: norms.project_in_box(z, center, r, 1, (0.0, 1.0))[0, 2])(0.75)
    np.testing.assert_allclose(slope, 1.0, rtol=1e-5)
    slope = jax.grad(lambda r: norms.project(z, center, r, 2)[0, 0])(0.5)
    np.testing.assert_allclose(slope, 0.9 / np.linalg.norm(z - center), rtol=1e-5)
    jacobian = jax.jacobian(lambda z: norms.project(z, center, 0.5, 1)[0])(z)[:, 0]
    # Free are the first and the third, lam = .425.
    expected = np.zeros((4, 4))
    expected[np.ix_([0, 2], [0, 2])] = [[0.5, -0.5], [-0.5, 0.5]]
    np.testing.assert_allclose(jacobian, expected, atol=1e-5)


# Steps.


@pytest.mark.fast
@pytest.mark.parametrize("norm", [2, math.inf])
def test_steps_but_l1_are_the_dual_maximizers_to_the_bit(norm):
    x, g = jax.random.normal(jax.random.key(4), (2, 5, 3, 7))
    expected = x + 0.3 * norms.dual_maximizer(g, norm)
    for box in (None, (0.0, 1.0)):
        np.testing.assert_array_equal(norms.ascend(x, g, 0.3, norm, box), expected)
        np.testing.assert_array_equal(norms.ascend(x, g, jnp.full(5, 0.3), norm, box), expected)


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_l1_step_maximizes_its_model(box, data):
    x = data.draw(numbers(4, 0, 1), "x").astype(float)
    g = data.draw(numbers(4, -2, 2), "g").astype(float)
    size = data.draw(st.floats(0.125, 3.0, width=32), "size")
    moved = norms.ascend(jnp.array(x)[None], jnp.array(g)[None], size, 1, box)[0]
    low, high = (0 - x, 1 - x) if box else (np.full(4, -9.0), np.full(4, 9.0))
    edge = 64 * np.finfo(np.float32).eps  # Who has less room than this is left out of the norm.
    g = np.where(((g > 0) & (high <= edge)) | ((g < 0) & (low >= -edge)), 0, g)
    if np.linalg.norm(g) < 1e-3:
        return  # Flat: any step is as good.
    g /= np.linalg.norm(g)

    reach = norms._REACH * size

    def model(h):
        return g @ h - h @ h / (2 * reach)

    # The maximiser of the model is the feasible step nearest to its unconstrained one.
    best = solve_projection(reach * g, np.zeros(4), size, 1, (low, high))
    h = np.asarray(moved, float) - x
    assert np.abs(h).sum() <= size * (1 + 1e-6)
    assert np.all((h >= low - 1e-7) & (h <= high + 1e-7))
    assert model(h) >= model(best) - 1e-5


@pytest.mark.fast
@ORDERS
@settings(max_examples=30, deadline=None)
@given(
    # XLA flushes subnormal numbers to 0 on CPUs.
    x=hnp.arrays(np.float32, (3, 5), elements=st.floats(0, 1, width=32, allow_subnormal=False)),
    g=hnp.arrays(np.float32, (3, 5), elements=st.floats(width=32, allow_infinity=False)),
    size=st.floats(0, 1e4, width=32, allow_subnormal=False),
)
def test_steps_are_finite_and_short_and_in_the_box(norm, x, g, size):
    moved = np.asarray(norms.ascend(jnp.array(x), jnp.array(g), size, norm, (0.0, 1.0)))
    assert np.all(np.isfinite(moved))
    assert np.all(moved[np.isnan(g) | (g == 0)] == x[np.isnan(g) | (g == 0)])
    if norm == 1:
        assert np.all((moved >= 0) & (moved <= 1))
        assert np.all(np.abs(moved.astype(float) - x).sum(axis=1) <= size * (1 + 1e-6))
        assert np.all((moved - x) * np.sign(np.nan_to_num(g)) >= 0)


@pytest.mark.fast
@ORDERS
def test_steps_take_a_size_per_row_under_vmap_and_jit(norm):
    x, g = jax.random.uniform(jax.random.key(5), (2, 4, 6))
    size = jnp.array([0.0, 0.1, 1.0, 5.0])
    found = jax.jit(lambda x, g, s: norms.ascend(x, g, s, norm, (0.0, 1.0)))(x, g, size)
    one = jax.vmap(lambda x, g, s: norms.ascend(x[None], g[None], s, norm, (0.0, 1.0))[0])
    np.testing.assert_allclose(found, one(x, g, size), atol=1e-6)
    np.testing.assert_array_equal(found[0], x[0])


# Operator norms.


def signs(k):
    return np.array(list(itertools.product([-1.0, 1.0], repeat=k)))


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(1, 5), (3, 7), (10, 4), (6, 6)])
def test_operator_norm_is_the_exhaustive_one(shape):
    jacobian = np.random.default_rng(sum(shape)).normal(size=shape)
    exact = {
        1: np.abs(jacobian).max(),
        2: np.linalg.norm(jacobian, 2),
        math.inf: np.abs(signs(shape[0]) @ jacobian).sum(axis=1).max(),
    }
    for norm, value in exact.items():
        lower, upper = norms.operator_norm(jnp.array(jacobian, jnp.float32), norm)
        np.testing.assert_allclose([lower, upper], value, rtol=2e-4)
        assert lower <= value * (1 + 1e-6)
        assert upper >= value * (1 - 1e-7)


def test_operator_norm_beyond_enumeration_is_bracketed():
    rng = np.random.default_rng(0)
    left = signs(18)[: 2**17]
    for low_rank in (False, True):
        jacobian = rng.normal(size=(18, 20))
        if low_rank:
            jacobian = rng.normal(size=(18, 1)) @ rng.normal(size=(1, 20))
        exact = np.abs(left @ jacobian).sum(axis=1).max()
        lower, upper = norms.operator_norm(jnp.array(jacobian, jnp.float32), math.inf)
        assert 0.9 * exact <= lower <= exact * (1 + 1e-6)
        assert exact * (1 - 1e-7) <= upper <= 2.2 * exact


@settings(max_examples=30, deadline=None)
@given(
    jacobian=st.one_of(numbers((1, 4), -10, 10), numbers((3, 2), -10, 10)),
    norm=st.sampled_from(NORMS),
)
def test_operator_norm_is_an_upper_bound(jacobian, norm):
    rng = np.random.default_rng(0)
    u = rng.normal(size=(200, jacobian.shape[1]))
    u = np.concatenate([u, np.sign(u), np.eye(u.shape[1])])
    image = np.linalg.norm(u @ jacobian.T.astype(float), norms.dual(norm), axis=1)
    sampled = np.max(image / np.linalg.norm(u, norm, axis=1))
    lower, upper = norms.operator_norm(jnp.array(jacobian), norm)
    assert sampled <= upper * (1 + 1e-6) + 1e-30
    assert lower <= upper


@pytest.mark.fast
@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_spectral_norm_neither_under_nor_overflows(scale):
    lower, upper = norms.operator_norm(scale * jnp.eye(3), 2)
    np.testing.assert_allclose([lower, upper], scale, rtol=1e-3)
    assert upper >= scale


@pytest.mark.fast
def test_zero_matrix_has_norm_zero():
    for norm in NORMS:
        assert norms.operator_norm(jnp.zeros((3, 4)), norm) == (0, 0)


@pytest.mark.fast
def test_bad_input_is_explained():
    with pytest.raises(ValueError, match="1, 2 or inf"):
        norms.lp_norm(jnp.ones((1, 2)), 3)
    with pytest.raises(ValueError, match="1, 2 or inf"):
        norms.dual("linf")
    with pytest.raises(ValueError, match="matrix"):
        norms.operator_norm(jnp.ones((2, 3, 4)), 2)
