"""What is saved of a game: the players' states and the results so far, as one pytree."""

from typing import Any, NamedTuple

import numpy as np

from wdjax.core import AnyArray, Array, PyTree
from wdjax.transductive.bank import Bank


class RoundInputs(NamedTuple):
    """The inputs of a round."""

    number: int
    x: Array
    """``[size, *shape]``"""
    y: Array
    """``[size]``"""


class BestSet(NamedTuple):
    """The attacker's best set of a round so far."""

    x: Array
    """``[size, *shape]``"""
    errors: np.ndarray
    """The error rate of its simulation."""
    value: np.ndarray
    """The mean loss in its simulation."""
    number: np.ndarray
    """The iteration that found it."""
    fault: AnyArray
    """``[size]``: whether anything was not finite."""


class AttackerState(NamedTuple):
    """What the attacker keeps between its iterations."""

    mirror: PyTree
    """The simulation of the defender's state."""
    bank: Bank
    first: Array
    """The points of the round's first iteration, ``[size, *shape]``."""
    best: BestSet


class DefenderStates(NamedTuple):
    """What the defender keeps from round to round, in two games with the same private keys."""

    attacked: PyTree
    """In the game in which the attacker moves the inputs."""
    clean: PyTree
    """In the game in which nobody does."""


class GameRecord(NamedTuple):
    """The results so far: ``[rounds, ...]`` arrays on the host, named as in ``GameReport``."""

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
    zeros: np.ndarray
    score: np.ndarray
    score_clean: np.ndarray


class State(NamedTuple):
    """The state of a game between two turns: a pytree that can be saved."""

    round: np.ndarray
    iteration: np.ndarray
    """The number of the attacker's iterations in this round."""
    defender: DefenderStates
    attacker: AttackerState
    record: GameRecord


def empty_record(x: Array, draws: int, iterations: int) -> GameRecord:
    """The record before the first turn, for inputs ``[rounds, size, *shape]``."""
    rounds, size = x.shape[:2]
    inputs, drawn, steps = (rounds, size), (rounds, draws, size), (rounds, iterations)
    return GameRecord(
        x_adv=np.zeros(x.shape, x.dtype),
        cost=np.zeros(inputs, x.dtype),
        correct=np.zeros(drawn, bool),
        correct_clean=np.zeros(drawn, bool),
        static=np.zeros(inputs, bool),
        static_clean=np.zeros(inputs, bool),
        fault=np.zeros(inputs, bool),
        simulated=np.zeros(steps, np.float32),
        raised=np.zeros(steps, np.float32),
        chosen=np.full(rounds, -1),
        gradients=np.zeros(rounds, np.float32),
        zeros=np.zeros(rounds, np.float32),
        score=np.zeros(drawn, np.float32),
        score_clean=np.zeros(drawn, np.float32),
    )


def written(record: GameRecord, *index: int, **results: Any) -> GameRecord:
    """The record with ``results`` written at an index."""
    changed = {}
    for name, value in results.items():
        leaf = np.array(getattr(record, name))
        leaf[index] = value
        changed[name] = leaf
    return record._replace(**changed)
