"""The state of a game, and its constants."""

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
    """The error rate of its simulation."""
    value: Array
    """The mean loss in its simulation."""
    number: Array
    """The iteration that found it."""
    fault: Array
    """``[n]``: whether anything was not finite."""


class GameRecord(NamedTuple):
    """The results so far: ``[rounds, ...]`` arrays on the host, named as in :class:`GameReport`."""

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
    """The state of a game between two turns: a pytree that can be saved."""

    round: np.ndarray
    iteration: np.ndarray
    true: PyTree
    """The defender's state."""
    clean: PyTree
    """The state of a defender who is given clean inputs."""
    mirror: PyTree
    """The attacker's simulation of the defender's state."""
    bank: Bank
    first: Array
    """The points of the round's first iteration, ``[size, *shape]``."""
    best: BestSet
    record: GameRecord


class Table(NamedTuple):
    """The constants of a game."""

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
    """The defender's key, known to the referee only; in the attacker's turns the round's key if it
    leaks, else None."""
    draws: int
    leak: str
    company: bool
    budget: float

    @property
    def box(self) -> tuple[float, float] | None:
        return self.attack.inner.ball.box
