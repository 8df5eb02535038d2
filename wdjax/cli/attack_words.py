"""Parses attacks with settings, as in ``pgd(steps=100, loss=margin), fast``.

Two regular expressions of linear time read the grammar, and nothing is evaluated, so that a
text can at worst be refused.
"""

import argparse
import collections.abc
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from wdjax import losses
from wdjax.cli import options

_LONGEST = 4000
"""Maximum number of characters in a list of attacks."""
_ATTACK = re.compile(r"[\s,]*([^\s,()=]+)\s*(?:\(((?:[^()]|\([^()]*\))*)\))?\s*(?:,|$)")
_SETTING = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(\([^()]*\)|[^\s,()=]+)\s*(?:,\s*|$)")
_COUNT, _NUMBER = options.Range(0, 10**6, whole=True), options.Range(0, 1e6)
_FUNCTION: Any = collections.abc.Callable
_TRUTH = {"true": True, "false": False}

Settings = dict[str, Any]


class Word(NamedTuple):
    """An attack as written on the command line."""

    name: str
    settings: str = ""
    """The text between its parentheses."""


def read(option: str, text: str) -> list[Word]:
    """The attacks of a list, in order, with the text in their parentheses.

    Raises:
      ValueError: a text that is not such a list.

    >>> read("--attacks", "pgd(steps=5, widths=(2,1)), fast")
    [Word(name='pgd', settings='steps=5, widths=(2,1)'), Word(name='fast', settings='')]
    """
    if len(text) > _LONGEST:
        raise ValueError(f"{option} takes {_LONGEST} characters at most, got {len(text)}.")
    found, at = [], 0
    while text[at:].strip(" \t\r\n,"):
        matched = _ATTACK.match(text, at)
        if matched is None:
            raise ValueError(
                f"{option} takes names with settings in parentheses, such as pgd(steps=100), wda; "
                f"got {options.shown(text[at:])}."
            )
        found.append(Word(matched[1], (matched[2] or "").strip()))
        at = matched.end()
    return found


def declared(*functions: Callable[..., Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """The parameters of classes or functions and their types, except those in ``without``.

    >>> from wdjax import attacks
    >>> list(declared(attacks.PGD, without=("ball",)))[:2]
    ['steps', 'loss']
    """
    return {
        name: typing.get_type_hints(function)[name]
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and name not in without
    }


def typed(word: Word, kinds: Mapping[str, Any]) -> Settings:
    """The settings of an attack, converted to their declared types.

    Args:
      word: the attack as written.
      kinds: the attack's settings and their types, from :func:`declared`.

    Raises:
      ValueError: an unknown setting, one given twice, a value of another type or out of range.

    >>> typed(Word("pgd", "steps=5, step_size=2/255"), {"steps": int, "step_size": float | None})
    {'steps': 5, 'step_size': 0.00784313725490196}
    """
    found: Settings = {}
    there = f"it has {', '.join(kinds)}" if kinds else "it has none"
    at, text = 0, word.settings
    while at < len(text):
        matched = _SETTING.match(text, at)
        if matched is None:
            raise ValueError(
                f"settings of {word.name} are written name=value with commas between, such as "
                f"steps=100, got {options.shown(text[at:])}; {there}."
            )
        name, at = matched[1], matched.end()
        if name not in kinds:
            raise ValueError(f"{word.name} has no setting {options.shown(name)} here; {there}.")
        if name in found:
            raise ValueError(f"{word.name} has the setting {name} twice; give it once.")
        try:
            found[name] = _value(matched[2], kinds[name])
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name} of {word.name} {error}.") from None
    return found


def _value(text: str, hint: Any) -> Any:
    """The text of an attack's setting converted to a type that its annotation ``hint`` allows.

    "none" gives None if the annotation allows it. Where it asks for a function, the text must name
    a loss. Raises an ArgumentTypeError where the text does not fit.
    """
    whole = typing.get_origin(hint) in (None, tuple, _FUNCTION)
    kinds = {typing.get_origin(one) or one for one in ([hint] if whole else typing.get_args(hint))}
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds:
        if text.lower() not in _TRUTH:
            raise argparse.ArgumentTypeError(f"must be true or false, got {options.shown(text)}")
        return _TRUTH[text.lower()]
    if int in kinds:
        return _COUNT(text)
    if float in kinds:
        return _NUMBER(text)
    if tuple in kinds:
        return _numbers(text)
    return _loss(text) if _FUNCTION in kinds else text.strip("\"'")


def _numbers(text: str) -> tuple[float, ...]:
    """The numbers of a text such as ``(3, 2, 1)``."""
    words = options.words(text.strip("()"))
    if not (text.startswith("(") and words):
        raise argparse.ArgumentTypeError(
            f"must be numbers in parentheses such as (3, 2, 1), got {options.shown(text)}"
        )
    return tuple(_NUMBER(word) for word in words)


def _loss(text: str) -> Callable[..., Any]:
    """A loss of :mod:`wdjax.losses` by its name; only functions of outputs and labels count."""
    known = {
        name: value
        for name, value in vars(losses).items()
        if inspect.isfunction(value) and not name.startswith("_") and _of_outputs(value)
    }
    if text not in known:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(sorted(known))}, got {options.shown(text)}"
        )
    return known[text]


def _of_outputs(function: Callable[..., Any]) -> bool:
    """Whether the function can be called as ``function(out, y)``."""
    needed = [
        one
        for one in inspect.signature(function).parameters.values()
        if one.default is inspect.Parameter.empty
    ]
    return len(needed) == 2


def label(name: str, settings: Mapping[str, Any]) -> str:
    """The name of an attack with settings, in results.

    >>> label("pgd", {"steps": 5, "loss": losses.margin}), label("fast", {})
    ('pgd(steps=5, loss=margin)', 'fast')
    """
    said = ", ".join(
        f"{key}={getattr(value, '__name__', value)}" for key, value in settings.items()
    )
    return f"{name}({said})" if said else name
