"""Lipschitz constants of a classifier's margins: exact for small ReLU nets, bounds for others.

The constant of a margin ``z_j - z_y`` bounds how fast it can change with the distance moved.

Upper bounds on balls: `chain` writes a model as matrices with activations between them; `neurons`
bounds the activations' derivatives on the ball (called slopes here); from these `jacobian`
(intervals, zonotopes), `lipsdp` (quadratic constraints) and `branching` (branch and bound over the
masks of active neurons) bound the Jacobian; `local` has the public functions. `margin` bounds the
constants of any program over a box, `transformer` those of Transformers from weights. `certified`
turns constants, of balls or of all of space, into certified radii; `training_bounds` has
differentiable bounds.

Exact values for small ReLU nets: `cells` enumerates the polyhedra on which the net is affine;
`exact` computes the constants of the paper's Theorem 3.1 from them, and `worst_case` the worst
expected margin loss. Lower bounds: `sampled` takes the steepest Jacobians at sampled points.

Open `local` first; `chain` shows which models it accepts. To add a method: a file with a function
like ``jacobian.interval``, a name in ``METHODS`` of `local`, and a branch of its ``_bounds``.
"""

from wdjax.lipschitz.cells import Cells, Polyhedron, activation_cells, masks_at, polyhedron
from wdjax.lipschitz.certified import global_radius, verify
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
    "global_radius",
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
