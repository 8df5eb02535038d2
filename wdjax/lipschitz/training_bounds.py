r"""Differentiable bounds of Lipschitz constants, and training with them."""

import dataclasses
import functools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from wdjax import distinct
from wdjax.aims import Scheduled
from wdjax.balls import Lp
from wdjax.bounds import margins, region
from wdjax.bounds.region import Box
from wdjax.checks import arguments, independence, validate
from wdjax.core import Array, Classifier
from wdjax.lipschitz import chain, jacobian, neurons
from wdjax.lipschitz.chain import Chain
from wdjax.lipschitz.neurons import Slopes
from wdjax.precision import full_precision, highest

Method = Literal["interval", "zonotope"]


@full_precision
def trainable_lipschitz(
    model: Classifier,
    x: Array,
    y: Array,
    *,
    norm: float,
    eps: Array | float,
    box: Box = (0.0, 1.0),
    method: Method = "interval",
) -> Array:
    r"""Lipschitz constants as of :func:`local_lipschitz`, differentiable in the model; pure.

    Neurons are bounded by intervals and the Jacobian by intervals or zonotopes, in the precision of
    the model. These are for training; report :func:`local_lipschitz` for the trained net.

    Args:
      model: as in :func:`local_lipschitz`.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      eps: radius, a number or ``[n]``.
      box: ``(low, high)``, or None for no box.
      method: ``"interval"``, or ``"zonotope"``, which is tighter and more expensive, with a
        generator for every neuron.

    Returns:
      ``[n, K]`` constants of the margins, 0 at ``j = y``.

    Raises:
      ValueError: a bad model, samples, radius or norm, or another method.

    Cost: the net's matrices, and for each sample K products with each of them; with zonotopes, K
      more for every neuron of later layers.

    Differs: ends of ReLU slopes are 0 or 1, so gradients ignore where neurons become unstable.

    Source: Weng et al. [weng2018].

    >>> from wdjax import Model
    >>> x, y = jnp.array([[0.8, 0.1]]), jnp.array([0])
    >>> def steepness(w):
    ...     model = Model(lambda w, x: jnp.maximum(x @ w, 0.0) @ w, w)
    ...     return trainable_lipschitz(model, x, y, norm=jnp.inf, eps=0.1)[0, 1]
    >>> jax.grad(steepness)(jnp.array([[1.0, -1.0], [0.5, 2.0]])).round(2).tolist()
    [[3.5, -1.5], [2.0, 0.0]]
    """
    arguments.check(model=model, x=x, y=y, eps=eps, ball=Lp(norm, box))
    validate.shapes_of(model, x)
    validate.check_choice("method", method, get_args(Method))
    x = jnp.asarray(x)
    with highest():
        ball = region.ball(x, jnp.broadcast_to(jnp.asarray(eps, x.dtype), y.shape), norm, box)
        state = margins.prepare(model, ball, "interval")
        net = chain.of_network(state.network)
        bound = functools.partial(_bound, net, norm, method)
        found = jax.vmap(bound)(neurons.slopes(net, state), y)
    return jnp.where(independence.holds(model, x, alike=True), found, jnp.inf)


def _bound(net: Chain, norm: float, method: Method, slopes: Slopes, y: Array) -> Array:
    """``[K]``: constants of one sample's margins ``z_j - z_y``, from derivatives' intervals."""
    unit = jnp.eye(net.classes, dtype=net.weights[-1].dtype)
    rows = unit - unit[y]
    found = jacobian.interval(net, slopes, rows, norm)
    if method == "zonotope":
        room = tuple(len(bias) for bias in net.biases[:-1])
        found = jnp.minimum(found, jacobian.zonotope(net, slopes, rows, norm, room))
    return found


@functools.partial(
    distinct.register_dataclass,
    meta_fields=("norm", "box", "blend", "method", "constant"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class LipschitzTraining(Scheduled):
    r"""Certified training by :func:`wdjax.training.train`, with margins bounded by constants.

    Within ``eps`` a margin falls by at most ``eps`` times its constant on the ball; the loss is
    that of the margins less this amount. In l2, where a ball is much smaller than the box around
    it, this trains nets that intervals cannot.

    Args:
      norm: r of the ball, one of 1, 2 and inf.
      box: ``(low, high)``, or None for no box.
      method: as in :func:`trainable_lipschitz`.
      constant: of all margins, if one is known, instead of local ones: ``sqrt(2)`` in l2 for a
        1-Lipschitz net such as :func:`wdjax.models.lipschitz_net`. It is trusted here, and proved
        by :func:`global_radius`.
      warm: share of the steps before the radius begins to grow.
      ramp: share of the steps until the radius is ``eps``.
      clean: final weight of the loss on the clean samples.
      attack, blend, mix, small: as in :class:`wdjax.certify.CertifiedTraining`.

    Raises:
      ValueError: another norm, an empty box, shares that are not ``0 <= warm < ramp <= 1``, a
        weight outside of [0, 1], an attack that is not bound to ``eps`` in this ball, or a
        constant below 0.

    Cost: in each step that of :func:`trainable_lipschitz` and its gradient; with a ``constant`` a
      forward pass.

    Source: Tsuzuku et al. [tsuzuku2018], with local constants.

    >>> float(LipschitzTraining(norm=2, warm=0.1, ramp=0.6).share(0.35))
    0.5
    """

    method: Method = "interval"
    constant: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.constant is not None and not 0 <= self.constant < math.inf:
            raise ValueError(f"constant must be at least 0 and finite, got {self.constant!r}.")
        validate.check_choice("method", self.method, get_args(Method))

    def margins(self, model: Classifier, x: Array, y: Array, eps: Array, done: Array) -> Array:
        """``[n, K]`` bounds of the margins, inf at ``j = y``, when a share ``done`` of all training
        steps is done."""
        reach = self.share(done) * eps
        steep: Array | float | None = self.constant
        if steep is None:
            steep = trainable_lipschitz(
                model, x, y, norm=self.norm, eps=reach, box=self.box, method=self.method
            )
        logits = model(x)
        label = jnp.take_along_axis(logits, y[:, None], axis=1)
        left = label - logits - jnp.reshape(reach, (-1, 1)) * steep
        return jnp.where(jnp.arange(logits.shape[1]) == y[:, None], jnp.inf, left)
