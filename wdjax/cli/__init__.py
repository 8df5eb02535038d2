"""The command line: ``python -m wdjax COMMAND``.

A command is a file with ``add`` (its options), ``run`` (its work) and mostly ``table`` (the rows
that it prints). `smoothing_command` and `lipschitz_command` are methods of `certify_command`.
``main`` parses the words and calls the command's ``run``, which loads model and samples by
`subject`, does its work in parts by `shards`, and writes table and JSON by ``subject.write``.

`subject` declares and loads what all commands share: model, samples, paths of results; `own_model`
has the kinds of ``--model``, `options` the types of numbers; `printed` aligns tables, `console`
prints; `process` handles signals and caches; `workers` are the processes of ``verify --jobs``.
Attacks are rows of `attack_table`, whose settings `attack_words` parses. `shards` splits work
between processes; `run_command` has the parts of many jobs, those of a `job_file`, done by one of
the `engines`; `table_command` runs the lines of `paper_tables` in this process. Open
`attack_command` first.
"""

import argparse
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from wdjax import __version__
from wdjax.cli import (
    attack_command,
    audit_command,
    certify_command,
    check_proof_command,
    convert_command,
    game_command,
    image_attack_command,
    merge_command,
    nppr_command,
    own_model,
    process,
    run_command,
    table_command,
    verify_command,
)
from wdjax.cli.console import Console
from wdjax.engine import diagnosis
from wdjax.precision import full_precision
from wdjax.report import summary

_COMMANDS = (
    audit_command,
    attack_command,
    image_attack_command,
    certify_command,
    nppr_command,
    game_command,
    convert_command,
    verify_command,
    check_proof_command,
    merge_command,
    run_command,
    table_command,
)

BAD_INPUT = 2
_PURPOSE = (
    "How robust is a classifier, from below and from above: attacks, certificates, conversion."
)

_CODES = """exit codes:
  0  done
  1  a fault of the library itself, with a traceback
  2  bad input, or a file that cannot be read or written: one line says what came and what was
     expected
  3  an audit found that a statement which must hold is broken
  4  standard output cannot be written; every file is
  130, 143  ended by Ctrl-C or by SIGTERM
  141  who read standard output has gone, as for any program before | head; every file is written"""

_EXAMPLES = """examples:
  python -m wdjax audit --out audit
  python -m wdjax attack --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm linf --eps 0.1
  python -m wdjax audit --model mynet:build --weights my.npz --data test.npz \\
      --eps-list 1/255,2/255
  python -m wdjax image-attack --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --k 5,10,20 --json result.json
  python -m wdjax certify --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm linf --eps 0.1 --json certified.json
  python -m wdjax nppr --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm linf --eps 0.1 --json nppr.json
  python -m wdjax game --defense dann,tadv --seeds 0,1 --json games.json
  python -m wdjax merge result.json.*-of-5.safetensors
  python -m wdjax run jobs.toml --jobs 2 --json results.json
  python -m wdjax table le2025-figure6b --arch resnet2b --weights cifar10.pth --data cifar10.npz
  python -m wdjax verify net.onnx property.vnnlib --seconds 60 --proof proofs
  python -m wdjax check-proof proofs/net-property.npz --model net.onnx --property property.vnnlib
  python -m wdjax convert Carmon2019Unlabeled.pt --name Carmon2019Unlabeled --out model.safetensors
  python -m wdjax COMMAND --help"""


@full_precision
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      arguments: words of the command line; by default those of the process.

    Returns:
      The exit code, as ``--help`` explains it.

    Raises:
      SystemExit: ``--help`` and ``--version``.
    """
    try:
        parsed = parser().parse_args(arguments)
    except SystemExit as ending:
        if ending.code != BAD_INPUT:
            raise
        return BAD_INPUT
    parsed.said = [*(sys.argv[1:] if arguments is None else arguments)]
    console = Console(parsed.quiet, data=str(getattr(parsed, "json", "")) == "-")
    return console.code(_run(parsed, console))


def _run(parsed: argparse.Namespace, console: Console) -> int:
    """Runs a command; returns its exit code.

    Errors of the user, lack of memory and signals become a line on stderr and a code of their own;
    any other exception is a fault of the library, and is raised.
    """
    try:
        # Commands print the remarks themselves, also those on results read from a checkpoint.
        told = warnings.catch_warnings(action="ignore", category=diagnosis.RobustnessWarning)
        with process.terminable(), process.compilation_cache(parsed.cache), told:
            _refuse_one_file_twice(parsed)
            return parsed.command(parsed, console)
    except (ValueError, OSError) as error:
        console.warn(f"wdjax: {error}")
        return BAD_INPUT
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and not _MEMORY.search(str(error)):
            raise
        line = (str(error).splitlines() or [""])[0][:200]
        console.warn(f"wdjax: this does not fit into the memory: {line}; ask for less at once.")
        return BAD_INPUT
    except KeyboardInterrupt:
        console.warn(f"wdjax: interrupted{_kept(parsed)}")
        return process.INTERRUPTED
    except SystemExit as ending:
        if ending.code != process.TERMINATED:
            raise
        console.warn(f"wdjax: terminated{_kept(parsed)}")
        return process.TERMINATED


def _kept(parsed: argparse.Namespace) -> str:
    """What a signal leaves behind, for its message."""
    folder = getattr(parsed, "checkpoint", None)
    if folder is None or not any(Path(folder).glob("*")):
        return ""
    return f"; what was done is in {folder}: the same command goes on from there"


def process_main() -> NoReturn:
    """Runs :func:`main` for a process, and ends it.

    An interrupted process ends at once: compilers may still be running in other threads, and would
    crash an interpreter that shuts down normally.
    """
    try:
        code = main()
    except SystemExit as ending:  # From --help and --version.
        code = int(ending.code or 0)
    process.silence_lost_streams()
    if code in (process.INTERRUPTED, process.TERMINATED):
        os._exit(code)
    for number in (signal.SIGINT, signal.SIGTERM):  # All files are written.
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


_OUTPUTS = {"json", "place", "points", "plot", "radii", "proof", "out"}
"""Options that name what is written, by their ``dest``."""


def _refuse_one_file_twice(parsed: argparse.Namespace) -> None:
    """Raises if an output would replace a file that the command reads, or another output."""
    seen: dict[Path, str] = {}
    for name, value in vars(parsed).items():
        for one in value if isinstance(value, list) else [value]:
            named = isinstance(one, Path) or (name in _OUTPUTS and isinstance(one, str))
            if not named and not (name == "model" and isinstance(one, str)):
                continue
            for file in own_model.files(str(one)) if name == "model" else [one]:
                place = Path(os.path.realpath(file))  # A loop of links is refused later.
                if str(one) == "-" or (place.exists() and not place.is_file()):
                    continue
                other = seen.setdefault(place, name)
                if other != name and _OUTPUTS & {name, other}:
                    raise ValueError(
                        f"{one} is named twice; what is written would replace it: name another "
                        "file."
                    )


_MEMORY = re.compile("RESOURCE_EXHAUSTED|[Oo]ut of memory")


class Parser(argparse.ArgumentParser):
    """A parser that reports bad words in one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like the original, which would take the value of ``--seed=--`` for the end of options."""
        for word in sys.argv[1:] if args is None else args:
            if word.endswith("=--"):
                self.error(f"argument {word.removesuffix('=--')}: must be a value, got '--'")
        return super().parse_known_args(args, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints ``--help`` and ``--version`` to standard output, errors to stderr.

        Ends the process with an exit code if standard output cannot be written.
        """
        if file is not sys.stdout:
            Console().warn(message.removesuffix("\n"))
            return
        console = Console()
        console.result(message)
        if code := console.code(0):
            self.exit(code)

    def error(self, message: str) -> NoReturn:
        """Says what came and what was expected, and exits."""
        said = re.sub(r"^argument ([^:]+): (must|would)", r"\1 \2", message)
        self.exit(BAD_INPUT, f"{self.prog}: {said}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The parser of every command and its options."""
    common = Parser(add_help=False)
    common.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    common.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help=f"keep no compiled programs; by default in {process.cache_folder() or 'no folder'}, "
        "or in $JAX_COMPILATION_CACHE_DIR",
    )
    main_parser = Parser(
        prog="wdjax",
        description=_PURPOSE,
        epilog=f"{_EXAMPLES}\n\n{_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main_parser.add_argument("--version", action="version", version=f"wdjax {__version__}")
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands, common)
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
    """The command ``versions``: prints the versions that numbers depend on, as JSON."""
    console.result(json.dumps(summary.head("versions"), indent=1) + "\n")
    return 0
