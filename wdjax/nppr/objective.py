r"""The objective of a fit, and one step of it as a pure function of a state."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from wdjax import distinct, loops, losses, parallel
from wdjax.balls import Lp
from wdjax.core import Array, Classifier
from wdjax.nppr import family as families
from wdjax.nppr import mixture as mixtures
from wdjax.nppr import upsample as up
from wdjax.nppr.family import Family, Params
from wdjax.nppr.fit_schedule import Schedule
from wdjax.nppr.fitted import FitHistory
from wdjax.precision import promoted

_ADAM = optax.scale_by_adam()


def as_rows(features: Array) -> Array:
    """``[n, F]``, flattened."""
    return features.reshape(len(features), -1)


class Data(NamedTuple):
    """What all fits share."""

    model: Classifier
    x: Array
    """``[n, *shape]``"""
    y: Array
    """``[n]``"""
    features: Array | None
    """``[n, F]`` of the unperturbed samples, computed once."""
    offset: Array | None
    """``[n, d]``, the shift of the means in the input's space."""
    schedule: Schedule


class State(NamedTuple):
    """The state of a fit, a pytree; stacked by :func:`first_fit_states` and :func:`advance`."""

    params: Params
    stats: Params
    opt_state: Any
    step: Array
    eps: Array
    key: Array
    history: FitHistory


class FitProgram(NamedTuple):
    """Static settings."""

    family: Family
    ball: Lp
    loops: bool
    """Whether the model is as fast inside a loop, see :func:`wdjax.program.loops_well`."""
    mesh: Mesh | None = None
    """Over which the inputs of a batch are split."""


@functools.partial(distinct.jit, static_argnums=(0, 1, 2, 3, 4))
def first_fit_states(
    family: Family,
    shape: tuple[int, ...],
    features: int,
    classes: int,
    steps: int,
    keys: Array,
    radii: Array,
    start: Params,
) -> State:
    """Initial states of the fits, stacked: one for each key."""

    def one(key: Array, eps: Array) -> State:
        first, rest = jax.random.split(key)
        params, stats = families.first_params(family, first, shape, features, classes)
        params = families.replaced(params, start)
        empty = jnp.full(steps, jnp.nan)
        history = FitHistory(*(empty for _ in FitHistory._fields))
        return State(params, stats, _ADAM.init(params), jnp.asarray(0), eps, rest, history)

    return jax.vmap(one)(keys, radii)


@functools.partial(distinct.jit, static_argnums=0)
def advance(plan: FitProgram, data: Data, state: State, first: Array, last: Array) -> State:
    """Steps ``first`` to ``last`` of every fit; a single step if the model loops slowly."""

    def all_fits(state: State) -> State:
        one = functools.partial(step, plan, data)
        if len(state.step) == 1:
            alone = jax.tree.map(lambda leaf: leaf[0], state)
            return jax.tree.map(lambda leaf: leaf[None], one(alone))
        return jax.vmap(one)(state)

    if not plan.loops:
        return all_fits(state)
    return loops.fori_loop(first, last, lambda _, state: all_fits(state), state)


@promoted()
def step(plan: FitProgram, data: Data, state: State) -> State:
    """One step of one fit, on a batch of the data."""
    rows, key = _batch(data, state)
    given = data.x, data.y, data.features, data.offset
    x, y, seen, offset = parallel.shard(jax.tree.map(lambda t: t[rows], given), plan.mesh)
    batch = data._replace(x=x, y=y, features=seen, offset=offset)
    value = functools.partial(_value, plan, batch, state, key)
    (loss, (stats, held, entropy)), gradient = jax.value_and_grad(value, has_aux=True)(state.params)
    updates, opt_state = _ADAM.update(gradient, state.opt_state)
    rate = data.schedule.rate(state.step)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    seen = (loss, held, entropy[0], entropy[1], optax.tree.norm(gradient))
    history = FitHistory(*(past.at[state.step].set(now) for past, now in zip(state.history, seen)))
    return State(params, stats, opt_state, state.step + 1, state.eps, state.key, history)


def _value(
    plan: FitProgram, batch: Data, state: State, key: Array, params: Params
) -> tuple[Array, tuple[Params, Array, Array]]:
    """The mean loss over ``draws`` soft samples of each of B inputs.

    Also new running averages, the share of survivors, and ``[2]`` entropy ratios.
    """
    schedule = batch.schedule
    tau, temperatures = schedule.temperatures(state.step)
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
    latent = mixtures.soft(key, made, len(batch.y), schedule.draws, tau)
    logits = _moved(plan, params, latent, batch, state.eps)
    labels = jnp.repeat(batch.y, schedule.draws)
    loss = _loss(schedule, logits, labels)
    held = losses.decision_margin(logits, labels) <= 0
    average = mixtures.entropy_ratio(jnp.mean(made.proportions, axis=0))
    each = jnp.mean(mixtures.entropy_ratio(made.proportions))
    return jnp.mean(loss), (stats, jnp.mean(held), jnp.stack([average, each]))


def _loss(schedule: Schedule, logits: Array, y: Array) -> Array:
    """``[n]``: the loss that a fit minimises; it is low where the model is wrong."""
    if schedule.loss == "softplus":
        return -losses.softplus_margin(logits, y, schedule.kappa)
    return jax.nn.sigmoid(-losses.margin(logits, y) / schedule.width)


def _batch(data: Data, state: State) -> tuple[Array, Array]:
    """The row numbers ``[B]`` of a step's batch, and the step's key for samples.

    Rows come from the epoch's random permutation, so that no row occurs twice in an epoch.
    """
    size = min(data.schedule.batch, len(data.y))
    turns = len(data.y) // size
    order_key, draw_key = jax.random.split(state.key)
    order = jax.random.permutation(jax.random.fold_in(order_key, state.step // turns), len(data.y))
    rows = jax.lax.dynamic_slice(order, (state.step % turns * size,), (size,))
    return rows, jax.random.fold_in(draw_key, state.step)


def _moved(plan: FitProgram, params: Params, latent: Array, batch: Data, eps: Array) -> Array:
    """``[B M, K]``: the logits of perturbed inputs of latent vectors ``[B, M, L]``.

    ``eps`` is the ball's radius; points are clipped to the box.
    """
    shape = batch.x.shape[1:]
    matrix = families.to_input(plan.family, params, shape)
    rows = latent.reshape(-1, latent.shape[-1])
    v = rows if matrix is None else rows @ matrix
    delta = up.into_ball(v, eps, plan.ball.norm).reshape(*latent.shape[:2], *shape)
    points = batch.x[:, None] + delta
    if plan.ball.box is not None:
        points = jnp.clip(points, *plan.ball.box)
    return batch.model(points.reshape(-1, *shape))
