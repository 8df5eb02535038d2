"""Figures of fitted distributions: the course of the fit, and where they put their mass.

Matplotlib figures without global state; scikit-learn does the projections.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax.core import AnyArray, Array
from wdjax.nppr.bounded_ratio import BoundedRatio
from wdjax.nppr.counting import Perturbation
from wdjax.nppr.fitted import Fitted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WINDOW = 20
"""Steps in a running mean."""


def _figure(width: float, height: float, columns: int = 1) -> tuple["Figure", Any]:
    """A Matplotlib figure of a size in inches, and its row of axes."""
    from wdjax.report.figures import NotebookFigure

    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _running(values: Array) -> npt.NDArray[np.float64]:
    """The running mean over ``_WINDOW`` steps of the finite values of a history ``[steps]``."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    size = min(_WINDOW, max(len(known), 1))
    return np.convolve(known, np.ones(size) / size, mode="valid")


def training(fits: Mapping[str, Fitted]) -> "Figure":
    """Running NPPR and entropy ratio of every fit against the steps.

    Args:
      fits: by name, such as the mode.

    Source: Wang et al. [wang2025], figure 5, panels (a) and (b).
    """
    figure, (left, right) = _figure(7.2, 3.2, 2)
    for name, one in fits.items():
        left.plot(_running(one.history.survived), label=name)
        right.plot(_running(one.history.entropy), label=name)
    left.set(xlabel="step", ylabel="samples that survive (running mean)", ylim=(0, 1.02))
    right.set(xlabel="step", ylabel="entropy ratio of the proportions", ylim=(0, 1.02))
    left.legend(frameon=False)
    return figure


def _drawn(
    perturbation: Perturbation, x: AnyArray, y: AnyArray, key: Array, draws: int
) -> npt.NDArray[np.float64]:
    """Samples of ``delta / eps``, flattened: ``[n, draws, d]``."""
    x, y = jnp.asarray(x), jnp.asarray(y)
    context = perturbation.context(x, y)
    delta = perturbation.deltas(jax.random.split(key, len(x)), context, x, draws)
    return np.asarray(delta / perturbation.eps, float).reshape(len(x), draws, -1)


def projected(
    perturbation: Perturbation,
    x: AnyArray,
    y: AnyArray,
    *,
    key: Array,
    method: str = "pca",
    draws: int = 20,
) -> "Figure":
    """Perturbations in two dimensions, one colour a label: principal components, or t-SNE.

    Args:
      perturbation: the distribution.
      x: ``[n, *shape]`` in the box.
      y: ``[n]`` labels.
      key: a typed ``jax.random.key``.
      method: ``"pca"`` or ``"tsne"``.
      draws: samples an input.

    Raises:
      ValueError: another method.

    Source: Wang et al. [wang2025], figures 5 (c) to (e) and 6.
    """
    if method not in ("pca", "tsne"):
        raise ValueError(f"method must be 'pca' or 'tsne', got {method!r}.")
    rows = _drawn(perturbation, x, y, key, draws).reshape(len(x) * draws, -1)
    flat, centre = _pca(rows) if method == "pca" else (_tsne(rows), None)
    figure, (axis,) = _figure(4.2, 3.8)
    labels = np.repeat(np.asarray(y), draws)
    for label in np.unique(labels):
        points = flat[labels == label]
        axis.scatter(*points.T, s=5, label=str(label), color=f"C{int(label) % 10}")
    if centre is not None:
        axis.plot(*centre.T, "+", color="black", ms=12)
    axis.set(title={"pca": "principal components", "tsne": "t-SNE"}[method])
    axis.legend(frameon=False, markerscale=2, fontsize="small", loc="center left",
                bbox_to_anchor=(1, 0.5))  # fmt: skip
    return figure


def _pca(rows: npt.NDArray[np.float64]) -> tuple[Any, Any]:
    """The rows and the zero perturbation in coordinates of the first two principal components."""
    from sklearn.decomposition import PCA

    found = PCA(2).fit(rows)
    return found.transform(rows), found.transform(np.zeros((1, rows.shape[1])))


def _tsne(rows: npt.NDArray[np.float64]) -> Any:
    """``[m, 2]``: the t-SNE embedding of rows ``[m, d]``."""
    from sklearn.manifold import TSNE

    near = min(30.0, (len(rows) - 1) / 3)
    return TSNE(2, perplexity=near, init="pca", random_state=0).fit_transform(rows)


def heatmap(
    perturbation: Perturbation,
    x: AnyArray,
    y: AnyArray,
    *,
    key: Array,
    draws: int = 10,
    bins: int = 60,
) -> "Figure":
    """Densities of every class's perturbations along the first principal component.

    Args:
      perturbation, x, key, draws: as in :func:`projected`.
      y: ``[n]`` labels; a row of the figure is a label.
      bins: columns.

    Source: Wang et al. [wang2025], figures 5 (f) and 9.
    """
    from sklearn.decomposition import PCA

    rows = _drawn(perturbation, x, y, key, draws).reshape(len(x) * draws, -1)
    line, labels = PCA(1).fit_transform(rows)[:, 0], np.repeat(np.asarray(y), draws)
    names = np.unique(labels)
    ends = np.linspace(line.min(), line.max() + 1e-9, bins + 1)
    table = np.stack([np.histogram(line[labels == name], ends, density=True)[0] for name in names])
    figure, (axis,) = _figure(4.6, 3.2)
    shown = axis.imshow(table, aspect="auto", cmap="viridis", interpolation="none",
                        extent=(ends[0], ends[-1], len(names) - 0.5, -0.5))  # fmt: skip
    axis.set(xlabel="first principal component", ylabel="label", yticks=range(len(names)))
    axis.set_yticklabels([str(name) for name in names])
    figure.colorbar(shown, ax=axis, label="density")
    return figure


def mixture(fitted: Fitted, x: AnyArray, y: AnyArray) -> "Figure":
    """The mixture of one input: proportions, and mean and covariance of its main component.

    Args:
      fitted: the distribution.
      x: ``[*shape]``, one input.
      y: its label.

    Source: Wang et al. [wang2025], figures 7 and 8.
    """
    made = fitted.mixture(jnp.asarray(x)[None], jnp.asarray(y).reshape(1))
    share, means = np.asarray(made.proportions[0]), np.asarray(made.mean[0])
    main = int(np.argmax(share))
    factor = np.asarray(made.factor[0, main])
    covariance = np.diag(factor**2) if made.diagonal else factor @ factor.T
    figure, (first, second, third) = _figure(9.6, 3.0, 3)
    first.bar(range(len(share)), share, color="C0")
    first.set(xlabel="component", ylabel="proportion", ylim=(0, 1))
    second.bar(range(means.shape[1]), means[main], color="C0")
    second.set(xlabel="latent coordinate", ylabel=f"mean of component {main}")
    top = float(np.abs(covariance).max())
    shown = third.imshow(covariance, cmap="RdBu_r", vmin=-top, vmax=top, interpolation="none")
    third.set(title=f"covariance of component {main}")
    figure.colorbar(shown, ax=third)
    return figure


def between(curves: Mapping[str, BoundedRatio], shares: Mapping[str, float]) -> "Figure":
    """Worst survival against the density ratio, from PR on, with NPPR and AR as lines.

    Bands are the pooled 95 % intervals; a curve is drawn where they are shorter than 1/2.

    Args:
      curves: by name, such as the reference distribution.
      shares: by name what does not depend on the ratio, such as NPPR and AR.
    """
    figure, (axis,) = _figure(5.2, 3.4)
    for index, (name, curve) in enumerate(curves.items()):
        low, high = curve.pooled()
        axis.fill_between(curve.ratio, low, high, color=f"C{index}", alpha=0.2, linewidth=0)
        known = np.where(high - low < 0.5, curve.value, np.nan)
        axis.plot(curve.ratio, known, color=f"C{index}", label=name)
        if curve.ratio[0] == 1:
            axis.plot(1, curve.value[0], "o", color=f"C{index}", label=f"PR, {name}")
    for index, (name, share) in enumerate(shares.items()):
        dash = ("--", ":", "-.")[index % 3]
        axis.axhline(share, color=f"C{len(curves) + index}", linestyle=dash, label=name)
    axis.set(xscale="log", xlabel="bound of the density ratio", ylabel="worst survival")
    axis.set(ylim=(-0.02, 1.02))
    axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
