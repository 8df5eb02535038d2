"""PyTorch modules: values, gradients and certificates are those of the module and of its twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import certify, convert

torch = pytest.importorskip("torch", reason="the modules are PyTorch's")
pytest.importorskip("onnxscript", reason="PyTorch's exporter needs onnxscript")


class Net(torch.nn.Module):
    """Convolutions, BatchNorm, a residual connection and both pools."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
        self.conv2, self.fc = torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv1(x)))
        x = torch.nn.functional.max_pool2d(x + torch.relu(self.conv2(x)), 2)
        x = torch.nn.functional.avg_pool2d(x, 2)
        return self.fc(torch.flatten(x, 1))


def twin(state, x):
    """The same by hand."""

    def conv(name, x):
        kernel, axes = state[f"{name}.weight"].transpose(2, 3, 1, 0), ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=axes)
        return out + state[f"{name}.bias"][None, None, None]

    scale = state["bn.weight"] / jnp.sqrt(state["bn.running_var"] + 1e-5)
    x = (conv("conv1", x) - state["bn.running_mean"][None, None, None]) * scale[None, None, None]
    x = jax.nn.relu(x + state["bn.bias"][None, None, None])
    x = x + jax.nn.relu(conv("conv2", x))
    x = jnp.max(x.reshape(len(x), 4, 2, 4, 2, 4), axis=(2, 4))
    x = jnp.mean(x.reshape(len(x), 2, 2, 2, 2, 4), axis=(2, 4)).transpose(0, 3, 1, 2)
    return x.reshape(len(x), -1) @ state["fc.weight"].T + state["fc.bias"]


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        net.bn.running_mean.normal_()
        net.bn.running_var.uniform_(0.5, 1.5)
    return net


@pytest.fixture(scope="module")
def model(net):
    return convert.from_torch(net, torch.rand(1, 2, 8, 8)).model


X = np.random.default_rng(0).uniform(size=(3, 8, 8, 2)).astype(np.float32)


def test_logits_and_gradients_are_those_of_the_module(net, model):
    weights = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    images = torch.from_numpy(X.transpose(0, 3, 1, 2).copy()).requires_grad_()
    theirs = net(images)
    (theirs * torch.from_numpy(weights)).sum().backward()
    ours, back = jax.vjp(jax.jit(lambda x: model(x)), X)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)
    slope = images.grad.numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(back(weights)[0], slope, atol=1e-5 * np.abs(slope).max())
    assert set(model.args[0]) >= {"conv2.weight", "fc.weight", "fc.bias"}


def test_certificates_are_those_of_the_twin(net, model):
    state = {name: jnp.asarray(tensor.numpy()) for name, tensor in net.state_dict().items()}
    own = wdjax.Model(twin, state)
    np.testing.assert_allclose(model(X), own(X), atol=1e-5)
    y = np.asarray(own(X)).argmax(axis=1)
    for method, norm in (("interval", jnp.inf), ("crown", 2)):
        how = {"norm": norm, "eps": 0.01, "method": method}
        one, other = (certify.margin_bounds(each, X, y, **how) for each in (model, own))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_training_form_is_refused_by_name(net):
    net.bn.train()
    try:
        with pytest.raises(ValueError, match=r"training form \(bn\).*module\.eval\(\)"):
            convert.from_torch(net, torch.rand(1, 2, 8, 8))
    finally:
        net.eval()


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (torch.rand(2), r"\[n, \*shape\] in float32, got \[2\]"),
        (torch.zeros(1, 2, 8, 8, dtype=torch.int32), "float32, got .* in torch.int32"),
        (torch.rand(0, 2, 8, 8), "float32"),
        (torch.rand(1, 3, 8, 8), r"does not run on the example, \[1, 3, 8, 8\]"),
    ],
)
def test_examples_that_do_not_fit(net, example, said):
    with pytest.raises(ValueError, match=said):
        convert.from_torch(net, example)


def test_statistics_of_the_batch_are_refused():
    class Centred(torch.nn.Module):
        def forward(self, x):
            return torch.flatten(x - x.mean(dim=0, keepdim=True), 1)

    with pytest.raises(ValueError, match="depends on the rest of its batch"):
        convert.from_torch(Centred().eval(), torch.rand(1, 1, 2, 2))


def test_images_with_their_channels_first_are_refused():
    """A flattened image would be taken in the wrong order without a word."""
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10)).eval()
    model, report = convert.from_torch(module, torch.zeros(1, 3, 8, 8))
    assert report.input_shape == (8, 8, 3)
    assert model(np.zeros((2, 8, 8, 3), np.float32)).shape == (2, 10)
    with pytest.raises(ValueError, match=r"takes samples \[n, 8, 8, 3\].*got \[2, 3, 8, 8\]"):
        model(np.zeros((2, 3, 8, 8), np.float32))
