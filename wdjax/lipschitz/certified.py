"""Certificates from local Lipschitz constants: the radius is the margin over the constant."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from wdjax.balls import Lp
from wdjax.bounds.region import Box
from wdjax.checks import arguments, validate
from wdjax.core import Certificate, Classifier
from wdjax.lipschitz.local import Method, local_lipschitz
from wdjax.parallel import AnyArray
from wdjax.precision import float64, widened

_ROUNDING = 1e-9


def verify(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: float,
    eps: float,
    box: Box = (0.0, 1.0),
    method: Method = "sdp",
    steps: int = 100,
    batch_size: int = 64,
    mesh: Mesh | None = None,
) -> Certificate:
    r"""Certifies samples by ``z_y - z_j >= margin_j - L_j t`` at distance ``t <= eps``.

    ``L_j`` is the constant of ``z_j - z_y`` on the ball of radius ``eps``.

    Args:
      model: as in :func:`local_lipschitz`.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      eps: radius, in units of ``x``.
      box: ``(low, high)``, or None for no box.
      method: of :data:`lipschitz.METHODS`.
      steps: as in :func:`local_lipschitz`.
      batch_size: as in :func:`local_lipschitz`.
      mesh: as in :func:`local_lipschitz`.

    Returns:
      A :class:`certify.Certificate` of the exact function; its radii are at most ``eps``, since the
      constants hold only there.

    Raises:
      ValueError: as :func:`local_lipschitz`.

    Cost: that of :func:`local_lipschitz`.

    Source: Hein and Andriushchenko [hein2017], with a constant for each margin.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.55, 0.45]]), jnp.array([0, 0])
    >>> found = verify(model, x, y, norm=jnp.inf, eps=0.1)
    >>> found.verified.tolist(), found.radius.round(3).tolist(), found.claim
    ([True, False], [0.1, 0.05], 'exact arithmetic')
    """
    arguments.check(model=model, x=x, y=y, eps=eps, ball=Lp(norm, box))
    how: dict[str, Any] = {"norm": norm, "eps": eps, "box": box, "method": method, "steps": steps}
    slopes = local_lipschitz(model, x, y, batch_size=batch_size, mesh=mesh, **how)
    x, y = validate.check_samples(model, x, y, box)
    labels = np.asarray(y)
    margins = _margins(model, x, labels, batch_size)
    correct = np.min(margins, axis=1) > 0
    lowest = np.min(margins - slopes * eps, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = np.where(slopes > 0, margins / slopes, np.where(margins > 0, np.inf, 0.0))
    reach = np.min(np.nan_to_num(reach, nan=0.0, posinf=np.inf), axis=1)
    radius = np.where(correct, np.clip(reach * (1 - _ROUNDING), 0.0, eps), 0.0)
    return Certificate(correct, lowest, radius, "lipschitz", "exact arithmetic")


def _margins(
    model: Classifier, x: AnyArray, labels: npt.NDArray[np.int_], batch_size: int
) -> npt.NDArray[np.float64]:
    """``[n, K]``: margins ``z_y - z_j`` of the samples, rounded down; inf at ``j = y``."""
    with float64():
        wide = widened(model)
        parts = [
            np.asarray(wide(jnp.asarray(x[i : i + batch_size], jnp.float64)))
            for i in range(0, len(labels), batch_size)
        ]
    logits = np.concatenate(parts)
    label = np.take_along_axis(logits, labels[:, None], axis=1)
    apart = label - logits - _ROUNDING * (np.abs(label) + np.abs(logits))
    return np.where(np.arange(logits.shape[1]) == labels[:, None], np.inf, apart)
