r"""Fitting the worst distribution of a family: the objective, a step, and the loop around it."""

import functools
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wdjax import loop, losses, models, program, validate
from wdjax.balls import Lp
from wdjax.core import AnyArray, Array
from wdjax.nppr import family as families
from wdjax.nppr import mixture as mixtures
from wdjax.nppr import upsample as up
from wdjax.nppr.family import Family, Params
from wdjax.nppr.fitted import Fitted, History
from wdjax.nppr.schedule import Schedule

Classifier = Callable[[Array], Array]

_CHUNK = 25
"""Steps in one program at most."""
_ADAM = optax.scale_by_adam()


class Data(NamedTuple):
    """What all fits share."""

    model: Classifier
    x: Array
    y: Array
    features: Array | None
    """``[n, F]`` of the samples as they are, computed once."""
    offset: Array | None
    """``[n, L]``, added to the means."""
    schedule: Schedule


class State(NamedTuple):
    """What a fit carries on; a pytree."""

    params: Params
    stats: Params
    opt_state: Any
    step: Array
    eps: Array
    key: Array
    history: History


class Plan(NamedTuple):
    """What changes the program."""

    family: Family
    ball: Lp
    loops: bool


def fit(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    eps: float,
    key: Array,
    family: Family = Family(),
    schedule: Schedule = Schedule(),
    ball: Lp = Lp(),
    features: Classifier | None = None,
    offset: Callable[..., Array] | None = None,
    start: Params | None = None,
    callback: Callable[[State], Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
) -> Fitted:
    r"""The distribution of a family under which a model is wrong most often: that of NPPR.

    Minimises ``mean softplus(z_y - max_{j != y} z_j + kappa)`` over samples of the mixtures of the
    correctly classified inputs, through Gumbel-softmax samples, up-sampling and the map into the
    ball, by Adam. What it finds is an upper value of the infimum over the family.

    Args:
      model: a pytree callable, ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` in the ball's box. Samples that are misclassified are left out.
      y: ``[n]`` labels.
      eps: radius, in units of ``x``.
      key: a typed ``jax.random.key``.
      family: which distributions.
      schedule: steps, rates, temperatures.
      ball: norm and box.
      features: ``[n, *shape] -> [n, F]``, a pytree callable; by default the penultimate layer of a
        model of this package.
      offset: moves the means of every input, see :func:`wdjax.nppr.attack_offset`.
      start: parameters to begin with instead of random ones, see
        :func:`wdjax.nppr.universal_start`.
      callback: called with the :class:`State` every 25 steps; a true value ends the fit.
      checkpoint: a folder to save to and to go on from, see :func:`wdjax.loop.carry`.
      every: least seconds between two writings.

    Returns:
      A :class:`~wdjax.nppr.Fitted`.

    Raises:
      ValueError: bad samples or settings, no sample that is classified correctly, a loss that is
        not finite, or a checkpoint of another fit.

    Cost: ``steps B M`` forward and backward passes.

    Source: Wang et al. [wang2025], equations 9 to 11.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.55, 0.45]]), jnp.array([0, 0])
    >>> own = Family(mode="label", components=2, upsample="none")
    >>> found = fit(model, x, y, eps=0.2, key=jax.random.key(0), family=own)
    >>> float(found.history.survived[0]) > 0.5, float(found.history.survived[-1]) < 0.1
    (True, True)
    """
    keys = key[None] if jnp.ndim(key) == 0 else key
    if len(keys) != 1:
        raise ValueError(f"fit takes one key, got {len(keys)}; use fit_many.")
    radius = validate.check_number("eps", eps)
    states = _fit(
        model, x, y, [radius], keys, family, schedule, ball, features, offset, start,
        callback, checkpoint, every,
    )  # fmt: skip
    return states[0]


def fit_many(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    eps: float | Sequence[float],
    keys: Array,
    family: Family = Family(),
    schedule: Schedule = Schedule(),
    ball: Lp = Lp(),
    features: Classifier | None = None,
    offset: Callable[..., Array] | None = None,
    callback: Callable[[State], Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
) -> list[Fitted]:
    """Many fits as one program: seeds, radii or both, in parallel by ``vmap``.

    Args:
      model: as for :func:`fit`, like all that is not said here.
      x: ``[n, *shape]``
      y: ``[n]``
      eps: one radius, or one a key.
      keys: ``[S]`` typed keys.
      family: which distributions.
      schedule: steps, rates, temperatures.
      ball: norm and box.
      features: what the heads see.
      offset: moves the means of every input.
      callback: called with the stacked states.
      checkpoint: of all fits together.
      every: least seconds between two writings.

    Returns:
      S of :class:`~wdjax.nppr.Fitted`.

    Raises:
      ValueError: as :func:`fit`.

    Cost: S times that of one.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4]]), jnp.array([0])
    >>> own = Family(mode="independent", components=2, upsample="none")
    >>> keys = jax.random.split(jax.random.key(0), 2)
    >>> found = fit_many(model, x, y, eps=[0.01, 0.2], keys=keys, family=own)
    >>> [round(float(one.history.survived[-1]), 1) for one in found]
    [1.0, 0.0]
    """
    radii = np.broadcast_to(np.asarray(eps, float), (len(keys),))
    for radius in radii:
        validate.check_number("eps", radius)
    return _fit(
        model, x, y, [*radii], keys, family, schedule, ball, features, offset, None,
        callback, checkpoint, every,
    )  # fmt: skip


def _fit(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    radii: list[float],
    keys: Array,
    family: Family,
    schedule: Schedule,
    ball: Lp,
    features: Classifier | None,
    offset: Callable[..., Array] | None,
    start: Params | None,
    callback: Callable[[State], Any] | None,
    checkpoint: str | PathLike[str] | None,
    every: float,
) -> list[Fitted]:
    if validate.traced(model, x, y, keys, radii) or validate.staged():
        raise ValueError("a fit looks at its samples: call it outside of jit; for vmap, fit_many.")
    x, y = validate.check_samples(model, x, y, ball.box)
    logits = _logits(model, x)
    right = np.asarray(losses.decision_margin(logits, y) <= 0)
    if not right.any():
        raise ValueError("no sample is classified correctly: nothing is left to be robust.")
    x, y = x[right], y[right]
    if family.sees_input and features is None:
        features = models.features(model)  # type: ignore[arg-type]
    seen = None if not family.sees_input else as_rows(_logits(features, x))
    moved = None if offset is None else offset(family, model, x, y)
    settled = schedule.settled(family)
    data = Data(model, x, y, seen, moved, settled)
    width = 0 if seen is None else seen.shape[1]
    states = [
        _begin(family, key, x.shape[1:], width, logits.shape[1], schedule.steps, radius, start)
        for key, radius in zip(keys, radii)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    loops = program.loops_well(jax.make_jaxpr(_input_gradient)(model, x[:1]))
    plan = Plan(family, ball, loops)
    last = _carry(plan, data, stacked, callback, checkpoint, every)
    return [
        Fitted(
            family=family,
            ball=ball,
            eps=state.eps,
            params=state.params,
            stats=state.stats,
            history=state.history,
            features=features,
            offset=offset,
            model=model if offset is not None else None,
        )
        for state in (jax.tree.map(lambda leaf, i=i: leaf[i], last) for i in range(len(states)))
    ]


def as_rows(features: Array) -> Array:
    """``[n, F]``, flattened."""
    return features.reshape(len(features), -1)


@jax.jit
def _logits(model: Classifier, x: Array) -> Array:
    return model(x)


def _input_gradient(model: Classifier, x: Array) -> Array:
    return jax.grad(lambda x: jnp.sum(model(x)))(x)


def _begin(
    family: Family,
    key: Array,
    shape: tuple[int, ...],
    features: int,
    classes: int,
    steps: int,
    eps: float,
    start: Params | None,
) -> State:
    first, own = jax.random.split(key)
    params, stats = families.begin(family, first, shape, features, classes)
    if start is not None:
        params = families.replaced(params, start)
    empty = jnp.full(steps, jnp.nan)
    history = History(*(empty for _ in History._fields))
    radius = jnp.asarray(eps, jnp.float32)
    return State(params, stats, _ADAM.init(params), jnp.asarray(0), radius, own, history)


def _carry(
    plan: Plan,
    data: Data,
    stacked: State,
    callback: Callable[[State], Any] | None,
    checkpoint: str | PathLike[str] | None,
    every: float,
) -> State:
    steps = data.schedule.steps

    def turn(state: State) -> State:
        done = int(state.step[0])
        last = min(done + (_CHUNK if plan.loops else 1), steps)
        state = _advance(plan, data, state, done, last)
        if not bool(jnp.all(jnp.isfinite(state.history.loss[:, done:last]))):
            raise ValueError(
                f"the loss is not finite before step {last}: the model's logits are not, or the "
                "learning rate is too high."
            )
        return state

    identity = b""
    if checkpoint is not None:
        identity = loop.digest(loop.settings((plan, data.schedule, data.model)), data, stacked)
    return loop.carry(
        stacked,
        turn,
        lambda state: int(state.step[0]) >= steps,
        report=callback,
        checkpoint=checkpoint,
        every=every,
        identity=identity,
        about={"family": plan.family, "ball": plan.ball, "steps": steps},
    )


@functools.partial(jax.jit, static_argnums=0)
def _advance(plan: Plan, data: Data, state: State, first: Array, last: Array) -> State:
    """Steps ``first`` to ``last`` of every fit; if these do not loop well, one."""

    def all_fits(state: State) -> State:
        one = functools.partial(_step, plan, data)
        if len(state.step) == 1:
            alone = jax.tree.map(lambda leaf: leaf[0], state)
            return jax.tree.map(lambda leaf: leaf[None], one(alone))
        return jax.vmap(one)(state)

    if not plan.loops:
        return all_fits(state)
    return jax.lax.fori_loop(first, last, lambda _, state: all_fits(state), state)


def _step(plan: Plan, data: Data, state: State) -> State:
    rows, key = _batch(data, state)
    tau, temperatures = data.schedule.temperatures(state.step)
    batch = Data(
        data.model,
        data.x[rows],
        data.y[rows],
        None if data.features is None else data.features[rows],
        None if data.offset is None else data.offset[rows],
        data.schedule,
    )

    def value(params: Params) -> tuple[Array, tuple[Params, Array, Array]]:
        made, stats = families.mixture(
            plan.family,
            params,
            state.stats,
            batch.features,
            batch.y,
            batch.x.shape[1:],
            temperatures=temperatures,
            offset=batch.offset,
            of_batch=True,
        )
        draws = data.schedule.draws
        latent = mixtures.soft(key, made, len(rows), draws, tau)
        logits = _moved(plan, params, latent, batch, state.eps)
        own = jnp.repeat(batch.y, draws)
        loss = -losses.softplus_margin(logits, own, data.schedule.kappa)
        held = losses.decision_margin(logits, own) <= 0
        average = mixtures.entropy_ratio(jnp.mean(made.proportions, axis=0))
        each = jnp.mean(mixtures.entropy_ratio(made.proportions))
        return jnp.mean(loss), (stats, jnp.mean(held), jnp.stack([average, each]))

    (loss, (stats, held, entropy)), gradient = jax.value_and_grad(value, has_aux=True)(state.params)
    updates, opt_state = _ADAM.update(gradient, state.opt_state)
    rate = data.schedule.rate(state.step)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    seen = (loss, held, entropy[0], entropy[1], optax.tree.norm(gradient))
    history = History(*(past.at[state.step].set(now) for past, now in zip(state.history, seen)))
    return State(params, stats, opt_state, state.step + 1, state.eps, state.key, history)


def _batch(data: Data, state: State) -> tuple[Array, Array]:
    """The rows of a step, each once an epoch, and its key."""
    size = min(data.schedule.batch, len(data.y))
    turns = len(data.y) // size
    order_key, draw_key = jax.random.split(state.key)
    order = jax.random.permutation(
        jax.random.fold_in(order_key, state.step // turns), len(data.y)
    )
    rows = jax.lax.dynamic_slice(order, (state.step % turns * size,), (size,))
    return rows, jax.random.fold_in(draw_key, state.step)


def _moved(plan: Plan, params: Params, latent: Array, batch: Data, eps: Array) -> Array:
    """Logits ``[B M, K]`` of the inputs moved."""
    shape = batch.x.shape[1:]
    matrix = families.to_input(plan.family, params, shape)
    rows = latent.reshape(-1, latent.shape[-1])
    v = rows if matrix is None else rows @ matrix
    delta = up.into_ball(v, eps, plan.ball.norm).reshape(*latent.shape[:2], *shape)
    points = batch.x[:, None] + delta
    if plan.ball.box is not None:
        points = jnp.clip(points, *plan.ball.box)
    return batch.model(points.reshape(-1, *shape))
