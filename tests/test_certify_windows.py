"""Bounds in windows against those of the same programs written as matrices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax import test_util as jtu

from wdjax import Model, certify
from wdjax.bounds import coarse, crown, margins, passes, region
from wdjax.bounds.coefficients import Rows, Whole
from wdjax.xla_cpu import transposed_conv

# Of each linear map: kernel, stride, padding; the skip is the fourth.
SETTINGS = {
    "halved": (13, [(3, 2, 1), (3, 1, 1), (3, 1, 1), (1, 1, 0), (4, 2, 1)], (2, 2, 3, 3, 3)),
    "uneven": (14, [(5, 3, 2), (3, 1, 1), (3, 2, 1), (1, 2, 0), (3, 1, 2)], (2, 3, 2, 2, 2)),
}


def convolved(x, kernel, stride, padding):
    return lax.conv_general_dilated(
        x, kernel, (stride,) * 2, ((padding,) * 2,) * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def block(maps, p, x, curve):
    """A residual block between two convolutions."""
    first, second, third, skip, last = maps
    x = curve(first(p[0], x))
    return last(p[4], curve(third(p[2], curve(second(p[1], x))) + skip(p[3], x)))


def through(maps, p, x):
    x = jax.nn.relu(block(maps, p, x, jax.nn.relu)).reshape(len(x), -1)
    return jax.nn.relu(x @ p[5] + 0.1) @ p[6]


def images(settings, p, x):
    return through(_maps(settings), p, x)


def operands(settings, curve, p, x):
    """What enters the last rectifier of :func:`images`."""
    return curve(block(_maps(settings), p, x, curve)).reshape(len(x), -1)


def _maps(settings):
    return [functools.partial(_image, stride=s, padding=n) for _, s, n in settings]


def _image(p, x, stride, padding):
    return convolved(x, p[0], stride, padding) + p[1]


def matrices(p, x):
    return through([lambda own, x: x @ own[0] + own[1]] * 5, p, x.reshape(len(x), -1))


def programs(name):
    """The same function twice: of images, and of flat vectors."""
    side, settings, widths = SETTINGS[name]
    rng = np.random.default_rng(len(name))
    inputs = [(side, side, 1)]
    kernels, flat = [], []
    for place, ((size, stride, padding), width) in enumerate(zip(settings, widths)):
        shape = inputs[(0, 1, 2, 1, 3)[place]]
        kernel = rng.normal(size=(size, size, shape[-1], width)) / size
        bias = 0.3 * rng.normal(size=width)
        basis = jnp.eye(math.prod(shape)).reshape(-1, *shape)
        out = convolved(basis, jnp.asarray(kernel, jnp.float32), stride, padding)
        inputs.append(out.shape[1:])
        kernels.append((kernel, bias))
        flat.append((out.reshape(len(basis), -1), np.tile(bias, math.prod(out.shape[1:3]))))
    units = math.prod(inputs[-1])
    dense = [rng.normal(size=(units, 6)) / 2, rng.normal(size=(6, 3))]
    to = functools.partial(jax.tree.map, functools.partial(jnp.asarray, dtype=jnp.float32))
    one = Model(functools.partial(images, tuple(settings)), to([*kernels, *dense]))
    two = Model(matrices, to([*flat, *dense]))
    x = jnp.asarray(rng.uniform(size=(4, side, side, 1)), jnp.float32)
    return one, two, x


@pytest.mark.parametrize(("name", "norm", "eps"), [("uneven", math.inf, 0.02), ("halved", 2, 0.2)])
def test_windows_are_what_matrices_are(name, norm, eps):
    one, two, x = programs(name)
    assert np.allclose(one(x), two(x), atol=1e-4)
    y = jnp.argmax(one(x), axis=-1)
    low, same = (
        np.asarray(certify.margin_bounds(model, x, y, norm=norm, eps=eps)) for model in (one, two)
    )
    assert np.isfinite(low).sum() == 8
    # Longer sums are charged with more rounding, so that matrices are a little looser.
    assert np.all(low >= same - 2e-3)
    assert np.all((low <= same + 0.03)[np.isfinite(low)])


@pytest.mark.parametrize("curve", [jax.nn.relu, jnp.tanh])
def test_coarse_bounds_hold_at_random_points_and_decide(curve):
    one, _, x = programs("uneven")
    settings = tuple(SETTINGS["uneven"][1])
    model = Model(functools.partial(operands, settings, curve), *one.args)
    ball = region.ball(x, jnp.full(len(x), 0.02), math.inf, (0.0, 1.0))
    ends = {}
    for name, tighten in {"intervals": (), "coarse": (coarse.refine,)}.items():

        @jax.jit
        def bounds(model, tighten=tighten):
            net = margins.network(model, x)
            state = crown.bounds(net, margins.wide(ball).prepared(), tighten)
            (node,) = [n for n in net.graph.nodes if n.name in ("max", "tanh")][-1:]
            (place,) = [i for i in node.inputs if i in state.values]
            return state.values[place].lower[:, 0], state.values[place].upper[:, 0]

        ends[name] = bounds(model)
    lower, upper = ends["coarse"]
    rng = np.random.default_rng(0)
    steps = rng.choice([-1.0, 1.0], size=(200, *x.shape)) * rng.choice(
        [0.3, 1.0], size=(200, 1, 1, 1, 1)
    )
    points = jnp.clip(x + 0.02 * steps.astype(np.float32), 0, 1).reshape(-1, *x.shape[1:])
    values = block(_maps(settings), one.args[0], points, curve).reshape(200, *lower.shape)
    assert jnp.all((values >= lower) & (values <= upper))
    widths = [np.asarray(up - low) for low, up in ends.values()]
    assert np.mean(widths[1]) < 0.8 * np.mean(widths[0]), "and they are tighter than intervals"


def test_slopes_of_whole_maps_fit_what_lies_in_windows():
    one, _, x = programs("uneven")
    ball = region.ball(x, jnp.full(len(x), 0.02), math.inf, (0.0, 1.0))

    @jax.jit
    def bounds(model):
        state, rows = margins.prepare(model, ball, "interval"), Rows(jnp.arange(len(x)))
        start = {state.network.graph.outputs[0]: Whole(jnp.ones((1, len(x), 1, 3)))}
        lines = {i: one for i, one in state.lines.items() if one.free is not None}
        usual = {i: one.views[0].low[None] for i, one in lines.items()}
        flipped = {i: 1 - slope for i, slope in usual.items()}
        slopes = (None, usual, flipped)
        return [passes.backward(state, start, rows, slopes=own) for own in slopes]

    plain, same, other = bounds(one)
    np.testing.assert_allclose(plain, same, rtol=1e-5)
    assert np.all(plain != other)


@pytest.mark.parametrize(
    "size", [(3, 4, 3, 2, 3, 7), (5, 2, 2, 3, 16, 4), (2, 3, 1, 1, 1, 5), (4, 4, 3, 3, 40, 3)]
)
def test_transposed_convolutions_are_those_of_loops(size):
    """With few channels by one product, with many by XLA's convolution."""
    rows, columns, height, width, channels, outputs = size
    rng = np.random.default_rng(0)
    a = rng.normal(size=(2, rows, columns, outputs)).astype(np.float32)
    kernel = rng.normal(size=(height, width, channels, outputs)).astype(np.float32)
    expected = np.zeros((2, rows + height - 1, columns + width - 1, channels))
    for i, j, u, v in np.ndindex(rows, columns, height, width):
        expected[:, i + u, j + v] += a[:, i, j].astype(float) @ kernel[u, v].T.astype(float)
    np.testing.assert_allclose(transposed_conv(a, kernel), expected, rtol=1e-5, atol=1e-5)
    several = jax.vmap(transposed_conv, (0, None))(jnp.stack([a, 2 * a]), kernel)
    np.testing.assert_allclose(several[1], 2 * expected, rtol=1e-5, atol=1e-5)
    jtu.check_grads(transposed_conv, (jnp.asarray(a), jnp.asarray(kernel)), order=1, rtol=1e-2)
