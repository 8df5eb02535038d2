r"""Activation cells of a ReLU net: the polyhedra on which it is affine, and the affine maps.

A mask tells for every neuron whether it is active; its cell is the open polyhedron of the points
with that mask (Definition 3.1). Cells are found neuron by neuron: a polyhedron is cut by a neuron's
hyperplane if a ball fits in on both sides. A part of a known ball often does; otherwise a linear
program decides.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdjax.checks import arguments
from wdjax.checks.forward_mode import LIPSCHITZ_TWIN, host_only
from wdjax.lipschitz.chain import Chain

Numbers = npt.NDArray[np.float64]

SMALLEST = 3e-10
"""Radius of a ball that must fit into a cell, in units of the domain; smaller cells are left out.
Linear programs are solved to a third of it."""
_LOST = 1e-13
"""A row is 0 if it is smaller than this part of what was added up."""


class Cells(NamedTuple):
    """The ``M`` cells of full dimension of a domain."""

    masks: npt.NDArray[np.bool_]
    """``[M, neurons]``, layer by layer, without skipped entries (``Chain.kept``)."""
    jacobians: Numbers
    """``[M, K, n]``."""
    offsets: Numbers
    """``[M, K]``: the net is ``jacobian @ x + offset`` in its cell."""
    witnesses: Numbers
    """``[M, n]``: the center of a ball inside."""
    radii: Numbers
    """``[M]``: that ball's radius, in l2."""


class Polyhedron(NamedTuple):
    """``{x : normals x <= levels}``, every normal of length 1."""

    normals: Numbers
    levels: Numbers

    def cut(self, normal: Numbers, level: float) -> "Polyhedron":
        return Polyhedron(np.vstack([self.normals, normal]), np.append(self.levels, level))


class CellBall(NamedTuple):
    center: Numbers
    radius: float


def inscribed(shape: Polyhedron, most: float = 1.0) -> CellBall | None:
    """The largest ball inside, of radius at most ``most``; None where there is no point inside."""
    from scipy.optimize import linprog

    n = shape.normals.shape[1]
    rows = np.hstack([shape.normals, np.ones((len(shape.levels), 1))])
    goal = np.append(np.zeros(n), -1.0)
    bounds = [(None, None)] * n + [(None, most)]
    found = linprog(goal, rows, shape.levels, bounds=bounds, method="highs", options=_HIGHS)
    if found.status != 0:
        raise RuntimeError(f"HiGHS could not find a ball in a polyhedron: {found.message}")
    return CellBall(found.x[:n], float(found.x[n])) if found.x[n] > 0 else None


_HIGHS: dict[str, Any] = {
    "primal_feasibility_tolerance": 1e-10,
    "dual_feasibility_tolerance": 1e-10,
    "presolve": False,
}


class _PartialCell(NamedTuple):
    """A polyhedron on which all neurons that were processed so far have one mask."""

    shape: Polyhedron
    ball: CellBall
    mask: tuple[bool, ...]
    jacobian: Numbers
    """``[m, n]``, of the current layer's values."""
    offset: Numbers
    magnitude: Numbers
    """``[m, n]``: the sums of the sizes of what ``jacobian`` adds up."""


def activation_cells(net: Chain, box: tuple[npt.ArrayLike, npt.ArrayLike] | None = None) -> Cells:
    r"""All cells of full dimension of a ReLU net, on a box or on all of space.

    Args:
      net: a chain of ReLU layers.
      box: the domain's ends, ``[n]`` or numbers; None for all of space.

    Returns:
      :class:`Cells`, each with a ball inside.

    Raises:
      ValueError: a function that is not ReLU, or an empty box.

    Cost: at most two linear programs of ``n + 1`` unknowns a neuron and partial cell, on the host;
      there are up to ``sum_{i <= n} C(m, i)`` cells of a layer of m neurons.

    Differs: cells thinner than 6e-10 are left out, in units of half the box's shortest side or, on
      all of space, of the median distance of the first layer's hyperplanes from 0; a neuron that is
      constant on a cell has one mask there. Points on boundaries have no mask of their own.

    Source: Le et al. [le2025], Definition 3.1.

    >>> from wdjax.lipschitz import relu_chain
    >>> net = relu_chain([np.ones((2, 1)), np.ones((1, 2))], [np.array([0.0, -1.0]), [0.0]])
    >>> found = activation_cells(net)
    >>> sorted(found.jacobians[:, 0, 0].tolist()), len(activation_cells(net, (0.1, 0.9)).masks)
    ([0.0, 1.0, 2.0], 1)
    """
    check_relu(net)
    center, unit = _units(net, box)
    parts = [_whole(net.inputs, box, center, unit)]
    for weight, bias, kept in zip(net.weights, net.biases, net.kept):
        parts = [_through(part, weight, bias) for part in parts]
        for neuron in range(kept, len(bias)):
            parts = [piece for part in parts for piece in _cut(part, neuron)]
    parts = [_through(part, net.weights[-1], net.biases[-1]) for part in parts]
    slopes = np.stack([part.jacobian for part in parts]) / unit
    return Cells(
        np.array([part.mask for part in parts], bool).reshape(len(parts), -1),
        slopes,
        np.stack([part.offset for part in parts]) - slopes @ center,
        np.stack([part.ball.center for part in parts]) * unit + center,
        np.array([part.ball.radius for part in parts]) * unit,
    )


def check_relu(net: Chain) -> None:
    """Raises if a chain has other activations than ReLU."""
    if any(curve is not None for curve in net.curves):
        raise ValueError("only ReLU nets have activation cells; this one has another function.")


def _units(net: Chain, box: tuple[npt.ArrayLike, npt.ArrayLike] | None) -> tuple[Numbers, float]:
    """The origin ``[n]`` and the unit of length, a power of 2, in which cells are looked for.

    Tolerances are absolute in these units, so cells do not depend on the scale of the inputs.
    """
    if box is not None:
        low, high = (np.broadcast_to(np.asarray(end, float), (net.inputs,)) for end in box)
        if not np.all((low < high) & np.isfinite(high - low)):
            raise ValueError(
                f"box must have a finite low below its finite high in every entry, got {box}; None "
                "is all of space."
            )
        center, lengths = low / 2 + high / 2, high / 2 - low / 2
        return center, 2.0 ** np.round(np.log2(lengths.min()))
    rows, levels = net.weights[0], np.abs(net.biases[0])
    sizes = _lengths(rows)
    with np.errstate(divide="ignore", invalid="ignore"):
        far = (levels / sizes)[(levels > 0) & (sizes > 0)]
    unit = np.median(far) if len(net.curves) and far.size else 1.0
    return np.zeros(net.inputs), 2.0 ** np.round(np.log2(unit))


def _lengths(rows: Numbers) -> Numbers:
    """The l2 norms ``[m]`` of rows ``[m, n]``, without underflow or overflow of squares."""
    most = np.abs(rows).max(axis=1, initial=0.0)
    unit = np.where(most > 0, most, 1.0)
    return most * np.linalg.norm(rows / unit[:, None], axis=1)


def _whole(
    n: int, box: tuple[npt.ArrayLike, npt.ArrayLike] | None, center: Numbers, unit: float
) -> _PartialCell:
    """The box, or for None all of the ``n``-dimensional space, as the one part before the first
    neuron.
    """
    if box is None:
        shape, ball = Polyhedron(np.zeros((0, n)), np.zeros(0)), CellBall(np.zeros(n), np.inf)
    else:
        low, high = ((np.broadcast_to(np.asarray(end), (n,)) - center) / unit for end in box)
        shape = Polyhedron(np.vstack([np.eye(n), -np.eye(n)]), np.concatenate([high, -low]))
        ball = CellBall((low + high) / 2, float(np.min(high - low) / 2))
    return _PartialCell(shape, ball, (), unit * np.eye(n), center, unit * np.eye(n))


def _through(part: _PartialCell, weight: Numbers, bias: Numbers) -> _PartialCell:
    """The part with the next layer's pre-activations as its affine function."""
    jacobian, offset = weight @ part.jacobian, weight @ part.offset + bias
    magnitude = np.abs(weight) @ np.abs(part.jacobian)
    return part._replace(jacobian=jacobian, offset=offset, magnitude=magnitude)


def _cut(part: _PartialCell, neuron: int) -> list[_PartialCell]:
    """The pieces of a part where row ``neuron`` of its affine map is positive (first), negative.

    A side is a piece if a ball of radius above ``SMALLEST`` fits into it. A single piece is the
    part itself, without a new face. Without a piece the part is kept too, with the neuron's sign at
    the centre of its ball, so that no part is lost.
    """
    row, level = part.jacobian[neuron], float(part.offset[neuron])
    size, total = (float(_lengths(one[None])[0]) for one in (row, part.magnitude[neuron]))
    if size <= _LOST * total:
        return [_active(part, neuron, level > 0)]
    normal, level = row / size, level / size
    sides = []
    for sign in (1.0, -1.0):
        # The side where sign (normal x + level) >= 0.
        shape = part.shape.cut(-sign * normal, sign * level)
        ball = _fitting(part.ball, sign * normal, sign * level) or inscribed(shape)
        if ball is not None and ball.radius > SMALLEST:
            sides.append((sign > 0, part._replace(shape=shape, ball=ball)))
    if len(sides) < 2:  # The hyperplane does not cut the part, so it needs no row.
        here = sides[0][0] if sides else float(normal @ part.ball.center + level) > 0
        return [_active(part, neuron, here)]
    return [_active(piece, neuron, active) for active, piece in sides]


def _fitting(ball: CellBall, normal: Numbers, level: float) -> CellBall | None:
    """A ball on the side ``normal x + level >= 0`` that is contained in the given one.

    It is the largest such ball; an infinite ball gives one of radius 1. None if it would be smaller
    than a thousandth of the given ball, where a linear program finds a better one.
    """
    above = float(normal @ ball.center + level)
    if ball.radius == np.inf:
        return (
            CellBall(ball.center + (1.0 - above) * normal, 1.0)
            if above < 1
            else CellBall(ball.center, 1.0)
        )
    if above >= ball.radius:
        return ball
    radius = (ball.radius + above) / 2
    if radius < 1e-3 * ball.radius:
        return None
    return CellBall(ball.center + (radius - above) * normal, radius)


def _active(part: _PartialCell, neuron: int, active: bool) -> _PartialCell:
    """The part with a neuron added to its mask; for an inactive one its value becomes 0."""
    if active:
        return part._replace(mask=(*part.mask, True))
    jacobian, offset = part.jacobian.copy(), part.offset.copy()
    jacobian[neuron], offset[neuron] = 0.0, 0.0
    return part._replace(mask=(*part.mask, False), jacobian=jacobian, offset=offset)


def masks_at(net: Chain, x: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """The masks of points, ``[N, n] -> [N, neurons]``; a neuron at 0 counts as off.

    Args:
      net: a chain of ReLU layers.
      x: ``[N, n]`` points.

    Raises:
      ValueError: ``x`` is no array of numbers, or a chain with other activations.

    Source: Le et al. [le2025], Section 3.

    >>> from wdjax.lipschitz import relu_chain
    >>> net = relu_chain([np.eye(2), np.ones((1, 2))], [np.zeros(2), [0.0]])
    >>> masks_at(net, [[1.0, -1.0]]).tolist()
    [[True, False]]
    """
    arguments.check(x=x)
    host_only("masks_at", LIPSCHITZ_TWIN, x)
    check_relu(net)
    values, masks = np.asarray(x, float), []
    for weight, bias, kept in zip(net.weights, net.biases, net.kept):
        z = values @ weight.T + bias
        masks.append(z[:, kept:] > 0)
        values = np.concatenate([z[:, :kept], np.maximum(z[:, kept:], 0.0)], axis=1)
    return np.concatenate(masks, axis=1) if masks else np.zeros((len(values), 0), bool)


def polyhedron(net: Chain, mask: npt.ArrayLike) -> Polyhedron:
    """The closed cell of a mask, ``[neurons]``, in all of space.

    With levels 0 it is the recession cone. Neurons that are constant on the cell give no row.

    Args:
      net: a chain of ReLU layers.
      mask: ``[neurons]`` booleans, the active neurons.

    Raises:
      ValueError: a chain with other activations.

    Source: Le et al. [le2025], Definition 3.1.

    >>> from wdjax.lipschitz import relu_chain
    >>> net = relu_chain([np.eye(2), np.ones((2, 2))], [np.ones(2), np.zeros(2)])
    >>> cell = polyhedron(net, [True, False])  # x_1 >= -1 and x_2 <= -1
    >>> cell.normals.tolist(), cell.levels.tolist()
    ([[-1.0, -0.0], [0.0, 1.0]], [1.0, -1.0])
    """
    check_relu(net)
    mask = np.asarray(mask, bool)
    jacobian, offset, start = np.eye(net.inputs), np.zeros(net.inputs), 0
    normals, levels, sums = [np.zeros((0, net.inputs))], [np.zeros(0)], [np.zeros(0)]
    for weight, bias, kept in zip(net.weights[:-1], net.biases, net.kept):
        sums.append(_lengths(np.abs(weight[kept:]) @ np.abs(jacobian)))
        jacobian, offset = weight @ jacobian, weight @ offset + bias
        active = mask[start : start + len(bias) - kept]
        start += len(active)
        sign = np.where(active, -1.0, 1.0)
        normals.append(sign[:, None] * jacobian[kept:])
        levels.append(-sign * offset[kept:])
        jacobian[kept:] *= active[:, None]
        offset[kept:] *= active
    rows, level = np.concatenate(normals), np.concatenate(levels)
    size = _lengths(rows)
    real = size > _LOST * np.concatenate(sums)
    return Polyhedron(rows[real] / size[real, None], level[real] / size[real])
