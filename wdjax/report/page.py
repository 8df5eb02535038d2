"""An audit as one self-contained HTML page, for light and dark mode and small screens."""

import html
import re
import string
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy.typing as npt

from wdjax.core import Classifier
from wdjax.report import changes, plots
from wdjax.report.changes import Changes
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
      x: ``[n, *shape]`` samples; images ``[n, height, width, channels]`` are drawn.
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
    if found.entries:
        caption = (
            "For every sample the nearest mistake that was found, and the distance within which "
            "none can be. A cross above a triangle would refute the certificate."
        )
        drawn.append(("Distances", caption, plots.distances(found)))
        caption = (
            "Which samples the adversary pays for, at several budgets: 1 is a sample that is moved "
            "as a whole. The cheapest mistakes are bought first, one of them in part."
        )
        drawn.append(("Spending of the budget", caption, plots.allocation(found)))
    if found.entries and plots.are_images(x):
        caption = (
            "The cheapest mistakes: the sample with its label, the change enlarged by the number "
            "above it (grey is no change), and the moved image with what the model now says."
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


def render(
    content: Mapping[str, Any],
    shown: Mapping[str, Sequence[Picture]],
    changed: Sequence[Changes] = (),
) -> str:
    """The report as one HTML file: findings, figures, tables, checks and a glossary.

    Args:
      content: the content of ``report.json``.
      shown: by model, its figures.
      changed: what changed since an earlier audit.
    """
    models = content["models"]
    since = {one.model: changes.as_html(one) for one in changed}
    sections = [
        _section(model, shown.get(model["model"], ()), since.get(model["model"], ""))
        for model in models
    ]
    passed = all(check["holds"] for model in models for check in model["invariants"])
    setting = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    seed = f"; seed {content['seed']}" if "seed" in content else ""
    seconds = f"; {content['seconds']:.0f} s" if "seconds" in content else ""
    template = resources.files("wdjax").joinpath("page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        kind="holds" if passed else "fails",
        verdict="Every statement that must hold does hold: the two sides never cross."
        if passed
        else "A statement that must hold is broken: do not trust these numbers.",
        sections="\n".join(sections),
        glossary="\n".join(_words(models)),
        setting=html.escape(f"{content['data']}{seed}{seconds}; {setting}."),
    )


def _section(model: Mapping[str, Any], shown: Sequence[Picture], since: str) -> str:
    """The HTML of one model: findings, warnings, changes, figures, tables and invariants."""
    low, high = model["clean_accuracy_interval"]
    figures = [
        f'<figure aria-label="{html.escape(title)}">{svg}<figcaption><b>{html.escape(title)}.</b> '
        f"{html.escape(caption)}</figcaption></figure>"
        for title, caption, svg in shown
    ]
    return "\n".join(
        [
            f"<h2>{html.escape(model['model'])}</h2>",
            *_trained(model),
            f"<p>On {model['n']} clean sample{'s' * (model['n'] > 1)} it is right for "
            f"{model['clean_accuracy']:.1%} (95 % interval {low:.1%} to {high:.1%})"
            f"{_lipschitz(model)}.</p>",
            "<ul>",
            *_findings(model),
            "</ul>",
            *_warnings(model),
            since,
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
    """For every ball a sentence with both bounds at the middle budget."""
    middle = len(model["eps_list"]) // 2
    said = []
    for key, curves in model["balls"].items():
        ball, proved = key.capitalize(), curves["certified_accuracy"]
        certified = (
            "and no certificate applies, so that nothing is known from below"
            if proved is None
            else f"and no attack can leave less than <b>{proved[middle]:.1%}</b>"
        )
        said.append(
            f"<li>{ball}, eps {model['eps_list'][middle]:g} in {model['norm']} ({_BALLS[ball]}): "
            f"the attacks left <b>{curves['attacked_accuracy'][middle]:.1%}</b>, {certified}.</li>"
        )
    return said


def _best_table(model: Mapping[str, Any]) -> str:
    """The table of both bounds for each ball."""
    none = [None] * len(model["eps_list"])
    rows = [
        (f"{ball.capitalize()} {label}", curves[f"{label}_accuracy"] or none)
        for ball, curves in model["balls"].items()
        for label in ("attacked", "certified")
    ]
    return _table(model, "Accuracy by eps: the strongest attack, the best certificate.", rows)


def _single_table(model: Mapping[str, Any]) -> str:
    """The table of every attack and certificate; a certificate that does not apply says why."""
    rows: list[tuple[str, Sequence[float] | str]] = []
    for key in model["balls"]:
        ball = key.capitalize()
        for name, attack in model["attacks"].items():
            searches = [one for one in attack["searches"] if f"Omega_{one['order']}" == ball]
            if searches:
                rows.append((f"{ball} {name}", [one["attacked_accuracy"] for one in searches]))
        for name, proved in model["certificates"].items():
            curves = proved.get("certified_accuracy", {})
            rows.append((f"{ball} certified by {name}", curves.get(key) or proved["refused"]))
    return _table(model, "Accuracy by eps: every attack and certificate by itself.", rows)


def _table(
    model: Mapping[str, Any], caption: str, rows: Sequence[tuple[str, Sequence[float | None] | str]]
) -> str:
    titles = ["accuracy at eps", *(f"{eps:.4g}" for eps in model["eps_list"])]
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{title}</button></th>'
        for title in titles
    )
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>" + _row(values, len(model["eps_list"])) + "</tr>"
        for name, values in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(values: Sequence[float | None] | str, columns: int) -> str:
    """The cells of a row; a text, which says why there are none, spans all columns."""
    if isinstance(values, str):
        return f'<td class="why" colspan="{columns}">{html.escape(values)}</td>'
    return "".join(map(_cell, values))


def _cell(value: float | None) -> str:
    """A table cell with three decimals; ``data-value`` holds the exact number, for sorting."""
    if value is None:
        return '<td data-value="-1">none</td>'
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
        name: attack["explained"] or "An attack without a description."
        for model in models
        for name, attack in model["attacks"].items()
    }
    return [
        f"<dt>{html.escape(word)}</dt><dd>{html.escape(meaning)}</dd>"
        for word, meaning in (GLOSSARY | made).items()
    ]
