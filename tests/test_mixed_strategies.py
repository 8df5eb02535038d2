"""Mixed strategies: matrix games whose values are known, and a defence that tosses a coin."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import wdjax.transductive as games
from wdjax import Model
from wdjax.attacks import PGD
from wdjax.engine.diagnosis import RobustnessWarning
from wdjax.transductive import attacker
from wdjax.transductive.defense import Stateless
from wdjax.transductive.mixed_strategies import Reply

KEY = jax.random.key(0)
KNOWN = {
    "rock, paper, scissors": ([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], 0),
    "two by two": ([[3, -1], [-2, 4]], 1.0),  # (3 * 4 - 2) / (3 + 4 + 1 + 2)
    "saddle": ([[4, 2, 3], [1, 0, 5]], 2),
    "one row": ([[3.0, -7.0]], -7),
    "diagonal": (np.diag([1.0, 2.0, 4.0]), 1 / (1 + 1 / 2 + 1 / 4)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_values_of_matrix_games(name):
    table, value = np.asarray(KNOWN[name][0], float), KNOWN[name][1]
    rows, columns, found = games.matrix_game(table)
    assert found == pytest.approx(value, abs=1e-9)
    assert rows.sum() == pytest.approx(1)
    assert columns.sum() == pytest.approx(1)
    assert (rows @ table).min() == pytest.approx(value, abs=1e-9)
    assert (table @ columns).max() == pytest.approx(value, abs=1e-9)


def replies(table):
    """Best replies, and how many were asked for."""

    def row(columns, mix):
        gains = table[:, list(columns)] @ mix
        return Reply(int(gains.argmax()), gains.max())

    def column(rows, mix):
        pays = mix @ table[list(rows)]
        return Reply(int(pays.argmin()), pays.min())

    return row, column


@pytest.mark.parametrize("seed", range(5))
def test_bounds_bracket_the_value_at_any_time_and_meet(seed):
    table = np.random.default_rng(seed).normal(size=(40, 30))
    # The columns' player's program, which the solver does not use.
    solved = optimize.linprog(
        np.r_[np.zeros(30), 1.0], A_ub=np.c_[table, -np.ones(40)], b_ub=np.zeros(40),
        A_eq=np.r_[np.ones(30), 0.0][None], b_eq=[1.0], bounds=[(0, 1)] * 30 + [(None, None)],
    )  # fmt: skip
    last = np.inf
    for rounds in (1, 4, 12, 100):
        found = games.double_oracle(lambda i, j: table[i, j], *replies(table), 0, 0, rounds=rounds)
        assert found.lower - 1e-9 <= solved.fun <= found.upper + 1e-9
        rows, columns = list(found.rows), list(found.columns)
        assert (found.row_mix @ table[rows]).min() == pytest.approx(found.lower, abs=1e-9)
        assert (table[:, columns] @ found.column_mix).max() == pytest.approx(found.upper, abs=1e-9)
        assert found.replied <= found.upper + 1e-9
        assert found.exploitability <= last + 1e-9
        last = found.exploitability
    assert last < 1e-6
    assert len({*found.rows}) < 40


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coin(Stateless):
    """One of two classifiers by the key: the first loses to the right of 0.6, the other to the left
    of 0.4."""

    uses_inputs: ClassVar[bool] = False

    def prepare(self, key, x, y):
        return ()

    def base(self, memory, state, n):
        return jnp.ones(())

    def adapt(self, key, memory, state, x):
        return jnp.where(jax.random.bernoulli(key), 1.0, -1.0), state

    def predict(self, memory, side, x):
        z = 0.1 - side * (x[:, 0] - 0.5)
        return jnp.stack([z, -z], axis=1)


def test_a_coin_is_worth_a_half():
    """No point breaks both classifiers, and every point one at most."""
    x, y = jnp.full((1, 2), 0.5), jnp.zeros(1, jnp.int32)
    attack = games.fpa(PGD(steps=5), 2)
    how = {"memory": (), "eps": 0.2, "key": KEY}
    found = games.mixed_play(Coin(), attack, x, y, draws=6, rounds=6, **how)
    assert found.lower == pytest.approx(0.5)
    assert found.replied == pytest.approx(0.5)
    assert found.upper == 1
    for points in found.rows:
        assert float(jnp.max(jnp.abs(points - x))) <= 0.2 * (1 + 1e-6)
    # A radius within which nothing breaks, and one key, which is no mixture.
    near = games.mixed_play(Coin(), attack, x, y, **{**how, "eps": 0.05}, draws=6, rounds=2)
    assert near.lower == near.replied == 0
    for rounds in (1, 3):
        alone = games.mixed_play(Coin(), attack, x, y, draws=1, rounds=rounds, **how)
        assert alone.lower == alone.replied == 1


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1e-3, 1e9, 1e17, 1e300])
def test_games_of_any_scale(scale):
    rows, columns, value = games.matrix_game(scale * np.array([[2.0, -1.0], [-1.0, 1.0]]))
    np.testing.assert_allclose([rows, columns], [[0.4, 0.6]] * 2, atol=1e-9)
    assert value == pytest.approx(0.2 * scale)
    for constant in (np.zeros((1, 1)), np.full((2, 3), scale)):
        assert games.matrix_game(constant)[2] == pytest.approx(constant[0, 0])


@pytest.mark.parametrize("large", [1e3, 1e8, 1e10, 1e12])
def test_payoffs_that_differ_in_size(large):
    rows, columns, value = games.matrix_game([[1, 2, large], [2, 1, large]])
    np.testing.assert_allclose([*rows, *columns, value], [0.5, 0.5, 0.5, 0.5, 0, 1.5], atol=1e-6)
    assert games.matrix_game([[large, 0], [0, 1]])[2] == pytest.approx(1, rel=1.1e-3)


def test_what_mixed_strategies_refuse():
    x, y = jnp.full((2, 2), 0.5), jnp.zeros(2, jnp.int32)
    how = {"memory": (), "eps": 0.2, "key": KEY}
    with pytest.raises(ValueError, match="an attack that searches"):
        games.mixed_play(Coin(), games.given(x), x, y, **how)
    with pytest.raises(ValueError, match="draws must be"):
        games.mixed_play(Coin(), games.fpa(PGD(), 1), x, y, draws=0, **how)
    for bad in ([], [1.0, 2.0], [[np.nan]], [[1j]], [["a"]], [[1.0], [1.0, 2.0]]):
        with pytest.raises(ValueError, match="matrix"):
            games.matrix_game(bad)
    with pytest.raises(ValueError, match="rounds must be"):
        games.double_oracle(lambda i, j: 0.0, *replies(np.zeros((1, 1))), 0, 0, rounds=0)
    with pytest.raises(ValueError, match="payoffs must be finite, got nan of 1 and 0"):
        games.double_oracle(
            lambda i, j: np.nan if i else 0.0, *replies(np.array([[0.0, 0.0], [1.0, 1.0]])), 0, 0
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Broken(Coin):
    """A coin of which one side's outputs are no numbers; before adaptation it shows side 1."""

    side: float = -1.0

    def predict(self, memory, side, x):
        return jnp.where(side == self.side, jnp.nan, super().predict(memory, side, x))


def test_outputs_that_are_no_numbers_are_no_errors():
    x, y = jnp.full((1, 2), 0.5), jnp.zeros(1, jnp.int32)
    how = {"memory": (), "eps": 0.2, "key": KEY, "draws": 6}
    attack = games.fpa(PGD(steps=5), 2)
    with pytest.raises(ValueError, match=r"adapted under key \d returned outputs that are not fin"):
        games.mixed_play(Broken(), attack, x, y, **how)
    with pytest.raises(ValueError, match="before adaptation returned outputs that are not finite"):
        games.mixed_play(Broken(side=1.0), attack, x, y, **how)


def test_points_outside_of_the_ball_are_refused(monkeypatch):
    x, y = jnp.full((1, 2), 0.5), jnp.zeros(1, jnp.int32)
    right = attacker.iterate

    def farther(*given):
        turn, report = right(*given)
        return turn._replace(best=turn.best._replace(x=turn.best.x + 0.3)), report

    monkeypatch.setattr(attacker, "iterate", farther)
    with pytest.raises(ValueError, match="outside of their ball or box"):
        games.mixed_play(
            Coin(), games.fpa(PGD(steps=5), 1), x, y, memory=(), eps=0.05, key=KEY, draws=2
        )


def test_a_blind_attacker_is_told():
    steps = games.Fixed(Model(lambda w, x: jnp.round(8 * x @ w), jnp.eye(2)))
    x, how = jnp.array([[0.6, 0.4]]), {"memory": (), "eps": 0.05, "key": KEY}
    with pytest.warns(RobustnessWarning, match="^mixed_play: 100% zero gradients"):
        games.mixed_play(steps, games.fpa(PGD(steps=2), 1), x, [0], draws=1, rounds=1, **how)
