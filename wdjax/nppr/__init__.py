"""Non-parametric probabilistic robustness (NPPR), and other probabilities of survival.

:func:`fit` learns the worst distribution of a family of perturbations; :func:`estimate` counts the
copies that survive it on held-out inputs; with one of the fixed `distributions` the same function
measures PR. A fit uses `family` (the networks, with `mixture` and `upsample`), `objective` and
returns `fitted`; `counting` draws copies for `estimate` and `probable` (decisions with a
confidence); `rare`, `splitting` and `importance` are for failures too rare to be counted. Open
`estimate` first, then `fit`.
"""

from wdjax.nppr import distributions, pictures
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
