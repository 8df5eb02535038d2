"""Smoothed classifiers: closed forms, what must not fool them, and attacks that must not cross."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import (
    Lp,
    Model,
    attacks,
    certify,
    data,
    ensembles,
    models,
    parallel,
    smoothing,
    training,
)
from wdjax.models import convert
from wdjax.smoothing import noise
from wdjax.smoothing.looks import SmoothedCertificate

SIGMA = 0.25


def halves(w, x):
    """Class 0 where ``w x`` is above 0: the smoothed classifier does the same."""
    score = x.reshape(len(x), -1) @ w
    return jnp.stack([score, -score], axis=-1)


@pytest.fixture(scope="module")
def linear():
    """Samples at known l2 distances from a plane."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=6).astype(np.float32)
    x = rng.uniform(-1, 1, (40, 6)).astype(np.float32)
    distance = np.abs(x @ w) / np.linalg.norm(w)
    y = (x @ w < 0).astype(np.int32)
    return Model(halves, jnp.asarray(w)), x, y, distance


HOW = {"noise": noise.Gaussian(SIGMA), "box": None, "batch_size": 64}


def test_radii_approach_the_distance_from_below(linear, key):
    model, x, y, distance = linear
    found = smoothing.certify(model, x, y, key=key, n=2000, **HOW)
    assert found.correct.mean() > 0.9
    assert np.all(found.radius <= distance)
    near = distance < 2 * SIGMA  # Farther away votes are unanimous.
    assert np.median(distance[near] - found.radius[near]) < 0.04
    assert found.average_radius == pytest.approx(found.radius.mean())
    assert np.all(found.votes == 2100)


def test_radii_are_wrong_as_seldom_as_they_say(linear, key):
    model, x, y, distance = linear
    row = int(np.argmin(np.abs(distance - SIGMA)))
    copies = np.repeat(x[row : row + 1], 300, axis=0), np.repeat(y[row : row + 1], 300)
    for test, eps in (("clopper-pearson", None), ("randomized", None), ("sequential", 0.2)):
        how = HOW | {"key": key, "n": 150, "n0": 0, "alpha": 0.1, "test": test, "eps": eps}
        found = smoothing.certify(model, *copies, **how)
        wrong = np.mean(found.radius > distance[row])
        assert wrong <= 0.1 + 3 * (0.09 / 300) ** 0.5
        assert wrong > 0 or test == "sequential"
        assert len(np.unique(found.radius)) > 1  # Each has noise of its own.


def test_a_sequential_test_says_the_same_for_fewer_votes(linear, key):
    model, x, y, distance = linear
    how = HOW | {"key": key, "n": 4000, "alpha": 0.01}
    fixed = smoothing.certify(model, x, y, **how)
    quick = smoothing.certify(model, x, y, eps=[0.1, 0.3], **how)
    assert np.array_equal(quick.abstained, fixed.abstained)
    for eps in (0.1, 0.3):
        assert abs(int(np.sum(quick.radius >= eps)) - int(np.sum(fixed.radius >= eps))) <= 1
        assert np.all(distance[quick.radius >= eps] >= eps)
    assert quick.votes.mean() < 0.4 * fixed.votes.mean()
    one = smoothing.certify(model, x, y, eps=0.1, **how)
    assert np.all(one.radius[distance > 0.3] >= 0.1)


def test_neither_batches_nor_devices_nor_company_change_a_vote(linear, key):
    model, x, y, _ = linear
    how = HOW | {"key": key, "n": 300, "eps": 0.2}
    whole = smoothing.certify(model, x[:9], y[:9], **how)
    for other in ({"batch_size": 7}, {"mesh": parallel.data_mesh()}):
        again = smoothing.certify(model, x[:9], y[:9], **(how | other))
        for one, two in zip(whole, again):
            assert np.array_equal(one, two)
    some = smoothing.certify(model, x[4:9], y[4:9], index=np.arange(4, 9), **how)
    assert np.array_equal(some.radius, whole.radius[4:])


@pytest.mark.fast
def test_work_goes_on_where_it_was_stopped(linear, key, tmp_path):
    model, x, y, _ = linear
    how = HOW | {"key": key, "n": 600, "eps": 0.2, "batch_size": 32}
    whole = smoothing.certify(model, x[:9], y[:9], **how)
    seen = []

    def stop(progress):
        seen.append(progress)
        return len(seen) == 5

    half = smoothing.certify(model, x[:9], y[:9], checkpoint=tmp_path / "a", callback=stop, **how)
    assert half.votes.sum() < whole.votes.sum()
    assert np.all(half.radius <= whole.radius + 1e-12)
    rest = smoothing.certify(model, x[:9], y[:9], checkpoint=tmp_path / "a", **how)
    for one, two in zip(whole, rest):
        assert np.array_equal(one, two)
    assert seen[0].taken < seen[-1].taken <= seen[-1].total
    with pytest.raises(ValueError, match="alpha was"):
        smoothing.certify(model, x[:9], y[:9], checkpoint=tmp_path / "a", alpha=0.01, **how)
    other = how | {"noise": noise.Gaussian(0.3)}
    with pytest.raises(ValueError, match="other settings"):
        smoothing.certify(model, x[:9], y[:9], checkpoint=tmp_path / "a", **other)


def fine(scale, x):
    """Class 1 where every coordinate is a multiple of 2^-25: what noise in floats gives away."""
    grid = jnp.all(jnp.round(x * scale) == x * scale, axis=-1)
    return jnp.stack([jnp.where(grid, 0.0, 1.0), jnp.where(grid, 1.0, 0.0)], axis=-1)


@pytest.mark.fast
def test_low_bits_of_floats_do_not_certify(key):
    """Naive noise certifies a radius that holds another class; noise on a grid does not."""
    model, sigma, n = Model(fine, 2.0**25), 0.5, 4000
    x, rival = np.full((1, 3), 0.5, np.float32), np.zeros((1, 3), np.float32)
    own = noise.Gaussian(sigma)

    def naive(at):
        keys = jax.random.split(key, n)
        moved = jax.vmap(lambda k: noise.perturb(own, k, jnp.asarray(at)))(keys)
        return np.asarray(model(moved)).argmax(-1)

    apart = float(np.linalg.norm(x - rival))
    here, there = naive(x[0]), naive(rival[0])
    fooled = float(own.radius(smoothing.binomial.lower(int(here.sum()), n, 0.001)))
    assert fooled > 1.5 * apart
    assert there.mean() < 0.47  # And yet it is class 0 there.
    how = {"noise": own, "key": key, "box": None}
    found = smoothing.certify(model, x, np.array([1]), n=n, **how)
    said = smoothing.predict(model, rival, noise=own, key=key, n=n)
    assert found.radius[0] > apart
    assert said.tolist() == [1]


def broken(kind, x):
    bad = jnp.sum(x, axis=-1, keepdims=True) > kind
    return jnp.where(bad, jnp.nan, jnp.concatenate([x[:, :1] * 0 + 1, x[:, :1] * 0], axis=-1))


def test_logits_that_are_not_finite_are_no_votes(key):
    x, y = np.full((2, 4), 0.5, np.float32), np.array([0, 1])
    how = {"noise": noise.Gaussian(SIGMA), "key": key, "n": 500}
    some = smoothing.certify(Model(broken, 3.0), x, y, **how)
    assert 0 < some.faults[0] < 100
    clean = smoothing.certify(Model(broken, 99.0), x, y, **how)
    assert some.radius[0] < clean.radius[0]
    assert clean.radius[1] == 0
    for level in (-99.0, 2.0):  # None is finite; about half are not.
        none = smoothing.certify(Model(broken, level), x, y, **how)
        assert none.abstained.all()
        assert not none.radius.any()
        assert smoothing.predict(Model(broken, level), x, **how).tolist() == [-1, -1]
    asked = smoothing.certify(Model(broken, -99.0), x, y, eps=0.1, n0=0, **how)
    assert asked.abstained.all()
    assert asked.votes.max() < 500


def test_the_label_itself_can_be_asked_about(linear, key):
    model, x, y, _ = linear
    how = HOW | {"key": key, "n": 400, "n0": 0}
    found = smoothing.certify(model, x, y, **how)
    assert np.all(found.votes == 400)
    wrong = smoothing.certify(model, x, 1 - y, **how)
    assert not wrong.radius.any()
    assert not wrong.correct.any()


def test_the_accuracy_allows_for_radii_that_are_wrong():
    rng = np.random.default_rng(0)
    radius = np.where(rng.random(8) < 0.2, 0, rng.uniform(0.1, 1, 8))
    blank = np.zeros(8)
    found = SmoothedCertificate(blank, blank, blank, radius, blank, blank, 0.05)
    wrong = 2  # P(Bin(8, .05) > 2) = .0058 and P(> 1) = .057.
    for eps, order in itertools.product((0.05, 0.2, 0.4), (1, 2, np.inf)):
        worst = 1.0
        for free in itertools.combinations(range(8), wrong):
            own = radius.copy()
            own[list(free)] = 0
            worst = min(worst, float(certify.certified_accuracy(own, eps, order)))
        assert float(found.accuracy(eps, order)) == pytest.approx(worst)
    assert found.accuracy([0.0, 0.1], 1).shape == (2,)


def together(w, x):
    return x @ w - jnp.mean(x, axis=0) @ w


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": "sequential"}, "a sequential test ends when radii are decided"),
        ({"eps": 0.1, "test": "clopper-pearson"}, "a sequential test ends"),
        ({"eps": -0.1}, "eps must be finite and at least 0"),
        ({"n": 0}, "n must be an integer of at least 1"),
        ({"n0": -1}, "n0 must be an integer of at least 0"),
        ({"alpha": 0.6}, "alpha must be at most 1/2"),
        ({"alpha": 0.0}, "alpha must lie"),
        ({"alpha": "small"}, "alpha must be a single number"),
        ({"noise": 0.25}, "noise must be of wdjax.smoothing.noise"),
        ({"noise": noise.Gaussian(jnp.ones(2))}, "one known sigma"),
        ({"key": None}, "pass key=jax.random.key"),
        ({"key": jax.random.key(0, impl="rbg")}, "would depend on its batch"),
        ({"noise": noise.Flow(0.1)}, "is for images"),
        ({"index": np.arange(3)}, "index must have one row"),
        ({"model": Model(together, jnp.eye(6)[:, :3])}, "rest of its batch"),
    ],
)
def test_bad_questions_are_refused(linear, key, change, message):
    model, x, y, _ = linear
    how = HOW | {"model": model, "key": key, "n": 10} | change
    with pytest.raises(ValueError, match=message):
        smoothing.certify(x=x, y=y, **how)


def test_votes_are_not_counted_inside_a_trace(linear, key):
    model, x, *_ = linear
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: smoothing.predict(model, x, noise=noise.Gaussian(0.1), key=key))(x)


def test_the_stand_in_is_a_mean_over_the_same_noise(linear, key):
    model, x, y, _ = linear
    soft = smoothing.soft(model, x, noise=noise.Gaussian(SIGMA), key=key, count=5)
    logits = soft(jnp.asarray(x))
    keys = jax.random.split(key, 5)
    shifts = [noise.Gaussian(SIGMA).offset(k, jnp.zeros(6)) for k in keys]
    mean = sum(jax.nn.softmax(model(x + shift)) for shift in shifts) / 5
    assert np.allclose(jnp.exp(logits), mean, atol=1e-5)
    images = jax.random.uniform(key, (2, 4, 4, 1))
    net = models.mlp((16, 3), key=key)
    flowing = smoothing.soft(net, images, noise=noise.Flow(0.1), key=key, count=1)
    moved = noise.perturb(noise.Flow(0.1), jax.random.split(key, 1)[0], images[1])
    assert np.allclose(flowing(images)[1], jax.nn.log_softmax(net(moved[None]))[0], atol=1e-5)
    gradient = jax.grad(lambda x: wdjax.losses.margin(soft(x), y).sum())(jnp.asarray(x))
    assert np.all(np.isfinite(gradient))
    assert float(jnp.abs(gradient).max()) > 0


@pytest.mark.fast
def test_attacks_and_certificates_of_one_smoothed_classifier_do_not_cross(linear, key):
    model, x, y, distance = linear
    sharp = Model(halves, 30 * model.args[0])
    own = {"noise": noise.Gaussian(SIGMA)}
    moved = ensembles.smoothed(
        attacks.DDN(Lp(2, None), steps=30), sharp, x, y, key=key, votes=500, **own
    )
    found = smoothing.certify(sharp, x, y, key=key, n=500, box=None, **own)
    fallen = np.asarray(moved.success & moved.correct)
    cost = np.asarray(moved.cost)
    assert fallen.mean() > 0.8
    assert np.all(cost[fallen] >= distance[fallen] - 1e-4)
    assert np.median(cost[fallen] / distance[fallen]) < 2
    assert np.all(cost[fallen] >= found.radius[fallen])
    assert np.allclose(np.linalg.norm(np.asarray(moved.x_adv) - x, axis=-1)[fallen], cost[fallen])
    near = ensembles.smoothed(
        attacks.PGD(Lp(2, None), steps=5), sharp, x, y, eps=0.1, key=key, votes=500, **own
    )
    assert np.all(np.asarray(near.cost) <= 0.1 * (1 + 1e-6))
    assert not np.any(np.asarray(near.success & near.correct) & (distance > 0.1))
    with pytest.raises(ValueError, match="increase from 1"):
        ensembles.smoothed(attacks.DDN(Lp(2)), sharp, x, y, key=key, stretch=(2.0,), **own)


def test_training_under_noise_makes_a_net_for_smoothing(key):
    train, test = data.digits()
    net, own = models.mlp((64, 32, 10), key=key), noise.Gaussian(0.5)
    accuracy = {}
    for name, how in {"clean": {}, "noisy": {"noise": own}}.items():
        model = training.train(net, *train, key=key, epochs=20, **how).model
        said = smoothing.predict(model, test.x[:60], noise=own, key=key, n=200)
        accuracy[name] = np.mean(said == test.y[:60])
    assert accuracy["noisy"] > accuracy["clean"] + 0.04
    with pytest.raises(ValueError, match="either an attack, a certificate or noise"):
        training.train(net, *train, key=key, noise=own, attack=attacks.PGD(), eps=0.1)
    with pytest.raises(ValueError, match="go with an attack"):
        training.train(net, *train, key=key, noise=own, eps=0.1)
    with pytest.raises(ValueError, match="noise must be of"):
        training.train(net, *train, key=key, noise=0.5)


def test_wasserstein_radii_of_a_published_net(shared, key):
    weights = shared / "data" / "weights" / "mnist_laplace_smooth_0.01.pth"
    model = convert.load(weights, "wong_mnist").model
    x, y = data.load_npz(shared / "data" / "mnist_test_0_500.npz").take(8)
    how = {"noise": noise.Flow(0.01), "key": key, "alpha": 0.05}
    found = smoothing.certify(model, x, y, n=1000, eps=5 / 784, n0=50, **how)
    assert found.correct.all()
    assert np.median(found.radius) * 784 >= 5
    assert np.all(found.radius * 784 < 29.1)  # The most that 10,000 votes could show.
    published = noise.Flow(0.01).radius(found.lower)
    assert np.all(found.radius >= published * (1 - 1e-9))


@pytest.mark.parametrize(
    ("attack", "eps"), [(attacks.DDN(Lp(2), steps=30), None), (attacks.PGD(Lp(2), steps=20), 0.4)]
)
def test_samples_that_only_the_mean_of_few_loses_are_attacked(attack, eps):
    """A mean over 32 noises loses samples of probability .505 to .61, which votes do not."""
    model = Model(lambda w, x: x @ w, 3 * jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    gap = np.linspace(0.005, 0.12, 20)
    x = jnp.asarray(np.stack([0.5 + gap / 2, 0.5 - gap / 2], axis=1), jnp.float32)
    y, how = np.zeros(20, int), {"noise": noise.Gaussian(0.3), "key": jax.random.key(1)}
    seen = smoothing.soft(model, x, noise=how["noise"], key=jax.random.split(how["key"], 3)[0])
    assert np.any(np.argmax(seen(x), axis=1) != y)
    found = ensembles.smoothed(attack, model, x, y, eps=eps, **how)
    assert found.correct.all()
    assert found.success.all()
    assert np.all(np.asarray(found.cost) > gap / np.sqrt(2))  # The plane is that far.
    with pytest.raises(ValueError, match="does not take criterion"):
        ensembles.smoothed(attack, model, x, y, eps=eps, criterion=wdjax.losses.margin, **how)
