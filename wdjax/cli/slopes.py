"""``python -m wdjax certify --method lipschitz``: what Lipschitz constants prove."""

import argparse
from typing import Any

import numpy as np

from wdjax import certify, lipschitz
from wdjax.core import AnyArray, Model

METHOD = "lipschitz"

_WIDE = 512
"""Neurons in a layer from which quadratic constraints take minutes."""


def verified(
    parsed: argparse.Namespace, model: Model, x: AnyArray, y: AnyArray, **how: Any
) -> tuple[certify.Certificate, dict[str, Any]]:
    """What is verified by local constants, and what the JSON has besides.

    That is the bound ``E_N + L eps`` of the cross-entropy over Omega_1, on the box.
    """
    if parsed.checkpoint is not None:
        raise ValueError("--checkpoint is for methods of margins; lipschitz works in one go.")
    widest = max(lipschitz.as_chain(model, x).widths, default=0)
    by: lipschitz.Method = "sdp" if widest <= _WIDE else "zonotope"
    found = lipschitz.verify(model, x, y, method=by, **how)
    box, norm = (0.0, 1.0), how["norm"]
    constants = lipschitz.global_lipschitz(model, x, norm=norm, box=box, method=by)
    constant = float(constants[np.unique(np.asarray(y))].max())
    clean, bound = (
        float(
            certify.wdro_bound(model, x, y, norm=norm, eps=eps, order=1, box=box, constant=constant)
        )
        for eps in (0.0, parsed.eps)
    )
    loss = {"lipschitz": constant, "by": by, "clean": clean, "bound": bound, "domain": list(box)}
    return found, {"expected_loss": loss}
