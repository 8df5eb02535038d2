"""Searches in bfloat16: what float32 does not confirm is no flip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import Lp, Model, attacks, ensembles, image, losses, program


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=shape).astype(np.float32) for shape in ((12, 16), (16, 3))]
    model = Model(lambda w, x: jnp.tanh((x - 0.5) @ w[0]) @ w[1], weights)
    x = rng.uniform(size=(40, 12)).astype(np.float32)
    return model, x, np.argmax(model(x), axis=-1)


def predicted(model, x):
    return np.argmax(np.asarray(model(x)), axis=-1)


@pytest.mark.parametrize(
    ("attack", "eps"),
    [(attacks.WDAPlusPlus(Lp(2)), None), (attacks.PGD(Lp(2), steps=8), 0.2)],
    ids=["nearest", "radius"],
)
def test_only_what_float32_confirms_counts(problem, attack, eps):
    model, x, y = problem
    found, _ = ensembles.mixed(attack, model, x, y, eps=eps)
    moved = np.asarray(found.x_adv)
    np.testing.assert_array_equal(found.success, predicted(model, moved) != y)
    distance = np.linalg.norm(moved.astype(float) - x, axis=1)
    np.testing.assert_allclose(found.cost, distance, rtol=1e-5, atol=1e-6)
    assert moved.dtype == np.float32
    assert np.all((moved >= 0) & (moved <= 1))
    if eps is None:
        assert found.success.all()  # Those lost were found again.
    else:
        assert np.all(distance <= eps * (1 + 1e-5))


def test_flips_of_bfloat16_alone_are_lost(problem):
    model, x, y = problem
    attack = attacks.WDAPlusPlus(Lp(2))
    rough = wdjax.search(attack, ensembles.lowered(model), x, y)
    margin = np.asarray(losses.margin(model(rough.x_adv), y))
    lost, clear = np.asarray(rough.success) & (margin <= 0), np.abs(margin) > 1e-5
    assert 5 < lost.sum() < 35
    assert clear.sum() > 35  # Of others, two programs may not agree.
    found, told = ensembles.mixed(attack, model, x, y)
    np.testing.assert_array_equal(np.asarray(told)[clear], lost[clear])
    lost = np.asarray(told)
    once = np.asarray(rough.gradients)
    assert np.all(np.asarray(found.gradients)[lost] > once[lost])
    np.testing.assert_array_equal(np.asarray(found.gradients)[~lost], once[~lost])


def shifted(scale, x):
    """Right of 1 + x / 10000: bfloat16 sees no x, and the slope of a root at 0."""
    roots = jnp.sqrt((1 + scale * x) - 1)
    return 100 * jnp.stack([roots[:, 0] - roots[:, 1], roots[:, 1] - roots[:, 0]], axis=1)


def test_what_bfloat16_cannot_differentiate_is_attacked_without_it():
    model = Model(shifted, jnp.float32(1e-4))
    x = np.array([[0.6, 0.4], [0.9, 0.1], [0.4, 0.6]], np.float32)
    y, attack = np.array([0, 0, 0]), attacks.PGD(steps=5)  # The last is an error, in float32.
    rough = wdjax.search(attack, ensembles.lowered(model), x, y, eps=0.2, skip_misclassified=False)
    assert rough.fault.all()
    assert not rough.success.any()
    found, lost = ensembles.mixed(attack, model, x, y, eps=0.2)
    assert found.success.tolist() == [True, False, True]
    assert found.correct.tolist() == [True, True, False]
    assert found.fault.all()  # It stays on record.
    assert not found.done.any()
    assert not lost.any()


def test_refusals(problem):
    model, x, y = problem
    with pytest.raises(ValueError, match="one budget for all"):
        ensembles.mixed(attacks.WPGD(steps=2), model, x, y, eps=0.1)
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: ensembles.mixed(attacks.PGD(), model, x, y, eps=0.1))(x)
    maps = x[:4, :, None, None].reshape(4, 4, 3, 1)
    flat = Model(lambda inner, x: inner(x.reshape(len(x), -1)), model)
    with pytest.raises(ValueError, match="wants proofs"):
        ensembles.mixed(image.FrankWolfe(steps=1), flat, maps, y[:4], eps=0.01)


def test_tensorfloat32_is_asked_for_in_every_product(problem):
    """CPUs have none, so the points are those of float32 there."""
    model, x, y = problem
    rough = ensembles.lowered(model, "tensorfloat32")
    gradient = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(rough(x))))(x)
    dots = [eqn for eqn in program.equations(gradient) if eqn.primitive.name == "dot_general"]
    assert [dot.params["precision"] for dot in dots] == [(jax.lax.Precision.HIGH,) * 2] * 4
    attack = attacks.PGD(Lp(2), steps=8)
    found, _ = ensembles.mixed(attack, model, x, y, eps=0.2, precision="tensorfloat32")
    np.testing.assert_array_equal(found.success, predicted(model, found.x_adv) != y)
    with pytest.raises(ValueError, match="'bfloat16' or 'tensorfloat32', got 'tf32'"):
        ensembles.lowered(model, "tf32")
