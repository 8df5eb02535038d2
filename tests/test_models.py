"""Models are pytrees whose functions never retrace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wdjax
from wdjax import attacks, models
from wdjax.models import zoo
from wdjax.models.pytorch import from_state_dict, slots

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


@pytest.mark.fast
@pytest.mark.parametrize("name", BUILD)
def test_the_head_of_the_features_is_the_model(name):
    build, shape = BUILD[name]
    model = build(jax.random.key(0))
    x = jnp.linspace(0, 1, 2 * np.prod(shape)).reshape(2, *shape)
    parts = models.head(model), models.features(model)
    np.testing.assert_array_equal(parts[0](parts[1](x)), model(x))
    assert models.head(build(jax.random.key(1))).func == parts[0].func


@pytest.mark.fast
def test_parts_of_a_module_without_them():
    model = models.functional(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="Linear has no method 'classify'"):
        models.head(model)
    with pytest.raises(ValueError, match="head needs a model from"):
        models.head(jax.tree_util.Partial(jnp.dot, jnp.eye(2)))


def wide(seed=0):
    """A small WRN whose every parameter is random."""
    module, rng = zoo.build("wide_resnet", {"depth": 10, "width": 1}), np.random.default_rng(seed)
    tensors = {
        name: rng.uniform(0.2, 0.9, slot.shape).astype(np.float32)
        for name, slot in slots(module).items()
    }
    return tensors, from_state_dict(module, tensors).model


def test_batch_statistics_are_those_of_pytorch_in_training(monkeypatch):
    torch = pytest.importorskip("torch", reason="the reference is PyTorch's BatchNorm in training")
    import torch_reference

    def of_batch(state, name, x):
        weight, bias = (state[f"{name}.{leaf}"] for leaf in ("weight", "bias"))
        return torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)

    monkeypatch.setattr(torch_reference, "bn", of_batch)
    tensors, model = wide()
    x = np.random.default_rng(1).uniform(0, 1, (5, 32, 32, 3)).astype(np.float32)
    state = {name: torch.tensor(value) for name, value in tensors.items()}
    theirs = torch_reference.wide_resnet(state, torch.tensor(x.transpose(0, 3, 1, 2))).numpy()
    adapted = models.batch_statistics(model)
    ours = np.asarray(jax.jit(adapted)(x))
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5 * np.abs(theirs).max())
    assert np.abs(np.asarray(jax.jit(model)(x)) - theirs).max() > 0.1 * np.abs(theirs).max()
    assert adapted.func == models.batch_statistics(wide(2)[1]).func
    assert models.batch_statistics(adapted).func == adapted.func
    parts = models.head(adapted), models.features(adapted)
    np.testing.assert_array_equal(jax.jit(lambda x: parts[0](parts[1](x)))(x), ours)


@pytest.mark.fast
def test_a_model_of_its_batch_is_not_attacked_sample_by_sample():
    adapted = models.batch_statistics(wide()[1])
    x = np.random.default_rng(1).uniform(0, 1, (2, 32, 32, 3)).astype(np.float32)
    with pytest.raises(ValueError, match=r"batch|company"):
        wdjax.run(attacks.PGD(steps=1), adapted, x, np.array([0, 1]), eps=0.1)
    with pytest.raises(ValueError, match="MLP has no BatchNorm"):
        models.batch_statistics(models.mlp((4, 3), key=jax.random.key(0)))


@pytest.mark.fast
@pytest.mark.parametrize(("family", "options", "layers"), [
    ("wide_resnet", {"depth": 10, "width": 1}, 7),
    ("vit", {"width": 8, "depth": 2, "heads": 2}, 5),
    ("convnext", {"depths": (1,) * 4, "dims": (8,) * 4}, 9),
    ("swin", {"width": 8, "depths": (1,) * 4, "heads": (1,) * 4}, 13),
])  # fmt: skip
def test_affine_parameters_of_every_norm(family, options, layers):
    module = zoo.build(family, options)
    params = models.functional(module).args[0]
    affine, rest = models.split_affine(params)
    kept = [path for path, _ in jax.tree_util.tree_leaves_with_path(rest)]
    assert len(affine) == layers
    assert not any("norm" in str(path) and "scale" in str(path) for path in kept)
    assert jax.tree.structure(models.join_affine(affine, rest)) == jax.tree.structure(params)
    with pytest.raises(ValueError, match="no layer nowhere"):
        models.join_affine({**affine, "nowhere": {}}, rest)


@pytest.mark.fast
def test_a_model_without_norms_has_no_affine_parameters():
    with pytest.raises(ValueError, match="no BatchNorm or LayerNorm"):
        models.split_affine(models.mlp((4, 3), key=jax.random.key(0)).args[0])
