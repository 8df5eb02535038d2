r"""Training against the worst distribution while it is being learnt."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wdjax import losses, models, program, validate
from wdjax.balls import Lp
from wdjax.core import AnyArray, Array, Model
from wdjax.nppr import objective
from wdjax.nppr.estimate import expected_loss
from wdjax.nppr.family import Family
from wdjax.nppr.fitted import Fitted
from wdjax.nppr.schedule import Schedule


class Recipe(NamedTuple):
    """What changes the program."""

    plan: objective.Plan
    features: Callable[[Any], Any] | None
    optimizer: optax.GradientTransformation
    draws: int


def train(
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
) -> tuple[Model, np.ndarray]:
    r"""Trains a model on its loss under the worst distribution of a family, which learns alongside.

    In every step the distribution descends on the margin of a batch, as in a fit, and the model on
    ``(1 - weight) CE(x) + weight E CE(x + delta)`` of the same batch. What robustness the model has
    then is for a *fresh* fit to say.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]`` whose leaves are floats.
      x: ``[n, *shape]`` in the box.
      y: ``[n]`` labels.
      eps: radius.
      key: a typed ``jax.random.key``.
      family: the distributions.
      ball: norm and box.
      epochs: passes over the data.
      batch_size: samples a step.
      draws: copies a sample, for the distribution and for the model.
      weight: of the loss of perturbed copies, in ``[0, 1]``.
      optimizer: of the model; by default Adam whose rate falls from 0.003 by a cosine.
      features: ``model -> (x -> [n, F])``, what the heads see of a model that changes.

    Returns:
      The trained model, and the loss of every step.

    Raises:
      ValueError: bad samples or settings, a loss that is not finite.

    Cost: ``2 draws + 1`` forward and backward passes a sample and epoch.

    Source: this library's own; Robey et al. [robey2022] train for fixed distributions.

    >>> from wdjax import Model
    >>> start = Model(lambda w, x: (x - 0.5) @ w, jnp.array([[0.1, 0.0], [0.0, 0.1]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.1, 0.9]]), jnp.array([0, 1])
    >>> own = Family(mode="label", components=2, upsample="none")
    >>> how = {"eps": 0.1, "key": jax.random.key(0), "family": own, "epochs": 20}
    >>> _, loss = train(start, x, y, **how)
    >>> bool(loss[-1] < loss[0])
    True
    """
    x, y = validate.check_samples(model, x, y, ball.box)
    size = min(validate.check_count("batch_size", batch_size), len(y))
    steps = validate.check_count("epochs", epochs) * (len(y) // size)
    if not 0 <= validate.check_number("weight", weight) <= 1:
        raise ValueError(f"weight must lie in [0, 1], got {weight!r}.")
    radius = validate.check_number("eps", eps)
    optimizer = optimizer or optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    seen = features if family.sees_input else None
    schedule = Schedule(steps=steps, batch=size, draws=draws).settled(family)
    loops = program.loops_well(jax.make_jaxpr(_gradient)(model, x[:1]))
    recipe = Recipe(objective.Plan(family, ball, loops), seen, optimizer, draws)
    shapes = jax.eval_shape(lambda model, x: model(x), model, x)
    width = 0 if seen is None else objective.as_rows(seen(model)(x[:1])).shape[1]
    begin_key, own_key = jax.random.split(key)
    begun = objective.begin(
        family, x.shape[1:], width, shapes.shape[1], steps, begin_key[None],
        jnp.asarray([radius], jnp.float32), {},
    )  # fmt: skip
    distribution = jax.tree.map(lambda leaf: leaf[0], begun)
    carried = model, optimizer.init(model), distribution
    values = []
    for first in range(0, steps, _CHUNK if loops else 1):
        numbers = jnp.arange(first, min(first + (_CHUNK if loops else 1), steps))
        carried, seen_now = _steps(recipe, schedule, carried, x, y, own_key, numbers, weight)
        values.append(np.asarray(seen_now))
        if not np.all(np.isfinite(values[-1])):
            raise ValueError(f"the loss is not finite after step {first}; lower the learning rate.")
    return carried[0], np.concatenate(values)


_CHUNK = 50
"""Steps in one program at most."""


def _gradient(model: Model, x: Array) -> Any:
    return jax.grad(lambda model, x: jnp.sum(model(x)), argnums=(0, 1))(model, x)


@functools.partial(jax.jit, static_argnums=0)
def _steps(
    recipe: Recipe,
    schedule: Schedule,
    carried: Any,
    x: Array,
    y: Array,
    key: Array,
    numbers: Array,
    weight: Array,
) -> tuple[Any, Array]:
    size = min(schedule.batch, len(y))

    def one(carried: Any, number: Array) -> tuple[Any, Array]:
        model, opt_state, distribution = carried
        turns = len(y) // size
        order_key, draw_key = jax.random.split(key)
        order = jax.random.permutation(jax.random.fold_in(order_key, number // turns), len(y))
        rows = jax.lax.dynamic_slice(order, (number % turns * size,), (size,))
        own_x, own_y = x[rows], y[rows]
        seen = None if recipe.features is None else recipe.features(model)
        held = None if seen is None else objective.as_rows(seen(own_x))
        data = objective.Data(model, own_x, own_y, held, None, schedule)
        distribution = objective.step(recipe.plan, data, distribution)
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

        def value(model: Model) -> Array:
            clean = jnp.mean(losses.cross_entropy(model(own_x), own_y))
            moved = expected_loss(
                model,
                jax.lax.stop_gradient(worst),
                own_x,
                own_y,
                key=jax.random.fold_in(draw_key, number),
                draws=recipe.draws,
            )
            return (1 - weight) * clean + weight * moved

        loss, slope = jax.value_and_grad(value)(model)
        updates, opt_state = recipe.optimizer.update(slope, opt_state, model)
        return (optax.apply_updates(model, updates), opt_state, distribution), loss

    if len(numbers) == 1:
        carried, loss = one(carried, numbers[0])
        return carried, loss[None]
    return jax.lax.scan(one, carried, numbers)
