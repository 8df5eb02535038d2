"""Certificates: what no attack can do, for samples and for distributions."""

from wdjax.certify import noise, smoothing
from wdjax.certify.growth import growth_bound
from wdjax.certify.interval import bound
from wdjax.certify.lipschitz import interval_jacobian, layer_product, margin_lipschitz
from wdjax.certify.margins import METHODS
from wdjax.certify.pointwise import certified, margin_bounds, radius
from wdjax.certify.trainable import CertifiedTraining, trainable_bounds
from wdjax.certify.verify import Certificate, verify
from wdjax.certify.wdro import certified_accuracy, lipschitz_constant, wdro_bound

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
    "noise",
    "radius",
    "smoothing",
    "trainable_bounds",
    "verify",
    "wdro_bound",
]
