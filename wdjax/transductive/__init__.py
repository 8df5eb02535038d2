"""Transductive games: defences that adapt to inputs, attacks on the models they would have.

`game` plays attacker, defender and referee in the `turns` of an iteration, on a `state`; `defense`
says what a defence is, and `defenses` has one a file. A `space_attack` raises `objectives` over the
models of a `bank`, by `bank_search`; `referee` reports accuracies over private keys. `presets` and
`digits` are the paper's settings and a small table that a CPU plays. Open `game` first.
"""

from wdjax.transductive.adamod import adamod
from wdjax.transductive.bank import Bank, empty, push, victim
from wdjax.transductive.bank_search import objective_at, raise_objective
from wdjax.transductive.defense import Defense
from wdjax.transductive.defenses import DANN, DENT, RMC, TADV, Fixed, Purify, URejectron
from wdjax.transductive.fitting import Opponent, fit
from wdjax.transductive.game import play, prepare
from wdjax.transductive.objectives import Objective, confidence, unnoticed
from wdjax.transductive.presets import PAPER
from wdjax.transductive.referee import GameReport, Rejection, Share, cost_multiple, share, worst
from wdjax.transductive.space_attack import SpaceAttack, fpa, gmsa_avg, gmsa_min, pgd_skip, transfer

__all__ = [
    "DANN",
    "DENT",
    "PAPER",
    "RMC",
    "TADV",
    "Bank",
    "Defense",
    "Fixed",
    "GameReport",
    "Objective",
    "Opponent",
    "Purify",
    "Rejection",
    "Share",
    "SpaceAttack",
    "URejectron",
    "adamod",
    "confidence",
    "cost_multiple",
    "empty",
    "fit",
    "fpa",
    "gmsa_avg",
    "gmsa_min",
    "objective_at",
    "pgd_skip",
    "play",
    "prepare",
    "push",
    "raise_objective",
    "share",
    "transfer",
    "unnoticed",
    "victim",
    "worst",
]
