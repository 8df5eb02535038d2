"""What every public attack keeps, in one table."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import wdjax
from wdjax import attacks, norms, parallel, transport

NORMS = (1, 2, jnp.inf)
EPS = {1: 0.6, 2: 0.25, jnp.inf: 0.06}

FACTORIES = {
    "fgsm": attacks.fgsm,
    "pgd": functools.partial(attacks.pgd, steps=5),
    "pgd random": functools.partial(attacks.pgd, steps=4, random_start=True, iterate="last"),
    "pgd margin": functools.partial(attacks.pgd, steps=4, loss=wdjax.losses.margin),
    "wda": functools.partial(attacks.wda, steps=5, probe=3),
    "wda order 2 best": functools.partial(attacks.wda, steps=5, probe=3, order=2, iterate="best"),
    "wda top 2": functools.partial(attacks.wda, steps=4, probe=2, rivals=2),
    "wda order inf": functools.partial(attacks.wda, steps=4, probe=2, order=jnp.inf),
    "wda++": functools.partial(attacks.wda_plus_plus, steps=8, rivals=2),
    "wda++ order 2": functools.partial(attacks.wda_plus_plus, steps=8, order=2),
    "wda++ order inf": functools.partial(attacks.wda_plus_plus, steps=8, order=jnp.inf),
    "wda++ of the paper": functools.partial(attacks.wda_plus_plus, steps=8, ray_bisections=0),
    "distributional pgd": lambda **options: attacks.distributional(attacks.pgd(steps=4, **options)),
}
TABLE = [
    pytest.param(factory, norm, id=f"{name}, l{norm}")
    for name, factory in FACTORIES.items()
    for norm in NORMS
]
table = pytest.mark.parametrize(("factory", "norm"), TABLE)
once = pytest.mark.parametrize("factory", [pytest.param(f, id=n) for n, f in FACTORIES.items()])


def apply(params, x):
    x = x.reshape(len(x), -1)
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def make_model(seed=0, size=12, classes=4):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "w1": jax.random.normal(keys[0], (size, 16)),
        "b1": 0.3 * jax.random.normal(keys[1], (16,)),
        "w2": jax.random.normal(keys[2], (16, classes)),
        "b2": jnp.zeros(classes),
    }
    return wdjax.Model(apply, params)


def make_samples(model, n=24, seed=1):
    """Samples of which about one in six is misclassified."""
    x = jax.random.uniform(jax.random.key(seed), (n, 2, 3, 2))
    y = jnp.argmax(model(x), axis=-1)
    return x, jnp.where(jnp.arange(n) % 6 == 5, (y + 1) % 4, y)


model = make_model()
x, y = make_samples(model)
key = jax.random.key(7)


def attack_on(factory, norm, model=model, x=x, y=y, **options):
    options = {"eps": EPS[norm], "key": key, **options}
    return wdjax.run(factory(norm=norm), model, x, y, **options)


def close(a, b, tolerance=2e-5):
    """Equal decisions and close points: rounding may differ between programs."""
    np.testing.assert_array_equal(a.success, b.success)
    np.testing.assert_array_equal(a.clean, b.clean)
    np.testing.assert_allclose(a.x_adv, b.x_adv, atol=tolerance)
    np.testing.assert_allclose(a.weight, b.weight, atol=10 * tolerance)
    np.testing.assert_allclose(a.cost, b.cost, atol=10 * tolerance)


@table
def test_result_is_what_the_stored_points_say(factory, norm):
    attack, eps = factory(norm=norm), EPS[norm]
    result = attack_on(factory, norm)
    assert result.x_adv.shape == x.shape
    assert result.x_adv.dtype == x.dtype
    assert result.info.margin.shape == (sum(s.length for s in attack.stages), len(y))
    chex.assert_tree_all_finite(result.x_adv)
    assert float(result.x_adv.min()) >= 0
    assert float(result.x_adv.max()) <= 1
    wrong = np.argmax(model(result.x_adv), -1) != np.asarray(y)
    np.testing.assert_array_equal(wrong, result.success)
    clean = np.argmax(model(x), -1) == np.asarray(y)
    weight = np.asarray(result.weight, float)
    accuracy = np.mean((1 - weight) * clean + weight * ~wrong)
    np.testing.assert_allclose(result.accuracy, accuracy, atol=1e-6)
    np.testing.assert_allclose(
        result.cost, norms.lp_norm(result.x_adv - x, norm), rtol=1e-6, atol=1e-7
    )
    distribution = transport.AdversarialDistribution.from_result(x, y, result)
    exact = transport.wasserstein(distribution, norm, attack.order)
    assert exact <= eps * (1 + 1e-5)
    assert (np.asarray(result.cost)[~clean] == 0).all()


@once
def test_inside_jit_as_outside(factory):
    norm = jnp.inf
    attack = factory(norm=norm)
    inside = jax.jit(lambda model, x, eps: wdjax.run(attack, model, x, y, eps=eps, key=key))
    close(attack_on(factory, norm), inside(model, x, EPS[norm]))


@table
def test_vmap_over_radii_is_one_run_each(factory, norm):
    attack = factory(norm=norm)
    radii = EPS[norm] * jnp.linspace(0.0, 2.8, 8)
    together = jax.vmap(lambda eps: wdjax.run(attack, model, x, y, eps=eps, key=key))(radii)
    for i, eps in enumerate(radii):
        one = wdjax.run(attack, model, x, y, eps=float(eps), key=key)
        close(jax.tree.map(lambda leaf, i=i: leaf[i], together), one)
    assert together.accuracy.shape == (8,)


@table
def test_no_budget_moves_nothing(factory, norm):
    result = attack_on(factory, norm, eps=0.0)
    spent = np.asarray(result.weight) * np.asarray(result.cost)
    np.testing.assert_array_equal(spent, 0)
    np.testing.assert_allclose(result.accuracy, result.clean.mean())


@pytest.mark.fast
@once
def test_one_trace_serves_two_calls_and_new_parameters(factory):
    traces = []

    def counted(params, x):
        traces.append(x.shape)
        return apply(params, x)

    params = model.args[0]
    attack = factory(norm=2)
    wdjax.run(attack, wdjax.Model(counted, params), x, y, eps=0.1, key=key)
    first = len(traces)
    other = jax.tree.map(lambda leaf: leaf + 0.0, params)
    result = wdjax.run(factory(norm=2), wdjax.Model(counted, other), x, y, eps=0.2, key=key)
    # The front door evaluates the model's shape once a call; nothing else may trace again.
    assert len(traces) == first + 1
    assert result.x_adv.shape == x.shape


@pytest.mark.fast
@once
def test_batch_size_and_devices_do_not_matter(factory):
    whole = attack_on(factory, 2)
    for size in (1, 7, 100):
        close(whole, attack_on(factory, 2, batch_size=size))
    assert len(jax.devices()) == 8
    close(whole, attack_on(factory, 2, mesh=parallel.data_mesh()))
    close(whole, attack_on(factory, 2, mesh=parallel.data_mesh(), batch_size=10))


@once
def test_one_sample(factory):
    alone = attack_on(factory, 2, x=x[:1], y=y[:1])
    assert alone.x_adv.shape == x[:1].shape
    if factory(norm=2).order == jnp.inf:  # A Wasserstein budget is shared: one sample gets it all.
        together = attack_on(factory, 2)
        np.testing.assert_allclose(alone.x_adv, together.x_adv[:1], atol=2e-5)
        np.testing.assert_array_equal(alone.success, together.success[:1])


@once
def test_all_misclassified(factory):
    wrong = (jnp.argmax(model(x), -1) + 1) % 4
    result = attack_on(factory, 2, y=wrong)
    assert float(result.accuracy) == 0
    np.testing.assert_array_equal(result.x_adv, x)
    assert int(result.gradients[1:].sum()) == 0


@pytest.mark.fast
@once
def test_zero_gradients_and_constant_logits(factory):
    def flat(bias, x):
        return jnp.broadcast_to(bias, (len(x), 4))

    for bias in (jnp.zeros(4), jnp.arange(4.0)):
        result = attack_on(factory, 2, model=wdjax.Model(flat, bias))
        chex.assert_tree_all_finite(result.x_adv)
        correct = np.asarray(y) == int(jnp.argmax(bias))
        np.testing.assert_allclose(result.accuracy, correct.mean(), atol=1e-6)


@once
def test_float64_is_kept(factory):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), model)
        result = attack_on(factory, 2, model=wide, x=x.astype(jnp.float64))
        assert result.x_adv.dtype == jnp.float64
        assert result.cost.dtype == jnp.float64


@once
def test_misclassified_samples_are_attacked_on_request(factory):
    attack = factory(norm=2)
    result = attack_on(factory, 2, skip_misclassified=False)
    inside = jax.jit(
        lambda x: wdjax.run(attack, model, x, y, eps=EPS[2], key=key, skip_misclassified=False)
    )
    close(result, inside(x))
    assert float(result.accuracy) <= float(attack_on(factory, 2).accuracy) + 1e-6 or (
        attack.order != jnp.inf
    )


@once
def test_saved_and_restored(factory, tmp_path):
    result = attack_on(factory, 2)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "result", result)
        saver.wait_until_finished()
        chex.assert_trees_all_equal(saver.restore(tmp_path / "result", result), result)


@once
def test_callback_sees_every_step_and_can_stop(factory):
    attack, seen = factory(norm=2), []
    whole = attack_on(factory, 2, batch_size=8, callback=seen.append)
    attacked = np.flatnonzero(whole.clean)
    taken = [progress.taken for progress in seen]
    assert taken == sorted(taken)
    assert taken[-1] == seen[-1].total == attack.steps * attacked.size
    assert set(np.concatenate([progress.samples for progress in seen])) == set(attacked)
    spent = sum(int(progress.info.gradients.sum()) for progress in seen)
    assert spent == int(whole.gradients.sum())
    stopped = attack_on(factory, 2, batch_size=8, callback=lambda progress: True)
    assert 0 < int((stopped.info.forwards.sum(0) > 0).sum()) <= 8
    assert stopped.info.margin.shape[0] == attack.steps


def test_accuracy_is_differentiable_in_the_model():
    attack = attacks.pgd(norm=2, steps=3)

    def loss(model):
        result = wdjax.run(attack, model, x, y, eps=0.1, skip_misclassified=False)
        return jnp.mean(wdjax.losses.cross_entropy(model(result.x_adv), y))

    gradient = jax.grad(loss)(model)
    chex.assert_tree_all_finite(gradient)
    assert float(jnp.abs(gradient.args[0]["w1"]).max()) > 0


@once
def test_single_precision_images_where_double_is_the_default(factory):
    with jax.enable_x64(True):
        single = functools.partial(attack_on, factory, 1, model, x, key=jax.random.key(7))
        hosted, traced = single(), jax.jit(lambda y: single(y=y))(y)
    assert hosted.x_adv.dtype == traced.x_adv.dtype == jnp.float32
    np.testing.assert_allclose(hosted.x_adv, traced.x_adv, atol=1e-5)


@pytest.mark.fast
def test_labels_of_a_byte_reach_every_class():
    weights = jax.random.normal(jax.random.key(3), (12, 200))
    linear = wdjax.Model(lambda w, x: x.reshape(len(x), -1) @ w, weights)
    labels = np.asarray(jnp.argmax(linear(x), axis=-1))
    assert labels.max() > 128
    attack = attacks.wda(steps=3, probe=2)

    def points(dtype):
        return jax.jit(lambda eps: wdjax.run(attack, linear, x, labels.astype(dtype), eps=eps))(0.1)

    chex.assert_trees_all_equal(points(np.uint8), points(np.int32))


@pytest.mark.fast
def test_nothing_to_attack():
    wrong = (jnp.argmax(model(x), axis=-1) + 1) % 4
    told = []
    attack = attacks.pgd(steps=3)
    hosted = wdjax.run(attack, model, x, wrong, eps=0.1, callback=told.append)
    traced = jax.jit(lambda y: wdjax.run(attack, model, x, y, eps=0.1))(wrong)
    for result in (hosted, traced):
        assert result.accuracy == 0
        assert result.converged.all()
        np.testing.assert_array_equal(result.x_adv, x)
    assert not told
    assert hosted.gradients.sum() == 0


BAD = {
    "half precision": dict(x=x.astype(jnp.bfloat16), match="32 or 64 bits.*bfloat16"),
    "uint8 images": dict(x=(255 * np.asarray(x)).astype(np.uint8), match="uint8"),
    "outside the box": dict(x=255 * x, match="outside the box"),
    "NaN": dict(x=x.at[3, 0].set(jnp.nan), match=r"x\[3\].*not finite"),
    "float labels": dict(y=y.astype(float), match="integer labels"),
    "too few labels": dict(y=y[:5], match=r"integer labels \[24\]"),
    "label too large": dict(y=y.at[0].set(4), match="classes 0..3"),
    "negative label": dict(y=y.at[0].set(-1), match="classes 0..3"),
    "no samples": dict(x=x[:0], y=y[:0], match="empty"),
    "negative eps": dict(eps=-0.1, match="eps must be finite and at least 0"),
    "infinite eps": dict(eps=np.inf, match="eps must be finite"),
    "several eps": dict(eps=np.array([0.1, 0.2]), match="vmap"),
    "kappa below 1": dict(kappa=0.5, match="kappa must be finite and at least 1"),
    "unknown knob": dict(stepsize=0.1, match="no knob stepsize; it has kappa, step_size"),
    "batch size": dict(batch_size=0, match="batch_size"),
    "image shape": dict(x=x[:, :1], match="does not accept"),
    "plain function": dict(model=lambda x: apply(model.args[0], x), match="wdjax.Model"),
    "model output": dict(model=wdjax.Model(lambda w, x: x, 0.0), match="must return logits"),
    "NaN logits": dict(
        model=wdjax.Model(lambda w, x: apply(model.args[0], x) * w, jnp.nan), match="not finite"
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in BAD.items()])
def test_bad_input_is_refused(case):
    options = {"model": model, "x": x, "y": y, "eps": 0.1, **case}
    match = options.pop("match")
    arguments = [options.pop(name) for name in ("model", "x", "y")]
    with pytest.raises(ValueError, match=match):
        wdjax.run(attacks.wda(steps=2, probe=1), *arguments, **options)


@pytest.mark.fast
def test_bad_settings_are_refused():
    for make in (
        lambda: attacks.pgd(norm=3),
        lambda: attacks.pgd(steps=0),
        lambda: attacks.pgd(iterate="first"),
        lambda: attacks.wda(probe=0),
        lambda: attacks.wda(probe=9, steps=5),
        lambda: attacks.wda(order=0.5),
        lambda: attacks.wda_plus_plus(rivals=0),
        lambda: attacks.wda_plus_plus(box=(1, 0)),
    ):
        with pytest.raises(ValueError, match="must be"):
            make()
    with pytest.raises(ValueError, match="random"):
        wdjax.run(attacks.pgd(random_start=True), model, x, y, eps=0.1)
    with pytest.raises(ValueError, match="top level only"):
        jax.jit(lambda x: wdjax.run(attacks.fgsm(), model, x, y, eps=0.1, batch_size=2))(x)
