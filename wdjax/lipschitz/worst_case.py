r"""The worst-case expected margin loss over a Wasserstein ball, exactly, for small ReLU nets.

In a cell the margin loss is a maximum of affine functions, so a worst distribution moves mass of
sample i to at most one point x per cell and leading rival: mass q with displacement
z = q (x - x_i). The worst case is a linear program in all q and z. A z with q = 0 is a recession
direction: the limit of ever less mass that moves ever further.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdjax.checks import arguments
from wdjax.checks.forward_mode import TWIN, host_only
from wdjax.lipschitz import cells
from wdjax.lipschitz.cells import Polyhedron
from wdjax.lipschitz.chain import Chain

Numbers = npt.NDArray[np.float64]


class _Block(NamedTuple):
    """Mass of one sample that moves into one cell, with one rival in the loss."""

    sample: int
    shape: Polyhedron
    value: float
    """The loss's affine piece of this cell and rival, at the sample."""
    slope: Numbers
    """``[n]``, the piece's gradient."""


def worst_margin(
    net: Chain,
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    *,
    norm: float,
    eps: float,
    box: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    found: cells.Cells | None = None,
) -> float:
    r"""``sup E[max_{j != y} z_j - z_y]`` over all distributions in ``Omega_1(eps)``.

    Args:
      net: a chain of ReLU layers with few cells.
      x: ``[N, n]`` samples, in the box.
      y: ``[N]`` labels.
      norm: r, 1 or inf.
      eps: the budget of order 1, in units of ``x``.
      box: the domain's ends; None for all of space.
      found: the cells of the net on the domain, if known.

    Returns:
      The value, to the tolerance of HiGHS, 1e-7.

    Raises:
      ValueError: r = 2, which gives no linear program, a negative ``eps``, or bad shapes.

    Cost: a sparse linear program of ``N cells (K - 1)`` blocks of ``n + 1`` unknowns.

    Source: Mohajerin Esfahani and Kuhn [esfahani2018], for each cell of the net.

    >>> from wdjax.lipschitz import relu_chain
    >>> net = relu_chain([np.eye(2)], [np.zeros(2)])
    >>> worst_margin(net, [[1.0, 0.0]], [0], norm=np.inf, eps=0.25)
    -0.5
    """
    arguments.check(x=x, y=y, eps=eps)
    host_only("worst_margin", TWIN, x, y, eps)
    if norm not in (1, math.inf):
        raise ValueError(f"norm must be 1 or inf, for a linear program, got {norm!r}.")
    points, labels = np.asarray(x, float), np.asarray(y)
    if points.ndim != 2 or points.shape[1] != net.inputs or labels.shape != points.shape[:1]:
        raise ValueError(
            f"x must be [N, {net.inputs}] and y [N], got {points.shape} and {labels.shape}."
        )
    found = cells.activation_cells(net, box) if found is None else found
    return _solved(_blocks(net, found, points, labels, box), points, norm, eps)


def _blocks(
    net: Chain,
    found: cells.Cells,
    points: Numbers,
    labels: npt.NDArray[np.int_],
    box: tuple[npt.ArrayLike, npt.ArrayLike] | None,
) -> list[_Block]:
    """The variables of the linear program: a block for each triple (cell, sample, rival).

    ``points`` are the samples ``[N, n]``, ``found`` the cells, cut by ``box`` if it is not None. A
    block allows mass of the sample to move into the cell, where its loss is the rival's margin, an
    affine function. There are M N (K - 1) blocks.
    """
    blocks = []
    for mask, jacobian, offset in zip(found.masks, found.jacobians, found.offsets):
        shape = cells.polyhedron(net, mask)
        if box is not None:
            low, high = (np.broadcast_to(np.asarray(end, float), (net.inputs,)) for end in box)
            unit = np.eye(net.inputs)
            shape = Polyhedron(
                np.vstack([shape.normals, unit, -unit]),
                np.concatenate([shape.levels, high, -low]),
            )
        for i, (point, label) in enumerate(zip(points, labels)):
            for rival in range(net.classes):
                if rival != label:
                    slope = jacobian[rival] - jacobian[label]
                    value = slope @ point + offset[rival] - offset[label]
                    blocks.append(_Block(i, shape, float(value), slope))
    return blocks


def _solved(blocks: list[_Block], points: Numbers, norm: float, eps: float) -> float:
    """The worst expected margin: the value of the linear program over ``(q, z, t)`` of every block.

    q is the mass moved, z its displacement times q, and t bounds the transport cost: ``[n]``
    magnitudes for r = 1, one number for r = inf. Every sample has the mass ``1 / N``, and the costs
    of all blocks add up to at most ``eps``. Raises a RuntimeError if the program is not solved.
    """
    from scipy.optimize import linprog
    from scipy.sparse import block_diag, coo_matrix, vstack

    n, count = points.shape[1], len(blocks)
    costs = n if norm == 1 else 1
    width = 1 + n + costs
    magnitudes = np.eye(n) if norm == 1 else np.ones((n, 1))
    pieces, goal = [], []
    for block in blocks:
        room = block.shape.levels - block.shape.normals @ points[block.sample]
        inside = np.hstack([-room[:, None], block.shape.normals, np.zeros((len(room), costs))])
        sizes = [np.hstack([np.zeros((n, 1)), s * np.eye(n), -magnitudes]) for s in (1.0, -1.0)]
        pieces.append(np.vstack([inside, *sizes]))
        goal.append(np.concatenate([[-block.value], -block.slope, np.zeros(costs)]))
    budget = np.tile(np.concatenate([np.zeros(1 + n), np.ones(costs)]), count)
    rows = vstack([block_diag(pieces, format="csr"), coo_matrix(budget)], format="csr")
    levels = np.append(np.zeros(rows.shape[0] - 1), eps)
    samples = np.array([block.sample for block in blocks])
    masses = coo_matrix(
        (np.ones(count), (samples, width * np.arange(count))), (len(points), width * count)
    )
    bounds = [*[(0.0, None)], *[(None, None)] * n, *[(0.0, None)] * costs] * count
    found = linprog(
        np.concatenate(goal),
        rows,
        levels,
        masses,
        np.full(len(points), 1 / len(points)),
        bounds=bounds,
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"HiGHS did not solve the worst case: {found.message}")
    return float(-found.fun)
