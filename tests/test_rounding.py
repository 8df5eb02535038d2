"""Whether a model rounds is told from what depends on its samples, wherever that happens."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import wdjax
from wdjax import attacks
from wdjax.checks import rounding

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(6, 3)), jnp.float32)
X = jnp.asarray(RNG.uniform(0.2, 0.8, (16, 6)), jnp.float32)
KEY = jax.random.key(0)


def _row(w, row):
    return (jnp.round(8 * row) / 8) @ w


def _carried(w, x, change):
    """The step is of what the first iteration made of the samples."""
    start = jnp.zeros(x.shape[:1]), jnp.zeros(x.shape[:1])

    def step(carry, column):
        return (carry[0] + column, change(carry[0])), None

    return lax.scan(step, start, x.T)[0][1][:, None] * w[0]


ROUNDS = {
    "vmap": lambda w, x: jax.vmap(_row, (None, 0))(w, x),
    "map over samples": lambda w, x: lax.map(lambda row: _row(w, row), x),
    "map over parts": lambda w, x: lax.map(lambda row: _row(w, row), x, batch_size=5),
    "loop of Python": lambda w, x: jnp.stack([_row(w, row) for row in x]),
    "carry": lambda w, x: _carried(w, x, jnp.floor),
    "while": lambda w, x: lax.while_loop(
        lambda state: state[0] < 2, lambda state: (state[0] + 1, _row(w, state[1]) @ w.T), (0, x)
    )[1] @ w,
    "branch": lambda w, x: lax.cond(w[0, 0] > 0, lambda: _row(w, x), lambda: x @ w),
}  # fmt: skip
LEVELS = jnp.linspace(0, 1, 9)
COMPARES = {
    "thermometer": lambda w, x: (x[..., None] > LEVELS).astype(x.dtype).sum(-1) @ w,
    "thermometer of some": lambda w, x: jnp.concatenate(
        [(x[:, :2, None] > LEVELS).astype(x.dtype).sum(-1), x[:, 2:]], axis=1
    ) @ w,
    "threshold of some": lambda w, x: x @ w + jnp.where(x[:, :1] > 0.5, 1.0, 0.0),
    "sign": lambda w, x: x @ w + jnp.sign(x[:, :1] - 0.5),
    "digits": lambda w, x: x @ w + jnp.digitize(x, LEVELS) @ w,
    "branch": lambda w, x: x @ w
    + lax.map(lambda row: lax.cond(row[0] > 0.5, lambda: 1.0, lambda: 0.0), x)[:, None],
    "first of a sort": lambda w, x: x @ w + w[lax.top_k(x, 1)[1][:, 0]],
    "remainder": lambda w, x: (x - lax.rem(x, jnp.full_like(x, 0.125))) @ w,
}  # fmt: skip
PLAIN = {
    "rectifiers": lambda w, x: (x * (x > 0.5) + jnp.where(x > 0.4, x, 0.1 * x)
                                + x * jnp.where(x > 0.3, 1.0, 0.1) + x * jnp.sign(x)) @ w,
    "guarded norm": lambda w, x: x / jnp.where((x**2).sum(1) > 0, (x**2).sum(1), 1.0)[:, None] @ w,
    "logsumexp": lambda w, x: x @ w - jax.nn.logsumexp(x, axis=1, keepdims=True),
    "sorted": lambda w, x: jnp.sort(x, axis=1) @ w + jnp.quantile(x, 0.3, axis=1, keepdims=True),
    "masked mean": lambda w, x: (x * (x > 0.2)) @ w / (x > 0.2).sum(1, keepdims=True),
    "weights": lambda w, x: x @ (jnp.round(8 * w) / 8),
    "weights in a loop": lambda w, x: lax.scan(
        lambda out, row: (out @ jnp.round(row), None), x, jnp.stack([w @ w.T] * 2)
    )[0] @ w,
    "draws of the batch's shape": lambda w, x: x @ w
    + jax.random.categorical(KEY, jnp.zeros(2), shape=(len(x), 1)),
    "carry": lambda w, x: _carried(w, x, jnp.tanh),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDS)
def test_a_step_is_seen_wherever_it_is(name):
    assert rounding.found(wdjax.Model(ROUNDS[name], W), X) in ("round", "floor")


@pytest.mark.parametrize("name", COMPARES)
def test_comparisons_with_samples_are_steps(name):
    assert rounding.found(wdjax.Model(COMPARES[name], W), X) is not None


@pytest.mark.parametrize("name", PLAIN)
def test_nothing_is_said_of_masks_and_of_what_does_not_depend_on_samples(name):
    assert rounding.found(wdjax.Model(PLAIN[name], W), X) is None


def test_a_model_of_one_batch_size_is_searched_as_without_diagnosis():
    model = wdjax.Model(lambda w, x: x.reshape(16, 6) @ w, W)
    y = jnp.argmax(model(X), axis=1)
    with warnings.catch_warnings(action="error"):
        found = wdjax.search(attacks.PGD(), model, X, y, eps=0.02)
        plain = wdjax.search(attacks.PGD(), model, X, y, eps=0.02, diagnose=False)
    np.testing.assert_array_equal(found.x_adv, plain.x_adv)
