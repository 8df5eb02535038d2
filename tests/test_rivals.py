"""How many classes WDA, WDA++ and A3-WDA try: the paper's numbers, by the number of classes."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import attacks
from wdjax.cli import main
from wdjax.models import convert

TOP_K = {2: 1, 3: 2, 5: 4, 10: 5, 11: 10, 43: 10, 100: 10, 101: 20, 1000: 20}
"""Of Appendix E: 5 for CIFAR-10, 10 for CIFAR-100, 20 for ImageNet; never more than there are."""
ALL = 10
"""Up to so many classes WDA tries all, as Algorithm 1 does."""


def linear(classes, n=2, d=6):
    """A linear classifier far from its boundaries, and samples with their labels."""
    weights = jax.random.normal(jax.random.key(classes), (d, classes))
    model = wdjax.Model(lambda w, x: x @ w, weights)
    x = jax.random.uniform(jax.random.key(0), (n, d), minval=0.4, maxval=0.6)
    return model, x, jnp.argmax(model(x), axis=-1)


def test_numbers_of_rivals_are_the_papers():
    for classes, wanted in TOP_K.items():
        assert attacks.WDAPlusPlus().tried(classes) == wanted
        assert attacks.WDA().tried(classes) == (classes - 1 if classes <= ALL else wanted)
        for count in (1, 4, 10**6):
            for attack in (attacks.WDA(rivals=count), attacks.WDAPlusPlus(rivals=count)):
                assert attack.tried(classes) == min(count, classes - 1)


@pytest.mark.parametrize(("classes", "rivals"), [(10, None), (43, None), (43, 4), (5, 10**6)])
def test_gradients_are_those_of_the_rivals(classes, rivals):
    model, x, y = linear(classes)
    step = {"step_size": 1e-6, "rivals": rivals}  # Nobody flips, and nobody is done early.
    plus = attacks.WDAPlusPlus(steps=1, bisections=0, ray_bisections=0, **step)
    found = wdjax.search(plus, model, x, y, diagnose=False)
    assert found.gradients.tolist() == [plus.tried(classes)] * len(y)
    attack = attacks.WDA(steps=2, probe=1, **step)
    found = wdjax.search(attack, model, x, y, eps=1e-3, diagnose=False)
    assert found.gradients.tolist() == [attack.tried(classes) + 1] * len(y)


def test_imagenet_takes_81_gradients_where_all_rivals_take_3997():
    model, x, y = linear(1000, n=1)
    for rivals, spent in ((None, 81), (999, 3997)):
        attack = attacks.WDA(steps=5, probe=4, rivals=rivals, step_size=1e-6)
        found = wdjax.search(attack, model, x, y, eps=1e-3, diagnose=False)
        assert found.gradients.tolist() == [spent]


def test_the_ascents_of_a3_try_as_many(monkeypatch):
    asked = []
    room = importlib.import_module("wdjax.ensembles.a3")  # The name in the package is the function.

    monkeypatch.setattr(room, "a3", lambda *a, finisher, **k: asked.append(finisher))
    model, x, y = linear(100)
    room.a3_wda(model, x, y, eps=0.1, key=jax.random.key(0), diagnose=False)
    room.a3_wda(model, x, y, eps=0.1, key=jax.random.key(0), rivals=3, diagnose=False)
    assert [finisher.tried(100) for finisher in asked] == [10, 3]
    assert [finisher.tried(10) for finisher in asked] == [9, 3]


@pytest.mark.parametrize(("classes", "wda", "plus"), [(10, 9, 5), (200, 20, 20)])
def test_the_command_says_how_many(classes, wda, plus, tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.add_module("fc1", torch.nn.Linear(16, classes))
    torch.save(net.state_dict(), tmp_path / "mlp.pth")
    x = np.random.default_rng(0).uniform(0, 1, (3, 4, 4, 1)).astype(np.float32)
    y = np.array(convert.load(tmp_path / "mlp.pth", "mlp").model(x)).argmax(-1)
    np.savez(tmp_path / "x.npz", x=x, y=y)
    words = ["attack", "--arch", "mlp", "--weights", str(tmp_path / "mlp.pth"), "--json", "-"]
    words += ["--data", str(tmp_path / "x.npz"), "--norm", "linf", "--eps", "0.01"]
    assert main([*words, "--attacks", "wda,wda++,fgsm"]) == 0
    found = json.loads(capsys.readouterr().out)["attacks"]
    assert (found["wda"]["rivals"], found["wda++"]["rivals"]) == (wda, plus)
    assert "rivals" not in found["fgsm"]
    assert main([*words, "--attacks", "wda,wda++", "--rivals", "2"]) == 0
    found = json.loads(capsys.readouterr().out)["attacks"]
    assert [row["rivals"] for row in found.values()] == [2, 2]
    assert found["wda"]["gradients_per_sample"] <= 10 * 2 + 10
    assert main([*words, "--attacks", "fgsm", "--rivals", "2"]) == 2
    assert "--rivals 2 would be ignored" in capsys.readouterr().err
