r"""Margin bounds for certified training, differentiable in the parameters (reverse mode).

Intervals (IBP) are cheap, and networks trained with them are certified by them; backward bounds of
the margins over intervals of the neurons (CROWN-IBP) are tighter at the start of training. The
norm of the ball enters at the first layer, and the last layer is merged with the margins.

Source: Gowal et al. [gowal2018], Zhang et al. [zhang2020].
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from wdjax.aims import Scheduled
from wdjax.attacks.ascent import all_rivals
from wdjax.bounds import crown, margins, region
from wdjax.bounds.domain import Array
from wdjax.certify import ranges
from wdjax.certify.ranges import EntryRange
from wdjax.checks import independence, validate
from wdjax.core import Classifier
from wdjax.precision import highest


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("warm", "ramp", "clean"),
    meta_fields=("norm", "box", "backward"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class CertifiedTraining(Scheduled):
    r"""Certified training by :func:`wdjax.training.train`: the margins' bounds and their schedule.

    The radius grows linearly from 0 to ``eps``, and the weight of the bounds' loss from 0 to
    ``1 - clean``; then both stay. The bounds are those of intervals; with ``backward`` they begin
    as backward bounds, whose weight falls to 0 while the radius grows.

    Args:
      norm: r of the ball, one of 1, 2 and inf.
      box: ``(low, high)``, or None for no box.
      backward: whether to begin with backward bounds of the margins (CROWN-IBP).
      warm: share of the steps before the radius begins to grow.
      ramp: share of the steps until the radius is ``eps``.
      clean: final weight of the loss on the clean samples.

    Raises:
      ValueError: another norm, an empty box, shares that are not ``0 <= warm < ramp <= 1``, or a
        weight outside of [0, 1].

    Cost: about 2 forward passes for intervals, and with backward bounds 2 more passes a class.

    Source: Gowal et al. [gowal2018]; Zhang et al. [zhang2020], CROWN-IBP.

    >>> float(CertifiedTraining(warm=0.1, ramp=0.6).share(0.35))
    0.5
    """

    backward: bool = False

    def margins(self, model: Classifier, x: Array, y: Array, eps: Array, done: Array) -> Array:
        """``[n, K]`` bounds of the margins, inf at ``j = y``, when a share ``done`` of all training
        steps is done."""
        share = self.share(done)
        tight = 1 - share if self.backward else None
        return trainable_bounds(
            model, x, y, norm=self.norm, eps=share * eps, box=self.box, backward=tight
        )


def trainable_bounds(
    model: Classifier,
    x: Array,
    y: Array,
    *,
    norm: float,
    eps: Array | float,
    box: EntryRange = (0.0, 1.0),
    backward: Array | float | None = None,
) -> Array:
    r"""Lower bounds of margins as of :func:`certify.margin_bounds`, differentiable in the model.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      eps: as in :func:`margin_bounds`.
      box: as in :func:`margin_bounds`.
      backward: weight in [0, 1] of backward bounds of the margins (CROWN-IBP) beside those of
        intervals; None for intervals alone.

    Returns:
      ``[n, K]`` bounds, inf at ``j = y``, sound for the float program up to the rounding of the
      mean by ``backward``.

    Raises:
      ValueError: a bad model, samples, radius, norm or box.

    Cost: two forward passes, four passes through the first layer for l2, ``K - 1`` backward passes
      through the last layer, and through all layers with ``backward``.

    Source: Gowal et al. [gowal2018]; Zhang et al. [zhang2020].

    >>> from wdjax import Model
    >>> x, y = jnp.array([[0.8, 0.2]]), jnp.array([0])
    >>> def least(w):
    ...     model = Model(lambda w, x: x @ w, w)
    ...     return trainable_bounds(model, x, y, norm=jnp.inf, eps=0.1)[0, 1]
    >>> (10 * jax.grad(least)(jnp.array([[2.0, 1.0], [1.0, 2.0]]))).round().tolist()  # worst x
    [[7.0, -7.0], [3.0, -3.0]]
    """
    ranges.check(model, x, y, norm, box, eps=eps)
    validate.shapes_of(model, x)
    known, (reach, scale) = ranges.domain(norm, box, x), ranges.radii(eps, x)
    ball = region.ball(x, reach.astype(x.dtype), norm, known.box, scale)
    with highest():
        state = margins.prepare(model, ball, "interval")
        low = margins.of(state, model, ball, y, "interval")
        if backward is not None and state.network.graph.outputs[0] not in state.network.exact:
            share = jnp.asarray(backward, x.dtype)
            rivals, rows = all_rivals(low, y), jnp.arange(len(y))
            contrasts = margins.contrasts(state.network, y, rivals)
            tight = crown.backward(state, contrasts, margins.each(y)).T
            near = jnp.take_along_axis(low, rivals, axis=1)
            mixed = jnp.where(jnp.isfinite(near), share * tight + (1 - share) * near, -jnp.inf)
            low = low.at[rows[:, None], rivals].set(mixed)
    return jnp.where(independence.holds(model, x, alike=True), low, -jnp.inf)
