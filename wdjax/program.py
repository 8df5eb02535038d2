"""What a program's jaxpr tells: how wide it is, how much it may keep, how well it loops.

And a scan that heeds the last.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from wdjax.core import Array, PyTree

Carry = TypeVar("Carry")

_UNROLLED = 10
"""Turns that are written out where a loop would be slow: as many as ten classes need."""


@jax.jit
def outputs(model: Callable[[Array], PyTree], x: Array) -> PyTree:
    """The model as one program, traced once a shape for all who look at it."""
    return model(x)


def equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """All equations of a jaxpr and of the jaxprs in it: calls, loops, branches, custom rules.

    >>> twice = jax.make_jaxpr(jax.jit(jnp.sin))(1.0)
    >>> [eqn.primitive.name for eqn in equations(twice)][-1]
    'sin'
    """
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _inner(eqn):
            yield from equations(inner)


def _inner(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    values = jax.tree.leaves(list(eqn.params.values()))
    return [value for value in values if isinstance(value, Jaxpr | ClosedJaxpr)]


def widest(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Numbers in the largest array that a program computes; 0 if it computes none.

    A reshaped array is the array that it was.

    Args:
      jaxpr: from ``jax.make_jaxpr(f)(*args)`` or ``jax.jit(f).trace(*args).jaxpr``.

    >>> widest(jax.make_jaxpr(lambda x: jnp.sum(jnp.outer(x, x)))(jnp.ones(5)))
    25
    """
    computed = (eqn for eqn in equations(jaxpr) if eqn.primitive.name != "reshape")
    shapes: list[Any] = [var.aval for eqn in computed for var in eqn.outvars]
    return max((aval.size for aval in shapes), default=0)


def live(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Float numbers that a program computes in all: an upper bound for what reverse mode keeps.

    The body of a loop counts once for every turn of known number, and once if it is unknown.

    >>> live(jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)))(jnp.ones(5)))
    10
    """
    total = 0
    for eqn in jaxpr.eqns:
        inside = sum(map(live, _inner(eqn)))
        shapes: list[Any] = [var.aval for var in eqn.outvars]
        own = sum(a.size for a in shapes if jnp.issubdtype(a.dtype, jnp.inexact))
        total += max(own, eqn.params.get("length", 1) * inside)
    return total


def loops_well(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Whether XLA runs a program as fast inside a loop as outside: where "host or scan" is decided.

    Always, except on the CPU: its compiler brings convolutions into the layout NHWC, HWIO, NHWC
    (for any number of image axes), which it is fast at, outside of loops only. In a loop, another
    layout took 4 to 100 times as long. In that layout strides, dilations of either operand, feature
    groups and half precision take the same time in both places, within 20 %; batch groups are
    slow, and slower outside. :func:`wdjax.models.conv.conv` writes its gradients so.

    Args:
      jaxpr: of what would be looped, so rather of a value *and gradient* than of a model.

    >>> from wdjax.models.conv import conv
    >>> image, kernel = jnp.ones((1, 8, 8, 2)), jnp.ones((3, 3, 2, 4))
    >>> loops_well(jax.make_jaxpr(jax.grad(lambda x: conv(x, kernel).sum()))(image))
    True
    """
    return jax.default_backend() != "cpu" or all(map(_canonical, equations(jaxpr)))


def scan(
    step: Callable[[Carry, Array], tuple[Carry, PyTree]], carry: Carry, rows: Array
) -> tuple[Carry, PyTree]:
    """``lax.scan`` over few rows: a loop, of ten turns each where it would be slow in loops.

    Args:
      step: ``(carry, row) -> (carry, out)``.
      carry: what the first step gets.
      rows: ``[m, ...]``

    Returns:
      The last carry, and ``[m, ...]`` outs.

    Cost: one more trace of ``step``.

    >>> scan(lambda total, row: (total + row, total), 0, jnp.arange(4))[0].tolist()
    6
    """
    loops = loops_well(jax.make_jaxpr(step)(carry, rows[0]))
    return jax.lax.scan(step, carry, rows, unroll=1 if loops else min(_UNROLLED, len(rows)))


def _canonical(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "conv_general_dilated":
        return True
    dims = eqn.params["dimension_numbers"]
    last = len(dims.lhs_spec) - 1
    space = range(1, last)
    images, kernel = (0, last, *space), (last, last - 1, *range(last - 1))
    return (*dims,) == (images, kernel, images)
