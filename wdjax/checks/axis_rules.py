"""Where the batch axis goes in one equation: a rule for each primitive that computes values.

:mod:`wdjax.checks.batch_axis` walks through programs with these rules, and has those of loops.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn


class SampleFree(NamedTuple):
    """A value that depends on no sample."""

    varies: frozenset[int]
    """The axes along which it may differ from entry to entry."""


class PerSample(NamedTuple):
    """A value whose entries depend on one sample each.

    Along ``axis``, entry ``(o, i, j)`` of ``[outer, n, inner]`` depends on sample i.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    placed: bool = False
    """Whether the function that is applied to sample i may depend on i."""


class ManySamples(NamedTuple):
    """A value whose entries may depend on several samples, by the primitive ``where``.

    A program may make one, such as the padding of width 0 along the batch axis, and not use it.
    """

    where: str


Value = SampleFree | PerSample | ManySamples


class Unproved(Exception):  # noqa: N818  It is caught here and means no error.
    """An equation mixes samples, or its primitive has no rule."""


def varying(aval: Any) -> SampleFree:
    return SampleFree(frozenset(axis for axis, size in enumerate(aval.shape) if size > 1))


def _shape(eqn: JaxprEqn, operand: int = 0) -> tuple[int, ...]:
    aval: Any = eqn.invars[operand].aval
    return tuple(aval.shape)


def elementwise(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """Entries of all operands at one position."""
    rows = [arg for arg in args if isinstance(arg, PerSample)]
    varies = frozenset[int]().union(*(arg.varies for arg in args if isinstance(arg, SampleFree)))
    if not rows:
        return SampleFree(varies)
    if len({(row.axis, row.outer, row.inner) for row in rows}) > 1:
        raise Unproved
    placed = any(row.placed for row in rows) or rows[0].axis in varies
    return rows[0]._replace(placed=placed)


def moved(value: Value, to: Callable[[int], int | None]) -> Value:
    """A value whose axes go elsewhere; None for one that is summed up or cut."""
    if isinstance(value, ManySamples):
        return value
    if isinstance(value, PerSample):
        axis = to(value.axis)
        if axis is None:
            raise Unproved
        return value._replace(axis=axis)
    return SampleFree(frozenset(axis for axis in map(to, value.varies) if axis is not None))


def _broadcast(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    return moved(args[0], lambda axis: eqn.params["broadcast_dimensions"][axis])


def _transposed(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    return moved(args[0], eqn.params["permutation"].index)


def _reduced(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """An operation that removes axes: a sum, a maximum, a squeeze."""
    gone = eqn.params.get("axes", eqn.params.get("dimensions", ()))

    def to(axis: int) -> int | None:
        return None if axis in gone else axis - sum(other < axis for other in gone)

    return moved(args[0], to)


def _reshaped(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """A reshape: finds the new axis that holds all samples, by the number of entries per sample."""
    row, old, new = args[0], _shape(eqn), eqn.params["new_sizes"]
    if isinstance(row, SampleFree):
        return _regrouped(row, old, new)
    if not isinstance(row, PerSample) or eqn.params.get("dimensions") is not None or 0 in new:
        raise Unproved
    after = row.inner * math.prod(old[row.axis + 1 :])
    for axis, size in enumerate(new):
        step = math.prod(new[axis + 1 :])
        if after % step == 0 and (step * size) % (after * n) == 0:
            outer, inner = step * size // (after * n), after // step
            return PerSample(axis, outer, inner, row.placed)
    raise Unproved


def _regrouped(value: SampleFree, old: Sequence[int], new: Sequence[int]) -> SampleFree:
    """A reshape of a value without samples.

    Where the first axes of both shapes hold the same number of entries, the axes before and behind
    are reshaped apart.
    """
    varies, taken, axis = set[int](), 0, 0
    while axis < len(new):
        group, start = [axis], taken
        one, two = 1, new[axis]
        while one != two:
            if one < two:
                one, taken = one * old[taken], taken + 1
            else:
                axis += 1
                two, group = two * new[axis], [*group, axis]
        if value.varies.intersection(range(start, taken)):
            varies.update(group)
        axis += 1
    return SampleFree(frozenset(axis for axis in varies if new[axis] > 1))


def _stacked(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    stacked = eqn.params["axis"]
    return moved(elementwise(eqn, args, n), lambda axis: axis + (axis >= stacked))


def _unstacked(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    dropped = eqn.params["axis"]
    return moved(args[0], lambda axis: None if axis == dropped else axis - (axis > dropped))


def _tiled(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    if isinstance(args[0], SampleFree):
        return args[0]
    return moved(args[0], lambda axis: axis if eqn.params["reps"][axis] == 1 else None)


def _along(*names: str) -> Callable[[JaxprEqn, Sequence[Value], int], Value]:
    """The rule for operations along the axes in one of the parameters ``names``; along the other
    axes these act on each entry alone."""

    def rule(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
        value = elementwise(eqn, args, n)
        named = next((eqn.params[name] for name in names if name in eqn.params), None)
        last = len(_shape(eqn)) - 1
        axes = (
            named if isinstance(named, tuple) else (last if named is None else named % (last + 1),)
        )
        if isinstance(value, PerSample) and value.axis in axes:
            raise Unproved
        if isinstance(value, SampleFree):
            return SampleFree(value.varies | {*axes})
        return value

    return rule


def _concatenated(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """``concatenate``: parts without entries, as of padding of width 0, do not count."""
    parts = [arg for k, arg in enumerate(args) if 0 not in _shape(eqn, k)]
    return parts[0] if len(parts) == 1 else _along("dimension")(eqn, parts, n)


def _whole(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """Slices, padding and windows that leave the batch axis as it is."""
    value, params, aval = args[0], eqn.params, eqn.outvars[0].aval
    padding, reach = (
        params.get("padding", params.get("padding_config")),
        params.get("start_indices"),
    )

    def kept(axis: int) -> bool:
        same = aval.shape[axis] == _shape(eqn)[axis]  # type: ignore[attr-defined]
        one = [params[name][axis] == 1 for name in _WINDOWS if params.get(name) is not None]
        plain = padding is None or not any(padding[axis])
        return same and all(one) and plain and (reach is None or reach[axis] == 0)

    if isinstance(value, PerSample) and not kept(value.axis):
        raise Unproved
    if isinstance(value, SampleFree):
        changed = [axis for axis in range(len(_shape(eqn))) if not kept(axis)]
        return SampleFree(value.varies.union(changed))
    return value


_WINDOWS = ("strides", "window_dimensions", "window_strides", "base_dilation", "window_dilation")


def _updated(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """``dynamic_update_slice`` over the whole batch axis, at fixed indices."""
    value = elementwise(eqn, args, n)
    if any(isinstance(arg, PerSample) for arg in args[2:]) or not isinstance(value, PerSample):
        raise Unproved
    if _shape(eqn, 0)[value.axis] != _shape(eqn, 1)[value.axis]:
        raise Unproved
    return value


def _sliced(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """``dynamic_slice`` over the whole batch axis, at fixed indices."""
    row = args[0]
    if any(isinstance(arg, PerSample) for arg in args[1:]) or not isinstance(row, PerSample):
        raise Unproved
    if eqn.params["slice_sizes"][row.axis] != _shape(eqn)[row.axis]:
        raise Unproved
    return row


def _product(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """``dot_general``: samples lie along a free axis of one factor, or a batch axis of both."""
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    sides = (left_sum, left_batch), (right_sum, right_batch)
    free = [
        [axis for axis in range(len(_shape(eqn, k))) if axis not in (*summed, *batch)]
        for k, (summed, batch) in enumerate(sides)
    ]
    maps: list[dict[int, int]] = []
    for k, (_, batch) in enumerate(sides):
        first = len(batch) + (len(free[0]) if k else 0)
        output = {axis: position for position, axis in enumerate(batch)}
        maps.append(output | {axis: first + i for i, axis in enumerate(free[k])})
    return elementwise(eqn, [moved(arg, maps[k].get) for k, arg in enumerate(args)], n)


def _convolved(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """A convolution of images by a fixed kernel."""
    dims, images = eqn.params["dimension_numbers"], args[0]
    if isinstance(args[1], PerSample) or not isinstance(images, PerSample):
        raise Unproved
    if images.axis != dims.lhs_spec[0] or eqn.params["batch_group_count"] != 1:
        raise Unproved
    return images._replace(axis=dims.out_spec[0])


def _gathered(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """``gather`` of slices with the whole batch axis at fixed indices, or by the samples' indices.

    An axis of the operand that is taken as a whole becomes one of ``offset_dims``; axes of the
    indices become the other axes of the result.
    """
    operand, indices = args
    dims, aval = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    rank = len(aval.shape)  # type: ignore[attr-defined]
    others = [axis for axis in range(rank) if axis not in dims.offset_dims]
    pairs = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims))
    if isinstance(indices, SampleFree) and isinstance(operand, SampleFree):
        varies = indices.varies.union(pairs[axis] for axis in operand.varies & pairs.keys())
        by_index = {others[axis] for axis in varies if axis < len(others)}
        return SampleFree(frozenset(by_index.union(dims.offset_dims)))
    if isinstance(indices, PerSample):
        along = moved(operand, pairs.get)
        if isinstance(operand, SampleFree) and operand.varies.intersection(pairs):
            raise Unproved
        value = elementwise(eqn, [indices, along], n)
        return moved(value, lambda axis: others[axis] if axis < len(others) else None)
    assert isinstance(operand, PerSample)
    axis, sizes = operand.axis, eqn.params["slice_sizes"]
    taken = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    if axis in taken or sizes[axis] != _shape(eqn)[axis]:
        raise Unproved
    kept = [k for k in range(len(sizes)) if k not in taken]
    return operand._replace(axis=dims.offset_dims[kept.index(axis)])


def _scattered(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """``scatter`` and its kin: what is written into a sample's entries is its own.

    An axis of the operand that is written as a whole is one of ``update_window_dims`` of the
    updates; a batching axis is one of both the indices and the updates.
    """
    operand, indices, updates = args
    dims, shape, size = eqn.params["dimension_numbers"], _shape(eqn), _shape(eqn, 2)
    inserted = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    windows = [axis for axis in range(len(shape)) if axis not in inserted]
    others = [axis for axis in range(len(size)) if axis not in dims.update_window_dims]
    pairs = zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims)
    batching = {index: axis for axis, index in pairs}
    update_axes = {others[index]: axis for index, axis in batching.items()}
    for position, axis in zip(dims.update_window_dims, windows):
        whole = size[position] == shape[axis] and axis not in dims.scatter_dims_to_operand_dims
        update_axes.update({position: axis} if whole else {})
    given = moved(indices, batching.get), moved(updates, update_axes.get)
    value = elementwise(eqn, [operand, *given], n)
    if isinstance(value, SampleFree):
        return SampleFree(value.varies.union({*range(len(shape))} - {*update_axes.values()}))
    if isinstance(value, PerSample) and value.axis not in update_axes.values():
        raise Unproved  # The indices choose which samples are written.
    return value


def _combined(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """``reduce`` of one or several operands, from initial values without samples."""
    half = len(args) // 2
    if any(isinstance(arg, PerSample) for arg in args[half:]):
        raise Unproved
    return _reduced(eqn, [elementwise(eqn, args[:half], n)], n)


def _on_last_axes(
    count: Callable[[JaxprEqn], int],
) -> Callable[[JaxprEqn, Sequence[Value], int], Value]:
    """The rule for operations that mix entries along the last ``count(eqn)`` axes, such as Fourier
    transforms: the batch axis must be one of the others."""

    def rule(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
        value = elementwise(eqn, args, n)
        if isinstance(value, PerSample) and value.axis >= len(_shape(eqn)) - count(eqn):
            raise Unproved
        return value

    return rule


def _reread(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """Bits read as another dtype, entry by entry if that is as wide."""
    aval: Any = eqn.outvars[0].aval
    if tuple(aval.shape) != _shape(eqn):
        raise Unproved
    return args[0]


ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to",
    "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac",
    "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic",
    "lt", "lt_to", "max", "min", "mul", "ne", "neg", "nextafter", "not",
    "one_minus_square", "or", "polygamma",
    "population_count", "pow", "real", "reduce_precision", "regularized_incomplete_beta", "rem",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
    "zeta",
}  # fmt: skip
_REDUCED = {
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
    "reduce_sum", "reduce_xor", "squeeze",
}  # fmt: skip
_ALONG = {
    "approx_top_k", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "rev", "sort", "split",
    "top_k",
}  # fmt: skip
_WHOLE = {
    "pad", "reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "slice",
}  # fmt: skip

_SCATTERED = {
    "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub",
}  # fmt: skip

_Rule = Callable[[JaxprEqn, Sequence[Value], int], Value]
"""From an equation, what is known of its operands, and the batch size n: what is known of each of
its results. Raises :class:`Unproved` if samples are mixed, or nothing is known."""
RULES: dict[str, _Rule] = {
    **dict.fromkeys(_REDUCED, _reduced),
    **dict.fromkeys(_ALONG, _along("dimension", "dimensions", "axis", "reduction_dimension")),
    **dict.fromkeys(_WHOLE, _whole),
    **dict.fromkeys(_SCATTERED, _scattered),
    **dict.fromkeys(("cholesky", "lu", "eigh", "svd"), _on_last_axes(lambda _: 2)),
    "fft": _on_last_axes(lambda eqn: len(eqn.params["fft_lengths"])),
    "reduce": _combined,
    "bitcast_convert_type": _reread,
    "concatenate": _concatenated,
    "broadcast_in_dim": _broadcast,
    "transpose": _transposed,
    "reshape": _reshaped,
    "dynamic_update_slice": _updated,
    "dynamic_slice": _sliced,
    "dot_general": _product,
    "conv_general_dilated": _convolved,
    "gather": _gathered,
    "stack": _stacked,
    "unstack": _unstacked,
    "tile": _tiled,
}
FREE = {
    elementwise, _broadcast, _transposed, _reduced, _reshaped, _whole, _product, _gathered,
    _concatenated, _tiled, _scattered,
    *(RULES[name] for name in _ALONG),
}  # fmt: skip
"""The rules that also tell along which axes values without samples vary."""
SHAPING = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "copy_p"}
"""Primitives that only reshape or repeat their first operand; JAX writes fewer for one sample."""
