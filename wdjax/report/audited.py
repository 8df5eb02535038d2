"""The audit of one model: its measurements, its content as JSON, its table and its page."""

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wdjax.core import Classifier
from wdjax.files import atomic
from wdjax.report import changes, plots, summary
from wdjax.report import page as pages
from wdjax.report.evidence import Sandwich
from wdjax.report.rounded import AtLeast, AtMost


class Audit(NamedTuple):
    """An audit of one model, from :func:`wdjax.audit.of`: ``print`` it or :meth:`save` its page."""

    name: str
    sandwich: Sandwich
    """All measurements."""
    model: Classifier
    x: np.ndarray
    """``[n, *shape]``"""
    y: np.ndarray
    """``[n]``"""
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every statement that must hold does hold."""
        return self.sandwich.passed

    @property
    def content(self) -> dict[str, Any]:
        """The content of ``report.json``, as ``docs/json.md`` explains it."""
        described = {"model": self.name} | summary.describe(self.sandwich)
        return content([described], "the samples", self.x, self.y, self.seconds)

    def __str__(self) -> str:
        whole = self.content
        said = [f"CAREFUL, {remark}" for model in whole["models"] for remark in model["remarks"]]
        return "\n".join([table(whole), *said])

    def save(self, folder: str | PathLike[str], compare: str | PathLike[str] | None = None) -> Path:
        """Writes ``report.json`` and ``report.html``, a page that stands alone.

        Args:
          folder: made if it is not there.
          compare: the ``report.json`` of an earlier audit; the page then shows what changed.

        Returns:
          The path of the page.

        Raises:
          ValueError: the folder cannot be written, or the earlier audit cannot be compared with.
        """
        shown = Path(folder) / "report.html"
        atomic.check_writable(shown)
        text, found = page(self, compare=compare), summary.dumps(self.content)
        atomic.write_all({shown: text, shown.with_name("report.json"): found})
        return shown


def page(audit: Audit, *, compare: str | PathLike[str] | None = None) -> str:
    """An audit as one HTML page, with figures, that needs no other file and no network.

    Args:
      audit: from :func:`wdjax.audit.of`.
      compare: the ``report.json`` of an earlier audit; the page then shows what changed.

    Returns:
      The text of the page. Images ``[n, height, width, channels]`` of 1 or 3 channels are drawn.
      The page holds the report's numbers, to download and to spend any other budget.

    Raises:
      ValueError: the earlier audit cannot be compared with.

    Cost: a second or two of drawing.

    >>> import jax, wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jax.numpy.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jax.numpy.array([[0.625, 0.375]]), jax.numpy.array([0])
    >>> page(wdjax.audit.of(model, x, y, eps_list=[0.25])).splitlines()[0]
    '<!doctype html>'
    """
    whole = audit.content
    changed = () if compare is None else changes.compare(changes.read(compare), whole)
    shown = pages.draw(audit.sandwich, audit.x, audit.y, audit.model, "model")
    return pages.render(whole, {audit.name: shown}, changed)


def content(
    models: list[dict[str, Any]], data: str, x: np.ndarray, y: np.ndarray, seconds: float
) -> dict[str, Any]:
    """The content of ``report.json``.

    Args:
      models: for each its name as ``model``, and what :func:`wdjax.report.summary.describe` says.
      data: the samples in words or by their file.
      x: ``[n, *shape]``.
      y: ``[n]``.
      seconds: the time taken.
    """
    return summary.head("audit") | {
        "data": data,
        "data_sha256": summary.sha256(x, y),
        "seconds": seconds,
        "remarks": [],
        "passed": all(check["holds"] for model in models for check in model["invariants"]),
        "models": models,
    }


def table(whole: Mapping[str, Any]) -> str:
    """Accuracies of an audit by eps, what is broken, and remarks, as text."""
    rows = []
    for model in whole["models"]:
        clean = f"{model['clean_accuracy']:.3f} of {model['n']} sample{'s' * (model['n'] > 1)}"
        rows.append(f"{model['model']}: clean accuracy {clean}")
        rows.append(f"  eps ({model['norm']})".ljust(14) + _cells(model["eps_list"], ".4g"))
        for ball, curves in model["balls"].items():
            for key, sign, bound in (
                ("attacked_accuracy", "<=", AtMost),
                ("certified_accuracy", ">=", AtLeast),
            ):
                values = curves[key]
                said = "   not certified" if values is None else _cells(map(bound, values), ".3f")
                rows.append(f"  {ball.capitalize():<9} {sign}{said}")
    checks = [check for model in whole["models"] for check in model["invariants"]]
    broken = [check["name"] for check in checks if not check["holds"]]
    held = f"all {len(checks)} checks hold: no attack crosses a certificate"
    rows.append(f"FAILED CHECKS: {'; '.join(broken)}" if broken else held)
    return "\n".join(rows)


def _cells(values: Iterable[float], how: str) -> str:
    return "".join(f" {value:>8{how}}" for value in values)


def figures(audit: Sandwich, x: np.ndarray, y: np.ndarray, model: Classifier) -> dict[str, bytes]:
    """The figures of papers and slides as PNG, by name."""
    drawn = {"accuracy": plots.accuracy(audit), "loss": plots.loss(audit)}
    if audit.entries:
        drawn |= {"distances": plots.distances(audit), "allocation": plots.allocation(audit)}
        if plots.are_images(x):
            drawn["examples"] = plots.examples(audit, x, y, model)
    return {name: plots.png(figure) for name, figure in drawn.items()}
