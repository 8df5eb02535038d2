"""Compares the programs that a model has for batches of several sizes.

A program may divide by the number of samples, or be chosen by it: then a sample has one output in a
batch of 16 and another one alone, although no sample meets another.
"""

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from wdjax import identity, program
from wdjax.checks.axis_rules import SHAPING
from wdjax.checks.batch_axis import CALLS

_LARGE = 2**22
"""Number of entries from which on constants are compared by identity."""
_KNOWN: weakref.WeakKeyDictionary[ClosedJaxpr, tuple[tuple[str, ...], list[int]]] = (
    weakref.WeakKeyDictionary()
)
"""What was read of the programs that JAX keeps: searches ask again each time."""


def is_one_program(programs: Mapping[int, ClosedJaxpr]) -> bool:
    """Whether a model computes the same in batches of several sizes.

    Args:
      programs: by the size of the batch.

    Returns:
      True if the programs differ only in the sizes of arrays that grow with the batch. False does
      not tell that outputs differ: they must be compared.

    >>> import jax.numpy as jnp
    >>> def is_one(function):
    ...     return is_one_program({n: jax.make_jaxpr(function)(jnp.ones((n, 3))) for n in (1, 4)})
    >>> is_one(lambda x: jnp.tanh(x + jnp.arange(3.0)).sum(axis=1)), is_one(lambda x: x / len(x))
    (True, False)
    """
    results, sizes = zip(*map(_read, programs.values()))
    if len({*results}) > 1 or len({len(met) for met in sizes}) > 1:
        return False
    return all(
        len({*values}) == 1 or len({value / n for value, n in zip(values, programs)}) == 1
        for values in zip(*sizes)
    )


def _read(closed: ClosedJaxpr) -> tuple[tuple[str, ...], list[int]]:
    """What a program computes, and the integers among its settings; read once."""
    if closed not in _KNOWN:
        sizes: list[int] = []
        _KNOWN[closed] = tuple(_results(closed, None, sizes)), sizes
    return _KNOWN[closed]


def _results(
    jaxpr: ClosedJaxpr | Jaxpr, operands: Sequence[str] | None, sizes: list[int]
) -> list[str]:
    """For each result of a program a digest of what it computes.

    ``operands`` are the digests of its inputs; None numbers them. Integers that are settings of
    equations are left out of the digests and added to ``sizes``, in order.
    """
    body = getattr(jaxpr, "jaxpr", jaxpr)
    known: dict[Any, str] = dict(zip(body.constvars, map(_constant, getattr(jaxpr, "consts", ()))))
    given = [f"operand {k}" for k in range(len(body.invars))] if operands is None else operands
    known.update(zip(body.invars, given))

    def read(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{atom.aval.dtype} {atom.val!r}"  # type: ignore[attr-defined]
        return known.get(atom, f"unknown {id(atom)}")

    for eqn in body.eqns:
        name, args, params = eqn.primitive.name, [read(atom) for atom in eqn.invars], eqn.params
        inner = params.get("call_jaxpr", params.get("jaxpr"))
        if name in SHAPING:
            outs = [args[0]] * len(eqn.outvars)
        elif name in CALLS and inner is not None:
            outs = _results(inner, args, sizes)
        else:
            if name == "scan" and program.scan_counts(eqn)[1]:
                params = params | {"length": f"{params['length']} times"}
            made = _digest((name, _setting(params, sizes), *args))
            outs = [f"{made} {k}" for k in range(len(eqn.outvars))]
        known.update(zip(eqn.outvars, outs))
    return [read(atom) for atom in body.outvars]


def _digest(parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant(value: Any) -> str:
    """A digest of an array that a program closes over; large ones are told by their identity."""
    if np.size(value) >= _LARGE:
        return f"constant {id(value)}"
    return identity.digest(value).hex()


def _setting(value: Any, sizes: list[int]) -> Any:
    """A setting of an equation without its integers, which are added to ``sizes``, and without the
    names of functions."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        return _results(value, None, sizes)
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        sizes.append(int(value))
        return "size"
    if isinstance(value, jax.Array | np.ndarray):
        return _constant(value)
    if isinstance(value, Mapping):
        return [(key, _setting(value[key], sizes)) for key in sorted(value, key=str)]
    if isinstance(value, tuple | list):
        return [_setting(part, sizes) for part in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return "function"
    return identity.words(value)
