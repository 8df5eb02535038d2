"""How robust is a classifier, from below and from above: attacks, certificates, conversion."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from wdjax import __version__, report
from wdjax.cli import attack, audit, certify, convert, game, image_attack, nppr, process
from wdjax.cli.console import Console

BAD_INPUT = 2

_CODES = """exit codes:
  0  done
  1  a fault of the library itself, with a traceback
  2  bad input: one line says what came and what was expected
  3  an audit found that a statement which must hold is broken
  130, 143  ended by Ctrl-C or by SIGTERM"""

_EXAMPLES = """examples:
  python -m wdjax audit --out audit
  python -m wdjax attack --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm linf --eps 0.1 --json result.json
  python -m wdjax image-attack --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --k 5,10,20 --json result.json
  python -m wdjax certify --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm linf --eps 0.1 --json certified.json
  python -m wdjax nppr --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm linf --eps 0.1 --json nppr.json
  python -m wdjax game --defense dann,tadv --seeds 0,1 --json games.json
  python -m wdjax convert Carmon2019Unlabeled.pt --name Carmon2019Unlabeled --out model.safetensors
  python -m wdjax COMMAND --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      arguments: words of the command line, those of the process by default.

    Returns:
      The exit code, as ``--help`` explains it.

    Raises:
      SystemExit: ``--help``, ``--version``, or words that are no command.
    """
    parsed = parser().parse_args(arguments)
    console = Console(parsed.quiet, data=str(getattr(parsed, "json", "")) == "-")
    try:
        with process.terminable(), process.compilation_cache(parsed.cache):
            return parsed.command(parsed, console)
    except (ValueError, OSError) as error:
        console.warn(f"wdjax: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        console.warn("wdjax: interrupted")
        return process.INTERRUPTED
    except SystemExit as ending:
        if ending.code != process.TERMINATED:
            raise
        console.warn("wdjax: terminated")
        return process.TERMINATED


def process_main() -> NoReturn:
    """The process's own :func:`main`.

    An interrupted process ends at once: compilers may still be at work in other threads, and an
    interpreter that is taken down under them crashes.
    """
    code = main()
    if code in (process.INTERRUPTED, process.TERMINATED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def parser() -> argparse.ArgumentParser:
    """Every command and its options."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    common.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help=f"keep no compiled programs; by default in {process.cache_folder()}, or in "
        "$JAX_COMPILATION_CACHE_DIR",
    )
    main_parser = argparse.ArgumentParser(
        prog="wdjax",
        description=__doc__,
        epilog=f"{_EXAMPLES}\n\n{_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main_parser.add_argument("--version", action="version", version=f"wdjax {__version__}")
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")
    for room in (audit, attack, image_attack, certify, nppr, game, convert):
        room.add(commands, common)
    shown = commands.add_parser(
        "versions",
        parents=[common],
        help="the versions that a number depends on, as JSON",
        epilog="example:\n  python -m wdjax versions > versions.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shown.set_defaults(command=_versions)
    return main_parser


def _versions(parsed: argparse.Namespace, console: Console) -> int:
    sys.stdout.write(json.dumps(report.versions(), indent=1) + "\n")
    return 0
