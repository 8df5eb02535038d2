"""Checks that a model is a pure function: that its program is the one that JAX keeps for it."""

import weakref
from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from wdjax import identity
from wdjax.checks import independence, validate
from wdjax.core import AnyArray, Array, PyTree

_ROWS = 16
"""Size of the batch for which a model is traced, which is that of the check of the batch axis."""

_DIGESTS: weakref.WeakKeyDictionary[ClosedJaxpr, bytes] = weakref.WeakKeyDictionary()
"""Of programs that JAX keeps, at their first trace: NumPy arrays in them may change in place."""


def check(model: Callable[[Array], PyTree], x: AnyArray) -> None:
    """Raises if the model, traced anew, differs from the program that JAX keeps.

    JAX compiles a function once, with the values that it reads from outside: weights in a closure,
    numbers drawn by NumPy. Later calls compute with these, whatever has changed since.

    Args:
      model: a pytree callable.
      x: ``[n, *shape]`` samples, concrete.

    Raises:
      ValueError: the programs, or the constants in them, differ.

    Cost: a trace, and a digest of two programs with their constants; two traces at first.

    >>> import jax.numpy as jnp
    >>> from wdjax import Model
    >>> weights = [jnp.eye(2)]
    >>> model, x = Model(lambda _, x: x @ weights[0], ()), jnp.ones((1, 2))
    >>> check(model, x)
    >>> weights[0] = -weights[0]
    >>> check(model, x)
    Traceback (most recent call last):
      ...
    ValueError: the model's function reads a value that is not among its parameters and that ...
    """
    kind = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
    some = jax.ShapeDtypeStruct((_ROWS, *np.shape(x)[1:]), kind)
    try:
        kept = independence.outputs.trace(model, some).jaxpr
    except Exception:
        given = jax.ShapeDtypeStruct(np.shape(x), kind)
        validate.shapes_of(model, given)  # Says what the model does not accept.
        raise
    now = jax.jit(lambda model, x: model(x)).trace(model, some).jaxpr
    if kept not in _DIGESTS:
        _DIGESTS[kept] = identity.digest(kept)
    if _DIGESTS[kept] != identity.digest(now):
        raise ValueError(
            "the model's function reads a value that is not among its parameters and that changes: "
            "weights in a closure or a global, or random numbers of NumPy. JAX keeps the program "
            "with the values of its first call, so that results would be of another model than "
            "this. Pass what changes as parameters, wdjax.Model(apply, params), or define the "
            "function anew."
        )
