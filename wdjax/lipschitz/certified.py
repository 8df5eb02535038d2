"""Certificates from local Lipschitz constants: the radius is the margin over the constant."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from wdjax.balls import Lp
from wdjax.bounds.region import Box
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import Certificate, Classifier
from wdjax.lipschitz.local import Method, local_lipschitz
from wdjax.lipschitz.margin import layer_product
from wdjax.parallel import AnyArray
from wdjax.precision import float64, full_precision, widened

_ROUNDING = 1e-9


@full_precision
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
    radius = np.minimum(_reach(margins, slopes), eps)
    return Certificate(correct, lowest, radius, "lipschitz", "exact arithmetic")


@full_precision
def global_radius(
    model: Classifier, x: AnyArray, y: AnyArray, *, norm: float, batch_size: int = 64
) -> npt.NDArray[np.float64]:
    r"""Certified radii from Lipschitz constants over all of space: ``min_j margin_j / L_j``.

    The constants are those of :func:`certify.layer_product`, computed once in float64; a sample
    then costs a forward pass. Made for nets whose layers have norm 1, such as
    :func:`wdjax.models.lipschitz_net`, whose ``L_j`` are at most ``sqrt(2)``.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, of primitives with a rule.
      x: ``[n, *shape]`` floats.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      batch_size: samples in a forward pass.

    Returns:
      ``[n]`` radii in units of ``x``, of the exact function of the model's weights: 0 where a
      sample is misclassified or a constant is infinite, ``inf`` where the logits are constant.

    Raises:
      ValueError: bad samples, no rule for a primitive, or a discontinuous one.

    Cost: :func:`certify.layer_product`, and a forward pass a sample, both in float64.

    Source: Tsuzuku et al. [tsuzuku2018], for programs instead of layers.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.1, 0.9]]), jnp.array([0, 0])
    >>> global_radius(model, x, y, norm=2).round(4).tolist()
    [0.5657, 0.0]
    """
    arguments.check(model=model, x=x, y=y)
    host_only("global_radius", "certify.layer_product, which can be traced", model, x, y)
    x, y = validate.check_samples(model, x, y, None)
    labels = np.asarray(y)
    with float64():
        low = jnp.full(x.shape[1:], -jnp.inf, jnp.float64)
        constants = np.asarray(layer_product(widened(model), low, -low, norm=norm))[labels]
    return _reach(_margins(model, x, labels, batch_size), constants)


def _reach(
    margins: npt.NDArray[np.float64], slopes: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """``[n]``: how far samples may move until a margin ``[n, K]`` that falls by at most ``slopes``
    a unit is 0; 0 where one of them is not above 0, or a slope is NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = np.where(slopes > 0, margins / slopes, np.where(margins > 0, np.inf, 0.0))
    reach = np.min(np.nan_to_num(reach, nan=0.0, posinf=np.inf), axis=1)
    return np.maximum(reach, 0.0) * (1 - _ROUNDING)


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
