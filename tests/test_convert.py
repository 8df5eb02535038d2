"""The eight small weight files, parity with PyTorch, and checkpoints that must be refused."""

import argparse

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from wdjax import models
from wdjax.models import convert, zoo

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


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["f2", "f8", ml_dtypes.bfloat16])
def test_half_and_double_files_are_cast_on_request(kind):
    module = models.MLP((4, 8, 3))
    tensors = {name: value.astype(kind) for name, value in state(module).items()}
    with pytest.raises(ValueError, match=r"fc1\.weight has dtype .* cast=True"):
        convert.from_state_dict(module, tensors)
    model, report = convert.from_state_dict(module, tensors, cast=True)
    expected = tensors["fc1.weight"].astype(np.float32).T
    np.testing.assert_array_equal(model.args[0]["fc1"]["kernel"], expected)
    assert "4 tensors of" in str(report)
    with pytest.raises(ValueError, match=r"fc1\.bias has dtype int32, expected float32"):
        convert.from_state_dict(module, mutate(tensors, "fc1.bias", np.zeros(8, "i4")), cast=True)
    if kind == "f8":
        far = mutate(tensors, "fc1.bias", np.full(8, 1e300))
        with pytest.raises(ValueError, match=r"fc1\.bias holds NaN or infinity"):
            convert.from_state_dict(module, far, cast=True)


@pytest.mark.fast
def test_parameters_are_copies():
    tensors = state(models.MLP((4, 8, 3)))
    model, _ = convert.from_state_dict(models.MLP((4, 8, 3)), tensors)
    before = np.array(model.args[0]["fc1"]["bias"]), np.array(model.args[0]["fc1"]["kernel"])
    for tensor in tensors.values():
        tensor[:] = 9
    np.testing.assert_array_equal(model.args[0]["fc1"]["bias"], before[0])
    np.testing.assert_array_equal(model.args[0]["fc1"]["kernel"], before[1])


def save(path, tensors, prefix=""):
    safetensors.numpy.save_file({prefix + n: np.array(v) for n, v in tensors.items()}, path)
    return path


@pytest.mark.fast
def test_a_safetensors_file_is_a_checkpoint_too(tmp_path):
    tensors = state(models.MLP((4, 8, 3)))
    path = save(tmp_path / "net.safetensors", tensors, "module.")
    model, report = convert.load(path, "mlp")
    assert report.architecture["options"] == {"sizes": (4, 8, 3)}
    np.testing.assert_array_equal(model.args[0]["fc2"]["bias"], tensors["fc2.bias"])


def test_layers_of_unknown_order_are_refused(tmp_path):
    """By name ``hidden`` comes before ``input``, in the file after it; both fit."""
    draw = np.random.default_rng(0)

    def saved(*shapes):
        tensors = {}
        for name, (rows, columns) in zip(("input", "hidden", "output"), shapes):
            weight = draw.normal(size=(rows, columns)).astype(np.float32)
            tensors |= {f"{name}.weight": weight, f"{name}.bias": weight[:, 0]}
        torch.save({n: torch.tensor(v) for n, v in tensors.items()}, tmp_path / "net.pt")
        return tensors

    torch = pytest.importorskip("torch")
    saved((4, 4), (4, 4), (3, 4))
    with pytest.raises(ValueError, match="input, hidden, output as in the file, or hidden, input"):
        convert.load(tmp_path / "net.pt", "mlp")
    tensors = saved((5, 4), (6, 5), (3, 6))  # Only the file's order fits.
    model, _ = convert.load(tmp_path / "net.pt", "mlp")
    x = draw.random((2, 4)).astype(np.float32)
    h = x
    for name in ("input", "hidden", "output"):
        h = np.maximum(h, 0) if name != "input" else h
        h = h @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
    np.testing.assert_allclose(model(jnp.asarray(x)), h, rtol=1e-4, atol=1e-4)


WRN = "Carmon2019Unlabeled", "cifar10", "Linf"


@pytest.fixture
def narrow(tmp_path):
    """A WRN-16-1 under the name of a WRN-28-10."""
    return save(tmp_path / "narrow.pt", state(zoo.build("wide_resnet", {"depth": 16, "width": 1})))


@pytest.mark.fast
def test_other_sizes_than_published_need_to_be_asked_for(narrow, tmp_path):
    tensors = state(zoo.build("wide_resnet", {"depth": 16, "width": 1}))
    tensors |= {n: np.abs(v) for n, v in tensors.items() if n.endswith("var")}
    save(narrow, tensors)
    refusal = r"no Carmon.*: depth is 16, not 28, width is 1, not 10 \(see .*pass depth=16, width=1"
    with pytest.raises(ValueError, match=refusal):
        convert.load_robustbench(*WRN, narrow)
    for sizes in ({"depth": 16, "width": 1}, {"any_size": True}, {"any_size": True, "width": 1}):
        _, report = convert.load_robustbench(*WRN, narrow, **sizes)
        assert "depth is 16, in the published model 28" in str(report)
    with pytest.raises(ValueError, match="width is 1, not 10"):
        convert.load_robustbench(*WRN, narrow, depth=16)
    with pytest.raises(ValueError, match="has shape"):
        convert.load_robustbench(*WRN, narrow, depth=16, width=2, any_size=True)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dept": 28}, "does not take these options: dept; it takes depth, width, classes"),
        ({"normalize": "imagenet"}, "does not take these options: normalize"),
        ({"width": 2.0}, r"width must be a whole number, got 2\.0"),
        ({"width": True}, "width must be a whole number, got True"),
        ({"width": (1, 2)}, "width must be a whole number"),
        ({"depth": 1 << 40}, "depth must be from 1 to 200"),
        ({"width": -3}, "width must be from 1"),
    ],
)
def test_options_that_no_model_has(narrow, options, message):
    with pytest.raises(ValueError, match=message):
        convert.load_robustbench(*WRN, narrow, **options)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", WRN[0], "--normalize", "2x-1"], "--normalize goes with --arch"),
        (["--arch", "mlp", "--any-size"], "--any-size goes with --name"),
        (["--arch", "mlp", "--option", "depth"], "takes NAME=VALUE"),
        (["--arch", "mlp", "--option", "path=1"], "does not take these options: path"),
        (["--arch", "mlp", "--name", WRN[0]], "either --name"),
        (["--arch", "mlp", "--out", "/proc/no/where"], "cannot be written|not writable"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(narrow, arguments, message):
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    with pytest.raises(ValueError, match=message):
        convert.main(parser.parse_args([str(narrow), *arguments]))


def said(family, options):
    """What building says: nothing, or the words of a ValueError."""
    try:
        zoo.build(family, options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", sorted(set(zoo.FAMILIES) - {"mlp"}))
def test_no_sizes_make_a_constructor_stumble(family):
    for name, default in zoo.defaults(family).items():
        for size in (1, 3, 1000):
            value = (size,) * len(default) if isinstance(default, tuple) else size
            words = said(family, {name: value})
            assert not any(word in words for word in ("zero", "domain", "modulo", "range"))
