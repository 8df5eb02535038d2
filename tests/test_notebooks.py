"""Notebooks agree with their scripts, run in a kernel, and show every figure once."""

import base64
import importlib.util
import json
import re
import runpy
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
NAMES = [script.stem for script in SCRIPTS]
DRAWS = re.compile(r"plt\.(?:figure|subplots)\(|\bplots\.\w+\(|\bpictures\.\w+\(")
LARGEST, LARGEST_PICTURE = 600_000, 120_000
"""Bytes of a notebook with its outputs, and of a picture."""
SLOWEST = 60
"""Process seconds of a cell in fast mode."""

CHECKS = {
    "01_first_sandwich": "assert found.passed and found.certified(1)[1] <= found.attacked(1)[1]",
    "02_your_own_model": """
assert set(mine) >= {"plain function", "NNX", "Linen"}
assert len(mine) + len(absent) == 6
assert all(0 <= value <= 1 for curve in curves.values() for value in curve)
""",
    "03_distributional_attacks": """
left = [float(bought[order].accuracy) for order in (1, 2, np.inf)]
assert left == sorted(left)
""",
    "04_certificates": """
assert [*counts.values()] == sorted(counts.values())
assert [*counts.values()][-1] <= left
""",
    "05_image_wasserstein": "assert far.max() <= 1 + 1e-4 and np.all(certified <= attacked)",
    "06_nppr": """
shares = [row.value for row in rows.values()]
assert attacked <= min(shares)
assert shares[0] > rows["NPPR joint"].value
""",
    "07_transductive_games": """
assert found["GMSA-AVG"].one_shot.value <= first.one_shot.value
""",
    "08_theory": """
assert found.lower <= found.upper_margin + 1e-9
assert max(reached) <= max(worst) + 1e-4
""",
    "09_smoothing": "assert held > 0.5 and all(np.all(a >= r) for r, a in sides.values())",
    "10_batched_experiments": """
assert left.shape == (seeds, 8, 4) and mapped * 5 < each * left.size
assert np.all(np.diff(left.mean(0), axis=0) <= 0.1)
""",
    "11_differentiable_prototyping": """
assert all(abs(a - b) < 0.05 * abs(b) + 1e-3 for a, b in slopes.values())
assert course[-1] > course[0] and after[1] > before[1]
plain, ours = curves.values()
assert ours[4] > plain[4] + 0.01
""",
    "12_verify_a_property": """
assert [one.status for one in verdicts.values()] == ["holds", "holds", "violated"]
assert grows["corridor"].status == "holds" and np.all(bound > seen)
assert seen[-1] < seen[0] and np.isfinite(bound[-1])
""",
}
"""What must hold of a notebook's names in the end; the kernel evaluates it."""


CLOCK = """
import time as _time

_spent, _began = {}, [_time.process_time()]


def _begin(info):
    _began[0] = _time.process_time()


def _end(result):
    _spent[result.execution_count] = _time.process_time() - _began[0]


get_ipython().events.register("pre_run_cell", _begin)
get_ipython().events.register("post_run_cell", _end)
"""
"""A first cell that records the process seconds of every other, whatever else the machine does."""


def pair():
    return runpy.run_path(str(ROOT / "notebooks" / "pair.py"))


def saved(name):
    return json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text("utf-8"))


def code(whole):
    return [cell for cell in whole["cells"] if cell["cell_type"] == "code"]


def pictures(cell):
    return [
        out["data"]["image/png"] for out in cell["outputs"] if "image/png" in out.get("data", {})
    ]


def shows_every_figure_once(whole):
    """Names of cells that draw and show no picture, show two, or print the name of a figure."""
    wrong, seen = [], []
    for cell in code(whole):
        drawn = bool(DRAWS.search("".join(cell["source"])))
        shown = pictures(cell)
        words = [out.get("data", {}) for out in cell["outputs"]]
        named = any("Figure" in str(data.get("text/plain")) for data in words if len(data) == 1)
        doubled = len(shown) > 1 or any(picture in seen for picture in shown)
        if doubled or named or (drawn and not shown):
            wrong.append(cell["id"])
        seen += shown
    return wrong


def test_cells_are_those_of_percent_format():
    script = (
        "# ---\n# x\n# ---\n\n# %% [markdown]\n# # Title\n#\n# text\n\n# %%\na = 1\n\n\nb = 2\n"
    )
    made = pair()
    cells = made["notebook"](script, "name")["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "code"]
    assert cells[0]["source"][0] == "# Title\n"
    assert "colab.research.google.com" in cells[0]["source"][2]
    assert cells[0]["source"][-1] == "text"
    assert "".join(cells[1]["source"]) == made["INSTALL"].strip()
    assert cells[2]["source"] == ["a = 1\n", "\n", "\n", "b = 2"]


def test_outputs_are_kept_until_code_changes():
    notebook, script = pair()["notebook"], "# %% [markdown]\n# # T\n#\n# t\n\n# %%\na = 1\n"
    old = notebook(script, "name")
    code(old)[1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "1"}]
    assert code(notebook(script.replace("# t\n", "# other words\n"), "name", old))[1]["outputs"]
    assert not code(notebook(script.replace("a = 1", "a = 2"), "name", old))[1]["outputs"]


def test_a_figure_that_is_missing_or_doubled_is_seen():
    def cell(source, *outputs):
        return {"cell_type": "code", "id": "c", "source": [source], "outputs": [*outputs]}

    def picture(text):
        return {"data": {"image/png": text, "text/plain": "<Figure size 6x4>"}}

    def wrong(*cells):
        return shows_every_figure_once({"cells": [*cells]})

    name = {"data": {"text/plain": "<Figure size 6x4>"}}
    assert wrong(cell("plt.subplots()", picture("a"))) == []
    assert wrong(cell("plt.subplots()")) == ["c"]
    assert wrong(cell("plt.subplots()", name)) == ["c"]
    assert wrong(cell("plt.subplots()", picture("a"), picture("b"))) == ["c"]
    assert wrong(cell("plt.subplots()", picture("a")), cell("figure", picture("a"))) == ["c"]


@pytest.mark.fast
@pytest.mark.parametrize("name", NAMES)
def test_notebooks_agree_with_their_scripts(name):
    old, script = saved(name), (ROOT / "notebooks" / f"{name}.py").read_text("utf-8")
    made = pair()
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.read_text("utf-8") == made["text"](made["notebook"](script, name, old)), (
        "run python notebooks/pair.py"
    )
    assert path.stat().st_size < LARGEST
    assert ".." not in "".join(code(old)[0]["source"])
    for cell in code(old):
        compile("".join(cell["source"]), name, "exec")


@pytest.mark.parametrize("name", NAMES)
def test_visitors_see_every_figure_once(name):
    whole = saved(name)
    assert all(cell["execution_count"] for cell in code(whole)), "python notebooks/pair.py --run"
    assert shows_every_figure_once(whole) == []
    drawn = [picture for cell in code(whole) for picture in pictures(cell)]
    assert drawn
    assert all(len(base64.b64decode(picture)) < LARGEST_PICTURE for picture in drawn)
    printed = json.dumps(whole)
    assert "Traceback" not in printed
    assert "/tmp/" not in printed
    assert " object at 0x" not in printed


@pytest.mark.fast
@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run_in_a_kernel(name, monkeypatch, tmp_path):
    for package in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; it is in the extra [test]")
    monkeypatch.setenv("WDJAX_FAST", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    monkeypatch.chdir(tmp_path)
    made = pair()
    whole = made["notebook"]((ROOT / "notebooks" / f"{name}.py").read_text("utf-8"), name)
    ours = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    check = f"assert max(_spent.values()) < {SLOWEST}, _spent\n{CHECKS[name]}"
    whole["cells"].insert(0, ours | {"id": "clock", "source": [CLOCK]})
    whole["cells"].append(ours | {"id": "check", "source": [check]})
    done = made["execute"](whole, timeout=600)
    assert shows_every_figure_once(done) == []
    assert jax.__version__ in json.dumps(done)
