"""An audit as one self-contained HTML page, for light and dark mode and small screens."""

import html
import re
import string
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy.typing as npt

from wdjax.core import Classifier
from wdjax.report import plots
from wdjax.report.evidence import ORDERS, Sandwich, ball_name
from wdjax.report.summary import statement, warnings

_COLOURS = {plots.INK: "var(--ink)", plots.FAINT: "var(--faint)", plots.UNKNOWN: "var(--gap)"}
"""Colours of a figure that follow the reader's light or dark mode."""

_BALLS = {
    "Omega_inf": "every sample moved by at most eps",
    "Omega_2": "samples moved by eps in the root mean square",
    "Omega_1": "samples moved by eps on average",
}

GLOSSARY = {
    "eps": "The budget: how far the adversary may move samples, in units of the pixels, which run "
    "from 0 to 1.",
    "linf, l2, l1": "How a move is measured: by the pixel that changes most, by the root of the "
    "sum of squares, or by the sum of all changes.",
    "Ball": "All that the adversary may do with the budget. In a larger ball he can do more, so "
    "that both answers are lower.",
    "Omega_p": "Omega_inf moves every sample by at most eps: the usual threat. In Omega_1 eps is "
    "spent on average over the data set: little on samples that are close to a mistake, nothing "
    "on those that are far. Omega_2 is between: the mean of the squares is at most eps squared. "
    "They are Wasserstein balls of order p around the data set.",
    "kappa": "The adversary may move a part of a sample: 1 / kappa of its weight, and that part "
    "kappa^(1/p) times as far.",
    "Attacked accuracy": "The lowest that any attack here reached. Another attack may reach less, "
    "so it is a bound from above.",
    "Certified accuracy": "What no adversary can undercut, by a proof about the model and not by "
    "trying. A certificate that proves little says nothing against the model.",
    "Certified radius": "Around this sample, every point within that distance is classified "
    "correctly.",
    "Flip": "A point that the model gets wrong, next to a sample that it gets right.",
    "Expected loss": "The mean cross-entropy. The strongest attack found makes it at least this "
    "large; the certified loss is what no adversary in the ball can exceed.",
    "Slack": "By how much a statement holds. Near 0 it holds only just; negative, it is broken, "
    "and something in the model or the library is wrong.",
}


class Picture(NamedTuple):
    """A figure of the page."""

    title: str
    caption: str
    svg: str


def pictures(
    found: Sandwich, x: npt.ArrayLike, y: npt.ArrayLike, model: Classifier, salt: str
) -> list[Picture]:
    """The figures of one model, with captions.

    Args:
      found: the audit of the model.
      x: ``[n, height, width, channels]`` images.
      y: ``[n]`` labels.
      model: the attacked model.
      salt: a string, different for each model of a page.
    """
    drawn = []
    for order in ORDERS:
        caption = (
            f"{ball_name(order)}: {_BALLS[ball_name(order)]}. Attacks bound the accuracy from above"
        )
        caption += ", the certificate from below." if found.certificates else "."
        drawn.append(("Accuracy against eps", caption, plots.accuracy(found, (order,))))
    for order in ORDERS:
        caption = (
            f"{ball_name(order)}: how large the expected loss can be made. The truth is in the "
            "shade; the axis is logarithmic."
        )
        drawn.append(("Loss against eps", caption, plots.loss(found, (order,))))
    caption = (
        "For every sample the nearest mistake that was found, and the distance within which none "
        "can be. A cross above a triangle would refute the certificate."
    )
    drawn.append(("Distances", caption, plots.distances(found)))
    caption = (
        "Which samples the adversary pays for, at several budgets: 1 is a sample that is moved as "
        "a whole. The cheapest mistakes are bought first, one of them in part."
    )
    drawn.append(("Spending of the budget", caption, plots.allocation(found)))
    caption = (
        "The cheapest mistakes: the sample with its label, the change enlarged by the number above "
        "it (grey is no change), and the moved image with what the model now says."
    )
    drawn.append(("Examples of cheap flips", caption, plots.examples(found, x, y, model)))
    return [
        Picture(title, caption, _adapted(plots.svg(figure, f"{salt}{place}")))
        for place, (title, caption, figure) in enumerate(drawn)
    ]


def _adapted(svg: str) -> str:
    """An SVG file as an element of an HTML page: without header, fixed size and unused ids.

    Ink and background colours become the page's variables, so that they follow light and dark mode.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    used = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda name: name[0] if name[1] in used else "", svg)
    svg = re.sub(r'<svg width="[^"]*" height="[^"]*"', '<svg role="img"', svg)
    svg = re.sub(r' height="[\d.]+pt"| width="[\d.]+pt"', "", svg)
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, variable)
    return svg


def render(content: Mapping[str, Any], shown: Mapping[str, Sequence[Picture]]) -> str:
    """The report as one HTML file: findings, figures, tables, checks and a glossary.

    Args:
      content: the content of ``report.json``.
      shown: by model, its figures.
    """
    models = content["models"]
    sections = [_section(model, shown.get(model["name"], ())) for model in models]
    passed = all(check["holds"] for model in models for check in model["invariants"])
    setting = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    seconds = f"; {content['seconds']:.0f} s" if "seconds" in content else ""
    template = resources.files("wdjax").joinpath("page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        kind="holds" if passed else "fails",
        verdict="Every statement that must hold does hold: the two sides never cross."
        if passed
        else "A statement that must hold is broken: do not trust these numbers.",
        sections="\n".join(sections),
        glossary="\n".join(_words(models)),
        setting=html.escape(f"{content['data']}; seed {content['seed']}{seconds}; {setting}."),
    )


def _section(model: Mapping[str, Any], shown: Sequence[Picture]) -> str:
    """The HTML of one model: findings, warnings, figures, tables and invariants."""
    low, high = model["clean_accuracy_interval_95"]
    figures = [
        f'<figure aria-label="{html.escape(title)}">{svg}<figcaption><b>{html.escape(title)}.</b> '
        f"{html.escape(caption)}</figcaption></figure>"
        for title, caption, svg in shown
    ]
    return "\n".join(
        [
            f"<h2>{html.escape(model['name'])}</h2>",
            *_trained(model),
            f"<p>On {model['samples']} clean samples it is right for "
            f"{model['clean_accuracy']:.1%} (95 % interval {low:.1%} to {high:.1%})"
            f"{_lipschitz(model)}.</p>",
            "<ul>",
            *_findings(model),
            "</ul>",
            *_warnings(model),
            *(['<div class="figures">', *figures, "</div>"] if figures else []),
            _best_table(model),
            _single_table(model),
            _checks(model),
        ]
    )


def _trained(model: Mapping[str, Any]) -> list[str]:
    """How the model was made, if the report knows it."""
    return [f"<p>{html.escape(model['trained'])}</p>"] if "trained" in model else []


def _lipschitz(model: Mapping[str, Any]) -> str:
    """A clause with the loss's Lipschitz constant, or nothing if it is unknown."""
    constant = model["lipschitz_constant"]
    if constant is None:
        return ""
    return f"; a step of length 1 in {model['norm']} changes its loss by at most {constant:.3g}"


def _findings(model: Mapping[str, Any]) -> list[str]:
    """An item for every ball: attacked and certified accuracy at the middle radius."""
    middle = len(model["radii"]) // 2
    said = []
    for ball, curves in model["balls"].items():
        low, high = (curves[f"{side}_accuracy"][middle] for side in ("certified", "attacked"))
        said.append(
            f"<li>{ball}, eps {model['radii'][middle]:g} in {model['norm']} ({_BALLS[ball]}): the "
            f"attacks left <b>{high:.1%}</b>, and no attack can leave less than "
            f"<b>{low:.1%}</b>.</li>"
        )
    return said


def _best_table(model: Mapping[str, Any]) -> str:
    """The HTML table of the best attacked and certified accuracies, two rows for each ball."""
    rows = [
        (f"{ball} {label}", curves[key])
        for ball, curves in model["balls"].items()
        for key, label in (("attacked_accuracy", "attacked"), ("certified_accuracy", "certified"))
    ]
    return _table(model, "Accuracy by eps: the strongest attack, the best certificate.", rows)


def _single_table(model: Mapping[str, Any]) -> str:
    """The HTML table of every attack's and certificate's accuracies, ordered by ball."""
    curves: dict[str, list[float]] = {}
    for entry in model["attacks"]:
        curves.setdefault(f"{entry['ball']} {entry['name']}", []).append(entry["accuracy"])
    for bound in model["certificates"]:
        curves[f"{bound['ball']} certified by {bound['name']}"] = bound["accuracy"]
    places = {ball: place for place, ball in enumerate(model["balls"])}
    rows = sorted(curves.items(), key=lambda row: places[row[0].split()[0]])
    return _table(model, "Accuracy by eps: every attack and certificate by itself.", rows)


def _table(
    model: Mapping[str, Any], caption: str, rows: Sequence[tuple[str, Sequence[float | None]]]
) -> str:
    """An HTML table with one column for each radius, sortable by the page's script.

    ``rows`` are (name, values), a value for each radius; None is shown as inf.
    """
    titles = ["accuracy at eps", *(f"{eps:g}" for eps in model["radii"])]
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{title}</button></th>'
        for title in titles
    )
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>" + "".join(map(_cell, values)) + "</tr>"
        for name, values in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value: float | None) -> str:
    """A table cell with three decimals; ``data-value`` holds the exact number, for sorting."""
    if value is None:
        return '<td data-value="Infinity">inf</td>'
    return f'<td data-value="{value!r}">{value:.3f}</td>'


def _warnings(model: Mapping[str, Any]) -> list[str]:
    """The HTML section of remarks on attacks, such as zero gradients; nothing without any."""
    said = [
        f'<li class="fails">{html.escape(label)}: {html.escape(remark)}</li>'
        for label, remark in warnings(model)
    ]
    return ["<h3>Be careful</h3>", "<ul>", *said, "</ul>"] if said else []


def _checks(model: Mapping[str, Any]) -> str:
    """The HTML list of all invariants, with "holds" or "FAILS"."""
    rows = []
    for check in model["invariants"]:
        kind, word = ("holds", "holds") if check["holds"] else ("fails", "FAILS")
        rows.append(f'<li class="{kind}">{word}: {html.escape(statement(check))}</li>')
    return "\n".join(["<h3>What must hold</h3>", "<ul>", *rows, "</ul>"])


def _words(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """The glossary as HTML, followed by every attack with the first paragraph of its docstring."""
    made = {
        method["name"]: method["explained"] or "An attack without a description."
        for model in models
        for method in model["methods"]
    }
    return [
        f"<dt>{html.escape(word)}</dt><dd>{html.escape(meaning)}</dd>"
        for word, meaning in (GLOSSARY | made).items()
    ]
