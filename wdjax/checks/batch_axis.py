"""Follows the batch axis through a program, to prove that a model treats each sample alone.

A rule for each primitive tells where the axis goes. If samples are mixed, or a primitive has no
rule, nothing is proved, and :mod:`wdjax.checks.independence` tries the model instead.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal


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


Value = SampleFree | PerSample


class BatchProof(NamedTuple):
    """What the program of a model shows; False where it is not proved."""

    alone: bool
    """Row i of every output depends on sample i only."""
    alike: bool
    """Moreover it is the same function for all rows."""
    where: str = ""
    """The primitive that mixes samples, or that has no rule."""


class _Unproved(Exception):  # noqa: N818  It is caught here and means no error.
    """An equation mixes samples, or its primitive has no rule."""


def prove(closed: ClosedJaxpr, batched: Sequence[bool]) -> BatchProof:
    """Follows the samples through a program.

    Args:
      closed: a program, traced for several samples.
      batched: for each input, whether its first axis is the batch axis; other inputs are fixed.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((4, 3))
    >>> prove(jax.make_jaxpr(lambda x: jnp.tanh(x).sum(axis=1))(ones), [True])
    BatchProof(alone=True, alike=True, where='')
    >>> prove(jax.make_jaxpr(lambda x: x - x.mean(axis=0))(ones), [True])
    BatchProof(alone=False, alike=False, where='reduce_sum')
    >>> prove(jax.make_jaxpr(lambda x: x + jnp.arange(4.0)[:, None])(ones), [True])
    BatchProof(alone=True, alike=False, where='')
    """
    given: list[Any] = [var.aval for var in closed.jaxpr.invars]
    n = next(aval.shape[0] for aval, rows in zip(given, batched) if rows)
    values = [PerSample(0) if rows else _varying(aval) for aval, rows in zip(given, batched)]
    try:
        out = _walk(closed, values, n)
    except _Unproved as stop:
        return BatchProof(False, False, *stop.args)
    rows = [value for value in out if isinstance(value, PerSample)]
    fixed = [value for value in out if isinstance(value, SampleFree)]
    alone = all((row.axis, row.outer, row.inner) == (0, 1, 1) for row in rows)
    placed = any(row.placed for row in rows) or any(0 in value.varies for value in fixed)
    return BatchProof(alone, alone and not placed)


def _varying(aval: Any) -> SampleFree:
    """A value that depends on no sample, and may differ along every axis longer than 1."""
    return SampleFree(frozenset(axis for axis, size in enumerate(aval.shape) if size > 1))


def _walk(closed: ClosedJaxpr | Jaxpr, values: Sequence[Value], n: int) -> list[Value]:
    """What is known of each result of a program, from what is known of its arguments.

    ``n`` is the batch size. Raises :class:`_Unproved`, with the primitive's name, at the first
    equation that mixes samples or has no rule.
    """
    consts, jaxpr = getattr(closed, "consts", ()), getattr(closed, "jaxpr", closed)
    known: dict[Any, Value] = dict(zip(jaxpr.invars, values))
    known.update((var, _varying(var.aval)) for var, _ in zip(jaxpr.constvars, consts))

    def read(atom: Any) -> Value:
        return _varying(atom.aval) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        args = [read(atom) for atom in eqn.invars]
        try:
            values = _follow(eqn, args, n)
        except _Unproved as stop:
            raise _Unproved(*(stop.args or (eqn.primitive.name,))) from None
        known.update(zip(eqn.outvars, values))
    return [read(atom) for atom in jaxpr.outvars]


def _follow(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """What is known of an equation's results, from what is known of its operands ``args``.

    ``n`` is the batch size. Raises :class:`_Unproved` if samples are mixed, or there is no rule.
    """
    name = eqn.primitive.name
    if name in _STRUCTURED:
        return _STRUCTURED[name](eqn, args, n)
    inner = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
    if name in _CALLS and inner is not None:
        return _walk(inner, args, n)
    outs: list[Any] = [var.aval for var in eqn.outvars]
    rule = _elementwise if name in _ELEMENTWISE else _RULES.get(name)
    if any(isinstance(arg, PerSample) for arg in args):
        if rule is None:
            raise _Unproved
        return [rule(eqn, args, n)] * len(outs)
    if rule in (_elementwise, _broadcast, _transposed, _reduced):
        assert rule is not None
        return [rule(eqn, args, n)] * len(outs)
    if name == "iota":
        return [SampleFree(frozenset([eqn.params["dimension"]]))]
    return [_varying(aval) for aval in outs]


def _shape(eqn: JaxprEqn, operand: int = 0) -> tuple[int, ...]:
    """The shape of an equation's operand."""
    aval: Any = eqn.invars[operand].aval
    return tuple(aval.shape)


def _elementwise(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for operations on entries of all operands at one place.

    Raises :class:`_Unproved` if the operands' samples lie along different axes.
    """
    rows = [arg for arg in args if isinstance(arg, PerSample)]
    varies = frozenset[int]().union(*(arg.varies for arg in args if isinstance(arg, SampleFree)))
    if not rows:
        return SampleFree(varies)
    if len({(row.axis, row.outer, row.inner) for row in rows}) > 1:
        raise _Unproved
    placed = any(row.placed for row in rows) or rows[0].axis in varies
    return rows[0]._replace(placed=placed)


def _moved(value: Value, place: Callable[[int], int | None]) -> Value:
    """What is known of a value whose axis ``i`` becomes axis ``place(i)``.

    ``place`` is None for an axis that is summed up or cut; for the samples' axis that raises
    :class:`_Unproved`.
    """
    if isinstance(value, PerSample):
        axis = place(value.axis)
        if axis is None:
            raise _Unproved
        return value._replace(axis=axis)
    return SampleFree(frozenset(axis for axis in map(place, value.varies) if axis is not None))


def _broadcast(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for ``broadcast_in_dim``."""
    return _moved(args[0], lambda axis: eqn.params["broadcast_dimensions"][axis])


def _transposed(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for ``transpose``: the samples' axis goes where the permutation moves it."""
    return _moved(args[0], eqn.params["permutation"].index)


def _reduced(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for operations that remove axes, such as sums: proved if the samples' one stays."""
    gone = eqn.params.get("axes", eqn.params.get("dimensions", ()))

    def place(axis: int) -> int | None:
        return None if axis in gone else axis - sum(other < axis for other in gone)

    return _moved(args[0], place)


def _reshaped(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for ``reshape``: finds the new axis along which the samples lie.

    It is the axis whose entries can be grouped as ``[outer, n, inner]``, by the number of entries
    that follow each sample; raises :class:`_Unproved` if there is none.
    """
    row, old, new = args[0], _shape(eqn), eqn.params["new_sizes"]
    if not isinstance(row, PerSample) or eqn.params.get("dimensions") is not None or 0 in new:
        raise _Unproved
    after = row.inner * math.prod(old[row.axis + 1 :])
    for axis, size in enumerate(new):
        step = math.prod(new[axis + 1 :])
        if after % step == 0 and (step * size) % (after * n) == 0:
            outer, inner = step * size // (after * n), after // step
            return PerSample(axis, outer, inner, row.placed)
    raise _Unproved


def _stacked(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for ``stack``, which puts a new axis before others."""
    own = eqn.params["axis"]
    return _moved(_elementwise(eqn, args, n), lambda axis: axis + (axis >= own))


def _unstacked(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for ``unstack``: proved if it is along another axis than the samples'."""
    own = eqn.params["axis"]
    return _moved(args[0], lambda axis: None if axis == own else axis - (axis > own))


def _tiled(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for ``tile``: proved if the samples are not repeated."""
    return _moved(args[0], lambda axis: axis if eqn.params["reps"][axis] == 1 else None)


def _along(*names: str) -> Callable[[JaxprEqn, Sequence[Value], int], Value]:
    """The rule for operations along some axes: proved if the samples lie along another.

    ``names`` are the parameters that may hold the axes; without any of them it is the last axis.
    """

    def rule(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
        value = _elementwise(eqn, args, n)
        own = next((eqn.params[name] for name in names if name in eqn.params), None)
        last = len(_shape(eqn)) - 1
        axes = own if isinstance(own, tuple) else (last if own is None else own % (last + 1),)
        if isinstance(value, PerSample) and value.axis in axes:
            raise _Unproved
        return value

    return rule


def _whole(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for slices, padding and pooling windows: proved if they leave the batch axis alone.

    The axis must neither be cut, padded, strided nor pooled; otherwise raises :class:`_Unproved`.
    """
    value, params = args[0], eqn.params
    if not isinstance(value, PerSample):
        raise _Unproved
    axis, aval = value.axis, eqn.outvars[0].aval
    same = aval.shape[axis] == _shape(eqn)[axis]  # type: ignore[attr-defined]
    one = [params[name][axis] == 1 for name in _WINDOWS if params.get(name) is not None]
    padding = params.get("padding", params.get("padding_config"))
    plain = padding is None or not any(padding[axis])
    reach = params.get("start_indices")
    if not (same and all(one) and plain and (reach is None or reach[axis] == 0)):
        raise _Unproved
    return value


_WINDOWS = ("strides", "window_dimensions", "window_strides", "base_dilation", "window_dilation")


def _updated(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for ``dynamic_update_slice``: proved if all samples are updated alike."""
    value = _elementwise(eqn, args, n)
    if any(isinstance(arg, PerSample) for arg in args[2:]) or not isinstance(value, PerSample):
        raise _Unproved
    if _shape(eqn, 0)[value.axis] != _shape(eqn, 1)[value.axis]:
        raise _Unproved
    return value


def _sliced(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for ``dynamic_slice``: proved if all samples are kept and cut alike."""
    row = args[0]
    if any(isinstance(arg, PerSample) for arg in args[1:]) or not isinstance(row, PerSample):
        raise _Unproved
    if eqn.params["slice_sizes"][row.axis] != _shape(eqn)[row.axis]:
        raise _Unproved
    return row


def _product(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for ``dot_general``: proved if the samples lie along a free or batch axis.

    A free axis of one factor, if the other depends on no sample; else the same batch axis of both.
    """
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    sides = (left_sum, left_batch), (right_sum, right_batch)
    free = [
        [axis for axis in range(len(_shape(eqn, k))) if axis not in (*summed, *batch)]
        for k, (summed, batch) in enumerate(sides)
    ]
    places: list[dict[int, int]] = []
    for k, (_, batch) in enumerate(sides):
        first = len(batch) + (len(free[0]) if k else 0)
        own = {axis: place for place, axis in enumerate(batch)}
        places.append(own | {axis: first + i for i, axis in enumerate(free[k])})
    moved = [_moved(arg, places[k].get) for k, arg in enumerate(args)]
    return _elementwise(eqn, moved, n)


def _convolved(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for convolutions: proved if the samples are images, and the kernel is fixed."""
    dims, images = eqn.params["dimension_numbers"], args[0]
    if isinstance(args[1], PerSample) or not isinstance(images, PerSample):
        raise _Unproved
    if images.axis != dims.lhs_spec[0] or eqn.params["batch_group_count"] != 1:
        raise _Unproved
    return images._replace(axis=dims.out_spec[0])


def _gathered(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Value:
    """The rule for ``gather``: proved if all samples are kept, or each is indexed by itself.

    An axis of the operand that is taken as a whole becomes one of ``offset_dims``; axes of the
    indices become the other axes of the result.
    """
    operand, indices = args
    dims, aval = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    rank = len(aval.shape)  # type: ignore[attr-defined]
    others = [axis for axis in range(rank) if axis not in dims.offset_dims]
    if isinstance(indices, PerSample):
        pairs = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims))
        moved = _moved(operand, pairs.get)
        if isinstance(operand, SampleFree) and operand.varies.intersection(pairs):
            raise _Unproved
        value = _elementwise(eqn, [indices, moved], n)
        return _moved(value, lambda axis: others[axis] if axis < len(others) else None)
    assert isinstance(operand, PerSample)
    axis, sizes = operand.axis, eqn.params["slice_sizes"]
    taken = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    if axis in taken or sizes[axis] != _shape(eqn)[axis]:
        raise _Unproved
    kept = [k for k in range(len(sizes)) if k not in taken]
    return operand._replace(axis=dims.offset_dims[kept.index(axis)])


def _each(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """The rule for operations that return their operands."""
    return args


def _scanned(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """The rule for ``scan`` over another axis than the batch axis."""
    consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    fixed, whole = args[:consts], args[consts + carries :]
    series = [_moved(arg, lambda axis: axis - 1 if axis else None) for arg in whole]

    def body(carry: Sequence[Value]) -> list[Value]:
        return _walk(eqn.params["jaxpr"], [*fixed, *carry, *series], n)

    start = args[consts : consts + carries]
    carry = _settled(start, lambda now: body(now)[:carries])
    outs = [_moved(out, lambda axis: axis + 1) for out in body(carry)[carries:]]
    stacked = [out if isinstance(out, PerSample) else SampleFree(out.varies | {0}) for out in outs]
    return [*carry, *stacked]


def _repeated(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """The rule for ``while``: proved if the condition depends on no sample."""
    params, first = eqn.params, eqn.params["cond_nconsts"]
    second = first + params["body_nconsts"]
    carry = _settled(
        args[second:], lambda now: _walk(params["body_jaxpr"], [*args[first:second], *now], n)
    )
    (going,) = _walk(params["cond_jaxpr"], [*args[:first], *carry], n)
    if isinstance(going, PerSample):
        raise _Unproved
    return carry


def _chosen(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """The rule for ``cond``: proved if no sample decides which branch is taken."""
    if isinstance(args[0], PerSample):
        raise _Unproved
    ways = [_walk(branch, args[1:], n) for branch in eqn.params["branches"]]
    return [_joined(*values) for values in zip(*ways)]


def _settled(
    carry: Sequence[Value], turn: Callable[[Sequence[Value]], Sequence[Value]]
) -> Sequence[Value]:
    """What is known of a loop's carry in every iteration: the fixed point of joining.

    ``turn`` maps what is known before an iteration to what is known after it.
    """
    while True:
        joined = [_joined(now, after) for now, after in zip(carry, turn(carry))]
        if joined == list(carry):
            return joined
        carry = joined


def _joined(*values: Value) -> Value:
    """What is known of a value that may be any of ``values``."""
    rows = [value for value in values if isinstance(value, PerSample)]
    varies = frozenset[int]().union(*(v.varies for v in values if isinstance(v, SampleFree)))
    if not rows:
        return SampleFree(varies)
    if len({(row.axis, row.outer, row.inner) for row in rows}) > 1:
        raise _Unproved
    return rows[0]._replace(placed=any(r.placed for r in rows) or rows[0].axis in varies)


_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr",
}  # fmt: skip
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p",
    "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "polygamma",
    "population_count", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip
_REDUCED = {
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
    "reduce_sum", "reduce_xor", "squeeze",
}  # fmt: skip
_ALONG = {
    "concatenate", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "rev", "sort", "split",
    "top_k",
}  # fmt: skip
_WHOLE = {
    "pad", "reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "slice",
}  # fmt: skip

_Rule = Callable[[JaxprEqn, Sequence[Value], int], Value]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_REDUCED, _reduced),
    **dict.fromkeys(_ALONG, _along("dimension", "dimensions", "axis")),
    **dict.fromkeys(_WHOLE, _whole),
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
_STRUCTURED: dict[str, Callable[[JaxprEqn, Sequence[Value], int], Sequence[Value]]] = {
    "optimization_barrier": _each,
    "scan": _scanned,
    "while": _repeated,
    "cond": _chosen,
}
