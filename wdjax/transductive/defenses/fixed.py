"""No defence: the inductive game, with which the others are compared."""

import dataclasses
from typing import ClassVar

from wdjax import distinct
from wdjax.core import Array, Model, PyTree
from wdjax.transductive.defense import Stateless


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fixed(Stateless):
    """A model that does not adapt: with it the game is the usual white-box attack.

    Args:
      model: ``[n, *shape] -> [n, K]``.

    Source: Croce et al. [croce2022], who measure the static model beside the adapted one.

    >>> import jax.numpy as jnp
    >>> fixed = Fixed(Model(lambda w, x: x @ w, jnp.eye(2)))
    >>> fixed.predict((), fixed.base((), (), 1), jnp.ones((1, 2))).tolist()
    [[1.0, 1.0]]
    """

    uses_inputs: ClassVar[bool] = False

    model: Model

    def prepare(self, key: Array, x: Array, y: Array) -> PyTree:
        return ()

    def base(self, memory: PyTree, state: PyTree, n: int) -> PyTree:
        return self.model

    def adapt(self, key: Array, memory: PyTree, state: PyTree, x: Array) -> tuple[PyTree, PyTree]:
        return self.model, state
