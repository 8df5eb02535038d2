"""The one driver that carries an attack through and measures what it found."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import losses, norms, parallel, slots
from wdjax.core import Array, Attack, Info, Knobs, Progress, Result
from wdjax.slots import Samples
from wdjax.validate import check_number, check_samples, check_shapes, traced

_FLOATS = 2**16
"""On a CPU, the largest array of a batch at most: it should stay in the cache."""
_WAVE = 1024
"""Samples whose states are kept at once, or eight batches if those are more."""
_CHUNK = 10
"""Steps a dispatch on an accelerator."""


def sample_keys(key, indices):
    """One key a sample from its global index, so that batching never changes the randomness."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(indices)


def run(
    attack: Attack,
    model: Callable[[Array], Array],
    x: Array | np.ndarray,
    y: Array | np.ndarray,
    *,
    eps,
    key=None,
    skip_misclassified: bool = True,
    batch_size: int | None = None,
    mesh=None,
    callback: Callable[[Progress], Any] | None = None,
    **knobs,
) -> Result:
    r"""Runs an attack and measures what it found.

    Inside a trace (``jit``, ``vmap``, ``grad``) every stage is one ``lax.scan``. At top level the
    host advances jitted steps (CPU, where a convolution inside a loop body runs several times
    slower) or chunks of steps (GPU) and spends none on samples that have nothing left to do; there
    ``batch_size``, ``mesh`` and ``callback`` apply. Both ways give the same points up to the
    rounding of floats; ``gradients`` and ``forwards`` are what was spent.

    Every reported number is measured at the stored points. A point outside its ball or box, or not
    finite, is replaced by the clean sample.

    Args:
      attack: from a factory in :mod:`wdjax.attacks`.
      model: a pytree callable, :data:`Model`; ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` floats inside the attack's box.
      y: ``[n]`` integer labels in ``0 .. K - 1``.
      eps: budget, at least 0, in the units of ``x``; may be traced, so ``vmap`` over radii works.
      key: a typed ``jax.random.key``; required by random attacks, ignored by the others.
      skip_misclassified: keep samples that the model gets wrong already clean, at cost 0: nothing
        is left to gain in accuracy, and at top level no pass is spent on them. With False they are
        attacked too, for the sake of the loss.
      batch_size: samples on the device at once; by default all, but on a CPU, where more are not
        faster, 16 to 128 a device by the model's size. They are slots: a sample that has nothing
        left to do makes room for the next (:mod:`wdjax.slots`), and one program serves all.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; batches are padded to its size and split.
      callback: called with a :class:`Progress` after every chunk of steps; a true value ends the
        search, and what has been found so far is measured.
      **knobs: the attack's own numbers, such as ``kappa`` and ``step_size``; may be traced.

    Returns:
      A :class:`Result` for the ``n`` samples.

    Raises:
      ValueError: bad shapes, dtypes or labels, samples outside the box or not finite, ``eps``
        negative, unknown knobs, a missing key, or a model that returns a non-finite logit.

    Cost: two forward passes a sample besides the attack's own.

    >>> from wdjax import Model
    >>> from wdjax.attacks import pgd
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> result = run(pgd(norm=jnp.inf, steps=5), model, x, y, eps=0.2)
    >>> float(result.accuracy), result.success.tolist()
    (0.5, [True, False])
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    knobs = _settle(attack, eps, knobs, x.dtype)
    if attack.random and key is None:
        raise ValueError(f"{attack.name} is random: pass key=jax.random.key(seed).")
    if not attack.random:
        key = None
    if traced(model, x, y, knobs, key):
        if batch_size is not None or mesh is not None or callback is not None:
            raise ValueError(
                "batch_size, mesh and callback work at top level only; inside jit or vmap leave "
                "them out."
            )
        check_shapes(model, x, y)
        y = y.astype(jnp.int32)
        keys = None if key is None else sample_keys(key, jnp.arange(len(y)))
        return _run_traced(attack, model, x, y, keys, knobs, skip_misclassified)
    x, y = check_samples(model, x, y, attack.box)
    driver = _Driver(attack, model, knobs, key, mesh, callback)
    return driver.run(x, y, batch_size, skip_misclassified)


def _settle(attack, eps, knobs, dtype) -> Knobs:
    """Checks the knobs and gives them the type of the samples, so that states keep it."""
    known = dict(attack.knobs)
    unknown = sorted(set(knobs) - set(known))
    if unknown:
        raise ValueError(
            f"{attack.name} has no knob {', '.join(unknown)}; it has {', '.join(known) or 'none'}."
        )
    settled = {"eps": check_number("eps", eps)}
    for name, default in attack.knobs:
        value = knobs.get(name, default)
        if value is not None:
            least = 1.0 if name == "kappa" else 0.0
            settled[name] = check_number(name, value, least)
    dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else float
    return {name: jnp.asarray(value, dtype) for name, value in settled.items()}


def _measure(attack, model, x, y, clean_logits, x_adv, knobs, skip):
    """Puts infeasible and useless points back to the clean sample and measures the rest."""
    reach = attack.reach(**knobs).astype(x.dtype)
    flat = x_adv.reshape(len(x), -1)
    inside = jnp.all(jnp.isfinite(flat), axis=-1)
    inside &= norms.lp_norm(x_adv - x, attack.norm) <= reach * (1 + 1e-6)
    if attack.box is not None:
        low, high = attack.box
        inside &= jnp.all((flat >= low) & (flat <= high), axis=-1)
    logits = model(jnp.where(norms.spread(inside, x), x_adv, x))
    clean = jnp.argmax(clean_logits, axis=-1) == y
    success = jnp.argmax(logits, axis=-1) != y
    useless = ~inside | (~clean if skip else ~clean & ~success)
    x_adv = jnp.where(norms.spread(useless, x), x, x_adv)
    logits = jnp.where(useless[:, None], clean_logits, logits)
    margin = losses.margin(logits, y)
    finite = jnp.all(jnp.isfinite(logits) & jnp.isfinite(clean_logits), axis=-1)
    return {
        "x_adv": x_adv,
        "cost": norms.lp_norm(x_adv - x, attack.norm),
        "clean": clean,
        "success": (jnp.argmax(logits, axis=-1) != y) & finite,
        "margin": jnp.where(finite, margin, jnp.nan),
    }


def _advance_traced(attack, model, x, y, state, knobs):
    infos = []
    for stage in attack.stages:
        if stage.length:
            body = functools.partial(_scanned, stage.step, model, x, y, knobs)
            state, info = jax.lax.scan(body, state, length=stage.length)
            infos.append(info)
    return state, jax.tree.map(lambda *parts: jnp.concatenate(parts), *infos)


def _scanned(step, model, x, y, knobs, state, _):
    return step(model, x, y, state, **knobs)


def _run_traced(attack, model, x, y, keys, knobs, skip):
    logits = model(x)
    state = attack.init(model, x, y, logits, keys, **knobs)
    state, info = _advance_traced(attack, model, x, y, state, knobs)
    x_adv = attack.point(x, state, **knobs)
    measured = _measure(attack, model, x, y, logits, x_adv, knobs, skip)
    converged = _converged(attack, state, measured["clean"], skip)
    return _result(attack, measured, info, converged, knobs)


def _converged(attack, state, clean, skip):
    """What the attack says; a skipped sample has nothing left to do."""
    return attack.converged(state) | (skip & ~clean)


def _result(attack, measured, info, converged, knobs):
    weight = attack.weigh(measured["cost"], measured["success"], **knobs)
    forwards = jnp.sum(info.forwards, axis=0)
    return Result(
        **measured,
        weight=weight.astype(measured["cost"].dtype),
        converged=converged,
        gradients=jnp.sum(info.gradients, axis=0),
        forwards=forwards + jnp.where(forwards > 0, 2, 1),
        info=info,
    )


@jax.jit
def _logits(model, x):
    return model(x)


def _widest(model, x):
    """Numbers in the largest array that the model computes for one sample."""

    def sizes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (var.aval.size for var in eqn.outvars)
            for value in jax.tree.leaves(list(eqn.params.values())):
                yield from sizes(value) if hasattr(value, "eqns") else ()

    one = jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    return max(sizes(_logits.trace(model, one).jaxpr), default=x[0].size)


@functools.partial(jax.jit, static_argnums=0)
def _start(attack, model, x, y, logits, keys, knobs):
    return attack.init(model, x, y, logits, keys, **knobs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _finish(attack, skip, model, batch, knobs):
    x, y, logits, state = batch
    x_adv = attack.point(x, state, **knobs)
    measured = _measure(attack, model, x, y, logits, x_adv, knobs, skip)
    return measured, _converged(attack, state, measured["clean"], skip)


def _rows(indices, size):
    """The indices in rows of equal size, ``[count, size]``; the last one repeats its last entry."""
    count = -(-len(indices) // size)
    return np.pad(indices, (0, count * size - len(indices)), mode="edge").reshape(count, size)


@jax.jit
def _concatenate(parts):
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)


class _Driver(NamedTuple):
    """The host's side of :func:`run`: which samples, in which batches."""

    attack: Attack
    model: Any
    knobs: Knobs
    key: Any
    mesh: Any
    callback: Callable[[Progress], Any] | None

    def run(self, x, y, batch_size, skip):
        n = len(y)
        limit = self._limit(x, batch_size)
        self = self._replace(model=parallel.replicate(self.model, self.mesh))
        logits = self._classify(x, limit)
        _refuse_nan(logits)
        correct = np.argmax(np.asarray(logits), axis=-1) == np.asarray(y)
        chosen = np.flatnonzero(correct) if skip else np.arange(n)
        total, taken, stopped = chosen.size * self.attack.steps, 0, not chosen.size
        if stopped:
            chosen = np.arange(1)  # Nothing to attack: one sample keeps the shapes of the result.
        size = self._size(chosen.size, limit)
        most = max(8, _WAVE // size) * size
        waves = [chosen[i : i + most] for i in range(0, chosen.size, most)]

        def report(wave, settled, place, info):
            nonlocal taken, stopped
            taken += settled
            if self.callback is not None:
                stopped = bool(self.callback(Progress(taken, total, wave[place], info)))
            return stopped

        found = []
        for wave in waves:
            count = 0 if stopped else len(wave)
            tell = functools.partial(report, wave)
            found.append(self._search(_rows(wave, size), count, skip, x, y, logits, tell))
        places = [np.pad(wave, (0, -len(wave) % size), constant_values=n) for wave in waves]
        rows = np.concatenate(places)
        result = _collect(self.attack, _concatenate(found), rows, x, y, logits, self.knobs)
        _refuse_nan(result.margin[:, None])
        _refuse_overspending(self.attack, result, float(self.knobs["eps"]))
        return result

    def _limit(self, x, batch_size):
        """Samples in a batch at most: what the user says, else all, but few on a CPU."""
        if batch_size is None:
            few = min(max(_FLOATS // _widest(self.model, x), 16), 128)
            few *= 1 if self.mesh is None else self.mesh.size
            batch_size = few if jax.default_backend() == "cpu" else len(x)
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive integer or None, got {batch_size!r}.")
        return parallel.padded_size(min(batch_size, len(x)), self.mesh)

    def _size(self, n, limit):
        """Samples in a batch: the limit, whatever their number, so that programs are reused.

        Few batches are made equal, in sixteenths of the limit, since the last one would idle.
        """
        count = -(-n // limit)
        if count > 3:
            return limit
        step = max(1, limit // 16)
        return parallel.padded_size(min(limit, -(-n // (count * step)) * step), self.mesh)

    def _classify(self, x, size):
        rows = _rows(np.arange(len(x)), size)
        batches = (parallel.shard(slots.take(x, row), self.mesh) for row in rows)
        parts = [_logits(self.model, batch) for batch in batches]
        return _concatenate([parallel.gather(part, self.mesh) for part in parts])[: len(x)]

    def _search(self, rows, count, skip, x, y, logits, report):
        """Attacks the samples ``rows``, ``[batches, size]``, of which the first ``count`` count."""
        starts = [self._start(row, x, y, logits) for row in rows]
        samples, info = slots.carry(
            self.attack,
            self.model,
            parallel.shard(_concatenate(starts), self.mesh),
            self.knobs,
            slots=rows.shape[1],
            count=count,
            chunk=1 if jax.default_backend() == "cpu" else _CHUNK,
            mesh=self.mesh,
            report=report,
        )
        parts = []
        for row in _rows(np.arange(rows.size), rows.shape[1]):
            batch = parallel.shard(slots.take(samples, row), self.mesh)
            parts.append(_finish(self.attack, skip, self.model, batch, self.knobs))
        measured, converged = parallel.gather(_concatenate(parts), self.mesh)
        # Samples run along axis 0 here, so that one rule batches and scatters all leaves.
        return measured, jax.tree.map(np.transpose, info), converged

    def _start(self, row, x, y, logits):
        keys = None if self.key is None else sample_keys(self.key, row)
        batch = slots.take((x, y, logits), row)
        keys, x, y, logits = parallel.shard((keys, *batch), self.mesh)
        state = _start(self.attack, self.model, x, y, logits, keys, self.knobs)
        return Samples(x, y, logits, state)


@functools.partial(jax.jit, static_argnums=0)
def _collect(attack, found, chosen, x, y, logits, knobs):
    """The attacked samples among the skipped ones, which stay clean at cost 0."""
    margin = losses.margin(logits, y)
    rows = jnp.broadcast_to(margin[:, None], (len(y), found[1].margin.shape[1]))
    nothing = jnp.zeros(rows.shape, jnp.int32)
    skipped = (
        {
            "x_adv": x,
            "cost": jnp.zeros_like(margin),
            "clean": jnp.zeros(len(y), bool),
            "success": jnp.ones(len(y), bool),
            "margin": margin,
        },
        Info(rows, nothing, nothing),
        jnp.ones(len(y), bool),
    )
    measured, info, converged = jax.tree.map(
        lambda rest, part: rest.at[chosen].set(part, mode="drop"), skipped, found
    )
    info = jax.tree.map(jnp.transpose, info)
    return _result(attack, measured, info, converged, knobs)


def _refuse_nan(values):
    bad = np.flatnonzero(~np.all(np.isfinite(np.asarray(values)), axis=-1))
    if bad.size:
        raise ValueError(
            f"the model returned logits that are not finite for {bad.size} samples, first at index "
            f"{bad[0]}; no robustness can be reported for such a model."
        )


def _refuse_overspending(attack, result, eps):
    """The last line of defence: the coupling cost of Corollary C.2, in float64."""
    cost, weight = np.asarray(result.cost, float), np.asarray(result.weight, float)
    if attack.order == math.inf:
        spent = cost[weight > 0].max(initial=0.0)
    else:
        spent = float(np.mean(weight * cost**attack.order)) ** (1 / attack.order)
    if spent > eps * (1 + 1e-5):
        raise RuntimeError(
            f"{attack.name} spent {spent:g} of a budget of {eps:g}; this is a defect of the attack."
        )
