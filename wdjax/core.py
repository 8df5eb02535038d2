"""What a model, a ball, an attack and its findings are: the types that everything else speaks."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import remarks

Array = jax.Array
AnyArray = jax.Array | np.ndarray
PyTree = Any
Classifier = Callable[[Array], Array]
"""``[n, *shape] -> [n, K]``, a pytree, as :data:`Model` is."""

Model = jax.tree_util.Partial
"""A classifier ``out = model(x)``: ``Model(apply, params)`` with ``apply(params, x)`` pure.

A pytree whose leaves are the parameters, so it passes through ``jit``, ``vmap`` and ``grad`` as an
argument: new parameters never recompile, and stacked parameters are a bank of models. ``out`` has
the leading axis n: mostly logits ``[n, K]``; ``[n, M, K]`` for a bank of M models; ``(logits,
reject)`` for a model that may refuse to answer.

>>> model = Model(lambda params, x: x @ params["w"], {"w": jnp.eye(2)})
>>> model(jnp.ones((1, 2))).tolist()
[[1.0, 1.0]]
"""


class Criterion(Protocol):
    """``(out, y) -> [n]``: positive exactly where the attacker has won."""

    def __call__(self, out: PyTree, y: Array, /) -> Array: ...


class Ball(Protocol):
    """What may move, and what it costs.

    >>> from wdjax import Lp
    >>> Lp(2).cost(jnp.zeros((2, 2)), jnp.array([[0.6, 0.8], [0.0, -0.1]])).tolist()
    [1.0, inf]
    """

    @property
    def box(self) -> tuple[float, float] | None:
        """The range of valid inputs, or None."""
        ...

    def cost(self, x: Array, x_adv: Array, proof: PyTree = None) -> Array:
        """``[n]`` costs of moving ``x`` to ``x_adv``, measured; inf for a point not allowed at all.

        ``proof`` is what an attack hands over where points alone do not tell their cost (the plan
        of a transport, say), and must itself be checked. Staying costs 0 and needs no proof.
        """
        ...


class Victim(NamedTuple):
    """What is attacked, and when it has fallen; a pytree."""

    model: Callable[[Array], PyTree]
    criterion: Callable[[PyTree, Array], Array]


class Samples(NamedTuple):
    """What an attack is told: ``[n, ...]`` leaves."""

    x: Array
    """``[n, *shape]``"""
    y: Array
    """``[n]`` int32"""
    eps: Array | None
    """``[n]`` radii; None only for minimum-norm attacks, to which they are no more than a scale."""
    out: PyTree
    """``model(x)``"""

    @property
    def radius(self) -> Array:
        """``eps``, where there must be one."""
        if self.eps is None:
            raise ValueError("this attack needs a radius: pass eps.")
        return self.eps


class Info(NamedTuple):
    """What one step did to every sample: ``[n]`` leaves."""

    value: Array
    """The criterion where the step started."""
    gradients: Array
    """Backward passes spent."""
    forwards: Array
    """Forward passes spent."""
    zeros: Array
    """Gradients that were zero in every coordinate: nothing could be learnt from them."""
    fault: Array
    """Whether an output or a gradient was not finite."""


class Stage(NamedTuple):
    """``length`` repetitions of ``step(victim, samples, state) -> (state, info)``.

    A step treats every sample alone and is a function of its arguments.
    """

    step: Callable[[Victim, Samples, PyTree], tuple[PyTree, Info]]
    length: int
    done: Callable[[PyTree], Array] | None = None
    """``state -> [n]``: further steps of this stage would leave these samples as they are."""
    couple: Callable[[Samples, PyTree, Array], PyTree] | None = None
    """``(samples, state, chosen [n]) -> state`` after every step, over all samples at once: where a
    budget of the whole data set lives. Rows that are not chosen are to be left out of sums."""
    cycles: bool = False
    """Look for samples whose state is, bit for bit, that of two steps ago, and end them early. Pays
    for sign steps, which run into corners of their ball; costs a copy of the state."""


class Attack(Protocol):
    """How to look: a frozen pytree dataclass, settings static, numbers as leaves.

    A step sees batches of samples in any composition, so that everything it does is per sample.
    """

    @property
    def ball(self) -> Ball: ...

    @property
    def budget(self) -> Literal["sample", "data", "none"]:
        """What ``eps`` binds: every point; the data set as a whole; or nothing, since the attack
        returns the nearest flip (a minimum-norm attack)."""
        ...

    @property
    def random(self) -> bool:
        """Whether :meth:`init` needs keys."""
        ...

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Programs that follow each other and share the state."""
        ...

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> PyTree:
        """The first state, of one or more ``[n, ...]`` leaves.

        ``start`` ``[n, *shape]`` are points to begin at, the samples themselves if None; ``keys``
        ``[n]`` come from global indices, so that batching never changes the randomness.
        """
        ...

    def point(self, samples: Samples, state: PyTree) -> tuple[Array, PyTree]:
        """The points found, ``[n, *shape]``, and the proof of their costs or None."""
        ...

    def finished(self, state: PyTree) -> Array:
        """``[n]``: nothing was left to do."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found, measured at the stored points; a pytree of ``[n]`` leaves.

    A point that is infeasible or not finite has been replaced by its sample.
    """

    x_adv: Array
    """``[n, *shape]``"""
    proof: PyTree
    """What shows the cost of the points that moved, for balls that need it."""
    cost: Array
    """Of moving the sample there, measured by the ball."""
    correct: Array
    """Whether the criterion does not hold at the sample: mostly, classified correctly."""
    success: Array
    """Whether the criterion holds at ``x_adv``, recomputed from the stored point."""
    margin: Array
    """The criterion at ``x_adv``: positive where the attacker has won."""
    done: Array
    """Whether the attack had nothing left to do for the sample; never after a fault."""
    fault: Array
    """Whether an output or a gradient was not finite on the way. Such a sample may be less robust
    than it looks."""
    zeros: Array
    """Gradients that were zero in every coordinate, of all :attr:`gradients`."""
    gradients: Array
    """Backward passes spent."""
    forwards: Array
    """Forward passes spent."""
    limit: Array | None = None
    """The largest cost that the ball allows anywhere in its box; inf without a box."""
    history: Info | None = None
    """``[steps, n]`` leaves on the host, where asked for. A step that was not taken counts no
    passes and repeats the last value."""
    overlooked: AnyArray | None = None
    """Where the attack was blind: samples that stand here, and that a second look broke."""

    @property
    def passes(self) -> Array:
        """Forward and backward passes: the queries of AttackBench."""
        return self.gradients + self.forwards

    @property
    def remarks(self) -> list[str]:
        """What to know before believing these numbers: faults, zero gradients, what was overlooked.

        Not inside a trace.
        """
        return remarks.of(remarks.spent(self))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Result(Found):
    """An adversarial distribution and its measurements: :class:`Found` and the mass that moves.

    The distribution is the paper's equation 11: sample i keeps ``1 - weight[i]`` of its mass and
    sends ``weight[i] = 1 / kappa_i`` to ``x_adv[i]``.
    """

    weight: Array

    @property
    def accuracy(self) -> Array:
        """Accuracy under the distribution (Appendix E of the paper).

        Piecewise constant in the model's parameters and in a point-wise ``eps``, so its gradient
        there is 0: differentiate the expected loss of the distribution instead. In the ``eps`` of a
        knapsack it is piecewise linear, with the right gradient.
        """
        facts = self.weight, self.correct, self.success
        if any(isinstance(fact, jax.core.Tracer) for fact in facts):
            weight, correct, success = facts
            return jnp.mean((1 - weight) * correct + weight * ~success, axis=-1)
        # On the host nothing is compiled for a number of samples. XLA's means are products, too.
        weights, before, after = map(np.asarray, facts)
        moved, unit = weights.astype(np.float64), weights.dtype.type(1) / weights.shape[-1]
        right = np.sum((1 - moved) * before + moved * ~after, axis=-1)
        return jax.device_put(right.astype(weights.dtype) * unit.astype(weights.dtype))


class Progress(NamedTuple):
    """Where a search is, for callbacks."""

    taken: int
    """Steps taken or found unnecessary, summed over the samples."""
    total: int
    """Steps of all samples."""
    unfinished: np.ndarray
    """``[m]`` indices of the samples that go on in this stage."""


Claim: TypeAlias = Literal["float program", "exact arithmetic"]
CLAIM: Claim = "float program"
"""What certificates speak of: the model's floats, summed in any order, and so exact arithmetic."""


class Certificate(NamedTuple):
    """What is proved of samples, ``[n]``, and about what."""

    correct: npt.NDArray[Any]
    margin: npt.NDArray[Any]
    """Lower bounds of the least margin within ``eps``."""
    radius: npt.NDArray[Any]
    """Verified radii: at least ``eps`` where the sample is verified."""
    method: str
    claim: Claim
    ended: tuple[str, ...] = ()
    """How branch and bound ended with each sample, of ``branch.ENDS``; empty for other methods."""
    remarks: tuple[str, ...] = ()
    """Why bounds may be looser than those of another model with the same answers."""

    @property
    def verified(self) -> npt.NDArray[Any]:
        """Whether no point within ``eps`` is misclassified."""
        return np.asarray(self.margin > 0)
