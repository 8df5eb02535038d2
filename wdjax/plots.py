"""Figures of a sandwich; matplotlib objects without a global state, so nothing is displayed."""

import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import transport
from wdjax.audit import ORDERS, Classifier, Sandwich, norm_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PALETTE = ("#E69F00", "#56B4E9", "#D55E00", "#0072B2", "#CC79A7", "#009E73")
"""Okabe and Ito (2008): to be told apart by red-green blind readers."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""Their number and that of the colours have no common factor, so that 42 attacks look different."""
_DASHES = ("--", ":", "-.")
_CERTIFIED = "#000000"
_STRONGEST = _PALETTE[2]
_UNKNOWN = "#eeeeee"


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of every attack, from the place of its name alone.

    Later markers are smaller, so that curves that coincide are both seen.

    >>> styles(["mine", "theirs"])
    {'mine': {'color': '#E69F00', 'marker': 'o', 'ms': 7.0},
     'theirs': {'color': '#56B4E9', 'marker': 's', 'ms': 5.5}}
    """
    names = list(names)
    looks = zip(itertools.cycle(_PALETTE), itertools.cycle(_MARKERS), itertools.count())
    return {
        name: {"color": colour, "marker": marker, "ms": 7 - 3 * place / len(names)}
        for name, (colour, marker, place) in zip(names, looks)
    }


def _figure(columns: int, width: float = 4.2, height: float = 3.4) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _ball(order: float) -> str:
    return r"$\Omega_\infty$ (point-wise)" if order == math.inf else rf"$\Omega_{{{order:g}}}$"


def accuracy(found: Sandwich) -> "Figure":
    """Accuracy against eps, one panel a ball: attacks above, certificates below, the gap shaded."""
    figure, axes = _figure(len(ORDERS))
    unit = norm_name(found.ball.norm)
    for axis, order in zip(axes, ORDERS):
        low, high = found.certified(order), found.attacked(order)
        axis.fill_between(found.radii, low, high, color=_UNKNOWN, label="unknown")
        for name, look in styles(found.names).items():
            curve = found.curve(name, order)
            if curve.size:
                axis.plot(found.radii, curve, lw=1.2, label=name, **look)
        _certificates(axis, found, order)
        axis.set(title=_ball(order), xlabel=f"eps ({unit})", ylim=(-0.02, 1.02))
        axis.legend(fontsize=7)
    axes[0].set_ylabel("accuracy")
    return figure


def _certificates(axis: Any, found: Sandwich, order: float) -> None:
    """What all of them certify, bold; and every one by itself, if there are several."""
    names = list(found.certificates)
    if len(names) > 1:
        for name, dash in zip(names, itertools.cycle(_DASHES)):
            one, label = found.certified(order, name), f"certified by {name}"
            axis.plot(found.radii, one, dash, color=_CERTIFIED, lw=1, label=label)
    if names:
        label = "certified" if len(names) > 1 else f"certified by {names[0]}"
        best = found.certified(order)
        axis.plot(found.radii, best, color=_CERTIFIED, lw=2.5, label=label, zorder=1.5)


def loss(found: Sandwich) -> "Figure":
    """Expected loss against eps: the strongest attack below, the least bound above."""
    figure, axes = _figure(len(ORDERS))
    unit = norm_name(found.ball.norm)
    for axis, order in zip(axes, ORDERS):
        low, high = found.attacked_loss(order), found.certified_loss(order)
        high = np.where(np.isfinite(high), high, np.nan)
        axis.fill_between(found.radii, low, high, color=_UNKNOWN, label="unknown")
        axis.plot(found.radii, high, color=_CERTIFIED, lw=2.5, label="certified")
        axis.plot(found.radii, low, color=_STRONGEST, marker="D", ms=4, label="strongest attack")
        axis.set_yscale("log")
        axis.set(title=_ball(order), xlabel=f"eps ({unit})")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("expected cross-entropy")
    return figure


def spending(found: Sandwich) -> "Figure":
    """Who spends the budget: flip distances in order of price, and the mass that each eps buys."""
    from matplotlib import colormaps

    figure, (axis, mass) = _figure(2, width=6.0)
    distance = found.nearest()[0]
    order = np.argsort(distance, kind="stable")
    rank = np.arange(len(order))
    finite = np.isfinite(distance[order])
    nearest = distance[order][finite]
    axis.plot(rank[finite], nearest, color=_STRONGEST, label="nearest flip found")
    axis.plot(rank, found.radius[order], ".", ms=3, color=_CERTIFIED, label="certified radius")
    unit = norm_name(found.ball.norm)
    axis.set(xlabel="samples, cheapest first", ylabel=unit, title="distances")
    axis.legend(fontsize=7)
    budgets = found.radii[found.radii > 0]
    weights = np.asarray(transport.allocate(distance, budgets, 1))
    colours = colormaps["cividis"](np.linspace(0, 0.9, budgets.size))
    for eps, weight, colour in zip(budgets, weights, colours):
        mass.plot(rank, weight[order], color=colour, label=f"eps = {eps:g}")
    mass.set(xlabel="samples, cheapest first", ylabel=r"mass moved, $1/\kappa_i$")
    mass.set_title(r"allocation in $\Omega_1$")
    if budgets.size:
        mass.legend(fontsize=7)
    return figure


def examples(
    found: Sandwich, x: npt.ArrayLike, y: npt.ArrayLike, model: Classifier, count: int = 6
) -> "Figure":
    """The cheapest flips: sample, perturbation and adversarial point with its prediction.

    Args:
      found: the sandwich of the samples.
      x: ``[n, height, width, channels]`` images.
      y: ``[n]`` labels.
      model: what was attacked.
      count: how many.
    """
    from matplotlib.figure import Figure

    distance, points = found.nearest()
    price = np.where(found.correct, distance, np.inf)
    chosen = np.argsort(price, kind="stable")[: min(count, int(np.isfinite(price).sum()))]
    figure = Figure(figsize=(1.5 * max(len(chosen), 1), 4.4), layout="constrained")
    if not len(chosen):
        figure.text(0.5, 0.5, "no flip found", ha="center")
        return figure
    predicted = np.argmax(model(jnp.asarray(points[chosen])), axis=-1)
    axes = figure.subplots(3, len(chosen), squeeze=False)
    for column, i in enumerate(chosen):
        sample, moved = np.asarray(x)[i], points[i]
        change = moved - sample
        scale = np.abs(change).max() or 1.0
        rows = (sample, 0.5 + change / (2 * scale), moved)
        captions = (f"{int(np.asarray(y)[i])}", f"x {1 / (2 * scale):.1f}", f"{predicted[column]}")
        for axis, image, caption in zip(axes[:, column], rows, captions):
            axis.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=1)
            axis.set_title(caption, fontsize=8)
            axis.set_axis_off()
    for axis, caption in zip(axes[:, 0], ("sample", "change", "adversarial")):
        axis.set_title(f"{caption}: {axis.get_title()}", fontsize=8)
    return figure
