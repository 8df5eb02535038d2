"""``python -m wdjax audit``: attacks and certificates of a model, as a page.

Without a model it trains and audits two nets on digits.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from wdjax import attacks, data, models, norms, training
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.cli import options, shards, subject
from wdjax.cli.console import Console
from wdjax.core import Attack, Model
from wdjax.engine import tasks
from wdjax.report import audit, audited, changes, page, proved, summary
from wdjax.report.evidence import Sandwich

_KEPT = (page.Drawn, page.Picture, page.WorstSample)
"""Types in the result of a task."""

BROKEN = 3
"""The exit code if an invariant is broken."""

EPS_LIST = (0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.09, 0.12)
SIZES = (64, 64, 64, 10)
_DIGITS = 200
"""Default number of test digits."""

_EXAMPLES = """examples:
  python -m wdjax audit
  python -m wdjax audit --model mynet:build --weights my.npz --data test.npz \\
      --eps-list 1/255,2/255,4/255 --samples 200 --out audit
  python -m wdjax audit --model net.onnx --data test.npz --eps-list 0.25,0.5 --norm l2
  python -m wdjax audit --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --eps-list 0.1 --out new --compare old/report.json"""


class Recipe(NamedTuple):
    """How a model is trained."""

    epochs: int = 30
    batch_size: int = 128
    attack: Attack | None = None
    eps: float | None = None


RECIPES = {
    "standard training": Recipe(),
    "adversarial training": Recipe(
        attack=attacks.PGD(steps=5, random_start=True, iterate="last"), eps=0.1
    ),
}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "audit",
        parents=[common],
        help="bound the robustness of a model from both sides; a page",
        description="Attacks and certifies a model, checks that the sides never cross, and writes "
        "a page that stands alone. Without a model it trains and audits a standard and an "
        "adversarial net on 8 x 8 digits.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = subject.declare(parser, "a model of your own", required=False)
    group.add_argument(
        "--eps-list",
        type=options.Numbers(options.BUDGET),
        metavar="LIST",
        help="budgets, such as 1/255,2/255",
    )
    group.add_argument("--norm", choices=sorted(norms.NAMES), help="of a move (default linf)")
    group.add_argument(
        "--batch-size", type=options.BATCH, metavar="B", help="samples on all devices at once"
    )
    subject.declare_devices(group)
    shards.declare(group)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("audit"),
        metavar="DIR",
        help="the folder of report.html, report.json and figures (default %(default)s)",
    )
    parser.add_argument(
        "--samples",
        type=options.SAMPLES,
        metavar="N",
        help=f"the first N samples; all if left, or {_DIGITS} of 350 digits",
    )
    parser.add_argument(
        "--seed", type=options.SEED, default=0, help="seed of all randomness (default %(default)s)"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="REPORT.json",
        help="the report.json of an earlier audit: say what changed",
    )
    subject.declare_checkpoint(parser)
    parser.set_defaults(command=run, json=None)


class AuditParts(NamedTuple):
    """What the command will write: the audit's JSON and its figures."""

    content: dict[str, Any]
    shown: dict[str, page.Drawn]
    """By model, what the page draws."""
    drawn: dict[str, bytes]
    """The figures as files, by name."""


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Measures and writes, then prints."""
    digits = parsed.model is None and parsed.arch is None
    _check(parsed, digits)
    old = None if parsed.compare is None else changes.read(parsed.compare)
    if old is not None:
        changes.check(old, *(("linf", EPS_LIST) if digits else (parsed.norm, parsed.eps_list)))
    parsed.json = parsed.json or parsed.out / "report.json"
    subject.check_paths(parsed, parsed.out / "report.html")
    shards.check(parsed)
    made = (_digits if digits else _own)(parsed, console)
    if made is None:
        return 0
    content, shown, drawn = made
    # As it will be read again: a comparison must not see tuples or integers that JSON lacks.
    since = () if old is None else changes.compare(old, json.loads(summary.dumps(content)))
    others: dict[Path, Any] = {parsed.out / name: figure for name, figure in drawn.items()}
    others[parsed.out / "report.html"] = page.render(content, shown, since)
    subject.write(console, parsed.json, content, others)
    _say(content, since, console)
    console.say(f"{parsed.out / 'report.html'} in {content['seconds']:.0f} s")
    return 0 if content["passed"] else BROKEN


def _check(parsed: argparse.Namespace, digits: bool) -> None:
    """Raises for options that do not go together; fills in the defaults of a model's own."""
    if digits:
        for name in ("weights", "data", "eps_list", "norm", "batch_size", "devices", "shard"):
            if getattr(parsed, name) != (0 if name == "devices" else None):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} would be ignored: it is for --model or --arch.")
        return
    for name in ("data", "eps_list"):
        if getattr(parsed, name) is None:
            raise ValueError(f"an audit of a model needs --{name.replace('_', '-')}.")
    parsed.eps_list, parsed.norm = sorted(parsed.eps_list), parsed.norm or "linf"


def _own(parsed: argparse.Namespace, console: Console) -> AuditParts | None:
    """Audits the model of ``--model`` or ``--arch`` on the samples of ``--data``.

    None for a part of them, which is written.
    """
    eps_list, ball = audit.check_eps_list(parsed.eps_list), Lp(norms.NAMES[parsed.norm])
    attempts = audit.filled(audit.standard_attacks(ball, eps_list), ball)
    work, samples = shards.sharded_work(parsed)
    model, x, y = samples
    name = str(parsed.arch or parsed.model)
    warned = subject.cautions(console, arguments.too_far(ball, x.shape[1:], eps_list))
    own = validate.check_samples(model, x[work.own], y[work.own])
    size, key = work.batch(model, x), jax.random.key(parsed.seed)
    setting = proved.Setting(model, x, y, ball, eps_list, key, size, subject.mesh(parsed))
    if not work.part:
        setting = setting._replace(x=own[0], y=own[1])
    with console.steps(name, "begin") as show:
        found = audit.measured(setting, attempts, work, show)
        if found is None:
            work.write(console)
            return None
        done = work.after(
            "page", lambda task: _shown({"model": name}, found, samples, "model"), *_KEPT
        )
    whole = _content(parsed, samples, [done], parsed.data.name) | work.coverage | work.spent
    whole |= {"weights": None if parsed.weights is None else parsed.weights.name}
    return _measured(whole | {"remarks": warned}, [done])


def _digits(parsed: argparse.Namespace, console: Console) -> AuditParts:
    """Trains two nets on digits and audits them."""
    split = data.digits()
    samples = split.test.take(parsed.samples or _DIGITS)
    work, done = subject.command_tasks(parsed, split), []
    for number, name in enumerate(RECIPES):
        with console.steps(name, "training") as show:

            def measure(task: tasks.Task, number: int = number, show: Any = show) -> dict[str, Any]:
                return _trained(parsed, number, split.train, samples, show, task)

            done.append(work.do(name, measure, *_KEPT))
    words = f"the first {len(samples.y)} test digits of scikit-learn"
    return _measured(_content(parsed, samples, done, words), done)


def _content(
    parsed: argparse.Namespace, samples: Any, done: list[tasks.Done[Any]], data: str
) -> dict[str, Any]:
    described = [one.value["described"] for one in done]
    times = subject.spent(done)
    whole = audited.content(described, data, samples.x, samples.y, times["seconds"])
    return whole | times | {"seed": parsed.seed}


def _measured(content: dict[str, Any], done: list[tasks.Done[Any]]) -> AuditParts:
    values = [one.value for one in done]
    shown = {value["described"]["model"]: value["shown"] for value in values}
    drawn = {name: figure for value in values for name, figure in value["drawn"].items()}
    return AuditParts(content, shown, drawn)


def _shown(described: dict[str, Any], found: Sandwich, samples: Any, prefix: str) -> dict[str, Any]:
    """A model's JSON, figures as files and pictures for the page."""
    model, x, y = samples
    drawn = audited.figures(found, x, y, model)
    return {
        "described": described | summary.describe(found),
        "drawn": {f"{prefix}-{name}.png": figure for name, figure in drawn.items()},
        "shown": page.draw(found, x, y, model, prefix),
    }


def _trained(
    parsed: argparse.Namespace,
    number: int,
    train: data.Dataset,
    samples: data.Dataset,
    show: Callable[[audit.Step], None],
    task: tasks.Task,
) -> dict[str, Any]:
    """Trains and audits one net of digits."""
    (name, recipe), salt = [*RECIPES.items()][number], [*RECIPES][number].split()[0]
    key = jax.random.key(parsed.seed)
    model = training.train(
        models.mlp(SIZES, key=jax.random.fold_in(key, 0)),
        *train,
        key=jax.random.fold_in(key, 1 + number),
        checkpoint=task.saving()["checkpoint"],
        callback=task.heard(lambda training: None),
        **recipe._asdict(),
    ).model
    found = audit.sandwich(
        model,
        *samples,
        eps_list=EPS_LIST,
        key=jax.random.fold_in(key, 100 + number),
        progress=task.heard(show),
        **task.saving(parts=True),
    )
    described = {"model": name, "trained": _words(model, recipe, len(train.y))}
    return _shown(described, found, (model, *samples), salt)


def _words(model: Model, recipe: Recipe, samples: int) -> str:
    """A sentence about the model and its training, for the page."""
    count = sum(leaf.size for leaf in jax.tree.leaves(model))
    said = (
        f"A multilayer perceptron {'-'.join(map(str, SIZES))} with ReLU and {count} parameters, "
        f"trained on {samples} digits of 8 x 8 pixels for {recipe.epochs} epochs in batches of "
        f"{recipe.batch_size} with Adam, whose learning rate falls from 0.003 to 0"
    )
    if recipe.attack is None:
        return f"{said}, on clean samples."
    steps = summary.settings(recipe.attack)["steps"]
    return (
        f"{said}; every batch is first attacked by {type(recipe.attack).__name__} with {steps} "
        f"steps and a random start, within eps {recipe.eps:g} in linf."
    )


def _say(content: dict[str, Any], since: tuple[changes.Changes, ...], console: Console) -> None:
    """Prints the tables; what a reader must know goes to stderr."""
    console.say(audited.table(content))
    for changed in since:
        console.say(str(changed))
    for model in content["models"]:
        for remark in model["remarks"]:
            console.warn(f"  CAREFUL: {model['model']}, {remark}")
        for invariant in model["invariants"]:
            if not invariant["holds"]:
                console.warn(f"  BROKEN: {model['model']}, {summary.statement(invariant)}")
