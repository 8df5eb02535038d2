"""Certificates: proofs that no attack can do better, for single samples and for distributions.

Single samples: bounds of the margins ``z_y - z_j`` over the ball around a sample come from
:mod:`wdjax.bounds`; `pointwise` turns them into certified samples and radii (`ranges` checks what
is asked: ball, box, radii of samples or entries); `verify` does so for a data set, with
checkpoints; `branch` tightens them by branch and bound: `signs` splits the region by the signs of
ReLUs (``wdjax.bounds.leaves`` bounds its subproblems and ranks the ReLUs to split). From `in_turn`
on two more searches bound the ReLUs' operands anew in parts of the region: `early_splits`, which
splits the first layers (``wdjax.bounds.rebounded``), and `parts`, where the margin is at most 0
(``wdjax.bounds.output_constraint``).
``wdjax.lipschitz.branching`` is another search, over activation masks, for Lipschitz constants.
`trainable` has differentiable bounds for training.

Any function: `properties` decides whether it has an output that a `specification` forbids:
`falsify` looks for one, `halving` is branch and bound over boxes of inputs. What is found can be
written down as a proof (``wdjax.proofs``); `recorded` tells it the splits of `signs`.

Distributions: `wdro` bounds the accuracy over a Wasserstein ball from certified radii, and the
expected loss from a Lipschitz constant; `growth` bounds the loss more tightly, from each sample's
growth profile (a bound of its loss within every distance); for an unbounded domain `asymptote`
bounds how fast the loss can grow far from the data.

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
