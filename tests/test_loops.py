"""Searches and certificates inside ``jax.shard_map`` and ``pmap``, and what is refused there."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import wdjax
from wdjax import Lp, Model, attacks, certify, loops, parallel

pytestmark = pytest.mark.fast
ROWS = PartitionSpec(parallel.AXIS)


def apply(params, x):
    return jax.nn.relu(x @ params[0]) @ params[1]


MODEL = Model(apply, [jax.random.normal(jax.random.key(i), (6, 6))[:, : 6 - 3 * i] for i in (0, 1)])
X = jax.random.uniform(jax.random.key(2), (8, 6))
Y = jnp.argmax(MODEL(X), -1)
PGD = attacks.PGD(Lp(2), steps=3)


def split(function, devices=8, **options):
    mesh = parallel.data_mesh(jax.devices()[:devices])
    return jax.shard_map(function, mesh=mesh, in_specs=ROWS, out_specs=ROWS, **options)


def near(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def search(x, y, eps=0.3, attack=PGD):
    return wdjax.search(attack, MODEL, x, y, eps=eps, diagnose=False)


@pytest.mark.parametrize("empty", [True, False])
def test_a_state_of_constants_keeps_its_values(empty):
    """Whatever the values: NaN and infinities too, of every type that a state has.

    XLA's compiler of jaxlib 0.11.2 crashes if an empty array and the others are in one program.
    """
    begun = (
        {"nothing": jnp.zeros((0, 2))}
        if empty
        else {
            "floats": jnp.array([jnp.nan, jnp.inf, -0.0]),
            "counts": jnp.array([3, -1]),
            "flags": jnp.array([True, False]),
            "keys": jax.random.split(jax.random.key(0), 2),
        }
    )

    def last(x):
        def step(state):
            moved = jax.tree.map(lambda leaf: jnp.where(x[0, 0] > 9, leaf, leaf), state["here"])
            return {"here": moved, "turn": state["turn"] + 1}

        end = loops.while_loop(lambda s: s["turn"] < 2, step, {"here": begun, "turn": 0})["here"]
        if not empty:
            end["keys"] = jax.random.key_data(end["keys"])
        return jax.tree.map(lambda leaf: leaf[None], end)

    found = jax.jit(split(last))(X)
    if not empty:
        begun["keys"] = jax.random.key_data(begun["keys"])
    for name, leaf in begun.items():
        for one in found[name]:
            np.testing.assert_array_equal(one, leaf)
            np.testing.assert_array_equal(np.signbit(one), np.signbit(leaf))


def test_in_shards_of_every_size_with_and_without_jit():
    whole = jax.jit(search)(X, Y)
    for devices in (1, 2, 8):
        near(whole, jax.jit(split(search, devices))(X, Y))
    near(whole, split(search, 2)(X, Y))
    near(whole, jax.jit(split(search, 4, check_vma=False))(X, Y))


def test_under_vmap_of_shards_shards_of_vmap_and_pmap():
    radii = jnp.array([0.1, 0.3])
    several = jax.jit(jax.vmap(search, (None, None, 0)))(X, Y, radii)

    def own(x, y):
        found = jax.vmap(search, (None, None, 0))(x, y, radii)
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), found)

    inside = jax.jit(split(own))(X, Y)
    near(several, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), inside))
    mapped = jax.vmap(lambda eps: split(lambda x, y: search(x, y, eps))(X, Y))(radii)
    near(several, mapped)
    parts = jax.pmap(search)(X.reshape(4, 2, 6), Y.reshape(4, 2))
    near(jax.jit(search)(X, Y), jax.tree.map(lambda leaf: leaf.reshape(8, *leaf.shape[2:]), parts))


def test_bad_samples_are_nan_in_their_shard_alone():
    found = jax.jit(split(search))(X.at[3, 0].set(jnp.nan).at[5, 0].set(7.0), Y.at[6].set(3))
    bad = np.isin(np.arange(8), (3, 5, 6))
    np.testing.assert_array_equal(np.isnan(found.margin), bad)
    assert not np.asarray(found.correct | found.success)[bad].any()
    assert np.asarray(found.fault)[bad].all()
    np.testing.assert_allclose(found.cost[~bad], jax.jit(search)(X, Y).cost[~bad], atol=1e-5)


def test_gradients_of_replicated_numbers_are_sums_over_the_shards():
    def slope(x, y):
        return jax.grad(lambda eps: jnp.sum(search(x, y, eps).margin))(0.05)[None]

    np.testing.assert_allclose(split(slope, 2)(X, Y)[0], jax.jit(slope)(X, Y)[0], rtol=1e-4)


@pytest.mark.parametrize("method", ["interval", "crown", "auto", "alpha"])
def test_certificates(method):
    def margins(x, y):
        return certify.margin_bounds(MODEL, x, y, eps=0.05, norm=2, method=method)

    near(jax.jit(margins)(X, Y), jax.jit(split(margins, 4))(X, Y))


def test_radii_of_certificates():
    def radii(x, y):
        return certify.radius(MODEL, x, y, norm=np.inf, steps=5)

    near(jax.jit(radii)(X, Y), jax.jit(split(radii, 2))(X, Y))


def test_a_budget_of_all_samples_needs_the_name_of_the_axis():
    both = attacks.WPGD(Lp(2), steps=3), attacks.wfgsm(Lp(2))
    for attack in both:
        with pytest.raises(ValueError, match=r'WPGD has one budget.*WPGD\(axis="batch"\)'):
            split(lambda x, y, a=attack: search(x, y, attack=a))(X, Y)
    named = attacks.WPGD(Lp(2), steps=3, axis="batch")
    for call in (search, jax.jit(search)):
        with pytest.raises(ValueError, match=r"axis='batch'.*is for searches inside jax.shard_map"):
            call(X, Y, attack=named)
    with pytest.raises(ValueError, match="over a mesh with this axis"):
        split(lambda x, y: search(x, y, attack=attacks.WPGD(axis="data")))(X, Y)
    # One sample a shard would leave each with the whole budget; together they share it.
    found = jax.jit(split(lambda x, y: search(x, y, 0.1, named)))(X, Y)
    assert 0 < float(jnp.sqrt(jnp.mean(found.cost**2))) <= 0.1 * (1 + 1e-5)
    assert float(found.cost.max()) > 0.1


def test_no_other_file_has_a_bare_loop():
    """One that begins with constants would be refused inside ``shard_map``."""
    bare = re.compile(r"\blax\.(scan|fori_loop|while_loop|cond|switch)\(")
    files = Path(wdjax.__file__).parent.rglob("*.py")
    found = {path.name for path in files if bare.search(path.read_text())}
    assert found == {"loops.py"}


@pytest.mark.parametrize("devices", [1, 8])
def test_certificates_on_many_devices(devices):
    """Ragged batches too; the same numbers up to the rounding of another batch size."""
    mesh = parallel.data_mesh(jax.devices()[:devices])
    x, y = X[:7], np.asarray(Y[:7]).copy()
    y[2] = (y[2] + 1) % 3
    how = {"norm": np.inf, "eps": 0.03, "batch_size": 5}
    bounds = certify.margin_bounds(MODEL, x, y, **how)
    near(bounds, certify.margin_bounds(MODEL, x, y, mesh=mesh, **how))
    proved = certify.certified(MODEL, x, y, mesh=mesh, **how)
    np.testing.assert_array_equal(proved, certify.certified(MODEL, x, y, **how))
    assert 0 < proved.sum() < 7
    whole, split = (certify.verify(MODEL, x, y, steps=4, mesh=m, **how) for m in (None, mesh))
    for field in ("correct", "verified", "falsified"):
        np.testing.assert_array_equal(getattr(whole, field), getattr(split, field))
    np.testing.assert_allclose(whole.margin, split.margin, atol=1e-5)
    np.testing.assert_allclose(whole.radius, split.radius, atol=1e-5)
    assert not split.verified[2]


def test_a_mesh_is_for_the_top_level():
    mesh = parallel.data_mesh()
    for call in (
        lambda x: certify.margin_bounds(MODEL, x, Y, norm=2, eps=0.1, mesh=mesh),
        lambda x: certify.radius(MODEL, x, Y, norm=2, mesh=mesh),
    ):
        with pytest.raises(ValueError, match="mesh works at top level only"):
            jax.jit(call)(X)


def test_the_page_on_scale_keeps_its_word(tmp_path, monkeypatch):
    """Every piece of its Python for one process runs, and gives what one device gives."""
    text = (Path(wdjax.__file__).parents[1] / "docs" / "scale.md").read_text()
    pieces = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    pieces = [piece for piece in pieces if "jax.distributed" not in piece]
    assert len(pieces) == 4
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    np.save("y.npy", Y)
    names = {
        "model": MODEL,
        "x": X,
        "y": Y,
        "key": jax.random.key(0),
        "PartitionSpec": PartitionSpec,
        "np": np,
    }
    names |= {"wdjax": wdjax, "attacks": attacks, "certify": certify, "jax": jax, "jnp": jnp}
    for piece in pieces:
        of_piece = dict(names)
        exec(piece, of_piece)
    found = of_piece["split"](X, Y, jnp.arange(8))
    one = wdjax.search(attacks.PGD(), MODEL, X, Y, eps=0.1, diagnose=False)
    np.testing.assert_allclose(found, one.x_adv, atol=1e-5)
