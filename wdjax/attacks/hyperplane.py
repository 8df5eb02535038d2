r"""The nearest point of a hyperplane inside a box: l1, l2 and linf, exactly."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import loops, norms
from wdjax.checks.forward_mode import FORWARD, forward_only
from wdjax.core import Array


class _Line(NamedTuple):
    """One sample, mirrored so that every coordinate moves upwards: ``[d]`` leaves."""

    gain: Array
    """``|w_i|``: the change of the affine function for a unit of the coordinate."""
    room: Array
    """How far the coordinate may move in the box; 0 where its gain is 0."""
    full: Array
    """``gain * room``"""


def project(
    z: Array,
    normal: Array,
    gap: Array,
    norm: float,
    box: tuple[float, float] | None = None,
) -> Array:
    r"""The l_r-nearest point of a hyperplane inside a box.

    Solves ``min ||u - z||_r`` subject to ``<normal, u - z> + gap = 0`` and ``low <= u <= high``.
    Every coordinate moves so that the gap closes. For norms inf and 2 it moves by ``min(t v_i,
    room_i)`` with ``v_i = 1`` and ``v_i = |w_i|``, where ``t`` solves an increasing, concave,
    piecewise linear equation by Newton's method from 0, in finitely many steps. For norm 1 the
    coordinates with ``|w_i|`` above a threshold, found by bisection of the float's bits, move to
    the edge of the box, and those at the threshold share the rest.

    Args:
      z: ``[n, *shape]`` points inside the box.
      normal: ``[n, *shape]``, w.
      gap: ``[n]``, the value of the affine function at ``z``.
      norm: 1, 2 or inf.
      box: ``(low, high)`` numbers, or None.

    Returns:
      ``[n, *shape]`` points of the box. If the hyperplane misses the box, its corner nearest to it;
      if the normal is 0, ``z``. Where the nearest point is not unique (l1, linf), one of them.

    Cost: ``O(d)`` a Newton step, of which about 5 are usual; for norm 1 ``O(d)`` per bit of a
      float.

    Source: Croce and Hein [fab2020], equations 4 to 7.

    >>> z, w = jnp.array([[0.5, 0.9]]), jnp.array([[1.0, 1.0]])
    >>> project(z, w, jnp.array([-0.35]), 2, (0.0, 1.0)).tolist()
    [[0.75, 1.0]]
    """
    norms.check_norm(norm)
    rows, slopes = z.reshape(len(z), -1), normal.reshape(len(z), -1)
    forward = -jnp.sign(gap)[:, None] * slopes
    room = jnp.full_like(rows, jnp.inf)
    if box is not None:
        room = jnp.where(forward > 0, box[1] - rows, rows - box[0])
    gain = jnp.abs(forward)
    room = jnp.where(gain > 0, jnp.maximum(room, 0.0), 0.0)
    full = jnp.where(gain > 0, gain * room, 0.0)
    solve = {1: _fill, 2: _follow, jnp.inf: _raise}[norm]
    length = jax.vmap(solve)(_Line(gain, room, full), jnp.abs(gap))
    moved = (rows + jnp.sign(forward) * length).reshape(z.shape)
    moved = moved if box is None else jnp.clip(moved, *box)
    instead = f"another attack, such as attacks.APGD, or {FORWARD}"
    return forward_only(moved, instead, "the steps of FAB and SLP")


def _raise(line: _Line, need: Array) -> Array:
    """``[d]``: the move for norm inf: all coordinates move equally far, up to their room."""
    return _newton(line, jnp.where(line.gain > 0, 1.0, 0.0).astype(need.dtype), need)


def _follow(line: _Line, need: Array) -> Array:
    """``[d]``: the move for norm 2, in which coordinates move in proportion to their gain."""
    return _newton(line, line.gain, need)


def _newton(line: _Line, speed: Array, need: Array) -> Array:
    """``[d]``: ``min(t speed, room)`` with the t at which gain times move adds up to
    ``need``.

    Each iteration solves for t with the coordinates that have not used up their room; it ends when
    an iteration uses up no further coordinate, after at most d iterations. If all room together
    gains less than ``need``, the coordinates take all of it.
    """

    def solve(free: Array) -> Array:
        rest = need - jnp.sum(jnp.where(free, 0.0, line.full))
        rate = jnp.sum(jnp.where(free, line.gain * speed, 0.0))
        return jnp.maximum(rest, 0.0) / jnp.where(rate > 0, rate, 1.0)

    def further(carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        free, time, _ = carried
        time = jnp.maximum(time, solve(free))
        still = free & (time * speed < line.room)
        return still, time, jnp.any(still != free)

    begin = (speed > 0, jnp.zeros_like(need), jnp.array(True))
    free, time, _ = loops.while_loop(lambda carried: carried[2], further, begin)
    return jnp.where(free, time * speed, line.room)


def _fill(line: _Line, need: Array) -> Array:
    """``[d]``: the move for norm 1: coordinates of largest gain move first.

    The gain at which the coordinates suffice for ``need`` is found by bisection on the bits of the
    floats; coordinates of equal gain there share the rest.
    """
    whole = np.dtype(f"int{8 * line.gain.dtype.itemsize}")
    order = jax.lax.bitcast_convert_type(line.gain, whole)  # Monotone for non-negative floats.

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + (high - low) // 2
        enough = jnp.sum(jnp.where(order > middle, line.full, 0.0)) >= need
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    # Invariant: gains above ``low`` suffice together, those above ``high`` do not.
    ends = jnp.zeros((), whole), jnp.max(order)
    low, high = loops.fori_loop(0, 8 * whole.itemsize - 1, halve, ends)
    most, last = order > high, (order > low) & (order <= high)
    rest = jnp.maximum(need - jnp.sum(jnp.where(most, line.full, 0.0)), 0.0)
    tied = _Line(*(jnp.where(last, leaf, 0.0) for leaf in line))
    return jnp.where(most, line.room, _raise(tied, rest))
