"""Records of moves of entries, sums and products: affine in each operand if the others are
constant."""

import math
from collections.abc import Callable
from typing import Any

from jax.extend.core import JaxprEqn

from wdjax.bounds import affine_rules, decisions, nonlinear, relax, whole
from wdjax.bounds.domain import Rule
from wdjax.bounds.record import EXACT, ONCE, Error, Record, Relaxation, everywhere, once


def _linear(
    name: str,
    interval: Rule,
    affine: Callable[[JaxprEqn], int] = everywhere,
    *,
    error: Error = ONCE,
    operands: tuple[int, ...] | None = None,
    sums: bool = False,
    keeps_order: bool = False,
) -> Record:
    """The record of an operation that moves or adds up entries."""
    return Record(
        name=name, interval=interval, affine=affine, operands=operands, sums=sums,
        keeps_order=keeps_order, error=error, lines=None, elementwise=False, scales=False,
        monotone=0, continuous=True, homogeneous=False, fuses=False, compares=False,
        waves=False,
    )  # fmt: skip


def _move(name: str, **more: Any) -> Record:
    """The record of an operation that moves every entry to at most one index."""
    return _linear(name, affine_rules.additive(more.get("operands")), once, error=EXACT, **more)


def _arithmetic(
    name: str,
    interval: Rule,
    *,
    error: Error = ONCE,
    lines: Relaxation | None = None,
    scales: bool = False,
    converts: bool = False,
) -> Record:
    """The record of an entrywise sum or product, or of a dtype conversion if ``converts``.

    ``scales`` says that entries are multiplied or divided by others.
    """
    return Record(
        name=name, interval=interval, error=error, lines=lines, scales=scales, operands=None,
        affine=once, elementwise=True, sums=False, monotone=0, continuous=True, homogeneous=False,
        fuses=not converts, keeps_order=converts, compares=False,
        waves=False,
    )  # fmt: skip


def _repeated(eqn: JaxprEqn) -> int:
    """How often a broadcast repeats an entry."""
    out: Any = eqn.outvars[0].aval
    return out.size // max(math.prod(affine_rules.shape_of(eqn, 0)), 1)


def _filtered(eqn: JaxprEqn) -> int:
    """To how many outputs of a convolution an entry contributes: channels times kernel size."""
    spec, kernel = eqn.params["dimension_numbers"].rhs_spec, affine_rules.shape_of(eqn, 1)
    return kernel[spec[0]] * math.prod(kernel[axis] for axis in spec[2:])


RECORDS = [
    *(_move(name, keeps_order=True) for name in ("reshape", "squeeze", "expand_dims")),
    *map(_move, ("transpose", "slice", "rev", "concatenate", "stack", "pad")),
    _move("dynamic_slice", operands=(0,)),
    _move("dynamic_update_slice", operands=(0, 1)),
    _linear("split", affine_rules.parted, once, error=EXACT),
    _linear("unstack", affine_rules.parted, once, error=EXACT),
    _linear("broadcast_in_dim", affine_rules.additive(), _repeated, error=EXACT, keeps_order=True),
    _linear("tile", affine_rules.additive(), error=EXACT),
    _linear("gather", whole.gathered, error=EXACT, operands=(0, 1)),
    _linear("scatter", affine_rules.written, once, error=EXACT, operands=(0, 2)),
    _linear(
        "scatter-add",
        affine_rules.additive([0, 2], affine_rules.scattered),
        operands=(0, 2),
        sums=True,
    ),
    _linear("scatter-mul", affine_rules.scattered_product, operands=(0, 2)),
    _linear("reduce_sum", affine_rules.summation, once, sums=True),
    _linear("cumsum", affine_rules.additive(terms=affine_rules.cumulated), sums=True),
    _linear("reduce_window_sum", affine_rules.additive(terms=affine_rules.windowed), sums=True),
    _linear("select_and_scatter_add", decisions.unpool, sums=True),
    _linear("dot_general", affine_rules.bilinear(affine_rules.contracted)),
    _linear("conv_general_dilated", affine_rules.bilinear(affine_rules.convolved), _filtered),
    _arithmetic("convert_element_type", affine_rules.convert, converts=True),
    _arithmetic("neg", affine_rules.additive(absolute=lambda ts: ts[0]), error=EXACT),
    _arithmetic("add", affine_rules.additive(terms=lambda _: 1)),
    _arithmetic("add_any", affine_rules.additive(terms=lambda _: 1)),
    _arithmetic("sub", affine_rules.additive(terms=lambda _: 1, absolute=lambda ts: ts[0] + ts[1])),
    _arithmetic("mul", affine_rules.bilinear(lambda _: 1), scales=True, lines=relax.product),
    _arithmetic("div", nonlinear.quotient, scales=True),
]
