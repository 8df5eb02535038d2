"""``python -m wdjax certify``: what no attack can do to a PyTorch checkpoint."""

import argparse
import io
import time
from pathlib import Path
from typing import Any

import numpy as np

from wdjax import certify, files, norms
from wdjax.cli import options, process, subject
from wdjax.cli.console import Console

SCHEMA = "wdjax.certify/1"

_EXAMPLES = """examples:
  python -m wdjax certify --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm linf --eps 0.1 --samples 100 --json certified.json
  python -m wdjax certify --arch resnet2b --weights cifar10.pth --data cifar10.npz \\
      --norm linf --eps 1/255 --method crown --radii radii.npz --json - | jq .verified"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "certify",
        parents=[common],
        help="certify a PyTorch checkpoint; JSON out",
        description="Proves for how many samples no point within eps is misclassified, and what "
        "accuracy every distribution in the Wasserstein balls Omega_1, Omega_2, Omega_inf leaves.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subject.declare(parser, "what is certified")
    how = parser.add_argument_group("how")
    subject.declare_budget(how)
    how.add_argument(
        "--method",
        choices=certify.METHODS,
        default="auto",
        help="of the margins, from the cheapest to the tightest (default %(default)s)",
    )
    how.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="branch and bound (bab) takes a sample at most (default %(default)s)",
    )
    how.add_argument(
        "--steps",
        type=options.positive,
        default=10,
        metavar="N",
        help="searches for the radii (default %(default)s)",
    )
    how.add_argument(
        "--batch-size",
        type=options.positive,
        default=64,
        metavar="B",
        help="samples on the device at once (default %(default)s)",
    )
    out = parser.add_argument_group("what is written")
    out.add_argument("--json", required=True, metavar="OUT", help="a file, or - for stdout")
    out.add_argument(
        "--radii",
        type=Path,
        metavar="FILE.npz",
        help="save, of every sample, its certified radius, verified, margin and correct",
    )
    out.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="save the work to, and go on from"
    )
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Certifies, prints, then writes."""
    subject.check_writable(parsed.json, parsed.radii)
    model, x, y = subject.load(parsed)
    spent = process.Compiling()
    began = time.perf_counter()
    with console.search("certify") as tick:
        found = certify.verify(
            model,
            x,
            y,
            norm=norms.NAMES[parsed.norm],
            eps=parsed.eps,
            method=parsed.method,
            steps=parsed.steps,
            seconds=parsed.seconds,
            batch_size=parsed.batch_size,
            callback=tick,
            checkpoint=parsed.checkpoint,
        )
    seconds = time.perf_counter() - began
    content = _content(parsed, found, seconds, min(spent.seconds, seconds))
    left = content["certified_accuracy"]
    console.say(
        f"{content['verified']} of {len(y)} verified within {parsed.eps:g} by {found.method}; "
        + ", ".join(f"{name} >= {value:.4f}" for name, value in left.items())
    )
    subject.write(parsed.json, content)
    if parsed.radii is not None:
        files.write(parsed.radii, _radii(found))
    return 0


def _content(
    parsed: argparse.Namespace, found: certify.Certificate, seconds: float, compiling: float
) -> dict[str, Any]:
    """What is written as JSON."""
    left = {
        f"omega_{name}": float(certify.certified_accuracy(found.radius, parsed.eps, order))
        for name, order in options.ORDERS.items()
    }
    return {
        **subject.described(parsed, SCHEMA, len(found.correct)),
        "method": found.method,
        "claim": found.claim,
        "clean_accuracy": float(np.mean(found.correct)),
        "verified": int(np.sum(found.verified)),
        "certified_accuracy": left,
        "seconds": seconds,
        "compile_seconds": compiling,
    }


def _radii(found: certify.Certificate) -> bytes:
    """The archive of ``--radii``."""
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        radius=found.radius,
        verified=found.verified,
        margin=found.margin,
        correct=found.correct,
    )
    return buffer.getvalue()
