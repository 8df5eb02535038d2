"""The public names of the library and where they are defined, read from the source alone.

Nothing is imported: the site is built, and its docstrings are tested, where JAX is not installed.
"""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

PAGES = {
    "wdjax": "Models, balls, searching and spending",
    "wdjax.attacks": "Attacks",
    "wdjax.ensembles": "Ensembles of attacks",
    "wdjax.image": "Mass that moves between pixels",
    "wdjax.certify": "Certificates",
    "wdjax.lipschitz": "Lipschitz constants",
    "wdjax.smoothing": "Randomised smoothing",
    "wdjax.smoothing.noise": "Noise for smoothing",
    "wdjax.nppr": "Probabilities of failure",
    "wdjax.nppr.distributions": "Perturbation distributions",
    "wdjax.nppr.pictures": "Figures of learnt distributions",
    "wdjax.transductive": "Games against defences that adapt",
    "wdjax.transductive.objectives": "Objectives over banks of models",
    "wdjax.training": "Training",
    "wdjax.models": "Architectures",
    "wdjax.models.convert": "PyTorch weights, ONNX files",
    "wdjax.report.audit": "Audits",
    "wdjax.report.plots": "Figures",
    "wdjax.transport": "Adversarial distributions",
    "wdjax.losses": "Losses and criteria",
    "wdjax.metrics": "Metrics and intervals",
    "wdjax.norms": "Norms and projections",
    "wdjax.data": "Data",
    "wdjax.parallel": "Several devices",
    "wdjax.testing": "Checking an attack",
    "wdjax.files.persist": "Saving and restoring",
    "wdjax.bounds.record": "What is known of a primitive",
}
"""The module of every page of the API reference, and the page's title."""


class Name(NamedTuple):
    """A public name, as its page shows it."""

    page: str
    """The module that exports it."""
    path: str
    """Where it is defined, such as ``wdjax.attacks.pgd.PGD``."""
    node: ast.stmt
    docstring: str
    """Empty if it has none."""

    @property
    def short(self) -> str:
        """The name alone."""
        return self.path.rpartition(".")[2]


@functools.cache
def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text("utf-8"))


@functools.cache
def _imported(module: str) -> dict[str, str]:
    """What a module takes from others: the name there, and where it comes from."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _targets(node: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def exported(module: str) -> list[str]:
    """The names in ``__all__``, or else every function and class without an underscore."""
    body = _tree(module).body
    for node in body:
        if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
            return sorted(ast.literal_eval(node.value), key=str.lower)
    kinds = ast.FunctionDef | ast.ClassDef
    return [node.name for node in body if isinstance(node, kinds) and node.name[0] != "_"]


def _docstring(body: list[ast.stmt], place: int) -> str:
    """That of a definition, or the string below an assignment."""
    node = body[place]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return ast.get_docstring(node) or ""
    below = body[place + 1 : place + 2]
    if below and isinstance(below[0], ast.Expr) and isinstance(below[0].value, ast.Constant):
        return str(below[0].value.value)
    return ""


def defined(page: str, path: str) -> Name | None:
    """The definition of a name, followed through imports; None for a module."""
    module, _, name = path.rpartition(".")
    body = _tree(module).body
    for place, node in enumerate(body):
        if name in _targets(node):
            return Name(page, path, node, _docstring(body, place))
    source = _imported(module).get(name, path)  # A module is imported from its own package.
    return None if source == path else defined(page, source)


def public(page: str) -> list[Name]:
    """The names of a page, in the order of its ``__all__`` or of its file; modules are left out."""
    found = (defined(page, f"{page}.{name}") for name in exported(page))
    return [name for name in found if name is not None]
