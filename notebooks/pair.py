"""Writes every notebook from its script in percent format: ``python notebooks/pair.py``.

Scripts are what people edit and what tests run; the ``.ipynb`` files hold the same cells without
outputs. Jupytext reads both.
"""

import json
import re
import sys
from pathlib import Path

_CELL = re.compile(r"^# %%(?P<markdown> \[markdown\])?\n", re.MULTILINE)


def notebook(script: str) -> str:
    """The ``.ipynb`` file of a script: nbformat 4.5, no outputs, names of cells by their place."""
    cells = []
    marks = [*_CELL.finditer(script)]
    ends = [mark.start() for mark in marks[1:]] + [len(script)]
    for place, (mark, end) in enumerate(zip(marks, ends)):
        text = script[mark.end() : end].strip("\n")
        cell = {"cell_type": "code", "execution_count": None, "outputs": []}
        if mark["markdown"]:
            cell = {"cell_type": "markdown"}
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        source = text.splitlines(keepends=True)
        cells.append(cell | {"id": f"cell-{place}", "metadata": {}, "source": source})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main() -> int:
    for script in sorted(Path(__file__).parent.glob("[0-9]*.py")):
        script.with_suffix(".ipynb").write_text(notebook(script.read_text("utf-8")), "utf-8")
        print(script.with_suffix(".ipynb").name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
