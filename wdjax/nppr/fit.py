r"""Fits the worst distribution of a family."""

import functools
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from wdjax import identity, losses, models, parallel, program
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, Classifier
from wdjax.engine import loop
from wdjax.nppr import objective
from wdjax.nppr.counting import TWIN, outputs
from wdjax.nppr.family import Family, Params
from wdjax.nppr.fit_schedule import Schedule
from wdjax.nppr.fitted import FitHistory, Fitted
from wdjax.precision import full_precision

_CHUNK = 25
"""Maximum number of steps in one program."""


@full_precision
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
    callback: Callable[[objective.State], Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
    mesh: Mesh | None = None,
) -> Fitted:
    r"""NPPR's distribution: the one of a family under which the model is wrong most often.

    Minimises by Adam the schedule's loss of ``z_y - max_{j != y} z_j`` over samples of the mixtures
    of the correctly classified inputs, through Gumbel-softmax samples, up-sampling and the map into
    the ball. The result is an upper bound on the infimum over the family.

    Args:
      model: a pytree callable, ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` in the ball's box. Misclassified samples are left out.
      y: ``[n]`` labels.
      eps: radius, in units of ``x``.
      key: a typed ``jax.random.key``.
      family: the family of distributions.
      schedule: steps, learning rate, temperatures.
      ball: norm and box.
      features: ``[n, *shape] -> [n, F]``, a pytree callable; by default the penultimate layer of a
        model of this package.
      offset: shifts the means of every input, see :func:`wdjax.nppr.AttackOffset`.
      start: initial parameters in place of random ones, see :func:`wdjax.nppr.universal_start`.
      callback: called with the stacked states every 25 steps; if it returns a true value the fit
        ends.
      checkpoint: a folder to save to and to resume from, see :func:`wdjax.engine.loop.carry`.
      every: minimum number of seconds between two writings.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; the inputs of a batch are split over it.

    Returns:
      A :class:`~wdjax.nppr.Fitted`.

    Raises:
      ValueError: bad samples or settings, no correctly classified sample, batches that do not
        divide over the mesh, a loss that is not finite, or a checkpoint of another fit.

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
    arguments.check(model=model, x=x, y=y, eps=eps, key=key, ball=ball)
    radius = validate.check_number("eps", eps)
    saving = {"report": callback, "checkpoint": checkpoint, "every": every}
    how = _Options(family, schedule, ball, features, offset, mesh)
    return _fit(model, x, y, [radius], key[None], how, start or {}, saving)[0]


@full_precision
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
    callback: Callable[[objective.State], Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
    mesh: Mesh | None = None,
) -> list[Fitted]:
    """Many fits in one program, in parallel by ``vmap``: several seeds, radii or both.

    Args:
      model, x, y, family, schedule, ball, features, offset, callback, every, mesh: as in
        :func:`fit`.
      eps: one radius for all keys, or one for each.
      keys: ``[S]`` typed keys.
      checkpoint: a folder for all fits together.

    Returns:
      S :class:`~wdjax.nppr.Fitted`, one for each key.

    Raises:
      ValueError: as :func:`fit`.

    Cost: S times that of one.

    Source: Wang et al. [wang2025].

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4]]), jnp.array([0])
    >>> own = Family(mode="independent", components=2, upsample="none")
    >>> keys = jax.random.split(jax.random.key(0), 2)
    >>> found = fit_many(model, x, y, eps=[0.01, 0.2], keys=keys, family=own)
    >>> [round(float(one.history.survived[-1]), 1) for one in found]
    [1.0, 0.0]
    """
    arguments.check(model=model, x=x, y=y, eps=eps, keys=keys, ball=ball)
    radii = np.broadcast_to(np.asarray(eps, float), (len(keys),))
    for radius in radii:
        validate.check_number("eps", radius)
    saving = {"report": callback, "checkpoint": checkpoint, "every": every}
    how = _Options(family, schedule, ball, features, offset, mesh)
    return _fit(model, x, y, [*radii], keys, how, {}, saving)


class _Options(NamedTuple):
    """The settings of a fit, as in :func:`fit`."""

    family: Family
    schedule: Schedule
    ball: Lp
    features: Classifier | None
    offset: Callable[..., Array] | None
    mesh: Mesh | None


def _fit(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    radii: list[float],
    keys: Array,
    how: _Options,
    start: Params,
    saving: dict[str, Any],
) -> list[Fitted]:
    """Checks the samples ``[n, *shape]``, prepares what all S fits share, and runs them together.

    ``radii`` and ``keys`` have length S; ``start`` replaces initial parameters by name; ``saving``
    are arguments of :func:`wdjax.engine.loop.carry`.
    """
    twin = f"nppr.fit_many for many radii and keys at once, or {TWIN}"
    host_only("a fit", twin, model, x, y, keys, radii)
    x, y = validate.check_samples(model, x, y, how.ball.box)
    if how.family.sees_input and how.features is None:
        how = how._replace(features=models.features(model))  # type: ignore[arg-type]
    data, classes = _data(model, x, y, how)
    stacked = objective.first_fit_states(
        how.family,
        data.x.shape[1:],
        0 if data.features is None else data.features.shape[1],
        classes,
        data.schedule.steps,
        keys,
        jnp.asarray(np.asarray(radii), jnp.float32),
        start,
    )
    gradient = functools.partial(_input_gradient, model)
    loops = program.loops_well(jax.make_jaxpr(gradient)(data.x[:1]))
    size = min(data.schedule.batch, len(data.y))
    fewer = size < data.schedule.batch
    what = "the number of correctly classified inputs" if fewer else "the schedule's batch"
    parallel.check_divides(f"{what} (a batch of the fit)", size, how.mesh)
    plan = objective.FitProgram(how.family, how.ball, loops, how.mesh)
    data, stacked = parallel.replicate((data, stacked), how.mesh)
    last = _carry(plan, data, stacked, saving)
    kept = jax.device_get((last.eps, last.params, last.stats, last.history))
    each = (jax.tree.map(lambda leaf, i=i: jnp.asarray(leaf[i]), kept) for i in range(len(keys)))
    labels = jnp.bincount(data.y, length=classes)
    return [_fitted(model, how, labels, *one) for one in each]


def _data(model: Classifier, x: Array, y: Array, how: _Options) -> tuple[objective.Data, int]:
    """What all fits share, of the correctly classified samples only; and the number of classes."""
    logits = outputs(model, x)
    margins = np.asarray(losses.decision_margin(logits, y))
    if not np.all(np.isfinite(margins)):
        raise ValueError("the model's logits are not finite for a sample as it is.")
    right = margins <= 0
    if not right.any():
        raise ValueError("no sample is classified correctly: nothing is left to be robust.")
    x, y = x[right], y[right]
    seen = moved = None
    if how.family.sees_input:
        assert how.features is not None
        seen = objective.as_rows(outputs(how.features, x))
    if how.offset is not None:
        moved = objective.as_rows(how.offset(model, x, y))
    # If all margins are 0, any width will do.
    settled = how.schedule.settled(how.family, float(np.median(-margins[right])) or 1.0)
    return objective.Data(model, x, y, seen, moved, settled), logits.shape[1]


def _fitted(
    model: Classifier,
    how: _Options,
    labels: Array,
    eps: Array,
    params: Params,
    stats: Params,
    history: FitHistory,
) -> Fitted:
    """One fit's result, of the number of samples of each label and the last state's leaves."""
    return Fitted(
        family=how.family,
        ball=how.ball,
        eps=eps,
        params=params,
        stats=stats,
        history=history,
        features=how.features if how.family.sees_input else None,
        offset=how.offset,
        model=None if how.offset is None else model,
        labels=labels,
    )


def _input_gradient(model: Classifier, x: Array) -> Array:
    """The gradient of the sum of all logits; its program shows whether loops are fast."""
    return jax.grad(lambda x: jnp.sum(model(x)))(x)


def _carry(
    plan: objective.FitProgram,
    data: objective.Data,
    stacked: objective.State,
    saving: dict[str, Any],
) -> objective.State:
    """Runs S stacked fits, ``[S, ...]`` leaves, to their last step.

    Takes up to ``_CHUNK`` steps in one program if the model is fast inside a loop, else one. Raises
    a ValueError if a loss is not finite.
    """
    steps = data.schedule.steps

    def turn(state: objective.State) -> objective.State:
        done = int(state.step[0])
        last = min(done + (_CHUNK if plan.loops else 1), steps)
        state = objective.advance(plan, data, state, done, last)
        if not bool(jnp.all(jnp.isfinite(state.history.loss[:, done:last]))):
            raise ValueError(
                f"the loss is not finite before step {last}: the model's logits are not, or the "
                "learning rate is too high."
            )
        return state

    mark = b""
    if saving["checkpoint"] is not None:
        of_steps = functools.partial(objective.advance, plan)
        traced = identity.program(of_steps, data, stacked, 0, 1)
        mark = identity.digest(traced, data, stacked)
    return loop.carry(
        stacked,
        turn,
        lambda state: int(state.step[0]) >= steps,
        identity=mark,
        mesh=plan.mesh,
        **saving,
        about={"family": plan.family, "ball": plan.ball, "steps": steps},
    )
