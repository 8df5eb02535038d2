"""What a game carries on, and what lies on its table."""

from typing import Any, NamedTuple

import numpy as np

from wdjax.core import Array, PyTree
from wdjax.transductive.bank import Bank
from wdjax.transductive.defense import Defense
from wdjax.transductive.space_attack import SpaceAttack


class BestSet(NamedTuple):
    """The attacker's best set of a round so far."""

    x: Array
    errors: Array
    """The share of errors of its simulation."""
    value: Array
    """And the mean loss there."""
    number: Array
    """Its iteration."""
    fault: Array
    """``[n]``"""


class GameRecord(NamedTuple):
    """What has happened: ``[rounds, ...]`` arrays on the host, named as in :class:`Report`."""

    x_adv: np.ndarray
    cost: np.ndarray
    correct: np.ndarray
    correct_clean: np.ndarray
    static: np.ndarray
    static_clean: np.ndarray
    fault: np.ndarray
    simulated: np.ndarray
    raised: np.ndarray
    chosen: np.ndarray
    gradients: np.ndarray
    score: np.ndarray
    score_clean: np.ndarray


class State(NamedTuple):
    """A game between two turns: a pytree, so that it can be saved."""

    round: np.ndarray
    iteration: np.ndarray
    true: PyTree
    """The defender's state."""
    clean: PyTree
    """That of a defender who is given clean inputs."""
    mirror: PyTree
    """What the attacker believes the defender's state to be."""
    bank: Bank
    first: Array
    """The set of the round's first iteration."""
    best: BestSet
    record: GameRecord


class Table(NamedTuple):
    """What lies on the table and does not change."""

    defense: Defense
    attack: SpaceAttack
    memory: PyTree
    x: Array
    """``[rounds, size, *shape]``"""
    y: Array
    eps: Array
    attacker: Array
    """The attacker's key."""
    defender: Any
    """The defender's, which nobody but the referee is given; in the attacker's turns the key of the
    round, if it leaks, or None."""
    draws: int
    leak: str
    company: bool
    budget: float

    @property
    def box(self) -> tuple[float, float] | None:
        return self.attack.inner.ball.box
