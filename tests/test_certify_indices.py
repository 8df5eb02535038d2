"""Indices that lie outside of the array: what is bounded is what the program computes with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from wdjax import Model, certify, lipschitz

D, K, N, EPS = 4, 2, 4, 0.05
RNG = np.random.default_rng(0)
A, B = (RNG.normal(size=size).astype("float32") for size in ((D, D), (3, K)))
X = RNG.uniform(0.2, 0.8, (N, D)).astype("float32")
MODES = ("clip", "fill", "promise_in_bounds", "wrap")
PLACES = ([0, 9, 2], [0, -9, 2])


def taken(mode, places):
    if mode == "wrap":
        return lambda h: jnp.take(h, jnp.array(places), axis=1, mode=mode)
    return lambda h: h.at[:, jnp.array(places)].get(mode=mode, fill_value=0)


def put(how, mode, places):
    def fn(h):
        at = jnp.asarray(h).at[:, jnp.array(places)]
        return getattr(at, how)(h[:, :3] + 1, mode=mode)[:, 1:]

    return fn


PROGRAMS = {
    "h[:, places]": lambda h: h[:, jnp.array([0, 9, 2])],
    "h[:, 9]": lambda h: jnp.stack([h[:, jnp.array(9)], h[:, 1], h[:, 0]], axis=1),
    "one entry of each": lambda h: jax.vmap(lambda r: r[jnp.array([5, 1, 2])])(h),
    "a slice": lambda h: jax.vmap(lambda r: lax.dynamic_slice(r, (jnp.array(9),), (3,)))(h),
    **{f"get {mode} {p}": taken(mode, p) for mode in MODES for p in PLACES},
    **{
        f"filled with {value}": lambda h, value=value: h.at[:, jnp.array([0, 9, -9])].get(
            mode="fill", fill_value=value
        )
        for value in (-3.0, 2.0)
    },
    "filled, by the input": lambda h: jax.vmap(
        lambda r: r.at[jnp.array([0, 1, 2]) + 3 * (r[0] > 0)].get(mode="fill", fill_value=-3.0)
    )(h),
    "integers of the input": lambda h: (
        jnp.take((4 * h).astype(jnp.int32), jnp.array([0, 9, 2]), axis=1) / 2.0**31
    ),
    "padded with 2": lambda h: jnp.pad(h[:, :2], ((0, 0), (0, 1)), constant_values=2.0),
    **{f"add {mode}": put("add", mode, PLACES[0]) for mode in MODES[:3]},
    **{f"{how} promised": put(how, MODES[2], PLACES[0]) for how in ("set", "multiply", "max")},
}


def model_of(name):
    fn = PROGRAMS[name]
    return Model(lambda p, x: jnp.tanh(fn(x @ p[0])) @ p[1], (jnp.asarray(A), jnp.asarray(B)))


@pytest.mark.fast
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_point_is_below_the_bounds(name):
    model = model_of(name)
    y = np.asarray(model(X)).argmax(axis=1)
    points = np.clip(X + EPS * RNG.choice([-1, 0, 1], (2000, N, D)), 0, 1).astype("float32")
    out = np.asarray(jax.jit(jax.vmap(model))(points))
    rows = np.arange(N)
    least = (out[:, rows, y] - out[:, rows, 1 - y]).min(axis=0)
    for method in ("interval", "crown"):
        low = certify.margin_bounds(model, X, y, norm=np.inf, eps=EPS, method=method)
        assert np.all(np.asarray(low)[rows, 1 - y] <= least), method


@pytest.mark.parametrize(
    "name", [name for name in PROGRAMS if not {"multiply", "input"} & {*name.split()}]
)
def test_no_point_is_steeper_than_the_constants(name):
    """By differences: JAX's own derivatives take the promise for kept, and products have none.

    A program whose input decides on a place jumps."""
    model = model_of(name)
    step = 1e-2 * np.eye(D, dtype="float32")[:, None]
    margins = [np.asarray(model(x)) @ [1, -1] for x in (*(X + step), *(X - step))]
    slopes = (np.array(margins[:D]) - np.array(margins[D:])) / 2e-2
    steepest = np.linalg.norm(slopes, axis=0).max()
    low, high = jnp.zeros(D) - 0.01, jnp.ones(D)
    constant = certify.margin_lipschitz(model, low, high, norm=2)[0, 1]
    assert constant >= steepest * (1 - 1e-3)


def test_a_matrix_has_what_the_program_reads():
    model = Model(lambda p, x: x[:, jnp.array([0, 9])] @ p, jnp.eye(2))
    assert lipschitz.global_lipschitz(model, X, norm=2)[0, 1] == pytest.approx(np.sqrt(2))
