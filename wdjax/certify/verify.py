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

from wdjax import identity, metrics, parallel
from wdjax.bounds.margins import METHODS, Method
from wdjax.bounds.region import Norm
from wdjax.certify import anytime, pointwise, ranges
from wdjax.certify.branch import ENDS
from wdjax.certify.ranges import EntryRange
from wdjax.checks import validate
from wdjax.checks.forward_mode import TWIN, host_only
from wdjax.core import CLAIM, Array, Certificate, Classifier, Progress
from wdjax.engine import loop
from wdjax.parallel import AnyArray
from wdjax.precision import full_precision

Numbers = npt.NDArray[Any]
_TRIED = 8
"""Number of samples that branch and bound works on between two checkpoints."""
_SHARED = 1e-5
"""Rounding that is charged to the margins, relative to an offset common to all logits."""
REFUTED = (
    "bounds said verified of samples that the model gets wrong as they are: these count as not "
    "verified, and the others should not be trusted; please report this model"
)
"""A remark that :func:`advice` cannot make again, since it is about the bounds."""


@full_precision
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
    seconds: float | None = None,
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
      eps: radius, as in :func:`margin_bounds`. Of one of every entry, ``[n, *shape]``, the radii
        are multiples; otherwise they are in the units of ``x``.
      box: as in :func:`margin_bounds`.
      method: one of :data:`METHODS`; for "alpha" and "bab" the radii are found by "auto". With
        ``seconds`` "auto" climbs: intervals, CROWN, SDP-CROWN in l2, a short attack, "alpha" and
        "bab" for the samples that are still undecided.
      steps: as in :func:`radius`; with 0 a radius is ``eps`` if verified, else 0.
      seconds: for "bab", as in :func:`margin_bounds` (10 by default); for "auto", on all samples
        together, with compilation and without the search for radii. CROWN always comes to its end,
        and a batch that has begun is finished.
      batch_size: samples on all devices at once.
      mesh: as in :func:`margin_bounds`.
      callback: called with the :class:`Progress` after every batch.
      checkpoint: a folder to save the work to and to resume it from.
      every: least number of seconds between two saves of the checkpoint.

    Returns:
      A :class:`Certificate`. By "bab", and by "auto" with ``seconds``, a sample is verified,
      falsified with a counterexample, or neither, and then unknown; ``decided`` names the method.

    Raises:
      ValueError: bad samples, an unknown method, ``seconds`` for another method than "auto" and
        "bab", a primitive without a rule, or a trace.

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
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds must be a number above 0, got {seconds!r}.")
    if seconds is not None and method not in ("auto", "bab"):
        raise ValueError(f"seconds is for methods 'auto' and 'bab', not {method!r}: leave it out.")
    size = min(batch_size, len(y), _TRIED if method == "bab" else len(y))
    pieces = [slice(start, min(start + size, len(y))) for start in range(0, len(y), size)]
    reach, scale = ranges.radii(eps, x)
    climb = None
    if method == "auto" and seconds is not None:
        climb = anytime.Climb(model, x, y, reach, scale, ball, size, seconds, mesh)
    limit = 10.0 if seconds is None else seconds
    work = _Verification(
        model, x, y, pieces, norm, reach, scale, box, method, steps, limit, mesh, climb
    )
    settings = [METHODS.index(method), steps, size, limit, len(pieces), climb is not None]

    def progress(state: dict[str, Any]) -> Progress:
        if climb is not None and not anytime.finished(climb, state):
            left = np.flatnonzero(anytime.is_open(climb, state))
            return Progress(len(y) - len(left), len(y), left)
        taken = int(state["turn"])
        return Progress(taken, len(pieces), np.arange(taken * size, len(y)))

    mark = b""
    if checkpoint is not None:
        traced = identity.program(lambda model, x: model(x), model, x[:1])
        ends = [np.asarray(part, float) for part in (eps, *(box or ()))]
        named = repr(ball.norm)
        mark = identity.digest(traced, named, model, x, y, np.array(settings, float), ends)
    state = loop.carry(
        _first_margins_state(work),
        functools.partial(_turn, work),
        functools.partial(_finished, work),
        report=None if callback is None else lambda s: callback(progress(s)),
        checkpoint=checkpoint,
        every=every,
        identity=mark,
        about={"norm": repr(ball.norm), "eps": eps, "box": box, "method": method, "steps": steps},
        mesh=mesh,
    )
    return _certificate(work, state)


class _Verification(NamedTuple):
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
    climb: anytime.Climb | None
    """What "auto" is to decide in some seconds; None for other methods."""

    @property
    def falsifies(self) -> bool:
        """Whether the method looks for misclassified points."""
        return self.method == "bab" or self.climb is not None


def _first_margins_state(work: _Verification) -> dict[str, Any]:
    """The state before the first batch: margins ``[n, K]``, radii and ends ``[n]``, and for branch
    and bound the samples ``[n, *shape]``, which misclassified points replace."""
    (_, classes), n = jax.eval_shape(work.model, work.x[:1]).shape, len(work.y)
    begun: dict[str, Any] = {"turn": 0, "radius": np.zeros(n)}
    if work.climb is not None:
        return begun | anytime.first_climb_state(work.climb)
    points = np.array(work.x if work.method == "bab" else work.x[:0])
    low, ended = np.full((n, classes), -np.inf), np.zeros(n, np.int32)
    return begun | {"low": low, "ended": ended, "points": points}


def _finished(work: _Verification, state: dict[str, Any]) -> bool:
    """Whether all samples are decided or given up, and all radii are known."""
    if work.climb is not None and not anytime.finished(work.climb, state):
        return False
    radii = work.steps > 0 or work.climb is None
    return not radii or int(state["turn"]) >= len(work.pieces)


def _turn(work: _Verification, state: dict[str, Any]) -> dict[str, Any]:
    """Certifies the next batch; while "auto" climbs, one batch of one rung."""
    if work.climb is not None and not anytime.finished(work.climb, state):
        return state | anytime.turn(work.climb, state)
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
    if work.climb is None:
        found = pointwise.searched(
            *batch, eps=reach, method=work.method, seconds=work.seconds, **how
        )
        low[these] = found[0][:count]
        if work.method == "bab":
            ended[these], points[these] = found[1:]
    if work.steps:
        method: Method = "auto" if work.method in ("alpha", "bab") else work.method
        found_radius = pointwise.radius(*batch, scale=scale, steps=work.steps, method=method, **how)
        radius[these] = found_radius[:count]
    after = {"low": low, "radius": radius, "ended": ended, "points": points}
    return state | {"turn": state["turn"] + 1, **after}


def _certificate(work: _Verification, state: dict[str, Any]) -> Certificate:
    """The certificate of all batches' bounds, and of the logits at the samples."""
    logits = np.concatenate([work.model(work.x[these]) for these in work.pieces])
    correct = np.asarray(metrics.correct(jnp.asarray(logits), work.y))
    margin = np.min(state["low"], axis=1)
    remarks, refuted = _remarks(logits), (margin > 0) & ~correct
    if refuted.any():
        remarks += (REFUTED,)
        margin = np.where(refuted, -np.inf, margin)
    held = np.where(margin > 0, np.asarray(work.eps), 0.0)
    radius = np.where(refuted, 0.0, np.maximum(state["radius"], held))
    numbers = state["ended"] if work.climb is None else anytime.ends(work.climb, state)
    ended = tuple(ENDS[k] for k in numbers) if work.falsifies else ()
    falsified = ~correct | np.isin(numbers, anytime.FALSIFIED)
    points = state["points"] if work.falsifies else None
    decided = () if work.climb is None else anytime.decided(work.climb, state)
    found = Certificate(correct, margin, radius, work.method, CLAIM, ended, remarks)
    return found._replace(falsified=falsified, counterexamples=points, decided=decided)


def advice(model: Classifier, x: AnyArray, batch_size: int = 64) -> tuple[str, ...]:
    """The remarks of :func:`verify` on the samples ``x`` ``[n, *shape]``, all of them together."""
    pieces = (x[start : start + batch_size] for start in range(0, len(x), batch_size))
    return _remarks(np.concatenate([model(jnp.asarray(piece)) for piece in pieces]))


def _remarks(logits: Numbers) -> tuple[str, ...]:
    """Advice on how tighter bounds may be had, from the logits ``[n, K]`` of the data.

    Bounds are loose for models that return probabilities, and for logits that share a large offset.
    """
    found = []
    wrong = int(np.sum(~np.isfinite(logits).all(axis=1)))
    if wrong:
        found.append(
            f"the model's outputs are not finite for {wrong} of {len(logits)} samples, of "
            "which nothing is certified"
        )
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
