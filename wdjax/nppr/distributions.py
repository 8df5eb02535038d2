r"""Fixed distributions of perturbations: those of PR, and user-defined ones.

All have support in the ball of radius ``eps``. The clipped Gaussian is that of PRBench: with
``sigma = 1`` a third of every coordinate's mass lies on the faces of the linf ball. The truncated
Gaussian is the Gaussian conditioned on lying inside.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from wdjax import distinct, norms
from wdjax.balls import Lp
from wdjax.core import Array
from wdjax.xla_cpu import drawn

_BALL: Any = dataclasses.field(default=Lp(), metadata={"static": True})


def _family(name: str) -> Any:
    """A static field that distinguishes the families, since JAX 0.10 does not compare classes."""
    return dataclasses.field(default=name, repr=False, kw_only=True, metadata={"static": True})


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class UniformBall:
    r"""The uniform distribution on the ball.

    Args:
      eps: radius.
      ball: norm and box.

    >>> UniformBall(0.1).eps
    0.1
    """

    eps: float | Array
    ball: Lp = _BALL
    family: str = _family("uniform")

    def context(self, x: Array, y: Array) -> None:
        """Nothing to prepare."""
        return None

    def deltas(self, keys: Array, context: None, x: Array, draws: int) -> Array:
        """``[n, draws, *shape]``"""
        shape = x.shape[1:]
        if self.ball.norm == math.inf:
            return self.eps * _per_input(
                keys,
                lambda key: drawn(jax.random.uniform, key, (draws, *shape), x.dtype, -1.0, 1.0),
            )
        each = jax.vmap(lambda key: self.ball.noise(key, shape, x.dtype))
        return self.eps * _per_input(keys, lambda key: each(jax.random.split(key, draws)))


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedGaussian:
    r"""``N(0, (sigma eps)^2 I)``, projected on the ball.

    Args:
      eps: radius.
      ball: norm and box.
      sigma: standard deviation in units of the radius; PRBench has 1.

    >>> ClippedGaussian(0.1).sigma
    1.0
    """

    eps: float | Array
    ball: Lp = _BALL
    sigma: float | Array = 1.0
    family: str = _family("clipped")

    def context(self, x: Array, y: Array) -> None:
        """Nothing to prepare."""
        return None

    def deltas(self, keys: Array, context: None, x: Array, draws: int) -> Array:
        """``[n, draws, *shape]``"""
        raw = _normal(keys, x, draws) * self.sigma
        if self.ball.norm == math.inf:
            return self.eps * jnp.clip(raw, -1.0, 1.0)
        rows = raw.reshape(-1, *x.shape[1:])
        inside = norms.project(rows, jnp.zeros_like(rows), 1.0, self.ball.norm)
        return self.eps * inside.reshape(raw.shape)


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class TruncatedGaussian:
    r"""``N(0, (sigma eps)^2 I)`` given that it lies in the linf ball.

    Args:
      eps: radius.
      ball: norm, which must be linf, and box.
      sigma: standard deviation in units of the radius.

    Raises:
      ValueError: another norm, in whose balls coordinates are not independent.

    >>> TruncatedGaussian(0.1).sigma
    1.0
    """

    eps: float | Array
    ball: Lp = _BALL
    sigma: float | Array = 1.0
    family: str = _family("truncated")

    def __post_init__(self) -> None:
        if isinstance(self.ball, Lp) and self.ball.norm != math.inf:
            raise ValueError(
                f"the truncated Gaussian is for the linf ball, got norm {self.ball.norm!r}; use "
                "ClippedGaussian or UniformBall."
            )

    def context(self, x: Array, y: Array) -> None:
        """Nothing to prepare."""
        return None

    def deltas(self, keys: Array, context: None, x: Array, draws: int) -> Array:
        """``[n, draws, *shape]``"""
        end, shape = 1 / jnp.asarray(self.sigma, x.dtype), (draws, *x.shape[1:])
        raw = _per_input(
            keys, lambda key: jax.random.truncated_normal(key, -end, end, shape, x.dtype)
        )
        return self.eps * self.sigma * raw


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Custom:
    r"""A user-defined distribution.

    Args:
      draw: ``(key, x, y) -> delta`` for one input: a perturbation of the shape of ``x``. A pytree
        callable, such as ``jax.tree_util.Partial(function)``.
      eps: radius. Perturbations outside the ball are projected on it.
      ball: norm and box.

    Raises:
      ValueError: a function that is no pytree.

    >>> def darker(key, x, y):
    ...     return jnp.full_like(x, -0.1) * jax.random.uniform(key)
    >>> Custom(jax.tree_util.Partial(darker), 0.1).eps
    0.1
    """

    draw: Callable[[Array, Array, Array], Array]
    eps: float | Array
    ball: Lp = _BALL
    family: str = _family("custom")

    def __post_init__(self) -> None:
        if jax.tree_util.all_leaves([self.draw]) and callable(self.draw):
            raise ValueError(
                "draw must be a pytree: wrap a plain function as jax.tree_util.Partial(function)."
            )

    def context(self, x: Array, y: Array) -> Array:
        """The labels."""
        return y

    def deltas(self, keys: Array, context: Array, x: Array, draws: int) -> Array:
        """``[n, draws, *shape]``"""

        def one(key: Array, x: Array, y: Array) -> Array:
            return jax.vmap(lambda part: self.draw(part, x, y))(jax.random.split(key, draws))

        return jax.vmap(one)(keys, x, context)


Fixed = UniformBall | ClippedGaussian | TruncatedGaussian | Custom


def _per_input(keys: Array, draw: Callable[[Array], Array]) -> Array:
    """``[n, ...]``: ``draw`` called with every input's own key."""
    return jax.vmap(draw)(keys)


def _normal(keys: Array, x: Array, draws: int) -> Array:
    """``[n, draws, *shape]``: standard normal numbers, by each input's own key."""
    shape = (draws, *x.shape[1:])
    return _per_input(keys, lambda key: drawn(jax.random.normal, key, shape, x.dtype))
