"""Randomised smoothing: certificates of any model by the votes of noisy copies of each sample.

`certificates` is the front door: :func:`certify`, :func:`predict`, and :func:`soft`, the
differentiable stand-in that attacks use. A sample goes from there to `looks`, which plans how many
votes are asked and when they decide; `votes` asks the model and counts classes; `noise` has the
distributions, each with the radius that a probability certifies (`flow` for mass that moves between
pixels); `grid` makes noise whose rounding is bounded; `binomial` has the tests. Open `certificates`
first.
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
