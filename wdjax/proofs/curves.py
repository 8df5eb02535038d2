"""Lines below and above a curve over an interval, with every rounding charged.

Any slope makes a line: how far it must be moved, so that the curve is on one side of it, is
computed here. So a slope need not be good, and none has to be believed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from wdjax.proofs.real_net import UNIT

_TRUSTED = 2.0**-47
"""What NumPy's ``tanh`` may be off by: 64 units, where a few are known."""
_HALVINGS = 25
Ends = tuple[Any, Any]


@dataclass(frozen=True)
class _Sigmoid:
    """``middle + height tanh(rate z)``: convex below 0, concave above; all three powers of 2."""

    middle: float
    height: float
    rate: float

    def value(self, z: Any) -> Any:
        return self.middle + self.height * np.tanh(self.rate * z)

    def steep(self, z: Any) -> Any:
        """The derivative, up to three times ``_TRUSTED``."""
        return self.height * self.rate * (1 - np.tanh(self.rate * z) ** 2)

    def below(self, slope: Any, low: Any, high: Any) -> Any:
        """An intercept with which the line of a slope, at least 0, is below the curve.

        Above 0 the curve is concave, and least above the line at an end. Below 0 it is convex, and
        above its tangent at any point; the best is where the derivative is the slope.
        """
        with np.errstate(divide="ignore"):
            flat = np.sqrt(np.maximum(1 - slope / (self.height * self.rate), 0.0))
            touch = -np.arctanh(flat) / self.rate
        last = np.maximum(np.minimum(high, 0.0), low)
        touch = np.maximum(np.minimum(touch, last), low)
        rise = self.steep(touch) - slope
        lost = np.maximum(rise * (touch - low), -rise * (last - touch))
        lost = np.where(low < 0, np.maximum(lost, 0.0) + 4 * _TRUSTED * (last - low), 0.0)
        ends = (self.value(z) - slope * z for z in (low, high))
        least = np.minimum(np.minimum(*ends), self.value(touch) - slope * touch - lost)
        most = np.maximum(np.abs(low), np.abs(high))
        return least - 2 * _TRUSTED - 8 * UNIT * (slope * most + np.abs(lost))

    def above(self, slope: Any, low: Any, high: Any) -> Any:
        """As :meth:`below` of a line above the curve, which is odd about ``(0, middle)``."""
        return 2 * self.middle - self.below(slope, -high, -low) + 4 * UNIT

    def usual(self, low: Any, high: Any) -> Any:
        """The slope of the line below the curve that is highest in the middle of the interval."""
        end, mid = self.value(high), 0.5 * low + 0.5 * high

        def reached(z: Any) -> Any:
            return self.value(z) + self.steep(z) * (high - z)

        left, right = low, np.maximum(np.minimum(high, 0.0), low)
        for _ in range(_HALVINGS):
            half = 0.5 * left + 0.5 * right
            under = reached(half) <= end
            left, right = np.where(under, half, left), np.where(under, right, half)
        width = np.where(high > low, high - low, 1.0)
        chord = np.clip((end - self.value(low)) / width, 0.0, 1.0)
        crossed = (reached(low) > end) | (low >= 0)
        return np.where(crossed & (high > low), chord, self.steep(np.minimum(left, mid)))


_SIGMOIDS = {"Sigmoid": _Sigmoid(0.5, 0.5, 0.5), "Tanh": _Sigmoid(0.0, 1.0, 1.0)}


def values(kind: str, low: Any, high: Any) -> Ends:
    """Ends of the curve's values."""
    if kind == "Relu":
        return np.maximum(low, 0.0), np.maximum(high, 0.0)
    value = _SIGMOIDS[kind].value
    return value(low) - 2 * _TRUSTED, value(high) + 2 * _TRUSTED


def usual(kind: str, low: Any, high: Any) -> Ends:
    """Good slopes, in [0, 1], of the lines below and above the curve."""
    if kind != "Relu":
        curve = _SIGMOIDS[kind]
        return curve.usual(low, high), curve.usual(-high, -low)
    open_ = (low < 0) & (high > 0)
    chord = high / np.where(open_, high - low, 1.0)
    return np.where(open_, high > -low, low >= 0) * 1.0, np.where(open_, chord, low >= 0)


def lines(kind: str, ends: Ends, usual: Ends, slopes: Any) -> tuple[Any, Any, Any, Any]:
    """Slope and intercept of lines below, then above the curve, all ``[L, R or 1, n]``; None for 0.

    Args:
      kind: of the curve.
      ends: of the operand, ``[L, n]``.
      usual: slopes to take where none are given, ``[L, n]``.
      slopes: ``[L or 1, R or 1, n]``, in [0, 1] or below 0 for the usual ones: of both lines, of a
        rectifier of the one below.
    """
    low, high, under, over = (part[:, None] for part in (*ends, *usual))
    if kind != "Relu":
        curve = _SIGMOIDS[kind]
        if np.all(slopes < 0):
            slopes = slopes[:, :1]
        under, over = (np.where(slopes >= 0, slopes, slope) for slope in (under, over))
        return under, curve.below(under, low, high), over, curve.above(over, low, high)
    open_ = (low < 0) & (high > 0)
    under = np.where((slopes >= 0) & open_, slopes, under)
    # The rectifier is convex, so a line is above it that is above it at both ends.
    above = np.maximum(-over * low, high - over * high) + 8 * UNIT * (high - low)
    return under, None, over, np.where(open_, above, 0.0)
