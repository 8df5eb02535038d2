"""Randomised smoothing: certificates of any model, by votes on noisy copies of each sample.

A sample gets random noise; each noisy copy is classified, which is a vote; the counts of the votes
bound the probability of the most frequent class from below; and the noise turns that probability
into a radius.

`certificates` has the public functions: :func:`certify`, :func:`predict`, :func:`tally` (counts
only) and :func:`soft`, a differentiable approximation for attacks. `noise` has the Gaussian,
Laplace and uniform distributions, each with the radius that a probability certifies, and `flow`
noise on mass that moves between pixels; `grid` is the protocol of noise, and rounds noisy samples
so that the certificate holds for floats. `looks` plans how many votes are counted and after which
numbers of votes a sequential test may stop (its looks); `votes` runs the model and counts classes;
`binomial` has the confidence bounds and tests.

Open `certificates` first. To add a noise: a frozen dataclass with the protocol ``Noise`` of `grid`,
in a file here or in `noise`, and its name in ``__all__`` of `noise`.
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
