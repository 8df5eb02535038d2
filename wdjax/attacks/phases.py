"""The schedule of an Auto-PGD run: random start, radii of its phases, and checkpoints."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from wdjax import norms
from wdjax.balls import Lp
from wdjax.core import Array
from wdjax.xla_cpu import drawn

_LAST = 0.4
"""Share of a run's steps in the last phase, of radius eps; the other phases share the rest."""


class PhaseSchedule(NamedTuple):
    """``[steps + 1]`` arrays, one entry for each evaluated point."""

    first: np.ndarray
    """Whether a phase begins here."""
    width: np.ndarray
    """The radius, as a multiple of eps."""
    window: np.ndarray
    """At checkpoints, the number of steps since the last one or the phase's start; 0 elsewhere."""


def schedule(steps: int, widths: tuple[float, ...]) -> PhaseSchedule:
    """The phases of a run of ``steps``, one for each width; phases without a step are left out.

    >>> schedule(9, (3.0, 1.0)).width.tolist()
    [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    """
    points, early = steps + 1, len(widths) - 1
    lengths = [int((1 - _LAST) * points / max(1, early))] * early
    lengths.append(points - sum(lengths))
    firsts, radii, checks = [], [], []
    for width, length in zip(widths, lengths):
        if length:
            firsts.append(np.arange(length) == 0)
            radii.append(np.full(length, width, np.float32))
            checks.append(windows(length - 1))
    return PhaseSchedule(np.concatenate(firsts), np.concatenate(radii), np.concatenate(checks))


def random_start(ball: Lp, x: Array, radius: Array, keys: Array) -> Array:
    """A random start for each sample: uniform in the ball, but sparse for norm 1.

    Uniform points of an l1 ball in high dimension differ little from its centre in any coordinate.
    """
    low, high = ball.box or (-math.inf, math.inf)
    sparse = ball.norm == 1 and math.isfinite(high - low)

    def draw(key: Array) -> Array:
        if sparse:
            return (high - low) * drawn(jax.random.normal, key, x.shape[1:], x.dtype)
        return ball.noise(key, x.shape[1:], x.dtype)

    noise = jax.vmap(draw)(keys)
    return ball.project(x + (noise if sparse else norms.spread(radius, x) * noise), x, radius)


def check_widths(widths: Any) -> tuple[float, ...] | None:
    """Checks the radii of phases: at least 1, the last equal to 1; or None."""
    if widths is None:
        return None
    try:
        known = tuple(float(width) for width in widths)
    except (TypeError, ValueError):
        known = ()
    if not known or known[-1] != 1 or not all(1 <= width < math.inf for width in known):
        raise ValueError(
            f"widths must be radii in eps, at least 1 and the last of them 1, such as (3, 2, 1), "
            f"got {widths!r}."
        )
    return known


def windows(steps: int) -> np.ndarray:
    """``[steps + 1]``: at checkpoints, the number of steps since the last one; 0 elsewhere.

    >>> np.flatnonzero(windows(100)).tolist()
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    found = np.zeros(steps + 1, np.int32)
    length, less, least = (max(1, int(share * steps)) for share in (0.22, 0.03, 0.06))
    step = length
    while step <= steps:
        found[step] = length
        length = max(length - less, least)
        step += length
    return found
