"""The identity of a game in its checkpoint: the programs of a round, options and numbers."""

import dataclasses
import functools

import jax
import numpy as np

from wdjax import identity, parallel
from wdjax.core import Array
from wdjax.transductive.attacker import BankBatch, compiled_move
from wdjax.transductive.defender import (
    compiled_adapt,
    compiled_base,
    compiled_between,
    compiled_outcomes,
)
from wdjax.transductive.state import State
from wdjax.transductive.turns import Game


def game_identity(game: Game, begun: State) -> bytes:
    """A digest, 32 bytes, of everything that a game's results depend on.

    ``begun`` is the state before the first turn, whose shapes are those of all later ones.
    """
    attack, defense = game.attacker.attack, game.attacker.defender.defense
    settings = [getattr(attack, one.name) for one in dataclasses.fields(attack)]
    settings = [value for value in settings if isinstance(value, str | int | float)]
    kind = defense.per_sample, defense.uses_inputs, defense.rejects
    # Both players have the same defender; one of them suffices.
    referee = game.referee._replace(defender=None)  # type: ignore[arg-type]
    numbers = game._replace(referee=referee, mesh=None)
    begun_here = parallel.local(begun)
    return identity.digest(_programs(game, begun), settings, kind, numbers, begun_here)


def _programs(game: Game, begun: State) -> list[identity.ClosedJaxpr]:
    """The programs of adaptation, attack and both losses, traced for inputs ``[size, *shape]``.

    All rounds have one shape, so those of the first are those of all.
    """
    attacker, key, (_, x, y) = game.attacker, game.referee.key, game.inputs(0)
    attack, (defense, memory, _) = attacker.attack, attacker.defender
    state, given = begun.defender.attacked, attacker.defender.given(x, x)
    adapt = functools.partial(compiled_adapt, defense)
    adapted, after = jax.eval_shape(adapt, key, memory, state, x)
    index = np.arange(len(y))
    batch, later = BankBatch(x, y, x, index), index > 0

    def base(*args: Array) -> Array:
        return compiled_base(*args, len(y))

    outcomes = [
        identity.program(functools.partial(compiled_outcomes, loss), defense, memory, adapted, x, y)
        for loss in (attack.loss, attack.judge or attack.loss)
    ]
    bank = begun.attacker.bank
    return [
        identity.program(base, defense, memory, state),
        identity.program(compiled_adapt, defense, key, memory, state, given),
        identity.program(compiled_between, defense, key, memory, after),
        identity.program(
            compiled_move, attack, defense, memory, bank, batch, attacker.eps, key, later
        ),
        *outcomes,
    ]
