r"""Probabilities of rare failures of one input: multilevel splitting and importance sampling.

Both work on normal vectors u: a fixed distribution is a map of them (for uniform linf noise
``delta = eps (2 Phi(u) - 1)``), so that the box's clipping belongs to the event, and weights have
no Jacobians. Neither knows its own error well from one run; intervals come from repeats.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import losses, validate
from wdjax.balls import Lp
from wdjax.core import AnyArray, Array
from wdjax.metrics import ConfidenceInterval
from wdjax.nppr import noise
from wdjax.nppr import upsample as up
from wdjax.nppr.counting import Classifier

_LEVELS = 200
"""Levels at most; half the particles each would reach a probability of 1e-60."""


class Rare(NamedTuple):
    """A small probability, by several independent runs."""

    runs: npt.NDArray[np.float64]
    """``[R]`` estimates, each unbiased or nearly so."""
    evaluations: int
    """Forward passes of all runs, without ``fit``."""
    fit: int
    """Forward and backward passes that found the proposal, once for all runs."""
    faults: int
    """Points whose logits were not finite; they count as failures."""
    found: bool
    """Whether failures were seen in every run; if not, the value is too low or unknown."""

    @property
    def value(self) -> float:
        """The mean of the runs."""
        return float(np.mean(self.runs))

    @property
    def error(self) -> float:
        """Its standard error."""
        return float(np.std(self.runs, ddof=1) / math.sqrt(len(self.runs)))

    def interval(self, confidence: float = 0.95) -> ConfidenceInterval:
        """Student's interval over the runs, cut at 0; up to 1 where no failure was found."""
        from scipy import stats

        if not self.found:
            return ConfidenceInterval(np.asarray(0.0), np.asarray(1.0))
        half = stats.t.ppf((1 + confidence) / 2, len(self.runs) - 1) * self.error
        return ConfidenceInterval(
            np.asarray(max(self.value - half, 0.0)), np.asarray(min(self.value + half, 1.0))
        )


def from_normal(perturbation: noise.Fixed, u: Array) -> Array:
    """Perturbations of normal vectors ``[n, d]``, distributed as the perturbation says.

    >>> from_normal(noise.Uniform(0.5), jnp.array([[0.0, 9.0]])).tolist()
    [[0.0, 0.5]]
    """
    eps, ball = perturbation.eps, perturbation.ball
    if isinstance(perturbation, noise.Uniform) and ball.norm == math.inf:
        return eps * jax.lax.erf(u / math.sqrt(2))
    if isinstance(perturbation, noise.ClippedGaussian) and ball.norm == math.inf:
        return eps * jnp.clip(perturbation.sigma * u, -1.0, 1.0)
    if isinstance(perturbation, noise.TruncatedGaussian):
        end = jax.scipy.special.ndtr(1 / jnp.asarray(perturbation.sigma, u.dtype))
        level = (1 - end) + jax.scipy.special.ndtr(u) * (2 * end - 1)
        inside = perturbation.sigma * jax.scipy.special.ndtri(level)
        return eps * jnp.clip(inside, -1.0, 1.0)
    raise ValueError(
        "rare events are for uniform, clipped and truncated Gaussian noise in the linf ball, got "
        f"{type(perturbation).__name__} with norm {ball.norm!r}."
    )


class Question(NamedTuple):
    """One input, and what disturbs it; a pytree."""

    model: Classifier
    perturbation: noise.Fixed
    x: Array
    """``[1, *shape]``"""
    y: Array
    """``[1]``"""

    def logits(self, u: Array) -> Array:
        """``[m, K]`` at normal vectors ``[m, d]``."""
        delta = from_normal(self.perturbation, u).reshape(1, -1, *self.x.shape[1:])
        points = up.placed(self.x, delta, self.perturbation.eps, self.perturbation.ball)
        return self.model(points[0])

    def score(self, u: Array) -> tuple[Array, Array]:
        """``[m]``: the margin of the failure, positive where there is one, and faults."""
        logits = self.logits(u)
        fine = jnp.all(jnp.isfinite(logits), axis=-1)
        margin = losses.decision_margin(logits, jnp.broadcast_to(self.y, len(u)))
        return jnp.where(fine, margin, jnp.finfo(u.dtype).max), ~fine


def _ask(
    model: Classifier, perturbation: noise.Fixed, x: AnyArray, y: AnyArray | int
) -> tuple[Question, int]:
    x, labels = jnp.asarray(x)[None], np.asarray(y).reshape(1)
    x, own = validate.check_samples(model, x, labels, perturbation.ball.box)
    question = Question(model, perturbation, x, own)
    size = math.prod(x.shape[1:])
    score, fault = question.score(jnp.zeros((1, size), x.dtype))
    if bool(fault[0]):
        raise ValueError("the model's logits are not finite for the input as it is.")
    if not bool(score[0] <= 0):
        raise ValueError("the input is misclassified as it is: its failure is not rare.")
    return question, size


def splitting(
    model: Classifier,
    perturbation: noise.Fixed,
    x: AnyArray,
    y: AnyArray | int,
    *,
    key: Array,
    particles: int = 1000,
    keep: float = 0.1,
    moves: int = 10,
    runs: int = 10,
) -> Rare:
    r"""Adaptive multilevel splitting: ``P(margin > 0)`` as a product of larger probabilities.

    The particles with the largest margins stay, are copied, and moved by preconditioned
    Crank-Nicolson steps that keep the normal distribution and the level; and again, until the level
    is a failure. Knows no gradient.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      perturbation: of :mod:`wdjax.nppr.noise`, linf.
      x: ``[*shape]``, one input, classified correctly.
      y: its label.
      key: a typed ``jax.random.key``.
      particles: N.
      keep: share that stays at a level.
      moves: steps at a level.
      runs: independent repeats.

    Returns:
      A :class:`Rare`; ``found`` is False where levels stopped rising.

    Raises:
      ValueError: a bad or misclassified input, settings that are out of range.

    Cost: ``runs particles (1 + moves levels)`` forward passes with ``log p / log keep`` levels.

    Source: Webb et al. [webb2019]; Kahn and Harris [kahn1951].

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [0.0, 0.0]]))
    >>> own, x = noise.Uniform(0.5, Lp(box=None)), jnp.array([0.4999, 0.5])
    >>> found = splitting(model, own, x, 0, key=jax.random.key(0), particles=300)
    >>> 0.5 < found.value * 1e4 < 2  # Exactly 1e-4.
    True
    """
    question, size = _ask(model, perturbation, x, y)
    count = validate.check_count("particles", particles, 10)
    repeats = validate.check_count("runs", runs, 2)
    steps = validate.check_count("moves", moves)
    if not 1 / count <= keep < 1:
        raise ValueError(f"keep must be a share between 1 / particles and 1, got {keep!r}.")
    own = functools.partial(_split, count, size, max(1, int(keep * count)), steps)
    keys = jax.random.split(key, repeats)
    seen = [_split_jit(own, question, one) for one in keys]
    value, used, faults, reached = (np.array([np.asarray(run[i]) for run in seen]) for i in range(4))
    return Rare(value.astype(float), int(used.sum()), 0, int(faults.sum()), bool(reached.all()))


def _split(
    count: int, size: int, stay: int, moves: int, question: Question, key: Array
) -> tuple[Array, Array, Array, Array]:
    """``(probability, evaluations, faults, reached)`` of one run."""
    first, key = jax.random.split(key)
    u = jax.random.normal(first, (count, size))
    score, fault = question.score(u)

    def level_of(score: Array) -> Array:
        return jnp.minimum(jnp.sort(score)[count - stay], 0.0)

    def unfinished(state: tuple[Array, ...]) -> Array:
        _u, score, _log, _size, number, _faults, moving = state
        return (level_of(score) < 0) & (number < _LEVELS) & moving

    def level(state: tuple[Array, ...]) -> tuple[Array, ...]:
        u, score, log, step, number, faults, _ = state
        now = level_of(score)
        above = score >= now
        pick, move = jax.random.split(jax.random.fold_in(key, number))
        chosen = jax.random.categorical(pick, jnp.where(above, 0.0, -jnp.inf), shape=(count,))
        u, fresh = u[chosen], score[chosen]

        def one(carried: tuple[Array, ...], own: Array) -> tuple[tuple[Array, ...], None]:
            u, score, step, faults = carried
            proposed = jnp.sqrt(1 - step**2) * u + step * jax.random.normal(own, u.shape)
            value, fault = question.score(proposed)
            better = value >= now
            rate = jnp.mean(better)
            u, score = jnp.where(better[:, None], proposed, u), jnp.where(better, value, score)
            step = jnp.clip(step * jnp.exp(rate - 0.3), 0.01, 0.999)
            return (u, score, step, faults + jnp.sum(fault)), None

        (u, fresh, step, faults), _ = jax.lax.scan(
            one, (u, fresh, step, faults), jax.random.split(move, moves)
        )
        moving = jnp.max(fresh) > now  # Margins that do not rise would never end.
        return u, fresh, log + jnp.log(jnp.mean(above)), step, number + 1, faults, moving

    begun = (u, score, jnp.zeros(()), jnp.asarray(0.5), jnp.asarray(0), jnp.sum(fault), True)
    u, score, log, _, number, faults, _ = jax.lax.while_loop(
        unfinished, level, jax.tree.map(jnp.asarray, begun)
    )
    last = jnp.mean(score > 0)
    return jnp.exp(log) * last, count * (1 + moves * number), faults, last > 0


_split_jit = jax.jit(lambda own, question, key: own(question, key), static_argnums=0)


class Proposal(NamedTuple):
    """A mixture of normal vectors around the likeliest failures, and of the target itself."""

    points: Array
    """``[J, d]``"""
    weights: Array
    """``[J]``, with the target's share summing to 1."""
    defensive: Array
    """The target's own share, which bounds all weights by its inverse."""


def importance(
    model: Classifier,
    perturbation: noise.Fixed,
    x: AnyArray,
    y: AnyArray | int,
    *,
    key: Array,
    draws: int = 1000,
    runs: int = 10,
    steps: int = 50,
    defensive: float = 0.1,
) -> Rare:
    r"""Importance sampling around the likeliest failures, one a rival class.

    ``E_q[1{failure} p(u) / q(u)]`` with ``p = N(0, I)`` and ``q`` a mixture of p itself and of
    ``N(u_j, I)``, where ``u_j`` is the shortest vector found at which class j wins. No weight
    exceeds ``1 / defensive``. Failures that are nowhere near any ``u_j`` are met by p's share only:
    compare with :func:`splitting`.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, differentiable.
      perturbation: of :mod:`wdjax.nppr.noise`, linf.
      x: ``[*shape]``, one input, classified correctly.
      y: its label.
      key: a typed ``jax.random.key``.
      draws: samples a run.
      runs: independent repeats.
      steps: that look for each ``u_j``, one gradient each.
      defensive: p's share, in ``(0, 1]``; 1 is plain Monte Carlo.

    Returns:
      A :class:`Rare`.

    Raises:
      ValueError: a bad or misclassified input, settings that are out of range.

    Cost: ``runs draws`` forward passes, and ``(K - 1) steps`` gradients once.

    Source: Tit et al. [tit2023] for gradients and normal space; Hasofer and Lind [hasofer1974] for
      the likeliest failure; Owen and Zhou [owen2000] for the defensive share.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [0.0, 0.0]]))
    >>> own, x = noise.Uniform(0.5, Lp(box=None)), jnp.array([0.4999, 0.5])
    >>> found = importance(model, own, x, 0, key=jax.random.key(0))
    >>> round(found.value * 1e4, 1)  # Exactly 1e-4.
    1.0
    """
    question, size = _ask(model, perturbation, x, y)
    count, repeats = validate.check_count("draws", draws), validate.check_count("runs", runs, 2)
    length = validate.check_count("steps", steps)
    if not 0 < validate.check_number("defensive", defensive) <= 1:
        raise ValueError(f"defensive must be a share in (0, 1], got {defensive!r}.")
    rivals = np.setdiff1d(np.arange(question.model(question.x).shape[1]), np.asarray(question.y))
    proposal = _propose(question, jnp.asarray(rivals), length, size, defensive)
    keys = jax.random.split(key, repeats)
    seen = [np.asarray(_weigh(question, proposal, one, count)) for one in keys]
    value, hits, faults = np.array(seen).T
    return Rare(
        value.astype(float),
        repeats * count,
        len(rivals) * (length + _RAY),
        int(faults.sum()),
        bool(np.all(hits > 0)),
    )


_RAY = 64
"""Points along the way to a rival, of which the first failure counts."""


@functools.partial(jax.jit, static_argnums=(2, 3))
def _propose(
    question: Question, rivals: Array, steps: int, size: int, defensive: Array
) -> Proposal:
    def gap(u: Array, rival: Array) -> Array:
        logits = question.logits(u[None])[0]
        return logits[rival] - logits[question.y[0]]

    def nearest(rival: Array) -> Array:
        def step(u: Array, number: Array) -> tuple[Array, None]:
            value, slope = jax.value_and_grad(gap)(u, rival)
            square = jnp.sum(slope**2)
            own = jnp.where(square > 0, (slope @ u - value) / jnp.where(square > 0, square, 1.0), 0.0)
            target = own * slope
            length = jnp.linalg.norm(target)
            target = target * jnp.minimum(1.0, 2 * math.sqrt(size) / jnp.maximum(length, 1e-9))
            share = 1 / (1 + number / 10)
            return jnp.where(square > 0, (1 - share) * u + share * target, u), None

        u, _ = jax.lax.scan(step, jnp.zeros(size), jnp.arange(float(steps)))
        along = jnp.linspace(2 / _RAY, 2.0, _RAY)[:, None] * u
        score, _ = question.score(along)
        first = jnp.argmax(score > 0)
        return jnp.where(jnp.any(score > 0), along[first], jnp.inf)

    points = jax.lax.map(nearest, rivals)
    length = jnp.linalg.norm(points, axis=-1)
    known = jnp.isfinite(length)
    points = jnp.where(known[:, None], points, 0.0)
    log = jnp.where(known, jax.scipy.stats.norm.logcdf(-length), -jnp.inf)
    some = jnp.any(known)
    share = jnp.where(some, jax.nn.softmax(jnp.where(known, log, -1e30)), 0.0)
    own = jnp.where(some, defensive, 1.0)
    return Proposal(points, (1 - own) * jnp.where(known, share, 0.0), own)


@functools.partial(jax.jit, static_argnums=3)
def _weigh(question: Question, proposal: Proposal, key: Array, draws: int) -> Array:
    """``(estimate, failures, faults)`` of one run."""
    pick, noise_key = jax.random.split(key)
    shares = jnp.append(proposal.weights, proposal.defensive)
    centres = jnp.concatenate([proposal.points, jnp.zeros_like(proposal.points[:1])])
    chosen = jax.random.categorical(pick, jnp.log(shares), shape=(draws,))
    u = centres[chosen] + jax.random.normal(noise_key, (draws, centres.shape[1]))
    score, fault = question.score(u)
    exponent = u @ centres.T - 0.5 * jnp.sum(centres**2, axis=-1)
    weight = jnp.exp(-jax.nn.logsumexp(exponent + jnp.log(shares), axis=-1))
    failed = score > 0
    return jnp.stack([jnp.mean(weight * failed), jnp.sum(failed), jnp.sum(fault)])
