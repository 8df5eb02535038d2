"""``python -m wdjax merge``: one result from the parts that ``--shard`` wrote."""

import argparse
from pathlib import Path
from typing import Any

from wdjax.cli import own_model, shards
from wdjax.cli.console import Console

_EXAMPLES = """examples:
  for i in 1 2 3 4 5; do
    python -m wdjax attack --arch wong_mnist --weights mnist.pth --data mnist.npz \\
        --norm linf --eps 0.1 --json result.json --shard $i/5 &
  done; wait
  python -m wdjax merge result.json.*-of-5.safetensors
  python -m wdjax merge result.json.*-of-5.safetensors --partial --json so_far.json"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "merge",
        parents=[common],
        help="join the parts of a command's --shard",
        description="Joins the parts that a command wrote with --shard I/N: the files are those "
        "that the command would have written without it. The command's words are those of the "
        "first part, so run it where the parts were made, and merge only parts of your own: it "
        "loads the model and writes the files that they name.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="PART", help="the parts, all of them"
    )
    parser.add_argument(
        "--model",
        dest="trusted",
        metavar="PACKAGE.MODULE:BUILD",
        help="the Python code that the parts name as their --model: it runs only if you name it, "
        "too",
    )
    parser.add_argument(
        "--json",
        dest="place",
        metavar="OUT",
        help="write the result here instead, or to stdout for -",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="merge what is there: the result is about these samples, and says how many",
    )
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Reads the parts, and runs their command with what they hold."""
    from wdjax import cli

    parts = shards.ShardFiles(parsed.files, parsed.partial)
    try:
        original = cli.parser().parse_args(parts.first.facts["said"])
    except SystemExit:
        raise ValueError(
            f"{parts.first.path} is of a command that is none of this version."
        ) from None
    if getattr(original, "shard", None) is None:
        raise ValueError(f"{parts.first.path} is no part: its command has no --shard.")
    code = getattr(original, "model", None)
    if code is not None and own_model.runs_code(code) and parsed.trusted != code:
        raise ValueError(
            f"the model of {parts.first.path} is Python code, {code}, which merge would import and "
            f"run: say --model {code} if you trust it."
        )
    original.parts, original.said = parts, parts.first.facts["said"]
    original.shard = original.checkpoint = original.every = None
    original.json, original.quiet = parsed.place or original.json, parsed.quiet
    words = " ".join(original.said)
    console.say(f"merges {len(parsed.files)} parts of: {words[:300]}")
    told = Console(parsed.quiet, data=original.json == "-")
    return told.code(original.command(original, told))
