"""Models are pytrees whose functions never retrace, and convolutions agree with ``lax.conv``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import models
from wdjax.models import conv as conv_module

BUILD = {
    "mlp": (lambda key: models.mlp((784, 20, 10), key=key), (28, 28, 1)),
    "wong_mnist": (lambda key: models.wong_mnist(key=key), (28, 28, 1)),
    "trades_smallcnn": (lambda key: models.trades_smallcnn(key=key), (28, 28, 1)),
    "resnet2b": (lambda key: models.resnet2b(key=key), (32, 32, 3)),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", BUILD)
def test_new_parameters_never_retrace(name):
    build, shape = BUILD[name]
    first, second = build(jax.random.key(0)), build(jax.random.key(1))
    assert first.func == second.func
    assert hash(first.func) == hash(second.func)
    traces = []

    @jax.jit
    def forward(model, x):
        traces.append(1)
        return model(x)

    x = jnp.linspace(0, 1, 2 * np.prod(shape)).reshape(2, *shape)
    assert forward(first, x).shape == (2, 10)
    assert not np.allclose(forward(first, x), forward(second, x))
    assert len(traces) == 1


@pytest.mark.fast
@pytest.mark.parametrize("name", BUILD)
def test_features_end_before_the_last_layer(name):
    build, shape = BUILD[name]
    model = build(jax.random.key(0))
    x = jnp.linspace(0, 1, 2 * np.prod(shape)).reshape(2, *shape)
    features = models.features(model)(x)
    last = {"mlp": "fc2", "wong_mnist": "fc2", "trades_smallcnn": "fc3", "resnet2b": "linear2"}[
        name
    ]
    layer = model.args[0][last]
    np.testing.assert_allclose(
        features @ layer["kernel"] + layer["bias"], model(x), rtol=1e-5, atol=1e-5
    )


@pytest.mark.fast
def test_a_bank_of_models_is_one_model():
    bank = [models.mlp((4, 8, 3), key=jax.random.key(i)) for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *bank)
    x = jnp.ones((2, 4))
    logits = jax.vmap(lambda model: model(x))(stacked)
    np.testing.assert_allclose(logits, jnp.stack([model(x) for model in bank]), rtol=1e-6)


def test_features_of_a_foreign_model():
    with pytest.raises(ValueError, match="features needs a model from"):
        models.features(jax.tree_util.Partial(jnp.dot, jnp.eye(2)))


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(2, 2, 5, 3), (2, 5, 2, 3), (0, 5, 5, 3)])
def test_convolutions_may_have_nothing_to_say(shape):
    kernel = jnp.ones((3, 3, 3, 4))
    value, pullback = jax.vjp(lambda x: conv_module.conv(x, kernel), jnp.ones(shape))
    assert value.shape == (shape[0], shape[1] - 2, shape[2] - 2, 4)
    assert pullback(value)[0].shape == shape


@pytest.mark.fast
@pytest.mark.parametrize("channels", [1, 3, 16])
@pytest.mark.parametrize("outputs", [5, 16, 40])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, ((0, 1), (3, 1))])
def test_every_formulation_is_the_same_convolution(channels, outputs, size, stride, padding):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 17, 18, channels)).astype(np.float32)
    kernel = rng.normal(size=(size, size, channels, outputs)).astype(np.float32)
    pads = ((padding, padding),) * 2 if isinstance(padding, int) else padding

    def plain(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def ours(x, kernel):
        return conv_module.conv(x, kernel, stride, padding)

    def back(f):
        """Gradients in both arguments, in one, and a directional derivative."""
        value, pullback = jax.vjp(f, x, kernel)
        alone = jax.grad(lambda x: jnp.sum(f(x, kernel) ** 2))(x)
        return value, *pullback(plain(x, kernel)), alone, jax.jvp(f, (x, kernel), (x, kernel))[1]

    np.testing.assert_allclose(ours(x, kernel), plain(x, kernel), rtol=1e-5, atol=5e-5)
    for f, g in zip(jax.jit(lambda: back(ours))(), jax.jit(lambda: back(plain))()):
        np.testing.assert_allclose(f, g, rtol=1e-4, atol=1e-3)


@pytest.mark.fast
@pytest.mark.parametrize("side", [8, 24])
@pytest.mark.parametrize("padding", [0, 1])
def test_winograd_is_the_same_convolution(side, padding):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, side, side, 96)).astype(np.float32)
    kernel = rng.normal(size=(3, 3, 96, 96)).astype(np.float32) / 30

    def plain(x):
        pads = ((padding, padding),) * 2
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    ours, back = jax.vjp(lambda x: conv_module.conv(x, kernel, 1, padding), x)
    theirs, plain_back = jax.vjp(plain, x)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    np.testing.assert_allclose(back(theirs)[0], plain_back(theirs)[0], atol=2e-5)
