"""Properties: verdicts against exact optima, planted violations, and what is refused."""

import itertools
import math
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from wdjax import Model, certify
from wdjax.bounds import leaves, linear_outputs
from wdjax.certify import (
    Specification,
    falsify,
    halving,
    in_turn,
    parts,
    properties,
    property,
    signs,
)
from wdjax.certify.signs import Searched

RNG = np.random.default_rng(11)
IN, WIDE, OUT = 3, 6, 2
HOW = {"seconds": 20.0}


def relu_net(w, x):
    for a, b in w[:-1]:
        x = jax.nn.relu(x @ a + b)
    return x @ w[-1][0] + w[-1][1]


def random_net(seed, sizes=(IN, WIDE, WIDE, OUT)):
    rng = np.random.default_rng(seed)
    return tuple(
        (rng.normal(size=(m, n)).astype("f4"), rng.normal(size=n).astype("f4"))
        for m, n in itertools.pairwise(sizes)
    )


def least(w, lower, upper, row):
    """The minimum of ``row . y`` over a box, and where: a mixed integer program, by HiGHS."""
    ends, blocks, integers = [(low, high) for low, high in zip(lower, upper)], [], [0] * IN
    left, right = np.asarray(lower, float), np.asarray(upper, float)
    offset = 0  # Of the layer's inputs among the variables.
    for a, b in ((np.asarray(a, float), np.asarray(b, float)) for a, b in w[:-1]):
        low = np.maximum(a, 0).T @ left + np.minimum(a, 0).T @ right + b
        high = np.maximum(a, 0).T @ right + np.minimum(a, 0).T @ left + b
        m, n = a.shape
        place = len(ends)
        for k in range(n):
            # v >= z, v <= z - low (1 - d), v <= high d, with d whether the neuron is on.
            ends += [(0, max(high[k], 0)), (0, 1)]
            integers += [0, 1]
            v, d = place + 2 * k, place + 2 * k + 1
            stretch = min(low[k], 0.0)
            inputs = [(offset + (2 * i if offset else i), a[i, k]) for i in range(m)]
            blocks.append(({v: 1, **{i: -c for i, c in inputs}}, b[k], np.inf))
            blocks.append(
                ({v: 1, d: -stretch, **{i: -c for i, c in inputs}}, -np.inf, b[k] - stretch)
            )
            blocks.append(({v: 1, d: -max(high[k], 0)}, -np.inf, 0))
        left, right, offset = np.maximum(low, 0), np.maximum(high, 0), place
    matrix = np.zeros((len(blocks), len(ends)))
    for place, (terms, _, _) in enumerate(blocks):
        for i, c in terms.items():
            matrix[place, i] += c
    a, b = (np.asarray(t, float) for t in w[-1])
    cost = np.zeros(len(ends))
    cost[offset::2] = a @ row
    found = scipy.optimize.milp(
        cost,
        constraints=scipy.optimize.LinearConstraint(
            matrix, [t[1] for t in blocks], [t[2] for t in blocks]
        ),
        bounds=scipy.optimize.Bounds(*np.array(ends, float).T),
        integrality=integers,
        options={"mip_rel_gap": 0.0},
    )
    return found.fun + b @ row, found.x[:IN]


class Idle:
    """A search that finds nothing."""

    share = 0.0

    def __init__(self, given, rows, low):
        self.low = low

    def run(self, until):
        return Searched(self.low, "nothing to split", 0, None)

    def close(self, row):
        pass


@pytest.mark.parametrize("by", ["inputs", "leaves", "parts", "subdomains"])
def test_verdicts_agree_with_a_mixed_integer_program(by, monkeypatch):
    """Violations hidden by 1e-3 of the range of outputs are found, and none is found where the
    least value is above the bound by as much; by halved boxes, by leaves within CROWN's bounds, and
    by both searches that bound operands anew, each beside that of the whole region alone."""
    if by != "inputs":
        monkeypatch.setattr(sys.modules["wdjax.certify.properties"], "_FEW", 0)
    if by == "leaves":
        monkeypatch.setattr(in_turn, "_SMALL", 0)
    if by in ("parts", "subdomains"):
        monkeypatch.setattr(in_turn, "_FIRST", 1e-3)
        monkeypatch.setattr(in_turn, "_DEAR", math.inf)
        monkeypatch.setattr(in_turn, "_Parts" if by == "subdomains" else "SubdomainSearch", Idle)
        monkeypatch.setattr(parts, "_FEW", 1)
    row = np.array([1.0, -1.0])
    for seed in range(8):
        net = random_net(seed)
        model, box = Model(relu_net, net), (-np.ones(IN), np.ones(IN))
        low, point = least(net, *box, row)
        own = float(np.asarray(model(jnp.asarray(point[None], jnp.float32)))[0] @ row)
        assert abs(own - low) < 1e-3, "the oracle is wrong"
        for gap, expected in ((1e-2, "violated"), (-1e-2, "holds")):
            found = property(model, *box, Specification([(row[None], [low + gap])]), **HOW)
            assert found.status == expected, (seed, gap, found)
            if expected == "violated":
                assert np.all((found.witness >= -1) & (found.witness <= 1))
                again = np.asarray(model(found.witness[None]))[0]
                np.testing.assert_allclose(again, found.output, rtol=1e-5, atol=1e-5)
                assert float(found.output.astype(float) @ row) <= low + gap


class Proving(Idle):
    """A search that closes all functions."""

    def __init__(self, given, rows, low):
        self.low = np.where(np.isin(np.arange(len(low)), rows), 1.0, low)

    def run(self, until):
        return Searched(self.low, "closed", 1, None)


@pytest.mark.parametrize("most", [in_turn._SMALL, 0])
def test_leaves_are_not_bounded_if_subdomains_of_a_small_net_suffice(most, monkeypatch):
    monkeypatch.setattr(sys.modules["wdjax.certify.properties"], "_FEW", 0)
    monkeypatch.setattr(in_turn, "_SMALL", most)
    monkeypatch.setattr(in_turn, "SubdomainSearch", Proving)
    batches, asked, bounds, root = [], [], leaves.bounds, leaves.root

    def counted(*args, **options):
        batches.append(args)
        return bounds(*args, **options)

    def noted(model, problem, norm, method="alpha"):
        asked.append(method)
        return root(model, problem, norm, method)

    monkeypatch.setattr(leaves, "bounds", counted)
    monkeypatch.setattr(leaves, "root", noted)
    row, box = np.array([1.0, -1.0]), (-np.ones(IN), np.ones(IN))
    low, _ = least(random_net(0), *box, row)
    target = Specification([(row[None], [low - 1e-2])])
    found = property(Model(relu_net, random_net(0)), *box, target, **HOW)
    assert found.status == "holds"
    assert bool(batches) == (most == 0)
    assert asked == ["crown"] + ["alpha"] * (most == 0)


@pytest.mark.parametrize(("gap", "methods"), [(-0.5, ["crown"]), (1e-2, ["crown", "alpha"])])
def test_slopes_of_all_layers_are_optimised_only_if_splits_within_crown_do_not_suffice(
    gap, methods, monkeypatch
):
    """Whether a bound below the least value is proved; one above it is not, and no point is looked
    at here that would show it."""
    monkeypatch.setattr(sys.modules["wdjax.certify.properties"], "_FEW", 0)
    monkeypatch.setattr(in_turn, "_SMALL", 0)
    monkeypatch.setattr(falsify, "witness", lambda *_: None)
    monkeypatch.setattr(in_turn, "search", lambda *a: Searched(a[5], "time", 0, None))
    asked, root = [], leaves.root

    def noted(model, problem, norm, method="alpha"):
        asked.append(method)
        return root(model, problem, norm, method)

    monkeypatch.setattr(leaves, "root", noted)
    row, box = np.array([1.0, -1.0]), (-np.ones(IN), np.ones(IN))
    low, _ = least(random_net(0), *box, row)
    target = Specification([(row[None], [low + gap])])
    found = property(Model(relu_net, random_net(0)), *box, target, seconds=100.0)
    assert asked == methods
    assert found.status == ("holds" if gap < 0 else "unknown")


@pytest.mark.parametrize("gap", [-0.1, 0.1])
def test_boxes_are_halved_when_leaves_fill_the_memory(gap, monkeypatch):
    """So that the answer is not "unknown" before the time is over."""
    monkeypatch.setattr(sys.modules["wdjax.certify.properties"], "_FEW", 0)
    monkeypatch.setattr(in_turn, "_SMALL", 0)
    monkeypatch.setattr(in_turn, "_Parts", Idle)
    monkeypatch.setattr(in_turn, "SubdomainSearch", Idle)
    monkeypatch.setattr(signs, "MEMORY", 1)
    row, box = np.array([1.0, -1.0]), (-np.ones(IN), np.ones(IN))
    low, _ = least(random_net(0), *box, row)
    target = Specification([(row[None], [low + gap])])
    found = property(Model(relu_net, random_net(0)), *box, target, **HOW)
    assert found.status == ("violated" if gap > 0 else "holds")
    assert found.by in ("attack", "inputs")


def test_no_box_has_no_halves():
    """A proof's checker may close all that the bounds left open."""
    none = halving._none(np.zeros((2, 3)))
    for boxes in halving._halved(none, np.zeros((0, 6)), 8):
        assert boxes.lower.shape == boxes.upper.shape == (0, 2, 3)
        assert len(boxes.low) == len(boxes.node) == 0


@pytest.mark.parametrize("members", [1, 3])
def test_an_attack_is_far_only_where_no_linear_function_is_violated(members):
    """``far`` is estimated from random corners, so the bound is moved by a tenth of the range."""
    rng = np.random.default_rng(members)
    for _ in range(20):
        w = rng.normal(size=(6, members)).astype(np.float32)
        low, high = np.zeros(6, np.float32), rng.uniform(0.1, 1.0, 6).astype(np.float32)
        high[0] = 0.0  # An input that does not vary.
        least_values = np.minimum(w * high[:, None], 0).sum(axis=0)
        ranges = np.abs(w * high[:, None]).sum(axis=0)
        model = Model(lambda w, x: x @ w, jnp.asarray(w))
        for gap, far in ((-2.0, True), (0.1, False)):
            level = least_values + gap * ranges
            target = Specification([(row[None], [b]) for row, b in zip(np.eye(members), level)])
            drawn = falsify.drawn(model, target, low, high, 4, jax.random.key(0))
            assert drawn.far == far


def test_gradients_are_not_followed_where_bounds_prove_what_random_points_suggest(monkeypatch):
    monkeypatch.setattr(sys.modules["wdjax.certify.properties"], "_FEW", 0)
    climbed, climb = [], falsify._climbed

    def noted(*args):
        climbed.append(args)
        return climb(*args)

    monkeypatch.setattr(falsify, "_climbed", noted)
    row, box = np.array([1.0, -1.0]), (-np.ones(IN), np.ones(IN))
    low, _ = least(random_net(0), *box, row)
    for gap, times in ((-100.0, 0), (-1e-2, 1)):
        target = Specification([(row[None], [low + gap])])
        assert property(Model(relu_net, random_net(0)), *box, target, **HOW).status == "holds"
        assert len(climbed) == times


def test_no_program_of_leaves_is_compiled_when_subdomains_used_the_time_up(monkeypatch):
    """The search says that the time is over, and no bound is lost."""

    class Slow(Idle):
        def run(self, until):
            time.sleep(0.3)
            return Searched(self.low, "nothing to split", 7, None)

    def refused(*args, **options):
        raise AssertionError("leaves are bounded")

    monkeypatch.setattr(in_turn, "SubdomainSearch", Slow)
    monkeypatch.setattr(leaves, "bounds", refused)
    row = np.array([1.0, -1.0], np.float32)
    model, box = Model(relu_net, random_net(0)), (-jnp.ones(IN), jnp.ones(IN))
    least_value, _ = least(random_net(0), -np.ones(IN), np.ones(IN), row)
    rows = linear_outputs.objectives(row[None], [least_value - 1e-2], np.float32)
    problem = leaves.of_box(*box, rows)
    root = leaves.root(model, problem, math.inf)
    low, until = np.asarray(root.low), time.monotonic() + 0.2
    assert low[0] < 0
    found = in_turn.search(model, problem, math.inf, root, np.arange(1), low, until, None)
    assert (found.ended, found.leaves) == ("time", 7)
    np.testing.assert_array_equal(found.low, low)


def smooth_net(w, x):
    (a, b), (c, d) = w
    return jnp.tanh(jax.nn.sigmoid(x @ a + b) @ c + d)


def conv_net(w, x):
    maps = jax.lax.conv_general_dilated(
        x.reshape(-1, 3, 3, 1), w[0], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(maps).reshape(len(x), -1) @ w[1]


NETS = {
    "mlp": Model(relu_net, random_net(100)),
    "smooth": Model(smooth_net, random_net(101, (IN, 4, OUT))),
    "conv": Model(conv_net, tuple(
        jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((2, 2, 1, 2), (8, OUT))
    )),
}  # fmt: skip


@pytest.mark.parametrize("method", certify.LADDERS)
@pytest.mark.parametrize("name", NETS)
def test_a_planted_violation_is_never_proved_away(name, method):
    """The level is the least of 20,000 random outputs, plus a little: a violation exists."""
    model, size = NETS[name], 9 if name == "conv" else IN
    x = RNG.uniform(-1, 1, (20_000, size)).astype("f4")
    out = np.asarray(model(jnp.asarray(x))).astype(float)
    value = out[:, 0] - out[:, 1]
    rows = np.array([[1.0, -1.0]])
    levels = [np.min(value) + hidden for hidden in (1e-6, 1e-4, 1e-2)]
    specs = [Specification([(rows, [level])]) for level in levels]
    box = -np.ones((3, size)), np.ones((3, size))
    verdicts = properties(model, *box, specs, method=method, seconds=1.0)
    assert "holds" not in [verdict.status for verdict in verdicts]
    assert verdicts[-1].status == "violated"


def test_disjunctions_conjunctions_and_equality():
    """y = x: forbidden sets are intervals of the line."""
    line = Model(lambda _, x: x, jnp.zeros(1))
    both = Specification([([[1.0], [-1.0]], [0.75, -0.5])])  # 0.5 <= y <= 0.75
    either = Specification([([[1.0]], [-1.0]), ([[-1.0]], [-2.0])])  # y <= -1 or y >= 2

    def ask(low, high, spec):
        return property(line, np.array([low]), np.array([high]), spec, **HOW).status

    assert ask(0.0, 0.45, both) == ask(0.8, 1.0, both) == "holds"
    assert ask(0.0, 0.5, both) == ask(0.7, 0.7, both) == ask(0.0, 1.0, both) == "violated"
    assert ask(-0.9, 1.9, either) == "holds"
    assert ask(-0.9, 2.0, either) == ask(-1.0, 0.0, either) == "violated"


def test_helpers_decide_what_they_say():
    lower, upper = np.array([0.0]), np.array([1.0])
    assert property(jnp.sin, lower, upper, certify.in_range([-0.1], [0.9]), **HOW).status == "holds"
    wide = certify.in_range([-math.inf], [0.8])
    assert property(jnp.sin, lower, upper, wide, **HOW).status == "violated"
    for delta, status in ((0.1, "holds"), (0.06, "violated")):  # sin(1) - tanh(1) is 0.08.
        function, spec = certify.agree(jnp.sin, jnp.tanh, delta + (delta < 0.1) * 0.01, 1)
        assert property(function, lower, upper, spec, **HOW).status == status
    slope, spec = certify.monotone(lambda x: x**3 - x, (0,))
    assert property(slope, lower, upper, spec, **HOW).status == "violated"
    assert property(slope, np.array([0.6]), upper, spec, **HOW).status == "holds"


JUMPS = {
    "convert_element_type": lambda x: x - 3 * (x > 0.5),
    "floor": lambda x: x - jnp.floor(2 * x),
    "select_n": lambda x: jnp.where(x > 0.5, x - 3, x),
    "sign": lambda x: x - jnp.sign(x - 0.3),
    "round": lambda x: x - jnp.round(2 * x),
}


@pytest.mark.parametrize("name", JUMPS)
def test_no_slope_tells_whether_a_function_that_jumps_is_monotone(name):
    slope, spec = certify.monotone(JUMPS[name], (0,))
    with pytest.raises(ValueError, match=f"{name}.* slope does not tell"):
        property(slope, np.zeros(1), np.ones(1), spec, **HOW)


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (lambda x: jnp.where(jnp.isnan(jnp.log(x - 0.25)), 1.0, x), False),
        (lambda x: jnp.where(jnp.isfinite(jnp.exp(400 * x)), x, 0.0), False),
        (lambda x: jax.nn.softplus(x) + x, True),
    ],
)
def test_slopes_of_what_tests_for_nan(function, known):
    """It may jump, unless only a NaN of the input could be one."""
    slope, spec = certify.monotone(function, (0,))
    ends = np.full(1, 0.1), np.full(1, 0.9)
    if known:
        assert property(slope, *ends, spec, **HOW).status == "holds"
        return
    with pytest.raises(ValueError, match="a test for NaN"):
        slope(jnp.full((1, 1), 0.5))
    assert property(slope, *ends, spec, seconds=2.0).status != "holds"


def test_slopes_that_are_not_the_functions_are_refused():
    @jax.custom_vjp
    def lying(x):
        return -x

    lying.defvjp(lambda x: (-x, None), lambda _, g: (g,))
    slope, spec = certify.monotone(lying, (0,))
    with pytest.raises(ValueError, match="slope does not tell"):
        property(slope, np.zeros(1), np.ones(1), spec, **HOW)


def test_stopped_gradients_are_not_stopped():
    """As in softmax, whose shift by the maximum does not matter, and elsewhere does."""
    slope, spec = certify.monotone(lambda x: x - jax.lax.stop_gradient(2 * x), (0,))
    assert property(slope, np.zeros(1), np.ones(1), spec, **HOW).status == "violated"
    slope, _ = certify.monotone(jax.nn.softmax, (1,), output=1)
    x = jnp.array([[0.3, 0.9, 0.1]])
    p = jax.nn.softmax(x)[0, 1]
    assert float(slope(x)[0, 0]) == pytest.approx(float(p * (1 - p)), abs=1e-6)


def test_slopes_of_a_relu_net_are_bounded():
    """|x| + x / 2 of both entries: its slopes are -1/2 and 3/2, and all between them at 0."""
    w = np.kron(np.eye(2), [[1, -1]]).astype("f4"), np.array([[1.5], [0.5], [1.5], [0.5]], "f4")
    net = Model(lambda w, x: jax.nn.relu(x @ w[0]) @ w[1], w)
    slope, spec = certify.monotone(net, (0,))
    ends = np.array([-1.0, -1.0]), np.array([1.0, 1.0])
    assert property(slope, np.array([0.1, -1.0]), ends[1], spec, **HOW).status == "holds"
    found = property(slope, *ends, spec, **HOW)
    assert found.status == "violated"
    assert found.witness[0] <= 0
    loose, spec = certify.monotone(net, (0,), slack=0.6)
    assert property(loose, *ends, spec, **HOW).status == "holds"


def test_a_witness_lies_between_ends_that_are_no_floats():
    lower, upper = np.array([0.1, 0.3, 1.0]), np.array([0.2, 0.3, 1.0 + 1e-12])
    model = Model(lambda w, x: x @ w, jnp.ones((3, 1)))
    found = property(model, lower, upper, certify.in_range([0.0], [1.0]), **HOW)
    assert found.status == "violated"
    assert lower[0] <= float(found.witness[0]) <= upper[0]
    assert found.witness[1] == np.float32(0.3)
    assert found.witness[2] == 1.0


def test_nothing_holds_because_something_went_wrong():
    """NaN, infinities, a domain that is left, and a time that is over."""
    lower, upper = np.array([-1.0]), np.array([1.0])
    never = certify.in_range([-100.0], [100.0])
    for broken in (
        lambda x: jnp.log(x),
        lambda x: x / (x - x),
        lambda x: x * jnp.nan,
    ):
        found = property(broken, lower, upper, never, seconds=0.5)
        assert found.status == "unknown"
        assert not found.bound > 0
    pole = property(lambda x: 1 / x, lower, upper, never, seconds=0.5)
    assert pole.status in ("unknown", "violated"), "it exceeds 100 near 0"
    net = NETS["mlp"]
    box = -np.ones(IN), np.ones(IN)
    found = property(net, *box, certify.in_range([-1e3, -1e3], [1e3, 1e3]), seconds=1e-9)
    assert found.status == "unknown"
    assert found.by == "time"


def test_many_properties_are_each_alone():
    lower = RNG.uniform(-1, 0, (4, IN))
    upper = lower + RNG.uniform(0, 0.5, (4, IN))
    specs = [certify.in_range([-2.0 - i, -math.inf], [3.0 + i, 5.0]) for i in range(4)]
    together = properties(NETS["mlp"], lower, upper, specs, **HOW)
    alone = [property(NETS["mlp"], *row, **HOW) for row in zip(lower, upper, specs)]
    assert [v.status for v in together] == [v.status for v in alone]
    assert properties(NETS["mlp"], lower[:2], upper[:2], specs[0], **HOW)[0].status in (
        "holds", "violated",
    )  # fmt: skip


def test_what_may_not_be_is_refused():
    net, spec = NETS["mlp"], certify.label_wins(0, OUT)
    low, high = -np.ones(IN), np.ones(IN)
    wrong = [
        ((high, low, spec), "the box is empty"),
        ((low[:2], high, spec), "one shape"),
        ((low * np.inf, high, spec), "finite"),
        ((low, high * np.nan, spec), "finite"),
        ((low, np.array(["a"] * IN), spec), "numbers"),
        ((low, high, certify.label_wins(0, 3)), "must return floats"),
        ((low, high, [([[1.0, 0.0]], [0.0])]), "must be a Specification"),
    ]
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            property(net, *given)
    for how, message in (
        ({"method": "bab"}, "method must be"),
        ({"seconds": 0.0}, "seconds must be"),
        ({"seconds": math.nan}, "seconds must be"),
        ({"key": 0}, "key must be"),
    ):
        with pytest.raises(ValueError, match=message):
            property(net, low, high, spec, **how)
    with pytest.raises(ValueError, match="host"):
        jax.jit(lambda low: property(net, low, high, spec).bound)(low)
    mixed = Model(lambda w, x: x - jnp.mean(x, axis=0), jnp.zeros(1))
    with pytest.raises(ValueError, match="other"):
        property(mixed, low[:2], high[:2], spec)
    for members in ((), [([[1.0]], [1.0, 2.0])], [([[math.nan]], [0.0])], [([["x"]], [0.0])]):
        with pytest.raises(ValueError, match="specification"):
            Specification(members)
    for ends in ((2.0, 1.0), (-math.inf, math.inf), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="lower and upper"):
            certify.in_range([ends[0]], [ends[1]])
    with pytest.raises(ValueError, match="label must be"):
        certify.label_wins(2, 2)
