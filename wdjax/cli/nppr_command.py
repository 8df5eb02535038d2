"""``python -m wdjax nppr``: NPPR, PR and AR of a model."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args

import jax
import numpy as np

from wdjax import ensembles, metrics, models, norms, nppr
from wdjax.attacks import PGD
from wdjax.balls import Lp
from wdjax.checks import arguments
from wdjax.cli import options, subject
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
    subject.declare_out(parser)
    parser.set_defaults(command=run)


def run(parsed: argparse.Namespace, console: Console) -> int:
    """Fits, measures and writes; says every number at once."""
    modes = _modes(parsed.mode)
    if parsed.rare and parsed.norm != "linf":
        raise ValueError(f"--rare is for --norm linf, got {parsed.norm}.")
    subject.check_places(parsed)
    samples = subject.load(parsed)
    model, x, y = samples
    if len(y) < 4:
        raise ValueError(f"NPPR is fitted on one half and measured on the other: {len(y)} samples.")
    warned = subject.cautions(console, arguments.too_far(_ball(parsed), x.shape[1:], parsed.eps))
    train, held = ((x[half], y[half]) for half in (slice(len(y) // 2), slice(len(y) // 2, None)))
    work, done = subject.begin(parsed, x, y, model=model), []

    def do(name: str, part: Callable[..., T], *given: Any) -> T:
        done.append(work.do(name, lambda task: part(parsed, model, *given, task)))
        return done[-1].value

    fixed = {}
    for name, own in _noises(parsed).items():
        fixed[name] = do(f"PR {name}", _fixed, own, held)
        console.say(f"PR {name}: {fixed[name]['value']:.2%}")
    rare = do("rare", _rare, held, fixed["uniform"]["per_sample"])
    for row in rare:
        ends = "[{:.2g}, {:.2g}]".format(*row["interval"])
        console.say(f"rare, held-out sample {row['sample']}: {row['value']:.2g} {ends}")
        for remark in row["remarks"]:
            console.warn(f"  CAREFUL, sample {row['sample']}: {remark}")
    with console.search("attack") as tick:
        attacked = do("AR", _attacked, held, tick)
    console.say(f"AR: {attacked['strong']:.2%}")
    for remark in attacked["remarks"]:
        console.warn(f"  CAREFUL, AR: {remark}")
    fitted: dict[str, Any] = {}
    for mode in modes:
        fitted[mode] = do(f"NPPR {mode}", _fitted, mode, train, held)
        console.say(f"NPPR {mode}: {fitted[mode]['value']:.2%}")
        for remark in fitted[mode]["remarks"]:
            console.warn(f"  CAREFUL, {mode}: {remark}")
    drawn = [row["per_sample"] for row in (*fixed.values(), *fitted.values())]
    attacked["least"] = float(np.mean(np.min([attacked["per_sample"], *drawn], axis=0) == 1))
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
        "prbench": do("PRBench", _prbench, held, train),
        "rare": rare,
        **subject.spent(done),
    }
    broken = [claim for claim, holds in content["inequalities"].items() if not holds]
    said = [f"{claim} does not hold, beyond the intervals" for claim in broken]
    content["remarks"] = warned + subject.cautions(console, *said)
    subject.write(console, parsed.json, content, table=lambda: _table(content))
    return 0


def _table(content: dict[str, Any]) -> Iterator[list[Any]]:
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


def _measure(parsed: argparse.Namespace, model: Classifier, own: Any, x: Any, y: Any) -> Estimate:
    key = jax.random.key(parsed.seed + 1)
    size = subject.batch(parsed, len(y) * parsed.draws)
    return nppr.estimate(model, own, x, y, key=key, draws=parsed.draws, batch_size=size)


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


def _fixed(
    parsed: argparse.Namespace, model: Classifier, own: Any, held: Any, task: tasks.Task
) -> dict[str, Any]:
    """The JSON row of PR: the share of copies that survive under the fixed distribution ``own``,
    and under the worst ones of bounded density ratio to it."""
    found = _measure(parsed, model, own, *held)
    return _row(found) | {"bounded_ratio": _curve(found)}


def _rare(
    parsed: argparse.Namespace, model: Classifier, held: Any, shares: list[float], task: tasks.Task
) -> list[dict[str, Any]]:
    """Failure probabilities under uniform noise of single samples, as JSON rows.

    Takes the first ``--rare`` samples of ``held`` whose copies all survived; ``shares`` are the
    survival shares of the correctly classified ones.
    """
    own, key = distributions.UniformBall(parsed.eps, _ball(parsed)), jax.random.key(parsed.seed + 3)
    x, y, right = correct_inputs(model, own, *held)
    safe = np.flatnonzero(right)[np.asarray(shares) == 1]
    rows = []
    for place in map(int, safe[: parsed.rare or 0]):
        how: dict[str, Any] = {"key": jax.random.fold_in(key, place)}
        found = nppr.importance(model, own, x[place], y[place], batch_size=parsed.batch_size, **how)
        low, high = found.interval()
        rows.append(
            {
                "sample": place,
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
    """AR, the share of correct samples that survive attacks: PGD-20, and PGD-20 with ``fast``.

    Returns both, the interval of the second for the population, faults and remarks.
    """
    ball = _ball(parsed)
    how: dict[str, Any] = {"eps": parsed.eps, "key": jax.random.key(parsed.seed)}
    how["callback"] = task.heard(tick)
    first, second = how | task.saving(), how | task.saving(parts=True)
    pgd = driver.search(PGD(ball, steps=20, random_start=True), model, *held, **first)
    fast = ensembles.fast(model, *held, ball=ball, **second).found
    _, _, right = correct_inputs(model, distributions.UniformBall(parsed.eps, ball), *held)
    correct = np.asarray(pgd.correct)
    left = right & correct & ~np.asarray(driver.best_of(pgd, fast).success)
    low, high = metrics.clopper_pearson(int(left.sum()), int(right.sum()))
    return {
        "clean_accuracy": float(np.mean(correct)),
        "pgd20": float(np.mean(~np.asarray(pgd.success)[right])),
        "strong": float(np.mean(left[right])),
        "per_sample": left[right].astype(float).tolist(),
        "interval_of_population": [float(low), float(high)],
        "faults": int(np.sum(pgd.fault | fast.fault)),
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
    return {
        **_row(_measure(parsed, model, found, x, y)),
        "fitted_value": float(np.mean(np.asarray(found.history.survived)[-20:])),
        "entropy_ratio": float(found.history.entropy[-1]),
        "entropy_ratio_within": float(found.history.own_entropy[-1]),
        "spread_within": float(spread.within.mean()),
        "saturated": spread.saturated,
        "learnt": found.learnt,
        "remarks": [] if found.learnt else ["no gradient reached the distribution"],
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
