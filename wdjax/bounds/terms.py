"""What the coefficients at one value add to a backward bound, and what they become behind it."""

from typing import NamedTuple

import jax.numpy as jnp

from wdjax.bounds.coefficients import Coefficients, Rows, Whole, Window, flat, seen, summed, whole
from wdjax.bounds.domain import Array, Linear
from wdjax.bounds.record import Lines


class Sum(NamedTuple):
    """A running sum, and the sum of the magnitudes that were added.

    ``[G, R]`` of functions, or ``[2, G, R]`` of functions and their negatives, where these have the
    coefficients with the other sign.
    """

    value: Array
    size: Array
    terms: int = 0

    def plus(self, term: Array) -> "Sum":
        return Sum(self.value + term, self.size + jnp.abs(term), self.terms + 1)

    def least(self, of: Linear, own: Array) -> "Sum":
        """With the least values of linear functions ``own``, ``[G, R, N]``."""
        both = self.value.ndim == own.ndim
        return self.plus(jnp.stack([of(own), of(-own)]) if both else of(own))

    def between(self, own: Array, low: Array, up: Array) -> "Sum":
        """Where their arguments are between two ends."""

        def least(own: Array) -> Array:
            return summed(jnp.maximum(own, 0.0) * low + jnp.minimum(own, 0.0) * up)

        return self.least(least, own)

    def low(self, flushed: float) -> Array:
        """Rounded down, and by what was lost below the smallest float."""
        unit = (self.terms + 16) * float(jnp.finfo(self.value.dtype).eps)
        return jnp.where(
            jnp.isfinite(self.size), self.value - (unit * self.size + flushed), -jnp.inf
        )


def charged(sum_: Sum, charges: Array, a: Coefficients, rows: Rows) -> Sum:
    """With what an affine part gathered, and what rounding may take."""
    offset, error = seen(charges, rows, a)

    def least(own: Array) -> Array:
        # Not as between two ends, which takes more of the CPU's fusions. An infinite error belongs
        # to what no line looks at, so that a coefficient there is no 0 by underflow.
        return summed(own * offset - jnp.where(own == 0, 0.0, jnp.abs(own) * error))

    return sum_.least(least, flat(a))


def relaxed(
    sum_: Sum, lines: Lines, a: Coefficients, rows: Rows, slope: Array | None
) -> tuple[Sum, list[tuple[int, Coefficients]]]:
    """With the constants of lines, and the coefficients of each operand."""
    if any(view.view is not None for view in lines.views):
        a = whole(a, rows)
    own = flat(a)
    positive, negative = jnp.maximum(own, 0.0), jnp.minimum(own, 0.0)
    low, up, *slopes = seen(lines.maps[0], rows, a)
    if slope is not None and lines.free is not None:
        (free, shift), slope = seen(lines.maps[1], rows, a), slope.reshape(own.shape)
        low = jnp.where(free > 0, slope * shift, low)
        slopes[0] = jnp.where(free > 0, slope, slopes[0])
    sum_ = sum_.between(own, low, up)
    backs = []
    for view, below, above in zip(lines.views, slopes[::2], slopes[1::2]):
        back = (positive * below + negative * above).reshape(a.a.shape)
        sent: Coefficients = a._replace(a=back)
        if isinstance(sent, Window):
            sent = sent._replace(clean=True)  # Outside of the map all slopes are 0.
        if view.view is not None:
            sent = Whole(back).behind(view.view, view.shape)
        backs.append((view.operand, sent))
    return sum_, backs
