"""Samples that are pytrees: the numbers of their concatenation, in their own form."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import attacks, certify, ensembles, image, losses
from wdjax.engine import trees

pytestmark = pytest.mark.fast

N = 11
SHAPES = {"image": (2, 2, 1), "row": (3,), "scalar": ()}


def split(x):
    return {
        "image": x[:, :4].reshape(-1, 2, 2, 1),
        "row": x[:, 4:7],
        "scalar": x[:, 7],
    }


def joined(tree):
    return np.concatenate([np.asarray(tree[name]).reshape(N, -1) for name in SHAPES], axis=1)


def apply(params, tree):
    hidden = jnp.tanh(tree["image"].reshape(len(tree["image"]), -1) @ params["image"])
    hidden = hidden + jnp.tanh(tree["row"] @ params["row"]) * tree["scalar"][:, None]
    return hidden @ params["out"]


def of_array(params, x):
    return apply(params, split(x))


rng = np.random.default_rng(0)
PARAMS = {
    name: jnp.asarray(rng.normal(size=shape), jnp.float32)
    for name, shape in {"image": (4, 8), "row": (3, 8), "out": (8, 3)}.items()
}
MODEL, TWIN = wdjax.Model(apply, PARAMS), wdjax.Model(of_array, PARAMS)
X = rng.uniform(0.1, 0.9, size=(N, 8)).astype(np.float32)
TREE = split(X)
Y = np.asarray(TWIN(X)).argmax(1)
Y[::5] = (Y[::5] + 1) % 3
EPS = {1: 0.8, 2: 0.3, np.inf: 0.1}
KEY = jax.random.key(0)
ATTACKS = {
    "pgd": lambda ball: attacks.PGD(ball, steps=5, random_start=True),
    "wda": lambda ball: attacks.WDA(ball, steps=5, probe=3),
    "ddn": lambda ball: attacks.DDN(ball, steps=8, radius=0.2),
}


def same(found, twin):
    """Equal in every bit; only the form of the points differs."""
    assert {name: leaf.shape[1:] for name, leaf in found.x_adv.items()} == SHAPES
    for name, leaf in split(twin.x_adv).items():
        assert isinstance(found.x_adv[name], jax.Array)
        np.testing.assert_array_equal(found.x_adv[name], leaf, err_msg=name)
    for field in ("cost", "correct", "success", "margin", "done", "fault", "gradients", "limit"):
        np.testing.assert_array_equal(getattr(found, field), getattr(twin, field), field)


@pytest.mark.parametrize(
    ("name", "norm"), [(name, norm) for name in ("pgd", "wda") for norm in EPS] + [("ddn", 2)]
)
def test_a_pytree_has_the_points_of_its_concatenation(name, norm):
    attack, how = ATTACKS[name](wdjax.Lp(norm)), {"eps": EPS[norm], "key": KEY}
    found = wdjax.search(attack, MODEL, TREE, Y, **how)
    twin = wdjax.search(attack, TWIN, X, Y, **how)
    same(found, twin)
    assert 0 < found.success.sum() < N
    moved = joined(found.x_adv).astype(np.float64) - X
    np.testing.assert_allclose(np.linalg.norm(moved, norm, axis=1), found.cost, rtol=1e-5)
    wrong = np.asarray(MODEL(found.x_adv)).argmax(1) != Y
    np.testing.assert_array_equal(wrong, found.success)


def test_it_works_under_jit_and_vmap():
    attack = attacks.PGD(wdjax.Lp(2), steps=5)

    @jax.jit
    def inside(tree, eps):
        return wdjax.run(attack, MODEL, tree, Y, eps=eps)

    twin = jax.jit(lambda x, eps: wdjax.run(attack, TWIN, x, Y, eps=eps))
    found = inside(TREE, 0.3)
    same(found, twin(X, 0.3))
    np.testing.assert_array_equal(found.weight, np.ones(N))
    several = jax.vmap(inside, (None, 0))(TREE, jnp.array([0.1, 0.3]))
    for name, leaf in found.x_adv.items():
        np.testing.assert_allclose(several.x_adv[name][1], leaf, atol=1e-6)


def test_run_and_spend_and_the_best_keep_the_form():
    attack = attacks.WDAPlusPlus(wdjax.Lp(2))
    found, twin = (wdjax.run(attack, m, x, Y, eps=0.1) for m, x in ((MODEL, TREE), (TWIN, X)))
    same(found, twin)
    np.testing.assert_array_equal(found.weight, twin.weight)
    assert float(found.accuracy) == float(twin.accuracy)
    near, far = (
        wdjax.search(attacks.PGD(wdjax.Lp(2), steps=3), MODEL, TREE, Y, eps=e) for e in (0.05, 0.4)
    )
    best = wdjax.best_of(near, far)
    assert best.success.sum() >= far.success.sum()
    assert {name: leaf.shape[1:] for name, leaf in best.x_adv.items()} == SHAPES


def test_starts_masks_and_histories_are_those_of_the_concatenation():
    attack, only = attacks.PGD(wdjax.Lp(2), steps=4), np.arange(N) % 3 > 0
    start = np.clip(X + 0.02, 0, 1)
    how = {"eps": 0.3, "only": only, "history": True, "index": np.arange(N) + 7, "batch_size": 4}
    found = wdjax.search(attack, MODEL, TREE, Y, start=split(start), **how)
    twin = wdjax.search(attack, TWIN, X, Y, start=start, **how)
    same(found, twin)
    np.testing.assert_array_equal(found.history.value, twin.history.value)
    np.testing.assert_array_equal(joined(found.x_adv)[~only], X[~only])


def test_a_search_resumes(tmp_path):
    attack = attacks.WDA(wdjax.Lp(2), steps=12, probe=6)
    how = {"eps": 0.3, "batch_size": 4, "checkpoint": tmp_path / "search", "every": 0.0}
    whole = wdjax.search(attack, MODEL, TREE, Y, eps=0.3, batch_size=4)
    stopped = wdjax.search(attack, MODEL, TREE, Y, callback=lambda progress: True, **how)
    assert int(stopped.gradients.max()) < int(whole.gradients.max())
    found = wdjax.search(attack, MODEL, TREE, Y, **how)
    for name, leaf in whole.x_adv.items():
        np.testing.assert_array_equal(found.x_adv[name], leaf)
    np.testing.assert_array_equal(found.gradients, whole.gradients)
    other = wdjax.Model(lambda p, tree: apply(p, tree) + 1, PARAMS)
    with pytest.raises(ValueError, match="belongs to other settings"):
        wdjax.search(attack, other, TREE, Y, **how)


def test_a_model_is_compiled_once():
    traces = []

    def noted(params, tree):
        traces.append(0)
        return apply(params, tree)

    model, attack = wdjax.Model(noted, PARAMS), attacks.PGD(wdjax.Lp(2), steps=2)
    wdjax.search(attack, model, TREE, Y, eps=0.3)
    before = len(traces)
    again = jax.tree.map(lambda leaf: np.clip(leaf + 0.01, 0, 1), TREE)
    wdjax.search(attack, model, again, Y, eps=0.3)
    # Its shapes are asked for by name, and nothing is compiled anew.
    assert len(traces) - before <= 2


@pytest.mark.parametrize("norm", [1, 2, np.inf])
def test_one_leaf_is_the_array(norm):
    pixels = X.reshape(N, 2, 2, 2)
    model = wdjax.Model(lambda p, x: of_array(p, x.reshape(len(x), -1)), PARAMS)
    alone = wdjax.Model(lambda p, tree: of_array(p, tree["x"].reshape(len(tree["x"]), -1)), PARAMS)
    attack, how = attacks.PGD(wdjax.Lp(norm), steps=5, random_start=True), {"key": KEY}
    plain = wdjax.search(attack, model, pixels, Y, eps=EPS[norm], **how)
    found = wdjax.search(attack, alone, {"x": pixels}, Y, eps=EPS[norm], **how)
    np.testing.assert_array_equal(found.x_adv["x"], plain.x_adv)
    np.testing.assert_array_equal(found.cost, plain.cost)


def test_second_looks_attack_the_concatenation():
    blind = wdjax.Model(lambda p, tree: 1e-30 * jnp.round(1e3 * apply(p, tree)), PARAMS)
    with pytest.warns(UserWarning, match="second look"):
        found = wdjax.search(attacks.PGD(wdjax.Lp(2), steps=3), blind, TREE, Y, eps=0.5)
    assert found.overlooked.any()


def test_a_batch_that_is_not_treated_alone_is_refused():
    mixing = wdjax.Model(lambda p, tree: apply(p, tree) * jnp.mean(tree["row"]), PARAMS)
    with pytest.raises(ValueError, match="depends on the rest of its batch"):
        wdjax.search(attacks.PGD(), mixing, TREE, Y, eps=0.1)


BAD = {
    "ragged": (TREE | {"row": X[:-1, 4:7]}, r"one axis n.*float32\[10, 3\]"),
    "integers": (TREE | {"scalar": np.arange(N)}, r"x\['scalar'\] must be floats.*int64\[11\]"),
    "booleans": (TREE | {"scalar": X[:, 7] > 0}, r"x\['scalar'\] must be floats.*bool\[11\]"),
    "half": (TREE | {"row": X[:, 4:7].astype(np.float16)}, r"x\['row'\].*float16"),
    "two dtypes": (TREE | {"row": X[:, 4:7].astype(np.float64)}, "one dtype"),
    "a number": (TREE | {"scalar": 0.5}, r"x\['scalar'\] must be floats.*0.5"),
    "no n": (TREE | {"scalar": np.float32(0.5)}, r"x\['scalar'\]"),
    "a list": ([*TREE.values()], "x must be floats.*one array"),
    "NaN": (TREE | {"scalar": np.full(N, np.nan, np.float32)}, "not finite"),
    "outside the box": (TREE | {"scalar": X[:, 7] + 1}, "outside the box"),
    "another form": ({"image": TREE["image"]}, r"does not accept x of shape \{'image'"),
    "fewer than y": (jax.tree.map(lambda leaf: leaf[:3], TREE), r"\[3\].*one for every sample"),
    "empty": (jax.tree.map(lambda leaf: leaf[:0], TREE), "empty|one for every"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_pytree_that_is_none_of_samples_is_refused(name):
    bad, message = BAD[name]
    for ask in (wdjax.search, wdjax.run):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            ask(attacks.PGD(steps=2), MODEL, bad, Y, eps=0.1)


def test_starts_must_have_the_form_of_the_samples():
    reshaped = TREE | {"image": TREE["image"].reshape(N, 4)}
    scalar, short = (TREE | {"scalar": one} for one in (0.5, X[:3, 7]))
    for start in (X, {"row": X}, reshaped, scalar, short):
        with pytest.raises(ValueError, match="start must be a pytree like x"):
            wdjax.search(attacks.PGD(steps=2), MODEL, TREE, Y, eps=0.1, start=start)


def test_balls_of_images_and_certificates_say_what_to_do():
    attack = image.SinkhornPGD(steps=2)
    with pytest.raises(ValueError, match=r"needs the ball wdjax\.Lp"):
        wdjax.search(attack, MODEL, TREE, Y, eps=0.1, key=KEY)
    with pytest.raises(ValueError, match=r"concatenate the leaves \[n, d\]"):
        certify.radius(MODEL, TREE, Y, norm=2)
    radii = certify.radius(TWIN, X, Y, norm=2)  # What the sentence says to do.
    found = wdjax.search(attacks.WDAPlusPlus(wdjax.Lp(2)), MODEL, TREE, Y)
    assert np.all(np.asarray(radii) <= np.asarray(found.cost) + 1e-6)


@pytest.mark.parametrize("kind", [list, tuple])
def test_leaves_that_are_read_as_one_array_are_told_from_samples(kind):
    """A list is one array in searches, and a tuple in all that takes no pytrees."""
    leaves = kind([X[:, :4]] * 3)
    read = rf"got int64\[{N}\]; x is a {kind.__name__}, which is read as one array \[3, {N}, 4\]"
    asks = [lambda: ensembles.fast(MODEL, leaves, Y, eps=0.1, key=KEY)]
    if kind is list:
        asks += [
            lambda ask=ask: ask(attacks.PGD(steps=2), MODEL, leaves, Y, eps=0.1)
            for ask in (wdjax.search, wdjax.run)
        ]
    for ask in asks:
        with pytest.raises(ValueError, match=f"{read}: .* a tuple or dict in searches; elsewhere"):
            ask()
    shown = (
        rf"got a {kind.__name__} of (float32\[{N}, 4\](, )?){{3}}; pass np.asarray.* concatenate"
    )
    with pytest.raises(ValueError, match=shown):
        certify.radius(MODEL, leaves, Y, norm=2)


class Pair(NamedTuple):
    image: Any
    rest: Any


def test_named_tuples_and_criteria():
    pair = Pair(TREE["image"], (TREE["row"], TREE["scalar"]))

    def of_pair(params, pair):
        row, scalar = pair.rest
        return apply(params, {"image": pair.image, "row": row, "scalar": scalar})

    def second_wins(logits, y):
        return losses.targeted_margin(logits, y, jnp.where(y == 2, 1, 2))

    attack, how = attacks.PGD(wdjax.Lp(2), steps=5), {"eps": 0.3, "criterion": second_wins}
    found = wdjax.search(attack, wdjax.Model(of_pair, PARAMS), pair, Y, **how)
    twin = wdjax.search(attack, TWIN, X, Y, **how)
    assert isinstance(found.x_adv, Pair)
    np.testing.assert_array_equal(found.cost, twin.cost)
    np.testing.assert_array_equal(found.x_adv.rest[0], split(twin.x_adv)["row"])


def test_flat_and_tree_are_inverse():
    flat, form = trees.flattened(TREE, attacks.PGD())
    np.testing.assert_array_equal(flat, X)
    jax.tree.map(np.testing.assert_array_equal, form.tree(flat), TREE)
    for array in (X, [*X], [[0.1, 0.2]]):
        assert trees.flattened(array, attacks.PGD())[1] is None


def test_the_recipe_runs():
    text = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    code = re.search(r"## Samples of several arrays\n.*?```python\n(.*?)```", text, re.DOTALL)[1]
    x, y = jnp.linspace(0, 1, 128).reshape(2, 8, 8, 1), jnp.array([3, 4])
    names = {"jax": jax, "jnp": jnp, "wdjax": wdjax, "key": KEY, "x": x, "y": y}
    exec(compile(code, "docs/models.md", "exec"), names)
    assert names["found"].x_adv["image"].shape == x.shape
