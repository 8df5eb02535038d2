"""Certificates below, exact values between, attacks above: they never cross."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wdjax import Lp, Model, attacks, certify, data, losses, models, run, search, spend
from wdjax.models import convert

NORMS = [1, 2, math.inf]
EVERY_NORM = pytest.mark.parametrize("norm", NORMS)

# The exact fixtures, all brought to one shape, so that one program serves them.

NETS = [
    "a_n2_h8_K2",
    "b_n2_h16_K3",
    "c_n2_h8x8_K3",
    "d_n2_h6x6x6_K4",
    "e_n3_h16_K4",
    "f_n3_h8x8_K2",
    "m_n3_h8x8_K2_mono",
    "o_n2_h8_K3_nobias",
]
SIZES = (3, 16, 16, 16, 4)


def layered(layers, x):
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def padded(net):
    """The net with idle inputs, neurons and classes, and ReLU repeated: the same function."""
    depth = sum(name.startswith("W") for name in net)
    layers = [(net[f"W{i}"].T, net[f"b{i}"]) for i in range(1, depth + 1)]
    while len(layers) < len(SIZES) - 1:
        width = len(layers[-1][0])
        layers.insert(-1, (np.eye(width), np.zeros(width)))
    out = []
    for (weight, bias), rows, columns in zip(layers, SIZES, SIZES[1:]):
        weight = np.pad(weight, [(0, rows - weight.shape[0]), (0, columns - weight.shape[1])])
        bias = np.pad(bias, (0, columns - bias.size))
        out.append((jnp.array(weight, jnp.float32), jnp.array(bias, jnp.float32)))
    return Model(layered, out)


def load(shared, name):
    net = dict(np.load(shared / f"fixtures/relu/{name}.npz"))
    exact = json.loads((shared / f"fixtures/relu/{name}.json").read_text())
    return net, exact, padded(net)


def widened(x):
    return jnp.array(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 3 - x.shape[-1])]), jnp.float32)


@EVERY_NORM
def test_constants_are_at_least_the_exact_ones(shared, norm):
    key = "inf" if norm == math.inf else norm
    looseness = []
    for name in NETS:
        net, exact, model = load(shared, name)
        classes, present = exact["K"], np.unique(net["y"])
        center, radius = widened(net["box_center"]), float(net["box_radius"])
        reach = jnp.where(jnp.arange(3) < exact["n"], radius, 0.0)
        domains = {
            "box": (center - reach, center + reach),
            "global": (jnp.full(3, -jnp.inf), jnp.full(3, jnp.inf)),
        }
        for domain, ends in domains.items():
            both = (
                certify.layer_product(model, *ends, norm=norm),
                certify.interval_jacobian(model, *ends, norm=norm),
            )
            for constants in both:
                constants = np.asarray(constants)[:classes, :classes]
                assert constants.max() >= exact[domain][f"Lmargin_{key}"] * (1 - 1e-6)
                labels = exact[domain][f"Lmargin_lab_{key}"]
                assert constants[present].max() >= labels * (1 - 1e-6)
            if exact[domain]["masks"] == 1:
                # One affine cell, which intervals see once the box is small: equality.
                ends = center - reach / 10, center + reach / 10
                small = certify.interval_jacobian(model, *ends, norm=norm)[:classes, :classes]
                value = exact[domain][f"Lmargin_{key}"]
                np.testing.assert_allclose(small.max(), value, rtol=1e-4)
            best = np.minimum(*both)[:classes, :classes].max()
            looseness.append(best / max(exact[domain][f"L_{key}"], 1e-9))
    # Not only sound: against the paper's own exact constant they lose little on such nets.
    assert np.median(looseness) < 4


# (WDRO - E_N) / eps of the margin loss at eps = 0.001, 0.1, 1, 5, 50: exact linear programs over
# all of space, on the first five samples.
BUDGETS = np.array([0.001, 0.1, 1, 5, 50])
SLOPES = {
    ("a_n2_h8_K2", 1): (3.2243, 3.2243, 3.2243, 3.2243, 3.2243),
    ("a_n2_h8_K2", math.inf): (3.7505, 3.7505, 3.7505, 3.7505, 3.7505),
    ("b_n2_h16_K3", 1): (1.1082, 1.1082, 1.1082, 0.9147, 0.8439),
    ("b_n2_h16_K3", math.inf): (1.5392, 1.5352, 1.3344, 1.1582, 1.1106),
    ("c_n2_h8x8_K3", 1): (2.4715, 2.4715, 2.4715, 2.4715, 2.4715),
    ("c_n2_h8x8_K3", math.inf): (3.5735, 3.5735, 3.5735, 3.5735, 3.5735),
    ("d_n2_h6x6x6_K4", 1): (3.0791, 2.9346, 1.8000, 0.5394, 0.0539),
    ("d_n2_h6x6x6_K4", math.inf): (3.9350, 3.3514, 2.4514, 0.5394, 0.0539),
    ("o_n2_h8_K3_nobias", 1): (2.4933, 2.4933, 2.1620, 1.6166, 1.3888),
    ("o_n2_h8_K3_nobias", math.inf): (4.3576, 4.3576, 2.9877, 2.6992, 2.6343),
}


@pytest.mark.fast
@pytest.mark.parametrize("norm", [1, math.inf])
def test_wdro_bounds_hold_the_exact_programs(shared, norm):
    for (name, r), slopes in SLOPES.items():
        if r != norm:
            continue
        net, exact, model = load(shared, name)
        x, y = widened(net["X"][:5]), jnp.array(net["y"][:5])
        # Idle classes get logits that never matter, so that the loss is that of the fixture.
        weight, bias = model.args[0][-1]
        idle = jnp.arange(SIZES[-1]) >= exact["K"]
        model = Model(
            layered,
            [
                *model.args[0][:-1],
                (jnp.where(idle, weight[:, :1], weight), jnp.where(idle, bias[0] - 1, bias)),
            ],
        )
        clean = float(np.mean(np.asarray(losses.margin(model(x), y), float)))
        bounds = certify.wdro_bound(
            model, x, y, norm=norm, eps=BUDGETS, order=1, loss=losses.margin, box=None
        )
        assert np.all(bounds >= clean + BUDGETS * (np.array(slopes) - 6e-5))


# Trained nets: no attack flips a sample inside its certified ball.


def fitted(apply, params, x, y):
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        def loss(params):
            return jnp.mean(losses.cross_entropy(apply(params, x), y))

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(60):
        params, state = step(params, state)
    return Model(apply, params)


def convolutional(params, x):
    x = jax.nn.relu(
        jax.lax.conv_general_dilated(
            x, params["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return x.reshape(len(x), -1) @ params["head"]


@pytest.fixture(scope="module")
def digits():
    split = data.digits()
    return jnp.array(split.train.x), jnp.array(split.train.y), split.test


def never_crosses(model, x, y, norm, beyond):
    """Attacks at the median certified radius and ``beyond``, where they do succeed."""
    radii = np.asarray(certify.radius(model, x, y, norm=norm, steps=5), float)
    clean = np.asarray(jnp.argmax(model(x), axis=-1) == y)
    assert np.all(radii[~clean] == 0)
    assert np.median(radii[clean]) > 1e-4
    near = float(np.median(radii[clean]))
    pgd = attacks.PGD(Lp(norm), steps=10)
    wda = attacks.WDA(Lp(norm), steps=10, probe=5)
    walked = search(attacks.WDAPlusPlus(Lp(norm), step_size=beyond / 4), model, x, y)
    found = [
        walked,
        *(run(attack, model, x, y, eps=eps) for attack in (pgd, wda) for eps in (near, beyond)),
    ]
    for result in found:
        flipped = np.asarray(result.success) & clean
        assert np.all(np.asarray(result.cost, float)[flipped] >= radii[flipped])
    assert sum(int(np.sum(result.success & clean)) for result in found) > 0, "no attack succeeded"
    for order in (1, 2):
        attacked = float(spend(walked, eps=near, order=order).accuracy)
        assert certify.certified_accuracy(radii, near, order) <= attacked + 1e-6


BEYOND = {1: 4.0, 2: 1.5, math.inf: 0.3}


@EVERY_NORM
def test_digits_are_sandwiched(digits, norm):
    x, y, test = digits
    params = models.mlp((64, 32, 10), key=jax.random.key(0))
    model = fitted(lambda model, x: model(x), params, x, y)
    never_crosses(model, jnp.array(test.x[:32]), jnp.array(test.y[:32]), norm, BEYOND[norm])


def test_convolutional_digits_are_sandwiched(digits):
    x, y, test = digits
    keys = jax.random.split(jax.random.key(1))
    params = {
        "kernel": 0.3 * jax.random.normal(keys[0], (3, 3, 1, 6)),
        "head": 0.1 * jax.random.normal(keys[1], (54, 10)),
    }
    model = fitted(convolutional, params, x, y)
    never_crosses(model, jnp.array(test.x[:32]), jnp.array(test.y[:32]), math.inf, 0.3)


@pytest.mark.parametrize("weights", ["mnist_linf_robust", "mnist_adv_training_wong"])
def test_wong_mnist_is_sandwiched(shared, weights):
    model, _ = convert.load(shared / f"data/weights/{weights}.pth", "wong_mnist")
    images = np.load(shared / "data/mnist_test_0_500.npz")
    x, y = images["x"][:8].astype(np.float32) / 255, images["y"][:8]
    never_crosses(model, jnp.array(x), jnp.array(y), math.inf, 0.4)
