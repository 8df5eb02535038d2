"""The moves that first-order attacks share: a dual-norm step, and the best step of many rivals."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wdjax import losses, norms
from wdjax.core import Info

_AT_ONCE = 10
"""Rivals tried in one go; more are scanned in chunks, so that memory does not grow with K."""


class Move(NamedTuple):
    """The best of several candidate steps, per sample."""

    margin: jax.Array
    """``z_rival - z_y`` at ``x``."""
    x: jax.Array
    rival: jax.Array
    logits: jax.Array


def margin_gradient(model, x, y, rival):
    """Logits ``[n, K]`` and the gradient ``[n, *shape]`` of ``z_rival - z_y``."""
    logits, pullback = jax.vjp(model, x)
    return logits, _towards(pullback, logits, y, rival)


def _towards(pullback, logits, y, rival):
    one_hot = functools.partial(jax.nn.one_hot, num_classes=logits.shape[-1], dtype=logits.dtype)
    return pullback(one_hot(rival) - one_hot(y))[0]


def best_move(model, x, y, choose, advance):
    """Steps towards every chosen rival and keeps the candidate of largest margin to its own rival.

    Args:
      model: ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` current points.
      y: ``[n]`` labels.
      choose: logits at ``x`` ``->`` rivals ``[n, m]``.
      advance: ``(x, gradient) -> candidates``, all ``[n, *shape]``.

    Returns:
      The logits at ``x``, the winning :class:`Move`, and m.

    Cost: 1 + m forward and m backward passes; memory for at most 10 candidates a sample.
    """
    logits, pullback = jax.vjp(model, x)
    rivals = choose(logits).T
    sample = jnp.arange(len(y))

    def attempt(rivals):
        gradients = jnp.stack([_towards(pullback, logits, y, rival) for rival in rivals])
        tried = jax.vmap(functools.partial(advance, x))(gradients)
        count = len(rivals)
        after = model(tried.reshape(count * len(y), *x.shape[1:])).reshape(count, len(y), -1)
        margin = jax.vmap(losses.targeted_margin, (0, None, 0))(after, y, rivals)
        winner = jnp.argmax(margin, axis=0)
        taken = [leaf[winner, sample] for leaf in (margin, tried, rivals, after)]
        return Move(*taken)

    def attempt_more(best, rivals):
        move = attempt(rivals)
        better = move.margin > best.margin
        kept = [jnp.where(norms.spread(better, new), new, old) for new, old in zip(move, best)]
        return Move(*kept), None

    count = len(rivals)
    best = attempt(rivals[:_AT_ONCE])
    if count > _AT_ONCE:
        missing = -count % _AT_ONCE
        rest = jnp.concatenate([rivals[_AT_ONCE:], jnp.repeat(rivals[-1:], missing, axis=0)])
        best, _ = jax.lax.scan(attempt_more, best, rest.reshape(-1, _AT_ONCE, len(y)))
    return logits, best, count


def all_rivals(logits, y):
    """Every class but ``y``: ``[n, K - 1]``."""
    classes = logits.shape[-1]
    return (y[:, None] + jnp.arange(1, classes, dtype=y.dtype)) % classes


def top_rivals(logits, y, count):
    """The ``count`` largest classes other than ``y``, largest first: ``[n, count]``."""
    count = min(count, logits.shape[-1] - 1)
    others = jnp.where(jax.nn.one_hot(y, logits.shape[-1], dtype=bool), -jnp.inf, logits)
    return jax.lax.top_k(others, count)[1]


def default_step(eps, norm, step_size):
    """The given step size, or the paper's share of the budget: 0.02 of 8/255 (inf), 0.2 of 0.5 (2).

    The paper has no value for norm 1; a quarter was best on two nets.
    """
    share = {math.inf: 0.02 / (8 / 255), 2: 0.4, 1: 0.25}[norm]
    return share * eps if step_size is None else step_size


def info(margin, gradients, forwards):
    """An :class:`~wdjax.core.Info` row with the same pass counts for every sample."""
    count = functools.partial(jnp.full, margin.shape, dtype=jnp.int32)
    return Info(margin, count(gradients), count(forwards))


class Best(NamedTuple):
    """The iterate of largest margin so far, per sample."""

    x: jax.Array
    margin: jax.Array


def no_best(x, iterate):
    """Where the search for the best iterate begins; None if the last one is wanted."""
    return None if iterate == "last" else Best(x, jnp.full(len(x), -jnp.inf, x.dtype))


def keep_best(best, x, margin):
    """The better of :class:`Best` and the points ``x``, if anyone looks for it."""
    if best is None:
        return None
    better = margin > best.margin
    return Best(
        jnp.where(norms.spread(better, x), x, best.x), jnp.where(better, margin, best.margin)
    )


def check_count(name, value, least=1):
    """Checks a static count at the front door of a factory."""
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")


def check_order(order):
    """Checks a Wasserstein order."""
    if order not in (1, 2, math.inf):
        raise ValueError(f"order must be 1, 2 or inf, got {order!r}.")


def check_iterate(iterate):
    """Checks the choice between the best and the last iterate."""
    if iterate not in ("best", "last"):
        raise ValueError(f"iterate must be 'best' or 'last', got {iterate!r}.")


def check_box(box):
    """Checks a box of valid inputs, or None for none."""
    if box is not None and not (len(box) == 2 and box[0] < box[1]):
        raise ValueError(f"box must be (low, high) with low < high, or None; got {box!r}.")
