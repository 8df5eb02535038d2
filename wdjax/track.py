"""A search as pure functions of samples: begin, step by step, measure.

Inside a trace they act on all samples at once; at top level :mod:`wdjax.rounds` applies them to
batches of those that still have something to do.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import norms
from wdjax.core import Array, Attack, Found, Info, PyTree, Samples, Stage, Victim


class Given(NamedTuple):
    """What a search is given: ``[n, ...]`` leaves."""

    x: Array
    y: Array
    eps: Array | None
    start: Array | None
    keys: Array | None
    """One a sample, from its global index."""


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


class Measured(NamedTuple):
    """What a search has come to: ``[n, ...]`` leaves, named as in :class:`~wdjax.core.Found`."""

    x_adv: Array
    proof: PyTree
    cost: Array
    margin: Array
    done: Array
    fault: Array


def finite(tree: PyTree) -> Array:
    """``[n]``: whether all leaves are finite."""
    return ~_any(~jnp.isfinite(leaf) for leaf in jax.tree.leaves(tree))


def _any(leaves: Iterable[Array]) -> Array:
    """``[n]``: whether any entry of any ``[n, ...]`` leaf holds.

    As a maximum of small numbers: XLA's CPU compiler reduces booleans a tenth as fast.
    """
    rows = [leaf.reshape(len(leaf), -1).astype(jnp.int8) for leaf in leaves]
    return jnp.stack([jnp.max(row, axis=1) for row in rows]).max(axis=0) > 0


def begin(attack: Attack, victim: Victim, given: Given) -> tuple[Samples, Track]:
    """Evaluates the samples and begins the attack: one forward pass besides the attack's own."""
    samples = Samples(given.x, given.y, given.eps, victim.model(given.x))
    totals = jnp.zeros((len(given.y), 4), jnp.int32)
    return samples, Track(attack.init(victim, samples, given.start, given.keys), None, totals)


def enter(attack: Attack, track: Track) -> Track:
    """Prepares for a stage's first step: no state before it counts as a step ago."""
    if not any(stage.cycles for stage in attack.stages):
        return track
    return track._replace(before=jax.tree.map(jnp.copy, track.state))


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


def measure(problem: Problem, track: Track, clean: Array, skip_misclassified: bool) -> Measured:
    """Measures the points; infeasible and useless ones go back to their samples.

    ``clean`` ``[n]`` is the criterion at the samples. Two forward passes a sample with that of
    :func:`begin`.
    """
    attack, victim, samples = problem
    x = samples.x
    x_adv, proof = attack.point(samples, track.state)
    cost = attack.ball.cost(x, x_adv, proof)
    inside = jnp.isfinite(cost)
    if attack.budget == "sample":
        inside &= cost <= samples.radius * (1 + 1e-6)
    moved = victim.model(jnp.where(norms.spread(inside, x), x_adv, x))
    value = victim.criterion(moved, samples.y)
    unknown = ~(finite(moved) & jnp.isfinite(value))
    wrong = clean > 0
    useless = ~inside | unknown | (wrong if skip_misclassified else wrong & ~(value > 0))
    fault = (track.totals[:, 3] > 0) | unknown | ~finite(x_adv)
    return Measured(
        x_adv=jnp.where(norms.spread(useless, x), x, x_adv),
        proof=proof,
        cost=jnp.where(useless, 0.0, cost),
        margin=jnp.where(useless, clean, value),
        done=attack.finished(track.state) & ~fault,
        fault=fault,
    )


def stay(problem: Problem, track: Track, clean: Array) -> Measured:
    """What is known of samples that are not attacked: they stay where they are."""
    attack, _, samples = problem
    return Measured(
        x_adv=samples.x,
        proof=attack.point(samples, track.state)[1],
        cost=jnp.zeros(len(samples.y), samples.x.dtype),
        margin=clean,
        done=clean > 0,
        fault=jnp.zeros(len(samples.y), bool),
    )


def found(measured: Measured, clean: Any, attacked: Any, totals: Any) -> Found:
    """The findings in full, of JAX's arrays or of NumPy's."""
    return Found(
        **measured._asdict(),
        correct=~(clean > 0),
        success=measured.margin > 0,
        zeros=totals[:, 2],
        gradients=totals[:, 0],
        forwards=totals[:, 1] + 1 + attacked,
    )


def _equal(one: PyTree, other: PyTree) -> Array:
    """Whether all leaves agree bit for bit, per sample."""
    both = zip(jax.tree.leaves(one), jax.tree.leaves(other))
    return ~_any(_bits(a) != _bits(b) for a, b in both)


def _bits(leaf: Array) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
    return leaf
