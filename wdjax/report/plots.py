"""Figures of a sandwich: matplotlib figures without global state; nothing is displayed."""

import functools
import io
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import transport
from wdjax.core import Classifier
from wdjax.report.evidence import ORDERS, Sandwich, norm_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = ("#E69F00", "#56B4E9", "#D55E00", "#0072B2", "#CC79A7", "#009E73")
"""Colours of Okabe and Ito [okabe2008], distinct for red-green blind readers."""
INK = "#1b1f24"
"""Colour of text, axes and certified values."""
FAINT = "#d0d4d9"
UNKNOWN = "#e9ebee"
"""Colour of the gap between attack and certificate."""

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""Seven, coprime to the six colours, so that 42 attacks look different."""
_DASHES = ("--", ":", "-.")
_CROSSES = ("x", "+", "1", "2", "3", "4")
_STRONGEST = PALETTE[2]
_WIDTH, _HEIGHT = 3.6, 3.9
_FONT = 9.5
"""In points: 13 pixels on a phone 390 pixels wide, where a panel of 3.6 inches is enlarged 1.38
times."""
_STYLE: Any = {
    "font.size": _FONT,
    **dict.fromkeys(("axes.titlesize", "axes.labelsize", "legend.fontsize"), _FONT),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), _FONT),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
}

_P = ParamSpec("_P")


def _styled(draw: "Callable[_P, Figure]") -> "Callable[_P, Figure]":
    """Decorates a function that draws a figure, so that it draws in this module's style."""

    @functools.wraps(draw)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> "Figure":
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return wrapped


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of every attack, by its rank among the names.

    Later markers are smaller, so that coinciding curves are both visible.

    Args:
      names: of the attacks, in their order.

    >>> styles(["mine", "theirs"])
    {'mine': {'color': '#E69F00', 'marker': 'o', 'ms': 7.0},
     'theirs': {'color': '#56B4E9', 'marker': 's', 'ms': 5.5}}
    """
    names = list(names)
    looks = zip(itertools.cycle(PALETTE), itertools.cycle(_MARKERS), itertools.count())
    return {
        name: {"color": colour, "marker": marker, "ms": 7 - 3 * rank / len(names)}
        for name, (colour, marker, rank) in zip(names, looks)
    }


def _panels(columns: int) -> tuple["Figure", Any]:
    """A figure of panels side by side, and the row of their axes."""
    from wdjax.report.figures import NotebookFigure

    figure = NotebookFigure(figsize=(_WIDTH * columns, _HEIGHT), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _legend(axis: Any, columns: int = 2) -> None:
    """A legend below the axis, where it hides no curve."""
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=columns,
        handlelength=1.6,
        columnspacing=1.0,
    )


def _ball(order: float) -> str:
    """A ball's name in figures, with what its order means."""
    return {math.inf: "Ω∞, every sample", 2: "Ω₂, root mean square", 1: "Ω₁, on average"}[order]


@_styled
def accuracy(found: Sandwich, orders: Sequence[float] = ORDERS) -> "Figure":
    """Accuracy against eps, a panel for each ball: attacks, certificates, and the gap shaded.

    Args:
      found: the sandwich.
      orders: of the Wasserstein balls, a panel each.
    """
    figure, axes = _panels(len(orders))
    unit = norm_name(found.ball.norm)
    for axis, order in zip(axes, orders):
        low, high = found.certified(order), found.attacked(order)
        axis.fill_between(found.eps_list, low, high, color=UNKNOWN, label="unknown")
        for name, look in styles(found.names).items():
            curve = found.curve(name, order)
            if curve.size:
                axis.plot(found.eps_list, curve, lw=1.2, label=name, **look)
        _certificates(axis, found, order)
        axis.set(title=_ball(order), xlabel=f"eps ({unit})", ylim=(-0.02, 1.02))
        _legend(axis)
    axes[0].set_ylabel("accuracy")
    return figure


def _certificates(axis: Any, found: Sandwich, order: float) -> None:
    """Draws certified accuracies: the best certificate of each sample, bold, and every single one.

    With one certificate the two are the same and drawn once; without any nothing is drawn.
    """
    names = list(found.certificates)
    if len(names) > 1:
        looks = zip(names, itertools.cycle(_DASHES), itertools.cycle(_CROSSES[1:]))
        for name, dash, cross in looks:
            one, label = found.certified(order, name), f"certified by {name}"
            axis.plot(found.eps_list, one, dash, color=INK, marker=cross, lw=1, label=label)
    if names:
        label = "certified" if len(names) > 1 else f"certified by {names[0]}"
        look = {"color": INK, "marker": _CROSSES[0], "lw": 2.2, "zorder": 1.5}
        axis.plot(found.eps_list, found.certified(order), label=label, **look)


@_styled
def loss(found: Sandwich, orders: Sequence[float] = ORDERS) -> "Figure":
    """Expected loss against eps: the strongest attack as lower, the least bound as upper curve.

    Args:
      found: the sandwich.
      orders: of the Wasserstein balls, a panel each.
    """
    figure, axes = _panels(len(orders))
    unit = norm_name(found.ball.norm)
    for axis, order in zip(axes, orders):
        low, high = found.attacked_loss(order), found.certified_loss(order)
        high = np.where(np.isfinite(high), high, np.nan)
        axis.fill_between(found.eps_list, low, high, color=UNKNOWN, label="unknown")
        if found.loss_bounds:
            axis.plot(
                found.eps_list, high, color=INK, marker=_CROSSES[0], lw=2.2, label="certified"
            )
        axis.plot(found.eps_list, low, color=_STRONGEST, marker="D", ms=4, label="strongest attack")
        if np.any(low > 0) or np.any(high > 0):
            axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")  # Exponents would be too small to read.
        axis.yaxis.set_minor_formatter("")
        axis.set(title=_ball(order), xlabel=f"eps ({unit})")
        _legend(axis)
    axes[0].set_ylabel("expected cross-entropy")
    return figure


@_styled
def distances(found: Sandwich) -> "Figure":
    """Distance of every sample to a misclassified point, cheapest first: found and certified.

    Args:
      found: the sandwich.
    """
    figure, (axis,) = _panels(1)
    distance = found.within()
    order = np.argsort(distance, kind="stable")
    rank = np.arange(len(order))
    finite = np.isfinite(distance[order])
    sparse = {"lw": 1.2, "ms": 5, "markevery": max(len(order) // 12, 1)}
    nearest = distance[order][finite]
    axis.plot(rank[finite], nearest, "^-", color=_STRONGEST, label="nearest flip found", **sparse)
    if found.certificates:
        axis.plot(rank, found.radius[order], "x", ms=3, color=INK, label="certified radius")
    axis.set(xlabel="samples, cheapest first", ylabel=norm_name(found.ball.norm))
    axis.set_title("distances to a mistake")
    _legend(axis)
    return figure


@_styled
def allocation(found: Sandwich) -> "Figure":
    """The mass that each eps moves in Omega_1, cheapest samples first.

    At most as many eps are drawn as there are colours, spread over those of the sandwich.

    Args:
      found: the sandwich.
    """
    figure, (axis,) = _panels(1)
    distance = found.within()
    order = np.argsort(distance, kind="stable")
    rank = np.arange(len(order))
    budgets = found.eps_list[found.eps_list > 0]
    if len(budgets) > len(PALETTE):
        budgets = budgets[np.linspace(0, len(budgets) - 1, len(PALETTE)).round().astype(int)]
    weights = np.asarray(transport.allocate(distance, budgets, 1))
    looks = styles(f"{eps:g}" for eps in budgets)
    every = max(len(order) // 12, 1)
    for number, ((name, look), weight) in enumerate(zip(looks.items(), weights)):
        first = number * every // max(len(looks), 1)  # Staggers markers of coinciding curves.
        axis.plot(rank, weight[order], lw=1.2, markevery=(first, every), label=name, **look)
    axis.set(xlabel="samples, cheapest first", ylabel="share of the sample moved")
    axis.set_title("who pays in Ω₁, by eps")
    if budgets.size:
        _legend(axis, columns=4)
    return figure


def are_images(x: npt.ArrayLike) -> bool:
    """Whether samples can be drawn: ``[n, height, width, channels]`` of 1 or 3 channels.

    Args:
      x: samples.

    >>> are_images(np.zeros((2, 8, 8, 3))), are_images(np.zeros((2, 8)))
    (True, False)
    """
    shape = np.shape(x)
    return len(shape) == 4 and shape[3] in (1, 3)


@_styled
def examples(
    found: Sandwich, x: npt.ArrayLike, y: npt.ArrayLike, model: Classifier, count: int = 4
) -> "Figure":
    """The cheapest flips: sample, perturbation and adversarial point with its prediction.

    Args:
      found: the sandwich of the samples.
      x: ``[n, height, width, channels]`` images.
      y: ``[n]`` labels.
      model: the attacked model.
      count: maximum number of flips, one in each row.
    """
    from wdjax.report.figures import NotebookFigure

    distance, points = found.nearest()
    price = np.where(found.correct, distance, np.inf)
    chosen = np.argsort(price, kind="stable")[: min(count, int(np.isfinite(price).sum()))]
    size = _WIDTH, 0.3 + 1.25 * max(len(chosen), 1)
    figure = NotebookFigure(figsize=size, layout="constrained")
    if not len(chosen):
        figure.text(0.5, 0.5, "no flip found", ha="center")
        return figure
    predicted = np.argmax(model(jnp.asarray(points[chosen])), axis=-1)
    for axes, i, now in zip(figure.subplots(len(chosen), 3, squeeze=False), chosen, predicted):
        sample, moved = np.asarray(x)[i], points[i]
        change = moved - sample
        scale = 2 * np.abs(change).max() or 1.0
        shown = {
            f"sample: {int(np.asarray(y)[i])}": sample,
            f"change × {1 / scale:.3g}": 0.5 + change / scale,
            f"adversarial: {now}": moved,
        }
        for axis, (caption, image) in zip(axes, shown.items()):
            axis.imshow(
                image.squeeze(-1) if image.shape[-1] == 1 else image,
                cmap="gray",
                vmin=0,
                vmax=1,
                interpolation="none",
            )
            axis.set_title(caption)
            axis.set_axis_off()
    return figure


@_styled
def accuracies(clean: float, left: Mapping[str, float]) -> "Figure":
    """The accuracy under each attack, as bars.

    Args:
      clean: the accuracy without an attack, a share.
      left: the accuracy that each attack leaves, by name.

    >>> len(accuracies(0.9, {"pgd": 0.5, "wda": 0.4}).axes[0].patches)
    2
    """
    figure, axes = _panels(1)
    (axis,) = axes
    rows = range(len(left))
    axis.barh(rows, list(left.values()), color=PALETTE[3])
    axis.set_yticks(rows, list(left))
    axis.invert_yaxis()
    axis.axvline(clean, color=INK, linestyle="--")
    axis.set_xlim(0, 1)
    axis.set_xlabel("accuracy: clean (dashed) and attacked")
    return figure


@_styled
def curves(
    points: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str, title: str = ""
) -> "Figure":
    """Curves by name.

    Args:
      points: of every curve, as (x, y); y may be NaN.
      across: label of the x axis.
      up: label of the y axis.
      title: of the figure.

    >>> len(curves({"wda": [(1, 70), (2, 60)]}, "kappa", "accuracy").axes[0].lines)
    1
    """
    figure, (axis,) = _panels(1)
    for name, look in styles(points).items():
        axis.plot(*zip(*points[name]), lw=1.2, label=name, **look)
    axis.set(xlabel=across, ylabel=up, title=title)
    _legend(axis)
    return figure


def png(figure: "Figure") -> bytes:
    """A figure as PNG on white, for papers and slides.

    Args:
      figure: what to draw.

    >>> from matplotlib.figure import Figure
    >>> png(Figure())[1:4]
    b'PNG'
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: "Figure", salt: str) -> str:
    """A figure as SVG with a transparent background, its text kept as text.

    Args:
      figure: what to draw.
      salt: makes the names inside it differ from those of other figures on the same page.

    >>> from matplotlib.figure import Figure
    >>> "</svg>" in svg(Figure(), "one")
    True
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()
