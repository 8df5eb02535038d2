"""Randomised smoothing: certificates of any model by the votes of noisy copies of each sample.

`certificates` has the public functions: :func:`certify`, :func:`predict`, and :func:`soft`, a
differentiable approximation for attacks. They call `looks`, which plans how many votes are counted
and when a test may stop; `votes` runs the model and counts classes; `noise` has the distributions,
each with the radius that a probability certifies (`flow` for mass that moves between pixels);
`grid` makes noise whose rounding is bounded; `binomial` has the tests. Open `certificates` first.
"""

from wdjax.smoothing import noise
from wdjax.smoothing.certificates import cautions, certify, decide, predict, soft, tally
from wdjax.smoothing.looks import ABSTAIN, SmoothedCertificate

__all__ = [
    "ABSTAIN",
    "SmoothedCertificate",
    "cautions",
    "certify",
    "decide",
    "noise",
    "predict",
    "soft",
    "tally",
]
