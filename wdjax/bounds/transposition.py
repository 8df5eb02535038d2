"""Coefficients back through one affine map."""

from typing import Any

import jax.numpy as jnp

from wdjax.bounds.coefficients import Coefficients, Rows, framed, plain, seen, through, whole
from wdjax.bounds.network import Affine, Part


def transposed(affine: Affine, a: Coefficients, rows: Rows) -> list[tuple[int, Coefficients]]:
    """Back through an affine map, to each of its operands."""
    conv = plain(affine.node.eqn, affine.exact)
    if conv is not None and len(affine.parts) == 1:
        return [(affine.parts[0].place, through(a, conv, rows))]
    avals: list[Any] = [atom.aval for atom in affine.node.eqn.invars]
    shapes = {place: aval.shape for place, aval in zip(affine.node.inputs, avals)}
    if affine.record.diagonal and {shapes[p.place] for p in affine.parts} == {affine.offset.shape}:
        return [(part.place, _scaled(affine, part, a, rows)) for part in affine.parts]
    full = whole(a, rows)
    return [(part.place, full.behind(part.apply, shapes[part.place])) for part in affine.parts]


def _scaled(affine: Affine, part: Part, a: Coefficients, rows: Rows) -> Coefficients:
    """Back through a map that multiplies every entry by a number of its own."""
    factor = part.apply(jnp.ones(affine.offset.shape, affine.offset.dtype))
    known = [jnp.ndim(v) for v in affine.exact if v is not None]
    if not affine.record.scales or known == [0]:
        return a._replace(a=a.a * factor.reshape(-1)[0])
    (own,) = seen(framed(factor[None]), rows.of_all(), a)
    return a._replace(a=a.a * own.reshape(a.a.shape[1:]))
