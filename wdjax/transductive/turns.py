"""Whose turn it is in a game, and what each player is given to see."""

from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from wdjax import parallel
from wdjax.core import Array
from wdjax.transductive import attacker as attackers
from wdjax.transductive import referee as referees
from wdjax.transductive.attacker import Attacker, Leak
from wdjax.transductive.referee import Referee
from wdjax.transductive.state import DefenderStates, RoundInputs, State, empty_record, written


class Game(NamedTuple):
    """The constants of a game."""

    attacker: Attacker
    referee: Referee
    x: Array
    """``[rounds, size, *shape]``"""
    y: Array
    """``[rounds, size]``"""
    leak: str
    """What the attacker sees of the defender: "none", "state" or "seed"."""
    mesh: Mesh | None
    """Over which the inputs of a round are split."""

    def inputs(self, number: int) -> RoundInputs:
        return RoundInputs(number, *parallel.shard((self.x[number], self.y[number]), self.mesh))


def first_game_state(game: Game) -> State:
    """The state before the first turn; raises if outputs on clean inputs are not finite."""
    for number in range(len(game.y)):
        referees.check_clean(game.referee, game.inputs(number))
    state, zero = game.referee.defender.begin(), np.zeros((), np.int32)
    record = empty_record(game.x, game.referee.draws, game.attacker.attack.iterations)
    first = attackers.first_attacker_state(game.attacker, game.inputs(0).x)
    players = parallel.replicate((DefenderStates(state, state), first), game.mesh)
    return State(zero, zero, *players, record)


def finished(game: Game, state: State) -> bool:
    return int(state.round) >= len(game.y)


def turn(game: Game, state: State) -> State:
    """One turn: the attacker's next iteration, or the referee's end of a round."""
    if int(state.iteration) < game.attacker.attack.iterations:
        return _attackers_turn(game, state)
    return _referees_turn(game, state)


def _attackers_turn(game: Game, state: State) -> State:
    """The attacker gets its own state and what leaks, nothing else of the game's state."""
    number, iteration = int(state.round), int(state.iteration)
    leak = Leak(
        state=None if game.leak == "none" else state.defender.attacked,
        key=game.referee.private_key(number, 0) if game.leak == "seed" else None,
    )
    after, effort = attackers.iterate(
        game.attacker, state.attacker, game.inputs(number), iteration, leak
    )
    record = written(
        state.record, number, iteration, simulated=effort.simulated, raised=effort.raised
    )
    passes = float(record.gradients[number]) + effort.gradients
    zeros = float(record.zeros[number]) + effort.zeros
    record = written(record, number, gradients=passes, zeros=zeros)
    done = np.asarray(iteration + 1, np.int32)
    return state._replace(iteration=done, attacker=after, record=record)


def _referees_turn(game: Game, state: State) -> State:
    """The referee judges the attacker's best set, and the next round begins."""
    number, inputs = int(state.round), game.inputs(int(state.round))
    results, defender = referees.judge(game.referee, state.defender, state.attacker.best, inputs)
    following = min(number + 1, len(game.y) - 1)
    return State(
        round=np.asarray(number + 1, np.int32),
        iteration=np.zeros((), np.int32),
        defender=defender,
        attacker=attackers.end_round(
            game.attacker, state.attacker, inputs, game.inputs(following).x
        ),
        record=written(state.record, number, **results),
    )
