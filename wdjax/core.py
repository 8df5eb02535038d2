"""The types of the library: models, balls, attacks, their results and certificates."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import distinct, remarks

Array = jax.Array
AnyArray = jax.Array | np.ndarray
PyTree = Any
Classifier = Callable[[Array], Array]
"""``[n, *shape] -> [n, K]``, a pytree, as :data:`Model` is."""


class Model(jax.tree_util.Partial):
    """A classifier ``out = model(x)``: ``Model(apply, params)`` with ``apply(params, x)`` pure.

    A pytree whose leaves are the parameters, so it passes through ``jit``, ``vmap`` and ``grad`` as
    an argument: new parameters never recompile, and stacked parameters are a bank of models.
    ``out`` has the leading axis n: mostly logits ``[n, K]``; ``[n, M, K]`` for a bank of M models;
    ``(logits, reject)`` for a model that may refuse to answer.

    >>> model = Model(lambda params, x: x @ params["w"], {"w": jnp.eye(2)})
    >>> model(jnp.ones((1, 2))).tolist()
    [[1.0, 1.0]]
    >>> model
    Model(<lambda>, 4 numbers in 1 array)
    """

    def __repr__(self) -> str:
        leaves = jax.tree.leaves((self.args, self.keywords))
        name = getattr(self.func, "__name__", None) or repr(self.func).splitlines()[0][:60]
        size, several = sum(np.size(leaf) for leaf in leaves), "s" * (len(leaves) != 1)
        return f"Model({name}, {size:,} numbers in {len(leaves)} array{several})"


jax.tree_util.register_pytree_node(
    Model,
    lambda model: ((model.args, model.keywords), model.func),
    lambda function, given: Model(function, *given[0], **given[1]),
)


class Criterion(Protocol):
    """``(out, y) -> [n]``: positive exactly where the attacker has won."""

    def __call__(self, out: PyTree, y: Array, /) -> Array: ...


class Ball(Protocol):
    """The allowed perturbations and their costs.

    >>> from wdjax import Lp
    >>> Lp(2).cost(jnp.zeros((2, 2)), jnp.array([[0.6, 0.8], [0.0, -0.1]])).tolist()
    [1.0, inf]
    """

    @property
    def box(self) -> tuple[float, float] | None:
        """The range of valid inputs, or None."""
        ...

    def cost(self, x: Array, x_adv: Array, proof: PyTree = None) -> Array:
        """``[n]`` costs of moving ``x`` to ``x_adv``, ``[n, *shape]``; inf for points not allowed.

        ``proof`` is given by attacks whose points alone do not determine the cost (a transport
        plan, for example), and must be checked here. Not moving costs 0 and needs no proof.
        """
        ...


class Victim(NamedTuple):
    """The attacked model, and the criterion of success; a pytree."""

    model: Callable[[Array], PyTree]
    criterion: Callable[[PyTree, Array], Array]


class Samples(NamedTuple):
    """The data that an attack gets: ``[n, ...]`` leaves."""

    x: Array
    """``[n, *shape]``"""
    y: Array
    """``[n]`` int32"""
    eps: Array | None
    """``[n]`` radii; None only for minimum-norm attacks, which use them as a scale at most."""
    out: PyTree
    """``model(x)``"""

    @property
    def radius(self) -> Array:
        """``eps``; a ValueError if it is None."""
        if self.eps is None:
            raise ValueError("this attack needs a radius: pass eps.")
        return self.eps


class Info(NamedTuple):
    """What one step did, for every sample: ``[n]`` leaves."""

    value: Array
    """The criterion at the step's starting point."""
    gradients: Array
    """Number of backward passes."""
    forwards: Array
    """Number of forward passes."""
    zeros: Array
    """Number of gradients that were zero in every coordinate, and so useless."""
    fault: Array
    """Whether an output or a gradient was not finite."""


class Stage(NamedTuple):
    """``length`` repetitions of ``step(victim, samples, state) -> (state, info)``.

    A step treats every sample alone and is a function of its arguments.
    """

    step: Callable[[Victim, Samples, PyTree], tuple[PyTree, Info]]
    length: int
    done: Callable[[PyTree], Array] | None = None
    """``state -> [n]``: whether further steps of this stage would leave a sample as it is."""
    couple: Callable[[Samples, PyTree, Array], PyTree] | None = None
    """``(samples, state, chosen [n]) -> state``, called after every step on all samples at once,
    for a budget of the whole data set. Rows that are not chosen must be left out of sums."""
    cycles: bool = False
    """Whether to end samples early whose state is, bit for bit, that of two steps ago. Useful for
    sign steps, which get stuck in corners of their ball; costs a copy of the state."""


class Attack(Protocol):
    """An attack: a frozen pytree dataclass with static settings and numbers as leaves.

    A step must treat every sample alone, since batches may have any composition.

    An attack may have an attribute ``shared``: two attacks, in place of which ``init`` of the first
    and everything else of the second give the same. Attacks of which these differ in leaves only
    share their compiled programs. Only an attack whose attribute ``sparse`` is True is given a ball
    of norm 0. Where ``uneven`` is True, since some samples need far more steps than others, batches
    are smaller on a CPU.
    """

    @property
    def ball(self) -> Ball: ...

    @property
    def budget(self) -> Literal["sample", "data", "none"]:
        """What ``eps`` limits: the cost of every point; that of the whole data set; or nothing,
        since the attack returns the nearest flip (a minimum-norm attack)."""
        ...

    @property
    def random(self) -> bool:
        """Whether :meth:`init` needs random keys."""
        ...

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, which run one after another on the same state."""
        ...

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> PyTree:
        """The first state, of one or more ``[n, ...]`` leaves.

        ``start``, ``[n, *shape]``, are the points to begin at, the samples themselves if None;
        ``keys``, ``[n]``, depend on the samples' global indices, so that batching does not change
        them.
        """
        ...

    def point(self, samples: Samples, state: PyTree) -> tuple[Array, PyTree]:
        """The points found, ``[n, *shape]``, and the proof of their costs or None."""
        ...

    def finished(self, state: PyTree) -> Array:
        """``[n]``: whether nothing is left to do for a sample."""
        ...


def _is_readable(leaf: Any) -> bool:
    """Whether it is an array with numbers here: none of a trace, of other hosts, or donated."""
    if not isinstance(leaf, jax.Array):
        return isinstance(leaf, np.ndarray)
    traced = isinstance(leaf, jax.core.Tracer)
    return not traced and leaf.is_fully_addressable and not leaf.is_deleted()


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search, measured at the stored points; a pytree of ``[n]`` leaves.

    A point that is infeasible or not finite has been replaced by its sample.
    """

    x_adv: Array
    """``[n, *shape]``; a pytree of arrays ``[n, ...]`` if the samples were one."""
    proof: PyTree
    """The proof of the costs, for balls that need one (:meth:`Ball.cost`)."""
    cost: Array
    """The cost of moving the sample to ``x_adv``, measured by the ball."""
    correct: Array
    """Whether the criterion fails at the clean sample: by default, it is classified correctly."""
    success: Array
    """Whether the criterion holds at ``x_adv``, recomputed from the stored point."""
    margin: Array
    """The criterion at ``x_adv``: positive where the attacker has won."""
    done: Array
    """Whether the attack finished with the sample; never after a fault."""
    fault: Array
    """Whether an output or a gradient was not finite during the attack. Such a sample may be less
    robust than it seems."""
    zeros: Array
    """How many of the :attr:`gradients` were zero in every coordinate."""
    gradients: Array
    """Number of backward passes."""
    forwards: Array
    """Number of forward passes."""
    limit: Array | None = None
    """The largest cost that the ball allows anywhere in its box; inf without a box."""
    radius: Array | None = None
    """How far the search was allowed to look: ``eps``, or inf for minimum-norm attacks."""
    history: Info | None = None
    """``[steps, n]`` leaves on the host, if requested. A step that was not taken has no passes and
    repeats the last value."""
    overlooked: AnyArray | None = None
    """``[n]`` booleans: samples that this attack did not flip but a second look did."""

    def __repr__(self) -> str:
        fields, said = ", ".join(vars(self)), ""
        facts = self.correct, self.success, self.cost
        if all(map(_is_readable, facts)):
            correct, success, cost = map(np.asarray, facts)
            flips = correct & success
            said = f"{correct.sum()} of {correct.size} samples correct, {flips.sum()} flipped"
            if flips.any():
                said += f" at a median cost of {np.median(cost[flips]):.3g}"
        return f"{type(self).__name__}({'; '.join(filter(None, [said, fields]))})"

    @property
    def distance(self) -> Array:
        """``[n]``: the :attr:`cost` of each flip, 0 for samples that are misclassified already, and
        inf where no flip was found."""
        return jnp.where(self.success, self.cost, jnp.inf)

    @property
    def passes(self) -> Array:
        """The number of forward and backward passes: the queries of AttackBench."""
        return self.gradients + self.forwards

    @property
    def remarks(self) -> list[str]:
        """Doubts about these numbers: faults, zero gradients, overlooked flips.

        Not available inside a trace.
        """
        return remarks.of(remarks.spent(self))


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Result(Found):
    """An adversarial distribution and its measurements: :class:`Found` and the mass that moves.

    The distribution is the paper's equation 11: sample i keeps ``1 - weight[i]`` of its mass and
    sends ``weight[i] = 1 / kappa_i`` to ``x_adv[i]``.
    """

    weight: Array

    @property
    def accuracy(self) -> Array:
        """Accuracy under the distribution (Appendix E of the paper).

        It is piecewise constant in the model's parameters and in a point-wise ``eps``, so these
        gradients are 0: differentiate the expected loss of the distribution instead. In the ``eps``
        of a knapsack it is piecewise linear, and its gradient is correct.
        """
        facts = self.weight, self.correct, self.success
        if any(isinstance(fact, jax.core.Tracer) for fact in facts):
            weight, correct, success = facts
            return jnp.mean((1 - weight) * correct + weight * ~success, axis=-1)
        # In NumPy, so that nothing is compiled for each n; times 1 / n, as in XLA's means.
        weights, before, after = map(np.asarray, facts)
        moved, unit = weights.astype(np.float64), weights.dtype.type(1) / weights.shape[-1]
        right = np.sum((1 - moved) * before + moved * ~after, axis=-1)
        return jax.device_put(right.astype(weights.dtype) * unit.astype(weights.dtype))


class Progress(NamedTuple):
    """The progress of a search, for callbacks."""

    taken: int
    """Number of steps taken or found unnecessary, summed over the samples."""
    total: int
    """Number of steps of all samples together."""
    unfinished: np.ndarray
    """``[m]`` indices of the samples that are not finished in this stage."""


Claim: TypeAlias = Literal["float program", "exact arithmetic"]
CLAIM: Claim = "float program"
"""Certificates hold for the model in floats, summed in any order, and so for exact arithmetic."""


class Certificate(NamedTuple):
    """What is proved for samples, ``[n]`` arrays, and for which arithmetic."""

    correct: npt.NDArray[Any]
    """Whether the clean sample is classified correctly."""
    margin: npt.NDArray[Any]
    """Lower bounds of the least margin within ``eps``."""
    radius: npt.NDArray[Any]
    """Verified radii: at least ``eps`` where the sample is verified."""
    method: str
    claim: Claim
    ended: tuple[str, ...] = ()
    """How branch and bound ended for each sample, one of ``branch.ENDS``; empty for other methods.
    """
    remarks: tuple[str, ...] = ()
    """Why the bounds may be loose, and how an equivalent model would have tighter ones."""
    falsified: npt.NDArray[Any] | None = None
    """Whether a misclassified point within ``eps`` is known: the sample, or one that branch and
    bound found. What is neither verified nor falsified is unknown. None for other certificates."""
    counterexamples: npt.NDArray[Any] | None = None
    """``[n, *shape]``: of branch and bound, such a point for each falsified sample, else the sample
    itself."""
    decided: tuple[str, ...] = ()
    """The method that verified or falsified each sample, empty where none did, if several were
    tried one after another; else empty."""

    def __repr__(self) -> str:
        verified = int(np.sum(self.verified))
        said = [f"{verified} of {np.size(self.margin)} samples verified"]
        if self.falsified is not None:
            falsified = int(np.sum(self.falsified))
            unknown = np.size(self.margin) - verified - falsified
            said += [f"{falsified} falsified", f"{unknown} unknown"]
        said += [f"{int(np.sum(self.correct))} correct when clean, by {self.method}"]
        return f"Certificate({', '.join(said)})"

    @property
    def verified(self) -> npt.NDArray[Any]:
        """Whether no point within ``eps`` is misclassified."""
        return np.asarray(self.margin > 0)
