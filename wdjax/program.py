"""What a program's jaxpr tells: how large its arrays are, and whether a loop may hold it."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr


def _sizes(jaxpr: Any) -> Iterator[int]:
    for eqn in jaxpr.eqns:
        yield from (var.aval.size for var in eqn.outvars)
        for value in jax.tree.leaves(list(eqn.params.values())):
            yield from _sizes(value) if hasattr(value, "eqns") else ()


def widest(jaxpr: Jaxpr) -> int:
    """Numbers in the largest array that the program computes."""
    return max(_sizes(jaxpr), default=0)


def live(jaxpr: Jaxpr) -> int:
    """Numbers in all arrays that the program computes: no more are kept for a gradient."""
    return sum(_sizes(jaxpr))


def loops_well(step: Callable[..., Any], *example: Any) -> bool:
    return "conv_general_dilated" not in str(jax.make_jaxpr(step)(*example))
