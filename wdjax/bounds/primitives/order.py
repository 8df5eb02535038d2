"""Records of maxima, sorting and rounding functions, mostly without rounding error, and products of
entries along axes."""

import functools
import math
from collections.abc import Callable

from jax.extend.core import JaxprEqn

from wdjax.bounds import nonlinear, relax, whole
from wdjax.bounds.domain import Rule
from wdjax.bounds.record import EXACT, ONCE, Error, Record, Relaxation


def _chosen(
    name: str,
    interval: Rule,
    lines: Relaxation | None = None,
    *,
    error: Error = EXACT,
    elementwise: bool = False,
    monotone: int = 1,
    continuous: bool | Callable[[JaxprEqn], bool] = True,
    homogeneous: bool = True,
    fuses: bool = False,
    operands: tuple[int, ...] | None = None,
) -> Record:
    """The record of an operation that returns some of its operands' entries, or rounds them."""
    return Record(
        name=name, interval=interval, lines=lines, error=error, elementwise=elementwise,
        monotone=monotone, continuous=continuous, homogeneous=homogeneous, fuses=fuses,
        operands=operands, affine=None, scales=False, sums=False, keeps_order=False, compares=False,
        waves=False,
    )  # fmt: skip


def _alone(eqn: JaxprEqn) -> bool:
    """Whether a sort has no companions, which jump where keys change places."""
    return len(eqn.invars) == 1


_extreme = functools.partial(nonlinear.monotone, exact=True)
_jump = functools.partial(_chosen, elementwise=True, continuous=False, homogeneous=False)
_product = functools.partial(_chosen, error=ONCE, monotone=0, homogeneous=False)

RECORDS = [
    _chosen(
        "max", _extreme(origin=nonlinear.elementwise), relax.rectifier, elementwise=True, fuses=True
    ),
    _chosen("min", _extreme(), relax.rectifier, elementwise=True, fuses=True),
    _chosen("clamp", _extreme(), elementwise=True, fuses=True),
    _chosen("reduce_max", _extreme(origin=nonlinear.reduced), relax.reduced),
    _chosen("reduce_min", _extreme(origin=nonlinear.reduced), relax.mirrored(relax.reduced)),
    _chosen("reduce_window_max", nonlinear.pooled, relax.pooled),
    _chosen("reduce_window_min", nonlinear.pooled, relax.mirrored(relax.pooled)),
    *(
        _chosen(name, nonlinear.scattered_extreme, operands=(0, 2))
        for name in ("scatter-max", "scatter-min")
    ),
    _chosen("cummax", _extreme(math.inf)),
    _chosen("cummin", _extreme(math.inf)),
    _chosen("sort", whole.ordered, continuous=_alone),
    *(
        _chosen(name, whole.extreme, monotone=0, continuous=False, homogeneous=False)
        for name in ("argmax", "argmin")
    ),
    *(_jump(name, _extreme(math.inf)) for name in ("floor", "ceil", "round", "reduce_precision")),
    _chosen("cumlogsumexp", nonlinear.soft_maxima, error=Error(4, 4, 4), homogeneous=False),
    _jump("sign", nonlinear.sign),
    _jump("rem", nonlinear.remainder, monotone=0),
    _jump("atan2", nonlinear.angle, error=Error(1, 0.6, 0.9), monotone=0),
    _product("reduce_prod", nonlinear.multiplied),
    _product("cumprod", nonlinear.multiplied_on),
]
