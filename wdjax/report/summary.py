"""An audit as plain lists and numbers for JSON, and texts about it."""

import dataclasses
import inspect
import json
import math
import platform
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from wdjax import remarks
from wdjax.core import Attack
from wdjax.report import evidence
from wdjax.report.evidence import ORDERS, Entry, Sandwich, ball_name

SCHEMA = "wdjax.audit/1"


def versions() -> dict[str, str]:
    """Versions of the packages on which the numbers depend.

    >>> sorted(versions())[:3]
    ['flax', 'jax', 'jaxlib']
    """
    from importlib import metadata

    packages = ("wdjax", "jax", "jaxlib", "flax", "optax", "numpy", "scipy")
    return {"python": platform.python_version()} | {p: metadata.version(p) for p in packages}


def number(value: float) -> float | None:
    """A float for JSON; None for infinity and NaN, which JSON lacks."""
    return float(value) if math.isfinite(value) else None


def _numbers(values: npt.ArrayLike) -> list[float | None]:
    """Numbers as a flat list for JSON; None for infinity and NaN."""
    return [number(value) for value in np.asarray(values, float).ravel()]


def describe(found: Sandwich) -> dict[str, Any]:
    """A sandwich as plain lists and numbers."""
    low, high = evidence.interval(found)
    return {
        "norm": evidence.norm_name(found.ball.norm),
        "radii": _numbers(found.radii),
        "samples": int(found.correct.size),
        "clean_accuracy": float(found.correct.mean()),
        "clean_accuracy_interval_95": [low, high],
        "clean_loss": found.clean_loss,
        "lipschitz_constant": None if found.lipschitz is None else number(found.lipschitz),
        "balls": {ball_name(order): _ball(found, order) for order in ORDERS},
        "attacks": [_entry(entry) for entry in found.entries],
        "methods": [
            {"name": name, "explained": plain(explained(attack)), "settings": settings(attack)}
            for name, attack in found.attacks.items()
        ],
        "certificates": [
            {
                "name": name,
                "ball": ball_name(order),
                "accuracy": _numbers(found.certified(order, name)),
            }
            for name in found.certificates
            for order in ORDERS
        ],
        "loss_bounds": [
            {"name": name, "ball": ball_name(order), "loss": _numbers(bound[order])}
            for name, bound in found.loss_bounds.items()
            for order in ORDERS
        ],
        "distances": {
            "certified_radius": _numbers(found.radius),
            "flip_found": _numbers(found.nearest()[0]) if found.entries else None,
        },
        "invariants": [i._asdict() | {"slack": number(i.slack)} for i in found.invariants],
    }


def _ball(found: Sandwich, order: float) -> dict[str, Any]:
    """The best bounds in one ball, each a list over the radii."""
    return {
        "certified_accuracy": _numbers(found.certified(order)),
        "attacked_accuracy": _numbers(found.attacked(order)),
        "attacked_loss": _numbers(found.attacked_loss(order)),
        "certified_loss": _numbers(found.certified_loss(order)),
    }


def _entry(entry: Entry) -> dict[str, Any]:
    """One attack's results at one budget, with passes, faults and zero gradients, for JSON."""
    kappa = {} if entry.kappa is None else {"kappa": entry.kappa}
    return {
        "name": entry.name,
        "ball": ball_name(entry.order),
        "eps": entry.eps,
        **kappa,
        "accuracy": entry.accuracy,
        "loss": entry.loss,
        "wasserstein": entry.spent,
        **remarks.spent(entry.result),
    }


def explained(method: Attack | Callable[..., Attack]) -> str:
    """The first paragraph of an attack's docstring; empty without one.

    >>> from wdjax import attacks
    >>> explained(attacks.WDA()).split(":")[0]
    'Wasserstein distributional attack'
    """
    kind = method if callable(method) else type(method)
    words = (inspect.getdoc(kind) or "").split("\n\n")[0]
    generated = dataclasses.is_dataclass(kind) and words.startswith(f"{kind.__name__}(")
    return "" if generated else " ".join(words.split())


def plain(text: str) -> str:
    """A docstring's text without its markup.

    >>> plain("a :class:`~wdjax.Result` of ``run``")
    'a Result of run'
    """
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: match[1].rsplit(".", 1)[-1], text)
    return text.replace("``", "")


def settings(attack: Attack) -> dict[str, Any]:
    """An attack's fields as words and numbers that are the same in every process.

    >>> from wdjax import attacks
    >>> settings(attacks.PGD(steps=5))["loss"]
    'wdjax.losses.cross_entropy'
    """
    fields: Any = dataclasses.fields(attack) if dataclasses.is_dataclass(attack) else ()
    return {field.name: setting(getattr(attack, field.name)) for field in fields}


def setting(value: Any) -> Any:
    """One setting as a word or a number for JSON.

    >>> setting(0.5), setting((1.0, 2.0))
    (0.5, '(1.0, 2.0)')
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number):
        return number(float(value))
    return repr(value)


def dumps(content: Mapping[str, Any]) -> str:
    """A report as JSON; raises for infinity and NaN, which the standard lacks."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def warnings(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``(attack and budget, remark)`` for every attack whose numbers may mislead."""
    return [
        (f"{entry['name']}, {entry['ball']}, eps {entry['eps']:g}", remark)
        for entry in model["attacks"]
        for remark in remarks.of(entry)
    ]


def statement(check: Mapping[str, Any]) -> str:
    """An invariant in words, with its slack and what violates it.

    >>> statement({"name": "exact W_p <= eps", "holds": True, "slack": 0.01, "detail": ""})
    'exact W_p <= eps (slack 0.01)'
    """
    detail = f": {check['detail']}" if check["detail"] else ""
    slack = "not finite" if check["slack"] is None else format(check["slack"], ".2g")
    return f"{check['name']} (slack {slack}){detail}"
