"""``python -m wdjax attack``: attacks on a model, measured."""

import argparse
import dataclasses
import functools
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wdjax import ensembles, norms, remarks, transport
from wdjax.balls import Lp
from wdjax.checks import arguments
from wdjax.cli import attack_table, attack_words, options, shards, subject
from wdjax.cli.attack_table import ATTACKS, METHODS, NEAREST, RIVALS, SEARCHES, TABLE_1, Column
from wdjax.cli.console import Console
from wdjax.core import AnyArray, Attack, Classifier, Found, Progress, Result
from wdjax.engine import driver, tasks
from wdjax.report import audit, plots

_EXAMPLES = """examples:
  python -m wdjax attack --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm linf --eps 0.1 --samples 100
  python -m wdjax attack --model mynet:build --weights my.npz --data test.npz \\
      --norm l2 --eps 0.5 --attacks fast --json result.json
  python -m wdjax attack --arch resnet2b --weights cifar10.pth --data cifar10.npz \\
      --norm linf --eps 2/255 --attacks wda,wda++ --kappa 2 --points points.npz --json - | jq .
  python -m wdjax attack --arch resnet2b --weights cifar10.pth --data cifar10.npz \\
      --norm linf --eps 8/255 --attacks table1 --plot row.png --json row.json
  python -m wdjax attack --arch resnet2b --weights cifar10.pth --data cifar10.npz \\
      --norm linf --eps 8/255 --attacks "pgd(steps=100, restarts=5), fast(passes=300)" --json -"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "attack",
        parents=[common],
        help="attack a model; a table, or JSON out",
        description="Attacks a model and measures what is left of its accuracy.",
        epilog=f"attacks:\n{options.glossary(METHODS)}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subject.declare_samples(subject.declare(parser, "what is attacked"))
    how = parser.add_argument_group("how")
    subject.declare_budget(how, "l0")
    how.add_argument(
        "--order",
        choices=list(options.ORDERS),
        default="1",
        help="of the Wasserstein ball in which minimum-norm attacks and kappa > 1 spend eps "
        "(default 1: on average)",
    )
    how.add_argument(
        "--kappa",
        type=options.KAPPA,
        help="move 1 / kappa of each sample, kappa^(1/order) eps far (default 1); not for "
        "minimum-norm attacks, whose budget goes where flips are cheapest",
    )
    how.add_argument(
        "--attacks",
        default="wda,wda++,pgd",
        metavar="NAMES",
        help="see below (default %(default)s), with settings in parentheses where wanted, such as "
        '"pgd(steps=100, loss=margin), fast(passes=300)"; table1: the eleven columns of Table 1 of '
        "Le et al., with orders and kappa of their own",
    )
    how.add_argument(
        "--rivals",
        type=options.RIVALS,
        metavar="M",
        help="rival classes that wda, wda++ and a3-wda try in a step if not set otherwise "
        "(default, as in the paper: all for up to ten classes, but 5 for wda++; 10 for up to a "
        "hundred; 20 for more)",
    )
    how.add_argument(
        "--seed", type=options.SEED, default=0, help="seed of all randomness (default %(default)s)"
    )
    how.add_argument(
        "--batch-size", type=options.BATCH, metavar="B", help="samples on the device at once"
    )
    subject.declare_devices(how)
    shards.declare(how)
    how.add_argument(
        "--bfloat16",
        action="store_true",
        help="search in bfloat16, and measure in float32: flips that float32 does not confirm are "
        "counted as lost_flips, and looked for once more",
    )
    out = subject.declare_out(parser)
    out.add_argument(
        "--points",
        type=Path,
        metavar="FILE.npz",
        help="save the adversarial points: of every attack NAME/x_adv, NAME/success, NAME/cost and "
        "NAME/weight, and as x and y the nearest flips of all of them, to be used as --data",
    )
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the accuracies")
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Attacks, and writes the results; says at once what each attack left."""
    columns = check(parsed)
    work, samples = shards.sharded_work(parsed)
    _, x, y = samples
    ball = _ball(parsed)
    warned = subject.cautions(console, arguments.too_far(ball, x.shape[1:], parsed.eps))
    results: dict[str, Result] = {}
    measured, spent = {}, []
    for label, column in columns.items():
        done = _done(label, column, parsed, work, samples, console)
        if work.shard is not None or done is None:
            continue
        results[label], measured[label] = _spent(column, parsed, work, samples, done.value)
        measured[label] |= subject.spent([done])
        measured[label]["remarks"] = remarks.of(measured[label])
        spent.append(done)
        _say(console, label, measured[label], float(np.mean(results[label].correct)))
    if work.shard is not None:
        return work.write(console)
    warned += subject.cautions(console, *work.left_out)
    if not results:
        raise ValueError("no attack has all of its parts; name more of them.")
    content = {
        **subject.described(parsed, "attack", samples),
        **work.coverage,
        "remarks": warned,
        "order": parsed.order,
        "seed": parsed.seed,
        "clean_accuracy": float(np.mean([*results.values()][-1].correct)),
        "attacks": measured,
        **subject.spent(spent),
    }
    others: dict[Path, bytes] = {}
    if parsed.points is not None:
        others[parsed.points] = _points(x, y, results)
    if parsed.plot is not None:
        left = {label: row["attacked_accuracy"] for label, row in measured.items()}
        others[parsed.plot] = plots.png(plots.accuracies(content["clean_accuracy"], left))
    subject.write(console, parsed.json, content, others, lambda: table(content))
    return 0


def _ball(parsed: argparse.Namespace) -> Lp:
    return Lp({"l0": 0, **norms.NAMES}[parsed.norm])


def check(parsed: argparse.Namespace) -> dict[str, Column]:
    """Raises, before any work, for bad options and paths; the attacks by label."""
    columns = _columns(parsed)
    subject.check_paths(parsed, parsed.points, parsed.plot)
    shards.check(parsed)
    return columns


def table(content: dict[str, Any]) -> Iterator[list[Any]]:
    """The rows that are printed without ``--json``."""
    yield ["attack", "accuracy", "eps is", "max cost", "gradients", "forwards", "seconds"]
    yield ["none", content["clean_accuracy"]] + [None] * 5
    for label, row in content["attacks"].items():
        passes = row["gradients_per_sample"], row["forwards_per_sample"]
        told = row["attacked_accuracy"], row["budget"], row["max_cost"]
        yield [label, *told, *passes, row["seconds"]]


def _columns(parsed: argparse.Namespace) -> dict[str, Column]:
    """The attacks that were asked for, by label in results; the columns of Table 1 for ``table1``.

    Raises for unknown attacks, and for options that would have no effect.
    """
    found = attack_words.read("--attacks", parsed.attacks)
    if found == [attack_words.Word("table1")]:
        if parsed.kappa is not None:
            raise ValueError("--kappa would be ignored: the columns of table1 have their own.")
        if parsed.bfloat16:
            raise ValueError("--bfloat16 is not for table1, whose ensembles search in float32.")
        return {column.label: _with_rivals(column, parsed) for column in TABLE_1}
    names = [word.name for word in found]
    if not names or set(names) - set(METHODS):
        raise ValueError(
            f"--attacks knows {', '.join(METHODS)}, or table1 alone; "
            f"got {options.shown(parsed.attacks)}."
        )
    return _checked(found, parsed)


def _checked(found: list[attack_words.Word], parsed: argparse.Namespace) -> dict[str, Column]:
    """The attacks of the words of ``--attacks``, by label in results, with all settings checked.

    Raises, before any work, for an attack given twice, for settings that an attack refuses, and for
    ``--kappa``, ``--rivals`` or ``--bfloat16`` where they do not apply.
    """
    ball, order = _ball(parsed), options.ORDERS[parsed.order]
    columns: dict[str, Column] = {}
    seen, heeded = set(), parsed.rivals is None
    for word in found:
        settings = attack_words.typed(word, attack_table.settings_of(word.name))
        label = attack_words.label(word.name, settings)
        # A norm or a number that an attack does not take is refused before any work.
        attack_table.check(word.name, ball, settings)
        column = _with_rivals(Column(word.name, order, parsed.kappa, settings), parsed)
        heeded |= column.settings != settings
        same = (word.name, *attack_table.described(word.name, ball, column.settings).values())
        if same in seen:
            raise ValueError(f"--attacks takes each once, and {label} is there before.")
        seen.add(same)
        columns[label] = column
    lone = {label: _lone(column, ball) for label, column in columns.items()}
    if parsed.bfloat16 and not all(lone.values()):
        raise ValueError(
            "--bfloat16 is for attacks that treat every sample alone, not for "
            f"{', '.join(label for label in lone if not lone[label])}: leave it out."
        )
    if parsed.kappa is not None and all(_nearest(column, ball) for column in columns.values()):
        raise ValueError(
            f"--kappa {parsed.kappa:g} would be ignored: {', '.join(columns)} spends eps where "
            "flips are cheapest. Leave it out."
        )
    if not heeded:
        raise ValueError(
            f"--rivals {parsed.rivals} would be ignored: it is for {', '.join(RIVALS)}, unless "
            "their own settings say rivals."
        )
    return columns


def _with_rivals(column: Column, parsed: argparse.Namespace) -> Column:
    """The column with ``--rivals``, if it applies and the column does not set rivals itself."""
    if parsed.rivals is None or column.name not in RIVALS:
        return column
    return column._replace(settings={"rivals": parsed.rivals} | column.settings)


def _nearest(column: Column, ball: Lp) -> bool:
    """Whether the attack looks for the nearest flips, so that kappa does not apply."""
    return column.name in NEAREST or _budget(column, ball) == "none"


def _lone(column: Column, ball: Lp) -> bool:
    """Whether it is a single attack, no ensemble, that treats samples independently."""
    return column.name in ATTACKS and _budget(column, ball) != "data"


def _budget(column: Column, ball: Lp) -> str:
    """The attack's ``budget``; an empty string for an ensemble."""
    made = ATTACKS[column.name](ball, **column.settings) if column.name in ATTACKS else None
    return "" if made is None else made.budget


def _done(
    label: str,
    column: Column,
    parsed: argparse.Namespace,
    work: shards.ShardedWork,
    samples: subject.Subject,
    console: Console,
) -> tasks.Done[dict[str, Any]] | None:
    """What :func:`_attack` returns of the samples, or of this part of them, and what it spent.

    None for an attack that another part does, or whose part is missing.
    """
    with console.search(label) as tick:
        attack = functools.partial(_attack, column, parsed, work, *samples, tick)
        if _splits(column, _ball(parsed)):
            return work.rows(label, attack)
        return work.whole(label, functools.partial(attack, np.arange(len(samples.y))), console.say)


def _splits(column: Column, ball: Lp) -> bool:
    """Whether the attack treats every sample alone, so that parts of the samples may be attacked.

    An ensemble that decides by all samples which to attack next does not.
    """
    return column.name == "autoattack" or _lone(column, ball)


def _attack(
    column: Column,
    parsed: argparse.Namespace,
    work: shards.ShardedWork,
    model: Classifier,
    x: np.ndarray,
    y: np.ndarray,
    tick: Callable[[Progress], None],
    rows: np.ndarray,
    task: tasks.Task,
) -> dict[str, Any]:
    """Runs one attack on the samples ``rows``: its ``found``, on the host, and ``lost``.

    ``lost`` ``[n]`` are, with ``--bfloat16``, the flips that float32 did not confirm, else None.
    ``tick`` moves the progress bar; ``task`` says where the attack's checkpoint is.
    """
    how = _how(parsed, work, model, x)
    if work.shard is not None and _splits(column, _ball(parsed)):
        how["diagnose"] = False  # It is a matter of all samples: merge does it.
    how |= {"callback": task.heard(tick), "index": rows}
    found, lost = _search(column, model, x[rows], y[rows], parsed, task, how)
    return {"found": jax.device_get(found), "lost": None if lost is None else np.asarray(lost)}


def _how(
    parsed: argparse.Namespace, work: shards.ShardedWork, model: Classifier, x: np.ndarray
) -> dict[str, Any]:
    """The options that all searches share."""
    key, mesh = jax.random.key(parsed.seed), subject.mesh(parsed)
    return {"batch_size": work.batch(model, x), "key": key, "mesh": mesh}


def _spent(
    column: Column,
    parsed: argparse.Namespace,
    work: shards.ShardedWork,
    samples: subject.Subject,
    attacked: dict[str, Any],
) -> tuple[Result, dict[str, Any]]:
    """Spends the budget on what an attack found: the result and its row in the JSON.

    Of merged parts, the second look at samples that survived a blind attack is taken here.
    """
    model, x, y = samples
    ball, order, spending = _ball(parsed), column.order, _spending(column, parsed)
    found = attacked["found"]
    if work.parts is not None and _lone(column, ball):
        attack, reach = _attack_of(column, parsed)
        how = _how(parsed, work, model, x) | {"index": work.parts.rows}
        found = driver.looked_again(found, attack, model, x, y, eps=reach, **how)
    result = jax.device_get(transport.spend(found, eps=parsed.eps, order=order, **spending))
    measured = spending | _measured(result, x, y, ball.norm, order)
    measured["budget"] = _bounded(column, parsed)
    if attacked["lost"] is not None:
        measured["lost_flips"] = int(attacked["lost"].sum())
    measured["settings"] = attack_table.described(column.name, ball, column.settings)
    if column.name in RIVALS:
        classes = jax.eval_shape(model, x[:1]).shape[1]
        measured["rivals"] = RIVALS[column.name](column.settings.get("rivals")).tried(classes)
    return result, measured


def _spending(column: Column, parsed: argparse.Namespace) -> dict[str, float]:
    """Options of the spending: kappa, or nothing for minimum-norm attacks."""
    if _nearest(column, _ball(parsed)):
        return {}
    return {"kappa": 1.0 if column.kappa is None else column.kappa}


def _bounded(column: Column, parsed: argparse.Namespace) -> str:
    """Whether ``--eps`` bounds the cost of every sample, or that of all on average."""
    averaged = (
        _budget(column, _ball(parsed)) == "data" or _spending(column, parsed).get("kappa") != 1
    )
    return "average" if averaged and column.order != math.inf else "maximum"


def _attack_of(column: Column, parsed: argparse.Namespace) -> tuple[Attack, float]:
    """A single attack, and the radius within which it searches: ``kappa^(1/order) eps``."""
    reach = parsed.eps * _spending(column, parsed).get("kappa", 1.0) ** (1 / column.order)
    attack: Any = ATTACKS[column.name](_ball(parsed), **column.settings)
    if attack.budget == "data":
        return dataclasses.replace(attack, order=column.order), parsed.eps
    return attack, reach


def _say(console: Console, label: str, measured: dict[str, Any], clean: float) -> None:
    console.say(f"{label}: {clean:.4f} clean, {measured['attacked_accuracy']:.4f} attacked")
    for remark in measured["remarks"]:
        console.warn(f"  CAREFUL, {label}: {remark}")


def _search(
    column: Column,
    model: Classifier,
    x: np.ndarray,
    y: np.ndarray,
    parsed: argparse.Namespace,
    task: tasks.Task,
    how: dict[str, Any],
) -> tuple[Found, AnyArray | None]:
    """Runs one attack or ensemble on the samples ``x``, ``y``.

    Also returns, with ``--bfloat16``, which flips float32 did not confirm, ``[n]``.
    """
    if column.name in SEARCHES:
        ball, order = _ball(parsed), column.order
        reach = parsed.eps * _spending(column, parsed).get("kappa", 1.0) ** (1 / order)
        return SEARCHES[column.name](
            model, x, y, eps=reach, order=order, ball=ball, **column.settings, **how,
            **task.saving(parts=True),
        ), None  # fmt: skip
    attack, reach = _attack_of(column, parsed)
    if attack.budget == "data":  # One budget for all samples, also for misclassified ones.
        how = how | {"skip_misclassified": False}
    if parsed.bfloat16:
        return ensembles.mixed(attack, model, x, y, eps=reach, **how, **task.saving(parts=True))
    return driver.search(attack, model, x, y, eps=reach, **how, **task.saving()), None


def _measured(
    result: Result, x: np.ndarray, y: np.ndarray, norm: float, order: float
) -> dict[str, Any]:
    """An attack's measurements for the JSON: accuracy, largest cost, transport cost, passes."""
    distribution = transport.AdversarialDistribution.from_result(x, y, result)
    return {
        "attacked_accuracy": audit.accuracy(result),
        "max_cost": float(np.max(np.where(result.weight > 0, result.cost, 0.0))),
        "transport_cost": distribution.coupling_cost(norm, order),
        **remarks.spent(result),
    }


def _points(x: np.ndarray, y: np.ndarray, results: dict[str, Result]) -> bytes:
    """The content of the ``--points`` file, an npz archive.

    For every attack the arrays ``NAME/x_adv``, ``success``, ``cost`` and ``weight``; and as ``x``
    the nearest flip of all attacks for each sample (the sample itself if there is none), with
    ``y``.
    """
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
