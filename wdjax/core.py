"""Models, attacks and :func:`run`, the one driver that carries an attack through."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import losses, norms, parallel
from wdjax.validate import check_number, check_samples, check_shapes, traced

Model = jax.tree_util.Partial
"""A classifier ``logits = model(x)``: ``Model(apply, params)`` with ``apply(params, x)`` pure.

A pytree whose leaves are the parameters, so it passes through ``jit``, ``vmap`` and ``grad`` as an
argument: new parameters never recompile, and stacked parameters are a bank of models.

>>> model = Model(lambda params, x: x @ params["w"], {"w": jnp.eye(2)})
>>> model(jnp.ones((1, 2))).tolist()
[[1.0, 1.0]]
"""

Array = jax.Array
Knobs = dict[str, Any]


class Info(NamedTuple):
    """What one step did to every sample: ``[n]`` leaves, ``[steps, n]`` in a :class:`Result`."""

    margin: Array
    """``max_{j != y} z_j - z_y`` where the step started."""
    gradients: Array
    """Backward passes spent on the sample."""
    forwards: Array
    """Forward passes spent on the sample."""


class Stage(NamedTuple):
    """``length`` repetitions of ``step(model, x, y, state, **knobs) -> (state, info)``.

    ``x`` are the clean samples and ``y`` their labels. ``done(state)`` tells, ``[n]``, which of
    them further steps of this stage leave as they are; when all are, the host stops early.
    """

    step: Callable[..., tuple[Any, Info]]
    length: int
    done: Callable[[Any], Array] | None = None


def _whole_mass(cost, success, *, eps, **knobs):
    """A point-wise attack moves every sample whole."""
    return jnp.ones_like(cost)


def _within_eps(*, eps, **knobs):
    """A point-wise attack moves no sample by more than ``eps``."""
    return eps


def _never(state):
    """An attack that always takes all its steps."""
    return jnp.zeros(len(jax.tree.leaves(state)[0]), bool)


class Attack(NamedTuple):
    """An attack as pure functions of batches; what changes the program is bound inside.

    A single-stage attack is an ``init`` and a ``step``; an attack whose program changes on the way
    (WDA probes all rivals, then follows one) is a sequence of stages that share a state, a pytree
    of ``[n, ...]`` leaves. The defaults are those of a point-wise attack.
    """

    name: str
    init: Callable[..., Any]
    """``(model, x, y, logits, keys, **knobs) -> state``: logits at ``x``, keys a sample or None."""
    stages: tuple[Stage, ...]
    point: Callable[..., Array]
    """``(x, state, **knobs) -> [n, *shape]``: the adversarial points."""
    norm: float
    order: float = math.inf
    box: tuple[float, float] | None = (0.0, 1.0)
    knobs: tuple[tuple[str, Any], ...] = ()
    """Names and defaults of the numbers that may be traced, besides ``eps``."""
    random: bool = False
    reach: Callable[..., Array] = _within_eps
    """``(**knobs) ->`` the largest cost a single point may have."""
    weigh: Callable[..., Array] = _whole_mass
    """``(cost, success, **knobs) -> [n]``: the mass moved, decided over the whole data set."""
    converged: Callable[[Any], Array] = _never
    """``state -> [n]`` bool: the samples for which nothing was left to do."""


class Result(NamedTuple):
    """An adversarial distribution and its measurements; a plain pytree of ``[n]`` leaves.

    The distribution is the paper's equation 11: sample i keeps ``1 - weight[i]`` of its mass and
    sends ``weight[i] = 1 / kappa_i`` to ``x_adv[i]``.
    """

    x_adv: Array
    weight: Array
    cost: Array
    """``||x_adv - x||_r``, measured."""
    clean: Array
    """Whether ``x`` is classified correctly."""
    success: Array
    """Whether ``x_adv`` is misclassified, recomputed from the stored point."""
    margin: Array
    """Margin at ``x_adv``: positive where misclassified."""
    converged: Array
    """Whether the attack had nothing left to do for the sample."""
    gradients: Array
    forwards: Array
    info: Info

    @property
    def accuracy(self):
        """Accuracy under the adversarial distribution (Appendix E of the paper)."""
        kept = (1 - self.weight) * self.clean
        return jnp.mean(kept + self.weight * ~self.success, axis=-1)


class Progress(NamedTuple):
    """Where :func:`run` is, for callbacks."""

    batch: int
    batches: int
    step: int
    steps: int
    info: Info
    """Of the steps since the last call, ``[chunk, batch size]``, still on the device."""


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
    slower) or whole stages (GPU), one batch after the other; that is where ``batch_size``, ``mesh``
    and ``callback`` apply. Both ways give the same result up to the rounding of floats.

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
      batch_size: samples on the device at once; all by default. The last batch is padded, so one
        program serves all.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; batches are padded to its size and split.
      callback: called with a :class:`Progress` after every chunk of steps; a true value ends the
        current batch's search early.
      **knobs: the attack's own numbers, such as ``kappa`` and ``step_size``; may be traced.

    Returns:
      A :class:`Result` for the ``n`` samples.

    Raises:
      ValueError: bad shapes, dtypes or labels, samples outside the box or not finite, ``eps``
        negative, unknown knobs, a missing key, or a model that returns a non-finite logit.

    Cost: two forward passes a sample besides the attack's own.

    >>> from wdjax.attacks import pgd
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> result = run(pgd(norm=jnp.inf, steps=5), model, x, y, eps=0.2)
    >>> float(result.accuracy), result.success.tolist()
    (0.5, [True, False])
    """
    knobs = _settle(attack, eps, knobs)
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
        keys = None if key is None else sample_keys(key, jnp.arange(len(y)))
        return _run_traced(attack, model, x, y, keys, knobs, skip_misclassified)
    x, y = check_samples(model, x, y, attack.box)
    driver = _Driver(attack, model, knobs, key, mesh, callback)
    return driver.run(x, y, batch_size, skip_misclassified)


def _settle(attack, eps, knobs) -> Knobs:
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
            settled[name] = jnp.asarray(check_number(name, value, least), float)
    settled["eps"] = jnp.asarray(eps, float)
    return settled


def _measure(attack, model, x, y, clean_logits, x_adv, knobs, skip):
    """Puts infeasible and useless points back to the clean sample and measures the rest."""
    reach = attack.reach(**knobs).astype(x.dtype)
    flat = x_adv.reshape(len(x), -1)
    inside = jnp.all(jnp.isfinite(flat), axis=-1)
    inside &= norms.lp_norm(x_adv - x, attack.norm) <= reach * (1 + 1e-6)
    if attack.box is not None:
        low, high = attack.box
        inside &= jnp.all((flat >= low) & (flat <= high), axis=-1)
    keep = inside.reshape((-1,) + (1,) * (x.ndim - 1))
    logits = model(jnp.where(keep, x_adv, x))
    clean = jnp.argmax(clean_logits, axis=-1) == y
    success = jnp.argmax(logits, axis=-1) != y
    useless = ~inside | (~clean if skip else ~clean & ~success)
    x_adv = jnp.where(useless.reshape(keep.shape), x, x_adv)
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
    return _result(attack, measured, info, attack.converged(state), knobs)


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


@functools.partial(jax.jit, static_argnums=0)
def _start(attack, model, x, y, logits, keys, knobs):
    return attack.init(model, x, y, logits, keys, **knobs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _advance(step, length, model, x, y, state, knobs):
    if length == 1:
        state, info = step(model, x, y, state, **knobs)
        return state, jax.tree.map(lambda leaf: leaf[None], info)
    body = functools.partial(_scanned, step, model, x, y, knobs)
    return jax.lax.scan(body, state, length=length)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _finish(attack, skip, model, x, y, logits, state, knobs):
    x_adv = attack.point(x, state, **knobs)
    return _measure(attack, model, x, y, logits, x_adv, knobs, skip), attack.converged(state)


def _batches(indices, size, mesh):
    """The indices in rows of equal size, ``[count, size]``; the last one repeats its last entry."""
    size = parallel.padded_size(size, mesh)
    count = -(-len(indices) // size)
    return np.pad(indices, (0, count * size - len(indices)), mode="edge").reshape(count, size)


def _chunk_length():
    """Steps a dispatch: one on the CPU, where XLA is slow inside loops; many elsewhere."""
    return 1 if jax.default_backend() == "cpu" else 10


class _Driver(NamedTuple):
    """The host's side of :func:`run`: which samples, in which batches, one step after the other."""

    attack: Attack
    model: Any
    knobs: Knobs
    key: Any
    mesh: Any
    callback: Callable[[Progress], Any] | None

    def run(self, x, y, batch_size, skip):
        n = len(y)
        size = n if batch_size is None else batch_size
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"batch_size must be a positive integer or None, got {batch_size!r}.")
        self = self._replace(model=parallel.replicate(self.model, self.mesh))
        logits = self._batched(self._classify, _batches(np.arange(n), min(size, n), self.mesh), x)
        logits = logits if len(logits) == n else logits[:n]
        _refuse_nan(logits)
        correct = np.argmax(np.asarray(logits), axis=-1) == np.asarray(y)
        chosen = np.flatnonzero(correct) if skip else np.arange(n)
        if not chosen.size:
            chosen = np.arange(1)  # Nothing to attack: one sample keeps the shapes of the result.
        # Sizes in steps of n / 16, so that a few more or less attacked samples do not recompile.
        step = max(1, n // 16)
        batches = _batches(chosen, min(size, -(-chosen.size // step) * step), self.mesh)
        found = self._batched(functools.partial(self._attack_batch, skip), batches, x, y, logits)
        result = _collect(self.attack, found, batches.ravel(), x, y, logits, self.knobs)
        _refuse_nan(result.margin[:, None])
        _refuse_overspending(self.attack, result, float(self.knobs["eps"]))
        return result

    def _batched(self, function, batches, *arrays):
        """Concatenates ``function(progress, keys, *rows)`` over the batches, ``[count, size]``."""
        parts = []
        for number, picked in enumerate(batches):
            whole = np.array_equal(picked, np.arange(len(arrays[0])))
            rows = arrays if whole else [array[picked] for array in arrays]
            keys = None if self.key is None else sample_keys(self.key, picked)
            keys, *rows = parallel.shard((keys, *rows), self.mesh)
            part = function((number, len(batches)), keys, *rows)
            parts.append(parallel.gather(part, self.mesh))
        if len(parts) == 1:
            return parts[0]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)

    def _classify(self, progress, keys, x):
        return _logits(self.model, x)

    def _attack_batch(self, skip, progress, keys, x, y, logits):
        attack, model, knobs = self.attack, self.model, self.knobs
        state = _start(attack, model, x, y, logits, keys, knobs)
        total = sum(stage.length for stage in attack.stages)
        infos, taken, stopped = [], 0, False
        for stage in attack.stages:
            left = stage.length
            while left and not stopped:
                length = min(left, _chunk_length())
                state, info = _advance(stage.step, length, model, x, y, state, knobs)
                infos.append(info)
                left, taken = left - length, taken + length
                if self.callback is not None:
                    batch, batches = progress
                    seen = Progress(batch, batches, taken, total, info)
                    stopped = bool(self.callback(seen))
                if stage.done is not None and bool(jnp.all(stage.done(state))):
                    break
            if left:
                taken += left
                infos.append(_spared(infos[-1], left))
        measured, converged = _finish(attack, skip, model, x, y, logits, state, knobs)
        # Samples run along axis 0 here, so that one rule batches and scatters all leaves.
        info = jax.tree.map(lambda *rows: jnp.concatenate(rows).T, *infos)
        return measured, info, converged


def _spared(info, length):
    """Rows for steps that an early stop spared: the last margin, no passes."""
    rows = jax.tree.map(lambda leaf: jnp.repeat(leaf[-1:], length, axis=0), info)
    return _without_passes(rows)


def _without_passes(info):
    return info._replace(
        gradients=jnp.zeros_like(info.gradients), forwards=jnp.zeros_like(info.forwards)
    )


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
        lambda rest, part: rest.at[chosen].set(part), skipped, found
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
