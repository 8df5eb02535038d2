"""Properties of a jaxpr: its largest array, its gradient's memory, its speed inside a loop.

Also a scan that unrolls programs that are slow inside loops.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from wdjax import loops
from wdjax.core import Array, PyTree
from wdjax.xla_cpu import on_cpu

Carry = TypeVar("Carry")

_UNROLLED = 10
"""Iterations that are unrolled where a loop would be slow: enough for ten classes."""


def equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """All equations of a jaxpr and of its inner jaxprs: calls, loops, branches, custom rules.

    >>> twice = jax.make_jaxpr(jax.jit(jnp.sin))(1.0)
    >>> [eqn.primitive.name for eqn in equations(twice)][-1]
    'sin'
    """
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in bodies(eqn):
            yield from equations(inner)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a ``scan`` are constants, and how many after them are carries.

    >>> step = lambda carry, t: (2 * carry, t)
    >>> powers = jax.make_jaxpr(lambda x: loops.scan(step, x, x * jnp.ones(3)))(2.0)
    >>> [scan_counts(eqn) for eqn in equations(powers) if eqn.primitive.name == "scan"]
    [(0, 1)]
    """
    if "ft_in" in eqn.params:  # Since jax 0.11.
        consts, carries, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carries)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def bodies(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    """The jaxprs among an equation's parameters: bodies of calls, loops and branches."""
    values = jax.tree.leaves(list(eqn.params.values()))
    return [value for value in values if isinstance(value, Jaxpr | ClosedJaxpr)]


def widest(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """The size of the largest array that a program computes; 0 if it computes none.

    Reshaped arrays are not counted again.

    Args:
      jaxpr: from ``jax.make_jaxpr(f)(*args)`` or ``jax.jit(f).trace(*args).jaxpr``.

    >>> widest(jax.make_jaxpr(lambda x: jnp.sum(jnp.outer(x, x)))(jnp.ones(5)))
    25
    """
    computed = (eqn for eqn in equations(jaxpr) if eqn.primitive.name != "reshape")
    shapes: list[Any] = [var.aval for eqn in computed for var in eqn.outvars]
    return max((aval.size for aval in shapes), default=0)


def products(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """The number of multiplications in a program's matrix products and convolutions.

    The body of a loop counts once.

    Args:
      jaxpr: as for :func:`widest`.

    >>> products(jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(jnp.ones((5, 3)), jnp.ones((3, 2))))
    30
    """
    total = 0
    for eqn in equations(jaxpr):
        if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
            continue
        avals: list[Any] = [var.aval for var in (*eqn.invars, *eqn.outvars)]
        left, right, result = (aval.shape for aval in avals)
        if eqn.primitive.name == "dot_general":
            axes = [left[axis] for axis in eqn.params["dimension_numbers"][0][0]]
        else:
            outputs = eqn.params["dimension_numbers"].rhs_spec[0]
            axes = [size for axis, size in enumerate(right) if axis != outputs]
        total += math.prod(result) * math.prod(axes)
    return total


def live(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """The number of floats that a program computes: an upper bound on what reverse mode keeps.

    A loop's body counts once for each iteration if their number is known, else once.

    >>> live(jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)))(jnp.ones(5)))
    10
    """
    total = 0
    for eqn in jaxpr.eqns:
        inside = sum(map(live, bodies(eqn)))
        shapes: list[Any] = [var.aval for var in eqn.outvars]
        outputs = sum(a.size for a in shapes if jnp.issubdtype(a.dtype, jnp.inexact))
        total += max(outputs, eqn.params.get("length", 1) * inside)
    return total


def loops_well(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Whether XLA runs a program as fast inside a loop as outside; decides if the host loops.

    True except on the CPU for some convolutions: only outside of loops does its compiler convert
    them to the fast layout NHWC, HWIO, NHWC (for any number of image axes). In a loop other layouts
    took 4 to 100 times as long. In that layout strides, dilations, feature groups and half
    precision take the same time in both places, within 20 %; batch groups are slow, and slower
    outside. :func:`wdjax.models.conv.conv` writes its gradients in that layout.

    Args:
      jaxpr: of the looped function, so rather of a value *and gradient* than of a model.

    >>> from wdjax.models.conv import conv
    >>> image, kernel = jnp.ones((1, 8, 8, 2)), jnp.ones((3, 3, 2, 4))
    >>> loops_well(jax.make_jaxpr(jax.grad(lambda x: conv(x, kernel).sum()))(image))
    True
    """
    return not on_cpu() or all(map(_canonical, equations(jaxpr)))


def scan(
    step: Callable[[Carry, Array], tuple[Carry, PyTree]], carry: Carry, rows: Array
) -> tuple[Carry, PyTree]:
    """``lax.scan`` over few rows; unrolled by up to ten iterations where a loop would be slow.

    Args:
      step: ``(carry, row) -> (carry, out)``.
      carry: the initial carry.
      rows: ``[m, ...]``

    Returns:
      The last carry, and the stacked outs ``[m, ...]``.

    Cost: one more trace of ``step``.

    >>> scan(lambda total, row: (total + row, total), 0, jnp.arange(4))[0].tolist()
    6
    """
    fast = loops_well(jax.make_jaxpr(step)(carry, rows[0]))
    return loops.scan(step, carry, rows, unroll=1 if fast else min(_UNROLLED, len(rows)))


def _canonical(eqn: JaxprEqn) -> bool:
    """Whether an equation is no convolution, or one in the layout that loops run fast."""
    if eqn.primitive.name != "conv_general_dilated":
        return True
    dims = eqn.params["dimension_numbers"]
    last = len(dims.lhs_spec) - 1
    space = range(1, last)
    images, kernel = (0, last, *space), (last, last - 1, *range(last - 1))
    return (*dims,) == (images, kernel, images)
