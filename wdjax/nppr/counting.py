"""Counts how many perturbed copies of an input are still classified correctly.

A copy's random key is derived from the key, the input's index and the copy's number, so that it
depends neither on batches nor on other inputs. A copy whose logits are not finite has not survived.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from wdjax import distinct, loops, losses, parallel, program
from wdjax.balls import Lp
from wdjax.checks import arguments, independence, validate
from wdjax.checks.forward_mode import TRACES
from wdjax.core import AnyArray, Array, Classifier, PyTree
from wdjax.engine import batching
from wdjax.nppr import upsample as up

Counts = npt.NDArray[np.int64]

TURN = 20
"""Copies of an input drawn together. A hundred copies are five groups, and the 40 copies without a
failure that decide a risk of 0.1 are two, so that none are drawn in vain."""
TWIN = f"nppr.expected_loss, the mean of a loss there, {TRACES}"
"""The differentiable alternative that errors name when a host function is called in a trace."""
_AT_ONCE = 8
"""Copies at once for each sample in a batch of a search: counting keeps no gradients."""
_ROWS = 256
"""Batch size for outputs of unperturbed inputs."""
_FEW = 4
"""If at most so many inputs are left, each is a block of its own, so that none is padding."""
_WIDE = 16
"""Groups of copies that such a block takes at once, since twenty copies do not fill a core."""


class Perturbation(Protocol):
    """A distribution of perturbations inside a ball: a pytree."""

    @property
    def ball(self) -> Lp: ...

    @property
    def eps(self) -> Any:
        """Radius, a number."""
        ...

    def context(self, x: Array, y: Array) -> PyTree:
        """What depends on the inputs ``[n, *shape]`` but not on the draw: ``[n, ...]`` leaves."""
        ...

    def deltas(self, keys: Array, context: PyTree, x: Array, draws: int) -> Array:
        """``[n, draws, *shape]``, each input by its own key, before projection on the ball."""
        ...


class CopyPoll(NamedTuple):
    """The arguments of a count."""

    model: Classifier
    perturbation: Perturbation
    x: Array
    y: Array
    sample_index: Array
    """``[n]``: the inputs' numbers in a larger data set."""
    key: Array
    rows: int
    """Inputs in a block."""
    loops: bool
    mesh: Mesh | None


class Tally(NamedTuple):
    """Counts ``[m]`` of the inputs in question."""

    survived: Counts
    faults: Counts


def poll(
    model: Classifier,
    perturbation: Perturbation,
    x: Array,
    y: Array,
    key: Array,
    index: AnyArray | None = None,
    batch_size: int | None = None,
    mesh: Mesh | None = None,
) -> CopyPoll:
    """Checks the arguments and replicates them on every device."""
    validate.check_number("eps", perturbation.eps)
    passed = batching.traced(model, x)
    if batch_size is None:
        batch_size = _AT_ONCE * batching.default(passed) * parallel.mesh_size(mesh)
    size = validate.check_count("batch_size", batch_size)
    indices = jnp.arange(len(x)) if index is None else jnp.asarray(index)
    if indices.shape != (len(x),):
        raise ValueError(f"index must be [{len(x)}], one number a sample, got {indices.shape}.")
    rows = parallel.padded_size(max(1, size // TURN), mesh)
    fixed = parallel.replicate((model, perturbation, x, y, indices, key), mesh)
    return CopyPoll(*fixed, rows, program.loops_well(passed), mesh)


def default_batch(model: Classifier, x: Array) -> int:
    """The default number of copies on one device at once."""
    return _AT_ONCE * batching.default(batching.traced(model, x))


def count(asked: CopyPoll, rows: npt.NDArray[np.int64], first: int, draws: int) -> Tally:
    """Counts copies ``first`` to ``first + draws`` of inputs; ``TURN`` divides ``first``."""

    def at_once(size: int) -> Tally:
        return _count(asked._replace(rows=size), rows, first, draws)

    unit = parallel.mesh_size(asked.mesh)
    return batching.halving(at_once, asked.rows, asked.mesh, unit)


def _count(asked: CopyPoll, rows: npt.NDArray[np.int64], first: int, draws: int) -> Tally:
    """:func:`count`, in blocks of ``asked.rows`` inputs."""
    turns = first // TURN, -(-(first + draws) // TURN)
    fixed = asked.model, asked.perturbation, asked.x, asked.y, asked.sample_index, asked.key
    size = 1 if len(rows) <= _FEW and asked.mesh is None else asked.rows
    wide = _WIDE if size == 1 and min(asked.rows, turns[1] - turns[0]) >= _WIDE else 1
    sent = []
    for begin in range(0, len(rows), size):
        block = rows[begin : begin + size]
        padded = np.pad(block, (0, size - len(block)), mode="edge").astype(np.int32)
        split = parallel.shard(padded, asked.mesh)
        sent.append(_block(asked.loops, fixed, split, *turns, first + draws, wide))
    parts = [np.asarray(part) for part in parallel.local(sent)]
    return Tally(*np.concatenate(parts, axis=1)[:, : len(rows)].astype(np.int64))


def outputs(function: Classifier, x: Array) -> Array:
    """The function's outputs for ``x`` ``[n, *shape]``, in batches, to bound the memory."""
    parts = [independence.outputs(function, x[i : i + _ROWS]) for i in range(0, len(x), _ROWS)]
    return jnp.concatenate(parts)


def _block(
    loops: bool, fixed: Any, rows: AnyArray, first: int, last: int, end: int, wide: int
) -> AnyArray:
    """``[2, R]``: numbers of survivors and of faults in a block of R inputs.

    Counts the copies of the groups ``first`` to ``last`` (of ``TURN`` copies each) with numbers
    below ``end``, ``wide`` groups at once. ``loops`` says whether one program may loop over the
    groups; otherwise each needs a call.
    """
    if loops:
        return _counted(fixed, rows, first, last, end, wide)
    parts = [_counted(fixed, rows, turn, turn + 1, end, wide) for turn in range(first, last, wide)]
    return np.sum(parts, axis=0)


@functools.partial(distinct.jit, static_argnames="wide")
def _counted(fixed: Any, rows: Array, first: Array, last: Array, end: Array, wide: int) -> Array:
    """``[2, R]``: numbers of survivors and of faults in the groups ``first`` to ``last`` of copies.

    A group is ``TURN`` copies of each input, and ``wide`` groups are drawn at once. Copies with
    numbers from ``end`` on do not count. ``fixed`` holds model, perturbation, all inputs
    ``[n, *shape]`` with labels and indices, and the key; ``rows`` ``[R]`` are the inputs to count.
    A copy whose logits are not finite is a fault and no survivor.
    """
    model, perturbation, xs, ys, indices, key = fixed
    keys = jax.vmap(lambda one: jax.random.fold_in(key, one))(indices[rows])
    x, y = xs[rows], ys[rows]
    context = perturbation.context(x, y)
    keys, x, y, context = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, wide, axis=0), (keys, x, y, context)
    )
    offset = jnp.tile(jnp.arange(wide), len(rows))

    def turn(group: Array, seen: Array) -> Array:
        number = first + wide * group + offset
        points = placed(perturbation, jax.vmap(jax.random.fold_in)(keys, number), context, x, TURN)
        logits = model(points.reshape(-1, *x.shape[1:]))
        margin = losses.decision_margin(logits, jnp.repeat(y, TURN)).reshape(-1, TURN)
        fine = jnp.all(jnp.isfinite(logits), axis=-1).reshape(-1, TURN)
        wanted = number[:, None] * TURN + jnp.arange(TURN)[None] < end
        counts = jnp.stack([(margin <= 0) & fine & wanted, ~fine & wanted])
        return seen + jnp.sum(counts.reshape(2, len(rows), -1), axis=2, dtype=jnp.int32)

    groups = -(-(last - first) // wide)
    return loops.fori_loop(0, groups, turn, jnp.zeros((2, len(rows)), jnp.int32))


def placed(perturbation: Perturbation, keys: Array, context: PyTree, x: Array, draws: int) -> Array:
    """Perturbed inputs ``[n, draws, *shape]``, projected on the ball and the box."""
    delta = perturbation.deltas(keys, context, x, draws)
    return up.placed(x, delta, perturbation.eps, perturbation.ball)


def points(perturbation: Perturbation, key: Array, x: Array, y: Array, draws: int) -> Array:
    """Perturbed inputs ``[n, draws, *shape]`` of a distribution, projected on the ball and the box.

    Args:
      perturbation: a :class:`Fitted` or one of :mod:`wdjax.nppr.distributions`.
      key: a typed ``jax.random.key``.
      x: ``[n, *shape]`` in the box.
      y: ``[n]`` labels.
      draws: M, the number of copies of an input.

    Raises:
      ValueError: a bad distribution, samples or key.

    Source: this library's own.

    >>> from wdjax.nppr import distributions
    >>> own, x, y = distributions.UniformBall(0.1), jnp.ones((1, 2)), jnp.array([0])
    >>> moved = points(own, jax.random.key(0), x, y, 3)
    >>> moved.shape, bool((moved >= 0.9).all()), bool((moved <= 1).all())
    ((1, 3, 2), True, True)
    """
    arguments.check(perturbation=perturbation, x=x, y=y, key=key)
    return _points(perturbation, key, jnp.asarray(x), jnp.asarray(y), draws)


@functools.partial(distinct.jit, static_argnums=4)
def _points(perturbation: Perturbation, key: Array, x: Array, y: Array, draws: int) -> Array:
    """``[n, draws, *shape]``: :func:`points` without checks; input i has the key folded with i."""
    keys = jax.vmap(lambda one: jax.random.fold_in(key, one))(jnp.arange(len(x)))
    return placed(perturbation, keys, perturbation.context(x, y), x, draws)
