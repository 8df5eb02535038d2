"""What the docstring of every public name says; the source is read and nothing is imported."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("names", ROOT / "docs" / "site" / "names.py")
names = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = names
SPEC.loader.exec_module(names)

METHODS = {
    *("attacks", "ensembles", "image", "certify", "lipschitz", "smoothing", "smoothing.noise"),
    *("nppr", "transductive", "transductive.objectives", "metrics"),
}
"""Pages whose functions come from somewhere, or are this library's own and say so."""
CHECKS = re.compile(r"^(check|check_\w+|gate|host_only|forward_only)$")
ARRAYS = re.compile(r"\b(Array|AnyArray|ArrayLike|NDArray)\b")

_FIGURES = """nppr.pictures.training nppr.pictures.projected nppr.pictures.heatmap
    nppr.pictures.mixture nppr.pictures.between report.plots.accuracy report.plots.loss
    report.plots.distances report.plots.allocation report.plots.examples"""
_RULES = "bounds.record.once bounds.record.everywhere bounds.record.of bounds.record.trusted"
_INSIDE = "training.default_optimizer training.gradients"
_COMMANDS = "models.convert.add_arguments models.convert.main"

EXCEPTIONS = {
    "example": {
        "architectures that `convert` builds, too large for an example": """
            models.convnext.ConvNeXt models.preact_resnet.DMPreActResNet
            models.dm_wide_resnet.DMWideResNet models.preact_resnet.PreActResNet
            models.resnet.ResNet models.swin.Swin models.resnet.TorchvisionResNet
            models.vgg.VGG16 models.vit.ViT models.wide_resnet.WideResNet
            models.pytorch.from_state_dict""",
        "they train for seconds; notebook 07 plays a game": """
            transductive.defenses.dann.DANN transductive.defenses.rmc.RMC
            transductive.defenses.tadv.TADV transductive.defenses.urejectron.URejectron
            transductive.game_report.cost_multiple transductive.game_report.worst""",
        "they draw an audit or a fit; docs/start.md and notebook 06 have one": _FIGURES,
        "they need a Transformer's weights; tests/test_transformer_constants.py has some": """
            lipschitz.transformer.transformer_constant
            lipschitz.transformer.local_transformer_constant""",
        "it counts the votes of `predict`, whose example would be repeated": """
            smoothing.certificates.tally""",
        "for authors of rules; docs/primitives.md adds a record from outside": f"""
            {_RULES} bounds.record.add""",
        "steps of a training or audit, which call them": f"{_INSIDE} models.learning.descend",
        "the command `convert`, whose --help has examples": _COMMANDS,
    },
    "arguments": {
        "for authors of rules, one equation or name each": _RULES,
        "steps of a training or audit, which call them": _INSIDE,
        "the command `convert`, whose --help explains them": _COMMANDS,
    },
    "shapes": {"steps of a training or audit, which call them": "training.gradients"},
    "errors": {
        "for authors of rules; its message is what a model without a rule gives": """
            bounds.record.of""",
        "the command `convert`, which turns them into exit code 2": "models.convert.main",
    },
}
"""Names that lack a part, by the part and the reason."""


def public():
    """Every public function or class once, with the page that shows it."""
    found = {}
    for page in names.PAGES:
        for name in names.public(page):
            found.setdefault(name.path, name)
    return [*found.values()]


def parameters(node):
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [one for one in (*every, given.vararg, given.kwarg) if one and one.arg != "self"]


def described(docstring):
    """The names before the colons of the section Args."""
    section = re.search(r"^Args:\n((?:  .*\n|\n)*)", docstring + "\n", re.M)
    heads = re.findall(r"^  (\S[^:\n]*):", section[1], re.M) if section else []
    return {word.strip("* ") for head in heads for word in head.split(",")}


def can_raise(node):
    """Whether its own lines raise, or call a function that checks arguments."""
    called = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    heads = [getattr(func, "attr", getattr(func, "id", "")) for func in called]
    return any(isinstance(part, ast.Raise) for part in ast.walk(node)) or any(
        CHECKS.match(head) for head in heads
    )


def lacks(name):
    """What the docstring should say and does not."""
    text, node = name.docstring, name.node
    if not text.strip():
        return ["docstring"]
    function = isinstance(node, ast.FunctionDef)
    if not function and "Args:" not in text:
        return []  # A result, a protocol, a type: its fields say what they are.
    missing = []
    if function:
        asked = {one.arg for one in parameters(node)}
        if asked - described(text):
            missing.append("arguments")
        arrays = any(
            one.annotation and ARRAYS.search(ast.unparse(one.annotation))
            for one in parameters(node)
        )
        if arrays and not re.search(r"\[[^\]]*\]", text):
            missing.append("shapes")
        if can_raise(node) and "Raises:" not in text:
            missing.append("errors")
    if ">>> " not in text:
        missing.append("example")
    cited = re.search(r"\[(?:[a-z]+\d{4}|definitions)\]", text)
    if name.page.removeprefix("wdjax.") in METHODS and not cited and "Source:" not in text:
        missing.append("source")
    return missing


def excused():
    return {
        (part, name): reason
        for part, reasons in EXCEPTIONS.items()
        for reason, listed in reasons.items()
        for name in listed.split()
    }


@pytest.mark.fast
def test_every_public_name_says_what_it_takes_and_raises_where_it_is_from_and_how_it_is_used():
    found = {(part, name.path.removeprefix("wdjax.")) for name in public() for part in lacks(name)}
    assert sorted(found - set(excused())) == [], "write it, or name the exception and its reason"


@pytest.mark.fast
def test_no_exception_is_left_over():
    found = {(part, name.path.removeprefix("wdjax.")) for name in public() for part in lacks(name)}
    assert sorted(set(excused()) - found) == []


@pytest.mark.fast
def test_described_parameters_exist():
    wrong = []
    for name in public():
        if isinstance(name.node, ast.FunctionDef):
            asked = {one.arg for one in parameters(name.node)}
            wrong += [(name.path, word) for word in sorted(described(name.docstring) - asked)]
    assert wrong == []


@pytest.mark.fast
def test_what_is_missing_is_seen():
    text = '    """It.\n\n    Args:\n      x: {}\n    """\n'
    source = f"def f(x: Array, y: int):\n{text}    raise ValueError"
    for shape, missing in (
        ("an array", ["arguments", "shapes", "errors", "example", "source"]),
        ("``[n]``", ["arguments", "errors", "example", "source"]),
    ):
        node = ast.parse(source.format(shape)).body[0]
        name = names.Name("wdjax.metrics", "wdjax.metrics.f", node, ast.get_docstring(node))
        assert lacks(name) == missing
    node = ast.parse("def f():\n    pass").body[0]
    assert lacks(names.Name("wdjax.metrics", "wdjax.metrics.f", node, "")) == ["docstring"]


@pytest.mark.fast
def test_every_name_of_the_library_has_a_page():
    shown = {
        path
        for page in names.PAGES
        for path in [page, *(f"{page}.{n}" for n in names.exported(page))]
    }
    homes = {"wdjax.audit": "wdjax.report.audit", "wdjax.convert": "wdjax.models.convert"}
    for name in names.exported("wdjax"):
        path = homes.get(f"wdjax.{name}", f"wdjax.{name}")
        assert path in shown
        if names.defined("wdjax", f"wdjax.{name}") is None:
            assert path in names.PAGES, name
