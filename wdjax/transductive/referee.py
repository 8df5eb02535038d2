"""The referee: lets the defender adapt to the submitted points under private keys, and measures."""

from typing import Any, NamedTuple

import jax
import numpy as np

from wdjax import parallel
from wdjax.core import Array, PyTree
from wdjax.transductive.defender import Defender, Outcomes
from wdjax.transductive.space_attack import SpaceAttack
from wdjax.transductive.state import BestSet, DefenderStates, RoundInputs


class Referee(NamedTuple):
    """What the referee knows."""

    defender: Defender
    attack: SpaceAttack
    """Its ball bounds the submitted points."""
    eps: Array
    key: Array
    """The key of which the defender's private keys are made."""
    draws: int
    """Private keys for each round."""

    def private_key(self, number: int, draw: int) -> Array:
        """The private key of a round and draw."""
        return jax.random.fold_in(jax.random.fold_in(self.key, number), draw)

    def outcomes(self, adapted: PyTree, x: Array, y: Array) -> Outcomes:
        """The results of a model on inputs ``[n, *shape]``."""
        return self.defender.outcomes(self.attack.judge or self.attack.loss, adapted, x, y)

    def base(self, n: int) -> PyTree:
        """The model before adaptation, for n inputs."""
        return self.defender.base(self.defender.begin(), n)


def check_clean(referee: Referee, inputs: RoundInputs) -> None:
    """Raises if the model before adaptation is not finite on the inputs of a round."""
    _, x, y = inputs
    if not np.all(referee.outcomes(referee.base(len(y)), x, y).fine):
        raise ValueError(
            "the model before adaptation returned outputs that are not finite on clean inputs; "
            "no robustness can be reported for such a model."
        )


def judge(
    referee: Referee, states: DefenderStates, submitted: BestSet, inputs: RoundInputs
) -> tuple[dict[str, Any], DefenderStates]:
    """The results of a round by name, ``[draws, size]`` and ``[size]``, and the next states.

    Under each private key the defender adapts to the submitted points, and in a game of its own to
    the clean inputs.
    """
    n, x, x_adv, base = len(inputs.y), inputs.x, submitted.x, referee.base(len(inputs.y))
    cost = measured_costs(referee, x, x_adv)
    attacked, true = _defended(referee, states.attacked, x_adv, inputs)
    clean, other = _defended(referee, states.clean, x, inputs)
    static, static_clean = (referee.outcomes(base, points, inputs.y) for points in (x_adv, x))
    fine = [attacked.fine[:, :n], clean.fine[:, :n], static.fine[None], static_clean.fine[None]]
    results = {
        "x_adv": parallel.local(x_adv),
        "cost": cost,
        "correct": attacked.right[:, :n],
        "correct_clean": clean.right[:, :n],
        "static": static.right,
        "static_clean": static_clean.right,
        "fault": np.asarray(parallel.local(submitted.fault)) | ~np.concatenate(fine).all(axis=0),
        "chosen": int(submitted.number),
        "score": attacked.score[:, :n],
        # In company, clean inputs are scored beside the submitted points.
        "score_clean": attacked.score[:, n:] if referee.defender.company else clean.score,
    }
    return results, DefenderStates(true, other)


def _defended(
    referee: Referee, state: PyTree, points: Array, inputs: RoundInputs
) -> tuple[Outcomes, PyTree]:
    """Adaptation to points ``[size, *shape]`` under every private key of a round.

    Returns outcomes ``[draws, size]``, or ``[draws, 2 size]`` in company, and the state that the
    first draw leaves for the next round.
    """
    defender, following = referee.defender, state
    given, labels = defender.given(points, inputs.x), defender.labels(inputs.y)
    made = []
    for draw in range(referee.draws):
        secret = referee.private_key(inputs.number, draw)
        adapted, after = defender.adapt(secret, state, given)
        made.append(referee.outcomes(adapted, given, labels))
        if draw == 0:
            following = defender.between(jax.random.fold_in(secret, 0), after)
    return Outcomes(*(np.stack(leaves) for leaves in zip(*made))), following  # type: ignore[arg-type]


def measured_costs(referee: Referee, x: Array, x_adv: Array) -> np.ndarray:
    """``[size]``: costs of the submitted points; raises if one is outside ball or box."""
    cost = np.asarray(parallel.local(referee.attack.inner.ball.cost(x, x_adv)))
    eps = float(referee.eps)
    outside = ~(cost <= eps * (1 + 1e-6))
    if outside.any():
        first = int(np.argmax(outside))
        raise ValueError(
            f"the attack submitted {int(outside.sum())} points outside of their ball or box, first "
            f"at index {first} with cost {cost[first]:g} of {eps:g}."
        )
    return cost
