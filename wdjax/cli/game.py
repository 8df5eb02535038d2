"""``python -m wdjax game``: defences that adapt at test time, played on digits."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wdjax import files, report, transductive
from wdjax.cli import options, subject
from wdjax.cli.console import Console
from wdjax.core import Progress
from wdjax.transductive import Report, Share, table
from wdjax.transductive.state import State
from wdjax.transductive.table import Case, Row

SCHEMA = "wdjax.game/1"
FAMILIES = {
    "rmc": ("rmc-standard", "rmc-adversarial"),
    **{name: (name,) for name in ("dent", "dann", "tadv", "urejectron", "purify")},
}
_DEFAULT = "rmc,dent,dann,tadv,urejectron"

_EXAMPLES = """examples:
  python -m wdjax game --json table.json
  python -m wdjax game --defense dann,tadv --seeds 0,1,2 --draws 5 --json -
  python -m wdjax game --defense rmc --checkpoint games --json rmc.json   # can be interrupted"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declares the command."""
    words = {name: table.CASES[cases[0]] for name, cases in FAMILIES.items()}
    parser = commands.add_parser(
        "game",
        parents=[common],
        help="attack defences that adapt at test time, on digits; JSON out",
        description="Plays games between attacks on model spaces and defences that adapt to their "
        "inputs, on small nets and digits. Accuracies are means over private keys of the defender, "
        "with intervals of 95 %, beside those on clean inputs.",
        epilog=f"defences:\n{options.glossary(words)}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--defense", default=_DEFAULT, metavar="NAMES", help="see below (default %(default)s)"
    )
    how.add_argument(
        "--attacks", metavar="NAMES", help="of a defence's attacks only these; all by default"
    )
    how.add_argument(
        "--seeds",
        default="0",
        metavar="LIST",
        help="of data, models and keys (default %(default)s)",
    )
    how.add_argument(
        "--draws",
        type=options.positive,
        default=3,
        metavar="N",
        help="private keys of the defender that the referee draws (default %(default)s)",
    )
    how.add_argument(
        "--samples", type=options.positive, metavar="N", help="inputs at most; those of the table"
    )
    how.add_argument(
        "--iterations", type=options.positive, metavar="T", help="of the attacks; the table's"
    )
    how.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="save every game there after its turns, and go on from it",
    )
    subject.declare_out(parser)
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Plays, prints, then writes."""
    cases, seeds = _cases(parsed.defense), _seeds(parsed.seeds)
    wanted = None if parsed.attacks is None else _words(parsed.attacks)
    subject.check_writable(parsed.json)
    if parsed.checkpoint is not None:
        files.check_writable(parsed.checkpoint / "game")
    results = []
    for name in cases:
        for seed in seeds:
            results.append(_case(name, seed, wanted, parsed, console))
    if wanted is not None and not any(entry["attacks"] for entry in results):
        raise ValueError(f"none of {', '.join(cases)} has an attack {parsed.attacks!r}.")
    content = {
        "schema": SCHEMA,
        "versions": report.versions(),
        "data": "digits",
        "draws": parsed.draws,
        "results": results,
    }
    subject.write(parsed.json, content)
    return 0


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _cases(text: str) -> list[str]:
    names = _words(text)
    if not names or set(names) - set(FAMILIES) or len(set(names)) < len(names):
        raise ValueError(f"--defense knows {', '.join(FAMILIES)}, each once; got {text!r}.")
    return [case for name in names for case in FAMILIES[name]]


def _seeds(text: str) -> list[int]:
    words = _words(text)
    if not words or not all(word.isdigit() for word in words) or len(set(words)) < len(words):
        raise ValueError(f"--seeds must be whole numbers such as 0,1, each once; got {text!r}.")
    return [int(word) for word in words]


def _case(
    name: str, seed: int, wanted: list[str] | None, parsed: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """All games of a defence under one seed."""
    case, train, test = table.case(name, seed, parsed.iterations)
    size, count = _fitting(case, parsed.samples)
    key = jax.random.key(seed)
    rows = {label: row for label, row in case.rows.items() if wanted is None or label in wanted}
    entry: dict[str, Any] = {"defense": name, "seed": seed, "eps": case.eps, "samples": count}
    entry |= {"rounds": count // size, "attacks": {}}
    if not rows:
        return entry
    memory = transductive.prepare(case.defense, *train, key=jax.random.fold_in(key, 1))
    reports = {}
    x, y = test.take(count)
    for label, row in rows.items():
        began = time.process_time()
        how = {"size": size, "draws": parsed.draws} | row.how
        if parsed.checkpoint is not None:
            how["checkpoint"] = parsed.checkpoint / f"{name}-{seed}-{label}"
        with console.search(f"{name} {label}") as tick:
            found = transductive.play(
                case.defense,
                row.attack,
                x,
                y,
                memory=memory,
                eps=case.eps,
                key=jax.random.fold_in(key, 2),
                callback=_shown(tick, row, count // size),
                **how,
            )
        reports[label] = found
        measured = _measured(found, row) | {"cpu_seconds": time.process_time() - began}
        entry["attacks"][label] = measured
        _say(console, f"{name} seed {seed} {label}", found, measured)
    own = jax.random.fold_in(key, 3)
    entry["cost_multiple"] = transductive.cost_multiple(
        case.defense, memory, x[:size], key=own, repeats=3
    )
    private = {label: found for label, found in reports.items() if not rows[label].how}
    if private:
        entry["worst"], least = transductive.worst(private)
        console.say(f"{name} seed {seed}: {_percent(least.one_shot)} by {entry['worst']} is worst")
    return entry


def _fitting(case: Case, samples: int | None) -> tuple[int, int]:
    """Inputs a round, and inputs; pools of two rounds need an even number of them."""
    count = case.inputs if samples is None else min(samples, case.inputs)
    if case.size is None:
        return count, count
    size = min(case.size, max(1, count // 2))
    return size, count // (2 * size) * 2 * size if count > 1 else 1


def _shown(tick: Callable[[Progress], None], row: Row, rounds: int) -> Callable[[State], None]:
    turns = row.attack.iterations + 1

    def show(state: State) -> None:
        taken = int(state.round) * turns + int(state.iteration)
        tick(Progress(taken, rounds * turns, np.arange(int(state.round), rounds)))

    return show


def _share(found: Share) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def _measured(found: Report, row: Row) -> dict[str, Any]:
    """What was measured, with its settings."""
    measured: dict[str, Any] = {
        name: _share(getattr(found, name))
        for name in (
            "one_shot",
            "one_shot_clean",
            "worst_of",
            "worst_of_clean",
            "majority",
            "majority_clean",
            "static_accuracy",
            "static_clean_accuracy",
        )
    }
    if found.score is not None:
        points = {f"{budget:g}": found.operating_point(budget) for budget in (0.05, 0.1)}
        measured["rejection"] = {
            budget: {field: report.number(value) for field, value in point._asdict().items()}
            for budget, point in points.items()
        }
    return measured | {
        "settings": _settings(row),
        "game": dict(row.how),
        "draws": len(found.correct),
        "simulated_errors": found.simulated.mean(axis=0).tolist(),
        "gradients_per_input": float(found.gradients.mean()),
        "largest_cost": float(found.cost.max()),
        "faults": int(found.fault.sum()),
    }


def _settings(row: Row) -> dict[str, Any]:
    inner: Any = row.attack.inner
    own = {"name": type(inner).__name__} | report.settings(inner)
    own.pop("loss")  # Replaced by the objective.
    attack: Any = row.attack
    return report.settings(attack) | {"inner": own}


def _percent(found: Share) -> str:
    return f"{100 * found.value:.1f} % [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def _say(console: Console, label: str, found: Report, measured: dict[str, Any]) -> None:
    said = (
        f"{label}: {_percent(found.one_shot)} attacked, {100 * found.one_shot_clean.value:.1f} "
        f"clean; static {100 * found.static_accuracy.value:.1f} and "
        f"{100 * found.static_clean_accuracy.value:.1f}"
    )
    if found.score is not None:
        point = found.operating_point()
        said += f"; errors {100 * point.err:.1f} at {100 * point.rejected:.1f} % clean refused"
    console.say(said)
    if measured["faults"]:
        console.warn(f"  CAREFUL, {label}: {measured['faults']} inputs met what is not finite")
