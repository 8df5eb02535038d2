"""What changes no decision of a model changes no verdict on it, or the result says why it may.

Classes that never win, a shift, a scale or an order of all logits, a softmax head, an order of the
samples, a second model beside the first: one net with these as parameters, so that one program of
an attack, under ``vmap`` over all of them, serves them all.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_contract import EPS, model, x, y
from test_image import labelled, pictures

import wdjax
from wdjax import Lp, attacks, ensembles, image, losses, report
from wdjax.certify.noise import Gaussian
from wdjax.ensembles.rand import majority

CLASSES, DEAD = 4, 2
KEY = jax.random.key(7)
PLAIN = dict(
    model.args[0],
    scale=1.0,
    shift=0.0,
    dead=-30.0,
    alive=np.arange(CLASSES + DEAD) < CLASSES,
    order=np.arange(CLASSES + DEAD),
    head=0.0,
)
MIXED = np.array([4, 2, 0, 5, 3, 1])
VARIANTS = {
    "plain": {},
    "dead at -1e4": dict(dead=-1e4),
    "dead at -1e7": dict(dead=-1e7),
    "dead at -1e9": dict(dead=-1e9),
    "shifted by 1e3": dict(shift=1e3),
    "shifted by 1e5": dict(shift=1e5),
    "shifted by -1e5": dict(shift=-1e5, dead=-2e5),
    "shifted by 1e3, dead at -1e9": dict(shift=1e3, dead=-1e9),
    "times 1e-6": dict(scale=1e-6),
    "times 1e-2": dict(scale=1e-2),
    "times 100": dict(scale=100.0, dead=-3e3),
    "times 1e4": dict(scale=1e4, dead=-3e5),
    "other classes": dict(order=MIXED),
    "softmax": dict(head=1.0),
}
FARTHER = {"shifted by 1e5": 1.15, "shifted by -1e5": 1.15, "softmax": 1.5}
"""Median distances over those of the plain net: a flip must show beyond .1 where floats are .008
apart, and a softmax bends what attacks take for linear. For all others 1.05."""


def apply(p, x):
    """The contract's net; a mask, whose classes never win, is the same as classes appended."""
    hidden = jnp.tanh(x.reshape(len(x), -1) @ p["w1"] + p["b1"])
    logits = p["scale"] * (hidden @ p["w2"] + p["b2"]) + p["shift"]
    logits = jnp.pad(logits, ((0, 0), (0, DEAD)))
    logits = jnp.where(p["alive"], logits, p["dead"])[:, p["order"]]
    return (1 - p["head"]) * logits + p["head"] * jax.nn.softmax(logits)


def variant(name):
    """The net and its labels."""
    p = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), PLAIN | VARIANTS[name])
    return wdjax.Model(apply, p), jnp.argsort(p["order"])[y].astype(jnp.int32)


def margin(points):
    """The margin of the plain net in float64: what every variant decides by."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in model.args[0].items()}
    flat = np.asarray(points, np.float64).reshape(len(points), -1)
    logits = np.tanh(flat @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
    rows = np.arange(len(logits))
    own = logits[rows, y]
    logits[rows, y] = -np.inf
    return logits.max(axis=1) - own


def resolution(name):
    """By how much rounding moves the margin of the plain net."""
    scale, shift = (abs((PLAIN | VARIANTS[name])[which]) for which in ("scale", "shift"))
    return 1e-5 + 4 * 2.0**-23 * shift / scale


def said(found):
    """``[n]``: what a reader is told of, a sample or all of them."""
    vanishing = bool(report.remarks(report.spent(found)))
    return (np.asarray(found.zeros) > 0) | np.asarray(found.fault) | vanishing


def check(name, found, near, reference=None, shared=False):
    """Nothing is lost without a word, nothing is claimed that is none, and flips stay near.

    A budget that samples share may buy others, as many.
    """
    truth = margin(found.x_adv)
    success = np.asarray(found.success)
    assert (truth[success] > -resolution(name)).all(), name
    lost = near & ~success & ~said(found) & (not shared or success.sum() < near.sum())
    assert not lost.any(), f"{name}: lost {np.flatnonzero(lost)}"
    if reference is not None:
        both = near & success & (np.asarray(reference.cost) > 0)
        ratio = np.asarray(found.cost)[both] / np.asarray(reference.cost)[both]
        assert not both.any() or np.median(ratio) <= FARTHER.get(name, 1.05), f"{name}: {np.median(ratio):.3f}"


EVERY = {
    "fgsm": (1, attacks.fgsm),
    "PGD": (2, functools.partial(attacks.PGD, steps=20)),
    "WDA": (np.inf, functools.partial(attacks.WDA, steps=20, probe=10)),
    "WDAPlusPlus": (np.inf, attacks.WDAPlusPlus),
    "APGD": (1, functools.partial(attacks.APGD, steps=20)),
    "APGD targeted": (2, functools.partial(attacks.APGD, steps=15, targets=2, rank="ratio")),
    "FAB": (1, functools.partial(attacks.FAB, steps=15)),
    "FAB targeted": (np.inf, functools.partial(attacks.FAB, steps=20, targets=2, bounded=True)),
    "Square": (np.inf, functools.partial(attacks.Square, queries=100)),
    "WPGD": (2, functools.partial(attacks.WPGD, steps=20)),
    "wfgsm": (1, attacks.wfgsm),
    "MarginPGD": (2, functools.partial(attacks.MarginPGD, far=True)),
    "Diversified": (np.inf, functools.partial(attacks.Diversified, probes=3, steps=15)),
    "Walk": (2, attacks.Walk),
    "Walk targets": (1, functools.partial(attacks.Walk, steps=25, targets=2, within=True)),
    "DDN": (2, functools.partial(attacks.DDN, steps=60, radius=0.3)),
    "FMN": (np.inf, functools.partial(attacks.FMN, steps=60)),
    "DeepFool": (2, attacks.DeepFool),
    "CarliniWagner": (2, functools.partial(attacks.CarliniWagner, steps=60, rounds=4, step_size=0.05)),
    "PDPGD": (1, functools.partial(attacks.PDPGD, steps=150)),
    "ALMA": (2, functools.partial(attacks.ALMA, steps=200)),
    "TrustRegion": (np.inf, attacks.TrustRegion),
}


def functions():
    """Public attacks of one step, which are settings of others."""
    return {name for name in attacks.__all__ if not isinstance(getattr(attacks, name), type)}


def test_every_public_attack_is_tried():
    made = {type(make(Lp(norm))).__name__ for norm, make in EVERY.values()} | {"Points"}
    assert made | functions() == set(attacks.__all__)
    assert functions() <= set(EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_a_verdict_does_not_depend_on_how_logits_are_written(name):
    """All variants in one program, in which every model stands beside the others."""
    norm, make = EVERY[name]
    attack, order = make(Lp(norm)), np.random.default_rng(0).permutation(len(y))
    nets, labels = zip(*map(variant, VARIANTS))
    # A smaller budget tells which verdicts hang on a hair; the last row is another order.
    nets, labels = [*nets, nets[0], nets[0]], [*labels, labels[0], labels[0][order]]
    places = np.arange(len(y))
    every = np.stack([places] * (len(nets) - 1) + [order])
    radii = EPS[norm] * np.array([1.0] * len(VARIANTS) + [0.93, 1.0], np.float32)

    def one(net, y, places, eps):
        return wdjax.run(attack, net, x[places], y, eps=eps, key=KEY, index=places)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *nets)
    results = jax.jit(jax.vmap(one))(stacked, jnp.stack(labels), every, radii)
    rows = [jax.tree.map(lambda leaf, i=i: np.asarray(leaf[i]), results) for i in range(len(nets))]
    rows[-1] = jax.tree.map(lambda leaf: leaf[np.argsort(order)], rows[-1])
    free = attack.budget == "none"
    near = rows[0 if free else -2].success
    assert near.sum() > len(y) / 4
    for which, row in [*zip(VARIANTS, rows), ("plain", rows[-1])]:
        if which == "softmax" and name in functions():
            continue  # One step along a bent loss is another attack.
        check(which, row, near, rows[0] if free else None, attack.budget == "data")
