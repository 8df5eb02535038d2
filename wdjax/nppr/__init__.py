"""Probabilistic robustness (PR), its worst case in a family (NPPR), and rare failures.

PR is the share of randomly perturbed copies of an input that are still classified correctly, under
one of the fixed `distributions`. Non-parametric probabilistic robustness (NPPR) takes the worst
distribution of a learnt `family` instead, a Gaussian `mixture` whose samples `upsample` maps to the
input's space and into the ball. :func:`fit` learns it on one set of inputs, by the `objective` and
`fit_schedule`, and returns a `fitted` distribution; `warm` has starts from attacks; `regularised`
trains a model against it; `pictures` draws it.

:func:`estimate` then counts the copies that survive, on other inputs and under either kind of
distribution; `counting` draws and classifies the copies. `probable` decides for each input, by a
sequential test, whether its failure probability is at most rho. For failures too rare to be
counted, `rare` states the problem in normal space, `splitting` and `importance` solve it.
`bounded_ratio` turns any of these probabilities into the worst case over all distributions of
bounded density ratio, which needs no fit.

Open `estimate` first, then `fit`. To add a distribution: a frozen dataclass with the protocol
``Perturbation`` of `counting`, in `distributions`.
"""

from wdjax.nppr import distributions, pictures
from wdjax.nppr.bounded_ratio import BoundedRatio, bounded_ratio
from wdjax.nppr.counting import Perturbation, points
from wdjax.nppr.estimate import Estimate, estimate, expected_loss, spread_within
from wdjax.nppr.family import MODES, Family, Mode
from wdjax.nppr.fit import fit, fit_many
from wdjax.nppr.fit_schedule import TABLE_4, Loss, Schedule
from wdjax.nppr.fitted import FitHistory, Fitted
from wdjax.nppr.importance import importance
from wdjax.nppr.mixture import Mixture, entropy_ratio, log_density
from wdjax.nppr.probable import Decision, prbench, probabilistic_accuracy
from wdjax.nppr.rare import Rare
from wdjax.nppr.regularised import train_model
from wdjax.nppr.splitting import splitting
from wdjax.nppr.warm import AttackOffset, universal_start

__all__ = [
    "MODES",
    "TABLE_4",
    "AttackOffset",
    "BoundedRatio",
    "Decision",
    "Estimate",
    "Family",
    "FitHistory",
    "Fitted",
    "Loss",
    "Mixture",
    "Mode",
    "Perturbation",
    "Rare",
    "Schedule",
    "bounded_ratio",
    "distributions",
    "entropy_ratio",
    "estimate",
    "expected_loss",
    "fit",
    "fit_many",
    "importance",
    "log_density",
    "pictures",
    "points",
    "prbench",
    "probabilistic_accuracy",
    "splitting",
    "spread_within",
    "train_model",
    "universal_start",
]
