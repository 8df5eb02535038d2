"""Nets that are 1-Lipschitz by their layers: norms of layers, constants, radii against attacks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import Lp, Model, attacks, certify, lipschitz, losses, models, search, training
from wdjax.models.one_lipschitz import contracted

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("shape", [(1, 1, 9, 4), (1, 1, 4, 9), (3, 3, 2, 5), (3, 3, 5, 2)])
def test_layers_have_at_most_norm_1(shape):
    """By NumPy's singular values of the whole matrix, for kernels of any size, also of zeros."""
    rng, side = np.random.default_rng(0), 1 if shape[0] == 1 else 6

    @jax.jit
    def matrix(kernel):
        def apply(x):
            return models.conv.conv(x[None], contracted(kernel), 1, shape[0] // 2)[0]

        rows = jax.jacobian(apply)(jnp.zeros((side, side, shape[2])))
        return rows.reshape(-1, side * side * shape[2])

    largest = []
    for size in (1e-3, 1.0, 1e6):
        kernel = rng.normal(size=shape) * size * rng.exponential(size=shape[2:]) ** 3
        kernel[..., 0, :] *= 0
        largest.append(np.linalg.norm(matrix(kernel.astype(np.float32)), 2))
    assert 0.3 < min(largest) <= max(largest) <= 1 + 1e-5
    assert np.all(np.asarray(contracted(jnp.zeros(shape))) == 0)


@pytest.fixture(scope="module")
def trained():
    """A convolutional net on two noisy patterns, and samples."""
    rng = np.random.default_rng(1)
    y = np.arange(60) % 3
    patterns = rng.uniform(0.2, 0.8, size=(3, 4, 4, 1))
    x = np.clip(patterns[y] + 0.04 * rng.normal(size=(60, 4, 4, 1)), 0, 1).astype(np.float32)
    net = models.lipschitz_net(
        (4, 4, 1), key=jax.random.key(0), classes=3, channels=(6,), hidden=(8,)
    )
    proof = lipschitz.LipschitzTraining(norm=2, constant=math.sqrt(2))
    done = training.train(
        net, x, y, key=jax.random.key(1), epochs=80, batch_size=20, certificate=proof, eps=0.2,
        loss=lambda z, y: losses.cross_entropy(30 * z, y),
    )  # fmt: skip
    return done.model, x, y


def test_radii_are_long_and_no_attack_is_nearer(trained):
    model, x, y = trained
    radius = lipschitz.global_radius(model, x, y, norm=2)
    assert np.mean(radius > 0.2) > 0.8
    nearest = np.minimum(
        *(search(a, model, x, y).cost for a in (attacks.DDN(Lp(2), steps=100), attacks.FMN(Lp(2))))
    )
    assert np.all(nearest >= radius)
    assert np.median(nearest / radius) < 2.5
    # A margin over sqrt(2), from a forward pass alone: the proved constants are no larger.
    logits = np.sort(np.asarray(model(x), float))
    assert np.all(radius >= (logits[:, -1] - logits[:, -2]) / math.sqrt(2) - 1e-5)


def test_constants_are_proved_and_attained_by_no_gradient(trained):
    model, x, _ = trained
    ends = jnp.zeros((4, 4, 1)), jnp.ones((4, 4, 1))
    proved = np.asarray(certify.layer_product(model, *ends, norm=2))
    assert np.max(proved) <= math.sqrt(2) * 1.005  # In float32, with its rounding.
    rows = np.asarray(jax.vmap(jax.jacobian(lambda x: model(x[None])[0]))(jnp.asarray(x)))
    rows = rows.reshape(len(x), 3, -1)
    steep = np.linalg.norm(rows[:, :, None] - rows[:, None], axis=-1).max(axis=0)
    assert np.all(steep <= proved)
    assert np.max(steep) > 0.5
    assert np.linalg.norm(rows, 2, axis=(1, 2)).max() <= 1 + 1e-5


def test_radii_are_exact_for_linear_models_and_0_for_mistakes():
    w = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    model = Model(lambda w, x: x @ w, jnp.asarray(w))
    x = np.random.default_rng(1).uniform(size=(7, 5)).astype(np.float32)
    y = np.asarray(model(x)).argmax(axis=1)
    y[0] = (y[0] + 1) % 3
    for norm, dual in ((1, np.inf), (2, 2), (np.inf, 1)):
        expected = []
        for row, label in zip(x.astype(float) @ w.astype(float), y):
            apart = np.linalg.norm(w.T.astype(float) - w.T[label], dual, axis=1)
            expected.append(
                min(max(row[label] - row[j], 0) / apart[j] for j in range(3) if j != label)
            )
        found = lipschitz.global_radius(model, x, y, norm=norm)
        assert found[0] == 0
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert np.all(found <= expected)


def test_shapes_and_constants_are_refused():
    with pytest.raises(ValueError, match="halve the sides"):
        models.lipschitz_net((6, 6, 1), key=jax.random.key(0), channels=(4, 4))
    with pytest.raises(ValueError, match="constant"):
        lipschitz.LipschitzTraining(norm=2, constant=-1.0)
