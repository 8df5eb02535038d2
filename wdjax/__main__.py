"""The command line: ``python -m wdjax audit | attack | convert | versions``."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from wdjax import (
    attacks,
    audit,
    convert,
    data,
    driver,
    models,
    norms,
    plots,
    report,
    training,
    transport,
)
from wdjax.balls import Lp
from wdjax.core import Attack, Model, Progress, Result

RADII = (0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.09, 0.12)
ATTACKS: dict[str, Callable[[Lp], Attack]] = {
    "fgsm": attacks.fgsm,
    "pgd": attacks.PGD,
    "wda": attacks.WDA,
    "wda++": attacks.WDAPlusPlus,
}
ORDERS = {"1": 1, "2": 2, "inf": math.inf}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 1 for a broken invariant, 2 for bad input."""
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.command(parsed)
    except (ValueError, OSError) as error:
        print(f"wdjax: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wdjax", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    _add_audit(commands)
    _add_attack(commands)
    converted = commands.add_parser("convert", help="convert a PyTorch or RobustBench checkpoint")
    convert.add_arguments(converted)
    converted.set_defaults(command=convert.main)

    shown = commands.add_parser("versions", help="the versions that a number depends on")
    shown.set_defaults(command=run_versions)
    return parser


def _add_audit(commands: Any) -> None:
    audited = commands.add_parser(
        "audit", help="train two classifiers of digits and bound their robustness from both sides"
    )
    audited.add_argument("--out", type=Path, default=Path("audit"), metavar="DIR")
    audited.add_argument("--samples", type=_positive, default=200, metavar="N")
    audited.add_argument("--seed", type=int, default=0)
    audited.set_defaults(command=run_audit)


def _add_attack(commands: Any) -> None:
    attacked = commands.add_parser("attack", help="attack a PyTorch checkpoint; JSON out")
    attacked.add_argument("--arch", required=True, help="such as mlp, wong_mnist, resnet2b")
    attacked.add_argument("--weights", required=True, type=Path, metavar="FILE")
    attacked.add_argument("--data", required=True, type=Path, metavar="FILE.npz")
    attacked.add_argument("--norm", required=True, choices=sorted(norms.NAMES))
    attacked.add_argument("--eps", required=True, type=float)
    attacked.add_argument("--order", choices=list(ORDERS), default="1")
    attacked.add_argument("--kappa", type=float, default=1.0)
    attacked.add_argument("--attacks", default="wda,wda++,pgd", help=f"of {','.join(ATTACKS)}")
    attacked.add_argument("--json", required=True, type=Path, metavar="OUT")
    attacked.add_argument("--samples", type=_positive, metavar="N", help="the first N; all if left")
    attacked.add_argument("--batch-size", type=_positive, metavar="B")
    attacked.set_defaults(command=run_attack)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def run_versions(parsed: argparse.Namespace) -> int:
    """Prints the versions that a number depends on."""
    print(json.dumps(report.versions(), indent=1))
    return 0


def run_audit(parsed: argparse.Namespace) -> int:
    """Trains a standard and an adversarial net on digits and writes the report of both."""
    began = time.perf_counter()
    parsed.out.mkdir(parents=True, exist_ok=True)
    split = data.digits()
    x, y = split.test.take(parsed.samples)
    key = jax.random.key(parsed.seed)
    untrained = models.mlp((64, 64, 64, 10), key=jax.random.fold_in(key, 0))
    described, figures = [], {}
    for number, (name, recipe) in enumerate(_recipes().items()):
        # None: a bar on a terminal, nothing in a pipe.
        with tqdm(disable=None, unit="step", desc=name) as bar:
            bar.set_postfix_str("training")
            model = training.train(
                untrained, *split.train, key=jax.random.fold_in(key, 1 + number), **recipe
            ).model
            attack_key = jax.random.fold_in(key, 100 + number)
            found = audit.sandwich(model, x, y, radii=RADII, key=attack_key, progress=_show(bar))
            bar.update((bar.total or 0) - bar.n)
        described.append({"name": name} | report.describe(found))
        figures[name] = _draw(found, x, y, model)
    content = {
        "schema": report.SCHEMA,
        "versions": report.versions(),
        "seed": parsed.seed,
        "data": f"the first {len(y)} test digits of scikit-learn",
        "seconds": time.perf_counter() - began,
        "passed": all(check["holds"] for model in described for check in model["invariants"]),
        "models": described,
    }
    _write(parsed.out, content, figures)
    _summarise(content, parsed.out)
    return 0 if content["passed"] else 1


def _recipes() -> dict[str, dict[str, Any]]:
    """Models by name, and what trains them."""
    against = attacks.PGD(steps=5, random_start=True, iterate="last")
    return {
        "standard training": {},
        "adversarial training": {"attack": against, "eps": 0.1},
    }


def _show(bar: tqdm) -> Callable[[audit.Step], None]:
    """What moves a bar through the steps of an audit."""

    def show(step: audit.Step) -> None:
        bar.total = step.total
        bar.set_postfix_str(step.words)
        bar.update(step.number - bar.n)

    return show


def _draw(found: audit.Sandwich, x: np.ndarray, y: np.ndarray, model: Model) -> dict[str, bytes]:
    drawn = {
        "accuracy against eps": plots.accuracy(found),
        "loss against eps": plots.loss(found),
        "spending of the budget": plots.spending(found),
        "examples of cheap flips": plots.examples(found, x, y, model),
    }
    return {caption: report.png(figure) for caption, figure in drawn.items()}


def _write(folder: Path, content: dict[str, Any], figures: dict[str, dict[str, bytes]]) -> None:
    for name, drawn in figures.items():
        for caption, png in drawn.items():
            (folder / f"{name.split()[0]}-{caption.split()[0]}.png").write_bytes(png)
    report.write_json(folder / "report.json", content)
    report.write_text(folder / "report.html", report.page(content, figures))


def _summarise(content: dict[str, Any], folder: Path) -> None:
    for model in content["models"]:
        print(f"{model['name']}: clean accuracy {model['clean_accuracy']:.3f}")
        print("  eps         " + "".join(f"{eps:>8g}" for eps in model["radii"]))
        for ball, curves in model["balls"].items():
            for key, label in (("attacked_accuracy", "<="), ("certified_accuracy", ">=")):
                cells = "".join(f"{value:8.3f}" for value in curves[key])
                print(f"  {ball:<9} {label}{cells}")
        for label, remark in report.warnings(model):
            print(f"  CAREFUL: {label}: {remark}")
        for invariant in model["invariants"]:
            if not invariant["holds"]:
                print(f"  BROKEN: {report.statement(invariant)}")
    verdict = "all invariants hold" if content["passed"] else "AN INVARIANT IS BROKEN"
    print(f"{verdict}; {folder / 'report.html'} in {content['seconds']:.0f} s")


def run_attack(parsed: argparse.Namespace) -> int:
    """Attacks a converted checkpoint and writes what was measured."""
    names = [name.strip() for name in parsed.attacks.split(",") if name.strip()]
    unknown = sorted(set(names) - set(ATTACKS))
    if unknown or not names:
        raise ValueError(f"--attacks knows {', '.join(ATTACKS)}; got {parsed.attacks!r}.")
    model = convert.load(parsed.weights, parsed.arch).model
    samples = data.load_npz(parsed.data)
    x, y = samples if parsed.samples is None else samples.take(parsed.samples)
    measured, clean = {}, None
    for name in names:
        measured[name], clean = _attack(name, parsed, model, x, y)
        print(f"{name}: {clean:.4f} clean, {measured[name]['robust_accuracy']:.4f} attacked")
        for remark in report.remarks(measured[name]):
            print(f"  CAREFUL: {remark}")
    content = {
        "schema": "wdjax.attack/2",
        "versions": report.versions(),
        "arch": parsed.arch,
        "weights": parsed.weights.name,
        "data": parsed.data.name,
        "samples": len(y),
        "norm": parsed.norm,
        "eps": parsed.eps,
        "order": parsed.order,
        "clean_accuracy": clean,
        "attacks": measured,
    }
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    report.write_json(parsed.json, content)
    return 0


def _attack(
    name: str, parsed: argparse.Namespace, model: Model, x: np.ndarray, y: np.ndarray
) -> tuple[dict[str, Any], float]:
    """What one attack measured, and the clean accuracy."""
    ball, order = Lp(norms.NAMES[parsed.norm]), ORDERS[parsed.order]
    attack = ATTACKS[name](ball)
    # The knapsack spends what a minimum-norm attack found.
    spending = {} if attack.budget == "none" else {"kappa": parsed.kappa}
    began = time.perf_counter()
    with tqdm(disable=None, unit="step", desc=name) as bar:

        def tick(progress: Progress) -> None:
            bar.total = progress.total
            bar.update(progress.taken - bar.n)

        options = {"batch_size": parsed.batch_size, "callback": tick}
        result = driver.run(attack, model, x, y, eps=parsed.eps, order=order, **spending, **options)
        result = jax.device_get(result)
    seconds = {"seconds": time.perf_counter() - began}
    measured = spending | _measured(result, x, y, ball, order) | seconds
    return measured, float(np.mean(result.correct))


def _measured(
    result: Result, x: np.ndarray, y: np.ndarray, ball: Lp, order: float
) -> dict[str, Any]:
    distribution = transport.AdversarialDistribution.from_result(x, y, result)
    return {
        "robust_accuracy": audit.accuracy(result),
        "max_cost": float(np.max(np.where(result.weight > 0, result.cost, 0.0))),
        "transport_cost": distribution.coupling_cost(ball.norm, order),
        **report.spent(result),
    }


if __name__ == "__main__":
    sys.exit(main())
