"""What people read: snippets run, numbers are those that are printed, references exist."""

import ast
import contextlib
import importlib.util
import io
import re
import runpy
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import convert
from wdjax.models.graphs import OPERATORS

ROOT = Path(__file__).parents[1]
MODELS = (ROOT / "docs" / "models.md").read_text()
RECIPES = re.findall(
    r"## ([^\n]+)\n(?:(?!\n## ).)*?<!-- test: (\w+) -->\n```python\n(.*?)```",
    MODELS,
    re.DOTALL,
)


def need(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, so its recipe cannot run")


def graph(path, operator):
    """An ONNX file of ten logits: the operator, one for each entry, before a product."""
    from onnx import TensorProto, helper, numpy_helper

    weights = np.linspace(-1, 1, 640, dtype=np.float32).reshape(64, 10) ** 3
    domain, _, name = operator.rpartition(".")
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node(name, ["flat"], ["bent"], domain=domain),
        helper.make_node("MatMul", ["bent", "weights"], ["logits"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", ["n", 1, 8, 8]), ("logits", ["n", 10]))
    ]
    made = helper.make_graph(
        nodes, "net", ends[:1], ends[1:], [numpy_helper.from_array(weights, "weights")]
    )
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("com.example", 1)]
    path.write_bytes(
        helper.make_model(made, opset_imports=versions, ir_version=9).SerializeToString()
    )


def use(model, x, y, leaves=True):
    """Logits, an attack, and parameters that are leaves."""
    assert model(x).shape == (len(x), 10)
    assert bool(jax.tree.leaves(model)) == leaves
    again = jax.jit(lambda model: model(x))(model)
    assert jnp.allclose(again, model(x), atol=1e-5)
    assert wdjax.run(wdjax.attacks.fgsm(), model, x, y, eps=0.1).x_adv.shape == x.shape


@pytest.mark.fast
@pytest.mark.parametrize(("title", "package", "code"), RECIPES, ids=[r[0] for r in RECIPES])
def test_recipes_make_models(request, monkeypatch, tmp_path, title, package, code):
    x, y = jnp.linspace(0, 1, 128).reshape(2, 8, 8, 1), jnp.array([3, 4])
    names = {"jax": jax, "jnp": jnp, "wdjax": wdjax, "key": jax.random.key(0), "x": x}
    monkeypatch.chdir(tmp_path)
    if package in ("onnx", "operator"):
        need("onnx")
        graph(tmp_path / "net.onnx", "Relu")
        graph(tmp_path / "bent.onnx", "com.example.Bent")
        names["convert"] = convert
    if package == "normalised":
        names["model"] = wdjax.Model(lambda w, x: x.reshape(len(x), -1) @ w, jnp.ones((64, 10)))
    if package == "shared":
        shared = request.getfixturevalue("shared")
        for file in ("weights/mnist_linf_robust.pth", "mnist_test_0_500.npz"):
            (tmp_path / Path(file).name).symlink_to(shared / "data" / file)
    elif package in FRAMEWORKS:
        need(package)
    if package == "torch":
        need("onnxscript")
    exec(compile(code, f"{title} in docs/models.md", "exec"), names)
    if package == "shared":
        found = names["found"]
        assert 0.8 < float(found.accuracy) <= float(found.correct.mean())
        return
    use(names["model"], x, y, leaves=package != "opaque")
    OPERATORS.pop("com.example.Bent", None)


def test_a_module_of_pytorch_is_attacked_certified_and_audited(monkeypatch, tmp_path):
    """The second recipe for it, which goes on where the first one ends."""
    torch = pytest.importorskip("torch", reason="the module is PyTorch's")
    need("onnxscript")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    images, labels = torch.rand(4, 1, 8, 8), torch.arange(4)
    names: dict = {"images": images, "labels": labels}
    first = next(code for _, package, code in RECIPES if package == "torch")
    (then,) = re.findall(r"<!-- test: torch, then -->\n```python\n(.*?)```", MODELS, re.DOTALL)
    for code in (first, then):
        lines = [line for line in code.splitlines() if line and "import" not in line]
        assert len(lines) <= 5
        exec(compile(code, "PyTorch in docs/models.md", "exec"), names)
    with torch.no_grad():
        theirs = names["net"](images).numpy()
    np.testing.assert_allclose(names["model"](names["x"]), theirs, atol=1e-5)
    page = (tmp_path / "audit" / "report.html").read_text()
    assert "On 4 clean samples it is right for" in page
    with pytest.raises(ValueError, match=r"training form.*module\.eval\(\)"):
        convert.from_torch(names["net"].train(), images)


FRAMEWORKS = {"torch", "onnx", "jax", "flax", "equinox", "haiku"}


def test_every_framework_has_a_recipe():
    named = [package for _, package, _ in RECIPES]
    assert len(named) == 11
    assert {*named} == FRAMEWORKS | {"operator", "normalised", "opaque", "shared"}
    for _, _, code in RECIPES:
        lines = [line for line in code.splitlines() if line and "import" not in line]
        assert len(lines) <= 5


PAGES = ("start", "which_attack", "image", "nppr", "smoothing")
"""Pages whose code goes on where the README's or the start page's ends."""


def snippets(page):
    """The code of a page that every installation can run."""
    text = (ROOT / page).read_text("utf-8")
    found = re.findall(r"(<!-- test: \w+ -->\n)?```python\n(.*?)```", text, re.DOTALL)
    return [code for needs, code in found if not needs]


def wrong_numbers(page, names):
    """Runs a page; returns what it prints and says otherwise, as (line, printed, stated).

    A number is right if it is the printed one, rounded to the digits that the page gives. The pages
    are written on the newest stack: another compiler trains another net, which is nearly the same.
    """
    wrong, near = [], 0.0 if jax.__version_info__ >= (0, 10) else 0.04
    for code in snippets(page):
        for node in ast.parse(code).body:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(ast.Module([node], []), page, "exec"), names)
            line = code.splitlines()[node.end_lineno - 1]
            stated = re.findall(r"\d+\.\d+", line.partition("  # ")[2])
            if "print(" not in line or not stated:
                continue
            printed = re.findall(r"\d+\.\d*(?:e-?\d+)?", out.getvalue())
            assert 0 < len(printed) <= len(stated), line
            for own, said in zip(map(float, printed), stated):
                unit = 10.0 ** -len(said.partition(".")[2])
                if abs(own - float(said)) > 0.501 * unit + near:
                    wrong.append((line, own, said))
    return wrong


def test_a_wrong_number_is_seen(monkeypatch, tmp_path):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = (
        "```python\nx = 0.496\nprint(x, 1.124)  # {}: two numbers\nprint(x)  # 0.50, of 0.9\n```\n"
    )
    for numbers, wrong in (
        ("0.50, 1.12", 0),
        ("0.47, 1.12", 1),
        ("0.50, 1.13", 1),
        ("0.5, 1.1", 0),
    ):
        (tmp_path / "page.md").write_text(page.format(numbers))
        assert len(wrong_numbers("page.md", {})) == wrong


@pytest.fixture(scope="module")
def from_the_readme():
    """The names that the README's code leaves behind, and its wrong numbers."""
    names: dict = {}
    began = time.process_time()
    wrong = wrong_numbers("README.md", names)
    assert time.process_time() - began < 60
    return names, wrong


@pytest.mark.fast
def test_the_readme_keeps_its_word(from_the_readme):
    names, wrong = from_the_readme
    assert wrong == []
    # Both sides of the same net at the same budget: neither vacuous nor crossed.
    for order in (1, jnp.inf):
        below = wdjax.certify.certified_accuracy(names["radius"], 0.03, order)
        above = wdjax.spend(names["found"], eps=0.03, order=order).accuracy
        assert 0.45 < float(below) <= float(above) + 1e-6 < 0.9


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text("utf-8").split()) < 700


@pytest.mark.fast
@pytest.mark.parametrize("page", PAGES)
def test_the_pages_keep_their_word(from_the_readme, page):
    names = dict(from_the_readme[0])
    assert wrong_numbers(f"docs/{page}.md", names) == []
    if page == "start":
        assert names["both"].passed
    elif page == "smoothing":
        assert names["smooth"].votes.mean() < 5000
    elif page == "nppr":
        rare = wdjax.nppr.importance(
            names["model"], names["uniform"], names["x"][42], names["y"][42], key=names["key"]
        )
        assert 1e-4 < rare.value < 1e-2


def test_a_pytorch_module_becomes_a_model(from_the_readme):
    for package in ("torch", "onnx", "onnxscript"):
        need(package)
    text = (ROOT / "README.md").read_text("utf-8")
    (code,) = re.findall(r"<!-- test: torch -->\n```python\n(.*?)```", text, re.DOTALL)
    names = dict(from_the_readme[0])
    exec(compile(code, "README.md", "exec"), names)
    use(names["own"], names["x"][:2], names["y"][:2])


def test_every_picture_is_drawn_and_shown(tmp_path):
    drawn = runpy.run_path(str(ROOT / "docs" / "site" / "pictures.py"))
    drawn["main"](tmp_path)
    names = {path.name for path in tmp_path.glob("*.svg")}
    assert names == {f"{name}.svg" for name in drawn["PICTURES"]}
    assert names == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    text = (ROOT / "docs" / "concepts.md").read_text("utf-8")
    assert names == set(re.findall(r"\]\(pictures/(\w+\.svg)\)", text))
    for name in names:
        saved = (ROOT / "docs" / "pictures" / name).read_text("utf-8")
        assert words(saved) == words((tmp_path / name).read_text("utf-8")), "run pictures.py"


def words(svg):
    """Labels of a figure; outlines differ with the version of matplotlib."""
    return re.findall(r"<text[^>]*>([^<]*[a-z][^<]*)</text>", svg)


def references():
    return re.findall(r"^\* `\[(\w+)\]`", (ROOT / "docs" / "references.md").read_text(), re.M)


def test_every_key_that_is_cited_exists_and_every_reference_is_cited():
    known = references()
    assert len(known) == len(set(known)) >= 14
    places = [*ROOT.glob("wdjax/**/*.py"), *ROOT.glob("tests/*.py"), ROOT / "README.md"]
    places += [
        ROOT / "CITATION.cff",
        *{*ROOT.glob("docs/*.md")} - {ROOT / "docs" / "references.md"},
    ]
    cited = {
        key
        for place in places
        for key in re.findall(r"\[([a-z]+\d{4}|definitions)\]", place.read_text())
    }
    assert cited <= set(known)
    assert set(known) == cited


def test_every_reference_has_authors_a_year_and_a_link():
    text = (ROOT / "docs" / "references.md").read_text()
    entries = re.findall(r"^\* `\[(\w+)\]`(.*?)(?=^\* |^## |\Z)", text, re.M | re.S)
    for key, words in entries:
        assert re.search(r"\*[^*]+\*", words), key
        if key != "definitions":
            assert re.search(r"<https://\S+>", words), key
            assert re.search(r"\b(19|20)\d\d\b", words), key


def test_the_claims_of_the_theory_name_tests_that_exist():
    text = (ROOT / "docs" / "theory.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    files = [ROOT / "tests" / f"test_{name}.py" for name in ("lipschitz", "transformer_constants")]
    tests = "".join(path.read_text() for path in files)
    assert len(named) >= 9
    assert named <= set(re.findall(r"^def (test_\w+)", tests, re.M))
