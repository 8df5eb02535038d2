"""Transductive games: defences that adapt to their inputs, and attacks that simulate them.

`game` lets `attacker`, `defender` and `referee` take `turns`; what is saved between turns is their
`state`, and `game_identity` tells to which game it belongs. `defense` is the protocol of a defence,
and `defenses` has one a file. A `space_attack` raises one of the `objectives` over a `bank` of
models, by `bank_search`; a `game_report` has accuracies over private keys. `presets` has the
paper's settings, and `digits` a small table of games for a CPU. Open `game` first, then `turns`.
"""

from wdjax.transductive.adamod import adamod
from wdjax.transductive.bank import Bank, add_model, empty_bank, victim
from wdjax.transductive.bank_search import objective_at, raise_objective
from wdjax.transductive.defense import Defense
from wdjax.transductive.defenses import DANN, DENT, RMC, TADV, Fixed, Purify, URejectron
from wdjax.transductive.fitting import Opponent, train_classifier
from wdjax.transductive.game import play, prepare
from wdjax.transductive.game_report import (
    GameReport,
    Rejection,
    Share,
    cost_multiple,
    share_with_interval,
    worst,
)
from wdjax.transductive.objectives import Objective, confidence, unnoticed
from wdjax.transductive.presets import PAPER
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
    "add_model",
    "confidence",
    "cost_multiple",
    "empty_bank",
    "fpa",
    "gmsa_avg",
    "gmsa_min",
    "objective_at",
    "pgd_skip",
    "play",
    "prepare",
    "raise_objective",
    "share_with_interval",
    "train_classifier",
    "transfer",
    "unnoticed",
    "victim",
    "worst",
]
