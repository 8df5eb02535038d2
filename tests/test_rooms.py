"""The rooms of the package: imports go in no circle, and every file has a name of its own."""

import ast
import collections
import graphlib
import importlib
import re
import runpy
from pathlib import Path

import pytest

import wdjax

ROOT = Path(wdjax.__file__).parent
FILES = {
    ".".join(("wdjax", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}
LATER = {
    ("wdjax.cli.merge_command", "wdjax.cli"): "the parser of all commands, of which it is one",
    ("wdjax.cli.job_file", "wdjax.cli"): "the parser of all commands, of which it is one",
    ("wdjax.files.persist", "wdjax.models.saved"): "names that moved; persist does not use them",
}
"""Imports inside functions, or for type checkers, that would close a circle, and why they may."""
ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def room(module):
    return ".".join(module.split(".")[:2])


def imports():
    """``module -> modules`` that it imports, at once or inside a function."""
    found = collections.defaultdict(set)
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())) if module != "wdjax" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wdjax"):
                for name in node.names:
                    whole = f"{node.module}.{name.name}"
                    found[module].add(whole if whole in FILES else node.module)
        found[module].discard("wdjax")  # The front door's names are in rooms of their own.
    for module, other in LATER:
        found[module].remove(other)
    return found


def test_files_import_in_no_circle():
    graphlib.TopologicalSorter(imports()).prepare()


def test_rooms_import_in_no_circle():
    between = collections.defaultdict(set)
    for module, others in imports().items():
        between[room(module)] |= {room(other) for other in others} - {room(module)}
    assert {"wdjax.engine", "wdjax.bounds"} <= between["wdjax.certify"]
    graphlib.TopologicalSorter(between).prepare()


def test_no_two_files_or_folders_have_the_same_name():
    """A folder is counted by its ``__init__``."""
    names = collections.Counter(module.rpartition(".")[2] for module in FILES)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_classes_have_the_same_name():
    """But ``State``, of which every method has its own, and private layers of ``models``."""
    names = collections.Counter(
        node.name
        for path in FILES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and not (node.name.startswith("_") and ROOT / "models" in path.parents)
    )
    assert [name for name, count in names.items() if count > 1] == ["State"]


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_says_what_it_is_for_and_where_to_begin(name):
    said = re.sub(r"\s+", " ", importlib.import_module(f"wdjax.{name}").__doc__ or "")
    assert len(said) > 300
    named = set(re.findall(r"`(\w+)`", said[said.index("Open ") :]))
    files = {path.stem for path in (ROOT / name).glob("*.py")}
    assert named & files, "which file is the first to open"
    assert set(re.findall(r"(?<![:`])`(\w+)`(?!`)", said)) <= files | {"defenses", "primitives"}


def test_planted_faults_are_planted_in_lines_that_exist():
    """``bench/mutations.py`` changes one line of a file each; a changed line is changed there."""
    faults = runpy.run_path(str(ROOT.parent / "bench" / "mutations.py"))["FAULTS"].items()
    gone = [name for name, one in faults if (ROOT / one.file).read_text().count(one.line) != 1]
    assert len(faults) > 20
    assert gone == []
