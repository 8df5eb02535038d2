"""Lipschitz constants: exact for networks with few activation cells, bounds for others.

`chain` writes a model as matrices with activations between them. `cells` enumerates its linear
pieces, from which `exact` and `worst_case` compute constants and margins; `local` bounds constants
in a ball by `branching`, `lipsdp` or `jacobian`, with the slopes of `neurons`; `margin` bounds
constants of margins for any program, `transformer` those of Transformers. `certified` turns
constants into certificates, and `training_bounds` trains with them. Open `local` first.
"""

from wdjax.lipschitz.cells import Cells, Polyhedron, activation_cells, masks_at, polyhedron
from wdjax.lipschitz.certified import verify
from wdjax.lipschitz.chain import Chain, as_chain, relu_chain
from wdjax.lipschitz.exact import (
    Steepest,
    Theory,
    UpperConstants,
    direction_bound,
    directions,
    lower_constant,
    lower_constants_at_samples,
    theory,
    upper_constants,
)
from wdjax.lipschitz.local import METHODS, Method, global_lipschitz, jacobian_norm, local_lipschitz
from wdjax.lipschitz.sampled import sampled_lipschitz
from wdjax.lipschitz.training_bounds import LipschitzTraining, trainable_lipschitz
from wdjax.lipschitz.transformer import Settings as TransformerSettings
from wdjax.lipschitz.transformer import local_transformer_constant, transformer_constant
from wdjax.lipschitz.worst_case import worst_margin

__all__ = [
    "METHODS",
    "Cells",
    "Chain",
    "LipschitzTraining",
    "Method",
    "Polyhedron",
    "Steepest",
    "Theory",
    "TransformerSettings",
    "UpperConstants",
    "activation_cells",
    "as_chain",
    "direction_bound",
    "directions",
    "global_lipschitz",
    "jacobian_norm",
    "local_lipschitz",
    "local_transformer_constant",
    "lower_constant",
    "lower_constants_at_samples",
    "masks_at",
    "polyhedron",
    "relu_chain",
    "sampled_lipschitz",
    "theory",
    "trainable_lipschitz",
    "transformer_constant",
    "upper_constants",
    "verify",
    "worst_margin",
]
