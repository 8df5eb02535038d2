r"""Certificates of single samples: bounds of the margins over the whole ball around each of them.

They hold for the float program (the model in floats of its own precision, with matrix products at
the highest precision, summed in any order), and for exact arithmetic too.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from wdjax import distinct, loops, norms, parallel
from wdjax.bounds import margins, moved_mass, region
from wdjax.bounds.margins import METHODS, Method
from wdjax.bounds.region import Domain, Norm
from wdjax.certify import branch, ranges
from wdjax.certify.ranges import EntryRange
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import FORWARD, forward_only, host_only
from wdjax.core import AnyArray, Array, Classifier
from wdjax.engine import batching
from wdjax.lipschitz import margin
from wdjax.precision import full_precision, highest


class _Bracket(NamedTuple):
    """The state of the search for each sample's radius, ``[n]`` arrays."""

    best: Array
    """The largest verified radius."""
    margin: Array
    """The least margin's bound at ``best``."""
    high: Array
    """The smallest radius that was not verified, inf if there is none."""
    deficit: Array
    """How far below 0 the least margin's bound was at ``high``."""
    trial: Array
    """The radius to try next."""


@full_precision
def margin_bounds(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: Norm,
    eps: ArrayLike,
    box: EntryRange = (0.0, 1.0),
    method: Method = "crown",
    seconds: float = 10.0,
    batch_size: int = 64,
    mesh: Mesh | None = None,
) -> Array:
    r"""Lower bounds of every margin ``z_y - z_j`` over the ball of radius ``eps`` in the box.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, which treats each sample alone.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf; or a :class:`wdjax.image.ImageWasserstein` for images
        ``[n, height, width, channels]``, whose mass moves between pixels, anywhere.
      eps: radius, a number or ``[n]``, in the units of ``x`` or of that ball; in a norm also one of
        every entry, ``[*shape]`` with a first axis of length 1 or n: ``||(x' - x) / eps|| <= 1``,
        and an entry with 0 does not move. May be traced.
      box: ``(low, high)``, numbers or ``[*shape]``, or None for no box.
      method: one of :data:`METHODS`; "sdp-crown" in norm 2 only, "bab" at top level only.
      seconds: how long branch and bound works on a sample at most, without compilation.
      batch_size: samples on all devices at once, at top level; bounds the memory.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; batches are split over it, and
        branch and bound's samples are shared out to its devices.

    Returns:
      ``[n, K]`` bounds in logits, ``inf`` at ``j = y``; sound against rounding.

    Raises:
      ValueError: bad samples, a primitive without a rule, or branch and bound inside a trace.

    Warns:
      UserWarning: branch and bound had nothing left to split, as in a model that sorts;
        :func:`verify` lists the samples.

    The bounds are lowered for rounding, relative to the size of the logits: an offset common to all
    logits costs about 1e-5 of it. Certify logits, not probabilities: bounds are looser behind a
    softmax.

    With "interval", "crown" and "sdp-crown" it has gradients in ``model``, ``x`` and ``eps``, which
    are those of the returned bound with some of its numbers held fixed: the dual multiplier of an
    l1 or l2 ball, and the slopes of the lines of sines. "auto" and "alpha" have derivatives in
    forward mode only.

    Cost: a few forward passes, ``K - 1`` backward passes a sample, and for every unstable neuron
      two through the layers before it; a gradient about five times that.

    Source: Zhang et al. [zhang2018], CROWN; Xu et al. [xu2021], alpha; Wang et al. [wang2021], bab;
      Chiu et al. [chiu2025], SDP-CROWN; of the program, with its rounding. In image-Wasserstein
      balls this library's own, by the dual of the transport problem.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1]]), jnp.array([0])
    >>> [round(low, 3) for low in margin_bounds(model, x, y, norm=jnp.inf, eps=0.1)[0].tolist()]
    [inf, 0.6]
    """
    ranges.check(model, x, y, norm, box, eps=eps)
    how: dict[str, Any] = {"norm": norm, "eps": eps, "box": box, "batch_size": batch_size}
    low, ended, _ = searched(model, x, y, method=method, seconds=seconds, mesh=mesh, **how)
    _tell(ended)
    return low


def searched(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: Norm,
    eps: ArrayLike,
    box: EntryRange,
    method: Method,
    seconds: float,
    batch_size: int,
    mesh: Mesh | None = None,
) -> tuple[Array, npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
    """:func:`margin_bounds`; how branch and bound ended, ``[n]`` indices in ``branch.ENDS``, and
    the points ``[n, *shape]`` that it found; both None for other methods."""
    ball = ranges.domain(norm, box, x)
    validate.check_choice("method", method, METHODS)
    if not seconds > 0:
        raise ValueError(f"seconds must be a number above 0, got {seconds!r}.")
    eps, scale = ranges.radii(eps, x)
    if method == "bab":
        instead = 'method="crown", which can be traced'
        host_only('method="bab"', instead, model, x, y, eps, scale)
    x, y, sound = validate.gate(model, x, y, ball.box, beside=(eps, scale), alike=True)
    _check_mesh(mesh, sound)
    if sound is not None:
        low = bounds(model, x, y, eps, scale, ball, method)
        return _with_gradient(jnp.where(sound[:, None], low, -jnp.inf), method), None, None
    cheap: Method = "auto" if method == "bab" else method
    options = ("ball", ball), ("method", cheap)
    low = in_batches(bounds, options, model, (x, y, eps, scale), batch_size, mesh)
    if method != "bab":
        return low, None, None

    return branched(model, x, y, eps, scale, low, ball, seconds, mesh)


def branched(
    model: Classifier,
    x: Array,
    y: Array,
    eps: Array,
    scale: Array | None,
    low: AnyArray,
    ball: Domain,
    seconds: float,
    mesh: Mesh | None,
) -> tuple[Array, npt.NDArray[Any], npt.NDArray[Any]]:
    """Bounds ``low`` ``[n, K]`` tightened by branch and bound, ``seconds`` a sample, on all devices
    of the mesh; how it ended, ``[n]`` indices in ``branch.ENDS``, and points ``[n, *shape]``."""

    def worker(device: jax.Device) -> Callable[[int], Any]:
        given: Any = model, x, y, low, scale
        net, *rows = given if mesh is None else jax.device_put(given, device)
        search = branch.BranchAndBound(net, ball, seconds)

        def close(i: int) -> Any:
            one: Any = (None if leaf is None else leaf[i : i + 1] for leaf in rows)
            point, label, known, unit = one
            return search.close(point, label, float(eps[i]), known, unit)

        return close

    closed, ended, points = zip(*parallel.each(worker, len(y), mesh))
    return jnp.concatenate(closed), np.concatenate(ended), np.concatenate(points)


def _tell(ended: npt.NDArray[Any] | None) -> None:
    """Warns of samples whose branch and bound ended early, with nothing left to split.

    ``ended`` ``[n]`` are indices in ``branch.ENDS``, None for other methods. The warning is at the
    line that called the public function.
    """
    if ended is None or not (stuck := np.sum(ended == branch.ENDS.index("nothing to split"))):
        return
    arguments.warn(
        f"branch and bound had nothing left to split in {stuck} of {len(ended)} samples and ended "
        "before its time: it splits the operands of nonlinear functions that have lines (see "
        "docs/primitives.md). They keep the bounds found so far."
    )


@full_precision
def certified(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: Norm,
    eps: ArrayLike,
    box: EntryRange = (0.0, 1.0),
    method: Method = "crown",
    seconds: float = 10.0,
    batch_size: int = 64,
    mesh: Mesh | None = None,
) -> Array:
    r"""Whether the model provably returns ``y`` on the whole ball of radius ``eps`` in the box.

    Args:
      model: as in :func:`margin_bounds`.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: as in :func:`margin_bounds`.
      eps: as in :func:`margin_bounds`.
      box: as in :func:`margin_bounds`.
      method: one of :data:`METHODS`; "sdp-crown" in norm 2 only, "bab" at top level only.
      seconds: as in :func:`margin_bounds`.
      batch_size: samples on all devices at once, at top level.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; batches are split over it.

    Returns:
      ``[n]`` bool; their mean is a lower bound of the robust accuracy.

    Raises:
      ValueError: as :func:`margin_bounds`.

    Cost: that of :func:`margin_bounds`.

    Source: as :func:`margin_bounds`.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.55, 0.45]]), jnp.array([0, 0])
    >>> certified(model, x, y, norm=jnp.inf, eps=0.1).tolist()
    [True, False]
    """
    ranges.check(model, x, y, norm, box, eps=eps)
    how: dict[str, Any] = {"norm": norm, "eps": eps, "box": box, "batch_size": batch_size}
    low, ended, _ = searched(model, x, y, method=method, seconds=seconds, mesh=mesh, **how)
    _tell(ended)
    return jnp.all(low > 0, axis=-1)


@full_precision
def radius(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: Norm,
    box: EntryRange = (0.0, 1.0),
    scale: AnyArray | None = None,
    steps: int = 10,
    method: Method = "crown",
    batch_size: int = 64,
    mesh: Mesh | None = None,
) -> Array:
    r"""Lower bounds of every sample's distance to the nearest misclassified point of the box.

    Starts from the linearised distance and bisects with the certificate of :func:`certified`; only
    radii that were verified are returned.

    Args:
      model: as in :func:`margin_bounds`.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: as in :func:`margin_bounds`.
      box: as in :func:`margin_bounds`.
      scale: ``[*shape]`` with a first axis of length 1 or n, at least 0: the distance is then
        ``||(x' - x) / scale||``, and an entry with 0 does not move.
      steps: number of bisections, at the secant through the bracket's margins.
      method: one of :data:`METHODS` but "bab", which works at one radius only.
      batch_size: samples on all devices at once, at top level.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; batches are split over it.

    Returns:
      ``[n]`` radii in the units of ``x``, of ``scale``, or of the ball: 0 where nothing is
      certified, ``inf`` where the whole box is, or all images of the same mass.

    Its gradient is that of the least margin divided by the margin's slope in the radius (implicit
    function theorem), and 0 where the radius is 0 or ``inf``; methods as for :func:`margin_bounds`.

    Raises:
      ValueError: bad samples, a primitive without a rule, ``steps`` below 0 or ``method="bab"``.

    Cost: ``steps + 1`` times :func:`margin_bounds`.

    Source: Zhang et al. [zhang2018], CROWN; Xu et al. [xu2021], alpha.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> x, y = jnp.array([[0.9, 0.1], [0.1, 0.9]]), jnp.array([0, 0])
    >>> [round(r, 3) for r in radius(model, x, y, norm=2).tolist()]
    [0.566, 0.0]
    """
    ranges.check(model, x, y, norm, box)
    ball = ranges.domain(norm, box, x)
    scale = ranges.scales(scale, norm, x)
    steps = validate.check_count("steps", steps, 0)
    validate.check_choice("method", method, METHODS)
    if method == "bab":
        raise ValueError('radius searches with every method but "bab"; "alpha" is the tightest.')
    x, y, sound = validate.gate(model, x, y, ball.box, beside=scale, alike=True)
    _check_mesh(mesh, sound)
    if sound is not None:
        found = _root(model, x, y, scale, ball, steps, method)
        return _with_gradient(jnp.where(sound, found, 0.0), method)
    options = ("ball", ball), ("steps", steps), ("method", method)
    return in_batches(_search, options, model, (x, y, scale), batch_size, mesh)


def _with_gradient(value: Array, method: Method) -> Array:
    """The value; one that refuses reverse-mode gradients, for methods that optimise slopes."""
    return (
        value
        if method in ("interval", "crown", "sdp-crown")
        else forward_only(value, f'method="crown", or {FORWARD}')
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5, 6))
def _root(
    model: Classifier,
    x: Array,
    y: Array,
    scale: Array | None,
    ball: Domain,
    steps: int,
    method: Method,
) -> Array:
    """``[B]``: the radii of :func:`_search`, differentiable as the least margin's root."""
    return _search(model, x, y, scale, ball, steps, method)


@_root.defjvp
def _(
    ball: Domain,
    steps: int,
    method: Method,
    primals: tuple[Classifier, Array, Array, Array | None],
    tangents: tuple[Any, Any, Any, Any],
) -> tuple[Array, Array]:
    """The implicit function theorem: ``dr = -(dm at a fixed radius) / (dm / dr)``, ``[B]`` each.

    Radii that are 0 or the whole box do not change with the model: their tangent is 0.
    """
    model, x, y, scale = primals
    found = _search(model, x, y, scale, ball, steps, method)
    inside = (found > 0) & jnp.isfinite(found)
    eps = jnp.where(inside, found, 0.0)

    def least(model: Classifier, x: Array, scale: Array | None, eps: Array) -> Array:
        return -norms.largest(-bounds(model, x, y, eps, scale, ball, method))

    changes = tangents[0], tangents[1], tangents[3]
    _, moved = jax.jvp(lambda m, x, s: least(m, x, s, eps), (model, x, scale), changes)
    _, steep = jax.jvp(lambda eps: least(model, x, scale, eps), (eps,), (jnp.ones_like(eps),))
    inside &= ~(steep >= 0)  # NaN stays.
    return found, jnp.where(inside, -moved / jnp.where(inside, steep, 1.0), 0.0)


def _search(
    model: Classifier,
    x: Array,
    y: Array,
    scale: Array | None,
    ball: Domain,
    steps: int,
    method: Method,
) -> Array:
    """``[n]``: the certified radii of :func:`radius`, by margin bounds at ``steps`` trial radii.

    0 where the sample itself is not verified; inf where the whole box is.
    """
    most = ball.diameter(x.shape[1:], scale)
    clean = bounds(model, x, y, jnp.zeros(len(y), x.dtype), scale, ball, method)
    least = jnp.min(clean, axis=-1)
    trial = _guess(model, x, y, scale, clean, ball.norm, most)
    zero = jnp.zeros_like(trial)
    bracket = _Bracket(zero, least, jnp.full_like(trial, jnp.inf), zero, trial)

    def step(_: int, bracket: _Bracket) -> _Bracket:
        low = bounds(model, x, y, bracket.trial, scale, ball, method)
        return _narrower(bracket, low, most)

    if validate.traced(model, x, y):
        bracket = loops.fori_loop(0, steps, step, bracket)
    else:
        for i in range(steps):
            bracket = step(i, bracket)
    best = jnp.where(least > 0, bracket.best, 0.0)
    return jnp.where(best >= most, jnp.inf, best)


@functools.partial(distinct.jit, static_argnums=5)
def _guess(
    model: Classifier,
    x: Array,
    y: Array,
    scale: Array | None,
    low: Array,
    norm: Norm,
    most: ArrayLike,
) -> Array:
    """``[n]``: the first radius to try, just below the distance to the linearised boundary.

    ``low`` ``[n, K]`` are the margins at the samples. The guess is at most ``most``, the domain's
    diameter; if none is finite and positive, it is 1, or the diameter if that is less.
    """

    def slopes(xi: Array, yi: Array) -> Array:
        differences = margin.contrasts(yi, low.shape[1], xi.dtype)
        pull = jax.vjp(lambda t: model(t[None])[0].astype(t.dtype), xi)[1]
        return jax.vmap(pull)(differences)[0]

    pulls = jax.vmap(slopes)(x, y)
    pulls = pulls if scale is None else pulls * scale[:, None]
    if moves := moved_mass.moves_mass(norm):
        steep = jax.vmap(lambda pull, xi: moved_mass.slopes(pull, xi, norm))(pulls, x)
    else:
        steep = jax.vmap(lambda pull: norms.lp_norm(pull, norms.dual(norm)))(pulls)
    ratio = jnp.where(steep > 0, low / jnp.where(steep > 0, steep, 1.0), jnp.inf)
    ratio = jnp.maximum(ratio, 0.0) ** (1 / norm.power) if moves else ratio
    rivals = jnp.arange(low.shape[1])[None] != y[:, None]
    guess = jnp.minimum(jnp.min(jnp.where(rivals, ratio, jnp.inf), axis=-1), most)
    usual = jnp.minimum(most, 1.0)
    return jnp.where(jnp.isfinite(guess) & (guess > 0), (1 - 4e-4) * guess, usual)


@distinct.jit
def _narrower(bracket: _Bracket, low: Array, most: ArrayLike) -> _Bracket:
    """The bracket after bounds ``low`` ``[n, K]`` of the margins at ``trial``, and the next trial.

    Before the first failure the radius is doubled. Then it is the secant's root between ``best``
    and ``high``, at least a tenth of the way from either; the margin at an end that stays is halved
    (Illinois rule). No trial exceeds ``most``.
    """
    least, (best, margin, high, deficit, trial) = jnp.min(low, axis=-1), bracket
    good = least > 0
    farther = good & (trial > best)
    best, margin = jnp.where(farther, trial, best), jnp.where(farther, least, 0.5 * margin)
    high = jnp.where(good, jnp.where(trial >= high, jnp.inf, high), jnp.minimum(high, trial))
    deficit = jnp.where(good, 0.5 * deficit, jnp.maximum(-least, 0.0))
    share = jnp.clip(jnp.nan_to_num(margin / (margin + deficit), nan=0.5), 0.1, 0.9)
    between = best + share * (jnp.where(jnp.isinf(high), 0.0, high) - best)
    trial = jnp.where(jnp.isinf(high), 2 * best, between)
    return _Bracket(best, margin, high, deficit, jnp.minimum(trial, most))


@functools.partial(distinct.jit, static_argnames=("ball", "method"))
@highest()
def bounds(
    model: Classifier,
    x: Array,
    y: Array,
    eps: Array,
    scale: Array | None,
    ball: Domain,
    method: Method,
) -> Array:
    """``[n, K]``: lower bounds of the margins within ``eps``, ``[n]``, in units of ``scale``."""
    around = region.ball(x, eps, ball.norm, ball.box, scale)
    return margins.lower(model, around, y, method)


def _check_mesh(mesh: Mesh | None, sound: Array | None) -> None:
    """Raises for a mesh inside a trace; ``sound`` is None outside of one."""
    if mesh is not None and sound is not None:
        raise ValueError(
            "mesh works at top level only; inside jit leave it out, and split the samples by "
            "jax.shard_map."
        )


def in_batches(
    fn: Callable[..., Array],
    options: tuple[tuple[str, Any], ...],
    model: Classifier,
    arrays: tuple[AnyArray | None, ...],
    batch_size: int,
    mesh: Mesh | None,
) -> Array:
    """``fn(model, *arrays, **options)`` of arrays ``[n, ...]`` or None, in batches of one size.

    So ``fn``, which acts on each row alone, is compiled once. ``batch_size`` counts the samples on
    all devices of the mesh.
    """
    assert arrays[0] is not None
    n, parts = len(arrays[0]), list[Array]()
    parallel.check_same(arrays, mesh)
    model = parallel.replicate(model, mesh)

    def rest(size: int) -> Array:
        for start in range(sum(map(len, parts)), n, size):
            piece = tuple(None if a is None else a[start : start + size] for a in arrays)
            piece = parallel.pad(piece, parallel.padded_size(size, mesh))
            if mesh is None:
                found = fn(model, *piece, **dict(options))
            else:
                piece = parallel.shard(piece, mesh)
                found = parallel.gather(_split(fn, options, mesh, model, piece), mesh)
            parts.append(jax.block_until_ready(found[: min(size, n - start)]))
        return jnp.concatenate(parts)

    size = min(validate.check_count("batch_size", batch_size), n)
    return batching.halving(rest, size, mesh)


@functools.partial(distinct.jit, static_argnums=(0, 1, 2))
def _split(
    fn: Callable[..., Array],
    options: tuple[tuple[str, Any], ...],
    mesh: Mesh,
    model: Classifier,
    arrays: tuple[AnyArray, ...],
) -> Array:
    """``fn(model, *arrays, **options)`` with each device working on rows of its own alone."""
    rows = PartitionSpec(parallel.AXIS)
    part = functools.partial(fn, **dict(options))
    specs = (PartitionSpec(), *(rows for _ in arrays))
    return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=rows)(model, *arrays)
