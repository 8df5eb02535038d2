"""From a traced program to bounds of its outputs over a region of inputs.

`graph` flattens a program into equations; `fused` and `explicit` rewrite them into shapes that have
good bounds; `interval` walks them forwards with the rules of `affine_rules`, `nonlinear` and
`decisions`. `network` marks what is affine; `crown` sends coefficients (`coefficients`, `terms`,
`transposition`) backwards through it with the lines of `relax` and `activation`, until `region`
concretises them. `slopes` optimises the lines (alpha-CROWN), `leaves` splits rectifiers, `margins`
puts all of it together: bounds of every margin of a batch. `ulps` says how far a float function may
be off. Open `margins` first, then `crown`.
"""
