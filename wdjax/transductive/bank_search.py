"""A space attack on a bank: searches with its objective as loss, and the best of their points."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import loops, norms
from wdjax.balls import Lp
from wdjax.checks import arguments
from wdjax.core import Array, Model, PyTree
from wdjax.engine import driver
from wdjax.precision import full_precision
from wdjax.transductive import bank as banks
from wdjax.transductive.bank import Bank
from wdjax.transductive.defense import Defense
from wdjax.transductive.objectives import Ceaseless, FirstFall, logits_of, margin
from wdjax.transductive.space_attack import SpaceAttack


class BankFound(NamedTuple):
    """The points of an attack on a bank: ``[n]`` leaves."""

    x_adv: Array
    """``[n, *shape]``"""
    value: Array
    """The objective at the points."""
    fault: Array
    """Whether an output or a gradient was not finite on the way."""
    gradients: Array
    """Backward passes, each through all models in use."""
    zeros: Array
    """How many of these were zero in every coordinate."""


@full_precision
def raise_objective(
    attack: SpaceAttack,
    defense: Defense,
    memory: PyTree,
    bank: Bank,
    x: Array,
    y: Array,
    *,
    eps: Array | float,
    key: Array,
    index: Array | None = None,
) -> BankFound:
    r"""Attacks all models of a bank at once: the inner problem of Algorithm 2, equation 7.

    Args:
      attack: the space attack.
      defense: the defence that the models belong to.
      memory: its memory.
      bank: at least one model.
      x: ``[n, *shape]``, all samples of a round.
      y: ``[n]``
      eps: the radius, a number or ``[n]``.
      key: for random starts.
      index: ``[n]``, the samples' numbers in a larger data set, from which random keys are derived.

    Returns:
      A :class:`BankFound`, measured: points of the ball and the box whose objective is at least
      that at every starting point.

    Raises:
      ValueError: bad samples, labels, radius or key.

    Cost: see :class:`SpaceAttack`.

    Source: Chen et al. [chen2022], Algorithm 2.

    >>> from wdjax.attacks import PGD
    >>> from wdjax.transductive import Fixed
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> bank = banks.add_model(banks.empty_bank(model, 1), model)
    >>> x, y, how = jnp.array([[0.6, 0.4]]), jnp.array([0]), SpaceAttack(inner=PGD(steps=5))
    >>> moved = raise_objective(how, Fixed(model), (), bank, x, y, eps=0.2, key=jax.random.key(0))
    >>> bool(jnp.allclose(moved.x_adv, jnp.array([[0.4, 0.6]])))
    True
    """
    arguments.check(x=x, y=y, eps=eps, key=key)
    index = jnp.arange(len(y)) if index is None else index
    sample_keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(index)
    question = _SharedInputs(attack, defense, memory, bank, index, x, y, jnp.asarray(eps, x.dtype))
    classes = _classes(question)

    def search(best: BankFound, run: Array) -> tuple[BankFound, None]:
        aim = (y + 1 + (run - attack.restarts) % (classes - 1)) % classes
        aim = jnp.where(run < attack.restarts, -1, aim)
        keys = jax.vmap(lambda key: jax.random.fold_in(key, run))(sample_keys)
        moved = _climb(question, aim, _start(question, keys), jax.random.fold_in(key, run))
        return _better(best, moved), None

    unknown, none = jnp.full(y.shape, -jnp.inf, x.dtype), jnp.zeros(y.shape, jnp.int32)
    begun = BankFound(x, unknown, none > 0, none, none)
    return loops.scan(search, begun, jnp.arange(attack.runs))[0]


@full_precision
def objective_at(
    attack: SpaceAttack, defense: Defense, memory: PyTree, bank: Bank, x: Array, y: Array
) -> Array:
    """``[n]``: the objective of an attack, with its ``judge`` loss, at given points.

    Args:
      attack, defense, memory, bank, y: as in :func:`raise_objective`.
      x: ``[n, *shape]``, any points.

    Raises:
      ValueError: bad samples or labels.

    Cost: one forward pass of each model.

    Source: Chen et al. [chen2022], Algorithm 2.

    >>> from wdjax.transductive import Fixed
    >>> model = Model(lambda w, x: x @ w, jnp.eye(2))
    >>> bank = banks.add_model(banks.empty_bank(model, 1), model)
    >>> at = objective_at(SpaceAttack(), Fixed(model), (), bank, jnp.zeros((1, 2)), jnp.array([0]))
    >>> round(float(at[0]), 4)  # log 2
    0.6931
    """
    arguments.check(x=x, y=y)
    judge = dataclasses.replace(attack.objective, loss=attack.judge or attack.loss)
    victim = banks.victim(defense, memory, bank, first=attack.first(bank))
    return judge(victim(x), y).astype(x.dtype)


class _SharedInputs(NamedTuple):
    """What all searches of an iteration share."""

    attack: SpaceAttack
    defense: Defense
    memory: PyTree
    bank: Bank
    sample_index: Array
    x: Array
    y: Array
    eps: Array

    def victim(self, rival: Array | None = None) -> Model:
        first = self.attack.first(self.bank)
        return banks.victim(self.defense, self.memory, self.bank, first=first, rival=rival)

    @property
    def ball(self) -> Lp:
        return self.attack.inner.ball  # type: ignore[return-value]


def _classes(asked: _SharedInputs) -> int:
    """The number of classes of the bank's models."""
    said = jax.eval_shape(asked.victim(), asked.x)
    return jax.tree.leaves(logits_of(said.out))[0].shape[-1]


def _start(asked: _SharedInputs, keys: Array) -> Array:
    """The first points: random ones of the ball, or the samples if ``random_start`` is off."""
    x = asked.x
    if not asked.attack.random_start:
        return x
    noise = jax.vmap(lambda key: asked.ball.noise(key, x.shape[1:], x.dtype))(keys)
    radius = jnp.broadcast_to(asked.eps, asked.y.shape)
    return asked.ball.project(x + norms.spread(radius, x) * noise, x, radius)


def _climb(asked: _SharedInputs, aim: Array, start: Array, key: Array) -> BankFound:
    """One search from ``start`` ``[n, *shape]``, and the judge's objective at its points.

    ``aim`` ``[n]`` are target classes, -1 for none. The search has one leg (a run of the inner
    attack from the last points), or as many as there are models. With ``keep="first"`` points that
    are no better than the samples are dropped.
    """
    attack, x, y = asked.attack, asked.x, asked.y
    victim, inner = asked.victim(aim), _fitted(attack)
    criterion: Any = Ceaseless(attack.objective)
    if attack.keep == "first":
        criterion = FirstFall(dataclasses.replace(attack.objective, loss=margin))

    def leg(number: Array, moved: BankFound) -> BankFound:
        found = driver.search(
            inner,
            victim,
            x,
            y,
            eps=jnp.broadcast_to(asked.eps, y.shape),
            key=jax.random.fold_in(key, number),
            criterion=criterion,
            start=moved.x_adv,
            index=asked.sample_index,  # type: ignore[arg-type]
            skip_misclassified=False,
            transductive=True,
        )
        spent = moved.gradients + found.gradients, moved.zeros + found.zeros
        return BankFound(found.x_adv, found.margin, moved.fault | found.fault, *spent)

    none = jnp.zeros(y.shape, jnp.int32)
    begun = BankFound(start, jnp.full(y.shape, -jnp.inf, x.dtype), none > 0, none, none)
    legs = asked.bank.filled if attack.legs == "models" else 1
    moved = loops.fori_loop(0, legs, leg, begun)
    if attack.keep == "first":
        fresh = criterion(asked.victim()(moved.x_adv), y) > criterion(asked.victim()(x), y)
        moved = moved._replace(x_adv=jnp.where(norms.spread(fresh, x), moved.x_adv, x))
    _, defense, memory, bank, *_ = asked
    return moved._replace(value=objective_at(attack, defense, memory, bank, moved.x_adv, y))


def _fitted(attack: SpaceAttack) -> Any:
    """The inner attack with the objective as its loss."""
    return dataclasses.replace(attack.inner, loss=attack.objective)  # type: ignore[type-var]


def _better(best: BankFound, moved: BankFound) -> BankFound:
    """The point of larger objective for each sample; faults and gradients add up."""
    wins = (moved.value > best.value) & jnp.isfinite(moved.value)
    x_adv = jnp.where(norms.spread(wins, moved.x_adv), moved.x_adv, best.x_adv)
    value = jnp.where(wins, moved.value, best.value)
    fault = best.fault | moved.fault | ~jnp.isfinite(moved.value)
    spent = best.gradients + moved.gradients, best.zeros + moved.zeros
    return BankFound(x_adv, value, fault, *spent)
