"""Odd programs: sound bounds, or a ValueError that names what is in the way; never a bare error."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from wdjax import Model, certify, lipschitz
from wdjax.certify import asymptote
from wdjax.lipschitz import chain

RNG = np.random.default_rng(0)
OUT = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)
X = jnp.asarray(RNG.uniform(0.1, 0.9, (2, 4)), jnp.float32)
LOWER, UPPER = jnp.zeros(4), jnp.ones(4)
HOW = {"norm": math.inf, "eps": 0.03}


@jax.custom_vjp
def own_gradient(x):
    return jnp.tanh(x)


own_gradient.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (3 * g,))


def in_shards(x):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=auto)
    one = jax.sharding.PartitionSpec()
    return jax.shard_map(jnp.tanh, mesh=mesh, in_specs=one, out_specs=one)(x)


def called_back(x):
    return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def noisy(x):
    return x + 0.1 * jax.random.normal(jax.random.key(0), (4,))


def noisy_steps(x):
    keys = jax.random.split(jax.random.key(0), 3)
    return lax.scan(lambda c, k: (c + jax.random.uniform(k, (4,)), None), x, keys)[0]


BOUNDED = {
    "running products": lambda x: lax.associative_scan(jnp.multiply, x, axis=1),
    "running sums": lambda x: lax.associative_scan(jnp.add, x, axis=1, reverse=True),
    "running maxima": lambda x: lax.associative_scan(jnp.maximum, x, axis=1),
    "a constant key": noisy,
    "keys of a scan": noisy_steps,
    "an old key": lambda x: x + 0.1 * jax.random.normal(jax.random.PRNGKey(0), (4,)),
    "a random mask": lambda x: jnp.where(
        jax.random.bernoulli(jax.random.key(1), 0.5, (4,)), x, 0.0
    ),
    "empty arrays": lambda x: jnp.concatenate(
        [jax.nn.relu(2 * x[:, :0]), x * jnp.prod(x[:, :0], axis=1, keepdims=True)], axis=1
    ),
    "a scan of no steps": lambda x: (
        x + lax.scan(lambda c, _: (2 * c, c), x, None, length=0)[1].sum(axis=0)
    ),
    "logits that are known": jnp.ones_like,
    "a gradient of its own": own_gradient,
    "top_k": lambda x: jnp.tile(lax.top_k(x, 2)[0], 2),
    "scatter": lambda x: x.at[:, 0].set(1.0),
    "erf_inv": lambda x: jax.scipy.special.erfinv(0.5 * x),
    "a branch that constants choose": lambda x: lax.cond(OUT[0, 0] > 0, jnp.sin, jnp.cos, x),
    "branches that samples choose": jax.vmap(
        lambda row: lax.cond(row[0] > 0.5, jnp.sin, lambda t: 2 * t, row)
    ),
    "factors": lambda x: x.at[:, 0].multiply(x[:, 1]).at[:, 1].multiply(2.0),
    "maxima by places": lambda x: x.at[:, jnp.array([1, 1])].max(x[:, 2:]),
    "lgamma": jax.scipy.special.gammaln,
    "an angle": lambda x: jnp.arctan2(x, x + 0.3),
    "a remainder": lambda x: jnp.mod(x, 0.3),
    "powers of two inputs": lambda x: (1 + x) ** x[:, ::-1],
    "argmax": lambda x: x + jnp.argmax(x, axis=1, keepdims=True),
    "places of top_k": lambda x: jnp.take_along_axis(x, lax.top_k(x, 4)[1], axis=1),
    "companions of a sort": lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), 1),
    "integers": lambda x: x[:, (3 * x[0]).astype(jnp.int32)],
    "a checkpoint": jax.checkpoint(lambda x: jnp.tanh(2 * x)),
}
REFUSED = {
    "while": lambda x: lax.while_loop(lambda c: jnp.max(c) > 0.1, lambda c: 0.5 * c, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0.5, jnp.sin, jnp.cos, x),
    "bessel_i0e": jax.scipy.special.i0e,
    "scatter-max": lambda x: x.at[jnp.arange(len(x)), (3 * x[:, 0]).astype(int)].max(0.0),
    "pure_callback": called_back,
    "shard_map": in_shards,
    "complex64": lambda x: (x + 1j * x).real,
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int32), jnp.float32
    ),
}


def public(model, y):
    """Every certificate's program, traced: what walks over programs runs then."""
    traced = [
        (method, lambda m, x, method=method: certify.margin_bounds(m, x, y, method=method, **HOW))
        for method in ("interval", "crown", "alpha")
    ]
    traced += [
        ("radius", lambda m, x: certify.radius(m, x, y, norm=2, steps=1)),
        ("trainable", lambda m, x: certify.trainable_bounds(m, x, y, backward=1.0, **HOW)),
        ("chain", lambda m, x: chain._made(m, x[:1]).weights),
        ("slopes", lambda m, x: lipschitz.trainable_lipschitz(m, x, y, **HOW)),
        ("infinity", lambda m, x: asymptote.slopes(m, x, y, jnp.float32(1), 2, "crown")),
        ("layers", lambda m, x: certify.layer_product(m, LOWER, UPPER, norm=2)),
        ("jacobian", lambda m, x: certify.interval_jacobian(m, LOWER, UPPER, norm=2)),
        ("bound", lambda m, x: certify.bound(lambda t: m(t[None])[0], LOWER, UPPER)),
    ]
    for name, certificate in traced:
        yield name, lambda c=certificate: jax.eval_shape(c, model, X)


@pytest.mark.parametrize("name", [*BOUNDED, *REFUSED])
def test_programs_are_bounded_or_refused_by_name(name):
    hidden = (BOUNDED | REFUSED)[name]
    model = Model(lambda out, x: hidden(x) @ out, OUT)
    y = jnp.argmax(model(X), axis=-1)
    for certificate, trace in public(model, y):
        said = refusal(trace)
        if name in BOUNDED:  # Chains and constants are of fewer programs.
            assert not said or certificate in ("chain", "slopes", "layers", "jacobian"), said
        elif certificate in ("crown", "interval", "bound"):
            assert name.split(" of ")[0] in said, certificate


def refusal(trace):
    """The words of a ValueError; every other error is one of this test."""
    try:
        trace()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["running products", "a constant key", "empty arrays"])
def test_their_bounds_hold(name):
    model = Model(lambda out, x: BOUNDED[name](x) @ out, OUT)
    y = jnp.argmax(model(X), axis=-1)
    low = np.asarray(certify.margin_bounds(model, X, y, **HOW))
    moves = RNG.uniform(-0.03, 0.03, (200, *X.shape)).astype(np.float32)
    logits = np.asarray(jax.vmap(model)(jnp.clip(X + moves, 0, 1)))
    own = np.take_along_axis(logits, np.asarray(y)[None, :, None], axis=2)
    margin, rivals = (own - logits).min(axis=0), np.arange(3) != np.asarray(y)[:, None]
    assert np.all((low <= margin)[rivals])
    assert np.all((low > margin - 0.5)[rivals])


# Branch and bound says how it ended.


def smooth(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w) @ w


def kinked(larger, _, x):
    return jnp.concatenate([larger(x, 1.02 - x) - 0.4, 0 * x], axis=1)


def test_branch_and_bound_says_where_it_had_nothing_to_split():
    model = Model(smooth, jnp.array([[3.0, -2.0], [-1.0, 2.0]]))
    x = jnp.array([[0.45, 0.5], [0.9, 0.1]])
    y = jnp.argmax(model(x), axis=-1)
    how = {"norm": math.inf, "eps": 0.05, "method": "bab", "seconds": 5.0}
    found = certify.verify(model, x, y, steps=0, **how)
    assert "nothing to split" in found.ended or found.verified.all()
    x, y, wide = jnp.array([[0.5]]), jnp.array([0]), {**how, "eps": 0.5}
    for larger in (jnp.maximum, lambda *both: jnp.stack(both).max(axis=0)):
        found = certify.verify(
            Model(functools.partial(kinked, larger), None), x, y, steps=0, **wide
        )
        assert found.ended == ("closed",), "the true least margin is .11"
    running = functools.partial(kinked, lambda *both: lax.cummax(jnp.stack(both))[1])
    shifted = Model(running, None)
    found = certify.verify(shifted, x, y, steps=0, **wide)
    assert found.ended == ("nothing to split",), "running maxima have no lines"
    with pytest.warns(UserWarning, match="nothing left to split in 1 of 1 samples"):
        certify.margin_bounds(shifted, x, y, **wide)
    with pytest.warns(UserWarning, match="nothing left to split"):
        certify.certified(shifted, x, y, **wide)
    assert certify.verify(shifted, x, y, norm=math.inf, eps=0.5, steps=0).ended == ()


# What has no gradient, or no trace, names what has.

NET = jnp.array([[1.0, -1.0], [0.3, 2.0]])


def steep(certificate):
    x, y = jnp.array([[0.4, 0.6]]), jnp.array([1])
    return lambda w: jnp.sum(certificate(Model(lambda w, x: jax.nn.relu(x @ w) @ NET, w), x, y))


GRADIENTS = {
    "auto": lambda m, x, y: certify.margin_bounds(m, x, y, method="auto", **HOW)[0, 0],
    "alpha": lambda m, x, y: certify.margin_bounds(m, x, y, method="alpha", **HOW)[0, 0],
}
ON_HOST = {
    "verify": lambda m, x, y: certify.verify(m, x, y, **HOW).margin,
    "wdro": lambda m, x, y: certify.wdro_bound(m, x, y, order=1, **HOW),
    "growth": lambda m, x, y: certify.growth_bound(m, x, y, order=1, **HOW),
    "constant": lambda m, x, y: certify.lipschitz_constant(m, x, y, norm=2),
    "norm": lambda m, x, y: lipschitz.jacobian_norm(m, x),
    "local": lambda m, x, y: lipschitz.local_lipschitz(m, x, y, **HOW),
    "global": lambda m, x, y: lipschitz.global_lipschitz(m, x, norm=2),
    "chain": lambda m, x, y: lipschitz.as_chain(m, x).weights[0],
}


@pytest.mark.fast
def test_default_certificates_have_gradients_under_every_transformation():
    fn = steep(lambda m, x, y: certify.radius(m, x, y, norm=2, steps=1))
    for way in (lambda w: jax.vmap(jax.jit(jax.grad(fn)))(w[None]), jax.jacfwd(fn)):
        assert jax.eval_shape(way, NET).size == NET.size


@pytest.mark.fast
@pytest.mark.parametrize("name", GRADIENTS)
def test_bounds_without_a_gradient_name_those_with_one(name):
    fn = steep(GRADIENTS[name])
    ways = [
        jax.grad(fn),
        jax.grad(jax.jit(fn)),
        lambda w: jax.grad(lambda w: jnp.sum(jax.vmap(fn)(w)))(w[None]),
    ]
    for way in ways:
        with pytest.raises(ValueError, match=r"take method=\"crown\""):
            jax.eval_shape(way, NET)
    jax.eval_shape(jax.jacfwd(fn), NET)


@pytest.mark.parametrize("name", ON_HOST)
def test_what_works_on_the_host_names_what_can_be_traced(name):
    fn = steep(ON_HOST[name])
    for way in (jax.grad(fn), jax.jit(fn), lambda w: jax.jit(lambda: fn(np.asarray(NET)))()):
        with pytest.raises(ValueError, match=r"works on the host.*or take \w+\.\w+"):
            way(NET)
