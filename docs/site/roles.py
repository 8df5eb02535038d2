"""Docstrings, written for Python's ``help``, become Markdown before the site shows them."""

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
import names

_ROLE = re.compile(r":(?:func|class|data|mod|meth|attr):`(~?)([\w.]+)`")
_CODE = re.compile(r"``(.+?)``", re.DOTALL)
_KEY = re.compile(r"\[([a-z]+\d{4}|definitions)\]")
_OWN_SECTIONS = re.compile(r"^(Cost|Differs|Source|Maths): ", re.MULTILINE)
_EXAMPLE = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)


def _anchors() -> dict[str, str]:
    """Where each public definition is shown: its path, and the identifier on the page."""
    return {name.path: name.path for page in names.PAGES for name in names.public(page)}


def _reference(found: re.Match[str], home: griffe.Object, known: dict[str, str]) -> str:
    """A link to a public name, and code for what has no page."""
    short, target = found.groups()
    try:
        path = target if target.startswith("wdjax.") else home.resolve(target)
    except griffe.NameResolutionError:
        path = target
    shown = target.rpartition(".")[2] if short else target
    if path in names.PAGES:
        return f"[`{target}`][{path}]"
    return f"[`{shown}`][{known[path]}]" if path in known else f"`{shown}`"


def markdown(text: str, home: griffe.Object, known: dict[str, str]) -> str:
    """A docstring with links for roles and sources, and with fences around its examples."""
    parts, end = [], 0
    for example in _EXAMPLE.finditer(text):
        parts += [_words(text[end : example.start()], home, known)]
        parts += [f"```pycon\n{example[0].rstrip()}\n```\n"]
        end = example.end()
    return "".join([*parts, _words(text[end:], home, known)])


def _words(text: str, home: griffe.Object, known: dict[str, str]) -> str:
    text = _ROLE.sub(lambda found: _reference(found, home, known), text)
    text = _CODE.sub(lambda found: f"`{' '.join(found[1].split())}`", text)
    text = _KEY.sub(lambda found: f"[\\[{found[1]}\\]][{found[1]}]", text)
    text = _OWN_SECTIONS.sub(lambda found: f"**{found[1]}.** ", text)
    return text


class Roles(griffe.Extension):
    """Rewrites every docstring of the package once all of it is loaded.

    Static fields of attacks are declared by ``setting(value)``; what users pass is the value.
    """

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        declared = attr.value
        if isinstance(declared, griffe.ExprCall) and str(declared.function).endswith("setting"):
            attr.value = declared.arguments[0] if declared.arguments else None

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        known = _anchors()
        self._rewrite(pkg, known)

    def _rewrite(self, home: griffe.Object, known: dict[str, str]) -> None:
        if home.docstring is not None:
            home.docstring.value = markdown(home.docstring.value, home, known)
        for member in home.members.values():
            if not member.is_alias:
                self._rewrite(member, known)
