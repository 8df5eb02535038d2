"""An audit as plain lists and numbers for JSON, and texts about it."""

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import platform
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from wdjax import __version__, remarks
from wdjax.core import Attack
from wdjax.report import evidence
from wdjax.report.evidence import ORDERS, Entry, Sandwich, ball_name

SCHEMA = "wdjax.results/1"
"""The version of the language of JSON that all commands write; ``docs/json.md`` explains it."""


def head(command: str) -> dict[str, Any]:
    """What every JSON begins with.

    >>> list(head("attack"))
    ['schema', 'command', 'versions']
    """
    return {"schema": SCHEMA, "command": command, "versions": versions()}


def versions() -> dict[str, str]:
    """Versions of the packages on which the numbers depend.

    >>> sorted(versions())[:3]
    ['flax', 'jax', 'jaxlib']
    """
    from importlib import metadata

    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy")
    own = {"python": platform.python_version(), "wdjax": __version__}
    return own | {p: metadata.version(p) for p in packages}


def sha256(*arrays: npt.ArrayLike) -> str:
    """The SHA-256 of arrays with their dtypes and shapes, to tell whether data are the same.

    >>> sha256([1, 2]) == sha256([1, 2]), sha256([1, 2]) == sha256([2, 1])
    (True, False)
    """
    known = hashlib.sha256()
    for array in map(np.asarray, arrays):
        known.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return known.hexdigest()


def number(value: float) -> float | None:
    """A float for JSON; None for infinity and NaN, which JSON lacks."""
    return float(value) if math.isfinite(value) else None


def _numbers(values: npt.ArrayLike) -> list[float | None]:
    """Numbers as a flat list for JSON; None for infinity and NaN."""
    return [number(value) for value in np.asarray(values, float).ravel()]


def describe(found: Sandwich) -> dict[str, Any]:
    """A sandwich as plain lists and numbers."""
    content = {
        "norm": evidence.norm_name(found.ball.norm),
        "eps_list": _numbers(found.eps_list),
        "n": int(found.correct.size),
        "clean_accuracy": float(found.correct.mean()),
        "clean_accuracy_interval": list(evidence.interval(found)),
        "clean_loss": number(found.clean_loss),
        "lipschitz_constant": None if found.lipschitz is None else number(found.lipschitz),
        "balls": {ball_key(order): _ball(found, order) for order in ORDERS},
        "attacks": {name: _attack(found, name) for name in found.attacks},
        "certificates": {
            **{
                name: {
                    "certified_accuracy": _by_ball(functools.partial(found.certified, name=name))
                }
                for name in found.certificates
            },
            **{name: {"refused": reason} for name, reason in found.refused_certificates.items()},
        },
        "loss_bounds": {
            **{
                name: {"certified_loss": _by_ball(bound.__getitem__)}
                for name, bound in found.loss_bounds.items()
            },
            **{name: {"refused": reason} for name, reason in found.refused_bounds.items()},
        },
        "samples": {
            "correct": found.correct.tolist(),
            "certified_radius": _numbers(found.radius) if found.certificates else None,
            "flip_distance": _numbers(found.within()) if found.entries else None,
            "flip_distances": {name: _numbers(found.nearest(name)[0]) for name in found.names},
            "certified_radii": {
                name: _numbers(radius) for name, radius in found.certificates.items()
            },
        },
        "invariants": [i._asdict() | {"slack": number(i.slack)} for i in found.invariants],
    }
    return content | {"remarks": [f"{what}: {remark}" for what, remark in warnings(content)]}


def ball_key(order: float) -> str:
    """The ball's name in JSON.

    >>> [ball_key(order) for order in ORDERS]
    ['omega_inf', 'omega_2', 'omega_1']
    """
    return ball_name(order).lower()


def _by_ball(curve: Callable[[float], npt.ArrayLike]) -> dict[str, list[float | None]]:
    return {ball_key(order): _numbers(curve(order)) for order in ORDERS}


def _ball(found: Sandwich, order: float) -> dict[str, Any]:
    """The best bounds in one ball, each a list over the budgets."""
    return {
        "certified_accuracy": _numbers(found.certified(order)) if found.certificates else None,
        "attacked_accuracy": _numbers(found.attacked(order)),
        "attacked_loss": _numbers(found.attacked_loss(order)),
        "certified_loss": _numbers(found.certified_loss(order)) if found.loss_bounds else None,
    }


def _attack(found: Sandwich, name: str) -> dict[str, Any]:
    return {
        "explained": plain(explained(found.attacks[name])),
        "settings": settings(found.attacks[name]),
        "searches": [_entry(entry) for entry in found.entries if entry.name == name],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    """One attack's results at one budget, with passes, faults and zero gradients, for JSON."""
    kappa = {} if entry.kappa is None else {"kappa": entry.kappa}
    return {
        "order": f"{entry.order:g}",
        "eps": entry.eps,
        **kappa,
        "attacked_accuracy": entry.accuracy,
        "attacked_loss": number(entry.loss),
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
    """``(what, remark)`` for every part of an audit whose numbers may mislead or are missing."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, attack in model["attacks"].items():
        for entry in attack["searches"]:
            for remark in remarks.of(entry):
                alike.setdefault((name, entry["order"], remark), []).append(f"{entry['eps']:g}")
    said = [
        (f"{name}, Omega_{order}, eps {', '.join(budgets)}", remark)
        for (name, order, remark), budgets in alike.items()
    ]
    for kind, parts in (("certificate", "certificates"), ("loss bound", "loss_bounds")):
        for name, part in model[parts].items():
            if "refused" in part:
                said.append((f"no {kind} {name}", part["refused"]))
    return said


def statement(check: Mapping[str, Any]) -> str:
    """An invariant in words, with its slack and what violates it.

    >>> statement({"name": "exact W_p <= eps", "holds": True, "slack": 0.01, "detail": ""})
    'exact W_p <= eps (slack 0.01)'
    """
    detail = f": {check['detail']}" if check["detail"] else ""
    slack = "not finite" if check["slack"] is None else format(check["slack"], ".2g")
    return f"{check['name']} (slack {slack}){detail}"
