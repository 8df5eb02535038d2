"""The samples of a page that are nearest to a mistake, one by one: what was moved, and how far."""

import base64
import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax.core import Classifier
from wdjax.report import plots
from wdjax.report.evidence import Sandwich
from wdjax.report.html_table import table
from wdjax.report.rounded import AtLeast

_MOST, _LEAST = 24, 6
_PIXELS = 25_000
"""So many pixels of all samples together, so that their pictures take some hundred kB."""
_LONGEST = 64
"""A longer side of an image is shown by every second, third, ... pixel."""
_ENTRIES = 8
"""The number of entries shown of a sample that is no image."""


class WorstSample(NamedTuple):
    """A correctly classified sample that is shown by itself."""

    number: int
    """Its index among the samples."""
    label: int
    said: int | None
    """What the model says at the nearest flip; None where no flip is known."""
    shown: str
    """HTML: pictures of the sample, the flip and the change, or the entries that changed most."""


def worst(
    found: Sandwich, x: npt.ArrayLike, y: npt.ArrayLike, model: Classifier
) -> list[WorstSample]:
    """The correctly classified samples that are nearest to a mistake, the nearest first.

    Samples with no known flip come last, in the order of their certified radii.

    Args:
      found: the audit of the model.
      x: ``[n, *shape]`` samples; images ``[n, height, width, channels]`` are drawn.
      y: ``[n]`` labels.
      model: the attacked model.
    """
    x, distance, points = np.asarray(x), np.full(found.correct.size, np.inf), np.asarray(x)
    if found.entries:
        distance, points = found.nearest()
    ranking = np.lexsort((found.radius, distance, ~found.correct))[: int(found.correct.sum())]
    images = plots.are_images(x)
    count = max(_PIXELS // math.prod(x.shape[1:3]), _LEAST) if images else _MOST
    chosen = ranking[: min(count, _MOST)]
    if not chosen.size:
        return []
    said = np.argmax(model(jnp.asarray(points[chosen])), axis=-1)
    flipped, draw = np.isfinite(distance), _images if images else _entries
    return [
        WorstSample(
            int(i),
            int(np.asarray(y)[i]),
            int(now) if flipped[i] else None,
            draw(x[i], points[i] if flipped[i] else None, found.ball.box, int(i)),
        )
        for i, now in zip(chosen, said)
    ]


def _images(x: np.ndarray, moved: np.ndarray | None, box: Any, index: int) -> str:
    """A sample ``[height, width, channels]``, its flip and the change, as PNG inside of HTML."""
    low, high = box or (min(x.min(), 0.0), max(x.max(), 1.0))
    shown = {"sample": (x - low) / (high - low)}
    if moved is not None:
        change = moved - x
        scale = 2 * np.abs(change).max() or 1.0
        shown["flip"] = (moved - low) / (high - low)
        shown[f"change × {1 / scale:.3g}"] = 0.5 + change / scale
    return "".join(
        f'<figure><img alt="{name} {index}" src="{_png(image)}"><figcaption>{name}</figcaption>'
        "</figure>"
        for name, image in shown.items()
    )


def _png(image: np.ndarray) -> str:
    """An image ``[height, width, channels]`` of values in [0, 1] as the address of a PNG."""
    from matplotlib import image as files

    step = math.ceil(max(image.shape[:2]) / _LONGEST)
    image, target = np.clip(image[::step, ::step], 0.0, 1.0), io.BytesIO()
    image = image[..., 0] if image.shape[-1] == 1 else image
    files.imsave(target, image, cmap="gray", vmin=0, vmax=1, format="png")
    return f"data:image/png;base64,{base64.b64encode(target.getvalue()).decode()}"


def _entries(x: np.ndarray, moved: np.ndarray | None, box: Any, index: int) -> str:
    """The entries of a sample that change most at its flip, as a table; nothing without a flip."""
    if moved is None:
        return ""
    change = np.abs(moved - x)
    largest = np.argsort(-change, axis=None, kind="stable")[:_ENTRIES]
    rows = []
    for coordinate in zip(*np.unravel_index(largest, x.shape)):
        if change[coordinate] > 0:
            values = x[coordinate], moved[coordinate], moved[coordinate] - x[coordinate]
            cells = "".join(f"<td>{value:.4g}</td>" for value in values)
            rows.append((", ".join(map(str, coordinate)), cells))
    titles = ("entry", "sample", "flip", "change")
    return table(f"Entries of sample {index} that change most", titles, rows)


def as_html(sample: WorstSample, model: Mapping[str, Any]) -> str:
    """A sample as a part of the page that opens: pictures, distances by attack, certified radii.

    Args:
      sample: from :func:`worst`.
      model: the model's entry in ``report.json``.
    """
    index, label, said, shown = sample
    known = model["samples"]
    near = "" if said is None else f", where it is taken for {said}"
    summary = f"Sample {index}, label {label}: nearest flip {_far(known, 'flip_distance', index)}"
    summary += f"{near}; certified radius {_far(known, 'certified_radius', index, AtLeast)}"
    columns = ("mistake found", "flip_distances", float), ("proved", "certified_radii", AtLeast)
    rows = [
        (f"{what} by {name}", f"<td>{_far(known[key], name, index, kind)}</td>")
        for what, key, kind in columns
        for name in known[key]
    ]
    title = (
        f"Distances of sample {index}: of the mistakes that attacks found, which need not be the "
        "nearest, and up to which no mistake exists"
    )
    numbers = table(title, ("by whom", f"{model['norm']}"), rows)
    return (
        f'<details class="sample"><summary>{summary}</summary>'
        f'<div class="row">{shown}{numbers}</div></details>'
    )


def _far(lists: Mapping[str, Any], key: str, index: int, kind: type[float] = float) -> str:
    """A distance of the report in words; null is a flip that was not found or a radius of all.

    ``kind`` says how it is rounded.
    """
    if lists[key] is None:
        return "unknown"
    value = lists[key][index]
    return "none" if value is None else f"{kind(value):.4g}"
