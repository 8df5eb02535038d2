r"""The sandwich: lower bounds by certificates, upper bounds by attacks, and checks that they agree.

    certified(eps)  <=  true robust accuracy in the ball of radius eps  <=  attacked(eps)

for the point-wise ball (Omega_inf) and the Wasserstein balls Omega_2 and Omega_1, which contain it;
and the same for the expected loss, with attacks as lower and certificates as upper bounds.

Attacks, certificates and loss bounds are given as dictionaries, whose keys name them in all
results.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from wdjax import losses, metrics, parallel, transport
from wdjax.attacks import PGD, WDA, WDAPlusPlus
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import SEARCH_TWIN, host_only
from wdjax.core import Array, Attack, Classifier, Found, Result, Samples, Victim
from wdjax.engine import driver, identity, track
from wdjax.engine.tasks import Task, Tasks
from wdjax.report import proofs
from wdjax.report.audited import Audit, page
from wdjax.report.evidence import ORDERS, Entry, Numbers, Sandwich, ball_name, invariants
from wdjax.report.proofs import (
    BATCH,
    Certifier,
    Job,
    LossBound,
    Refused,
    Setting,
    standard_certificates,
)

__all__ = [
    "Attempt",
    "Audit",
    "Certifier",
    "LossBound",
    "Step",
    "of",
    "page",
    "sandwich",
    "standard_attacks",
    "standard_certificates",
]

_OWN_ORDERS = {"sample": (math.inf,), "data": (1,), "none": ORDERS}
"""Default orders for an attack's points by its budget: every ball lies in that of order 1."""

_WALK = 0.25
"""WDA++'s step as a share of the largest budget; its twenty steps reach five times the budget."""

_PIXELS = Lp()


class Attempt(NamedTuple):
    """An attack, and the Wasserstein balls in which its points are spent.

    A minimum-norm attack (``budget == "none"``) searches once; the knapsack spends its points at
    every order and radius. Any other attack searches once for each order and radius.
    """

    attack: Attack
    orders: tuple[float, ...] | None = None
    """Orders of the balls; by default inf for a point-wise attack, 1 for one whose budget binds the
    data set, and all of :data:`ORDERS` for a minimum-norm attack."""
    kappa: float | None = None
    """As for :func:`wdjax.run`; None for minimum-norm attacks."""
    skip_misclassified: bool = True
    """With False misclassified samples are attacked too, which raises the loss."""


class Step(NamedTuple):
    """A step that an audit is about to take, for a progress bar."""

    words: str
    number: int
    """Starting at 0."""
    total: int


def standard_attacks(ball: Lp, radii: Sequence[float] | Numbers) -> dict[str, Attempt]:
    """The default attacks of an audit.

    Args:
      ball: norm and box.
      radii: the budgets; a step of WDA++ is a quarter of the largest.

    >>> list(standard_attacks(Lp(2), [0.5]))
    ['pgd', 'wda kappa=1', 'wda kappa=2', 'wda++']
    """
    walk = _WALK * max(float(max(radii)), 1e-6)
    return {
        "pgd": Attempt(PGD(ball, random_start=True), skip_misclassified=False),
        "wda kappa=1": Attempt(WDA(ball), kappa=1.0),
        "wda kappa=2": Attempt(WDA(ball), orders=(2, 1), kappa=2.0),
        "wda++": Attempt(WDAPlusPlus(ball, step_size=walk), orders=(2, 1)),
    }


def sandwich(
    model: Classifier,
    x: Array | np.ndarray,
    y: Array | np.ndarray,
    *,
    radii: Sequence[float],
    ball: Lp = _PIXELS,
    attacks: Mapping[str, Attempt | Attack] | None = None,
    certificates: Mapping[str, Certifier] | None = None,
    loss_bounds: Mapping[str, LossBound] | None = None,
    key: Array,
    batch_size: int | None = None,
    progress: Callable[[Step], Any] = lambda step: None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
    mesh: Mesh | None = None,
) -> Sandwich:
    r"""Measures lower and upper bounds of a model's robustness over a range of budgets.

    Args:
      model: ``[n, *shape] -> [n, K]``; the default certificates need a continuous one of primitives
        that :mod:`wdjax.certify` knows.
      x: ``[n, *shape]`` floats in the ball's box.
      y: ``[n]`` integer labels.
      radii: increasing budgets, in the units of ``x``.
      ball: norm (the ground norm r) and box.
      attacks: by name an :class:`Attempt` or an attack, all with this ball; by default
        :func:`standard_attacks`.
      certificates: by name a :class:`Certifier`; by default :func:`standard_certificates`.
      loss_bounds: by name a :class:`LossBound`; by default :func:`wdjax.certify.wdro_bound` with
        its Lipschitz constant.
      key: a typed ``jax.random.key`` for random attacks.
      batch_size: samples on all devices at once.
      progress: called with a :class:`Step` before every step.
      checkpoint: a folder; an audit that was interrupted resumes from it, with equal results.
      every: minimum number of seconds between two writings of a search in progress.
      mesh: a mesh from :func:`wdjax.parallel.data_mesh`; batches of the attacks and the default
        certificates are split over it.

    Returns:
      A :class:`Sandwich`. A violated invariant raises nothing: check ``passed``. One invariant is
      that no attack met an output or a gradient that was not finite.

    Raises:
      ValueError: bad samples or radii, an attack of another ball, a certificate that does not
        return ``[n]`` numbers of at least 0, a checkpoint of another audit.

    Cost: for every attack one search per radius and order, but one in all for a minimum-norm
      attack;
    that of the certificates; per attack, radius and order one forward pass and one exact transport.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jax.numpy.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jax.numpy.array([[0.625, 0.375], [0.875, 0.125]]), jax.numpy.array([0, 0])
    >>> found = sandwich(model, x, y, radii=[0.0625, 0.25], key=jax.random.key(0))
    >>> found.attacked(math.inf).tolist(), found.certified(math.inf).tolist()
    ([1.0, 0.5], [1.0, 0.5])
    >>> found.passed
    True
    """
    arguments.check("key", model=model, x=x, y=y, key=key)
    host_only("an audit", SEARCH_TWIN, model, x, y, radii, key)
    budgets = _check_radii(radii)
    if checkpoint is not None and parallel.spans(mesh):
        raise ValueError("an audit over many processes keeps no checkpoint; leave it out.")
    arguments.warn(arguments.too_far(ball, np.shape(x)[1:], budgets))
    x, y = validate.check_samples(model, x, y, ball.box)
    if batch_size is not None:
        batch_size = validate.check_count("batch_size", batch_size)
    attempts = _attempts(standard_attacks(ball, budgets) if attacks is None else attacks, ball)
    setting = Setting(model, x, y, ball, budgets, key, batch_size, mesh)
    mark = b"" if checkpoint is None else _identity(setting, attempts)
    about = {"ball": ball, "radii": budgets.tolist(), "attacks": [*attempts], "samples": len(y)}
    work, anew = Tasks(checkpoint, every=every, identity=mark, about=about), Tasks(None)

    @functools.cache
    def constant() -> float | Refused:
        found = proofs.or_refused(functools.partial(proofs.constant, setting))
        return work.do("Lipschitz constant", found, Refused).value

    usual = standard_certificates(ball, batch_size, mesh)
    radius = usual if certificates is None else certificates
    standard = {proofs.LIPSCHITZ: proofs.by_lipschitz(setting, constant)}
    bounds = standard if loss_bounds is None else loss_bounds

    def proved(given: Any, jobs: Iterator[Job]) -> list[_Task]:
        # Functions given by the caller have no identity, so their results are never read back.
        if given is not None:
            return [(anew, *job) for job in jobs]
        return [(work, words, proofs.or_refused(job)) for words, job in jobs]

    clean = _evaluate(setting, x)
    tries: list[_Task] = [
        (work, *job)
        for name, attempt in attempts.items()
        for job in _tries(setting, clean, work, name, attempt)
    ]
    certified = proved(certificates, proofs.radii_jobs(setting, radius))
    bounded = proved(loss_bounds, proofs.loss_jobs(setting, bounds))
    least = constant() if loss_bounds is None else None
    done = _carry([*tries, *certified, *bounded], progress)
    found = Sandwich(
        ball=ball,
        radii=budgets,
        correct=clean.correct,
        clean_loss=float(np.mean(clean.loss)),
        entries=tuple(next(done) for _ in tries),
        certificates={name: next(done) for name in radius},
        loss_bounds={name: {order: next(done) for order in ORDERS} for name in bounds},
        lipschitz=None if isinstance(least, Refused) else least,
        attacks={name: attempt.attack for name, attempt in attempts.items()},
        invariants=(),
    )
    found = proofs.without_refused(found)
    return found._replace(invariants=tuple(invariants(found)))


def of(
    model: Classifier,
    x: Array | np.ndarray,
    y: Array | np.ndarray,
    *,
    eps_list: Sequence[float],
    norm: float = math.inf,
    box: tuple[float, float] | None = (0.0, 1.0),
    key: Array | None = None,
    name: str = "model",
    attacks: Mapping[str, Attempt | Attack] | None = None,
    certificates: Mapping[str, Certifier] | None = None,
    batch_size: int | None = None,
    progress: Callable[[Step], Any] = lambda step: None,
    checkpoint: str | PathLike[str] | None = None,
    every: float = 60.0,
    mesh: Mesh | None = None,
) -> Audit:
    """Audits a model: clean accuracy, what attacks leave, what certificates prove, and remarks.

    Args:
      model: a callable pytree, ``[n, *shape] -> [n, K]`` logits. A certificate that has no rule for
        a primitive of its program is left out, and the audit says which.
      x: ``[n, *shape]`` floats in ``box``.
      y: ``[n]`` integer labels.
      eps_list: budgets in the units of ``x``, increasing from at least 0.
      norm: of a move, one of 1, 2 and ``jax.numpy.inf``.
      box: ends of every coordinate; None for none.
      key: a typed ``jax.random.key`` for random attacks; by default ``jax.random.key(0)``.
      name: what the page calls the model.
      attacks: by name, with this norm and box; by default :func:`standard_attacks`.
      certificates: by name; by default :func:`standard_certificates`.
      batch_size: samples on all devices at once.
      progress: called with a :class:`Step` before every step.
      checkpoint: a folder; an audit that was interrupted resumes from it, with equal results.
      every: minimum number of seconds between two writings of a search in progress.
      mesh: as for :func:`sandwich`.

    Returns:
      An :class:`Audit`: ``print`` it, ``save`` its page, or take its ``sandwich``. If a statement
      that must hold is broken, ``passed`` is False.

    Raises:
      ValueError: bad samples or radii, outputs that are not finite, a batch-dependent model, an
        attack of another norm or box, or a checkpoint of another audit.

    Cost: that of :func:`sandwich`.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jax.numpy.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jax.numpy.array([[0.625, 0.375], [0.875, 0.125]]), jax.numpy.array([0, 0])
    >>> found = of(model, x, y, eps_list=[0.0625, 0.25])
    >>> print(found)
    model: clean accuracy 1.000 of 2 samples
      eps (linf)    0.0625     0.25
      Omega_inf <=    1.000    0.500
      Omega_inf >=    1.000    0.500
      Omega_2   <=    0.750    0.111
      Omega_2   >=    0.750    0.111
      Omega_1   <=    0.500    0.000
      Omega_1   >=    0.500    0.000
    all invariants hold
    """
    began = time.perf_counter()
    found = sandwich(
        model,
        x,
        y,
        radii=eps_list,
        ball=Lp(norm, box),
        attacks=attacks,
        certificates=certificates,
        key=jax.random.key(0) if key is None else key,
        batch_size=batch_size,
        progress=progress,
        checkpoint=checkpoint,
        every=every,
        mesh=mesh,
    )
    seconds = time.perf_counter() - began
    return Audit(name, found, model, np.asarray(x), np.asarray(y), seconds)


_Task = tuple[Tasks, str, Callable[[Task], Any]]
"""Where a job's result is kept, the job's description, and the job."""


def _carry(jobs: list[_Task], progress: Callable[[Step], Any]) -> Iterator[Any]:
    """Does the jobs in order, after a call of ``progress`` for each."""
    for number, (tasks, words, job) in enumerate(jobs):
        progress(Step(words, number, len(jobs)))
        yield tasks.do(f"{number} {words}", job, Entry, Result, Refused).value


def _check_radii(radii: Sequence[float]) -> Numbers:
    """``[m]`` radii as an array; raises unless they are finite, at least 0 and increasing."""
    budgets = np.asarray(radii, float)
    if budgets.ndim != 1 or not budgets.size or not np.all(np.isfinite(budgets)):
        raise ValueError(f"radii must increase from at least 0, got {budgets.tolist()}.")
    if np.any(np.diff(budgets) <= 0) or budgets[0] < 0:
        raise ValueError(f"radii must increase from at least 0, got {budgets.tolist()}.")
    return budgets


def _attempts(attacks: Mapping[str, Attempt | Attack], ball: Lp) -> dict[str, Attempt]:
    """Every attack as an :class:`Attempt` with its orders and kappa filled in.

    Raises for an attack in another ball than the audit's, and for a minimum-norm attack with kappa.
    """
    attempts = {}
    for name, given in attacks.items():
        attempt = given if isinstance(given, Attempt) else Attempt(given)
        attack, orders = attempt.attack, attempt.orders
        arguments.check(attack=attack)
        if attack.ball != ball:
            raise ValueError(
                f"{name!r} moves within {attack.ball!r}, but this audit uses {ball!r}: pass "
                "both the same ball."
            )
        if attack.budget == "none" and attempt.kappa is not None:
            raise ValueError(
                f"{name!r} is a minimum-norm attack, whose budget the knapsack spends: leave out "
                f"kappa={attempt.kappa!r}."
            )
        kappa = attempt.kappa
        if attack.budget != "none":
            kappa = validate.check_number("kappa", 1.0 if kappa is None else kappa, 1.0)
        orders = _OWN_ORDERS[attack.budget] if orders is None else orders
        orders = tuple(map(validate.check_order, orders))
        attempts[name] = attempt._replace(orders=orders, kappa=kappa)
    return attempts


def _identity(setting: Setting, attempts: Mapping[str, Attempt]) -> bytes:
    """The identity of an audit's checkpoint: attacks, default certificates, samples, radii."""
    model, x, y = setting.model, setting.x, setting.y
    victim = Victim(model, jax.tree_util.Partial(losses.decision_margin))
    samples = Samples(x, y, jnp.zeros(len(y), x.dtype), None)
    tried = [one.attack for one in attempts.values()]
    traced = [
        track.programs(attack, victim, samples, None, setting.key if attack.random else None)
        for attack in tried
    ]
    lengths = [[stage.length for stage in attack.stages] for attack in tried]
    ball = setting.ball.norm, setting.ball.box
    fixed = model, x, y, ball, setting.radii, setting.key
    return identity.digest([*attempts], traced, lengths, [*attempts.values()], *fixed)


class _Evaluation(NamedTuple):
    """Loss and correctness, ``[n]`` leaves on the host."""

    loss: Numbers
    correct: npt.NDArray[np.bool_]


@jax.jit
def _judge(model: Classifier, x: Array, y: Array) -> tuple[Array, Array]:
    """Cross-entropy and correctness of points, ``[n]`` each."""
    logits = model(x)
    return losses.cross_entropy(logits, y), metrics.correct(logits, y)


def _evaluate(setting: Setting, points: Array | np.ndarray) -> _Evaluation:
    """Cross-entropy and correctness at ``points`` ``[n, *shape]``, in batches of one shape."""
    n = len(setting.y)
    size = min(n, setting.batch_size or BATCH)
    index = np.minimum(np.arange(-(-n // size) * size), n - 1).reshape(-1, size)
    parts = [jax.device_get(_judge(setting.model, points[i], setting.y[i])) for i in index]
    loss, correct = (np.concatenate(leaves)[:n] for leaves in zip(*parts))
    return _Evaluation(loss.astype(float), correct)


def _tries(
    setting: Setting, clean: _Evaluation, work: Tasks, name: str, attempt: Attempt
) -> Iterator[Job]:
    """Jobs of one attack, for every order and radius; a minimum-norm attack searches only once.

    A job's result is an :class:`Entry`, with ``[n]`` leaves on the host. A minimum-norm attack
    searches once, in the first job, and every job spends its points at another order and radius.
    """
    attacked = (attempt.attack, setting.model, setting.x, setting.y)
    options: dict[str, Any] = {
        "skip_misclassified": attempt.skip_misclassified,
        "key": setting.key,
        "batch_size": setting.batch_size,
        "mesh": setting.mesh,
    }

    def search(task: Task) -> Found:
        kept = options | task.saving()
        return jax.device_get(driver.search(*attacked, **kept))

    @functools.cache
    def walked() -> tuple[Found, _Evaluation]:
        found = work.do(f"{name}, distances", search, Found).value
        return found, _evaluate(setting, found.x_adv)

    def attempted(order: float, eps: float, task: Task) -> Entry:
        if attempt.attack.budget == "none":
            found, moved = walked()
            result = transport.spend(found, eps=eps, order=order)
        else:
            how = {"eps": eps, "order": order, "kappa": attempt.kappa, **options, **task.saving()}
            result = driver.run(*attacked, **how)
            moved = _evaluate(setting, result.x_adv)
        result = jax.device_get(result)
        numbers = _measure(setting, clean, moved, order, result)
        return Entry(name, order, eps, attempt.kappa, result=result, **numbers)

    for order in attempt.orders or ():
        for eps in setting.radii.tolist():
            words = f"{name}, {ball_name(order)}, eps {eps:g}"
            yield words, functools.partial(attempted, order, eps)


def accuracy(result: Result) -> float:
    """``result.accuracy`` in float64, so that it is the same float on every machine."""
    weight = np.asarray(result.weight, float)
    return _mean(weight, np.asarray(result.correct), ~np.asarray(result.success))


def _mean(weight: Numbers, stay: np.ndarray, go: np.ndarray) -> float:
    """The mean over samples of ``(1 - weight) stay + weight go``; all are ``[n]``."""
    return float(np.mean((1 - weight) * stay + weight * go))


def _measure(
    setting: Setting, clean: _Evaluation, moved: _Evaluation, order: float, result: Result
) -> dict[str, float]:
    """Accuracy, mean loss and Wasserstein distance of an attack's adversarial distribution.

    ``clean`` and ``moved`` are the evaluations at the samples and at the points, ``result`` has the
    points and the mass that each moves. Returns, in float64, ``accuracy`` by the attack's own
    flags, ``recomputed`` by the evaluations, the mean ``loss``, and ``spent``: the exact W_p, p =
    ``order``, between the adversarial distribution and the data, from an optimal transport plan.
    """
    weight = np.asarray(result.weight, float)
    found = transport.AdversarialDistribution.from_result(setting.x, setting.y, result)
    return {
        "accuracy": accuracy(result),
        "recomputed": _mean(weight, clean.correct, moved.correct),
        "loss": _mean(weight, clean.loss, moved.loss),
        "spent": transport.wasserstein(found, setting.ball.norm, order),
    }
