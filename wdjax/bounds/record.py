"""What is known of a primitive: one record each, from which every bound and every test follows.

The records themselves are in :mod:`wdjax.bounds.primitives`; rules look up what they need here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from wdjax.bounds.domain import Array, Linear, Rule

SAFETY = 4
"""Times what was measured: the bound is computed by the same function, and other points and
platforms were not tried."""
LEAST, SHORT = 16, 5
"""At least so many units; so many of floats shorter than float32."""


class Error(NamedTuple):
    """The largest error of a float result that was measured on CPUs, of normal numbers.

    In units of ``finfo.eps`` times the value; sums are charged by their length beside.
    """

    float32: float
    float64: float
    short: float
    """Of floats shorter than float32."""


EXACT, ONCE = Error(0, 0, 0), Error(0.5, 0.5, 0.5)
"""Of what is not rounded, and of what is rounded once."""


class View(NamedTuple):
    """One linear term of both lines; no view is the identity."""

    operand: int
    low: Array
    up: Array
    view: Linear | None = None
    shape: tuple[int, ...] = ()
    """Of the operand, where there is a view."""


class Lines(NamedTuple):
    """Lines of a value, batched over samples, and which operands' bounds matter to them."""

    views: tuple[View, ...]
    low: Array
    up: Array
    open: Array | None = None
    """Entries of the operand whose bounds the lines depend on; None for all that are not points."""
    free: Array | None = None
    """Entries of one operand whose lower slope may be anything in [0, 1], with no intercept."""
    ends: "Ends | None" = None
    """Of the value itself, where they may be tighter than interval arithmetic's."""
    shift: Array | float = 0.0
    """What the operand is at least beyond what lines are over, where their slope is free."""
    maps: tuple[Array, ...] = ()
    """For :func:`coefficients.seen`: intercepts and slopes; and ``free`` and ``shift``."""


Ends = tuple[Array, Array]
Relaxation = Callable[[JaxprEqn, Sequence[Any], Sequence[bool]], Lines | None]
"""``(equation, operands, which of them depend on the input)``; such an operand is ``Ends``
``[B, *shape]``, another an array. None if the rule does not fit."""


def once(eqn: JaxprEqn) -> int:
    """An entry of the operand is at most one term of one entry of the result."""
    return 1


def everywhere(eqn: JaxprEqn) -> int:
    """An entry of the operand may be part of every entry of the result."""
    out: Any = eqn.outvars[0].aval
    return out.size


@dataclass(frozen=True, kw_only=True)
class Record:
    """One primitive. Nothing has a default: a family of records says what its members share."""

    name: str
    interval: Rule
    """The result for operands that are intervals, or booleans that may be open."""
    lines: Relaxation | None
    """Linear bounds; None where the interval is all that is known, or cells give lines (``fuses``).
    """
    error: Error | Callable[[JaxprEqn], float]
    """What its float result may be wrong by; by the equation where that decides."""
    operands: tuple[int, ...] | None
    """Which operands may depend on the input; None for all."""
    affine: Callable[[JaxprEqn], int] | None
    """Of what is affine in an operand where the others are known: to how many entries of the result
    an entry of the operand contributes; None for what is not affine."""
    elementwise: bool
    """Whether an entry of the result depends on the operands' entries at its place only."""
    scales: bool
    """Whether it multiplies entries by others."""
    sums: bool
    """Whether it adds up entries in their own dtype, as products do not."""
    monotone: int
    """1 where it grows in every operand, -1 where it falls, 0 otherwise."""
    continuous: bool
    homogeneous: bool
    """Whether its result is divided by ``t > 0`` where all its operands are; booleans stay."""
    fuses: bool
    """Whether it may be part of a function of one number that is bounded on cells as a whole: its
    rule and its derivatives' rules hold between any ends."""
    keeps_order: bool
    """Whether it only reshapes, repeats or converts: entries stay in order."""
    compares: bool
    """Whether it is true or false by the order of two numbers."""

    def __post_init__(self) -> None:
        measured = callable(self.error) or (
            isinstance(self.error, Error) and all(unit >= 0 for unit in self.error)
        )
        if not measured:
            raise ValueError(
                f"the record of {self.name!r} has the error {self.error!r}; measure it in float32, "
                "float64 and shorter floats as tests/test_certify_ulps.py does."
            )
        if self.monotone not in (-1, 0, 1):
            raise ValueError(f"monotone of {self.name!r} is 1, -1 or 0, got {self.monotone!r}.")

    @property
    def once(self) -> bool:
        """Whether it is affine, and an entry contributes to one entry of the result at most."""
        return self.affine is once

    @property
    def diagonal(self) -> bool:
        """Whether it is affine in every entry of its own."""
        return self.once and self.elementwise

    @property
    def exact(self) -> bool:
        return self.error == EXACT


TABLE: dict[str, Record] = {}
"""By the primitive's name."""


def add(*records: Record) -> None:
    """Makes primitives known; each has one record."""
    for record in records:
        if record.name in TABLE:
            raise ValueError(f"the primitive {record.name!r} has a record already; edit that one.")
        TABLE[record.name] = record


def of(name: str) -> Record:
    """The record of a primitive."""
    if name not in TABLE:
        raise ValueError(
            f"no interval rule for the primitive {name!r}, which the program applies to a value "
            "that depends on the input; rewrite the model without it, certify it another way, or "
            "add its record: wdjax.bounds.record.add(Record(name, interval rule, measured error, "
            "...)), as docs/primitives.md shows."
        )
    return TABLE[name]


def trusted(eqn: JaxprEqn, dtype: DTypeLike) -> float:
    """How many units one entry of an equation may be wrong by in a dtype, sums not counted."""
    kind: Any = jnp.finfo(dtype)
    column = {32: 0, 64: 1}.get(kind.bits, 2)
    least = SHORT if column == 2 else LEAST
    error = of(eqn.primitive.name).error
    if isinstance(error, Error):
        return max(least, SAFETY * error[column])
    return least + SAFETY * error(eqn)
