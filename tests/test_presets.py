"""Games at the paper's settings, played at toy size, and the networks that they train."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax.transductive as games
from wdjax import models
from wdjax.transductive import fitting

KEY = jax.random.key(0)
NET = models.network(models.NormMLP, sizes=(64, 8, 3))
TOYS = {
    "rmc": {"neighbours": 40, "epochs": 1, "size": 4},
    "dent": {"steps": 1},
    "dann": {"steps": 2, "size": 4},
    "tadv": {"steps": 2, "size": 4},
    "urejectron": {"steps": 2, "size": 4},
}


def short(attack, **more):
    return dataclasses.replace(attack, **{"steps": 1} | more)


def built(name, preset):
    """The preset's defence with a small net, and trainings of a few steps; all else is its own."""
    kind = name.partition("-")[0]
    made = preset.defense(**given(kind))
    less = TOYS[kind] | ({"attack": short(made.attack)} if hasattr(made, "attack") else {})
    return dataclasses.replace(made, **less)


def given(kind):
    """The nets that a defence asks for."""
    judge = models.network(models.MLP, sizes=(8 if kind == "dann" else 64, 4, 2))
    if kind in ("dann", "tadv"):
        return {"network": NET} | ({"discriminator": judge} if kind == "dann" else {})
    return {"model": NET(key=KEY)} | ({"discriminator": judge} if kind == "urejectron" else {})


@pytest.mark.parametrize("name", games.PAPER)
def test_every_preset_is_played(name):
    preset = games.PAPER[name]
    rng = np.random.default_rng(0)
    x, y = rng.uniform(0, 1, (24, 8, 8, 1)).astype(np.float32), rng.integers(0, 3, 24)
    defense = built(name, preset)
    memory = games.prepare(defense, x[4:], y[4:], key=KEY)
    attack = preset.attacks.get("gmsa-min", preset.attacks["transfer"])
    attack = dataclasses.replace(
        attack, inner=short(attack.inner), iterations=min(2, attack.iterations),
        restarts=1, rivals=min(1, attack.rivals),
    )  # fmt: skip
    size = None if preset.size is None else min(2, preset.size)
    report = games.play(
        defense, attack, x[:4], y[:4], memory=memory, eps=preset.eps, key=KEY, size=size, draws=1
    )
    assert report.cost.max() <= preset.eps * (1 + 1e-6)
    assert report.cost.min() > 0, "adversarial points are submitted, no clean ones"
    assert not report.fault.any()


@pytest.mark.parametrize(
    ("module", "settings", "shape", "out", "count"),
    [
        (models.LeNet, {}, (28, 28, 1), (10,), 61_706),  # LeCun et al. 1998, with max-pools.
        (models.CifarResNet, {"depth": 20}, (32, 32, 3), (10,), 0.27e6),  # He et al., Table 6.
        (models.CifarResNet, {"depth": 32}, (32, 32, 3), (10,), 0.46e6),
        (models.CifarResNet, {"depth": 110}, (32, 32, 3), (10,), 1.7e6),
        (models.EarlyResNet, {}, (32, 32, 3), (10,), 11_173_962),  # As ResNet-18.
        (models.DANNNet, {}, (28, 28, 1), (10,), None),
        (models.DANNJudge, {}, (4, 4, 128), (2,), None),
        (models.ResNetJudge, {}, (8, 8, 256), (2,), None),
    ],
)
def test_networks_have_their_published_sizes(module, settings, shape, out, count):
    net = jax.eval_shape(models.network(module, **settings), key=KEY)
    logits = jax.eval_shape(lambda net, x: net(x), net, jnp.zeros((2, *shape)))
    assert logits.shape == (2, *out)
    own = sum(leaf.size for leaf in jax.tree.leaves(models.parameters(net)))
    if count is not None:
        assert own == pytest.approx(count, rel=0 if count % 1000 else 0.03)


def test_a_depth_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="6 n \\+ 2"):
        models.network(models.CifarResNet, depth=21)(key=KEY)


def test_features_of_dann_split_the_net():
    """The net is its head on its features."""
    for module, shape, maps in (
        (models.DANNNet, (28, 28, 1), (4, 4, 128)),
        (models.EarlyResNet, (32, 32, 3), (8, 8, 256)),
    ):
        net = jax.eval_shape(models.network(module), key=KEY)
        seen = jax.eval_shape(lambda n, x: models.features(n)(x), net, jnp.zeros((1, *shape)))
        assert seen.shape == (1, *maps)


def test_crops_and_flips_are_those_of_numpy():
    x = jnp.asarray(np.random.default_rng(0).uniform(size=(5, 6, 7, 2)), jnp.float32)
    found = np.asarray(fitting.augmented(KEY, x, reach=2))
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
    cuts = [padded[:, i : i + 6, j : j + 7] for i in range(5) for j in range(5)]
    both = [one for cut in cuts for one in (cut, cut[:, :, ::-1])]
    places = [{k for k, one in enumerate(both) if np.array_equal(one[n], found[n])}
              for n in range(5)]  # fmt: skip
    assert all(places)
    assert len({min(place) for place in places}) > 2, "each image has its own"


def test_falling_rates_follow_pytorchs_sgd():
    """Weight decay, Nesterov's momentum, and a rate that falls at half of the steps."""
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle")
    rule = fitting.falling_sgd(6, (0.5,), 0.01)
    ours = jnp.asarray([1.0, -2.0])
    state = rule.init(ours)
    theirs = torch.tensor([1.0, -2.0], requires_grad=True)
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    falls = torch.optim.lr_scheduler.MultiStepLR(sgd, [3], 0.1)
    for _ in range(6):
        updates, state = rule.update(3 * ours**2, state, ours)
        ours = ours + updates
        sgd.zero_grad()
        (theirs**3).sum().backward()
        sgd.step()
        falls.step()
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5)
