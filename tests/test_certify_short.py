"""Certificates of programs in short floats, at scales where they overflow and underflow."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from wdjax import Model, certify, lipschitz, losses
from wdjax.precision import float64

HOW = {"norm": math.inf, "eps": 0.02}
LINEAR = jnp.array([[1.0, -1.0], [-1.0, 1.0], [0.3, 0.1]])


def issue(_, x):
    """Affine but for the end of float16, which lies between (.72, .72, .5) and (.72, .735, .5)."""
    z = ((x * 6e4).astype(jnp.float16) * jnp.float16(1.5)).astype(jnp.float32)
    return z @ jnp.array([[0.0, 0.0], [-1e-5, 0.0], [0.0, 0.0]]) + jnp.array([2.0, 0.0])


def hidden(_, x):
    """The same, where infinity less infinity meets a function that is bounded."""
    z = (x * 6e4).astype(jnp.float16) * jnp.float16(1.5)
    return jnp.tanh((z - z[:, ::-1]).astype(jnp.float32)) @ (0.1 * LINEAR) + jnp.array([2.0, 0.0])


@pytest.mark.fast
@pytest.mark.parametrize("apply", [issue, hidden])
def test_what_overflows_on_the_way_is_certified_by_nothing(apply):
    model = Model(apply, None)
    x, y = jnp.array([[0.72, 0.72, 0.5]]), jnp.array([0])
    assert np.all(np.isfinite(model(x)))
    assert not np.all(np.isfinite(model(jnp.array([[0.735, 0.735, 0.735]]))))
    for method in ("interval", "crown", "alpha"):
        low = certify.margin_bounds(model, x, y, method=method, **HOW)
        assert low[0, 1] == -np.inf, method
    assert certify.radius(model, x, y, norm=math.inf, steps=3)[0] < 0.015
    found = certify.verify(model, x, y, method="bab", steps=0, seconds=0.1, **HOW)
    assert not found.verified[0]
    for backward in (None, 1.0, 0.5):
        low = certify.trainable_bounds(model, x, y, backward=backward, **HOW)
        assert low[0, 1] == -np.inf
    for norm in (1, math.inf):
        assert np.isinf(certify.margin_lipschitz(model, jnp.zeros(3), jnp.ones(3), norm=norm)[0, 1])
    more = {"order": 1, "loss": losses.margin}
    assert np.isinf(certify.wdro_bound(model, x, y, **more, **HOW))
    assert np.isinf(certify.growth_bound(model, x, y, radii=[0.1, 0.5], **more, **HOW))
    with pytest.raises(ValueError, match="float16"):
        lipschitz.verify(model, x, y, method="interval", **HOW)


def test_losses_of_short_floats_are_not_bounded_by_slopes_of_the_function():
    """Roundings that grow on the way are steeper: six products in bfloat16 rise to 45.625 where the
    function's slope gives 45.06."""

    def apply(w, x):
        h = x.astype(jnp.bfloat16)
        for k in range(6):
            h = jax.nn.relu(h * w[k].astype(jnp.bfloat16))
        h = h.astype(jnp.float32)
        return jnp.concatenate([jnp.zeros_like(h), 10 * h], axis=1)

    w = jnp.asarray(1 + 0.9 * np.random.default_rng(0).random(6), jnp.float32)
    model, x, y, eps = Model(apply, w), np.zeros((1, 1), np.float32), np.array([0]), 0.69336694
    reached = float(model(jnp.full((1, 1), eps, jnp.float32))[0, 1])
    how = {"norm": 2, "eps": eps, "loss": losses.margin}
    assert certify.lipschitz_constant(model, x, y, norm=2) == math.inf
    assert certify.wdro_bound(model, x, y, order=1, **how) == math.inf
    assert reached <= certify.wdro_bound(model, x, y, order=math.inf, **how) < 2 * reached
    stored = Model(lambda w, x: x @ w.astype(jnp.bfloat16).astype(x.dtype), jnp.eye(1, 2))
    assert np.isfinite(certify.lipschitz_constant(stored, x, y, norm=2))
    for order in (1, math.inf):
        grown = certify.growth_bound(model, x, y, order=order, radii=[eps, 1.0], **how)
        assert reached <= grown < 2 * reached, order


def chain(dtype, p, x):
    return ((x * p["scale"]).astype(dtype) * jnp.asarray(1.5, dtype)).astype(jnp.float32) @ LINEAR


def dense(dtype, p, x):
    z = jax.nn.relu((x * p["scale"]).astype(dtype) @ p["in"].astype(dtype))
    return (z @ p["out"].astype(dtype)).astype(jnp.float32)


def sums(dtype, p, x):
    z = (jnp.concatenate([x, -x], axis=1) * p["scale"]).astype(dtype)
    zero = np.zeros((), dtype)[()]
    pooled = lax.reduce_window(z, zero, lax.add, (1, 4), (1, 1), "VALID")
    return (pooled + lax.cumsum(z, axis=1)[:, -3:]).astype(jnp.float32) @ LINEAR


def bent(dtype, p, x):
    z = (x * p["scale"]).astype(dtype)
    z = jnp.tanh((z - z[:, ::-1]).astype(jnp.float32)) + jnp.clip(z, -1, 1).astype(jnp.float32)
    return z @ LINEAR


def shorter(dtype, p, x):
    """Products of what is longer than their result, with constants and with each other."""
    z, into = x * p["scale"], {"preferred_element_type": dtype}
    z = jnp.matmul(z, p["in"], **into).astype(jnp.float32) / p["scale"]
    return (jnp.einsum("ni,nij->nj", z, z[..., None] * p["out"], **into)).astype(jnp.float32)


def products(dtype, p, x):
    z = (x * p["scale"]).astype(dtype)
    running = lax.cumprod(jnp.concatenate([z, 1 / (z + 1)], axis=1), axis=1)
    return running[:, -3:].astype(jnp.float32) @ LINEAR


def down_and_up(dtype, p, x):
    z = (x * p["scale"]).astype(jnp.bfloat16).astype(dtype).astype(jnp.float32) / p["scale"]
    return z.astype(dtype).astype(jnp.float32) @ LINEAR


CASES = [
    *((apply, jnp.float16) for apply in (chain, dense, sums, bent, products, down_and_up)),
    *((apply, jnp.float8_e4m3fn) for apply in (dense, sums, bent, down_and_up)),
    (dense, jnp.bfloat16),
    (shorter, jnp.bfloat16),
    (shorter, jnp.float16),
    (dense, jnp.float8_e5m2),
]


@pytest.mark.parametrize(
    ("apply", "dtype"), CASES, ids=lambda case: getattr(case, "__name__", str(case))
)
def test_no_point_of_a_short_program_breaks_a_bound(apply, dtype):
    """A point where the program is not finite breaks every bound but -inf."""
    rng = np.random.default_rng(0)
    info, eps = jnp.finfo(dtype), 0.05
    x = jnp.asarray(rng.uniform(0.1, 0.9, (6, 3)), jnp.float32)
    moves = rng.uniform(-1, 1, (400, *x.shape))
    points = jnp.asarray(
        np.clip(x + 0.999 * eps * np.sign(moves) * abs(moves) ** 0.2, 0, 1), x.dtype
    )
    both = jax.jit(lambda model, t: jax.vmap(model)(t))
    parameters = {"in": rng.normal(size=(3, 5)), "out": rng.normal(size=(5, 2))}
    parameters = jax.tree.map(lambda t: jnp.asarray(t, jnp.float32), parameters)
    open_, held = 0, 0
    for share in (1.3, 0.4, 0.02, "1", "4 tiny", ".1 tiny"):
        scale = {"1": 1.0, "4 tiny": 4 * float(info.tiny), ".1 tiny": 0.1 * float(info.tiny)}
        scale = jnp.float32(scale.get(share) or share * min(float(info.max), 1e30))
        model = Model(functools.partial(apply, dtype), {"scale": scale, **parameters})
        logits = np.asarray(both(model, points)).astype(np.float64)
        y = jnp.asarray(np.nan_to_num(logits).mean(axis=0).argmax(axis=-1))
        own = np.take_along_axis(logits, np.asarray(y)[None, :, None], axis=2)
        with np.errstate(invalid="ignore"):
            margin = np.where(np.isfinite(logits).all(axis=2, keepdims=True), own - logits, -np.inf)
        low = np.asarray(certify.margin_bounds(model, x, y, norm=math.inf, eps=eps, method="crown"))
        rival = np.arange(2) != np.asarray(y)[:, None]
        assert not np.any((low > margin.min(axis=0)) & rival), share
        open_, held = (
            open_ + np.sum(np.isneginf(low[rival])),
            held + np.sum(np.isfinite(low[rival])),
        )
    assert held, "bounds must hold something"
    assert open_ or dtype == jnp.bfloat16, "scales must overflow"


def test_products_hold_in_any_order():
    """Partial products may be lost or too large although the whole is not."""

    def apply(_, x):
        z = x * jnp.array([1e30, 1e30, 1e-30, 1e-30], x.dtype)
        return jnp.stack([jnp.prod(z, axis=1), 0 * x[:, 0]], axis=1)

    model, x = Model(apply, None), jnp.full((1, 4), 0.9)
    low = certify.margin_bounds(model, x, jnp.array([0]), norm=math.inf, eps=0.01)
    assert low[0, 1] == -np.inf


def test_casts_from_float64_end_where_float32_does():
    def apply(_, x):
        z = (x * 1e39).astype(jnp.float32).astype(jnp.float64) * 1e-39
        return jnp.stack([z[:, 0] + 2, 0 * z[:, 0]], axis=1)

    with float64():
        model, x, y = Model(apply, None), jnp.full((1, 2), 0.33), jnp.array([0])
        assert np.isfinite(model(x)).all()
        assert not np.isfinite(model(x + 0.02)).all()
        for method in ("interval", "crown"):
            assert certify.margin_bounds(model, x, y, method=method, **HOW)[0, 1] == -np.inf
        constants = certify.margin_lipschitz(model, jnp.zeros(2), jnp.ones(2), norm=2)
        assert np.isinf(constants[0, 1])


@pytest.mark.fast
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.exp2((120 * x).astype(jnp.bfloat16)),
        lambda x: lax.integer_pow((0.8 + 0.4 * x).astype(jnp.float16), 41),
        lambda x: lax.cumprod((0.8 + 0.4 * x).astype(jnp.bfloat16), axis=0),
        lambda x: lax.cumsum((x - 0.5).astype(jnp.bfloat16), axis=0),
        lambda x: jnp.expm1(x.astype(jnp.float16)),
    ],
)
def test_short_functions_stay_within_their_bounds(fn):
    """Some are wrong by dozens of units of their own dtype."""
    rng = np.random.default_rng(0)
    bound = jax.jit(lambda x: certify.bound(lambda t: fn(t).astype(jnp.float32), x, x))
    for x in jnp.asarray(rng.uniform(0, 1, (20, 40)), jnp.float32):
        low, high = bound(x)
        for found in (fn(x), jax.jit(fn)(x)):
            at = np.asarray(found.astype(jnp.float32))
            assert np.all((low <= at) & (at <= high))


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_logits_in_short_floats_have_radii(dtype):
    """Within those of the same net whose logits are float32."""
    short, long = (Model(lambda w, x, d=d: (jax.nn.relu(x @ w) @ w[:2]).astype(d), LINEAR)
                   for d in (dtype, jnp.float32))  # fmt: skip
    x, y = jnp.array([[0.7, 0.2, 0.5]]), jnp.array([0])
    for method in ("interval", "crown", "alpha"):
        one = certify.verify(short, x, y, method=method, **HOW)
        other = certify.verify(long, x, y, method=method, **HOW)
        assert one.verified[0]
        assert 0.02 <= one.radius[0] <= other.radius[0]
    slopes = [
        lipschitz.sampled_lipschitz(m, x, y, key=jax.random.key(0), **HOW) for m in (short, long)
    ]
    np.testing.assert_allclose(*slopes, rtol=0.02)


def test_outputs_that_are_not_finite_are_told():
    model = Model(lambda w, x: jnp.where(x[:, :1] > 0.5, jnp.nan, 1.0) * (x @ w), LINEAR)
    x, y = jnp.array([[0.7, 0.2, 0.5], [0.4, 0.1, 0.5]]), jnp.array([0, 0])
    found = certify.verify(model, x, y, method="interval", **HOW)
    assert found.verified.tolist() == [False, True]
    assert "not finite for 1 of 2 samples" in found.remarks[0]


@pytest.mark.parametrize("method", ["interval", "crown"])
def test_logits_may_be_shorter_than_the_samples(method):
    """Linear bounds are in the samples' dtype, those of the logits in theirs."""
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        w = jnp.array([[1.0, -1.0], [0.0, 2.0]])
        x, y = jnp.array([[0.8, 0.1]]), jnp.array([0])
        model = Model(lambda w, x: (jnp.maximum(x @ w, 0.0) @ w).astype(jnp.float32), w)
        low = certify.margin_bounds(model, x, y, norm=math.inf, eps=0.1, method=method)
    grid = np.linspace(-0.1, 0.1, 21)
    points = np.array([[0.8 + a, 0.1 + b] for a in grid for b in grid if 0.1 + b >= 0])
    w = np.asarray(w)
    logits = np.maximum(points @ w, 0.0) @ w
    least = np.min(logits[:, 0] - logits[:, 1])
    assert least - 0.5 < float(low[0, 1]) <= least


def test_constants_of_logits_shorter_than_the_samples():
    """The gradient is pulled back from the logits' dtype."""
    w = jnp.array([[1.0, -1.0], [0.0, 2.0]])
    model = Model(lambda w, x: (x @ w).astype(jnp.float16), w)
    for constants in (certify.interval_jacobian, certify.margin_lipschitz):
        sizes = constants(model, jnp.zeros(2), jnp.ones(2), norm=2)
        assert float(sizes[0, 1]) == pytest.approx(math.sqrt(8), rel=0.1)
