"""Models, attacks and :func:`run`, the one driver that carries an attack through."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import losses, norms, parallel

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
    """``length`` repetitions of ``step(model, x, y, state, **knobs) -> (state, info)``."""

    step: Callable[..., tuple[Any, Info]]
    length: int


class Attack(NamedTuple):
    """An attack as pure functions of batches; what changes the program is bound inside.

    A single-stage attack is an ``init`` and a ``step``; an attack whose program changes on the way
    (WDA probes all rivals, then follows one) is a sequence of stages that share a state.
    """

    name: str
    init: Callable[..., Any]
    """``(model, x, y, keys, **knobs) -> state``; ``keys`` are per-sample, or None."""
    stages: tuple[Stage, ...]
    point: Callable[[Any], Array]
    """``state -> [n, *shape]``: the adversarial points."""
    reach: Callable[..., Array]
    """``(**knobs) ->`` the largest cost a single point may have."""
    weigh: Callable[..., Array]
    """``(cost, success, **knobs) -> [n]``: the mass moved, from the whole data set."""
    done: Callable[[Any], Array] | None
    """``state -> [n]`` bool: the samples that further steps of this stage leave as they are."""
    knobs: tuple[tuple[str, Any], ...]
    """Names and defaults of the numbers that may be traced, besides ``eps``."""
    norm: float
    order: float
    box: tuple[float, float] | None
    random: bool


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


def sample_keys(key, n, offset=0):
    """One key a sample from its global index, so that batching never changes the randomness."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(offset + jnp.arange(n))


def run(
    attack: Attack,
    model: Callable[[Array], Array],
    x: Array,
    y: Array,
    *,
    eps,
    key=None,
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
    finite, is replaced by the clean sample; a sample that the model misclassifies already, and that
    the attack did not keep misclassified, is kept clean at cost 0.

    Args:
      attack: from a factory in :mod:`wdjax.attacks`.
      model: a pytree callable, :data:`Model`; ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` floats inside the attack's box.
      y: ``[n]`` integer labels in ``0 .. K - 1``.
      eps: budget, at least 0, in the units of ``x``; may be traced, so ``vmap`` over radii works.
      key: a typed ``jax.random.key``; required by random attacks, ignored by the others.
      batch_size: samples on the device at once; all by default. The last batch is padded, so one
        program serves all.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; batches are padded to it and split over it.
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
        keys = None if key is None else sample_keys(key, len(y))
        return _run_traced(attack, model, x, y, keys, knobs)
    x, y = check_samples(model, x, y, attack.box)
    return _run_hosted(attack, model, x, y, key, knobs, batch_size, mesh, callback)


def traced(*trees) -> bool:
    """Whether any leaf is a tracer, that is, whether we are inside ``jit``, ``vmap`` or ``grad``."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def check_shapes(model, x, y):
    """Checks what shapes and dtypes can tell; returns the number of classes."""
    if jnp.ndim(x) < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x must be floats [n, *shape] in the box, got {x.dtype}{list(jnp.shape(x))}; "
            "convert uint8 images with x.astype(np.float32) / 255."
        )
    if jnp.shape(y) != jnp.shape(x)[:1] or not jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(
            f"y must be integer labels [{jnp.shape(x)[0]}], got {y.dtype}{list(jnp.shape(y))}."
        )
    if len(y) == 0:
        raise ValueError("x and y are empty: pass at least one sample.")
    try:
        logits = jax.eval_shape(model, jax.ShapeDtypeStruct(x.shape, x.dtype))
    except TypeError as error:
        raise ValueError(
            f"the model does not accept x of shape {list(x.shape)}: {error}"
        ) from error
    if getattr(logits, "ndim", 0) != 2 or logits.shape[0] != len(y) or logits.shape[1] < 2:
        got = getattr(logits, "shape", type(logits).__name__)
        raise ValueError(f"the model must return logits [{len(y)}, K] with K >= 2, got {got}.")
    return logits.shape[1]


def check_samples(model, x, y, box=(0.0, 1.0)):
    """Checks concrete samples at the front door; returns them as JAX arrays, labels as int32."""
    x, y = jnp.asarray(x), jnp.asarray(y)
    classes = check_shapes(model, x, y)
    low, high = float(jnp.min(x)), float(jnp.max(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int(jnp.argmax(~jnp.all(jnp.isfinite(x.reshape(len(x), -1)), axis=-1)))
        raise ValueError(f"x[{bad}] holds a value that is not finite; remove or repair it.")
    if box is not None and (low < box[0] or high > box[1]):
        raise ValueError(
            f"x spans [{low:g}, {high:g}], outside the box [{box[0]:g}, {box[1]:g}]; rescale it, "
            "or give the attack another box (box=None for none)."
        )
    smallest, largest = int(jnp.min(y)), int(jnp.max(y))
    if smallest < 0 or largest >= classes:
        raise ValueError(
            f"labels span {smallest}..{largest}, but the model has the classes 0..{classes - 1}."
        )
    return x, y.astype(jnp.int32)


def check_number(name, value, least=0.0):
    """Checks a concrete scalar budget or knob; a traced one passes."""
    if traced(value):
        return value
    array = np.asarray(value)
    if array.ndim != 0 or not np.issubdtype(array.dtype, np.number):
        raise ValueError(f"{name} must be a single number, got {value!r}; vmap over several.")
    if not (np.isfinite(array) and array >= least):
        raise ValueError(f"{name} must be finite and at least {least:g}, got {value!r}.")
    return value


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


def _measure(attack, model, x, y, clean_logits, x_adv, knobs):
    """Puts infeasible points back to the clean sample and measures the rest."""
    reach = attack.reach(**knobs).astype(x.dtype)
    flat = x_adv.reshape(len(x), -1)
    inside = jnp.all(jnp.isfinite(flat), axis=-1)
    inside &= norms.lp_norm(x_adv - x, attack.norm) <= reach * (1 + 1e-6)
    if attack.box is not None:
        low, high = attack.box
        inside &= jnp.all((flat >= low) & (flat <= high), axis=-1)
    keep = inside.reshape((-1,) + (1,) * (x.ndim - 1))
    logits = model(jnp.where(keep, x_adv, x))
    clean = losses.margin(clean_logits, y) < 0
    success = losses.margin(logits, y) >= 0
    useless = ~inside | (~clean & ~success)
    x_adv = jnp.where(useless.reshape(keep.shape), x, x_adv)
    logits = jnp.where(useless[:, None], clean_logits, logits)
    margin = losses.margin(logits, y)
    finite = jnp.all(jnp.isfinite(logits) & jnp.isfinite(clean_logits), axis=-1)
    return {
        "x_adv": x_adv,
        "cost": norms.lp_norm(x_adv - x, attack.norm),
        "clean": clean,
        "success": (margin >= 0) & finite,
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


def _run_traced(attack, model, x, y, keys, knobs):
    clean_logits = model(x)
    state = attack.init(model, x, y, keys, **knobs)
    state, info = _advance_traced(attack, model, x, y, state, knobs)
    measured = _measure(attack, model, x, y, clean_logits, attack.point(state), knobs)
    return _result(attack, measured, info, _done(attack, state, len(y)), knobs)


def _done(attack, state, n):
    return jnp.zeros(n, bool) if attack.done is None else attack.done(state)


def _result(attack, measured, info, converged, knobs):
    weight = attack.weigh(measured["cost"], measured["success"], **knobs)
    return Result(
        **measured,
        weight=weight.astype(measured["cost"].dtype),
        converged=converged,
        gradients=jnp.sum(info.gradients, axis=0),
        forwards=jnp.sum(info.forwards, axis=0) + 2,
        info=info,
    )


@functools.partial(jax.jit, static_argnums=0)
def _start(attack, model, x, y, keys, knobs):
    return attack.init(model, x, y, keys, **knobs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _advance(step, length, model, x, y, state, knobs):
    if length == 1:
        state, info = step(model, x, y, state, **knobs)
        return state, jax.tree.map(lambda leaf: leaf[None], info)
    body = functools.partial(_scanned, step, model, x, y, knobs)
    return jax.lax.scan(body, state, length=length)


@functools.partial(jax.jit, static_argnums=0)
def _finish(attack, model, x, y, state, knobs):
    measured = _measure(attack, model, x, y, model(x), attack.point(state), knobs)
    return measured, _done(attack, state, len(y))


@functools.partial(jax.jit, static_argnums=0)
def _collect(attack, measured, info, converged, knobs):
    return _result(attack, measured, info, converged, knobs)


def _chunk_length():
    """Steps a dispatch: one on the CPU, where XLA is slow inside loops; many elsewhere."""
    return 1 if jax.default_backend() == "cpu" else 10


def _run_hosted(attack, model, x, y, key, knobs, batch_size, mesh, callback):
    n = len(y)
    size = n if batch_size is None else batch_size
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"batch_size must be a positive integer or None, got {batch_size!r}.")
    size = parallel.padded_size(min(size, n), mesh)
    model = parallel.replicate(model, mesh)
    parts = []
    for batch, start in enumerate(range(0, n, size)):
        samples = parallel.pad((x[start : start + size], y[start : start + size]), size)
        # Padding repeats the last sample, its key included; indices past n are never random draws.
        keys = None if key is None else sample_keys(key, size, start)
        xb, yb, keys = parallel.shard((*samples, keys), mesh)
        notify = callback and functools.partial(_notify, callback, batch, -(-n // size))
        part = _attack_batch(attack, model, xb, yb, keys, knobs, notify)
        parts.append(parallel.gather(part, min(size, n - start), mesh))
    measured, info, converged = (_join(piece) for piece in zip(*parts))
    _refuse_nan(measured["margin"])
    result = _collect(attack, measured, info, converged, knobs)
    _refuse_overspending(attack, result, float(knobs["eps"]))
    return result


def _attack_batch(attack, model, x, y, keys, knobs, notify):
    state = _start(attack, model, x, y, keys, knobs)
    steps = sum(stage.length for stage in attack.stages)
    infos, step, stopped = [], 0, False
    for stage in attack.stages:
        left = stage.length
        while left and not stopped:
            length = min(left, _chunk_length())
            state, info = _advance(stage.step, length, model, x, y, state, knobs)
            infos.append(info)
            left -= length
            step += length
            stopped = bool(notify and notify(step, steps, info))
            if attack.done is not None and bool(jnp.all(attack.done(state))):
                break
        if left:
            infos.append(_nothing_done(info, left))
    measured, converged = _finish(attack, model, x, y, state, knobs)
    # Samples run along axis 0 everywhere, so that one gather serves all leaves.
    info = jax.tree.map(lambda *rows: jnp.concatenate(rows).T, *infos)
    return measured, info, converged


def _nothing_done(info, length):
    """Rows for steps that an early stop spared: the last margin, no passes."""
    rows = jax.tree.map(lambda leaf: jnp.repeat(leaf[-1:], length, axis=0), info)
    return rows._replace(
        gradients=jnp.zeros_like(rows.gradients), forwards=jnp.zeros_like(rows.forwards)
    )


def _notify(callback, batch, batches, step, steps, info):
    return callback(Progress(batch, batches, step, steps, info))


def _join(pieces):
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *pieces)
    return jax.tree.map(jnp.transpose, joined) if isinstance(joined, Info) else joined


def _refuse_nan(margin):
    bad = np.flatnonzero(np.isnan(np.asarray(margin)))
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
