r"""Margin bounds for certified training, differentiable in the parameters (reverse mode).

Intervals (IBP) are cheap, and networks trained with them are certified by them; backward bounds of
the margins over intervals of the neurons (CROWN-IBP) are tighter at the start of training. The
norm of the ball enters at the first layer, and the last layer is merged with the margins.

Bounds of smaller balls at points of an attack, or beside its loss, cost less clean accuracy (SABR,
MTL-IBP); weights and regularisers that keep intervals from widening shorten the training (Shi et
al.).

Source: Gowal et al. [gowal2018], Zhang et al. [zhang2020].
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import distinct
from wdjax.aims import Scheduled
from wdjax.attacks.ascent import all_rivals
from wdjax.bounds import margins, passes, region
from wdjax.bounds.domain import Array
from wdjax.bounds.region import Region
from wdjax.certify import ranges
from wdjax.certify.ranges import EntryRange
from wdjax.checks import arguments, independence, validate
from wdjax.core import Classifier
from wdjax.precision import full_precision, highest


@functools.partial(
    distinct.register_dataclass,
    meta_fields=("norm", "box", "blend", "backward", "regularise"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class CertifiedTraining(Scheduled):
    r"""Certified training by :func:`wdjax.training.train`: the margins' bounds and their schedule.

    The radius grows linearly from 0 to ``eps``, and the weight of the robust loss from 0 to
    ``1 - clean``; then both stay. The robust loss is ``mix`` times that of the margins' bounds over
    a ball of ``small`` times the radius, and ``1 - mix`` times that of the attack's points. A
    smaller ball lies within the whole one, as near to the attack's point as it can. The methods of
    the literature are settings:

    * IBP [gowal2018]: the defaults;
    * CROWN-IBP [zhang2020]: ``backward=True``;
    * SABR [mueller2023]: ``attack=attacks.PGD(...)``, ``small`` from 0.1 to 0.8;
    * MTL-IBP [depalma2024]: ``attack=attacks.PGD(...)``, ``mix`` from 0.01 to 0.8; CC-IBP and
      Exp-IBP are the same with ``blend="logits"`` and ``blend="powers"``.

    Args:
      norm: r of the ball, one of 1, 2 and inf.
      box: ``(low, high)``, or None for no box.
      backward: whether to begin with backward bounds of the margins (CROWN-IBP), whose weight falls
        to 0 while the radius grows.
      warm: share of the steps before the radius begins to grow.
      ramp: share of the steps until the radius is ``eps``.
      clean: final weight of the loss on the clean samples.
      attack: of this ball, such as ``attacks.PGD(Lp(norm), steps=8)``, or None.
      blend: what is mixed: the ``"losses"``; the ``"logits"``, of which the loss is taken; or the
        logarithms of the losses (``"powers"``), which must be positive.
      mix: weight of the bounds in the robust loss.
      small: share of the radius that the bounded ball has. Bounds of a smaller ball prove nothing
        about the whole one; verify the trained net.
      regularise: weight of Shi et al.'s regularisers, which fades while the radius grows. They keep
        the intervals before ReLUs from widening, and the sums and variances of active and inactive
        neurons from differing. Begin with :func:`interval_start`, too.

    Raises:
      ValueError: another norm or blend, an empty box, shares that are not ``0 <= warm < ramp <=
        1``, a weight outside of [0, 1], an attack that is not bound to ``eps`` in this ball,
        ``mix`` or ``small`` without an attack, or a negative ``regularise``.

    Cost: about 2 forward passes for intervals, and with backward bounds 2 more passes a class; an
      attack's passes, and 1 more.

    Differs: a mean of losses that begins with the clean one, where SABR and MTL-IBP keep the robust
      one alone and begin with a radius near 0.

    Source: Gowal et al. [gowal2018]; Zhang et al. [zhang2020]; Müller et al. [mueller2023]; De
      Palma et al. [depalma2024]; Shi et al. [shi2021].

    >>> float(CertifiedTraining(warm=0.1, ramp=0.6).share(0.35))
    0.5
    """

    backward: bool = False
    regularise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.check_number("regularise", self.regularise)

    def margins(self, model: Classifier, x: Array, y: Array, eps: Array, done: Array) -> Array:
        """``[n, K]`` bounds of the margins, inf at ``j = y``, when a share ``done`` of all training
        steps is done."""
        share = self.share(done)
        tight = 1 - share if self.backward else None
        return trainable_bounds(
            model, x, y, norm=self.norm, eps=share * eps, box=self.box, backward=tight
        )

    def penalty(self, model: Classifier, x: Array, eps: Array, done: Array) -> Array | float:
        """The regularisers within the radius of the time, by their weight of the time; a scalar.

        ``x`` is ``[n, *shape]``; ``eps`` and ``done`` are scalars.
        """
        if not self.regularise:
            return 0.0
        share = self.share(done)
        reach = jnp.broadcast_to(share * eps, len(x))
        ball = region.ball(x, reach, self.norm, self.box)
        with highest():
            return self.regularise * (1 - share) * _unsteadiness(model, ball)


_STEADY = 0.5
"""The ratio from which on a layer counts as steady."""


@full_precision
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

    The same numbers as there are held fixed in gradients; without ``backward`` no slopes are.

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
      mean by ``backward``; -inf where a label is no class.

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
    weight = np.asarray(0.0 if backward is None or validate.traced(backward) else backward)
    if weight.ndim or weight.dtype.kind not in "fiub" or not 0 <= weight <= 1:
        raise ValueError(f"backward must be None or a weight in [0, 1], got {backward!r}.")
    domain, (reach, scale) = ranges.domain(norm, box, x), ranges.radii(eps, x)
    ball = region.ball(x, reach.astype(x.dtype), norm, domain.box, scale)
    with highest():
        state = margins.prepare(model, ball, "interval")
        low = margins.of(state, model, ball, y, "interval")
        if backward is not None and state.network.graph.outputs[0] not in state.network.exact:
            share = jnp.clip(jnp.asarray(backward, x.dtype), 0.0, 1.0)  # It may be traced.
            rivals, rows = all_rivals(low, y), jnp.arange(len(y))
            contrasts = margins.contrasts(state.network, y, rivals)
            tight = passes.backward(state, contrasts, margins.each(y)).T
            near = jnp.take_along_axis(low, rivals, axis=1)
            mixed = share * tight + (1 - share) * near
            mixed = jnp.where(jnp.isfinite(mixed), mixed, -jnp.inf)  # A traced weight may be NaN.
            low = low.at[rows[:, None], rivals].set(mixed)
    known_label = (y >= 0) & (y < low.shape[1])
    sound = independence.holds(model, x, alike=True) & known_label
    return jnp.where(sound[:, None], low, -jnp.inf)


def _unsteadiness(model: Classifier, ball: Region) -> Array:
    """Shi et al.'s regularisers of intervals, 0 in a steady net: means over all ReLU layers.

    Of a layer's intervals before its ReLU the mean width should be at most twice that of the
    inputs, and active and inactive neurons should differ by at most a factor of 2, in the sums of
    their centres and in the sums of squares about their common mean. 0 at radius 0.
    """
    state = margins.prepare(model, ball, "interval")
    width = jnp.mean(ball.upper - ball.lower)
    total, count = jnp.zeros((), width.dtype), 0
    for place, lines in state.lines.items():
        if lines.free is None:  # Only max(z, 0) has free slopes.
            continue
        operand = state.network.others[place].inputs[lines.views[0].operand]
        lower, upper = state.values[operand][:2]
        center = 0.5 * lower + 0.5 * upper
        apart = (center - jnp.mean(center)) ** 2
        on, off = lower > 0, upper < 0
        ratios = [_ratio(width, jnp.mean(upper - lower))]
        for size in (jnp.abs(center), apart):
            active, inactive = (jnp.sum(jnp.where(these, size, 0.0)) for these in (on, off))
            ratios += [_ratio(active, inactive), _ratio(inactive, active)]
        total += sum(jnp.maximum(1 - ratio / _STEADY, 0.0) for ratio in ratios)
        count += 1
    return total / max(count, 1)


def _ratio(one: Array, two: Array) -> Array:
    """``one / two``; 1 where one of both is 0 and the ratio has no gradient to offer."""
    both = (one > 0) & (two > 0)
    return jnp.where(both, one, 1.0) / jnp.where(both, two, 1.0)


def interval_start(model: Classifier, *, key: Array) -> Classifier:
    r"""The model with new weights, through which the width of intervals stays what it is.

    The kernels of all layers are drawn from the normal distribution of deviation
    ``sqrt(2 pi) / fan_in``, at which a layer and its ReLU keep the mean width of random intervals;
    biases become 0. With usual weights the width grows by about ``sqrt(fan_in)`` a layer.

    Args:
      model: from :func:`wdjax.models.functional`, with float leaves ``kernel`` ``[..., fan, out]``
        and ``bias``; the leaves of normalisation layers stay.
      key: a typed ``jax.random.key``.

    Returns:
      A model of the same structure.

    Raises:
      ValueError: a model without kernels.

    Differs: the last layer is drawn like the others, where the authors keep its old weights.

    Source: Shi et al. [shi2021].

    >>> from wdjax import models
    >>> key = jax.random.key(0)
    >>> model = interval_start(models.mlp((400, 300, 10), key=key), key=key)
    >>> size = jnp.abs(model.args[0]["fc1"]["kernel"]).mean()
    >>> round(float(400 * size / 2), 1)  # What layer and ReLU multiply a mean width by.
    1.0
    """
    arguments.check(model=model, key=key)
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    layers = {path[:-1] for path, _ in leaves if _called(path, "kernel")}
    if not layers:
        raise ValueError(
            "the model has no leaf called kernel to draw anew; build it by wdjax.models.functional."
        )
    drawn = []
    for (path, leaf), draw in zip(leaves, jax.random.split(key, len(leaves))):
        if path[:-1] in layers and _called(path, "kernel"):
            fan = leaf.size // leaf.shape[-1]
            leaf = jax.random.normal(draw, leaf.shape, leaf.dtype) * math.sqrt(2 * math.pi) / fan
        elif path[:-1] in layers and _called(path, "bias"):
            leaf = jnp.zeros_like(leaf)
        drawn.append(leaf)
    return jax.tree.unflatten(structure, drawn)


def _called(path: tuple[Any, ...], name: str) -> bool:
    """Whether a leaf's path ends in a dictionary's entry of this name."""
    return bool(path) and getattr(path[-1], "key", None) == name
