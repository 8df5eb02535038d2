"""``python -m wdjax attack``: attacks on a PyTorch checkpoint, measured."""

import argparse
import io
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wdjax import audit, convert, data, driver, files, norms, report, transport
from wdjax.balls import Lp
from wdjax.cli import options
from wdjax.cli.console import Console
from wdjax.cli.table import ATTACKS
from wdjax.core import Attack, Model, Result

SCHEMA = "wdjax.attack/2"

_EXAMPLES = """examples:
  python -m wdjax attack --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm linf --eps 0.1 --samples 100 --json result.json
  python -m wdjax attack --arch resnet2b --weights cifar10.pth --data cifar10.npz \\
      --norm linf --eps 2/255 --attacks wda,wda++ --kappa 2 --points points.npz --json - | jq ."""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "attack",
        parents=[common],
        help="attack a PyTorch checkpoint; JSON out",
        description="Attacks a converted checkpoint and measures what is left of its accuracy.",
        epilog=f"attacks:\n{options.glossary(ATTACKS)}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is attacked")
    what.add_argument("--arch", required=True, help="such as mlp, wong_mnist, resnet2b")
    what.add_argument("--weights", required=True, type=Path, metavar="FILE", help="the checkpoint")
    what.add_argument(
        "--data",
        required=True,
        type=Path,
        metavar="FILE.npz",
        help="x [n, height, width, channels], uint8 or floats in [0, 1], and labels y [n]",
    )
    what.add_argument(
        "--samples", type=options.positive, metavar="N", help="the first N; all if left"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--norm", required=True, choices=sorted(norms.NAMES), help="of a move")
    how.add_argument(
        "--eps", required=True, type=options.number, help="the budget, such as 0.1 or 8/255"
    )
    how.add_argument(
        "--order",
        choices=list(options.ORDERS),
        default="1",
        help="of the Wasserstein ball in which minimum-norm attacks and kappa > 1 spend eps "
        "(default 1: on average)",
    )
    how.add_argument(
        "--kappa",
        type=options.number,
        help="move 1 / kappa of each sample, kappa^(1/order) eps far (default 1); not for "
        "minimum-norm attacks, whose budget goes where flips are cheapest",
    )
    how.add_argument(
        "--attacks",
        default="wda,wda++,pgd",
        metavar="NAMES",
        help="see below (default %(default)s)",
    )
    how.add_argument(
        "--batch-size", type=options.positive, metavar="B", help="samples on the device at once"
    )
    out = parser.add_argument_group("what is written")
    out.add_argument("--json", required=True, metavar="OUT", help="a file, or - for stdout")
    out.add_argument(
        "--points",
        type=Path,
        metavar="FILE.npz",
        help="save the adversarial points: of every attack NAME/x_adv, NAME/success, NAME/cost and "
        "NAME/weight, and as x and y the nearest flips of all of them, to be used as --data",
    )
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Attacks, prints, then writes."""
    attacks = _chosen(parsed)
    for path in (parsed.points, None if parsed.json == "-" else parsed.json):
        if path is not None:
            files.check_writable(path)
    model = convert.load(parsed.weights, parsed.arch).model
    samples = data.load_npz(parsed.data)
    x, y = samples if parsed.samples is None else samples.take(parsed.samples)
    results, measured = {}, {}
    for name, attack in attacks.items():
        results[name], measured[name] = _attack(name, attack, parsed, model, x, y, console)
    content = {
        "schema": SCHEMA,
        "versions": report.versions(),
        "arch": parsed.arch,
        "weights": parsed.weights.name,
        "data": parsed.data.name,
        "samples": len(y),
        "norm": parsed.norm,
        "eps": parsed.eps,
        "order": parsed.order,
        "clean_accuracy": float(np.mean(results[name].correct)),
        "attacks": measured,
    }
    if parsed.json == "-":
        sys.stdout.write(report.dumps(content))
        sys.stdout.flush()
    else:
        files.write(parsed.json, report.dumps(content))
    if parsed.points is not None:
        files.write(parsed.points, _points(x, y, results))
    return 0


def _chosen(parsed: argparse.Namespace) -> dict[str, Attack]:
    """The attacks asked for; refuses what they would ignore."""
    names = [name.strip() for name in parsed.attacks.split(",") if name.strip()]
    if not names or set(names) - set(ATTACKS) or len(set(names)) < len(names):
        raise ValueError(
            f"--attacks knows {', '.join(ATTACKS)}, each once; got {parsed.attacks!r}."
        )
    ball = Lp(norms.NAMES[parsed.norm])
    attacks = {name: ATTACKS[name](ball) for name in names}
    if parsed.kappa is not None and all(one.budget == "none" for one in attacks.values()):
        raise ValueError(
            f"--kappa {parsed.kappa:g} would be ignored: {', '.join(names)} spends eps where flips "
            "are cheapest. Leave it out."
        )
    return attacks


def _attack(
    name: str,
    attack: Attack,
    parsed: argparse.Namespace,
    model: Model,
    x: np.ndarray,
    y: np.ndarray,
    console: Console,
) -> tuple[Result, dict[str, Any]]:
    """What one attack found, and what was measured of it, said at once."""
    order = options.ORDERS[parsed.order]
    spending = {}
    if attack.budget != "none":
        spending = {"kappa": 1.0 if parsed.kappa is None else parsed.kappa}
    began = time.perf_counter()
    with console.search(name) as tick:
        result = driver.run(
            attack,
            model,
            x,
            y,
            eps=parsed.eps,
            order=order,
            batch_size=parsed.batch_size,
            callback=tick,
            **spending,
        )
        result = jax.device_get(result)
    seconds = {"seconds": time.perf_counter() - began}
    measured = spending | _measured(result, x, y, norms.NAMES[parsed.norm], order) | seconds
    clean, left = float(np.mean(result.correct)), measured["robust_accuracy"]
    console.say(f"{name}: {clean:.4f} clean, {left:.4f} attacked")
    for remark in report.remarks(measured):
        console.warn(f"  CAREFUL, {name}: {remark}")
    return result, measured


def _measured(
    result: Result, x: np.ndarray, y: np.ndarray, norm: float, order: float
) -> dict[str, Any]:
    distribution = transport.AdversarialDistribution.from_result(x, y, result)
    return {
        "robust_accuracy": audit.accuracy(result),
        "max_cost": float(np.max(np.where(result.weight > 0, result.cost, 0.0))),
        "transport_cost": distribution.coupling_cost(norm, order),
        **report.spent(result),
    }


def _points(x: np.ndarray, y: np.ndarray, results: dict[str, Result]) -> bytes:
    """The archive of ``--points``."""
    arrays: dict[str, Any] = {"y": y}
    nearest, distance = np.array(x), np.full(len(y), np.inf)
    for name, result in results.items():
        for field in ("x_adv", "success", "cost", "weight"):
            arrays[f"{name}/{field}"] = getattr(result, field)
        closer = result.correct & result.success & (result.cost < distance)
        nearest[closer], distance[closer] = result.x_adv[closer], result.cost[closer]
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=nearest, **arrays)
    return buffer.getvalue()
