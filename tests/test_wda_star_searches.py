"""Which searches `wda_star` and `fast` make, of which samples, from where, with given results."""

import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import Lp, attacks
from wdjax.ensembles import star
from wdjax.ensembles.fast import _hunt, _leg, _rounds
from wdjax.ensembles.walks import Kind


class Canned:
    """A question whose searches have given results; it notes who was searched, and from where."""

    def __init__(self, n, distances):
        self.x, self.y, self.distances, self.asked = jnp.zeros((n, 1)), np.zeros(n), distances, []

    def search(self, number, attack, *, eps=None, start=None, only=None):
        distance = np.where(only, self.distances[attack][: len(only)], np.inf)
        self.asked.append((number, attack, only, start))
        some = jnp.asarray(only)
        return wdjax.core.Found(
            x_adv=jnp.asarray(distance)[:, None], proof=None, cost=jnp.asarray(distance),
            correct=jnp.ones(len(only), bool), success=jnp.isfinite(jnp.asarray(distance)),
            margin=jnp.ones(len(only)), done=some, fault=~some, zeros=0 * some, gradients=5 * some,
            forwards=5 * some + 1,
        )  # fmt: skip


@pytest.mark.parametrize("nearer", [9, 3])
def test_brief_walks_open_where_random_points_are_better_on_most_trial_samples(nearer):
    """Nearer in sum they are in both cases: on few samples by much. Trial samples are 12."""
    n, trial = 72, np.arange(72) % 6 == 0
    far, near = attacks.Walk(steps=21, far=True), attacks.Walk(steps=22)
    last, won = attacks.Walk(steps=23), (np.arange(n) < 6 * nearer) & trial
    several = Kind(last, "sample", brief=2)
    distances = {far: np.where(won, 1.0, 2.0), near: np.where(won, 9.0, 1.9), last: np.full(n, 0.5)}
    ask = Canned(n, distances | {several.first: np.full(n, 3.0)})
    plan = star.schedule(Lp(), 400)._replace(
        firsts=[Kind(far, "sample"), Kind(near, "sample")], several=several
    )
    record = star._open(ask, plan, star.Spending(400, 1e-4, None, 1), np.inf, None)
    attacked = [attack for _, attack, _, _ in ask.asked]
    opened = [several.first] * 2 + [last] if nearer > 6 else [far]
    assert attacked == [far, near, *opened]
    assert [number for number, _, _, _ in ask.asked] == list(range(len(attacked)))
    assert record.number == len(attacked)
    only = ask.asked[-1][2]
    np.testing.assert_array_equal(only, ~trial | won if nearer > 6 else ~trial)
    np.testing.assert_array_equal(record.found.cost[only], 0.5 if nearer > 6 else 2.0)


def test_a_walk_starts_at_the_nearest_flip_of_the_brief_walks_before_it():
    last = attacks.Walk(steps=23)
    several = Kind(last, "sample", brief=2)
    ask, everyone = Canned(3, {last: np.array([1.0, 1.0, 9.0])}), np.ones(3, bool)
    brief = iter([np.array([3.0, 2.0, np.inf]), np.array([2.5, 4.0, 5.0])])
    ask.distances = type("Each", (dict,), {"__missing__": lambda self, key: next(brief)})(
        ask.distances
    )
    found = several.follow(ask, 4, None, everyone)
    assert [number for number, _, _, _ in ask.asked] == [4, 5, 6]
    np.testing.assert_array_equal(ask.asked[-1][3][:, 0], [2.5, 2.0, 5.0])
    np.testing.assert_array_equal(found.cost, [1.0, 1.0, 5.0])
    assert several.passes == 2 * (2 * several.first.steps + 3) + 2 * last.steps + 3
    assert not several.near


def test_the_last_searches_are_of_the_samples_that_are_worth_most_if_few_are_payable():
    distance, last, nobody = np.arange(1.0, 41.0), attacks.Walk(steps=12), np.zeros(40, bool)
    found = Canned(40, {last: distance}).search(0, last, only=~nobody)
    ask = Canned(40, {last: np.full(40, 0.5)})
    record = star.Standing(ask, 1, found, nobody, nobody, np.full(40, 0.2), {}, np.inf)
    spent = float(found.passes.mean())
    for left, walked in ((0.0, 0), (6.75, 10), (27.0, 40)):  # A last walk takes 27.
        terms = star.Spending(spent + left, 1e-4, None, 1)
        star._ended(record, [Kind(last, "best")], terms)
        np.testing.assert_array_equal(ask.asked[-1][2], distance > 40 - walked)


def test_trial_samples_that_nothing_flips_speak_for_no_start():
    far, near = attacks.Walk(steps=21, far=True), attacks.Walk(steps=22)
    several = Kind(attacks.Walk(steps=23), "sample", brief=2)
    ask = Canned(72, {far: np.full(72, np.inf), near: np.full(72, np.inf)})
    plan = star.schedule(Lp(), 400)._replace(
        firsts=[Kind(far, "sample"), Kind(near, "sample")], several=several
    )
    star._open(ask, plan, star.Spending(400, 1e-4, None, 1), np.inf, None)
    assert [attack for _, attack, _, _ in ask.asked] == [far, near, far]


def test_fast_takes_small_steps_from_the_nearest_flips():
    """Sixteen survivors, whose flips are beyond the radius; small steps bring two inside."""
    n, ball = 16, Lp()
    walks = [kind.attack for kind, _ in _rounds(ball)]
    brief, held, again, small = walks[:4]
    known = 0.31 + 0.01 * np.arange(n)
    distances = dict.fromkeys(walks, np.full(n, np.inf))
    distances |= {brief: known, held: known + 1, again: known - 0.005, small: np.full(n, 0.3)}
    ask = Canned(n, distances)
    found = ask.search(0, walks[4], only=np.ones(n, bool))
    account = _hunt(ask, ball, found, jnp.full(n, 0.3), [_leg("", found)], 150)
    asked = ask.asked[1:]
    assert [attack for _, attack, _, _ in asked[:4]] == [brief, held, again, small]
    assert [only.sum() for _, _, only, _ in asked[:5]] == [16, 16, 4, 2, 7]
    np.testing.assert_allclose(asked[2][3][:, 0], known, rtol=1e-6)
    np.testing.assert_allclose(asked[3][3][:4, 0], known[:4] - 0.005, rtol=1e-6)
    assert [leg.accuracy for leg in account.legs[3:5]] == [1.0, 14 / 16]
    assert not asked[4][2][:2].any()
