"""Given points, measured like those of any attack."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from wdjax import distinct
from wdjax.attacks.ascent import setting
from wdjax.balls import Lp
from wdjax.core import Array, Samples, Stage, Victim


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Points:
    """No attack: the points of ``start`` as they are, to measure them against another victim.

    Args:
      ball: norm and box.

    Raises:
      ValueError: no ``start``.

    Cost: the two forward passes of every search.

    Source: this library's own.

    >>> import jax.numpy as jnp
    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> wdjax.search(Points(), model, x, y, eps=0.2, start=x[:, ::-1]).success.tolist()
    [True, False]
    """

    budget: ClassVar[Literal["sample"]] = "sample"
    random: ClassVar[bool] = False
    sparse: ClassVar[bool] = True

    ball: Lp = setting(Lp())

    @property
    def stages(self) -> tuple[Stage, ...]:
        return ()

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> Array:
        if start is None:
            raise ValueError("Points measures given points: pass start=...")
        return start

    def point(self, samples: Samples, state: Array) -> tuple[Array, None]:
        return state, None

    def finished(self, state: Array) -> Array:
        return jnp.zeros(len(state), bool)
