"""Lines above and below functions of one number, and of quotients, against many points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from wdjax import Model, certify
from wdjax.certify import activation, relax
from wdjax.certify.fused import fuse
from wdjax.certify.graph import flatten

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


@pytest.mark.fast
def test_quotients_lie_between_their_lines():
    rng = np.random.default_rng(1)
    ends = [intervals(rng, 200), intervals(rng, 200)]
    ends[1][:, :150] += np.sign(ends[1][:, :150].sum(axis=0)) * 9
    eqn = jax.make_jaxpr(lax.div)(1.0, 1.0).eqns[0]
    found = relax.quotient(eqn, [tuple(map(jnp.asarray, pair)) for pair in ends], [True, True])
    inside = (ends[1][0] > 0) | (ends[1][1] < 0)
    assert inside.sum() > 150
    assert not np.any(np.isfinite(found.low[~inside]) | np.isfinite(found.up[~inside]))
    points = [pair[0] + rng.random((500, 206)) * (pair[1] - pair[0]) for pair in ends]
    points = [np.concatenate([p, pair, pair[::-1]]) for p, pair in zip(points, ends)]
    points[1] = np.concatenate([points[1][:500], ends[1], ends[1]])
    points = [p[:, inside] for p in points]
    value = points[0] / points[1]
    for side, sign in (("low", 1), ("up", -1)):
        terms = zip(found.views, points)
        line = sum(np.asarray(getattr(view, side), float)[inside] * p for view, p in terms)
        line = line + np.asarray(getattr(found, side), float)[inside]
        assert np.all(sign * (value - line) >= 0)


def test_attention_has_lines():
    """Tighter than intervals by far, and no random point breaks them."""
    rng = np.random.default_rng(2)
    weights = jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)

    def apply(w, x):
        x = x.reshape(len(x), 2, 4)
        scores = (x @ w[0]) @ x.swapaxes(1, 2)
        return (jax.nn.softmax(scores) @ (x @ w[1]) @ w[2]).mean(axis=1)

    model = Model(apply, weights)
    x = jnp.asarray(rng.random((2, 8)), jnp.float32)
    y = jnp.argmax(model(x), axis=-1)
    crown, plain = (
        np.asarray(certify.margin_bounds(model, x, y, norm=jnp.inf, eps=0.02, method=method))
        for method in ("crown", "interval")
    )
    moved = jnp.clip(x[:, None] + 0.02 * rng.uniform(-1, 1, (2, 300, 8)), 0, 1)
    logits = jax.vmap(model)(moved)
    own = jnp.take_along_axis(logits, y[:, None, None], axis=2)
    least = np.asarray(jnp.min(own - logits, axis=1))
    others = np.arange(4) != np.asarray(y)[:, None]
    assert np.all(crown[others] <= least[others])
    assert np.all((least - crown)[others] < 0.5 * (least - plain)[others])
