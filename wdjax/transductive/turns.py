"""The turns of a game: an iteration of the attacker, or the referee's end of a round."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import losses, norms
from wdjax.core import Array, PyTree
from wdjax.engine import identity
from wdjax.transductive import bank as banks
from wdjax.transductive.bank import Bank
from wdjax.transductive.bank_search import BankFound, objective_at, raise_objective
from wdjax.transductive.defense import Defense
from wdjax.transductive.objectives import logits_of
from wdjax.transductive.referee import GameReport, threshold_for
from wdjax.transductive.space_attack import SpaceAttack
from wdjax.transductive.state import BestSet, GameRecord, State, Table


def begin(table: Table) -> State:
    """The state before the first turn; raises if outputs on clean inputs are not finite."""
    defense, memory, attack = table.defense, table.memory, table.attack
    rounds, size = table.y.shape
    state = defense.begin(memory)
    like = jax.eval_shape(lambda: defense.base(memory, state, size))
    base = _base(defense, memory, state, size)
    for x in table.x:
        if not bool(np.all(_seen(table, base, x, table.y[0]).fine)):
            raise ValueError(
                "the model before adaptation returned outputs that are not finite on clean inputs; "
                "no robustness can be reported for such a model."
            )
    facts, steps = (rounds, table.draws, size), (rounds, attack.iterations)
    record = GameRecord(
        x_adv=np.zeros(table.x.shape, table.x.dtype),
        cost=np.zeros((rounds, size), table.x.dtype),
        correct=np.zeros(facts, bool),
        correct_clean=np.zeros(facts, bool),
        static=np.zeros((rounds, size), bool),
        static_clean=np.zeros((rounds, size), bool),
        fault=np.zeros((rounds, size), bool),
        simulated=np.zeros(steps, np.float32),
        raised=np.zeros(steps, np.float32),
        chosen=np.full(rounds, -1),
        gradients=np.zeros(rounds, np.float32),
        score=np.zeros(facts, np.float32),
        score_clean=np.zeros(facts, np.float32),
    )
    bank, zero = banks.empty_bank(like, attack.capacity), np.zeros((), np.int32)
    best = _no_best(table, 0)
    return State(zero, zero, state, state, state, bank, best.x, best, record)


def _no_best(table: Table, number: int) -> BestSet:
    """The attacker's set before any iteration: worse than all, or the clean set as fallback."""
    x = table.x[number]
    fallback = table.attack.clean_fallback
    errors = jnp.asarray(0.0 if fallback else -1.0)
    value = jnp.asarray(jnp.inf if fallback else -jnp.inf)
    return BestSet(x, errors, value, jnp.asarray(-1), jnp.zeros(x.shape[0], bool))


def over(table: Table, state: State) -> bool:
    return int(state.round) >= len(table.y)


def turn(table: Table, state: State) -> State:
    """One turn: the attacker's next iteration, or the end of a round.

    The attacker's function is called without the defender's state and key, unless they leak.
    """
    if int(state.iteration) >= table.attack.iterations:
        return _judge(table, state)
    leaked = _key(table.defender, int(state.round), 0) if table.leak == "seed" else None
    seen = None if table.leak == "none" else state.true
    hidden = table._replace(defender=leaked)
    after = _attack(hidden, state._replace(true=seen, clean=None))
    return after._replace(true=state.true, clean=state.clean)


def _key(key: Array, *places: Any) -> Array:
    for place in places:
        key = jax.random.fold_in(key, int(place))
    return key


def _attack(table: Table, state: State) -> State:
    """One iteration: attacks the models so far, and simulates the defence on the points found.

    Points are ``[size, *shape]``; the simulated models join the bank.
    """
    defense, memory, attack = table.defense, table.memory, table.attack
    number, iteration = int(state.round), int(state.iteration)
    known = state.mirror if state.true is None else state.true
    x, y, bank = table.x[number], table.y[number], state.bank
    if iteration == 0:
        seen = defense.begin(memory) if attack.begin == "static" else known
        bank = _push(bank._replace(filled=jnp.zeros_like(bank.filled)),
                     _base(defense, memory, seen, len(y)))  # fmt: skip
    own = _key(table.attacker, number, iteration)
    moved = _moved(table, bank, x, y, _key(own, 0), state.first, np.asarray(iteration > 0))
    errors, values = [], []
    for draw in range(attack.simulations):
        secret = _key(own, 1 + draw) if table.defender is None else table.defender
        adapted, _ = _adapt(defense, secret, memory, known, _company(table, moved.x_adv, x))
        err, value = _simulated(table, adapted, moved.x_adv, x, y)
        bank = _push(bank, _rows(defense, adapted, len(y)))
        errors.append(err)
        values.append(value)
    err, value = float(np.mean(errors)), float(np.mean(values))
    best = _choose(attack, state.best, moved, err, value, iteration)
    raised, passes = float(jnp.mean(moved.value)), float(jnp.mean(moved.gradients))
    record = _with(state.record, number, iteration, simulated=err, raised=raised)
    record = _with(record, number, gradients=float(record.gradients[number]) + passes)
    done = np.asarray(iteration + 1, np.int32)
    first = state.first if iteration else moved.x_adv
    return state._replace(iteration=done, bank=bank, first=first, best=best, record=record)


def _moved(
    table: Table, bank: Bank, x: Array, y: Array, key: Array, first: Array, later: np.ndarray
) -> BankFound:
    """Attacks the bank in batches of inputs; the last batch is padded with its last input."""
    defense, n, shared = table.defense, len(y), (table.attack, table.defense, table.memory)
    size = min(table.attack.batch_size or n, n)
    parts = []
    for begin in range(0, n, size):
        own = np.minimum(np.arange(begin, begin + size), n - 1)
        models = bank.models
        if defense.per_sample and size < n:
            models = jax.tree.map(lambda rows, own=own: rows[:, own], models)
        rows = (x, y, first) if size == n else (x[own], y[own], first[own])
        part = bank._replace(models=models)
        parts.append(_perturb(*shared, part, *rows, table.eps, key, own, later))
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[:n], *parts)


def _with(record: GameRecord, *place: int, **facts: Any) -> GameRecord:
    """The record with ``facts`` written at an index."""
    changed = {}
    for name, value in facts.items():
        leaf = np.array(getattr(record, name))
        leaf[place] = value
        changed[name] = leaf
    return record._replace(**changed)


def _company(table: Table, x_adv: Array, x: Array) -> Array:
    """The defender's inputs: the submitted points, with the clean inputs if they keep company."""
    return jnp.concatenate([x_adv, x]) if table.company else x_adv


def _rows(defense: Defense, adapted: PyTree, n: int) -> PyTree:
    """The adapted parameters of the first n inputs."""
    return jax.tree.map(lambda leaf: leaf[:n], adapted) if defense.per_sample else adapted


class Facts(NamedTuple):
    """The results of a model on inputs: ``[n]`` leaves."""

    right: Array
    fine: Array
    score: Array
    value: Array


def _simulated(
    table: Table, adapted: PyTree, x_adv: Array, x: Array, y: Array
) -> tuple[float, float]:
    """The error rate of a simulated model, and its mean loss."""
    given = _company(table, x_adv, x)
    labels = jnp.concatenate([y, y]) if table.company else y
    seen = _seen(table, adapted, given, labels)
    n, wrong = len(y), ~seen.right
    if table.defense.rejects and table.company:
        wrong &= ~(seen.score > threshold_for(np.asarray(seen.score[n:]), table.budget))
    return float(wrong[:n].mean()), float(seen.value[:n].mean())


def _choose(
    attack: SpaceAttack, best: BestSet, moved: BankFound, errors: float, value: float, number: int
) -> BestSet:
    """The better of two sets; a loss that is NaN ranks below all others."""
    value = value if np.isfinite(value) else -np.inf
    own, other = (errors, value), (float(best.errors), float(best.value))
    if attack.select == "loss" and not attack.clean_fallback:
        own, other = own[::-1], other[::-1]
    fault = best.fault | moved.fault
    if not own > other:
        return best._replace(fault=fault)
    return BestSet(moved.x_adv, jnp.asarray(errors), jnp.asarray(value), jnp.asarray(number), fault)


def _judge(table: Table, state: State) -> State:
    """The referee's turn: adapts to the submitted points under each private key, and measures.

    Writes ``[draws, size]`` results into the record and begins the next round.
    """
    defense, memory = table.defense, table.memory
    number, x_adv = int(state.round), state.best.x
    x, y = table.x[number], table.y[number]
    cost = _measured(table, x, x_adv)
    base = _base(defense, memory, defense.begin(memory), len(y))
    facts: dict[str, list[Any]] = {name: [] for name in ("adv", "clean")}
    true, clean = state.true, state.clean
    for draw in range(table.draws):
        secret = _key(table.defender, number, draw)
        for name, points, before in (("adv", x_adv, state.true), ("clean", x, state.clean)):
            given = _company(table, points, x)
            adapted, after = _adapt(defense, secret, memory, before, given)
            labels = jnp.concatenate([y, y]) if table.company else y
            facts[name].append(_seen(table, adapted, given, labels))
            if draw == 0:
                later = _between(defense, _key(secret, 0), memory, after)
                true, clean = (later, clean) if name == "adv" else (true, later)
    n = len(y)
    static = [_seen(table, base, z, y) for z in (x_adv, x)]
    adv, own = facts["adv"], facts["clean"]
    beside = [one.score[n:] if table.company else two.score for one, two in zip(adv, own)]
    fault = np.asarray(state.best.fault)
    fault = fault | np.any([~one.fine[:n] for one in (*adv, *own, *static)], axis=0)
    record = _with(
        state.record,
        number,
        x_adv=x_adv,
        cost=cost,
        correct=[one.right[:n] for one in adv],
        correct_clean=[one.right[:n] for one in own],
        static=static[0].right,
        static_clean=static[1].right,
        fault=fault,
        chosen=int(state.best.number),
        score=[one.score[:n] for one in adv],
        score_clean=beside,
    )
    mirror = _mirrored(table, state, x_adv, x)
    following = number + 1
    best = _no_best(table, min(following, len(table.y) - 1))
    place = np.asarray(following, np.int32), np.zeros((), np.int32)
    return State(*place, true, clean, mirror, state.bank, state.first, best, record)


def _mirrored(table: Table, state: State, x_adv: Array, x: Array) -> PyTree:
    """The attacker's simulation of the defender's state in the next round."""
    if not jax.tree.leaves(state.mirror):
        return state.mirror  # The defence is stateless.
    defense, memory, number = table.defense, table.memory, int(state.round)
    own = _key(table.attacker, number, table.attack.iterations)
    _, after = _adapt(defense, _key(own, 0), memory, state.mirror, _company(table, x_adv, x))
    return _between(defense, _key(own, 1), memory, after)


def _measured(table: Table, x: Array, x_adv: Array) -> np.ndarray:
    """``[size]``: costs of the submitted points; raises if one is outside ball or box."""
    cost = np.asarray(table.attack.inner.ball.cost(x, x_adv))
    outside = ~(cost <= float(table.eps) * (1 + 1e-6))
    if outside.any():
        first = int(np.argmax(outside))
        raise ValueError(
            f"the attack submitted {int(outside.sum())} points outside of their ball or box, first "
            f"at index {first} with cost {cost[first]:g} of {float(table.eps):g}."
        )
    return cost


def report(table: Table, record: GameRecord, index: np.ndarray) -> GameReport:
    """Concatenates the rounds of a record into a :class:`GameReport`."""
    flat: dict[str, Any] = {}
    for name, leaf in record._asdict().items():
        leaf = np.asarray(leaf)
        if name in ("correct", "correct_clean", "score", "score_clean"):
            flat[name] = np.moveaxis(leaf, 1, 0).reshape(table.draws, -1)
        elif name in ("x_adv", "cost", "static", "static_clean", "fault"):
            flat[name] = leaf.reshape(-1, *leaf.shape[2:])
        else:
            flat[name] = leaf
    if not table.defense.rejects:
        flat["score"] = flat["score_clean"] = None
    return GameReport(index=index, y=np.asarray(table.y).ravel(), **flat)


_adapt = jax.jit(lambda defense, key, memory, state, x: defense.adapt(key, memory, state, x))
_between = jax.jit(lambda defense, key, memory, state: defense.between(key, memory, state))
_base = jax.jit(lambda defense, memory, state, n: defense.base(memory, state, n), static_argnums=3)
_push = jax.jit(banks.add_model)


@jax.jit
def _perturb(
    attack: SpaceAttack,
    defense: Defense,
    memory: PyTree,
    bank: Bank,
    x: Array,
    y: Array,
    first: Array,
    eps: Array,
    key: Array,
    index: Array,
    later: Array,
) -> BankFound:
    """The attack's points on one batch of inputs, as one program.

    With ``attack.retain`` the points of the round's first iteration, ``first``, compete with them
    from the second iteration on (``later``).
    """
    moved = raise_objective(attack, defense, memory, bank, x, y, eps=eps, key=key, index=index)
    if not attack.retain:
        return moved
    value = objective_at(attack, defense, memory, bank, first, y)
    wins = later & (value > moved.value)
    x_adv = jnp.where(norms.spread(wins, x), first, moved.x_adv)
    return moved._replace(x_adv=x_adv, value=jnp.where(wins, value, moved.value))


def identity_of(table: Table, begun: State) -> bytes:
    """The identity of a game in its checkpoint: the programs of a round, options and numbers."""
    defense, memory, attack = table.defense, table.memory, table.attack
    x, y = table.x[0], table.y[0]
    key, state, given = table.defender, begun.true, _company(table, x, x)
    own, (adapted, after) = (
        np.arange(len(y)),
        jax.eval_shape(_adapt, defense, key, memory, state, x),
    )
    loss, judge = attack.loss, attack.judge or attack.loss
    traced = [
        identity.program(lambda *these: _base(*these, len(y)), defense, memory, state),
        identity.program(_adapt, defense, key, memory, state, given),
        identity.program(_between, defense, key, memory, after),
        identity.program(
            _perturb, attack, defense, memory, begun.bank, x, y, x, table.eps, key, own, own > 0
        ),
        *(
            identity.program(functools.partial(_facts, one), defense, memory, adapted, x, y)
            for one in (loss, judge)
        ),
    ]
    settings = [getattr(attack, one.name) for one in dataclasses.fields(attack)]
    settings = [value for value in settings if isinstance(value, str | int | float)]
    kind = defense.per_sample, defense.uses_inputs, defense.rejects
    return identity.digest(traced, settings, kind, table, begun)


def _seen(table: Table, adapted: PyTree, x: Array, y: Array) -> Facts:
    """The results of a model on inputs, on the host."""
    loss = table.attack.judge or table.attack.loss
    return jax.device_get(_facts(loss, table.defense, table.memory, adapted, x, y))


@functools.partial(jax.jit, static_argnums=0)
def _facts(
    loss: Callable[[Any, Array], Array],
    defense: Defense,
    memory: PyTree,
    adapted: PyTree,
    x: Array,
    y: Array,
) -> Facts:
    """The results of a model; where an output is not finite it counts as wrong."""
    out = defense.predict(memory, adapted, x)
    logits = logits_of(out)
    fine = norms.finite(out)
    right = fine & (losses.decision_margin(logits, y) <= 0)
    score = out[1] if defense.rejects else jnp.zeros(len(y), logits.dtype)
    return Facts(right, fine, score, loss(out, y))
