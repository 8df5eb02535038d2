"""The eight small weight files, parity with PyTorch, and checkpoints that must be refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import convert, models

SMALL = [
    ("mnist_trades_smallcnn.pt", "trades_smallcnn", 0.996),
    ("mnist_vanilla.pth", "wong_mnist", 0.988),
    ("mnist_linf_robust.pth", "wong_mnist", 0.982),
    ("mnist_adv_training_wong.pth", "wong_mnist", 0.984),
    ("cifar10_resnet2b.pth", "resnet2b", 0.77),
    ("mnist_fc_3layer.pth", "mlp", 0.980),
    ("mnist_2_20.pth", "mlp", 0.878),
    ("mnist_6_100_nat.pth", "mlp", 0.972),
]


def images(shared, name):
    file = "cifar10_test_0_100.npz" if name.startswith("cifar") else "mnist_test_0_500.npz"
    data = np.load(shared / "data" / file)
    return data["x"].astype(np.float32) / 255, data["y"]


@pytest.mark.fast
@pytest.mark.parametrize(("name", "arch", "accuracy"), SMALL)
def test_clean_accuracy_is_reproduced(shared, name, arch, accuracy):
    x, y = images(shared, name)
    model, report = convert.load(shared / "data/weights" / name, arch)
    predicted = np.argmax(np.asarray(jax.jit(model)(x)), axis=-1)
    assert np.sum(predicted == y) == round(accuracy * len(y))
    assert all(line.fate.startswith("->") for line in report.lines)
    assert report.parameters == sum(leaf.size for leaf in jax.tree.leaves(model))


def test_report_is_readable(shared):
    _, report = convert.load(shared / "data/weights/mnist_linf_robust.pth", "wong_mnist")
    text = str(report)
    assert "8 tensors used (166,406 parameters), 0 ignored" in text
    assert "fc1.weight" in text
    assert "-> fc1/kernel" in text


def state(module):
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=slot.shape).astype(np.float32) * 0.1
        for name, slot in convert.slots(module).items()
    }


def mutate(tensors, name, value):
    return {**tensors, name: value}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "fc2.bias"}, "missing fc2.bias"),
        (lambda t: mutate(t, "fc9.bias", t["fc2.bias"]), "unknown fc9.bias"),
        (lambda t: mutate(t, "fc1.weight", t["fc1.weight"].T), r"fc1.weight has shape \[4, 8\]"),
        (lambda t: mutate(t, "fc1.bias", t["fc1.bias"].astype("f8")), "fc1.bias has dtype float64"),
        (lambda t: mutate(t, "fc2.bias", t["fc2.bias"] * np.nan), "fc2.bias holds NaN"),
    ],
)
def test_mutated_tensors_are_named(change, message):
    module = models.MLP((4, 8, 3))
    with pytest.raises(ValueError, match=message):
        convert.from_state_dict(module, change(state(module)))


@pytest.mark.fast
def test_wrong_architecture_and_container():
    with pytest.raises(ValueError, match="unknown architecture 'vgg99'"):
        convert.load("nowhere.pt", "vgg99")
    with pytest.raises(ValueError, match="no state dict found"):
        convert.state_dict({"epoch": 3})
    with pytest.raises(ValueError, match="got int"):
        convert.state_dict(3)


@pytest.mark.fast
def test_parity_helper():
    model = models.mlp((4, 8, 3), key=jax.random.key(0))
    x = jnp.ones((2, 4))
    assert convert.check_parity(model, x, model(x)) < 1e-6
    with pytest.raises(ValueError, match="parity failed"):
        convert.check_parity(model, x, model(x) * 1.01)
