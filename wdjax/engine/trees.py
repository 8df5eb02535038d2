"""Samples that are pytrees, as one array: flattened at the front door, given back in their form."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import distinct
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, PyTree


@dataclasses.dataclass(frozen=True)
class Form:
    """The structure of samples that are a pytree, and the leaves' shapes without their axis n."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    def joined(self, model: Callable[[PyTree], PyTree], x: AnyArray) -> "OfArray":
        """The model as one of arrays like ``x``, which is flat.

        Raises:
          ValueError: the model does not accept samples of this form.
        """
        some = [jax.ShapeDtypeStruct((len(x), *shape), x.dtype) for shape in self.shapes]
        validate.shapes_of(model, jax.tree.unflatten(self.structure, some))
        return OfArray(model, self)

    def flat(self, name: str, x: PyTree) -> AnyArray:
        """A pytree of this form as ``[n, d]``; a single leaf keeps its shape."""
        leaves = jax.tree.leaves(x)
        alike = jax.tree.structure(x) == self.structure and _shapes(leaves) == self.shapes
        lengths = {np.shape(leaf)[:1] for leaf in leaves}
        if not alike or len(lengths) > 1 or () in lengths:
            raise ValueError(f"{name} must be a pytree like x, got {arguments.described(x)}.")
        if len(leaves) == 1 and self.shapes[0]:
            return leaves[0]
        rows = [leaf.reshape(len(leaf), math.prod(s)) for leaf, s in zip(leaves, self.shapes)]
        return (jnp if validate.traced(rows) else np).concatenate(rows, axis=1)

    def tree(self, x: Array) -> PyTree:
        """The pytree whose :meth:`flat` is ``x``; computed on the host unless it is traced."""
        rows = x if validate.traced(x) else np.asarray(x)
        ends, leaves, start = np.cumsum([math.prod(s) for s in self.shapes]).tolist(), [], 0
        rows = rows.reshape(len(rows), ends[-1])
        for shape, end in zip(self.shapes, ends):
            leaves.append(validate.on_device(rows[:, start:end].reshape(len(rows), *shape)))
            start = end
        return jax.tree.unflatten(self.structure, leaves)


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfArray:
    """A model of pytrees as a model of arrays, a pytree itself."""

    model: Callable[[PyTree], PyTree]
    form: Form = dataclasses.field(metadata={"static": True})

    def __call__(self, x: Array) -> PyTree:
        return self.model(self.form.tree(x))


def flattened(x: PyTree, attack: Any) -> tuple[AnyArray, Form | None]:
    """Samples as one array, ``[n, *shape]``, and their form; None if they are one array already.

    Args:
      x: an array, or a pytree of float arrays ``[n, ...]`` of one dtype. A list is an array.
      attack: whose ball must be :class:`~wdjax.balls.Lp` if there are several leaves.

    Raises:
      ValueError: leaves that are not floats, of several dtypes, or of different lengths; or a ball
        of another kind.

    >>> from wdjax.attacks import PGD
    >>> x, form = flattened({"a": np.zeros((2, 3)), "b": np.ones((2, 2, 2))}, PGD())
    >>> x.shape, form.tree(x)["b"].shape
    ((2, 7), (2, 2, 2))
    """
    named = jax.tree_util.tree_leaves_with_path(x)
    arrays = any(getattr(leaf, "ndim", 0) for _, leaf in named)
    if isinstance(x, list) or hasattr(x, "shape") or not arrays:
        return x, None
    ball = getattr(attack, "ball", None)
    if len(named) > 1 and ball is not None and not isinstance(ball, Lp):
        raise ValueError(
            f"{ball!r} is a ball of arrays [n, *shape]: a pytree x of several leaves needs the "
            "ball wdjax.Lp, which is one of their concatenation."
        )
    for path, leaf in named:
        if getattr(leaf, "dtype", None) not in (np.float32, np.float64) or not leaf.ndim:
            raise ValueError(
                f"x{jax.tree_util.keystr(path)} must be floats [n, ...] of 32 or 64 bits, like "
                f"every leaf of a pytree x, got {arguments.described(leaf)}; the attack moves all "
                "of x, so cast this leaf or leave it out."
            )
    leaves = [leaf for _, leaf in named]
    if len({(len(leaf), leaf.dtype) for leaf in leaves}) > 1:
        raise ValueError(
            f"the leaves of x must have one axis n and one dtype, got {arguments.described(x)}, of "
            f"{', '.join(map(arguments.described, leaves))}."
        )
    form = Form(jax.tree.structure(x), _shapes(leaves))
    return form.flat("x", x), form


def _shapes(leaves: list[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(np.shape(leaf)[1:]) for leaf in leaves)
