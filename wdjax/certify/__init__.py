"""Certificates: proofs that no attack can do better, for single samples and for distributions.

Margins ``z_y - z_j`` over a sample's ball (checked by `ranges`) are bounded in :mod:`wdjax.bounds`.
`pointwise` makes certified samples and radii of the bounds, `verify` does so for a data set,
`anytime` by ever tighter methods in given seconds. `branch` tightens them by branch and bound:
`in_turn` runs `signs` (splits by the signs of ReLUs), `subdomains` (first layers first, and other
functions than ReLU) and `parts` (where the margin is at most 0). `trainable` has differentiable
bounds for training.

Any function: `properties` decides whether an output occurs that a `specification` forbids;
`falsify` looks for one, `halving` splits boxes of inputs, `recorded` tells :mod:`wdjax.proofs` the
splits of `signs`. Distributions: `wdro` has bounds over a Wasserstein ball from certified radii or
a Lipschitz constant, `growth` tighter ones from each sample's growth profile, `asymptote` the
loss's growth far from the data.

Open `pointwise` first. To add a certificate of samples: a function ``(model, x, y) -> [n]`` radii,
in a file here and in ``__all__``; ``wdjax.audit(certificates={name: function})`` then draws it, and
``standard_certificates`` of ``wdjax/report/proved.py`` makes it a default.
"""

from wdjax.bounds.interval import bound
from wdjax.bounds.margins import METHODS
from wdjax.certify.growth import growth_bound
from wdjax.certify.pointwise import certified, margin_bounds, radius
from wdjax.certify.properties import LADDERS, Verdict, properties, property
from wdjax.certify.specification import (
    Specification,
    agree,
    in_range,
    label_wins,
    monotone,
)
from wdjax.certify.trainable import CertifiedTraining, interval_start, trainable_bounds
from wdjax.certify.verify import verify
from wdjax.certify.wdro import certified_accuracy, lipschitz_constant, wdro_bound
from wdjax.core import Certificate
from wdjax.lipschitz.margin import interval_jacobian, layer_product, margin_lipschitz
from wdjax.proofs.recorder import Proof

__all__ = [
    "LADDERS",
    "METHODS",
    "Certificate",
    "CertifiedTraining",
    "Proof",
    "Specification",
    "Verdict",
    "agree",
    "bound",
    "certified",
    "certified_accuracy",
    "growth_bound",
    "in_range",
    "interval_jacobian",
    "interval_start",
    "label_wins",
    "layer_product",
    "lipschitz_constant",
    "margin_bounds",
    "margin_lipschitz",
    "monotone",
    "properties",
    "property",
    "radius",
    "trainable_bounds",
    "verify",
    "wdro_bound",
]
