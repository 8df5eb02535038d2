"""Bounds to train through: their gradients, what they prove, and nets that are trained by them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import Model, attacks, certify, data, models, training

pytestmark = pytest.mark.fast


def filtered(params, x):
    kernel, head = params
    x = jax.lax.conv_general_dilated(
        x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(x).reshape(len(x), -1) @ head


@pytest.mark.parametrize(("norm", "backward"), [(math.inf, None), (2, 0.7)])
def test_gradients_are_those_of_finite_differences(norm, backward):
    rng = np.random.default_rng(0)
    params = [
        jnp.array(rng.normal(size=(3, 3, 1, 2)), jnp.float32),
        jnp.array(rng.normal(size=(8, 3)), jnp.float32),
    ]
    x = jnp.array(rng.uniform(0.2, 0.8, size=(3, 4, 4, 1)), jnp.float32)
    y = jnp.array([0, 1, 2])

    def total(params):
        model = Model(filtered, params)
        low = certify.trainable_bounds(model, x, y, norm=norm, eps=0.05, backward=backward)
        return jnp.sum(jnp.where(jnp.isinf(low), 0.0, low))

    slope = jax.jit(jax.grad(total))(params)
    value = jax.jit(total)
    for place in range(2):
        for _ in range(4):
            step = np.zeros(params[place].shape, np.float32)
            step.flat[rng.integers(step.size)] = 1e-2
            sides = [
                value([p + s * step if i == place else p for i, p in enumerate(params)])
                for s in (1, -1)
            ]
            found = float(jnp.sum(slope[place] * step))
            assert found == pytest.approx(float(sides[0] - sides[1]) / 2, rel=0.05, abs=1e-3)


def test_they_lie_between_intervals_and_the_truth():
    model, rng = models.mlp((4, 16, 16, 3), key=jax.random.key(0)), np.random.default_rng(1)
    x = jnp.array(rng.uniform(size=(8, 4)), jnp.float32)
    y = model(x).argmax(axis=-1)
    how = {"norm": math.inf, "eps": 0.1}
    ends = [
        jax.jit(lambda model, b=b: certify.trainable_bounds(model, x, y, backward=b, **how))(model)
        for b in (None, 1.0)
    ]
    found = certify.margin_bounds(model, x, y, method="interval", **how)
    np.testing.assert_allclose(ends[0], found, rtol=1e-5)
    points = jnp.clip(x + 0.1 * rng.choice([-1, 1, 0.3], size=(2000, *x.shape)), 0, 1)
    out = model(points.reshape(-1, 4)).reshape(2000, 8, 3)
    apart = jnp.min(jnp.take_along_axis(out, y[None, :, None], axis=2) - out, axis=0)
    rival = jnp.arange(3) != y[:, None]
    assert np.all((ends[1] <= apart + 1e-5) | ~rival)
    assert np.mean((ends[1] > ends[0])[rival]) > 0.9


def test_intervals_verify_what_is_trained_for_it():
    """Of a net that is trained otherwise they verify nothing at this radius."""
    train, test = data.digits()
    net, x, y = models.mlp((64, 64, 10), key=jax.random.key(0)), *test.take(200)
    proof = certify.CertifiedTraining(backward=True)
    trained = training.train(
        net, *train, key=jax.random.key(1), epochs=15, certificate=proof, eps=0.06
    )
    how = {"norm": math.inf, "eps": 0.05, "method": "interval", "batch_size": 200}
    assert np.mean(certify.certified(trained.model, x, y, **how)) > 0.35
    assert np.mean(trained.model(x).argmax(axis=-1) == y) > 0.8
    # Epochs tell what is verified at the radius of the time: all of it in the end.
    assert 0.4 < trained.history.robust_accuracy[-1] <= trained.history.accuracy[-1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"warm": 0.7}, "warm"),
        ({"ramp": 1.5}, "ramp"),
        ({"clean": -0.1}, "clean"),
        ({"norm": 3}, "norm"),
        ({"box": (1.0, 0.0)}, "box"),
    ],
)
def test_bad_schedules_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        certify.CertifiedTraining(**wrong)


def test_a_certificate_goes_with_a_radius_and_without_an_attack():
    net, x, y = models.mlp((4, 3), key=jax.random.key(0)), jnp.full((2, 4), 0.5), jnp.array([0, 1])
    how = {"key": jax.random.key(0), "certificate": certify.CertifiedTraining()}
    for wrong in ({}, {"eps": 0.1, "attack": attacks.fgsm()}, {"eps": 0.1, "kappa": 2.0}):
        with pytest.raises(ValueError, match=r"certificate|kappa"):
            training.train(net, x, y, **how, **wrong)
