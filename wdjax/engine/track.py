"""A search as pure functions of samples: begin, step by step, measure.

Inside a trace they act on all samples at once; at top level :mod:`wdjax.engine.rounds` applies them
to batches of those that still have something to do.
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
    """What a search is given: ``[n, ...]`` leaves."""

    x: Array
    y: Array
    eps: Array | None
    start: Array | None
    places: Array
    """Which samples of a larger set these are."""


class Problem(NamedTuple):
    """What is searched: a pytree that does not change on the way."""

    attack: Attack
    victim: Victim
    samples: Samples


class Track(NamedTuple):
    """What moves while samples are attacked: ``[n, ...]`` leaves."""

    state: PyTree
    before: PyTree
    """The state of a step ago, where a stage looks for cycles; None if no stage does."""
    totals: Array
    """``[n, 4]`` int32: gradients, forward passes, zero gradients and faulty steps so far."""


class Reached(NamedTuple):
    """Where an attack has come to: ``[n, ...]`` leaves."""

    x_adv: Array
    proof: PyTree
    cost: Array
    inside: Array
    """Whether the point may count: allowed by the ball and within the radius."""
    done: Array
    fault: Array


def evaluate(victim: Victim, x: Array, y: Array) -> tuple[PyTree, Array, Array]:
    """The output, the criterion, and whether both are finite; the same program for every attack."""
    out = victim.model(x)
    value = victim.criterion(out, y)
    return out, value, norms.finite((out, value))


@jax.jit
def keys(key: Array, places: Array) -> Array:
    """One key a sample from its global index, so that batching never changes the randomness."""
    return jax.vmap(lambda place: jax.random.fold_in(key, place))(places)


def begin(problem: Problem, start: Array | None, keys: Array | None) -> Track:
    """Begins the attack."""
    attack, victim, samples = problem
    state = attack.init(victim, samples, start, keys)
    return enter(attack, Track(state, None, jnp.zeros((len(samples.y), 4), jnp.int32)))


def enter(attack: Attack, track: Track) -> Track:
    """Prepares for a stage's first step: no state before it counts as a step ago."""
    if not cyclic(attack):
        return track
    return track._replace(before=jax.tree.map(jnp.copy, track.state))


def cyclic(attack: Attack) -> bool:
    """Whether a stage looks for cycles."""
    return any(stage.cycles for stage in attack.stages)


def step(stage: Stage, victim: Victim, samples: Samples, track: Track) -> tuple[Track, Array, Info]:
    """One step; also tells, ``[n]``, whose state is that of two steps ago."""
    state, info = stage.step(victim, samples, track.state)
    state = jax.tree.map(_as_before, state, track.state)
    spent = jnp.stack([info.gradients, info.forwards, info.zeros, info.fault], 1, dtype=jnp.int32)
    totals = track.totals + spent
    if not stage.cycles:
        return Track(state, track.before, totals), jnp.zeros(len(samples.y), bool), info
    return Track(state, track.state, totals), _equal(track.before, state), info


def _as_before(new: Array, old: Array) -> Array:
    """A model that computes in more bits than its samples have does not widen a state."""
    return new.astype(old.dtype) if jnp.issubdtype(old.dtype, jnp.floating) else new


def settle(stage: Stage, track: Track, recurs: Array, left: Array) -> tuple[Track, Array]:
    """Who needs no more steps of the stage, ``[n]``, and the track with their final states.

    With ``left`` steps to go, a sample in a cycle of two ends as it is now if they are even, and as
    it was a step ago if they are odd.
    """
    done = jnp.zeros_like(recurs) if stage.done is None else stage.done(track.state)
    if not stage.cycles:
        return track, done
    odd = recurs & ~done & (left % 2 == 1)

    def end(now: Array, before: Array) -> Array:
        return jnp.where(norms.spread(odd, now), before, now)

    return track._replace(state=jax.tree.map(end, track.state, track.before)), done | recurs


def reach(problem: Problem, track: Track) -> tuple[Reached, Array]:
    """Where the attack has come to, and what of it the model is to see: points that may count."""
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
    """What was found, measured: infeasible and useless points go back to their samples.

    Args:
      xp: NumPy or ``jax.numpy``, whichever the arrays belong to.
      x: ``[n, *shape]`` samples.
      reached: from :func:`reach`.
      clean: ``[n]``, the criterion at the samples.
      seen: the criterion at the points, and whether it and the outputs are finite.
      attacked: ``[n]``; the others stay where they are.
      totals: of the :class:`Track`.
      skip_misclassified: whether samples stay that are misclassified already.
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
    """Everything that a search computes of a batch, traced for two samples: what identifies it."""
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
    """The shape of two rows."""
    return jax.ShapeDtypeStruct((2, *rows.shape[1:]), rows.dtype)


def _equal(one: PyTree, other: PyTree) -> Array:
    """Whether all leaves agree bit for bit, per sample."""
    both = zip(jax.tree.leaves(one), jax.tree.leaves(other))
    return ~norms.any_entry(_bits(a) != _bits(b) for a, b in both)


def _bits(leaf: Array) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
    return leaf
