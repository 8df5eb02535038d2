"""The results of many jobs as one page: for every data and threat a table of models by measures."""

import html
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from wdjax.report import page
from wdjax.report.html_table import doubts, table


def leaderboard(content: Mapping[str, Any]) -> str:
    """What ``python -m wdjax run`` found, as a page that stands alone.

    Args:
      content: of its JSON.
    """
    rows = sorted(content["jobs"], key=lambda row: row["job"][1:3])
    groups = itertools.groupby(rows, lambda row: tuple(row["job"][1:3]))
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    setting = html.escape(f"{content['data']}; {content['seconds']:.0f} s; {versions}.")
    body = [
        "<p>Shares of all samples that are right, unless a column says of which: an attack bounds "
        "the robust accuracy from above, a certificate from below.</p>",
        doubts(content["remarks"]),
        *(_group(names, [*found]) for names, found in groups),
        doubts(f"{' '.join(row['job'])}: {text}" for row in rows for text in row["remarks"]),
        f"<p>{setting}</p>",
    ]
    return page.bare("How robust are they?", "\n".join(body))


def _group(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of one data and threat: models in the order of the jobs, and what was measured."""
    models: dict[str, dict[str, float]] = {}
    counted = {row["job"][0]: (row["n"], row["clean_accuracy"]) for row in rows}
    alike = all(counted[row["job"][0]] == (row["n"], row["clean_accuracy"]) for row in rows)
    for row in rows:
        model, *_, method = row["job"]
        own = "" if alike else f"{method}: "
        found = models.setdefault(model, {})
        found |= {f"{own}n": row["n"], f"{own}clean": row["clean_accuracy"]}
        found |= {f"{method}: {name}{_meant(row, name)}": v for name, v in row["shares"].items()}
    titles = [*dict.fromkeys(title for found in models.values() for title in found)]
    lines = [
        (model, "".join(_cell(found.get(title)) for title in titles))
        for model, found in models.items()
    ]
    balls = [(row["norm"], row["eps"]) for row in rows if row["eps"] is not None]
    said = dict.fromkeys(f"{norm}, eps {eps:g}" if norm else f"eps {eps:g}" for norm, eps in balls)
    title = html.escape(": ".join([", ".join(names), *said]))
    return f"<h2>{title}</h2>" + table(", ".join(names), ["model", *titles], lines)


def _meant(row: Mapping[str, Any], name: str) -> str:
    """What a column says besides its name: how eps is meant, and which samples count."""
    of = f", of {row['shares_of']}" if row["shares_of"] else ""
    return ", eps on average" * (name in row["average"]) + of


def _cell(value: float | None) -> str:
    """A number of samples as it is, a share with three decimals."""
    return f"<td>{value}</td>" if isinstance(value, int) else page.cell(value)
