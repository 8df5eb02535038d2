"""``python -m wdjax convert``: converts a PyTorch or RobustBench checkpoint."""

import argparse
from typing import Any

from wdjax.cli.console import Console
from wdjax.files import atomic, persist
from wdjax.models import convert

_EXAMPLES = """examples:
  python -m wdjax convert models --name Wang2023Better_WRN-28-10 --out wang.safetensors
  python -m wdjax convert mnist.pth --arch wong_mnist
  python -m wdjax convert vit.pth --arch vit --option heads=6 --out vit_folder"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "convert",
        parents=[common],
        help="convert a PyTorch or RobustBench checkpoint",
        description="Reads a checkpoint without PyTorch and without running anything in it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    convert.add_arguments(parser)
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Converts, reports and saves."""
    if parsed.out is not None:
        folder = not str(parsed.out).endswith(".safetensors")
        (persist if folder else atomic).check_writable(parsed.out)
    return convert.main(parsed, console.say)
