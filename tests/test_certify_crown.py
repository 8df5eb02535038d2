"""Backward bounds against random points, closed forms, attacks and published counts."""

import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from wdjax import Lp, Model, attacks, certify, run
from wdjax.bounds import crown, margins, passes, region
from wdjax.models import convert

NORMS = {1: 8.0, 2: 2.5, math.inf: 1.0}


def conv(x, kernel, stride=1, padding=1):
    return lax.conv_general_dilated(
        x, kernel, (stride,) * 2, ((padding,) * 2,) * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def pool(x, window, stride, padding=0):
    pads = ((0, 0), (padding,) * 2, (padding,) * 2, (0, 0))
    shape, strides = (1, window, window, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, shape, strides, pads)


def head(p, x):
    x = x.reshape(len(x), -1)
    return x @ p["head"][: x.shape[1]] + p["bias"]


def residual(p, x):
    x = jax.nn.relu(conv((x - 0.4) / 0.25, p["in"], 2))
    skip = conv(x, p["one"], 1, 0)
    return head(p, jax.nn.relu(skip + conv(jax.nn.relu(conv(x, p["mid"]) + 0.1), p["mid"])))


def unpadded(p, x):
    x = jax.nn.relu(conv(x, p["in"], 1, 0) * p["bias"][0])
    return head(p, jax.nn.relu(conv(conv(x, p["mid"], 2, 1), p["mid"])))


def pooled(p, x):
    return head(p, jax.nn.relu(conv(pool(conv(x, p["in"]), 3, 2, 1), p["mid"])))


def averaged(p, x):
    x = jax.nn.relu6(4 * conv(x, p["in"]))
    sums = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return head(p, jnp.concatenate([sums / 4, -jnp.clip(sums, 0.1, 0.5)[:, ::-1]], axis=-1)[:, 1:])


def kinks(p, x):
    x = conv(x, p["in"])
    x = jnp.maximum(x, -0.3 * x) + jnp.abs(x - 0.1) + jax.nn.leaky_relu(x)
    return head(p, jnp.minimum(x, 0.4).max(axis=1))


def smooth(p, x):
    x = jnp.tanh(2 * conv(x, p["in"])) + jax.nn.sigmoid(conv(x, p["in"]))
    return head(p, jax.nn.silu(x) * jnp.exp(-x) + x**2)


def gated(p, x):
    x = x.reshape(len(x), -1)[:, :16] @ p["square"]
    norm = (x - x.mean(axis=-1, keepdims=True)) / jnp.sqrt(x.var(axis=-1, keepdims=True) + 0.3)
    return jax.nn.log_softmax(head(p, jax.nn.gelu(norm)))


def short(p, x):
    x = jax.nn.relu(conv(x.astype(jnp.bfloat16), p["in"].astype(jnp.bfloat16)))
    return head(p, x.astype(jnp.float32))


def looped(p, x):
    x = x.reshape(len(x), -1)[:, :16]
    x, _ = lax.scan(lambda c, w: (jax.nn.relu(c @ w), None), x, jnp.stack([p["square"]] * 3))
    return head(p, x)


ARCHITECTURES = (
    residual, unpadded, pooled, averaged, kinks, smooth, gated, short, looped,
)  # fmt: skip


def parameters(rng):
    def normal(*shape):
        scale = rng.choice([0.5, 1.0, 2.0]) / math.sqrt(math.prod(shape[:-1]))
        return np.asarray(scale * rng.normal(size=shape), np.float32)

    return {
        "in": normal(3, 3, 1, 3),
        "mid": normal(3, 3, 3, 3),
        "one": normal(1, 1, 3, 3),
        "head": normal(147, 3),
        "bias": normal(3),
        "square": normal(16, 16),
    }


def moves(rng, shape, norm):
    step = rng.normal(size=shape)
    flat = step.reshape(*shape[:2], -1)
    if norm == math.inf:
        flat = np.where(rng.random((*shape[:2], 1)) < 0.7, np.sign(flat), flat)
    if norm == 1:
        few = rng.random(flat.shape) < 2 / flat.shape[-1]
        flat = np.where(few.any(axis=-1, keepdims=True), flat * few, flat)
    flat = flat / np.linalg.norm(flat, norm, axis=-1, keepdims=True)
    return flat.reshape(shape)


@pytest.mark.parametrize(
    ("apply", "norm"),
    [*((apply, math.inf) for apply in ARCHITECTURES), (residual, 1), (residual, 2), (pooled, 2)],
)
def test_no_random_point_breaks_a_bound(apply, norm):
    """Some 3,000 nets and balls; the same programs serve all parameters."""
    rng, samples, scale = np.random.default_rng(0), 60, NORMS[norm]
    call = jax.jit(apply)
    decided = 0
    for _ in range(4):
        model = Model(apply, jax.tree.map(jnp.asarray, parameters(rng)))
        x = rng.choice([0.0, 1.0, 0.5], p=[0.1, 0.1, 0.8], size=(samples, 7, 7, 1))
        x = np.where(x == 0.5, rng.uniform(size=x.shape), x).astype(np.float32)
        y = rng.integers(0, 3, samples)
        eps = (scale * rng.choice([0.0, 1e-3, 0.03, 0.3], size=samples)).astype(np.float32)
        low = np.asarray(certify.margin_bounds(model, x, y, norm=norm, eps=eps))
        step = moves(rng, (20, *x.shape), norm) * eps[:, None, None, None] * (1 - 1e-6)
        points = np.clip(x + step, 0, 1).astype(np.float32)
        out = np.asarray(call(*model.args, points.reshape(-1, 7, 7, 1)), float)
        out = out.reshape(20, samples, 3)
        apart = np.take_along_axis(out, y[None, :, None], axis=2) - out
        rival = np.arange(3) != y[:, None]
        assert np.all((apart >= low) | ~rival)
        decided += np.sum(np.all(low > 0, axis=1))
    assert decided > 30, "and they are not vacuous"


@functools.cache
def small(seed):
    rng = np.random.default_rng(seed)
    model = Model(residual, jax.tree.map(jnp.asarray, parameters(rng)))
    x = jnp.array(rng.uniform(size=(32, 7, 7, 1)), jnp.float32)
    return model, x, model(x).argmax(axis=-1)


@pytest.mark.parametrize("norm", list(NORMS))
def test_methods_are_ordered_and_attacks_stay_outside(norm):
    model, x, y = small(3)
    eps = 0.02 * NORMS[norm]
    # Slopes of all layers take a minute to compile: in one norm.
    names = ["interval", "crown", "auto", *(["alpha"] if norm == math.inf else [])]
    bounds = {
        method: np.min(
            certify.margin_bounds(model, x, y, norm=norm, eps=eps, method=method), axis=1
        )
        for method in names
    }
    for looser, tighter in itertools.pairwise(names):
        held = [int(np.sum(bounds[name] > 0)) for name in (looser, tighter)]
        assert held[0] <= held[1]
    attack = run(attacks.PGD(Lp(norm), steps=20), model, x, y, eps=eps)
    for low in bounds.values():
        assert not np.any(np.asarray(attack.success) & (low > 0))
    assert np.sum(bounds["crown"] > 0) > 0
    radii = certify.radius(model, x, y, norm=norm)
    walked = run(attacks.WDAPlusPlus(Lp(norm), step_size=eps), model, x, y, eps=1.0, order=1)
    flipped = np.asarray(walked.success)
    assert np.all(np.asarray(walked.cost)[flipped] >= np.asarray(radii)[flipped])


def test_balls_are_cut_by_the_box():
    """Of a linear model over ball and box, against the closed forms."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(12, 2)).astype(np.float32)
    model = Model(lambda w, x: x @ w, jnp.array(weight))
    x = rng.choice([0.0, 0.02, 0.5, 1.0], size=(20, 12)).astype(np.float32)
    y = np.zeros(20, int)
    gap = np.float64(weight[:, 0] - weight[:, 1])
    cap = np.where(gap > 0, x, 1 - x)
    for eps in (0.05, 0.4, 2.0):
        linf = x @ gap - np.abs(gap) @ np.minimum(cap, eps).T
        order = np.argsort(-np.abs(gap))
        spent = np.minimum(np.cumsum(cap[:, order], axis=1), eps)
        l1 = x @ gap - np.diff(spent, prepend=0) @ np.abs(gap)[order]
        l2 = []
        for one in cap:
            levels = np.geomspace(1e-6, 1e6, 4000)[:, None]
            move = np.minimum(np.abs(gap) * levels, one)
            inside = np.linalg.norm(move, axis=1) <= eps
            l2.append(np.max(move[inside] @ np.abs(gap)))
        l2 = x @ gap - np.array(l2)
        for norm, exact in ((math.inf, linf), (1, l1), (2, l2)):
            low = np.asarray(certify.margin_bounds(model, x, y, norm=norm, eps=eps))[:, 1]
            np.testing.assert_allclose(low, exact, atol=2e-2 * eps + 1e-5)
            assert np.all(low <= exact + 1e-2 * eps * (norm == 2))


# Published weights: counts measured with auto_LiRPA [xu2020].


def load(shared, weights, arch, images, n):
    model = convert.load(shared / f"data/weights/{weights}.pth", arch).model
    data = np.load(shared / f"data/{images}.npz")
    x = (data["x"][:n] / 255).astype(np.float32)
    return model, x.reshape(n, -1) if arch == "mlp" else x, data["y"][:n]


@pytest.mark.parametrize(
    ("weights", "arch", "norm", "counts"),
    [
        ("mnist_2_20", "mlp", math.inf, {0.01: 88, 0.02: 86, 0.05: 79}),
        ("mnist_fc_3layer", "mlp", math.inf, {0.01: 95, 0.02: 86}),
        ("mnist_fc_3layer", "mlp", 2, {0.1: 96, 0.3: 69}),
        ("mnist_6_100_nat", "mlp", math.inf, {0.01: 94, 0.02: 47}),
        ("mnist_linf_robust", "wong_mnist", math.inf, {0.05: 98, 0.1: 96}),
    ],
)
def test_published_counts_are_reached(shared, weights, arch, norm, counts):
    model, x, y = load(shared, weights, arch, "mnist_test_0_500", 100)
    for eps, count in counts.items():
        held = certify.certified(model, x, y, norm=norm, eps=eps, batch_size=100)
        assert int(np.sum(held)) >= count - 1


def test_slopes_of_their_own_verify_more(shared):
    model, x, y = load(shared, "mnist_fc_3layer", "mlp", "mnist_test_0_500", 100)
    held = certify.certified(model, x, y, norm=math.inf, eps=0.02, method="alpha", batch_size=100)
    assert int(np.sum(held)) >= 88


def planted(p, x):
    """Class 1 only in a corner that no gradient outside of it points to."""
    x = x.reshape(len(x), -1)
    hidden = jax.nn.relu((x - p["center"]) @ p["sign"][:, None] - p["level"])
    out = jax.nn.relu(hidden * p["steep"] + x @ p["noise"]) @ p["mix"]
    return jnp.concatenate([jnp.ones_like(out), out], axis=1)


@pytest.mark.parametrize("norm", list(NORMS))
def test_planted_counterexamples_are_never_certified(norm):
    """200 flips just inside the ball, which an attack by gradients does not see."""
    rng, size = np.random.default_rng(5), 24
    missed = held = 0
    for trial in range(67):
        eps = float(rng.choice([1e-3, 0.03, 0.2]))
        center = rng.uniform(0.25, 0.75, size)
        raw = rng.choice([-1.0, 1.0], size) * rng.uniform(0.5, 1.5, size)
        step = {1: np.eye(size)[np.argmax(np.abs(raw))] * np.sign(raw), 2: raw, math.inf: raw}[norm]
        step = np.sign(step) if norm == math.inf else step / np.linalg.norm(step)
        most = eps * step @ raw
        p = {
            "center": center,
            "sign": raw,
            "level": (1 - 2e-3) * most,
            "steep": np.array([[2.0 / (1e-3 * most)]]),
            "noise": np.full((size, 1), 1e-4),
            "mix": np.ones((1, 1)),
        }
        model = Model(planted, jax.tree.map(lambda t: jnp.asarray(t, jnp.float32), p))
        x, y = np.float32(center)[None], np.array([0])
        flip = np.float32(center + (1 - 5e-4) * eps * step)[None]
        assert model(jnp.concatenate([x, flip])).argmax(axis=-1).tolist() == [0, 1]
        assert not certify.certified(model, x, y, norm=norm, eps=eps)[0]
        held += bool(certify.certified(model, x, y, norm=norm, eps=0.99 * eps)[0])
        if trial < 3:
            attack = attacks.PGD(Lp(norm), steps=10)
            missed += not run(attack, model, x, y, eps=eps).success[0]
    assert missed == 3
    assert held > 30, "smaller balls are certified, unless rounding itself reaches the flip"


def tightened(mixed, single=False):
    """Which values of ``mixed(weights, h)`` are tightened at a time, ``h`` having loose intervals,
    and the ends of all; ``single`` tightens one value after another."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)

    def apply(w, x):
        return mixed(w[2], jnp.tanh(x @ w[0]) @ w[1])

    x = jnp.asarray(rng.uniform(0.2, 0.8, size=(3, 4)), jnp.float32)
    net = margins.network(Model(apply, w), x)
    ball = region.ball(x, jnp.full(3, 0.1), math.inf, (0.0, 1.0), None)
    places = []

    def noted(state, needed):
        places.append(set(needed))
        for these in [{place: some} for place, some in needed.items()] if single else [needed]:
            crown.refine(state, these, passes.backward)

    state = crown.bounds(net, margins.wide(ball).prepared(), [noted])
    return places, {place: value[:2] for place, value in state.values.items()}


def test_what_feeds_several_functions_is_tightened_once():
    """And again only for an equation that needs other entries than those tightened before."""

    def mixed(w, h):
        later = jnp.tanh(jax.nn.relu(h) @ w)
        return jax.nn.relu(h) + h * later + h * jnp.sin(later)

    first, inner, second = tightened(mixed)[0]
    assert first == second != inner, "where the rectifier is unstable, everywhere for the products"
    assert len(tightened(lambda w, h: jax.nn.relu(h) + h * jnp.sin(h))[0]) == 1


def test_operands_of_one_layer_are_tightened_at_once():
    """As tightly as one after another: entries of one value never get another's bounds."""

    def gates(w, h):
        wide = jnp.concatenate([h, h[:, :2]], axis=1) @ jnp.concatenate([w, w[:2]])
        gate, last = jax.nn.sigmoid(3 * h @ w), jnp.maximum(h[:, :3] @ w[:3, :3], 0.1)
        return gate * jnp.tanh(wide + 1.0) + last.sum(axis=1, keepdims=True)

    places, ends = tightened(gates)
    same, each = tightened(gates, single=True)
    assert places == same
    assert len(places[0]) == 3
    chex.assert_trees_all_close(ends, each, rtol=1e-5, atol=1e-5)
