"""What first-order attacks share: cleaned gradients, slack for rounding, the best of candidates."""

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
from wdjax.checks import validate
from wdjax.core import Array, Criterion, Info, PyTree, Samples, Victim
from wdjax.precision import promoted

_ROUNDED = {4: 4.0, 8: 4.0}
"""How far another batch may move an output, in units of its own eps; by the output's bytes, 1 for
smaller floats."""
_TRAVELLED = {4: 256.0, 8: 256.0}
"""The same, in units of eps times the output's distance from the clean output, which shows how
large the summed terms are."""


def setting(default: Any) -> Any:
    """A static dataclass field, part of the pytree's structure: changing it recompiles."""
    return dataclasses.field(default=default, metadata={"static": True})


class Slope(NamedTuple):
    """The result of one forward and one backward pass: ``[n, ...]`` leaves."""

    out: PyTree
    gradient: Array
    """``[n, *shape]``, 0 in coordinates where it was not finite."""
    zero: Array
    """``[n]``: whether the gradient is 0 in every coordinate."""
    fault: Array
    """``[n]``: whether an output or a coordinate of the gradient was not finite."""


def slope(victim: Victim, x: Array, y: Array, objective: Callable[[PyTree, Array], Array]) -> Slope:
    """The gradient of ``sum objective(model(x), y)``, cleaned by :func:`look`.

    Args:
      victim: its model may return any pytree whose leaves have the leading axis n.
      x: ``[n, *shape]`` points.
      y: ``[n]`` labels.
      objective: ``(out, y) -> [n]``, which treats every sample alone.

    Returns:
      A :class:`Slope`.

    Raises:
      ValueError: an objective that does not return one float a sample.

    Cost: one forward and one backward pass.

    >>> victim = Victim(lambda x: x @ jnp.array([[1.0, -1.0], [-1.0, 1.0]]), losses.margin)
    >>> slope(victim, jnp.array([[0.6, 0.4]]), jnp.array([0]), losses.margin).gradient.tolist()
    [[-2.0, 2.0]]
    """

    def total(x: Array) -> tuple[Array, PyTree]:
        out = victim.model(x)
        return jnp.sum(validate.check_each("loss", objective(out, y), len(y))), out

    gradient, out = jax.grad(total, has_aux=True)(x)
    return look(gradient, out)


def adam(gradient: Array, moments: PyTree) -> tuple[Array, PyTree]:
    """Adam's direction and new moments, per sample.

    Args:
      gradient: ``[n, *shape]``
      moments: the state of ``optax.scale_by_adam``, whose leaves have the leading axis n; the first
        is ``jax.vmap(optax.scale_by_adam().init)(x)``.

    Returns:
      The direction, ``[n, *shape]``, and the new moments.

    >>> moments = jax.vmap(optax.scale_by_adam().init)(jnp.zeros((1, 2)))
    >>> jnp.round(adam(jnp.array([[0.5, -2.0]]), moments)[0], 3).tolist()
    [[1.0, -1.0]]
    """
    with promoted():  # Optax mixes dtypes.
        return jax.vmap(optax.scale_by_adam().update)(gradient, moments)


def look(gradient: Array, out: PyTree) -> Slope:
    """Sets coordinates of a gradient that are not finite to 0, and reports them as a fault.

    Args:
      gradient: ``[n, *shape]``
      out: the model's output, ``[n, ...]`` leaves; a fault, too, if it is not finite.

    Returns:
      A :class:`Slope`.

    >>> seen = look(jnp.array([[1.0, jnp.nan], [0.0, 0.0]]), jnp.zeros((2, 3)))
    >>> seen.gradient.tolist(), seen.zero.tolist(), seen.fault.tolist()
    ([[1.0, 0.0], [0.0, 0.0]], [False, True], [True, False])
    """
    usable, worst = _cleaned(gradient)
    return Slope(out, usable, worst == _ZERO, (worst == _UNKNOWN) | ~norms.finite(out))


_ZERO, _UNKNOWN = 0, 2
"""Kinds of a gradient's coordinate: zero and not finite; 1 is any other number."""


def _cleaned(gradient: Array) -> tuple[Array, Array]:
    """Replaces the entries of a gradient ``[n, *shape]`` that are not finite by 0.

    Returns that gradient and, ``[n]``, the largest kind of its coordinates: ``_ZERO`` if all are 0,
    ``_UNKNOWN`` if one is not finite, 1 otherwise.
    """
    known = jnp.isfinite(gradient)
    # One pass over the gradient, whose memory traffic is the cost, finds all kinds.
    kinds = jnp.where(known, (gradient != 0).astype(jnp.int8), jnp.int8(_UNKNOWN))
    return jnp.where(known, gradient, 0.0), jnp.max(kinds.reshape(len(kinds), -1), axis=1)


def note(victim: Victim, y: Array, seen: Slope, forwards: int = 1) -> Info:
    """The record of a step that took one gradient.

    Args:
      victim: its criterion is recorded.
      y: ``[n]`` labels.
      seen: from :func:`slope`, at the step's starting points.
      forwards: number of forward passes of the step.

    Returns:
      An :class:`~wdjax.core.Info`.

    >>> victim, y = Victim(lambda x: x, losses.margin), jnp.array([0])
    >>> info = note(victim, y, slope(victim, jnp.array([[0.25, 0.5]]), y, losses.margin))
    >>> info.value.tolist(), info.gradients.tolist(), info.fault.tolist()
    ([0.25], [1], [False])
    """
    one = jnp.ones(len(y), jnp.int32)
    value = victim.criterion(seen.out, y)
    zeros = seen.zero.astype(jnp.int32)
    return Info(value, one, forwards * one, zeros, seen.fault | ~jnp.isfinite(value))


def judge(victim: Victim, x: Array, y: Array) -> tuple[PyTree, Info]:
    """One forward pass and its record.

    Args:
      victim: the model and the criterion to be recorded.
      x: ``[n, *shape]`` points.
      y: ``[n]`` labels.

    Returns:
      The model's output, ``[n, ...]`` leaves, and an :class:`~wdjax.core.Info`.

    Cost: one forward pass.

    >>> victim = Victim(lambda x: 2 * x, losses.margin)
    >>> out, info = judge(victim, jnp.array([[0.25, 0.5]]), jnp.array([0]))
    >>> out.tolist(), info.value.tolist(), info.forwards.tolist()
    ([[0.5, 1.0]], [0.5], [1])
    """
    out, none = victim.model(x), jnp.zeros(len(y), jnp.int32)
    value = victim.criterion(out, y)
    return out, Info(value, none, none + 1, none, ~norms.finite(out) | ~jnp.isfinite(value))


class Reading(NamedTuple):
    """The criterion, ``[n]``, and by how much rounding may change it."""

    value: Array
    slack: Array
    """By how much rounding in another batch may change the value, ``[n]``."""

    @property
    def lasts(self) -> Array:
        """Whether the criterion holds by more than rounding."""
        return self.value.astype(self.slack.dtype) > self.slack

    @property
    def beyond(self) -> Array:
        """The value less twice the slack: attacks aim at its zero, where flips survive rounding."""
        return self.value - (2 * self.slack).astype(self.value.dtype)


def read(criterion: Criterion, samples: Samples, out: PyTree) -> Reading:
    r"""A criterion and its slack, from the outputs that it reads.

    Projections, bisections and minimum-norm attacks end within a few floats of the boundary. A flip
    counts if the criterion exceeds the slack, so that it is still a flip when it is evaluated in
    another batch. To first order the slack is

        ``sum_k |d criterion / d out_k| u (a |out_k| + b |out_k - clean_k|)``,

    with the unit roundoff u of the outputs. The first term is the rounding of the output itself;
    the second is the rounding of the terms that were summed to it, whose size shows in the distance
    from the clean output even where a common shift of all logits hides it. An output that does not
    enter the criterion, such as the logit of a class that never wins, adds nothing. Nor does an
    output at which the derivative is not finite: the final measurement decides there.

    Args:
      criterion: ``(out, y) -> [n]``
      samples: with their labels and clean outputs.
      out: the model's output at the points, ``[n, ...]`` leaves.

    Returns:
      A :class:`Reading`.

    >>> clean, out = jnp.array([[1.0, 0.0]] * 2), jnp.array([[1.0, 1.0 + 1e-6], [1.0, 1.5]])
    >>> samples = Samples(jnp.zeros((2, 2)), jnp.array([0, 0]), None, clean)
    >>> found = read(losses.margin, samples, out)
    >>> (found.value > 0).tolist(), found.lasts.tolist()
    ([True, True], [False, True])
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
    """How far evaluation in another batch may move every output, in the shape of ``leaf``.

    ``leaf`` are outputs at the points and ``clean`` those at the samples, both ``[n, ...]``; the
    result, of type ``dtype``, is in the units of the outputs.
    """
    size, unit = leaf.dtype.itemsize, float(jnp.finfo(leaf.dtype).eps)
    rounded, travelled = rounding(leaf.dtype), unit * _TRAVELLED.get(size, 1.0)
    leaf, clean = leaf.astype(dtype), clean.astype(dtype)
    return rounded * jnp.abs(leaf) + travelled * jnp.abs(leaf - clean)


def rounding(dtype: Any) -> float:
    """How far another batch may move an output of ``dtype``, as a share of the output.

    >>> rounding(jnp.float32) < 5e-7
    True
    """
    return float(jnp.finfo(dtype).eps) * _ROUNDED.get(jnp.dtype(dtype).itemsize, 1.0)


def flips(victim: Victim, samples: Samples, x: Array) -> tuple[Array, Info]:
    """Whether the criterion at some points exceeds its slack.

    Args:
      victim: the model and the criterion.
      samples: with their labels and clean outputs.
      x: ``[n, *shape]`` points.

    Returns:
      ``[n]`` booleans, and the :class:`~wdjax.core.Info` of the forward pass.

    Cost: one forward pass.

    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> flips(Victim(lambda x: x, losses.margin), Samples(x, y, None, x), x[:, ::-1])[0].tolist()
    [True, True]
    """
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
      x: ``[n, *shape]``, the present points.
      y: ``[n]`` labels.
      choose: logits at ``x`` ``->`` rivals ``[n, m]``.
      advance: ``(x, gradient) -> candidates``, all ``[n, *shape]``.

    Returns:
      The best :class:`Move`, the logits at ``x`` and the :class:`~wdjax.core.Info` of the step.

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
    """Every class but the label, beginning after it.

    Args:
      logits: ``[n, K]``
      y: ``[n]`` labels.

    Returns:
      ``[n, K - 1]`` classes.

    >>> all_rivals(jnp.zeros((2, 3)), jnp.array([0, 1])).tolist()
    [[1, 2], [2, 0]]
    """
    classes = logits.shape[-1]
    after = y.astype(jnp.int32)[None] + jnp.arange(1, classes, dtype=jnp.int32)[:, None]
    return jnp.where(after < classes, after, after - classes).T


def top_rivals(logits: Array, y: Array, count: int) -> Array:
    """The classes of largest logit other than the label, largest first.

    Args:
      logits: ``[n, K]``
      y: ``[n]`` labels.
      count: how many; at most ``K - 1`` are returned.

    Returns:
      ``[n, count]`` classes.

    >>> top_rivals(jnp.array([[0.5, 0.1, 0.3, 0.2]]), jnp.array([0]), 2).tolist()
    [[2, 3]]
    """
    count = min(count, logits.shape[-1] - 1)
    others = jnp.where(jax.nn.one_hot(y, logits.shape[-1], dtype=bool), -jnp.inf, logits)
    return jax.lax.top_k(others, count)[1].astype(y.dtype)


def are_logits(out: PyTree) -> bool:
    """Whether a model's output is one array ``[n, K]`` with K >= 2."""
    return getattr(out, "ndim", 0) == 2 and out.shape[-1] >= 2


def need_logits(name: str, out: PyTree) -> None:
    """Raises unless a model's output is logits ``[n, K]`` with K >= 2.

    Args:
      name: of the attack, for the message.
      out: the output.

    >>> need_logits("WDA", jnp.zeros((5, 1)))
    Traceback (most recent call last):
      ...
    ValueError: WDA follows single classes and needs logits [n, K], got (5, 1); use Walk, FMN or ...
    """
    if not are_logits(out):
        raise ValueError(
            f"{name} follows single classes and needs logits [n, K], got "
            f"{jax.tree.map(jnp.shape, out)}; use Walk, FMN or PDPGD, which follow a criterion, or "
            "PGD with a loss of your own."
        )


def shortest(ball: Lp, x: Array) -> float:
    """The shortest step that is not lost in the rounding of points.

    Args:
      ball: in whose norm the step is measured, and whose box has the points.
      x: ``[n, *shape]`` points.

    >>> shortest(Lp(2), jnp.zeros((1, 4))) == 8 * 2**-23
    True
    """
    return 4 * ball.width * float(jnp.finfo(x.dtype).eps) * x[0].size ** (1 / ball.norm)


_SHARE = {1: 0.25, 2: 0.4, math.inf: 0.02 / (8 / 255)}
_ABSOLUTE = {1: 0.8, 2: 0.2, math.inf: 0.02}


def default_step(ball: Lp, eps: Array | None) -> Array | float:
    """The paper's steps as a share of ``eps``: 0.02 for eps 8/255 (inf), 0.2 for eps 0.5 (2).

    Args:
      ball: its norm decides, without ``eps`` its box too.
      eps: ``[n]`` radii. Without them the step is 0.02 or 0.2 itself, in widths of the box.

    Returns:
      ``[n]`` lengths in the ball's norm, or one for all.

    Differs: the paper has no step for norm 1; ours were the best on two nets.

    >>> default_step(Lp(2), jnp.array([0.5])).tolist(), default_step(Lp(2), None)
    ([0.20000000298023224], 0.2)
    """
    return _ABSOLUTE[ball.norm] * ball.width if eps is None else _SHARE[ball.norm] * eps


def hold(over: Array, state: PyTree, moved: PyTree) -> PyTree:
    """Keeps the state of samples that are finished.

    Args:
      over: ``[n]`` booleans.
      state: a pytree of ``[n, ...]`` leaves.
      moved: the state after a step, of the same structure.

    Returns:
      ``state`` where ``over`` is True, else ``moved``.

    >>> hold(jnp.array([True, False]), jnp.zeros((2, 1)), jnp.ones((2, 1))).tolist()
    [[0.0], [1.0]]
    """

    def keep(old: Array, new: Array) -> Array:
        return jnp.where(norms.spread(over, old), old, new)

    return jax.tree.map(keep, state, moved)


class Best(NamedTuple):
    """The iterate of largest criterion so far, per sample."""

    x: Array
    value: Array


def no_best(x: Array, wanted: bool) -> Best | None:
    """The initial :class:`Best`, of criterion -inf.

    Args:
      x: ``[n, *shape]`` points.
      wanted: whether the best iterate is wanted; None is returned if it is not.

    >>> no_best(jnp.zeros((1, 2)), True).value.tolist(), no_best(jnp.zeros((1, 2)), False)
    ([-inf], None)
    """
    return None if not wanted else Best(x, jnp.full(len(x), -jnp.inf, x.dtype))


def keep_best(best: Best | None, x: Array, value: Array, out: PyTree) -> Best | None:
    """Updates :class:`Best` with new points.

    A point whose output is not finite is never taken, since it would not count when measured.

    Args:
      best: so far; None, which is returned, if it is not wanted.
      x: ``[n, *shape]`` points.
      value: ``[n]``, the criterion there.
      out: the model's output there, ``[n, ...]`` leaves.

    >>> best, x = no_best(jnp.zeros((2, 1)), True), jnp.ones((2, 1))
    >>> keep_best(best, x, jnp.array([0.5, 0.5]), jnp.array([[1.0], [jnp.inf]])).x.tolist()
    [[1.0], [0.0]]
    """
    if best is None:
        return None
    value = value.astype(best.value.dtype)
    better = (value > best.value) & jnp.isfinite(value) & norms.finite(out)
    return Best(jnp.where(norms.spread(better, x), x, best.x), jnp.where(better, value, best.value))
