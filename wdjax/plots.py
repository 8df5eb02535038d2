"""Figures of a sandwich; matplotlib objects without a global state, so nothing is displayed."""

import math
from typing import TYPE_CHECKING

import numpy as np

from wdjax.audit import ORDERS, Sandwich, norm_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = {
    "pgd": ("#4c72b0", "o"),
    "wda kappa=1": ("#dd8452", "s"),
    "wda kappa=2": ("#8172b3", "^"),
    "wda++": ("#c44e52", "D"),
}
_CERTIFIED = "#2a7f4f"
_UNKNOWN = "#f2e6c9"


def _figure(columns, width=4.2, height=3.4):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _ball(order) -> str:
    return r"$\Omega_\infty$ (point-wise)" if order == math.inf else rf"$\Omega_{{{order:g}}}$"


def accuracy(found: Sandwich) -> "Figure":
    """Accuracy against eps, one panel a ball: attacks above, certificate below, the gap shaded."""
    figure, axes = _figure(len(ORDERS))
    for axis, order in zip(axes, ORDERS):
        axis.fill_between(
            found.radii,
            found.certified[order],
            found.attacked(order),
            color=_UNKNOWN,
            label="unknown",
        )
        for name, (colour, marker) in _STYLE.items():
            curve = found.curve(name, order)
            if curve.size:
                axis.plot(found.radii, curve, color=colour, marker=marker, ms=4, label=name)
        axis.plot(found.radii, found.certified[order], color=_CERTIFIED, lw=2, label="certified")
        axis.set(title=_ball(order), xlabel=f"eps ({norm_name(found.norm)})", ylim=(-0.02, 1.02))
        axis.legend(fontsize=7)
    axes[0].set_ylabel("accuracy")
    return figure


def loss(found: Sandwich) -> "Figure":
    """Expected loss against eps: the strongest attack below, the WDRO bound above."""
    figure, axes = _figure(len(ORDERS))
    for axis, order in zip(axes, ORDERS):
        low, high = found.attacked_loss(order), found.loss_bound[order]
        axis.fill_between(found.radii, low, high, color=_UNKNOWN, label="unknown")
        axis.plot(found.radii, high, color=_CERTIFIED, lw=2, label="certified")
        axis.plot(found.radii, low, color="#c44e52", marker="D", ms=4, label="strongest attack")
        axis.set_yscale("log")
        axis.set(title=_ball(order), xlabel=f"eps ({norm_name(found.norm)})")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("expected cross-entropy")
    return figure


def spending(found: Sandwich) -> "Figure":
    """Who spends the budget: flip distances in order of price, and the mass that each eps buys."""
    figure, (axis, mass) = _figure(2, width=6.0)
    walked = [entry for entry in found.entries if entry.name == "wda++" and entry.order == 1]
    result = walked[-1].result
    distance = np.where(result.success, result.cost, np.inf)
    order = np.argsort(distance)
    rank = np.arange(len(order))
    finite = np.isfinite(distance[order])
    axis.plot(rank[finite], distance[order][finite], color="#c44e52", label="flip found (WDA++)")
    axis.plot(rank, found.radius[order], ".", ms=3, color=_CERTIFIED, label="certified radius")
    axis.set(xlabel="samples, cheapest first", ylabel=norm_name(found.norm), title="distances")
    axis.legend(fontsize=7)
    for entry in walked:
        if entry.eps > 0:
            mass.plot(rank, np.asarray(entry.result.weight)[order], label=f"eps = {entry.eps:g}")
    mass.set(xlabel="samples, cheapest first", ylabel=r"mass moved, $1/\kappa_i$")
    mass.set_title(r"allocation in $\Omega_1$")
    mass.legend(fontsize=7)
    return figure


def examples(found: Sandwich, x, y, predicted, count: int = 6) -> "Figure":
    """The cheapest flips: sample, perturbation and adversarial point with its prediction.

    Args:
      found: the sandwich of the samples.
      x: ``[n, height, width, channels]`` images.
      y: ``[n]`` labels.
      predicted: ``[n]`` classes of WDA++'s points.
      count: how many.
    """
    from matplotlib.figure import Figure

    result = next(entry.result for entry in found.entries if entry.name == "wda++")
    flipped = np.asarray(result.success) & found.clean
    chosen = np.argsort(np.where(flipped, np.asarray(result.cost), np.inf))[
        : min(count, int(flipped.sum()))
    ]
    figure = Figure(figsize=(1.5 * max(len(chosen), 1), 4.4), layout="constrained")
    if not len(chosen):
        figure.text(0.5, 0.5, "no flip found", ha="center")
        return figure
    axes = figure.subplots(3, len(chosen), squeeze=False)
    for column, i in enumerate(chosen):
        sample, moved = np.asarray(x[i]), np.asarray(result.x_adv[i])
        change = moved - sample
        scale = np.abs(change).max() or 1.0
        rows = (sample, 0.5 + change / (2 * scale), moved)
        captions = (f"{int(y[i])}", f"x {1 / (2 * scale):.1f}", f"{int(predicted[i])}")
        for axis, image, caption in zip(axes[:, column], rows, captions):
            axis.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=1)
            axis.set_title(caption, fontsize=8)
            axis.set_axis_off()
    for axis, caption in zip(axes[:, 0], ("sample", "change", "adversarial")):
        axis.set_title(f"{caption}: {axis.get_title()}", fontsize=8)
    return figure
