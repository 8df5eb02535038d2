"""What once made a certificate say too much: jumps, short floats, scales, single primitives."""

import contextlib
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from wdjax import Model, certify, losses
from wdjax.bounds import continuity
from wdjax.certify import pointwise

pytestmark = pytest.mark.fast


# Jumps.

REFUSED = (lambda x: jnp.searchsorted(jnp.array([0.5]), x).astype(x.dtype),)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: (x > 0.5).astype(x.dtype),
        lambda x: jnp.where(x > 0.5, 1.0, 0.0),
        lambda x: jnp.heaviside(x - 0.5, 0.0),
        lambda x: jnp.where(x > 0.5, x, x + 1),
        lambda x: x * (x > 0.5),
        lambda x: lax.cummax((x > 0.5).astype(x.dtype)[..., ::-1], axis=1)[..., ::-1],
        *REFUSED,
    ],
)
def test_no_discontinuous_model_has_a_constant(step):
    model = Model(lambda w, x: step(x) @ w, jnp.eye(2))
    x, y = jnp.array([[0.51, 0.49]]), jnp.array([0])
    with pytest.raises(ValueError, match=r"not continuous|no interval rule|int32"):
        certify.margin_lipschitz(model, jnp.zeros(2), jnp.ones(2), norm=math.inf)
    refused = pytest.raises(ValueError, match=r"no interval rule|int32")
    with refused if step in REFUSED else contextlib.nullcontext():
        assert certify.radius(model, x, y, norm=math.inf)[0] <= 0.02, "it flips at this distance"


BROAD = np.array([1e6, 1.0, 1.0], "float32")
BESIDE = np.float32(0.5) * np.float32(1 + 4e-6)  # Where that function is infinite.


@pytest.mark.parametrize(
    ("fn", "jumps"),
    [
        (jax.nn.leaky_relu, False),
        (jax.nn.elu, False),
        (jax.nn.selu, False),
        (jax.nn.softplus, False),
        (jax.nn.gelu, False),
        (jax.nn.relu6, False),
        (jax.nn.logsumexp, False),
        (lambda x: jnp.where(x > 0.25, 2 * x, x + 0.25), False),
        (lambda x: (lambda a, b: jnp.where(a > b, 2 * a, a + b))(x, x[::-1]), False),
        (lambda x: jnp.where(x > 0.25, 2 * x, x), True),
        (lambda x: jnp.where(x > x[::-1], x, 0.0), True),
        (lambda x: jnp.where(x > 0, x, x[::-1]), True),
        (jnp.round, True),
        # The entry that decides is the one that is chosen, however both are repeated; or another.
        (lambda x: jnp.where((x > 0)[:, None], x[:, None] * jnp.ones(2), 0.0), False),
        (lambda x: jnp.where((x > 0)[:, None], x[None], 0.0), True),
        (lambda x: jnp.where((x > 0.25 - x / 4)[:, None], x[None], 0.25 - x[None] / 4), True),
        # A jump in one entry, beside others that are large.
        (lambda x: jnp.where(x > 0.3, 3 * x - 0.9, 0.0), False),
        (lambda x: jnp.where(x > 0.5, x * BROAD + 0.3, x * BROAD), True),
        (lambda x: jnp.where(x > 0.5, x, x + 0.3 + 1e-9 / (BESIDE - x)), True),
        (lambda x: jnp.where(x > 0.5, x + 0.3 - 1e9 * (BROAD > 1), x - 1e9 * (BROAD > 1)), True),
        # A jump of 14 units of the cases' rounding, and one of 56 of the threshold's.
        (lambda x: jnp.where(x > 0.5, 1e6 + 0.875, 1e6) - 1e6, True),
        (lambda x: jnp.where(x > 1e6, x - 1e6 + 3.5, 0.0), True),
        (lambda x: jnp.where(x > 1e6 / 3, 0.7 * x - 0.7e6 / 3, 0.0), False),
    ],
)
def test_jumps_are_told_from_kinks(fn, jumps):
    assert bool(continuity.jumps(jax.make_jaxpr(fn)(jnp.ones(3)))) == jumps


# Floats shorter than float32, and scales.


def test_short_floats_are_charged_with_their_own_rounding():
    """Near its boundary a linear model in bfloat16 flips where exact arithmetic does not."""
    rng = np.random.default_rng(0)
    weight = jnp.array(rng.normal(size=(64, 2)), jnp.bfloat16)
    model = Model(lambda w, x: (x.astype(jnp.bfloat16) @ w).astype(jnp.float32), weight)
    exact = np.float64(weight)
    apart = exact[:, 0] - exact[:, 1]
    x = rng.uniform(size=(300, 64))
    for _ in range(30):
        x = np.clip(x - (x @ apart)[:, None] * apart / np.sum(apart**2), 0, 1)
    x = x.astype(np.float32)
    y = np.asarray(jnp.argmax(model(jnp.array(x)), axis=-1))
    flipped = np.zeros(300, bool)
    for column, sign in itertools.product((0, 1), (-1, 1)):
        moved = np.clip(x + sign * 2e-4 * np.sign(exact[:, column]), 0, 1).astype(np.float32)
        flipped |= np.asarray(jnp.argmax(model(jnp.array(moved)), axis=-1)) != y
    assert flipped.sum() > 30
    for method in ("interval", "crown", "auto"):
        held = certify.certified(model, x, y, norm=math.inf, eps=2e-4, method=method)
        assert not np.any(flipped & np.asarray(held))
    low, high = certify.bound(lambda t: model(t[None])[0], x[0], x[0])
    for found in (x[0] @ exact, np.asarray(model(x[:1])[0]), np.asarray(jax.jit(model)(x[:1])[0])):
        assert np.all((low <= found) & (found <= high))


@pytest.mark.parametrize("scales", [(1e-25, 1e25), (1e-25, 1e-25, 1e25, 1e25), (1e25, 1e25, 1e-25)])
def test_scales_that_under_or_overflow_certify_nothing_wrong(scales):
    def apply(weight, x):
        for scale in scales:
            x = x * (scale * weight)
        return x @ jnp.array([[1.0, 0.0], [0.0, 1.0]])

    model = Model(apply, jnp.ones(()))
    x, y = jnp.array([[0.51, 0.49]]), jnp.array([0])
    for norm in (1, 2, math.inf):
        assert certify.radius(model, x, y, norm=norm)[0] <= 0.02 * 2, "it flips at .01 to .02"
        constants = certify.margin_lipschitz(model, jnp.zeros(2), jnp.ones(2), norm=norm)
        assert constants[0, 1] >= math.prod(scales) or np.isinf(constants[0, 1])


@pytest.mark.parametrize(
    "scales", [(1e15, 1e15, 1e-20, 1e-20), (1e10, 1e10, 1e-20, 1e-20), (1, 1, 1e-20, 1e-20)]
)
def test_coefficients_below_the_smallest_float_are_charged(scales):
    """What goes back through layers of 1e-20 is no float, and meets values of 1e30."""
    rng = np.random.default_rng(0)
    shapes = [(4, 6), (6, 6), (6, 6), (6, 3)]
    weights = [
        jnp.asarray(rng.normal(size=s) * scale, jnp.float32) for s, scale in zip(shapes, scales)
    ]

    def apply(weights, x):
        first, second, third, last = weights
        return jax.nn.relu(jax.nn.relu(x @ first) @ second) @ third @ last

    model = Model(apply, weights)
    x = jnp.asarray(rng.random((6, 4)), jnp.float32)
    y = jnp.argmax(model(x), axis=-1)
    moved = jnp.clip(x + 0.1 * jnp.asarray(rng.uniform(-1, 1, (3000, 6, 4)), jnp.float32), 0, 1)
    logits = np.asarray(jax.vmap(model)(moved))
    margin = np.min(logits[:, np.arange(6), y, None] - logits, axis=0)
    rivals = np.arange(3) != np.asarray(y)[:, None]
    for method in ("interval", "crown", "auto", "alpha"):
        low = np.asarray(certify.margin_bounds(model, x, y, norm=math.inf, eps=0.1, method=method))
        assert not np.any((low > margin)[rivals])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_labels_in_a_byte_have_as_many_rivals(dtype):
    """Inside a trace labels keep their type; sums of classes must not end at 127."""
    rng = np.random.default_rng(0)
    first, last = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 8), (8, 110)))
    model = Model(lambda w, x: jax.nn.relu(x @ w[0]) @ w[1], (first, last))
    x, y = jnp.asarray(rng.random((1, 5)), jnp.float32), jnp.array([100], dtype)

    @jax.jit
    def bounds(model, x, y):
        return certify.margin_bounds(model, x, y, norm=math.inf, eps=0.01, method="crown")

    logits = np.asarray(model(x))[0]
    for low in (
        bounds(model, x, y)[0],
        certify.trainable_bounds(model, x, y, norm=math.inf, eps=0.01, backward=1.0)[0],
    ):
        margin = np.where(np.arange(110) == 100, np.inf, logits[100] - logits)
        assert np.all(np.asarray(low) <= margin)
        assert np.all(np.isfinite(low) == (np.arange(110) != 100))


def test_time_is_above_0_by_every_method():
    model = Model(lambda w, x: x @ w, jnp.eye(2))
    x, y = jnp.array([[0.9, 0.1]]), jnp.array([0])
    for method in certify.METHODS:
        with pytest.raises(ValueError, match="seconds must be a number above 0"):
            certify.verify(model, x, y, norm=math.inf, eps=0.1, method=method, seconds=0.0)


def test_time_is_for_the_methods_that_take_it():
    model = Model(lambda w, x: x @ w, jnp.eye(2))
    x, y = jnp.array([[0.9, 0.1]]), jnp.array([0])
    for method in {*certify.METHODS} - {"auto", "bab", "sdp-crown"}:
        with pytest.raises(ValueError, match=f"seconds is for .* not '{method}'"):
            certify.verify(model, x, y, norm=math.inf, eps=0.1, method=method, seconds=1.0)


def test_bounds_that_contradict_the_model_count_for_nothing(monkeypatch):
    """Whatever is wrong with the bounds: a sample that the model gets wrong is not verified."""
    model = Model(lambda w, x: x @ w, jnp.eye(2))
    x, y = jnp.array([[0.9, 0.1], [0.1, 0.9]]), jnp.array([0, 0])

    def wrong(model, x, y, **how):
        return jnp.ones((len(x), 2)), np.zeros(len(x), int), None

    monkeypatch.setattr(pointwise, "searched", wrong)
    found = certify.verify(model, x, y, norm=math.inf, eps=0.1, method="crown", steps=0)
    assert found.verified.tolist() == [True, False]
    assert found.falsified.tolist() == [False, True]
    assert found.radius.tolist() == pytest.approx([0.1, 0.0])
    assert "samples that the model gets wrong" in found.remarks[-1]


@pytest.mark.parametrize("number", [2**24 - 1, 2**24 + 1, 2**31 - 1])
def test_large_integers_leave_no_wrong_remainder(number):
    def fn(x):
        return (number % (9 * x).astype(jnp.int32)).astype(jnp.float32)

    x = jnp.linspace(0.45, 0.5, 11)
    low, high = certify.bound(fn, x[0], x[-1])
    values = np.array([fn(one) for one in x])
    assert np.all((values >= low) & (values <= high))


def test_nan_is_open():
    for fn in (lambda x: 1e38 * x * 1e38, lambda x: jnp.sum(3e38 * x), lambda x: x / 0.0 - x / 0.0):
        low, high = certify.bound(fn, 0.5 * jnp.ones(2), jnp.ones(2))
        assert np.all(low == -np.inf)
        assert np.all(high == np.inf)
    for fn in (
        lambda x: (x - x * jnp.inf > 0) | True,
        lambda x: jnp.where(x * jnp.inf > 0, 1.0, 2.0),
        lambda x: jnp.where(x * jnp.inf - x * jnp.inf <= x, 1.0, 2.0),
        lambda x: jnp.where(jnp.exp(100 * x) * jnp.exp(100 * x) * 0 == 0, 1.0, 2.0),
        lambda x: jnp.where(jnp.log(x) < 0, 1.0, 2.0),
        lambda x: jnp.where(~(jnp.sqrt(x) >= 0), 1.0, 2.0),
    ):
        low, high = certify.bound(fn, -jnp.ones(2), jnp.ones(2))
        found = fn(jnp.array([-0.5, 0.5]))
        assert np.all((low <= found) & (found <= high))


TRACED = {
    "a NaN radius": (0.5, 0, math.nan),
    "a negative radius": (0.5, 0, -0.1),
    "a center outside the box": (2.5, 0, 0.1),
    "a NaN center": (math.nan, 0, 0.1),
    "a label past the last class": (0.5, 2, 0.1),
    "a label below 0": (0.5, -1, 0.1),
}


@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("method", ["interval", "crown", "alpha"])
def test_nothing_is_certified_of_bad_numbers_inside_jit(method, norm):
    model = Model(lambda w, x: jax.nn.relu(x @ w) @ w + jnp.array([9.0, 0.0]), jnp.eye(2))

    @jax.jit
    def answers(x, y, eps):
        held = certify.certified(model, x, y, norm=norm, eps=eps, method=method)
        return held, certify.radius(model, x, y, norm=norm, method=method)

    values, labels, eps = map(jnp.array, zip((0.5, 0, 0.1), *TRACED.values()))
    held, radius = answers(jnp.repeat(values[:, None], 2, axis=1), labels, eps)
    assert held.tolist() == [True] + [False] * len(TRACED), dict(zip(TRACED, held[1:]))
    assert radius[0] > 0
    assert not np.any(radius[3:]), "no radius went into these"


# Rules of single primitives.


def test_products_of_convolutions_have_no_frobenius_constant():
    def apply(_, x):
        if len(x) > 1:
            return jnp.concatenate([apply(None, row[None]) for row in x])
        image, kernel = x[:, :64].reshape(1, 8, 8, 1), x[:, 64:].reshape(3, 3, 1, 1)
        out = lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.stack([out.sum(axis=(1, 2, 3)), 0 * x[:, 0]], axis=1)

    model = Model(apply, None)
    lower, upper = jnp.zeros(73), jnp.ones(73)
    found = certify.layer_product(model, lower, upper, norm=2)[0, 1]
    gradient = jax.grad(lambda t: apply(None, t[None])[0, 0])(jnp.ones(73))
    assert found >= jnp.linalg.norm(gradient)


def test_dilated_windows_see_an_entry_more_often():
    def apply(_, x):
        out = lax.reduce_window(
            x, -jnp.inf, lax.max, (1, 3), (1, 2), "VALID", window_dilation=(1, 2)
        )
        return jnp.stack([out.sum(axis=1), 0 * x[:, 0]], axis=1)

    model = Model(apply, None)
    x = jnp.zeros(9).at[4].set(1.0)
    rise = apply(None, (1.5 * x)[None])[0, 0] - apply(None, x[None])[0, 0]
    assert rise == 3 * 0.5, "three windows see the entry"
    assert certify.layer_product(model, jnp.zeros(9), jnp.ones(9), norm=1)[0, 1] >= 3


def test_balls_and_boxes_of_bound_are_checked():
    box = jnp.zeros(2), jnp.ones(2)
    low, high = certify.bound(jnp.sum, *box, ball=(jnp.full(2, 0.5), 0.25, math.inf))
    np.testing.assert_allclose([low, high], [0.5, 1.5], rtol=1e-5)
    for ball in ((jnp.zeros(2), 1.0, 3), (jnp.zeros(2), -1.0, 2), (jnp.zeros(3), 1.0, 2)):
        with pytest.raises(ValueError, match=r"norm|ball"):
            certify.bound(jnp.sum, *box, ball=ball)
    with pytest.raises(ValueError, match="swap"):
        certify.bound(jnp.sum, box[1], box[0])
    with pytest.raises(ValueError, match="do not meet"):
        certify.bound(jnp.sum, *box, ball=(jnp.full(2, 9.0), 1.0, 2))


def test_maxima_spread_along_another_axis_are_not_mistaken():
    def fn(x):
        square = x.reshape(2, 2)
        return (square == square.max(axis=0).reshape(2, 1)).astype(x.dtype).sum(axis=0)

    low, high = certify.bound(fn, jnp.zeros(4), jnp.ones(4))
    assert np.all(low <= high)
    for x in np.random.default_rng(0).uniform(size=(50, 4)).astype(np.float32):
        assert np.all((low <= fn(x)) & (fn(x) <= high))


POINTS = np.random.default_rng(1).uniform(size=(200, 6)).astype(np.float32)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.exp2(100 * x - 50),
        lambda x: jax.scipy.special.erfc(4 * x),
        lambda x: (x + 0.5) ** 41,
        lambda x: (x + 0.5) ** -41,
        lambda x: x**2.5,
        lambda x: jax.nn.logsumexp(4 * x),
        lambda x: jnp.sort(-x),
        lambda x: jnp.tile(x, 2),
        lambda x: jnp.prod(x - 0.3),
        lambda x: jnp.cumprod(x - 0.3),
        lambda x: lax.scan(lambda c, t: (c * t, c + t), x[0], x)[1],
        lambda x: lax.scan(lambda c, t: (0.5 * c + t, c), x[0], x, reverse=True)[0],
        lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + i, x),
    ],
)
def test_rules_hold_at_points(fn):
    center = jnp.full(6, 0.5)
    for reach in (0.0, 0.1, 0.5):
        ends = center - reach, center + reach
        low, high = certify.bound(fn, *ends)
        at = jax.jit(jax.vmap(fn))(ends[0] + 2 * reach * POINTS)
        assert np.all((low <= at) & (at <= high))
    exact = float(jax.jit(lambda: jnp.max(high - low))())
    assert np.isfinite(exact)


def test_a_loss_bound_of_no_budget_is_the_loss():
    model = Model(lambda w, x: jnp.sqrt(x) @ w, jnp.eye(2))
    x, y = jnp.array([[0.7, 0.2]]), jnp.array([0])
    found = certify.wdro_bound(model, x, y, norm=2, eps=[0.0, 0.1], order=1)
    np.testing.assert_allclose(found[0], losses.cross_entropy(model(x), y)[0], rtol=1e-4)
    assert np.isinf(found[1])


@pytest.mark.parametrize("method", ["interval", "crown"])
def test_what_the_program_loses_by_cancellation_is_charged(method):
    """Two large hidden values, almost equal, whose difference times 1000 is the margin."""
    rng = np.random.default_rng(0)
    u = rng.uniform(1, 2, (50, 1))
    hidden = np.concatenate([u, u + 1e-3 * rng.normal(size=u.shape)], axis=1)
    weights = [jnp.asarray(w, jnp.float32) for w in (hidden, [[0, 1000], [0, -1000]])]
    model = Model(lambda p, x: x @ p[0] @ p[1], weights)
    x, y = jnp.asarray(rng.uniform(size=(400, 50)), jnp.float32), jnp.ones(400, int)
    low = certify.margin_bounds(model, x, y, norm=math.inf, eps=0.0, method=method)[:, 0]
    for logits in (model(x), jnp.concatenate([model(x[i : i + 1]) for i in range(400)])):
        gap = np.asarray(logits[:, 1] - logits[:, 0] - low)
        assert gap.min() >= 0
        assert gap.max() < 1


@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_the_bound_itself_is_rounded_down(norm):
    """Linear models have exact margins: of many sums of floats none may be above its own."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(0.3, 0.7, (200, 300)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(300, 2)), jnp.float32)
    low = certify.margin_bounds(
        Model(lambda w, x: x @ w, w), x, jnp.zeros(200, int), norm=norm, eps=1e-3, box=None
    )
    slope = np.asarray(w[:, 0], float) - np.asarray(w[:, 1], float)
    dual = np.linalg.norm(slope, {1: math.inf, 2: 2, math.inf: 1}[norm])
    exact = np.asarray(x, float) @ slope - float(np.float32(1e-3)) * dual
    over = np.asarray(low[:, 1], float) - exact
    assert over.max() <= 0
    assert over.min() > -1e-2


# Compilers.


def test_certificates_hold_as_users_compile_them():
    """The tests' own flags let the compiler fuse less (``conftest``)."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    script = Path(__file__).with_name("as_users_compile.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "all hold\n"), done.stderr[-2000:]


@pytest.mark.parametrize("labels", [[2], [-1], [0.5], 0])
def test_constants_are_of_labels_that_are_classes(labels):
    """A label beyond the classes had the constant of a logit alone, which is smaller."""
    model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [0.0, 2.0]]))
    with pytest.raises(ValueError, match="labels must be"):
        certify.margin_lipschitz(model, jnp.zeros(2), jnp.ones(2), norm=2, labels=labels)
