"""The record of a JAX primitive: its bounds and properties, which all rules and tests use.

The records themselves are in :mod:`wdjax.bounds.primitives`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from wdjax.bounds.domain import Array, Linear, Rule
from wdjax.bounds.rewritten import REFUSED

SAFETY = 4
"""Factor on measured errors: the bound itself is computed by the same function, and other points
and platforms were not measured."""
LEAST, SHORT = 16, 5
"""Least error to assume, in units, for float32 and longer, and for shorter dtypes."""


class Error(NamedTuple):
    """The largest error of a float result that was measured, for normal numbers.

    In units of ``finfo.eps`` times the value; for sums a term for their length is added elsewhere.
    Measured on CPUs; on one GPU (H200) functions erred by at most this, or by less than 2 units.
    """

    float32: float
    float64: float
    short: float
    """For dtypes shorter than float32."""


EXACT, ONCE = Error(0, 0, 0), Error(0.5, 0.5, 0.5)
"""The errors of results that are not rounded, and that are rounded once."""


class View(NamedTuple):
    """One linear term of the lower and the upper line: ``low . view(operand)`` and ``up . ...``."""

    operand: int
    low: Array
    """Lower slopes, ``[B, *shape]`` of the value."""
    up: Array
    """Upper slopes."""
    view: Linear | None = None
    """None for the identity."""
    shape: tuple[int, ...] = ()
    """The operand's shape, if ``view`` is given."""


class Lines(NamedTuple):
    """The linear bounds of a value, batched over samples, all ``[B, *shape]``."""

    views: tuple[View, ...]
    low: Array
    """Lower intercepts."""
    up: Array
    """Upper intercepts."""
    open: Array | None = None
    """Entries whose lines would improve with tighter bounds of the operand, such as unstable
    neurons; None for all entries whose lower and upper end differ."""
    free: Array | None = None
    """Entries where any lower slope in [0, 1] is sound, with intercept 0 (unstable ReLUs)."""
    ends: "Ends | None" = None
    """Ends of the value itself, if they may be tighter than those of interval arithmetic."""
    shift: Array | float = 0.0
    """Where ``free``: a lower bound of the operand less its linear part, its offset less error."""
    maps: tuple[Array, ...] = ()
    """Framed for :func:`coefficients.seen`: intercepts and slopes; then ``free`` and ``shift``."""
    around: Array | None = None
    """What :func:`coupled.gain` needs where an l2 ball contains the operand, framed."""
    reach: Array | float = 0.0
    """The radius of that ball, ``[B]``."""
    turned: "Turned | None" = None
    """The intercepts of both lines for other slopes, if there is one operand, seen as it is."""


Ends = tuple[Array, Array]
Turned = Callable[[Array, Array, Array], Ends]
"""``(slopes, lower, upper)`` of the operand, of one shape, to lower and upper intercepts."""
Relaxation = Callable[[JaxprEqn, Sequence[Any], Sequence[bool]], Lines | None]
"""``(equation, operands, flags)`` to lines. An operand that depends on the input (flag true) is
``Ends`` ``[B, *shape]``, any other an array. None if the rule does not apply."""


def once(eqn: JaxprEqn) -> int:
    """The count 1: an entry of the operand contributes to at most one entry of the result."""
    return 1


def everywhere(eqn: JaxprEqn) -> int:
    """The result's size: an entry of the operand may contribute to every entry of the result."""
    out: Any = eqn.outvars[0].aval
    return out.size


@dataclass(frozen=True, kw_only=True)
class Record:
    """The properties of one primitive.

    No field has a default: each family of records sets what its members share.
    """

    name: str
    interval: Rule
    """Computes the result for operands that are intervals, or booleans that may be open."""
    lines: Relaxation | None
    """Linear bounds; None if there are only intervals, or if fused cells give lines (``fuses``)."""
    error: Error | Callable[[JaxprEqn], float]
    """Measured error of the float result, or a function of the equation's parameters."""
    operands: tuple[int, ...] | None
    """Which operands may depend on the input; None for all."""
    affine: Callable[[JaxprEqn], int] | None
    """To how many entries of the result an entry of the operand contributes; None if the primitive
    is not affine in one operand when the others are constant."""
    elementwise: bool
    """Whether an entry of the result depends only on the operands' entries at the same position."""
    scales: bool
    """Whether it multiplies or divides entries by others."""
    sums: bool
    """Whether it accumulates in the operands' dtype (matrix products may accumulate in longer)."""
    monotone: int
    """1 where it grows in every operand, -1 where it falls, 0 otherwise."""
    continuous: bool | Callable[[JaxprEqn], bool]
    """Whether the result does not jump, for all equations or as its parameters tell."""
    homogeneous: bool
    """Whether dividing all operands by ``t > 0`` divides the result by ``t``; booleans stay."""
    fuses: bool
    """Whether it may be part of a fused scalar function: its rule and those of its derivatives hold
    between any ends."""
    keeps_order: bool
    """Whether it only reshapes, repeats or converts: entries stay in order."""
    compares: bool
    """Whether it compares two numbers by order or equality."""
    waves: bool
    """Whether it has no limit: its value at inf is NaN, though it is bounded everywhere else."""

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
        """Whether it is affine and an entry contributes to at most one entry of the result."""
        return self.affine is once

    @property
    def diagonal(self) -> bool:
        """Whether it is affine entry by entry: its matrix is diagonal."""
        return self.once and self.elementwise

    def jumps(self, eqn: JaxprEqn) -> bool:
        """Whether the result of an equation may jump."""
        return not (self.continuous(eqn) if callable(self.continuous) else self.continuous)

    @property
    def exact(self) -> bool:
        return self.error == EXACT


TABLE: dict[str, Record] = {}
"""All records by the primitive's name."""


def add(*records: Record) -> None:
    """Registers records; a primitive has only one.

    Args:
      *records: of primitives that have none yet.

    Raises:
      ValueError: a primitive has a record already.
    """
    for record in records:
        if record.name in TABLE:
            raise ValueError(f"the primitive {record.name!r} has a record already; edit that one.")
        TABLE[record.name] = record


def see_through(*names: str) -> None:
    """Raises if one of the primitives calls code outside JAX.

    Args:
      *names: primitives of a program.

    Raises:
      ValueError: one of them is a callback.

    >>> see_through("add", "dot_general")
    """
    if "pure_callback" in names:
        raise ValueError(
            "the model calls code outside JAX (pure_callback, as those of convert.opaque do), "
            "which attacks can run and no certificate or Lipschitz bound can look into; convert "
            "the model by convert.from_torch or convert.load_onnx, or certify it by "
            "wdjax.smoothing, which only calls it."
        )


def of(name: str) -> Record:
    """The record of a primitive."""
    if name not in TABLE:
        see_through(name)
        raise ValueError(
            REFUSED.get(name)
            or f"no interval rule for the primitive {name!r}, which the program applies to a value "
            "that depends on the input; rewrite the model without it, certify it another way, or "
            "add its record: wdjax.bounds.record.add(Record(name, interval rule, measured error, "
            "...)), as docs/primitives.md shows."
        )
    return TABLE[name]


def trusted(eqn: JaxprEqn, dtype: DTypeLike) -> float:
    """The error of one entry of an equation's result in ``dtype``, in units of eps times the value.

    Rounding by long sums is not included.
    """
    kind: Any = jnp.finfo(dtype)
    column = {32: 0, 64: 1}.get(kind.bits, 2)
    least = SHORT if column == 2 else LEAST
    error = of(eqn.primitive.name).error
    if isinstance(error, Error):
        return max(least, SAFETY * error[column])
    return least + SAFETY * error(eqn)
