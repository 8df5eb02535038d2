"""The window of pixels to which a pixel can send mass, and sums over it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import loops
from wdjax.core import Array


class Stencil(NamedTuple):
    """A window of ``k x k`` targets around every pixel of an image.

    Images are stored flat, every row followed by ``k // 2`` empty cells, so that all targets of one
    offset are one slice. ``L`` is the length of that layout and ``O = k * k``; a plan ``[n, C, O,
    L]`` holds the mass that each pixel sends over each offset.
    """

    height: int
    width: int
    window: int

    @property
    def reach(self) -> int:
        """The largest offset along an axis."""
        return self.window // 2

    @property
    def stride(self) -> int:
        return self.width + self.reach

    @property
    def length(self) -> int:
        """L."""
        return self.height * self.stride

    @property
    def margin(self) -> int:
        """Number of cells before and after the layout that an offset may reach."""
        return self.reach * self.stride + self.reach

    @property
    def offsets(self) -> int:
        """O."""
        return self.window**2

    @property
    def center(self) -> int:
        """The index of offset zero."""
        return self.offsets // 2

    def shifts(self) -> np.ndarray:
        """``[O]``: what each offset adds to an index of the layout."""
        steps = np.arange(-self.reach, self.reach + 1)
        return (steps[:, None] * self.stride + steps).ravel().astype(np.int32)

    def moves(self) -> np.ndarray:
        """``[O, 2]``: rows and columns of each offset."""
        steps = np.arange(-self.reach, self.reach + 1)
        return np.stack(np.meshgrid(steps, steps, indexing="ij"), axis=-1).reshape(-1, 2)

    def costs(self, power: float) -> np.ndarray:
        """``[O]``: Euclidean lengths of the offsets, to a power."""
        return np.hypot(*self.moves().T) ** power

    def classes(self, power: float) -> tuple[np.ndarray, np.ndarray]:
        """The distinct costs ``[D]``, from 0 upwards, and the class of every offset, ``[O]``."""
        levels, members = np.unique(np.round(self.costs(power), 9), return_inverse=True)
        return levels, members.astype(np.int32)

    def valid(self) -> np.ndarray:
        """``[O, L]``: whether sender and target are pixels of the image."""
        return _valid(self)

    def diameter(self, power: float) -> float:
        """The largest cost between two pixels of the image, to a power."""
        return float(np.hypot(self.height - 1, self.width - 1) ** power)

    def flat(self, x: Array) -> Array:
        """``[n, H, W, C] -> [n, C, L]``."""
        rows = jnp.moveaxis(x, -1, 1)
        rows = jnp.pad(rows, [(0, 0)] * 3 + [(0, self.reach)])
        return rows.reshape(*rows.shape[:2], self.length)

    def image(self, flat: Array) -> Array:
        """``[n, C, L] -> [n, H, W, C]``."""
        rows = flat.reshape(*flat.shape[:2], self.height, self.stride)
        return jnp.moveaxis(rows[..., : self.width], 1, -1)

    def flows(self, mass: Array) -> Array:
        """A plan ``[n, H, W, C, k, k]``, as users see it, in the layout ``[n, C, O, L]``."""
        n, channels = len(mass), mass.shape[3]
        shape = (n, self.height, self.width, channels, self.window, self.window)
        if mass.shape != shape:
            raise ValueError(f"a plan must have the shape {list(shape)}, got {list(mass.shape)}.")
        flows = mass.reshape(*shape[:4], self.offsets).transpose(0, 3, 4, 1, 2)
        flows = jnp.pad(flows, [(0, 0)] * 4 + [(0, self.reach)])
        return flows.reshape(n, channels, self.offsets, self.length)

    def mass(self, flows: Array) -> Array:
        """The inverse of :meth:`flows`."""
        n, channels = flows.shape[:2]
        rows = flows.reshape(n, channels, self.offsets, self.height, self.stride)[..., : self.width]
        shape = (n, self.height, self.width, channels, self.window, self.window)
        return rows.transpose(0, 3, 4, 1, 2).reshape(shape)

    def pad(self, flat: Array) -> Array:
        """``[..., L] -> [..., margin + L + margin]``, zeros."""
        return jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(self.margin, self.margin)])

    def of_targets(self, targets: Array) -> Array:
        """``[n, C, L] -> [n, C, O, L]``: for every sender the values of its targets, 0 outside."""
        padded, shifts = self.pad(targets), jnp.asarray(self.shifts())
        shape = (*targets.shape[:-1], self.offsets, self.length)

        def look(offset: Array, seen: Array) -> Array:
            start = self.margin + shifts[offset]
            part = jax.lax.dynamic_slice_in_dim(padded, start, self.length, -1)
            return jax.lax.dynamic_update_index_in_dim(seen, part, offset, 2)

        return loops.fori_loop(0, self.offsets, look, jnp.zeros(shape, targets.dtype))

    def scale(self, plan: Array, targets: Array) -> Array:
        """Multiplies every flow of a plan ``[n, C, O, L]`` by its target's number ``[n, C, L]``."""
        padded, shifts = self.pad(targets), jnp.asarray(self.shifts())

        def multiply(offset: Array, plan: Array) -> Array:
            start = self.margin + shifts[offset]
            part = jax.lax.dynamic_slice_in_dim(padded, start, self.length, -1)
            masses = jax.lax.dynamic_index_in_dim(plan, offset, 2, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(plan, masses * part, offset, 2)

        return loops.fori_loop(0, self.offsets, multiply, plan)

    def send(self, plan: Array, targets: Array) -> Array:
        """``[n, C, L]``: for every sender the sum over its targets of ``plan * targets``."""
        padded, shifts = self.pad(targets), jnp.asarray(self.shifts())

        def add(offset: Array, total: Array) -> Array:
            start = self.margin + shifts[offset]
            part = jax.lax.dynamic_slice_in_dim(padded, start, self.length, -1)
            return total + plan[:, :, offset] * part

        return loops.fori_loop(0, self.offsets, add, jnp.zeros_like(targets))

    def receive(
        self, plan: Array, senders: Array | None = None, scale: Array | None = None
    ) -> Array:
        """``[n, C, L]``: for every target the sum over senders of ``plan * senders * scale``.

        Args:
          plan: ``[n, C, O, L]``
          senders: ``[n, C, L]`` or None for ones.
          scale: ``[n, C, O]`` or None for ones.
        """
        shifts = jnp.asarray(self.shifts())
        shape = (*plan.shape[:2], self.length + 2 * self.margin)

        def add(offset: Array, total: Array) -> Array:
            start = self.margin + shifts[offset]
            part = plan[:, :, offset]
            part = part if senders is None else part * senders
            part = part if scale is None else part * scale[:, :, offset, None]
            known = jax.lax.dynamic_slice_in_dim(total, start, self.length, -1)
            return jax.lax.dynamic_update_slice_in_dim(total, known + part, start, -1)

        total = loops.fori_loop(0, self.offsets, add, jnp.zeros(shape, plan.dtype))
        return total[..., self.margin : self.margin + self.length]

    def levels(self, plan: Array, targets: Array, power: float) -> Array:
        """``[n, C, D, L]``: :meth:`send`, by classes of equal cost."""
        padded, shifts = self.pad(targets), jnp.asarray(self.shifts())
        levels, members = self.classes(power)
        level_of = jnp.asarray(members)
        shape = (*targets.shape[:-1], len(levels), self.length)

        def add(offset: Array, total: Array) -> Array:
            start = self.margin + shifts[offset]
            part = jax.lax.dynamic_slice_in_dim(padded, start, self.length, -1)
            known = jax.lax.dynamic_index_in_dim(total, level_of[offset], 2, keepdims=False)
            known = known + plan[:, :, offset] * part
            return jax.lax.dynamic_update_index_in_dim(total, known, level_of[offset], 2)

        return loops.fori_loop(0, self.offsets, add, jnp.zeros(shape, targets.dtype))


@functools.cache
def _valid(stencil: Stencil) -> np.ndarray:
    """``[O, L]`` booleans: whether sender and target of each offset are pixels of the image."""
    steps = np.arange(-stencil.reach, stencil.reach + 1)
    down, right = (part.ravel()[:, None] for part in np.meshgrid(steps, steps, indexing="ij"))
    row, column = np.divmod(np.arange(stencil.length), stencil.stride)
    inside = column < stencil.width
    inside = inside & (row + down >= 0) & (row + down < stencil.height)
    return inside & (column + right >= 0) & (column + right < stencil.width)
