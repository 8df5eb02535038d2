"""NPPR: mixtures against SciPy, maps against closed forms, families, fits."""

import dataclasses
import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import Lp, Model, attacks, losses, models, nppr
from wdjax.nppr import distributions
from wdjax.nppr import family as families
from wdjax.nppr import mixture as mixtures
from wdjax.nppr import upsample as up
from wdjax.nppr.family import Family
from wdjax.nppr.fit_schedule import Schedule

SHORT = Schedule(steps=30, batch=8, draws=8)


def mixed(seed=0, n=2, count=3, size=4, diagonal=False):
    keys = jax.random.split(jax.random.key(seed), 3)
    mean = 2 * jax.random.normal(keys[1], (n, count, size))
    if diagonal:
        factor = 0.3 + jax.random.uniform(keys[2], (n, count, size))
    else:
        packed = jax.random.normal(keys[2], (n, count, mixtures.packed_size(size)))
        factor = mixtures.triangular(packed, size)
        factor = jnp.where(jnp.eye(size, dtype=bool), 0.3 + jnp.abs(factor), 0.4 * factor)
    return nppr.Mixture(jax.random.normal(keys[0], (n, count)), mean, factor)


@pytest.mark.parametrize("size", [1, 5])
def test_triangular_matrices_hold_every_number_once(size):
    packed = jnp.arange(1.0, mixtures.packed_size(size) + 1)
    whole = mixtures.triangular(packed, size)
    assert np.all(np.triu(whole, 1) == 0)
    np.testing.assert_array_equal(whole[np.tril_indices(size)], packed)
    weight = jax.random.normal(jax.random.key(0), whole.shape)
    slope = jax.grad(lambda packed: jnp.sum(mixtures.triangular(packed, size) * weight))(packed)
    np.testing.assert_array_equal(slope, weight[np.tril_indices(size)])


@pytest.mark.parametrize("diagonal", [True, False])
def test_log_density_is_that_of_scipy(diagonal):
    from scipy import special, stats

    own = mixed(diagonal=diagonal)
    points = 2 * jax.random.normal(jax.random.key(5), (2, 6, 4))
    found = nppr.log_density(own, points)
    for i in range(2):
        logs = []
        for k in range(3):
            factor = np.asarray(own.factor[i, k], float)
            factor = np.diag(factor) if diagonal else factor
            normal = stats.multivariate_normal(np.asarray(own.mean[i, k]), factor @ factor.T)
            logs.append(np.log(float(own.proportions[i, k])) + normal.logpdf(points[i]))
        np.testing.assert_allclose(found[i], special.logsumexp(logs, axis=0), rtol=2e-4)


def two_samples(first, second):
    """The least p-value of tests of directions: distributions that differ do so in some."""
    from scipy import stats

    directions = np.random.default_rng(0).normal(size=(6, first.shape[1]))
    values = [stats.ks_2samp(first @ one, second @ one).pvalue for one in directions]
    return min(values) * len(values)


@pytest.mark.parametrize("diagonal", [True, False])
def test_soft_samples_become_those_of_the_mixture(diagonal):
    own, count = mixed(n=1, diagonal=diagonal), 20_000
    soft = {
        tau: np.asarray(mixtures.soft(jax.random.key(1), own, 1, count, tau)[0])
        for tau in (1e-3, 1.0)
    }
    hard = np.asarray(mixtures.hard(jax.random.key(2), own, 1, count)[0])
    # SciPy's own draws of the mixture are the oracle of both.
    random = np.random.default_rng(0)
    share = np.asarray(own.proportions[0], float)
    which = random.choice(3, count, p=share / share.sum())
    xi = random.normal(size=(count, 4))
    factor = np.asarray(own.factor[0])
    factor = np.stack([np.diag(row) for row in factor]) if diagonal else factor
    drawn = np.asarray(own.mean[0])[which] + np.einsum("mij,mj->mi", factor[which], xi)
    assert two_samples(hard, drawn) > 1e-3
    assert two_samples(soft[1e-3], drawn) > 1e-3
    assert two_samples(soft[1.0], drawn) < 1e-6  # The test can fail.


def test_shared_mixtures_are_the_same_for_every_input():
    shared = mixed(n=1)
    own = jax.tree.map(lambda leaf: jnp.repeat(leaf, 3, axis=0), shared)
    for draw in (functools.partial(mixtures.soft, tau=0.5), mixtures.hard):
        one = draw(jax.random.key(0), shared, 3, 5)
        each = draw(jax.random.key(0), own, 3, 5)
        assert one.shape == (3, 5, 4)
        np.testing.assert_allclose(one, each, atol=1e-5)


def test_gradients_of_soft_samples_match_finite_differences():
    own, key = mixed(n=1), jax.random.key(3)
    weight = jax.random.normal(jax.random.key(4), (50, 4))

    def value(own):
        return jnp.sum(jnp.tanh(mixtures.soft(key, own, 1, 50, 0.7)[0]) * weight)

    gradient = jax.grad(value)(own)
    leaves, tree = jax.tree.flatten(own)
    for place, slope in enumerate(jax.tree.leaves(gradient)):
        push = np.random.default_rng(place).normal(size=slope.shape)
        push = np.tril(push) if push.ndim == 4 else push

        def at(size, place=place, push=push):
            moved = [*leaves]
            moved[place] = leaves[place] + size * push
            return float(value(tree.unflatten(moved)))

        difference = (at(1e-2) - at(-1e-2)) / 2e-2
        assert difference == pytest.approx(float(jnp.sum(slope * push)), rel=0.02, abs=0.02)


def test_entropy_ratios():
    assert nppr.entropy_ratio(jnp.full(7, 1 / 7)) == pytest.approx(1.0)
    assert nppr.entropy_ratio(jnp.array([1.0, 0.0, 0.0])) == 0.0
    assert nppr.entropy_ratio(jnp.ones(1)) == 1.0


def test_interpolation_is_that_of_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch has Keys's kernel, a = -1/2, as an oracle")
    small = np.random.default_rng(0).normal(size=(3, 14, 14, 2)).astype(np.float32)
    ours = up.interpolated(jnp.asarray(small).reshape(3, -1), (14, 14, 2), (28, 28, 2))
    theirs = torch.nn.functional.interpolate(
        torch.tensor(small).permute(0, 3, 1, 2), (28, 28), mode="bicubic", antialias=True
    )
    np.testing.assert_allclose(ours.reshape(3, 28, 28, 2), theirs.permute(0, 2, 3, 1), atol=2e-5)


@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_the_maps_reach_every_length_and_no_farther(norm):
    ball, eps = Lp(norm), 0.3
    v = jax.random.normal(jax.random.key(0), (5, 40))
    unit = up.into_ball(v * jnp.array([0.0, 1e-6, 1e-2, 1.0, 1e4])[:, None], eps, norm)
    length = np.linalg.norm(np.asarray(unit, float), norm, axis=1)
    assert length[0] == 0 < length[1] < 1e-4
    assert np.all(np.diff(length) > 0)
    assert length[-1] == pytest.approx(eps, rel=1e-5)
    slopes = jax.jacobian(lambda v: up.into_ball(v, eps, norm))(jnp.zeros(40))
    assert np.all(np.isfinite(slopes))
    assert np.linalg.matrix_rank(slopes) == 40
    x = jnp.full((1, 40), 0.5).at[0, :20].set(0.01)
    points = up.placed(x, jnp.stack([unit, -unit], 1).reshape(1, 10, 40), eps, ball)
    assert ball.cost(jnp.repeat(x, 10, 0), points[0]).max() <= jnp.float32(eps)


def linear(classes=3, size=4):
    w = jax.random.normal(jax.random.key(9), (size * size, classes))
    return Model(apply_linear, w)


def apply_linear(w, x):
    return x.reshape(len(x), -1) @ w


def samples(model, n=12, size=4):
    x = jax.random.uniform(jax.random.key(1), (n, size, size, 1))
    return x, jnp.argmax(model(x), axis=-1)


NET = models.mlp((16, 8, 3), key=jax.random.key(2))


COMBINED = [(mode, up.UPSAMPLE[place % 3]) for place, mode in enumerate(nppr.MODES)]


@pytest.mark.parametrize(("mode", "upsample"), COMBINED)
def test_every_mode_and_map_under_one_api(mode, upsample):
    x, y = samples(NET)
    components = {"none": 3, "fixed": 7, "learnable": 12}[upsample]
    ball = {"none": Lp(1), "fixed": Lp(2), "learnable": Lp()}[upsample]
    eps = {"none": 2.0, "fixed": 0.8, "learnable": 0.2}[upsample]
    family = Family(
        mode=mode,
        upsample=upsample,
        components=components,
        latent=6,
        side=3,
        hidden=8,
        embedding=4,
        covariance="diagonal" if mode == "label" else "full",
    )
    schedule = Schedule(steps=2, batch=4, draws=4)
    found = nppr.fit(
        NET, x, y, eps=eps, key=jax.random.key(0), family=family, schedule=schedule, ball=ball
    )
    moved = nppr.points(found, jax.random.key(1), x, y, 4)
    assert moved.shape == (12, 4, 4, 4, 1)
    cost = ball.cost(jnp.repeat(x, 4, axis=0), moved.reshape(-1, 4, 4, 1))
    assert 0 < float(cost.min()) <= float(cost.max()) <= jnp.float32(eps)
    # One by one as in a batch: running averages, and keys of one's own.
    own = found.mixture(x, y)
    alone = found.mixture(x[3:4], y[3:4])
    index = 3 if family.sees_input or family.sees_label else 0
    for name in ("logits", "mean", "factor"):
        whole, one = getattr(own, name), getattr(alone, name)
        np.testing.assert_allclose(whole[min(index, len(whole) - 1)], one[0], atol=1e-5)
    assert found.learnt
    kept = found.params.get("map")
    if kept is not None:
        own_key = jax.random.split(jax.random.key(0))[0]
        first, _ = families.first_params(family, own_key, (4, 4, 1), 8, 3)
        assert np.allclose(kept, first["map"], atol=1e-6) == (upsample == "fixed")


@pytest.mark.parametrize("mode", ["independent", "label", "joint-full"])
def test_labels_without_a_sample_in_the_fit_are_told(mode):
    """What depends on such a label stays random: NPPR was .2 where with all labels it is 0."""
    w = np.random.default_rng(0).normal(size=(16, 3))
    net = Model(apply_linear, jnp.asarray(w - w.mean(axis=0), jnp.float32))
    x = jax.random.uniform(jax.random.key(3), (40, 4, 4, 1))
    y = np.asarray(jnp.argmax(net(x), axis=-1))
    family = Family(mode=mode, components=2, latent=4, side=4)
    how = {"eps": 0.1, "key": jax.random.key(0), "family": family, "schedule": Schedule(steps=2)}
    how["features"] = net
    rest = y != 2
    assert 0 < np.sum(rest) < len(y)
    found, whole = nppr.fit(net, x[rest], y[rest], **how), nppr.fit(net, x, y, **how)
    assert whole.unfitted(y) is None
    assert np.array_equal(whole.labels, np.bincount(y, minlength=3))
    ask = {"key": jax.random.key(1), "draws": 20}
    for measure in (nppr.estimate, nppr.probabilistic_accuracy):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            measure(net, found, x, y, **ask)
            measure(net, found, x[rest], y[rest], **ask)
        told = [str(one.message) for one in said if "of the fit had" in str(one.message)]
        expected = f"{int(np.sum(~rest))} of 40 samples have labels"
        assert [text.startswith(expected) for text in told] == [True] * (mode != "independent")


def test_a_fit_finds_what_noise_does_not():
    model = Model(apply_linear, jnp.array([[1.0, -1.0], [-1.0, 1.0]]).repeat(8, axis=0))
    x = jnp.full((20, 4, 4, 1), 0.5).at[:, :2].add(0.08)
    y = jnp.zeros(20, jnp.int32)
    family = Family(mode="independent", components=2, latent=4, side=4)
    found = nppr.fit(model, x, y, eps=0.1, key=jax.random.key(0), family=family,
                     schedule=Schedule(steps=60, batch=8, draws=8))  # fmt: skip
    how = {"key": jax.random.key(1), "draws": 200}
    learnt = nppr.estimate(model, found, x, y, **how).value
    drawn = nppr.estimate(model, distributions.UniformBall(0.1), x, y, **how).value
    assert learnt < 0.5 < 0.95 < drawn
    assert found.learnt
    stuck = dataclasses.replace(found, history=jax.tree.map(jnp.zeros_like, found.history))
    assert not stuck.learnt  # Nothing came back from the model.
    figures = [
        nppr.pictures.training({"independent": found}),
        nppr.pictures.projected(found, x, y, key=how["key"], draws=4),
        nppr.pictures.projected(found, x[:6], y[:6], key=how["key"], method="tsne", draws=2),
        nppr.pictures.heatmap(found, x, y, key=how["key"]),
        nppr.pictures.mixture(found, x[0], y[0]),
    ]
    assert [len(figure.axes) for figure in figures] == [2, 1, 1, 2, 4]
    assert len(figures[0].axes[0].lines) == 1
    with pytest.raises(ValueError, match="method"):
        nppr.pictures.projected(found, x, y, key=how["key"], method="umap")
    assert float(found.history.survived[-5:].mean()) < 0.3
    assert np.all(np.isfinite(np.asarray(found.history)))


def two_groups(scale, x):
    """Where the first number is small, the second flips the class; else it moves the margin."""
    first, second = x[:, 0], x[:, 1] - 0.5
    margin = scale * jnp.where(first < 0.5, 0.5 - 10 * second, 16 + 60 * second)
    return jnp.stack([margin, jnp.zeros_like(margin)], axis=1)


def test_the_sigmoid_counts_copies_and_the_softplus_margins():
    x, y = jnp.array([[0.2, 0.5], [0.8, 0.5]]), jnp.array([0, 0])
    family = Family(mode="independent", components=2, upsample="none")
    how = {"eps": 0.1, "key": jax.random.key(0), "family": family}
    survived = {}
    for loss, scale in (("sigmoid", 1.0), ("sigmoid", 1024.0), ("softplus", 1.0)):
        model = Model(two_groups, jnp.asarray(scale))
        schedule = Schedule(steps=200, draws=8, loss=loss, learning_rate=0.1)
        found = nppr.fit(model, x, y, schedule=schedule, **how)
        own = nppr.estimate(model, found, x, y, key=jax.random.key(1))
        survived[loss, scale] = own.per_input
    assert survived["sigmoid", 1.0][0] < 0.1 < 0.9 < survived["sigmoid", 1.0][1]
    np.testing.assert_array_equal(survived["sigmoid", 1.0], survived["sigmoid", 1024.0])
    assert survived["softplus", 1.0].min() > 0.9


def test_many_fits_are_the_fits_of_their_keys():
    x, y = samples(NET)
    keys = jax.random.split(jax.random.key(3), 2)
    family = Family(mode="joint", components=2, latent=4, side=2, hidden=8, embedding=4)
    many = nppr.fit_many(NET, x, y, eps=[0.1, 0.2], keys=keys, family=family, schedule=SHORT)
    assert [float(own.eps) for own in many] == pytest.approx([0.1, 0.2])
    one = nppr.fit(NET, x, y, eps=0.2, key=keys[1], family=family, schedule=SHORT)
    np.testing.assert_allclose(many[1].history.loss[:5], one.history.loss[:5], rtol=1e-3)


def test_a_fit_resumes_to_the_same_numbers(tmp_path):
    x, y = samples(NET)
    how = {
        "eps": 0.2,
        "key": jax.random.key(0),
        "family": Family(mode="input", components=2, latent=4, side=2, hidden=8),
        "schedule": SHORT,
    }
    whole = nppr.fit(NET, x, y, **how)
    part = nppr.fit(NET, x, y, **how, checkpoint=tmp_path / "fit", callback=lambda state: True)
    assert np.isnan(part.history.loss[-1])
    resumed = nppr.fit(NET, x, y, **how, checkpoint=tmp_path / "fit")
    np.testing.assert_array_equal(whole.history.loss, resumed.history.loss)
    with pytest.raises(ValueError, match="other settings"):
        nppr.fit(NET, x, y, **how | {"eps": 0.1}, checkpoint=tmp_path / "fit")


def test_a_training_resumes_to_the_same_numbers(tmp_path):
    x, y = samples(NET)
    family = Family(mode="input", components=2, latent=4, side=2, hidden=8)
    how = {"eps": 0.2, "key": jax.random.key(0), "family": family, "epochs": 20, "batch_size": 4}
    model, loss = nppr.train_model(NET, x, y, **how)
    assert loss.shape == (60,)
    assert np.all(np.isfinite(loss))
    assert loss[-1] < loss[0]
    saved = {"checkpoint": tmp_path / "training"}
    _, part = nppr.train_model(NET, x, y, **how, **saved, callback=lambda state: True)
    assert np.isnan(part[50:]).all()
    resumed, again = nppr.train_model(NET, x, y, **how, **saved)
    np.testing.assert_array_equal(loss, again)
    np.testing.assert_array_equal(model(x), resumed(x))
    with pytest.raises(ValueError, match="other settings"):
        nppr.train_model(NET, x, y, **how | {"weight": 0.1}, **saved)
    with pytest.raises(ValueError, match="one typed"):
        nppr.train_model(NET, x, y, **how | {"key": 0})
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: nppr.train_model(NET, x, y, **how)[0])(x)


def test_what_a_fit_refuses():
    x, y = samples(NET)
    own = Family(mode="independent", components=2, latent=4, side=2)
    how = {"eps": 0.1, "key": jax.random.key(0), "family": own, "schedule": SHORT}
    with pytest.raises(ValueError, match="nothing is left"):
        nppr.fit(NET, x, (y + 1) % 3, **how)
    with pytest.raises(ValueError, match="one typed"):
        nppr.fit(NET, x, y, **how | {"key": jax.random.PRNGKey(0)})
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: nppr.fit(NET, x, y, **how).eps)(x)
    broken = Model(lambda w, x: jnp.where(x[:, 0, 0] > 2.0, 1.0, w) + jnp.log(
        jnp.min(x.reshape(len(x), -1), axis=1, keepdims=True) - 0.0), jnp.zeros(3))  # fmt: skip
    high = jnp.clip(x, 0.15, 0.9)
    with pytest.raises(ValueError, match="not finite"):
        nppr.fit(broken, high, jnp.zeros(12, int), **how | {"eps": 0.9})
    endless = Model(lambda w, x: jnp.stack([w + x[:, 0, 0, 0], 0 * w + x[:, 0, 0, 0]], 1), jnp.inf)
    with pytest.raises(ValueError, match="not finite for a sample as it is"):
        nppr.fit(endless, x, jnp.zeros(12, int), **how)
    with pytest.raises(ValueError, match="your own function"):
        nppr.fit(linear(), x, jnp.argmax(linear()(x), -1), **how | {"family": Family()})
    for wrong in ({"mode": "both"}, {"components": 0}, {"sigma": 0.0}, {"covariance": "low"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Family(**wrong)
    for wrong in (
        {"steps": 0}, {"tau": (1.0, 0.0)}, {"warmup": 1.0}, {"loss": "hinge"}, {"width": 0.0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Schedule(**wrong)


def test_warm_starts_begin_where_the_attacks_are():
    x, y = samples(NET)
    offset = nppr.AttackOffset(0.2)
    pulled = offset(NET, x, y)
    back = up.into_ball(pulled.reshape(12, -1), 0.2, math.inf)
    attacked = NET((x + back.reshape(x.shape)).clip(0, 1))
    assert float(losses.margin(attacked, y).mean()) > float(losses.margin(NET(x), y).mean())
    family = Family(mode="joint", components=2, latent=16, side=4, hidden=8, embedding=4)
    how = {"eps": 0.2, "key": jax.random.key(0), "family": family}
    first = Schedule(steps=1, batch=8, draws=8)
    cold = nppr.fit(NET, x, y, schedule=first, **how)
    warm = nppr.fit(NET, x, y, schedule=first, offset=offset, **how)
    assert float(warm.history.loss[0]) < float(cold.history.loss[0])
    assert nppr.points(warm, jax.random.key(1), x, y, 4).shape == (12, 4, 4, 4, 1)
    with pytest.raises(ValueError, match="deterministic"):
        nppr.AttackOffset(0.2, attacks.Walk())


def test_rates_and_temperatures():
    own = Schedule(steps=100, cycles=2, learning_rate=0.1).settled(Family())
    rates = np.array([own.rate(jnp.asarray(step)) for step in range(100)])
    assert rates[0] < rates[4] == pytest.approx(0.1)
    np.testing.assert_allclose(rates[:50], rates[50:], rtol=1e-6)
    assert rates[49] < 0.001
    table = nppr.TABLE_4.settled(Family())
    tau, heads = table.temperatures(jnp.asarray(0))
    assert (float(tau), float(heads.mean), float(heads.sigma)) == (1.0, 3.0, 1.5)
    tau, heads = table.temperatures(jnp.asarray(table.steps - 1))
    assert [float(value) for value in (tau, *heads)] == pytest.approx([0.1, 1, 1, 1, 1])
