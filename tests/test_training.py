"""Training reaches its goals, repeats itself and survives interruptions."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import wdjax
from wdjax import data, image, metrics, models, program, training
from wdjax.attacks import PGD, WDA
from wdjax.files import persist

fast = pytest.mark.fast


def layers(params, x):
    x = x.reshape(len(x), -1)
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def mlp(*sizes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    shapes = zip(keys, sizes, sizes[1:])
    start = jax.nn.initializers.he_normal()
    return wdjax.Model(layers, [{"w": start(k, (a, b)), "b": jnp.zeros(b)} for k, a, b in shapes])


def convolve(params, x):
    x = jax.lax.conv_general_dilated(
        x, params["kernel"], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(x).reshape(len(x), -1) @ params["out"]


def convnet():
    start, keys = jax.nn.initializers.he_normal(), jax.random.split(jax.random.key(0))
    params = {"kernel": start(keys[0], (4, 4, 1, 4)), "out": start(keys[1], (36, 10))}
    return wdjax.Model(convolve, params)


def same(first, second, exactly=True):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second)):
        assert a.dtype == b.dtype
        if exactly:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@functools.cache
def digits():
    pytest.importorskip("sklearn")
    return data.digits()


@pytest.fixture
def blobs():
    """Two classes that a line separates; as images, so that a convolution takes them too."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 96)
    x = np.clip(0.1 * rng.normal(size=(96, 8, 8, 1)) + 0.3 + 0.4 * y[:, None, None, None], 0, 1)
    return x.astype(np.float32), y


def robust(model, samples, eps):
    return float(wdjax.run(PGD(steps=20), model, samples.x, samples.y, eps=eps).accuracy)


def test_standard_and_adversarial_training_on_digits(key):
    train, test = digits()
    start = mlp(64, 64, 64, 10)
    standard = training.train(start, train.x, train.y, key=key)
    adversarial = training.train(
        start, train.x, train.y, key=key, attack=PGD(steps=5), eps=0.1, epochs=40
    )
    for trained in (standard, adversarial):
        assert metrics.accuracy(trained.model(test.x), test.y) > 0.95
        assert np.all(np.isfinite(trained.history))
        assert trained.history.loss[-1] < trained.history.loss[0] / 2
    assert robust(adversarial.model, test, 0.1) > robust(standard.model, test, 0.1) + 0.15
    np.testing.assert_array_equal(standard.history.accuracy, standard.history.robust_accuracy)
    assert np.all(adversarial.history.robust_accuracy <= adversarial.history.accuracy)


@fast
def test_distributional_training_weighs_by_equation_11(blobs, key):
    """Without a step, one epoch of one batch reports the distribution that ``run`` finds."""
    x, y = blobs
    attack, model = WDA(steps=4, probe=2), mlp(64, 2)
    trained = training.train(
        model, x, y, key=key, attack=attack, eps=0.1, kappa=2.0, epochs=1, batch_size=96,
        optimizer=optax.sgd(0.0),
    )  # fmt: skip
    found = wdjax.run(attack, model, x, y, eps=0.1, kappa=2.0, skip_misclassified=False)
    assert trained.history.robust_accuracy[0] == pytest.approx(float(found.accuracy), abs=1e-3)
    assert np.all(found.weight == 0.5)
    assert trained.history.robust_accuracy[0] < trained.history.accuracy[0]


@fast
def test_equal_keys_give_equal_parameters(blobs):
    attack = PGD(steps=2, random_start=True, step_size=0.04)
    runs = [
        training.train(
            mlp(64, 2), *blobs, key=jax.random.key(seed), epochs=2, batch_size=40,
            attack=attack, eps=0.05,
        )
        for seed in (0, 0, 1)
    ]  # fmt: skip
    same(runs[0], runs[1])
    assert not np.array_equal(runs[0].model.args[0][0]["w"], runs[2].model.args[0][0]["w"])


@fast
@pytest.mark.parametrize("attack", [None, PGD(steps=2)])
def test_both_ways_of_looping_agree(blobs, key, attack, monkeypatch):
    options = {} if attack is None else {"attack": attack, "eps": 0.05}

    def trained():
        return training.train(
            mlp(64, 8, 2), *blobs, key=key, epochs=2, batch_size=40, **options,
            optimizer=optax.sgd(0.1),
        )  # fmt: skip

    looped = trained()
    monkeypatch.setattr(program, "loops_well", lambda jaxpr: False)
    same(looped, trained(), exactly=False)


@fast
def test_only_convolutions_that_loop_well_are_looped(blobs, key):
    """On a CPU, XLA runs the gradients of ``models.conv`` fast inside a loop, plain ones not."""
    x = jnp.asarray(blobs[0])[:1]

    def at_once(model, x):
        return program.loops_well(jax.make_jaxpr(training.gradients)(model, x))

    on_cpu = jax.default_backend() == "cpu"
    assert at_once(mlp(64, 2), x)
    assert at_once(convnet(), x) != on_cpu
    assert at_once(models.wong_mnist(key=key), jnp.ones((1, 28, 28, 1)))
    assert at_once(models.resnet2b(key=key), jnp.ones((1, 32, 32, 3)))
    trained = training.train(convnet(), *blobs, key=key, epochs=4, batch_size=32)
    assert trained.history.loss[-1] < trained.history.loss[0]


@fast
def test_interrupted_training_resumes_to_the_same_numbers(blobs, key, tmp_path):
    options = {"key": key, "epochs": 4, "batch_size": 40, "attack": PGD(steps=2), "eps": 0.05}
    whole = training.train(mlp(64, 2), *blobs, **options)
    folder = tmp_path / "run"
    first = training.train(
        mlp(64, 2), *blobs, **options, checkpoint=folder, callback=lambda now: now.epoch == 2
    )
    assert first.epoch == 2
    assert np.isnan(first.history.loss[2:]).all()
    asked = []
    resumed = training.train(
        mlp(64, 2), *blobs, **options, checkpoint=folder, callback=lambda now: asked.append(now)
    )
    assert [int(now.epoch) for now in asked] == [3, 4]
    same(whole, resumed)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(ValueError, match="something else"):
        training.train(mlp(64, 2), *blobs, **options | {"epochs": 5}, checkpoint=folder)
    with pytest.raises(ValueError, match=r"other settings.*eps was 0.05 and is 0.06"):
        training.train(mlp(64, 2), *blobs, **options | {"eps": 0.06}, checkpoint=folder)
    assert persist.manifest(folder)["settings"]["epochs"] == "4"


@fast
def test_any_pytree_survives_a_checkpoint(blobs, tmp_path):
    x, y = blobs
    model = mlp(64, 3)
    result = wdjax.run(PGD(steps=2), model, x, y, eps=0.1)
    tree = {"model": model, "result": result, "n": np.float32(3)}
    for _ in range(2):  # Replaces its predecessor.
        persist.save(tmp_path / "tree", tree)
    found = persist.restore(tmp_path / "tree", jax.tree.map(jnp.zeros_like, tree))
    same(jax.tree.map(jnp.asarray, tree), found)
    np.testing.assert_array_equal(found["model"](x), model(x))


@fast
def test_interrupted_replacement_leaves_the_old_checkpoint(tmp_path):
    persist.save(tmp_path / "run", {"w": jnp.ones(2)})
    (tmp_path / "run").rename(tmp_path / ".run.999999999.old")
    found = persist.restore(tmp_path / "run", {"w": jnp.zeros(2)})
    assert found["w"].tolist() == [1, 1]
    persist.save(tmp_path / "run", {"w": jnp.full(2, 5.0)})
    assert persist.restore(tmp_path / "run", {"w": jnp.zeros(2)})["w"].tolist() == [5, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@fast
@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, "w is float32.*expected float32\\[3, 2\\]"),
        ({"w": jnp.ones((2, 3)), "b": jnp.ones(2, int)}, "b is float32.*expected int32"),
        ({"w": jnp.ones((2, 3))}, "it has b besides"),
        ({"w": jnp.ones((2, 3)), "b": jnp.ones(2), "c": jnp.ones(1)}, "it has no c"),
    ],
)
def test_checkpoints_of_something_else_are_refused(tmp_path, like, message):
    persist.save(tmp_path / "run", {"w": jnp.ones((2, 3)), "b": jnp.ones(2)})
    with pytest.raises(ValueError, match=message):
        persist.restore(tmp_path / "run", like)


@fast
def test_damaged_checkpoints_are_refused_or_whole(tmp_path):
    # One leaf: of several, Orbax leaves reads unfinished, and their warnings surface much later.
    tree = {"w": jax.random.normal(jax.random.key(0), (300, 40))}
    refused = 0
    persist.save(tmp_path / "whole", tree)
    files = [path for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    for number, path in enumerate(files):
        content = path.read_bytes()
        for cut, damaged in enumerate((content[: len(content) // 2], b"")):
            # A copy each, since TensorStore remembers what it read from a path.
            copy = tmp_path / f"copy{number}-{cut}"
            shutil.copytree(tmp_path / "whole", copy)
            (copy / path.relative_to(tmp_path / "whole")).write_bytes(damaged)
            try:
                same(persist.restore(copy, tree), tree)
            except ValueError:
                refused += 1
    assert refused >= 4


@fast
def test_save_leaves_foreign_folders_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="not a checkpoint"):
        persist.save(tmp_path, {"w": jnp.ones(2)})
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    with pytest.raises(ValueError, match="not a checkpoint"):
        persist.restore(tmp_path / "absent", {"w": jnp.ones(2)})


@fast
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"attack": PGD()}, "no eps"),
        ({"eps": 0.1}, "go with an attack: got eps=0.1"),
        ({"kappa": 2.0}, "go with an attack"),
        ({"attack": PGD(), "eps": 0.1, "kappa": 0.5}, "kappa must be"),
        ({"attack": PGD(), "eps": -0.1}, "eps"),
        ({"optimizer": optax.sgd(1e30)}, "not finite"),
        ({"optimizer": "adam"}, r"optimizer must be of optax.*'adam'"),
        ({"loss": "ce"}, "loss must be a function"),
        ({"order": 2}, "order goes with an attack"),
    ],
)
def test_misuse_is_refused(blobs, key, options, message):
    with pytest.raises(ValueError, match=message):
        training.train(mlp(64, 8, 2), *blobs, key=key, **options)


@fast
def test_bad_samples_and_models_are_refused(blobs, key):
    x, y = blobs
    with pytest.raises(ValueError, match="box"):
        training.train(mlp(64, 2), x * 255, y, key=key)
    with pytest.raises(ValueError, match="labels"):
        training.train(mlp(64, 2), x, y + 1, key=key)
    counted = wdjax.Model(lambda p, x: layers(p[0], x), [mlp(64, 2).args[0], jnp.asarray(0)])
    with pytest.raises(ValueError, match="floats"):
        training.train(counted, x, y, key=key)


@pytest.mark.parametrize("kind", ["linf", "w1"])
def test_radii_may_follow_a_schedule(kind, tmp_path):
    """Each epoch is that of its own radius, within 0 nothing is attacked, and training resumes."""
    x, y = digits().train.take(128)
    ball = image.ImageWasserstein(3)
    attack = PGD(steps=2) if kind == "linf" else image.FrankWolfe(ball, steps=2, sweeps=0)
    how = {"key": jax.random.key(0), "batch_size": 64, "attack": attack, "epochs": 2}
    radii = [0.5, 0.0]

    def trained(eps, **more):
        seen = []
        training.train(mlp(64, 16, 10), x, y, eps=eps, **how, callback=seen.append, **more)
        return seen

    first, last = trained(np.array(radii))
    alone = trained(radii[0])
    same(first.model, alone[0].model)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (last, alone[1]))))
    clean, robust = last.history.accuracy, last.history.robust_accuracy
    assert robust[0] < clean[0]
    assert robust[1] == pytest.approx(clean[1])
    if kind == "linf":
        kept = {"checkpoint": tmp_path / "kept"}
        training.train(mlp(64, 16, 10), x, y, eps=radii, **how, **kept, callback=lambda now: True)
        same(trained(radii, **kept)[-1], last)
        with pytest.raises(ValueError, match=r"another|belongs"):
            trained([0.5, 0.1], **kept)
        with pytest.raises(ValueError, match=r"one an epoch \[2\], got 3"):
            trained([0.1, 0.2, 0.3])
        with pytest.raises(ValueError, match="finite and at least 0"):
            trained([0.1, -1.0])
