"""Records of comparisons, boolean operations and selections."""

from wdjax.bounds import affine_rules, decisions
from wdjax.bounds.domain import Rule
from wdjax.bounds.record import EXACT, Record, everywhere


def _decision(
    name: str,
    interval: Rule,
    *,
    elementwise: bool = True,
    homogeneous: bool = True,
    compares: bool = False,
    selects: bool = False,
) -> Record:
    """The record of a comparison, boolean operation or selection.

    ``homogeneous``: when all numbers are divided by ``t > 0``, booleans stay the same, and selected
    numbers are divided by ``t``.
    """
    return Record(
        name=name, interval=interval, elementwise=elementwise, homogeneous=homogeneous,
        compares=compares, fuses=compares or selects, affine=everywhere if selects else None,
        error=EXACT, lines=None, operands=None, scales=False, sums=False, monotone=0,
        continuous=True, keeps_order=False, waves=False,
    )  # fmt: skip


RECORDS = [
    *(_decision(name, decisions.inequality(flip=False), compares=True) for name in ("lt", "le")),
    *(_decision(name, decisions.inequality(flip=True), compares=True) for name in ("gt", "ge")),
    _decision("eq", decisions.equal, compares=True, homogeneous=False),
    _decision("ne", decisions.unequal, compares=True, homogeneous=False),
    _decision("is_finite", decisions.finite, homogeneous=False),
    *(_decision(name, decisions.logical) for name in ("and", "or", "not", "xor")),
    *(
        _decision(name, affine_rules.moved_booleans, elementwise=False, homogeneous=False)
        for name in ("reduce_and", "reduce_or")
    ),
    _decision("select_n", decisions.select, selects=True),
]
