r"""Certificates of single samples: what the classifier does in the whole ball around each of them.

Two bounds of every margin over the ball (and the box) are intersected: interval arithmetic on the
margins themselves, and the margin at the sample less the most that the interval Jacobian over the
ball allows it to fall.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from wdjax import norms, parallel, validate
from wdjax.certify import domain, interval, lipschitz
from wdjax.certify.lipschitz import Classifier
from wdjax.parallel import AnyArray

Box = tuple[float, float] | None
_Bracket = tuple[jax.Array, jax.Array, jax.Array]
"""Of every sample: the best verified radius, the next to try, the least that failed."""

_EXCESS = 2e-5
"""Certified balls are larger than asked by this fraction, so that a distance measured in floats
never counts as inside a ball that was not certified."""


def margin_bounds(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: float,
    eps: ArrayLike,
    box: Box = (0.0, 1.0),
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
        return _bounds(model, jnp.asarray(x), jnp.asarray(y), eps, norm, box)
    x, y = validate.check_samples(model, x, y, box)

    def bounds(model: Classifier, x: jax.Array, y: jax.Array, eps: jax.Array) -> jax.Array:
        return _bounds(model, x, y, eps, norm, box)

    return _in_batches(bounds, model, (x, y, eps), batch_size)


def certified(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: float,
    eps: ArrayLike,
    box: Box = (0.0, 1.0),
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
    low = margin_bounds(model, x, y, norm=norm, eps=eps, box=box, batch_size=batch_size)
    return jnp.all(low > 0, axis=-1)


def radius(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: float,
    box: Box = (0.0, 1.0),
    steps: int = 10,
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
        x, y = jnp.asarray(x), jnp.asarray(y)
        return _search(model, x, y, _constants(model, x, None, norm, box)[y], norm, box, steps)
    x, y = validate.check_samples(model, x, y, box)
    labels, index = np.unique(np.asarray(y), return_inverse=True)
    constants = _constants(model, x, labels, norm, box)[index]

    def search(model: Classifier, x: jax.Array, y: jax.Array, constants: jax.Array) -> jax.Array:
        return _search(model, x, y, constants, norm, box, steps)

    return _in_batches(search, model, (x, y, constants), batch_size)


def _constants(
    model: Classifier, x: AnyArray, labels: np.ndarray | None, norm: float, box: Box
) -> jax.Array:
    """Global Lipschitz constants of the margins; infinite for a model without."""
    ends = (-math.inf, math.inf) if box is None else box
    lower, upper = (jnp.full(x.shape[1:], end, x.dtype) for end in ends)
    if lipschitz.jumps(model, lower):
        classes = jax.eval_shape(model, x).shape[1]
        return jnp.full((classes if labels is None else len(labels), classes), jnp.inf, x.dtype)
    return lipschitz.margin_lipschitz(model, lower, upper, norm=norm, labels=labels)


def _search(
    model: Classifier,
    x: jax.Array,
    y: jax.Array,
    constants: jax.Array,
    norm: float,
    box: Box,
    steps: int,
) -> jax.Array:
    margins = _bounds(model, x, y, jnp.zeros(len(y), x.dtype), norm, box)
    most = lipschitz.diameter(x.shape[1:], box, norm)
    best, trial = _bracket(model, x, y, margins, constants, norm, most)

    def step(_: int, bracket: _Bracket) -> _Bracket:
        return _bisect(_bounds(model, x, y, bracket[1], norm, box), *bracket, most)

    bracket = (best, trial, trial)
    if validate.traced(model, x, y):
        bracket = jax.lax.fori_loop(0, steps, step, bracket)
    else:
        for i in range(steps):
            bracket = step(i, bracket)
    best = bracket[0]
    return jnp.where(best >= most, jnp.inf, best)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _bracket(
    model: Classifier,
    x: jax.Array,
    y: jax.Array,
    margins: jax.Array,
    constants: jax.Array,
    norm: float,
    most: float,
) -> tuple[jax.Array, jax.Array]:
    """The radius of the global constants, and a guess: twice the linearised distance."""
    rivals = jnp.arange(margins.shape[1]) != y[:, None]

    def slopes(xi: jax.Array, yi: jax.Array) -> jax.Array:
        differences = lipschitz.contrasts(yi, margins.shape[1], xi.dtype)
        gradients = jax.vmap(jax.vjp(lipschitz.single(model), xi)[1])(differences)[0]
        return norms.lp_norm(gradients, norms.dual(norm))

    def nearest(slope: jax.Array) -> jax.Array:
        safe = jnp.where(slope > 0, slope, 1.0)
        ratio = jnp.where(slope > 0, margins / safe, jnp.inf)
        return jnp.min(jnp.where(rivals, ratio, jnp.inf), axis=-1)

    best = jnp.where(jnp.all(margins > 0, axis=-1), nearest(constants) * (1 - 2 * _EXCESS), 0.0)
    guess = jnp.minimum(2 * nearest(jax.vmap(slopes)(x, y)), most)
    return best, jnp.where(jnp.isfinite(guess) & (guess > 0), guess, min(most, 1.0))


@functools.partial(jax.jit, static_argnums=4)
def _bisect(
    margins: jax.Array, best: jax.Array, trial: jax.Array, high: jax.Array, most: float
) -> _Bracket:
    """Keeps a verified radius; next is twice the best before the first failure, then midway."""
    good = jnp.all(margins > 0, axis=-1)
    best = jnp.where(good, jnp.maximum(best, trial), best)
    high = jnp.where(good, jnp.where(trial >= high, jnp.inf, high), jnp.minimum(high, trial))
    trial = jnp.where(jnp.isinf(high), 2 * best, 0.5 * (best + high))
    return best, jnp.minimum(trial, most), high


@functools.partial(jax.jit, static_argnums=(4, 5))
def _bounds(
    model: Classifier, x: jax.Array, y: jax.Array, eps: jax.Array, norm: float, box: Box
) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return jax.vmap(lambda x, y, eps: _sample_bounds(model, x, y, eps, norm, box))(x, y, eps)


def _sample_bounds(
    model: Classifier, x: jax.Array, y: jax.Array, eps: jax.Array, norm: float, box: Box
) -> jax.Array:
    classes = jax.eval_shape(model, jax.ShapeDtypeStruct((1, *x.shape), x.dtype)).shape[1]
    lower, upper, eps = _ball(x, eps, box)
    region = domain.box(lower, upper, None if norm == math.inf else (x, eps, norm))
    if lipschitz.jumps(model, x):
        highest = _highest(model, region, y, classes)
    else:
        margins, slopes = lipschitz.margins_and_slopes(model, region, y, classes)
        climb = jnp.maximum(slopes.upper * (upper - x), slopes.lower * (lower - x))
        climb = jnp.sum(jnp.maximum(climb, 0.0).reshape(classes, -1), axis=-1)
        climb *= 1 + (x.size + 8) * jnp.finfo(x.dtype).eps
        if norm != math.inf:
            climb = jnp.fmin(climb, eps * lipschitz.row_sizes(slopes, norm))
        highest = _highest(model, domain.box(x, x), y, classes) + climb
        highest = jnp.fmin(margins.upper, highest)
    return jnp.where(jnp.arange(classes) == y, jnp.inf, -highest)


def _highest(model: Classifier, region: domain.Interval, y: jax.Array, classes: int) -> jax.Array:
    differences = lipschitz.contrasts(y, classes, region.center.dtype)
    closed = jax.make_jaxpr(lambda t: differences @ lipschitz.single(model)(t))(region.center)
    return domain.ends(interval.interpret(closed, [region], domain.Context())[0]).upper


def _ball(x: jax.Array, eps: jax.Array, box: Box) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The least box around the ball, cut by the domain, and the radius certified for."""
    unit = 4 * float(jnp.finfo(x.dtype).eps)
    eps = jnp.where(eps > 0, eps * (1 + _EXCESS), 0.0)
    reach = eps + jnp.where(eps > 0, unit * jnp.abs(x), 0.0)
    lower, upper = x - reach, x + reach
    if box is not None:
        lower, upper = jnp.maximum(lower, box[0]), jnp.minimum(upper, box[1])
    return lower, upper, eps


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
