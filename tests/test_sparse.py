"""Norm 0 against brute force over all subsets of coordinates, and closed forms."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_contract import make_model, make_samples

import wdjax
from wdjax import (
    Lp,
    attacks,
    certify,
    ensembles,
    lipschitz,
    losses,
    nppr,
    sparse,
    testing,
    transport,
)
from wdjax.nppr import distributions
from wdjax.report import audit

SIZE = 8


def linear(seed=0, classes=3):
    keys = jax.random.split(jax.random.key(seed), 2)
    weights = jax.random.normal(keys[0], (SIZE, classes))
    model = wdjax.Model(lambda w, x: x @ w, weights)
    x = jax.random.uniform(keys[1], (20, SIZE))
    return model, x, jnp.argmax(model(x), axis=-1)


def fewest(model, x, y, units):
    """The least number of units whose change flips a linear model: all subsets, all corners.

    A linear margin is largest at a corner of the box, so only these need be tried.
    """
    x, found = np.asarray(x), np.full(len(x), math.inf)
    for i, (sample, label) in enumerate(zip(x, np.asarray(y))):
        for count in range(1, len(units) + 1):
            for chosen in itertools.combinations(units, count):
                free = [*itertools.chain(*chosen)]
                corners = np.array(list(itertools.product((0.0, 1.0), repeat=len(free))))
                tried = np.repeat(sample[None], len(corners), axis=0)
                tried[:, free] = corners
                if (np.argmax(model(jnp.asarray(tried)), axis=-1) != label).any():
                    found[i] = count
                    break
            if found[i] < math.inf:
                break
    return found


COORDINATES = [(i,) for i in range(SIZE)]
PIXELS = [(i, i + 1) for i in range(0, SIZE, 2)]


@pytest.mark.parametrize("pixels", [False, True])
def test_sigma_zero_finds_the_fewest_changes(pixels):
    model, x, y = linear()
    best = fewest(model, x, y, PIXELS if pixels else COORDINATES)
    assert len(set(best)) > 1
    if pixels:
        x = x.reshape(-1, 4, 2)
        model = wdjax.Model(lambda w, x: x.reshape(len(x), -1) @ w, model.args[0])
    found = wdjax.search(attacks.SigmaZero(Lp(0, pixels=pixels), steps=300), model, x, y)
    known = np.isfinite(best)
    np.testing.assert_array_equal(found.success, known)
    cost = np.asarray(found.cost)[known]
    assert (cost >= best[known]).all(), "fewer than any subset"
    assert (cost == best[known]).mean() >= 0.9
    changed = np.asarray(found.x_adv != x)
    changed = changed.any(-1) if pixels else changed
    np.testing.assert_array_equal(found.cost, changed.reshape(len(x), -1).sum(1))


@pytest.mark.parametrize("pixels", [False, True])
def test_pgd_within_each_radius(pixels):
    model, x, y = linear()
    best = fewest(model, x, y, PIXELS if pixels else COORDINATES)
    if pixels:
        x = x.reshape(-1, 4, 2)
        model = wdjax.Model(lambda w, x: x.reshape(len(x), -1) @ w, model.args[0])
    attack = attacks.PGD(Lp(0, pixels=pixels), steps=20, loss=losses.margin, restarts=4)
    key = jax.random.key(0)
    for eps in (0, 0.9, 1, 2, 2.7, 3):
        found = wdjax.search(attack, model, x, y, eps=eps, key=key, diagnose=False)
        assert (np.asarray(found.cost) <= math.floor(eps)).all()
        assert not found.success[best > math.floor(eps)].any()
        assert np.mean(np.asarray(found.success) == (best <= math.floor(eps))) >= 0.9
    found = ensembles.bisect(attack, model, x, y, eps=2, key=key, rounds=6, diagnose=False)
    np.testing.assert_array_equal(found.success, np.isfinite(best))


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
@pytest.mark.parametrize("pixels", [False, True])
def test_the_projection_is_the_nearest_of_all_subsets(box, pixels):
    keys = jax.random.split(jax.random.key(3), 2)
    x = jax.random.uniform(keys[0], (6, 4, 2))
    z = x + 1.5 * jax.random.normal(keys[1], x.shape)
    units = np.array(PIXELS if pixels else COORDINATES)
    for radius in (0.0, 1.0, 2.9, 4.0, 50.0):
        radii = jnp.full(len(x), radius)
        got = sparse.project(z, x, radii, box, pixels)
        assert (Lp(0, box, pixels=pixels).cost(x, got) <= radius).all()
        near = np.asarray(z if box is None else jnp.clip(z, *box)).reshape(len(x), -1)
        least = np.full(len(x), np.inf)
        count = min(math.floor(radius), len(units))
        for chosen in itertools.combinations(range(len(units)), count):
            free = np.zeros(SIZE, bool)
            free[units[list(chosen)].reshape(-1)] = True
            point = np.where(free, near, np.asarray(x).reshape(len(x), -1))
            far = np.sum((point - np.asarray(z).reshape(len(x), -1)) ** 2, axis=1)
            least = np.minimum(least, far)
        far = np.sum(np.asarray(got - z).reshape(len(x), -1) ** 2, axis=1)
        np.testing.assert_allclose(far, least, rtol=1e-5, atol=1e-6)


def test_equal_changes_are_counted_once_each():
    scores = jnp.array([[2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    for most in range(6):
        chosen = sparse.largest(scores, jnp.full(2, float(most)))
        np.testing.assert_array_equal(chosen.sum(1), min(most, 4))


def test_a_step_moves_as_many_coordinates_beyond_the_box():
    g = jax.random.normal(jax.random.key(0), (5, 9))
    for size in (1, 3, 9):
        moved = jnp.abs(sparse.ascend(jnp.zeros_like(g), g, size, (0.0, 2.0)))
        np.testing.assert_array_equal((moved >= 8.0 * (1 - 1e-6)).sum(1), size)
    still = sparse.ascend(g, jnp.zeros_like(g).at[0].set(jnp.nan), 2.0)
    np.testing.assert_array_equal(still, g)
    one = sparse.ascend(jnp.zeros((1, 3)), jnp.array([[0.0, 1e-30, 0.0]]), 2.0)
    assert one.tolist() == [[0.0, 4.0, 0.0]]


def test_the_knapsack_spends_changes():
    """Omega_1 of radius 1 in norm 0: as many changes as samples, the cheapest flips first."""
    model, x, y = linear()
    found = wdjax.search(attacks.SigmaZero(steps=200), model, x, y)
    cost = np.sort(np.where(found.success, found.cost, np.inf))
    eps = 1.0
    result = wdjax.spend(found, eps=eps, order=1)
    bought, left = 0.0, eps * len(x)
    for one in cost:
        share = min(1.0, left / one)
        bought, left = bought + share, left - share * one
    np.testing.assert_allclose(result.accuracy, 1 - bought / len(x), atol=1e-6)
    moved = transport.AdversarialDistribution.from_result(x, y, result)
    np.testing.assert_allclose(moved.coupling_cost(0, 1), eps, rtol=1e-6)
    assert transport.wasserstein(moved, 0, 1) <= eps * (1 + 1e-6)
    np.testing.assert_allclose(jax.jit(lambda m: m.coupling_cost(0, 1))(moved), eps, rtol=1e-5)


model = make_model()
x, y = make_samples(model, n=6)
ASK = dict(model=model, x=x, y=y)
REFUSED = {
    **{
        name: lambda name=name: wdjax.search(
            getattr(attacks, name)(Lp(0)), **ASK, eps=1, key=jax.random.key(0)
        )
        for name in attacks.__all__
        if name not in ("PGD", "SigmaZero", "Points", "GradientAttack", "fgsm", "FGSM")
    },
    "autoattack": lambda: ensembles.autoattack(
        model, x, y, eps=1, key=jax.random.key(0), ball=Lp(0)
    ),
    "fast": lambda: ensembles.fast(model, x, y, eps=1, key=jax.random.key(0), ball=Lp(0)),
    "wda_star": lambda: ensembles.wda_star(model, x, y, key=jax.random.key(0), ball=Lp(0)),
    "radius": lambda: certify.radius(model, x, y, norm=0),
    "lipschitz": lambda: certify.lipschitz_constant(model, x, y, norm=0),
    "lower": lambda: lipschitz.sampled_lipschitz(model, x, y, norm=0, eps=1, key=jax.random.key(0)),
    "uniform": lambda: nppr.estimate(
        model, distributions.UniformBall(1, Lp(0)), x, y, key=jax.random.key(0)
    ),
    "audit": lambda: audit.sandwich(model, x, y, eps_list=[1.0], ball=Lp(0), key=jax.random.key(0)),
    "pixels of a vector": lambda: wdjax.search(
        attacks.SigmaZero(Lp(0, pixels=True), steps=2), *linear()
    ),
    "pixels of l2": lambda: Lp(2, pixels=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_defined_is_refused_in_a_sentence(name):
    with pytest.raises(ValueError, match=r"norm (must be|0)|of one axis"):
        REFUSED[name]()


def test_an_eps_of_more_than_there_are_is_warned_of():
    with pytest.warns(UserWarning, match="number of coordinates"):
        wdjax.search(attacks.PGD(Lp(0), steps=2), model, x, y, eps=13)


def test_a_blind_search_is_followed_by_random_changes():
    """A quantised model has no gradients; a second look finds what random changes flip."""
    blind = wdjax.Model(lambda w, x: model(jnp.round(4 * x) / 4 + 0 * w), jnp.zeros(()))
    label = jnp.argmax(blind(x), -1)
    with pytest.warns(UserWarning, match="zero"):
        found = wdjax.search(attacks.PGD(Lp(0), steps=5), blind, x, label, eps=6)
    assert found.overlooked is not None
    assert np.any(found.overlooked)


@pytest.mark.parametrize("attack", [attacks.PGD(Lp(0), steps=4), attacks.SigmaZero(steps=12)])
def test_the_whole_contract(attack):
    testing.check_attack(attack)
    testing.check_attack(dataclasses.replace(attack, ball=Lp(0, pixels=True)), clauses=("ball",))


def test_numbers_of_64_bits_stay():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), model)
        for attack in (attacks.PGD(Lp(0), steps=3), attacks.SigmaZero(steps=9)):
            found = wdjax.search(attack, wide, x.astype(jnp.float64), y, eps=3)
            assert found.x_adv.dtype == found.cost.dtype == jnp.float64


def test_a_model_in_half_precision_is_attacked():
    half = wdjax.Model(lambda p, x: model(x).astype(jnp.bfloat16) + 0 * p, jnp.bfloat16(0))
    label = jnp.argmax(half(x), -1)
    found = wdjax.search(attacks.SigmaZero(steps=60), half, x, label)
    assert found.success.mean() > 0.5
    np.testing.assert_array_equal(found.success, jnp.argmax(half(found.x_adv), -1) != label)
