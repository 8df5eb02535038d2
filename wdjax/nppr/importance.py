"""Importance sampling in normal space around the likeliest failures, checked by splitting."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import distinct, loops
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import host_only
from wdjax.core import AnyArray, Array, Classifier
from wdjax.nppr import distributions
from wdjax.nppr.counting import TWIN
from wdjax.nppr.rare import Rare, RareEvent, ask
from wdjax.nppr.splitting import explored
from wdjax.precision import full_precision


class Proposal(NamedTuple):
    """The mixture of the target distribution and of normal vectors around likely failures."""

    points: Array
    """``[J, d]``, the centres."""
    weights: Array
    """``[J]``; together with the target's share they sum to 1."""
    defensive: Array
    """The target's share; importance weights are at most its inverse."""


class Start(NamedTuple):
    """The start of J searches for likely failures."""

    u: Array
    """``[J, d]``"""
    rival: Array
    """``[J]``, the class that should win."""


@full_precision
def importance(
    model: Classifier,
    perturbation: distributions.Fixed,
    x: AnyArray,
    y: AnyArray | int,
    *,
    key: Array,
    draws: int = 1000,
    runs: int = 10,
    steps: int = 50,
    starts: int = 32,
    defensive: float = 0.1,
    check: int = 100,
    batch_size: int | None = None,
) -> Rare:
    r"""Importance sampling around the likeliest failures, checked by multilevel splitting.

    The estimate is the mean of ``1{failure} p(u) / q(u)`` under ``q``, with ``p = N(0, I)`` and
    ``q`` a mixture of p and of ``N(u_j, I)``. The ``u_j`` are short vectors at which another class
    wins: one search begins at 0 for each rival, ``starts`` at random vectors, and some at failures
    found by the check. Every point is weighted by the whole mixture (the balance heuristic), so
    that estimates are unbiased and no weight exceeds ``1 / defensive``.

    Failures far from every ``u_j`` are sampled by p's share only, and an estimate that misses them
    looks precise. So :func:`splitting`, which does not use the ``u_j``, estimates the same
    probability. If the two differ by more than chance allows, a second splitting with more
    particles decides whether they agree.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, differentiable.
      perturbation: of :mod:`wdjax.nppr.distributions`, linf.
      x: ``[*shape]``, one input, classified correctly.
      y: its label.
      key: a typed ``jax.random.key``.
      draws: samples in a run.
      runs: independent repetitions.
      steps: gradient steps of the search for each ``u_j``.
      starts: searches from random vectors, cyclically for the rivals, the likeliest first.
      defensive: p's share, in ``(0, 1]``; 1 is plain Monte Carlo.
      check: particles of the splitting; 0 for none.
      batch_size: points on the device at once.

    Returns:
      A :class:`Rare`, with the splitting as its ``check``; ``remark`` says where the two disagree.

    Raises:
      ValueError: a bad or misclassified input, settings that are out of range, a trace.

    Cost: ``runs draws`` forward passes, ``(K + 79 + starts) steps`` gradients, and the check: about
      ``600 check`` forward passes for each factor of 1000 in p, and four times as many again if it
      disagrees.

    Source: Tit et al. [tit2023] for gradients and normal space; Hasofer and Lind [hasofer1974] for
      the likeliest failure; Owen and Zhou [owen2000] for the defensive share; Veach and Guibas
      [veach1995] for the balance heuristic.

    >>> from wdjax import Lp, Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [0.0, 0.0]]))
    >>> own, x = distributions.UniformBall(0.5, Lp(box=None)), jnp.array([0.4999, 0.5])
    >>> found = importance(model, own, x, 0, key=jax.random.key(0))
    >>> round(found.value * 1e4, 1), found.agrees  # Exactly 1e-4.
    (1.0, True)
    """
    host_only("nppr.importance", TWIN, model, perturbation, x, y, key)
    arguments.check(perturbation=perturbation, model=model, x=[x], y=[y], key=key)
    question = ask(model, perturbation, x, y, key, batch_size)
    count, repeats = validate.check_count("draws", draws), validate.check_count("runs", runs, 2)
    length, others = validate.check_count("steps", steps), validate.check_count("starts", starts, 0)
    if not 0 < validate.check_number("defensive", defensive) <= 1:
        raise ValueError(f"defensive must be a share in (0, 1], got {defensive!r}.")
    look, test, again, draw = jax.random.split(key, 4)
    checked, ends = None, jnp.zeros((0, question.size))
    if validate.check_count("check", check, 0):
        checked, ends = explored(question, test, check)
    begun = _starts(question, others, ends.reshape(-1, question.size), look)
    proposal = _propose(question, begun, length, defensive)
    seen = _weighed(question, proposal, jax.random.split(draw, repeats), count)
    value, hits, faults = np.asarray(seen).T
    searches = len(begun.rival)
    fit = -(-searches // _FEW) * _FEW * length + searches * 2 * _RAY + 1 + len(ends)
    met = bool(np.all(hits > 0))
    found = Rare(value.astype(float), repeats * count, fit, int(faults.sum()), met, checked)
    if met and checked is not None and not found.agrees:
        return found._replace(check=explored(question, again, _AGAIN * check)[0])
    return found


_AGAIN = 4
"""A check that disagrees is repeated with so many times the particles: by chance one in a hundred
disagrees."""
_RAY = 64
"""Points on a ray; the first of them that fails counts."""
_FEW = 16
"""Searches in a batch, each with a gradient."""
_FAR = 8
"""Bound on the length of the searched vectors, in standard deviations beyond twice the usual length
of a normal vector."""
_EVEN = 0.25
"""Share of the failures' weight that does not depend on their likelihood."""


def _starts(question: RareEvent, count: int, ends: Array, key: Array) -> Start:
    """The starts of all searches for likely failures.

    The origin, once for each rival; ``count`` random vectors, with the rivals in turn; and the
    vectors ``ends [J, d]``, final particles of a splitting, each with the rival that is largest
    there.
    """
    logits = np.array(question.logits(jnp.zeros((1, question.size)))[0])
    label = int(question.y[0])
    ranked = np.array([j for j in np.argsort(-logits) if j != label])
    at_ends = np.empty(0, int)
    if len(ends):
        seen = np.array(_logits(question, ends))
        seen[:, label] = -np.inf
        at_ends = np.argmax(np.nan_to_num(seen, nan=-np.inf), axis=1)
    random = jax.random.normal(key, (count, question.size))
    u = jnp.concatenate([jnp.zeros((len(ranked), question.size)), random, ends])
    rivals = np.concatenate([ranked, np.resize(ranked, count), at_ends])
    return Start(u, jnp.asarray(rivals, jnp.int32))


@distinct.jit
def _logits(question: RareEvent, u: Array) -> Array:
    """The model's logits ``[m, K]`` at normal vectors ``[m, d]``, as one program."""
    return question.logits(u)


@functools.partial(distinct.jit, static_argnums=2)
def _propose(question: RareEvent, begun: Start, steps: int, defensive: Array) -> Proposal:
    """The mixture from which importance sampling draws, by searches for the nearest failures.

    ``begun`` holds J searches of ``steps`` steps; the centres are ``[J, d]``, of weight 0 where a
    search found no failure. Weights follow the likelihood of a failure (in part they are equal),
    and near duplicates share theirs. The target's share is ``defensive``, or 1 if no search
    succeeded.
    """
    few = np.resize(np.arange(len(begun.rival)), -(-len(begun.rival) // _FEW) * _FEW)
    padded = jax.tree.map(lambda leaf: leaf[few], begun)
    ends = jax.lax.map(lambda search: _approach(question, search, steps), padded, batch_size=_FEW)
    pairs = begun.u, ends[: len(begun.u)]
    points = jax.lax.map(lambda pair: _shortest(question, *pair), pairs)
    length = jnp.linalg.norm(points, axis=-1)
    known = jnp.isfinite(length)
    points = jnp.where(known[:, None], points, 0.0)
    square = jnp.sum(points**2, axis=-1)
    apart = square[:, None] + square - 2 * points @ points.T
    alike = jnp.sum(jnp.where(known, jnp.exp(-jnp.maximum(apart, 0.0) / 2), 0.0), axis=-1)
    alone = jnp.where(known, -jnp.log(jnp.maximum(alike, 1.0)), -1e30)
    log = jnp.where(known, jax.scipy.stats.norm.logcdf(-length) + alone, -1e30)
    share = (1 - _EVEN) * jax.nn.softmax(log) + _EVEN * jax.nn.softmax(alone)
    target = jnp.where(jnp.any(known), defensive, 1.0)
    return Proposal(points, (1 - target) * jnp.where(known, share, 0.0), target)


def _approach(question: RareEvent, start: Start, steps: int) -> Array:
    """``[d]``: a short vector at which the rival wins, by the Hasofer-Lind iteration.

    ``start`` is one search, with ``u`` ``[d]`` and a scalar rival. The length is bounded; where the
    gradient is 0 or not finite the vector stays.
    """

    def gap(u: Array) -> Array:
        logits = question.logits(u[None])[0]
        return logits[start.rival] - logits[question.y[0]]

    def step(u: Array, number: Array) -> tuple[Array, None]:
        value, slope = jax.value_and_grad(gap)(u)
        square = jnp.sum(slope**2)
        some = (square > 0) & jnp.isfinite(square)
        target = slope * (slope @ u - value) / jnp.where(some, square, 1.0)
        length = jnp.linalg.norm(jnp.where(some, target, 1.0))
        target = target * jnp.minimum(1.0, (_FAR + 2 * math.sqrt(len(u))) / length)
        share = 1 / (1 + number / 10)
        return jnp.where(some, (1 - share) * u + share * target, u), None

    return loops.scan(step, start.u, jnp.arange(float(steps)))[0]


def _shortest(question: RareEvent, start: Array, end: Array) -> Array:
    """``[d]``: the shorter of two failures on rays from the origin; inf if there is none.

    One ray goes to twice the ``end`` of a search, the other to its ``start``, for searches whose
    gradients are 0 or mislead. On each, the first of ``_RAY`` points that fails counts.
    """

    def first(u: Array) -> Array:
        along = jnp.linspace(1 / _RAY, 1, _RAY)[:, None] * u
        failed = question.score(along)[0] > 0
        return jnp.where(jnp.any(failed), along[jnp.argmax(failed)], jnp.inf)

    found = jnp.stack([first(2 * end), first(start)])
    return found[jnp.argmin(jnp.linalg.norm(found, axis=-1))]


@functools.partial(distinct.jit, static_argnums=3)
def _weighed(question: RareEvent, proposal: Proposal, keys: Array, draws: int) -> Array:
    """``[R, 3]``: :func:`_weigh` of each run, one after another."""
    return jax.lax.map(lambda key: _weigh(question, proposal, key, draws), keys)


def _weigh(question: RareEvent, proposal: Proposal, key: Array, draws: int) -> Array:
    """``[3]``: one run's estimate of the probability, its number of failures, and of faults.

    Draws ``draws`` normal vectors around the proposal's centres and weights them by the ratio of
    densities. A point whose logits are not finite counts as a failure.
    """
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
