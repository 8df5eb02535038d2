r"""Branch and bound over boxes of inputs, for functions of few inputs.

A box is cut by what its linear bounds say of the inputs of a violation, and halved along the input
that loosens them most, until every part is proved or the time is over. No part is dropped: the
bound is the least over all of them.

Source: Wang et al. [wang2018]; the cuts, Zhou et al. [zhou2025].
"""

import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import distinct
from wdjax.bounds import linear_outputs
from wdjax.bounds.domain import Array
from wdjax.bounds.linear_outputs import Objectives
from wdjax.certify import falsify
from wdjax.certify.specification import Specification
from wdjax.core import Classifier
from wdjax.proofs.recorder import CaseRecord

Numbers = npt.NDArray[Any]

WIDTH = 128
"""Number of boxes that are bounded at once, on a CPU."""
_CUTS, _MEANS = 3, 8
"""Rounds of cuts, and steps to the best weights of a member's rows."""
_BYTES = 2**30
"""Memory for all open boxes; beyond it the search ends."""


class Outcome(NamedTuple):
    """What a search for a proof found."""

    low: float
    """The least bound over all parts: above 0 if the property is proved."""
    leaves: int
    """Number of boxes that were bounded."""
    witness: falsify.Witness | None
    ended: str


class _CutBoxes(NamedTuple):
    """Boxes ``[L, *shape]`` after one turn."""

    low: Any
    """``[L]`` bounds: the least over members of the largest over their rows."""
    lower: Any
    upper: Any
    """Ends of the box, cut."""
    gain: Any
    """``[L, N]``: which input to halve, the largest first."""
    weights: Any
    """``[L, R]``: weights of the rows whose mean gave each member's bound."""
    points: Any
    """``[L, *shape]``: where the linear bound of the weakest member is least."""


@distinct.jit
def _turn(
    model: Classifier, rows: Objectives, member: Array, lower: Array, upper: Array
) -> _CutBoxes:
    """Bounds, cuts and scores ``[L, *shape]``; ``member``, ``[M, R]``, as in ``Forbidden``."""
    low, a, linear = linear_outputs.lower(model, rows, lower, upper, "crown")
    shape, count = lower.shape, len(lower)
    ends = lower.reshape(count, -1), upper.reshape(count, -1)
    best, inner, outer, steep, weights = jax.vmap(
        lambda needed: jax.vmap(lambda *box: _member(needed, *box))(low, linear, a, *ends),
        out_axes=1,
    )(member)
    open_ = best <= 0
    new_lower = jnp.min(jnp.where(open_[..., None], inner, jnp.inf), axis=1)
    new_upper = jnp.max(jnp.where(open_[..., None], outer, -jnp.inf), axis=1)
    kept = jnp.any(open_, axis=1)[:, None]
    new_lower, new_upper = (jnp.where(kept, *pair) for pair in zip((new_lower, new_upper), ends))
    size = jnp.sum(jnp.where(open_[..., None], jnp.abs(steep), 0.0), axis=1)
    worst = jnp.argmin(best, axis=1)
    toward = jnp.take_along_axis(steep, worst[:, None, None], axis=1)[:, 0]
    points = jnp.where(toward > 0, new_lower, new_upper)
    return _CutBoxes(
        jnp.min(best, axis=1),
        new_lower.reshape(shape),
        new_upper.reshape(shape),
        jnp.sqrt(size) * (new_upper - new_lower),
        jnp.sum(jnp.where(member, weights, 0.0), axis=1),
        points.reshape(shape),
    )


def _member(
    needed: Array, low: Array, linear: Array, a: Array, lower: Array, upper: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """What the linear bounds of the rows ``needed``, ``[R]`` booleans, say of one box, ``[N]``.

    A violation has all of these rows at most 0. Row r is at least ``linear + sum |a| d``, with
    ``d`` the distances from the corner where that is least. So ``d <= -linear / |a|``, which cuts
    the box; in the cut box the corner's value is higher, and so on. A weighted mean of the rows is
    bounded too.

    Args:
      needed: ``[R]``
      low: ``[R]`` lower bounds over the box.
      linear: ``[R]`` the least values over the box of linear functions below the rows.
      a: ``[R, N]`` the coefficients of these.
      lower: ``[N]``
      upper: ``[N]``

    Returns:
      A lower bound of the largest of these rows, inf for no rows; the ends of the cut box; the
      coefficients ``[N]`` of a weighted mean; and the weights ``[R]`` that gave the bound.
    """
    unit = 32 * float(jnp.finfo(low.dtype).eps) * (a.shape[1] + a.shape[0] + 2)
    reach = jnp.maximum(jnp.abs(lower), jnp.abs(upper))
    steep = jnp.where(needed[:, None], jnp.abs(a), 0.0)
    size = steep @ reach
    # The planes a . x + level bound the rows from below.
    level = linear - jnp.sum(jnp.where(a > 0, a * lower, a * upper), axis=1)
    level = level - unit * (jnp.abs(linear) + size)
    inner, outer = lower, upper
    for _ in range(_CUTS):
        least = jnp.sum(jnp.where(a > 0, a * inner, a * outer), axis=1) + level - unit * size
        room = jnp.where(needed & (least <= 0), -least, 0.0)[:, None]
        far = jnp.where(steep > 0, room / jnp.where(steep > 0, steep, 1.0), jnp.inf)
        far = jnp.where(jnp.isfinite(far) & needed[:, None], far, jnp.inf)
        far = far * (1 + unit) + unit * reach
        high = jnp.min(jnp.where(a > 0, inner + far, jnp.inf), axis=0)
        down = jnp.max(jnp.where(a < 0, outer - far, -jnp.inf), axis=0)
        inner, outer = jnp.maximum(inner, down), jnp.minimum(outer, high)

    def mean(weight: Array) -> tuple[Array, Array, Array]:
        toward = weight @ jnp.where(needed[:, None], a, 0.0)
        point = jnp.where(toward > 0, inner, outer)
        total = weight @ jnp.where(needed, level, 0.0)
        slack = unit * (weight @ (jnp.where(needed, jnp.abs(level), 0.0) + size))
        return jnp.sum(toward * point) + total - slack, toward, a @ point + level

    least = jnp.sum(jnp.where(a > 0, a * inner, a * outer), axis=1) + level - unit * size
    alone = jnp.where(needed, jnp.maximum(low, least), -jnp.inf)
    best, weights = jnp.max(alone), (jnp.arange(len(low)) == jnp.argmax(alone)).astype(low.dtype)
    scale = jnp.max(jnp.where(needed, jnp.abs(low), 0.0))
    tilt = jnp.where(needed, 0.0, -jnp.inf) + 4 * jnp.where(needed, low, 0.0) / (scale + 1e-30)
    for _ in range(_MEANS):
        weight = jax.nn.softmax(tilt)
        found, toward, value = mean(weight)
        best, weights = jnp.fmax(best, found), jnp.where(found > best, weight, weights)
        largest = jnp.max(jnp.where(needed, jnp.abs(value), 0.0))
        tilt = tilt + jnp.where(needed, value, 0.0) / (largest + 1e-30)
    weight = jax.nn.softmax(tilt)
    found, toward, value = mean(weight)
    best, weights = jnp.fmax(best, found), jnp.where(found > best, weight, weights)
    empty = jnp.any(inner > outer)
    best = jnp.where(empty, jnp.maximum(best, jnp.finfo(low.dtype).tiny), best)
    best = jnp.where(jnp.any(needed), best, jnp.inf)
    toward = jnp.where(jnp.isfinite(toward), toward, 0.0)
    return best, inner, outer, toward, weights


class Halving:
    """Proves or refutes one specification on one box."""

    def __init__(
        self,
        model: Classifier,
        spec: Specification,
        rows: Objectives,
        member: Array,
        box: tuple[Numbers, Numbers],
        record: CaseRecord | None = None,
    ) -> None:
        self.model, self.spec, self.rows, self.member, self.box = model, spec, rows, member, box
        self.width, self.record = WIDTH, record

    def run(self, lower: Numbers, upper: Numbers, until: float) -> Outcome:
        """Searches in the box ``[lower, upper]``, which contains ``self.box``, until the clock
        ``time.monotonic()`` reads ``until``; takes at least one turn.

        Witnesses are looked for in ``self.box``.
        """
        begun = None if self.record is None else self.record.tree()
        open_ = _Open(lower[None], upper[None], np.full(1, -math.inf), np.array([begun]))
        closed, leaves, stuck = math.inf, 0, _none(lower)
        most = _BYTES // (2 * lower.nbytes + 8)
        while len(open_.low) and (not leaves or time.monotonic() < until):
            if len(open_.low) + len(stuck.low) > most:
                return Outcome(min(closed, _least(open_, stuck)), leaves, None, "memory")
            batch, open_ = open_.take(self.width)
            count = len(batch.low)
            blank = self.width - count
            ends = (np.concatenate([e, np.repeat(e[:1], blank, axis=0)]) for e in batch[:2])
            found = jax.device_get(_turn(self.model, self.rows, self.member, *ends))
            found = _CutBoxes(*(part[:count] for part in found))
            leaves += count
            low = np.fmax(found.low, batch.low)  # What is NaN is not known.
            left = ~(low > 0) if self.record is None else self._refused(batch, low, found)
            closed = min(closed, float(np.min(low[~left], initial=math.inf)))
            if not np.any(left):
                continue
            broken = self._broken(_CutBoxes(*(part[left] for part in found)))
            if broken is not None:
                return Outcome(float(np.min(low)), leaves, broken, "violated")
            parts = _Open(found.lower[left], found.upper[left], low[left], batch.node[left])
            gain = found.gain[left]
            if self.record is not None:
                parts, stays = self._cut(_Open(*(part[left] for part in batch)))
                gain = gain[stays]
            halves, whole = _halved(parts, gain, self.width - len(open_.low))
            open_, stuck = open_.joined(halves), stuck.joined(whole)
        ended = "closed" if not len(open_.low) else "time"
        if len(stuck.low) and ended == "closed":
            ended = "nothing to split"
        return Outcome(min(closed, _least(open_, stuck)), leaves, None, ended)

    def _cut(self, boxes: "_Open") -> tuple["_Open", npt.NDArray[np.bool_]]:
        """Open boxes cut by the checker of the proof; ``[L]``: in which something is left."""
        assert self.record is not None
        node, low, high = self.record.cut(boxes.node.tolist())
        shape = boxes.lower.shape
        lower = np.maximum(boxes.lower, low.reshape(shape))
        upper = np.minimum(boxes.upper, high.reshape(shape))
        stays = np.all((lower <= upper).reshape(len(lower), -1), axis=1)
        parts = _Open(lower, upper, np.minimum(boxes.low, 0.0), np.array(node))
        if not np.all(stays):
            self.record.closed(parts.node[~stays].tolist(), np.zeros((np.sum(~stays), 0)))
        return _Open(*(part[stays] for part in parts)), stays

    def _refused(self, batch: "_Open", low: Numbers, found: _CutBoxes) -> npt.NDArray[np.bool_]:
        """``[L]``: which boxes the bounds or the checker of the proof do not close."""
        assert self.record is not None
        left, claimed = ~(low > 0), np.flatnonzero(low > 0)
        if len(claimed):
            left[claimed] = ~self.record.closed(
                batch.node[claimed].tolist(), found.weights[claimed]
            )
        return np.asarray(left)

    def _broken(self, parts: _CutBoxes) -> falsify.Witness | None:
        """A violation at the centres of open parts or where their bounds are least."""
        centers = 0.5 * parts.lower + 0.5 * parts.upper
        blank = 2 * self.width - 2 * len(centers)
        points = np.concatenate([parts.points, centers, np.repeat(centers[:1], blank, axis=0)])
        return falsify.witness(self.model, self.spec, *self.box, points.astype(centers.dtype))


class _Open(NamedTuple):
    """Open boxes with their bounds."""

    lower: Numbers
    upper: Numbers
    low: Numbers
    node: Numbers
    """The boxes in a proof, or None."""

    def take(self, width: int) -> tuple["_Open", "_Open"]:
        """The ``width`` boxes with the least bounds, and the rest."""
        if len(self.low) <= width:
            return self, _Open(*(part[:0] for part in self))
        order = np.argpartition(self.low, width - 1)
        return tuple(  # type: ignore[return-value]
            _Open(*(part[these] for part in self)) for these in (order[:width], order[width:])
        )

    def joined(self, other: "_Open") -> "_Open":
        return _Open(*(np.concatenate(pair) for pair in zip(self, other)))


def _none(like: Numbers) -> _Open:
    return _Open(like[None][:0], like[None][:0], np.zeros(0), np.zeros(0, object))


def _least(*parts: _Open) -> float:
    return min(float(np.min(part.low, initial=math.inf)) for part in parts)


def _halved(boxes: _Open, gain: Numbers, room: int) -> tuple[_Open, _Open]:
    """Halves boxes, each along its input of the largest ``gain``, ``[L, N]``, over and over until
    there are more than half of ``room``. There may be no boxes: a checker may have closed them all.

    Returns the halves, and the boxes that are too thin to be halved in floats. Both halves contain
    their common face, so that no input lies between them.
    """
    shape = boxes.lower.shape[1:]
    lower, upper = (end.reshape(-1, math.prod(shape)) for end in boxes[:2])
    low, node, stuck = boxes.low, boxes.node, []
    while True:
        middle = 0.5 * lower + 0.5 * upper
        splits = (middle > lower) & (middle < upper)
        score = np.where(splits, gain + np.finfo(gain.dtype).tiny * (upper - lower), -1.0)
        score = np.where(splits & ~np.isfinite(score), upper - lower, score)
        entry = np.argmax(score, axis=1)
        can = splits[np.arange(len(low)), entry]
        stuck.append(_Open(lower[~can], upper[~can], low[~can], node[~can]))
        lower, upper, low, node = (t[can] for t in (lower, upper, low, node))
        gain, entry = gain[can], entry[can]
        if not len(low):
            break
        rows = np.arange(len(low))
        cut = middle[can][rows, entry]
        first, second = upper.copy(), lower.copy()
        first[rows, entry] = second[rows, entry] = cut
        gain = gain.copy()
        gain[rows, entry] *= 0.5
        lower, upper = np.concatenate([lower, second]), np.concatenate([first, upper])
        low, gain = np.concatenate([low, low]), np.concatenate([gain, gain])
        node = _parted(node, entry, cut)
        if 2 * len(low) > room:
            break
    kept = [np.concatenate(parts) for parts in zip(*stuck)]
    shaped = [end.reshape(-1, *shape) for end in (lower, upper, kept[0], kept[1])]
    return _Open(shaped[0], shaped[1], low, node), _Open(shaped[2], shaped[3], kept[2], kept[3])


def _parted(node: Numbers, entry: Numbers, cut: Numbers) -> Numbers:
    """The lower, then the upper halves of boxes in a proof; None without one."""
    halves = np.full(2 * len(node), None, object)
    for i, part in enumerate(node):
        if part is not None:
            halves[i :: len(node)] = part.split(int(entry[i]), float(cut[i]))
    return halves
