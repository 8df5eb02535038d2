"""What a model, an attack and a result are."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Model = jax.tree_util.Partial
"""A classifier ``logits = model(x)``: ``Model(apply, params)`` with ``apply(params, x)`` pure.

A pytree whose leaves are the parameters, so it passes through ``jit``, ``vmap`` and ``grad`` as an
argument: new parameters never recompile, and stacked parameters are a bank of models.

>>> model = Model(lambda params, x: x @ params["w"], {"w": jnp.eye(2)})
>>> model(jnp.ones((1, 2))).tolist()
[[1.0, 1.0]]
"""

Array = jax.Array
Knobs = dict[str, Any]


class Info(NamedTuple):
    """What one step did to every sample: ``[n]`` leaves, ``[steps, n]`` in a :class:`Result`."""

    margin: Array | np.ndarray
    """``max_{j != y} z_j - z_y`` where the step started. Of a step not taken, the last one known,
    or in a cycle what it would have been."""
    gradients: Array | np.ndarray
    """Backward passes spent on the sample."""
    forwards: Array | np.ndarray
    """Forward passes spent on the sample."""


class Stage(NamedTuple):
    """``length`` repetitions of ``step(model, x, y, state, **knobs) -> (state, info)``.

    ``x`` are the clean samples and ``y`` their labels. A step treats every sample alone and is a
    function of its arguments. ``done(state)`` tells, ``[n]``, which samples further steps of this
    stage would leave as they are.
    """

    step: Callable[..., tuple[Any, Info]]
    length: int
    done: Callable[[Any], Array] | None = None


def _whole_mass(cost, success, *, eps, **knobs):
    """A point-wise attack moves every sample whole."""
    return jnp.ones_like(cost)


def _within_eps(*, eps, **knobs):
    """A point-wise attack moves no sample by more than ``eps``."""
    return eps


def _never(state):
    """An attack that always takes all its steps."""
    return jnp.zeros(len(jax.tree.leaves(state)[0]), bool)


class Attack(NamedTuple):
    """An attack as pure functions of batches; what changes the program is bound inside.

    A single-stage attack is an ``init`` and a ``step``; an attack whose program changes on the way
    (WDA probes all rivals, then follows one) is a sequence of stages that share a state, a pytree
    of one or more ``[n, ...]`` leaves. The defaults are those of a point-wise attack.
    """

    name: str
    init: Callable[..., Any]
    """``(model, x, y, logits, keys, **knobs) -> state``: logits at ``x``, keys a sample or None."""
    stages: tuple[Stage, ...]
    point: Callable[..., Array]
    """``(x, state, **knobs) -> [n, *shape]``: the adversarial points."""
    norm: float
    order: float = math.inf
    box: tuple[float, float] | None = (0.0, 1.0)
    knobs: tuple[tuple[str, Any], ...] = ()
    """Names and defaults of the numbers that may be traced, besides ``eps``."""
    random: bool = False
    reach: Callable[..., Array] = _within_eps
    """``(**knobs) ->`` the largest cost a single point may have."""
    weigh: Callable[..., Array] = _whole_mass
    """``(cost, success, **knobs) -> [n]``: the mass moved, decided over the whole data set."""
    converged: Callable[[Any], Array] = _never
    """``state -> [n]`` bool: the samples for which nothing was left to do."""

    @property
    def steps(self):
        """Steps of all stages."""
        return sum(stage.length for stage in self.stages)


class Result(NamedTuple):
    """An adversarial distribution and its measurements; a plain pytree of ``[n]`` leaves.

    The distribution is the paper's equation 11: sample i keeps ``1 - weight[i]`` of its mass and
    sends ``weight[i] = 1 / kappa_i`` to ``x_adv[i]``.
    """

    x_adv: Array
    weight: Array
    cost: Array
    """``||x_adv - x||_r``, measured."""
    clean: Array
    """Whether ``x`` is classified correctly."""
    success: Array
    """Whether ``x_adv`` is misclassified, recomputed from the stored point."""
    margin: Array
    """Margin at ``x_adv``: positive where misclassified."""
    converged: Array
    """Whether the attack had nothing left to do for the sample."""
    gradients: Array
    forwards: Array
    info: Info

    @property
    def accuracy(self):
        """Accuracy under the adversarial distribution (Appendix E of the paper)."""
        kept = (1 - self.weight) * self.clean
        return jnp.mean(kept + self.weight * ~self.success, axis=-1)


class Progress(NamedTuple):
    """Where :func:`wdjax.run` is, for callbacks."""

    taken: int
    """Steps taken or found unnecessary, summed over the samples."""
    total: int
    """Steps of all samples."""
    samples: np.ndarray
    """``[m]``: the samples that were advanced last."""
    info: Info
    """What their last steps did, ``[chunk, m]``, on the host."""
