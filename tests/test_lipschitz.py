"""Lipschitz constants: exact ones by fixtures and linear programs, bounds by brute force."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import sparse

from wdjax import (
    Lp,
    Model,
    attacks,
    certify,
    data,
    lipschitz,
    losses,
    models,
    search,
    training,
)

NORMS = {"1": 1, "2": 2, "inf": np.inf}


def read(folder, name):
    own = np.load(folder / f"{name}.npz")
    count = sum(key.startswith("W") for key in own)
    weights = [own[f"W{i + 1}"] for i in range(count)]
    return own, lipschitz.relu_chain(weights, [own[f"b{i + 1}"] for i in range(count)])


def random_chain(seed, sizes, biased=True):
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=(m, n)) / np.sqrt(n) for n, m in itertools.pairwise(sizes)]
    return lipschitz.relu_chain(weights, [biased * rng.normal(size=m) for m in sizes[1:]])


def model_of(net):
    """The same net as a user would write it, in float32."""

    def apply(params, x):
        for i, (w, b) in enumerate(params):
            x = x @ w.T + b
            x = jax.nn.relu(x) if i + 1 < len(params) else x
        return x

    pairs = zip(net.weights, net.biases)
    return Model(apply, [(w.astype(np.float32), b.astype(np.float32)) for w, b in pairs])


FIXTURES = ["a_n2_h8_K2", "c_n2_h8x8_K3", "m_n3_h8x8_K2_mono", "o_n2_h8_K3_nobias"]
"""The others are run by ``bench/lipschitz.py``."""


@pytest.mark.parametrize("name", FIXTURES)
def test_all_constants_of_small_nets(shared, name):
    folder = shared / "fixtures/relu"
    own, net = read(folder, name)
    known = json.loads((folder / f"{name}.json").read_text())
    ends = own["box_center"] - own["box_radius"], own["box_center"] + own["box_radius"]
    found = {
        "global": lipschitz.activation_cells(net),
        "box": lipschitz.activation_cells(net, ends),
    }
    for domain, cells in found.items():
        masks = {tuple(mask) for mask in cells.masks.tolist()}
        assert masks == {tuple(mask) for mask in own[f"masks_{domain}"].tolist()}
    for label, norm in NORMS.items():
        whole, box = known["global"], known["box"]
        theory = lipschitz.theory(net, own["X"], own["y"], norm, found["global"])
        inside = lipschitz.upper_constants(found["box"], norm)
        pairs = {
            "L": (theory.upper, whole[f"L_{label}"]),
            "L_margin": (theory.upper_margin, whole[f"Lmargin_lab_{label}"]),
            "l_all": (theory.lower_all, whole[f"l_{label}"]),
            "l": (theory.lower, whole[f"l_lab_{label}"]),
            "l_N": (theory.lower_samples, whole[f"lN_{label}"]),
            "box": (inside.paper, box[f"L_{label}"]),
            "box margin": (inside.margin, box[f"Lmargin_{label}"]),
        }
        for which, (value, expected) in pairs.items():
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-9, err_msg=which)
        assert theory.lower_samples <= theory.lower + 1e-9
        assert theory.lower <= theory.upper_margin + 1e-9 <= theory.upper + 2e-9
        assert theory.tight == name.startswith("m_")


def test_cells_of_one_layer_are_counted_by_zaslavsky():
    # sum_{i <= n} C(m, i) regions of m hyperplanes in general position.
    net = random_chain(0, (2, 7, 2))
    assert len(lipschitz.activation_cells(net).masks) == 1 + 7 + 21


def test_a_thin_part_that_is_cut_in_the_middle_is_not_lost():
    # A cell 8e-10 wide, whose halves hold no ball of radius SMALLEST.
    weights = [np.array([[1.0], [-1.0], [1.0]]), np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])]
    net = lipschitz.relu_chain(weights, [np.array([0.0, 8e-10, -4e-10]), np.zeros(2)])
    found = lipschitz.activation_cells(net, (-1, 1))
    assert sorted(found.jacobians[:, 0, 0].tolist()) == [-1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("first", "second", "box"),
    [(1, 1, 1e-9), (1e9, 1e-9, 1e-9), (1e-20, 1e20, 1), (1e-160, 1e160, 1)],
)
def test_constants_do_not_depend_on_scales(first, second, box):
    """The same net in other units of the input and of the hidden layer."""
    g = np.random.default_rng(0)
    one, bias, two, last = (g.normal(size=size) for size in ((4, 2), 4, (3, 4), 3))
    plain = lipschitz.relu_chain([one, two], [bias, last])
    hidden = first * box
    net = lipschitz.relu_chain([first * one, second * two], [hidden * bias, hidden * second * last])
    for ends in (None, 10):
        domain, wide = (None, None) if ends is None else ((-ends * box, ends * box), (-ends, ends))
        cells, known = (
            lipschitz.activation_cells(*task) for task in ((net, domain), (plain, wide))
        )
        assert {*map(tuple, cells.masks)} == {*map(tuple, known.masks)}
        assert len(known.masks) > 9
        found, expected = (lipschitz.upper_constants(each, 2).margin for each in (cells, known))
        np.testing.assert_allclose(found, first * second * expected, rtol=1e-9)
    for norm in (1, 2, np.inf):
        found = lipschitz.theory(net, [[0.4 * box, 0.1 * box]], [0], norm)
        expected = lipschitz.theory(plain, [[0.4, 0.1]], [0], norm)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_sliver_of_great_slope_counts():
    thin = 1e-9
    weights = [np.ones((2, 1)), np.array([[0, 0], [1 / thin, -1 / thin]])]
    net = lipschitz.relu_chain(weights, [np.array([-0.5, -0.5 - thin]), np.array([0.5, 0.0])])
    cells = lipschitz.activation_cells(net, (0.0, 1.0))
    np.testing.assert_allclose(lipschitz.upper_constants(cells, 2).margin, 1 / thin)


@pytest.mark.parametrize(
    "function", [jnp.sqrt, lambda h: jnp.log1p(h - 1), lambda h: jnp.arcsin(1 + h)]
)
def test_tests_for_nan_have_no_constant(function):
    """The model jumps where the function's operand turns negative; derivatives are 0."""

    def apply(p, x):
        step = jnp.where(jnp.isnan(function(x[:, 0] - 0.7)), 0.0, 1.0)
        return jnp.stack([0.5 + 0 * step, step], axis=1)

    model, x, y = Model(apply, jnp.zeros(1)), np.array([[0.6, 0.4]]), np.array([0])
    for method in ("interval", "zonotope"):
        told = lipschitz.verify(model, x, y, norm=np.inf, eps=0.2, method=method)
        assert not told.verified.any()
        assert (
            lipschitz.local_lipschitz(model, x, y, norm=2, eps=0.2, method=method)[0, 1] == np.inf
        )
    assert lipschitz.trainable_lipschitz(model, x, y, norm=2, eps=0.2)[0, 1] == np.inf


def test_arrays_that_a_model_closes_over_are_named_as_the_cause():
    kernel = jnp.ones((1, 3, 2), jnp.float32)

    def apply(p, x):
        dims = ("NHC", "HIO", "NHC")
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=dims)[:, 0]

    with pytest.raises(ValueError, match=r"computed in float64.*make them its leaves"):
        lipschitz.as_chain(Model(apply, {}), jnp.zeros((1, 2, 3)))


def test_every_point_has_its_cell():
    net = random_chain(1, (3, 5, 4, 2))
    cells = lipschitz.activation_cells(net, (-1, 1))
    points = np.random.default_rng(0).uniform(-1, 1, (5000, 3))
    masks = lipschitz.masks_at(net, points)
    index = {tuple(mask): i for i, mask in enumerate(cells.masks.tolist())}
    places = np.array([index[tuple(mask)] for mask in masks.tolist()])
    values = np.einsum("nkd,nd->nk", cells.jacobians[places], points) + cells.offsets[places]
    out = points
    for i, (w, b) in enumerate(zip(net.weights, net.biases)):
        out = out @ w.T + b if i == 0 else np.maximum(out, 0) @ w.T + b
    np.testing.assert_allclose(values, out, atol=1e-12)
    shape = lipschitz.polyhedron(net, masks[0])
    assert np.all(shape.normals @ points[0] <= shape.levels + 1e-12)


@pytest.mark.parametrize("norm", NORMS.values())
def test_directions_never_exceed_the_constant_from_below(norm):
    net = random_chain(2, (2, 6, 3))
    best = lipschitz.lower_constant(net, norm)
    moves = np.random.default_rng(0).normal(size=(20_000, 2))
    assert lipschitz.direction_bound(net, moves, norm).max() <= best.value * (1 + 1e-9)
    at = lipschitz.direction_bound(net, best.direction[None], norm)[0, best.label]
    np.testing.assert_allclose(at, best.value, rtol=1e-9)


def test_a_label_that_does_not_occur_bounds_nothing(shared):
    # Net d with label 1 only: the paper's l exceeds the exact slope of the worst case.
    own, net = read(shared / "fixtures/relu", "d_n2_h6x6x6_K4")
    x, y = own["X"][:5], np.ones(5, int)
    slope = (worst(net, x, y, 1, 0.001) - worst(net, x, y, 1, 0.0)) / 0.001
    assert lipschitz.lower_constant(net, 1).value > 1.5 * slope
    assert lipschitz.lower_constant(net, 1, labels=y).value <= slope
    far = (worst(net, x, y, 1, 50.0) - worst(net, x, y, 1, 0.0)) / 50
    np.testing.assert_allclose([slope, far], [3.0791, 0.0539], atol=1e-4)


def worst(net, x, y, norm, eps, **how):
    return lipschitz.worst_margin(net, x, y, norm=norm, eps=eps, **how)


@pytest.mark.parametrize("norm", [1, np.inf])
def test_the_worst_case_lies_between_the_constants(norm):
    net = random_chain(3, (2, 6, 3))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 2)), np.array([0, 1, 2, 0])
    cells = lipschitz.activation_cells(net)
    found = lipschitz.theory(net, x, y, norm, cells)
    clean = worst(net, x, y, norm, 0.0, found=cells)
    values = [worst(net, x, y, norm, eps, found=cells) for eps in (0.01, 0.5, 20.0)]
    for eps, value in zip((0.01, 0.5, 20.0), values):
        assert clean + found.lower * eps <= value + 1e-6
        assert value <= clean + found.upper_margin * eps + 1e-6
    # Concave in eps; and no coupling of few points does better.
    assert values[1] - clean <= 50 * (values[0] - clean) + 1e-6
    moved = x[:, None] + rng.normal(size=(4, 2000, 2)) * 0.5
    length = np.linalg.norm(moved - x[:, None], norm, axis=-1)
    logits = np.asarray(model_of(net)(moved.reshape(-1, 2).astype(np.float32))).reshape(4, 2000, 3)
    own = np.take_along_axis(logits, y[:, None, None], -1)
    loss = np.max(np.where(np.arange(3) == y[:, None, None], -np.inf, logits - own), -1)
    share = np.minimum(1.0, 0.5 * 4 / length)
    base = [worst(net, x[i : i + 1], y[i : i + 1], norm, 0.0, found=cells) for i in range(4)]
    gain = share * (loss - np.array(base)[:, None]) / 4
    assert clean + gain.max() <= values[1] + 1e-4


@pytest.mark.parametrize("eps", [0.1, 3.0])
def test_the_remark_on_tightness(eps):
    """The paper's Remark: a loss of slope 1 near 0 and 1/2 beyond 1 grows from 2 by eps / 2 only.

    The net's margin is that loss; ``l`` tells the true slope, the Lipschitz constant does not.
    """
    into = np.array([[1.0], [-1.0], [1.0], [-1.0]])
    out = np.array([[1.0, 1.0, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0]])
    net = lipschitz.relu_chain([into, out], [np.array([0.0, 0.0, -1.0, -1.0]), np.zeros(2)])
    x, y = np.array([[2.0]]), np.array([1])
    cells = lipschitz.activation_cells(net)
    found = lipschitz.theory(net, x, y, 2, cells)
    np.testing.assert_allclose([found.upper_margin, found.lower], [1.0, 0.5])
    assert not found.tight_margin
    grown = worst(net, x, y, 1, eps, found=cells) - worst(net, x, y, 1, 0.0, found=cells)
    np.testing.assert_allclose(grown, eps / 2, rtol=1e-6)


def test_the_papers_lower_bound_for_smooth_nets_is_false():
    # theta(x) = (0, tanh x), label 0, one sample at 0: l = sup |theta'| = 1. The dual on a grid.
    grid = np.linspace(-20, 20, 8001)
    loss = np.logaddexp(0, np.tanh(grid))
    for eps, exact in ((0.1, 0.7454), (1.0, 1.1448), (10.0, 1.3133)):
        lams = np.linspace(0, 1.2, 1201)
        dual = lams * eps + np.max(loss - lams[:, None] * np.abs(grid), axis=1)
        np.testing.assert_allclose(dual.min(), exact, atol=2e-4)
        assert dual.min() < np.log(2) + 1.0 * eps - 0.04


BALLS = [(1, 0.4), (2, 0.3), (np.inf, 0.15)]


@pytest.mark.parametrize(("norm", "eps"), BALLS)
def test_local_bounds_hold_for_every_mask_of_the_ball(norm, eps):
    # The exact local constant: over all cells that meet the box around the sample, cut by [0, 1].
    net = random_chain(4, (3, 6, 5, 3))
    model = model_of(net)
    rng = np.random.default_rng(1)
    x, y = rng.uniform(0.2, 0.8, (3, 3)).astype(np.float32), np.array([0, 1, 2])
    methods = ["interval", "zonotope", "sdp"] if norm == np.inf else ["sdp"]
    found = {
        method: lipschitz.local_lipschitz(model, x, y, norm=norm, eps=eps, method=method, steps=40)
        for method in methods
    }
    exact = lipschitz.as_chain(model, x)
    points = x[:, None] + rng.normal(size=(3, 4000, 3)) * eps / 2
    inside = np.linalg.norm(points - x[:, None], norm, axis=-1) <= eps
    inside &= np.all((points >= 0) & (points <= 1), axis=-1)
    pull = jax.jit(jax.vmap(jax.jacrev(lambda t: model(t[None])[0])))
    dual = {1: np.inf, 2: 2, np.inf: 1}[norm]
    for i in range(3):
        jacobians = np.asarray(pull(points[i][inside[i]].astype(np.float32)))
        rows = jacobians - jacobians[:, y[i] : y[i] + 1]
        sampled = np.linalg.norm(rows, dual, axis=-1).max(axis=0)
        for method, value in found.items():
            assert np.all(sampled <= value[i] * (1 + 1e-5)), method
    if norm == np.inf:
        assert np.all(found["sdp"] <= found["zonotope"] * (1 + 1e-9))
        assert np.all(found["zonotope"] <= found["interval"] * (1 + 1e-9))
        for i in range(3):
            cut = np.maximum(x[i] - eps, 0), np.minimum(x[i] + eps, 1)
            upper = lipschitz.upper_constants(lipschitz.activation_cells(exact, cut), norm)
            assert upper.by_label[y[i]] <= found["sdp"][i].max() * (1 + 1e-9)
            assert found["sdp"][i].max() <= 1.35 * upper.by_label[y[i]]


@pytest.mark.parametrize("norm", [2, np.inf])
def test_global_bounds_hold_for_every_mask(norm):
    net = random_chain(5, (3, 6, 5, 3))
    model = model_of(net)
    upper = lipschitz.upper_constants(lipschitz.activation_cells(net), norm)
    x = np.zeros((1, 3), np.float32)
    found = lipschitz.global_lipschitz(model, x, norm=norm, steps=60)
    assert upper.margin * (1 - 1e-6) <= found.max() <= 1.5 * upper.margin
    boxed = lipschitz.global_lipschitz(model, x, norm=norm, steps=60, box=(0.0, 1.0))
    assert np.all(boxed <= found * (1 + 1e-2))
    if norm == 2:
        whole = lipschitz.jacobian_norm(model, x, steps=60)
        assert upper.paper / np.sqrt(2) * (1 - 1e-6) <= whole <= 1.3 * upper.paper / np.sqrt(2)


def test_branch_and_bound_is_exact():
    net = random_chain(4, (3, 6, 5, 3))
    model, x = model_of(net), np.array([[0.3, 0.5, 0.6], [0.7, 0.2, 0.4]], np.float32)
    y, eps = np.array([0, 2]), 0.25
    exact = lipschitz.as_chain(model, x)
    cuts = [(np.maximum(t - eps, 0), np.minimum(t + eps, 1)) for t in x]
    upper = [
        lipschitz.upper_constants(lipschitz.activation_cells(exact, cut), np.inf) for cut in cuts
    ]
    how = {"norm": np.inf, "steps": 5}
    found = lipschitz.local_lipschitz(model, x, y, eps=eps, method="bab", **how)
    for i in range(2):
        np.testing.assert_allclose(found[i].max(), upper[i].by_label[y[i]], rtol=1e-3)
        assert found[i].max() >= upper[i].by_label[y[i]] * (1 - 1e-9)
    stopped = lipschitz.local_lipschitz(model, x, y, eps=eps, method="bab", seconds=0.0, **how)
    assert np.all(stopped >= found * (1 - 1e-9))
    whole = lipschitz.global_lipschitz(model, x, method="bab", **how)
    space = lipschitz.upper_constants(lipschitz.activation_cells(exact), np.inf)
    np.testing.assert_allclose(whole.max(), space.margin, rtol=1e-6)


@pytest.mark.parametrize("norm", [1, np.inf])
def test_no_attack_gets_inside_certified_radii(norm):
    net = model_of(random_chain(9, (4, 12, 3)))
    x = np.random.default_rng(0).uniform(0.2, 0.8, (30, 4)).astype(np.float32)
    model = Model(lambda p, x: p[0](x) - p[1], (net, jnp.mean(net(x), axis=0)))
    y = np.array(np.argmax(model(x), axis=1))
    y[0] = (y[0] + 1) % 3
    eps = {1: 0.2, 2: 0.15, np.inf: 0.1}[norm]
    found = lipschitz.verify(model, x, y, norm=norm, eps=eps, steps=10)
    assert not found.correct[0]
    assert not found.verified[0]
    assert found.radius[0] == 0
    assert 0 < found.verified.sum() < 29
    assert np.all((found.radius == eps) == found.verified)
    near = search(attacks.PGD(Lp(norm), 30), model, x, y, eps=eps, key=jax.random.key(0))
    flipped = np.asarray(near.success & near.correct)
    assert not np.any(flipped & found.verified)
    assert np.all(np.asarray(near.cost)[flipped] >= found.radius[flipped])


def residual(p, x):
    h = jax.nn.relu(x @ p[0])
    return jax.nn.relu(h @ p[1] + h) @ p[2] + x @ p[3]


def smooth(p, x):
    return jax.nn.silu(jax.nn.gelu(x @ p[0], approximate=False) @ p[1]) @ p[2]


def bent(p, x):
    return jnp.tanh(jax.nn.leaky_relu(x @ p[0]) @ p[1]) @ p[2]


def kinked(p, x):
    return jnp.clip(jnp.abs(x @ p[0]), 0.2, 1.1) @ jnp.maximum(p[1], 0.1) @ p[2]


@pytest.mark.parametrize(
    ("apply", "norm", "eps"),
    [
        (residual, 2, 0.5),
        (residual, np.inf, 0.05),
        (smooth, np.inf, 0.3),
        (bent, 2, 0.3),
        (kinked, np.inf, 0.2),
    ],
)
def test_other_nets_are_chains_too(apply, norm, eps):
    rng = np.random.default_rng(6)
    shapes = [(4, 6), (6, 6), (6, 3), (4, 3)]
    model = Model(apply, [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes])
    x, y = rng.uniform(0.3, 0.7, (2, 4)).astype(np.float32), np.array([0, 2])
    points = np.clip(x[:, None] + rng.uniform(-eps, eps, (2, 4000, 4)), 0, 1).astype(np.float32)
    pull = jax.jit(jax.vmap(jax.jacrev(lambda t: model(t[None])[0])))
    found = lipschitz.local_lipschitz(model, x, y, norm=norm, eps=eps, steps=20)
    assert np.all(np.isfinite(found))
    for i in range(2):
        inside = np.linalg.norm(points[i] - x[i], norm, axis=-1) <= eps
        jacobians = np.asarray(pull(points[i]))[inside]
        rows = jacobians - jacobians[:, y[i] : y[i] + 1]
        sizes = np.linalg.norm(rows, 1 if norm == np.inf else 2, axis=-1)
        assert len(sizes) > 100
        assert np.all(sizes.max(axis=0) <= found[i] * (1 + 1e-5))


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (functools.partial(jax.nn.gelu, approximate=False), 1.128904),
        (functools.partial(jax.nn.gelu, approximate=True), 1.128993),
        (jax.nn.silu, 1.099839),
        (jnp.tanh, 1.0),
    ],
)
def test_smooth_nets_have_constants_on_all_of_space(function, most):
    def apply(p, x):
        return function(x @ p[0]) @ p[1]

    model = Model(apply, [jnp.array([[1.0]]), jnp.array([[1.0, 0.0]])])
    found = lipschitz.global_lipschitz(model, np.zeros((1, 1)), norm=2, method="interval")
    np.testing.assert_allclose(found[0, 1], most, rtol=3e-6)
    assert found[0, 1] >= most - 5e-7
    # And on a ball: between the largest slope there and a little more.
    x, y, eps = np.array([[0.7]], np.float32), np.array([1]), 0.25
    near = lipschitz.local_lipschitz(model, x, y, norm=2, eps=eps, method="interval")[0, 0]
    slope = jax.vmap(jax.grad(function))(jnp.linspace(0.45, 0.95, 2001)).max()
    assert float(slope) * (1 - 1e-5) <= near <= float(slope) * 1.01
    above = lipschitz.sampled_lipschitz(
        model, x, y, key=jax.random.key(0), norm=2, eps=eps, samples=10, steps=20
    )
    np.testing.assert_allclose(above[0, 0], slope, rtol=1e-3)
    assert above[0, 0] <= near


@pytest.mark.parametrize("method", ["interval", "zonotope", "sdp"])
def test_a_function_without_a_constant_has_none(method):
    model = Model(lambda p, x: jnp.square(x @ p) @ p, jnp.eye(2))
    found = lipschitz.global_lipschitz(model, np.zeros((1, 2)), norm=2, method=method, steps=3)
    assert found[0, 1] == np.inf
    assert lipschitz.jacobian_norm(model, np.zeros((1, 2)), steps=3) == np.inf


@pytest.mark.parametrize("norm", [1, np.inf])
def test_sampled_constants_are_met_and_near(norm):
    net = random_chain(4, (3, 6, 5, 3))
    model, x, y = model_of(net), np.array([[0.3, 0.5, 0.6]], np.float32), np.array([0])
    exact = lipschitz.local_lipschitz(model, x, y, norm=norm, eps=0.3, steps=20)
    found = lipschitz.sampled_lipschitz(
        model, x, y, key=jax.random.key(0), norm=norm, eps=0.3, samples=200
    )
    assert np.all(np.asarray(found) <= exact * (1 + 1e-5))
    assert np.max(found) >= 0.7 * np.max(exact)


def test_bounds_at_radius_0_are_the_gradient():
    model = model_of(random_chain(7, (3, 6, 3)))
    x, y = np.full((1, 3), 0.5, np.float32), np.array([1])
    jacobian = np.asarray(jax.jacrev(lambda t: model(t[None])[0])(x[0]))
    rows = np.linalg.norm(jacobian - jacobian[1], 1, axis=-1)
    found = lipschitz.local_lipschitz(model, x, y, norm=np.inf, eps=0.0, steps=20)[0]
    np.testing.assert_allclose(found, rows, rtol=1e-5)


def test_no_bound_is_above_the_certified_interval_jacobian():
    model = models.mlp((16, 12, 12, 4), key=jax.random.key(0))
    x, y = np.full((1, 4, 4, 1), 0.5, np.float32), np.array([3])
    found = lipschitz.local_lipschitz(model, x, y, norm=np.inf, eps=0.1, steps=20)[0]
    box = jnp.asarray(x[0] - 0.1), jnp.asarray(x[0] + 0.1)
    wide = certify.interval_jacobian(model, *box, norm=np.inf, labels=[3])[0]
    assert np.all(found <= np.asarray(wide) * (1 + 1e-4))


def test_branch_and_bound_refuses_other_functions():
    model = Model(bent, [jnp.ones((2, 2))] * 3)
    with pytest.raises(ValueError, match="ReLU"):
        lipschitz.local_lipschitz(
            model, np.full((1, 2), 0.5, np.float32), np.array([0]), norm=2, eps=0.1, method="bab"
        )


REFUSED = [
    (lambda p, x: jnp.sort(x @ p, axis=-1), "sort"),
    (lambda p, x: jax.nn.softmax(x @ p), "softmax|exp|reduce_max|sub|div"),
]


@pytest.mark.parametrize(("apply", "word"), REFUSED)
def test_other_layers_are_refused_by_name(apply, word):
    model = Model(apply, jnp.ones((2, 2)))
    with pytest.raises(ValueError, match=word):
        lipschitz.as_chain(model, np.zeros((1, 2), np.float32))


BAD = [
    ({"eps": -1.0}, "eps"),
    ({"eps": np.nan}, "eps"),
    ({"method": "magic"}, "method"),
    ({"steps": -1}, "steps"),
    ({"method": "bab", "seconds": np.nan}, "seconds"),
    ({"norm": 3}, "norm"),
    ({"y": np.array([7])}, "label"),
    ({"x": np.full((1, 3), 2.0, np.float32)}, "box|\\[0"),
]


@pytest.mark.parametrize(("change", "word"), BAD)
def test_bad_input_is_refused(change, word):
    how = {"x": np.full((1, 3), 0.5, np.float32), "y": np.array([0]), "norm": 2, "eps": 0.1}
    how = {**how, **change}
    x, y = how.pop("x"), how.pop("y")
    with pytest.raises(ValueError, match=word):
        lipschitz.local_lipschitz(model_of(random_chain(8, (3, 4, 3))), x, y, **how)


def test_on_a_box_the_worst_case_is_flat():
    # No mass travels further than the box: the worst case stops growing, whatever l is.
    net = random_chain(3, (2, 6, 3))
    x, y = np.random.default_rng(0).uniform(0, 1, (3, 2)), np.array([0, 1, 2])
    box = np.zeros(2), np.ones(2)
    far = [worst(net, x, y, np.inf, eps, box=box) for eps in (1.0, 5.0, 50.0)]
    np.testing.assert_allclose(far, far[0], atol=1e-7)
    assert lipschitz.lower_constant(net, np.inf, y).value > 0.1
    # And it is the mean of the largest losses anywhere.
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 301)] * 2), -1).reshape(-1, 2)
    logits = np.asarray(model_of(net)(grid.astype(np.float32)))
    own = [np.max(np.delete(logits, k, 1).max(axis=1) - logits[:, k]) for k in y]
    np.testing.assert_allclose(far[0], np.mean(own), atol=2e-2)
    assert far[0] >= np.mean(own) - 1e-5


def test_the_true_dlr_has_no_lipschitz_constant():
    def slope(gap):
        # Three logits near each other: a small move of the first changes the ratio by much.
        logits = jnp.array([[2 * gap, gap, 0.0]])
        return float(jnp.abs(jax.grad(lambda z: losses.dlr(z, jnp.array([0])).sum())(logits)).max())

    assert slope(1e-2) > 10
    assert slope(1e-4) > 1000


def exact_sdp(weights):
    """LipSDP-Neuron over all of space as its authors pose it, by an interior point method."""
    clarabel = pytest.importorskip("clarabel", reason="an SDP solver")
    widths = [weights[0].shape[1], *(len(w) for w in weights[:-1])]
    starts, m = np.cumsum([0, *widths]), sum(widths[1:])
    operands = np.zeros((m, starts[-1]))
    for h, w in enumerate(weights[:-1]):
        operands[starts[h + 1] - widths[0] :][: len(w), starts[h] : starts[h + 1]] = w
    outputs = np.eye(starts[-1])[widths[0] :]
    last, first = np.zeros((2, starts[-1], starts[-1]))
    last[starts[-2] :, starts[-2] :] = weights[-1].T @ weights[-1]
    first[: widths[0], : widths[0]] = np.eye(widths[0])
    column, row = np.tril_indices(starts[-1])
    scale = np.where(row == column, 1.0, np.sqrt(2))
    pairs = [np.outer(z, v) + np.outer(v, z - 2 * v) for z, v in zip(operands, outputs)]
    entries = np.stack([part[row, column] * scale for part in (-first, *pairs)], axis=1)
    positive = np.hstack([np.zeros((m, 1)), -np.eye(m)])
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    solved = clarabel.DefaultSolver(
        sparse.csc_matrix((m + 1, m + 1)),
        np.eye(m + 1)[0],
        sparse.csc_matrix(np.vstack([entries, positive])),
        np.concatenate([-last[row, column] * scale, np.zeros(m)]),
        [clarabel.PSDTriangleConeT(int(starts[-1])), clarabel.NonnegativeConeT(m)],
        settings,
    ).solve()
    assert str(solved.status) == "Solved"
    return np.sqrt(solved.x[0])


@pytest.mark.parametrize("seed", [0, 1])
def test_quadratic_constraints_reach_the_semidefinite_optimum(seed):
    sizes, rng = (2, 10, 30, 20, 2), np.random.default_rng(seed)
    # Drawn as LipSDP draws the net of its first example, for which it says 36.482.
    weights = [rng.random((m, n)).astype(np.float32) / 2 for n, m in itertools.pairwise(sizes)]
    positive = lipschitz.relu_chain(weights, [np.zeros(m) for m in sizes[1:]])
    signed = random_chain(seed, sizes, biased=False)
    for net, steps, above in ((positive, 100, 1e-5), (signed, 200, 5e-3)):
        optimum = exact_sdp(net.weights)
        found = lipschitz.jacobian_norm(model_of(net), jnp.zeros((1, 2)), steps=steps)
        assert optimum * (1 - 1e-6) <= found <= (1 + above) * optimum


@pytest.mark.parametrize("norm", [1, 2, np.inf])
def test_trainable_constants_are_sound_and_can_be_differentiated(norm):
    net = random_chain(1, (4, 6, 5, 3))
    model, rng = model_of(net), np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(0.2, 0.8, (3, 4)), jnp.float32)
    y = jnp.array([0, 1, 2])
    how = {"norm": norm, "eps": 0.1}
    wide, found = (
        jax.jit(
            lambda m, method=method: lipschitz.trainable_lipschitz(m, x, y, method=method, **how)
        )(model)
        for method in ("interval", "zonotope")
    )
    tight = lipschitz.local_lipschitz(model, x, y, method="zonotope", **how)
    assert np.all(found <= wide * (1 + 1e-5))
    assert np.all(found >= tight * (1 - 1e-5))
    assert not np.diagonal(np.asarray(found)[:, np.asarray(y)]).any()

    @jax.jit
    def steepness(model):
        return jnp.sum(lipschitz.trainable_lipschitz(model, x, y, method="zonotope", **how))

    slope, height = jax.grad(steepness)(model), 1e-3
    along = jax.tree.map(lambda t: jnp.asarray(rng.normal(size=t.shape), t.dtype), slope)
    ends = [
        steepness(jax.tree.map(lambda a, b, s=s: a + s * height * b, model, along)) for s in (-1, 1)
    ]
    ours = sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (slope, along))))
    assert float(ours) == pytest.approx(float(ends[1] - ends[0]) / (2 * height), rel=0.02)


def test_training_through_constants_makes_nets_that_are_verified():
    (x, y), test = data.digits()
    net = models.mlp((64, 32, 10), key=jax.random.key(0))
    how = {"key": jax.random.key(1), "epochs": 15}
    towards = {"certificate": lipschitz.LipschitzTraining(norm=2), "eps": 0.5}
    counts = []
    for more in ({}, towards):
        model = training.train(net, x, y, **how, **more).model
        found = lipschitz.verify(model, *test.take(60), norm=2, eps=0.5, method="zonotope")
        counts.append(int(found.verified.sum()))
    assert counts[1] >= counts[0] + 10
    with pytest.raises(ValueError, match="warm < ramp"):
        lipschitz.LipschitzTraining(warm=0.7)
