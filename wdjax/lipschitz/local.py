r"""Upper bounds of the margins' Lipschitz constants on balls and on whole domains.

They hold for the exact function of the model's weights, in real arithmetic.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from wdjax import distinct, norms, parallel
from wdjax.balls import Lp
from wdjax.bounds import margins, region
from wdjax.bounds.region import Box
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import LIPSCHITZ_TWIN, host_only
from wdjax.core import Classifier
from wdjax.lipschitz import branching, jacobian, lipsdp, neurons
from wdjax.lipschitz.chain import Chain, as_chain
from wdjax.lipschitz.lipsdp import Rooms
from wdjax.lipschitz.neurons import Slopes
from wdjax.parallel import AnyArray
from wdjax.precision import float64, full_precision, widened

Numbers = npt.NDArray[np.float64]
Method = Literal["interval", "zonotope", "sdp", "bab"]
"""One of :data:`METHODS`."""
METHODS: tuple[Method, ...] = get_args(Method)
"""From the cheapest to the tightest, each at least as tight as those before it; "bab" continues
from "sdp" by branch and bound on activation masks, on the host, for ReLU nets only."""


@full_precision
def local_lipschitz(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    norm: float,
    eps: npt.ArrayLike,
    box: Box = (0.0, 1.0),
    method: Method = "sdp",
    steps: int = 100,
    seconds: float = 10.0,
    batch_size: int = 64,
    mesh: Mesh | None = None,
) -> Numbers:
    r"""Lipschitz constants of every margin ``z_j - z_y`` on the ball around every sample.

    Upper bounds of ``max_x ||J(x)^T (e_j - e_y)||_s`` over the ball of radius ``eps`` in the box,
    with s dual to r. CROWN bounds the neurons, and so the slopes of their activations; the Jacobian
    is then bounded by intervals, by zonotopes and by quadratic constraints (LipSDP).

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``, of affine layers, entrywise activations
        and skip connections; see :func:`as_chain`.
      x: ``[n, *shape]`` floats in the box.
      y: ``[n]`` integer labels.
      norm: r, one of 1, 2 and inf.
      eps: radius, a number or ``[n]``, in units of ``x``.
      box: ``(low, high)``, or None for no box.
      method: one of :data:`METHODS`; for r = 1 "sdp" uses its bound for r = 2.
      steps: number of steps of Adam, for "sdp"; more never loosen the bound.
      seconds: largest time that "bab" works on a sample, without compilation.
      batch_size: number of samples whose neurons are bounded at once, on one device.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; its devices share the batches.

    Returns:
      ``[n, K]`` constants in logits per unit of ``x``, 0 at ``j = y``.

    Raises:
      ValueError: bad samples, a layer of another kind, or a trace.

    Cost: :func:`certify.margin_bounds` in float64, and for "sdp" in each step some products of
      square matrices, as large as a layer has unstable neurons.

    Differs: a local constant does not hold for mass that moves further than ``eps``.

    Source: Fazlyab et al. [fazlyab2019], LipSDP; Weng et al. [weng2018], intervals; the others
      are this library's own.

    >>> from wdjax import Model
    >>> w = jnp.array([[1.0, -1.0], [0.0, 2.0]])
    >>> model = Model(lambda w, x: jnp.maximum(x @ w, 0.0) @ w, w)
    >>> x, y = jnp.array([[0.8, 0.1]]), jnp.array([0])
    >>> local_lipschitz(model, x, y, norm=jnp.inf, eps=0.1).round(3).tolist()
    [[0.0, 2.0]]
    """
    arguments.check(model=model, x=x, y=y, eps=eps, ball=Lp(norm, box))
    norms.check_norm(norm)
    _check(method, steps, seconds)
    host_only("local_lipschitz", LIPSCHITZ_TWIN, model, x, y, eps)
    x, y = validate.check_samples(model, x, y, box)
    radii = np.broadcast_to(np.asarray(eps, float), np.shape(y))
    if not np.all((radii >= 0) & np.isfinite(radii)):
        raise ValueError(f"eps must be finite and at least 0, got {eps!r}.")
    net, labels = as_chain(model, x), np.asarray(y)
    _check_curves(net, method)
    rivals = (labels[:, None] + 1 + np.arange(net.classes - 1)) % net.classes
    found = np.zeros((len(labels), net.classes))
    host = np.asarray(x)

    def of_batch(exact: Chain, model: Classifier, batch: int) -> Numbers:
        """``[b, R]`` constants of a batch of samples, in float64."""
        these = slice(batch * batch_size, (batch + 1) * batch_size)
        points, reach = jnp.asarray(host[these], jnp.float64), jnp.asarray(radii[these])
        slopes = _slopes(exact, model, points, reach, norm, box)
        rows = _contrasts(labels[these], rivals[these], net.classes)
        sizes = np.array(_bounds(exact, slopes, rows, norm, rooms(slopes), method, steps))
        if method == "bab":
            for i, ends in enumerate(zip(*_ends(points, reach, box))):
                alone = jax.tree.map(lambda t, i=i: t[i], slopes)
                around = branching.BoxRegion(*ends)
                sizes[i] = _closed(net, alone, around, rows[i], norm, sizes[i], seconds)
        return sizes

    def worker(device: jax.Device) -> Callable[[int], Numbers]:
        with float64():
            nets = jax.tree.map(jnp.asarray, net), widened(model)
            nets = nets if mesh is None else jax.device_put(nets, device)
        return float64()(functools.partial(of_batch, *nets))

    batches = -(-len(labels) // validate.check_count("batch_size", batch_size))
    sizes = np.concatenate(parallel.each(worker, batches, mesh))
    np.put_along_axis(found, rivals, sizes, axis=1)
    return found


def _ends(points: jax.Array, reach: jax.Array, box: Box) -> tuple[Numbers, Numbers]:
    """The ends ``[n, inputs]`` of the boxes around the balls of radii ``reach`` ``[n]``."""
    ball = region.ball(points, reach, math.inf, box)
    lower, upper = np.asarray(ball.lower, float), np.asarray(ball.upper, float)
    return lower.reshape(len(points), -1), upper.reshape(len(points), -1)


def _closed(
    net: Chain,
    slopes: Slopes,
    around: branching.BoxRegion,
    rows: jax.Array,
    norm: float,
    sizes: Numbers,
    seconds: float,
) -> Numbers:
    """The bounds ``sizes`` ``[R]`` of one sample, tightened by branch and bound over masks.

    ``rows`` ``[R, K]`` are the margins and ``around`` the box around the region. ``seconds`` is the
    time for all rows: the one with the largest bound may use all of it, the others share what is
    left.
    """
    open_ = rooms(jax.tree.map(lambda t: t[None], slopes)).open
    ends, found = time.monotonic() + seconds, sizes.copy()
    for turn, j in enumerate(np.argsort(-sizes)):
        left = max(ends - time.monotonic(), 0.0) / (1 if turn == 0 else len(sizes) - turn)
        row = np.asarray(rows[j])
        search = branching.MaskSearch(net, slopes, around, row, norm, open_, float(sizes[j]))
        found[j] = search.run(left)
    return found


@full_precision
def global_lipschitz(
    model: Classifier,
    x: AnyArray,
    *,
    norm: float,
    box: Box = None,
    method: Method = "sdp",
    steps: int = 200,
    seconds: float = 60.0,
) -> Numbers:
    r"""Lipschitz constants of all margins ``z_j - z_i`` on a box or on all of space.

    The largest over the labels present and all rivals is a valid ``L`` of equations 4 and 8 for the
    cross-entropy and for the margin loss.

    Args:
      model: as in :func:`local_lipschitz`.
      x: ``[n, *shape]`` floats; only their shape matters.
      norm: r, one of 1, 2 and inf.
      box: ``(low, high)``, or None for all of space.
      method: one of :data:`METHODS`.
      steps: of Adam, for "sdp".
      seconds: how long "bab" works at most.

    Returns:
      ``[K, K]`` constants, symmetric, 0 on the diagonal.

    Raises:
      ValueError: a layer of another kind, or a trace.

    Cost: as :func:`local_lipschitz` of one sample, with all neurons open on all of space.

    Source: as :func:`local_lipschitz`.

    >>> from wdjax import Model
    >>> w = jnp.array([[1.0, -1.0], [0.0, 2.0]])
    >>> model = Model(lambda w, x: jnp.maximum(x @ w, 0.0) @ w, w)
    >>> found = global_lipschitz(model, jnp.zeros((1, 2)), norm=jnp.inf, method="zonotope")
    >>> found.round(3).tolist()
    [[0.0, 8.0], [8.0, 0.0]]
    """
    arguments.check(model=model, x=x)
    norms.check_norm(norm)
    _check(method, steps, seconds)
    host_only("global_lipschitz", LIPSCHITZ_TWIN, model)
    net = as_chain(model, x)
    _check_curves(net, method)
    first, second = np.triu_indices(net.classes, 1)
    with float64():
        exact = jax.tree.map(jnp.asarray, net)
        slopes = domain_slopes(exact, model, x, box)
        rows = _contrasts(first[None], second[None], net.classes).reshape(1, -1, net.classes)
        sizes = np.array(_bounds(exact, slopes, rows, norm, rooms(slopes), method, steps)[0])
        if method == "bab":
            ends = (-math.inf, math.inf) if box is None else box
            around = branching.BoxRegion(*(np.full(net.inputs, end) for end in ends))
            alone = jax.tree.map(lambda t: t[0], slopes)
            sizes = _closed(net, alone, around, rows[0], norm, sizes, seconds)
    found = np.zeros((net.classes, net.classes))
    found[first, second] = found[second, first] = np.asarray(sizes)
    return found


@full_precision
def jacobian_norm(model: Classifier, x: AnyArray, *, box: Box = None, steps: int = 200) -> float:
    r"""A bound of ``||J||_2`` on a box or on all of space, by quadratic constraints (LipSDP).

    Args:
      model: as in :func:`local_lipschitz`.
      x: ``[n, *shape]`` floats; only their shape matters.
      box: ``(low, high)``, or None for all of space.
      steps: of Adam.

    Returns:
      An upper bound of ``L`` of equation 6 without its factor, for r = 2.

    Raises:
      ValueError: a layer of another kind, or a trace.

    Source: Fazlyab et al. [fazlyab2019].

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[3.0, 0.0], [0.0, 2.0]]))
    >>> round(jacobian_norm(model, jnp.zeros((1, 2))), 4)
    3.0
    """
    arguments.check(model=model, x=x)
    host_only("jacobian_norm", LIPSCHITZ_TWIN, model)
    net = as_chain(model, x)
    with float64():
        exact = jax.tree.map(jnp.asarray, net)
        slopes = domain_slopes(exact, model, x, box)
        alone = jax.tree.map(lambda t: t[0], slopes)
        return float(_spectral(exact, alone, rooms(slopes), steps))


def _check(method: str, steps: int, seconds: float) -> None:
    """Checks the method's name, the number of steps and the time limit."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}.")
    if not seconds >= 0:
        raise ValueError(f"seconds must be at least 0, got {seconds!r}.")


def _check_curves(net: Chain, method: str) -> None:
    """Raises if branch and bound is asked for a net with activations other than ReLU."""
    if method == "bab" and any(curve is not None for curve in net.curves):
        raise ValueError('method="bab" splits ReLUs; this net has another function. Use "sdp".')


def _contrasts(
    labels: npt.NDArray[np.int_], rivals: npt.NDArray[np.int_], classes: int
) -> jax.Array:
    """``[n, R, K]``: the rows ``e_rival - e_label``, each of which takes a margin from logits.

    ``labels`` is ``[n]`` or of the shape of ``rivals``, ``[n, R]``.
    """
    unit = np.eye(classes)
    label = unit[labels] if labels.shape == rivals.shape else unit[labels][:, None]
    return jnp.asarray(unit[rivals] - label)


def domain_slopes(net: Chain, model: Classifier, x: AnyArray, box: Box) -> Slopes:
    """Slopes on a whole domain, ``[1, m_h]`` a layer; to be called inside :func:`float64`."""
    if box is None:
        return jax.tree.map(lambda t: t[None], neurons.anywhere(net, jnp.dtype(jnp.float64)))
    middle = jnp.full((1, *x.shape[1:]), 0.5 * (box[0] + box[1]), jnp.float64)
    reach = jnp.full(1, 0.5 * (box[1] - box[0]))
    return _slopes(net, widened(model), middle, reach, math.inf, box)


@functools.partial(distinct.jit, static_argnums=(4, 5))
def _slopes(
    net: Chain, model: Classifier, x: jax.Array, eps: jax.Array, norm: float, box: Box
) -> Slopes:
    """The intervals of all neurons' derivatives, ``[n, m_h]``, on the balls around ``x``."""
    ball = region.ball(x, eps, norm, box)
    return neurons.slopes(net, margins.prepare(model, ball, "crown"))


def rooms(slopes: Slopes) -> Rooms:
    """Static sizes for the numbers of open and alive neurons, rounded up to avoid recompilation."""

    def room(count: jax.Array, width: int) -> int:
        most = int(jnp.max(count))
        step = max(8, 2 ** max(most - 1, 1).bit_length() // 8)
        return min(-(-most // step) * step, width)

    open_ = [room(jnp.sum(high > low, axis=-1), low.shape[-1]) for low, high in slopes]
    alive = [room(jnp.sum((high != 0) | (low != 0), -1), low.shape[-1]) for low, high in slopes]
    return Rooms(tuple(open_), tuple(alive))


@functools.partial(distinct.jit, static_argnums=(3, 4, 5, 6))
def _bounds(
    net: Chain, slopes: Slopes, rows: jax.Array, norm: float, rooms: Rooms, method: str, steps: int
) -> jax.Array:
    """``[n, R]``: bounds of the dual norms of rows ``[n, R, K]`` times the Jacobian.

    ``slopes`` are the intervals of the neurons' derivatives. Each method includes the cheaper ones,
    of which the least bound counts; NaN becomes inf. "bab" gives the bound from which
    :func:`_closed` continues.
    """

    def one(these: tuple[Slopes, jax.Array]) -> jax.Array:
        slopes, rows = these
        found = jacobian.interval(net, slopes, rows, norm)
        if method != "interval":
            found = jnp.fmin(found, jacobian.zonotope(net, slopes, rows, norm, rooms.open))
        if method in ("sdp", "bab") and net.depth:
            root = math.inf if norm == math.inf else 2
            found = jnp.fmin(found, lipsdp.bound(net, slopes, rows, root, rooms, steps))
        return jnp.where(jnp.isnan(found), jnp.inf, found)

    return jax.lax.map(one, (slopes, rows))


@functools.partial(distinct.jit, static_argnums=(2, 3))
def _spectral(net: Chain, slopes: Slopes, rooms: Rooms, steps: int) -> jax.Array:
    """A bound of the Jacobian's spectral norm on one region, by :mod:`wdjax.lipschitz.lipsdp`."""
    return lipsdp.spectral(net, slopes, rooms, steps)
