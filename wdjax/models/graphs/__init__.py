"""The operators of ONNX files as functions of JAX arrays, and graphs of them as models.

`OPERATORS` is the one table; its families are files: `entrywise`, `arrange` (shapes), `products`,
`windows` (pools), `normalise`, `sequence`. `signature` says what an entry is, `laid` how values lie
in memory, `execute` runs a graph. To add an operator, put an ``Operator`` into the table:
``OPERATORS["Name"] = Operator(run=lambda call, x: ...)``.
"""

from wdjax.models.graphs import arrange, entrywise, normalise, products, sequence, windows
from wdjax.models.graphs.signature import Operator

__all__ = ["OPERATORS"]

OPERATORS: dict[str, Operator] = (
    entrywise.OPERATORS
    | arrange.OPERATORS
    | products.OPERATORS
    | windows.OPERATORS
    | normalise.OPERATORS
    | sequence.OPERATORS
)
"""All operators by their names in ONNX; those of other domains than ONNX's own begin with it."""
