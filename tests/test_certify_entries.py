"""Certificates where every input entry has a radius and a range of its own."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from wdjax import Model, certify

RNG = np.random.default_rng(5)
N, D, K = 3, 4, 3
SCALE = np.array([[1.0, 0.0, 30.0, 1e-3], [0.1, 2.0, 0.0, 0.01], [0.0, 1.0, 10.0, 0.0]], "float32")
LOW, HIGH = np.array([-2.0, -3.0, -50.0, 0.0]), np.array([2.0, 3.0, 50.0, 0.004])
X = (LOW + (HIGH - LOW) * RNG.uniform(0.2, 0.8, (N, D))).astype("float32")
W = (RNG.normal(size=(D, K)) / (HIGH - LOW)[:, None]).astype("float32")
NORMS = (1, 2, math.inf)


def linear(w, x):
    return x @ w


def farthest(size, s, cap):
    """The move in ``[0, cap]`` with ``|move / s|_2 <= 1`` that is farthest along ``size``."""

    def move(level):
        return np.minimum(size * s**2 / level, cap)

    if np.linalg.norm(cap / s) <= 1:
        return cap
    return move(scipy.optimize.brentq(lambda t: np.linalg.norm(move(t) / s) - 1, 1e-9, 1e9))


def exact(x, y, scale, norm, box):
    """Least margins ``[n, K]`` of the linear model: by HiGHS, for l2 by a convex solver."""
    out = np.full((len(x), K), np.inf)
    low, high = (np.broadcast_to(end, D) for end in box)
    for i, j in np.ndindex(*out.shape):
        if j == y[i]:
            continue
        a, s = np.asarray(W[:, y[i]] - W[:, j], float), scale[i].astype(float)
        moves = s > 0
        cap = np.where(a > 0, x[i] - low, high - x[i])[moves]
        size, s = np.abs(a)[moves], s[moves]
        if norm == math.inf:
            fall = size @ np.minimum(s, cap)
        elif norm == 1:
            ends = list(zip(0 * cap, cap))
            fall = -scipy.optimize.linprog(-size, A_ub=[1 / s], b_ub=[1.0], bounds=ends).fun
        else:
            fall = size @ farthest(size, s, cap)
        out[i, j] = a @ x[i] - fall
    return out


@pytest.mark.parametrize("norm", NORMS)
def test_bounds_of_a_linear_model_are_exact(norm):
    model, box = Model(linear, W), (LOW, HIGH)
    y = np.argmax(X @ W, axis=1)
    expected = exact(X, y, SCALE, norm, box)
    for method in ("interval", "crown"):
        found = certify.margin_bounds(model, X, y, norm=norm, eps=SCALE, box=box, method=method)
        assert np.all(found <= expected + 1e-12)
        np.testing.assert_allclose(found, expected, atol=2e-4)
    trained = certify.trainable_bounds(model, X, y, norm=norm, eps=SCALE, box=box)
    np.testing.assert_allclose(trained, expected, atol=2e-4)
    assert np.array_equal(
        certify.certified(model, X, y, norm=norm, eps=SCALE, box=box), np.all(expected > 0, axis=1)
    )


@pytest.mark.parametrize("norm", NORMS)
def test_one_radius_is_the_same_as_equal_radii_of_all_entries(norm):
    model, y = Model(linear, W), np.zeros(N, int)
    box = (-60.0, 60.0)
    ends = np.full(D, -60.0), np.full(D, 60.0)
    for method in ("interval", "crown"):
        how = {"norm": norm, "method": method}
        one = certify.margin_bounds(model, X, y, eps=0.3, box=box, **how)
        same = certify.margin_bounds(
            model, X, y, eps=np.full((1, D), 0.3, "float32"), box=ends, **how
        )
        np.testing.assert_allclose(one, same, rtol=1e-5, atol=1e-5)


def hidden(w, x):
    first, second = w
    return jax.nn.relu(x @ first) @ second


NET = Model(
    hidden,
    tuple(
        jnp.asarray(RNG.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)
        for shape in ((D, 6), (6, K))
    ),
)
UNIT = np.array([[0.3, 0.0, 0.2, 0.0]], "float32")
POINTS = RNG.uniform(0.2, 0.8, (N, D)).astype("float32")
LABELS = np.asarray(jnp.argmax(NET(jnp.asarray(POINTS)), axis=1))


def corners(x, scale, box):
    """A fine grid over the entries that move, which are two."""
    free = np.flatnonzero(scale)
    grids = [
        np.linspace(max(x[k] - scale[k], box[0]), min(x[k] + scale[k], box[1]), 41) for k in free
    ]
    points = np.repeat(x[None], 41 ** len(free), axis=0)
    points[:, free] = np.stack(np.meshgrid(*grids), -1).reshape(-1, len(free))
    return points.astype("float32")


@pytest.mark.parametrize("method", certify.METHODS)
def test_no_point_breaks_a_bound_and_entries_of_radius_zero_do_not_move(method):
    """The bound of a net with two entries that move, by a grid; branch and bound nearly attains it;
    and entries with 0 are not widened even by rounding."""
    norm = 2 if method == "sdp-crown" else math.inf
    how = {"norm": norm, "eps": UNIT, "method": method, "seconds": 2.0}
    low = np.asarray(certify.margin_bounds(NET, POINTS, LABELS, **how))
    for i, y in enumerate(LABELS):
        grid = corners(POINTS[i], UNIT[0], (0, 1))
        far = np.linalg.norm(
            (grid - POINTS[i])[:, UNIT[0] > 0] / UNIT[0, UNIT[0] > 0], norm, axis=1
        )
        out = np.asarray(NET(jnp.asarray(grid[far <= 1 + 1e-6 * (norm == math.inf)])))
        least = np.min(out[:, y : y + 1] - out, axis=0)
        others = np.arange(K) != y
        assert np.all(low[i][others] <= least[others])
    still = certify.margin_bounds(NET, POINTS, LABELS, **how | {"eps": 0 * UNIT})
    out = np.asarray(NET(jnp.asarray(POINTS)))
    clean = np.take_along_axis(out, LABELS[:, None], 1) - out
    others = np.arange(K) != LABELS[:, None]
    np.testing.assert_allclose(still[others], clean[others], atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_the_radius_is_a_multiple_of_the_scale(norm):
    """Of a linear model it is exact; where nothing can move it is infinite."""
    model = Model(linear, W)
    y = np.argmax(X @ W, axis=1)
    found = np.asarray(certify.radius(model, X, y, norm=norm, box=None, scale=SCALE, steps=30))
    low = np.broadcast_to(-np.inf, D), np.broadcast_to(np.inf, D)
    for i in range(N):
        dual = {1: np.inf, 2: 2, math.inf: 1}[norm]
        contrasts = [W[:, y[i]] - W[:, j] for j in range(K) if j != y[i]]
        best = min(c @ X[i] / np.linalg.norm(c * SCALE[i], dual) for c in contrasts)
        assert 0.99 * best <= found[i] <= best
    none = certify.radius(model, X, y, norm=norm, box=low, scale=0 * SCALE, steps=3)
    assert np.all(np.isinf(none))


def test_branch_and_bound_returns_counterexamples_whose_entries_stay_in_their_radii():
    model = Model(linear, jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    x, y = np.array([[0.6, 0.4, 0.5], [0.6, 0.4, 0.5]], "float32"), np.array([0, 0])
    eps = np.array([[0.3, 0.0, 0.5], [0.15, 0.0, 0.0]], "float32")
    for norm in NORMS:
        found = certify.verify(model, x, y, norm=norm, eps=eps, method="bab", seconds=1.0)
        assert found.falsified.tolist() == [True, False]
        assert found.verified.tolist() == [False, True]
        point = found.counterexamples[0]
        assert point[1] == x[0, 1]
        assert abs(float(point[0]) - float(x[0, 0])) <= float(eps[0, 0])
        assert np.argmax(np.asarray(model(point[None]))) == 1
        assert found.radius[1] >= 1.0


def test_what_may_not_be_is_refused():
    model, y = Model(linear, W), np.zeros(N, int)
    ask = certify.margin_bounds
    how = {"norm": 2, "box": None}
    for eps in (np.ones(D + 1), np.ones((2, D)), -SCALE, np.full((1, D), np.nan)):
        with pytest.raises(ValueError, match="eps must be"):
            ask(model, X, y, **how | {"eps": np.asarray(eps, "float32")})
    for box in ((HIGH, LOW), (np.zeros(2), np.ones(2)), (LOW, np.full(D, np.nan)), (LOW,), 1.0):
        with pytest.raises(ValueError, match="box must be"):
            ask(model, X, y, norm=2, eps=0.1, box=box)
    with pytest.raises(ValueError, match=r"entry 2 of x\[0\]"):
        ask(model, X, y, norm=2, eps=0.1, box=(LOW, np.where(np.arange(D) == 2, X[0] - 1, HIGH)))
    with pytest.raises(ValueError, match="scale must be"):
        certify.radius(model, X, y, norm=2, box=None, scale=np.ones(D, "float32"))


@pytest.mark.parametrize("norm", NORMS)
def test_radii_of_entries_may_be_traced(norm):
    """Same numbers inside jit, nothing certified for negative or NaN ones, and gradients."""
    how = {"norm": norm, "box": (0.0, 1.0)}
    bounds = jax.jit(lambda eps: certify.margin_bounds(NET, POINTS, LABELS, eps=eps, **how))
    plain = certify.margin_bounds(NET, POINTS, LABELS, eps=UNIT, **how)
    np.testing.assert_allclose(bounds(jnp.asarray(UNIT)), plain, atol=1e-5)
    for bad in (-1.0, jnp.nan):
        low = np.asarray(bounds(jnp.asarray(UNIT).at[0, 1].set(bad)))
        assert np.all(low[np.arange(K) != LABELS[:, None]] == -np.inf)
    steep = jax.grad(
        lambda eps: certify.margin_bounds(NET, POINTS, LABELS, eps=eps, **how)[0, LABELS[0] - 1]
    )(jnp.asarray(UNIT) + 0.05)
    assert np.all(np.isfinite(steep))
    assert np.any(steep < 0)


@pytest.mark.parametrize("eps", [0.02, 0.06, 0.1, 1 / 3])
def test_what_is_verified_has_a_radius_of_eps(eps):
    """Also where the nearest float32 is below eps, as of 0.02 and 0.06."""
    model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0]]))
    x, y = jnp.array([[0.9], [0.6]]), jnp.array([0, 0])
    found = certify.verify(model, x, y, norm=math.inf, eps=eps, box=None, steps=0)
    assert found.verified.any()
    assert (found.radius[found.verified] >= eps).all()
    accuracy = certify.certified_accuracy(found.radius, eps, math.inf)
    assert accuracy == pytest.approx(np.mean(found.verified))
