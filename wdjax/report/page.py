"""An audit as one self-contained HTML page, for light and dark mode and small screens."""

import html
import itertools
import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdjax.core import Classifier
from wdjax.report import changes, plots, worst
from wdjax.report.changes import Changes
from wdjax.report.evidence import ORDERS, Sandwich, ball_name
from wdjax.report.html_table import doubts, table
from wdjax.report.rounded import AtLeast, AtMost
from wdjax.report.summary import statement, warnings
from wdjax.report.worst import WorstSample

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
    "spent on average over the data set: only samples near a mistake are moved, the cheapest "
    "first. Omega_2 is between: the mean of the squares is at most eps squared. They are "
    "Wasserstein balls of order p around the data set.",
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


class Drawn(NamedTuple):
    """What the page shows of a model and the report's numbers do not hold."""

    pictures: list[Picture]
    samples: list[WorstSample]


def draw(
    found: Sandwich, x: npt.ArrayLike, y: npt.ArrayLike, model: Classifier, salt: str
) -> Drawn:
    """The figures and the worst samples of one model; arguments as of :func:`pictures`."""
    return Drawn(pictures(found, x, y, model, salt), worst.worst(found, x, y, model))


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
        ball = ball_name(order)
        caption = f"{_BALLS[ball].capitalize()}. Attacks bound the accuracy from above"
        caption += ", the certificate from below." if found.certificates else "."
        drawn.append((f"Accuracy against eps in {ball}", caption, plots.accuracy(found, (order,))))
    for order in ORDERS:
        caption = (
            "How large the expected loss can be made. The truth is in the shade; the axis is "
            "logarithmic."
        )
        title = f"Loss against eps in {ball_name(order)}"
        drawn.append((title, caption, plots.loss(found, (order,))))
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
        Picture(title, caption, _adapted(plots.svg(figure, f"{salt}{rank}")))
        for rank, (title, caption, figure) in enumerate(drawn)
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
    shown: Mapping[str, Drawn],
    changed: Sequence[Changes] = (),
) -> str:
    """The report as one HTML file: findings, figures, samples, tables, checks and a glossary.

    Args:
      content: the content of ``report.json``, which the page holds too, to download and to spend
        any budget on it.
      shown: by model, its figures and worst samples.
      changed: what changed since an earlier audit.
    """
    models = content["models"]
    since = {one.model: one for one in changed}
    sections = [
        _section(rank, model, shown.get(model["model"], Drawn([], [])), since.get(model["model"]))
        for rank, model in enumerate(models)
    ]
    kept = ("eps_list", "balls", "samples")
    earlier = {one.model: {key: one.earlier[key] for key in kept} for one in changed}
    passed = all(check["holds"] for model in models for check in model["invariants"])
    setting = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    seed = f"; seed {content['seed']}" if "seed" in content else ""
    seconds = f"; {content['seconds']:.0f} s" if "seconds" in content else ""
    package = resources.files("wdjax")
    template = package.joinpath("page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        kind="holds" if passed else "fails",
        verdict="Every statement that must hold does hold: the two sides never cross."
        if passed
        else "A statement that must hold is broken: do not trust these numbers.",
        doubts=doubts(_remarks(content)),
        contents="\n".join(itertools.starmap(_contents, enumerate(sections))),
        sections="\n".join(itertools.starmap(_shown, enumerate(sections))),
        glossary="\n".join(_words(models)),
        setting=html.escape(f"{content['data']}{seed}{seconds}; {setting}."),
        report=_embedded(content),
        earlier=_embedded(earlier),
        script=package.joinpath("page.js").read_text(encoding="utf-8"),
    )


def _remarks(content: Mapping[str, Any]) -> Iterator[str]:
    """What is to be said of all models: which samples are missing, and the report's remarks."""
    if covered := content.get("coverage"):
        missing = ", ".join(map(str, covered["missing_parts"]))
        yield f"about {covered['n']} of {covered['of']} samples: without the parts {missing}"
    yield from content["remarks"]


def bare(title: str, body: str) -> str:
    """A page in the same style that has this heading and this HTML, and no script."""
    template = resources.files("wdjax").joinpath("page.html").read_text(encoding="utf-8")
    head = template.partition("<h1>")[0].replace("<title>wdjax audit", f"<title>{title}")
    return f"{head}<h1>{title}</h1>\n{body}\n</main>\n</body>\n</html>\n"


def _embedded(content: Any) -> str:
    """JSON that may stand inside of ``<script>``."""
    return json.dumps(content, allow_nan=False).replace("<", "\\u003c")


class Section(NamedTuple):
    """The part of the page about one model."""

    name: str
    parts: list[tuple[str, str]]
    """Title and HTML of each part; parts without HTML are left out."""


def _section(rank: int, model: Mapping[str, Any], shown: Drawn, since: Changes | None) -> Section:
    """The parts of one model, the ``rank``-th of the page."""
    low, high = model["clean_accuracy_interval"]
    figures = [_figure(picture, model["model"]) for picture in shown.pictures]
    findings = [
        *_trained(model),
        f"<p>On {model['n']} clean sample{'s' * (model['n'] > 1)} it is right for "
        f"{model['clean_accuracy']:.1%} (95 % interval {low:.1%} to {high:.1%}).</p>",
        "<ul>",
        *_findings(model),
        "</ul>",
        _elsewhere(model),
    ]
    parts = [
        ("Findings", "\n".join(findings)),
        ("Be careful", _warnings(model)),
        (f"Since {since.before}", changes.as_html(since)) if since else ("", ""),
        ("Any budget", _solver(rank, model, since is not None)),
        ("Figures", "\n".join(['<div class="figures">', *figures, "</div>"]) if figures else ""),
        ("Samples", _samples(model, shown.samples)),
        ("Tables", _best_table(model) + _single_table(model)),
        ("What must hold", _checks(model)),
    ]
    return Section(model["model"], [(title, text) for title, text in parts if text])


def _contents(rank: int, section: Section) -> str:
    """The entry of one model in the table of contents."""
    parts = "".join(
        f'<li><a href="#m{rank}-{number}">{html.escape(title)}</a></li>'
        for number, (title, _) in enumerate(section.parts)
    )
    return f'<li><a href="#m{rank}">{html.escape(section.name)}</a><ul>{parts}</ul></li>'


def _shown(rank: int, section: Section) -> str:
    """The HTML of one model."""
    parts = "\n".join(
        f'<h3 id="m{rank}-{number}">{html.escape(title)}</h3>\n{text}'
        for number, (title, text) in enumerate(section.parts)
    )
    return (
        f'<section data-model="{rank}" aria-labelledby="m{rank}">'
        f'<h2 id="m{rank}">{html.escape(section.name)}</h2>\n{parts}</section>'
    )


def _figure(picture: Picture, model: str) -> str:
    """A figure with a caption, and the name that a screen reader says."""
    title, caption = html.escape(picture.title), html.escape(picture.caption)
    named = f'role="img" aria-label="{title}, {html.escape(model)}"'
    svg = picture.svg.replace('role="img"', named, 1)
    return f"<figure>{svg}<figcaption><b>{title}.</b> {caption}</figcaption></figure>"


def _solver(rank: int, model: Mapping[str, Any], compared: bool) -> str:
    """A form that spends any budget again, on the flips found and the certified radii.

    ``page.js`` fills it in; where scripts do not run it stays hidden. ``compared`` adds a column
    and curves of the earlier audit.
    """
    if model["samples"]["flip_distance"] is None and model["samples"]["certified_radius"] is None:
        return ""
    budgets = model["eps_list"]
    most, middle = 1.5 * max(budgets) or 1.0, budgets[len(budgets) // 2]
    balls = "".join(
        f'<label><input type="radio" name="ball-{rank}" value="{key}"'
        f"{' checked' * (key == 'omega_1')}> {key.capitalize()}, {_BALLS[key.capitalize()]}</label>"
        for key in model["balls"]
    )
    columns = ("now", "before") if compared else ("now",)
    curves = [(name, side) for name in columns for side in ("attacked", "certified")]
    lines = "".join(f'<polyline class="{name} {side}"/>' for name, side in curves)
    rows = [
        (f"{side} accuracy", "".join(f'<td data-of="{name} {side}"></td>' for name in columns))
        for side in ("attacked", "certified")
    ]
    dashed = ", the earlier audit dashed" if compared else ""
    return (
        '<form hidden class="solver"><p>The budget is spent again, in this page: on the nearest '
        "flip of every sample that any attack found, and on the certified radii.</p>"
        f"<fieldset><legend>Ball</legend>{balls}</fieldset>"
        f'<p><label>eps in {model["norm"]} <input type="range" min="0" max="{most!r}" step="any" '
        f'value="{middle!r}"></label> <label>exactly <input type="number" '
        f'min="0" step="any" value="{middle!r}"></label></p>'
        '<figure><svg role="img" aria-label="Accuracy against eps of '
        f'{html.escape(model["model"])} in the chosen ball" viewBox="0 0 100 50" '
        f'preserveAspectRatio="none">{lines}<line y2="50"/></svg><figcaption>Accuracy from 0 to '
        f"100 % against eps from 0 to {most:.4g}: attacked (orange) above, certified (thick) "
        f"below{dashed}.</figcaption></figure>"
        '<div aria-live="polite">'
        f"{table('Accuracy at this eps', ('side', *columns), rows)}</div></form>"
    )


def _samples(model: Mapping[str, Any], shown: Sequence[WorstSample]) -> str:
    """The worst samples one by one, and a table of all that ``page.js`` fills when it is opened."""
    parts = []
    if shown:
        parts.append(
            "<p>The correctly classified samples that are nearest to a mistake, the nearest first. "
            f"Distances are in {model['norm']}.</p>"
        )
    parts += [worst.as_html(sample, model) for sample in shown]
    return "\n".join(
        [
            *parts,
            f'<details hidden class="all"><summary>All {model["n"]} samples</summary>'
            f'<div class="scroll" role="group" tabindex="0" aria-label="All samples of '
            f'{html.escape(model["model"])}"><table><caption>Every sample, the nearest mistakes '
            "first; none is a flip that was not found or a radius without end.</caption></table>"
            "</div></details>",
            '<p><a hidden class="csv" download="samples.csv">Download all samples as CSV</a></p>',
        ]
    )


def _trained(model: Mapping[str, Any]) -> list[str]:
    """How the model was made, if the report knows it."""
    return [f"<p>{html.escape(model['trained'])}</p>"] if "trained" in model else []


def _elsewhere(model: Mapping[str, Any]) -> str:
    """Where other budgets are, and the loss's Lipschitz constant if it is known."""
    constant = model["lipschitz_constant"]
    steep = (
        ""
        if constant is None
        else f" A step of length 1 in {model['norm']} changes its loss by at most "
        f"{AtMost(constant):.3g}."
    )
    budgets = ", ".join(f"{eps:g}" for eps in model["eps_list"])
    return f"<p>The tables below have every eps of {budgets}.{steep}</p>"


def _findings(model: Mapping[str, Any]) -> list[str]:
    """For every ball a sentence with both bounds at the budget that tells most about them.

    It is the one at which the attacks leave what is nearest to half of the unattacked accuracy, in
    the mean of the balls.
    """
    left = np.mean([curves["attacked_accuracy"] for curves in model["balls"].values()], axis=0)
    most, said = int(np.argmin(np.abs(2 * left - model["clean_accuracy"]))), []
    for key, curves in model["balls"].items():
        ball, proved = key.capitalize(), curves["certified_accuracy"]
        certified = (
            "and no certificate applies, so that nothing is known from below"
            if proved is None
            else f"and no attack can leave less than <b>{AtLeast(proved[most]):.1%}</b>"
        )
        said.append(
            f"<li>{ball}, eps {model['eps_list'][most]:g} in {model['norm']} ({_BALLS[ball]}): "
            f"the attacks left <b>{curves['attacked_accuracy'][most]:.1%}</b>, {certified}.</li>"
        )
    return said


def _best_table(model: Mapping[str, Any]) -> str:
    """The table of both bounds for each ball."""
    none = [None] * len(model["eps_list"])
    rows: list[tuple[str, Sequence[float | None]]] = []
    for key, curves in model["balls"].items():
        ball, proved = key.capitalize(), curves["certified_accuracy"]
        rows.append((f"{ball} attacked", curves["attacked_accuracy"]))
        rows.append((f"{ball} certified", none if proved is None else [*map(AtLeast, proved)]))
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
            curve = proved.get("certified_accuracy", {}).get(key)
            told = [*map(AtLeast, curve)] if curve else proved["refused"]
            rows.append((f"{ball} certified by {name}", told))
    return _table(model, "Accuracy by eps: every attack and certificate by itself.", rows)


def _table(
    model: Mapping[str, Any], caption: str, rows: Sequence[tuple[str, Sequence[float | None] | str]]
) -> str:
    titles = ["accuracy at eps", *(f"{eps:.4g}" for eps in model["eps_list"])]
    cells = [(name, _row(values, len(model["eps_list"]))) for name, values in rows]
    return table(caption, titles, cells, sortable=True)


def _row(values: Sequence[float | None] | str, columns: int) -> str:
    """The cells of a row; a text, which says why there are none, spans all columns."""
    if isinstance(values, str):
        return f'<td class="why" colspan="{columns}">{html.escape(values)}</td>'
    return "".join(map(cell, values))


def cell(value: float | None) -> str:
    """A table cell with three decimals; ``data-value`` holds the exact number, for sorting."""
    if value is None:
        return '<td data-value="-1">none</td>'
    return f'<td data-value="{value!r}">{value:.3f}</td>'


def _warnings(model: Mapping[str, Any]) -> str:
    """The HTML list of remarks on attacks, such as zero gradients; nothing without any."""
    return doubts(f"{label}: {remark}" for label, remark in warnings(model))


def _checks(model: Mapping[str, Any]) -> str:
    """The HTML list of all invariants, with "holds" or "FAILS"."""
    rows = []
    for check in model["invariants"]:
        kind, word = ("holds", "holds") if check["holds"] else ("fails", "FAILS")
        rows.append(f'<li class="{kind}">{word}: {html.escape(statement(check))}</li>')
    return "\n".join(["<ul>", *rows, "</ul>"])


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
