r"""A classifier as a chain of matrices and entrywise activations, extracted from its program.

    v_0 = x,    z_h = W_h v_{h-1} + b_h,    v_h = phi_h(z_h),    theta(x) = W_{H+1} v_H + b_{H+1}

with ``phi`` entry by entry: ReLU, another scalar function, or the identity for entries that a
later layer needs. Residual nets are such chains too: their skip connections are kept entries.
Convolutions become matrices, so this is for nets of thousands of neurons, not of millions.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from wdjax import distinct, loops
from wdjax.bounds import affine_rules, margins, record
from wdjax.bounds.graph import Node
from wdjax.bounds.network import Network
from wdjax.bounds.primitives import TABLE
from wdjax.checks import arguments, independence, validate
from wdjax.checks.forward_mode import LIPSCHITZ_TWIN, host_only
from wdjax.core import Classifier
from wdjax.parallel import AnyArray
from wdjax.precision import float64, full_precision, widened

_ENTRIES = 2**28
"""Largest number of entries of a matrix: 2 GiB in float64."""


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Chain:
    """Matrices, biases, and the activations between them.

    ``weights[h]`` is ``[m_{h+1}, m_h]`` and ``biases[h]`` ``[m_{h+1}]``. The first ``kept[h]``
    entries of hidden layer h pass unchanged, the others go through the activation ``curves[h]``: a
    scalar program, or None for ReLU.
    """

    weights: tuple[Any, ...]
    biases: tuple[Any, ...]
    kept: tuple[int, ...]
    curves: tuple[ClosedJaxpr | None, ...]
    places: tuple[int, ...] = ()
    """The places of the activations' operands in the program."""

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.weights, self.biases), (self.kept, self.curves, self.places)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> "Chain":
        return cls(*leaves, *static)

    @property
    def depth(self) -> int:
        """The number of hidden layers."""
        return len(self.kept)

    @property
    def inputs(self) -> int:
        return int(self.weights[0].shape[1])

    @property
    def classes(self) -> int:
        return int(self.weights[-1].shape[0])

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of neurons of every hidden layer, without kept entries."""
        return tuple(len(b) - k for b, k in zip(self.biases, self.kept))

    def unbiased(self) -> "Chain":
        """The same net with all biases 0; for ReLU it is positively homogeneous."""
        zeros = tuple(0 * b for b in self.biases)
        return Chain(self.weights, zeros, self.kept, self.curves, self.places)


def relu_chain(weights: AnyArray | list[Any], biases: AnyArray | list[Any]) -> Chain:
    """The chain of a ReLU net given by its matrices ``[m_h, m_{h-1}]`` and biases ``[m_h]``.

    Args:
      weights: ``[m_h, m_{h-1}]`` for each layer.
      biases: ``[m_h]`` for each layer.

    Raises:
      ValueError: matrices or biases that do not fit together.

    Source: this library's own.

    >>> relu_chain([np.ones((3, 2)), np.ones((2, 3))], [np.zeros(3), np.zeros(2)]).widths
    (3,)
    """
    weights, biases = list(weights), list(biases)
    shapes = [np.shape(w) for w in weights]
    fits = len(weights) == len(biases) >= 1 and all(len(shape) == 2 for shape in shapes)
    fits = fits and all(np.shape(b) == shape[:1] for b, shape in zip(biases, shapes))
    if not fits or any(b[1] != a[0] for a, b in itertools.pairwise(shapes)):
        raise ValueError(
            f"weights must be matrices [m_h, m_(h-1)] that fit together, and biases [m_h]; got "
            f"{shapes} and {[np.shape(b) for b in biases]}."
        )
    hidden = len(weights) - 1
    return Chain(tuple(weights), tuple(biases), (0,) * hidden, (None,) * hidden)


@full_precision
def as_chain(model: Classifier, x: AnyArray) -> Chain:
    """The chain of a classifier, in float64 NumPy arrays.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]`` of affine maps and entrywise activations.
      x: ``[n, *shape]`` floats; only their shape matters.

    Returns:
      A :class:`Chain`, of the exact function of the model's weights.

    Raises:
      ValueError: a part of the program that is neither affine nor entry by entry, such as max
        pooling or attention, floats shorter than float32, matrices of more than 2 GiB, or a trace.

    Source: this library's own.

    >>> from wdjax import Model
    >>> w = jnp.array([[1.0, -1.0], [0.0, 2.0]])
    >>> found = as_chain(Model(lambda w, x: jnp.maximum(x @ w, 0.0) @ w, w), jnp.zeros((1, 2)))
    >>> found.widths, found.weights[0].tolist()
    ((2,), [[1.0, 0.0], [-1.0, 2.0]])
    """
    arguments.check(model=model, x=x)
    host_only("as_chain", LIPSCHITZ_TWIN, model)
    validate.shapes_of(model, x)
    independence.check(model, independence.points(np.zeros(x.shape[1:]), np.ones(x.shape[1:])))
    with float64():
        wide, sample = widened(model), jnp.zeros((1, *x.shape[1:]), jnp.float64)
        try:
            jax.eval_shape(wide, sample)
        except TypeError as error:
            raise ValueError(
                f"these constants are computed in float64, where the model fails: {error} If it "
                "closes over arrays, make them its leaves: wdjax.Model(apply, params)."
            ) from error
        return jax.tree.map(np.asarray, _made(wide, sample))


@distinct.jit
def _made(model: Classifier, sample: jax.Array) -> Chain:
    """The chain of a model for a sample ``[1, *shape]``; refuses bfloat16 and float16."""
    net = margins.network(model, sample)
    for dtype in net.short:
        raise ValueError(
            f"the model computes in {dtype.name}, whose rounding is far from the exact function to "
            "which these constants apply; cast it to float32, or use certify.margin_bounds."
        )
    return of_network(net)


def of_network(net: Network) -> Chain:
    """The chain of a program for one sample ``[1, *shape]``; works inside a trace too.

    Layer h computes the operand of the h-th activation; outputs of earlier activations are kept
    while a later layer needs them.
    """
    nodes = list({id(node): node for node in net.others.values()}.values())
    curves = [curve_of(net, node) for node in nodes]
    places = [_operand(net, node) for node in nodes]
    targets = [*places, net.graph.outputs[0]]
    bases = [net.source, *(node.outputs[0] for node in nodes)]
    last = _last_uses(net, targets, bases)
    alive, layers = [net.source], []
    for turn, target in enumerate(targets):
        hold = [base for base in alive if last[base] > turn]
        layers.append(_layer(net, target, alive, hold))
        alive = [*hold, *bases[turn + 1 : turn + 2]]
    weights, biases, kept = zip(*layers)
    return Chain(weights, biases, kept[:-1], tuple(curves), tuple(places))


def _last_uses(net: Network, targets: list[int], bases: list[int]) -> dict[int, int]:
    """For each place in ``bases`` the number of the last target that is affine in it, or -1."""
    last = dict.fromkeys(bases, -1)
    for turn, target in enumerate(targets):
        last.update(dict.fromkeys(_bases(net, target), turn))
    return last


def _layer(
    net: Network, target: int, alive: list[int], hold: list[int]
) -> tuple[jax.Array, jax.Array, int]:
    """A layer's matrix and bias, and the number of its first entries, which are kept.

    It maps the values at the places ``alive``, side by side, to those at ``hold``, unchanged, and
    that at ``target``: ``[kept + rows, columns]``.
    """
    sizes = {base: _size(net, base) for base in alive}
    held = sum(sizes[base] for base in hold)
    _check_size(sum(sizes.values()) * (held + _size(net, target)))
    rows = [[_selected(sizes, base, other) for other in alive] for base in hold]
    rows.append([_matrix(net, target, base, sizes[base]) for base in alive])
    weight = jnp.concatenate([jnp.concatenate(row, axis=1) for row in rows])
    return weight, jnp.concatenate([jnp.zeros(held), _offset(net, target)]), held


def _size(net: Network, place: int) -> int:
    """The number of entries of the value at ``place``."""
    return math.prod(net.graph.avals[place].shape)


def _check_size(entries: int) -> None:
    """Raises if a layer's matrix would have more than ``_ENTRIES`` entries."""
    if entries > _ENTRIES:
        raise ValueError(
            f"a layer of this net is a matrix of {entries:,} entries; Lipschitz constants by "
            "matrices are for smaller nets. certify.margin_lipschitz needs none."
        )


def _operand(net: Network, node: Node) -> int:
    """The place of a node's one operand that depends on the input; raises if there are several."""
    moving = [place for place in node.inputs if place not in net.exact]
    if len(set(moving)) != 1 or len(node.outputs) != 1:
        raise _refused(node)
    return moving[0]


def curve_of(net: Network, node: Node) -> ClosedJaxpr | None:
    """The activation that a node applies to every entry, as a scalar program; None for ReLU.

    Raises a ValueError if the node does something else.
    """
    place = _operand(net, node)
    aval, out = net.graph.avals[place], net.graph.avals[node.outputs[0]]
    if node.name == "elementwise":
        return node.eqn.params["jaxpr"]
    if aval.shape != out.shape or not _single(node):
        raise _refused(node)
    others = [_level(net, p) for p in node.inputs if p in net.exact]
    if validate.traced(others):
        raise _refused(node)
    if node.name == "max" and all(bool(np.all(np.asarray(t) == 0)) for t in others):
        return None
    if any(np.unique(np.asarray(t)).size != 1 for t in others):
        raise _refused(node)

    def function(z: jax.Array) -> jax.Array:
        levels = iter(jnp.asarray(np.asarray(t).flat[0], z.dtype) for t in others)
        args = [next(levels) if p in net.exact else z for p in node.inputs]
        return jnp.asarray(node.eqn.primitive.bind(*loops.alike(*args), **node.eqn.params))

    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), aval.dtype))


def _level(net: Network, place: int) -> Any:
    """The constant at ``place``, concrete inside a trace too unless it depends on parameters.

    A traced constant is computed again from its inputs at trace time, where these are concrete.
    """
    value = net.exact[place]
    makers = [node for node in net.graph.nodes if place in node.outputs]
    if not (validate.traced(value) and makers):
        return value
    args = [_level(net, each) for each in makers[0].inputs]
    if validate.traced(args):
        return value
    with jax.ensure_compile_time_eval():
        made = affine_rules.evaluate(makers[0].eqn, [jnp.asarray(arg) for arg in args])
    return made[makers[0].outputs.index(place)]


def _single(node: Node) -> bool:
    """Whether a node applies a continuous scalar function to every entry."""
    rules = TABLE.get(node.name)
    return rules is not None and rules.fuses and rules.affine is None and not rules.compares


def _refused(node: Node) -> ValueError:
    """The error for an operation that is neither affine nor entrywise."""
    record.see_through(node.name)
    return ValueError(
        f"the model uses {node.name} on what depends on its input; here every layer must be affine "
        "or entrywise. certify.margin_lipschitz bounds other nets."
    )


def _bases(net: Network, place: int) -> set[int]:
    """The places (activations' outputs or the input) of which the value at ``place`` is affine."""
    found: set[int] = set()
    seen, stack = set(), [place]
    while stack:
        here = stack.pop()
        if here in seen or here in net.exact:
            continue
        seen.add(here)
        if here in net.affine:
            stack.extend(part.place for part in net.affine[here].parts)
        else:
            found.add(here)
    return found


def _through(net: Network, place: int, values: dict[int, jax.Array], offsets: bool) -> jax.Array:
    """The value at ``place``, an affine function of the ``values`` at other places.

    Places of which it is affine but which are not in ``values`` count as 0; without ``offsets`` so
    do all constant terms. Intermediate results are added to ``values``.
    """
    if place in values:
        return values[place]
    if place in net.exact:
        total = jnp.asarray(net.exact[place])
        return total if offsets else jnp.zeros_like(total)
    if place not in net.affine:
        aval: Any = net.graph.avals[place]
        return jnp.zeros(aval.shape, aval.dtype)
    affine = net.affine[place]
    total = affine.offset if offsets else jnp.zeros_like(affine.offset)
    for part in affine.parts:
        total = total + part.apply(_through(net, part.place, values, offsets))
    values[place] = total
    return total


def _matrix(net: Network, place: int, base: int, size: int) -> jax.Array:
    """``[rows, size]``: the matrix by which the value at ``place`` depends on that at ``base``.

    ``size`` is the number of entries at ``base``; the matrix is 0 if there is no such dependence.
    """
    aval: Any = net.graph.avals[base]
    rows = _size(net, place)
    if base not in _bases(net, place):
        return jnp.zeros((rows, size), aval.dtype)

    def linear(v: jax.Array) -> jax.Array:
        return _through(net, place, {base: v.reshape(aval.shape)}, False).reshape(-1)

    differentiate: Callable[..., Any] = jax.jacrev if rows < size else jax.jacfwd
    return differentiate(linear)(jnp.zeros(size, aval.dtype))


def _offset(net: Network, place: int) -> jax.Array:
    """``[rows]``: the constant term of the affine value at ``place``, flat."""
    return _through(net, place, {}, True).reshape(-1)


def _selected(sizes: dict[int, int], base: int, other: int) -> jax.Array:
    """The identity matrix if both bases are the same, else a matrix of zeros."""
    return jnp.eye(sizes[base]) if base == other else jnp.zeros((sizes[base], sizes[other]))
