r"""Certificates of single samples: what the classifier does in the whole ball around each of them.

They speak of the float program: of what the model returns in floats of its own precision, with
matrix products at the highest precision, summed in any order, and so of exact arithmetic too.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from wdjax import norms, parallel, validate
from wdjax.certify import lipschitz, margins, region
from wdjax.certify.lipschitz import Classifier
from wdjax.certify.margins import Method
from wdjax.certify.region import Box
from wdjax.parallel import AnyArray

_Bracket = tuple[jax.Array, jax.Array, jax.Array]
"""Of every sample: the best verified radius, the next to try, the least that failed."""


def margin_bounds(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: float,
    eps: ArrayLike,
    box: Box = (0.0, 1.0),
    method: Method = "crown",
    batch_size: int = 64,
) -> jax.Array:
    r"""Lower bounds of every margin ``z_y - z_j`` over the ball of radius ``eps`` in the box.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, continuous where its program selects.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      eps: radius, a number or ``[n]``, in the units of ``x``; may be traced.
      box: ``(low, high)``, or None for no box.
      batch_size: samples at once, at top level; bounds the memory.

    Returns:
      ``[n, K]`` bounds in logits, ``inf`` at ``j = y``; sound against rounding.

    Raises:
      ValueError: bad samples, or a primitive without a rule.

    Cost: six forward and ``2 K`` backward passes a sample.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1]]), jnp.array([0])
    >>> [round(low, 3) for low in margin_bounds(model, x, y, norm=jnp.inf, eps=0.1)[0].tolist()]
    [inf, 0.6]
    """
    norms.check_norm(norm)
    eps = jnp.broadcast_to(_check_eps(eps, x), y.shape)
    if validate.traced(model, x, y, eps):
        validate.check_shapes(model, x, y)
        return _bounds(model, jnp.asarray(x), jnp.asarray(y), eps, norm, box, method)
    x, y = validate.check_samples(model, x, y, box)

    def bounds(model: Classifier, x: jax.Array, y: jax.Array, eps: jax.Array) -> jax.Array:
        return _bounds(model, x, y, eps, norm, box, method)

    return _in_batches(bounds, model, (x, y, eps), batch_size)


def certified(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: float,
    eps: ArrayLike,
    box: Box = (0.0, 1.0),
    method: Method = "crown",
    batch_size: int = 64,
) -> jax.Array:
    r"""Whether the model provably returns ``y`` on the whole ball of radius ``eps`` in the box.

    Args:
      model: as in :func:`margin_bounds`.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      eps: radius, a number or ``[n]``; may be traced.
      box: ``(low, high)``, or None for no box.
      batch_size: samples at once, at top level.

    Returns:
      ``[n]`` bool; their mean is a lower bound of the robust accuracy.

    Cost: that of :func:`margin_bounds`.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.55, 0.45]]), jnp.array([0, 0])
    >>> certified(model, x, y, norm=jnp.inf, eps=0.1).tolist()
    [True, False]
    """
    low = margin_bounds(
        model, x, y, norm=norm, eps=eps, box=box, method=method, batch_size=batch_size
    )
    return jnp.all(low > 0, axis=-1)


def radius(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: float,
    box: Box = (0.0, 1.0),
    steps: int = 10,
    method: Method = "crown",
    batch_size: int = 64,
) -> jax.Array:
    r"""Lower bounds of every sample's distance to the nearest misclassified point of the box.

    Starts from the margin over the global Lipschitz constant and bisects with the certificate of
    :func:`certified`; only radii that were verified are returned.

    Args:
      model: as in :func:`margin_bounds`.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      box: ``(low, high)``, or None for no box.
      steps: bisections; the error is ``2^-steps`` of twice the linearised distance.
      batch_size: samples at once, at top level.

    Returns:
      ``[n]`` radii in the units of ``x``: 0 where nothing is certified, ``inf`` where the whole box
      is.

    Cost: ``steps + 2`` times :func:`margin_bounds`, and one global Lipschitz constant.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.1, 0.9]]), jnp.array([0, 0])
    >>> [round(r, 3) for r in radius(model, x, y, norm=2).tolist()]
    [0.566, 0.0]
    """
    norms.check_norm(norm)
    if validate.traced(model, x, y):
        validate.check_shapes(model, x, y)
        return _search(model, jnp.asarray(x), jnp.asarray(y), norm, box, steps, method)
    x, y = validate.check_samples(model, x, y, box)

    def search(model: Classifier, x: jax.Array, y: jax.Array) -> jax.Array:
        return _search(model, x, y, norm, box, steps, method)

    return _in_batches(search, model, (x, y), batch_size)


def _search(
    model: Classifier, x: jax.Array, y: jax.Array, norm: float, box: Box, steps: int, method: Method
) -> jax.Array:
    most = lipschitz.diameter(x.shape[1:], box, norm)
    clean = _bounds(model, x, y, jnp.zeros(len(y), x.dtype), norm, box, method)
    trial = _guess(model, x, y, clean, norm, most)

    def step(_: int, bracket: _Bracket) -> _Bracket:
        low = _bounds(model, x, y, bracket[1], norm, box, method)
        return _bisect(low, *bracket, most)

    bracket = (jnp.zeros_like(trial), trial, jnp.full_like(trial, jnp.inf))
    if validate.traced(model, x, y):
        bracket = jax.lax.fori_loop(0, steps, step, bracket)
    else:
        for i in range(steps):
            bracket = step(i, bracket)
    best = jnp.where(jnp.all(clean > 0, axis=-1), bracket[0], 0.0)
    return jnp.where(best >= most, jnp.inf, best)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _guess(
    model: Classifier, x: jax.Array, y: jax.Array, low: jax.Array, norm: float, most: float
) -> jax.Array:
    """A little less than the linearised distance, which is exact for linear models."""

    def slopes(xi: jax.Array, yi: jax.Array) -> jax.Array:
        differences = lipschitz.contrasts(yi, low.shape[1], xi.dtype)
        pull = jax.vjp(lambda t: model(t[None])[0], xi)[1]
        return norms.lp_norm(jax.vmap(pull)(differences)[0], norms.dual(norm))

    steep = jax.vmap(slopes)(x, y)
    ratio = jnp.where(steep > 0, low / jnp.where(steep > 0, steep, 1.0), jnp.inf)
    rivals = jnp.arange(low.shape[1]) != y[:, None]
    guess = jnp.minimum(jnp.min(jnp.where(rivals, ratio, jnp.inf), axis=-1), most)
    return jnp.where(jnp.isfinite(guess) & (guess > 0), (1 - 4e-4) * guess, min(most, 1.0))


@functools.partial(jax.jit, static_argnums=4)
def _bisect(
    low: jax.Array, best: jax.Array, trial: jax.Array, high: jax.Array, most: float
) -> _Bracket:
    """Keeps a verified radius; next is twice the best before the first failure, then midway."""
    good = jnp.all(low > 0, axis=-1)
    best = jnp.where(good, jnp.maximum(best, trial), best)
    high = jnp.where(good, jnp.where(trial >= high, jnp.inf, high), jnp.minimum(high, trial))
    trial = jnp.where(jnp.isinf(high), 2 * best, 0.5 * (best + high))
    return best, jnp.minimum(trial, most), high


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _bounds(
    model: Classifier,
    x: jax.Array,
    y: jax.Array,
    eps: jax.Array,
    norm: float,
    box: Box,
    method: Method,
) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return margins.lower(model, region.ball(x, eps, norm, box), y, method)


def _check_eps(eps: ArrayLike, x: AnyArray) -> jax.Array:
    if validate.traced(eps):
        return jnp.asarray(eps)
    eps = jnp.asarray(eps, x.dtype)
    if eps.shape not in ((), x.shape[:1]) or not bool(jnp.all(eps >= 0)):
        raise ValueError(
            f"eps must be a number or [{x.shape[0]}] numbers, at least 0, got {np.asarray(eps)!r}."
        )
    return eps


def _in_batches(
    fn: Callable[..., jax.Array],
    model: Classifier,
    arrays: tuple[AnyArray, ...],
    batch_size: int,
) -> jax.Array:
    """Applies ``fn(model, *arrays)`` to padded pieces, so that one program serves all."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}.")
    n = len(arrays[0])
    size = min(batch_size, n)
    parts = []
    for start in range(0, n, size):
        piece = parallel.pad(tuple(a[start : start + size] for a in arrays), size)
        parts.append(fn(model, *piece)[: min(size, n - start)])
    return jnp.concatenate(parts)
