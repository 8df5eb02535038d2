"""Records of entrywise functions, with the measured errors of their float programs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from wdjax.bounds import nonlinear, record, relax
from wdjax.bounds.domain import Array, Rule, tiny
from wdjax.bounds.record import EXACT, ONCE, Error, Lines, Record, Relaxation, View


def function(
    name: str,
    interval: Rule,
    error: Error | Callable[[JaxprEqn], float],
    lines: Relaxation | None = None,
    *,
    monotone: int = 0,
    homogeneous: bool = False,
    fuses: bool = True,
    operands: tuple[int, ...] | None = None,
    waves: bool = False,
) -> Record:
    """The record of a continuous entrywise function.

    Without ``lines``, those of :mod:`wdjax.bounds.activation` are used if it ``fuses``.
    """
    return Record(
        name=name, interval=interval, error=error, lines=lines, monotone=monotone, fuses=fuses,
        homogeneous=homogeneous, operands=operands, affine=None, elementwise=True, scales=False,
        sums=False, continuous=True, keeps_order=False, compares=False, waves=waves,
    )  # fmt: skip


def rising(
    name: str, error: Error, slope: nonlinear.Slope | float, lines: Relaxation | None = None
) -> Record:
    """The record of an increasing function; ``slope`` bounds its derivative, everywhere or from the
    operand's ends."""
    return function(name, nonlinear.monotone(slope), error, lines, monotone=1)


def falling(
    name: str, error: Error, slope: nonlinear.Slope | float, lines: Relaxation | None = None
) -> Record:
    """The record of a decreasing function; ``slope`` as for :func:`rising`."""
    rule = nonlinear.monotone(slope, falling=True)
    return function(name, rule, error, lines, monotone=-1)


def _gap(z: Array) -> Array:
    """The derivative of tanh."""
    return 1 / jnp.cosh(jnp.minimum(jnp.abs(z), 40.0)) ** 2


def _where_tanh(s: Array) -> Array:
    """The ``z >= 0`` at which the derivative of tanh is ``s``."""
    nearly = 1 - 8 * float(jnp.finfo(s.dtype).eps)  # Beyond it tanh is 1 up to 4 eps.
    return jnp.arctanh(jnp.sqrt(jnp.clip(1 - s, 0.0, nearly)))


def _rise(z: Array) -> Array:
    """The derivative of the logistic function."""
    return 0.25 * _gap(0.5 * z)


def _sigma(z: Array) -> Array:
    """The logistic function."""
    return 0.5 + 0.5 * jnp.tanh(0.5 * z)


_BELL = 2 / math.sqrt(math.pi)
"""The largest derivative of erf."""


def _largest(low: Array, high: Array) -> Array:
    """The largest magnitude in ``[low, high]``."""
    return jnp.maximum(jnp.abs(low), jnp.abs(high))


def _least(low: Array, high: Array) -> Array:
    """The smaller magnitude of both ends."""
    return jnp.minimum(jnp.abs(low), jnp.abs(high))


def _real_power(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines | None:
    """Lines of ``x^y`` for ``x >= 0``: convex in ``y``; in ``x`` convex, or concave for exponents
    between 0 and 1. None if both depend on the input."""
    if all(moves):
        return None
    if moves[1]:
        base = jnp.where(args[0] > 0, args[0], jnp.nan)
        rule = relax.convex(lambda y: base**y, lambda y: jnp.log(base) * base**y)
        found = rule(eqn, args[1:], moves[1:])
        assert found is not None
        return found._replace(views=tuple(view._replace(operand=1) for view in found.views))
    exponent = args[1]
    sign = jnp.where((exponent >= 1) | (exponent <= 0), 1.0, -1.0)

    def value(x: Array) -> Array:
        return jnp.where(x >= 0, sign * x**exponent, jnp.nan)

    found = relax.convex(value, lambda x: sign * exponent * x ** (exponent - 1))(eqn, args, moves)
    assert found is not None
    (view,), below, above = found[:3]
    low, up = jnp.where(sign > 0, view.low, -view.up), jnp.where(sign > 0, view.up, -view.low)
    below, above = jnp.where(sign > 0, below, -above), jnp.where(sign > 0, above, -below)
    return Lines((View(0, low, up),), below, above)


def _absolute_error(rule: Relaxation) -> Relaxation:
    """Lines widened for functions above 0 whose error is relative to the value plus 1."""

    def widened(eqn: JaxprEqn, args: Sequence[Any], moves: Sequence[bool]) -> Lines | None:
        found, (_, upper) = rule(eqn, args, moves), args[0]
        assert found is not None
        slack = record.trusted(eqn, upper.dtype) * float(jnp.finfo(upper.dtype).eps) * (1 + upper)
        return found._replace(low=found.low - slack, up=found.up + slack)

    return widened


def _positive(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The function, NaN where it is not certified: at and below 0."""
    return lambda z: jnp.where(z > 0, f(z), jnp.nan)


def _trigamma(z: Array) -> Array:
    return lax.polygamma(jnp.ones_like(z), z)


def _steep_arc(low: Array, high: Array) -> Array:
    """The largest derivative of the inverse sine."""
    size = _largest(low, high)
    return jnp.where(size < 1, lax.rsqrt((1 - size) * (1 + size)), jnp.inf)


RECORDS = [
    rising(
        "exp", Error(2.7, 1.2, 0.6), lambda _, high: jnp.exp(high), relax.convex(jnp.exp, jnp.exp)
    ),
    # Computed as exp(x log 2); its error grows with the rounded product.
    rising(
        "exp2",
        Error(34.2, 358, 47),
        lambda _, high: jnp.exp2(high),
        relax.convex(jnp.exp2, lambda z: math.log(2) * jnp.exp2(z)),
    ),
    rising(
        "expm1",
        Error(3.2, 2.7, 1.2),
        lambda _, high: jnp.exp(high),
        relax.convex(jnp.expm1, jnp.exp),
    ),
    rising(
        "log",
        Error(1.1, 0.6, 0.6),
        lambda low, _: jnp.where(low > 0, 1 / low, jnp.inf),
        relax.concave(jnp.log, lambda z: 1 / z),
    ),
    rising(
        "log1p",
        Error(1.8, 120, 1.2),
        lambda low, _: jnp.where(low > -1, 1 / (1 + low), jnp.inf),
        relax.concave(jnp.log1p, lambda z: 1 / (1 + z)),
    ),
    rising(
        "sqrt",
        Error(0.5, 0.5, 0.6),
        lambda low, _: jnp.where(low > 0, 0.5 / jnp.sqrt(low), jnp.inf),
        relax.concave(jnp.sqrt, lambda z: 0.5 * lax.rsqrt(z)),
    ),
    falling(
        "rsqrt",
        Error(1.4, 1.4, 0.8),
        lambda low, _: jnp.where(low > 0, 0.5 * low**-1.5, jnp.inf),
        relax.convex(lax.rsqrt, lambda z: -0.5 * z**-1.5),
    ),
    function("tan", nonlinear.tangent, Error(1.2, 1.2, 1)),
    rising("asin", Error(1.3, 1, 0.9), _steep_arc),
    falling("acos", Error(1.5, 1.1, 0.9), _steep_arc),
    # Of these two relative to the value plus 1, since they have zeros that are no floats.
    function(
        "lgamma",
        nonlinear.log_gamma,
        Error(16, 10, 0.6),
        _absolute_error(relax.convex(_positive(lax.lgamma), lax.digamma)),
        fuses=False,
    ),
    function(
        "digamma",
        nonlinear.digamma,
        Error(7, 5.5, 0.6),
        _absolute_error(relax.concave(_positive(lax.digamma), _trigamma)),
        fuses=False,
    ),
    rising(
        "atan",
        Error(2.9, 2.6, 0.6),
        1.0,
        relax.sigmoid(
            jnp.arctan,
            lambda z: 1 / (1 + z**2),
            # Of slopes below the smallest normal float the reciprocal would overflow.
            lambda s: jnp.sqrt(1 / jnp.maximum(s, tiny(s.dtype)) - 1),
        ),
    ),
    rising("tanh", Error(3.2, 3.5, 0.6), 1.0, relax.sigmoid(jnp.tanh, _gap, _where_tanh)),
    rising(
        "logistic",
        Error(1.3, 1.4, 1.2),
        0.25,
        relax.sigmoid(_sigma, _rise, lambda s: 2 * _where_tanh(4 * s)),
    ),
    rising(
        "erf",
        Error(2.7, 1.1, 0.6),
        1.1283792,
        relax.sigmoid(
            lax.erf,
            lambda z: _BELL * jnp.exp(-(z**2)),
            lambda s: jnp.sqrt(jnp.maximum(-jnp.log(s / _BELL), 0.0)),
        ),
    ),
    falling("erfc", Error(33, 256, 0.6), 1.1283792),
    function(
        "sin", nonlinear.wave(0.25), Error(0.6, 0.6, 0.6), relax.wave(jnp.sin, 0.25), waves=True
    ),
    function(
        "cos", nonlinear.wave(0.0), Error(0.6, 0.6, 0.6), relax.wave(jnp.cos, 0.0), waves=True
    ),
    function(
        "cosh",
        nonlinear.even(lambda _, high: jnp.sinh(high)),
        Error(13.5, 270, 0.6),
        relax.convex(jnp.cosh, jnp.sinh),
    ),
    rising("sinh", Error(13.5, 270, 0.6), lambda low, high: jnp.cosh(_largest(low, high))),
    rising(
        "asinh",
        Error(1.9, 1.7, 1.3),
        1.0,
        relax.sigmoid(
            jnp.arcsinh, lambda z: lax.rsqrt(1 + z**2), lambda s: jnp.sqrt((1 - s) * (1 + s)) / s
        ),
    ),
    rising(
        "acosh",
        Error(1.6, 1.5, 1.6),
        lambda low, _: jnp.where(low > 1, lax.rsqrt((low - 1) * (low + 1)), jnp.inf),
        relax.concave(jnp.arccosh, lambda z: lax.rsqrt(z - 1) * lax.rsqrt(z + 1)),
    ),
    rising(
        "atanh",
        Error(1.6, 80, 1.1),
        lambda low, high: jnp.where(
            _largest(low, high) < 1, 1 / (1 - _largest(low, high) ** 2), jnp.inf
        ),
    ),
    rising(
        "cbrt",
        Error(8.5, 65, 1.5),
        lambda low, high: jnp.where(low * high > 0, _least(low, high) ** (-2 / 3) / 3, jnp.inf),
    ),
    rising(
        "erf_inv",
        Error(50, 1500, 0.6),
        lambda low, high: 0.8862270 * jnp.exp(lax.erf_inv(_largest(low, high)) ** 2),
    ),
    # |y| products, each rounded to half a unit.
    function("integer_pow", nonlinear.power, lambda eqn: 0.5 * abs(eqn.params["y"]), relax.power),
    function("square", nonlinear.power, ONCE, relax.power),
    # Since jax 0.11, in derivatives of tanh.
    function("one_minus_square", nonlinear.one_minus_square, Error(1.5, 1.5, 1.5)),
    function("pow", nonlinear.real_power, Error(0.6, 0.6, 0.6), _real_power, fuses=False),
    function("abs", nonlinear.absolute, EXACT, relax.convex(jnp.abs, jnp.sign), homogeneous=True),
]
