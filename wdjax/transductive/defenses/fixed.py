"""No defence: the inductive game, with which the others are compared."""

import dataclasses
from typing import ClassVar

import jax

from wdjax.core import Array, Model, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fixed:
    """A model that does not adapt: with it the game is the usual white-box attack.

    Args:
      model: ``[n, *shape] -> [n, K]``.

    >>> import jax.numpy as jnp
    >>> fixed = Fixed(Model(lambda w, x: x @ w, jnp.eye(2)))
    >>> fixed.predict((), fixed.base((), (), 1), jnp.ones((1, 2))).tolist()
    [[1.0, 1.0]]
    """

    per_sample: ClassVar[bool] = False
    uses_inputs: ClassVar[bool] = False
    rejects: ClassVar[bool] = False

    model: Model

    def prepare(self, key: Array, x: Array, y: Array) -> PyTree:
        return ()

    def begin(self, memory: PyTree) -> PyTree:
        return ()

    def base(self, memory: PyTree, state: PyTree, n: int) -> PyTree:
        return self.model

    def adapt(self, key: Array, memory: PyTree, state: PyTree, x: Array) -> tuple[PyTree, PyTree]:
        return self.model, state

    def between(self, key: Array, memory: PyTree, state: PyTree) -> PyTree:
        return state

    def predict(self, memory: PyTree, adapted: PyTree, x: Array) -> Array:
        return adapted(x)
