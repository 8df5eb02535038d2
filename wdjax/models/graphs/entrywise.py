"""Operators that act on each entry alone: arithmetic, activations, comparisons, conversions."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from wdjax.models.graphs.laid import straight
from wdjax.models.graphs.signature import IGNORED, REQUIRED, Operator, entries, pointwise
from wdjax.models.layers import gelu

MANY = (1, 1 << 16)
"""Any number of inputs but none."""


def _divided(a, b):
    """Numbers known when the file is read; integers are divided towards 0."""
    if np.result_type(a, b).kind not in "iu":
        return np.divide(a, b)
    if np.any(np.equal(b, 0)):
        raise ValueError("it divides integers by 0")
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def _remainder(call, a, b):
    return jnp.fmod(a, b) if call["fmod"] else jnp.mod(a, b)


def _known_remainder(call, a, b):
    if np.any(np.equal(b, 0)):
        raise ValueError("it divides by 0")
    return np.fmod(a, b) if call["fmod"] else np.mod(a, b)


def _power(a, b):
    """A known exponent becomes a product or a root where it can, which have better gradients."""
    if not isinstance(b, float):
        return a**b
    if b == 0.5:
        return jnp.sqrt(a)
    return a ** (int(b) if b.is_integer() and abs(b) < 64 else b)


def _mean(*arrays):
    return functools.reduce(jnp.add, arrays) / len(arrays)


def _folding(function):
    return lambda *arrays: functools.reduce(function, arrays)


def _clip(call, x, low=None, high=None):
    low = call["min"] if low is None else low
    high = call["max"] if high is None else high
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


def _clip_known(call, *arrays):
    return np.asarray(np.clip(*arrays, *[None] * (3 - len(arrays))))


def _gelu(call, x):
    return jax.nn.gelu(x) if call["approximate"] == "tanh" else gelu(x)


def _shrink(call, x):
    moved = jnp.where(x < -call["lambd"], x + call["bias"], x - call["bias"])
    return jnp.where(jnp.abs(x) > call["lambd"], moved, 0)


def _hard_sigmoid(call, x):
    return jnp.clip(call["alpha"] * x + call["beta"], 0, 1)


def _where_kept(x):
    return jnp.where(x > 0, x, 0)


def _rounded(x):
    return jnp.round(x)


def _cast_known(call, x):
    return x.astype(_target(call["to"]))


def _cast(call, x):
    """Floats stay as they are, since models compute in float32 throughout."""
    to, x = _target(call["to"]), jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating) and to.kind == "f":
        return x
    if x.dtype == jnp.bool_ and to.kind in "fiu":
        return x.astype(jnp.float32)
    if to == x.dtype or (to.kind in "iu" and jnp.issubdtype(x.dtype, jnp.integer)):
        return x
    raise ValueError(
        f"it converts what depends on the samples or on parameters from {x.dtype} to {to}, which "
        "has no derivative; export the model up to its logits"
    )


_TYPES = {
    1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64,
    9: np.bool_, 10: np.float32, 11: np.float32, 12: np.uint32, 13: np.uint64, 16: np.float32,
}  # fmt: skip
"""Types by their numbers; floats of any length are float32 here."""


def _target(number):
    if number not in _TYPES:
        raise ValueError(f"it converts to the type {number}, which is not supported")
    return np.dtype(_TYPES[number])


def _cast_like(call, x, like):
    if x.static and like.static:
        return straight(x.array.astype(like.array.dtype))
    if not jnp.issubdtype(like.array.dtype, jnp.floating):
        raise ValueError("it converts to integers or booleans, which has no derivative")
    return x if not x.static else straight(x.array.astype(np.float32))


def _where(condition, a, b):
    return jnp.where(condition, a, b)


def float32(array):
    """A file's array with floats of other lengths as float32."""
    short = array.dtype == ml_dtypes.bfloat16
    return array.astype(np.float32) if array.dtype.kind == "f" or short else array


_TWO = {"inputs": (2, 2)}
_SCALED_ELU = {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805}
_NO_LIMITS = {"min": None, "max": None}
_CAST = {"to": REQUIRED, "saturate": IGNORED, "round_mode": IGNORED}

OPERATORS: dict[str, Operator] = {
    "Add": entries(jnp.add, np.add, **_TWO),
    "Sub": entries(jnp.subtract, np.subtract, **_TWO),
    "Mul": entries(jnp.multiply, np.multiply, **_TWO),
    "Div": entries(jnp.divide, _divided, **_TWO),
    "Mod": pointwise(_remainder, _known_remainder, attributes={"fmod": 0}, **_TWO),
    "Pow": entries(_power, np.power, **_TWO),
    "Max": entries(_folding(jnp.maximum), _folding(np.maximum), inputs=MANY),
    "Min": entries(_folding(jnp.minimum), _folding(np.minimum), inputs=MANY),
    "Sum": entries(_folding(jnp.add), _folding(np.add), inputs=MANY),
    "Mean": entries(_mean, inputs=MANY),
    "Neg": entries(jnp.negative, np.negative),
    "Abs": entries(jnp.abs, np.abs),
    "Sqrt": entries(jnp.sqrt, np.sqrt),
    "Exp": entries(jnp.exp, np.exp),
    "Log": entries(jnp.log, np.log),
    "Reciprocal": entries(lambda x: 1 / x, np.reciprocal),
    "Erf": entries(lax.erf),
    "Sin": entries(jnp.sin, np.sin),
    "Cos": entries(jnp.cos, np.cos),
    "Tan": entries(jnp.tan, np.tan),
    "Atan": entries(jnp.arctan, np.arctan),
    "Sinh": entries(jnp.sinh),
    "Cosh": entries(jnp.cosh),
    "Floor": entries(jnp.floor, np.floor),
    "Ceil": entries(jnp.ceil, np.ceil),
    "Round": entries(_rounded, np.round),
    "Sign": entries(jnp.sign, np.sign),
    "Relu": entries(jax.nn.relu),
    "LeakyRelu": pointwise(
        lambda call, x: jnp.where(x >= 0, x, call["alpha"] * x), attributes={"alpha": 0.01}
    ),
    "ThresholdedRelu": pointwise(
        lambda call, x: jnp.where(x > call["alpha"], x, 0), attributes={"alpha": 1.0}
    ),
    "PRelu": entries(lambda x, slope: jnp.where(x >= 0, x, slope * x), **_TWO),
    "Elu": pointwise(lambda call, x: jax.nn.elu(x, call["alpha"]), attributes={"alpha": 1.0}),
    "Celu": pointwise(lambda call, x: jax.nn.celu(x, call["alpha"]), attributes={"alpha": 1.0}),
    "Selu": pointwise(
        lambda call, x: call["gamma"] * jax.nn.elu(x, call["alpha"]), attributes=_SCALED_ELU
    ),
    "Sigmoid": entries(jax.nn.sigmoid),
    "Tanh": entries(jnp.tanh),
    "Softplus": entries(jax.nn.softplus),
    "Softsign": entries(jax.nn.soft_sign),
    "Gelu": pointwise(_gelu, attributes={"approximate": "none"}, since=20),
    "HardSigmoid": pointwise(_hard_sigmoid, attributes={"alpha": 0.2, "beta": 0.5}),
    "HardSwish": entries(lambda x: x * jnp.clip(x / 6 + 0.5, 0, 1), since=14),
    "Mish": entries(lambda x: x * jnp.tanh(jax.nn.softplus(x)), since=18),
    "Swish": pointwise(
        lambda call, x: x * jax.nn.sigmoid(call["alpha"] * x), attributes={"alpha": 1.0}, since=24
    ),
    "Shrink": pointwise(_shrink, attributes={"lambd": 0.5, "bias": 0.0}),
    "Clip": pointwise(_clip, _clip_known, inputs=(1, 3), attributes=_NO_LIMITS),
    "Where": entries(_where, np.where, inputs=(3, 3)),
    "Equal": entries(jnp.equal, np.equal, **_TWO),
    "Greater": entries(jnp.greater, np.greater, **_TWO),
    "GreaterOrEqual": entries(jnp.greater_equal, np.greater_equal, **_TWO),
    "Less": entries(jnp.less, np.less, **_TWO),
    "LessOrEqual": entries(jnp.less_equal, np.less_equal, **_TWO),
    "And": entries(jnp.logical_and, np.logical_and, **_TWO),
    "Or": entries(jnp.logical_or, np.logical_or, **_TWO),
    "Xor": entries(jnp.logical_xor, np.logical_xor, **_TWO),
    "Not": entries(jnp.logical_not, np.logical_not),
    "IsNaN": entries(jnp.isnan, np.isnan),
    "Cast": pointwise(_cast, _cast_known, attributes=_CAST),
    "CastLike": Operator(
        run=_cast_like, inputs=(2, 2), attributes={"saturate": IGNORED, "round_mode": IGNORED}
    ),
}
