"""``python -m wdjax certify --method lipschitz``: certificates by Lipschitz constants."""

import argparse
from typing import Any

import numpy as np

from wdjax import certify, lipschitz
from wdjax.cli import subject
from wdjax.core import AnyArray, Classifier
from wdjax.engine import tasks

METHOD = "lipschitz"

_ARRAYS = ("correct", "margin", "radius")

_WIDE = 512
"""Width of a layer from which on quadratic constraints take minutes."""


def verified(
    parsed: argparse.Namespace,
    work: tasks.Tasks,
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    **how: Any,
) -> tuple[certify.Certificate, dict[str, Any], tasks.Spent]:
    """Certificates by local constants, the JSON's further content, and what both spent.

    The further content is the bound ``E_N + L eps`` of the expected cross-entropy over Omega_1.
    """
    widest = max(lipschitz.as_chain(model, x).widths, default=0)
    by: lipschitz.Method = "sdp" if widest <= _WIDE else "zonotope"
    done: list[tasks.Done[Any]] = []
    for start in range(0, len(y), how["batch_size"]):
        these = slice(start, start + how["batch_size"])

        def verify(task: tasks.Task, these: slice = these) -> certify.Certificate:
            return lipschitz.verify(model, x[these], y[these], method=by, **how)

        done.append(work.do(f"from {start}", verify, certify.Certificate))
    loss = work.do("loss", lambda task: _loss(parsed, model, x, y, by, how["norm"]))
    spent = {clock: subject.total([*done, loss], clock) for clock in loss.spent}
    parts = [one.value for one in done]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
    return parts[0]._replace(**arrays), {"expected_loss": loss.value}, spent


def _loss(
    parsed: argparse.Namespace, model: Classifier, x: AnyArray, y: AnyArray, by: Any, norm: float
) -> dict[str, Any]:
    """The JSON of the expected loss's bound over ``Omega_1(eps)``, by a global Lipschitz constant.

    ``by`` is the method of the constant, which is the largest of the labels present.
    """
    box = (0.0, 1.0)
    constants = lipschitz.global_lipschitz(model, x, norm=norm, box=box, method=by)
    constant = float(constants[np.unique(np.asarray(y))].max())
    clean, bound = (
        float(
            certify.wdro_bound(model, x, y, norm=norm, eps=eps, order=1, box=box, constant=constant)
        )
        for eps in (0.0, parsed.eps)
    )
    return {
        "lipschitz_constant": constant,
        "method": by,
        "clean_loss": clean,
        "certified_loss": bound,
        "box": list(box),
    }
