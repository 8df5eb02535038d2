"""What training changes of a model: its parameters by gradient, the rest as its framework does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import wdjax
from wdjax import attacks, certify, lipschitz, models, nppr, smoothing, training, transductive
from wdjax.models.layers import MeanSparse
from wdjax.smoothing import noise

fast = pytest.mark.fast
RULE = optax.adamw(0.02, weight_decay=0.3)
KEY = jax.random.key(5)


class Net(nnx.Module):
    """What a stranger's module may have: averages, and random state."""

    def __init__(self, seed=0, rate=0.25):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(6, 8, use_bias=False, rngs=rngs)  # A norm takes it away.
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


class FormByArgument(Net):
    def __init__(self):
        super().__init__(rate=0.0)

    def __call__(self, x, train=False):
        return self.last(nnx.relu(self.norm(self.first(x), use_running_average=not train)))


class DrawsByArgument(Net):
    def __call__(self, x, train=False):
        return self.last(self.drop(self.norm(self.first(x)), deterministic=not train))


class WithoutRandomState(Net):
    def __init__(self):
        super().__init__()
        self.drop = nnx.Dropout(0.5)


class IntegerParam(Net):
    def __init__(self):
        super().__init__()
        self.shift = nnx.Param(jnp.arange(3))


def own(module):
    module.eval()
    return models.functional(module)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 48)
    x = np.clip(rng.uniform(0, 0.4, (48, 6)) + 0.2 * np.eye(3).repeat(2, 1)[y], 0, 1)
    return x.astype(np.float32), y


def batches(epochs, n, size):
    """The batches of ``training.train`` under ``KEY``."""
    for epoch in range(epochs):
        order_key, _ = jax.random.split(jax.random.fold_in(KEY, epoch))
        yield from jax.random.permutation(order_key, n)[: n // size * size].reshape(-1, size)


@fast
def test_a_flax_module_is_trained_as_by_flax(samples):
    """Parameters, averages and random state are those of a loop of Flax's own."""
    x, y = samples
    found = training.train(
        own(Net()), x, y, key=KEY, epochs=3, batch_size=16, optimizer=RULE
    ).model.args[0]
    module = Net()
    module.train()
    optimizer = nnx.Optimizer(module, RULE, wrt=nnx.Param)

    def loss(module, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(module(x), y).mean()

    for rows in batches(3, 48, 16):
        optimizer.update(module, nnx.grad(loss)(module, x[rows], y[rows]))
    expected = nnx.to_pure_dict(nnx.state(module))
    assert int(found["drop"]["rngs"]["count"]) == int(expected["drop"]["rngs"]["count"]) >= 9
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    assert np.abs(found["norm"]["mean"]).max() > 0.01


def test_our_batch_norm_is_trained_as_by_pytorch(samples):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle")
    x, y = samples
    model = models.norm_mlp((6, 8, 3), key=jax.random.key(0))
    found = training.train(
        model, x, y, key=KEY, epochs=2, batch_size=16, optimizer=optax.sgd(0.1)
    ).model.args[0]
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    with torch.no_grad():
        for place, name in ((0, "fc1"), (3, "fc2")):
            net[place].weight.copy_(torch.tensor(np.array(model.args[0][name]["kernel"].T)))
            net[place].bias.copy_(torch.tensor(np.array(model.args[0][name]["bias"])))
    rule = torch.optim.SGD(net.parameters(), 0.1)
    for rows in batches(2, 48, 16):
        rule.zero_grad()
        said = net(torch.tensor(x[np.array(rows)]))
        torch.nn.functional.cross_entropy(said, torch.tensor(y[np.array(rows)])).backward()
        rule.step()
    norm = {"mean": net[1].running_mean, "var": net[1].running_var, "scale": net[1].weight}
    for name, theirs in norm.items():
        np.testing.assert_allclose(found["bn1"][name], theirs.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["fc1"]["kernel"].T, net[0].weight.detach(), atol=1e-5)


def fitted(model, x, y, **_):
    how = {"key": KEY, "steps": 6, "size": 16, "rule": RULE}
    opponent = transductive.Opponent(attacks.PGD(steps=2), 0.05)
    return transductive.train_classifier(model, x, jnp.asarray(y), opponent=opponent, **how)


def trained(model, x, y, **options):
    how = {"key": KEY, "epochs": 2, "batch_size": 16, "optimizer": RULE, **options}
    return training.train(model, x, y, **how).model


def regularised(model, x, y):
    family = nppr.Family(mode="label", components=2, upsample="none")
    how = {"eps": 0.05, "epochs": 2, "batch_size": 16, "draws": 2, "features": None}
    return nppr.train_model(model, x, y, key=KEY, family=family, optimizer=RULE, **how)[0]


TRAININGS = {
    "clean": trained,
    "attacked": functools.partial(trained, attack=attacks.PGD(steps=2), eps=0.05),
    "distributional": functools.partial(trained, attack=attacks.WDA(steps=2, probe=1), eps=0.05,
                                        kappa=2.0),
    "noisy": functools.partial(trained, noise=noise.Gaussian(0.1)),
    "certified": functools.partial(trained, certificate=certify.CertifiedTraining(), eps=0.02),
    "lipschitz": functools.partial(trained, certificate=lipschitz.LipschitzTraining(norm=2),
                                   eps=0.02),
    "regularised": regularised,
    "transductive": fitted,
}  # fmt: skip
every = pytest.mark.parametrize("train", [pytest.param(v, id=k) for k, v in TRAININGS.items()])


@every
@pytest.mark.parametrize("foreign", [True, False], ids=["flax", "own"])
def test_averages_follow_the_data_in_every_training(samples, train, foreign):
    """From 0 and 1 they go towards the statistics of the layer's inputs, as far as passes take."""
    x, y = samples
    if foreign:
        model, (first, norm) = own(Net()), ("first", "norm")
    else:
        model, (first, norm) = models.norm_mlp((6, 8, 3), key=KEY), ("fc1", "bn1")
    start = model.args[0]
    found = train(model, x, y).args[0]
    hidden = x @ found[first]["kernel"] + found[first].get("bias", 0)
    before = x @ start[first]["kernel"] + start[first].get("bias", 0)
    for name, of, begun in (("mean", np.mean, 0.0), ("var", np.var, 1.0)):
        aim = (of(before, 0) + of(hidden, 0)) / 2
        gone = np.median((found[norm][name] - begun) / (aim - begun))
        assert 1 - 0.9**5 < gone < 1.2, (name, gone)  # Six passes at least, of a tenth each.
    assert not np.array_equal(found[norm]["scale"], start[norm]["scale"])


@every
def test_random_state_goes_on_in_every_training(samples, train):
    model = own(Net())
    found = train(model, *samples)
    count = [int(m.args[0]["drop"]["rngs"]["count"]) for m in (model, found)]
    assert count[1] - count[0] >= 6
    assert jax.tree.structure(found) == jax.tree.structure(model)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        return linen.Dense(3)(linen.BatchNorm(use_running_average=not train)(x))


def _linen():
    return wdjax.Model(Linen().apply, Linen().init(KEY, jnp.ones((2, 6))))


def _haiku():
    hk = pytest.importorskip("haiku")
    net = hk.transform_with_state(
        lambda x, train: hk.Linear(3)(hk.BatchNorm(True, True, 0.9)(x, train))
    )
    both = net.init(KEY, jnp.ones((2, 6)), True)
    return wdjax.Model(lambda both, x: net.apply(*both, None, x, False)[0], both)


def _equinox(layer, **options):
    eqx = pytest.importorskip("equinox")
    inner = (eqx.nn.Linear(6, 3, key=KEY),) if layer == "SpectralNorm" else (6, "batch")
    net, state = eqx.nn.make_with_state(getattr(eqx.nn, layer))(*inner, **options)
    net = eqx.nn.inference_mode(net)
    params, static = eqx.partition(net, eqx.is_array)

    def apply(both, x):
        return jax.vmap(lambda row: eqx.combine(both[0], static)(row, both[1])[0][:3])(x)

    return wdjax.Model(apply, (params, state))


def plain(**leaves):
    weights = jnp.linspace(-1, 1, 18).reshape(6, 3)
    return wdjax.Model(lambda p, x: x @ p["w"], {"w": weights, **leaves})


def _by_hand(pure):
    module = Net()
    module.eval()
    graph, state = nnx.split(module)
    state = nnx.to_pure_dict(state) if pure else state
    return wdjax.Model(lambda state, x: nnx.merge(graph, state)(x), state)


def _raw():
    module = Net()
    module.eval()
    return module


def _soft():
    x = jnp.ones((2, 6))
    return smoothing.soft(plain(), x, noise=noise.Gaussian(0.2), key=KEY)


REFUSED = {
    "Linen": (_linen, r"args\[0\]\['batch_stats'\].*mean'\] is a running average"),
    "Linen by partial": (
        lambda: wdjax.Model(functools.partial(Linen().apply, train=False), *_linen().args),
        "batch_stats",
    ),
    "Haiku": (_haiku, "mean_ema.*running average"),
    "Equinox, averages": (
        functools.partial(_equinox, "BatchNorm", mode="batch"), "a state of Equinox",
    ),
    "Equinox, vectors": (
        functools.partial(_equinox, "SpectralNorm", weight_name="weight", key=KEY),
        "a state of Equinox",
    ),
    "names": (lambda: plain(running_var=jnp.ones(2)), "running_var"),
    "mean and var": (lambda: plain(bn={"mean": jnp.ones(2), "var": jnp.ones(2)}),
                     r"args\[0\]\['bn'\]\['mean'\].*side by side"),
    "integers": (lambda: plain(order=jnp.arange(3)), r"\['order'\] is int32\[3\]"),
    "booleans": (lambda: plain(mask=np.ones(3, bool)), r"\['mask'\] is bool\[3\]"),
    "complex": (lambda: plain(phase=jnp.ones(3, jnp.complex64)), r"\['phase'\] is complex64\[3\]"),
    "key": (lambda: plain(rng=jax.random.key(0)), r"\['rng'\] is a random key"),
    "old key": (lambda: plain(rng=jax.random.PRNGKey(0)), r"\['rng'\] is uint32\[2\]"),
    "Python number": (lambda: plain(rate=0.5), r"\['rate'\] is the Python number 0.5"),
    "NNX by hand": (functools.partial(_by_hand, False), "an nnx.RngCount"),
    "NNX by hand, pure": (functools.partial(_by_hand, True), "mean' and 'var' side by side"),
    "NNX as it is": (_raw, r"leaf \.drop.*nnx.RngCount"),
    "NNX, form by argument": (lambda: own(FormByArgument()), r"norm.mean \(BatchStat\) stays"),
    "NNX, draws by argument": (lambda: own(DrawsByArgument()), r"drop.*\(RngCount\) stays"),
    "NNX, no random state": (lambda: own(WithoutRandomState()), r"drop \(Dropout\) has no random"),
    "NNX, integers": (lambda: own(IntegerParam()), r"\['shift'\] is int32\[3\]"),
    "inside another": (
        lambda: wdjax.Model(lambda both, x: both[0](x) + both[1](x), (own(Net()), own(Net(1)))),
        r"args\[0\]\[0\] is apply\[Net\] with averages or random state",
    ),
    "smoothed": (_soft, "sigma is the Python number"),
}  # fmt: skip


@fast
@pytest.mark.parametrize("case", [pytest.param(v, id=k) for k, v in REFUSED.items()])
@pytest.mark.parametrize("train", [pytest.param(TRAININGS[k], id=k)
                                   for k in ("clean", "regularised", "transductive")])  # fmt: skip
def test_what_is_no_parameter_is_refused_by_name(samples, train, case):
    build, message = case
    with pytest.raises(ValueError, match=message):
        train(build(), *samples)


@fast
def test_models_of_parameters_alone_are_trained(samples):
    eqx = pytest.importorskip("equinox")
    hk = pytest.importorskip("haiku")
    x, y = samples
    params, static = eqx.partition(eqx.nn.MLP(6, 3, 8, 1, key=KEY), eqx.is_array)
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 3])(x)))
    dense = linen.Dense(3)
    for model in (
        wdjax.Model(lambda p, x: jax.vmap(eqx.combine(p, static))(x), params),
        wdjax.Model(net.apply, net.init(KEY, x)),
        wdjax.Model(dense.apply, dense.init(KEY, x)),
        plain(mean=jnp.ones(3)),  # Alone, it is a name like any other.
        nnx.Linear(6, 3, rngs=nnx.Rngs(0)),
    ):
        found = training.train(model, x, y, key=KEY, epochs=4, batch_size=16)
        assert found.history.loss[-1] < found.history.loss[0]
        assert jax.tree.structure(found.model) == jax.tree.structure(model)


@fast
def test_constants_of_a_module_stay(samples):
    """``MeanSparse`` is measured once; no pass and no gradient moves it."""

    class Sparse(nnx.Module):
        def __init__(self):
            self.sparse = MeanSparse(6, rngs=nnx.Rngs(0))
            self.out = nnx.Linear(6, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.out(self.sparse(x))

    model = own(Sparse())
    found = trained(model, *samples)
    for name, leaf in model.args[0]["sparse"].items():
        np.testing.assert_array_equal(found.args[0]["sparse"][name], leaf)
    assert not np.array_equal(found.args[0]["out"]["kernel"], model.args[0]["out"]["kernel"])


def test_a_training_with_random_state_is_resumed_to_the_same_numbers(samples, tmp_path):
    ask = functools.partial(training.train, own(Net()), *samples, key=KEY, epochs=3, batch_size=16)
    whole = ask()
    ask(checkpoint=tmp_path / "run", callback=lambda now: now.epoch == 1)
    resumed = ask(checkpoint=tmp_path / "run")
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def test_a_convolutional_net_of_this_package_learns_its_averages():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 32)
    x = rng.uniform(0, 0.5, (32, 32, 32, 3)).astype(np.float32) + 0.4 * y[:, None, None, None]
    model = models.functional(
        models.zoo.build("wide_resnet", {"depth": 10, "width": 1}, rngs=nnx.Rngs(0))
    )
    found = training.train(model, x.astype(np.float32), y, key=KEY, epochs=2, batch_size=16)
    params = found.model.args[0]
    first = jax.tree_util.tree_leaves_with_path(models.parameters(model))
    assert not any("'var'" in jax.tree_util.keystr(path) for path, _ in first)
    moved = [
        np.abs(leaf - 1).max()
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if "'var'" in jax.tree_util.keystr(path)
    ]
    assert len(moved) == 7
    assert min(moved) > 1 - 0.9**4 - 0.2
