"""``python -m wdjax game``: games against defences that adapt at test time.

They are played on digits, or around a model of one's own.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import attacks, data, ensembles, transductive
from wdjax.cli import attack_words, options, own_game, shards, subject
from wdjax.cli.console import Console
from wdjax.core import Progress
from wdjax.engine import tasks
from wdjax.report import summary
from wdjax.transductive import Defense, GameReport, Share, SpaceAttack, digits
from wdjax.transductive.digits import DigitsCase, Row
from wdjax.transductive.game import ORDERS
from wdjax.transductive.state import State

FAMILIES = {
    "rmc": ("rmc-standard", "rmc-adversarial"),
    **{name: (name,) for name in ("dent", "dann", "tadv", "urejectron", "purify")},
}
_SETTINGS = attack_words.declared(
    SpaceAttack,
    without=(
        "inner",
        "loss",
        "judge",
        "begin",
        "legs",
        "reduce",
        "keep",
        "batch_size",
        "points",
        "search",
    ),
)
"""Settings that can be changed without changing what an attack's name means, with types."""
_ONE_LOOK = ("transfer", "pgd-skip", "autoattack", "dent-aa", "cw", "brighter")
"""Prefixes of names of attacks with a single iteration."""


def _brighter(model: Any, x: Any, y: Any, *, eps: float, key: Any, ball: Any) -> Any:
    return jnp.clip(x + eps, *ball.box)


def _dent_autoattack(static: Any, x: Any, y: Any, **how: Any) -> Any:
    """AutoAttack on DENT itself, of which each input is adapted beside the clean ones."""
    return ensembles.autoattack(static.args[0]["defense"].module(x), x, y, **how)


EXTRAS = {
    "autoattack": Row(transductive.transfer(ensembles.autoattack)),
    "dent-aa": Row(transductive.transfer(_dent_autoattack)),
    "cw": Row(transductive.transfer(attacks.CarliniWagner())),
    "brighter": Row(transductive.transfer(_brighter)),
}
"""Attacks that a game has if ``--attacks`` names them: on the model alone, and ``dent-aa`` on the
defence as a classifier, in games of DENT; ``brighter`` moves every pixel by eps."""


def _extras(name: str) -> dict[str, Row]:
    """Those of the game ``name``."""
    return {
        word: row for word, row in EXTRAS.items() if name.startswith("dent") or word != "dent-aa"
    }


_MOST_MODELS = 1001
"""Maximum number of models in a bank, all of which are in memory."""
_DEFAULT = "rmc,dent,dann,tadv,urejectron"

_EXAMPLES = """examples:
  python -m wdjax game
  python -m wdjax game --defense dann,tadv --seeds 0,1,2 --draws 5 --json -
  python -m wdjax game --defense rmc --checkpoint games --json rmc.json   # can be interrupted
  python -m wdjax game --model net.onnx --data test.npz --eps 8/255 --defense purify --samples 128
  python -m wdjax game --preset dann-mnist --train train.npz --data test.npz --checkpoint dann
  python -m wdjax game --arch resnet --weights FILE --data test.npz --eps 8/255 \\
      --defense dent,rmc --train train.npz --samples 128"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    words = {name: digits.CASES[cases[0]] for name, cases in FAMILIES.items()}
    parser = commands.add_parser(
        "game",
        parents=[common],
        help="attack defences that adapt at test time; a table, or JSON out",
        description="Plays games between attacks on model spaces and defences that adapt to their "
        "inputs, on small nets and digits, or around a model of your own. Accuracies are means "
        "over private keys of the defender, with intervals of 95 %, beside those on clean inputs.",
        epilog=f"defences:\n{options.glossary(words)}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own_game.declare(parser)
    how = parser.add_argument_group("how")
    how.add_argument(
        "--defense",
        metavar="NAMES",
        help=f"see below (default {_DEFAULT}; around your own model {own_game.DEFAULT}, of "
        f"{', '.join(own_game.NEEDS)})",
    )
    how.add_argument(
        "--attacks",
        metavar="NAMES",
        help="of a defence's attacks only these; all by default. With settings in parentheses "
        f"where wanted, such as gmsa-avg(restarts=2): {', '.join(_SETTINGS)}. Only if named: "
        f"{', '.join(EXTRAS)}",
    )
    how.add_argument(
        "--seeds",
        type=options.Numbers(options.SEED),
        default="0",
        metavar="LIST",
        help="of data, models and keys (default %(default)s)",
    )
    how.add_argument(
        "--draws",
        type=options.KEYS,
        default=3,
        metavar="N",
        help="private keys of the defender that the referee draws (default %(default)s)",
    )
    how.add_argument(
        "--samples",
        type=options.SAMPLES,
        metavar="N",
        help="inputs at most; all of --data, or those of the table",
    )
    how.add_argument(
        "--iterations", type=options.SEARCHES, metavar="T", help="of the attacks; the table's"
    )
    subject.declare_devices(how)
    how.add_argument(
        "--order",
        choices=ORDERS,
        default="natural",
        help="in which inputs are submitted; labels sorts them by label within pools of two rounds "
        "(default %(default)s)",
    )
    shards.declare(how)
    subject.declare_out(parser)
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Plays the games and writes; says at once what each game left."""
    on_own_data = own_game.on_own_data(parsed)
    own_game.check(parsed)
    subject.check_paths(parsed)
    shards.check(parsed)
    cases = [parsed.preset]
    if parsed.preset is None:
        cases = _cases(
            parsed.defense or (own_game.DEFAULT if on_own_data else _DEFAULT), on_own_data
        )
    samples, train = own_game.load(parsed)
    offered = [
        (name, seed, own_game.case(name, seed, parsed, samples, train))
        for name in cases
        for seed in parsed.seeds
    ]
    wanted = _wanted(parsed, cases, [game.case.rows | _extras(name) for name, _, game in offered])
    if on_own_data:
        most = max(_fitting(game.case, parsed.samples)[1] for *_, game in offered)
        samples = samples._replace(x=samples.x[:most], y=samples.y[:most])
    work, samples = shards.sharded_work(parsed, samples)
    if work.coverage:
        raise ValueError("every game is one part's: merge all of them, not some.")
    done: list[tasks.Done[Any]] = []
    alone = None
    if own_game.named(parsed):
        told = samples, offered[0][2].case.eps, subject.mesh(parsed)
        look = functools.partial(own_game.attacked_alone, *told)
        alone = work.whole("the model alone", lambda task: look(), console.say)
    games = [
        _played(name, seed, game, wanted, parsed, work, console, done)
        for name, seed, game in offered
    ]
    if work.shard is not None:
        return work.write(console)
    about = (
        subject.described(parsed, "game", samples)
        if on_own_data
        else {**summary.head("game"), "data": "digits"}
    )
    said = subject.cautions(console, *(_unplayed(*one, parsed.samples) for one in offered))
    if alone is not None:
        done.append(alone)
        said += subject.cautions(console, *own_game.remarks_on(alone.value))
    content = {
        **about,
        "draws": parsed.draws,
        "games": games,
        "remarks": said,
        **subject.spent(done),
    }
    subject.write(console, parsed.json, content, table=lambda: table(content))
    return 0


def table(content: dict[str, Any]) -> Iterator[list[Any]]:
    """The rows that are printed without ``--json``."""
    yield ["defence", "seed", "attack", "accuracy", "interval", "clean", "static"]
    for game in content["games"]:
        for label, row in game["attacks"].items():
            values = (row[name]["value"] for name in ("one_shot_clean", "static_accuracy"))
            one = row["one_shot"]
            yield [game["defense"], game["seed"], label, one["value"], one["interval"], *values]


def _cases(text: str, own_model: bool) -> list[str]:
    """The games of the defences in ``--defense``; raises for unknown ones and duplicates.

    Around the user's own model there is one game a defence: how the model was trained is given.
    """
    names = options.words(text)
    if not names or set(names) - set(FAMILIES) or len(set(names)) < len(names):
        raise ValueError(f"--defense knows {', '.join(FAMILIES)}, each once; got {text!r}.")
    return [case for name in names for case in FAMILIES[name][: 1 if own_model else None]]


def _wanted(
    parsed: argparse.Namespace, cases: list[str], offered: list[dict[str, Row]]
) -> list[attack_words.Word] | None:
    """The attacks of ``--attacks``, parsed and checked; None, which means all, if it is not given.

    Raises if none of the games ``cases``, whose attacks are ``offered``, has such an attack, or for
    settings that it does not take.
    """
    if parsed.attacks is None:
        return None
    wanted = attack_words.read("--attacks", parsed.attacks)
    known = {label: None for rows in offered for label in rows}
    for word in wanted or [attack_words.Word("")]:
        if word.name not in known:
            raise ValueError(
                f"none of {', '.join(cases)} has an attack {options.shown(word.name)}; there are "
                f"{', '.join(known)}."
            )
    for rows in offered:
        _chosen(rows, wanted)
    return wanted


def _chosen(
    rows: dict[str, Row], wanted: list[attack_words.Word] | None
) -> dict[str, tuple[str, Row]]:
    """The wanted attacks among ``rows``, by label in results, as (name, row with its settings).

    Attacks that this defence lacks are left out; ``wanted`` None means all rows as they are.

    Raises:
      ValueError: settings that an attack does not take, or an attack given twice.
    """
    if wanted is None:
        return {name: (name, row) for name, row in rows.items()}
    found: dict[str, tuple[str, Row]] = {}
    for word in wanted:
        kinds = dict(_SETTINGS)
        if word.name.startswith(_ONE_LOOK):
            del kinds["iterations"]
        settings = attack_words.typed(word, kinds)
        label = attack_words.label(word.name, settings)
        if label in found:
            raise ValueError(f"--attacks takes each once, and {label} is there twice.")
        if word.name not in rows:
            continue
        row = rows[word.name]
        try:
            changed = row._replace(attack=dataclasses.replace(row.attack, **settings))
            if changed.attack.capacity > _MOST_MODELS:
                raise ValueError(
                    f"iterations times simulations must be at most {_MOST_MODELS - 1}, which is "
                    "how many models are kept."
                )
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from error
        if any(changed == setting for _, setting in found.values()):
            raise ValueError(f"--attacks takes each once, and {label} is there before.")
        found[label] = word.name, changed
    order = [*rows]
    return dict(sorted(found.items(), key=lambda item: order.index(item[1][0])))


def _played(
    name: str,
    seed: int,
    game: own_game.BuiltGame,
    wanted: list[attack_words.Word] | None,
    parsed: argparse.Namespace,
    work: shards.ShardedWork,
    console: Console,
    all_done: list[tasks.Done[Any]],
) -> dict[str, Any]:
    """Plays all games of a defence under one seed, each as a task; returns their entry in the JSON.

    The defence is trained only if a game's result is not in the checkpoint. The entry also has the
    cost of adaptation as a multiple of a prediction's, and the strongest attack.
    """
    case, train, test = game
    size, count = _fitting(case, parsed.samples)
    key = jax.random.key(seed)
    offered = case.rows if wanted is None else case.rows | _extras(name)
    common = {} if parsed.order == "natural" else {"order": parsed.order}
    rows = {
        label: row._replace(how=common | row.how)
        for label, (_, row) in _chosen(offered, wanted).items()
    }
    entry: dict[str, Any] = {"defense": name, "seed": seed, "eps": case.eps, "n": count}
    entry |= {"rounds": count // size, "attacks": {}}
    if not rows:
        return entry

    @functools.cache
    def ready() -> tuple[Defense, Any]:
        """The defence and its memory, trained when the first game needs them."""
        defense = case.build()
        return defense, transductive.prepare(defense, *train, key=jax.random.fold_in(key, 1))

    reports, inputs = {}, test.take(count)
    for label, row in rows.items():
        with console.search(f"{name} {label}") as tick:
            shown = _shown(tick, row, count // size)
            how = {"eps": case.eps, "size": size, "draws": parsed.draws} | row.how
            how |= {"key": jax.random.fold_in(key, 2), "mesh": subject.mesh(parsed, size)}
            play = functools.partial(_play, ready, row, inputs, how, shown)
            done = work.whole(f"{name} {seed} {label}", play, console.say)
        if done is None or work.shard is not None:
            continue
        all_done.append(done)
        reports[label] = found = done.value
        measured = _measured(found, row) | {"cpu_seconds": done.spent["cpu_seconds"]}
        entry["attacks"][label] = measured
        _say(console, f"{name} seed {seed} {label}", found, measured)
    cost_key, some = jax.random.fold_in(key, 3), inputs.x[:size]
    cost = work.whole(
        f"{name} {seed} cost",
        lambda task: transductive.cost_multiple(*ready(), some, key=cost_key, repeats=3),
        console.say,
    )
    if cost is None or work.shard is not None:
        return entry
    all_done.append(cost)
    entry["cost_multiple"] = cost.value
    private = {label: found for label, found in reports.items() if rows[label].how == common}
    if private:
        entry["worst"], least = transductive.worst(private)
        console.say(f"{name} seed {seed}: {_percent(least.one_shot)} by {entry['worst']} is worst")
    return entry


def _play(
    ready: Callable[[], tuple[Defense, Any]],
    row: Row,
    inputs: data.Dataset,
    how: dict[str, Any],
    shown: Callable[[State], None],
    task: tasks.Task,
) -> GameReport:
    """Plays one game, or continues it from its checkpoint.

    ``ready`` returns defence and memory, and trains the defence at its first call; ``how`` are
    arguments of :func:`wdjax.transductive.play`.
    """
    defense, memory = ready()
    task.begin()
    how = how | task.saving() | {"callback": task.heard(shown)}
    return transductive.play(defense, row.attack, *inputs, memory=memory, diagnose=False, **how)


def _fitting(case: DigitsCase, samples: int | None) -> tuple[int, int]:
    """The numbers of inputs in a round and in total, at most ``samples``.

    A case with a fixed size has an even number of rounds, since its pools span two of them.
    """
    count = case.inputs if samples is None else min(samples, case.inputs)
    if case.size is None:
        return count, count
    size = min(case.size, max(1, count // 2))
    return size, count // (2 * size) * 2 * size if count > 1 else 1


def _unplayed(name: str, seed: int, game: own_game.BuiltGame, samples: int | None) -> str | None:
    """The remark on a game that has fewer inputs than there are; None for others."""
    size, count = _fitting(game.case, samples)
    there = game.case.inputs if samples is None else min(samples, game.case.inputs)
    if count == there:
        return None
    pairs = f"rounds of {size} come in pairs"
    return f"{name} seed {seed} is played with the first {count} of {there} inputs: {pairs}"


def _shown(tick: Callable[[Progress], None], row: Row, rounds: int) -> Callable[[State], None]:
    """Returns the function that moves the progress bar to a game's present round and iteration."""
    turns = row.attack.iterations + 1

    def show(state: State) -> None:
        taken = int(state.round) * turns + int(state.iteration)
        tick(Progress(taken, rounds * turns, np.arange(int(state.round), rounds)))

    return show


def _share(found: Share) -> dict[str, Any]:
    return {"value": found.value, "interval": [found.low, found.high]}


def _measured(found: GameReport, row: Row) -> dict[str, Any]:
    """The JSON of one game: accuracies, rejections, settings, costs, faults."""
    measured: dict[str, Any] = {
        name: _share(getattr(found, name))
        for name in (
            "one_shot",
            "one_shot_clean",
            "worst_of",
            "worst_of_clean",
            "majority",
            "majority_clean",
            "static_accuracy",
            "static_clean_accuracy",
        )
    }
    if found.score is not None:
        points = {f"{budget:g}": found.operating_point(budget) for budget in (0.05, 0.1)}
        measured["rejection"] = {
            budget: {field: summary.number(value) for field, value in point._asdict().items()}
            for budget, point in points.items()
        }
    return measured | {
        "settings": _settings(row),
        "how": dict(row.how),
        "draws": len(found.correct),
        "simulated_errors": found.simulated.mean(axis=0).tolist(),
        "gradients_per_sample": float(found.gradients.mean()),
        "max_cost": float(found.cost.max()),
        "faults": int(found.fault.sum()),
        "remarks": found.remarks,
    }


def _settings(row: Row) -> dict[str, Any]:
    """The settings of a game's attack and of its inner attack, for JSON."""
    inner: Any = row.attack.inner
    inner_settings = {"name": type(inner).__name__} | summary.settings(inner)
    inner_settings.pop("loss")  # Replaced by the objective.
    attack: Any = row.attack
    return summary.settings(attack) | {"inner": inner_settings}


def _percent(found: Share) -> str:
    """A share and its interval in percent, as text."""
    return f"{100 * found.value:.1f} % [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def _say(console: Console, label: str, found: GameReport, measured: dict[str, Any]) -> None:
    """Prints the accuracies of a game, and warns if an input met a fault."""
    said = (
        f"{label}: {_percent(found.one_shot)} attacked, {100 * found.one_shot_clean.value:.1f} "
        f"clean; static {100 * found.static_accuracy.value:.1f} and "
        f"{100 * found.static_clean_accuracy.value:.1f}"
    )
    if found.score is not None:
        point = found.operating_point()
        said += f"; errors {100 * point.err:.1f} at {100 * point.rejected:.1f} % clean refused"
    console.say(said)
    for remark in measured["remarks"]:
        console.warn(f"  CAREFUL, {label}: {remark}")
