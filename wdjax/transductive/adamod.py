"""AdaMod for optax: Adam with step sizes bounded by their own moving average."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from wdjax.core import Array, PyTree


class AdaModState(NamedTuple):
    taken: Array
    """The number of steps taken."""
    first: PyTree
    """Moving averages of the gradients."""
    second: PyTree
    """Moving averages of their squares."""
    bound: PyTree
    """Moving averages of the step sizes."""


def adamod(
    learning_rate: float | Array,
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    r"""AdaMod: Adam's step size of every coordinate is at most its own moving average.

    ``a_t = lr sqrt(1 - b2^t) / (1 - b1^t) / (sqrt(v_t) + eps)``,
    ``s_t = b3 s_(t-1) + (1 - b3) a_t`` from ``s_0 = 0`` without bias correction, and the update is
    ``-min(a_t, s_t) m_t``. The first step therefore is ``(1 - b3) lr`` in every coordinate,
    whatever the gradient.

    Args:
      learning_rate: Adam's.
      b1: decay of the gradients' moving average m.
      b2: decay of the squares' moving average v.
      b3: decay of the step sizes' moving average s.
      eps: added to ``sqrt(v)`` before the bias correction of v, as in the authors' code.

    Returns:
      An optax transformation.

    Cost: three numbers a parameter.

    Source: Ding et al. [ding2019], Algorithm 1.

    >>> moved, _ = (rule := adamod(0.006, b3=0.6)).update(jnp.array([2.0, -9.0]), rule.init(
    ...     jnp.zeros(2)))
    >>> bool(jnp.allclose(moved, 0.4 * 0.006 * jnp.array([-1.0, 1.0])))
    True
    """

    def init(params: PyTree) -> AdaModState:
        none = jax.tree.map(jnp.zeros_like, params)
        return AdaModState(jnp.zeros((), jnp.int32), none, none, none)

    def update(
        updates: PyTree, state: AdaModState, params: PyTree | None = None
    ) -> tuple[PyTree, AdaModState]:
        del params
        count = state.taken + 1
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, updates)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.second, updates)
        correction = jnp.sqrt(1 - b2 ** count.astype(float)) / (1 - b1 ** count.astype(float))

        def size(v: Array) -> Array:
            # The square root has no slope at 0: reverse mode through many steps must stay finite.
            root = jnp.where(v > 0, jnp.sqrt(jnp.where(v > 0, v, 1.0)), 0.0)
            return (learning_rate * correction / (root + eps)).astype(v.dtype)

        sizes = jax.tree.map(size, second)
        bound = jax.tree.map(lambda s, a: b3 * s + (1 - b3) * a, state.bound, sizes)
        moved = jax.tree.map(lambda a, s, m: -jnp.minimum(a, s) * m, sizes, bound, first)
        return moved, AdaModState(count, first, second, bound)

    update_typed: Any = update
    return optax.GradientTransformation(init, update_typed)
