"""Continuous batching: samples pass through a fixed number of slots, each at its own pace.

One program of one batch size serves any number of samples. A slot whose sample has nothing left to
do takes the next one, so that no pass is spent on a sample that is finished. A sample is finished
after all steps of its stage, when the stage says so, or when its state is what it was two steps
ago: steps are functions of the state, so that all later ones are known. Sign steps run into such
cycles often.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import losses, norms, parallel
from wdjax.core import Info


class Samples(NamedTuple):
    """Samples on their way: ``[n, ...]`` leaves, ``logits`` those of ``x``."""

    x: Any
    y: Any
    logits: Any
    state: Any


class Log(NamedTuple):
    """What the steps did, ``[steps, n]`` on the host; a step not taken repeats a known margin."""

    info: Info

    @classmethod
    def empty(cls, samples, steps):
        margin = np.asarray(_margin(samples.logits, samples.y))
        count = np.zeros((steps, len(margin)), np.int32)
        return cls(Info(np.tile(margin, (steps, 1)), count, count.copy()))

    def begin(self, row, length):
        """A stage that a sample skips keeps the margin of the stage before it."""
        if row:
            self.info.margin[row : row + length] = self.info.margin[row - 1]

    def write(self, row, sample, info):
        """Rows ``[m]`` for samples ``[m]``: the same chunk ``[length, m]`` of their own steps."""
        rows = row + np.arange(len(info.margin))[:, None]
        for leaf, values in zip(self.info, info):
            leaf[rows, sample] = values

    def repeat(self, row, end, sample, cycle):
        """Fills one sample's rows ``row .. end - 1`` from the last one or two before them."""
        margin, missing = self.info.margin, np.arange(end - row)
        margin[row:end, sample] = margin[row - cycle + missing % cycle, sample]


def carry(
    attack,
    model,
    samples: Samples,
    knobs,
    *,
    slots: int,
    count: int,
    chunk: int,
    mesh,
    report: Callable[[int, np.ndarray, Info], bool],
):
    """Takes the first ``count`` samples through all stages of an attack.

    Args:
      attack: an :class:`~wdjax.core.Attack`.
      model: the classifier, replicated on the mesh.
      samples: ``[n, ...]`` with initial states, split over the mesh.
      knobs: the attack's numbers.
      slots: samples in one batch, a multiple of the mesh's size.
      count: rows beyond it are padding and stay as they are.
      chunk: most steps in one program.
      mesh: of :func:`wdjax.parallel.data_mesh`.
      report: ``(steps settled, samples advanced [m], info [chunk, m]) -> stop``.

    Returns:
      The samples with their final states, and an :class:`~wdjax.core.Info` ``[steps, n]`` on the
      host.
    """
    log, row, stopped = Log.empty(samples, attack.steps), 0, False
    samples = jax.tree.map(jnp.copy, samples)  # Buffers of their own, to be overwritten in place.
    for stage in attack.stages:
        log.begin(row, stage.length)
        if stage.length and not stopped:
            one = _Pass(stage, row, model, knobs, slots, chunk, mesh, log, report)
            samples, stopped = one.run(samples, count)
        row += stage.length
    return samples, log.info


class _Pass(NamedTuple):
    """One stage, for all samples."""

    stage: Any
    row: int
    model: Any
    knobs: Any
    slots: int
    chunk: int
    mesh: Any
    log: Log
    report: Any

    def run(self, samples, count):
        nobody, length = len(samples.y), self.stage.length
        # A divisor, so that whole chunks are left to every sample and one program serves all.
        steps = max(d for d in range(1, self.chunk + 1) if length % d == 0)
        waiting = collections.deque(self._unfinished(samples, count))
        settled = (count - len(waiting)) * length
        holder, left = np.full(self.slots, nobody), np.zeros(self.slots, int)
        leaving, odd = holder.copy(), np.zeros(self.slots, bool)
        batch = parallel.shard(take(samples, holder * 0), self.mesh)
        before, stopped = batch.state, False
        while True:
            entering = np.full(self.slots, nobody)
            for slot in np.flatnonzero(holder == nobody)[: len(waiting)]:
                holder[slot] = entering[slot] = waiting.popleft()
                left[slot] = length
            if min(leaving.min(), entering.min()) < nobody:
                moved = _exchange(samples, before, batch, leaving, odd, entering)
                samples, before, batch = parallel.shard(moved, self.mesh)
            active = np.flatnonzero(holder < nobody)
            if not active.size:
                return samples, stopped
            before, state, seen = _advance(self.stage, steps, self.model, batch, before, self.knobs)
            batch = batch._replace(state=state)
            seen = np.asarray(seen)
            done, recurs = seen[3:, -1] > 0
            margin, *counts = seen[:3, :, active]
            info = Info(margin, *(count.astype(np.int32) for count in counts))
            self.log.write(self.row + length - left[active], holder[active], info)
            left[active] -= steps
            settled += steps * active.size
            over = (done | recurs | (left == 0)) & (holder < nobody)
            odd = recurs & ~done & (left % 2 == 1)
            for slot in np.flatnonzero(over & (left > 0)):
                end = self.row + length
                cycle = 1 if done[slot] or length - left[slot] < 2 else 2
                self.log.repeat(end - left[slot], end, holder[slot], cycle)
                settled += left[slot]
            stopped, settled = bool(self.report(settled, holder[active], info)), 0
            if stopped:
                waiting.clear()
                over = holder < nobody
            leaving = np.where(over, holder, nobody)
            holder[over] = nobody

    def _unfinished(self, samples, count):
        if self.stage.done is None:
            return range(count)
        return np.flatnonzero(~np.asarray(_is_done(self.stage, samples.state))[:count])


_margin = jax.jit(losses.margin)


@jax.jit
def take(samples, index):
    """The samples at an index, in that order."""
    return jax.tree.map(lambda leaf: leaf[index], samples)


@functools.partial(jax.jit, static_argnums=0)
def _is_done(stage, state):
    return stage.done(state)


@functools.partial(jax.jit, donate_argnums=0)
def _exchange(samples, before, batch, leaving, odd, entering):
    """Slots hand back the samples ``leaving`` and take those ``entering``, where ``n`` is none."""

    def put(rest, older, newer):
        kept = jnp.where(norms.spread(odd, newer), older, newer)
        return rest.at[leaving].set(kept, mode="drop")

    def refill(rest, row):
        return jnp.where(norms.spread(entering < len(samples.y), row), rest[entering], row)

    samples = samples._replace(state=jax.tree.map(put, samples.state, before, batch.state))
    before = jax.tree.map(refill, samples.state, before)
    return samples, before, jax.tree.map(refill, samples, batch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _advance(stage, length, model, batch, before, knobs):
    """``length`` steps from ``batch.state``, which ``before`` precedes.

    Returns the last two states, and after every step its info, whether the stage is done with a
    sample, and whether its state is that of two steps ago: ``[5, length, n]``, one array because
    each costs a transfer.
    """

    def step(states, _):
        before, state = states
        new, info = stage.step(model, batch.x, batch.y, state, **knobs)
        done = jnp.zeros(len(batch.y), bool) if stage.done is None else stage.done(new)
        exact = jnp.promote_types(info.margin.dtype, jnp.float32)
        seen = *info, done, _equal(before, new)
        return (state, new), jnp.stack([leaf.astype(exact) for leaf in seen])

    states = before, batch.state
    if length == 1:
        states, seen = step(states, None)
        return *states, seen[:, None]
    states, seen = jax.lax.scan(step, states, length=length)
    return *states, seen.swapaxes(0, 1)


def _equal(one, other):
    """Whether all leaves agree, per sample."""
    rows = [
        jnp.all((_bits(a) == _bits(b)).reshape(len(a), -1), axis=1)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other))
    ]
    return functools.reduce(jnp.logical_and, rows)


def _bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
    return leaf
