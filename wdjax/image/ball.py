"""The ball of images that can be reached by moving mass between pixels."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp

from wdjax.checks import validate
from wdjax.core import Array
from wdjax.image import plans
from wdjax.image.plans import Space
from wdjax.image.stencil import Stencil

_LOST = 1e-6
"""Maximum share of the image's mass that a point may have gained or lost."""
_ROUNDING = 1.5e-7
"""Rounding error of float32 sums, as a share of the image's mass."""
_RESERVE = 5e-7
"""Share of the image's mass that attacks leave unspent, since rounding is charged to the cost."""


class TransportPlan(NamedTuple):
    """The proof of a cost: the transport plan."""

    mass: Array
    """``[n, H, W, C, k, k]``: from pixel ``(y, x)`` to ``(y + a - k // 2, x + b - k // 2)``."""


@dataclasses.dataclass(frozen=True)
class ImageWasserstein:
    r"""Images of the same mass, in ``[0, high]``, within a Wasserstein distance over pixels.

    ``B(x, eps) = {z: W_p(x, z) <= eps, |z|_1 = |x|_1, 0 <= z <= high}``, where mass moves within
    channels, over Euclidean distances d in pixels at a cost of ``d^p``, and

    * ``channels="shared"``: ``W_p^p`` is the least ``sum d^p pi / |x|_1`` over plans ``pi`` of all
      channels: one normalisation and one budget for all;
    * ``channels="separate"``: ``W_1`` is the sum over channels c of ``W_1(x_c / |x_c|_1, z_c /
      |z_c|_1)``. A channel without mass contributes 0.

    The two agree for images of one channel. A radius of k pixels, in the units of the papers'
    tables, is ``eps = k / (H W)``.

    Args:
      window: k, odd: mass moves within ``k x k`` pixels around its own; None for anywhere.
      power: p, at least 1.
      channels: ``"shared"`` or ``"separate"``.
      high: the largest value of a pixel; the smallest is 0.

    Raises:
      ValueError: an even window, a power below 1, or separate channels with a power other than 1,
        whose sum of p-th roots is not a convex cost.

    Differs: eps bounds ``W_p`` as in equation 2, not ``W_p^p`` as in equation 7; for p = 1 they
      agree. Separate channels are equation 1; shared channels are what the authors' code does.

    Source: Hu et al. [hu2020], Definition 3.1; local plans are Wong et al.'s [wong2019].

    >>> import wdjax.image
    >>> x = jnp.zeros((1, 1, 4, 1)).at[0, 0, 1].set(1.0)
    >>> z = jnp.zeros((1, 1, 4, 1)).at[0, 0, 2].set(0.5).at[0, 0, 1].set(0.5)
    >>> plan = jnp.zeros((1, 1, 4, 1, 3, 3)).at[0, 0, 1, 0, 1, 1:].set(0.5)
    >>> cost = ImageWasserstein(window=3).cost(x, z, TransportPlan(plan))
    >>> round(float(cost[0]), 4)
    0.5
    """

    window: int | None = 5
    power: float = 1.0
    channels: str = "shared"
    high: float = 1.0

    def __post_init__(self) -> None:
        if self.window is not None:
            window = validate.check_count("window", self.window)
            if window % 2 == 0:
                raise ValueError(f"window must be odd, such as 5, or None, got {self.window!r}.")
            object.__setattr__(self, "window", window)
        power = float(validate.check_number("power", self.power, 1.0))
        validate.check_choice("channels", self.channels, ("shared", "separate"))
        if self.channels == "separate" and power != 1:
            raise ValueError(
                f"separate channels have a sum of W_p, which is no convex cost for p = {power:g}; "
                'use power=1 or channels="shared".'
            )
        high = float(validate.check_number("high", self.high))
        if high <= 0:
            raise ValueError(f"high must be above 0, got {self.high!r}.")
        object.__setattr__(self, "power", power)
        object.__setattr__(self, "high", high)

    @property
    def box(self) -> tuple[float, float]:
        """``(0, high)``: mass is not negative."""
        return 0.0, self.high

    def diameter(self, shape: tuple[int, ...]) -> float:
        """The largest cost of a plan in images of a shape: all mass moves across the window."""
        stencil = self.space(shape).stencil
        half = stencil.window // 2
        farthest = math.hypot(min(half, stencil.height - 1), min(half, stencil.width - 1))
        return farthest * (shape[2] if self.channels == "separate" else 1)

    @property
    def units(self) -> str:
        """The units of radii, in words, for messages."""
        return "a radius of k pixels, as in the papers' tables, is k / (height width)"

    def space(self, shape: tuple[int, ...]) -> Space:
        """The geometry of images of ``shape = (height, width, channels)``."""
        if len(shape) != 3:
            raise ValueError(
                f"images must be [n, height, width, channels], got samples of shape {list(shape)}."
            )
        height, width, _ = shape
        full = 2 * max(height, width) - 1
        window = full if self.window is None else min(self.window, full)
        return Space(Stencil(height, width, window), self.power, self.high)

    def weights(self, x: Array) -> Array:
        """``[n, C]``: weights of the channels' mass times distance, from masses ``[n, C, L]``."""
        pixels = jnp.sum(x, axis=2)
        if self.channels == "shared":
            return jnp.ones_like(pixels)
        whole = jnp.sum(pixels, axis=1, keepdims=True)
        return jnp.where(pixels > 0, whole / jnp.where(pixels > 0, pixels, 1.0), 1.0)

    def budget(self, x: Array, eps: Array) -> Array:
        """``[n]``: the budget in mass times distance of a radius, from masses ``[n, C, L]``."""
        return eps**self.power * jnp.sum(x, axis=(1, 2))

    def reserve(self, space: Space, x: Array, weights: Array) -> Array:
        """``[n]``: mass times distance that attacks leave unspent for rounding."""
        farthest = space.stencil.diameter(self.power)
        return _RESERVE * farthest * jnp.sum(jnp.sum(x, axis=2) * weights, axis=1)

    def cost(self, x: Array, x_adv: Array, proof: TransportPlan | None = None) -> Array:
        """``[n]`` upper bounds of ``W_p``, proved by a plan; inf for points outside or unproved.

        The bound is the plan's cost, plus the image's diameter times the mass by which the plan's
        marginals differ from the two images. An unmoved image costs 0.
        """
        space = self.space(x.shape[1:])
        before, after = space.stencil.flat(x), space.stencil.flat(x_adv)
        same = jnp.all(before == after, axis=(1, 2))
        if proof is None:
            return jnp.where(same, 0.0, jnp.inf).astype(x.dtype)
        total = jnp.sum(before, axis=(1, 2))
        spent = self.charged(space, before, after, space.stencil.flows(proof.mass))
        share = jnp.where(total > 0, spent / jnp.where(total > 0, total, 1.0), jnp.inf)
        return jnp.where(same, 0.0, share ** (1 / self.power)).astype(x.dtype)

    def charged(self, space: Space, x: Array, z: Array, plan: Array) -> Array:
        """``[n]``: mass times distance that a plan ``[n, C, O, L]`` proves to suffice, or inf."""
        stencil, weights = space.stencil, self.weights(x)
        pixels = jnp.sum(x, axis=2)
        valid = jnp.asarray(stencil.valid())[None, None]
        legal = jnp.isfinite(plan) & (plan >= 0) & (valid | (plan == 0))
        inside = jnp.all((z >= 0) & (z <= self.high), axis=(1, 2))
        kept = jnp.all(jnp.abs(jnp.sum(z, axis=2) - pixels) <= _LOST * pixels, axis=1)
        rows = jnp.sum(jnp.abs(jnp.sum(plan, axis=2) - x), axis=2)
        columns = jnp.sum(jnp.abs(stencil.receive(plan) - z), axis=2)
        missed = jnp.sum((rows + columns + _ROUNDING * pixels) * weights, axis=1)
        spent = plans.moved(space, plan, weights) + stencil.diameter(self.power) * missed
        fine = inside & kept & jnp.all(legal, axis=(1, 2, 3)) & jnp.isfinite(spent)
        return jnp.where(fine, spent, jnp.inf)
