"""From a traced program to bounds of its outputs over a region of inputs.

`record` declares the properties of a JAX primitive, and `primitives` holds one record for each:
its interval rule (from `affine_rules`, `nonlinear` and `decisions`), its linear relaxation, called
lines (from `relax`), and its rounding error. `graph` flattens a program into equations; `fused` and
`explicit` rewrite them into equations that have tighter bounds; `interval` walks them forwards.
`network` marks the affine equations; `crown` sends coefficients (`coefficients`) backwards through
them with the lines of `relax` and `activation`, until `region` concretises them. `slopes` optimises
the lines (alpha-CROWN), `leaves` splits ReLUs, `margins` combines all of this to bound every margin
of a batch; `linear_outputs` bounds any linear functions of the outputs over boxes. Open `margins`
first, then `crown`.
"""
