"""Checks that functions are pure: traced again, they give the program that JAX has kept."""

import weakref
from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from wdjax import distinct, identity
from wdjax.checks import validate
from wdjax.core import AnyArray, Array, PyTree

_ROWS = 16
"""Size of the batch for which functions are traced."""

_DIGESTS: weakref.WeakKeyDictionary[ClosedJaxpr, bytes] = weakref.WeakKeyDictionary()
"""Digests of the programs that JAX keeps, from their first check: NumPy arrays in them may change
in place later."""


def check(model: Callable[[Array], PyTree], x: AnyArray) -> None:
    """Raises if the model, traced anew, differs from the program that JAX keeps.

    JAX compiles a function once, with the values that it reads from outside: weights in a closure,
    numbers drawn by NumPy. Later calls compute with these, whatever has changed since.

    Args:
      model: a pytree callable.
      x: ``[n, *shape]`` samples, concrete.

    Raises:
      ValueError: the programs, or the constants in them, differ.

    Cost: a trace and a digest of one program with its constants; two of each at first.

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
    some = _some(x)
    try:
        differs = _differs(model, some)
    except Exception:
        given = jax.ShapeDtypeStruct(np.shape(x), some.dtype)
        validate.shapes_of(model, given)  # Says what the model does not accept.
        raise
    _refuse(differs, "the model's function", "Model(apply, params)")


def check_loss(
    name: str, function: Callable[..., Array], model: Callable[[Array], PyTree], x: AnyArray
) -> None:
    """Raises if a criterion or a loss, traced anew, differs from the program that JAX keeps.

    Args:
      name: ``criterion`` or ``loss``, for the message.
      function: ``(out, y) -> [n]``.
      model: whose outputs ``out`` it takes.
      x: ``[n, *shape]`` samples, concrete.

    Raises:
      ValueError: the programs, or the constants in them, differ.
    """
    out, labels = jax.eval_shape(model, _some(x)), jax.ShapeDtypeStruct((_ROWS,), np.int32)
    plain = jax.tree_util.treedef_is_leaf(jax.tree.structure(function))
    given = jax.tree_util.Partial(function) if plain else function
    try:
        differs = _differs(given, out, labels)
    except Exception:
        return  # The search refuses what is no loss, and says why.
    _refuse(differs, f"the {name}", "jax.tree_util.Partial(function, value)")


def _some(x: AnyArray) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a batch of samples like ``x``, ``[n, *shape]``, for which to trace."""
    kind = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
    return jax.ShapeDtypeStruct((_ROWS, *np.shape(x)[1:]), kind)


@distinct.jit
def _kept(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """A function's value, traced once for each function and shapes."""
    return function(*args)


def _differs(function: Callable[..., PyTree], *args: PyTree) -> bool:
    """Whether the function, a pytree, now traces to another program than at first."""
    kept = _kept.trace(function, *args).jaxpr
    now = distinct.jit(lambda function, *args: function(*args)).trace(function, *args).jaxpr
    if kept not in _DIGESTS:
        _DIGESTS[kept] = identity.digest(kept)
    return _DIGESTS[kept] != identity.digest(now)


def _refuse(differs: bool, what: str, way: str) -> None:
    """Raises if a function differs; ``way`` tells the user how to pass a value that changes."""
    if differs:
        raise ValueError(
            f"{what} reads a value that is not among its parameters and that changes: one in a "
            "closure or a global, such as weights, or random numbers of NumPy. JAX keeps the "
            "program with the values of its first call, so that results would be those of another "
            f"function. Pass what changes as a parameter, {way}, or define the function anew."
        )
