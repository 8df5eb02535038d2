"""The l_r balls: the allowed perturbations, their costs, projections and steps."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from wdjax import norms, sparse
from wdjax.checks import validate
from wdjax.core import Array
from wdjax.xla_cpu import drawn


@dataclasses.dataclass(frozen=True)
class Lp:
    r"""The ball of a norm around every sample, inside a box: ``||x_adv - x||_r <= eps``.

    Norm 0 counts the coordinates that change, or with ``pixels`` the pixels: an ``eps`` of 5.9 is
    one of 5. It is for attacks that say so, such as :class:`~wdjax.attacks.SigmaZero` and
    :class:`~wdjax.attacks.PGD`; everything else refuses it.

    Args:
      norm: r, one of 1, 2 and inf, or 0.
      box: ``(low, high)`` of valid inputs, or None for all of space.
      pixels: for norm 0, count entries along the last axis, the channels of a pixel, as one.

    Raises:
      ValueError: another norm, a box that is empty, or pixels of another norm than 0.

    >>> ball = Lp(jnp.inf)
    >>> ball.cost(jnp.zeros((1, 3)), jnp.array([[0.5, 0.0, 0.25]])).tolist()
    [0.5]
    >>> Lp(0).cost(jnp.zeros((1, 3)), jnp.array([[0.5, 0.0, 0.25]])).tolist()
    [2.0]
    """

    norm: float = math.inf
    box: tuple[float, float] | None = (0.0, 1.0)
    pixels: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", norms.check_norm(self.norm, 0))
        object.__setattr__(self, "box", validate.check_box(self.box))
        if self.pixels and self.norm != 0:
            raise ValueError(f"pixels are counted in norm 0, got norm {self.norm!r}.")

    def diameter(self, shape: tuple[int, ...]) -> float:
        """The largest distance between two inputs ``[*shape]`` in the box; inf without a box."""
        if self.norm == 0:
            return sparse.size(shape, self.pixels)
        if self.box is None:
            return math.inf
        low, high = self.box
        return (high - low) * math.prod(shape) ** (0 if self.norm == math.inf else 1 / self.norm)

    @property
    def width(self) -> float:
        """The box's width, the unit of default lengths; 1 without a box."""
        return 1.0 if self.box is None else self.box[1] - self.box[0]

    @property
    def units(self) -> str:
        """The unit of radii, for warnings about radii that are meant in grey levels."""
        if self.norm == 0:
            return "in norm 0 eps is a number of " + ("pixels" if self.pixels else "coordinates")
        low, high = self.box or (0.0, 1.0)
        share = "8/255" if high - low == 1 else f"{high - low:g} * 8/255"
        return f"in the box [{low:g}, {high:g}] eight of 255 grey levels are {share}"

    def cost(self, x: Array, x_adv: Array, proof: None = None) -> Array:
        """``[n]`` distances; inf where a point is outside the box or not finite."""
        flat = x_adv.reshape(len(x_adv), -1)
        low, high = (-jnp.inf, jnp.inf) if self.box is None else self.box
        inside = jnp.all(jnp.isfinite(flat) & (flat >= low) & (flat <= high), axis=-1)
        moved = jnp.where(norms.spread(inside, x), x_adv, x)
        if self.norm == 0:
            return jnp.where(inside, sparse.count(moved, x, self.pixels), jnp.inf)
        return jnp.where(inside, norms.lp_norm(moved - x, self.norm), jnp.inf)

    def ascend(self, x: Array, gradient: Array, size: Array | float) -> Array:
        """``x + size * M_r(gradient)``, equation 1, with sizes ``[n]``; may leave the ball."""
        if self.norm == 0:
            return sparse.ascend(x, gradient, size, self.box, self.pixels)
        return norms.ascend(x, gradient, size, self.norm, self.box)

    def project(self, z: Array, x: Array, radius: Array) -> Array:
        """Points near ``z``, ``[n, *shape]``, in the balls around ``x`` and in the box."""
        if self.norm == 0:
            return sparse.project(z, x, radius, self.box, self.pixels)
        return norms.retract(z, x, radius, self.norm, self.box)

    def clip(self, z: Array) -> Array:
        """The nearest points of the box."""
        return z if self.box is None else jnp.clip(z, *self.box)

    def noise(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        """One point drawn uniformly from the unit ball, without the box.

        The ball of norm 0 has no uniform distribution: there it is a point of the linf ball, of
        which :meth:`project` keeps some coordinates.
        """
        size = math.prod(shape)
        if self.norm in (0, math.inf):
            return drawn(jax.random.uniform, key, shape, dtype, -1.0, 1.0)
        return jax.random.ball(key, size, p=self.norm, dtype=dtype).reshape(shape)
