"""What a stranger tried: nothing may look robust because something went wrong."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import attacks, ensembles, losses

fast = pytest.mark.fast

LINEAR = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
PAIR, FIRST = jnp.array([[0.6, 0.4], [0.7, 0.3]]), jnp.array([0, 0])


@fast
def test_a_flip_that_was_found_survives_an_overflow():
    """Further out the logits overflow; a larger budget must not look safer."""
    steep = wdjax.Model(
        lambda w, x: (x @ w) * jnp.exp(jnp.maximum(0.45 - x[:, :1], 0) * 2000), LINEAR.args[0]
    )
    for attack in (attacks.PGD(steps=10), attacks.WDA(iterate="best")):
        for eps in (0.12, 0.14, 0.2, 0.25, 0.3):
            found = wdjax.search(attack, steep, PAIR[:1], FIRST[:1], eps=eps)
            assert found.success.all()
            assert found.fault.all() == (eps >= 0.2)


@fast
def test_rivals_behind_a_bad_chunk_are_found():
    def blind(w, x):
        return jnp.where(((x[:, 0] < 0.59) & (x[:, 1] < 0.401))[:, None], jnp.nan, x @ w)

    for classes in (10, 13):
        w = jnp.zeros((2, classes)).at[:, 0].set(jnp.array([1.0, -1.0]))
        w = w.at[:, -1].set(jnp.array([-1.0, 1.0])).at[:, 1:-1].set(jnp.array([[-3.0], [-1.0]]))
        attack = attacks.WDA(steps=1, probe=1)
        found = wdjax.search(attack, wdjax.Model(blind, w), PAIR[:1], FIRST[:1], eps=0.2)
        assert found.success.all()
        assert found.fault.all()


@fast
def test_nothing_is_overspent_inside_a_trace():
    walk = attacks.WDAPlusPlus(step_size=0.1)
    spent = jax.jit(lambda e: wdjax.run(walk, LINEAR, PAIR, FIRST, eps=e, kappa=2.0).accuracy)
    assert np.isnan(spent(0.001))
    found = wdjax.search(attacks.PGD(), LINEAR, PAIR, FIRST, eps=0.3)
    again = jax.jit(lambda e: wdjax.spend(found, eps=e, kappa=1.0).accuracy)
    assert all(np.isnan(again(eps)) for eps in (jnp.nan, -1.0, 0.001))
    assert np.isfinite(again(0.3))


@fast
def test_errors_do_not_buy_moves():
    points = jnp.array([[0.45, 0.55]] * 3 + [[0.6, 0.4]] * 3)
    labels = jnp.zeros(6, int)
    ask = functools.partial(wdjax.search, attacks.PGD(), LINEAR, points, labels, eps=0.12)
    lean, full = ask(), ask(skip_misclassified=False)
    assert float(wdjax.spend(lean, eps=0.03).accuracy) == pytest.approx(
        float(wdjax.spend(full, eps=0.03).accuracy)
    )


@fast
def test_a_start_outside_the_box_is_brought_in():
    trap = wdjax.Model(lambda w, x: jnp.where(x[:, :1] > 1.2, -(x @ w), x @ w), LINEAR.args[0])
    points = jnp.array([[0.9, 0.1], [0.8, 0.2]])
    far = jnp.array([[5.0, 0.0], [5.0, 0.0]])
    found = wdjax.search(attacks.WDAPlusPlus(steps=60), trap, points, FIRST, start=far)
    assert found.success.all()


@fast
def test_half_precision_inside_the_model_can_be_bisected():
    w = jnp.array([[1.0, -1.0, -2.0], [-1.0, 1.0, -2.0]])
    half = wdjax.Model(lambda w, x: (x @ w).astype(jnp.bfloat16), w)
    found = wdjax.search(attacks.WDAPlusPlus(step_size=0.3, steps=30), half, PAIR[:1], FIRST[:1])
    assert float(found.cost[0]) < 0.12


@fast
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_traces_work_where_double_is_the_default(dtype):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        model = jax.tree.map(lambda w: w.astype(dtype), LINEAR)
        for attack in (attacks.PGD(steps=3), attacks.WDA(), attacks.WDAPlusPlus()):
            inside = jax.jit(
                lambda x, attack=attack: wdjax.run(attack, model, x, FIRST, eps=0.12).accuracy
            )
            assert 0.1 < float(inside(PAIR.astype(jnp.float32))) <= 0.5


@fast
def test_constants_inside_jit_are_traced_too():
    inside = jax.jit(
        lambda key: wdjax.run(attacks.PGD(), LINEAR, PAIR, FIRST, eps=0.15, key=key).accuracy
    )
    assert float(inside(jax.random.key(0))) == 0.5


@fast
def test_victims_without_gradients_or_classes():
    hard = wdjax.Model(lambda w, x: jnp.argmax(x @ w, -1), LINEAR.args[0])

    def wrong(out, y):
        return (out != y) - 0.5

    attack = attacks.PGD(steps=1, loss=lambda out, y: jnp.zeros(len(y)))
    found = wdjax.search(attack, hard, PAIR, FIRST, eps=0.1, criterion=wrong)
    assert not found.success.any()
    assert (found.zeros == found.gradients).all()
    one = wdjax.Model(lambda w, x: (x @ w)[:, 0], LINEAR.args[0])

    def sign(out, y):
        return jnp.where(y == 1, -out, out)

    found = wdjax.search(attacks.PGD(loss=sign), one, 1 - PAIR, FIRST + 1, eps=0.1, criterion=sign)
    assert found.x_adv.shape == PAIR.shape


@fast
def test_best_is_for_what_is_not_yet_spent():
    result = wdjax.run(attacks.PGD(), LINEAR, PAIR, FIRST, eps=0.1)
    with pytest.raises(ValueError, match="spend the budget after"):
        wdjax.best_of(result, result)


@fast
def test_checkpoints_belong_to_their_question(tmp_path):
    ask = functools.partial(wdjax.search, x=PAIR, y=FIRST, eps=0.3, checkpoint=tmp_path / "c")
    coarse = wdjax.Model(lambda w, x: (jnp.round(x * 10) / 10) @ w, LINEAR.args[0])
    ask(attacks.PGD(steps=3), coarse)
    for attack, model, options in (
        (attacks.PGD(steps=3), LINEAR, {}),
        (attacks.PGD(steps=3, loss=losses.margin), coarse, {}),
        (attacks.PGD(steps=3), coarse, {"criterion": lambda out, y: losses.margin(out, y) - 1}),
    ):
        with pytest.raises(ValueError, match="other settings"):
            ask(attack, model, **options)
    half = wdjax.Model(lambda w, x: (x @ w).astype(jnp.bfloat16), LINEAR.args[0])
    wdjax.search(attacks.PGD(steps=2), half, PAIR, FIRST, eps=0.1, checkpoint=tmp_path / "half")


@fast
def test_a_callback_that_raises_leaves_a_checkpoint(tmp_path):
    ask = functools.partial(
        wdjax.search, attacks.PGD(steps=6), LINEAR, PAIR, FIRST, eps=0.05,
        checkpoint=tmp_path / "c", history=True,
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        ask(callback=lambda progress: 1 / 0)
    seen = []
    found = ask(callback=seen.append)
    assert seen[0].taken == 4
    whole = wdjax.search(attacks.PGD(steps=6), LINEAR, PAIR, FIRST, eps=0.05, history=True)
    chex.assert_trees_all_equal(found, whole)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        wdjax.search(
            attacks.PGD(), LINEAR, PAIR, FIRST, eps=0.1, checkpoint=tmp_path / "file" / "c"
        )


def test_what_cannot_be_spent_is_named():
    mixed = ensembles.mixed(attacks.PGD(steps=2), LINEAR, PAIR, FIRST, eps=0.1)
    with pytest.raises(ValueError, match=r"got Mixed; pass its .found"):
        wdjax.spend(mixed, eps=0.1)
    with pytest.raises(ValueError, match="got dict"):
        wdjax.spend({}, eps=0.1)
