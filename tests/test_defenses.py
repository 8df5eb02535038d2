"""Defences that adapt, one by one: against PyTorch, NumPy, scikit-learn and what they promise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

import wdjax
import wdjax.transductive as games
from wdjax import Lp, Model, data, losses, models
from wdjax.attacks import PGD
from wdjax.checks import independence
from wdjax.transductive.defenses.dann import reverse
from wdjax.transductive.defenses.dent import information_loss

INNER = PGD(steps=10, step_size=0.02)


def numpy_adamod(gradient_of, start, steps, lr=0.006, b1=0.9, b2=0.999, b3=0.6, eps=1e-8):
    """The definition, line by line."""
    at = [np.array(leaf, np.float64) for leaf in start]
    m, v, s = ([np.zeros_like(leaf) for leaf in at] for _ in range(3))
    for t in range(1, steps + 1):
        gradients = gradient_of(at)
        for i, g in enumerate(gradients):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
            a = lr * np.sqrt(1 - b2**t) / (1 - b1**t) / (np.sqrt(v[i]) + eps)
            s[i] = b3 * s[i] + (1 - b3) * a
            at[i] = at[i] - np.minimum(a, s[i]) * m[i]
    return at


def test_adamod_is_its_definition():
    rng = np.random.default_rng(0)
    start = [rng.normal(size=7), rng.normal(size=(2, 3))]
    pulls = [[rng.normal(size=leaf.shape) for leaf in start] for _ in range(6)]
    rows = iter(pulls)
    expected = numpy_adamod(lambda at: next(rows), start, 6)
    at = [jnp.asarray(leaf, jnp.float32) for leaf in start]
    rule = games.adamod(0.006, b3=0.6)
    known = rule.init(at)
    for step, pull in enumerate(pulls):
        pull = [jnp.asarray(leaf, jnp.float32) for leaf in pull]
        moves, known = rule.update(pull, known)
        if step == 0:
            for move, slope in zip(moves, pull):
                np.testing.assert_allclose(move, -0.4 * 0.006 * jnp.sign(slope), rtol=1e-4)
        at = optax.apply_updates(at, moves)
    for ours, theirs in zip(at, expected):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)

    def through(x):
        moves, _ = rule.update([x * jnp.array([0.0, 1.0])], rule.init([x]))
        return moves[0].sum()

    assert np.isfinite(jax.grad(through)(jnp.ones(2))).all()  # At v = 0 too.


@pytest.fixture(scope="module")
def normed():
    net = models.norm_mlp((6, 5, 3), key=jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(1).uniform(0, 1, (8, 6)), jnp.float32)
    _, net = models.training_pass(net, 3 * x, momentum=1.0)
    return net, x


def test_dent_is_pytorchs_gradients_and_numpys_adamod(normed):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle")
    net, x = normed
    part = {k: {n: torch.tensor(np.asarray(v)).double() for n, v in layer.items()}
            for k, layer in net.args[0].items()}  # fmt: skip
    inputs = torch.tensor(np.asarray(x)).double()

    def logits(scale, bias):
        h = inputs @ part["fc1"]["kernel"] + part["fc1"]["bias"]
        h = (h - part["bn1"]["mean"]) / torch.sqrt(part["bn1"]["var"] + 1e-5)
        return torch.relu(h * scale + bias) @ part["fc2"]["kernel"] + part["fc2"]["bias"]

    def gradient(at):
        own = [torch.tensor(leaf, requires_grad=True) for leaf in at]
        p = torch.softmax(logits(*own), dim=1)
        mean = p.mean(dim=0)
        loss = -(p * torch.log(p + 1e-5)).sum(1).mean() + (mean * torch.log(mean + 1e-5)).sum()
        return [g.numpy() for g in torch.autograd.grad(loss, own)]

    start = [np.tile(np.asarray(net.args[0]["bn1"][name]), (8, 1)) for name in ("scale", "bias")]
    scale, bias = numpy_adamod(gradient, start, 6)
    defense = games.DENT(net)
    adapted, _ = jax.jit(lambda d, x: d.adapt(jax.random.key(0), (), (), x))(defense, x)
    np.testing.assert_allclose(adapted["bn1"]["scale"], scale, atol=1e-4)
    expected = logits(*map(torch.tensor, (scale, bias))).numpy()
    np.testing.assert_allclose(defense.predict((), adapted, x), expected, atol=1e-4)
    moved = [abs(np.asarray(adapted["bn1"][n]) - s).max() for n, s in zip(("scale", "bias"), start)]
    assert max(moved) <= 0.033
    np.testing.assert_allclose(defense.predict((), defense.base((), (), 8), x), net(x), atol=1e-5)


def test_dent_couples_samples_by_their_mean_alone(normed):
    net, x = normed
    both = information_loss(net(x))
    p = np.asarray(jax.nn.softmax(net(x)))
    entropy = -np.mean((p * np.log(p + 1e-5)).sum(1))
    mean = p.mean(0)
    # H is to fall and the entropy of the mean to rise.
    assert both == pytest.approx(float(entropy * 1 + (mean * np.log(mean + 1e-5)).sum()), abs=1e-5)
    with pytest.raises(ValueError, match="no BatchNorm"):
        games.prepare(games.DENT(models.mlp((6, 3), key=jax.random.key(0))), x, [0] * 8,
                      key=jax.random.key(0))  # fmt: skip


@pytest.mark.parametrize(("steps", "near"), [(1, 1e-5), (6, 0.03)])
def test_dent_as_a_classifier_adapts_each_input_in_its_company(normed, steps, near):
    """With one step the company is what it is in the same batch; gradients hold the scales."""
    net, x = normed
    defense = games.DENT(net, steps=steps)
    together, _ = defense.adapt(jax.random.key(0), (), (), x)
    wanted = defense.predict((), together, x)[:1]
    module = defense.module(x[1:])
    np.testing.assert_allclose(module(x[:1]), wanted, atol=near)
    assert np.abs(defense.module(x[1:2])(x[:1]) - wanted).max() > 1e-5 or steps == 1
    own = jax.tree.map(lambda leaf: leaf[:1], together)
    slopes = jax.grad(lambda z: module(z)[0, 0])(x[:1])
    kept = jax.grad(lambda z: defense.predict((), own, z)[0, 0])(x[:1])
    np.testing.assert_allclose(slopes, kept, atol=near)
    independence.check(module, np.asarray(x))


@pytest.fixture(scope="module")
def digits():
    train, test = data.digits()
    return train.take(300), test.take(40)


def test_training_passes_are_pytorchs(normed):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle")
    _, x = normed
    layer = torch.nn.BatchNorm1d(6)
    rows = torch.tensor(np.asarray(x))
    expected = layer(rows).detach().numpy()
    own = models.functional(_OneNorm())
    out, moved = models.training_pass(own, x)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for name, buffer in (("mean", layer.running_mean), ("var", layer.running_var)):
        np.testing.assert_allclose(moved.args[0]["bn"][name], buffer, atol=1e-6)
    plain = Model(lambda w, x: x @ w, jnp.ones((6, 2)))
    assert models.training_pass(plain, x)[1] is plain


def _OneNorm():  # noqa: N802
    from flax import nnx

    from wdjax.models.layers import BatchNorm

    class One(nnx.Module):
        def __init__(self):
            self.bn = BatchNorm(6, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.bn(x)

    return One()


def test_dann_reverses_gradients(key):
    check_grads(lambda x: reverse(x, -1.0), (jnp.arange(3.0),), 1, ["rev"])  # Twice reversed.
    pull = jax.grad(lambda x: jnp.sum(reverse(x, 0.3) ** 2))(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(pull, [-0.6, -1.2], rtol=1e-6)


def test_dann_learns_its_inputs(digits, key):
    train, test = digits
    defense = games.DANN(
        network=functools.partial(models.norm_mlp, (64, 16, 10)),
        discriminator=functools.partial(models.mlp, (16, 8, 2)),
        steps=150, size=32, learning_rate=5e-3, peak=1.0,
    )  # fmt: skip
    memory = games.prepare(defense, *train, key=jax.random.key(5))
    found = games.play(
        defense, games.transfer(INNER), *test, memory=memory, eps=0.15, key=key, draws=2
    )
    assert found.static_clean_accuracy.value > 0.8
    assert found.one_shot_clean.value > 0.7
    assert found.one_shot.value > found.static_accuracy.value + 0.1
    assert not np.array_equal(found.correct[0], found.correct[1])  # Private randomness.


def test_a_conv_net_in_a_bank_of_models_for_every_sample(digits, key):
    _, test = digits
    defense = games.DENT(models.norm_cnn((8, 8, 1), key=key, widths=(2, 4, 8)))
    x, y = jnp.asarray(test.x[:4]), jnp.asarray(test.y[:4])

    @jax.jit
    def both(defense, x):
        adapted, _ = defense.adapt(key, (), (), x)
        bank = games.add_model(games.empty_bank(adapted, 3), defense.base((), (), 4))
        victim = games.victim(defense, (), games.add_model(bank, adapted))
        said = victim(x).out
        pull = jax.grad(lambda x: games.Objective(losses.margin)(victim(x), y).sum())(x)
        return said, defense.predict((), adapted, x), pull

    said, alone, pull = both(defense, x)
    np.testing.assert_allclose(said[:, 0], defense.model(x), atol=1e-5)
    np.testing.assert_allclose(said[:, 1], alone, atol=1e-5)
    assert np.abs(said[:, 1] - said[:, 0]).max() > 1e-3
    assert np.isfinite(pull).all()
    assert np.abs(pull).max() > 0


def test_rmc_finds_its_neighbours_and_goes_on(digits, key):
    from sklearn.neighbors import NearestNeighbors

    train, test = digits
    net = models.mlp((64, 16, 10), key=key)
    defense = games.RMC(model=net, attack=INNER, eps=0.1, neighbours=64, epochs=4, size=32)
    memory = games.prepare(defense, *train, key=key)
    assert memory["x"].shape == (600, 8, 8, 1)
    gap = np.abs(memory["x"][300:] - memory["x"][:300]).max()
    assert 0.09 < gap <= 0.1 + 1e-6
    x = jnp.asarray(test.x[:1])
    found = np.asarray(defense.nearest(memory, x))
    tree = NearestNeighbors(n_neighbors=64).fit(np.asarray(memory["features"]))
    expected = tree.kneighbors(np.asarray(models.features(net)(x)), return_distance=False)[0]
    assert set(found) == set(expected)
    own, held = defense._parted(key, jnp.asarray(found))
    assert len(held) == 3
    assert set(np.asarray(held)) <= set(found[:12])
    assert set(np.asarray(own)) | set(np.asarray(held)) == set(found)
    states = []
    attack = games.fpa(INNER, 2)
    how = {"memory": memory, "eps": 0.1, "key": key, "draws": 1}
    played = games.play(defense, attack, test.x[:2], test.y[:2], size=1, callback=states.append,
                        **how)  # fmt: skip
    assert played.simulated.shape == (2, 2)
    # Adam and the model go on: an epoch has two steps, and rounds are adapted to and calibrated.
    assert [int(s.defender.attacked.known[0].count) for s in states] == [0, 0, 16, 16, 16, 32]
    kernels = [s.defender.attacked.model.args[0]["fc2"]["kernel"] for s in states]
    assert np.abs(kernels[-1] - kernels[2]).max() > 0
    with pytest.raises(ValueError, match="rounds of 1"):
        games.play(defense, attack, *test, **how)
    with pytest.raises(ValueError, match="pass more training samples or set neighbours"):
        games.prepare(games.RMC(model=net), *train, key=key)
    attack = games.transfer(INNER)
    for memory, said in (((), "got tuple"), ({"x": train[0]}, "got .'x'.")):
        with pytest.raises(ValueError, match=f"with x, y, features; {said}"):
            games.play(games.RMC(model=net), attack, *train, memory=memory, eps=0.1, key=key)


def test_rmc_stops_by_its_rule(digits, key):
    """The epochs of the rule, one by one on the host, end where the loop ends."""
    train, _ = digits
    net = models.mlp((64, 16, 10), key=key)
    defense = games.RMC(model=net, neighbours=64, copies=0, epochs=60, patience=2, size=64,
                        learning_rate=2e-2)  # fmt: skip
    memory = games.prepare(defense, *train, key=key)
    own, held = jnp.arange(60), jnp.arange(60, 70)
    begun = defense.begin(memory)
    after = jax.jit(defense._train)(key, memory, begun, own, held)
    taken = int(after.known[0].count)
    model, known, least, waited = begun.model, begun.known, np.inf, 0
    x, y = memory["x"], memory["y"]
    rule = optax.adam(2e-2)

    @jax.jit
    def epoch(model, known, rows):
        def loss(model):
            return jnp.mean(losses.cross_entropy(model(x[rows]), y[rows]))

        value, slope = jax.value_and_grad(loss)(model)
        moves, known = rule.update(slope, known)
        model = optax.apply_updates(model, moves)
        return model, known, value, jnp.mean(losses.cross_entropy(model(x[held]), y[held]))

    taken_here = 0
    while taken_here < 60:
        taken_here += 1
        model, known, value, other = epoch(model, known, own)
        waited, least = (0, float(other)) if other < least else (waited + 1, least)
        if value < 0.01 and waited >= 2:
            break
    assert taken == taken_here < 60
    kernel = after.model.args[0]["fc1"]["kernel"]
    np.testing.assert_allclose(kernel, model.args[0]["fc1"]["kernel"], atol=1e-4)


def test_tadv_is_private_randomness(digits, key):
    train, _ = digits
    defense = games.TADV(
        network=functools.partial(models.mlp, (64, 32, 10)), eps=0.1, steps=200, size=64,
        attack=PGD(steps=4, random_start=True, iterate="last"),
    )  # fmt: skip
    memory = games.prepare(defense, *train, key=jax.random.key(5))
    adapt = jax.jit(lambda defense, x: defense.adapt(key, memory, (), x)[0])
    one, two = adapt(defense, jnp.zeros((1, 8, 8, 1))), adapt(defense, jnp.ones((1, 8, 8, 1)))
    kernels = [model.args[0]["fc1"]["kernel"] for model in (one, two, memory["base"])]
    np.testing.assert_array_equal(kernels[0], kernels[1])  # The inputs are not used.
    assert np.abs(kernels[0] - kernels[2]).max() > 0.01
    x, y = memory["x"][:64], memory["y"][:64]
    loss = jax.jit(lambda model: -wdjax.search(INNER, model, x, y, eps=0.1).margin.mean())
    plain = adapt(dataclasses.replace(defense, eps=0.0), x[:1])  # The same without attacks.
    assert loss(one) > loss(plain) + 0.1  # The mean margin that is left.


def test_urejectron_counts_as_the_paper_does(digits, key):
    train, test = digits
    rows = jnp.asarray(train.x), jnp.asarray(train.y)
    net = models.mlp((64, 32, 10), key=key)
    net = jax.jit(lambda net: games.train_classifier(net, *rows, key=key, steps=150))(net)
    defense = games.URejectron(
        model=net, discriminator=functools.partial(models.mlp, (64, 32, 2)), steps=100, size=64,
        learning_rate=5e-3,
    )  # fmt: skip
    memory = games.prepare(defense, *train, key=key)
    how = {"memory": memory, "eps": 0.15, "key": key, "draws": 2}
    plain = games.play(defense, games.transfer(INNER), *test, **how)
    assert games.worst({"plain": plain})[0] == "plain"
    assert plain.one_shot.value < 0.5
    point = plain.operating_point(0.05)
    assert point.rejected <= 0.05
    assert point.err < 0.2
    at = plain.rejection(0.0)
    accepted, wrong = plain.score <= 0, ~plain.correct
    assert at.err == (accepted & wrong).mean()
    assert at.err_accepted == pytest.approx(
        wrong[accepted].mean() if accepted.any() else np.nan, nan_ok=True
    )
    assert at.rejected == (plain.score_clean > 0).mean()
    curve = plain.rejection_curve()
    assert np.all(np.diff([one.rejected for one in curve]) <= 0)
    assert np.all(np.diff([one.err for one in curve]) >= 0)
    assert curve[0].err == 0
    assert curve[-1].rejected == 0
    with pytest.raises(ValueError, match="does not reject"):
        dataclasses.replace(plain, score=None).operating_point()


def test_purification_is_differentiated_to_its_end(key):
    def bent(w, x):
        return jnp.tanh(x @ w)

    net = Model(bent, jax.random.normal(key, (6, 3)))
    x = jax.random.uniform(key, (12, 6), minval=0.2, maxval=0.8)
    y = jnp.argmax(net(x), axis=-1).astype(jnp.int32)
    defense = games.Purify(net, steps=3, radius=0.05, step_size=0.01)
    adapted, _ = defense.adapt(key, (), (), x)
    predict = jax.jit(lambda defense, adapted, x: defense.predict((), adapted, x))
    surer = [jax.nn.softmax(out).max(1).mean() for out in (predict(defense, adapted, x), net(x))]
    assert surer[0] > surer[1] + 1e-3
    base = defense.base((), (), 12)
    np.testing.assert_allclose(predict(defense, base, x), net(x), atol=1e-6)
    # No clip and no change of the predicted class within the finite differences.
    free = games.Purify(net, steps=3, radius=0.1, step_size=0.002)
    pull = jax.jit(jax.grad(lambda x: losses.margin(predict(free, adapted, x), y).sum()))
    slope, along = pull(x), jax.random.normal(jax.random.key(1), x.shape)
    step = 1e-3
    ends = [losses.margin(predict(free, adapted, x + s * step * along), y) for s in (1, -1)]
    measured = (ends[0] - ends[1]) / (2 * step)
    expected = jnp.sum((slope * along).reshape(12, -1), axis=1)
    assert np.median(np.abs(measured - expected)) < 5e-3
    found = games.play(defense, games.gmsa_avg(INNER, 2, simulations=2), x, y, memory=(), eps=0.3,
                       key=key, draws=2)  # fmt: skip
    assert found.one_shot.value < found.one_shot_clean.value


def test_purification_keeps_to_the_box_of_the_game(key):
    net = Model(lambda w, x: (x + 2.5) @ w, jnp.array([[1.0, -1.0], [0.0, 0.0]]))
    x = jnp.array([[-3.0, 0.0], [-2.0, 0.0], [3.0, 0.0], [2.0, 0.0]])
    y, wide = jnp.argmax(net(x), axis=-1), (-5.0, 5.0)
    attack = games.gmsa_avg(dataclasses.replace(INNER, ball=Lp(box=wide)), 2)
    how = {"memory": (), "eps": 0.1, "key": key, "draws": 1}
    moves = {"radius": 0.2, "step_size": 0.1}
    found = games.play(games.Purify(net, box=wide, **moves), attack, x, y, **how)
    assert found.static_clean_accuracy.value == 1
    with pytest.raises(ValueError, match=r"clips inputs to \(0.0, 1.0\), .* box is \(-5.0, 5.0\)"):
        games.play(games.Purify(net, **moves), attack, x, y, **how)


def test_labels_beyond_the_classes_are_refused(key):
    x, y = jax.random.uniform(key, (8, 2)), np.repeat([5, 1], 4)
    net = functools.partial(models.norm_mlp, (2, 4, 2))
    adversarial = games.TADV(
        network=lambda key: net(key=key), attack=INNER, eps=0.02, steps=2, size=4
    )
    for ask in (
        lambda: games.train_classifier(net(key=key), x, y, key=key, steps=2),
        lambda: games.prepare(adversarial, x, y, key=key),
        lambda: games.prepare(games.Fixed(net(key=key)), x, -y, key=key),
    ):
        with pytest.raises(ValueError, match=r"labels|classes"):
            ask()


def test_the_papers_settings():
    assert set(games.PAPER) == {
        "rmc-mnist", "rmc-cifar10", "dent-cifar10", "dann-mnist", "dann-cifar10", "tadv-mnist",
        "tadv-cifar10", "urejectron-gtsrb",
    }  # fmt: skip
    net = models.norm_mlp((4, 3, 2), key=jax.random.key(0))
    made = games.PAPER["rmc-cifar10"].defense(model=net)
    assert (made.neighbours, made.copies, made.learning_rate) == (1024, 4, 2.5e-5)
    dent = games.PAPER["dent-cifar10"]
    assert dent.defense(model=net).steps == 6
    assert dent.size == 128
    assert {attack.runs for attack in dent.attacks.values()} == {14}
    assert dent.attacks["gmsa-min"].iterations == 3
    mnist = games.PAPER["dann-mnist"]
    assert mnist.attacks["gmsa-min"].legs == "models"
    assert mnist.attacks["gmsa-avg"].capacity == 11
    made = mnist.defense(network=None, discriminator=None)
    assert (made.steps, made.peak) == (7900, 0.1)
