"""Loops of known length that stay loops, against the same loops written out, and against points."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from wdjax import Model, certify
from wdjax.bounds import graph, margins, region

RNG = np.random.default_rng(0)
STEPS, INPUTS, WIDTH = 3, 3, 3


def weight(*shape):
    return jnp.asarray(RNG.normal(size=shape) / math.sqrt(shape[-2]), jnp.float32)


W = {
    "x": weight(INPUTS, 4 * WIDTH),
    "h": weight(WIDTH, 4 * WIDTH),
    "deep": weight(STEPS, WIDTH, WIDTH),
    "kernel": weight(3, 3, 1, 1),
    "image": weight(9, 3),
    "out": weight(WIDTH, 3),
    "outs": weight(STEPS * WIDTH, 3),
}


def series(x):
    return x.reshape(len(x), STEPS, INPUTS).transpose(1, 0, 2)


def gru(p, x):
    def step(h, x):
        a, b = x @ p["x"][:, : 3 * WIDTH], h @ p["h"][:, : 3 * WIDTH]
        z, r = jnp.split(jax.nn.sigmoid((a + b)[:, : 2 * WIDTH]), 2, axis=1)
        n = jnp.tanh(a[:, 2 * WIDTH :] + r * b[:, 2 * WIDTH :])
        return (1 - z) * n + z * h, None

    return lax.scan(step, jnp.zeros((len(x), WIDTH)), series(x))[0] @ p["out"]


def lstm(p, x):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"], 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((len(x), WIDTH))
    _, hs = lax.scan(step, (zero, zero), series(x))
    return hs.transpose(1, 0, 2).reshape(len(x), -1) @ p["outs"]


def deep(p, x):
    """One layer a step, whose weights are a known series; what is added depends on the input."""
    added = jnp.sin(x[:, :WIDTH])

    def step(h, w):
        return h + jax.nn.relu(h @ w + 0.3 * added), None

    return lax.scan(step, x[:, -WIDTH:], p["deep"])[0] @ p["out"]


def counting(p, x):
    """A carry that is a known number, a result that is one, and one that is the input's."""

    def step(carry, x):
        h, count = carry
        h = jnp.tanh(x @ p["x"][:, :WIDTH] + h @ p["deep"][0]) * count
        return (h, count + 0.25), (x[:, 0], count)

    begun = 0.1 * jnp.ones((len(x), WIDTH)), jnp.ones(())
    (h, last), (rows, counts) = lax.scan(step, begun, series(x))
    return h @ p["out"] * last + (rows.T @ counts[:, None]) * jnp.arange(3.0)


def images(p, x):
    """Feature maps as carries."""
    dims = ("NHWC", "HWIO", "NHWC")

    def step(h, _):
        moved = lax.conv_general_dilated(h, p["kernel"], (1, 1), "SAME", dimension_numbers=dims)
        return jax.nn.relu(moved + 0.1) + 0.2 * h, None

    x = x.reshape(len(x), 3, 3, 1)
    return lax.scan(step, x, None, length=4)[0].reshape(len(x), -1) @ p["image"]


def choices(p, x):
    """Booleans and integers that depend on the input, and known keys."""
    where, best = x[:, :WIDTH] > 0.3, jnp.argmax(x, axis=1)[:, None]
    chosen = jnp.stack([where, ~where, x[:, -WIDTH:] > 0.6])

    def step(h, given):
        here, key = given
        noise = 0.1 * jax.random.normal(key, (WIDTH,))
        h = jnp.where(here & where, h, 0.5 * h) @ p["deep"][0]
        return jnp.tanh(h + 0.1 * best + noise), None

    keys = jax.random.split(jax.random.key(0), len(chosen))
    return lax.scan(step, x[:, :WIDTH], (chosen, keys))[0] @ p["out"]


def loops(p, x):
    """A loop within a loop, whose results another one reads from the end; carries that swap."""

    def inner(h, _):
        return jnp.tanh(h @ p["deep"][1]), None

    def outer(carry, _):
        g, h = carry
        return (lax.scan(inner, h, None, length=2)[0], 0.9 * g), h

    begun = x[:, :WIDTH], x[:, -WIDTH:]
    (g, h), hs = lax.scan(outer, begun, None, length=4)
    h, ones = lax.scan(lambda h, t: (jnp.maximum(h, t), jnp.ones(3)), h, hs, reverse=True)
    return (g + h) @ p["out"] + ones.sum(axis=0)


PROGRAMS = {
    "GRU": gru,
    "LSTM": lstm,
    "choices": choices,
    "layers": deep,
    "known carries": counting,
    "maps": images,
    "several loops": loops,
}
X = jnp.asarray(RNG.uniform(0.2, 0.8, (3, STEPS * INPUTS)), jnp.float32)


def bounds(name, norm=math.inf, eps=0.05, method="crown"):
    model = Model(PROGRAMS[name], W)
    y = model(X).argmax(axis=-1)
    low = certify.margin_bounds(model, X, y, norm=norm, eps=eps, method=method)
    return np.asarray(low), model, np.asarray(y)


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_are_bounded_as_if_written_out(name, monkeypatch):
    low, *_ = bounds(name)
    monkeypatch.setattr(graph, "_SHORT", 10**9)
    monkeypatch.setitem(PROGRAMS, "again", lambda p, x, fn=PROGRAMS[name]: fn(p, x))
    same, *_ = bounds("again")
    np.testing.assert_allclose(low, same, rtol=2e-4, atol=2e-4)


def test_slopes_of_all_steps_are_optimised(monkeypatch):
    def cell(p, x):
        def step(h, x):
            return jax.nn.relu(x @ p["x"][:, :WIDTH] + h @ p["h"][:, :WIDTH]), None

        return lax.scan(step, jnp.zeros((len(x), WIDTH)), series(x))[0] @ p["out"]

    monkeypatch.setitem(PROGRAMS, "cell", cell)
    plain, *_ = bounds("cell", eps=0.3)
    low, model, y = bounds("cell", eps=0.3, method="alpha")
    monkeypatch.setattr(graph, "_SHORT", 10**9)
    monkeypatch.setitem(PROGRAMS, "again", lambda p, x: cell(p, x))
    same, *_ = bounds("again", eps=0.3, method="alpha")
    np.testing.assert_allclose(low, same, rtol=1e-3, atol=1e-3)
    rivals = np.arange(3) != y[:, None]
    assert np.all(low[rivals] >= plain[rivals] - 1e-5)
    assert np.max(low[rivals] - plain[rivals]) > 0.03
    step = 0.3 * np.sign(np.random.default_rng(1).normal(size=(4000, *X.shape)))
    logits = np.asarray(jax.vmap(model)(np.clip(X + 0.999 * step, 0, 1).astype(np.float32)))
    apart = np.take_along_axis(logits, y[None, :, None], axis=2) - logits
    assert np.all((low <= apart.min(axis=0))[rivals])


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_point_has_a_smaller_margin(name):
    rng = np.random.default_rng(1)
    for norm in (math.inf, 1) if name == "layers" else (math.inf,):
        low, model, y = bounds(name, norm)
        step = rng.normal(size=(4000, *X.shape))
        if norm == math.inf:
            step = 0.05 * np.sign(step)
        else:
            step *= 0.05 / np.linalg.norm(step, ord=norm, axis=-1, keepdims=True)
        points = np.clip(np.asarray(X) + 0.999 * step, 0, 1).astype(np.float32)
        logits = np.asarray(jax.vmap(model)(points))
        apart = np.take_along_axis(logits, y[None, :, None], axis=2) - logits
        rivals = np.arange(3) != y[:, None]
        assert np.all((low <= apart.min(axis=0))[rivals])
        assert np.all(np.isfinite(low[rivals]))


def equations(jaxpr):
    inner = [v for eqn in jaxpr.eqns for v in jax.tree.leaves(list(eqn.params.values()))]
    inner = [getattr(v, "jaxpr", v) for v in inner if hasattr(getattr(v, "jaxpr", v), "eqns")]
    return len(jaxpr.eqns) + sum(map(equations, inner))


@pytest.mark.parametrize("method", ["crown", "alpha"])
def test_more_steps_need_no_more_program(method):
    def size(steps):
        def apply(w, x):
            return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=steps)[0]

        def low(w, x):
            ball = region.ball(x, jnp.full(1, 0.1), math.inf, (0.0, 1.0), None)
            return margins.lower(Model(apply, w), ball, jnp.zeros(1, int), method)

        return equations(jax.make_jaxpr(low)(weight(3, 3), jnp.full((1, 3), 0.4)).jaxpr)

    assert size(4) == size(30)


def test_gradients_are_those_of_the_bound():
    def low(p):
        model = Model(PROGRAMS["layers"], p)
        y = jnp.zeros(1, int)
        return certify.margin_bounds(model, X[:1], y, norm=math.inf, eps=0.02)[0, 1]

    slope = jax.grad(low)(W)["deep"]
    step = jnp.zeros_like(slope).at[1, 2, 0].set(1e-2)
    change = low({**W, "deep": W["deep"] + step}) - low({**W, "deep": W["deep"] - step})
    np.testing.assert_allclose(slope[1, 2, 0], change / 2e-2, rtol=0.05, atol=1e-3)
