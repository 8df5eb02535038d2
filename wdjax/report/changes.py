"""What changed from one audit to another: accuracies, median radii, and which samples."""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wdjax.report import summary
from wdjax.report.html_table import table
from wdjax.report.rounded import AtLeast

_MOST_BYTES = 1 << 28
_LISTED = 12
"""Maximum number of samples of a list in text."""


class Changes(NamedTuple):
    """The changes of one model between two audits in the same norm."""

    model: str
    before: str
    """The model's name in the earlier audit."""
    numbers: tuple[tuple[str, float | None, float | None], ...]
    """Rows of a name, the earlier number and the present one; None for infinite or unknown."""
    samples: tuple[tuple[str, tuple[int, ...]], ...] | None
    """What changed, and the indices of the samples; None if the audits are of other samples."""
    earlier: Mapping[str, Any]
    """The model's entry in the earlier ``report.json``."""

    def __str__(self) -> str:
        width = max(len(name) for name, *_ in self.numbers)
        rows = [f"{'':<{width}}{'before':>10}{'now':>10}{'change':>10}"]
        rows += [
            f"{name:<{width}}" + "".join(f"{cell:>10}" for cell in cells(before, now))
            for name, before, now in self.numbers
        ]
        said = [sentence for sentence, _ in sentences(self)]
        return "\n".join([f"{self.model}, since {self.before}:", *rows, *said])


def cells(before: float | None, now: float | None) -> tuple[str, str, str]:
    """The cells of a row: both numbers and their difference.

    >>> cells(0.5, 0.75), cells(None, 0.75)
    (('0.5', '0.75', '+0.25'), ('-', '0.75', ''))
    """
    shown = ["-" if value is None else f"{value:.4g}" for value in (before, now)]
    if before is None or now is None or before == now:
        return shown[0], shown[1], ""
    return shown[0], shown[1], f"{now - before:+.3g}"


def sentences(changed: Changes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Which samples changed, in words, with all of their indices."""
    if changed.samples is None:
        yield "The audits are of different samples, so that no sample can be compared.", ()
        return
    for what, which in changed.samples:
        more = f" and {len(which) - _LISTED} more" if len(which) > _LISTED else ""
        indices = ", ".join(map(str, which[:_LISTED])) + more
        yield f"{what}: {len(which)} sample{'s' * (len(which) > 1)} ({indices})", which
    if not changed.samples:
        yield "No sample changed.", ()


def as_html(changed: Changes) -> str:
    """The changes as a table, in which rows that changed stand out, and a list for the page."""
    rows = []
    for name, before, now in changed.numbers:
        *numbers, change = cells(before, now)
        sign = {"+": "\N{BLACK UP-POINTING TRIANGLE} ", "-": "\N{BLACK DOWN-POINTING TRIANGLE} "}
        shown = (
            f"<b>{sign[change[0]]}{change}</b>"
            if change
            else "same" * (before == now and now is not None)
        )
        rows.append((name, "".join(f"<td>{cell}</td>" for cell in (*numbers, shown))))
    said = "".join(f"<li>{html.escape(sentence)}</li>" for sentence, _ in sentences(changed))
    title = f"Before: {changed.before}; now: {changed.model}"
    return f"{table(title, ('number', 'before', 'now', 'change'), rows)}<ul>{said}</ul>"


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """The content of an earlier ``report.json``.

    Raises:
      ValueError: no such file, or not a whole report of an audit of this version.
    """
    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES >> 20} MB")
        content = json.loads(Path(path).read_bytes(), parse_constant=_no_number)
        kind = content["schema"], content["command"]
        if kind != (summary.SCHEMA, "audit"):
            raise ValueError(f"its schema is {kind[0]!r} of {kind[1]!r}")
        if not content["models"]:
            raise ValueError("it is of no model")
        for model in content["models"]:
            str(_changed(model, model, True))  # What is no number fails to be shown as one.
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        reason = f"it lacks a part or has one of another kind ({error})"
    else:
        return content
    raise ValueError(
        f"{path} cannot be compared with: {reason}. Name the report.json of an earlier audit "
        f"({summary.SCHEMA})."
    )


def _no_number(word: str) -> None:
    raise ValueError(f"it holds {word}, which JSON lacks")


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Changes, ...]:
    """What changed between two audits, a row for each model.

    Models are matched by their names; two audits of a single model are compared in any case.

    Args:
      old: the content of the earlier ``report.json``, from :func:`read`.
      new: that of the later one.

    Raises:
      ValueError: no model in common, another norm, or no common eps.
    """
    before = {model["model"]: model for model in old["models"]}
    pairs = [(before[one["model"]], one) for one in new["models"] if one["model"] in before]
    if not pairs and len(old["models"]) == len(new["models"]) == 1:
        pairs = [(old["models"][0], new["models"][0])]
    if not pairs:
        raise ValueError(
            f"the earlier audit is of {', '.join(before)}: there is nothing to compare."
        )
    alike = old.get("data_sha256") == new.get("data_sha256")
    return tuple(_changed(one, other, alike) for one, other in pairs)


def check(old: Mapping[str, Any], norm: str, eps_list: Sequence[float]) -> None:
    """Raises, before any work, if an audit in this norm could not be compared with ``old``."""
    for model in old["models"]:
        if model["norm"] != norm:
            raise ValueError(f"the earlier audit is in {model['norm']}, this one in {norm}.")
        if not set(model["eps_list"]) & set(eps_list):
            raise ValueError(
                f"the earlier audit has eps {model['eps_list']}, this one {list(eps_list)}: name "
                "one eps of it at least."
            )


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], alike: bool) -> Changes:
    """The changes between two models' entries; ``alike`` if the samples are the same."""
    check({"models": [old]}, new["norm"], new["eps_list"])
    common = [eps for eps in new["eps_list"] if eps in old["eps_list"]]
    names = ("clean_accuracy", "clean_loss")
    numbers: list[tuple[str, Any, Any]] = [
        (name.replace("_", " "), old[name], new[name]) for name in names
    ]
    for ball in new["balls"]:
        for key in ("attacked_accuracy", "certified_accuracy"):
            before, now = (_curve(one, ball, key) for one in (old, new))
            label = f"{key.split('_')[0]}, {ball.capitalize()}, eps"
            numbers += [(f"{label} {eps:g}", before.get(eps), now.get(eps)) for eps in common]
    for key in ("certified_radius", "flip_distance"):
        first, second = (_median(one["samples"][key]) for one in (old, new))
        numbers.append((f"median {key.replace('_', ' ')}", first, second))
    samples = tuple(_of_samples(old, new, common)) if alike else None
    return Changes(str(new["model"]), str(old["model"]), tuple(numbers), samples, old)


def _curve(model: Mapping[str, Any], ball: str, key: str) -> dict[float, float | None]:
    """The accuracy by eps; empty without certificates."""
    values = model["balls"][ball][key]
    if values is not None and key == "certified_accuracy":
        values = [None if value is None else AtLeast(value) for value in values]
    return {} if values is None else dict(zip(model["eps_list"], values, strict=True))


def _median(values: Sequence[float | None] | None) -> float | None:
    return None if values is None else summary.number(float(np.median(_distances(values))))


def _distances(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.inf if value is None else value for value in values], float)


def _of_samples(
    old: Mapping[str, Any], new: Mapping[str, Any], common: Sequence[float]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Which samples changed: in what is said, and as indices."""

    def both(words: str, marks: Sequence[np.ndarray | None]) -> Iterator[tuple[str, Any]]:
        before, now = marks
        if before is None or now is None:
            return
        for which, say in ((now & ~before, f"now {words}"), (before & ~now, f"no longer {words}")):
            if which.any():
                yield say, tuple(np.flatnonzero(which).tolist())

    def of(key: str, holds: Any) -> list[np.ndarray | None]:
        values = [one["samples"][key] for one in (old, new)]
        return [None if value is None else holds(_distances(value)) for value in values]

    yield from both("classified correctly", of("correct", lambda right: right > 0))
    for eps in common:
        if eps > 0:
            flipped = of("flip_distance", lambda far, eps=eps: (far > 0) & (far <= eps))
            yield from both(f"flipped within eps {eps:g}", flipped)
            proved = of("certified_radius", lambda far, eps=eps: far >= eps)
            yield from both(f"certified within eps {eps:g}", proved)
