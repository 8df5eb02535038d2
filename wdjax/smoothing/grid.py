"""The protocol of noise, its rounding to a grid, and bounds of the effect of float rounding."""

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array
from wdjax.xla_cpu import drawn

Numbers: TypeAlias = npt.NDArray[np.float64]

ERROR = 2.0**-36
"""Bound of the probability that a random number in float64, rounded to the grid, differs from an
ideal one: there are at most 6600 cells, at whose ends a mass of 2^-50 may be misplaced, and numbers
have mean errors of 2^-46 sigma."""

_DOWN = 1 - 1e-12
"""Factor by which radii are rounded down, far more than the rounding of float64."""


class Noise(Protocol):
    """A distribution of noise and the radii that it certifies; a frozen pytree dataclass."""

    @property
    def norm(self) -> float | None:
        """The norm r in which radii are measured; None if it is another distance."""
        ...

    @property
    def step(self) -> float:
        """The spacing of the grid to which noisy samples are rounded: a power of 2."""
        ...

    def pattern(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Noise ``[*shape]`` before multiplication by :meth:`scale`."""
        ...

    def scale(self, x: Array) -> Array | float:
        """The factor of the pattern for one sample ``[*shape]``."""
        ...

    def offset(self, key: Array, x: Array) -> Array:
        """The noise for one sample ``[*shape]``, in its dtype: scale times pattern."""
        ...

    def error(self, x: AnyArray) -> Numbers:
        """``[n]`` upper bounds of the probability that float rounding changes a noisy sample.

        Raises:
          ValueError: samples that this noise does not accept.
        """
        ...

    def radius(self, probability: npt.ArrayLike) -> Numbers:
        """The certified radius of a class with at least this probability; 0 up to 1/2."""
        ...

    def level(self, radius: npt.ArrayLike) -> Numbers:
        """The least probability that certifies this radius."""
        ...


def perturb(noise: Noise, key: Array, x: Array) -> Array:
    """One sample ``[*shape]`` with noise, not rounded to the grid: for training, not certificates.

    Args:
      noise: of :mod:`wdjax.smoothing.noise`.
      key: a typed ``jax.random.key``.
      x: ``[*shape]`` floats.

    Raises:
      ValueError: ``noise`` is no noise, or ``key`` no key.

    Source: Cohen et al. [cohen2019].

    >>> from wdjax.smoothing.noise import Gaussian
    >>> perturb(Gaussian(0.5), jax.random.key(0), jnp.zeros(3)).shape
    (3,)
    """
    arguments.check(noise=noise, key=key)
    return x + noise.offset(key, x)


def scale_of_each(noise: Noise, x: Array) -> Array:
    """``[n]`` scales of samples in float64, for :func:`quantized`; needs 64 bits enabled."""
    return jax.vmap(lambda image: jnp.float64(noise.scale(image)))(x.astype(jnp.float64))


def quantized(noise: Noise, step: float, key: Array, x: Array, scale: Array) -> Array:
    r"""One sample ``[*shape]`` with noise, rounded to multiples of ``step``; needs 64 bits enabled.

    Floats leak: the low bits of ``fl(x + e)`` reveal x to a model, whatever the noise. So the
    certified classifier is the model after a rounding to the grid, a function of real numbers. The
    noise is generated and added in float64: up to a probability of :meth:`Noise.error` the result
    equals the rounding of real noise.

    Source: Voracek and Hein [voracek2023] found the leak; they sample rounded noise, for inputs on
      a grid.
    """
    wide = x.astype(jnp.float64)
    moved = wide + scale * noise.pattern(key, wide.shape, wide.dtype)
    return (step * jnp.round(moved / step)).astype(x.dtype)


def laplace(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Laplace noise of standard deviation 1."""
    return drawn(jax.random.laplace, key, shape, dtype) * math.sqrt(0.5)


def check_sigma(sigma: Any) -> None:
    """Raises if a concrete standard deviation is not finite and positive."""
    array = isinstance(sigma, jax.Array) and not validate.traced(sigma) and sigma.ndim == 0
    if not array and not isinstance(sigma, int | float | np.number):
        return  # Traced, stacked, or a placeholder of JAX's pytree functions.
    if not (sigma > 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma must be finite and above 0, got {sigma!r}.")


def number(sigma: Any) -> float:
    """A concrete sigma as a Python number."""
    if np.ndim(sigma) or validate.traced(sigma):
        raise ValueError(f"certificates are for one known sigma at a time, got {sigma!r}.")
    return float(sigma)


def step(sigma: Any) -> float:
    """The grid's spacing: a power of 2 between a 128th and a 64th of sigma."""
    return 2.0 ** math.floor(math.log2(number(sigma) / 64))


def error_of_independent(x: AnyArray, step: float) -> Numbers:
    """:meth:`Noise.error`, ``[n]``, of samples ``[n, *shape]`` for noise of independent entries."""
    pixels = np.asarray(x, float).reshape(len(x), -1)
    return pixels.shape[1] * ERROR + error_of_sum(pixels, step)


def error_of_sum(pixels: Numbers, step: float) -> Numbers:
    """``[n]`` bounds of the probability that rounding of ``x + e`` in float64 changes the cell."""
    return np.sum(np.abs(pixels), axis=1) * (2.0**-51 / step)


def beyond_half(probability: npt.ArrayLike, radius: Callable[[Numbers], Any]) -> Numbers:
    """``radius`` of checked probabilities, rounded down; 0 for probabilities up to 1/2."""
    p = np.asarray(probability, float)
    if not np.all((p >= 0) & (p <= 1)):
        raise ValueError(f"probabilities must lie in [0, 1], got {probability!r}.")
    with np.errstate(divide="ignore"):
        return np.where(p > 0.5, np.maximum(radius(np.maximum(p, 0.5)), 0.0) * _DOWN, 0.0)


def laplace_radius(sigma: Any, p: Numbers) -> Numbers:
    """The l1 radius that Laplace noise certifies at probability ``p``."""
    return np.asarray(-number(sigma) * math.sqrt(0.5) * np.log(2 * (1 - p)))


def laplace_level(sigma: Any, radius: Numbers) -> Numbers:
    """The inverse of :func:`laplace_radius`."""
    return np.asarray(1 - np.exp(-radius / (number(sigma) * math.sqrt(0.5))) / 2)


def check_radius(radius: npt.ArrayLike) -> Numbers:
    """Checks that radii are finite and at least 0; returns them as an array of floats."""
    radii = np.asarray(radius, float)
    if not np.all(np.isfinite(radii) & (radii >= 0)):
        raise ValueError(f"radii must be finite and at least 0, got {radius!r}.")
    return radii
