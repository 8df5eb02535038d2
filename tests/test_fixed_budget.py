"""Attacks of a fixed budget against their papers' rules, written out again, and closed forms."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_hyperplane import cases, nearest
from test_search import apply, make_params, model, x, y

import wdjax
from wdjax import Lp, attacks, core, losses, norms
from wdjax.attacks import linearised, phases, square

fast = pytest.mark.fast


# Auto-PGD, one sample at a time, arranged as a loop of moves with their checkpoints behind.


def auto_pgd(start, home, label, eps, norm, loss, steps, model=model):
    """Losses of all iterates, by Croce and Hein's Algorithm 1 in NumPy's float64."""
    value_and_slope = jax.jit(
        jax.value_and_grad(lambda z: loss(model(z[None]), jnp.array([label]))[0])
    )

    def at(z):
        value, slope = value_and_slope(jnp.asarray(z, jnp.float32))
        return float(value), np.asarray(slope, float)

    def project(z):
        if norm == math.inf:
            return np.clip(np.clip(z, home - eps, home + eps), 0, 1)
        delta = z - home
        return np.clip(home + delta * min(1, eps / max(np.linalg.norm(delta), 1e-12)), 0, 1)

    def direction(g):
        return np.sign(g) if norm == math.inf else g / (np.linalg.norm(g) + 1e-12)

    p, fractions = [0.0, 0.22], []
    while p[-1] < 1:
        fractions.append(p[-1])
        p.append(p[-1] + max(p[-1] - p[-2] - 0.03, 0.06))
    due = [round(fraction * steps) for fraction in fractions]
    now = before = np.asarray(start, float)
    value, slope = at(now)
    seen, eta = [value], 2 * eps
    top, top_x, top_slope, last_top, halved, last_due = value, now, slope, value, False, 0
    for k in range(steps):
        ahead = project(now + eta * direction(slope))
        share = 1.0 if k == 0 else 0.75
        moved = project(now + share * (ahead - now) + (1 - share) * (now - before))
        before, now = now, moved
        value, slope = at(now)
        seen.append(value)
        if value > top:
            top, top_x, top_slope = value, now, slope
        if k + 1 in due:
            window = seen[last_due : k + 2]
            rises = sum(b > a for a, b in itertools.pairwise(window))
            stalled = rises <= 0.75 * (k + 1 - last_due) or (not halved and top <= last_top)
            if stalled:
                eta, now, slope = eta / 2, top_x, top_slope
            halved, last_top, last_due = stalled, top, k + 1
    return seen


@pytest.mark.parametrize("norm", [2, math.inf])
@pytest.mark.parametrize("loss", [losses.margin, losses.cross_entropy])
def test_apgd_takes_the_steps_of_the_paper(norm, loss):
    eps = {2: 0.25, math.inf: 0.1}[norm]
    start = np.clip(np.asarray(x) + 0.05 * np.sin(np.arange(6)), 0, 1).astype(np.float32)
    attack = attacks.APGD(Lp(norm), loss=loss, stop=False)
    found = wdjax.search(
        attack, model, x, y, eps=eps, key=jax.random.key(0), start=start, history=True,
        criterion=loss, skip_misclassified=False,
    )  # fmt: skip
    inside = attack.ball.project(jnp.asarray(start), x, jnp.full(len(x), eps))
    same = 0
    for row in range(8):
        rule = auto_pgd(inside[row], np.asarray(x[row], float), int(y[row]), eps, norm, loss, 100)
        own = found.history.value[:, row]
        assert own.shape == (101,)
        # Chaos: a comparison of equal floats may part them; until then they are one.
        agree = np.isclose(own, rule, atol=2e-5)
        same += agree.all()
        assert agree[:23].all(), row
        np.testing.assert_allclose(own.max(), np.max(rule), atol=2e-3)
    assert same >= 5


def test_apgd_goes_on_from_the_best_point_where_progress_stalls():
    """Steps over a hill and back: at checkpoints the present point is not the best one."""
    hill = wdjax.Model(
        lambda top, x: jnp.stack([jnp.zeros(len(x)), -jnp.sum((x - top) ** 2, axis=1)], axis=1),
        jnp.array([0.5317, 0.4411]),
    )
    home, label, eps = jnp.full((1, 2), 0.5), jnp.zeros(1, int), 0.3
    found = wdjax.search(
        attacks.APGD(loss=losses.margin, stop=False), hill, home, label, eps=eps, start=home,
        key=jax.random.key(0), history=True, criterion=losses.margin, skip_misclassified=False,
    )  # fmt: skip
    rule = auto_pgd(home[0], np.full(2, 0.5), 0, eps, math.inf, losses.margin, 100, hill)
    np.testing.assert_allclose(found.history.value[:, 0], rule, atol=1e-6)
    assert np.argmax(rule[:23]) < 22  # There is somewhere to return to.


@fast
def test_checkpoints_of_apgd():
    windows = phases.windows(100)
    assert np.flatnonzero(windows).tolist() == [22, 41, 57, 70, 80, 87, 93, 99]
    assert windows[windows > 0].tolist() == [22, 19, 16, 13, 10, 7, 6, 6]
    assert np.flatnonzero(phases.windows(1)).tolist() == [1]


@fast
def test_phases_of_apgd():
    plan = phases.schedule(99, (10, 5, 2, 1))
    assert plan.width.tolist() == [10] * 20 + [5] * 20 + [2] * 20 + [1] * 40
    assert np.flatnonzero(plan.first).tolist() == [0, 20, 40, 60]
    assert plan.window.tolist() == [*(phases.windows(19).tolist() * 3), *phases.windows(39)]
    assert phases.schedule(1, (3, 1)).width.tolist() == [3, 1]
    assert phases.schedule(1, (5, 3, 2, 1)).width.tolist() == [1, 1]
    for wrong in ((), (3, 2), (0.5, 1), (math.inf, 1), (math.nan, 1), 2):
        with pytest.raises(ValueError, match="widths must be"):
            attacks.APGD(widths=wrong)


@pytest.mark.parametrize("norm", [1, math.inf])
def test_apgd_walks_home_from_larger_balls(norm):
    """Step by step: every phase stays in its ball and begins at the best point of the last one."""
    attack = attacks.APGD(Lp(norm), steps=19, widths=(4, 1), stop=False)
    eps, n = {1: 0.1, math.inf: 0.03}[norm], len(x)
    victim = core.Victim(model, losses.decision_margin)
    samples = core.Samples(x, y, jnp.full(n, eps), model(x))
    state = attack.init(victim, samples, None, jax.random.split(jax.random.key(0), n))
    step = jax.jit(functools.partial(attack._climb, victim))
    far = []
    for taken in range(20):
        cost = norms.lp_norm(state.x - x, norm)
        assert (cost <= eps * (4 if taken < 12 else 1) * (1 + 1e-6)).all()
        far.append(cost)
        state, _ = step(samples, state)
        if taken == 11:
            home = attack.ball.project(state.peak, x, samples.eps)
            np.testing.assert_array_equal(state.x, home)
        assert (norms.lp_norm(state.best.x - x, norm) <= eps * (1 + 1e-6)).all() or taken < 12
    assert (np.max(far[:12], axis=0) > 2 * eps).all()
    assert jnp.isfinite(state.best.value).all()


def test_apgd_keeps_a_flip_that_it_is_given():
    """Phases of larger radii do not lose a start within eps."""
    eps, key = 0.6, jax.random.key(0)
    given = wdjax.search(attacks.APGD(Lp(1)), model, x, y, eps=eps, key=key)
    assert given.success.any()
    attack = attacks.APGD(Lp(1), steps=1)
    again = wdjax.search(attack, model, x, y, eps=eps, key=key, start=given.x_adv)
    assert (again.success >= given.success).all()
    assert (again.gradients[given.success & given.correct] <= 2).all()


@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_targets_by_logit_and_by_ratio(norm):
    """Linear models tell the true order of the classes' boundaries."""
    weights = jax.random.normal(jax.random.key(4), (6, 5)) * jnp.array([1, 9, 2, 0.3, 4.0])
    logits = np.asarray(x @ weights)
    labels = logits.argmax(axis=1)
    columns, others = np.asarray(weights).T, np.arange(5) != labels[:, None]
    gap = np.take_along_axis(logits, labels[:, None], 1) - logits
    wide = [norms.lp_norm(columns[labels] - columns[j], norms.dual(norm)) for j in range(5)]
    ratio = gap / np.where(others, np.stack(wide, axis=1), 1.0)
    victim = wdjax.Victim(wdjax.Model(lambda w, x: x @ w, weights), losses.margin)
    samples = wdjax.Samples(x, jnp.asarray(labels), jnp.full(30, 0.1), jnp.asarray(logits))
    ranked, info = linearised.nearest_rivals(victim, samples, norm, 3, 100)
    assert (np.asarray(info.gradients) == 4).all()
    keys = jax.random.split(jax.random.key(0), 30)
    by_logit = attacks.APGD(Lp(norm), targets=3).init(victim, samples, None, keys).targets
    for found, order in ((ranked, ratio), (by_logit, gap)):
        order = np.argsort(np.where(others, order, np.inf), axis=1)[:, :3]
        np.testing.assert_array_equal(found, order)
    # Of two candidates by ratio, the third comes by its logit.
    some = linearised.nearest_rivals(victim, samples, norm, 3, 2)[0]
    np.testing.assert_array_equal(np.sort(some[:, :2]), np.sort(by_logit[:, :2]))
    np.testing.assert_array_equal(some[:, 2], by_logit[:, 2])


# FAB: linear models have one boundary, which the first step finds.


@fast
@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("targets", [0, 1])
def test_fab_on_linear_models_is_the_projection(norm, targets):
    z, w, _ = cases(24)
    w = np.where(np.abs(w).sum(axis=1, keepdims=True) > 0, w, 1.0)
    w /= np.linalg.norm(w, axis=1, keepdims=True)
    offset = -(w * (0.3 * z + 0.35)).sum(axis=1)  # Through a point inside the box.
    gap = (z * w).sum(axis=1) + offset

    def search(z, w, offset, label):
        def plane(params, x):
            value = x @ params[0] + params[1]
            return jnp.stack([jnp.zeros_like(value), value], axis=1)

        attack = attacks.FAB(Lp(norm), steps=3, targets=targets)
        return wdjax.search(attack, wdjax.Model(plane, (w, offset)), z[None], label[None])

    rows = (jnp.asarray(leaf, jnp.float32) for leaf in (z, w, offset))
    found = jax.jit(jax.vmap(search))(*rows, jnp.asarray(gap > 0, jnp.int32))
    exact = [nearest(z[i], w[i], gap[i], norm) for i in range(24)]
    assert found.success.all()
    assert (np.asarray(found.cost[:, 0]) >= np.array(exact) * (1 - 1e-4) - 1e-6).all()
    assert (np.asarray(found.cost[:, 0]) <= np.array(exact) * 1.051 + 1e-6).all()


@fast
@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_fab_moves_onto_the_linearised_boundary_wherever_it_is(norm):
    """Both projections lie on it, that of the sample too, and so does their mean."""
    rng = np.random.default_rng(0)
    home, point, normal = (jnp.asarray(rng.normal(size=(6, 5)), jnp.float32) for _ in range(3))
    gap = jnp.asarray(rng.normal(size=6), jnp.float32)
    attack = attacks.FAB(Lp(norm, box=None), eta=1.0)
    moved = attack._approach(home, point, linearised.Plane(gap, normal, jnp.abs(gap)))
    np.testing.assert_allclose(gap + jnp.sum(normal * (moved - point), axis=1), 0, atol=1e-5)
    # Where the present point is far off, the sample's projection draws it back.
    assert (norms.lp_norm(moved - home, norm) < norms.lp_norm(point - home, norm)).mean() > 0.5


@fast
@pytest.mark.parametrize("power", [1, 2, 4])
def test_the_final_search_of_fab_finds_where_a_curve_crosses(power):
    """A step from the sample overshoots a convex margin; the segment crosses at a known place."""
    curve = wdjax.Model(
        lambda w, x: jnp.stack([jnp.zeros(len(x)), (x[:, 0] / w) ** power - 1], axis=1), 0.5
    )
    x, y = jnp.array([[0.3], [0.2], [0.45]]), jnp.zeros(3, jnp.int32)
    exact = 0.5 - np.asarray(x[:, 0])
    rough, fine = (
        wdjax.search(attacks.FAB(Lp(2), steps=1, final=final), curve, x, y) for final in (0, 8)
    )
    assert fine.success[rough.success].all()
    assert (fine.cost <= rough.cost).all()
    known = np.asarray(rough.success)
    np.testing.assert_allclose(fine.cost[known], exact[known], rtol=0.051)
    assert (np.asarray(fine.cost)[known] >= exact[known] - 1e-6).all()
    assert (fine.forwards - rough.forwards == 8).all()


@fast
@pytest.mark.parametrize(
    "attack",
    [attacks.FAB(Lp(2), steps=40, final=0), attacks.TrustRegion(Lp(2), steps=200, radius=0.05)],
    ids=["fab", "tr"],
)
def test_steps_that_fall_short_of_a_boundary_cross_it_in_the_end(attack):
    """The tangent of a margin |d|^1.2 leads 0.87 of the way: for ever, if it led to 0."""

    def curve(w, x):
        value = x[:, 0] - w
        margin = jnp.sign(value) * jnp.maximum(jnp.abs(value), 1e-30) ** 1.2
        return jnp.stack([jnp.full(len(x), 7.0), 7.0 + margin], axis=1)

    x = jnp.linspace(0.05, 0.45, 9)[:, None]
    found = wdjax.search(attack, wdjax.Model(curve, 0.5), x, jnp.zeros(9, jnp.int32))
    assert found.success.all()
    np.testing.assert_allclose(found.cost, 0.5 - x[:, 0], rtol=0.05, atol=2e-3)


@fast
def test_bounded_fab_stops_at_the_radius_and_says_no_more():
    free = wdjax.search(attacks.FAB(Lp(2), steps=20), model, x, y)
    bound = wdjax.search(attacks.FAB(Lp(2), steps=20, bounded=True), model, x, y, eps=0.15)
    near = np.asarray(free.success & (free.cost <= 0.15))
    assert 3 < near.sum() < 25
    np.testing.assert_array_equal(bound.success, near | ~np.asarray(free.correct))
    assert float(bound.cost.max()) <= 0.15
    assert (np.asarray(bound.gradients)[near] < 40).all()
    np.testing.assert_array_equal(bound.x_adv[~near], x[~near])
    np.testing.assert_array_equal(bound.margin[~near], losses.margin(model(x), y)[~near])


# Square.


@fast
def test_squares_shrink_as_in_the_paper():
    sides = square._sides((28, 28), 0.8, 10_000, False)
    after = {10: 2, 50: 4, 200: 8, 500: 16, 1000: 32, 2000: 64, 4000: 128, 6000: 256, 8000: 512}
    for query in (0, 10, 11, 50, 51, 201, 999, 1001, 2001, 4001, 6001, 8000, 8001, 9999):
        share = 0.8 / max([1] + [half for last, half in after.items() if query > last])
        assert (sides[query] == max(1, round(math.sqrt(share * 784)))).all()
    few = square._sides((28, 28), 0.8, 100, True)
    np.testing.assert_array_equal(few, sides[::100])
    # What is too long for one side is wider on the other.
    assert square._sides((4, 100), 0.5, 1, False).tolist() == [[4, 50]]
    assert square._sides((100, 4), 0.5, 1, False).tolist() == [[50, 4]]
    assert square._sides((1, 1), 0.1, 5, False).tolist() == [[1, 1]] * 5


@fast
@pytest.mark.parametrize("shape", [(7, 7, 2), (3, 8, 1), (8, 3, 3)])
def test_squares_reach_every_row_and_column(shape):
    sides = jnp.array([2, 2])
    keys = jax.random.split(jax.random.key(0), 400)
    flip = jax.vmap(lambda key: square._flip(key, jnp.zeros(shape), sides, 0.5))
    moved = np.asarray(flip(keys))
    touched = (moved != 0).all(axis=-1)
    assert touched.any(axis=0).all()
    assert (touched.sum(axis=(1, 2)) == 4).all()
    assert set(np.unique(moved)) == {-1.0, 0.0, 1.0}
    corners = [tuple(np.argwhere(rows)[0]) for rows in touched]
    places = (shape[0] - 1) * (shape[1] - 1)
    assert len(np.unique(corners, axis=0)) == places


@fast
def test_bumps_are_the_pyramids_of_the_paper():
    def pyramid(height, width):
        n = height // 2
        out = np.zeros((height, width))
        for r in range(1, height + 1):
            for s in range(1, width + 1):
                rings = n - max(abs(r - height // 2 - 1), abs(s - width // 2 - 1))
                out[r - 1, s - 1] = sum(1 / (n + 1 - k) ** 2 for k in range(rings + 1))
        return out

    for side in (3, 4, 5, 8):
        half = side // 2
        paper = np.concatenate([pyramid(side, half), -pyramid(side, side - half)], axis=1)
        at = jnp.arange(side)
        np.testing.assert_allclose(square._bump(at, at, (side, side), (9, 9)), paper, atol=1e-6)


@fast
@pytest.mark.parametrize("norm", [1, 2])
def test_shifts_spend_what_there_is(norm):
    """In exact steps the length never exceeds the radius, and what leaves a window is gone."""
    ball, eps = Lp(norm), 0.7
    keys = jax.random.split(jax.random.key(1), 60)
    delta = eps * square._grid(ball, keys[0], (10, 10, 3), jnp.float32)
    np.testing.assert_allclose(norms.lp_norm(delta[None], norm), eps, rtol=1e-5)
    shift = jax.jit(lambda key, delta: square._shift(ball, key, delta, jnp.array([4, 4]), eps))
    for key in keys:
        delta = shift(key, delta)
        length = float(norms.lp_norm(delta[None], norm)[0])
        assert 0.999 * eps < length < 1.001 * eps
    emptied = np.asarray(delta == 0).all(axis=-1).sum()
    assert emptied > 0


@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_more_queries_never_lower_the_margin(norm):
    images = jax.random.uniform(jax.random.key(2), (12, 4, 7, 1))
    victim = wdjax.Model(apply, make_params(3, 28))
    labels = jnp.argmax(victim(images), -1)
    eps = {1: 6.0, 2: 1.5, math.inf: 0.25}[norm]
    before = -np.inf
    for queries in (1, 8, 60):
        attack = attacks.Square(Lp(norm), queries=queries)
        found = wdjax.search(attack, victim, images, labels, eps=eps, key=jax.random.key(0))
        assert (np.asarray(found.margin) >= before).all()
        assert float(found.cost.max()) <= eps * (1 + 1e-6)
        before = np.asarray(found.margin)
    assert 2 < found.success.sum() < 12
    assert (np.asarray(found.forwards)[np.asarray(found.success)] < 62).any()


# W-PGD.


@fast
@pytest.mark.parametrize("norm", [2, math.inf])
@pytest.mark.parametrize("order", [1.5, 2, 4, math.inf])
def test_one_step_of_wpgd_is_the_steepest(norm, order):
    """Hoelder's inequality is an equation: no data set of the budget gains more to first order."""
    eps, ball = 1e-2, Lp(norm, None)
    attack = attacks.wfgsm(ball, order, losses.cross_entropy)
    found = wdjax.search(attack, model, x, y, eps=eps, skip_misclassified=False)
    slope = jax.grad(lambda x: losses.cross_entropy(model(x), y).sum())(x)
    steep = np.asarray(norms.lp_norm(slope, norms.dual(norm)), float)
    q = 1 if order == math.inf else order / (order - 1)
    gain = float(jnp.mean(jnp.sum(slope * (found.x_adv - x), axis=1)))
    np.testing.assert_allclose(gain, eps * np.mean(steep**q) ** (1 / q), rtol=1e-4)
    cost = np.asarray(found.cost, float)
    spent = cost.max() if order == math.inf else np.mean(cost**order) ** (1 / order)
    np.testing.assert_allclose(spent, eps, rtol=1e-5)


@fast
@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("order", [1, 2, math.inf])
def test_wpgd_stays_in_its_budget_and_is_no_weaker_than_nothing(norm, order):
    eps = {1: 0.5, 2: 0.3, math.inf: 0.15}[norm]
    for start in (None, 1 - x):  # The second one is far outside the budget.
        attack = attacks.WPGD(Lp(norm), order, steps=20)
        result = wdjax.run(
            attack, model, x, y, eps=eps, order=order, start=start, skip_misclassified=False
        )
        cost = np.asarray(result.cost, float)
        spent = cost.max() if order == math.inf else np.mean(cost**order) ** (1 / order)
        assert spent <= eps * (1 + 1e-6)
        assert float(result.accuracy) <= float(result.correct.mean())
        assert not result.fault.any()
    assert float(result.accuracy) < 0.9 * float(result.correct.mean())
    if order < math.inf:
        assert cost.max() > 1.2 * eps


@fast
def test_the_rectified_ratio_spends_nothing_on_what_has_fallen():
    slope = jax.grad(lambda z: losses.rectified_dlr(z, y).sum())(model(x))
    wrong = np.asarray(jnp.argmax(model(x), -1) != y)
    assert wrong.any()
    assert (np.asarray(slope)[wrong] == 0).all()
    assert (np.abs(np.asarray(slope)[~wrong]).max(axis=1) > 0).all()


# Few classes, odd losses.


@pytest.mark.parametrize("classes", [2, 3])
def test_two_and_three_classes_are_enough(classes):
    weights = jax.random.normal(jax.random.key(5), (6, classes))
    linear_model = wdjax.Model(lambda w, x: x @ w, weights)
    labels = np.asarray(jnp.argmax(linear_model(x), -1))
    exact = wdjax.search(attacks.FAB(steps=20, restarts=1), linear_model, x, labels)
    eps = float(np.median(exact.cost))
    certain = np.asarray(exact.cost) < 0.8 * eps
    few = (
        attacks.APGD(steps=10, loss=losses.dlr_or_margin),
        attacks.APGD(steps=10, targets=9, rank="ratio"),
        attacks.FAB(steps=10, targets=9, bounded=True),
        attacks.Diversified(),
    )
    more = (
        attacks.APGD(steps=10, loss=losses.probability_margin),
        attacks.APGD(steps=10, targets=9),
        attacks.Square(queries=200),
    )
    for attack in few if classes == 3 else few + more:
        # One untargeted ascent may end at the wrong class: A3 begins it again and again.
        tries = 8 if isinstance(attack, attacks.Diversified) else 1
        ask = functools.partial(wdjax.search, attack, linear_model, x, labels, eps=eps)
        every = [ask(key=jax.random.key(1 + number)) for number in range(tries)]
        found = every[0]
        assert wdjax.best_of(*every).success[certain].all(), attack
        assert float(found.cost.max()) <= eps * (1 + 1e-6)
        # Runs beyond the classes that there are take no passes.
        assert int(found.gradients.max()) <= (classes - 1) * 11 + classes - 1 + 15


@fast
def test_a_loss_that_is_no_number_is_a_fault_and_no_robustness():
    def broken(out, y):
        return losses.margin(out, y) * jnp.where(out[:, 0] > 0, jnp.nan, 1.0)

    found = wdjax.search(
        attacks.APGD(steps=5, loss=broken), model, x, y, eps=0.1, key=jax.random.key(0)
    )
    positive = np.asarray((model(x)[:, 0] > 1) & found.correct)
    assert positive.any()
    assert found.fault[positive].all()
    assert not found.done[positive].any()


def test_restarts_and_radii_never_hurt_apgd():
    ask = functools.partial(wdjax.search, model=model, x=x, y=y, key=jax.random.key(2))
    once = ask(attacks.APGD(Lp(2), steps=6), eps=0.2)
    more = ask(attacks.APGD(Lp(2), steps=6, restarts=4), eps=0.2)
    assert (np.asarray(more.margin) >= np.asarray(once.margin) - 1e-6).all()
    np.testing.assert_array_equal(more.success | once.success, more.success)
    standing = np.asarray(~more.success)
    assert (np.asarray(more.gradients)[standing] == 28).all()


@pytest.mark.parametrize("norm", [1, 2, jnp.inf])
def test_restarts_of_pgd_are_runs_from_random_points(norm):
    """Each run is one of its own from the ball's points; the best iterate of all counts."""
    eps = {1: 0.6, 2: 0.25, jnp.inf: 0.06}[norm]
    ball, key = Lp(norm), jax.random.key(4)
    how = {"eps": eps, "key": key, "skip_misclassified": False}
    several = wdjax.search(attacks.PGD(ball, steps=4, restarts=3), model, x, y, **how)
    runs = [wdjax.search(attacks.PGD(ball, steps=4), model, x, y, **how)]
    for run in (1, 2):
        keys = jax.vmap(lambda i, run=run: jax.random.fold_in(jax.random.fold_in(key, i), 5 * run))
        noise = jax.vmap(lambda one: ball.noise(one, x.shape[1:], x.dtype))(
            keys(jnp.arange(len(y)))
        )
        begun = ball.project(x + eps * noise, x, jnp.full(len(y), eps))
        runs.append(wdjax.search(attacks.PGD(ball, steps=4), model, x, y, start=begun, **how))
    values = jnp.stack([run.margin for run in runs])
    np.testing.assert_allclose(several.margin, values.max(axis=0), atol=1e-5)
    assert len({int(run) for run in jnp.argmax(values, axis=0)}) > 1, "no run was of use"
    # The step between two runs looks at where the first one ended.
    np.testing.assert_array_equal(several.gradients, 3 * 5 - 1)
    with pytest.raises(ValueError, match="restarts must be 1"):
        attacks.PGD(restarts=2, iterate="last")
