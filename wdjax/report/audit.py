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
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from wdjax import distinct, identity, losses, metrics, parallel, transport
from wdjax.attacks import PGD, WDA, WDAPlusPlus
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.checks.forward_mode import SEARCH_TWIN, host_only
from wdjax.core import Array, Attack, Classifier, Found, Result, Samples, Victim
from wdjax.engine import driver, track
from wdjax.engine.tasks import Done, Task, Tasks
from wdjax.precision import full_precision
from wdjax.report import proved
from wdjax.report.audited import Audit, page
from wdjax.report.evidence import ORDERS, Entry, Numbers, Sandwich, ball_name, invariants
from wdjax.report.proved import (
    BATCH,
    Certifier,
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

_MISSED = "it needs all samples, and parts are missing"


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


def standard_attacks(ball: Lp, eps_list: Sequence[float] | Numbers) -> dict[str, Attempt]:
    """The default attacks of an audit.

    Args:
      ball: norm and box.
      eps_list: the budgets; a step of WDA++ is a quarter of the largest.

    >>> list(standard_attacks(Lp(2), [0.5]))
    ['pgd', 'wda kappa=1', 'wda kappa=2', 'wda++']
    """
    walk = _WALK * max(float(max(eps_list)), 1e-6)
    return {
        "pgd": Attempt(PGD(ball, random_start=True), skip_misclassified=False),
        "wda kappa=1": Attempt(WDA(ball), kappa=1.0),
        "wda kappa=2": Attempt(WDA(ball), orders=(2, 1), kappa=2.0),
        "wda++": Attempt(WDAPlusPlus(ball, step_size=walk), orders=(2, 1)),
    }


@full_precision
def sandwich(
    model: Classifier,
    x: Array | np.ndarray,
    y: Array | np.ndarray,
    *,
    eps_list: Sequence[float],
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
      eps_list: increasing budgets, in the units of ``x``.
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
      ValueError: bad samples or budgets, an attack of another ball, a certificate that does not
        return ``[n]`` numbers of at least 0, a checkpoint of another audit.

    Cost: for every attack one search per radius and order, but one in all for a minimum-norm
      attack;
    that of the certificates; per attack, radius and order one forward pass and one exact transport.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jax.numpy.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jax.numpy.array([[0.625, 0.375], [0.875, 0.125]]), jax.numpy.array([0, 0])
    >>> found = sandwich(model, x, y, eps_list=[0.0625, 0.25], key=jax.random.key(0))
    >>> found.attacked(math.inf).tolist(), found.certified(math.inf).tolist()
    ([1.0, 0.5], [1.0, 0.5])
    >>> found.passed
    True
    """
    arguments.check("key", model=model, x=x, y=y, key=key, ball=ball)
    host_only("an audit", SEARCH_TWIN, model, x, y, eps_list, key)
    budgets = check_eps_list(eps_list)
    if checkpoint is not None and parallel.spans(mesh):
        raise ValueError("an audit over many processes keeps no checkpoint; leave it out.")
    arguments.warn(arguments.too_far(ball, np.shape(x)[1:], budgets))
    x, y = validate.check_samples(model, x, y, ball.box)
    if batch_size is not None:
        batch_size = validate.check_count("batch_size", batch_size)
    attempts = filled(standard_attacks(ball, budgets) if attacks is None else attacks, ball)
    setting = Setting(model, x, y, ball, budgets, key, batch_size, mesh)
    mark = b"" if checkpoint is None else _identity(setting, attempts)
    about = {"ball": ball, "eps_list": budgets.tolist(), "attacks": [*attempts], "samples": len(y)}
    work = Alone(Tasks(checkpoint, every=every, identity=mark, about=about), len(y))
    found = measured(setting, attempts, work, progress, certificates, loss_bounds)
    assert found is not None
    return found


class AuditWork(Protocol):
    """Where the tasks of an audit are done: here, or by parts of the samples that are merged."""

    @property
    def split(self) -> bool:
        """Whether there are parts, so that what concerns all samples is done after the merge."""

    @property
    def part(self) -> bool:
        """Whether this is one of them."""

    def rows(self, name: str, work: Callable[[np.ndarray, Task], Any]) -> Done[Any]:
        """A task on every sample alone: ``(rows, task) -> result`` of the samples ``rows``."""

    def whole(
        self, name: str, work: Callable[[Task], Any], *, labels_only: bool = False
    ) -> Done[Any] | None:
        """A task on all samples, or on their labels; None in parts that do not do it."""

    def after(self, name: str, work: Callable[[Task], Any], *types: type) -> Done[Any]:
        """A task on what others returned; in no part."""


class Alone(NamedTuple):
    """All tasks of an audit of ``n`` samples, done here."""

    tasks: Tasks
    n: int
    split: bool = False
    part: bool = False

    def rows(self, name: str, work: Callable[[np.ndarray, Task], Any]) -> Done[Any]:
        return self.tasks.do(name, functools.partial(work, np.arange(self.n)), Found, Refused)

    def whole(
        self, name: str, work: Callable[[Task], Any], *, labels_only: bool = False
    ) -> Done[Any]:
        return self.tasks.do(name, work, Refused)

    def after(self, name: str, work: Callable[[Task], Any], *types: type) -> Done[Any]:
        return self.tasks.do(name, work, *types)


def measured(
    setting: Setting,
    attempts: Mapping[str, Attempt],
    work: AuditWork,
    progress: Callable[[Step], Any],
    certificates: Mapping[str, Certifier] | None = None,
    loss_bounds: Mapping[str, LossBound] | None = None,
) -> Sandwich | None:
    """What :func:`sandwich` returns, for checked arguments; None in a part of it.

    Samples are attacked and certified by rows. What their points cost together, the spending of
    budgets and every bound and invariant need them all.
    """
    # Functions given by the caller have no identity, so their results are never read back.
    anew = Alone(Tasks(None), len(setting.y))
    usual = standard_certificates(setting.ball, setting.batch_size, setting.mesh)
    radius = usual if certificates is None else certificates
    constant = functools.partial(proved.constant, setting)
    least = None
    if loss_bounds is None:
        given = "Lipschitz constant", proved.or_refused(constant)
        done = work.whole(*given, labels_only=True)
        least = Refused(_MISSED) if done is None else done.value
    standard = {} if least is None else {proved.LIPSCHITZ: proved.by_lipschitz(setting, least)}
    bounds = standard if loss_bounds is None else loss_bounds

    def tried(given: Any, job: Callable[..., Any]) -> tuple[AuditWork, Callable[..., Any]]:
        return (work, proved.or_refused(job)) if given is None else (anew, job)

    def certified(job: Callable[..., Any], label: str) -> Any:
        where, job = tried(certificates, job)
        return where.rows(label, job).value

    def bounded(job: Callable[..., Any], label: str) -> Any:
        where, job = tried(loss_bounds, job)
        return None if work.part else where.after(label, job, Refused).value

    clean = functools.cache(functools.partial(_evaluate, setting, setting.x))
    tries = [j for name, one in attempts.items() for j in _tries(setting, clean, work, name, one)]
    jobs: list[tuple[str, Callable[[str], Any]]] = [
        *tries,
        *((s, functools.partial(certified, j)) for s, j in proved.radii_jobs(setting, radius)),
        *((s, functools.partial(bounded, j)) for s, j in proved.loss_jobs(setting, bounds)),
    ]
    values = []
    for number, (words, job) in enumerate(jobs):
        progress(Step(words, number, len(jobs)))
        values.append(job(f"{number} {words}"))
    if work.part:
        return None
    value = iter(values)
    found = Sandwich(
        ball=setting.ball,
        eps_list=setting.eps_list,
        correct=clean().correct,
        clean_loss=float(np.mean(clean().loss)),
        entries=tuple(next(value) for _ in tries),
        certificates={name: next(value) for name in radius},
        loss_bounds={name: {order: next(value) for order in ORDERS} for name in bounds},
        lipschitz=None if isinstance(least, Refused) else least,
        attacks={name: attempt.attack for name, attempt in attempts.items()},
        invariants=(),
    )
    found = proved.without_refused(found)
    return found._replace(invariants=tuple(invariants(found)))


@full_precision
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
      ValueError: bad samples or budgets, outputs that are not finite, a batch-dependent model, an
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
      Omega_2   <=    0.751    0.112
      Omega_2   >=    0.749    0.111
      Omega_1   <=    0.501    0.001
      Omega_1   >=    0.499    0.000
    all 11 checks hold: no attack crosses a certificate
    """
    arguments.check(model=model, x=x, y=y)
    began = time.perf_counter()
    found = sandwich(
        model,
        x,
        y,
        eps_list=eps_list,
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


def check_eps_list(eps_list: Sequence[float]) -> Numbers:
    """``[m]`` budgets as an array; raises unless they are finite, at least 0 and increasing."""
    budgets = np.asarray(eps_list, float)
    if budgets.ndim != 1 or not budgets.size or not np.all(np.isfinite(budgets)):
        raise ValueError(f"eps_list must increase from at least 0, got {budgets.tolist()}.")
    if np.any(np.diff(budgets) <= 0) or budgets[0] < 0:
        raise ValueError(f"eps_list must increase from at least 0, got {budgets.tolist()}.")
    return budgets


def filled(attacks: Mapping[str, Attempt | Attack], ball: Lp) -> dict[str, Attempt]:
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
    """The identity of an audit's checkpoint: attacks, default certificates, samples, budgets."""
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
    fixed = model, x, y, ball, setting.eps_list, setting.key
    return identity.digest([*attempts], traced, lengths, [*attempts.values()], *fixed)


class _Evaluation(NamedTuple):
    """Loss and correctness, ``[n]`` leaves on the host."""

    loss: Numbers
    correct: npt.NDArray[np.bool_]


@distinct.jit
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
    setting: Setting,
    clean: Callable[[], _Evaluation],
    work: AuditWork,
    name: str,
    attempt: Attempt,
) -> Iterator[tuple[str, Callable[[str], Entry | None]]]:
    """Jobs of one attack, for every order and radius, in words and as functions of their labels.

    A job's result is an :class:`Entry`, with ``[n]`` leaves on the host, or None in a part. A
    minimum-norm attack searches once, and every job spends its points at another order and radius.
    """
    attack, kappa = attempt.attack, attempt.kappa
    walks = attack.budget == "none"
    how: dict[str, Any] = {
        "key": setting.key,
        "batch_size": setting.batch_size,
        "mesh": setting.mesh,
    }

    def search(eps: float | None, rows: np.ndarray, task: Task) -> Found:
        options = how | task.saving() | {"callback": task.heard(lambda progress: None)}
        options |= {"skip_misclassified": attempt.skip_misclassified, "diagnose": not work.split}
        x, y = setting.take(rows)
        found = driver.search(attack, setting.model, x, y, eps=eps, index=rows, **options)
        return jax.device_get(found)

    def searched(label: str, eps: float | None) -> Found:
        found = work.rows(label, functools.partial(search, eps)).value
        if work.split and not work.part:  # The second look is at survivors of all parts.
            return driver.looked_again(
                found, attack, setting.model, setting.x, setting.y, eps=eps, **how
            )
        return found

    walked = functools.cache(lambda: searched(f"{name}, distances", None))
    moved = functools.cache(lambda: _evaluate(setting, walked().x_adv))

    def attempted(order: float, eps: float, label: str) -> Entry | None:
        reach = eps if attack.budget == "data" else eps * (kappa or 1.0) ** (1 / order)
        found = walked() if walks else searched(f"{label}, points", reach)

        def spent(task: Task) -> Entry:
            result = jax.device_get(transport.spend(found, eps=eps, order=order, kappa=kappa))
            there = moved() if walks else _evaluate(setting, found.x_adv)
            numbers = _measure(setting, clean(), there, order, result)
            return Entry(name, order, eps, kappa, result=result, **numbers)

        return None if work.part else work.after(label, spent, Entry, Result).value

    for order in attempt.orders or ():
        for eps in setting.eps_list.tolist():
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
