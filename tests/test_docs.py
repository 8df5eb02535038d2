"""What people read: snippets run, references exist, notebooks agree with their scripts."""

import importlib.util
import json
import re
import runpy
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import wdjax

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
RECIPES = re.findall(
    r"## ([^\n]+)\n(?:(?!\n## ).)*?<!-- test: (\w+) -->\n```python\n(.*?)```",
    (ROOT / "docs" / "models.md").read_text(),
    re.DOTALL,
)


def need(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, so its recipe cannot run")


def use(model, x, y):
    """Logits, an attack, and parameters that are leaves."""
    assert model(x).shape == (len(x), 10)
    assert jax.tree.leaves(model)
    again = jax.jit(lambda model: model(x))(model)
    assert jnp.allclose(again, model(x), atol=1e-5)
    assert wdjax.run(wdjax.attacks.fgsm(), model, x, y, eps=0.1).x_adv.shape == x.shape


@pytest.mark.fast
@pytest.mark.parametrize(("title", "package", "code"), RECIPES, ids=[r[0] for r in RECIPES])
def test_recipes_make_models(request, monkeypatch, tmp_path, title, package, code):
    x, y = jnp.linspace(0, 1, 128).reshape(2, 8, 8, 1), jnp.array([3, 4])
    names = {"jax": jax, "jnp": jnp, "wdjax": wdjax, "key": jax.random.key(0), "x": x}
    if package == "shared":
        shared = request.getfixturevalue("shared")
        for file in ("weights/mnist_linf_robust.pth", "mnist_test_0_500.npz"):
            (tmp_path / Path(file).name).symlink_to(shared / "data" / file)
        monkeypatch.chdir(tmp_path)
    else:
        need(package)
    exec(compile(code, f"{title} in docs/models.md", "exec"), names)
    if package == "shared":
        found = names["found"]
        assert 0.8 < float(found.accuracy) <= float(found.correct.mean())
        return
    use(names["model"], x, y)


def test_every_framework_has_a_recipe():
    assert len(RECIPES) == 6
    assert {package for _, package, _ in RECIPES} == {"jax", "flax", "equinox", "haiku", "shared"}
    for _, _, code in RECIPES:
        lines = [line for line in code.splitlines() if line and "import" not in line]
        assert len(lines) <= 5


@pytest.mark.fast
def test_the_readme_keeps_its_word(capsys):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    spent = []
    for place, snippet in enumerate(code):
        began = time.process_time()
        exec(compile(snippet, f"snippet {place} of README.md", "exec"), names)
        spent.append(time.process_time() - began)
    assert "nppr.fit" in code[-3]
    assert "certify.radius" in code[-2]
    assert spent[-2] < 20
    assert "smoothing.certify" in code[-1]
    said = capsys.readouterr().out.split("\n")
    point, best = map(float, said[0].split())
    assert point == pytest.approx(0.84, abs=0.04)
    assert best == pytest.approx(0.52, abs=0.05)
    worst, decided, rare, curve = said[-9:-5]
    assert float(worst) == pytest.approx(0.86, abs=0.05)
    low, high = map(float, re.findall(r"[\d.]+", decided))
    assert 0.88 < low <= high < 0.98
    assert 1e-4 < float(rare) < 1e-2
    ends = [1 - float(number) for number in re.findall(r"[\d.]+", curve)]
    assert ends == pytest.approx([float(rare), 100 * float(rare)], rel=1e-3)
    inside, average, loss, smooth = map(float, said[-5:-1])
    # Both sides of the same net at the same budget: neither vacuous nor crossed.
    assert 0.75 < inside <= point
    assert 0.3 < average <= best
    assert loss < 2.3  # That of guessing is log(10).
    assert smooth == pytest.approx(0.77, abs=0.05)
    assert names["smooth"].votes.mean() < 5000


def references():
    return re.findall(r"^\* `\[(\w+)\]`", (ROOT / "docs" / "references.md").read_text(), re.M)


def test_every_key_that_is_cited_exists_and_every_reference_is_cited():
    known = references()
    assert len(known) == len(set(known)) >= 14
    places = [*ROOT.glob("wdjax/**/*.py"), *ROOT.glob("tests/*.py"), ROOT / "README.md"]
    places += [ROOT / "CITATION.cff", ROOT / "docs" / "models.md", ROOT / "docs" / "own_attack.md"]
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


def pair():
    return runpy.run_path(str(ROOT / "notebooks" / "pair.py"))["notebook"]


@pytest.mark.fast
@pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda script: script.stem)
def test_notebooks_agree_with_their_scripts(script):
    text = script.with_suffix(".ipynb").read_text("utf-8")
    assert text == pair()(script.read_text("utf-8")), "run python notebooks/pair.py"
    whole = json.loads(text)
    assert whole["nbformat"] == 4
    code = [cell for cell in whole["cells"] if cell["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    install = "".join(code[0]["source"])
    assert "find_spec" in install
    assert "--upgrade" not in install
    for cell in code:
        compile("".join(cell["source"]), script.name, "exec")


def test_cells_are_those_of_percent_format():
    script = (
        "# ---\n# x\n# ---\n\n# %% [markdown]\n# # Title\n#\n# text\n\n# %%\na = 1\n\n\nb = 2\n"
    )
    cells = json.loads(pair()(script))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code"]
    assert cells[0]["source"] == ["# Title\n", "\n", "text"]
    assert cells[1]["source"] == ["a = 1\n", "\n", "\n", "b = 2"]


@pytest.mark.fast
@pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda script: script.stem)
def test_notebooks_run(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WDJAX_FAST", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script.name])
    began = time.process_time()
    names = runpy.run_path(str(script))
    assert time.process_time() - began < 60
    said = capsys.readouterr().out
    assert jax.__version__ in said
    assert names["figure"].axes
    if script.stem == "01_first_sandwich":
        assert "the sides never cross" in said
    elif script.stem == "03_distributional_attacks":
        bought = {order: float(result.accuracy) for order, result in names["bought"].items()}
        assert bought[1] <= bought[2] <= bought[jnp.inf]
    elif script.stem == "08_theory":
        assert names["found"].lower <= names["found"].upper_margin + 1e-9
        assert max(names["reached"]) <= max(names["worst"]) + 1e-4
    elif script.stem == "07_transductive_games":
        assert "leaves least" in said
        assert names["found"]["GMSA-AVG"].one_shot.value <= names["first"].one_shot.value
    elif script.stem == "09_smoothing":
        assert "do not cross" in said
        assert names["held"] > 0.5
    elif script.stem == "04_certificates":
        assert "no proof crosses an attack" in said
        counts = [*names["counts"].values()]
        assert counts == sorted(counts)
        assert counts[-1] <= names["left"]
    elif script.stem == "06_nppr":
        shares = [row.value for row in names["rows"].values()]
        assert names["attacked"] <= min(shares)
        assert shares[0] > names["rows"]["NPPR joint"].value
    elif script.stem == "05_image_wasserstein":
        assert "what is repaired stays in its ball" in said
    else:
        assert set(names["mine"]) >= {"plain function", "NNX", "Linen"}
        missing = {"equinox", "haiku", "torch"} - set(names["absent"])
        assert len(names["mine"]) == 3 + len(missing)
        assert all(f"{package} is not installed" in said for package in names["absent"])


def test_the_claims_of_the_theory_name_tests_that_exist():
    text = (ROOT / "docs" / "theory.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    files = [ROOT / "tests" / f"test_{name}.py" for name in ("lipschitz", "transformer_constants")]
    tests = "".join(path.read_text() for path in files)
    assert len(named) >= 9
    assert named <= set(re.findall(r"^def (test_\w+)", tests, re.M))
