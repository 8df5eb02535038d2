"""``python -m wdjax audit``: attacks and certificates of two nets on digits, as a page."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from wdjax import attacks, data, models, training
from wdjax.cli import options, subject
from wdjax.cli.console import Console
from wdjax.core import Attack, Model
from wdjax.engine import tasks
from wdjax.report import audit, page, plots, summary
from wdjax.report.evidence import Sandwich

BROKEN = 3
"""The exit code if an invariant is broken."""

RADII = (0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.09, 0.12)
SIZES = (64, 64, 64, 10)

_EXAMPLES = """examples:
  python -m wdjax audit
  python -m wdjax audit --out /tmp/audit --samples 50 --seed 1 --quiet"""


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
        help="train two classifiers of digits and bound their robustness from both sides",
        description="Trains a standard and an adversarial net on 8 x 8 digits, attacks and "
        "certifies both, checks that the sides never cross, and writes a page that stands alone.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
        default=200,
        metavar="N",
        help="test digits to attack and certify, at most 350 (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=options.SEED, default=0, help="seed of all randomness (default %(default)s)"
    )
    subject.declare_checkpoint(parser)
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Trains, measures and writes, then prints."""
    subject.check_places(parsed, parsed.out / "report.html")
    split = data.digits()
    samples = split.test.take(parsed.samples)
    work, done = subject.begin(parsed, split), []
    for number, name in enumerate(RECIPES):
        with console.steps(name) as show:

            def measure(task: tasks.Task, number: int = number, show: Any = show) -> dict[str, Any]:
                return _measured(parsed, number, split.train, samples, show, task)

            done.append(work.do(name, measure, page.Picture))
    trained = [one.value["described"] for one in done]
    content = {
        "schema": summary.SCHEMA,
        "versions": summary.versions(),
        "seed": parsed.seed,
        "data": f"the first {len(samples.y)} test digits of scikit-learn",
        "seconds": subject.total(done),
        "passed": all(check["holds"] for model in trained for check in model["invariants"]),
        "models": trained,
    }
    pictures = {one.value["described"]["name"]: one.value["pictures"] for one in done}
    others: dict[Path, Any] = {
        parsed.out / file: drawn for one in done for file, drawn in one.value["drawn"].items()
    }
    others[parsed.out / "report.html"] = page.render(content, pictures)
    subject.write(console, parsed.out / "report.json", content, others)
    _summarise(content, console)
    console.say(f"{parsed.out / 'report.html'} in {content['seconds']:.0f} s")
    return 0 if content["passed"] else BROKEN


def _measured(
    parsed: argparse.Namespace,
    number: int,
    train: data.Dataset,
    samples: data.Dataset,
    show: Callable[[audit.Step], None],
    task: tasks.Task,
) -> dict[str, Any]:
    """Trains and audits the model of recipe ``number``: its JSON, PNG files by name, page pictures.

    ``show`` moves the progress bar; ``task`` says where checkpoints are.
    """
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
        radii=RADII,
        key=jax.random.fold_in(key, 100 + number),
        progress=task.heard(show),
        **task.saving(parts=True),
    )
    described = {"name": name, "trained": _words(model, recipe, len(train.y))}
    return {
        "described": described | summary.describe(found),
        "drawn": _figures(salt, found, samples, model),
        "pictures": page.pictures(found, *samples, model, salt),
    }


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


def _figures(prefix: str, found: Sandwich, samples: data.Dataset, model: Model) -> dict[str, bytes]:
    """The PNG files of one audit by name, each beginning with ``prefix``."""
    drawn = {
        "accuracy": plots.accuracy(found),
        "loss": plots.loss(found),
        "distances": plots.distances(found),
        "allocation": plots.allocation(found),
        "examples": plots.examples(found, *samples, model),
    }
    return {f"{prefix}-{name}.png": plots.png(figure) for name, figure in drawn.items()}


def _summarise(content: dict[str, Any], console: Console) -> None:
    """Prints both accuracies of every model and ball, and warns of what is broken."""
    for model in content["models"]:
        console.say(f"{model['name']}: clean accuracy {model['clean_accuracy']:.3f}")
        console.say("  eps         " + "".join(f"{eps:>8g}" for eps in model["radii"]))
        for ball, curves in model["balls"].items():
            for key, label in (("attacked_accuracy", "<="), ("certified_accuracy", ">=")):
                cells = "".join(f"{value:8.3f}" for value in curves[key])
                console.say(f"  {ball:<9} {label}{cells}")
        for label, remark in summary.warnings(model):
            console.warn(f"  CAREFUL: {model['name']}, {label}: {remark}")
        for invariant in model["invariants"]:
            if not invariant["holds"]:
                console.warn(f"  BROKEN: {model['name']}, {summary.statement(invariant)}")
    console.say("all invariants hold" if content["passed"] else "AN INVARIANT IS BROKEN")
