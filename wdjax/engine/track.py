"""A search as pure functions of a batch: begin, step, measure.

Inside a trace they are applied to all samples at once; at top level :mod:`wdjax.engine.rounds`
applies them to batches of unfinished samples.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from wdjax import norms
from wdjax.core import Array, Attack, Found, Info, PyTree, Samples, Stage, Victim
from wdjax.engine import identity


class Given(NamedTuple):
    """The arguments of a search: ``[n, ...]`` leaves."""

    x: Array
    y: Array
    eps: Array | None
    start: Array | None
    places: Array
    """``[n]``: the samples' numbers in a larger data set, from which random keys are derived."""


class Problem(NamedTuple):
    """The attack, its victim and the samples; constant during the search."""

    attack: Attack
    victim: Victim
    samples: Samples


class Track(NamedTuple):
    """The state of an attack in progress: ``[n, ...]`` leaves."""

    state: PyTree
    before: PyTree
    """The state one step ago if a stage detects cycles, else None."""
    totals: Array
    """``[n, 4]`` int32: gradients, forward passes, zero gradients and faulty steps so far."""


class Reached(NamedTuple):
    """The points of an attack so far: ``[n, ...]`` leaves."""

    x_adv: Array
    proof: PyTree
    cost: Array
    inside: Array
    """Whether the point is feasible: allowed by the ball and within the radius."""
    done: Array
    fault: Array


def evaluate(victim: Victim, x: Array, y: Array) -> tuple[PyTree, Array, Array]:
    """The model's output, the criterion ``[n]``, and whether both are finite, ``[n]``.

    Every attack uses this one program, so that equal points get equal criteria.
    """
    out = victim.model(x)
    value = victim.criterion(out, y)
    return out, value, norms.finite((out, value))


@jax.jit
def keys(key: Array, places: Array) -> Array:
    """One key for each sample from its global index, whatever batch the sample is in."""
    return jax.vmap(lambda place: jax.random.fold_in(key, place))(places)


def begin(problem: Problem, start: Array | None, keys: Array | None) -> Track:
    """Calculates the attack's first state."""
    attack, victim, samples = problem
    state = attack.init(victim, samples, start, keys)
    return enter(attack, Track(state, None, jnp.zeros((len(samples.y), 4), jnp.int32)))


def enter(attack: Attack, track: Track) -> Track:
    """Prepares the first step of a stage: resets the cycle detector."""
    if not cyclic(attack):
        return track
    return track._replace(before=jax.tree.map(jnp.copy, track.state))


def cyclic(attack: Attack) -> bool:
    """Whether a stage detects cycles."""
    return any(stage.cycles for stage in attack.stages)


def step(stage: Stage, victim: Victim, samples: Samples, track: Track) -> tuple[Track, Array, Info]:
    """One step; also tells, ``[n]``, for which samples the state is that of two steps ago."""
    state, info = stage.step(victim, samples, track.state)
    state = jax.tree.map(_as_before, state, track.state)
    spent = jnp.stack([info.gradients, info.forwards, info.zeros, info.fault], 1, dtype=jnp.int32)
    totals = track.totals + spent
    if not stage.cycles:
        return Track(state, track.before, totals), jnp.zeros(len(samples.y), bool), info
    return Track(state, track.state, totals), _equal(track.before, state), info


def _as_before(new: Array, old: Array) -> Array:
    """Casts back to the old dtype: a model of higher precision must not widen the state."""
    return new.astype(old.dtype) if jnp.issubdtype(old.dtype, jnp.floating) else new


def settle(stage: Stage, track: Track, recurs: Array, left: Array) -> tuple[Track, Array]:
    """Freezes samples that need no more steps of the stage: the track with final states, and who.

    ``recurs`` ``[n]`` marks samples in a cycle of two states. With ``left`` steps to go, such a
    sample ends in its present state if ``left`` is even, and in the one before if it is odd.
    """
    done = jnp.zeros_like(recurs) if stage.done is None else stage.done(track.state)
    if not stage.cycles:
        return track, done
    odd = recurs & ~done & (left % 2 == 1)

    def end(now: Array, before: Array) -> Array:
        return jnp.where(norms.spread(odd, now), before, now)

    return track._replace(state=jax.tree.map(end, track.state, track.before)), done | recurs


def reach(problem: Problem, track: Track) -> tuple[Reached, Array]:
    """The attack's points so far, and the points at which the model is evaluated, ``[n, *shape]``.

    Infeasible points are replaced by their samples in the latter.
    """
    attack, _, samples = problem
    x_adv, proof = attack.point(samples, track.state)
    cost = attack.ball.cost(samples.x, x_adv, proof)
    inside = jnp.isfinite(cost)
    if attack.budget == "sample":
        inside &= cost <= samples.radius * (1 + 1e-6)
    fault = (track.totals[:, 3] > 0) | ~norms.finite(x_adv)
    reached = Reached(x_adv, proof, cost, inside, attack.finished(track.state), fault)
    return reached, jnp.where(norms.spread(inside, x_adv), x_adv, samples.x)


def measure(
    xp: ModuleType,
    x: Any,
    reached: Reached,
    clean: Any,
    seen: tuple[Any, Any],
    attacked: Any,
    totals: Any,
    skip_misclassified: bool,
) -> Found:
    """Measures the points; those that are infeasible or useless are replaced by their samples.

    Args:
      xp: NumPy or ``jax.numpy``, whichever the arrays belong to.
      x: ``[n, *shape]`` samples.
      reached: from :func:`reach`.
      clean: ``[n]``, the criterion at the samples.
      seen: ``[n]`` each: the criterion at the points, and whether it and the outputs are finite.
      attacked: ``[n]`` booleans; the other samples are reported unmoved.
      totals: ``[n, 4]``, as in :class:`Track`.
      skip_misclassified: whether samples that are misclassified at the start stay unmoved.
    """
    (value, known), wrong = seen, clean > 0
    useful = ~wrong if skip_misclassified else ~wrong | (value > 0)
    moved = attacked & reached.inside & known & useful
    margin = xp.where(moved, value, clean)
    fault = attacked & (reached.fault | ~known)
    spent = xp.where(attacked[:, None], totals, 0)
    return Found(
        x_adv=xp.where(norms.spread(moved, x), reached.x_adv, x),
        proof=reached.proof,
        cost=xp.where(moved, reached.cost, 0.0),
        correct=~wrong,
        success=margin > 0,
        margin=margin,
        done=xp.where(attacked, reached.done & ~fault, wrong),
        fault=fault,
        zeros=spent[:, 2],
        gradients=spent[:, 0],
        forwards=spent[:, 1] + 1 + attacked.astype(spent.dtype),
    )


def programs(attack: Attack, victim: Victim, given: Given, key: Array | None) -> list[ClosedJaxpr]:
    """All programs of a search, traced for two samples: evaluation, start, stages, points.

    They identify the search in its checkpoint (:func:`wdjax.engine.identity.digest`).
    """
    x, y, eps, start, places = jax.tree.map(_two, given)
    own = None if key is None else jax.eval_shape(keys, key, places)
    out = jax.eval_shape(victim.model, x)
    problem = Problem(attack, victim, Samples(x, y, eps, out))
    track = jax.eval_shape(begin, problem, start, own)
    moving = jax.eval_shape(enter, attack, track)
    chosen = jax.ShapeDtypeStruct(y.shape, bool)
    traced = [
        identity.program(evaluate, victim, x, y),
        identity.program(begin, problem, start, own),
        identity.program(reach, problem, track),
    ]
    for stage in attack.stages:
        steps = functools.partial(step, stage), victim, problem.samples, moving
        traced.append(identity.program(*steps))
        if stage.done is not None:
            traced.append(identity.program(stage.done, track.state))
        if stage.couple is not None:
            coupled = stage.couple, problem.samples, track.state, chosen
            traced.append(identity.program(*coupled))
    return traced


def _two(rows: Array) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the array, with two rows."""
    return jax.ShapeDtypeStruct((2, *rows.shape[1:]), rows.dtype)


def _equal(one: PyTree, other: PyTree) -> Array:
    """``[n]``: whether all leaves of the two trees agree bit for bit."""
    both = zip(jax.tree.leaves(one), jax.tree.leaves(other))
    return ~norms.any_entry(_bits(a) != _bits(b) for a, b in both)


def _bits(leaf: Array) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
    return leaf
