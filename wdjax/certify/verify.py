"""Certifies a data set at one radius, in batches with checkpoints."""

import functools
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh
from jax.typing import ArrayLike

from wdjax import metrics, parallel
from wdjax.bounds.margins import METHODS, Method
from wdjax.bounds.region import Norm
from wdjax.certify import pointwise, ranges
from wdjax.certify.branch import ENDS
from wdjax.certify.ranges import EntryRange
from wdjax.checks import validate
from wdjax.checks.forward_mode import TWIN, host_only
from wdjax.core import CLAIM, Array, Certificate, Classifier, Progress
from wdjax.engine import identity, loop
from wdjax.parallel import AnyArray

Numbers = npt.NDArray[Any]
_TRIED = 8
"""Number of samples that branch and bound works on between two checkpoints."""


_FALSIFIED = [ENDS.index(end) for end in ("misclassified", "flipped")]
_SHARED = 1e-5
"""Rounding that is charged to the margins, relative to an offset common to all logits."""


def verify(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: Norm,
    eps: ArrayLike,
    box: EntryRange = (0.0, 1.0),
    method: Method = "auto",
    steps: int = 10,
    seconds: float = 10.0,
    batch_size: int = 64,
    mesh: Mesh | None = None,
    callback: Callable[[Progress], Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
) -> Certificate:
    r"""Bounds the margins of a data set within ``eps``, and every sample's radius.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: as in :func:`margin_bounds`.
      eps: radius, as in :func:`margin_bounds`; of ``[n]`` or one of every entry the radii are in
        multiples.
      box: as in :func:`margin_bounds`.
      method: one of :data:`METHODS`; for "alpha" and "bab" the radii are found by "auto".
      steps: as in :func:`radius`; with 0 a radius is ``eps`` if verified, else 0.
      seconds: as in :func:`margin_bounds`.
      batch_size: samples on all devices at once.
      mesh: as in :func:`margin_bounds`.
      callback: called with the :class:`Progress` after every batch.
      checkpoint: a folder to save the work to and to resume it from.
      every: least number of seconds between two saves of the checkpoint.

    Returns:
      A :class:`Certificate`. By "bab" a sample is verified, falsified with a counterexample, or
      neither, and then unknown.

    Raises:
      ValueError: bad samples, an unknown method, a primitive without a rule, or a trace.

    Cost: that of :func:`certified` and :func:`radius`; by "bab" up to ``seconds`` for a sample that
      is neither verified by cheaper bounds nor flipped by a short attack.

    Source: as :func:`margin_bounds` and :func:`radius`.

    >>> import jax.numpy as jnp
    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.1, 0.9]]), jnp.array([0, 0])
    >>> found = verify(model, x, y, norm=jnp.inf, eps=0.1)
    >>> found.verified.tolist(), found.radius.round(3).tolist(), found.claim
    ([True, False], [0.4, 0.0], 'float program')
    """
    ranges.check(model, x, y, norm, box, eps=eps)
    validate.check_choice("method", method, METHODS)
    host_only("certify.verify", TWIN, model, x, y, eps)
    ball = ranges.domain(norm, box, x)
    x, y = validate.check_samples(model, x, y, ball.box)
    size = min(batch_size, len(y), _TRIED if method == "bab" else len(y))
    pieces = [slice(start, min(start + size, len(y))) for start in range(0, len(y), size)]
    reach, scale = ranges.radii(eps, x)
    work = _Work(model, x, y, pieces, norm, reach, scale, box, method, steps, seconds, mesh)
    settings = [METHODS.index(method), steps, size, seconds, len(pieces)]

    def progress(state: dict[str, Any]) -> Progress:
        taken = int(state["turn"])
        return Progress(taken, len(pieces), np.arange(taken * size, len(y)))

    mark = b""
    if checkpoint is not None:
        traced = identity.program(lambda model, x: model(x), model, x[:1])
        ends = [np.asarray(part, float) for part in (eps, *(box or ()))]
        named = repr(ball.norm)
        mark = identity.digest(traced, named, model, x, y, np.array(settings, float), ends)
    state = loop.carry(
        _begin(work),
        functools.partial(_turn, work),
        lambda s: int(s["turn"]) >= len(pieces),
        report=None if callback is None else lambda s: callback(progress(s)),
        checkpoint=checkpoint,
        every=every,
        identity=mark,
        about={"norm": repr(ball.norm), "eps": eps, "box": box, "method": method, "steps": steps},
        mesh=mesh,
    )
    return _certificate(work, state)


class _Work(NamedTuple):
    """The arguments of :func:`verify`, and the batches."""

    model: Classifier
    x: Array
    y: Array
    pieces: list[slice]
    norm: Norm
    eps: Array
    """``[n]``"""
    scale: Array | None
    """``[n, *shape]``: of which the radii are multiples, or None."""
    box: EntryRange
    method: Method
    steps: int
    seconds: float
    mesh: Mesh | None


def _begin(work: _Work) -> dict[str, Any]:
    """The state before the first batch: margins ``[n, K]``, radii and ends ``[n]``, and for branch
    and bound the samples ``[n, *shape]``, which misclassified points replace."""
    (_, classes), n = jax.eval_shape(work.model, work.x[:1]).shape, len(work.y)
    begun: dict[str, Any] = {"low": np.full((n, classes), -np.inf), "radius": np.zeros(n)}
    points = np.array(work.x if work.method == "bab" else work.x[:0])
    return {"turn": 0, **begun, "ended": np.zeros(n, np.int32), "points": points}


def _turn(work: _Work, state: dict[str, Any]) -> dict[str, Any]:
    """Certifies the next batch."""
    these = work.pieces[int(state["turn"])]
    size, count = work.pieces[0].stop, these.stop - these.start
    # Branch and bound would work on padding; other bounds are compiled once for one size.
    wanted = count if work.method == "bab" else size
    batch = work.model, *parallel.pad((work.x[these], work.y[these]), wanted)
    how: dict[str, Any] = {
        "norm": work.norm,
        "box": work.box,
        "batch_size": size,
        "mesh": work.mesh,
    }
    low, radius = np.array(state["low"]), np.array(state["radius"])
    ended, points = np.array(state["ended"]), np.array(state["points"])
    scale = None if work.scale is None else work.scale[these]
    eps, scale = parallel.pad((work.eps[these], scale), wanted)
    reach = eps if scale is None else scale
    found = pointwise.searched(*batch, eps=reach, method=work.method, seconds=work.seconds, **how)
    low[these] = found[0][:count]
    if work.method == "bab":
        ended[these], points[these] = found[1:]
    if work.steps:
        method: Method = "auto" if work.method in ("alpha", "bab") else work.method
        found_radius = pointwise.radius(*batch, scale=scale, steps=work.steps, method=method, **how)
        radius[these] = found_radius[:count]
    after = {"low": low, "radius": radius, "ended": ended, "points": points}
    return {"turn": state["turn"] + 1, **after}


def _certificate(work: _Work, state: dict[str, Any]) -> Certificate:
    """The certificate of all batches' bounds, and of the logits at the samples."""
    logits = np.concatenate([work.model(work.x[these]) for these in work.pieces])
    correct = np.asarray(metrics.correct(jnp.asarray(logits), work.y))
    margin = np.min(state["low"], axis=1)
    held = np.where(margin > 0, np.asarray(work.eps), 0.0)
    radius = np.maximum(state["radius"], held)
    ended = tuple(ENDS[k] for k in state["ended"]) if work.method == "bab" else ()
    falsified = ~correct | np.isin(state["ended"], _FALSIFIED)
    points = state["points"] if work.method == "bab" else None
    told = _remarks(logits)
    return Certificate(correct, margin, radius, work.method, CLAIM, ended, told, falsified, points)


def advice(model: Classifier, x: AnyArray, batch_size: int = 64) -> tuple[str, ...]:
    """The remarks of :func:`verify` on the samples ``x`` ``[n, *shape]``, all of them together."""
    pieces = (x[start : start + batch_size] for start in range(0, len(x), batch_size))
    return _remarks(np.concatenate([model(jnp.asarray(piece)) for piece in pieces]))


def _remarks(logits: Numbers) -> tuple[str, ...]:
    """Advice on how tighter bounds may be had, from the logits ``[n, K]`` of the data.

    Bounds are loose for models that return probabilities, and for logits that share a large offset.
    """
    found = []
    if np.all(logits >= 0) and np.allclose(np.sum(logits, axis=1), 1, atol=1e-3):
        found.append(
            "the model returns probabilities: bounds through a softmax are looser than those of "
            "the logits before it; certify these"
        )
    second, first = np.sort(logits, axis=1)[:, -2:].T
    if _SHARED * np.median(np.abs(first)) > 0.01 * np.median(first - second):
        found.append(
            f"logits share a number of size {np.median(np.abs(first)):.1g}, and every margin is "
            f"lowered by up to {_SHARED:g} of it for rounding; subtract it"
        )
    return tuple(found)
