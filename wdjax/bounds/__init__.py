"""From a traced program to bounds of its outputs over a region of inputs.

`record` says what is known of a primitive, and `primitives` holds one record each: its rule (of
`affine_rules`, `nonlinear` and `decisions`), its lines (of `relax`), how far its float result may
be off. `graph` flattens a program into equations; `fused` and `explicit` rewrite them into shapes
that have good bounds; `interval` walks them forwards. `network` marks what is affine; `crown` sends
coefficients (`coefficients`) backwards through it with the lines of
`relax` and `activation`, until `region` concretises them. `slopes` optimises the lines
(alpha-CROWN), `leaves` splits rectifiers, `margins` puts all of it together: bounds of every margin
of a batch. Open `margins` first, then `crown`.
"""
