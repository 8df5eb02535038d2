"""The moves that first-order attacks share: a gradient that can be trusted, the best of rivals."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from wdjax import losses, norms, program
from wdjax.balls import Lp
from wdjax.core import Array, Criterion, Info, PyTree, Samples, Victim
from wdjax.precision import promoted

_ROUNDED = {4: 4.0, 8: 4.0}
"""By the bytes of an output, 1 where fewer: its own ulps by which another batch rounds it."""
_TRAVELLED = {4: 256.0, 8: 256.0}
"""The same of the way that it came from the sample, which tells how large its terms are."""


def setting(default: Any) -> Any:
    """A dataclass field that changes the program: part of the tree's structure, not a leaf."""
    return dataclasses.field(default=default, metadata={"static": True})


class Slope(NamedTuple):
    """What one forward and one backward pass tell: ``[n, ...]`` leaves."""

    out: PyTree
    gradient: Array
    """``[n, *shape]``, 0 in coordinates where it was not finite."""
    zero: Array
    """Whether it is 0 everywhere."""
    fault: Array
    """Whether an output or a coordinate of the gradient was not finite."""


def slope(victim: Victim, x: Array, y: Array, objective: Callable[[PyTree, Array], Array]) -> Slope:
    """The gradient of ``sum objective(model(x), y)``, looked at."""

    def total(x: Array) -> tuple[Array, PyTree]:
        out = victim.model(x)
        return jnp.sum(objective(out, y)), out

    gradient, out = jax.grad(total, has_aux=True)(x)
    return look(gradient, out)


def adam(gradient: Array, moments: PyTree) -> tuple[Array, PyTree]:
    """Adam's direction for every sample, and its moments, begun by ``optax.scale_by_adam``."""
    with promoted():  # As optax wants it.
        return jax.vmap(optax.scale_by_adam().update)(gradient, moments)


def look(gradient: Array, out: PyTree) -> Slope:
    """Takes what is not finite out of a gradient and says so."""
    usable, worst = _cleaned(gradient)
    return Slope(out, usable, worst == _ZERO, (worst == _UNKNOWN) | ~norms.finite(out))


_ZERO, _UNKNOWN = 0, 2
"""Kinds of coordinates; 1 is a number that is not 0."""


def _cleaned(gradient: Array) -> tuple[Array, Array]:
    """A gradient without what is not finite, and the worst kind of its coordinates, ``[n]``."""
    known = jnp.isfinite(gradient)
    # All kinds in one pass over the gradient, which is what looking costs.
    kinds = jnp.where(known, (gradient != 0).astype(jnp.int8), jnp.int8(_UNKNOWN))
    return jnp.where(known, gradient, 0.0), jnp.max(kinds.reshape(len(kinds), -1), axis=1)


def note(victim: Victim, y: Array, seen: Slope, forwards: int = 1) -> Info:
    """The :class:`~wdjax.core.Info` of a step that took one gradient."""
    one = jnp.ones(len(y), jnp.int32)
    value = victim.criterion(seen.out, y)
    zeros = seen.zero.astype(jnp.int32)
    return Info(value, one, forwards * one, zeros, seen.fault | ~jnp.isfinite(value))


def judge(victim: Victim, x: Array, y: Array) -> tuple[PyTree, Info]:
    """One forward pass and its :class:`~wdjax.core.Info`."""
    out, none = victim.model(x), jnp.zeros(len(y), jnp.int32)
    value = victim.criterion(out, y)
    return out, Info(value, none, none + 1, none, ~norms.finite(out) | ~jnp.isfinite(value))


class Reading(NamedTuple):
    """What a criterion says of outputs, ``[n]``, and how far it can be trusted."""

    value: Array
    slack: Array
    """By how much rounding in another batch may move the value."""

    @property
    def lasts(self) -> Array:
        """Whether the criterion holds by more than rounding."""
        return self.value.astype(self.slack.dtype) > self.slack

    @property
    def beyond(self) -> Array:
        """A value whose boundary lies where flips last: what attacks should aim at."""
        return self.value - (2 * self.slack).astype(self.value.dtype)


def read(criterion: Criterion, samples: Samples, out: PyTree) -> Reading:
    r"""A criterion and its slack, from the outputs that it reads.

    Projections, halvings and minimum-norm attacks end within floats of the boundary; the slack
    keeps what counts on its far side wherever it is measured again. To first order it is

        ``sum_k |d criterion / d out_k| u (a |out_k| + b |out_k - clean_k|)``,

    with the unit u of the outputs' floats. The first term is the rounding of the output itself; the
    second that of the terms it was summed from, of which the way from the clean output tells
    the size where a shift of all logits hides it. An output that the criterion does not read, such
    as the logit of a class that never wins, adds nothing, and neither does one at which the
    derivative is not finite: what was found is measured in the end.
    """
    value, pullback = jax.vjp(lambda out: criterion(out, samples.y), out)
    wide = jnp.float32 if value.dtype.itemsize < 4 else value.dtype
    total = jnp.zeros(len(samples.y), wide)
    leaves = map(jax.tree.leaves, (out, samples.out, pullback(jnp.ones_like(value))[0]))
    for leaf, clean, weight in zip(*leaves):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            error = jnp.abs(weight.astype(total.dtype)) * _rounding(leaf, clean, total.dtype)
            error = jnp.where((weight != 0) & jnp.isfinite(error), error, 0.0)
            total += jnp.sum(error.reshape(len(leaf), -1), axis=1)
    return Reading(value, total)


def _rounding(leaf: Array, clean: Array, dtype: Any) -> Array:
    """By how much another batch may round every output."""
    size, unit = leaf.dtype.itemsize, float(jnp.finfo(leaf.dtype).eps)
    rounded, travelled = unit * _ROUNDED.get(size, 1.0), unit * _TRAVELLED.get(size, 1.0)
    leaf, clean = leaf.astype(dtype), clean.astype(dtype)
    return rounded * jnp.abs(leaf) + travelled * jnp.abs(leaf - clean)


def flips(victim: Victim, samples: Samples, x: Array) -> tuple[Array, Info]:
    """Whether the criterion holds at ``x`` beyond rounding, for one forward pass."""
    out, info = judge(victim, x, samples.y)
    return read(victim.criterion, samples, out).lasts, info


class Move(NamedTuple):
    """The best of several candidate steps, per sample."""

    margin: Array
    """``z_rival - z_y`` at ``x``; minus infinity where a logit is not finite."""
    x: Array
    rival: Array
    logits: Array


def best_move(
    victim: Victim,
    x: Array,
    y: Array,
    choose: Callable[[Array], Array],
    advance: Callable[[Array, Array], Array],
) -> tuple[Move, Array, Info]:
    """Steps towards every chosen rival and keeps the candidate of largest margin to its own rival.

    Args:
      victim: its model gives logits ``[n, K]``.
      x: ``[n, *shape]`` current points.
      y: ``[n]`` labels.
      choose: logits at ``x`` ``->`` rivals ``[n, m]``.
      advance: ``(x, gradient) -> candidates``, all ``[n, *shape]``.

    Returns:
      The winning :class:`Move`, the logits at ``x`` and what the step did.

    Cost: 1 + m forward and m backward passes; memory for one candidate a sample.
    """
    logits, pullback = jax.vjp(victim.model, x)
    rivals = choose(logits).T

    def attempt(best: Move, rival: Array) -> tuple[Move, tuple[Array, Array]]:
        one_hot = functools.partial(jax.nn.one_hot, num_classes=logits.shape[-1], dtype=x.dtype)
        change = (one_hot(rival) - one_hot(y)).astype(logits.dtype)
        gradient, worst = _cleaned(pullback(change)[0])
        tried = advance(x, gradient)
        after = victim.model(tried)
        known = norms.finite(after)
        margin = jnp.where(known, losses.targeted_margin(after, y, rival), -jnp.inf)
        better, move = margin > best.margin, Move(margin, tried, rival, after)
        kept = [jnp.where(norms.spread(better, new), new, old) for new, old in zip(move, best)]
        return Move(*kept), (worst == _ZERO, (worst == _UNKNOWN) | ~known)

    nothing = Move(jnp.full(len(y), -jnp.inf, logits.dtype), x, rivals[0], logits)
    move, (zero, faulty) = program.scan(attempt, nothing, rivals)
    zeros, fault = jnp.sum(zero, axis=0, dtype=jnp.int32), jnp.any(faulty, axis=0)
    one = jnp.ones(len(y), jnp.int32)
    value = victim.criterion(logits, y)
    fault |= ~(norms.finite(logits) & jnp.isfinite(value))
    info = Info(value, len(rivals) * one, (1 + len(rivals)) * one, zeros, fault)
    return move, logits, info


def all_rivals(logits: Array, y: Array) -> Array:
    """Every class but ``y``: ``[n, K - 1]``."""
    classes = logits.shape[-1]
    after = y.astype(jnp.int32)[None] + jnp.arange(1, classes, dtype=jnp.int32)[:, None]
    return jnp.where(after < classes, after, after - classes).T


def top_rivals(logits: Array, y: Array, count: int) -> Array:
    """The ``count`` largest classes other than ``y``, largest first: ``[n, count]``."""
    count = min(count, logits.shape[-1] - 1)
    others = jnp.where(jax.nn.one_hot(y, logits.shape[-1], dtype=bool), -jnp.inf, logits)
    return jax.lax.top_k(others, count)[1].astype(y.dtype)


def need_logits(name: str, out: PyTree) -> None:
    """Refuses victims whose classes cannot be told apart."""
    if getattr(out, "ndim", 0) != 2 or out.shape[-1] < 2:
        raise ValueError(
            f"{name} follows single classes and needs logits [n, K], got "
            f"{jax.tree.map(jnp.shape, out)}; use PGD with a loss of your own."
        )


def shortest(x: Array, norm: float) -> float:
    """The length of steps that floats can resolve: shorter ones round to none."""
    return 4 * float(jnp.finfo(x.dtype).eps) * x[0].size ** (1 / norm)


_SHARE = {1: 0.25, 2: 0.4, math.inf: 0.02 / (8 / 255)}
_ABSOLUTE = {1: 0.8, 2: 0.2, math.inf: 0.02}


def default_step(ball: Lp, eps: Array | None) -> Array | float:
    """The paper's steps: 0.02 for eps 8/255 (inf) and 0.2 for eps 0.5 (2), as a share of ``eps``.

    Where there is no ``eps``, these very numbers, meant for a box of width 1. The paper has no
    value for norm 1, where these were best on two nets.
    """
    return _ABSOLUTE[ball.norm] if eps is None else _SHARE[ball.norm] * eps


def hold(over: Array, state: PyTree, moved: PyTree) -> PyTree:
    """``state`` where samples are over, ``moved`` for the others."""

    def keep(old: Array, new: Array) -> Array:
        return jnp.where(norms.spread(over, old), old, new)

    return jax.tree.map(keep, state, moved)


class Best(NamedTuple):
    """The iterate of largest criterion so far, per sample."""

    x: Array
    value: Array


def no_best(x: Array, wanted: bool) -> Best | None:
    """Where the search for the best iterate begins; None if it is not wanted."""
    return None if not wanted else Best(x, jnp.full(len(x), -jnp.inf, x.dtype))


def keep_best(best: Best | None, x: Array, value: Array, out: PyTree) -> Best | None:
    """The better of :class:`Best` and the points ``x``, if anyone looks for it.

    An output that is not finite is never better: measured again, it would not count.
    """
    if best is None:
        return None
    value = value.astype(best.value.dtype)
    better = (value > best.value) & jnp.isfinite(value) & norms.finite(out)
    return Best(jnp.where(norms.spread(better, x), x, best.x), jnp.where(better, value, best.value))
