"""Entry points of every attack: search for adversarial points, then spend a budget on them."""

import functools
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from wdjax import losses, norms, transport
from wdjax.checks import arguments, independence, validate
from wdjax.core import Array, Attack, Found, Progress, PyTree, Result, Samples, Stage, Victim
from wdjax.engine import diagnosis, identity, loop, rounds, track
from wdjax.engine.track import Given


def search(
    attack: Attack,
    model: Callable[[Array], PyTree],
    x: Array | np.ndarray,
    y: Array | np.ndarray,
    *,
    eps: Any = None,
    key: Array | None = None,
    criterion: Callable[[PyTree, Array], Array] = losses.decision_margin,
    start: Array | np.ndarray | None = None,
    only: np.ndarray | None = None,
    index: np.ndarray | None = None,
    skip_misclassified: bool = True,
    history: bool = False,
    diagnose: bool = True,
    transductive: bool = False,
    batch_size: int | None = None,
    mesh: Mesh | None = None,
    callback: Callable[[Progress], Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
) -> Found:
    r"""Looks for adversarial points and measures what it finds.

    Inside a trace (``jit``, ``vmap``, ``grad``) every stage is one ``lax.scan`` over all samples.
    At top level the search goes in rounds (:mod:`wdjax.engine.rounds`) over batches of unfinished
    samples only, so that finished ones cost nothing. Both ways give the same points up to the
    rounding of floats; ``gradients`` and ``forwards`` count the passes that were really made.

    Every reported number is measured at the stored points. A point that is outside its ball or box
    or not finite is replaced by its sample. A sample with a non-finite output or gradient on the
    way is marked in ``fault``; such a step never counts as a flip or as the end of the attack.

    Args:
      attack: from :mod:`wdjax.attacks`, or anything else that is an :class:`~wdjax.core.Attack`.
      model: a pytree callable, :data:`~wdjax.core.Model`, ``[n, *shape] -> [n, K]``; with a custom
        ``criterion`` it may return any pytree whose leaves have the leading axis n.
      x: ``[n, *shape]`` floats inside the ball's box.
      y: ``[n]`` integer labels in ``0 .. K - 1``; K is the last axis of the model's first output.
      eps: radius, a number or ``[n]``, at least 0, in the units of ``x``; may be traced. Required
        unless the attack is a minimum-norm attack, where it only scales default step sizes.
      key: a typed ``jax.random.key``; required by random attacks, ignored by the others.
      criterion: ``(out, y) -> [n]``, positive where the attacker has won.
      start: ``[n, *shape]`` points to begin at instead of the samples.
      only: ``[n]`` booleans, the samples to attack; the others stay as they are.
      index: ``[n]`` integers, the samples' places in a larger data set. Random numbers are derived
        from them, so that they depend neither on batches nor on hosts.
      skip_misclassified: leave samples unmoved, at cost 0, if the criterion already holds for them;
        at top level no pass is spent on them. With False they are attacked too, which raises the
        loss but changes no accuracy.
      history: keep the :class:`~wdjax.core.Info` of every step, ``[steps, n]``.
      diagnose: warn at top level of what makes the result doubtful (:attr:`Found.remarks`). Where
        more than half of the gradients are zero, or margins do not rise, attack up to 100 of the
        samples that survived again, by margin ascent and random search, about 60 passes each.
      transductive: allow a model whose outputs depend on the whole batch; inside a trace only,
        where the batch is never split.
      batch_size: samples on all devices at once; by default what memory allows, but 16 to 128 a
        device on a CPU, where larger batches are not faster.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; batches are split over it.
      callback: called with a :class:`~wdjax.core.Progress` after every round; if it returns a true
        value the search ends, and the points found so far are measured.
      checkpoint: a folder in which the search is saved and from which it is resumed; see
      every: minimum number of seconds between two writings of the checkpoint.

    Returns:
      A :class:`~wdjax.core.Found` for the ``n`` samples. Inside a trace nothing can be raised:
      there invalid samples or radii get cost and margin NaN, and count as neither correct nor
      attacked.

    Raises:
      ValueError: bad shapes, dtypes or labels, samples outside the box or not finite, ``eps``
        negative or missing, a missing key, a model whose output for a sample is not finite or
        depends on the other samples of the batch, or a checkpoint of another search.

    Cost: two forward passes a sample besides the attack's own, and one batch to check that outputs
      do not depend on other samples; memory for the attack's state of all samples.

    >>> from wdjax import Model
    >>> from wdjax.attacks import PGD
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = search(PGD(steps=5), model, x, y, eps=0.2)
    >>> found.success.tolist(), found.fault.tolist()
    ([True, False], [False, False])
    """
    arguments.check("key", "eps", attack=attack, model=model, x=x, y=y, eps=eps, key=key)
    _check_needs(attack, eps, key)
    own = None if criterion is losses.decision_margin else criterion
    x, y = validate.on_device(x), y if validate.traced(y) else np.asarray(y)
    validate.check_model(model)
    victim = Victim(model, _as_pytree(criterion))
    attack = validate.settle(attack, x.dtype)
    key = key if attack.random else None
    skip = skip_misclassified
    if validate.traced(attack, victim, x, y, eps, key, start, only) or validate.staged():
        if not all(option is None for option in (batch_size, mesh, callback, checkpoint)):
            raise ValueError(
                "batch_size, mesh, callback and checkpoint work at top level only; inside jit or "
                "vmap leave them out."
            )
        classes = validate.check_shapes(model, x, y, own)
        given = _given(x, jnp.asarray(y).astype(jnp.int32), eps, start, index)
        sound = validate.sound(attack.ball, given.x, given.y, given.eps, classes)
        if not transductive:
            sound &= independence.holds(victim.model, x)
        found = _traced(attack, victim, given, key, only, skip, history, sound)
        return replace(found, limit=jnp.full_like(found.cost, _limit(attack, x)))
    if transductive:
        raise ValueError(
            "a transductive model needs its whole batch, which is kept inside jit only: wrap the "
            "search in jax.jit, or play a game (wdjax.transductive)."
        )
    x, y = validate.check_samples(model, x, y, attack.ball.box, own)
    eps, start = validate.check_radii(eps, len(y)), validate.check_like("start", start, x)
    given, only = _given(x, y, eps, start, index), validate.check_mask("only", only, len(y))
    plan, begun = rounds.begin(attack, victim, given, key, only, skip, history, batch_size, mesh)
    last = _carry(plan, begun, given, key, callback, checkpoint, every)
    found = rounds.finish(plan, last, len(y), skip)
    limit = jax.device_put(np.full(len(y), _limit(attack, x), x.dtype))
    found = replace(found, limit=limit)
    if not diagnose:
        return found
    again = functools.partial(
        search, model=model, x=x, y=y, criterion=criterion, index=index, diagnose=False,
        batch_size=batch_size, mesh=mesh,
    )  # fmt: skip
    return diagnosis.diagnose(found, attack, plan.value[: len(y)], eps, again)


def _limit(attack: Attack, x: Array) -> float:
    """The largest cost of any point in the ball's box; inf if the ball has no ``diameter``."""
    return attack.ball.diameter(x.shape[1:]) if hasattr(attack.ball, "diameter") else np.inf


def _check_needs(attack: Attack, eps: Any, key: Any) -> None:
    """Raises if the attack needs a radius or a key that was not given."""
    name = type(attack).__name__
    if eps is None and attack.budget != "none":
        raise ValueError(f"{name} looks inside a ball: pass its radius, eps=...")
    if attack.random and key is None:
        raise ValueError(f"{name} is random: pass key=jax.random.key(seed).")


def _as_pytree(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a plain function a pytree without leaves; returns anything else as it is."""
    plain = jax.tree_util.treedef_is_leaf(jax.tree.structure(function))
    return jax.tree_util.Partial(function) if plain else function


def _given(x: Array, y: Array, eps: Any, start: Any, index: Any) -> Given:
    places = validate.on_device(np.arange(len(y)) if index is None else index)
    for name, rows in (("index", places), ("start", start)):
        if rows is not None and len(rows) != len(y):
            raise ValueError(f"{name} must have one row a sample, {len(y)}, got {len(rows)}.")
    radii = None if eps is None else _radii(eps, x)
    points = None if start is None else validate.on_device(start, x.dtype)
    return Given(x, y, radii, points, places)


def _radii(eps: Any, x: Array) -> Array:
    """Radii ``[n]`` in the dtype of ``x``; NumPy broadcasts concrete ones, so nothing compiles."""
    if validate.traced(eps):
        return jnp.broadcast_to(jnp.asarray(eps, x.dtype), len(x))
    return jax.device_put(np.broadcast_to(np.asarray(eps, x.dtype), len(x)))


def _carry(
    plan: rounds.Plan,
    begun: rounds.Search,
    given: Given,
    key: Array | None,
    callback: Callable[[Progress], Any] | None,
    checkpoint: str | PathLike[str] | None,
    every: float,
) -> rounds.Search:
    """Runs all rounds of a search, with callback and checkpoint.

    ``begun`` is the search before its first step; returns it after the last one, or after the
    round in which the callback returned a true value.
    """

    n, mark, (attack, victim, samples) = len(given.y), b"", plan.problem

    def report(search: rounds.Search) -> Any:
        return None if callback is None else callback(rounds.progress(plan, search, n))

    about: dict[str, Any] = {"attack": attack, "criterion": victim.criterion, "samples": n}
    if checkpoint is not None:
        lengths = [(stage.length, stage.cycles) for stage in attack.stages]
        traced = track.programs(attack, victim, given, key)
        mark = identity.digest(traced, lengths, plan.problem, begun)
        about["largest eps"] = None if samples.eps is None else float(jnp.max(samples.eps))
    return loop.carry(
        begun,
        functools.partial(rounds.advance, plan),
        functools.partial(rounds.finished, plan),
        report=report,
        checkpoint=checkpoint,
        every=every,
        identity=mark,
        about=about,
    )


def run(
    attack: Attack,
    model: Callable[[Array], PyTree],
    x: Array | np.ndarray,
    y: Array | np.ndarray,
    *,
    eps: Any,
    order: float = 1,
    kappa: Any = None,
    **options: Any,
) -> Result:
    r"""Searches and spends: an adversarial distribution in the Wasserstein ball of radius ``eps``.

    The search (:func:`search`) finds an adversarial point for each sample; spending
    (:func:`~wdjax.transport.spend`) decides how much of each sample's mass moves there within the
    Wasserstein budget ``eps``.

    Args:
      attack: the attack that looks for points.
      model: see :func:`search`.
      x: ``[n, *shape]``
      y: ``[n]``
      eps: the Wasserstein radius, a number in the units of ``x``.
      order: Wasserstein order p, at least 1 or inf.
      kappa: every sample sends ``1 / kappa`` of its mass, which may then move ``kappa^(1/p) eps``
        far; at least 1, may be traced. By default 1, a point-wise attack; for minimum-norm attacks
        the default is the knapsack of :func:`~wdjax.transport.spend`.
      **options: of :func:`search`.

    Returns:
      A :class:`~wdjax.core.Result`.

    Raises:
      ValueError: what :func:`search` and :func:`~wdjax.transport.spend` refuse.

    Cost: that of :func:`search`.

    Source: Le et al., equation 11 and Corollary C.2.

    >>> from wdjax import Model
    >>> from wdjax.attacks import PGD
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.8, 0.2]]), jnp.array([0, 0])
    >>> float(run(PGD(steps=5), model, x, y, eps=0.2).accuracy)
    0.5
    >>> float(run(PGD(steps=5), model, x, y, eps=0.2, kappa=2.0).accuracy)
    0.5
    """
    arguments.check(attack=attack, model=model, x=x, y=y, eps=eps)
    order = validate.check_order(order)
    eps = validate.check_number("eps", eps)
    if kappa is None and attack.budget != "none":
        kappa = 1.0
    reach = eps
    if attack.budget == "sample":
        reach = eps * validate.check_number("kappa", kappa, 1.0) ** (1 / order)
    found = search(attack, model, x, y, eps=reach, **options)
    return transport.spend(found, eps=eps, order=order, kappa=kappa)


def best_of(*found: Found) -> Found:
    """The best point of several searches of the same samples, per sample; passes add up.

    A flip is better than none, a flip of lower cost better than one of higher cost, and where no
    search has a flip the larger margin wins.

    >>> from wdjax import Model
    >>> from wdjax.attacks import PGD
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4]]), jnp.array([0])
    >>> near, far = (search(PGD(steps=5), model, x, y, eps=eps) for eps in (0.125, 0.25))
    >>> float(best_of(far, near).cost[0])
    0.125
    """
    if any(isinstance(one, Result) for one in found):
        raise ValueError("best_of takes results of wdjax.search; spend the budget after it.")
    return functools.reduce(_better, found)


def _better(one: Found, other: Found) -> Found:
    """The better point of each sample: a flip, the nearer flip, or the larger criterion."""
    both = one.success & other.success
    wins = jnp.where(both, other.cost < one.cost, other.success)
    wins |= ~one.success & ~other.success & (other.margin > one.margin)
    return joined(one, other, wins)


def within(found: Found, nearest: Found, eps: Any) -> Found:
    """The result of a search within a radius, improved by flips inside it from another search.

    A minimum-norm search, or one with another radius, may have found a flip within ``eps`` that the
    search within ``eps`` missed; without it the two reported accuracies would contradict each
    other. Passes of both add up.

    Args:
      found: a search within ``eps``.
      nearest: another search of the same samples.
      eps: the radius, a number or ``[n]``.

    >>> from wdjax import Model
    >>> from wdjax.attacks import PGD, WDAPlusPlus
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> lazy = search(PGD(steps=1, step_size=0.01), model, x, y, eps=0.2)
    >>> within(lazy, search(WDAPlusPlus(), model, x, y), 0.2).success.tolist()
    [True, False]
    """
    hits = nearest.success & (nearest.cost <= eps) & ~found.success
    return joined(found, replace(nearest, done=hits), hits)


def joined(one: Found, other: Found, wins: Array) -> Found:
    """Takes ``other`` where ``wins`` (``[n]`` booleans), else ``one``; passes add up."""

    def choose(first: Array, second: Array) -> Array:
        return jnp.where(norms.spread(wins, first), second, first)

    bare, rival = (replace(found, history=None, overlooked=None) for found in (one, other))
    fault = one.fault | other.fault
    return replace(
        jax.tree.map(choose, bare, rival),
        done=(one.done | other.done) & ~fault,
        fault=fault,
        zeros=one.zeros + other.zeros,
        gradients=one.gradients + other.gradients,
        forwards=one.forwards + other.forwards,
    )


def _traced(
    attack: Attack,
    victim: Victim,
    given: Given,
    key: Array | None,
    only: Any,
    skip_misclassified: bool,
    history: bool,
    sound: Array,
) -> Found:
    """The search inside a trace: each stage is a scan over all samples.

    ``sound`` and ``only`` are ``[n]`` booleans; where ``sound`` is False the sample's numbers
    become NaN. With ``history`` the result holds an :class:`~wdjax.core.Info` of ``[steps, n]``
    leaves.
    """
    x, y = given.x, given.y
    out, value, known = track.evaluate(victim, x, y)
    samples = Samples(x, y, given.eps, out)
    problem = track.Problem(attack, victim, samples)
    keys = None if key is None else track.keys(key, given.places)
    moving = track.begin(problem, given.start, keys)
    attacked = jnp.ones(len(y), bool) if only is None else jnp.asarray(only)
    log: list[Any] = []
    if skip_misclassified:
        attacked &= ~(value > 0)
    for stage in attack.stages:

        def step(moving: track.Track, _: None, stage: Stage = stage) -> tuple[track.Track, Any]:
            moving, _recurs, info = track.step(stage, victim, samples, moving)
            if stage.couple is not None:
                coupled = stage.couple(samples, moving.state, attacked)
                moving = moving._replace(state=coupled)
            mute = info._replace(
                gradients=jnp.where(attacked, info.gradients, 0),
                forwards=jnp.where(attacked, info.forwards, 0),
                zeros=jnp.where(attacked, info.zeros, 0),
                fault=info.fault & attacked,
            )
            return moving, mute if history else None

        if stage.length:
            moving, seen = jax.lax.scan(step, track.enter(attack, moving), length=stage.length)
            log.append(seen)
    reached, shown = track.reach(problem, moving)
    seen = track.evaluate(victim, shown, y)[1:]
    found = track.measure(jnp, x, reached, value, seen, attacked, moving.totals, skip_misclassified)
    if history:
        found = replace(found, history=jax.tree.map(lambda *rows: jnp.concatenate(rows), *log))
    return _poison(found, sound & known)


def _poison(found: Found, sound: Array) -> Found:
    """NaN for samples, ``[n]``, that would be refused at top level: they must not look robust."""
    return replace(
        found,
        correct=found.correct & sound,
        cost=jnp.where(sound, found.cost, jnp.nan),
        margin=jnp.where(sound, found.margin, jnp.nan),
        success=found.success & sound,
        done=found.done & sound,
        fault=found.fault | ~sound,
    )
