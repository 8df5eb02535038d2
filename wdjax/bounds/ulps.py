"""How far float functions may be from exact ones, in units in the last place.

What was measured against higher precision, times a factor: for the bound that is computed by the
same function, for the points that were not tried and for other platforms.
"""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

SAFETY = 4
"""Of what was measured."""
LEAST, SHORT = 16, 5
"""At least; of floats shorter than float32."""

MEASURED: dict[str, tuple[float, float, float]] = {
    "atan": (2.9, 2.6, 0.6),
    "cos": (0.6, 0.6, 0.6),
    "erf": (2.7, 1.1, 0.6),
    "erfc": (33, 256, 0.6),
    "exp": (2.7, 1.2, 0.6),
    "exp2": (34.2, 358, 47),
    "expm1": (3.2, 2.7, 1.2),
    "log": (1.1, 0.6, 0.6),
    "log1p": (1.8, 120, 1.2),
    "logistic": (1.3, 1.4, 1.2),
    "pow": (0.6, 0.6, 0.6),
    "rsqrt": (1.4, 0.7, 0.8),
    "sin": (0.6, 0.6, 0.6),
    "sqrt": (0.5, 0.5, 0.6),
    "tanh": (3.2, 3.5, 0.6),
}
"""The largest errors of normal numbers on CPUs in float32, in float64, and in shorter floats, in
units of ``finfo.eps`` times the value: ``tests/test_certify_ulps.py`` measures them again.
``exp2`` is ``exp(x log 2)`` with a rounded product, which its error grows with."""


def trusted(eqn: JaxprEqn, dtype: DTypeLike) -> float:
    """How many of them one entry of an equation may be wrong by in a dtype, sums not counted."""
    kind: Any = jnp.finfo(dtype)
    column = {32: 0, 64: 1}.get(kind.bits, 2)
    name, least = eqn.primitive.name, SHORT if column == 2 else LEAST
    if name == "integer_pow":  # As many products, each rounded to half a unit.
        return least + SAFETY * 0.5 * abs(eqn.params["y"])
    return max(least, SAFETY * MEASURED.get(name, (0.5,) * 3)[column])
