"""What a jaxpr tells about a program, wherever in it the equations are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from wdjax import program

pytestmark = pytest.mark.fast
ON_CPU = jax.default_backend() == "cpu"
IMAGE, KERNEL = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 4, 4))
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def convolve(x, kernel=KERNEL, dims=NHWC, **options):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), ((1, 1),) * 2, dimension_numbers=dims, **options
    )


def transposed(x):
    return convolve(x.transpose(0, 3, 1, 2), KERNEL.transpose(3, 2, 0, 1), NCHW)


@jax.custom_vjp
def ruled(x):
    return transposed(x)


ruled.defvjp(lambda x: (transposed(x), None), lambda _, ct: (ct,))


@jax.custom_jvp
def directed(x):
    return transposed(x)


directed.defjvps(lambda dx, out, x: jax.jvp(transposed, (x,), (dx,))[1])


NESTED = {
    "plain": transposed,
    "jit": jax.jit(transposed),
    "scan": lambda x: lax.scan(lambda c, _: (c + transposed(x).sum(), None), 0.0, length=2)[0],
    "while": lambda x: lax.while_loop(lambda c: c < 9, lambda c: c + transposed(x).sum(), 0.0),
    "cond": lambda x: lax.cond(x.sum() > 0, lambda: transposed(x), lambda: transposed(x) * 2),
    "remat": jax.checkpoint(transposed),
    "custom_vjp": ruled,
    "custom_jvp": directed,
    "gradient": jax.grad(lambda x: jnp.sum(convolve(x) ** 2)),
}


def loops_well(fn, *args):
    return program.loops_well(jax.make_jaxpr(fn)(*args))


@pytest.mark.parametrize("fn", NESTED.values(), ids=NESTED)
def test_a_convolution_in_another_layout_is_found_everywhere(fn):
    assert loops_well(fn, IMAGE) == (not ON_CPU)


@pytest.mark.parametrize(
    "options",
    [{}, {"lhs_dilation": (2, 2)}, {"rhs_dilation": (2, 2)}, {"batch_group_count": 2}],
    ids=lambda options: "".join(options) or "plain",
)
def test_the_layout_alone_decides(options):
    assert loops_well(lambda x: convolve(x, **options), IMAGE)


def test_groups_and_other_numbers_of_axes():
    assert loops_well(lambda x: convolve(x, KERNEL[:, :, :1], feature_group_count=4), IMAGE)
    line, volume = jnp.ones((2, 6, 4)), jnp.ones((2, 3, 3, 3, 4))
    for x, dims in (
        (line, ("NWC", "WIO", "NWC")),
        (volume, ("NDHWC", "DHWIO", "NDHWC")),
    ):
        kernel = jnp.ones((*(3,) * (x.ndim - 2), 4, 5))

        def conv(x, kernel=kernel, dims=dims):
            ones = (1,) * (x.ndim - 2)
            return lax.conv_general_dilated(x, kernel, ones, "SAME", dimension_numbers=dims)

        assert loops_well(conv, x)
        assert loops_well(jax.grad(lambda x: conv(x).sum()), x) == (not ON_CPU)


def test_without_convolutions_all_is_well():
    assert loops_well(jnp.dot, jax.ShapeDtypeStruct((3, 3), "float32"), jnp.eye(3))


def test_sizes_look_into_calls_and_loops():
    def outer(x):
        return jax.jit(lambda x: jnp.sum(jnp.outer(x, x)))(x)

    def loop(x):
        return lax.scan(lambda c, _: (jnp.sin(c), None), x, length=7)[0]

    x = jnp.ones(5)
    assert program.widest(jax.make_jaxpr(outer)(x)) == 25
    assert program.widest(jax.make_jaxpr(lambda x: x)(x)) == 0
    assert program.live(jax.make_jaxpr(loop)(x)) == 35
    assert program.live(jax.make_jaxpr(lambda x: x > 0)(x)) == 0
    assert program.live(jax.make_jaxpr(lambda x: x.at[0].add(1.0))(x)) >= 5


@pytest.mark.parametrize("count", [1, 9, 10, 25])
def test_a_scan_is_the_same_where_it_is_written_out(count):
    rows = jnp.arange(3.0 * count).reshape(count, 3)

    def step(total, row):
        return total + row, jnp.sum(convolve(IMAGE) * row[0])

    def slow(total, row):
        return total + row, jnp.sum(transposed(IMAGE) * row[0])

    for body, turns in ((step, 1), (slow, min(count, 10) if ON_CPU else 1)):
        (scanned,) = jax.make_jaxpr(lambda body=body: program.scan(body, rows[0], rows))().eqns[-1:]
        assert (scanned.primitive.name, scanned.params["unroll"]) == ("scan", turns)
    for found in (program.scan(step, rows[0], rows), program.scan(slow, rows[0], rows)):
        expected = jax.lax.scan(step, rows[0], rows)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
