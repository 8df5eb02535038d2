"""The lower slopes that bound single neurons best, for who wants to bound them again."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from wdjax import distinct, xla_cpu
from wdjax.bounds import coarse, crown, margins, slopes
from wdjax.bounds.coefficients import Rows, Whole
from wdjax.bounds.domain import Array
from wdjax.bounds.leaves import Maps, RegionProblem, rectified
from wdjax.bounds.region import Norm
from wdjax.core import Classifier
from wdjax.precision import highest

_STEPS = 10


@functools.partial(distinct.jit, static_argnums=2)
def of_region(model: Classifier, problem: RegionProblem, norm: Norm) -> Maps:
    """Slopes ``[n, 2, m]`` for both ends of each of the ``n`` entries of a ReLU's operand.

    By the operand's place. The ``m`` slopes are those of all earlier ReLUs, in program order; -inf
    where an entry is stable.
    """
    found: Maps = {}
    usual = coarse.refine, functools.partial(crown.refine, bound=crown.backward)
    with highest():
        net = margins.network(model, problem.center)
        wide = margins.wide(problem.region(norm)).prepared()
        crown.bounds(net, wide, (*usual, functools.partial(_recorded, found)))
    return found


def _recorded(found: Maps, state: crown.Pass, place: int, needed: Array) -> None:
    """Tightens a value's bounds as :func:`crown.refine`, and keeps the slopes in ``found``.

    The bounds are ``[1, *shape]``, to which the booleans ``needed`` broadcast; the slopes are
    ``[n, 2, m]``, as in :func:`of_region`.
    """
    value, operands = state.values[place], sorted(rectified(state).items())
    ends = [(out, state.values[operand]) for out, operand in operands]
    usual = {out: (end.upper > -end.lower).astype(value.lower.dtype)[0] for out, end in ends}
    shape, size = value.lower.shape[1:], value.lower[0].size
    count = sum(line.size for line in usual.values())

    def find(index: Sequence[Array]) -> Array:
        sample, entry = index
        hot = jax.nn.one_hot(entry, size, dtype=value.lower.dtype).reshape(-1, *shape)
        pair = 2, len(entry)
        begun = {out: jnp.broadcast_to(line, (*pair, *line.shape)) for out, line in usual.items()}
        a = {place: Whole(jnp.stack([hot, -hot]))}
        best = slopes.best(state, a, Rows(sample), _STEPS, begun)
        parts = [best.slopes[out].reshape(*pair, -1) for out in usual]
        return jnp.moveaxis(jnp.concatenate([best.low[..., None], *parts], axis=-1), 0, 1)

    flat, rest = jnp.broadcast_to(needed, value.lower.shape).reshape(1, -1), (2, 1 + count)
    both = xla_cpu.by_turns(flat, crown.chunk(state, 2), find, rest, value.lower.dtype)
    low, high = both[:, 0, 0].reshape(value.lower.shape), -both[:, 1, 0].reshape(value.lower.shape)
    state.values[place] = value._replace(
        lower=jnp.fmax(value.lower, low), upper=jnp.fmin(value.upper, high)
    )
    found[place] = both[:, :, 1:]
