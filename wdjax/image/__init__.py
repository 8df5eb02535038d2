"""The image-Wasserstein ball: mass that moves between pixels, and attacks that stay inside."""

from wdjax.image.ball import ImageWasserstein, Plan
from wdjax.image.frank_wolfe import FrankWolfe
from wdjax.image.nearest import NearestTransport
from wdjax.image.union import image_wasserstein, minimum_radius

__all__ = [
    "FrankWolfe",
    "ImageWasserstein",
    "NearestTransport",
    "Plan",
    "image_wasserstein",
    "minimum_radius",
]
