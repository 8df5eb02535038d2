"""Interval rules for operations that move, add up or multiply entries.

The result of an affine operation stays an affine image of the same roots (boxes) as its operands;
see :mod:`wdjax.bounds.domain`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.typing import DTypeLike

from wdjax import loops, norms
from wdjax.bounds.domain import (
    Array,
    Interval,
    Linear,
    LinearMap,
    Location,
    Origin,
    Reduced,
    Root,
    Rule,
    Ternary,
    Value,
    constant_of,
    corners,
    ends,
    fresh,
    gamma,
    is_exact,
    largest_size,
    stretch,
    tiny,
)
from wdjax.xla_cpu import WINOGRAD_CHANNELS


def evaluate(eqn: JaxprEqn, args: Sequence[Array]) -> list[Array]:
    """Runs the equation's primitive on exact arrays, at the highest matmul precision."""
    params = eqn.params
    if eqn.primitive.name == "shard_map":
        raise ValueError(
            "the model holds the primitive 'shard_map'; certify the function that it maps, and "
            "shard the certificate."
        )
    if "precision" in params:
        params = {**params, "precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)}
    declared: list[Any] = [var.aval for var in eqn.invars]
    if any(a.dtype != aval.dtype for a, aval in zip(args, declared)):
        if params.get("preferred_element_type") is not None:
            params = {**params, "preferred_element_type": None}
        if params.get("update_jaxpr") is not None:  # Of scatters, in the old dtype.
            update = jaxpr_as_fun(ClosedJaxpr(params["update_jaxpr"], params["update_consts"]))
            number = jax.ShapeDtypeStruct((), args[0].dtype)
            params = {**params, "update_jaxpr": jax.make_jaxpr(update)(number, number).jaxpr}
    out = eqn.primitive.bind(*loops.alike(*args), **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def is_narrow(dtype: DTypeLike) -> bool:
    """Whether ``dtype`` is a float type of fewer than 32 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 32


def bind(eqn: JaxprEqn, args: Sequence[Array]) -> Array:
    (out,) = evaluate(eqn, args)
    return out


def _compose(outer: Linear, inner: Linear) -> Linear:
    """The linear map ``t -> outer(inner(t))``."""
    return lambda t: outer(inner(t))


def affine(
    center: Array,
    inputs: Sequence[tuple[Interval, Linear, Linear]],
    magnitude: Array,
    terms: int,
    origin: Origin | None = None,
    rounded: Linear | None = None,
) -> Interval:
    """The interval of ``center + sum_i map_i(deviation of operand i)``.

    Args:
      center: the result at the operands' centres, of the result's shape.
      inputs: for each operand ``(interval, linear map, map with absolute coefficients)``.
      magnitude: bound of the sum of the terms' magnitudes, of the result's shape, for rounding.
      terms: number of products added up in one entry of the result; 0 if nothing is rounded.
      origin: the maximum that the result still is, if any.
      rounded: the map of magnitudes to which roundings are relative, if there is one operand and it
        is not the map with absolute coefficients.
    """
    dtype = center.dtype
    error = gamma(terms, dtype) if terms else 0.0
    radius = jnp.zeros_like(center)
    merged: dict[Root, LinearMap] = {}
    shared = False
    for value, apply, absolute in inputs:
        fine = error * (jnp.abs(value.center) + value.radius)
        if rounded is None:
            radius = radius + absolute(value.radius + fine if error else value.radius)
        else:
            radius = radius + absolute(value.radius) + rounded(fine)
        for root, chain in value.terms.items():
            new = LinearMap(_compose(apply, chain.apply), _compose(absolute, chain.absolute))
            if root in merged:
                shared = True
                new = LinearMap(
                    _both(merged[root].apply, new.apply), _both(merged[root].absolute, new.absolute)
                )
            merged[root] = new
    if error:
        radius = radius + error * jnp.abs(center) + tiny(dtype) * terms
    values = [value for value, _, _ in inputs]
    return Interval(
        center,
        jnp.where(jnp.isnan(radius), jnp.inf, radius),
        jnp.where(jnp.isnan(magnitude), jnp.inf, magnitude),
        merged,
        mixes=max(v.mixes for v in values) + (terms > 1) + shared,
        roundings=max(v.roundings for v in values) + (terms and terms + 1),
        origin=origin,
    )


def _both(first: Linear, second: Linear) -> Linear:
    """The linear map ``t -> first(t) + second(t)``."""
    return lambda t: first(t) + second(t)


def _none(eqn: JaxprEqn) -> int:
    """The number of rounded terms of an operation that only moves entries: 0."""
    return 0


def additive(
    positions: Iterable[int] | None = None,
    terms: Callable[[JaxprEqn], int] = _none,
    absolute: Callable[[Sequence[Array]], Array] | None = None,
    run: Callable[[JaxprEqn, Sequence[Array]], Array] = bind,
) -> Rule:
    """A rule for an operation that is jointly linear in the operands at ``positions`` (all of them
    by default).

    ``terms`` counts the products per entry of the result; ``absolute`` is the operation with
    absolute coefficients, by default the operation itself, which is what ``run`` computes. The
    other operands, such as indices, must not depend on the input.
    """

    def rule(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval | Ternary:
        """The result's interval, or booleans if all operands are booleans."""
        varying = set(range(len(args)) if positions is None else positions)
        operands = [a for a in args if isinstance(a, Interval) or is_exact(a)]
        if len(operands) < len(args):
            return moved_booleans(eqn, args, norm)
        if any(isinstance(a, Interval) and i not in varying for i, a in enumerate(operands)):
            raise ValueError(
                f"the primitive {eqn.primitive.name!r} is certified only where its indices do not "
                "depend on the input."
            )

        def part(run: Callable[[list[Array]], Array], k: int) -> Linear:
            def linear(t: Array) -> Array:
                blank = [jnp.zeros_like(a) if i in varying else a for i, a in enumerate(middles)]
                return run([*blank[:k], t, *blank[k + 1 :]])

            return linear

        plain = functools.partial(run, eqn)
        sized = absolute or plain
        middles = [a.center if isinstance(a, Interval) else a for a in operands]
        sizes = [a.magnitude if isinstance(a, Interval) else jnp.abs(a) for a in operands]
        sizes = [size if i in varying else middles[i] for i, size in enumerate(sizes)]
        inputs = [
            (a, part(plain, i), part(sized, i))
            for i, a in enumerate(operands)
            if isinstance(a, Interval)
        ]
        origin = _kept(eqn, inputs[0][0].origin)
        return affine(plain(middles), inputs, sized(sizes), terms(eqn), origin)

    return rule


def _kept(eqn: JaxprEqn, origin: Origin | None) -> Origin | None:
    """The operand's origin, if the equation only restores the axes of a reduced maximum.

    An origin says of which value the operand is the maximum or minimum. A reshape or broadcast that
    brings ``max(x)`` back to the axes of ``x``, as in ``x == max(x)``, keeps it, so that the
    comparison can be decided; any other equation, and an operand without such an origin, gives
    None.
    """
    if not isinstance(origin, Reduced):
        return None
    operand: Any = ends(origin.operand).lower
    out: Any = eqn.outvars[0].aval
    keep = tuple(1 if i in origin.axes else n for i, n in enumerate(operand.shape))
    left = tuple(i for i in range(operand.ndim) if i not in origin.axes)
    if eqn.primitive.name in ("reshape", "expand_dims"):
        return origin if out.shape == keep else None
    if eqn.primitive.name == "broadcast_in_dim":
        dims = tuple(eqn.params["broadcast_dimensions"])
        return origin if dims in (left, tuple(range(operand.ndim))) else None
    return None


def parted(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> list[Value]:
    """A rule for operations that cut one operand into several results."""
    (value,) = args
    if not isinstance(value, Interval):
        return [Ternary(*ends_) for ends_ in zip(*(evaluate(eqn, [end]) for end in ends(value)))]

    def piece(k: int) -> Linear:
        return lambda t: evaluate(eqn, [t])[k]

    cuts = [piece(k) for k in range(len(eqn.outvars))]
    return [affine(cut(value.center), [(value, cut, cut)], cut(value.magnitude), 0) for cut in cuts]


def moved_booleans(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Ternary:
    """A rule for operations that only move or join entries, on booleans."""
    if any(isinstance(a, Interval) for a in args):
        raise ValueError(
            f"{eqn.primitive.name!r} mixes booleans and floats that depend on the input."
        )
    lower, upper = (bind(eqn, side) for side in zip(*map(ends, args)))
    return Ternary(lower, upper)


def bilinear(terms: Callable[[JaxprEqn], int]) -> Rule:
    """A rule for operations that are linear in each operand; ``terms`` counts products an entry."""

    def rule(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Interval:
        left, right = args
        count = terms(eqn)
        if isinstance(left, Interval) and isinstance(right, Interval):
            return _product_of_intervals(eqn, left, right, count, norm)
        value, exact = (left, right) if isinstance(left, Interval) else (right, left)
        if not isinstance(value, Interval) or not is_exact(exact):
            raise ValueError(f"{eqn.primitive.name!r} is certified on floats only.")

        def times(factor: Array) -> Linear:
            return lambda t: _multiplied(eqn, [t, factor] if value is left else [factor, t])

        apply, absolute = times(exact), times(jnp.abs(exact))
        rounded = by_winograd(eqn, exact) if value is left else None
        size = (rounded or absolute)(value.magnitude)
        return affine(apply(value.center), [(value, apply, absolute)], size, count, rounded=rounded)

    return rule


def _multiplied(eqn: JaxprEqn, args: Sequence[Array]) -> Array:
    """The product, in float32 if it is to be shorter: that rounding is charged apart."""
    if is_narrow(eqn.params.get("preferred_element_type") or jnp.float32):
        eqn = eqn.replace(params={**eqn.params, "preferred_element_type": None})
    return bind(eqn, args)


def _product_of_intervals(
    eqn: JaxprEqn, left: Interval, right: Interval, terms: int, norm: float | None
) -> Interval:
    """The interval of a matrix product or convolution of two interval operands.

    With centres c and radii r it is ``c_a c_b -+ (|c_a| r_b + r_a |c_b| + r_a r_b)``, plus the
    rounding of sums of ``terms`` products; entrywise products go to :func:`product`.
    """
    if eqn.primitive.name == "mul":
        return product(left, right, norm)
    (la, ua), (lb, ub) = ends(left), ends(right)
    ca, cb = 0.5 * (la + ua), 0.5 * (lb + ub)
    error = gamma(terms, la.dtype)
    ra = jnp.maximum(ua - ca, ca - la) * (1 + error) + error * jnp.abs(ca)
    rb = jnp.maximum(ub - cb, cb - lb) * (1 + error) + error * jnp.abs(cb)
    center = _multiplied(eqn, [ca, cb])
    radius = _multiplied(eqn, [jnp.abs(ca) + ra, rb]) + _multiplied(eqn, [ra, jnp.abs(cb)])
    radius = radius * (1 + error) + error * jnp.abs(center) + tiny(la.dtype) * terms
    if eqn.primitive.name == "conv_general_dilated":
        # A kernel's entry meets many positions: norms of entries do not bound the product.
        constant = stretch([left, right], jnp.inf, norm)
    else:
        constant = _product_constant(left, right, 2 if norm == 2 else 1, norm)
    return fresh(center - radius, center + radius, constant)


def product(left: Value, right: Value, norm: float | None) -> Interval:
    """The entrywise product of two values of one shape."""
    constant = _product_constant(left, right, math.inf, norm)
    return fresh(*corners(ends(left), ends(right)), constant)


def _product_constant(
    left: Value, right: Value, measure: float, norm: float | None
) -> Array | None:
    """The Lipschitz constant ``|A| Lip(B) + |B| Lip(A)`` of a product; None without ``norm``.

    ``|A|`` is the l_``measure`` norm of the largest magnitudes of all entries of ``A``.
    """
    if norm is None:
        return None
    sizes = [largest_size(value).reshape(1, -1) for value in (left, right)]
    one, two = (norms.lp_norm(size, measure)[0] for size in sizes)
    total = one * constant_of(right, norm) + two * constant_of(left, norm)
    slack = gamma(sizes[0].size + sizes[1].size, total.dtype)
    return jnp.where(jnp.isnan(total), jnp.inf, total) * (1 + slack)


def summation(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Value | list[Value]:
    """The rule for ``reduce_sum``; a sum of the mask "attains the maximum" is at least 1."""
    (value,) = args
    axes = tuple(eqn.params["axes"])
    origin = value.origin if isinstance(value, Interval) else None
    if isinstance(origin, Location) and origin.axes == axes:
        lower, upper = (jnp.sum(end, axis=axes) for end in ends(value))
        return fresh(jnp.maximum(lower, 1.0), upper, stretch(args, jnp.inf, norm))
    return additive(terms=_summed)(eqn, args, norm)


def shape_of(eqn: JaxprEqn, k: int) -> tuple[int, ...]:
    """The shape of the operand number ``k``."""
    aval: Any = eqn.invars[k].aval  # Its declared type knows no shape.
    return aval.shape


def _summed(eqn: JaxprEqn) -> int:
    """The number of entries that a ``reduce_sum`` adds up to one."""
    return math.prod(shape_of(eqn, 0)[axis] for axis in eqn.params["axes"])


def cumulated(eqn: JaxprEqn) -> int:
    return shape_of(eqn, 0)[eqn.params["axis"]]


def scattered(eqn: JaxprEqn) -> int:
    return math.prod(shape_of(eqn, 2))


def known_indices(eqn: JaxprEqn, args: Sequence[Value]) -> Array:
    """The indices of a scatter, which must not depend on the input."""
    if not is_exact(args[1]):
        raise ValueError(
            f"the primitive {eqn.primitive.name!r} is certified only where its indices do not "
            "depend on the input."
        )
    return args[1]


def written(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Value | list[Value]:
    """The rule for ``scatter``: unknown where several updates are written to one entry.

    Which of them stays is not defined: on CPUs the last one, on GPUs any.
    """
    out = additive([0, 2], run=_written)(eqn, args, norm)
    if not isinstance(out, Ternary):
        return out
    twice = _written_twice(eqn, known_indices(eqn, args))
    return Ternary(out.lower & ~twice, out.upper | twice)


def _written(eqn: JaxprEqn, args: Sequence[Array]) -> Array:
    """The result of ``scatter``, NaN where several updates are written to one entry."""
    return bind(eqn, args) * jnp.where(_written_twice(eqn, args[1]), jnp.nan, 1.0)


def _written_twice(eqn: JaxprEqn, indices: Array) -> Array:
    """Whether several updates of a scatter go to one entry of its result."""
    if eqn.params["unique_indices"]:
        return jnp.zeros((), bool)
    counted = lax.scatter_add(
        jnp.zeros(shape_of(eqn, 0)),
        indices,
        jnp.ones(shape_of(eqn, 2)),
        eqn.params["dimension_numbers"],
        mode=eqn.params["mode"],
    )
    return counted > 1


def scattered_product(
    eqn: JaxprEqn, args: Sequence[Value], norm: float | None
) -> Value | list[Value]:
    """The rule for ``scatter-mul``: affine if the factors are known; otherwise a product of
    intervals, unbounded where several factors go to one entry."""
    base, indices, factors = args[0], known_indices(eqn, args), args[2]
    if is_exact(factors):
        sized = [indices, jnp.abs(factors)]
        return additive([0], scattered, lambda ts: bind(eqn, [ts[0], *sized]))(eqn, args, norm)
    low, high = ends(factors)
    one = jnp.ones(shape_of(eqn, 0), low.dtype)
    pair = bind(eqn, [one, indices, low]), bind(eqn, [one, indices, high])
    twice = bind(eqn, [one, indices, jnp.full_like(low, 2.0)]) > 2
    low, high = corners(ends(base), pair)
    constant = _product_constant(base, fresh(*pair, stretch([factors], 1.0, norm)), math.inf, norm)
    return fresh(jnp.where(twice, -jnp.inf, low), jnp.where(twice, jnp.inf, high), constant)


def windows(eqn: JaxprEqn, shape: Sequence[int]) -> list[Callable[..., Array]]:
    """One function a position in the pooling window: it returns, from an array padded by ``blank``,
    the entries ``shape`` that all windows have at this position."""
    params = eqn.params
    sizes, strides = params["window_dimensions"], params["window_strides"]
    apart = params.get("window_dilation", (1,) * len(sizes))

    def part(offset: Sequence[int], t: Array, blank: float) -> Array:
        t = lax.pad(t, jnp.asarray(blank, t.dtype), [(*pads, 0) for pads in params["padding"]])
        first = [d * i for d, i in zip(apart, offset)]
        stops = [o + (n - 1) * s + 1 for o, n, s in zip(first, shape, strides)]
        return lax.slice(t, first, stops, strides)

    return [functools.partial(part, offset) for offset in itertools.product(*map(range, sizes))]


def windowed(eqn: JaxprEqn) -> int:
    return math.prod(eqn.params["window_dimensions"])


def contracted(eqn: JaxprEqn) -> int:
    (left, _), _ = eqn.params["dimension_numbers"]
    return math.prod(shape_of(eqn, 0)[axis] for axis in left)


def convolved(eqn: JaxprEqn) -> int:
    kernel = shape_of(eqn, 1)
    return max(math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]], 1)


def by_winograd(eqn: JaxprEqn, kernel: Array) -> Linear | None:
    """The map of magnitudes to which a convolution's roundings are relative, if
    :func:`wdjax.models.conv.conv` runs it by Winograd's algorithm; else None.

    That adds up to four neighbours in a row, and the entries of a row of the kernel, before it
    multiplies: even where a kernel's entry is 0, a neighbour is rounded. It takes 3 c products for
    a number instead of 9 c, twice as large ones.
    """
    if eqn.primitive.name != "conv_general_dilated":
        return None
    params = eqn.params
    outputs, inputs, *window = (kernel.shape[i] for i in params["dimension_numbers"].rhs_spec)
    plain = {*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"]} == {1}
    if window != [3, 3] or min(outputs, inputs) < WINOGRAD_CHANNELS or not plain:
        return None
    axis = params["dimension_numbers"].rhs_spec[3]
    wide = jnp.repeat(jnp.sum(jnp.abs(kernel), axis=axis, keepdims=True), 5, axis=axis)
    rows, (left, right) = params["padding"]
    wider = eqn.replace(params={**params, "padding": (rows, (left + 1, right + 1))})
    return lambda t: bind(wider, [t, wide])


def convert(eqn: JaxprEqn, args: Sequence[Value], norm: float | None) -> Value | list[Value]:
    """The rule for ``convert_element_type``, from floats to integers rounding towards zero.

    Values of dtypes shorter than float32 stay in float32, as do integers; :func:`interval.apply`
    adds their rounding.
    """
    (value,) = args
    dtype = eqn.params["new_dtype"]
    whole = jnp.issubdtype(dtype, jnp.integer)
    if isinstance(value, Ternary):
        if dtype == jnp.bool_:
            return value
        if whole or jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.dtype(jnp.float32) if whole or is_narrow(dtype) else dtype
            return fresh(
                value.lower.astype(dtype),
                value.upper.astype(dtype),
                stretch(args, jnp.inf, norm),
                value.origin,
            )
    elif isinstance(value, Interval) and jnp.issubdtype(dtype, jnp.floating):
        if is_narrow(dtype) or dtype == value.center.dtype:
            return value
        narrower = jnp.finfo(dtype).eps > jnp.finfo(value.center.dtype).eps
        return additive(terms=lambda _: int(narrower))(eqn, args, norm)
    elif isinstance(value, Interval) and whole:
        source: Any = eqn.invars[0].aval
        if jnp.issubdtype(source.dtype, jnp.integer):
            return value
        low, high = map(jnp.trunc, ends(value))
        return fresh(low, high, stretch(args, jnp.inf, norm))
    elif isinstance(value, Interval) and dtype == jnp.bool_:
        lower, upper = ends(value)
        return Ternary((lower > 0) | (upper < 0), (lower != 0) | (upper != 0))
    raise ValueError(
        f"a value that depends on the input is converted to {jnp.dtype(dtype).name}; only "
        "real numbers and booleans are certified. Write a Fourier transform as two products with "
        "the real matrices of its cosines and sines."
    )
