"""Attacks on some coordinates only: the others stay, whatever the attack does."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import distinct
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.core import Array, Attack, Info, PyTree, Samples, Stage, Victim


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masked:
    """An attack on the free coordinates, as samples of a model that fills in the others.

    The attack sees samples of the shape of ``indices``: a patch is a small image. Costs and points
    are those of the whole samples.
    """

    attack: Attack
    indices: Array
    """The free coordinates' numbers in a flattened sample, in the shape of a free sample."""

    @property
    def ball(self) -> Any:
        return self.attack.ball

    @property
    def budget(self) -> Literal["sample", "data", "none"]:
        return self.attack.budget

    @property
    def random(self) -> bool:
        return self.attack.random

    @property
    def stages(self) -> tuple[Stage, ...]:
        def masked(stage: Stage) -> Stage:
            couple = None if stage.couple is None else functools.partial(self._couple, stage.couple)
            return stage._replace(step=functools.partial(self._step, stage.step), couple=couple)

        return tuple(map(masked, self.attack.stages))

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> PyTree:
        begin = None if start is None else self._free(start)
        return self.attack.init(self._inner(victim, samples), self._freed(samples), begin, keys)

    def point(self, samples: Samples, state: PyTree) -> tuple[Array, PyTree]:
        free, proof = self.attack.point(self._freed(samples), state)
        return _filled(samples.x, self.indices, free), proof

    def finished(self, state: PyTree) -> Array:
        return self.attack.finished(state)

    def _step(
        self, step: Callable[..., tuple[PyTree, Info]], victim: Victim, samples: Samples, state: Any
    ) -> tuple[PyTree, Info]:
        return step(self._inner(victim, samples), self._freed(samples), state)

    def _couple(
        self, couple: Callable[..., PyTree], samples: Samples, state: PyTree, chosen: Array
    ) -> PyTree:
        return couple(self._freed(samples), state, chosen)

    def _free(self, x: Array) -> Array:
        """The free coordinates of samples: ``[n, *indices.shape]``."""
        return x.reshape(len(x), -1)[:, self.indices]

    def _freed(self, samples: Samples) -> Samples:
        return samples._replace(x=self._free(samples.x))

    def _inner(self, victim: Victim, samples: Samples) -> Victim:
        """The victim as one of the free coordinates of these samples."""
        model = jax.tree_util.Partial(_of_free, victim.model, samples.x, self.indices)
        return victim._replace(model=model)


def _of_free(model: Callable[[Array], PyTree], x: Array, indices: Array, free: Array) -> PyTree:
    return model(_filled(x, indices, free))


def _filled(x: Array, indices: Array, free: Array) -> Array:
    """Samples ``[n, *shape]`` with these free coordinates ``[n, *indices.shape]``."""
    flat = x.reshape(len(x), -1).at[:, indices.reshape(-1)].set(free.reshape(len(x), -1))
    return flat.reshape(x.shape)


def masked(attack: Attack, mask: Any, shape: tuple[int, ...]) -> Masked:
    """The attack on the coordinates that a mask allows to move.

    Free coordinates that are a rectangle of the image (or any choice of rows, of columns and of
    channels) keep their axes; others that are whole pixels become ``[m, c]``, and all else ``[m]``.

    Args:
      attack: of a ball :class:`~wdjax.balls.Lp`.
      mask: concrete booleans that broadcast to ``shape``: what may move.
      shape: of a sample.

    Raises:
      ValueError: another ball, a mask of another shape or dtype, one that is traced or allows
        nothing, or for a ball that counts pixels one that divides a pixel.

    >>> from wdjax.attacks import PGD
    >>> patch = np.zeros((4, 4, 1), bool)
    >>> patch[:2, 1:] = True
    >>> free, others = (masked(PGD(), one, (4, 4, 3)).indices for one in (patch, ~patch))
    >>> free.shape, others.shape
    ((2, 3, 3), (10, 3))
    """
    if not isinstance(attack.ball, Lp):
        raise ValueError(f"a mask needs the ball wdjax.Lp, got {attack.ball!r}; leave it out.")
    if validate.traced(mask):
        raise ValueError("mask must be known before the trace; close over it as a NumPy array.")
    given = np.asarray(mask)
    fits = given.ndim <= len(shape) and all(
        have in (1, want) for have, want in zip(given.shape[::-1], shape[::-1])
    )
    if given.dtype != bool or not fits:
        raise ValueError(
            f"mask must be booleans that broadcast to a sample, {list(shape)}: True where it may "
            f"move; got {arguments.described(given)}."
        )
    allowed = np.broadcast_to(given, shape)
    if not allowed.any():
        raise ValueError("mask allows no coordinate to move: pass True where the sample may move.")
    sides = _sides(allowed)
    if attack.ball.pixels and sides[-1] != shape[-1]:
        raise ValueError(
            "a ball that counts pixels needs a mask of whole pixels: pass one of shape "
            f"{[*shape[:-1], 1]}."
        )
    return Masked(attack, jnp.asarray(np.flatnonzero(allowed).reshape(sides)))


def _sides(allowed: np.ndarray) -> tuple[int, ...]:
    """The shape of the free coordinates: that of a grid, with as few axes joined as possible."""
    for joined in range(1, allowed.ndim + 1):
        grid = allowed.reshape(-1, *allowed.shape[joined:])
        axes = range(grid.ndim)
        sides = tuple(
            int(grid.any(axis=tuple(a for a in axes if a != axis)).sum()) for axis in axes
        )
        if math.prod(sides) == allowed.sum():
            break
    return sides
