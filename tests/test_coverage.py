"""Every interval and level that the library states, against repetitions of cases that are known.

A row of ``CASES`` draws at least 400 repetitions and says in which of them the statement held. It
must do so as often as it says, but for two standard errors of 400 repetitions. Rare failures are
among the cases: one input in fifty, probabilities of 1e-4 and less, a single copy in a thousand.
"""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import wdjax
from wdjax import Lp, Model, attacks, certify, ensembles, metrics, nppr, smoothing
from wdjax.nppr import probable
from wdjax.nppr.estimate import Estimate
from wdjax.nppr.rare import Rare
from wdjax.report import evidence
from wdjax.smoothing import binomial, noise
from wdjax.smoothing.looks import SmoothedCertificate
from wdjax.transductive.game_report import share_with_interval

TIMES = 400
KEY = jax.random.key(7)
CASES = {}


def case(of, nominal, *settings):
    """Declares a row for each of the settings, which say how a function draws."""

    def add(function):
        for given in settings or ((),):
            CASES[f"{of} {' '.join(map(str, given))}".strip()] = nominal, function, given
        return function

    return add


@pytest.mark.parametrize("name", CASES)
def test_statements_hold_as_often_as_they_say(name):
    nominal, function, given = CASES[name]
    held = np.asarray(function(np.random.default_rng(0), *given))
    assert held.size >= TIMES
    assert held.mean() >= nominal - 2 * math.sqrt(nominal * (1 - nominal) / TIMES)


def test_no_interval_is_forgotten():
    """Each function that returns an interval has a row."""
    source = {path: path.read_text() for path in Path(wdjax.__file__).parent.rglob("*.py")}
    found = set()
    for path, text in source.items():
        for name in re.findall(r"def (\w+)\([^)]*\) -> (?:\w+\.)?ConfidenceInterval", text):
            found.add(f"{path.stem}.{name}")
    assert {"metrics.clopper_pearson", "estimate.population", "rare.interval"} <= found
    missing = {name for name in found if not any(row.startswith(name) for row in CASES)}
    assert not missing, f"no row in CASES for {sorted(missing)}"


def within(intervals, truth):
    ends = np.array([(float(low), float(high)) for low, high in intervals])
    return (ends[:, 0] <= truth) & (truth <= ends[:, 1])


# Means of bounded numbers, and counts.


@case("metrics.clopper_pearson", 0.95, (10, 0.5), (50, 0.02), (1000, 0.001), (250, 0.995))
def _(rng, n, p):
    low, high = metrics.clopper_pearson(rng.binomial(n, p, TIMES), n)
    return (low <= p) & (p <= high)


BOUNDED = {
    "rare": (lambda rng, n: 1 - (rng.random(n) < 0.02) * rng.uniform(0.5, 1, n), 1 - 0.02 * 0.75),
    "rarer": (lambda rng, n: 1 - (rng.random(n) < 0.005) * rng.uniform(0.5, 1, n), 1 - 0.00375),
    "skewed": (lambda rng, n: rng.beta(4, 1, n), 0.8),
    "coins": (lambda rng, n: rng.integers(0, 2, n).astype(float), 0.5),
    "tiny": (lambda rng, n: 1e-3 * rng.random(n), 5e-4),
    "one": (lambda rng, n: np.ones(n), 1.0),
}


@case(
    "metrics.mean_interval",
    0.95,
    *[("rare", 50), ("rarer", 250), ("rare", 1), ("skewed", 20), ("coins", 50), ("coins", 4)],
    *[("tiny", 100), ("one", 3)],
)
def _(rng, name, n):
    draw, truth = BOUNDED[name]
    return within([metrics.mean_interval(draw(rng, n)) for _ in range(TIMES)], truth)


@case("metrics.mean_interval of differences", 0.95)
def _(rng):
    """As of two distributions on the same inputs, of which few tell them apart."""
    draws = -(rng.random((TIMES, 100)) < 0.02).astype(float)
    return within([metrics.mean_interval(row, span=(-1, 1)) for row in draws], -0.02)


@case("evidence.interval", 0.95, (100, 0.97))
def _(rng, n, p):
    found = [SimpleNamespace(correct=rng.random(n) < p) for _ in range(TIMES)]
    return within(map(evidence.interval, found), p)


# Probabilistic robustness.


def counted(survived, draws):
    """``[R, n]`` counts as estimates."""
    none = np.zeros(survived.shape[1], int)
    return [Estimate(np.ones(len(none), bool), row, draws, none) for row in survived]


SHARES = {
    "one frail": np.r_[0.9, np.ones(19)],
    "one nearly safe": np.r_[1 - 5e-4, np.ones(19)],
    "all kinds": np.linspace(0.01, 0.99, 20),
}


@case("estimate.pooled", 0.95, *[(name,) for name in SHARES])
def _(rng, name):
    made = rng.binomial(50, SHARES[name], (TIMES, 20))
    return within([one.pooled() for one in counted(made, 50)], SHARES[name].mean())


@case("estimate.of_inputs", 0.95)
def _(rng):
    made = rng.binomial(100, [0.5, 0.99], (TIMES, 2))
    ends = np.array([one.of_inputs() for one in counted(made, 100)])
    return (ends[:, 0] <= [0.5, 0.99]) & (ends[:, 1] >= [0.5, 0.99])


@case("estimate.population", 0.95, (50, 0.02), (250, 0.005), (250, 0.5))
def _(rng, n, fragile):
    shares = 1 - (rng.random((TIMES, n)) < fragile) * rng.uniform(0.5, 1, (TIMES, n))
    made = rng.binomial(100, shares)
    return within([one.population() for one in counted(made, 100)], 1 - 0.75 * fragile)


@case("probable.excess", 0.95, (50, 0.02), (40, 0.3))
def _(rng, n, fragile):
    """What survives more of inputs that were trained on."""
    own, known = (
        counted(100 - 60 * (rng.random((TIMES, n)) < share), 100) for share in (fragile, 0.01)
    )
    truth = 0.6 * (fragile - 0.01)
    return within([probable.excess(*pair) for pair in zip(known, own)], truth)


PER_INPUT = {
    "one frail": np.r_[0.1, np.zeros(19)],
    "all kinds": np.geomspace(1e-5, 0.3, 20),
    "alike": np.full(20, 1e-3),
}
RATIOS = np.array([1, 3, 10, 100, 1e4, 1e6])


@case("bounded_ratio.pooled", 0.95, *[(name,) for name in PER_INPUT])
def _(rng, name):
    """At all ratios at once."""
    risks = PER_INPUT[name]
    truth = np.clip(1 - RATIOS[:, None] * risks, 0, 1).mean(axis=1)
    found = counted(rng.binomial(500, 1 - risks, (TIMES, len(risks))), 500)
    ends = np.array([nppr.bounded_ratio(one, RATIOS).pooled() for one in found])
    return np.all((ends[:, 0] <= truth) & (truth <= ends[:, 1]), axis=1)


@case("bounded_ratio.population", 0.95, (50, 0.02, 10), (250, 0.3, 3), (50, 0.3, 1000))
def _(rng, n, fragile, ratio):
    """One ratio, inputs of two kinds: most never fail, some fail in 0 to 20 % of the copies."""
    risks = (rng.random((TIMES, n)) < fragile) * rng.uniform(0, 0.2, (TIMES, n))
    edge = min(0.2, 1 / ratio)
    truth = 1 - fragile + fragile * (edge - ratio * edge**2 / 2) / 0.2
    found = counted(rng.binomial(100, 1 - risks), 100)
    ends = np.array([nppr.bounded_ratio(one, ratio).population() for one in found])
    return within(ends[..., 0], truth)


def half(w, x):
    """Loses where the first number falls below w."""
    return jnp.stack([x[:, 0] - w, w - x[:, 0]], axis=1)


def inputs(risks, eps=0.1):
    """Points that uniform noise takes across 1/2 with these probabilities, and their labels."""
    first = 0.5 + eps * (1 - 2 * np.asarray(risks, np.float32))
    return np.stack([first, np.full(len(first), 0.5)], axis=1), np.zeros(len(first), np.int32)


HALF = Model(half, jnp.asarray(0.5))
HOW = {"key": KEY, "batch_size": 1 << 16}


@case("estimate.population end to end", 0.95)
def _(rng):
    risks = np.where(rng.random(TIMES * 50) < 0.02, 0.4, 0.0)
    ball = nppr.distributions.UniformBall(0.1)
    found = nppr.estimate(HALF, ball, *inputs(risks), draws=40, **HOW)
    return within([one.population() for one in counted(found.survived.reshape(TIMES, -1), 40)],
                  1 - 0.02 * 0.4)  # fmt: skip


def decisions(rng, n):
    """Risks about .1 and far from it, and what the test says of them at alpha = .1."""
    risks = rng.choice([0.0, 0.098, 0.102, 0.4], TIMES * n)
    how = HOW | {"rho": 0.1, "alpha": 0.1, "draws": 300}
    return risks, nppr.probabilistic_accuracy(
        HALF, nppr.distributions.UniformBall(0.1), *inputs(risks), **how
    )


@case("probable.decided", 0.9)
def _(rng):
    risks, found = decisions(rng, 10)
    return ~np.where(risks <= 0.1, found.fragile[0], found.robust[0])[risks > 0]


@case("probable.population", 0.95)
def _(rng):
    _, whole = decisions(rng, 10)
    parts = [slice(first, first + 10) for first in range(0, 10 * TIMES, 10)]
    found = [
        whole._replace(correct=whole.correct[own], robust=whole.robust[:, own],
                       fragile=whole.fragile[:, own]) for own in parts
    ]  # fmt: skip
    return within([(low[0], high[0]) for low, high in (one.population() for one in found)], 0.5)


# Rare failures: normal noise of .1, so that u is the point in units of it.


def regions(params, x):
    """Fails where one of some affine functions is above 0."""
    w, b = params
    return jnp.stack([jnp.zeros(len(x)), jnp.max(x @ w - b, axis=1)], axis=1)


def ball(radius, x):
    return jnp.stack([jnp.zeros(len(x)), jnp.sum(x**2, axis=1) - radius**2], axis=1)


def planes(distances, d):
    """Half-spaces along axes, both ways along the first one, and the probability of their union."""
    w = np.eye(d)[:, np.r_[0, 0 : len(distances) - 1]]
    w[0, 1] = -1
    b = np.asarray(distances)
    both = 1 - stats.norm.sf(b[:2]).sum()
    truth = 1 - both * np.prod(stats.norm.cdf(b[2:]))
    return Model(regions, (jnp.asarray(w), jnp.asarray(0.1 * b))), truth


RARE = {
    "two sides": (*planes([4.0, 4.0], 2), 2),
    "three in 4": (*planes([4.0, 4.1, 4.2], 4), 4),
    "many": (*planes(np.full(9, 4.2), 8), 8),
    "out of a disc": (Model(ball, jnp.asarray(0.1 * stats.chi2.isf(1e-4, 2) ** 0.5)), 1e-4, 2),
}
NORMAL = nppr.distributions.ClippedGaussian(1.0, Lp(box=None), 0.1)


def asked(method, name, calls, **how):
    """Runs of a method in groups of five, in calls of their own proposals or levels."""
    model, truth, d = RARE[name]
    groups = []
    for place in range(calls):
        key = jax.random.fold_in(KEY, place)
        found = method(model, NORMAL, jnp.zeros(d), 0, key=key, runs=5 * TIMES // calls, **how)
        groups += [Rare(own, 0, 0, 0, bool(own.all())) for own in found.runs.reshape(-1, 5)]
    return within([one.interval() for one in groups], truth)


@case("rare.interval of importance", 0.95, ("two sides", 0), ("out of a disc", 0), ("many", 40))
def _(rng, name, check):
    return asked(nppr.importance, name, 20, draws=200, check=check)


@case("rare.interval of splitting", 0.95, ("two sides",), ("three in 4",))
def _(rng, name):
    return asked(nppr.splitting, name, 5, particles=50)


@case("bounded_ratio.of_inputs", 0.95, *[(10.0**-power,) for power in range(2, 8)])
def _(rng, risk):
    """A linear classifier, at all ratios at once."""
    plane = jnp.eye(2)[:, :1], jnp.full(1, 0.1 * stats.norm.isf(risk))
    truth, held = np.clip(1 - RATIOS * risk, 0, 1), []
    for place in range(20):
        key = jax.random.fold_in(KEY, place)
        found = nppr.importance(Model(regions, plane), NORMAL, jnp.zeros(2), 0, key=key,
                                draws=200, runs=5 * TIMES // 20, check=0)  # fmt: skip
        groups = [Rare(own, 0, 0, 0, bool(own.all())) for own in found.runs.reshape(-1, 5)]
        low, high = nppr.bounded_ratio(groups, RATIOS).of_inputs()
        held += list(np.all((low <= truth[:, None]) & (truth[:, None] <= high), axis=0))
    return held


# Votes.


@case("binomial.lower", 0.95, (100, 0.5), (1000, 0.999))
def _(rng, n, p):
    return binomial.lower(rng.binomial(n, p, TIMES), n, 0.05) <= p


@case("binomial.randomized_lower", 0.95, (100, 0.5), (1000, 0.999))
def _(rng, n, p):
    made = rng.binomial(n, p, 10 * TIMES)
    return binomial.randomized_lower(made, n, 0.05, rng.random(len(made))) <= p


@case("binomial.sequence_lower at any look", 0.95, (0.5,), (0.99,))
def _(rng, p):
    looks = np.unique(np.geomspace(1, 1000, 25).astype(int))
    made = np.cumsum(rng.random((TIMES, 1000)) < p, axis=1)[:, looks - 1]
    return np.all(binomial.sequence_lower(made, looks, 0.05) <= p, axis=1)


@case("binomial.sequential_lower at any look", 0.95, (0.5,), (0.99,))
def _(rng, p):
    looks = np.r_[32, 100, 300, 500]
    made = np.cumsum(rng.random((TIMES, 500)) < p, axis=1)[:, looks - 1]
    return np.all(binomial.sequential_lower(made, looks, 500, 0.05) <= p, axis=1)


@case("smoothing.decide", 0.95, (2,), (3,), (10,))
def _(rng, classes):
    """Of classes that are equally probable none is the most probable."""
    votes = np.pad(rng.multinomial(100, np.full(classes, 1 / classes), TIMES), ((0, 0), (0, 1)))
    return smoothing.decide(votes, 0.05) == smoothing.ABSTAIN


def plane(w, x):
    return jnp.stack([x @ w, -(x @ w)], axis=1)


PLANE = Model(plane, jnp.array([1.0, 0.0]))
SMOOTH = {"noise": noise.Gaussian(0.25), "key": KEY, "batch_size": 4096}


def away(distances):
    """Points at distances from the plane, of the class on that side."""
    return np.stack([distances, np.zeros(len(distances))], axis=1).astype(np.float32)


@case("smoothing.certify", 0.95, ("clopper-pearson",), ("randomized",), ("sequential",))
def _(rng, test):
    distances = rng.choice([0.02, 0.25, 0.6], TIMES)
    how = SMOOTH | {"n0": 0, "n": 200, "alpha": 0.05, "test": test, "box": None}
    how["eps"] = 0.2 if test == "sequential" else None
    found = smoothing.certify(PLANE, away(distances), np.zeros(TIMES, np.int32), **how)
    return (found.radius <= distances) & (found.lower <= stats.norm.cdf(distances / 0.25))


@case("smoothing.predict", 0.95)
def _(rng):
    found = smoothing.predict(PLANE, away(np.full(TIMES, 1e-3)), n=200, alpha=0.05, **SMOOTH)
    return found != 1


@case("protocol.accuracy", 0.95, (1.0, 0.1), (math.inf, 0.2))
def _(rng, order, eps):
    """Of samples near the budget, whose radii are wrong with probability alpha each."""
    p = stats.norm.cdf(rng.uniform(0.1, 0.4, 30) / 0.25)
    truth = certify.certified_accuracy(SMOOTH["noise"].radius(p), eps, order)
    lower = binomial.lower(rng.binomial(100, p, (TIMES, 30)), 100, 0.05)
    radii = np.where(lower > 0.5, SMOOTH["noise"].radius(lower), 0.0)
    none = np.zeros(30)
    found = [SmoothedCertificate(none, none == 0, none, row, none, none, 0.05) for row in radii]
    return [one.accuracy(eps, order) <= truth for one in found]


@case("ensembles.smoothed", 0.95)
def _(rng):
    """A point that is said to have fallen is on the other side."""
    x = away(rng.uniform(0.05, 0.3, TIMES))
    how = SMOOTH | {"votes": 100, "alpha": 0.05, "count": 64, "stretch": (1.0, 1.2, 2.0)}
    attack = attacks.DDN(Lp(2, None), steps=10)
    found = ensembles.smoothed(attack, PLANE, x, np.zeros(TIMES, np.int32), **how)
    fallen = np.asarray(found.success)
    assert fallen.mean() > 0.05
    return ~fallen | (np.asarray(found.x_adv)[:, 0] < 0)


# Games.


@case("referee.share", 0.95, (1, 50, 0.02, 0.0), (3, 50, 0.02, 0.0), (3, 200, 0.3, 0.1),
      (10, 100, 0.3, 0.1))  # fmt: skip
def _(rng, draws, n, lost, between):
    """Of samples that a key loses alike or apart, where keys differ normally."""
    risk = np.clip(lost + between * rng.normal(size=(TIMES, draws, 1)), 0, 1)
    frail = rng.random((TIMES, 1, n))
    facts = np.where(rng.random((TIMES, 1, n)) < 0.5, frail, rng.random((TIMES, draws, n))) >= risk
    truth = 1 - lost if not between else 1 - np.clip(lost + between * rng.normal(size=10**6), 0, 1)
    return within([share_with_interval(one)[1:] for one in facts], np.mean(truth))


@case("referee.share under these keys", 0.95, (3, 60))
def _(rng, draws, n):
    """One key under which the defence falls is no matter of chance once it is drawn."""
    risk = np.array([0.01, 0.01, 0.5])[:, None]
    facts = rng.random((TIMES, draws, n)) >= risk
    return within([share_with_interval(one)[1:] for one in facts], 1 - risk.mean())
