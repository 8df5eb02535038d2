"""What may be NaN is never certified, whatever moves it and whatever hides it.

Each program makes NaN on a part of the ball, moves it, and hides it behind a function whose bounds
do not show it. The oracle are random points of the ball.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from wdjax import Model, certify

MAKERS = {
    "sqrt": lambda x: jnp.sqrt(x - jnp.array([0.5, -1.0, -1.0])) + 1,
    "log": lambda x: jnp.exp(jnp.log(x - jnp.array([0.5, -1.0, -1.0]))) + 1,
    "sine of an infinite number": lambda x: jnp.sin(jnp.log(jnp.maximum(x - 0.5, 0))) + 2,
    "sine of an overflow": lambda x: jnp.cos((1e5 * x) ** 8) + 2,
    "difference of overflows": lambda x: jnp.exp(200 * x) - jnp.exp(199 * x) + 2,
}
MOVERS = {
    "nothing": lambda h: h,
    "sort": lambda h: jnp.sort(h, 1),
    "cummax": lambda h: lax.cummax(h, axis=1),
    "cummin": lambda h: lax.cummin(h, axis=1),
    "pooling": lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    "scatter": lambda h: jnp.ones_like(h).at[:, jnp.array([2, 0, 1])].max(h),
    "reversal": lambda h: h[:, ::-1],
    "maximum": lambda h: jnp.broadcast_to(h.max(1, keepdims=True), h.shape),
    "product": lambda h: h @ jnp.ones((3, 3)),
    "square": lambda h: h[:, :, None] * h[:, None] @ jnp.ones(3),
    "top_k": lambda h: lax.top_k(h, 3)[0],
    "selection": lambda h: jnp.where(h[:, ::-1] > 1.5, h, h[:, [1, 2, 0]]),
}
HIDERS = {
    "tanh": lambda h: jnp.tanh(h) + 2,
    "clip": lambda h: jnp.clip(h, -1, 1) + 2,
    "sine": lambda h: jnp.sin(h) + 2,
    "positive": lambda h: jnp.where(h > -9, 1.0, -1.0),
    "size": lambda h: jnp.where(jnp.abs(h) > -1, 1.0, -1.0),
    "test": lambda h: jnp.where(jnp.isnan(jnp.abs(h)), -1.0, 1.0),
    "chosen": lambda h: jnp.where(h < 100, jnp.tanh(h), jnp.tanh(h) + 1) + 2,
}
CASES = [("sqrt", mover) for mover in MOVERS] + [(maker, "nothing") for maker in list(MAKERS)[1:]]
WAVES = {"sine", "chosen"}
"""Hiders whose lines take long to compile; they hide one program's values."""
X = jnp.array([[0.9, 0.7, 0.8]])


def program(maker, mover, x):
    """Classes: the first is right; entry by entry and hider by hider, others should be lower."""
    moved = MOVERS[mover](MAKERS[maker](x))
    some = HIDERS if (maker, mover) == CASES[0] else set(HIDERS) - WAVES
    hidden = [-hide(moved) for name, hide in HIDERS.items() if name in some]
    return jnp.concatenate([0 * x[:, :1], *hidden], 1)


@pytest.mark.parametrize(("maker", "mover"), CASES)
def test_what_may_be_nan_is_not_certified(maker, mover):
    model = Model(lambda w, x: program(maker, mover, x), None)
    near = X + np.random.default_rng(0).uniform(-0.6, 0.6, (4000, 3)).astype(np.float32)
    near = jnp.clip(near, 0, 1)
    margin = -np.asarray(model(near))
    least = np.where(np.isnan(margin), -np.inf, margin).min(0)
    assert np.any(least[1:] <= 0) or mover == "maximum"  # XLA's maximum may drop a NaN.
    for method in ("interval", "crown"):
        how = {"norm": jnp.inf, "eps": 0.6, "method": method}
        low = np.asarray(certify.margin_bounds(model, X, jnp.zeros(1, int), **how))[0, 1:]
        assert np.all(low <= least[1:] + 1e-5), (method, low, least)
    lower, upper = jnp.maximum(X[0] - 0.6, 0), jnp.minimum(X[0] + 0.6, 1)
    found = certify.bound(lambda x: model(x[None])[0], lower, upper)
    outs = np.asarray(model(near))
    lost = np.isnan(outs).any(0)
    assert np.all(np.isinf(found.lower)[lost] & np.isinf(found.upper)[lost])
    held = ~np.isnan(outs)
    assert np.all((outs >= found.lower - 1e-5) | ~held)
    assert np.all((outs <= found.upper + 1e-5) | ~held)


def test_an_unbounded_input_is_a_number():
    """Derivatives are bounded over all of space so."""
    for function in (lambda x: jnp.tanh(2 * x), lambda x: jnp.cos(3 * x - 1)):
        found = certify.bound(function, jnp.array([-jnp.inf]), jnp.array([jnp.inf]))
        assert abs(float(found.lower[0])) <= 1.0001 >= abs(float(found.upper[0]))
    found = certify.bound(lambda x: jnp.tanh(jnp.log(x)), jnp.zeros(1), jnp.full(1, jnp.inf))
    assert np.isinf(found.lower[0])


def test_a_region_of_nan_that_no_attack_meets_is_not_proved_away():
    at = np.float32(0.12345)

    def function(x):
        return jnp.where(jnp.isnan(jnp.abs(jnp.sqrt(jnp.abs(x - at) - 1e-4))), -1.0, 1.0)

    assert function(jnp.array([[at]]))[0, 0] == -1
    never = certify.in_range([0.0], [np.inf])
    for method in ("crown", "interval"):
        found = certify.property(function, np.zeros(1), np.ones(1), never, method=method)
        assert found.status != "holds"


def test_softplus_still_has_lines():
    """Its program tests for NaN, which finite operands cannot be."""
    model = Model(lambda w, x: jnp.logaddexp(x, 0.0) @ jnp.array([[1.0, 0.0]]), None)
    bound = certify.margin_bounds(
        model, jnp.array([[0.5]]), jnp.zeros(1, int), norm=jnp.inf, eps=0.4
    )
    assert bound[0, 1] == pytest.approx(float(jax.nn.softplus(0.1)), abs=5e-4)
