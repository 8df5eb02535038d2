"""A model that is no pure function of its parameters is refused: JAX keeps its first program."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_misuse import CALLS, call

import wdjax
from wdjax import attacks, certify, ensembles, losses
from wdjax.cli import main

CHANGED = "reads a value that is not among its parameters"
X = jnp.asarray(np.random.default_rng(0).uniform(size=(6, 4)), jnp.float32)
Y = jnp.zeros(6, int)
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)


class Box:
    """Weights that a function reads from outside."""

    def __init__(self, weights):
        self.weights = weights


@pytest.mark.parametrize("kind", ["closure", "number", "branch", "NumPy array"])
def test_a_value_that_changed_since_is_seen(kind):
    box = Box({"number": 1.0, "branch": True}.get(kind, W))

    def apply(w, x):
        if kind == "branch":
            return x @ w if box.weights else -(x @ w)
        return box.weights * (x @ w) if kind == "number" else x @ box.weights

    model = wdjax.Model(apply, W)
    if kind == "NumPy array":
        box.weights = np.array(W)
    before = wdjax.run(attacks.PGD(steps=3), model, X, Y, eps=0.01).accuracy
    again = wdjax.run(attacks.PGD(steps=3), wdjax.Model(apply, W), X, Y, eps=0.01).accuracy
    assert float(again) == float(before)
    if kind == "NumPy array":
        box.weights *= -1
    else:
        box.weights = {"number": -1.0, "branch": False}.get(kind, -W)
    for renewed in (model, wdjax.Model(apply, W)):
        with pytest.raises(ValueError, match=CHANGED):
            wdjax.run(attacks.PGD(steps=3), renewed, X, Y, eps=0.01)
        with pytest.raises(ValueError, match=CHANGED):
            certify.certified(renewed, X, Y, norm=jnp.inf, eps=0.01)
    jax.clear_caches()
    wdjax.run(attacks.PGD(steps=3), model, X, Y, eps=0.01)


def test_a_loss_or_criterion_that_changed_is_seen():
    box = Box(1.0)

    def loss(out, y):
        return box.weights * losses.cross_entropy(out, y)

    def criterion(out, y):
        return losses.decision_margin(out, y) - box.weights

    model = wdjax.Model(lambda w, x: x @ w, W)
    asked = [
        functools.partial(wdjax.search, attacks.PGD(steps=2, loss=loss), model, X, Y, eps=0.1),
        functools.partial(wdjax.run, attacks.PGD(steps=4, loss=loss), model, X, Y, eps=0.1),
        functools.partial(wdjax.search, attacks.FMN(steps=3), model, X, Y, criterion=criterion),
        functools.partial(wdjax.run, attacks.FMN(steps=3), model, X, Y, eps=1, criterion=criterion),
    ]
    for ask in asked:
        ask()
    box.weights = -1.0
    for ask in asked:
        with pytest.raises(ValueError, match=CHANGED):
            ask()


def test_numbers_drawn_while_tracing_are_seen():
    model = wdjax.Model(lambda w, x: (x * np.random.rand(4).astype("f4")) @ w, W)
    with pytest.raises(ValueError, match=CHANGED):
        wdjax.search(attacks.WDAPlusPlus(), model, X, Y)


def test_new_parameters_are_no_change():
    def apply(w, x):
        return x @ w

    first, second = wdjax.Model(apply, W), wdjax.Model(apply, -W)
    one, other = (wdjax.search(attacks.WDAPlusPlus(), m, X, Y) for m in (first, second))
    assert one.correct.tolist() != other.correct.tolist()


SEEN = [
    function
    for function, given in CALLS.items()
    if "model" in inspect.signature(function).parameters and {"model", "x"} <= set(given)
    if function is not ensembles.rand  # Its random model has a table of its own.
]


@pytest.mark.parametrize("function", SEEN, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_every_function_of_a_model_looks(function):
    box = Box(1.0)
    model = wdjax.Model(lambda inner, x: box.weights * inner(x), CALLS[function]["model"])
    call(function, CALLS[function] | {"model": model})
    box.weights = -1.0
    with pytest.raises(ValueError, match=CHANGED):
        call(function, CALLS[function] | {"model": model})


def test_the_command_line_looks(tmp_path, monkeypatch, capsys):
    """Its models come from the package, whose own functions do not look."""
    (tmp_path / "noisy_net.py").write_text(
        "import jax, numpy, wdjax\ndef build():\n"
        "    noise, weights = numpy.random.default_rng(0), jax.numpy.ones((4, 3))\n"
        "    return wdjax.Model(lambda w, x: x @ w + noise.normal(size=3), weights)\n"
    )
    np.savez(tmp_path / "x.npz", x=X, y=Y)
    monkeypatch.chdir(tmp_path)
    given = ["--model", "noisy_net:build", "--data", "x.npz", "--norm", "linf"]
    commands = (
        ["attack", "--eps", "0.1", "--attacks", "fgsm"],
        ["certify", "--eps", "0.1"],
        ["audit", "--eps-list", "0.1", "--out", "a"],
    )
    for command in commands:
        assert main([*command, *given]) == 2
        assert "not among its parameters" in capsys.readouterr().err
