"""Branch and bound against grids, random points of leaves, and flips that attacks do not see."""

import itertools
import math
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from wdjax import Lp, Model, attacks, certify, losses, run
from wdjax.bounds import leaves, region
from wdjax.certify import branch, in_turn, parts, subdomains
from wdjax.certify import signs as sign_search

BOX = (0.0, 1.0)


def layered(layers, x, function=jax.nn.relu):
    x = x.reshape(len(x), -1)
    for weight, bias in layers[:-1]:
        x = function(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def smooth(layers, x):
    return layered(layers, x, jnp.tanh)


def gated(layers, x):
    return layered(layers, x, lambda z: z * jax.nn.sigmoid(z) * jnp.cos(z))


SIZES = (2, 8, 8, 3)


def net(rng, scale=2.0, sizes=SIZES, function=layered):
    layers = []
    for rows, columns in itertools.pairwise(sizes):
        weight = rng.normal(size=(rows, columns)) * scale / math.sqrt(rows)
        layers.append((jnp.array(weight, jnp.float32), jnp.array(rng.normal(size=columns) / 4)))
    return Model(function, layers)


def least(model, x, y, eps):
    """The least margin over a fine grid of a square, with and without what it may miss."""
    steps = np.linspace(-eps, eps, 161)
    grid = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
    points = np.clip(x + grid, 0, 1)
    out = np.asarray(model(jnp.array(points, jnp.float32)), float)
    apart = out[:, y, None] - np.delete(out, y, axis=1)
    found = apart.min(axis=1).reshape(161, 161)
    rough = max(np.abs(np.diff(found, axis=a)).max() for a in (0, 1))
    return found.min(), found.min() - rough


def test_what_is_closed_is_exact():
    """On nets of two inputs: verified if and only if a grid has no flip; the other methods less."""
    rng = np.random.default_rng(0)
    truth, kept, before = [], [], []
    for _ in range(4):
        model = net(rng)
        x = rng.uniform(0.3, 0.7, size=(6, 2)).astype(np.float32)
        y = np.asarray(model(jnp.array(x)).argmax(axis=-1))
        low = certify.margin_bounds(model, x, y, norm=math.inf, eps=0.25, method="bab", seconds=30)
        auto = certify.margin_bounds(model, x, y, norm=math.inf, eps=0.25, method="auto")
        before += [*np.all(auto > 0, axis=1)]
        for row, xi, yi, cheap in zip(np.asarray(low), x, y, np.asarray(auto)):
            above, below = least(model, xi, yi, 0.25)
            assert row.min() <= above + 1e-5
            assert np.all(row >= cheap)
            if abs(above) > above - below:
                truth.append(above > 0)
                kept.append(row.min() > 0)
    assert kept == truth
    assert 0 < sum(before) < sum(kept) < len(kept)


def filtered(params, x):
    kernel, head = params
    x = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(x).reshape(len(x), -1) @ head


def test_no_point_of_a_leaf_breaks_its_bound():
    """Points are in both halves where rounding decides, and in floats of two programs."""
    rng, norm = np.random.default_rng(1), 2
    draw = lambda *shape: jnp.array(rng.normal(size=shape), jnp.float32)  # noqa: E731
    model = Model(filtered, (draw(3, 3, 1, 2), draw(32, 3)))
    x = jnp.array(rng.uniform(0.2, 0.8, size=(1, 4, 4, 1)), jnp.float32)
    y, eps = jnp.array([0]), jnp.array([0.4], jnp.float32)
    problem = leaves.of_sample(x, y, eps, norm, BOX, 3)
    known = leaves.root(model, problem, norm)
    (place,) = known.lower
    step = rng.normal(size=(4000, *x.shape[1:]))
    flat = step.reshape(len(step), -1)
    flat /= np.linalg.norm(flat, norm, axis=1, keepdims=True)
    points = np.clip(x + float(eps[0]) * flat.reshape(step.shape), 0, 1).astype(np.float32)
    operand = np.asarray(
        jax.lax.conv_general_dilated(
            points, model.args[0][0], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    ).reshape(len(points), -1)
    assert np.all(operand >= known.lower[place].reshape(-1))
    out = np.asarray(model(jnp.array(points)))
    open_ = np.flatnonzero((known.lower[place] < 0) & (known.upper[place] > 0))
    begun = known.begin(jnp.array([1, 2] * 4))
    signs = np.zeros(begun.signs.shape, np.int8)
    for row in signs:
        chosen = rng.choice(open_, 3, replace=False)
        row[chosen] = np.sign(operand[rng.integers(len(operand)), chosen])
    multipliers = rng.uniform(size=begun.multipliers.shape).astype(np.float32)
    rows = leaves.Leaves(begun.row, jnp.array(signs), jnp.array(multipliers), *begun[3:])
    found = leaves.bounds(model, problem, known, rows, norm=norm, steps=5, tries=2)
    slack = np.asarray(known.slack[place]).reshape(-1)
    seen = 0
    for row, rival, low in zip(signs, begun.row, found.low):
        inside = np.all(row * operand >= -slack * (row != 0), axis=1)
        seen += inside.sum()
        assert np.all(out[inside, 0] - out[inside, rival] >= low)
    assert seen > 1000
    whole = leaves.bounds(model, problem, known, begun, norm=norm, steps=5, tries=2)
    assert np.all(found.low > whole.low - 0.1)
    for k, side in itertools.product(range(2), range(2)):
        for row, rival in enumerate(begun.row[:2]):
            entry, low = int(whole.choices[row, k]), float(whole.children[row, k, side])
            inside = (2 * side - 1) * operand[:, entry] >= -slack[entry]
            assert np.all(out[inside, 0] - out[inside, rival] >= low)


def test_no_leaf_is_dropped():
    """Every assignment of signs stays in some leaf, open or closed, and counts."""
    rng, size = np.random.default_rng(2), 7
    zeros = [jnp.zeros((1, size), jnp.float32)] * 3
    begun = leaves.Leaves(jnp.array([1]), jnp.zeros((1, size), jnp.int8), *zeros)
    frontier = sign_search.Frontier(np.array([np.inf, -9.0]), begun)
    every = []
    add = frontier.add

    def recorded(leaf):
        every.append(leaf)
        add(leaf)

    frontier.add = recorded
    while frontier.goes_on() and frontier.turns < 40:
        batch = frontier.take(4)
        choices = np.full((4, 3), size)
        for row, signs in enumerate(batch.signs):
            free = rng.permutation(np.flatnonzero(signs == 0))[:3]
            choices[row, : len(free)] = free
        low, children = rng.normal(-1, 1, 4), rng.normal(-1, 1, (4, 3, 2))
        frontier.split(leaves.LeafBounds(low, batch.multipliers, choices, children, None))
    held = [*frontier.open, *frontier.stuck, *(leaf for leaf in every if leaf.low > 0)]
    for signs in itertools.product((-1, 1), repeat=size):
        assert any(np.all((leaf.signs == 0) | (leaf.signs == signs)) for leaf in held)
    assert frontier.low()[1] == min(leaf.low for leaf in held)


def planted(raw, eps):
    """Class 1 only in a corner of the square around the middle that gradients point away from."""
    most = eps * np.abs(raw).sum()
    layers = [(np.zeros((m, n)), np.zeros(n)) for m, n in itertools.pairwise(SIZES)]
    (first, level), (second, shift), (third, bias) = layers
    first[:, 0], level[0] = raw, -0.5 * raw.sum() - (1 - 2e-3) * most
    first[:, 1], level[1] = -1e-4 * np.sign(raw), 1.0
    second[0, 0], second[1, 0], shift[0] = 2.0 / (1e-3 * most), 1.0, -0.99
    third[0, 1], bias[0], bias[2] = 1.0, 1.0, -5.0
    return Model(layered, jax.tree.map(lambda t: jnp.asarray(t, jnp.float32), layers))


def test_planted_counterexamples_are_never_verified():
    rng, held = np.random.default_rng(3), 0
    # Samples that are misclassified cost nothing, and the program is that of the other tests.
    x, y = np.full((6, 2), 0.5, np.float32), np.array([0, 2, 2, 2, 2, 2])
    how = {"norm": math.inf, "method": "bab", "seconds": 2}
    for eps in rng.choice([1e-2, 0.1, 0.3], 12):
        raw = rng.choice([-1.0, 1.0], 2) * rng.uniform(0.5, 1.5, 2)
        model = planted(raw, eps)
        flip = (x[:1] + (1 - 5e-4) * eps * np.sign(raw)).astype(np.float32)
        assert model(jnp.array(flip)).argmax() == 1
        assert not np.any(certify.certified(model, x, y, eps=eps, **how))
        held += bool(certify.certified(model, x, y, eps=0.99 * eps, **how)[0])
    missed = run(attacks.PGD(steps=40, loss=losses.margin), model, x, y, eps=eps)
    assert not missed.success[0]
    assert held > 9


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("box", [None, BOX])
def test_points_that_leaves_propose_minimise_linear_functions(norm, box):
    """In balls with entries of other scales, against scipy's minimum over ball and box."""
    rng, n, size = np.random.default_rng(5), 30, 8
    x, a = rng.uniform(size=(n, size)).round(2), rng.normal(size=(n, size))
    eps, scale = rng.choice([0.0, 0.01, 0.3, 1.5], n), rng.choice([0.0, 0.2, 1.0], (n, size))
    a[:, 3], scale[:10] = 0.0, 1.0
    x, a, eps, scale = (
        t.astype(np.float32) for t in (x, a * 10.0 ** rng.integers(-3, 4), eps, scale)
    )
    place = region.ball(jnp.asarray(x), jnp.asarray(eps), norm, box, jnp.asarray(scale))
    moved = (np.asarray(place.lowest(jnp.asarray(a)), float) - x).astype(float)
    assert np.all(moved[scale == 0] == 0)
    low, high = BOX if box else (-np.inf, np.inf)
    assert np.all((x + moved >= low) & (x + moved <= high))
    for move, slope, center, width, radius in zip(moved, a * scale, x, scale, eps):
        unit = np.where(width > 0, width, 1)
        assert np.linalg.norm(move / unit, norm) <= radius
        room = np.where(slope > 0, center - low, high - center) / unit
        room = np.minimum(np.where(slope == 0, 0, room), radius).astype(float)
        exact = _most(np.abs(slope), room, float(radius), norm)
        np.testing.assert_allclose(-move / unit @ slope, exact, rtol=2e-4, atol=1e-12)


def _most(slope, room, radius, norm):
    """The largest ``slope d`` with ``0 <= d <= room`` in a ball of the norm."""
    if norm == 1:
        ends = list(zip(np.zeros(len(room)), room))
        return -optimize.linprog(-slope, np.ones((1, len(room))), [radius], bounds=ends).fun
    if np.linalg.norm(room) <= radius:
        return slope @ room

    def longer(t):
        return np.linalg.norm(np.minimum(slope * 10.0**t, room)) - radius

    return slope @ np.minimum(slope * 10 ** optimize.brentq(longer, -12, 12), room)


def test_a_search_in_l2_finds_flips_without_its_first_attack(monkeypatch):
    monkeypatch.setattr(branch._Ball, "attacked", lambda ball, model, y: np.asarray(ball.x))
    rng = np.random.default_rng(9)
    model, x = net(rng), jnp.asarray(rng.uniform(0.2, 0.8, (8, 2)), jnp.float32)
    y = model(x).argmax(axis=-1)
    attacked = run(attacks.PGD(Lp(2, BOX), steps=40, loss=losses.margin), model, x, y, eps=0.2)
    found = certify.verify(model, x, y, norm=2, eps=0.2, method="bab", seconds=10, steps=0)
    assert 2 <= np.sum(attacked.success) < 8
    assert np.all((np.asarray(found.ended) == "flipped") >= np.asarray(attacked.success))


def test_it_stops_when_time_is_over_and_refuses_what_has_none():
    model = net(np.random.default_rng(4), 6.0)
    x = jnp.linspace(0.3, 0.7, 12).reshape(6, 2)
    y = model(x).argmax(axis=-1)
    how = {"norm": math.inf, "eps": 0.1}
    auto = certify.margin_bounds(model, x, y, method="auto", **how)
    low = certify.margin_bounds(model, x, y, method="bab", seconds=1e-9, **how)
    assert np.all(low >= auto)
    assert certify.verify(model, x, y, method="bab", steps=2, **how).method == "bab"
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: certify.margin_bounds(model, x, y, method="bab", **how))(x)
    with pytest.raises(ValueError, match="seconds"):
        certify.certified(model, x, y, method="bab", seconds=0, **how)
    with pytest.raises(ValueError, match="alpha"):
        certify.radius(model, x, y, norm=math.inf, method="bab")
    with pytest.raises(ValueError, match="steps must be an integer of at least 0, got -1"):
        certify.radius(model, x, y, norm=math.inf, steps=-1)


@pytest.fixture
def halved(monkeypatch):
    """Parts are bounded once and halved after one leaf; the list counts all halvings."""
    counted = []
    monkeypatch.setattr(parts, "_FEW", 1)
    monkeypatch.setattr(parts, "_ROUNDS", 1)
    monkeypatch.setattr(sign_search, "_WIDTH", 1)

    def counting(halves):
        return lambda part, *entry: counted.append(part) or halves(part, *entry)

    for kind in (parts._Part, subdomains._Subdomain):
        monkeypatch.setattr(kind, "halves", counting(kind.halves))
    return counted


def searched(kind, model, x, y, eps, seconds=20.0):
    """The bound of the margin over a square, and how the search ended; no point ends it."""
    norm = math.inf
    problem = leaves.of_sample(x, y, jnp.array([eps], jnp.float32), norm, None, 2)
    root = leaves.root(model, problem, norm)
    row, low = 1 - int(y[0]), np.where(np.arange(2) == int(y[0]), np.inf, -1e6)
    search = sign_search.SignSearch(model, problem, norm, root, lambda points: None)
    if kind == "parts":
        todo = parts.PartSearch(search, row, low)
    else:
        todo = subdomains.SubdomainSearch(search, np.array([row]), low)
    found = todo.run(time.monotonic() + seconds)
    assert (todo.share == 1) == (found.ended == "closed")
    return found.low[row], found.ended


@pytest.mark.parametrize(
    ("kind", "share", "least", "function"),
    [
        ("parts", 0.9, 4, layered),
        ("subdomains", 0.6, 4, layered),
        ("subdomains", 0.6, 6, smooth),
        ("subdomains", 0.6, 4, gated),
    ],
)
def test_parts_are_closed_where_grids_say_so_and_nowhere_else(halved, kind, share, least, function):
    """At 1.02 times the distance of a flip of a grid nothing is proved, at less most are."""
    rng, steps = np.random.default_rng(0), np.linspace(-1, 1, 401)
    square = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2).astype("f4")
    count = proved = 0
    while count < 8:
        sizes = (2, 12, 12, 12, 2) if function is layered else (2, 8, 8, 2)
        model = net(rng, sizes=sizes, function=function)
        x = jnp.array(rng.uniform(0.3, 0.7, size=(1, 2)), jnp.float32)
        y = model(x).argmax(axis=-1)
        flips = np.flatnonzero(np.asarray(model(x + square)).argmax(axis=-1) != int(y[0]))
        if not len(flips) or (near := np.abs(square[flips]).max(axis=1).min()) < 0.1:
            continue
        count += 1
        low, ended = searched(kind, model, x, y, 1.02 * near, seconds=1.0)
        assert low <= 0
        assert ended != "closed"
        low, ended = searched(kind, model, x, y, share * near, seconds=2.0)
        inside = np.asarray(model(x + share * near * square))
        assert low <= np.min(inside[:, int(y[0])] - inside[:, 1 - int(y[0])])
        assert (low > 0) == (ended == "closed")
        proved += ended == "closed"
    assert proved >= least
    assert len(halved) > 20


class Closing:
    """A search that closes the functions ``rows`` in its second turn, and counts its leaves."""

    share = 0.0

    def __init__(self, low, rows, ended):
        self.low, self.rows, self.ended, self.turns, self.told = low, rows, ended, 0, []

    def run(self, until):
        time.sleep(0.01)
        self.turns += 1
        changed = self.low.copy()
        changed[self.rows] = parts.PROVED if self.turns > 1 else -1.0
        return sign_search.Searched(changed, "time" if self.turns < 3 else self.ended, 5, None)

    def close(self, row):
        self.told.append(row)


def test_searches_in_turn_share_what_they_close():
    """Four functions; each search closes one, one stays open and counts."""
    low, rows = np.array([-1.0, -2.0, -3.0, -4.0, np.inf]), np.arange(4)
    early, part = Closing(low, [1], "nothing to split"), Closing(low, [2], "closed")
    whole = Closing(low, [3], "time")
    known = sign_search.Searched(low, "time", 0, None)
    searches = [early, part, whole]
    found = in_turn._in_turn(searches, rows, known, time.monotonic() + 0.5, 0.01)
    assert found.ended == "time"
    assert found.leaves == 15
    np.testing.assert_array_equal(found.low[:1], [-1.0])
    np.testing.assert_array_equal(found.low[1:4], [parts.PROVED] * 3)
    assert [sorted(one.told) for one in searches] == [[1, 2, 3]] * 3
    assert (early.turns, part.turns) == (3, 3)
    assert whole.turns > 3


@pytest.mark.parametrize(
    ("until", "crowded", "taken"),
    [(1000.0, False, 115.0), (90.0, False, 90.0), (1000.0, True, 101.0)],
)
def test_a_search_that_is_expected_to_end_gets_its_time(until, crowded, taken, monkeypatch):
    """A search that needs 100 seconds, beside one that never ends, by a clock that they move.

    It takes 1 + 1, 2, 4 and 8 seconds in four turns, and then all of the 84 that are left; and all
    of them at once where the other has too many open leaves and gained nothing in its first turn.
    """
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(in_turn, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Steady(Closing):
        def run(self, until):
            took = min(until - clock.now, 100 * (1 - self.share))
            clock.now, self.share = clock.now + took, self.share + took / 100
            done = self.share > 1 - 1e-9
            return sign_search.Searched(self.low + 2 * done, "closed" if done else "time", 1, None)

    def endless(frontier, until):
        clock.now = until
        return known

    low = np.array([-1.0])
    known = sign_search.Searched(low, "time", 1, None)
    frontier = SimpleNamespace(crowded=crowded, low=lambda: low, close=lambda row: None)
    whole = in_turn._Whole(SimpleNamespace(run=endless), frontier)
    searches = [Steady(low, [0], ""), whole]
    found = in_turn._in_turn(searches, np.arange(1), known, until, 1.0)
    assert clock.now == pytest.approx(taken)
    assert found.ended == ("closed" if taken < until else "time")


def test_the_youngest_leaves_are_taken_while_the_open_ones_fill_half_of_the_memory():
    """Before that those with the least bounds; no leaf is lost."""
    begun = leaves.Leaves(np.zeros(1, int), *np.zeros((4, 1, 3)))
    frontier = sign_search.Frontier(np.array([-9.0]), begun)
    frontier.most = 20
    (first,) = frontier.open
    for low in range(-8, 0):
        frontier.add(first._replace(low=float(low)))
    frontier.take(2)
    assert not frontier.crowded
    assert [leaf.low for leaf in frontier.taken] == [-9.0, -8.0]
    for leaf in [*frontier.taken, first._replace(low=-5.5)]:
        frontier.add(leaf)
    frontier.take(3)
    assert frontier.crowded
    assert [leaf.low for leaf in frontier.taken] == [-9.0, -8.0, -5.5]
    assert sorted(leaf.low for leaf in frontier.open) == [-7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0]
    assert frontier.open[0].low == -7.0
    assert frontier.low() == -9.0


def test_a_function_closed_elsewhere_holds_no_subdomain_open():
    low, rows = np.array([-1.0, -1.0]), np.arange(2)
    maps = ({3: np.zeros(3)} for _ in range(3))
    given = sign_search.SignSearch(None, None, None, leaves.RootBounds(low, *maps), None)
    search = subdomains.SubdomainSearch(given, rows, low)
    search.open = [
        search.open[0]._replace(low=np.array(one)) for one in ([2.0, -3.0], [-4.0, 5.0], [6.0, 7.0])
    ]
    cells, search.open = search.open, []
    for one in cells:
        search._keep(one._replace(entry=0))
    assert [one.low.tolist() for one in search.open] == [[2.0, -3.0], [-4.0, 5.0]]
    search.close(1)
    assert [one.low.tolist() for one in search.open] == [[-4.0, 5.0]]
    np.testing.assert_array_equal(search._outcome("time").low, [-1.0, -1.0])
    np.testing.assert_array_equal(search.closed, [2.0, -3.0])


def test_subdomains_that_close_nothing_end_where_another_search_goes_on(monkeypatch):
    low, rows = np.array([-1.0, -2.0]), np.arange(2)
    monkeypatch.setattr(in_turn, "SubdomainSearch", Closing)
    many = in_turn._DEEP * sign_search.width()
    tried = itertools.product((0.0, 1e-9, 0.5), (many - 1, many), (0, 1))
    for share, bounded, others in tried:
        early, whole = Closing(low, [], "time"), Still(low)
        early.share, early.bounded = share, bounded
        known = sign_search.Searched(low, "time", 0, None)
        searches = [early, whole][: 1 + others]
        in_turn._in_turn(searches, rows, known, time.monotonic() + 0.3, 0.01)
        turns = 1 if share == 0 and bounded >= many else in_turn._TURNS
        # The first turn is taken again, since it may have compiled.
        assert (early.turns == turns + 1) == (others == 1 and share < 0.5)


class Still:
    """A search that goes on and closes nothing."""

    share = 0.0

    def __init__(self, low):
        self.low = low

    def run(self, until):
        time.sleep(0.01)
        return sign_search.Searched(self.low, "time", 5, None)

    def close(self, row):
        raise AssertionError
