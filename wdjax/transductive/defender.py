"""The defender as every player can run it: a defence with its memory, without key and state."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import distinct, losses, norms, parallel
from wdjax.core import Array, PyTree
from wdjax.transductive.defense import Defense
from wdjax.transductive.objectives import logits_of


class Outcomes(NamedTuple):
    """The results of a model on inputs: ``[n]`` leaves."""

    right: Array
    """Whether an input is classified correctly; False where an output is not finite."""
    fine: Array
    """Whether all outputs are finite."""
    score: Array
    """The score of a rejecting defence, else 0."""
    value: Array
    """The attacker's loss."""


class Defender(NamedTuple):
    """A defence and its memory; its methods are compiled once for all games."""

    defense: Defense
    memory: PyTree
    company: bool
    """Whether the clean inputs of a round are given together with the submitted points."""

    def begin(self) -> PyTree:
        """The state before the first round."""
        return self.defense.begin(self.memory)

    def base(self, state: PyTree, n: int) -> PyTree:
        """Adapted parameters for n inputs before any adaptation."""
        return compiled_base(self.defense, self.memory, state, n)

    def given(self, points: Array, x: Array) -> Array:
        """What it adapts to: points ``[size, *shape]``, or ``[2 size, *shape]`` in company."""
        return jnp.concatenate([points, x]) if self.company else points

    def labels(self, y: Array) -> Array:
        """The labels of :meth:`given`, which the defender never sees."""
        return jnp.concatenate([y, y]) if self.company else y

    def adapt(self, key: Array, state: PyTree, given: Array) -> tuple[PyTree, PyTree]:
        """``(adapted, state)`` after a round under a private key."""
        return compiled_adapt(self.defense, key, self.memory, state, given)

    def between(self, key: Array, state: PyTree) -> PyTree:
        """The state at the start of the next round."""
        return compiled_between(self.defense, key, self.memory, state)

    def outcomes(
        self, loss: Callable[[Any, Array], Array], adapted: PyTree, x: Array, y: Array
    ) -> Outcomes:
        """The results of an adapted model on inputs ``[n, *shape]``, on the host."""
        told = compiled_outcomes(loss, self.defense, self.memory, adapted, x, y)
        return jax.device_get(parallel.local(told))


compiled_adapt = distinct.jit(lambda defense, *given: defense.adapt(*given))
compiled_between = distinct.jit(lambda defense, *given: defense.between(*given))
compiled_base = distinct.jit(lambda defense, *given: defense.base(*given), static_argnums=3)


@functools.partial(distinct.jit, static_argnums=0)
def compiled_outcomes(
    loss: Callable[[Any, Array], Array],
    defense: Defense,
    memory: PyTree,
    adapted: PyTree,
    x: Array,
    y: Array,
) -> Outcomes:
    """The results of a model on inputs ``[n, *shape]``; an output that is not finite is wrong."""
    out = defense.predict(memory, adapted, x)
    logits = logits_of(out)
    fine = norms.finite(out)
    right = fine & (losses.decision_margin(logits, y) <= 0)
    score = out[1] if defense.rejects else jnp.zeros(len(y), logits.dtype)
    return Outcomes(right, fine, score, loss(out, y))
