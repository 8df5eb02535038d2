"""The constrained Sinkhorn projection and the attack that is built on it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special
from test_image import distances, exact, labelled, net, pictures, samples

import wdjax
from wdjax import image
from wdjax.image import plan_attack, plans, sinkhorn


def test_wright_omega_of_any_number():
    t = np.concatenate([np.linspace(-80, 80, 3001), np.linspace(-3, 5, 3001), [1e3, 1e4, 1e5]])
    found = np.asarray(sinkhorn.log_omega(jnp.asarray(t, jnp.float32)))
    expected = np.log(special.wrightomega(t.astype(np.float32).astype(float)).real)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


def ball_and_step(eps, n=3, size=0.3):
    x = pictures(n, side=3)
    task = plan_attack.task(image.ImageWasserstein(window=3), samples(x, eps))
    push = jax.random.normal(jax.random.key(3), x.shape)
    mass = jnp.sum(task.x, axis=(1, 2))
    return x, task, task.x + size * mass[:, None, None] * task.space.stencil.flat(push)


def least(x, w, eps, lam, window=3):
    """Equation 7 by SLSQP, over the plan of one 3 x 3 image in units of its mass."""
    mass = x.sum()
    x, w, high = x.ravel() / mass, w.ravel() / mass, 1 / mass
    cost = distances(3, 3)
    near = (cost <= 2**0.5 * (window // 2) + 1e-9) & (x > 0)[:, None]
    source, sink = np.nonzero(near)
    into = np.equal.outer(np.arange(9), sink).astype(float)
    out = np.equal.outer(np.arange(9), source).astype(float)[x > 0]

    def value(pi):
        z = into @ pi
        return lam / 2 * np.sum((w - z) ** 2) + np.sum(pi * np.log(np.maximum(pi, 1e-300)))

    def slope(pi):
        return lam * (into @ pi - w)[sink] + np.log(np.maximum(pi, 1e-300)) + 1

    limits = [
        {"type": "eq", "fun": lambda pi: out @ pi - x[x > 0], "jac": lambda pi: out},
        {"type": "ineq", "fun": lambda pi: high - into @ pi, "jac": lambda pi: -into},
        {"type": "ineq", "fun": lambda pi: eps - cost[near] @ pi, "jac": lambda pi: -cost[near]},
    ]
    begin = np.where(source == sink, x[source], 1e-9)
    solved = optimize.minimize(
        value, begin, jac=slope, bounds=[(1e-12, None)] * len(source), constraints=limits,
        method="SLSQP", options={"maxiter": 500, "ftol": 1e-12},
    )  # fmt: skip
    return into @ solved.x * mass


@pytest.mark.parametrize("eps", [0.05, 0.4])
def test_projection_solves_equation_7(eps):
    x, task, w = ball_and_step(eps)
    begin = sinkhorn.no_duals(task)
    found = jax.jit(
        lambda w: sinkhorn.project(task, w, 50.0, begin, iterations=3000, tolerance=1e-5)
    )(w)
    z = np.asarray(task.space.stencil.image(found.z))
    aims = np.asarray(task.space.stencil.image(w))
    share = np.asarray(task.budget / jnp.sum(task.x, axis=(1, 2)))
    assert found.missed.max() < 1e-4
    for i in range(len(x)):
        expected = least(np.asarray(x[i], float), aims[i].astype(float), share[i], 50.0)
        np.testing.assert_allclose(z[i].ravel(), expected, atol=2e-3)
    columns = task.space.stencil.receive(found.plan)
    np.testing.assert_allclose(columns, found.z, atol=5e-4)


def test_samples_converge_for_themselves_and_from_known_duals():
    _, task, w = ball_and_step(0.2)
    begin = sinkhorn.no_duals(task)

    @jax.jit
    def go(task, w, duals):
        return sinkhorn.project(task, w, 200.0, duals, iterations=2000, tolerance=1e-4)

    whole = go(task, w, begin)
    assert len(set(np.asarray(whole.rounds).tolist())) > 1
    one = dataclasses.replace(task, x=task.x[:1], weights=task.weights[:1], budget=task.budget[:1])
    alone = go(one, w[:1], sinkhorn.no_duals(one))
    assert alone.rounds[0] == whole.rounds[0]
    np.testing.assert_allclose(alone.z[0], whole.z[0], atol=1e-6)
    again = go(task, w, whole.duals)
    assert again.rounds.max() <= 2


@pytest.mark.parametrize(
    ("eps", "size", "lam"), [(5e-4, 0.06, 1e3), (0.1, 0.5, 1e4), (2, 0.5, 1e4)]
)
def test_extreme_steps_stay_finite_and_honest(eps, size, lam):
    _, task, w = ball_and_step(eps, n=6, size=size)
    begin = sinkhorn.no_duals(task)
    found = sinkhorn.project(task, w, lam, begin, iterations=30)
    plan = plans.repair(task.space, found.plan, task.x, task.weights, task.budget)
    z = np.asarray(task.space.stencil.receive(plan))
    assert np.all(np.isfinite(z)) and np.all(np.isfinite(found.z))  # noqa: PT018
    assert z.max() <= 1 + 2e-6
    np.testing.assert_allclose(z.sum(axis=(1, 2)), task.x.sum(axis=(1, 2)), rtol=1e-6)
    assert np.all(plans.moved(task.space, plan, task.weights) <= task.budget * (1 + 1e-5))


def test_a_projection_can_be_differentiated():
    _, task, w = ball_and_step(0.2, n=1, size=0.1)
    begin = sinkhorn.no_duals(task)
    ahead = jax.random.normal(jax.random.key(5), w.shape) * (task.x > 0)

    def value(share):
        found = sinkhorn.project(
            task, w + share * ahead, 30.0, begin, iterations=60, tolerance=0.0, unrolled=True
        )
        return jnp.sum(found.z * ahead)

    slope = jax.jit(jax.grad(value))(0.0)
    apart = (jax.jit(value)(0.02) - jax.jit(value)(-0.02)) / 0.04
    assert float(slope) == pytest.approx(float(apart), rel=0.05)
    assert float(slope) > 0


def test_the_clamp_of_the_original_leaves_the_ball():
    x, task, w = ball_and_step(0.02, n=6)
    begin = sinkhorn.no_duals(task)
    free = sinkhorn.project(task, w, 1e3, begin, iterations=300, capped=False)
    clamped = np.asarray(task.space.stencil.image(jnp.clip(free.z, 0, 1)))
    far = [exact(*pair) for pair in zip(x, clamped)]
    lost = np.abs(clamped.sum(axis=(1, 2, 3)) / np.asarray(x).sum(axis=(1, 2, 3)) - 1)
    assert max(far) > 0.02 * 1.05 or lost.max() > 1e-3


@pytest.mark.parametrize("direction", ["linf", "smooth"])
def test_the_attack_stays_in_its_ball(direction):
    x = pictures(8)
    model = net(scale=3.0)
    y = labelled(model, x)
    ball = image.ImageWasserstein(window=3)
    attack = image.SinkhornPGD(ball, steps=12, direction=direction, step_size=0.3)
    found = wdjax.search(attack, model, x, y, eps=0.4)
    assert found.success.any()
    assert not found.fault.any()
    for i in range(3):
        assert exact(x[i], found.x_adv[i]) <= 0.4 * (1 + 1e-4)
    np.testing.assert_allclose(ball.cost(x, found.x_adv, found.proof), found.cost, rtol=1e-5)


def test_the_growing_ball_is_a_search_for_the_radius():
    x = pictures(8)
    model = net(scale=3.0)
    y = labelled(model, x)
    ball = image.ImageWasserstein(window=3)
    attack = image.SinkhornPGD(ball, steps=40, growing=True, first=0.02, growth=0.02)
    found = wdjax.search(attack, model, x, y)
    assert found.success.sum() >= 4
    assert np.all(found.cost <= 0.02 * 41)
    nearer = wdjax.search(image.NearestTransport(ball, steps=60), model, x, y)
    both = np.asarray(found.success & nearer.success)
    assert np.mean(np.asarray(nearer.cost)[both] <= np.asarray(found.cost)[both] * 1.02) > 0.8
