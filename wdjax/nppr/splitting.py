"""Multilevel splitting: a small probability as a product of conditional ones."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import distinct, loops
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, Classifier
from wdjax.nppr import distributions
from wdjax.nppr.counting import TWIN
from wdjax.nppr.rare import Rare, RareEvent, ask
from wdjax.precision import full_precision

_ACCEPTED = 0.3
"""The acceptance rate at which the pilot's step size aims."""
KEPT = 8
"""Number of a run's final particles that are returned, as starts of other searches."""


@full_precision
def splitting(
    model: Classifier,
    perturbation: distributions.Fixed,
    x: AnyArray,
    y: AnyArray | int,
    *,
    key: Array,
    particles: int = 1000,
    keep: float = 0.5,
    moves: int = 5,
    runs: int = 10,
    least: float = 1e-12,
    batch_size: int | None = None,
) -> Rare:
    r"""Multilevel splitting: ``P(margin > 0)`` as a product of conditional probabilities.

    A pilot run finds levels of the margin and step sizes; it does not enter the estimate. In a run,
    particles above a level are copied, and all are moved by preconditioned Crank-Nicolson steps,
    which leave the normal distribution above that level invariant. Since levels and steps do not
    depend on the run, the product of the shares above the levels is unbiased for any number of
    particles and moves. Uses no gradients.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      perturbation: of :mod:`wdjax.nppr.distributions`, linf.
      x: ``[*shape]``, one input, classified correctly.
      y: its label.
      key: a typed ``jax.random.key``.
      particles: N, in the pilot and in every run.
      keep: share of the pilot's particles above the next level.
      moves: Crank-Nicolson steps at a level.
      runs: independent repetitions.
      least: probability below which the pilot stops.
      batch_size: points on the device at once.

    Returns:
      A :class:`Rare`; ``found`` is False if a run ends without a failure, which happens if levels
      stop rising or fall below ``least``.

    Raises:
      ValueError: a bad or misclassified input, settings that are out of range, a trace.

    Cost: ``(runs + 1) particles (1 + moves levels)`` forward passes with ``log p / log keep``
      levels. The relative variance of a run is ``levels (1 - keep) / (keep particles)`` if moves
      mix well; many levels with few moves are better than few levels with many moves.

    Differs: levels chosen by the run itself have a bias of ``levels (1 - keep) / (keep
      particles)``. Unbiased adaptive estimators [brehier2016] need whole paths, or copies that are
      independent of their originals, which short chains are not.

    Source: Webb et al. [webb2019]; Cérou et al. [cerou2012] for fixed levels.

    >>> from wdjax import Lp, Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [0.0, 0.0]]))
    >>> own, x = distributions.UniformBall(0.5, Lp(box=None)), jnp.array([0.4999, 0.5])
    >>> found = splitting(model, own, x, 0, key=jax.random.key(0), particles=300)
    >>> 0.5 < found.value * 1e4 < 2  # Exactly 1e-4.
    True
    """
    host_only("nppr.splitting", TWIN, model, perturbation, x, y, key)
    arguments.check(perturbation=perturbation, model=model, x=[x], y=[y], key=key)
    question = ask(model, perturbation, x, y, key, batch_size)
    return explored(question, key, particles, keep, moves, runs, least)[0]


def explored(
    question: RareEvent,
    key: Array,
    particles: int,
    keep: float = 0.5,
    moves: int = 5,
    runs: int = 10,
    least: float = 1e-12,
) -> tuple[Rare, Array]:
    """The estimate, and ``KEPT`` final particles of every run: ``[R, KEPT, d]``.

    ``least`` bounds the number of levels; the other arguments are those of :func:`splitting`.
    """
    count = validate.check_count("particles", particles, 10)
    repeats = validate.check_count("runs", runs, 2)
    steps = validate.check_count("moves", moves)
    if not 0 < validate.check_number("least", least) < 1:
        raise ValueError(f"least must be a probability above 0, got {least!r}.")
    if not 1 / count <= keep < 1:
        raise ValueError(f"keep must be a share between 1 / particles and 1, got {keep!r}.")
    stay, levels = max(1, int(keep * count)), math.ceil(math.log(least) / math.log(keep))
    empty = Ladder(jnp.zeros(levels), jnp.zeros(levels), jnp.zeros((), jnp.int32))
    first, *keys = jax.random.split(key, repeats + 1)
    _, ladder = _ascent(count, stay, steps, question, empty, True, first)
    ends = []
    for one in keys:
        cloud, _ = _ascent(count, stay, steps, question, ladder, False, one)
        ends.append(cloud._replace(u=cloud.u[:KEPT]))
    log, score, taken, faults = (
        np.array([getattr(end, name) for end in ends])
        for name in ("log", "score", "level", "faults")
    )
    share = np.where(np.isfinite(log), np.mean(score > 0, axis=1), 0.0)
    used = count * (1 + steps * np.append(int(ladder.used), taken))
    return Rare(
        np.exp(log.astype(float)) * share,
        int(used[1:].sum()),
        int(used[0]),
        int(faults.sum()),
        bool(np.all(share > 0)),
    ), jnp.stack([end.u for end in ends])


class Ladder(NamedTuple):
    """The result of the pilot: the levels, and the step size above each."""

    level: Array
    """``[L]``, of which the first ``used`` are valid; likewise ``step``."""
    step: Array
    used: Array


class Cloud(NamedTuple):
    """The particles of a run."""

    u: Array
    """``[N, d]``, normal vectors."""
    score: Array
    """``[N]``, margins, positive at failures."""
    log: Array
    """Logarithm of the product of the shares above the levels so far."""
    level: Array
    """Number of levels passed."""
    faults: Array


@functools.partial(distinct.jit, static_argnums=(0, 1, 2))
def _ascent(
    count: int, stay: int, moves: int, question: RareEvent, ladder: Ladder, pilot: Array, key: Array
) -> tuple[Cloud, Ladder]:
    """One run of multilevel splitting, or the preliminary run (pilot) that finds the levels.

    Both are one program, to save a compilation; particles are ``[count, d]``. The pilot's next
    level has ``stay`` particles above it; it ends when these are failures, levels stop rising or
    the ladder is full.
    """
    first, key = jax.random.split(key)
    u = jax.random.normal(first, (count, question.size))
    score, fault = question.score(u)
    none = jnp.zeros((), jnp.int32)
    begun = Cloud(u, score, jnp.zeros(()), none, jnp.sum(fault, dtype=jnp.int32))

    def unfinished(carried: tuple[Cloud, Array, Ladder]) -> Array:
        cloud, _, built = carried
        ranked = jnp.sort(cloud.score)
        rising = ranked[-1] > ranked[count - stay - 1]
        on = (ranked[count - stay] <= 0) & (cloud.level < len(built.level)) & rising
        return jnp.where(pilot, on, (cloud.level < ladder.used) & jnp.isfinite(cloud.log))

    def climb(carried: tuple[Cloud, Array, Ladder]) -> tuple[Cloud, Array, Ladder]:
        cloud, step, built = carried
        at, level_key = cloud.level, jax.random.fold_in(key, cloud.level)
        level = jnp.where(pilot, jnp.sort(cloud.score)[count - stay - 1], ladder.level[at])
        step = jnp.where(pilot, step, ladder.step[at])
        cloud, step = _climbed(question, moves, cloud, level, step, pilot, level_key)
        levels, steps = built.level.at[at].set(level), built.step.at[at].set(step)
        return cloud, step, Ladder(levels, steps, cloud.level)

    cloud, _, built = loops.while_loop(unfinished, climb, (begun, jnp.asarray(0.5), ladder))
    return cloud, built


def _climbed(
    question: RareEvent,
    moves: int,
    cloud: Cloud,
    level: Array,
    step: Array,
    pilot: Array,
    key: Array,
) -> tuple[Cloud, Array]:
    """Passes one level: resamples the particles above it, and moves each at random, staying above.

    ``cloud`` holds particles ``[N, d]`` and their margins ``[N]``. A pilot adapts its step size to
    the acceptance rate and returns it; a run keeps the pilot's.
    """
    pick, move = jax.random.split(key)
    above = cloud.score > level
    left, random = jnp.sum(above), jax.random.uniform(pick, above.shape)
    order = jnp.argsort(jnp.where(above, random, 2.0))
    chosen = order[jnp.arange(len(above)) % jnp.maximum(left, 1)]

    def one(carried: tuple[Array, ...], step_key: Array) -> tuple[tuple[Array, ...], None]:
        u, score, step, faults = carried
        proposed = jnp.sqrt(1 - step**2) * u + step * jax.random.normal(step_key, u.shape)
        value, fault = question.score(proposed)
        better = value > level
        u, score = jnp.where(better[:, None], proposed, u), jnp.where(better, value, score)
        next_step = jnp.clip(step * jnp.exp(jnp.mean(better) - _ACCEPTED), 0.01, 0.999)
        step = jnp.where(pilot, next_step, step)
        return (u, score, step, faults + jnp.sum(fault, dtype=jnp.int32)), None

    begun: tuple[Array, ...] = cloud.u[chosen], cloud.score[chosen], step, cloud.faults
    (u, score, step, faults), _ = loops.scan(one, begun, jax.random.split(move, moves))
    log = cloud.log + jnp.log(left / len(above))
    return Cloud(u, score, log, cloud.level + 1, faults), step
