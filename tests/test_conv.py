"""Convolutions and all their derivatives agree with ``lax.conv``, in a layout that loops well."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import models, program, xla_cpu
from wdjax.models.conv import conv
from wdjax.tracing import plain

fast = pytest.mark.fast
FIRST = {
    "jvp": lambda f, x, k, dx, dk: jax.jvp(f, (x, k), (dx, dk)),
    "image": lambda f, x, k, dx, dk: jax.grad(_loss(f))(x, k),
    "both": lambda f, x, k, dx, dk: jax.grad(_loss(f), (0, 1))(x, k),
}
TRANSFORMS = {
    **FIRST,
    "linearize": lambda f, x, k, dx, dk: jax.linearize(f, x, k)[1](dx, dk),
    "vmap": lambda f, x, k, dx, dk: jax.vmap(jax.grad(_loss(f), (0, 1)))(
        jnp.stack([x, dx]), jnp.stack([k, dk])
    ),
    "second": lambda f, x, k, dx, dk: jax.jvp(jax.grad(_loss(f), (0, 1)), (x, k), (dx, dk))[1],
    "reverse over reverse": lambda f, x, k, dx, dk: jax.grad(
        lambda x, k: jnp.sum(jnp.cos(jax.grad(_loss(f))(x, k))), (0, 1)
    )(x, k),
}


def _loss(f):
    return lambda x, k: jnp.sum(jnp.sin(f(x, k)))


def compare(shape, kernel, stride, padding, groups, transforms=TRANSFORMS, dtype=np.float64):
    """Ours against ``lax.conv_general_dilated`` on random numbers."""
    pads = ((padding, padding),) * 2 if isinstance(padding, int) else padding

    def ours(x, kernel):
        return conv(x, kernel, stride, padding, groups)

    def plain(x, kernel):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            pads,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    rng = np.random.default_rng(0)
    scale = 1 / np.sqrt(max(np.prod(kernel[:3]), 1))
    draw = [(rng.normal(size=s) * c).astype(dtype) for s, c in ((shape, 1), (kernel, scale))] * 2
    args = [jnp.asarray(a) for a in draw]
    tolerance = 1e-10 if dtype == np.float64 else 1e-5

    def derived(f):
        return jax.jit(lambda *args: {name: TRANSFORMS[name](f, *args) for name in transforms})

    results = [jax.tree_util.tree_leaves_with_path(derived(f)(*args)) for f in (ours, plain)]
    for (path, a), (_, b) in zip(*results):
        assert a.dtype == b.dtype
        size = np.max(np.abs(b), initial=1)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * size, err_msg=str(path))


CASES = {
    "one channel": ((2, 9, 8, 1), (4, 4, 1, 16), 2, 1, 1),
    "one channel, no padding": ((2, 8, 9, 1), (3, 3, 1, 32), 1, 0, 1),
    "one channel, uneven": ((1, 7, 6, 1), (3, 2, 1, 5), 3, ((0, 1), (3, 1)), 1),
    "one channel, much padding": ((2, 5, 6, 1), (3, 5, 1, 4), 2, 4, 1),
    "few outputs": ((2, 8, 8, 3), (3, 3, 3, 8), 2, 1, 1),
    "no padding": ((2, 7, 7, 3), (3, 3, 3, 20), 1, 0, 1),
    "full padding": ((2, 5, 6, 3), (3, 3, 3, 20), 1, 2, 1),
    "much padding": ((2, 5, 6, 3), (2, 3, 3, 20), 1, 4, 1),
    "uneven": ((1, 7, 6, 2), (3, 2, 2, 17), 3, ((0, 1), (3, 1)), 1),
    "pixels": ((2, 5, 5, 3), (1, 1, 3, 4), 2, 0, 1),
    "tiles": ((2, 9, 8, 3), (4, 4, 3, 5), 4, 0, 1),
    "depthwise": ((2, 4, 5, 4), (2, 2, 1, 4), 1, 1, 4),
    "larger than the image": ((2, 2, 5, 3), (3, 3, 3, 4), 1, 0, 1),
    "no image": ((0, 5, 5, 3), (3, 3, 3, 4), 1, 1, 1),
}


GROUPED = {
    "groups": ((2, 6, 7, 6), (3, 3, 2, 9), 2, 1, 3),
    "groups, no padding": ((2, 6, 7, 6), (3, 3, 2, 9), 1, 0, 3),
    "depthwise, several each": ((2, 4, 5, 2), (2, 2, 1, 4), 2, 1, 2),
}


@fast
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_derivative_is_that_of_lax(case):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        compare(*case)


@pytest.mark.parametrize("case", GROUPED.values(), ids=GROUPED)
def test_groups(case):
    """Not on the oldest stack: ``lax.conv`` itself has random errors there, if grouped."""
    compare(*case, FIRST, np.float32)


@pytest.mark.parametrize("side", [8, 24])
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_winograd_is_the_same_convolution(side, padding):
    compare((8, side, side, 96), (3, 3, 96, 96), 1, padding, 1, FIRST, np.float32)


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(seed):
    rng = np.random.default_rng(seed)

    def number(low, high):
        return int(rng.integers(low, high + 1))

    groups = number(1, 3)
    shape = (number(1, 2), number(1, 9), number(1, 9), groups * number(1, 3))
    kernel = (number(1, 5), number(1, 5), shape[3] // groups, groups * number(1, 18))
    padding = tuple((number(0, 3), number(0, 3)) for _ in range(2))
    compare(shape, kernel, number(1, 3), padding, groups, FIRST, np.float32)


@fast
@pytest.mark.parametrize("name", ["resnet2b", "wong_mnist", "trades_smallcnn"])
def test_gradients_of_networks_loop_well(name, key):
    model = getattr(models, name)(key=key)
    x = jnp.ones((2, 32, 32, 3) if name == "resnet2b" else (2, 28, 28, 1))

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    assert program.loops_well(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(model, x))


@fast
def test_gradients_of_all_convolutions_loop_well():
    for shape, kernel, stride, padding, groups in [*GROUPED.values(), *list(CASES.values())[:-2]]:

        def loss(x, kernel, facts=(stride, padding, groups)):
            return jnp.sum(conv(x, kernel, *facts) ** 2)

        gradient = jax.make_jaxpr(jax.grad(loss, (0, 1)))
        assert program.loops_well(gradient(jnp.ones(shape), jnp.ones(kernel)))


@pytest.mark.skipif(not xla_cpu.on_cpu(), reason="only CPUs have other convolutions")
@pytest.mark.parametrize("precision", ["highest", "float32", None])
def test_a_search_does_not_change_the_program_that_is_analysed(precision):
    """JAX keeps what it traced; for one with plain convolutions another must not be taken."""
    kernel = jnp.ones((1, 1, 3, 8))
    inner = jax.jit(lambda x: conv(x, kernel, stride=1, padding=0))

    def names():
        program_ = jax.make_jaxpr(inner)(jnp.ones((2, 8, 8, 3)))
        return {eqn.primitive.name for eqn in program.equations(program_)}

    with jax.default_matmul_precision(precision):
        assert "dot_general" in names()
        with plain():
            assert "conv_general_dilated" in names()
        assert "dot_general" in names()
