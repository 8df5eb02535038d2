"""Whether a model rounds what it computes from its samples, of which gradients say nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from wdjax import program
from wdjax.checks import independence
from wdjax.core import AnyArray, Array, PyTree
from wdjax.tracing import plain

_STEPS = {"round", "floor", "ceil", "argmax", "argmin"}
"""Primitives that are constant between steps, without the sign, which ``logsumexp`` computes and
leaves out."""
_ROWS = 16, 32
"""Two batch sizes, which many devices can share: what depends on the samples has other shapes in
one than in the other."""


def found(model: Callable[[Array], PyTree], x: AnyArray) -> str | None:
    """The primitive by which a model rounds something that depends on the samples, or None.

    Such a step may have a gradient of the user's, as straight-through estimators do.

    Args:
      model: as for :func:`wdjax.search`.
      x: ``[n, *shape]`` samples, whose shape alone is looked at.

    Cost: two traces of the model at its first call, 1 to 60 ms.

    >>> from wdjax import Model
    >>> found(Model(lambda _, x: jnp.round(8 * x) / 8, None), jnp.zeros((5, 4)))
    'round'
    >>> found(Model(lambda _, x: x + jnp.floor(jnp.arange(4) / 2), None), jnp.zeros((5, 4)))
    """
    kind = x.shape[1:], jnp.result_type(x)
    with plain():  # Other forms of convolutions are chosen by the size of the batch.
        programs = [independence.traced(model, *kind, n) for n in _ROWS]
    for one, other in zip(*map(program.equations, programs)):
        if one.primitive is other.primitive and _is_step(one) and _shape(one) != _shape(other):
            return str(one.primitive.name)
    return None


def _is_step(eqn: JaxprEqn) -> bool:
    """Whether an equation rounds floats: to other floats, or to integers."""
    before, after = (_kind(values) for values in (eqn.invars, eqn.outvars))
    if not jnp.issubdtype(before, jnp.floating):
        return False
    name = eqn.primitive.name
    integers = name == "convert_element_type" and jnp.issubdtype(after, jnp.integer)
    return name in _STEPS or integers


def _kind(values: Sequence[Any]) -> Any:
    """The dtype of the first value; bool if there is none, or if it has no dtype."""
    return getattr(values[0].aval, "dtype", bool) if values else bool


def _shape(eqn: JaxprEqn) -> Any:
    """The shape of the first operand."""
    aval: Any = eqn.invars[0].aval
    return aval.shape
