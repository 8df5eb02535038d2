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
from wdjax.checks import arguments, validate
from wdjax.core import Array, Attack, Found, Progress, PyTree, Result, Victim
from wdjax.engine import diagnosis, masks, rounds, track, trees
from wdjax.precision import full_precision


@full_precision
def search(
    attack: Attack,
    model: Callable[[Array], PyTree],
    x: PyTree,
    y: Array | np.ndarray,
    *,
    eps: Any = None,
    key: Array | None = None,
    criterion: Callable[[PyTree, Array], Array] = losses.decision_margin,
    start: Array | np.ndarray | None = None,
    only: np.ndarray | None = None,
    mask: PyTree = None,
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
    samples only, so that finished ones cost little. Both ways give the same points up to the
    rounding of floats. ``gradients`` and ``forwards`` count the passes that the attack needed for
    each sample; a device computes more, since samples that finish go along until their round ends,
    and the model is tried on some batches before.

    Every reported number is measured at the stored points. A point that is outside its ball or box
    or not finite is replaced by its sample. A sample with a non-finite output or gradient on the
    way is marked in ``fault``; such a step never counts as a flip or as the end of the attack.

    Args:
      attack: from :mod:`wdjax.attacks`, or anything else that is an :class:`~wdjax.core.Attack`.
      model: a pytree callable, :data:`~wdjax.core.Model`, ``[n, *shape] -> [n, K]``; with a custom
        ``criterion`` it may return any pytree whose leaves have the leading axis n.
      x: ``[n, *shape]`` floats inside the ball's box. For a ball :class:`~wdjax.Lp` also a pytree,
        but no list, of arrays ``[n, ...]``: the ball is one of the concatenation of its leaves, the
        model and ``start`` take such pytrees, and ``x_adv`` is one.
      y: ``[n]`` integer labels in ``0 .. K - 1``; K is the last axis of the model's first output.
      eps: radius, a number or ``[n]``, at least 0, in the units of ``x``; may be traced. Required
        unless the attack is a minimum-norm attack, where it only scales default step sizes.
      key: a typed ``jax.random.key``; required by random attacks, ignored by the others.
      criterion: ``(out, y) -> [n]``, positive where the attacker has won.
      start: ``[n, *shape]`` points to begin at instead of the samples, brought into box and ball.
        DeepFool, TrustRegion and WDA++ end at the first flip: a far start gives far flips.
      only: ``[n]`` booleans, the samples to attack; the others stay as they are.
      mask: booleans that broadcast to a sample ``[*shape]``, the coordinates that may move, such as
        those of a patch; the others stay as they are, whatever the attack, which works on the free
        coordinates alone. Of a pytree ``x``, a pytree of ``[*shape]``. Not traced.
      index: ``[n]`` integers, the samples' indices in a larger data set. Random numbers are derived
        from them, so that they depend neither on batches nor on hosts.
      skip_misclassified: leave samples unmoved, at cost 0, if the criterion already holds for them;
        at top level no pass is spent on them. With False they are attacked too, which raises the
        loss but changes no accuracy.
      history: keep the :class:`~wdjax.core.Info` of every step, ``[steps, n]``.
      diagnose: warn at top level of what makes the result doubtful (:attr:`Found.remarks`). Where
        more than half of the gradients are zero, or margins do not rise, attack up to 100 of the
        samples that survived again, by margin ascent and random search, about 60 passes each; 330
        where margins rise less than twice as much as by random noise of the same size, where
        ``eps`` is half of the box's diameter or more; 380 for a ``criterion`` of your own, which
        the loss of many an attack does not follow.
      transductive: allow a model whose outputs depend on the whole batch; inside a trace only,
        where the batch is never split.
      batch_size: samples on all devices at once; by default what memory allows, but 8 to 128 a
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
        depends on the other samples of the batch, a mask that allows nothing, or a checkpoint of
        another search.

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
    validate.check_criterion(criterion)
    x, form = trees.flattened(x, attack)
    arguments.check("key", "eps", attack=attack, x=x, y=y, eps=eps, key=key)
    validate.check_model(model)
    if form is not None:
        model = form.joined(model, x)
        start = None if start is None else form.flat("start", start)
        if mask is not None:
            mask = form.flat("mask", jax.tree.map(lambda leaf: np.asarray(leaf)[None], mask))[0]
    arguments.check(attack=attack, model=model, x=x, criterion=criterion)
    attack, samples, start, indices, attacked, sound = validate.check_search(
        attack, model, x, y, eps=eps, key=key, start=start, only=only, index=index,
        criterion=None if criterion is losses.decision_margin else criterion,
        transductive=transductive,
    )  # fmt: skip
    named, key, skip = attack, key if attack.random else None, skip_misclassified
    if mask is not None:
        attack = masks.masked(attack, mask, samples.x.shape[1:])
    victim = Victim(model, _as_pytree(criterion))
    top: dict[str, Any] = {
        "batch_size": batch_size,
        "mesh": mesh,
        "callback": callback,
        "checkpoint": checkpoint,
    }
    if sound is None:
        found, clean = rounds.search(
            attack, victim, samples, start, indices, attacked, key=key, skip_misclassified=skip,
            history=history, every=every, **top,
        )  # fmt: skip
    else:
        if not all(option is None for option in top.values()):
            raise ValueError(
                "batch_size, mesh, callback and checkpoint work at top level only; inside jit or "
                "vmap leave them out."
            )
        keys = None if key is None else track.keys(key, indices)
        found = track.scan(attack, victim, samples, start, keys, attacked, sound, skip, history)
    if diagnose and sound is None:
        again = functools.partial(
            search, model=model, x=x, y=y, criterion=criterion, mask=mask, index=index,
            diagnose=False, batch_size=batch_size, mesh=mesh,
        )  # fmt: skip
        given = found, named, clean, x, eps, again
        found = diagnosis.diagnose(
            *given, criterion=criterion, model=model, started=start is not None
        )
    return found if form is None else replace(found, x_adv=form.tree(found.x_adv))


def looked_again(
    found: Found,
    attack: Attack,
    model: Callable[[Array], PyTree],
    x: PyTree,
    y: Array | np.ndarray,
    *,
    eps: Any = None,
    key: Array | None = None,
    name: str = "",
    **options: Any,
) -> Found:
    """The result of several searches, with the second look and the warning of a single one.

    Args:
      found: their result, from :func:`search` with ``diagnose=False``: of parts of a data set one
        after another, or the best of each sample.
      attack, model, x, y, eps, key: as of one search of all samples.
      name: for the warning; by default the attack's class.
      **options: ``criterion``, ``index``, ``batch_size`` and ``mesh`` of :func:`search`.

    Returns:
      ``found``, with ``overlooked`` set if that search would have set it.

    Cost: one forward pass a sample; 60 more of up to 100 samples if gradients vanish.

    >>> from wdjax import Model
    >>> from wdjax.attacks import PGD
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = search(PGD(steps=5), model, x, y, eps=0.2, diagnose=False)
    >>> looked_again(found, PGD(steps=5), model, x, y, eps=0.2).overlooked is None
    True
    """
    how: dict[str, Any] = {"diagnose": False} | options
    nobody = np.zeros(len(found.cost), bool)
    unmoved = search(attack, model, x, y, eps=eps, key=key, only=nobody, **how)
    again = functools.partial(search, model=model, x=x, y=y, **how)
    clean, criterion = np.asarray(unmoved.margin), options.get("criterion", losses.decision_margin)
    return diagnosis.diagnose(found, attack, clean, x, eps, again, name, criterion, model)


def _as_pytree(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a plain function a pytree without leaves; returns anything else as it is."""
    plain = jax.tree_util.treedef_is_leaf(jax.tree.structure(function))
    return jax.tree_util.Partial(function) if plain else function


@full_precision
def run(
    attack: Attack,
    model: Callable[[Array], PyTree],
    x: PyTree,
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
      x: ``[n, *shape]``, or a pytree; see :func:`search`.
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
    flat, form = trees.flattened(x, attack)
    arguments.check(attack=attack, x=flat, y=y, eps=eps)
    validate.check_model(model)
    joined_model = model if form is None else form.joined(model, flat)
    criterion = options.get("criterion")
    arguments.check(attack=attack, model=joined_model, x=flat, criterion=criterion)
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

    Args:
      *found: results of :func:`search` on the same samples.

    Raises:
      ValueError: a result of :func:`run`, whose budget is spent already; no result; or results of
        other shapes, or of boxes of other diameters, as those of another norm mostly are. That the
        samples are the same is not seen, nor another norm without a box.

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
    if not found:
        raise ValueError("best_of takes at least one result of wdjax.search.")
    shapes = [jax.tree.map(jnp.shape, one.x_adv) for one in found]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"best_of takes results of the same samples, got points of {shapes}.")
    limits = [one.limit for one in found if one.limit is not None]
    if not validate.traced(*limits):
        farthest = [float(np.max(np.asarray(limit), initial=0.0)) for limit in limits]
        if not np.allclose(farthest, farthest[:1], equal_nan=True):
            raise ValueError(
                "best_of takes results of one norm and box, got results whose costs may be up to "
                f"{', '.join(f'{far:g}' for far in farthest)}."
            )
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
    return joined(found, replace(nearest, done=hits, radius=found.radius), hits)


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
        radius=jax.tree.map(jnp.maximum, one.radius, other.radius),
    )
