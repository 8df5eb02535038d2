"""Certificates: proved limits of any attack, for samples and for distributions.

`pointwise` turns bounds of margins (:mod:`wdjax.bounds`) into certified samples and radii; `verify`
does so for a data set, with checkpoints; `branch` is branch and bound. `wdro` and `growth` bound
accuracies and losses over Wasserstein balls, from radii, Lipschitz constants and growth profiles
(`asymptote` bounds slopes at infinity). `trainable` has differentiable bounds for training. Open
`pointwise` first.
"""

from wdjax.bounds.interval import bound
from wdjax.bounds.margins import METHODS
from wdjax.certify.growth import growth_bound
from wdjax.certify.pointwise import certified, margin_bounds, radius
from wdjax.certify.trainable import CertifiedTraining, trainable_bounds
from wdjax.certify.verify import verify
from wdjax.certify.wdro import certified_accuracy, lipschitz_constant, wdro_bound
from wdjax.core import Certificate
from wdjax.lipschitz.margin import interval_jacobian, layer_product, margin_lipschitz

__all__ = [
    "METHODS",
    "Certificate",
    "CertifiedTraining",
    "bound",
    "certified",
    "certified_accuracy",
    "growth_bound",
    "interval_jacobian",
    "layer_product",
    "lipschitz_constant",
    "margin_bounds",
    "margin_lipschitz",
    "radius",
    "trainable_bounds",
    "verify",
    "wdro_bound",
]
