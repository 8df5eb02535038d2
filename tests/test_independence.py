"""Models that mix samples are refused everywhere; models that do not are let in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import attacks, certify, models, nppr, smoothing, training
from wdjax.checks import batch_axis, independence
from wdjax.models import zoo
from wdjax.smoothing import noise

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.uniform(0.1, 0.9, (6, 4, 4, 2)), jnp.float32)
Y = jnp.zeros(6, jnp.int32)
W = jnp.asarray(RNG.normal(size=(32, 8)), jnp.float32)
V = jnp.asarray(RNG.normal(size=(8, 3)), jnp.float32)


def _net(hidden):
    """A perceptron whose hidden layer goes through a function."""

    def apply(params, x):
        return hidden(x.reshape(len(x), -1) @ params["w"]) @ params["v"]

    return wdjax.Model(apply, {"w": W, "v": V})


def _position(h):
    return h + 1e-2 * jnp.arange(len(h), dtype=h.dtype)[:, None]


def _dropout(h):
    return h * jax.random.bernoulli(jax.random.key(1), 0.5, h.shape)


def _until_all(h):
    """A fixed point that is iterated until the whole batch has come near it."""

    def step(z):
        return 0.9 * jnp.tanh(z) + h

    def going(pair):
        return jnp.max(jnp.abs(pair[0] - pair[1])) > 1e-2

    return jax.lax.while_loop(going, lambda pair: (step(pair[0]), pair[0]), (step(h), h))[0]


def _sorted_mean(h):
    return h - jnp.sort(h, axis=0)[len(h) // 2]


@jax.custom_jvp
def _centred(h):
    return h - h.mean(0)


_centred.defjvp(lambda primals, tangents: (_centred(*primals), tangents[0]))

MIXING = {
    "batch normalisation": lambda h: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5),
    "mean of the batch": lambda h: jax.nn.relu(h - h.mean(0)),
    "weakly": lambda h: h - 1e-4 * h.mean(0),
    "largest of the batch": lambda h: h / jnp.abs(h).max(),
    "neighbour": lambda h: h + 1e-3 * jnp.roll(h, 1, axis=0),
    "attention over samples": lambda h: jax.nn.softmax(h @ h.T) @ h,
    "first sample": lambda h: h - 1e-2 * h[:1],
    "median": _sorted_mean,
    "cumulated": lambda h: h + 1e-3 * jnp.cumsum(h, axis=0),
    "iterated until all have converged": _until_all,
    "place": _position,
    "dropout": _dropout,
    "hidden behind a barrier": lambda h: jax.lax.optimization_barrier(h - h.mean(0)),
    "in a loop": lambda h: jax.lax.fori_loop(0, 3, lambda _, z: z - 0.1 * z.mean(0), h),
    "in a branch": lambda h: jax.lax.cond(jnp.sum(W) < 1e9, lambda z: z - z.mean(0), jnp.sin, h),
    "in a branch that the batch chooses": lambda h: jax.lax.cond(
        jnp.sin(40 * h[0, 0]) > 0, jnp.sin, jnp.cos, h
    ),
    "in a custom derivative": _centred,
    "written into the first row": lambda h: h.at[0].set(1.0),
    "written into the next row": lambda h: h.at[1:].set(h[:-1]),
    "added by places": lambda h: h.at[jnp.arange(len(h)) // 2].add(h),
    "Fourier transform over samples": lambda h: h + jnp.fft.fft(h, axis=0).real,
    "mapped with a carry": lambda h: jax.lax.scan(lambda s, row: (s + row, s + row), h[0] * 0, h)[
        1
    ],
    "mapped beside places": lambda h: jax.lax.map(
        lambda pair: pair[0] * pair[1], (h, 1 + jnp.arange(len(h), dtype=h.dtype))
    ),
    "a window over a table of places": lambda h: (
        h + jax.lax.reduce_window(jnp.ones_like(h), 0.0, jax.lax.add, (3, 1), (1, 1), "SAME")
    ),
    "a reshaped table of places": lambda h: h + jnp.arange(h.size, dtype=h.dtype).reshape(h.shape),
    "a product of places": lambda h: (
        h + jnp.arange(len(h), dtype=h.dtype)[:, None] @ jnp.ones((1, 8))
    ),
    "rows of a table by places": lambda h: (
        h + jnp.eye(len(h), 8, dtype=h.dtype)[jnp.arange(len(h))]
    ),
    "padded by other samples": lambda h: jnp.pad(h, ((1, 0), (0, 0)), "edge")[:-1],
}
FREE = {
    "relu": jax.nn.relu,
    "layer normalisation": lambda h: (h - h.mean(1, keepdims=True)) / h.std(1, keepdims=True),
    "softmax": lambda h: jax.nn.softmax(h, axis=-1),
    "vmap": jax.vmap(lambda row: jnp.convolve(row, jnp.ones(3), mode="same")),
    "sorted entries": lambda h: jnp.sort(h, axis=1),
    "largest entries": lambda h: jnp.where(h >= jax.lax.top_k(h, 3)[0][:, -1:], h, 0),
    "entries chosen by each sample": lambda h: jnp.take_along_axis(h, jnp.argsort(h, axis=1), 1),
    "merged and split": lambda h: jnp.tanh(h.reshape(-1, 2)).reshape(len(h), 8),
    "channels": lambda h: jnp.stack(jnp.split(h, 4, axis=1), axis=1).sum(2).repeat(2, axis=1),
    "recurrence": lambda h: (
        jax.lax.scan(lambda s, column: (jnp.tanh(s + column), s), jnp.zeros(len(h)), h.T)[1].T
    ),
    "loop": lambda h: jax.lax.fori_loop(0, 3, lambda _, z: jnp.tanh(z), h),
    "rematerialised": jax.checkpoint(jnp.tanh),
    "padded": lambda h: jnp.pad(h, ((0, 0), (1, 1)))[:, 1:-1],
    "one by one": lambda h: jax.lax.map(lambda row: jnp.tanh(row @ row) * row, h),
    "written": lambda h: h.at[:, 0].set(1.0).at[:, 2].add(h[:, 1]).at[:, 3].multiply(h[:, 0]),
    "segments": jax.vmap(lambda row: jax.ops.segment_max(row, jnp.arange(8) // 2, 4).repeat(2)),
    "padded at the edge": lambda h: jnp.pad(h, ((0, 0), (1, 1)), "edge")[:, 2:],
    "padded by means": lambda h: jnp.pad(h, ((0, 0), (0, 1)), "mean")[:, 1:],
    "means of windows": lambda h: (
        jax.lax.reduce_window(h, 0.0, jax.lax.add, (1, 3), (1, 1), "SAME")
        / jax.lax.reduce_window(jnp.ones_like(h), 0.0, jax.lax.add, (1, 3), (1, 1), "SAME")
    ),
    "iterated from zeros": lambda h: jax.lax.fori_loop(
        0, 3, lambda _, z: jnp.tanh(z @ jnp.eye(8) + h), jnp.zeros_like(h)
    ),
    "a token for all": lambda h: jnp.concatenate([jnp.tile(h[:0].sum(0)[None], (len(h), 1)), h], 1)[
        :, 8:
    ],
    "Fourier transform": lambda h: jnp.fft.fft(h, axis=1).real,
    "a reduction of one's own": lambda h: h * jax.lax.reduce(h, 1.0, jax.lax.mul, (1,))[:, None],
    "interpolated": lambda h: jnp.interp(h, jnp.linspace(-1, 1, 5), jnp.arange(5.0)),
    "solved": lambda h: jax.vmap(
        lambda row: jnp.linalg.cholesky(jnp.outer(row, row) + jnp.eye(8))[0]
    )(h),
    "table": lambda h: jnp.linspace(0, 1, 8)[jnp.argmax(h, axis=1)][:, None] * h,
}
# No sample meets another, and yet the batch decides by its size.
SIZED = {
    "divided by the number of samples": lambda h: h / len(h),
    "another path alone": lambda h: -h if len(h) == 1 else h,
    "another path in large batches": lambda h: -h if len(h) > 30 else h,
    "columns by turns": lambda h: jnp.roll(h, len(h), axis=1),
    "another table alone": lambda h: h * (jnp.ones(8) if len(h) == 1 else jnp.arange(8.0)),
    "another large table alone": lambda h: (
        h + (jnp.ones((2**19, 8)) if len(h) == 1 else jnp.zeros((2**19, 8)))[0]
    ),
    "as often as there are samples": lambda h: jax.lax.fori_loop(
        0, len(h), lambda _, z: jnp.tanh(z), h
    ),
    "a branch's literal": lambda h: jax.lax.cond(
        jnp.sum(W) < 1e9, lambda z: z * len(h), jnp.sin, h
    ),
}
# JAX, or an older one, writes the number of rows into indices and edges: these are tried.
NUMBERED = {
    "entries chosen by each sample", "padded by means", "padded at the edge", "interpolated"
}  # fmt: skip
# No rule follows these, and yet samples do not meet: they are tried.
UNPROVED = {
    "reversed twice": lambda h: h[::-1][::-1],
    "one by one in turns": lambda h: jax.lax.scan(lambda _, row: (0.0, jnp.tanh(row)), 0.0, h)[1],
}


@pytest.mark.fast
@pytest.mark.parametrize("name", MIXING)
def test_samples_that_meet_are_refused(name):
    with pytest.raises(ValueError, match=r"depends on the rest of its batch"):
        independence.check(_net(MIXING[name]), X)


@pytest.mark.fast
@pytest.mark.parametrize("name", MIXING)
def test_a_single_sample_shows_it_too(name):
    with pytest.raises(ValueError, match=r"depends on the rest of its batch"):
        independence.check(_net(MIXING[name]), X[:1])


@pytest.mark.fast
@pytest.mark.parametrize("name", SIZED)
def test_models_that_go_by_the_size_of_the_batch_are_refused(name):
    model = _net(SIZED[name])
    assert independence.proof(model, X.shape[1:], X.dtype).alike
    with pytest.raises(ValueError, match=r"batch.*although no samples meet.*len\(x\)"):
        independence.check(model, jnp.resize(X, (37, *X.shape[1:])))


@pytest.mark.parametrize("family", ["preact_resnet", "swin", "vit"])
def test_published_nets_are_proved_and_not_tried(family, monkeypatch):
    """Whatever form of convolutions they take at a size, and whatever tables they make."""
    options = {"preact_resnet": {"blocks": (1, 1, 1, 1)}}
    entry = next(entry for entry in zoo.entries() if entry.family == family)
    model = models.functional(zoo.build(family, entry.options | options.get(family, {})))
    monkeypatch.setattr(independence, "_try", lambda *_: pytest.fail("the model was tried"))
    x = np.full((2, entry.input, entry.input, 3), 0.5, np.float32)
    independence.check(model, x)


@pytest.mark.fast
def test_models_that_take_no_sample_alone_pass():
    """As models ported from PyTorch that squeeze their logits: a call for one sample fails."""

    def apply(params, x):
        h = jnp.squeeze(x.reshape(len(x), -1) @ params["w"])
        return h[:, None] * params["v"]

    independence.check(wdjax.Model(apply, {"w": W[:, :1], "v": V[:1]}), X)


@pytest.mark.fast
@pytest.mark.parametrize("name", FREE)
def test_samples_that_do_not_meet_are_proved_to(name):
    model = _net(FREE[name])
    assert independence.proof(model, X.shape[1:], X.dtype) == batch_axis.BatchProof(True, True)
    one = independence._has_one_program(model, X.shape[1:], X.dtype, {4, 16})
    assert one or name in NUMBERED


@pytest.mark.fast
@pytest.mark.parametrize("name", [*FREE, *UNPROVED])
def test_samples_that_do_not_meet_pass(name):
    model = _net({**FREE, **UNPROVED}[name])
    independence.check(model, X)
    # The trial finds nothing either, whatever the proof says.
    independence._try(model, np.asarray(X), batch_axis.BatchProof(False, False))


@pytest.mark.fast
def test_dead_classes_do_not_hide_company():
    for dead in (-1e4, -1e9):

        def apply(params, x, dead=dead):
            h = x.reshape(len(x), -1) @ params
            return jnp.concatenate([h - 1e-3 * h.mean(0), jnp.full((len(x), 40), dead)], axis=1)

        with pytest.raises(ValueError, match="in other company"):
            independence.check(wdjax.Model(apply, W), X)


@pytest.mark.fast
def test_convolutions_and_windows_are_proved():
    def apply(kernel, x):
        dims = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)
        h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.einsum("nhwc,hwk->nk", h, jnp.ones((2, 2, 3)))

    model = wdjax.Model(apply, jnp.ones((3, 3, 2, 4)))
    assert independence.proof(model, X.shape[1:], X.dtype).alike

    def across(kernel, x):  # A window over samples.
        h = jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1, 1, 1), (1, 1, 1, 1), "SAME")
        return apply(kernel, h)

    with pytest.raises(ValueError, match="in other company"):
        independence.check(wdjax.Model(across, jnp.ones((3, 3, 2, 4))), X)


def _dependence(model, n):
    """Which samples each output depends on, by the derivative at random points."""
    x = jnp.asarray(RNG.normal(size=(n, *X.shape[1:])), jnp.float32)
    jacobian = jax.jacobian(model)(x)
    return np.abs(np.asarray(jacobian)).sum(axis=(1, 3, 4, 5)) > 0


@pytest.mark.fast
@pytest.mark.parametrize("name", [*FREE, *MIXING])
def test_what_is_proved_has_a_diagonal_jacobian(name):
    if name == "iterated until all have converged":
        pytest.skip("JAX has no reverse mode for loops of unknown length")
    model = _net({**FREE, **MIXING}[name])
    if independence.proof(model, X.shape[1:], X.dtype).alone:
        assert not np.any(_dependence(model, 5) & ~np.eye(5, dtype=bool))


@pytest.mark.fast
def test_inside_a_trace_nothing_looks_robust():
    model = _net(MIXING["mean of the batch"])

    @jax.jit
    def search(x):
        return wdjax.search(attacks.PGD(steps=2), model, x, Y, eps=0.1)

    found = search(X)
    assert bool(jnp.all(jnp.isnan(found.margin)))
    assert not bool(jnp.any(found.correct))
    free = _net(UNPROVED["one by one in turns"])
    traced = jax.jit(lambda x: wdjax.search(attacks.PGD(steps=2), free, x, Y, eps=0.1))(X)
    assert bool(jnp.all(jnp.isfinite(traced.margin)))


LOW, HIGH = jnp.zeros(X.shape[1:]), jnp.ones(X.shape[1:])
HOW = {"norm": jnp.inf}
FAMILY = nppr.Family(mode="independent", components=2, upsample="none")
PUBLIC = {
    "search": lambda m: wdjax.search(attacks.PGD(steps=2), m, X, Y, eps=0.1),
    "run": lambda m: wdjax.run(attacks.WDA(steps=4, probe=2), m, X, Y, eps=0.1),
    "margin_bounds": lambda m: certify.margin_bounds(m, X, Y, eps=0.1, **HOW),
    "certified": lambda m: certify.certified(m, X, Y, eps=0.1, **HOW),
    "radius": lambda m: certify.radius(m, X, Y, **HOW),
    "verify": lambda m: certify.verify(m, X, Y, eps=0.1, **HOW),
    "wdro_bound": lambda m: certify.wdro_bound(m, X, Y, eps=0.1, order=1, **HOW),
    "growth_bound": lambda m: certify.growth_bound(m, X, Y, eps=0.1, order=1, **HOW),
    "smoothing": lambda m: smoothing.certify(m, X, Y, noise=noise.Gaussian(0.2), key=KEY, n=10),
    "tally": lambda m: smoothing.tally(m, X, noise=noise.Gaussian(0.2), key=KEY, n=10),
    "estimate": lambda m: nppr.estimate(
        m, nppr.distributions.UniformBall(0.1), X, Y, key=KEY, draws=10
    ),
    "probabilistic_accuracy": lambda m: nppr.probabilistic_accuracy(
        m, nppr.distributions.UniformBall(0.1), X, Y, key=KEY
    ),
    "importance": lambda m: nppr.importance(
        m, nppr.distributions.UniformBall(0.1), X[0], Y[0], key=KEY
    ),
    "splitting": lambda m: nppr.splitting(
        m, nppr.distributions.UniformBall(0.1), X[0], Y[0], key=KEY
    ),
    "fit": lambda m: nppr.fit(m, X, Y, eps=0.1, key=KEY, family=FAMILY),
    "nppr.train_model": lambda m: nppr.train_model(m, X, Y, eps=0.1, key=KEY, family=FAMILY),
    "train": lambda m: training.train(m, X, Y, key=KEY, epochs=1),
    "certified training": lambda m: training.train(
        m, X, Y, key=KEY, epochs=1, certificate=certify.CertifiedTraining(), eps=0.1
    ),
    "lipschitz.verify": lambda m: wdjax.lipschitz.verify(m, X, Y, eps=0.1, **HOW),
    "local_lipschitz": lambda m: wdjax.lipschitz.local_lipschitz(m, X, Y, eps=0.1, **HOW),
    "margin_lipschitz": lambda m: certify.margin_lipschitz(m, LOW, HIGH, norm=2),
    "interval_jacobian": lambda m: certify.interval_jacobian(m, LOW, HIGH, norm=2),
    "layer_product": lambda m: certify.layer_product(m, LOW, HIGH, norm=2),
    "lipschitz_constant": lambda m: certify.lipschitz_constant(m, X, Y, norm=2),
    "global_radius": lambda m: wdjax.lipschitz.global_radius(m, X, Y, norm=2),
    "global_lipschitz": lambda m: wdjax.lipschitz.global_lipschitz(m, X, norm=2),
    "jacobian_norm": lambda m: wdjax.lipschitz.jacobian_norm(m, X),
    "as_chain": lambda m: wdjax.lipschitz.as_chain(m, X),
    "sampled_lipschitz": lambda m: wdjax.lipschitz.sampled_lipschitz(
        m, X, Y, eps=0.1, key=KEY, **HOW
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("kind", ["mean of the batch", "place", "divided by the number of samples"])
def test_every_front_door_refuses_them(name, kind):
    with pytest.raises(ValueError, match="depends on the rest of its batch"):
        PUBLIC[name](_net({**MIXING, **SIZED}[kind]))


@pytest.mark.parametrize("kind", ["mean of the batch", "place", "another path alone"])
def test_inside_a_trace_nothing_is_certified(kind):
    model = _net({**MIXING, **SIZED}[kind])
    right = jnp.argmax(model(X), axis=-1)
    how = {"norm": jnp.inf, "method": "interval"}
    low = jax.jit(lambda x: certify.margin_bounds(model, x, right, eps=0.0, **how))(X)
    assert not bool(jnp.any(low.min(axis=1) > 0))
    assert float(jnp.max(jax.jit(lambda x: certify.radius(model, x, right, **how))(X))) == 0.0
    own = {"norm": jnp.inf, "eps": 0.0}
    low = jax.jit(lambda x: certify.trainable_bounds(model, x, right, **own))(X)
    assert not bool(jnp.any(low.min(axis=1) > 0))
    steep = jax.jit(lambda x: wdjax.lipschitz.trainable_lipschitz(model, x, right, **own))(X)
    assert not bool(jnp.any(jnp.isfinite(steep).all(axis=1)))
    steep = jax.jit(lambda low: certify.margin_lipschitz(model, low, low + 1, norm=2))(LOW)
    assert not bool(jnp.any(jnp.isfinite(steep).all(axis=1)))


def test_a_model_of_whole_groups_of_samples_is_searched_as_the_same_model_of_any_number():
    """It cannot be tried on a single sample, and need not be."""
    w = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).uniform(0.3, 0.7, (16, 8)), jnp.float32)
    grouped = wdjax.Model(lambda w, x: (x.reshape(-1, 8, 8) @ w).reshape(-1, 3), w)
    free = wdjax.Model(lambda w, x: x @ w, w)
    y = jnp.argmax(free(x), axis=1)
    one, other = (wdjax.search(attacks.FMN(), model, x, y) for model in (grouped, free))
    np.testing.assert_allclose(one.cost, other.cost, rtol=1e-4)
