"""Follows the batch axis through a program, to prove that a model treats each sample alone.

A rule for each primitive tells where the axis goes. If samples are mixed, or a primitive has no
rule, nothing is proved, and :mod:`wdjax.checks.independence` tries the model instead.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from wdjax import program
from wdjax.checks.axis_rules import (
    ELEMENTWISE,
    FREE,
    RULES,
    ManySamples,
    PerSample,
    SampleFree,
    Unproved,
    Value,
    elementwise,
    moved,
    varying,
)


class BatchProof(NamedTuple):
    """What the program of a model shows; False where it is not proved."""

    alone: bool
    """Row i of every output depends on sample i only."""
    alike: bool
    """Moreover it is the same function for all rows."""
    where: str = ""
    """The primitive that mixes samples, or that has no rule."""


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
    values = [PerSample(0) if rows else varying(aval) for aval, rows in zip(given, batched)]
    out = _walk(closed, values, n)
    for value in out:
        if isinstance(value, ManySamples):
            return BatchProof(False, False, value.where)
    rows = [value for value in out if isinstance(value, PerSample)]
    fixed = [value for value in out if isinstance(value, SampleFree)]
    alone = all((row.axis, row.outer, row.inner) == (0, 1, 1) for row in rows)
    placed = any(row.placed for row in rows) or any(0 in value.varies for value in fixed)
    return BatchProof(alone, alone and not placed)


def _walk(closed: ClosedJaxpr | Jaxpr, values: Sequence[Value], n: int) -> list[Value]:
    """What is known of each result of a program, from what is known of its arguments.

    ``n`` is the batch size. Raises :class:`Unproved`, with the primitive's name, at the first
    equation that mixes samples or has no rule.
    """
    consts, jaxpr = getattr(closed, "consts", ()), getattr(closed, "jaxpr", closed)
    known: dict[Any, Value] = dict(zip(jaxpr.invars, values))
    known.update((var, varying(var.aval)) for var, _ in zip(jaxpr.constvars, consts))

    def read(atom: Any) -> Value:
        return varying(atom.aval) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        args = [read(atom) for atom in eqn.invars]
        known.update(zip(eqn.outvars, _follow_or_give_up(eqn, args, n)))
    return [read(atom) for atom in jaxpr.outvars]


def _follow_or_give_up(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """The values that an equation returns, :class:`ManySamples` where nothing is proved.

    A value without entries depends on nothing.
    """
    outs: list[Any] = [var.aval for var in eqn.outvars]
    if all(0 in aval.shape for aval in outs):
        return [SampleFree(frozenset())] * len(outs)
    many = [arg for arg in args if isinstance(arg, ManySamples)]
    if many:
        return [many[0]] * len(eqn.outvars)
    try:
        return _follow(eqn, args, n)
    except Unproved:
        return [ManySamples(eqn.primitive.name)] * len(eqn.outvars)


def _follow(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """What is known of an equation's results, from what is known of its operands ``args``.

    ``n`` is the batch size. Raises :class:`Unproved` if samples are mixed, or there is no rule.
    """
    name = eqn.primitive.name
    if name in _STRUCTURED:
        return _STRUCTURED[name](eqn, args, n)
    inner = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
    if name in CALLS and inner is not None:
        return _walk(inner, args, n)
    outs: list[Any] = [var.aval for var in eqn.outvars]
    rule = elementwise if name in ELEMENTWISE else RULES.get(name)
    if any(isinstance(arg, PerSample) for arg in args):
        if rule is None:
            raise Unproved
        return [rule(eqn, args, n)] * len(outs)
    if rule in FREE:
        assert rule is not None
        return [rule(eqn, args, n)] * len(outs)
    if name == "iota":
        return [SampleFree(frozenset([eqn.params["dimension"]]))]
    return [varying(aval) for aval in outs]


def _each(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """The rule for operations that return their operands."""
    return args


def _scanned(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """``scan`` over an axis that is not the batch axis, or over the samples without a carry."""
    consts, carries = program.scan_counts(eqn)
    fixed, whole = args[:consts], args[consts + carries :]
    if not carries and any(isinstance(arg, PerSample) and arg.axis == 0 for arg in whole):
        return _mapped(eqn, args, n)
    series = [moved(arg, lambda axis: axis - 1 if axis else None) for arg in whole]

    def body(carry: Sequence[Value]) -> list[Value]:
        return _walk(eqn.params["jaxpr"], [*fixed, *carry, *series], n)

    start = args[consts : consts + carries]
    carry = _settled(start, lambda now: body(now)[:carries])
    outs = [moved(out, lambda axis: axis + 1) for out in body(carry)[carries:]]
    stacked = [SampleFree(out.varies | {0}) if isinstance(out, SampleFree) else out for out in outs]
    return [*carry, *stacked]


def _mapped(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """``lax.map`` over the samples: the body for all of them at once."""
    (consts, _), avals = program.scan_counts(eqn), [atom.aval for atom in eqn.invars]
    axes = [None] * consts + [0] * (len(args) - consts)
    body = jax.vmap(jaxpr_as_fun(eqn.params["jaxpr"]), axes)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]  # type: ignore[attr-defined]
    return _walk(jax.make_jaxpr(body)(*shapes), args, n)


def _repeated(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """The rule for ``while``: proved if the condition depends on no sample."""
    params, first = eqn.params, eqn.params["cond_nconsts"]
    second = first + params["body_nconsts"]
    carry = _settled(
        args[second:], lambda now: _walk(params["body_jaxpr"], [*args[first:second], *now], n)
    )
    (going,) = _walk(params["cond_jaxpr"], [*args[:first], *carry], n)
    if isinstance(going, PerSample):
        raise Unproved
    return [going] * len(carry) if isinstance(going, ManySamples) else carry


def _chosen(eqn: JaxprEqn, args: Sequence[Value], n: int) -> Sequence[Value]:
    """The rule for ``cond``: proved if no sample decides which branch is taken."""
    if isinstance(args[0], PerSample):
        raise Unproved
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
    for value in values:
        if isinstance(value, ManySamples):
            return value
    if not rows:
        return SampleFree(varies)
    if len({(row.axis, row.outer, row.inner) for row in rows}) > 1:
        raise Unproved
    return rows[0]._replace(placed=any(r.placed for r in rows) or rows[0].axis in varies)


CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr",
}  # fmt: skip
_STRUCTURED: dict[str, Callable[[JaxprEqn, Sequence[Value], int], Sequence[Value]]] = {
    "optimization_barrier": _each,
    "scan": _scanned,
    "while": _repeated,
    "cond": _chosen,
}
