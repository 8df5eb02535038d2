"""The command line: ``python -m wdjax audit | attack | convert | versions``."""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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

RADII = (0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.09, 0.12)
ATTACKS = {
    "fgsm": lambda norm, order: attacks.distributional(attacks.fgsm(norm=norm), order=order),
    "pgd": lambda norm, order: attacks.distributional(attacks.pgd(norm=norm), order=order),
    "wda": lambda norm, order: attacks.wda(norm=norm, order=order),
    "wda++": lambda norm, order: attacks.wda_plus_plus(norm=norm, order=order),
}
ORDERS = {"1": 1, "2": 2, "inf": math.inf}


def main(arguments=None) -> int:
    """Runs one command; returns the exit code: 1 for a broken invariant, 2 for bad input."""
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.command(parsed)
    except (ValueError, OSError) as error:
        print(f"wdjax: {error}", file=sys.stderr)
        return 2


def _parser():
    parser = argparse.ArgumentParser(prog="wdjax", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    audited = commands.add_parser(
        "audit", help="train two classifiers of digits and bound their robustness from both sides"
    )
    audited.add_argument("--out", type=Path, default=Path("audit"), metavar="DIR")
    audited.add_argument("--samples", type=_positive, default=200, metavar="N")
    audited.add_argument("--seed", type=int, default=0)
    audited.set_defaults(command=run_audit)

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

    converted = commands.add_parser("convert", help="convert a PyTorch or RobustBench checkpoint")
    convert.add_arguments(converted)
    converted.set_defaults(command=convert.main)

    shown = commands.add_parser("versions", help="the versions that a number depends on")
    shown.set_defaults(command=run_versions)
    return parser


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def run_versions(parsed) -> int:
    print(json.dumps(report.versions(), indent=1))
    return 0


def run_audit(parsed) -> int:
    """Trains a standard and an adversarial net on digits and writes the report of both."""
    began = time.perf_counter()
    parsed.out.mkdir(parents=True, exist_ok=True)
    split = data.digits()
    x, y = split.test.take(parsed.samples)
    described, figures = [], {}
    key = jax.random.key(parsed.seed)
    untrained = models.mlp((64, 64, 64, 10), key=jax.random.fold_in(key, 0))
    against = attacks.pgd(steps=5, random_start=True, iterate="last")
    recipes: dict[str, dict[str, Any]] = {
        "standard training": {},
        "adversarial training": {"attack": against, "eps": 0.1},
    }
    steps = len(recipes) * (4 * len(RADII) + 4 * len(RADII) + 2 * len(RADII) + 6)
    # None: a bar on a terminal, nothing in a pipe.
    with tqdm(total=steps, disable=None, unit="step") as bar:

        def progress(step):
            bar.set_postfix_str(step)
            bar.update()

        for number, (name, recipe) in enumerate(recipes.items()):
            progress(name)
            model = training.train(
                untrained, *split.train, key=jax.random.fold_in(key, 1 + number), **recipe
            ).model
            attack_key = jax.random.fold_in(key, 100 + number)
            found = audit.sandwich(model, x, y, radii=RADII, key=attack_key, progress=progress)
            described.append({"name": name} | report.describe(found))
            figures[name] = _draw(found, model, x, y)
    content = {
        "schema": report.SCHEMA,
        "versions": report.versions(),
        "seed": parsed.seed,
        "data": f"the first {len(y)} test digits of scikit-learn",
        "seconds": time.perf_counter() - began,
        "passed": all(i["holds"] for model in described for i in model["invariants"]),
        "models": described,
    }
    for name, drawn in figures.items():
        for caption, png in drawn.items():
            (parsed.out / f"{name.split()[0]}-{caption.split()[0]}.png").write_bytes(png)
    report.write_json(parsed.out / "report.json", content)
    report.write_text(parsed.out / "report.html", report.page(content, figures))
    _summarise(content, parsed.out)
    return 0 if content["passed"] else 1


def _draw(found, model, x, y):
    walked = next(entry.result for entry in found.entries if entry.name == "wda++")
    predicted = np.argmax(model(walked.x_adv), axis=-1)
    drawn = {
        "accuracy against eps": plots.accuracy(found),
        "loss against eps": plots.loss(found),
        "spending of the budget": plots.spending(found),
        "examples of cheap flips": plots.examples(found, x, y, predicted),
    }
    return {caption: report.png(figure) for caption, figure in drawn.items()}


def _summarise(content, folder):
    for model in content["models"]:
        print(f"{model['name']}: clean accuracy {model['clean_accuracy']:.3f}")
        print("  eps         " + "".join(f"{eps:>8g}" for eps in model["radii"]))
        for ball, curves in model["balls"].items():
            for key, label in (("attacked_accuracy", "<="), ("certified_accuracy", ">=")):
                cells = "".join(f"{value:8.3f}" for value in curves[key])
                print(f"  {ball:<9} {label}{cells}")
        for invariant in model["invariants"]:
            if not invariant["holds"]:
                print(f"  BROKEN: {invariant['name']} (slack {invariant['slack']:.3g})")
    verdict = "all invariants hold" if content["passed"] else "AN INVARIANT IS BROKEN"
    print(f"{verdict}; {folder / 'report.html'} in {content['seconds']:.0f} s")


def run_attack(parsed) -> int:
    """Attacks a converted checkpoint and writes what was measured."""
    names = [name.strip() for name in parsed.attacks.split(",") if name.strip()]
    unknown = sorted(set(names) - set(ATTACKS))
    if unknown or not names:
        raise ValueError(f"--attacks knows {', '.join(ATTACKS)}; got {parsed.attacks!r}.")
    model = convert.load(parsed.weights, parsed.arch).model
    samples = data.load_npz(parsed.data)
    x, y = samples if parsed.samples is None else samples.take(parsed.samples)
    norm, order = norms.NAMES[parsed.norm], ORDERS[parsed.order]
    measured, clean = {}, None
    for name in names:
        attack = ATTACKS[name](norm, order)
        knobs = {"kappa": parsed.kappa} if "kappa" in dict(attack.knobs) else {}
        with tqdm(disable=None, unit="step", desc=name) as bar:

            def tick(progress, bar=bar):
                bar.total = progress.total
                bar.update(progress.taken - bar.n)

            began = time.perf_counter()
            result = driver.run(
                attack,
                model,
                x,
                y,
                eps=parsed.eps,
                batch_size=parsed.batch_size,
                callback=tick,
                **knobs,
            )
            jax.block_until_ready(result)
            seconds = time.perf_counter() - began
        measured[name] = _measured(result, x, y, norm, order) | {"seconds": seconds}
        clean = float(np.mean(np.asarray(result.clean)))
        print(f"{name}: {clean:.4f} clean, {measured[name]['robust_accuracy']:.4f} attacked")
    content = {
        "schema": "wdjax.attack/1",
        "versions": report.versions(),
        "arch": parsed.arch,
        "weights": parsed.weights.name,
        "data": parsed.data.name,
        "samples": len(y),
        "norm": parsed.norm,
        "eps": parsed.eps,
        "order": parsed.order,
        "kappa": parsed.kappa,
        "clean_accuracy": clean,
        "attacks": measured,
    }
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    report.write_json(parsed.json, content)
    return 0


def _measured(result, x, y, norm, order):
    distribution = transport.AdversarialDistribution.from_result(x, y, result)
    return {
        "robust_accuracy": _accuracy(result),
        "max_cost": float(jnp.max(jnp.where(result.weight > 0, result.cost, 0.0))),
        "transport_cost": distribution.coupling_cost(norm, order),
        "gradients_per_image": float(np.mean(np.asarray(result.gradients))),
        "forwards_per_image": float(np.mean(np.asarray(result.forwards))),
    }


def _accuracy(result):
    """``result.accuracy`` in float64."""
    weight, clean = np.asarray(result.weight, float), np.asarray(result.clean)
    return float(np.mean((1 - weight) * clean + weight * ~np.asarray(result.success)))


if __name__ == "__main__":
    sys.exit(main())
