"""The game between attacker, defender and referee, each of whom sees only its own data."""

import dataclasses
import functools
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from wdjax import data, distinct, norms, parallel
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, Found, Model, PyTree
from wdjax.engine import diagnosis, driver, loop
from wdjax.precision import full_precision
from wdjax.transductive import turns
from wdjax.transductive.attacker import Attacker
from wdjax.transductive.defender import Defender
from wdjax.transductive.defense import Defense
from wdjax.transductive.game_identity import game_identity
from wdjax.transductive.game_report import REJECTIONS, GameReport, reported
from wdjax.transductive.objectives import logits_of
from wdjax.transductive.referee import Referee
from wdjax.transductive.space_attack import SpaceAttack
from wdjax.transductive.state import State
from wdjax.transductive.turns import Game

LEAKS = ("none", "state", "seed")
ORDERS = ("natural", "labels")
_BEFORE = 2**31 - 1
"""Stands for the time before the first round in the attacker's keys."""


def prepare(defense: Defense, x: AnyArray, y: AnyArray, *, key: Array) -> PyTree:
    """The ``memory`` that a defence derives from training data, known to everybody.

    Args:
      defense: from :mod:`wdjax.transductive`.
      x: ``[n, *shape]`` training samples in ``[0, 1]``.
      y: ``[n]`` labels.
      key: for training.

    Raises:
      ValueError: bad samples or labels, and what the defence refuses.

    Source: Chen et al. [chen2022].

    >>> from wdjax import Model
    >>> from wdjax.transductive import Fixed
    >>> fixed = Fixed(Model(lambda w, x: x @ w, jnp.eye(2)))
    >>> prepare(fixed, np.ones((1, 2)), [0], key=jax.random.key(0))
    ()
    """
    arguments.check(x=x, y=y, key=key)
    host_only("prepare", "the method prepare of the defense, which can be traced", x, y, key)
    known = data.as_dataset(x, y, "the training data")
    given = defense, key, jnp.asarray(known.x), jnp.asarray(known.y)
    logits = jax.eval_shape(_first_logits, *given)
    validate.check_labels(np.asarray(known.y), logits.shape[-1])
    return _prepare(*given)


@full_precision
def play(
    defense: Defense,
    attack: SpaceAttack,
    x: AnyArray,
    y: AnyArray,
    *,
    memory: PyTree,
    eps: float,
    key: Array,
    size: int | None = None,
    draws: int = 3,
    leak: str = "none",
    order: str = "natural",
    pool: int | None = None,
    company: bool | None = None,
    rejections: float = REJECTIONS,
    diagnose: bool = True,
    callback: Callable[[State], Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
    mesh: Mesh | None = None,
) -> GameReport:
    r"""Plays a game of one or many rounds against a defence that adapts, and referees it.

    In every round the attacker moves the inputs within the ball; then the defender adapts to them,
    without labels, under a private key drawn after the move. The attacker knows data, memory,
    defence and code, and simulates the defence with keys and a state of its own. The referee draws
    ``draws`` private keys for every round; under each, the defender adapts to the submitted points,
    and, in a parallel game, to the clean inputs. The first key's adaptation is carried to the next
    round.

    Args:
      defense: from :mod:`wdjax.transductive`.
      attack: such as :func:`~wdjax.transductive.gmsa_avg`.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      memory: from :func:`prepare`.
      eps: the radius of every input's ball, in the units of ``x``.
      key: a typed ``jax.random.key``, split at once into the attacker's and the defender's.
      size: inputs in a round; all of them by default. It must divide n.
      draws: private keys for each round.
      leak: what the attacker sees of the defender: ``"none"``; ``"state"``, what is kept from round
        to round; ``"seed"``, also the private key, the worst case, for a single draw.
      order: ``"natural"``, or ``"labels"``: the attacker sorts pools of inputs by label before they
        are cut into rounds.
      pool: inputs in a pool, by default two rounds; a multiple of ``size`` that divides n.
      company: give the defender the clean inputs of a round together with the attacked ones; by
        default for defences that reject.
      rejections: the share of clean inputs that a rejecting defence may reject, when the attacker
        compares sets.
      diagnose: warn of the report's remarks: values that are not finite, gradients that vanish.
      callback: called with the :class:`State` after every turn; a true value ends the game, which
        is then an error.
      checkpoint: a folder; a game that was interrupted resumes from it, with equal results.
      every: minimum number of seconds between two writings.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; the inputs of a round are split over it.

    Returns:
      A :class:`GameReport`.

    Raises:
      ValueError: bad samples, a defence of another box than the ball's, sizes that do not divide,
        also over the mesh, unknown options, a search before the game that met what is not finite,
        several draws of a leaked key, a static model whose outputs on clean inputs are not finite,
        points outside their ball, a checkpoint of another game, a game ended by the callback.

    Cost: a round takes the attack's iterations, with one adaptation each, and ``2 draws``
      adaptations more; one more for a stateful defence.

    Differs: the authors draw private randomness once, and in a stateless deterministic game the
      simulation is exact; nothing is leaked there, and the attacker may submit clean inputs.

    Source: Chen et al. [chen2022], sections 4 to 5.

    >>> from wdjax import Model
    >>> from wdjax.transductive import Fixed, transfer
    >>> fixed = Fixed(Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]])))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> from wdjax.attacks import PGD
    >>> found = play(fixed, transfer(PGD(steps=5)), x, y, memory=(), eps=0.2, key=jax.random.key(0))
    >>> found.correct[0].tolist(), found.one_shot_clean.value
    ([False, True], 1.0)
    """
    arguments.check(x=x, y=y, eps=eps, key=key)
    twin = "transductive.raise_objective, which can be traced"
    host_only("a game", twin, defense, memory, x, y, eps, key)
    check_attack(attack)
    arguments.warn(arguments.too_far(attack.inner.ball, np.shape(x)[1:], eps))
    rules = _checked(_Rules(size, draws, leak, order, pool, rejections))
    static = static_model(defense, memory)
    box = attack.inner.ball.box
    clips = getattr(defense, "box", box)
    if clips != box:
        raise ValueError(f"the defence clips inputs to {clips}, and the ball's box is {box}.")
    x, y = validate.check_samples(static, x, y, box, transductive=True)
    rows, index = _arrange(np.asarray(y), rules)
    defender = Defender(defense, memory, defense.rejects if company is None else bool(company))
    parallel.check_divides("size", rows, mesh)
    attack = _with_points(attack, static, x, y, eps, key)
    if attack.points is not None:
        rounds = attack.points[index].reshape(-1, rows, *x.shape[1:])
        attack = dataclasses.replace(attack, points=rounds)
    game = _game(defender, attack, rules, (x[index], y[index]), rows, eps, key)
    parallel.check_same((game.x, game.y), mesh)
    attacker, referee = parallel.replicate((game.attacker, game.referee), mesh)
    game = game._replace(attacker=attacker, referee=referee, mesh=mesh)
    begun = turns.first_game_state(game)
    last = loop.carry(
        begun,
        functools.partial(turns.turn, game),
        functools.partial(turns.finished, game),
        report=callback,
        checkpoint=checkpoint,
        every=every,
        identity=b"" if checkpoint is None else game_identity(game, begun),
        about={"defense": type(defense).__name__, "attack": attack, "samples": len(index),
               "eps": float(eps), "leak": leak, "order": order, "draws": rules.draws},
        mesh=mesh,
    )  # fmt: skip
    if not turns.finished(game, last):
        raise ValueError(
            f"the game was ended in round {int(last.round)} of {len(game.y)}; with a checkpoint "
            "it can go on."
        )
    found = reported(last.record, index, np.asarray(game.y).ravel(), defense.rejects)
    if diagnose:
        diagnosis.say("play", found.remarks)
    return found


class _Rules(NamedTuple):
    """The options of a game, as in :func:`play`."""

    size: int | None
    draws: int
    leak: str
    order: str
    pool: int | None
    rejections: float


def check_attack(attack: Any) -> None:
    """Raises for what is no attack on model spaces."""
    if not (isinstance(attack, SpaceAttack) and hasattr(attack.inner, "ball")):
        raise ValueError(
            f"attack must be one on model spaces, such as gmsa_avg(PGD()), got {attack!r}."
        )


def _with_points(
    attack: SpaceAttack, static: Model, x: Array, y: Array, eps: float, key: Array
) -> SpaceAttack:
    """The attack with its points ``[n, *shape]``, if it has some; its search finds them here.

    Of what a search finds, flips within ``eps`` count; other samples are submitted as they are.
    """
    points, search = attack.points, attack.search
    if points is None and search is None:
        return attack
    if points is None:
        search_key = jax.random.fold_in(jax.random.split(key)[0], _BEFORE)
        if hasattr(search, "stages"):
            radius = None if search.budget == "none" else eps
            points = driver.search(search, static, x, y, key=search_key, eps=radius)
        else:
            points = search(static, x, y, eps=eps, key=search_key, ball=attack.inner.ball)
    if isinstance(points, Found):
        faults = int(jnp.sum(points.fault))
        if faults:
            raise ValueError(
                f"the search met outputs or gradients that are not finite at {faults} samples; no "
                "robustness can be reported of what it left."
            )
        near = points.success & (points.cost <= eps)
        points = jnp.where(norms.spread(near, x), points.x_adv, x)
    return dataclasses.replace(attack, points=validate.check_like("points", points, x))


def _checked(rules: _Rules) -> _Rules:
    """The rules with counts as integers; raises for those that do not depend on the inputs."""
    validate.check_choice("leak", rules.leak, LEAKS)
    validate.check_choice("order", rules.order, ORDERS)
    draws = validate.check_count("draws", rules.draws)
    if rules.leak == "seed" and draws > 1:
        raise ValueError(
            f"a seed that leaks is one key: pass draws=1, got {draws}, and play under several keys."
        )
    if rules.order == "natural" and rules.pool is not None:
        raise ValueError("pool is for order='labels'; in natural order nothing is pooled.")
    rejections = float(validate.check_number("rejections", rules.rejections))
    return rules._replace(draws=draws, rejections=rejections)


def _arrange(y: np.ndarray, rules: _Rules) -> tuple[int, np.ndarray]:
    """The number of inputs in a round, and the order ``[n]`` in which they are submitted.

    Sorts each pool of inputs by label if the order is "labels".
    """
    n = len(y)
    size = n if rules.size is None else validate.check_count("size", rules.size)
    if n % size:
        raise ValueError(
            f"rounds of {size} do not divide {n} inputs; pass {n - n % size} of them, or another "
            "size."
        )
    index = np.arange(n)
    if rules.order == "natural":
        return size, index
    count = 2 * size if rules.pool is None else validate.check_count("pool", rules.pool)
    if n % count or count % size:
        raise ValueError(
            f"pools of {count} must divide the {n} inputs, and be whole rounds of {size}."
        )
    parts = [part[np.argsort(y[part], kind="stable")] for part in np.split(index, n // count)]
    return size, np.concatenate(parts)


def _game(
    defender: Defender,
    attack: SpaceAttack,
    rules: _Rules,
    samples: tuple[Array, Array],
    size: int,
    eps: float,
    key: Array,
) -> Game:
    """The players and their inputs: ``samples`` ``[n, *shape]`` and ``[n]`` in rounds of ``size``.

    The key is split at once, so that neither player's randomness depends on the other's.
    """
    x, y = samples
    radius = jnp.asarray(validate.check_number("eps", eps), x.dtype)
    settled = validate.settle(dataclasses.replace(attack, points=None), x.dtype)
    settled = dataclasses.replace(settled, points=attack.points)
    attacker_key, secret = jax.random.split(key)
    return Game(
        Attacker(settled, defender, radius, attacker_key, rules.rejections),
        Referee(defender, settled, radius, secret, rules.draws),
        x.reshape(-1, size, *x.shape[1:]),
        y.reshape(-1, size),
        rules.leak,
        None,
    )


def static_model(defense: Defense, memory: PyTree) -> Model:
    """The model before any adaptation."""
    return Model(_static, {"defense": defense, "memory": memory})


def _static(params: dict[str, Any], x: Array) -> Array:
    """Logits of the model before any adaptation."""
    defense, memory = params["defense"], params["memory"]
    base = defense.base(memory, defense.begin(memory), len(x))
    return logits_of(defense.predict(memory, base, x))


def _first_logits(defense: Defense, key: Array, x: Array, y: Array) -> Array:
    """Logits of the training samples before any adaptation."""
    return static_model(defense, defense.prepare(key, x, y))(x)


_prepare = distinct.jit(lambda defense, key, x, y: defense.prepare(key, x, y))
