"""Training small classifiers with optax, on clean or on adversarial samples; Orbax checkpoints."""

import functools
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wdjax import driver, losses, persist
from wdjax.core import Attack
from wdjax.validate import check_number, check_samples


class History(NamedTuple):
    """Means over the batches of every epoch, ``[epochs]``; NaN where an epoch is still to come."""

    loss: jax.Array
    accuracy: jax.Array
    """On the clean samples."""
    robust_accuracy: jax.Array
    """Under the attack trained against; without one, the same as ``accuracy``."""


class Training(NamedTuple):
    """What training carries on; a pytree, so :func:`save` and :func:`restore` resume it."""

    model: Any
    opt_state: Any
    epoch: jax.Array
    """Epochs done."""
    history: History


def train(
    model: Callable[[jax.Array], jax.Array],
    x,
    y,
    *,
    key,
    epochs: int = 30,
    batch_size: int = 128,
    optimizer: optax.GradientTransformation | None = None,
    loss: Callable = losses.cross_entropy,
    attack: Attack | None = None,
    eps=None,
    checkpoint: str | PathLike | None = None,
    callback: Callable[[Training], Any] | None = None,
    **knobs,
) -> Training:
    r"""Trains a classifier, on clean samples or against an attack.

    With an attack, every batch is attacked with the current parameters, and the expected loss under
    the adversarial distribution of equation 11 is minimised:
    ``mean_i (1 - w_i) l(x_i) + w_i l(x_adv_i)`` with ``x_adv`` and ``w`` held fixed. Point-wise
    attacks have ``w = 1``: Madry's adversarial training. Samples that are misclassified already are
    attacked too. A Wasserstein budget is kept by every batch, hence by the epoch.

    An epoch is one jitted loop, except where XLA runs it slowly: a model with convolutions on the
    CPU is advanced step by step from the host. An epoch goes through a random permutation and
    leaves out what does not fill a batch.

    Args:
      model: a pytree callable, :data:`wdjax.Model`; all its leaves are trained.
      x: ``[n, *shape]`` floats in ``[0, 1]``.
      y: ``[n]`` integer labels.
      key: a typed ``jax.random.key``; with equal arguments, equal keys give equal parameters.
      epochs: passes over the data.
      batch_size: samples a step.
      optimizer: from optax; by default Adam whose learning rate falls from 0.003 to 0 by a cosine.
      loss: per-sample, ``(logits, y) -> [n]``, to be decreased.
      attack: from a factory in :mod:`wdjax.attacks`.
      eps: the attack's budget.
      checkpoint: a folder to save to after every epoch; if it holds a checkpoint already, training
        goes on from there, to the same numbers.
      callback: called with the :class:`Training` so far after every epoch; a true value ends it.
      **knobs: the attack's own numbers.

    Returns:
      A :class:`Training`: ``.model`` is the trained model, ``.history`` its losses and accuracies.

    Raises:
      ValueError: bad samples, an attack without ``eps`` or ``eps`` without an attack, leaves that
        are not floats, a loss that is not finite, or a checkpoint of another training.

    Cost: per step 1 forward and 1 backward pass a sample; with an attack its passes and 2 of each.

    Source: Madry et al. (2018) for the point-wise case.

    >>> x = jnp.array([[0.0], [0.2], [0.8], [1.0]])
    >>> y = jnp.array([0, 0, 1, 1])
    >>> from wdjax import Model
    >>> model = Model(lambda w, x: (x - 0.5) * w, jnp.zeros((1, 2)))
    >>> trained = train(model, x, y, key=jax.random.key(0), epochs=3)
    >>> float(trained.history.accuracy[-1])
    1.0
    """
    for name, number in (("epochs", epochs), ("batch_size", batch_size)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a positive integer, got {number!r}.")
    if (attack is None) != (eps is None) or (attack is None and knobs):
        given = ", ".join(["eps"] * (eps is not None) + list(knobs)) or "no eps"
        raise ValueError(f"attack and eps go together: got attack={attack!r} and {given}.")
    if not all(
        jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating) for leaf in jax.tree.leaves(model)
    ):
        raise ValueError("all leaves of the model must be floats: they are what training changes.")
    x, y = check_samples(model, x, y, (0.0, 1.0) if attack is None else attack.box)
    size = min(batch_size, len(y))
    steps = len(y) // size
    optimizer = _default_optimizer(epochs * steps) if optimizer is None else optimizer
    budget = {} if attack is None else {"eps": check_number("eps", eps), **knobs}
    training = start(model, optimizer, epochs)
    if checkpoint is not None and persist.exists(checkpoint):
        training = persist.restore(checkpoint, training)
    program = (attack, optimizer, loss)
    advance = _advance_jitted if _loops_well(model, x) else _advance
    for epoch in range(int(training.epoch), epochs):
        order_key, attack_key = jax.random.split(jax.random.fold_in(key, epoch))
        order = jax.random.permutation(order_key, len(y))[: steps * size].reshape(steps, size)
        trained, rows = advance(
            program, (training.model, training.opt_state), x, y, order, attack_key, budget
        )
        row = [jnp.mean(column) for column in rows]
        if not all(np.isfinite(row)):
            raise ValueError(f"the loss is not finite in epoch {epoch}; lower the learning rate.")
        history = History(*(past.at[epoch].set(now) for past, now in zip(training.history, row)))
        training = Training(trained[0], trained[1], jnp.asarray(epoch + 1), history)
        if checkpoint is not None:
            persist.save(checkpoint, training)
        if callback is not None and callback(training):
            break
    return training


def start(model, optimizer: optax.GradientTransformation, epochs: int) -> Training:
    """The state that training starts from; also the ``like`` to :func:`restore` one.

    >>> from wdjax import Model
    >>> start(Model(jnp.dot, jnp.eye(2)), optax.sgd(0.1), epochs=3).history.loss.shape
    (3,)
    """
    empty = jnp.full(epochs, jnp.nan)
    return Training(model, optimizer.init(model), jnp.asarray(0), History(empty, empty, empty))


@functools.lru_cache(maxsize=64)
def _default_optimizer(steps):
    """Cached, so that equal trainings share one compiled program."""
    return optax.adam(optax.cosine_decay_schedule(3e-3, steps))


def _loops_well(model, x):
    """Whether XLA runs the model as fast inside a loop as outside: not a convolution on the CPU."""
    if jax.default_backend() != "cpu":
        return True
    return "conv_general_dilated" not in str(jax.make_jaxpr(model)(x[:1]))


def _advance(program, trained, x, y, order, key, budget):
    """One epoch, step by step from the host."""
    rows = []
    for step, batch in enumerate(order):
        trained, row = _step(program, trained, x[batch], y[batch], key, step, budget)
        rows.append(row)
    return trained, jnp.stack(rows, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _advance_jitted(program, trained, x, y, order, key, budget):
    """One epoch as one loop."""

    def body(trained, batch):
        step, batch = batch
        return _step(program, trained, x[batch], y[batch], key, step, budget)

    trained, rows = jax.lax.scan(body, trained, (jnp.arange(len(order)), order))
    return trained, rows.T


def _step(program, trained, x, y, key, step, budget):
    attack, optimizer, loss = program
    if attack is None:
        moved = None
    else:
        result = driver.run(
            attack,
            trained[0],
            x,
            y,
            key=jax.random.fold_in(key, step),
            skip_misclassified=False,
            **budget,
        )
        moved = jax.lax.stop_gradient((result.x_adv, result.weight))
    return _update((optimizer, loss), trained, x, y, moved)


@functools.partial(jax.jit, static_argnums=0)
def _update(program, trained, x, y, moved):
    optimizer, loss = program
    model, opt_state = trained

    def expected(model):
        logits = model(x)
        value, right = loss(logits, y), losses.margin(logits, y) < 0
        robust = right
        if moved is not None:
            x_adv, weight = moved
            logits = model(x_adv)
            value = (1 - weight) * value + weight * loss(logits, y)
            robust = (1 - weight) * right + weight * (losses.margin(logits, y) < 0)
        value = jnp.mean(value)
        return value, jnp.stack([value, jnp.mean(right), jnp.mean(robust)])

    gradient, row = jax.grad(expected, has_aux=True)(model)
    updates, opt_state = optimizer.update(gradient, opt_state, model)
    return (optax.apply_updates(model, updates), opt_state), row
