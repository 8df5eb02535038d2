"""A graph as a pure function of its parameters and samples, prepared once when it is read."""

import collections
import dataclasses
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np

from wdjax.files.onnx_file import OnnxGraph, OnnxNode
from wdjax.models.graphs import OPERATORS
from wdjax.models.graphs.entrywise import float32
from wdjax.models.graphs.laid import MAX_SIZE, Laid, straight
from wdjax.models.graphs.products import kernel_order

_FAULTS = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError,
    NotImplementedError,
)  # fmt: skip
"""What an operator may raise for a node that is not as it should be."""
_STATIC_OUTPUT = {"Shape", "Size"}
"""Operators whose results are known even if their operands are not."""


@dataclasses.dataclass(frozen=True, eq=False)
class GraphFunction:
    """``apply(params, x)`` of a graph; equal for equal graphs, so that jit reuses its programs."""

    nodes: tuple[OnnxNode, ...]
    constants: dict[str, np.ndarray]
    """Known numbers: shapes, indices, literals."""
    orders: dict[str, tuple[int, ...]]
    """How parameters lie, where not as in the file."""
    source: str
    """The input's name."""
    order: tuple[int, ...]
    """How samples lie, ``[n, *shape]``."""
    result: str
    opset: int
    fixed: int | None
    """The number of samples for which the file was exported, None if it is free."""
    shape: tuple[int, ...] | None = None
    """One sample's, if others are refused."""
    alone: bool = False
    """Whether samples go through the graph one by one, under ``vmap``."""

    def __post_init__(self):
        known = sorted((name, str(c.dtype), c.shape) for name, c in self.constants.items())
        said = (self.nodes, known, sorted(self.orders.items()), self.source, self.order)
        said = (*said, self.result, self.opset, self.fixed, self.shape, self.alone)
        digest = hashlib.sha256(_text(said).encode())
        for name, *_ in known:
            digest.update(np.ascontiguousarray(self.constants[name]).tobytes())
        object.__setattr__(self, "_digest", digest.hexdigest())

    def __eq__(self, other):
        return isinstance(other, GraphFunction) and self._digest == other._digest

    def __hash__(self):
        return hash(self._digest)

    def __repr__(self):
        return f"graph[{len(self.nodes)} nodes]"

    def __call__(self, params, x):
        if self.shape is not None and tuple(x.shape[1:]) != self.shape:
            wanted = ", ".join(map(str, self.shape))
            raise ValueError(
                f"the model takes samples [n, {wanted}] (images with their channels last), got "
                f"{list(x.shape)}."
            )
        params = jax.tree.map(jnp.asarray, params)
        if self.alone:
            return jax.vmap(lambda row: self._run(params, row[None])[0])(jnp.asarray(x))
        return self._run(params, jnp.asarray(x))

    def _run(self, params, x):
        values = {name: straight(array) for name, array in self.constants.items()}
        for name, array in params.items():
            values[name] = Laid(array, self.orders.get(name, tuple(range(array.ndim))))
        values[self.source] = Laid(x, self.order)
        for node in self.nodes:
            inputs = [values[name] if name else None for name in node.inputs]
            outs = applied(node, inputs, self.opset, self.fixed, len(x))
            values.update(zip(node.outputs, outs))
        return jnp.asarray(values[self.result].plain())


def _text(value):
    """A text that differs for different nodes, arrays in their attributes included."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name!r}:{_text(part)}' for name, part in sorted(value.items()))}}}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(_text, value))})"
    return repr(value)


def applied(node, inputs, opset, fixed, samples):
    """The values that a node gives for its inputs; a ValueError names it."""
    operator = OPERATORS.get(node.operator)
    if operator is None:
        raise ValueError(
            f"{node} is no operator that is known here. Export the model without it, or add it to "
            f"the table: wdjax.models.graphs.OPERATORS[{node.operator[:100]!r}] = "
            "Operator(run=function), as docs/models.md shows."
        )
    try:
        outs = operator.run(operator.call(node, opset, fixed, samples), *inputs)
        outs = (outs,) if isinstance(outs, Laid) else outs
        if any(math.prod(out.array.shape) > MAX_SIZE * max(samples, 1) for out in outs):
            raise ValueError(f"its result has more than {MAX_SIZE} numbers a sample")
    except _FAULTS as error:
        said = " ".join(str(error).split())[:600]
        raise ValueError(f"{node}: {said or type(error).__name__}.") from error
    if len(outs) < len(node.outputs) and any(node.outputs[len(outs) :]):
        raise ValueError(f"{node}: it has {len(node.outputs)} results, expected {len(outs)}.")
    return outs


def needed(nodes, result):
    """The nodes on which a result depends."""
    wanted, kept = {result}, []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            kept.append(node)
            wanted.update(filter(None, node.inputs))
    return tuple(reversed(kept))


@dataclasses.dataclass(frozen=True)
class Parts:
    """A graph whose tensors are sorted into known numbers and parameters."""

    nodes: tuple[OnnxNode, ...]
    constants: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    orders: dict[str, tuple[int, ...]]
    folded: int
    """How many nodes were computed at once, since all they use is known."""


def prepared(graph: OnnxGraph, result: str, named: frozenset[str]) -> Parts:
    """Sorts tensors, and computes what is known.

    Integers, booleans and single numbers without axes are known; so are floats of which shapes or
    sizes are made. All other tensors of floats are parameters. Where the names of parameters are
    known, ``named``, they are parameters, and other tensors of one number are not.
    """
    nodes = needed(graph.nodes, result)
    tensors, rest = dict(graph.tensors), []
    for node in nodes:
        if node.operator == "Constant":
            (value,) = applied(node, [], graph.opset, None, 1)
            tensors[node.outputs[0]] = value.array
        else:
            rest.append(node)
    used = {name for node in rest for name in node.inputs} | {result}
    tensors = {name: float32(array) for name, array in tensors.items() if name in used}
    known = _known(rest)
    constants, params = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, array in tensors.items():
        literal = name not in named and (array.ndim == 0 or bool(named and array.size == 1))
        is_known = array.dtype != np.float32 or literal or name in known
        (constants if is_known else params)[name] = array
    left = []
    for node in rest:
        outs = _folded(node, constants, graph.opset)
        if outs is None:
            left.append(node)
        else:
            constants.update(zip(node.outputs, outs))
    used = {name for node in left for name in node.inputs} | {result}
    constants = {name: array for name, array in constants.items() if name in used}
    orders = _orders(left, params, result)
    params = {
        name: np.array(array.transpose(orders[name]) if name in orders else array, order="C")
        for name, array in params.items()
        if name in used
    }
    return Parts(tuple(left), constants, params, orders, len(nodes) - len(left))


def _known(nodes):
    """Names of values that must be known, such as shapes, and of all that these are made of."""
    found = set[str]()
    for node in reversed(nodes):
        operator = OPERATORS.get(node.operator)
        static = operator.static if operator is not None else ()
        made = found.intersection(node.outputs) and node.operator not in _STATIC_OUTPUT
        found.update(name for k, name in enumerate(node.inputs) if name and (made or k in static))
    return found


def _folded(node, constants, opset):
    """The arrays that a node gives if all it uses is known, or None."""
    if not all(name in constants for name in node.inputs if name):
        return None
    inputs = [straight(constants[name]) if name else None for name in node.inputs]
    outs = applied(node, inputs, opset, None, 1)
    return [out.array for out in outs] if all(out.static for out in outs) else None


def _orders(nodes, params, result):
    """How kernels and matrices lie: as the convolution and the product want them."""
    uses = collections.defaultdict(set)
    for node in nodes:
        for k, name in enumerate(node.inputs):
            order = None
            if k == 1 and node.operator == "Conv" and name in params:
                order = kernel_order(params[name].ndim)
            elif k == 1 and node.operator == "Gemm" and node.attributes.get("transB"):
                order = (1, 0)
            uses[name].add(order)
    wanted = {name: next(iter(orders)) for name, orders in uses.items() if len(orders) == 1}
    return {
        name: wanted[name]
        for name in params
        if wanted.get(name) is not None
        and name != result
        and len(wanted[name]) == params[name].ndim
    }
