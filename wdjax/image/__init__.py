"""The image-Wasserstein ball, in which mass moves between pixels, and attacks inside it.

A point of the ball comes with its transport plan, which says how much mass each pixel sends over
each offset of a window: the plan is the proof of the cost. An attack changes the plan, sums what
every pixel receives, evaluates the model on that image, and returns image and plan; the ball then
measures the plan.

`ball` is the set of images; `stencil` the window and sums over it; `plans` makes plans feasible and
measures them; `plan_attack` is what the attacks share. Attacks: `frank_wolfe` minimises the
linearised loss over plans by `linear_oracle`; `nearest_transport` is its minimum-norm form;
`sinkhorn_pgd` projects images by the constrained Sinkhorn iterations of `sinkhorn`;
`dual_projection` projects plans. `prices` finds the price of distance (the multiplier of the
budget) for all of them; `union` runs several Frank-Wolfe attacks, each on the survivors. `distance`
has the exact distance by a linear program, `entropic` a differentiable upper bound. `perturbations`
(shifts, rotations, blur) and `variance` (how much the moves of a plan differ) compare with natural
changes. :mod:`wdjax.certify` takes the ball as ``norm``.

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
