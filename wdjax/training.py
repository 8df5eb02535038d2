"""Trains small classifiers with optax: on clean samples, against attacks, to be certified."""

import functools
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from wdjax import aims, distinct, identity, loops, losses, models, parallel, program
from wdjax.aims import Aim, AttackAim, CertificateAim, NoiseAim, TrainableCertificate, TrainingNoise
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, Attack, PyTree
from wdjax.engine import driver, loop
from wdjax.precision import training_precision


class History(NamedTuple):
    """Means over the batches of every epoch, ``[epochs]``; NaN for epochs to come."""

    loss: Array
    accuracy: Array
    """On the clean samples."""
    robust_accuracy: Array
    """Under the attack used in training; without one, what a certificate certified, or else equal
    to ``accuracy``."""


class Training(NamedTuple):
    """The state of a training; a pytree, so :mod:`wdjax.files.persist` saves and restores it."""

    model: Any
    opt_state: Any
    epoch: Array
    """The number of epochs done."""
    history: History


class StepProgram(NamedTuple):
    """Static settings of a step."""

    optimizer: optax.GradientTransformation
    loss: Callable[[Array, Array], Array]
    order: float
    at_once: bool
    mesh: Mesh | None


@training_precision
def train(
    model: Callable[[Array], Array],
    x: AnyArray,
    y: AnyArray,
    *,
    key: Array,
    epochs: int = 30,
    batch_size: int = 128,
    optimizer: optax.GradientTransformation | None = None,
    loss: Callable[[Array, Array], Array] = losses.cross_entropy,
    attack: Attack | None = None,
    eps: Any = None,
    order: float = 1,
    kappa: Any = None,
    certificate: TrainableCertificate | None = None,
    noise: TrainingNoise | None = None,
    checkpoint: str | PathLike[str] | None = None,
    callback: Callable[[Training], Any] | None = None,
    mesh: Mesh | None = None,
) -> Training:
    r"""Trains a classifier, on clean samples, against an attack or towards a certificate.

    With an attack, every batch is attacked with the current parameters, and the expected loss under
    the adversarial distribution of equation 11 is minimised:
    ``mean_i (1 - w_i) l(x_i) + w_i l(x_adv_i)`` with ``x_adv`` and ``w`` held fixed (Danskin's
    theorem). Point-wise attacks have ``w = 1``: Madry's adversarial training. Samples that are
    misclassified already are attacked too. A Wasserstein budget holds for every batch, hence for
    the epoch.

    With a certificate, the loss is a weighted mean of that of the clean samples and that of the
    worst logits allowed by lower bounds of the margins, or of an attack of the certificate's own.

    With noise, every sample gets fresh noise in every step, as randomised smoothing needs.

    An epoch is one compiled loop, unless XLA would run the model slowly inside a loop
    (:func:`wdjax.program.loops_well`). It takes a random permutation and drops the last, incomplete
    batch.

    Args:
      model: a pytree callable, :data:`wdjax.Model`. Of a Flax NNX module from
        :func:`wdjax.models.functional` the ``nnx.Param`` are trained; in the loss BatchNorm
        normalises by the batch and updates its averages, and dropout is active, as in Flax. Attacks
        and bounds use the model in inference mode. Of any other pytree all leaves are trained.
      x: ``[n, *shape]`` floats in the box of the attack or certificate; else in ``[0, 1]``.
      y: ``[n]`` integer labels.
      key: a typed ``jax.random.key``; with equal arguments, equal keys give equal parameters.
      epochs: passes over the data.
      batch_size: samples in a step.
      optimizer: from optax; by default Adam, whose rate falls from 0.003 to 0 along a cosine.
      loss: per-sample, ``(logits, y) -> [n]``, to be decreased.
      attack: from :mod:`wdjax.attacks`.
      eps: the attack's budget, or the radius to be certified. A schedule of an attack's budget is
        ``[epochs]``, such as ``np.geomspace(0.1, 10, epochs)``.
      order: Wasserstein order of the budget, as in :func:`wdjax.run`.
      kappa: how the mass is split, as in :func:`wdjax.run`.
      certificate: bounds to train through, :class:`wdjax.certify.CertifiedTraining`.
      noise: of :mod:`wdjax.smoothing.noise`; the history then describes the noisy samples.
      checkpoint: a folder to save to after every epoch; if it holds a checkpoint, training resumes
        from it, with equal results. Ctrl-C and SIGTERM end after the current epoch.
      callback: called with the :class:`Training` after every epoch; a true value ends the training.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; every batch is split over it, and its
        gradients are averaged.

    Returns:
      A :class:`Training`: ``.model`` is the trained model, ``.history`` its losses and accuracies.

    Raises:
      ValueError: bad samples, an attack or a certificate without ``eps`` or ``eps`` without either,
        ``order`` without an attack, an ``optimizer`` or ``loss`` that is none, more than one of
        attack, certificate and noise, batches that do not divide over the mesh, a leaf that cannot
        be trained and is not of a Flax module, no leaf at all, a loss that is not finite, or a
        checkpoint of another training.

    Cost: per step 1 forward and 1 backward pass a sample; with an attack, its passes and 2 of each;
      with a certificate, about three times the cost of its bounds.

    Source: Madry et al. [madry2018] for the point-wise case, Gowal et al. [gowal2018] for
      certificates, Cohen et al. [cohen2019] for noise.

    >>> x = jnp.array([[0.0], [0.2], [0.8], [1.0]])
    >>> y = jnp.array([0, 0, 1, 1])
    >>> from wdjax import Model
    >>> model = Model(lambda w, x: (x - 0.5) * w, jnp.zeros((1, 2)))
    >>> trained = train(model, x, y, key=jax.random.key(0), epochs=3)
    >>> float(trained.history.accuracy[-1])
    1.0
    """
    arguments.check(
        "attack",
        "eps",
        attack=attack,
        model=model,
        x=x,
        y=y,
        eps=eps,
        key=key,
        ball=getattr(certificate, "ball", None),
    )
    _check_parts(optimizer, loss)
    if attack is None and order != 1:
        raise ValueError(f"order goes with an attack: got order={order!r} and no attack.")
    twin = "transductive.train_classifier, which can be traced"
    host_only("train", twin, model, x, y, key, eps, kappa, attack)
    epochs = validate.check_count("epochs", epochs)
    batch_size = validate.check_count("batch_size", batch_size)
    x, size = validate.on_device(x), min(batch_size, len(y))
    steps = epochs * (len(y) // size)
    aim = aims.aim(attack, certificate, noise, eps, kappa, x.dtype, steps, epochs)
    either = certificate if attack is None else attack
    x, y = validate.check_samples(model, x, y, (0.0, 1.0) if either is None else either.ball.box)
    if not jax.tree.leaves(models.parameters(model)):
        raise ValueError("the model has no parameters; train it with its framework.")
    optimizer = optimizer or default_optimizer(steps)
    at_once = program.loops_well(jax.make_jaxpr(functools.partial(gradients, model))(x[:1]))
    parallel.check_divides("batch_size", size, mesh)
    recipe = StepProgram(optimizer, loss, validate.check_order(order), at_once, mesh)

    def turn(training: Training) -> Training:
        epoch_key = jax.random.fold_in(key, training.epoch)
        return _epoch(recipe, aim, training, *inputs, epoch_key, size)

    begun = parallel.replicate(start(model, optimizer, epochs), mesh)
    inputs: tuple[Array, Array] = parallel.replicate((x, y), mesh)
    named = {"attack": attack, "certificate": certificate, "noise": noise, "eps": eps}
    named |= {"kappa": kappa, "order": order, "loss": loss, "epochs": epochs, "batch_size": size}
    last = loop.carry(
        begun,
        turn,
        lambda training: int(training.epoch) >= epochs,
        report=callback,
        checkpoint=checkpoint,
        every=0.0,
        identity=b"" if checkpoint is None else _identity(recipe, aim, begun, x, y, key, size),
        about=named,
        mesh=mesh,
    )
    return parallel.gather(last, mesh)


def _check_parts(optimizer: Any, loss: Any) -> None:
    """Raises unless they are what :func:`train` takes."""
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            "optimizer must be of optax, such as optax.adam(1e-3), got "
            f"{arguments.described(optimizer)}."
        )
    if isinstance(loss, type) or not callable(loss):
        raise ValueError(
            "loss must be a function (logits, y) -> [n], such as wdjax.losses.cross_entropy, got "
            f"{arguments.described(loss)}."
        )


def _identity(
    recipe: StepProgram, aim: Aim, begun: Training, x: Array, y: Array, key: Array, size: int
) -> bytes:
    """What a checkpoint belongs to: the program of a step on ``size`` samples, and all numbers."""
    first, trained = jnp.asarray(0), (begun.model, begun.opt_state)
    batch = jnp.zeros((1, size), jnp.int32)
    of_step = functools.partial(_steps, recipe)
    now = aim.of_epoch(0) if isinstance(aim, AttackAim) else aim
    traced = identity.program(of_step, now, trained, x, y, batch, first, first, key)
    return identity.digest(traced, aim, begun, x, y, key)


def start(model: PyTree, optimizer: optax.GradientTransformation, epochs: int) -> Training:
    """The state before the first epoch.

    Args:
      model: a pytree callable.
      optimizer: from optax.
      epochs: length of the histories.

    >>> from wdjax import Model
    >>> start(Model(jnp.dot, jnp.eye(2)), optax.sgd(0.1), epochs=3).history.loss.shape
    (3,)
    """
    empty = jnp.full(epochs, jnp.nan)
    known = optimizer.init(models.parameters(model))
    return Training(model, known, jnp.asarray(0), History(empty, empty, empty))


@functools.lru_cache(maxsize=64)
def default_optimizer(steps: int) -> optax.GradientTransformation:
    """Adam with a rate falling from 0.003; cached, so that equal trainings share one program."""
    return optax.adam(optax.cosine_decay_schedule(3e-3, steps))


def gradients(model: Callable[[Array], Array], x: Array) -> PyTree:
    """The gradients that a training step repeats, for :func:`wdjax.program.loops_well`."""

    def total(params: PyTree, x: Array) -> Array:
        return jnp.sum(models.training_pass(models.join(params, model), x)[0])

    return jax.grad(total, argnums=(0, 1))(models.parameters(model), x)


def _epoch(
    recipe: StepProgram,
    aim: Aim,
    training: Training,
    x: Array,
    y: Array,
    key: Array,
    size: int,
) -> Training:
    """One epoch: a step on every batch of ``size``, in random order.

    ``x`` is ``[n, *shape]``, ``y`` ``[n]``. Returns the training with a new row of its history;
    raises a ValueError if a mean of the epoch is not finite.
    """
    order_key, attack_key = jax.random.split(key)
    if isinstance(aim, AttackAim):
        aim = aim.of_epoch(training.epoch)
    steps = len(y) // size
    order = jax.random.permutation(order_key, len(y))[: steps * size].reshape(steps, size)
    model, opt_state = training.model, training.opt_state
    rows: list[Array] = []
    before = training.epoch * steps
    for part in [order] if recipe.at_once else jnp.split(order, steps):
        first = jnp.asarray(len(rows))
        (model, opt_state), seen = _steps(
            recipe, aim, (model, opt_state), x, y, part, first, before, attack_key
        )
        rows.append(seen)
    row = jnp.mean(jnp.concatenate(rows), axis=0)
    if not bool(jnp.all(jnp.isfinite(row))):
        raise ValueError(
            f"the loss is not finite in epoch {int(training.epoch)}; lower the learning rate."
        )
    history = (past.at[training.epoch].set(now) for past, now in zip(training.history, row))
    return Training(model, opt_state, training.epoch + 1, History(*history))


@functools.partial(distinct.jit, static_argnums=0)
def _steps(
    recipe: StepProgram,
    aim: Aim,
    trained: PyTree,
    x: Array,
    y: Array,
    order: Array,
    first: Array,
    before: Array,
    key: Array,
) -> tuple[PyTree, Array]:
    """A training step for every row ``[batch]`` of ``order``, the samples' indices.

    ``first`` is the number of the first step in its epoch, ``before`` that of all steps in earlier
    epochs. Returns the model and the optimiser's state, and ``[steps, 3]``: loss, accuracy and
    robust accuracy of each step. A single row makes no loop.
    """

    def step(trained: PyTree, row: tuple[Array, Array]) -> tuple[PyTree, Array]:
        number, batch = row
        step_key = jax.random.fold_in(key, number)
        samples = parallel.shard((x[batch], y[batch]), recipe.mesh)
        if isinstance(aim, CertificateAim):
            return _proved(recipe, aim, trained, *samples, before + number, step_key)
        if isinstance(aim, NoiseAim):
            return _blurred(recipe, aim, trained, *samples, step_key)
        return _step(recipe, aim, trained, *samples, step_key)

    numbers = first + jnp.arange(len(order))
    if len(order) == 1:
        trained, seen = step(trained, (numbers[0], order[0]))
        return trained, seen[None]
    return loops.scan(step, trained, (numbers, order))


def _step(
    recipe: StepProgram,
    opponent: AttackAim | None,
    trained: PyTree,
    x: Array,
    y: Array,
    key: Array,
) -> tuple[PyTree, Array]:
    """One step on a batch ``[n, *shape]``, against the opponent's attack if there is one.

    Without ``kappa`` adversarial samples replace clean ones; with it (or for minimum-norm attacks)
    both count, by the mass that moves. Returns model and optimiser's state, and ``[3]``: loss,
    accuracy and robust accuracy.
    """
    parts, correct = [(jnp.ones(len(y), x.dtype), x)], None
    if opponent is not None:
        attack, eps, kappa = opponent
        found = driver.run(
            attack,
            trained[0],
            x,
            y,
            eps=eps,
            order=recipe.order,
            kappa=kappa,
            key=key,
            skip_misclassified=False,
        )
        weight, x_adv, correct = jax.lax.stop_gradient((found.weight, found.x_adv, found.correct))
        whole = kappa is None and attack.budget != "none"
        parts = [(weight, x_adv)] if whole else [(1 - weight, x), (weight, x_adv)]

    def expected(model: PyTree) -> tuple[Array, PyTree, Array]:
        value = robust = jnp.zeros((), x.dtype)
        for share, points in parts:
            logits, model = models.training_pass(model, points)
            loss = validate.check_each("loss", recipe.loss(logits, y), len(y))
            value += jnp.mean(share * loss)
            held = losses.decision_margin(logits, y) <= 0
            robust += jnp.mean(jnp.where(held, share, 0.0))
        right = robust if correct is None else jnp.mean(correct)
        return value, model, jnp.stack([value, right, robust])

    return _descend(recipe, expected, trained)


def _blurred(
    recipe: StepProgram, blur: NoiseAim, trained: PyTree, x: Array, y: Array, key: Array
) -> tuple[PyTree, Array]:
    """One step on a batch with noise added to each sample."""
    keys = jax.random.split(key, len(x))
    moved = x + jax.vmap(blur.noise.offset)(keys, x)
    return _step(recipe, None, trained, moved, y, key)


def _proved(
    recipe: StepProgram,
    proof: CertificateAim,
    trained: PyTree,
    x: Array,
    y: Array,
    number: Array,
    key: Array,
) -> tuple[PyTree, Array]:
    """One step of certified training; ``number`` counts all steps.

    The loss is a weighted mean of that of the logits and a robust one, by the certificate's
    schedule; the robust one is that of the margins' lower bounds, with an attack a mean with that
    of its points. Returns model and optimiser's state, and ``[3]``: loss, accuracy, and the share
    of samples that resist the attack within the radius of this step, without one are certified.
    """
    certificate, eps, steps = proof
    done = number / steps
    weight, radius, center = certificate.weight(done), certificate.share(done) * eps, x
    if certificate.attack is not None:
        found = driver.search(
            certificate.attack, trained[0], x, y, eps=radius, key=key, skip_misclassified=False
        )
        x_adv = jax.lax.stop_gradient(found.x_adv)
        left = jnp.broadcast_to((1 - certificate.small) * radius, len(x))
        center = certificate.ball.project(x_adv, x, left)

    def expected(model: PyTree) -> tuple[Array, PyTree, Array]:
        logits, model = models.training_pass(model, x)
        low = certificate.margins(model, center, y, certificate.small * eps, done)
        is_label = jnp.arange(low.shape[1]) == y[:, None]
        worst = jnp.where(is_label, 0.0, -low)
        robust = validate.check_each("loss", recipe.loss(worst, y), len(y))
        held = jnp.all(is_label | (low > 0), axis=1)
        if certificate.attack is not None:
            moved, model = models.training_pass(model, x_adv)
            robust = _blended(certificate, recipe.loss, worst, moved, y)
            held = losses.decision_margin(moved, y) <= 0
        value = jnp.mean((1 - weight) * recipe.loss(logits, y) + weight * robust)
        value += certificate.penalty(model, x, eps, done)
        right = losses.decision_margin(logits, y) <= 0
        return value, model, jnp.stack([value, jnp.mean(right), jnp.mean(held)])

    return _descend(recipe, expected, trained)


def _blended(
    certificate: TrainableCertificate,
    loss: Callable[[Array, Array], Array],
    worst: Array,
    moved: Array,
    y: Array,
) -> Array:
    """``[n]``: the loss between that of the bounds' logits ``worst`` and that of the attack's,
    ``moved``, both ``[n, K]``; those of the bounds are relative to the label's."""
    mix = certificate.mix
    if certificate.blend == "logits":
        apart = moved - jnp.take_along_axis(moved, y[:, None], axis=1)
        return loss(mix * worst + (1 - mix) * apart, y)
    bounded, attacked = loss(worst, y), loss(moved, y)
    if certificate.blend == "losses":
        return mix * bounded + (1 - mix) * attacked
    least = jnp.finfo(bounded.dtype).tiny
    logs = (jnp.log(jnp.maximum(value, least)) for value in (bounded, attacked))
    return jnp.exp(mix * next(logs) + (1 - mix) * next(logs))


def _descend(
    recipe: StepProgram, expected: Callable[[PyTree], tuple[Array, PyTree, Array]], trained: PyTree
) -> tuple[PyTree, Array]:
    """One optimiser step on ``expected``, which maps a model to (loss, model, row).

    Returns (model, optimiser's state) and the row of measurements.
    """
    model, opt_state, _, row = models.descend(recipe.optimizer, expected, *trained)
    return (model, opt_state), row
