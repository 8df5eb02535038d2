"""What people build classifiers of, traced: bounded soundly, or refused by name; samples apart.

The page docs/primitives.md shows the same programs.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax, nn

from wdjax import Model, certify, models
from wdjax.checks import independence

PAGE = Path(__file__).parents[1] / "docs" / "primitives.md"
RNG = np.random.default_rng(0)
C = jnp.asarray(RNG.normal(size=8), jnp.float32)
W = jnp.asarray(RNG.normal(size=(8, 8)) / 3, jnp.float32)
K = jnp.asarray(RNG.normal(size=(3, 3, 2, 2)) / 3, jnp.float32)
NHWC = ("NHWC", "HWIO", "NHWC")
EPS = 0.02


def centred(fn):
    return lambda h: fn(2 * h - 1)


ACTIVATIONS = {
    **{
        name: centred(getattr(nn, name))
        for name in (
            "relu", "relu6", "leaky_relu", "elu", "celu", "selu", "silu", "mish", "softplus",
            "soft_sign", "squareplus", "log_sigmoid", "sparse_plus", "sparse_sigmoid", "sigmoid",
            "tanh", "hard_tanh", "hard_sigmoid", "hard_swish", "glu",
        )
    },
    "gelu": centred(nn.gelu),
    "gelu by erf": lambda h: nn.gelu(2 * h - 1, approximate=False),
    "PReLU": lambda h: jnp.where(h > 0.5, h - 0.5, C * (h - 0.5)),
    "maxout": lambda h: (h @ jnp.concatenate([W, -W], 1)).reshape(len(h), 8, 2).max(-1),
    "swiglu": lambda h: nn.silu(h @ W) * (h @ W.T),
    "a custom derivative": jax.custom_jvp(lambda h: jnp.sin(h)),
}  # fmt: skip
ACTIVATIONS["a custom derivative"].defjvp(lambda x, dx: (jnp.sin(x[0]), dx[0]))
NORMS = {
    "softmax": lambda h: nn.softmax(3 * h),
    "log_softmax": lambda h: nn.log_softmax(3 * h),
    "logsumexp": lambda h: nn.logsumexp(3 * h, axis=-1, keepdims=True) * C,
    "standardize": nn.standardize,
    "root mean square": lambda h: h * lax.rsqrt(jnp.mean(h * h, 1, keepdims=True) + 1e-6) * C,
    "l1, l2, l3, linf": lambda h: jnp.stack(
        [jnp.linalg.norm(h, ord=p, axis=1) for p in (1, 2, 3, jnp.inf)], axis=1
    ),
    "normalised": lambda h: h / jnp.maximum(jnp.linalg.norm(h, axis=1, keepdims=True), 1e-12),
    "distances": lambda h: -jnp.sqrt(jnp.sum((h[:, None] - W) ** 2, -1) + 1e-6),
    "radial basis": lambda h: jnp.exp(-jnp.sum((h[:, None] - W) ** 2, -1)),
    "nanmean": lambda h: h - jnp.nanmean(h, axis=1, keepdims=True),
}
PRODUCTS = {
    "einsum of two": lambda h: jnp.einsum("ni,nj->nij", h, h),
    "einsum of three": lambda h: jnp.einsum("ni,ij,nj->n", h, W, h)[:, None] * C,
    "bilinear": lambda h: (h[:, :4] @ W[:4, :4]) * h[:, 4:],
    "matrices of inputs": lambda h: h.reshape(-1, 2, 4) @ h.reshape(-1, 4, 2),
    "soft experts": lambda h: jnp.einsum(
        "ne,nei->ni", nn.softmax(h @ W), jnp.einsum("ni,eij->nej", h, jnp.stack([W] * 8))
    ),
    "prod": lambda h: h.prod(1, keepdims=True) * C,
    "det": lambda h: jnp.linalg.det(h[:, :4].reshape(-1, 2, 2))[:, None] * C,
    "matrices of constants": lambda h: h @ jax.scipy.linalg.expm(W - W.T) @ jnp.linalg.qr(W)[0],
}
INDICES = {
    "take": lambda h: jnp.take(h, jnp.array([1, 1, 5]), axis=1)[:, ::-1],
    "roll, flip, tile, repeat": lambda h: jnp.repeat(
        jnp.tile(jnp.flip(jnp.roll(h, 2, 1), 1), (1, 2)), 2, axis=1
    ),
    "at set, add": lambda h: h.at[:, 0].set(1.0).at[:, 2].add(h[:, 1]),
    "at multiply, max, min": lambda h: (
        h.at[:, 0].multiply(h[:, 1]).at[:, 2].max(0.4).at[:, 3].min(h[:, 1]).at[:, 4:].multiply(2)
    ),
    "segment_sum": jax.vmap(lambda row: jax.ops.segment_sum(row, jnp.arange(8) // 2, 4)),
    "segment_max": jax.vmap(lambda row: jax.ops.segment_max(row, jnp.arange(8) // 2, 4)),
    "cumsum, cumprod, cummax": lambda h: (
        jnp.cumsum(h, 1) + jnp.cumprod(h, 1) + lax.cummax(h, axis=1)
    ),
    "convolve": jax.vmap(lambda row: jnp.convolve(row, C[:3], mode="same")),
    "sort": lambda h: jnp.sort(h, axis=1) * C,
    "median, quantile": lambda h: (
        h - jnp.median(h, 1, keepdims=True) * jnp.quantile(h, 0.3, axis=1, keepdims=True)
    ),
}
STEPS = {
    "gates of the largest": lambda h: jnp.where(h >= lax.top_k(h, 3)[0][:, -1:], h, 0),
    "argsort and take": lambda h: jnp.take_along_axis(h * C, jnp.argsort(h, axis=1), 1),
    "places of top_k": lambda h: jnp.take_along_axis(h * C, lax.top_k(h, 3)[1], 1),
    "floor, ceil, round, sign": lambda h: (
        jnp.floor(3 * h) + jnp.ceil(2 * h) + jnp.round(4 * h) + jnp.sign(h - 0.5)
    ),
    "mod, rem": lambda h: jnp.mod(h, 0.3) + lax.rem(h, jnp.float32(0.4)),
    "argmax, argmin": lambda h: h * jnp.argmax(h, 1, keepdims=True) + jnp.argmin(h, 1)[:, None],
    "one_hot of argmax": lambda h: nn.one_hot(jnp.argmax(h, 1), 8),
    "a table at argmax": lambda h: W[jnp.argmax(h, axis=1)],
    "nearest code": lambda h: W[jnp.argmin(jnp.sum((h[:, None] - W) ** 2, -1), axis=1)],
    "int8, uint8, int32": lambda h: (
        jnp.clip(jnp.round(h * 127), -127, 127).astype(jnp.int8).astype(jnp.float32) / 127
        + (h * 255).astype(jnp.uint8).astype(jnp.float32) / 255
        + (8 * h).astype(jnp.int32).astype(jnp.float32)
    ),
    "products of int8": lambda h: lax.dot(
        jnp.round(h * 10).astype(jnp.int8),
        jnp.ones((8, 4), jnp.int8),
        preferred_element_type=jnp.int32,
    ).astype(jnp.float32),
    "straight-through rounding": lambda h: h + lax.stop_gradient(jnp.round(h * 255) / 255 - h),
    "select, piecewise": lambda h: (
        jnp.select([h > 0.7, h > 0.3], [h, h * 2], h * 3)
        + jnp.piecewise(h, [h < 0.3, h >= 0.3], [lambda z: z, lambda z: 0.3 + 2 * (z - 0.3)])
    ),
    "branches of vmap": jax.vmap(lambda row: lax.cond(row[0] > 0.5, jnp.sin, jnp.cos, row)),
    "bfloat16": lambda h: jnp.tanh(h.astype(jnp.bfloat16) @ W.astype(jnp.bfloat16)),
    "float16": lambda h: jnp.tanh(h.astype(jnp.float16) @ W.astype(jnp.float16)),
}
LOOPS = {
    "scan": lambda h: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), h, jnp.stack([W, W]))[0],
    "fori_loop": lambda h: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c @ W) + i * h, h),
    "fori_loop between arrays": lambda h: lax.fori_loop(
        0, jnp.int32(2), lambda i, c: jnp.tanh(c @ W) + i * h, h
    ),
    "while of known length": lambda h: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1] @ W)), (0, h)
    )[1],
    "switch by constants": lambda h: lax.switch(jnp.argmax(C) % 2, [jnp.sin, jnp.cos], h),
    "map": lambda h: lax.map(lambda row: jnp.tanh(W @ row), h),
    "associative_scan": lambda h: lax.associative_scan(jnp.multiply, h, axis=1),
    "checkpoint": jax.checkpoint(lambda h: jnp.tanh(h @ W)),
    "fixed noise": lambda h: h + jax.random.normal(jax.random.key(0), (8,)),
}
SPECIAL = {
    "sin, cos, sinc": lambda h: jnp.sin(5 * h) + jnp.cos(2 * h) + jnp.sinc(h),
    "tan, asin, acos, atan2": lambda h: (
        jnp.tan(h) + jnp.arcsin(0.9 * h) + jnp.arccos(0.9 * h) + jnp.arctan2(h, 1 + h)
    ),
    "erf, erfc, erf_inv": lambda h: lax.erf(h) + lax.erfc(2 * h) + lax.erf_inv(0.8 * h),
    "lgamma, digamma": lambda h: lax.lgamma(1 + h) + lax.digamma(1 + h),
    "powers": lambda h: h**2.5 + 2.0**h + (1 + h) ** h[:, ::-1],
    "xlogy, logit": lambda h: jax.scipy.special.xlogy(h, h) + jax.scipy.special.logit(h),
    "polyval": lambda h: jnp.polyval(C[:4], h),
}


def conv(x, kernel=K, strides=(1, 1), padding="SAME", **how):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NHWC, **how)


def pool(x, kind, start, size=2, strides=2, padding="VALID", dilation=1):
    window, step, apart = ((1, k, k, 1) for k in (size, strides, dilation))
    return lax.reduce_window(x, start, kind, window, step, padding, window_dilation=apart)


IMAGES = {
    "strides, dilation, groups": lambda x: jnp.concatenate(
        [
            conv(x, strides=(2, 2)).reshape(len(x), -1),
            conv(x, rhs_dilation=(2, 2)).reshape(len(x), -1),
            conv(x, K[:, :, :1], feature_group_count=2).reshape(len(x), -1),
        ],
        axis=1,
    ),
    "transposed": lambda x: nn.relu(lax.conv_transpose(x, K, (2, 2), "SAME")),
    "channels first": lambda x: lax.conv(
        x.transpose(0, 3, 1, 2), K.transpose(3, 2, 0, 1), (1, 1), "SAME"
    ),
    "patches": lambda x: lax.conv_general_dilated_patches(
        x, (2, 2), (2, 2), "VALID", dimension_numbers=NHWC
    ),
    "maxima, minima": lambda x: (
        pool(x, lax.max, -jnp.inf, 3, 2, "SAME") - pool(x, lax.min, jnp.inf)
    ),
    "means": lambda x: (
        pool(x, lax.add, 0.0, 3, 2, "SAME")
        / pool(jnp.ones_like(x), lax.add, 0.0, 3, 2, "SAME")
    ),
    "dilated maxima": lambda x: pool(x, lax.max, -jnp.inf, 2, 1, "SAME", 2),
    "l2 and l3 pooling": lambda x: (
        pool(x**2, lax.add, 0.0) ** 0.5 + pool(jnp.abs(x) ** 3, lax.add, 0.0) ** (1 / 3)
    ),
    "global maxima": lambda x: x.max((1, 2)),
    "resize, nearest": lambda x: jax.image.resize(x, (len(x), 6, 3, 2), "nearest"),
    "resize, linear": lambda x: jax.image.resize(x, (len(x), 6, 3, 2), "linear"),
    "resize, cubic": lambda x: jax.image.resize(x, (len(x), 6, 3, 2), "cubic"),
    **{
        f"pad, {mode}": lambda x, mode=mode: jnp.pad(x, ((0, 0), (1, 2), (0, 1), (0, 0)), mode)
        for mode in ("constant", "edge", "reflect", "symmetric", "wrap", "linear_ramp")
    },
    "pad, mean and maximum": lambda x: jnp.pad(
        jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0)), "mean"),
        ((0, 0), (0, 0), (0, 1), (0, 0)),
        "maximum",
    ),
    "depth to space": lambda x: x.reshape(-1, 2, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4, 5),
    "squeeze and excite": lambda x: x * nn.sigmoid(x.mean((1, 2), keepdims=True) @ W[:2, :2]),
    "local response": lambda x: x / (1 + 0.1 * conv(x * x, jnp.ones((1, 1, 2, 2)))) ** 0.75,
}  # fmt: skip
PROGRAMS = {
    "Activations": ACTIVATIONS, "Normalisation, distances": NORMS, "Products": PRODUCTS,
    "Moves, indices, sorting": INDICES, "Steps, integers, short floats": STEPS,
    "Control flow": LOOPS, "Other functions": SPECIAL, "Images": IMAGES,
}  # fmt: skip
REFUSED = {
    "fft": (lambda h: jnp.fft.fft(h, axis=1).real, "cosines and sines"),
    "rfft": (lambda h: jnp.abs(jnp.fft.rfft(h, axis=1)), "'fft'"),
    "solve": (lambda h: jnp.linalg.solve(W + 3 * jnp.eye(8), h.T).T, "'custom_linear_solve'"),
    "cholesky": (
        lambda h: jnp.linalg.cholesky(jnp.einsum("ni,nj->nij", h, h) + jnp.eye(8)),
        "'cholesky'",
    ),
    "interp": (lambda h: jnp.interp(h, jnp.linspace(0, 1, 5), C[:5]), "'lt_to'"),
    "searchsorted": (lambda h: jnp.searchsorted(jnp.linspace(0, 1, 5), h) * 1.0, "'le_to'"),
    "approx_max_k": (lambda h: lax.approx_max_k(h, 3)[0], "'approx_top_k'"),
    "copysign": (lambda h: jnp.copysign(h, h - 0.5), "'bitcast_convert_type'"),
    "i0e": (jax.scipy.special.i0e, "'bessel_i0e'"),
    "products of a window": (
        lambda h: lax.reduce_window(h, 1.0, lax.mul, (1, 2), (1, 2), "VALID"),
        "'reduce_window'",
    ),
    "a loop that the input ends": (
        jax.vmap(lambda row: lax.while_loop(lambda c: c[0] > 0.1, lambda c: 0.5 * c, row)),
        "'while'",
    ),
}
TRIED = {"solve", "a loop that the input ends"}
"""Whose samples are not proved to be apart, but tried."""


def with_head(fn, x):
    """A classifier of three classes with ``fn`` before its last layer."""
    size = int(np.prod(jax.eval_shape(fn, x).shape[1:]))
    head = jnp.asarray(np.random.default_rng(1).normal(size=(size, 3)), jnp.float32)
    return Model(lambda w, x: fn(x).reshape(len(x), -1) @ w, head)


def samples(shape):
    return jnp.asarray(np.random.default_rng(2).uniform(0.1, 0.9, (2, *shape)), jnp.float32)


def proved(model, x):
    shown = independence.proof(model, x.shape[1:], x.dtype)
    return shown.alone and shown.alike


def check_bounds(model, x, eps, most=None):
    """Both bounds hold for 2,000 random points, and CROWN's lose at most ``most`` times as much."""
    logits = model(x)
    y, rng = np.argmax(logits, axis=-1), np.random.default_rng(3)
    rivals = np.arange(logits.shape[1]) != y[:, None]
    moves = rng.uniform(-eps, eps, (1000, *x.shape)).astype(np.float32)
    moves[::2] = eps * np.sign(moves[::2])
    points = np.clip(x + moves, 0, 1).astype(np.float32)
    out = np.asarray(jax.jit(model)(points.reshape(-1, *x.shape[1:]))).reshape(1000, *logits.shape)
    margin = (np.take_along_axis(out, y[None, :, None], axis=2) - out).min(axis=0)
    clean = np.take_along_axis(np.asarray(logits), y[:, None], axis=1) - logits
    for method in ("interval", "crown"):
        low = np.asarray(certify.margin_bounds(model, x, y, norm=np.inf, eps=eps, method=method))
        assert np.all((low <= margin)[rivals]), method
        assert np.all(np.isfinite(low[rivals])), method
    if most is not None:
        assert np.mean((clean - low)[rivals]) <= most * np.mean((clean - margin)[rivals])


@pytest.mark.parametrize(
    ("theme", "name"), [(theme, name) for theme, own in PROGRAMS.items() for name in own]
)
def test_programs_are_bounded_and_samples_proved_apart(theme, name):
    fn, x = PROGRAMS[theme][name], samples((4, 4, 2) if theme == "Images" else (8,))
    model = with_head(fn, x)
    assert proved(model, x)
    check_bounds(model, x, EPS, None if theme.startswith("Steps") else 5.0)


class Convolutional(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.BatchNorm(use_running_average=True)(linen.Conv(3, (3, 3))(x)))
        x = linen.avg_pool(linen.max_pool(x, (2, 2), (2, 2)), (2, 2), (1, 1), "SAME")
        return linen.Dense(3)(x.reshape(len(x), -1))


class Normalised(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.GroupNorm(2)(linen.Conv(4, (3, 3))(x))
        return linen.Dense(3)(linen.LayerNorm()(linen.PReLU()(x)).mean((1, 2)))


class Attentive(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(4, (2, 4), strides=(2, 4))(x).reshape(len(x), -1, 4)
        first = self.param("first", linen.initializers.normal(), (1, 1, 4))
        x = jnp.concatenate([jnp.tile(first, (len(x), 1, 1)), x], axis=1)
        x = x + linen.MultiHeadDotProductAttention(2)(x)
        return linen.Dense(3)(x[:, 0])


class Recurrent(linen.Module):
    cell: type

    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(linen.RNN(self.cell(3))(x.reshape(len(x), 2, -1))[:, -1])


def of_linen(module):
    params = module.init(jax.random.key(0), jnp.zeros((1, 4, 4, 2)))
    return Model(lambda params, x: module.apply(params, x), params)


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 3, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.out = nnx.Linear(12, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        return self.out(self.dropout(x.reshape(len(x), -1)))


class Heads(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = x.reshape(len(x), 4, 8)
        return self.out((x + self.attention(self.norm(x))).mean(1))


class Gates(nnx.Module):
    def __init__(self, rngs):
        self.cells = nnx.RNN(nnx.GRUCell(16, 3, rngs=rngs))
        self.out = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.cells(x.reshape(len(x), 2, 16))[:, -1])


def of_equinox(build, apply):
    eqx = pytest.importorskip("equinox")
    arrays, rest = eqx.partition(build(eqx.nn, jax.random.key(0)), eqx.is_array)
    return Model(
        lambda arrays, x: jax.vmap(lambda t: apply(eqx.combine(arrays, rest), t))(x), arrays
    )


def of_haiku(build):
    hk = pytest.importorskip("haiku")
    net = hk.without_apply_rng(hk.transform_with_state(lambda x: build(hk, x)))
    state = net.init(jax.random.key(0), jnp.zeros((1, 4, 4, 2)))
    return Model(lambda state, x: net.apply(*state, x)[0], state)


def images_of_equinox(layers, image):
    x = image.transpose(2, 0, 1)
    for layer in layers[:-1]:
        x = layer(x)
    return layers[-1](x.reshape(-1))


def cells_of_equinox(layers, image):
    cell, out = layers
    return out(lax.scan(lambda c, row: (cell(row, c), None), jnp.zeros(3), image.reshape(2, 16))[0])


FRAMEWORKS = {
    "Flax Linen: Conv, BatchNorm, pools": lambda: of_linen(Convolutional()),
    "Flax Linen: GroupNorm, LayerNorm, PReLU": lambda: of_linen(Normalised()),
    "Flax Linen: attention with a token": lambda: of_linen(Attentive()),
    "Flax Linen: LSTMCell": lambda: of_linen(Recurrent(linen.LSTMCell)),
    "Flax Linen: GRUCell": lambda: of_linen(Recurrent(linen.GRUCell)),
    "Flax NNX: Conv, BatchNorm, Dropout": lambda: models.functional(Layers(nnx.Rngs(0))),
    "Flax NNX: RMSNorm, MultiHeadAttention": lambda: models.functional(Heads(nnx.Rngs(0))),
    "Flax NNX: GRUCell": lambda: models.functional(Gates(nnx.Rngs(0))),
    "Equinox: Conv2d, GroupNorm, pools": lambda: of_equinox(
        lambda nn, key: [
            nn.Conv2d(2, 4, 3, padding=1, key=key), nn.GroupNorm(2, 4), nn.MaxPool2d(2, 2),
            nn.PReLU(), nn.AvgPool2d(2, 1, padding=1), nn.Linear(36, 3, key=key),
        ],
        images_of_equinox,
    ),
    "Equinox: adaptive pools, ConvTranspose2d": lambda: of_equinox(
        lambda nn, key: [
            nn.AdaptiveMaxPool2d((3, 3)), nn.ConvTranspose2d(2, 2, 3, key=key),
            nn.AdaptiveAvgPool2d((2, 2)), nn.Linear(8, 3, key=key),
        ],
        images_of_equinox,
    ),
    "Equinox: MultiheadAttention": lambda: of_equinox(
        lambda nn, key: [nn.MultiheadAttention(2, 8, key=key), nn.Linear(8, 3, key=key)],
        lambda layers, x: layers[1]((lambda t: layers[0](t, t, t))(x.reshape(4, 8)).mean(0)),
    ),
    "Equinox: GRUCell": lambda: of_equinox(
        lambda nn, key: [nn.GRUCell(16, 3, key=key), nn.Linear(3, 3, key=key)], cells_of_equinox
    ),
    "Haiku: Conv2D, BatchNorm, pools": lambda: of_haiku(
        lambda hk, x: hk.Linear(3)(
            hk.AvgPool(2, 2, "SAME")(
                hk.MaxPool(2, 2, "SAME")(
                    nn.relu(
                        hk.BatchNorm(True, True, 0.9)(hk.Conv2D(3, 3)(x), hk.running_init())
                    )
                )
            ).reshape(len(x), -1)
        )
    ),
    "Haiku: LSTM": lambda: of_haiku(
        lambda hk, x: (
            lambda cell: hk.Linear(3)(
                hk.dynamic_unroll(
                    cell, x.reshape(len(x), 2, 16).swapaxes(0, 1), cell.initial_state(len(x))
                )[0][-1]
            )
        )(hk.LSTM(3))
    ),
}  # fmt: skip


LOOSE = {"Flax Linen: GroupNorm, LayerNorm, PReLU"}
"""Whose variances may be nearly 0 within the ball, so that their bounds are finite but far off."""


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_models_of_frameworks_are_bounded_and_samples_proved_apart(name):
    model, x = FRAMEWORKS[name](), samples((4, 4, 2))
    assert proved(model, x)
    check_bounds(model, x, 0.002, None if name in LOOSE else 8.0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_bounded_is_refused_by_name(name):
    fn, named = REFUSED[name]
    x = samples((8,))
    model = with_head(fn, x)
    assert proved(model, x) == (name not in TRIED)
    for method in ("interval", "crown"):
        with pytest.raises(ValueError, match=named):
            certify.margin_bounds(model, x, jnp.zeros(2, int), norm=np.inf, eps=EPS, method=method)


def rows():
    """The table of the page: a row for each theme, for frameworks and for what is refused."""
    for theme, own in PROGRAMS.items():
        yield f"| {theme} | {'; '.join(own)} | CROWN and intervals | proved |"
    for framework in ("Flax Linen", "Flax NNX", "Equinox", "Haiku"):
        parts = [name.split(": ")[1] for name in FRAMEWORKS if name.startswith(framework)]
        yield f"| {framework} | {'; '.join(parts)} | CROWN and intervals | proved |"
    for name, (_, named) in REFUSED.items():
        named = named.replace("'", "`") if "'" in named else "complex numbers"
        yield f"| Refused | {name} | names {named} | {'tried' if name in TRIED else 'proved'} |"


def test_the_page_shows_these_programs():
    """To write it anew, put ``made`` between the comments."""
    begin = "<!-- programs: made by tests/test_traced_models.py -->\n"
    head = "| Theme | Programs | Bounds | Samples apart |\n| --- | --- | --- | --- |\n"
    made = head + "".join(f"{row}\n" for row in rows())
    assert PAGE.read_text().split(begin)[1].split("<!-- end of programs -->")[0] == made
