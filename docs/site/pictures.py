"""The pictures of the concepts page: ``python docs/site/pictures.py`` writes ``docs/pictures``.

Each function draws one word from a few numbers, with the library's own formulas.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wdjax import metrics, transport

FOLDER = Path(__file__).parents[1] / "pictures"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "0.6"
DISTANCES = np.array([0.02, 0.03, 0.05, 0.06, 0.08, 0.11, 0.13, 0.17, 0.2, 0.26])
"""Of ten samples to their nearest mistakes, for all pictures about budgets."""


def canvas(width: float = 4.6, height: float = 2.7) -> tuple[Figure, Axes]:
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def boundary(along: np.ndarray) -> np.ndarray:
    """A decision boundary in the plane: the second coordinate as a function of the first."""
    return 1.15 + 0.25 * np.sin(2.2 * along) - 0.35 * along


def plane() -> tuple[Figure, Axes]:
    """A plane of inputs, with a sample at 0 and the boundary above it."""
    figure, axis = canvas(3.4, 3.0)
    along = np.linspace(-1.6, 1.6, 200)
    axis.fill_between(along, boundary(along), 2, color=ORANGE, alpha=0.15, linewidth=0)
    axis.plot(along, boundary(along), color=ORANGE)
    axis.text(-0.4, 1.62, "another class", color=ORANGE, ha="center")
    axis.plot(0, 0, "o", color="black")
    axis.set(xlim=(-1.6, 1.6), ylim=(-1.2, 1.9), aspect="equal", xticks=[], yticks=[])
    return figure, axis


def ball() -> Figure:
    figure, axis = plane()
    turn = np.linspace(0, 2 * math.pi, 200)
    axis.plot(0.8 * np.cos(turn), 0.8 * np.sin(turn), color=BLUE)
    axis.plot([0.8, 0, -0.8, 0, 0.8], [0, 0.8, 0, -0.8, 0], color=BLUE, linestyle=":")
    axis.plot([0.8, -0.8, -0.8, 0.8, 0.8], [0.8, 0.8, -0.8, -0.8, 0.8], color=BLUE, linestyle="--")
    for words, place in (("l1", (0.2, 0.3)), ("l2", (0.62, 0.38)), ("linf", (0.86, -0.7))):
        axis.text(*place, words, color=BLUE)
    axis.text(0.06, -0.2, "sample")
    return figure


def certificate() -> Figure:
    figure, axis = plane()
    turn = np.linspace(0, 2 * math.pi, 200)
    along = np.linspace(-1.6, 1.6, 2001)
    distance = np.hypot(along, boundary(along))
    nearest = along[np.argmin(distance)], boundary(along)[np.argmin(distance)]
    proved, found = 0.55, float(distance.min())
    axis.fill(found * np.cos(turn), found * np.sin(turn), color=GREY, alpha=0.25, linewidth=0)
    axis.fill(proved * np.cos(turn), proved * np.sin(turn), color="white", linewidth=0)
    axis.fill(proved * np.cos(turn), proved * np.sin(turn), color=BLUE, alpha=0.25, linewidth=0)
    axis.annotate("", nearest, (0, 0), arrowprops={"arrowstyle": "->", "color": ORANGE})
    axis.plot(*nearest, "x", color=ORANGE)
    axis.plot(0, 0, "o", color="black")
    axis.text(0, -0.35, "proved", color=BLUE, ha="center")
    axis.text(0, -0.8, "not known", color="0.3", ha="center")
    axis.text(nearest[0] + 0.1, nearest[1] - 0.12, "nearest flip found", color=ORANGE, fontsize=8)
    return figure


def spend() -> Figure:
    figure, axis = canvas()
    weight = np.asarray(transport.allocate(DISTANCES, 0.05, 1))
    place = np.arange(1, len(DISTANCES) + 1)
    axis.bar(place, DISTANCES, color="white", edgecolor=GREY)
    axis.bar(place, DISTANCES, width=0.8 * weight, align="center", color=ORANGE)
    axis.axhline(0.05, color="black", linestyle=":")
    axis.text(10.5, 0.055, "eps, the mean", ha="right")
    axis.set(xlabel="samples, the nearest mistake first", ylabel="distance", xticks=place)
    return figure


def order() -> Figure:
    figure, axis = canvas()
    eps = np.linspace(0, 0.2, 101)
    for p, line in ((math.inf, "-"), (2, "--"), (1, ":")):
        left = 1 - np.asarray(transport.allocate(DISTANCES, eps, p)).mean(axis=1)
        name = "Omega_inf" if p == math.inf else f"Omega_{p}"
        axis.plot(eps, left, color=BLUE, linestyle=line, label=name)
    axis.set(xlabel="eps", ylabel="accuracy that is left", ylim=(0, 1.02))
    axis.legend()
    return figure


def kappa() -> Figure:
    figure, axis = canvas()
    for row, factor in enumerate((1, 2, 4)):
        width, color = 14 / factor, ORANGE
        axis.plot([0, factor], [row, row], color=color, linewidth=width, solid_capstyle="butt")
        axis.plot(0, row, "o", color="black", markersize=4 + 10 * (1 - 1 / factor))
        share = "all mass" if factor == 1 else f"1/{factor} of the mass"
        axis.text(factor + 0.1, row, f"{share}, {factor} eps far", va="center")
    axis.set(xlim=(-0.3, 6.2), ylim=(-0.7, 2.7), xlabel="distance, in units of eps (order 1)")
    axis.set(yticks=[0, 1, 2], yticklabels=["kappa = 1", "kappa = 2", "kappa = 4"])
    return figure


def omega() -> Figure:
    figure, axis = canvas(3.4, 3.0)
    turn = np.linspace(0, math.pi / 2, 100)
    first, second = np.cos(turn), np.sin(turn)
    for p, line in ((1, ":"), (2, "--"), (math.inf, "-")):
        far = (
            np.maximum(first, second) if p == math.inf else ((first**p + second**p) / 2) ** (1 / p)
        )
        name = "Omega_inf" if p == math.inf else f"Omega_{p}"
        axis.plot(first / far, second / far, color=BLUE, linestyle=line, label=name)
    axis.set(xlabel="how far sample 1 moves, in eps", ylabel="how far sample 2 moves, in eps")
    axis.set(xlim=(0, 2.1), ylim=(0, 2.1), aspect="equal")
    axis.legend(loc="upper right")
    return figure


def confidence() -> Figure:
    figure, axis = canvas()
    votes = np.unique(np.geomspace(20, 20_000, 60).astype(int))
    for share, color in ((0.9, BLUE), (0.6, ORANGE)):
        for_it = np.round(share * votes).astype(int)
        low = [metrics.clopper_pearson(int(k), int(n), 0.998)[0] for k, n in zip(for_it, votes)]
        axis.semilogx(votes, low, color=color, label=f"{share:.0%} of the votes")
    axis.axhline(0.5, color="black", linestyle=":")
    axis.text(700, 0.455, "below: the classifier abstains", fontsize=8)
    axis.set(xlabel="votes", ylabel="proved probability", ylim=(0.2, 1))
    axis.legend(loc="lower right")
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    function.__name__: function
    for function in (ball, certificate, spend, order, kappa, omega, confidence)
}


def main(folder: Path = FOLDER) -> int:
    folder.mkdir(exist_ok=True)
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "wdjax", "font.size": 9}):
        for name, function in PICTURES.items():
            figure = function()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
