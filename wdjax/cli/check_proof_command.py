"""``python -m wdjax check-proof``: checks the proof of a verdict of ``verify --proof``."""

import argparse
import time
from pathlib import Path
from typing import Any

from wdjax.cli.console import Console
from wdjax.proofs import checker

_EXAMPLES = """example:
  python -m wdjax verify net.onnx property.vnnlib --proof proofs
  python -m wdjax check-proof proofs/net-property.npz --model net.onnx --property property.vnnlib"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "check-proof",
        parents=[common],
        help="check a proof that verify --proof wrote",
        description="Checks a proof by a program that shares no code with the search: prints unsat "
        "or sat, which is then shown for the net as a function of real numbers, or ends with the "
        "code 2 and says why the proof is refused.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("proof", type=Path, metavar="PROOF.npz", help="the proof")
    for name, example in (("model", "NET.onnx"), ("property", "SPEC.vnnlib")):
        parser.add_argument(
            f"--{name}", type=Path, metavar=example, required=True, help="of which it is"
        )
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Checks, and prints what is proved."""
    began = time.perf_counter()
    try:
        found = checker.check(parsed.proof, parsed.model, parsed.property)
    except checker.RefusedProofError as refused:
        raise ValueError(f"{parsed.proof} is refused: {refused}.") from None
    parts, spent = found["leaves"], time.perf_counter() - began
    console.say(f"{found['result']}\nproved by {parts} parts, checked in {spent:.2f} s")
    return 0
