r"""Mixed strategies: attackers who mix sets of points against defenders who mix private keys.

A zero-sum game with too many strategies for a table is solved on a few of them, to which each
player's replies to the other's mixture are added: the double oracle.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, PyTree
from wdjax.engine import diagnosis
from wdjax.precision import full_precision
from wdjax.transductive import attacker as attackers
from wdjax.transductive.attacker import Attacker, Leak
from wdjax.transductive.defender import Defender
from wdjax.transductive.defense import Defense
from wdjax.transductive.game import check_attack, static_model
from wdjax.transductive.game_report import remarks_on
from wdjax.transductive.referee import Referee, check_clean, measured_costs
from wdjax.transductive.space_attack import SpaceAttack
from wdjax.transductive.state import RoundInputs

Numbers = npt.NDArray[np.float64]


class Reply(NamedTuple):
    """A player's reply to a mixture of the other's strategies."""

    strategy: Any
    bound: float
    """What no strategy of this player betters: its own payoff, if the reply is a best one."""


class Equilibrium(NamedTuple):
    """Mixtures of both players; the rows' player gets the payoff that the columns' player pays."""

    rows: tuple[Any, ...]
    columns: tuple[Any, ...]
    row_mix: Numbers
    """``[R]`` probabilities."""
    column_mix: Numbers
    """``[C]``"""
    lower: float
    """What ``row_mix`` gets at least, whichever column is played."""
    upper: float
    """What any row gets at most against ``column_mix``."""
    replied: float
    """What the best known row gets against ``column_mix``, which may be less than ``upper``."""

    @property
    def exploitability(self) -> float:
        """What both players could gain together at most; 0 in an equilibrium."""
        return self.upper - self.lower


def matrix_game(payoff: npt.ArrayLike) -> tuple[Numbers, Numbers, float]:
    """Optimal mixtures of a zero-sum game.

    Args:
      payoff: ``[R, C]``, what the rows' player gets.

    Returns:
      The mixtures of rows ``[R]`` and columns ``[C]``, and the value. What they guarantee differs
      by at most 1e-6 of the value and 1e-9 of the largest payoff.

    Raises:
      ValueError: what is no finite matrix, or was not solved so well.

    Cost: a linear program of ``R + 1`` variables.

    Source: von Neumann [neumann1928].

    >>> rows, columns, value = matrix_game([[2.0, -1.0], [-1.0, 1.0]])
    >>> rows.round(3).tolist(), columns.round(3).tolist(), round(value, 3)
    ([0.4, 0.6], [0.4, 0.6], 0.2)
    """
    try:
        table = np.asarray(payoff, np.float64)
    except (TypeError, ValueError):  # Complex numbers, words, rows of several lengths.
        table = np.full((1, 1), np.nan)
    if table.ndim != 2 or not table.size or not np.all(np.isfinite(table)):
        raise ValueError(f"payoff must be a matrix [R, C] of finite numbers, got {payoff!r}.")
    size = np.abs(table).max() or 1.0
    # The solver takes numbers below 1e-9 for 0, so that the unit matters.
    solved = [one for unit in {size, 1.0} if (one := _optimal(table, unit)) is not None]
    for gap, rows, columns, value in sorted(solved, key=lambda one: one[0]):
        if gap <= 1e-6 * abs(value) + 1e-9 * size:
            return rows, columns, value
    raise ValueError("the linear program of the game was not solved: payoffs differ too much.")


def _optimal(table: Numbers, unit: float) -> tuple[float, Numbers, Numbers, float] | None:
    """By how much the players' guarantees differ, their mixtures, and the value.

    By a linear program of payoffs in units of ``unit``; None if it was not solved.
    """
    from scipy.optimize import linprog

    count, gain = len(table), table / unit
    found = linprog(
        np.r_[np.zeros(count), -1.0],
        A_ub=np.c_[-gain.T, np.ones(gain.shape[1])],
        b_ub=np.zeros(gain.shape[1]),
        A_eq=np.r_[np.ones(count), 0.0][None],
        b_eq=[1.0],
        bounds=[(0, None)] * count + [(None, None)],
        method="highs",
    )
    if found.status != 0:
        return None
    mixtures = (np.clip(part, 0, None) for part in (found.x[:-1], -found.ineqlin.marginals))
    rows, columns = (part / part.sum() for part in mixtures)
    low, high = (rows @ gain).min(), (gain @ columns).max()
    return float((high - low) * unit), rows, columns, float((low + high) / 2 * unit)


def double_oracle(
    payoff: Callable[[Any, Any], float],
    reply_row: Callable[[Sequence[Any], Numbers], Reply],
    reply_column: Callable[[Sequence[Any], Numbers], Reply],
    row: Any,
    column: Any,
    *,
    rounds: int = 100,
    tolerance: float = 1e-6,
) -> Equilibrium:
    r"""Solves a zero-sum game by replies to the mixtures of the game of the strategies so far.

    With *best* replies the bounds hold for the whole game, however early it is ended, and meet in
    its value after as many rounds as there are strategies at most.

    Args:
      payoff: of a row and a column, to the rows' player.
      reply_row: of columns and a mixture of them, to a row.
      reply_column: of rows and a mixture of them, to a column.
      row, column: to begin with.
      rounds: at most so many replies of each player.
      tolerance: ends when replies, or the bounds, are no farther apart.

    Raises:
      ValueError: payoffs that are not finite, or fewer than one round.

    Cost: in round t two replies, ``2 t`` payoffs and a linear program; then one reply more of the
    columns' player.

    Source: McMahan et al. [mcmahan2003].

    >>> table = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
    >>> def best_row(columns, mix):
    ...     gains = table[:, list(columns)] @ mix
    ...     return Reply(int(gains.argmax()), gains.max())
    >>> def best_column(rows, mix):
    ...     pays = mix @ table[list(rows)]
    ...     return Reply(int(pays.argmin()), pays.min())
    >>> found = double_oracle(lambda i, j: table[i, j], best_row, best_column, 0, 0)
    >>> found.exploitability < 1e-6, [round(float(p), 3) for p in sorted(found.row_mix)[-3:]]
    (True, [0.333, 0.333, 0.333])
    """
    rounds = validate.check_count("rounds", rounds)
    rows, columns = [row], [column]

    def paid(row: Any, column: Any) -> float:
        if not np.isfinite(value := float(payoff(row, column))):
            raise ValueError(f"payoffs must be finite, got {value} of {row!r} and {column!r}.")
        return value

    table = np.array([[paid(row, column)]])
    (lower, low_mix), (upper, high_mix) = (-np.inf, np.ones(1)), (np.inf, np.ones(1))
    for _ in range(rounds):
        p, q, _ = matrix_game(table)
        up, down = reply_row(columns, q), reply_column(rows, p)
        if down.bound >= lower:
            lower, low_mix = float(down.bound), p
        if up.bound <= upper:
            upper, high_mix = float(up.bound), q
        gains = np.array([paid(up.strategy, known) for known in columns])
        pays = np.array([paid(known, down.strategy) for known in rows])
        corner = paid(up.strategy, down.strategy)
        table = np.block([[table, pays[:, None]], [gains[None], np.array([[corner]])]])
        rows, columns = [*rows, up.strategy], [*columns, down.strategy]
        if min(gains @ q - p @ pays, upper - lower) <= tolerance:
            break
    # The last reply of the rows' player was in no mixture yet.
    p, _, _ = matrix_game(table)
    if (bound := reply_column(rows, p).bound) >= lower:
        lower, low_mix = float(bound), p
    row_mix, column_mix = (np.pad(mix, (0, len(rows) - len(mix))) for mix in (low_mix, high_mix))
    replied = float(np.max(table @ column_mix))
    return Equilibrium(tuple(rows), tuple(columns), row_mix, column_mix, lower, upper, replied)


@full_precision
def mixed_play(
    defense: Defense,
    attack: SpaceAttack,
    x: AnyArray,
    y: AnyArray,
    *,
    memory: PyTree,
    eps: float,
    key: Array,
    draws: int = 8,
    rounds: int = 5,
) -> Equilibrium:
    r"""A round in which the defender mixes over a few private keys and the attacker over sets.

    Rows are sets of points ``[n, *shape]``, columns the numbers of the keys, payoffs error rates.
    The attacker replies by its attack on models that are simulated with keys of the defender's
    mixture; the defender by the best of all keys.

    Args:
      defense: without a state, and without rejections.
      attack: on a space of models; its iterations are those of every reply.
      x: ``[n, *shape]``
      y: ``[n]``
      memory: what :func:`prepare` returned.
      eps: the radius.
      key: of the attacks, and of the private keys.
      draws: how many private keys the defender mixes over. All of them are public: a defender who
        draws from more keys may do better.
      rounds: replies of each player.

    Returns:
      An :class:`Equilibrium`: ``row_mix`` errs at rate ``lower`` at least, whichever key is used.
      ``upper`` is 1, since an attack's replies need not be the best; ``replied`` is the error rate
      of the best known set against ``column_mix``.

    Raises:
      ValueError: bad samples, a defence with a state or rejections, an attack without a search, or
        outputs that are not finite.

    Cost: each round one attack and ``2 draws`` adaptations; in the end up to ``draws`` more.

    Source: this library's own, of McMahan et al. [mcmahan2003] and Chen et al. [chen2022].

    >>> from wdjax import Model
    >>> from wdjax.attacks import PGD
    >>> from wdjax.transductive import Fixed, fpa
    >>> fixed = Fixed(Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]])))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> how = {"memory": (), "eps": 0.2, "key": jax.random.key(0), "draws": 2}
    >>> float(mixed_play(fixed, fpa(PGD(steps=5), 1), x, y, **how).lower)
    0.5
    """
    arguments.check(x=x, y=y, eps=eps, key=key)
    twin = "transductive.raise_objective, which can be traced"
    host_only("a game", twin, defense, memory, x, y, eps, key)
    check_attack(attack)
    arguments.warn(arguments.too_far(attack.inner.ball, np.shape(x)[1:], eps))
    count = validate.check_count("draws", draws)
    box = attack.inner.ball.box
    x, y = validate.check_samples(static_model(defense, memory), x, y, box, transductive=True)
    defender = Defender(defense, memory, False)
    stateful = jax.tree.leaves(defender.begin())
    if stateful or defense.rejects or attack.points is not None or attack.search:
        raise ValueError(
            "mixed strategies are for a defence without a state and without rejections, such as "
            "TADV, and an attack that searches on its models, such as gmsa_avg(PGD())."
        )
    own, other = jax.random.split(key)
    radius = jnp.asarray(eps, x.dtype)
    referee = Referee(defender, attack, radius, other, count)
    inputs = RoundInputs(0, x, y)
    check_clean(referee, inputs)
    game = _KeyGame(referee, Attacker(attack, defender, radius, own, 0.0), inputs)
    found = double_oracle(game.errors, game.reply_row, game.reply_column, 0, 0, rounds=rounds)
    diagnosis.say("mixed_play", remarks_on(game.fault, game.zeros, game.gradients))
    return found._replace(rows=tuple(game.sets[row] for row in found.rows))


class _KeyGame:
    """Sets of points (rows) against private keys (columns), both by their numbers.

    Payoffs are error rates. Replies of the attacker are added to ``sets``, what they met to
    ``fault``, ``gradients`` and ``zeros``, which are as in a game's report.
    """

    def __init__(self, referee: Referee, player: Attacker, inputs: RoundInputs) -> None:
        self.referee, self.player, self.inputs = referee, player, inputs
        self.keys = [referee.private_key(0, draw) for draw in range(referee.draws)]
        self.sets = [inputs.x]
        self.errors = functools.cache(self._errors)
        self.fault, self.gradients, self.zeros = np.zeros(len(inputs.y), bool), 0.0, 0.0

    def _errors(self, row: int, column: int) -> float:
        """The error rate on a set, after adaptation to it under a key."""
        defender, points = self.referee.defender, self.sets[row]
        adapted, _ = defender.adapt(self.keys[column], defender.begin(), points)
        seen = self.referee.outcomes(adapted, points, self.inputs.y)
        if not np.all(seen.fine):
            raise ValueError(
                f"the model adapted under key {column} returned outputs that are not finite for "
                f"{int(np.sum(~seen.fine))} points; no error rate can be reported for it."
            )
        return float(np.mean(~seen.right))

    def reply_row(self, columns: Sequence[int], mix: Numbers) -> Reply:
        """The set that errs most against the mixture, after an attack on keys drawn from it."""
        player, x = self.player, self.inputs.x
        rng = np.random.default_rng(len(self.sets))
        turn = attackers.first_attacker_state(player, x)
        for number in range(player.attack.iterations):
            leaked = Leak(key=self.keys[rng.choice(columns, p=mix)])
            turn, effort = attackers.iterate(player, turn, self.inputs, number, leaked)
            self.gradients += effort.gradients
            self.zeros += effort.zeros
        self.fault |= np.asarray(turn.best.fault)
        measured_costs(self.referee, x, turn.best.x)
        self.sets.append(turn.best.x)
        gains = [mix @ [self.errors(row, k) for k in columns] for row in range(len(self.sets))]
        return Reply(int(np.argmax(gains)), 1.0)

    def reply_column(self, rows: Sequence[int], mix: Numbers) -> Reply:
        """The key that errs least against the mixture, of all keys."""
        pays = [float(mix @ [self.errors(row, k) for row in rows]) for k in range(len(self.keys))]
        return Reply(int(np.argmin(pays)), min(pays))
