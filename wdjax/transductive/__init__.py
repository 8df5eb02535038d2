"""Transductive games: defences that adapt to their inputs, and attacks that simulate them.

In a round the attacker submits points; the defender adapts its model to them with a private random
key, which the attacker does not see unless it leaks; the referee measures the accuracy, as a mean
over several such private keys. To find points the attacker simulates the defence with keys of its
own, collects the simulated models in a `bank`, and attacks all of them: a `space_attack` maximises
one of the `objectives` over the bank, by `bank_search`.

`game` has the entry points, and lets `attacker`, `defender` and `referee` take `turns`; what is
saved between turns is their `state`, and `game_identity` says to which game it belongs.
`game_report` has the accuracies. `defense` is the protocol of a defence, and `defenses` has one a
file; they train by `fitting` and `adamod`. `presets` has the settings of Chen et al. (2022)
for networks of your own; `digits` has small games that run on a CPU, which the command line plays.
`mixed_strategies` solves games by the double oracle.

Open `game` first. To add a defence: a file in `defenses` with the methods of `defense`, its name in
``__all__`` there and here, and for the command line a case in ``CASES`` of `digits` and a row in
``FAMILIES`` of ``wdjax/cli/game_command.py``.
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
from wdjax.transductive.mixed_strategies import (
    Equilibrium,
    Reply,
    double_oracle,
    matrix_game,
    mixed_play,
)
from wdjax.transductive.objectives import Objective, confidence, unnoticed
from wdjax.transductive.presets import PAPER, Preset
from wdjax.transductive.space_attack import (
    SpaceAttack,
    fpa,
    given,
    gmsa_avg,
    gmsa_min,
    pgd_skip,
    transfer,
)

__all__ = [
    "DANN",
    "DENT",
    "PAPER",
    "RMC",
    "TADV",
    "Bank",
    "Defense",
    "Equilibrium",
    "Fixed",
    "GameReport",
    "Objective",
    "Opponent",
    "Preset",
    "Purify",
    "Rejection",
    "Reply",
    "Share",
    "SpaceAttack",
    "URejectron",
    "adamod",
    "add_model",
    "confidence",
    "cost_multiple",
    "double_oracle",
    "empty_bank",
    "fpa",
    "given",
    "gmsa_avg",
    "gmsa_min",
    "matrix_game",
    "mixed_play",
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
