r"""The constants of Theorem 3.1 of small ReLU nets, exactly: L, L_margin, l, l_N.

With ``J_D`` the Jacobian on a cell ``C_D`` and ``1/r + 1/s = 1``,

    L        = 2^(1/r) max_D ||J_D||_{r -> s}
    L_margin = max_D max_{k' != k} ||J_D^T (e_k' - e_k)||_s
    l        = max_D max_{k' != k} { (e_k' - e_k)^T J_D u : ||u||_r <= 1, u in rec cl C_D }

Every direction lies in the recession cone of some cell, and there ``J_D u`` is the output at ``u``
of the net without biases. So ``l`` is the largest margin of that net on the unit ball, and any
single direction bounds it from below.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import distinct, norms
from wdjax.checks import arguments
from wdjax.checks.forward_mode import LIPSCHITZ_TWIN, host_only
from wdjax.lipschitz import cells
from wdjax.lipschitz.cells import Cells, Polyhedron
from wdjax.lipschitz.chain import Chain
from wdjax.precision import float64

Numbers = npt.NDArray[np.float64]

_TIE = 1e-9
"""Relative difference up to which two constants count as equal."""


class Steepest(NamedTuple):
    """The largest growth of a margin ``z_rival - z_label`` along a direction, and where."""

    value: float
    label: int
    rival: int
    direction: Numbers
    """``[n]``, of l_r norm 1; 0 if no margin grows."""


class UpperConstants(NamedTuple):
    """Valid Lipschitz constants of the loss over the domain of the cells, if none is so thin that
    :func:`activation_cells` left it out.
    """

    paper: float
    """``L`` of equation 6."""
    margin: float
    """``L_margin``, over all labels."""
    by_label: Numbers
    """``[K]``: for each label, the largest over its rivals. The largest over the labels present in
    the data is valid."""


def upper_constants(found: Cells, norm: float) -> UpperConstants:
    r"""The upper constants ``L`` and ``L_margin``, from all cells of a convex domain.

    Args:
      found: what :func:`activation_cells` returned for the domain.
      norm: r, one of 1, 2 and inf.

    Returns:
      :class:`UpperConstants`.

    Raises:
      ValueError: another norm.

    Cost: an operator norm a cell; for r = inf ``2^(min(K, n) - 1)`` sign vectors.

    Source: Le et al. [le2025], equation 6; the margins are this library's own.

    >>> from wdjax.lipschitz import activation_cells, relu_chain
    >>> net = relu_chain([np.eye(2), np.array([[1.0, 1.0], [0.0, 0.0]])], [np.zeros(2), np.ones(2)])
    >>> [round(float(value), 4) for value in upper_constants(activation_cells(net), 2)[:2]]
    [2.0, 1.4142]
    """
    norms.check_norm(norm)
    with float64():
        whole = float(jnp.max(_operator_norms(jnp.asarray(found.jacobians), norm)))
    rows = found.jacobians[:, None] - found.jacobians[:, :, None]
    by_label = np.linalg.norm(rows, norms.dual(norm), axis=-1).max(axis=(0, 2))
    return UpperConstants(2 ** (1 / norm) * whole, float(by_label.max()), by_label)


@functools.partial(distinct.jit, static_argnums=1)
def _operator_norms(jacobians: jax.Array, norm: float) -> jax.Array:
    """``[M]``: the operator norms, l_r to l_s, of Jacobians ``[M, K, n]``."""
    return jax.vmap(lambda jacobian: norms.operator_norm(jacobian, norm).lower)(jacobians)


def lower_constant(
    net: Chain, norm: float, labels: npt.ArrayLike | None = None, cones: Cells | None = None
) -> Steepest:
    r"""The lower constant ``l`` of equation 7, restricted to labels that occur in the data.

    Args:
      net: a chain of ReLU layers, on all of space.
      norm: r, one of 1, 2 and inf.
      labels: ``[N]`` labels of the data; all labels by default, as in the paper.
      cones: what :func:`directions` returned for the net, if known.

    Returns:
      :class:`Steepest`.

    Raises:
      ValueError: another norm, or a chain with other activations.

    Cost: the cells of the net without biases, and a linear program (least squares for r = 2) for
      every cone and pair of classes that may still improve the maximum.

    Differs: equation 7 maximises over all labels, which bounds nothing where a label does not
      occur; no mass can start there.

    Source: Le et al. [le2025], equation 7; the net without biases is this library's own.

    >>> from wdjax.lipschitz import relu_chain
    >>> net = relu_chain([np.eye(2), np.array([[1.0, 1.0], [0.0, 0.0]])], [np.zeros(2), np.ones(2)])
    >>> [round(lower_constant(net, 2, labels=[label]).value, 4) for label in (0, 1)]
    [0.0, 1.4142]
    """
    norms.check_norm(norm)
    bare = net.unbiased()
    cones = directions(net) if cones is None else cones
    present = _present(labels, net.classes)
    shapes = [cells.polyhedron(bare, mask) for mask in cones.masks]
    return _steepest(cones.jacobians, shapes, present, norm)


def directions(net: Chain) -> Cells:
    """The cells of the net without biases: cones, which cover all directions.

    Args:
      net: a chain of ReLU layers.

    Raises:
      ValueError: a chain with other activations.

    Source: Le et al. [le2025], Definition 3.1.

    >>> from wdjax.lipschitz import relu_chain
    >>> net = relu_chain([np.eye(2), np.ones((2, 2))], [np.ones(2), np.zeros(2)])
    >>> len(directions(net).masks)
    4
    """
    return cells.activation_cells(net.unbiased(), (-1.0, 1.0))


def lower_constants_at_samples(
    net: Chain, x: npt.ArrayLike, y: npt.ArrayLike, norm: float
) -> list[Steepest]:
    r"""The practical constant of every sample, equation 9: the steepest growth in its cell's cone.

    Args:
      net: a chain of ReLU layers, on all of space.
      x: ``[N, n]`` samples.
      y: ``[N]`` labels.
      norm: r, one of 1, 2 and inf.

    Returns:
      ``N`` of :class:`Steepest`; ``l_N`` is the largest.

    Raises:
      ValueError: bad samples or labels, another norm, or a chain with other activations.

    Cost: ``K - 1`` programs a sample.

    Differs: the closed recession cone in place of its interior, which is as valid and never
      smaller. A sample on a boundary belongs to the cell where neurons at 0 are off.

    Source: Le et al. [le2025], equation 9.

    >>> from wdjax.lipschitz import relu_chain
    >>> net = relu_chain([np.eye(2), np.array([[1.0, 1.0], [0.0, 0.0]])], [np.zeros(2), np.ones(2)])
    >>> found = lower_constants_at_samples(net, [[1.0, 1.0], [-1.0, -1.0]], [1, 1], 2)
    >>> [round(each.value, 4) for each in found]
    [1.4142, 0.0]
    """
    arguments.check(x=x, y=y)
    host_only("lower_constants_at_samples", LIPSCHITZ_TWIN, x, y)
    norms.check_norm(norm)
    labels = np.asarray(y)
    found = []
    for mask, label in zip(cells.masks_at(net, x), labels):
        shape = cells.polyhedron(net, mask)
        jacobian = _jacobian(net, mask)
        found.append(_steepest(jacobian[None], [shape], [int(label)], norm))
    return found


def _jacobian(net: Chain, mask: npt.NDArray[np.bool_]) -> Numbers:
    """The Jacobian ``[K, n]`` in the cell of a mask ``[neurons]``."""
    jacobian, start = np.eye(net.inputs), 0
    for weight, bias, kept in zip(net.weights, net.biases, net.kept):
        active = mask[start : start + len(bias) - kept]
        start += len(active)
        jacobian = np.concatenate([np.ones(kept), active])[:, None] * (weight @ jacobian)
    return np.asarray(net.weights[-1] @ jacobian)


def _present(labels: npt.ArrayLike | None, classes: int) -> list[int]:
    """The distinct labels, checked to be classes; all classes for None."""
    if labels is None:
        return list(range(classes))
    found = np.unique(np.asarray(labels))
    if found.size == 0 or found.min() < 0 or found.max() >= classes:
        raise ValueError(f"labels must be among 0..{classes - 1}, got {found.tolist()}.")
    return [int(label) for label in found]


def _steepest(
    jacobians: Numbers, shapes: list[Polyhedron], labels: list[int], norm: float
) -> Steepest:
    """The steepest growth of a margin over all cones, with label, rival and direction.

    ``shapes`` are M cones, on which the net without biases has the Jacobians ``[M, K, n]``;
    ``labels`` those that occur. Pairs of cone and margin are tried by falling upper bound (the
    gradient's dual norm), until no bound exceeds the best growth found.
    """
    classes, n = jacobians.shape[1:]
    best = Steepest(0.0, labels[0], (labels[0] + 1) % classes, np.zeros(n))
    pairs = [(label, rival) for label in labels for rival in range(classes) if rival != label]
    most = np.array(
        [
            [_size(j[rival] - j[label], norms.dual(norm)) for label, rival in pairs]
            for j in jacobians
        ]
    )
    for index in np.argsort(-most, axis=None):
        cone, pair = np.unravel_index(index, most.shape)
        if most[cone, pair] <= best.value * (1 + 1e-13):
            break
        label, rival = pairs[pair]
        gain = jacobians[cone, rival] - jacobians[cone, label]
        direction = _ascent(gain, shapes[cone].normals, norm)
        if gain @ direction > best.value:
            best = Steepest(float(gain @ direction), label, rival, direction)
    return best


def _size(v: Numbers, norm: float) -> float:
    """The l_norm length of a vector."""
    return float(np.linalg.norm(v, norm))


def _ascent(gain: Numbers, normals: Numbers, norm: float) -> Numbers:
    """``[n]``: the u that maximises ``gain . u`` with ``normals u <= 0`` and ``||u||_r <= 1``.

    ``gain`` is ``[n]``, ``normals`` ``[rows, n]``. By non-negative least squares for r = 2, else by
    a linear program; 0 if nothing grows.
    """
    from scipy.optimize import linprog, nnls

    n = len(gain)
    if norm == 2:
        # By Moreau the gain is the sum of its projections on the cone and on its polar cone.
        weights = nnls(normals.T, gain)[0] if len(normals) else np.zeros(0)
        direction = gain - normals.T @ weights
        size = np.linalg.norm(direction)
        return direction / size if size > 1e-12 * _size(gain, 2) else np.zeros(n)
    if norm == np.inf:
        found = linprog(
            -gain, normals, np.zeros(len(normals)), bounds=(-1, 1), method="highs", options=_HIGHS
        )
        return np.asarray(found.x)
    both = np.hstack([normals, -normals])
    rows = np.vstack([both, np.ones((1, 2 * n))])
    levels = np.append(np.zeros(len(normals)), 1.0)
    goal = np.concatenate([-gain, gain])
    found = linprog(goal, rows, levels, bounds=(0, None), method="highs", options=_HIGHS)
    return np.asarray(found.x[:n] - found.x[n:])


_HIGHS = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


def direction_bound(net: Chain, directions: npt.ArrayLike, norm: float) -> Numbers:
    r"""Lower bounds ``[m, K]`` of ``l``, by label, from directions ``[m, n]``; one forward pass.

    ``(theta_0(u)_k' - theta_0(u)_k) / ||u||_r`` for the best rival k', where ``theta_0`` is the net
    without biases; at least 0, since mass need not move.

    Args:
      net: a chain of ReLU layers.
      directions: ``[m, n]``, not 0.
      norm: r, one of 1, 2 and inf.

    Raises:
      ValueError: a chain with other activations.

    Source: Le et al. [le2025], equation 7; the net without biases is this library's own.

    >>> from wdjax.lipschitz import relu_chain
    >>> net = relu_chain([np.eye(2), np.array([[1.0, 1.0], [0.0, 0.0]])], [np.zeros(2), np.ones(2)])
    >>> direction_bound(net, [[3.0, 4.0]], 2).round(3).tolist()
    [[0.0, 1.4]]
    """
    cells.check_relu(net)
    bare = net.unbiased()
    moves = np.asarray(directions, float)
    values = moves
    for weight, kept in zip(bare.weights, bare.kept):
        z = values @ weight.T
        values = np.concatenate([z[:, :kept], np.maximum(z[:, kept:], 0.0)], axis=1)
    logits = values @ bare.weights[-1].T
    size = np.linalg.norm(moves, norm, axis=1, keepdims=True)
    growth = logits.max(axis=1, keepdims=True) - logits
    return np.where(size > 0, growth / np.where(size > 0, size, 1.0), 0.0)


class Theory(NamedTuple):
    """Theorem 3.1 and Corollary 3.2 of one net and data set, for the norm r.

    ``E_N + l eps <= sup <= E_N + L_margin eps <= E_N + L eps`` over all of space, for order 1 and
    the cross-entropy or the margin loss.
    """

    cells: int
    upper: float
    """``L`` of equation 6."""
    upper_margin: float
    """``L_margin`` of the labels present."""
    lower: float
    """``l`` of the labels present."""
    lower_all: float
    """``l`` over all labels, as in equation 7: no bound if its label does not occur."""
    lower_samples: float
    """``l_N`` of equation 9."""
    tight: bool
    """Whether ``l = L``, so that the bounds of equation 8 meet."""
    tight_margin: bool
    """Whether ``l = L_margin``, a weaker condition."""


def theory(
    net: Chain, x: npt.ArrayLike, y: npt.ArrayLike, norm: float, found: Cells | None = None
) -> Theory:
    r"""All constants of Theorem 3.1 of a small ReLU net on all of space.

    Args:
      net: a chain of ReLU layers.
      x: ``[N, n]`` samples.
      y: ``[N]`` labels.
      norm: r, one of 1, 2 and inf.
      found: the cells of the net on all of space, if known.

    Returns:
      :class:`Theory`.

    Raises:
      ValueError: bad samples or labels, another norm, or a chain with other activations.

    Cost: that of :func:`activation_cells`, :func:`upper_constants`, :func:`lower_constant` and
      :func:`lower_constants_at_samples`.

    Differs: ``l = L`` is tested by their values. The paper's condition, that the dual-norm
      maximiser lies in the recession cone, is ambiguous for r = 1 and inf: there are several.

    Source: Le et al. [le2025], Theorem 3.1 and Corollary 3.2.

    >>> from wdjax.lipschitz import relu_chain
    >>> net = relu_chain([np.eye(2), np.array([[1.0, 1.0], [0.0, 0.0]])], [np.zeros(2), np.ones(2)])
    >>> found = theory(net, [[1.0, 1.0]], [1], 2)
    >>> found.cells, round(found.lower, 4), round(found.upper_margin, 4), found.tight
    (4, 1.4142, 1.4142, False)
    """
    arguments.check(x=x, y=y)
    host_only("theory", LIPSCHITZ_TWIN, x, y)
    found = cells.activation_cells(net) if found is None else found
    above, present = upper_constants(found, norm), _present(y, net.classes)
    cones = directions(net)
    here, anywhere = (
        lower_constant(net, norm, present, cones).value,
        lower_constant(net, norm, cones=cones).value,
    )
    steep = max(float(above.by_label[label]) for label in present)
    samples = max(each.value for each in lower_constants_at_samples(net, x, y, norm))
    return Theory(
        len(found.masks),
        above.paper,
        steep,
        here,
        anywhere,
        samples,
        bool(here >= above.paper * (1 - _TIE)),
        bool(here >= steep * (1 - _TIE)),
    )
