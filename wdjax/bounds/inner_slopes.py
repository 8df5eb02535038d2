"""The lower slopes that bound single neurons best, for who wants to bound them again."""

import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from wdjax import distinct, xla_cpu
from wdjax.bounds import coarse, crown, margins, passes, slopes
from wdjax.bounds.coefficients import Rows, Whole
from wdjax.bounds.domain import Array
from wdjax.bounds.leaves import Maps, RegionProblem, rectified
from wdjax.bounds.region import Norm
from wdjax.core import Classifier
from wdjax.precision import highest

_STEPS = 10


@functools.partial(distinct.jit, static_argnums=2)
def of_region(model: Classifier, problem: RegionProblem, norm: Norm) -> dict[int, Maps]:
    """Slopes ``[n, 2, m]`` for both ends of each of the ``n`` entries of a ReLU's operand.

    By the operand's place, and there by the place of the operand of each ReLU of earlier layers,
    which has ``m`` slopes; -inf where an entry is stable.
    """
    found: dict[int, Maps] = {}
    usual = coarse.refine, functools.partial(crown.refine, bound=passes.backward)
    with highest():
        net = margins.network(model, problem.center)
        wide = margins.wide(problem.region(norm)).prepared()
        crown.bounds(net, wide, (*usual, functools.partial(_recorded, found)))
    return found


def _recorded(found: dict[int, Maps], state: passes.Pass, needed: Mapping[int, Array]) -> None:
    """Tightens the bounds of values as :func:`crown.refine`, and keeps the slopes in ``found``.

    The bounds are ``[1, *shape]``, as the booleans ``needed``.
    """
    relus = rectified(state)
    ends = {out: state.values[operand] for out, operand in relus.items()}
    usual = {out: (end.upper > -end.lower).astype(end.lower.dtype)[0] for out, end in ends.items()}
    for place, some in needed.items():
        both = _both_ends(state, place, some, usual)
        value = state.values[place]
        low, high = (both.low[:, side].reshape(value.lower.shape) for side in (0, 1))
        state.values[place] = value._replace(
            lower=jnp.fmax(value.lower, low), upper=jnp.fmin(value.upper, -high)
        )
        found[place] = {relus[out]: both.slopes[out] for out in usual}


def _both_ends(
    state: passes.Pass, place: int, needed: Array, usual: slopes.Slopes
) -> slopes.BestSlopes:
    """Bounds ``[n, 2]`` of a value's entries and of their negatives, and slopes ``[n, 2, m]``."""
    value = state.values[place]
    shape, size = value.lower.shape[1:], value.lower[0].size

    def find(index: Sequence[Array]) -> Array:
        sample, entry = index
        hot = jax.nn.one_hot(entry, size, dtype=value.lower.dtype).reshape(-1, *shape)
        pair = 2, len(entry)
        begun = {out: jnp.broadcast_to(line, (*pair, *line.shape)) for out, line in usual.items()}
        a = {place: Whole(jnp.stack([hot, -hot]))}
        best = slopes.best(state, a, Rows(sample), _STEPS, begun)
        parts = [best.slopes[out].reshape(*pair, -1) for out in usual]
        return jnp.moveaxis(jnp.concatenate([best.low[..., None], *parts], axis=-1), 0, 1)

    sizes = [1, *(line.size for line in usual.values())]
    width, rest = passes.chunk(state, 2), (2, sum(sizes))
    both = xla_cpu.by_turns(needed.reshape(1, -1), width, find, rest, value.lower.dtype)
    low, *parts = jnp.split(both, [*itertools.accumulate(sizes)][:-1], axis=2)
    return slopes.BestSlopes(low[..., 0], dict(zip(usual, parts)))
