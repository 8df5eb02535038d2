"""The image-Wasserstein ball, in which mass moves between pixels, and attacks inside it.

A point comes with a transport plan, the proof of its cost: how much mass each pixel sends over each
offset of a window. An attack (`plan_attack` has what they share) changes the plan, sums what every
pixel receives, evaluates the model on that image, and returns both; `ball` measures the plan.
`stencil` is the window and sums over it; `plans` makes plans feasible; `prices` finds the
multiplier of the budget.

Attacks: `frank_wolfe`, whose linearised losses are minimised by `linear_oracle`;
`nearest_transport`, its minimum-norm form; `sinkhorn_pgd` with the projection of `sinkhorn`;
`dual_projection`; `union` runs several, each on the survivors. `distance` is exact, by the linear
program of :mod:`wdjax.exact_transport`; `entropic` a differentiable upper bound. `perturbations`
(shifts, rotations, blur) and `variance` compare with natural changes. :mod:`wdjax.certify` takes
the ball as ``norm``.

Open `ball` first, then `frank_wolfe`. To add an attack: a file here and its name in ``__all__``; a
row in ``members`` of `union` makes :func:`image_wasserstein` and the command line use it.
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
