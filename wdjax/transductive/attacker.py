"""The attacker: moves the inputs against a bank of models, and simulates the defence on them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import distinct, norms, parallel
from wdjax.core import AnyArray, Array, PyTree
from wdjax.transductive import bank as banks
from wdjax.transductive.bank import Bank
from wdjax.transductive.bank_search import BankFound, objective_at, raise_objective
from wdjax.transductive.defender import Defender
from wdjax.transductive.defense import Defense
from wdjax.transductive.game_report import threshold_for
from wdjax.transductive.space_attack import SpaceAttack
from wdjax.transductive.state import AttackerState, BestSet, RoundInputs


class Attacker(NamedTuple):
    """What the attacker knows in every round, and nothing else."""

    attack: SpaceAttack
    defender: Defender
    eps: Array
    key: Array
    """The attacker's own key."""
    rejections: float
    """The share of clean inputs that a simulated defender may reject."""


class Leak(NamedTuple):
    """What the attacker sees of the defender in a round; None for what it does not see."""

    state: PyTree | None = None
    key: Array | None = None
    """The private key of the round."""


class Simulation(NamedTuple):
    """The means over the simulations of the defence on one set of points."""

    errors: float
    """The error rate."""
    value: float
    """The loss."""


class Effort(NamedTuple):
    """What an iteration achieved and took, for the record."""

    simulated: float
    """The error rate of the simulations."""
    raised: float
    """The mean objective of the attack on its bank."""
    gradients: float
    """Backward passes through the bank, for each input."""
    zeros: float
    """How many of these were zero in every coordinate."""


class BankBatch(NamedTuple):
    """The inputs that are attacked at once: ``[b, ...]`` leaves."""

    x: Array
    y: Array
    first: Array
    """The points of the round's first iteration."""
    numbers: AnyArray
    """The inputs' numbers in the round."""


def first_attacker_state(attacker: Attacker, x: Array) -> AttackerState:
    """The attacker's state before the first iteration, for inputs ``[size, *shape]``."""
    defender, attack = attacker.defender, attacker.attack
    state = defender.begin()
    like = jax.eval_shape(lambda: defender.defense.base(defender.memory, state, len(x)))
    return AttackerState(state, banks.empty_bank(like, attack.capacity), x, no_best(attack, x))


def no_best(attack: SpaceAttack, x: Array) -> BestSet:
    """The best set before any iteration: worse than all, or the clean set as fallback."""
    fallback = attack.clean_fallback
    errors, value = (0.0, np.inf) if fallback else (-1.0, -np.inf)
    return BestSet(x, *_told(errors, value, -1), np.zeros(len(x), bool))


def iterate(
    attacker: Attacker, state: AttackerState, inputs: RoundInputs, iteration: int, leak: Leak
) -> tuple[AttackerState, Effort]:
    """One iteration: attacks the models so far, and simulates the defence on the points found.

    The simulated models join the bank, so that the next iteration attacks them too.
    """
    known = state.mirror if leak.state is None else leak.state
    bank = state.bank if iteration else _first_bank(attacker, state.bank, known, len(inputs.y))
    key = jax.random.fold_in(jax.random.fold_in(attacker.key, inputs.number), iteration)
    later = np.asarray(iteration > 0)
    if attacker.attack.points is None:
        moved = move(attacker, bank, inputs, jax.random.fold_in(key, 0), state.first, later)
    else:
        moved = _given(attacker, bank, inputs)
    bank, simulation = _simulate(attacker, bank, inputs, moved.x_adv, Leak(known, leak.key), key)
    best = choose(attacker.attack, state.best, moved, simulation, iteration)
    first = state.first if iteration else moved.x_adv
    told = (float(jnp.mean(leaf)) for leaf in (moved.value, moved.gradients, moved.zeros))
    after = state._replace(bank=bank, first=first, best=best)
    return after, Effort(simulation.errors, *told)


def end_round(
    attacker: Attacker, state: AttackerState, inputs: RoundInputs, x: Array
) -> AttackerState:
    """The state for the next round with inputs ``x`` ``[size, *shape]``.

    The simulation of the defender's state goes on with the submitted points.
    """
    mirror = _mirrored(attacker, state, inputs)
    return state._replace(mirror=mirror, best=no_best(attacker.attack, x))


def move(
    attacker: Attacker,
    bank: Bank,
    inputs: RoundInputs,
    key: Array,
    first: Array,
    later: np.ndarray,
) -> BankFound:
    """Attacks the bank in batches of inputs; the last batch is padded with its last input.

    ``first`` ``[size, *shape]`` are the points of the round's first iteration, which may be
    retained if ``later`` is True.
    """
    attack, (defense, memory, _) = attacker.attack, attacker.defender
    n = len(inputs.y)
    size = min(attack.batch_size or n, n)
    parts = []
    for begin in range(0, n, size):
        index = np.minimum(np.arange(begin, begin + size), n - 1)
        models, batch = bank.models, BankBatch(inputs.x, inputs.y, first, index)
        if size < n:
            batch = BankBatch(inputs.x[index], inputs.y[index], first[index], index)
            if defense.per_sample:
                models = jax.tree.map(lambda leaf, index=index: leaf[:, index], models)
        part = bank._replace(models=models)
        parts.append(compiled_move(attack, defense, memory, part, batch, attacker.eps, key, later))
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[:n], *parts)


def _given(attacker: Attacker, bank: Bank, inputs: RoundInputs) -> BankFound:
    """The points of this round that were computed elsewhere, with their objective on the bank."""
    attack, (defense, memory, _) = attacker.attack, attacker.defender
    points = parallel.placed(attack.points[inputs.number], inputs.x.sharding)
    value = objective_at(attack, defense, memory, bank, points, inputs.y)
    none = jnp.zeros(len(inputs.y))
    return BankFound(points, value, ~jnp.isfinite(value), none, none)


@distinct.jit
def compiled_move(
    attack: SpaceAttack,
    defense: Defense,
    memory: PyTree,
    bank: Bank,
    batch: BankBatch,
    eps: Array,
    key: Array,
    later: Array,
) -> BankFound:
    """Raises the objective over a bank from ``batch``, one program for all banks of a game."""
    x, y, first, index = *batch[:3], jnp.asarray(batch.numbers)
    moved = raise_objective(attack, defense, memory, bank, x, y, eps=eps, key=key, index=index)
    if not attack.retain:
        return moved
    value = objective_at(attack, defense, memory, bank, first, y)
    wins = later & (value > moved.value)
    x_adv = jnp.where(norms.spread(wins, x), first, moved.x_adv)
    return moved._replace(x_adv=x_adv, value=jnp.where(wins, value, moved.value))


def choose(
    attack: SpaceAttack, best: BestSet, moved: BankFound, simulation: Simulation, number: int
) -> BestSet:
    """The better of two sets; a loss that is NaN ranks below all others."""
    errors, value = simulation
    # Both rounded, so that equal error rates are ties.
    told = _told(errors, value if np.isfinite(value) else -np.inf, number)
    new, other = (
        (float(rate), float(loss)) for rate, loss in (told[:2], (best.errors, best.value))
    )
    if attack.select == "loss" and not attack.clean_fallback:
        new, other = new[::-1], other[::-1]
    fault = best.fault | moved.fault
    if not new > other:
        return best._replace(fault=fault)
    return BestSet(moved.x_adv, *told, fault)


def _told(errors: float, value: float, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of a :class:`BestSet`, on the host: the same in every process."""
    return np.array(errors, np.float32), np.array(value, np.float32), np.array(number, np.int32)


def _first_bank(attacker: Attacker, bank: Bank, known: PyTree, size: int) -> Bank:
    """A bank with one model: that before the first round, or before this one as far as known."""
    defender = attacker.defender
    state = defender.begin() if attacker.attack.begin == "static" else known
    emptied = bank._replace(filled=jnp.zeros_like(bank.filled))
    return _push(emptied, defender.base(state, size))


def _simulate(
    attacker: Attacker, bank: Bank, inputs: RoundInputs, x_adv: Array, seen: Leak, key: Array
) -> tuple[Bank, Simulation]:
    """Simulates the defence on points ``[size, *shape]``; the adapted models join the bank.

    ``seen`` is the state to adapt from, and the private key if it leaks; other keys come from
    ``key``.
    """
    defender, n = attacker.defender, len(inputs.y)
    given = defender.given(x_adv, inputs.x)
    made = []
    for draw in range(attacker.attack.simulations):
        secret = jax.random.fold_in(key, 1 + draw) if seen.key is None else seen.key
        adapted, _ = defender.adapt(secret, seen.state, given)
        made.append(_scored(attacker, adapted, given, inputs.y))
        rows = adapted
        if defender.defense.per_sample:
            rows = jax.tree.map(lambda leaf: leaf[:n], adapted)
        bank = _push(bank, rows)
    return bank, Simulation(*(float(np.mean(parts)) for parts in zip(*made)))


def _scored(attacker: Attacker, adapted: PyTree, given: Array, y: Array) -> Simulation:
    """The error rate and the mean loss of a simulated model on the submitted points.

    ``given`` is ``[size, *shape]``, or ``[2 size, *shape]`` in company. A wrong answer that the
    defender would reject, at the threshold that clean inputs in company allow, is no error.
    """
    defender, n = attacker.defender, len(y)
    loss = attacker.attack.judge or attacker.attack.loss
    seen = defender.outcomes(loss, adapted, given, defender.labels(y))
    wrong = ~seen.right
    if defender.defense.rejects and defender.company:
        wrong &= ~(seen.score > threshold_for(np.asarray(seen.score[n:]), attacker.rejections))
    return Simulation(float(wrong[:n].mean()), float(seen.value[:n].mean()))


def _mirrored(attacker: Attacker, state: AttackerState, inputs: RoundInputs) -> PyTree:
    """The attacker's simulation of the defender's state in the next round."""
    if not jax.tree.leaves(state.mirror):
        return state.mirror  # The defence is stateless.
    defender = attacker.defender
    key = jax.random.fold_in(attacker.key, inputs.number)
    key = jax.random.fold_in(key, attacker.attack.iterations)
    given = defender.given(state.best.x, inputs.x)
    _, after = defender.adapt(jax.random.fold_in(key, 0), state.mirror, given)
    return defender.between(jax.random.fold_in(key, 1), after)


_push = distinct.jit(banks.add_model)
