"""Writes every notebook from its script in percent format: ``python notebooks/pair.py``.

Scripts are what people edit; the ``.ipynb`` files hold the same cells, below a badge and a cell
that installs wdjax where it is missing. Outputs of cells that did not change are kept. With ``--run
[NAME ...]`` notebooks are executed by a kernel (``pip install nbclient ipykernel``), and what their
cells print and draw is kept.
"""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_URLS = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
REPOSITORY = _URLS["Repository"]
_CELL = re.compile(r"^# %%(?P<markdown> \[markdown\])?\n", re.MULTILINE)

INSTALL = f"""
# Installs wdjax where it is missing; the JAX, Flax and PyTorch that are here stay as they are.
import importlib.util
import os
import subprocess
import sys

SOURCE = "wdjax @ git+{REPOSITORY}"  # Or a folder with a checkout, or a wheel.
if importlib.util.find_spec("wdjax") is None:
    source = os.environ.get("WDJAX_SOURCE", SOURCE)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)
"""


def badge(name: str) -> str:
    """A link that opens a notebook of this folder in Colab."""
    place = REPOSITORY.removeprefix("https://github.com/")
    address = f"https://colab.research.google.com/github/{place}/blob/main/notebooks/{name}.ipynb"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({address})"
    )


def _cells(script: str, name: str) -> list[tuple[str, str]]:
    """Kind and text of every cell: the script's, after its title a badge and the installation."""
    marks = [*_CELL.finditer(script)]
    ends = [mark.start() for mark in marks[1:]] + [len(script)]
    cells = []
    for mark, end in zip(marks, ends):
        text = script[mark.end() : end].strip("\n")
        if mark["markdown"]:
            cells.append(("markdown", re.sub(r"^# ?", "", text, flags=re.MULTILINE)))
        else:
            cells.append(("code", text))
    title, below = cells[0][1].split("\n", 1)
    cells[0] = ("markdown", f"{title}\n\n{badge(name)}\n{below}")
    return [cells[0], ("code", INSTALL.strip()), *cells[1:]]


def notebook(script: str, name: str, old: dict[str, Any] | None = None) -> dict[str, Any]:
    """The notebook of a script, nbformat 4.5, its cells named by their place.

    ``old`` is an earlier notebook of the script. Its outputs are kept if no cell of code changed
    but that of the installation: a cell may depend on every cell before it.
    """
    cells = []
    for place, (kind, text) in enumerate(_cells(script, name)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{place}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    if old is not None and _code(old["cells"])[1:] == _code(cells)[1:]:
        for cell, before in zip(_code_cells(cells), _code_cells(old["cells"])):
            cell["outputs"], cell["execution_count"] = before["outputs"], before["execution_count"]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _code_cells(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [cell for cell in cells if cell["cell_type"] == "code"]


def _code(cells: list[dict[str, Any]]) -> list[str]:
    return ["".join(cell["source"]) for cell in _code_cells(cells)]


def execute(whole: dict[str, Any], timeout: int) -> dict[str, Any]:
    """The notebook with its outputs, from a fresh kernel; a cell has ``timeout`` seconds."""
    import nbformat
    from nbclient import NotebookClient

    node = nbformat.reads(json.dumps(whole), as_version=4)
    NotebookClient(node, timeout=timeout, kernel_name="python3").execute()
    done: dict[str, Any] = json.loads(nbformat.writes(node))
    for cell in done["cells"]:
        cell["metadata"] = {}  # Times of the execution.
    return done | {"metadata": whole["metadata"]}


def text(whole: dict[str, Any]) -> str:
    """What is written to the file."""
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main(words: list[str]) -> int:
    chosen = words[1:] if words[:1] == ["--run"] else None
    for script in sorted(HERE.glob("[0-9]*.py")):
        target = script.with_suffix(".ipynb")
        old = json.loads(target.read_text("utf-8")) if target.exists() else None
        whole = notebook(script.read_text("utf-8"), script.stem, old)
        if chosen is not None and (not chosen or script.stem in chosen):
            whole = execute(whole, timeout=1200)
        target.write_text(text(whole), "utf-8")
        print(target.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
