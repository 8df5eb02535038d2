r"""Noise that smooths a classifier, and the balls in which the smoothed one then cannot change.

The smoothed classifier returns the class that the model gives to ``x + noise`` most often. If that
class has probability ``p > 1/2``, it stays the most probable within a radius that grows with p, for
*any* model. ``sigma`` is the standard deviation of every random number, in the units of ``x``.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import validate
from wdjax.attacks.ascent import setting
from wdjax.core import AnyArray, Array

Numbers: TypeAlias = npt.NDArray[np.float64]

_ERROR = 2.0**-36
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

    def offset(self, key: Array, x: Array) -> Array:
        """The noise for one sample ``[*shape]``, in the type of the sample."""
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

    >>> perturb(Gaussian(0.5), jax.random.key(0), jnp.zeros(3)).shape
    (3,)
    """
    return x + noise.offset(key, x)


def quantized(noise: Noise, step: float, key: Array, x: Array) -> Array:
    r"""One sample with noise, rounded to a multiple of ``step``; call it with 64 bits enabled.

    Floats leak: the low bits of ``fl(x + e)`` tell a model where x lies, whatever the noise. What
    is certified here is the model after a rounding to the grid, a function of real numbers; the
    noise is made and added in float64, so that what comes out is, but for a probability of
    :meth:`Noise.error`, the rounding of real noise.

    Source: the leak is that of Voracek and Hein [voracek2023], who sample rounded noise for inputs
      that are on a grid themselves.
    """
    wide = x.astype(jnp.float64)
    moved = wide + noise.offset(key, wide)
    return (step * jnp.round(moved / step)).astype(x.dtype)


def _family(name: str) -> Any:
    """A static field that tells families apart.

    JAX 0.10 compares the structures of dataclasses by their static fields, not by their classes, so
    that it might run the program of one family for another.
    """
    return dataclasses.field(default=name, repr=False, kw_only=True, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gaussian:
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

    sigma: float | Array
    family: str = _family("gaussian")

    def __post_init__(self) -> None:
        _check_sigma(self.sigma)

    @property
    def step(self) -> float:
        return _step(self.sigma)

    def offset(self, key: Array, x: Array) -> Array:
        return self.sigma * jax.random.normal(key, x.shape, x.dtype)

    def error(self, x: AnyArray) -> Numbers:
        return _independent(x, self.step)

    def radius(self, probability: npt.ArrayLike) -> Numbers:
        from scipy import special

        return _beyond_half(probability, lambda p: float(self.sigma) * special.ndtri(p))

    def level(self, radius: npt.ArrayLike) -> Numbers:
        from scipy import special

        return np.asarray(special.ndtr(_checked(radius) / float(self.sigma)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Laplace:
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

    sigma: float | Array
    family: str = _family("laplace")

    def __post_init__(self) -> None:
        _check_sigma(self.sigma)

    @property
    def step(self) -> float:
        return _step(self.sigma)

    def offset(self, key: Array, x: Array) -> Array:
        return self.sigma * _laplace(key, x.shape, x.dtype)

    def error(self, x: AnyArray) -> Numbers:
        return _independent(x, self.step)

    def radius(self, probability: npt.ArrayLike) -> Numbers:
        return _beyond_half(probability, lambda p: _laplace_radius(self.sigma, p))

    def level(self, radius: npt.ArrayLike) -> Numbers:
        return _laplace_level(self.sigma, _checked(radius))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Uniform:
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

    sigma: float | Array
    family: str = _family("uniform")

    def __post_init__(self) -> None:
        _check_sigma(self.sigma)

    @property
    def step(self) -> float:
        return _step(self.sigma)

    def offset(self, key: Array, x: Array) -> Array:
        half = math.sqrt(3) * self.sigma
        return half * jax.random.uniform(key, x.shape, x.dtype, -1.0, 1.0)

    def error(self, x: AnyArray) -> Numbers:
        return _independent(x, self.step)

    def radius(self, probability: npt.ArrayLike) -> Numbers:
        half = math.sqrt(3) * float(self.sigma)
        return _beyond_half(probability, lambda p: 2 * half * (p - 0.5))

    def level(self, radius: npt.ArrayLike) -> Numbers:
        return 0.5 + _checked(radius) / (2 * math.sqrt(3) * float(self.sigma))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flow:
    r"""Wasserstein smoothing: Laplace noise on the flow of mass between neighbouring pixels.

    Every edge of the pixel grid carries ``|x|_1 e`` with e Laplace of scale ``b = sigma / sqrt 2``;
    the image changes by what flows in and out, so that its mass stays. The least ``l1`` flow from
    one image to another is their 1-Wasserstein distance for the l1 distance of pixels, and so the
    certificate of :class:`Laplace` on flows is one for images: radius
    ``b log(1 / (2 (1 - p)))``, divided by ``sqrt 2`` for the Euclidean distance of pixels, which is
    at least ``1 / sqrt 2`` of the other.

    Radii are distances between images divided by their mass, in widths of a pixel. They hold for
    images ``[height, width, channels]`` of *equal* mass in every channel, whose pixels may be any
    numbers; one radius serves the sum over channels.

    Args:
      sigma: standard deviation of the flow through an edge as a share of the mass, above 0.
      cost: of moving mass between pixels, ``"euclidean"`` or ``"l1"``.

    Raises:
      ValueError: a sigma that is not above 0, another cost.

    Differs: the paper's radius is ``(b / 2) log(p / (1 - p))``, which is smaller for every p.

    Source: Levine and Feizi [levine2020].

    >>> noise = Flow(0.01)
    >>> noise.radius([0.5, 0.99]).round(5).tolist()  # 15.3 / 784
    [0.0, 0.01956]
    >>> image = jnp.ones((4, 4, 1))
    >>> round(float(perturb(noise, jax.random.key(0), image).sum()), 3)
    16.0
    """

    norm: ClassVar[None] = None
    step: ClassVar[float] = 2.0**-10

    sigma: float | Array
    cost: Literal["euclidean", "l1"] = setting("euclidean")

    def __post_init__(self) -> None:
        _check_sigma(self.sigma)
        validate.check_choice("cost", self.cost, ("euclidean", "l1"))

    def offset(self, key: Array, x: Array) -> Array:
        height, width, channels = x.shape
        upright, level = (height - 1) * width * channels, height * (width - 1) * channels
        flow = self.sigma * jnp.sum(x) * _laplace(key, (upright + level,), x.dtype)
        down = flow[:upright].reshape(height - 1, width, channels)
        right = flow[upright:].reshape(height, width - 1, channels)
        return divergence(down, right)

    def error(self, x: AnyArray) -> Numbers:
        if np.ndim(x) != 4 or min(x.shape[1:3]) < 2:
            raise ValueError(
                "Wasserstein smoothing is for images [n, height, width, channels] of at least two "
                f"pixels a side, got {list(x.shape)}."
            )
        pixels = np.asarray(x, float).reshape(len(x), -1)
        mass = pixels.sum(axis=1)
        if not np.all((pixels >= 0).all(axis=1) & (mass > 0)):
            raise ValueError("Wasserstein smoothing needs images >= 0 that are not empty.")
        # An edge reaches two pixels; the mass is a sum, and a pixel's noise at most four numbers.
        edges, size = 2 * pixels.shape[1], pixels.shape[1]
        cells = mass * float(self.sigma) / self.step
        own = 2 * edges * cells * (51 * 2.0**-50 + 2.0**-45)
        return own + 6 * size * cells * size * 2.0**-53 + _of_sum(pixels, self.step)

    def radius(self, probability: npt.ArrayLike) -> Numbers:
        return _beyond_half(probability, lambda p: _laplace_radius(self.sigma, p) / self._stretch)

    def level(self, radius: npt.ArrayLike) -> Numbers:
        return _laplace_level(self.sigma, _checked(radius) * self._stretch)

    @property
    def _stretch(self) -> float:
        return math.sqrt(2) if self.cost == "euclidean" else 1.0


def divergence(down: Array, right: Array) -> Array:
    """What flows into every pixel, less what flows out: ``[H - 1, W, C]``, ``[H, W - 1, C]``.

    >>> divergence(jnp.array([[[1.0]], [[0.5]]]), jnp.zeros((3, 0, 1)))[:, 0, 0].tolist()
    [-1.0, 0.5, 0.5]
    """
    # Padded once and then sliced: XLA would make the noise anew for each of several pads.
    down = jnp.pad(down, ((1, 1), (0, 0), (0, 0)))
    right = jnp.pad(right, ((0, 0), (1, 1), (0, 0)))
    return down[:-1] - down[1:] + right[:, :-1] - right[:, 1:]


def _laplace(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Of standard deviation 1."""
    return jax.random.laplace(key, shape, dtype) * math.sqrt(0.5)


def _check_sigma(sigma: Any) -> None:
    array = isinstance(sigma, jax.Array) and not validate.traced(sigma) and sigma.ndim == 0
    if not array and not isinstance(sigma, int | float | np.number):
        return  # Inside a trace, stacked, or one of JAX's own blanks.
    if not (sigma > 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma must be finite and above 0, got {sigma!r}.")


def _step(sigma: Any) -> float:
    """A power of 2 between a 128th and a 64th of sigma: rounding to it is part of the model."""
    return 2.0 ** math.floor(math.log2(float(sigma) / 64))


def _independent(x: AnyArray, step: float) -> Numbers:
    pixels = np.asarray(x, float).reshape(len(x), -1)
    return pixels.shape[1] * _ERROR + _of_sum(pixels, step)


def _of_sum(pixels: Numbers, step: float) -> Numbers:
    """How often the rounding of ``x + e`` in float64 crosses into another cell."""
    return np.sum(np.abs(pixels), axis=1) * (2.0**-51 / step)


def _beyond_half(probability: npt.ArrayLike, radius: Callable[[Numbers], Any]) -> Numbers:
    p = np.asarray(probability, float)
    if not np.all((p >= 0) & (p <= 1)):
        raise ValueError(f"probabilities must lie in [0, 1], got {probability!r}.")
    with np.errstate(divide="ignore"):
        return np.where(p > 0.5, np.maximum(radius(np.maximum(p, 0.5)), 0.0) * _DOWN, 0.0)


def _laplace_radius(sigma: Any, p: Numbers) -> Numbers:
    return np.asarray(-float(sigma) * math.sqrt(0.5) * np.log(2 * (1 - p)))


def _laplace_level(sigma: Any, radius: Numbers) -> Numbers:
    return np.asarray(1 - np.exp(-radius / (float(sigma) * math.sqrt(0.5))) / 2)


def _checked(radius: npt.ArrayLike) -> Numbers:
    radii = np.asarray(radius, float)
    if not np.all(np.isfinite(radii) & (radii >= 0)):
        raise ValueError(f"radii must be finite and at least 0, got {radius!r}.")
    return radii
