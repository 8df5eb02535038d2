"""What a checkpoint belongs to: programs by what they compute, not by names or code."""

import dataclasses
import functools
import os
import subprocess
import sys
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import attacks, identity, losses, nppr, smoothing, training, transductive
from wdjax.certify import verify
from wdjax.smoothing import noise

pytestmark = pytest.mark.fast

X = jnp.linspace(0.2, 0.8, 8).reshape(4, 2)
Y = jnp.array([0, 1, 0, 1])
WEIGHTS = jnp.array([[3.0, -3.0], [-3.0, 3.0]])
KEY = jax.random.key(0)


def _linear(w, x):
    return x @ w


def _shifted(w, x):
    return x @ w + jnp.array([0.1, 0.0])


MODEL = wdjax.Model(_linear, WEIGHTS)
SHIFTED = wdjax.Model(_shifted, WEIGHTS)


def _scaled(out, y, factor=1.0):
    return factor * losses.cross_entropy(out, y)


def _raised(out, y, *, factor=1.0):
    return factor * losses.cross_entropy(out, y)


GLOBAL = 1.0


def _global(out, y):
    return GLOBAL * losses.cross_entropy(out, y)


def _captured(array):
    return lambda out, y: losses.cross_entropy(out, y) * array[0]


# Pairs that the code of a function alone does not tell apart.
LOSSES = {
    "name of what a lambda calls": (
        lambda out, y: losses.margin(out, y),
        lambda out, y: losses.cross_entropy(out, y),
    ),
    "default": (_scaled, functools.partial(_scaled, factor=-1.0)),
    "keyword default": (_raised, functools.partial(_raised, factor=-1.0)),
    "captured array": (_captured(np.array([1.0, 2.0])), _captured(np.array([-1.0, 2.0]))),
    "functions": (
        lambda out, y: jnp.sin(losses.margin(out, y)),
        lambda out, y: jnp.cos(losses.margin(out, y)),
    ),
}


def _ended(_):
    return True


def _search(folder, loss, model=MODEL, end=None, **how):
    attack = attacks.PGD(steps=20, loss=loss, step_size=0.01, iterate="last")
    return wdjax.search(
        attack, model, X, Y, eps=0.3, checkpoint=folder, every=0.0, callback=end, **how
    )


@pytest.mark.parametrize("name", LOSSES)
def test_search_refuses_the_checkpoint_of_another_loss(name, tmp_path):
    one, other = LOSSES[name]
    _search(tmp_path / "own", one, end=_ended)
    with pytest.raises(ValueError, match="other settings"):
        _search(tmp_path / "own", other)
    resumed, fresh = _search(tmp_path / "own", one), _search(None, one)
    np.testing.assert_array_equal(resumed.x_adv, fresh.x_adv)


def test_value_of_a_global_is_part_of_the_program(tmp_path, monkeypatch):
    _search(tmp_path / "own", _global, end=_ended)
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", -1.0)
    jax.clear_caches()  # As in a new process, which has not traced the loss with its old value.
    with pytest.raises(ValueError, match="other settings"):
        _search(tmp_path / "own", _global)


def test_equal_lambdas_are_one_loss(tmp_path):
    loss, again = (lambda out, y: losses.cross_entropy(out, y) for _ in range(2))
    _search(tmp_path / "own", loss, end=_ended)
    assert bool(jnp.all(_search(tmp_path / "own", again).success))


def _train(folder, model, loss=losses.cross_entropy, end=None):
    how = {"epochs": 2, "batch_size": 2, "checkpoint": folder, "callback": end, "key": KEY}
    return training.train(model, X, Y, loss=loss, **how).model


def _smooth(folder, model, loss=None, end=None):
    own = noise.Gaussian(0.25)
    how = {"noise": own, "key": KEY, "n": 50, "checkpoint": folder, "callback": end}
    return smoothing.certify(model, X, Y, every=0.0, **how)


def _verify(folder, model, loss=None, end=None):
    return verify(model, X, Y, norm=2, eps=0.1, batch_size=2, checkpoint=folder, callback=end)


def _fit(folder, model, loss=None, end=None):
    own = nppr.Family(mode="independent", components=2, upsample="none")
    plan = nppr.Schedule(steps=3, batch=2, draws=2)
    how = {"family": own, "schedule": plan, "checkpoint": folder, "callback": end}
    return nppr.fit(model, X, Y, eps=0.1, key=KEY, every=0.0, **how)


def _regularised(folder, model, loss=None, end=None):
    own = nppr.Family(mode="label", components=2, upsample="none")
    how = {"family": own, "epochs": 2, "draws": 2, "checkpoint": folder, "callback": end}
    return nppr.train_model(model, X, Y, eps=0.1, key=KEY, batch_size=2, every=0.0, **how)


def _play(folder, model, loss=losses.cross_entropy, end=None):
    attack = transductive.transfer(attacks.PGD(steps=2), loss=transductive.objectives.unaware)
    fixed = transductive.Fixed(model)
    how = {"memory": (), "eps": 0.1, "key": KEY, "size": 2, "checkpoint": folder, "callback": end}
    return transductive.play(fixed, attack, X, Y, every=0.0, **how)


WORK = {
    "search": lambda folder, model, end=None: _search(folder, losses.margin, model, end),
    "train": _train,
    "smoothing": _smooth,
    "verify": _verify,
    "fit": _fit,
    "regularised": _regularised,
    "game": _play,
}


@pytest.mark.parametrize("name", WORK)
def test_work_refuses_the_checkpoint_of_another_model(name, tmp_path):
    """The parameters are the same; the functions are not."""
    work = WORK[name]
    ended = pytest.raises(ValueError, match="ended") if name == "game" else nullcontext()
    with ended:
        work(tmp_path / "own", MODEL, end=_ended)
    with pytest.raises(ValueError, match="other settings"):
        work(tmp_path / "own", SHIFTED)
    resumed, fresh = work(tmp_path / "own", MODEL), work(None, MODEL)
    for one, two in zip(_leaves(resumed), _leaves(fresh)):
        np.testing.assert_array_equal(one, two)


def _leaves(result):
    fields = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result
    return [leaf for leaf in jax.tree.leaves(fields) if not isinstance(leaf, str)]


def test_training_refuses_the_checkpoint_of_another_loss(tmp_path):
    one, other = LOSSES["name of what a lambda calls"]
    _train(tmp_path / "own", MODEL, one, end=_ended)
    with pytest.raises(ValueError, match="other settings"):
        _train(tmp_path / "own", MODEL, other)


PROGRAMS = {
    "constants": (lambda t: t + np.array([1.0, 2.0]), lambda t: t + np.array([1.0, 3.0])),
    "literals": (lambda t: t * 2.0, lambda t: t * (2.0 + 1e-6)),
    "order of operands": (lambda t: t - jnp.exp(t), lambda t: jnp.exp(t) - t),
    "results": (lambda t: (t, t + 1), lambda t: (t + 1, t)),
    "inner programs": (
        jax.jit(lambda t: jax.lax.fori_loop(0, 3, lambda i, s: s * 2, t)),
        jax.jit(lambda t: jax.lax.fori_loop(0, 3, lambda i, s: s * 3, t)),
    ),
    "lengths of loops": (
        lambda t: jax.lax.fori_loop(0, 3, lambda i, s: s * 2, t),
        lambda t: jax.lax.fori_loop(0, 4, lambda i, s: s * 2, t),
    ),
    "branches": (
        lambda t: jax.lax.cond(t[0] > 0, jnp.sin, jnp.cos, t),
        lambda t: jax.lax.cond(t[0] > 0, jnp.cos, jnp.sin, t),
    ),
    "types": (lambda t: t.astype(jnp.bfloat16), lambda t: t.astype(jnp.float16)),
    "parameters": (lambda t: jnp.cumsum(t), lambda t: jax.lax.cumsum(t, reverse=True)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_told_apart(name):
    one, other = (identity.digest(identity.program(f, jnp.ones(2))) for f in PROGRAMS[name])
    again = identity.digest(identity.program(lambda t: PROGRAMS[name][0](t), jnp.ones(2)))
    # A lambda around a jitted function is one more call, and nothing else.
    assert one != other
    assert one == again


_SCRIPT = """
import jax, jax.numpy as jnp
from wdjax import models
from wdjax import identity
net = models.mlp((4, 8, 3), key=jax.random.key(0))
slope = lambda net, x: jax.grad(lambda x: jnp.sum(jax.nn.gelu(net(x)) ** 2))(x)
print(identity.digest(identity.program(slope, net, jnp.ones((2, 4))), {"b": 1, "a": 2}).hex())
"""


def test_digests_are_the_same_in_every_process():
    def said(seed):
        own = {**os.environ, "PYTHONHASHSEED": seed}
        made = subprocess.run(
            [sys.executable, "-c", _SCRIPT], check=True, capture_output=True, text=True, env=own
        )
        return made.stdout

    assert said("1") == said("2")
