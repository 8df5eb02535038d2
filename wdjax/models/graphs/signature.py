"""What an operator of the table is: a function of values and attributes, and what it accepts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from wdjax.models.graphs.laid import Laid, bounded, space, straight

REQUIRED = object()
"""In place of a default: the attribute must be given."""
IGNORED = object()
"""In place of a default: the attribute is known and has no effect here."""
OLDEST, NEWEST = 7, 26
"""Versions of the operators that are known."""


@dataclass(frozen=True)
class Call:
    """One use of an operator."""

    operator: str
    opset: int
    attributes: dict[str, Any]
    """With the defaults of this version."""
    outputs: int
    """How many results are used."""
    fixed: int | None
    """The number of samples that the file was exported for, if it is fixed."""
    samples: int
    """The number of samples now."""

    def __getitem__(self, name):
        return self.attributes[name]

    def known(self, value, what):
        """A value as a NumPy array, which must not depend on samples or parameters."""
        if not value.static:
            raise ValueError(
                f"its {what} is computed from the samples or from parameters; only a constant can "
                "be followed, so export the model for fixed shapes"
            )
        return value.array

    def numbers(self, value, what):
        """A known value as a tuple of integers."""
        array = np.asarray(self.known(value, what))
        if array.dtype.kind not in "iu":
            raise ValueError(f"its {what} must be integers, got {array.dtype}")
        return tuple(map(int, array.ravel()))


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator: its function, and which files may use it.

    ``run(call, *inputs)`` takes a :class:`Call` and :class:`Laid` values, None for inputs that are
    absent, and returns one value or a tuple of them.
    """

    run: Callable[..., Laid | tuple[Laid, ...]]
    inputs: tuple[int, int] = (1, 1)
    """The least and the largest number of inputs."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """The default of each attribute; a dict of them by the first version that has it."""
    since: int = OLDEST
    until: int = NEWEST
    static: tuple[int, ...] = ()
    """Inputs that must be known when the file is read, such as shapes."""

    def call(self, node, opset, fixed, samples):
        """The :class:`Call` of a node; a ValueError if it is not what the operator takes."""
        if not self.since <= opset <= self.until:
            raise ValueError(f"{node.operator} of version {opset} is not supported")
        least, most = self.inputs
        if not least <= len(node.inputs) <= most or "" in node.inputs[:least]:
            raise ValueError(f"it has {len(node.inputs)} inputs, expected {least} to {most}")
        filled = {}
        for name, default in self.attributes.items():
            if isinstance(default, dict):
                default = [value for first, value in default.items() if first <= opset][-1]
            value = node.attributes.get(name, default)
            if value is REQUIRED:
                raise ValueError(f"the attribute {name!r} is missing")
            if default not in (None, REQUIRED, IGNORED) and not _alike(value, default):
                raise ValueError(f"the attribute {name!r} is {value!r}")
            filled[name] = value
        unknown = [name for name in node.attributes if name not in self.attributes]
        if unknown:
            raise ValueError(f"the attribute {unknown[0][:100]!r} is not known")
        used = sum(map(bool, node.outputs))
        return Call(node.operator, opset, filled, used, fixed, samples)


def _alike(value, default):
    number = (int, float)
    if isinstance(default, number):
        return isinstance(value, int if isinstance(default, int) else number)
    return isinstance(value, type(default))


def pointwise(function, folded=None, **options):
    """An operator that acts on entries at one position: ``function(call, *arrays)``.

    Operands get the order of the largest one. ``folded`` is the same for NumPy arrays, by which
    values are computed that are known when the file is read.
    """

    def run(call, *values):
        given = [value for value in values if value is not None]
        ndim = max(value.ndim for value in given)
        bounded(np.broadcast_shapes(*(value.raised(ndim).shape for value in given)))
        moving = [value for value in given if not value.static]
        if not moving and folded is not None:
            arrays = [None if value is None else value.array for value in values]
            return straight(np.asarray(folded(call, *arrays)))
        leaders = [value for value in moving if value.ndim == ndim] or [*moving, *given]
        leader = max(leaders, key=lambda value: value.array.size).raised(ndim)
        arrays = [_operand(value, ndim, leader.order) for value in values]
        return Laid(jnp.asarray(function(call, *arrays)), leader.order)

    return Operator(run=run, **options)


def _operand(value, ndim, order):
    """An operand in the leader's order; known numbers stay numbers, so that dtypes do not widen."""
    if value is None:
        return None
    if value.static and value.ndim == 0:
        return value.array.item()
    array = value.raised(ndim).to(order)
    return jnp.asarray(array) if value.static else array


def entries(function, folded=None, **options):
    """:func:`pointwise` for functions that need no attributes."""
    known = None if folded is None else (lambda call, *arrays: folded(*arrays))
    return pointwise(lambda call, *arrays: function(*arrays), known, **options)


def plain(function, **options):
    """An operator on arrays that lie as in the file: ``function(call, xp, *arrays)``, with NumPy
    as ``xp`` where all values are known when the file is read."""

    def run(call, *values):
        xp = space(*values)
        arrays = [None if value is None else value.plain() for value in values]
        out = function(call, xp, *arrays)
        if isinstance(out, tuple):
            return tuple(straight(xp.asarray(part)) for part in out)
        return straight(xp.asarray(out))

    return Operator(run=run, **options)
