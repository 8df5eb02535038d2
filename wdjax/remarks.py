"""The passes and faults of an attack, and remarks for readers of its numbers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def spent(result: Any) -> dict[str, Any]:
    """Passes, zero gradients, faults and second look of a result, as numbers for JSON."""
    faults = np.flatnonzero(result.fault)
    left = np.asarray(result.correct) & ~np.asarray(result.success)
    gradients, zeros = np.asarray(result.gradients), np.asarray(result.zeros)
    found = {
        "gradients_per_sample": float(np.mean(gradients)),
        "forwards_per_sample": float(np.mean(np.asarray(result.forwards))),
        "zero_gradients": _share(zeros, gradients),
        "zero_gradients_of_standing": _share(zeros[left], gradients[left]),
        "faults": len(faults),
        "first_fault": int(faults[0]) if len(faults) else None,
    }
    if result.overlooked is None:
        return found
    better = left & ~np.asarray(result.overlooked)
    return found | {"standing": float(left.mean()), "standing_at_second_look": float(better.mean())}


def _share(zeros: npt.NDArray[Any], gradients: npt.NDArray[Any]) -> float:
    """The share of all samples' gradients that were zero in every coordinate."""
    return int(np.sum(zeros)) / max(int(np.sum(gradients)), 1)


VANISHED = "gradients vanish: the attacked accuracy may overstate robustness"
"""The remark on attacks of whose gradients more than half were zero in every coordinate."""


def of(measured: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing an attack's numbers, from :func:`spent`.

    >>> of({"faults": 2, "first_fault": 7, "zero_gradients": 0.0})
    ['2 samples met an output or a gradient that was not finite, first at index 7']
    """
    said = []
    if count := measured["faults"]:
        said.append(
            f"{count} sample{'s' * (count > 1)} met an output or a gradient that was not finite, "
            f"first at index {measured['first_fault']}"
        )
    share = max(measured["zero_gradients"], measured.get("zero_gradients_of_standing", 0.0))
    if share > 0.5:
        said.append(f"{share:.0%} zero gradients; {VANISHED}")
    if (better := measured.get("standing_at_second_look")) is not None:
        said.append(
            f"{measured['standing']:.1%} of the samples survive this attack, at most "
            f"{better:.1%} a second look by margin ascent and random search"
        )
    return said
