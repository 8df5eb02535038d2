"""``python -m wdjax nppr``: NPPR, PR and AR of a model."""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args

import jax
import numpy as np

from wdjax import ensembles, losses, metrics, models, norms, nppr
from wdjax.attacks import PGD
from wdjax.balls import Lp
from wdjax.checks import arguments
from wdjax.cli import options, shards, subject
from wdjax.cli.console import Console
from wdjax.core import Classifier
from wdjax.engine import driver, tasks
from wdjax.nppr import distributions
from wdjax.nppr import family as families
from wdjax.nppr.estimate import Estimate, correct_inputs
from wdjax.nppr.upsample import UPSAMPLE

T = TypeVar("T")

_EXAMPLES = """examples:
  python -m wdjax nppr --arch wong_mnist --weights mnist.pth --data mnist.npz \\
      --norm linf --eps 0.1 --mode joint
  python -m wdjax nppr --arch resnet2b --weights cifar10.pth --data cifar10.npz \\
      --norm linf --eps 8/255 --mode paper --components 12 --latent 64 --json - | jq .nppr"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "nppr",
        parents=[common],
        help="probabilistic robustness of a model; a table, or JSON out",
        description="Fits the worst distribution of perturbations (NPPR) on the first half of the "
        "samples, and measures on the second what survives it, fixed noise (PR) and attacks (AR): "
        "shares of the samples that are classified correctly.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subject.declare_samples(subject.declare(parser, "what is measured"))
    how = parser.add_argument_group("how")
    subject.declare_budget(how)
    how.add_argument(
        "--mode",
        default="joint",
        metavar="LIST",
        help=f"what the noise depends on: some of {', '.join(nppr.MODES)}; paper for its four, "
        "all for all (default %(default)s)",
    )
    how.add_argument(
        "--components",
        type=options.COMPONENTS,
        default=7,
        help="of a mixture (default %(default)s)",
    )
    how.add_argument(
        "--latent", type=options.LATENT, default=32, help="dimension of it (default %(default)s)"
    )
    how.add_argument(
        "--upsample", choices=UPSAMPLE, default="learnable", help="(default %(default)s)"
    )
    how.add_argument(
        "--covariance",
        choices=get_args(families.Family.__annotations__["covariance"]),
        default="full",
        help="(default %(default)s)",
    )
    how.add_argument(
        "--loss",
        choices=get_args(nppr.Loss),
        default="sigmoid",
        help="that a fit lowers; softplus is the paper's (default %(default)s)",
    )
    how.add_argument(
        "--steps", type=options.STEPS, default=300, help="of a fit (default %(default)s)"
    )
    how.add_argument(
        "--draws", type=options.DRAWS, default=1000, help="copies a sample (default %(default)s)"
    )
    how.add_argument(
        "--rare",
        type=options.SAMPLES,
        metavar="N",
        help="also the probability that a copy under uniform noise fails, by importance sampling "
        "checked by splitting, of the first N samples that lost none (--norm linf)",
    )
    how.add_argument(
        "--seed", type=options.SEED, default=0, help="of everything (default %(default)s)"
    )
    how.add_argument(
        "--batch-size", type=options.BATCH, metavar="B", help="copies on the device at once"
    )
    subject.declare_devices(how)
    shards.declare(how)
    subject.declare_out(parser)
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Fits, measures and writes; says every number at once."""
    modes = check(parsed)
    samples = subject.load(parsed)
    model, x, y = samples
    if len(y) < 4:
        raise ValueError(f"NPPR is fitted on one half and measured on the other: {len(y)} samples.")
    warned = subject.cautions(console, arguments.too_far(_ball(parsed), x.shape[1:], parsed.eps))
    train, held = ((x[half], y[half]) for half in (slice(len(y) // 2), slice(len(y) // 2, None)))
    work, _ = shards.sharded_work(parsed, samples, len(held[1]))
    if work.coverage:
        raise ValueError("nppr is fitted on all samples: merge all of its parts, not some.")
    done: list[tasks.Done[Any]] = []

    def whole(name: str, part: Callable[..., T], *given: Any) -> T | None:
        part_done = work.whole(name, lambda task: part(parsed, model, *given, task), console.say)
        done.extend([] if part_done is None else [part_done])
        return None if part_done is None else part_done.value

    counts = {}
    for name, noise in _noises(parsed).items():
        part_done = work.rows(
            f"PR {name}", functools.partial(_measure, parsed, model, noise, *held)
        )
        done.append(part_done)
        counts[name] = part_done.value
    with console.search("attack") as tick:
        attacked = whole("AR", _attacked, held, tick)
    fits = {mode: whole(f"NPPR {mode}", _fitted, mode, train, held) for mode in modes}
    prbench = whole("PRBench", _prbench, held, train)
    if work.shard is not None:
        return work.write(console)
    assert attacked is not None
    fixed = {name: _row(found) for name, found in counts.items()}
    rare = whole("rare", _rare, held, fixed["uniform"]["per_sample"]) if parsed.rare else []
    fitted: dict[str, Any] = {mode: row for mode, row in fits.items() if row is not None}
    drawn = [row["per_sample"] for row in (*fixed.values(), *fitted.values())]
    attacked["least"] = float(np.mean(np.min([attacked["per_sample"], *drawn], axis=0) == 1))
    fixed = {name: row | {"bounded_ratio": _curve(counts[name])} for name, row in fixed.items()}
    _say(console, fixed, rare or [], attacked, fitted)
    faults = sum(row["faults"] for row in (*fixed.values(), *fitted.values()))
    if faults:
        warned += subject.cautions(console, f"{faults} copies had logits that are not finite")
    content = {
        **subject.described(parsed, "nppr", samples),
        "seed": parsed.seed,
        "clean_accuracy": attacked["clean_accuracy"],
        "fitted_on": len(y) // 2,
        "measured_on": len(y) - len(y) // 2,
        "shares_of": "correctly classified samples of the second half",
        "loss": parsed.loss,
        "features": "logits" if _features(model) is model else "penultimate",
        "nppr": fitted,
        "ar": attacked,
        "pr": fixed,
        "inequalities": _inequalities(attacked, fitted, fixed),
        "prbench": prbench,
        "rare": rare,
        **subject.spent(done),
    }
    broken = [claim for claim, holds in content["inequalities"].items() if not holds]
    said = [f"{claim} does not hold, beyond the intervals" for claim in broken]
    content["remarks"] = warned + subject.cautions(console, *said)
    subject.write(console, parsed.json, content, table=lambda: table(content))
    return 0


def _say(
    console: Console,
    fixed: dict[str, Any],
    rare: list[dict[str, Any]],
    attacked: dict[str, Any],
    fitted: dict[str, Any],
) -> None:
    """Says every number, and warns of all doubts about them."""
    for name, row in fixed.items():
        console.say(f"PR {name}: {row['value']:.2%}")
    for row in rare:
        ends = "[{:.2g}, {:.2g}]".format(*row["interval"])
        console.say(f"rare, held-out sample {row['sample']}: {row['value']:.2g} {ends}")
        for remark in row["remarks"]:
            console.warn(f"  CAREFUL, sample {row['sample']}: {remark}")
    console.say(f"AR: {attacked['strong']:.2%}")
    for remark in attacked["remarks"]:
        console.warn(f"  CAREFUL, AR: {remark}")
    for mode, row in fitted.items():
        console.say(f"NPPR {mode}: {row['value']:.2%}")
        for remark in row["remarks"]:
            console.warn(f"  CAREFUL, {mode}: {remark}")


def check(parsed: argparse.Namespace) -> list[nppr.Mode]:
    """Raises, before any work, for bad options and paths; the modes."""
    modes = _modes(parsed.mode)
    if parsed.rare and parsed.norm != "linf":
        raise ValueError(f"--rare is for --norm linf, got {parsed.norm}.")
    if parsed.rare and parsed.shard is not None:
        raise ValueError("--rare looks for samples among all: leave it out where --shard is.")
    subject.check_paths(parsed)
    shards.check(parsed)
    return modes


def table(content: dict[str, Any]) -> Iterator[list[Any]]:
    """The rows that are printed without ``--json``."""
    yield ["share of the correct samples", "value", "interval"]
    rows = {"AR": content["ar"] | {"value": content["ar"]["strong"]}}
    rows |= {f"NPPR {mode}": row for mode, row in content["nppr"].items()}
    rows |= {f"PR {name}": row for name, row in content["pr"].items()}
    for name, row in rows.items():
        yield [name, row["value"], row["interval_of_population"]]


def _modes(text: str) -> list[nppr.Mode]:
    """The modes of ``--mode``, in the order of ``nppr.MODES``; raises for unknown ones."""
    known = {"paper": families.PAPER, "all": nppr.MODES}
    if text in known:
        return [*known[text]]
    words = options.words(text)
    modes = [mode for mode in nppr.MODES if mode in words]
    if not modes or len(modes) != len(set(words)):
        raise ValueError(
            f"--mode must be some of {', '.join(nppr.MODES)}, or paper, or all; got {text!r}."
        )
    return modes


def _row(found: Estimate) -> dict[str, Any]:
    """An estimate as a JSON object, with its intervals."""
    (low, high), (lower, upper) = found.pooled(), found.population()
    return {
        "value": found.value,
        "interval_of_these": [float(low), float(high)],
        "interval_of_population": [float(lower), float(upper)],
        "draws": found.draws,
        "n_correct": int(found.correct.sum()),
        "faults": int(found.faults.sum()),
        "per_sample": found.per_input.tolist(),
    }


def _curve(found: Estimate) -> dict[str, Any]:
    """The worst survival over distributions of bounded density ratio, as a JSON object."""
    curve = nppr.bounded_ratio(found, [10.0**power for power in range(7)])
    (low, high), (lower, upper) = curve.pooled(), curve.population()
    return {
        "ratio": curve.ratio.tolist(),
        "value": curve.value.tolist(),
        "interval_of_these": np.stack([low, high], axis=1).tolist(),
        "interval_of_population": np.stack([lower, upper], axis=1).tolist(),
        "remarks": [curve.remark] if curve.remark else [],
    }


def _ball(parsed: argparse.Namespace) -> Lp:
    """The ball of ``--norm`` in the box [0, 1]."""
    return Lp(norms.NAMES[parsed.norm])


def _measure(
    parsed: argparse.Namespace,
    model: Classifier,
    distribution: Any,
    x: Any,
    y: Any,
    rows: np.ndarray,
    task: tasks.Task | None = None,
) -> Estimate:
    """Counts the copies of the samples ``rows`` that survive under ``distribution``."""
    key = jax.random.key(parsed.seed + 1)
    size = subject.batch(parsed, len(y) * parsed.draws)
    how: dict[str, Any] = {"key": key, "draws": parsed.draws, "batch_size": size}
    how |= {"index": rows, "mesh": subject.mesh(parsed)}
    return nppr.estimate(model, distribution, x[rows], y[rows], **how)


def _noises(parsed: argparse.Namespace) -> dict[str, Any]:
    """The fixed distributions that the norm has, by name."""
    ball, eps = _ball(parsed), parsed.eps
    kinds: dict[str, Any] = {
        "uniform": distributions.UniformBall(eps, ball),
        "gaussian_clipped": distributions.ClippedGaussian(eps, ball),
    }
    if parsed.norm == "linf":
        kinds["gaussian_truncated"] = distributions.TruncatedGaussian(eps, ball)
    return kinds


def _rare(
    parsed: argparse.Namespace, model: Classifier, held: Any, shares: list[float], task: tasks.Task
) -> list[dict[str, Any]]:
    """Failure probabilities under uniform noise of single samples, as JSON rows.

    Takes the first ``--rare`` samples of ``held`` whose copies all survived; ``shares`` are the
    survival shares of the correctly classified ones.
    """
    distribution, key = (
        distributions.UniformBall(parsed.eps, _ball(parsed)),
        jax.random.key(parsed.seed + 3),
    )
    x, y, right = correct_inputs(model, distribution, *held)
    safe = np.flatnonzero(right)[np.asarray(shares) == 1]
    rows = []
    for index in map(int, safe[: parsed.rare or 0]):
        how: dict[str, Any] = {"key": jax.random.fold_in(key, index)}
        found = nppr.importance(
            model, distribution, x[index], y[index], batch_size=parsed.batch_size, **how
        )
        low, high = found.interval()
        rows.append(
            {
                "sample": index,
                "value": found.value,
                "interval": [float(low), float(high)],
                "found": found.found,
                "agrees": found.agrees,
                "splitting": None if found.check is None else found.check.value,
                "remarks": [found.remark] if found.remark else [],
            }
        )
    return rows


def _attacked(
    parsed: argparse.Namespace, model: Classifier, held: Any, tick: Any, task: tasks.Task
) -> dict[str, Any]:
    """AR, the share of correct samples that survive attacks: PGD-20, PGD-20 on the margin (the
    loss of Carlini and Wagner), and all of these with ``fast``.

    Returns each, the interval of the last for the population, faults and remarks.
    """
    ball = _ball(parsed)
    how: dict[str, Any] = {"eps": parsed.eps, "key": jax.random.key(parsed.seed)}
    how["mesh"] = subject.mesh(parsed)
    how["callback"] = task.heard(tick)
    first, second = how | task.saving(), how | task.saving(parts=True)
    pgd = driver.search(PGD(ball, steps=20, random_start=True), model, *held, **first)
    margins = PGD(ball, steps=20, loss=losses.margin, random_start=True)
    cw = driver.search(margins, model, *held, diagnose=False, **how)
    fast = ensembles.fast(model, *held, ball=ball, **second).found
    _, _, right = correct_inputs(model, distributions.UniformBall(parsed.eps, ball), *held)
    correct = np.asarray(pgd.correct)
    left = right & correct & ~np.asarray(driver.best_of(pgd, cw, fast).success)
    low, high = metrics.clopper_pearson(int(left.sum()), int(right.sum()))
    return {
        "clean_accuracy": float(np.mean(correct)),
        "pgd20": float(np.mean(~np.asarray(pgd.success)[right])),
        "cw20": float(np.mean(~np.asarray(cw.success)[right])),
        "strong": float(np.mean(left[right])),
        "per_sample": left[right].astype(float).tolist(),
        "interval_of_population": [float(low), float(high)],
        "faults": int(np.sum(pgd.fault | cw.fault | fast.fault)),
        "remarks": [*pgd.remarks, *fast.remarks],
    }


def _fitted(
    parsed: argparse.Namespace,
    model: Classifier,
    mode: nppr.Mode,
    train: Any,
    held: Any,
    task: tasks.Task,
) -> dict[str, Any]:
    """NPPR of one mode: fits a distribution on ``train``, and counts survivors on ``held``.

    Returns the estimate and facts about the fit, for JSON.
    """
    family = nppr.Family(
        mode=mode,
        components=parsed.components,
        latent=parsed.latent,
        upsample=parsed.upsample,
        covariance=parsed.covariance,
    )
    seen = _features(model)
    schedule = nppr.Schedule(steps=parsed.steps, loss=parsed.loss)
    found = nppr.fit(
        model,
        *train,
        eps=parsed.eps,
        key=jax.random.key(parsed.seed),
        family=family,
        schedule=schedule,
        features=seen,
        ball=_ball(parsed),
        callback=task.heard(lambda state: None),
        **task.saving(),
    )
    seconds = task.spent["seconds"]
    x, y = held
    spread = nppr.spread_within(found, x[:50], y[:50], key=jax.random.key(parsed.seed))
    shares = np.mean(found.mixture(x, y).proportions, axis=0)
    counted = _measure(parsed, model, found, x, y, np.arange(len(y)))
    doubts = [] if found.learnt else ["no gradient reached the distribution"]
    if (missing := found.unfitted(y[counted.correct])) is not None:
        doubts.append(f"{missing}; the first half of the samples is that of the fit: shuffle them")
    return {
        **_row(counted),
        "fitted_value": float(np.mean(np.asarray(found.history.survived)[-20:])),
        "entropy_ratio": float(found.history.entropy[-1]),
        "entropy_ratio_within": float(found.history.own_entropy[-1]),
        "proportion_max": float(shares.max()),
        "proportion_min": float(shares.min()),
        "proportion_deviation": float(np.std(shares, ddof=len(shares) > 1)),
        "spread_within": float(spread.within.mean()),
        "saturated": spread.saturated,
        "learnt": found.learnt,
        "remarks": doubts,
        "fit_seconds": seconds,
    }


def _features(model: Classifier) -> Classifier:
    """What the distribution sees of an input: penultimate features, or logits of other models."""
    try:
        return models.features(model)  # type: ignore[arg-type]
    except ValueError:
        return model


def _inequalities(
    attacked: dict[str, Any], fitted: dict[str, Any], fixed: dict[str, Any]
) -> dict[str, bool]:
    """Whether the paper's inequalities hold, by the words of each claim.

    Proposition 1 is AR <= NPPR <= PR; by Proposition 2 the NPPR of every mode is at most that of
    the independent mode. A claim counts as true unless the two intervals show the opposite.
    """
    ends = "interval_of_population"
    claims = {}
    for mode, row in fitted.items():
        claims[f"AR <= NPPR {mode}"] = attacked[ends][0] <= row[ends][1]
        for name, other in fixed.items():
            claims[f"NPPR {mode} <= PR {name}"] = row[ends][0] <= other[ends][1]
        free = fitted.get("independent")
        if free is not None and mode != "independent":
            claims[f"NPPR {mode} <= NPPR independent"] = row[ends][0] <= free[ends][1]
    return claims


def _prbench(
    parsed: argparse.Namespace, model: Classifier, held: Any, train: Any, task: tasks.Task
) -> Any:
    """PRBench's measures, which are for the linf ball; None for other norms."""
    if parsed.norm != "linf":
        return None
    key = jax.random.key(parsed.seed + 2)
    size = subject.batch(parsed, len(held[1]) * parsed.draws)
    return nppr.prbench(model, *held, key=key, train=train, batch_size=size)
