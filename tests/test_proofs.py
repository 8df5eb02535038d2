"""Proofs of verdicts: the checker against linear programs, exact numbers, and forgeries."""

import ast
import io
import itertools
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save
from scipy.optimize import linprog

import wdjax.proofs
from wdjax import certify
from wdjax.cli import main
from wdjax.files import vnnlib_file
from wdjax.models import convert
from wdjax.proofs import checker, curves, recorder
from wdjax.proofs.real_net import RealNet

ROOM = Path(wdjax.proofs.__file__).parent
ALLOWED = {"wdjax.files", "wdjax.files.state_pickle", "wdjax.proofs", "wdjax.proofs.real_net"}
ALLOWED |= {"numpy"}
EXACT = {
    "Relu": lambda z: max(z, type(z)(0)),
    "Sigmoid": lambda z: 1 / (1 + mp.exp(-z)),
    "Tanh": mp.tanh,
}
"""The curves, of fractions or of mpmath's numbers."""


def written(path, shape, nodes, tensors):
    """An ONNX file of one input ``x`` and one output ``y``."""
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    ends += [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "k"])]
    arrays = [numpy_helper.from_array(np.asarray(t), name) for name, t in tensors.items()]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], arrays)
    opset = [helper.make_opsetid("", 17)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


def dense(path, widths, seed, scale=1.0, shift=0.0, kinds=("Relu",)):
    """A random net of dense layers, its outputs moved; returns the file and its layers.

    ``kinds`` are those of its curves, in turn.
    """
    rng = np.random.default_rng(seed)
    layers = [
        (
            (scale * rng.normal(size=(m, n)) / np.sqrt(n)).astype(np.float32),
            (scale * rng.normal(size=m) / 2).astype(np.float32),
        )
        for n, m in itertools.pairwise(widths)
    ]
    layers[-1] = layers[-1][0], layers[-1][1] + np.float32(shift)
    nodes, tensors, value = [], {}, "x"
    for i, (w, b) in enumerate(layers):
        tensors |= {f"w{i}": w, f"b{i}": b}
        out = "y" if i == len(layers) - 1 else f"z{i}"
        nodes.append(helper.make_node("Gemm", [value, f"w{i}", f"b{i}"], [out], transB=1))
        if out != "y":
            kind = kinds[i % len(kinds)]
            nodes.append(helper.make_node(kind, [out], [value := f"h{i}"]))
    return written(path, [1, widths[0]], nodes, tensors), layers


def residual(path, seed):
    """A small residual net: normalised input, convolutions of stride 2, a sum, a dense layer."""
    rng = np.random.default_rng(seed)
    tensors = {
        "mean": np.full((1, 1, 1, 1), 0.5, np.float32),
        "std": np.full((1, 1, 1, 1), 0.3, np.float32),
        "k1": rng.normal(size=(2, 1, 3, 3)).astype(np.float32) / 2,
        "c1": rng.normal(size=2).astype(np.float32) / 4,
        "k2": rng.normal(size=(2, 2, 3, 3)).astype(np.float32) / 4,
        "scale": np.array([1.1, 0.7], np.float32), "shift": np.array([0.1, -0.1], np.float32),
        "mu": np.array([0.0, 0.2], np.float32), "var": np.array([0.9, 1.3], np.float32),
        "w": rng.normal(size=(3, 18)).astype(np.float32) / 4, "b": np.zeros(3, np.float32),
    }  # fmt: skip
    node = helper.make_node
    nodes = [
        node("Sub", ["x", "mean"], ["u"]), node("Div", ["u", "std"], ["v"]),
        node("Conv", ["v", "k1", "c1"], ["z1"], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Relu", ["z1"], ["h1"]),
        node("Conv", ["h1", "k2"], ["z2"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["z2", "scale", "shift", "mu", "var"], ["n2"], epsilon=1e-3),
        node("Add", ["n2", "h1"], ["s2"]), node("Relu", ["s2"], ["h2"]),
        node("Flatten", ["h2"], ["f"]), node("Gemm", ["f", "w", "b"], ["y"], transB=1),
    ]  # fmt: skip
    return written(path, [1, 1, 5, 5], nodes, tensors)


def stated(path, lower, upper, rows):
    """A property: the box, and alternatives ``[(a, b), ...]`` of conjunctions ``a . y <= b``."""
    outputs = len(rows[0][0][0])
    lines = [f"(declare-const X_{i} Real)" for i in range(len(lower))]
    lines += [f"(declare-const Y_{i} Real)" for i in range(outputs)]
    lines += [f"(assert (>= X_{i} {v!r}))" for i, v in enumerate(map(float, lower))]
    lines += [f"(assert (<= X_{i} {v!r}))" for i, v in enumerate(map(float, upper))]

    def atom(a, b):
        terms = " ".join(f"(* {float(v)!r} Y_{k})" for k, v in enumerate(a))
        return f"(<= (+ {terms}) {float(b)!r})"

    members = " ".join(f"(and {' '.join(atom(*row) for row in member)})" for member in rows)
    path.write_text("\n".join([*lines, f"(assert (or {members}))"]))
    return path


def outputs(layers, x, kinds=("Relu",)):
    """The exact outputs of a dense net, and all operands of its curves: fractions if these are
    rectifiers, else with 50 digits."""
    number = Fraction if set(kinds) == {"Relu"} else mp.mpf
    with mp.workdps(50):
        h, operands = [number(float(v)) for v in x], []
        for i, (w, b) in enumerate(layers):
            rows = [[number(float(v)) for v in row] for row in w]
            z = [sum(map(lambda p, q: p * q, row, h), number(float(c))) for row, c in zip(rows, b)]
            if i == len(layers) - 1:
                return z, operands
            operands += z
            h = [EXACT[kinds[i % len(kinds)]](v) for v in z]
    raise AssertionError


def case(net, lower, upper, rows):
    members = [(np.array([a for a, _ in row]), np.array([b for _, b in row])) for row in rows]
    made = checker.ProofCase(RealNet(net), np.asarray(lower), np.asarray(upper), members)
    made.begin(np.zeros(0, int), np.zeros((0, 2, made.net.neurons)))
    return made


# What a leaf's numbers are worth.


def relaxed(made, layers, path, a):
    """HiGHS's minimum of ``a . y`` over a leaf, rectifiers as triangles; multipliers of neurons."""
    inputs, neurons = made.net.inputs, made.net.neurons
    signs = {place - inputs: side for place, _, side in path if place >= inputs}
    total = inputs + 2 * neurons  # The input, operands, values.
    equal, right, less, most = [], [], [], []
    begin, before, width = 0, 0, inputs
    ends = np.concatenate(made.known)
    for n, sign in signs.items():
        ends[:, n] = np.clip(ends[:, n], *((0, np.inf) if sign > 0 else (-np.inf, 0)))
    bounds = [*zip(*made.box), *ends.T, *[(None, None)] * neurons]
    for w, b in layers[:-1]:
        for i, (row, c) in enumerate(zip(w, b)):
            n, line = begin + i, np.zeros(total)
            line[inputs + n], line[before : before + width] = 1.0, -row
            equal.append(line), right.append(c)
            low, high = ends[:, n]
            z, h = np.eye(total)[inputs + n], np.eye(total)[inputs + neurons + n]
            if sign := signs.get(n, 0):
                equal.append(h - (sign > 0) * z), right.append(0.0)
            elif low >= 0 or high <= 0:
                equal.append(h - (low >= 0) * z), right.append(0.0)
            else:
                less += [z - h, -h, h - high / (high - low) * z]
                most += [0.0, 0.0, -low * high / (high - low)]
        begin, before, width = begin + len(b), inputs + neurons + begin, len(b)
    cost = np.zeros(total)
    w, b = layers[-1]
    cost[before : before + width] = a @ w.astype(float)
    less, most = (np.array(less), most) if less else (None, None)
    found = linprog(cost, less, most, np.array(equal), right, bounds)
    if not found.success:
        return np.inf, np.zeros((1, neurons))
    betas = -(found.lower.marginals + found.upper.marginals)[inputs : inputs + neurons]
    return found.fun + a @ b.astype(float), betas[None]


@pytest.mark.parametrize(
    ("kind", "off"), [*((kind, 1.0) for kind in EXACT), ("Sigmoid", 0.6), ("Tanh", 1.5)]
)
def test_lines_hold_what_is_exact_and_the_usual_ones_are_good(kind, off, monkeypatch):
    """For any slopes and intervals, and also where a line touches the curve elsewhere than it
    should; the usual line is the best in the middle, by brute force."""
    inverse = np.arctanh
    monkeypatch.setattr(curves.np, "arctanh", lambda t: off * inverse(t))
    rng, ends = np.random.default_rng(0), lambda z: np.array([[z]])
    for turn in range(150):
        low = rng.normal() * 10.0 ** rng.uniform(-3, 2)
        high = low + (turn % 7 > 0) * 10.0 ** rng.uniform(-9, 3)
        slope = [-1.0, 0.0, 1.0, rng.uniform(), 10.0 ** -rng.uniform(0, 12)][turn % 5]
        box = ends(low), ends(high)
        usual = curves.usual(kind, *box)
        found = curves.lines(kind, box, usual, np.full((1, 1, 1), slope))
        under, below, over, above = (0.0 if v is None else float(np.ravel(v)[0]) for v in found)
        assert 0 <= under <= 1
        assert 0 <= over <= 1
        down, up = (float(v[0, 0]) for v in curves.values(kind, *box))
        with mp.workdps(50):
            for z in [low, high, min(max(low, 0.0), high), *rng.uniform(low, high, 10)]:
                value, z = EXACT[kind](mp.mpf(float(z))), mp.mpf(float(z))
                assert under * z + below <= value <= over * z + above
                assert down <= value <= up
        if slope < 0 and high - low > 1e-6 and off == 1:
            z = np.linspace(low, high, 1001)
            h = curves.values(kind, z, z)[0]
            tries = np.linspace(0, 1, 1001)[:, None]
            best = np.max(np.min(h - tries * z, axis=1) + tries[:, 0] * z[500])
            least = np.min(np.max(h - tries * z, axis=1) + tries[:, 0] * z[500])
            near = 5e-3 * np.ptp(h) + 1e-9
            assert under * z[500] + below >= best - near
            assert over * z[500] + above <= least + near or kind == "Relu"


@pytest.mark.parametrize("seed", range(4))
def test_bounds_of_leaves_are_below_the_linear_program_and_reach_it(tmp_path, seed):
    """Any slopes and multipliers stay below HiGHS's minimum; where all signs are given, its own
    multipliers reach it."""
    rng, a = np.random.default_rng(seed), np.array([1.0, -1.0])
    path, layers = dense(tmp_path / "net.onnx", (3, 5, 4, 2), seed)
    made = case(path, np.zeros(3), np.ones(3), [[(a, 0.0)]])
    reached = 0
    for _ in range(6):
        _, z = outputs(layers, rng.uniform(size=3))
        some = rng.choice(9, rng.integers(0, 10), replace=False)
        leaf = tuple((3 + int(n), 0.0, 1 if z[n] > 0 else -1) for n in some)
        best, betas = relaxed(made, layers, leaf, a)
        for _ in range(5):
            slopes, given = rng.uniform(size=(1, 9)), rng.normal(size=(1, 9))
            low = made.least([leaf], [[0]], np.ones((1, 1)), slopes, given)[0, 0]
            assert low <= best + 1e-9
        whole = tuple((3 + n, 0.0, 1 if z[n] > 0 else -1) for n in range(9))
        best, betas = relaxed(made, layers, whole, a)
        low = made.least([whole], [[0]], np.ones((1, 1)), np.zeros((1, 9)), betas)[0, 0]
        assert low <= best + 1e-9
        reached += bool(low > best - 1e-6)
    assert reached == 6


@pytest.mark.parametrize("scale", [1.0, 3e4, 1e-9])
def test_bounds_hold_for_the_net_in_exact_fractions(tmp_path, scale):
    """On a box of one point only rounding separates the bound from the value."""
    rng = np.random.default_rng(7)
    path, layers = dense(tmp_path / "net.onnx", (4, 6, 6, 3), 1, scale)
    for _ in range(5):
        x = rng.uniform(size=4)
        y, z = outputs(layers, x)
        a = rng.normal(size=3)
        made = case(path, x, x, [[(a, 0.0)]])
        exact = sum(Fraction(float(v)) * w for v, w in zip(a, y))
        plain = -np.ones((1, 12)), np.zeros((1, 12))
        low = made.least([()], [[0]], np.ones((1, 1)), *plain)[0, 0]
        near = float(sum(abs(v) for v in (*y, *z))) * 1e-12 + 1e-30
        assert Fraction(float(low)) <= exact
        assert low > float(exact) - near
        for down, value, up in zip(made.known[0][0], z, made.known[1][0], strict=True):
            assert Fraction(float(down)) <= value <= Fraction(float(up))


# Forgeries: the property is violated at a planted point.

MIXES = ("Relu",), ("Relu", "Tanh"), ("Sigmoid",), ("Tanh", "Sigmoid")


def violated(tmp_path, seed):
    """A net, a point of its box, and a property that this point violates by a little."""
    rng, kinds = np.random.default_rng(seed), MIXES[seed % len(MIXES)]
    path, layers = dense(tmp_path / f"{seed}.onnx", (3, 5, 5, 3), seed, kinds=kinds)
    x = rng.uniform(size=3)
    y, z = outputs(layers, x, kinds)
    rows = []
    for _ in range(2):
        a = rng.normal(size=3).round(3)
        value = float(sum(type(w)(float(v)) * w for v, w in zip(a, y)))
        rows.append((a, value + 1e-6 * rng.uniform()))
    far = [(rng.normal(size=3).round(3), -1e3)]
    stated_ = stated(tmp_path / f"{seed}.vnnlib", np.zeros(3), np.ones(3), [rows, far])
    return path, stated_, x, z, [rows, far]


@pytest.mark.parametrize("seed", range(20))
def test_no_part_with_a_violation_is_closed_or_cut_away(tmp_path, seed):
    """Whatever the splits, weights, slopes and multipliers are."""
    rng = np.random.default_rng(100 + seed)
    path, _, x, z, rows = violated(tmp_path, seed)
    made = case(path, np.zeros(3), np.ones(3), rows)
    for _ in range(10):
        leaf = []
        for place in rng.choice(13, rng.integers(0, 9)):
            at = x[place] if place < 3 else float(z[place - 3])
            value = 0.0 if place >= 3 and rng.uniform() < 0.5 else at + rng.normal() * 0.1
            leaf.append((int(place), float(value), 1 if at >= value else -1))
        weights, slopes = rng.exponential(size=(1, 3)), rng.uniform(-0.3, 1, size=(1, 10))
        given = rng.normal(size=(1, 10)) * rng.choice([1e-3, 1.0, 1e6])
        assert made.least([leaf], [[0]], weights, slopes, given)[0, 0] <= 0
        low, high = made.hull([leaf])
        assert np.all((low[0] <= x) & (x <= high[0]))


def forged(rng, net, files):
    """A proof with the right digests, of a random tree with any numbers."""
    split, at, leaves = [], [], 0

    def grow(depth):
        nonlocal leaves
        if depth == 0 or rng.uniform() < 0.2:
            split.append(-1), at.append(0.0)
            leaves += 1
            return
        split.append(int(rng.integers(net.inputs + net.neurons))), at.append(rng.uniform())
        for _ in range(2):
            grow(depth - 1)

    grow(5)
    return {
        **{name: recorder._digest(file) for name, file in files.items()},
        "format": np.array(checker.FORMAT), "trees": np.array([[0, -1, len(split)]]),
        "split": np.array(split), "at": np.array(at), "cuts": np.zeros((0, 2, net.inputs)),
        "weights": rng.exponential(size=(leaves, 3)) * 10.0 ** rng.integers(-3, 4),
        "neurons": np.arange(net.neurons), "slopes": rng.uniform(size=(leaves, net.neurons)),
        "betas": rng.normal(size=(leaves, net.neurons)), "inner": np.array([[0, 7]]),
        "inner_slopes": rng.uniform(size=(1, 2, net.neurons)),
    }  # fmt: skip


def packed(data):
    file = io.BytesIO()
    np.savez(file, **data)
    return file.getvalue()


def unpacked(content):
    with np.load(io.BytesIO(content)) as file:
        return {name: file[name] for name in file.files}


def refused(data, files, why="."):
    with pytest.raises(checker.RefusedProofError, match=why):
        checker.check(packed(data), *files.values())


@pytest.mark.parametrize("seed", range(20))
def test_no_proof_of_a_violated_property_is_accepted(tmp_path, seed):
    rng = np.random.default_rng(200 + seed)
    path, property_, *_ = violated(tmp_path, seed)
    files, net = {"model": path, "property": property_}, RealNet(path)
    for _ in range(3):
        refused(forged(rng, net, files), files)


# Proofs that searches find.


class Found:
    """A property that holds, the search's verdict, and the proof's content."""

    def __init__(self, folder, net, lower, upper, rows):
        self.files = {
            "model": net,
            "property": stated(folder / f"{net.stem}.vnnlib", lower, upper, rows),
        }
        proof, loaded = certify.Proof(*self.files.values()), convert.load_onnx(net, layout="NCHW")
        (read,) = vnnlib_file.read(self.files["property"])
        ends = (end.reshape(loaded.input_shape) for end in (read.lower, read.upper))
        spec = certify.Specification(read.members)
        self.verdict = certify.property(
            loaded.model, *ends, spec, proof=proof.cases[0], seconds=600
        )
        self.place = folder / f"{net.stem}.npz"
        proof.save(self.place)
        self.data = unpacked(self.place.read_bytes())


def margins(net, lower, upper, pairs, share):
    """Rows ``y_i - y_j <= v``, with v the least value of samples minus a share of their range."""
    made = case(net, lower, upper, [[(np.ones(3), 0.0)]])
    inside = np.random.default_rng(0).uniform(-0.5, 1.5, (4000, len(lower))).clip(0, 1)
    x = lower + inside * (upper - lower)
    ends = checker._forward(made.net, (x, x), (), None).ends
    y = ends[made.net.output][0]
    units = [np.eye(3)[i] - np.eye(3)[j] for i, j in pairs]
    least = [(y @ u).min() - share * np.ptp(y @ u) for u in units]
    return [(u, round(float(v), 4)) for u, v in zip(units, least)]


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    """Few inputs, so that boxes are halved and cut; two rows that must not hold together."""
    folder = tmp_path_factory.mktemp("halved")
    net, _ = dense(folder / "small.onnx", (3, 8, 8, 3), 3)
    lower, upper = np.zeros(3), np.ones(3)
    rows = margins(net, lower, upper, [(0, 1), (1, 2), (0, 2)], 0.02)
    return Found(folder, net, lower, upper, [rows[:2], rows[2:]])


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """Many inputs, so that rectifiers are split; a residual net of convolutions."""
    folder = tmp_path_factory.mktemp("signed")
    net = residual(folder / "residual.onnx", 1)
    lower, upper = np.full(25, 0.3), np.full(25, 0.7)
    rows = margins(net, lower, upper, [(0, 1), (0, 2)], 0.45)
    return Found(folder, net, lower, upper, [rows[:1], rows[1:]])


@pytest.fixture(scope="module")
def smooth(tmp_path_factory):
    """Many inputs and no rectifiers: other curves are split."""
    folder = tmp_path_factory.mktemp("smooth")
    net, _ = dense(folder / "smooth.onnx", (25, 6, 6, 3), 0, 3.0, kinds=("Sigmoid", "Tanh"))
    lower, upper = np.full(25, 0.35), np.full(25, 0.65)
    rows = margins(net, lower, upper, [(0, 1), (0, 2)], 0.4)
    return Found(folder, net, lower, upper, [rows[:1], rows[1:]])


@pytest.fixture(params=["halved", "signed", "smooth"])
def found(request):
    return request.getfixturevalue(request.param)


def test_what_a_search_proves_is_accepted(found):
    assert found.verdict.status == "holds"
    told = checker.check(found.place, *found.files.values())
    assert told["result"] == "unsat"
    assert told["leaves"] == len(found.data["weights"]) > 3
    with_cuts = found.verdict.by == "inputs"
    assert (len(found.data["cuts"]) > 0) == with_cuts
    assert np.any(found.data["betas"] != 0) != with_cuts


def test_a_proof_with_one_number_changed_is_refused_or_another_proof(found):
    """Numbers out of range, splits, coverage and names: refused. The property holds, so that a
    number within its range may be as good; it is then still in range."""
    data, files = found.data, found.files
    inside = int(np.flatnonzero(data["split"] >= 0)[0])
    for name in ("weights", "betas", "slopes", "inner_slopes"):
        for wrong in (-0.5, np.nan, np.inf):
            if data[name].size and not (name == "betas" and wrong < 0):
                changed = data[name].copy()
                changed.flat[changed.size // 2] = wrong
                refused({**data, name: changed}, files, "out of range")
    if data["slopes"].size:
        refused({**data, "slopes": data["slopes"] + np.float16(1.01)}, files, "out of range")
    leaf = data["split"].copy()
    leaf[inside] = -1
    refused({**data, "split": leaf}, files)
    leaf[inside] = 10**6
    refused({**data, "split": leaf}, files, "no such split")
    refused({**data, "weights": np.zeros_like(data["weights"])}, files, "not above 0")
    refused({**data, "at": np.where(data["split"] >= 0, np.nan, 0)}, files, "no such split")
    for member in (0, 1):  # One of both is missing.
        refused({**data, "trees": data["trees"] * [1, 0, 1] + [0, member, 0]}, files)
    refused({**data, "trees": data["trees"][:-1]}, files)
    for name in ("weights", "at", "neurons", "inner", "betas", "slopes"):
        if len(data[name]):
            refused({**data, name: data[name][:-1]}, files)
    refused({**data, "format": np.array(1)}, files, "format")
    refused({name: one for name, one in data.items() if name != "format"}, files, "no array named")
    if len(data["cuts"]):
        less = data["cuts"].copy()
        less[:, 1] -= 0.05
        refused({**data, "cuts": less}, files, "cut too much")
        refused({**data, "cuts": np.full_like(less, np.nan)}, files)


def test_a_proof_is_of_one_net_and_one_property(found, tmp_path):
    data, files = found.data, found.files
    for name, other in (("model", ".onnx"), ("property", ".vnnlib")):
        path = tmp_path / f"other{other}"
        content = files[name].read_bytes()
        path.write_bytes(content + (b"\n" if name == "property" else b""))
        own = files | {name: path}
        if name == "property":
            refused(data, own, "another property")
        broken = bytearray(content)
        broken[len(broken) // 2] ^= 1
        path.write_bytes(bytes(broken))
        refused(data, own)


def test_the_checker_itself_sees_another_property_or_net(halved, tmp_path):
    """Also where the digests are those of the files."""
    data, files = halved.data, halved.files
    text = files["property"].read_text()
    read = vnnlib_file.read(files["property"])[0]
    (_, first), _ = read.members
    weaker = text.replace(repr(float(first[0])), repr(float(first[0]) + 3.0))
    wider = text.replace("X_1 1.0", "X_1 3.0")
    for changed in (weaker, wider):
        assert changed != text
        path = tmp_path / "changed.vnnlib"
        path.write_text(changed)
        refused(
            {**data, "property": recorder._digest(path)}, files | {"property": path}, "above 0|cut"
        )
    other, _ = dense(tmp_path / "other.onnx", (3, 8, 8, 3), 3, shift=np.array([-9, 0, 0]))
    refused({**data, "model": recorder._digest(other)}, files | {"model": other})


def test_damaged_files_are_refused(halved, tmp_path):
    content = halved.place.read_bytes()
    for end in (0, 10, len(content) // 2, len(content) - 1):
        with pytest.raises(checker.RefusedProofError):
            checker.check(content[:end], *halved.files.values())


def test_a_violation_is_a_proof_too(tmp_path, capsys):
    path, layers = dense(tmp_path / "net.onnx", (3, 6, 6, 3), 5)
    y, _ = outputs(layers, [0.3, 0.6, 0.2])
    row = (np.array([1.0, 0.0, 0.0]), float(y[0]) + 1e-3)
    property_ = stated(tmp_path / "net.vnnlib", np.zeros(3), np.ones(3), [[row]])
    told = ["--model", str(path), "--property", str(property_)]
    assert main(["verify", str(path), str(property_), "--proof", str(tmp_path / "proofs")]) == 0
    place = tmp_path / "proofs" / "net-net.npz"
    assert main(["check-proof", str(place), *told]) == 0
    assert capsys.readouterr().out.count("sat") == 2
    data, files = unpacked(place.read_bytes()), {"model": path, "property": property_}
    best = max(np.ndindex(2, 2, 2), key=lambda x: outputs(layers, x)[0][0])
    refused({**data, "point": np.array(best, float)}, files, "not shown")
    refused({**data, "point": np.full(3, np.nan)}, files)
    place.write_bytes(packed({**data, "point": np.array(best, float)}))
    assert main(["check-proof", str(place), *told]) == 2
    assert "refused" in capsys.readouterr().err


def test_two_curves_of_a_value_have_no_proof_and_unused_nodes_no_part_in_one(tmp_path, capsys):
    node, rng = helper.make_node, np.random.default_rng(0)
    tensors = {"w": rng.normal(size=(4, 25)).astype(np.float32), "v": np.eye(4, dtype=np.float32)}
    first = [node("Gemm", ["x", "w"], ["z"], transB=1), node("Relu", ["z"], ["a"])]
    second = [node("Tanh", ["z"], ["b"]), node("Add", ["a", "b"], ["h"])]
    asked = np.array([1.0, 0.0, 0.0, 0.0]), -99.0
    for name, last, why in (("two", "h", "two curves"), ("unused", "a", "")):
        nodes = [*first, *second, node("Gemm", [last, "v"], ["y"])]
        net = written(tmp_path / f"{name}.onnx", [1, 25], nodes, tensors)
        property_ = stated(tmp_path / f"{name}.vnnlib", np.zeros(25), np.ones(25), [[asked]])
        assert main(["verify", str(net), str(property_), "--proof", str(tmp_path / "proofs")]) == 0
        told = capsys.readouterr()
        assert told.out.split()[0] == "unsat"
        assert why in told.err
        assert (tmp_path / "proofs" / f"{name}-{name}.npz").exists() == (not why)


def test_the_checker_shares_no_code_with_the_bounds():
    assert len((ROOM / "checker.py").read_text().splitlines()) <= 400
    for name in ("checker", "curves", "real_net"):
        for node in ast.walk(ast.parse((ROOM / f"{name}.py").read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert all(n in ALLOWED or n.split(".")[0] in sys.stdlib_module_names for n in names)
    said = "import wdjax.proofs.checker, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], check=False).returncode == 0
