"""Certifies a data set by ever tighter methods, until every sample is decided or the time is over.

Every sample that is still open takes the next rung, the one nearest to a proof first: intervals,
CROWN, in l2 SDP-CROWN, a short attack (whoever falls needs no proof), optimised slopes, and branch
and bound. The first two are finished whatever the time.
"""

import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from wdjax import parallel
from wdjax.bounds.moved_mass import moves_mass
from wdjax.bounds.region import Domain
from wdjax.certify import branch, pointwise
from wdjax.core import Array, Classifier

Numbers = npt.NDArray[Any]
State = dict[str, Any]
"""``low`` ``[n, K]``; ``tried``, the number of rungs taken, and ``ended``, an index in
``branch.ENDS``, ``[n]``; ``points`` ``[n, *shape]``, misclassified ones of falsified samples; and
the seconds ``spent``."""

_SURE = 2
"""The number of rungs that are taken even if the time is over."""
_BRANCHED = 8
"""The number of samples that branch and bound works on between two checkpoints."""
FALSIFIED = tuple(branch.ENDS.index(end) for end in ("misclassified", "flipped"))


class Climb(NamedTuple):
    """Which samples are to be certified, within which radii, in how many seconds."""

    model: Classifier
    x: Array
    y: Array
    eps: Array
    """``[n]``"""
    scale: Array | None
    """``[n, *shape]``: of which the radii are multiples, or None."""
    domain: Domain
    size: int
    """The number of samples on all devices at once."""
    seconds: float
    mesh: Any

    @property
    def rungs(self) -> tuple[str, ...]:
        coupled = not moves_mass(self.domain.norm) and self.domain.norm == 2
        return "interval", "crown", *(("sdp-crown",) if coupled else ()), "attack", "alpha", "bab"


def first_climb_state(ask: Climb) -> State:
    """The state before the first rung."""
    (_, classes), n = jax.eval_shape(ask.model, ask.x[:1]).shape, len(ask.y)
    none = np.zeros(n, np.int32)
    low = np.full((n, classes), -np.inf)
    return {"low": low, "tried": none, "ended": none, "points": np.array(ask.x), "spent": 0.0}


def is_open(ask: Climb, state: State) -> npt.NDArray[np.bool_]:
    """``[n]``: neither verified, nor falsified, nor at the end of all rungs."""
    left = ~(np.min(state["low"], axis=1) > 0) & ~np.isin(state["ended"], FALSIFIED)
    return np.asarray(left & (np.asarray(state["tried"]) < len(ask.rungs)))


def finished(ask: Climb, state: State) -> bool:
    """Whether every sample is decided, or the time is over and the first rungs are taken."""
    left = is_open(ask, state)
    over = float(state["spent"]) >= ask.seconds
    return not left.any() or bool(over and np.all(np.asarray(state["tried"])[left] >= _SURE))


def turn(ask: Climb, state: State) -> State:
    """One batch of one rung."""
    began, left = time.monotonic(), is_open(ask, state)
    low, tried, ended, points = (np.array(state[k]) for k in ("low", "tried", "ended", "points"))
    number = int(np.min(tried[left]))
    name, here = ask.rungs[number], np.flatnonzero(left & (tried == number))
    # One width for the whole rung, so that it is compiled once.
    reached = len(here) + int(np.sum(tried > number))
    width = min(ask.size, 2 ** math.ceil(math.log2(reached)))
    here = here[np.argsort(-np.min(low[here], axis=1), kind="stable")]
    here = here[: _BRANCHED if name == "bab" else width]
    part: Any = tuple(a if a is None else a[here] for a in (ask.x, ask.y, ask.eps, ask.scale))
    x, y, eps, scale = part
    if name == "attack":
        ended[here], points[here] = _attacked(ask, part)
    elif name == "bab":
        share = max(ask.seconds - float(state["spent"]), 0.0) / int(left.sum())
        found = pointwise.branched(
            ask.model, x, y, eps, scale, low[here], ask.domain, max(share, 1e-3), ask.mesh
        )
        low[here], ended[here], points[here] = found
    else:
        options = ("ball", ask.domain), ("method", name)
        full = parallel.pad(part, width)
        bounds = pointwise.in_batches(pointwise.bounds, options, ask.model, full, width, ask.mesh)
        low[here] = np.maximum(low[here], bounds[: len(here)])
    tried[here] += 1
    spent = float(state["spent"]) + time.monotonic() - began
    return {"low": low, "tried": tried, "ended": ended, "points": points, "spent": spent}


def _attacked(ask: Climb, part: tuple[Any, ...]) -> tuple[Numbers, Numbers]:
    """How a short attack on each sample ended, and its points: ``[m]`` and ``[m, *shape]``.

    ``part`` are samples, labels, radii and scales.
    """
    search = branch.BranchAndBound(ask.model, ask.domain, 0.0)
    ended, points = list[int](), list[Numbers]()
    for i in range(len(part[1])):
        one: Any = (None if leaf is None else leaf[i : i + 1] for leaf in part)
        point, label, radius, scale = one
        found = search.broken(point, label, float(radius[0]), scale)
        there, end = (np.asarray(point[0]), branch.ENDS[0]) if found is None else found
        ended.append(branch.ENDS.index(end))
        points.append(there)
    return np.array(ended, np.int32), np.stack(points)


def ends(ask: Climb, state: State) -> Numbers:
    """``[n]`` indices in ``branch.ENDS``: samples that are open still ran out of time."""
    waiting = is_open(ask, state)
    return np.where(waiting, branch.ENDS.index("time"), np.asarray(state["ended"]))


def decided(ask: Climb, state: State) -> tuple[str, ...]:
    """The rung that verified or falsified each sample, empty for what is unknown."""
    known = (np.min(state["low"], axis=1) > 0) | np.isin(state["ended"], FALSIFIED)
    return tuple(
        ask.rungs[int(tried) - 1] if found else "" for tried, found in zip(state["tried"], known)
    )
