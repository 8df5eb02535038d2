"""The contract of attacks, as a function that checks any attack.

:func:`check_attack` checks its clauses one by one, on a small net. A clause is a function here that
asserts the statement in its docstring, which an error then quotes.
"""

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from wdjax import distinct, parallel
from wdjax.checks import arguments
from wdjax.core import Array, Attack, Model, Progress, Result, Samples, Victim
from wdjax.engine import driver
from wdjax.losses import decision_margin
from wdjax.precision import full_precision

_CLOSE = 2e-5
"""Tolerance between two programs of the same attack, in units of the box."""
_RADII = {0: 3.0, 1: 0.6, 2: 0.25, math.inf: 0.06}
"""Default budgets by norm, in widths of the box: they break some samples but not all."""


def _apply(params: dict[str, Array], x: Array) -> Array:
    """The test net's logits ``[n, classes]``: one hidden layer with tanh."""
    hidden = jnp.tanh(x.reshape(len(x), -1) @ params["w1"] + params["b1"])
    return hidden @ params["w2"]


def _net(size: int, classes: int) -> Model:
    """A smooth net with one hidden layer."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": jax.random.normal(keys[0], (size, 16)),
        "b1": 0.3 * jax.random.normal(keys[1], (16,)),
        "w2": jax.random.normal(keys[2], (16, classes)),
    }
    return Model(_apply, params)


@dataclasses.dataclass(frozen=True)
class Case:
    """An attack with the model, samples and budget of its checks."""

    attack: Attack
    model: Model
    x: Array
    y: Array
    eps: float
    key: Array
    spending: dict[str, Any]
    """``order`` and ``kappa`` of :func:`wdjax.run`."""

    def run(self, **changes: Any) -> Result:
        """Runs the attack; ``changes`` replace model, samples, budget or key, or are options."""
        model, x, y = (changes.pop(name, getattr(self, name)) for name in ("model", "x", "y"))
        how: dict[str, Any] = (
            {"eps": self.eps, "key": self.key, "diagnose": False} | self.spending | changes
        )
        return driver.run(self.attack, model, x, y, **how)

    @property
    def radius(self) -> float:
        """The radius within which :meth:`run` searches."""
        kappa, order = self.spending.get("kappa") or 1.0, self.spending.get("order", 1)
        return self.eps * kappa ** (1 / order) if self.attack.budget == "sample" else self.eps


def _close(one: Result, other: Result) -> None:
    """Asserts equal decisions in two results, and points, weights and costs that are close."""
    for name in ("success", "correct"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
    for name, tolerance in (("x_adv", _CLOSE), ("weight", 10 * _CLOSE), ("cost", 10 * _CLOSE)):
        np.testing.assert_allclose(
            getattr(one, name), getattr(other, name), atol=tolerance, err_msg=name
        )


def _protocol(case: Case) -> None:
    """A frozen pytree with all members; its state is a pytree of arrays with a row a sample."""
    arguments.check(attack=case.attack)
    hash(jax.tree.structure(case.attack))
    _, samples, state = _begun(case, case.key)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path) or "the state"
        assert isinstance(leaf, jax.Array), f"{name} is {arguments.described(leaf)}, not an array"
        assert leaf.shape[:1] == (len(samples.y),), f"{name} has shape {leaf.shape}: a row a sample"


def _begun(case: Case, key: Array) -> tuple[Victim, Samples, Any]:
    """The victim, its samples and the attack's first state, computed without the search engine.

    All keys and radii are those that a search of ``case`` with this ``key`` would use.
    """
    victim = Victim(case.model, decision_margin)
    radii = jnp.full(len(case.y), case.radius, case.x.dtype)
    samples = Samples(case.x, case.y.astype(jnp.int32), radii, case.model(case.x))
    keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(len(case.y)))
    state = case.attack.init(victim, samples, None, keys if case.attack.random else None)
    return victim, samples, state


def _walked(case: Case, key: Array) -> tuple[Samples, list[Any]]:
    """The samples, and the states of a search with this ``key``: the first three and the last.

    Every stage takes all its steps on all samples, without the search engine.
    """
    victim, samples, state = _begun(case, key)
    states, everyone = [state], jnp.ones(len(case.y), bool)
    for stage in case.attack.stages:

        @distinct.jit
        def step(state: Any, stage: Any = stage) -> Any:
            moved, _ = stage.step(victim, samples, state)
            return moved if stage.couple is None else stage.couple(samples, moved, everyone)

        for _ in range(stage.length):
            state = step(state)
            if len(states) < 3:
                states.append(state)
    return samples, [*states, state]


def _ball(case: Case) -> None:
    """The attack's own points are finite, in the box and within its budget."""
    samples, states = _walked(case, case.key)
    points, proof = case.attack.point(samples, states[-1])
    assert points.shape == case.x.shape, f"points have shape {points.shape}, not {case.x.shape}"
    assert points.dtype == case.x.dtype, f"points are {points.dtype}, not {case.x.dtype}"
    bad = int(np.sum(~np.isfinite(points).reshape(len(points), -1).all(axis=1)))
    assert not bad, f"{bad} of {len(points)} points are not finite"
    cost = np.asarray(case.attack.ball.cost(case.x, points, proof), float)
    assert np.isfinite(cost).all(), f"{np.sum(~np.isfinite(cost))} points are outside the box"
    if case.attack.budget == "sample":
        worst = float(cost.max())
        assert worst <= case.radius * (1 + 1e-4), (
            f"a point is {worst:g} away, in a ball of radius {case.radius:g}"
        )


def _measured(case: Case) -> None:
    """Predictions, costs, accuracy and passes are those of the stored points, measured again."""
    found = case.run(history=True)
    wrong = np.argmax(case.model(found.x_adv), -1) != np.asarray(case.y)
    correct = np.argmax(case.model(case.x), -1) == np.asarray(case.y)
    np.testing.assert_array_equal(found.success, wrong)
    np.testing.assert_array_equal(found.correct, correct)
    if found.proof is None:
        cost = case.attack.ball.cost(case.x, found.x_adv)
        np.testing.assert_allclose(found.cost, cost, rtol=1e-6, atol=1e-7)
    weight = np.asarray(found.weight, float)
    accuracy = np.mean((1 - weight) * correct + weight * ~wrong)
    np.testing.assert_allclose(found.accuracy, accuracy, atol=1e-6)
    assert found.history is not None
    np.testing.assert_array_equal(np.sum(found.history.gradients, axis=0), found.gradients)
    assert not np.any(found.fault), "faults on a model that has none"


def _company(case: Case) -> None:
    """A sample's point depends neither on the batch size nor on the order of the samples."""
    whole = case.run()
    for size in (1, 7):
        _close(whole, case.run(batch_size=size))
    order = np.arange(len(case.y))[::-1].copy()
    turned = case.run(x=case.x[order], y=case.y[order], index=order)
    if case.attack.budget == "data":
        np.testing.assert_allclose(turned.accuracy, whole.accuracy, atol=1 / len(order))
        return
    _close(jax.tree.map(lambda leaf: leaf[order], whole), turned)


def _traced(case: Case) -> None:
    """Inside ``jit`` the attack finds the same as at top level."""
    inside = distinct.jit(lambda model, x, eps: case.run(model=model, x=x, eps=eps))
    _close(case.run(), inside(case.model, case.x, case.eps))


def _mapped(case: Case) -> None:
    """``vmap`` over radii equals one run for each."""
    radii = case.eps * jnp.array([0.0, 0.7, 2.8])
    together = jax.vmap(lambda eps: case.run(eps=eps))(radii)
    for index, eps in enumerate(radii):
        one = jax.tree.map(lambda leaf, index=index: leaf[index], together)
        _close(one, case.run(eps=float(eps)))


def _sharded(case: Case) -> None:
    """Inside ``jax.shard_map`` every sample gets the point that it gets among all."""
    attack, indices = case.attack, jnp.arange(len(case.y))
    devices = math.gcd(len(indices), jax.device_count())
    mesh, rows = parallel.data_mesh(jax.devices()[:devices]), PartitionSpec(parallel.AXIS)

    def points(attack: Attack, x: Array, y: Array, index: Array) -> tuple[Array, ...]:
        how: dict[str, Any] = {"eps": case.radius, "key": case.key, "index": index}
        found = driver.search(attack, case.model, x, y, diagnose=False, **how)
        return found.x_adv, found.cost, found.success, found.correct

    def split(attack: Attack) -> Callable[..., tuple[Array, ...]]:
        shard = functools.partial(points, attack)
        return distinct.jit(jax.shard_map(shard, mesh=mesh, in_specs=rows, out_specs=rows))

    data = case.x, case.y, indices
    if attack.budget == "data":
        try:
            split(attack)(*data)
        except ValueError:  # As it should: a shard would spend a budget of its own.
            if not hasattr(attack, "axis"):
                return
        else:
            raise AssertionError("the budget of all samples became one of each shard")
        changed: Any = attack
        parts = split(dataclasses.replace(changed, axis=parallel.AXIS))(*data)
    else:
        parts = split(attack)(*data)
    whole = distinct.jit(functools.partial(points, attack))(*data)
    for one, other, tolerance in zip(whole, parts, (_CLOSE, 10 * _CLOSE, 0, 0)):
        np.testing.assert_allclose(other, one, atol=tolerance)


def _keyed(case: Case) -> None:
    """The same key gives the same search; another key another one, if the attack is random."""
    first, again = _walked(case, case.key)[1], _walked(case, case.key)[1]
    for one, other in zip(_floats(first), _floats(again)):
        np.testing.assert_array_equal(one, other, "the same key gave another search")
    if not case.attack.random:
        return
    other_key = _walked(case, jax.random.fold_in(case.key, 1))[1]
    same = all(np.array_equal(a, b) for a, b in zip(_floats(first), _floats(other_key)))
    assert not same, "random is True, and another key changes nothing"


def _floats(states: Any) -> list[np.ndarray]:
    """All floating-point leaves of a tree as NumPy arrays."""
    leaves = jax.tree.leaves(states)
    return [np.asarray(one) for one in leaves if jnp.issubdtype(one.dtype, jnp.floating)]


def _flat(bias: Array, x: Array) -> Array:
    """Logits that do not depend on the input, so that all gradients are zero."""
    return jnp.broadcast_to(bias, (len(x), len(bias)))


def _zeros(case: Case) -> None:
    """Zero gradients are counted, and a sample with no other gradients is not done."""
    for bias in (jnp.zeros(4), jnp.arange(4.0)):
        found = case.run(model=Model(_flat, bias))
        correct = np.asarray(case.y) == int(jnp.argmax(bias))
        assert np.isfinite(found.x_adv).all(), "points that are not finite"
        np.testing.assert_allclose(found.accuracy, correct.mean(), atol=1e-6)
        np.testing.assert_array_equal(found.zeros, found.gradients, "zero gradients not counted")
        assert not np.any(np.asarray(found.done)[correct]), "done, though nothing could be learnt"


def _poisoned(params: dict[str, Array], x: Array) -> Array:
    """Finite logits whose gradient is 0 times infinity."""
    total = jnp.sum(x.reshape(len(x), -1), axis=1)
    hidden = jnp.sqrt(jnp.maximum(total - 50, 0)) - 5
    return jnp.concatenate([_apply(params, x), hidden[:, None]], axis=1)


def _cliff(params: dict[str, Array], x: Array) -> Array:
    """Logits that are NaN everywhere but at one sample."""
    moved = jnp.abs(x - params["home"]).reshape(len(x), -1).max(axis=1) > 1e-3
    return jnp.where(moved[:, None], jnp.nan, _apply(params, x))


def _faults(case: Case) -> None:
    """Gradients and outputs that are not finite are marked, and never count as robust or fallen."""
    params = case.model.args[0]
    model = Model(_poisoned, params)
    labels = jnp.argmax(model(case.x), -1)
    found = case.run(model=model, y=labels)
    followed, fault = np.asarray(found.gradients) > 0, np.asarray(found.fault)
    assert fault[followed].all(), "a gradient that is not finite is not marked as a fault"
    assert not np.any(np.asarray(found.done)[fault]), "done after a fault"
    wrong = jnp.argmax(model(found.x_adv), -1) != labels
    np.testing.assert_array_equal(found.success, wrong)
    model = Model(_cliff, params | {"home": case.x[:1]})
    found = case.run(model=model, x=case.x[:1], y=case.y[:1])
    moved = int(found.gradients[0]) + int(found.forwards[0]) > 1
    assert not np.any(found.success), "NaN logits count as a flip"
    assert not np.any(found.done & found.fault), "done after a fault"
    assert bool(found.fault[0]) or not moved, "NaN logits are not marked as a fault"
    np.testing.assert_array_equal(found.x_adv, case.x[:1])


def _two_classes(case: Case) -> None:
    """Two classes are enough."""
    model = _net(math.prod(case.x.shape[1:]), 2)
    labels = jnp.argmax(model(case.x), -1)
    found = case.run(model=model, y=labels)
    np.testing.assert_array_equal(found.success, jnp.argmax(model(found.x_adv), -1) != labels)


def _one_sample(case: Case) -> None:
    """One sample is enough, and is treated as among others."""
    alone = case.run(x=case.x[:1], y=case.y[:1])
    assert alone.x_adv.shape == case.x[:1].shape
    if case.attack.budget == "sample":
        together = case.run()
        np.testing.assert_allclose(alone.x_adv, together.x_adv[:1], atol=_CLOSE)
        np.testing.assert_array_equal(alone.success, together.success[:1])


def _no_budget(case: Case) -> None:
    """With ``eps=0`` nothing moves."""
    if case.attack.budget == "sample":
        _ball(dataclasses.replace(case, eps=0.0))
    found = case.run(eps=0.0)
    spent = np.asarray(found.weight) * np.asarray(found.cost)
    np.testing.assert_array_equal(spent, 0)
    np.testing.assert_allclose(found.accuracy, np.mean(found.correct))


class _KilledError(Exception):
    """Ends a search from its callback."""


def _resumed(case: Case) -> None:
    """A search that is killed after every round and resumed gives the same result, bit for bit."""

    def kill(progress: Progress) -> NoReturn:
        raise _KilledError

    how: dict[str, Any] = {"eps": case.radius, "key": case.key, "batch_size": 7, "diagnose": False}
    search = functools.partial(driver.search, case.attack, case.model, case.x, case.y, **how)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "search"
        rounds = sum(stage.length for stage in case.attack.stages)
        for _ in range(2 * rounds + 9):
            try:
                found = search(callback=kill, checkpoint=path, every=0)
            except _KilledError:
                continue
            break
        else:
            raise AssertionError(f"a search of {rounds} steps did not end in {2 * rounds} rounds")
    whole = search()
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(one, other)


CLAUSES: dict[str, Callable[[Case], None]] = {
    "protocol": _protocol,
    "ball": _ball,
    "measured": _measured,
    "company": _company,
    "jit": _traced,
    "vmap": _mapped,
    "shards": _sharded,
    "key": _keyed,
    "zero gradients": _zeros,
    "faults": _faults,
    "two classes": _two_classes,
    "one sample": _one_sample,
    "no budget": _no_budget,
    "resumed": _resumed,
}
"""The clauses of the contract, by name; their docstrings state them."""


@full_precision
def check_attack(
    attack: Attack,
    *,
    eps: float | None = None,
    shape: tuple[int, ...] = (2, 3, 2),
    samples: int = 24,
    clauses: Iterable[str] = tuple(CLAUSES),
    **spending: Any,
) -> None:
    """Checks an attack against the contract of :func:`wdjax.search` and :func:`wdjax.run`.

    A smooth net with four classes is attacked on random samples, one in six of which is
    misclassified; some clauses use other models. Use few steps: the search runs about thirty times.

    Args:
      attack: an instance of the attack, with any budget.
      eps: the budget, in the units of ``x``; by default one that some samples survive.
      shape: shape of a sample; attacks of images may need ``(height, width, channels)``.
      samples: number of samples, at least 2.
      clauses: which of :data:`CLAUSES` to check, by default all.
      **spending: ``order`` and ``kappa`` of :func:`wdjax.run`.

    Raises:
      AssertionError: the name of the clause that the attack breaks, and how.
      ValueError: a clause that does not exist.

    Cost: about ten compilations of the attack; 10 to 60 seconds on a CPU.

    >>> from wdjax import attacks
    >>> check_attack(attacks.fgsm(), clauses=("protocol", "ball", "no budget"))
    """
    wanted = tuple(clauses)
    if unknown := set(wanted) - set(CLAUSES):
        raise ValueError(f"clauses must be some of {', '.join(CLAUSES)}, got {sorted(unknown)}.")
    for name in wanted:
        try:
            if name == "protocol":
                arguments.check(attack=attack)
            CLAUSES[name](_case(attack, eps, shape, samples, spending))
        except Exception as error:  # Whatever the attack's own code raises.
            said = (CLAUSES[name].__doc__ or "").strip()
            raise AssertionError(
                f"{type(attack).__name__} breaks the clause {name!r} ({said}): "
                f"{type(error).__name__}: {error}"
            ) from error


def _case(
    attack: Attack, eps: float | None, shape: tuple[int, ...], samples: int, spending: Any
) -> Case:
    """The case for an attack: random samples in its box, labels, a small net and a default radius.

    One label in six is wrong, so that some samples are misclassified from the start. ``spending``
    are order and kappa.
    """
    low, high = attack.ball.box or (0.0, 1.0)
    model = _net(math.prod(shape), 4)
    x = low + (high - low) * jax.random.uniform(jax.random.key(1), (samples, *shape))
    y = jnp.argmax(model(x), axis=-1)
    y = jnp.where(jnp.arange(samples) % 6 == 5, (y + 1) % 4, y)
    width = _RADII.get(getattr(attack.ball, "norm", -1), 0.05) * (high - low)
    return Case(attack, model, x, y, width if eps is None else eps, jax.random.key(7), spending)
