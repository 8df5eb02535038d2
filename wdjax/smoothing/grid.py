"""What every family of noise has, how it is rounded to a grid, and what floats cost it."""

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array

Numbers: TypeAlias = npt.NDArray[np.float64]

ERROR = 2.0**-36
"""How often a random number in float64, rounded to the grid, differs from an ideal one: at most
6600 cells, with 2^-50 of the mass out of place at their ends, and mean errors of 2^-46 sigma."""

_DOWN = 1 - 1e-12
"""Radii are rounded down by this factor, far above the rounding of float64."""


class Noise(Protocol):
    """A frozen pytree dataclass: what is added to a sample, and what that proves."""

    @property
    def norm(self) -> float | None:
        """Of the ball in which radii hold; None for one that is no l_r ball."""
        ...

    @property
    def step(self) -> float:
        """Of the grid to which noisy samples are rounded: a power of 2."""
        ...

    def pattern(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Noise for a sample of this shape, but for :meth:`scale`."""
        ...

    def scale(self, x: Array) -> Array | float:
        """What the pattern is multiplied by for one sample ``[*shape]``."""
        ...

    def offset(self, key: Array, x: Array) -> Array:
        """The noise for one sample, in the type of the sample: scale times pattern."""
        ...

    def error(self, x: AnyArray) -> Numbers:
        """``[n]``: the probability that rounded noise is not that of real numbers, at most.

        Raises:
          ValueError: samples that this noise is not for.
        """
        ...

    def radius(self, probability: npt.ArrayLike) -> Numbers:
        """The certified radius of a class with at least this probability; 0 up to 1/2."""
        ...

    def level(self, radius: npt.ArrayLike) -> Numbers:
        """The least probability with this radius."""
        ...


def perturb(noise: Noise, key: Array, x: Array) -> Array:
    """One sample ``[*shape]`` with noise, in floats: for gradients and training, not for proofs.

    >>> from wdjax.smoothing.noise import Gaussian
    >>> perturb(Gaussian(0.5), jax.random.key(0), jnp.zeros(3)).shape
    (3,)
    """
    arguments.check(noise=noise, key=key)
    return x + noise.offset(key, x)


def scale_of_each(noise: Noise, x: Array) -> Array:
    """``[n]`` scales of samples, for :func:`quantized`; call it with 64 bits enabled."""
    return jax.vmap(lambda own: jnp.float64(noise.scale(own)))(x.astype(jnp.float64))


def quantized(noise: Noise, step: float, key: Array, x: Array, scale: Array) -> Array:
    r"""One sample with noise, rounded to a multiple of ``step``; call it with 64 bits enabled.

    Floats leak: the low bits of ``fl(x + e)`` tell a model where x lies, whatever the noise. What
    is certified here is the model after a rounding to the grid, a function of real numbers; the
    noise is made and added in float64, so that what comes out is, but for a probability of
    :meth:`Noise.error`, the rounding of real noise.

    Source: the leak is that of Voracek and Hein [voracek2023], who sample rounded noise for inputs
      that are on a grid themselves.
    """
    wide = x.astype(jnp.float64)
    moved = wide + scale * noise.pattern(key, wide.shape, wide.dtype)
    return (step * jnp.round(moved / step)).astype(x.dtype)


def laplace(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Of standard deviation 1."""
    return jax.random.laplace(key, shape, dtype) * math.sqrt(0.5)


def check_sigma(sigma: Any) -> None:
    array = isinstance(sigma, jax.Array) and not validate.traced(sigma) and sigma.ndim == 0
    if not array and not isinstance(sigma, int | float | np.number):
        return  # Inside a trace, stacked, or one of JAX's own blanks.
    if not (sigma > 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma must be finite and above 0, got {sigma!r}.")


def number(sigma: Any) -> float:
    """A sigma on the host."""
    if np.ndim(sigma) or validate.traced(sigma):
        raise ValueError(f"certificates are for one known sigma at a time, got {sigma!r}.")
    return float(sigma)


def step(sigma: Any) -> float:
    """A power of 2 between a 128th and a 64th of sigma: rounding to it is part of the model."""
    return 2.0 ** math.floor(math.log2(number(sigma) / 64))


def error_of_independent(x: AnyArray, step: float) -> Numbers:
    pixels = np.asarray(x, float).reshape(len(x), -1)
    return pixels.shape[1] * ERROR + error_of_sum(pixels, step)


def error_of_sum(pixels: Numbers, step: float) -> Numbers:
    """How often the rounding of ``x + e`` in float64 crosses into another cell."""
    return np.sum(np.abs(pixels), axis=1) * (2.0**-51 / step)


def beyond_half(probability: npt.ArrayLike, radius: Callable[[Numbers], Any]) -> Numbers:
    p = np.asarray(probability, float)
    if not np.all((p >= 0) & (p <= 1)):
        raise ValueError(f"probabilities must lie in [0, 1], got {probability!r}.")
    with np.errstate(divide="ignore"):
        return np.where(p > 0.5, np.maximum(radius(np.maximum(p, 0.5)), 0.0) * _DOWN, 0.0)


def laplace_radius(sigma: Any, p: Numbers) -> Numbers:
    return np.asarray(-number(sigma) * math.sqrt(0.5) * np.log(2 * (1 - p)))


def laplace_level(sigma: Any, radius: Numbers) -> Numbers:
    return np.asarray(1 - np.exp(-radius / (number(sigma) * math.sqrt(0.5))) / 2)


def check_radius(radius: npt.ArrayLike) -> Numbers:
    radii = np.asarray(radius, float)
    if not np.all(np.isfinite(radii) & (radii >= 0)):
        raise ValueError(f"radii must be finite and at least 0, got {radius!r}.")
    return radii
