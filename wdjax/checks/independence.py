"""Checks that a model's output for a sample does not depend on the rest of its batch (its company).

It is proved from the program, or tried with several batches. Otherwise the robustness of a sample
is not defined. Causes are batch statistics, dropout, and the use of a sample's place in its batch
or of the batch's size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from wdjax import distinct, norms
from wdjax.checks import batch_axis, batch_size
from wdjax.core import AnyArray, Array, PyTree
from wdjax.precision import highest
from wdjax.tracing import plain

ROWS = 16
"""Size of the batches for which a model is traced and tried."""
_MOST = 64
"""Maximum size of the batch of all samples for which it is tried."""
_SAME_PLACE = {2: 4, 4: 64, 8: 64}
"""Tolerance in units in the last place, by the output's bytes per number, when only the other
samples of the batch differ: the program is the same, and mostly every bit."""
_OTHER_PLACE = {2: 16, 4: 1024, 8: 1024}
"""Tolerance at another place in the batch, where sums may be in another order."""


@distinct.jit
def outputs(model: Callable[[Array], PyTree], x: Array) -> PyTree:
    """The model's outputs by one compiled program, traced once for each shape."""
    return model(x)


def proof(
    model: Callable[[Array], PyTree], shape: tuple[int, ...], dtype: Any, n: int = ROWS
) -> batch_axis.BatchProof:
    """What the model's program shows for n samples of a shape; no sample is looked at."""
    closed = traced(model, shape, dtype, n)
    parameters = len(closed.jaxpr.invars) - 1
    return batch_axis.prove(closed, [False] * parameters + [True])


def traced(
    model: Callable[[Array], PyTree], shape: tuple[int, ...], dtype: Any, n: int
) -> ClosedJaxpr:
    """The model's program for n samples of a shape."""
    return outputs.trace(model, jax.ShapeDtypeStruct((n, *shape), dtype)).jaxpr


def _has_one_program(
    model: Callable[[Array], PyTree], shape: tuple[int, ...], dtype: Any, sizes: set[int]
) -> bool:
    """Whether the model is one program for batches of all ``sizes``, and of one sample if it takes
    one alone."""
    with plain():  # Other forms of convolutions are chosen by the size of the batch.
        programs = {n: traced(model, shape, dtype, n) for n in sizes}
        if _takes_one(model, shape, dtype):
            programs[1] = traced(model, shape, dtype, 1)
    return batch_size.is_one_program(programs)


def _takes_one(model: Callable[[Array], PyTree], shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether the model can be called with one sample; if not, it has no other answer for it."""
    try:
        traced(model, shape, dtype, 1)
    except Exception:  # Whatever the model's own code raises.
        return False
    return True


def check(model: Callable[[Array], PyTree], x: AnyArray) -> None:
    """Raises if a model's output for a sample depends on its batch.

    Args:
      model: a pytree callable.
      x: ``[n, *shape]`` samples, concrete.

    Raises:
      ValueError: outputs differ in other company, at another place or in a batch of another size.

    Cost: three traces and walks through the program; if they prove nothing, ten batches of 16
      samples, one of up to 64, and one of a single sample if the model takes it.
    """
    shape, dtype = x.shape[1:], x.dtype
    shown = proof(model, shape, dtype)
    proved = shown.alone and shown.alike
    if not (proved and _has_one_program(model, shape, dtype, {ROWS, len(x)})):
        with highest():
            _try(model, np.asarray(x), shown)


def points(lower: AnyArray, upper: AnyArray) -> Array:
    """Random points ``[8, *shape]`` of a box at which to try a model; near 0 if it is unbounded."""
    low, high = jnp.clip(jnp.asarray(lower), -2.0, None), jnp.clip(jnp.asarray(upper), None, 2.0)
    shares = np.random.default_rng(0).uniform(size=(ROWS // 2, *low.shape)).astype(low.dtype)
    inside = low[None] + shares * (high - low)[None]
    return jnp.clip(inside, jnp.asarray(lower)[None], jnp.asarray(upper)[None])


def holds(model: Callable[[Array], PyTree], x: Array, alike: bool = False) -> Array:
    """Whether outputs stay the same in other company; for use inside a trace.

    Args:
      model: a pytree callable.
      x: ``[n, *shape]`` samples.
      alike: whether outputs must also be those of a batch of one; otherwise a model may depend on
        the place in the batch.

    Returns:
      A scalar boolean.

    Cost: none if it is proved from the program; otherwise three passes of the samples.
    """
    if len(x) == 1:
        return jnp.asarray(True)
    shown = proof(model, x.shape[1:], x.dtype, len(x))
    steady = alike and shown.alike and _has_one_program(model, x.shape[1:], x.dtype, {len(x)})
    if steady or (shown.alone and not alike):
        return jnp.asarray(True)
    everyone, out = jnp.ones(len(x), bool), model(x)
    if alike:

        def alone(row: Array) -> PyTree:
            return jax.tree.map(lambda leaf: leaf[0], model(row[None]))

        one_by_one = jax.lax.map(alone, x)
        return _agree(out, one_by_one, everyone, _OTHER_PLACE)
    even, fine = jnp.arange(len(x)) % 2 == 0, jnp.asarray(True)
    mirrored = jnp.max(x) + jnp.min(x) - jnp.roll(x, 1, axis=0)
    for kept in (even, ~even):
        mixed = jnp.where(norms.spread(kept, x), x, mirrored)
        fine &= _agree(out, model(mixed), kept, _SAME_PLACE)
    return fine


def _agree(one: PyTree, other: PyTree, kept: Array, ulps: dict[int, int]) -> Array:
    """Whether outputs agree up to rounding in the rows ``kept``, booleans ``[n]``."""
    fine = jnp.asarray(True)
    for first, second in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        same = first == second
        if jnp.issubdtype(first.dtype, jnp.floating):
            size = jnp.abs(first) + jnp.max(first, axis=0) - jnp.min(first, axis=0)
            same |= jnp.abs(first - second) <= _unit(first.dtype, ulps) * size
            same |= jnp.isnan(first) & jnp.isnan(second)
        fine &= jnp.all(same | ~norms.spread(kept, first))
    return fine


def _unit(dtype: Any, ulps: dict[int, int]) -> float:
    """The relative difference allowed between two results of ``dtype``: ``ulps`` machine epsilons.

    ``ulps`` maps a dtype's size in bytes to the number of them; integers and booleans must be
    equal, so theirs is 0.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    return ulps[dtype.itemsize] * float(jnp.finfo(dtype).eps)


def _try(model: Callable[[Array], PyTree], x: np.ndarray, shown: batch_axis.BatchProof) -> None:
    """Tries samples among others, noise, extremes and copies, on even and on odd places, alone.

    ``x`` is ``[n, *shape]``, of which up to half a batch of samples is taken.
    """
    chosen = np.unique(np.linspace(0, len(x) - 1, ROWS // 2).astype(int))
    kept = np.resize(x[chosen], (ROWS // 2, *x.shape[1:]))
    low, high = x.min(), x.max()
    noise = np.random.default_rng(0).uniform(low, high, kept.shape).astype(x.dtype)
    companies = [kept[::-1], noise, *(np.full_like(kept, end) for end in (low, high))]
    even = [_outputs(model, _by_turns(kept, others))[0::2] for others in companies]
    odd = [_outputs(model, _by_turns(others, kept))[1::2] for others in companies]
    copies = [_outputs(model, np.repeat(row[None], ROWS, axis=0)) for row in kept]
    among = np.stack([rows[2 * i] for i, rows in enumerate(copies)])
    types = [leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(model, kept))]
    same, other = (max(_unit(t, ulps) for t in types) for ulps in (_SAME_PLACE, _OTHER_PLACE))
    scale = _spread(np.concatenate(even))
    tries = [("in other company", even[0], rows, same) for rows in (*even[1:], among)]
    tries += [("in other company", odd[0], rows, same) for rows in odd[1:]]
    tries += [("in another place", even[0], odd[0], other)]
    if _takes_one(model, x.shape[1:], x.dtype):
        tries += [("alone", even[0][:1], _outputs(model, kept[:1]), other)]
    if len(x) != ROWS:
        inside = chosen < _MOST
        whole = _outputs(model, x[:_MOST])[chosen[inside]]
        how = f"in a batch of {min(len(x), _MOST)}"
        tries += [(how, even[0][: len(chosen)][inside], whole, other)]
    for how, one, again, unit in tries:
        gap = _gap(one, again)
        if not np.all((gap == 0) | (gap <= unit * (np.abs(one) + scale))):  # Of two NaN it is 0.
            where = f" (samples meet in {shown.where!r})" if shown.where else ""
            if shown.alone and shown.alike:
                where = ", although no samples meet: the model uses the batch's size, len(x)"
            raise ValueError(
                "the model's output for a sample depends on the rest of its batch, so that no "
                "robustness can be reported: put BatchNorm and dropout into their inference form "
                f"(model.eval()). An output differs by {gap.max():g} {how}{where}."
            )


def _by_turns(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The two batches interleaved."""
    return np.stack([one, other], axis=1).reshape(ROWS, *one.shape[1:])


def _outputs(model: Callable[[Array], PyTree], x: np.ndarray) -> np.ndarray:
    """All outputs of the model, flattened to ``[n, m]``, float64, on the host."""
    leaves = jax.tree.leaves(outputs(model, x))
    rows = [np.asarray(leaf).reshape(len(x), -1).astype(np.float64) for leaf in leaves]
    return np.concatenate(rows, axis=1)


def _gap(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The distance of outputs, entry by entry: 0 for two NaN, inf for a NaN and a number."""
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        return np.where(same, 0.0, np.nan_to_num(np.abs(one - other), nan=np.inf))


def _spread(rows: np.ndarray) -> float:
    """The largest range of an output over the samples ``[n, m]``."""
    known = rows[:, np.isfinite(rows).all(axis=0)]
    return float(np.ptp(known, axis=0).max(initial=0.0))
