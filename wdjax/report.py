"""Reports of an audit: ``report.json`` with every number, and a page that stands alone."""

import base64
import html
import io
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from wdjax import audit
from wdjax.audit import ORDERS, Sandwich

SCHEMA = "wdjax.audit/1"


def versions() -> dict[str, str]:
    """The versions that a number depends on.

    >>> sorted(versions())[:3]
    ['flax', 'jax', 'jaxlib']
    """
    from importlib import metadata

    packages = ("wdjax", "jax", "jaxlib", "flax", "optax", "numpy", "scipy")
    return {"python": platform.python_version()} | {p: metadata.version(p) for p in packages}


def _numbers(values) -> list:
    """Plain numbers for JSON, which has no infinity: null stands for it."""
    return [float(v) if math.isfinite(v) else None for v in np.asarray(values, float).ravel()]


def _ball(order) -> str:
    return f"Omega_{order:g}"


def describe(found: Sandwich) -> dict[str, Any]:
    """A sandwich as plain lists and numbers."""
    low, high = audit.interval(found)
    walked = next(entry.result for entry in found.entries if entry.name == "wda++")
    return {
        "norm": audit.norm_name(found.norm),
        "radii": _numbers(found.radii),
        "samples": int(found.clean.size),
        "clean_accuracy": float(found.clean.mean()),
        "clean_accuracy_interval_95": [low, high],
        "clean_loss": found.clean_loss,
        "lipschitz_constant": found.lipschitz,
        "balls": {
            _ball(order): {
                "certified_accuracy": _numbers(found.certified[order]),
                "attacked_accuracy": _numbers(found.attacked(order)),
                "attacked_loss": _numbers(found.attacked_loss(order)),
                "certified_loss": _numbers(found.loss_bound[order]),
            }
            for order in ORDERS
        },
        "attacks": [
            {
                "name": entry.name,
                "ball": _ball(entry.order),
                "eps": entry.eps,
                "accuracy": entry.accuracy,
                "loss": entry.loss,
                "wasserstein": entry.spent,
                "gradients_per_image": float(np.mean(np.asarray(entry.result.gradients))),
                "forwards_per_image": float(np.mean(np.asarray(entry.result.forwards))),
            }
            for entry in found.entries
        ],
        "distances": {
            "certified_radius": _numbers(found.radius),
            "flip_found": _numbers(np.where(walked.success, walked.cost, np.inf)),
        },
        "invariants": [
            {"name": i.name, "holds": i.holds, "slack": i.slack if math.isfinite(i.slack) else None}
            for i in found.invariants
        ],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a report whole or not at all."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>wdjax audit</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0 }}
th, td {{ padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
img {{ max-width: 100%; height: auto }}
.holds {{ color: #2a7f4f }} .fails {{ color: #b00020; font-weight: bold }}
</style>
<h1>How robust is it?</h1>
<p>{summary}</p>
{sections}
<h2>Setting</h2>
<p>{setting}</p>
</html>
"""


def page(content: dict[str, Any], figures: dict[str, dict[str, bytes]]) -> str:
    """The report as one HTML file: tables, checks and figures, no other file and no script.

    Args:
      content: what goes to ``report.json``.
      figures: per model, caption -> PNG.
    """
    sections = [_section(model, figures.get(model["name"], {})) for model in content["models"]]
    setting = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    summary = (
        "Every budget eps has two answers: no attack in the ball can push the accuracy below the "
        "<b>certified</b> value, and the attacks here did push it down to the <b>attacked</b> one. "
        "The truth lies between. Omega_inf moves every sample by at most eps; Omega_2 and Omega_1 "
        "spend eps on average over the data set, so they are larger."
    )
    return _PAGE.format(
        summary=summary,
        sections="\n".join(sections),
        setting=html.escape(f"{content['data']}; seed {content['seed']}; {setting}."),
    )


def _section(model, figures):
    low, high = model["clean_accuracy_interval_95"]
    parts = [
        f"<h2>{html.escape(model['name'])}</h2>",
        f"<p>Clean accuracy {model['clean_accuracy']:.3f} on {model['samples']} samples "
        f"(95 % interval {low:.3f} to {high:.3f}); Lipschitz constant of the loss "
        f"{model['lipschitz_constant']:.3g} in {model['norm']}.</p>",
        _table(model),
    ]
    for caption, png in figures.items():
        data = base64.b64encode(png).decode()
        text = html.escape(caption)
        parts.append(f'<p><img alt="{text}" src="data:image/png;base64,{data}"></p>')
    rows = [
        f'<li class="{"holds" if i["holds"] else "fails"}">{"holds" if i["holds"] else "FAILS"}: '
        f"{html.escape(i['name'])} (slack {_cell(i['slack'], '.2g')})</li>"
        for i in model["invariants"]
    ]
    return "\n".join([*parts, "<ul>", *rows, "</ul>"])


def _table(model):
    head = "".join(f"<th>{eps:g}</th>" for eps in model["radii"])
    rows = []
    for ball, curves in model["balls"].items():
        for key, label in (("attacked_accuracy", "attacked"), ("certified_accuracy", "certified")):
            cells = "".join(f"<td>{_cell(value, '.3f')}</td>" for value in curves[key])
            rows.append(f"<tr><td>{ball} {label}</td>{cells}</tr>")
    return f"<table><tr><th>accuracy at eps</th>{head}</tr>{''.join(rows)}</table>"


def _cell(value, form):
    return "inf" if value is None else format(value, form)


def png(figure) -> bytes:
    """A figure's PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
