"""A search as pure functions of a batch: first_track, step, reach, measure.

Inside a trace :func:`scan` applies them to all samples at once; at top level
:mod:`wdjax.engine.rounds` applies them to batches of unfinished samples.
"""

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from wdjax import distinct, identity, loops, norms, transport
from wdjax.core import Array, Attack, Ball, Found, Info, PyTree, Samples, Stage, Victim


class Track(NamedTuple):
    """The state of an attack in progress: ``[n, ...]`` leaves."""

    state: PyTree
    before: PyTree
    """The state one step ago if a stage detects cycles, else None."""
    totals: Array
    """``[n, 4]`` int32: gradients, forward passes, zero gradients and faulty steps so far."""


def evaluate(victim: Victim, x: Array, y: Array) -> tuple[PyTree, Array, Array]:
    """The model's output, the criterion ``[n]``, and whether both are finite, ``[n]``.

    Every attack uses this one program, so that equal points get equal criteria.
    """
    out = victim.model(x)
    value = victim.criterion(out, y)
    return out, value, norms.finite((out, value))


@distinct.jit
def keys(key: Array, sample_index: Array) -> Array:
    """One key for each sample from its global index, whatever batch the sample is in."""
    return jax.vmap(lambda one: jax.random.fold_in(key, one))(sample_index)


def first_track(
    attack: Attack, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
) -> Track:
    """Calculates the attack's first state."""
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


def freeze(stage: Stage, track: Track, recurs: Array, left: Array) -> tuple[Track, Array]:
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


def reach(attack: Attack, samples: Samples, track: Track) -> Found:
    """The attack's points so far; what the model says of them is added by :func:`measure`.

    A point that its ball or radius does not allow is replaced by its sample, at cost inf.
    """
    x_adv, proof = attack.point(samples, track.state)
    cost = attack.ball.cost(samples.x, x_adv, proof)
    radius = samples.radius if attack.budget == "sample" else jnp.full_like(cost, jnp.inf)
    inside = jnp.isfinite(cost) & (cost <= radius * (1 + transport.BEYOND))
    gradients, forwards, zeros, faults = track.totals.T
    return Found(
        x_adv=jnp.where(norms.spread(inside, x_adv), x_adv, samples.x),
        proof=proof,
        cost=jnp.where(inside, cost, jnp.inf),
        correct=jnp.zeros_like(inside),
        success=jnp.zeros_like(inside),
        margin=jnp.full_like(cost, jnp.nan),
        done=attack.finished(track.state),
        fault=(faults > 0) | ~norms.finite(x_adv),
        zeros=zeros,
        gradients=gradients,
        forwards=forwards,
        radius=radius,
    )


def measure(
    xp: ModuleType,
    ball: Ball,
    found: Found,
    x: Any,
    clean: Any,
    seen: tuple[Any, Any],
    attacked: Any,
    skip_misclassified: bool,
) -> Found:
    """Measures points; those that are infeasible or useless are replaced by their samples.

    Args:
      xp: NumPy or ``jax.numpy``, whichever the arrays belong to.
      ball: the attack's.
      found: from :func:`reach`.
      x: ``[n, *shape]`` samples.
      clean: ``[n]``, the criterion at the samples.
      seen: ``[n]`` each: the criterion at the points, and whether it and the outputs are finite.
      attacked: ``[n]`` booleans; the other samples are reported unmoved.
      skip_misclassified: whether samples that are misclassified at the start stay unmoved.
    """
    (value, known), wrong = seen, clean > 0
    useful = ~wrong if skip_misclassified else ~wrong | (value > 0)
    moved = attacked & xp.isfinite(found.cost) & known & useful
    margin = xp.where(moved, value, clean)
    fault = attacked & (found.fault | ~known)
    farthest = ball.diameter(x.shape[1:]) if hasattr(ball, "diameter") else np.inf
    return replace(
        found,
        x_adv=xp.where(norms.spread(moved, x), found.x_adv, x),
        cost=xp.where(moved, found.cost, 0.0),
        correct=~wrong,
        success=margin > 0,
        margin=margin,
        done=xp.where(attacked, found.done & ~fault, wrong),
        fault=fault,
        zeros=xp.where(attacked, found.zeros, 0),
        gradients=xp.where(attacked, found.gradients, 0),
        forwards=xp.where(attacked, found.forwards + 2, 1),
        limit=xp.full(len(x), farthest, x.dtype),
    )


def scan(
    attack: Attack,
    victim: Victim,
    samples: Samples,
    start: Array | None,
    keys: Array | None,
    only: Any,
    sound: Array,
    skip_misclassified: bool,
    history: bool,
) -> Found:
    """The search inside a trace: each stage is a scan over all samples.

    Args:
      attack: what looks for points.
      victim: what is attacked.
      samples: without ``out``.
      start: ``[n, *shape]`` points to begin at, or None.
      keys: ``[n]``, or None.
      only: ``[n]`` booleans, the samples to attack, or None for all.
      sound: ``[n]`` booleans; where False the sample's numbers become NaN.
      skip_misclassified: whether samples that are misclassified at the start stay unmoved.
      history: whether the result holds an :class:`~wdjax.core.Info` of ``[steps, n]`` leaves.
    """
    out, clean, known = evaluate(victim, samples.x, samples.y)
    samples = samples._replace(out=out)
    moving = first_track(attack, victim, samples, start, keys)
    attacked = jnp.ones(len(samples.y), bool) if only is None else jnp.asarray(only)
    log: list[Any] = []
    if skip_misclassified:
        attacked &= ~(clean > 0)

    def turn(moving: Track, _: None, stage: Stage) -> tuple[Track, Info | None]:
        moving, _recurs, info = step(stage, victim, samples, moving)
        if stage.couple is not None:
            moving = moving._replace(state=stage.couple(samples, moving.state, attacked))
        return moving, _muted(info, attacked) if history else None

    for stage in attack.stages:
        if stage.length:
            one = functools.partial(turn, stage=stage)
            moving, record = loops.scan(one, enter(attack, moving), length=stage.length)
            log.append(record)
    found = reach(attack, samples, moving)
    seen = evaluate(victim, found.x_adv, samples.y)[1:]
    found = measure(jnp, attack.ball, found, samples.x, clean, seen, attacked, skip_misclassified)
    if history:
        found = replace(found, history=jax.tree.map(lambda *rows: jnp.concatenate(rows), *log))
    return _poisoned(found, sound & known)


def _muted(info: Info, attacked: Array) -> Info:
    """The record of a step without the passes and faults of samples that are not attacked."""
    return info._replace(
        gradients=jnp.where(attacked, info.gradients, 0),
        forwards=jnp.where(attacked, info.forwards, 0),
        zeros=jnp.where(attacked, info.zeros, 0),
        fault=info.fault & attacked,
    )


def _poisoned(found: Found, sound: Array) -> Found:
    """NaN for samples, ``[n]``, that would be refused at top level: they must not look robust."""
    return replace(
        found,
        correct=found.correct & sound,
        cost=jnp.where(sound, found.cost, jnp.nan),
        margin=jnp.where(sound, found.margin, jnp.nan),
        success=found.success & sound,
        done=found.done & sound,
        fault=found.fault | ~sound,
    )


def programs(
    attack: Attack, victim: Victim, samples: Samples, start: Array | None, key: Array | None
) -> list[ClosedJaxpr]:
    """All programs of a search, traced for two samples: evaluation, start, stages, points.

    They identify the search in its checkpoint (:func:`wdjax.identity.digest`).
    """
    x, y, eps, start = jax.tree.map(_two, (*samples[:3], start))
    sample_keys = (
        None if key is None else jax.eval_shape(keys, key, jax.ShapeDtypeStruct((2,), jnp.int32))
    )
    samples = Samples(x, y, eps, jax.eval_shape(victim.model, x))
    begun = attack, victim, samples, start, sample_keys
    track = jax.eval_shape(functools.partial(first_track, *begun[:2]), *begun[2:])
    moving = jax.eval_shape(functools.partial(enter, attack), track)
    traced = [
        identity.program(evaluate, victim, x, y),
        identity.program(first_track, *begun),
        identity.program(reach, attack, samples, track),
    ]
    for stage in attack.stages:
        if not stage.length:
            continue
        traced.append(identity.program(functools.partial(step, stage), victim, samples, moving))
        if stage.done is not None:
            traced.append(identity.program(stage.done, track.state))
        if stage.couple is not None:
            chosen = jax.ShapeDtypeStruct(y.shape, bool)
            traced.append(identity.program(stage.couple, samples, track.state, chosen))
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
