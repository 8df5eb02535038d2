"""Adaptive multilevel splitting: a small probability as a product of larger ones."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import arguments, validate
from wdjax.core import AnyArray, Array
from wdjax.nppr import noise
from wdjax.nppr.counting import Classifier
from wdjax.nppr.rare import Question, Rare, ask

_ACCEPTED = 0.3
"""Share of accepted moves that the step size aims at."""


def splitting(
    model: Classifier,
    perturbation: noise.Fixed,
    x: AnyArray,
    y: AnyArray | int,
    *,
    key: Array,
    particles: int = 1000,
    keep: float = 0.1,
    moves: int = 10,
    runs: int = 10,
    least: float = 1e-12,
) -> Rare:
    r"""Adaptive multilevel splitting: ``P(margin > 0)`` as a product of larger probabilities.

    The particles with the largest margins stay, are copied, and moved by preconditioned
    Crank-Nicolson steps that keep the normal distribution and the level; and again, until the level
    is a failure. Knows no gradient.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      perturbation: of :mod:`wdjax.nppr.noise`, linf.
      x: ``[*shape]``, one input, classified correctly.
      y: its label.
      key: a typed ``jax.random.key``.
      particles: N.
      keep: share that stays at a level.
      moves: steps at a level.
      runs: independent repeats.
      least: the probability below which a run gives up.

    Returns:
      A :class:`Rare`; ``found`` is False where levels stopped rising or fell below ``least``.

    Raises:
      ValueError: a bad or misclassified input, settings that are out of range.

    Cost: ``runs particles (1 + moves levels)`` forward passes with ``log p / log keep`` levels.

    Source: Webb et al. [webb2019].

    >>> from wdjax import Lp, Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [0.0, 0.0]]))
    >>> own, x = noise.Uniform(0.5, Lp(box=None)), jnp.array([0.4999, 0.5])
    >>> found = splitting(model, own, x, 0, key=jax.random.key(0), particles=300)
    >>> 0.5 < found.value * 1e4 < 2  # Exactly 1e-4.
    True
    """
    arguments.check(perturbation=perturbation, model=model, x=[x], y=[y], key=key)
    question, size = ask(model, perturbation, x, y)
    count = validate.check_count("particles", particles, 10)
    repeats = validate.check_count("runs", runs, 2)
    steps = validate.check_count("moves", moves)
    if not 0 < validate.check_number("least", least) < 1:
        raise ValueError(f"least must be a probability above 0, got {least!r}.")
    if not 1 / count <= keep < 1:
        raise ValueError(f"keep must be a share between 1 / particles and 1, got {keep!r}.")
    levels = math.ceil(math.log(least) / math.log(keep))
    sizes = count, size, max(1, int(keep * count)), steps, levels
    keys = jax.random.split(key, repeats)
    seen = [_split(*sizes, question, one) for one in keys]
    value, used, faults, reached = (np.array(column) for column in zip(*jax.device_get(seen)))
    return Rare(value.astype(float), int(used.sum()), 0, int(faults.sum()), bool(reached.all()))


class Cloud(NamedTuple):
    """Particles on their way."""

    u: Array
    score: Array
    log: Array
    """Of the probability of the levels that were reached."""
    step: Array
    level: Array
    faults: Array
    rising: Array
    """Whether the last moves found a larger margin than the level's."""


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _split(
    count: int, size: int, stay: int, moves: int, levels: int, question: Question, key: Array
) -> tuple[Array, Array, Array, Array]:
    """``(probability, evaluations, faults, reached)`` of one run."""
    first, key = jax.random.split(key)
    u = jax.random.normal(first, (count, size))
    score, fault = question.score(u)
    zero = jnp.zeros((), jnp.int32)
    begun = Cloud(u, score, jnp.zeros(()), jnp.asarray(0.5), zero, jnp.sum(fault), jnp.array(True))

    def unfinished(cloud: Cloud) -> Array:
        return (_level(cloud.score, stay) < 0) & (cloud.level < levels) & cloud.rising

    def climb(cloud: Cloud) -> Cloud:
        return _climbed(question, stay, moves, cloud, jax.random.fold_in(key, cloud.level))

    last = jax.lax.while_loop(unfinished, climb, begun)
    share = jnp.mean(last.score > 0)
    return jnp.exp(last.log) * share, count * (1 + moves * last.level), last.faults, share > 0


def _level(score: Array, stay: int) -> Array:
    return jnp.minimum(jnp.sort(score)[len(score) - stay], 0.0)


def _climbed(question: Question, stay: int, moves: int, cloud: Cloud, key: Array) -> Cloud:
    """The best particles, copied, and moved above their level."""
    now = _level(cloud.score, stay)
    above = cloud.score >= now
    pick, move = jax.random.split(key)
    chosen = jax.random.categorical(pick, jnp.where(above, 0.0, -jnp.inf), shape=above.shape)

    def one(carried: tuple[Array, ...], own: Array) -> tuple[tuple[Array, ...], None]:
        u, score, step, faults = carried
        proposed = jnp.sqrt(1 - step**2) * u + step * jax.random.normal(own, u.shape)
        value, fault = question.score(proposed)
        better = value >= now
        u, score = jnp.where(better[:, None], proposed, u), jnp.where(better, value, score)
        step = jnp.clip(step * jnp.exp(jnp.mean(better) - _ACCEPTED), 0.01, 0.999)
        return (u, score, step, faults + jnp.sum(fault)), None

    begun: tuple[Array, ...] = cloud.u[chosen], cloud.score[chosen], cloud.step, cloud.faults
    (u, score, step, faults), _ = jax.lax.scan(one, begun, jax.random.split(move, moves))
    log = cloud.log + jnp.log(jnp.mean(above))
    return Cloud(u, score, log, step, cloud.level + 1, faults, jnp.max(score) > now)
