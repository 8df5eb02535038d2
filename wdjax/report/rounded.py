"""Proved bounds as text: rounded to the side on which they still hold."""

import decimal


class AtLeast(float):
    """A proved lower bound, which is written rounded down.

    >>> f"{AtLeast(2 / 3):.3f}", f"{AtLeast(0.99996):.4g}", f"{AtLeast(0.9996):.1%}"
    ('0.666', '0.9999', '99.9%')
    """

    def __format__(self, how: str) -> str:
        return _formatted(self, how, decimal.ROUND_FLOOR)


class AtMost(float):
    """A proved upper bound, which is written rounded up.

    >>> f"{AtMost(1 / 3):.3f}", f"{AtMost(0.25):>8.3f}"
    ('0.334', '   0.250')
    """

    def __format__(self, how: str) -> str:
        return _formatted(self, how, decimal.ROUND_CEILING)


def _formatted(value: float, how: str, rounding: str) -> str:
    with decimal.localcontext() as context:
        context.rounding = rounding
        return format(decimal.Decimal(repr(value)).normalize(), how)
