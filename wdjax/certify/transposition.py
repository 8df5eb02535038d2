"""Coefficients back through one affine map."""

from typing import Any

import jax
import jax.numpy as jnp

from wdjax.certify.coefficients import (
    Coefficients,
    Rows,
    Whole,
    framed,
    plain,
    seen,
    through,
    whole,
)
from wdjax.certify.network import Affine, Part


def transposed(affine: Affine, a: Coefficients, rows: Rows) -> list[tuple[int, Coefficients]]:
    """Back through an affine map, to each of its operands."""
    conv = plain(affine.node.eqn, affine.exact)
    if conv is not None and len(affine.parts) == 1:
        return [(affine.parts[0].place, through(a, conv, rows))]
    avals: list[Any] = [atom.aval for atom in affine.node.eqn.invars]
    own = {part.place for part in affine.parts}
    moved = [v.shape for v, place in zip(avals, affine.node.inputs) if place in own]
    if affine.diagonal and set(moved) == {affine.offset.shape}:
        return [(part.place, _scaled(affine, part, a, rows)) for part in affine.parts]
    full = whole(a, rows).a
    out: list[tuple[int, Coefficients]] = []
    for part in affine.parts:
        aval = avals[affine.node.inputs.index(part.place)]
        zeros = jnp.zeros(aval.shape, affine.offset.dtype)
        pull = jax.vjp(part.apply, zeros)[1]
        out.append((part.place, Whole(jax.vmap(jax.vmap(lambda t, pull=pull: pull(t)[0]))(full))))
    return out


def _scaled(affine: Affine, part: Part, a: Coefficients, rows: Rows) -> Coefficients:
    """Back through a map that multiplies every entry by a number of its own."""
    node = affine.node
    alone = node.inputs.count(part.place) == 1
    if node.name in ("add", "add_any", "convert_element_type") and alone:
        return a
    if node.name == "neg" or (node.name == "sub" and alone):
        return a if node.name == "sub" and node.inputs[0] == part.place else a._replace(a=-a.a)
    factor = part.apply(jnp.ones(affine.offset.shape, affine.offset.dtype))
    known = [jnp.ndim(v) for v in affine.exact if v is not None]
    if known == [0]:
        return a._replace(a=a.a * factor.reshape(-1)[0])
    (own,) = seen(framed(factor[None]), rows.of_all(), a)
    return a._replace(a=a.a * own.reshape(a.a.shape[1:]))
