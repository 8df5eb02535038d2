"""Models are pytrees whose functions never retrace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from wdjax import models

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
def test_layers_in_training_form_are_refused():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.out = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(self.drop(self.norm(x)))

    net = Net(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"drop \(Dropout\).*eval\(\)"):
        models.functional(net)
    net.drop.deterministic = True
    with pytest.raises(ValueError, match=r"norm \(BatchNorm\)"):
        models.functional(net)
    net.eval()
    x = jax.random.normal(jax.random.key(0), (5, 4))
    model = models.functional(net)
    np.testing.assert_allclose(model(x)[:1], model(x[:1]), rtol=1e-6)
