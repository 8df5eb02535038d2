"""Importance sampling in normal space, around the likeliest failures."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import arguments, validate
from wdjax.core import AnyArray, Array
from wdjax.nppr import noise
from wdjax.nppr.counting import Classifier
from wdjax.nppr.rare import Question, Rare, ask


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

    >>> from wdjax import Lp, Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [0.0, 0.0]]))
    >>> own, x = noise.Uniform(0.5, Lp(box=None)), jnp.array([0.4999, 0.5])
    >>> found = importance(model, own, x, 0, key=jax.random.key(0))
    >>> round(found.value * 1e4, 1)  # Exactly 1e-4.
    1.0
    """
    arguments.check(perturbation=perturbation, model=model, x=[x], y=[y], key=key)
    question, size = ask(model, perturbation, x, y)
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
    points = jax.lax.map(lambda rival: _nearest(question, rival, steps, size), rivals)
    length = jnp.linalg.norm(points, axis=-1)
    known = jnp.isfinite(length)
    points = jnp.where(known[:, None], points, 0.0)
    log = jnp.where(known, jax.scipy.stats.norm.logcdf(-length), -jnp.inf)
    some = jnp.any(known)
    share = jnp.where(some, jax.nn.softmax(jnp.where(known, log, -1e30)), 0.0)
    own = jnp.where(some, defensive, 1.0)
    return Proposal(points, (1 - own) * jnp.where(known, share, 0.0), own)


def _nearest(question: Question, rival: Array, steps: int, size: int) -> Array:
    """A short vector at which a rival wins, by the iteration of Hasofer and Lind; inf if none."""

    def gap(u: Array) -> Array:
        logits = question.logits(u[None])[0]
        return logits[rival] - logits[question.y[0]]

    def step(u: Array, number: Array) -> tuple[Array, None]:
        value, slope = jax.value_and_grad(gap)(u)
        square = jnp.sum(slope**2)
        some = square > 0
        target = slope * (slope @ u - value) / jnp.where(some, square, 1.0)
        length = jnp.linalg.norm(jnp.where(some, target, 1.0))
        target = target * jnp.minimum(1.0, 2 * math.sqrt(size) / length)
        share = 1 / (1 + number / 10)
        return jnp.where(some, (1 - share) * u + share * target, u), None

    u, _ = jax.lax.scan(step, jnp.zeros(size), jnp.arange(float(steps)))
    along = jnp.linspace(2 / _RAY, 2.0, _RAY)[:, None] * u
    failed = question.score(along)[0] > 0
    return jnp.where(jnp.any(failed), along[jnp.argmax(failed)], jnp.inf)


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
