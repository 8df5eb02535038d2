"""The exact optimum of transport problems between discrete masses, on the host in float64."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

_Float64 = npt.NDArray[np.float64]
_Copies = tuple[npt.NDArray[np.int_], npt.NDArray[np.int_]]


def bottleneck(gap: _Float64, supply: _Float64, demand: _Float64, longest: float) -> float:
    """The least distance within which all mass can move.

    Args:
      gap: ``[sources, sinks]`` distances.
      supply: ``[sources]`` masses above 0.
      demand: ``[sinks]`` masses above 0, of the same total.
      longest: a distance that is known to be enough.
    """
    shortest = max(gap.min(axis=0).max(), gap.min(axis=1).max())
    levels = np.unique(gap[(gap >= shortest) & (gap <= longest * (1 + 1e-12))])
    low, stride = 0, 1
    # Galloping from below keeps the graphs sparse.
    while low + stride < len(levels) and not _fits(gap <= levels[low + stride - 1], supply, demand):
        low, stride = low + stride, 2 * stride
    high = min(low + stride, len(levels)) - 1
    while low < high:
        middle = (low + high) // 2
        if _fits(gap <= levels[middle], supply, demand):
            high = middle
        else:
            low = middle + 1
    return float(levels[low])


def _fits(allowed: npt.NDArray[np.bool_], supply: _Float64, demand: _Float64) -> bool:
    """Whether mass can move from all sources to all sinks along the edges ``allowed``.

    ``allowed`` is ``[sources, sinks]``; ``supply`` and ``demand`` have equal totals.
    """
    copies = _copies(supply, demand)
    if copies is not None:
        return _assign((~allowed).astype(float), copies) == 0
    source, sink = np.nonzero(allowed)
    return _plan(np.zeros(len(source)), source, sink, supply, demand).x is not None


def least_cost(cost: _Float64, supply: _Float64, demand: _Float64) -> float:
    """The optimal value of a transport problem with equal totals.

    If all masses are multiples of one unit it is an assignment problem; else a linear program,
    solved on a growing set of edges until the dual prices prove that none is missing.

    Args:
      cost: ``[sources, sinks]``
      supply: ``[sources]`` masses above 0.
      demand: ``[sinks]`` masses above 0.
    """
    copies = _copies(supply, demand)
    if copies is not None:
        return _assign(cost, copies) * supply.sum() / copies[0].sum()
    edges = np.full(cost.shape, cost.size <= _DENSE)
    edges[_corner_plan(supply, demand)] = True
    edges |= _cheapest(cost, 8) | _cheapest(cost.T, 8).T
    while True:
        source, sink = np.nonzero(edges)
        plan = _plan(cost[edges], source, sink, supply, demand)
        if plan.x is None:
            raise RuntimeError(f"HiGHS found no transport plan: {plan.message}")
        price = plan.eqlin.marginals
        reduced = cost - price[: len(supply), None] - price[len(supply) :]
        reduced[edges] = np.inf
        if not np.any(reduced < -1e-9):
            return float(plan.fun)
        edges |= _cheapest(reduced, _MORE) | _cheapest(reduced.T, _MORE).T


def _copies(supply: _Float64, demand: _Float64) -> _Copies | None:
    """The masses as whole numbers of one unit; None if they are not, or are too many.

    Such problems are assignments, which are solved faster.
    """
    unit = min(supply.min(), demand.min())
    copies = np.rint(supply / unit).astype(int), np.rint(demand / unit).astype(int)
    error = max(np.abs(mass / unit - k).max() for mass, k in zip((supply, demand), copies))
    total, largest = copies[0].sum(), max(k.max() for k in copies)
    few = total <= 8 * (len(supply) + len(demand))
    return copies if few and total == copies[1].sum() and error < 1e-6 * largest else None


def _assign(cost: _Float64, copies: _Copies) -> float:
    """The least cost of an assignment in which source i and sink j occur ``copies`` times."""
    from scipy import optimize

    copied = np.repeat(np.repeat(cost, copies[0], axis=0), copies[1], axis=1)
    return float(copied[optimize.linear_sum_assignment(copied)].sum())


_MORE = 16
"""Number of edges of every source and sink that are added where an edge is missing, the cheapest at
the present prices. Only those that are missed took 40 times as long for 600 samples: the prices are
degenerate, and others are missed each time."""
_DENSE = 20_000
"""Maximum number of edges for which the linear program takes all at once."""


def _plan(
    cost: _Float64,
    source: npt.NDArray[np.int_],
    sink: npt.NDArray[np.int_],
    supply: _Float64,
    demand: _Float64,
) -> "OptimizeResult":
    """The optimal transport plan by HiGHS, on given edges only.

    ``cost``, ``source`` and ``sink`` describe the m edges, ``[m]`` each; ``supply`` and ``demand``
    are masses with equal totals up to rounding. The result's ``x`` is None if there is no plan.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    entries, total = np.arange(len(source)), supply.sum()
    ends = np.concatenate([source, len(supply) + sink])
    balance = csr_array(
        (np.ones(len(ends)), (ends, np.concatenate([entries, entries]))),
        shape=(len(supply) + len(demand), len(source)),
    )
    masses = np.concatenate([supply / total, demand / demand.sum()])  # Tolerances are absolute.
    for presolve in (True, False):
        tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
        options = tight | {"presolve": presolve}
        found = linprog(cost, A_eq=balance, b_eq=masses, method="highs", options=options)
        if found.x is not None:
            found.x, found.fun = found.x * total, found.fun * total
            break
        if masses.min() > 1e-3 * masses.max():
            break  # Presolve fails wrongly only if masses differ by orders of magnitude.
    return found


def _cheapest(cost: _Float64, count: int) -> npt.NDArray[np.bool_]:
    """``[rows, columns]`` booleans: the ``count`` smallest entries of every row."""
    count = min(count, cost.shape[1])
    mark = np.zeros(cost.shape, bool)
    least = np.argpartition(cost, count - 1, axis=1)[:, :count]
    np.put_along_axis(mark, least, True, axis=1)
    return mark


def _corner_plan(
    supply: _Float64, demand: _Float64
) -> tuple[npt.NDArray[np.int_], npt.NDArray[np.int_]]:
    """Sources and sinks of the north-west corner plan's edges, which are always feasible."""
    filled, emptied = np.cumsum(supply), np.cumsum(demand)
    ends = np.sort(np.concatenate([filled, emptied]))
    source = np.searchsorted(filled, ends).clip(max=len(supply) - 1)
    return source, np.searchsorted(emptied, ends).clip(max=len(demand) - 1)
