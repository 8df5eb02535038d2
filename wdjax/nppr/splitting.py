"""Multilevel splitting: a small probability as a product of larger ones."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Classifier
from wdjax.nppr import distributions
from wdjax.nppr.rare import Rare, RareEvent, ask

_ACCEPTED = 0.3
"""Share of accepted moves that the pilot's step size aims at."""
KEPT = 8
"""Particles of a run from which other searches may begin."""


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
    r"""Multilevel splitting: ``P(margin > 0)`` as a product of larger probabilities.

    A pilot finds levels of the margin and step sizes, and has no part in the estimates. In a run,
    particles above a level stay and are copied, and all are moved by preconditioned Crank-Nicolson
    steps that keep the normal distribution above that level. Since levels and steps do not depend
    on the run, the product of its shares is an unbiased estimate for any number of particles and
    moves. Knows no gradient.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      perturbation: of :mod:`wdjax.nppr.distributions`, linf.
      x: ``[*shape]``, one input, classified correctly.
      y: its label.
      key: a typed ``jax.random.key``.
      particles: N, of the pilot and of every run.
      keep: share of the pilot's particles that is above the next level.
      moves: steps at a level.
      runs: independent repeats.
      least: the probability below which the pilot gives up.
      batch_size: points on the device at once.

    Returns:
      A :class:`Rare`; ``found`` is False where a run ends without a failure, as it does where
      levels stopped rising or fell below ``least``.

    Raises:
      ValueError: a bad or misclassified input, settings that are out of range, a trace.

    Cost: ``(runs + 1) particles (1 + moves levels)`` forward passes with ``log p / log keep``
      levels. The relative variance of a run is ``levels (1 - keep) / (keep particles)`` where moves
      forget; so many half-steps and few moves are better than few levels and many moves.

    Differs: levels that a run chooses for itself are biased by ``levels (1 - keep) / (keep
      particles)``. The adaptive estimators without bias [brehier2016] want paths, or copies that
      are independent of their originals, which short chains of moves are not.

    Source: Webb et al. [webb2019]; Cérou et al. [cerou2012] for fixed levels.

    >>> from wdjax import Lp, Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [0.0, 0.0]]))
    >>> own, x = distributions.UniformBall(0.5, Lp(box=None)), jnp.array([0.4999, 0.5])
    >>> found = splitting(model, own, x, 0, key=jax.random.key(0), particles=300)
    >>> 0.5 < found.value * 1e4 < 2  # Exactly 1e-4.
    True
    """
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
    """The answer, and where some particles of every run ended: ``[R, KEPT, d]``."""
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
    """What a pilot found: of every level, where it lies and how far to move above it."""

    level: Array
    """``[L]``, of which the first ``used`` count."""
    step: Array
    used: Array


class Cloud(NamedTuple):
    """Particles on their way."""

    u: Array
    """``[N, d]``"""
    score: Array
    """``[N]``"""
    log: Array
    """Of the product of the shares that were above the levels so far."""
    level: Array
    """Levels so far."""
    faults: Array


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _ascent(
    count: int, stay: int, moves: int, question: RareEvent, ladder: Ladder, pilot: Array, key: Array
) -> tuple[Cloud, Ladder]:
    """A run up a ladder until its end or until it dies out; or a pilot, which builds one.

    One program for both, since its compilation is what small models wait for. The pilot's levels
    have ``stay`` particles above each, until these are failures, rise no more or fill the ladder.
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
        at, own = cloud.level, jax.random.fold_in(key, cloud.level)
        level = jnp.where(pilot, jnp.sort(cloud.score)[count - stay - 1], ladder.level[at])
        step = jnp.where(pilot, step, ladder.step[at])
        cloud, step = _climbed(question, moves, cloud, level, step, pilot, own)
        levels, steps = built.level.at[at].set(level), built.step.at[at].set(step)
        return cloud, step, Ladder(levels, steps, cloud.level)

    cloud, _, built = jax.lax.while_loop(unfinished, climb, (begun, jnp.asarray(0.5), ladder))
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
    """The particles above a level in equal numbers, in random order, moved above it.

    A pilot's step size follows the acceptance, and is returned; a run's stays.
    """
    pick, move = jax.random.split(key)
    above = cloud.score > level
    left, random = jnp.sum(above), jax.random.uniform(pick, above.shape)
    order = jnp.argsort(jnp.where(above, random, 2.0))
    chosen = order[jnp.arange(len(above)) % jnp.maximum(left, 1)]

    def one(carried: tuple[Array, ...], own: Array) -> tuple[tuple[Array, ...], None]:
        u, score, step, faults = carried
        proposed = jnp.sqrt(1 - step**2) * u + step * jax.random.normal(own, u.shape)
        value, fault = question.score(proposed)
        better = value > level
        u, score = jnp.where(better[:, None], proposed, u), jnp.where(better, value, score)
        next_step = jnp.clip(step * jnp.exp(jnp.mean(better) - _ACCEPTED), 0.01, 0.999)
        step = jnp.where(pilot, next_step, step)
        return (u, score, step, faults + jnp.sum(fault, dtype=jnp.int32)), None

    begun: tuple[Array, ...] = cloud.u[chosen], cloud.score[chosen], step, cloud.faults
    (u, score, step, faults), _ = jax.lax.scan(one, begun, jax.random.split(move, moves))
    log = cloud.log + jnp.log(left / len(above))
    return Cloud(u, score, log, cloud.level + 1, faults), step
