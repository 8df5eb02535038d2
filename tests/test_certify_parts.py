"""Branch and bound part by part, without an attack beside it, against grids of two inputs."""

import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import Model
from wdjax.bounds import leaves
from wdjax.certify import parts, signs

SIZES = (2, 12, 12, 12, 2)


def layered(layers, x):
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def drawn(rng):
    layers = []
    for rows, columns in itertools.pairwise(SIZES):
        weight = rng.normal(size=(rows, columns)) * 2 / math.sqrt(rows)
        layers.append((jnp.array(weight, jnp.float32), jnp.array(rng.normal(size=columns))))
    return Model(layered, layers)


@pytest.fixture
def halved(monkeypatch):
    """Parts are bounded once and halved after one leaf; the list counts the halvings."""
    counted = []
    halves = parts._Part.halves
    monkeypatch.setattr(parts, "_FEW", 1)
    monkeypatch.setattr(parts, "_ROUNDS", 1)
    monkeypatch.setattr(signs, "_WIDTH", 1)
    monkeypatch.setattr(
        parts._Part, "halves", lambda part, entry: counted.append(entry) or halves(part, entry)
    )
    return counted


def searched(model, x, y, eps, seconds=20.0):
    """The bound of the margin over a square, and how the search ended; no point ends it."""
    norm = math.inf
    problem = leaves.of_sample(x, y, jnp.array([eps], jnp.float32), norm, None, 2)
    root = leaves.root(model, problem, norm)
    row, low = 1 - int(y[0]), np.where(np.arange(2) == int(y[0]), np.inf, -1e6)
    search = signs.SignSearch(model, problem, norm, root, lambda points: None)
    found = parts._PartSearch(search, row, low).run(time.monotonic() + seconds)
    return found.low[row], found.ended


def test_parts_are_closed_where_grids_say_so_and_nowhere_else(halved):
    """At 1.02 times the distance of a flip of a grid nothing is proved, at .9 times all is."""
    rng, steps = np.random.default_rng(0), np.linspace(-1, 1, 401)
    square = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2).astype("f4")
    count = 0
    while count < 8:
        model, x = drawn(rng), jnp.array(rng.uniform(0.3, 0.7, size=(1, 2)), jnp.float32)
        y = model(x).argmax(axis=-1)
        flips = np.flatnonzero(np.asarray(model(x + square)).argmax(axis=-1) != int(y[0]))
        if not len(flips) or (near := np.abs(square[flips]).max(axis=1).min()) < 0.1:
            continue
        count += 1
        low, ended = searched(model, x, y, 1.02 * near, seconds=2.0)
        assert low <= 0
        assert ended != "closed"
        low, ended = searched(model, x, y, 0.9 * near)
        assert ended == "closed"
        inside = np.asarray(model(x + 0.9 * near * square))
        assert 0 < low <= np.min(inside[:, int(y[0])] - inside[:, 1 - int(y[0])])
    assert len(halved) > 20


def test_parts_and_the_whole_region_share_what_they_close(monkeypatch):
    """Four functions, of which each search closes one; the others stay open and count."""
    closed = {"whole": 1, "parts": 2}
    low, rows = np.array([-1.0, -2.0, -3.0, np.inf]), np.arange(3)

    def told(row, ended):
        changed = low.copy()
        changed[row] = parts.PROVED
        return signs.Searched(changed, ended, 0, None)

    class Part:
        def __init__(self, search, row, low):
            self.row, self.bounded = row, 5

        def run(self, until):
            if self.row == closed["parts"]:
                return told(self.row, "closed")
            return signs.Searched(low, "nothing to split", 0, None)

    begun = leaves.Leaves(rows, *np.zeros((4, 3, 7)))
    frontier = signs.Frontier(low, begun)
    frontier.bounded = 7

    class Search:
        def run(self, whole, until):
            assert all(leaf.row != closed["parts"] for leaf in whole.open)
            whole.open = [leaf for leaf in whole.open if leaf.row != closed["whole"]]
            time.sleep(0.01)
            return told(closed["whole"], "time")

    monkeypatch.setattr(parts, "_PartSearch", Part)
    known = signs.Searched(low, "time", 0, None)
    turns = parts._InTurn(Search(), frontier, rows, known, time.monotonic() + 0.2)
    found = turns.run(0.01)
    assert found.ended == "time"
    assert found.leaves == 7 + 3 * 5
    np.testing.assert_array_equal(found.low, [-1.0, parts.PROVED, parts.PROVED, np.inf])
    assert frontier.low()[closed["parts"]] == 0
