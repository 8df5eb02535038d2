r"""Training against the worst distribution of a family, which is fitted at the same time."""

import functools
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wdjax import distinct, identity, loops, losses, models, program, training
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, Model, PyTree
from wdjax.engine import loop
from wdjax.nppr import counting, objective
from wdjax.nppr.family import Family
from wdjax.nppr.fit_schedule import Schedule
from wdjax.nppr.fitted import Fitted
from wdjax.precision import training_precision

_CHUNK = 50
"""Maximum number of steps in one program."""


class RegularisedProgram(NamedTuple):
    """Static settings."""

    plan: objective.FitProgram
    features: Callable[[Any], Any] | None
    """``model -> (x -> [n, F])``; None if the family does not see the input."""
    optimizer: optax.GradientTransformation
    draws: int
    """Perturbed copies of each sample in the model's loss."""


class TrainingData(NamedTuple):
    """The constants of a training."""

    schedule: Schedule
    x: Array
    """``[n, *shape]``"""
    y: Array
    """``[n]``"""
    key: Array
    weight: Array
    """A number in ``[0, 1]``: the weight of the perturbed copies' loss."""


class State(NamedTuple):
    """The state of a training; a pytree."""

    model: Model
    opt_state: PyTree
    distribution: objective.State
    step: Array
    loss: Array
    """``[steps]``, NaN for steps to come."""


@training_precision
def train_model(
    model: Model,
    x: AnyArray,
    y: AnyArray,
    *,
    eps: float,
    key: Array,
    family: Family = Family(mode="input"),
    ball: Lp = Lp(),
    epochs: int = 30,
    batch_size: int = 64,
    draws: int = 8,
    weight: float = 0.5,
    optimizer: optax.GradientTransformation | None = None,
    features: Callable[[Any], Any] | None = models.features,
    callback: Callable[[State], Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
) -> tuple[Model, np.ndarray]:
    r"""Trains a model on its loss under a family's worst distribution, fitted at the same time.

    In every step the distribution descends the softplus of the batch's margins, and the model
    descends ``(1 - weight) CE(x) + weight E CE(x + delta)`` of the same batch. The robustness of
    the trained model must be measured by a *new* fit.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, trained as :func:`training.train` does.
      x: ``[n, *shape]`` in the box.
      y: ``[n]`` labels.
      eps: radius.
      key: a typed ``jax.random.key``.
      family: the family of distributions.
      ball: norm and box.
      epochs: passes over the data.
      batch_size: samples in a step.
      draws: copies of each sample, for the distribution and for the model.
      weight: weight of the perturbed copies' loss, in ``[0, 1]``.
      optimizer: of the model; by default Adam whose rate falls from 0.003 by a cosine.
      features: ``model -> (x -> [n, F])``, the features that the heads use of the changing model.
      callback: called with the state every 50 steps; if it returns a true value the training ends.
      checkpoint: a folder to save to and to resume from, see :func:`wdjax.engine.loop.carry`.
      every: minimum number of seconds between two writings.

    Returns:
      The trained model, and the loss of every step, NaN for those not taken.

    Raises:
      ValueError: bad samples or settings, a trace, a loss that is not finite, or a checkpoint of
        another training.

    Cost: ``2 draws + 1`` forward and backward passes a sample and epoch.

    Source: this library's own; Robey et al. [robey2022] train for fixed distributions.

    >>> from wdjax import Model
    >>> start = Model(lambda w, x: (x - 0.5) @ w, jnp.array([[0.1, 0.0], [0.0, 0.1]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.1, 0.9]]), jnp.array([0, 1])
    >>> own = Family(mode="label", components=2, upsample="none")
    >>> how = {"eps": 0.1, "key": jax.random.key(0), "family": own, "epochs": 20}
    >>> _, loss = train_model(start, x, y, **how)
    >>> bool(loss[-1] < loss[0])
    True
    """
    arguments.check(model=model, x=x, y=y, eps=eps, key=key, ball=ball)
    host_only("nppr.train_model", counting.TWIN, model, x, y, key)
    x, y = validate.check_samples(model, x, y, ball.box)
    size = min(validate.check_count("batch_size", batch_size), len(y))
    steps = validate.check_count("epochs", epochs) * (len(y) // size)
    if not 0 <= validate.check_number("weight", weight) <= 1:
        raise ValueError(f"weight must lie in [0, 1], got {weight!r}.")
    radius = jnp.asarray(validate.check_number("eps", eps), jnp.float32)
    optimizer = optimizer or training.default_optimizer(steps)
    seen = features if family.sees_input else None
    # Margins grow during training, so no fixed width of the sigmoid would suit.
    schedule = Schedule(steps=steps, batch=size, draws=draws, loss="softplus").settled(family)
    loops = program.loops_well(jax.make_jaxpr(functools.partial(training.gradients, model))(x[:1]))
    recipe = RegularisedProgram(objective.FitProgram(family, ball, loops), seen, optimizer, draws)
    begin_key, own_key = jax.random.split(key)
    given = TrainingData(schedule, x, y, own_key, jnp.asarray(weight, jnp.float32))
    begun, mark = _first_training_state(recipe, model, given, begin_key, radius), b""
    if checkpoint is not None:
        traced = identity.program(functools.partial(_steps, recipe), given, begun, 0, 1)
        mark = identity.digest(traced, given, begun)
    last = loop.carry(
        begun,
        functools.partial(_turn, recipe, given),
        lambda state: int(state.step) >= steps,
        report=callback,
        checkpoint=checkpoint,
        every=every,
        identity=mark,
        about={"family": family, "ball": ball, "eps": eps, "weight": weight, "epochs": epochs,
               "draws": draws},
    )  # fmt: skip
    return last.model, np.asarray(last.loss)


def _first_training_state(
    recipe: RegularisedProgram, model: Model, given: TrainingData, key: Array, radius: Array
) -> State:
    """The state before the first step: the given model, an optimiser's state, a new distribution.

    The distribution's perturbations are at most ``radius``, a number; its parameters are random.
    """
    plan, x, steps = recipe.plan, given.x, given.schedule.steps
    classes = jax.eval_shape(lambda model, x: model(x), model, x).shape[1]
    seen = recipe.features
    width = 0 if seen is None else objective.as_rows(seen(model)(x[:1])).shape[1]
    stacked = objective.first_fit_states(
        plan.family, x.shape[1:], width, classes, steps, key[None], radius[None], {}
    )
    distribution = jax.tree.map(lambda leaf: leaf[0], stacked)
    opt_state = recipe.optimizer.init(models.parameters(model))
    return State(model, opt_state, distribution, jnp.asarray(0), jnp.full(steps, jnp.nan))


def _turn(recipe: RegularisedProgram, given: TrainingData, state: State) -> State:
    """The state after the next steps of a training, up to ``_CHUNK`` in one program.

    Takes a single step if the model is slow inside a loop. Raises if a loss is not finite.
    """
    first = int(state.step)
    last = min(first + (_CHUNK if recipe.plan.loops else 1), given.schedule.steps)
    state = _steps(recipe, given, state, first, last)
    if not bool(jnp.all(jnp.isfinite(state.loss[first:last]))):
        raise ValueError(f"the loss is not finite before step {last}; lower the learning rate.")
    return state


@functools.partial(distinct.jit, static_argnums=0)
def _steps(
    recipe: RegularisedProgram, given: TrainingData, state: State, first: Array, last: Array
) -> State:
    """Steps ``first`` to ``last``; a single step if the model loops slowly."""
    if not recipe.plan.loops:
        return _step(recipe, given, state)
    return loops.fori_loop(first, last, lambda _, state: _step(recipe, given, state), state)


def _step(recipe: RegularisedProgram, given: TrainingData, state: State) -> State:
    """One step of a training: first the distribution's, then the model's.

    The distribution takes a step of its fit on a batch of B samples ``[B, *shape]``, a slice of the
    epoch's permutation. The model's loss is a weighted mean over the batch and over ``draws``
    perturbed copies of each sample, which carry no gradient to the distribution.
    """
    model, number = state.model, state.step
    rows, keys = _batch(given, number)
    x, y = given.x[rows], given.y[rows]
    seen = None if recipe.features is None else recipe.features(model)
    held = None if seen is None else objective.as_rows(seen(x))
    data = objective.Data(model, x, y, held, None, given.schedule)
    distribution = objective.step(recipe.plan, data, state.distribution)
    worst = Fitted(
        family=recipe.plan.family,
        ball=recipe.plan.ball,
        eps=distribution.eps,
        params=distribution.params,
        stats=distribution.stats,
        history=distribution.history,
        features=seen,
        offset=None,
        model=None,
    )
    moved = jax.lax.stop_gradient(counting.points(worst, keys, x, y, recipe.draws))
    copies = moved.reshape(-1, *x.shape[1:]), jnp.repeat(y, recipe.draws)
    value = functools.partial(_value, ((1 - given.weight, (x, y)), (given.weight, copies)))
    model, opt_state, loss = models.descend(recipe.optimizer, value, model, state.opt_state)
    return State(model, opt_state, distribution, number + 1, state.loss.at[number].set(loss))


def _batch(given: TrainingData, number: Array) -> tuple[Array, Array]:
    """The rows ``[B]`` of a step, each once an epoch, and the key of its copies."""
    size = min(given.schedule.batch, len(given.y))
    turns = len(given.y) // size
    order_key, draw_key = jax.random.split(given.key)
    order = jax.random.permutation(jax.random.fold_in(order_key, number // turns), len(given.y))
    rows = jax.lax.dynamic_slice(order, (number % turns * size,), (size,))
    return rows, jax.random.fold_in(draw_key, number)


def _value(parts: PyTree, model: Model) -> tuple[Array, Model]:
    """The weighted loss over parts ``(weight, (x, y))``, and the model after them."""
    total: Any = 0.0
    for share, (points, labels) in parts:
        logits, model = models.training_pass(model, points)
        total += share * jnp.mean(losses.cross_entropy(logits, labels))
    return total, model
