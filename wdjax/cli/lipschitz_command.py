"""``python -m wdjax certify --method lipschitz``: certificates by Lipschitz constants."""

import argparse
from typing import Any

import numpy as np

from wdjax import certify, lipschitz
from wdjax.cli import shards, subject
from wdjax.core import AnyArray, Classifier
from wdjax.engine import tasks

METHOD = "lipschitz"

_WIDE = 512
"""Width of a layer from which on quadratic constraints take minutes."""


def verified(
    parsed: argparse.Namespace,
    work: shards.ShardedWork,
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    **how: Any,
) -> tuple[tasks.Done[certify.Certificate], dict[str, Any]]:
    """Certificates by local constants, with what all of it spent, and the JSON's further content.

    The further content is the bound ``E_N + L eps`` of the expected cross-entropy over Omega_1.
    """
    widest = max(lipschitz.as_chain(model, x[:1]).widths, default=0)
    by: lipschitz.Method = "sdp" if widest <= _WIDE else "zonotope"

    def verify(rows: np.ndarray, task: tasks.Task) -> certify.Certificate:
        return lipschitz.verify(model, x[rows], y[rows], method=by, **how)

    done = work.rows("margins", verify, how["batch_size"])
    loss = work.whole(
        "expected loss", lambda task: _loss(parsed, model, np.asarray(x), y, by, how["norm"])
    )
    if loss is None:
        return done, {}
    spent = {clock: subject.total([done, loss], clock) for clock in loss.spent}
    return tasks.Done(done.value, spent), {"expected_loss": loss.value}


def _loss(
    parsed: argparse.Namespace, model: Classifier, x: AnyArray, y: AnyArray, by: Any, norm: float
) -> dict[str, Any]:
    """The JSON of the expected loss's bound over ``Omega_1(eps)``, by a global Lipschitz constant.

    ``x`` is ``[n, *shape]``, ``y`` is ``[n]``. ``by`` is the method of the constant, which is the
    largest of the labels present.
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
