"""One gate for a model and its samples: what it refuses at top level is never robust in a trace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import attacks, certify

pytestmark = pytest.mark.fast

MODEL = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
X = np.array([[0.9, 0.1], [0.8, 0.3], [0.7, 0.2]], np.float32)
Y = np.array([0, 0, 0])
PGD = attacks.PGD(wdjax.Lp(2), steps=2)


def with_row(array, value):
    """The second row replaced."""
    return np.stack([array[0], np.broadcast_to(value, array[0].shape), array[2]]).astype(
        array.dtype
    )


BAD = {
    "NaN": (with_row(X, [np.nan, 0.1]), Y, "not finite"),
    "inf": (with_row(X, [np.inf, 0.1]), Y, "not finite"),
    "outside the box": (with_row(X, [1.5, 0.1]), Y, "outside the box"),
    "a label below": (X, with_row(Y, -1), "labels span"),
    "a label beyond": (X, with_row(Y, 2), "labels span"),
}
ASKED = {
    "radius": lambda x, y: certify.radius(MODEL, x, y, norm=2),
    "margins": lambda x, y: certify.margin_bounds(MODEL, x, y, norm=2, eps=0.1).min(-1),
    "certified": lambda x, y: certify.certified(MODEL, x, y, norm=2, eps=0.1),
    "search": lambda x, y: wdjax.search(PGD, MODEL, x, y, eps=0.1).correct,
}
NOTHING = {"radius": 0.0, "margins": -np.inf, "certified": False, "search": False}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ASKED)
def test_what_is_refused_at_top_level_proves_nothing_in_a_trace(name, bad):
    x, y, message = BAD[bad]
    with pytest.raises(ValueError, match=message):
        ASKED[name](x, y)
    found, good = jax.jit(ASKED[name])(x, y), jax.jit(ASKED[name])(X, Y)
    assert found[1] == NOTHING[name]
    np.testing.assert_array_equal(found[::2], good[::2])
    assert not np.any(good == NOTHING[name])


@pytest.mark.parametrize("name", ["radius", "margins", "search"])
def test_a_model_that_mixes_its_batch_proves_nothing_in_a_trace(name):
    mixing = wdjax.Model(lambda w, x: (x - jnp.mean(x, 0) + 0.5) @ w, MODEL.args[0])
    ask = {
        "radius": functools.partial(certify.radius, mixing, norm=2),
        "margins": functools.partial(certify.margin_bounds, mixing, norm=2, eps=0.1),
        "search": functools.partial(wdjax.search, PGD, mixing, eps=0.1),
    }[name]
    with pytest.raises(ValueError, match="depends on the rest of its batch"):
        ask(X, Y)
    found = jax.jit(ask)(x=X, y=Y)
    if name == "search":
        assert np.isnan(found.margin).all()
        assert found.fault.all()
    else:
        assert np.all(np.asarray(found) == np.where(name == "radius", 0.0, -np.inf))


WRONG = {
    "start": ({"start": X[:, :1]}, r"start must have the shape of x, \[3, 2\], got \[3, 1\]"),
    "a masked start": ({"start": np.ma.masked_array(X, X > 0)}, "start must be .* masked array"),
    "few starts": ({"start": X[:2]}, r"start must have the shape of x, \[3, 2\], got \[2, 2\]"),
    "only": ({"only": np.array([1, 0, 1])}, r"only must be booleans \[3\], got int64"),
    "few of only": ({"only": np.array([True])}, r"only must be booleans \[3\]"),
    "index": ({"index": np.arange(2)}, r"index must be integers \[3\], got int64\[2\]"),
    "eps": ({"eps": np.full(2, 0.1)}, r"one a sample \[3\]"),
    "a named criterion": ({"criterion": "targeted"}, "criterion must be a function .*'targeted'"),
    "no criterion": ({"criterion": None}, "criterion must be a function .* got None"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("inside", [False, True])
def test_rows_of_a_search_are_checked_everywhere(name, inside):
    given, message = WRONG[name]
    ask = functools.partial(wdjax.search, PGD, MODEL, **{"eps": 0.1} | given)
    with pytest.raises(ValueError, match=message):
        (jax.jit(ask) if inside else ask)(X, Y)


@pytest.mark.parametrize("name", ["run", "fast", "wda_star"])
def test_a_criterion_that_is_no_function_is_refused_by_all_that_pass_it_on(name):
    how = {"key": jax.random.key(0), "criterion": "targeted"}
    ask = {
        "run": functools.partial(wdjax.run, PGD, eps=0.1),
        "fast": functools.partial(wdjax.ensembles.fast, eps=0.1),
        "wda_star": wdjax.ensembles.wda_star,
    }[name]
    with pytest.raises(ValueError, match="criterion must be a function"):
        ask(MODEL, X, Y, **how)


@pytest.mark.filterwarnings("error")
def test_a_list_of_starts_is_one_array():
    start = np.clip(X + 0.05, 0, 1)
    listed, one = (
        wdjax.search(PGD, MODEL, X, Y, eps=0.1, start=points, diagnose=False).x_adv
        for points in (start.tolist(), start)
    )
    np.testing.assert_array_equal(listed, one)


def test_random_numbers_follow_an_index_that_is_mapped_over():
    attack, key = attacks.PGD(wdjax.Lp(2), steps=1, random_start=True), jax.random.key(0)
    places = np.array([[0, 1, 2], [5, 1, 7]])

    def ask(index):
        return wdjax.search(attack, MODEL, X, Y, eps=0.3, key=key, index=index).x_adv

    several, alone = jax.vmap(ask)(places), ask(places[1])
    np.testing.assert_allclose(several[1], alone, atol=1e-6)
    np.testing.assert_array_equal(several[0][1], several[1][1])
    assert not np.array_equal(several[0][0], several[1][0])
