"""VNN-LIB files: what they mean, what is refused, and the command that asks nets about them."""

import csv
import gzip
import importlib.util
import json
import re
import resource
import shutil
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from wdjax.cli import main, workers
from wdjax.engine import tasks
from wdjax.files import vnnlib_file

RNG = np.random.default_rng(3)
INPUTS, OUTPUTS = 2, 3


def declared(inputs=INPUTS, outputs=OUTPUTS):
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{i}" for i in range(outputs)]
    return "".join(f"(declare-const {name} Real)\n" for name in names)


def boxed(inputs=INPUTS):
    return "".join(f"(assert (<= X_{i} 1))(assert (>= X_{i} -1.0))\n" for i in range(inputs))


def random_condition(depth):
    """A condition as text, and a function ``(x, y) -> bool`` that evaluates it."""
    if depth and RNG.random() < 0.6:
        parts = [random_condition(depth - 1) for _ in range(RNG.integers(1, 4))]
        word, rule = (("and", all), ("or", any))[RNG.integers(2)]
        return (
            f"({word} {' '.join(text for text, _ in parts)})",
            lambda x, y: rule(judge(x, y) for _, judge in parts),
        )
    sign, rule = (("<=", np.less_equal), (">=", np.greater_equal))[RNG.integers(2)]
    if RNG.random() < 0.4:
        i, level = RNG.integers(INPUTS), round(float(RNG.uniform(-1, 1)), 3)
        return f"({sign} X_{i} {level})", lambda x, y: rule(x[i], level)
    i, j = RNG.integers(OUTPUTS, size=2)
    factor, level = (round(float(v), 2) for v in RNG.uniform(-2, 2, 2))
    # Variables that cancel, on one side or between both.
    more, both = RNG.choice(["", "(* 0 X_0)", "(- X_1 X_1)"]), RNG.choice(["", " X_0", " Y_2"])
    return (
        f"({sign} (+ (* {factor} Y_{i}) (- Y_{j}) 0.5 {more}{both}) (+ {level}{both}))",
        lambda x, y: rule(factor * y[i] - y[j] + 0.5, level),
    )


def inside(case, x, y):
    boxed = np.all((case.lower <= x) & (x <= case.upper))
    return boxed and any(np.all(a @ y <= b) for a, b in case.members)


def test_cases_are_the_points_that_satisfy_the_file():
    """Random conditions, against a direct evaluation of the file's text at random points."""
    seen, refused = [], 0
    while len(seen) < 60 * 40:
        parts = [random_condition(3) for _ in range(2)]
        text = declared() + boxed() + "".join(f"(assert {words})\n" for words, _ in parts)
        if " Y_" not in parts[0][0]:
            continue
        try:
            cases = vnnlib_file.parsed(text.encode())
        except ValueError:  # No box is left, or an alternative says nothing of the outputs.
            refused += 1
            continue
        for _ in range(60):
            x, y = RNG.uniform(-1.2, 1.2, INPUTS), RNG.uniform(-2, 2, OUTPUTS)
            expected = bool(np.all(np.abs(x) <= 1)) and all(judge(x, y) for _, judge in parts)
            assert any(inside(case, x, y) for case in cases) == expected
            seen.append(expected)
    assert any(seen)
    assert not all(seen)
    assert refused < 40


@pytest.mark.fast
@pytest.mark.parametrize(
    ("condition", "a", "b"),
    [
        ("(>= (+ Y_0 1e20) (+ 1e20 -3))", -1, 3),
        ("(<= (- (+ Y_0 1e-30) 1e20) (* -1 1e20))", 1, -1e-30),
        ("(<= (* 3 Y_0) (+ 0.1 0.2))", 3, 0.3),
        ("(<= (/ (* 49 Y_0) 49) (/ 1 3))", 1, 1 / 3),
        ("(<= (* 1e-25 (* 1e25 Y_0)) 1)", 1, 1),
    ],
)
def test_sums_and_products_are_exact_and_rounded_once(condition, a, b):
    """In floats the first of these asks for ``Y_0 >= 0`` instead of ``Y_0 >= -3``."""
    text = f"{declared(1, 1)}(assert (<= X_0 1))(assert (>= X_0 0))(assert {condition})"
    ((_, _, ((got, limit),)),) = vnnlib_file.parsed(text.encode())
    assert (got.tolist(), limit.tolist()) == ([[a]], [b])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no input X_0"),
        (declared(1, 0), "no output Y_0"),
        ("(declare-const X_1 Real)(declare-const Y_0 Real)", "not X_0"),
        (declared() + "(declare-const X_0 Real)", "declared twice"),
        ("(declare-const Z_0 Real)", "the name"),
        ("(declare-const X_00 Real)", "the name"),
        ("(declare-const X_99999999999 Real)", "the name"),
        ("(declare-const X_0 Int)", "the form"),
        ("(push)", "the form"),
        ("x", "outside of brackets"),
        (")", "outside of brackets"),
        ("(" * 1000, "brackets are open"),
        ("(assert", "not closed"),
        ("(assert (<= " + "y" * 5000 + " 1))", "a word of"),
        (declared() + "(assert (<= X_0 X_1))", "an input is compared"),
        (declared() + "(assert (<= X_0 (+ Y_0 1)))", "an input is compared"),
        (declared() + "(assert (<= Y_7 1))", "stands where"),
        (declared() + "(assert (< Y_0 1))", "the condition"),
        (declared() + "(assert (not (<= Y_0 1)))", "the condition"),
        (declared() + "(assert (<= Y_0 nan))", "stands where"),
        (declared() + "(assert (<= Y_0 1e999))", "a number is inf"),
        (declared() + "(assert (<= Y_0 1" + "0" * 400 + "))", "a number is inf"),
        (declared() + "(assert (<= Y_0 -1.0e-400))", "is not 0, but too small"),
        (
            declared() + boxed() + "(assert (<= (* 1e-200 (* 1e-200 Y_0)) 1))",
            "is not 0, but too small",
        ),
        (declared() + boxed() + "(assert (<= (* 1e-300 X_0) 1e30))(assert (<= Y_0 1))", "2.100"),
        (
            declared()
            + f"(assert (<= Y_0 (+ {' '.join(f'(/ 1 {n})' for n in range(3, 10**5, 2))})))",
            "binary digits",
        ),
        (declared() + "(assert (<= Y_0 0e-999999999))(assert (<= X_0 1e999999999))", "is inf"),
        (declared() + "(assert (<= (* Y_0 Y_1) 1))", "stands where"),
        (declared() + "(assert (<= (/ Y_0 0) 1))", "stands where"),
        (declared() + boxed(1) + "(assert (<= Y_0 1))", "X_1 has no bound"),
        (declared() + boxed() + "(assert (>= X_0 2))(assert (<= Y_0 1))", "X_0 has no value"),
        (declared() + boxed(), "nothing of the outputs"),
        (declared() + "(assert (or))", "the condition"),
        (declared() + boxed() + "(assert (and (or (<= Y_0 1) (<= Y_0 2)) " * 30, "not closed"),
        (declared() + boxed() + "(assert (or (<= Y_0 1) (>= Y_1 2)))" * 20, "alternatives"),
        ("\x00\xff(\x1b[31m)", "outside of brackets"),
    ],
)
def test_what_is_no_property_is_refused(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        vnnlib_file.parsed(text.encode("latin-1"))
    assert len(str(refused.value)) < 400
    assert str(refused.value).isprintable()


def typed(body, shapes=("[1,2]", "[3]"), dtype="float32"):
    """A query of VNN-LIB 2.0; ``body`` is in terms of 1.0, of the first shapes."""
    body = re.sub(r"X_(\d+)", r"X[0,\1]", re.sub(r"Y_(\d+)", r"Y[\1]", body))
    body = re.sub(r"(?<![\[\d.,])(-?\d+)(?![\d.,\]])", r"\1.0", body)
    inputs, outputs = shapes
    return (
        f"(vnnlib-version <2.0>) (declare-network f (declare-input X {dtype} {inputs})"
        f" (declare-output Y {dtype} {outputs})) {body}"
    )


def test_a_query_of_version_2_means_what_version_1_means():
    """The same random conditions written in both versions are expanded into the same cases."""
    equal = 0
    while equal < 40:
        text = boxed() + "".join(f"(assert {random_condition(3)[0]})\n" for _ in range(2))
        try:
            cases = vnnlib_file.parsed((declared() + text).encode())
        except ValueError:
            continue
        others = vnnlib_file.parsed(typed(text).encode())
        assert len(cases) == len(others)
        for case, other in zip(cases, others):
            np.testing.assert_array_equal(case.lower, other.lower)
            np.testing.assert_array_equal(case.upper, other.upper)
            assert len(case.members) == len(other.members)
            for one, two in zip(case.members, other.members):
                np.testing.assert_array_equal(one[0], two[0])
                np.testing.assert_array_equal(one[1], two[1])
        equal += 1


BOX_2 = "".join(
    f"(assert (and (>= X[{i},{j}] 0.0) (<= X[{i},{j}] 1.0)))" for i in (0, 1) for j in (0, 1, 2)
)


def test_entries_of_version_2_are_in_row_major_order():
    text = (
        typed("", ("[2,3]", "[2,2]")) + BOX_2 + "(assert (<= X[1,0] 0.5)) (assert (== Y[1,0] 2.0))"
    )
    ((_, high, ((a, b),)),) = vnnlib_file.parsed(text.encode())
    assert high.tolist() == [1, 1, 1, 0.5, 1, 1]
    assert a.tolist() == [[0, 0, 1, 0], [0, 0, -1, 0]]
    assert b.tolist() == [2, -2]
    scalar = typed("", ("[]", "[]")) + "(assert (and (<= X 1.0) (>= X 0.0) (<= Y 1.0)))"
    ((_, _, ((a, b),)),) = vnnlib_file.parsed(scalar.encode())
    assert (a.tolist(), b.tolist()) == ([[1.0]], [1.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (typed(boxed() + "(assert (< Y_0 1))"), "strict"),
        (typed(boxed() + "(assert (!= Y_0 1))"), "strict"),
        (typed(boxed() + "(assert (<= Y_3 1))"), "Index out of bounds"),
        (typed(boxed() + "(assert (<= Z 1))"), "Undeclared"),
        (typed(boxed() + "(assert (<= Y_0 nan))"), "Undeclared"),
        (typed(boxed() + "(assert (<= Y_0 1e3))"), "syntax"),
        (typed(boxed() + "(assert (<= (* Y_0 Y_1) 1))"), "stands where"),
        (typed(boxed() + "(assert (<= X_0 X_1))"), "an input is compared"),
        (typed(boxed(1) + "(assert (<= Y_0 1))"), "X_1 has no bound"),
        (typed("(assert (<= Y_0 1" + "0" * 400 + ".0))"), "64-bit integers"),
        (typed("", dtype="int64") + "(assert (<= Y[0] 1" + "0" * 40 + "))", "64-bit"),
        (typed("", dtype="int64") + "(assert (<= Y[0] 1))", "of type I64"),
        (typed("(assert (<= Y_0 1))", ("[2,99999999999]", "[3]")), "entries"),
        (typed("(assert (<= Y_0 1))", ("[2," + "9" * 30 + "]", "[3]")), "64-bit"),
        (typed("(assert (<= Y_0 1))").replace("2.0", "3.0", 1), "version"),
        (typed("(assert " + "(and " * 1000), "brackets are open"),
        (typed("(assert (<= Y_0 1)"), "not closed"),
        (typed("(assert (<= Y_0 1)) \xff"), "outside of brackets"),
        (typed("(assert (<= Y_\xff 1))"), "ascii"),
        (typed("(assert (<= Y_0 1)) (declare-network"), "not closed"),
        (
            typed("").replace("(declare-output", "(declare-input Z float32 [1]) (declare-output"),
            "syntax",
        ),
        (
            typed("(assert (<= Y_0 1))").replace(
                "(declare-output", "(declare-hidden H float32 [2] \"h\") (declare-output"
            ),
            "hidden",
        ),
        (typed("") + typed("(assert (<= Y_0 1))").split(">)")[1], "Duplicate"),
    ],
)  # fmt: skip
def test_what_is_no_query_of_version_2_is_refused(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        vnnlib_file.parsed(text.encode("latin-1"))
    assert len(str(refused.value)) < 400
    assert str(refused.value).isprintable()


def test_version_2_without_its_parser_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vnnlib", None)
    with pytest.raises(ImportError, match=r"wdjax\[vnnlib\]"):
        vnnlib_file.parsed(typed(boxed() + "(assert (<= Y_0 1))").encode())


def member(content):
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packed.compress(content) + packed.flush()


HUGE = {
    "brackets": (member(b"(" * 10**7) * 100, "larger than"),
    "fewer brackets": (member(b"(" * 10**7), "brackets are open"),
    "comments": (member(b";\n" * 5 * 10**6) * 100, "larger than"),
    "closed": (member(b"()" * 5 * 10**6) * 100, "larger than"),
    "words": (b"(" + b"a " * (1 << 23), "more than"),
    "one word": (b"(" + b"9" * (1 << 24) + b")", "a word of"),
    "a gzip cut": (member(b"(assert" * 1000)[:-9], "damaged"),
    "a pickle": (b"\x80\x04K\x00.", "pickle"),
    "alternatives": (
        (declared() + boxed() + "(assert (or (<= Y_0 1) (>= Y_0 2)))" * 10**5).encode(),
        "alternatives",
    ),
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_and_damaged_files_cost_little(name, tmp_path):
    """A thousand million brackets in a megabyte, and the like: within 20 s and 1 GB."""
    content, message = HUGE[name]
    path = tmp_path / "p.vnnlib"
    path.write_bytes(content)
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message):
        vnnlib_file.read(path)
    assert time.process_time() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # Kilobytes.


def test_files_that_are_none():
    for path in (".", "absent.vnnlib"):
        with pytest.raises(ValueError, match="is no file"):
            vnnlib_file.read(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``y = relu(x @ A) @ B`` as ONNX, with |x_0 + x_1| and x_0 as outputs."""
    path = tmp_path_factory.mktemp("nets")
    net(path / "net.onnx")
    for name, last in (
        ("sat", "(>= Y_0 1.5)"),
        ("unsat", "(>= Y_0 2.5)"),
        ("either", "(or (>= Y_0 2.5) (and (<= X_0 -0.5) (>= Y_1 0.0)) (>= Y_1 0.75))"),
    ):
        text = declared(2, 2) + boxed() + f"(assert {last})"
        (path / f"{name}.vnnlib").write_text(text)
        (path / f"{name}.vnnlib.gz").write_bytes(gzip.compress(text.encode()))
    (path / "bad.vnnlib").write_text(declared(2, 2) + "(assert (<= Y_0 nan))")
    (path / "three.vnnlib").write_text(declared(3, 2) + boxed(3) + "(assert (<= Y_0 1))")
    return path


def net(path, dtype="float32", samples=1):
    """Writes the file; its tensors are of a dtype, and it takes so many samples."""
    onnx = pytest.importorskip("onnx")
    first = np.array([[1, -1, 1, -1], [1, -1, 0, 0]], dtype)
    second = np.array([[1, 0], [1, 0], [0, 1], [0, -1]], dtype)
    build = onnx.helper
    kind = onnx.TensorProto.FLOAT if dtype == "float32" else onnx.TensorProto.DOUBLE
    graph = build.make_graph(
        [
            build.make_node("MatMul", ["x", "a"], ["z"]),
            build.make_node("Relu", ["z"], ["h"]),
            build.make_node("MatMul", ["h", "b"], ["y"]),
        ],
        "net",
        [build.make_tensor_value_info("x", kind, [samples, 2])],
        [build.make_tensor_value_info("y", kind, [samples, 2])],
        [onnx.numpy_helper.from_array(t, n) for t, n in ((first, "a"), (second, "b"))],
    )
    model = build.make_model(graph, opset_imports=[build.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path)


@pytest.mark.parametrize("name", ["sat", "unsat", "either"])
def test_verdicts_of_a_file(folder, capsys, name):
    for end in ("vnnlib", "vnnlib.gz"):
        words = ["verify", str(folder / "net.onnx"), str(folder / f"{name}.{end}"), "--json", "-"]
        assert main([*words, "--seconds", "20"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["instances"]
        assert row["result"] == ("unsat" if name == "unsat" else "sat")
    if name == "unsat":
        return
    x, y = (np.asarray(row["witness"][k]) for k in "xy")
    assert np.all(np.abs(x) <= 1)
    np.testing.assert_allclose(y, [abs(x.sum()), x[0]], atol=1e-6)
    assert y[0] >= 1.5 if name == "sat" else y[1] >= 0.75
    assert main([*words[:3], "--seconds", "20"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("sat\n((X_0 ")
    assert said.rstrip().endswith("))")


@pytest.mark.parametrize(
    ("dtype", "samples", "column"), [("float64", 1, "timeout"), ("float32", 3, "seconds")]
)
def test_witnesses_are_replayed_in_the_form_of_the_file(
    folder, capsys, tmp_path, dtype, samples, column
):
    """A first row with a byte order mark names the columns."""
    net(tmp_path / "net.onnx", dtype, samples)
    listed = tmp_path / "list.csv"
    listed.write_text(f"onnx,vnnlib,{column}\nnet.onnx,{folder}/sat.vnnlib,20\n", "utf-8-sig")
    assert main(["verify", "--instances", str(listed), "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["instances"]
    assert (row["result"], row["seconds_limit"]) == ("sat", 20)
    x, y = (np.asarray(row["witness"][k]) for k in "xy")
    np.testing.assert_allclose(y, [abs(x.sum()), x[0]], atol=1e-6)
    assert row["replayed"] == (importlib.util.find_spec("onnxruntime") is not None)


def test_a_witness_that_is_not_replayed_is_said(folder, capsys, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")

    def fails(*_, **__):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(onnxruntime, "InferenceSession", fails)
    words = ["verify", str(folder / "net.onnx"), str(folder / "sat.vnnlib"), "--json", "-"]
    assert main(words) == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)["instances"]
    assert (row["result"], row["replayed"]) == ("sat", False)
    assert "was not replayed" in captured.err
    assert "no such operator" in captured.err


def test_a_list_is_resumed_and_tells_of_bad_files(folder, capsys, tmp_path):
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [folder / "net.onnx", folder / f"{name}.vnnlib", 20]
            for name in ("sat", "unsat", "bad", "absent", "three")
        )
    words = ["verify", "--instances", str(tmp_path / "list.csv"), "--json", "-"]
    words += ["--checkpoint", str(tmp_path / "kept")]
    first, second = [], []
    for found in (first, second):
        assert main(words) == 0
        found += json.loads(capsys.readouterr().out)["instances"]
    assert [row["result"] for row in first] == ["sat", "unsat", "error", "error", "error"]
    assert first == second, "kept with their seconds"
    assert "nan" in first[2]["error"]
    assert "3 inputs" in first[4]["error"]


def test_a_list_is_resumed_with_fewer_jobs_after_a_process_died(
    folder, capsys, tmp_path, monkeypatch
):
    """As its message asks for. It names the instance by its place in the list, not in the rest."""
    listed = tmp_path / "list.csv"
    listed.write_text(
        "".join(f"{folder}/net.onnx,{folder}/{n}.vnnlib,20\n" for n in ("bad", "sat"))
    )
    words = ["verify", "--instances", str(listed), "--checkpoint", str(tmp_path / "kept")]

    def dies(self, link, item):
        if item is not None:
            self.busy[link] = item[0]
            self.processes[self.links.index(link)].kill()

    keep = tasks.Tasks.do

    def interrupted(self, name, work, *types):
        if name.startswith("2 "):
            raise KeyboardInterrupt
        return keep(self, name, work, *types)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.Tasks, "do", interrupted)
        assert main([*words, "--jobs", "1"]) == 130
    with monkeypatch.context() as patch:
        patch.setattr(workers._Crew, "give", dies)
        assert main([*words, "--jobs", "2"]) == 2
    assert re.search(
        r"worked on instance 2 .*sat.vnnlib died: .* fewer --jobs", capsys.readouterr().err
    )
    assert main([*words, "--jobs", "1"]) == 0
    assert "sat: 1 of 2" in capsys.readouterr().out


def test_a_checkpoint_is_of_one_list_in_its_order(folder, capsys, tmp_path):
    """Rows of equal names differ by their folders, which a change of the list swaps."""
    listed = tmp_path / "list.csv"
    for kind in ("sat", "unsat"):
        (tmp_path / kind).mkdir()
        shutil.copy(folder / "net.onnx", tmp_path / kind)
        shutil.copy(folder / f"{kind}.vnnlib", tmp_path / kind / "p.vnnlib")

    def verified(*rows):
        written = [f"{kind},net.onnx,p.vnnlib,{seconds}\n" for kind, seconds in rows]
        listed.write_text("".join(["benchmark,onnx,vnnlib,timeout_s\n", *written]))
        words = ["verify", "--instances", str(listed), "--json", "-"]
        code = main([*words, "--checkpoint", str(tmp_path / "kept")])
        said = capsys.readouterr()
        if code:
            return said.err
        return [(row["benchmark"], row["result"]) for row in json.loads(said.out)["instances"]]

    rows = ("sat", 20), ("unsat", 20)
    assert verified(*rows) == verified(*rows) == [("sat", "sat"), ("unsat", "unsat")]
    for other in (rows[::-1], (rows[0], ("unsat", 10)), rows[:1], (*rows, rows[0])):
        assert "belongs to other settings" in verified(*other)


def test_a_checkpoint_is_of_the_tensors_beside_a_net(folder, capsys, tmp_path):
    onnx = pytest.importorskip("onnx")
    path, stored = str(tmp_path / "net.onnx"), tmp_path / "tensors"
    model = onnx.load(folder / "net.onnx")
    onnx.save(model, path, save_as_external_data=True, location="tensors", size_threshold=0)
    words = ["verify", path, str(folder / "sat.vnnlib"), "--json", "-", "--quiet"]
    words += ["--checkpoint", str(tmp_path / "kept")]
    assert main(words) == main(words) == 0
    stored.write_bytes(bytes(stored.stat().st_size))
    assert main(words) == 2
    assert "belongs to other settings" in capsys.readouterr().err


def test_each_proof_has_a_file_of_its_own(folder, capsys, tmp_path):
    rows = ("net", "a-b"), ("net-a", "b")
    for net, spec in rows:
        shutil.copy(folder / "net.onnx", tmp_path / f"{net}.onnx")
        shutil.copy(folder / "sat.vnnlib", tmp_path / f"{spec}.vnnlib")
    (tmp_path / "list.csv").write_text("\n".join(f"{a}.onnx,{b}.vnnlib,20" for a, b in rows))
    words = ["verify", "--instances", str(tmp_path / "list.csv"), "--proof", str(tmp_path / "new")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "net-a-b.npz would be the proof of both net.onnx with a-b.vnnlib and net-a.onnx" in said
    assert not (tmp_path / "new").exists()


def test_a_proof_that_was_removed_is_not_named(folder, capsys, tmp_path):
    files = [str(folder / "net.onnx"), str(folder / "sat.vnnlib")]
    words = ["verify", *files, "--proof", str(tmp_path / "new"), "--json", "-", "--quiet"]
    words += ["--checkpoint", str(tmp_path / "kept")]

    def row():
        assert main(words) == 0
        return json.loads(capsys.readouterr().out)["instances"][0]

    place = tmp_path / "new" / "net-sat.npz"
    assert row() == row()
    assert row()["proof"] == str(place)
    place.unlink()
    assert row()["proof"] is None
    assert "net-sat.npz was removed" in row()["remarks"][-1]


def test_the_command_refuses_what_it_cannot_do(folder, capsys, tmp_path):
    net, spec = str(folder / "net.onnx"), str(folder / "sat.vnnlib")
    (tmp_path / "empty.csv").write_text("\n")
    (tmp_path / "short.csv").write_text("net.onnx\n")
    (tmp_path / "never.csv").write_text("net.onnx,sat.vnnlib,-1\n")
    (tmp_path / "limit.csv").write_text("onnx, vnnlib, limit\nnet.onnx,sat.vnnlib,1\n")
    (tmp_path / "twice.csv").write_text("onnx,vnnlib,onnx\nnet.onnx,sat.vnnlib,no.onnx\n")
    (tmp_path / "both.csv").write_text("onnx,vnnlib,timeout,seconds\nnet.onnx,sat.vnnlib,1,2\n")
    (tmp_path / "more.csv").write_text("net.onnx,sat.vnnlib,1,2\n")
    (tmp_path / "net.onnx.gz").write_bytes(gzip.compress((folder / "net.onnx").read_bytes()))
    listed = "--instances"
    for words, message in (
        ([listed, str(tmp_path / "more.csv")], "more.csv has more cells than onnx"),
        ([str(tmp_path / "net.onnx.gz"), spec], "net.onnx.gz is compressed; unpack it"),
        ([net], "name a net and a property"),
        ([net, spec, listed, "x.csv"], "name a net and a property"),
        ([net, spec, "--jobs", "2"], "would be ignored"),
        ([net, spec, "--seconds", "0"], "seconds"),
        ([net, str(folder / "bad.vnnlib")], "nan"),
        ([net, str(folder / "three.vnnlib")], "3 inputs"),
        ([spec, spec], "ONNX"),
        ([listed, str(tmp_path / "absent.csv")], "must be a list"),
        ([listed, str(tmp_path / "empty.csv")], "no instances"),
        ([listed, str(tmp_path / "short.csv")], "must name a net"),
        ([listed, str(tmp_path / "never.csv")], "seconds of instance 1"),
        (
            [listed, str(tmp_path / "limit.csv")],
            "limit.csv has the column ' limit': there are onnx",
        ),
        ([listed, str(tmp_path / "twice.csv")], "twice.csv has the column 'onnx'"),
        ([listed, str(tmp_path / "both.csv")], "both.csv has the column 'timeout'"),
    ):
        try:
            code = main(["verify", *words])
        except SystemExit as stopped:
            code = stopped.code
        assert code == 2, words
        assert message in capsys.readouterr().err, words


def test_instances_of_the_competition(shared, tmp_path):
    """Nets of four kinds by the command as it is used, in a process of its own."""
    data = shared / "data" / "vnn"
    with (data / "instances.csv").open() as file:
        rows = list(csv.DictReader(file))
    picked = [
        next(row for row in rows if row["benchmark"] == kind and row["verdict"] == verdict)
        for kind, verdict in (("acasxu", "unsat"), ("acasxu", "sat"), ("mnistfc", "sat"))
    ]
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [data / row["benchmark"] / row["onnx"], data / row["benchmark"] / row["vnnlib"], 60]
            for row in picked
        )
    words = [sys.executable, "-m", "wdjax", "verify", "--instances", tmp_path / "list.csv"]
    found = subprocess.run([*words, "--json", "-"], capture_output=True, text=True, check=True)
    verdicts = json.loads(found.stdout)["instances"]
    assert [verdict["result"] for verdict in verdicts] == [row["verdict"] for row in picked]
    assert all(verdict.get("replayed", True) for verdict in verdicts)
