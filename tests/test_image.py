"""Mass that moves between pixels: plans, the ball, linear minimisation, Frank-Wolfe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import wdjax
from wdjax import image
from wdjax.core import Samples
from wdjax.image import dual_projection, linear_oracle, plan_attack, plans, variance
from wdjax.image.stencil import Stencil
from wdjax.precision import float64

SIDE = 5


def distances(height, width):
    """``[HW, HW]``: between all pixels."""
    grid = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1)
    grid = grid.reshape(-1, 2).astype(float)
    return np.linalg.norm(grid[:, None] - grid[None], axis=-1)


def exact(one, other, power=1.0):
    """``W_p`` of two images of one channel, by linear programming."""
    one, other = (np.asarray(part, float).ravel() for part in (one, other))
    count = len(one)
    cost = distances(*np.shape(np.zeros((int(count**0.5),) * 2))) ** power
    rows = np.kron(np.eye(count), np.ones(count))
    columns = np.kron(np.ones(count), np.eye(count))
    solved = optimize.linprog(
        cost.ravel(),
        A_eq=np.concatenate([rows, columns[1:]]),
        b_eq=np.concatenate([one / one.sum(), (other / other.sum())[1:]]),
    )
    return max(solved.fun, 0.0) ** (1 / power)


def best_gain(x, gradient, budget, window, high=1.0):
    """The linear minimisation, exactly: the largest ``<gradient, z - x>``."""
    x, gradient = np.asarray(x, float).ravel(), np.asarray(gradient, float).ravel()
    count, side = len(x), int(len(x) ** 0.5)
    cost = distances(side, side)
    row, column = np.divmod(np.arange(count), side)
    reach = window // 2
    near = (abs(row[:, None] - row) <= reach) & (abs(column[:, None] - column) <= reach)
    source, sink = np.nonzero(near)
    rows, columns = (
        np.equal.outer(np.arange(count), ends).astype(float) for ends in (source, sink)
    )
    solved = optimize.linprog(
        -gradient[sink],
        A_ub=np.concatenate([columns, cost[near][None]]),
        b_ub=np.append(np.full(count, high), budget),
        A_eq=rows,
        b_eq=x,
    )
    return -solved.fun - gradient @ x


def pictures(n=3, channels=1, seed=0, side=SIDE):
    """Images with empty and with saturated pixels."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-0.6, 1.4, (n, side, side, channels)).clip(0, 1)
    return jnp.asarray(x, jnp.float32)


def samples(x, eps):
    return Samples(x, jnp.zeros(len(x), jnp.int32), jnp.full(len(x), eps, jnp.float32), None)


def apply(params, x):
    hidden = jnp.tanh(x.reshape(len(x), -1) @ params["w"] + params["b"])
    return hidden @ params["v"]


def net(side=SIDE, channels=1, seed=0, classes=4, scale=1.0):
    keys = jax.random.split(jax.random.key(seed), 3)
    size = side * side * channels
    return wdjax.Model(
        apply,
        {
            "w": scale * jax.random.normal(keys[0], (size, 16)) / size**0.5,
            "b": 0.3 * jax.random.normal(keys[1], (16,)),
            "v": jax.random.normal(keys[2], (16, classes)),
        },
    )


def labelled(model, x):
    return jnp.argmax(model(x), axis=-1).astype(jnp.int32)


@pytest.mark.parametrize("window", [1, 3, 9])
def test_sums_over_a_window_are_those_of_a_matrix(window):
    stencil, n, channels = Stencil(4, 5, window), 2, 2
    rng = np.random.default_rng(0)
    full = rng.uniform(size=(n, 4, 5, channels, window, window)).astype(np.float32)
    full *= stencil.mass(jnp.ones((n, channels, stencil.offsets, stencil.length)) * stencil.valid())
    flows = stencil.flows(jnp.asarray(full))
    np.testing.assert_array_equal(stencil.mass(flows), full)
    targets = rng.uniform(size=(n, 4, 5, channels)).astype(np.float32)
    sent, received = np.zeros_like(targets), np.zeros_like(targets)
    scaled, reach = np.zeros_like(full), window // 2
    for i, y, x, c, a, b in np.argwhere(full > 0):
        there = y + a - reach, x + b - reach
        sent[i, y, x, c] += full[i, y, x, c, a, b] * targets[i, *there, c]
        received[(i, *there, c)] += full[i, y, x, c, a, b]
        scaled[i, y, x, c, a, b] = full[i, y, x, c, a, b] * targets[i, *there, c]
    flat = stencil.flat(jnp.asarray(targets))
    np.testing.assert_array_equal(stencil.image(flat), targets)
    np.testing.assert_allclose(stencil.image(stencil.send(flows, flat)), sent, rtol=1e-5)
    np.testing.assert_allclose(stencil.image(stencil.receive(flows)), received, rtol=1e-5)
    np.testing.assert_allclose(stencil.mass(stencil.scale(flows, flat)), scaled, rtol=1e-5)
    by_cost = stencil.levels(flows, flat, 1.0).sum(axis=2)
    np.testing.assert_allclose(stencil.image(by_cost), sent, rtol=1e-5)
    seen = stencil.of_targets(flat) * stencil.valid()
    np.testing.assert_allclose(jnp.sum(seen * flows, axis=2), stencil.send(flows, flat), rtol=1e-5)


@pytest.mark.parametrize("eps", [0.0, 0.01, 0.5, 10.0])
def test_repair_makes_any_plan_honest(eps):
    ball = image.ImageWasserstein(window=3)
    task = plan_attack.task(ball, samples(pictures(8), eps))
    stencil = task.space.stencil
    wild = jax.random.uniform(jax.random.key(0), (8, 1, stencil.offsets, stencil.length)) ** 8
    wild = wild * stencil.valid() * task.x[:, :, None]
    plan = plans.repair(task.space, wild, task.x, task.weights, task.budget)
    plan = np.asarray(plan, float)
    x = np.asarray(task.x, float)
    assert plan.min() >= 0
    np.testing.assert_allclose(plan.sum(axis=2), x, rtol=1e-6)
    received = np.asarray(stencil.receive(jnp.asarray(plan, jnp.float32)))
    assert received.max() <= 1 + 2e-6
    assert np.all(np.einsum("ncol,o->n", plan, stencil.costs(1.0)) <= task.budget * (1 + 1e-6))
    if eps == 10:  # Nothing is thrown away that fits.
        assert np.einsum("ncol,o->", plan, stencil.costs(1.0)) > 1


def test_the_ball_believes_plans_only():
    ball = image.ImageWasserstein(window=3)
    x = pictures(1)
    z = x.at[0, 2, 2, 0].add(-0.1).at[0, 2, 1, 0].add(0.1)
    x, z = jnp.clip(x, 0.2, 0.8), jnp.clip(z, 0.2, 0.8)
    x = x.at[0, 2, 1:3, 0].set(0.5)
    z = x.at[0, 2, 1, 0].set(0.6).at[0, 2, 2, 0].set(0.4)
    plan = np.zeros((1, SIDE, SIDE, 1, 3, 3), np.float32)
    plan[..., 1, 1] = x
    plan[0, 2, 2, 0, 1] = [0.1, 0.4, 0.0]
    total = float(x.sum())
    honest = float(ball.cost(x, z, image.TransportPlan(jnp.asarray(plan)))[0])
    assert exact(x, z) <= honest <= 0.1 / total * (1 + 1e-4) + 5e-6
    assert ball.cost(x, z)[0] == jnp.inf
    assert ball.cost(x, x)[0] == 0
    lie = plan.copy()
    lie[0, 2, 2, 0, 1] = [0.05, 0.45, 0.0]  # Half of what moved is charged the longest way.
    assert float(ball.cost(x, z, image.TransportPlan(jnp.asarray(lie)))[0]) > honest
    for change in (
        {(0, 2, 2, 0, 1, 2): -0.1},
        {(0, 0, 0, 0, 0, 0): 0.1},
        {(0, 1, 1, 0, 1, 1): np.nan},
    ):
        bad = plan.copy()
        for place, value in change.items():
            bad[place] += value
        assert ball.cost(x, z, image.TransportPlan(jnp.asarray(bad)))[0] == jnp.inf
    brighter = z.at[0, 0, 0, 0].add(1e-3)
    assert ball.cost(x, brighter, image.TransportPlan(jnp.asarray(plan)))[0] == jnp.inf
    outside = image.ImageWasserstein(window=3, high=0.5).cost(
        x, z, image.TransportPlan(jnp.asarray(plan))
    )
    assert outside[0] == jnp.inf


def test_colour_channels_are_normalised_together_or_apart():
    x = jnp.full((1, 3, 3, 2), 0.1).at[..., 1].multiply(3)
    z = x.at[0, 0, 0, 0].add(-0.05).at[0, 0, 1, 0].add(0.05)
    plan = jnp.zeros((1, 3, 3, 2, 3, 3)).at[..., 1, 1].set(x)
    plan = plan.at[0, 0, 0, 0, 1].set(jnp.array([0.0, 0.05, 0.05]))
    shared, apart = (
        float(image.ImageWasserstein(3, channels=kind).cost(x, z, image.TransportPlan(plan))[0])
        for kind in ("shared", "separate")
    )
    assert shared == pytest.approx(0.05 / 3.6, rel=1e-3)
    assert apart == pytest.approx(0.05 / 0.9, rel=1e-3)
    square = image.ImageWasserstein(3, power=2).cost(x, z, image.TransportPlan(plan))
    assert float(square[0]) == pytest.approx((0.05 / 3.6) ** 0.5, rel=1e-3)


def test_linear_minimisation_against_a_linear_program():
    ball = image.ImageWasserstein(window=3)
    x = pictures(4)
    gradient = jax.random.uniform(jax.random.key(1), (4, SIDE, SIDE, 1), minval=-1)

    @jax.jit
    def gains(eps):
        task = plan_attack.task(ball, samples(x, eps))
        flat = task.space.stencil.flat(gradient)
        known = linear_oracle.no_prices(task.x)

        def again(_, carried):
            return linear_oracle.vertex(task, flat, 0.02, carried[1], 50)

        plan = plans.stay(task.space, task.x)
        plan, _ = jax.lax.fori_loop(0, 10, again, (plan, known))
        z = task.space.stencil.receive(plan)
        return jnp.sum(flat * (z - task.x), axis=(1, 2)), task.budget

    for eps in (0.02, 0.1, 0.4):
        gain, budget = map(np.asarray, gains(eps))
        best = np.array([best_gain(*case, 3) for case in zip(x, gradient, budget)])
        assert np.all(gain <= best * (1 + 1e-4) + 1e-5)
        assert np.all(gain >= 0.9 * best), (eps, gain / best)


@pytest.mark.parametrize("channels", ["shared", "separate"])
def test_frank_wolfe_stays_in_its_ball(channels):
    ball = image.ImageWasserstein(window=3, channels=channels)
    x = pictures(12, channels=2)
    model = net(channels=2, scale=3.0)
    y = labelled(model, x)
    attack = image.FrankWolfe(ball, steps=15)
    for eps in (0.002, 5.0):
        found = wdjax.search(attack, model, x, y, eps=eps)
        x_adv = np.asarray(found.x_adv, float)
        before = np.asarray(x, float)
        mass = before.sum(axis=(1, 2))
        assert np.abs(x_adv.sum(axis=(1, 2)) / mass - 1).max() < 1e-6
        assert x_adv.min() >= 0
        assert x_adv.max() <= 1
        for i in range(3):
            apart = [exact(before[i, ..., c], x_adv[i, ..., c]) for c in range(2)]
            if channels == "shared":
                apart = [own * part for own, part in zip(apart, mass[i] / mass[i].sum())]
            assert sum(apart) <= float(found.cost[i]) * (1 + 1e-5)
            assert sum(apart) <= eps * (1 + 1e-4)
        assert np.all(found.cost <= eps * (1 + 1e-6))
        np.testing.assert_array_equal(found.success, labelled(model, found.x_adv) != y)
        measured = ball.cost(x, found.x_adv, found.proof)
        np.testing.assert_allclose(measured, found.cost, rtol=1e-5)
    assert found.success.mean() > 0.5


@pytest.mark.parametrize("power", [1, 2])
def test_the_distance_is_that_of_a_linear_program(power):
    x, z = pictures(3, seed=1), pictures(3, seed=2)
    ball = image.ImageWasserstein(power=power)
    found = image.image_wasserstein_distance(x, z, ball=ball)
    expected = [exact(*pair, power=power) for pair in zip(x, z)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert image.image_wasserstein_distance(x, x, ball=ball).max() < 1e-9
    assert image.image_wasserstein_distance(x, 0 * x)[0] == np.inf
    with pytest.raises(ValueError, match="finite"):
        image.image_wasserstein_distance(x, -z)


def test_natural_perturbations_against_scipy():
    from scipy import ndimage

    x = np.asarray(pictures(2, channels=2, side=9))
    plane = x[0, ..., 1]
    down = ndimage.shift(plane, (-0.9, 0.0), order=1)
    up = np.asarray(image.translate(x, 0.1, 90))[0, ..., 1]
    np.testing.assert_allclose(up[:-1], down[:-1], atol=1e-5)
    turned = ndimage.rotate(plane, 20, reshape=False, order=1)
    inner = slice(2, 7)
    found = np.asarray(image.rotate(x, 20))[0, ..., 1]
    np.testing.assert_allclose(found[inner, inner], turned[inner, inner], atol=1e-5)
    blurred = ndimage.gaussian_filter(plane, 1.1, radius=2, mode="nearest")
    np.testing.assert_allclose(image.gaussian_blur(x, 5)[0, ..., 1], blurred, atol=1e-5)
    dark = image.dim(x[..., :1], 30)
    assert image.image_wasserstein_distance(x[..., :1], dark).max() < 1e-6
    assert image.ImageWasserstein().cost(jnp.asarray(x[..., :1]), dark).min() == jnp.inf
    with pytest.raises(ValueError, match="odd"):
        image.gaussian_blur(x, 4)


@pytest.mark.parametrize("channels", ["shared", "separate"])
def test_dual_projection_finds_the_nearest_plan(channels):
    """Against a quadratic program, over the plans that the window allows."""
    ball = image.ImageWasserstein(window=3, channels=channels)
    x = pictures(1, channels=2, seed=3, side=3)
    own = plan_attack.task(ball, samples(x, 0.1))
    stencil, valid = own.space.stencil, np.asarray(own.space.stencil.valid())
    v = 0.6 * jax.random.normal(jax.random.key(0), (1, 2, stencil.offsets, stencil.length))
    plan, price = dual_projection.project(own, v + plans.stay(own.space, own.x), jnp.zeros(1))
    assert price > 0
    masses = np.asarray(own.x, float)[0]
    allowed = valid & (masses > 0)[:, None]
    cost = stencil.costs(1.0)[:, None] * np.asarray(own.weights, float)[0][:, None, None]
    cost = np.broadcast_to(cost, allowed.shape)[allowed]
    channel, _, cell = np.nonzero(allowed)
    sender = channel * stencil.length + cell
    rows = np.equal.outer(np.unique(sender), sender).astype(float)
    target = np.asarray(v + plans.stay(own.space, own.x), float)[0][allowed]
    begin = np.asarray(plans.stay(own.space, own.x), float)[0][allowed]
    solved = optimize.minimize(
        lambda p: 0.5 * np.sum((p - target) ** 2),
        begin,
        jac=lambda p: p - target,
        method="SLSQP",
        bounds=[(0, None)] * len(begin),
        constraints=[
            {"type": "eq", "fun": lambda p: rows @ p - masses[masses > 0], "jac": lambda p: rows},
            {"type": "ineq", "fun": lambda p: own.budget[0] - cost @ p, "jac": lambda p: -cost},
        ],
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert solved.success
    np.testing.assert_allclose(np.asarray(plan)[0][allowed], solved.x, atol=2e-4)
    assert not np.asarray(plan)[0][~allowed].any()


def test_total_variance_and_its_slope():
    stencil = Stencil(SIDE, SIDE, 3)
    x = stencil.flat(pictures(2))
    plan = plans.stay(image.ImageWasserstein(window=3).space((SIDE, SIDE, 1)), x)
    plan = plan + 0.1 * jax.random.uniform(jax.random.key(1), plan.shape) * stencil.valid()
    mass = stencil.mass(plan)
    along = jax.random.normal(jax.random.key(2), plan.shape) * stencil.valid()
    along = along - along.mean(axis=(1, 2, 3), keepdims=True) * plan / plan.mean(
        axis=(1, 2, 3), keepdims=True
    )  # Keeps the whole mass.
    with float64():
        mass, along = (jnp.asarray(part, jnp.float64) for part in (mass, stencil.mass(along)))
        _, tilt = jax.jvp(lambda m: image.total_variance(image.TransportPlan(m)), (mass,), (along,))
    sent = np.asarray(along).sum(axis=(1, 2, 3)).reshape(2, -1)
    whole = np.asarray(mass).sum(axis=(1, 2, 3, 4, 5))
    ours = np.sum(np.asarray(variance.slope(stencil, plan)) * sent, axis=1) / whole
    np.testing.assert_allclose(ours, tilt, rtol=1e-4)


@pytest.mark.parametrize(
    ("power", "channels"), [(1.0, "shared"), (2.0, "shared"), (1.0, "separate")]
)
def test_entropic_distances_are_above_exact_ones(power, channels):
    pytest.importorskip("ott", reason="entropic transport is ott's")
    ball = image.ImageWasserstein(power=power, channels=channels)
    x, z = pictures(3, channels=2), pictures(3, channels=2, seed=1)
    z = z * jnp.sum(x, axis=(1, 2), keepdims=True) / jnp.sum(z, axis=(1, 2), keepdims=True)
    exactly = image.image_wasserstein_distance(x, z, ball=ball)
    found = jax.jit(lambda x, z: image.entropic_distance(x, z, ball=ball, reg=0.05))(x, z)
    assert np.all(found >= exactly * (1 - 1e-6))
    np.testing.assert_allclose(found, exactly, rtol=0.03)
    few = image.entropic_distance(x, z, ball=ball, reg=0.05, iterations=10)
    assert np.all(few >= exactly * (1 - 1e-6))  # Far from converged.
    other = image.entropic_distance(x, z.at[0, ..., 0].multiply(2.0).at[1].set(0.0), ball=ball)
    assert np.isinf(other[1])
    assert np.isinf(other[0]) == (channels == "shared")


def test_entropic_gradients_are_those_of_the_distance():
    pytest.importorskip("ott", reason="entropic transport is ott's")
    x, z = pictures(2), pictures(2, seed=1) * 0.8 + 0.1
    z = z * jnp.sum(x, axis=(1, 2, 3), keepdims=True) / jnp.sum(z, axis=(1, 2, 3), keepdims=True)
    along = 0.1 * z * jax.random.normal(jax.random.key(0), z.shape)
    along = along - jnp.mean(along, axis=(1, 2, 3), keepdims=True)
    slope = jax.grad(lambda z: jnp.sum(image.entropic_distance(x, z, reg=0.03)))(z)
    assert np.all(np.isfinite(slope))
    ends = (image.image_wasserstein_distance(x, z + h * along) for h in (0.05, -0.05))
    exactly = np.subtract(*ends) / 0.1
    ours = np.sum(np.asarray(slope * along), axis=(1, 2, 3))
    np.testing.assert_allclose(ours, exactly, atol=0.05 * np.abs(exactly).max())
    with pytest.raises(ValueError, match="of one shape"):
        image.entropic_distance(x, z[:, :2])
