"""Reads queries of VNN-LIB 2.0 with the standard's own parser, as the forms of VNN-LIB 1.0.

VNN-LIB 2.0 declares networks, whose inputs and outputs have a type and a shape, and checks both.
A query of one network with one input and one output says what VNN-LIB 1.0 can say: ``X[i,j]``
becomes ``X_n``, where n counts entries in row-major order.

Source: the VNN-LIB 2.0 standard, and its parser, the package ``vnnlib``.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

_SIGNS = {"LessEqual": "<=", "GreaterEqual": ">=", "Equal": "="}
_TERMS = {"Plus": "+", "Minus": "-", "Negate": "-", "Multiply": "*"}
_FLOATS = ("F16", "F32", "F64", "BF16")


def forms(text: bytes, largest: int) -> Iterator[list[Any]]:
    """The query as ``declare-const`` and ``assert`` forms of VNN-LIB 1.0.

    Args:
      text: the file's content, whose number of open brackets is bounded: the parser is recursive.
      largest: how many inputs, or outputs, there may be.

    Raises:
      ValueError: no VNN-LIB 2.0; more than one network, input or output; hidden nodes; or a strict
        comparison.
      ImportError: the package ``vnnlib`` is not installed.

    Cost: a few MB a second.

    >>> text = b"(vnnlib-version <2.0>) (declare-network f (declare-input X float32 [2])"
    >>> text += b"(declare-output Y float32 [1])) (assert (<= Y[0] X[1]))"
    >>> for form in forms(text, 9):
    ...     print(form)
    ['declare-const', 'X_0', 'Real']
    ['declare-const', 'X_1', 'Real']
    ['declare-const', 'Y_0', 'Real']
    ['assert', ['<=', 'Y_0', 'X_1']]
    """
    query = _parsed(text)
    if len(query.networks) != 1:
        raise ValueError(f"{len(query.networks)} networks are declared; one can be asked about")
    (network,) = query.networks
    for kind, nodes, what in (("X", network.inputs, "input"), ("Y", network.outputs, "output")):
        if len(nodes) != 1:
            raise ValueError(f"the network has {len(nodes)} {what}s; one is read")
        if nodes[0].dtype.name not in _FLOATS:
            raise ValueError(f"the {what} is of type {nodes[0].dtype.name}, not one of {_FLOATS}")
        if (count := math.prod(nodes[0].shape)) > largest:
            raise ValueError(f"the {what} has {count} entries, more than {largest}")
        yield from (["declare-const", f"{kind}_{flat}", "Real"] for flat in range(count))
    if network.hidden:
        raise ValueError("hidden nodes are declared; a property is about inputs and outputs")
    for assertion in query.assertions:
        yield ["assert", _condition(assertion.expr)]


def _parsed(text: bytes) -> Any:
    """The parser's syntax tree, whose names, indices and types are checked."""
    try:
        import vnnlib
    except ImportError as error:
        raise ImportError("VNN-LIB 2.0 needs its parser: pip install 'wdjax[vnnlib]'.") from error
    try:
        return vnnlib.parse_query_string(text.decode("ascii"))
    except vnnlib.VNNLibException as error:
        raise ValueError(_reason(str(error))) from None
    except IndexError:  # Of the parser's C++, from stoll.
        raise ValueError("a number is beyond 64-bit integers") from None


def _reason(message: str) -> str:
    """The first fault of the parser's JSON, or the message itself if it is none."""
    try:
        fault = json.loads(message)["errors"][0]
        said = f"{fault['message']}, line {fault['line']}: {fault['offendingSymbol']}"
    except (ValueError, LookupError, TypeError):
        said = message
    return ascii(said[:200])[1:-1]


def _condition(node: Any) -> list[Any]:
    kind = type(node).__name__
    if kind in ("And", "Or"):
        return [kind.lower(), *map(_condition, node.args)]
    if kind not in _SIGNS:
        raise ValueError(f"the comparison {str(node)[:60]!a} is strict; there are <=, >= and ==")
    return [_SIGNS[kind], _term(node.lhs), _term(node.rhs)]


def _term(node: Any) -> Any:
    kind = type(node).__name__
    if kind == "Var":
        flat = 0
        for index, size in zip(node.indices, node.shape, strict=True):
            flat = flat * size + index
        return f"{'X' if node.kind.name == 'Input' else 'Y'}_{flat}"
    return [_TERMS[kind], *map(_term, node.children())] if kind in _TERMS else node.lexeme
