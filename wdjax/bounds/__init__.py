"""From a traced program to bounds of its outputs over a region of inputs.

`graph` flattens a program into equations, in forms that have rules (`rewritten`, `explicit`,
`fused`). A primitive's interval rule, linear relaxations (lines), rounding error and properties are
one `record`, in the folder `primitives`. Rules: `affine_rules` has sums, products and moved
entries, `nonlinear` entrywise functions and maxima, `decisions` comparisons and selections, `whole`
those of integers. Lines: `relax`, and `activation` for fused ones; `continuity` finds possible
jumps.

A box (`domain`) walks forwards by the rules (`interval`), or by the affine maps between nonlinear
equations (`network`). Then `passes` sends `coefficients` backwards, through affine maps by
transposition, other equations by lines and loops step by step (`scans`), until `region`
(`moved_mass` for moved mass) minimises over the inputs; `crown` bounds all values so. `coarse` and
`first_layer` bound easy neurons without that, `slopes` optimises lines (alpha-CROWN), `coupled`
relaxes rectifiers together in l2, by norms of `spectral`. `margins` chooses among these;
`linear_outputs` bounds any linear functions of outputs. `leaves`, `rebounded` and
`output_constraint` bound subproblems for :mod:`wdjax.certify`.

Open `margins` first, then `crown` and `passes`. To add a primitive: one record in the file of its
family in `primitives` (``docs/primitives.md`` has an example), an interval rule and lines if it
needs new ones, and a row in ``tests/test_certify_ulps.py``, which measures its error.
"""
