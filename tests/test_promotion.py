"""All of it runs where JAX promotes neither types nor ranks; tracing shows most, uncompiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_contract import ATTACKS, EVERY_NORM, IN_TURN, make
from test_misuse import BALL, CALLS, KEY, PICTURES, X, Y, call

import wdjax
from wdjax import attacks, certify, ensembles, image, lipschitz, models, nppr, smoothing, training
from wdjax import transductive as games
from wdjax.models import zoo

NET = models.mlp((12, 8, 4), key=KEY)
SAMPLES, LABELS = np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 2, 3, 2), np.array([0, 1])


@pytest.fixture(autouse=True)
def _strictly():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.fast
@pytest.mark.parametrize(("name", "norm"), [*EVERY_NORM, *IN_TURN])
def test_attacks(name, norm):
    """As loops over all samples, with ``eps`` traced: all that rounds take is in them."""
    attack, how = make(name, norm), ATTACKS[name][1]
    found = jax.eval_shape(
        lambda x, eps: wdjax.run(attack, NET, x, LABELS, eps=eps, key=KEY, **how), SAMPLES, 0.1
    )
    assert found.x_adv.dtype == np.float32


@pytest.mark.fast
@pytest.mark.parametrize("attack", [image.FrankWolfe, image.SinkhornPGD, image.DualProjection,
                                    image.NearestTransport])  # fmt: skip
def test_attacks_on_images(attack):
    net, own = models.norm_cnn((4, 4, 1), key=KEY), attack(image.ImageWasserstein(3))
    found = jax.eval_shape(
        lambda x, eps: wdjax.run(own, net, x, LABELS, eps=eps, key=KEY), PICTURES, 0.1
    )
    assert found.x_adv.dtype == np.float32


# Sizes that are valid and small.
SMALL = {
    "mlp": ({"sizes": (48, 5)}, (4, 4, 3)),
    "wong_mnist": ({}, (28, 28, 1)),
    "trades_smallcnn": ({}, (28, 28, 1)),
    "wide_resnet": ({"depth": 10, "width": 1}, (32, 32, 3)),
    "convnext": ({"depths": (1,) * 4, "dims": (8,) * 4}, (32, 32, 3)),
    "vit": ({"width": 8, "depth": 2, "heads": 2}, (224, 224, 3)),
    "swin": ({"width": 8, "depths": (1,) * 4, "heads": (1,) * 4}, (224, 224, 3)),
}


@pytest.mark.fast
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_models(family):
    options, shape = SMALL.get(family, ({}, (32, 32, 3)))
    model = models.functional(zoo.build(family, options))
    images = jax.ShapeDtypeStruct((2, *shape), np.float32)
    assert jax.eval_shape(model.func, model.args[0], images).dtype == np.float32
    if any(leaf is None for leaf in jax.tree.leaves(
        models.parameters(model), is_leaf=lambda leaf: leaf is None
    )):  # fmt: skip
        out, moved = jax.eval_shape(models.training_pass, model, images)
        assert out.dtype == np.float32
        assert jax.tree.structure(moved) == jax.tree.structure(model)


OWN = CALLS | {
    certify.growth_bound: CALLS[certify.growth_bound] | {"radii": [0.1]},
    nppr.estimate: CALLS[nppr.estimate] | {"draws": 20},
    nppr.fit: CALLS[nppr.fit] | {"schedule": nppr.Schedule(steps=2)},
    nppr.train_model: CALLS[nppr.train_model] | {"epochs": 1},
    smoothing.certify: CALLS[smoothing.certify] | {"n": 20, "eps": 0.01},
    training.train: CALLS[training.train] | {"epochs": 1},
}
RUN = (
    wdjax.search, ensembles.bisect, certify.margin_bounds, certify.radius, certify.growth_bound,
    certify.interval_jacobian, certify.layer_product, certify.trainable_bounds,
    lipschitz.local_lipschitz, lipschitz.global_lipschitz, lipschitz.sampled_lipschitz,
    lipschitz.global_radius, certify.interval_start,
    smoothing.certify, smoothing.soft, nppr.estimate, nppr.fit, nppr.train_model,
    image.entropic_distance, training.train, games.train_classifier, games.play,
)  # fmt: skip


@pytest.mark.parametrize("function", [pytest.param(f, id=f"{f.__module__}.{f.__name__}")
                                      for f in RUN])  # fmt: skip
def test_what_the_host_carries_on(function):
    net = models.mlp((4, 5, 3), key=KEY)
    given = OWN[function]
    call(function, given | ({"model": net} if "model" in given else {}))


@pytest.mark.parametrize("method", ["interval", "crown", "alpha"])
def test_certificates_are_the_same(method):
    net = models.mlp((4, 5, 3), key=KEY)
    how = BALL | {"model": net, "method": method}
    strict = certify.margin_bounds(**how)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        np.testing.assert_array_equal(strict, certify.margin_bounds(**how))


def test_the_users_model_is_still_held_to_it():
    """What JAX was told to refuse is refused in a model, by certificates too."""
    loose = wdjax.Model(lambda w, x: x @ w + jnp.arange(3), jnp.ones((4, 3)))
    for ask in (
        lambda: wdjax.run(attacks.PGD(), loose, X, Y, eps=0.1),
        lambda: certify.certified(loose, X, Y, norm=2, eps=0.1),
        lambda: certify.trainable_bounds(loose, X, Y, norm=2, eps=0.1),
        lambda: nppr.estimate(**CALLS[nppr.estimate] | {"model": loose}),
    ):
        with pytest.raises(ValueError, match=r"does not accept x.*(promotion|broadcast)"):
            ask()
