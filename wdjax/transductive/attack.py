"""Attacks on model spaces: any attack of the attack room, on a bank of models, with a reduction."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import driver, norms, validate
from wdjax.attacks import PGD
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.core import Array, Attack, Model, PyTree
from wdjax.transductive import bank as banks
from wdjax.transductive.bank import Bank
from wdjax.transductive.objectives import (
    FirstFall,
    Objective,
    OutputLoss,
    logits_of,
    margin,
    unaware,
)
from wdjax.transductive.protocol import Defense


class Moved(NamedTuple):
    """What an attack on a bank found: ``[n]`` leaves."""

    x_adv: Array
    """``[n, *shape]``"""
    value: Array
    """The objective there."""
    fault: Array
    """Whether an output or a gradient was not finite on the way."""
    gradients: Array
    """Backward passes, each through all models that were asked."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpaceAttack:
    r"""An attack on the models that a defence would have: transfer, PGD-skip, FPA and GMSA in one.

    In iteration ``i = 0 .. iterations - 1`` the models so far are attacked together, the defence is
    simulated on what was found, and its model joins the bank. The set on which the simulated model
    errs most is submitted. :func:`transfer`, :func:`pgd_skip`, :func:`fpa`, :func:`gmsa_avg` and
    :func:`gmsa_min` are settings of it.

    Args:
      inner: the search, fixed-budget, with a field ``loss`` that is replaced; its points are those
        of largest objective, never clean ones.
      loss: ``(out, y) -> [n]`` of one model, to be increased.
      reduce: how the losses of many models become one, see :class:`Objective`.
      temperature: of ``reduce="softmin"``.
      iterations: ``T + 1``.
      begin: ``"static"``: F_0 is the model before the first round; ``"current"``: that of this
        round, as far as the attacker knows.
      legs: searches one after the other, each from the last one's points: ``"one"``, or
        ``"models"`` for as many as there are models, as GMSA-MIN is defined.
      restarts: searches from random points, or from the samples where ``random_start`` is False.
      rivals: further searches, towards the margin of each of so many other classes.
      judge: the loss by which the best of all these is taken; by default ``loss``.
      random_start: see ``restarts``.
      simulations: how often the defence is simulated on a set, under keys of its own; all models
        join the bank, which is expectation over its randomness.
      select: which set is submitted: that of most ``"errors"``, with the mean loss as a tie-break,
        or of most ``"loss"``.
      keep: ``"largest"`` loss; or ``"first"``: of every sample the first point that is
        misclassified, and the clean one if there is none. That is how AutoAttack's points come
        about, and why they do not transfer.
      retain: in later iterations, keep the points of the first wherever the present objective is
        larger there: what attacks the bank is never behind what attacks F_0.
      clean_fallback: submit clean samples where no simulation errs. For parity with the authors'
        code of RMC and DENT only: it understates the attack.

    Raises:
      ValueError: unknown words, counts out of range, an inner attack that has no loss or another
        budget.

    Cost: iteration i takes the inner attack's passes times ``restarts + rivals``, times the models
      in the bank, times as many again for ``legs="models"``.

    Differs: a tie between sets is decided by loss, not by order. No sample is ever returned clean.
      ``retain`` is not in the paper.

    Source: Chen et al. [chen2022], Algorithms 1 and 2.

    >>> SpaceAttack(inner=PGD(steps=5)) == SpaceAttack(inner=PGD(steps=5))
    True
    """

    inner: Attack = dataclasses.field(default_factory=PGD)
    loss: OutputLoss = setting(unaware)
    reduce: str = setting("mean")
    temperature: float = setting(1.0)
    iterations: int = setting(10)
    begin: str = setting("current")
    legs: str = setting("one")
    restarts: int = setting(1)
    rivals: int = setting(0)
    judge: OutputLoss | None = setting(None)
    random_start: bool = setting(True)
    simulations: int = setting(1)
    select: str = setting("errors")
    keep: str = setting("largest")
    retain: bool = setting(True)
    clean_fallback: bool = setting(False)

    def __post_init__(self) -> None:
        for name, least in (("iterations", 1), ("restarts", 1), ("rivals", 0), ("simulations", 1)):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name), least))
        validate.check_choice("begin", self.begin, ("static", "current"))
        validate.check_choice("legs", self.legs, ("one", "models"))
        validate.check_choice("select", self.select, ("errors", "loss"))
        validate.check_choice("keep", self.keep, ("largest", "first"))
        self.objective  # noqa: B018  Checks the reduction.
        if not hasattr(self.inner, "budget"):
            return  # A tree operation rebuilds the dataclass around something else.
        if self.inner.budget != "sample" or not hasattr(self.inner, "loss"):
            raise ValueError(
                "inner must look inside a ball of every sample and have a loss, such as PGD or "
                f"APGD; got {self.inner!r}."
            )
        if getattr(self.inner, "targets", 0):
            raise ValueError("targets of the inner attack are for single models: set rivals.")

    @property
    def objective(self) -> Objective:
        """What is raised."""
        return Objective(self.loss, self.reduce, self.temperature)

    @property
    def capacity(self) -> int:
        """Models that the bank must hold."""
        return 1 + self.simulations * self.iterations

    @property
    def runs(self) -> int:
        """Searches a leg."""
        return self.restarts + self.rivals


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
) -> Moved:
    r"""Attacks all models of a bank at once: the inner problem of Algorithm 2, equation 7.

    Args:
      attack: how.
      defense: whose models they are.
      memory: what it knows.
      bank: at least one model.
      x: ``[n, *shape]`` all samples of a round.
      y: ``[n]``
      eps: the radius, a number or ``[n]``.
      key: for starts.

    Returns:
      A :class:`Moved`, measured: points of the ball and the box whose objective is at least that of
      every point where a search began.

    Cost: see :class:`SpaceAttack`.

    >>> from wdjax import Model
    >>> from wdjax.transductive import Fixed
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> bank = banks.push(banks.empty(model, 1), model)
    >>> x, y, how = jnp.array([[0.6, 0.4]]), jnp.array([0]), SpaceAttack(inner=PGD(steps=5))
    >>> moved = raise_objective(how, Fixed(model), (), bank, x, y, eps=0.2, key=jax.random.key(0))
    >>> bool(jnp.allclose(moved.x_adv, jnp.array([[0.4, 0.6]])))
    True
    """
    newest = bank.filled - 1 if attack.reduce == "last" else 0
    own = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(y)))
    question = _Question(attack, defense, memory, bank, newest, x, y, jnp.asarray(eps, x.dtype))
    classes = _classes(question)

    def search(best: Moved, run: Array) -> tuple[Moved, None]:
        aim = (y + 1 + (run - attack.restarts) % (classes - 1)) % classes
        aim = jnp.where(run < attack.restarts, -1, aim)
        keys = jax.vmap(lambda key: jax.random.fold_in(key, run))(own)
        moved = _climb(question, aim, _start(question, keys), jax.random.fold_in(key, run))
        return _better(best, moved), None

    unknown, none = jnp.full(y.shape, -jnp.inf, x.dtype), jnp.zeros(y.shape, jnp.int32)
    begun = Moved(x, unknown, none > 0, none)
    return jax.lax.scan(search, begun, jnp.arange(attack.runs))[0]


def objective_at(
    attack: SpaceAttack, defense: Defense, memory: PyTree, bank: Bank, x: Array, y: Array
) -> Array:
    """``[n]``: what an attack raises, by its ``judge``, at points as they are.

    Args:
      attack: how.
      defense: whose models they are.
      memory: what it knows.
      bank: the models.
      x: ``[n, *shape]``
      y: ``[n]``

    Cost: one forward pass a model.

    >>> from wdjax import Model
    >>> from wdjax.transductive import Fixed
    >>> model = Model(lambda w, x: x @ w, jnp.eye(2))
    >>> bank = banks.push(banks.empty(model, 1), model)
    >>> at = objective_at(SpaceAttack(), Fixed(model), (), bank, jnp.zeros((1, 2)), jnp.array([0]))
    >>> round(float(at[0]), 4)  # log 2
    0.6931
    """
    newest = bank.filled - 1 if attack.reduce == "last" else 0
    judge = dataclasses.replace(attack.objective, loss=attack.judge or attack.loss)
    return judge(banks.victim(defense, memory, bank, first=newest)(x), y).astype(x.dtype)


class _Question(NamedTuple):
    """What all searches of an iteration share."""

    attack: SpaceAttack
    defense: Defense
    memory: PyTree
    bank: Bank
    newest: Array | int
    x: Array
    y: Array
    eps: Array

    def victim(self, rival: Array | None = None) -> Model:
        return banks.victim(self.defense, self.memory, self.bank, first=self.newest, rival=rival)

    @property
    def ball(self) -> Lp:
        return self.attack.inner.ball  # type: ignore[return-value]


def _classes(asked: _Question) -> int:
    said = jax.eval_shape(asked.victim(), asked.x)
    return jax.tree.leaves(logits_of(said.out))[0].shape[-1]


def _start(asked: _Question, keys: Array) -> Array:
    """Random points of the ball, or the samples."""
    x = asked.x
    if not asked.attack.random_start:
        return x
    noise = jax.vmap(lambda key: asked.ball.noise(key, x.shape[1:], x.dtype))(keys)
    radius = jnp.broadcast_to(asked.eps, asked.y.shape)
    return asked.ball.project(x + norms.spread(radius, x) * noise, x, radius)


def _climb(asked: _Question, aim: Array, start: Array, key: Array) -> Moved:
    """All legs of a search, and its points judged."""
    attack, x, y = asked.attack, asked.x, asked.y
    victim, inner = asked.victim(aim), _fitted(attack)
    criterion: Any = attack.objective
    if attack.keep == "first":
        criterion = FirstFall(dataclasses.replace(attack.objective, loss=margin))

    def leg(number: Array, moved: Moved) -> Moved:
        found = driver.search(
            inner,
            victim,
            x,
            y,
            eps=jnp.broadcast_to(asked.eps, y.shape),
            key=jax.random.fold_in(key, number),
            criterion=criterion,
            start=moved.x_adv,
            skip_misclassified=False,
        )
        gradients = moved.gradients + found.gradients
        return Moved(found.x_adv, found.margin, moved.fault | found.fault, gradients)

    none = jnp.zeros(y.shape, jnp.int32)
    begun = Moved(start, jnp.full(y.shape, -jnp.inf, x.dtype), none > 0, none)
    legs = asked.bank.filled if attack.legs == "models" else 1
    moved = jax.lax.fori_loop(0, legs, leg, begun)
    if attack.keep == "first":
        fresh = criterion(asked.victim()(moved.x_adv), y) > criterion(asked.victim()(x), y)
        moved = moved._replace(x_adv=jnp.where(norms.spread(fresh, x), moved.x_adv, x))
    _, defense, memory, bank, *_ = asked
    return moved._replace(value=objective_at(attack, defense, memory, bank, moved.x_adv, y))


def _fitted(attack: SpaceAttack) -> Any:
    """The inner attack with the objective as its loss, never content with a first success."""
    more = {"stop": False} if hasattr(attack.inner, "stop") else {}
    return dataclasses.replace(attack.inner, loss=attack.objective, **more)  # type: ignore[type-var]


def _better(best: Moved, moved: Moved) -> Moved:
    wins = (moved.value > best.value) & jnp.isfinite(moved.value)
    x_adv = jnp.where(norms.spread(wins, moved.x_adv), moved.x_adv, best.x_adv)
    value = jnp.where(wins, moved.value, best.value)
    fault = best.fault | moved.fault | ~jnp.isfinite(moved.value)
    return Moved(x_adv, value, fault, best.gradients + moved.gradients)


def transfer(inner: Attack, **settings: Any) -> SpaceAttack:
    """Transfer PGD: the model before the first round is attacked, once.

    >>> transfer(PGD()).iterations
    1
    """
    return SpaceAttack(inner=inner, iterations=1, begin="static", **settings)


def pgd_skip(inner: Attack, **settings: Any) -> SpaceAttack:
    """PGD-skip: every round attacks the model of the round before, as far as it is known.

    As published it sees the defender's state: ``play(..., leak="state")``.

    Source: Wu et al. [rmc2020] by way of Chen et al. [chen2022], example 1.

    >>> pgd_skip(PGD()).begin
    'current'
    """
    return SpaceAttack(inner=inner, iterations=1, **settings)


def fpa(inner: Attack, iterations: int = 10, **settings: Any) -> SpaceAttack:
    """The fixed point attack: in every iteration the newest model alone is attacked.

    Source: Chen et al. [chen2022], Algorithm 1.

    >>> fpa(PGD()).reduce
    'last'
    """
    return SpaceAttack(inner=inner, iterations=iterations, reduce="last", **settings)


def gmsa_avg(inner: Attack, iterations: int = 10, **settings: Any) -> SpaceAttack:
    """Greedy model space attack on the mean of the losses.

    Source: Chen et al. [chen2022], Algorithm 2.

    >>> gmsa_avg(PGD()).reduce
    'mean'
    """
    return SpaceAttack(inner=inner, iterations=iterations, **settings)


def gmsa_min(inner: Attack, iterations: int = 10, **settings: Any) -> SpaceAttack:
    """Greedy model space attack on the least of the losses, with as many legs as models.

    ``legs="one"`` spends what :func:`gmsa_avg` spends.

    Source: Chen et al. [chen2022], Algorithm 2 and A.1.3.

    >>> gmsa_min(PGD()).legs, gmsa_min(PGD(), legs="one").legs
    ('models', 'one')
    """
    settings = {"legs": "models"} | settings
    return SpaceAttack(inner=inner, iterations=iterations, reduce="min", **settings)
