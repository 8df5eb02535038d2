"""Public functions are pure: they work under ``jit``, ``vmap`` and ``grad``, or name one that does.

The calls are those of the table of misuses, which has every public function of samples.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_misuse import CALLS, MODEL, PICTURE, PICTURES

import wdjax
from wdjax import attacks, certify, ensembles, image, lipschitz, nppr, smoothing, training
from wdjax import transductive as games
from wdjax.report import audit


def name_of(function):
    return f"{function.__module__}.{function.__name__}".removeprefix("wdjax.")


ON_HOST = {
    training.train, certify.verify, certify.growth_bound, certify.wdro_bound,
    certify.certified_accuracy, certify.lipschitz_constant, certify.property, certify.properties,
    smoothing.certify, smoothing.predict,
    smoothing.cautions, smoothing.tally, lipschitz.as_chain, lipschitz.local_lipschitz,
    lipschitz.global_lipschitz, lipschitz.global_radius, lipschitz.jacobian_norm, lipschitz.verify,
    lipschitz.lower_constants_at_samples, lipschitz.theory, lipschitz.masks_at,
    lipschitz.worst_margin, nppr.estimate, nppr.spread_within, nppr.probabilistic_accuracy,
    nppr.prbench, nppr.fit, nppr.fit_many, nppr.train_model, nppr.universal_start, nppr.importance,
    nppr.splitting, image.image_wasserstein, image.minimum_radius,
    image.image_wasserstein_distance, games.prepare, games.play, games.mixed_play,
    games.cost_multiple,
    ensembles.a3, ensembles.a3_wda, ensembles.bisect, ensembles.fast, ensembles.mixed,
    ensembles.smoothed, ensembles.wda_star, audit.sandwich, audit.of,
}  # fmt: skip
OF_MODELS = {
    wdjax.spend, ensembles.lowered, ensembles.draws, games.raise_objective, certify.interval_start
}  # fmt: skip
"""They take no samples alone."""
SHAPED = {
    certify.lipschitz_constant, lipschitz.as_chain, lipschitz.global_lipschitz,
    lipschitz.jacobian_norm,
}  # fmt: skip
"""They read the samples' shape only: what is traced is the model."""
NET = wdjax.Model(MODEL.func, jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), "f4"))
CHANGES = {
    certify.margin_bounds: {"method": "interval"},
    certify.radius: {"method": "interval"},
    image.entropic_distance: {"z": PICTURES[::-1], "iterations": 50},
    games.train_classifier: {"steps": 2},
}
"""CROWN's gradients are tested with the gradients of certificates."""
LONG = {ensembles.autoattack, ensembles.rand}
"""Their programs are traced and not compiled here."""
APPROXIMATE = {image.entropic_distance}
"""Their gradients are not those of what they return, as their docstrings say."""
TRACED = [function for function in CALLS if function not in ON_HOST | OF_MODELS]
CASES = {name_of(fn): (fn, CHANGES.get(fn, {})) for fn in TRACED if fn not in LONG} | {
    "search by WDA": (wdjax.search, {"attack": attacks.WDA(steps=4, probe=3)}),
    "mixture": (nppr.expected_loss, {}),
}


def asked(function, **changes):
    """The call as a function of its samples alone, and these samples."""
    given = CALLS[function] | changes
    places = ("model",) if function in SHAPED else ("x", "lower", "radius")
    place = next(name for name in places if name in given)
    samples = given.pop(place)
    return functools.partial(called, function, given, place), samples


def called(function, given, place, samples):
    return function(**given, **{place: samples})


def longer(leaf):
    """In float64."""
    is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(np.float64) if is_float else leaf


def real(tree):
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


@pytest.mark.fast
@pytest.mark.parametrize("function", sorted(ON_HOST, key=name_of), ids=name_of)
def test_what_works_on_the_host_names_what_can_be_traced(function):
    fn, samples = asked(function)
    samples = jax.tree.map(jnp.asarray, samples)
    ways = {
        "jit": lambda: jax.jit(fn)(samples),
        "vmap": lambda: jax.vmap(fn)(jax.tree.map(lambda t: t[None], samples)),
        "grad": lambda: jax.grad(lambda t: jnp.sum(real(fn(t))[0]))(samples),
        "jit without arguments": lambda: jax.jit(lambda: fn(samples))(),
    }
    for way, call in ways.items():
        with pytest.raises(ValueError, match="works on the host, outside of jit, vmap and") as said:
            call()
        twins = re.findall(r"\b(?:wdjax|[a-z]+)(?:\.[a-z_]+)+", str(said.value).split("or take")[1])
        assert twins or re.search(r"the methods? (\w+)", str(said.value)), way
        for twin in twins:
            home = wdjax
            for part in twin.removeprefix("wdjax.").split("."):
                home = getattr(home, part)
            assert home in {*TRACED, *OF_MODELS, nppr.fit_many, certify.bound}, (way, twin)


def value_of(result):
    """One number that depends on all real entries of a result; of searches the points alone."""
    result = result.x_adv if isinstance(result, wdjax.Found | wdjax.Result) else result
    total = 0.0
    for leaf in real(result):
        weight = jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape)
        total += jnp.sum(jnp.where(jnp.isfinite(leaf), weight * leaf, 0.0))
    return total


@pytest.mark.parametrize("name", CASES)
def test_the_others_can_be_traced_and_differentiated(name):
    function, changes = CASES[name]
    given = CALLS[function]
    # Neither rivals nor coordinates of the points at the box are equally far.
    changes = changes | ({"eps": 0.07} if "eps" in given else {})
    changes |= {"model": NET} if given.get("model") is MODEL else {}
    if name == "mixture":
        short = nppr.Schedule(steps=1)
        changes["perturbation"] = nppr.fit(**CALLS[nppr.fit] | {"schedule": short})
    with jax.enable_x64(True):
        fn, samples = asked(function, **jax.tree.map(longer, given | changes))
        outside = fn(samples)
        if not real(outside):
            found = jax.jit(jax.vmap(fn))(samples[None])
            jax.tree.map(
                lambda one, other: np.testing.assert_array_equal(one, other[0]), outside, found
            )
            return
        step = np.random.default_rng(0).normal(size=np.shape(samples))
        points = samples + 1e-6 * np.stack([0 * step, step, -step])
        value, slope = jax.jit(jax.vmap(jax.value_and_grad(lambda t: value_of(fn(t)))))(points)
        np.testing.assert_allclose(value[0], value_of(outside), rtol=1e-9, atol=1e-9)
        rise = (value[1] - value[2]) / 2e-6
        assert np.isfinite(slope).all()
        if function not in APPROXIMATE:
            np.testing.assert_allclose(np.sum(slope[0] * step), rise, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", sorted(LONG, key=name_of), ids=name_of)
def test_long_searches_can_be_traced(function):
    fn, samples = asked(function)
    jax.eval_shape(jax.vmap(fn), samples[None])


BALL = image.ImageWasserstein(window=3)
WITHOUT = {
    attacks.FAB(steps=2): r"another attack, such as attacks\.APGD, or forward mode",
} | dict.fromkeys(
    (
        image.SinkhornPGD(BALL, steps=2), image.FrankWolfe(BALL, steps=2),
        image.DualProjection(BALL, steps=2), image.NearestTransport(BALL, steps=2),
    ),
    r"transport plans have no gradient .*attacks\.APGD, or image\.entropic_distance",
)  # fmt: skip
"""Attacks whose loops have no fixed length, and what their refusal of gradients names."""
PLACES = [
    pytest.param(attack, place, id=f"{type(attack).__name__} in {place}")
    for attack in WITHOUT
    for place in ("x", "model", "eps")
    if place != "eps" or attack.budget == "sample"  # No other point depends on eps.
]


@pytest.mark.fast
@pytest.mark.parametrize(("attack", "place"), PLACES)
def test_searches_without_a_gradient_name_those_with_one(attack, place):
    given = {"model": PICTURE, "x": PICTURES, "y": np.array([0, 1]), "eps": 0.1}
    changed = given.pop(place)
    with pytest.raises(ValueError, match=WITHOUT[attack]):
        jax.eval_shape(
            jax.grad(lambda t: value_of(wdjax.search(attack, **given, **{place: t}))), changed
        )
