"""All that is proved of a data set at one radius, carried on in batches."""

from collections.abc import Callable
from os import PathLike
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from wdjax import loop, validate
from wdjax.certify import pointwise
from wdjax.certify.lipschitz import Classifier
from wdjax.certify.margins import METHODS, Method
from wdjax.certify.region import Box
from wdjax.core import Progress
from wdjax.parallel import AnyArray

Numbers = npt.NDArray[Any]
Claim: TypeAlias = Literal["float program", "exact arithmetic"]
CLAIM: Claim = "float program"
"""What certificates speak of: the model's floats, summed in any order, and so exact arithmetic."""


class Certificate(NamedTuple):
    """What is proved of samples, ``[n]``, and about what."""

    correct: Numbers
    margin: Numbers
    """Lower bounds of the least margin within ``eps``."""
    radius: Numbers
    """Verified radii: at least ``eps`` where the sample is verified."""
    method: str
    claim: Claim

    @property
    def verified(self) -> Numbers:
        """Whether no point within ``eps`` is misclassified."""
        return np.asarray(self.margin > 0)


def verify(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: float,
    eps: float,
    box: Box = (0.0, 1.0),
    method: Method = "auto",
    steps: int = 10,
    batch_size: int = 64,
    callback: Callable[[Progress], Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
) -> Certificate:
    r"""Bounds the margins of a data set within ``eps``, and every sample's radius.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      eps: radius, in the units of ``x``.
      box: ``(low, high)``, or None for no box.
      method: one of :data:`METHODS`; radii are searched for by "auto" where it is "alpha".
      steps: as in :func:`radius`; 0 for no radii but 0 and ``eps``.
      batch_size: samples at once.
      callback: told the progress after every batch.
      checkpoint: a folder to save the work to, and to go on from.

    Returns:
      A :class:`Certificate`.

    Raises:
      ValueError: bad samples, an unknown method, a primitive without a rule.

    Cost: that of :func:`certified` and :func:`radius`.

    >>> import jax.numpy as jnp
    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.1, 0.9]]), jnp.array([0, 0])
    >>> found = verify(model, x, y, norm=jnp.inf, eps=0.1)
    >>> found.verified.tolist(), found.radius.round(3).tolist(), found.claim
    ([True, False], [0.4, 0.0], 'float program')
    """
    pointwise.check_method(method)
    cheap: Method = "auto" if method == "alpha" else method
    x, y = validate.check_samples(model, x, y, box)
    count, size = len(y), min(batch_size, len(y))
    how: dict[str, Any] = {"norm": norm, "box": box, "batch_size": size}
    starts = range(0, count, size)
    last = 2 * len(starts)

    def turn(state: dict[str, Any]) -> dict[str, Any]:
        which, place = divmod(int(state["turn"]), len(starts))
        these = slice(starts[place], starts[place] + size)
        low, radius = np.array(state["margin"]), np.array(state["radius"])
        if which == 0:
            found = pointwise.margin_bounds(
                model, x[these], y[these], eps=eps, method=method, **how
            )
            low[these] = np.min(found, axis=1)
        elif steps:
            radius[these] = pointwise.radius(
                model, x[these], y[these], steps=steps, method=cheap, **how
            )
        return {"turn": state["turn"] + 1, "margin": low, "radius": radius}

    def report(state: dict[str, Any]) -> None:
        if callback is not None:
            taken = int(state["turn"])
            left = np.arange(min(taken % len(starts) * size, count), count)
            callback(Progress(taken, last, left))

    settings = np.array([METHODS.index(method), norm, eps, *(box or ()), steps, size], float)
    blank: dict[str, Any] = {"turn": 0, "margin": np.full(count, -np.inf)}
    blank["radius"] = np.zeros(count)
    state = loop.carry(
        blank,
        turn,
        lambda s: int(s["turn"]) >= last,
        report=report,
        checkpoint=checkpoint,
        identity=b"" if checkpoint is None else loop.digest(model, x, y, settings),
    )
    classes = [np.argmax(model(x[i : i + size]), axis=-1) for i in starts]
    correct = np.concatenate(classes) == np.asarray(y)
    held = np.where(state["margin"] > 0, eps, 0.0)
    return Certificate(correct, state["margin"], np.maximum(state["radius"], held), method, CLAIM)
