"""What every public attack keeps, in one table."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import Lp, attacks, losses, norms, parallel, testing, transport
from wdjax.files import persist

NORMS = (1, 2, jnp.inf)
EPS = {0: 2.0, 1: 0.6, 2: 0.25, jnp.inf: 0.06}

# Name: what makes the attack from a ball, and how its points are spent.
FOUNDATION = {
    "fgsm": (attacks.fgsm, {}),
    "pgd": (functools.partial(attacks.PGD, steps=5), {"kappa": 2.0}),
    "pgd random": (
        functools.partial(attacks.PGD, steps=4, random_start=True, iterate="last"),
        {"order": jnp.inf},
    ),
    "wda": (functools.partial(attacks.WDA, steps=5, probe=3), {"kappa": 1.5}),
    "wda order 2 best": (
        functools.partial(attacks.WDA, steps=5, probe=3, iterate="best"),
        {"order": 2, "kappa": 2.0},
    ),
    "wda top 2": (functools.partial(attacks.WDA, steps=4, probe=2, rivals=2), {"order": jnp.inf}),
    "wda++": (functools.partial(attacks.WDAPlusPlus, steps=8, rivals=2), {}),
    "wda++ order 2": (functools.partial(attacks.WDAPlusPlus, steps=8), {"order": 2}),
    "wda++ of the paper": (
        functools.partial(attacks.WDAPlusPlus, steps=8, ray_bisections=0),
        {"order": jnp.inf},
    ),
}
# Written on what the others show to hold: tried once, where the attack's own code can break it.
ROOM = {
    "apgd": (functools.partial(attacks.APGD, steps=7, restarts=2), {"kappa": 2.0}),
    "fab targeted": (functools.partial(attacks.FAB, steps=4, targets=2, restarts=2), {}),
    "square": (functools.partial(attacks.Square, queries=12), {"kappa": 2.0}),
    "wpgd": (functools.partial(attacks.WPGD, steps=6), {"order": 2}),
    "margin pgd far": (functools.partial(attacks.MarginPGD, steps=4, far=True), {}),
    "walk far": (functools.partial(attacks.Walk, steps=8, far=True, haste=1.0), {"order": 2}),
}
# Other settings, and minimum-norm attacks, which have a file of their own: their points.
VARIANTS = {
    "margin pgd": (functools.partial(attacks.MarginPGD, steps=4), {"order": jnp.inf}),
    "walk": (functools.partial(attacks.Walk, steps=8), {}),
    "ddn": (functools.partial(attacks.DDN, steps=8, radius=0.2), {}),
    "fmn": (functools.partial(attacks.FMN, steps=8), {}),
    "deepfool": (functools.partial(attacks.DeepFool, steps=5), {}),
    "cw": (functools.partial(attacks.CarliniWagner, steps=5, rounds=2, step_size=0.2), {}),
    "pdpgd": (functools.partial(attacks.PDPGD, steps=8), {}),
    "alma": (functools.partial(attacks.ALMA, steps=12), {}),
    "tr": (functools.partial(attacks.TrustRegion, steps=8, radius=0.05), {}),
    "apgd targeted": (
        functools.partial(attacks.APGD, steps=5, targets=2, rank="ratio", stop=False),
        {"order": jnp.inf},
    ),
    "fab": (functools.partial(attacks.FAB, steps=6), {"order": 2}),
    "fab bounded": (
        functools.partial(attacks.FAB, steps=5, targets=2, bounded=True),
        {"kappa": 2.0},
    ),
    "wpgd order 1": (
        functools.partial(attacks.WPGD, order=1, steps=5, loss=losses.cross_entropy),
        {"order": 1},
    ),
    "wfgsm": (functools.partial(attacks.wfgsm, order=jnp.inf), {"order": jnp.inf}),
    "walk targets": (functools.partial(attacks.Walk, steps=5, targets=2), {}),
    "walk within": (
        functools.partial(attacks.Walk, steps=4, targets=2, within=True),
        {"kappa": 2.0},
    ),
    "pgd restarts": (functools.partial(attacks.PGD, steps=3, restarts=3), {"kappa": 1.5}),
    "pgd l0": (functools.partial(attacks.PGD, steps=4, restarts=2), {"kappa": 2.0}),
    "sigma-zero": (functools.partial(attacks.SigmaZero, steps=20), {}),
    # From five steps on in norm 2, points may be 3e-5 apart whose distances differ by 1e-7 only.
    "slp": (functools.partial(attacks.SLP, steps=4), {}),
}
ATTACKS = FOUNDATION | ROOM | VARIANTS
# Attacks that are not defined in every norm are tried in those for which they are.
ONLY = {"ddn": (2,), "cw": (2,), "alma": (1, 2), "pgd l0": (0,), "sigma-zero": (0,)}


# One of a kind: for what does not depend on an attack's settings.
FEW = ("fgsm", "pgd random", "wda order 2 best", "wda++", "apgd")


def norms_of(name):
    return ONLY.get(name, NORMS)


def cases(*pairs):
    rows = [pytest.param(*pair, id=f"{pair[0]}, l{pair[1]}") for pair in pairs]
    return pytest.mark.parametrize(("name", "norm"), rows)


def names(*attacks, oldest=False):
    """With ``oldest``, a few of them run on the oldest stack too."""
    rows = [
        pytest.param(name, id=name, marks=[pytest.mark.fast] * (oldest and name in FEW))
        for name in attacks
    ]
    return pytest.mark.parametrize("name", rows)


EVERY_NORM = [(name, norm) for name in FOUNDATION for norm in norms_of(name)]
# The room's own files try its attacks in every norm; here each in one, all norms in turn.
IN_TURN = [
    (name, norms_of(name)[place % len(norms_of(name))])
    for place, name in enumerate(ROOM | VARIANTS)
]
everywhere = cases(*EVERY_NORM, *IN_TURN)
table = cases(
    *((name, NORMS[place % len(NORMS)]) for place, name in enumerate(FOUNDATION)),
    *(pair for pair in IN_TURN if pair[0] in ROOM),
)
each = names(*FOUNDATION, *ROOM)
each_oldest = names(*FOUNDATION, *ROOM, oldest=True)
follow = names(*FOUNDATION, *(name for name in ROOM if name != "square"), oldest=True)
once = names(*FOUNDATION)
few = names(*(name for name in FOUNDATION if name in FEW))
few_oldest = names(*(name for name in FOUNDATION if name in FEW), oldest=True)


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
    classes = model(x).shape[-1]
    return x, jnp.where(jnp.arange(n) % 6 == 5, (y + 1) % classes, y)


model = make_model()
x, y = make_samples(model)
key = jax.random.key(7)


def make(name, norm):
    allowed = norms_of(name)
    return ATTACKS[name][0](Lp(norm if norm in allowed else allowed[0]))


def attack_on(name, norm, model=model, x=x, y=y, **options):
    options = {"eps": EPS[norm], "key": key, **ATTACKS[name][1], **options}
    return wdjax.run(make(name, norm), model, x, y, **options)


def close(a, b, tolerance=2e-5):
    """Equal decisions and close points: rounding may differ between programs."""
    np.testing.assert_array_equal(a.success, b.success)
    np.testing.assert_array_equal(a.correct, b.correct)
    np.testing.assert_allclose(a.x_adv, b.x_adv, atol=tolerance)
    np.testing.assert_allclose(a.weight, b.weight, atol=10 * tolerance)
    np.testing.assert_allclose(a.cost, b.cost, atol=10 * tolerance)


@everywhere
def test_result_is_what_the_stored_points_say(name, norm):
    result, eps = attack_on(name, norm, history=True), EPS[norm]
    assert result.x_adv.shape == x.shape
    assert result.x_adv.dtype == x.dtype
    assert result.history.value.shape == (sum(s.length for s in make(name, norm).stages), len(y))
    chex.assert_tree_all_finite(result.x_adv)
    assert float(result.x_adv.min()) >= 0
    assert float(result.x_adv.max()) <= 1
    wrong = np.argmax(model(result.x_adv), -1) != np.asarray(y)
    np.testing.assert_array_equal(wrong, result.success)
    correct = np.argmax(model(x), -1) == np.asarray(y)
    np.testing.assert_array_equal(correct, result.correct)
    weight = np.asarray(result.weight, float)
    accuracy = np.mean((1 - weight) * correct + weight * ~wrong)
    np.testing.assert_allclose(result.accuracy, accuracy, atol=1e-6)
    moved = (result.x_adv - x).reshape(len(x), -1)
    far = (moved != 0).sum(1) if norm == 0 else norms.lp_norm(moved, norm)
    np.testing.assert_allclose(result.cost, far, rtol=1e-6, atol=1e-7)
    distribution = transport.AdversarialDistribution.from_result(x, y, result)
    order = ATTACKS[name][1].get("order", 1)
    assert transport.wasserstein(distribution, norm, order) <= eps * (1 + 1e-5)
    assert (np.asarray(result.cost)[~correct] == 0).all()
    assert not result.fault.any()
    spent = np.asarray(result.history.gradients).sum(axis=0)
    np.testing.assert_array_equal(spent, result.gradients)
    np.testing.assert_array_equal(result.zeros, result.history.zeros.sum(axis=0))


def keeps(name, norm, *clauses):
    """The attack keeps these clauses of the contract of :mod:`wdjax.testing`."""
    attack = make(name, norm)
    testing.check_attack(attack, eps=EPS[norm], clauses=clauses, **ATTACKS[name][1])


@cases(
    *((name, NORMS[place % len(NORMS)]) for place, name in enumerate(FOUNDATION)),
    *IN_TURN,
)
def test_its_own_points_are_in_the_ball(name, norm):
    """Before any search has replaced what it does not allow."""
    # Those that look for the nearest flip leave it to the search to refuse what is beyond eps.
    far = ("fab targeted", "fab bounded", "walk within")
    keeps(name, norm, "protocol", *(() if name in far else ("ball",)))


@few
def test_it_draws_from_its_key_alone(name):
    keeps(name, 2, "key")


@each
def test_inside_jit_as_outside(name):
    keeps(name, jnp.inf, "jit")


@table
def test_vmap_over_radii_is_one_run_each(name, norm):
    keeps(name, norm, "vmap")


# One or two settings of every class: those that take the most of its code.
SHARDED = (
    "fgsm", "pgd random", "pgd restarts", "wda top 2", "wda++", "apgd targeted", "fab targeted",
    "square", "wpgd", "wpgd order 1", "margin pgd far", "walk within", "ddn", "fmn", "deepfool",
    "cw", "pdpgd", "alma", "tr", "pgd l0", "sigma-zero", "slp",
)  # fmt: skip


def test_every_class_is_sharded():
    kinds = {name: type(make(name, 2)) for name in ATTACKS}
    assert {kinds[name] for name in SHARDED} == set(kinds.values())


@names(*SHARDED, oldest=True)
def test_inside_shard_map_as_outside(name):
    keeps(name, 0 if norms_of(name) == (0,) else 2, "shards")


@table
def test_no_budget_moves_nothing(name, norm):
    keeps(name, norm, "no budget")


@each_oldest
def test_one_trace_serves_two_calls_and_new_parameters(name):
    traces = []

    def counted(params, x):
        traces.append(x.shape)
        return apply(params, x)

    params = model.args[0]
    attack_on(name, 2, wdjax.Model(counted, params), eps=0.1)
    first = len(traces)
    other = jax.tree.map(lambda leaf: leaf + 0.0, params)
    result = attack_on(name, 2, wdjax.Model(counted, other), eps=0.2)
    # The front door evaluates the model's shape once a call, and traces it once to see that it is
    # the function that was compiled; nothing else may trace again.
    assert len(traces) == first + 2
    assert result.x_adv.shape == x.shape


@few_oldest
def test_batch_size_and_devices_do_not_matter(name):
    keeps(name, 2, "company")
    whole = attack_on(name, 2)
    assert len(jax.devices()) == 8
    close(whole, attack_on(name, 2, mesh=parallel.data_mesh(), batch_size=10))


@once
def test_one_sample(name):
    keeps(name, 2, "one sample")


@each
def test_all_misclassified(name):
    wrong = (jnp.argmax(model(x), -1) + 1) % 4
    result = attack_on(name, 2, y=wrong)
    assert float(result.accuracy) == 0
    np.testing.assert_array_equal(result.x_adv, x)
    assert int(result.gradients.sum()) == 0
    assert result.done.all()


@few_oldest
def test_zero_gradients_are_counted(name):
    def flat(bias, x):
        return jnp.broadcast_to(bias, (len(x), 4))

    for bias in (jnp.zeros(4), jnp.arange(4.0)):
        result = attack_on(name, 2, model=wdjax.Model(flat, bias))
        chex.assert_tree_all_finite(result.x_adv)
        correct = np.asarray(y) == int(jnp.argmax(bias))
        np.testing.assert_allclose(result.accuracy, correct.mean(), atol=1e-6)
        np.testing.assert_array_equal(result.zeros, result.gradients)
        assert (result.gradients[correct] > 0).all()
        assert not result.done[correct].any()


def _poisoned(params, x):
    """Finite logits whose gradient is 0 times infinity: F1."""
    logits = apply(params, x)
    hidden = jnp.sqrt(jnp.maximum(jnp.sum(x, axis=(1, 2, 3)) - 50, 0)) - 5
    return jnp.concatenate([logits, hidden[:, None]], axis=1)


@follow
def test_gradients_that_are_not_finite_are_faults(name):
    bad = wdjax.Model(_poisoned, model.args[0])
    hosted = attack_on(name, 2, model=bad, y=jnp.argmax(bad(x), -1))
    followed = np.asarray(hosted.gradients) > 0
    np.testing.assert_array_equal(hosted.fault[followed], True)
    assert not hosted.done[np.asarray(hosted.fault)].any()
    np.testing.assert_array_equal(
        hosted.success, jnp.argmax(bad(hosted.x_adv), -1) != jnp.argmax(bad(x), -1)
    )
    attack, how = make(name, 2), ATTACKS[name][1]
    labels = jnp.argmax(bad(x), -1)
    traced = jax.jit(lambda x: wdjax.run(attack, bad, x, labels, eps=EPS[2], key=key, **how))(x)
    assert traced.fault.all()
    # Coordinates without a gradient stay; the others are attacked all the same.
    close(hosted, traced)


@few_oldest
def test_logits_that_are_not_finite_are_faults(name):
    def cliff(params, x):
        logits = apply(params, x)
        moved = jnp.abs(x - params["home"]).max(axis=(1, 2, 3)) > 1e-3
        return jnp.where(moved[:, None], jnp.nan, logits)

    params = {**model.args[0], "home": x[:1]}
    result = attack_on(name, 2, model=wdjax.Model(cliff, params), x=x[:1], y=y[:1])
    assert result.fault.all()
    assert not result.success.any()
    assert not result.done.any()
    np.testing.assert_array_equal(result.x_adv, x[:1])
    assert float(result.accuracy) == 1.0


@few
def test_two_classes_and_a_convolution(name):
    def convolve(kernel, x):
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.tanh(x).mean(axis=(1, 2))

    pair = wdjax.Model(convolve, jax.random.normal(jax.random.key(3), (2, 2, 2, 2)))
    labels = jnp.argmax(pair(x), -1)
    result = attack_on(name, jnp.inf, model=pair, y=labels, eps=0.4)
    assert result.success.any()
    wrong = jnp.argmax(pair(result.x_adv), -1) != labels
    np.testing.assert_array_equal(result.success, wrong)


@few
def test_float64_is_kept(name):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), model)
        result = attack_on(name, 2, model=wide, x=x.astype(jnp.float64))
        assert result.x_adv.dtype == jnp.float64
        assert result.cost.dtype == jnp.float64


@once
def test_misclassified_samples_are_attacked_on_request(name):
    attack, how = make(name, 2), ATTACKS[name][1]
    result = attack_on(name, 2, skip_misclassified=False)
    inside = jax.jit(
        lambda x: wdjax.run(
            attack, model, x, y, eps=EPS[2], key=key, skip_misclassified=False, **how
        )
    )
    close(result, inside(x))
    if attack.budget == "sample":
        assert (np.asarray(result.cost)[~np.asarray(result.correct)] > 0).any()


@each_oldest
def test_saved_and_resumed_after_every_round(name, tmp_path):
    """A search restored from disk in the place of every round goes on to the same bits."""
    attack = make(name, 2)
    whole = wdjax.search(attack, model, x, y, eps=EPS[2], key=key, batch_size=13)
    turns = []

    class KilledError(Exception):
        pass

    def kill(progress):
        turns.append(progress.taken)
        raise KilledError

    folder = tmp_path / "search"
    again = functools.partial(
        wdjax.search, attack, model, x, y, eps=EPS[2], key=key, batch_size=13,
        checkpoint=folder, every=0,
    )  # fmt: skip
    for _ in range(200):
        try:
            found = again(callback=kill)
        except KilledError:
            continue
        break
    assert turns == sorted(set(turns))
    # Walks share a program that takes two steps a round; the others take one here.
    least = attack.stages[0].length // (2 if hasattr(attack, "shared") else 1)
    assert len(turns) >= least or attack.stages[0].done is not None
    chex.assert_trees_all_equal(whole, found)
    with pytest.raises(ValueError, match=r"other settings.*largest eps was 0.25 and is 0.5"):
        wdjax.search(attack, model, x, y, eps=2 * EPS[2], key=key, batch_size=13, checkpoint=folder)


@each
def test_result_survives_a_checkpoint(name, tmp_path):
    result = attack_on(name, 2)
    persist.save(tmp_path / "result", result)
    chex.assert_trees_all_equal(persist.restore(tmp_path / "result", result), result)


@few
def test_callback_sees_every_round_and_can_stop(name):
    attack, seen = make(name, 2), []
    whole = attack_on(name, 2, batch_size=8, callback=seen.append)
    attacked = int(whole.correct.sum())
    taken = [progress.taken for progress in seen]
    assert taken == sorted(taken)
    assert taken[-1] == seen[-1].total == sum(s.length for s in attack.stages) * attacked
    assert not seen[-1].unfinished.size
    stopped = attack_on(name, 2, batch_size=8, callback=lambda progress: True)
    assert stopped.gradients.sum() <= whole.gradients.sum()
    assert (stopped.gradients > 0).any()
    wrong = np.argmax(model(stopped.x_adv), -1) != np.asarray(y)
    np.testing.assert_array_equal(stopped.success, wrong)


@few
def test_single_precision_images_where_double_is_the_default(name):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        single = functools.partial(attack_on, name, 1, model, x, key=jax.random.key(7))
        hosted, traced = single(), jax.jit(lambda y: single(y=y))(y)
    assert hosted.x_adv.dtype == traced.x_adv.dtype == jnp.float32
    np.testing.assert_allclose(hosted.x_adv, traced.x_adv, atol=1e-5)


@few_oldest
def test_bad_numbers_inside_a_trace_are_nan(name):
    attack, how = make(name, 2), ATTACKS[name][1]

    def answers(x=x, y=y, eps=EPS[2], key=key, **options):
        options = {**how, **options}
        result = wdjax.run(attack, model, x, y, eps=eps, key=key, **options)
        return result.accuracy, jnp.sum(result.correct & ~result.success)

    inside = jax.jit(answers)
    assert np.all(np.isfinite(inside()))
    for bad in (
        {"eps": jnp.nan},
        {"eps": -0.1},
        {"eps": jnp.inf},
        {"x": 16 * x},
        {"x": x * jnp.nan},
        {"y": y + 4},
        {"y": y - 4},
        {"kappa": 0.5},
        {"kappa": jnp.nan},
    ):
        accuracy, standing = inside(**bad)
        assert np.isnan(accuracy), bad
        assert standing == 0 or "kappa" in bad, "none that was refused may pass for robust"


def test_rounds_are_pure_and_their_programs_few():
    """Another accuracy, eps or kappa compiles nothing; no shape depends on who is correct."""
    attack = attacks.WDA(Lp(2), steps=4, probe=2)
    samples = jax.random.uniform(jax.random.key(5), (131, 2, 3, 2))
    labels = np.asarray(jnp.argmax(model(samples), -1))
    jax.clear_caches()
    wdjax.run(attack, model, samples, labels, eps=0.1, batch_size=16).accuracy.block_until_ready()
    compiled = []

    def note(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    for wrong in range(1, 131, 13):
        other = np.where(np.arange(131) < wrong, (labels + 1) % 4, labels)
        result = wdjax.run(attack, model, samples, other, eps=0.1 + wrong / 1e3, batch_size=16)
        assert np.asarray(result.correct).sum() == 131 - wrong
        result.accuracy.block_until_ready()
    assert not compiled


BAD = {
    "half precision": dict(x=x.astype(jnp.bfloat16), match="32 or 64 bits.*bfloat16"),
    "uint8 images": dict(x=(255 * np.asarray(x)).astype(np.uint8), match="uint8"),
    "outside the box": dict(x=255 * x, match="outside the box"),
    "NaN": dict(x=x.at[3, 0].set(jnp.nan), match=r"x\[3\].*not finite"),
    "float labels": dict(y=y.astype(float), match="integer labels"),
    "too few labels": dict(y=y[:5], match=r"integer labels \[24\]"),
    "label too large": dict(y=y.at[0].set(4), match="classes 0..3"),
    "negative label": dict(y=y.at[0].set(-1), match="classes 0..3"),
    "labels of 64 bits": dict(y=np.asarray(y, np.int64) + 2**32, match="labels span 4294967296"),
    "no samples": dict(x=x[:0], y=y[:0], match="empty"),
    "negative eps": dict(eps=-0.1, match="eps must be finite and at least 0"),
    "infinite eps": dict(eps=np.inf, match="eps must be finite"),
    "eps beyond floats": dict(eps=1e39, match="eps must be finite in float32"),
    "several eps": dict(eps=np.array([0.1, 0.2]), match="vmap"),
    "kappa below 1": dict(kappa=0.5, match="kappa must be finite and at least 1"),
    "order": dict(order=0.5, match="order must be"),
    "batch size": dict(batch_size=0, match="batch_size"),
    "float batch size": dict(batch_size=8.0, match="batch_size"),
    "mask": dict(only=np.ones(3, bool), match=r"only must be booleans \[24\]"),
    "start": dict(start=x[:3], match="start must have the shape of x"),
    "image shape": dict(x=x[:, :1], match="does not accept"),
    "plain function": dict(model=lambda x: apply(model.args[0], x), match="wdjax.Model"),
    "model output": dict(model=wdjax.Model(lambda w, x: x, 0.0), match="must return logits"),
    "NaN logits": dict(
        model=wdjax.Model(lambda w, x: apply(model.args[0], x) * w, jnp.nan), match="not finite"
    ),
    "statistics of the batch": dict(
        model=wdjax.Model(lambda w, x: apply(w, (x - x.mean(0)) / x.std(0)), model.args[0]),
        match="rest of its batch",
    ),
    "dropout": dict(
        model=wdjax.Model(
            lambda w, x: apply(w, x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)),
            model.args[0],
        ),
        match="rest of its batch",
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in BAD.items()])
def test_bad_input_is_refused(case):
    options = {"model": model, "x": x, "y": y, "eps": 0.1, **case}
    match = options.pop("match")
    arguments = [options.pop(name) for name in ("model", "x", "y")]
    with pytest.raises(ValueError, match=match):
        wdjax.run(attacks.WDA(steps=2, probe=1), *arguments, **options)


@pytest.mark.fast
def test_bad_settings_are_refused():
    for bad in (
        lambda: Lp(3),
        lambda: Lp(box=(1, 0)),
        lambda: Lp(box=[0, 1, 2]),
        lambda: attacks.PGD(steps=0),
        lambda: attacks.PGD(steps=7.0),
        lambda: attacks.PGD(steps=True),
        lambda: attacks.PGD(iterate="first"),
        lambda: attacks.WDA(probe=0),
        lambda: attacks.WDA(probe=9, steps=5),
        lambda: attacks.WDAPlusPlus(rivals=0),
        lambda: attacks.WDAPlusPlus(bisections=-1),
    ):
        with pytest.raises(ValueError, match="must be"):
            bad()
    with pytest.raises(TypeError, match="stepsize"):
        attacks.PGD(stepsize=0.1)
    with pytest.raises(ValueError, match="random"):
        wdjax.run(attacks.PGD(random_start=True), model, x, y, eps=0.1)
    with pytest.raises(ValueError, match="radius"):
        wdjax.search(attacks.PGD(), model, x, y)
    with pytest.raises(ValueError, match="step_size"):
        wdjax.search(attacks.PGD(step_size=-1.0), model, x, y, eps=0.1)
    with pytest.raises(ValueError, match="top level only"):
        jax.jit(lambda x: wdjax.run(attacks.fgsm(), model, x, y, eps=0.1, batch_size=2))(x)


@pytest.mark.fast
def test_settings_are_values():
    """Equal settings are equal attacks, whatever types they came in, and can be read back."""
    one = attacks.PGD(Lp(norm=jnp.array(2), box=[0, 1]), steps=np.int64(7))
    assert one == attacks.PGD(Lp(2), steps=7)
    assert hash(Lp(np.inf)) == hash(Lp(jnp.inf))
    assert one.steps == 7
    assert "steps=7" in repr(one)
    swept = jax.vmap(
        lambda size: wdjax.run(attacks.PGD(steps=3, step_size=size), model, x, y, eps=0.1).accuracy
    )(jnp.array([0.01, 0.1]))
    assert swept.shape == (2,)
    with pytest.raises(AttributeError):
        one.steps = 3


@pytest.mark.fast
def test_labels_of_a_byte_reach_every_class():
    weights = jax.random.normal(jax.random.key(3), (12, 200))
    linear = wdjax.Model(lambda w, x: x.reshape(len(x), -1) @ w, weights)
    labels = np.asarray(jnp.argmax(linear(x), axis=-1))
    assert labels.max() > 128
    attack = attacks.WDA(steps=3, probe=2)

    def points(dtype):
        return jax.jit(lambda eps: wdjax.run(attack, linear, x, labels.astype(dtype), eps=eps))(0.1)

    chex.assert_trees_all_equal(points(np.uint8), points(np.int32))
