r"""Lipschitz constants of the margins of a classifier: layer products and interval Jacobians.

The constant of Theorem 3.1 is sharpened to ``L_margin = max_x max_j || J(x)^T (e_j - e_y) ||_s``.
It holds for both losses of the theorem: the gradients of the cross-entropy and of the margin loss
are sums of the ``J^T (e_j - e_y)`` with weights of sum at most 1. The DLR loss itself has no
Lipschitz constant.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from wdjax import distinct, norms
from wdjax.bounds import continuity, domain, interval, record
from wdjax.bounds.graph import flatten
from wdjax.checks import arguments, independence, validate
from wdjax.core import Array, Classifier
from wdjax.precision import full_precision, highest

_COTANGENTS = 256
"""Number of cotangents that are pulled back at once."""


def single(model: Classifier) -> Callable[[Array], Array]:
    """The model as a function of one sample ``[*shape]``, without custom derivative rules.

    Custom rules and stopped gradients are replaced by the derivative of the program itself.
    """

    def alone(x: Array) -> Array:
        closed = jax.make_jaxpr(lambda t: jnp.squeeze(model(t[None]), 0))(x)
        return domain.ends(interval.interpret(closed, [x])[0]).lower

    return alone


def contrasts(y: Array, classes: int, dtype: DTypeLike) -> Array:
    """The rows ``e_j - e_y``, ``[K, K]``; row y is 0."""
    return jnp.eye(classes, dtype=dtype) - jax.nn.one_hot(y, classes, dtype=dtype)[None]


def margins_and_slopes(
    model: Classifier, region: domain.Interval, y: Array, classes: int
) -> tuple[norms.Bounds, norms.Bounds]:
    """Bounds on all margins ``z_j - z_y`` over a region, ``[K]``, and on their Jacobian.

    The second ``Bounds``, ``[K, *shape]``, contain Clarke's generalised Jacobian, if the model is
    continuous where its program compares and selects.
    """
    logits = jax.eval_shape(single(model), region.center)
    differences = contrasts(y, classes, logits.dtype)  # Not always that of the input.

    def both(x: Array) -> tuple[Array, Array]:
        values, pull = jax.vjp(single(model), x)
        return differences @ values, jax.vmap(pull)(differences)[0]

    closed = jax.make_jaxpr(both)(region.center)
    margins, slopes = interval.interpret(closed, [region])
    return domain.ends(margins), domain.ends(slopes)


def row_sizes(jacobian: norms.Bounds, norm: float) -> Array:
    """Upper bounds ``[K]`` of the dual norm of every row of an interval Jacobian."""
    size = jnp.maximum(jnp.abs(jacobian.lower), jnp.abs(jacobian.upper))
    slack = (size[0].size + 8) * jnp.finfo(size.dtype).eps
    return norms.lp_norm(size, norms.dual(norm)) * (1 + slack)


@full_precision
def layer_product(
    model: Classifier,
    lower: ArrayLike,
    upper: ArrayLike,
    *,
    norm: float,
    labels: ArrayLike | None = None,
) -> Array:
    r"""Lipschitz constants of the margins as products of layer norms.

    Every value of the program gets a constant, from the input's l_r norm to its own: affine maps
    multiply by their operator norm, branches add, ReLU and max pooling multiply by 1. The last
    affine map is composed with ``z_j - z_y``, from l_r to a number.

    Args:
      model, lower, upper, norm, labels: as in :func:`margin_lipschitz`.

    Returns:
      ``[m, K]`` constants of ``z_j - z_y``, 0 for ``j = y``; infinite if a factor is, such as that
      of a product of two unbounded values.

    Raises:
      ValueError: no rule for a primitive, or a discontinuous one.

    Cost: a few forward passes of one sample; for r = 2 also the matrices of small layers.

    Source: Tsuzuku et al. [tsuzuku2018], for programs instead of layers.

    >>> from wdjax import Model
    >>> w = jnp.array([[1.0, -1.0], [0.0, 2.0]])
    >>> model = Model(lambda w, x: jnp.maximum(x @ w, 0.0) @ w, w)
    >>> round(float(layer_product(model, jnp.zeros(2), jnp.ones(2), norm=jnp.inf)[0, 1]), 3)
    12.0
    """
    arguments.check(model=model)
    return _constants(_layer_product, model, lower, upper, norm, labels)


@functools.partial(distinct.jit, static_argnums=(3, 5))
@highest()
def _layer_product(
    model: Classifier, lower: Array, upper: Array, norm: float, labels: Array, classes: int
) -> Array:
    """``[m, K]``: constants of the margins of ``labels`` ``[m]``, as products of layer norms."""
    region = domain.box(lower, upper, constant=jnp.ones((), lower.dtype))
    (outs,) = interval.interpret(jax.make_jaxpr(single(model))(lower), [region], norm)
    if not isinstance(outs, domain.Interval):
        return jnp.zeros((labels.size, classes), lower.dtype)
    dual = norms.dual(norm)
    total = jnp.zeros((labels.size, classes), lower.dtype)
    for root, chain in outs.terms.items():
        slack = 4 * (2 * outs.roundings + root.half.size + 8) * jnp.finfo(lower.dtype).eps
        weight = domain.matrix(chain.apply, root, (classes,))
        sizes = norms.lp_norm(domain.matrix(chain.absolute, root, (classes,)), dual)
        apart = jax.lax.map(lambda y, w=weight: norms.lp_norm(w - w[y], dual), labels)
        apart = apart + slack * (sizes + sizes[labels][:, None])
        constant = jnp.inf if root.constant is None else root.constant
        total = total + jnp.where(apart == 0, 0.0, apart * constant)
    return total


@full_precision
def interval_jacobian(
    model: Classifier,
    lower: ArrayLike,
    upper: ArrayLike,
    *,
    norm: float,
    labels: ArrayLike | None = None,
) -> Array:
    r"""Lipschitz constants of the margins from the interval Jacobian over a box.

    Args:
      model, lower, upper, norm, labels: as in :func:`margin_lipschitz`.

    Returns:
      ``[m, K]`` constants of ``z_j - z_y``, 0 for ``j = y``.

    Raises:
      ValueError: no rule for a primitive, or a discontinuous one.

    Cost: two forward passes and ``2 m K`` backward passes of one sample.

    Source: Weng et al. [weng2018], FastLip; the program of the gradient is bounded by intervals.

    >>> from wdjax import Model
    >>> w = jnp.array([[1.0, -1.0], [0.0, 2.0]])
    >>> model = Model(lambda w, x: jnp.maximum(x @ w, 0.0) @ w, w)
    >>> round(float(interval_jacobian(model, jnp.zeros(2), jnp.ones(2), norm=jnp.inf)[0, 1]), 3)
    8.0
    """
    arguments.check(model=model)
    return _constants(_interval_jacobian, model, lower, upper, norm, labels)


@functools.partial(distinct.jit, static_argnums=(3, 5))
@highest()
def _interval_jacobian(
    model: Classifier, lower: Array, upper: Array, norm: float, labels: Array, classes: int
) -> Array:
    """``[m, K]``: constants of the margins of ``labels`` ``[m]``, from interval Jacobians."""

    def constants(y: Array) -> Array:
        region = domain.box(lower, upper)
        return row_sizes(margins_and_slopes(model, region, y, classes)[1], norm)

    return jax.lax.map(constants, labels, batch_size=max(1, _COTANGENTS // classes))


@full_precision
def margin_lipschitz(
    model: Classifier,
    lower: ArrayLike,
    upper: ArrayLike,
    *,
    norm: float,
    labels: ArrayLike | None = None,
) -> Array:
    r"""Lipschitz constants of the margins ``z_j - z_y`` over a box, for any program.

    The smaller of :func:`layer_product` and :func:`interval_jacobian`. The largest over the labels
    present in the data and all rivals is a valid ``L`` of equations 4 and 8, for the cross-entropy
    and for the margin loss, if the box is the whole domain, since mass may move anywhere in it.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, continuous where its program selects.
      lower: ``[*shape]`` floats, may be ``-inf``.
      upper: ``[*shape]`` floats, may be ``inf``.
      norm: r, one of 1, 2 and inf.
      labels: ``[m]`` labels y; all by default.

    Returns:
      ``[m, K]`` constants in logits per unit of ``x``, 0 for ``j = y``. They are of the function of
      real numbers whose rounding is the program: their own rounding is charged, while the steps
      between the program's floats, of bfloat16 above all, may be steeper.

    Raises:
      ValueError: bad shapes, no rule for a primitive, or a discontinuous one (rounding, signs).

    Cost: that of both.

    Differs: equation 6 has ``2^(1/r) max ||J||_{r -> s}``, which is never smaller, and
      counts labels that do not occur.

    Source: Le et al. [le2025], equations 6 and 8.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [0.0, 2.0]]))
    >>> sizes = margin_lipschitz(model, jnp.zeros(2), jnp.ones(2), norm=2, labels=[0])
    >>> sizes.shape, round(float(sizes[0, 1]), 3)
    ((1, 2), 2.828)
    """
    arguments.check(model=model)
    return jnp.minimum(
        layer_product(model, lower, upper, norm=norm, labels=labels),
        interval_jacobian(model, lower, upper, norm=norm, labels=labels),
    )


def _constants(
    bound: Callable[..., Array],
    model: Classifier,
    lower: ArrayLike,
    upper: ArrayLike,
    norm: float,
    labels: ArrayLike | None,
) -> Array:
    """``[m, K]``: bounds of the margins' constants by the function ``bound``, with all checks.

    The constants are inf where a bound is NaN, where a value may overflow a short dtype, and where
    the model may mix samples; they are 0 for the label itself. Discontinuous models raise a
    ValueError. ``labels`` None means all classes.
    """
    norms.check_norm(norm)
    lower, upper = interval.check_ends(lower, upper)
    if lower.ndim == 0:
        raise ValueError(f"lower and upper must be those of a sample [*shape], got {lower!r}.")
    sample = jax.ShapeDtypeStruct((1, *lower.shape), lower.dtype)
    out = validate.shapes_of(model, sample)
    if getattr(out, "ndim", 0) != 2 or out.shape[1] < 2:
        raise ValueError(
            f"the model must return logits [1, K] with K >= 2 for a sample {list(lower.shape)}, "
            f"got {getattr(out, 'shape', out)}."
        )
    names, classes = continuity.jumps(jax.make_jaxpr(model)(sample)), out.shape[1]
    record.see_through(*names)
    if names:  # Derivatives do not bound a discontinuous function.
        raise ValueError(
            f"the model applies {', '.join(sorted(names))} to its input, so it is not "
            "continuous and has no Lipschitz constant; certify it by certify.margin_bounds."
        )
    points, fine = independence.points(lower, upper), jnp.asarray(True)
    if validate.traced(model, lower, upper) or validate.staged():
        fine = independence.holds(model, points, alike=True)
    else:
        independence.check(model, points)
    labels = jnp.arange(classes) if labels is None else jnp.asarray(labels)
    if labels.ndim != 1 or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels must be integers [m], got {labels.dtype}{list(labels.shape)}.")
    if not validate.traced(labels) and not jnp.all((labels >= 0) & (labels < classes)):
        raise ValueError(f"labels must be classes, 0 to {classes - 1}, got {labels!r}.")
    total = bound(model, lower, upper, norm, labels, classes)
    lost = _too_large(model, lower, upper) | _may_test_nan(model, lower, upper)
    open_ = jnp.isnan(total) | lost | ~fine
    total = jnp.where(open_, jnp.inf, total)
    return jnp.where(jnp.arange(classes)[None] == labels[:, None], 0.0, total)


@distinct.jit
@highest()
def logits(model: Classifier, lower: Array, upper: Array) -> norms.Bounds:
    """Bounds ``[K]`` of the logits over a box."""
    closed = jax.make_jaxpr(single(model))(lower)
    return domain.ends(interval.interpret(closed, [domain.box(lower, upper)])[0])


@distinct.jit
@highest()
def _may_test_nan(model: Classifier, lower: Array, upper: Array) -> Array:
    """A scalar boolean: :func:`interval.may_test_nan` of one sample in a box."""
    graph = flatten(jax.make_jaxpr(single(model))(lower))
    return interval.may_test_nan(graph, domain.box(lower, upper))


@distinct.jit
@highest()
def _too_large(model: Classifier, lower: Array, upper: Array) -> Array:
    """A scalar boolean: whether a value may overflow a dtype that is shorter than the input's.

    The program jumps to infinity there, which its gradient does not show.
    """
    closed, most = jax.make_jaxpr(single(model))(lower), jnp.finfo(lower.dtype).max
    graph, values = interval.walk(closed, [domain.box(lower, upper)])
    short = [
        jnp.all(jnp.isfinite(end))
        for node in graph.nodes
        for place, aval in ((place, graph.avals[place]) for place in node.outputs)
        if jnp.issubdtype(aval.dtype, jnp.floating) and float(jnp.finfo(aval.dtype).max) < most
        for end in domain.ends(values[place])
    ]
    return ~functools.reduce(jnp.logical_and, short, jnp.asarray(True))
