"""Lower bounds of Lipschitz constants: the steepest Jacobians found at points of a ball."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from wdjax import distinct, loops, norms
from wdjax.balls import Lp
from wdjax.bounds.region import Box
from wdjax.checks import arguments, independence, validate
from wdjax.core import Classifier
from wdjax.lipschitz.margin import contrasts
from wdjax.parallel import AnyArray
from wdjax.precision import full_precision
from wdjax.xla_cpu import drawn


@full_precision
def sampled_lipschitz(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    key: jax.Array,
    norm: float,
    eps: ArrayLike,
    box: Box = (0.0, 1.0),
    samples: int = 100,
    steps: int = 0,
) -> jax.Array:
    r"""Lower bounds of the Lipschitz constants of every margin ``z_j - z_y`` on balls.

    The largest ``||J(x')^T (e_j - e_y)||_s`` at points ``x'`` of the ball in the box. Half of the
    points are random; the others lie on the ball's boundary along the gradient of a random mixture
    of logits, where ReLU nets are steepest. Then ``steps`` of ascent increase the largest norm,
    which helps smooth nets only, since a ReLU net's Jacobian is constant on each cell. Derivatives
    that the model defines itself, such as those of a straight-through rounding, are believed.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, which treats each sample alone.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      key: a typed ``jax.random.key``.
      norm: r, one of 1, 2 and inf.
      eps: radius, a number or ``[n]``, in units of ``x``.
      box: ``(low, high)``, or None for no box.
      samples: number of points in each ball.
      steps: number of ascent steps from each point.

    Returns:
      ``[n, K]`` constants, 0 at ``j = y``, up to the rounding of the model's floats.

    Raises:
      ValueError: bad samples or settings.

    Cost: ``samples (K + 2)`` gradients, and ``K`` gradients of gradients a step.

    Source: this library's own.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: jnp.tanh(x @ w), jnp.array([[1.0, -1.0], [0.0, 2.0]]))
    >>> x, y, key = jnp.array([[0.4, 0.4]]), jnp.array([0]), jax.random.key(0)
    >>> found = sampled_lipschitz(model, x, y, key=key, norm=jnp.inf, eps=0.2, steps=5)
    >>> found.shape, bool(found[0, 1] > 3)
    ((1, 2), True)
    """
    arguments.check(model=model, x=x, y=y, eps=eps, key=key, ball=Lp(norm, box))
    norms.check_norm(norm)
    samples = validate.check_count("samples", samples)
    steps = validate.check_count("steps", steps, 0)
    fine = jnp.asarray(True)
    if validate.traced(model, x, y, eps) or validate.staged():
        validate.check_shapes(model, x, y)
        fine = independence.holds(model, jnp.asarray(x), alike=True)
    else:
        x, y = validate.check_samples(model, x, y, box)
        validate.check_radii(eps, len(y))
    x, y = jnp.asarray(x), jnp.asarray(y)
    radii = jnp.broadcast_to(jnp.asarray(eps, x.dtype), y.shape)
    found = _sampled(model, x, y, radii, key, norm, box, samples, steps)
    return jnp.where(fine, found, jnp.nan)


@functools.partial(distinct.jit, static_argnums=(5, 6, 7, 8))
def _sampled(
    model: Classifier,
    x: jax.Array,
    y: jax.Array,
    eps: jax.Array,
    key: jax.Array,
    norm: float,
    box: Box,
    samples: int,
    steps: int,
) -> jax.Array:
    """``[n, K]``: :func:`sampled_lipschitz` of checked arguments, with radii ``eps`` ``[n]``.

    Half of the ``samples`` points lie on the sphere along random gradients, the others inside the
    ball; each is then moved by ``steps`` steps up the largest of its margins' gradient norms.
    """

    def logits_of(points: jax.Array) -> jax.Array:
        return model(points).astype(points.dtype)

    logits, pull = jax.vjp(logits_of, x)
    rows = jax.vmap(lambda label: contrasts(label, logits.shape[1], x.dtype))(y)

    def sizes(point: jax.Array) -> jax.Array:
        back = jax.vjp(logits_of, point)[1]
        slopes = jax.vmap(lambda row: back(row)[0], in_axes=1)(rows)
        return jax.vmap(lambda slope: norms.lp_norm(slope, norms.dual(norm)), out_axes=1)(slopes)

    def climb(_: int, point: jax.Array) -> jax.Array:
        slope = jax.grad(lambda t: jnp.sum(jnp.max(sizes(t), axis=1)))(point)
        return norms.retract(norms.ascend(point, slope, 0.2 * eps, norm, box), x, eps, norm, box)

    def turn(best: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
        one, two, three = jax.random.split(jax.random.fold_in(key, k), 3)
        mixture = pull(jax.random.normal(one, logits.shape, logits.dtype))[0]
        noise = drawn(jax.random.normal, two, x.shape, x.dtype)
        reach = eps * jax.random.uniform(three, eps.shape, eps.dtype)
        far = x + norms.spread(eps, x) * norms.dual_maximizer(mixture, norm)
        length = norms.spread(reach / norms.lp_norm(noise, norm), x)
        point = jnp.where(k % 2 == 0, far, x + length * noise)
        point = loops.fori_loop(0, steps, climb, norms.retract(point, x, eps, norm, box))
        return jnp.fmax(best, sizes(point)), None

    return loops.scan(turn, jnp.zeros_like(logits), jnp.arange(samples))[0]
