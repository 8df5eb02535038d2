"""``python -m wdjax certify``: certificates for a model."""

import argparse
import collections
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from wdjax import certify, image, norms
from wdjax.balls import Lp
from wdjax.certify.verify import REFUTED, advice
from wdjax.checks import arguments
from wdjax.cli import lipschitz_command, options, shards, smoothing_command, subject
from wdjax.cli.console import Console
from wdjax.core import Classifier
from wdjax.engine import tasks
from wdjax.report.rounded import AtLeast

_EXAMPLES = """examples:
  python -m wdjax certify --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm linf --eps 0.1 --samples 100
  python -m wdjax certify --model mynet:build --weights my.npz --data test.npz \\
      --norm linf --eps 0.1 --json certified.json
  python -m wdjax certify --arch resnet2b --weights cifar10.pth --data cifar10.npz \\
      --norm linf --eps 1/255 --method crown --radii radii.npz --json - | jq .verified
  python -m wdjax certify --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm l2 --eps 0.5 --method smoothing --sigma 0.25 --json smoothed.json
  python -m wdjax certify --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm w1 --eps 1/784 --method crown --json moved.json
  python -m wdjax certify --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm w1 --eps 19/784 --method smoothing --sigma 0.01 --alpha 0.05 --json images.json"""

_SEARCHES = 10
"""Number of searches for the radii by default."""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "certify",
        parents=[common],
        help="certify a model; a table, or JSON out",
        description="Proves for how many samples no point within eps is misclassified, and what "
        "accuracy every distribution in the Wasserstein balls Omega_1, Omega_2, Omega_inf leaves. "
        "With --norm w1 samples are images, and eps is mass times distance in pixel widths, as a "
        "share of the image's mass.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subject.declare_samples(subject.declare(parser, "what is certified"))
    how = parser.add_argument_group("how")
    subject.declare_budget(how, smoothing_command.IMAGES)
    how.add_argument(
        "--method",
        choices=[*certify.METHODS, lipschitz_command.METHOD, smoothing_command.METHOD],
        default="auto",
        help="of the margins, from the cheapest to the tightest, or by local Lipschitz constants, "
        "with the bound of the expected loss; smoothing certifies the majority of noisy copies "
        "instead, at a level of confidence (default %(default)s)",
    )
    how.add_argument(
        "--seconds",
        type=options.SECONDS,
        metavar="S",
        help="with auto: undecided samples are tried by ever tighter methods, up to branch and "
        "bound, for so long in all; with bab: on a sample at most (default 10)",
    )
    how.add_argument(
        "--steps",
        type=options.SEARCHES,
        metavar="N",
        help=f"searches for the radii, by methods that bound margins (default {_SEARCHES})",
    )
    how.add_argument(
        "--batch-size",
        type=options.BATCH,
        metavar="B",
        help="samples, or votes, on the device at once (default 64; for votes a fast number)",
    )
    subject.declare_devices(how)
    shards.declare(how)
    smoothing_command.declare(parser.add_argument_group("how, by smoothing"))
    out = subject.declare_out(parser)
    out.add_argument(
        "--radii",
        type=Path,
        metavar="FILE.npz",
        help="save, of every sample, its certified radius, verified, margin and correct",
    )
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Certifies and writes, then says how many samples are verified."""
    check(parsed)
    work, samples = shards.sharded_work(parsed)
    model, x, y = samples
    if parsed.method == smoothing_command.METHOD:
        return smoothing_command.run(parsed, work, samples, console)
    images = parsed.norm == smoothing_command.IMAGES
    norm: Any = image.ImageWasserstein(window=None) if images else norms.NAMES[parsed.norm]
    far = arguments.too_far(norm if images else Lp(norm), x.shape[1:], parsed.eps)
    extra: dict[str, Any] = {"remarks": subject.cautions(console, far)}
    how: dict[str, Any] = {"norm": norm, "eps": parsed.eps}
    how["batch_size"] = parsed.batch_size or 64
    if parsed.method == lipschitz_command.METHOD:
        how["mesh"] = subject.mesh(parsed)
        done, facts = lipschitz_command.verified(parsed, work, model, x, y, **how)
        extra |= facts
        extra["remarks"] += subject.cautions(console, *work.left_out)
    else:
        done = _margins(parsed, work, model, x, y, how, console)
    if work.shard is not None:
        return work.write(console)
    found, spent = done.value, done.spent
    if work.parts is not None and parsed.method != lipschitz_command.METHOD:
        refuted = (REFUTED,) if REFUTED in found.remarks else ()
        found = found._replace(remarks=advice(model, x, how["batch_size"]) + refuted)
    extra["remarks"] += found.remarks
    content = _content(parsed, samples, found, spent) | work.coverage | extra
    others = {parsed.radii: None if parsed.radii is None else _radii(found)}
    subject.write(console, parsed.json, content, others, lambda: table(content))
    left = content["certified_accuracy"]
    console.say(
        f"{content['verified']} of {len(y)} verified within {parsed.eps:g} by {found.method}; "
        + ", ".join(f"{name} >= {AtLeast(value):.4f}" for name, value in left.items())
    )
    if found.decided:
        said = (f"{name} {count}" for name, count in _counts(found.decided).items())
        console.say(f"decided by {', '.join(said)}")
    if "nothing to split" in found.ended:
        count = found.ended.count("nothing to split")
        console.say(f"branch and bound had nothing left to split in {count} samples")
    for remark in found.remarks:
        console.say(remark)
    return 0


def check(parsed: argparse.Namespace) -> None:
    """Raises, before any work, for options that do not go together, and bad paths."""
    smoothing_command.check(parsed)
    if parsed.seconds is not None and parsed.method not in ("auto", "bab"):
        raise ValueError("--seconds would be ignored: it is for --method auto and bab.")
    if parsed.steps is not None and parsed.method not in certify.METHODS:
        raise ValueError(f"--steps would be ignored: it is for {', '.join(certify.METHODS)}.")
    if (parsed.norm, parsed.method) == (smoothing_command.IMAGES, lipschitz_command.METHOD):
        raise ValueError(
            f"--method {parsed.method} has Lipschitz constants in l1, l2 and linf; for --norm "
            f"{parsed.norm} take another of {', '.join(certify.METHODS)}."
        )
    subject.check_paths(parsed, parsed.radii)
    shards.check(parsed)


def table(content: dict[str, Any]) -> Iterator[list[Any]]:
    """The rows that are printed without ``--json``."""
    yield ["", "accuracy"]
    yield ["clean", content["clean_accuracy"]]
    for ball, value in content["certified_accuracy"].items():
        yield [f"certified, {ball.capitalize()}", AtLeast(value)]


def _margins(
    parsed: argparse.Namespace,
    work: shards.ShardedWork,
    model: Classifier,
    x: np.ndarray,
    y: np.ndarray,
    how: dict[str, Any],
    console: Console,
) -> tasks.Done[certify.Certificate]:
    """Certifies by bounds of the margins, as one task.

    ``how`` has norm, eps and batch size; method, steps and seconds are added to it.
    """
    steps = _SEARCHES if parsed.steps is None else parsed.steps
    how |= {"method": parsed.method, "steps": steps, "seconds": parsed.seconds}
    how["mesh"] = subject.mesh(parsed)
    with console.search("certify") as tick:

        def verify(rows: np.ndarray, task: tasks.Task) -> certify.Certificate:
            settings = how | task.saving() | {"callback": task.heard(tick)}
            return certify.verify(model, x[rows], y[rows], **settings)

        return work.rows("certify", verify)


def _content(
    parsed: argparse.Namespace,
    samples: subject.Subject,
    found: certify.Certificate,
    spent: tasks.Spent,
) -> dict[str, Any]:
    """The JSON's content: verified samples, certified accuracies, ends of searches, times."""
    left = {
        f"omega_{name}": float(certify.certified_accuracy(found.radius, parsed.eps, order))
        for name, order in options.ORDERS.items()
    }
    return {
        **subject.described(parsed, "certify", samples),
        "method": found.method,
        "claim": found.claim,
        "clean_accuracy": float(np.mean(found.correct)),
        "verified": int(np.sum(found.verified)),
        **({"ended": dict(collections.Counter(found.ended))} if found.ended else {}),
        **({"decided_by": _counts(found.decided)} if found.decided else {}),
        "certified_accuracy": left,
        "seconds": spent["seconds"],
        "compile_seconds": min(spent["compile_seconds"], spent["seconds"]),
    }


def _counts(decided: tuple[str, ...]) -> dict[str, int]:
    """How many samples each method decided, and how many none did."""
    return dict(collections.Counter(name or "none" for name in decided))


def _radii(found: certify.Certificate) -> bytes:
    """The content of the ``--radii`` file, an npz archive of ``[n]`` arrays."""
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        radius=found.radius,
        verified=found.verified,
        margin=found.margin,
        correct=found.correct,
    )
    return buffer.getvalue()
