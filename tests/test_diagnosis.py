"""What a search may have missed is said, with the number that a second look leaves."""

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import Lp, attacks, audit, ensembles, losses, remarks
from wdjax.engine.diagnosis import RobustnessWarning
from wdjax.ensembles.second_look import with_second_look
from wdjax.smoothing import noise

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(6, 3)), jnp.float32)
X = jnp.asarray(RNG.uniform(0.2, 0.8, (12, 6)), jnp.float32)
Y = jnp.argmax(X @ W, axis=1)


def _model(change):
    return wdjax.Model(lambda w, x: change(x, w), W)


KEY = jax.random.key(0)
PGD = attacks.PGD(steps=4)
PLAIN = _model(lambda x, w: x @ w)
BLIND = {
    "large logits": _model(lambda x, w: 1e5 * (x @ w)),
    "rounded input": _model(lambda x, w: (jnp.round(x * 7) / 7) @ w),
    "softmax of large logits": _model(lambda x, w: jax.nn.softmax(1e5 * (x @ w))),
    "steps": _model(lambda x, w: jnp.floor(5 * (x @ w))),
}


@pytest.mark.parametrize("name", BLIND)
def test_vanishing_gradients_get_a_second_look(name):
    attack = attacks.PGD(steps=4)
    with pytest.warns(RobustnessWarning, match="second look") as seen:
        result = wdjax.run(attack, BLIND[name], X, Y, eps=0.2)
    assert Path(seen[0].filename) == Path(__file__)
    told = [str(one.message) for one in seen if "probabilities" not in str(one.message)]
    assert len(told) == 1
    overlooked = np.asarray(result.overlooked)
    assert overlooked.any()
    assert not (overlooked & np.asarray(result.success | ~result.correct)).any()
    standing = np.asarray(result.correct & ~result.success)
    for number in (standing.mean(), (standing & ~overlooked).mean()):
        assert f"{number:.1%}" in result.remarks[-1]
    # The result itself is the attack's own.
    alone = wdjax.run(attack, BLIND[name], X, Y, eps=0.2, diagnose=False)
    assert alone.overlooked is None
    np.testing.assert_array_equal(alone.x_adv, result.x_adv)


def test_samples_of_radius_0_are_not_taken_for_stuck():
    eps = np.where(np.arange(len(X)) < 8, 0.0, 0.02).astype(np.float32)
    with warnings.catch_warnings(action="error"):
        found = wdjax.search(PGD, PLAIN, X, Y, eps=eps)
    assert (np.asarray(found.margin)[8:] > np.asarray(losses.margin(PLAIN(X), Y))[8:]).all()


def test_what_was_overlooked_can_be_flipped():
    """A linear model: who can be flipped within the ball is known."""
    with pytest.warns(RobustnessWarning):
        result = wdjax.run(attacks.PGD(steps=4), BLIND["large logits"], X, Y, eps=0.05)
    margins = np.asarray(X @ W)
    own = np.take_along_axis(margins, np.asarray(Y)[:, None], axis=1)
    reach = 0.05 * np.abs(np.asarray(W)[:, None, :] - np.asarray(W)[:, :, None]).sum(axis=0)
    flippable = (margins - own + reach[np.asarray(Y)] > 0) & (
        np.arange(3) != np.asarray(Y)[:, None]
    )
    assert not (np.asarray(result.overlooked) & ~flippable.any(axis=1)).any()


def test_a_loss_that_says_nothing_of_the_margin_is_seen():
    attack = attacks.PGD(steps=4, loss=lambda out, y: -losses.cross_entropy(out, y))
    with pytest.warns(RobustnessWarning, match="second look"):
        result = wdjax.run(attack, PLAIN, X, Y, eps=0.2)
    assert result.overlooked.any()


def _linear(n, size, classes, dual):
    """Weights, samples, labels, and the distances of the nearest flips in the norm of this dual."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(size, classes)).astype(np.float32)
    x = rng.uniform(0.35, 0.65, (n, size)).astype(np.float32)
    y = (x @ w).argmax(axis=1)
    gaps = (x @ w).max(axis=1, keepdims=True) - x @ w
    slopes = np.linalg.norm(w.T[y][:, None] - w.T[None], dual, axis=-1)
    return w, x, y, np.where(gaps > 0, gaps / np.maximum(slopes, 1e-9), np.inf).min(axis=1)


@pytest.mark.parametrize("attack", [attacks.PGD(Lp(2), steps=40), attacks.APGD(Lp(2))])
def test_cross_entropy_of_small_logits_is_looked_at_again(attack):
    """Its gradient flees from the label towards all classes, so that near flips are missed."""
    w, x, y, reach = _linear(60, 8, 4, dual=2)
    small = wdjax.Model(lambda w, x: 1e-3 * (x @ w), w)
    with pytest.warns(RobustnessWarning, match="survive this attack, at most .* a second look"):
        found = wdjax.search(attack, small, x, y, eps=0.1, key=KEY)
    broken = np.asarray(found.success | found.overlooked)
    np.testing.assert_array_equal(broken, reach < 0.1)
    own = wdjax.Model(lambda w, x: x @ w, w)
    with warnings.catch_warnings(action="error"):
        wdjax.search(attack, own, x, y, eps=0.1, key=KEY)


@pytest.mark.parametrize("attack", [attacks.PGD(Lp(1, None)), attacks.APGD(Lp(1, None))])
def test_cross_entropy_in_norm_1_is_looked_at_again(attack):
    w, x, y, reach = _linear(40, 6, 3, dual=np.inf)
    model = wdjax.Model(lambda w, x: x @ w, w)
    with pytest.warns(RobustnessWarning, match="survive this attack, at most .* a second look"):
        found = wdjax.search(attack, model, x, y, eps=1.05 * reach, key=KEY)
    assert np.sum(found.success) < 35
    assert np.sum(found.success | found.overlooked) > 38


def test_minimum_norm_attacks_are_looked_at_again_in_the_whole_box():
    with pytest.warns(RobustnessWarning, match="second look"):
        found = wdjax.search(attacks.FMN(steps=4), BLIND["rounded input"], X, Y)
    assert found.overlooked.any()


@pytest.mark.parametrize("attack", [attacks.PGD(steps=4), attacks.FMN(steps=8), attacks.WDA()])
def test_nothing_is_said_of_a_plain_search(attack):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = wdjax.run(attack, PLAIN, X, Y, eps=0.1)
    assert result.remarks == []


ENSEMBLES = {
    "fast": lambda *task, **how: ensembles.fast(*task, eps=0.2, key=KEY, passes=30, **how).found,
    "wda_star": lambda *task, **how: ensembles.wda_star(*task, key=KEY, passes=100, **how),
    "a3": lambda *task, **how: ensembles.a3(*task, eps=0.2, key=KEY, passes=30, **how),
    "bisect": lambda *task, **how: ensembles.bisect(PGD, *task, eps=0.2, rounds=2, **how),
    "cascade": lambda *task, **how: ensembles.cascade(
        {"one": PGD, "two": PGD}, *task, eps=0.2, key=KEY, **how
    ),
    "mixed": lambda *task, **how: ensembles.mixed(PGD, *task, eps=0.2, **how).found,
    "smoothed": lambda *task, **how: ensembles.smoothed(
        PGD, *task, noise=noise.Gaussian(0.1), eps=0.2, key=KEY, **how
    ),
}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_ensembles_warn_once_of_all_their_searches(name):
    with pytest.warns(RobustnessWarning, match=f"^{name}: .*zero gradients") as seen:
        found = ENSEMBLES[name](BLIND["rounded input"], X, Y)
    assert len(seen) == 1
    assert Path(seen[0].filename) == Path(__file__)
    with warnings.catch_warnings(action="error"):
        again = ENSEMBLES[name](BLIND["rounded input"], X, Y, diagnose=False)
        ENSEMBLES[name](PLAIN, X, Y)
    np.testing.assert_array_equal(again.x_adv, found.x_adv)


DRAWN = np.random.default_rng(7)
BENT = wdjax.Model(
    lambda w, x: jnp.maximum((x - 0.5) @ w[0] + w[1], 0) @ w[2],
    [DRAWN.normal(size=s, scale=d).astype(np.float32)
     for s, d in (((6, 8), 1.2), (8, 0.1), ((8, 3), 1.0))],
)  # fmt: skip
CENTRAL = np.random.default_rng(0).uniform(size=(10, 6)).astype(np.float32)
TRUE = np.asarray(BENT(CENTRAL)).argmax(1)
SEARCHED = {
    "search": lambda attack, eps: wdjax.search(attack, BENT, CENTRAL, TRUE, eps=eps),
    "mixed": lambda attack, eps: ensembles.mixed(attack, BENT, CENTRAL, TRUE, eps=eps).found,
    "cascade": lambda attack, eps: ensembles.cascade(
        {"only": attack}, BENT, CENTRAL, TRUE, eps=eps, key=KEY
    ),
}


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize(("norm", "eps"), [(np.inf, 0.5), (np.inf, 1.0), (0, 6)])
def test_survivors_of_half_of_the_box_are_looked_at_again(name, norm, eps):
    """Margins rise, and more than noise raises them; but nearly all samples have a flip."""
    attack = attacks.PGD(wdjax.Lp(norm), steps=10)
    with pytest.warns(RobustnessWarning, match="survive this attack, at most"):
        found = SEARCHED[name](attack, eps)
    assert found.overlooked.any()
    assert not np.any(found.overlooked & np.asarray(found.success))


def test_a_bisection_says_of_what_it_found_no_flip():
    weak = attacks.PGD(wdjax.Lp(0), steps=10)
    with pytest.warns(RobustnessWarning, match="bisect: no flip was found for"):
        ensembles.bisect(weak, BENT, CENTRAL, TRUE, eps=1, rounds=6)


def test_what_has_no_gradients_is_looked_at_again_by_queries():
    """A host callback: the search by queries ends, and so does its second look."""
    w = 0.01 * np.asarray(W) + np.eye(3, dtype=np.float32)[0]

    def apply(params, x):
        out = jax.ShapeDtypeStruct((len(x), 3), x.dtype)
        return jax.pure_callback(lambda x: np.asarray(x) @ w, out, x, vmap_method="broadcast_all")

    model = wdjax.Model(apply, {})
    y = np.zeros(len(X), int)
    with pytest.warns(RobustnessWarning, match=r"second look by MarginPGD failed: .*JVP"):
        found = wdjax.search(attacks.Square(queries=2), model, X, y, eps=0.5, key=KEY)
    assert found.correct.all()
    assert not found.success.any()
    with pytest.raises(ValueError, match="do not support JVP"):
        wdjax.search(PGD, model, X, y, eps=0.5)


def test_faults_are_said():
    def apply(w, x):
        far = jnp.abs(x - X[0]).max(axis=1, keepdims=True) > 0.03
        return jnp.where(far, jnp.nan, x @ w)

    with pytest.warns(RobustnessWarning, match="not finite"):
        wdjax.run(attacks.PGD(steps=3), wdjax.Model(apply, W), X[:1], Y[:1], eps=0.2)


def test_no_radius_no_box_no_probe():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        none = wdjax.run(attacks.PGD(steps=2), BLIND["steps"], X, Y, eps=0.0)
        boundless = wdjax.search(attacks.FMN(Lp(box=None), steps=2), BLIND["steps"], X, Y)
    assert none.overlooked is None
    assert boundless.overlooked is None
    assert "zero gradients" in none.remarks[0]


def test_remarks_are_in_the_report():
    with pytest.warns(RobustnessWarning):
        result = wdjax.run(attacks.PGD(steps=4), BLIND["large logits"], X, Y, eps=0.2)
    measured = remarks.spent(result)
    assert measured["standing"] > measured["standing_at_second_look"]
    assert remarks.of(measured) == result.remarks


def test_inside_a_trace_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda x: wdjax.run(attacks.PGD(steps=2), BLIND["steps"], x, Y, eps=0.1))(X)


def test_logits_that_share_a_large_number_are_told():
    """A flip must exceed their rounding, so distances are longer than those of the same margins."""
    far = _model(lambda x, w: 1e6 + x @ w)
    y = jnp.argmax(far(X), axis=1)
    short = wdjax.search(attacks.WDAPlusPlus(), PLAIN, X, Y)
    with pytest.warns(RobustnessWarning, match="logits of size 1e.06 are rounded by") as seen:
        long = wdjax.search(attacks.WDAPlusPlus(), far, X, y)
    assert Path(seen[0].filename) == Path(__file__)
    both = np.asarray(short.success & long.success & (y == Y))
    assert np.mean(np.asarray(long.cost)[both]) > 1.2 * np.mean(np.asarray(short.cost)[both])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wdjax.search(attacks.WDAPlusPlus(), _model(lambda x, w: 100 + x @ w), X, Y)


def test_a_class_that_never_wins_is_not_told_as_rounding():
    """Logits of -1e9, as of a masked class, enter no margin: distances stay as they are."""
    masked = _model(lambda x, w: jnp.pad(x @ w, ((0, 0), (0, 1)), constant_values=-1e9))
    plain = wdjax.search(attacks.WDAPlusPlus(), PLAIN, X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = wdjax.search(attacks.WDAPlusPlus(), masked, X, Y)
    np.testing.assert_allclose(found.distance, plain.distance, rtol=1e-5)


def test_saturated_probabilities_are_told():
    """Gradients of some are tiny, not zero, so that nothing else would show it."""
    for scale in (300, 1000):
        hard = _model(lambda x, w, scale=scale: jax.nn.softmax(scale * (x @ w)))
        each = _model(lambda x, w, scale=scale: jax.nn.sigmoid(scale * (1 + x @ w)))
        for model in (hard, each):
            with pytest.warns(RobustnessWarning, match="probabilities, most of which are 1"):
                wdjax.run(attacks.PGD(steps=4), model, X, Y, eps=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wdjax.search(
            attacks.PGD(steps=4), _model(lambda x, w: jax.nn.softmax(x @ w)), X, Y, eps=0.2
        )


def test_labels_of_chance_are_told():
    x = jnp.asarray(RNG.uniform(size=(60, 6)), jnp.float32)
    y = jnp.argmax(x @ W, axis=1)
    with pytest.warns(RobustnessWarning, match="no more than by chance: look at the labels"):
        wdjax.search(attacks.PGD(steps=2), PLAIN, x, (y + 1) % 3, eps=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wdjax.search(attacks.PGD(steps=2), PLAIN, x, y, eps=0.01)


def test_a_nearest_flip_that_was_not_found_is_told():
    hard = wdjax.models.mlp((4, 8, 3), key=jax.random.key(0))
    x = jax.random.uniform(jax.random.key(1), (20, 4))
    y = jnp.argmax(hard(x), -1)
    with pytest.warns(RobustnessWarning, match=r"no flip was found for \d+ of 20 samples"):
        found = wdjax.search(attacks.FMN(steps=3), hard, x, y)
    missed = ~np.asarray(found.success)
    assert 2 < missed.sum() < 20
    assert np.all(np.isinf(found.distance) == missed)
    np.testing.assert_array_equal(found.distance[~missed], found.cost[~missed])
    assert f"{20 - missed.sum()} flipped at a median cost of 0." in repr(found)
    assert len(repr(found)) < 250
    assert "correct" in str(jax.eval_shape(lambda: found))
    gone = jax.tree.map(jnp.array, found)
    gone.cost.delete()
    assert repr(gone).startswith("Found(x_adv, ")
    few = np.r_[np.flatnonzero(~missed), np.flatnonzero(missed)[:1]]
    with pytest.warns(RobustnessWarning, match=f"no flip was found for 1 of {len(few)} samples"):
        wdjax.search(attacks.FMN(steps=3), hard, x[few], y[few])


@jax.custom_vjp
def _misled(x):
    return x


_misled.defvjp(
    lambda x: (x, None), lambda _, g: (jnp.cos(jnp.arange(g.size, dtype=g.dtype)).reshape(g.shape),)
)
WIDE = jnp.asarray(np.random.default_rng(3).normal(size=(64, 3)) / 8, jnp.float32)
IMAGES = jnp.asarray(np.random.default_rng(4).uniform(0.3, 0.7, (40, 64)), jnp.float32)
CLASSES = jnp.argmax(IMAGES @ WIDE, axis=1)
WEAK = {
    "steps too short": (attacks.PGD(steps=10, step_size=1e-4), lambda x: x),
    "too few queries": (attacks.Square(queries=3), lambda x: x),
    "misleading gradient": (attacks.PGD(), _misled),
    "misleading gradient, WDA": (attacks.WDA(), _misled),
    "misleading gradient, l2": (attacks.PGD(Lp(2)), _misled),
    "shattered gradient": (attacks.PGD(), lambda x: x + 0.02 * jnp.sin(2000 * x)),
}


@pytest.mark.parametrize("name", WEAK)
def test_an_attack_hardly_better_than_noise_is_looked_at_again(name):
    attack, front = WEAK[name]
    model, eps = wdjax.Model(lambda w, x: front(x) @ w, WIDE), 1.0 if "l2" in name else 0.08
    with pytest.warns(RobustnessWarning, match="second look"):
        found = wdjax.search(attack, model, IMAGES, CLASSES, eps=eps, key=KEY)
    overlooked = np.asarray(found.overlooked)
    assert overlooked.sum() >= 3
    logits = np.asarray(IMAGES @ WIDE)
    gaps = logits.max(axis=1, keepdims=True) - logits
    slopes = np.linalg.norm(
        np.asarray(WIDE).T[np.asarray(CLASSES)][:, None] - np.asarray(WIDE).T[None],
        2 if "l2" in name else 1, axis=-1,
    )  # fmt: skip
    reach = np.min(np.where(gaps > 0, gaps / np.maximum(slopes, 1e-9), np.inf), axis=1)
    assert (reach[overlooked] <= eps * 1.01 + 0.02 * ("shattered" in name)).all()


WITHIN = {
    "fast": lambda *task, **how: ensembles.fast(*task, **how).found,
    "a3": lambda *task, **how: ensembles.a3(*task, passes=60, **how),
    "a3_wda": lambda *task, **how: ensembles.a3_wda(*task, passes=60, **how),
    "autoattack": ensembles.autoattack,
}


def _partly_rounded(w, x):
    return jnp.concatenate([jnp.round(x[:, :2] * 16) / 16, x[:, 2:]], axis=1) @ w


@pytest.mark.parametrize("name", WITHIN)
def test_suites_look_again_where_some_coordinates_have_no_gradient(name):
    """The rounded coordinates decide: a step of one of them flips each sample. No gradient is 0,
    since the others have one, which leads nowhere."""
    rng = np.random.default_rng(3)
    w = rng.normal(size=(4, 4)) * [[1.0], [1.0], [0.1], [0.1]]
    model = wdjax.Model(_partly_rounded, jnp.asarray(w, jnp.float32))
    x = rng.uniform(0.1, 0.9, (4000, 4)).astype(np.float32)
    steps = np.eye(4, dtype=np.float32)[[0, 0, 1, 1]] * [[0.0625], [-0.0625], [0.0625], [-0.0625]]
    y = np.asarray(model(x)).argmax(1)
    flipped = [np.asarray(model((x + step).astype(np.float32))).argmax(1) != y for step in steps]
    chosen = np.flatnonzero(np.any(flipped, axis=0))[:24]
    task, how = (model, x[chosen], y[chosen]), {"eps": 0.07, "key": KEY, "ball": Lp(2)}
    with pytest.warns(RobustnessWarning, match=f"^{name}: .*at most .* a second look") as seen:
        found = WITHIN[name](*task, **how)
    assert len(seen) == 1
    assert Path(seen[0].filename) == Path(__file__)
    # Square flips most of them itself.
    assert np.sum(found.overlooked) >= (1 if name == "autoattack" else 3)
    with warnings.catch_warnings(action="error"):
        again = WITHIN[name](*task, diagnose=False, **how)
    np.testing.assert_array_equal(again.x_adv, found.x_adv)


def test_suites_take_no_second_look_inside_a_trace():
    @with_second_look
    def suite(model, x, y, *, eps, key, ball=PGD.ball):
        return wdjax.search(attacks.PGD(ball, steps=4), model, x, y, eps=eps)

    traced = jax.jit(lambda x: suite(PLAIN, x, Y, eps=0.1, key=KEY).success)(X)
    np.testing.assert_array_equal(traced, suite(PLAIN, X, Y, eps=0.1, key=KEY).success)
    with pytest.raises(TypeError, match=r"suite\(\) missing .* 'key'"):
        suite(PLAIN, X, Y, eps=0.1)


@pytest.mark.parametrize("straight", [False, True], ids=["no gradient", "straight-through"])
def test_distances_in_a_model_that_rounds_are_told_to_be_too_long(straight):
    def rounded(w, x):
        whole = jnp.round(8 * x) / 8
        return (x + jax.lax.stop_gradient(whole - x) if straight else (whole + x) / 2) @ w

    model = wdjax.Model(rounded, W)
    y = jnp.argmax(model(X), axis=1)
    told = r"rounds what it computes from its inputs \(round\).*distances may be too long"
    with pytest.warns(RobustnessWarning, match=told):
        wdjax.search(attacks.FMN(), model, X, y)
    with pytest.warns(RobustnessWarning, match=f"^wda_star: .*{told}"):
        ensembles.wda_star(model, X, y, key=KEY, passes=60)
    with warnings.catch_warnings(action="error"):
        wdjax.search(attacks.Square(queries=5), model, X, y, eps=1e-6, key=KEY)


def test_long_enough_steps_in_many_coordinates_need_no_second_look():
    model = wdjax.Model(lambda w, x: x @ w, WIDE)
    for attack in (attacks.PGD(steps=5), attacks.WDA(), attacks.APGD(), attacks.PGD(Lp(2))):
        with warnings.catch_warnings(action="error"):
            found = wdjax.search(attack, model, IMAGES, CLASSES, eps=0.01, key=KEY)
        assert bool((found.correct & ~found.success).any())


def test_an_audit_counts_the_flips_of_second_looks():
    model = wdjax.Model(lambda w, x: _misled(x) @ w, WIDE)
    with pytest.warns(RobustnessWarning, match="second look"):
        found = audit.of(model, IMAGES, CLASSES, eps_list=[0.04, 0.08])
    assert found.passed
    entries = [entry for entry in found.sandwich.entries if entry.order == np.inf]
    for place, eps in enumerate((0.04, 0.08)):
        looked = [entry for entry in entries if entry.eps == eps]
        standing = [np.asarray(one.result.correct & ~one.result.success) for one in looked]
        seen = [one.result.overlooked for one in looked]
        assert any(some is not None and some.any() for some in seen)
        left = np.logical_and.reduce(standing + [~some for some in seen if some is not None])
        assert found.sandwich.attacked(np.inf)[place] == pytest.approx(left.mean())
        assert left.mean() < min(one.accuracy for one in looked)
        assert found.sandwich.attacked(np.inf)[place] >= found.sandwich.certified(np.inf)[place]


def test_a_loss_that_does_not_follow_the_criterion_gets_a_second_look():
    """Its points rise above noise, since it begins at random ones; its loss goes another way."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(24, 10)), jnp.float32)
    x = jnp.asarray(rng.uniform(0.2, 0.8, (24, 24)), jnp.float32)
    model, targets = wdjax.Model(lambda w, x: x @ w, w), (jnp.argmax(x @ w, axis=1) + 3) % 10

    def target_led(out, y):
        return -losses.margin(out, y)

    attack = attacks.Diversified(Lp(2))
    given = model, x, targets
    with pytest.warns(RobustnessWarning, match="a second look"):
        found = wdjax.search(attack, *given, eps=0.7, key=KEY, criterion=target_led)
    assert found.overlooked.sum() >= 10
    with pytest.warns(RobustnessWarning, match="a second look"):
        several = ensembles.cascade({"one": attack}, *given, eps=0.7, key=KEY, criterion=target_led)
    np.testing.assert_array_equal(several.overlooked, found.overlooked)
    # In linf margin ascent, of the attack and of the first looks, swings between rivals.
    kinked = attacks.PGD(steps=40, loss=target_led)
    with pytest.warns(RobustnessWarning, match="a second look"):
        wdjax.search(kinked, *given, eps=0.35, criterion=target_led)

    # A criterion without derivatives, as of a host callback, may judge an attack with a loss.
    def judged(out, y):
        return jax.pure_callback(lambda out, y: np.float32(target_led(out, y)), y * 1.0, out, y)

    with pytest.warns(RobustnessWarning, match="a second look by MarginPGD failed"):
        wdjax.search(attack, *given, eps=0.7, key=KEY, criterion=judged)
    for suite in (ensembles.autoattack, ensembles.a3, ensembles.a3_wda):
        with pytest.raises(ValueError, match="does not take criterion"):
            suite(*given, eps=0.7, key=KEY, criterion=target_led)


def test_ensembles_that_aim_at_classes_name_themselves_where_there_are_none():
    model = wdjax.Model(lambda w, x: (x @ w, x[:, 0]), W)
    how = {"key": KEY, "criterion": lambda out, y: losses.margin(out[0], y)}
    with pytest.raises(ValueError, match="wda_star follows single classes"):
        ensembles.wda_star(model, X, Y, **how)
    with pytest.raises(ValueError, match="fast follows single classes"):
        ensembles.fast(model, X, Y, eps=0.1, **how)


@pytest.mark.parametrize("shift", [1, -1])
def test_labels_that_are_counted_from_another_number_are_told(shift):
    x = np.random.default_rng(0).uniform(size=(60, 6)).astype(np.float32)
    labels = np.asarray(jnp.argmax(x @ W, axis=1)) + shift
    fits = (labels >= 0) & (labels < 3)
    x, labels = x[fits][:9], labels[fits][:9]
    with pytest.warns(RobustnessWarning, match="0% of . samples .* classes are counted from 0"):
        wdjax.search(PGD, PLAIN, x, labels, eps=0.01)


@pytest.mark.parametrize("name", ["DeepFool", "TrustRegion"])
def test_flips_that_are_flips_half_of_the_way_are_told(name):
    """The distance to a half space is known; an attack that begins at a flip ends there."""
    attack = getattr(attacks, name)(Lp(2, box=None))
    model, x, y = (wdjax.Model(lambda w, x: x @ w, W[:, :2]), X, jnp.argmax(X @ W[:, :2], axis=1))
    normal = W[:, 1] - W[:, 0]
    distance = np.abs(x @ normal) / np.linalg.norm(normal)
    away = jnp.where(y == 0, 1.0, -1.0)[:, None] * normal / np.linalg.norm(normal)
    far = x + 10 * distance[:, None] * away
    with pytest.warns(RobustnessWarning, match="12 of 12 flips are flips half of the way already"):
        found = wdjax.search(attack, model, x, y, start=far)
    assert (np.asarray(found.cost) > 2 * distance).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near = wdjax.search(attack, model, x, y, start=x + 1.5 * distance[:, None] * away)
        plain = wdjax.search(attack, model, x, y)
    assert (np.asarray(near.cost) < 2 * distance).all()
    np.testing.assert_allclose(plain.cost, distance, rtol=0.05)
