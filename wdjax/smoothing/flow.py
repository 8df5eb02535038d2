"""Wasserstein smoothing: noise on the flow of mass between the pixels of an image."""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import distinct
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import AnyArray, Array
from wdjax.smoothing import grid
from wdjax.smoothing.grid import Numbers


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flow:
    r"""Wasserstein smoothing: Laplace noise on the flow of mass between neighbouring pixels.

    Every edge of the pixel grid carries ``|x|_1 e`` with e Laplace of scale ``b = sigma / sqrt 2``;
    a pixel changes by its inflow less its outflow, so the image keeps its mass. The least l1 norm
    of a flow from one image to another is their 1-Wasserstein distance with the l1 distance of
    pixels. So the certificate of :class:`Laplace` for flows holds for images: the radius is
    ``b log(1 / (2 (1 - p)))``; for the Euclidean distance of pixels, which is at least
    ``1 / sqrt 2`` times the l1 distance, it is divided by ``sqrt 2``.

    Radii are Wasserstein distances divided by the images' mass, in pixel widths, summed over
    channels. They hold for images ``[height, width, channels]`` of *equal* mass in every channel,
    whose pixels may be any numbers.

    Args:
      sigma: standard deviation of the flow through an edge as a share of the mass, above 0.
      cost: the distance of pixels, ``"euclidean"`` or ``"l1"``.

    Raises:
      ValueError: a sigma that is not above 0, another cost.

    Differs: the paper's radius is ``(b / 2) log(p / (1 - p))``, which is smaller for every p.

    Source: Levine and Feizi [levine2020].

    >>> import jax
    >>> noise = Flow(0.01)
    >>> noise.radius([0.5, 0.99]).round(5).tolist()  # 15.3 / 784
    [0.0, 0.01956]
    >>> image = jnp.ones((4, 4, 1))
    >>> round(float(grid.perturb(noise, jax.random.key(0), image).sum()), 3)
    16.0
    """

    norm: ClassVar[None] = None
    step: ClassVar[float] = 2.0**-10

    sigma: float | Array
    cost: Literal["euclidean", "l1"] = setting("euclidean")

    def __post_init__(self) -> None:
        grid.check_sigma(self.sigma)
        validate.check_choice("cost", self.cost, ("euclidean", "l1"))

    def diameter(self, shape: tuple[int, ...]) -> float:
        """The largest distance between two images of a shape: all mass from corner to corner."""
        height, width = shape[0] - 1, shape[1] - 1
        return math.hypot(height, width) if self.cost == "euclidean" else float(height + width)

    @property
    def units(self) -> str:
        """The unit of radii, for warnings about radii that are meant in pixels."""
        return "a radius of k pixels, as in the papers' tables, is k / (height width)"

    def scale(self, x: Array) -> Array:
        return jnp.sum(x)

    def offset(self, key: Array, x: Array) -> Array:
        return self.scale(x) * self.pattern(key, x.shape, x.dtype)

    def pattern(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        height, width, channels = shape
        upright, level = (height - 1) * width * channels, height * (width - 1) * channels
        flow = self.sigma * grid.laplace(key, (upright + level,), dtype)
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
        # An edge changes two pixels; the mass is a sum; a pixel's noise has at most four terms.
        edges, size = 2 * pixels.shape[1], pixels.shape[1]
        cells = mass * grid.number(self.sigma) / self.step
        rounding = 2 * edges * cells * (51 * 2.0**-50 + 2.0**-45)
        return rounding + 6 * size * cells * size * 2.0**-53 + grid.error_of_sum(pixels, self.step)

    def radius(self, probability: npt.ArrayLike) -> Numbers:
        return grid.beyond_half(
            probability, lambda p: grid.laplace_radius(self.sigma, p) / self._stretch
        )

    def level(self, radius: npt.ArrayLike) -> Numbers:
        return grid.laplace_level(self.sigma, grid.check_radius(radius) * self._stretch)

    @property
    def _stretch(self) -> float:
        """How much longer a path along pixel edges is than the cost's distance, at most."""
        return math.sqrt(2) if self.cost == "euclidean" else 1.0


def divergence(down: Array, right: Array) -> Array:
    """Inflow less outflow of every pixel, ``[H, W, C]``, from the flows ``down``,
    ``[H - 1, W, C]``, and ``right``, ``[H, W - 1, C]``.

    >>> divergence(jnp.array([[[1.0]], [[0.5]]]), jnp.zeros((3, 0, 1)))[:, 0, 0].tolist()
    [-1.0, 0.5, 0.5]
    """
    # Padded once and then sliced: with several pads XLA would generate the noise for each again.
    down = jnp.pad(down, ((1, 1), (0, 0), (0, 0)))
    right = jnp.pad(right, ((0, 0), (1, 1), (0, 0)))
    return down[:-1] - down[1:] + right[:, :-1] - right[:, 1:]
