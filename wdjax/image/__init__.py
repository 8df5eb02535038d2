"""The image-Wasserstein ball: mass moves between pixels; and attacks inside the ball.

`ball` is the set of images; a point comes with its transport plan (`plans`), stored by offset
(`stencil`). `prices`, `linear_oracle`, `sinkhorn` and `entropic` solve the transport problems of
the attacks `frank_wolfe`, `sinkhorn_pgd`, `dual_projection` and `nearest_transport`, which share
`plan_attack`; `union` runs the attacks together; `distance` is the exact distance. `perturbations`
and `variance` serve the comparison with natural changes of images. Open `ball` first, then
`plan_attack` and `frank_wolfe`.
"""

from wdjax.image.ball import ImageWasserstein, TransportPlan
from wdjax.image.distance import image_wasserstein_distance
from wdjax.image.dual_projection import DualProjection
from wdjax.image.entropic import entropic_distance
from wdjax.image.frank_wolfe import FrankWolfe
from wdjax.image.nearest_transport import NearestTransport
from wdjax.image.perturbations import dim, gaussian_blur, rotate, translate
from wdjax.image.sinkhorn_pgd import SinkhornPGD
from wdjax.image.union import image_wasserstein, minimum_radius
from wdjax.image.variance import total_variance

__all__ = [
    "DualProjection",
    "FrankWolfe",
    "ImageWasserstein",
    "NearestTransport",
    "SinkhornPGD",
    "TransportPlan",
    "dim",
    "entropic_distance",
    "gaussian_blur",
    "image_wasserstein",
    "image_wasserstein_distance",
    "minimum_radius",
    "rotate",
    "total_variance",
    "translate",
]
