r"""Noise distributions for randomised smoothing, with the radii that they certify.

The smoothed classifier returns the class that the model gives to ``x + noise`` most often. If that
class has probability ``p > 1/2``, it stays the most probable within a radius that grows with p, for
*any* model. ``sigma`` is the standard deviation of every random number, in the units of ``x``.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import numpy as np
import numpy.typing as npt

from wdjax import distinct
from wdjax.core import AnyArray, Array
from wdjax.smoothing import grid
from wdjax.smoothing.flow import Flow
from wdjax.smoothing.grid import Noise, Numbers, perturb
from wdjax.xla_cpu import drawn

__all__ = ["Flow", "Gaussian", "Laplace", "Noise", "Uniform", "perturb"]


def _family(name: str) -> Any:
    """A static dataclass field with the name of a noise family.

    JAX 0.10 compares pytree dataclasses by their static fields, not by their classes; without this
    field it might run the program that was compiled for another family.
    """
    return dataclasses.field(default=name, repr=False, kw_only=True, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class _Independent:
    """Base of noises with independent coordinates that do not depend on the sample."""

    sigma: float | Array

    def __post_init__(self) -> None:
        grid.check_sigma(self.sigma)

    @property
    def step(self) -> float:
        return grid.step(self.sigma)

    def scale(self, x: Array) -> float:
        return 1.0

    def error(self, x: AnyArray) -> Numbers:
        return grid.error_of_independent(x, self.step)


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gaussian(_Independent):
    r"""Normal noise: l2 radii ``sigma Phi^-1(p)``.

    Args:
      sigma: standard deviation, above 0; may be traced.

    Raises:
      ValueError: a sigma that is not above 0.

    Source: Cohen et al. [cohen2019], Theorem 1 with ``p_B = 1 - p_A``.

    >>> Gaussian(0.5).radius([0.5, 0.9]).round(3).tolist()
    [0.0, 0.641]
    """

    norm: ClassVar[float] = 2

    family: str = _family("gaussian")

    def pattern(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.sigma * drawn(jax.random.normal, key, shape, dtype)

    def offset(self, key: Array, x: Array) -> Array:
        return self.pattern(key, x.shape, x.dtype)

    def radius(self, probability: npt.ArrayLike) -> Numbers:
        from scipy import special

        return grid.beyond_half(probability, lambda p: grid.number(self.sigma) * special.ndtri(p))

    def level(self, radius: npt.ArrayLike) -> Numbers:
        from scipy import special

        return np.asarray(special.ndtr(grid.check_radius(radius) / grid.number(self.sigma)))


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Laplace(_Independent):
    r"""Laplace noise of scale ``b = sigma / sqrt 2``: l1 radii ``b log(1 / (2 (1 - p)))``.

    Densities change by a factor of at most ``exp(r / b)`` over an l1 distance of r, hence so does
    the probability of all other classes together, which must stay below 1/2.

    Args:
      sigma: standard deviation, above 0; may be traced.

    Raises:
      ValueError: a sigma that is not above 0.

    Source: Teng et al. [teng2020], the larger of the two radii there.

    >>> Laplace(2**0.5).radius([0.5, 0.75]).round(3).tolist()
    [0.0, 0.693]
    """

    norm: ClassVar[float] = 1

    family: str = _family("laplace")

    def pattern(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.sigma * grid.laplace(key, shape, dtype)

    def offset(self, key: Array, x: Array) -> Array:
        return self.pattern(key, x.shape, x.dtype)

    def radius(self, probability: npt.ArrayLike) -> Numbers:
        return grid.beyond_half(probability, lambda p: grid.laplace_radius(self.sigma, p))

    def level(self, radius: npt.ArrayLike) -> Numbers:
        return grid.laplace_level(self.sigma, grid.check_radius(radius))


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Uniform(_Independent):
    r"""Uniform noise on ``[-a, a]`` with ``a = sqrt 3 sigma``: l1 radii ``2 a (p - 1/2)``.

    Two cubes whose centres are r apart in l1 differ in at most ``r / 2a`` of their volume.

    Args:
      sigma: standard deviation, above 0; may be traced.

    Raises:
      ValueError: a sigma that is not above 0.

    Source: Yang et al. [yang2020].

    >>> Uniform(3**-0.5).radius([0.5, 0.75]).round(3).tolist()
    [0.0, 0.5]
    """

    norm: ClassVar[float] = 1

    family: str = _family("uniform")

    def pattern(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        half = math.sqrt(3) * self.sigma
        return half * drawn(jax.random.uniform, key, shape, dtype, -1.0, 1.0)

    def offset(self, key: Array, x: Array) -> Array:
        return self.pattern(key, x.shape, x.dtype)

    def radius(self, probability: npt.ArrayLike) -> Numbers:
        half = math.sqrt(3) * grid.number(self.sigma)
        return grid.beyond_half(probability, lambda p: 2 * half * (p - 0.5))

    def level(self, radius: npt.ArrayLike) -> Numbers:
        return 0.5 + grid.check_radius(radius) / (2 * math.sqrt(3) * grid.number(self.sigma))
