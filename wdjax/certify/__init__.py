"""Certificates: proofs that no attack can do better, for single samples and for distributions.

`pointwise` turns bounds of margins (:mod:`wdjax.bounds`) into certified samples and radii; `verify`
does so for a data set, with checkpoints; `branch` is branch and bound over the signs of ReLUs.
`properties` decides whether any function has an output that a `specification` forbids: `falsify`
looks for one, `halving` is branch and bound over boxes of inputs. `wdro` and `growth` bound
accuracies and losses over Wasserstein balls, from radii, Lipschitz constants and growth profiles
(`asymptote` bounds slopes at infinity). `trainable` has differentiable bounds for training. Open
`pointwise` first.
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
from wdjax.certify.trainable import CertifiedTraining, trainable_bounds
from wdjax.certify.verify import verify
from wdjax.certify.wdro import certified_accuracy, lipschitz_constant, wdro_bound
from wdjax.core import Certificate
from wdjax.lipschitz.margin import interval_jacobian, layer_product, margin_lipschitz

__all__ = [
    "LADDERS",
    "METHODS",
    "Certificate",
    "CertifiedTraining",
    "Specification",
    "Verdict",
    "agree",
    "bound",
    "certified",
    "certified_accuracy",
    "growth_bound",
    "in_range",
    "interval_jacobian",
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
