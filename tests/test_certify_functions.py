"""Bounds of functions of one number, and of quotients, against many points at every scale."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax import lax

from wdjax import Model, certify
from wdjax.bounds import activation, relax
from wdjax.bounds.fused import fuse
from wdjax.bounds.graph import flatten
from wdjax.bounds.primitives import TABLE
from wdjax.precision import float64

FUNCTIONS = {
    "gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "gelu of tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "leaky relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "mish": jax.nn.mish,
    "hard swish": jax.nn.hard_swish,
    "cube": lambda z: z**3,
}


def fused(fn, shape=(7,)):
    return fuse(flatten(jax.make_jaxpr(fn)(jnp.zeros(shape)))).nodes


def intervals(rng, n):
    """Wide and narrow ones, points, and such that end at 0."""
    middle, half = 2 * rng.normal(size=n), 10 ** rng.uniform(-4, 0.7, size=n)
    ends = np.stack([middle - half, middle + half])
    special = np.array([[-1, 0, -1, -0.0, 0.5, -40], [0, 1, 1, 0, 0.5, 30]])
    return np.concatenate([ends, special], axis=1).astype(np.float32)


def between(ends, n):
    """``[n, intervals]`` points, the ends among them."""
    share = np.linspace(0, 1, n)[:, None]
    return np.clip((ends[0] + share * (ends[1] - ends[0])).astype(np.float32), *ends)


@pytest.mark.fast
@pytest.mark.parametrize("name", FUNCTIONS)
def test_lines_hold_and_touch(name):
    (node,) = fused(FUNCTIONS[name])
    assert node.name == "elementwise"
    ends = intervals(np.random.default_rng(0), 150)

    @jax.jit
    def bounds(low, high):
        found = activation.lines(node.eqn, [(low, high)], [True])
        return *found.views[0][1:3], found.low, found.up, *found.ends

    low, up, below, above, least, most = (np.asarray(t, float) for t in bounds(*ends))
    z = between(ends, 500)
    values = np.asarray(jax.jit(FUNCTIONS[name])(z), float)
    over, under = up * z + above - values, values - (low * z + below)
    assert np.all((over >= 0) & (under >= 0) & (least <= values) & (values <= most))
    # What cells and rounding add is small beside what lines of one function cannot avoid.
    scale = np.abs(values).max(axis=0) + 0.1
    assert np.quantile(np.minimum(over, under).min(axis=0) / scale, 0.9) < 2e-2
    chord = np.abs(values[0] + values[-1] - 2 * values[len(values) // 2])
    gap = (up - low) * (ends[0] + ends[1]) / 2 + above - below
    assert np.median(gap / (chord + 1e-3 * scale)) < 2


@pytest.mark.fast
def test_what_is_not_a_continuous_function_of_one_number_stays():
    other = jnp.arange(7.0)
    for fn in (
        lambda z: z * jnp.where(z > 0, 1.0, 0.5),
        lambda z: jnp.where(1.1 * z + 0.1 > 0, z, -z),
        lambda z: jax.nn.silu(z * other) + z,
        lambda z: jax.nn.silu(z) * z.sum(),
        lambda z: jax.nn.silu(z.astype(jnp.bfloat16)),
        jax.nn.relu6,
    ):
        for node in fused(fn):
            if node.name == "elementwise":
                assert fn is not jax.nn.relu6
                z = jnp.linspace(-2.0, 2.0, 7)
                (out,) = jax.extend.core.jaxpr_as_fun(node.eqn.params["jaxpr"])(z[0])
                np.testing.assert_allclose(out, jax.nn.silu(z[0]), rtol=1e-5)


SCALED = {
    "abs": (lax.abs, np.abs, True),
    "exp": (lax.exp, np.exp, True),
    "exp2": (lax.exp2, np.exp2, True),
    "expm1": (lax.expm1, np.expm1, True),
    "tanh": (lax.tanh, np.tanh, True),
    "logistic": (lax.logistic, scipy.special.expit, True),
    "erf": (lax.erf, scipy.special.erf, True),
    "atan": (lax.atan, np.arctan, True),
    "asinh": (lax.asinh, np.arcsinh, True),
    "acosh": (lax.acosh, np.arccosh, False),
    "log": (lax.log, np.log, False),
    "log1p": (lax.log1p, np.log1p, False),
    "sqrt": (lax.sqrt, np.sqrt, False),
    "rsqrt": (lax.rsqrt, lambda z: z**-0.5, False),
    **{
        f"to the {k}": (lambda z, k=k: lax.integer_pow(z, k), lambda z, k=k: z ** float(k), True)
        for k in (-3, -2, -1, 2, 3, 4)
    },
}


@pytest.mark.fast
@pytest.mark.parametrize("name", SCALED)
def test_what_is_lost_below_and_above_all_floats_is_charged(name):
    """Of intervals at 1e-37 to 1e37, whose units in the last place and slopes may be no floats."""
    fn, exact, signed = SCALED[name]
    rng = np.random.default_rng(3)
    middle = 10.0 ** rng.uniform(-37, 37.5, 4000) * (rng.choice([-1, 1], 4000) if signed else 1)
    wide = middle + np.abs(middle) * 10.0 ** rng.uniform(-6, 0.5, 4000)
    ends = np.sort(np.float32([middle, wide]), axis=0)
    (eqn,) = jax.make_jaxpr(fn)(jnp.float32(1)).eqns
    z = ends[0].astype(float) + np.linspace(0, 1, 41)[:, None] * (ends[1] - ends[0].astype(float))
    with np.errstate(all="ignore"):
        value = exact(z)
    low, high = (np.asarray(t, float) for t in certify.bound(fn, *ends))
    assert not np.any((value < low) | (value > high))
    rule = TABLE[eqn.primitive.name].lines
    found = None if rule is None else rule(eqn, [tuple(map(jnp.asarray, ends))], [True])
    if found is None:
        return
    (view,) = found.views
    for slope, level, sign in ((view.low, found.low, 1), (view.up, found.up, -1)):
        with np.errstate(invalid="ignore"):
            line = np.asarray(slope, float) * z + np.asarray(level, float)
        held = sign * (value - line) >= 0
        assert np.all(held | ~np.isfinite(line))
        assert np.isfinite(line).mean() > 0.2


S_SHAPED = {
    "tanh": np.tanh, "logistic": lambda z: 1 / (1 + np.exp(-z)), "erf": scipy.special.erf,
    "atan": np.arctan, "asinh": np.arcsinh,
}  # fmt: skip


def any_ends(dtype, rng, n):
    """Of both signs and all magnitudes, also equal ones, nearly equal ones and 0."""
    most = np.log10(float(np.finfo(dtype).max)) - 1

    def number(low, high):
        return rng.choice([-1, 1], n) * 10.0 ** rng.uniform(low, high, n)

    sides = [
        (number(-most + 1, most), number(-most + 1, most)),
        (number(-4, 2), number(-4, 2)),
        (number(-4, 2), number(-most + 1, most)),
        (number(-4, 2), np.zeros(n)),
        (one := number(-most + 1, most), one),
        (one := number(-4, 2), one * (1 + 10 ** rng.uniform(-8, 0, n))),
    ]
    return np.sort(np.concatenate(sides, axis=1).astype(dtype), axis=0)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", S_SHAPED)
def test_lines_of_s_shaped_functions_hold_between_any_ends(name, dtype):
    """At points close to both ends, evenly between them, and at every scale around 0."""
    rng, long = np.random.default_rng(6), np.longdouble
    with float64() if dtype == np.float64 else contextlib.nullcontext():
        lower, upper = any_ends(dtype, rng, 250)
        eqn = jax.make_jaxpr(getattr(lax, name))(lower).eqns[0]
        found = TABLE[name].lines(eqn, [(jnp.asarray(lower), jnp.asarray(upper))], [True])
        (view,) = found.views
        lines = [(view.low, view.up, found.low, found.up)]
        for most in (4, 1e-3):  # As those that are optimised.
            for usual in (view.low, view.up):
                turn = jnp.asarray(rng.uniform(0, most, len(lower)), dtype).at[::7].set(0)
                lines.append((turn * usual,) * 2 + found.turned(turn * usual, lower, upper))
        lines = [[np.asarray(t).astype(long) for t in line] for line in lines]
    assert all(np.isfinite(t).all() for line in lines for t in line)
    near = 10.0 ** np.linspace(-12, -1.6, 12)
    shares = np.concatenate([np.linspace(0, 1, 17), near, 1 - near])[:, None]
    scales = 10 ** np.linspace(-3, 2, 60)[:, None] * np.ones(len(lower))
    z = np.concatenate([lower + shares * (upper - lower.astype(long)), scales, -scales])
    z = np.clip(z.astype(dtype), lower, upper)
    if name == "erf":
        value, unsure = scipy.special.erf(z.astype(float)).astype(long), 3e-16
    else:
        with np.errstate(over="ignore"):
            value, unsure = S_SHAPED[name](z.astype(long)), 0.0
    for low, up, below, above in lines:
        assert np.all(low * z + below <= value + unsure)
        assert np.all(up * z + above >= value - unsure)


def hull_at_middle(values):
    """The height at the middle of the concave hull of ``[2 k + 1, n]`` values on an even grid."""
    half = len(values) // 2
    left, right = np.arange(half)[:, None], np.arange(half + 1, len(values))[None]
    share = (half - left) / (right - left)
    chords = (1 - share)[..., None] * values[left] + share[..., None] * values[right]
    return np.maximum(values[half], chords.max(axis=(0, 1)))


ROUND = (-12, 12)
NEAREST = {
    **{name: (getattr(lax, name), ROUND, 1.005, 1.015) for name in S_SHAPED},
    **{name: (getattr(lax, name), ROUND, 1.005, 1.1) for name in ("exp", "expm1", "sin")},
    **{name: (getattr(lax, name), (0.05, 9), 1.006, 1.015) for name in ("log", "log1p", "sqrt")},
    "acosh": (lax.acosh, (1.05, 9), 1.006, 1.02),
    **{name: (FUNCTIONS[name], ROUND, 1.15, 1.8) for name in ("gelu", "gelu of tanh", "mish")},
    **{name: (FUNCTIONS[name], ROUND, 1.1, 1.7) for name in ("silu", "elu", "cube")},
    "softplus": (FUNCTIONS["softplus"], ROUND, 1.15, 3.2),
}
"""Function, domain, and bars: the 90 % quantile and the maximum of the ratio of areas."""


@pytest.mark.fast
@pytest.mark.parametrize("name", NEAREST)
def test_area_between_lines_is_nearly_the_smallest(name):
    """That of the concave and the convex hull's supporting lines at the middle, by brute force."""
    fn, (least, most), usual, worst = NEAREST[name]
    rng = np.random.default_rng(7)
    middle = rng.uniform(least, most, 200) * (rng.choice([0.1, 0.4, 1], 200) if least < 0 else 1)
    half = 10 ** rng.uniform(-1.5, 0.9, 200)
    ends = np.clip([middle - half, middle + half], least, most).astype(np.float32)
    (node,) = fused(fn, (200,))
    found = TABLE[node.name].lines(node.eqn, [tuple(map(jnp.asarray, ends))], [True])
    ends = ends.astype(float)
    with float64():
        values = np.asarray(
            fn(jnp.asarray(ends[0] + np.linspace(0, 1, 201)[:, None] * np.ptp(ends, axis=0)))
        )
    smallest = hull_at_middle(values) + hull_at_middle(-values)
    (view,) = found.views
    steep = np.asarray(view.up, float) - np.asarray(view.low, float)
    gap = steep * ends.mean(axis=0) + np.asarray(found.up, float) - np.asarray(found.low, float)
    # Elsewhere nothing counts but rounding.
    curved = smallest > 1e-3 * np.maximum(np.abs(values).max(axis=0), 1.0)
    assert curved.sum() > 80
    ratio = gap[curved] / smallest[curved]
    assert np.quantile(ratio, 0.9) < usual
    assert np.max(ratio) < worst


@pytest.mark.fast
@pytest.mark.parametrize("exponent", [-3, -2, -1, 2, 4])
def test_powers_lie_between_their_lines(exponent):
    ends = intervals(np.random.default_rng(1), 200)
    eqn = jax.make_jaxpr(lambda z: lax.integer_pow(z, exponent))(1.0).eqns[0]
    found = relax.power(eqn, [tuple(map(jnp.asarray, ends))], [True])
    outside = (ends[0] > 0) | (ends[1] < 0) | (exponent > 0)
    assert outside.sum() > 50
    assert not np.any(np.isfinite(found.low[~outside]) | np.isfinite(found.up[~outside]))
    z = between(ends, 500).astype(float)[:, outside]
    (view,) = found.views
    for slope, level, sign in ((view.low, found.low, 1), (view.up, found.up, -1)):
        line = np.asarray(slope, float)[outside] * z + np.asarray(level, float)[outside]
        assert np.all(sign * (z**exponent - line) >= 0)


@pytest.mark.fast
def test_quotients_are_products_with_inverses():
    """Bounds of ``x / y`` and ``1 / y`` on either side of 0 hold, and are close where narrow."""
    x = jnp.array([[0.5, 0.4], [0.1, 0.9], [0.7, 0.2]])
    y = jnp.zeros(3, jnp.int32)
    rng = np.random.default_rng(4)
    for shift in (0.3, -1.4):
        model = Model(
            lambda c, x: jnp.stack([x[:, 0] / (x[:, 1] + c), 0.3 / (x[:, 1] + c)], axis=1), shift
        )
        for eps in (0.01, 0.1):
            low, rough = (
                certify.margin_bounds(model, x, y, norm=jnp.inf, eps=eps, method=method)[:, 1]
                for method in ("crown", "interval")
            )
            logits = jax.vmap(model)(jnp.clip(x + eps * rng.uniform(-1, 1, (4000, 3, 2)), 0, 1))
            margin = logits[..., 0] - logits[..., 1]
            least, center = np.min(margin, axis=0), np.asarray(model(x))[:, 0]
            assert np.all(low <= least)
            assert np.all(low >= rough)
            if eps < 0.1:
                assert np.all(least - low <= 0.05 * (least - rough) + 0.02 * np.abs(center))
    bound = certify.bound(lambda z: z[0] / z[1], jnp.array([1e30, 1e38]), jnp.array([1e30, 2e38]))
    assert bound.upper >= 1.0000001e-8  # The inverse of 1e38 is no float.


def check_lines(model, x, eps, rng):
    """Tighter than intervals by far, and no random point breaks them."""
    x = jnp.asarray(x, jnp.float32)
    y = jnp.argmax(model(x), axis=-1)
    crown, plain = (
        np.asarray(certify.margin_bounds(model, x, y, norm=jnp.inf, eps=eps, method=method))
        for method in ("crown", "interval")
    )
    moved = jnp.clip(x[:, None] + eps * rng.uniform(-1, 1, (2, 300, x.shape[1])), 0, 1)
    logits = jax.vmap(model)(moved)
    own = jnp.take_along_axis(logits, y[:, None, None], axis=2)
    least = np.asarray(jnp.min(own - logits, axis=1))
    others = np.arange(4) != np.asarray(y)[:, None]
    assert np.all(crown[others] <= least[others])
    assert np.all((least - crown)[others] < 0.5 * (least - plain)[others])


def test_attention_has_lines():
    rng = np.random.default_rng(2)
    weights = jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)

    def apply(w, x):
        x = x.reshape(len(x), 2, 4)
        scores = (x @ w[0]) @ x.swapaxes(1, 2)
        return (jax.nn.softmax(scores) @ (x @ w[1]) @ w[2]).mean(axis=1)

    check_lines(Model(apply, weights), rng.random((2, 8)), 0.02, rng)


@pytest.mark.parametrize("masked", [-1e9, -1e30])
def test_masked_attention_has_lines(masked):
    """What no coefficient meets may be as large as it likes."""
    rng = np.random.default_rng(2)
    weights = jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)
    earlier = jnp.tril(jnp.ones((3, 3), bool))

    def apply(w, x):
        x = x.reshape(len(x), 3, 4)
        scores = jnp.where(earlier, (x @ w[0]) @ x.swapaxes(1, 2), masked)
        return (jax.nn.softmax(scores) @ (x @ w[1]) @ w[2]).mean(axis=1)

    check_lines(Model(apply, weights), rng.random((2, 12)), 0.01, rng)


def test_a_chain_of_functions_has_lines():
    """Six sines without a sum of entries between; four took minutes to compile."""
    rng = np.random.default_rng(4)
    weights = jnp.asarray(rng.normal(size=(5, 4)), jnp.float32)

    def apply(w, x):
        for _ in range(6):
            x = jnp.sin(1.5 * x)
        return x @ w

    model, x = Model(apply, weights), jnp.asarray(rng.random((2, 5)), jnp.float32)
    y = jnp.argmax(model(x), axis=-1)
    low = np.asarray(certify.margin_bounds(model, x, y, norm=jnp.inf, eps=0.1))
    logits = model(jnp.clip(x + jnp.asarray(0.1 * rng.uniform(-1, 1, (4000, 2, 5)), "f4"), 0, 1))
    own = np.take_along_axis(np.asarray(logits), np.asarray(y)[None, :, None], axis=2)
    others, margins = np.arange(4) != np.asarray(y)[:, None], own - np.asarray(logits)
    assert np.all((low <= margins.min(axis=0))[others])
    assert np.all((low > margins.min(axis=0) - 2 * np.ptp(margins, axis=0))[others])
