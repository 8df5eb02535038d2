"""Reports of an audit: ``report.json`` with every number, and a page that stands alone."""

import base64
import html
import io
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wdjax import audit
from wdjax.audit import ORDERS, Entry, Sandwich, ball_name
from wdjax.core import Found

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "wdjax.audit/1"


def versions() -> dict[str, str]:
    """The versions that a number depends on.

    >>> sorted(versions())[:3]
    ['flax', 'jax', 'jaxlib']
    """
    from importlib import metadata

    packages = ("wdjax", "jax", "jaxlib", "flax", "optax", "numpy", "scipy")
    return {"python": platform.python_version()} | {p: metadata.version(p) for p in packages}


def number(value: float) -> float | None:
    """A plain number for JSON, which has neither infinity nor NaN: null stands for them."""
    return float(value) if math.isfinite(value) else None


def _numbers(values: npt.ArrayLike) -> list[float | None]:
    return [number(value) for value in np.asarray(values, float).ravel()]


def describe(found: Sandwich) -> dict[str, Any]:
    """A sandwich as plain lists and numbers."""
    low, high = audit.interval(found)
    return {
        "norm": audit.norm_name(found.ball.norm),
        "radii": _numbers(found.radii),
        "samples": int(found.correct.size),
        "clean_accuracy": float(found.correct.mean()),
        "clean_accuracy_interval_95": [low, high],
        "clean_loss": found.clean_loss,
        "lipschitz_constant": None if found.lipschitz is None else number(found.lipschitz),
        "balls": {ball_name(order): _ball(found, order) for order in ORDERS},
        "attacks": [_entry(entry) for entry in found.entries],
        "certificates": [
            {
                "name": name,
                "ball": ball_name(order),
                "accuracy": _numbers(found.certified(order, name)),
            }
            for name in found.certificates
            for order in ORDERS
        ],
        "loss_bounds": [
            {"name": name, "ball": ball_name(order), "loss": _numbers(bound[order])}
            for name, bound in found.loss_bounds.items()
            for order in ORDERS
        ],
        "distances": {
            "certified_radius": _numbers(found.radius),
            "flip_found": _numbers(found.nearest()[0]) if found.entries else None,
        },
        "invariants": [i._asdict() | {"slack": number(i.slack)} for i in found.invariants],
    }


def _ball(found: Sandwich, order: float) -> dict[str, Any]:
    return {
        "certified_accuracy": _numbers(found.certified(order)),
        "attacked_accuracy": _numbers(found.attacked(order)),
        "attacked_loss": _numbers(found.attacked_loss(order)),
        "certified_loss": _numbers(found.certified_loss(order)),
    }


def _entry(entry: Entry) -> dict[str, Any]:
    kappa = {} if entry.kappa is None else {"kappa": entry.kappa}
    return {
        "name": entry.name,
        "ball": ball_name(entry.order),
        "eps": entry.eps,
        **kappa,
        "accuracy": entry.accuracy,
        "loss": entry.loss,
        "wasserstein": entry.spent,
        **spent(entry.result),
    }


def spent(result: Found) -> dict[str, Any]:
    """What an attack spent and met, for JSON."""
    faults = np.flatnonzero(result.fault)
    gradients, zeros = (int(np.sum(count)) for count in (result.gradients, result.zeros))
    return {
        "gradients_per_image": float(np.mean(result.gradients)),
        "forwards_per_image": float(np.mean(result.forwards)),
        "zero_gradients": zeros / max(gradients, 1),
        "faults": len(faults),
        "first_fault": int(faults[0]) if len(faults) else None,
    }


VANISHED = "gradients vanish: the attacked accuracy may overstate robustness"
"""Said of an attack of whose gradients more than half were zero in every coordinate."""


def remarks(measured: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing an attack's numbers, from :func:`spent`.

    >>> remarks({"faults": 2, "first_fault": 7, "zero_gradients": 0.0})
    ['2 samples met an output or a gradient that was not finite, first at index 7']
    """
    said = []
    if count := measured["faults"]:
        said.append(
            f"{count} sample{'s' * (count > 1)} met an output or a gradient that was not finite, "
            f"first at index {measured['first_fault']}"
        )
    if (share := measured["zero_gradients"]) > 0.5:
        said.append(f"{share:.0%} zero gradients; {VANISHED}")
    return said


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


def _section(model: dict[str, Any], figures: dict[str, bytes]) -> str:
    low, high = model["clean_accuracy_interval_95"]
    parts = [
        f"<h2>{html.escape(model['name'])}</h2>",
        f"<p>Clean accuracy {model['clean_accuracy']:.3f} on {model['samples']} samples "
        f"(95 % interval {low:.3f} to {high:.3f}){_lipschitz(model)}.</p>",
        _best_table(model),
    ]
    for caption, picture in figures.items():
        data = base64.b64encode(picture).decode()
        text = html.escape(caption)
        parts.append(f'<p><img alt="{text}" src="data:image/png;base64,{data}"></p>')
    return "\n".join([*parts, _single_table(model), *_warnings(model), _checks(model)])


def _lipschitz(model: dict[str, Any]) -> str:
    constant = model["lipschitz_constant"]
    if constant is None:
        return ""
    return f"; Lipschitz constant of the loss {constant:.3g} in {model['norm']}"


def _best_table(model: dict[str, Any]) -> str:
    """The two sides, per ball."""
    rows = [
        (f"{ball} {label}", curves[key])
        for ball, curves in model["balls"].items()
        for key, label in (("attacked_accuracy", "attacked"), ("certified_accuracy", "certified"))
    ]
    return _table(model, rows)


def _single_table(model: dict[str, Any]) -> str:
    """Every attack and every certificate by itself."""
    curves: dict[str, list[float]] = {}
    for entry in model["attacks"]:
        curves.setdefault(f"{entry['ball']} {entry['name']}", []).append(entry["accuracy"])
    for bound in model["certificates"]:
        curves[f"{bound['ball']} certified by {bound['name']}"] = bound["accuracy"]
    places = {ball: place for place, ball in enumerate(model["balls"])}
    return _table(model, sorted(curves.items(), key=lambda row: places[row[0].split()[0]]))


def _table(model: dict[str, Any], rows: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    head = "".join(f"<th>{eps:g}</th>" for eps in model["radii"])
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(f"<td>{_cell(value, '.3f')}</td>" for value in values)
        + "</tr>"
        for name, values in rows
    )
    return f"<table><tr><th>accuracy at eps</th>{head}</tr>{body}</table>"


def _warnings(model: dict[str, Any]) -> list[str]:
    """Faults and vanished gradients, attack by attack."""
    said = [
        f'<li class="fails">{html.escape(label)}: {html.escape(remark)}</li>'
        for label, remark in warnings(model)
    ]
    return ["<h3>Be careful</h3>", "<ul>", *said, "</ul>"] if said else []


def warnings(model: dict[str, Any]) -> list[tuple[str, str]]:
    """``(attack and budget, remark)`` for every attack whose numbers may mislead."""
    return [
        (f"{entry['name']}, {entry['ball']}, eps {entry['eps']:g}", remark)
        for entry in model["attacks"]
        for remark in remarks(entry)
    ]


def _checks(model: dict[str, Any]) -> str:
    rows = []
    for check in model["invariants"]:
        kind, word = ("holds", "holds") if check["holds"] else ("fails", "FAILS")
        rows.append(f'<li class="{kind}">{word}: {html.escape(statement(check))}</li>')
    return "\n".join(["<ul>", *rows, "</ul>"])


def statement(check: dict[str, Any]) -> str:
    """An invariant in words, with its slack and who breaks it.

    >>> statement({"name": "exact W_p <= eps", "holds": True, "slack": 0.01, "detail": ""})
    'exact W_p <= eps (slack 0.01)'
    """
    detail = f": {check['detail']}" if check["detail"] else ""
    slack = "not finite" if check["slack"] is None else format(check["slack"], ".2g")
    return f"{check['name']} (slack {slack}){detail}"


def _cell(value: float | None, form: str) -> str:
    return "inf" if value is None else format(value, form)


def png(figure: "Figure") -> bytes:
    """A figure's PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
